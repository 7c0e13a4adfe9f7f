//! The leases of a vault, as its server sees them.
//!
//! * **Exclusion.** A lease is granted only if no other session holds a conflicting one. Requests for an object are
//!   granted in the order of arrival. If one has to wait, the conflicting leases are recalled.
//! * **Expiry.** A session without a heartbeat for a term has ended, for good: its number is never used again. The
//!   objects that it held exclusively are *abandoned*: the next holder gets an exclusive lease, and takes the object
//!   over first.
//! * **Holding on.** If a holder has not released a recalled lease after a term, its heartbeats are no longer answered.
//!   So it stops, and then its session ends, as a silent one does. That counts as long as somebody waits for the lease:
//!   when the last request is withdrawn, the recall is void. A lease is not counted whose holder says that it keeps it
//!   ([`Call::Keep`]): the others wait until it is released, or the holder is silent. Nor is time counted in which no
//!   message was handled ([`Server::was_at_work`]).
//! * **Restart.** Sessions, exclusive leases and abandoned objects are durable; shared leases are not. After a restart
//!   every session counts as heard of at that moment. Nothing is granted exclusively until each session has reported
//!   its leases, or has expired.
//! * **Connections.** Of a session the newest connection counts. Its first call is a report of what the session has.
//!   Each report has a number, so one of an earlier connection that arrives later is none.
//!
//! The changes of a step are made durable before its replies are sent ([`Step`]). A server that cannot make a change
//! durable stops.

mod held;
mod locks;

use self::held::{Held, Lease};
use crate::locks::{CannotHave, Lock, Table};
use crate::{Call, Grant, GrantNo, Millis, Mode, Object, Reply, SessionId, Terms};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub use crate::durable::{Change, Durable};

/// Numbers of sessions and grants have the number of the server's run from this bit up, so they never repeat.
const RUN_SHIFT: u32 = 40;

/// The result of a call: first all changes are made durable, together; then the replies are sent, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[must_use = "the changes are not durable, and the replies are not sent"]
pub struct Step {
    /// changes, in order
    pub changes: Vec<Change>,
    /// replies, each with its session
    pub replies: Vec<(SessionId, Reply)>,
    /// sessions that end although they sent heartbeats, since they did not release a recalled lease
    pub held_on: Vec<SessionId>,
    /// sessions that end since their report makes no sense, each with the one whose lock it contradicts, if it is that
    pub misreported: Vec<(SessionId, Option<SessionId>)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Session {
    /// Time of its last message; for a session that has not come back, the server's start.
    heard: Millis,
    /// Whether it has reported its leases since the server started.
    is_back: bool,
    /// Whether its last heartbeat was left unanswered.
    is_refused: bool,
    /// Whether its messages are ignored ([`Server::turn_out`]).
    is_out: bool,
    /// The number of the newest report that was heard.
    reported: u64,
}

impl Session {
    fn heard_at(now: Millis, is_back: bool) -> Session {
        Session { heard: now, is_back, is_refused: false, is_out: false, reported: 0 }
    }
}

/// The leases of one vault.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Server {
    terms: Terms,
    durable: Durable,
    sessions: BTreeMap<SessionId, Session>,
    objects: BTreeMap<Object, Held>,
    locks: Table,
    /// Requests about locks that came before every session had reported its locks.
    early: VecDeque<(SessionId, Call)>,
    /// How many of them a session has.
    early_of: BTreeMap<SessionId, usize>,
    /// How many numbers were given in this run.
    given: u64,
}

impl Server {
    /// Starts from the durable state, at `now`.
    pub fn start(terms: Terms, durable: Durable, now: Millis) -> (Server, Step) {
        let (mut server, mut step) = (Server::start_again(terms, durable, 0, now), Step::default());
        server.change(&mut step, Change::Run(server.durable.runs + 1));
        (server, step)
    }

    /// The same without a new run: for a process that had these leases before, and has given so many numbers since the
    /// run began ([`Server::given`]). It gives no more of them in another place.
    pub fn start_again(terms: Terms, durable: Durable, given: u64, now: Millis) -> Server {
        let sessions = durable.sessions.iter().map(|id| (*id, Session::heard_at(now, false))).collect();
        let mut server = Server {
            terms,
            durable,
            sessions,
            objects: BTreeMap::new(),
            locks: Table::default(),
            early: VecDeque::new(),
            early_of: BTreeMap::new(),
            given,
        };
        for (object, (session, number)) in server.durable.exclusive.clone() {
            let lease = Lease::new(Mode::Exclusive, number, now);
            server.objects.entry(object).or_default().leases.insert(session, lease);
        }
        server
    }

