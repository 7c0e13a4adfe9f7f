//! The cipher engine: batches of blocks over a bounded worker pool; the submitting thread works too.
//!
//! A batch is cut into chunks. The submitting thread takes chunks until none is left; so do idle workers (`pool`). A
//! submitter never waits for another batch, nor for a worker that has not begun. A small batch never leaves its thread.
//! Workers stay idle while as many threads submit as the engine has: more threads than processors would only take
//! turns. A panic in a worker reaches the submitter as a panic.
//!
//! An accelerator replaces the pool through [`device`]: [`Engine::with_device`].

pub mod device;
#[cfg(test)]
mod device_tests;
#[cfg(any(test, feature = "measure"))]
pub mod loop_back;
#[cfg(test)]
mod model;
mod oblivious;
mod pool;
#[cfg(test)]
mod pool_tests;
mod sync;
#[cfg(test)]
mod tests;

use crate::compress;
use crate::inner::{Group, Lens, check_shape};
use crate::kernel::{GROUP, Kernel};
use crate::oblivious::NotEvaluated;
use crate::secret::without_trace;
use crate::stages::{Stage, timed};
use crate::{BlockKey, InnerKey, KeyRing, Keyed, Salts};
use device::{Device, Opening, open_on, seal_on};
use lamassu_format::{BlockNo, is_compressed, is_hole};
use parking_lot::Mutex;
use pool::{Pool, Side};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use subtle::{Choice, ConstantTimeEq};
use zeroize::Zeroizing;

/// How much a read checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// Decrypt, re-hash, compare (L7 `full`).
    Full,
    /// Decrypt alone. Compressed blocks are verified nevertheless: a decompressor gets only authentic data.
    No,
}

/// Bytes of a chunk of small blocks: 16 of 4 KiB, one lane group. A batch of one chunk stays on its thread, since
/// handing it over would take longer.
const CHUNK_BYTES: usize = 64 << 10;
/// A pool of cipher workers.
pub struct Engine {
    pool: Pool,
    kernel: Kernel,
    /// Threads at work now, submitters included.
    busy: AtomicUsize,
    device: Option<Arc<dyn Device>>,
}

impl Engine {
    /// `threads` in all, including the submitting thread; at least 1. There are fewer if the system refuses some: see
    /// [`Engine::threads`].
    pub fn new(threads: usize) -> Self {
        Self::with_kernel(threads, Kernel::best())
    }

    /// The same, with a kernel to open with. (Sealing uses the kernel of its key.)
    pub fn with_kernel(threads: usize, kernel: Kernel) -> Self {
        Engine { pool: Pool::new(threads.max(1) - 1), kernel, busy: AtomicUsize::new(0), device: None }
    }

    /// An engine whose batches go to a device. Each submitting thread serves the device itself.
    pub fn with_device(device: Arc<dyn Device>) -> Self {
        Engine { device: Some(device), ..Self::new(1) }
    }

    /// Threads that work on one batch, the submitting thread included.
    pub fn threads(&self) -> usize {
        self.pool.workers() + 1
    }

    /// Derives keys and encrypts a batch in place.
    ///
    /// # Errors
    /// [`NotEvaluated`], if the epoch of the key is oblivious: the blocks are zeros then.
    ///
    /// # Panics
    /// Unless `blocks.len() == keys.len() * block_size`.
    pub fn seal(
        &self,
        key: &Arc<InnerKey>,
        salts: Salts<'_>,
        blocks: &mut [u8],
        block_size: usize,
        keys: &mut [BlockKey],
    ) -> Result<(), NotEvaluated> {
        self.seal_fetched(key, salts, blocks, block_size, keys, |_, _| {})
    }

    /// [`Engine::seal`] of `plain` into `sealed`, of the same length. `plain` is read once, so a concurrent change of
    /// it never makes ciphertext differ from what was hashed.
    ///
    /// # Errors
    /// As [`Engine::seal`].
    ///
    /// # Panics
    /// Unless both are `keys.len() * block_size` bytes.
    pub fn seal_to(
        &self,
        key: &Arc<InnerKey>,
        salts: Salts<'_>,
        plain: &[u8],
        sealed: &mut [u8],
        block_size: usize,
        keys: &mut [BlockKey],
    ) -> Result<(), NotEvaluated> {
        check_shape(plain.len(), block_size, keys.len());
        let fetch = |first: usize, blocks: &mut [u8]| {
            blocks.copy_from_slice(&plain[first * block_size..][..blocks.len()]);
        };
        self.seal_fetched(key, salts, sealed, block_size, keys, fetch)
    }

