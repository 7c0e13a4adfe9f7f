//! Reading: the blocks of a request are fetched, decrypted and verified as one batch, by readers that do not wait for
//! one another.
//!
//! Readers share the lock of the state. A reader that needs a clean page loads it itself ([`View`]): if it took the
//! lock alone, it would wait for the batches of all others, and they for it. A read that has to change the state, such
//! as one that meets an interrupted commit, takes the lock alone.

use super::block::Block;
use super::form::{Forms, Numbers};
use super::presealed::SealedBlock;
use super::primitives::Core;
use super::state::{Dirty, Held, PageState, State};
use super::types::{DamageKind, StoreError};
use lamassu_crypto::{Keyed, Verify};
use lamassu_format::{BlockKey, BlockNo, Keys, PageNo};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Bytes read under one hold of the lock. Their pages must fit in memory together.
pub(super) const PIECE_LEN: usize = 8 << 20;

/// Where the plaintext of a block comes from.
pub(super) enum Source<'a> {
    Zeros,
    Bytes(&'a [u8]),
    Sealed(&'a BlockKey),
    Buffered(&'a SealedBlock),
    Bad(DamageKind),
}

impl Source<'_> {
    fn of(dirty: &Dirty) -> Source<'_> {
        match dirty {
            Dirty::Data(bytes) => Source::Bytes(bytes),
            Dirty::Sealed(block) => Source::Buffered(block),
            // No reads run while blocks are copied.
            Dirty::Copied(_) => Source::Bad(DamageKind::BlockPending),
            Dirty::Hole => Source::Zeros,
        }
    }
}

/// The state as one reader sees it: with pages that it has loaded itself, and the overlay of an open commit.
pub(super) struct View<'a> {
    st: &'a State,
    loaded: Vec<(PageNo, PageState)>,
    size: u64,
    overlay: BTreeMap<BlockNo, Dirty>,
}

impl<'a> View<'a> {
    /// For blocks whose pages are all in memory.
    pub fn of(st: &'a State) -> View<'a> {
        View { st, loaded: Vec::new(), size: st.sizes.logical(), overlay: BTreeMap::new() }
    }

    /// The same file, `size` bytes long; blocks in `overlay` take precedence over all others.
    pub fn with(self, size: u64, overlay: BTreeMap<BlockNo, Dirty>) -> View<'a> {
        View { size, overlay, ..self }
    }

    pub fn entry(&self, g: PageNo) -> Option<&PageState> {
        let own = || self.loaded.iter().find(|(own, _)| *own == g).map(|(_, entry)| entry);
        self.st.pages.get(g).or_else(own)
    }
}

/// Blocks that are read together. Indices count from the first.
struct Batch<'a> {
    first: BlockNo,
    /// A key for each block that is sealed; all zero for the others.
    keys: Keys,
    /// The sealed ones that are still in the buffer, ascending.
    buffered: Vec<(usize, &'a SealedBlock)>,
    /// The other blocks, unless they are zeros.
    others: Vec<(usize, Source<'a>)>,
    /// Blocks for which the backing file is too short.
    missing: Mutex<Vec<usize>>,
}

impl Batch<'_> {
    fn buffered(&self, at: usize) -> Option<&SealedBlock> {
        if self.buffered.is_empty() {
            return None;
        }
        self.buffered.binary_search_by_key(&at, |(at, _)| *at).ok().map(|n| self.buffered[n].1)
    }

    /// Whether the block's ciphertext is to be read from the store.
    fn is_stored(&self, at: usize) -> bool {
        self.keys.is_keyed(at) && self.buffered(at).is_none()
    }
}

