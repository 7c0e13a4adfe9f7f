//! Requests about locks of programs: those that come before every session is back, and the work that calls leave.
//!
//! One call could have the server answer tens of thousands of others. So each call and each tick does a part of what is
//! left, and [`Server::wake_after`] asks for the next one.

use super::{Server, Step};
use crate::locks::{Answers, LOCKS_MAX, LockAnswer, LockKey, Range, Work};
use crate::{Call, Reply, SessionId};

impl Server {
    /// Whether some sessions have not reported their locks: they may have any.
    pub(super) fn awaits_reports(&self) -> bool {
        self.sessions.values().any(|session| !session.is_back)
    }

    /// Whether requests about locks wait: until every session is back, or behind those that have waited for that.
    fn defers(&self) -> bool {
        !self.early.is_empty() || self.awaits_reports()
    }

    /// Whether a call may add to the locks of a session: a range, or a request that waits.
    pub fn may_add_locks(&self, session: SessionId, call: &Call) -> bool {
        match call {
            Call::Lock { .. } => true,
            Call::Unlock { key, range, .. } => self.defers() || self.locks.is_split_by(session, *key, *range),
            Call::TestLock { .. } | Call::CancelLock { .. } => self.defers(),
            _ => false,
        }
    }

    /// Whether an unlock would make two ranges of one.
    pub fn is_split_by(&self, session: SessionId, key: LockKey, range: Range) -> bool {
        self.locks.is_split_by(session, key, range)
    }

    /// How many locks a session has, with its requests that wait.
    pub fn locks_of(&self, session: SessionId) -> usize {
        self.locks.count(session) + self.early_of.get(&session).copied().unwrap_or_default()
    }

    /// Handles a request about locks.
    pub(super) fn lock_call(&mut self, session: SessionId, call: Call, step: &mut Step) {
        if !self.defers() {
            let answers = self.lock_now(session, call, &mut Work::default());
            return answered(answers, step);
        }
        let its = self.early_of.get(&session).copied().unwrap_or_default();
        match call {
            Call::Lock { request, .. } | Call::Unlock { request, .. } | Call::TestLock { request, .. }
                if its >= LOCKS_MAX =>
            {
                step.replies.push((session, Reply::Lock { request, answer: LockAnswer::TooMany }));
            }
            _ if its < 2 * LOCKS_MAX => {
                self.early.push_back((session, call));
                self.early_of.insert(session, its + 1);
            }
            _ => {}
        }
    }

    fn lock_now(&mut self, session: SessionId, call: Call, work: &mut Work) -> Answers {
        match call {
            Call::Lock { request, lock, waits } => self.locks.lock(session, request, lock, waits, work),
            Call::Unlock { request, key, range } => self.locks.unlock(session, request, key, range),
            Call::TestLock { request, lock } => vec![(session, request, self.locks.test(session, &lock, work))],
            Call::CancelLock { request } => self.locks.cancel(session, request, work),
            _ => Vec::new(),
        }
    }

    /// Does a part of what calls have left: grants locks that have become free, and handles requests that have waited
    /// until every session was back.
    pub(super) fn catch_up(&mut self, step: &mut Step) {
        let (mut work, mut answers) = (Work::default(), Answers::new());
        self.locks.serve(&mut work, &mut answers);
        if !self.awaits_reports() {
            while work.goes_on()
                && let Some((session, call)) = self.next_early()
            {
                work.did(1);
                answers.extend(self.lock_now(session, call, &mut work));
                self.locks.serve(&mut work, &mut answers);
            }
        }
        answered(answers, step);
    }

    /// Whether something is left.
    pub fn has_work(&self) -> bool {
        !self.locks.is_served() || (!self.early.is_empty() && !self.awaits_reports())
    }

    fn next_early(&mut self) -> Option<(SessionId, Call)> {
        let (session, call) = self.early.pop_front()?;
        let count = self.early_of.get(&session).map_or(0, |count| count.saturating_sub(1));
        match count {
            0 => self.early_of.remove(&session),
            _ => self.early_of.insert(session, count),
        };
        Some((session, call))
    }

    /// A session asks for nothing of what it has asked for early.
    pub(super) fn forget_early(&mut self, session: SessionId) {
        if self.early_of.remove(&session).is_some() {
            self.early.retain(|(of, _)| *of != session);
        }
    }
}

