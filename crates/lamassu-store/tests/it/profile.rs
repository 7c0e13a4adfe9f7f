//! Profiles of files: what lies in the store, what is verified, how a file comes to another one, and that a store
//! cannot choose.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::common;

use common::{Rng, Setup, change_profile, create_in, fill, flip, profiles, raw};
use lamassu_format::profile::{KeyKind, Protection};
use lamassu_format::{BlockNo, Domain, FileId, Hash, Method, PAGE_LEN, Page, PageNo, Profile, Suite};
use lamassu_store::StoreError;
use lamassu_store::backend::{MemoryBackend, SetTime, Time};
use lamassu_store::file::{DamageKind, File, FileContext, Integrity, Rekey};
use std::sync::Arc;

const B: u64 = 4096;

fn of(protection: Protection, key: KeyKind) -> Profile {
    Profile::new(protection, key).unwrap()
}

fn plain() -> Profile {
    of(Protection::Integrity, KeyKind::Convergent)
}

fn random() -> Profile {
    of(Protection::Both, KeyKind::Random)
}

fn setup(suite: Suite) -> Setup {
    Setup { suite, reserved: 8, ..Setup::default() }
}

fn new_file(ctx: &Arc<FileContext>, profile: Profile) -> (MemoryBackend, File) {
    let store = MemoryBackend::new();
    let file = File::create(ctx.clone(), create_in(&store), "test").unwrap();
    file.inherit(profile).unwrap();
    (store, file)
}

fn stored(ctx: &FileContext, store: &MemoryBackend, b: u64) -> Vec<u8> {
    let mut bytes = vec![0; B as usize];
    assert_eq!(raw(store).read_at(ctx.geometry.block_offset(BlockNo(b)).0, &mut bytes).unwrap(), bytes.len());
    bytes
}

fn content(file: &File) -> Result<Vec<u8>, StoreError> {
    let mut bytes = vec![0; file.size() as usize];
    assert_eq!(file.read_at(0, &mut bytes)?, bytes.len());
    Ok(bytes)
}

fn reopened(ctx: &Arc<FileContext>, store: &MemoryBackend) -> File {
    File::open(ctx.clone(), raw(store), "test").unwrap()
}

#[test]
fn what_lies_in_the_store() {
    for suite in Suite::ALL {
        for profile in profiles(suite) {
            // Sealed by the commit, and ahead of it.
            for blocks in [3, 40] {
                let ctx = setup(suite).context();
                let ((one, a), (two, b)) = (new_file(&ctx, profile), new_file(&ctx, profile));
                let block = fill(B as usize, &mut Rng(1));
                for file in [&a, &b] {
                    file.write_at(0, &block.repeat(blocks)).unwrap();
                    file.settle_now().unwrap();
                }
                let (first, second, other) = (stored(&ctx, &one, 0), stored(&ctx, &one, 1), stored(&ctx, &two, 0));
                let what = format!("{suite:?} {profile:?}");
                assert_eq!(first == block, profile.protection().is_plain(), "{what}");
                assert_eq!(first, second, "{what}: equal in one file");
                assert_eq!(first == other, profile.key() == KeyKind::Convergent, "{what}: equal in two files");
                drop(a);
                let again = reopened(&ctx, &one);
                assert_eq!(again.profile(), (profile, false), "{what}: its pages say so");
                assert!(content(&again).unwrap() == block.repeat(blocks), "{what}");
                assert!(again.check(false, &mut |_| {}).unwrap().damage.is_empty(), "{what}");
            }
        }
    }
}

