//! Files of an anchored vault, through crashes, and against a store that puts back what it ever had
//! (`docs/freshness.md`).

use crate::common;
use common::anchor::Disorder;
use common::anchor::{self, AnchorSide, MemoryTrees};
use common::crash::{Attacks, Depth, attack, chosen_seed, explore, must_survive, random_workload, scale, tell};
use common::{Setup, create_in, profiles, raw, verified_profiles};
use lamassu_format::{Domain, Suite};
use lamassu_store::backend::memory::MemoryBackend;
use lamassu_store::file::DamageKind;
use lamassu_store::{File, StoreError};
use std::sync::Arc;

/// The least number of crash states of each test below, a little less than what it reaches; together what one run
/// promises. `tests/torture/simulate` insists on a million.
const MINIMA: [(&str, u64); 9] = [
    ("small_files", 32_000),
    ("several_pages", 430),
    ("committed_at_intervals", 1_300),
    ("committed_at_intervals, small files", 9_000),
    ("high_trees", 250),
    ("random_small_files", 16_000),
    ("salted_keys_rekeyed", 1_320),
    ("profiles", 8_000),
    ("profiles of several pages", 300),
];

const _: () = {
    let (mut sum, mut i) = (0, 0);
    while i < MINIMA.len() {
        sum += MINIMA[i].1;
        i += 1;
    }
    assert!(sum >= 60_000, "a run tries at least 60,000 crash states");
};

/// Says how many states were tried, and insists on the least number.
fn enough(name: &str, states: u64) {
    let (_, least) = MINIMA.iter().find(|(n, _)| *n == name).expect("every test has a minimum");
    tell(name, states, *least);
}

fn random(name: &str, setup: &Setup, seeds: std::ops::Range<u64>, steps: usize, size_max: u64, depth: Depth) -> u64 {
    let seeds = match chosen_seed() {
        Some(seed) => seed..seed + 1,
        None => seeds.start..seeds.start + (seeds.end - seeds.start) * scale(),
    };
    let run = |seed| {
        let trace = random_workload(setup, seed, steps, size_max);
        must_survive(name, setup, &trace, seed, depth)
    };
    seeds.map(run).sum()
}

#[test]
fn small_files() {
    let setup = Setup { anchored: true, ..Setup::default() };
    let states = random("small_files", &setup, 0..90, 30, 20_000, Depth { losses: 8, stride: 1 });
    enough("small_files", states);
}

#[test]
fn several_pages() {
    let setup = Setup { anchored: true, ..Setup::default() };
    let states = random("several_pages", &setup, 10_000..10_020, 16, 700_000, Depth { losses: 6, stride: 16 });
    enough("several_pages", states);
}

/// The anchor takes what it is told of a new file at any time, and not when the file is synced.
#[test]
fn committed_at_intervals() {
    let setup = Setup { anchored: true, at_intervals: true, ..Setup::default() };
    let states =
        random("committed_at_intervals", &setup, 130_050..130_070, 24, 900_000, Depth { losses: 4, stride: 8 });
    enough("committed_at_intervals", states);
    let states = random("committed_at_intervals", &setup, 140_000..140_050, 30, 20_000, Depth { losses: 4, stride: 1 });
    enough("committed_at_intervals, small files", states);
}

/// Trees of more than one level: blocks of 4096 bytes, few of them a page, and degrees from 2 on.
#[test]
fn high_trees() {
    let setup = Setup { anchored: true, ..Setup::default() };
    let states = random("high_trees", &setup, 20_000..20_010, 16, 6_000_000, Depth { losses: 4, stride: 64 });
    enough("high_trees", states);
}

#[test]
fn random_small_files() {
    let setup = Setup { anchored: true, reserved: 8, convergent: false, ..Setup::default() };
    let states = random("random_small_files", &setup, 30_000..30_050, 25, 30_000, Depth { losses: 8, stride: 1 });
    enough("random_small_files", states);
}

