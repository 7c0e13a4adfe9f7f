//! A file with several names in a vault of several hosts, one of the names in a directory of the store that is another
//! user's, who puts an inode of their own there.
use crate::common;

use common::keyed::{ACCESS, acl};
use common::turns::{Host, Lab};
use common::*;
use lamassu_store::backend::RenameMode;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::{Backend, StoreError};
use lamassu_vault::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) const THEIRS: u32 = 54321;

/// False: the tests that need it are left out.
pub(crate) fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("SKIPPED: this takes root");
    }
    is_root
}

pub(crate) fn stored(lab: &Lab, v: &Vault, path: &str) -> PathBuf {
    lab.dir.path().join(v.stored_path(n(path)).unwrap())
}

pub(crate) fn set_id(at: &Path) -> u32 {
    at.metadata().unwrap().mode() & 0o7000
}

pub(crate) fn is_refused<T: std::fmt::Debug>(done: Result<T>) {
    assert!(
        matches!(&done, Err(VaultError::Io { source, .. }) if source.raw_os_error() == Some(libc::EPERM)),
        "{done:?}"
    );
}

/// By its owner it is the file, whose first page is damaged.
pub(crate) fn is_damaged<T: std::fmt::Debug>(done: Result<T>) {
    assert!(matches!(&done, Err(VaultError::Store(StoreError::Damaged(_)))), "{done:?}");
}

/// A file `f` that is also `d/g`. Returns its number, and where both names are in the store.
pub(crate) fn with_two_names(lab: &Lab, v: &Vault) -> (Ino, [PathBuf; 2]) {
    v.put("f", b"content");
    let (f, d) = (v.ino("f"), v.dir("d"));
    v.link(f, d, n("g")).unwrap();
    (f, ["f", "d/g"].map(|name| stored(lab, v, name)))
}

/// What another user can do in a directory of the store that is theirs: their own copy gets the name of a file.
pub(crate) fn put_in_its_place(theirs: &Path) {
    let beside = theirs.with_file_name("beside");
    fs::copy(theirs, &beside).unwrap();
    lchown(&beside, Some(THEIRS), Some(THEIRS)).unwrap();
    fs::rename(&beside, theirs).unwrap();
}

/// Whoever owns a directory of the store can put an inode of their own under a name there: no call under another name
/// of the file reaches it, and no takeover gives it to all names.
#[test]
fn an_inode_of_another_owner_is_not_followed() {
    if !is_root() {
        return;
    }
    for hides_births in [true, false] {
        for is_known in [true, false] {
            let lab = Lab::new();
            if hides_births {
                lab.backend.faults().hide_births();
            }
            let (mut a, mut b) = (Host::default(), Host::default());
            let v = lab.turn(&mut a, 1, true);
            let (f, handle) = v.new_file("f");
            v.write(handle, 0, b"content").unwrap();
            v.fsync(handle, false).unwrap();
            let d = v.dir("d");
            v.link(f.attr.ino, d, n("g")).unwrap();
            let (own, theirs) = (stored(&lab, &v, "f"), stored(&lab, &v, "d/g"));
            lab.end(&mut a, v);
            let v = lab.turn(&mut a, 1, true);
            if is_known {
                v.getattr(f.attr.ino, None).unwrap();
            }
            put_in_its_place(&theirs);
            assert_eq!(v.ino("d/g"), f.attr.ino, "the name is the file's, and the file is where it was");
            for by in [None, Some(0)] {
                is_refused(v.setattr(f.attr.ino, None, &SetAttr { mode: Some(0o4755), by, ..SetAttr::default() }));
            }
            v.write(handle, 0, b"changed").unwrap();
            v.fsync(handle, false).unwrap();
            assert_eq!(v.get("f"), b"changed");
            lab.end(&mut a, v);
            assert_eq!([&own, &theirs].map(|at| set_id(at)), [0, 0]);
            // Nor by another host, which knows neither.
            let v = lab.turn(&mut b, 1, true);
            let _ = v.find("d/g");
            assert_eq!(v.get("f"), b"changed");
            lab.end(&mut b, v);
        }
    }
}

