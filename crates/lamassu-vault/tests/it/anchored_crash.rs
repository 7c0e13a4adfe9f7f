//! Crashes of an anchored vault at every step of its store and its anchor (`docs/freshness.md`, sections 4 and 5):
//! nothing is called stale, every name is old or new, and what was acknowledged is there.
use crate::common;

mod barriers;
mod takeover;
mod way;

use common::anchored::*;
use common::*;
use lamassu_anchor::table::{MemoryTable, Table};
use lamassu_format::Codec;
use lamassu_store::backend::crash::CrashLog;
use lamassu_store::backend::{CrashBackend, CrashSim, MemoryBackend};
use lamassu_store::{Backend, BackendDir};
use lamassu_vault::event::Events;
use lamassu_vault::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The same by directory, whatever its path: a name and what it leads to are old or new each for itself.
type Entries = BTreeMap<(Ino, String), String>;

/// By the inode of a file: the highest version of its content that is there, or has to be.
type Versions = BTreeMap<Ino, u64>;

/// Or what is wrong.
type Found<T> = std::result::Result<T, String>;

/// What is in each directory that can be reached, which these are, and which version every file with one has.
fn entries(vault: &Vault) -> Found<(Entries, BTreeSet<Ino>, Versions)> {
    let (mut all, mut dirs, mut versions) = (Entries::new(), BTreeSet::from([ROOT]), Versions::new());
    for (path, what) in try_seen(vault)? {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", &path));
        let attr = vault.find(&path).map_err(|e| format!("{path}: {e}"))?.attr;
        let what = match attr.kind {
            Kind::Symlink => what,
            _ => format!("{what} {}", attr.ino),
        };
        match attr.kind {
            Kind::Dir => _ = dirs.insert(attr.ino),
            Kind::File => _ = versions.insert(attr.ino, version(vault, &path)?),
            _ => {}
        }
        all.insert((vault.ino(parent), name.to_owned()), what);
    }
    Ok((all, dirs, versions))
}

/// The version of a file's content, zero of one that has none.
fn version(vault: &Vault, path: &str) -> Found<u64> {
    let handle = vault.open_file(vault.ino(path), RO).map_err(|e| format!("{path}: {e}"))?;
    let mut bytes = [0; 8];
    let read = vault.read(handle, 0, &mut bytes).map_err(|e| format!("{path}: {e}"))?;
    vault.release(handle).unwrap();
    match read {
        0 | 8 => Ok(u64::from_le_bytes(bytes)),
        read => Err(format!("{path}: {read} bytes")),
    }
}

/// What names may lead to.
type Allowed = BTreeMap<(Ino, String), BTreeSet<Option<String>>>;

struct Run {
    crash: Arc<CrashBackend>,
    watched: Arc<Watched>,
    lab: Lab,
    /// From which position of the store on which states are allowed.
    states: Vec<(usize, Allowed)>,
    /// The same of versions that were acknowledged.
    synced: Vec<(usize, Versions)>,
    /// What must lie somewhere in every state.
    always: Vec<String>,
}

type Step<'a> = (&'a str, &'a dyn Fn(&Vault));

