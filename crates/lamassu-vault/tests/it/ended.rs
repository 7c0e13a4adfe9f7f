//! Vaults whose right to be used has ended while they are open: another host may have them.

use crate::common;

use common::anchored::*;
use common::*;
use lamassu_anchor::table::{Change, MemoryTable, Space, Standing, Table, Visit};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::Domain;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, MemoryBackend};
use lamassu_vault::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A table as a host has it from a server.
#[derive(Default)]
struct Lent {
    table: MemoryTable,
    has_ended: AtomicBool,
    /// Another session may be about to change it.
    is_in_doubt: AtomicBool,
    /// The next look at a row fails.
    fails_once: AtomicBool,
}

impl Lent {
    fn end(&self) {
        self.has_ended.store(true, Ordering::SeqCst);
    }

    fn check(&self) -> std::result::Result<(), AnchorError> {
        match self.has_ended.load(Ordering::SeqCst) || self.is_in_doubt.load(Ordering::SeqCst) {
            true => Err(AnchorError::Server { server: "test".into(), fault: ServerFault::Ended }),
            false => Ok(()),
        }
    }
}

impl Table for Lent {
    fn get(&self, space: Space, key: &[u8]) -> std::result::Result<Option<Vec<u8>>, AnchorError> {
        if self.fails_once.swap(false, Ordering::SeqCst) {
            return Err(AnchorError::Broken);
        }
        self.check().and_then(|()| self.table.get(space, key))
    }
    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> std::result::Result<(), AnchorError> {
        self.check().and_then(|()| self.table.scan(space, prefix, visit))
    }
    fn commit(&self, changes: &[Change]) -> std::result::Result<(), AnchorError> {
        self.check().and_then(|()| self.table.commit(changes))
    }
    fn may_end(&self) -> bool {
        true
    }
    fn standing(&self) -> Standing {
        match self.check() {
            Ok(()) => Standing::Good,
            Err(_) if self.is_in_doubt.load(Ordering::SeqCst) => Standing::InDoubt,
            Err(_) => Standing::Ended,
        }
    }
    fn wait_until_good(&self) -> std::result::Result<(), AnchorError> {
        self.check()
    }
}

fn lent() -> (Lab, Vault, Arc<Lent>) {
    let table = Arc::new(Lent::default());
    let (lab, vault) = Lab::over(Recipe::default(), memory(), table.clone());
    (lab, vault, table)
}

/// All names and contents of a store.
fn everything(dir: &dyn lamassu_store::BackendDir) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in dir.read_dir().unwrap() {
        let name = entry.name.to_string_lossy().into_owned();
        if let Ok(below) = dir.open_dir(&entry.name) {
            all.extend(everything(&*below).into_iter().map(|(path, bytes)| (format!("{name}/{path}"), bytes)));
            all.push((name, Vec::new()));
            continue;
        }
        let mut bytes = dir.read_link(&entry.name).map(|to| to.into_encoded_bytes()).unwrap_or_default();
        if let Ok(file) = dir.open_file(&entry.name, false) {
            bytes = vec![0; file.stat().unwrap().len as usize];
            file.read_at(0, &mut bytes).unwrap();
        }
        all.push((name, bytes));
    }
    all.sort();
    all
}

/// Another host may have begun a session since: the record that this one knows would replace the newer one.
#[test]
fn a_vault_whose_session_has_ended_is_closed_without_a_change_of_the_store() {
    let (lab, vault, table) = lent();
    let (_, handle) = vault.new_file("f");
    vault.write(handle, 0, &[7; 10_000]).unwrap();
    vault.release(handle).unwrap();
    vault.sync_all().unwrap();
    let before = everything(&*lab.backend.root());
    table.end();
    // Everything is committed, so there is no error. The session stays open in the record.
    let _ = vault.close();
    drop(vault);
    assert!(everything(&*lab.backend.root()) == before);
    table.has_ended.store(false, Ordering::SeqCst);
    assert!(!lab.read_only().check(&[], false, &Quiet).unwrap().open_sessions.is_empty());
    lab.open().close().unwrap();
}

/// What a call has changed and no sync has made durable is lost with the session. Whoever syncs is told, once.
#[test]
fn names_and_attributes_that_are_lost_with_a_session_are_reported_by_fsync() {
    let (_lab, vault, table) = lent();
    for dir in ["made-in", "removed-from", "left-alone"] {
        vault.dir(dir);
    }
    for file in ["removed-from/f", "chmodded", "untouched"] {
        let (_, handle) = vault.new_file(file);
        vault.release(handle).unwrap();
    }
    vault.sync_all().unwrap();
    let dirs = ["made-in", "removed-from", "left-alone"].map(|dir| vault.open_dir(vault.ino(dir)).unwrap());
    let files = ["chmodded", "untouched"].map(|file| vault.open_file(vault.ino(file), RO).unwrap());
    vault.dir("made-in/d");
    rm(&vault, "removed-from/f").unwrap();
    let mode = SetAttr { mode: Some(0o640), ..SetAttr::default() };
    vault.setattr(vault.ino("chmodded"), None, &mode).unwrap();
    table.end();
    let (left, done) = vault.leave();
    done.unwrap_err();
    let told = |handle| (left.sync(handle).is_err(), left.sync(handle).is_err());
    assert_eq!(dirs.map(told), [(true, false), (true, false), (false, false)]);
    assert_eq!(files.map(told), [(true, false), (false, false)]);
}

