//! Blocks that are sealed on their way into the buffer, outside the lock of the file: large writes are sealed in
//! parallel, and the commit finds ciphertext. Smaller writes are buffered as plaintext and sealed by the commit, since
//! they may well be written again before it.

use super::form::is_salted;
use super::primitives::Core;
use super::state::Identity;
use super::types::{FileContext, StoreError};
use lamassu_crypto::InnerKey;
use lamassu_crypto::secret::wipe;
use lamassu_format::{BlockKey, BlockNo, FileId, Keys, Profile};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A write of at least this many bytes of whole blocks is sealed before the commit: enough for full lanes of the cipher
/// engine.
const PRESEAL_LEN_MIN: u64 = 64 << 10;

/// Bytes of chunk memory kept for reuse, as many as a file buffers: fresh memory of that size costs a page fault for
/// every 4096 bytes.
const SPARE_LEN_MAX: usize = 64 << 20;
/// Memory that was not needed for this time is freed.
const SPARE_FOR: Duration = Duration::from_secs(2);

/// Chunk memory that is not in use. It still holds its last content: ciphertext, or plaintext of a profile that does
/// not encrypt. So it is wiped before it is freed.
static SPARE: Mutex<Spare> = Mutex::new(Spare { memory: Vec::new(), len: 0, unused: 0, since: None });

struct Spare {
    memory: Vec<Vec<u8>>,
    /// Bytes in all.
    len: usize,
    /// The least number of spare bytes since then.
    unused: usize,
    since: Option<Instant>,
}

/// Ciphertext of blocks that were written together, and their keys.
struct Chunk {
    memory: Vec<u8>,
    keys: Keys,
    /// Bytes of chunks that live for the same file.
    living: Arc<AtomicUsize>,
}

impl Chunk {
    fn new(len: usize, blocks: usize, living: &Arc<AtomicUsize>) -> Chunk {
        let mut memory = SPARE.lock().take(len).unwrap_or_default();
        if memory.len() < len {
            memory.resize(len, 0);
        }
        living.fetch_add(memory.len(), Ordering::Relaxed);
        Chunk { memory, keys: Keys::holes(blocks), living: living.clone() }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.living.fetch_sub(self.memory.len(), Ordering::Relaxed);
        SPARE.lock().put(std::mem::take(&mut self.memory));
    }
}

impl Spare {
    fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        // Not much more than needed: all memory of a chunk counts as buffered.
        let at = self.memory.iter().rposition(|m| (len..=2 * len).contains(&m.len()))?;
        let memory = self.memory.remove(at);
        self.len -= memory.len();
        self.unused = self.unused.min(self.len);
        Some(memory)
    }

    /// Memory that was not needed since the last call, if that is long enough ago.
    fn take_unused(&mut self, now: Instant) -> Vec<Vec<u8>> {
        if self.since.is_some_and(|since| now.saturating_duration_since(since) < SPARE_FOR) {
            return Vec::new();
        }
        let mut unused = Vec::new();
        // The oldest first: the newest are used first.
        while self.unused > 0 && !self.memory.is_empty() {
            let memory = self.memory.remove(0);
            self.len -= memory.len();
            self.unused = self.unused.saturating_sub(memory.len());
            unused.push(memory);
        }
        (self.unused, self.since) = (self.len, Some(now));
        unused
    }

    fn put(&mut self, memory: Vec<u8>) {
        while !self.memory.is_empty() && self.len + memory.len() > SPARE_LEN_MAX {
            let oldest = self.memory.remove(0);
            self.len -= oldest.len();
            free(oldest);
        }
        if memory.len() <= SPARE_LEN_MAX {
            self.len += memory.len();
            self.memory.push(memory);
        } else {
            free(memory);
        }
    }

    fn take_all(&mut self) -> Vec<Vec<u8>> {
        (self.len, self.unused) = (0, 0);
        std::mem::take(&mut self.memory)
    }
}

/// Frees chunk memory that has not been needed lately. To be called every few seconds.
pub fn trim_spare() {
    let unused = SPARE.lock().take_unused(Instant::now());
    unused.into_iter().for_each(free);
}

/// Wipes spare memory of chunks and of blocks, and frees it. To be called when a vault is closed: it may never be used
/// again.
pub fn wipe_spare() {
    super::block::wipe_spare();
    let all = SPARE.lock().take_all();
    all.into_iter().for_each(free);
}

fn free(mut memory: Vec<u8>) {
    wipe(&mut memory);
}

/// A buffered block, sealed already.
#[derive(Clone)]
pub(super) struct SealedBlock {
    chunk: Arc<Chunk>,
    start: usize,
    /// Which of the chunk's blocks.
    n: usize,
}

