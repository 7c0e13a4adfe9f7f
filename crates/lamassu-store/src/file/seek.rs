//! SEEK_DATA and SEEK_HOLE, at block granularity.

use super::primitives::Core;
use super::read::Source;
use super::state::{Dirty, PageState, State};
use super::types::{Hole, StoreError};
use super::write::Look;
use lamassu_format::BlockNo;

impl Core {
    /// The hole at `offset`; damaged pages count as data. `None` past the end. At least one page is looked at, and no
    /// further one when pages of `most` bytes have been.
    pub fn hole_at(&self, st: &mut State, offset: u64, until: u64, most: u64) -> Result<Option<Hole>, StoreError> {
        if offset >= st.sizes.logical() {
            return Ok(None);
        }
        let geo = *self.geo();
        let until = until.min(st.sizes.logical()).max(offset);
        let (mut block, end) = (geo.block_at(offset), geo.end_block(until));
        let buffered = st.buffer.range(block..end).find(|(_, d)| !matches!(d, Dirty::Hole)).map(|(b, _)| b);
        let limit = buffered.unwrap_or(end);
        let mut looked_at = 0;
        while block < limit {
            if looked_at > 0 && looked_at >= most {
                return Ok(Some(Hole { end: geo.block_start(block), looked_at }));
            }
            looked_at += geo.page_span();
            let g = geo.page_of(block);
            block = match self.look_for_page(st, g)? {
                Look::Here => {
                    let next = geo.first_block(g.next());
                    if let Some(found) = block.until(next.min(limit)).find(|b| self.is_data(st, *b)) {
                        return Ok(Some(Hole { end: offset.max(geo.block_start(found)), looked_at }));
                    }
                    next
                }
                Look::NotBefore(next) => geo.first_block(next),
                Look::NoFurther => break,
            };
        }
        Ok(Some(Hole { end: buffered.map_or(until, |b| offset.max(geo.block_start(b))), looked_at }))
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
            Some(PageState::Good(held)) if held.is_keyed(i) || held.is_lost(i) || self.is_tail(held, i) => true,
            // What a read refuses is no hole: whoever copies would make it zeros.
            Some(PageState::Good(_)) => matches!(self.hole_or_lost(st, block), Source::Bad(_)),
        }
    }
}