/// The same through what an earlier turn opened, and nobody has used in the turn that is lost.
#[test]
fn what_a_lost_turn_changed_is_reported_through_what_earlier_turns_opened() {
    let (lab, vault, table) = lent();
    for dir in ["made-in", "left-alone"] {
        vault.dir(dir);
    }
    for file in ["chmodded", "written", "untouched"] {
        vault.put(file, b"before");
    }
    vault.sync_all().unwrap();
    let dirs = ["made-in", "left-alone"].map(|dir| vault.open_dir(vault.ino(dir)).unwrap());
    let files = ["chmodded", "written", "untouched"].map(|file| vault.open_file(vault.ino(file), RW).unwrap());
    let (left, done) = vault.leave();
    done.unwrap();
    drop(vault);
    let vault = lab.open();
    vault.take_up(left, None).map_err(|(_, error)| error).unwrap();
    vault.dir("made-in/d");
    let mode = SetAttr { mode: Some(0o640), ..SetAttr::default() };
    vault.setattr(vault.ino("chmodded"), None, &mode).unwrap();
    let again = vault.open_file(vault.ino("written"), RW).unwrap();
    vault.write(again, 0, b"after!").unwrap();
    table.end();
    let (left, done) = vault.leave();
    done.unwrap_err();
    let told = |handle| (left.sync(handle).is_err(), left.sync(handle).is_err());
    let (ok, lost) = ((false, false), (true, false));
    assert_eq!(dirs.map(told), [lost, ok]);
    assert_eq!(files.map(told), [lost, lost, ok]);
    assert_eq!(told(again), lost);
}

/// What the kernel writes back from a map is of the present turn, and no program is told of its result: a loss is still
/// reported to the one that syncs.
#[test]
fn writing_pages_back_reports_no_loss() {
    let (lab, vault, table) = lent();
    let (_, handle) = vault.new_file("mapped");
    vault.write(handle, 0, b"old").unwrap();
    vault.sync_all().unwrap();
    vault.write(handle, 0, b"new").unwrap();
    table.end();
    let (left, done) = vault.leave();
    done.unwrap_err();
    table.has_ended.store(false, Ordering::SeqCst);
    let vault = lab.open();
    vault.take_up(left, None).map_err(|(_, error)| error).unwrap();
    assert_eq!(vault.write_pages(handle, 3, b"er").unwrap(), 2);
    assert!(vault.fsync(handle, false).is_err());
    vault.fsync(handle, false).unwrap();
    assert_eq!(vault.get("mapped"), b"older");
    vault.release(handle).unwrap();
    let reader = vault.open_file(vault.ino("mapped"), RO).unwrap();
    assert!(matches!(vault.write_pages(reader, 0, b"x"), Err(VaultError::BadHandle)));
    vault.close().unwrap();
}

/// What an fsync has made durable is not lost with the session, although it is not settled.
#[test]
fn contents_that_were_synced_are_not_reported_as_lost() {
    let (_lab, vault, table) = lent();
    let handles = ["synced", "synced-and-closed", "written-after", "never-synced", "read"].map(|name| {
        let (_, handle) = vault.new_file(name);
        vault.write(handle, 0, &[7; 40_000]).unwrap();
        if name != "never-synced" {
            vault.fsync(handle, false).unwrap();
        }
        handle
    });
    vault.write(handles[2], 4096, b"and more").unwrap();
    let again = vault.open_file(vault.ino("synced-and-closed"), RW).unwrap();
    vault.release(handles[1]).unwrap();
    let reader = vault.open_file(vault.ino("never-synced"), RO).unwrap();
    table.end();
    let (left, done) = vault.leave();
    done.unwrap_err();
    let told = |handle| (left.sync(handle).is_err(), left.sync(handle).is_err());
    let (ok, lost) = ((false, false), (true, false));
    assert_eq!([handles[0], again, handles[2], handles[3], handles[4]].map(told), [ok, ok, lost, lost, ok]);
    assert_eq!(told(reader), lost, "its name was not durable");
}

/// A page that is written and not covered by a barrier need not be unsettled: it is lost all the same.
#[test]
fn a_write_that_no_barrier_covers_is_reported_as_lost() {
    let recipe = Recipe { domain: Domain::File, ..Recipe::default() };
    let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
    let (lab, vault) = Lab::over(recipe, fault.clone(), Arc::new(Lent::default()));
    let (_, handle) = vault.new_file("small");
    vault.write(handle, 0, b"old").unwrap();
    vault.sync_all().unwrap();
    vault.write(handle, 0, b"new").unwrap();
    vault.flush(handle).unwrap();
    fault.faults().fail_always(Call::SyncStore, libc::EIO);
    let (left, done) = vault.leave();
    done.unwrap_err();
    fault.faults().clear_rules();
    let vault = lab.open();
    vault.take_up(left, None).map_err(|(_, error)| error).unwrap();
    assert!(vault.fsync(handle, false).is_err());
    vault.fsync(handle, false).unwrap();
    vault.release(handle).unwrap();
}

