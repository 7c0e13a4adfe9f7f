//! Locks of this host's programs (rule R14 of `docs/sharing.md`). They belong to the session of the moment; when it
//! ends, they are lost. Requests have deadlines: at its own, one that was not answered is given up.
//!
//! Locks: that of the session's state, then that of the [`Holder`]. Nobody is told of an answer while one is held.

use lamassu_lease::locks::{Answered, Asked, Holder, Lock, LockAnswer, Outcome};
use lamassu_lease::{Call, RequestNo};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

/// Is told how a request has ended.
pub type Done = Box<dyn FnOnce(Outcome) + Send>;

/// Until when an answer is awaited, and what the caller is told without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deadline {
    pub at: Instant,
    pub outcome: Outcome,
}

/// The locks of a mount, for all its sessions.
#[derive(Default)]
pub(super) struct HeldLocks(Mutex<State>);

#[derive(Default)]
struct State {
    holder: Holder,
    waiting: HashMap<RequestNo, Waiting>,
    /// The deadlines of those that wait, the nearest first.
    deadlines: BTreeMap<(Instant, RequestNo), Outcome>,
}

struct Waiting {
    done: Done,
    until: Option<Instant>,
}

/// Answers whose callers are to be told, once no lock is held.
#[derive(Default)]
#[must_use = "the callers wait"]
pub(super) struct Tell(Vec<(Done, Outcome)>);

impl Tell {
    pub fn add(&mut self, more: Tell) {
        self.0.extend(more.0);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn all(self) {
        self.0.into_iter().for_each(|(done, outcome)| done(outcome));
    }
}

impl HeldLocks {
    /// Notes a request. Returns its number and the call to send, or what the caller is to be told at once.
    pub fn ask(&self, asked: Asked, deadline: Option<Deadline>, done: Done) -> Result<(RequestNo, Call), Tell> {
        let state = &mut *self.0.lock();
        match state.holder.ask(asked) {
            Ok((request, call)) => {
                state.waiting.insert(request, Waiting { done, until: None });
                if let Some(deadline) = deadline {
                    state.set_deadline(request, deadline);
                }
                Ok((request, call))
            }
            Err(outcome) => Err(Tell(vec![(done, outcome)])),
        }
    }

    pub fn cancel(&self, request: RequestNo, deadline: Deadline) -> Option<Call> {
        let state = &mut *self.0.lock();
        let call = state.holder.cancel(request)?;
        state.set_deadline(request, deadline);
        Some(call)
    }

    /// The nearest deadline.
    pub fn nearest_deadline(&self) -> Option<Instant> {
        self.0.lock().deadlines.keys().next().map(|(at, _)| *at)
    }

    /// Gives up the requests whose deadlines have passed.
    pub fn give_up_overdue(&self, now: Instant) -> Tell {
        let state = &mut *self.0.lock();
        let mut overdue = Vec::new();
        while let Some(first) = state.deadlines.first_entry().filter(|first| first.key().0 <= now) {
            let ((_, request), outcome) = first.remove_entry();
            // It waits until it is answered, and then has no deadline.
            state.holder.abandon(request);
            overdue.push(Answered { request, outcome });
        }
        state.tell(overdue)
    }

    /// Whether a new connection is needed, which reports what this host has.
    pub fn must_report(&self) -> bool {
        self.0.lock().holder.must_report()
    }

    pub fn answer(&self, request: RequestNo, answer: LockAnswer) -> Tell {
        let state = &mut *self.0.lock();
        let answered = state.holder.answer(request, answer);
        state.tell(answered)
    }

    /// What a new connection reports, and the calls that follow.
    pub fn resumed(&self) -> (Vec<Lock>, Vec<Call>) {
        self.0.lock().holder.resumed()
    }

    /// The session has ended.
    pub fn session_ended(&self) -> Tell {
        let state = &mut *self.0.lock();
        let ended = state.holder.session_ended();
        state.tell(ended)
    }

    /// Looks at, or changes, what is known without asking the server.
    pub fn look<T>(&self, look: impl FnOnce(&mut Holder) -> T) -> T {
        look(&mut self.0.lock().holder)
    }
}

impl State {
    /// Of two deadlines the earlier one counts.
    fn set_deadline(&mut self, request: RequestNo, Deadline { at, outcome }: Deadline) {
        let Some(waiting) = self.waiting.get_mut(&request) else { return };
        if waiting.until.is_some_and(|until| until <= at) {
            return;
        }
        if let Some(later) = waiting.until.replace(at) {
            self.deadlines.remove(&(later, request));
        }
        self.deadlines.insert((at, request), outcome);
    }