/// The same where the names have changed on another host, and a handle of an earlier turn is all that leads to the
/// file.
#[test]
fn an_inode_of_another_owner_is_not_found_again_when_a_turn_begins() {
    if !is_root() {
        return;
    }
    for is_told in [true, false] {
        let lab = Lab::new();
        let (mut a, mut b) = (Host::default(), Host::default());
        let v = lab.turn(&mut a, 1, true);
        let (f, handle) = v.new_file("f");
        v.write(handle, 0, b"content").unwrap();
        v.fsync(handle, false).unwrap();
        let d = v.dir("d");
        v.link(f.attr.ino, d, n("g")).unwrap();
        lab.end(&mut a, v);
        let v = lab.turn(&mut b, 1, true);
        common::anchored::mv(&v, "f", "f2", RenameMode::NoReplace).unwrap();
        common::anchored::mv(&v, "d/g", "d/g2", RenameMode::NoReplace).unwrap();
        let (own, theirs) = (stored(&lab, &v, "f2"), stored(&lab, &v, "d/g2"));
        lab.end(&mut b, v);
        put_in_its_place(&theirs);
        let v = lab.turn(&mut a, 1, is_told);
        let changes = SetAttr { mode: Some(0o4755), by: Some(0), ..SetAttr::default() };
        let _ = v.setattr(f.attr.ino, None, &changes);
        let _ = v.write(handle, 0, b"changed");
        let _ = v.fsync(handle, false);
        let m = theirs.metadata().unwrap();
        assert_eq!((m.mode() & 0o7000, m.uid()), (0, THEIRS));
        assert_eq!(v.get("f2"), content_of(&v, handle));
        is_refused(v.setattr(v.ino("f2"), None, &changes));
        assert_eq!([&own, &theirs].map(|at| set_id(at)), [0, 0]);
        lab.end(&mut a, v);
    }
}

/// Another file of root's is at `d/g`, where the other user has moved it. That name is looked up first.
pub(crate) fn moved_there(lab: &Lab, at: &Path, mode: u32) -> Vault {
    let roots = lab.dir.path().join("roots");
    fs::copy(at, &roots).unwrap();
    fs::set_permissions(&roots, fs::Permissions::from_mode(mode)).unwrap();
    fs::rename(&roots, at).unwrap();
    let v = lab.turn(&mut Host::default(), 1, true);
    v.find("d/g").unwrap();
    v
}

/// Where the row names the other user, the owner tells nothing. No call under one name gives root's rights, or set-id
/// bits, to what lies under another one: not while that is there, and not through a file that stays open when it is
/// removed.
#[test]
fn owner_and_set_id_bits_are_given_only_where_all_names_lead() {
    if !is_root() {
        return;
    }
    for is_open in [true, false] {
        let lab = Lab::new();
        let (mut a, mut b) = (Host::default(), Host::default());
        let v = lab.turn(&mut a, 1, true);
        let (f, at) = with_two_names(&lab, &v);
        v.setattr(f, None, &SetAttr { uid: Some(THEIRS), ..SetAttr::default() }).unwrap();
        lab.end(&mut a, v);
        let aside = [&at[0], &at[1]].map(|at| at.with_file_name("aside"));
        fs::hard_link(&at[0], &aside[0]).unwrap();
        put_in_its_place(&at[1]);
        fs::hard_link(&at[1], &aside[1]).unwrap();
        let v = lab.turn(&mut b, 1, true);
        let g = v.find("d/g").unwrap().attr.ino;
        let opened = is_open.then(|| v.open_file(g, RW).unwrap());
        assert_eq!(v.ino("f"), g);
        let by_root = |mode, uid| SetAttr { mode, uid, by: Some(0), ..SetAttr::default() };
        is_refused(v.setattr(g, None, &by_root(None, Some(0))));
        is_refused(v.setattr(g, None, &by_root(Some(0o644), None)));
        // By another name of it in root's directory all names could lead there.
        is_refused(v.link(g, ROOT, n("h")));
        v.unlink(v.ino("d"), n("g")).unwrap();
        is_refused(v.setattr(g, opened, &by_root(Some(0o4755), Some(0))));
        opened.into_iter().for_each(|opened| v.release(opened).unwrap());
        lab.end(&mut b, v);
        // Who comes by the name alone has the file.
        let mut c = Host::default();
        let v = lab.turn(&mut c, 1, true);
        v.setattr(v.ino("f"), None, &by_root(Some(0o4755), Some(0))).unwrap();
        // The store has no such bit of any file.
        assert_eq!(
            (v.find("f").unwrap().attr.mode & 0o7000, [&aside[0], &aside[1]].map(|at| set_id(at))),
            (0o4000, [0; 2])
        );
        lab.end(&mut c, v);
    }
}

