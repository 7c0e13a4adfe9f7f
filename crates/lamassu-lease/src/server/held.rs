//! An object with its leases and the requests that wait for it.

use crate::{GrantNo, Millis, Mode, RequestNo, SessionId};
use std::collections::{BTreeMap, VecDeque};

/// A lease of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Lease {
    pub mode: Mode,
    pub number: GrantNo,
    pub since: Millis,
    /// The mode that it was asked to keep; the outer `None`: it was not recalled.
    pub recalled: Option<Option<Mode>>,
    /// Time of the first recall; or when it was last kept, if that was later.
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

    /// The request that is granted next.
    pub fn next(&self) -> Option<Waiting> {
        self.waiting.iter().find(|waiting| waiting.is_named).copied()
    }

    pub fn is_unused(&self) -> bool {
        self.leases.is_empty() && self.waiting.is_empty()
    }
}
