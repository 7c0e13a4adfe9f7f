//! Changing a file: everything goes into the buffer of dirty blocks first.

use super::block::Block;
use super::form::Numbers;
use super::presealed::Presealed;
use super::primitives::Core;
use super::state::{Dirty, PageState, State};
use super::types::{DamageKind, Durability, StoreError};
use lamassu_format::{BlockNo, ByteOffset, FileId, PageNo};
use std::time::Duration;

/// Bytes of a write that are buffered under one hold of the lock.
pub(super) const PIECE_LEN: usize = 4 << 20;
/// Bytes buffered before a commit that needs no barrier: appends and filled holes.
const APPEND_BUFFER_LEN: usize = 16 << 20;
/// Bytes buffered before a commit that replaces blocks, if a barrier takes time: replacing a whole page takes ⌈N/R⌉
/// rounds of barriers, for few pages or for many.
pub(super) const REPLACE_BUFFER_LEN: usize = 64 << 20;
/// A barrier that takes less than this on average costs almost nothing: a store in memory, or one that does not lose
/// its write cache. Then the commit is made early, while fewer writers wait for it.
const BARRIER_CHEAP: Duration = Duration::from_micros(50);
/// Bytes buffered before a writer commits that leaves this to another thread ([`Committer::Other`]).
const BEHIND_BUFFER_LEN: usize = 2 * REPLACE_BUFFER_LEN;
/// After the store has refused a commit, a growing file takes no more than this many buffered bytes.
const REFUSED_BUFFER_LEN: usize = 4 << 20;

/// Who commits when the buffer is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Committer {
    /// The thread that writes, before it returns.
    Writer,
    /// Another thread, which the caller asks. The writer commits only if that thread is late.
    Other,
}

impl Committer {
    /// Bytes buffered from which on the writer commits, whatever a barrier costs.
    pub fn buffer_len_max(self) -> usize {
        match self {
            Committer::Writer => REPLACE_BUFFER_LEN,
            Committer::Other => BEHIND_BUFFER_LEN,
        }
    }
}

impl Core {
    /// To be called before a change that a caller asks for. Checks that the file's profile may be written.
    pub fn prepare_write(&self, st: &mut State) -> Result<(), StoreError> {
        self.check_writable(st)?;
        self.prepare_change(st)
    }

    /// Whether a caller may write a file of this one's profile.
    pub fn check_writable(&self, st: &State) -> Result<(), StoreError> {
        match self.ctx.read_only {
            true => Err(StoreError::ReadOnly),
            false => self.ctx.check_allowed(st.identity.profile()),
        }
    }

    /// To be called before any change.
    pub fn prepare_change(&self, st: &mut State) -> Result<(), StoreError> {
        if self.ctx.read_only {
            return Err(StoreError::ReadOnly);
        }
        if let Some(from) = st.inherited.lost_from() {
            let page = self.geo().last_page(from);
            return Err(self.damaged(DamageKind::Truncated, page, None));
        }
        if st.shrink.has_open_steps() {
            // I10: an interrupted shrink is completed before anything else is written.
            self.keeping_mtime(st, |core, st| core.redo_cut(st))?;
        }
        self.make_room_in_anchor(st, None)?;
        if st.inherited.is_prepared() {
            return Ok(());
        }
        self.good_page(st, PageNo::ZERO)?;
        // I6: a lost append leaves bytes past the end that the metadata implies, and they would lie under a hole. A bad
        // last page does not tell the end.
        let last_is_bad = matches!(self.page(st, st.last_page(self.geo()))?, PageState::Bad(_));
        let implied = if st.identity.is_unsealed_empty() { 0 } else { self.implied_len(st)? };
        if st.space.len() > implied && !last_is_bad {
            self.keeping_mtime(st, |core, st| core.shorten(st, implied))?;
        }
        st.inherited.note_prepared();
        Ok(())
    }

