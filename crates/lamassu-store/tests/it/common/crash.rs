//! Recording a workload on one file, and judging what crashes leave of it.

mod hostile;

pub use hostile::{Attacks, attack};

use super::anchor::{self, AnchorLog, AnchorSide, MemoryTrees};
use super::{Rng, Setup, change_profile, create_in, epochs, fill, meanwhile, raw};
use lamassu_anchor::EntryMark;
use lamassu_format::{PageNo, Profile};
use lamassu_store::Backend;
use lamassu_store::backend::crash::{CrashBackend, CrashLog, CrashSim};
use lamassu_store::backend::fault::FaultBackend;
use lamassu_store::backend::memory::MemoryBackend;
use lamassu_store::file::{AnchoredFiles, DamageKind, File, FileContext, Rekey};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long the store waits for a write that may go on beside it: most have to wait for it.
static PATIENCE_MS: AtomicU64 = AtomicU64::new(3);

/// Has it wait longer from now on. False: it waits for long enough.
pub fn wait_longer() -> bool {
    PATIENCE_MS.fetch_add(1000, Ordering::Relaxed) < 10_000
}

/// States tried by all tests of this program so far.
static TOTAL: AtomicU64 = AtomicU64::new(0);

/// A workload as it was recorded: the writes, and what the file held after each step.
pub struct Trace {
    pub log: CrashLog,
    /// Length of the log before the first step.
    pub start: usize,
    /// The commits of the file's anchor, if it has one.
    pub anchor: Option<AnchorLog>,
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
    anchor: Option<AnchorSide>,
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
        let store = Arc::new(CrashBackend::with_granularity(u64::from(setup.block_size)));
        let position = store.clone();
        let is_durable = !setup.at_intervals && !seed.is_multiple_of(3);
        let side = || AnchorSide::new(Arc::new(move || position.position()), 1 + (seed % 4) as u8, is_durable);
        let hooked = FaultBackend::new(store.clone());
        let backing = create_in(&hooked);
        let anchor = setup.anchored.then(side);
        let ctx = setup.context_with(anchor.as_ref().map(|side| side.files.clone()));
        ctx.ring.replace(&epochs(1..=1, 1), &epochs(1..=1, 2));
        let file = match &anchor {
            Some(side) => File::create_object(ctx.clone(), backing, "test", side.object),
            None => File::create(ctx.clone(), backing, "test"),
        };
        let file = file.expect("creates");
        let start = store.position();
        let trace = Trace {
            log: store.log(),
            start,
            anchor: None,
            meanwhile: 0,
            contents: vec![vec![]],
            ends: vec![start],
            synced: vec![true],
        };
        Recording {
            ctx,
            anchor,
            store,
            hooked,
            file: Some(file),
            model: Vec::new(),
            trace,
            rng: Rng(seed),
            setup,
            epoch: 1,
        }
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
        let data = self.setup.content(len as usize, &mut self.rng);
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
        let mut bytes = self.setup.content(((first + blocks) * b) as usize + 100, &mut self.rng);
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
        let data = self.setup.content(len as usize, &mut self.rng);
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
        self.acknowledge();
    }

    /// The end of a step that waits for the anchor, unless that is committed to at intervals: then nothing is
    /// acknowledged yet.
    fn acknowledge(&mut self) {
        if !self.setup.at_intervals {
            self.commit_anchor();
        }
        self.done(!self.setup.at_intervals);
    }

    /// A commit of the anchor at some time: at an interval, or since a name of the file is changed.
    pub fn commit_what_is_queued(&mut self) {
        self.commit_anchor();
        self.done(false);
    }

    /// A settling, and a write of whole blocks by somebody else from its `nth` change of the store on. What comes
    /// beside it is committed by a later step.
    pub fn settle_meanwhile(&mut self, first: u64, blocks: u64, nth: u64) {
        let b = self.b();
        let first = first.min(self.size() / b);
        let data = fill((blocks * b) as usize, &mut self.rng);
        let file = self.file();
        let patience = Duration::from_millis(PATIENCE_MS.load(Ordering::Relaxed));
        let settle = || file.settle_now().expect("settles");
        let went = meanwhile(&self.hooked, nth, patience, settle, || file.write_at(first * b, &data).expect("writes"));
        self.trace.meanwhile += u64::from(went && blocks > 0);
        self.acknowledge();
        let (from, until) = ((first * b) as usize, (first * b) as usize + data.len());
        self.model.resize(self.model.len().max(until), 0);
        self.model[from..until].copy_from_slice(&data);
        self.done(false);
    }

    /// The anchor learns what barriers have covered, as the file's entry was from the beginning.
    fn commit_anchor(&self) {
        if let Some(side) = &self.anchor {
            side.commit(side.files.anchor().mark());
        }
    }

    /// A barrier of the whole store, and a commit of the anchor behind it.
    fn sync_store(&self) {
        let closed = self.anchor.as_ref().map(|side| side.files.closed());
        self.store.sync().expect("syncs");
        if let (Some(side), Some(closed)) = (&self.anchor, closed) {
            side.files.covered(closed).expect("queues");
        }
    }

    pub fn settle(&mut self) {
        self.file().settle_now().expect("settles");
        self.acknowledge();
    }

    /// As a vault does: one barrier for many files, and writes that come between.
    pub fn settle_with_the_store(&mut self) {
        self.file().flush().expect("flushes");
        let mark = self.file().covered_mark();
        self.sync_store();
        self.file().covered(mark).expect("queues");
        self.commit_anchor();
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

    /// A change of profile, broken off after so many steps.
    pub fn change_profile(&mut self, profile: Profile, steps_max: usize) {
        change_profile(self.file(), profile, steps_max).expect("changes");
        self.done(false);
    }

    /// The writes so far.
    pub fn position(&self) -> usize {
        self.store.position()
    }

    /// A clean end and a new start: what mounting does first is a barrier.
    pub fn reopen(&mut self) {
        self.file().flush().expect("flushes");
        match self.anchor {
            Some(_) if self.setup.at_intervals => self.settle(),
            Some(_) => self.settle_with_the_store(),
            None => {}
        }
        self.file = None;
        self.sync_store();
        if !self.setup.at_intervals {
            self.commit_anchor();
        }
        let backing = raw(&self.hooked);
        let len = backing.stat().expect("stats").len;
        self.file = Some(match &self.anchor {
            Some(side) => File::open_object(self.ctx.clone(), backing, len, "test", side.object).expect("opens"),
            None => File::open(self.ctx.clone(), backing, "test").expect("opens"),
        });
        self.done(!self.setup.at_intervals);
    }

    pub fn finish(mut self) -> Trace {
        self.trace.log = self.store.log();
        self.trace.anchor = self.anchor.as_ref().map(AnchorSide::log);
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
        if !setup.profiles.is_empty() && r.rng.below(4) == 0 {
            let profile = setup.profiles[r.rng.below(setup.profiles.len() as u64) as usize];
            let steps = r.rng.below(3) as usize;
            r.change_profile(profile, steps);
            continue;
        }
        match r.rng.below(if setup.at_intervals { 19 } else { 17 }) {
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
            16 => r.reopen(),
            _ => r.commit_what_is_queued(),
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

/// Whether a block, at `offset`, may be read after a crash, where the file had these versions since the last fsync.
fn is_allowed(versions: &[Vec<u8>], offset: usize, block: &[u8]) -> bool {
    // A block of a partly committed growth may not have been written yet.
    let fresh = versions.iter().any(|v| v.len() <= offset) && block.iter().all(|x| *x == 0);
    // A shrink goes to disk at once, and what was buffered before it may be lost: then what was there is cut, and
    // zeros come after it where the file grew again.
    let is_cut = |i: usize, v: &[u8]| {
        versions[i..].iter().any(|later| is_version(block, offset, &v[..v.len().min(later.len())]))
    };
    let is_known = || versions.iter().any(|v| is_version(block, offset, v));
    fresh || is_known() || versions.iter().enumerate().any(|(i, v)| is_cut(i, v))
}

/// The versions that a crash after `at` records may leave.
fn versions_at(trace: &Trace, at: usize) -> &[Vec<u8>] {
    // The step in progress, and the last fsync that was complete.
    let step = trace.ends.iter().position(|end| *end >= at).unwrap_or(trace.ends.len() - 1);
    let from = (0..=step).rev().find(|i| trace.synced[*i] && trace.ends[*i] <= at).unwrap_or(0);
    &trace.contents[from..=step]
}

/// A process after a crash.
struct Crash<'a> {
    setup: &'a Setup,
    ctx: Arc<FileContext>,
    table: Option<Arc<lamassu_anchor::table::MemoryTable>>,
}

impl Crash<'_> {
    /// `None`: the anchor never had the file.
    fn new<'a>(setup: &'a Setup, trace: &Trace, at: usize, loses: bool) -> Option<Crash<'a>> {
        let Some(anchor) = &trace.anchor else { return Some(Crash { setup, ctx: setup.context(), table: None }) };
        let (files, table) = anchor.at(at, loses)?;
        Some(Crash { setup, ctx: setup.context_with(Some(files)), table: Some(table) })
    }

    fn open(&self, ctx: &Arc<FileContext>, store: &MemoryBackend) -> Result<File, lamassu_store::StoreError> {
        let backing = raw(store);
        if ctx.anchored.is_none() {
            return File::open(ctx.clone(), backing, "crashed");
        }
        let len = backing.stat().expect("stats").len;
        File::open_object(ctx.clone(), backing, len, "crashed", anchor::OBJECT)
    }

    /// This process is killed where it is, in recovery or right behind it: what the next one reads is the same. It
    /// finds nothing in memory, and what the anchor was told is true.
    fn killed_again(&self, store: &MemoryBackend, back: &[u8]) -> Result<(), String> {
        let Some(table) = &self.table else { return Ok(()) };
        let files = anchor::open(Arc::new((**table).clone()), MemoryTrees::default());
        let store = store.snapshot();
        let file =
            self.open(&self.setup.context_with(Some(files)), &store).map_err(|e| format!("killed again: {e}"))?;
        let mut again = vec![0; back.len()];
        file.read_at(0, &mut again).map_err(|e| format!("killed again, read: {e}"))?;
        match file.size() == back.len() as u64 && again == back {
            true => Ok(()),
            false => Err("killed again, it reads something else".into()),
        }
    }

    /// The file was closed: an end without anything left open, and the next process.
    fn next_process(&self, store: &MemoryBackend) -> Result<Option<Arc<FileContext>>, String> {
        let (Some(files), Some(table)) = (&self.ctx.anchored, &self.table) else { return Ok(None) };
        let closed = files.closed();
        store.sync().expect("syncs");
        files.covered(closed).map_err(|e| format!("cover: {e}"))?;
        files.anchor().commit(EntryMark::NOTHING).map_err(|e| format!("commit: {e}"))?;
        let next: Arc<AnchoredFiles> = anchor::open(table.clone(), MemoryTrees::default());
        let row = next.anchor().row(anchor::OBJECT).map_err(|e| format!("row: {e}"))?;
        let Some(file) = row.file().filter(|file| file.open.is_none()) else {
            return Err(format!("the row stays open: {row:?}"));
        };
        let scrub = anchor::scrub(&self.ctx.geometry, next.anchor());
        let found =
            scrub.file(&*raw(store), anchor::OBJECT, file, &mut |_| Ok(())).map_err(|e| format!("scrub: {e}"))?;
        let is_clean = found.stale_pages.count + found.stale_blocks.count + found.open_pages == 0;
        if !is_clean || found.has_blocks != next.anchor().has_blocks() {
            return Err(format!("scrub: {found:?}"));
        }
        Ok(Some(self.setup.context_with(Some(next))))
    }
}

