//! Damage to a backing file: an error for the range it concerns, never wrong data, the rest readable. And failures of
//! the store.

use crate::common;
use common::{Rng, Setup, create_in, fill, flip, raw, sector};
use lamassu_format::{PageNo, Suite};
use lamassu_store::Backend;
use lamassu_store::backend::fault::{Call, FaultBackend};
use lamassu_store::backend::memory::MemoryBackend;
use lamassu_store::file::{DamageKind, File, Integrity, StoreError};
use std::sync::Arc;

const N: u64 = 124 - 62;
const BLOCK: u64 = 4096;

/// A settled file of three pages and a tail.
fn sample(setup: &Setup) -> (MemoryBackend, Vec<u8>) {
    let store = MemoryBackend::new();
    let data = fill((2 * N + 5) as usize * BLOCK as usize + 700, &mut Rng(1));
    let file = File::create(setup.context(), create_in(&store), "sample").expect("creates");
    file.write_at(0, &data).expect("writes");
    file.settle_now().expect("settles");
    file.settle_now().expect("settles");
    (store, data)
}

fn open(setup: &Setup, store: &dyn Backend) -> File {
    File::open(setup.context(), raw(store), "damaged").expect("opens")
}

/// Reads block by block: the blocks that fail, and what for. Whatever is read must be right.
fn survey(file: &File, data: &[u8]) -> Vec<(u64, DamageKind)> {
    let mut bad = Vec::new();
    for b in 0..(file.size().max(data.len() as u64)).div_ceil(BLOCK) {
        let mut buf = vec![0u8; BLOCK as usize];
        match file.read_at(b * BLOCK, &mut buf) {
            Ok(n) => {
                let want = &data[(b * BLOCK) as usize..data.len().min(((b + 1) * BLOCK) as usize)];
                assert!(buf[..n] == want[..n] && n == want.len(), "block {b}: wrong data instead of an error");
            }
            Err(StoreError::Damaged(damage)) => bad.push((b, damage.kind)),
            Err(other) => panic!("block {b}: {other}"),
        }
    }
    bad
}

fn expect_pages(found: &[(u64, DamageKind)], pages: std::ops::Range<u64>, kinds: &[DamageKind]) {
    let last = 2 * N + 5;
    let want: Vec<u64> = (pages.start * N..(pages.end * N).min(last + 1)).collect();
    assert_eq!(found.iter().map(|(b, _)| *b).collect::<Vec<_>>(), want);
    assert!(found.iter().all(|(_, kind)| kinds.contains(kind)), "{found:?}");
}

#[test]
fn every_flipped_bit_of_a_page_costs_that_page_alone() {
    let setup = Setup::default();
    let (pristine, data) = sample(&setup);
    for page in 0..3u64 {
        for at in [0, 20, 30, 45, 60, 90, 130, 4000, 4095] {
            let sim = pristine.snapshot();
            flip(&sim, page * (N + 1) * BLOCK + at);
            let found = survey(&open(&setup, &sim), &data);
            expect_pages(&found, page..page + 1, &[DamageKind::PageSeal, DamageKind::PageKey]);
        }
    }
}

#[test]
fn a_file_with_a_damaged_first_page_that_is_only_read_has_nothing_to_settle() {
    let setup = Setup::default();
    let (store, data) = sample(&setup);
    flip(&store, 60);
    let file = open(&setup, &store);
    survey(&file, &data);
    assert!(!file.needs_settle());
    file.settle_now().expect("nothing was to be changed");
}

#[test]
fn every_flipped_bit_of_a_block_costs_that_block_alone() {
    for suite in Suite::ALL {
        let setup = Setup { suite, ..Setup::default() };
        let (pristine, data) = sample(&setup);
        for block in [0, 1, N - 1, N, 2 * N + 4] {
            for at in [0, 2000, 4095] {
                let sim = pristine.snapshot();
                flip(&sim, (block + block / N + 1) * BLOCK + at);
                assert_eq!(survey(&open(&setup, &sim), &data), [(block, DamageKind::BlockHash)], "{suite:?}");
            }
        }
    }
}