/// Takes steps. After each, what is seen may be seen after a crash, too; a step whose name ends with `!` acknowledges
/// all of it, one that is called `ack` and a path that path, and one that is called `fsync` and a path the content
/// there.
fn run(recipe: Recipe, steps: &[Step<'_>]) -> Run {
    let crash = Arc::new(CrashBackend::with_granularity(recipe.block_size.into()));
    let watched = Watched::over(&crash);
    let (lab, v) = Lab::over(recipe, crash.clone(), watched.clone());
    v.sync_all().unwrap();
    let mut states = vec![(crash.position(), Allowed::new())];
    let mut synced = vec![(crash.position(), Versions::new())];
    let mut allowed = Allowed::new();
    let mut before = BTreeMap::new();
    for (name, step) in steps {
        step(&v);
        let (now, _, versions) = entries(&v).unwrap();
        let mut acknowledged = synced[synced.len() - 1].1.clone();
        match name.strip_prefix("fsync ").map(|path| v.find(path)) {
            Some(Ok(file)) => acknowledged.extend(versions.get_key_value(&file.attr.ino)),
            None if name.ends_with('!') => acknowledged.extend(&versions),
            _ => {}
        }
        synced.push((crash.position(), acknowledged));
        let paths: BTreeSet<&(Ino, String)> = now.keys().chain(before.keys()).chain(allowed.keys()).collect();
        let mut during = allowed.clone();
        for path in paths {
            let of = during.entry(path.clone()).or_default();
            of.extend([before.get(path).cloned(), now.get(path).cloned()]);
        }
        // While the step is under way.
        if let Some(last) = states.last_mut() {
            last.1 = during.clone();
        }
        allowed = match name.strip_prefix("ack ") {
            Some(path) => {
                let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
                let key = (v.ino(parent), name.to_owned());
                let what = BTreeSet::from([now.get(&key).cloned()]);
                during.insert(key, what);
                during
            }
            None if name.ends_with('!') => {
                now.iter().map(|(path, what)| (path.clone(), BTreeSet::from([Some(what.clone())]))).collect()
            }
            None => during,
        };
        states.push((crash.position(), allowed.clone()));
        before = now;
    }
    std::mem::forget(v);
    Run { crash, watched, lab, states, synced, always: Vec::new() }
}

impl Run {
    /// The states of the anchor that may go with so many changes of the store.
    fn anchors(&self, at: usize) -> Vec<MemoryTable> {
        let states = self.watched.states.lock();
        let before = states.iter().rfind(|(position, _)| *position < at);
        before
            .into_iter()
            .chain(states.iter().filter(|(position, _)| *position == at))
            .map(|(_, t)| t.clone())
            .collect()
    }

    /// Crashes everywhere. Returns in how many states.
    fn survive(&self, lost: bool) -> usize {
        self.survive_as(self.crash.log(), self.states[0].0, lost).unwrap_or_else(|what| panic!("{what}"))
    }

    /// The same of a store that has another log, from a record on; or what is wrong first.
    fn survive_as(&self, log: CrashLog, begin: usize, lost: bool) -> Found<usize> {
        let sim = CrashSim::new(log);
        let mut count = 0;
        for (at, left) in all_of(&sim, begin) {
            let allowed = self.allowed(at);
            for table in self.anchors(at) {
                let mut stores = vec![left.snapshot()];
                if lost {
                    stores.push(sim.at(at).least_state());
                    stores.extend((0..8).map(|seed| sim.at(at).random_state(seed)));
                }
                for store in stores {
                    self.check(store, table.clone(), &allowed, at).map_err(|what| format!("record {at}: {what}"))?;
                    count += 1;
                }
            }
        }
        Ok(count)
    }

    /// The same, with another crash at every step of the recovery.
    fn survive_twice(&self) -> usize {
        let sim = CrashSim::new(self.crash.log());
        let mut count = 0;
        for (at, left) in all_of(&sim, self.states[0].0) {
            for table in self.anchors(at) {
                let crash = Arc::new(CrashBackend::over(&left, self.lab.recipe.block_size.into()));
                let watched = Watched::of(table, &crash);
                watched.states.lock().push((0, watched.table.clone()));
                let (backend, table): (Arc<dyn Backend>, Arc<dyn Table>) = (crash.clone(), watched.clone());
                std::mem::forget(open_anchored(&self.lab.recipe, &backend, &table, false).unwrap());
                let lab = Lab { recipe: self.lab.recipe, backend, table };
                let states = vec![(0, self.allowed(at))];
                let synced = vec![(0, self.synced(at))];
                let second = Run { crash, watched, lab, states, synced, always: self.always.clone() };
                count += second.survive(true);
            }
        }
        count
    }

    /// What is allowed after so many changes of the store: all steps that may have been under way then.
    fn allowed(&self, at: usize) -> Allowed {
        let mut allowed = Allowed::new();
        for (number, (begin, during)) in self.states.iter().enumerate() {
            let end = self.states.get(number + 1).map_or(usize::MAX, |next| next.0);
            if (*begin..=end).contains(&at) {
                for (path, of) in during {
                    allowed.entry(path.clone()).or_default().extend(of.clone());
                }
                // Where a state says nothing of a path, there is nothing.
                let absent = |path: &&(Ino, String)| !during.contains_key(*path);
                let others: Vec<_> = allowed.keys().filter(absent).cloned().collect();
                others.into_iter().for_each(|path| _ = allowed.entry(path).or_default().insert(None));
            }
        }
        allowed
    }

    /// The version that each file has to have after so many changes of the store.
    fn synced(&self, at: usize) -> Versions {
        self.synced.iter().rfind(|(begin, _)| *begin < at).unwrap_or(&self.synced[0]).1.clone()
    }

    /// What a scrub and a check say while nobody has put anything right yet: no honest store is called stale.
    fn look(&self, backend: &Arc<dyn Backend>, table: &Arc<dyn Table>) -> Found<()> {
        let mut found = Findings::default();
        let header = self.lab.recipe.header();
        scrub::scrub(backend.root(), &header, &anchor(&self.lab.recipe, table), &Events::default(), &mut found)
            .unwrap();
        let v = open_anchored(&self.lab.recipe, backend, table, true).unwrap();
        let report = v.check(&[], false, &Quiet).unwrap();
        let damage: Vec<_> = report.problems.iter().filter(|problem| !problem.harmless && !problem.undone).collect();
        match (found.0.is_empty(), damage.is_empty()) {
            (true, true) => Ok(()),
            (false, _) => Err(format!("a scrub says {:?}", found.0)),
            (true, false) => Err(format!("a check says {damage:?}")),
        }
    }

    fn check(&self, store: MemoryBackend, table: MemoryTable, allowed: &Allowed, at: usize) -> Found<()> {
        let (shadow, before) = (table.clone(), store.snapshot());
        let (backend, table): (Arc<dyn Backend>, Arc<dyn Table>) = (Arc::new(store), Arc::new(table));
        self.look(&backend, &table).and_then(|()| self.recover(&backend, &table, allowed, at)).map_err(|what| {
            let intents = anchor(&self.lab.recipe, &(Arc::new(shadow) as Arc<dyn Table>)).intents().unwrap();
            let [before, after] = [before.root(), backend.root()].map(|root| tree_of(&*root, 0));
            format!("{what}\nbefore: {before}\nintents {intents:?}, {after}")
        })
    }

    /// What the next writer sees, and the one behind it.
    fn recover(&self, backend: &Arc<dyn Backend>, table: &Arc<dyn Table>, allowed: &Allowed, at: usize) -> Found<()> {
        let v = open_anchored(&self.lab.recipe, backend, table, false).unwrap();
        let (now, dirs, versions) = entries(&v)?;
        let synced = self.synced(at);
        for (file, version) in versions {
            let least = synced.get(&file).copied().unwrap_or(0);
            is(version >= least, || format!("{file} is at version {version}, and {least} was acknowledged"))?;
        }
        for what in &self.always {
            is(now.values().any(|value| value == what), || format!("{what} is nowhere"))?;
        }
        let reached = |path: &&(Ino, String)| dirs.contains(&path.0);
        for path in now.keys().chain(allowed.keys().filter(reached)) {
            let of = allowed.get(path).cloned().unwrap_or_default();
            let what = now.get(path).cloned();
            let is_allowed = of.contains(&what) || (of.is_empty() && what.is_none());
            is(is_allowed, || format!("{path:?} is {what:?}, not one of {of:?}"))?;
        }
        v.close().map_err(|e| format!("close: {e}"))?;
        let v = open_anchored(&self.lab.recipe, backend, table, false).unwrap();
        let again = entries(&v)?.0;
        v.close().map_err(|e| format!("close: {e}"))?;
        is(again == now, || format!("opened again: {again:?}, and not {now:?}"))
    }
}

fn is(good: bool, what: impl FnOnce() -> String) -> Found<()> {
    if good { Ok(()) } else { Err(what()) }
}

/// What the store has after each record from one on: barriers count, since the anchor commits after them.
fn all_of(sim: &CrashSim, begin: usize) -> impl Iterator<Item = (usize, MemoryBackend)> + '_ {
    (begin..=sim.log().records().len()).map(|at| (at, sim.prefix(at)))
}

