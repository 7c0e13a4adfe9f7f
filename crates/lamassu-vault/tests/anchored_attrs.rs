//! Directory records, link targets, attributes, access lists and the root's permissions of an anchored vault
//! (`docs/freshness.md`, sections 2, 5 and 6): whatever an older or exchanged one is put back, it is told, and the rest
//! stays readable.
#![allow(clippy::unwrap_used)] // a helper of a test may panic, too

mod common;

use common::anchored::{anchor, open_anchored};
use common::*;
use lamassu_anchor::AnchorError;
use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
use lamassu_format::root::RootRecord;
use lamassu_store::backend::{CrashBackend, CrashSim, MemoryBackend};
use lamassu_store::{Backend, BackendDir};
use lamassu_vault::anchor::{NewTrees, RebuildProgress, Rebuilt, rebuild};
use lamassu_vault::*;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";

/// What is left out of an anchor that is made.
#[derive(Default)]
struct LeftOut(Mutex<Vec<String>>);

impl RebuildProgress for LeftOut {
    fn advance(&self, _: u64, _: u64) {}
    fn damaged(&self, stored: &Path, error: &VaultError) {
        self.0.lock().push(format!("{}: {error}", stored.display()));
    }
}

/// An anchored vault, its store and its anchor.
struct Lab {
    recipe: Recipe,
    backend: Arc<dyn Backend>,
    table: Arc<dyn Table>,
    outer: Vec<u8>,
}

fn rebuilt(recipe: &Recipe, backend: &Arc<dyn Backend>, table: &Arc<dyn Table>) -> (Rebuilt, Vec<String>) {
    let v = recipe.open_with(backend, &[1], &[1]);
    let left_out = LeftOut::default();
    let (_, done) = rebuild(&v, &recipe.header(), table.clone(), NewTrees::default(), &left_out).unwrap();
    v.close().unwrap();
    (done, left_out.0.into_inner())
}

impl Lab {
    fn over(recipe: Recipe, backend: Arc<dyn Backend>, table: Arc<dyn Table>) -> Lab {
        let ring = recipe.ring_of_epochs(&[1], &[1]);
        Vault::make_tree(&*backend, &recipe.header(), &ring).unwrap();
        let me = me();
        create_root_record(&*backend.root(), &ring, RootRecord { mode: 0o755, uid: me.uid, gid: me.gid }).unwrap();
        let (done, left_out) = rebuilt(&recipe, &backend, &table);
        assert_eq!((done.objects, done.damaged, left_out.len()), (1, 0, 0));
        Lab { recipe, backend, table, outer: vec![1] }
    }

    fn new(recipe: Recipe) -> Lab {
        Lab::over(recipe, memory(), Arc::new(MemoryTable::default()))
    }

    fn try_open(&self, read_only: bool) -> Result<Vault> {
        let options = Options { anchor: Some(anchor(&self.recipe, &self.table)), ..options(read_only) };
        let ring = self.recipe.ring_of_epochs(&[1], &self.outer);
        Vault::open(self.backend.clone(), &self.recipe.header(), ring, options)
    }

    fn open(&self) -> Vault {
        self.try_open(false).unwrap()
    }

    /// The store's directory and the stored name of a path.
    fn stored(&self, path: &str) -> (Arc<dyn BackendDir>, OsString) {
        let v = self.open();
        let stored = v.stored_path(n(path)).unwrap();
        v.close().unwrap();
        let mut dir = self.backend.root();
        for part in stored.parent().unwrap() {
            dir = dir.open_dir(part).unwrap();
        }
        (dir, stored.file_name().unwrap().to_owned())
    }

    fn stored_dir(&self, path: &str) -> Arc<dyn BackendDir> {
        let (dir, name) = self.stored(path);
        dir.open_dir(&name).unwrap()
    }

    /// Everything under the newest of another key.
    fn rekey(&mut self) {
        self.outer.insert(0, self.outer[0] + 1);
        let v = self.open();
        let done = v.rekey(Rekey::Outer, None, &Quiet).unwrap();
        assert!(done.complete && done.failed == 0, "{done:?}");
        v.close().unwrap();
    }

    /// What a check finds, as kinds.
    fn kinds(&self) -> BTreeSet<String> {
        let v = self.open();
        let report = v.check(&[], false, &Quiet).unwrap();
        // A repair accepts nothing.
        v.check(&[], true, &Quiet).unwrap();
        let again = v.check(&[], false, &Quiet).unwrap();
        v.close().unwrap();
        let of = |report: &check::Report| report.problems.iter().map(|p| p.kind.clone()).collect::<BTreeSet<_>>();
        assert_eq!(of(&again), of(&report), "after a repair");
        of(&report)
    }

    fn accept(&self, path: &str, recursive: bool) -> anchor::Accepted {
        let v = self.open();
        let done = v.accept(n(path), recursive).unwrap();
        v.close().unwrap();
        done
    }
}

