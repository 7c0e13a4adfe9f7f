//! One round of a commit (`docs/format.md` §13): pages with new and previous keys, barrier, data. The pages are written
//! again without pending bits when a barrier has covered the data ([`super::settle`]).
//!
//! The steps of [`Core::run`], in order:
//!
//! | step | what it does | keeps |
//! |---|---|---|
//! | 1 | barrier, if the round writes where space was given up | I8 |
//! | 2 | blocks are sealed; nothing is written | |
//! | 3 | bytes that leave a tail are written to their block, and made durable | I7 |
//! | 4 | holes that are filled are made zero below the end of the backing file, durably | I6 |
//! | 5 | the store reserves the places of compressed blocks that are replaced | I13 |
//! | 6 | a page 0 of this session is made durable, before pages past the last one | I4 |
//! | 7 | pages are written: new keys, `pending`, previous keys | I1, I2, I12, I13 |
//! | 8 | barrier, if anything is replaced or punched, or if earlier failures left a doubt | I1, I8, I11 |
//! | 9 | data is written and holes are punched | I13 |
//! | on failure | the content of each block is resolved as after a crash | I2, I11 |

use super::ciphertext::{Ciphertext, Stretch};
use super::plan::{Change, Goal, Round};
use super::primitives::{Core, PageId};
use super::recover::keep_bits;
use super::state::{Held, Mark, PageState, SizeFields, State, has_room};
use super::types::StoreError;
use lamassu_crypto::compress::stored_len;
use lamassu_format::{BlockNo, ByteOffset, Keys, PAGE_LEN, Page, PageNo, SlotKey};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

impl Core {
    /// Writes one round: its pages, then its data.
    pub fn run(&self, st: &mut State, mut round: Round, goal: &mut Goal) -> Result<(), StoreError> {
        // Step 1, I8: the release of space is durable before anything is written there.
        if st.marks.holds_data_back() && self.touches_given_up(st, &round) {
            self.barrier(st)?;
        }
        let sealed = self.seal(st, &round)?; // step 2
        let left = self.leave_tails(st, &mut round, &sealed)?; // step 3
        self.clear_holes(st, &round, &left)?; // step 4
        self.reserve_places(st, &round)?; // step 5
        self.id_before_pages(st, &round)?; // step 6
        self.key_pages(&mut round, &sealed.keys);
        let since = st.marks.written();
        // Steps 7 to 9.
        let done = self.write_pages(st, &mut round, goal).and_then(|()| self.write_content(st, &round, &sealed, &left));
        if let Err(error) = done {
            self.undo(st, since, &round);
            return Err(error);
        }
        sealed.give_back();
        let done = round.data.iter().map(|(b, _)| b).chain(&round.punches).chain(&round.absorbed);
        for block in done {
            st.buffer.take(*block);
        }
        Ok(())
    }

    /// Whether a round writes data, or anything past the end of the backing file.
    fn touches_given_up(&self, st: &State, round: &Round) -> bool {
        let page_end = |g: &PageNo| self.geo().page_offset(*g) + PAGE_LEN as u64;
        !round.data.is_empty() || !round.punches.is_empty() || round.pages.keys().any(|g| page_end(g) > st.space.end())
    }