#[test]
fn swapped_blocks_and_pages_are_found() {
    let setup = Setup::default();
    let (sim, data) = sample(&setup);
    let swap = |a: u64, b: u64| {
        let copy = sim.snapshot();
        let (x, y) = (sector(&sim, a), sector(&sim, b));
        raw(&copy).write_at(a * 4096, &y).expect("writes");
        raw(&copy).write_at(b * 4096, &x).expect("writes");
        survey(&open(&setup, &copy), &data)
    };
    assert_eq!(swap(1, 2), [(0, DamageKind::BlockHash), (1, DamageKind::BlockHash)]);
    expect_pages(&swap(0, N + 1), 0..2, &[DamageKind::PageKey, DamageKind::PageOfOtherFile]);
}

#[test]
fn pages_of_another_file_are_found() {
    let setup = Setup::default();
    let (sim, data) = sample(&setup);
    let (other, _) = sample(&setup);
    for page in [1, 2] {
        let copy = sim.snapshot();
        let at = page * (N + 1);
        raw(&copy).write_at(at * 4096, &sector(&other, at)).expect("writes");
        let found = survey(&open(&setup, &copy), &data);
        expect_pages(&found, page..page + 1, &[DamageKind::PageOfOtherFile]);
    }
}

#[test]
fn zeroed_and_truncated_regions_are_found() {
    let setup = Setup::default();
    let (sim, data) = sample(&setup);
    let zero = |sectors: std::ops::Range<u64>| {
        let copy = sim.snapshot();
        raw(&copy).punch(sectors.start * 4096, (sectors.end - sectors.start) * 4096).expect("punches");
        survey(&open(&setup, &copy), &data)
    };
    assert_eq!(zero(3..4), [(2, DamageKind::BlockHash)]);
    expect_pages(&zero(0..1), 0..1, &[DamageKind::PageMissing]);
    expect_pages(&zero(N + 1..N + 2), 1..2, &[DamageKind::PageMissing]);
    // The last page gone: the floor in page 0 tells that there was one.
    expect_pages(&zero(2 * (N + 1)..2 * (N + 1) + 1), 2..3, &[DamageKind::Truncated, DamageKind::PageMissing]);

    for keep in [1, 2, 30, N + 1, N + 2, 2 * N + 2, 2 * N + 3, 2 * N + 5] {
        let copy = sim.snapshot();
        raw(&copy).set_len(keep * 4096).expect("truncates");
        let found = survey(&open(&setup, &copy), &data);
        assert!(!found.is_empty(), "a file cut to {keep} sectors reads as whole");
        let first_gone = (0..2 * N + 6).find(|b| b + b / N + 2 > keep).expect("something is gone");
        assert!(found[0].0 >= first_gone.min(found[0].0), "what is present stays readable: {found:?}");
        assert!(found.len() as u64 >= 2 * N + 5 - first_gone, "cut to {keep}: {} of {first_gone}", found.len());
    }
}

#[test]
fn metadata_mode_finds_pages_and_not_blocks() {
    let setup = Setup { integrity: Integrity::Metadata, codec: None, ..Setup::default() };
    let (sim, data) = sample(&setup);
    flip(&sim, 5 * BLOCK);
    let file = open(&setup, &sim);
    let mut buf = vec![0u8; BLOCK as usize];
    file.read_at(4 * BLOCK, &mut buf).expect("metadata mode does not re-hash");
    assert_ne!(buf, data[4 * BLOCK as usize..5 * BLOCK as usize]);
    flip(&sim, 0);
    expect_pages(&survey(&open(&setup, &sim), &data), 0..1, &[DamageKind::PageSeal, DamageKind::PageKey]);
    // Malleable suites are re-hashed whatever the mode says.
    let setup = Setup { suite: Suite::Chacha, integrity: Integrity::Metadata, ..Setup::default() };
    let (sim, data) = sample(&setup);
    flip(&sim, 5 * BLOCK);
    assert_eq!(survey(&open(&setup, &sim), &data), [(4, DamageKind::BlockHash)]);
}

