//! Holds changes back while the file system is frozen, without blocking request threads.
//!
//! A change either passes at once ([`Gate::enter`]) or is queued with everything it needs to reply ([`Gate::defer`]);
//! one thread ([`Gate::run_deferred`]) carries queued changes out in their order after the thaw. While any wait, later
//! changes queue behind them, so no two changes swap places. The queue is bounded by the kernel: each caller has one
//! request, and write-back at most `max_background`.

use lamassu_vault::Ino;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;

/// A change with its reply.
pub(super) type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    frozen: bool,
    stopping: bool,
    /// Changes being carried out.
    active: usize,
    queue: VecDeque<(Ino, Job)>,
}

#[derive(Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

/// The right to carry one change out; [`Gate::close`] waits for all of them.
pub(super) struct Pass<'a>(&'a Gate);

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.active -= 1;
        if state.frozen && state.active == 0 {
            self.0.changed.notify_all();
        }
    }
}

impl Gate {
    /// A pass, or `None`: then the change must go to [`Gate::defer`].
    pub(super) fn enter(&self) -> Option<Pass<'_>> {
        let mut state = self.state.lock();
        if state.frozen || !state.queue.is_empty() {
            return None;
        }
        state.active += 1;
        Some(Pass(self))
    }

    /// Queues a change (or an operation that must come after queued changes).
    pub(super) fn defer(&self, ino: Ino, job: Job) {
        self.state.lock().queue.push_back((ino, job));
        self.changed.notify_all();
    }

    /// Whether changes of this inode wait.
    pub(super) fn holds(&self, ino: Ino) -> bool {
        self.state.lock().queue.iter().any(|(waiting, _)| *waiting == ino)
    }

    /// Lets no further change pass and waits for those under way. False: it was closed already, or the mount is ending.
    pub(super) fn close(&self) -> bool {
        let mut state = self.state.lock();
        if state.frozen || state.stopping {
            return false;
        }
        state.frozen = true;
        while state.active > 0 {
            self.changed.wait(&mut state);
        }
        true
    }

    /// Lets changes pass again.
    pub(super) fn open(&self) {
        self.state.lock().frozen = false;
        self.changed.notify_all();
    }

    /// (closed, changes waiting)
    pub(super) fn status(&self) -> (bool, usize) {
        let state = self.state.lock();
        (state.frozen, state.queue.len())
    }

    /// Makes [`Gate::run_deferred`] return once nothing waits. Changes that a frozen gate holds back are carried out as
    /// well.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        state.frozen = false;
        state.stopping = true;
        self.changed.notify_all();
    }

    /// Carries deferred changes out until [`Gate::stop`].
    pub(super) fn run_deferred(&self) {
        loop {
            let mut state = self.state.lock();
            let job = loop {
                if !state.frozen {
                    if let Some((_, job)) = state.queue.pop_front() {
                        break job;
                    }
                    if state.stopping {
                        return;
                    }
                }
                self.changed.wait(&mut state);
            };
            state.active += 1;
            drop(state);
            let _pass = Pass(self);
            job();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc;

    #[test]
    fn changes_wait_for_the_thaw_and_keep_their_order() {
        let gate = Arc::new(Gate::default());
        let runner = std::thread::spawn({
            let gate = gate.clone();
            move || gate.run_deferred()
        });
        assert!(gate.enter().is_some());
        assert!(gate.close());
        assert!(!gate.close());
        let (sender, receiver) = mpsc::channel();
        for i in 0..100u64 {
            assert!(gate.enter().is_none());
            let sender = sender.clone();
            gate.defer(i % 3, Box::new(move || sender.send(i).unwrap()));
        }
        assert!(gate.holds(2) && !gate.holds(3));
        assert!(receiver.try_recv().is_err());
        gate.open();
        assert_eq!((0..100).map(|_| receiver.recv().unwrap()).collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
        gate.stop();
        runner.join().unwrap();
        assert_eq!(gate.status(), (false, 0));
        assert!(!gate.close(), "a freeze that comes too late");
        assert_eq!(gate.status(), (false, 0));
    }

    #[test]
    fn closing_waits_for_changes_under_way() {
        let gate = Gate::default();
        let pass = gate.enter().unwrap();
        std::thread::scope(|scope| {
            let closer = scope.spawn(|| gate.close());
            while !gate.status().0 {
                std::thread::yield_now();
            }
            assert!(!closer.is_finished());
            drop(pass);
            assert!(closer.join().unwrap());
        });
    }
}