impl RekeyProgress for Quiet {
    fn total(&self, _: u64) {}
    fn advance(&self, _: u64) {}
    fn failed(&self, _: &str, _: &VaultError) {}
    fn dataset(&self, _: &Path) -> Result<()> {
        Ok(())
    }
    fn is_cancelled(&self) -> bool {
        false
    }
}

fn kinds(all: &[&str]) -> BTreeSet<String> {
    all.iter().map(|kind| (*kind).to_owned()).collect()
}

fn assert_outdated<T: std::fmt::Debug>(seen: Result<T>) {
    assert!(matches!(seen, Err(VaultError::Outdated { .. })), "{seen:?}");
}

fn set(v: &Vault, path: &str, name: &str, value: &[u8]) {
    v.set_xattr(v.ino(path), n(name), value, SetXattr::Any).unwrap();
}

fn get(v: &Vault, path: &str, name: &str) -> Result<Vec<u8>> {
    v.get_xattr(v.find(path)?.attr.ino, n(name))
}

fn link_to(v: &Vault, path: &str, target: &[u8]) {
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    v.symlink(v.ino(parent), n(name), target, me()).unwrap();
}

/// An access list: for a user, besides what a mode says.
fn acl(user: u32, perm: u16) -> Vec<u8> {
    let entries = [(1, 7, u32::MAX), (2, perm, user), (4, 5, u32::MAX), (0x10, 7, u32::MAX), (0x20, 5, u32::MAX)];
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        bytes.extend(u16::to_le_bytes(tag));
        bytes.extend(u16::to_le_bytes(perm));
        bytes.extend(u32::to_le_bytes(id));
    }
    bytes
}

type Attrs = BTreeMap<OsString, Vec<u8>>;

fn attrs_of(dir: &Arc<dyn BackendDir>, name: &OsStr) -> Attrs {
    let held = dir.hold(name).unwrap();
    held.list_xattr().unwrap().into_iter().map(|attr| (attr.clone(), held.get_xattr(&attr).unwrap())).collect()
}

fn put_attrs(dir: &Arc<dyn BackendDir>, name: &OsStr, attrs: &Attrs) {
    let held = dir.hold(name).unwrap();
    held.list_xattr().unwrap().iter().for_each(|attr| held.remove_xattr(attr).unwrap());
    attrs.iter().for_each(|(attr, value)| held.set_xattr(attr, value, 0).unwrap());
}

fn text_of(dir: &Arc<dyn BackendDir>, name: &OsStr) -> OsString {
    dir.read_link(name).unwrap()
}

fn put_text(dir: &Arc<dyn BackendDir>, name: &OsStr, text: &OsStr) {
    dir.unlink(name).unwrap();
    dir.make_symlink(name, text).unwrap();
}

const RECORD: &str = "lamassu.dir";

#[test]
fn an_older_record_another_ones_and_none_are_told_at_the_first_look_into_the_directory() {
    let mut lab = Lab::new(Recipe::default());
    let v = lab.open();
    for dir in ["a", "b"] {
        v.dir(dir);
        v.put(&format!("{dir}/f"), dir.as_bytes());
    }
    v.close().unwrap();
    let (a, b) = (lab.stored_dir("a"), lab.stored_dir("b"));
    let older = text_of(&a, n(RECORD));
    lab.rekey();
    let newest = text_of(&a, n(RECORD));
    assert_ne!(older, newest);
    let others = text_of(&b, n(RECORD));
    let look = |lab: &Lab| {
        let v = lab.open();
        assert_outdated(v.find("a/f"));
        assert_outdated(v.open_dir(v.ino("a")));
        assert_outdated(v.mkdir(v.ino("a"), n("new"), 0o700, me()));
        assert_eq!(v.get("b/f"), b"b");
        v.close().unwrap();
        assert_eq!(lab.kinds(), kinds(&["stale"]));
    };
    for stale in [&older, &others] {
        put_text(&a, n(RECORD), stale);
        look(&lab);
    }
    a.unlink(n(RECORD)).unwrap();
    look(&lab);
    a.make_symlink(n(RECORD), &newest).unwrap();
    assert_eq!(lab.kinds(), kinds(&[]));
    // A person may take the older one.
    put_text(&a, n(RECORD), &older);
    let done = lab.accept("a", false);
    assert_eq!((done.changed, done.added, done.removed), (1, 0, 0));
    let v = lab.open();
    assert_eq!((v.get("a/f"), v.get("b/f")), (b"a".to_vec(), b"b".to_vec()));
    v.clean();
    v.close().unwrap();
}

