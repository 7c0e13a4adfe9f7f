//! Writes that report an error although the store has done them, and barriers that fail in the middle of recovery.

use crate::common;
use common::{Rng, Setup, create_in, fill, raw};
use lamassu_format::Codec;
use lamassu_store::Backend;
use lamassu_store::backend::LocalBackend;
use lamassu_store::backend::crash::{CrashBackend, CrashSim};
use lamassu_store::backend::fault::{Call, Fault, FaultBackend};
use lamassu_store::backend::memory::MemoryBackend;
use lamassu_store::file::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: u64 = 4096;
/// Blocks of a page at R = 62.
const PAGE: u64 = 62;

/// Makes the `n`th change from now fail after it was done whole, and all changes after it before they begin.
fn fail_after(store: &FaultBackend, n: u64) {
    let done: u64 = Call::ALL.iter().filter(|c| c.is_change() || c.is_sync()).map(|c| store.faults().calls(*c)).sum();
    store.faults().rule(move |c| match c.changes.cmp(&(done + n)) {
        _ if !(c.call.is_change() || c.call.is_sync()) => None,
        std::cmp::Ordering::Less => None,
        std::cmp::Ordering::Equal if c.call == Call::Write => Some(Fault::After(libc::EIO)),
        _ => Some(Fault::Errno(libc::EIO)),
    });
}

/// fsync until it has said all: one fails for the barriers that failed before.
fn sync(file: &File) {
    if file.sync().is_err() {
        file.sync().expect("syncs");
    }
}

/// A file of `size` bytes, settled; an append of `more` bytes of which the `n`th change fails although it was done; cut
/// back to its size and synced. Whether there was an `n`th change to fail.
fn cut_back(setup: &Setup, size: u64, more: u64, n: u64) -> bool {
    let memory = Arc::new(MemoryBackend::new());
    let store = FaultBackend::new(memory.clone());
    let file = File::create(setup.context(), create_in(&store), "test").expect("creates");
    let content = fill(size as usize, &mut Rng(1));
    file.write_at(0, &content).expect("writes");
    file.settle_now().expect("settles");
    file.write_at(size, &fill(more as usize, &mut Rng(2))).expect("is buffered");
    fail_after(&store, n);
    let failed = file.flush().is_err();
    store.faults().clear_rules();
    file.truncate(size).expect("cuts");
    sync(&file);
    assert_eq!(file.size(), size);
    // Killed here: what fsync returned for is there, and nothing more.
    let left = memory.snapshot();
    let again = File::open(setup.context(), raw(&left), "again").expect("opens");
    let what = format!("{size} bytes and {more}, change {n}");
    assert_eq!(again.size(), size, "{what}");
    let mut back = vec![0; size as usize];
    again.read_at(0, &mut back).expect("reads");
    assert!(back == content, "{what}: content");
    assert_eq!(again.check(false, &mut |_| {}).expect("checks").damage, [], "{what}");
    failed
}

#[test]
fn a_size_cut_back_after_a_failed_append_stays() {
    for setup in [Setup::default(), Setup { convergent: false, reserved: 8, ..Setup::default() }] {
        let page = (124 - u64::from(setup.reserved)) * BLOCK;
        assert!(setup.reserved != 62 || page == PAGE * BLOCK);
        for (size, more) in [
            (BLOCK, 3 * BLOCK),
            (100, BLOCK),
            (page - BLOCK, 4 * BLOCK),
            (page, 2 * page),
            (page + BLOCK, page),
            (2 * page, BLOCK),
        ] {
            let tried = (1..40).take_while(|n| cut_back(&setup, size, more, *n)).count();
            assert!(tried > 0, "nothing failed");
        }
    }
}