/// Says where it was when a test fails.
struct Told(String);

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// What the store has.
fn tree_of(dir: &dyn BackendDir, depth: usize) -> String {
    let mut lines = String::new();
    for entry in dir.read_dir().unwrap() {
        lines += &format!("\n{:depth$}{}", "", entry.name.to_string_lossy());
        if let Ok(below) = dir.open_dir(&entry.name) {
            lines += &tree_of(&*below, depth + 2);
        }
    }
    lines
}

fn sync(v: &Vault) {
    v.sync_all().unwrap();
}

/// Links stand for files: their content is known by their rows alone.
fn names_steps() -> Vec<Step<'static>> {
    vec![
        ("link", &|v| link_to(v, "a", "A")),
        ("link", &|v| link_to(v, "b", "B")),
        ("dir", &|v| _ = v.dir("d")),
        ("link in a new directory", &|v| link_to(v, "d/x", "X")),
        ("sync!", &sync),
        ("rename to a free name", &|v| mv(v, "a", "c", RenameMode::NoReplace).unwrap()),
        ("rename into a directory", &|v| mv(v, "c", "d/c", RenameMode::Replace).unwrap()),
        ("new", &|v| link_to(v, "new", "N")),
        ("rename over", &|v| mv(v, "new", "b", RenameMode::Replace).unwrap()),
        ("exchange", &|v| mv(v, "b", "d/x", RenameMode::Exchange).unwrap()),
        ("sync!", &sync),
        ("rename the directory", &|v| mv(v, "d", "e", RenameMode::Replace).unwrap()),
        ("rename in it", &|v| mv(v, "e/c", "e/far", RenameMode::Replace).unwrap()),
        ("dir", &|v| _ = v.dir("f")),
        ("sync!", &sync),
        ("rename over a directory", &|v| mv(v, "e", "f", RenameMode::Replace).unwrap()),
        ("unlink", &|v| rm(v, "b").unwrap()),
        ("unlink in it", &|v| rm(v, "f/far").unwrap()),
        ("unlink in it", &|v| rm(v, "f/x").unwrap()),
        ("rmdir", &|v| rmdir(v, "f").unwrap()),
        ("not covered", &|v| link_to(v, "fresh", "F")),
        ("again", &|v| link_to(v, "b", "again")),
        ("dir again", &|v| _ = v.dir("f")),
        ("link there", &|v| link_to(v, "f/x", "there")),
        ("maintain", &|v| v.maintain().unwrap()),
        ("sync!", &sync),
    ]
}

