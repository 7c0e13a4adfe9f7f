//! Who holds what, as the server of a vault sees it.
//!
//! * **Exclusion.** A lease is granted only if no other session holds one that conflicts. Requests for an object are
//!   granted in the order of their arrival; one that has to wait has what conflicts recalled.
//! * **Expiry.** A session that was not heard of for a term has ended, for good: its number is never used again. What
//!   it held exclusively is *abandoned*: whoever gets it next gets it exclusively, and takes it over first.
//! * **Holding on.** A holder that was asked to give up something, and still has it a term later, is not answered any
//!   more when it says that it lives: so it stops, and then its session ends, as if it were silent.
//! * **Restart.** Sessions, exclusive leases and what is abandoned are durable; shared leases are not. After a restart
//!   every session counts as heard of at that moment, and nothing is granted exclusively before each has said what it
//!   holds, or has expired.
//!
//! What a step changes durably comes before what it says ([`Step`]). A server that cannot make a change durable stops.

use crate::{Call, Grant, GrantNo, Millis, Mode, Object, Reply, RequestNo, SessionId, Terms};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Numbers of sessions and grants are counted anew in each run of the server, above this bit.
const RUN_SHIFT: u32 = 40;

/// What outlives the server's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Durable {
    /// how often the server was started
    pub runs: u64,
    /// sessions that have not ended
    pub sessions: BTreeSet<SessionId>,
    /// exclusive leases
    pub exclusive: BTreeMap<Object, (SessionId, GrantNo)>,
    /// objects whose exclusive holder has expired, until somebody has taken them over
    pub abandoned: BTreeSet<Object>,
}

/// A change of what is durable.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// The server has started for the so many'th time.
    Run(u64),
    /// A session began.
    Began(SessionId),
    /// A session has ended.
    Ended(SessionId),
    /// A session holds an object exclusively.
    Exclusive(Object, SessionId, GrantNo),
    /// Nobody does any longer.
    Released(Object),
    /// It is to be taken over.
    Abandoned(Object),
    /// It has been.
    TakenOver(Object),
}

impl Durable {
    /// Takes a change in.
    pub fn apply(&mut self, change: &Change) {
        match *change {
            Change::Run(runs) => self.runs = runs,
            Change::Began(session) => drop(self.sessions.insert(session)),
            Change::Ended(session) => drop(self.sessions.remove(&session)),
            Change::Exclusive(object, session, number) => drop(self.exclusive.insert(object, (session, number))),
            Change::Released(object) => drop(self.exclusive.remove(&object)),
            Change::Abandoned(object) => drop(self.abandoned.insert(object)),
            Change::TakenOver(object) => drop(self.abandoned.remove(&object)),
        }
    }
}

/// What is to be done: first all changes made durable, together; then the replies sent, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[must_use = "what was changed is not durable, and nobody was told"]
pub struct Step {
    /// in this order
    pub changes: Vec<Change>,
    /// each to its session
    pub replies: Vec<(SessionId, Reply)>,
    /// of the sessions that end: those that were heard of, and held on to what they were to give up
    pub held_on: Vec<SessionId>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Session {
    /// When it was heard of last; of one that is not back, when the server started.
    heard: Millis,
    /// It has said what it holds since the server started.
    is_back: bool,
    /// It said that it lives, and was not answered.
    is_refused: bool,
    /// It is heard no more ([`Server::turn_out`]).
    is_out: bool,
}

impl Session {
    fn heard_at(now: Millis, is_back: bool) -> Session {
        Session { heard: now, is_back, is_refused: false, is_out: false }
    }
}

/// A lease of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Lease {
    mode: Mode,
    number: GrantNo,
    since: Millis,
    /// What it was asked to keep, if it was asked to give up something.
    recalled: Option<Option<Mode>>,
    /// When it was first asked to.
    asked: Option<Millis>,
}

