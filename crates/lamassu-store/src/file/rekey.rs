//! Re-keying: pages sealed under an older K_out are sealed again, and on demand blocks under an older K_in are
//! encrypted again. In the same way a file's blocks and pages are brought to a new profile ([`super::profile`]).
//!
//! It goes from page to page in steps, so that other threads can use the file in between. Pages and blocks under the
//! newest keys are left alone: after a crash, or a second time, it continues with what is left. A page is replaced by
//! one write of the same content (I13); blocks go through the commit protocol. It never changes content, size or
//! modification time.

use super::block::Block;
use super::ciphertext::zeros_behind;
use super::form::Numbers;
use super::primitives::Core;
use super::state::{Dirty, Held, PageState, State};
use super::types::{DamageKind, StoreError};
use lamassu_crypto::{KeyRing, Keyed, Verify};
use lamassu_format::{BlockKey, BlockNo, ByteOffset, Keys, PAGE_LEN, PageNo, SlotKey, is_compressed, is_hole};

/// Most pages that a step examines, when it re-seals pages.
const STEP_PAGES_MAX: u64 = 1024;
const STEP_SEALED_MAX: usize = 128;
/// Bytes of blocks examined in a step that re-encrypts. Large, because each R blocks of a page take two barriers, which
/// all pages of the step share.
const STEP_LEN_MAX: u64 = 32 << 20;
/// Bytes of blocks opened at once.
const CHUNK_LEN: usize = 4 << 20;
/// Bytes of a page that tell the epoch.
const HEAD_LEN: usize = lamassu_crypto::outer::HEAD_LEN;

/// What is brought to the newest keys or the new profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rekey {
    /// Pages, to the newest K_out.
    Outer,
    /// Pages and data blocks, to the newest K_out and K_in.
    Full,
    /// Pages and data blocks of a file whose profile is being changed, to that profile.
    Profile,
}

/// What a step of [`super::File::rekey`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RekeyStep {
    /// The page to go on from; `None`: the file is done.
    pub next: Option<PageNo>,
    /// How many pages the file has, at most.
    pub pages: u64,
    /// Pages that were sealed again.
    pub resealed: u64,
    /// Blocks that were encrypted again.
    pub reencrypted: u64,
    /// Pages and blocks that are damaged, and stay as they are.
    pub damaged: u64,
    /// Bytes read from the store.
    pub read: u64,
    /// Bytes written to it, without the second page write of a commit.
    pub written: u64,
}

impl Core {
    /// Re-keys pages from `from` on, as many as fit in a step.
    pub fn rekey(&self, st: &mut State, work: Rekey, from: PageNo) -> Result<RekeyStep, StoreError> {
        if work != Rekey::Profile {
            self.check_writable(st)?;
        }
        self.prepare_change(st)?;
        self.commit(st)?;
        let good = if work == Rekey::Profile { self.ctx.ring.clone() } else { self.ctx.ring.newest_inner() };
        let mut step = RekeyStep { pages: st.last_page(self.geo()).0 + 1, ..RekeyStep::default() };
        let (mut next, mut seen, mut whole, mut old) = (from, Vec::new(), Vec::new(), 0);
        while let Some(g) = self.next_page(st, next)? {
            next = g.next();
            if let PageState::Bad(kind) = self.page(st, g)? {
                let kind = *kind;
                let _ = self.damaged(kind, g, None);
                next = self.end_of_bad(st, g)?;
                step.damaged += next - g;
                continue;
            }
            seen.push(g);
            if work != Rekey::Outer {
                let before = step.damaged;
                if work == Rekey::Profile {
                    step.damaged += u64::from(st.pages.good(g).map_or(0, |held| held.lost().count_ones()));
                }
                self.gather_old_blocks(st, g, &good, &mut step)?;
                whole.extend((step.damaged == before).then_some(g));
            }
            old += usize::from(self.is_of_older_seal(g, &mut step)?);
            let pages = seen.len() as u64;
            let is_full = match work {
                Rekey::Outer => pages >= STEP_PAGES_MAX || old >= STEP_SEALED_MAX,
                Rekey::Full | Rekey::Profile => pages * self.geo().page_span() >= STEP_LEN_MAX,
            };
            if is_full {
                step.next = Some(next);
                break;
            }
        }
        self.commit(st)?;
        self.reseal_old(st, &seen, &mut step)?;
        if work != Rekey::Outer {
            self.note_changed(st, &whole, &mut step)?;
        }
        if step.next.is_none() && work != Rekey::Outer && self.needs_settle(st) {
            self.settle_now(st)?;
        }
        if work == Rekey::Full && !st.slack.is_empty() {
            self.sync_data(st)?; // frees what the store keeps of it
        }
        Ok(step)
    }

