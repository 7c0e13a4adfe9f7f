//! What pages were read for in vain.
//!
//! A record that its file does not have is made anew from pages. Where they do not give it, it cannot be had, and
//! neither can the digests of any of these pages. So a store that changes one page of a long file and drops its records
//! would have all of them read again for each page that is asked for. What took many is therefore remembered for a
//! while; after that they are read once more, and what was put right is seen.

use super::tree::{Leaves, Stale};
use lamassu_format::tree::RecordPlace;
use lamassu_format::{Digest, PageNo};
use std::cell::Cell;
use std::io;
use std::time::{Duration, Instant};

/// From so many pages on it is remembered.
const PAGES_MIN: u64 = 256;
/// For so many times as long as it took: little of the time goes to what cannot be had.
const REST: u32 = 10;

/// The last record that could not be had, and took much to find out.
#[derive(Default)]
pub(super) struct InVain(Option<Box<Last>>);

struct Last {
    place: RecordPlace,
    stale: Stale,
    until: Instant,
}

impl InVain {
    /// What was found of a record with this digest, if that is not long ago.
    pub fn known(&self, place: RecordPlace, expected: Digest) -> Option<Stale> {
        let last = self.0.as_ref().filter(|last| last.place == place && last.stale.expected == expected)?;
        (Instant::now() < last.until).then_some(last.stale)
    }

    /// A record could not be had.
    pub fn note(&mut self, place: RecordPlace, stale: Stale, pages: &Counted<'_>) {
        if pages.read.get() >= PAGES_MIN {
            let rest = pages.begun.elapsed().checked_mul(REST).unwrap_or(Duration::ZERO);
            self.0 = Some(Box::new(Last { place, stale, until: Instant::now() + rest }));
        }
    }
}

/// Pages that are read for a record, counted.
pub(super) struct Counted<'a> {
    leaves: &'a dyn Leaves,
    read: Cell<u64>,
    begun: Instant,
}

impl Counted<'_> {
    pub fn new(leaves: &dyn Leaves) -> Counted<'_> {
        Counted { leaves, read: Cell::new(0), begun: Instant::now() }
    }
}

impl Leaves for Counted<'_> {
    fn leaf(&self, page: PageNo) -> io::Result<Digest> {
        self.read.set(self.read.get() + 1);
        self.leaves.leaf(page)
    }

    fn next_present(&self, from: PageNo) -> io::Result<Option<PageNo>> {
        self.leaves.next_present(from)
    }
}