#[test]
fn salted_keys_rekeyed() {
    let setup = Setup { anchored: true, domain: Domain::File, reserved: 8, epochs: 3, ..Setup::default() };
    let states = random("salted_keys_rekeyed", &setup, 80_000..80_015, 20, 60_000, Depth { losses: 6, stride: 2 });
    enough("salted_keys_rekeyed", states);
}

/// A store that puts back what it ever had, also across a crash.
fn attacked(setup: &Setup, seeds: std::ops::Range<u64>, size_max: u64, stride: usize) -> Result<Attacks, String> {
    let mut all = Attacks::default();
    for seed in seeds.start..seeds.start + (seeds.end - seeds.start) * scale() {
        let trace = random_workload(setup, seed, 25, size_max);
        let Attacks { states, found, read } = attack(setup, &trace, seed, stride)?;
        (all.states, all.found, all.read) = (all.states + states, all.found + found, all.read + read);
    }
    Ok(all)
}

/// The same where nothing of it may be believed, in no fewer states.
fn withstands(setup: &Setup, seeds: std::ops::Range<u64>, size_max: u64, stride: usize, least: u64) {
    let done = attacked(setup, seeds, size_max, stride).unwrap_or_else(|lie| panic!("{lie}"));
    println!("{} hostile states of files, {done:?}", done.states);
    assert!(done.states >= least && done.found > done.states / 4 && done.read > 5 * done.states, "{done:?}");
}

#[test]
fn nothing_older_is_believed() {
    let anchored = Setup { anchored: true, ..Setup::default() };
    withstands(&anchored, 0..60, 20_000, 3, 8_800);
    let lie = attacked(&Setup::default(), 0..60, 20_000, 3).expect_err("an unanchored vault believes some of it");
    println!("unanchored: {lie}");
}

#[test]
fn nothing_older_is_believed_of_several_pages() {
    let anchored = Setup { anchored: true, ..Setup::default() };
    withstands(&anchored, 100..112, 700_000, 24, 520);
    withstands(&anchored, 200..206, 5_000_000, 96, 270);
}

#[test]
fn nothing_older_is_believed_where_nothing_is_convergent() {
    let anchored = Setup { anchored: true, reserved: 8, convergent: false, ..Setup::default() };
    withstands(&anchored, 300..330, 60_000, 4, 4_200);
}

#[test]
fn profiles_at_any_time() {
    let setup = Setup { anchored: true, profiles: profiles(Suite::Aes).leak(), reserved: 8, ..Setup::default() };
    let states = random("profiles", &setup, 110_000..110_015, 25, 40_000, Depth { losses: 6, stride: 1 });
    enough("profiles", states);
    let states = random("profiles", &setup, 120_000..120_010, 16, 900_000, Depth { losses: 4, stride: 24 });
    enough("profiles of several pages", states);
}

/// A store that puts back pages and blocks of other profiles: what is read is verified by the newest.
#[test]
fn no_older_profile_is_believed() {
    let setup =
        Setup { anchored: true, profiles: verified_profiles(Suite::Aes).leak(), reserved: 8, ..Setup::default() };
    withstands(&setup, 400..430, 40_000, 4, 7_400);
    withstands(&setup, 500..508, 700_000, 24, 790);
}

/// The teeth: with each rule of the order left out, some honest crash is called stale.
#[test]
fn disorder_is_found() {
    let small = Setup { anchored: true, ..Setup::default() };
    let cases = [
        (Disorder::TooEarly, 20_000, 0..30),
        (Disorder::TooLate, 20_000, 0..30),
        (Disorder::NothingHeld, 3_000_000, 20_000..20_012),
        (Disorder::NoCut, 700_000, 10_000..10_020),
        (Disorder::NoTwin, 20_000, 0..30),
    ];
    for (how, size_max, seeds) in cases {
        let (count, stride) = (seeds.clone().count(), if size_max > 100_000 { 4 } else { 1 });
        let is_found = |seed: &u64| {
            let mut trace = random_workload(&small, *seed, 25, size_max);
            trace.anchor = trace.anchor.map(|anchor| anchor.disordered(how));
            explore(&small, &trace, *seed, Depth { losses: 4, stride }).is_err()
        };
        let found = seeds.filter(is_found).take(2).count();
        assert!(found == 2, "{how:?} was found in {found} of {count} workloads");
    }
}

