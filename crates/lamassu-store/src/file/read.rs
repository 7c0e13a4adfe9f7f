//! Reading: the blocks of a request are fetched, decrypted and verified as one batch, by readers that do not wait for one another.
//!
//! Readers share the lock of the state. A clean page that is not in memory yet is loaded by the reader that needs it ([`View`]): taking the lock
//! for itself alone it would wait for the batches of all others, and they for it. What has to change the state, such as an interrupted commit, is
//! left to who holds the lock alone.

use super::block::Block;
use super::chunk::SealedBlock;
use super::open::HOLE;
use super::state::{Core, Dirty, Entry, State, are_too_many};
use super::types::{DamageKind, Integrity, StoreError};
use lamassu_crypto::{Keyed, Verify};
use lamassu_format::{BlockKey, Keys};
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
            // Nobody reads while blocks are copied.
            Dirty::Elsewhere(_) => Source::Bad(DamageKind::BlockPending),
            Dirty::Hole => Source::Zeros,
        }
    }
}

/// The state as one reader sees it: with pages that it has loaded itself, and what was written beside a commit.
pub(super) struct View<'a> {
    st: &'a State,
    loaded: Vec<(u64, Entry)>,
    size: u64,
    late: BTreeMap<u64, Dirty>,
}

impl<'a> View<'a> {
    /// For blocks whose pages are all in memory.
    pub fn of(st: &'a State) -> View<'a> {
        View { st, loaded: Vec::new(), size: st.size, late: BTreeMap::new() }
    }

    /// The same file, `size` bytes long, where `late` rules.
    pub fn with(self, size: u64, late: BTreeMap<u64, Dirty>) -> View<'a> {
        View { size, late, ..self }
    }

    pub fn entry(&self, g: u64) -> Option<&Entry> {
        let own = || self.loaded.iter().find(|(own, _)| *own == g).map(|(_, entry)| entry);
        self.st.pages.get(&g).or_else(own)
    }
}

/// Blocks that are read together. Indices count from the first.
struct Batch<'a> {
    first: u64,
    /// A key for each block that is sealed; all zero for the others.
    keys: Keys,
    /// The sealed ones that are still in the buffer, ascending.
    buffered: Vec<(usize, &'a SealedBlock)>,
    /// What the others are, unless zeros.
    others: Vec<(usize, Source<'a>)>,
    /// Blocks that the backing file turned out to be too short for.
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
        self.keys[at] != HOLE && self.buffered(at).is_none()
    }
}

