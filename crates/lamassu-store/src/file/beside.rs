//! Tree records are fetched at the same time as the page that needs them (paper 002, section 4.4). If reads of the
//! store are slow, as over a network, verifying a page then costs no second wait after the page's own.
//!
//! Records that are fetched this way are verified like any others. On a store that answers from memory the records are
//! read after the page, since threads cost more than that.

use super::fetching::Fetching;
use super::fresh::Fresh;
use crate::integrity::Records;
use lamassu_format::PageNo;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// Records that a page needs, as the store has them. Those that could not be read are left out.
struct Wanted {
    offsets: BTreeSet<u64>,
    records: Arc<dyn Records>,
    len: usize,
}

impl Wanted {
    fn read(&self, offset: u64) -> Option<(u64, Vec<u8>)> {
        let mut bytes = vec![0; self.len];
        self.records.read(offset, &mut bytes).is_ok().then_some((offset, bytes))
    }
}

impl Fresh {
    /// Reads a page by `read`, and at the same time the tree records that verifying its digest takes.
    pub fn read_beside<T>(&self, page: PageNo, read: impl FnOnce() -> T) -> T {
        let timed = || {
            let begun = Instant::now();
            let done = read();
            self.files().read_time().note(begun.elapsed());
            done
        };
        let is_worth_it = self.files().fetching() == Fetching::Beside && self.files().read_time().is_slow();
        let wanted = if is_worth_it { self.wanted(page) } else { None };
        let Some(wanted) = wanted else { return timed() };
        let wanted = &wanted;
        std::thread::scope(|scope| {
            // If a thread cannot be started, its record is read later.
            let start = |offset: &u64| {
                let offset = *offset;
                std::thread::Builder::new().spawn_scoped(scope, move || wanted.read(offset)).ok()
            };
            let readers: Vec<_> = wanted.offsets.iter().filter_map(start).collect();
            let done = timed();
            let found = readers.into_iter().filter_map(|reader| reader.join().ok().flatten());
            self.known().tree.bring(found);
            done
        })
    }

    fn wanted(&self, page: PageNo) -> Option<Wanted> {
        let known = self.known();
        let offsets = known.tree.wanted(page);
        if offsets.is_empty() {
            return None;
        }
        Some(Wanted { offsets, records: known.tree.records(), len: self.files().shape().record_len() })
    }
}
