//! Recording a workload on one file, and judging what crashes leave of it.

use super::{Rng, Setup, create_in, epochs, fill, meanwhile, raw};
use lamassu_format::PageNo;
use lamassu_store::Backend;
use lamassu_store::backend::crash::{CrashBackend, CrashLog, CrashSim};
use lamassu_store::backend::fault::FaultBackend;
use lamassu_store::backend::memory::MemoryBackend;
use lamassu_store::file::{DamageKind, File, FileContext, Rekey};
use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// States tried by all tests of this program so far.
static TOTAL: AtomicU64 = AtomicU64::new(0);

/// A workload as it was recorded: the writes, and what the file held after each step.
pub struct Trace {
    pub log: CrashLog,
    /// Length of the log before the first step.
    pub start: usize,
    /// Writes that went beside a commit.
    pub meanwhile: u64,
    /// Content after step i; step 0 is the empty file.
    contents: Vec<Vec<u8>>,
    /// Length of the log when step i was complete.
    ends: Vec<usize>,
    /// Steps that were a completed fsync.
    synced: Vec<bool>,
}

/// Does what a workload asks for, to a file and to a vector of bytes, and notes when.
pub struct Recording<'a> {
    ctx: Arc<FileContext>,
    store: Arc<CrashBackend>,
    /// The same, as the file sees it.
    hooked: FaultBackend,
    /// Taken only while it is opened anew.
    file: Option<File>,
    model: Vec<u8>,
    trace: Trace,
    rng: Rng,
    pub setup: &'a Setup,
    /// The newest.
    epoch: u8,
}

