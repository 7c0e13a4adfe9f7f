//! Crash simulation of one file: a stop after every write and barrier, and random losses of whatever no barrier
//! covered.
//!
//! After each crash the file must open, every block must be one of its versions since the last completed fsync, nothing
//! may be damaged, and `check` must be clean. The last tests prove the teeth: with barriers taken out, or the phases of
//! a commit in another order, the damage is found.
//!
//! `LAMASSU_CRASH_SCALE` multiplies the work (`make torture`), `LAMASSU_CRASH_SEED` chooses one workload; failures
//! print both.

mod mistakes;

use crate::common;
use common::crash::{Depth, Recording, chosen_seed, must_survive, random_workload, scale, tell, wait_longer};
use common::{Setup, profiles};
use lamassu_format::{Codec, Domain, Suite};
use lamassu_store::file::Rekey;
use std::sync::atomic::{AtomicU64, Ordering};

/// The least number of crash states of each test below; together what one run promises.
const MINIMA: [(&str, u64); 28] = [
    ("small_files", 24_000),
    ("small_files_too", 24_000),
    ("several_pages", 600),
    ("few_transient_slots", 3_000),
    ("random_small_files", 25_000),
    ("malleable_suite", 1_000),
    ("salted_keys", 1_000),
    ("salted_keys_rekeyed", 500),
    ("large_blocks", 80),
    ("compressed_blocks", 10_000),
    ("compressed_large_blocks", 500),
    ("compressed_and_rekeyed", 1_000),
    ("overwrite", 300),
    ("append", 300),
    ("sparse_fill", 300),
    ("truncate_both_ways", 300),
    ("inline_to_block_growth", 300),
    ("punch_and_rewrite", 300),
    ("copied_blocks", 100),
    ("page_border", 300),
    ("grown_by_holes", 300),
    ("overwrite_by_turns", 300),
    ("rekeying", 500),
    ("rekey_at_any_time", 5_000),
    ("profiles_at_any_time", 5_000),
    ("profiles_of_several_pages", 300),
    ("zeros_that_are_stored_plain", 100),
    ("holes_that_are_cut_off_and_filled", 20),
];

const _: () = {
    let (mut sum, mut i) = (0, 0);
    while i < MINIMA.len() {
        sum += MINIMA[i].1;
        i += 1;
    }
    assert!(sum >= 100_000, "a run tries at least 100,000 crash states");
};

fn minimum(name: &str) -> u64 {
    MINIMA.iter().find(|(n, _)| *n == name).expect("every test has a minimum").1
}

struct Plan {
    seeds: std::ops::Range<u64>,
    steps: usize,
    size_max: u64,
    depth: Depth,
}

/// Random workloads.
fn random(name: &str, setup: &Setup, plan: &Plan) {
    let seeds = match chosen_seed() {
        Some(seed) => seed..seed + 1,
        None => plan.seeds.start..plan.seeds.start + (plan.seeds.end - plan.seeds.start) * scale(),
    };
    let beside = AtomicU64::new(0);
    let run = &|seed| {
        let trace = random_workload(setup, seed, plan.steps, plan.size_max);
        beside.fetch_add(trace.meanwhile, Ordering::Relaxed);
        must_survive(name, setup, &trace, seed, plan.depth)
    };
    // By two at once: the longest of these tests is what the others wait for.
    let states = std::thread::scope(|s| {
        let halves = [0, 1].map(|half| {
            s.spawn({
                let seeds = seeds.clone();
                move || seeds.skip(half).step_by(2).map(run).sum::<u64>()
            })
        });
        halves.map(|half| half.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).iter().sum()
    });
    let is_played = || plan.seeds.clone().count() < 100 || beside.load(Ordering::Relaxed) > 0;
    // A busy machine may take longer for each of them than the store waits.
    while chosen_seed().is_none() && !is_played() && wait_longer() {
        plan.seeds.clone().take(20).for_each(|seed| _ = run(seed));
    }
    assert!(chosen_seed().is_some() || is_played(), "{name}: no write went beside a commit");
    let beside = beside.load(Ordering::Relaxed);
    println!("{name}: {beside} writes beside a commit");
    tell(name, states, minimum(name));
}

#[test]
fn small_files() {
    let plan = Plan { seeds: 0..60, steps: 30, size_max: 20_000, depth: Depth { losses: 12, stride: 1 } };
    random("small_files", &Setup::default(), &plan);
}