/// Equal blocks are equal in the store where cipher and hash are, and nowhere else: neither beside files of the suite's
/// own method, nor beside those of a third. Blocks that are stored plain are equal whatever hashes them.
#[test]
fn files_of_other_methods_share_no_ciphertext() {
    for suite in Suite::ALL {
        let ctx = setup(suite).context();
        let block = fill(B as usize, &mut Rng(9));
        let stored_by = |protection, method| {
            let profile = of(protection, KeyKind::Convergent).by(method).unwrap();
            let (store, file) = new_file(&ctx, profile);
            file.write_at(0, &block).unwrap();
            file.settle_now().unwrap();
            stored(&ctx, &store, 0)
        };
        for (one, other) in Method::all(suite).flat_map(|one| Method::all(suite).map(move |other| (one, other))) {
            let both = [one, other].map(|method| stored_by(Protection::Both, method));
            assert_eq!(both[0] == both[1], one == other, "{suite:?} {one:?} {other:?}");
            let [one, other] = [one, other].map(Method::without_cipher);
            assert!(
                [one, other].map(|method| stored_by(Protection::Integrity, method)) == [block.clone(), block.clone()]
            );
        }
    }
}

/// A page that says a profile which its suite cannot keep was written by no program: it is refused, whatever is in it.
#[test]
fn a_page_of_a_profile_that_the_suite_lacks_is_refused() {
    for suite in Suite::ALL {
        let ctx = setup(suite).context();
        let lacks = (0..=u8::MAX).filter_map(Profile::of_number).filter(|profile| profile.check(suite).is_err());
        for profile in lacks {
            let (store, file) = new_file(&ctx, Profile::DEFAULT);
            file.write_at(0, &fill(3 * B as usize, &mut Rng(4))).unwrap();
            file.settle_now().unwrap();
            drop(file);
            // Sealed by who has the keys, as a faulty program would.
            let (geo, aad) = (&ctx.geometry, ctx.geometry.page_aad(suite, PageNo::ZERO));
            let mut bytes = [0; PAGE_LEN];
            raw(&store).read_at(0, &mut bytes).unwrap();
            ctx.ring.open_page(&aad, &mut bytes).unwrap();
            let mut page = Page::parse(&bytes, geo, PageNo::ZERO).unwrap();
            page.profile = profile;
            if page.file_id.is_none() {
                (page.file_id, page.session, page.sequence) = (FileId([1; 16]), 1, 1);
            }
            let mut bytes = page.build(geo, PageNo::ZERO);
            ctx.ring.outer().seal_page(&aad, &mut bytes).unwrap();
            raw(&store).write_at(0, &bytes[..]).unwrap();
            let read = File::open(ctx.clone(), raw(&store), "test").and_then(|file| file.read_at(0, &mut [0; 10]));
            assert!(
                matches!(read, Err(StoreError::Damaged(d)) if d.kind == DamageKind::PageFormat),
                "{suite:?} {profile:?}: {read:?}"
            );
        }
    }
}

/// A page of the same file under each other profile, put back by the store in the place of a later page, is refused.
#[test]
fn a_page_of_any_other_profile_is_an_older_one() {
    for suite in [Suite::Aes, Suite::Blake3] {
        let ctx = setup(suite).context();
        let bytes = fill(150 * B as usize, &mut Rng(6));
        let (store, file) = new_file(&ctx, Profile::DEFAULT);
        file.write_at(0, &bytes).unwrap();
        let at = ctx.geometry.page_offset(PageNo(1)).0;
        let last = |store: &MemoryBackend| {
            let mut page = vec![0; PAGE_LEN];
            raw(store).read_at(at, &mut page).unwrap();
            page
        };
        let mut older = Vec::new();
        for profile in profiles(suite) {
            change_profile(&file, profile, usize::MAX).unwrap();
            file.settle_now().unwrap();
            older.push((profile, last(&store)));
        }
        drop(file);
        let (now, page) = older.pop().unwrap();
        for (profile, older) in older {
            raw(&store).write_at(at, &older).unwrap();
            let mut block = vec![0; B as usize];
            let read = reopened(&ctx, &store).read_at(149 * B, &mut block);
            assert!(
                matches!(read, Err(StoreError::Damaged(d)) if d.kind == DamageKind::PageStale),
                "{suite:?} {profile:?} in one of {now:?}: {read:?}"
            );
        }
        raw(&store).write_at(at, &page).unwrap();
        assert!(content(&reopened(&ctx, &store)).unwrap() == bytes);
    }
}

