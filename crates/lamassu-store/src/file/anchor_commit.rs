//! What the anchor learns of a file, and when (`docs/freshness.md`, A1, A4 to A7, A9). In an unanchored vault nothing
//! here does anything.

use super::File;
use super::fresh::Fresh;
use super::primitives::Core;
use super::recover::keep_bits;
use super::state::{Held, Mark, State};
use super::types::StoreError;
use lamassu_anchor::Digest;
use lamassu_format::PageNo;
use std::collections::{BTreeSet, HashSet};

/// What is expected of a file after a barrier has covered it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Outlook {
    /// It is likely to be written again, as after an fsync(2). Its row stays open if it is open: opening it again would
    /// take a commit of the anchor before the next write.
    GoesOn,
    /// It should become clean if possible.
    Rests,
}

impl File {
    /// Whether something was written that no commit of the anchor has, not even one that is queued.
    pub fn has_uncommitted(&self) -> bool {
        self.is_dirty() || self.core.fresh.as_ref().is_none_or(|fresh| fresh.has_written())
    }

    /// After a barrier that covered this file up to `mark`: queues its state for the anchor (A4), unless it was written
    /// since that mark. To be called before the anchor's commit; [`File::settle`] is called after it. Does nothing in
    /// an unanchored vault.
    ///
    /// # Errors
    /// Those of the anchor.
    pub fn covered(&self, mark: Mark) -> Result<(), StoreError> {
        let mut st = self.exclusive();
        self.core.covered(&mut st, mark, Outlook::Rests)
    }

    /// Whether the anchor has the file's present state; true in an unanchored vault.
    pub fn is_anchored(&self) -> bool {
        self.core.fresh.as_ref().is_none_or(|fresh| !fresh.is_ahead())
    }
}

impl Core {
    /// A4: queues the state of the file. To be called after a barrier that covered it up to `mark`. A9: nothing is
    /// queued if a write came after that mark, or while anything is uncertain.
    pub fn covered(&self, st: &mut State, mark: Mark, outlook: Outlook) -> Result<(), StoreError> {
        let Some(fresh) = &self.fresh else { return Ok(()) };
        if self.ctx.read_only || !fresh.is_ahead() || fresh.is_put_away() {
            return Ok(());
        }
        // The caller's barrier says nothing about pages that an earlier one has lost.
        if st.marks.written() != mark || !st.failures.is_clear() || !fresh.is_certain() || fresh.has_lost() {
            return Ok(());
        }
        st.marks.cover(mark);
        let twin = self.next_convergent(st);
        let is_done = twin.is_some() || !self.needs_settle(st);
        let pages = match st.identity.is_unsealed_empty() {
            true => 0,
            false => st.last_page(self.geo()).0 + 1,
        };
        // A7: a page without a stamp is clean.
        let is_clean = (is_done && outlook == Outlook::Rests) || !fresh.has_stamped();
        // If the file keeps changing, its root over blocks would soon be outdated.
        let blocks = if is_clean { self.block_root(st).unwrap_or_default() } else { None };
        let (size, profile) = (st.sizes.stored(), st.identity.profile());
        fresh.commit(&*self.backing, pages, (size, profile), (twin, blocks), is_clean)
    }

    /// A7: remembers, for a file that is closed, the state that no commit covers yet.
    pub fn put_away(&self, st: &mut State) {
        let Some(fresh) = self.fresh.as_ref().filter(|fresh| !self.ctx.read_only && !fresh.is_put_away()) else {
            return;
        };
        // An unsettled state is recovered when the file is opened again, as after a crash.
        if self.is_settled(st) && fresh.is_ahead() && fresh.is_certain() && !fresh.has_lost() {
            // Without it a scrub without keys verifies less of the file.
            let blocks = self.block_root(st).unwrap_or_default();
            fresh.remember((st.sizes.stored(), st.identity.profile()), blocks);
        }
        fresh.note_put_away();
    }

    /// A6: the digest of the convergent page that settling will write.
    fn next_convergent(&self, st: &State) -> Option<Digest> {
        let is_single = st.last_page(self.geo()) == PageNo::ZERO && !st.shrink.is_cut();
        let held = st.pages.good(PageNo::ZERO).filter(|_| is_single && self.may_be_convergent(&st.identity))?;
        if held.page().file_id.is_none() || held.lost() != 0 {
            return None;
        }
        let mut page = held.page().clone();
        keep_bits(&mut page, 0);
        page.sparse = false;
        Some(super::page_tree::digest_of(PageNo::ZERO, &self.seal_convergent(&page)))
    }

    /// Whether a convergent page may be written now: an unanchored vault always may.
    pub fn may_settle_convergent(&self) -> bool {
        self.fresh.as_ref().is_none_or(|fresh| fresh.may_be_convergent())
    }

