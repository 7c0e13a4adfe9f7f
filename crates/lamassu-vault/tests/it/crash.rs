//! Crashes between any two changes of the store, and power cuts that lose what no barrier covered: the vault opens,
//! `check` finds nothing wrong, every operation on names has happened or has not, and what was synced is there.
//!
//! Without an anchor, which a crash may leave behind the store: `anchored_crash` plays the two together.

use crate::common;

use common::steps::{VOID, steps, tree};
use common::*;
use lamassu_format::Codec;
use lamassu_store::Backend;
use lamassu_store::backend::{CrashBackend, CrashSim, MemoryBackend};
use lamassu_store::file::DamageKind;
use lamassu_vault::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Opens what a crash left, as a reader and as a writer, and checks it.
fn survive(recipe: &Recipe, left: MemoryBackend, what: &str) -> BTreeMap<String, Vec<u8>> {
    let backend: Arc<dyn Backend> = Arc::new(left);
    let reader = recipe.open_read_only(&backend).unwrap_or_else(|e| panic!("{what}: {e}"));
    let before = tree(&reader);
    drop(reader);
    let v = recipe.open(&backend).unwrap();
    let report = v.check(&[], true, &Quiet).unwrap();
    let voids = before.values().filter(|c| *c == VOID).count();
    let expected = |p: &check::Problem| {
        p.undone
            || p.repaired && p.kind == check::kind::ORPHAN
            || p.kind == DamageKind::PageMissing.word() && p.page == Some(0) && voids > 0
    };
    assert!(report.problems.iter().all(expected), "{what}: {:#?}", report.problems);
    assert_eq!(v.check(&[], false, &Quiet).unwrap().problems.len(), voids, "{what}");
    assert_eq!(tree(&v), before, "{what}: repair changed what is seen");
    assert!(backend.root().open_dir(n("lamassu.staging")).unwrap().read_dir().unwrap().is_empty(), "{what}");
    v.close().unwrap();
    before
}

#[test]
fn every_prefix_of_operations_on_names_is_old_or_new() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let crash = Arc::new(CrashBackend::new());
        let backend: Arc<dyn Backend> = crash.clone();
        let v = recipe.make(&backend);
        v.put("file", b"content");
        v.sync_all().unwrap();
        let mut states = vec![(crash.position(), "start", tree(&v))];
        for (name, step) in steps() {
            step(&v);
            states.push((crash.position(), name, tree(&v)));
        }
        std::mem::forget(v);
        let sim = CrashSim::new(crash.log());
        for (at, left) in sim.prefixes().filter(|(at, _)| *at >= states[0].0) {
            let after = states.iter().position(|(end, ..)| *end >= at).unwrap();
            let (_, name, new) = &states[after];
            let old = &states[after.saturating_sub(1)].2;
            let found = survive(&recipe, left, &format!("{name}, record {at}"));
            assert!(&found == new || &found == old, "{name}, record {at}: {:?}", found.keys());
        }
    }
}

/// Rename over, hard links, directories, long names: a power cut takes the latest operations along, and nothing else.
#[test]
fn power_cuts_lose_the_latest_operations_on_names_and_no_other() {
    let mut cuts = 0;
    for recipe in [Recipe::default(), Recipe::plain(), Recipe { block_size: 1 << 20, ..Recipe::default() }] {
        let crash = Arc::new(CrashBackend::with_granularity(recipe.block_size.into()));
        let backend: Arc<dyn Backend> = crash.clone();
        let v = recipe.make(&backend);
        v.put("file", b"content");
        v.sync_all().unwrap();
        // What each step left, and whether everything up to it was made durable.
        let mut states = vec![(crash.position(), tree(&v), true)];
        for (n, (_, step)) in steps().iter().enumerate() {
            step(&v);
            let durable = n % 7 == 6;
            if durable {
                v.sync_all().unwrap();
            }
            states.push((crash.position(), tree(&v), durable));
        }
        std::mem::forget(v);
        let sim = CrashSim::new(crash.log());
        for at in states[0].0..=crash.position() {
            let now = states.iter().position(|(end, ..)| *end >= at).unwrap();
            let from = (0..=now).rev().find(|i| states[*i].2 && states[*i].0 <= at).unwrap();
            let point = sim.at(at);
            for (n, left) in
                [point.least_state()].into_iter().chain((0..9).map(|seed| point.random_state(seed))).enumerate()
            {
                let found = survive(&recipe, left, &format!("record {at}, cut {n}"));
                let was = states[from..=now].iter().any(|(_, tree, _)| *tree == found);
                assert!(was, "record {at}, cut {n}: {:?} was never so since step {from}", found.keys());
                cuts += 1;
            }
        }
    }
    println!("power_cuts_lose_the_latest_operations_on_names_and_no_other: {cuts} crash states");
    assert!(cuts > 1000);
}

#[test]
fn rename_over_an_empty_directory_never_misses_the_target() {
    let recipe = Recipe::default();
    let crash = Arc::new(CrashBackend::new());
    let backend: Arc<dyn Backend> = crash.clone();
    let v = recipe.make(&backend);
    v.dir("from");
    v.put("from/f", b"1");
    v.dir("to");
    v.sync_all().unwrap();
    let start = crash.position();
    v.rename(ROOT, n("from"), ROOT, n("to"), RenameMode::Replace).unwrap();
    std::mem::forget(v);
    let sim = CrashSim::new(crash.log());
    for (at, left) in sim.prefixes().filter(|(at, _)| *at >= start) {
        let found = survive(&recipe, left, &format!("record {at}"));
        assert!(found.contains_key("to/"), "record {at}");
        assert!(found.contains_key("to/f") != found.contains_key("from/f"), "record {at}");
    }
}