/// What an earlier process left in the page cache is lost when a barrier fails, although later barriers succeed:
/// recovery writes it again. A store that grows by many pages, one of which it does not take; then a barrier of the
/// whole store, and what the daemon does after one.
#[test]
fn a_page_that_was_not_written_is_a_hole_although_later_ones_are_durable() {
    let setup = Setup::default();
    let size = 4 * PAGE * BLOCK;
    for nth in 1.. {
        let memory = Arc::new(MemoryBackend::new());
        let store = FaultBackend::new(memory.clone());
        let file = File::create(setup.context(), create_in(&store), "test").expect("creates");
        let content = fill(size as usize, &mut Rng(1));
        let old = [&content[..5000], &vec![0; content.len() - 5000]].concat();
        file.write_at(0, &content[..5000]).expect("writes");
        file.settle_now().expect("settles");
        file.write_at(5000, &content[5000..]).expect("is buffered");
        store.faults().fail_nth(Call::Write, nth, libc::EIO);
        if file.flush().is_ok() {
            assert!(nth > 4, "every page and run of blocks had its turn");
            return;
        }
        let mark = file.covered_mark();
        store.sync().expect("syncs");
        file.settle(mark).expect("settles");
        let again = File::open(setup.context(), raw(&memory.snapshot()), "again").expect("opens");
        let report = again.check(false, &mut |_| {}).expect("checks");
        assert_eq!(report.damage, [], "write {nth} failed");
        let mut back = vec![0; again.size() as usize];
        again.read_at(0, &mut back).expect("reads");
        for (n, block) in back.chunks(BLOCK as usize).enumerate() {
            let at = n * BLOCK as usize..n * BLOCK as usize + block.len();
            assert!(*block == content[at.clone()] || *block == old[at], "write {nth} failed, block {n}");
        }
        // And nothing is lost that is still buffered.
        sync(&file);
        let again = File::open(setup.context(), raw(&memory.snapshot()), "again").expect("opens");
        let mut back = vec![0; content.len()];
        assert_eq!(again.read_at(0, &mut back).expect("reads"), content.len());
        assert!(back == content, "write {nth} failed");
    }
}

#[test]
fn what_recovery_found_is_durable_although_a_barrier_failed() {
    let setup = Setup { convergent: false, ..Setup::default() };
    for settled in [false, true] {
        let crash = Arc::new(CrashBackend::new());
        let (old, new) = (fill(8 * BLOCK as usize, &mut Rng(1)), fill(8 * BLOCK as usize, &mut Rng(2)));
        let file = File::create(setup.context(), create_in(&*crash), "first").expect("creates");
        file.write_at(0, &old).expect("writes");
        file.settle_now().expect("settles");
        crash.sync().expect("syncs");
        file.write_at(0, &new).expect("writes");
        file.flush().expect("flushes");
        drop(file); // killed: the kernel has the data, the disk not yet

        let file = File::open(setup.context(), raw(&*crash), "second").expect("opens");
        crash.fail_syncs(1, libc::EIO);
        let mut back = vec![0; new.len()];
        assert!(file.read_at(0, &mut back).is_err(), "the barrier of recovery failed");
        file.read_at(0, &mut back).expect("reads at the second attempt");
        assert!(back == new);
        match settled {
            true => file.settle_now().expect("settles"),
            false => sync(&file),
        }
        let sim = CrashSim::new(crash.log());
        let point = sim.at(crash.position());
        let states = (0..200).map(|seed| point.random_state(seed)).chain([point.least_state()]);
        for (n, state) in states.enumerate() {
            let file = File::open(setup.context(), raw(&state), "third").expect("opens");
            file.read_at(0, &mut back).unwrap_or_else(|e| panic!("state {n}, settled {settled}: {e}"));
            assert!(back == new, "state {n}, settled {settled}: not what fsync returned for");
        }
    }
}

