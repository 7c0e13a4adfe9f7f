//! Names, types, modes and owners of an anchored vault (`docs/freshness.md`, sections 2, 4 and 5): whatever the store
//! does with them, what is served is the newest state, or an error that says so, and the rest stays readable.
#![allow(clippy::unwrap_used)] // a helper of a test may panic, too

mod common;

use common::*;
use lamassu_anchor::AnchorError;
use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
use lamassu_store::backend::{ByName, CrashBackend, CrashSim, MemoryBackend};
use lamassu_store::{Backend, BackendDir};
use lamassu_vault::*;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

/// An anchored vault, its store and its anchor.
struct Lab {
    recipe: Recipe,
    backend: Arc<dyn Backend>,
    table: Arc<dyn Table>,
}

impl Lab {
    fn over(recipe: Recipe, backend: Arc<dyn Backend>, table: Arc<dyn Table>) -> (Lab, Vault) {
        Vault::make_tree(&*backend, &recipe.header(), &recipe.ring()).unwrap();
        let lab = Lab { recipe, backend, table };
        let vault = lab.open();
        (lab, vault)
    }

    fn new(recipe: Recipe) -> (Lab, Vault) {
        Lab::over(recipe, memory(), Arc::new(MemoryTable::default()))
    }

    fn open(&self) -> Vault {
        open_anchored(&self.recipe, &self.backend, &self.table, false).unwrap()
    }

    fn read_only(&self) -> Vault {
        open_anchored(&self.recipe, &self.backend, &self.table, true).unwrap()
    }

    /// The store's directory and the stored name of a path.
    fn stored(&self, vault: &Vault, path: &str) -> (Arc<dyn BackendDir>, OsString) {
        let stored = vault.stored_path(n(path)).unwrap();
        let mut dir = self.backend.root();
        for part in stored.parent().unwrap() {
            dir = dir.open_dir(part).unwrap();
        }
        (dir, stored.file_name().unwrap().to_owned())
    }

    fn intents(&self) -> usize {
        let mut count = 0;
        self.table
            .scan(Space::Intents, &[], &mut |_, _| {
                count += 1;
                std::ops::ControlFlow::Continue(())
            })
            .unwrap();
        count
    }
}

fn both(test: impl Fn(Lab, Vault)) {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let (lab, vault) = Lab::new(recipe);
        test(lab, vault);
    }
}

fn assert_outdated<T: std::fmt::Debug>(seen: Result<T>) {
    assert!(matches!(seen, Err(VaultError::Outdated { .. })), "{seen:?}");
}

fn link_to(vault: &Vault, path: &str, target: &str) {
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    vault.symlink(vault.ino(parent), n(name), target.as_bytes(), me()).unwrap();
}

fn mv(vault: &Vault, from: &str, to: &str, mode: RenameMode) -> Result<()> {
    let split = |path: &'static str| path.rsplit_once('/').unwrap_or(("", path));
    let (from, to): (&'static str, &'static str) = (from.to_owned().leak(), to.to_owned().leak());
    let ((a, b), (c, d)) = (split(from), split(to));
    vault.rename(vault.ino(a), n(b), vault.ino(c), n(d), mode)
}

fn rm(vault: &Vault, path: &str) -> Result<()> {
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    vault.unlink(vault.ino(parent), n(name))
}

fn rmdir(vault: &Vault, path: &str) -> Result<()> {
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    vault.rmdir(vault.ino(parent), n(name))
}

/// The names in a directory, and whether the store lacks some.
fn listed(vault: &Vault, path: &str) -> (Vec<String>, bool) {
    let handle = vault.open_dir(vault.ino(path)).unwrap();
    let mut names = Vec::new();
    let done = vault.read_dir(handle, 0, &mut |e, _| {
        names.push(e.name.to_str().unwrap().to_owned());
        true
    });
    vault.release_dir(handle).unwrap();
    names.retain(|name| name != "." && name != "..");
    names.sort();
    assert!(matches!(done, Ok(()) | Err(VaultError::Outdated { .. })), "{done:?}");
    (names, done.is_err())
}

