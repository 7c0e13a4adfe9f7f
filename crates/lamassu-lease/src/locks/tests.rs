use super::*;
use crate::{Mode, Object, RequestNo, SessionId};
use std::cell::Cell;

const A: SessionId = SessionId(1);
const B: SessionId = SessionId(2);
const FILE: Object = Object(7);

fn lock(kind: LockKind, owner: u64, (first, last): (u64, u64), mode: Mode) -> Lock {
    let range = Range::new(first, last).unwrap();
    Lock { key: LockKey { file: FILE, kind, owner }, range, mode, pid: owner as u32 }
}

fn ranges(owner: u64, bytes: (u64, u64), mode: Mode) -> Lock {
    lock(LockKind::Range, owner, bytes, mode)
}

/// The answers of a table to one request after another, each with all that it leads to.
struct Asking {
    table: Table,
    number: u64,
}

/// Does all that is left in a table.
fn served(table: &mut Table, answers: &mut Answers) {
    while !table.is_served() {
        table.serve(&mut Work::default(), answers);
    }
}

impl Asking {
    fn new() -> Asking {
        Asking { table: Table::default(), number: 0 }
    }

    /// Returns the request's number, and all answers by session.
    fn lock(&mut self, session: SessionId, lock: Lock, waits: bool) -> (RequestNo, Vec<(SessionId, LockAnswer)>) {
        self.number += 1;
        let request = RequestNo(self.number);
        let mut answers = self.table.lock(session, request, lock, waits, &mut Work::default());
        served(&mut self.table, &mut answers);
        (request, answers.into_iter().map(|(to, _, answer)| (to, answer)).collect())
    }

    fn cancel(&mut self, session: SessionId, request: RequestNo) -> Answers {
        self.table.cancel(session, request, &mut Work::default())
    }

    /// Whether a session can have these locks, which it reports.
    fn resume(&mut self, session: SessionId, locks: &[Lock]) -> bool {
        let can_be = self.table.resume(session, locks).is_ok();
        served(&mut self.table, &mut Answers::new());
        can_be
    }

    fn unlock(&mut self, session: SessionId, lock: Lock) -> Vec<(SessionId, LockAnswer)> {
        self.number += 1;
        let mut answers = self.table.unlock(session, RequestNo(self.number), lock.key, lock.range);
        served(&mut self.table, &mut answers);
        answers.into_iter().map(|(to, _, answer)| (to, answer)).collect()
    }
}

use LockAnswer::{Cancelled, Conflict as InTheWay, Deadlock, Done, TooMany};
use Mode::{Exclusive, Shared};

#[test]
fn a_lock_of_another_owner_is_in_the_way_and_told_and_waited_for() {
    let mut table = Asking::new();
    assert_eq!(table.lock(A, ranges(1, (10, 19), Exclusive), false).1, [(A, Done)]);
    let refused = table.lock(B, ranges(1, (0, 10), Shared), false).1;
    let held = Conflict { range: Range::new(10, 19).unwrap(), mode: Exclusive, pid: 0 };
    assert_eq!(refused, [(B, InTheWay(held))]);
    let of_the_same_host = table.lock(A, ranges(2, (0, 10), Shared), false).1;
    assert_eq!(of_the_same_host, [(A, InTheWay(Conflict { pid: 1, ..held }))]);
    assert_eq!(table.table.test(B, &ranges(1, (20, 29), Exclusive), &mut Work::default()), Done);
    assert_eq!(table.lock(B, ranges(1, (0, 30), Exclusive), true).1, []);
    assert_eq!(table.lock(B, ranges(2, (15, 15), Shared), true).1, []);
    // flock(2) does not conflict with fcntl(2).
    assert_eq!(table.lock(B, lock(LockKind::Whole, 1, (0, u64::MAX), Exclusive), false).1, [(B, Done)]);
    assert_eq!(table.unlock(A, ranges(1, (10, 14), Exclusive)), [(A, Done)]);
    // The oldest request that can be granted is granted.
    assert_eq!(table.unlock(A, ranges(1, (0, u64::MAX), Exclusive)), [(A, Done), (B, Done)]);
    assert_eq!(table.unlock(B, ranges(1, (15, 15), Exclusive)), [(B, Done), (B, Done)]);
}

