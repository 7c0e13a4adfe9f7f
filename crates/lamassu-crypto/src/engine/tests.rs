//! Batches: what is sealed opens, what is damaged is named, and submitters do not disturb one another.

use super::*;
use crate::{Secret, Suite};
use lamassu_format::{Domain, FileId, Hash, Method};
use proptest::prelude::*;
use sha2::{Digest, Sha256};
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

/// Every suite by every method that it has.
fn methods() -> impl Iterator<Item = (Suite, Method)> {
    Suite::ALL.into_iter().flat_map(|s| Method::all(s).map(move |m| (s, m)))
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
        engine.seal(&ring.inner(), Salts::EMPTY, &mut blocks, block_size, &mut keys).unwrap();
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
        engine.seal(&ring.inner(), Salts::EMPTY, &mut blocks, 4096, &mut keys).unwrap();
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
        engine.seal_to(&ring.inner(), salts, &plain, &mut sealed, 4096, &mut keys).unwrap();
        let distinct = keys.iter().collect::<std::collections::HashSet<_>>().len();
        assert_eq!(distinct, if domain == Domain::None { 40 } else { 1 }, "{suite:?} {domain:?}");
        for hole in [0, 3, 17, 39] {
            keys[hole] = [0; 32];
        }
        let numbers: Vec<BlockNo> = FIRST.until(FIRST + 40).collect();
        let failed =
            |salts| engine.open(&ring, &mut sealed.clone(), 4096, Keyed { keys: &keys, salts }, Verify::Full).len();
        assert_eq!((failed(salts), failed(Salts::of_blocks(domain, one, &numbers))), (0, 0), "{suite:?} {domain:?}");
        assert_eq!(failed(Salts::from_block(domain, other, FIRST)), if domain.is_salted() { 36 } else { 0 });
        assert_eq!(failed(Salts::from_block(domain, one, FIRST + 1)), if domain == Domain::None { 36 } else { 0 });
        assert_eq!(failed(Salts::EMPTY), if domain.is_salted() { 36 } else { 0 });
    }
}

/// Blocks that are stored plain are what they were, keyed by their hash, and verified by it where that is asked for, in
/// a malleable suite too.
#[test]
fn plain_blocks_are_kept_and_verified() {
    for (suite, method) in methods().filter(|(_, method)| !method.has_short_key()) {
        let salts = Salts::PLAIN.by(method);
        let (engine, old, ring) = (Engine::new(2), ring(suite, &[6]), ring(suite, &[5, 6]));
        let plain = pattern(40 * 4096, 3);
        for at in [&old, &ring] {
            let (mut stored, mut keys) = (vec![0; plain.len()], vec![[0; 32]; 40]);
            engine.seal_to(&at.inner(), salts, &plain, &mut stored, 4096, &mut keys).unwrap();
            assert!(stored == plain && keys.iter().all(|key| *key != [0; 32]));
            if method.hash(suite) == Hash::Sha256 {
                let mut hash: BlockKey = Sha256::digest(&plain[..4096]).into();
                hash[31] &= if suite == Suite::Paper { 0xff } else { 0xfe };
                assert_eq!(keys[0], hash);
            }
            let keyed = Keyed { keys: &keys, salts };
            stored[17 * 4096 + 5] ^= 1;
            let mut opened = stored.clone();
            assert_eq!(engine.open(&ring, &mut opened, 4096, keyed, Verify::Full), [17], "{suite:?}");
            assert!(opened[..17 * 4096] == plain[..17 * 4096] && opened[17 * 4096..][..4096] == [0; 4096]);
            assert!(engine.open(&ring, &mut stored.clone(), 4096, keyed, Verify::No).is_empty(), "{suite:?}");
            // Neither opens as the other.
            let encrypted = Keyed { keys: &keys, salts: Salts::EMPTY.by(method) };
            assert_eq!(engine.open(&ring, &mut stored.clone(), 4096, encrypted, Verify::Full).len(), 40);
        }
    }
}