/// What is seen below a directory: every path with what it is.
fn seen(vault: &Vault) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let mut left = vec![String::new()];
    while let Some(dir) = left.pop() {
        let (names, is_incomplete) = listed(vault, &dir);
        assert!(!is_incomplete, "{dir}: something is missing");
        for name in names {
            let path = if dir.is_empty() { name } else { format!("{dir}/{name}") };
            let attr = vault.find(&path).unwrap_or_else(|e| panic!("{path}: {e}")).attr;
            let what = match attr.kind {
                Kind::Symlink => String::from_utf8(vault.readlink(attr.ino).unwrap()).unwrap(),
                kind => format!("{kind:?} {:o}", attr.mode),
            };
            if attr.kind == Kind::Dir {
                left.push(path.clone());
            }
            vault.forget(attr.ino, 1);
            all.insert(path, what);
        }
    }
    all
}

/// The same by directory, whatever its path: a name and what it leads to are old or new each for itself.
type Entries = BTreeMap<(Ino, String), String>;

/// What is in each directory that can be reached, and which these are.
fn entries(vault: &Vault) -> (Entries, BTreeSet<Ino>) {
    let (mut all, mut dirs) = (Entries::new(), BTreeSet::from([ROOT]));
    for (path, what) in seen(vault) {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", &path));
        let attr = vault.find(&path).unwrap().attr;
        let what = if attr.kind == Kind::Dir { format!("{what} {}", attr.ino) } else { what };
        if attr.kind == Kind::Dir {
            dirs.insert(attr.ino);
        }
        all.insert((vault.ino(parent), name.to_owned()), what);
    }
    (all, dirs)
}

const LONG: &str = "a name that is so long that its sealed form is longer than what a store takes, and so has a companion beside \
                    it, which has to be where the entry is, whatever becomes of the entry: 0123456789012345678901234567890123";

#[test]
fn what_was_done_is_there_after_the_vault_was_closed() {
    both(|lab, v| {
        let name = if lab.recipe.names == lamassu_format::header::NameMode::Plain { "long" } else { LONG };
        v.dir("d");
        v.dir("d/e");
        v.dir("gone");
        v.new_file("d/f");
        v.new_file(&format!("d/{name}"));
        link_to(&v, "link", "target");
        link_to(&v, "far", &"t".repeat(2000));
        v.mknod(ROOT, n("fifo"), Kind::Fifo, 0o640, 0, me()).unwrap();
        v.link(v.ino("d/f"), ROOT, n("also")).unwrap();
        v.sync_all().unwrap();
        mv(&v, "d/e", "moved", RenameMode::Replace).unwrap();
        mv(&v, "far", "d/far", RenameMode::NoReplace).unwrap();
        mv(&v, "link", "fifo", RenameMode::Exchange).unwrap();
        rmdir(&v, "gone").unwrap();
        rm(&v, "d/f").unwrap();
        v.new_file("d/f");
        let set = SetAttr { mode: Some(0o4711), ..SetAttr::default() };
        v.setattr(v.ino("also"), None, &set).unwrap();
        let before = seen(&v);
        v.close().unwrap();
        assert_eq!(lab.intents(), 0);
        for v in [lab.read_only(), lab.open()] {
            assert_eq!(seen(&v), before);
            assert_eq!(v.find("also").unwrap().attr.mode, 0o4711);
            assert_eq!(v.find("also").unwrap().attr.nlink, 1);
            assert_eq!(v.readlink(v.ino("d/far")).unwrap(), "t".repeat(2000).as_bytes());
        }
    });
}

#[test]
fn an_entry_that_the_store_lost_is_an_error_and_the_rest_is_readable() {
    both(|lab, v| {
        v.new_file("a");
        v.new_file("b");
        v.close().unwrap();
        let v = lab.open();
        let (dir, a) = lab.stored(&v, "a");
        let ino = v.ino("a");
        dir.unlink(&a).unwrap();
        assert_outdated(v.find("a"));
        assert_outdated(v.getattr(ino, None));
        assert_outdated(v.open_file(ino, RO));
        assert_eq!(listed(&v, ""), (vec!["b".to_owned()], true));
        assert_outdated(v.create(ROOT, n("a"), 0o600, RW, me()));
        assert_outdated(rm(&v, "a"));
        assert_outdated(mv(&v, "a", "c", RenameMode::Replace));
        assert_outdated(mv(&v, "b", "a", RenameMode::Replace));
        v.find("b").unwrap();
        assert_outdated(lab.read_only().find("a"));
    });
}

