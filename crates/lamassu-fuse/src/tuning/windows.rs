//! Puts windows of files that are read at random into the page cache.
//!
//! The kernel reads ahead of sequential reads alone. A random read of one block costs a request of its own, and the
//! block is fetched and verified by itself. A whole window is verified at several times that rate, and none of its
//! blocks is asked for again.
//!
//! Never fills with contents that must not stay in memory. Never puts old bytes over new ones: a window is filled only
//! while the file is not open for writing, so that no page of it can be dirty. A request that opens the file for
//! writing, or sets its size, waits for the end of a fill under way (`adapter::uses`). Never on a request thread: the
//! kernel may hold a page that is to be filled until the read of it has been answered.

use super::Mount;
use lamassu_vault::{HandleId, Ino};
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Bytes that are filled at a time.
const WINDOW: u64 = 512 << 10;
/// Longer reads are the kernel's own read-ahead.
const SMALL: u64 = 32 << 10;
/// This many reads within this time make a window hot: with 4 KiB each, a sixteenth of it has been read. Random reads
/// of a file that memory cannot hold do not come to one window that fast.
const HOT_READS: u32 = 8;
const HOT_WITHIN: Duration = Duration::from_secs(4);
/// Most windows with a count; at that number all counts start anew.
const TRACKED_MAX: usize = 1 << 16;
/// Most windows that wait to be filled.
const QUEUE_MAX: usize = 64;

/// How often a window was read lately.
struct Heat {
    since: Instant,
    reads: u32,
    /// Doubled each time: a window that is read again after it was filled did not stay in memory.
    needed: u32,
}

#[derive(Default)]
struct State {
    heat: HashMap<(Ino, u64), Heat>,
    queue: VecDeque<(Ino, u64)>,
    /// The file whose window is being filled.
    filling: Option<Ino>,
    stopping: bool,
}

/// Fills windows of randomly read files into the page cache.
#[derive(Default)]
pub(super) struct Windows {
    state: Mutex<State>,
    work: Condvar,
    filled: Condvar,
}

/// Whether a read is too short to be the kernel's own read-ahead.
pub(super) fn is_small(at: &Range<u64>) -> bool {
    at.end - at.start <= SMALL
}

/// Held while a window is filled.
struct Filling<'a>(&'a Windows);

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.0.state.lock().filling = None;
        self.0.filled.notify_all();
    }
}

impl Windows {
    /// Counts a small read into the page cache, of a file that is not open for writing.
    pub(super) fn note(&self, ino: Ino, at: &Range<u64>) {
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

    /// The next window to fill; `None` at the end.
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

    pub(super) fn is_filling(&self, ino: Ino) -> bool {
        self.state.lock().filling == Some(ino)
    }

    pub(super) fn wait_filled(&self, ino: Ino) {
        self.filled.wait_while(&mut self.state.lock(), |state| state.filling == Some(ino));
    }

    /// Fills hot windows until [`Windows::stop`].
    pub(super) fn run(&self, mount: &dyn Mount) {
        let mut buffer = vec![0; WINDOW as usize];
        while let Some((ino, window)) = self.next() {
            // As long as this handle is open, the inode number means this file.
            mount.with_handle(ino, &mut |handle| self.fill(mount, ino, handle, window * WINDOW, &mut buffer));
        }
    }

    fn fill(&self, mount: &dyn Mount, ino: Ino, handle: HandleId, offset: u64, buffer: &mut [u8]) {
        let _filling = {
            let mut state = self.state.lock();
            // Checked under this lock: a writer that comes later sees the fill, and waits for its end.
            if !mount.may_fill(ino) {
                return;
            }
            state.filling = Some(ino);
            Filling(self)
        };
        // A failed read is reported to the caller that asks for the data.
        if let Some(len) = mount.read(handle, offset, buffer).filter(|len| *len > 0) {
            mount.fill(ino, offset, &buffer[..len]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queued(windows: &Windows) -> Vec<(Ino, u64)> {
        windows.state.lock().queue.iter().copied().collect()
    }

    #[test]
    fn a_window_that_was_read_often_is_stored_once() {
        let windows = Windows::default();
        let read =
            |window: u64, n: u64| windows.note(7, &(window * WINDOW + n * 4096..window * WINDOW + (n + 1) * 4096));
        for n in 0..7 {
            read(0, n);
            read(3, n);
        }
        assert!(queued(&windows).is_empty());
        read(3, 99);
        assert_eq!(queued(&windows), [(7, 3)]);
        for n in 0..15 {
            read(3, n);
        }
        assert_eq!(queued(&windows), [(7, 3)], "the second time takes twice as many");
        read(3, 15);
        assert_eq!(queued(&windows), [(7, 3), (7, 3)]);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let windows = Windows::default();
        for window in 0..3 * TRACKED_MAX as u64 {
            windows.note(1, &(window * WINDOW..window * WINDOW + 1));
        }
        assert!(windows.state.lock().heat.len() <= TRACKED_MAX);
        for window in 0..1000 {
            (0..HOT_READS).for_each(|_| windows.note(2, &(window * WINDOW..window * WINDOW + 1)));
        }
        assert_eq!(queued(&windows).len(), QUEUE_MAX);
        windows.stop();
        assert_eq!(windows.next(), None);
    }
}