/// Compressed blocks of which the store keeps a part are replaced by ones that do not compress, and the store has no
/// space left for them: nothing of what was synced is written over.
#[test]
fn a_full_store_keeps_what_compressed_blocks_were() {
    const LEN: usize = 16 << 10;
    // Whether the store has a call to reserve space.
    for has_call in [true, false] {
        let memory = Arc::new(MemoryBackend::new());
        let store = FaultBackend::new(memory.clone());
        let setup = Setup { block_size: LEN as u32, reserved: 8, codec: Some(Codec::Lz4), ..Setup::default() };
        let file = File::create(setup.context(), create_in(&store), "test").expect("creates");
        let old = fill(8 * LEN, &mut Rng(1));
        file.write_at(0, &old).expect("writes");
        file.settle_now().expect("settles");
        // An fsync frees the zeros behind what was replaced, and a reader never sees that.
        file.write_at(0, &fill(8 * LEN, &mut Rng(3))).expect("writes");
        file.sync().expect("syncs");
        assert!(store.faults().calls(Call::Punch) > 0);
        file.write_at(0, &old).expect("writes");
        file.settle_now().expect("settles");
        let written = store.faults().calls(Call::Write);
        // Behind the ciphertext of the first block.
        store.faults().rule(move |c| match c.call {
            Call::Allocate => Some(Fault::Errno(if has_call { libc::ENOSPC } else { libc::EOPNOTSUPP })),
            Call::Write => Some(Fault::Errno(libc::ENOSPC)),
            _ => None,
        });
        let new: Vec<u8> = (0..2 * LEN).scan(Rng(2), |rng, _| Some(rng.next() as u8)).collect();
        file.write_at(0, &new).expect("is buffered");
        for _ in 0..3 {
            file.sync().expect_err("there is no space");
        }
        let tried = store.faults().calls(Call::Write) - written;
        assert!(if has_call { tried == 0 } else { tried > 0 }, "{tried}");
        let again = File::open(setup.context(), raw(&memory.snapshot()), "again").expect("opens");
        let mut back = vec![0; old.len()];
        again.read_at(0, &mut back).expect("reads");
        assert!(back == old);
        assert_eq!(again.check(false, &mut |_| {}).expect("checks").damage, []);
        // There is space again.
        store.faults().clear_rules();
        sync(&file);
        let again = File::open(setup.context(), raw(&memory.snapshot()), "again").expect("opens");
        again.read_at(0, &mut back).expect("reads");
        assert!(back[..new.len()] == new && back[new.len()..] == old[new.len()..]);
    }
}

/// Zeros behind compressed blocks that could not be freed once are freed after a later barrier. Only a store that says
/// that it cannot punch is not asked again.
#[test]
fn a_failed_punch_is_tried_again_after_the_next_barrier() {
    const LEN: usize = 64 << 10;
    let cases = [(libc::ENOSPC, true), (libc::EIO, true), (libc::EINTR, true), (libc::EOPNOTSUPP, false)];
    for (errno, is_asked_again) in cases {
        let dir = tempfile::tempdir().unwrap();
        let store = FaultBackend::new(Arc::new(LocalBackend::open(dir.path()).expect("a store")));
        let setup = Setup { block_size: LEN as u32, reserved: 8, codec: Some(Codec::Lz4), ..Setup::default() };
        let file = File::create(setup.context(), create_in(&store), "test").expect("creates");
        let disk_use =
            || dir.path().read_dir().unwrap().map(|e| e.unwrap().metadata().unwrap().blocks() * 512).sum::<u64>();
        let random: Vec<u8> = (0..8 * LEN).scan(Rng(1), |rng, _| Some(rng.next() as u8)).collect();
        let text = fill(8 * LEN, &mut Rng(2));
        // What does not compress fills its places: what replaces it has zeros behind it that were written.
        file.write_at(0, &random).expect("writes");
        file.settle_now().expect("settles");
        store.faults().rule(move |c| (c.call == Call::Punch).then_some(Fault::Errno(errno)));
        file.write_at(0, &text).expect("writes");
        file.sync().expect("syncs, whether it frees or not");
        let full = disk_use();
        assert!(full >= 8 * LEN as u64, "{full}");
        let asked = store.faults().calls(Call::Punch);
        assert!(asked > 0);
        store.faults().clear_rules();
        file.write_at(9 * LEN as u64, &text[..10]).expect("writes elsewhere");
        file.sync().expect("syncs");
        assert_eq!(store.faults().calls(Call::Punch) > asked, is_asked_again, "errno {errno}");
        let left = disk_use();
        assert_eq!(left < full / 2, is_asked_again, "errno {errno}: {left} of {full} bytes");
        let mut back = vec![0; text.len()];
        file.read_at(0, &mut back).expect("reads");
        assert!(back == text);
        drop(file);
        let again = File::open(setup.context(), raw(&store), "again").expect("opens");
        again.read_at(0, &mut back).expect("reads");
        assert!(back == text);
        assert_eq!(again.check(false, &mut |_| {}).expect("checks").damage, []);
    }
}