#[test]
fn link_targets_are_the_newest_or_stale() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let mut lab = Lab::new(recipe);
        let long = vec![b't'; 3000];
        let v = lab.open();
        link_to(&v, "short", b"target");
        link_to(&v, "other", b"tarGet");
        link_to(&v, "long", &long);
        v.link(v.ino("short"), v.ino(""), n("twin")).unwrap();
        v.close().unwrap();
        let places: Vec<_> = ["short", "other", "long"].iter().map(|path| lab.stored(path)).collect();
        let older: Vec<_> = places.iter().map(|(dir, name)| text_of(dir, name)).collect();
        lab.rekey();
        let read = |v: &Vault, path: &str| v.readlink(v.find(path)?.attr.ino);
        let v = lab.open();
        assert_eq!((read(&v, "short").unwrap(), read(&v, "long").unwrap()), (b"target".to_vec(), long.clone()));
        assert_eq!((v.find("long").unwrap().attr.size, v.find("twin").unwrap().attr.size), (3000, 6));
        v.close().unwrap();
        for at in [0, 2] {
            let (dir, name) = &places[at];
            let newest = text_of(dir, name);
            for stale in [&older[at], &older[1]] {
                put_text(dir, name, stale);
                let v = lab.open();
                assert_outdated(read(&v, ["short", "other", "long"][at]));
                assert_eq!(read(&v, "other").unwrap(), b"tarGet");
                v.close().unwrap();
                assert!(lab.kinds().contains("stale"));
            }
            put_text(dir, name, &newest);
        }
        // An exchange by names is one of targets.
        let (dir, name) = &places[0];
        let (_, other) = &places[1];
        dir.rename(name, &**dir, other, RenameMode::Exchange).unwrap();
        let v = lab.open();
        assert_outdated(read(&v, "short"));
        assert_outdated(read(&v, "other"));
        v.close().unwrap();
        let done = lab.accept("short", false);
        assert_eq!(done.changed, 1);
        let v = lab.open();
        assert_eq!(read(&v, "short").unwrap(), b"tarGet");
        assert_outdated(read(&v, "other"));
        v.close().unwrap();
    }
}

#[test]
fn attributes_and_access_lists_are_the_newest_or_stale() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let lab = Lab::new(recipe);
        let v = lab.open();
        v.put("f", b"1");
        v.put("g", b"2");
        v.dir("d");
        for path in ["f", "g", "d"] {
            set(&v, path, "user.a", b"one");
            set(&v, path, ACCESS, &acl(1000, 7));
        }
        set(&v, "d", DEFAULT, &acl(1001, 7));
        v.dir("d/inherits");
        v.put("d/f", b"inherits");
        v.close().unwrap();
        let paths = ["f", "g", "d", "d/inherits", "d/f"];
        let places: BTreeMap<_, _> = paths.iter().map(|path| (*path, lab.stored(path))).collect();
        let shown = |path: &str| attrs_of(&places[path].0, &places[path].1);
        let older: BTreeMap<_, _> = paths.iter().map(|path| (*path, shown(path))).collect();
        let v = lab.open();
        for path in ["f", "d"] {
            set(&v, path, "user.a", b"two");
            set(&v, path, ACCESS, &acl(1000, 4));
        }
        v.set_xattr(v.ino("d"), n(DEFAULT), &acl(1001, 4), SetXattr::Replace).unwrap();
        v.set_xattr(v.ino("d/f"), n("user.b"), b"", SetXattr::Create).unwrap();
        v.remove_xattr(v.ino("d/inherits"), n(ACCESS)).unwrap();
        v.close().unwrap();
        let newest: BTreeMap<_, _> = paths.iter().map(|path| (*path, shown(path))).collect();
        let look = |path: &str| {
            let v = lab.open();
            let ino = v.ino(path);
            assert_outdated(v.get_xattr(ino, n("user.a")));
            assert_outdated(v.get_xattr(ino, n(ACCESS)));
            assert_outdated(v.list_xattr(ino));
            assert_outdated(v.set_xattr(ino, n("user.a"), b"x", SetXattr::Any));
            assert_outdated(v.remove_xattr(ino, n(ACCESS)));
            assert_eq!(get(&v, "g", "user.a").unwrap(), b"one");
            if path == "d" {
                assert_outdated(v.create(ino, n("new"), 0o644, RW, me()));
                assert_outdated(v.may_add(ino, 1001, &|_| false));
            }
            v.close().unwrap();
            assert_eq!(lab.kinds(), kinds(&["stale"]), "{path}");
        };
        let cases = |path: &'static str| {
            let gone: Attrs = newest[path].clone().into_iter().skip(1).collect();
            [older[path].clone(), gone, Attrs::new(), older["g"].clone()]
        };
        for path in ["f", "d", "d/inherits", "d/f"] {
            let (dir, name) = &places[path];
            for stale in cases(path).into_iter().filter(|stale| *stale != newest[path]) {
                put_attrs(dir, name, &stale);
                look(path);
            }
            put_attrs(dir, name, &newest[path]);
            assert_eq!(lab.kinds(), kinds(&[]), "{path}");
        }
        let v = lab.open();
        assert_eq!(get(&v, "f", "user.a").unwrap(), b"two");
        assert_eq!(get(&v, "d/f", "user.b").unwrap(), b"");
        v.close().unwrap();
        put_attrs(&places["f"].0, &places["f"].1, &older["f"]);
        assert_eq!(lab.accept("f", false).changed, 1);
        let v = lab.open();
        assert_eq!(get(&v, "f", "user.a").unwrap(), b"one");
        v.clean();
        v.close().unwrap();
    }
}