    /// How many numbers were given in this run.
    pub fn given(&self) -> u64 {
        self.given
    }

    /// The durable state after all changes so far.
    pub fn durable(&self) -> &Durable {
        &self.durable
    }

    /// Begins a session.
    pub fn join(&mut self, now: Millis) -> (SessionId, Step) {
        let mut step = self.expire(now);
        let session = SessionId(self.next_number());
        self.sessions.insert(session, Session::heard_at(now, true));
        self.change(&mut step, Change::Began(session));
        self.catch_up(&mut step);
        (session, step)
    }

    /// Handles a call of a session.
    pub fn call(&mut self, session: SessionId, call: Call, now: Millis) -> Step {
        let mut step = self.expire(now);
        let holds_on = self.holds_on(session, now);
        let Some(known) = self.sessions.get_mut(&session) else {
            step.replies.push((session, Reply::Ended));
            return step;
        };
        if known.is_out {
            step.replies.push((session, Reply::Ended));
            return step;
        }
        if !known.is_back && !matches!(call, Call::Resume { .. }) {
            // The call comes from a connection that ended with the restart.
            return step;
        }
        if let Call::Resume { number, .. } = call {
            if number <= known.reported {
                return step;
            }
            known.reported = number;
        }
        match call {
            // An answer would let the session go on.
            Call::Heartbeat { .. } if holds_on => known.is_refused = true,
            Call::Heartbeat { beat } => {
                known.heard = now;
                known.is_refused = false;
                step.replies.push((session, Reply::Alive { beat }));
            }
            Call::Resume { held, kept, taken_over, locks, .. } => {
                // What was decided before the report, also by this step, must not reach the new connection (R10).
                step.replies.retain(|(of, _)| *of != session);
                self.resume(session, (&held, &kept, &taken_over, &locks), now, &mut step);
            }
            Call::Acquire { request, object, mode } => {
                self.objects.entry(object).or_default().request(session, request, mode);
                self.serve(object, now, &mut step);
            }
            Call::Release { grant, keeps } => self.release(session, grant, keeps, now, &mut step),
            Call::Keep { grant, kept } => self.keep(session, grant, kept, now),
            Call::TakenOver { grant } => {
                if self.holds(session, grant.object, grant.number) == Some(Mode::Exclusive) {
                    self.taken_over(grant.object, &mut step);
                    self.serve(grant.object, now, &mut step);
                }
            }
            Call::Lock { .. } | Call::Unlock { .. } | Call::TestLock { .. } | Call::CancelLock { .. } => {
                self.lock_call(session, call, &mut step);
            }
            Call::Leave => self.end(session, false, now, &mut step),
        }
        self.catch_up(&mut step);
        step
    }

    /// Sessions that end with the next call, unless they are heard of before.
    pub fn overdue(&self, now: Millis) -> impl Iterator<Item = SessionId> {
        let is_over = move |session: &Session| session.heard + self.terms.term() <= now;
        self.sessions.iter().filter(move |(_, session)| is_over(session)).map(|(id, _)| *id)
    }

    /// A message of a session has arrived, and waits to be handled. Meanwhile nothing else of the session is read, so
    /// that it counts as heard of; unless it came too late for a lease to be released in time.
    pub fn has_arrived(&mut self, session: SessionId, arrived: Millis, now: Millis) {
        if self.holds_on(session, arrived) {
            return;
        }
        if let Some(known) = self.sessions.get_mut(&session).filter(|known| !known.is_out) {
            known.heard = known.heard.max(now);
        }
    }

    /// The process was suspended. Messages of sessions may still be unread, so that all sessions count as heard of now,
    /// and whoever was asked to release a lease has a term from now on: without the server it could commit nothing. No
    /// session ends sooner for that.
    pub fn was_away(&mut self, now: Millis) {
        self.sessions.values_mut().for_each(|session| session.heard = session.heard.max(now));
        self.move_deadlines(|asked| asked.max(now));
    }

    /// From `since` on no message was handled, since whoever uses these leases had other work. Whoever was asked to
    /// release a lease could not commit what it has to commit first, so this time does not count. Its term does not
    /// begin anew: messages that keep the leases busy gain no more than the time they take. What has arrived meanwhile
    /// is told before this ([`Server::has_arrived`]), as if it had arrived at `since`.
    pub fn was_at_work(&mut self, since: Millis, now: Millis) {
        let took = Millis(now.0.saturating_sub(since.0));
        // Of a pause in that time it is known already.
        self.move_deadlines(|asked| (asked + took).min(now));
    }

