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
mod pool;
#[cfg(test)]
mod pool_tests;
mod sync;

use crate::inner::{GROUP, Group, check_shape};
use crate::kernel::Kernel;
use crate::secret::without_trace;
use crate::stages::{Stage, timed};
use crate::{BlockKey, InnerKey, KeyRing, Keyed, Salts};
use device::{Device, Opening, open_on, seal_on};
use lamassu_format::BlockNo;
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
    /// Decrypt alone.
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
    /// # Panics
    /// Unless `blocks.len() == keys.len() * block_size`.
    pub fn seal(
        &self,
        key: &Arc<InnerKey>,
        salts: Salts<'_>,
        blocks: &mut [u8],
        block_size: usize,
        keys: &mut [BlockKey],
    ) {
        self.seal_fetched(key, salts, blocks, block_size, keys, |_, _| {});
    }

    /// [`Engine::seal`] of `plain` into `sealed`, of the same length. `plain` is read once, so a concurrent change of
    /// it never makes ciphertext differ from what was hashed.
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
    ) {
        check_shape(plain.len(), block_size, keys.len());
        let fetch = |first: usize, blocks: &mut [u8]| {
            blocks.copy_from_slice(&plain[first * block_size..][..blocks.len()]);
        };
        self.seal_fetched(key, salts, sealed, block_size, keys, fetch);
    }

    /// [`Engine::seal`] of a batch that is not there yet. `fetch` gets the index of the first of some blocks, and
    /// brings their plaintext into place, as in [`Engine::open_fetched`].
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
    ) {
        check_shape(blocks.len(), block_size, keys.len());
        let (bytes, per_chunk) = (blocks.len(), self.blocks_per_chunk(block_size, keys.len()));
        let chunks = blocks.chunks_mut(per_chunk * block_size).zip(keys.chunks_mut(per_chunk));
        if let Some(device) = &self.device {
            return seal_on(&**device, key, salts, chunks.collect(), (block_size, per_chunk), fetch);
        }
        self.each(bytes, per_chunk * block_size, chunks.enumerate(), |(n, (blocks, keys))| {
            fetch(n * per_chunk, blocks);
            key.seal(salts.skip(n * per_chunk), blocks, block_size, keys);
        });
    }

    /// Decrypts a batch in place and verifies it under any K_in epoch of `ring`. Returns the indices of the blocks that
    /// failed, ascending; their bytes in `blocks` are zeroed. Blocks with an all-zero key are zeroed and never fail. A
    /// key that the suite cannot have derived (its last bit is set, §10) fails. In a malleable suite every block is
    /// verified, whatever `verify` says.
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
        let verify = if ring.suite().is_malleable() { Verify::Full } else { verify };
        self.open_as_told(ring, blocks, block_size, keyed, verify)
    }

    /// [`Engine::open`] of a batch that is not there yet. `fetch` gets the index of the first of some blocks, and
    /// brings their ciphertext into place. It runs just before these blocks are opened, on the same thread, so that
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
        let verify = if ring.suite().is_malleable() { Verify::Full } else { verify };
        self.fetch_and_open(ring, blocks, block_size, keyed, verify, fetch)
    }

    /// [`Engine::open`] that skips verification in a malleable suite too, to measure decryption alone.
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
    let (suite, keys) = (ring.cipher_suite(), keyed.keys);
    let mut live = [0usize; GROUP];
    let mut live_count = 0;
    let decrypt = |(i, (block, key)): (usize, (&mut [u8], &BlockKey))| {
        if *key == [0; 32] {
            block.fill(0);
        } else if !suite.is_possible(key) {
            block.fill(0);
            fail(i);
        } else {
            suite.cipher.decrypt(kernel, key, block);
            live[live_count] = i;
            live_count += 1;
        }
    };
    timed(Stage::Decrypt, || blocks.chunks_exact_mut(block_size).zip(keys).enumerate().for_each(decrypt));
    let live = &live[..live_count];
    if verify == Verify::No || live.is_empty() {
        return;
    }
    let verified = timed(Stage::Key, || verify_blocks(ring, blocks, block_size, keyed, live));
    for (&i, verified) in live.iter().zip(verified) {
        if !bool::from(verified) {
            blocks[i * block_size..][..block_size].fill(0);
            fail(i);
        }
    }
}