#[test]
fn check_names_all_damage_and_rewriting_heals() {
    let setup = Setup::default();
    let (sim, data) = sample(&setup);
    flip(&sim, 5 * BLOCK);
    flip(&sim, (N + 3) * BLOCK);
    let file = open(&setup, &sim);
    let found = file.check(false, &mut |_| {}).expect("checks");
    let blocks: Vec<_> = found.damage.iter().map(|d| (d.kind, d.segment, d.page.0, d.block.map(|b| b.0))).collect();
    assert_eq!(blocks, [(DamageKind::BlockHash, 0, 0, Some(4)), (DamageKind::BlockHash, 1, 1, Some(N + 1))]);
    // The same content written again puts the block right, although no key changes.
    file.write_at(4 * BLOCK, &data[4 * BLOCK as usize..5 * BLOCK as usize]).expect("writes");
    file.write_at((N + 1) * BLOCK, &[7; BLOCK as usize]).expect("writes");
    file.settle_now().expect("settles");
    let found = open(&setup, &sim).check(false, &mut |_| {}).expect("checks");
    assert_eq!(found.damage, []);
}

#[test]
fn arbitrary_bytes_never_panic() {
    let setup = Setup::default();
    let (pristine, _) = sample(&setup);
    let mut rng = Rng(99);
    for _ in 0..300 {
        let sim = pristine.snapshot();
        let backing = raw(&sim);
        for _ in 0..1 + rng.below(4) {
            let count = 2 * N + 8;
            let (a, b) = (rng.below(count), rng.below(count));
            let done = match rng.below(5) {
                0 => backing.set_len(a * 4096),
                1 => backing.punch(a * 4096, 4096),
                2 => backing.write_at(a * 4096, &fill(4096, &mut rng)),
                3 => backing.write_at(a * 4096, &sector(&pristine, b)),
                _ => backing.set_len((count + a) * 4096),
            };
            done.expect("damages");
        }
        let file = open(&setup, &sim);
        let mut buf = vec![0u8; 100_000];
        for offset in (0..800_000).step_by(100_000) {
            let _ = file.read_at(offset, &mut buf);
        }
        let _ = file.check(rng.below(2) == 0, &mut |_| {});
        let _ = file.write_at(rng.below(900_000), &fill(5000, &mut rng));
        let _ = file.truncate(rng.below(900_000));
        let _ = file.settle_now();
        file.truncate(0).expect("a damaged file can always be emptied");
        file.write_at(10, b"new life").expect("and used again");
        file.settle_now().expect("settles");
        let found = open(&setup, &sim).check(false, &mut |_| {}).expect("checks");
        assert_eq!(found.damage, []);
    }
}

#[test]
fn a_full_store_loses_nothing_and_heals_when_there_is_space() {
    for budget in 0..24 {
        let setup = Setup { reserved: 4, ..Setup::default() };
        let memory = Arc::new(MemoryBackend::new());
        let store = FaultBackend::new(memory.clone());
        let file = File::create(setup.context(), create_in(&store), "full").expect("creates");
        let old = fill(40_000, &mut Rng(5));
        file.write_at(0, &old).expect("writes");
        file.settle_now().expect("settles");
        let new = fill(60_000, &mut Rng(6));
        file.write_at(3000, &new).expect("buffers");
        store.faults().no_space_after(budget * 4096);
        let failed = file.sync();
        // As if the daemon had died now: every block is old or new.
        let crashed = memory.snapshot();
        assert_eq!(open(&setup, &crashed).check(true, &mut |_| {}).expect("checks").damage, [], "budget {budget}");
        store.faults().clear_rules();
        if let Err(StoreError::Io { source, .. }) = &failed {
            assert_eq!(source.raw_os_error(), Some(libc::ENOSPC));
        }
        let mut want = old.clone();
        want.resize(63_000, 0);
        want[3000..].copy_from_slice(&new);
        let mut back = vec![0u8; 63_000];
        file.read_at(0, &mut back).expect("still there, buffered");
        assert!(back == want, "budget {budget}: content while the store is full");
        file.settle_now().expect("space came back");
        let again = open(&setup, &*memory);
        again.read_at(0, &mut back).expect("reads");
        assert!(back == want, "budget {budget}: content afterwards");
        assert_eq!(again.check(false, &mut |_| {}).expect("checks").damage, []);
    }
}