impl SealedBlock {
    pub fn key(&self) -> &BlockKey {
        &self.chunk.keys.raw()[self.n]
    }

    /// Its ciphertext; if `len` is more than a block, also that of the blocks behind it in its chunk.
    pub fn bytes(&self, len: usize) -> &[u8] {
        &self.chunk.memory[self.start..][..len]
    }

    /// Whether it lies right behind another of `len` bytes.
    pub fn follows(&self, other: &SealedBlock, len: usize) -> bool {
        self.start == other.start + len && Arc::ptr_eq(&self.chunk, &other.chunk)
    }
}

/// The whole blocks of one write, sealed.
#[derive(Default)]
pub(super) struct Presealed {
    /// The id of the file that the blocks were sealed for, if their keys depend on it.
    file_id: FileId,
    /// Its profile.
    profile: Profile,
    first: BlockNo,
    chunk: Option<Arc<Chunk>>,
    /// The K_in that they were sealed under.
    inner: Option<Arc<InnerKey>>,
}

impl Presealed {
    /// Whether they were sealed for this file (its id and profile, if these matter) and under the newest K_in. The file
    /// may have been emptied since, and a re-keying may already have passed their place.
    pub fn is_for(&self, ctx: &FileContext, identity: &Identity) -> bool {
        let Some(inner) = &self.inner else { return true };
        let is_same = !is_salted(ctx, self.profile) || self.file_id == identity.id();
        Arc::ptr_eq(inner, &ctx.ring.inner()) && self.profile == identity.profile() && is_same
    }

    /// Block `b`, if it is among them. `len` is the block size.
    pub fn block(&self, b: BlockNo, len: usize) -> Option<SealedBlock> {
        let n = usize::try_from(b.0.checked_sub(self.first.0)?).ok()?;
        let chunk = self.chunk.as_ref()?;
        (n < chunk.keys.len()).then(|| SealedBlock { chunk: chunk.clone(), start: n * len, n })
    }
}

impl Core {
    /// Seals the whole blocks of a write, if they are enough, for the file that `identity` names; needs no lock.
    /// `living` counts the bytes of chunks of the file.
    pub fn preseal(
        &self,
        offset: u64,
        data: &[u8],
        living: &Arc<AtomicUsize>,
        identity: impl FnOnce() -> Result<(FileId, Profile), StoreError>,
    ) -> Result<Presealed, StoreError> {
        let geo = self.geo();
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= geo.size_max());
        let (first, end) = (geo.end_block(offset), geo.block_at(end.ok_or(StoreError::TooLarge)?));
        let count = end.0.saturating_sub(first.0);
        if self.ctx.read_only || count * geo.block_size() < PRESEAL_LEN_MIN {
            return Ok(Presealed::default());
        }
        let (file_id, profile) = identity()?;
        let len = self.ctx.block_len();
        let plain = &data[(geo.block_start(first) - offset) as usize..][..count as usize * len];
        let mut chunk = Chunk::new(plain.len(), count as usize, living);
        let (key, salts) = (self.ctx.ring.inner(), self.salts(file_id, profile, first));
        let sealed = &mut chunk.memory[..plain.len()];
        self.ctx.engine.seal_to(&key, salts, plain, sealed, len, chunk.keys.raw_mut())?;
        Ok(Presealed { file_id, profile, first, chunk: Some(Arc::new(chunk)), inner: Some(key) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_spare_memory_is_given_back() {
        let mut spare = Spare { memory: Vec::new(), len: 0, unused: 0, since: None };
        let start = Instant::now();
        let at = |rounds: u32| start + rounds * SPARE_FOR;
        let sizes = |given: Vec<Vec<u8>>| given.iter().map(Vec::len).collect::<Vec<_>>();
        (1..=4).for_each(|n| spare.put(vec![0; n * 1000]));
        assert!(spare.take_unused(at(0)).is_empty(), "put a moment ago");
        let taken = spare.take(4000).expect("there is one");
        spare.put(taken);
        assert!(spare.take_unused(at(1) - Duration::from_millis(1)).is_empty(), "too soon");
        assert_eq!(sizes(spare.take_unused(at(1))), [1000, 2000, 3000], "all but what was taken");
        assert_eq!(sizes(spare.take_unused(at(2))), [4000]);
        assert!(spare.memory.is_empty() && spare.len == 0 && spare.take(1).is_none());
        spare.put(vec![0; 1000]);
        assert_eq!(sizes(spare.take_all()), [1000]);
        assert!(spare.len == 0 && spare.take(1).is_none() && spare.take_unused(at(4)).is_empty());
    }
}
