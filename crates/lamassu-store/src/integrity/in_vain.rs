//! Remembers which record could not be rebuilt from pages.
//!
//! A record that is missing in its file is rebuilt from pages. If the pages do not give it, the record is unavailable,
//! and so are the digests of all these pages. So a store that changes one page of a long file and drops its records
//! would cause all pages to be read again for each page that is asked for. A failure that took many pages is therefore
//! remembered for a while. After that the pages are read again, and a repair is noticed.

use super::{Leaves, Stale};
use lamassu_format::tree::RecordPlace;
use lamassu_format::{Digest, PageNo};
use std::cell::Cell;
use std::io;
use std::time::{Duration, Instant};

/// A failure that took at least this many pages is remembered.
const PAGES_MIN: u64 = 256;
/// It is remembered for this many times as long as it took, so that only a small part of the time is spent on
/// unavailable records.
const REST: u32 = 10;

/// The last unavailable record that took many pages to find out.
#[derive(Default)]
pub(super) struct InVain(Option<Box<Last>>);

struct Last {
    place: RecordPlace,
    stale: Stale,
    until: Instant,
}

impl InVain {
    /// The failure of a record with this digest, if it is recent.
    pub fn known(&self, place: RecordPlace, expected: Digest) -> Option<Stale> {
        let last = self.0.as_ref().filter(|last| last.place == place && last.stale.expected == expected)?;
        (Instant::now() < last.until).then_some(last.stale)
    }

    /// Notes that a record is unavailable.
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