#[test]
fn after_a_crash_at_any_step_every_name_is_old_or_new_and_nothing_is_missing() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let run = run(recipe, &names_steps());
        let states = run.survive(true);
        assert!(states > 400, "{states} states");
    }
}

#[test]
fn chains_of_renames_are_put_right_together() {
    let steps: Vec<Step<'_>> = vec![
        ("", &|v| link_to(v, "a", "A")),
        ("", &|v| link_to(v, "b", "B")),
        ("", &|v| link_to(v, "c", "C")),
        ("", &|v| _ = v.dir("d")),
        ("", &|v| _ = v.dir("d/e")),
        ("", &|v| link_to(v, "d/e/in", "in")),
        ("sync!", &sync),
        ("", &|v| mv(v, "c", "t", RenameMode::Replace).unwrap()),
        ("", &|v| mv(v, "b", "c", RenameMode::Replace).unwrap()),
        ("", &|v| mv(v, "a", "b", RenameMode::Replace).unwrap()),
        ("", &|v| mv(v, "t", "a", RenameMode::Replace).unwrap()),
        ("", &|v| mv(v, "d/e", "e", RenameMode::Replace).unwrap()),
        ("", &|v| mv(v, "d", "e/d", RenameMode::Replace).unwrap()),
        ("", &|v| mv(v, "e/in", "e/d/in", RenameMode::Replace).unwrap()),
        ("", &|v| mv(v, "a", "b", RenameMode::Exchange).unwrap()),
        ("", &|v| rm(v, "e/d/in").unwrap()),
        ("", &|v| rmdir(v, "e/d").unwrap()),
        ("", &|v| rmdir(v, "e").unwrap()),
        ("sync!", &sync),
    ];
    for recipe in [Recipe::default(), Recipe::plain()] {
        let run = run(recipe, &steps);
        let states = run.survive(true);
        assert!(states > 200, "{states} states");
        let states = run.survive_twice();
        assert!(states > 150, "{states} states");
    }
}

