//! Modes and owners of an anchored vault, and what a user does who can write to a directory of the store: other users'
//! entries lie in the place of their own (`docs/threat-model.md`, "Someone who may write to the backing directory").
use crate::anchored::both;
use crate::common;

use common::anchored::*;
use common::*;
use lamassu_anchor::table::MemoryTable;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{ByName, FaultBackend, MemoryBackend};
use lamassu_vault::*;
use std::ffi::OsStr;
use std::sync::Arc;

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("NOTE: only root's vaults can give entries away: NOT tested");
    }
    is_root
}

fn give(v: &Vault, path: &str, uid: u32) {
    v.setattr(v.ino(path), None, &SetAttr { uid: Some(uid), gid: Some(uid), ..SetAttr::default() }).unwrap();
}

#[test]
fn modes_and_owners_are_the_newest_and_nothing_in_the_store_is_given_away() {
    both(|lab, v| {
        v.new_file("f");
        v.dir("d");
        v.mknod(ROOT, n("p"), Kind::Fifo, 0o600, 0, me()).unwrap();
        v.setattr(v.ino("f"), None, &SetAttr { mode: Some(0o640), uid: Some(7), ..SetAttr::default() }).unwrap();
        v.close().unwrap();
        let reader = lab.read_only();
        let v = lab.open();
        let (root, f) = lab.stored(&v, "f");
        let d = lab.stored(&v, "d").1;
        let p = lab.stored(&v, "p").1;
        root.set_mode_entry(&f, 0o4777).unwrap();
        root.set_owner_entry(&f, Some(8), None).unwrap();
        root.set_mode_entry(&d, 0o777).unwrap();
        root.set_owner_entry(&p, None, Some(99)).unwrap();
        for v in [&reader, &v] {
            let attr = v.find("f").unwrap().attr;
            assert_eq!((attr.mode, attr.uid), (0o640, 7));
            assert_eq!(v.find("d").unwrap().attr.mode, 0o755);
            assert_eq!(v.find("d").unwrap().attr.nlink, 1);
            assert_eq!(v.find("p").unwrap().attr.gid, me().gid);
        }
        // In the store permissions are taken away, and nothing is given to anybody.
        let st = root.stat_entry(&f).unwrap();
        assert_eq!((st.mode, st.uid), (0o4777, 8));
        assert_eq!(root.stat_entry(&d).unwrap().mode, 0o755);
        assert_eq!(root.stat_entry(&p).unwrap().gid, 99);
        root.set_mode_entry(&d, 0o700).unwrap();
        assert_eq!(lab.read_only().find("d").unwrap().attr.mode, 0o755);
        assert_eq!(v.find("d").unwrap().attr.mode, 0o755);
        assert_eq!(root.stat_entry(&d).unwrap().mode, 0o700);
        // Also of what is open, and of what is known by its number.
        let ino = v.ino("f");
        root.set_owner_entry(&f, Some(7), None).unwrap();
        let handle = v.open_file(ino, RW).unwrap();
        root.set_mode_entry(&f, 0o777).unwrap();
        assert_eq!(v.getattr(ino, Some(handle)).unwrap().mode, 0o640);
        assert_eq!(v.getattr(v.ino("d"), None).unwrap().mode, 0o755);
        v.release(handle).unwrap();
    });
}

