//! Failures of the store, then crashes, then life going on, then crashes again.
//!
//! Any call may fail in the middle of an operation: before it had an effect, after a part of it, or after all of it.
//! Whatever fails, the open file must go on showing what was written, a crash at any moment must leave each block old
//! or new, and whoever recovers may be interrupted in turn.

use crate::common;
use common::{Rng, Server, Setup, create_in, fill, raw};
use lamassu_format::PageNo;
use lamassu_store::Backend;
use lamassu_store::backend::crash::{CrashBackend, CrashLog, CrashSim};
use lamassu_store::backend::fault::{Call, Fault, FaultBackend};
use lamassu_store::backend::memory::MemoryBackend;
use lamassu_store::file::{DamageKind, File, StoreError};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const BLOCK: usize = 4096;

/// What the file may hold after a step: what was asked for, and what was read back if it failed.
struct Step {
    contents: Vec<Vec<u8>>,
    /// Length of the log when the step was complete.
    end: usize,
    /// Everything up to here is durable.
    synced: bool,
}

struct Life {
    log: CrashLog,
    start: usize,
    steps: Vec<Step>,
}

fn size_below(model: &[u8], rng: &mut Rng, offset: u64) -> u64 {
    match rng.below(5) {
        0 => 0,
        1 => (model.len() as u64).saturating_sub(rng.below(9000)),
        2 => model.len() as u64 / 4096 * 4096,
        _ => offset,
    }
}

/// Makes one call of the step fail, or all from one on.
fn inject(store: &FaultBackend, crash: &CrashBackend, rng: &mut Rng, block_size: u32) {
    let kind = rng.below(6);
    if kind == 0 {
        return crash.fail_syncs(1 + rng.below(2), libc::EIO);
    }
    let base = Call::ALL.iter().filter(|c| c.is_change() || c.is_sync()).map(|c| store.faults().calls(*c)).sum::<u64>();
    let at = base + 1 + rng.below(8);
    let for_good = rng.below(2) == 0;
    // A store that tears a block it replaces is outside the promise, also when it says so.
    let part = rng.below(4) as usize * block_size as usize;
    let reads = store.faults().calls(Call::Read) + 1 + rng.below(4);
    store.faults().rule(move |c| match kind {
        1 => (c.call == Call::Read && c.nth == reads).then_some(Fault::Errno(libc::EIO)),
        _ if !(c.call.is_change() || c.call.is_sync()) || c.changes < at || (c.changes > at && !for_good) => None,
        2 | 3 if c.call == Call::Write => Some(Fault::Short(part)),
        4 if c.call == Call::Write => Some(Fault::After(libc::EIO)),
        _ => Some(Fault::Errno(if c.call == Call::Write { libc::ENOSPC } else { libc::EIO })),
    });
}

struct Player<'a> {
    setup: &'a Setup,
    crash: Arc<CrashBackend>,
    store: FaultBackend,
    file: File,
    model: Vec<u8>,
    rng: Rng,
    size_max: u64,
}

