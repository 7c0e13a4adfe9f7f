//! Copying between encrypted files without decrypting: content against a model, in every suite, and what is left to the
//! caller.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::common;

use common::{Rng, Setup, create_in, fill, flip};
use lamassu_format::{Codec, PageNo, Suite};
use lamassu_store::StoreError;
use lamassu_store::backend::fault::{Call, Fault, FaultBackend};
use lamassu_store::backend::{Backend, BackendFile, LocalBackend, MemoryBackend};
use lamassu_store::file::{File, Rekey};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const B: u64 = 4096;

fn file(setup: &Setup) -> (MemoryBackend, File) {
    let store = MemoryBackend::new();
    let file = File::create(setup.context(), create_in(&store), "test").unwrap();
    (store, file)
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.size() as usize];
    assert_eq!(file.read_at(0, &mut bytes).unwrap(), bytes.len());
    bytes
}

fn check(file: &File) {
    let found = file.check(false, &mut |_| {}).unwrap();
    assert!(found.damage.is_empty(), "{found:?}");
}

#[test]
fn whole_files_in_every_suite() {
    for suite in Suite::ALL {
        let setup = Setup { suite, reserved: 8, ..Setup::default() };
        let ((_a, from), (_b, to)) = (file(&setup), file(&setup));
        let bytes = fill((300 * B + 17) as usize, &mut Rng(1));
        from.write_at(0, &bytes).unwrap();
        assert_eq!(from.copy_from(&to, 0, 0, 1 << 40).unwrap(), None, "an empty file has no blocks");
        assert_eq!(to.copy_from(&from, 0, 0, 1 << 40).unwrap(), Some(300 * B), "the tail is the caller's");
        assert_eq!(content(&to), bytes[..(300 * B) as usize]);
        to.write_at(300 * B, &bytes[(300 * B) as usize..]).unwrap();
        to.settle_now().unwrap();
        assert_eq!(content(&to), bytes);
        check(&to);
    }
}

/// Random copies between three files that are written and punched meanwhile, against vectors of bytes.
#[test]
fn random_copies_against_a_model() {
    for seed in 0..12 {
        let setup = Setup { reserved: [1, 8, 62][seed as usize % 3], ..Setup::default() };
        let files = [0, 1, 2].map(|_| file(&setup));
        let mut models = [vec![], vec![], vec![]];
        let mut rng = Rng(seed);
        for _ in 0..60 {
            let (from, to) = (rng.below(3) as usize, rng.below(3) as usize);
            let at = rng.below(200) * B;
            match rng.below(5) {
                0 | 1 => {
                    let (n, there) = (rng.below(150) * B + rng.below(2) * 99, rng.below(200) * B);
                    let Some(n) = files[to].1.copy_from(&files[from].1, at, there, n).unwrap() else { continue };
                    let bytes: Vec<u8> = models[from][at as usize..(at + n) as usize].to_vec();
                    let end = (there + n) as usize;
                    let model: &mut Vec<u8> = &mut models[to];
                    model.resize(model.len().max(end), 0);
                    model[there as usize..end].copy_from_slice(&bytes);
                }
                2 => {
                    let bytes = fill((rng.below(40) * 1000) as usize, &mut rng);
                    let at = at as usize + rng.below(2) as usize * 77;
                    if bytes.is_empty() {
                        continue;
                    }
                    files[to].1.write_at(at as u64, &bytes).unwrap();
                    let model: &mut Vec<u8> = &mut models[to];
                    model.resize(model.len().max(at + bytes.len()), 0);
                    model[at..at + bytes.len()].copy_from_slice(&bytes);
                }
                3 => {
                    files[to].1.punch(at, 20 * B).unwrap();
                    let end = models[to].len().min((at + 20 * B) as usize);
                    models[to][(at as usize).min(end)..end].fill(0);
                }
                _ => match rng.below(3) {
                    0 => files[to].1.sync().unwrap(),
                    1 => files[to].1.settle_now().unwrap(),
                    _ => {
                        files[to].1.truncate(at).unwrap();
                        models[to].resize(at as usize, 0);
                    }
                },
            }
            assert!(content(&files[to].1) == models[to], "seed {seed}");
        }
        for (n, (_, file)) in files.iter().enumerate() {
            file.settle_now().unwrap();
            assert!(content(file) == models[n], "seed {seed}");
            check(file);
        }
    }
}