/// A file that is synced again and again takes one commit of the anchor for each time, however long it is; once it
/// rests it is clean, and what was synced is what the row says.
#[test]
fn a_file_that_is_synced_again_takes_one_commit_each_time() {
    let setup = Setup { anchored: true, ..Setup::default() };
    for len in [3000, 40_000, 700_000] {
        let (store, side) = (MemoryBackend::new(), AnchorSide::new(Arc::new(|| 0), 4, true));
        let ctx = setup.context_with(Some(side.files.clone()));
        let file = File::create_object(ctx, create_in(&store), "test", side.object).unwrap();
        let sync = || {
            file.sync().unwrap();
            side.commit(side.files.anchor().mark());
        };
        file.write_at(0, &vec![1; len]).unwrap();
        sync();
        file.write_at(7, b"first").unwrap();
        sync();
        let before = side.commits();
        for n in 0..5 {
            file.write_at(1000 + n, b"again").unwrap();
            sync();
        }
        assert_eq!(side.commits() - before, 5, "{len} bytes");
        let row = || side.files.anchor().row(side.object).unwrap().file().cloned().unwrap();
        assert!(row().open.is_some() && row().size == len as u64);
        for _ in 0..2 {
            file.settle_now().unwrap();
            file.covered(file.covered_mark()).unwrap();
            side.commit(side.files.anchor().mark());
        }
        assert_eq!(row().open, None, "{len} bytes");
    }
}

/// A new file is synced, twice, before the anchor has its row durably. Then it is written again, and a commit takes the
/// row, as an exchange of names does. A crash after that is honest: nothing is stale.
#[test]
fn a_file_that_was_synced_before_its_row_was_durable_is_not_stale_after_a_crash() {
    let store = MemoryBackend::new();
    let side = AnchorSide::new(Arc::new(|| 0), 4, false);
    let setup = Setup { anchored: true, ..Setup::default() };
    let ctx = setup.context_with(Some(side.files.clone()));
    let file = File::create_object(ctx, create_in(&store), "test", side.object).unwrap();
    file.write_at(0, &vec![1; 600_000]).unwrap();
    file.sync().unwrap();
    file.sync().unwrap(); // nothing has changed, so that nothing is held any more
    file.write_at(5000, &[2; 100]).unwrap();
    file.flush().unwrap();
    side.commit(side.files.anchor().mark());
    let next = anchor::open(side.table(), MemoryTrees::default());
    let ctx = setup.context_with(Some(next));
    let len = raw(&store).stat().unwrap().len;
    let crashed = File::open_object(ctx, raw(&store), len, "crashed", side.object).unwrap();
    let mut back = vec![0; 600_000];
    assert_eq!(crashed.read_at(0, &mut back).unwrap(), back.len());
    assert!(back[5000..5100].iter().all(|byte| *byte == 2) && back[..5000].iter().all(|byte| *byte == 1));
}

/// An anchor that fails for a while: what it would have to know is not written, nothing is lost, and it goes on.
#[test]
fn an_anchor_that_fails_loses_nothing() {
    let store = MemoryBackend::new();
    let side = AnchorSide::new(Arc::new(|| 0), 4, true);
    let setup = Setup { anchored: true, ..Setup::default() };
    let ctx = setup.context_with(Some(side.files.clone()));
    let file = File::create_object(ctx.clone(), create_in(&store), "test", side.object).unwrap();
    let mut model = vec![1; 600_000];
    side.refuse(Some(libc::ENOSPC));
    file.write_at(0, &model).unwrap();
    let refused = |done: Result<(), StoreError>| assert!(matches!(done, Err(StoreError::Anchor(_))), "{done:?}");
    refused(file.sync()); // the row is durable, so the first page waits for the anchor
    file.write_at(5000, &[2; 300_000]).unwrap();
    model[5000..305_000].fill(2);
    refused(file.settle_now());
    let read = |file: &File| {
        let mut back = vec![0; model.len()];
        assert_eq!(file.read_at(0, &mut back).unwrap(), back.len());
        assert!(back == model);
    };
    read(&file);
    side.refuse(None);
    file.sync().unwrap();
    side.commit(side.files.anchor().mark());
    read(&file);
    drop(file);
    let next = anchor::open(side.table(), MemoryTrees::default());
    let ctx = setup.context_with(Some(next));
    let backing = raw(&store);
    let len = backing.stat().unwrap().len;
    read(&File::open_object(ctx, backing, len, "again", side.object).unwrap());
}

