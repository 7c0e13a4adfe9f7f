//! A store that fails now and then, or cannot do everything: an operation that fails leaves the tree as it was or as it
//! should be, and the vault goes on.

use crate::common;

use common::steps::{steps, tree};
use common::*;
use lamassu_store::Backend;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, MemoryBackend};
use lamassu_vault::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn faulty() -> (Arc<FaultBackend>, Arc<dyn Backend>) {
    let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
    (fault.clone(), fault)
}

/// Makes the tree as it is before step `until`.
fn prepare(recipe: &Recipe, backend: &Arc<dyn Backend>, until: usize) -> Vault {
    let v = recipe.make(backend);
    v.put("file", b"content");
    for (_, step) in steps().iter().take(until) {
        step(&v);
    }
    v.sync_all().unwrap();
    v
}

#[test]
fn an_operation_whose_any_change_fails_is_undone_or_done() {
    for (i, (name, step)) in steps().iter().enumerate() {
        for nth in 1.. {
            let recipe = Recipe::default().anchored();
            let (fault, backend) = faulty();
            let v = prepare(&recipe, &backend, i);
            let old = tree(&v);
            let start = fault.faults().changes();
            fault
                .faults()
                .rule(move |c| (c.call.is_change() && c.changes == start + nth).then_some(Fault::Errno(libc::EIO)));
            // A step panics where the vault says no.
            let failed = catch_unwind(AssertUnwindSafe(|| step(&v))).is_err();
            let reached = fault.faults().changes() >= start + nth;
            fault.faults().clear_rules();
            let what = format!("{name}, change {nth}");
            let found = tree(&v);
            if failed {
                assert_eq!(found, old, "{what}");
                // The same works now.
                step(&v);
            }
            v.close().unwrap();
            let again = recipe.open(&backend).unwrap();
            let problems = again.check(&[], false, &Quiet).unwrap().problems;
            assert!(problems.iter().all(|p| p.harmless), "{what}: {problems:#?}");
            assert_eq!(again.check(&[], true, &Quiet).unwrap().problems.len(), problems.len(), "{what}");
            again.clean();
            if !reached {
                break;
            }
        }
    }
}

#[test]
fn a_store_without_symbolic_links_keeps_records_in_files() {
    let (fault, backend) = faulty();
    fault.faults().fail_always(Call::MakeSymlink, libc::EPERM);
    let recipe = Recipe::default(); // `new_anchor` reads a record that is a link
    let long = "l".repeat(255);
    let v = recipe.make(&backend);
    v.dir(&long);
    v.put(&format!("{long}/{long}"), b"x");
    assert!(v.symlink(ROOT, n("link"), b"target", me()).is_err());
    v.close().unwrap();
    let v = recipe.open(&backend).unwrap();
    assert_eq!((v.list(""), v.list(&long)), (vec![long.clone()], vec![long.clone()]));
    assert_eq!(v.get(&format!("{long}/{long}")), b"x");
    v.clean();
    v.unlink(v.ino(&long), n(&long)).unwrap();
    v.rmdir(ROOT, n(&long)).unwrap();
    v.clean();
}

#[test]
fn a_store_without_flags_of_rename_does_without() {
    let (fault, backend) = faulty();
    let v = Recipe::default().anchored().make(&backend);
    let once = || fault.faults().fail_nth(Call::Rename, 1, libc::EINVAL);
    once();
    v.dir("a");
    v.put("a/f", b"1");
    v.dir("b");
    once();
    v.rename(ROOT, n("a"), ROOT, n("b"), RenameMode::Replace).unwrap();
    assert_eq!((v.list(""), v.get("b/f")), (vec!["b".to_owned()], b"1".to_vec()));
    once();
    v.rename(ROOT, n("b"), ROOT, n("c"), RenameMode::NoReplace).unwrap();
    v.put("d", b"2");
    once();
    assert!(matches!(v.rename(ROOT, n("c"), ROOT, n("d"), RenameMode::Exchange), Err(VaultError::Unsupported)));
    v.clean();
}