#[test]
fn a_failed_barrier_fails_the_sync_and_everything_is_written_again() {
    let setup = Setup::default();
    let memory = Arc::new(MemoryBackend::new());
    let store = FaultBackend::new(memory.clone());
    let file = File::create(setup.context(), create_in(&store), "sync").expect("creates");
    let data = fill(100_000, &mut Rng(8));
    file.write_at(0, &data).expect("writes");
    store.faults().fail_next_sync(libc::EIO);
    assert!(file.sync().is_err(), "the application learns of it");
    store.faults().reset_counters();
    file.sync().expect("now it works");
    let rewritten = store.faults().bytes(Call::Write);
    assert!(rewritten >= 25 * 4096, "every block and the page, not {rewritten} bytes");
    let mut back = vec![0u8; 100_000];
    open(&setup, &*memory).read_at(0, &mut back).expect("reads");
    assert!(back == data);
}

/// What was written before a failed barrier may be gone, whoever asked for the barrier: the next fsync says so, once.
#[test]
fn a_barrier_that_failed_unheard_fails_the_next_sync() {
    let setup = Setup::default();
    let store = FaultBackend::new(Arc::new(MemoryBackend::new()));
    let file = File::create(setup.context(), create_in(&store), "unheard").expect("creates");
    let old = fill(64 << 20, &mut Rng(1));
    file.write_at(0, &old).expect("writes");
    file.sync().expect("syncs");
    // In the middle of a write, whose commit needs several rounds.
    let new = fill(64 << 20, &mut Rng(2));
    store.faults().fail_next_sync(libc::EIO);
    let write = |i: &u64| file.write_at(i << 20, &new[(*i as usize) << 20..][..1 << 20]);
    // For a moment after the failure nothing is taken that would need another commit.
    let refused: Vec<_> = (0..64).filter(|i| write(i).is_err()).collect();
    assert!(store.faults().syncs() > 1 && refused.len() < 32, "{refused:?} refused");
    assert!(file.sync().is_err(), "a barrier within a write failed");
    refused.iter().for_each(|i| write(i).expect("writes what was refused"));
    file.sync().expect("once");
    let mut back = vec![0; new.len()];
    file.read_at(0, &mut back).expect("reads");
    assert!(back == new);
    // In the background.
    file.write_at(5000, &old[..9000]).expect("writes");
    file.flush().expect("commits");
    file.barrier_failed();
    file.settle_now().expect("a barrier of the background");
    assert!(file.sync().is_err(), "a barrier of the whole store failed");
    file.sync().expect("once");
}

#[test]
fn read_only_contexts_never_write() {
    let setup = Setup::default();
    let (sim, data) = sample(&setup);
    let file = open(&setup, &sim);
    file.write_at(0, &[1; 9000]).expect("writes");
    file.flush().expect("leaves an unsettled commit behind");
    let store = FaultBackend::new(Arc::new(sim.snapshot()));
    let file = open(&Setup { read_only: true, ..Setup::default() }, &store);
    let mut back = vec![0u8; data.len()];
    file.read_at(0, &mut back).expect("resolves in memory");
    assert!(back[..9000] == [1; 9000] && back[9000..] == data[9000..]);
    assert_eq!(file.check(false, &mut |_| {}).expect("checks").recovered, 3);
    assert!(matches!(file.write_at(0, b"x"), Err(StoreError::ReadOnly)));
    assert!(matches!(file.truncate(0), Err(StoreError::ReadOnly)));
    file.sync().expect("nothing to do");
    assert_eq!(store.faults().changes() + store.faults().syncs(), 0);
}