/// A user who can write to a directory of the store puts an entry of root's in the place of one of their own.
#[test]
fn what_lies_in_the_place_of_an_entry_is_not_given_to_its_owner() {
    if !is_root() {
        return;
    }
    both(|lab, v| {
        let theirs = SetAttr { mode: Some(0o777), uid: Some(7), gid: Some(7), ..SetAttr::default() };
        for (name, mine) in [("d", "my d"), ("p", "my p"), ("f", "my f")] {
            for name in [name, mine] {
                match &name[name.len() - 1..] {
                    "d" => drop(v.dir(name)),
                    "p" => drop(v.mknod(ROOT, n(name), Kind::Fifo, 0o600, 0, me()).unwrap()),
                    _ => drop(v.new_file(name)),
                }
                let private = SetAttr { mode: Some(0o700), ..SetAttr::default() };
                v.setattr(v.ino(name), None, &private).unwrap();
            }
            v.setattr(v.ino(name), None, &theirs).unwrap();
        }
        let (root, _) = lab.stored(&v, "d");
        let pairs = [("d", "my d"), ("p", "my p"), ("f", "my f")]
            .map(|(name, mine)| (name, lab.stored(&v, name).1, lab.stored(&v, mine).1));
        v.close().unwrap();
        let len = root.stat_entry(&pairs[2].2).unwrap().len;
        for (_, theirs, mine) in &pairs {
            root.rename(theirs, &*root, mine, RenameMode::Exchange).unwrap();
        }
        let v = lab.open();
        for (name, stored, _) in &pairs {
            // Whatever is shown, and whatever its owner asks for.
            if let Ok(found) = v.find(name) {
                for by in [None, Some(7)] {
                    let set = SetAttr { by, ..theirs };
                    v.setattr(found.attr.ino, None, &set).unwrap_err();
                    let touch = SetAttr { mtime: Some(SetTime::Now), by, ..SetAttr::default() };
                    v.setattr(found.attr.ino, None, &touch).unwrap_err();
                }
                v.set_xattr(found.attr.ino, n("user.note"), b"theirs", SetXattr::Any).unwrap_err();
                if found.attr.kind == Kind::File {
                    // Read, it may be recovered as its row says. Nothing is written into it for that.
                    v.open_file(found.attr.ino, RO).and_then(|handle| v.release(handle)).ok();
                    v.open_file(found.attr.ino, RW).unwrap_err();
                    v.setattr(found.attr.ino, None, &SetAttr { size: Some(9000), ..SetAttr::default() }).unwrap_err();
                }
            }
            let st = root.stat_entry(stored).unwrap();
            assert_eq!((st.uid, st.gid, st.mode), (me().uid, me().gid, 0o700), "{name}");
            assert!(st.kind != Kind::File || st.len == len, "{name}");
        }
    });
}

/// Directories: root's, with something in it, lies where a user's empty one was.
#[test]
fn another_directory_is_neither_removed_nor_moved_in_the_place_of_one() {
    if !is_root() {
        return;
    }
    both(|lab, v| {
        for name in ["p", "p/theirs", "p/other", "p/mine"] {
            v.dir(name);
        }
        let (_, handle) = v.new_file("p/mine/f");
        v.write(handle, 0, b"of root").unwrap();
        v.release(handle).unwrap();
        ["p", "p/theirs", "p/other"].iter().for_each(|name| give(&v, name, 7));
        let (p, mine) = lab.stored(&v, "p/mine");
        let theirs = lab.stored(&v, "p/theirs").1;
        v.close().unwrap();
        p.rename(&theirs, &*p, &mine, RenameMode::Exchange).unwrap();
        let before = p.open_dir(&theirs).unwrap().read_dir().unwrap().len();
        // As a user would: what they know is the name.
        let v = lab.open();
        rmdir(&v, "p/theirs").unwrap_err();
        mv(&v, "p/theirs", "p/other/here", RenameMode::NoReplace).unwrap_err();
        mv(&v, "p/other", "p/theirs", RenameMode::Replace).unwrap_err();
        mv(&v, "p/other", "p/theirs", RenameMode::Exchange).unwrap_err();
        v.sync_all().unwrap();
        let _ = v.close();
        let left: Vec<_> = p.open_dir(&theirs).unwrap().read_dir().unwrap();
        assert_eq!(left.len(), before, "{left:?}");
        // Put back, all is there.
        p.rename(&theirs, &*p, &mine, RenameMode::Exchange).unwrap();
        let v = lab.open();
        assert_eq!(v.get("p/mine/f"), b"of root");
        rmdir(&v, "p/theirs").unwrap();
    });
}

