//! Vaults in one another, over directories of this host, with headers and parent slots as they are.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use common::wood::{Wood, key_not_loaded, wood, wood_over, wood_with, write_header};
use common::{RO, RW, me, n, options};
use lamassu_anchor::table::{Change, Space};
use lamassu_crypto::SecretBytes;
use lamassu_format::header::NameMode;
use lamassu_keys::{Material, SlotKind};
use lamassu_store::Backend;
use lamassu_store::backend::FaultBackend;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_vault::forest::{Cache, Number, Opening, ROOT_MEMBER, State, local as own_number, member_of};
use lamassu_vault::{FileSystem, Forest, Ino, Kind, ROOT, RenameMode, Result, SetAttr, VaultError};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn destroy(forest: &Forest, number: Number, forced: bool) -> Result<()> {
    let ((dir, name), _) = forest.unload_to_destroy(number, forced)?.remove()?;
    forest.changed_beside_kernel(dir, &name);
    Ok(())
}

#[test]
fn numbers_tell_the_member_and_listings_show_them() {
    for names in [NameMode::Encrypted, NameMode::Plain] {
        let w = wood(names);
        let a = w.plant("a", true);
        let deep = w.plant("a/deep", true);
        w.put("f", b"root");
        w.put("a/f", b"a");
        w.put("a/deep/f", b"deep");
        assert_eq!((own_number(a), own_number(deep)), (ROOT, ROOT));
        assert!(member_of(a) != member_of(deep) && member_of(a) != ROOT_MEMBER);
        for (path, content) in [("f", &b"root"[..]), ("a/f", b"a"), ("a/deep/f", b"deep")] {
            assert_eq!(w.get(path).unwrap(), content);
            assert_eq!(w.forest.getattr(w.ino(path), None).unwrap().ino, w.ino(path));
        }
        let shown = |path: &str| {
            let handle = w.forest.open_dir(w.ino(path)).unwrap();
            let mut shown = HashMap::new();
            w.forest
                .read_dir(handle, 0, &mut |e, _| {
                    shown.insert(e.name.to_str().unwrap().to_owned(), e.ino);
                    true
                })
                .unwrap();
            w.forest.release_dir(handle).unwrap();
            shown
        };
        let (root, of_a, of_deep) = (shown(""), shown("a"), shown("a/deep"));
        assert_eq!((root["a"], root["f"], root[".."]), (a, w.ino("f"), ROOT));
        assert_eq!((of_a["."], of_a[".."], of_a["deep"], of_a["f"]), (a, ROOT, deep, w.ino("a/f")));
        assert_eq!((of_deep["."], of_deep[".."], of_deep.len()), (deep, a, 3));
        // No application can make the name that makes a dataset, nor see it.
        let made = w.forest.create(a, n("lamassu.vault"), 0o644, RW, me());
        match names {
            NameMode::Plain => assert!(matches!(made, Err(VaultError::InvalidName))),
            NameMode::Encrypted => {
                w.forest.release(made.unwrap().1).unwrap();
                assert_eq!(w.ino("a/lamassu.vault") >> 48, a >> 48);
                w.forest.unlink(a, n("lamassu.vault")).unwrap();
            }
        }
        w.forest.close().unwrap();
        let stored = w.dir.path().join(w.forest.stored_dir(member_of(deep)).unwrap_or_default());
        assert!(stored.join("lamassu.vault").exists());
    }
}

