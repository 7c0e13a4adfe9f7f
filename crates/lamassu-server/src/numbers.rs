//! How many numbers of sessions and grants this process has given in each vault. A vault that is opened again goes on
//! from there: its *run* is that of the server's start. If each opening began one, whoever opens a vault often enough
//! would use up the runs by which a restored server is ahead of the lost one.

use lamassu_format::header::VaultId;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// For all vaults that this process has opened. What is durable of them stays, too, however many come and go.
#[derive(Clone, Default)]
pub struct Numbers(Arc<Mutex<HashMap<VaultId, Given>>>);

/// For one vault; `None`: its run has not begun.
#[derive(Clone, Default)]
pub(crate) struct Given(Arc<Mutex<Option<u64>>>);

impl Numbers {
    /// For a vault. There is one for all its openings.
    pub(crate) fn of(&self, vault: &VaultId) -> Given {
        self.0.lock().entry(*vault).or_default().clone()
    }
}

impl Given {
    /// How many were given, if its run has begun.
    pub fn count(&self) -> Option<u64> {
        *self.0.lock()
    }

    /// Its run has begun, and so many were given. To be called before one of them is told to anyone.
    pub fn set(&self, count: u64) {
        let given = &mut *self.0.lock();
        *given = Some(given.map_or(count, |before| before.max(count)));
    }
}
