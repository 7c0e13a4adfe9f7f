//! Zeros behind the ciphertext of compressed blocks that had to be written, because other data lay there before. The
//! store need not keep them.
//!
//! Invariants:
//! * A range reads as zeros, durably once a barrier has covered its mark. It is forgotten before anything is written
//!   there, or may have been.
//! * Forgetting a range is always safe: it only costs space.

use super::Mark;
use lamassu_format::ByteOffset;
use rangemap::RangeMap;
use std::ops::Range;

/// Ranges remembered at most.
const RANGES_MAX: usize = 1 << 16;

/// See the module.
#[derive(Default)]
pub(in crate::file) struct Slack {
    ranges: RangeMap<ByteOffset, Mark>,
    /// The store cannot free them.
    is_given_up: bool,
}

impl Slack {
    /// Zeros were written in `range`, by the write with this mark.
    pub fn note(&mut self, range: Range<ByteOffset>, mark: Mark) {
        if !self.is_given_up && !range.is_empty() && self.ranges.len() < RANGES_MAX {
            self.ranges.insert(range, mark);
        }
    }

    /// Other data may be in `range`.
    pub fn forget(&mut self, range: Range<ByteOffset>) {
        if !self.ranges.is_empty() && !range.is_empty() {
            self.ranges.remove(range);
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Forgets all ranges.
    pub fn clear(&mut self) {
        self.ranges.clear();
    }

    /// The ranges that are durable, with this mark or an earlier one.
    pub fn durable(&self, durable: Mark) -> Vec<Range<ByteOffset>> {
        self.ranges.iter().filter(|(_, mark)| **mark <= durable).map(|(range, _)| range.clone()).collect()
    }

    /// The store cannot free them.
    pub fn give_up(&mut self) {
        *self = Slack { is_given_up: true, ..Slack::default() };
    }
}