#[test]
fn borders_are_kept() {
    let w = wood(NameMode::Encrypted);
    let a = w.plant("a", true);
    w.put("a/f", b"a");
    w.put("f", b"root");
    let (f, in_a) = (w.ino("f"), w.ino("a/f"));
    let other = |result: Result<()>| assert!(matches!(result, Err(VaultError::OtherDataset)), "{result:?}");
    other(w.forest.rename(ROOT, n("f"), a, n("g"), RenameMode::Replace));
    other(w.forest.rename(a, n("f"), ROOT, n("g"), RenameMode::NoReplace));
    other(w.forest.link(f, a, n("g")).map(drop));
    other(w.forest.link(in_a, ROOT, n("g")).map(drop));
    let (from, to) = (w.forest.open_file(f, RO).unwrap(), w.forest.open_file(in_a, RW).unwrap());
    assert_eq!(w.forest.copy_range((from, 0), (to, 0), 4).unwrap(), None, "its keys are others");
    [from, to].into_iter().for_each(|handle| w.forest.release(handle).unwrap());
    let root = |result: Result<()>| assert!(matches!(result, Err(VaultError::DatasetRoot)), "{result:?}");
    root(w.forest.rmdir(ROOT, n("a")));
    w.forest.mkdir(ROOT, n("empty"), 0o755, me()).unwrap();
    root(w.forest.rename(ROOT, n("empty"), ROOT, n("a"), RenameMode::Replace));
    assert!(matches!(w.forest.unlink(ROOT, n("a")), Err(VaultError::IsDirectory)));
    assert!(matches!(destroy(&w.forest, ROOT_MEMBER, true), Err(VaultError::Refused(_))));
    // Within its vault a dataset goes where its directory goes, and keeps its number.
    w.forest.rename(ROOT, n("a"), w.ino("empty"), n("b"), RenameMode::NoReplace).unwrap();
    assert_eq!((w.ino("empty/b"), w.get("empty/b/f").unwrap()), (a, b"a".to_vec()));
    assert_eq!(w.forest.plain_place(member_of(a)).unwrap(), (w.ino("empty"), OsString::from("b")));
    w.forest.rename(w.ino("empty"), n("b"), ROOT, n("f"), RenameMode::Exchange).unwrap();
    assert_eq!((w.ino("f"), w.get("f/f").unwrap(), w.get("empty/b").unwrap()), (a, b"a".to_vec(), b"root".to_vec()));
}

#[test]
fn it_is_opened_when_it_is_entered_and_not_when_it_is_listed() {
    let w = wood(NameMode::Encrypted);
    let a = w.plant("a", true);
    let locked = w.plant("locked", false);
    assert_eq!((w.state(member_of(a)), w.state(member_of(locked))), (State::Sighted, State::Sighted));
    let attr = w.forest.getattr(a, None).unwrap();
    assert_eq!((attr.kind, attr.mode, w.state(member_of(a))), (Kind::Dir, 0o755, State::Sighted));
    w.put("a/f", b"a");
    assert_eq!(w.state(member_of(a)), State::Loaded);
    // Without a key: a directory that is there, and nothing else.
    key_not_loaded(w.forest.lookup(locked, n("f")));
    assert_eq!(w.state(member_of(locked)), State::Locked);
    assert_eq!(w.forest.getattr(locked, None).unwrap().kind, Kind::Dir);
    let handle = w.forest.open_dir(locked).unwrap();
    key_not_loaded(w.forest.read_dir(handle, 0, &mut |_, _| true));
    w.forest.release_dir(handle).unwrap();
    key_not_loaded(w.forest.create(locked, n("f"), 0o644, RW, me()));
    key_not_loaded(w.forest.setattr(locked, None, &SetAttr { mode: Some(0o700), ..SetAttr::default() }));
    assert!(matches!(w.forest.get_xattr(locked, OsStr::new("user.x")), Err(VaultError::NoAttribute)));
    assert_eq!(w.forest.list_xattr(locked).unwrap(), Vec::<Vec<u8>>::new());
    key_not_loaded(w.forest.load_again(member_of(locked)).map(drop));
    root_is_whole(&w);
}

fn root_is_whole(w: &Wood) {
    let report = w.forest.vault(ROOT_MEMBER).unwrap().check(&[], false, &common::Quiet).unwrap();
    assert!(report.problems.is_empty(), "{:#?}", report.problems);
    assert_eq!(report.datasets.len(), 2);
}

/// What a kernel would be told.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Heard>>);

/// Inodes, and names in directories.
type Heard = (Vec<Ino>, Vec<(Ino, OsString)>);