#[test]
fn what_was_removed_does_not_come_back() {
    both(|lab, v| {
        v.new_file("a");
        v.dir("d");
        v.new_file("d/x");
        v.close().unwrap();
        let v = lab.open();
        let (root, a) = lab.stored(&v, "a");
        let (_, d) = lab.stored(&v, "d");
        let keep = |name: &OsStr, to: &str| root.rename(name, &*root, n(to), RenameMode::NoReplace).unwrap();
        let back = |name: &OsStr, from: &str| root.rename(n(from), &*root, name, RenameMode::NoReplace).unwrap();
        root.link(&a, &*root, n("kept.a")).unwrap();
        rm(&v, "a").unwrap();
        rm(&v, "d/x").unwrap();
        v.sync_all().unwrap();
        keep(&d, "kept.d");
        assert_outdated(v.find("d"));
        back(&d, "kept.d");
        rmdir(&v, "d").unwrap();
        v.close().unwrap();
        back(&a, "kept.a");
        root.make_dir(&d, 0o700).unwrap();
        for v in [lab.read_only(), lab.open()] {
            assert!(matches!(v.find("a"), Err(VaultError::NotFound)));
            assert!(matches!(v.find("d"), Err(VaultError::NotFound)));
            assert_eq!(listed(&v, ""), (vec![], false));
        }
        // What is made there goes over nothing that the store made up.
        let v = lab.open();
        v.new_file("a");
        v.dir("d");
        assert_eq!(v.list(""), ["a", "d"]);
        assert_eq!(root.open_dir(n("lamassu.lost")).unwrap().read_dir().unwrap().len(), 2);
    });
}

#[test]
fn entries_that_were_exchanged_are_found() {
    both(|lab, v| {
        v.new_file("a");
        v.new_file("b");
        v.dir("d");
        v.dir("e");
        v.dir("d/in");
        v.new_file("d/in/f");
        v.close().unwrap();
        let v = lab.open();
        let held: Vec<_> = ["a", "b", "d", "e", "d/in", "d/in/f"].map(|path| (path, v.ino(path))).to_vec();
        let (root, a) = lab.stored(&v, "a");
        let exchange = |one: &OsStr, other: &OsStr| root.rename(one, &*root, other, RenameMode::Exchange).unwrap();
        let (b, d, e) = (lab.stored(&v, "b").1, lab.stored(&v, "d").1, lab.stored(&v, "e").1);
        exchange(&a, &b);
        exchange(&d, &e);
        for path in ["a", "b", "d", "e"] {
            assert_outdated(v.find(path));
        }
        for (path, ino) in &held[..2] {
            assert_outdated(v.getattr(*ino, None).map(|_| path));
        }
        exchange(&a, &b);
        exchange(&d, &e);
        for (path, ino) in held {
            assert_eq!(v.ino(path), ino);
        }
        // Another kind.
        exchange(&a, &d);
        assert_outdated(v.find("a"));
        assert_outdated(v.find("d"));
        assert_outdated(lab.read_only().find("d/in/f"));
        v.find("e").unwrap();
    });
}

#[test]
fn an_entry_brought_from_elsewhere_leads_to_nothing() {
    both(|lab, v| {
        v.dir("d");
        v.dir("e");
        v.new_file("d/x");
        v.new_file("y");
        v.close().unwrap();
        let v = lab.open();
        let (d, x) = lab.stored(&v, "d/x");
        let (root, e) = lab.stored(&v, "e");
        let e = root.open_dir(&e).unwrap();
        d.link(&x, &*e, &x).unwrap();
        assert_eq!(listed(&v, "e"), (vec![], false));
        assert!(matches!(v.find("e/x"), Err(VaultError::NotFound)));
        rmdir(&v, "e").unwrap();
        v.sync_all().unwrap();
        v.find("d/x").unwrap();
    });
}

#[test]
fn a_hard_link_stays_with_its_file() {
    both(|lab, v| {
        v.new_file("a");
        v.link(v.ino("a"), ROOT, n("b")).unwrap();
        v.new_file("c");
        v.close().unwrap();
        let v = lab.open();
        let (root, b) = lab.stored(&v, "b");
        let c = lab.stored(&v, "c").1;
        let a = v.find("a").unwrap();
        let handle = v.open_file(a.attr.ino, RW).unwrap();
        root.rename(&b, &*root, &c, RenameMode::Exchange).unwrap();
        assert_outdated(v.find("b"));
        assert_outdated(v.find("c"));
        assert_eq!(v.find("a").unwrap().attr.nlink, 2);
        v.release(handle).unwrap();
    });
}