#[test]
fn a_long_name_can_be_read_after_a_crash() {
    let steps: Vec<Step<'_>> = vec![
        ("", &|v| link_to(v, "a", "A")),
        ("", &|v| link_to(v, "far", &"t".repeat(2000))),
        ("", &|v| _ = v.dir("d")),
        ("sync!", &sync),
        ("", &|v| mv(v, "a", LONG, RenameMode::Replace).unwrap()),
        ("", &|v| mv(v, "far", "d/far", RenameMode::Replace).unwrap()),
        ("", &|v| mv(v, LONG, &format!("d/{LONG}"), RenameMode::Replace).unwrap()),
        ("sync!", &sync),
    ];
    // Behind the first sync.
    let mut run = run(Recipe::default(), &steps);
    run.states.drain(..4);
    run.states[0].0 += 1;
    run.always = vec!["A".to_owned(), "t".repeat(2000)];
    run.survive(true);
}

#[test]
fn modes_are_old_or_new_after_a_crash() {
    let steps: Vec<Step<'_>> = vec![
        ("", &|v| _ = v.new_file("f")),
        ("", &|v| _ = v.dir("d")),
        ("sync!", &sync),
        ("", &|v| {
            v.setattr(v.ino("f"), None, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
        }),
        ("", &|v| {
            v.setattr(v.ino("d"), None, &SetAttr { mode: Some(0o700), ..SetAttr::default() }).unwrap();
        }),
        ("sync!", &sync),
    ];
    for recipe in [Recipe::default(), Recipe::plain()] {
        run(recipe, &steps).survive(true);
    }
}

fn fsync_steps() -> Vec<Step<'static>> {
    vec![
        ("", &|v| _ = v.dir("d")),
        ("", &|v| _ = v.dir("d/e")),
        ("", &|v| _ = v.new_file("d/e/f")),
        ("", &|v| _ = v.new_file("d/other")),
        ("ack d/e/f", &|v| fsync(v, "d/e/f")),
        ("", &|v| _ = v.link(v.ino("d/other"), ROOT, n("second")).unwrap()),
        ("ack d/other", &|v| fsync(v, "d/other")),
        ("ack second", &|_| {}),
        ("", &|v| _ = v.new_file("d/g")),
        ("", &|v| mv(v, "d/g", "d/e/h", RenameMode::NoReplace).unwrap()),
        ("ack d/e/h", &|v| fsync(v, "d/e/h")),
        ("", &|v| link_to(v, "d/e/link", "L")),
        ("", &|v| rm(v, "d/e/f").unwrap()),
        ("ack d/e/link", &|v| fsync_dir(v, "d/e")),
        ("ack d/e/f", &|_| {}),
        ("", &|v| rm(v, "second").unwrap()),
        ("ack second", &|v| fsync_dir(v, "")),
        ("", &|v| mv(v, "d", "moved", RenameMode::Replace).unwrap()),
        ("", &|v| _ = v.new_file("moved/last")),
        ("ack moved/last", &|v| fsync(v, "moved/last")),
        ("", &|v| mv(v, "moved/last", "moved/final", RenameMode::Replace).unwrap()),
        ("", &|v| {
            let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
            v.setattr(v.ino("moved/other"), None, &set).unwrap();
        }),
        ("ack moved/other", &|v| fsync(v, "moved/other")),
        ("ack moved/final", &|_| {}),
        ("", &|v| link_to(v, "end", "E")),
    ]
}

#[test]
fn what_an_fsync_covered_is_there_after_a_crash() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let states = run(recipe, &fsync_steps()).survive(true);
        assert!(states > 200, "{states} states");
    }
}

/// Numbers that are the same every time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn path(&mut self) -> String {
        let name = |n: u64| ["a", "b", "c"][n as usize];
        let first = name(self.roll(3));
        if self.roll(3) == 0 { first.to_owned() } else { format!("{first}/{}", name(self.roll(3))) }
    }
}

type NamedStep = (String, Box<dyn Fn(&Vault)>);