    /// Whether the page on disk is sealed under an epoch that is not the newest.
    fn is_of_older_seal(&self, g: PageNo, step: &mut RekeyStep) -> Result<bool, StoreError> {
        let mut head = [0; HEAD_LEN];
        self.read_padded(self.geo().page_offset(g), &mut head)?;
        step.read += HEAD_LEN as u64;
        let ring = &self.ctx.ring;
        Ok(ring.page_epoch(&self.geo().page_aad(ring.suite(), g), &head) != Some(ring.newest().1))
    }

    /// Writes the pages among `seen` again that are still under an older seal.
    fn reseal_old(&self, st: &mut State, seen: &[PageNo], step: &mut RekeyStep) -> Result<(), StoreError> {
        let mut old = Vec::new();
        for &g in seen {
            // A page that was removed with the end of the file does not exist any more.
            if self.is_of_older_seal(g, step)? && matches!(self.page(st, g)?, PageState::Good(_)) {
                old.push(g);
            }
        }
        if old.is_empty() {
            return Ok(());
        }
        let open = |st: &State, g: &PageNo| st.pages.good(*g).is_some_and(Held::is_open);
        if old.iter().any(|g| open(st, g)) {
            // Pending bits are resolved first: what this writes is under the newest seal.
            self.settle_now(st)?;
        }
        self.keeping_mtime(st, |core, st| {
            core.open_pages(st, old.iter().copied(), None)?;
            for g in old {
                if !matches!(core.page(st, g)?, PageState::Good(_)) || !core.is_of_older_seal(g, step)? {
                    continue;
                }
                core.settle_page(st, g)?;
                step.resealed += 1;
                step.read += PAGE_LEN as u64;
                step.written += PAGE_LEN as u64;
            }
            Ok(())
        })
    }

    /// Puts blocks of a page into the buffer, from where a commit seals them anew: those that do not verify under the
    /// keys in `good`, and those that are not in the form of the file's profile or the vault's compression.
    fn gather_old_blocks(
        &self,
        st: &mut State,
        g: PageNo,
        good: &KeyRing,
        step: &mut RekeyStep,
    ) -> Result<(), StoreError> {
        let len = self.ctx.block_len();
        let (keys, lost) = match self.good_page(st, g)? {
            Some(held) => (held.page().keys.clone(), held.lost()),
            None => return Ok(()),
        };
        let (per_chunk, forms) = ((CHUNK_LEN / len).max(1), self.forms(&st.identity));
        for (n, keys) in keys.raw().chunks(per_chunk).enumerate() {
            let first = self.geo().first_block(g) + (n * per_chunk) as u64;
            let mut wanted = Keys::from(keys);
            for i in 0..wanted.len() {
                // Buffered blocks will be written anyway.
                if lost >> (n * per_chunk + i) & 1 == 1 || st.buffer.contains(first + i as u64) {
                    wanted.set(i, &SlotKey::HOLE);
                }
            }
            let sealed = self.read_keyed(first, &wanted, step)?;
            let mut copy = sealed.clone();
            let keyed = Keyed { keys: wanted.raw(), salts: forms.salts(Numbers::From(first)) };
            let mut failed = self.ctx.engine.open(good, &mut copy, len, keyed, Verify::Full);
            self.add_otherwise_compressed(&copy, keyed, &mut failed)?;
            drop(copy);
            self.note_kept_zeros(st, first, keyed.keys, &sealed, &failed);
            let mut plain: Vec<u8> = failed.iter().flat_map(|i| &sealed[i * len..][..len]).copied().collect();
            let mut old_keys = Keys::default();
            failed.iter().filter_map(|i| wanted.get(*i)).for_each(|key| old_keys.push(&key));
            let numbers: Vec<BlockNo> = failed.iter().map(|i| first + *i as u64).collect();
            let bad = self.open_blocks(forms, &mut plain, old_keys.raw(), Numbers::Each(&numbers));
            for (at, (i, bytes)) in failed.into_iter().zip(plain.chunks_exact(len)).enumerate() {
                let block = first + i as u64;
                if bad.binary_search(&at).is_ok() {
                    let _ = self.damaged(DamageKind::BlockHash, g, Some(block));
                    step.damaged += 1;
                    continue;
                }
                let mut bytes = Block::of(bytes);
                let inside = st.sizes.logical().saturating_sub(self.geo().block_start(block)).min(len as u64) as usize;
                bytes[inside..].fill(0);
                st.buffer.put(block, Dirty::Data(bytes), false);
                step.reencrypted += 1;
                step.written += len as u64;
            }
            if (st.buffer.len() * len) as u64 >= STEP_LEN_MAX {
                self.commit(st)?;
            }
        }
        Ok(())
    }