    /// Step 3, I7: bytes that leave the tail are durable in their block before the page without them is written. A tail
    /// that was never durable needs the order only, and its block stays pending. Returns the blocks written.
    ///
    /// I11: an earlier write of that page may have failed and be done all the same. Then the page on disk has no tail,
    /// and its key is that of what the block holds now. So the page with the tail is made durable again first.
    fn leave_tails(
        &self,
        st: &mut State,
        round: &mut Round,
        sealed: &Ciphertext,
    ) -> Result<BTreeSet<BlockNo>, StoreError> {
        self.put_tails_back(st, round)?;
        let never_durable = st.identity.is_never_durable(&st.marks);
        let (mut written, mut must_last) = (BTreeSet::new(), false);
        for (n, (block, change)) in round.data.iter_mut().enumerate() {
            if *change == Change::LeaveTail {
                for (first, stretch) in sealed.stretches(*block, (n, 1), |_| false) {
                    self.write_stretches(st, first, sealed, stretch)?;
                }
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

    /// Makes pages whose last write failed durable as they were before, with the tails that are about to leave them.
    fn put_tails_back(&self, st: &mut State, round: &Round) -> Result<(), StoreError> {
        let leaving = round.data.iter().filter(|(_, change)| *change == Change::LeaveTail);
        let pages: BTreeSet<PageNo> = leaving.map(|(block, _)| self.geo().page_of(*block)).collect();
        let pages: Vec<PageNo> = pages.intersection(st.failures.uncertain_pages()).copied().collect();
        for g in &pages {
            self.settle_page(st, *g)?;
        }
        if pages.is_empty() { Ok(()) } else { self.barrier(st) }
    }

    /// Step 4, I6: if a hole is filled below the end of the backing file, the bytes there are made zero, durably,
    /// before the page with the new key is written. Otherwise recovery could not tell a hole from a block whose data
    /// never arrived.
    fn clear_holes(&self, st: &mut State, round: &Round, left: &BTreeSet<BlockNo>) -> Result<(), StoreError> {
        let mut punched = false;
        for (_, first, count) in self.runs(round, |b, change| change == Change::Fill && !left.contains(&b)) {
            let from = self.geo().block_offset(first);
            let end = from + count as u64 * self.geo().block_size();
            let until = end.min(st.space.end());
            if st.failures.any_barrier_lost() {
                // A range that reads as zeros may have other bytes on disk after a failed barrier.
                self.write_zeros(st, from, end)?;
                punched = true;
            } else if from < until && !self.is_zero(st, from, until)? {
                self.punch(st, from, until - from)?;
                punched = true;
            }
        }
        if punched { self.barrier(st) } else { Ok(()) }
    }

    fn is_zero(&self, st: &mut State, from: ByteOffset, until: ByteOffset) -> Result<bool, StoreError> {
        if st.space.has_zeros(from, until) {
            return Ok(true);
        }
        let mut at = from;
        let mut bytes = vec![0u8; self.ctx.block_len()];
        while at < until {
            let found = self.backing.seek_data(at.0).map_err(StoreError::io("seek data", at))?;
            match found.map(ByteOffset) {
                Some(data) if data < until => at = data,
                data => {
                    // Searching is slow on some stores; the rest of this hole is about to be filled.
                    st.space.note_zeros(at..data.unwrap_or(st.space.end()));
                    return Ok(true);
                }
            }
            let n = (until - at).min(bytes.len() as u64) as usize;
            self.read_padded(at, &mut bytes[..n])?;
            if bytes[..n].iter().any(|&b| b != 0) {
                return Ok(false);
            }
            at = at + n as u64;
        }
        Ok(true)
    }

    fn punch_block(&self, st: &mut State, block: BlockNo) -> Result<(), StoreError> {
        let offset = self.geo().block_offset(block);
        st.slack.forget(offset..offset + self.geo().block_size());
        let len = self.geo().block_size().min(st.space.len().saturating_sub(offset.0));
        if len > 0 {
            self.punch(st, offset, len)?;
        }
        st.pages.note_data(self.geo().page_of(block), st.marks.written());
        Ok(())
    }

    /// Step 5, I13: the store may keep only a part of the place of a compressed block. A write of the whole block that
    /// finds no space would destroy the replaced content. So the space is allocated before any page says that the block
    /// is replaced.
    fn reserve_places(&self, st: &mut State, round: &Round) -> Result<(), StoreError> {
        let suite = self.ctx.ring.suite();
        let is_short = |block: BlockNo| {
            let (g, i) = self.geo().slot_of(block);
            let page = &round.pages.get(&g).expect("data lies under a planned page").page;
            let of = |key: Option<SlotKey>| key.is_some_and(|key| key.is_compressed(suite));
            of(page.keys.get(i)) || of(page.previous_key(i))
        };
        if self.ctx.block_len() <= PAGE_LEN {
            return Ok(());
        }
        for (_, first, count) in self.runs(round, |block, change| change == Change::Replace && is_short(block)) {
            let (from, len) = (self.geo().block_offset(first), count as u64 * self.geo().block_size());
            st.slack.forget(from..from + len); // must not be punched before they are written
            match self.reserve(st, first, count) {
                // Earlier compressed blocks have zeros that need not be kept: a barrier lets them be freed.
                Err(error) if error.is_out_of_space() && !st.slack.is_empty() => {
                    self.sync_data(st)?;
                    self.reserve(st, first, count)?;
                }
                done => done?,
            }
        }
        Ok(())
    }

    /// Reserves the places of some blocks. If the store cannot allocate, writes the zeros behind each ciphertext.
    fn reserve(&self, st: &mut State, first: BlockNo, count: usize) -> Result<(), StoreError> {
        let (from, len) = (self.geo().block_offset(first), self.ctx.block_len());
        match self.backing.allocate(from.0, (count * len) as u64) {
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            done => return done.map_err(StoreError::io("allocate", from)),
        }
        let mut bytes = vec![0; len];
        for block in (0..count).map(|at| first + at as u64) {
            let offset = self.geo().block_offset(block);
            // A block that cannot be read is about to be replaced.
            if self.read_padded(offset, &mut bytes).is_err() {
                continue;
            }
            let stored = stored_len(&bytes).next_multiple_of(PAGE_LEN);
            if stored < len {
                self.write_zeros(st, offset + stored as u64, offset + len as u64)?;
            }
        }
        Ok(())
    }

    /// Step 6, I4: before a page past the last one is written, a page 0 of this session is durable, with the file's id
    /// and without `cut`. The size that it has for a file of one page is durable then, too, and becomes the floor (I5).
    fn id_before_pages(&self, st: &mut State, round: &Round) -> Result<(), StoreError> {
        let old_last = st.last_page(self.geo());
        if round.pages.keys().all(|g| *g <= old_last) {
            return Ok(());
        }
        let session = self.ctx.sessions.stamp().map_err(StoreError::io("begin a session", 0u64))?.session();
        if !st.identity.is_page_zero_of(session, &st.marks) {
            let held = self.page_as_covered(st, PageNo::ZERO)?;
            let (mut page, lost) = held.unwrap_or((self.new_page(st), 0));
            page.cut = false;
            self.write_page(st, PageNo::ZERO, page, lost, st.sizes.fields(), PageId::OfFile)?;
            self.barrier(st)?;
        }
        if old_last == PageNo::ZERO {
            st.sizes.set_floor(st.sizes.stored());
        }
        Ok(())
    }

    /// Puts the new keys into the planned pages. Each new key is `pending`, and a replaced block's previous key, which
    /// the plan knows to be durable, is kept as well (I1, I2). A data block that keeps its key is written again as it
    /// was. That repairs a block that the store had damaged, and changes nothing in its page.
    fn key_pages(&self, round: &mut Round, keys: &Keys) {
        for (n, (block, change)) in round.data.iter().enumerate() {
            let (g, i) = self.geo().slot_of(*block);
            let planned = round.pages.get_mut(&g).expect("data lies under a planned page");
            let is_lost = planned.page.pending >> i & 1 == 1;
            if *change != Change::Replace || is_lost || !planned.page.keys.is_same(i, keys, n) {
                note_change(&mut planned.page, i, *change);
                planned.page.keys.copy_from(i, keys, n);
                planned.must_write = true;
            }
        }
        for block in &round.punches {
            let (g, i) = self.geo().slot_of(*block);
            let planned = round.pages.get_mut(&g).expect("punches lie under a planned page");
            let is_lost = planned.page.pending >> i & 1 == 1;
            note_change(&mut planned.page, i, if is_lost { Change::Fill } else { Change::Replace });
            planned.page.keys.set(i, &SlotKey::HOLE);
            planned.must_write = true;
        }
    }

    /// Step 7. The pages name new data as `pending` before that data is written, so a crash leaves candidates for each
    /// block (I1). Each is one aligned write, under an open session (I12, I13).
    ///
    /// If the file gets new pages, the last one is written first, so that only one write is past the end of the backing
    /// file. With each such jump XFS allocates what it had reserved behind the last one, apart from the data that comes
    /// there (4000 extents a GiB instead of a dozen).
    fn write_pages(&self, st: &mut State, round: &mut Round, goal: &mut Goal) -> Result<(), StoreError> {
        let geo = *self.geo();
        let (size, old) = (goal.size, st.sizes.stored());
        let mut reached = old;
        let last = geo.last_page(size);
        let new_pages = last > geo.last_page(old);
        let (below, at_end) = (round.pages.range(..last), round.pages.range(last..));
        let order = if new_pages { at_end.chain(below) } else { below.chain(at_end) };
        let written: Vec<PageNo> = round.pages.iter().filter(|(_, p)| p.must_write).map(|(g, _)| *g).collect();
        if last > PageNo::ZERO {
            self.open_pages(st, written, None)?;
        }
        for (g, planned) in order.filter(|(_, p)| p.must_write) {
            let fields = SizeFields { size, ..st.sizes.fields() };
            if let Err(error) = self.write_page(st, *g, planned.page.clone(), planned.lost, fields, PageId::AsFits) {
                st.sizes.set_stored(reached);
                let old_last = geo.last_page(old);
                if goal.unwritten.contains(&old_last) {
                    st.failures.note_page(old_last); // it must not stay short while other pages follow
                }
                if new_pages && reached > old {
                    // Pages before the last may be absent. They are holes, not damage, if the last one becomes durable.
                    st.sizes.note_sparse();
                }
                return Err(error);
            }
            goal.unwritten.remove(g);
            if *g >= geo.last_page(old) && (*g > PageNo::ZERO || last == PageNo::ZERO) {
                reached = reached.max(size.min(geo.page_start(g.next())));
            }
        }
        st.sizes.set_stored(size);
        Ok(())
    }

    /// Steps 8 and 9: the barrier between pages and data, if one is needed, and the data. Each page notes the mark of
    /// the data under it, so that its pending bits stay until a barrier covers that data (I3).
    fn write_content(
        &self,
        st: &mut State,
        round: &Round,
        sealed: &Ciphertext,
        left: &BTreeSet<BlockNo>,
    ) -> Result<(), StoreError> {
        // I1: the page that has both keys is durable before old content is overwritten or punched. Otherwise a crash
        // could leave new content under a page that knows only the old key.
        let replaces = round.pages.values().any(|p| p.page.replaced & !p.lost != 0) || !round.punches.is_empty();
        // I8: one of the pages just written may have given up space that this data takes.
        // I11: after a round that failed, pages on disk may name other keys than those in memory.
        let must_wait = st.marks.holds_data_back() || st.failures.round_failed();
        if replaces || (must_wait && !round.data.is_empty()) {
            self.barrier(st)?;
        }
        let mut stretches = Vec::new();
        for (n, first, count) in self.runs(round, |b, _| !left.contains(&b)) {
            // I6: a hole that is filled has zeros.
            stretches.extend(sealed.stretches(first, (n, count), |n| round.data[n].1 == Change::Fill));
        }
        // With each write that makes the file longer XFS allocates 64 KiB behind it, also the zeros that are not
        // written. So the end of the file is written first.
        let has_gaps = stretches.iter().any(|(_, stretch)| stretch.has_zeros_left_out(sealed));
        if has_gaps && stretches.last().is_some_and(|(first, _)| self.geo().block_offset(*first) >= st.space.end()) {
            stretches.rotate_right(1);
        }
        for (first, stretch) in stretches {
            self.write_stretches(st, first, sealed, stretch)?;
        }
        round.punches.iter().try_for_each(|block| self.punch_block(st, *block))
    }

    /// Groups the chosen data blocks into runs that lie together: (index of the first in the round, first block,
    /// count).
    fn runs(&self, round: &Round, choose: impl Fn(BlockNo, Change) -> bool) -> Vec<(usize, BlockNo, usize)> {
        let mut runs: Vec<(usize, BlockNo, usize)> = Vec::new();
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

    /// Writes blocks that lie together. In a nearly full store that copies on write (btrfs) it writes them one by one,
    /// and refuses to begin one that may find no space in its middle: afterwards the block would hold neither the old
    /// content nor the new, and the old one could not be put back either.
    fn write_stretches(
        &self,
        st: &mut State,
        first: BlockNo,
        sealed: &Ciphertext,
        stretch: Stretch,
    ) -> Result<(), StoreError> {
        let size = self.ctx.block_len();
        // A page is written whole or not at all.
        if size <= PAGE_LEN || !st.fullness.is_nearly_full(&*self.backing) {
            return self.write_stretch(st, first, sealed, stretch);
        }
        for at in 0..stretch.count {
            let block = first + at as u64;
            let one = Stretch { n: stretch.n + at, count: 1, bytes: size.min(stretch.bytes - at * size) };
            if !has_room(&*self.backing, size) {
                let source = std::io::Error::from_raw_os_error(libc::ENOSPC);
                return Err(StoreError::Io { op: "write", offset: self.geo().block_offset(block).0, source });
            }
            self.write_stretch(st, block, sealed, one)?;
        }
        Ok(())
    }

    /// Writes blocks that lie together, by one write. Zeros behind ciphertext that are written are noted, to be punched
    /// when that is safe.
    fn write_stretch(
        &self,
        st: &mut State,
        first: BlockNo,
        sealed: &Ciphertext,
        stretch: Stretch,
    ) -> Result<(), StoreError> {
        let (offset, size) = (self.geo().block_offset(first), self.geo().block_size());
        let end = offset + stretch.count as u64 * size;
        st.slack.forget(offset..end);
        if let Err(source) = sealed.write(stretch, &*self.backing, offset) {
            self.note_failed_write(st, offset, stretch.bytes as u64);
            return Err(StoreError::Io { op: "write", offset: offset.0, source });
        }
        st.note_block_write(offset, stretch.bytes as u64);
        self.note_zeros(st, offset, sealed, stretch);
        let (from, to) = (self.geo().page_of(first), self.geo().page_of(first + (stretch.count as u64 - 1)));
        for g in from.until(to.next()) {
            st.pages.note_data(g, st.marks.written());
        }
        Ok(())
    }

    /// Notes the zeros behind ciphertext that a write has left in the store.
    fn note_zeros(&self, st: &mut State, offset: ByteOffset, sealed: &Ciphertext, stretch: Stretch) {
        let size = self.geo().block_size();
        let behind = |at: usize, zeros: usize| {
            let end = offset + (at as u64 + 1) * size;
            ByteOffset(end.0 - zeros as u64)..end
        };
        let mut is_shared = false;
        for at in 0..stretch.count {
            let written = behind(at, sealed.zeros_behind(stretch.n + at));
            if !written.is_empty() && written.end <= offset + stretch.bytes as u64 {
                st.slack.note(written, st.marks.written());
            }
            if !is_shared {
                let copied = behind(at, sealed.zeros_not_copied(stretch.n + at));
                // A store that shares one block of a copy shares them all.
                is_shared = !copied.is_empty() && !self.note_if_kept(st, copied);
            }
        }
    }

    /// Notes a range that reads as zeros, unless the store keeps nothing there. Returns whether it keeps something.
    pub fn note_if_kept(&self, st: &mut State, zeros: Range<ByteOffset>) -> bool {
        let is_kept = matches!(self.backing.seek_hole(zeros.start.0), Ok(Some(hole)) if hole > zeros.start.0);
        // The range is read: a store may take data that was just written for a hole (as ZFS did, openzfs#15526).
        let mut bytes = vec![0; if is_kept { (zeros.end - zeros.start) as usize } else { 0 }];
        let is_zero = self.backing.read_at(zeros.start.0, &mut bytes).is_ok() && bytes.iter().all(|byte| *byte == 0);
        if is_kept && is_zero {
            st.slack.note(zeros, st.marks.written());
        }
        is_kept
    }

    /// A round failed after pages of it were written, from mark `since` on. I11: the content of each of its blocks is
    /// resolved as after a crash, since a failed write may have been done in part. Otherwise the next round would take
    /// keys of content that never arrived for keys of durable content (I2). The blocks stay buffered.
    fn undo(&self, st: &mut State, since: Mark, round: &Round) {
        st.marks.advance(); // the write that failed may have happened
        let blocks = round.data.iter().map(|(b, _)| b).chain(&round.punches);
        let mut pages: BTreeMap<PageNo, u128> = BTreeMap::new();
        for (g, i) in blocks.map(|b| self.geo().slot_of(*b)) {
            *pages.entry(g).or_default() |= 1 << i;
        }
        for (g, bits) in pages {
            let Some(held) = st.pages.good(g).filter(|held| held.write_mark() > since) else { continue };
            let (page, lost) = self.page_after_failure(g, held, bits);
            if self.write_page(st, g, page.clone(), lost, st.sizes.fields(), PageId::AsFits).is_err() {
                // The page on disk names all the candidates; the next commit writes it again.
                let now = st.marks.written();
                st.pages.put(g, PageState::Good(Arc::new(Held::written(page, lost, now, now))));
            }
            st.marks.advance();
            st.pages.note_data(g, st.marks.written());
        }
        // I8: pages that may be on disk name keys that are given up. No new data may be written before the new pages
        // are durable.
        st.marks.give_up_space();
        st.failures.note_round();
    }

    /// The page after data writes to the slots in `bits` failed, and which blocks are lost.
    fn page_after_failure(&self, g: PageNo, held: &Held, bits: u128) -> (Page, u128) {
        let (mut page, mut lost) = (held.page().clone(), held.lost());
        let mut keep = page.pending;
        for i in (0..page.keys.len()).filter(|i| (bits & page.pending) >> i & 1 == 1) {
            match self.resolve_block(g, i, &page, true) {
                Ok(Some(found)) if found.is_new => {}
                Ok(Some(found)) => {
                    page.keys.set(i, &found.key);
                    keep &= !(1 << i);
                }
                Ok(None) | Err(_) => lost |= 1 << i,
            }
        }
        keep_bits(&mut page, keep);
        (page, lost & keep)
    }
}

/// Marks slot `i`, which is about to get a new key: it is pending, and the key of a replaced block is kept.
fn note_change(page: &mut Page, i: usize, change: Change) {
    let bit = 1u128 << i;
    match change {
        Change::LeaveTail => {}
        Change::Fill => page.pending |= bit,
        Change::Replace if page.replaced & bit != 0 => page.pending |= bit, // it was lost
        Change::Replace => {
            let rank = (page.replaced & (bit - 1)).count_ones() as usize;
            page.pending |= bit;
            page.replaced |= bit;
            page.previous.insert_from(rank, &page.keys, i);
        }
    }
}
