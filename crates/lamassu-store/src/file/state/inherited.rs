//! What earlier sessions and the store left in the file: interrupted commits, lost ends, bytes that nothing refers to.
//!
//! Invariants:
//! * Except by recovery, nothing is written before `prepared`: the backing file then ends where its metadata says.
//! * What recovery finds is made durable before anything is written under the same page (I10): `is_durable` says
//!   whether a barrier since open has covered what an earlier process wrote. That alone says nothing about data that
//!   an earlier barrier has lost (I11): `is_written_again` does.
//! * A file that the store has truncated is not written, so that the rest is kept.
//! * `undone` holds findings about readable ranges; damage is reported elsewhere.

use crate::file::types::Damage;
use lamassu_format::PageNo;
use std::collections::BTreeSet;

/// Most findings of interrupted sessions that are kept per open file.
const UNDONE_MAX: usize = 1 << 16;

/// The state of the file when it was opened.
#[derive(Default)]
pub(in crate::file) struct Inherited {
    size: u64,
    interrupted: bool,
    lost_from: Option<u64>,
    unknown_from: Option<u64>,
    prepared: bool,
    is_durable: bool,
    is_written_again: bool,
    undone: BTreeSet<Damage>,
    recovered: u64,
}

impl Inherited {
    /// What opening found. `lost_from`: where the store lost the end of the file. `unknown_from`: the last page is
    /// damaged, so past this offset the end of the file is unknown, and an empty page or slot may not be a hole.
    /// `interrupted`: the last page is of an interrupted session, so pages above the floor may never have arrived.
    pub fn opened(size: u64, interrupted: bool, lost_from: Option<u64>, unknown_from: Option<u64>) -> Inherited {
        Inherited { size, interrupted, lost_from, unknown_from, ..Inherited::default() }
    }

    /// Size found at open; pages below it that the floor does not cover may be absent.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether the last page is of an interrupted session.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// Where the store lost the end of the file, in logical bytes.
    pub fn lost_from(&self) -> Option<u64> {
        self.lost_from
    }

    /// Whether the store lost the end of the file.
    pub fn is_truncated(&self) -> bool {
        self.lost_from.is_some()
    }

    /// The file is emptied, which a user does to write a file again that the store truncated.
    pub fn forget_truncation(&mut self) {
        self.lost_from = None;
    }

    /// From where on, in logical bytes, nothing is known of holes and of the size.
    pub fn unknown_from(&self) -> Option<u64> {
        self.unknown_from
    }

    /// The file was cut to `size`.
    pub fn note_shrunk(&mut self, size: u64) {
        self.unknown_from = self.unknown_from.filter(|from| size > *from);
    }

    /// The file was emptied: nothing is left to be prepared or unknown.
    pub fn note_emptied(&mut self) {
        self.unknown_from = None;
        self.prepared = true;
    }

    /// Whether the file may be written.
    pub fn is_prepared(&self) -> bool {
        self.prepared
    }

    /// The backing file was cut to the length that its metadata implies.
    pub fn note_prepared(&mut self) {
        self.prepared = true;
    }

    /// Whether a barrier since open has covered whatever an earlier process wrote.
    pub fn is_durable(&self) -> bool {
        self.is_durable
    }

    /// A barrier has covered whatever an earlier process wrote.
    pub fn note_durable(&mut self) {
        self.is_durable = true;
    }

    /// Whether the data that recovery finds were written again, and are durable (I11).
    pub fn is_written_again(&self) -> bool {
        self.is_written_again
    }

    /// The data of the pages that are resolved next were written again and are durable, or such pages end.
    pub fn note_written_again(&mut self, are_next: bool) {
        self.is_written_again = are_next;
    }

    /// Notes what an interrupted session has left; returns whether it is the first of its kind.
    pub fn note_undone(&mut self, damage: Damage) -> bool {
        debug_assert!(damage.kind.is_readable());
        if self.undone.len() >= UNDONE_MAX {
            return false;
        }
        let least = Damage { segment: 0, page: PageNo::ZERO, pages: 0, block: None, ..damage };
        let is_first = self.undone.range(least..).next().is_none_or(|d| d.kind != damage.kind);
        self.undone.insert(damage);
        is_first
    }

    /// What was noted.
    pub fn undone(&self) -> &BTreeSet<Damage> {
        &self.undone
    }

    /// Keeps what `keep` chooses.
    pub fn retain_undone(&mut self, keep: impl FnMut(&Damage) -> bool) {
        self.undone.retain(keep);
    }

    /// Takes what was noted.
    pub fn take_undone(&mut self) -> BTreeSet<Damage> {
        std::mem::take(&mut self.undone)
    }

    /// A block of an interrupted commit was resolved.
    pub fn note_recovered(&mut self) {
        self.recovered += 1;
    }

    /// Blocks of interrupted commits resolved so far.
    pub fn recovered(&self) -> u64 {
        self.recovered
    }
}
