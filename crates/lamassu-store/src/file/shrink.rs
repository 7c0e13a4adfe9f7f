//! Making a file shorter: `cut`, barrier, last page, ftruncate (`docs/format.md` §12); immediate, not buffered.
//!
//! The steps of a shrink of a file of several pages ([`Core::shrink_on_disk`]), in order:
//!
//! | step | what it does | keeps |
//! |---|---|---|
//! | 1 | barrier: every page below the new size is durable | I10 |
//! | 2 | page 0 is written with `cut` and the new size as floor | I5, I10 |
//! | 3 | barrier: from here on the new size holds, even if the remaining steps are not done | I5, I10 |
//! | 4 | the last page is written without the slots past the size, pages past it are made void | I8 |
//! | 5 | the backing file is shortened | I8 |
//! | later | a commit or settling writes page 0 without `cut`, after a barrier | I10 |
//!
//! Recovery repeats steps 3 to 5 ([`Core::redo_cut`]). A file of one page is cut by one write of its page.

use super::primitives::{Core, PageId};
use super::recover::clip;
use super::state::{Dirty, PageState, SizeFields, State};
use super::types::StoreError;
use lamassu_anchor::table::Standing;
use lamassu_format::{BlockNo, ByteOffset, PAGE_LEN, PageNo};

impl Core {
    /// Sets the size, if that makes the file longer.
    pub fn grow_to(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        if size > st.sizes.logical() { self.set_size(st, size) } else { Ok(()) }
    }

    /// Sets the size.
    pub fn set_size(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        self.check_writable(st)?;
        if size == 0 {
            st.inherited.forget_truncation();
            return self.empty(st);
        }
        self.prepare_change(st)?;
        if size < st.sizes.logical() {
            st.buffer.forget_refusal(); // space comes back
        }
        if size >= st.sizes.logical() {
            if size > st.sizes.logical() {
                self.grow(st, size)?;
                self.note_change();
            }
            return Ok(());
        }
        let mut shrunk = Ok(());
        if size < st.sizes.stored() {
            self.free_tails_before(st, size)?;
            shrunk = self.shrink_on_disk(st, size);
            if shrunk.is_err() && st.sizes.stored() > size {
                return shrunk; // nothing happened: the buffer stays, too
            }
        }
        // Once page 0 has the new size it holds, even if a later step failed and has to be repeated.
        let block = self.geo().block_at(size);
        self.unseal(st, block)?;
        st.buffer.drop_from(self.geo().end_block(size));
        st.shrink.forget_last_block();
        if let Some(bytes) = st.buffer.data_mut(block) {
            bytes[(size % self.geo().block_size()) as usize..].fill(0);
            st.shrink.keep_last_block(block, bytes.clone()); // I9
        }
        st.sizes.set_logical(size);
        st.inherited.note_shrunk(size);
        self.note_change();
        shrunk
    }

    /// A crash may have left a tail in a page that is not the last. The size field of such a page belongs to its tail,
    /// so it can record neither the cut of page 0 nor the end of the file. So the tail goes to its block first.
    fn free_tails_before(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        let geo = *self.geo();
        let mut found = false;
        for g in [PageNo::ZERO, geo.last_page(size)] {
            let Some(held) = self.good_page(st, g)? else { continue };
            let block = geo.first_block(g) + held.page().keys.len() as u64;
            if held.page().tail.is_empty() || g == st.last_page(&geo) {
                continue;
            }
            found = true;
            if !st.buffer.contains(block) {
                let bytes = self.load_block(st, block)?;
                st.buffer.put(block, Dirty::Data(bytes), false);
            }
        }
        if found { self.commit(st) } else { Ok(()) }
    }

    /// Empties the file. One ftruncate does it whole: page 0 goes with the rest.
    fn empty(&self, st: &mut State) -> Result<(), StoreError> {
        if self.ctx.read_only {
            return Err(StoreError::ReadOnly);
        }
        if self.fresh.is_some() && self.shrink_to_nothing(st)? {
            return Ok(());
        }
        let was_one_page = st.space.len() <= PAGE_LEN as u64;
        if st.sizes.stored() > 0 || !was_one_page || !st.failures.uncertain_pages().is_empty() {
            self.set_backing_len(st, 0)?;
            if let Some(fresh) = &self.fresh {
                fresh.clear();
            }
            if !was_one_page {
                // I8. A file of one page has no blocks left to overwrite: the next page that is written covers the old
                // one.
                st.marks.hold_data_back();
            }
            st.pages.clear();
            st.failures.clear_pages();
            st.identity.note_cut_to_nothing();
        }
        st.buffer.clear();
        st.sizes.clear();
        st.shrink.note_emptied();
        st.inherited.note_emptied();
        st.identity.want_page();
        st.identity.note_made(st.marks.written());
        self.note_change();
        Ok(())
    }