/// With approved primitives alone a file whose hash is BLAKE3 neither opens nor is made, in any suite. One that is
/// being brought to SHA-256 opens, and is brought to the end: what is left of it is not taken for damage.
#[test]
fn approved_primitives_alone() {
    for suite in Suite::ALL {
        let approved = Setup { approved_only: true, ..setup(suite) }.context();
        let all = setup(suite).context();
        for profile in profiles(suite) {
            let is_approved = profile.method().hash(suite) == Hash::Sha256;
            let (store, file) = new_file(&all, profile);
            let bytes = fill(250 * B as usize, &mut Rng(5));
            file.write_at(0, &bytes).unwrap();
            file.settle_now().unwrap();
            drop(file);
            let opened = File::open(approved.clone(), raw(&store), "test");
            assert_eq!(matches!(opened, Err(StoreError::NotApproved(_))), !is_approved, "{suite:?} {profile:?}");
            if let Ok(file) = opened {
                assert!(content(&file).unwrap() == bytes, "{suite:?} {profile:?}");
            }
            let made = File::create(approved.clone(), create_in(&MemoryBackend::new()), "test");
            let made = made.and_then(|file| file.inherit(profile));
            let is_refused = matches!(made, Err(StoreError::NotApproved(_)));
            let default_is_refused = suite.hash() != Hash::Sha256;
            assert_eq!(is_refused, !is_approved || default_is_refused, "{suite:?} {profile:?}");
            let Some(to) = profiles(suite).into_iter().find(|to| to.method().hash(suite) == Hash::Sha256) else {
                continue;
            };
            let file = reopened(&all, &store);
            if !is_approved && file.begin_profile(to).unwrap() {
                file.settle_now().unwrap();
                drop(file);
                let file = File::open(approved.clone(), raw(&store), "test").unwrap();
                assert!(content(&file).unwrap() == bytes, "{suite:?} {profile:?}");
                assert!(matches!(file.begin_profile(profile), Err(StoreError::NotApproved(_))));
                assert!(change_profile(&file, to, usize::MAX).unwrap() && content(&file).unwrap() == bytes);
                assert!(file.check(false, &mut |_| {}).unwrap().damage.is_empty());
            }
        }
    }
}

/// Old blocks are found in whichever form they are, one after another of them in another.
#[test]
fn a_file_may_be_of_many_forms_at_once() {
    for suite in [Suite::Aes, Suite::Chacha] {
        let ctx = setup(suite).context();
        let all = profiles(suite);
        let (store, file) = new_file(&ctx, all[0]);
        let mut bytes = fill(60 * B as usize, &mut Rng(2));
        file.write_at(0, &bytes).unwrap();
        // Begun and broken off again and again: each time some blocks are written anew.
        for (n, profile) in all.iter().enumerate().skip(1) {
            file.begin_profile(*profile).unwrap();
            let piece = fill(2 * B as usize, &mut Rng(n as u64));
            let at = (2 * n * B as usize) % bytes.len();
            file.write_at(at as u64, &piece).unwrap();
            bytes[at..at + piece.len()].copy_from_slice(&piece);
            file.settle_now().unwrap();
        }
        let again = reopened(&ctx, &store);
        assert!(again.profile().1 && content(&again).unwrap() == bytes, "{suite:?}");
        assert!(again.check(false, &mut |_| {}).unwrap().damage.is_empty(), "{suite:?}");
        drop((again, file));
        let file = reopened(&ctx, &store);
        assert!(change_profile(&file, Profile::DEFAULT, usize::MAX).unwrap());
        assert!(file.profile() == (Profile::DEFAULT, false) && content(&file).unwrap() == bytes, "{suite:?}");
    }
}

