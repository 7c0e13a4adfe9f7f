//! Re-keying of links with several names, which is cut off between two of them, or meets a name that came meanwhile.
use crate::common;

use common::*;
use lamassu_store::Backend;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, MemoryBackend};
use lamassu_vault::*;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

const NAMES: [&str; 3] = ["a/l", "b/l", "b/m"];

#[track_caller]
fn has_target(v: &Vault, target: &str, what: &str) {
    for name in NAMES {
        let seen = v.readlink(v.ino(name)).unwrap_or_else(|error| panic!("{what}: {name}: {error:?}"));
        assert_eq!(seen, target.as_bytes(), "{what}: {name}");
    }
}

/// Re-keys all of a vault, and nothing fails.
struct Whole<'a>(&'a str);

impl RekeyProgress for Whole<'_> {
    fn passed_over(&self, _: &str, _: &lamassu_format::profile::ProfileError) {}
    fn total(&self, _: u64) {}
    fn advance(&self, _: u64) {}
    fn failed(&self, stored: &str, error: &VaultError) {
        panic!("{}: {stored}: {error:?}", self.0);
    }
    fn dataset(&self, _: &std::path::Path) -> Result<()> {
        Ok(())
    }
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Each rename of the re-keying fails once, and the ones after it in the killed process. No name is called stale: not
/// by who reads it, and not by a later re-keying.
#[test]
fn a_link_that_was_replaced_under_some_names_is_stale_under_none() {
    let mut cut = 0;
    for (is_killed, len) in [(false, 10), (true, 10), (false, 2_000), (true, 2_000)] {
        let target = "t".repeat(len);
        for nth in 1.. {
            let what = format!("{nth}, killed: {is_killed}, {len}");
            let recipe = Recipe::default().anchored();
            let store = Arc::new(MemoryBackend::new());
            let fault = Arc::new(FaultBackend::new(store.clone()));
            let mut backend: Arc<dyn Backend> = fault.clone();
            let v = recipe.make(&backend);
            ["a", "b"].iter().for_each(|dir| _ = v.dir(dir));
            v.symlink(v.ino("a"), n("l"), target.as_bytes(), me()).unwrap();
            for name in ["l", "m"] {
                v.link(v.ino("a/l"), v.ino("b"), n(name)).unwrap();
            }
            v.close().unwrap();
            let mut v = recipe.open_with(&backend, &[1], &[2, 1]);
            let first = fault.faults().calls(Call::Rename) + nth;
            let fails = move |at: u64| if is_killed { at >= first } else { at == first };
            fault.faults().rule(move |c| (c.call == Call::Rename && fails(c.nth)).then_some(Fault::Errno(libc::EIO)));
            let done = v.rekey(Rekey::Outer, None, &Quiet);
            let was_reached = fault.faults().calls(Call::Rename) >= first;
            fault.faults().clear_rules();
            cut += usize::from(done.is_ok_and(|done| done.failed > 0));
            if is_killed {
                std::mem::forget(v);
                backend = Arc::new(store.snapshot());
                v = recipe.open_with(&backend, &[1], &[2, 1]);
            }
            has_target(&v, &target, &what);
            assert!(v.rekey(Rekey::Outer, None, &Whole(&what)).unwrap().complete, "{what}");
            has_target(&v, &target, &what);
            // Once more, by a third key: there is one state again.
            v.close().unwrap();
            let v = recipe.open_with(&backend, &[1], &[3, 2]);
            has_target(&v, &target, &what);
            assert!(v.rekey(Rekey::Outer, None, &Whole(&what)).unwrap().complete, "{what}");
            v.close().unwrap();
            let v = recipe.open_with(&backend, &[1], &[3]);
            has_target(&v, &target, &what);
            assert_eq!(v.find("a/l").unwrap().attr.nlink, 3);
            let left = v.check(&[], true, &Quiet).unwrap().problems;
            assert!(left.iter().all(|left| left.repaired && left.kind == check::kind::ORPHAN), "{what}: {left:#?}");
            v.clean();
            v.close().unwrap();
            if !was_reached {
                break;
            }
        }
    }
    assert!(cut >= 8, "{cut}");
}

type Meanwhile = fn(&Vault, &str);

/// A user renames a link while it is re-keyed: at each barrier once, so also between the walk and the exchange of the
/// names that the walk has found. No name loses the rest of its target.
#[test]
fn a_link_that_is_renamed_meanwhile_keeps_its_target() {
    at_each_barrier(true, |v, to| v.rename(v.ino("d"), n("b"), v.ino("d"), n(to), RenameMode::NoReplace).unwrap());
}

/// The same where it gets another name.
#[test]
fn a_link_that_gets_another_name_meanwhile_keeps_its_target() {
    at_each_barrier(false, |v, to| _ = v.link(v.ino("d/a"), v.ino("d"), n(to)).unwrap());
}