#[test]
fn a_weaker_lock_lets_others_in() {
    let mut table = Asking::new();
    assert_eq!(table.lock(A, ranges(1, (0, 9), Exclusive), false).1, [(A, Done)]);
    assert_eq!(table.lock(B, ranges(1, (0, 9), Shared), true).1, []);
    assert_eq!(table.lock(A, ranges(1, (0, 9), Shared), true).1, [(A, Done), (B, Done)]);
    // Both want more: one waits, the other one would wait for it.
    assert_eq!(table.lock(A, ranges(1, (0, 9), Exclusive), true).1, []);
    assert_eq!(table.lock(B, ranges(1, (0, 9), Exclusive), true).1, [(B, Deadlock)]);
    assert_eq!(table.unlock(B, ranges(1, (0, 9), Shared)), [(B, Done), (A, Done)]);
}

#[test]
fn a_circle_of_three_owners_is_found() {
    let mut table = Asking::new();
    for owner in 0..3 {
        assert_eq!(table.lock(A, ranges(owner, (owner, owner), Exclusive), false).1, [(A, Done)]);
    }
    assert_eq!(table.lock(A, ranges(0, (1, 1), Shared), true).1, []);
    assert_eq!(table.lock(A, ranges(1, (2, 2), Shared), true).1, []);
    assert_eq!(table.lock(A, ranges(2, (0, 0), Shared), true).1, [(A, Deadlock)]);
    assert_eq!(table.lock(A, ranges(2, (0, 0), Shared), false).1.len(), 1, "it may ask without waiting");
}

/// As in Linux: otherwise two holders that want more would wait for each other.
#[test]
fn a_lock_of_a_whole_file_is_given_up_before_a_stronger_one_waits_or_is_refused() {
    let whole = |owner, mode| lock(LockKind::Whole, owner, (0, u64::MAX), mode);
    let mut table = Asking::new();
    for session in [A, B] {
        assert_eq!(table.lock(session, whole(1, Shared), false).1, [(session, Done)]);
    }
    assert_eq!(table.lock(A, whole(1, Exclusive), true).1, []);
    assert_eq!(table.lock(B, whole(1, Exclusive), true).1, [(B, Done)]);
    assert_eq!(table.unlock(B, whole(1, Shared)), [(B, Done), (A, Done)]);
    assert_eq!(table.lock(A, whole(1, Shared), false).1, [(A, Done)]);
    assert_eq!(table.lock(B, whole(1, Shared), false).1, [(B, Done)]);
    // Refused, it has lost the lock that it had.
    assert!(matches!(table.lock(B, whole(1, Exclusive), false).1[..], [(B, InTheWay(_))]));
    assert_eq!(table.lock(A, whole(1, Exclusive), false).1, [(A, Done)]);
}

#[test]
fn a_request_that_is_cancelled_waits_no_longer_and_one_that_was_granted_stays_so() {
    let mut table = Asking::new();
    assert_eq!(table.lock(A, ranges(1, (0, 9), Exclusive), false).1, [(A, Done)]);
    let (request, _) = table.lock(B, ranges(1, (0, 9), Exclusive), true);
    assert_eq!(table.cancel(A, request), [], "it is of another session");
    assert_eq!(table.cancel(B, request), [(B, request, Cancelled)]);
    assert_eq!(table.cancel(B, request), []);
    assert_eq!(table.unlock(A, ranges(1, (0, 9), Exclusive)), [(A, Done)]);
    assert_eq!(table.table, Table::default(), "nothing is left");
}

#[test]
fn a_session_has_no_more_locks_than_its_limit_and_can_report_all_of_them() {
    let mut table = Asking::new();
    let single = |at: u64| ranges(1, (2 * at, 2 * at), Shared);
    for at in 0..LOCKS_MAX as u64 - 1 {
        assert_eq!(table.lock(A, single(at), false).1, [(A, Done)]);
    }
    let long = ranges(1, (1 << 40, (1 << 40) + 9), Shared);
    // One range within another one makes three of one.
    let _ = table.table.unlock(A, RequestNo(0), single(0).key, single(0).range);
    assert_eq!(table.lock(A, long, false).1, [(A, Done)]);
    assert_eq!(table.lock(A, ranges(1, ((1 << 40) + 4, (1 << 40) + 5), Exclusive), false).1, [(A, Done)]);
    assert_eq!(table.lock(A, single(0), false).1, [(A, TooMany)]);
    let (_, split) = (0, table.unlock(A, ranges(1, ((1 << 40) + 1, (1 << 40) + 1), Shared)));
    assert_eq!(split, [(A, TooMany)]);
    assert_eq!(table.lock(B, ranges(1, (1, 1), Exclusive), false).1, [(B, Done)]);
    let of_long = [((0, 3), Shared), ((4, 5), Exclusive), ((6, 9), Shared)];
    let of_long = of_long.map(|((first, last), mode)| ranges(1, ((1 << 40) + first, (1 << 40) + last), mode));
    let all: Vec<Lock> = (1..LOCKS_MAX as u64 - 1).map(single).chain(of_long).collect();
    assert_eq!(all.len(), LOCKS_MAX + 1);
    let before = table.table.clone();
    assert!(table.resume(A, &all));
    assert_eq!(table.table, before);
    let more: Vec<Lock> = (0..LOCKS_MAX as u64 + 2).map(single).collect();
    assert!(!table.resume(A, &more));
}