#[test]
fn an_empty_file_keeps_its_profile() {
    let ctx = setup(Suite::Aes).context();
    for profile in profiles(Suite::Aes) {
        let (store, file) = new_file(&ctx, profile);
        file.settle_now().unwrap();
        drop(file);
        assert_eq!(reopened(&ctx, &store).profile(), (profile, false));
        // Of a file that has a page nobody else says it.
        let file = reopened(&ctx, &store);
        file.inherit(Profile::DEFAULT).unwrap();
        assert_eq!(file.profile(), (profile, false));
        file.write_at(0, &[1; 9000]).unwrap();
        file.settle_now().unwrap();
        file.truncate(0).unwrap();
        file.settle_now().unwrap();
        drop(file);
        assert_eq!(reopened(&ctx, &store).profile(), (profile, false), "emptied");
    }
}

/// Small files are equal where their profiles are, and random ones never.
#[test]
fn equal_small_files() {
    let ctx = setup(Suite::Aes).context();
    let page = |profile| {
        let (store, file) = new_file(&ctx, profile);
        file.write_at(0, b"all of it in the page").unwrap();
        file.settle_now().unwrap();
        common::sector(&store, 0)
    };
    for profile in profiles(Suite::Aes) {
        assert_eq!(page(profile) == page(profile), profile.key() == KeyKind::Convergent, "{profile:?}");
        assert_eq!(page(profile) == page(Profile::DEFAULT), profile.is_default(), "{profile:?}");
    }
}

/// A changed block is an error where reads verify, and something else where they do not; `check` finds it anyway.
#[test]
fn what_reads_verify() {
    for (suite, integrity) in
        [(Suite::Aes, Integrity::Full), (Suite::Aes, Integrity::Metadata), (Suite::Blake3, Integrity::Full)]
    {
        for profile in profiles(suite) {
            let ctx = Setup { integrity, codec: None, ..setup(suite) }.context();
            let (store, file) = new_file(&ctx, profile);
            let bytes = fill(10 * B as usize, &mut Rng(2));
            file.write_at(0, &bytes).unwrap();
            file.settle_now().unwrap();
            drop(file);
            flip(&store, ctx.geometry.block_offset(BlockNo(4)).0 + 100);
            let file = reopened(&ctx, &store);
            let is_left_out = match profile.protection() {
                Protection::Both => integrity == Integrity::Metadata,
                Protection::Encrypt | Protection::None => true,
                Protection::Integrity => false,
            };
            let what = format!("{suite:?} {integrity:?} {profile:?}");
            match content(&file) {
                Ok(read) => assert!(is_left_out && read != bytes, "{what}"),
                Err(StoreError::Damaged(damage)) => {
                    assert_eq!((damage.kind, is_left_out), (DamageKind::BlockHash, false), "{what}");
                }
                Err(error) => panic!("{what}: {error}"),
            }
            let found = file.check(false, &mut |_| {}).unwrap().damage;
            assert!(matches!(found[..], [damage] if damage.block == Some(BlockNo(4))), "{what}: {found:?}");
        }
    }
}

/// From every profile to every other, for files of no, one and several pages, with a reader that opens at each step.
/// Files of several pages only where one end is the default or the next profile: what differs with the length is how a
/// file is gone through, not how its blocks are stored.
#[test]
fn a_file_comes_to_another_profile() {
    for suite in Suite::ALL {
        for len in [0, 100, 5 * B + 7, 260 * B + 99] {
            for from in profiles(suite) {
                let is_near = |to: &Profile| from.is_default() || to.is_default() || to.number() == from.number() + 1;
                for to in profiles(suite).into_iter().filter(|to| len < 100 * B || is_near(to)) {
                    let ctx = setup(suite).context();
                    let (store, file) = new_file(&ctx, from);
                    let mut bytes = fill(len as usize, &mut Rng(len));
                    file.write_at(0, &bytes).unwrap();
                    if len > 4 * B {
                        file.punch(B, B).unwrap();
                        bytes[B as usize..2 * B as usize].fill(0);
                    }
                    file.settle_now().unwrap();
                    let time = Time { seconds: 12_345, nanos: 6 };
                    file.set_times(SetTime::Keep, SetTime::At(time)).unwrap();
                    let what = format!("{suite:?} {from:?} to {to:?}, {len} bytes");
                    assert!(change_profile(&file, to, usize::MAX).unwrap(), "{what}");
                    assert_eq!(file.profile(), (to, false), "{what}");
                    assert!(content(&file).unwrap() == bytes, "{what}");
                    file.settle_now().unwrap();
                    drop(file);
                    let file = reopened(&ctx, &store);
                    assert_eq!((file.profile(), file.stat().unwrap().mtime), ((to, false), time), "{what}");
                    assert!(content(&file).unwrap() == bytes, "{what}");
                    assert!(file.check(false, &mut |_| {}).unwrap().damage.is_empty(), "{what}");
                    if len > 4 * B {
                        assert_eq!(
                            stored(&ctx, &store, 3) == bytes[3 * B as usize..4 * B as usize],
                            to.protection().is_plain()
                        );
                    }
                    // A second time there is nothing to do.
                    assert!(!file.begin_profile(to).unwrap(), "{what}");
                }
            }
        }
    }
}

