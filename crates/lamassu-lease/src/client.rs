//! What this host holds, and which of its operations may go on.
//!
//! * An operation begins with [`Client::begin`], and goes on when [`Do::Go`] says so: while a lease of its object is
//!   good. Its result counts only if [`Client::finish`] says that the session was good until then.
//! * A lease that is recalled takes no further operations. When those under way have ended, what was changed is
//!   committed and caches forget the object ([`Do::Flush`]); then it is released.
//! * The session is *good* until [`Terms::stop`] after the last heartbeat that was answered had been *sent*. Then
//!   nothing is done by it. A later answer makes it good again: the server has not ended it. [`Reply::Ended`] is final.

use crate::{Call, Grant, Millis, Mode, Object, Reply, RequestNo, SessionId, Terms};
use std::collections::{BTreeMap, VecDeque};

/// Heartbeats without an answer that are remembered.
const BEATS_MAX: usize = 64;

/// An operation of this host, by the caller's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Op(pub u64);

/// What is to be done, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Do {
    /// Send this to the server.
    Send(Call),
    /// The operation may go on.
    Go(Ticket),
    /// The operation has failed: the session has ended.
    Fail(Op),
    /// Commit what was changed of an object, have all caches forget it, or take it for shared; then
    /// [`Client::flushed`].
    Flush {
        /// which
        object: Object,
        /// what is kept
        keeps: Option<Mode>,
    },
    /// Put right what an earlier holder left of an object, and commit that; then [`Client::taken_over`].
    TakeOver(Object),
    /// Forget everything. What was not committed is lost.
    Lost,
}

/// That an operation may use its object in this way, until it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    /// which operation
    pub op: Op,
    /// of what
    pub object: Object,
    /// how
    pub mode: Mode,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Lease {
    grant: Grant,
    /// Operations under way.
    users: u32,
    /// What it keeps after the recall, or after the change of mode that an operation of this host wants.
    recalled: Option<Option<Mode>>,
    /// A flush is under way, after which this is kept.
    flushing: Option<Option<Mode>>,
    /// It is to be taken over, which is under way.
    takes_over: bool,
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
    /// Until then the session is good, by this host's clock.
    good_until: Millis,
    has_ended: bool,
    /// When heartbeats were sent that have no answer yet.
    beats: BTreeMap<u64, Millis>,
    next_beat: u64,
    next_request: u64,
    leases: BTreeMap<Object, Lease>,
    /// What was asked for, and how.
    wanted: BTreeMap<Object, (RequestNo, Mode)>,
    waiting: VecDeque<Waiting>,
}

impl Client {
    /// A session that the server has begun. `asked`: when it was asked for, by this host's clock.
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
            wanted: BTreeMap::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Its session.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// Whether what is held may be used now.
    pub fn is_good(&self, now: Millis) -> bool {
        !self.has_ended && now < self.good_until
    }

    /// Until when, unless an answer comes.
    pub fn good_until(&self) -> Millis {
        self.good_until
    }

    /// What is held of an object.
    pub fn mode_of(&self, object: Object) -> Option<Mode> {
        self.leases.get(&object).map(|lease| lease.grant.mode)
    }

    /// Whether somebody else wants what conflicts with what is held of an object.
    pub fn is_recalled(&self, object: Object) -> bool {
        self.leases.get(&object).is_some_and(|lease| lease.recalled.is_some())
    }

    /// A heartbeat is due.
    pub fn beat(&mut self, now: Millis) -> Do {
        let beat = self.next_beat;
        self.next_beat += 1;
        if self.beats.len() >= BEATS_MAX {
            self.beats.pop_first();
        }
        self.beats.insert(beat, now);
        Do::Send(Call::Heartbeat { beat })
    }

    /// There is a new connection to the server.
    pub fn connected(&mut self) -> Vec<Do> {
        if self.has_ended {
            return Vec::new();
        }
        self.beats.clear();
        let held = self.leases.values().map(|lease| lease.grant).collect();
        let resume = Do::Send(Call::Resume { held });
        let wanted = self.wanted.iter();
        let again = wanted.map(|(&object, &(request, mode))| Do::Send(Call::Acquire { request, object, mode }));
        std::iter::once(resume).chain(again).collect()
    }