    /// Notes the zeros behind compressed blocks that stay as they are, if the store keeps them: a copy may have written
    /// them. `changing`: indices of blocks that do not stay.
    fn note_kept_zeros(&self, st: &mut State, first: BlockNo, keys: &[BlockKey], sealed: &[u8], changing: &[usize]) {
        let (suite, len) = (self.ctx.ring.suite(), self.ctx.block_len());
        if len <= PAGE_LEN {
            return;
        }
        for (i, (key, bytes)) in keys.iter().zip(sealed.chunks_exact(len)).enumerate() {
            if !is_compressed(suite, key) || changing.binary_search(&i).is_ok() {
                continue;
            }
            let end = self.geo().block_offset(first + i as u64) + len as u64;
            let zeros = ByteOffset(end.0 - zeros_behind(bytes) as u64)..end;
            if !zeros.is_empty() {
                self.note_if_kept(st, zeros);
            }
        }
    }

    /// Adds to `found` those opened blocks that would get other keys if they were sealed now, because of another
    /// compression. If neither new nor old blocks are compressed, nothing is sealed to find out.
    fn add_otherwise_compressed(
        &self,
        opened: &[u8],
        keyed: Keyed<'_>,
        found: &mut Vec<usize>,
    ) -> Result<(), StoreError> {
        let (suite, len) = (self.ctx.ring.suite(), self.ctx.block_len());
        if self.ctx.compression.is_none() && !keyed.keys.iter().any(|key| is_compressed(suite, key)) {
            return Ok(());
        }
        let (mut sealed, mut keys) = (vec![0; opened.len()], Keys::holes(keyed.keys.len()));
        self.ctx.engine.seal_to(&self.ctx.ring.inner(), keyed.salts, opened, &mut sealed, len, keys.raw_mut())?;
        let is_other = |i: &usize| !is_hole(&keyed.keys[*i]) && keyed.keys[*i] != keys.raw()[*i];
        let failed = std::mem::take(found);
        // Blocks that failed to open are zeros here.
        let others = (0..keyed.keys.len()).filter(|i| failed.binary_search(i).is_ok() || is_other(i));
        found.extend(others);
        Ok(())
    }

    /// Ciphertext of blocks from `first` on; of those whose key is a hole's, zeros.
    fn read_keyed(&self, first: BlockNo, keys: &Keys, step: &mut RekeyStep) -> Result<Vec<u8>, StoreError> {
        let len = self.ctx.block_len();
        let mut bytes = vec![0; keys.len() * len];
        let mut at = 0;
        while at < keys.len() {
            if keys.is_hole(at) {
                at += 1;
                continue;
            }
            let from = at;
            at += 1;
            while at < keys.len() && keys.is_keyed(at) && self.continues(first + from as u64, (at - from) as u64) {
                at += 1;
            }
            self.read_padded(self.geo().block_offset(first + from as u64), &mut bytes[from * len..at * len])?;
            step.read += ((at - from) * len) as u64;
        }
        Ok(bytes)
    }
}
