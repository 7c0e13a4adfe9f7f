//! Crash simulation of one file: every prefix of the writes, and random losses of whatever no barrier covered.
//!
//! After each crash the file must open, every block must be one of its versions since the last completed fsync, nothing may be
//! damaged, and `check` must be clean. The last test proves the teeth: with barriers taken out the damage is found.

mod common;
use common::{Rng, Setup, create_in, fill, raw};
use lamassu_store::Backend;
use lamassu_store::backend::crash::{CrashBackend, CrashLog, CrashSim};
use lamassu_store::backend::memory::MemoryBackend;
use lamassu_store::file::{DamageKind, Durability, File};

const BLOCK: usize = 4096;

/// A workload as it was recorded: the writes, and what the file held after each step.
struct Trace {
    log: CrashLog,
    /// Length of the log before the first step.
    start: usize,
    /// Content after step i; step 0 is the empty file.
    contents: Vec<Vec<u8>>,
    /// Length of the log when step i was complete.
    ends: Vec<usize>,
    /// Steps that were a completed fsync.
    synced: Vec<bool>,
}

fn record(setup: &Setup, seed: u64, steps: usize, size_max: u64) -> Trace {
    let mut rng = Rng(seed);
    let store = CrashBackend::with_granularity(u64::from(setup.block_size));
    let mut file = File::create(setup.context(), create_in(&store), "test").expect("creates");
    let mut model: Vec<u8> = Vec::new();
    let start = store.position();
    let mut trace = Trace { log: store.log(), start, contents: vec![vec![]], ends: vec![start], synced: vec![true] };
    for _ in 0..steps {
        let mut synced = false;
        let offset = rng.below(size_max);
        let offset = if rng.below(2) == 0 { offset / 4096 * 4096 } else { offset };
        let len = [rng.below(300), rng.below(size_max / 3), 4096 * rng.below(30)][rng.below(3) as usize];
        match rng.below(16) {
            0..=4 => {
                let data = fill(len as usize, &mut rng);
                file.write_at(offset, &data).expect("writes");
                if len > 0 {
                    model.resize(model.len().max((offset + len) as usize), 0);
                    model[offset as usize..(offset + len) as usize].copy_from_slice(&data);
                }
            }
            5 => {
                let data = fill(1 + len as usize % 5000, &mut rng);
                file.append(&data).expect("appends");
                model.extend_from_slice(&data);
            }
            6..=7 => {
                let size = match rng.below(5) {
                    0 => 0,
                    1 => (model.len() as u64).saturating_sub(rng.below(9000)),
                    _ => offset,
                };
                file.truncate(size).expect("truncates");
                model.resize(size as usize, 0);
            }
            8 => {
                file.punch(offset, len).expect("punches");
                let end = (offset + len).min(model.len() as u64).max(offset.min(model.len() as u64));
                model[offset.min(end) as usize..end as usize].fill(0);
            }
            9..=10 => file.flush().expect("flushes"),
            11..=12 => {
                file.sync().expect("syncs");
                synced = true;
            }
            13 => {
                file.settle_now().expect("settles");
                synced = true;
            }
            14 => {
                // As the vault does: one barrier for many files, and writes that come between.
                file.flush().expect("flushes");
                let mark = file.covered_mark();
                store.sync().expect("syncs");
                file.settle(mark).expect("settles");
            }
            _ => {
                // A clean end and a new start: what mounting does first is a barrier.
                file.flush().expect("flushes");
                drop(file);
                store.sync().expect("syncs");
                file = File::open(setup.context(), raw(&store), "test").expect("opens");
                synced = true;
            }
        }
        trace.contents.push(model.clone());
        trace.ends.push(store.position());
        trace.synced.push(synced);
    }
    trace.log = store.log();
    trace
}