/// The other half, for another processor.
#[test]
fn small_files_too() {
    let plan = Plan { seeds: 140..200, steps: 30, size_max: 20_000, depth: Depth { losses: 12, stride: 1 } };
    random("small_files_too", &Setup::default(), &plan);
}

#[test]
fn several_pages() {
    let plan = Plan { seeds: 10_000..10_040, steps: 16, size_max: 700_000, depth: Depth { losses: 6, stride: 16 } };
    random("several_pages", &Setup::default(), &plan);
}

#[test]
fn few_transient_slots() {
    let plan = Plan { seeds: 20_000..20_060, steps: 20, size_max: 60_000, depth: Depth { losses: 8, stride: 2 } };
    random("few_transient_slots", &Setup { reserved: 2, ..Setup::default() }, &plan);
}

#[test]
fn random_small_files() {
    let setup = Setup { reserved: 8, convergent: false, ..Setup::default() };
    let plan = Plan { seeds: 30_000..30_100, steps: 25, size_max: 30_000, depth: Depth { losses: 12, stride: 1 } };
    random("random_small_files", &setup, &plan);
}

#[test]
fn malleable_suite() {
    let setup = Setup { suite: Suite::Blake3, reserved: 8, ..Setup::default() };
    let plan = Plan { seeds: 40_000..40_030, steps: 25, size_max: 60_000, depth: Depth { losses: 6, stride: 2 } };
    random("malleable_suite", &setup, &plan);
}

#[test]
fn profiles_at_any_time() {
    let setup = Setup { profiles: profiles(Suite::Aes).leak(), reserved: 8, ..Setup::default() };
    let plan = Plan { seeds: 110_000..110_040, steps: 25, size_max: 40_000, depth: Depth { losses: 8, stride: 1 } };
    random("profiles_at_any_time", &setup, &plan);
}

#[test]
fn profiles_of_several_pages() {
    let setup = Setup { profiles: profiles(Suite::Aes).leak(), reserved: 8, ..Setup::default() };
    let plan = Plan { seeds: 120_000..120_016, steps: 16, size_max: 900_000, depth: Depth { losses: 4, stride: 24 } };
    random("profiles_of_several_pages", &setup, &plan);
}

/// Zeros that are stored as they are verify also behind the end of the store's file, where they never arrived.
#[test]
fn zeros_that_are_stored_plain() {
    let name = "zeros_that_are_stored_plain";
    let all = profiles(Suite::Aes);
    let mut states = 0;
    for profile in all.into_iter().filter(|profile| profile.protection().is_plain()) {
        for anchored in [false, true] {
            let setup = Setup { reserved: 8, anchored, ..Setup::default() };
            let mut r = Recording::new(&setup, 1);
            r.truncate(18_546);
            r.change_profile(profile, usize::MAX);
            r.sync();
            r.write(32_458, 26);
            r.settle();
            let depth = Depth { losses: 20, stride: 1 };
            states += must_survive(name, &setup, &r.finish(), chosen_seed().unwrap_or(1), depth);
        }
    }
    tell(name, states, minimum(name));
}

/// Blocks become holes, and the file shorter, and longer again: what comes into their place waits until the page
/// without the holes is durable.
#[test]
fn holes_that_are_cut_off_and_filled() {
    let name = "holes_that_are_cut_off_and_filled";
    let mut states = 0;
    for anchored in [false, true] {
        let setup = Setup { anchored, ..Setup::default() };
        let mut r = Recording::new(&setup, 1);
        r.write(0, 16_384);
        r.settle();
        r.punch(4096, 12_288);
        r.flush();
        r.truncate(4096);
        r.write(4096, 12_288);
        r.flush();
        let depth = Depth { losses: 40, stride: 1 };
        states += must_survive(name, &setup, &r.finish(), chosen_seed().unwrap_or(1), depth);
    }
    tell(name, states, minimum(name));
}

#[test]
fn salted_keys() {
    let setup = Setup { domain: Domain::None, reserved: 8, ..Setup::default() };
    let plan = Plan { seeds: 70_000..70_040, steps: 25, size_max: 60_000, depth: Depth { losses: 6, stride: 2 } };
    random("salted_keys", &setup, &plan);
}

