//! Counts what needs an epoch of a keychain, by kind.

use lamassu_vault::check::Problem;
use std::collections::HashSet;

/// Numbers of things that need an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needing {
    /// data blocks
    pub blocks: u64,
    /// metadata pages
    pub pages: u64,
    /// names, records and attributes
    pub others: u64,
    /// parent slots of datasets
    pub slots: u64,
    /// entries in the store to which these belong, without the slots
    pub entries: usize,
}

impl Needing {
    pub(crate) fn of<'a>(problems: impl Iterator<Item = &'a Problem>, slots: usize) -> Needing {
        let mut needing = Needing { slots: slots as u64, ..Needing::default() };
        let mut entries = HashSet::new();
        for problem in problems {
            entries.insert(problem.stored.as_str());
            match (problem.block, problem.page) {
                (Some(_), _) => needing.blocks += problem.blocks.unwrap_or(1),
                (None, Some(_)) => needing.pages += problem.pages.unwrap_or(1),
                (None, None) => needing.others += 1,
            }
        }
        Needing { entries: entries.len(), ..needing }
    }

    pub(crate) fn is_nothing(&self) -> bool {
        self.entries == 0 && self.slots == 0
    }
}

impl std::fmt::Display for Needing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts = [
            ("blocks", self.blocks),
            ("pages", self.pages),
            ("names, records and attributes", self.others),
            ("parent slots of datasets", self.slots),
        ];
        let mut separator = "";
        for (what, n) in parts.into_iter().filter(|(_, n)| *n > 0) {
            write!(f, "{separator}{n} {what}")?;
            separator = ", ";
        }
        match self.entries {
            0 => Ok(()),
            entries => write!(f, " (of {entries} entries in the store)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_needs_an_epoch_is_counted_by_kind() {
        let problem = |stored: &str, page, block| Problem { stored: stored.into(), page, block, ..Problem::default() };
        let problems = [problem("a", Some(0), Some(3)), problem("a", Some(1), None), problem("b", None, None)];
        let needing = Needing::of(problems.iter(), 2);
        let shown = "1 blocks, 1 pages, 1 names, records and attributes, 2 parent slots of datasets (of 2 entries in \
            the store)";
        assert_eq!(needing.to_string(), shown);
        assert_eq!(Needing::of([].iter(), 1).to_string(), "1 parent slots of datasets");
        assert!(Needing::of([].iter(), 0).is_nothing() && !needing.is_nothing());
    }
}
