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
