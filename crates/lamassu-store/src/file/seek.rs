//! SEEK_DATA and SEEK_HOLE, at block granularity.

use super::state::{Core, Dirty, Entry, State};
use super::types::StoreError;

impl Core {
    /// First offset at or after `offset` that is data; damaged pages count as data.
    pub fn seek_data(&self, st: &mut State, offset: u64) -> Result<Option<u64>, StoreError> {
        if offset >= st.size {
            return Ok(None);
        }
        let size = self.geo().block_size();
        let start = offset / size;
        let buffered = st.dirty.range(start..).find(|(_, d)| !matches!(d, Dirty::Hole)).map(|(b, _)| *b);
        let limit = buffered.unwrap_or(self.geo().blocks(st.size));
        let mut block = start;
        while block < limit {
            let Some(g) = self.next_page(st, self.geo().slot_of(block).0)? else { break };
            let first = self.geo().first_block(g);
            let until = first + self.geo().blocks_per_page();
            if let Some(b) = (block.max(first)..until.min(limit)).find(|b| self.is_data(st, *b)) {
                return Ok(Some(offset.max(b * size)));
            }
            block = until;
        }
        Ok(buffered.map(|b| offset.max(b * size)))
    }

    /// First offset at or after `offset` that is a hole; the end of the file is one.
    pub fn seek_hole(&self, st: &mut State, offset: u64) -> Result<Option<u64>, StoreError> {
        if offset >= st.size {
            return Ok(None);
        }
        let size = self.geo().block_size();
        let mut block = offset / size;
        while block < self.geo().blocks(st.size) {
            if st.lost_from.is_some_and(|from| self.geo().slot_of(block).0 * self.geo().page_span() >= from) {
                break; // all damaged, which counts as data, however far the size goes
            }
            self.load_pages(st, block, block)?;
            if !self.is_data(st, block) {
                return Ok(Some(offset.max(block * size)));
            }
            let g = self.geo().slot_of(block).0;
            block = match st.pages.get(&g) {
                Some(Entry::Bad(_)) => {
                    let buffered = st.dirty.range(block + 1..).next().map_or(u64::MAX, |(b, _)| *b);
                    self.geo().first_block(self.end_of_bad(st, g)?).min(buffered)
                }
                _ => block + 1,
            };
        }
        Ok(Some(st.size))
    }

    /// Whether a block is data; its page must be in memory or absent.
    fn is_data(&self, st: &State, block: u64) -> bool {
        match st.dirty.get(&block) {
            Some(Dirty::Data(_) | Dirty::Sealed(_) | Dirty::Elsewhere(_)) => return true,
            Some(Dirty::Hole) => return false,
            None => {}
        }
        let (g, i) = self.geo().slot_of(block);
        match st.pages.get(&g) {
            None | Some(Entry::Absent) => false,
            Some(Entry::Bad(_)) => true,
            Some(Entry::Good(held)) => match held.page.keys.get(i) {
                Some(key) => *key != [0; 32] || held.lost >> i & 1 == 1,
                None => i == held.page.keys.len() && !held.page.tail.is_empty(),
            },
        }
    }
}
