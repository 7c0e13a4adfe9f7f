//! Planning a round of a commit: which pages are written, which blocks change under them, and how.

use super::block::Block;
use super::open::keep_bits;
use super::state::{Core, Dirty, Entry, State};
use super::types::StoreError;
use lamassu_format::geometry::SLOTS;
use lamassu_format::{KEY_LEN, Keys, Page};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of ciphertext prepared at once.
const ROUND_LEN_MAX: usize = 16 << 20;

/// How a block's content changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// There was no content: a hole, or a block that is lost anyway.
    Fill,
    /// Durable content is replaced; its key is kept until the new data is durable.
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
    pub pages: BTreeMap<u64, PlannedPage>,
    /// Blocks to seal and write, ascending.
    pub data: Vec<(u64, Change)>,
    /// Blocks to punch.
    pub punches: Vec<u64>,
    /// Buffered blocks that the pages themselves settle (tails, holes that are holes).
    pub absorbed: Vec<u64>,
}

/// What a commit aims at, the same in all its rounds.
pub(super) struct Goal {
    /// Pages that must be written at least once.
    pub unwritten: BTreeSet<u64>,
    pub last: u64,
    /// The block that is kept as tail of the last page, and its length.
    pub tail: Option<(u64, usize)>,
}

impl Core {
    /// What has to happen to bring `st.size` and the buffered blocks to the pages.
    pub fn goal(&self, st: &mut State) -> Result<Goal, StoreError> {
        let geo = *self.geo();
        let last = geo.last_page(st.size);
        let old_last = geo.last_page(st.disk_size);
        let mut pages = self.dirty_pages(st);
        let last_is_absent = matches!(self.page(st, last)?, Entry::Absent);
        if st.size != st.disk_size || st.cut || last_is_absent {
            pages.insert(last);
        }
        let zero_is_absent = matches!(self.page(st, 0)?, Entry::Absent);
        pages.extend(st.unsure_pages.range(..=last));
        let skipped = (old_last + 1..last).any(|g| !pages.contains(&g));
        if zero_is_absent || st.cut || (skipped && !st.sparse) {
            pages.insert(0);
        }
        st.sparse |= skipped;
        let tail = self.choose_tail(st, last)?;
        self.free_stray_tails(st, &pages, tail)?;
        Ok(Goal { unwritten: pages, last, tail })
    }

    /// The pages with buffered blocks, found from one to the next: a page has many.
    fn dirty_pages(&self, st: &State) -> BTreeSet<u64> {
        let geo = self.geo();
        let next = |from: u64| st.dirty.range(from..).next().map(|(b, _)| geo.slot_of(*b).0);
        std::iter::successors(next(0), |g| next(geo.first_block(g + 1))).collect()
    }

    /// The partial last block lives in its page if it fits beside the keys, and beside one previous key if one is needed.
    fn choose_tail(&self, st: &mut State, last: u64) -> Result<Option<(u64, usize)>, StoreError> {
        let geo = *self.geo();
        let len = (st.size % geo.block_size()) as usize;
        if len == 0 {
            return Ok(None);
        }
        let block = st.size / geo.block_size();
        self.unseal(st, block)?; // a tail is kept as it is
        let used = (block - geo.first_block(last)) as usize;
        let dirty: Vec<u64> = st.dirty.range(geo.first_block(last)..block).map(|(b, _)| *b).collect();
        let is_dirty = st.dirty.contains_key(&block);
        let held = self.good_page(st, last)?;
        let is_tail = held.is_some_and(|held| !held.page.tail.is_empty() && held.page.keys.len() == used);
        let keyed = |b: &u64| {
            let slot = (*b - geo.first_block(last)) as usize;
            held.is_some_and(|held| held.page.keys.get(slot).is_some_and(|key| *key != [0; KEY_LEN]))
        };
        let kept = held.map_or(0, |held| (held.page.replaced & held.lost).count_ones() as usize);
        let replaces = usize::from(dirty.iter().any(keyed));
        let eligible = is_dirty || is_tail;
        Ok((eligible && Page::fits(used, kept + replaces, len)).then_some((block, len)))
    }

    /// A tail that cannot stay where it is becomes an ordinary buffered block.
    fn free_stray_tails(
        &self,
        st: &mut State,
        pages: &BTreeSet<u64>,
        tail: Option<(u64, usize)>,
    ) -> Result<(), StoreError> {
        for g in pages {
            let Some(held) = self.good_page(st, *g)? else { continue };
            let block = self.geo().first_block(*g) + held.page.keys.len() as u64;
            if held.page.tail.is_empty() || tail.is_some_and(|(b, _)| b == block) {
                continue;
            }
            let mut bytes = Block::zeroed(self.ctx.block_len());
            bytes[..held.page.tail.len()].copy_from_slice(&held.page.tail);
            st.dirty.entry(block).or_insert(Dirty::Data(bytes));
        }
        Ok(())
    }