/// A host whose connections break at any moment, and its server.
#[test]
fn what_a_host_reports_is_what_it_certainly_has() {
    let key = LockKey { file: FILE, kind: LockKind::Range, owner: 1 };
    let mut holder = Holder::default();
    let ask = |holder: &mut Holder, bytes, mode| {
        let asked = Asked::Lock { lock: ranges(1, bytes, mode), handle: 5, waits: true };
        holder.ask(asked).map(|(request, _)| request)
    };
    let first = ask(&mut holder, (0, 99), Exclusive).unwrap();
    assert_eq!(holder.resumed().0, [], "not granted yet");
    assert_eq!(holder.answer(first, Done), Some(Answered { request: first, outcome: Outcome::Done }));
    assert_eq!(holder.answer(first, Done), None);
    assert_eq!(holder.resumed(), (vec![ranges(1, (0, 99), Exclusive)], vec![]));
    // The answers to these may be lost.
    let weaker = ask(&mut holder, (10, 19), Shared).unwrap();
    let (unlock, call) = holder.ask(Asked::Unlock { key, range: Range::new(50, u64::MAX).unwrap() }).unwrap();
    let (report, again) = holder.resumed();
    let expected = [ranges(1, (0, 9), Exclusive), ranges(1, (10, 19), Shared), ranges(1, (20, 49), Exclusive)];
    assert_eq!((report, again.len(), again.contains(&call)), (expected.to_vec(), 2, true));
    let _ = (holder.answer(weaker, Done), holder.answer(unlock, Done));
    assert_eq!(holder.resumed(), (expected.to_vec(), vec![]));
    // A stronger lock of a part is not certain either.
    let more = ask(&mut holder, (0, 49), Exclusive).unwrap();
    assert_eq!(holder.resumed().0, expected);
    assert_eq!(holder.cancel(more), Some(crate::Call::CancelLock { request: more }));
    assert_eq!(holder.cancel(more), None);
    assert_eq!(holder.resumed().1.len(), 2, "the request, and that it no longer waits");
    assert_eq!(holder.answer(more, Cancelled).map(|answered| answered.outcome), Some(Outcome::Cancelled));
    assert_eq!(holder.resumed(), (expected.to_vec(), vec![]));
}

#[test]
fn who_has_lost_a_lock_gets_no_other_until_it_has_unlocked_or_closed() {
    let held = |holder: &mut Holder, owner, handle| {
        let asked = Asked::Lock { lock: ranges(owner, (owner, owner + 5), Exclusive), handle, waits: false };
        let (request, _) = holder.ask(asked)?;
        Ok::<_, Outcome>(holder.answer(request, Done).unwrap().outcome)
    };
    let mut holder = Holder::default();
    for (owner, handle) in [(1, 11), (2, 12), (3, 12)] {
        assert_eq!(held(&mut holder, owner, handle), Ok(Outcome::Done));
    }
    let asked = Asked::Test { lock: ranges(9, (0, 0), Shared) };
    let (waiting, _) = holder.ask(asked).unwrap();
    assert_eq!(holder.session_ended(), [Answered { request: waiting, outcome: Outcome::Ended }]);
    assert!(holder.is_lost(11) && holder.is_lost(12) && !holder.is_lost(13));
    assert_eq!(holder.resumed(), (vec![], vec![]), "the next session has none of them");
    assert_eq!(held(&mut holder, 1, 11), Err(Outcome::Lost));
    assert_eq!(held(&mut holder, 4, 11), Ok(Outcome::Done), "another owner has lost nothing");
    let unlock =
        |owner, last| Asked::Unlock { key: ranges(owner, (0, 0), Shared).key, range: Range::new(0, last).unwrap() };
    assert_eq!(holder.ask(unlock(1, 3)), Err(Outcome::Done));
    assert!(holder.is_lost(11), "a part of it is still locked");
    assert_eq!(holder.ask(unlock(1, 9)), Err(Outcome::Done));
    assert!(!holder.is_lost(11) && holder.is_lost(12));
    assert_eq!(held(&mut holder, 1, 11), Ok(Outcome::Done));
    assert_eq!(holder.closes(FILE, 2), Some(unlock(2, u64::MAX)));
    let ends = holder.closed(12);
    assert_eq!(ends, [unlock(2, u64::MAX), unlock(3, u64::MAX)]);
    for end in ends {
        assert_eq!(holder.ask(end), Err(Outcome::Done));
    }
    assert!(!holder.is_lost(12) && holder.closes(FILE, 2).is_none());
    assert_eq!(holder.resumed().0.len(), 2, "the locks of owners 1 and 4");
}