#[test]
fn what_is_written_meanwhile_is_of_the_new_profile() {
    let ctx = setup(Suite::Aes).context();
    let (store, file) = new_file(&ctx, Profile::DEFAULT);
    let mut bytes = fill(2000 * B as usize, &mut Rng(3));
    file.write_at(0, &bytes).unwrap();
    assert!(file.begin_profile(plain()).unwrap());
    let piece = fill(100 * B as usize, &mut Rng(4));
    let write = |at: u64, bytes: &mut Vec<u8>| {
        file.write_at(at, &piece).unwrap();
        bytes.resize(bytes.len().max(at as usize + piece.len()), 0);
        bytes[at as usize..][..piece.len()].copy_from_slice(&piece);
    };
    write(1500 * B, &mut bytes);
    file.settle_now().unwrap();
    assert!(
        stored(&ctx, &store, 1500) == piece[..B as usize]
            && stored(&ctx, &store, 1400) != bytes[1400 * B as usize..][..B as usize]
    );
    let reader = reopened(&ctx, &store);
    assert!(reader.profile() == (plain(), true) && content(&reader).unwrap() == bytes, "of two profiles");
    drop(reader);
    let step = file.rekey(Rekey::Profile, PageNo::ZERO).unwrap();
    write(10, &mut bytes);
    write(2000 * B, &mut bytes);
    file.truncate(2050 * B).unwrap();
    bytes.truncate(2050 * B as usize);
    let mut next = step.next;
    while let Some(page) = next {
        next = file.rekey(Rekey::Profile, page).unwrap().next;
    }
    assert!(file.end_profile().unwrap());
    file.settle_now().unwrap();
    drop(file);
    let file = reopened(&ctx, &store);
    assert!(file.profile() == (plain(), false) && content(&file).unwrap() == bytes);
    assert!((0..2050).all(|b| stored(&ctx, &store, b) == bytes[(b * B) as usize..][..B as usize]), "all are plain");
}

/// A block that does not verify stays as it is, and the file in between.
#[test]
fn damage_is_not_sealed_anew() {
    let ctx = setup(Suite::Aes).context();
    for damaged in [3, 300] {
        let (store, file) = new_file(&ctx, of(Protection::Encrypt, KeyKind::Convergent));
        let bytes = fill(400 * B as usize, &mut Rng(5));
        file.write_at(0, &bytes).unwrap();
        file.settle_now().unwrap();
        drop(file);
        flip(&store, ctx.geometry.block_offset(BlockNo(damaged)).0 + 5);
        let file = reopened(&ctx, &store);
        assert!(file.begin_profile(Profile::DEFAULT).unwrap());
        let step = file.rekey(Rekey::Profile, PageNo::ZERO).unwrap();
        assert_eq!((step.next, step.damaged), (None, 1));
        if damaged > 116 {
            assert!(!file.end_profile().unwrap(), "a page is left");
        }
        let mut block = vec![0; B as usize];
        assert!(matches!(file.read_at(damaged * B, &mut block), Err(StoreError::Damaged(_))));
        // Written anew the block is whole, and the change can be ended.
        file.write_at(damaged * B, &bytes[(damaged * B) as usize..][..B as usize]).unwrap();
        assert!(change_profile(&file, Profile::DEFAULT, usize::MAX).unwrap());
        assert!(content(&file).unwrap() == bytes);
    }
}