#[test]
fn modes_and_owners_are_the_newest_and_the_store_is_mended() {
    both(|lab, v| {
        v.new_file("f");
        v.dir("d");
        v.mknod(ROOT, n("p"), Kind::Fifo, 0o600, 0, me()).unwrap();
        v.setattr(v.ino("f"), None, &SetAttr { mode: Some(0o640), uid: Some(7), ..SetAttr::default() }).unwrap();
        v.close().unwrap();
        let reader = lab.read_only();
        let v = lab.open();
        let (root, f) = lab.stored(&v, "f");
        let d = lab.stored(&v, "d").1;
        let p = lab.stored(&v, "p").1;
        root.set_mode_entry(&f, 0o4777).unwrap();
        root.set_owner_entry(&f, Some(8), None).unwrap();
        root.set_mode_entry(&d, 0o777).unwrap();
        root.set_owner_entry(&p, None, Some(99)).unwrap();
        for v in [&reader, &v] {
            let attr = v.find("f").unwrap().attr;
            assert_eq!((attr.mode, attr.uid), (0o640, 7));
            assert_eq!(v.find("d").unwrap().attr.mode, 0o755);
            assert_eq!(v.find("p").unwrap().attr.gid, me().gid);
        }
        let st = root.stat_entry(&f).unwrap();
        assert_eq!((st.mode, st.uid), (0o640, 7));
        assert_eq!(root.stat_entry(&d).unwrap().mode, 0o755);
        assert_eq!(root.stat_entry(&p).unwrap().gid, me().gid);
        // Also of what is open, and of what is known by its number.
        let ino = v.ino("f");
        let handle = v.open_file(ino, RW).unwrap();
        root.set_mode_entry(&f, 0o777).unwrap();
        assert_eq!(v.getattr(ino, Some(handle)).unwrap().mode, 0o640);
        assert_eq!(v.getattr(v.ino("d"), None).unwrap().mode, 0o755);
        v.release(handle).unwrap();
    });
}

#[test]
fn a_file_that_is_removed_stays_usable_and_leaves_the_store_after_the_anchor_knows() {
    both(|lab, v| {
        let (_, handle) = v.new_file("f");
        v.write(handle, 0, b"content").unwrap();
        v.sync_all().unwrap();
        let (root, f) = lab.stored(&v, "f");
        rm(&v, "f").unwrap();
        assert!(matches!(v.find("f"), Err(VaultError::NotFound)));
        assert_eq!(v.list(""), [""; 0]);
        root.stat_entry(&f).expect("the store has it until the anchor knows");
        let mut data = [0; 7];
        v.read(handle, 0, &mut data).unwrap();
        assert_eq!(&data, b"content");
        assert_eq!(v.getattr(2, Some(handle)).unwrap().nlink, 0);
        // The name may be used at once.
        let (_, again) = v.new_file("f");
        v.write(again, 0, b"new").unwrap();
        v.release(again).unwrap();
        assert_eq!(v.get("f"), b"new");
        v.release(handle).unwrap();
        v.close().unwrap();
        assert_eq!(lab.intents(), 0);
    });
}

/// A table that fails now and then.
struct Failing {
    table: MemoryTable,
}

impl Table for Failing {
    fn get(&self, space: Space, key: &[u8]) -> std::result::Result<Option<Vec<u8>>, AnchorError> {
        self.table.get(space, key)
    }
    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> std::result::Result<(), AnchorError> {
        self.table.scan(space, prefix, visit)
    }
    fn commit(&self, changes: &[Change]) -> std::result::Result<(), AnchorError> {
        self.table.commit(changes)
    }
}