impl<'a> Recording<'a> {
    pub fn new(setup: &'a Setup, seed: u64) -> Recording<'a> {
        let ctx = setup.context();
        ctx.ring.replace(&epochs(1..=1, 1), &epochs(1..=1, 2));
        let store = Arc::new(CrashBackend::with_granularity(u64::from(setup.block_size)));
        let hooked = FaultBackend::new(store.clone());
        let file = File::create(ctx.clone(), create_in(&hooked), "test").expect("creates");
        let start = store.position();
        let trace = Trace {
            log: store.log(),
            start,
            meanwhile: 0,
            contents: vec![vec![]],
            ends: vec![start],
            synced: vec![true],
        };
        Recording { ctx, store, hooked, file: Some(file), model: Vec::new(), trace, rng: Rng(seed), setup, epoch: 1 }
    }

    /// The block size, bytes.
    pub fn b(&self) -> u64 {
        self.setup.block_size.into()
    }

    pub fn size(&self) -> u64 {
        self.model.len() as u64
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("open")
    }

    fn done(&mut self, synced: bool) {
        self.trace.contents.push(self.model.clone());
        self.trace.ends.push(self.store.position());
        self.trace.synced.push(synced);
    }

    pub fn write(&mut self, offset: u64, len: u64) {
        let data = fill(len as usize, &mut self.rng);
        self.file().write_at(offset, &data).expect("writes");
        if len > 0 {
            self.model.resize(self.model.len().max((offset + len) as usize), 0);
            self.model[offset as usize..(offset + len) as usize].copy_from_slice(&data);
        }
        self.done(false);
    }

    /// Copies whole blocks of a file that lies there durably, ciphertext as it is; some of them are holes.
    pub fn copy(&mut self, first: u64, blocks: u64, to: u64) {
        let b = self.b();
        let elsewhere = MemoryBackend::new();
        let source = File::create(self.ctx.clone(), create_in(&elsewhere), "source").expect("creates");
        let mut bytes = fill(((first + blocks) * b) as usize + 100, &mut self.rng);
        source.write_at(0, &bytes).expect("writes");
        for block in (first..first + blocks).filter(|n| n % 5 == 3) {
            source.punch(block * b, b).expect("punches");
            bytes[(block * b) as usize..][..b as usize].fill(0);
        }
        source.settle_now().expect("settles");
        let copied = self.file().copy_from(&source, first * b, to * b, blocks * b + 50).expect("copies");
        assert_eq!(copied, Some(blocks * b));
        let end = ((to + blocks) * b) as usize;
        self.model.resize(self.model.len().max(end), 0);
        self.model[(to * b) as usize..end].copy_from_slice(&bytes[(first * b) as usize..][..(blocks * b) as usize]);
        self.done(false);
    }

    pub fn append(&mut self, len: u64) {
        let data = fill(len as usize, &mut self.rng);
        self.file().append(&data).expect("appends");
        self.model.extend_from_slice(&data);
        self.done(false);
    }

    pub fn truncate(&mut self, size: u64) {
        self.file().truncate(size).expect("truncates");
        self.model.resize(size as usize, 0);
        self.done(false);
    }

    pub fn punch(&mut self, offset: u64, len: u64) {
        self.file().punch(offset, len).expect("punches");
        let end = (offset + len).min(self.size()).max(offset.min(self.size()));
        self.model[offset.min(end) as usize..end as usize].fill(0);
        self.done(false);
    }

    pub fn flush(&mut self) {
        self.file().flush().expect("flushes");
        self.done(false);
    }

    pub fn sync(&mut self) {
        self.file().sync().expect("syncs");
        self.done(true);
    }

    /// A settling, and a write of whole blocks by somebody else from its `nth` change of the store on. What comes
    /// beside it is committed by a later step.
    pub fn settle_meanwhile(&mut self, first: u64, blocks: u64, nth: u64) {
        let b = self.b();
        let first = first.min(self.size() / b);
        let data = fill((blocks * b) as usize, &mut self.rng);
        let file = self.file();
        let patience = Duration::from_millis(3);
        let settle = || file.settle_now().expect("settles");
        let went = meanwhile(&self.hooked, nth, patience, settle, || file.write_at(first * b, &data).expect("writes"));
        self.trace.meanwhile += u64::from(went && blocks > 0);
        self.done(true);
        let (from, until) = ((first * b) as usize, (first * b) as usize + data.len());
        self.model.resize(self.model.len().max(until), 0);
        self.model[from..until].copy_from_slice(&data);
        self.done(false);
    }

    pub fn settle(&mut self) {
        self.file().settle_now().expect("settles");
        self.done(true);
    }

    /// As a vault does: one barrier for many files, and writes that come between.
    pub fn settle_with_the_store(&mut self) {
        self.file().flush().expect("flushes");
        let mark = self.file().covered_mark();
        self.store.sync().expect("syncs");
        self.file().settle(mark).expect("settles");
        self.done(false);
    }

    /// Starts an epoch of both keys, as often as the setup has them.
    pub fn rotate(&mut self) {
        self.epoch = (self.epoch + 1).min(self.setup.epochs);
        self.ctx.ring.replace(&epochs(1..=self.epoch, 1), &epochs(1..=self.epoch, 2));
    }

    /// Steps of a re-keying that is broken off after some of them.
    pub fn rekey(&mut self, work: Rekey, steps_max: usize) {
        let mut from = Some(PageNo::ZERO);
        for _ in 0..steps_max {
            let Some(page) = from else { break };
            let step = self.file().rekey(work, page).expect("re-keys");
            assert_eq!(step.damaged, 0);
            from = step.next;
        }
        self.done(false);
    }

    /// The writes so far.
    pub fn position(&self) -> usize {
        self.store.position()
    }

    /// A clean end and a new start: what mounting does first is a barrier.
    pub fn reopen(&mut self) {
        self.file().flush().expect("flushes");
        self.file = None;
        self.store.sync().expect("syncs");
        self.file = Some(File::open(self.ctx.clone(), raw(&self.hooked), "test").expect("opens"));
        self.done(true);
    }

    pub fn finish(mut self) -> Trace {
        self.trace.log = self.store.log();
        self.trace
    }
}

/// Random steps, sizes up to `size_max`.
pub fn random_workload(setup: &Setup, seed: u64, steps: usize, size_max: u64) -> Trace {
    let mut r = Recording::new(setup, seed);
    for _ in 0..steps {
        let offset = r.rng.below(size_max);
        let offset = if r.rng.below(2) == 0 { offset / 4096 * 4096 } else { offset };
        let choice = [r.rng.below(300), r.rng.below(size_max / 3), 4096 * r.rng.below(30)];
        let len = choice[r.rng.below(3) as usize];
        if setup.epochs > 1 && r.rng.below(4) == 0 {
            match r.rng.below(3) {
                0 => r.rotate(),
                1 => r.rekey(Rekey::Outer, 9),
                _ => r.rekey(Rekey::Full, 9),
            }
            continue;
        }
        match r.rng.below(17) {
            0..=4 => r.write(offset, len),
            5 => r.append(1 + len % 5000),
            6..=7 => {
                let size = match r.rng.below(5) {
                    0 => 0,
                    1 => r.size().saturating_sub(r.rng.below(9000)),
                    _ => offset,
                };
                r.truncate(size);
            }
            8 => r.punch(offset, len),
            9..=10 => r.flush(),
            11..=12 => r.sync(),
            13 => r.settle_meanwhile(offset / r.b(), len.div_ceil(r.b()).min(20), 1 + len % 4),
            14 => r.settle(),
            15 => r.settle_with_the_store(),
            _ => r.reopen(),
        }
    }
    r.finish()
}

/// Whether `block`, at `offset`, is what `version` has there (zeros past its end).
fn is_version(block: &[u8], offset: usize, version: &[u8]) -> bool {
    let there = version.len().saturating_sub(offset).min(block.len());
    let (had, beyond) = block.split_at(there);
    (there == 0 || had == &version[offset..offset + there]) && beyond.iter().all(|b| *b == 0)
}

/// What is wrong with a crashed file, if anything.
fn judge(ctx: &Arc<FileContext>, trace: &Trace, at: usize, store: &MemoryBackend) -> Result<(), String> {
    // The step in progress, and the last fsync that was complete.
    let step = trace.ends.iter().position(|end| *end >= at).unwrap_or(trace.ends.len() - 1);
    let from = (0..=step).rev().find(|i| trace.synced[*i] && trace.ends[*i] <= at).unwrap_or(0);
    let versions = &trace.contents[from..=step];
    // Without its first page a file says nothing. Only one that no fsync has covered since it was created or emptied
    // may be so.
    let may_be_void = versions.iter().any(|v| v.is_empty());
    let file = File::open(ctx.clone(), raw(store), "crashed").map_err(|e| format!("open: {e}"))?;
    let first_page_is_lost = || {
        let found = file.check(false, &mut |_| {});
        found.is_ok_and(|c| c.damage.iter().any(|d| d.kind == DamageKind::PageMissing && d.page == PageNo::ZERO))
    };
    if may_be_void && first_page_is_lost() {
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
    let b = ctx.geometry.block_size() as usize;
    for (n, block) in back.chunks(b).enumerate() {
        // A block of a partly committed growth may not have been written yet.
        let fresh = versions.iter().any(|v| v.len() <= n * b) && block.iter().all(|x| *x == 0);
        // A shrink goes to disk at once, and what was buffered before it may be lost: then what was there is cut, and
        // zeros come after it where the file grew again.
        let is_cut = |i: usize, v: &[u8]| {
            versions[i..].iter().any(|later| is_version(block, n * b, &v[..v.len().min(later.len())]))
        };
        let is_known = || versions.iter().any(|v| is_version(block, n * b, v));
        if !fresh && !is_known() && !versions.iter().enumerate().any(|(i, v)| is_cut(i, v)) {
            return Err(format!("block {n} of {size} bytes is neither old nor new"));
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
    let file = File::open(ctx.clone(), raw(store), "again").map_err(|e| format!("reopen: {e}"))?;
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

/// How much of a workload's crashes is looked at.
#[derive(Clone, Copy)]
pub struct Depth {
    /// Power cuts tried after each record, besides the one that loses all it can.
    pub losses: u64,
    /// Every how many records; 1: after each write, length and barrier.
    pub stride: usize,
}

/// Crashes after the records of a trace: killed there, everything lost that may be, and `losses` random power cuts.
/// Returns how many *different* states each point had, summed up, or the first that fails.
pub fn explore(setup: &Setup, trace: &Trace, seed: u64, depth: Depth) -> Result<u64, String> {
    let ctx = setup.context();
    let (start, end) = (trace.start, trace.log.records().len());
    let sim = CrashSim::new(trace.log.clone());
    let hasher = RandomState::new();
    let mut states = 0;
    for at in (start..=end).filter(|at| (at - start).is_multiple_of(depth.stride) || *at == end) {
        let point = sim.at(at);
        let killed = std::iter::once(("killed".to_owned(), sim.prefix(at)));
        let cut = (0..=depth.losses).map(|n| match n {
            0 => ("everything lost".to_owned(), point.least_state()),
            n => (format!("power cut {n}"), point.random_state(seed << 16 | n)),
        });
        let mut seen = HashSet::new();
        for (what, store) in killed.chain(cut) {
            if seen.insert(hasher.hash_one(content_of(&store))) {
                judge(&ctx, trace, at, &store)
                    .map_err(|e| format!("seed {seed}, after {at} of {end} changes, {what}: {e}"))?;
                states += 1;
            }
        }
    }
    TOTAL.fetch_add(states, Ordering::Relaxed);
    Ok(states)
}

fn content_of(store: &MemoryBackend) -> Vec<u8> {
    let Ok(file) = store.root().open_file(super::name(), false) else { return Vec::new() };
    let mut bytes = vec![0; file.stat().map_or(0, |s| s.len as usize)];
    file.read_at(0, &mut bytes).expect("memory reads");
    bytes
}

/// `LAMASSU_CRASH_SCALE`: how many times more is tried than by default.
pub fn scale() -> u64 {
    std::env::var("LAMASSU_CRASH_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1)
}

/// `LAMASSU_CRASH_SEED`: the one workload to run.
pub fn chosen_seed() -> Option<u64> {
    std::env::var("LAMASSU_CRASH_SEED").ok().and_then(|s| s.parse().ok())
}

/// Runs one workload of the test `name`, or fails with the command that does so again.
pub fn must_survive(name: &str, setup: &Setup, trace: &Trace, seed: u64, depth: Depth) -> u64 {
    explore(setup, trace, seed, depth).unwrap_or_else(|e| {
        let (scale, b) = (scale(), setup.block_size);
        panic!(
            "{name}, blocks of {b}: {e}\nreproduce: LAMASSU_CRASH_SCALE={scale} LAMASSU_CRASH_SEED={seed} cargo test -p lamassu-store --test crash -- --exact {name}"
        )
    })
}

/// Says how many states were tried, and insists on a minimum where nothing restricted the run.
pub fn tell(name: &str, states: u64, at_least: u64) {
    println!("{name}: {states} crash states; {} so far", TOTAL.load(Ordering::Relaxed));
    assert!(chosen_seed().is_some() || states >= at_least, "{name}: {states} crash states are fewer than {at_least}");
}
