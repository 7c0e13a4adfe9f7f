//! The leases of this host, and which of its operations may proceed.
//!
//! * An operation begins with [`Client::begin`], and proceeds when [`Do::Go`] says so: while a lease of its object is
//!   good. Its result counts only if [`Client::finish`] says that the session was good until then.
//! * A recalled lease admits no further operations. When those under way have ended, their changes are committed and
//!   caches drop the object ([`Do::Flush`]). Then the lease is released.
//! * The session is *good* until [`Terms::stop`] after the *sending* of the last heartbeat that was answered. After
//!   that, nothing is done on its behalf. A later answer makes it good again, since the server has not ended it then.
//!   [`Reply::Ended`] is final.

use crate::locks::Lock;
use crate::{Call, Grant, GrantNo, Millis, Mode, Object, Reply, RequestNo, SessionId, Terms};
use std::collections::{BTreeMap, VecDeque};

/// Unanswered heartbeats that are remembered.
const BEATS_MAX: usize = 64;

/// The number of an operation of this host, chosen by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Op(pub u64);

/// An action for the caller. Actions are carried out in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Do {
    /// Send a call to the server.
    Send(Call),
    /// The operation may proceed.
    Go(Ticket),
    /// The operation has failed: the session has ended.
    Fail(Op),
    /// Commit the changes of an object, and let all caches drop it, or keep it as shared. Then call
    /// [`Client::flushed`].
    Flush {
        /// the object
        object: Object,
        /// the mode that is kept, if any
        keeps: Option<Mode>,
    },
    /// Recover what an earlier holder left unfinished, and commit that. Then call [`Client::taken_over`].
    TakeOver {
        /// the object
        object: Object,
        /// The operation that proceeds with the recovery. It uses the lease from now on, and gets no [`Do::Go`].
        /// `None`: no operation waits any longer.
        by: Option<Ticket>,
    },
    /// Drop everything. Changes that were not committed are lost.
    Lost,
}

/// The right of an operation to use its object in a mode, until the operation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    /// the operation
    pub op: Op,
    /// the object
    pub object: Object,
    /// the mode
    pub mode: Mode,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Lease {
    grant: Grant,
    /// Number of operations under way.
    users: u32,
    /// The mode to keep after a recall, or after an operation of this host needs another mode.
    recalled: Option<Option<Mode>>,
    /// Set while a flush is under way: the mode to keep after it.
    flushing: Option<Option<Mode>>,
    /// A takeover is under way.
    takes_over: bool,
    /// It was taken over. The server may not know that.
    is_taken_over: bool,
    /// See [`Client::keep`].
    is_kept: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Waiting {
    op: Op,
    object: Object,
    mode: Mode,
}

/// The leases of one session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Client {
    terms: Terms,
    session: SessionId,
    /// The session is good until then, by this host's clock.
    good_until: Millis,
    has_ended: bool,
    /// Sending times of heartbeats without an answer.
    beats: BTreeMap<u64, Millis>,
    next_beat: u64,
    next_request: u64,
    leases: BTreeMap<Object, Lease>,
    /// Released leases of objects that were taken over, until the next lease of the object.
    left: BTreeMap<Object, Grant>,
    /// Requests without an answer, and their modes.
    wanted: BTreeMap<Object, (RequestNo, Mode)>,
    waiting: VecDeque<Waiting>,
    /// How many reports were made.
    reports: u64,
}

impl Client {
    /// A session that the server has begun. `asked`: when it was requested, by this host's clock.
    pub fn new(terms: Terms, session: SessionId, asked: Millis) -> Client {
        Client {
            terms,
            session,
            good_until: asked + terms.stop(),
            has_ended: false,
            beats: BTreeMap::new(),
            next_beat: 0,
            next_request: 0,
            leases: BTreeMap::new(),
            left: BTreeMap::new(),
            wanted: BTreeMap::new(),
            waiting: VecDeque::new(),
            reports: 0,
        }
    }

    /// The session's number.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// Whether the leases may be used now.
    pub fn is_good(&self, now: Millis) -> bool {
        !self.has_ended && now < self.good_until
    }