#[test]
fn where_nothing_was_set_nothing_is_taken() {
    let lab = Lab::new(Recipe::default());
    let v = lab.open();
    v.put("f", b"1");
    v.put("g", b"2");
    set(&v, "g", "user.a", b"of another");
    v.close().unwrap();
    let ((dir, f), (_, g)) = (lab.stored("f"), lab.stored("g"));
    put_attrs(&dir, &f, &attrs_of(&dir, &g));
    let v = lab.open();
    assert_outdated(get(&v, "f", "user.a"));
    assert_eq!((v.get("f"), get(&v, "g", "user.a").unwrap()), (b"1".to_vec(), b"of another".to_vec()));
    v.close().unwrap();
    // The root's, too.
    let v = lab.open();
    set(&v, "", "user.a", b"one");
    v.close().unwrap();
    let root = lab.backend.root();
    let attr = root.list_xattr().unwrap().into_iter().next().unwrap();
    root.remove_xattr(&attr).unwrap();
    let v = lab.open();
    assert_outdated(get(&v, "", "user.a"));
    v.close().unwrap();
}

#[test]
fn the_roots_permissions_are_the_newest_or_the_stricter_ones() {
    let lab = Lab::new(Recipe::default());
    let root = lab.backend.root();
    let record = n("lamassu.root");
    let older = text_of(&root, record);
    let v = lab.open();
    v.verify_root_permissions().unwrap();
    let chmod = |v: &Vault, mode| v.setattr(ROOT, None, &SetAttr { mode: Some(mode), ..SetAttr::default() });
    assert_eq!(chmod(&v, 0o711).unwrap().mode, 0o711);
    v.close().unwrap();
    let newest = text_of(&root, record);
    let strict = 0o700;
    let look = |lab: &Lab| {
        let v = lab.open();
        assert_outdated(v.verify_root_permissions());
        assert_eq!(v.getattr(ROOT, None).unwrap().mode, strict);
        assert_outdated(chmod(&v, 0o777));
        v.close().unwrap();
        assert_eq!(lab.kinds(), kinds(&["stale"]));
    };
    put_text(&root, record, &older);
    look(&lab);
    root.unlink(record).unwrap();
    look(&lab);
    root.make_symlink(record, &older).unwrap();
    assert_eq!(lab.accept("", false).changed, 1);
    let v = lab.open();
    assert_eq!(v.getattr(ROOT, None).unwrap().mode, 0o755);
    v.close().unwrap();
    put_text(&root, record, &newest);
    look(&lab);
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

/// What is seen of everything: an error is an alarm.
fn seen(v: &Vault) -> BTreeMap<String, String> {
    v.verify_root_permissions().unwrap();
    let mut all = BTreeMap::new();
    for path in ["", "f", "d", "new", "l", "long", "d/f"] {
        let Ok(entry) = v.find(path).inspect_err(|e| assert!(matches!(e, VaultError::NotFound), "{path}: {e}")) else {
            continue;
        };
        let ino = entry.attr.ino;
        if entry.attr.kind == Kind::Symlink {
            all.insert(format!("{path} ->"), format!("{:?}", v.readlink(ino).unwrap().len()));
            continue;
        }
        for name in v.list_xattr(ino).unwrap() {
            let name = String::from_utf8(name).unwrap();
            let mut value = v.get_xattr(ino, n(&name)).unwrap();
            if name == ACCESS {
                // The rest of it follows the mode.
                value = value[12..20].to_vec();
            }
            all.insert(format!("{path} {name}"), format!("{value:02x?}"));
        }
        all.insert(path.to_owned(), if path.is_empty() { format!("{:o}", entry.attr.mode) } else { String::new() });
    }
    all
}

/// Takes steps on a store that crashes, and opens what a crash would leave at each moment: each thing is as it was at
/// some moment before, and nothing is called stale. Returns in how many states.
fn crash_everywhere(recipe: Recipe, prepare: &dyn Fn(&Vault), steps: &[&dyn Fn(&Vault)]) -> usize {
    let crash = Arc::new(CrashBackend::new());
    let watched = Arc::new(Watched { table: MemoryTable::default(), store: crash.clone(), states: Mutex::default() });
    let mut lab = Lab::over(recipe, crash.clone(), watched.clone());
    let v = lab.open();
    prepare(&v);
    v.close().unwrap();
    lab.outer.insert(0, 2);
    let v = lab.open();
    v.sync_all().unwrap();
    let begin = crash.position();
    let mut allowed: BTreeMap<String, BTreeSet<Option<String>>> = BTreeMap::new();
    let mut note = |v: &Vault| {
        let now = seen(v);
        for (what, of) in &mut allowed {
            of.insert(now.get(what).cloned());
        }
        for (what, of) in now {
            allowed.entry(what).or_insert_with(|| BTreeSet::from([None])).insert(Some(of));
        }
    };
    note(&v);
    for step in steps {
        step(&v);
        note(&v);
    }
    v.sync_all().unwrap();
    std::mem::forget(v);
    let sim = CrashSim::new(crash.log());
    let states = watched.states.lock();
    let mut count = 0;
    for (at, left) in sim.prefixes().filter(|(at, _)| *at >= begin) {
        let before = states.iter().rfind(|(position, _)| *position < at);
        let tables = before.into_iter().chain(states.iter().filter(|(position, _)| *position == at));
        for (_, table) in tables {
            let mut stores: Vec<MemoryBackend> = vec![left.snapshot(), sim.at(at).least_state()];
            stores.extend((0..6).map(|seed| sim.at(at).random_state(seed)));
            for store in stores {
                let lab =
                    Lab { recipe, backend: Arc::new(store), table: Arc::new(table.clone()), outer: lab.outer.clone() };
                let v = lab.open();
                let now = seen(&v);
                for (what, of) in &allowed {
                    assert!(of.contains(&now.get(what).cloned()), "record {at}: {what} is {:?}", now.get(what));
                }
                v.close().unwrap();
                let v = lab.open();
                assert_eq!(seen(&v), now, "record {at}: opened again");
                v.close().unwrap();
                count += 1;
            }
        }
    }
    count
}

#[test]
fn a_crash_at_any_moment_of_a_change_is_no_alarm() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let prepare = |v: &Vault| {
            v.put("f", b"1");
            v.dir("d");
            set(v, "f", "user.a", b"0");
            set(v, "d", DEFAULT, &acl(1, 7));
        };
        let steps: [&dyn Fn(&Vault); 13] = [
            &|v| set(v, "f", "user.a", b"1"),
            &|v| set(v, "f", "user.a", b"2"),
            &|v| set(v, "f", ACCESS, &acl(1000, 6)),
            &|v| v.remove_xattr(v.ino("f"), n("user.a")).unwrap(),
            &|v| set(v, "d", DEFAULT, &acl(1, 5)),
            &|v| v.put("d/f", b"inherits"),
            &|v| v.put("new", b""),
            &|v| set(v, "new", "user.a", b"1"),
            &|v| set(v, "new", "user.a", b"2"),
            &|v| v.sync_all().unwrap(),
            &|v| set(v, "new", "user.a", b"3"),
            &|v| {
                let _ = v.setattr(ROOT, None, &SetAttr { mode: Some(0o711), ..SetAttr::default() }).unwrap();
            },
            &|v| set(v, "", "user.a", b"root"),
        ];
        let count = crash_everywhere(recipe, &prepare, &steps);
        assert!(count > 200, "{count}");
    }
}

