//! Where datasets lie: a copy in memory of what is noted with their anchors. It is changed with each of these notes, so
//! that no anchor that comes or goes costs a look at all others.

use lamassu_format::header::VaultId;
use std::collections::{BTreeMap, BTreeSet};

/// The vault around each dataset.
pub(super) type LiesIn = BTreeMap<VaultId, VaultId>;

/// A vault has at most so many vaults around it, itself included. This also ends the search if rows that were damaged,
/// or came from different backups, form a circle.
pub const DEPTH_MAX: usize = 32;

/// Datasets in a vault and in its datasets. Each anchor takes a megabyte of the disk, and files while it is used.
pub const DATASETS_MAX: usize = 4096;

/// A vault, and those that it lies in, from the inside out.
pub(super) fn with_those_around(lies_in: &LiesIn, vault: &VaultId) -> impl Iterator<Item = VaultId> {
    std::iter::successors(Some(*vault), |inner| lies_in.get(inner).copied()).take(DEPTH_MAX)
}

/// Why a dataset may not lie in a vault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misplaced {
    /// The vault lies in it, or is the same.
    Circle,
    /// It, or a dataset in it, would have more than [`DEPTH_MAX`] vaults around it.
    Deep,
    /// The outermost vault would have more than [`DATASETS_MAX`].
    Full,
}

/// The place of each dataset.
#[derive(Clone, Debug, Default)]
pub(super) struct Places {
    around: LiesIn,
    /// The datasets that lie directly in each vault.
    inside: BTreeMap<VaultId, BTreeSet<VaultId>>,
}

impl Places {
    pub fn of(lies_in: LiesIn) -> Places {
        let mut places = Places::default();
        lies_in.into_iter().for_each(|(dataset, around)| places.set(&dataset, Some(around)));
        places
    }

    pub fn around(&self) -> &LiesIn {
        &self.around
    }

    /// From now on a vault lies there; `None`: it is no dataset.
    pub fn set(&mut self, vault: &VaultId, around: Option<VaultId>) {
        let before = match around {
            Some(around) => self.around.insert(*vault, around),
            None => self.around.remove(vault),
        };
        if let Some(before) = before
            && let Some(inside) = self.inside.get_mut(&before)
        {
            inside.remove(vault);
            if inside.is_empty() {
                self.inside.remove(&before);
            }
        }
        if let Some(around) = around {
            self.inside.entry(around).or_default().insert(*vault);
        }
    }

    /// Whether a dataset lies in a vault.
    pub fn has_inside(&self, vault: &VaultId) -> bool {
        self.inside.contains_key(vault)
    }

    /// A vault, the datasets directly in it, those in them, and so on.
    pub fn levels(&self, vault: &VaultId) -> Vec<Vec<VaultId>> {
        let (mut levels, mut seen) = (vec![vec![*vault]], BTreeSet::from([*vault]));
        while let Some(level) = levels.last() {
            let inside = level.iter().filter_map(|vault| self.inside.get(vault)).flatten();
            let next: Vec<_> = inside.copied().filter(|vault| seen.insert(*vault)).collect();
            if next.is_empty() {
                break;
            }
            levels.push(next);
        }
        levels
    }

    /// Whether a dataset may lie in a vault, with those that lie in it. One whose place is known already has been
    /// counted.
    pub fn check(&self, dataset: &VaultId, around: &VaultId) -> Result<(), Misplaced> {
        let outer: Vec<_> = with_those_around(&self.around, around).collect();
        if outer.contains(dataset) {
            return Err(Misplaced::Circle);
        }
        let its = self.levels(dataset);
        if outer.len() + its.len() > DEPTH_MAX {
            return Err(Misplaced::Deep);
        }
        let count = |levels: &[Vec<VaultId>]| levels.iter().map(Vec::len).sum::<usize>();
        let there = outer.last().map_or(0, |outermost| count(&self.levels(outermost)) - 1);
        match self.around.contains_key(dataset) || there + count(&its) <= DATASETS_MAX {
            true => Ok(()),
            false => Err(Misplaced::Full),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: usize) -> VaultId {
        VaultId([[9; 8], (number as u64).to_be_bytes()].concat().try_into().expect("16"))
    }

    /// Vaults, each in the one before.
    fn nested(numbers: std::ops::Range<usize>) -> Places {
        Places::of(numbers.clone().skip(1).map(|number| (id(number), id(number - 1))).collect())
    }

    #[test]
    fn nothing_lies_in_itself_however_many_vaults_are_between() {
        let mut places = nested(0..3);
        places.set(&id(0), None);
        for inner in [0, 1, 2] {
            assert_eq!(places.check(&id(0), &id(inner)), Err(Misplaced::Circle), "{inner}");
        }
        assert_eq!(places.check(&id(0), &id(7)), Ok(()));
        places.set(&id(1), None);
        assert_eq!(places.check(&id(0), &id(2)), Ok(()), "it lies there no more");
        places.set(&id(0), Some(id(2)));
        assert_eq!(places.check(&id(1), &id(0)), Err(Misplaced::Circle), "its own dataset lies around it");
    }

    #[test]
    fn vaults_are_nested_so_deep_and_no_deeper_also_with_what_lies_in_them() {
        let mut places = nested(0..DEPTH_MAX - 1);
        let (inmost, new) = (id(DEPTH_MAX - 2), id(100));
        assert_eq!(places.check(&new, &inmost), Ok(()));
        places.set(&id(101), Some(new));
        assert_eq!(places.check(&new, &inmost), Err(Misplaced::Deep), "another one lies in it");
        assert_eq!(places.check(&new, &id(DEPTH_MAX - 3)), Ok(()));
        places.set(&new, Some(inmost));
        assert_eq!(places.check(&id(102), &new), Err(Misplaced::Deep));
    }

    #[test]
    fn a_vault_has_so_many_datasets_at_any_depth_and_no_more() {
        let mut places = Places::default();
        let has_room = |places: &Places, number| [0, 1].map(|around| places.check(&id(number), &id(around)));
        for number in 1..=DATASETS_MAX {
            // Half of them within another one.
            places.set(&id(number), Some(id(if number % 2 == 0 { 1 } else { 0 })));
        }
        let full = Err(Misplaced::Full);
        assert_eq!(has_room(&places, DATASETS_MAX + 1), [full; 2]);
        assert_eq!(has_room(&places, DATASETS_MAX), [Ok(()); 2], "it is there");
        assert_eq!(places.check(&id(DATASETS_MAX + 1), &id(DATASETS_MAX + 2)), Ok(()), "another vault has its own");
        // One comes back with all that lies in it: they count with it, and not as one.
        places.set(&id(1), None);
        assert_eq!(places.check(&id(1), &id(0)), Ok(()));
        places.set(&id(DATASETS_MAX + 1), Some(id(0)));
        assert_eq!(places.check(&id(1), &id(0)), full);
        assert_eq!(has_room(&places, DATASETS_MAX + 2)[0], Ok(()), "they are not there");
    }

    /// In rows that were damaged.
    #[test]
    fn a_circle_ends() {
        let mut places = nested(0..3);
        places.set(&id(0), Some(id(2)));
        assert_eq!(with_those_around(&places.around, &id(1)).count(), DEPTH_MAX);
        assert_eq!(places.levels(&id(1)), [[id(1)], [id(2)], [id(0)]]);
    }
}