    /// In an anchored vault a file is emptied by a shrink like any other: its page 0 stays, and records the size.
    /// False: there is no page 0, or it is damaged. Then the file is emptied by one ftruncate, and a crash leaves
    /// nothing worse than before. Nothing is given up before the anchor knows that the file is being changed.
    fn shrink_to_nothing(&self, st: &mut State) -> Result<bool, StoreError> {
        let is_there = !st.identity.is_unsealed_empty() && !matches!(self.page(st, PageNo::ZERO)?, PageState::Bad(_));
        if is_there {
            match self.prepare_change(st).and_then(|()| match st.sizes.stored() {
                0 => Ok(()),
                _ => self.shrink_on_disk(st, 0),
            }) {
                Ok(()) => {
                    st.buffer.clear();
                    st.shrink.forget_last_block();
                    st.sizes.set_logical(0);
                    st.inherited.note_shrunk(0);
                    st.identity.want_page();
                    self.note_change();
                    return Ok(true);
                }
                // This host may no longer hold the vault.
                Err(error) if matches!(error, StoreError::Anchor(_)) || !self.may_change() => return Err(error),
                // The store could not do it in this way, or the file is damaged.
                Err(_) if st.sizes.stored() == 0 => return Ok(false),
                Err(_) => {}
            }
        }
        self.open_pages(st, [], None)?;
        Ok(false)
    }

    /// Whether this process may change files of an anchored vault now.
    fn may_change(&self) -> bool {
        self.fresh.as_ref().is_none_or(|fresh| fresh.files().anchor().standing() == Standing::Good)
    }

    fn shrink_on_disk(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        let geo = *self.geo();
        let (old_last, last) = (st.last_page(&geo), geo.last_page(size));
        st.shrink.forget_ragged();
        if old_last == PageNo::ZERO {
            // One page before and after: one atomic write. The space is given back when that is durable (I8). An
            // existing `cut` stays: the pages of an earlier, longer file may not be gone yet (I10).
            self.write_last_page(st, size, st.shrink.is_cut())?;
            st.shrink.note_excess();
            return Ok(());
        }
        if st.marks.has_uncovered() {
            self.barrier(st)?; // step 1, I10: the size in a page 0 with `cut` is a floor, too
        }
        self.make_room_in_anchor(st, Some(last.next()))?;
        // Step 2, I5: the floor is lowered before anything below the old one is given up.
        if last == PageNo::ZERO {
            self.good_page(st, PageNo::ZERO)?;
            self.open_pages(st, [PageNo::ZERO], Some(last.next()))?;
            self.write_last_page(st, size, true)?;
        } else {
            self.mend_above_floor(st, size)?;
            let zero = self.page_as_covered(st, PageNo::ZERO)?;
            let (mut page, lost) = zero.unwrap_or((self.new_page(st), 0));
            page.cut = true;
            self.open_pages(st, [PageNo::ZERO, last], Some(last.next()))?;
            self.write_page(
                st,
                PageNo::ZERO,
                page,
                lost,
                SizeFields { size, floor: size, ..st.sizes.fields() },
                PageId::AsFits,
            )?;
            st.sizes.set_stored(size);
        }
        st.shrink.begin_steps();
        st.pages.drop_after(last);
        self.forget_pages_from(last.next())?;
        self.barrier(st)?; // step 3, I5: the lower floor is durable before the file shrinks
        self.finish_cut(st)
    }

    /// Steps 4 and 5, once `cut` and the size in page 0 are durable. I10: page 0 keeps `cut` until a barrier has
    /// covered them.
    fn finish_cut(&self, st: &mut State) -> Result<(), StoreError> {
        let last = st.last_page(self.geo());
        st.pages.drop_after(last);
        if last > PageNo::ZERO {
            self.write_last_page(st, st.sizes.stored(), false)?;
        }
        self.void_pages_after(st, last)?;
        self.shorten_to_implied(st)?;
        st.shrink.end_steps();
        Ok(())
    }