impl Player<'_> {
    /// One operation; whether everything is durable now.
    fn act(&mut self) -> Result<bool, StoreError> {
        let rng = &mut self.rng;
        let offset = rng.below(self.size_max);
        let offset = if rng.below(2) == 0 { offset / 4096 * 4096 } else { offset };
        let len = [rng.below(300), rng.below(self.size_max / 3), 4096 * rng.below(30)][rng.below(3) as usize];
        let model = &mut self.model;
        match rng.below(16) {
            0..=4 => {
                let data = fill(len as usize, rng);
                if len > 0 {
                    model.resize(model.len().max((offset + len) as usize), 0);
                    model[offset as usize..(offset + len) as usize].copy_from_slice(&data);
                }
                self.file.write_at(offset, &data)?;
            }
            5 => {
                let data = fill(1 + len as usize % 5000, rng);
                model.extend_from_slice(&data);
                self.file.append(&data)?;
            }
            6..=7 => {
                let size = size_below(model, rng, offset);
                model.resize(size as usize, 0);
                self.file.truncate(size)?;
            }
            8 => {
                let end = (offset + len).min(model.len() as u64).max(offset.min(model.len() as u64));
                model[offset.min(end) as usize..end as usize].fill(0);
                self.file.punch(offset, len)?;
            }
            9..=10 => self.file.flush()?,
            11..=12 => {
                self.file.sync()?;
                return Ok(true);
            }
            13 => {
                self.file.settle_now()?;
                return Ok(true);
            }
            14 => {
                self.file.flush()?;
                let mark = self.file.covered_mark();
                let done = self.store.sync();
                if done.is_err() {
                    self.file.barrier_failed();
                }
                self.file.settle(mark)?;
                return Ok(done.is_ok());
            }
            _ => {
                // A clean end and a new start. What fails at the end would be tried again; here it counts as not done.
                self.file.settle_now()?;
                self.store.faults().clear_rules();
                self.crash.fail_syncs(0, 0);
                self.store.sync().expect("nothing fails here");
                self.file = File::open(self.setup.context(), raw(&self.store), "test")?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn read(&self) -> Result<Vec<u8>, StoreError> {
        let mut back = vec![0; self.file.size() as usize];
        self.file.read_at(0, &mut back)?;
        Ok(back)
    }

    /// One step, with a failure or without.
    fn step(&mut self, faulty: bool) -> Result<Step, String> {
        let before = self.model.clone();
        if faulty {
            inject(&self.store, &self.crash, &mut self.rng, self.setup.block_size);
        }
        let done = self.act();
        self.store.faults().clear_rules();
        self.crash.fail_syncs(0, 0);
        let back = self.read().map_err(|e| format!("after {done:?}, read: {e}"))?;
        let mut contents = vec![self.model.clone()];
        if done.is_ok() {
            if back != self.model {
                return Err("wrong content".into());
            }
        } else {
            if back.len() != before.len().min(back.len()).max(self.model.len().min(back.len())) {
                return Err(format!(
                    "size {} after {done:?}, from {} to {}",
                    back.len(),
                    before.len(),
                    self.model.len()
                ));
            }
            for (b, block) in back.chunks(BLOCK).enumerate() {
                let is = |v: &Vec<u8>| (0..block.len()).all(|i| block[i] == v.get(b * BLOCK + i).copied().unwrap_or(0));
                if !is(&before) && !is(&self.model) {
                    return Err(format!("after {done:?}, block {b} is neither old nor new"));
                }
            }
            self.model = back.clone();
            contents.push(back);
        }
        Ok(Step { contents, end: self.crash.position(), synced: matches!(done, Ok(true)) })
    }
}

/// Lives one life on a copy of `base`, all of which is durable.
fn live(
    setup: &Setup,
    base: &MemoryBackend,
    seed: u64,
    steps: usize,
    size_max: u64,
    faults: bool,
) -> Result<Life, String> {
    let crash = Arc::new(CrashBackend::over(base, u64::from(setup.block_size)));
    let store = FaultBackend::new(crash.clone());
    let start = crash.position();
    let file = File::open(setup.context(), raw(&store), "life").map_err(|e| format!("open: {e}"))?;
    let mut player = Player { setup, crash, store, file, model: vec![], rng: Rng(seed), size_max };
    player.model = player.read().map_err(|e| format!("first read: {e}"))?;
    let first = Step { contents: vec![player.model.clone()], end: player.crash.position(), synced: true };
    let mut taken = vec![first];
    for n in 0..steps {
        let faulty = faults && player.rng.below(3) == 0;
        taken.push(player.step(faulty).map_err(|e| format!("step {n}: {e}"))?);
    }
    // Whatever failed, in the end it can be made durable.
    let _mended = setup.server.map(Server::mend);
    player.file.settle_now().map_err(|e| format!("last settle: {e}"))?;
    taken.push(Step { contents: vec![player.model.clone()], end: player.crash.position(), synced: true });
    Ok(Life { log: player.crash.log(), start, steps: taken })
}

/// What is wrong with a crashed file, if anything. Looks only; `None` if its first page may be and is lost.
fn judge(setup: &Setup, life: &Life, at: usize, store: &MemoryBackend) -> Result<bool, String> {
    let step = life.steps.iter().position(|s| s.end >= at).unwrap_or(life.steps.len() - 1);
    let from = (0..=step).rev().find(|i| life.steps[*i].synced && life.steps[*i].end <= at).unwrap_or(0);
    let versions: Vec<&Vec<u8>> = life.steps[from..=step].iter().flat_map(|s| &s.contents).collect();
    let store = store.snapshot();
    let file = File::open(setup.context(), raw(&store), "crashed").map_err(|e| format!("open: {e}"))?;
    let found = file.check(false, &mut |_| {}).map_err(|e| format!("check: {e}"))?;
    let void = |d: &lamassu_store::file::Damage| d.kind == DamageKind::PageMissing && d.page == PageNo::ZERO;
    if versions.iter().any(|v| v.is_empty()) && found.damage.iter().any(void) {
        return Ok(false);
    }
    if !found.damage.is_empty() {
        return Err(format!("damage {:?}", found.damage));
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
        let is = |v: &&Vec<u8>| (0..block.len()).all(|i| block[i] == v.get(b * BLOCK + i).copied().unwrap_or(0));
        let fresh = versions.iter().any(|v| v.len() <= b * BLOCK) && block.iter().all(|x| *x == 0);
        if !fresh && !versions.iter().any(is) {
            return Err(format!("block {b} of {size} bytes is neither old nor new"));
        }
    }
    // What was recovered lasts, also if nothing but a settle follows, as when a vault lets go of a file.
    for _ in 0..2 {
        file.settle_now().map_err(|e| format!("settle: {e}"))?;
    }
    let again = File::open(setup.context(), raw(&store), "again").map_err(|e| format!("reopen: {e}"))?;
    let mut second = vec![0u8; again.size() as usize];
    again.read_at(0, &mut second).map_err(|e| format!("read again: {e}"))?;
    if second != back {
        return Err(format!("settling changed the content: {} bytes became {}", back.len(), second.len()));
    }
    Ok(true)
}

struct Plan {
    steps: usize,
    size_max: u64,
    lives: u64,
    /// Crash points looked at in each life.
    points: u64,
    faults: bool,
}

fn torture(setup: &Setup, seed: u64, plan: &Plan) -> Result<(), String> {
    let mut base = MemoryBackend::new();
    create_in(&base);
    let mut rng = Rng(seed ^ 0xfeed);
    for n in 0..plan.lives {
        let life = live(setup, &base, rng.next(), plan.steps, plan.size_max, plan.faults)
            .map_err(|e| format!("seed {seed}, life {n}: {e}"))?;
        let sim = CrashSim::new(life.log.clone());
        let span = life.log.records().len() - life.start + 1;
        let mut next = None;
        for k in 0..plan.points {
            let at = life.start + rng.below(span as u64) as usize;
            let place = |what: &str, e| format!("seed {seed}, life {n}, after {at} of {span} records, {what}: {e}");
            let point = sim.at(at);
            for what in ["least", "most", "random", "random"] {
                let lost = match what {
                    "least" => point.least_state(),
                    "most" => point.most_state(),
                    _ => point.random_state(rng.next()),
                };
                let usable = judge(setup, &life, at, &lost).map_err(|e| place(what, e))?;
                if usable && (next.is_none() || rng.below(k + 1) == 0) {
                    next = Some(lost);
                }
            }
        }
        let Some(lost) = next else { return Ok(()) };
        base = lost;
    }
    Ok(())
}

fn run(name: &str, setup: &Setup, seeds: std::ops::Range<u64>, plan: &Plan) {
    let scale: u64 = std::env::var("LAMASSU_CRASH_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let first = std::env::var("LAMASSU_CRASH_SEED").ok().and_then(|s| s.parse().ok());
    let seeds = match first {
        Some(seed) => seed..seed + 1,
        None => seeds.start..seeds.start + (seeds.end - seeds.start) * scale,
    };
    let mut failed = Vec::new();
    for seed in seeds {
        if let Err(e) = torture(setup, seed, plan) {
            failed.push(e);
        }
    }
    let shown = failed.iter().take(12).cloned().collect::<Vec<_>>().join("\n");
    assert!(failed.is_empty(), "{name}: {} workloads failed; LAMASSU_CRASH_SEED reproduces one\n{shown}", failed.len());
}

const SMALL: Plan = Plan { steps: 20, size_max: 30_000, lives: 3, points: 6, faults: true };
const PAGES: Plan = Plan { steps: 14, size_max: 700_000, lives: 3, points: 3, faults: true };

#[test]
fn crashes_after_crashes() {
    let quiet = Plan { faults: false, lives: 4, ..SMALL };
    run("crashes_after_crashes", &Setup { reserved: 4, ..Setup::default() }, 0..60, &quiet);
}

#[test]
fn crashes_after_crashes_in_several_pages() {
    let quiet = Plan { faults: false, lives: 4, ..PAGES };
    run("crashes_after_crashes_in_several_pages", &Setup::default(), 1000..1030, &quiet);
}

#[test]
fn failures_in_small_files() {
    run("failures_in_small_files", &Setup { reserved: 2, ..Setup::default() }, 2000..2100, &SMALL);
}

#[test]
fn failures_without_convergent_pages() {
    let setup = Setup { reserved: 8, convergent: false, ..Setup::default() };
    run("failures_without_convergent_pages", &setup, 3000..3060, &SMALL);
}

#[test]
fn failures_in_several_pages() {
    run("failures_in_several_pages", &Setup::default(), 4000..4030, &PAGES);
}

#[test]
fn failures_with_several_pages_a_segment() {
    let setup = Setup { block_size: 8192, ..Setup::default() };
    run("failures_with_several_pages_a_segment", &setup, 5000..5020, &Plan { size_max: 1_600_000, ..PAGES });
}

/// The server of the zone's keys fails, too.
#[test]
fn failures_in_an_oblivious_epoch() {
    let server = Some(Server::failing(5));
    let setup = Setup { reserved: 2, epochs: 2, server, ..Setup::default() };
    run("failures_in_an_oblivious_epoch", &setup, 6000..6040, &SMALL);
}

#[test]
fn without_the_server_of_its_keys_a_file_takes_what_fits_its_buffer_and_loses_nothing() {
    const PIECE: usize = 1 << 20;
    let server = Server::failing(0);
    let setup = Setup { server: Some(server), ..Setup::default() };
    let memory = Arc::new(MemoryBackend::new());
    let store = FaultBackend::new(memory.clone());
    let file = File::create(setup.context(), create_in(&store), "oblivious").expect("creates");
    let (before, after) = (fill(PIECE, &mut Rng(1)), fill(PIECE, &mut Rng(2)));
    file.write_at(0, &before).expect("writes");
    file.sync().expect("syncs");
    server.is_down.store(true, Ordering::Relaxed);
    // What is sealed on its way in is refused at once, and is not there.
    assert!(matches!(file.write_at(0, &after), Err(StoreError::NotEvaluated(_))));
    // What is sealed by the commit waits in the buffer.
    let changes = store.faults().calls(Call::Write);
    for at in (0..PIECE).step_by(1000) {
        let end = (at + 1000).min(PIECE);
        file.write_at(at as u64, &after[at..end]).expect("is buffered");
    }
    for _ in 0..2 {
        assert!(matches!(file.sync(), Err(StoreError::NotEvaluated(_))));
    }
    assert_eq!(store.faults().calls(Call::Write), changes, "nothing was written");
    let read = |file: &File| {
        let mut back = vec![0; PIECE];
        file.read_at(0, &mut back).expect("reads");
        back
    };
    assert!(read(&file) == after);
    // Killed here it is as it was, and reads without the server.
    let left = memory.snapshot();
    assert!(read(&File::open(setup.context(), raw(&left), "again").expect("opens")) == before);
    server.is_down.store(false, Ordering::Relaxed);
    file.sync().expect("syncs");
    let left = memory.snapshot();
    let again = File::open(setup.context(), raw(&left), "again").expect("opens");
    assert!(read(&again) == after);
    assert_eq!(again.check(false, &mut |_| {}).expect("checks").damage, []);
}

#[test]
fn an_empty_file_that_is_emptied_keeps_its_id() {
    let setup = Setup { convergent: false, ..Setup::default() };
    let store = MemoryBackend::new();
    let file = File::create(setup.context(), create_in(&store), "id").expect("creates");
    file.sync().expect("syncs");
    file.truncate(0).expect("empties");
    file.write_at(62 * 4096, b"in page 1").expect("writes");
    file.sync().expect("syncs");
    let found = File::open(setup.context(), raw(&store), "id").expect("opens").check(false, &mut |_| {});
    assert_eq!(found.expect("checks").damage, []);
}

#[test]
fn a_cut_is_not_cleared_before_its_steps_are_done() {
    let setup = Setup { convergent: false, ..Setup::default() };
    let memory = Arc::new(MemoryBackend::new());
    let store = FaultBackend::new(memory.clone());
    let file = File::create(setup.context(), create_in(&store), "cut").expect("creates");
    file.write_at(0, &fill(200 * BLOCK, &mut Rng(1))).expect("writes");
    file.settle_now().expect("settles");
    file.sync().expect("syncs what settling wrote");
    store.faults().fail_next_sync(libc::EIO);
    assert!(file.truncate(70 * BLOCK as u64).is_err());
    let crashed = memory.snapshot();
    for (what, file, store) in [
        ("same process", file, memory.snapshot()),
        ("after a crash", File::open(setup.context(), raw(&crashed), "cut").expect("opens"), crashed),
    ] {
        for _ in 0..3 {
            file.settle_now().expect("settles");
        }
        assert_eq!(file.size(), 70 * BLOCK as u64, "{what}");
        let store: &dyn Backend = if what == "same process" { &*memory } else { &store };
        let again = File::open(setup.context(), raw(store), "cut").expect("opens");
        assert_eq!(again.size(), 70 * BLOCK as u64, "{what}");
        assert_eq!(again.check(false, &mut |_| {}).expect("checks").damage, [], "{what}");
    }
}

#[test]
fn a_full_store_is_not_tried_again_at_every_write() {
    const PIECE: usize = 1 << 20;
    let store = FaultBackend::new(Arc::new(MemoryBackend::new()));
    let file = File::create(Setup::default().context(), create_in(&store), "full").expect("creates");
    store.faults().fail_always(Call::Write, libc::ENOSPC);
    let piece = fill(PIECE, &mut Rng(1));
    let write = |n: usize| file.write_at((n * PIECE) as u64, &piece);
    let taken = (0..).find(|n| write(*n).is_err()).expect("the store is full");
    // The write that filled the buffer was taken, and is reported by the next ones and by sync.
    assert!(taken * PIECE >= 16 << 20 && file.size() == (taken * PIECE) as u64);
    assert!(matches!(file.flush(), Err(StoreError::Io { .. })));
    let (before, begun) = (store.faults().calls(Call::Write), std::time::Instant::now());
    for _ in 0..200 {
        let Err(StoreError::Io { source, .. }) = write(taken) else { panic!("the store is still full") };
        assert_eq!(source.raw_os_error(), Some(libc::ENOSPC));
    }
    // Everything is tried again once a second, however long the writes take here.
    let rounds = 1 + begun.elapsed().as_secs();
    let tried = store.faults().calls(Call::Write) - before;
    assert!(tried < 20 * rounds, "each write tries everything again");
    assert_eq!(file.size(), (taken * PIECE) as u64, "a write that failed has made the file longer");
    store.faults().clear_rules();
    file.sync().expect("there is space again");
    write(taken).expect("at once");
    file.sync().expect("syncs");
    for n in 0..=taken {
        let mut back = vec![0; PIECE];
        file.read_at((n * PIECE) as u64, &mut back).expect("reads");
        assert_eq!(back, piece, "piece {n}");
    }
}

#[test]
fn a_file_that_gives_space_back_is_tried_again_at_once() {
    let store = FaultBackend::new(Arc::new(MemoryBackend::new()));
    let file = File::create(Setup::default().context(), create_in(&store), "full").expect("creates");
    store.faults().fail_always(Call::Write, libc::EDQUOT);
    let piece = fill(5 << 20, &mut Rng(1));
    for gives_back in [|f: &File| f.truncate(0), |f: &File| f.truncate(16 << 20), |f: &File| f.punch(0, 1 << 20)] {
        while file.append(&piece).is_ok() {}
        store.faults().clear_rules();
        gives_back(&file).expect("space comes back");
        file.append(&piece).expect("is taken");
        file.sync().expect("syncs");
        store.faults().fail_always(Call::Write, libc::EDQUOT);
    }
}

#[test]
fn a_hole_that_a_crash_left_is_one_after_a_cut() {
    let setup = Setup::default();
    let geometry = setup.context().geometry;
    let span = geometry.page_span();
    let store = MemoryBackend::new();
    let file = File::create(setup.context(), create_in(&store), "hole").expect("creates");
    file.write_at(0, &fill(BLOCK, &mut Rng(1))).expect("writes");
    file.settle_now().expect("settles");
    file.write_at(span, &fill(3 * span as usize, &mut Rng(2))).expect("writes");
    file.flush().expect("flushes");
    // A crash that lost pages 1 and 2, which nothing had made durable.
    let lost = store.snapshot();
    for page in [1, 2] {
        raw(&lost).write_at(geometry.page_offset(PageNo(page)).0, &[0; 4096]).expect("writes");
    }
    // The new last page is there; and it is one of those lost.
    for size in [3 * span + 5000, 2 * span + 5000] {
        for nth in 1.. {
            let memory = Arc::new(lost.snapshot());
            let store = FaultBackend::new(memory.clone());
            let file = File::open(setup.context(), raw(&store), "hole").expect("opens");
            assert_eq!(file.size(), 4 * span);
            // From the nth change on none arrives: killed there.
            store.faults().rule(move |c| (c.changes >= nth && c.call.is_change()).then_some(Fault::Errno(libc::EIO)));
            let done = file.truncate(size).is_ok() && file.settle_now().is_ok();
            let again = File::open(setup.context(), raw(&*memory), "hole").expect("opens again");
            assert_eq!(again.check(false, &mut |_| {}).expect("checks").damage, [], "{size}, change {nth}");
            let mut back = vec![1; again.size() as usize];
            again.read_at(0, &mut back).expect("reads");
            assert!(back[span as usize..2 * span as usize].iter().all(|byte| *byte == 0));
            if done {
                assert_eq!(again.size(), size);
                break;
            }
        }
    }
}

#[test]
fn what_no_file_of_the_store_can_hold_is_refused_before_it_is_buffered() {
    const LIMIT: u64 = 1 << 40;
    let store = FaultBackend::new(Arc::new(MemoryBackend::new()));
    store.faults().rule(|c| (c.call == Call::Seek && c.offset > LIMIT).then_some(Fault::Errno(libc::EFBIG)));
    let file = File::create(Setup::default().context(), create_in(&store), "long").expect("creates");
    let data = fill(100_000, &mut Rng(1));
    file.write_at(0, &data).expect("writes");
    assert!(matches!(file.write_at(LIMIT, b"y"), Err(StoreError::TooLarge)));
    assert!(matches!(file.truncate(LIMIT), Err(StoreError::TooLarge)), "pages and keys take space, too");
    file.truncate(LIMIT / 8 * 7).expect("fits");
    file.truncate(data.len() as u64).expect("becomes shorter");
    file.sync().expect("nothing is kept back");
    let mut back = vec![0; data.len()];
    File::open(Setup::default().context(), raw(&store), "long").expect("opens").read_at(0, &mut back).expect("reads");
    assert_eq!(back, data);
}

/// Not every store can search for holes (sshfs, NFS 3): it would be read block by block.
#[test]
fn a_hole_of_ones_own_making_is_filled_without_a_look_at_it() {
    let store = FaultBackend::new(Arc::new(MemoryBackend::new()));
    let setup = Setup::default();
    let span = setup.context().geometry.page_span();
    let model = fill(4 * span as usize, &mut Rng(1));
    let (before, last) = (span as usize / 2 / BLOCK * BLOCK, model.len() - BLOCK);
    let mut file = File::create(setup.context(), create_in(&store), "hole").expect("creates");
    file.write_at(0, &model[..before]).expect("writes");
    file.write_at(last as u64, &model[last..]).expect("writes");
    file.flush().expect("flushes");
    for is_open in [true, false] {
        let middle = last / 2 / BLOCK * BLOCK;
        let range = if is_open { before..middle } else { middle..last };
        file.write_at(range.start as u64, &model[range]).expect("writes");
        let searches = store.faults().calls(Call::Seek);
        file.flush().expect("flushes");
        // Whoever opens a file knows nothing of its holes.
        assert_eq!(store.faults().calls(Call::Seek) == searches, is_open);
        file.settle_now().expect("settles");
        file = File::open(setup.context(), raw(&store), "hole").expect("opens");
    }
    let mut back = vec![0; model.len()];
    file.read_at(0, &mut back).expect("reads");
    assert!(back == model);
}

/// What a shrink has given up lies there until the space is given back: whoever grows the file again fills no hole that
/// he has made.
#[test]
fn a_hole_that_was_filled_once_is_looked_at_and_cleared() {
    let store = FaultBackend::new(Arc::new(MemoryBackend::new()));
    let setup = Setup::default();
    let file = File::create(setup.context(), create_in(&store), "hole").expect("creates");
    let data = fill(BLOCK, &mut Rng(1));
    let write = |block: usize| {
        file.write_at((block * BLOCK) as u64, &data).expect("writes");
        let before = [Call::Seek, Call::Punch].map(|call| store.faults().calls(call));
        file.flush().expect("flushes");
        let after = [Call::Seek, Call::Punch].map(|call| store.faults().calls(call));
        [after[0] - before[0], after[1] - before[1]]
    };
    write(0);
    write(5);
    assert_eq!(write(3), [0, 0], "of one's own making");
    file.truncate(BLOCK as u64).expect("becomes shorter");
    file.flush().expect("flushes");
    write(5);
    let [_, punched] = write(3);
    assert_eq!(punched, 1, "the block of before");
    let mut back = vec![1; 6 * BLOCK];
    file.read_at(0, &mut back).expect("reads");
    let expected = [0, 3, 5].map(|block| back[block * BLOCK..][..BLOCK] == data);
    assert_eq!(expected, [true; 3]);
    assert!([1, 2, 4].iter().all(|block| back[block * BLOCK..][..BLOCK].iter().all(|byte| *byte == 0)));
}