/// A write that stops in the middle of a block has destroyed what was there. Whatever is tried then, and fails, the
/// block is damage until its new content has arrived: not a hole.
#[test]
fn a_torn_block_reads_as_damage_until_it_is_whole() {
    for (reserved, codec) in [(8, None), (1, None), (8, Some(Codec::Lz4)), (1, Some(Codec::Lz4))] {
        let memory = Arc::new(MemoryBackend::new());
        let store = FaultBackend::new(memory.clone());
        let setup = Setup { block_size: 8192, reserved, codec, ..Setup::default() };
        let file = File::create(setup.context(), create_in(&store), "test").expect("creates");
        let old = fill(6 * 8192, &mut Rng(1));
        file.write_at(0, &old).expect("writes");
        file.settle_now().expect("settles");
        let opened = || File::open(setup.context(), raw(&memory.snapshot()), "again").expect("opens");
        let mut contents = vec![old.clone()];
        for (block, tries) in [(1u64, 3), (2, 2), (1, 2), (3, 1)] {
            let new: Vec<u8> = (0..8192).scan(Rng(block + tries), |rng, _| Some(rng.next() as u8)).collect();
            let mut next = contents[contents.len() - 1].clone();
            next[block as usize * 8192..][..8192].copy_from_slice(&new);
            contents.push(next);
            file.write_at(block * 8192, &new).expect("is buffered");
            for number in 0..tries {
                // Pages go through; of data the first call a piece, and the next ones none.
                let is_first = number == 0;
                store.faults().rule(move |c| match c.call {
                    Call::Write if c.offset % 4096 == 0 && c.len >= 8192 => {
                        Some(if is_first { Fault::Short(4096) } else { Fault::Errno(libc::ENOSPC) })
                    }
                    _ => None,
                });
                file.sync().expect_err("fails");
                store.faults().clear_rules();
                let again = opened();
                for at in 0..6 {
                    let mut back = vec![0; 8192];
                    if again.read_at(at * 8192, &mut back).is_ok() {
                        let is = |content: &Vec<u8>| content[at as usize * 8192..][..8192] == back;
                        assert!(contents.iter().any(is), "R {reserved} {codec:?}: block {at} is what it never was");
                    }
                }
                assert_ne!(again.check(false, &mut |_| {}).expect("checks").damage, [], "R {reserved}, {codec:?}");
            }
        }
        sync(&file);
        let mut back = vec![0; old.len()];
        opened().read_at(0, &mut back).expect("reads");
        assert!(&back == contents.last().expect("one"), "R {reserved} {codec:?}");
        assert_eq!(opened().check(false, &mut |_| {}).expect("checks").damage, []);
    }
}

/// A store that copies on write, such as btrfs, may write the beginning of a block before it finds no space. So with
/// little room no block is begun.
#[test]
fn in_a_full_store_that_copies_on_write_no_block_is_begun() {
    const LEN: usize = 65536;
    for codec in [None, Some(Codec::Lz4)] {
        let memory = Arc::new(MemoryBackend::new());
        let store = FaultBackend::new(memory.clone());
        store.faults().set_room_to_replace(100 << 20);
        let setup = Setup { block_size: LEN as u32, codec, ..Setup::default() };
        let file = File::create(setup.context(), create_in(&store), "test").expect("creates");
        let (old, new) = (fill(8 * LEN, &mut Rng(1)), fill(8 * LEN, &mut Rng(2)));
        file.write_at(0, &old).expect("writes");
        file.settle_now().expect("settles");
        store.faults().set_room_to_replace(4 << 20);
        let is_block = Arc::new(AtomicU64::new(0));
        let blocks = is_block.clone();
        store.faults().rule(move |c| {
            is_block.fetch_add(u64::from(c.call == Call::Write && c.len > 4096), Ordering::Relaxed);
            None
        });
        assert!(file.write_at(0, &new).is_err() || file.flush().is_err());
        assert_eq!(blocks.load(Ordering::Relaxed), 0, "{codec:?}");
        // Killed here.
        let again = File::open(setup.context(), raw(&memory.snapshot()), "again").expect("opens");
        assert_eq!(again.check(false, &mut |_| {}).expect("checks").damage, []);
        let mut back = vec![0; 8 * LEN];
        again.read_at(0, &mut back).expect("reads");
        assert!(back == old, "{codec:?}");
        // With room again, what was buffered is written.
        store.faults().set_room_to_replace(u64::MAX);
        sync(&file);
        file.read_at(0, &mut back).expect("reads");
        assert!(back == new, "{codec:?}");
    }
}

/// Every state of the test's file that a power cut after record `from` may leave, and whether it is one of the last.
fn power_cuts(crash: &CrashBackend, from: usize, mut look: impl FnMut(&MemoryBackend, bool)) {
    let sim = CrashSim::new(crash.log());
    let end = crash.position();
    for at in from..=end {
        let point = sim.at(at);
        let states = (0..20).map(|seed| point.random_state(seed));
        for state in states.chain([point.least_state(), point.most_state()]) {
            look(&state, at == end);
        }
    }
}