    /// Writes `data` at `offset` into the buffer; the blocks in `presealed` are sealed already.
    pub fn write_range(
        &self,
        st: &mut State,
        offset: u64,
        data: &[u8],
        presealed: &Presealed,
        committer: Committer,
    ) -> Result<(), StoreError> {
        if data.is_empty() {
            return Ok(());
        }
        self.prepare_write(st)?;
        let end = offset.checked_add(data.len() as u64).ok_or(StoreError::TooLarge)?;
        self.check_size(st, end)?;
        let buffered = self.buffered_len(st);
        let (grows, is_full) =
            (end > st.sizes.logical() && buffered >= REFUSED_BUFFER_LEN, buffered >= committer.buffer_len_max());
        if let Some(errno) = st.buffer.recent_refusal().filter(|_| grows || is_full) {
            return Err(StoreError::io("write", offset)(std::io::Error::from_raw_os_error(errno)));
        }
        if is_full {
            self.commit(st)?; // a commit failed before, or many threads write: the buffer goes to the store first
        }
        if offset > st.sizes.logical() {
            self.grow(st, offset)?;
        }
        let size = self.geo().block_size();
        let presealed = match presealed.is_for(&self.ctx, &st.identity) {
            true => presealed,
            false => {
                *self.id_hint.lock() = FileId::NONE;
                &Presealed::default()
            }
        };
        let mut at = offset;
        while at < end {
            let (block, from) = (self.geo().block_at(at), (at % size) as usize);
            let n = ((end - at).min(size - from as u64)) as usize;
            match presealed.block(block, size as usize) {
                Some(sealed) => {
                    let replaces = self.is_stored(st, block)?;
                    st.buffer.put(block, Dirty::Sealed(sealed), replaces);
                }
                None => self.patch_block(st, block, from, &data[(at - offset) as usize..][..n])?,
            }
            at += n as u64;
            st.sizes.extend_to(at);
        }
        self.note_change();
        let is_due = match committer {
            Committer::Writer => self.is_full(st),
            Committer::Other => self.buffered_len(st) >= BEHIND_BUFFER_LEN && st.buffer.recent_refusal().is_none(),
        };
        if !is_due {
            return Ok(());
        }
        match self.open_to_others(st, Core::commit) {
            // This write is in the buffer and stays there: if an append failed and still happened, the application
            // would repeat it. The next write is refused, and flush and sync try again and report the error.
            Err(StoreError::Io { .. } | StoreError::NotEvaluated(_)) if st.buffer.is_refused() => Ok(()),
            other => other,
        }
    }

    /// Whether a file of `size` can be stored. Data that no commit could write must not be buffered: it would block the
    /// rest of the buffer.
    pub fn check_size(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        let geo = self.geo();
        if size > geo.size_max() {
            return Err(StoreError::TooLarge);
        }
        let last = BlockNo(geo.end_block(size).0.saturating_sub(1));
        let len = (geo.block_offset(last) + geo.block_size()).0;
        if st.space.can_hold(len) {
            return Ok(());
        }
        // Twice as much is asked for, so that a growing file does not ask with every write.
        let ample = len.saturating_mul(2).min(i64::MAX as u64);
        let possible = match self.backing.check_len(ample) {
            Ok(()) => ample,
            Err(_) => match self.backing.check_len(len) {
                Err(e) if e.raw_os_error() == Some(libc::EFBIG) => return Err(StoreError::TooLarge),
                other => other.map(|()| len).map_err(StoreError::io("seek", len))?,
            },
        };
        st.space.note_possible(possible);
        Ok(())
    }

    /// Whether a block has content in the store that a buffered change replaces. Fails under a damaged page, where a
    /// change could never be committed.
    fn is_stored(&self, st: &mut State, block: BlockNo) -> Result<bool, StoreError> {
        let (g, i) = self.geo().slot_of(block);
        Ok(self.good_page(st, g)?.is_some_and(|held| held.is_keyed(i)))
    }

    fn patch_block(&self, st: &mut State, block: BlockNo, from: usize, piece: &[u8]) -> Result<(), StoreError> {
        if piece.len() < self.ctx.block_len() {
            self.unseal(st, block)?;
        }
        if let Some(bytes) = st.buffer.data_mut(block) {
            bytes[from..from + piece.len()].copy_from_slice(piece);
            return Ok(());
        }
        let replaces = self.is_stored(st, block)?;
        let start = self.geo().block_start(block);
        let covers =
            from == 0 && (piece.len() == self.ctx.block_len() || start + piece.len() as u64 >= st.sizes.logical());
        let bytes = match (covers, piece.len() == self.ctx.block_len()) {
            (true, true) => Block::of(piece),
            (covers, _) => {
                let mut bytes = match covers {
                    true => Block::zeroed(self.ctx.block_len()),
                    false => self.load_block(st, block)?,
                };
                bytes[from..from + piece.len()].copy_from_slice(piece);
                bytes
            }
        };
        st.buffer.put(block, Dirty::Data(bytes), replaces);
        Ok(())
    }