    fn move_deadlines(&mut self, moved: impl Fn(Millis) -> Millis) {
        let leases = self.objects.values_mut().flat_map(|held| held.leases.values_mut());
        leases.for_each(|lease| lease.asked = lease.asked.map(&moved));
    }

    /// Lets time pass: expired sessions end, and leases are recalled whose minimum hold is over.
    pub fn tick(&mut self, now: Millis) -> Step {
        let mut step = self.expire(now);
        self.serve_all(now, &mut step);
        self.catch_up(&mut step);
        step
    }

    /// The next moment at which [`Server::tick`] has something to do.
    pub fn wake_after(&self, now: Millis) -> Option<Millis> {
        let expiries = self.sessions.values().map(|session| session.heard + self.terms.term());
        let waited_for = self.objects.values().filter(|held| held.is_waited_for());
        let leases = waited_for.flat_map(|held| held.leases.values().filter(|lease| lease.recalled.is_none()));
        // Leases whose minimum hold was over before have been recalled already, or do not conflict.
        let recalls = leases.map(|lease| lease.since + self.terms.min_hold());
        let left = self.has_work().then_some(now + Millis(1));
        expiries.chain(recalls).chain(left).filter(|moment| *moment > now).min()
    }

    /// Whether a session may change an object. Otherwise its changes are refused.
    pub fn may_change(&self, session: SessionId, object: Object) -> bool {
        self.mode_of(session, object) == Some(Mode::Exclusive)
    }

    /// Whether a session may change an object by this grant.
    pub fn may_change_by(&self, session: SessionId, object: Object, number: GrantNo) -> bool {
        self.may_change(session, object) && self.holds(session, object, number).is_some()
    }

    /// The mode in which a session may use an object.
    pub fn mode_of(&self, session: SessionId, object: Object) -> Option<Mode> {
        self.sessions.get(&session).filter(|session| !session.is_out)?;
        self.objects.get(&object)?.leases.get(&session).map(|lease| lease.mode)
    }

    /// Revokes a session. It is told that it has ended, and its messages are ignored from now on. It may not receive
    /// that. So its leases are granted to others only after its own clock has stopped it, as if it were silent from now
    /// on.
    pub fn turn_out(&mut self, session: SessionId, now: Millis) -> Step {
        let mut step = self.expire(now);
        let Some(known) = self.sessions.get_mut(&session) else { return step };
        let has_lease = self.objects.values().any(|held| held.leases.contains_key(&session));
        // One that has not reported may have shared leases and locks.
        let holds_something = !known.is_back || has_lease || self.locks.has(session);
        step.replies.push((session, Reply::Ended));
        if !holds_something {
            self.end(session, true, now, &mut step);
            self.catch_up(&mut step);
            return step;
        }
        known.is_out = true;
        self.objects.values_mut().for_each(|held| held.waits_no_longer(session));
        self.serve_all(now, &mut step);
        self.catch_up(&mut step);
        step
    }

    /// Ends a session whose process is known to be gone, as if it had expired.
    pub fn end_session(&mut self, session: SessionId, now: Millis) -> Step {
        let mut step = self.expire(now);
        if self.is_alive(session) {
            step.replies.push((session, Reply::Ended));
            self.end(session, true, now, &mut step);
        }
        self.catch_up(&mut step);
        step
    }

    /// Whether an object must be taken over before anything else is done with it.
    pub fn is_abandoned(&self, object: Object) -> bool {
        self.durable.abandoned.contains(&object)
    }

    /// Whether a session has not ended.
    pub fn is_alive(&self, session: SessionId) -> bool {
        self.sessions.contains_key(&session)
    }

    /// Whether a report of a session is of an earlier connection than one that was heard.
    pub fn is_late(&self, session: SessionId, number: u64) -> bool {
        self.sessions.get(&session).is_some_and(|session| number <= session.reported)
    }

