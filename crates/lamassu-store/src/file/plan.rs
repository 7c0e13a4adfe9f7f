//! Planning a round of a commit: which pages are written, which blocks change under them, and how.
//!
//! The plan decides which previous keys a page keeps, so it keeps I2: a block whose data no barrier has covered gets
//! one before it is re-keyed ([`Core::wants_barrier`]). It writes nothing except through that barrier.

use super::block::Block;
use super::primitives::Core;
use super::recover::keep_bits;
use super::state::{Dirty, PageState, State};
use super::types::StoreError;
use lamassu_format::geometry::SLOTS;
use lamassu_format::{BlockNo, KEY_LEN, Keys, Page, PageNo};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of ciphertext prepared at once.
const ROUND_LEN_MAX: usize = 16 << 20;

/// How a block's content changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// There was no content: a hole.
    Fill,
    /// Durable content is replaced; its key is kept until the new data is durable. The same for a lost block: until its
    /// new data is durable it reads as damage, not as a hole.
    Replace,
    /// Bytes that were the page's tail get a data block (I7).
    LeaveTail,
}

/// A page to be written in this round.
pub(super) struct PlannedPage {
    pub page: Page,
    pub lost: u128,
    /// Whether it differs from the one on disk although no block under it changes its key.
    pub must_write: bool,
}

/// One round: at most R replaced blocks a page.
#[derive(Default)]
pub(super) struct Round {
    pub pages: BTreeMap<PageNo, PlannedPage>,
    /// Blocks to seal and write, ascending.
    pub data: Vec<(BlockNo, Change)>,
    /// Blocks to punch.
    pub punches: Vec<BlockNo>,
    /// Buffered blocks that the pages themselves settle (tails, holes that are holes).
    pub absorbed: Vec<BlockNo>,
}

/// The goal of a commit, the same in all its rounds.
pub(super) struct Goal {
    /// The size that the pages give the file in the end.
    pub size: u64,
    /// Pages that must be written at least once.
    pub unwritten: BTreeSet<PageNo>,
    pub last: PageNo,
    /// The block that is kept as tail of the last page, and its length.
    pub tail: Option<(BlockNo, usize)>,
}

impl Core {
    /// The changes that bring `size` and the buffered blocks to the pages.
    pub fn goal(&self, st: &mut State, size: u64) -> Result<Goal, StoreError> {
        let geo = *self.geo();
        let last = geo.last_page(size);
        let old_last = st.last_page(&geo);
        let mut pages = self.dirty_pages(st);
        let last_is_absent = matches!(self.page(st, last)?, PageState::Absent);
        let is_cut = st.shrink.is_cut();
        if size != st.sizes.stored() || is_cut || last_is_absent {
            pages.insert(last);
        }
        let zero_is_absent = matches!(self.page(st, PageNo::ZERO)?, PageState::Absent);
        // I11: the content of these pages on disk is unknown.
        pages.extend(st.failures.uncertain_pages().range(..=last));
        if last > old_last && self.is_short(st, old_last)? {
            pages.insert(old_last); // even if the file grows by a hole: a page that others follow has all its blocks
        }
        let skipped = old_last.next().until(last).any(|g| !pages.contains(&g));
        if zero_is_absent || is_cut || (skipped && !st.sizes.is_sparse()) {
            pages.insert(PageNo::ZERO);
        }
        if skipped {
            st.sizes.note_sparse();
        }
        let tail = self.choose_tail(st, size, last)?;
        self.free_stray_tails(st, &pages, tail)?;
        Ok(Goal { size, unwritten: pages, last, tail })
    }

    fn is_short(&self, st: &mut State, g: PageNo) -> Result<bool, StoreError> {
        Ok(self.page(st, g)?.good().is_some_and(|held| self.lacks_blocks(held.page(), g, u64::MAX)))
    }

    /// The pages with buffered blocks; skips from page to page, since a page has many blocks.
    fn dirty_pages(&self, st: &State) -> BTreeSet<PageNo> {
        let geo = self.geo();
        let next = |from: BlockNo| st.buffer.first_in(from..).map(|b| geo.page_of(b));
        std::iter::successors(next(BlockNo::ZERO), |g| next(geo.first_block(g.next()))).collect()
    }