    /// The time until which the session is good, unless a heartbeat is answered.
    pub fn good_until(&self) -> Millis {
        self.good_until
    }

    /// The mode in which an object is held.
    pub fn mode_of(&self, object: Object) -> Option<Mode> {
        self.leases.get(&object).map(|lease| lease.grant.mode)
    }

    /// The number of the grant by which an object is held.
    pub fn grant_of(&self, object: Object) -> Option<GrantNo> {
        self.leases.get(&object).map(|lease| lease.grant.number)
    }

    /// Whether the server has recalled the lease of an object.
    pub fn is_recalled(&self, object: Object) -> bool {
        self.leases.get(&object).is_some_and(|lease| lease.recalled.is_some())
    }

    /// Makes the heartbeat that is due.
    pub fn beat(&mut self, now: Millis) -> Do {
        let beat = self.next_beat;
        self.next_beat += 1;
        if self.beats.len() >= BEATS_MAX {
            self.beats.pop_first();
        }
        self.beats.insert(beat, now);
        Do::Send(Call::Heartbeat { beat })
    }

    /// The host has reconnected to the server. `locks`: the locks of its programs, to be reported with the leases.
    pub fn connected(&mut self, locks: Vec<Lock>) -> Vec<Do> {
        if self.has_ended {
            return Vec::new();
        }
        self.beats.clear();
        self.reports += 1;
        let held = self.leases.values().map(|lease| lease.grant).collect();
        let kept = self.leases.iter().filter(|(_, lease)| lease.is_kept).map(|(object, _)| *object).collect();
        let taken_over = self.left.values().copied().collect();
        let resume = Do::Send(Call::Resume { number: self.reports, held, kept, taken_over, locks });
        // What is kept as shared needs no report: it is taken over.
        let is_taken_over = |lease: &&Lease| lease.is_taken_over && lease.grant.mode == Mode::Exclusive;
        let taken_over = self.leases.values().filter(is_taken_over);
        let taken_over = taken_over.map(|lease| Do::Send(Call::TakenOver { grant: lease.grant }));
        let wanted = self.wanted.iter();
        let again = wanted.map(|(&object, &(request, mode))| Do::Send(Call::Acquire { request, object, mode }));
        std::iter::once(resume).chain(taken_over).chain(again).collect()
    }

    /// An operation wants to use an object.
    pub fn begin(&mut self, op: Op, object: Object, mode: Mode, now: Millis) -> Vec<Do> {
        if self.has_ended {
            return vec![Do::Fail(op)];
        }
        self.waiting.push_back(Waiting { op, object, mode });
        self.go_on(object, now)
    }

    /// An operation has ended. Returns whether its result counts; if not, it has failed, whatever it did.
    pub fn finish(&mut self, ticket: Ticket, now: Millis) -> (bool, Vec<Do>) {
        let is_good = self.is_good(now);
        if let Some(lease) = self.leases.get_mut(&ticket.object) {
            lease.users = lease.users.saturating_sub(1);
        }
        (is_good, self.go_on(ticket.object, now))
    }

    /// The flush that [`Do::Flush`] asked for is done.
    pub fn flushed(&mut self, object: Object, now: Millis) -> Vec<Do> {
        let Some(lease) = self.leases.get_mut(&object) else { return Vec::new() };
        let Some(keeps) = lease.flushing.take() else { return Vec::new() };
        let grant = lease.grant;
        // A stronger recall may have arrived meanwhile: then another flush follows.
        lease.recalled = lease.recalled.filter(|asked| *asked < keeps);
        match keeps {
            Some(mode) => (lease.grant.mode, lease.is_kept) = (mode, false),
            None => drop(self.release(object)),
        }
        let mut all = vec![Do::Send(Call::Release { grant, keeps })];
        all.extend(self.go_on(object, now));
        all
    }

