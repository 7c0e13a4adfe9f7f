//! The multiphase commit (`docs/format.md` §13): page with new and previous keys, barrier, data, and later the page again.

use super::ciphertext::Ciphertext;
use super::open::keep_bits;
use super::plan::{Change, Goal, Round};
use super::read::View;
use super::state::{Core, Dirty, Entry, Held, State};
use super::types::StoreError;
use crate::backend::BackendFile;
use lamassu_format::{BlockKey, Page};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Pages with pending bits kept in memory before they are settled by force.
const OPEN_PAGES_MAX: usize = 2048;

/// What an fsync says whose own barrier was good, after another has failed.
pub(super) fn lost_barrier() -> StoreError {
    StoreError::io("sync", 0)(std::io::Error::from_raw_os_error(libc::EIO))
}

impl Core {
    /// Whether anything is buffered.
    pub fn needs_commit(&self, st: &State) -> bool {
        !st.dirty.is_empty()
            || st.size != st.disk_size
            || !st.unsure_pages.is_empty()
            || (st.wants_page && !matches!(st.pages.get(&0), Some(Entry::Good(_))))
    }

    /// Writes everything buffered to the store, in rounds of at most R replaced blocks a page. No barrier at the end.
    pub fn commit(&self, st: &mut State) -> Result<(), StoreError> {
        if self.needs_commit(st) {
            self.prepare_write(st)?;
            let done = self.keeping_mtime(st, Core::commit_buffered);
            super::write::note_commit(st, &done);
            done?;
        } else {
            self.set_mtime()?;
        }
        self.forget_mtime();
        if st.pages.len() > OPEN_PAGES_MAX {
            self.settle_now(st)?;
        }
        Ok(())
    }

    fn commit_buffered(&self, st: &mut State) -> Result<(), StoreError> {
        if st.cut {
            self.barrier(st)?; // the shrink must be durable before page 0 stops ruling
        }
        if st.size > st.disk_size && self.is_ragged(st)? {
            self.smooth_end(st)?;
        }
        let grows = st.size > st.disk_size;
        self.rounds(st)?;
        self.drop_stray_pages(st)?;
        if grows {
            st.ragged = Some(false); // a last block written here is padded with zeros
        }
        st.wants_page = false;
        st.replaces = false;
        st.at_cut = None;
        Ok(())
    }

    fn rounds(&self, st: &mut State) -> Result<(), StoreError> {
        let mut goal = self.goal(st)?;
        loop {
            if st.barrier_failed {
                // Here, and never between the pages of a round and its data: what is written again would be taken for all there is.
                self.sync_data(st)?;
            }
            let round = self.plan(st, &goal)?;
            if round.pages.is_empty() {
                st.unsure = false;
                return Ok(());
            }
            let left = (st.dirty.len(), goal.unwritten.len());
            self.run(st, round, &mut goal)?;
            if (st.dirty.len(), goal.unwritten.len()) == left {
                // A page without room for what must change under it. The planner never makes one; an error, then, and not a loop for ever.
                debug_assert!(false, "a round of a commit changed nothing");
                let source = std::io::Error::from_raw_os_error(libc::EIO);
                return Err(StoreError::Io { op: "commit without progress", offset: 0, source });
            }
        }
    }

    /// Whether the last block on disk holds anything but zeros past the size, as a shrink leaves it.
    fn is_ragged(&self, st: &mut State) -> Result<bool, StoreError> {
        let inside = (st.disk_size % self.geo().block_size()) as usize;
        if inside == 0 || st.ragged == Some(false) {
            return Ok(false);
        }
        let block = st.disk_size / self.geo().block_size();
        self.load_pages(st, block, block)?;
        let mut bytes = vec![0u8; self.ctx.block_len()];
        let buffered = st.dirty.remove(&block);
        let mut damaged = false;
        let read = self.read_blocks(&View::of(st), block, &mut bytes, lamassu_crypto::Verify::Full, &mut |_, _| {
            damaged = true;
            Ok(())
        });
        if let Some(buffered) = buffered {
            st.dirty.insert(block, buffered);
        }
        read?;
        // A damaged block has no content that could come back.
        let ragged = !damaged && bytes[inside..].iter().any(|&b| b != 0);
        st.ragged = Some(ragged);
        Ok(ragged)
    }