/// Punched blocks leave their pages, so a search for data has to look at them: at as many as its caller allows.
#[test]
fn a_search_behind_punched_blocks_has_limits() {
    let setup = Setup { reserved: 8, ..Setup::default() };
    let sim = MemoryBackend::new();
    let file = File::create(setup.context(), create_in(&sim), "punched").expect("creates");
    let span = setup.context().geometry.page_span();
    let (pages, len) = (64, 64 * span);
    (0..pages).for_each(|page| file.write_at(page * span, &[1; 4096]).expect("writes"));
    file.truncate(len).expect("grows");
    file.sync().expect("syncs");
    file.punch(0, len - span).expect("punches");
    file.settle_now().expect("settles");
    drop(file);
    let store = FaultBackend::new(Arc::new(sim));
    let looked = |offset, until, most| {
        let file = open(&setup, &store);
        store.faults().reset_counters();
        let hole = file.hole_at(offset, until, most).expect("seeks").expect("within the file");
        (hole.end, hole.looked_at, store.faults().calls(Call::Read))
    };
    let (end, looked_at, reads) = looked(0, 4096, u64::MAX);
    assert_eq!((end, looked_at), (4096, span));
    assert!(reads <= 2, "{reads}");
    let (end, looked_at, reads) = looked(4096, u64::MAX, 8 * span);
    assert_eq!((end, looked_at), (8 * span, 8 * span));
    assert!(reads <= 9, "{reads}");
    assert_eq!(looked(0, u64::MAX, 0).0, span, "one page at least");
    assert_eq!(looked(0, u64::MAX, u64::MAX).0, len - span, "all of them");
    let file = open(&setup, &store);
    assert_eq!(file.seek_data(0).expect("seeks"), Some(len - span));
    assert_eq!(file.hole_at(len - span + 5, u64::MAX, 1).expect("seeks").map(|hole| hole.end), Some(len - span + 5));
    assert_eq!(file.hole_at(len, u64::MAX, 1).expect("seeks"), None);
    assert_eq!(file.seek_data(len - span + 4096).expect("seeks"), None);
}

#[test]
fn a_huge_sparse_file_is_cheap() {
    let setup = Setup { reserved: 8, ..Setup::default() };
    let sim = MemoryBackend::new();
    let file = File::create(setup.context(), create_in(&sim), "sparse").expect("creates");
    file.truncate(1 << 40).expect("grows");
    file.write_at(1 << 39, b"in the middle").expect("writes");
    file.settle_now().expect("settles");
    assert!(raw(&sim).stat().expect("stats").blocks < 64, "a hole takes no space");
    let file = open(&setup, &sim);
    assert_eq!(file.size(), 1 << 40);
    let mut back = [0u8; 13];
    file.read_at(1 << 39, &mut back).expect("reads");
    assert_eq!(&back, b"in the middle");
    assert_eq!(file.seek_data(0).expect("seeks"), Some(1 << 39));
    assert_eq!(file.seek_hole(1 << 39).expect("seeks"), Some((1 << 39) + 4096));
    assert_eq!(file.seek_data((1 << 39) + 4096).expect("seeks"), None);
    file.punch(0, 1 << 40).expect("punches");
    file.truncate(5).expect("shrinks");
    file.settle_now().expect("settles");
    assert_eq!(open(&setup, &sim).check(false, &mut |_| {}).expect("checks").damage, []);
    assert!(raw(&sim).stat().expect("stats").len <= 8192);
}