    /// The takeover that [`Do::TakeOver`] asked for is done.
    pub fn taken_over(&mut self, object: Object, now: Millis) -> Vec<Do> {
        let Some(lease) = self.leases.get_mut(&object).filter(|lease| lease.takes_over) else { return Vec::new() };
        (lease.takes_over, lease.is_taken_over) = (false, true);
        let mut all = vec![Do::Send(Call::TakenOver { grant: lease.grant })];
        all.extend(self.go_on(object, now));
        all
    }

    /// From now on the lease of an object is kept although others want it, or no longer kept. As long as it is, the
    /// server does not wait for its release.
    pub fn keep(&mut self, object: Object, kept: bool) -> Vec<Do> {
        let Some(lease) = self.leases.get_mut(&object).filter(|lease| lease.is_kept != kept) else { return Vec::new() };
        lease.is_kept = kept;
        vec![Do::Send(Call::Keep { grant: lease.grant, kept })]
    }

    /// Keeps the lease of an object as shared, if it is exclusive and was taken over. Nothing was changed under it, and
    /// its users only read.
    pub fn reduce(&mut self, object: Object) -> Vec<Do> {
        let is_to_be_reduced =
            |lease: &&mut Lease| lease.grant.mode == Mode::Exclusive && !lease.takes_over && lease.flushing.is_none();
        let Some(lease) = self.leases.get_mut(&object).filter(is_to_be_reduced) else { return Vec::new() };
        let grant = lease.grant;
        (lease.grant.mode, lease.is_kept) = (Mode::Shared, false);
        lease.recalled = lease.recalled.filter(|keeps| *keeps < Some(Mode::Shared));
        vec![Do::Send(Call::Release { grant, keeps: Some(Mode::Shared) })]
    }

    /// Ends an operation, or its wait, and releases the lease of its object. It must be the only user, its changes must
    /// be committed, and caches must have dropped the object. An unfinished takeover stays to be done.
    pub fn give_back(&mut self, op: Op, object: Object, now: Millis) -> Vec<Do> {
        self.waiting.retain(|waiting| waiting.op != op);
        let grant = self.release(object);
        let mut all: Vec<_> = grant.map(|grant| Do::Send(Call::Release { grant, keeps: None })).into_iter().collect();
        all.extend(self.go_on(object, now));
        all
    }

    fn release(&mut self, object: Object) -> Option<Grant> {
        let lease = self.leases.remove(&object)?;
        if lease.is_taken_over {
            self.left.insert(object, lease.grant);
        }
        Some(lease.grant)
    }

    /// Handles a reply of the server.
    pub fn reply(&mut self, reply: Reply, now: Millis) -> Vec<Do> {
        if self.has_ended {
            return Vec::new();
        }
        match reply {
            Reply::Alive { beat } => {
                let Some(sent) = self.beats.get(&beat).copied() else { return Vec::new() };
                // The answer to a later heartbeat is the stronger one.
                self.beats.retain(|other, _| *other > beat);
                self.good_until = self.good_until.max(sent + self.terms.stop());
                let objects: Vec<_> = self.waiting.iter().map(|waiting| waiting.object).collect();
                objects.into_iter().flat_map(|object| self.go_on(object, now)).collect()
            }
            Reply::Granted { grant, request, takes_over } => {
                if self.wanted.get(&grant.object).is_none_or(|(own, _)| *own != request) {
                    return Vec::new(); // of a connection before: the server does not count it
                }
                self.wanted.remove(&grant.object);
                self.left.remove(&grant.object);
                let by = if takes_over { self.first_waiting(grant) } else { None };
                let users = u32::from(by.is_some());
                let (recalled, flushing, is_taken_over, is_kept) = (None, None, false, false);
                let lease = Lease { grant, users, recalled, flushing, takes_over, is_taken_over, is_kept };
                self.leases.insert(grant.object, lease);
                match takes_over {
                    true => vec![Do::TakeOver { object: grant.object, by }],
                    false => self.go_on(grant.object, now),
                }
            }
            Reply::Recall { grant, keeps } => {
                let lease = self.leases.get_mut(&grant.object).filter(|lease| lease.grant.number == grant.number);
                if let Some(lease) = lease {
                    lease.recalled = Some(lease.recalled.map_or(keeps, |before| before.min(keeps)));
                }
                self.go_on(grant.object, now)
            }
            // Locks of programs need no lease: `Holder` has them.
            Reply::Lock { .. } => Vec::new(),
            Reply::Ended => self.end(),
        }
    }