/// The same with a file of root's that the other user has moved: no attribute of it changes by a call for `f`.
#[test]
fn what_is_asked_for_one_name_changes_no_file_of_roots_under_another() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let mut a = Host::default();
    let v = lab.turn(&mut a, 1, true);
    let (f, at) = with_two_names(&lab, &v);
    v.setattr(f, None, &SetAttr { mode: Some(0o4755), ..SetAttr::default() }).unwrap();
    lab.end(&mut a, v);
    let v = moved_there(&lab, &at[1], 0o600);
    let f = v.ino("f");
    for set in [
        SetAttr { mode: Some(0o644), ..SetAttr::default() },
        SetAttr { uid: Some(THEIRS), ..SetAttr::default() },
        SetAttr { gid: Some(THEIRS), ..SetAttr::default() },
    ] {
        is_refused(v.setattr(f, None, &SetAttr { by: Some(0), ..set }));
        is_refused(v.setattr(f, None, &set));
    }
    is_refused(v.set_xattr(f, n(ACCESS), &acl(1000, 7), SetXattr::Any));
    is_refused(v.setattr(f, None, &SetAttr { mtime: Some(SetTime::Now), by: Some(0), ..SetAttr::default() }));
    is_refused(v.open_file(f, Access { truncate: true, ..RW }));
    assert_eq!(at[1].metadata().unwrap().len(), at[0].metadata().unwrap().len());
    let m = at[1].metadata().unwrap();
    assert_eq!((m.mode() & 0o7777, m.uid(), m.gid()), (0o600, 0, 0));
    // Nor is a time that the other user has chosen that of `f`.
    let before = m.mtime();
    let times = rustix::fs::Timestamps {
        last_access: rustix::fs::Timespec { tv_sec: 7, tv_nsec: 0 },
        last_modification: rustix::fs::Timespec { tv_sec: 7, tv_nsec: 0 },
    };
    v.close().unwrap();
    rustix::fs::utimensat(rustix::fs::CWD, &at[1], &times, rustix::fs::AtFlags::empty()).unwrap();
    let v = lab.turn(&mut Host::default(), 1, true);
    v.find("f").unwrap();
    assert!(v.find("d/g").unwrap().attr.mtime.seconds >= before);
    v.close().unwrap();
}

