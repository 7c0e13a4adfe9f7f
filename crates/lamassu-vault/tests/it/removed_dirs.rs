//! Directories that programs use by a descriptor, or as their working directory, while another host removes them: no
//! name is in them from then on, as on a local file system.
use crate::common;

use common::anchored::{mv, rmdir};
use common::turns::{Host, Lab};
use common::*;
use lamassu_store::backend::RenameMode;
use lamassu_vault::*;
use std::ffi::OsStr;
use std::sync::atomic::Ordering;

/// What a host does in a turn of its own.
fn elsewhere(lab: &Lab, other: &mut Host, change: impl FnOnce(&Vault)) {
    let v = lab.turn(other, 1, true);
    change(&v);
    lab.end(other, v);
}

/// Each call that looks for a name in a directory, changes one, or gives a new one there.
fn calls_by_name(v: &Vault, dir: Ino) -> Vec<(&'static str, Result<()>)> {
    let (file, name) = (v.ino("file"), n("file"));
    let access = Access { read: true, write: true, truncate: false };
    vec![
        ("lookup", v.lookup(dir, name).map(drop)),
        ("lookup of what cannot be", v.lookup(dir, OsStr::new("a/b")).map(drop)),
        ("create", v.create(dir, n("new"), 0o644, access, me()).map(drop)),
        ("mknod", v.mknod(dir, n("new"), Kind::Fifo, 0o644, 0, me()).map(drop)),
        ("mkdir", v.mkdir(dir, n("new"), 0o755, me()).map(drop)),
        ("symlink", v.symlink(dir, n("new"), b"target", me()).map(drop)),
        ("link", v.link(file, dir, n("new")).map(drop)),
        ("unlink", v.unlink(dir, name)),
        ("rmdir", v.rmdir(dir, name)),
        ("rename from", v.rename(dir, name, ROOT, n("to"), RenameMode::Replace)),
        ("rename to", v.rename(ROOT, name, dir, n("to"), RenameMode::Replace)),
    ]
}

/// What a program gets that has the directory, and a handle of it.
fn is_empty_and_has_no_name(v: &Vault, dir: Ino, mode: u32, handle: HandleId) {
    for (call, done) in calls_by_name(v, dir) {
        assert!(matches!(done, Err(VaultError::NotFound)), "{call}: {done:?}");
    }
    let attr = v.getattr(dir, None).unwrap();
    assert_eq!((attr.ino, attr.kind, attr.nlink, attr.mode), (dir, Kind::Dir, 0, mode));
    assert_eq!((attr.uid, attr.gid), (me().uid, me().gid));
    assert_eq!(v.getattr(dir, Some(handle)).unwrap(), attr);
    let list = |handle| v.read_dir(handle, 0, &mut |_, _| true);
    let plus = |handle| v.read_dir_plus(handle, 0, &mut |_, _, _| true);
    let another = v.open_dir(dir).unwrap();
    for handle in [handle, another] {
        assert!(matches!((list(handle), plus(handle)), (Err(VaultError::NotFound), Err(VaultError::NotFound))));
        v.fsync_dir(handle).unwrap();
    }
    v.release_dir(another).unwrap();
    // The kernel asks for the list before it looks there.
    for name in ["system.posix_acl_access", "user.x"] {
        assert!(matches!(v.get_xattr(dir, n(name)), Err(VaultError::NoAttribute)), "{name}");
    }
    assert_eq!(v.list_xattr(dir).unwrap().len(), 0);
    let set = SetAttr { mode: Some(0o700), ..SetAttr::default() };
    assert!(matches!(v.setattr(dir, None, &set), Err(VaultError::Stale)), "as one that this host has removed");
}