#[test]
fn what_root_has_in_a_directory_with_plain_names_is_not_moved_away_when_that_is_removed() {
    if !is_root() {
        return;
    }
    let (lab, v) = Lab::new(Recipe::plain());
    v.dir("theirs");
    give(&v, "theirs", 7);
    let (root, theirs) = lab.stored(&v, "theirs");
    let inside = root.open_dir(&theirs).unwrap();
    for (name, uid) in [("junk", 7), ("of-root", 0)] {
        inside.create_file(OsStr::new(name)).unwrap().set_owner(Some(uid), Some(uid)).unwrap();
    }
    let _ = rmdir(&v, "theirs");
    v.sync_all().unwrap();
    inside.stat_entry(OsStr::new("of-root")).unwrap();
    // Where it stays, nothing takes its place.
    v.sync_all().unwrap();
    assert!(root.stat_entry(&theirs).is_ok());
    let _ = v.close();
}

/// Content tells files apart, whatever the owner: a crash may have left another one.
#[test]
fn a_file_is_known_by_its_content_and_an_empty_one_by_its_owner() {
    if !is_root() {
        return;
    }
    both(|lab, v| {
        for name in ["full", "empty"] {
            let (_, handle) = v.new_file(name);
            if name == "full" {
                v.write(handle, 0, b"content").unwrap();
            }
            v.release(handle).unwrap();
            give(&v, name, 7);
        }
        v.sync_all().unwrap();
        let (root, full) = lab.stored(&v, "full");
        let empty = lab.stored(&v, "empty").1;
        v.close().unwrap();
        for name in [&full, &empty] {
            root.set_owner_entry(name, Some(8), None).unwrap();
        }
        let v = lab.open();
        let handle = v.open_file(v.ino("full"), RW).unwrap();
        v.write(handle, 0, b"C").unwrap();
        v.release(handle).unwrap();
        let empty = v.ino("empty");
        v.open_file(empty, RW).unwrap_err();
        v.link(empty, ROOT, n("again")).unwrap_err();
        // Of its group alone nothing is refused, nor is root.
        let root_gives = SetAttr { uid: Some(7), by: Some(0), ..SetAttr::default() };
        v.setattr(empty, None, &root_gives).unwrap();
        root.set_owner_entry(&lab.stored(&v, "empty").1, None, Some(99)).unwrap();
        let handle = v.open_file(empty, RW).unwrap();
        v.release(handle).unwrap();
        v.close().unwrap();
        assert_eq!(lab.open().get("full"), b"Content");
    });
}

/// A file that others have names for is not emptied in the place of one's own.
#[test]
fn another_file_with_more_names_is_not_emptied() {
    if !is_root() {
        return;
    }
    both(|lab, v| {
        for name in ["f", "g"] {
            let (_, handle) = v.new_file(name);
            v.write(handle, 0, name.as_bytes()).unwrap();
            v.release(handle).unwrap();
        }
        v.link(v.ino("g"), ROOT, n("also g")).unwrap();
        let (root, f) = lab.stored(&v, "f");
        let g = lab.stored(&v, "g").1;
        v.close().unwrap();
        root.rename(&f, &*root, &g, RenameMode::Exchange).unwrap();
        let v = lab.open();
        if let Ok(entry) = v.find("f") {
            v.open_file(entry.attr.ino, Access { truncate: true, ..RW }).unwrap_err();
            let empty = SetAttr { size: Some(0), ..SetAttr::default() };
            v.setattr(entry.attr.ino, None, &empty).unwrap_err();
        }
        let _ = v.close();
        root.rename(&f, &*root, &g, RenameMode::Exchange).unwrap();
        assert_eq!(lab.open().get("also g"), b"g");
    });
}