    /// [`Engine::seal`] of a batch that is not in memory yet. `fetch` gets the index of the first of some blocks, and
    /// writes their plaintext into place, as in [`Engine::open_fetched`].
    ///
    /// # Errors
    /// As [`Engine::seal`].
    ///
    /// # Panics
    /// Unless `blocks.len() == keys.len() * block_size`.
    pub fn seal_fetched(
        &self,
        key: &Arc<InnerKey>,
        salts: Salts<'_>,
        blocks: &mut [u8],
        block_size: usize,
        keys: &mut [BlockKey],
        fetch: impl Fn(usize, &mut [u8]) + Sync,
    ) -> Result<(), NotEvaluated> {
        check_shape(blocks.len(), block_size, keys.len());
        if let Some(oblivious) = key.oblivious().filter(|_| !salts.is_plain()) {
            return self.seal_obliviously((key, oblivious), salts, blocks, block_size, keys, fetch);
        }
        let (bytes, per_chunk) = (blocks.len(), self.blocks_per_chunk(block_size, keys.len()));
        let chunks = blocks.chunks_mut(per_chunk * block_size).zip(keys.chunks_mut(per_chunk));
        if let Some(device) = &self.device {
            seal_on(&**device, key, salts, chunks.collect(), (block_size, per_chunk), fetch);
            return Ok(());
        }
        self.each(bytes, per_chunk * block_size, chunks.enumerate(), |(n, (blocks, keys))| {
            fetch(n * per_chunk, blocks);
            key.seal(salts.skip(n * per_chunk), blocks, block_size, keys);
        });
        Ok(())
    }

    /// Decrypts a batch in place and verifies it under any K_in epoch of `ring`. Returns the indices of the blocks that
    /// failed, ascending; their bytes in `blocks` are zeroed. Blocks with an all-zero key are zeroed and never fail.
    /// Blocks whose keys mark them as compressed (§10) are decompressed. A plain block whose key has the mark fails. In
    /// a malleable suite every encrypted block is verified, whatever `verify` says.
    ///
    /// # Panics
    /// Unless `blocks.len() == keys.len() * block_size`.
    pub fn open(
        &self,
        ring: &KeyRing,
        blocks: &mut [u8],
        block_size: usize,
        keyed: Keyed<'_>,
        verify: Verify,
    ) -> Vec<usize> {
        let verify = allowed(ring, keyed, verify);
        self.open_as_told(ring, blocks, block_size, keyed, verify)
    }

    /// [`Engine::open`] of a batch that is not in memory yet. `fetch` gets the index of the first of some blocks, and
    /// writes their ciphertext into place. It runs just before these blocks are opened, on the same thread, so that
    /// they are still in that processor's cache. It may leave out blocks with an all-zero key. If it fails, the batch
    /// fails with the error of the lowest blocks that were tried, and the content of `blocks` is undefined.
    ///
    /// # Panics
    /// Unless `blocks.len() == keys.len() * block_size`.
    pub fn open_fetched<E: Send>(
        &self,
        ring: &KeyRing,
        blocks: &mut [u8],
        block_size: usize,
        keyed: Keyed<'_>,
        verify: Verify,
        fetch: impl Fn(usize, &mut [u8]) -> Result<(), E> + Sync,
    ) -> Result<Vec<usize>, E> {
        let verify = allowed(ring, keyed, verify);
        self.fetch_and_open(ring, blocks, block_size, keyed, verify, fetch)
    }

    /// [`Engine::open`] that also skips verification in a malleable suite, to measure decryption alone.
    pub(crate) fn open_as_told(
        &self,
        ring: &KeyRing,
        blocks: &mut [u8],
        block_size: usize,
        keyed: Keyed<'_>,
        verify: Verify,
    ) -> Vec<usize> {
        let Ok(failed) = self.fetch_and_open(ring, blocks, block_size, keyed, verify, |_, _| Ok::<(), Infallible>(()));
        failed
    }