impl Lease {
    fn new(mode: Mode, number: GrantNo, now: Millis) -> Lease {
        Lease { mode, number, since: now, recalled: None, asked: None }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Waiting {
    session: SessionId,
    request: RequestNo,
    mode: Mode,
}

/// An object that somebody holds, or waits for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Held {
    leases: BTreeMap<SessionId, Lease>,
    waiting: VecDeque<Waiting>,
}

/// The leases of one vault.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Server {
    terms: Terms,
    durable: Durable,
    sessions: BTreeMap<SessionId, Session>,
    objects: BTreeMap<Object, Held>,
    /// Of this run.
    given: u64,
}

impl Server {
    /// Starts on what is durable, at `now`.
    pub fn start(terms: Terms, durable: Durable, now: Millis) -> (Server, Step) {
        let sessions = durable.sessions.iter().map(|id| (*id, Session::heard_at(now, false))).collect();
        let mut server = Server { terms, durable, sessions, objects: BTreeMap::new(), given: 0 };
        for (object, (session, number)) in server.durable.exclusive.clone() {
            let lease = Lease::new(Mode::Exclusive, number, now);
            server.objects.entry(object).or_default().leases.insert(session, lease);
        }
        let mut step = Step::default();
        server.change(&mut step, Change::Run(server.durable.runs + 1));
        (server, step)
    }

    /// What is durable once all changes are.
    pub fn durable(&self) -> &Durable {
        &self.durable
    }

    /// Begins a session.
    pub fn join(&mut self, now: Millis) -> (SessionId, Step) {
        let mut step = self.expire(now);
        let session = SessionId(self.next_number());
        self.sessions.insert(session, Session::heard_at(now, true));
        self.change(&mut step, Change::Began(session));
        (session, step)
    }

