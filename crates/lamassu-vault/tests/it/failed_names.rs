//! Changes of names that the store reports as failed. It may have made them: the server of a network store has done it,
//! and its answer was lost.
use crate::common;

use common::anchored::*;
use common::*;
use lamassu_anchor::table::MemoryTable;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, MemoryBackend};
use lamassu_vault::*;
use std::collections::BTreeMap;
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
    fault: Arc<FaultBackend>,
    lab: Lab,
    v: Vault,
}

impl Prepared {
    fn new(recipe: Recipe) -> Prepared {
        let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
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
        Prepared { fault, lab, v }
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

/// The store makes a rename, reports a failure, and does not show what it has.
fn fail_and_hide(fault: &FaultBackend) {
    let is_hidden = AtomicBool::new(false);
    fault.faults().rule(move |c| match c.call {
        Call::Rename => {
            is_hidden.store(true, Ordering::Relaxed);
            Some(Fault::After(libc::EIO))
        }
        Call::DirStat if is_hidden.load(Ordering::Relaxed) => Some(Fault::Errno(libc::EIO)),
        _ => None,
    });
}

/// Where the store does not show the outcome, the next opening does.
#[test]
fn a_rename_of_which_nothing_is_known_is_resolved_later() {
    let Prepared { fault, lab, v } = Prepared::new(Recipe::default());
    let content = v.get("f");
    fail_and_hide(&fault);
    mv(&v, "f", "free", RenameMode::NoReplace).unwrap_err();
    fault.faults().clear_rules();
    assert_eq!(lab.intents(), 1);
    v.sync_all().unwrap();
    v.close().unwrap();
    assert_eq!(lab.intents(), 1, "nobody knows");
    let v = lab.open();
    assert_eq!((v.get("free"), lab.intents()), (content, 0));
    assert!(v.find("f").is_err());
    v.clean();
}

/// Nothing durable says that the name exists, and nothing may, as long as the store may not have it.
#[test]
fn a_new_name_of_which_nothing_is_known_is_not_acknowledged() {
    let Prepared { fault, lab, v } = Prepared::new(Recipe::default());
    let handle = v.open_file(v.ino("new"), RW).unwrap();
    fail_and_hide(&fault);
    mv(&v, "new", "free", RenameMode::NoReplace).unwrap_err();
    fault.faults().clear_rules();
    assert!(v.fsync(handle, false).is_err());
    v.release(handle).unwrap();
    let _ = v.close();
    let v = lab.open();
    assert!(v.find("free").is_err() && v.find("new").is_err());
    assert_eq!((v.get("f"), v.get("g")), (b"f".to_vec(), b"g".to_vec()));
    v.check(&[], true, &Quiet).unwrap();
    v.clean();
    v.close().unwrap();
    assert_eq!(lab.backend.root().open_dir(n("lamassu.lost")).unwrap().read_dir().unwrap().len(), 1);
}