    /// The partial last block lives in its page if it fits there with the keys, and with one previous key if one is
    /// needed.
    fn choose_tail(&self, st: &mut State, size: u64, last: PageNo) -> Result<Option<(BlockNo, usize)>, StoreError> {
        let geo = *self.geo();
        let len = (size % geo.block_size()) as usize;
        if len == 0 {
            return Ok(None);
        }
        let block = geo.block_at(size);
        self.unseal(st, block)?; // a tail is kept as it is
        let used = (block - geo.first_block(last)) as usize;
        let dirty: Vec<BlockNo> = st.buffer.range(geo.first_block(last)..block).map(|(b, _)| b).collect();
        let is_dirty = st.buffer.contains(block);
        let held = self.good_page(st, last)?;
        let is_tail = held.is_some_and(|held| !held.page().tail.is_empty() && held.page().keys.len() == used);
        let keyed = |b: &BlockNo| {
            let slot = (*b - geo.first_block(last)) as usize;
            held.is_some_and(|held| held.is_keyed(slot))
        };
        let kept = held.map_or(0, |held| (held.page().replaced & held.lost()).count_ones() as usize);
        let replaces = usize::from(dirty.iter().any(keyed));
        let eligible = is_dirty || is_tail;
        Ok((eligible && Page::fits(used, kept + replaces, len)).then_some((block, len)))
    }

    /// A tail that cannot stay where it is becomes an ordinary buffered block.
    fn free_stray_tails(
        &self,
        st: &mut State,
        pages: &BTreeSet<PageNo>,
        tail: Option<(BlockNo, usize)>,
    ) -> Result<(), StoreError> {
        for g in pages {
            let Some(held) = self.good_page(st, *g)? else { continue };
            let page = held.page();
            let block = self.geo().first_block(*g) + page.keys.len() as u64;
            if page.tail.is_empty() || tail.is_some_and(|(b, _)| b == block) {
                continue;
            }
            let mut bytes = Block::zeroed(self.ctx.block_len());
            bytes[..page.tail.len()].copy_from_slice(&page.tail);
            if !st.buffer.contains(block) {
                st.buffer.put(block, Dirty::Data(bytes), false);
            }
        }
        Ok(())
    }

    /// Picks the next round. Empty when nothing is left to do.
    pub fn plan(&self, st: &mut State, goal: &Goal) -> Result<Round, StoreError> {
        let candidates: Vec<PageNo> = goal.unwritten.union(&self.dirty_pages(st)).copied().collect();
        if candidates.iter().any(|g| self.wants_barrier(st, *g, goal.last)) {
            self.barrier(st)?;
        }
        let mut round = Round::default();
        let mut budget = (ROUND_LEN_MAX / self.ctx.block_len()).max(1);
        for g in candidates {
            let planned = self.plan_page(st, goal, g, &mut round, &mut budget)?;
            round.pages.insert(g, planned);
        }
        Ok(round)
    }

    /// Whether a page needs a barrier before it is written again. I2: an uncovered block that is re-keyed has to be
    /// durable first, since its key becomes a previous key. If there is no room for the previous keys of what is
    /// replaced now beside those that are kept for uncovered blocks, a barrier frees the slots of these. The last page
    /// may get a tail, which takes slots too.
    fn wants_barrier(&self, st: &State, g: PageNo, last: PageNo) -> bool {
        let Some(held) = st.pages.good(g).filter(|held| held.is_uncovered(&st.marks)) else { return false };
        let (page, open) = (held.page(), held.open_bits());
        let first = self.geo().first_block(g);
        let mut replaced = 0;
        for (block, _) in st.buffer.range(first..first + self.geo().blocks_per_page()) {
            let i = (block - first) as usize;
            if open >> i & 1 == 1 {
                return true;
            }
            replaced += usize::from(i < page.keys.len() && held.is_keyed(i));
        }
        let room = self.geo().reserved().saturating_sub(page.previous.len());
        let has_room = replaced <= room && room > 0 && page.tail.is_empty() && g < last;
        page.replaced & open != 0 && !has_room
    }