/// A crash leaves two states that are current. The one that is seen after it is the newest from then on.
#[test]
fn what_a_crash_left_open_is_decided_once() {
    let recipe = Recipe::default();
    let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(MemoryTable::default()));
    let lab = Lab::over(recipe, store.clone(), table.clone());
    let v = lab.open();
    v.put("f", b"1");
    set(&v, "f", "user.a", b"1");
    v.close().unwrap();
    let (_, name) = lab.stored("f");
    let older = attrs_of(&lab.backend.root(), &name);
    let v = lab.open();
    set(&v, "f", "user.a", b"2");
    let (left, known) = (store.snapshot(), Arc::new(MemoryTable::clone(&table)));
    let lab = Lab { backend: Arc::new(left), table: known, recipe, outer: vec![1] };
    drop(v);
    let v = lab.open();
    assert_eq!(get(&v, "f", "user.a").unwrap(), b"2");
    v.close().unwrap();
    put_attrs(&lab.backend.root(), &name, &older);
    let v = lab.open();
    assert_outdated(get(&v, "f", "user.a"));
    v.close().unwrap();
}

/// An fsync acknowledges attributes, too.
#[test]
fn after_an_fsync_an_older_attribute_is_stale() {
    for path in ["f", "d"] {
        let recipe = Recipe::default();
        let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(MemoryTable::default()));
        let lab = Lab::over(recipe, store.clone(), table.clone());
        let v = lab.open();
        v.put("f", b"1");
        v.dir("d");
        set(&v, path, "user.a", b"1");
        v.close().unwrap();
        let (_, name) = lab.stored(path);
        let older = attrs_of(&lab.backend.root(), &name);
        let v = lab.open();
        set(&v, path, "user.a", b"2");
        if path == "f" {
            let handle = v.open_file(v.ino(path), RW).unwrap();
            v.fsync(handle, false).unwrap();
            v.release(handle).unwrap();
        } else {
            let handle = v.open_dir(v.ino(path)).unwrap();
            v.fsync_dir(handle).unwrap();
            v.release_dir(handle).unwrap();
        }
        let (left, known) = (store.snapshot(), Arc::new(MemoryTable::clone(&table)));
        drop(v);
        let lab = Lab { backend: Arc::new(left), table: known, recipe, outer: vec![1] };
        put_attrs(&lab.backend.root(), &name, &older);
        let v = lab.open();
        assert_outdated(get(&v, path, "user.a"));
        v.close().unwrap();
    }
}