/// The same in the place of an empty file, whose row has no page: by the owner, and by the number of names. Nor through
/// a handle, nor where the object has as many names, or has just lost one.
#[test]
fn another_file_with_more_names_is_not_emptied_whatever_is_in_its_place() {
    if !is_root() {
        return;
    }
    for owner in [me().uid, 7] {
        for case in ["empty", "full", "two names", "a name goes"] {
            both(|lab, v| {
                let (_, handle) = v.new_file("g");
                v.write(handle, 0, b"g").unwrap();
                v.release(handle).unwrap();
                v.link(v.ino("g"), ROOT, n("also g")).unwrap();
                let (_, handle) = v.new_file("f");
                if case != "empty" {
                    v.write(handle, 0, b"f").unwrap();
                }
                v.release(handle).unwrap();
                if matches!(case, "two names" | "a name goes") {
                    v.link(v.ino("f"), ROOT, n("also f")).unwrap();
                }
                give(&v, "g", owner);
                let (root, f) = lab.stored(&v, "f");
                let g = lab.stored(&v, "g").1;
                v.close().unwrap();
                root.rename(&f, &*root, &g, RenameMode::Exchange).unwrap();
                let v = lab.open();
                if case == "a name goes" {
                    rm(&v, "also f").unwrap();
                }
                if let Ok(entry) = v.find("f") {
                    let empty = SetAttr { size: Some(0), ..SetAttr::default() };
                    if let Ok(handle) = v.open_file(entry.attr.ino, RW) {
                        v.setattr(entry.attr.ino, Some(handle), &empty).unwrap_err();
                        v.write(handle, 1 << 20, b"far behind").unwrap_err();
                        v.setattr(entry.attr.ino, Some(handle), &empty).unwrap_err();
                        let _ = v.release(handle);
                    }
                    v.open_file(entry.attr.ino, Access { truncate: true, ..RW }).unwrap_err();
                    v.setattr(entry.attr.ino, None, &empty).unwrap_err();
                }
                let _ = v.close();
                root.rename(&f, &*root, &g, RenameMode::Exchange).unwrap();
                assert_eq!(lab.open().get("also g"), b"g", "{case}");
            });
        }
    }
}

/// A file with two names, whose first pages are a hole, is emptied as any other: by its own names.
#[test]
fn sparse_files_with_more_names_are_emptied() {
    both(|_, v| {
        let (_, handle) = v.new_file("f");
        v.write(handle, 40 << 20, b"behind a hole").unwrap();
        v.release(handle).unwrap();
        v.link(v.ino("f"), ROOT, n("g")).unwrap();
        v.sync_all().unwrap();
        let handle = v.open_file(v.ino("g"), Access { truncate: true, ..RW }).unwrap();
        let empty = SetAttr { size: Some(0), ..SetAttr::default() };
        v.setattr(v.ino("f"), Some(handle), &empty).unwrap();
        v.setattr(v.ino("f"), None, &empty).unwrap();
        v.release(handle).unwrap();
        v.close().unwrap();
    });
}