#[test]
fn salted_keys_rekeyed() {
    let setup = Setup { domain: Domain::File, reserved: 8, epochs: 3, ..Setup::default() };
    let plan = Plan { seeds: 80_000..80_015, steps: 20, size_max: 60_000, depth: Depth { losses: 6, stride: 2 } };
    random("salted_keys_rekeyed", &setup, &plan);
}

#[test]
fn large_blocks() {
    let plan = Plan { seeds: 50_000..50_006, steps: 14, size_max: 5_000_000, depth: Depth { losses: 3, stride: 4 } };
    random("large_blocks", &Setup { block_size: 65536, ..Setup::default() }, &plan);
}

/// Ciphertext that ends within its block: the rest is not written, or punched later.
#[test]
fn compressed_blocks() {
    let setup = Setup { block_size: 16384, reserved: 4, codec: Some(Codec::Lz4), ..Setup::default() };
    let plan = Plan { seeds: 130_000..130_060, steps: 30, size_max: 120_000, depth: Depth { losses: 10, stride: 1 } };
    random("compressed_blocks", &setup, &plan);
}

#[test]
fn compressed_large_blocks() {
    let setup = Setup { block_size: 65536, reserved: 8, codec: Some(Codec::Zstd(1)), ..Setup::default() };
    let plan = Plan { seeds: 140_000..140_010, steps: 20, size_max: 2_000_000, depth: Depth { losses: 4, stride: 2 } };
    random("compressed_large_blocks", &setup, &plan);
}

#[test]
fn compressed_and_rekeyed() {
    let setup = Setup { block_size: 8192, reserved: 8, epochs: 3, codec: Some(Codec::Lz4), ..Setup::default() };
    let setup = Setup { domain: Domain::File, suite: Suite::Blake3, ..setup };
    let plan = Plan { seeds: 150_000..150_020, steps: 25, size_max: 90_000, depth: Depth { losses: 6, stride: 2 } };
    random("compressed_and_rekeyed", &setup, &plan);
}

#[test]
fn rekey_at_any_time() {
    let setup = Setup { reserved: 8, epochs: 4, ..Setup::default() };
    let plan = Plan { seeds: 60_000..60_040, steps: 25, size_max: 60_000, depth: Depth { losses: 8, stride: 2 } };
    random("rekey_at_any_time", &setup, &plan);
}