/// Otherwise the host would report, on a later connection, what others may have been given since.
#[test]
fn a_host_has_no_more_than_it_has_reported() {
    let mut holder = Holder::default();
    let ask = |holder: &mut Holder, lock| holder.ask(Asked::Lock { lock, handle: 5, waits: true }).unwrap().0;
    let first = ask(&mut holder, ranges(1, (0, 9), Exclusive));
    assert!(holder.answer(first, Done).is_some());
    let longer = ask(&mut holder, ranges(1, (0, 19), Shared));
    assert_eq!(holder.resumed().0, [ranges(1, (0, 9), Shared)]);
    assert!(holder.answer(longer, Cancelled).is_some());
    assert_eq!(holder.resumed(), (vec![ranges(1, (0, 9), Shared)], vec![]));
}

#[test]
fn a_lock_of_a_whole_file_is_kept_while_it_is_asked_for_again() {
    let whole = |mode| lock(LockKind::Whole, 1, (0, u64::MAX), mode);
    for mode in [Shared, Exclusive] {
        let mut holder = Holder::default();
        let ask = |holder: &mut Holder, mode| {
            holder.ask(Asked::Lock { lock: whole(mode), handle: 5, waits: true }).unwrap().0
        };
        let first = ask(&mut holder, mode);
        assert!(holder.answer(first, Done).is_some());
        let again = ask(&mut holder, mode);
        assert_eq!(holder.resumed().0, [whole(mode)]);
        assert!(holder.abandon(again));
        assert_eq!(holder.resumed(), (vec![whole(mode)], vec![]));
        // One of another mode gives it up.
        let other = ask(&mut holder, if mode == Shared { Exclusive } else { Shared });
        assert_eq!(holder.resumed().0, []);
        assert!(holder.answer(other, Cancelled).is_some());
        assert_eq!(holder.resumed(), (vec![], vec![]));
    }
}

/// The server may have carried out the request after it has answered the others.
#[test]
fn answers_are_ignored_after_a_request_was_given_up_until_the_next_report() {
    let mut holder = Holder::default();
    let ask = |holder: &mut Holder, mode| {
        holder.ask(Asked::Lock { lock: ranges(1, (0, 9), mode), handle: 5, waits: true }).unwrap()
    };
    let (first, call) = ask(&mut holder, Exclusive);
    let (weaker, _) = ask(&mut holder, Shared);
    assert!(holder.abandon(weaker));
    assert_eq!(holder.answer(first, Done), None);
    assert_eq!(holder.resumed(), (vec![], vec![call]), "it is asked for again");
    assert_eq!(holder.answer(first, Done), Some(Answered { request: first, outcome: Outcome::Done }));
    assert_eq!(holder.resumed().0, [ranges(1, (0, 9), Exclusive)]);
    // Another session has a connection of its own, and no report is due.
    let (weaker, _) = ask(&mut holder, Shared);
    assert!(holder.abandon(weaker));
    assert_eq!(holder.session_ended(), []);
    let other = holder.ask(Asked::Test { lock: ranges(2, (0, 9), Shared) }).unwrap().0;
    assert!(holder.answer(other, Done).is_some());
}