/// The same through a descriptor, whose name another host has changed meanwhile: the one that is left leads to a file
/// of root's that the other user has moved there, before the file was opened or since.
#[test]
fn what_is_asked_by_a_descriptor_changes_no_file_of_roots_under_the_name_that_is_left() {
    if !is_root() {
        return;
    }
    for was_there in [true, false] {
        let lab = Lab::new();
        let (mut a, mut b) = (Host::default(), Host::default());
        let v = lab.turn(&mut a, 1, true);
        let (f, at) = with_two_names(&lab, &v);
        let handle = v.open_file(f, RO).unwrap();
        lab.end(&mut a, v);
        let roots = lab.dir.path().join("roots");
        fs::write(&roots, [1; 5000]).unwrap();
        fs::set_permissions(&roots, fs::Permissions::from_mode(0o600)).unwrap();
        if was_there {
            fs::rename(&roots, &at[1]).unwrap();
            let v = lab.turn(&mut a, 1, true);
            assert_eq!(["f", "d/g", "f"].map(|name| v.ino(name)), [f; 3]);
            lab.end(&mut a, v);
        }
        let v = lab.turn(&mut b, 1, true);
        common::anchored::mv(&v, "f", "f2", RenameMode::NoReplace).unwrap();
        let own = stored(&lab, &v, "f2");
        lab.end(&mut b, v);
        let _ = fs::rename(&roots, &at[1]);
        let v = lab.turn(&mut a, 1, true);
        for set in
            [SetAttr { mode: Some(0o644), ..SetAttr::default() }, SetAttr { uid: Some(THEIRS), ..SetAttr::default() }]
        {
            v.setattr(f, None, &SetAttr { by: Some(0), ..set }).unwrap_err();
        }
        let m = at[1].metadata().unwrap();
        assert_eq!((m.mode() & 0o7777, m.uid()), (0o600, 0));
        // Where both lead to the file it is changed, unless it may have been opened where it was not.
        fs::remove_file(&at[1]).unwrap();
        fs::hard_link(&own, &at[1]).unwrap();
        let done = v.setattr(v.ino("f2"), None, &SetAttr { mode: Some(0o640), by: Some(0), ..SetAttr::default() });
        let mode = own.metadata().unwrap().mode() & 0o7777;
        assert_eq!((done.is_ok(), mode == 0o640), (!was_there, !was_there), "{done:?}");
        assert_eq!(content_of(&v, handle), b"content");
        lab.end(&mut a, v);
    }
}

/// A program that has a file open goes on when a name goes that led elsewhere.
#[test]
fn an_open_file_goes_on_when_a_name_of_it_that_led_elsewhere_is_removed() {
    if !is_root() {
        return;
    }
    for is_here in [true, false] {
        let lab = Lab::new();
        let (mut a, mut b) = (Host::default(), Host::default());
        let v = lab.turn(&mut a, 1, true);
        let (f, at) = with_two_names(&lab, &v);
        let handle = v.open_file(f, RW).unwrap();
        put_in_its_place(&at[1]);
        assert_eq!(v.ino("d/g"), f);
        lab.end(&mut a, v);
        if !is_here {
            let v = lab.turn(&mut b, 1, true);
            v.unlink(v.ino("d"), n("g")).unwrap();
            lab.end(&mut b, v);
        }
        let v = lab.turn(&mut a, 1, true);
        if is_here {
            v.unlink(v.ino("d"), n("g")).unwrap();
        }
        v.find("f").unwrap();
        assert_eq!(content_of(&v, handle), b"content");
        v.write(handle, 0, b"changed").unwrap();
        v.release(handle).unwrap();
        assert_eq!(v.get("f"), b"changed");
        lab.end(&mut a, v);
        lab.opened(&[1]).clean();
    }
}

/// Once it is closed, a lookup knows which inode is the file's.
#[test]
fn a_file_that_was_open_when_such_a_name_was_removed_can_be_changed_after_it_is_closed() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let mut a = Host::default();
    let v = lab.turn(&mut a, 1, true);
    let (f, at) = with_two_names(&lab, &v);
    let handle = v.open_file(f, RW).unwrap();
    put_in_its_place(&at[1]);
    assert_eq!(v.ino("d/g"), f);
    lab.end(&mut a, v);
    let v = lab.turn(&mut a, 1, true);
    v.unlink(v.ino("d"), n("g")).unwrap();
    is_refused(v.setattr(v.ino("f"), None, &SetAttr { mode: Some(0o600), by: Some(0), ..SetAttr::default() }));
    v.release(handle).unwrap();
    lab.end(&mut a, v);
    let v = lab.turn(&mut a, 1, true);
    v.setattr(v.ino("f"), None, &SetAttr { mode: Some(0o600), by: Some(0), ..SetAttr::default() }).unwrap();
    lab.end(&mut a, v);
}