    /// Makes plaintext of a buffered block that was sealed ahead, so that it can be changed.
    pub fn unseal(&self, st: &mut State, block: BlockNo) -> Result<(), StoreError> {
        let Some(Dirty::Sealed(sealed)) = st.buffer.get(block) else { return Ok(()) };
        let len = self.ctx.block_len();
        let mut bytes = Block::of(sealed.bytes(len));
        let (forms, keys) = (self.forms(&st.identity), std::slice::from_ref(sealed.key()));
        if !self.open_blocks(forms, &mut bytes, keys, Numbers::From(block)).is_empty() {
            return Err(self.damaged(DamageKind::BlockHash, self.geo().page_of(block), Some(block)));
        }
        st.buffer.put(block, Dirty::Data(bytes), false);
        Ok(())
    }

    /// Bytes that the buffered blocks take.
    pub fn buffered_len(&self, st: &State) -> usize {
        st.buffer.bytes(self.ctx.block_len())
    }

    /// Whether so much is buffered that it is to be committed.
    pub fn is_full(&self, st: &State) -> bool {
        let buffered = self.buffered_len(st);
        if buffered < APPEND_BUFFER_LEN || st.buffer.recent_refusal().is_some() {
            return false;
        }
        // A file that has seen no barrier yet finds out by its first commit, made early. Relaxed commits have no
        // barrier.
        let is_cheap = self.ctx.durability == Durability::Relaxed || st.marks.is_barrier_below(BARRIER_CHEAP);
        buffered >= if st.buffer.replaces() && !is_cheap { REPLACE_BUFFER_LEN } else { APPEND_BUFFER_LEN }
    }

    fn commit_if_full(&self, st: &mut State) -> Result<(), StoreError> {
        if self.is_full(st) { self.commit(st) } else { Ok(()) }
    }

    /// Makes the file longer; the new range reads as zeros. The bytes past the old end in the last block are made zero.
    pub fn grow(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        self.check_size(st, size)?;
        self.good_page(st, st.last_page(self.geo()))?;
        let before = st.sizes.logical();
        if !before.is_multiple_of(self.geo().block_size()) {
            let block = self.geo().block_at(before);
            if !st.buffer.contains(block) {
                let bytes = self.load_block(st, block)?;
                st.buffer.put(block, Dirty::Data(bytes), false);
            }
        }
        st.sizes.set_logical(size);
        st.identity.want_page();
        Ok(())
    }

    /// Makes `offset..offset + len` read as zeros, freeing whole blocks. Never changes the size.
    pub fn punch_range(&self, st: &mut State, offset: u64, len: u64) -> Result<(), StoreError> {
        self.prepare_write(st)?;
        st.buffer.forget_refusal();
        let end = offset.saturating_add(len).min(st.sizes.logical());
        if offset >= end {
            return Ok(());
        }
        let geo = *self.geo();
        // The partial block at the end of the file is zeroed, not freed: it may live in its page's tail.
        let (first, last) = (geo.end_block(offset), geo.block_at(end));
        if first > last {
            self.zero_within(st, offset, end)?;
        } else {
            self.zero_within(st, offset, geo.block_start(first))?;
            self.punch_blocks(st, first, last)?;
            self.zero_within(st, geo.block_start(last), end)?;
        }
        self.note_change();
        self.commit_if_full(st)
    }

    fn zero_within(&self, st: &mut State, from: u64, to: u64) -> Result<(), StoreError> {
        if from >= to {
            return Ok(());
        }
        let size = self.geo().block_size();
        let zeros = vec![0u8; (to - from) as usize];
        self.patch_block(st, self.geo().block_at(from), (from % size) as usize, &zeros)
    }

