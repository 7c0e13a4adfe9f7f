//! Opening a file of an anchored vault: which of its pages are accepted, and what its size is.
//!
//! For a clean file the row has both. In a file that a crash may have changed, these pages are judged
//! (`docs/freshness.md`, sections 3 and 4): those under the tree records that the anchor holds, and those past the end
//! that it knows. No other page can have changed, so the cost does not grow with the file.

use super::fresh::{Fresh, Known};
use super::page_tree::digest_of;
use super::primitives::Core;
use super::state::{Held, Inherited, PageState, Shrink, Sizes, State};
use super::types::{DamageKind, StoreError};
use lamassu_anchor::Digest;
use lamassu_anchor::judge::{self, Pages, Shown, Stamp, Verdict};
use lamassu_anchor::row::FileRow;
use lamassu_format::{Page, PageNo};
use std::collections::BTreeSet;
use std::sync::Arc;

impl Core {
    /// Opens a file whose freshness is known, from its pages and its row.
    pub fn open_anchored(&self, fresh: &Fresh, st: &mut State) -> Result<(), StoreError> {
        self.take_first_page(fresh)?;
        let judged = if fresh.is_interrupted() { self.judge_pages(fresh)? } else { Judged::default() };
        let (size, profile) = fresh.known().told();
        let zero = match self.read_page(PageNo::ZERO)? {
            PageState::Absent if fresh.known().tree.pages() == 0 => {
                st.identity.found_unsealed();
                st.identity.set_profile(profile, false);
                return Ok(());
            }
            // The row has the file's profile.
            PageState::Good(held) if size.is_some() && held.page().profile != profile => {
                PageState::Bad(DamageKind::Stale)
            }
            zero => zero,
        };
        let geo = *self.geo();
        let cut = zero.good().is_some_and(|held| held.page().cut);
        let last = match (size, &zero) {
            (Some(size), _) => geo.last_page(size),
            (None, PageState::Good(held)) if held.page().cut => geo.last_page(held.page().size),
            (None, _) => judged.last.unwrap_or(PageNo::ZERO),
        };
        let page = zero.good().map(Held::page);
        let written_by = page.map(|page| page.session);
        let stored = match size {
            Some(size) => size,
            None => self.size_after_crash(fresh, st, page, last, cut)?,
        };
        let stored = stored.min(geo.size_max());
        let floor = match (page, geo.last_page(stored)) {
            (_, PageNo::ZERO) => 0,
            (Some(page), _) => page.size.min(stored),
            (None, _) => stored,
        };
        st.sizes = Sizes::opened(stored, floor, page.is_some_and(|page| page.sparse));
        st.shrink = Shrink::opened(cut);
        st.inherited = Inherited::opened(stored, fresh.is_interrupted(), None, None);
        if size.is_some() {
            st.identity.set_profile(profile, false);
        }
        self.keep_page_zero(st, zero);
        // A page 0 whose write was reported as failed says `cut`, and the row may have nothing of that.
        if judged.is_cut || (cut && fresh.is_interrupted() && stored < fresh.known().row.size) {
            self.note_shortened(st, written_by);
        }
        Ok(())
    }

    fn keep_page_zero(&self, st: &mut State, zero: PageState) {
        match zero {
            PageState::Good(held) => {
                let page = Arc::unwrap_or_clone(held).into_page();
                let id = st.identity.id();
                st.identity.found_page_zero(&page);
                if page.file_id.is_none() {
                    st.identity.found_id(id);
                }
                st.pages.put_unresolved(PageNo::ZERO, page);
            }
            PageState::Bad(kind) => st.pages.put(PageNo::ZERO, PageState::Bad(kind)),
            // The tree has a page 0.
            PageState::Absent => st.pages.put(PageNo::ZERO, PageState::Bad(DamageKind::Stale)),
        }
    }

    /// The size of a file after a crash, by its accepted pages, of which `last` is the last. If that page is not
    /// accepted, it was committed, and the row has the size.
    fn size_after_crash(
        &self,
        fresh: &Fresh,
        st: &mut State,
        zero: Option<&Page>,
        last: PageNo,
        cut: bool,
    ) -> Result<u64, StoreError> {
        let committed = fresh.known().row.size;
        if last == PageNo::ZERO || cut {
            return Ok(zero.map_or(committed, |page| page.size));
        }
        match self.read_page(last)? {
            PageState::Good(held) => {
                let page = Arc::unwrap_or_clone(held).into_page();
                let size = page.size;
                if zero.is_none() {
                    st.identity.found_page(&page);
                }
                st.identity.found_id(page.file_id);
                st.pages.put_unresolved(last, page);
                Ok(size.max(zero.map_or(0, |page| page.size)))
            }
            PageState::Bad(kind) => {
                st.pages.put(last, PageState::Bad(kind));
                Ok(committed.max(self.geo().page_start(last) + 1))
            }
            PageState::Absent => Ok(committed),
        }
    }

    /// J2: accepts the second page 0 of a file of one page in place of the first, if the store shows that one. If a
    /// crash may have taken the first page of a file (A6), what the store shows now is the file from then on.
    fn take_first_page(&self, fresh: &Fresh) -> Result<(), StoreError> {
        let known = &mut *fresh.known();
        let Some(twin) = known.row.twin.filter(|_| known.tree.pages() <= 1 && !known.is_ahead()) else { return Ok(()) };
        let leaves = fresh.pages(&*self.backing);
        let bytes = leaves.read(PageNo::ZERO).map_err(StoreError::io("read", 0u64))?;
        let digest = digest_of(PageNo::ZERO, &bytes);
        let is_new = known.row.root.is_none();
        if digest == twin {
            known.tree.set(PageNo::ZERO, twin, &leaves).map_err(|error| fresh.failed(error))?;
        } else if is_new && known.size.is_some() {
            known.size = Some(0); // its first page never existed
        }
        // If another page lies there, it is stale, and nothing is chosen.
        if is_new && (digest == twin || digest.is_none()) {
            known.note_chosen();
        }
        Ok(())
    }