#[test]
fn a_crash_at_any_moment_of_a_re_keying_is_no_alarm() {
    let prepare = |v: &Vault| {
        v.put("f", b"1");
        v.dir("d");
        v.put("d/f", b"2");
        set(v, "f", "user.a", b"0");
        set(v, "d", DEFAULT, &acl(1, 7));
        link_to(v, "l", b"short");
        link_to(v, "long", &[b't'; 3000]);
        v.link(v.ino("l"), v.ino("d"), n("l")).unwrap();
    };
    let rekey: &dyn Fn(&Vault) = &|v| {
        let done = v.rekey(Rekey::Outer, None, &Quiet).unwrap();
        assert!(done.complete && done.failed == 0 && done.links == 2 && done.records == 2, "{done:?}");
        assert!(done.attributes > 0);
    };
    let count = crash_everywhere(Recipe::default(), &prepare, &[rekey]);
    assert!(count > 200, "{count}");
}

#[test]
fn whoever_looks_while_others_change_sees_no_stale_state() {
    let lab = Lab::new(Recipe::default());
    let v = lab.open();
    for path in ["f", "g"] {
        v.put(path, b"1");
        set(&v, path, "user.a", b"0");
    }
    v.dir("d");
    v.sync_all().unwrap();
    std::thread::scope(|scope| {
        for path in ["f", "g", "d"] {
            scope.spawn(|| {
                for round in 0..60_u8 {
                    set(&v, path, "user.a", &[round]);
                    set(&v, path, ACCESS, &acl(round.into(), 6));
                    if round % 7 == 0 {
                        v.remove_xattr(v.ino(path), n("user.a")).unwrap();
                    }
                }
            });
            scope.spawn(|| {
                for _ in 0..200 {
                    let ino = v.ino(path);
                    v.list_xattr(ino).unwrap();
                    let seen = v.get_xattr(ino, n("user.a"));
                    assert!(matches!(seen, Ok(_) | Err(VaultError::NoAttribute)), "{seen:?}");
                }
            });
        }
        scope.spawn(|| (0..20).for_each(|_| v.sync_all().unwrap()));
    });
    v.clean();
    v.close().unwrap();
    let v = lab.open();
    assert_eq!(get(&v, "f", "user.a").unwrap(), [59]);
    v.clean();
    v.close().unwrap();
}

/// A tree with everything in it.
fn grow(v: &Vault) {
    v.dir("d");
    v.dir("d/e");
    v.put("empty", b"");
    v.put("d/small", b"content");
    v.put("d/e/large", &vec![7; 3 << 20]);
    v.put(&"n".repeat(250), b"long name");
    v.link(v.ino("d/small"), v.ino("d/e"), n("hard")).unwrap();
    link_to(v, "l", b"target");
    link_to(v, "d/long", &[b't'; 3000]);
    v.mknod(v.ino(""), n("fifo"), Kind::Fifo, 0o600, 0, me()).unwrap();
    set(v, "d/small", "user.a", b"1");
    set(v, "d", DEFAULT, &acl(9, 6));
    v.put("d/inherits", b"x");
    // A sparse one.
    let (_, handle) = v.new_file("sparse");
    v.write(handle, 50 << 20, b"end").unwrap();
    v.release(handle).unwrap();
}