/// Of a file with one name in the other user's directory: what lies there when a turn begins has the right owner, since
/// root gave it to itself, and not the content.
#[test]
fn what_has_not_the_content_of_a_file_gets_neither_its_owner_nor_set_id_bits() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let v = lab.turn(&mut a, 1, true);
    let (file, handle) = v.create(v.dir("d"), n("g"), 0o644, RW, me()).unwrap();
    v.write(handle, 0, b"content").unwrap();
    v.put("x", b"theirs");
    v.setattr(v.ino("x"), None, &SetAttr { uid: Some(THEIRS), ..SetAttr::default() }).unwrap();
    let at = ["d/g", "x"].map(|name| stored(&lab, &v, name));
    lab.end(&mut a, v);
    // Their own inode, with what they like in it, gets root as its owner only if it has the content of its name.
    let program = lab.dir.path().join("program");
    fs::write(&program, [7; 5000]).unwrap();
    chown(&program, Some(THEIRS), Some(THEIRS)).unwrap();
    let aside = lab.dir.path().join("aside");
    fs::rename(&at[1], &aside).unwrap();
    fs::hard_link(&program, &at[1]).unwrap();
    let to_root = SetAttr { uid: Some(0), by: Some(0), ..SetAttr::default() };
    let v = lab.turn(&mut b, 1, true);
    is_damaged(v.setattr(v.ino("x"), None, &to_root));
    lab.end(&mut b, v);
    assert_eq!(program.metadata().unwrap().uid(), THEIRS);
    // One that is root's for another reason.
    chown(&program, Some(0), Some(0)).unwrap();
    fs::rename(&at[0], at[0].with_file_name("aside")).unwrap();
    fs::rename(&program, &at[0]).unwrap();
    let v = lab.turn(&mut a, 1, true);
    for mode in [0o4755, 0o600] {
        is_damaged(v.setattr(file.attr.ino, None, &SetAttr { mode: Some(mode), by: Some(0), ..SetAttr::default() }));
    }
    assert_eq!(at[0].metadata().unwrap().mode() & 0o7777, 0o644);
    // An inode of holes is like an empty one; who has it mapped may fill it later.
    let holes = fs::File::create(&at[0]).unwrap();
    holes.set_len(1 << 20).unwrap();
    let _ = v.setattr(file.attr.ino, None, &SetAttr { mode: Some(0o4755), by: Some(0), ..SetAttr::default() });
    assert_eq!(set_id(&at[0]), 0);
    // The files themselves are changed.
    fs::rename(at[0].with_file_name("aside"), &at[0]).unwrap();
    fs::remove_file(&at[1]).unwrap();
    fs::rename(&aside, &at[1]).unwrap();
    let set_id_by_root = SetAttr { mode: Some(0o4755), by: Some(0), ..SetAttr::default() };
    v.setattr(file.attr.ino, None, &set_id_by_root).unwrap();
    v.setattr(v.ino("x"), None, &to_root).unwrap();
    v.put("empty", b"");
    v.setattr(v.ino("empty"), None, &set_id_by_root).unwrap();
    assert_eq!(v.find("empty").unwrap().attr.mode & 0o7777, 0o4755);
    let at = stored(&lab, &v, "empty");
    lab.end(&mut a, v);
    assert_eq!(at.metadata().unwrap().mode() & 0o7777, 0o755);
    // Root mends the owner of an empty file, too.
    chown(&at, Some(THEIRS), None).unwrap();
    let v = lab.turn(&mut b, 1, true);
    v.setattr(v.ino("empty"), None, &to_root).unwrap();
    lab.end(&mut b, v);
    assert_eq!(at.metadata().unwrap().uid(), 0);
    lab.opened(&[1]).clean();
}

