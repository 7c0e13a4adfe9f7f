//! Where a backing file is known to read as zeros.
//!
//! A hole that is filled must read as zeros first (I6), and to look costs: not every store can search for holes (sshfs, NFS 3, exFAT), and there every block of
//! it would be read. Most holes are of our own making: the first round of a large commit writes the last page, the others fill what lies before it, and
//! write-back hands blocks over in any order.

use rangemap::RangeSet;
use std::ops::Range;

/// Ranges remembered at most; a file that is filled in random order would have any number.
const RANGES_MAX: usize = 128;

/// Ranges of the backing file in which every *block* reads as zeros. Pages may lie in them.
#[derive(Default)]
pub(super) struct Zeros {
    ranges: RangeSet<u64>,
}

impl Zeros {
    /// Blocks in `range` read as zeros: nothing was ever written there, or it is a hole. Nothing, if it is empty.
    pub fn note(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        self.ranges.insert(range);
        if self.ranges.len() > RANGES_MAX {
            let shortest = self.ranges.iter().min_by_key(|r| r.end - r.start).cloned();
            self.ranges.remove(shortest.expect("there are some"));
        }
    }

    /// Blocks were written there.
    pub fn forget(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.ranges.remove(range);
        }
    }

    /// Whether all blocks of a range are known to read as zeros.
    pub fn have(&self, from: u64, until: u64) -> bool {
        from >= until || self.ranges.get(&from).is_some_and(|range| until <= range.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_forgotten_and_the_rest_is_not() {
        let mut zeros = Zeros::default();
        zeros.note(10..10);
        zeros.note(std::ops::Range { start: 9, end: 3 });
        assert!(!zeros.have(9, 10) && zeros.have(10, 10));
        zeros.note(10..20);
        zeros.note(20..30);
        assert!(zeros.have(10, 30) && !zeros.have(9, 12) && !zeros.have(29, 31));
        zeros.forget(15..25);
        assert!(zeros.have(10, 15) && zeros.have(25, 30) && !zeros.have(14, 16) && !zeros.have(20, 21));
    }

    #[test]
    fn the_longest_are_kept() {
        let mut zeros = Zeros::default();
        let long = 1000..2000;
        zeros.note(long.clone());
        for n in 0..1000 {
            zeros.note(10_000 + 4 * n..10_001 + 4 * n);
            assert!(zeros.ranges.len() <= RANGES_MAX);
        }
        assert!(zeros.have(long.start, long.end));
    }
}
