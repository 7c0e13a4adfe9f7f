//! Deduplication domains: which equal blocks are equal in the store, and that what a block's key depends on is always
//! at hand again.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::common;

use common::{Rng, Setup, create_in, epochs, fill, raw};
use lamassu_format::{BlockNo, PageNo};
use lamassu_format::{Domain, Suite};
use lamassu_store::backend::MemoryBackend;
use lamassu_store::file::{DamageKind, File, FileContext, Rekey};
use std::sync::Arc;

const B: u64 = 4096;

/// Every suite with every domain that it can keep.
fn setups() -> impl Iterator<Item = Setup> {
    let all = Suite::ALL.into_iter().flat_map(|suite| Domain::ALL.map(|domain| (suite, domain)));
    all.filter(|(suite, domain)| domain.is_for(*suite)).map(|(suite, domain)| Setup {
        suite,
        domain,
        reserved: 8,
        ..Setup::default()
    })
}

fn new_file(ctx: &Arc<FileContext>) -> (MemoryBackend, File) {
    let store = MemoryBackend::new();
    let file = File::create(ctx.clone(), create_in(&store), "test").unwrap();
    (store, file)
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.size() as usize];
    assert_eq!(file.read_at(0, &mut bytes).unwrap(), bytes.len());
    bytes
}

/// Block `b` as the store has it.
fn stored(store: &MemoryBackend, setup: &Setup, b: u64) -> Vec<u8> {
    let offset = setup.context().geometry.block_offset(BlockNo(b)).0;
    let mut bytes = vec![0; B as usize];
    assert_eq!(raw(store).read_at(offset, &mut bytes).unwrap(), bytes.len());
    bytes
}

/// Small writes are sealed by the commit, large ones on their way into the buffer.
#[test]
fn what_is_equal_in_the_store() {
    for setup in setups() {
        for (blocks, how) in [(3, "by the commit"), (40, "ahead")] {
            let ctx = setup.context();
            let ((one, a), (two, b)) = (new_file(&ctx), new_file(&ctx));
            let bytes = fill(B as usize, &mut Rng(1)).repeat(blocks);
            for file in [&a, &b] {
                file.write_at(0, &bytes).unwrap();
                file.settle_now().unwrap();
            }
            let last = blocks as u64 - 1;
            let what = format!("{:?} {:?} {how}", setup.suite, setup.domain);
            let (first, within) = (stored(&one, &setup, 0), stored(&one, &setup, last));
            assert_eq!(first == within, setup.domain != Domain::None, "{what}: in one file");
            assert_eq!(first == stored(&two, &setup, 0), !setup.domain.is_salted(), "{what}: in two files");
            assert_eq!(
                first == stored(&two, &setup, last),
                !setup.domain.is_salted(),
                "{what}: in two files, elsewhere"
            );
            // Written over, and then as before, at the same place.
            for byte in [7, bytes[0]] {
                a.write_at(0, &vec![byte; B as usize]).unwrap();
                a.write_at(1, &bytes[1..B as usize]).unwrap();
                a.settle_now().unwrap();
                assert_eq!(stored(&one, &setup, 0) == first, byte == bytes[0], "{what}: rewritten in its place");
            }
            // Emptied and written again: where keys depend on the file, it is another one.
            a.truncate(0).unwrap();
            a.write_at(0, &bytes).unwrap();
            a.settle_now().unwrap();
            assert_eq!(stored(&one, &setup, 0) == first, !setup.domain.is_salted(), "{what}: emptied first");
            assert!(content(&a) == bytes && content(&b) == bytes, "{what}");
        }
    }
}

#[test]
fn equal_small_files() {
    for setup in setups() {
        let ctx = setup.context();
        let stores = [0, 1].map(|_| {
            let (store, file) = new_file(&ctx);
            file.write_at(0, b"a small file, all of it in its page").unwrap();
            file.settle_now().unwrap();
            common::sector(&store, 0)
        });
        assert_eq!(stores[0] == stores[1], !setup.domain.is_salted(), "{:?} {:?}", setup.suite, setup.domain);
    }
}

/// A backing file says what it is in its pages: a copy of it is readable wherever it lies, at the same time as the
/// original, and goes its own way.
#[test]
fn copies_of_a_backing_file_are_readable() {
    for setup in setups() {
        let ctx = setup.context();
        let (store, file) = new_file(&ctx);
        // Several pages, a hole, a block that is pending when it is copied, and a tail.
        let mut bytes = fill((250 * B + 99) as usize, &mut Rng(2));
        file.write_at(0, &bytes).unwrap();
        file.punch(20 * B, 3 * B).unwrap();
        bytes[20 * B as usize..23 * B as usize].fill(0);
        file.settle_now().unwrap();
        file.write_at(30 * B, &bytes[..B as usize]).unwrap();
        bytes.copy_within(..B as usize, 30 * B as usize);
        file.flush().unwrap();
        let mut backing = vec![0; raw(&store).stat().unwrap().len as usize];
        raw(&store).read_at(0, &mut backing).unwrap();
        let elsewhere = MemoryBackend::new();
        let copy = create_in(&elsewhere);
        copy.write_at(0, &backing).unwrap();
        let what = format!("{:?} {:?}", setup.suite, setup.domain);
        let other = File::open(setup.context(), copy, "copy").unwrap();
        assert!(content(&other) == bytes && content(&file) == bytes, "{what}");
        other.write_at(10 * B, b"a change").unwrap();
        other.settle_now().unwrap();
        let found = other.check(false, &mut |_| {}).unwrap();
        assert!(found.damage.is_empty(), "{what}: {:?}", found.damage);
        assert!(content(&file) == bytes, "{what}");
        bytes[10 * B as usize..][..8].copy_from_slice(b"a change");
        assert!(content(&other) == bytes, "{what}");
    }
}