#[test]
fn a_length_that_a_store_makes_up_costs_nothing() {
    let setup = Setup::default();
    let (store, data) = sample(&setup);
    raw(&store).set_len(1 << 60).expect("extends");
    let file = open(&setup, &store);
    assert_eq!(file.size(), data.len() as u64);
    assert_eq!(survey(&file, &data), []);
    let found = file.check(true, &mut |_| {}).expect("checks");
    assert_eq!((found.damage, found.excess > 0 || raw(&store).stat().expect("stats").len < 1 << 30), (vec![], true));
}

#[test]
fn a_convergent_first_page_does_not_lend_its_empty_id() {
    let setup = Setup::default();
    let (store, data) = sample(&setup);
    // The first page of a small file, which has no id, in place of ours; and a last page that tells nothing.
    let small = MemoryBackend::new();
    let file = File::create(setup.context(), create_in(&small), "small").expect("creates");
    file.write_at(0, b"small").expect("writes");
    file.settle_now().expect("settles");
    raw(&store).write_at(0, &sector(&small, 0)).expect("writes");
    flip(&store, 2 * (N + 1) * BLOCK + 100);
    let found = survey_kinds(&open(&setup, &store), &data);
    let page_one: Vec<_> = (N..2 * N).map(|b| found.get(&b).copied()).collect();
    assert!(page_one.iter().all(|kind| *kind == Some(DamageKind::PageOfOtherFile)), "{page_one:?}");
}

/// Damage by block; what can be read is not compared (page 0 is another file's).
fn survey_kinds(file: &File, data: &[u8]) -> std::collections::BTreeMap<u64, DamageKind> {
    let blocks = (data.len() as u64).div_ceil(BLOCK);
    let kind = |b: u64| match file.read_at(b * BLOCK, &mut vec![0; BLOCK as usize]) {
        Err(StoreError::Damaged(damage)) => Some((b, damage.kind)),
        _ => None,
    };
    (0..blocks).filter_map(kind).collect()
}

/// Only page 0 tells that the pages in a hole of any length need not be there.
#[test]
fn a_huge_sparse_file_whose_first_page_is_lost_is_checked_at_once() {
    let setup = Setup::default();
    let store = MemoryBackend::new();
    let file = File::create(setup.context(), create_in(&store), "huge").expect("creates");
    let data = fill(BLOCK as usize, &mut Rng(4));
    file.truncate(1 << 58).expect("grows");
    for at in [0, 1 << 40, (1 << 58) - BLOCK] {
        file.write_at(at, &data).expect("writes");
    }
    file.settle_now().expect("settles");
    raw(&store).write_at(0, &[0; 4096]).expect("zeroes page 0");

    let file = open(&setup, &store);
    let found = file.check(false, &mut |_| {}).expect("checks").damage;
    let (present, last) = ((1 << 40) / BLOCK / N, ((1 << 58) / BLOCK - 1) / N);
    let pages: Vec<_> = found.iter().map(|d| (d.kind, d.page.0, d.pages)).collect();
    let missing = DamageKind::PageMissing;
    assert_eq!(pages, [(missing, 0, 1), (missing, 1, present - 1), (missing, present + 1, last - present - 1)]);
    assert_eq!(found[1].to_string(), format!("page-missing in segment 1, page 1 and the {} after it", present - 2));
    assert_eq!(file.seek_hole(0).expect("seeks"), Some(present * N * BLOCK), "in the page that is there");
    let mut back = vec![0; BLOCK as usize];
    file.read_at(1 << 40, &mut back).expect("reads");
    assert_eq!(back, data);
    assert!(file.read_at(1 << 30, &mut back).is_err(), "what is missing is not zeros");
}

/// Far behind the end, and where no page lies, so that every segment in between is looked at unless holes are skipped
/// again and again.
#[test]
fn data_that_a_store_puts_far_behind_the_end_costs_nothing() {
    let setup = Setup::default();
    let (store, data) = sample(&setup);
    for far in [(1 << 36) + 5000, (1 << 50) + 70_000, (1u64 << 60) + 5000] {
        raw(&store).write_at(far, b"x").expect("writes");
    }
    let file = open(&setup, &store);
    assert_eq!(file.size(), data.len() as u64);
    assert_eq!(survey(&file, &data), []);
}

