//! Barriers, and the repair after a barrier that failed (I11).
//!
//! After a failed barrier the kernel may have dropped data that it could not write, although reads still show them. So
//! the next barrier counts only after everything uncovered was read back, verified and written again.

use super::primitives::{Core, Covers, PageId};
use super::state::{Held, State};
use super::types::{Durability, StoreError};
use lamassu_format::{Page, PageNo, SlotKey};

impl Core {
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
        if st.failures.needs_rewrite() {
            self.write_uncovered_again(st)?;
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
                self.backing.write_at(offset.0, &bytes).map_err(StoreError::io("write", offset))?;
            }
        }
        Ok((page, lost))
    }
}
