//! Settings of the host that make mounts faster. Nothing here changes the meaning of a request or its answer.
//!
//! [`Tuning`] is the one object. The adapter reports requests to it at three points ([`Tuning::request`],
//! [`Tuning::write_back`], [`Tuning::cached_read`]). Before a file is changed it asks whether a part of the file is
//! being put into the page cache ([`Tuning::is_filling`], [`Tuning::wait_filled`]). Everything else happens on threads
//! of its own, between [`Tuning::start`] and [`Tuning::stop`].
//!
//! `awake` keeps processors from sleeping during bursts of requests; `dirty` sets how many dirty pages the kernel may
//! hold; `windows` puts parts of files into the page cache that are read at random.

mod awake;
mod dirty;
mod windows;

pub(crate) use dirty::DirtyLimits;

use crate::options::KeepAwake;
use awake::Awake;
use dirty::{DirtyShare, PAUSES};
use lamassu_vault::{HandleId, Ino, Upkeep};
use parking_lot::Mutex;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use windows::Windows;

/// Time between calls of [`Mount::maintain`].
const ROUND: Duration = Duration::from_secs(2);
/// After this many rounds, memory that was freed is given back.
const TRIM_EVERY: u32 = 15;

/// What the tuning needs of the mount. None of this is called on a request thread. [`Mount::maintain`] and
/// [`Mount::with_handle`] catch panics of the file system below.
pub(crate) trait Mount: Send + Sync {
    /// One round of the file system's own upkeep.
    fn maintain(&self);
    /// Does the file system's work that is due between rounds.
    fn work_off(&self);
    /// Runs `body` with a handle for reading; does nothing if there is none.
    fn with_handle(&self, ino: Ino, body: &mut dyn FnMut(HandleId));
    /// Whether the page cache may be filled with contents of this file: it is not open for writing, and its contents
    /// may stay in memory.
    fn may_fill(&self, ino: Ino) -> bool;
    /// Reads until the buffer is full or the file ends; `None`: it cannot be read.
    fn read(&self, handle: HandleId, offset: u64, buffer: &mut [u8]) -> Option<usize>;
    /// Puts contents into the page cache.
    fn fill(&self, ino: Ino, offset: u64, bytes: &[u8]);
}

#[derive(Default)]
struct State {
    stopping: bool,
    threads: Vec<JoinHandle<()>>,
}

/// The host tuning of one mount.
pub(crate) struct Tuning {
    awake: Awake,
    dirty: DirtyShare,
    windows: Windows,
    state: Mutex<State>,
    /// Wakes the thread for work between rounds, and for the end.
    upkeep: Upkeep,
}

impl Tuning {
    /// An error only if processors cannot be kept awake although that is asked for.
    pub(crate) fn new(keep_awake: KeepAwake, upkeep: Upkeep) -> io::Result<Self> {
        Ok(Tuning {
            awake: Awake::new(keep_awake)?,
            dirty: DirtyShare::default(),
            windows: Windows::default(),
            state: Mutex::default(),
            upkeep,
        })
    }

    /// Sets the files that limit the kernel's dirty pages.
    pub(crate) fn set_dirty_limits(&self, limits: DirtyLimits) {
        self.dirty.set_limits(limits);
    }

    /// Notes a request.
    pub(crate) fn request(&self) {
        self.awake.request();
    }

    /// Notes a write of `len` bytes that comes from the kernel's write-back.
    pub(crate) fn write_back(&self, len: usize) {
        self.dirty.note(len);
    }

    /// Notes a read that fills the page cache. `is_written`: whether the file is open for writing.
    pub(crate) fn cached_read(&self, ino: Ino, at: &Range<u64>, is_written: impl FnOnce() -> bool) {
        if windows::is_small(at) && !is_written() {
            self.windows.note(ino, at);
        }
    }

    /// Whether a part of this file is being put into the page cache.
    pub(crate) fn is_filling(&self, ino: Ino) -> bool {
        self.windows.is_filling(ino)
    }

    /// Waits until that has ended. Never on a request thread.
    pub(crate) fn wait_filled(&self, ino: Ino) {
        self.windows.wait_filled(ino);
    }

    /// Starts the threads.
    pub(crate) fn start(self: &Arc<Self>, mount: &Arc<dyn Mount>) -> io::Result<()> {
        let mut state = self.state.lock();
        let mut spawn = |name: &str, body: fn(&Tuning, &dyn Mount)| {
            let (tuning, mount) = (self.clone(), mount.clone());
            let thread = Builder::new().name(name.into()).spawn(move || body(&tuning, &*mount))?;
            state.threads.push(thread);
            Ok::<_, io::Error>(())
        };
        spawn("lamassu-upkeep", |tuning, mount| tuning.run_rounds(mount))?;
        spawn("lamassu-ahead", |tuning, mount| tuning.windows.run(mount))?;
        spawn("lamassu-awake", |tuning, _| tuning.awake.run())
    }

    fn run_rounds(&self, mount: &dyn Mount) {
        let mut rounds = 0_u32;
        let mut next = Instant::now() + ROUND;
        loop {
            let is_wanted = self.upkeep.wait_until(next);
            if self.state.lock().stopping {
                return;
            }
            if is_wanted && Instant::now() < next {
                mount.work_off();
                continue;
            }
            mount.maintain();
            self.dirty.end_after(PAUSES);
            rounds = rounds.wrapping_add(1);
            if rounds.is_multiple_of(TRIM_EVERY) {
                give_memory_back();
            }
            next = Instant::now() + ROUND;
        }
    }

    /// Ends the threads.
    pub(crate) fn stop(&self) {
        self.windows.stop();
        self.awake.stop();
        let threads = {
            let mut state = self.state.lock();
            state.stopping = true;
            self.upkeep.want();
            std::mem::take(&mut state.threads)
        };
        for thread in threads {
            // A thread that was lost to a panic must not keep the file system from being closed.
            let _ = thread.join();
        }
    }
}

/// Without this the process keeps the memory of its largest buffers: the C library returns memory by itself only from
/// the end of the heap.
fn give_memory_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: releases pages that no allocation uses; safe to call from any thread at any time (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}