    /// A session says something.
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
            // Of a connection from before the restart, which has ended with it.
            return step;
        }
        match call {
            // An answer would have it believe that it may go on.
            Call::Heartbeat { .. } if holds_on => known.is_refused = true,
            Call::Heartbeat { beat } => {
                known.heard = now;
                known.is_refused = false;
                step.replies.push((session, Reply::Alive { beat }));
            }
            Call::Resume { held } => self.resume(session, &held, now, &mut step),
            Call::Acquire { request, object, mode } => {
                let held = self.objects.entry(object).or_default();
                // No client of ours asks twice.
                if held.waiting.iter().all(|waiting| waiting.session != session) {
                    held.waiting.push_back(Waiting { session, request, mode });
                }
                self.serve(object, now, &mut step);
            }
            Call::Release { grant, keeps } => self.release(session, grant, keeps, now, &mut step),
            Call::TakenOver { grant } => {
                if self.holds(session, grant.object, grant.number) == Some(Mode::Exclusive) {
                    self.change(&mut step, Change::TakenOver(grant.object));
                    self.serve(grant.object, now, &mut step);
                }
            }
            Call::Leave => self.end(session, false, now, &mut step),
        }
        step
    }

    /// The process has not run for a while: what sessions said in that time may not have been heard yet, so that all
    /// count as heard of now. None ends sooner for that.
    pub fn was_away(&mut self, now: Millis) {
        self.sessions.values_mut().for_each(|session| session.heard = session.heard.max(now));
    }

    /// Time has passed: what has expired ends, what may be recalled now is.
    pub fn tick(&mut self, now: Millis) -> Step {
        let mut step = self.expire(now);
        self.serve_all(now, &mut step);
        step
    }

    /// When there is something for [`Server::tick`] to do, after this moment.
    pub fn wake_after(&self, now: Millis) -> Option<Millis> {
        let expiries = self.sessions.values().map(|session| session.heard + self.terms.term());
        let waited_for = self.objects.values().filter(|held| !held.waiting.is_empty());
        let leases = waited_for.flat_map(|held| held.leases.values().filter(|lease| lease.recalled.is_none()));
        // What could be recalled before is not in the way.
        expiries.chain(leases.map(|lease| lease.since + self.terms.min_hold())).filter(|moment| *moment > now).min()
    }

    /// Whether a session may change an object: whatever else it says of it is refused.
    pub fn may_change(&self, session: SessionId, object: Object) -> bool {
        self.mode_of(session, object) == Some(Mode::Exclusive)
    }

    /// What a session may use of an object.
    pub fn mode_of(&self, session: SessionId, object: Object) -> Option<Mode> {
        self.sessions.get(&session).filter(|session| !session.is_out)?;
        self.objects.get(&object)?.leases.get(&session).map(|lease| lease.mode)
    }

    /// A session may do nothing any more. It is told that it has ended, and is heard no more. It may not know that yet:
    /// so what it holds goes to others only when it has stopped by its own clock, as if it were silent from now on.
    pub fn turn_out(&mut self, session: SessionId, now: Millis) -> Step {
        let mut step = self.expire(now);
        let holds_something = self.objects.values().any(|held| held.leases.contains_key(&session));
        let Some(known) = self.sessions.get_mut(&session) else { return step };
        step.replies.push((session, Reply::Ended));
        if !holds_something {
            self.end(session, true, now, &mut step);
            return step;
        }
        known.is_out = true;
        self.objects.values_mut().for_each(|held| held.waiting.retain(|waiting| waiting.session != session));
        self.serve_all(now, &mut step);
        step
    }

    /// Ends a session of which somebody else knows that it is gone, as if it had expired.
    pub fn end_session(&mut self, session: SessionId, now: Millis) -> Step {
        let mut step = self.expire(now);
        if self.is_alive(session) {
            step.replies.push((session, Reply::Ended));
            self.end(session, true, now, &mut step);
        }
        step
    }

    /// Whether an object is to be taken over before anything else is done with it.
    pub fn is_abandoned(&self, object: Object) -> bool {
        self.durable.abandoned.contains(&object)
    }

    /// Whether a session has not ended.
    pub fn is_alive(&self, session: SessionId) -> bool {
        self.sessions.contains_key(&session)
    }

    /// Whether a session has said what it holds since the server started.
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

    /// Whether a session was asked a term ago for what it still holds.
    fn holds_on(&self, session: SessionId, now: Millis) -> bool {
        let leases = self.objects.values().filter_map(|held| held.leases.get(&session));
        leases.filter_map(|lease| lease.asked).any(|asked| asked + self.terms.term() <= now)
    }

    fn expire(&mut self, now: Millis) -> Step {
        let mut step = Step::default();
        let ended = self.sessions.iter().filter(|(_, session)| session.heard + self.terms.term() <= now);
        let ended: Vec<_> = ended.map(|(id, _)| *id).collect();
        for session in ended {
            if self.sessions.get(&session).is_some_and(|session| session.is_refused) {
                step.held_on.push(session);
            }
            step.replies.push((session, Reply::Ended));
            self.end(session, true, now, &mut step);
        }
        step
    }

    /// A session ends; if it has `expired`, it may have left things undone.
    fn end(&mut self, session: SessionId, expired: bool, now: Millis, step: &mut Step) {
        self.sessions.remove(&session);
        let objects: Vec<_> = self.objects.keys().copied().collect();
        for object in objects {
            let Some(held) = self.objects.get_mut(&object) else { continue };
            held.waiting.retain(|waiting| waiting.session != session);
            if held.leases.remove(&session).is_some_and(|lease| lease.mode == Mode::Exclusive) {
                self.change(step, Change::Released(object));
                if expired {
                    self.change(step, Change::Abandoned(object));
                }
            }
        }
        self.change(step, Change::Ended(session));
        // Also those that waited until every session is back.
        self.serve_all(now, step);
    }

    fn serve_all(&mut self, now: Millis, step: &mut Step) {
        let objects: Vec<_> = self.objects.keys().copied().collect();
        objects.into_iter().for_each(|object| self.serve(object, now, step));
    }

    /// A session says by a new connection what it holds: it knows best. What it does not name it never got, or has
    /// released.
    fn resume(&mut self, session: SessionId, held: &[Grant], now: Millis, step: &mut Step) {
        let was_back = self.sessions.get(&session).is_some_and(|session| session.is_back);
        let is_so = held.iter().all(|grant| self.may_hold(session, grant, was_back));
        if !is_so {
            // No client of ours says that. Nothing that it does is believed any more.
            step.replies.push((session, Reply::Ended));
            return self.end(session, true, now, step);
        }
        if let Some(known) = self.sessions.get_mut(&session) {
            known.is_back = true;
        }
        let said: BTreeMap<_, _> = held.iter().map(|grant| (grant.object, *grant)).collect();
        let objects: BTreeSet<_> = self.objects.keys().chain(said.keys()).copied().collect();
        for object in objects {
            let entry = self.objects.entry(object).or_default();
            entry.waiting.retain(|waiting| waiting.session != session);
            let before = entry.leases.remove(&session);
            let grant = said.get(&object);
            if let Some(grant) = grant {
                // What it was asked to give up may never have reached it: it is asked again. Its time goes on, or it
                // would not end for who comes back often enough.
                let asked = before.and_then(|before| before.asked);
                entry.leases.insert(session, Lease { asked, ..Lease::new(grant.mode, grant.number, now) });
            }
            let was = before.map(|before| before.mode);
            if was == Some(Mode::Exclusive) && grant.is_none_or(|grant| grant.mode == Mode::Shared) {
                self.change(step, Change::Released(object));
            }
        }
        let holds_on = self.holds_on(session, now);
        if let Some(known) = self.sessions.get_mut(&session).filter(|_| !holds_on) {
            known.heard = now;
        }
        self.serve_all(now, step);
    }

    /// Whether a session can hold what it says: an exclusive lease is known; a shared one is, or was one before it was
    /// let go of, or was forgotten by a restart, and then nobody else has the object exclusively.
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

    fn release(&mut self, session: SessionId, grant: Grant, keeps: Option<Mode>, now: Millis, step: &mut Step) {
        let Some(was) = self.holds(session, grant.object, grant.number) else { return };
        let Some(held) = self.objects.get_mut(&grant.object) else { return };
        match keeps {
            // Nobody keeps more than it had.
            Some(Mode::Exclusive) => return,
            Some(Mode::Shared) => {
                let lease = Lease::new(Mode::Shared, grant.number, now);
                held.leases.insert(session, lease);
            }
            None => drop(held.leases.remove(&session)),
        }
        if was == Mode::Exclusive {
            self.change(step, Change::Released(grant.object));
        }
        self.serve(grant.object, now, step);
    }

    /// Grants what can be granted of an object, and recalls what is in the way of the next request.
    fn serve(&mut self, object: Object, now: Millis, step: &mut Step) {
        while let Some(next) = self.objects.get(&object).and_then(|held| held.waiting.front().copied()) {
            let takes_over = self.is_abandoned(object);
            let mode = if takes_over { Mode::Exclusive } else { next.mode };
            if self.recall(object, next.session, mode, now, step) {
                return;
            }
            // A session that is not back may hold anything shared.
            if mode == Mode::Exclusive && self.sessions.values().any(|session| !session.is_back) {
                return;
            }
            let number = GrantNo(self.next_number());
            let Some(held) = self.objects.get_mut(&object) else { return };
            held.waiting.pop_front();
            let lease = Lease::new(mode, number, now);
            let before = held.leases.insert(next.session, lease).map(|lease| lease.mode);
            match mode {
                Mode::Exclusive => self.change(step, Change::Exclusive(object, next.session, number)),
                Mode::Shared if before == Some(Mode::Exclusive) => self.change(step, Change::Released(object)),
                Mode::Shared => {}
            }
            let grant = Grant { object, mode, number };
            step.replies.push((next.session, Reply::Granted { grant, request: next.request, takes_over }));
        }
        if self.objects.get(&object).is_some_and(|held| held.leases.is_empty()) {
            self.objects.remove(&object);
        }
    }

    /// Whether leases of others are in the way; those that were held for long enough are recalled.
    fn recall(&mut self, object: Object, session: SessionId, mode: Mode, now: Millis, step: &mut Step) -> bool {
        let Some(held) = self.objects.get_mut(&object) else { return false };
        let keeps = (mode == Mode::Shared).then_some(Mode::Shared);
        let is_in_the_way = |lease: &Lease| Some(lease.mode) > keeps;
        let others = held.leases.iter_mut().filter(|(other, lease)| **other != session && is_in_the_way(lease));
        let mut is_any = false;
        for (other, lease) in others {
            is_any = true;
            let was_asked = lease.recalled.is_some_and(|asked| asked <= keeps);
            if !was_asked && lease.since + self.terms.min_hold() <= now {
                lease.recalled = Some(keeps);
                lease.asked.get_or_insert(now);
                let grant = Grant { object, mode: lease.mode, number: lease.number };
                step.replies.push((*other, Reply::Recall { grant, keeps }));
            }
        }
        is_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECT: Object = Object(1);

    fn acquire(server: &mut Server, session: SessionId, mode: Mode, now: Millis) -> Vec<(SessionId, Reply)> {
        server.call(session, Call::Acquire { request: RequestNo(0), object: OBJECT, mode }, now).replies
    }

    #[test]
    fn a_lease_is_recalled_when_it_was_held_for_long_enough_and_the_server_says_when() {
        let terms = Terms::DEFAULT;
        let (mut server, _) = Server::start(terms, Durable::default(), Millis(0));
        let (a, _) = server.join(Millis(0));
        let (b, _) = server.join(Millis(0));
        assert_eq!(server.wake_after(Millis(0)), Some(terms.term()), "the end of a session that is silent");
        assert_eq!(acquire(&mut server, a, Mode::Exclusive, Millis(5)).len(), 1);
        assert_eq!(acquire(&mut server, b, Mode::Shared, Millis(6)), []);
        let at = Millis(5) + terms.min_hold();
        assert_eq!(server.wake_after(Millis(6)), Some(at));
        let recalled = server.tick(at).replies;
        assert!(matches!(recalled[..], [(to, Reply::Recall { keeps: Some(Mode::Shared), .. })] if to == a));
        assert_eq!(server.wake_after(at), Some(terms.term()), "it is asked once");
    }

    /// Whoever is turned out may not have heard it: what it held is another's when it has stopped by its own clock.
    #[test]
    fn what_is_taken_from_a_session_is_given_to_others_a_term_later() {
        let term = Terms::DEFAULT.term();
        let (mut server, a, b, grant) = contended();
        assert!(beats(&mut server, a, Millis(200)) && beats(&mut server, b, Millis(200)));
        let out = server.turn_out(a, Millis(300));
        assert_eq!((out.replies, out.changes), (vec![(a, Reply::Ended)], vec![]));
        assert!(!server.may_change(a, OBJECT) && !beats(&mut server, a, Millis(400)));
        let _ = server.call(a, Call::Release { grant, keeps: None }, Millis(400));
        let _ = server.call(a, Call::Resume { held: vec![grant] }, Millis(400));
        assert!(beats(&mut server, b, Millis(400)));
        assert!(server.tick(Millis(199) + term).replies.is_empty() && server.is_alive(a));
        let replies = server.tick(Millis(200) + term).replies;
        assert!(
            matches!(replies[..], [(to, Reply::Ended), (next, Reply::Granted { takes_over: true, .. })]
            if to == a && next == b),
            "{replies:?}"
        );
        // One that holds nothing is gone at once.
        let (c, _) = server.join(Millis(200) + term);
        assert_eq!(server.turn_out(c, Millis(200) + term).changes, [Change::Ended(c)]);
    }

    /// What a server says that was started just now, of which one session holds the object and another waits for it.
    fn contended() -> (Server, SessionId, SessionId, Grant) {
        let (mut server, _) = Server::start(Terms::DEFAULT, Durable::default(), Millis(0));
        let (a, _) = server.join(Millis(0));
        let (b, _) = server.join(Millis(0));
        let granted = acquire(&mut server, a, Mode::Exclusive, Millis(0));
        let [(_, Reply::Granted { grant, .. })] = granted[..] else { panic!("{granted:?}") };
        let recalled = acquire(&mut server, b, Mode::Exclusive, Millis(100));
        assert!(matches!(recalled[..], [(to, Reply::Recall { .. })] if to == a), "{recalled:?}");
        (server, a, b, grant)
    }

    /// Says that a session lives. Whether the server answers.
    fn beats(server: &mut Server, session: SessionId, now: Millis) -> bool {
        let said = server.call(session, Call::Heartbeat { beat: 0 }, now).replies;
        said.contains(&(session, Reply::Alive { beat: 0 }))
    }

    #[test]
    fn a_holder_that_is_asked_and_holds_on_stops_and_then_ends_though_it_beats() {
        let (term, beat) = (Terms::DEFAULT.term().0, Terms::DEFAULT.heartbeat().0);
        let (mut server, a, b, grant) = contended();
        let (mut last, mut now) = (0, 100);
        let ended = loop {
            now += beat;
            let step = server.tick(Millis(now));
            if !server.is_alive(a) {
                break step;
            }
            assert_eq!(beats(&mut server, a, Millis(now)), now < 100 + term, "{now}");
            last = if now < 100 + term { now } else { last };
            assert!(beats(&mut server, b, Millis(now)));
            // Whoever comes back by another connection is asked again, and has no more time.
            let again = server.call(a, Call::Resume { held: vec![grant] }, Millis(now));
            assert!(server.tick(Millis(now)).replies.is_empty() && again.changes.is_empty());
        };
        // Not before the host has stopped by its own clock.
        assert!(now >= last + term && now <= 100 + 2 * term + beat, "{now}");
        assert_eq!(ended.held_on, [a]);
        assert!(ended.replies.contains(&(a, Reply::Ended)));
        let takes_over =
            |(to, reply): &(_, Reply)| *to == b && matches!(reply, Reply::Granted { takes_over: true, .. });
        assert!(ended.replies.iter().any(takes_over), "{ended:?}");
    }

    #[test]
    fn a_holder_that_gives_back_late_is_answered_again() {
        let term = Terms::DEFAULT.term().0;
        for by_resuming in [false, true] {
            let (mut server, a, b, grant) = contended();
            for now in [term / 2, term, term + 200] {
                assert_eq!(beats(&mut server, a, Millis(now)), now < term + 100);
                assert!(beats(&mut server, b, Millis(now)));
            }
            let now = Millis(term + 300);
            let given_back = match by_resuming {
                true => Call::Resume { held: vec![] },
                false => Call::Release { grant, keeps: None },
            };
            let step = server.call(a, given_back, now);
            assert!(matches!(step.replies[..], [(to, Reply::Granted { takes_over: false, .. })] if to == b));
            assert!(beats(&mut server, a, now));
            assert!(server.tick(Millis(2 * term)).held_on.is_empty() && server.is_alive(a));
        }
    }

    #[test]
    fn a_holder_that_is_silent_ends_as_any_other() {
        let term = Terms::DEFAULT.term();
        let (mut server, a, b, _) = contended();
        assert!(beats(&mut server, a, Millis(200)) && beats(&mut server, b, Millis(term.0 - 1)));
        let step = server.tick(Millis(200) + term);
        assert!(step.held_on.is_empty() && !server.is_alive(a) && server.is_alive(b));
    }

    #[test]
    fn a_session_waits_once() {
        let (mut server, a, b, grant) = contended();
        for request in 1..1000 {
            let call = Call::Acquire { request: RequestNo(request), object: OBJECT, mode: Mode::Exclusive };
            assert!(server.call(b, call, Millis(200)).replies.is_empty());
        }
        let step = server.call(a, Call::Release { grant, keeps: None }, Millis(300));
        assert_eq!(step.replies.len(), 1);
        assert!(server.objects.get(&OBJECT).is_some_and(|held| held.waiting.is_empty()));
    }
}
