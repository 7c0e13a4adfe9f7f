//! Messages of sessions that have arrived, and wait for their vault. While one waits, the server reads nothing more of
//! its session. So that session is not silent, however long the vault is at work (R3 in `docs/sharing.md`).

use lamassu_format::header::VaultId;
use lamassu_lease::{Millis, SessionId};
use lamassu_rpc::clock::now;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// A session, and the host that says so: nobody speaks for sessions of others.
type Key = (VaultId, String, SessionId);

/// For all vaults: a message may arrive before its vault is open. By session: when those that wait have arrived.
#[derive(Clone, Default)]
pub struct Arrivals(Arc<Mutex<HashMap<Key, Vec<Millis>>>>);

/// A message that has arrived. When this is dropped, it has been handled, or refused.
pub struct Arrived {
    all: Arrivals,
    key: Key,
    at: Millis,
}

impl Arrivals {
    /// A message of a host about its session has arrived.
    pub fn one(&self, vault: VaultId, host: &str, session: SessionId) -> Arrived {
        let (key, at) = ((vault, host.to_owned(), session), now());
        self.0.lock().entry(key.clone()).or_default().push(at);
        Arrived { all: self.clone(), key, at }
    }

    /// When the first one that waits has arrived; `None`: none waits.
    pub fn first(&self, vault: VaultId, host: &str, session: SessionId) -> Option<Millis> {
        self.0.lock().get(&(vault, host.into(), session))?.iter().min().copied()
    }
}

impl Drop for Arrived {
    fn drop(&mut self) {
        let mut all = self.all.0.lock();
        if let Some(times) = all.get_mut(&self.key) {
            if let Some(place) = times.iter().position(|at| *at == self.at) {
                times.swap_remove(place);
            }
            if times.is_empty() {
                all.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_has_messages_that_wait_until_all_are_handled() {
        let (arrivals, vault) = (Arrivals::default(), VaultId([1; 16]));
        let one = |host, session| arrivals.one(vault, host, SessionId(session));
        let first = |host, session| arrivals.first(vault, host, SessionId(session));
        let (early, late) = (one("a", 7), one("a", 7));
        assert_eq!((first("a", 7), first("b", 7), first("a", 8)), (Some(early.at), None, None));
        drop(early);
        assert_eq!(first("a", 7), Some(late.at));
        drop(late);
        assert!(first("a", 7).is_none() && arrivals.0.lock().is_empty());
    }
}
