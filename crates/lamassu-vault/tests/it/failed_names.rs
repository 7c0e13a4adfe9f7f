//! Changes of names that the store reports as failed. It may have made them: the server of a network store has done it,
//! and its answer was lost.
use crate::common;

use common::anchored::*;
use common::*;
use lamassu_anchor::table::{MemoryTable, Space, Table};
use lamassu_store::Backend;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, MemoryBackend};
use lamassu_vault::*;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Looks nothing up first, which would fail, too.
fn renamed(v: &Vault, from: &str, to: &str, mode: RenameMode) -> Result<()> {
    v.rename(ROOT, n(from), ROOT, n(to), mode)
}

type Change = (&'static str, fn(&Vault) -> Result<()>);

const CHANGES: [Change; 13] = [
    ("to a free name", |v| renamed(v, "f", "free", RenameMode::NoReplace)),
    ("over a file", |v| renamed(v, "f", "g", RenameMode::Replace)),
    ("exchanged", |v| renamed(v, "f", "d", RenameMode::Exchange)),
    ("a directory to a free name", |v| renamed(v, "d", "free", RenameMode::NoReplace)),
    ("a directory over an empty one", |v| renamed(v, "d", "e", RenameMode::Replace)),
    ("new, to a free name", |v| renamed(v, "new", "free", RenameMode::NoReplace)),
    ("new, over a file", |v| renamed(v, "new", "g", RenameMode::Replace)),
    ("a new directory", |v| renamed(v, "made", "free", RenameMode::NoReplace)),
    ("a new directory over an empty one", |v| renamed(v, "made", "e", RenameMode::Replace)),
    ("unlink", |v| v.unlink(ROOT, n("f"))),
    ("unlink of a new file", |v| v.unlink(ROOT, n("new"))),
    ("rmdir", |v| v.rmdir(ROOT, n("e"))),
    ("rmdir of a new directory", |v| v.rmdir(ROOT, n("made"))),
];

struct Prepared {
    store: Arc<MemoryBackend>,
    fault: Arc<FaultBackend>,
    lab: Lab,
    v: Vault,
}

impl Prepared {
    fn new(recipe: Recipe) -> Prepared {
        let store = Arc::new(MemoryBackend::new());
        let fault = Arc::new(FaultBackend::new(store.clone()));
        let (lab, v) = Lab::over(recipe, fault.clone(), Arc::new(MemoryTable::default()));
        v.put("f", b"f");
        v.put("g", b"g");
        ["d", "e"].iter().for_each(|dir| _ = v.dir(dir));
        for (path, mode) in [("f", 0o640), ("d", 0o750)] {
            v.setattr(v.ino(path), None, &SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
        }
        v.sync_all().unwrap();
        v.put("new", b"new");
        v.setattr(v.ino("new"), None, &SetAttr { mode: Some(0o620), ..SetAttr::default() }).unwrap();
        v.mkdir(ROOT, n("made"), 0o720, me()).unwrap();
        Prepared { store, fault, lab, v }
    }

    /// The process is killed. The store, as it is, for the next one.
    fn killed(self) -> Lab {
        std::mem::forget(self.v);
        Lab { backend: Arc::new(self.store.snapshot()), ..self.lab }
    }

    /// What is seen after everything was synced, and that it stays so.
    fn settle(self, what: &str) {
        let Prepared { lab, v, .. } = self;
        let before = seen(&v);
        v.sync_all().unwrap();
        assert_eq!(seen(&v), before, "{what}");
        v.close().unwrap();
        assert_eq!(lab.intents(), 0, "{what}");
        let v = lab.open();
        assert_eq!(seen(&v), before, "{what}, opened again");
        v.clean();
        v.close().unwrap();
        let staging = lab.backend.root().open_dir(n("lamassu.staging")).unwrap();
        assert!(staging.read_dir().unwrap().is_empty(), "{what}");
    }
}

/// Before and after a change, if nothing fails.
fn around(recipe: Recipe, change: fn(&Vault) -> Result<()>) -> [BTreeMap<String, String>; 2] {
    let prepared = Prepared::new(recipe);
    let before = seen(&prepared.v);
    change(&prepared.v).unwrap();
    let after = seen(&prepared.v);
    prepared.settle("without faults");
    [before, after]
}

/// Each call of the store fails once, or is made and reports a failure.
#[test]
fn a_change_of_names_that_fails_is_made_or_not() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        for (name, change) in CHANGES {
            let [before, after] = around(recipe, change);
            let failing = Call::ALL.iter().map(|call| (*call, Fault::Errno(libc::EIO)));
            let made = [Call::Rename, Call::Unlink, Call::RemoveDir].map(|call| (call, Fault::After(libc::EIO)));
            for (call, fault) in failing.chain(made) {
                for nth in 1.. {
                    let prepared = Prepared::new(recipe);
                    let faults = prepared.fault.faults();
                    let at = faults.calls(call) + nth;
                    faults.rule(move |c| (c.call == call && c.nth == at).then_some(fault));
                    let done = change(&prepared.v);
                    let was_reached = faults.calls(call) >= at;
                    faults.clear_rules();
                    let what = format!("{name}: {call:?} {nth} {fault:?}, {done:?}");
                    let now = try_seen(&prepared.v).unwrap_or_else(|error| panic!("{what}: {error}"));
                    assert_eq!(now, if done.is_ok() { after.clone() } else { before.clone() }, "{what}");
                    prepared.settle(&what);
                    if !was_reached {
                        break;
                    }
                }
            }
        }
    }
}