/// A block that does not open is copied all the same: nothing was decrypted. Whoever reads the copy is told.
#[test]
fn nothing_is_decrypted() {
    let setup = Setup::default();
    let ((store, from), (_b, to)) = (file(&setup), file(&setup));
    from.write_at(0, &fill((3 * B) as usize, &mut Rng(2))).unwrap();
    from.settle_now().unwrap();
    flip(&store, B + 5);
    assert!(matches!(from.read_at(0, &mut [0; 10]), Err(StoreError::Damaged(_))));
    assert_eq!(to.copy_from(&from, 0, 0, 3 * B).unwrap(), Some(3 * B));
    assert!(matches!(to.read_at(0, &mut [0; 10]), Err(StoreError::Damaged(_))));
    assert_eq!(to.read_at(B, &mut [0; 10]).unwrap(), 10);
}

/// A copy that fails half-way keeps no word of the source: that may change, and the target be committed, at any time
/// after.
#[test]
fn a_copy_that_fails_leaves_nothing_behind() {
    let setup = Setup { reserved: 8, ..Setup::default() };
    let ((_a, from), (store, to)) = (file(&setup), file(&setup));
    let old = fill((300 * B) as usize, &mut Rng(3));
    from.write_at(0, &fill((300 * B) as usize, &mut Rng(2))).unwrap();
    to.write_at(0, &old).unwrap();
    from.settle_now().unwrap();
    to.settle_now().unwrap();
    // Page 1: behind page 0 and its 116 blocks.
    flip(&store, 117 * B + 60);
    let to = File::open(setup.context(), to.backing().clone(), "test").unwrap();
    assert!(matches!(to.copy_from(&from, 0, 0, 300 * B), Err(StoreError::Damaged(_))));
    from.write_at(0, &fill((300 * B) as usize, &mut Rng(4))).unwrap();
    from.settle_now().unwrap();
    to.sync().unwrap();
    let mut bytes = vec![0; (116 * B) as usize];
    assert_eq!(to.read_at(0, &mut bytes).unwrap(), bytes.len());
    assert!(bytes == old[..bytes.len()]);
    assert_eq!(to.size(), 300 * B);
}

/// What was written into the target before, and acknowledged, was not for the copy to lose.
#[test]
fn a_copy_that_fails_leaves_what_was_buffered() {
    let setup = Setup { reserved: 8, ..Setup::default() };
    let (memory, from) = file(&setup);
    drop(memory);
    let store = FaultBackend::new(Arc::new(MemoryBackend::new()));
    let to = File::create(setup.context(), create_in(&store), "test").unwrap();
    from.write_at(0, &fill((20 * B) as usize, &mut Rng(2))).unwrap();
    to.write_at(0, &fill((20 * B) as usize, &mut Rng(3))).unwrap();
    from.settle_now().unwrap();
    to.settle_now().unwrap();
    // Whole blocks and parts of one; neither has reached the store.
    let (whole, part) = (fill((4 * B) as usize, &mut Rng(4)), fill(100, &mut Rng(5)));
    to.write_at(B, &whole).unwrap();
    to.write_at(10 * B + 7, &part).unwrap();
    let model = content(&to);
    store.faults().rule(|call| (call.call == Call::Write).then_some(Fault::Errno(libc::ENOSPC)));
    assert!(to.copy_from(&from, 0, 0, 20 * B).is_err());
    assert!(to.sync().is_err(), "not all of it is durable");
    assert!(content(&to) == model);
    store.faults().clear_rules();
    to.sync().unwrap();
    let backing = to.backing().clone();
    drop(to);
    let again = File::open(setup.context(), backing, "test").unwrap();
    assert!(content(&again) == model);
    check(&again);
}