#[test]
fn an_anchor_that_fails_for_a_while_loses_nothing() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let table = Arc::new(Failing { table: MemoryTable::default() });
        let (lab, v) = Lab::over(recipe, memory(), table.clone());
        v.new_file("old");
        v.new_file("other");
        v.dir("d");
        v.sync_all().unwrap();
        table.table.refuse(Some(libc::ENOSPC));
        let (entry, handle) = v.new_file("new");
        assert!(matches!(v.fsync(handle, false), Err(VaultError::Anchor(_))));
        assert!(matches!(mv(&v, "other", "moved", RenameMode::Replace), Err(VaultError::Anchor(_))));
        rm(&v, "old").unwrap();
        v.find("other").unwrap();
        assert!(v.sync_all().is_err());
        assert!(v.create(ROOT, n("old"), 0o600, RW, me()).is_err(), "what is going is in the way");
        let (_, old) = ("", v.list(""));
        assert_eq!(old, ["d", "new", "other"]);
        table.table.refuse(None);
        v.fsync(handle, false).unwrap();
        mv(&v, "other", "moved", RenameMode::Replace).unwrap();
        assert_eq!(v.find("new").unwrap().attr.ino, entry.attr.ino);
        v.release(handle).unwrap();
        let before = seen(&v);
        v.close().unwrap();
        assert_eq!(seen(&lab.open()), before);
    }
}

#[test]
fn an_older_record_of_sessions_begins_nothing() {
    both(|lab, v| {
        let sessions = lab.backend.root().open_dir(n("lamassu.sessions")).unwrap();
        let record = sessions.read_link(n("record")).unwrap();
        v.put("f", b"content");
        v.close().unwrap();
        sessions.unlink(n("record")).unwrap();
        sessions.make_symlink(n("record"), &record).unwrap();
        let v = lab.open();
        assert_outdated(v.verify_root());
        let handle = v.open_file(v.ino("f"), RW).unwrap();
        let written = v.write(handle, 0, b"x").map(drop).and_then(|()| v.flush(handle));
        assert!(written.is_err());
        let _ = v.release(handle);
    });
}

/// A table that remembers what it was at each position of the store.
struct Watched {
    table: MemoryTable,
    store: Arc<CrashBackend>,
    states: Mutex<Vec<(usize, MemoryTable)>>,
}

