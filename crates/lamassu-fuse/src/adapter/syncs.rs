//! Concurrent syncs. A sync waits for several barriers of the disk, and there are few request threads. So the first
//! sync runs on its request thread, which is the fastest way for a single program that syncs. Meanwhile other syncs run
//! on threads of their own: requests go on, and syncs that wait at the same time share commits of the anchor.

use super::gate::Job;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

/// Most threads for syncs. If all are busy, a sync waits for one.
const THREADS_MAX: usize = 16;
/// A thread without work ends after this time.
const IDLE: Duration = Duration::from_secs(5);

#[derive(Default)]
struct State {
    /// A request thread is in a sync.
    is_first_busy: bool,
    queue: VecDeque<Job>,
    /// Threads that exist, and how many of them wait for work.
    threads: usize,
    idle: usize,
    is_stopping: bool,
}

#[derive(Default)]
pub(super) struct Syncs {
    state: Mutex<State>,
    changed: Condvar,
}

/// A sync on its request thread: while this lives, others run on other threads.
struct First<'a>(&'a Syncs);

impl Drop for First<'_> {
    fn drop(&mut self) {
        self.0.state.lock().is_first_busy = false;
    }
}

impl Syncs {
    /// Carries a sync out, here or on another thread. It must not panic.
    pub(super) fn run(self: &Arc<Self>, sync: Job) {
        let mut state = self.state.lock();
        if state.is_first_busy && !state.is_stopping && self.has_thread(&mut state) {
            state.queue.push_back(sync);
            self.changed.notify_all();
            return;
        }
        let first = (!state.is_first_busy).then(|| {
            state.is_first_busy = true;
            First(self)
        });
        drop(state);
        sync();
        drop(first);
    }

    /// Whether there is a thread for one more sync, now or later; one is started if all are busy.
    fn has_thread(self: &Arc<Self>, state: &mut State) -> bool {
        if state.idle <= state.queue.len() && state.threads < THREADS_MAX {
            let syncs = self.clone();
            let started = Builder::new().name("lamassu-sync".into()).spawn(move || syncs.work());
            state.threads += usize::from(started.is_ok());
        }
        state.threads > 0
    }

    /// The work of a thread.
    fn work(&self) {
        let mut state = self.state.lock();
        while let Some(sync) = self.next(&mut state) {
            MutexGuard::unlocked(&mut state, sync);
        }
        state.threads -= 1;
        self.changed.notify_all();
    }

    fn next(&self, state: &mut MutexGuard<'_, State>) -> Option<Job> {
        loop {
            if let Some(sync) = state.queue.pop_front() {
                return Some(sync);
            }
            if state.is_stopping {
                return None;
            }
            state.idle += 1;
            let is_over = self.changed.wait_for(state, IDLE).timed_out();
            state.idle -= 1;
            if is_over && state.queue.is_empty() {
                return None;
            }
        }
    }

    /// Waits for all syncs, and ends the threads.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        state.is_stopping = true;
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |state| state.threads > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A sync that waits keeps no thread from others; each is done once, and the end waits for all.
    #[test]
    fn syncs_at_once_wait_for_one_another_and_for_nobody_else() {
        const AT_ONCE: usize = 9;
        let syncs = Arc::new(Syncs::default());
        let done = Arc::new(AtomicUsize::new(0));
        for _ in 0..20 {
            // None of them ends before all have begun, and two threads give them out.
            let all = Arc::new(Barrier::new(AT_ONCE));
            std::thread::scope(|scope| {
                let sync = || {
                    let (all, done) = (all.clone(), done.clone());
                    Box::new(move || {
                        all.wait();
                        done.fetch_add(1, Ordering::Relaxed);
                    })
                };
                let first = sync();
                scope.spawn(|| syncs.run(first));
                while !syncs.state.lock().is_first_busy {
                    std::thread::yield_now();
                }
                (1..AT_ONCE).for_each(|_| syncs.run(sync()));
            });
        }
        syncs.stop();
        assert_eq!(done.load(Ordering::Relaxed), 20 * AT_ONCE);
        assert!(syncs.state.lock().threads == 0);
        // The calling thread carries out a sync that arrives after the stop.
        let late = done.clone();
        syncs.run(Box::new(move || late.store(0, Ordering::Relaxed)));
        assert_eq!(done.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn with_more_than_there_may_be_threads_some_wait() {
        let syncs = Arc::new(Syncs::default());
        let done = Arc::new(AtomicUsize::new(0));
        syncs.state.lock().is_first_busy = true;
        for _ in 0..THREADS_MAX * 20 {
            let done = done.clone();
            let sync = move || {
                done.fetch_add(1, Ordering::Relaxed);
            };
            syncs.run(Box::new(sync));
            assert!(syncs.state.lock().threads <= THREADS_MAX);
        }
        syncs.stop();
        assert_eq!(done.load(Ordering::Relaxed), THREADS_MAX * 20);
    }
}