#[test]
fn an_anchor_is_made_of_what_is_there() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let backend = memory();
        let ring = recipe.ring_of_epochs(&[1], &[1]);
        Vault::make_tree(&*backend, &recipe.header(), &ring).unwrap();
        let v = recipe.open_with(&backend, &[1], &[1]);
        grow(&v);
        v.put("damaged", &vec![1; 10_000]);
        let damaged = v.stored_path(n("damaged")).unwrap();
        v.close().unwrap();
        backend.root().open_file(damaged.as_os_str(), true).unwrap().write_at(100, &[0xff; 100]).unwrap();
        let table: Arc<dyn Table> = Arc::new(MemoryTable::default());
        let (done, left_out) = rebuilt(&recipe, &backend, &table);
        assert!(left_out.len() == 1 && left_out[0].starts_with(damaged.to_str().unwrap()), "{left_out:?}");
        let expected = Rebuilt {
            objects: 12,
            entries: 12,
            files: 6,
            bytes: 7 + (3 << 20) + 9 + 1 + (50 << 20) + 3,
            datasets: 0,
            damaged: 1,
        };
        assert_eq!(done, expected);
        let lab = Lab { recipe, backend, table, outer: vec![1] };
        let v = lab.open();
        assert_eq!((v.get("d/e/hard"), v.get("empty")), (b"content".to_vec(), Vec::new()));
        assert_eq!(v.get("d/e/large"), vec![7; 3 << 20]);
        assert_eq!((v.get(&"n".repeat(250)), v.get("d/inherits")), (b"long name".to_vec(), b"x".to_vec()));
        assert_eq!(v.find("d/small").unwrap().attr.nlink, 2);
        assert_eq!(v.find("sparse").unwrap().attr.size, (50 << 20) + 3);
        let handle = v.open_file(v.ino("sparse"), RO).unwrap();
        let mut end = [0; 6];
        assert_eq!(v.read(handle, (50 << 20) - 3, &mut end).unwrap(), 6);
        assert_eq!(&end, b"\0\0\0end");
        v.release(handle).unwrap();
        assert_eq!(v.readlink(v.ino("d/long")).unwrap().len(), 3000);
        assert_eq!(get(&v, "d/small", "user.a").unwrap(), b"1");
        assert!(!get(&v, "d/inherits", ACCESS).unwrap().is_empty());
        assert!(matches!(v.find("damaged"), Err(VaultError::NotFound)));
        // It can be written to.
        v.put("d/small", b"another");
        v.put("empty", b"no more");
        set(&v, "d/small", "user.a", b"2");
        v.close().unwrap();
        assert_eq!(lab.kinds(), kinds(&["unrecorded"]));
        let v = lab.open();
        assert_eq!((v.get("d/e/hard"), v.get("empty")), (b"another".to_vec(), b"no more".to_vec()));
        v.close().unwrap();
        // Not twice, and not over a vault that is anchored.
        let v = lab.open();
        let refused =
            rebuild(&v, &recipe.header(), Arc::new(MemoryTable::default()), NewTrees::default(), &LeftOut::default());
        assert!(matches!(refused, Err(VaultError::Refused(_))));
        v.close().unwrap();
        let v = recipe.open_with(&lab.backend, &[1], &[1]);
        let refused = rebuild(&v, &recipe.header(), lab.table.clone(), NewTrees::default(), &LeftOut::default());
        assert!(matches!(refused, Err(VaultError::Anchor(AnchorError::Foreign))));
        v.close().unwrap();
    }
}

/// Rows are committed in batches: names of one object may be far apart.
#[test]
fn an_anchor_of_many_entries_is_made_in_batches() {
    let recipe = Recipe::plain();
    let backend = memory();
    let v = recipe.make(&backend);
    v.put("0-first", b"one");
    for number in 0..11_000 {
        v.mknod(ROOT, n(&format!("{number}")), Kind::Fifo, 0o600, 0, me()).unwrap();
    }
    v.link(v.ino("0-first"), ROOT, n("z-last")).unwrap();
    v.close().unwrap();
    let table = Arc::new(MemoryTable::default());
    let v = recipe.open(&backend).unwrap();
    let (anchor, done) =
        rebuild(&v, &recipe.header(), table.clone(), NewTrees::default(), &LeftOut::default()).unwrap();
    v.close().unwrap();
    assert_eq!((done.objects, done.entries, done.files, done.damaged), (11_002, 11_002, 1, 0));
    assert!(table.commits() >= 3, "{}", table.commits());
    assert_eq!(anchor.entries(lamassu_anchor::ObjectId::ROOT).unwrap().len(), 11_002);
    let v = open_anchored(&recipe, &backend, &(table as Arc<dyn Table>), true).unwrap();
    assert_eq!((v.get("z-last"), v.find("0-first").unwrap().attr.nlink), (b"one".to_vec(), 2));
    v.close().unwrap();
}

fn content_of(dir: &Arc<dyn BackendDir>, name: &OsStr) -> Vec<u8> {
    let file = dir.open_file(name, false).unwrap();
    let mut bytes = vec![0; file.stat().unwrap().len as usize];
    file.read_at(0, &mut bytes).unwrap();
    bytes
}

fn put_content(dir: &Arc<dyn BackendDir>, name: &OsStr, bytes: &[u8]) {
    let file = dir.open_file(name, true).unwrap();
    file.set_len(0).unwrap();
    file.write_at(0, bytes).unwrap();
}

