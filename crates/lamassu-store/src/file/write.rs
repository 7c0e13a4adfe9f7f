//! Changing a file: everything goes into the buffer of dirty blocks first.

use super::block::Block;
use super::chunk::Ahead;
use super::open::HOLE;
use super::state::{Core, Dirty, Entry, State};
use super::types::{DamageKind, Durability, StoreError};
use lamassu_crypto::{Keyed, Verify};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Bytes of a write that are buffered under one hold of the lock.
pub(super) const PIECE_LEN: usize = 4 << 20;
/// Bytes buffered before a commit that needs no barrier: appends and filled holes.
const APPEND_BUFFER_LEN: usize = 16 << 20;
/// Bytes buffered before a commit that replaces blocks, where a barrier costs something: replacing a whole page takes ⌈N/R⌉ rounds of barriers, for few pages or for many.
pub(super) const REPLACE_BUFFER_LEN: usize = 64 << 20;
/// What costs less than this in the mean is next to nothing: a store in memory, or one that does not lose its write cache. There the commit is made early, while fewer wait for it.
const BARRIER_CHEAP: Duration = Duration::from_micros(50);
/// Bytes from which on a file that grows is refused more, once the store has refused a commit.
const REFUSED_BUFFER_LEN: usize = 4 << 20;
/// How long after the store refused a commit a large buffer grows no more, before all of it is sealed and tried again.
const REFUSAL: Duration = Duration::from_secs(1);

/// That the store refused a commit. Kept until one succeeds, or the file gives space back.
pub(super) struct Refused {
    at: Instant,
    errno: i32,
}

impl Core {
    /// To be called before any change.
    pub fn prepare_write(&self, st: &mut State) -> Result<(), StoreError> {
        if self.ctx.read_only {
            return Err(StoreError::ReadOnly);
        }
        if let Some(from) = st.lost_from {
            let page = self.geo().last_page(from);
            return Err(self.damaged(DamageKind::Truncated, page, None));
        }
        if st.cut_open {
            self.keeping_mtime(st, |core, st| core.redo_cut(st))?;
        }
        if st.prepared {
            return Ok(());
        }
        self.good_page(st, 0)?;
        // A lost append leaves bytes past the end of what the metadata tells; unless a bad last page tells nothing.
        let last_is_bad = matches!(self.page(st, self.geo().last_page(st.disk_size))?, Entry::Bad(_));
        let implied = if st.unsealed_empty { 0 } else { self.implied_len(st)? };
        if st.len > implied && !last_is_bad {
            self.keeping_mtime(st, |core, st| core.shorten(st, implied))?;
        }
        st.prepared = true;
        Ok(())
    }

    /// Writes `data` at `offset` into the buffer; the blocks in `ahead` are sealed already.
    pub fn write_range(&self, st: &mut State, offset: u64, data: &[u8], ahead: &Ahead) -> Result<(), StoreError> {
        if data.is_empty() {
            return Ok(());
        }
        self.prepare_write(st)?;
        let end = offset.checked_add(data.len() as u64).ok_or(StoreError::TooLarge)?;
        self.check_size(st, end)?;
        let buffered = self.buffered_len(st);
        let (grows, is_full) = (end > st.size && buffered >= REFUSED_BUFFER_LEN, buffered >= REPLACE_BUFFER_LEN);
        if let Some(errno) = refusal(st).filter(|_| grows || is_full) {
            return Err(StoreError::io("write", offset)(std::io::Error::from_raw_os_error(errno)));
        }
        if is_full {
            self.commit(st)?; // it failed before, or many write at once: nothing more is buffered until the store takes what is
        }
        if offset > st.size {
            self.grow(st, offset)?;
        }
        let size = self.geo().block_size();
        let ahead = match ahead.is_for(&self.ctx, st.file_id) {
            true => ahead,
            false => {
                *self.id_hint.lock() = [0; 16];
                &Ahead::default()
            }
        };
        let mut at = offset;
        while at < end {
            let (block, from) = (at / size, (at % size) as usize);
            let n = ((end - at).min(size - from as u64)) as usize;
            match ahead.block(block, size as usize) {
                Some(sealed) => {
                    self.note_replaced(st, block)?;
                    st.dirty.insert(block, Dirty::Sealed(sealed));
                }
                None => self.patch_block(st, block, from, &data[(at - offset) as usize..][..n])?,
            }
            at += n as u64;
            st.size = st.size.max(at);
        }
        self.note_change();
        if !self.is_full(st) {
            return Ok(());
        }
        match self.open_to_others(st, Core::commit) {
            // This write is in the buffer and stays there; an append that fails and happens would be made twice. The next one is
            // refused, and flush and sync try again and tell.
            Err(StoreError::Io { .. }) if st.refused.is_some() => Ok(()),
            other => other,
        }
    }

