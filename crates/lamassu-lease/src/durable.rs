//! The state of a vault's leases that outlives the server's process, and its changes.

use crate::{GrantNo, Object, SessionId};
use std::collections::{BTreeMap, BTreeSet};

/// The state that outlives the server's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Durable {
    /// number of starts of the server, of those in which it has used these leases
    pub runs: u64,
    /// sessions that have not ended
    pub sessions: BTreeSet<SessionId>,
    /// exclusive leases
    pub exclusive: BTreeMap<Object, (SessionId, GrantNo)>,
    /// objects whose exclusive holder has expired, until another session has taken them over
    pub abandoned: BTreeSet<Object>,
}

/// A change of the durable state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// The number of the server's run.
    Run(u64),
    /// A session began.
    Began(SessionId),
    /// A session has ended.
    Ended(SessionId),
    /// A session holds an object exclusively.
    Exclusive(Object, SessionId, GrantNo),
    /// The exclusive lease of this object was released.
    Released(Object),
    /// The object must be taken over.
    Abandoned(Object),
    /// The object has been taken over.
    TakenOver(Object),
}

impl Durable {
    /// Applies a change.
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
