//! The changes of a vault's newest commits, in memory. A host whose copy is not much older gets only those. Older
//! changes are in the table only.

use lamassu_anchor::head::Head;
use lamassu_anchor::table::{self, Change};
use lamassu_rpc::{DELTA_COMMITS_MAX, DELTA_MAX};
use std::collections::VecDeque;
use std::sync::Arc;

/// The changes of the newest commits of one vault.
#[derive(Default)]
pub struct Recent {
    /// For each commit, the head that it is based on, and its changes, packed.
    commits: VecDeque<(Head, Arc<[u8]>)>,
    len: usize,
}

impl Recent {
    /// Adds a commit based on `base`, which is the head after the newest commit here.
    pub fn push(&mut self, base: Head, changes: &[Change]) {
        let packed: Arc<[u8]> = table::pack(changes).into();
        self.len += packed.len();
        self.commits.push_back((base, packed));
        while self.commits.len() > DELTA_COMMITS_MAX || self.len > DELTA_MAX {
            let Some((_, oldest)) = self.commits.pop_front() else { return };
            self.len -= oldest.len();
        }
    }

    /// The commits since a head, in order. `None`: the head is unknown or too old.
    pub fn since(&self, head: Head) -> Option<Vec<Arc<[u8]>>> {
        let first = self.commits.iter().position(|(base, _)| *base == head)?;
        Some(self.commits.iter().skip(first).map(|(_, packed)| packed.clone()).collect())
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
        let (mut recent, mut heads) = (Recent::default(), vec![Head([0; 32])]);
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
        assert!(recent.since(last).is_some() && recent.commits.len() < 100);
        recent.push(last.after(&changes(1)), &changes(DELTA_MAX));
        assert!(recent.commits.is_empty() && recent.len == 0);
    }
}