/// A file with many names is changed like any other, and no name is looked at twice.
#[test]
fn a_change_of_a_file_with_many_names_looks_at_none_of_them() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let v = lab.turn(&mut a, 1, true);
    let (f, _) = with_two_names(&lab, &v);
    let d = v.ino("d");
    (0..300).for_each(|number| _ = v.link(f, d, n(&number.to_string())).unwrap());
    lab.end(&mut a, v);
    let v = lab.turn(&mut b, 1, true);
    let f = v.ino("f");
    (0..300).for_each(|number| assert_eq!(v.ino(&format!("d/{number}")), f));
    let looks = || lab.backend.faults().calls(Call::DirStat);
    let before = looks();
    v.setattr(f, None, &SetAttr { mode: Some(0o600), uid: Some(0), by: Some(0), ..SetAttr::default() }).unwrap();
    assert!(looks() - before < 50, "{}", looks() - before);
    lab.end(&mut b, v);
    lab.opened(&[1]).clean();
}

/// Who owns a file belongs to its group, and not to another one that the store shows.
#[test]
fn a_user_gives_no_set_group_id_bit_for_another_group() {
    if !is_root() {
        return;
    }
    for is_shared in [true, false] {
        let (lab, (dir, local)) = (Lab::new(), local_fast());
        let backend: Arc<dyn Backend> = local;
        let recipe = Recipe::default().anchored();
        let (v, dir) = match is_shared {
            true => (lab.turn(&mut Host::default(), 1, true), lab.dir.path()),
            false => (recipe.make(&backend), dir.path()),
        };
        v.put("f", b"content");
        let f = v.ino("f");
        v.setattr(f, None, &SetAttr { uid: Some(THEIRS), gid: Some(THEIRS), ..SetAttr::default() }).unwrap();
        let at = dir.join(v.stored_path(n("f")).unwrap());
        chown(&at, None, Some(0)).unwrap();
        let by_owner = SetAttr { mode: Some(0o2755), by: Some(THEIRS), ..SetAttr::default() };
        is_refused(v.setattr(f, None, &by_owner));
        assert_eq!(set_id(&at), 0);
        v.setattr(f, None, &SetAttr { gid: Some(THEIRS), by: Some(0), ..SetAttr::default() }).unwrap();
        v.setattr(f, None, &by_owner).unwrap();
        let seen = v.getattr(f, None).unwrap().mode & 0o7000;
        assert_eq!((seen, set_id(&at)), (0o2000, if is_shared { 0 } else { 0o2000 }));
        v.close().unwrap();
    }
}

/// The store shows a file with another owner than its row, as a copy of it that was made without owners does: root
/// mends that by any of its names.
#[test]
fn root_gives_a_file_its_owner_by_any_of_its_names() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let v = lab.turn(&mut a, 1, true);
    let (_, at) = with_two_names(&lab, &v);
    lab.end(&mut a, v);
    chown(&at[0], Some(THEIRS), None).unwrap();
    let v = lab.turn(&mut b, 1, true);
    let f = v.ino("f");
    is_refused(v.open_file(f, RW));
    let owner = |by| SetAttr { uid: Some(0), by, ..SetAttr::default() };
    is_refused(v.setattr(f, None, &owner(Some(THEIRS))));
    v.setattr(f, None, &owner(Some(0))).unwrap();
    assert_eq!(v.get("d/g"), b"content");
    lab.end(&mut b, v);
    assert_eq!(at[0].metadata().unwrap().uid(), 0);
}

/// A store that numbers the names of one file differently, and a crash between two names, show two inodes of it: both
/// names are its.
#[test]
fn names_of_one_file_with_two_inodes_are_both_its_names() {
    for hides_births in [true, false] {
        let lab = Lab::new();
        if hides_births {
            lab.backend.faults().hide_births();
        }
        let mut a = Host::default();
        let v = lab.turn(&mut a, 1, true);
        let (f, at) = with_two_names(&lab, &v);
        lab.end(&mut a, v);
        let beside = at[1].with_file_name("beside");
        fs::copy(&at[1], &beside).unwrap();
        fs::rename(&beside, &at[1]).unwrap();
        let v = lab.turn(&mut a, 1, true);
        for _ in 0..2 {
            assert_eq!(["f", "d/g"].map(|name| v.ino(name)), [f, f]);
            assert_eq!(["f", "d/g"].map(|name| v.get(name)), [b"content", b"content"]);
        }
        common::anchored::mv(&v, "d/g", "h", RenameMode::NoReplace).unwrap();
        v.unlink(ROOT, n("f")).unwrap();
        assert_eq!(v.get("h"), b"content");
        v.unlink(ROOT, n("h")).unwrap();
        assert!(matches!(v.find("h"), Err(VaultError::NotFound)));
        lab.end(&mut a, v);
        lab.opened(&[1]).clean();
    }
}

