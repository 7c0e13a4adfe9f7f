//! Which writes to the backing file were made, and which of them barriers have made durable.
//!
//! A [`Mark`] counts the writes to the backing file since the file was opened. A page remembers the mark of its own
//! last write and the mark of the last data write under it.
//!
//! Invariants:
//! * `durable` is at most `written`: a barrier covers nothing that is written after it.
//! * A pending bit may be cleared once the mark of its data write is durable (I3).
//! * While `given_up` is not durable, space that was given up is not written again (I8).
//! * The size that is about to become the floor is forgotten when space is given up after its mark (I5).

use std::time::Duration;

/// A point in the sequence of writes to one backing file, since that file was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(u64);

/// The marks of one open file.
#[derive(Default)]
pub(in crate::file) struct Marks {
    /// The last write.
    written: Mark,
    /// Everything up to this mark is durable.
    durable: Mark,
    /// The last write that gave up backing space, or that new data must not overtake for another reason.
    given_up: Mark,
    /// The last shortening of the backing file.
    shortened: Mark,
    /// The size in the pages when a caller took this mark: the next floor.
    floor_candidate: Option<(Mark, u64)>,
    /// Time of a barrier that has something to cover: a moving average.
    barrier_took: Option<Duration>,
}

impl Marks {
    /// The last write.
    pub fn written(&self) -> Mark {
        self.written
    }

    /// Whether this process has written to the backing file at all.
    pub fn has_written(&self) -> bool {
        self.written > Mark::default()
    }

    /// The mark up to which everything is durable.
    pub fn durable(&self) -> Mark {
        self.durable
    }

    /// Whether a barrier has covered the write that has this mark.
    pub fn is_durable(&self, mark: Mark) -> bool {
        mark <= self.durable
    }

    /// Whether any write is not covered by a barrier yet.
    pub fn has_uncovered(&self) -> bool {
        self.written > self.durable
    }

    /// Counts a write to the backing file, or one that failed and may have happened.
    pub fn advance(&mut self) {
        self.written.0 += 1;
    }

    /// A barrier has covered everything written so far.
    pub fn cover_all(&mut self) {
        self.durable = self.written;
    }

    /// A barrier of the caller has covered everything up to `mark`.
    pub fn cover(&mut self, mark: Mark) {
        self.durable = self.durable.max(mark.min(self.written));
    }

    /// Names the writes so far; `size` is the size in the pages, durable once a barrier covers the mark.
    pub fn take(&mut self, size: u64) -> Mark {
        self.floor_candidate = Some((self.written, size));
        self.written
    }

    /// The size that [`Marks::take`] was given, if it is durable now.
    pub fn durable_size(&self) -> Option<u64> {
        self.floor_candidate.filter(|(mark, _)| self.is_durable(*mark)).map(|(_, size)| size)
    }

    /// The last write gave up backing space (I8): a page dropped slots or finished a punch, or a commit was undone.
    pub fn give_up_space(&mut self) {
        self.hold_data_back();
        self.floor_candidate = None;
    }

    /// No data, and nothing past the end, is written before a barrier covers the last write.
    pub fn hold_data_back(&mut self) {
        self.given_up = self.written;
    }

    /// Whether data has to wait for a barrier because of [`Marks::hold_data_back`].
    pub fn holds_data_back(&self) -> bool {
        self.given_up > self.durable
    }

    /// The last write shortened the backing file.
    pub fn note_shortened(&mut self) {
        self.shortened = self.written;
        self.floor_candidate = None;
    }

    /// Whether the last shortening of the backing file is not covered by a barrier yet.
    pub fn is_shortening_uncovered(&self) -> bool {
        self.shortened > self.durable
    }

    /// A barrier took so long.
    pub fn note_barrier_time(&mut self, took: Duration) {
        self.barrier_took = Some(self.barrier_took.map_or(took, |before| (3 * before + took) / 4));
    }

    /// Whether a barrier takes less than `bound`; also if none was measured yet.
    pub fn is_barrier_below(&self, bound: Duration) -> bool {
        self.barrier_took.is_none_or(|took| took < bound)
    }

    /// Whether a barrier takes `bound` or more; also if none was measured yet.
    pub fn is_barrier_at_least(&self, bound: Duration) -> bool {
        self.barrier_took.is_none_or(|took| took >= bound)
    }
}