    /// The backing length by the size on disk and the last page's tail: everything in use ends there.
    pub fn implied_len(&self, st: &mut State) -> Result<u64, StoreError> {
        let geo = *self.geo();
        let g = st.last_page(&geo);
        let has_tail = self.page(st, g)?.good().is_some_and(|held| !held.page().tail.is_empty());
        let blocks = geo.end_block(st.sizes.stored()).0 - u64::from(has_tail);
        let page_end = geo.page_offset(g) + PAGE_LEN as u64;
        Ok(match blocks.checked_sub(1) {
            Some(last) => page_end.max(geo.block_offset(BlockNo(last)) + geo.block_size()).0,
            None => page_end.0,
        })
    }

    /// Cuts the backing file to its implied length, if it is longer.
    pub fn shorten_to_implied(&self, st: &mut State) -> Result<(), StoreError> {
        let implied = self.implied_len(st)?;
        if st.space.len() > implied { self.shorten(st, implied) } else { Ok(()) }
    }

    /// Shortens the backing file. I8: nothing is written past the new end before a barrier covers this.
    pub fn shorten(&self, st: &mut State, len: u64) -> Result<(), StoreError> {
        self.set_backing_len(st, len)?;
        st.marks.hold_data_back();
        Ok(())
    }

    /// After a commit, I11: a page past the last one that a failed write may have left would record another size.
    pub fn drop_stray_pages(&self, st: &mut State) -> Result<(), StoreError> {
        let last = st.last_page(self.geo());
        if st.failures.uncertain_pages().iter().any(|g| *g > last) {
            self.void_pages_after(st, last)?;
            self.shorten_to_implied(st)?;
        }
        st.failures.clear_pages();
        Ok(())
    }

    /// With several pages a segment, pages past the last one may lie before data that stays: they are made absent. I8:
    /// no data is written before that is durable, since a page that is still there names blocks.
    fn void_pages_after(&self, st: &mut State, last: PageNo) -> Result<(), StoreError> {
        let geo = *self.geo();
        st.sizes.forget_dense_from(last);
        self.forget_pages_from(last.next())?;
        let from = geo.page_offset(last) + PAGE_LEN as u64;
        let until = ByteOffset(geo.segment_of(last) * geo.segment_len() + geo.block_size()).min(st.space.end());
        if from < until {
            match st.failures.any_barrier_lost() {
                true => self.write_zeros(st, from, until)?,
                false => self.punch(st, from, until - from)?,
            }
            st.marks.hold_data_back();
        }
        Ok(())
    }

    /// Recovery of an interrupted shrink: steps 3 to 5 again (I10).
    pub fn redo_cut(&self, st: &mut State) -> Result<(), StoreError> {
        self.announce_cut_again(st)?;
        if st.last_page(self.geo()) == PageNo::ZERO {
            self.write_last_page(st, st.sizes.stored(), true)?;
        }
        self.barrier(st)?; // the first attempt may have failed at its own
        self.finish_cut(st)
    }

    /// A1: a shrink whose write of page 0 was reported as failed, and was done all the same, may not be in the anchor
    /// any more. Then it is noted again before anything is removed, and another page 0 records it.
    fn announce_cut_again(&self, st: &mut State) -> Result<(), StoreError> {
        let last = st.last_page(self.geo());
        if self.fresh.as_ref().is_none_or(|fresh| fresh.has_cut(last.next())) {
            return Ok(());
        }
        self.make_room_in_anchor(st, Some(last.next()))?;
        self.open_pages(st, [PageNo::ZERO, last], Some(last.next()))?;
        self.settle_page(st, PageNo::ZERO)?;
        self.forget_pages_from(last.next())
    }

    /// Writes the last page of `size` with everything past it dropped.
    fn write_last_page(&self, st: &mut State, size: u64, cut: bool) -> Result<(), StoreError> {
        let geo = *self.geo();
        let g = geo.last_page(size);
        let held = self.page_as_covered(st, g)?;
        let (mut page, mut lost) = held.unwrap_or((self.new_page(st), 0));
        let blocks = (geo.end_block(size) - geo.first_block(g)) as usize;
        let gives_up_pending = page.pending >> blocks != 0;
        clip(&mut page, blocks, size, &geo, g);
        if page.tail.is_empty() {
            page.keys.resize(blocks);
        }
        lost &= page.pending;
        page.cut = cut;
        let floor = if g == PageNo::ZERO { 0 } else { st.sizes.floor() };
        self.write_page(st, g, page, lost, SizeFields { size, floor, ..st.sizes.fields() }, PageId::AsFits)?;
        st.sizes.set_stored(size);
        if gives_up_pending {
            // I8: a crash may leave the earlier page, which accepts the earlier content or zeros, but no later data. So
            // later data waits for this page. If that data is written where zeros are already, no other step makes it
            // wait.
            st.marks.hold_data_back();
        }
        Ok(())
    }
}