/// Without an anchor a store can put older pages back. It cannot mix them with those of another profile.
#[test]
fn pages_of_another_profile_are_damage() {
    let ctx = setup(Suite::Aes).context();
    let none = of(Protection::None, KeyKind::Convergent);
    let (store, file) = new_file(&ctx, none);
    let bytes = fill(350 * B as usize, &mut Rng(6));
    file.write_at(0, &bytes).unwrap();
    file.settle_now().unwrap();
    let page = |g: u64| {
        let mut page = vec![0; PAGE_LEN];
        raw(&store).read_at(ctx.geometry.page_offset(PageNo(g)).0, &mut page).unwrap();
        page
    };
    let before: Vec<Vec<u8>> = (0..3).map(page).collect();
    assert!(change_profile(&file, Profile::DEFAULT, usize::MAX).unwrap());
    file.settle_now().unwrap();
    drop(file);
    let now: Vec<Vec<u8>> = (0..3).map(page).collect();
    let put = |g: u64, page: &[u8]| raw(&store).write_at(ctx.geometry.page_offset(PageNo(g)).0, page).unwrap();
    for g in 1..3 {
        put(g, &before[g as usize]);
        let file = reopened(&ctx, &store);
        let mut block = vec![0; B as usize];
        let read = file.read_at(g * 116 * B, &mut block);
        assert!(matches!(read, Err(StoreError::Damaged(d)) if d.kind == DamageKind::PageStale), "{read:?}");
        assert!(file.read_at(0, &mut block).is_ok() && block == bytes[..B as usize]);
        put(g, &now[g as usize]);
    }
    // The first page of before rules: what is of the new profile is not read as plain.
    put(0, &before[0]);
    let mut block = vec![0; B as usize];
    let read = reopened(&ctx, &store).read_at(200 * B, &mut block);
    assert!(matches!(read, Err(StoreError::Damaged(d)) if d.kind == DamageKind::PageStale), "{read:?}");
}

/// Blocks are copied as they are stored between files of one profile alone, and never where the file goes into the key.
#[test]
fn copies_between_files() {
    let ctx = setup(Suite::Aes).context();
    let bytes = fill(20 * B as usize, &mut Rng(7));
    for from in profiles(Suite::Aes) {
        let (_source, source) = new_file(&ctx, from);
        source.write_at(0, &bytes).unwrap();
        source.settle_now().unwrap();
        for to in profiles(Suite::Aes) {
            let (_target, target) = new_file(&ctx, to);
            let copied = target.copy_from(&source, 0, 0, 20 * B).unwrap();
            let can = from == to && from.key() == KeyKind::Convergent;
            assert_eq!(copied.is_some(), can, "{from:?} to {to:?}");
            assert!(!can || content(&target).unwrap() == bytes);
        }
    }
}

/// In a vault whose keys depend on files anyway.
#[test]
fn narrow_domains_have_profiles_too() {
    for domain in [Domain::Family, Domain::File, Domain::None] {
        let ctx = Setup { domain, ..setup(Suite::Aes) }.context();
        let (store, file) = new_file(&ctx, random());
        let bytes = fill(150 * B as usize, &mut Rng(8));
        file.write_at(0, &bytes).unwrap();
        file.settle_now().unwrap();
        for profile in profiles(Suite::Aes) {
            assert!(change_profile(&file, profile, usize::MAX).unwrap(), "{domain:?} {profile:?}");
            file.settle_now().unwrap();
            let again = reopened(&ctx, &store);
            assert!(again.profile() == (profile, false) && content(&again).unwrap() == bytes, "{domain:?} {profile:?}");
        }
    }
}