/// What a store puts where a later last page would be tells nothing: the file does not become longer by zeros that
/// nobody wrote.
#[test]
fn a_page_that_a_store_makes_up_brings_no_zeros() {
    let setup = Setup::default();
    for page in [1u64, 3, 1 << 20, 1 << 40] {
        let store = MemoryBackend::new();
        let file = File::create(setup.context(), create_in(&store), "short").expect("creates");
        file.write_at(0, b"hello\n").expect("writes");
        file.settle_now().expect("settles");
        let geometry = lamassu_format::Geometry::new(BLOCK as u32, 62).expect("is one");
        raw(&store).write_at(geometry.page_offset(PageNo(page)).0, &fill(4096, &mut Rng(9))).expect("makes one up");
        let file = open(&setup, &store);
        let mut block = vec![1; BLOCK as usize];
        for b in [1, N - 1, N, page * N].into_iter().filter(|b| b * BLOCK < file.size()) {
            let read = file.read_at(b * BLOCK, &mut block);
            assert!(matches!(read, Err(StoreError::Damaged(_))), "page {page}, block {b}: {read:?}");
        }
        assert_eq!(file.read_at(0, &mut block[..6]).expect("reads"), 6);
        assert_eq!(&block[..6], b"hello\n");
        let found = file.check(false, &mut |_| {}).expect("checks").damage;
        assert!(found.iter().map(|d| d.pages).sum::<u64>() > page, "{found:?}");
        file.truncate(0).expect("empties");
        file.write_at(10, b"again").expect("writes");
        file.settle_now().expect("settles");
        let file = open(&setup, &store);
        assert_eq!(file.read_at(0, &mut block).expect("reads"), 15);
        assert_eq!(&block[..15], b"\0\0\0\0\0\0\0\0\0\0again");
        assert_eq!(file.check(false, &mut |_| {}).expect("checks").damage, []);
    }
}

/// The store puts an older last page back, so that the file ends before its known size. What a read refuses is data for
/// whoever looks for holes, and all else is as it was written.
#[test]
fn a_lost_end_is_neither_a_hole_nor_zeros() {
    let setup = Setup::default();
    let geometry = lamassu_format::Geometry::new(BLOCK as u32, 62).expect("is one");
    let page = geometry.page_offset(PageNo(1)).0;
    for before in [(N + 5) * BLOCK, (N + 5) * BLOCK + 700, (N + 5) * BLOCK - 700] {
        let (store, after) = (MemoryBackend::new(), (N + 20) * BLOCK);
        let data = fill(after as usize, &mut Rng(3));
        let file = File::create(setup.context(), create_in(&store), "grown").expect("creates");
        let (old, new) = data.split_at(before as usize);
        file.write_at(0, old).expect("writes");
        (0..2).for_each(|_| file.settle_now().expect("settles"));
        let kept = sector(&store, page / 4096);
        file.write_at(before, new).expect("grows");
        (0..2).for_each(|_| file.settle_now().expect("settles"));
        raw(&store).write_at(page, &kept).expect("puts it back");
        let file = open(&setup, &store);
        let refused = survey(&file, &data);
        let last = after / BLOCK;
        let first = refused.first().expect("the end is lost").0;
        assert_eq!(refused.iter().map(|(b, _)| *b).collect::<Vec<_>>(), (first..last).collect::<Vec<_>>());
        assert!(first * BLOCK <= before, "{first}");
        for b in first..last {
            let at = b * BLOCK;
            assert_eq!(file.hole_at(at, u64::MAX, u64::MAX).expect("looks").map(|hole| hole.end), Some(at), "{b}");
            assert_ne!(file.seek_hole(at).expect("looks"), Some(at), "{b}");
        }
        assert_eq!(file.hole_at(0, u64::MAX, u64::MAX).expect("looks").map(|hole| hole.end), Some(0));
    }
}
