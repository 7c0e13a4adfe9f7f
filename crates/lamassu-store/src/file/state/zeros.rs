//! Where a backing file is known to read as zeros.
//!
//! A hole that is filled must read as zeros first (I6), and checking that is costly: some stores cannot search for
//! holes (sshfs, NFS 3, exFAT), and there every block of it would be read. Most holes are made by this process: the
//! first round of a large commit writes the last page, the others fill the space before it, and write-back brings
//! blocks in any order.

use rangemap::RangeSet;
use std::ops::Range;

/// Ranges remembered at most; a file that is filled in random order would have any number.
const RANGES_MAX: usize = 128;

/// Ranges of the backing file in which every *block* reads as zeros. Pages may lie in them.
#[derive(Default)]
pub(super) struct Zeros {
    ranges: RangeSet<u64>,
    /// A write has failed, and may still arrive: it is no longer known which ranges were never written.
    write_failed: bool,
}

impl Zeros {
    /// The file grew past `range`, of which nothing was ever written. Nothing, if it is empty.
    pub fn skipped(&mut self, range: Range<u64>) {
        if !self.write_failed {
            self.found(range);
        }
    }

    /// A search found blocks in `range` to be a hole.
    pub fn found(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.ranges.insert(range);
            self.trim();
        }
    }

    /// Blocks were written there.
    pub fn wrote(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.ranges.remove(range);
            self.trim();
        }
    }

    /// A write failed there, but the store may have done it, or may do it later.
    pub fn failed(&mut self, range: Range<u64>) {
        self.write_failed = true;
        self.wrote(range);
    }

    /// Whether all blocks of a range are known to read as zeros.
    pub fn have(&self, from: u64, until: u64) -> bool {
        from >= until || self.ranges.get(&from).is_some_and(|range| until <= range.end)
    }

    fn trim(&mut self) {
        if self.ranges.len() > RANGES_MAX {
            let shortest = self.ranges.iter().min_by_key(|r| r.end - r.start).cloned();
            self.ranges.remove(shortest.expect("there are some"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_forgotten_and_the_rest_is_not() {
        let mut zeros = Zeros::default();
        zeros.skipped(10..10);
        zeros.skipped(Range { start: 9, end: 3 });
        assert!(!zeros.have(9, 10) && zeros.have(10, 10));
        zeros.skipped(10..20);
        zeros.found(20..30);
        assert!(zeros.have(10, 30) && !zeros.have(9, 12) && !zeros.have(29, 31));
        zeros.wrote(15..25);
        assert!(zeros.have(10, 15) && zeros.have(25, 30) && !zeros.have(14, 16) && !zeros.have(20, 21));
    }

    #[test]
    fn after_a_failed_write_only_a_search_finds_zeros() {
        let mut zeros = Zeros::default();
        zeros.skipped(10..20);
        zeros.failed(30..40);
        zeros.skipped(20..50);
        assert!(zeros.have(10, 20) && !zeros.have(20, 21) && !zeros.have(30, 31));
        zeros.found(30..40);
        assert!(zeros.have(30, 40));
    }

    #[test]
    fn few_are_kept_and_those_are_the_longest() {
        let mut zeros = Zeros::default();
        let (long, hole) = (1000..2000, 10_000..50_000);
        zeros.skipped(long.clone());
        zeros.skipped(hole.clone());
        for n in 0..1000 {
            zeros.skipped(60_000 + 4 * n..60_001 + 4 * n);
            zeros.wrote(hole.start + 4 * n..hole.start + 1 + 4 * n);
            assert!(zeros.ranges.len() <= RANGES_MAX);
        }
        assert!(zeros.have(long.start, long.end) && zeros.have(hole.start + 4000, hole.end));
    }
}