/// A hand-made workload in every geometry, a stop after every write and barrier. Sizes are in blocks, so that it is the
/// same in all.
fn hand_made(name: &str, workload: impl Fn(&mut Recording<'_>)) {
    hand_made_in(name, 1, workload);
}

/// The same with some epochs of keys.
fn hand_made_in(name: &str, epochs: u8, workload: impl Fn(&mut Recording<'_>)) {
    let geometries = [
        (Setup::default(), 20),
        (Setup { reserved: 1, ..Setup::default() }, 20),
        (Setup { reserved: 8, convergent: false, ..Setup::default() }, 20),
        (Setup { anchored: true, ..Setup::default() }, 10),
        (Setup { anchored: true, reserved: 8, convergent: false, ..Setup::default() }, 10),
        (Setup { block_size: 65536, ..Setup::default() }, 8),
        (Setup { anchored: true, block_size: 65536, ..Setup::default() }, 4),
        (Setup { block_size: 1 << 20, reserved: 8, ..Setup::default() }, 2),
        (Setup { codec: Some(Codec::Zstd(1)), ..Setup::default() }, 10),
        (Setup { codec: Some(Codec::Lz4), block_size: 16384, reserved: 8, ..Setup::default() }, 10),
        (Setup { codec: Some(Codec::Lz4), anchored: true, block_size: 8192, ..Setup::default() }, 10),
    ];
    let mut states = 0;
    for (setup, losses) in geometries {
        let setup = Setup { epochs, ..setup };
        let mut recording = Recording::new(&setup, 1);
        workload(&mut recording);
        let depth = Depth { losses: losses * scale(), stride: 1 };
        states += must_survive(name, &setup, &recording.finish(), chosen_seed().unwrap_or(1), depth);
    }
    tell(name, states, minimum(name));
}

fn rotated(r: &mut Recording<'_>) {
    let b = r.b();
    r.write(0, 5 * b + 100);
    if b == 4096 {
        r.write(130 * b, 2 * b + 7); // a second page
    }
    r.settle();
    r.rotate();
    r.rekey(Rekey::Outer, 9);
    r.sync();
    r.write(b, b);
    r.rotate();
    r.rekey(Rekey::Full, 9);
    r.sync();
    // What is there already is not written again.
    let before = r.position();
    r.rekey(Rekey::Full, 9);
    r.rekey(Rekey::Outer, 9);
    assert_eq!(r.position(), before);
    r.truncate(3 * b + 5);
    r.rotate();
    r.rekey(Rekey::Full, 9);
    r.settle();
    // Cut in the middle of a block whose rest is too long for a tail.
    r.write(0, 3 * b);
    r.settle();
    r.truncate(2 * b + b / 2 + 5);
    r.settle();
    r.rotate();
    r.rekey(Rekey::Full, 9);
    r.settle();
}

#[test]
fn rekeying() {
    hand_made_in("rekeying", 5, rotated);
}

fn overwriting(r: &mut Recording<'_>) {
    let b = r.b();
    r.write(0, 5 * b);
    r.settle();
    r.write(2 * b, b);
    r.sync();
    r.write(0, b);
    r.write(4 * b, b);
    r.flush();
    r.write(b + 100, 3 * b);
    r.flush();
    r.write(2 * b, b); // what was never synced is replaced again
    r.sync();
    r.write(0, 5 * b);
    r.settle();
}

#[test]
fn overwrite() {
    hand_made("overwrite", overwriting);
}

/// Commits of one page, one after another without a barrier of the application. As long as the page has room, it keeps
/// the previous keys of several commits, and a later barrier covers the data of the earlier ones.
fn overwriting_by_turns(r: &mut Recording<'_>) {
    let b = r.b();
    r.write(0, 16 * b);
    if b == 4096 {
        r.write(129 * b, b); // so that page 0 is not the last, whatever R is
    }
    r.settle();
    for turn in 0..3 {
        r.write(turn * b, b);
        r.write((turn + 6) * b, 2 * b);
        r.flush();
    }
    r.write(3 * b, 3 * b);
    r.punch(10 * b, b);
    r.flush();
    r.write(b, b); // what an earlier commit wrote is replaced again
    r.flush();
    r.sync();
    r.write(2 * b, 9 * b);
    r.settle();
}

#[test]
fn overwrite_by_turns() {
    hand_made("overwrite_by_turns", overwriting_by_turns);
}

#[test]
fn append() {
    hand_made("append", |r| {
        let b = r.b();
        for len in [b / 2, b / 2, b, b / 3, 2 * b] {
            r.append(len);
            r.flush();
        }
        r.sync();
        r.append(b);
        r.reopen();
        r.append(10);
        r.append(b);
        r.settle_with_the_store();
        r.append(2 * b);
        r.settle();
    });
}

#[test]
fn sparse_fill() {
    hand_made("sparse_fill", |r| {
        let b = r.b();
        r.write(6 * b, b);
        r.settle();
        r.write(2 * b, b);
        r.flush();
        r.write(4 * b, b / 2);
        r.sync();
        r.write(0, b);
        r.write(3 * b, b);
        r.reopen();
        r.write(5 * b, 2 * b);
        r.truncate(9 * b);
        r.sync();
        r.write(8 * b, b);
        r.settle();
    });
}

#[test]
fn truncate_both_ways() {
    hand_made("truncate_both_ways", |r| {
        let b = r.b();
        r.write(0, 5 * b);
        r.settle();
        r.truncate(3 * b + b / 2);
        r.flush();
        r.truncate(5 * b);
        r.sync();
        r.write(4 * b, b);
        r.truncate(2 * b);
        r.truncate(2 * b + 7);
        r.settle();
        r.truncate(b - 1);
        r.write(3 * b, 5);
        r.reopen();
        r.truncate(0);
        r.write(0, b + 1);
        r.settle();
        r.truncate(0);
        r.sync();
    });
}

#[test]
fn inline_to_block_growth() {
    hand_made("inline_to_block_growth", |r| {
        let b = r.b();
        let most = (124 * 32).min(b - 1);
        r.append(100);
        r.settle();
        r.append(most / 2);
        r.sync();
        r.append(b);
        r.flush();
        r.append(b - 5);
        r.settle();
        r.truncate(b + 50);
        r.sync();
        r.append(most / 2);
        r.append(2 * b);
        r.reopen();
        r.truncate(20);
        r.settle();
        r.write(b / 2, 10);
        r.truncate(2 * b);
        r.settle();
    });
}

#[test]
fn punch_and_rewrite() {
    hand_made("punch_and_rewrite", |r| {
        let b = r.b();
        r.write(0, 5 * b);
        r.settle();
        r.punch(b, 2 * b);
        r.flush();
        r.write(b, b);
        r.sync();
        r.punch(0, 5 * b);
        r.write(2 * b + 10, b);
        r.flush();
        r.punch(2 * b, b);
        r.write(2 * b, b);
        r.reopen();
        r.punch(3 * b - 10, b);
        r.settle();
    });
}

#[test]
fn copied_blocks() {
    hand_made("copied_blocks", |r| {
        let b = r.b();
        r.copy(0, 4, 0);
        r.sync();
        r.copy(3, 5, 2);
        r.flush();
        r.write(b * 4 + 10, b);
        r.copy(1, 3, 9);
        r.sync();
        r.copy(2, 4, 1);
        r.settle();
        r.truncate(b * 6 + 7);
        r.copy(0, 2, 6);
    });
    let setup = Setup::default();
    let mut r = Recording::new(&setup, 2);
    r.copy(0, 70, 0);
    r.sync();
    r.write(5000, 100);
    r.copy(7, 9, 58);
    r.settle();
    r.copy(0, 3, 61);
    must_survive("copied_blocks", &setup, &r.finish(), chosen_seed().unwrap_or(1), Depth { losses: 5, stride: 1 });
}

#[test]
fn page_border() {
    // A page of these geometries covers 62 blocks, or 116; so only with blocks of 4096 bytes.
    let mut states = 0;
    for (reserved, border, anchored) in [(62, 62 * 4096, false), (8, 116 * 4096, false), (8, 116 * 4096, true)] {
        let setup = Setup { reserved, anchored, ..Setup::default() };
        let mut r = Recording::new(&setup, 1);
        r.write(border - 2 * 4096, 2 * 4096);
        r.settle();
        r.append(100);
        r.flush();
        r.append(4096);
        r.sync();
        r.write(border - 4096, 3 * 4096);
        r.truncate(border + 1);
        r.reopen();
        r.truncate(border - 50);
        r.sync();
        r.write(border + 9 * 4096, 4096);
        r.settle_with_the_store();
        r.truncate(border);
        r.append(5000);
        r.settle();
        r.truncate(4096);
        r.settle();
        let depth = Depth { losses: 60 * scale(), stride: 1 };
        states += must_survive("page_border", &setup, &r.finish(), chosen_seed().unwrap_or(1), depth);
    }
    tell("page_border", states, minimum("page_border"));
}

/// A file that goes past the end of a page by a hole: the page has to tell so, and a crash may take that.
#[test]
fn grown_by_holes() {
    let of = |(reserved, pages): (u16, u64)| {
        let mut states = 0;
        for (convergent, anchored) in [(true, false), (false, false), (true, true), (false, true)] {
            let setup = Setup { reserved, convergent, anchored, ..Setup::default() };
            let mut r = Recording::new(&setup, 1);
            r.write(0, 3 * 4096 + 100);
            r.settle();
            r.truncate(2 * pages + 5000);
            r.sync();
            r.write(5 * pages + 9000, 100);
            r.flush();
            r.write(4 * pages, 4096);
            r.reopen();
            r.truncate(6 * pages);
            r.truncate(8 * pages + 1);
            r.settle();
            r.truncate(3 * pages + 77);
            r.write(4 * pages + 8192, 4096);
            r.sync();
            r.append(2 * pages);
            r.settle_with_the_store();
            r.truncate(pages + 4096);
            r.append(30);
            r.truncate(4 * pages);
            r.settle();
            let depth = Depth { losses: scale(), stride: 1 };
            states += must_survive("grown_by_holes", &setup, &r.finish(), chosen_seed().unwrap_or(1), depth);
        }
        states
    };
    // By two at once, as random ones.
    let states = std::thread::scope(|s| {
        let halves = [(62, 62 * 4096), (8, 116 * 4096)].map(|half| s.spawn(move || of(half)));
        halves.map(|half| half.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).iter().sum()
    });
    tell("grown_by_holes", states, minimum("grown_by_holes"));
}