    fn plan_page(
        &self,
        st: &mut State,
        goal: &Goal,
        g: PageNo,
        round: &mut Round,
        budget: &mut usize,
    ) -> Result<PlannedPage, StoreError> {
        let geo = *self.geo();
        self.good_page(st, g)?;
        let (mut page, mut lost, uncovered) = match st.pages.good(g) {
            Some(held) => (held.page().clone(), held.lost(), held.is_uncovered(&st.marks)),
            None => (self.new_page(st), 0, false),
        };
        let old_tail = (!page.tail.is_empty()).then(|| geo.first_block(g) + page.keys.len() as u64);
        if !uncovered {
            keep_bits(&mut page, lost); // I3: a barrier has covered their data
        }
        page.cut = false;
        self.shape(st, goal, g, &mut page, round);
        lost &= page.pending;
        let tail_slots = page.tail.len().div_ceil(KEY_LEN);
        let first = geo.first_block(g);
        let mut room = (SLOTS - page.keys.len() - tail_slots).min(geo.reserved()).saturating_sub(page.previous.len());
        if room == 0 {
            // Only lost blocks hold previous keys now. New content takes precedence over content that cannot be opened
            // anyway. Those blocks stay damaged, since nothing in the store verifies under their keys.
            let holding = page.replaced;
            (page.pending, page.replaced, page.previous) = (page.pending & !holding, 0, Keys::default());
            lost &= !holding;
            room = (SLOTS - page.keys.len() - tail_slots).min(geo.reserved());
        }
        for (block, dirty) in st.buffer.range(first..first + geo.blocks_per_page()) {
            let i = (block - first) as usize;
            if i >= page.keys.len() {
                continue; // the tail
            }
            let bit = 1u128 << i;
            let keyed = page.keys.is_keyed(i);
            let replaces = keyed && lost & bit == 0;
            // It has its previous key already.
            let replaces_lost = lost & page.replaced & bit != 0;
            let leaves = old_tail == Some(block);
            match dirty {
                Dirty::Hole if !keyed && lost & bit == 0 => {
                    round.absorbed.push(block);
                    continue;
                }
                _ if replaces && room == 0 => continue,
                Dirty::Data(_) | Dirty::Sealed(_) | Dirty::Copied(_) if *budget == 0 && !leaves => continue,
                Dirty::Hole => round.punches.push(block),
                Dirty::Data(_) | Dirty::Sealed(_) | Dirty::Copied(_) => {
                    *budget = budget.saturating_sub(1);
                    let change = match (leaves, replaces || replaces_lost) {
                        (true, _) => Change::LeaveTail,
                        (_, true) => Change::Replace,
                        (_, false) => Change::Fill,
                    };
                    round.data.push((block, change));
                }
            }
            room -= usize::from(replaces);
            lost &= !bit;
        }
        Ok(PlannedPage { page, lost, must_write: goal.unwritten.contains(&g) })
    }

    /// Gives the page the slots and the tail for the goal's size.
    fn shape(&self, st: &State, goal: &Goal, g: PageNo, page: &mut Page, round: &mut Round) {
        let geo = *self.geo();
        let blocks = geo.end_block(goal.size).0.saturating_sub(geo.first_block(g).0);
        let blocks = blocks.min(geo.blocks_per_page()) as usize;
        let tail = goal.tail.filter(|_| g == goal.last);
        let used = blocks - usize::from(tail.is_some());
        match tail {
            None => page.tail.clear(),
            Some((block, len)) => {
                match st.buffer.get(block) {
                    Some(Dirty::Data(bytes)) => page.tail = bytes[..len].to_vec(),
                    Some(Dirty::Hole) => page.tail = vec![0; len],
                    Some(Dirty::Sealed(_)) => unreachable!("`choose_tail` unseals it"),
                    Some(Dirty::Copied(_)) => unreachable!("whole blocks alone are copied"),
                    None => page.tail.resize(len, 0), // the page's own
                }
                if st.buffer.contains(block) {
                    round.absorbed.push(block);
                }
            }
        }
        let mask = (1u128 << used) - 1;
        if page.keys.len() > used {
            let keep = page.pending & mask;
            keep_bits(page, keep);
        }
        page.keys.resize(used);
    }
}
