//! The changes of the newest commits, in memory. A host whose copy of a vault is not much older gets only those. Older
//! changes are in the table only.
//!
//! All vaults share the room for them. Beyond it the vault gives its changes up that was used least recently, among
//! those that have more than an equal share: so who writes much in very many vaults takes nothing from who has little.

use lamassu_anchor::head::Head;
use lamassu_anchor::table::{self, Change};
use lamassu_rpc::{DELTA_COMMITS_MAX, DELTA_MAX};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Bytes of the changes of all vaults.
const ALL_MAX: usize = 64 << 20;

/// The changes of the newest commits of all vaults.
#[derive(Clone, Default)]
pub struct Recents(Arc<Mutex<All>>);

#[derive(Default)]
struct All {
    of: HashMap<u64, Commits>,
    len: usize,
    /// How many vaults there were, and how often one was used.
    given: u64,
    uses: u64,
}

#[derive(Default)]
struct Commits {
    /// For each commit, the head that it is based on, and its changes, packed.
    commits: VecDeque<(Head, Arc<[u8]>)>,
    len: usize,
    used: u64,
}

/// Those of one vault, until this is dropped.
pub struct Recent {
    all: Recents,
    number: u64,
}

impl Recents {
    /// A vault without any yet.
    pub fn of_vault(&self) -> Recent {
        let all = &mut *self.0.lock();
        all.given += 1;
        all.of.insert(all.given, Commits::default());
        Recent { all: self.clone(), number: all.given }
    }
}

impl All {
    fn used(&mut self, number: u64) -> Option<&mut Commits> {
        self.uses += 1;
        let one = self.of.get_mut(&number)?;
        one.used = self.uses;
        Some(one)
    }

    fn forget(&mut self, number: u64) {
        if let Some(one) = self.of.get_mut(&number) {
            one.commits.clear();
            self.len -= std::mem::take(&mut one.len);
        }
    }

    /// Makes room, if there is too little.
    fn bound(&mut self) {
        while self.len > ALL_MAX {
            let share = ALL_MAX / self.of.len().max(1);
            let above = self.of.iter().filter(|(_, one)| one.len > share);
            let Some(number) = above.min_by_key(|(_, one)| one.used).map(|(number, _)| *number) else { return };
            self.forget(number);
        }
    }
}

impl Recent {
    /// Adds a commit based on `base`, which is the head after the newest commit here.
    pub fn push(&mut self, base: Head, changes: &[Change]) {
        let packed: Arc<[u8]> = table::pack(changes).into();
        let all = &mut *self.all.0.lock();
        let Some(one) = all.used(self.number) else { return };
        let before = one.len;
        one.len += packed.len();
        one.commits.push_back((base, packed));
        while one.commits.len() > DELTA_COMMITS_MAX || one.len > DELTA_MAX {
            let Some((_, oldest)) = one.commits.pop_front() else { break };
            one.len -= oldest.len();
        }
        let after = one.len;
        all.len = all.len + after - before;
        all.bound();
    }

    /// The commits since a head, in order. `None`: the head is unknown or too old.
    pub fn since(&self, head: Head) -> Option<Vec<Arc<[u8]>>> {
        let all = &mut *self.all.0.lock();
        let one = all.used(self.number)?;
        let first = one.commits.iter().position(|(base, _)| *base == head)?;
        Some(one.commits.iter().skip(first).map(|(_, packed)| packed.clone()).collect())
    }
}

impl Drop for Recent {
    fn drop(&mut self) {
        let all = &mut *self.all.0.lock();
        all.forget(self.number);
        all.of.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_anchor::table::Space;

    fn changes(len: usize) -> Vec<Change> {
        vec![Change { space: Space::Objects, key: b"k".to_vec(), value: Some(vec![7; len]) }]
    }

    #[test]
    fn the_commits_since_a_head_lead_to_the_newest_and_there_are_not_too_many() {
        let (all, mut heads) = (Recents::default(), vec![Head([0; 32])]);
        let mut recent = all.of_vault();
        assert!(recent.since(heads[0]).is_none());
        for n in 0..DELTA_COMMITS_MAX + 5 {
            recent.push(heads[n], &changes(n % 100));
            heads.push(heads[n].after(&changes(n % 100)));
        }
        for (n, head) in heads.iter().enumerate().take(heads.len() - 1) {
            let Some(commits) = recent.since(*head) else {
                assert!(n < 5, "{n}");
                continue;
            };
            let unpacked = commits.iter().map(|packed| table::unpack(packed, 1).expect("parses"));
            assert_eq!(unpacked.fold(*head, |head, changes| head.after(&changes)), heads[heads.len() - 1]);
        }
        assert!(recent.since(Head([9; 32])).is_none(), "no copy has this head");
        // By their length, too; one that is longer than all may be leaves nothing.
        let last = heads[heads.len() - 1];
        recent.push(last, &changes(DELTA_MAX - 1000));
        assert!(recent.since(last).is_some_and(|commits| commits.len() < 100));
        recent.push(last.after(&changes(1)), &changes(DELTA_MAX));
        assert!(recent.since(last).is_none() && all.0.lock().len == 0);
    }

    /// A host may write the most in each of very many vaults.
    #[test]
    fn all_vaults_together_have_so_much_and_who_has_little_keeps_it() {
        let all = Recents::default();
        let head = Head([1; 32]);
        let [mut little, mut much] = [(); 2].map(|()| all.of_vault());
        little.push(head, &changes(10_000));
        much.push(head, &changes(DELTA_MAX - 100));
        let mut many = Vec::new();
        for number in 0..200 {
            let mut one = all.of_vault();
            one.push(head, &changes(DELTA_MAX - 100));
            many.push(one);
            assert!(all.0.lock().len <= ALL_MAX, "{number}");
        }
        assert!(little.since(head).is_some(), "it has less than its share");
        assert!(much.since(head).is_none() && many[0].since(head).is_none() && many[199].since(head).is_some());
        drop((little, much, many));
        assert!(all.0.lock().len == 0 && all.0.lock().of.is_empty());
    }
}