#[test]
fn no_name_is_in_a_directory_that_another_host_has_removed() {
    for is_told in [true, false] {
        let lab = Lab::new();
        let (mut a, mut b) = (Host::default(), Host::default());
        let v = lab.turn(&mut a, 1, true);
        v.put("file", b"file");
        let dirs = [("d", 0o750), ("d/below", 0o705), ("d/below/deep", 0o711)].map(|(path, mode)| {
            let (parent, name) = split(path);
            let dir = v.mkdir(v.ino(parent), n(name), mode, me()).unwrap().attr.ino;
            v.put(&format!("{path}/file"), b"inside");
            (dir, mode, v.open_dir(dir).unwrap())
        });
        // A listing that has begun; and a mode that was set since.
        v.read_dir(dirs[0].2, 0, &mut |_, _| false).unwrap();
        v.setattr(dirs[1].0, None, &SetAttr { mode: Some(0o715), ..SetAttr::default() }).unwrap();
        lab.end(&mut a, v);
        elsewhere(&lab, &mut b, |v| {
            for path in ["d/below/deep", "d/below", "d"] {
                common::anchored::rm(v, &format!("{path}/file")).unwrap();
                rmdir(v, path).unwrap();
            }
        });
        let modes = [0o750, 0o715, 0o711];
        for round in 0..3 {
            let v = lab.turn(&mut a, 1, is_told);
            for ((dir, _, handle), mode) in dirs.into_iter().zip(modes) {
                is_empty_and_has_no_name(&v, dir, mode, handle);
            }
            lab.end(&mut a, v);
            // Another one of that name is another one.
            let again = format!("{}{}", ["d", "d/below", "d/below/deep"][round], "/file");
            elsewhere(&lab, &mut b, |v| {
                v.dir(split(&again).0);
                v.put(&again, b"another");
            });
            let v = lab.turn(&mut a, 1, is_told);
            assert_eq!(v.get(&again), b"another");
            assert!(dirs.iter().all(|(dir, ..)| *dir != v.ino(split(&again).0)));
            lab.end(&mut a, v);
        }
        let v = lab.turn(&mut a, 1, is_told);
        for (dir, _, handle) in dirs {
            v.release_dir(handle).unwrap();
            v.forget(dir, u64::MAX);
            assert!(matches!(v.getattr(dir, None), Err(VaultError::Stale)), "nobody refers to it any more");
        }
        lab.end(&mut a, v);
        let v = lab.opened(&[1]);
        v.clean();
        v.close().unwrap();
    }
}

/// One that was moved goes on under its new name, until it is removed there.
#[test]
fn a_directory_that_another_host_has_moved_is_not_taken_for_removed() {
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let v = lab.turn(&mut a, 1, true);
    let dir = v.dir("d");
    v.dir("e");
    v.put("file", b"file");
    let handle = v.open_dir(dir).unwrap();
    let mode = v.getattr(dir, None).unwrap().mode;
    lab.end(&mut a, v);
    elsewhere(&lab, &mut b, |v| mv(v, "d", "e/moved", RenameMode::NoReplace).unwrap());
    let v = lab.turn(&mut a, 1, true);
    v.mkdir(dir, n("made"), 0o755, me()).unwrap();
    assert_eq!(v.list("e/moved"), ["made"]);
    v.read_dir(handle, 0, &mut |_, _| true).unwrap();
    v.rmdir(dir, n("made")).unwrap();
    lab.end(&mut a, v);
    elsewhere(&lab, &mut b, |v| rmdir(v, "e/moved").unwrap());
    let v = lab.turn(&mut a, 1, true);
    is_empty_and_has_no_name(&v, dir, mode, handle);
    lab.end(&mut a, v);
}

/// What this host has removed answers alike, whether another host has had the vault since or not.
#[test]
fn a_directory_that_this_host_has_removed_is_empty_in_later_turns() {
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let mut v = lab.turn(&mut a, 1, true);
    let dir = v.dir("d");
    v.put("file", b"file");
    let handle = v.open_dir(dir).unwrap();
    let mode = v.getattr(dir, None).unwrap().mode;
    rmdir(&v, "d").unwrap();
    for _ in 0..2 {
        for (call, done) in calls_by_name(&v, dir) {
            assert!(matches!(done, Err(VaultError::NotFound)), "{call}: {done:?}");
        }
        assert_eq!(v.getattr(dir, None).unwrap().nlink, 0);
        lab.end(&mut a, v);
        elsewhere(&lab, &mut b, |v| v.put("x", b"x"));
        v = lab.turn(&mut a, 1, true);
        is_empty_and_has_no_name(&v, dir, mode, handle);
    }
    lab.end(&mut a, v);
}

/// Nobody knows what becomes of the names in a directory that was made in a lost turn.
#[test]
fn a_directory_that_was_lost_with_its_turn_is_stale() {
    let lab = Lab::new();
    let mut a = Host::default();
    let v = lab.turn(&mut a, 1, true);
    v.put("file", b"file");
    lab.end(&mut a, v);
    let v = lab.turn(&mut a, 1, true);
    let dir = v.dir("d");
    let handle = v.open_dir(dir).unwrap();
    lab.table.has_ended.store(true, Ordering::SeqCst);
    let (left, done) = v.leave();
    done.unwrap_err();
    (a.left, a.seen) = (Some(left), lab.table.commits.lock().len());
    let v = lab.turn(&mut a, 1, false);
    for (call, done) in calls_by_name(&v, dir) {
        assert!(matches!(done, Err(VaultError::Stale)), "{call}: {done:?}");
    }
    v.getattr(dir, None).unwrap_err();
    v.open_dir(dir).unwrap_err();
    v.read_dir(handle, 0, &mut |_, _| true).unwrap_err();
    v.release_dir(handle).unwrap();
    lab.end(&mut a, v);
}
