//! Reading: runs of blocks that lie together are read, decrypted and verified together.

use super::state::{Core, Dirty, Entry, State};
use super::types::{DamageKind, Integrity, StoreError};
use lamassu_crypto::Verify;
use lamassu_format::BlockKey;

/// Where the plaintext of a block comes from.
enum Source<'a> {
    Zeros,
    Bytes(&'a [u8]),
    Sealed(BlockKey),
    Bad(DamageKind),
}

impl Core {
    /// Whether every page that `first..=last` blocks need is in memory (or needs no I/O).
    pub fn pages_ready(&self, st: &State, first: u64, last: u64) -> bool {
        let (from, to) = (self.geo().slot_of(first).0, self.geo().slot_of(last).0);
        (from..=to).all(|g| st.pages.contains_key(&g) || !self.is_within(st, g))
    }

    /// Loads the pages that `first..=last` blocks need.
    pub fn load_pages(&self, st: &mut State, first: u64, last: u64) -> Result<(), StoreError> {
        let (from, to) = (self.geo().slot_of(first).0, self.geo().slot_of(last).0);
        (from..=to).try_for_each(|g| self.page(st, g).map(drop))
    }

    fn source<'a>(&self, st: &'a State, b: u64) -> Source<'a> {
        match st.dirty.get(&b) {
            Some(Dirty::Data(bytes)) => return Source::Bytes(bytes),
            Some(Dirty::Hole) => return Source::Zeros,
            None => {}
        }
        let (g, i) = self.geo().slot_of(b);
        match st.pages.get(&g) {
            None | Some(Entry::Absent) => Source::Zeros,
            Some(Entry::Bad(kind)) => Source::Bad(*kind),
            Some(Entry::Good(held)) if i < held.page.keys.len() => match held.page.keys[i] {
                _ if held.lost >> i & 1 == 1 => Source::Bad(DamageKind::BlockPending),
                key if key == [0; 32] => self.hole_or_lost(st, b),
                key => Source::Sealed(key),
            },
            Some(Entry::Good(held)) if i == held.page.keys.len() && !held.page.tail.is_empty() => {
                Source::Bytes(&held.page.tail)
            }
            Some(Entry::Good(_)) => self.hole_or_lost(st, b),
        }
    }

    /// Past what the store still holds of a truncated file nothing is known to be a hole.
    fn hole_or_lost<'a>(&self, st: &State, b: u64) -> Source<'a> {
        match st.lost_from {
            Some(from) if b * self.geo().block_size() >= from => Source::Bad(DamageKind::Truncated),
            _ => Source::Zeros,
        }
    }

    /// Plaintext of whole blocks `first..` into `out` (a whole number of blocks), unmasked. Pages must be in memory.
    /// Damage is passed to `bad` and leaves zeros; if `bad` returns an error, that ends the read.
    pub fn read_blocks(
        &self,
        st: &State,
        first: u64,
        out: &mut [u8],
        verify: Verify,
        bad: &mut dyn FnMut(u64, DamageKind) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let len = self.ctx.block_len();
        let count = out.len() / len;
        let mut at = 0;
        while at < count {
            let block = first + at as u64;
            let target = &mut out[at * len..(at + 1) * len];
            match self.source(st, block) {
                Source::Zeros => target.fill(0),
                Source::Bytes(bytes) => {
                    target[..bytes.len()].copy_from_slice(bytes);
                    target[bytes.len()..].fill(0);
                }
                Source::Bad(kind) => {
                    target.fill(0);
                    bad(block, kind)?;
                }
                Source::Sealed(key) => {
                    let mut keys = vec![key];
                    while at + keys.len() < count && self.continues(block, keys.len() as u64) {
                        match self.source(st, block + keys.len() as u64) {
                            Source::Sealed(key) => keys.push(key),
                            _ => break,
                        }
                    }
                    self.read_run(block, &keys, &mut out[at * len..(at + keys.len()) * len], verify, bad)?;
                    at += keys.len();
                    continue;
                }
            }
            at += 1;
        }
        Ok(())
    }

    /// Whether block `first + n` lies right behind the `n` blocks from `first`.
    pub fn continues(&self, first: u64, n: u64) -> bool {
        self.geo().block_offset(first + n) == self.geo().block_offset(first) + n * self.geo().block_size()
    }

    fn read_run(
        &self,
        first: u64,
        keys: &[BlockKey],
        out: &mut [u8],
        verify: Verify,
        bad: &mut dyn FnMut(u64, DamageKind) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let len = self.ctx.block_len();
        let got = self.read_padded(self.geo().block_offset(first), out)?;
        let failed = self.ctx.engine.open(&self.ctx.ring, out, len, keys, verify);
        let whole = got / len;
        for i in failed.iter().copied() {
            let kind = if i < whole { DamageKind::BlockHash } else { DamageKind::BlockMissing };
            bad(first + i as u64, kind)?;
        }
        for i in (whole..keys.len()).filter(|i| !failed.contains(i)) {
            // Only reachable without re-hashing: bytes that are not there decrypt to nonsense.
            out[i * len..(i + 1) * len].fill(0);
            bad(first + i as u64, DamageKind::BlockMissing)?;
        }
        Ok(())
    }

    /// What reads of this mount check.
    pub fn verify(&self) -> Verify {
        match self.ctx.integrity {
            Integrity::Metadata if !self.ctx.ring.suite().is_malleable() => Verify::No,
            _ => Verify::Full,
        }
    }

    /// Reads up to `buf.len()` bytes at `offset`. Pages must be in memory.
    pub fn read_range(&self, st: &State, offset: u64, buf: &mut [u8]) -> Result<usize, StoreError> {
        let want = st.size.saturating_sub(offset).min(buf.len() as u64) as usize;
        if want == 0 {
            return Ok(0);
        }
        let buf = &mut buf[..want];
        let size = self.geo().block_size();
        let (first, end) = (offset / size, (offset + want as u64).div_ceil(size));
        let mut bad = |block: u64, kind| Err(self.damaged(kind, self.geo().slot_of(block).0, Some(block)));
        if offset.is_multiple_of(size) && (want as u64).is_multiple_of(size) {
            self.read_blocks(st, first, buf, self.verify(), &mut bad)?;
            return Ok(want);
        }
        let mut scratch = vec![0u8; ((end - first) * size) as usize];
        self.read_blocks(st, first, &mut scratch, self.verify(), &mut bad)?;
        let from = (offset - first * size) as usize;
        buf.copy_from_slice(&scratch[from..from + want]);
        Ok(want)
    }

    /// One block's plaintext with everything past `size` zero, loading its page if need be.
    pub fn load_block(&self, st: &mut State, b: u64) -> Result<Box<[u8]>, StoreError> {
        let mut bytes = vec![0u8; self.ctx.block_len()].into_boxed_slice();
        let start = b * self.geo().block_size();
        if start < st.size {
            self.load_pages(st, b, b)?;
            let mut bad = |block: u64, kind| Err(self.damaged(kind, self.geo().slot_of(block).0, Some(block)));
            self.read_blocks(st, b, &mut bytes, self.verify(), &mut bad)?;
            let inside = (st.size - start).min(bytes.len() as u64) as usize;
            bytes[inside..].fill(0);
        }
        Ok(bytes)
    }
}