    /// Judges the pages that a crash may have changed.
    fn judge_pages(&self, fresh: &Fresh) -> Result<Judged, StoreError> {
        let held = fresh.files().anchor().held(fresh.object())?;
        let known = &mut *fresh.known();
        let leaves = fresh.pages(&*self.backing);
        let row = known.row.clone();
        let committed = known.tree.pages();
        let shape = fresh.files().shape();
        let of_pages = |number| shape.place(number).filter(|place| place.level == 1);
        let mut pages: BTreeSet<PageNo> = BTreeSet::new();
        for place in held.keys().filter_map(|number| of_pages(*number)) {
            let first = shape.first_page(place);
            pages.extend(first.until(PageNo((first.0 + shape.span(1)).min(committed))));
        }
        if let Err(error) = known.tree.hold(held, &leaves) {
            // The held records do not fit the root, or the store lacks them: those pages are not accepted, and are
            // reported when they are read.
            let _ = fresh.failed(error);
        }
        let zero = self.judge_page(fresh, known, &row, PageNo::ZERO, None)?;
        let past = past_cut(&row, zero);
        if let Some(from) = past {
            known.tree.truncate(from.0, &leaves).map_err(|error| fresh.failed(error))?;
            known.unmade = None;
        }
        let committed = past.map_or(committed, |from| from.0.min(committed));
        pages.remove(&PageNo::ZERO);
        for page in pages.into_iter().filter(|page| page.0 < committed) {
            self.judge_page(fresh, known, &row, page, zero)?;
        }
        let mut last = committed.checked_sub(1).map(PageNo);
        let mut next = PageNo(committed.max(1));
        let failed = |source| StoreError::Io { op: "seek data", offset: 0, source };
        while let Some(page) = next_shown(&leaves, next).map_err(failed)? {
            if self.judge_page(fresh, known, &row, page, zero)?.is_some() {
                last = last.max(Some(page));
            }
            next = page.next();
        }
        Ok(Judged { last: last.or(zero.map(|_| PageNo::ZERO)), is_cut: past.is_some() })
    }

    /// Judges one page. If it is in flight, notes it in the tree and returns its stamp.
    fn judge_page(
        &self,
        fresh: &Fresh,
        known: &mut Known,
        row: &FileRow,
        page: PageNo,
        zero: Option<Stamp>,
    ) -> Result<Option<Stamp>, StoreError> {
        let leaves = fresh.pages(&*self.backing);
        // A page whose leaf is unknown may still be in flight. `UNKNOWN` is the digest of no page.
        let leaf = known.tree.leaf(page, &leaves).unwrap_or(UNKNOWN);
        let shown = self.shown(fresh, page)?;
        let pages = if row.size <= self.geo().page_span() { Pages::One } else { Pages::Several };
        match judge::page(row, pages, leaf, zero, &shown) {
            Verdict::InFlight => {
                known.accepted.extend(shown.stamp.map(|stamp| stamp.session));
                if known.tree.set(page, shown.digest, &leaves).is_err() {
                    return Ok(None); // its neighbours' digests are unknown, so its own cannot be set
                }
                known.in_flight.insert(page);
                Ok(shown.stamp)
            }
            // The tree has them already.
            Verdict::Acknowledged | Verdict::Hole => Ok(None),
            // It stays unaccepted. The store may show another one later.
            Verdict::Stale => {
                known.has_refused = true;
                Ok(None)
            }
        }
    }

    /// What the store shows of a page.
    fn shown(&self, fresh: &Fresh, page: PageNo) -> Result<Shown, StoreError> {
        let offset = self.geo().page_offset(page);
        let mut bytes = fresh.pages(&*self.backing).read(page).map_err(StoreError::io("read", offset))?;
        let digest = digest_of(page, &bytes);
        let opened = self.opened_page(page, &mut bytes);
        let stamp = |held: &Held| Stamp {
            session: held.page().session,
            tag: held.page().session_tag,
            sequence: held.page().sequence,
            file: held.page().file_id,
        };
        Ok(Shown { page, digest, stamp: opened.good().map(stamp) })
    }
}

/// What judging the pages of a file has shown.
#[derive(Default)]
struct Judged {
    /// The last accepted page.
    last: Option<PageNo>,
    /// The file was made shorter, and no commit covers that. (If one does, page 0 may still have `cut` until the file
    /// is settled.)
    is_cut: bool,
}

/// Stands for an unknown leaf. Nothing hashes to it.
const UNKNOWN: Digest = Digest([0xff; 32]);

/// The page from which on a file has nothing left, if an accepted page 0 was written after the shrink that its row
/// notes.
fn past_cut(row: &FileRow, zero: Option<Stamp>) -> Option<PageNo> {
    let cut = row.open.as_ref()?.cut?;
    zero.is_some_and(|zero| judge::is_after(zero, cut.after)).then_some(cut.from)
}

/// The first page from `from` on that the store shows.
fn next_shown(leaves: &dyn crate::integrity::Leaves, from: PageNo) -> std::io::Result<Option<PageNo>> {
    let mut at = from;
    while let Some(page) = leaves.next_present(at)? {
        if !leaves.leaf(page)?.is_none() {
            return Ok(Some(page));
        }
        at = page.next();
    }
    Ok(None)
}