    /// Rewrites the last block with zeros past the size, durably, before the size grows: otherwise a crash while it grows could
    /// fall back to the previous key and bring back bytes that a shrink had cut off.
    fn smooth_end(&self, st: &mut State) -> Result<(), StoreError> {
        let block = st.disk_size / self.geo().block_size();
        let buffered = std::mem::take(&mut st.dirty);
        let size = std::mem::replace(&mut st.size, st.disk_size);
        // Content that the file had when it was that long, not what is buffered now: no block is ever a mixture of versions.
        let at_cut = st.at_cut.take().filter(|(b, _)| *b == block).map(|(_, bytes)| bytes);
        let old = at_cut.map_or_else(|| self.load_block(st, block), Ok);
        let done = old.and_then(|bytes| {
            st.dirty.insert(block, Dirty::Data(bytes));
            self.rounds(st).and_then(|()| self.barrier(st))
        });
        st.dirty = buffered;
        st.size = size;
        done
    }

    /// Commits and makes everything durable, for the application. Fails once if a barrier has failed since it last asked, in the middle of a write or in the
    /// background: what was written before that may be gone, and what could be written again says nothing about the rest.
    pub fn sync(&self, st: &mut State) -> Result<(), StoreError> {
        let done = self.commit(st).and_then(|()| self.sync_data(st));
        let untold = std::mem::take(&mut st.untold);
        done?;
        match untold {
            true => Err(lost_barrier()),
            false => Ok(()),
        }
    }

    fn run(&self, st: &mut State, mut round: Round, goal: &mut Goal) -> Result<(), StoreError> {
        if st.drop_mark > st.covered && self.touches_given_up(st, &round) {
            self.barrier(st)?;
        }
        let sealed = self.seal(st, &round)?;
        let left = self.leave_tails(st, &mut round, &sealed)?;
        self.clear_holes(st, &round, &left)?;
        self.id_before_pages(st, &round)?;
        self.key_pages(&mut round, &sealed.keys);
        let since = st.seq;
        let done = self.write_pages(st, &mut round, goal).and_then(|()| self.write_content(st, &round, &sealed, &left));
        if let Err(error) = done {
            self.undo(st, since, &round);
            return Err(error);
        }
        sealed.give_back();
        let done = round.data.iter().map(|(b, _)| b).chain(&round.punches).chain(&round.absorbed);
        for block in done {
            st.dirty.remove(block);
        }
        Ok(())
    }

    /// Whether a round writes data, or anything past the end of the backing file.
    fn touches_given_up(&self, st: &State, round: &Round) -> bool {
        let page_end = |g: &u64| self.geo().page_offset(*g) + lamassu_format::PAGE_LEN as u64;
        !round.data.is_empty() || !round.punches.is_empty() || round.pages.keys().any(|g| page_end(g) > st.len)
    }

    /// I7: what leaves the tail is durable in its block before the page without it is written. A tail that was never
    /// durable needs the order only, and its block stays pending. Returns the blocks written.
    fn leave_tails(&self, st: &mut State, round: &mut Round, sealed: &Ciphertext) -> Result<BTreeSet<u64>, StoreError> {
        let never_durable = st.born && st.covered <= st.born_mark;
        let (mut written, mut must_last) = (BTreeSet::new(), false);
        for (n, (block, change)) in round.data.iter_mut().enumerate() {
            if *change == Change::LeaveTail {
                self.write_blocks(st, *block, sealed, n, 1)?;
                written.insert(*block);
                match never_durable {
                    true => *change = Change::Fill,
                    false => must_last = true,
                }
            }
        }
        if must_last {
            self.barrier(st)?;
        }
        Ok(written)
    }