/// Somebody may refer to a file for a while after it was closed: it says nothing more of what has become of it.
#[test]
fn a_file_that_was_put_away_does_not_speak_for_the_one_that_was_opened_since() {
    let (store, side) = (MemoryBackend::new(), AnchorSide::new(Arc::new(|| 0), 4, true));
    let setup = Setup { anchored: true, ..Setup::default() };
    let ctx = setup.context_with(Some(side.files.clone()));
    let commit = || {
        let closed = side.files.closed();
        side.files.covered(closed).unwrap();
        side.commit(side.files.anchor().mark());
    };
    let first = File::create_object(ctx.clone(), create_in(&store), "first", side.object).unwrap();
    first.write_at(0, &vec![1; 600_000]).unwrap();
    first.sync().unwrap();
    first.write_at(0, &vec![2; 50_000]).unwrap();
    first.settle_now().unwrap();
    first.write_at(9, &vec![3; 50_000]).unwrap();
    first.flush().unwrap();
    first.settle_now().unwrap();
    first.put_away();
    let len = raw(&store).stat().unwrap().len;
    let second = File::open_object(ctx.clone(), raw(&store), len, "second", side.object).unwrap();
    second.write_at(400_000, &vec![4; 50_000]).unwrap();
    second.flush().unwrap();
    let mark = first.covered_mark();
    first.settle(mark).unwrap();
    first.covered(mark).unwrap();
    commit();
    second.sync().unwrap();
    drop(first);
    commit();
    second.write_at(500_000, &vec![5; 50_000]).unwrap();
    second.sync().unwrap();
    second.settle_now().unwrap();
    drop(second);
    commit();
    let third = File::open_object(ctx, raw(&store), raw(&store).stat().unwrap().len, "third", side.object).unwrap();
    let mut back = vec![0; 600_000];
    assert_eq!(third.read_at(0, &mut back).unwrap(), back.len());
    assert_eq!([0, 9, 400_000, 500_000].map(|at| back[at]), [2, 3, 4, 5]);
}

/// A file that is not the newest can be emptied, and be written again: that is how its user gets rid of it.
#[test]
fn what_is_stale_can_be_emptied() {
    for len in [100_usize, 5000, 900_000] {
        let (store, side) = (MemoryBackend::new(), AnchorSide::new(Arc::new(|| 0), 1, true));
        let setup = Setup { anchored: true, ..Setup::default() };
        let ctx = setup.context_with(Some(side.files.clone()));
        let file = File::create_object(ctx.clone(), create_in(&store), "test", side.object).unwrap();
        let sync = |file: &File| {
            file.settle_now().unwrap();
            side.commit(side.files.anchor().mark());
        };
        file.write_at(0, &vec![1; len]).unwrap();
        sync(&file);
        let backing = raw(&store);
        let mut old = vec![0; backing.stat().unwrap().len as usize];
        backing.read_at(0, &mut old).unwrap();
        file.write_at(0, &vec![2; len]).unwrap();
        sync(&file);
        drop(file);
        backing.set_len(0).unwrap();
        backing.write_at(0, &old).unwrap();
        let open = || File::open_object(ctx.clone(), raw(&store), old.len() as u64, "stale", side.object).unwrap();
        let file = open();
        assert_eq!(file.size(), len as u64, "the row says so");
        let read = file.read_at(0, &mut vec![0; len]);
        assert!(matches!(read, Err(StoreError::Damaged(damage)) if damage.kind == DamageKind::Stale), "{read:?}");
        file.truncate(0).unwrap();
        assert_eq!(file.size(), 0);
        file.write_at(0, b"anew").unwrap();
        sync(&file);
        drop(file);
        let closed = side.files.closed();
        side.files.covered(closed).unwrap();
        let file = File::open_object(ctx.clone(), raw(&store), 4096, "anew", side.object).unwrap();
        let mut back = [0; 5];
        assert_eq!((file.read_at(0, &mut back).unwrap(), &back[..4]), (4, &b"anew"[..]));
        assert!(file.check(false, &mut |_| {}).unwrap().damage.is_empty());
    }
}