    fn tell(&mut self, answered: impl IntoIterator<Item = Answered>) -> Tell {
        let done = answered.into_iter().filter_map(|Answered { request, outcome }| {
            let Waiting { done, until } = self.waiting.remove(&request)?;
            until.and_then(|at| self.deadlines.remove(&(at, request)));
            Some((done, outcome))
        });
        Tell(done.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_lease::locks::{LockKey, LockKind, Range};
    use lamassu_lease::{Mode, Object};
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    fn lock(waits: bool) -> Asked {
        let key = LockKey { file: Object(7), kind: LockKind::Range, owner: 1 };
        Asked::Lock { lock: Lock { key, range: Range::ALL, mode: Mode::Shared, pid: 1 }, handle: 5, waits }
    }

    /// Makes a request. Returns its number, and where its outcome comes.
    fn ask(locks: &HeldLocks, asked: Asked, deadline: Option<Deadline>) -> (RequestNo, Receiver<Outcome>) {
        let (told, outcome) = channel();
        let done = Box::new(move |outcome| told.send(outcome).expect("the test waits for it"));
        let Ok((request, _)) = locks.ask(asked, deadline, done) else { panic!("the server need not be asked") };
        (request, outcome)
    }

    #[test]
    fn answered_requests_leave_nothing_behind() {
        let (locks, now) = (HeldLocks::default(), Instant::now());
        let deadline = Deadline { at: now + SECOND, outcome: Outcome::Unanswered };
        for _ in 0..100 {
            let (request, outcome) = ask(&locks, lock(false), Some(deadline));
            assert_eq!(locks.nearest_deadline(), Some(deadline.at));
            locks.answer(request, LockAnswer::Done).all();
            assert_eq!(outcome.recv(), Ok(Outcome::Done));
        }
        let (_, of_the_session) = ask(&locks, lock(false), Some(deadline));
        locks.session_ended().all();
        assert_eq!(of_the_session.recv(), Ok(Outcome::Ended));
        let state = locks.0.lock();
        assert!(state.waiting.is_empty() && state.deadlines.is_empty());
        drop(state);
        assert!(locks.give_up_overdue(deadline.at).is_empty());
        assert!(!locks.must_report(), "each was answered in time");
    }

    #[test]
    fn requests_that_are_not_answered_end_at_their_deadlines_the_others_wait() {
        let (locks, now) = (HeldLocks::default(), Instant::now());
        let at = |seconds, outcome| Deadline { at: now + seconds * SECOND, outcome };
        let (_, last) = ask(&locks, lock(false), Some(at(9, Outcome::Unanswered)));
        let (_, first) = ask(&locks, lock(false), Some(at(1, Outcome::Done)));
        let (waiting, waits) = ask(&locks, lock(true), None);
        assert_eq!(locks.nearest_deadline(), Some(now + SECOND));
        assert!(locks.give_up_overdue(now + SECOND / 2).is_empty());
        assert!(!locks.must_report());
        locks.give_up_overdue(now + SECOND).all();
        assert_eq!(first.try_recv(), Ok(Outcome::Done));
        assert!(locks.must_report() && last.try_recv().is_err() && waits.try_recv().is_err());
        assert_eq!(locks.resumed().1.len(), 2, "the others are made again");
        assert!(!locks.must_report());
        // One that waits has a deadline once it is cancelled.
        assert!(locks.cancel(waiting, at(2, Outcome::Cancelled)).is_some());
        assert_eq!(locks.nearest_deadline(), Some(now + 2 * SECOND));
        locks.give_up_overdue(now + 2 * SECOND).all();
        assert_eq!(waits.try_recv(), Ok(Outcome::Cancelled));
        assert_eq!(locks.nearest_deadline(), Some(now + 9 * SECOND));
        locks.give_up_overdue(now + 9 * SECOND).all();
        assert_eq!(last.try_recv(), Ok(Outcome::Unanswered));
        assert_eq!(locks.nearest_deadline(), None);
    }

    #[test]
    fn of_two_deadlines_of_a_request_the_earlier_one_counts() {
        let now = Instant::now();
        for (asked_until, cancelled_until, expected) in [(9, 1, Outcome::Cancelled), (1, 9, Outcome::Unanswered)] {
            let locks = HeldLocks::default();
            let at = |seconds, outcome| Deadline { at: now + seconds * SECOND, outcome };
            let (request, outcome) = ask(&locks, lock(false), Some(at(asked_until, Outcome::Unanswered)));
            assert!(locks.cancel(request, at(cancelled_until, Outcome::Cancelled)).is_some());
            locks.give_up_overdue(now + SECOND).all();
            assert_eq!(outcome.try_recv(), Ok(expected));
            assert_eq!(locks.nearest_deadline(), None);
        }
    }
}