fn answered(answers: Answers, step: &mut Step) {
    let replies = answers.into_iter().map(|(session, request, answer)| (session, Reply::Lock { request, answer }));
    step.replies.extend(replies);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locks::{Lock, LockKind};
    use crate::server::Durable;
    use crate::{Millis, Mode, Object, RequestNo, Terms};

    const START: Millis = Millis(5);

    fn lock(owner: u64, byte: u64) -> Lock {
        let key = LockKey { file: Object(7), kind: LockKind::Range, owner };
        Lock { key, range: Range::new(byte, byte).unwrap(), mode: Mode::Exclusive, pid: 1 }
    }

    fn report(locks: Vec<Lock>) -> Call {
        Call::Resume { number: 1, held: Vec::new(), kept: Vec::new(), taken_over: Vec::new(), locks }
    }

    fn answered(step: &Step) -> Vec<(SessionId, u64)> {
        let of_locks = |(to, reply): &(SessionId, Reply)| match reply {
            Reply::Lock { request, .. } => Some((*to, request.0)),
            _ => None,
        };
        step.replies.iter().filter_map(of_locks).collect()
    }

    /// Each of them may have the server look at all owners of a file.
    #[test]
    fn what_was_asked_before_all_were_back_is_answered_in_parts_and_in_order() {
        const OWNERS: u64 = LOCKS_MAX as u64;
        const EARLY: u64 = 20;
        let (mut before, _) = Server::start(Terms::DEFAULT, Durable::default(), START);
        let [a, b, c] = [(); 3].map(|()| before.join(START).0);
        let (mut server, _) = Server::start(Terms::DEFAULT, before.durable().clone(), START);
        let asks = |server: &mut Server, from, request| {
            // The last owner is in the way.
            let lock = lock(OWNERS, OWNERS);
            server.call(from, Call::TestLock { request: RequestNo(request), lock }, START)
        };
        for session in [a, b] {
            let _ = server.call(session, report(Vec::new()), START);
        }
        for request in 0..EARLY {
            assert_eq!(asks(&mut server, a, request), Step::default());
            assert_eq!(asks(&mut server, b, request), Step::default());
        }
        let step = server.call(c, report((1..=OWNERS).map(|owner| lock(owner, owner)).collect()), START);
        let mut all = answered(&step);
        assert!((1..=1 + Work::AT_ONCE / OWNERS as usize).contains(&all.len()), "{}", all.len());
        assert_eq!(server.wake_after(START), Some(START + Millis(1)));
        // What is asked now comes after that, and counts with it.
        let left = server.locks_of(a);
        let asked = asks(&mut server, a, EARLY);
        assert!(!answered(&asked).contains(&(a, EARLY)));
        all.extend(answered(&asked));
        assert!(left < EARLY as usize && server.locks_of(a) + answered(&asked).len() / 2 <= left + 1);
        while server.has_work() {
            let part = answered(&server.tick(START));
            assert!((1..=1 + Work::AT_ONCE / OWNERS as usize).contains(&part.len()), "{}", part.len());
            all.extend(part);
        }
        let in_order = (0..EARLY).flat_map(|request| [(a, request), (b, request)]).chain([(a, EARLY)]);
        assert_eq!(all, in_order.collect::<Vec<_>>());
        assert_eq!((server.locks_of(a), server.locks_of(b)), (0, 0));
        assert_eq!(answered(&asks(&mut server, a, 99)), [(a, 99)], "at once");
    }

    /// It is as if its host waited for nothing else.
    #[test]
    fn who_has_another_connection_is_not_answered_what_it_asked_for_before_while_others_are() {
        const OWNERS: u64 = LOCKS_MAX as u64;
        let (mut before, _) = Server::start(Terms::DEFAULT, Durable::default(), START);
        let [a, b] = [(); 2].map(|()| before.join(START).0);
        let (mut server, _) = Server::start(Terms::DEFAULT, before.durable().clone(), START);
        let _ = server.call(a, report(Vec::new()), START);
        for request in 0..20 {
            let call = Call::TestLock { request: RequestNo(request), lock: lock(OWNERS, OWNERS) };
            let _ = server.call(a, call, START);
        }
        let _ = server.call(b, report((1..=OWNERS).map(|owner| lock(owner, owner)).collect()), START);
        assert!(server.has_work());
        let Call::Resume { held, kept, taken_over, locks, .. } = report(Vec::new()) else { panic!("it is a report") };
        let again = server.call(a, Call::Resume { number: 2, held, kept, taken_over, locks }, START);
        assert_eq!((again, server.has_work(), server.locks_of(a)), (Step::default(), false, 0));
    }
}