    fn fetch_and_open<E: Send>(
        &self,
        ring: &KeyRing,
        blocks: &mut [u8],
        block_size: usize,
        keyed: Keyed<'_>,
        verify: Verify,
        fetch: impl Fn(usize, &mut [u8]) -> Result<(), E> + Sync,
    ) -> Result<Vec<usize>, E> {
        let Keyed { keys, salts } = keyed;
        check_shape(blocks.len(), block_size, keys.len());
        let (bytes, per_chunk) = (blocks.len(), self.blocks_per_chunk(block_size, keys.len()));
        let chunks = blocks.chunks_mut(per_chunk * block_size).zip(keys.chunks(per_chunk));
        if let Some(device) = &self.device {
            let how = Opening { kernel: self.kernel, ring, verify, salts, block_size, per_chunk };
            return open_on(&**device, &how, chunks.collect(), fetch);
        }
        let failed = Mutex::new(Vec::new());
        let error: Mutex<Option<(usize, E)>> = Mutex::new(None);
        self.each(bytes, per_chunk * block_size, chunks.enumerate(), |(n, (blocks, keys))| {
            if let Err(e) = fetch(n * per_chunk, blocks) {
                let mut error = error.lock();
                if error.as_ref().is_none_or(|(lowest, _)| n < *lowest) {
                    *error = Some((n, e));
                }
                return;
            }
            let (first, salts) = (n * per_chunk, salts.skip(n * per_chunk));
            let fail = |i| failed.lock().push(first + i);
            open_blocks(self.kernel, ring, blocks, block_size, Keyed { keys, salts }, verify, fail);
        });
        if let Some((_, error)) = error.into_inner() {
            return Err(error);
        }
        let mut failed = failed.into_inner();
        failed.sort_unstable();
        Ok(failed)
    }

    /// [`CHUNK_BYTES`] of small blocks. Of larger blocks, as many as the widest kernel has lanes, if every thread gets
    /// as many: one block alone takes four times as long to hash and seal as in lanes, while lanes of long blocks only
    /// lose the nearest cache. For a device, two jobs of half the lanes, of which one is prepared while the other is
    /// worked on, were no faster than one.
    fn blocks_per_chunk(&self, block_size: usize, count: usize) -> usize {
        let lanes = count.div_ceil(self.threads()).min(GROUP);
        let most = self.device.as_deref().map_or(usize::MAX, Device::blocks_max);
        (CHUNK_BYTES / block_size).max(lanes).min(most).max(1)
    }

    /// Does `work` for every chunk, on this thread and on idle workers, up to the number of threads of the engine.
    fn each<T: Send>(
        &self,
        bytes: usize,
        chunk_bytes: usize,
        chunks: impl Iterator<Item = T> + Send,
        work: impl Fn(T) + Sync,
    ) {
        let _busy = Busy::enter(&self.busy);
        let helpers = bytes.div_ceil(chunk_bytes).saturating_sub(1);
        let helpers = helpers.min(self.threads().saturating_sub(self.busy.load(Ordering::Relaxed)));
        // Kernels leave block keys on the stack of the thread that ran them.
        if helpers == 0 {
            return without_trace(|| chunks.for_each(work));
        }
        let queue = Mutex::new(chunks);
        self.pool.run(helpers, &|side| {
            let _busy = (side == Side::Worker).then(|| Busy::enter(&self.busy));
            without_trace(|| {
                loop {
                    if side == Side::Worker && self.busy.load(Ordering::Relaxed) > self.threads() {
                        break; // other threads have begun to submit
                    }
                    let Some(chunk) = queue.lock().next() else { break };
                    work(chunk);
                }
            });
        });
    }
}

/// The verification that is actually done: blocks of a malleable cipher are always verified.
fn allowed(ring: &KeyRing, keyed: Keyed<'_>, verify: Verify) -> Verify {
    if ring.suite().is_malleable() && !keyed.salts.is_plain() { Verify::Full } else { verify }
}

/// Counts a thread as busy for its own lifetime.
struct Busy<'a>(&'a AtomicUsize);