/// With plain names nothing but owner and mode tells directories apart: one that all may write to is root's, and a
/// private one of root's or of another user's lies in its place.
#[test]
fn a_private_directory_with_plain_names_is_not_opened_in_the_place_of_one_of_root_s() {
    if !is_root() {
        return;
    }
    for owner in [0, 8] {
        let (lab, v) = Lab::new(Recipe::plain());
        for name in ["shared", "private", "private/sub", "other"] {
            v.dir(name);
        }
        v.new_file("private/f");
        give(&v, "private", owner);
        give(&v, "other", 7);
        for (name, mode) in [("shared", 0o777), ("private", 0o700)] {
            v.setattr(v.ino(name), None, &SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
        }
        let root = lab.stored(&v, "shared").0;
        v.close().unwrap();
        root.rename(n("shared"), &*root, n("private"), RenameMode::Exchange).unwrap();
        let v = lab.open();
        let shared = v.find("shared").unwrap().attr.ino;
        v.create(shared, n("f"), 0o600, RW, me()).map(drop).unwrap_err();
        v.mkdir(shared, n("sub"), 0o700, me()).map(drop).unwrap_err();
        mv(&v, "other", "shared", RenameMode::Replace).unwrap_err();
        mv(&v, "shared", "other/here", RenameMode::NoReplace).unwrap_err();
        rmdir(&v, "shared").unwrap_err();
        let _ = v.close();
        root.rename(n("shared"), &*root, n("private"), RenameMode::Exchange).unwrap();
        let v = lab.open();
        v.find("private/f").unwrap();
        v.find("private/sub").unwrap();
    }
}

/// A name that was removed stays in the store until the anchor has that: the file has more names there for a while.
#[test]
fn a_file_that_has_just_lost_a_name_is_changed_and_linked() {
    both(|_, v| {
        let (_, handle) = v.new_file("f");
        v.write(handle, 0, &[1; 9000]).unwrap();
        v.release(handle).unwrap();
        give(&v, "f", if rustix::process::geteuid().is_root() { 7 } else { me().uid });
        // Before anything of it is committed, and after.
        for name in ["g", "i"] {
            v.link(v.ino("f"), ROOT, n(name)).unwrap();
            rm(&v, name).unwrap();
            let handle = v.open_file(v.ino("f"), RW).unwrap();
            v.write(handle, 9000, &[2; 20_000]).unwrap();
            v.flush(handle).unwrap();
            v.release(handle).unwrap();
            v.setattr(v.ino("f"), None, &SetAttr { size: Some(0), ..SetAttr::default() }).unwrap();
            v.sync_all().unwrap();
        }
        v.link(v.ino("f"), ROOT, n("g")).unwrap();
        v.sync_all().unwrap();
        rm(&v, "g").unwrap();
        let f = v.ino("f");
        v.setattr(f, None, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
        v.set_xattr(f, n("user.note"), b"x", SetXattr::Any).unwrap();
        v.link(f, ROOT, n("h")).unwrap();
        let handle = v.open_file(f, RW).unwrap();
        v.release(handle).unwrap();
        v.setattr(f, None, &SetAttr { size: Some(0), ..SetAttr::default() }).unwrap();
        v.close().unwrap();
    });
}

/// A store with one owner for all (FAT, SMB, NFS with `root_squash`) tells nothing by owners, and gives nothing away.
#[test]
fn over_a_store_that_keeps_no_owners_files_are_written_as_anywhere() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let store = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
        let faults = store.faults().clone();
        let (lab, v) = Lab::over(recipe, store, Arc::new(MemoryTable::default()));
        v.dir("d");
        v.new_file("d/f");
        let (d, f) = lab.stored(&v, "d/f");
        let (root, dir) = lab.stored(&v, "d");
        give(&v, "d", 7);
        give(&v, "d/f", 7);
        v.close().unwrap();
        d.set_owner_entry(&f, Some(3), Some(3)).unwrap();
        root.set_owner_entry(&dir, Some(3), Some(3)).unwrap();
        faults.rule(|c| (c.call == Call::SetOwner).then_some(Fault::Errno(libc::EPERM)));
        // A reader asks by no file of its own.
        let (reader, changes) = (lab.read_only(), faults.changes());
        assert_eq!(reader.list("d"), ["f"]);
        assert_eq!((reader.get("d/f"), faults.changes()), (Vec::new(), changes));
        drop(reader);
        let v = lab.open();
        assert_eq!(v.find("d/f").unwrap().attr.uid, 7);
        let handle = v.open_file(v.ino("d/f"), RW).unwrap();
        v.write(handle, 0, b"content").unwrap();
        v.release(handle).unwrap();
        v.set_xattr(v.ino("d"), n("user.note"), b"x", SetXattr::Any).unwrap();
        rm(&v, "d/f").unwrap();
        rmdir(&v, "d").unwrap();
        v.close().unwrap();
    }
}

/// What is put away there may be another user's.
#[test]
fn a_directory_of_another_user_for_what_is_lost_takes_nothing() {
    if !is_root() {
        return;
    }
    let (lab, v) = Lab::new(Recipe::default());
    v.dir("d");
    let (root, d) = lab.stored(&v, "d");
    let stray = root.open_dir(&d).unwrap();
    drop(stray.create_file(OsStr::new("stray")).unwrap());
    let lost = OsStr::new(lamassu_format::name::LOST);
    root.make_dir(lost, 0o700).unwrap();
    root.set_owner_entry(lost, Some(7), None).unwrap();
    let _ = rmdir(&v, "d");
    let _ = v.sync_all();
    assert_eq!(root.open_dir(lost).unwrap().read_dir().unwrap().len(), 0);
    stray.stat_entry(OsStr::new("stray")).unwrap();
    // It is mended by whoever looks at it.
    root.set_owner_entry(lost, Some(me().uid), None).unwrap();
    let _ = rmdir(&v, "d");
    v.sync_all().unwrap();
    assert_eq!(root.open_dir(lost).unwrap().read_dir().unwrap().len(), 1);
    v.close().unwrap();
}