impl Core {
    /// A view with the pages that blocks `first..=last` need; `None` if one of them needs more than reading.
    pub fn view<'a>(&self, st: &'a State, first: BlockNo, last: BlockNo) -> Result<Option<View<'a>>, StoreError> {
        let mut view = View::of(st);
        for g in self.geo().pages_of(first, last) {
            if st.pages.contains(g) || !st.is_within(self.geo(), g) {
                continue;
            }
            let entry = match st.pages.shared(g) {
                Some(entry) => entry,
                None => match self.load_clean_page(st, g)? {
                    Some(entry) => self.share(st, g, entry),
                    None => return Ok(None),
                },
            };
            view.loaded.push((g, entry));
        }
        Ok(Some(view))
    }

    /// Keeps a page for other readers, and for the next caller that takes the lock alone.
    fn share(&self, st: &State, g: PageNo, entry: PageState) -> PageState {
        self.touch(&entry);
        st.pages.share(g, entry.clone());
        entry
    }

    /// Loads the pages that `first..=last` blocks need.
    pub fn load_pages(&self, st: &mut State, first: BlockNo, last: BlockNo) -> Result<(), StoreError> {
        // Once, and not between the pages: they are needed together.
        st.evict(self.geo());
        for g in self.geo().pages_of(first, last) {
            if !st.pages.contains(g) && st.is_within(self.geo(), g) {
                let entry = self.load_page(st, g)?;
                st.pages.put(g, entry);
            }
            if let Some(entry) = st.pages.get(g) {
                self.touch(entry);
            }
        }
        Ok(())
    }

    /// Where blocks `first..first + count` come from.
    fn sources<'v>(&self, view: &'v View<'_>, first: BlockNo, count: usize) -> Batch<'v> {
        let (mut keys, mut buffered, mut others) = (Keys::holes(count), Vec::new(), Vec::new());
        let mut page = None;
        for (at, key) in keys.raw_mut().iter_mut().enumerate() {
            let (g, i) = self.geo().slot_of(first + at as u64);
            let entry = match page {
                Some((same, entry)) if same == g => entry,
                _ => view.entry(g),
            };
            page = Some((g, entry));
            let block = first + at as u64;
            let source = match view.overlay.get(&block) {
                Some(dirty) => Source::of(dirty),
                None => self.source(view.st, entry, block, i),
            };
            match source {
                Source::Sealed(sealed) => *key = *sealed,
                Source::Buffered(block) => {
                    *key = *block.key();
                    buffered.push((at, block));
                }
                Source::Zeros => {}
                other => others.push((at, other)),
            }
        }
        Batch { first, keys, buffered, others, missing: Mutex::default() }
    }

    /// Where block `b` comes from, slot `i` of the page `entry`.
    pub fn source<'v>(&self, st: &'v State, entry: Option<&'v PageState>, b: BlockNo, i: usize) -> Source<'v> {
        if let Some(dirty) = st.buffer.get(b) {
            return Source::of(dirty);
        }
        match entry {
            // Within the file, but not loaded by the caller: an error is better than zeros.
            None if st.is_within(self.geo(), self.geo().page_of(b)) => Source::Bad(DamageKind::PageMissing),
            None | Some(PageState::Absent) => Source::Zeros,
            Some(PageState::Bad(kind)) => Source::Bad(*kind),
            Some(PageState::Good(held)) if held.is_lost(i) => Source::Bad(DamageKind::BlockPending),
            Some(PageState::Good(held)) if held.is_keyed(i) => Source::Sealed(&held.page().keys.raw()[i]),
            // The rest of the tail's block is lost too, and would be zeros.
            Some(PageState::Good(held)) if self.is_tail(held, i) => match self.has_lost(st, b) {
                true => Source::Bad(DamageKind::Truncated),
                false => Source::Bytes(&held.page().tail),
            },
            Some(PageState::Good(_)) => self.hole_or_lost(st, b),
        }
    }

    /// Whether slot `i` of a page is its tail.
    pub fn is_tail(&self, held: &Held, i: usize) -> bool {
        i == held.page().keys.len() && !held.page().tail.is_empty()
    }

    /// Whether a block reaches past the rest of a file whose end the store has lost.
    fn has_lost(&self, st: &State, b: BlockNo) -> bool {
        st.inherited.lost_from().is_some_and(|from| self.geo().block_start(b.next()) > from)
    }

    /// A hole; but damage past the rest of a file whose end the store has lost, and past the known part of the size,
    /// where nothing is known to be a hole.
    pub fn hole_or_lost<'a>(&self, st: &State, b: BlockNo) -> Source<'a> {
        let at = self.geo().block_start(b);
        match st.inherited.unknown_from() {
            _ if self.has_lost(st, b) => Source::Bad(DamageKind::Truncated),
            Some(from) if at >= from && at < st.sizes.stored() => Source::Bad(DamageKind::PageMissing),
            _ => Source::Zeros,
        }
    }

    /// Plaintext of whole blocks `first..` into `out` (a whole number of blocks), unmasked. The view must have their
    /// pages. Damage is passed to `bad`, in the order of blocks, and leaves zeros; if `bad` returns an error, that ends
    /// the read.
    pub fn read_blocks(
        &self,
        view: &View<'_>,
        first: BlockNo,
        out: &mut [u8],
        verify: Verify,
        bad: &mut dyn FnMut(BlockNo, DamageKind) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let len = self.ctx.block_len();
        let batch = self.sources(view, first, out.len() / len);
        let fetch = |at: usize, bytes: &mut [u8]| self.fetch(&batch, at, bytes);
        let forms = self.forms(&view.st.identity);
        let keyed = Keyed { keys: batch.keys.raw(), salts: forms.salts(Numbers::From(first)) };
        let mut failed = self.ctx.engine.open_fetched(&self.ctx.ring, out, len, keyed, verify, fetch)?;
        if forms.may_differ() {
            self.read_otherwise(&batch, forms, out, &mut failed)?;
        }
        let missing = batch.missing.into_inner();
        let kind = |at: &usize| match missing.contains(at) {
            true => DamageKind::BlockMissing,
            false => DamageKind::BlockHash,
        };
        let mut damage: Vec<(usize, DamageKind)> = failed.iter().map(|at| (*at, kind(at))).collect();
        for at in missing.iter().filter(|at| !failed.contains(at)) {
            // Only reachable without hashing: missing bytes decrypt to nonsense.
            out[at * len..][..len].fill(0);
            damage.push((*at, DamageKind::BlockMissing));
        }
        for (at, source) in batch.others {
            match source {
                Source::Bytes(bytes) => out[at * len..][..bytes.len()].copy_from_slice(bytes),
                Source::Bad(kind) => damage.push((at, kind)),
                Source::Sealed(_) | Source::Buffered(_) | Source::Zeros => {}
            }
        }
        damage.sort_unstable();
        damage.into_iter().try_for_each(|(at, kind)| bad(first + at as u64, kind))
    }

    /// Reads the blocks of a batch that have `failed` again, in the forms that they may have had before the profile of
    /// their file began to change. Takes those that fit out of `failed`.
    fn read_otherwise(
        &self,
        batch: &Batch<'_>,
        forms: Forms,
        out: &mut [u8],
        failed: &mut Vec<usize>,
    ) -> Result<(), StoreError> {
        let len = self.ctx.block_len();
        let mut left = Vec::new();
        for &at in failed.iter() {
            let mut stored = vec![0; len];
            if !batch.missing.lock().contains(&at) {
                self.fetch(batch, at, &mut stored)?;
            }
            let opened = &mut out[at * len..][..len];
            if !self.open_otherwise(forms, (&stored, opened), &batch.keys.raw()[at], batch.first + at as u64) {
                left.push(at);
            }
        }
        *failed = left;
        Ok(())
    }

    /// Reads the ciphertext of some blocks of a batch, from index `at` on, into its place.
    fn fetch(&self, batch: &Batch<'_>, at: usize, bytes: &mut [u8]) -> Result<(), StoreError> {
        let len = self.ctx.block_len();
        let end = at + bytes.len() / len;
        let mut from = at;
        while from < end {
            if batch.keys.is_hole(from) {
                from += 1;
                continue;
            }
            if let Some(block) = batch.buffered(from) {
                bytes[(from - at) * len..][..len].copy_from_slice(block.bytes(len));
                from += 1;
                continue;
            }
            let block = batch.first + from as u64;
            let mut to = from + 1;
            while to < end && batch.is_stored(to) && self.continues(block, (to - from) as u64) {
                to += 1;
            }
            let run = &mut bytes[(from - at) * len..(to - at) * len];
            let got = self.read_padded(self.geo().block_offset(block), run)?;
            if got < run.len() {
                // The file ends where the ciphertext of a compressed block does: zeros follow.
                let at = from + got / len;
                let ends_in_block = !got.is_multiple_of(len) && batch.keys.is_compressed(at, self.ctx.ring.suite());
                batch.missing.lock().extend(at + usize::from(ends_in_block)..to);
            }
            from = to;
        }
        Ok(())
    }

    /// Whether block `first + n` follows the `n` blocks from `first` without a gap.
    pub fn continues(&self, first: BlockNo, n: u64) -> bool {
        self.geo().block_offset(first + n) == self.geo().block_offset(first) + n * self.geo().block_size()
    }

    /// Reads up to `buf.len()` bytes at `offset` under the shared lock; `None` if the read needs the lock alone.
    pub fn read_shared(&self, st: &State, offset: u64, buf: &mut [u8]) -> Result<Option<usize>, StoreError> {
        let Some((first, last)) = self.touched(st.sizes.logical(), offset, buf.len()) else { return Ok(Some(0)) };
        match self.view(st, first, last)? {
            Some(view) => self.read_range(&view, offset, buf, &mut |block, kind| self.bad_block(block, kind)).map(Some),
            None => Ok(None),
        }
    }

    /// Reads if nothing is damaged; `None` otherwise, without a report.
    pub fn read_undamaged(&self, view: &View<'_>, offset: u64, buf: &mut [u8]) -> Result<Option<usize>, StoreError> {
        let mut bad =
            |block: BlockNo, kind| Err(StoreError::Damaged(self.damage(kind, self.geo().page_of(block), Some(block))));
        match self.read_range(view, offset, buf, &mut bad) {
            Ok(n) => Ok(Some(n)),
            Err(StoreError::Damaged(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn bad_block(&self, block: BlockNo, kind: DamageKind) -> Result<(), StoreError> {
        Err(self.damaged(kind, self.geo().page_of(block), Some(block)))
    }

    /// Reads up to `buf.len()` bytes at `offset`, after loading and resolving the pages.
    pub fn read_alone(&self, st: &mut State, offset: u64, buf: &mut [u8]) -> Result<usize, StoreError> {
        let Some((first, last)) = self.touched(st.sizes.logical(), offset, buf.len()) else { return Ok(0) };
        self.load_pages(st, first, last)?;
        self.read_range(&View::of(st), offset, buf, &mut |block, kind| self.bad_block(block, kind))
    }

    /// The first and the last block that a read of a file of `size` concerns.
    pub fn touched(&self, size: u64, offset: u64, len: usize) -> Option<(BlockNo, BlockNo)> {
        let want = size.saturating_sub(offset).min(len as u64);
        (want > 0).then(|| (self.geo().block_at(offset), self.geo().block_at(offset + want - 1)))
    }

    fn read_range(
        &self,
        view: &View<'_>,
        offset: u64,
        buf: &mut [u8],
        bad: &mut dyn FnMut(BlockNo, DamageKind) -> Result<(), StoreError>,
    ) -> Result<usize, StoreError> {
        let want = view.size.saturating_sub(offset).min(buf.len() as u64) as usize;
        let buf = &mut buf[..want];
        let size = self.geo().block_size();
        let (first, end) = (self.geo().block_at(offset), self.geo().end_block(offset + want as u64));
        if offset.is_multiple_of(size) && (want as u64).is_multiple_of(size) {
            self.read_blocks(view, first, buf, self.verify(&view.st.identity), bad)?;
            return Ok(want);
        }
        let mut scratch = vec![0u8; ((end - first) * size) as usize];
        self.read_blocks(view, first, &mut scratch, self.verify(&view.st.identity), bad)?;
        let from = (offset - self.geo().block_start(first)) as usize;
        buf.copy_from_slice(&scratch[from..from + want]);
        Ok(want)
    }

    /// One block's plaintext with everything past the file's size zero, loading its page if need be.
    pub fn load_block(&self, st: &mut State, b: BlockNo) -> Result<Block, StoreError> {
        self.load_block_within(st, b, st.sizes.logical())
    }

    /// One block's plaintext with everything past `size` zero.
    pub fn load_block_within(&self, st: &mut State, b: BlockNo, size: u64) -> Result<Block, StoreError> {
        let mut bytes = Block::zeroed(self.ctx.block_len());
        let start = self.geo().block_start(b);
        if start < size {
            self.load_pages(st, b, b)?;
            let (view, verify) = (View::of(st), self.verify(&st.identity));
            self.read_blocks(&view, b, &mut bytes, verify, &mut |b, kind| self.bad_block(b, kind))?;
            let inside = (size - start).min(bytes.len() as u64) as usize;
            bytes[inside..].fill(0);
        }
        Ok(bytes)
    }
}