/// A page that gives up its tail is written although the store reports an error. The tail's block is then written once
/// more, with other content: until a page names that, the page before is on disk.
#[test]
fn a_tail_is_there_whatever_became_of_the_page_that_gave_it_up() {
    let setup = Setup::default();
    let crash = Arc::new(CrashBackend::new());
    let store = FaultBackend::new(crash.clone());
    let file = File::create(setup.context(), create_in(&store), "test").expect("creates");
    let first = fill(8100, &mut Rng(1));
    let second = [&fill(50, &mut Rng(2)), &first[50..]].concat();
    file.write_at(0, &first[..100]).expect("writes");
    file.settle_now().expect("settles");
    crash.sync().expect("syncs");
    file.write_at(100, &first[100..]).expect("is buffered");
    store.faults().rule(|c| (c.call == Call::Write && c.offset == 0).then_some(Fault::After(libc::EIO)));
    file.flush().expect_err("the page could not be written");
    store.faults().clear_rules();
    file.write_at(0, &second[..50]).expect("is buffered");
    let from = crash.position();
    file.sync().expect("syncs");
    power_cuts(&crash, from, |state, is_last| {
        let again = File::open(setup.context(), raw(state), "again").expect("opens");
        let mut back = vec![0; again.size() as usize];
        again.read_at(0, &mut back).expect("reads");
        let (block, rest) = back.split_at(back.len().min(BLOCK as usize));
        let (len, end) = (block.len(), BLOCK as usize);
        assert!(len == 100 || len == end && back.len() == first.len(), "{} bytes", back.len());
        assert!(*block == first[..len] || *block == second[..len], "the first block");
        // What no fsync has covered may be a hole.
        assert!(rest.is_empty() || *rest == first[end..] || rest.iter().all(|byte| *byte == 0), "the second block");
        assert!(!is_last || back == second);
    });
}

/// A file is cut in a block that is buffered, and grows again: what the block held before does not come back, whichever
/// write of that fails first.
#[test]
fn a_cut_block_is_smoothed_again_with_what_the_cut_left() {
    // A last block that fits its page as a tail, and one that does not.
    for cut in [6000, 8100] {
        let tried = (1..).take_while(|nth| grows_after_a_cut(cut, *nth)).count();
        assert!(tried >= 3, "every write had its turn");
    }
}

/// The `nth` write of the growth fails. Whether there was one.
fn grows_after_a_cut(cut: usize, nth: u64) -> bool {
    let setup = Setup::default();
    let (block, size) = (BLOCK as usize, 2 * BLOCK as usize);
    let old = fill(size, &mut Rng(1));
    let new = fill(block, &mut Rng(2));
    let mut last = old.clone();
    last[block..cut].copy_from_slice(&new[..cut - block]);
    last[cut..].fill(0);
    let crash = Arc::new(CrashBackend::new());
    let store = FaultBackend::new(crash.clone());
    let file = File::create(setup.context(), create_in(&store), "test").expect("creates");
    file.write_at(0, &old).expect("writes");
    file.settle_now().expect("settles");
    crash.sync().expect("syncs");
    file.write_at(BLOCK, &new).expect("is buffered");
    file.truncate(cut as u64).expect("cuts");
    file.write_at(3 * BLOCK, &new).expect("is buffered");
    store.faults().fail_nth(Call::Write, nth, libc::EIO);
    if file.flush().is_ok() {
        return false;
    }
    let from = crash.position();
    file.sync().expect("syncs");
    power_cuts(&crash, from, |state, is_last| {
        let what = format!("cut to {cut}, write {nth} failed");
        let again = File::open(setup.context(), raw(state), "again").expect("opens");
        let mut back = vec![0; again.size() as usize];
        again.read_at(0, &mut back).unwrap_or_else(|e| panic!("{what}: {e}"));
        let is_grown = back.len() == 4 * block;
        let may_be_short = !is_last && [cut, size].contains(&back.len());
        assert!(is_grown || may_be_short, "{what}: {} bytes", back.len());
        assert!(!is_grown || back[..size] == last, "{what}: a block that never was");
        assert!(!is_last || back[3 * block..] == new, "{what}");
    });
    true
}