/// Which of the `live` blocks have the key that some K_in epoch gives to their plaintext.
fn verify_blocks(
    ring: &KeyRing,
    blocks: &[u8],
    block_size: usize,
    keyed: Keyed<'_>,
    live: &[usize],
) -> [Choice; GROUP] {
    let plain = Group::of(live.iter().map(|&i| &blocks[i * block_size..][..block_size]));
    let mut numbers = [BlockNo::ZERO; GROUP];
    let salts = keyed.salts.pick(live, &mut numbers[..live.len()]);
    let mut verified = [Choice::from(0); GROUP];
    let mut hashes = Zeroizing::new([[0u8; 32]; GROUP]);
    let mut derived = Zeroizing::new([[0u8; 32]; GROUP]);
    for (round, (epoch, inner)) in ring.inners_by_last_hit().enumerate() {
        if round == 0 || inner.is_hash_keyed() {
            inner.hash_group(plain.as_slice(), &mut hashes[..live.len()]);
        }
        inner.keys_of_hashes(&hashes[..live.len()], salts, &mut derived[..live.len()]);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Secret, Suite};
    use lamassu_format::{Domain, FileId};
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn ring(suite: Suite, inner: &[u8]) -> KeyRing {
        let inner: Vec<_> = inner.iter().map(|&b| Secret::new(&mut [b; 32])).collect();
        KeyRing::new(suite, &inner, &[Secret::new(&mut [1; 32])])
    }

    fn pattern(len: usize, seed: u8) -> Vec<u8> {
        let mut out = vec![0; len];
        blake3::Hasher::new_keyed(&[seed; 32]).finalize_xof().fill(&mut out);
        out
    }

    fn suites() -> impl Strategy<Value = Suite> {
        proptest::sample::select(&Suite::ALL[..])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_is_sealed_opens(suite in suites(), count in 0usize..90, log2 in 12u32..15, threads in 1usize..4, seed: u8) {
            let block_size = 1 << log2;
            let engine = Engine::new(threads);
            let ring = ring(suite, &[9]);
            let plain = pattern(count * block_size, seed);
            let mut blocks = plain.clone();
            let mut keys = vec![[0; 32]; count];
            engine.seal(&ring.inner(), Salts::EMPTY, &mut blocks, block_size, &mut keys);
            prop_assert!(count == 0 || blocks != plain);
            for verify in [Verify::Full, Verify::No] {
                let mut opened = blocks.clone();
                prop_assert!(engine.open(&ring, &mut opened, block_size, Keyed::unsalted(&keys), verify).is_empty());
                prop_assert!(opened == plain);
            }
        }

        #[test]
        fn every_damaged_block_is_named_and_zeroed(suite in suites(), damaged in proptest::collection::btree_set(0usize..70, 0..12), at in 0usize..4096) {
            let ring = ring(suite, &[9, 8]);
            let plain = pattern(70 * 4096, 3);
            let mut blocks = plain.clone();
            let mut keys = vec![[0; 32]; 70];
            let engine = Engine::new(2);
            engine.seal(&ring.inner(), Salts::EMPTY, &mut blocks, 4096, &mut keys);
            damaged.iter().for_each(|i| blocks[i * 4096 + at] ^= 0x10);
            let failed = engine.open(&ring, &mut blocks, 4096, Keyed::unsalted(&keys), Verify::Full);
            prop_assert_eq!(&failed, &damaged.iter().copied().collect::<Vec<_>>());
            for (i, (b, p)) in blocks.chunks(4096).zip(plain.chunks(4096)).enumerate() {
                let as_expected = if damaged.contains(&i) { b.iter().all(|&x| x == 0) } else { b == p };
                prop_assert!(as_expected);
            }
        }
    }

    #[test]
    fn blocks_of_every_epoch_open_and_of_unknown_epochs_fail() {
        for suite in Suite::ALL {
            let (all, unknown) = (ring(suite, &[5, 6, 7]), ring(suite, &[8]));
            let plain = pattern(40 * 4096, 1);
            let mut blocks = plain.clone();
            let mut keys = vec![[0; 32]; 40];
            for (i, (b, k)) in blocks.chunks_mut(4096).zip(&mut keys).enumerate() {
                let epoch = i * 7 % 4;
                let key = all.inners().get(epoch).cloned().unwrap_or_else(|| unknown.inner());
                key.seal(Salts::EMPTY, b, 4096, std::slice::from_mut(k));
            }
            let failed = Engine::new(2).open(&all, &mut blocks, 4096, Keyed::unsalted(&keys), Verify::Full);
            let expected: Vec<usize> = (0..40).filter(|i| i * 7 % 4 == 3).collect();
            assert_eq!(failed, expected, "{suite:?}");
        }
    }

    /// Equal blocks, some of them holes, in three chunks: each opens in its own place only, or wherever its domain
    /// makes no difference.
    #[test]
    fn a_block_opens_under_the_salt_it_was_sealed_with() {
        const FIRST: BlockNo = BlockNo(1000);
        let (one, other) = (FileId([1; 16]), FileId([2; 16]));
        for (suite, domain) in
            Suite::ALL.into_iter().flat_map(|s| Domain::ALL.map(|d| (s, d))).filter(|(s, d)| d.is_for(*s))
        {
            let (engine, ring) = (Engine::new(2), ring(suite, &[5, 6]));
            let plain = pattern(4096, 1).repeat(40);
            let mut sealed = vec![0; plain.len()];
            let mut keys = vec![[0; 32]; 40];
            let salts = Salts::from_block(domain, one, FIRST);
            engine.seal_to(&ring.inner(), salts, &plain, &mut sealed, 4096, &mut keys);
            let distinct = keys.iter().collect::<std::collections::HashSet<_>>().len();
            assert_eq!(distinct, if domain == Domain::None { 40 } else { 1 }, "{suite:?} {domain:?}");
            for hole in [0, 3, 17, 39] {
                keys[hole] = [0; 32];
            }
            let numbers: Vec<BlockNo> = FIRST.until(FIRST + 40).collect();
            let failed =
                |salts| engine.open(&ring, &mut sealed.clone(), 4096, Keyed { keys: &keys, salts }, Verify::Full).len();
            assert_eq!(
                (failed(salts), failed(Salts::of_blocks(domain, one, &numbers))),
                (0, 0),
                "{suite:?} {domain:?}"
            );
            assert_eq!(failed(Salts::from_block(domain, other, FIRST)), if domain.is_salted() { 36 } else { 0 });
            assert_eq!(failed(Salts::from_block(domain, one, FIRST + 1)), if domain == Domain::None { 36 } else { 0 });
            assert_eq!(failed(Salts::EMPTY), if domain.is_salted() { 36 } else { 0 });
        }
    }

    #[test]
    fn holes_are_zeros_and_impossible_keys_fail() {
        for suite in Suite::ALL {
            let ring = ring(suite, &[5]);
            let mut blocks = pattern(3 * 4096, 1);
            let mut keys = vec![[0; 32]; 3];
            let engine = Engine::new(1);
            engine.seal(&ring.inner(), Salts::EMPTY, &mut blocks, 4096, &mut keys);
            keys[0] = [0; 32];
            keys[2][31] |= 1;
            for verify in [Verify::Full, Verify::No] {
                let mut opened = blocks.clone();
                let failed = engine.open(&ring, &mut opened, 4096, Keyed::unsalted(&keys), verify);
                assert!(opened[..4096].iter().all(|&b| b == 0));
                if suite != Suite::Paper {
                    assert_eq!(failed, [2]);
                    assert!(opened[8192..].iter().all(|&b| b == 0));
                }
            }
        }
    }

    #[test]
    fn malleable_suites_are_verified_whatever_the_caller_says() {
        for suite in Suite::ALL {
            let ring = ring(suite, &[5]);
            let mut blocks = pattern(4096, 1);
            let mut keys = [[0; 32]];
            let engine = Engine::new(1);
            engine.seal(&ring.inner(), Salts::EMPTY, &mut blocks, 4096, &mut keys);
            blocks[100] ^= 1;
            let failed = engine.open(&ring, &mut blocks, 4096, Keyed::unsalted(&keys), Verify::No);
            assert_eq!(failed.len(), usize::from(suite.is_malleable()));
        }
    }

    #[test]
    fn concurrent_submitters_do_not_disturb_one_another() {
        let engine = Engine::new(3);
        let ring = ring(Suite::Aes, &[5]);
        std::thread::scope(|s| {
            for t in 0..6u8 {
                let (engine, ring) = (&engine, &ring);
                s.spawn(move || {
                    for round in 0..8u8 {
                        let plain = pattern(64 * 4096, t ^ (round << 4));
                        let (mut blocks, mut keys) = (plain.clone(), vec![[0; 32]; 64]);
                        engine.seal(&ring.inner(), Salts::EMPTY, &mut blocks, 4096, &mut keys);
                        assert!(engine.open(ring, &mut blocks, 4096, Keyed::unsalted(&keys), Verify::Full).is_empty());
                        assert!(blocks == plain);
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_in_a_worker_reaches_the_submitter_and_the_pool_lives_on() {
        let engine = Engine::new(3);
        for _ in 0..4 {
            let batch = || engine.each(1 << 20, 4096, 0..256, |n| assert!(n != 77, "planned"));
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(batch)).is_err());
        }
        let done = AtomicUsize::new(0);
        engine.each(1 << 20, 4096, 0..256, |_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 256);
    }

    #[test]
    #[should_panic(expected = "one key a block")]
    fn a_shape_that_does_not_fit_is_refused() {
        Engine::new(1).seal(&ring(Suite::Aes, &[1]).inner(), Salts::EMPTY, &mut [0; 4096], 4096, &mut [[0; 32]; 2]);
    }
}
