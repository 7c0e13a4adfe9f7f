//! Barriers, and the repair after a barrier that failed (I11).
//!
//! After a failed barrier the kernel may have dropped data that it could not write, although reads still show them. So
//! the next barrier counts only after everything uncovered was read back, verified and written again. So do pages that
//! were taken over from this file as it was closed before.

use super::primitives::{Core, Covers, PageId};
use super::state::{Held, Mark, State};
use super::types::{DamageKind, Durability, StoreError};
use lamassu_format::{Page, PageNo, SlotKey};

impl super::File {
    /// Notes that a barrier of the whole store failed: what it should have covered is written again before the next
    /// barrier counts.
    pub fn barrier_failed(&self) {
        let mut st = self.exclusive();
        if st.marks.has_uncovered() {
            st.note_failed_barrier();
        }
    }
}

impl Core {
    /// Whether something has to be written again before a barrier counts (I11).
    pub fn needs_rewrite(&self, st: &State) -> bool {
        st.failures.needs_rewrite() || self.fresh.as_ref().is_some_and(|fresh| fresh.has_lost())
    }

    /// A barrier for all writes so far. None is issued in `relaxed` durability, where order alone protects.
    pub fn barrier(&self, st: &mut State) -> Result<(), StoreError> {
        match self.ctx.durability {
            Durability::Ordered => self.sync_data(st),
            Durability::Relaxed => {
                st.marks.cover_all();
                Ok(())
            }
        }
    }

    /// A barrier in every durability mode, after the repair that an earlier failed one asks for.
    pub fn sync_data(&self, st: &mut State) -> Result<(), StoreError> {
        self.sync_as(st, Covers::Content)
    }

    /// The same for what `covers` names.
    pub fn sync_as(&self, st: &mut State, covers: Covers) -> Result<(), StoreError> {
        if self.needs_rewrite(st) {
            self.write_uncovered_again(st)?;
            self.write_inherited_again(st)?;
        }
        self.issue_barrier(st, covers)
    }

    /// I11: writes again what no barrier has covered. Content that is gone falls back to its previous key, or is lost;
    /// the next fsync reports the failure ([`super::state::Failures`]).
    fn write_uncovered_again(&self, st: &mut State) -> Result<(), StoreError> {
        if st.marks.is_shortening_uncovered() {
            // I8: nothing was written past the end since, because that waits for a barrier.
            let len = st.space.len();
            self.backing.set_len(len).map_err(StoreError::io("truncate", len))?;
        }
        let marks = &st.marks;
        for g in st.pages.numbers_of(|held| !held.is_durable(marks) || held.is_uncovered(marks)) {
            let Some(held) = st.pages.good(g) else { continue };
            let (page, lost) = self.write_open_blocks_again(g, held)?;
            self.write_page(st, g, page, lost, st.sizes.fields(), PageId::AsFits)?;
        }
        Ok(())
    }

    /// I11: writes the pages again that were taken over, if a barrier has failed since. Data under them is durable,
    /// since recovery made it so, or the process that closed the file.
    fn write_inherited_again(&self, st: &mut State) -> Result<(), StoreError> {
        let Some(fresh) = self.fresh.as_ref().filter(|fresh| fresh.has_lost()) else { return Ok(()) };
        let last = st.last_page(self.geo());
        for pages in fresh.uncommitted()? {
            let mut next = pages.start;
            while let Some(g) = fresh.next_page(&*self.backing, next)?.filter(|g| *g < pages.end && *g <= last) {
                // A page that is not as it was written is an error: the file is judged when it is opened again. One
                // that opens in no state is damage of that page alone.
                match self.good_page(st, g) {
                    Ok(held) if held.is_some_and(|held| held.write_mark() == Mark::default()) => {
                        self.settle_page(st, g)?;
                    }
                    Err(StoreError::Damaged(damage)) if damage.kind != DamageKind::Stale => {}
                    Ok(_) => {}
                    Err(error) => return Err(error),
                }
                next = g.next();
            }
        }
        Ok(())
    }

    /// Writes the blocks of a page again that are pending; returns the page, and which blocks are lost, as they are
    /// then.
    fn write_open_blocks_again(&self, g: PageNo, held: &Held) -> Result<(Page, u128), StoreError> {
        let (mut page, mut lost) = (held.page().clone(), held.lost());
        for i in (0..page.keys.len()).filter(|i| held.open_bits() >> i & 1 == 1) {
            let block = self.geo().first_block(g) + i as u64;
            let offset = self.geo().block_offset(block);
            let mut bytes = vec![0u8; self.ctx.block_len()];
            self.read_padded(offset, &mut bytes)?;
            let is_zero = bytes.iter().all(|&b| b == 0);
            let matches = |key: &SlotKey| match key.is_hole() {
                true => is_zero,
                false => self.block_matches(&bytes, key, held.page(), block),
            };
            if !page.keys.get(i).is_some_and(|key| matches(&key)) {
                match page.previous_key(i).or(Some(SlotKey::HOLE)).filter(matches) {
                    Some(previous) => page.keys.set(i, &previous),
                    None => {
                        lost |= 1 << i;
                        continue;
                    }
                }
            }
            if page.keys.is_keyed(i) {
                let (len, _) = self.len_to_write(&page, i, &bytes, held.page().replaced);
                self.backing.write_at(offset.0, &bytes[..len]).map_err(StoreError::io("write", offset))?;
            }
        }
        Ok((page, lost))
    }
}
