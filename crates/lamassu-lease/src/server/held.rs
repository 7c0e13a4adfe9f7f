//! An object with its leases and the requests that wait for it.

use crate::{GrantNo, Millis, Mode, RequestNo, SessionId};
use std::collections::{BTreeMap, VecDeque};

/// A lease of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Lease {
    pub mode: Mode,
    pub number: GrantNo,
    pub since: Millis,
    /// The mode that it was asked to keep; the outer `None`: it was not recalled, on the newest connection.
    pub recalled: Option<Option<Mode>>,
    /// Time of the first recall for a request that still waits, or has waited together with one that does; or when the
    /// lease was last kept, if that was later. Later by the time that does not count. `None`: nobody waits for it.
    pub asked: Option<Millis>,
    /// Its holder says that it keeps it on purpose.
    pub is_kept: bool,
}

impl Lease {
    pub fn new(mode: Mode, number: GrantNo, now: Millis) -> Lease {
        Lease { mode, number, since: now, recalled: None, asked: None, is_kept: false }
    }

    /// Whoever has kept it has a term from then on to release it.
    pub fn keep(&mut self, kept: bool, now: Millis) {
        if self.is_kept && !kept {
            self.asked = self.asked.map(|_| now);
        }
        self.is_kept = kept;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Waiting {
    pub session: SessionId,
    pub request: RequestNo,
    pub mode: Mode,
    /// The session's newest connection has named it. One that it has not named is not granted, and keeps its place.
    pub is_named: bool,
}

impl Waiting {
    /// Whether a lease of a session is in its way.
    pub fn is_held_up_by(&self, session: SessionId, lease: &Lease) -> bool {
        session != self.session && Some(lease.mode) > self.leaves()
    }

    /// The mode that leases in its way may be reduced to.
    fn leaves(&self) -> Option<Mode> {
        (self.mode == Mode::Shared).then_some(Mode::Shared)
    }
}

/// A lease that is recalled, its session, and the mode that may be kept.
pub(super) type Recalled = (SessionId, Lease, Option<Mode>);

/// An object with leases or waiting requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Held {
    pub leases: BTreeMap<SessionId, Lease>,
    waiting: VecDeque<Waiting>,
}

impl Held {
    /// Queues a request. A client sends one at a time; more are ignored. One that a new connection repeats is where it
    /// was.
    pub fn request(&mut self, session: SessionId, request: RequestNo, mode: Mode) {
        let its = self.waiting.iter_mut().find(|waiting| waiting.session == session);
        match its {
            Some(waiting) if waiting.is_named => return,
            Some(waiting) if (waiting.request, waiting.mode) == (request, mode) => {
                waiting.is_named = true;
                return;
            }
            _ => {}
        }
        self.waits_no_longer(session);
        self.waiting.push_back(Waiting { session, request, mode, is_named: true });
    }

    /// A session has a new connection, which has named no request yet.
    pub fn reconnects(&mut self, session: SessionId) {
        let its = self.waiting.iter_mut().filter(|waiting| waiting.session == session);
        its.for_each(|waiting| waiting.is_named = false);
    }

    pub fn waits_no_longer(&mut self, session: SessionId) {
        self.waiting.retain(|waiting| waiting.session != session);
    }

    /// The requests in their order. What is to be taken over is granted exclusively, whatever was requested.
    fn requests(&self, takes_over: bool) -> impl Iterator<Item = Waiting> {
        let mode = move |waiting: &Waiting| if takes_over { Mode::Exclusive } else { waiting.mode };
        self.waiting.iter().map(move |waiting| Waiting { mode: mode(waiting), ..*waiting })
    }

    /// The request that is granted next.
    pub fn next(&self, takes_over: bool) -> Option<Waiting> {
        self.requests(takes_over).find(|waiting| waiting.is_named)
    }

    /// Whether a request waits, named or not.
    pub fn is_waited_for(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Recalls the leases in the way of the next request that were held for long enough. If a lease is in the way of no
    /// request any more, named or not, its recall is void, and so is its deadline: the next request recalls it again.
    /// Whoever has a deadline is recalled on each new connection, also for a request that is not named yet.
    pub fn recall(&mut self, takes_over: bool, is_over: impl Fn(&Lease) -> bool, now: Millis) -> Vec<Recalled> {
        let requests: Vec<_> = self.requests(takes_over).collect();
        let next = requests.iter().find(|waiting| waiting.is_named);
        let mut all = Vec::new();
        for (session, lease) in &mut self.leases {
            let waits = |waiting: &&Waiting| waiting.is_held_up_by(*session, lease);
            let Some(first) = requests.iter().find(waits) else {
                (lease.recalled, lease.asked) = (None, None);
                continue;
            };
            let by = next.filter(waits).or_else(|| lease.asked.map(|_| first));
            let Some(keeps) = by.map(Waiting::leaves) else { continue };
            let was_asked = lease.recalled.is_some_and(|asked| asked <= keeps);
            if !was_asked && is_over(lease) {
                lease.recalled = Some(keeps);
                lease.asked.get_or_insert(now);
                all.push((*session, *lease, keeps));
            }
        }
        all
    }

    pub fn is_unused(&self) -> bool {
        self.leases.is_empty() && self.waiting.is_empty()
    }
}