/// A block opens by the method that it was sealed by, under every epoch, and by no other.
#[test]
fn a_block_opens_by_its_method_alone() {
    for (suite, method) in methods() {
        let (engine, old, ring) = (Engine::new(2), ring(suite, &[6]), ring(suite, &[5, 6]));
        let plain = pattern(40 * 4096, 3);
        let (mut sealed, mut keys) = (vec![0; plain.len()], vec![[0; 32]; 40]);
        engine.seal_to(&old.inner(), Salts::EMPTY.by(method), &plain, &mut sealed, 4096, &mut keys).unwrap();
        for other in Method::all(suite) {
            for plain_blocks in [false, true] {
                let salts = if plain_blocks { Salts::PLAIN } else { Salts::EMPTY }.by(other);
                let mut opened = sealed.clone();
                let failed = engine.open(&ring, &mut opened, 4096, Keyed { keys: &keys, salts }, Verify::Full);
                let fits = other == method && !plain_blocks;
                assert_eq!(failed.len(), if fits { 0 } else { 40 }, "{suite:?} {method:?} as {other:?}");
                assert!(!fits || opened == plain, "{suite:?} {method:?}");
            }
        }
    }
}

#[test]
fn holes_are_zeros_and_impossible_keys_fail() {
    for suite in Suite::ALL {
        let ring = ring(suite, &[5]);
        let mut blocks = pattern(3 * 4096, 1);
        let mut keys = vec![[0; 32]; 3];
        let engine = Engine::new(1);
        engine.seal(&ring.inner(), Salts::EMPTY, &mut blocks, 4096, &mut keys).unwrap();
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
    for (suite, method) in methods() {
        let (ring, salts) = (ring(suite, &[5]), Salts::EMPTY.by(method));
        let mut blocks = pattern(4096, 1);
        let mut keys = [[0; 32]];
        let engine = Engine::new(1);
        engine.seal(&ring.inner(), salts, &mut blocks, 4096, &mut keys).unwrap();
        blocks[100] ^= 1;
        let failed = engine.open(&ring, &mut blocks, 4096, Keyed { keys: &keys, salts }, Verify::No);
        assert_eq!(failed.len(), usize::from(suite.is_malleable()), "{suite:?} {method:?}");
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
                    engine.seal(&ring.inner(), Salts::EMPTY, &mut blocks, 4096, &mut keys).unwrap();
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
    Engine::new(1)
        .seal(&ring(Suite::Aes, &[1]).inner(), Salts::EMPTY, &mut [0; 4096], 4096, &mut [[0; 32]; 2])
        .unwrap();
}

mod compressed {
    use super::*;
    use crate::compress::version_of;
    use lamassu_format::{Codec, Compression, is_compressed};

    fn compression(codec: Codec, suite: Suite, block_size: usize) -> Compression {
        let size = block_size as u32;
        Compression::new(codec, version_of(codec), Compression::default_round(size), (suite, size)).unwrap()
    }

    fn codecs() -> impl Strategy<Value = Codec> {
        proptest::sample::select(&[Codec::Lz4, Codec::Zstd(3)][..])
    }

    fn marked() -> impl Strategy<Value = Suite> {
        suites().prop_filter("it marks compressed blocks", |suite| suite.marks_compressed())
    }

    /// Some blocks that compress to various lengths, and some that do not.
    fn blocks(count: usize, block_size: usize, seed: u8) -> Vec<u8> {
        let block = |n: usize| {
            let random = n.wrapping_mul(usize::from(seed) + 3) % 9 * block_size / 8;
            let mut block = pattern(block_size, n as u8 ^ seed);
            block[random.min(block_size)..].fill(n as u8);
            block
        };
        (0..count).flat_map(block).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        /// Whether on threads or on a device, and whatever reads are told to verify.
        #[test]
        fn what_is_sealed_opens(
            suite in marked(), codec in codecs(), count in 0usize..70, log2 in 12u32..17, threads in 1usize..4, seed: u8,
            domain in proptest::sample::select(&Domain::ALL[..]), method in 0usize..4,
        ) {
            let size = 1 << log2;
            let method = Method::all(suite).nth(method).unwrap_or(Method::OF_SUITE);
            let (engine, ring) = (Engine::new(threads), ring(suite, &[9, 8]));
            let plain = blocks(count, size, seed);
            let opening = Salts::from_block(domain, FileId([3; 16]), BlockNo(7)).by(method);
            let salts = opening.compressed(Some(compression(codec, suite, size)));
            let (mut sealed, mut keys) = (vec![0; plain.len()], vec![[0; 32]; count]);
            engine.seal_to(&ring.inner(), salts, &plain, &mut sealed, size, &mut keys).unwrap();
            let mut in_place = (plain.clone(), vec![[0; 32]; count]);
            engine.seal(&ring.inner(), salts, &mut in_place.0, size, &mut in_place.1).unwrap();
            prop_assert!(in_place == (sealed.clone(), keys.clone()));
            for ((plain, sealed), key) in plain.chunks(size).zip(sealed.chunks(size)).zip(&keys) {
                let len = compress::packed_len(compression(codec, suite, size), plain);
                prop_assert_eq!(is_compressed(suite, key), len < size);
                prop_assert_eq!(compress::stored_len(sealed), len);
            }
            for verify in [Verify::Full, Verify::No] {
                let mut opened = sealed.clone();
                let keyed = Keyed { keys: &keys, salts: opening };
                prop_assert!(engine.open(&ring, &mut opened, size, keyed, verify).is_empty());
                prop_assert!(opened == plain);
            }
            // What does not compress is what it is without compression.
            let (mut without, mut other_keys) = (plain.clone(), vec![[0; 32]; count]);
            engine.seal(&ring.inner(), opening, &mut without, size, &mut other_keys).unwrap();
            for (n, key) in keys.iter().enumerate().filter(|(_, key)| !is_compressed(suite, key)) {
                prop_assert!(*key == other_keys[n] && sealed[n * size..][..size] == without[n * size..][..size]);
            }
        }

        /// Wherever a bit is flipped: in ciphertext, or in the zeros behind it. A compressed block is verified on every
        /// read.
        #[test]
        fn every_damaged_block_is_named_and_zeroed(
            suite in marked(), codec in codecs(), damaged in proptest::collection::btree_set(0usize..40, 0..12),
            at in 0usize..8192, verify in proptest::sample::select(&[Verify::Full, Verify::No][..]),
        ) {
            let (engine, ring) = (Engine::new(2), ring(suite, &[9]));
            let plain: Vec<u8> = (0..40).flat_map(|n| vec![n; 8192]).collect();
            let salts = Salts::EMPTY.compressed(Some(compression(codec, suite, 8192)));
            let (mut blocks, mut keys) = (plain.clone(), vec![[0; 32]; 40]);
            engine.seal(&ring.inner(), salts, &mut blocks, 8192, &mut keys).unwrap();
            damaged.iter().for_each(|i| blocks[i * 8192 + at] ^= 0x10);
            let failed = engine.open(&ring, &mut blocks, 8192, Keyed::unsalted(&keys), verify);
            prop_assert_eq!(&failed, &damaged.iter().copied().collect::<Vec<_>>());
            for (i, (b, p)) in blocks.chunks(8192).zip(plain.chunks(8192)).enumerate() {
                let as_expected = if damaged.contains(&i) { b.iter().all(|&x| x == 0) } else { b == p };
                prop_assert!(as_expected);
            }
        }
    }

    /// The mark says what was encrypted: a key without it opens nothing of a compressed block, and a plain block has
    /// none.
    #[test]
    fn the_mark_of_a_key_counts() {
        for suite in Suite::ALL.into_iter().filter(|suite| suite.marks_compressed()) {
            let (engine, ring) = (Engine::new(1), ring(suite, &[9]));
            let salts = Salts::EMPTY.compressed(Some(compression(Codec::Lz4, suite, 4096)));
            let seal = |salts: Salts<'_>, mut block: Vec<u8>| {
                let mut keys = [[0; 32]];
                engine.seal(&ring.inner(), salts, &mut block, 4096, &mut keys).unwrap();
                (block, keys)
            };
            let opens = |salts: Salts<'_>, (mut block, keys): (Vec<u8>, [BlockKey; 1]), bit: u8| {
                let keys = [{
                    let [mut key] = keys;
                    key[31] ^= bit;
                    key
                }];
                engine.open(&ring, &mut block, 4096, Keyed { keys: &keys, salts }, Verify::Full).is_empty()
            };
            let (text, noise) = (vec![b'x'; 4096], pattern(4096, 1));
            assert_eq!([0, 1].map(|bit| opens(Salts::EMPTY, seal(salts, text.clone()), bit)), [true, false]);
            assert_eq!([0, 1].map(|bit| opens(Salts::EMPTY, seal(salts, noise.clone()), bit)), [true, false]);
            let plain = Salts::PLAIN.compressed(Some(compression(Codec::Lz4, suite, 4096)));
            let (block, keys) = seal(plain, text.clone());
            assert!(block == text && !is_compressed(suite, &keys[0]), "plain blocks are not compressed");
            assert_eq!([0, 1].map(|bit| opens(Salts::PLAIN, (block.clone(), keys), bit)), [true, false]);
            // An all-zero block of the store under a key with the mark.
            assert!(!opens(Salts::EMPTY, (vec![0; 4096], [[7; 32]]), 0));
        }
    }
}
