//! What hosts have at most in all vaults together: a host that has little in each of very many has much. The counts are
//! in memory, and those of a vault go with it.

use crate::counts::{Counted, Counts};
use crate::recent::Recents;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Locked ranges of one host, and its requests for locks that wait. Each takes up to 1 KiB.
pub const LOCKS_OF_HOST: usize = 1 << 16;
/// Those of all hosts.
const LOCKS_OF_ALL: usize = 1 << 20;

/// What is counted for all vaults.
#[derive(Clone)]
pub struct Bounds {
    /// by host: the vaults in which it has sessions
    attended: Counts<String>,
    attended_max: usize,
    /// by host: locks
    pub(crate) locks: Locks,
    /// the changes of the newest commits
    pub(crate) recent: Recents,
}

impl Bounds {
    /// `vaults_of_host`: vaults in which one host may have sessions.
    pub fn new(vaults_of_host: usize) -> Bounds {
        let attended = Counts::default();
        Bounds { attended, attended_max: vaults_of_host, locks: Locks::default(), recent: Recents::default() }
    }

    /// A vault in which a host has sessions, until this is dropped; `None`: it has them in as many as it may.
    pub(crate) fn attends(&self, host: &str) -> Option<Attends> {
        self.attended.one_more(&host.to_owned(), self.attended_max).map(Arc::new)
    }

    /// The same for one that has them already.
    pub(crate) fn attends_already(&self, host: &str) -> Option<Attends> {
        self.attended.one_more(&host.to_owned(), usize::MAX).map(Arc::new)
    }
}

/// One of the vaults in which a host has sessions. All sessions of the host there share it.
pub(crate) type Attends = Arc<Counted<String>>;

/// Locks, by host.
#[derive(Clone, Default)]
pub(crate) struct Locks(Arc<Mutex<ByHost>>);

#[derive(Default)]
struct ByHost {
    of: HashMap<String, usize>,
    all: usize,
}

impl Locks {
    /// Those of a session, none yet.
    pub fn of_session(&self, host: &str) -> SessionLocks {
        SessionLocks { all: self.clone(), host: host.into(), count: 0 }
    }
}

/// The locks of one session.
pub(crate) struct SessionLocks {
    all: Locks,
    host: String,
    count: usize,
}

impl SessionLocks {
    /// Whether its host may have one more.
    pub fn has_room(&self) -> bool {
        let counted = self.all.0.lock();
        let its = counted.of.get(&self.host).copied().unwrap_or_default();
        its < LOCKS_OF_HOST && counted.all < LOCKS_OF_ALL
    }

    /// Whether its host can have so many in this session. More than it may take: a request that waited may make three
    /// ranges of one when it is granted. So may all hosts together have more. What others report costs no host its own
    /// share.
    pub fn can_be(&self, count: usize) -> bool {
        let counted = self.all.0.lock();
        let its = counted.of.get(&self.host).copied().unwrap_or_default();
        let with = |all: usize| all - self.count + count;
        let is_within = |its: usize, all: usize| its <= 2 * LOCKS_OF_HOST && all <= 2 * LOCKS_OF_ALL;
        count <= self.count || with(its) <= LOCKS_OF_HOST || is_within(with(its), with(counted.all))
    }

    /// It has so many now.
    pub fn set(&mut self, count: usize) {
        if count == self.count {
            return;
        }
        let counted = &mut *self.all.0.lock();
        counted.all = counted.all + count - self.count;
        let its = counted.of.entry(self.host.clone()).or_default();
        *its = *its + count - self.count;
        if *its == 0 {
            counted.of.remove(&self.host);
        }
        self.count = count;
    }
}

impl Drop for SessionLocks {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_so_many_locks_in_all_its_sessions_and_leaves_others_theirs() {
        let locks = Locks::default();
        let [mut one, mut two, other] = ["a", "a", "b"].map(|host| locks.of_session(host));
        one.set(LOCKS_OF_HOST - 1);
        assert!(two.has_room());
        two.set(1);
        assert!(!one.has_room() && !two.has_room() && other.has_room());
        assert!(one.can_be(LOCKS_OF_HOST - 1) && !two.can_be(2 * LOCKS_OF_HOST) && other.can_be(LOCKS_OF_HOST));
        drop(one);
        assert!(two.has_room() && two.can_be(LOCKS_OF_HOST));
        drop((two, other));
        assert!(locks.0.lock().of.is_empty() && locks.0.lock().all == 0);
    }

    #[test]
    fn all_hosts_together_have_so_many_locks() {
        let locks = Locks::default();
        let mut all = Vec::new();
        for host in 0..LOCKS_OF_ALL / LOCKS_OF_HOST {
            assert!(locks.of_session("one more").has_room());
            let mut its = locks.of_session(&host.to_string());
            its.set(LOCKS_OF_HOST);
            all.push(its);
        }
        let more = locks.of_session("one more");
        assert!(!more.has_room() && more.can_be(LOCKS_OF_HOST));
        // A restarted server takes what hosts report, but not from any number of them.
        for host in 0..LOCKS_OF_ALL / LOCKS_OF_HOST {
            let mut its = locks.of_session(&format!("and {host}"));
            assert!(its.can_be(LOCKS_OF_HOST));
            its.set(LOCKS_OF_HOST);
            all.push(its);
        }
        assert!(!more.can_be(LOCKS_OF_HOST + 1) && more.can_be(LOCKS_OF_HOST));
    }
}