impl<'a> Busy<'a> {
    fn enter(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Busy(count)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Opens any number of blocks; calls `fail` for each that fails, ascending.
fn open_blocks(
    kernel: Kernel,
    ring: &KeyRing,
    blocks: &mut [u8],
    block_size: usize,
    keyed: Keyed<'_>,
    verify: Verify,
    mut fail: impl FnMut(usize),
) {
    let groups = blocks.chunks_mut(GROUP * block_size).zip(keyed.keys.chunks(GROUP)).enumerate();
    for (first, (blocks, keys)) in groups.map(|(g, group)| (g * GROUP, group)) {
        let keyed = Keyed { keys, salts: keyed.salts.skip(first) };
        open_group(kernel, ring, blocks, block_size, keyed, verify, |i| fail(first + i));
    }
}

/// Opens at most [`GROUP`] blocks; calls `fail` for each that fails, ascending.
fn open_group(
    kernel: Kernel,
    ring: &KeyRing,
    blocks: &mut [u8],
    block_size: usize,
    keyed: Keyed<'_>,
    verify: Verify,
    mut fail: impl FnMut(usize),
) {
    let (suite, keys, is_plain) = (ring.cipher_suite(), keyed.keys, keyed.salts.is_plain());
    let cipher = suite.cipher(keyed.salts.method());
    let mut live = [0usize; GROUP];
    let mut live_count = 0;
    // In blocks that are not compressed, all bytes are ciphertext.
    let mut lens = Lens::whole(block_size);
    let decrypt = |(i, (block, key)): (usize, (&mut [u8], &BlockKey))| {
        let is_compressed = is_compressed(suite.id, key);
        if is_hole(key) {
            block.fill(0);
        } else if is_plain && is_compressed {
            block.fill(0);
            fail(i);
        } else {
            if is_compressed {
                lens.set(i, compress::stored_len(block));
            }
            if !is_plain {
                cipher.decrypt(kernel, key, &mut block[..lens.at(i)]);
            }
            if verify == Verify::Full || is_compressed {
                live[live_count] = i;
                live_count += 1;
            }
        }
    };
    timed(Stage::Decrypt, || blocks.chunks_exact_mut(block_size).zip(keys).enumerate().for_each(decrypt));
    let live = &live[..live_count];
    if live.is_empty() {
        return;
    }
    let verified = timed(Stage::Key, || verify_blocks(ring, blocks, &lens, keyed, live));
    for (&i, verified) in live.iter().zip(verified) {
        let block = &mut blocks[i * block_size..][..block_size];
        // Only payloads that a holder of the keys made are decompressed.
        let unpack = |block: &mut [u8]| timed(Stage::Compress, || compress::unpack(block, lens.at(i)).is_ok());
        if !bool::from(verified) || (is_compressed(suite.id, &keys[i]) && !unpack(block)) {
            block.fill(0);
            fail(i);
        }
    }
}

/// Which of the `live` blocks have the key that some K_in epoch gives to their plaintext.
fn verify_blocks(ring: &KeyRing, blocks: &[u8], lens: &Lens, keyed: Keyed<'_>, live: &[usize]) -> [Choice; GROUP] {
    let all = lens.of(blocks);
    let plain = Group::of(live.iter().map(|&i| all.as_slice()[i]));
    let suite = ring.cipher_suite();
    let mut numbers = [BlockNo::ZERO; GROUP];
    let salts = keyed.salts.pick(live, &mut numbers[..live.len()]);
    let method = salts.method();
    let mut verified = [Choice::from(0); GROUP];
    let mut hashes = Zeroizing::new([[0u8; 32]; GROUP]);
    let mut derived = Zeroizing::new([[0u8; 32]; GROUP]);
    for (round, (epoch, inner)) in ring.inners_by_last_hit().enumerate() {
        if round == 0 || inner.is_hash_keyed(method) {
            inner.hash_group(method, plain.as_slice(), &mut hashes[..live.len()]);
        }
        let stored = live.iter().map(|&i| &keyed.keys[i]);
        inner.expected_keys(&hashes[..live.len()], salts, stored, &mut derived[..live.len()]);
        let is_marked = |i: usize| is_compressed(suite.id, &keyed.keys[i]);
        let marked = derived.iter_mut().zip(live).filter(|(_, i)| is_marked(**i));
        marked.for_each(|(key, _)| suite.mark_compressed(key));
        let mut hit = Choice::from(0);
        for ((v, d), &i) in verified.iter_mut().zip(derived.iter()).zip(live) {
            let equal = are_equal(d, &keyed.keys[i]);
            hit |= equal;
            *v |= equal;
        }
        if hit.into() {
            ring.note_hit(epoch);
        }
        if verified[..live.len()].iter().fold(Choice::from(1), |all, v| all & *v).into() {
            break;
        }
    }
    verified
}

/// Compares in constant time, in words: byte by byte it shows in profiles.
fn are_equal(a: &BlockKey, b: &BlockKey) -> Choice {
    let word = |w: &[u8; 8]| u64::from_ne_bytes(*w);
    let pairs = a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0);
    pairs.fold(0, |difference, (a, b)| difference | (word(a) ^ word(b))).ct_eq(&0)
}