/// A copy into a file just made writes its page once, with the keys in it: there is nothing to save before. Nor is
/// there where others were written.
#[test]
fn a_copy_commits_once_where_it_replaces_nothing_buffered() {
    let setup = Setup { reserved: 8, ..Setup::default() };
    let (memory, from) = file(&setup);
    drop(memory);
    let bytes = fill((20 * B) as usize, &mut Rng(2));
    from.write_at(0, &bytes).unwrap();
    from.settle_now().unwrap();
    let pages_written = |buffered: bool, there: u64| {
        let store = FaultBackend::new(Arc::new(MemoryBackend::new()));
        let to = File::create(setup.context(), create_in(&store), "test").unwrap();
        if buffered {
            to.write_at(0, &bytes[..B as usize]).unwrap();
        }
        let count = Arc::new(AtomicU64::new(0));
        let counted = count.clone();
        store.faults().rule(move |call| {
            counted.fetch_add(u64::from(call.call == Call::Write && call.offset == 0), Ordering::Relaxed);
            None
        });
        assert_eq!(to.copy_from(&from, 0, there, 0).unwrap(), None);
        assert_eq!(count.load(Ordering::Relaxed), 0, "nothing was to be copied");
        assert_eq!(to.copy_from(&from, 0, there, 20 * B).unwrap(), Some(20 * B));
        let written = count.load(Ordering::Relaxed);
        to.settle_now().unwrap();
        assert!(content(&to)[there as usize..] == bytes);
        check(&to);
        written
    };
    assert_eq!((pages_written(false, 0), pages_written(true, B)), (1, 1));
    assert_eq!(pages_written(true, 0), 2, "what is replaced is saved");
}

/// A block larger than what the store writes at once, reached in part: it is old or new all the same, while the file is
/// open and after the next commit.
#[test]
fn a_copy_that_fails_inside_a_block_loses_neither_content() {
    const BIG: u64 = 64 << 10;
    for (blocks, torn) in [(1, 100), (5, 4096), (5, 70_000), (5, 200_000), (400, 9_000_000)] {
        let setup = Setup { block_size: BIG as u32, reserved: 8, ..Setup::default() };
        let (memory, from) = file(&setup);
        drop(memory);
        let store = FaultBackend::new(Arc::new(MemoryBackend::new()));
        let to = File::create(setup.context(), create_in(&store), "test").unwrap();
        let (new, old) = (fill((blocks * BIG) as usize, &mut Rng(2)), fill((blocks * BIG) as usize, &mut Rng(3)));
        from.write_at(0, &new).unwrap();
        to.write_at(0, &old).unwrap();
        from.settle_now().unwrap();
        to.settle_now().unwrap();
        // Data, not pages: those are 4096 bytes.
        let spent = AtomicU64::new(0);
        store.faults().rule(move |call| {
            if call.call != Call::Write || call.len <= 4096 {
                return None;
            }
            let before = spent.fetch_add(call.len, Ordering::Relaxed);
            (before + call.len > torn).then(|| Fault::Short(torn.saturating_sub(before) as usize))
        });
        assert!(to.copy_from(&from, 0, 0, blocks * BIG).is_err(), "{blocks} {torn}");
        let either = |file: &File| {
            let bytes = content(file);
            assert_eq!(bytes.len(), old.len());
            for ((is, was), shall) in
                bytes.chunks(BIG as usize).zip(old.chunks(BIG as usize)).zip(new.chunks(BIG as usize))
            {
                assert!(is == was || is == shall, "{blocks} {torn}");
            }
        };
        either(&to);
        // The source may go; the store works again.
        from.write_at(0, &fill((blocks * BIG) as usize, &mut Rng(4))).unwrap();
        from.settle_now().unwrap();
        store.faults().clear_rules();
        to.sync().unwrap();
        either(&to);
        let backing = to.backing().clone();
        drop(to);
        let again = File::open(setup.context(), backing, "test").unwrap();
        either(&again);
        check(&again);
    }
}