/// The same of a link whose re-keying is cut off between two names: none is called stale, also on a host that has seen
/// the others.
#[test]
fn a_link_that_was_replaced_under_one_name_is_read_under_both() {
    let mut cut = 0;
    for nth in 1.. {
        let lab = Lab::new();
        let mut a = Host::default();
        let v = lab.turn(&mut a, 1, true);
        v.symlink(ROOT, n("l"), b"target", me()).unwrap();
        v.link(v.ino("l"), v.dir("d"), n("m")).unwrap();
        lab.end(&mut a, v);
        let v = lab.turn(&mut a, 2, true);
        let faults = lab.backend.faults();
        let failing = faults.calls(Call::Rename) + nth;
        faults.rule(move |c| (c.call == Call::Rename && c.nth == failing).then_some(Fault::Errno(libc::EIO)));
        let done = v.rekey(Rekey::Outer, None, &Quiet);
        cut += usize::from(done.is_ok_and(|done| done.failed > 0));
        let was_reached = faults.calls(Call::Rename) >= failing;
        faults.clear_rules();
        for name in ["l", "d/m", "l"] {
            assert_eq!(v.readlink(v.ino(name)).unwrap(), b"target", "{nth}: {name}");
        }
        lab.end(&mut a, v);
        let v = lab.turn(&mut a, 2, true);
        for name in ["d/m", "l", "d/m"] {
            assert_eq!(v.readlink(v.ino(name)).unwrap(), b"target", "{nth}: {name}");
        }
        let done = v.rekey(Rekey::Outer, None, &Quiet).unwrap();
        assert!(done.complete && done.failed == 0, "{nth}: {done:?}");
        assert_eq!(["l", "d/m"].map(|name| v.readlink(v.ino(name)).unwrap()), [b"target", b"target"]);
        lab.end(&mut a, v);
        if !was_reached {
            break;
        }
    }
    assert!(cut >= 2, "{cut}");
}

/// A turn that only looks finds what another host has moved, whoever the store says owns it: it may keep no owners.
#[test]
fn what_was_moved_is_found_in_a_turn_that_only_looks() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let v = lab.turn(&mut a, 1, true);
    let (_, handle) = v.new_file("f");
    v.write(handle, 0, b"content").unwrap();
    v.fsync(handle, false).unwrap();
    let d = v.dir("d");
    let listing = v.open_dir(d).unwrap();
    lab.end(&mut a, v);
    let v = lab.turn(&mut b, 1, true);
    common::anchored::mv(&v, "f", "f2", RenameMode::NoReplace).unwrap();
    common::anchored::mv(&v, "d", "d2", RenameMode::NoReplace).unwrap();
    let at = ["f2", "d2"].map(|name| stored(&lab, &v, name));
    lab.end(&mut b, v);
    at.iter().for_each(|at| chown(at, Some(THEIRS), None).unwrap());
    let v = lab.look(&mut a);
    assert_eq!(content_of(&v, handle), b"content");
    v.getattr(d, Some(listing)).unwrap();
    v.getattr(d, None).unwrap();
    v.close().unwrap();
}

pub(crate) fn content_of(v: &Vault, handle: HandleId) -> Vec<u8> {
    let mut data = vec![0; 100];
    let len = v.read(handle, 0, &mut data).unwrap();
    data.truncate(len);
    data
}