    /// A process that had these leases before has heard this report.
    pub fn has_heard(&mut self, session: SessionId, number: u64) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.reported = session.reported.max(number);
        }
    }

    /// Whether a session has reported its leases since the server started.
    pub fn is_back(&self, session: SessionId) -> bool {
        self.sessions.get(&session).is_some_and(|session| session.is_back)
    }

    fn next_number(&mut self) -> u64 {
        self.given += 1;
        (self.durable.runs << RUN_SHIFT) + self.given
    }

    fn change(&mut self, step: &mut Step, change: Change) {
        self.durable.apply(&change);
        step.changes.push(change);
    }

    fn holds(&self, session: SessionId, object: Object, number: GrantNo) -> Option<Mode> {
        let lease = self.objects.get(&object)?.leases.get(&session)?;
        (lease.number == number).then_some(lease.mode)
    }

    /// Whether a session still has a lease that was recalled a term ago, and does not say that it keeps it.
    fn holds_on(&self, session: SessionId, now: Millis) -> bool {
        let leases = self.objects.values().filter_map(|held| held.leases.get(&session));
        let leases = leases.filter(|lease| !lease.is_kept);
        leases.filter_map(|lease| lease.asked).any(|asked| asked + self.terms.term() <= now)
    }

    fn expire(&mut self, now: Millis) -> Step {
        let mut step = Step::default();
        let ended: Vec<_> = self.overdue(now).collect();
        for session in ended {
            if self.sessions.get(&session).is_some_and(|session| session.is_refused) {
                step.held_on.push(session);
            }
            step.replies.push((session, Reply::Ended));
            self.end(session, true, now, &mut step);
        }
        step
    }

    /// Ends a session. If it has `expired`, it may have left changes unfinished.
    fn end(&mut self, session: SessionId, expired: bool, now: Millis, step: &mut Step) {
        self.sessions.remove(&session);
        let objects: Vec<_> = self.objects.keys().copied().collect();
        for object in objects {
            let Some(held) = self.objects.get_mut(&object) else { continue };
            held.waits_no_longer(session);
            if held.leases.remove(&session).is_some_and(|lease| lease.mode == Mode::Exclusive) {
                self.change(step, Change::Released(object));
                if expired {
                    self.change(step, Change::Abandoned(object));
                }
            }
        }
        self.change(step, Change::Ended(session));
        self.forget_early(session);
        self.locks.end(session);
        // Includes requests that waited until every session is back.
        self.serve_all(now, step);
    }

    fn serve_all(&mut self, now: Millis, step: &mut Step) {
        let objects: Vec<_> = self.objects.keys().copied().collect();
        objects.into_iter().for_each(|object| self.serve(object, now, step));
    }

    /// A session reports its leases and locks by a new connection. Its report is authoritative: it never received what
    /// it does not name, or has released it.
    fn resume(
        &mut self,
        session: SessionId,
        (held, kept, taken_over, locks): (&[Grant], &[Object], &[Grant], &[Lock]),
        now: Millis,
        step: &mut Step,
    ) {
        let was_back = self.sessions.get(&session).is_some_and(|session| session.is_back);
        self.forget_early(session);
        let may_hold = held.iter().all(|grant| self.may_hold(session, grant, was_back));
        let is_so = if may_hold { self.locks.resume(session, locks) } else { Err(CannotHave { beside: None }) };
        if let Err(CannotHave { beside }) = is_so {
            // A correct client never reports such a lease or lock, so the session is ended.
            step.replies.push((session, Reply::Ended));
            step.misreported.push((session, beside));
            return self.end(session, true, now, step);
        }
        if let Some(known) = self.sessions.get_mut(&session) {
            known.is_back = true;
        }
        let said: BTreeMap<_, _> = held.iter().map(|grant| (grant.object, *grant)).collect();
        let objects: BTreeSet<_> = self.objects.keys().chain(said.keys()).copied().collect();
        for object in objects {
            let entry = self.objects.entry(object).or_default();
            entry.reconnects(session);
            let before = entry.leases.remove(&session);
            let grant = said.get(&object);
            if let Some(grant) = grant {
                // A recall may not have reached it, so it is recalled again. Neither the least time that it is held nor
                // the deadline begins anew: otherwise a client that reconnects often enough would never meet them. One
                // that was reduced is a new lease, as if its release had come.
                let same = before.filter(|before| (before.number, before.mode) == (grant.number, grant.mode));
                let lease = same.map(|before| Lease { recalled: None, ..before });
                let mut lease = lease.unwrap_or_else(|| Lease::new(grant.mode, grant.number, now));
                lease.keep(kept.contains(&object), now);
                entry.leases.insert(session, lease);
            }
            let Some(before) = before.filter(|before| before.mode == Mode::Exclusive) else { continue };
            if grant.is_none_or(|grant| grant.mode == Mode::Shared) {
                self.change(step, Change::Released(object));
                // The release says nothing of that, and was lost with it.
                if grant.is_some() || taken_over.iter().any(|left| left.number == before.number) {
                    self.taken_over(object, step);
                }
            }
        }
        let holds_on = self.holds_on(session, now);
        if let Some(known) = self.sessions.get_mut(&session).filter(|_| !holds_on) {
            known.heard = now;
        }
        self.serve_all(now, step);
    }

    /// Whether a claimed lease is plausible. An exclusive lease must be on record. A shared lease must be on record, or
    /// may have been lost in a restart if no other session holds the object exclusively.
    fn may_hold(&self, session: SessionId, grant: &Grant, was_back: bool) -> bool {
        let known = self.holds(session, grant.object, grant.number);
        match grant.mode {
            Mode::Exclusive => known == Some(Mode::Exclusive),
            Mode::Shared => {
                let of_others = self.objects.get(&grant.object).into_iter().flat_map(|held| &held.leases);
                let mut of_others = of_others.filter(|(other, _)| **other != session);
                known.is_some() || (!was_back && of_others.all(|(_, lease)| lease.mode == Mode::Shared))
            }
        }
    }

    fn keep(&mut self, session: SessionId, grant: Grant, kept: bool, now: Millis) {
        let lease = self.objects.get_mut(&grant.object).and_then(|held| held.leases.get_mut(&session));
        if let Some(lease) = lease.filter(|lease| lease.number == grant.number) {
            lease.keep(kept, now);
        }
    }

    fn release(&mut self, session: SessionId, grant: Grant, keeps: Option<Mode>, now: Millis, step: &mut Step) {
        let Some(was) = self.holds(session, grant.object, grant.number) else { return };
        let Some(held) = self.objects.get_mut(&grant.object) else { return };
        match keeps {
            // A release never keeps more than was held.
            Some(Mode::Exclusive) => return,
            // As before: it stays recalled.
            Some(Mode::Shared) if was == Mode::Shared => return,
            Some(Mode::Shared) => {
                let lease = Lease::new(Mode::Shared, grant.number, now);
                held.leases.insert(session, lease);
            }
            None => drop(held.leases.remove(&session)),
        }
        if was == Mode::Exclusive {
            self.change(step, Change::Released(grant.object));
            if keeps.is_some() {
                self.taken_over(grant.object, step);
            }
        }
        self.serve(grant.object, now, step);
    }

    /// An object was taken over. Its holder says so, or keeps it as shared: a client does that only after the takeover,
    /// and [`Call::TakenOver`] may have been lost with its connection.
    fn taken_over(&mut self, object: Object, step: &mut Step) {
        if self.is_abandoned(object) {
            self.change(step, Change::TakenOver(object));
        }
    }

    /// Grants the requests for an object that can be granted, and recalls what is in the way of the next one. Whatever
    /// changes who waits ends here, so that no recall outlives what it was for.
    fn serve(&mut self, object: Object, now: Millis, step: &mut Step) {
        while self.grant_next(object, now, step) {}
        let takes_over = self.is_abandoned(object);
        let Some(held) = self.objects.get_mut(&object) else { return };
        let min_hold = self.terms.min_hold();
        for (session, lease, keeps) in held.recall(takes_over, |lease| lease.since + min_hold <= now, now) {
            let grant = Grant { object, mode: lease.mode, number: lease.number };
            step.replies.push((session, Reply::Recall { grant, keeps }));
        }
        if held.is_unused() {
            self.objects.remove(&object);
        }
    }

    /// Grants the next request, if nothing is in its way.
    fn grant_next(&mut self, object: Object, now: Millis, step: &mut Step) -> bool {
        let takes_over = self.is_abandoned(object);
        let Some(held) = self.objects.get(&object) else { return false };
        let Some(next) = held.next(takes_over) else { return false };
        if held.leases.iter().any(|(session, lease)| next.is_held_up_by(*session, lease)) {
            return false;
        }
        // A session that is not back may hold any shared lease.
        if next.mode == Mode::Exclusive && self.awaits_reports() {
            return false;
        }
        let number = GrantNo(self.next_number());
        let Some(held) = self.objects.get_mut(&object) else { return false };
        held.waits_no_longer(next.session);
        let lease = Lease::new(next.mode, number, now);
        let before = held.leases.insert(next.session, lease).map(|lease| lease.mode);
        match next.mode {
            Mode::Exclusive => self.change(step, Change::Exclusive(object, next.session, number)),
            Mode::Shared if before == Some(Mode::Exclusive) => self.change(step, Change::Released(object)),
            Mode::Shared => {}
        }
        let grant = Grant { object, mode: next.mode, number };
        step.replies.push((next.session, Reply::Granted { grant, request: next.request, takes_over }));
        true
    }
}

#[cfg(test)]
mod tests;