/// The same, and the process is killed directly after it: recovery finds the change made, or not made.
#[test]
fn a_change_of_names_that_failed_before_a_kill_is_made_or_not() {
    for (name, change) in CHANGES {
        let synced = || {
            let prepared = Prepared::new(Recipe::default());
            prepared.v.sync_all().unwrap();
            prepared
        };
        let before = seen(&synced().v);
        let changed = synced();
        change(&changed.v).unwrap();
        let after = seen(&changed.v);
        for (call, fault) in [Call::Rename, Call::Unlink, Call::RemoveDir]
            .into_iter()
            .flat_map(|call| [Fault::Errno(libc::EIO), Fault::After(libc::EIO)].map(|fault| (call, fault)))
        {
            for nth in 1.. {
                let prepared = synced();
                let faults = prepared.fault.faults();
                let at = faults.calls(call) + nth;
                faults.rule(move |c| (c.call == call && c.nth == at).then_some(fault));
                let done = change(&prepared.v);
                let was_reached = faults.calls(call) >= at;
                let what = format!("{name}: {call:?} {nth} {fault:?}, {done:?}");
                let lab = prepared.killed();
                let v = lab.open();
                let now = seen(&v);
                assert!([&before, &after].contains(&&now), "{what}: {now:?}");
                v.clean();
                v.close().unwrap();
                assert!(lab.backend.root().open_dir(n("lamassu.lost")).is_err(), "{what}: nothing is lost");
                if !was_reached {
                    break;
                }
            }
        }
    }
}

/// While the outcome of a move is unknown the replaced file keeps its other name: it may have to be recorded again.
#[test]
fn a_file_that_may_have_been_replaced_keeps_its_other_name() {
    let Prepared { store, fault, lab, v } = Prepared::new(Recipe::default());
    v.link(v.ino("g"), v.ino("d"), n("again")).unwrap();
    v.sync_all().unwrap();
    let before = seen(&v);
    let (ino, dir) = (v.ino("g"), v.ino("d"));
    let handle = v.open_file(ino, RW).unwrap();
    rename_and_hide(&fault, Fault::Errno(libc::EIO));
    renamed(&v, "f", "g", RenameMode::Replace).unwrap_err();
    fault.faults().clear_rules();
    v.unlink(dir, n("again")).unwrap_err();
    v.maintain().unwrap();
    assert_eq!(v.find("g").unwrap().attr.ino, ino, "one node");
    v.write(handle, 0, b"g").unwrap();
    v.release(handle).unwrap();
    assert_eq!(seen(&v), before);
    Prepared { store, fault, lab, v }.settle("with another name");
}

/// The store makes a rename, reports a failure, and does not show what it has.
fn fail_and_hide(fault: &FaultBackend) {
    rename_and_hide(fault, Fault::After(libc::EIO));
}

/// A rename meets this fault, and the store does not show what it has.
fn rename_and_hide(fault: &FaultBackend, of_rename: Fault) {
    let is_hidden = AtomicBool::new(false);
    fault.faults().rule(move |c| match c.call {
        Call::Rename => {
            is_hidden.store(true, Ordering::Relaxed);
            Some(of_rename)
        }
        Call::DirStat if is_hidden.load(Ordering::Relaxed) => Some(Fault::Errno(libc::EIO)),
        _ => None,
    });
}