fn at_each_barrier(is_rename: bool, meanwhile: Meanwhile) {
    for make in [Recipe::default, || Recipe::default().anchored()] {
        let reached = (1..).take_while(|nth| has_targets_after(&make(), is_rename, meanwhile, *nth)).count();
        assert!(reached >= 2, "{reached} barriers");
    }
}

/// Re-keys a vault. Returns whether there were so many barriers, at the last of which something is done.
fn was_rekeyed_while(v: &Vault, fault: &FaultBackend, nth: u64, meanwhile: impl Fn() + Sync) -> bool {
    let at = fault.faults().calls(Call::SyncStore) + nth;
    // The rule waits for a thread that uses the vault.
    let ((ask, asked), (tell, told)) = (channel::<()>(), channel::<()>());
    let (ask, told) = (Mutex::new(ask), Mutex::new(told));
    fault.faults().rule(move |c| {
        if c.call == Call::SyncStore && c.nth == at {
            ask.lock().unwrap().send(()).unwrap();
            told.lock().unwrap().recv().unwrap();
        }
        None
    });
    let done = std::thread::scope(|scope| {
        let meanwhile = &meanwhile;
        let other = scope.spawn(move || {
            for () in asked {
                meanwhile();
                tell.send(()).unwrap();
            }
        });
        let done = v.rekey(Rekey::Outer, None, &Quiet);
        fault.faults().clear_rules();
        other.join().unwrap();
        done.unwrap()
    });
    assert!(done.complete && done.failed == 0, "barrier {nth}: {done:?}");
    fault.faults().calls(Call::SyncStore) >= at
}

/// A user gives links to another one, and sets their times, while they are re-keyed.
#[test]
fn what_is_set_of_a_link_meanwhile_is_kept() {
    const LONG_AGO: Time = Time { seconds: 1_000_000, nanos: 5 };
    let uid = if me().uid == 0 { 7 } else { me().uid };
    for make in [Recipe::default, || Recipe::default().anchored()] {
        for nth in 1.. {
            let recipe = make();
            let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
            let backend: Arc<dyn Backend> = fault.clone();
            let v = recipe.make(&backend);
            ["a", "b"].iter().for_each(|name| _ = v.symlink(ROOT, n(name), b"target", me()).unwrap());
            v.link(v.ino("b"), ROOT, n("c")).unwrap();
            v.close().unwrap();
            let v = recipe.open_with(&backend, &[1], &[2, 1]);
            let set = |mtime| SetAttr { uid: Some(uid), mtime: Some(SetTime::At(mtime)), ..SetAttr::default() };
            let was_reached = was_rekeyed_while(&v, &fault, nth, || {
                ["a", "b"].iter().for_each(|name| _ = v.setattr(v.ino(name), None, &set(LONG_AGO)).unwrap());
            });
            for name in ["a", "b", "c"].iter().filter(|_| was_reached) {
                let attr = v.find(name).unwrap().attr;
                assert_eq!((attr.uid, attr.mtime), (uid, LONG_AGO), "{name}, barrier {nth}");
                // The store has the owner, too.
                v.setattr(attr.ino, None, &SetAttr { by: Some(uid), ..set(LONG_AGO) }).unwrap();
            }
            v.close().unwrap();
            let v = recipe.open_with(&backend, &[1], &[2]);
            ["a", "b", "c"].iter().for_each(|name| assert_eq!(v.readlink(v.ino(name)).unwrap(), b"target"));
            v.clean();
            if !was_reached {
                assert!(nth > 2);
                break;
            }
        }
    }
}

/// False: there was no such barrier.
fn has_targets_after(recipe: &Recipe, is_rename: bool, meanwhile: Meanwhile, nth: u64) -> bool {
    let what = format!("rename: {is_rename}, anchored: {}, barrier {nth}", recipe.table.is_some());
    let target = "t".repeat(2_000);
    let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
    let backend: Arc<dyn Backend> = fault.clone();
    let v = recipe.make(&backend);
    v.dir("d");
    v.symlink(v.ino("d"), n("a"), target.as_bytes(), me()).unwrap();
    v.link(v.ino("d/a"), v.ino("d"), n("b")).unwrap();
    v.close().unwrap();
    let v = recipe.open_with(&backend, &[1], &[2, 1]);
    let was_reached = was_rekeyed_while(&v, &fault, nth, || meanwhile(&v, "c"));
    let names: &[&str] = match (was_reached, is_rename) {
        (false, _) => &["a", "b"],
        (true, true) => &["a", "c"],
        (true, false) => &["a", "b", "c"],
    };
    let all_have_it = |v: &Vault| {
        assert_eq!(v.list("d"), names, "{what}");
        for name in names {
            let seen =
                v.readlink(v.ino(&format!("d/{name}"))).unwrap_or_else(|error| panic!("{what}: {name}: {error:?}"));
            assert_eq!(seen, target.as_bytes(), "{what}: {name}");
        }
    };
    all_have_it(&v);
    v.close().unwrap();
    let v = recipe.open_with(&backend, &[1], &[2]);
    all_have_it(&v);
    v.clean();
    was_reached
}