    /// A4, steps 2 and 3: issues a barrier, which first repeats what an earlier one lost (I11), and then commits the
    /// file's state to the anchor.
    pub fn anchor_now(&self, st: &mut State) -> Result<(), StoreError> {
        let Some(fresh) = &self.fresh else { return Ok(()) };
        self.sync_data(st)?;
        self.covered(st, st.marks.written(), Outlook::Rests)?;
        self.wait_for_anchor(fresh)
    }

    fn wait_for_anchor(&self, fresh: &Fresh) -> Result<(), StoreError> {
        let object = HashSet::from([fresh.object()]);
        Ok(fresh.files().anchor().commit_objects(&object, lamassu_anchor::EntryMark::NOTHING)?)
    }

    /// A4, step 3, after the file's own barrier that covered everything: commits the file's state to the anchor, so
    /// that changes that depend on it may follow.
    pub fn anchor_covered(&self, st: &mut State, outlook: Outlook) -> Result<(), StoreError> {
        let Some(fresh) = &self.fresh else { return Ok(()) };
        self.covered(st, st.marks.written(), outlook)?;
        self.wait_for_anchor(fresh)
    }

    /// A1: commits first if the anchor takes no further window or no second shrink, or cannot hold the remains of a
    /// shrink of a high tree.
    pub fn make_room_in_anchor(&self, st: &mut State, cut: Option<PageNo>) -> Result<(), StoreError> {
        let Some(fresh) = &self.fresh else { return Ok(()) };
        let session = self.ctx.sessions.under_way().unwrap_or(0);
        let is_high = cut.is_some() && fresh.is_high() && fresh.is_ahead();
        if fresh.must_commit_first(session, cut) || is_high { self.anchor_now(st) } else { Ok(()) }
    }

    /// Pages from `pages` on are gone.
    pub fn forget_pages_from(&self, pages: PageNo) -> Result<(), StoreError> {
        match &self.fresh {
            Some(fresh) => fresh.truncate(&*self.backing, pages.0),
            None => Ok(()),
        }
    }

    /// I11: writes pages again with the bytes that the store shows, so that a barrier makes them durable although an
    /// earlier process's barrier has failed.
    fn write_as_shown(&self, st: &mut State, fresh: &Fresh, pages: &BTreeSet<PageNo>) -> Result<(), StoreError> {
        for &g in pages {
            let offset = self.geo().page_offset(g);
            let bytes = fresh.pages(&*self.backing).read(g).map_err(StoreError::io("read", offset))?;
            if bytes.iter().any(|byte| *byte != 0) {
                self.backing.write_at(offset.0, &bytes).map_err(StoreError::io("write page", offset))?;
                st.note_page_write(offset);
            }
        }
        Ok(())
    }

    /// Resolves what a crash has left in a file that is opened for writing, and commits the result to the anchor before
    /// anything of the file is served. So the store can choose only once (A5). If a page stays uncertain, the row
    /// stays open.
    pub fn recover(&self, st: &mut State) -> Result<(), StoreError> {
        let Some(fresh) = self.fresh.as_ref().filter(|fresh| fresh.must_recover()) else { return Ok(()) };
        fresh.forget_in_flight_after(st.last_page(self.geo()));
        let pages = fresh.known().chosen_pages();
        if !self.is_mute(st) && fresh.must_commit_first(self.ctx.sessions.under_way().unwrap_or(0), None) {
            // Nothing can be committed yet. So the window of a session takes the place of one of which no page was
            // found, and a crash must not bring back an earlier page.
            self.keeping_mtime(st, |core, st| core.write_as_shown(st, fresh, &pages))?;
            self.sync_data(st)?;
        }
        // I11: after a barrier that failed, what is shown may never get to disk. Which barriers have failed for an
        // earlier process is not known, so everything that is accepted is written again, once. A file that cannot be
        // written stays as it is.
        if !pages.is_empty() && !self.is_mute(st) {
            self.keeping_mtime(st, |core, st| core.write_pending_again(st, &pages))?;
        }
        for g in pages {
            // Damage of one page does not affect others. It is reported when the page is read.
            match self.page(st, g) {
                Ok(_) | Err(StoreError::Damaged(_)) => {}
                Err(error) => return Err(error),
            }
            // Resolving has written those that were pending.
            let is_written = |held: &Held| held.write_mark() != Mark::default();
            if !self.is_mute(st) && st.pages.good(g).is_some_and(|held| !is_written(held)) {
                self.keeping_mtime(st, |core, st| core.settle_page(st, g))?;
            }
        }
        st.inherited.note_written_again(false);
        self.anchor_now(st)
    }
}