impl Table for Watched {
    fn get(&self, space: Space, key: &[u8]) -> std::result::Result<Option<Vec<u8>>, AnchorError> {
        self.table.get(space, key)
    }
    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> std::result::Result<(), AnchorError> {
        self.table.scan(space, prefix, visit)
    }
    fn commit(&self, changes: &[Change]) -> std::result::Result<(), AnchorError> {
        self.table.commit(changes)?;
        self.states.lock().push((self.store.position(), self.table.clone()));
        Ok(())
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
}

type Step<'a> = (&'a str, &'a dyn Fn(&Vault));

/// Takes steps. After each, what is seen may be seen after a crash, too; a step whose name ends with `!` acknowledges
/// all of it, and one that is called `ack` and a path that path.
fn run(recipe: Recipe, steps: &[Step<'_>]) -> Run {
    let crash = Arc::new(CrashBackend::new());
    let watched = Arc::new(Watched { table: MemoryTable::default(), store: crash.clone(), states: Mutex::default() });
    let (lab, v) = Lab::over(recipe, crash.clone(), watched.clone());
    v.sync_all().unwrap();
    let mut states = vec![(crash.position(), Allowed::new())];
    let mut allowed = Allowed::new();
    let mut before = BTreeMap::new();
    for (name, step) in steps {
        step(&v);
        let (now, _) = entries(&v);
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
    Run { crash, watched, lab, states }
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
        let sim = CrashSim::new(self.crash.log());
        let mut count = 0;
        let begin = self.states[0].0;
        for (at, left) in sim.prefixes().filter(|(at, _)| *at >= begin) {
            let allowed = self.allowed(at);
            for table in self.anchors(at) {
                let mut stores = vec![left.snapshot()];
                if lost {
                    stores.push(sim.at(at).least_state());
                    stores.extend((0..8).map(|seed| sim.at(at).random_state(seed)));
                }
                for store in stores {
                    self.check(store, table.clone(), &allowed, at);
                    count += 1;
                }
            }
        }
        count
    }

    /// The same, with another crash at every step of the recovery.
    fn survive_twice(&self) -> usize {
        let sim = CrashSim::new(self.crash.log());
        let mut count = 0;
        for (at, left) in sim.prefixes().filter(|(at, _)| *at >= self.states[0].0) {
            for table in self.anchors(at) {
                let crash = Arc::new(CrashBackend::over(&left, 4096));
                let watched = Watched { table, store: crash.clone(), states: Mutex::default() };
                watched.states.lock().push((0, watched.table.clone()));
                let watched = Arc::new(watched);
                let (backend, table): (Arc<dyn Backend>, Arc<dyn Table>) = (crash.clone(), watched.clone());
                std::mem::forget(open_anchored(&self.lab.recipe, &backend, &table, false).unwrap());
                let lab = Lab { recipe: self.lab.recipe, backend, table };
                let second = Run { crash, watched, lab, states: vec![(0, self.allowed(at))] };
                count += second.survive(false);
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

    fn check(&self, store: MemoryBackend, table: MemoryTable, allowed: &Allowed, at: usize) {
        let shadow = table.clone();
        let before = tree_of(&*store.root(), 0);
        let _before = Told(format!("before: {before}"));
        let (backend, table): (Arc<dyn Backend>, Arc<dyn Table>) = (Arc::new(store), Arc::new(table));
        let v = open_anchored(&self.lab.recipe, &backend, &table, false).unwrap();
        let intents = anchor(&self.lab.recipe, &(Arc::new(shadow) as Arc<dyn Table>)).intents().unwrap();
        let _told = Told(format!("record {at}, intents {intents:?}, {}", tree_of(&*backend.root(), 0)));
        let (now, dirs) = entries(&v);
        let reached = |path: &&(Ino, String)| dirs.contains(&path.0);
        for path in now.keys().chain(allowed.keys().filter(reached)) {
            let of = allowed.get(path).cloned().unwrap_or_default();
            let what = now.get(path).cloned();
            let is_allowed = of.contains(&what) || (of.is_empty() && what.is_none());
            assert!(is_allowed, "record {at}: {path:?} is {what:?}, not one of {of:?}");
        }
        v.close().unwrap();
        let v = open_anchored(&self.lab.recipe, &backend, &table, false).unwrap();
        assert_eq!(entries(&v).0, now, "record {at}: opened again");
        v.close().unwrap();
    }
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

fn fsync(v: &Vault, path: &str) {
    let handle = v.open_file(v.ino(path), RW).unwrap();
    v.fsync(handle, false).unwrap();
    v.release(handle).unwrap();
}

fn fsync_dir(v: &Vault, path: &str) {
    let handle = v.open_dir(v.ino(path)).unwrap();
    v.fsync_dir(handle).unwrap();
    v.release_dir(handle).unwrap();
}

#[test]
fn what_an_fsync_covered_is_there_after_a_crash() {
    let steps: Vec<Step<'_>> = vec![
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
    ];
    for recipe in [Recipe::default(), Recipe::plain()] {
        let states = run(recipe, &steps).survive(true);
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

/// What cannot be done is not; but nothing is ever stale.
fn tried(done: Result<()>) {
    if let Err(e @ (VaultError::Outdated { .. } | VaultError::Anchor(_) | VaultError::Io { .. } | VaultError::Stale)) =
        done
        && !matches!(&e, VaultError::Io { source, .. } if source.raw_os_error() == Some(libc::EPERM))
    {
        panic!("{e:?}");
    }
}

/// A directory and a name in it, if the directory is there.
fn in_dir<'a>(v: &Vault, path: &'a str) -> Option<(Ino, &'a str)> {
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    let parent = v.find(parent).ok().filter(|entry| entry.attr.kind == Kind::Dir)?;
    Some((parent.attr.ino, name))
}

fn random_step(dice: &mut Dice, number: u64) -> (String, Box<dyn Fn(&Vault)>) {
    let (one, other) = (dice.path(), dice.path());
    let kind = dice.roll(16);
    let mode = [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange][dice.roll(3) as usize];
    let name = match kind {
        14 => format!("sync {number}!"),
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
            _ => {
                let handle = v.open_dir(dir).unwrap();
                v.fsync_dir(handle).unwrap();
                v.release_dir(handle).unwrap();
            }
        }
    };
    (name, Box::new(step))
}

fn drop_entry(_: Entry) {}

#[test]
fn so_it_is_after_any_steps() {
    let scale = std::env::var("LAMASSU_MODEL_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1);
    for seed in 0..40 * scale {
        let mut dice = Dice(seed);
        let steps: Vec<_> = (0..24).map(|number| random_step(&mut dice, number)).collect();
        let _seed = Told(format!("seed {seed}: {:#?}", steps.iter().map(|(name, _)| name).collect::<Vec<_>>()));
        let steps: Vec<Step<'_>> = steps.iter().map(|(name, step)| (&**name, &**step)).collect();
        // With plain names a directory in which nothing is recorded is as good as another.
        run(Recipe::default(), &steps).survive(seed % 2 == 0);
    }
}