    /// I6: where a hole is filled below the end of the backing file, the bytes there are zero, durably.
    fn clear_holes(&self, st: &mut State, round: &Round, left: &BTreeSet<u64>) -> Result<(), StoreError> {
        let mut punched = false;
        for (_, first, count) in self.runs(round, |b, change| change == Change::Fill && !left.contains(&b)) {
            let from = self.geo().block_offset(first);
            let end = from + count as u64 * self.geo().block_size();
            let until = end.min(st.len);
            if st.zeros_unsure {
                self.write_zeros(st, from, end)?;
                punched = true;
            } else if from < until && !self.is_zero(st, from, until)? {
                self.punch(st, from, until - from)?;
                punched = true;
            }
        }
        if punched { self.barrier(st) } else { Ok(()) }
    }

    /// Real zeros, where what reads as zeros may be what a failed barrier has lost.
    pub fn write_zeros(&self, st: &mut State, from: u64, until: u64) -> Result<(), StoreError> {
        self.backing.write_at(from, &vec![0; (until - from) as usize]).map_err(StoreError::io("write", from))?;
        st.wrote(from, until - from);
        Ok(())
    }

    fn is_zero(&self, st: &mut State, from: u64, until: u64) -> Result<bool, StoreError> {
        if st.zeros.have(from, until) {
            return Ok(true);
        }
        let mut at = from;
        let mut bytes = vec![0u8; self.ctx.block_len()];
        while at < until {
            match self.backing.seek_data(at).map_err(StoreError::io("seek data", at))? {
                Some(data) if data < until => at = data,
                data => {
                    // Searching is slow on some stores; the rest of this hole is about to be filled.
                    st.zeros.found(at..data.unwrap_or(st.len));
                    return Ok(true);
                }
            }
            let n = (until - at).min(bytes.len() as u64) as usize;
            self.read_padded(at, &mut bytes[..n])?;
            if bytes[..n].iter().any(|&b| b != 0) {
                return Ok(false);
            }
            at += n as u64;
        }
        Ok(true)
    }