fn random_step(dice: &mut Dice, number: u64) -> NamedStep {
    let (one, other) = (dice.path(), dice.path());
    let kind = dice.roll(24);
    let mode = [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange][dice.roll(3) as usize];
    let name = match kind {
        14 => format!("sync {number}!"),
        22 => format!("fsync {one}"),
        _ => format!("{number}: {kind} {one} {other} {mode:?}"),
    };
    let step = move |v: &Vault| {
        match kind {
            14 => return v.sync_all().unwrap(),
            15 => return v.maintain().unwrap(),
            _ => {}
        }
        let Some((dir, name)) = in_dir(v, &one) else { return };
        match kind {
            0..3 => tried(v.symlink(dir, n(name), format!("T{number}").as_bytes(), me()).map(drop_entry)),
            3..5 => tried(v.mkdir(dir, n(name), 0o755, me()).map(drop_entry)),
            5..7 => tried(v.unlink(dir, n(name))),
            7 => tried(v.rmdir(dir, n(name))),
            8..12 => {
                let Some((to, to_name)) = in_dir(v, &other) else { return };
                tried(v.rename(dir, n(name), to, n(to_name), mode));
            }
            12 => {
                let (Ok(entry), Some((to, to_name))) = (v.find(&one), in_dir(v, &other)) else { return };
                tried(v.link(entry.attr.ino, to, n(to_name)).map(drop_entry));
            }
            16..18 => {
                let Ok((_, handle)) = v.create(dir, n(name), 0o644, RW, me()) else { return };
                write(v, handle, number);
            }
            18..24 => {
                let Some(file) = v.find(&one).ok().filter(|entry| entry.attr.kind == Kind::File) else { return };
                let ino = file.attr.ino;
                match kind {
                    21 => tried(v.set_xattr(ino, n("user.n"), &number.to_le_bytes(), SetXattr::Any)),
                    22 => fsync(v, &one),
                    _ => write(v, v.open_file(ino, RW).unwrap(), number),
                }
            }
            _ => {
                let handle = v.open_dir(dir).unwrap();
                v.fsync_dir(handle).unwrap();
                v.release_dir(handle).unwrap();
            }
        }
    };
    (name, Box::new(step))
}

/// Writes a version of a file's content, which ends at another place each time.
fn write(v: &Vault, handle: HandleId, version: u64) {
    v.write(handle, version % 3 * 700_000 + 8, b"end").unwrap();
    v.write(handle, 0, &version.to_le_bytes()).unwrap();
    v.flush(handle).unwrap();
    v.release(handle).unwrap();
}

fn drop_entry(_: Entry) {}

#[test]
fn so_it_is_after_any_steps() {
    let scale = std::env::var("LAMASSU_MODEL_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1);
    let mut states = 0;
    for seed in 0..40 * scale {
        let mut dice = Dice(seed);
        let steps: Vec<_> = (0..24).map(|number| random_step(&mut dice, number)).collect();
        let _seed = Told(format!("seed {seed}: {:#?}", steps.iter().map(|(name, _)| name).collect::<Vec<_>>()));
        let steps: Vec<Step<'_>> = steps.iter().map(|(name, step)| (&**name, &**step)).collect();
        let recipe = match seed % 3 {
            1 => Recipe { block_size: 16384, codec: Some(Codec::Lz4), ..Recipe::default() },
            _ => Recipe::default(),
        };
        // With plain names a directory in which nothing is recorded is as good as another.
        states += run(recipe, &steps).survive(seed % 2 == 0) as u64;
    }
    println!("so_it_is_after_any_steps: {states} states after crashes of a vault");
    assert!(states >= 4_000 * scale, "{states}");
}

/// A crash between a rename and the end of its intent leaves nothing unverified where the store had carried it out.
#[test]
fn after_a_crash_a_check_verifies_what_was_moved() {
    let store = Arc::new(MemoryBackend::new());
    let (lab, v) = Lab::over(Recipe::plain(), store.clone(), Arc::new(MemoryTable::default()));
    for name in ["a", "b"] {
        let handle = v.new_file(name).1;
        v.write(handle, 0, name.as_bytes()).unwrap();
        v.release(handle).unwrap();
    }
    v.sync_all().unwrap();
    mv(&v, "a", "b", RenameMode::Replace).unwrap();
    std::mem::forget(v);
    assert!(lab.intents() > 0);
    let problems = |change: &dyn Fn(&dyn BackendDir)| {
        let lab = Lab { backend: Arc::new(store.snapshot()), recipe: lab.recipe, table: lab.table.clone() };
        change(&*lab.backend.root());
        let report = lab.read_only().check(&[], false, &Quiet).unwrap();
        report.problems.into_iter().filter(|problem| !problem.harmless).map(|problem| problem.kind).collect::<Vec<_>>()
    };
    assert_eq!(problems(&|_| {}), Vec::<String>::new());
    assert_eq!(problems(&|root| root.unlink(n("b")).unwrap()), ["missing"]);
    assert_eq!(problems(&|root| root.open_file(n("b"), true).unwrap().write_at(100, b"x").unwrap()), ["page-seal"]);
}