/// Where the store does not show the outcome, its names cannot be used, and nothing else is moved. As soon as it does,
/// all is well; otherwise the next opening puts it right.
#[test]
fn a_rename_of_which_nothing_is_known_is_resolved_later() {
    for is_opened_again in [false, true] {
        for target in ["free", LONG] {
            let mut prepared = Prepared::new(Recipe::default());
            let v = &prepared.v;
            let content = v.get("f");
            fail_and_hide(&prepared.fault);
            mv(v, "f", target, RenameMode::NoReplace).unwrap_err();
            assert!(v.create(ROOT, n("f"), 0o600, RW, me()).is_err());
            assert!(renamed(v, "g", "other", RenameMode::NoReplace).is_err());
            prepared.fault.faults().clear_rules();
            assert_eq!(prepared.lab.intents(), 1);
            if is_opened_again {
                let (store, fault) = (prepared.store.clone(), prepared.fault.clone());
                let lab = prepared.killed();
                prepared = Prepared { v: lab.open(), store, fault, lab };
            }
            let Prepared { lab, v, .. } = prepared;
            assert!(v.find("f").is_err());
            assert_eq!(v.get(target), content);
            assert!(listed(&v, "").0.contains(&target.to_owned()));
            v.sync_all().unwrap();
            assert_eq!(lab.intents(), 0);
            v.clean();
            v.close().unwrap();
            let v = lab.open();
            assert_eq!(v.get(target), content);
            v.clean();
            // After a crash what nobody has synced goes there.
            assert!(is_opened_again || lab.backend.root().open_dir(n("lamassu.lost")).is_err(), "nothing is lost");
        }
    }
}

/// The same where the store has not made it: it is taken back.
#[test]
fn a_rename_that_the_store_has_not_made_is_taken_back_when_it_shows_that() {
    for over in ["free", LONG, "g"] {
        let Prepared { store, fault, lab, v } = Prepared::new(Recipe::default());
        let before = seen(&v);
        rename_and_hide(&fault, Fault::Errno(libc::EIO));
        mv(&v, "f", over, RenameMode::Replace).unwrap_err();
        let handle = v.open_dir(ROOT).unwrap();
        let listed = v.read_dir(handle, 0, &mut |_, _| true);
        assert_eq!(listed.is_err(), over != "g", "{over}: a name is not shown: {listed:?}");
        assert!(!matches!(listed, Err(VaultError::Outdated { .. })), "{over}: and that is not the store's fault");
        v.release_dir(handle).unwrap();
        fault.faults().clear_rules();
        v.maintain().unwrap();
        assert_eq!(seen(&v), before, "{over}");
        Prepared { store, fault, lab, v }.settle(over);
    }
}

/// Nothing durable says that the name exists, and nothing may, as long as the store may not have it.
#[test]
fn a_new_name_of_which_nothing_is_known_is_not_acknowledged() {
    for is_shown_later in [false, true] {
        let prepared = Prepared::new(Recipe::default());
        let v = &prepared.v;
        let handle = v.open_file(v.ino("new"), RW).unwrap();
        fail_and_hide(&prepared.fault);
        mv(v, "new", "free", RenameMode::NoReplace).unwrap_err();
        assert!(v.fsync(handle, false).is_err());
        prepared.fault.faults().clear_rules();
        if is_shown_later {
            v.fsync(handle, false).unwrap();
            assert_eq!(v.get("free"), b"new");
        }
        if is_shown_later {
            v.close().unwrap();
        }
        let lab = prepared.killed();
        let v = lab.open();
        assert_eq!((v.find("free").is_ok(), v.find("new").is_ok()), (is_shown_later, false));
        assert_eq!((v.get("f"), v.get("g")), (b"f".to_vec(), b"g".to_vec()));
        v.check(&[], true, &Quiet).unwrap();
        v.clean();
        v.close().unwrap();
        let lost = lab.backend.root().open_dir(n("lamassu.lost")).map_or(0, |lost| lost.read_dir().unwrap().len());
        assert_eq!(lost > 0, !is_shown_later);
    }
}

/// The commit of a rename to a long name is in doubt. It was made, and a crash follows: the next writer makes the move,
/// and the name needs the companion.
#[test]
fn a_rename_that_may_be_recorded_keeps_its_companion() {
    let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(Doubtful::default()));
    let (lab, v) = Lab::over(Recipe::default(), store.clone(), table.clone());
    v.put("f", b"f");
    v.sync_all().unwrap();
    table.doubt(|change| change.space == Space::Intents);
    mv(&v, "f", LONG, RenameMode::NoReplace).unwrap_err();
    assert!(table.may_be_in_doubt());
    std::mem::forget(v);
    let lab = Lab { backend: Arc::new(store.snapshot()), table: Arc::new(table.durable.clone()), ..lab };
    let v = lab.open();
    assert_eq!(listed(&v, ""), (vec![LONG.to_owned()], false));
    assert_eq!(v.get(LONG), b"f");
    v.clean();
    v.close().unwrap();
}