impl Cache for Told {
    fn drop_inode(&self, ino: Ino) {
        self.0.lock().unwrap().0.push(ino);
    }
    fn drop_part(&self, ino: Ino, _part: std::ops::Range<u64>) {
        self.drop_inode(ino);
    }
    fn drop_entry(&self, parent: Ino, name: &OsStr) {
        self.0.lock().unwrap().1.push((parent, name.to_owned()));
    }
    fn take_absent(&self) -> Vec<OsString> {
        Vec::new()
    }
    fn expire_attributes(&self, _ino: Ino) {}
    fn expire_entry(&self, _parent: Ino, _name: &OsStr) {}
}

/// A kernel of which a program holds the root directory until the other end is dropped.
struct HeldRoot(Told, Mutex<std::sync::mpsc::Receiver<()>>);

impl Cache for HeldRoot {
    fn drop_inode(&self, ino: Ino) {
        self.0.drop_inode(ino);
    }
    fn drop_part(&self, ino: Ino, part: std::ops::Range<u64>) {
        self.0.drop_part(ino, part);
    }
    fn drop_entry(&self, parent: Ino, name: &OsStr) {
        let _ = self.1.lock().unwrap().recv();
        self.0.drop_entry(parent, name);
    }
    fn take_absent(&self) -> Vec<OsString> {
        vec!["absent".into()]
    }
    fn expire_attributes(&self, _ino: Ino) {}
    fn expire_entry(&self, _parent: Ino, _name: &OsStr) {}
}