#[test]
fn a_full_store_says_so_and_keeps_what_it_has() {
    let (fault, backend) = faulty();
    let recipe = Recipe::default().anchored();
    let v = recipe.make(&backend);
    v.put("kept", &[7; 50_000]);
    v.sync_all().unwrap();
    fault.faults().no_space_after(20_000);
    let (_, h) = v.new_file("new");
    let written = v.write(h, 0, &[1; 400_000]).and_then(|_| v.fsync(h, false));
    assert!(written.is_err());
    let _ = v.release(h);
    assert!(v.mkdir(ROOT, n("d"), 0o755, me()).is_err());
    assert_eq!(v.get("kept"), [7; 50_000]);
    fault.faults().clear_rules();
    v.unlink(ROOT, n("new")).unwrap();
    v.dir("d");
    v.close().unwrap();
    let v = recipe.open(&backend).unwrap();
    assert_eq!((v.list(""), v.get("kept")), (vec!["d".to_owned(), "kept".to_owned()], vec![7; 50_000]));
    v.clean();
}

#[test]
fn what_a_full_store_does_not_take_is_bounded() {
    let (fault, backend) = faulty();
    let recipe = Recipe::default().anchored();
    let v = recipe.make(&backend);
    // Too little for a file to be refused more by itself.
    let data = vec![5; 3 << 20];
    for call in [Call::Write, Call::Allocate] {
        fault.faults().fail_always(call, libc::ENOSPC);
    }
    let mut handles = Vec::new();
    let refused = loop {
        let (_, h) = v.new_file(&format!("f{}", handles.len()));
        match v.write(h, 0, &data) {
            Ok(_) => handles.push(h),
            Err(error) => break error,
        }
        assert!(handles.len() < 128, "three times 128 MiB are buffered");
    };
    assert!(
        matches!(&refused, VaultError::Io { source, .. } if source.raw_os_error() == Some(libc::ENOSPC)),
        "{refused}"
    );
    assert!(handles.len() > 80, "{} files fit", handles.len());
    assert!(v.write(handles[0], 0, b"more").is_err());
    fault.faults().clear_rules();
    std::thread::sleep(std::time::Duration::from_millis(1_100));
    v.write(handles[0], 0, &[6]).unwrap();
    v.close().unwrap();
    let v = recipe.open(&backend).unwrap();
    assert_eq!(v.get("f0")[..2], [6, 5]);
    assert_eq!(v.get(&format!("f{}", handles.len() - 1)), data);
}

#[test]
fn a_byte_counts_as_the_block_that_it_takes() {
    let (fault, backend) = faulty();
    let v = Recipe { block_size: 1 << 20, codec: None, ..Recipe::default() }.anchored().make(&backend);
    for file in 0..30 {
        let (_, h) = v.new_file(&format!("f{file}"));
        // Too little for a file to be committed by itself.
        (0..15).for_each(|block| assert_eq!(v.write(h, block << 20, b"x").unwrap(), 1));
    }
    assert!(fault.faults().bytes(Call::Write) > 100 << 20, "450 MiB cannot all be buffered");
}

#[test]
fn an_attribute_that_cannot_be_read_is_not_taken_for_damaged() {
    let (fault, backend) = faulty();
    let v = Recipe::default().anchored().make(&backend);
    v.put("f", b"content");
    v.set_xattr(v.ino("f"), n("user.note"), b"value", SetXattr::Any).unwrap();
    for errno in [libc::EACCES, libc::EPERM, libc::EIO] {
        fault.faults().rule(move |c| (c.call == Call::GetXattr).then_some(Fault::Errno(errno)));
        let problems = v.check(&[], false, &Quiet).unwrap().problems;
        fault.faults().clear_rules();
        assert_eq!(problems.len(), 1, "{problems:#?}");
        assert_eq!((problems[0].kind.as_str(), problems[0].path.as_deref()), ("io", Some("f")));
    }
    v.clean();
}