    pub fn punch(&self, st: &mut State, offset: u64, len: u64) -> Result<(), StoreError> {
        match self.backing.punch(offset, len) {
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                let zeros = vec![0u8; len as usize];
                self.backing.write_at(offset, &zeros).map_err(StoreError::io("write", offset))?;
            }
            other => other.map_err(StoreError::io("punch", offset))?,
        }
        st.seq += 1;
        Ok(())
    }

    fn punch_block(&self, st: &mut State, block: u64) -> Result<(), StoreError> {
        let offset = self.geo().block_offset(block);
        let len = self.geo().block_size().min(st.len.saturating_sub(offset));
        if len > 0 {
            self.punch(st, offset, len)?;
        }
        let seq = st.seq;
        if let Some(Entry::Good(held)) = st.pages.get_mut(&self.geo().slot_of(block).0) {
            Arc::make_mut(held).data_mark = seq;
        }
        Ok(())
    }

    /// I4: page 0, with the file's id, is durable before any other page is written.
    fn id_before_pages(&self, st: &mut State, round: &Round) -> Result<(), StoreError> {
        if round.pages.keys().all(|g| *g == 0) {
            return Ok(());
        }
        let is_multi = self.geo().last_page(st.disk_size) > 0;
        let covered = st.covered;
        let held = self.good_page(st, 0)?;
        let ready = held.is_some_and(|h| h.page.file_id != [0; 16] && (is_multi || h.write_mark <= covered));
        if ready {
            st.floor = if is_multi { st.floor } else { st.disk_size };
            return Ok(());
        }
        let (page, lost) = match held {
            Some(held) => (held.page.clone(), held.lost),
            None => (Page::empty([0; 16]), 0),
        };
        st.needs_id = true;
        let written = self.write_page(st, 0, page, lost);
        st.needs_id = false;
        written?;
        self.barrier(st)?;
        st.floor = st.disk_size;
        Ok(())
    }

    /// Puts the new keys into the planned pages. A data block that keeps its key is written again as it was, which is how a block
    /// that rotted in the store heals, and needs no commit.
    fn key_pages(&self, round: &mut Round, keys: &[BlockKey]) {
        for (n, (block, change)) in round.data.iter().enumerate() {
            let (g, i) = self.geo().slot_of(*block);
            let planned = round.pages.get_mut(&g).expect("data lies under a planned page");
            if *change != Change::Replace || planned.page.keys[i] != keys[n] {
                set_key(&mut planned.page, i, keys[n], *change);
                planned.must_write = true;
            }
        }
        for block in &round.punches {
            let (g, i) = self.geo().slot_of(*block);
            let planned = round.pages.get_mut(&g).expect("punches lie under a planned page");
            let lost = planned.page.pending >> i & 1 == 1;
            set_key(&mut planned.page, i, [0; 32], if lost { Change::Fill } else { Change::Replace });
            planned.must_write = true;
        }
    }

    /// The last page first where the file gets new ones, so that one write alone jumps past the end of the backing file: with each such jump XFS allocates
    /// what it had reserved behind the last one, apart from the data that comes there (4000 extents a GiB instead of a dozen).
    fn write_pages(&self, st: &mut State, round: &mut Round, goal: &mut Goal) -> Result<(), StoreError> {
        let geo = *self.geo();
        let old = st.disk_size;
        st.disk_size = st.size;
        let mut reached = old;
        let last = geo.last_page(st.size);
        let new_pages = last > geo.last_page(old);
        let (below, at_end) = (round.pages.range(..last), round.pages.range(last..));
        let order = if new_pages { at_end.chain(below) } else { below.chain(at_end) };
        for (g, planned) in order.filter(|(_, p)| p.must_write) {
            if let Err(error) = self.write_page(st, *g, planned.page.clone(), planned.lost) {
                st.disk_size = reached;
                st.sparse |= new_pages && reached > old; // pages before the last may be absent: holes, not damage, where it becomes durable
                return Err(error);
            }
            goal.unwritten.remove(g);
            if *g >= geo.last_page(old) && (*g > 0 || geo.last_page(st.size) == 0) {
                reached = reached.max(st.size.min((g + 1) * geo.page_span()));
            }
        }
        Ok(())
    }

    /// The barrier between pages and data, where one is needed, and the data.
    fn write_content(
        &self,
        st: &mut State,
        round: &Round,
        sealed: &Ciphertext,
        left: &BTreeSet<u64>,
    ) -> Result<(), StoreError> {
        let replaces = round.pages.values().any(|p| p.page.replaced & !p.lost != 0) || !round.punches.is_empty();
        if replaces || (st.unsure && !round.data.is_empty()) || (st.drop_mark > st.covered && !round.data.is_empty()) {
            self.barrier(st)?;
        }
        for (n, first, count) in self.runs(round, |b, _| !left.contains(&b)) {
            self.write_blocks(st, first, sealed, n, count)?;
        }
        round.punches.iter().try_for_each(|block| self.punch_block(st, *block))
    }

    /// Groups the chosen data blocks into runs that lie together: (index of the first in the round, first block, count).
    fn runs(&self, round: &Round, choose: impl Fn(u64, Change) -> bool) -> Vec<(usize, u64, usize)> {
        let mut runs: Vec<(usize, u64, usize)> = Vec::new();
        for (n, (block, _)) in round.data.iter().enumerate().filter(|(_, (b, change))| choose(*b, *change)) {
            match runs.last_mut() {
                Some((at, first, count))
                    if *at + *count == n
                        && *first + *count as u64 == *block
                        && self.continues(*first, *count as u64) =>
                {
                    *count += 1;
                }
                _ => runs.push((n, *block, 1)),
            }
        }
        runs
    }

    /// Writes blocks that lie together, the `n`th of the round and those behind it.
    fn write_blocks(
        &self,
        st: &mut State,
        first: u64,
        sealed: &Ciphertext,
        n: usize,
        count: usize,
    ) -> Result<(), StoreError> {
        for (at, count) in sealed.pieces(n, count) {
            let block = first + (at - n) as u64;
            let len = count as u64 * self.geo().block_size();
            self.write_run(st, block, len, |backing, offset| sealed.write(at, count, backing, offset))?;
        }
        Ok(())
    }

    fn write_run(
        &self,
        st: &mut State,
        first: u64,
        written: u64,
        write: impl FnOnce(&dyn BackendFile, u64) -> std::io::Result<()>,
    ) -> Result<(), StoreError> {
        let offset = self.geo().block_offset(first);
        if let Err(source) = write(&*self.backing, offset) {
            self.wrote_perhaps(st, offset, written);
            return Err(StoreError::Io { op: "write", offset, source });
        }
        st.wrote(offset, written);
        let count = written / self.geo().block_size();
        let (from, to) = (self.geo().slot_of(first).0, self.geo().slot_of(first + count - 1).0);
        for g in from..=to {
            if let Some(Entry::Good(held)) = st.pages.get_mut(&g) {
                Arc::make_mut(held).data_mark = st.seq;
            }
        }
        Ok(())
    }

    /// A round failed after pages of it were written, from mark `since` on. What each of its blocks holds now is found out as after a
    /// crash, since a write that failed may have been done in part: otherwise the next round took keys of content that never arrived
    /// for durable (I2). The blocks stay buffered.
    fn undo(&self, st: &mut State, since: u64, round: &Round) {
        st.seq += 1; // the write that failed may have happened
        let blocks = round.data.iter().map(|(b, _)| b).chain(&round.punches);
        let mut pages: BTreeMap<u64, u128> = BTreeMap::new();
        for (g, i) in blocks.map(|b| self.geo().slot_of(*b)) {
            *pages.entry(g).or_default() |= 1 << i;
        }
        for (g, bits) in pages {
            let Some(Entry::Good(held)) = st.pages.get(&g) else { continue };
            if held.write_mark <= since {
                continue;
            }
            let (mut page, mut lost) = (held.page.clone(), held.lost);
            let mut keep = page.pending;
            for i in (0..page.keys.len()).filter(|i| (bits & page.pending) >> i & 1 == 1) {
                match self.resolve_block(g, i, &page, true) {
                    Ok(Some(key)) if key == page.keys[i] => {}
                    Ok(Some(key)) => {
                        page.keys[i] = key;
                        keep &= !(1 << i);
                    }
                    Ok(None) | Err(_) => lost |= 1 << i,
                }
            }
            keep_bits(&mut page, keep);
            lost &= keep;
            if self.write_page(st, g, page.clone(), lost).is_err() {
                // The one on disk names all the candidates; the next commit writes it again.
                let mut held = Held::new(page, lost);
                held.write_mark = st.seq;
                st.pages.insert(g, Entry::Good(Arc::new(held)));
            }
            st.seq += 1;
            let seq = st.seq;
            if let Some(Entry::Good(held)) = st.pages.get_mut(&g) {
                Arc::make_mut(held).data_mark = seq;
            }
        }
        // Pages that may be on disk name keys that are given up: no new data before what says so is durable.
        (st.drop_mark, st.marked, st.unsure) = (st.seq, (0, 0), true);
    }
}

/// Keys slot `i` anew; a replaced block's previous key is kept.
fn set_key(page: &mut Page, i: usize, key: BlockKey, change: Change) {
    let bit = 1u128 << i;
    let old = page.keys[i];
    page.keys[i] = key;
    if page.replaced & bit != 0 {
        // A lost block: what its previous key opened is given up with the block.
        let keep = page.pending & !bit;
        keep_bits(page, keep);
    }
    match change {
        Change::LeaveTail => {}
        Change::Fill => page.pending |= bit,
        Change::Replace => {
            let rank = (page.replaced & (bit - 1)).count_ones() as usize;
            page.pending |= bit;
            page.replaced |= bit;
            page.previous.insert(rank, old);
        }
    }
}
