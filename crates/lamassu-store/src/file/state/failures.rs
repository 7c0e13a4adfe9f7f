//! Writes and barriers that failed, and what they leave unknown (I11).
//!
//! Invariants:
//! * After a failed barrier `needs_rewrite` stands until everything uncovered was written again and a barrier
//!   succeeded.
//! * Each failed barrier is reported by one fsync at least, whichever operation issued the barrier.
//! * After any failed barrier a range that reads as zeros is not trusted to be a hole on disk.
//! * A page whose last write failed stays in `uncertain_pages` until it is written again or made void.

use lamassu_format::PageNo;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The failures of one open file.
#[derive(Default)]
pub(in crate::file) struct Failures {
    /// A barrier failed, and what it did not cover has to be written again before the next barrier counts.
    needs_rewrite: bool,
    /// A barrier failed since the last fsync returned.
    unreported: bool,
    /// How many barriers failed. [`crate::File`] reads it without the lock: several threads may wait for an fsync, and
    /// each of them has to report the failure.
    lost_barriers: Arc<AtomicU64>,
    /// A round of a commit failed: pages on disk may name keys that those in memory do not.
    round_failed: bool,
    /// Pages whose last write failed: their content on disk is not known.
    uncertain_pages: BTreeSet<PageNo>,
}

impl Failures {
    /// A barrier failed.
    pub fn note_barrier(&mut self) {
        self.needs_rewrite = true;
        self.unreported = true;
        self.lost_barriers.fetch_add(1, Ordering::AcqRel);
    }

    /// A barrier succeeded, after everything uncovered was written again.
    pub fn note_barrier_done(&mut self) {
        self.needs_rewrite = false;
    }

    /// Whether everything uncovered has to be written again.
    pub fn needs_rewrite(&self) -> bool {
        self.needs_rewrite
    }

    /// Whether a barrier failed that no fsync has reported yet; the caller reports it.
    pub fn take_unreported(&mut self) -> bool {
        std::mem::take(&mut self.unreported)
    }

    /// The counter of failed barriers.
    pub fn lost_barriers(&self) -> Arc<AtomicU64> {
        self.lost_barriers.clone()
    }

    /// Whether any barrier has failed since open: then the kernel may show a hole that is none on disk.
    pub fn any_barrier_lost(&self) -> bool {
        self.lost_barriers.load(Ordering::Acquire) > 0
    }

    /// A round failed after pages of it were written.
    pub fn note_round(&mut self) {
        self.round_failed = true;
    }

    /// A commit wrote all its pages.
    pub fn note_rounds_done(&mut self) {
        self.round_failed = false;
    }

    /// Whether data has to wait until its pages are durable, because an earlier round failed.
    pub fn round_failed(&self) -> bool {
        self.round_failed
    }

    /// The write of page `g` failed.
    pub fn note_page(&mut self, g: PageNo) {
        self.uncertain_pages.insert(g);
    }

    /// Page `g` was written.
    pub fn note_page_written(&mut self, g: PageNo) {
        self.uncertain_pages.remove(&g);
    }

    /// All uncertain pages were written again or are void.
    pub fn clear_pages(&mut self) {
        self.uncertain_pages.clear();
    }

    /// Pages whose content on disk is not known.
    pub fn uncertain_pages(&self) -> &BTreeSet<PageNo> {
        &self.uncertain_pages
    }

    /// Whether nothing failed that is still to be repaired.
    pub fn is_clear(&self) -> bool {
        !self.needs_rewrite && !self.round_failed && self.uncertain_pages.is_empty()
    }
}