impl Core {
    /// A view with the pages that blocks `first..=last` need; `None` if one of them needs more than reading.
    pub fn view<'a>(&self, st: &'a State, first: u64, last: u64) -> Result<Option<View<'a>>, StoreError> {
        let mut view = View::of(st);
        for g in self.geo().slot_of(first).0..=self.geo().slot_of(last).0 {
            if st.pages.contains_key(&g) || !self.is_within(st, g) {
                continue;
            }
            let known = st.loaded.lock().get(&g).cloned();
            let entry = match known {
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

    /// Keeps a page for other readers, and for who next takes the lock alone.
    fn share(&self, st: &State, g: u64, entry: Entry) -> Entry {
        self.touch(&entry);
        let mut loaded = st.loaded.lock();
        if are_too_many(loaded.len()) {
            let mut keep = false;
            loaded.retain(|_, _| {
                keep = !keep;
                keep
            });
        }
        loaded.insert(g, entry.clone());
        entry
    }

    /// Loads the pages that `first..=last` blocks need.
    pub fn load_pages(&self, st: &mut State, first: u64, last: u64) -> Result<(), StoreError> {
        let (from, to) = (self.geo().slot_of(first).0, self.geo().slot_of(last).0);
        // Once, and not between the pages: they are needed together.
        self.evict(st);
        for g in from..=to {
            if !st.pages.contains_key(&g) && self.is_within(st, g) {
                let entry = self.load_page(st, g)?;
                st.pages.insert(g, entry);
            }
            if let Some(entry) = st.pages.get(&g) {
                self.touch(entry);
            }
        }
        Ok(())
    }

    /// Where blocks `first..first + count` come from.
    fn sources<'v>(&self, view: &'v View<'_>, first: u64, count: usize) -> Batch<'v> {
        let (mut keys, mut buffered, mut others) = (Keys::holes(count), Vec::new(), Vec::new());
        let mut page = None;
        for (at, key) in keys.iter_mut().enumerate() {
            let (g, i) = self.geo().slot_of(first + at as u64);
            let entry = match page {
                Some((same, entry)) if same == g => entry,
                _ => view.entry(g),
            };
            page = Some((g, entry));
            let block = first + at as u64;
            let source = match view.late.get(&block) {
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
    pub fn source<'v>(&self, st: &'v State, entry: Option<&'v Entry>, b: u64, i: usize) -> Source<'v> {
        if let Some(dirty) = st.dirty.get(&b) {
            return Source::of(dirty);
        }
        match entry {
            // Past the pages on disk, or a caller forgot to load it: then better an error than zeros.
            None if self.is_within(st, self.geo().slot_of(b).0) => Source::Bad(DamageKind::PageMissing),
            None | Some(Entry::Absent) => Source::Zeros,
            Some(Entry::Bad(kind)) => Source::Bad(*kind),
            Some(Entry::Good(held)) if i < held.page.keys.len() => match &held.page.keys[i] {
                _ if held.lost >> i & 1 == 1 => Source::Bad(DamageKind::BlockPending),
                &HOLE => self.hole_or_lost(st, b),
                key => Source::Sealed(key),
            },
            Some(Entry::Good(held)) if i == held.page.keys.len() && !held.page.tail.is_empty() => {
                Source::Bytes(&held.page.tail)
            }
            Some(Entry::Good(_)) => self.hole_or_lost(st, b),
        }
    }

    /// Past what the store still holds of a truncated file nothing is known to be a hole; nor past what is known of the size.
    fn hole_or_lost<'a>(&self, st: &State, b: u64) -> Source<'a> {
        let at = b * self.geo().block_size();
        match (st.lost_from, st.unknown_from) {
            (Some(from), _) if at >= from => Source::Bad(DamageKind::Truncated),
            (_, Some(from)) if at >= from && at < st.disk_size => Source::Bad(DamageKind::PageMissing),
            _ => Source::Zeros,
        }
    }

    /// Plaintext of whole blocks `first..` into `out` (a whole number of blocks), unmasked. The view must have their pages.
    /// Damage is passed to `bad`, in the order of blocks, and leaves zeros; if `bad` returns an error, that ends the read.
    pub fn read_blocks(
        &self,
        view: &View<'_>,
        first: u64,
        out: &mut [u8],
        verify: Verify,
        bad: &mut dyn FnMut(u64, DamageKind) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let len = self.ctx.block_len();
        let batch = self.sources(view, first, out.len() / len);
        let fetch = |at: usize, bytes: &mut [u8]| self.fetch(&batch, at, bytes);
        let keyed = Keyed { keys: &batch.keys, salts: self.salts(view.st.file_id, first) };
        let failed = self.ctx.engine.open_fetched(&self.ctx.ring, out, len, keyed, verify, fetch)?;
        let missing = batch.missing.into_inner();
        let kind = |at: &usize| match missing.contains(at) {
            true => DamageKind::BlockMissing,
            false => DamageKind::BlockHash,
        };
        let mut damage: Vec<(usize, DamageKind)> = failed.iter().map(|at| (*at, kind(at))).collect();
        for at in missing.iter().filter(|at| !failed.contains(at)) {
            // Only reachable without re-hashing: bytes that are not there decrypt to nonsense.
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

    /// Brings the ciphertext of some blocks of a batch, those from index `at` on, to where they belong in it.
    fn fetch(&self, batch: &Batch<'_>, at: usize, bytes: &mut [u8]) -> Result<(), StoreError> {
        let len = self.ctx.block_len();
        let end = at + bytes.len() / len;
        let mut from = at;
        while from < end {
            if batch.keys[from] == HOLE {
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
                batch.missing.lock().extend(from + got / len..to);
            }
            from = to;
        }
        Ok(())
    }

    /// Whether block `first + n` lies right behind the `n` blocks from `first`.
    pub fn continues(&self, first: u64, n: u64) -> bool {
        self.geo().block_offset(first + n) == self.geo().block_offset(first) + n * self.geo().block_size()
    }

    /// What reads of this mount check.
    pub fn verify(&self) -> Verify {
        match self.ctx.integrity {
            Integrity::Metadata if !self.ctx.ring.suite().is_malleable() => Verify::No,
            _ => Verify::Full,
        }
    }

    /// Reads up to `buf.len()` bytes at `offset` beside other readers; `None` if that takes the lock for oneself.
    pub fn read_shared(&self, st: &State, offset: u64, buf: &mut [u8]) -> Result<Option<usize>, StoreError> {
        let Some((first, last)) = self.touched(st.size, offset, buf.len()) else { return Ok(Some(0)) };
        match self.view(st, first, last)? {
            Some(view) => self.read_range(&view, offset, buf, &mut |block, kind| self.bad_block(block, kind)).map(Some),
            None => Ok(None),
        }
    }

    /// Reads where nothing is damaged; `None` otherwise, and nobody is told.
    pub fn read_sound(&self, view: &View<'_>, offset: u64, buf: &mut [u8]) -> Result<Option<usize>, StoreError> {
        let mut bad =
            |block: u64, kind| Err(StoreError::Damaged(self.damage(kind, self.geo().slot_of(block).0, Some(block))));
        match self.read_range(view, offset, buf, &mut bad) {
            Ok(n) => Ok(Some(n)),
            Err(StoreError::Damaged(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn bad_block(&self, block: u64, kind: DamageKind) -> Result<(), StoreError> {
        Err(self.damaged(kind, self.geo().slot_of(block).0, Some(block)))
    }

    /// Reads up to `buf.len()` bytes at `offset`, doing to the pages what has to be done first.
    pub fn read_alone(&self, st: &mut State, offset: u64, buf: &mut [u8]) -> Result<usize, StoreError> {
        let Some((first, last)) = self.touched(st.size, offset, buf.len()) else { return Ok(0) };
        self.load_pages(st, first, last)?;
        self.read_range(&View::of(st), offset, buf, &mut |block, kind| self.bad_block(block, kind))
    }

    /// The first and the last block that a read of a file of `size` concerns.
    pub fn touched(&self, size: u64, offset: u64, len: usize) -> Option<(u64, u64)> {
        let want = size.saturating_sub(offset).min(len as u64);
        let size = self.geo().block_size();
        (want > 0).then(|| (offset / size, (offset + want - 1) / size))
    }

    fn read_range(
        &self,
        view: &View<'_>,
        offset: u64,
        buf: &mut [u8],
        bad: &mut dyn FnMut(u64, DamageKind) -> Result<(), StoreError>,
    ) -> Result<usize, StoreError> {
        let want = view.size.saturating_sub(offset).min(buf.len() as u64) as usize;
        let buf = &mut buf[..want];
        let size = self.geo().block_size();
        let (first, end) = (offset / size, (offset + want as u64).div_ceil(size));
        if offset.is_multiple_of(size) && (want as u64).is_multiple_of(size) {
            self.read_blocks(view, first, buf, self.verify(), bad)?;
            return Ok(want);
        }
        let mut scratch = vec![0u8; ((end - first) * size) as usize];
        self.read_blocks(view, first, &mut scratch, self.verify(), bad)?;
        let from = (offset - first * size) as usize;
        buf.copy_from_slice(&scratch[from..from + want]);
        Ok(want)
    }

    /// One block's plaintext with everything past `size` zero, loading its page if need be.
    pub fn load_block(&self, st: &mut State, b: u64) -> Result<Block, StoreError> {
        let mut bytes = Block::zeroed(self.ctx.block_len());
        let start = b * self.geo().block_size();
        if start < st.size {
            self.load_pages(st, b, b)?;
            self.read_blocks(&View::of(st), b, &mut bytes, self.verify(), &mut |b, kind| self.bad_block(b, kind))?;
            let inside = (st.size - start).min(bytes.len() as u64) as usize;
            bytes[inside..].fill(0);
        }
        Ok(bytes)
    }
}