    /// The operation that has waited longest for a lease; it no longer waits.
    fn first_waiting(&mut self, grant: Grant) -> Option<Ticket> {
        let fits = |waiting: &Waiting| waiting.object == grant.object && waiting.mode <= grant.mode;
        let first = self.waiting.remove(self.waiting.iter().position(fits)?)?;
        Some(Ticket { op: first.op, object: first.object, mode: first.mode })
    }

    fn end(&mut self) -> Vec<Do> {
        self.has_ended = true;
        self.leases.clear();
        self.left.clear();
        self.wanted.clear();
        let failed = std::mem::take(&mut self.waiting);
        std::iter::once(Do::Lost).chain(failed.into_iter().map(|waiting| Do::Fail(waiting.op))).collect()
    }

    /// Does what is possible for an object now.
    fn go_on(&mut self, object: Object, now: Millis) -> Vec<Do> {
        let mut all = Vec::new();
        let mode = self.waiting.iter().filter(|waiting| waiting.object == object).map(|waiting| waiting.mode).max();
        let is_good = self.is_good(now);
        let Some(lease) = self.leases.get_mut(&object) else {
            // A lease that cannot be used would only be recalled.
            if let Some(mode) = mode
                && is_good
                && !self.wanted.contains_key(&object)
            {
                let request = RequestNo(self.next_request);
                self.next_request += 1;
                self.wanted.insert(object, (request, mode));
                all.push(Do::Send(Call::Acquire { request, object, mode }));
            }
            return all;
        };
        // A lease is released before a stronger one is requested: two sessions that kept theirs would wait for each
        // other.
        if mode > Some(lease.grant.mode) && lease.recalled.is_none() {
            lease.recalled = Some(None);
        }
        if let Some(keeps) = lease.recalled {
            if lease.users == 0 && lease.flushing.is_none() && !lease.takes_over {
                lease.flushing = Some(keeps);
                all.push(Do::Flush { object, keeps });
            }
        } else if is_good && !lease.takes_over {
            let held = lease.grant.mode;
            let mut left = VecDeque::with_capacity(self.waiting.len());
            for waiting in self.waiting.drain(..) {
                if waiting.object == object && waiting.mode <= held {
                    lease.users += 1;
                    all.push(Do::Go(Ticket { op: waiting.op, object, mode: waiting.mode }));
                } else {
                    left.push_back(waiting);
                }
            }
            self.waiting = left;
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECT: Object = Object(1);

    /// A reader that was granted an exclusive lease, to take over, keeps what it needs.
    #[test]
    fn a_lease_that_was_taken_over_can_be_reduced_while_it_is_used() {
        let (terms, now) = (Terms::DEFAULT, Millis(1));
        let mut client = Client::new(terms, SessionId(1), Millis(0));
        let _ = client.begin(Op(1), OBJECT, Mode::Shared, now);
        let grant = Grant { object: OBJECT, mode: Mode::Exclusive, number: GrantNo(1) };
        let _ = client.reply(Reply::Granted { grant, request: RequestNo(0), takes_over: true }, now);
        assert_eq!(client.reduce(OBJECT), [], "it is not taken over yet");
        let _ = client.taken_over(OBJECT, now);
        assert_eq!(client.reply(Reply::Recall { grant, keeps: Some(Mode::Shared) }, now), [], "it is in use");
        assert_eq!(client.reduce(OBJECT), [Do::Send(Call::Release { grant, keeps: Some(Mode::Shared) })]);
        assert_eq!((client.mode_of(OBJECT), client.is_recalled(OBJECT)), (Some(Mode::Shared), false));
        assert_eq!(client.reduce(OBJECT), []);
    }

    /// The report of a takeover may be lost with its connection.
    #[test]
    fn a_new_connection_says_again_what_was_taken_over() {
        let (terms, now) = (Terms::DEFAULT, Millis(1));
        let mut client = Client::new(terms, SessionId(1), Millis(0));
        let _ = client.begin(Op(1), OBJECT, Mode::Exclusive, now);
        let grant = Grant { object: OBJECT, mode: Mode::Exclusive, number: GrantNo(1) };
        let _ = client.reply(Reply::Granted { grant, request: RequestNo(0), takes_over: true }, now);
        let resume = |number, held: &[Grant], taken_over: &[Grant]| {
            let (held, taken_over) = (held.to_vec(), taken_over.to_vec());
            Do::Send(Call::Resume { number, held, kept: Vec::new(), taken_over, locks: Vec::new() })
        };
        assert_eq!(client.connected(Vec::new()), [resume(1, &[grant], &[])], "it is not taken over yet");
        let taken_over = Do::Send(Call::TakenOver { grant });
        let mut given_back = client.clone();
        let _ = given_back.give_back(Op(1), OBJECT, now);
        assert_eq!(given_back.connected(Vec::new()), [resume(2, &[], &[])], "it stays to be done");
        assert_eq!(client.taken_over(OBJECT, now), std::slice::from_ref(&taken_over));
        assert_eq!(client.connected(Vec::new()), [resume(2, &[grant], &[]), taken_over]);
        for is_reduced in [false, true] {
            let mut client = client.clone();
            let mode = if is_reduced { Mode::Shared } else { Mode::Exclusive };
            let kept = Grant { mode, ..grant };
            if is_reduced {
                let _ = client.reduce(OBJECT);
                assert_eq!(client.connected(Vec::new()), [resume(3, &[kept], &[])]);
            }
            // The release may be lost as well.
            let _ = client.give_back(Op(1), OBJECT, now);
            let number = if is_reduced { 4 } else { 3 };
            assert_eq!(client.connected(Vec::new()), [resume(number, &[], &[kept])]);
            let asked = client.begin(Op(2), OBJECT, Mode::Shared, now);
            let [Do::Send(Call::Acquire { request, .. })] = asked[..] else { panic!("{asked:?}") };
            let next = Grant { number: GrantNo(2), mode: Mode::Shared, ..grant };
            let _ = client.reply(Reply::Granted { grant: next, request, takes_over: false }, now);
            assert_eq!(client.connected(Vec::new()), [resume(number + 1, &[next], &[])]);
        }
    }

    /// The operation that recovers an object uses its lease from that moment on: a recall that arrives meanwhile waits
    /// until it has ended.
    #[test]
    fn a_lease_that_is_recalled_during_its_takeover_is_kept_until_the_operation_has_ended() {
        for mode in [Mode::Shared, Mode::Exclusive] {
            for keeps in [None, Some(Mode::Shared)] {
                let (terms, now) = (Terms::DEFAULT, Millis(1));
                let mut client = Client::new(terms, SessionId(1), Millis(0));
                let asked = client.begin(Op(1), OBJECT, mode, now);
                let [Do::Send(Call::Acquire { request, .. })] = asked[..] else { panic!("{asked:?}") };
                let grant = Grant { object: OBJECT, mode: Mode::Exclusive, number: GrantNo(1) };
                let ticket = Ticket { op: Op(1), object: OBJECT, mode };
                let granted = client.reply(Reply::Granted { grant, request, takes_over: true }, now);
                assert_eq!(granted, [Do::TakeOver { object: OBJECT, by: Some(ticket) }]);
                assert_eq!(client.reply(Reply::Recall { grant, keeps }, now), []);
                assert_eq!(client.taken_over(OBJECT, now), [Do::Send(Call::TakenOver { grant })]);
                assert_eq!(client.mode_of(OBJECT), Some(Mode::Exclusive));
                assert_eq!(client.finish(ticket, now), (true, vec![Do::Flush { object: OBJECT, keeps }]));
            }
        }
    }
}