#[test]
fn a_program_that_holds_a_directory_keeps_no_keys_loaded() {
    let w = wood(NameMode::Encrypted);
    let told = Told::default();
    let (holder, held) = std::sync::mpsc::channel();
    w.forest.set_cache(Arc::new(HeldRoot(told.clone(), Mutex::new(held))));
    let a = w.plant("a", true);
    w.put("a/f", b"a");
    let f = w.ino("a/f");
    // What a lost session asks for.
    w.forest.drop_all_cached();
    assert!(told.0.lock().unwrap().0.contains(&f), "contents and attributes are dropped");
    assert!(w.forest.unload(member_of(a)).unwrap() && w.forest.unload(ROOT_MEMBER).unwrap());
    assert!(w.keys.told.lock().unwrap().iter().filter(|told| **told == "unloading true").count() == 1);
    key_not_loaded(w.forest.lookup(ROOT, n("a")));
    assert_eq!(told.0.lock().unwrap().1, []);
    drop(holder);
    let dropped = |name: &str| told.0.lock().unwrap().1.contains(&(ROOT, name.into()));
    while !(dropped("a") && dropped("absent")) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn unloaded_vaults_let_everything_go_and_references_are_settled() {
    let w = wood(NameMode::Encrypted);
    let told = Told::default();
    w.forest.set_cache(Arc::new(told.clone()));
    let a = w.plant("a", true);
    let deep = w.plant("a/deep", true);
    w.put("a/f", b"a");
    w.put("a/deep/f", b"deep");
    let handle = w.forest.open_file(w.ino("a/f"), RW).unwrap();
    w.forest.write(handle, 0, b"A").unwrap();
    let (f, references) = (w.ino("a/f"), 5);
    (1..references).for_each(|_| assert_eq!(w.ino("a/f"), f));
    assert!(w.forest.unload(member_of(a)).unwrap());
    assert_eq!((w.state(member_of(a)), w.state(member_of(deep))), (State::Unloaded, State::Sighted));
    key_not_loaded(w.forest.read(handle, 0, &mut [0; 4]));
    key_not_loaded(w.forest.write(handle, 0, b"x").map(drop));
    key_not_loaded(w.get("a/deep/f"));
    w.forest.flush(handle).unwrap();
    let (inodes, entries) = told.0.lock().unwrap().clone();
    assert!([a, f, deep].iter().all(|ino| inodes.iter().filter(|i| *i == ino).count() >= 2), "before and after");
    assert!(entries.contains(&(ROOT, "a".into())) && entries.contains(&(a, "deep".into())));
    assert_eq!(
        *w.keys.told.lock().unwrap(),
        ["opened true", "opened false", "opened false", "unloading false", "unloading false"]
    );

    // Not opened again by itself; then everything is as it was, and what was given out before is not taken for the new.
    key_not_loaded(w.get("a/f"));
    w.forest.load_again(member_of(a)).unwrap();
    assert!(matches!(w.forest.load_again(member_of(a)), Err(VaultError::Refused(_))));
    assert!(matches!(w.forest.read(handle, 0, &mut [0; 4]), Err(VaultError::BadHandle)));
    assert_eq!((w.get("a/f").unwrap(), w.get("a/deep/f").unwrap()), (b"A".to_vec(), b"deep".to_vec()));
    assert_eq!(w.ino("a/f"), f);
    w.forest.forget(f, 100.min(references));
    assert_eq!(w.forest.getattr(f, None).unwrap().ino, f, "the new references are not the old ones");
}

#[test]
fn the_whole_mount_is_unloaded_when_nobody_uses_it() {
    let w = wood(NameMode::Encrypted);
    let a = w.plant("a", true);
    w.put("a/f", b"a");
    let handle = w.forest.open_file(w.ino("a/f"), RO).unwrap();
    let rounds = |after: u64, count: u32| {
        w.forest.unload_after(Duration::from_millis(after));
        for _ in 0..count {
            std::thread::sleep(Duration::from_millis(100));
            w.forest.maintain().unwrap();
            w.forest.unload_idle().unwrap();
        }
    };
    rounds(300, 8);
    assert_eq!(w.state(ROOT_MEMBER), State::Loaded, "a file is open");
    w.forest.release(handle).unwrap();
    // Longer than a busy machine may keep this test from asking.
    for _ in 0..8 {
        w.forest.getattr(w.ino("a/f"), None).unwrap();
        rounds(60_000, 1);
    }
    assert_eq!(w.state(ROOT_MEMBER), State::Loaded, "requests come");
    rounds(300, 8);
    assert_eq!(w.state(ROOT_MEMBER), State::Unloaded);
    key_not_loaded(w.get("a/f"));
    assert_eq!(w.forest.getattr(ROOT, None).unwrap().kind, Kind::Dir);
    assert!(w.forest.statfs().unwrap().blocks > 0);
    key_not_loaded(w.forest.load_again(ROOT_MEMBER).map(drop));
    w.load_root();
    assert_eq!(w.get("a/f").unwrap(), b"a", "datasets that inherit open with it");
    assert_eq!(w.ino("a"), a);
}

struct NoLocks;

impl lamassu_vault::locks::Locks for NoLocks {
    fn ask(
        &self,
        _: lamassu_vault::locks::Asked,
        _: lamassu_vault::locks::Done,
    ) -> Option<Box<dyn lamassu_vault::locks::Waiting>> {
        None
    }
    fn closes(&self, _: lamassu_vault::locks::Object, _: u64) -> Option<lamassu_vault::locks::Asked> {
        None
    }
    fn closed(&self, _: u64) -> Vec<lamassu_vault::locks::Asked> {
        Vec::new()
    }
    fn is_lost(&self, _: u64) -> bool {
        false
    }
}

/// The threads that answer the kernel make requests for locks: they must not wait for a server.
#[test]
fn what_a_lock_names_is_known_while_a_turn_ends() {
    let w = wood_with(NameMode::Encrypted, true);
    w.put("f", b"f");
    let f = w.ino("f");
    let handle = w.forest.open_file(f, RW).unwrap();
    w.forest.take_turns(lamassu_vault::turns::Turns::new(), Arc::new(NoLocks));
    let named = w.forest.locked_file(f).unwrap();
    w.forest.write(handle, 0, b"F").unwrap();
    let gate = w.keys.gate.clone();
    let shut = gate.shut.lock().unwrap();
    let before = gate.come.load(Relaxed);
    std::thread::scope(|scope| {
        let ends = scope.spawn(|| w.forest.end_turn(ROOT_MEMBER));
        while gate.come.load(Relaxed) == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (tell, told) = std::sync::mpsc::channel();
        let forest = w.forest.clone();
        std::thread::spawn(move || tell.send(forest.locked_file(f)));
        let said = told.recv_timeout(Duration::from_secs(60));
        let is_ending = !ends.is_finished();
        drop(shut);
        assert_eq!(said.expect("an answer while the turn ends").unwrap(), named);
        assert!(is_ending);
        ends.join().unwrap().unwrap();
    });
    assert_eq!(w.forest.locked_file(f).unwrap(), named, "between turns, too");
}

/// A re-keying that ends when it is told to.
#[derive(Default)]
struct Held {
    begun: AtomicBool,
    may_end: AtomicBool,
}

impl lamassu_vault::RekeyProgress for Held {
    fn passed_over(&self, _: &str, _: &lamassu_format::profile::ProfileError) {}
    fn total(&self, _: u64) {
        self.begun.store(true, Release);
        while !self.may_end.load(Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    fn advance(&self, _: u64) {}
    fn failed(&self, stored: &str, error: &VaultError) {
        panic!("{stored}: {error}");
    }
    fn dataset(&self, _: &Path) -> Result<()> {
        Ok(())
    }
    fn is_cancelled(&self) -> bool {
        false
    }
}

#[test]
fn a_rekeying_under_way_is_use() {
    let w = wood(NameMode::Encrypted);
    let a = member_of(w.plant("a", true));
    w.put("a/f", b"a");
    w.forest.unload_after(Duration::from_millis(100));
    let held = Held::default();
    let idle = || {
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(100));
            w.forest.unload_idle().unwrap();
        }
        w.state(ROOT_MEMBER)
    };
    std::thread::scope(|scope| {
        let vault = w.forest.vault(a).unwrap();
        let held = &held;
        scope.spawn(move || vault.rekey(lamassu_vault::Rekey::Outer, None, held).unwrap());
        while !held.begun.load(Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let state = idle();
        held.may_end.store(true, Release);
        assert_eq!(state, State::Loaded);
    });
    assert_eq!(idle(), State::Unloaded);
}

#[test]
fn a_copy_of_a_dataset_is_another_member() {
    let w = wood(NameMode::Plain);
    let a = w.plant("a", true);
    w.put("a/f", b"a");
    w.forest.sync_all().unwrap();
    let copy = std::process::Command::new("cp").arg("-a").args(["a", "b"]).current_dir(w.dir.path()).status();
    assert!(copy.unwrap().success());
    let b = w.ino("b");
    assert!(member_of(b) != member_of(a) && member_of(b) != ROOT_MEMBER);
    assert_eq!(w.get("b/f").unwrap(), b"a");
    let handle = w.forest.open_file(w.ino("b/f"), RW).unwrap();
    w.forest.write(handle, 0, b"b").unwrap();
    w.forest.release(handle).unwrap();
    assert_eq!((w.get("a/f").unwrap(), w.get("b/f").unwrap()), (b"a".to_vec(), b"b".to_vec()));
    // One that is damaged is an error of its own directory alone.
    std::fs::File::create(w.dir.path().join("b/lamassu.vault")).unwrap().write_all(b"{").unwrap();
    assert!(w.forest.unload(member_of(b)).unwrap());
    assert!(matches!(w.forest.load_again(member_of(b)), Err(VaultError::Damaged { .. })));
    assert_eq!(w.get("a/f").unwrap(), b"a");
}

/// A store that puts a dataset into one of its own leaves no circle behind, in which whoever goes upwards would never
/// arrive.
#[test]
fn a_dataset_never_lies_within_itself() {
    let w = wood(NameMode::Plain);
    let a = w.plant("a", true);
    let b = w.plant("a/b", true);
    w.plant("a/b/c", true);
    let (top, inner) = (w.dir.path().join("a"), w.dir.path().join("c"));
    std::fs::rename(top.join("b"), &inner).unwrap();
    std::fs::rename(top, inner.join("d")).unwrap();
    let entered = w.forest.lookup(b, n("d"));
    assert!(matches!(entered, Err(VaultError::Damaged { .. })), "{entered:?}");
    assert!(w.forest.is_below(member_of(b), member_of(a)) && !w.forest.is_below(member_of(a), member_of(b)));
    let open = w.forest.at_and_below(ROOT_MEMBER).into_iter().filter(|member| w.forest.vault(*member).is_some());
    assert_eq!(open.count(), 3, "the third was never entered");
}

#[test]
fn destroyed_is_gone_and_frozen_is_still() {
    let w = wood(NameMode::Encrypted);
    let a = w.plant("a", true);
    w.plant("a/deep", true);
    w.put("a/deep/f", b"deep");
    let other = w.plant("other", true);
    let handle = w.forest.open_file(w.ino("a/deep/f"), RO).unwrap();
    assert!(matches!(destroy(&w.forest, member_of(a), false), Err(VaultError::Refused(_))));
    w.forest.release(handle).unwrap();
    w.forest.freeze().unwrap();
    assert!(w.forest.is_frozen());
    assert_eq!(w.get("a/deep/f").unwrap(), b"deep", "reads go on");
    let opened = w.forest.lookup(other, n("f"));
    assert!(matches!(opened, Err(VaultError::Frozen)), "{opened:?}");
    assert!(matches!(w.forest.unload(member_of(a)), Err(VaultError::Frozen)));
    w.forest.thaw().unwrap();
    assert!(matches!(w.forest.lookup(other, n("f")), Err(VaultError::NotFound)));
    destroy(&w.forest, member_of(a), false).unwrap();
    assert!(matches!(w.forest.resolve(n("a")), Err(VaultError::NotFound)));
    assert!(matches!(w.forest.lookup(a, n("deep")), Err(VaultError::Stale)), "its number is nobody's");
    assert_eq!(std::fs::read_dir(w.dir.path().join("lamassu.staging")).unwrap().count(), 0);
    w.forest.close().unwrap();
    assert!(!Path::new(&w.dir.path().join("lamassu.staging/x")).exists());
}

#[test]
fn a_dataset_that_cannot_be_made_leaves_nothing() {
    let w = wood(NameMode::Encrypted);
    let make = |allowed: bool, name: &str| {
        if allowed {
            w.forest.vault(ROOT_MEMBER).unwrap().allow_datasets();
        }
        w.forest.make_dataset(ROOT, n(name), 0o755, me(), |backend, _| {
            write_header(&*backend.root(), b"half");
            Err(VaultError::NoData)
        })
    };
    assert!(matches!(make(false, "a"), Err(VaultError::Refused(_))));
    assert!(matches!(make(true, "a"), Err(VaultError::NoData)));
    assert!(matches!(w.forest.resolve(n("a")), Err(VaultError::NotFound)));
    assert_eq!(std::fs::read_dir(w.dir.path().join("lamassu.staging")).unwrap().count(), 0);
    w.put("f", b"");
    assert!(matches!(make(true, "f"), Err(VaultError::Exists)));
}

/// The opener has the keys before the vault is open. It drops them wherever that fails, and at every unload.
#[test]
fn keys_do_not_stay_with_a_dataset_that_is_not_open() {
    let w = wood_with(NameMode::Encrypted, true);
    let (a, b) = (w.plant("a", true), w.plant("b", true));
    let dropped = || w.keys.told.lock().unwrap().iter().filter(|told| *told == "unloading false").count();
    let root = w.keys.kept.lock().unwrap()[&ROOT_MEMBER].0.id();
    let table = w.keys.tables.lock().unwrap()[&root].clone();
    let mut rows = Vec::new();
    let keep = &mut |key: &[u8], value: &[u8]| {
        rows.push(Change { space: Space::Objects, key: key.to_vec(), value: Some(value.to_vec()) });
        ControlFlow::Continue(())
    };
    table.scan(Space::Objects, &[], keep).unwrap();
    let none: Vec<_> = rows.iter().map(|row| Change { value: None, ..row.clone() }).collect();
    // The dataset itself opens; the anchor above does not say who may enter it.
    let (of_root, before) = (table.clone(), dropped());
    *w.keys.meanwhile.lock().unwrap() = Some(Box::new(move || of_root.commit(&none).unwrap()));
    let failed = w.forest.lookup(a, n("f")).map(drop);
    assert!(matches!(failed, Err(VaultError::Anchor(_))), "{failed:?}");
    assert_eq!((dropped(), w.state(member_of(a))), (before + 1, State::Sighted));
    table.commit(&rows).unwrap();
    w.put("a/f", b"a");
    assert_eq!(w.state(member_of(b)), State::Sighted);
    let before = dropped();
    w.forest.unload(member_of(b)).unwrap();
    assert_eq!(dropped(), before + 1);
}

#[test]
fn a_dataset_whose_place_is_not_durable_is_taken_back() {
    let mut faults = None;
    let w = wood_over(NameMode::Encrypted, |backend| {
        let fault = Arc::new(FaultBackend::new(backend));
        faults = Some(fault.faults().clone());
        fault
    });
    let faults = faults.unwrap();
    let long = "l".repeat(250);
    w.plant("first", true);
    let before = || std::fs::read_dir(w.dir.path()).unwrap().count();
    let entries = before();
    // Of what comes after the dataset was moved to its place: that directory's barrier, and that its mode is set.
    for fails in [Call::SyncDir, Call::SetMode] {
        let stage = AtomicUsize::new(0);
        faults.rule(move |c| {
            let moved = c.call == Call::Rename && stage.compare_exchange(0, 1, Relaxed, Relaxed).is_ok();
            let hit = !moved && c.call == fails && stage.compare_exchange(1, 2, Relaxed, Relaxed).is_ok();
            hit.then_some(Fault::Errno(libc::EIO))
        });
        let made = w.forest.make_dataset(ROOT, n(&long), 0o755, me(), |backend, _| -> Result<()> {
            write_header(&*backend.root(), b"header");
            Ok(())
        });
        assert!(matches!(made, Err(VaultError::Io { .. })), "{made:?}");
        faults.clear_rules();
        assert!(matches!(w.forest.resolve(n(&long)), Err(VaultError::NotFound)));
        assert_eq!(before(), entries, "nothing is left, nor a companion");
        assert_eq!(std::fs::read_dir(w.dir.path().join("lamassu.staging")).unwrap().count(), 0);
    }
    w.plant(&long, true);
    w.put(&format!("{long}/f"), b"content");
    root_is_whole(&w);
}

/// Backends that have no such thing refuse, and say so.
#[test]
fn a_store_without_directories_of_its_own_has_no_datasets() {
    let backend: Arc<dyn Backend> = common::memory();
    assert!(backend.root().as_backend(true).is_err_and(|e| e.raw_os_error() == Some(libc::EOPNOTSUPP)));
}

#[test]
fn no_key_opens_what_is_open_or_lies_in_a_vault_that_is_not() {
    let w = wood(NameMode::Encrypted);
    let locked = member_of(w.plant("locked", false));
    let material = Material::new(SlotKind::Raw, SecretBytes::new(vec![7; 32])).unwrap();
    let opening = || -> Result<Opening> {
        let header = w.header(locked)?;
        let keys = lamassu_keys::unlock(&header, &material).unwrap();
        let ring = keys.key_ring(header.suite()).unwrap();
        Ok(Opening { header, ring, options: options(false), cached: true })
    };
    w.forest.unload(ROOT_MEMBER).unwrap();
    key_not_loaded(w.forest.load(locked, opening).map(drop));
    w.load_root();
    w.ino("locked");
    w.forest.load(locked, opening).unwrap();
    let asked = || -> Result<Opening> { panic!("its keys would be kept in the place of those that are in use") };
    assert!(matches!(w.forest.load(locked, asked).map(drop), Err(VaultError::Refused(_))));
    w.put("locked/f", b"content");
}

#[test]
fn what_gets_the_name_of_a_destroyed_one_stays() {
    let w = wood(NameMode::Encrypted);
    let kept = w.plant("a", true);
    w.put("a/f", b"kept");
    for _ in 0..40 {
        let free = if w.forest.resolve(n("a")).is_ok() { "b" } else { "a" };
        let gone = member_of(w.plant(free, true));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    let _ = w.forest.rename(ROOT, n("a"), ROOT, n("b"), RenameMode::Exchange);
                }
            });
            // Under another name by then: asked again.
            while let Err(error) = destroy(&w.forest, gone, true) {
                assert!(matches!(error, VaultError::NotFound), "{error:?}");
            }
            done.store(true, Relaxed);
        });
        let left = ["a", "b"].into_iter().find(|name| w.forest.resolve(n(name)).is_ok()).unwrap();
        assert_eq!((w.ino(left), w.get(&format!("{left}/f")).unwrap()), (kept, b"kept".to_vec()));
    }
}
