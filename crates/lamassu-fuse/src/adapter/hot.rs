//! Random reads that keep coming to one window of a file: the whole window is put into the page cache.
//!
//! The kernel reads ahead of sequential reads alone. A random read of one block costs a request of its own, in which one block is fetched and verified by
//! itself; a whole window is verified at several times that rate, and none of its blocks is asked for again.
//!
//! Never stores what must not stay in memory. Never puts old bytes over new ones: a window is stored only while nobody has the file open for writing, so
//! that no page of it can be dirty, and who wants to open it so, or to set its size, is answered when the store under way has ended. Never on a request thread: the kernel may hold a page that is to be
//! stored until the read that fills it has been answered.

use super::{Shared, guarded};
use crate::fs::FileSystem;
use fuser::INodeNo;
use lamassu_vault::{Access, HandleId, Ino};
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that are stored at a time.
const WINDOW: u64 = 512 << 10;
/// Longer reads are the kernel's own reading ahead.
const SMALL: u64 = 32 << 10;
/// So many reads within so long make a window hot: with 4 KiB each, a sixteenth of it has been asked for. Random reads of a file that memory cannot hold do not
/// come to one window that fast.
const HOT_READS: u32 = 8;
const HOT_WITHIN: Duration = Duration::from_secs(4);
/// Windows with a count, at most; then all are counted anew.
const TRACKED_MAX: usize = 1 << 16;
/// Windows waiting to be stored, at most.
const QUEUE_MAX: usize = 64;

/// How often a window was read lately.
struct Heat {
    since: Instant,
    reads: u32,
    /// Doubled each time: a window that is asked for again after it was stored did not stay in memory.
    needed: u32,
}

#[derive(Default)]
struct State {
    heat: HashMap<(Ino, u64), Heat>,
    queue: VecDeque<(Ino, u64)>,
    /// Whose window is being stored.
    storing: Option<Ino>,
    stopping: bool,
}

/// See the module's head.
#[derive(Default)]
pub(super) struct Hot {
    state: Mutex<State>,
    work: Condvar,
    stored: Condvar,
}

/// Held while a window is stored.
struct Storing<'a>(&'a Hot);

impl Drop for Storing<'_> {
    fn drop(&mut self) {
        self.0.state.lock().storing = None;
        self.0.stored.notify_all();
    }
}

impl Hot {
    /// Counts a read from the page cache of a file that nobody writes.
    fn note(&self, ino: Ino, at: &Range<u64>) {
        let mut state = self.state.lock();
        if state.heat.len() >= TRACKED_MAX {
            state.heat.clear();
        }
        let (window, now) = (at.start / WINDOW, Instant::now());
        let cold = || Heat { since: now, reads: 0, needed: HOT_READS };
        let heat = state.heat.entry((ino, window)).or_insert_with(cold);
        if now.duration_since(heat.since) > HOT_WITHIN {
            (heat.since, heat.reads) = (now, 0);
        }
        heat.reads += 1;
        if heat.reads >= heat.needed {
            (heat.reads, heat.needed) = (0, heat.needed.saturating_mul(2));
            if state.queue.len() < QUEUE_MAX {
                state.queue.push_back((ino, window));
                self.work.notify_one();
            }
        }
    }

    /// The next window to store; `None` at the end.
    fn next(&self) -> Option<(Ino, u64)> {
        let mut state = self.state.lock();
        loop {
            if state.stopping {
                return None;
            }
            if let Some(next) = state.queue.pop_front() {
                return Some(next);
            }
            self.work.wait(&mut state);
        }
    }

    pub(super) fn stop(&self) {
        self.state.lock().stopping = true;
        self.work.notify_all();
    }

    fn is_storing(&self, ino: Ino) -> bool {
        self.state.lock().storing == Some(ino)
    }

    pub(super) fn wait(&self, ino: Ino) {
        self.stored.wait_while(&mut self.state.lock(), |state| state.storing == Some(ino));
    }
}

/// Counts as a writer of the file for as long as it lives: no store of its pages begins.
pub(super) struct Claim<F: FileSystem>(Arc<Shared<F>>, Ino);

impl<F: FileSystem> Claim<F> {
    fn new(shared: &Arc<Shared<F>>, ino: Ino) -> Self {
        shared.add_use(ino, true, false);
        Claim(shared.clone(), ino)
    }
}