/// The store makes an entry, and reports a failure. Its long name needs the companion.
#[test]
fn an_entry_that_was_made_after_all_keeps_its_companion() {
    let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
    let backend: Arc<dyn Backend> = fault.clone();
    let v = Recipe::default().make(&backend);
    fault.faults().rule(|c| (c.call == Call::Rename).then_some(Fault::After(libc::EIO)));
    v.symlink(ROOT, n(LONG), b"target", me()).unwrap_err();
    fault.faults().clear_rules();
    assert_eq!(v.list(""), [LONG]);
    v.clean();
}

/// While it is not known whether a rename was made, an entry that the store does not show may be under its other name.
/// Re-keying counts that as a failure, and not as an entry that the store withholds.
#[test]
fn re_keying_beside_a_rename_without_an_outcome_misses_nothing() {
    struct Told(Mutex<Vec<String>>);
    impl RekeyProgress for Told {
        fn dataset(&self, _: &std::path::Path) -> Result<()> {
            Ok(())
        }
        fn passed_over(&self, _: &str, _: &lamassu_format::profile::ProfileError) {}
        fn total(&self, _: u64) {}
        fn advance(&self, _: u64) {}
        fn failed(&self, stored: &str, error: &VaultError) {
            let kind = if matches!(error, VaultError::Outdated { .. }) { "missing" } else { "error" };
            self.0.lock().push(format!("{kind} {stored} {error}"));
        }
        fn is_cancelled(&self) -> bool {
            false
        }
    }
    let Prepared { store, fault, lab, v } = Prepared::new(Recipe::default());
    let before = seen(&v);
    let is_hidden = AtomicBool::new(false);
    fault.faults().rule(move |c| match c.call {
        Call::Rename if !is_hidden.swap(true, Ordering::Relaxed) => Some(Fault::Errno(libc::EIO)),
        Call::DirStat if is_hidden.load(Ordering::Relaxed) => Some(Fault::Errno(libc::EIO)),
        _ => None,
    });
    mv(&v, "f", "free", RenameMode::NoReplace).unwrap_err();
    let told = Told(Mutex::default());
    let _ = v.rekey(Rekey::Full, None, &told);
    let told = told.0.into_inner();
    assert!(!told.iter().any(|told| told.starts_with("missing")), "{told:?}");
    fault.faults().clear_rules();
    v.maintain().unwrap();
    assert_eq!(seen(&v), before);
    Prepared { store, fault, lab, v }.settle("re-keyed meanwhile");
}

/// An entry that is removed, and cannot leave the store yet, is not taken for one that nobody recorded.
#[test]
fn a_removed_directory_waits_for_what_was_in_it() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let prepared = Prepared::new(recipe);
        let (v, faults) = (&prepared.v, prepared.fault.faults());
        v.put("d/c", b"c");
        v.sync_all().unwrap();
        let at = v.stored_path(n("d")).unwrap();
        faults.rule(|c| (c.call == Call::Unlink).then_some(Fault::Errno(libc::EIO)));
        common::anchored::rm(v, "d/c").unwrap();
        common::anchored::rmdir(v, "d").unwrap();
        v.sync_all().unwrap_err();
        let in_store = |name: &OsStr| prepared.store.root().stat_entry(name).is_ok();
        assert_eq!((in_store(at.as_os_str()), in_store(n("lamassu.lost"))), (true, false));
        faults.clear_rules();
        v.sync_all().unwrap();
        assert_eq!((in_store(at.as_os_str()), in_store(n("lamassu.lost"))), (false, false));
        prepared.settle("afterwards");
    }
}

/// The name of one entry does not wait for another one that cannot leave the store.
#[test]
fn what_cannot_leave_the_store_keeps_no_other_name() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let prepared = Prepared::new(recipe);
        let (v, faults) = (&prepared.v, prepared.fault.faults());
        let stuck = v.stored_path(n("f")).unwrap();
        faults.rule(move |c| {
            (c.call == Call::Unlink && c.name == Some(stuck.as_os_str())).then_some(Fault::Errno(libc::EIO))
        });
        for name in ["f", "g"] {
            v.unlink(ROOT, n(name)).unwrap();
        }
        v.put("g", b"again");
        v.rmdir(ROOT, n("d")).unwrap();
        v.dir("d");
        v.unlink(ROOT, n("g")).unwrap();
        renamed(v, "new", "g", RenameMode::NoReplace).unwrap();
        faults.clear_rules();
        prepared.settle("afterwards");
    }
}