    /// An operation wants to use an object.
    pub fn begin(&mut self, op: Op, object: Object, mode: Mode, now: Millis) -> Vec<Do> {
        if self.has_ended {
            return vec![Do::Fail(op)];
        }
        self.waiting.push_back(Waiting { op, object, mode });
        self.go_on(object, now)
    }

    /// An operation has ended. Whether its result counts: otherwise it has failed, whatever it did.
    pub fn finish(&mut self, ticket: Ticket, now: Millis) -> (bool, Vec<Do>) {
        let is_good = self.is_good(now);
        if let Some(lease) = self.leases.get_mut(&ticket.object) {
            lease.users = lease.users.saturating_sub(1);
        }
        (is_good, self.go_on(ticket.object, now))
    }

    /// What [`Do::Flush`] asked for is done.
    pub fn flushed(&mut self, object: Object, now: Millis) -> Vec<Do> {
        let Some(lease) = self.leases.get_mut(&object) else { return Vec::new() };
        let Some(keeps) = lease.flushing.take() else { return Vec::new() };
        let grant = lease.grant;
        // It may have been asked for more meanwhile, which is another flush.
        lease.recalled = lease.recalled.filter(|asked| *asked < keeps);
        match keeps {
            Some(mode) => lease.grant.mode = mode,
            None => drop(self.leases.remove(&object)),
        }
        let mut all = vec![Do::Send(Call::Release { grant, keeps })];
        all.extend(self.go_on(object, now));
        all
    }

    /// What [`Do::TakeOver`] asked for is done.
    pub fn taken_over(&mut self, object: Object, now: Millis) -> Vec<Do> {
        let Some(lease) = self.leases.get_mut(&object).filter(|lease| lease.takes_over) else { return Vec::new() };
        lease.takes_over = false;
        let mut all = vec![Do::Send(Call::TakenOver { grant: lease.grant })];
        all.extend(self.go_on(object, now));
        all
    }

    /// An operation of which no result counts any more ends, or waits no longer, and gives back whatever is held of its
    /// object, of which it is the only user: what was changed is committed, and all caches have forgotten it. What was
    /// to be taken over is that yet.
    pub fn give_back(&mut self, op: Op, object: Object, now: Millis) -> Vec<Do> {
        self.waiting.retain(|waiting| waiting.op != op);
        let lease = self.leases.remove(&object).map(|lease| lease.grant);
        let mut all: Vec<_> = lease.map(|grant| Do::Send(Call::Release { grant, keeps: None })).into_iter().collect();
        all.extend(self.go_on(object, now));
        all
    }

    /// The server says something.
    pub fn reply(&mut self, reply: Reply, now: Millis) -> Vec<Do> {
        if self.has_ended {
            return Vec::new();
        }
        match reply {
            Reply::Alive { beat } => {
                let Some(sent) = self.beats.get(&beat).copied() else { return Vec::new() };
                // An answer to a later heartbeat says more.
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
                let lease = Lease { grant, users: 0, recalled: None, flushing: None, takes_over };
                self.leases.insert(grant.object, lease);
                if takes_over { vec![Do::TakeOver(grant.object)] } else { self.go_on(grant.object, now) }
            }
            Reply::Recall { grant, keeps } => {
                let lease = self.leases.get_mut(&grant.object).filter(|lease| lease.grant.number == grant.number);
                if let Some(lease) = lease {
                    lease.recalled = Some(lease.recalled.map_or(keeps, |before| before.min(keeps)));
                }
                self.go_on(grant.object, now)
            }
            Reply::Ended => self.end(),
        }
    }

    fn end(&mut self) -> Vec<Do> {
        self.has_ended = true;
        self.leases.clear();
        self.wanted.clear();
        let failed = std::mem::take(&mut self.waiting);
        std::iter::once(Do::Lost).chain(failed.into_iter().map(|waiting| Do::Fail(waiting.op))).collect()
    }

    /// What can be done of an object now.
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
        // A stronger lease is asked for when the weaker one is given back: two that held on to theirs would wait for
        // each other.
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
