//! Making a file shorter: `cut`, barrier, last page, ftruncate (§12); immediate, not buffered.

use super::open::clip;
use super::state::{Core, Dirty, Held, State};
use super::types::StoreError;
use lamassu_format::{PAGE_LEN, Page};

impl Core {
    /// Sets the size, if that makes the file longer.
    pub fn grow_to(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        if size > st.size { self.set_size(st, size) } else { Ok(()) }
    }

    /// Sets the size.
    pub fn set_size(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        if size == 0 && st.lost_from.is_some() && !self.ctx.read_only {
            st.lost_from = None; // emptying a file that the store truncated is how a user gets rid of it
        }
        if size == 0 {
            return self.empty(st);
        }
        self.prepare_write(st)?;
        if size < st.size {
            st.refused = None; // space comes back
        }
        if size >= st.size {
            if size > st.size {
                self.grow(st, size)?;
                self.note_change();
            }
            return Ok(());
        }
        let mut shrunk = Ok(());
        if size < st.disk_size {
            self.free_tails_before(st, size)?;
            shrunk = self.shrink_on_disk(st, size);
            if shrunk.is_err() && st.disk_size > size {
                return shrunk; // nothing happened: what is buffered stays, too
            }
        }
        // Once page 0 says so the size rules, even if a later step failed and has to be repeated.
        let block_size = self.geo().block_size();
        self.unseal(st, size / block_size)?;
        drop(st.dirty.split_off(&size.div_ceil(block_size)));
        st.replaces &= !st.dirty.is_empty();
        if let Some(Dirty::Data(bytes)) = st.dirty.get_mut(&(size / block_size)) {
            bytes[(size % block_size) as usize..].fill(0);
            st.at_cut = Some((size / block_size, bytes.clone()));
        }
        st.size = size;
        st.unknown_from = st.unknown_from.filter(|from| size > *from);
        self.note_change();
        shrunk
    }

    /// A crash may have left a tail in a page that is not the last. The size field of such a page belongs to its tail, and can
    /// tell neither where page 0 cuts nor where the file ends: the tail goes to its block first.
    fn free_tails_before(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        let geo = *self.geo();
        let mut found = false;
        for g in [0, geo.last_page(size)] {
            let Some(held) = self.good_page(st, g)? else { continue };
            let block = geo.first_block(g) + held.page.keys.len() as u64;
            if held.page.tail.is_empty() || g == geo.last_page(st.disk_size) {
                continue;
            }
            found = true;
            if !st.dirty.contains_key(&block) {
                let bytes = self.load_block(st, block)?;
                st.dirty.insert(block, Dirty::Data(bytes));
            }
        }
        if found { self.commit(st) } else { Ok(()) }
    }

    /// Empties the file. One ftruncate does it whole: page 0 goes with the rest.
    fn empty(&self, st: &mut State) -> Result<(), StoreError> {
        if self.ctx.read_only {
            return Err(StoreError::ReadOnly);
        }
        let was_one_page = st.len <= PAGE_LEN as u64;
        if st.disk_size > 0 || !was_one_page || !st.unsure_pages.is_empty() {
            let mark = st.drop_mark;
            self.shorten(st, 0)?;
            if was_one_page {
                st.drop_mark = mark; // the next page written covers all that was there
            }
            st.unsealed_empty = true;
            st.pages.clear();
            st.unresolved.clear();
            st.unsure_pages.clear();
            st.file_id = [0; 16]; // of a page that is gone; one that stays keeps it
        }
        st.dirty.clear();
        st.replaces = false;
        (st.ragged, st.refused) = (Some(false), None);
        (st.size, st.disk_size, st.floor) = (0, 0, 0);
        (st.sparse, st.cut, st.cut_open, st.prepared) = (false, false, false, true);
        st.unknown_from = None;
        st.wants_page = true;
        (st.born, st.born_mark) = (true, st.seq);
        self.note_change();
        Ok(())
    }