#[test]
fn what_is_left_to_the_caller() {
    let setup = Setup::default();
    let ((_a, from), (_b, to)) = (file(&setup), file(&setup));
    from.write_at(0, &fill((4 * B) as usize, &mut Rng(2))).unwrap();
    for (at, there, len) in [(1, 0, 2 * B), (0, 1, 2 * B), (0, 0, B - 1), (4 * B, 0, B), (0, 0, 0)] {
        assert_eq!(to.copy_from(&from, at, there, len).unwrap(), None, "{at} {there} {len}");
    }
    assert_eq!(from.copy_from(&from, 0, 8 * B, B).unwrap(), None, "within one file");
    let (_c, other) = file(&Setup { reserved: 8, ..Setup::default() });
    assert_eq!(other.copy_from(&from, 0, 0, B).unwrap(), None, "another geometry");
    assert_eq!(to.size(), 0);
    assert!(to.copy_from(&from, 0, u64::MAX / B * B, B).is_err());
}

/// Two that copy into one another do not wait for each other for ever.
#[test]
fn both_ways_at_once() {
    let setup = Setup::default();
    let ((_a, one), (_b, two)) = (file(&setup), file(&setup));
    one.write_at(0, &fill((8 * B) as usize, &mut Rng(3))).unwrap();
    two.write_at(0, &fill((8 * B) as usize, &mut Rng(4))).unwrap();
    std::thread::scope(|s| {
        for (from, to) in [(&one, &two), (&two, &one)] {
            s.spawn(move || (0..200).for_each(|_| _ = to.copy_from(from, 0, 0, 8 * B).unwrap()));
        }
    });
    check(&one);
    check(&two);
}

/// A store that shares blocks of files shares the holes between them, too. One that copies writes zeros there, which
/// are freed; so are those that someone else wrote, when the file is re-keyed.
#[test]
fn zeros_behind_compressed_blocks_take_no_space_in_a_copy() {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalBackend::open(dir.path()).unwrap();
    let setup = Setup { codec: Some(Codec::Zstd(3)), block_size: 65536, ..Setup::default() };
    let new = |name: &str| {
        let backing: Arc<dyn BackendFile> = store.root().create_file(name.as_ref()).unwrap();
        File::create(setup.context(), backing, name).unwrap()
    };
    let taken = |name| dir.path().join(name).metadata().unwrap().blocks() * 512;
    let (from, to) = (new("from"), new("to"));
    let bytes: Vec<u8> = (0..).flat_map(|n: u32| format!("line {n}\n").into_bytes()).take(4 << 20).collect();
    from.write_at(0, &bytes).unwrap();
    from.settle_now().unwrap();
    let most = taken("from") + 65536;
    assert!(most < bytes.len() as u64 / 2, "{most}");
    assert_eq!(to.copy_from(&from, 0, 0, 1 << 40).unwrap(), Some(bytes.len() as u64));
    to.settle_now().unwrap();
    assert!(taken("to") <= most, "{} of {most}", taken("to"));

    let path = dir.path().join("to");
    let stored = std::fs::read(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&stored, 0).unwrap();
    assert!(taken("to") >= stored.len() as u64);
    let mut next = Some(PageNo::ZERO);
    while let Some(page) = next {
        let step = to.rekey(Rekey::Full, page).unwrap();
        assert_eq!(step.reencrypted, 0);
        next = step.next;
    }
    assert!(taken("to") <= most, "{} of {most}", taken("to"));
    assert_eq!((content(&to), std::fs::read(&path).unwrap()), (bytes, stored));
    check(&to);
}

#[test]
fn on_a_local_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalBackend::open(dir.path()).unwrap();
    let setup = Setup::default();
    let new = |name: &str| {
        let backing: Arc<dyn BackendFile> = store.root().create_file(name.as_ref()).unwrap();
        File::create(setup.context(), backing, name).unwrap()
    };
    let (from, to) = (new("from"), new("to"));
    let bytes = fill((200 * B) as usize, &mut Rng(5));
    from.write_at(0, &bytes).unwrap();
    from.punch(20 * B, 50 * B).unwrap();
    assert_eq!(to.copy_from(&from, 0, 3 * B, 200 * B).unwrap(), Some(200 * B));
    to.settle_now().unwrap();
    assert_eq!(content(&to)[(3 * B) as usize..], content(&from));
    check(&to);
}
