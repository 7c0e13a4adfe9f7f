//! The backing file's length, and where it reads as zeros.
//!
//! Invariants:
//! * `len` is the length of the backing file, or more after a write that failed and may still happen.
//! * Every block in a range of `zeros` reads as zeros (I6). After a failed barrier, [`super::Failures`] tells whether a
//!   hole is trusted to be one on disk.

use super::zeros::Zeros;
use lamassu_format::{ByteOffset, PAGE_LEN};
use std::ops::Range;

/// The space that a backing file takes.
#[derive(Default)]
pub(in crate::file) struct Space {
    len: u64,
    /// The store is known to hold a file of this length.
    possible_len: u64,
    zeros: Zeros,
}

impl Space {
    /// A backing file of `len` bytes.
    pub fn new(len: u64) -> Space {
        Space { len, ..Space::default() }
    }

    /// The part that readers of a snapshot need.
    pub fn snapshot(&self) -> Space {
        Space { len: self.len, possible_len: self.possible_len, zeros: Zeros::default() }
    }

    /// Length of the backing file.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Where the backing file ends.
    pub fn end(&self) -> ByteOffset {
        ByteOffset(self.len)
    }

    /// Whether the store is known to hold a file of `len` bytes.
    pub fn can_hold(&self, len: u64) -> bool {
        len <= self.len.max(self.possible_len)
    }

    /// The store can hold a file of `len` bytes.
    pub fn note_possible(&mut self, len: u64) {
        self.possible_len = len;
    }

    /// A page was written at `offset`.
    pub fn note_page(&mut self, ByteOffset(offset): ByteOffset) {
        self.zeros.skipped(self.len..offset);
        self.len = self.len.max(offset + PAGE_LEN as u64);
    }

    /// `len` bytes of blocks were written at `offset`.
    pub fn note_blocks(&mut self, ByteOffset(offset): ByteOffset, len: u64) {
        let end = offset + len;
        self.zeros.skipped(self.len..offset);
        self.zeros.wrote(offset..end);
        self.len = self.len.max(end);
    }

    /// A write failed that the store may have done, completely or in part, or may do later. `found` is the length that
    /// the store reports now.
    pub fn note_failed(&mut self, offset: ByteOffset, len: u64, found: Option<u64>) {
        let before = self.len;
        self.zeros.failed(offset.0..offset.0 + len);
        self.note_blocks(offset, len);
        self.len = found.map_or(self.len, |found| found.max(before));
    }

    /// The backing file was cut to `len`.
    pub fn note_cut(&mut self, len: u64) {
        self.len = len;
    }

    /// A search found blocks in `range` to be a hole.
    pub fn note_zeros(&mut self, range: Range<ByteOffset>) {
        self.zeros.found(range.start.0..range.end.0);
    }

    /// Whether all blocks of a range are known to read as zeros.
    pub fn has_zeros(&self, from: ByteOffset, until: ByteOffset) -> bool {
        self.zeros.have(from.0, until.0)
    }
}
