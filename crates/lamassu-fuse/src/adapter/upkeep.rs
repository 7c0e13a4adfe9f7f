//! The threads that live as long as the mount (periodic commits, changes that waited for a thaw, windows read ahead, bursts of requests), and the end of it all.

use super::gather::PAUSES;
use super::{Shared, guarded};
use crate::fs::FileSystem;
use lamassu_vault::VaultError;
use parking_lot::{Condvar, Mutex};
use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Time between calls of `FileSystem::maintain`.
const ROUND: Duration = Duration::from_secs(2);
/// After so many rounds memory that was freed is given back.
const TRIM_EVERY: u32 = 15;

#[derive(Default)]
struct State {
    /// The threads run and the file system is in use: it is to be closed at the end.
    live: bool,
    stopping: bool,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
pub(super) struct Upkeep {
    state: Mutex<State>,
    stop: Condvar,
}

impl<F: FileSystem> Shared<F> {
    /// Starts the threads; to be called once the kernel has accepted the mount. From here on the end of the session closes the file system.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut state = self.upkeep.state.lock();
        let deferred = self.clone();
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| Builder::new().name(name.into()).spawn(body);
        state.threads.push(spawn("lamassu-thawed", Box::new(move || deferred.gate.run_deferred()))?);
        let rounds = self.clone();
        state.threads.push(spawn("lamassu-upkeep", Box::new(move || rounds.run_rounds()))?);
        let hot = self.clone();
        state.threads.push(spawn("lamassu-ahead", Box::new(move || hot.run_hot()))?);
        let awake = self.clone();
        state.threads.push(spawn("lamassu-awake", Box::new(move || awake.awake.run()))?);
        state.live = true;
        Ok(())
    }

    fn run_rounds(&self) {
        let mut state = self.upkeep.state.lock();
        let mut rounds = 0_u32;
        while !state.stopping {
            if !self.upkeep.stop.wait_for(&mut state, ROUND).timed_out() {
                continue;
            }
            drop(state);
            self.maintain();
            self.unload_idle();
            self.gather.end_after(PAUSES);
            rounds = rounds.wrapping_add(1);
            if rounds.is_multiple_of(TRIM_EVERY) {
                give_memory_back();
            }
            state = self.upkeep.state.lock();
        }
    }

    /// One round of upkeep. While frozen or while changes wait there is none; the next round will do.
    fn maintain(&self) {
        let Some(_pass) = self.gate.enter() else { return };
        guarded("maintain", || {
            if let Err(error) = self.fs.maintain() {
                tracing::error!(%error, "background commit failed; it is tried again, and fsync reports it");
            }
        });
    }

    /// Without a pass: unloading waits for changes that a freeze would hold back while it waits for the pass.
    fn unload_idle(&self) {
        guarded("unload", || {
            if let Err(error) = self.fs.unload_idle() {
                tracing::error!(%error, "not everything could be committed when it was unloaded");
            }
        });
    }

    /// After the last request: thaws, carries out what waited (those changes were accepted), ends the threads, closes the file system.
    pub(super) fn finish(&self) {
        self.thaw_for_unmount();
        self.gate.stop();
        self.hot.stop();
        self.awake.stop();
        let (threads, live) = {
            let mut state = self.upkeep.state.lock();
            state.stopping = true;
            self.upkeep.stop.notify_all();
            (std::mem::take(&mut state.threads), std::mem::take(&mut state.live))
        };
        for thread in threads {
            // What can panic in them is guarded; a lost thread must not keep the file system from being closed.
            let _ = thread.join();
        }
        if !live {
            return;
        }
        let closed = guarded("close", || self.fs.close()).unwrap_or_else(|| {
            Err(VaultError::Io { op: "close", source: io::Error::other("a bug: panic while closing, see the log") })
        });
        if let Err(error) = closed {
            tracing::error!(%error, "closing failed");
            *self.closed.lock() = Some(error);
        }
    }
}

/// What buffers took at their largest would otherwise stay with the process: the C library returns memory by itself only where it ends.
fn give_memory_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: releases pages that no allocation uses; safe to call from any thread at any time (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}