/// A small file that was closed is in no table when the store says that it lost something: nobody can write it again.
#[test]
fn a_barrier_that_fails_is_told_although_the_next_one_is_good() {
    for closes in [false, true] {
        let (fault, backend) = faulty();
        let v = Recipe::default().anchored().make(&backend);
        v.sync_all().unwrap();
        v.put("small", b"closed, and nothing of it to be settled");
        fault.faults().fail_next_sync(libc::EIO);
        let told = if closes { v.close() } else { v.sync_all() };
        told.expect_err("the first barrier failed");
        fault.faults().clear_rules();
        if !closes {
            v.sync_all().expect("it was told");
            v.clean();
        }
    }
}

/// Another pass settles the only file that is left to be settled, with a barrier that began before the last write.
#[test]
fn who_syncs_beside_another_pass_has_a_barrier_of_his_own() {
    let (fault, backend) = faulty();
    let v = Recipe::default().anchored().make(&backend);
    v.sync_all().unwrap();
    v.put("first", &vec![7; 100_000]);
    let barriers = || fault.faults().calls(Call::SyncStore);
    let before = barriers();
    let (begun, begins) = std::sync::mpsc::channel();
    let (go, goes) = std::sync::mpsc::channel::<()>();
    let (begun, goes) = (std::sync::Mutex::new(Some(begun)), std::sync::Mutex::new(goes));
    fault.faults().rule(move |c| {
        let begun = (c.call == Call::SyncStore).then(|| begun.lock().unwrap().take()).flatten();
        if let Some(begun) = begun {
            begun.send(()).unwrap();
            let _ = goes.lock().unwrap().recv();
        }
        None
    });
    std::thread::scope(|s| {
        let v = &v;
        s.spawn(|| v.sync_all().unwrap());
        begins.recv().unwrap();
        v.put("second", b"small");
        let other = s.spawn(|| v.sync_all().unwrap());
        // Time to look for what is unsettled, and to wait; if it comes later it finds nothing, and the outcome is the
        // same.
        std::thread::sleep(std::time::Duration::from_millis(100));
        go.send(()).unwrap();
        other.join().unwrap();
    });
    assert!(barriers() - before >= 2, "what was written after the first barrier had begun is not covered by it");
    fault.faults().clear_rules();
    v.clean();
}

/// A directory that has become empty is replaced while the store still carries out other removals. Nothing durable has
/// its place then: so if the store loses the removal from it, recovery could not find what was removed.
#[test]
fn a_directory_is_not_replaced_before_a_barrier_covers_the_removals_from_it() {
    let (fault, backend) = faulty();
    let v = Arc::new(Recipe::plain().anchored().make(&backend));
    for dir in ["old", "new", "other"] {
        v.dir(dir);
    }
    let others: Vec<_> = (0..60).map(|number| format!("other/{number}")).collect();
    v.put("old/removed", b"content");
    others.iter().for_each(|path| v.put(path, b"content"));
    v.sync_all().unwrap();
    anchored::rm(&v, "old/removed").unwrap();
    others.iter().for_each(|path| anchored::rm(&v, path).unwrap());
    let steps = Arc::new(Mutex::new(Vec::new()));
    let (go, goes) = channel();
    fault.faults().rule({
        let steps = steps.clone();
        move |c| {
            let noted = match (c.call, c.name) {
                (Call::Unlink, Some(name)) if name == n("removed") => "removed",
                (Call::Unlink, _) => "other",
                (Call::Rename, _) => "renamed",
                (Call::SyncStore, _) => "barrier",
                _ => return None,
            };
            steps.lock().unwrap().push(noted);
            if noted == "other" {
                let _ = go.send(());
                // Time for the rename to come, which waits until this removal is made.
                std::thread::sleep(Duration::from_millis(5));
            }
            None
        }
    });
    let replaces = std::thread::spawn({
        let v = v.clone();
        move || {
            goes.recv().unwrap();
            anchored::mv(&v, "new", "old", RenameMode::Replace).unwrap();
        }
    });
    v.sync_all().unwrap();
    replaces.join().unwrap();
    fault.faults().clear_rules();
    let steps = steps.lock().unwrap();
    let [removed, renamed] = ["removed", "renamed"].map(|step| steps.iter().position(|own| *own == step).unwrap());
    assert!(removed < renamed && steps[removed..renamed].contains(&"barrier"), "{steps:?}");
    v.clean();
}