/// Threads, or processes after fork(2), may ask for locks of one open file at the same time.
#[test]
fn a_lock_that_came_after_a_request_that_waits_is_kept_when_that_is_cancelled() {
    let whole = |mode| lock(LockKind::Whole, 1, (0, u64::MAX), mode);
    let ask =
        |holder: &mut Holder, mode| holder.ask(Asked::Lock { lock: whole(mode), handle: 5, waits: true }).unwrap().0;
    let waits_while_another_is_granted = || {
        let mut holder = Holder::default();
        let waiting = ask(&mut holder, Exclusive);
        let granted = ask(&mut holder, Shared);
        assert!(holder.answer(granted, Done).is_some());
        (holder, waiting)
    };
    let (mut holder, waiting) = waits_while_another_is_granted();
    assert!(holder.answer(waiting, Cancelled).is_some());
    assert_eq!(holder.resumed(), (vec![whole(Shared)], vec![]));
    let (mut holder, waiting) = waits_while_another_is_granted();
    assert!(holder.abandon(waiting));
    assert_eq!(holder.resumed(), (vec![whole(Shared)], vec![]));
    // Made again, it gives the lock up again.
    let (mut holder, waiting) = waits_while_another_is_granted();
    assert_eq!(holder.resumed().0, []);
    assert!(holder.answer(waiting, Cancelled).is_some());
    assert_eq!(holder.resumed(), (vec![], vec![]));
}

/// Only a host that means ill reports such a lock.
#[test]
fn what_conflicts_with_another_session_cannot_be_reported() {
    let mut table = Asking::new();
    assert_eq!(table.lock(A, ranges(1, (0, 9), Shared), false).1, [(A, Done)]);
    let before = table.table.clone();
    for (mode, may_be) in [(Exclusive, false), (Shared, true)] {
        let reported = table.table.resume(B, &[ranges(1, (9, 12), mode)]);
        assert_eq!(reported, if may_be { Ok(()) } else { Err(CannotHave { beside: Some(A) }) });
    }
    assert_eq!(table.lock(A, ranges(1, (9, 9), Exclusive), false).1.len(), 1, "B has what it reported");
    assert!(table.resume(B, &[]));
    assert_eq!(table.table, before);
}

/// What one host can have: many owners, and many requests that wait for one of them. Each call is compared with few of
/// them, and leaves the table to the next one.
#[test]
fn a_call_looks_only_at_what_it_may_let_in() {
    const OWNERS: u64 = 6000;
    let mut table = Asking::new();
    let checks = |table: &mut Asking, call: &mut dyn FnMut(&mut Asking)| {
        let before = super::table::CHECKS.with(Cell::get);
        call(table);
        super::table::CHECKS.with(Cell::get) - before
    };
    let single = |owner: u64, at: u64, mode| ranges(owner, (2 * at, 2 * at), mode);
    assert_eq!(table.lock(B, single(1, 0, Exclusive), false).1, [(B, Done)]);
    for waits in 0..WAITING_MAX as u64 {
        assert_eq!(table.lock(A, single(waits, 0, Exclusive), true).1, []);
    }
    assert_eq!(table.lock(A, single(0, 0, Shared), true).1, [(A, TooMany)]);
    let granted = checks(&mut table, &mut |table| {
        for owner in 1..OWNERS {
            assert_eq!(table.lock(A, single(owner, owner, Shared), false).1, [(A, Done)]);
        }
    });
    assert_eq!(granted as u64, OWNERS - 1, "one for each");
    let refused = checks(&mut table, &mut |table| {
        assert_eq!(table.lock(B, single(2, 1, Exclusive), false).1.len(), 1);
    });
    assert_eq!(refused, 1);
    let elsewhere = checks(&mut table, &mut |table| {
        assert_eq!(table.unlock(A, single(1, 1, Shared)), [(A, Done)]);
    });
    assert_eq!(elsewhere, 0, "nobody waits for that");
    let before_it = ranges(2, (0, 2), Shared);
    assert_eq!(table.lock(A, before_it, true).1, [(A, TooMany)]);
    assert_eq!(table.lock(B, single(1, 1, Exclusive), false).1, [(B, Done)]);
    let touched = checks(&mut table, &mut |table| {
        assert_eq!(table.lock(B, single(1, 0, Shared), false).1, [(B, Done)]);
    });
    assert_eq!(touched, 1 + WAITING_MAX, "those who wait there");
    let nothing = checks(&mut table, &mut |table| {
        assert_eq!(table.unlock(A, single(1, 1, Shared)), [(A, Done)]);
    });
    assert_eq!(nothing, 0, "nothing was unlocked");
    assert_eq!(table.unlock(B, single(1, 0, Exclusive)), [(B, Done), (A, Done)]);
}