#[test]
fn what_fsync_returned_for_is_found_after_a_power_cut() {
    let recipe = Recipe::default();
    let crash = Arc::new(CrashBackend::new());
    let backend: Arc<dyn Backend> = crash.clone();
    let v = recipe.make(&backend);
    backend.sync().unwrap();
    // Each path, its content, and the moment it was promised.
    let mut promised: Vec<(String, Vec<u8>, usize)> = Vec::new();
    for i in 0..6u8 {
        v.dir(&format!("d{i}"));
        v.dir(&format!("d{i}/e"));
        let (path, content) =
            (format!("d{i}/e/{}", "n".repeat(40 * usize::from(i) + 1)), vec![i; 3000 * usize::from(i)]);
        let (e, h) = v.new_file(&path);
        v.write(h, 0, &content).unwrap();
        if i % 2 == 0 {
            v.fsync(h, true).unwrap();
            promised.push((path, content, crash.position()));
            v.release(h).unwrap();
        } else {
            v.release(h).unwrap();
            v.rename(
                v.ino(&format!("d{i}/e")),
                n(path.rsplit('/').next().unwrap()),
                ROOT,
                n(&format!("top{i}")),
                RenameMode::Replace,
            )
            .unwrap();
            let h = v.open_file(e.attr.ino, RW).unwrap();
            v.fsync(h, false).unwrap();
            promised.push((format!("top{i}"), content, crash.position()));
            v.release(h).unwrap();
        }
    }
    std::mem::forget(v);
    let sim = CrashSim::new(crash.log());
    for at in (promised[0].2..=crash.position()).step_by(3) {
        for seed in 0..3 {
            let found = survive(&recipe, sim.random_state(seed, at), &format!("record {at}, seed {seed}"));
            for (path, content, _) in promised.iter().filter(|(_, _, end)| *end <= at) {
                assert_eq!(found.get(path), Some(content), "record {at}, seed {seed}: {path}");
            }
        }
    }
}

#[test]
fn a_whole_workload_survives_power_cuts_anywhere() {
    whole_workload(Recipe { reserved: 2, ..Recipe::default() });
}

#[test]
fn a_whole_workload_survives_power_cuts_anywhere_in_the_narrowest_domain() {
    whole_workload(Recipe { reserved: 2, domain: lamassu_format::Domain::None, ..Recipe::default() });
}

#[test]
fn a_whole_workload_survives_power_cuts_anywhere_in_large_blocks() {
    for block_size in [65536, 1 << 20] {
        whole_workload(Recipe { block_size, ..Recipe::default() });
    }
}

#[test]
fn a_whole_workload_survives_power_cuts_anywhere_compressed() {
    for (block_size, codec) in [(8192, Codec::Lz4), (65536, Codec::Zstd(1))] {
        whole_workload(Recipe { block_size, reserved: 2, codec: Some(codec), ..Recipe::default() });
    }
}

fn whole_workload(recipe: Recipe) {
    let crash = Arc::new(CrashBackend::with_granularity(recipe.block_size.into()));
    let backend: Arc<dyn Backend> = crash.clone();
    let v = recipe.make(&backend);
    backend.sync().unwrap();
    let start = crash.position();
    for round in 0..4u8 {
        for i in 0..5u8 {
            v.put(&format!("f{i}"), &vec![round * 16 + i + 1; 2000 * usize::from(i) * usize::from(round + 1)]);
        }
        v.dir(&format!("dir{round}"));
        match round {
            1 => v.sync_all().unwrap(),
            2 => {
                v.freeze().unwrap();
                v.thaw().unwrap();
            }
            _ => v.maintain().unwrap(),
        }
        v.rename(ROOT, n("f1"), v.ino(&format!("dir{round}")), n("moved"), RenameMode::Replace).unwrap();
    }
    v.close().unwrap();
    let sim = CrashSim::new(crash.log());
    let end = crash.position();
    for at in (start..=end).step_by(7) {
        for seed in 0..2 {
            survive(&recipe, sim.random_state(seed, at), &format!("record {at}, seed {seed}"));
        }
    }
    assert_eq!(survive(&recipe, sim.at(end).least_state(), "after close").len(), 12);
}

#[test]
fn a_failed_barrier_fails_fsync_and_loses_nothing_later() {
    let recipe = Recipe::default();
    let crash = Arc::new(CrashBackend::new());
    let backend: Arc<dyn Backend> = crash.clone();
    let v = recipe.make(&backend);
    let (_, h) = v.new_file("f");
    v.write(h, 0, &[1; 20_000]).unwrap();
    crash.fail_syncs(1, libc::EIO);
    assert!(v.fsync(h, false).is_err());
    v.write(h, 4096, &[2; 4096]).unwrap();
    v.release(h).unwrap();
    crash.fail_syncs(1, libc::EIO);
    assert!(v.sync_all().is_err(), "the store's failure is told");
    v.sync_all().unwrap();
    let mut content = vec![1; 20_000];
    content[4096..8192].fill(2);
    let least = CrashSim::new(crash.log()).at(crash.position()).least_state();
    assert!(survive(&recipe, least, "after a failed barrier")["f"] == content);
}
