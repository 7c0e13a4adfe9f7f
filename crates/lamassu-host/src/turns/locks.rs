//! Locks of this host's programs, which its sessions have.

use lamassu_rpc::host::{LockRequest, Turns};
use lamassu_vault::locks::{Asked, Done, Locks, Object, Outcome, Waiting};
use std::sync::{Arc, OnceLock};

/// The locks of one vault. Empty until its session begins.
#[derive(Default)]
pub(super) struct HostLocks(OnceLock<Arc<Turns>>);

impl HostLocks {
    /// The first session has begun.
    pub fn begin(&self, turns: &Arc<Turns>) {
        // The later sessions are those of the same object.
        let _ = self.0.set(turns.clone());
    }
}

impl Locks for HostLocks {
    fn ask(&self, asked: Asked, done: Done) -> Option<Box<dyn Waiting>> {
        let Some(turns) = self.0.get() else {
            done(Outcome::Ended);
            return None;
        };
        let request = turns.lock(asked, done)?;
        Some(Box::new(Sent(request)))
    }

    fn closes(&self, file: Object, owner: u64) -> Option<Asked> {
        self.0.get()?.locks(|holder| holder.closes(file, owner))
    }

    fn closed(&self, handle: u64) -> Vec<Asked> {
        self.0.get().map(|turns| turns.locks(|holder| holder.closed(handle))).unwrap_or_default()
    }

    fn is_lost(&self, handle: u64) -> bool {
        self.0.get().is_some_and(|turns| turns.locks(|holder| holder.is_lost(handle)))
    }
}

/// A request about locks that was sent.
struct Sent(LockRequest);

impl Waiting for Sent {
    fn cancel(&self) {
        self.0.cancel();
    }
}