    /// Picks the next round. Empty when nothing is left to do.
    pub fn plan(&self, st: &mut State, goal: &Goal) -> Result<Round, StoreError> {
        let candidates: Vec<u64> = goal.unwritten.union(&self.dirty_pages(st)).copied().collect();
        if candidates.iter().any(|g| self.wants_barrier(st, *g)) {
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

    /// Outstanding previous keys, and uncovered blocks about to be keyed anew, need a barrier before the page is written again.
    fn wants_barrier(&self, st: &State, g: u64) -> bool {
        let Some(Entry::Good(held)) = st.pages.get(&g) else { return false };
        if !held.is_uncovered(st.covered) {
            return false;
        }
        let first = self.geo().first_block(g);
        let open = held.page.pending & !held.lost;
        let rekeyed = |b: u64| b - first < 128 && open >> (b - first) & 1 == 1;
        held.page.replaced & open != 0
            || st.dirty.range(first..first + self.geo().blocks_per_page()).any(|(b, _)| rekeyed(*b))
    }

    fn plan_page(
        &self,
        st: &mut State,
        goal: &Goal,
        g: u64,
        round: &mut Round,
        budget: &mut usize,
    ) -> Result<PlannedPage, StoreError> {
        let geo = *self.geo();
        let covered = st.covered;
        let (mut page, mut lost, uncovered) = match self.good_page(st, g)? {
            Some(held) => (held.page.clone(), held.lost, held.is_uncovered(covered)),
            None => (Page::empty(st.file_id), 0, false),
        };
        let old_tail = (!page.tail.is_empty()).then(|| geo.first_block(g) + page.keys.len() as u64);
        if !uncovered {
            keep_bits(&mut page, lost);
        }
        page.cut = false;
        self.shape(st, goal, g, &mut page, round);
        lost &= page.pending;
        let tail_slots = page.tail.len().div_ceil(KEY_LEN);
        let first = geo.first_block(g);
        let mut room = (SLOTS - page.keys.len() - tail_slots).min(geo.reserved()).saturating_sub(page.previous.len());
        if room == 0 {
            // Only lost blocks hold previous keys now; new content goes before what cannot be opened anyway.
            (page.replaced, page.previous) = (0, Keys::default());
            room = (SLOTS - page.keys.len() - tail_slots).min(geo.reserved());
        }
        for (block, dirty) in st.dirty.range(first..first + geo.blocks_per_page()) {
            let i = (block - first) as usize;
            if i >= page.keys.len() {
                continue; // the tail
            }
            let bit = 1u128 << i;
            let keyed = page.keys[i] != [0; KEY_LEN];
            let replaces = keyed && lost & bit == 0;
            let leaves = old_tail == Some(*block);
            match dirty {
                Dirty::Hole if !keyed && lost & bit == 0 => {
                    round.absorbed.push(*block);
                    continue;
                }
                _ if replaces && room == 0 => continue,
                Dirty::Data(_) | Dirty::Sealed(_) | Dirty::Elsewhere(_) if *budget == 0 && !leaves => continue,
                Dirty::Hole => round.punches.push(*block),
                Dirty::Data(_) | Dirty::Sealed(_) | Dirty::Elsewhere(_) => {
                    *budget = budget.saturating_sub(1);
                    let change = match (leaves, replaces) {
                        (true, _) => Change::LeaveTail,
                        (_, true) => Change::Replace,
                        (_, false) => Change::Fill,
                    };
                    round.data.push((*block, change));
                }
            }
            room -= usize::from(replaces);
            lost &= !bit;
        }
        Ok(PlannedPage { page, lost, must_write: goal.unwritten.contains(&g) })
    }

    /// Gives the page the slots and the tail that the goal's size implies.
    fn shape(&self, st: &State, goal: &Goal, g: u64, page: &mut Page, round: &mut Round) {
        let geo = *self.geo();
        let blocks = geo.blocks(st.size).saturating_sub(geo.first_block(g)).min(geo.blocks_per_page()) as usize;
        let tail = goal.tail.filter(|_| g == goal.last);
        let used = blocks - usize::from(tail.is_some());
        match tail {
            None => page.tail.clear(),
            Some((block, len)) => {
                match st.dirty.get(&block) {
                    Some(Dirty::Data(bytes)) => page.tail = bytes[..len].to_vec(),
                    Some(Dirty::Hole) => page.tail = vec![0; len],
                    Some(Dirty::Sealed(_)) => unreachable!("`choose_tail` unseals it"),
                    Some(Dirty::Elsewhere(_)) => unreachable!("whole blocks alone are copied"),
                    None => page.tail.resize(len, 0), // the page's own
                }
                if st.dirty.contains_key(&block) {
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