/// Each lock that is granted here is a part of a stronger one. Requests that go on waiting are not looked at for each.
#[test]
fn locks_that_become_weaker_cost_one_more_look_at_what_waits() {
    const EACH: u64 = 500;
    let mut table = Asking::new();
    for (owner, at) in [(1, 0), (2, 1000)] {
        assert_eq!(table.lock(B, ranges(owner, (at, at), Exclusive), false).1, [(B, Done)]);
    }
    for waits in 0..EACH {
        assert_eq!(table.lock(A, ranges(waits, (0, 1000), Exclusive), true).1, []);
    }
    // Each owner has a byte, and asks to read from there to the one that B has: past the bytes of those before it.
    for owner in 1..=EACH {
        assert_eq!(table.lock(A, ranges(owner + EACH, (1000 - owner, 1000 - owner), Exclusive), false).1, [(A, Done)]);
        assert_eq!(table.lock(A, ranges(owner + EACH, (1000 - owner, 1000), Shared), true).1, []);
    }
    let before = super::table::CHECKS.with(Cell::get);
    let answers = table.unlock(B, ranges(2, (1000, 1000), Exclusive));
    assert_eq!(answers.len() as u64, 1 + EACH);
    let checks = super::table::CHECKS.with(Cell::get) - before;
    assert_eq!(checks as u64, 3 * EACH, "those that go on waiting twice, the others once");
}

/// All sessions together: who has many of them would have each unlock look at very many.
#[test]
fn no_more_requests_wait_for_locks_of_one_file_than_may() {
    let mut table = Asking::new();
    assert_eq!(table.lock(B, ranges(1, (0, 0), Exclusive), false).1, [(B, Done)]);
    let mut granted = 0;
    for session in 10..14 {
        for owner in 0..WAITING_MAX as u64 {
            let answers = table.lock(SessionId(session), ranges(owner, (0, 0), Exclusive), true).1;
            granted += usize::from(answers.is_empty());
        }
    }
    assert_eq!(granted, WAITING_OF_ALL_MAX);
}

/// All that one host can have the server look at: many locks of its own, which are in the way of none of its requests,
/// and a chain of requests, each of which lets the next one in.
#[test]
fn what_one_unlock_leads_to_is_done_in_parts() {
    const LOCKED: u64 = LOCKS_MAX as u64 - CHAIN;
    const CHAIN: u64 = WAITING_MAX as u64;
    let mut table = Asking::new();
    let link = |at: u64| 2 * (LOCKED + at);
    for at in 0..LOCKED {
        assert_eq!(table.lock(A, ranges(0, (2 * at, 2 * at), Shared), false).1, [(A, Done)]);
    }
    let (first, last) = (ranges(9, (link(0), link(0)), Exclusive), CHAIN - 1);
    assert_eq!(table.lock(SessionId(3), first, false).1, [(SessionId(3), Done)]);
    for owner in 1..=last {
        assert_eq!(table.lock(B, ranges(owner, (link(owner), link(owner)), Exclusive), false).1, [(B, Done)]);
    }
    let all = || ranges(0, (0, u64::MAX), Exclusive);
    for _ in 0..CHAIN {
        assert_eq!(table.lock(A, all(), true).1, []);
    }
    for owner in (1..=last).rev() {
        assert_eq!(table.lock(B, ranges(owner, (link(owner - 1), link(owner)), Shared), true).1, []);
    }
    let counts = || (super::table::CHECKS.with(Cell::get), crate::lock::LOOKED_AT.with(Cell::get));
    let mut answers = table.table.unlock(SessionId(3), RequestNo(0), first.key, first.range);
    let mut parts = 0;
    while !table.table.is_served() {
        let before = counts();
        table.table.serve(&mut Work::default(), &mut answers);
        let (checks, looked_at) = (counts().0 - before.0, counts().1 - before.1);
        assert!(checks <= Work::AT_ONCE + WAITING_OF_ALL_MAX && looked_at <= checks, "{checks} {looked_at}");
        parts += 1;
    }
    assert_eq!((answers.len() as u64, parts > 1), (1 + last, true));
}