#[test]
fn blocks_are_copied_between_files_only_where_no_salt_forbids_it() {
    for setup in setups() {
        let ctx = setup.context();
        let ((_a, from), (_b, to)) = (new_file(&ctx), new_file(&ctx));
        from.write_at(0, &fill((20 * B) as usize, &mut Rng(3))).unwrap();
        from.settle_now().unwrap();
        let copied = to.copy_from(&from, 0, 0, 20 * B).unwrap();
        assert_eq!(copied, (!setup.domain.is_salted()).then_some(20 * B), "{:?} {:?}", setup.suite, setup.domain);
    }
}

/// Some writers empty the file, others write what is sealed before they have the lock: none is ever read back as
/// damage.
#[test]
fn emptying_beside_large_writes() {
    let setup = Setup { domain: Domain::File, ..Setup::default() };
    let ctx = setup.context();
    let (store, file) = new_file(&ctx);
    let bytes = fill((32 * B) as usize, &mut Rng(4));
    std::thread::scope(|s| {
        for writer in 0..3u64 {
            let (file, bytes) = (&file, &bytes);
            s.spawn(move || {
                for round in 0..60u64 {
                    if writer == 0 && round % 2 == 0 {
                        file.truncate(0).unwrap();
                    }
                    file.write_at((writer * 7 + round % 5) * B, bytes).unwrap();
                    if round % 7 == writer {
                        file.sync().unwrap();
                    }
                    let mut back = vec![0; bytes.len()];
                    file.read_at(writer * 7 * B, &mut back).unwrap();
                }
            });
        }
    });
    file.truncate(0).unwrap();
    file.write_at(0, &bytes).unwrap();
    file.settle_now().unwrap();
    let again = File::open(ctx, raw(&store), "again").unwrap();
    assert!(content(&again) == bytes);
    assert!(again.check(false, &mut |_| {}).unwrap().damage.is_empty());
}

#[test]
fn a_page_without_a_file_id_is_damage_where_keys_need_it() {
    let zone = Setup::default();
    let (store, file) = new_file(&zone.context());
    file.write_at(0, b"convergent").unwrap();
    file.settle_now().unwrap();
    drop(file);
    let salted = Setup { domain: Domain::File, ..Setup::default() };
    let file = File::open(salted.context(), raw(&store), "test").unwrap();
    let damage = file.check(false, &mut |_| {}).unwrap().damage;
    assert!(damage.iter().any(|d| d.kind == DamageKind::PageFormat && d.page == PageNo::ZERO), "{damage:?}");
    assert!(file.write_at(0, b"more").is_err());
    // Getting rid of it makes it a file like any other.
    file.truncate(0).unwrap();
    file.write_at(0, &[1; 9000]).unwrap();
    file.settle_now().unwrap();
    assert!(content(&File::open(salted.context(), raw(&store), "test").unwrap()) == [1; 9000]);
}

/// Without page 0 a file's id is that of its other pages.
#[test]
fn blocks_are_read_where_the_first_page_is_damaged() {
    for domain in [Domain::File, Domain::None] {
        let setup = Setup { domain, reserved: 8, ..Setup::default() };
        let (store, file) = new_file(&setup.context());
        let bytes = fill((300 * B) as usize, &mut Rng(5));
        file.write_at(0, &bytes).unwrap();
        file.settle_now().unwrap();
        drop(file);
        common::flip(&store, 100);
        for last_too in [false, true] {
            if last_too {
                common::flip(&store, setup.context().geometry.page_offset(PageNo(2)).0 + 100);
            }
            let file = File::open(setup.context(), raw(&store), "test").unwrap();
            let mut back = vec![0; (100 * B) as usize];
            assert_eq!(file.read_at(116 * B, &mut back).unwrap(), back.len());
            assert!(back == bytes[(116 * B) as usize..(216 * B) as usize], "{domain:?}");
            assert!(file.write_at(116 * B, &back).is_err(), "a damaged page 0 tells nothing");
        }
    }
}

#[test]
fn re_keying_keeps_content_and_what_it_depends_on() {
    for setup in setups() {
        let setup = Setup { epochs: 2, ..setup };
        let ctx = setup.context();
        ctx.ring.replace(&epochs(1..=1, 1), &epochs(1..=1, 2));
        let (store, file) = new_file(&ctx);
        let bytes = fill((200 * B + 5) as usize, &mut Rng(6));
        file.write_at(0, &bytes).unwrap();
        file.settle_now().unwrap();
        ctx.ring.replace(&epochs(1..=2, 1), &epochs(1..=2, 2));
        file.write_at(3 * B, &bytes[3 * B as usize..][..B as usize]).unwrap(); // among old ones, one under the new key
        let (mut from, mut reencrypted) = (Some(PageNo::ZERO), 0);
        while let Some(page) = from {
            let step = file.rekey(Rekey::Full, page).unwrap();
            assert_eq!(step.damaged, 0);
            (from, reencrypted) = (step.next, reencrypted + step.reencrypted);
        }
        assert_eq!(reencrypted, 199, "{:?} {:?}", setup.suite, setup.domain);
        drop(file);
        ctx.ring.replace(&epochs(2..=2, 1), &epochs(2..=2, 2));
        assert!(content(&File::open(ctx, raw(&store), "again").unwrap()) == bytes);
    }
}
