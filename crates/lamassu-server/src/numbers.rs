//! How many numbers of sessions and grants this process has given in each vault. A vault that is opened again goes on
//! from there: its *run* is that of the server's start. If each opening began one, whoever opens a vault often enough
//! would use up the runs by which a restored server is ahead of the lost one.
//!
//! And which reports of sessions it has heard: bytes of earlier connections may arrive after the vault was opened
//! again. Those to an earlier process reach no other.

use lamassu_format::header::VaultId;
use lamassu_lease::SessionId;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// For all vaults that this process has opened. What is durable of them stays, too, however many come and go.
#[derive(Clone, Default)]
pub struct Numbers(Arc<Mutex<HashMap<VaultId, Given>>>);

/// For one vault.
#[derive(Clone, Default)]
pub(crate) struct Given(Arc<Mutex<OfVault>>);

#[derive(Default)]
struct OfVault {
    /// `None`: its run has not begun.
    count: Option<u64>,
    /// The newest report of each session that is alive, or was a moment ago.
    reports: HashMap<SessionId, u64>,
}

impl Numbers {
    /// For a vault. There is one for all its openings.
    pub(crate) fn of(&self, vault: &VaultId) -> Given {
        self.0.lock().entry(*vault).or_default().clone()
    }
}

impl Given {
    /// How many were given, if its run has begun.
    pub fn count(&self) -> Option<u64> {
        self.0.lock().count
    }

    /// Its run has begun, and so many were given. To be called before one of them is told to anyone.
    pub fn set(&self, count: u64) {
        let given = &mut self.0.lock().count;
        *given = Some(given.map_or(count, |before| before.max(count)));
    }

    /// The newest reports.
    pub fn reports(&self) -> Vec<(SessionId, u64)> {
        self.0.lock().reports.iter().map(|(session, number)| (*session, *number)).collect()
    }

    /// A session has made this report. Those of sessions that are not alive are forgotten.
    pub fn hear(&self, session: SessionId, number: u64, is_alive: impl Fn(SessionId) -> bool) {
        let reports = &mut self.0.lock().reports;
        reports.insert(session, number);
        reports.retain(|session, _| is_alive(*session));
    }
}