    /// Makes blocks `first..end` holes, going from one present page to the next.
    fn punch_blocks(&self, st: &mut State, first: BlockNo, end: BlockNo) -> Result<(), StoreError> {
        let buffered: Vec<BlockNo> = st.buffer.range(first..end).map(|(b, _)| b).collect();
        for block in buffered {
            st.buffer.put(block, Dirty::Hole, false);
        }
        let mut block = first;
        while block < end {
            let Some(g) = self.next_page(st, self.geo().page_of(block))? else { break };
            let from = self.geo().first_block(g).max(block);
            let to = (self.geo().first_block(g) + self.geo().blocks_per_page()).min(end);
            if from >= end {
                break;
            }
            if let Some(held) = self.good_page(st, g)? {
                let page_first = self.geo().first_block(g);
                let keyed = |b: &BlockNo| held.is_keyed((*b - page_first) as usize);
                // A crash may have left a tail in a page that is not the last.
                let tail = (!held.page().tail.is_empty()).then(|| page_first + held.page().keys.len() as u64);
                let holes: Vec<BlockNo> = from.until(to).filter(|b| keyed(b) || tail == Some(*b)).collect();
                for b in holes {
                    st.buffer.put(b, Dirty::Hole, true);
                }
            }
            block = to;
            self.commit_if_full(st)?;
        }
        Ok(())
    }

    /// The page after the damaged page `g`, or after the run of missing pages that begins with it: a store can make a
    /// hole of any length without using space.
    pub fn end_of_bad(&self, st: &mut State, g: PageNo) -> Result<PageNo, StoreError> {
        let geo = *self.geo();
        if !matches!(self.page(st, g)?, PageState::Bad(DamageKind::PageMissing)) || g == PageNo::ZERO {
            return Ok(g.next());
        }
        let offset = geo.page_offset(g);
        let data = self.backing.seek_data(offset.0).map_err(StoreError::io("seek data", offset))?;
        // No page from the floor on is missed, unless the size is unknown.
        let (size, floor) = (st.sizes.stored(), st.sizes.floor());
        let limit = if st.inherited.unknown_from().is_some() { size } else { floor.min(size) };
        let missed = limit.div_ceil(geo.page_span());
        let present = data.map_or(missed, |data| geo.first_page_at(ByteOffset(data)).0);
        Ok(PageNo(present.min(missed)).max(g.next()))
    }

    /// The first page at or after `g`, within the size on disk, that is not known to be absent.
    pub fn next_page(&self, st: &mut State, mut g: PageNo) -> Result<Option<PageNo>, StoreError> {
        loop {
            g = match self.look_for_page(st, g)? {
                Look::Here => return Ok(Some(g)),
                Look::NotBefore(next) => next,
                Look::NoFurther => return Ok(None),
            };
        }
    }

    /// One step of that search, which loads one page at most.
    pub fn look_for_page(&self, st: &mut State, g: PageNo) -> Result<Look, StoreError> {
        let geo = *self.geo();
        if g > st.last_page(&geo) {
            return Ok(Look::NoFurther);
        }
        if let Some(fresh) = &self.fresh {
            // The tree, not the store, tells which pages exist.
            return match fresh.next_page(&*self.backing, g)? {
                Some(next) if next == g => self.page(st, g).map(|_| Look::Here),
                Some(next) => Ok(Look::NotBefore(next)),
                None => Ok(Look::NoFurther),
            };
        }
        if !matches!(self.page(st, g)?, PageState::Absent) {
            return Ok(Look::Here);
        }
        // A hole of many segments is skipped in one step, but only as far as absent pages are holes.
        let unknown = st.inherited.unknown_from().map(|from| PageNo(from / geo.page_span())).filter(|first| g < *first);
        let offset = geo.page_offset(g);
        let data = self.backing.seek_data(offset.0).map_err(StoreError::io("seek data", offset))?;
        let present = data.map(|data| geo.first_page_at(ByteOffset(data)));
        Ok(match (present, unknown) {
            (None, None) => Look::NoFurther,
            (Some(next), None) | (None, Some(next)) => Look::NotBefore(next.max(g.next())),
            (Some(present), Some(unknown)) => Look::NotBefore(present.min(unknown).max(g.next())),
        })
    }
}

/// Where a page is, seen from another one.
pub(super) enum Look {
    /// That one is there, or may be.
    Here,
    /// It is absent, and so are all before this one.
    NotBefore(PageNo),
    /// There is none from it on.
    NoFurther,
}
