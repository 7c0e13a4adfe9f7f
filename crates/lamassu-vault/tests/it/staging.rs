//! Who owns the directory that a vault lies in puts another in the place of the staging directory: nothing of what lies
//! there is deleted, and nothing is made there.

use crate::common;

use common::{Quiet, Recipe, Short, me, memory, n};
use lamassu_store::{Backend, BackendDir};
use lamassu_vault::{SetAttr, VaultError};
use std::ffi::OsStr;
use std::sync::Arc;

const STAGING: &str = "lamassu.staging";
const DATASET: &str = "dataset-00112233445566778899aabbccddeeff";

/// A store with a closed vault.
fn made() -> (Recipe, Arc<dyn Backend>) {
    let (recipe, backend) = (Recipe::plain().anchored(), memory());
    recipe.make(&backend).close().unwrap();
    backend.root().create_file(n("lamassu.lock")).unwrap(); // private, as on a disk
    (recipe, backend)
}

fn dir(backend: &Arc<dyn Backend>, name: &str) -> Arc<dyn BackendDir> {
    backend.root().open_dir(n(name)).unwrap()
}

/// A directory of the victim's with a file in it.
fn precious(at: &dyn BackendDir, name: &str) {
    at.make_dir(n(name), 0o700).unwrap();
    at.open_dir(n(name)).unwrap().create_file(n("thesis")).unwrap();
}

fn is_there(at: &dyn BackendDir, name: &str) -> bool {
    at.open_dir(n(name)).is_ok_and(|dir| dir.stat_entry(n("thesis")).is_ok())
}

/// Puts `another` in the place of the staging directory.
fn exchange(backend: &Arc<dyn Backend>, another: &str) {
    let root = backend.root();
    root.rename(n(STAGING), &*root, n("old"), lamassu_vault::RenameMode::NoReplace).unwrap();
    root.rename(n(another), &*root, n(STAGING), lamassu_vault::RenameMode::NoReplace).unwrap();
}

#[test]
fn somebody_elses_directory_is_refused_and_stays() {
    type Make = fn(&dyn BackendDir);
    let others: [(&str, Make); 3] = [
        ("another owner", |dir| dir.set_owner(Some(me().uid + 1), None).unwrap()),
        ("others may enter", |dir| dir.set_mode(0o701).unwrap()),
        ("a group may write", |dir| dir.set_mode(0o720).unwrap()),
    ];
    for (what, make) in others {
        let (recipe, backend) = made();
        backend.root().make_dir(n("theirs"), 0o700).unwrap();
        let theirs = dir(&backend, "theirs");
        precious(&*theirs, DATASET);
        make(&*theirs);
        exchange(&backend, "theirs");
        assert!(matches!(recipe.open(&backend), Err(VaultError::Refused(_))), "{what}");
        let told = recipe.open_read_only(&backend).unwrap().check(&[], false, &Quiet).unwrap().problems;
        assert!(told.iter().any(|p| p.stored == STAGING && !p.harmless), "{what}: {told:?}");
        assert!(is_there(&*theirs, DATASET), "{what}");
        assert_eq!(theirs.read_dir().unwrap().len(), 1, "{what}: nothing was left there");
        // Moved away, as the error says.
        let root = backend.root();
        root.rename(n(STAGING), &*root, n("theirs"), lamassu_vault::RenameMode::NoReplace).unwrap();
        recipe.open(&backend).unwrap().close().unwrap();
        assert!(is_there(&*theirs, DATASET), "{what}");
    }
}

#[test]
fn an_exchange_under_a_mount_leads_nowhere() {
    let (recipe, backend) = made();
    let v = recipe.open(&backend).unwrap();
    let held = dir(&backend, STAGING);
    backend.root().make_dir(n("theirs"), 0o777).unwrap();
    let theirs = dir(&backend, "theirs");
    precious(&*theirs, DATASET);
    exchange(&backend, "theirs");
    let before = theirs.stat().unwrap();
    v.dir("d");
    v.symlink(v.ino(""), n("l"), b"target", me()).unwrap();
    assert!(!held.read_dir().unwrap().is_empty(), "links are made in the one that was opened");
    v.rmdir(v.ino(""), n("d")).unwrap();
    v.close().unwrap();
    assert!(held.read_dir().unwrap().is_empty());
    assert!(is_there(&*theirs, DATASET));
    assert_eq!(theirs.stat().unwrap(), before);
}

#[test]
fn what_is_not_ours_in_it_stays() {
    let (recipe, backend) = made();
    let staging = dir(&backend, STAGING);
    let given = |name: &str| staging.hold(n(name)).unwrap().set_owner(Some(me().uid + 1), None).unwrap();
    let another = DATASET.replace("00", "ff");
    for name in [DATASET, &another, "dataset-2024"] {
        precious(&*staging, name);
    }
    given(&another);
    // What a crash leaves of mkdir and of the first look.
    let (empty, probe) = ("00112233445566778899aabbccddeeff", "probe-00112233445566778899aabbccddeeff");
    staging.make_dir(n(empty), 0o700).unwrap();
    given(empty);
    staging.create_file(n(probe)).unwrap();
    recipe.open(&backend).unwrap().close().unwrap();
    let mut left: Vec<_> = staging.read_dir().unwrap().into_iter().map(|e| e.name).collect();
    left.sort();
    assert_eq!(left, [OsStr::new("dataset-2024"), OsStr::new(&another)]);
    assert!(is_there(&*staging, &another) && is_there(&*staging, "dataset-2024"));
}

#[test]
fn a_directory_that_is_removed_is_ours_before_it_is_deleted() {
    let (recipe, backend) = made();
    let v = recipe.open(&backend).unwrap();
    v.dir("d");
    let theirs = dir(&backend, "d");
    v.setattr(v.ino("d"), None, &SetAttr { uid: Some(me().uid + 1), ..SetAttr::default() }).unwrap();
    v.rmdir(v.ino(""), n("d")).unwrap();
    let st = theirs.stat().unwrap();
    assert_eq!((st.uid, st.mode), (me().uid, 0o700), "who still has it open cannot enter it");
}