#[test]
fn what_is_accepted_is_readable_and_nothing_else_is() {
    let lab = Lab::new(Recipe::default());
    let v = lab.open();
    v.dir("d");
    v.dir("d/e");
    let (one, two) = (vec![1; 20_000], vec![2; 30_000]);
    for path in ["a", "b", "d/c", "d/e/x", "d/gone"] {
        v.put(path, &one);
    }
    v.close().unwrap();
    let place = |path| lab.stored(path);
    let (a, b, c, x) = (place("a"), place("b"), place("d/c"), place("d/e/x"));
    let older: Vec<_> = [&a, &b, &c, &x].iter().map(|(dir, name)| content_of(dir, name)).collect();
    let v = lab.open();
    for path in ["a", "b", "d/c", "d/e/x"] {
        v.put(path, &two);
    }
    v.close().unwrap();
    for ((dir, name), bytes) in [&a, &b, &c, &x].iter().zip(&older) {
        put_content(dir, name, bytes);
    }
    let read = |v: &Vault, path: &str| -> Result<Vec<u8>> {
        let entry = v.find(path)?;
        let handle = v.open_file(entry.attr.ino, RO)?;
        let mut bytes = vec![0; 40_000];
        let read = v.read(handle, 0, &mut bytes);
        v.release(handle).unwrap();
        read.map(|len| bytes[..len].to_vec())
    };
    // The store drops one, puts one back that was removed, and makes a directory of a file.
    let gone = place("d/gone");
    gone.0.unlink(&gone.1).unwrap();
    assert_eq!(lab.kinds(), kinds(&["missing", "stale"]));
    let done = lab.accept("a", false);
    assert_eq!((done.changed, done.kept), (1, 0));
    let v = lab.open();
    assert_eq!(read(&v, "a").unwrap(), one);
    for path in ["b", "d/c", "d/e/x"] {
        assert!(read(&v, path).is_err(), "{path}");
    }
    assert_outdated(v.find("d/gone"));
    v.close().unwrap();
    let done = lab.accept("d", false);
    assert_eq!((done.changed, done.kept), (0, 1), "the directory itself is as it was");
    let done = lab.accept("d", true);
    assert_eq!((done.changed, done.removed, done.kept), (2, 1, 2), "{done:?}");
    let v = lab.open();
    assert_eq!((read(&v, "d/c").unwrap(), read(&v, "d/e/x").unwrap()), (one.clone(), one.clone()));
    assert!(matches!(v.find("d/gone"), Err(VaultError::NotFound)));
    assert!(read(&v, "b").is_err());
    v.put("d/c", b"goes on");
    v.close().unwrap();
    assert_eq!(lab.accept("", true).changed, 1);
    let v = lab.open();
    assert_eq!((read(&v, "b").unwrap(), read(&v, "d/c").unwrap()), (one, b"goes on".to_vec()));
    v.clean();
    v.close().unwrap();
}

#[test]
fn entries_that_nobody_recorded_are_accepted_with_all_below_them() {
    let lab = Lab::new(Recipe::default());
    let v = lab.open();
    v.dir("d");
    v.put("d/f", b"1");
    v.link(v.ino("d/f"), v.ino("d"), n("twin")).unwrap();
    v.put("kind", b"file");
    v.close().unwrap();
    let (dir, name) = lab.stored("d");
    let (_, kind) = lab.stored("kind");
    // The anchor believes that it is removed; the store keeps it.
    let aside = n("aside");
    dir.rename(&name, &*dir, aside, RenameMode::NoReplace).unwrap();
    assert_eq!(lab.accept("d", false).removed, 1);
    dir.rename(aside, &*dir, &name, RenameMode::NoReplace).unwrap();
    dir.unlink(&kind).unwrap();
    dir.make_dir(&kind, 0o700).unwrap();
    let v = lab.open();
    assert!(matches!(v.find("d"), Err(VaultError::NotFound)));
    assert_outdated(v.find("kind"));
    v.close().unwrap();
    assert_eq!(lab.kinds(), kinds(&["other-kind", "unrecorded"]));
    let done = lab.accept("d", true);
    assert_eq!((done.added, done.damaged), (3, 0), "{done:?}");
    let v = lab.open();
    assert_eq!((v.get("d/f"), v.get("d/twin"), v.find("d/f").unwrap().attr.nlink), (b"1".to_vec(), b"1".to_vec(), 2));
    // A directory without a record does not open.
    assert!(matches!(v.accept(n("kind"), false), Err(VaultError::Damaged { .. })));
    assert!(matches!(v.accept(n("nothing"), false), Err(VaultError::NotFound)));
    v.close().unwrap();
    assert_eq!(lab.kinds(), kinds(&["other-kind"]));
}