/// An entry that somebody takes away, or exchanges, whenever it is looked at, and puts back at once. Without an
/// anchor: with one an entry is looked at more often, and half of the time is not enough.
#[test]
fn what_moves_while_it_is_checked_is_not_passed_over() {
    let (fault, backend) = faulty();
    let recipe = Recipe::plain();
    let v = recipe.make(&backend);
    v.put("file", &[1; 10_000]);
    v.dir("dir");
    v.set_xattr(v.ino("dir"), n("user.note"), b"kept", SetXattr::Any).unwrap();
    v.close().unwrap();
    for (call, entry, errno) in [
        (Call::DirStat, "file", libc::ENOENT),
        (Call::OpenFile, "file", libc::ENOENT),
        (Call::OpenFile, "file", libc::ESTALE),
        (Call::OpenDir, "dir", libc::ENOENT),
    ] {
        for repair in [false, true] {
            let v = recipe.open(&backend).unwrap();
            fault.faults().rule(move |c| (c.call == call && c.name == Some(n(entry))).then_some(Fault::Errno(errno)));
            let report = v.check(&[], repair, &Quiet).unwrap();
            let is_named = report.problems.iter().any(|p| p.kind == check::kind::IO && p.stored == entry);
            assert!(is_named && report.is_damaged(), "{call:?} of {entry}: {:#?}", report.problems);
            fault.faults().clear_rules();
            // Half of the time it is there: enough for a check.
            fault.faults().rule(move |c| {
                (c.call == call && c.name == Some(n(entry)) && c.nth % 2 == 1).then_some(Fault::Errno(errno))
            });
            let report = v.check(&[], repair, &Quiet).unwrap();
            assert!(report.problems.is_empty() && report.blocks + report.pages > 0, "{:#?}", report.problems);
            fault.faults().clear_rules();
        }
    }
}

/// A request to thaw may need the thread that a close(2) waits in.
#[test]
fn a_close_waits_for_a_freeze_to_settle_and_not_for_the_thaw() {
    const LONG: Duration = Duration::from_secs(30);
    let (fault, backend) = faulty();
    let v = Arc::new(Recipe::default().make(&backend));
    let handles = ["a", "b"].map(|name| {
        let (_, handle) = v.new_file(name);
        v.write(handle, 0, &[7; 9000]).unwrap();
        handle
    });
    let (begun, has_begun) = channel();
    let (go_on, may_go_on) = channel::<()>();
    let first = Mutex::new(Some((begun, may_go_on)));
    fault.faults().rule(move |c| {
        if c.call == Call::Write
            && let Some((begun, may_go_on)) = first.lock().unwrap().take()
        {
            begun.send(()).unwrap();
            may_go_on.recv_timeout(LONG).unwrap();
        }
        None
    });
    let frozen = std::thread::spawn({
        let v = v.clone();
        move || v.freeze().unwrap()
    });
    has_begun.recv_timeout(LONG).unwrap();
    let (ended, ends) = channel();
    let closing = handles.map(|handle| {
        let (v, ended) = (v.clone(), ended.clone());
        std::thread::spawn(move || {
            v.flush(handle).unwrap();
            v.release(handle).unwrap();
            ended.send(()).unwrap();
        })
    });
    // Time for both to find their files dirty.
    std::thread::sleep(Duration::from_millis(100));
    go_on.send(()).unwrap();
    frozen.join().unwrap();
    let all = [(); 2].map(|()| ends.recv_timeout(LONG));
    assert!(v.is_frozen());
    v.thaw().unwrap();
    closing.into_iter().for_each(|closing| closing.join().unwrap());
    assert_eq!(all, [Ok(()); 2], "they waited for the thaw");
    assert_eq!(v.get("b"), [7; 9000]);
}