    /// Whether a file of `size` can be stored: nothing is buffered that no commit could write, since that would keep back all else that is.
    pub fn check_size(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        let geo = self.geo();
        if size > geo.size_max() {
            return Err(StoreError::TooLarge);
        }
        let last = geo.blocks(size).saturating_sub(1);
        let len = geo.block_offset(last) + geo.block_size();
        if len <= st.len.max(st.len_possible) {
            return Ok(());
        }
        // What is asked for twice as much is not asked for again at every write of a file that grows.
        let ample = len.saturating_mul(2).min(i64::MAX as u64);
        st.len_possible = match self.backing.check_len(ample) {
            Ok(()) => ample,
            Err(_) => match self.backing.check_len(len) {
                Err(e) if e.raw_os_error() == Some(libc::EFBIG) => return Err(StoreError::TooLarge),
                other => other.map(|()| len).map_err(StoreError::io("seek", len))?,
            },
        };
        Ok(())
    }

    /// To be called before a block is buffered. Fails under a damaged page, where it could never be committed.
    fn note_replaced(&self, st: &mut State, block: u64) -> Result<(), StoreError> {
        let (g, i) = self.geo().slot_of(block);
        let held = self.good_page(st, g)?;
        let is_keyed = held.and_then(|held| held.page.keys.get(i)).is_some_and(|key| *key != HOLE);
        st.replaces |= is_keyed;
        Ok(())
    }

    fn patch_block(&self, st: &mut State, block: u64, from: usize, piece: &[u8]) -> Result<(), StoreError> {
        if piece.len() < self.ctx.block_len() {
            self.unseal(st, block)?;
        }
        if let Some(Dirty::Data(bytes)) = st.dirty.get_mut(&block) {
            bytes[from..from + piece.len()].copy_from_slice(piece);
            return Ok(());
        }
        self.note_replaced(st, block)?;
        let start = block * self.geo().block_size();
        let covers = from == 0 && (piece.len() == self.ctx.block_len() || start + piece.len() as u64 >= st.size);
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
        st.dirty.insert(block, Dirty::Data(bytes));
        Ok(())
    }

    /// Makes plaintext of a buffered block that was sealed ahead, so that it can be changed.
    pub fn unseal(&self, st: &mut State, block: u64) -> Result<(), StoreError> {
        let Some(Dirty::Sealed(sealed)) = st.dirty.get(&block) else { return Ok(()) };
        let len = self.ctx.block_len();
        let mut bytes = Block::of(sealed.bytes(len));
        let keyed = Keyed { keys: std::slice::from_ref(sealed.key()), salts: self.salts(st.file_id, block) };
        if !self.ctx.engine.open(&self.ctx.ring, &mut bytes, len, keyed, Verify::Full).is_empty() {
            return Err(self.damaged(DamageKind::BlockHash, self.geo().slot_of(block).0, Some(block)));
        }
        st.dirty.insert(block, Dirty::Data(bytes));
        Ok(())
    }

    /// Bytes that the buffered blocks take.
    pub fn buffered_len(&self, st: &State) -> usize {
        (st.dirty.len() * self.ctx.block_len()).max(st.chunk_len.load(Ordering::Relaxed))
    }

    /// Whether so much is buffered that it is to be committed.
    fn is_full(&self, st: &State) -> bool {
        let buffered = self.buffered_len(st);
        if buffered < APPEND_BUFFER_LEN || refusal(st).is_some() {
            return false;
        }
        // Of a file that has seen no barrier yet the first commit, made early, finds out. Relaxed commits have none.
        let is_cheap =
            self.ctx.durability == Durability::Relaxed || st.barrier_took.is_none_or(|took| took < BARRIER_CHEAP);
        buffered >= if st.replaces && !is_cheap { REPLACE_BUFFER_LEN } else { APPEND_BUFFER_LEN }
    }

    fn commit_if_full(&self, st: &mut State) -> Result<(), StoreError> {
        if self.is_full(st) { self.commit(st) } else { Ok(()) }
    }

    /// Makes the file longer; what is new reads as zeros. The bytes behind the end of the old last block are made zero.
    pub fn grow(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        self.check_size(st, size)?;
        self.good_page(st, self.geo().last_page(st.disk_size))?;
        if !st.size.is_multiple_of(self.geo().block_size()) {
            let block = st.size / self.geo().block_size();
            if !st.dirty.contains_key(&block) {
                let bytes = self.load_block(st, block)?;
                st.dirty.insert(block, Dirty::Data(bytes));
            }
        }
        st.size = size;
        st.wants_page = true;
        Ok(())
    }

