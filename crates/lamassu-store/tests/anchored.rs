//! Files of an anchored vault, through crashes, and against a store that puts back what it ever had
//! (`docs/freshness.md`).

mod common;
use common::Setup;
use lamassu_format::Domain;
use common::crash::{Attacks, Depth, attack, chosen_seed, must_survive, random_workload, scale, tell};

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
    let states = random("small_files", &setup, 0..100, 30, 20_000, Depth { losses: 8, stride: 1 });
    tell("small_files", states, 10_000);
}

#[test]
fn several_pages() {
    let setup = Setup { anchored: true, ..Setup::default() };
    let states = random("several_pages", &setup, 10_000..10_020, 16, 700_000, Depth { losses: 6, stride: 16 });
    tell("several_pages", states, 300);
}

/// Trees of more than one level: blocks of 4096 bytes, few of them a page, and degrees from 2 on.
#[test]
fn high_trees() {
    let setup = Setup { anchored: true, ..Setup::default() };
    let states = random("high_trees", &setup, 20_000..20_010, 16, 6_000_000, Depth { losses: 4, stride: 64 });
    tell("high_trees", states, 100);
}

#[test]
fn random_small_files() {
    let setup = Setup { anchored: true, reserved: 8, convergent: false, ..Setup::default() };
    let states = random("random_small_files", &setup, 30_000..30_040, 25, 30_000, Depth { losses: 8, stride: 1 });
    tell("random_small_files", states, 5_000);
}

#[test]
fn salted_keys_rekeyed() {
    let setup = Setup { anchored: true, domain: Domain::File, reserved: 8, epochs: 3, ..Setup::default() };
    let states = random("salted_keys_rekeyed", &setup, 80_000..80_015, 20, 60_000, Depth { losses: 6, stride: 2 });
    tell("salted_keys_rekeyed", states, 500);
}

/// A store that puts back what it ever had, also across a crash.
fn attacked(setup: &Setup, seeds: std::ops::Range<u64>, size_max: u64, stride: usize) -> Result<Attacks, String> {
    let mut all = Attacks::default();
    for seed in seeds {
        let trace = random_workload(setup, seed, 25, size_max);
        let Attacks { states, found, read } = attack(setup, &trace, seed, stride)?;
        (all.states, all.found, all.read) = (all.states + states, all.found + found, all.read + read);
    }
    Ok(all)
}

#[test]
fn nothing_older_is_believed() {
    let anchored = Setup { anchored: true, ..Setup::default() };
    let done = attacked(&anchored, 0..60, 20_000, 3).unwrap_or_else(|lie| panic!("{lie}"));
    println!("{done:?}");
    assert!(done.found > 1000 && done.read > 1000, "{done:?}");
    let lie = attacked(&Setup::default(), 0..60, 20_000, 3).expect_err("an un-anchored vault believes some of it");
    println!("un-anchored: {lie}");
}

#[test]
fn nothing_older_is_believed_of_several_pages() {
    let anchored = Setup { anchored: true, ..Setup::default() };
    let done = attacked(&anchored, 100..112, 700_000, 24).unwrap_or_else(|lie| panic!("{lie}"));
    println!("{done:?}");
    let done = attacked(&anchored, 200..206, 5_000_000, 96).unwrap_or_else(|lie| panic!("{lie}"));
    println!("{done:?}");
}

#[test]
fn nothing_older_is_believed_where_nothing_is_convergent() {
    let anchored = Setup { anchored: true, reserved: 8, convergent: false, ..Setup::default() };
    let done = attacked(&anchored, 300..330, 60_000, 4).unwrap_or_else(|lie| panic!("{lie}"));
    println!("{done:?}");
}