/// What is wrong with a crashed file, if anything.
fn judge(setup: &Setup, trace: &Trace, at: usize, store: &MemoryBackend) -> Result<(), String> {
    // The step in progress, and the last fsync that was complete.
    let step = trace.ends.iter().position(|end| *end >= at).unwrap_or(trace.ends.len() - 1);
    let from = (0..=step).rev().find(|i| trace.synced[*i] && trace.ends[*i] <= at).unwrap_or(0);
    let versions = &trace.contents[from..=step];
    // Without its first page a file says nothing. Only one that no fsync has covered since it was created or emptied may be so.
    let may_be_void = versions.iter().any(|v| v.is_empty());
    let file = File::open(setup.context(), raw(store), "crashed").map_err(|e| format!("open: {e}"))?;
    let first_page_is_lost = file
        .check(false, &mut |_| {})
        .is_ok_and(|c| c.damage.iter().any(|d| d.kind == DamageKind::PageMissing && d.page == 0));
    if may_be_void && first_page_is_lost {
        return file.truncate(0).map_err(|e| format!("empty: {e}"));
    }
    let size = file.size() as usize;
    let sizes = versions.iter().map(|v| v.len());
    let (min, max) = (sizes.clone().min().unwrap_or(0), sizes.max().unwrap_or(0));
    if size < min || size > max {
        return Err(format!("size {size} is none of {min}..={max}"));
    }
    let mut back = vec![0u8; size];
    file.read_at(0, &mut back).map_err(|e| format!("read: {e}"))?;
    for (b, block) in back.chunks(BLOCK).enumerate() {
        let matches = |v: &Vec<u8>| (0..block.len()).all(|i| block[i] == v.get(b * BLOCK + i).copied().unwrap_or(0));
        // A block of a partly committed growth may not have been written yet.
        let fresh = versions.iter().any(|v| v.len() <= b * BLOCK) && block.iter().all(|x| *x == 0);
        if !fresh && !versions.iter().any(matches) {
            return Err(format!("block {b} of {size} bytes is neither old nor new"));
        }
    }
    let found = file.check(true, &mut |_| {}).map_err(|e| format!("check: {e}"))?;
    if !found.damage.is_empty() {
        return Err(format!("damage {:?}", found.damage));
    }
    // Life goes on: a write and a settle, and it still reads back.
    file.write_at(0, b"afterwards").map_err(|e| format!("write: {e}"))?;
    file.settle_now().map_err(|e| format!("settle: {e}"))?;
    drop(file);
    let file = File::open(setup.context(), raw(store), "again").map_err(|e| format!("reopen: {e}"))?;
    let found = file.check(false, &mut |_| {}).map_err(|e| format!("second check: {e}"))?;
    if !found.damage.is_empty() || found.recovered != 0 {
        return Err(format!("after recovery: {found:?}"));
    }
    let mut again = vec![0u8; size.max(10)];
    file.read_at(0, &mut again).map_err(|e| format!("read again: {e}"))?;
    match size <= 10 || again[10..size] == back[10..] {
        true => Ok(()),
        false => Err("recovered content changed".into()),
    }
}

/// Crash states of one workload, every `stride`th of them; returns how many were tried, or the first that fails.
fn torture(setup: &Setup, seed: u64, steps: usize, size_max: u64, losses: u64, stride: usize) -> Result<u64, String> {
    let trace = record(setup, seed, steps, size_max);
    let (start, end) = (trace.start, trace.log.records().len());
    let sim = CrashSim::new(trace.log.clone());
    let place = |at: usize, what: &str| format!("seed {seed}, after {at} of {end} changes, {what}");
    let mut states = 0;
    for (at, store) in sim.prefixes().filter(|(at, _)| *at >= start && (at % stride == 0 || *at == end)) {
        judge(setup, &trace, at, &store).map_err(|e| format!("{}: {e}", place(at, "killed")))?;
        let point = sim.at(at);
        for n in 0..losses {
            let lost = point.random_state(seed << 8 | n);
            judge(setup, &trace, at, &lost).map_err(|e| format!("{}: {e}", place(at, "power lost")))?;
        }
        states += 1 + losses;
    }
    Ok(states)
}

fn scale() -> u64 {
    std::env::var("LAMASSU_CRASH_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1)
}

fn run(
    name: &str,
    setup: &Setup,
    seeds: std::ops::Range<u64>,
    steps: usize,
    size_max: u64,
    losses: u64,
    stride: usize,
) {
    let first = std::env::var("LAMASSU_CRASH_SEED").ok().and_then(|s| s.parse().ok());
    let seeds = match first {
        Some(seed) => seed..seed + 1,
        None => seeds.start..seeds.start + (seeds.end - seeds.start) * scale(),
    };
    let mut states = 0;
    for seed in seeds {
        match torture(setup, seed, steps, size_max, losses, stride) {
            Ok(n) => states += n,
            Err(e) => panic!(
                "{name}: {e}\nreproduce: LAMASSU_CRASH_SEED={seed} cargo test -p lamassu-store --test crash {name}"
            ),
        }
    }
    println!("{name}: {states} crash states");
}

#[test]
fn small_files() {
    run("small_files", &Setup::default(), 0..150, 30, 20_000, 3, 1);
}

#[test]
fn several_pages() {
    run("several_pages", &Setup::default(), 10_000..10_040, 16, 700_000, 2, 16);
}

#[test]
fn few_transient_slots() {
    run("few_transient_slots", &Setup { reserved: 2, ..Setup::default() }, 20_000..20_040, 20, 60_000, 3, 2);
}

#[test]
fn random_small_files() {
    let setup = Setup { reserved: 8, convergent: false, ..Setup::default() };
    run("random_small_files", &setup, 30_000..30_040, 25, 30_000, 3, 1);
}

#[test]
fn malleable_suite() {
    let setup = Setup { suite: lamassu_format::Suite::Blake3, reserved: 8, ..Setup::default() };
    run("malleable_suite", &setup, 40_000..40_020, 25, 60_000, 2, 2);
}

#[test]
fn large_blocks() {
    run("large_blocks", &Setup { block_size: 65536, ..Setup::default() }, 50_000..50_006, 14, 5_000_000, 1, 4);
}

#[test]
fn the_simulator_has_teeth() {
    let setup = Setup { reserved: 8, durability: Durability::Relaxed, ..Setup::default() };
    let found = (0..40).filter(|seed| torture(&setup, 60_000 + seed, 30, 40_000, 4, 1).is_err()).count();
    assert!(found > 15, "without barriers only {found} of 40 workloads showed damage");
}
