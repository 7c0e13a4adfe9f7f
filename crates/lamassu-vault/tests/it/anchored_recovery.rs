//! Recovery of names (`docs/freshness.md`, N3) over a store that fails, or has much to put right.
use crate::common;

use common::anchored::*;
use common::*;
use lamassu_anchor::table::{MemoryTable, Table};
use lamassu_store::Backend;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, MemoryBackend};
use lamassu_vault::*;
use std::sync::Arc;

/// What a killed process has left.
struct Left {
    recipe: Recipe,
    store: MemoryBackend,
    table: MemoryTable,
}

impl Left {
    fn lab(&self) -> (Arc<FaultBackend>, Lab) {
        let fault = Arc::new(FaultBackend::new(Arc::new(self.store.snapshot())));
        let table: Arc<dyn Table> = Arc::new(self.table.clone());
        (fault.clone(), Lab { recipe: self.recipe, backend: fault, table })
    }
}

/// Saves a file as editors do.
fn save(v: &Vault, temp: &str, path: &str, data: &[u8]) {
    v.put(temp, data);
    fsync(v, temp);
    mv(v, temp, path, RenameMode::Replace).unwrap();
}

const SAVED: [&str; 3] = ["f1", "f2", "f3"];

/// Files that were saved through one temporary name, and a last one that still has it.
fn saved_through_one_name(recipe: Recipe) -> Left {
    let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(MemoryTable::default()));
    let (lab, v) = Lab::over(recipe, store.clone(), table.clone());
    v.dir("d");
    for name in SAVED {
        v.put(&format!("d/{name}"), b"old");
    }
    v.sync_all().unwrap();
    for name in SAVED {
        save(&v, "d/tmp", &format!("d/{name}"), name.as_bytes());
    }
    v.put("d/tmp", b"last");
    fsync(&v, "d/tmp");
    std::mem::forget(v);
    assert_eq!(lab.intents(), 3);
    Left { recipe, store: store.snapshot(), table: (*table).clone() }
}

/// While names are put right, each look at the store fails once. That must not make a wrong number of moves the right
/// one.
#[test]
fn a_look_that_fails_during_recovery_spoils_nothing() {
    let calls = [Call::ReadDir, Call::DirStat, Call::OpenDir, Call::OpenFile, Call::Read, Call::ReadLink];
    for recipe in [Recipe::default(), Recipe::plain()] {
        let left = saved_through_one_name(recipe);
        for call in calls {
            for nth in 1.. {
                let (fault, lab) = left.lab();
                fault.faults().fail_nth(call, nth, libc::EIO);
                drop(open_anchored(&lab.recipe, &lab.backend, &lab.table, false));
                let was_reached = fault.faults().calls(call) >= nth;
                fault.faults().clear_rules();
                let v = lab.open();
                assert_eq!(lab.intents(), 0);
                for name in SAVED {
                    assert_eq!(v.get(&format!("d/{name}")), name.as_bytes(), "{call:?} {nth}");
                }
                assert_eq!(v.get("d/tmp"), b"last", "{call:?} {nth}");
                v.clean();
                v.close().unwrap();
                if !was_reached {
                    break;
                }
            }
        }
    }
}

/// A move that is made again replaces what it has replaced. Anything else is kept.
#[test]
fn what_lies_where_a_move_leads_is_kept() {
    for is_replacing in [false, true] {
        let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(MemoryTable::default()));
        let (_, v) = Lab::over(Recipe::plain(), store.clone(), table.clone());
        v.put("from", b"moved");
        if is_replacing {
            v.put("to", b"replaced");
        }
        v.sync_all().unwrap();
        let before = store.snapshot();
        mv(&v, "from", "to", RenameMode::Replace).unwrap();
        std::mem::forget(v);
        let root = before.root();
        if is_replacing {
            root.rename(n("to"), &*root, n("away"), RenameMode::Replace).unwrap();
        }
        root.create_file(n("to")).unwrap().write_at(0, b"of somebody").unwrap();
        let (_, lab) = Left { recipe: Recipe::plain(), store: before, table: (*table).clone() }.lab();
        let v = lab.open();
        assert_eq!(v.get("to"), b"moved");
        v.close().unwrap();
        let lost = lab.backend.root().open_dir(n("lamassu.lost")).unwrap();
        let kept: Vec<_> = lost.read_dir().unwrap().into_iter().map(|entry| entry.name).collect();
        assert_eq!(kept.len(), 1, "{kept:?}");
        let mut bytes = [0; 11];
        lost.open_file(&kept[0], false).unwrap().read_at(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"of somebody");
    }
}

/// A store that has the companions of long names which another one has in the same directories.
fn with_companions(store: &MemoryBackend, of: &MemoryBackend) -> MemoryBackend {
    let store = store.snapshot();
    for dir in store.root().read_dir().unwrap().into_iter().filter(|entry| entry.kind == Some(Kind::Dir)) {
        let (to, from) = (store.root().open_dir(&dir.name).unwrap(), of.root().open_dir(&dir.name).unwrap());
        for entry in from.read_dir().unwrap() {
            let is_companion = entry.name.to_string_lossy().starts_with("lamassu.name.");
            if is_companion && to.stat_entry(&entry.name).is_err() {
                to.make_symlink(&entry.name, &from.read_link(&entry.name).unwrap()).unwrap();
            }
        }
    }
    store
}