impl<F: FileSystem> Drop for Claim<F> {
    fn drop(&mut self) {
        self.0.drop_use(self.1, true);
    }
}

impl<F: FileSystem> Shared<F> {
    /// A read through a handle that is for the page cache.
    pub(super) fn note_read(&self, ino: Ino, at: &Range<u64>) {
        if at.end - at.start <= SMALL && !self.is_written(ino) {
            self.hot.note(ino, at);
        }
    }

    /// Runs `job` when no window of this file is being stored; none begins to be until the claim is dropped.
    pub(super) fn unstored(
        self: &Arc<Self>,
        ino: Ino,
        op: &'static str,
        job: impl FnOnce(&Arc<Self>, Claim<F>) + Send + 'static,
    ) {
        // In this order: a store that begins looks for claims after it is seen here.
        let claim = Claim::new(self, ino);
        let shared = self.clone();
        self.after_store(ino, op, move |_| job(&shared, claim));
    }

    /// Runs `job` when the store of this file's pages that is under way, if there is one, has ended.
    pub(super) fn after_store(self: &Arc<Self>, ino: Ino, op: &'static str, job: impl FnOnce(&Self) + Send + 'static) {
        if !self.hot.is_storing(ino) {
            return job(self);
        }
        self.aside(op, move |shared| {
            shared.hot.wait(ino);
            job(shared);
        });
    }

    /// Stores hot windows until the end of the mount.
    pub(super) fn run_hot(&self) {
        let mut buffer = Vec::new();
        while let Some((ino, window)) = self.hot.next() {
            guarded("read ahead", || {
                // A handle of our own: as long as it is open, the inode number means this file.
                let Ok(handle) = self.fs.open_file(ino, Access { read: true, ..Access::default() }) else { return };
                self.store_window(ino, handle, window * WINDOW, &mut buffer);
                if let Err(error) = self.fs.release(handle) {
                    tracing::debug!(%error, ino, "close after reading ahead");
                }
            });
        }
    }

    fn store_window(&self, ino: Ino, handle: HandleId, offset: u64, buffer: &mut Vec<u8>) {
        let Some(notifier) = self.notifier.get() else { return };
        let _storing = {
            let mut state = self.hot.state.lock();
            // Asked here, and not only when it was opened: who takes the leave back waits for the store that it may find under way.
            if self.is_written(ino) || !self.may_stay(ino) {
                return;
            }
            state.storing = Some(ino);
            Storing(&self.hot)
        };
        buffer.resize(WINDOW as usize, 0);
        // What cannot be read is told to who asks for it.
        let Ok(len) = self.read_full(handle, offset, buffer, false) else { return };
        if len > 0
            && let Err(error) = notifier.store(INodeNo(ino), offset, &buffer[..len])
        {
            tracing::debug!(%error, ino, "a window could not be stored");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queued(hot: &Hot) -> Vec<(Ino, u64)> {
        hot.state.lock().queue.iter().copied().collect()
    }

    #[test]
    fn a_window_that_was_read_often_is_stored_once() {
        let hot = Hot::default();
        let read = |window: u64, n: u64| hot.note(7, &(window * WINDOW + n * 4096..window * WINDOW + (n + 1) * 4096));
        for n in 0..7 {
            read(0, n);
            read(3, n);
        }
        assert!(queued(&hot).is_empty());
        read(3, 99);
        assert_eq!(queued(&hot), [(7, 3)]);
        for n in 0..15 {
            read(3, n);
        }
        assert_eq!(queued(&hot), [(7, 3)], "the second time takes twice as many");
        read(3, 15);
        assert_eq!(queued(&hot), [(7, 3), (7, 3)]);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let hot = Hot::default();
        for window in 0..3 * TRACKED_MAX as u64 {
            hot.note(1, &(window * WINDOW..window * WINDOW + 1));
        }
        assert!(hot.state.lock().heat.len() <= TRACKED_MAX);
        for window in 0..1000 {
            (0..HOT_READS).for_each(|_| hot.note(2, &(window * WINDOW..window * WINDOW + 1)));
        }
        assert_eq!(queued(&hot).len(), QUEUE_MAX);
        hot.stop();
        assert_eq!(hot.next(), None);
    }
}