    /// Makes `offset..offset + len` read as zeros, freeing whole blocks. Never changes the size.
    pub fn punch_range(&self, st: &mut State, offset: u64, len: u64) -> Result<(), StoreError> {
        self.prepare_write(st)?;
        st.refused = None;
        let end = offset.saturating_add(len).min(st.size);
        if offset >= end {
            return Ok(());
        }
        let size = self.geo().block_size();
        // The partial block at the end of the file is zeroed, not freed: it may live in its page's tail.
        let (first, last) = (offset.div_ceil(size), end / size);
        if first > last || first * size > end {
            self.zero_within(st, offset, end)?;
        } else {
            self.zero_within(st, offset, first * size)?;
            self.punch_blocks(st, first, last)?;
            self.zero_within(st, last * size, end)?;
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
        self.patch_block(st, from / size, (from % size) as usize, &zeros)
    }

    /// Makes blocks `first..end` holes, going from one present page to the next.
    fn punch_blocks(&self, st: &mut State, first: u64, end: u64) -> Result<(), StoreError> {
        let buffered: Vec<u64> = st.dirty.range(first..end).map(|(b, _)| *b).collect();
        for block in buffered {
            st.dirty.insert(block, Dirty::Hole);
        }
        let mut block = first;
        while block < end {
            let Some(g) = self.next_page(st, self.geo().slot_of(block).0)? else { break };
            let from = self.geo().first_block(g).max(block);
            let to = (self.geo().first_block(g) + self.geo().blocks_per_page()).min(end);
            if from >= end {
                break;
            }
            if let Some(held) = self.good_page(st, g)? {
                let page_first = self.geo().first_block(g);
                let keyed = |b: &u64| held.page.keys.get((b - page_first) as usize).is_some_and(|key| *key != [0; 32]);
                // A crash may have left a tail in a page that is not the last.
                let tail = (!held.page.tail.is_empty()).then(|| page_first + held.page.keys.len() as u64);
                let holes: Vec<u64> = (from..to).filter(|b| keyed(b) || tail == Some(*b)).collect();
                st.replaces |= !holes.is_empty();
                for b in holes {
                    st.dirty.insert(b, Dirty::Hole);
                }
            }
            block = to;
            self.commit_if_full(st)?;
        }
        Ok(())
    }

    /// The page behind the damaged page `g`, or behind the run of missing pages that begins with it: a store can make a file's hole of any length, in no space.
    pub fn end_of_bad(&self, st: &mut State, g: u64) -> Result<u64, StoreError> {
        let geo = *self.geo();
        if !matches!(self.page(st, g)?, Entry::Bad(DamageKind::PageMissing)) || g == 0 {
            return Ok(g + 1);
        }
        let offset = geo.page_offset(g);
        let data = self.backing.seek_data(offset).map_err(StoreError::io("seek data", offset))?;
        // No page from `floor` on is missed, unless nobody knows.
        let limit = if st.unknown_from.is_some() { st.disk_size } else { st.floor.min(st.disk_size) };
        let missed = limit.div_ceil(geo.page_span());
        let present = data.map_or(missed, |data| data / geo.segment_len() * geo.pages_per_segment());
        Ok(present.min(missed).max(g + 1))
    }

    /// The first page at or after `g`, within the size on disk, that is not known to be absent.
    pub fn next_page(&self, st: &mut State, mut g: u64) -> Result<Option<u64>, StoreError> {
        let geo = *self.geo();
        loop {
            if g > geo.last_page(st.disk_size) {
                return Ok(None);
            }
            if !matches!(self.page(st, g)?, Entry::Absent) {
                return Ok(Some(g));
            }
            // A hole of many segments is skipped in one step, but not past where absent pages are no holes any more.
            let unknown = st.unknown_from.map(|from| from / geo.page_span()).filter(|first| g < *first);
            let offset = geo.page_offset(g);
            let data = self.backing.seek_data(offset).map_err(StoreError::io("seek data", offset))?;
            let present = data.map(|data| data / geo.segment_len() * geo.pages_per_segment());
            g = match (present, unknown) {
                (None, None) => return Ok(None),
                (Some(next), None) | (None, Some(next)) => next.max(g + 1),
                (Some(present), Some(unknown)) => present.min(unknown).max(g + 1),
            };
        }
    }
}

/// What the store said when it refused a commit a moment ago.
fn refusal(st: &State) -> Option<i32> {
    st.refused.as_ref().filter(|refused| refused.at.elapsed() < REFUSAL).map(|refused| refused.errno)
}

/// Notes how a commit ended.
pub(super) fn note_commit(st: &mut State, done: &Result<(), StoreError>) {
    st.refused = match done {
        Err(StoreError::Io { source, .. }) => source.raw_os_error().map(|errno| Refused { at: Instant::now(), errno }),
        Ok(()) => None,
        Err(_) => return,
    };
}