/// A process was killed that had recorded the move of `d/from`, before the store kept it. Companions are durable
/// earlier.
fn moved_in_the_anchor_alone(to: &str) -> Left {
    let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(MemoryTable::default()));
    let (_, v) = Lab::over(Recipe::default(), store.clone(), table.clone());
    v.dir("d");
    v.put("d/from", b"moved");
    v.sync_all().unwrap();
    let before = store.snapshot();
    mv(&v, "d/from", to, RenameMode::NoReplace).unwrap();
    std::mem::forget(v);
    Left { recipe: Recipe::default(), store: with_companions(&before, &store), table: (*table).clone() }
}

/// What recovery could not move is no leftover: it is all that there is of a recorded file.
#[test]
fn what_could_not_be_put_right_stays_for_the_next_writer() {
    let (fault, lab) = moved_in_the_anchor_alone("d/to").lab();
    fault.faults().fail_always(Call::Rename, libc::EIO);
    let v = lab.open();
    fault.faults().clear_rules();
    assert_eq!(listed(&v, "d"), (vec![], true));
    assert!(v.find("d/from").is_err() && v.find("d/to").is_err());
    assert!(v.create(v.ino("d"), n("from"), 0o600, RW, me()).is_err());
    v.put("d/other", b"other");
    v.close().unwrap();
    drop(v);
    let v = lab.open();
    assert_eq!((v.get("d/to"), v.get("d/other"), lab.intents()), (b"moved".to_vec(), b"other".to_vec(), 0));
    v.clean();
    v.close().unwrap();
    assert!(lab.backend.root().open_dir(n("lamassu.lost")).is_err(), "nothing is lost");
}

/// Each directory is listed once, and each entry is looked at once, however many of the moves the store has lost.
#[test]
fn many_lost_moves_are_put_right_by_few_looks() {
    const COUNT: u64 = 2_000;
    let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(MemoryTable::default()));
    let (_, v) = Lab::over(Recipe::default(), store.clone(), table.clone());
    v.dir("d");
    for number in 0..COUNT {
        let handle = v.new_file(&format!("d/old{number}")).1;
        v.release(handle).unwrap();
    }
    v.sync_all().unwrap();
    let before = store.snapshot();
    for number in 0..COUNT {
        mv(&v, &format!("d/old{number}"), &format!("d/new{number}"), RenameMode::Replace).unwrap();
    }
    std::mem::forget(v);
    let (fault, lab) = Left { recipe: Recipe::default(), store: before, table: (*table).clone() }.lab();
    assert_eq!(lab.intents() as u64, COUNT);
    let v = lab.open();
    assert_eq!(lab.intents(), 0);
    let calls = |call| fault.faults().calls(call);
    assert!(calls(Call::ReadDir) < 50, "{}", calls(Call::ReadDir));
    assert!(calls(Call::OpenFile) < 2 * COUNT, "{}", calls(Call::OpenFile));
    assert!(calls(Call::DirStat) < 8 * COUNT, "{}", calls(Call::DirStat));
    assert_eq!(v.list("d").len() as u64, COUNT);
    assert!(v.find("d/new7").is_ok() && v.find("d/old7").is_err());
    v.close().unwrap();
}

/// The same for a repair, which opens the vault itself: neither what is to be moved nor the companion of a long name is
/// cleared away.
#[test]
fn a_repair_clears_nothing_that_could_not_be_put_right() {
    let long = "l".repeat(200);
    for (to, call) in [("d/to", Call::Rename), (&*format!("d/{long}"), Call::Rename), ("d/to", Call::Read)] {
        let (fault, lab) = moved_in_the_anchor_alone(to).lab();
        // What the header and the records of directories are read by still works.
        fault.faults().rule(move |c| {
            let fails = c.call == call && (call != Call::Read || c.len >= 4096);
            fails.then_some(Fault::Errno(libc::EIO))
        });
        let v = lab.open();
        let _ = v.check(&[], true, &Quiet);
        drop(v.close());
        drop(v);
        fault.faults().clear_rules();
        let v = lab.open();
        assert_eq!((v.get(to), lab.intents()), (b"moved".to_vec(), 0), "{call:?}");
        let (names, lacks_some) = listed(&v, "d");
        assert_eq!((names.len(), lacks_some), (1, false), "{call:?} {names:?}");
    }
}

/// That the moves are made is not recorded at once: nothing is left in the way.
#[test]
fn a_recovery_that_is_only_not_recorded_yet_holds_nothing_up() {
    let left = saved_through_one_name(Recipe::default());
    let mut opened = 0;
    for nth in 1..4 {
        let (fault, lab) = left.lab();
        fault.faults().fail_nth(Call::SyncStore, nth, libc::EIO);
        let Ok(v) = open_anchored(&lab.recipe, &lab.backend, &lab.table, false) else { continue };
        fault.faults().clear_rules();
        opened += u32::from(lab.intents() > 0);
        v.dir("e");
        v.dir("x");
        mv(&v, "e", "x", RenameMode::Replace).unwrap();
        v.sync_all().unwrap();
        assert_eq!(lab.intents(), 0, "{nth}");
    }
    assert!(opened > 0, "no opening went on although the barrier failed");
}