    fn shrink_on_disk(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        let geo = *self.geo();
        let (old_last, last) = (geo.last_page(st.disk_size), geo.last_page(size));
        st.ragged = None;
        if old_last == 0 {
            // One page before and after: one atomic write. The space is given back when that is durable. A `cut` that stands goes on
            // to stand: the pages of an earlier, longer file may not be gone yet.
            self.write_last_page(st, size, st.cut)?;
            st.excess = true;
            return Ok(());
        }
        if st.seq > st.covered {
            self.barrier(st)?; // what page 0 tells with `cut` is a floor, too: every page below it is durable
        }
        if last == 0 {
            self.write_last_page(st, size, true)?;
        } else {
            self.note_absent_pages(st, size)?;
            let zero = self.good_page(st, 0)?.map(|held| (held.page.clone(), held.lost));
            let (mut page, lost) = zero.unwrap_or((Page::empty(st.file_id), 0));
            page.cut = true;
            let before = (st.disk_size, st.floor);
            (st.disk_size, st.floor) = (size, size);
            if let Err(error) = self.write_page(st, 0, page, lost) {
                (st.disk_size, st.floor) = before;
                return Err(error);
            }
        }
        st.cut_open = true;
        st.pages.retain(|g, _| *g <= last); // void: nothing may write them again
        st.unresolved.retain(|g, _| *g <= last);
        self.barrier(st)?;
        self.finish_cut(st)
    }

    /// Steps that follow once `cut` and the size in page 0 are durable: also what recovery repeats.
    fn finish_cut(&self, st: &mut State) -> Result<(), StoreError> {
        let last = self.geo().last_page(st.disk_size);
        st.pages.retain(|g, _| *g <= last);
        st.unresolved.retain(|g, _| *g <= last);
        if last > 0 {
            self.write_last_page(st, st.disk_size, false)?;
        }
        self.void_pages_after(st, last)?;
        let implied = self.implied_len(st)?;
        if st.len > implied {
            self.shorten(st, implied)?;
        }
        st.cut_open = false;
        Ok(())
    }

    /// After a commit: a page past the last one that a failed write may have left would tell another size.
    pub fn drop_stray_pages(&self, st: &mut State) -> Result<(), StoreError> {
        let last = self.geo().last_page(st.disk_size);
        if st.unsure_pages.iter().any(|g| *g > last) {
            self.void_pages_after(st, last)?;
            let implied = self.implied_len(st)?;
            if st.len > implied {
                self.shorten(st, implied)?;
            }
        }
        st.unsure_pages.clear();
        Ok(())
    }

    /// With several pages a segment, pages past the last one may lie before data that stays: they are made absent.
    fn void_pages_after(&self, st: &mut State, last: u64) -> Result<(), StoreError> {
        let geo = *self.geo();
        let from = geo.page_offset(last) + PAGE_LEN as u64;
        let until = (last / geo.pages_per_segment() * geo.segment_len() + geo.block_size()).min(st.len);
        if from < until {
            match st.zeros_unsure {
                true => self.write_zeros(st, from, until)?,
                false => self.punch(st, from, until - from)?,
            }
            st.drop_mark = st.seq;
        }
        Ok(())
    }

    /// Recovery of an interrupted shrink.
    pub fn redo_cut(&self, st: &mut State) -> Result<(), StoreError> {
        if self.geo().last_page(st.disk_size) == 0 {
            self.write_last_page(st, st.disk_size, true)?;
        }
        self.barrier(st)?; // the first attempt may have failed at its own
        self.finish_cut(st)
    }

    /// Writes the last page of `size` with everything past it dropped.
    fn write_last_page(&self, st: &mut State, size: u64, cut: bool) -> Result<(), StoreError> {
        let geo = *self.geo();
        let g = geo.last_page(size);
        let (mut page, mut lost) = match self.good_page(st, g)? {
            Some(Held { page, lost, .. }) => (page.clone(), *lost),
            None => (Page::empty(st.file_id), 0),
        };
        let blocks = (geo.blocks(size) - geo.first_block(g)) as usize;
        clip(&mut page, blocks, size, &geo, g);
        if page.tail.is_empty() {
            page.keys.resize(blocks);
        }
        lost &= page.pending;
        page.cut = cut;
        let before = (st.disk_size, st.floor);
        (st.disk_size, st.floor) = (size, if g == 0 { 0 } else { st.floor });
        let written = self.write_page(st, g, page, lost);
        if written.is_err() {
            (st.disk_size, st.floor) = before;
        }
        written
    }
}