/// What is wrong with a crashed file, if anything.
fn judge(crash: &Crash<'_>, trace: &Trace, at: usize, store: &MemoryBackend) -> Result<(), String> {
    let ctx = &crash.ctx;
    let versions = versions_at(trace, at);
    // Without its first page a file says nothing. Only one that no fsync has covered since it was created or emptied
    // may be so.
    let may_be_void = versions.iter().any(|v| v.is_empty());
    let file = crash.open(ctx, store).map_err(|e| format!("open: {e}"))?;
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
        if !is_allowed(versions, n * b, block) {
            return Err(format!("block {n} of {size} bytes is neither old nor new"));
        }
    }
    // A check reads all of it: not in each state.
    if versions.len() == 1 && at.is_multiple_of(4) {
        let found = file.check(false, &mut |_| {}).map_err(|e| format!("check: {e}"))?;
        if found.undone.iter().any(|undone| undone.kind == DamageKind::Reverted) {
            return Err(format!("the content can only be one, but is told as undone: {:?}", found.undone));
        }
    }
    crash.killed_again(store, &back)?;
    let found = file.check(true, &mut |_| {}).map_err(|e| format!("check: {e}"))?;
    if !found.damage.is_empty() {
        return Err(format!("damage {:?}", found.damage));
    }
    // A change of profile that was interrupted is carried out.
    if let (profile, true) = file.profile() {
        match change_profile(&file, profile, usize::MAX) {
            Ok(true) if file.profile() == (profile, false) => {}
            other => return Err(format!("the profile is not changed: {other:?}")),
        }
    }
    // Life goes on: a write and a settle, and it still reads back.
    file.write_at(0, b"afterwards").map_err(|e| format!("write: {e}"))?;
    file.settle_now().map_err(|e| format!("settle: {e}"))?;
    drop(file);
    let again = crash.next_process(store)?;
    let ctx = again.as_ref().unwrap_or(ctx);
    let file = crash.open(ctx, store).map_err(|e| format!("reopen: {e}"))?;
    let found = file.check(false, &mut |_| {}).map_err(|e| format!("second check: {e}"))?;
    // Where reads do not hash, pending bits of pages that the anchor covers are looked at once more.
    let may_recover = file.profile().0.protection().is_unverified();
    if !found.damage.is_empty() || (found.recovered != 0 && !may_recover) {
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
    let (start, end) = (trace.start, trace.log.records().len());
    let sim = CrashSim::new(trace.log.clone());
    let mut states = 0;
    for at in (start..=end).filter(|at| (at - start).is_multiple_of(depth.stride) || *at == end) {
        let point = sim.at(at);
        let killed = std::iter::once(("killed".to_owned(), sim.prefix(at)));
        let cut = (0..=depth.losses).map(|n| match n {
            0 => ("everything lost".to_owned(), point.least_state()),
            n => (format!("power cut {n}"), point.random_state(seed << 16 | n)),
        });
        let mut seen: Vec<Vec<u8>> = Vec::new();
        for (what, store) in killed.chain(cut) {
            // There are few, and most differ early: cheaper than to hash each.
            let content = content_of(&store);
            if !seen.contains(&content) {
                seen.push(content);
                let loses = states % 2 == 1;
                let Some(crash) = Crash::new(setup, trace, at, loses) else { continue };
                judge(&crash, trace, at, &store)
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
        let (scale, b, test) = (scale(), setup.block_size, if setup.anchored { "anchored" } else { "crash" });
        panic!(
            "{name}, blocks of {b}: {e}\nreproduce: LAMASSU_CRASH_SCALE={scale} LAMASSU_CRASH_SEED={seed} cargo test -p lamassu-store --test it -- --exact {test}::{name}"
        )
    })
}

/// Says how many states were tried, and insists on a minimum where nothing restricted the run.
pub fn tell(name: &str, states: u64, at_least: u64) {
    println!("{name}: {states} crash states; {} so far", TOTAL.load(Ordering::Relaxed));
    assert!(chosen_seed().is_some() || states >= at_least, "{name}: {states} crash states are fewer than {at_least}");
}