/// Numbers of objects that no commit has recorded are given again by the next session, on any host. Files that have
/// them here, and are still open, must not become those of that number.
#[test]
fn a_file_that_was_lost_does_not_become_another_hosts() {
    for their_name in ["q/theirs", "p/mine"] {
        let (lab, vault, table) = lent();
        let [p, _] = ["p", "q"].map(|dir| vault.dir(dir));
        vault.sync_all().unwrap();
        let (entry, handle) = vault.new_file("p/mine");
        vault.write(handle, 0, b"mine").unwrap();
        let inside = vault.dir("p/inside");
        table.end();
        let (left, done) = vault.leave();
        done.unwrap_err();
        // Another host.
        table.has_ended.store(false, Ordering::SeqCst);
        let other = lab.open();
        other.put(their_name, b"theirs");
        other.dir("q/dir-of-theirs");
        other.close().unwrap();
        // Which nobody tells this one of.
        let vault = lab.open();
        vault.take_up(left, None).map_err(|(_, error)| error).unwrap();
        assert_eq!(vault.get(their_name), b"theirs");
        assert!(vault.ino(their_name) != entry.attr.ino, "{their_name} is taken for the file that is lost");
        let gone = |done: Result<usize>| assert!(matches!(done, Err(VaultError::Stale)), "{their_name}: {done:?}");
        // That it is lost is told first.
        assert!(vault.write(handle, 0, b"late").is_err());
        gone(vault.read(handle, 0, &mut [0; 10]));
        gone(vault.write(handle, 0, b"late"));
        gone(vault.getattr(inside, None).map(|_| 0));
        assert!(vault.find("q/dir-of-theirs").unwrap().attr.ino != inside);
        assert_eq!(vault.get(their_name), b"theirs");
        assert_eq!(vault.ino("p"), p, "what was recorded keeps its number");
        vault.release(handle).unwrap();
        let problems = vault.check(&[], false, &Quiet).unwrap().problems;
        assert!(problems.iter().all(|problem| problem.harmless), "{problems:#?}");
        vault.close().unwrap();
    }
}

/// A rename is recorded, and the store does not make it, since the session is in doubt for a moment. Then it cannot be
/// taken back either. As soon as it can, it is; until then what lies under the old name is no leftover: it is the only
/// content of a recorded file.
#[test]
fn a_rename_that_could_not_be_taken_back_loses_nothing() {
    for (is_after_crash, is_in_doubt) in [(false, false), (true, false), (false, true), (true, true)] {
        let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
        let table = Arc::new(Lent::default());
        let (lab, mut vault) = Lab::over(Recipe::default(), fault.clone(), table.clone());
        vault.dir("d");
        vault.put("d/tmp", b"new");
        vault.put("d/b", b"old");
        vault.sync_all().unwrap();
        if is_after_crash {
            vault.put("unsynced", b"");
            std::mem::forget(vault);
            vault = lab.open();
        }
        let dir = vault.ino("d");
        let failing = table.clone();
        fault.faults().rule(move |call| {
            let flag = if is_in_doubt { &failing.is_in_doubt } else { &failing.fails_once };
            (call.call == Call::Rename).then(|| flag.store(true, Ordering::SeqCst)).map(|()| Fault::Errno(libc::EIO))
        });
        vault.rename(dir, n("tmp"), dir, n("b"), RenameMode::Replace).unwrap_err();
        fault.faults().clear_rules();
        table.is_in_doubt.store(false, Ordering::SeqCst);
        let what = format!("after a crash {is_after_crash}, in doubt {is_in_doubt}");
        // As programs do: the next version of the file.
        let made = vault.create(dir, n("tmp"), 0o644, RW, me());
        assert!(matches!(made, Err(VaultError::Exists)), "{what}: {made:?}");
        assert_eq!((vault.get("d/tmp"), vault.get("d/b")), (b"new".to_vec(), b"old".to_vec()), "{what}");
        assert_eq!(listed(&vault, "d"), (vec!["b".to_owned(), "tmp".to_owned()], false), "{what}");
        vault.rename(dir, n("tmp"), dir, n("b"), RenameMode::Replace).unwrap();
        vault.close().unwrap();
        drop(vault);
        let vault = lab.open();
        assert_eq!((vault.get("d/b"), lab.intents()), (b"new".to_vec(), 0), "{what}");
        assert!(is_after_crash || lab.backend.root().open_dir(n("lamassu.lost")).is_err(), "{what}");
        let problems = vault.check(&[], false, &Quiet).unwrap().problems;
        assert!(problems.iter().all(|problem| problem.harmless), "{what}: {problems:#?}");
        vault.close().unwrap();
    }
}
