//! SEEK_DATA and SEEK_HOLE, at block granularity.

use super::primitives::Core;
use super::state::{Dirty, PageState, State};
use super::types::StoreError;
use lamassu_format::BlockNo;

impl Core {
    /// First offset at or after `offset` that is data; damaged pages count as data.
    pub fn seek_data(&self, st: &mut State, offset: u64) -> Result<Option<u64>, StoreError> {
        if offset >= st.sizes.logical() {
            return Ok(None);
        }
        let geo = *self.geo();
        let start = geo.block_at(offset);
        let buffered = st.buffer.range(start..).find(|(_, d)| !matches!(d, Dirty::Hole)).map(|(b, _)| b);
        let limit = buffered.unwrap_or(geo.end_block(st.sizes.logical()));
        let mut block = start;
        while block < limit {
            let Some(g) = self.next_page(st, self.geo().page_of(block))? else { break };
            let first = self.geo().first_block(g);
            let until = first + self.geo().blocks_per_page();
            if let Some(b) = block.max(first).until(until.min(limit)).find(|b| self.is_data(st, *b)) {
                return Ok(Some(offset.max(geo.block_start(b))));
            }
            block = until;
        }
        Ok(buffered.map(|b| offset.max(geo.block_start(b))))
    }

    /// First offset at or after `offset` that is a hole; the end of the file is one. The search stops at `until`, which
    /// is returned then.
    pub fn seek_hole(&self, st: &mut State, offset: u64, until: u64) -> Result<Option<u64>, StoreError> {
        if offset >= st.sizes.logical() {
            return Ok(None);
        }
        let geo = *self.geo();
        let until = until.min(st.sizes.logical());
        let mut block = geo.block_at(offset);
        while block < geo.end_block(until) {
            if st.inherited.lost_from().is_some_and(|from| geo.page_start(geo.page_of(block)) >= from) {
                break; // all damaged, which counts as data, however far the size goes
            }
            self.load_pages(st, block, block)?;
            if !self.is_data(st, block) {
                return Ok(Some(offset.max(geo.block_start(block))));
            }
            let g = self.geo().page_of(block);
            block = match st.pages.get(g) {
                Some(PageState::Bad(_)) => {
                    let buffered = st.buffer.first_in(block.next()..).unwrap_or(BlockNo(u64::MAX));
                    self.geo().first_block(self.end_of_bad(st, g)?).min(buffered)
                }
                _ => block.next(),
            };
        }
        Ok(Some(until))
    }

    /// Whether a block is data; its page must be in memory or absent.
    fn is_data(&self, st: &State, block: BlockNo) -> bool {
        match st.buffer.get(block) {
            Some(Dirty::Data(_) | Dirty::Sealed(_) | Dirty::Copied(_)) => return true,
            Some(Dirty::Hole) => return false,
            None => {}
        }
        let (g, i) = self.geo().slot_of(block);
        match st.pages.get(g) {
            None | Some(PageState::Absent) => false,
            Some(PageState::Bad(_)) => true,
            Some(PageState::Good(held)) if i < held.page().keys.len() => held.is_keyed(i) || held.is_lost(i),
            Some(PageState::Good(held)) => i == held.page().keys.len() && !held.page().tail.is_empty(),
        }
    }
}