/// Each piece of 4096 bytes of a file is changed in turn: a scrub without keys names it, where it is a page or a block
/// with content, and nothing else.
#[test]
fn a_scrub_without_keys_names_every_change() {
    let (store, trees) = (MemoryBackend::new(), MemoryTrees::default());
    let side = AnchorSide::with_trees(Arc::new(|| 0), 4, true, trees.clone());
    let setup = Setup { anchored: true, reserved: 8, ..Setup::default() };
    let ctx = setup.context_with(Some(side.files.clone()));
    let file = File::create_object(ctx.clone(), create_in(&store), "test", side.object).unwrap();
    file.write_at(0, &vec![1; 1_200_000]).unwrap();
    file.punch(20 * 4096, 9 * 4096).unwrap();
    file.settle_now().unwrap();
    drop(file); // its last pages are covered with the next barrier
    let closed = side.files.closed();
    side.files.covered(closed).unwrap();
    side.commit(side.files.anchor().mark());
    let row = side.files.anchor().row(side.object).unwrap();
    let row = row.file().unwrap();
    assert!(row.open.is_none() && row.blocks.is_some());
    let backing = raw(&store);
    let pieces = backing.stat().unwrap().len / 4096;
    for keeps_records in [true, false] {
        let mut scrub = anchor::scrub(&ctx.geometry, side.files.anchor());
        if keeps_records {
            scrub.trees = Arc::new(trees.clone());
        }
        let scrubbed = || scrub.file(&*backing, side.object, row, &mut |_| Ok(())).unwrap();
        let clean = scrubbed();
        assert_eq!((clean.pages, clean.stale_pages.count), (3, 0));
        assert_eq!((clean.blocks, clean.stale_blocks.count), (1_200_000_u64.div_ceil(4096) - 9, 0));
        for piece in (0..pieces).step_by(if keeps_records { 1 } else { 29 }) {
            let mut before = [0; 4096];
            backing.read_at(piece * 4096, &mut before).unwrap();
            if before == [0; 4096] {
                continue; // a hole
            }
            backing.write_at(piece * 4096, &[9; 4096]).unwrap();
            let found = scrubbed();
            backing.write_at(piece * 4096, &before).unwrap();
            let is_page = piece % 117 == 0;
            let (stale, other) = match is_page {
                true => (&found.stale_pages, &found.stale_blocks),
                false => (&found.stale_blocks, &found.stale_pages),
            };
            assert_eq!(other.count, 0, "piece {piece}");
            let number = if is_page { piece / 117 } else { piece - piece / 117 - 1 };
            if !keeps_records && !is_page {
                assert_eq!((found.stale_blocks.count, found.unverified_blocks > 0), (0, true), "piece {piece}");
                continue;
            }
            let is_named = stale.runs.iter().any(|(first, last)| (*first..=*last).contains(&number));
            assert!(is_named, "piece {piece}: {stale:?}");
            assert!(!keeps_records || stale.count == 1, "piece {piece}: {stale:?}");
        }
        assert_eq!(scrubbed(), clean);
    }
}

