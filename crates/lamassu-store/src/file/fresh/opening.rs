//! A1: what the anchor knows before pages of a file are written (`docs/freshness.md`, section 3): windows, tree
//! records, and shrinks.
//!
//! Invariant: before a page 0 is written that does not record the shrink which the durable row notes, the row has lost
//! that shrink, durably, or some page 0 has recorded it before. `Known::unmade` says which.

use super::{Fresh, Known, StoreError};
use crate::backend::BackendFile;
use lamassu_anchor::{Opening, Window};
use lamassu_format::{FileId, PageNo, RecordNo};
use std::collections::BTreeMap;

/// What an opening says of a shrink.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::file) enum Shrinking {
    /// Nothing.
    Not,
    /// Pages from this one on are about to be removed, and page 0 is the next page that is written.
    Announced(PageNo),
    /// Page 0 is about to be written with `cut`, and the file ends before this page.
    Recorded(PageNo),
}

impl Known {
    /// Whether the row notes a shrink to `from` pages or fewer that page 0 records.
    fn has_made_cut(&self, from: PageNo) -> bool {
        self.unmade.is_none() && self.noted_cut().is_some_and(|noted| noted <= from)
    }

    /// The oldest session whose window the row can lose once the pages that were judged are durable: none of them is of
    /// it, and none was written in it since. If a page was not accepted, that may be of any session.
    fn idle_window(&self) -> Option<u32> {
        let open = self.row.open.as_ref().filter(|_| self.is_interrupted && !self.has_refused)?;
        open.windows.iter().map(|window| window.session).filter(|session| !self.accepted.contains(session)).min()
    }

    /// The first page that the shrink which the row notes removes.
    fn noted_cut(&self) -> Option<PageNo> {
        self.row.open.as_ref().and_then(|open| open.cut).map(|cut| cut.from)
    }
}

impl Fresh {
    /// A1: waits until the anchor durably knows that a session is about to write these pages, and the digests of their
    /// neighbours; and what `shrinking` says. If a shrink is noted that no page 0 records, it is given up before page 0
    /// is written for another reason. Does not wait for what the anchor knows already.
    pub fn open_pages(
        &self,
        backing: &dyn BackendFile,
        pages: impl IntoIterator<Item = PageNo>,
        (file, window): (FileId, Window),
        shrinking: Shrinking,
    ) -> Result<(), StoreError> {
        let (mut held, mut has_zero) = (BTreeMap::new(), false);
        let cut = if let Shrinking::Announced(from) = shrinking { Some(from) } else { None };
        let (drops_cut, drops_window);
        {
            let known = &mut *self.known.lock();
            let leaves = self.pages(backing);
            for page in pages {
                has_zero |= page == PageNo::ZERO;
                let before = known.tree.record_before(page, &leaves).map_err(|error| self.failed(error))?;
                held.extend(before.filter(|(record, _)| !known.held.contains(record)));
            }
            if let Some(last) = cut.and_then(|cut| cut.0.checked_sub(1)) {
                let way = known.tree.way_to(PageNo(last), &leaves).map_err(|error| self.failed(error))?;
                for (record, children) in way {
                    held.entry(record).or_insert(children);
                }
            }
            drops_window = known.idle_window();
            drops_cut = known.unmade.is_some_and(|from| match shrinking {
                Shrinking::Not => has_zero,
                Shrinking::Announced(_) => true,
                Shrinking::Recorded(end) => from < end,
            });
            if known.opened == Some(window.session) && held.is_empty() && cut.is_none() && !drops_cut {
                return Ok(());
            }
            if cut.is_some() && (drops_cut || known.noted_cut().is_none()) {
                known.unmade = Some(PageNo::ZERO); // even if the commit fails: a later one may take the row
            }
        }
        let records: Vec<RecordNo> = held.keys().copied().collect();
        let held = held.into_iter().collect();
        self.files.anchor().open_files(&[Opening {
            object: self.object,
            file,
            window,
            held,
            cut,
            drops_cut,
            drops_window,
        }])?;
        let row = self.files.anchor().row(self.object)?;
        let known = &mut *self.known.lock();
        known.row = row.file().cloned().unwrap_or_default();
        known.opened = Some(window.session);
        known.accepted.insert(window.session);
        known.held.extend(records);
        if known.unmade.is_some() && (drops_cut || cut.is_some()) {
            known.unmade = cut;
        }
        Ok(())
    }

    /// Whether pages from `from` on may be removed as far as the anchor is concerned (A1): the root has none there, or
    /// the row notes a shrink that page 0 records.
    pub fn has_cut(&self, from: PageNo) -> bool {
        let known = self.known.lock();
        known.tree.pages() <= from.0 || known.has_made_cut(from)
    }

    /// Whether a commit has to come before another window, or another shrink, is noted.
    pub fn must_commit_first(&self, session: u32, cut: Option<PageNo>) -> bool {
        let known = self.known.lock();
        let Some(open) = &known.row.open else { return false };
        let is_full = open.window(session).is_none() && open.windows.len() >= lamassu_anchor::WINDOWS_MAX;
        let is_second = cut.is_some() && open.cut.is_some() && known.unmade.is_none();
        is_full || is_second
    }

    /// Whether the tree is so high that a shrink leaves records above those of pages.
    pub fn is_high(&self) -> bool {
        self.files.shape().height(self.known.lock().tree.pages()) > 1
    }
}