/// Without tree records nothing tells which page was changed. That is found out once, and not once for each page: the
/// store chooses what is lost, and how long a file is.
#[test]
fn a_scrub_without_tree_records_reads_a_file_some_times_at_most() {
    const PAGES: u64 = 60;
    let store = MemoryBackend::new();
    let side = AnchorSide::with_trees(Arc::new(|| 0), 4, true, MemoryTrees::default());
    let setup = Setup { anchored: true, reserved: 8, ..Setup::default() };
    let ctx = setup.context_with(Some(side.files.clone()));
    let file = File::create_object(ctx.clone(), create_in(&store), "test", side.object).unwrap();
    (0..PAGES).for_each(|page| file.write_at(page * ctx.geometry.page_span(), &[1; 4096]).unwrap());
    file.settle_now().unwrap();
    drop(file);
    let closed = side.files.closed();
    side.files.covered(closed).unwrap();
    side.commit(side.files.anchor().mark());
    let row = side.files.anchor().row(side.object).unwrap();
    let row = row.file().unwrap();
    let (backing, scrub) = (raw(&store), anchor::scrub(&ctx.geometry, side.files.anchor()));
    let scrubbed = |left: &mut u64| {
        scrub.file(&*backing, side.object, row, &mut |_| {
            *left = left.checked_sub(1).ok_or(std::io::ErrorKind::Interrupted)?;
            Ok(())
        })
    };
    // A page and the block under it.
    let mut left = 2 * PAGES;
    let clean = scrubbed(&mut left).unwrap();
    assert_eq!((clean.pages, clean.blocks, clean.stale_pages.count, left), (PAGES, PAGES, 0, 0), "each is read once");
    backing.write_at(ctx.geometry.page_offset(lamassu_format::PageNo(7)).0, &[9; 4096]).unwrap();
    let found = scrubbed(&mut (4 * PAGES)).expect("no more than that is read");
    assert_eq!((found.pages, found.stale_pages.runs), (0, vec![(0, PAGES - 1)]), "nothing tells them apart");
    // Each of these is counted, so that it may be slowed down and stopped.
    for stop in [0, 1, PAGES, PAGES + 1, 2 * PAGES - 1, 3 * PAGES - 1] {
        assert_eq!(scrubbed(&mut { stop }).unwrap_err().kind(), std::io::ErrorKind::Interrupted, "after {stop}");
    }
}

/// A file is made shorter and longer again before it is clean: where it was cut off lies a hole, and no block that the
/// tree over blocks had there.
#[test]
fn a_scrub_finds_nothing_where_a_file_was_cut_and_grew_again() {
    for is_reopened in [false, true] {
        let (store, trees) = (MemoryBackend::new(), MemoryTrees::default());
        let side = AnchorSide::with_trees(Arc::new(|| 0), 4, true, trees.clone());
        let setup = Setup { anchored: true, reserved: 8, ..Setup::default() };
        let ctx = setup.context_with(Some(side.files.clone()));
        let cover = || {
            let closed = side.files.closed();
            side.files.covered(closed).unwrap();
            side.commit(side.files.anchor().mark());
        };
        let mut file = File::create_object(ctx.clone(), create_in(&store), "test", side.object).unwrap();
        file.write_at(0, &vec![1; 1_200_000]).unwrap();
        file.settle_now().unwrap();
        if is_reopened {
            drop(file);
            cover();
            let len = raw(&store).stat().unwrap().len;
            file = File::open_object(ctx.clone(), raw(&store), len, "test", side.object).unwrap();
        }
        file.truncate(100_000).unwrap();
        file.write_at(1_300_000, b"far").unwrap();
        file.settle_now().unwrap();
        drop(file);
        cover();
        let row = side.files.anchor().row(side.object).unwrap();
        let row = row.file().unwrap();
        assert!(row.open.is_none() && row.blocks.is_some());
        let mut scrub = anchor::scrub(&ctx.geometry, side.files.anchor());
        scrub.trees = Arc::new(trees);
        let found = scrub.file(&*raw(&store), side.object, row, &mut |_| Ok(())).unwrap();
        assert_eq!((found.stale_pages.count, found.stale_blocks.count, found.unverified_blocks), (0, 0, 0));
        assert_eq!(found.blocks, 100_000_u64.div_ceil(4096) + 1);
    }
}
