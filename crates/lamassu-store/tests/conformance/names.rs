//! Entries, links, renames and listings.

use super::{Store, expect_errno, name, rename};
use lamassu_store::backend::ByName;
use lamassu_store::backend::{Backend, BackendDir, Kind, MemoryBackend, RenameMode, SetTime, Stat, Time};
use std::collections::BTreeSet;
use std::sync::Arc;

fn list(dir: &Arc<dyn BackendDir>) -> Vec<String> {
    let mut names: Vec<String> = dir.read_dir().unwrap().into_iter().map(|e| e.name.into_string().unwrap()).collect();
    names.sort();
    names
}

fn put(dir: &Arc<dyn BackendDir>, file: &str, data: &str) {
    dir.create_file(name(file)).unwrap().write_at(0, data.as_bytes()).unwrap();
}

fn content(dir: &Arc<dyn BackendDir>, file: &str) -> String {
    let mut buf = vec![0; 100];
    let len = dir.open_file(name(file), false).unwrap().read_at(0, &mut buf).unwrap();
    buf.truncate(len);
    String::from_utf8(buf).unwrap()
}

/// A file `file`, an empty directory `empty`, a directory `full` with a file, a link to each, a fifo.
fn populated(store: &Store) -> Arc<dyn BackendDir> {
    let root = store.root();
    put(&root, "file", "file");
    root.make_dir(name("empty"), 0o700).unwrap();
    root.make_dir(name("full"), 0o700).unwrap();
    put(&root.open_dir(name("full")).unwrap(), "inner", "inner");
    root.make_symlink(name("to-file"), name("file")).unwrap();
    root.make_symlink(name("to-full"), name("full")).unwrap();
    root.make_node(name("fifo"), Kind::Fifo, 0).unwrap();
    root
}

pub fn creates_exclusively(store: &Store) {
    let root = populated(store);
    for taken in ["file", "empty", "to-file", "fifo"] {
        expect_errno(root.create_file(name(taken)), libc::EEXIST);
        expect_errno(root.make_dir(name(taken), 0o700), libc::EEXIST);
        expect_errno(root.make_symlink(name(taken), name("x")), libc::EEXIST);
        expect_errno(root.make_node(name(taken), Kind::Fifo, 0), libc::EEXIST);
    }
    assert_eq!(content(&root, "file"), "file");
}

pub fn opens_only_regular_files(store: &Store) {
    let root = populated(store);
    for write in [false, true] {
        assert!(root.open_file(name("file"), write).is_ok());
        expect_errno(root.open_file(name("none"), write), libc::ENOENT);
        expect_errno(root.open_file(name("full"), write), libc::EISDIR);
        expect_errno(root.open_file(name("to-file"), write), libc::ELOOP);
        expect_errno(root.open_file(name("fifo"), write), libc::EINVAL);
        let seen = |entry| root.stat_entry(name(entry)).unwrap();
        assert!(root.open_same(name("file"), &seen("file"), write).unwrap().is_some());
        assert!(root.open_same(name("fifo"), &seen("fifo"), write).is_err());
        // What is there by now is not what was seen: another file, or none.
        put(&root, "other", "other");
        assert!(root.open_same(name("file"), &seen("other"), write).unwrap().is_none());
        assert!(!matches!(root.open_same(name("fifo"), &seen("other"), write), Ok(Some(_))));
        expect_errno(root.open_same(name("none"), &seen("other"), write), libc::ENOENT);
        // An earlier inode of that number was born at another time.
        let earlier = Stat { born: 1, ..seen("file") };
        let is_told = seen("file").born != 0;
        assert_eq!(root.open_same(name("file"), &earlier, write).unwrap().is_none(), is_told);
        root.unlink(name("other")).unwrap();
    }
}

pub fn stat_and_open_opens_full_regular_files_alone(store: &Store) {
    let root = populated(store);
    for entry in ["file", "empty", "full", "to-file", "fifo"] {
        let (st, opened) = root.stat_and_open(name(entry)).unwrap();
        assert_eq!(st, root.stat_entry(name(entry)).unwrap());
        assert_eq!(opened.is_some(), entry == "file", "{entry}");
        let mut text = [0; 8];
        let len = opened.map_or(0, |file| file.read_at(0, &mut text).unwrap());
        assert_eq!(&text[..len], if entry == "file" { &b"file"[..] } else { b"" });
    }
    expect_errno(root.stat_and_open(name("none")), libc::ENOENT);
}

pub fn opens_only_directories(store: &Store) {
    let root = populated(store);
    assert_eq!(list(&root.open_dir(name("full")).unwrap()), ["inner"]);
    expect_errno(root.open_dir(name("none")), libc::ENOENT);
    expect_errno(root.open_dir(name("file")), libc::ENOTDIR);
    expect_errno(root.open_dir(name("to-full")), libc::ENOTDIR);
    expect_errno(root.open_dir(name("fifo")), libc::ENOTDIR);
}

pub fn never_follows_links(store: &Store) {
    let root = populated(store);
    assert_eq!(root.read_link(name("to-full")).unwrap(), "full");
    expect_errno(root.read_link(name("file")), libc::EINVAL);
    assert_eq!(root.stat_entry(name("to-file")).unwrap().kind, Kind::Symlink);
    assert_eq!(root.stat_entry(name("to-file")).unwrap().len, 4);
    expect_errno(root.set_mode_entry(name("to-file"), 0o777), libc::EOPNOTSUPP);
    assert_eq!(root.stat_entry(name("file")).unwrap().mode, 0o600);
    // A second name of the link, not of what it leads to.
    root.link(name("to-file"), &*root, name("second")).unwrap();
    assert_eq!(root.stat_entry(name("second")).unwrap().kind, Kind::Symlink);
    root.unlink(name("to-full")).unwrap();
    assert_eq!(list(&root.open_dir(name("full")).unwrap()), ["inner"]);
    expect_errno(root.remove_dir(name("to-file")), libc::ENOTDIR);
}

pub fn refuses_names_that_are_paths(store: &Store) {
    let root = populated(store);
    for bad in ["", ".", "..", "full/inner", "/", "/etc", "a\0b"] {
        let bad = name(bad);
        expect_errno(root.open_dir(bad), libc::EINVAL);
        expect_errno(root.open_file(bad, false), libc::EINVAL);
        expect_errno(root.create_file(bad), libc::EINVAL);
        expect_errno(root.make_dir(bad, 0o700), libc::EINVAL);
        expect_errno(root.make_node(bad, Kind::Fifo, 0), libc::EINVAL);
        expect_errno(root.make_symlink(bad, name("x")), libc::EINVAL);
        expect_errno(root.read_link(bad), libc::EINVAL);
        expect_errno(root.link(bad, &*root, name("x")), libc::EINVAL);
        expect_errno(root.link(name("file"), &*root, bad), libc::EINVAL);
        expect_errno(root.rename(bad, &*root, name("x"), RenameMode::Replace), libc::EINVAL);
        expect_errno(root.rename(name("file"), &*root, bad, RenameMode::Replace), libc::EINVAL);
        expect_errno(root.unlink(bad), libc::EINVAL);
        expect_errno(root.remove_dir(bad), libc::EINVAL);
        expect_errno(root.stat_entry(bad), libc::EINVAL);
        expect_errno(root.set_mode_entry(bad, 0), libc::EINVAL);
        expect_errno(root.set_owner_entry(bad, None, None), libc::EINVAL);
        expect_errno(root.list_xattr_entry(bad), libc::EINVAL);
    }
    let long = "n".repeat(256);
    expect_errno(root.create_file(name(&long)), libc::ENAMETOOLONG);
    root.create_file(name(&long[1..])).unwrap();
}

pub fn lists_everything_once(store: &Store) {
    let root = populated(store);
    assert_eq!(list(&root), ["empty", "fifo", "file", "full", "to-file", "to-full"]);
    assert_eq!(list(&root.open_dir(name("empty")).unwrap()), [""; 0]);
    for entry in root.read_dir().unwrap() {
        let stat = root.stat_entry(&entry.name).unwrap();
        assert_eq!(entry.ino, stat.ino);
        assert!(entry.kind.is_none_or(|kind| kind == stat.kind));
    }
}

pub fn large_directory(store: &Store) {
    let root = store.root();
    let stored_name = |i: usize| format!("{i:0100}");
    for i in 0..3000 {
        root.make_symlink(name(&stored_name(i)), name("x")).unwrap();
    }
    let expected: Vec<String> = (0..3000).map(stored_name).collect();
    assert_eq!(list(&root), expected);
}

pub fn listings_do_not_disturb_one_another(store: &Store) {
    let root = store.root();
    for i in 0..500 {
        root.create_file(name(&format!("file-{i:0200}"))).unwrap();
    }
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let names: BTreeSet<_> = root.read_dir().unwrap().into_iter().map(|e| e.name).collect();
                    assert_eq!(names.len(), 500);
                }
            });
        }
    });
}

pub fn removes(store: &Store) {
    let root = populated(store);
    expect_errno(root.unlink(name("none")), libc::ENOENT);
    expect_errno(root.unlink(name("empty")), libc::EISDIR);
    expect_errno(root.remove_dir(name("none")), libc::ENOENT);
    expect_errno(root.remove_dir(name("file")), libc::ENOTDIR);
    expect_errno(root.remove_dir(name("full")), libc::ENOTEMPTY);
    root.remove_dir(name("empty")).unwrap();
    for gone in ["file", "to-file", "to-full", "fifo"] {
        root.unlink(name(gone)).unwrap();
    }
    assert_eq!(list(&root), ["full"]);
}

pub fn hard_links(store: &Store) {
    let root = populated(store);
    let full = root.open_dir(name("full")).unwrap();
    root.link(name("file"), &*full, name("second")).unwrap();
    let (a, b) = (root.stat_entry(name("file")).unwrap(), full.stat_entry(name("second")).unwrap());
    assert_eq!((a.ino, a.nlink), (b.ino, 2));
    full.open_file(name("second"), true).unwrap().write_at(0, b"FILE").unwrap();
    assert_eq!(content(&root, "file"), "FILE");
    root.unlink(name("file")).unwrap();
    assert_eq!(content(&full, "second"), "FILE");
    assert_eq!(full.stat_entry(name("second")).unwrap().nlink, 1);
    expect_errno(root.link(name("none"), &*root, name("x")), libc::ENOENT);
    expect_errno(root.link(name("fifo"), &*root, name("to-file")), libc::EEXIST);
    expect_errno(root.link(name("full"), &*root, name("x")), libc::EPERM);
}

pub fn rename_replaces(store: &Store) {
    let root = populated(store);
    rename(&root, "file", "file2", RenameMode::Replace).unwrap();
    expect_errno(root.stat_entry(name("file")), libc::ENOENT);
    put(&root, "other", "other");
    let held = root.open_file(name("file2"), false).unwrap();
    rename(&root, "other", "file2", RenameMode::Replace).unwrap();
    assert_eq!(content(&root, "file2"), "other");
    let mut buf = [0; 4];
    assert_eq!(held.read_at(0, &mut buf).unwrap(), 4);
    assert_eq!(&buf, b"file");
    rename(&root, "full", "empty", RenameMode::Replace).unwrap();
    assert_eq!(list(&root.open_dir(name("empty")).unwrap()), ["inner"]);
    rename(&root, "fifo", "file2", RenameMode::Replace).unwrap();
    assert_eq!(root.stat_entry(name("file2")).unwrap().kind, Kind::Fifo);
    // Two names of one file: nothing happens.
    root.link(name("to-file"), &*root, name("same")).unwrap();
    rename(&root, "to-file", "same", RenameMode::Replace).unwrap();
    assert_eq!(list(&root), ["empty", "file2", "same", "to-file", "to-full"]);
    expect_errno(rename(&root, "none", "x", RenameMode::Replace), libc::ENOENT);
}

pub fn rename_noreplace(store: &Store) {
    let root = populated(store);
    expect_errno(rename(&root, "file", "fifo", RenameMode::NoReplace), libc::EEXIST);
    expect_errno(rename(&root, "file", "to-full", RenameMode::NoReplace), libc::EEXIST);
    expect_errno(rename(&root, "file", "file", RenameMode::NoReplace), libc::EEXIST);
    expect_errno(rename(&root, "none", "x", RenameMode::NoReplace), libc::ENOENT);
    rename(&root, "file", "moved", RenameMode::NoReplace).unwrap();
    assert_eq!(content(&root, "moved"), "file");
}

pub fn rename_exchanges(store: &Store) {
    let root = populated(store);
    expect_errno(rename(&root, "file", "none", RenameMode::Exchange), libc::ENOENT);
    expect_errno(rename(&root, "none", "file", RenameMode::Exchange), libc::ENOENT);
    rename(&root, "file", "full", RenameMode::Exchange).unwrap();
    assert_eq!(content(&root, "full"), "file");
    assert_eq!(list(&root.open_dir(name("file")).unwrap()), ["inner"]);
    let inner = root.open_dir(name("file")).unwrap();
    root.rename(name("empty"), &*inner, name("inner"), RenameMode::Exchange).unwrap();
    assert_eq!(content(&root, "empty"), "inner");
    inner.open_dir(name("inner")).unwrap();
}

pub fn rename_refuses_loops_and_kinds(store: &Store) {
    let root = populated(store);
    let full = root.open_dir(name("full")).unwrap();
    full.make_dir(name("deep"), 0o700).unwrap();
    let deep = full.open_dir(name("deep")).unwrap();
    expect_errno(root.rename(name("full"), &*deep, name("x"), RenameMode::Replace), libc::EINVAL);
    expect_errno(root.rename(name("full"), &*full, name("x"), RenameMode::NoReplace), libc::EINVAL);
    expect_errno(root.rename(name("full"), &*full, name("deep"), RenameMode::Exchange), libc::EINVAL);
    expect_errno(full.rename(name("inner"), &*root, name("full"), RenameMode::Exchange), libc::EINVAL);
    expect_errno(full.rename(name("deep"), &*root, name("full"), RenameMode::Replace), libc::ENOTEMPTY);
    expect_errno(rename(&root, "file", "empty", RenameMode::Replace), libc::EISDIR);
    expect_errno(rename(&root, "empty", "file", RenameMode::Replace), libc::ENOTDIR);
    expect_errno(rename(&root, "empty", "full", RenameMode::Replace), libc::ENOTEMPTY);
    assert_eq!(list(&full), ["deep", "inner"]);
}

pub fn rename_across_directories(store: &Store) {
    let root = populated(store);
    let (full, empty) = (root.open_dir(name("full")).unwrap(), root.open_dir(name("empty")).unwrap());
    full.rename(name("inner"), &*empty, name("moved"), RenameMode::Replace).unwrap();
    assert_eq!(content(&empty, "moved"), "inner");
    assert_eq!(list(&full), [""; 0]);
    root.rename(name("full"), &*empty, name("full"), RenameMode::NoReplace).unwrap();
    assert_eq!(list(&empty), ["full", "moved"]);
    // The handle follows its directory.
    put(&full, "late", "late");
    assert_eq!(list(&empty.open_dir(name("full")).unwrap()), ["late"]);
}

pub fn other_stores_are_other_devices(store: &Store) {
    let root = populated(store);
    let other = MemoryBackend::new().root();
    expect_errno(root.rename(name("file"), &*other, name("x"), RenameMode::Replace), libc::EXDEV);
    expect_errno(root.link(name("file"), &*other, name("x")), libc::EXDEV);
    assert_eq!(content(&root, "file"), "file");
}

/// What is held stays what it is, whatever its name leads to.
pub fn holds_entries(store: &Store) {
    let root = populated(store);
    let seen = root.stat_entry(name("file")).unwrap();
    let held = root.hold_same(name("file"), &seen).unwrap().expect("nobody exchanged it");
    put(&root, "other", "other");
    root.rename(name("other"), &*root, name("file"), RenameMode::Exchange).unwrap();
    assert!(root.hold_same(name("file"), &seen).unwrap().is_none(), "another one's by now");
    held.set_mode(0o640).unwrap();
    held.set_times(SetTime::Keep, SetTime::At(Time { seconds: 7, nanos: 0 })).unwrap();
    held.link(&*root, name("linked")).unwrap();
    let mode = |n: &str| root.stat_entry(name(n)).unwrap().mode;
    assert_eq!((mode("file"), mode("other"), mode("linked")), (0o600, 0o640, 0o640));
    assert_eq!(held.stat().unwrap().mtime.seconds, 7);
    let link = root.hold(name("to-file")).unwrap();
    assert_eq!(link.stat().unwrap().kind, Kind::Symlink);
    expect_errno(link.set_mode(0o777), libc::EOPNOTSUPP);
    assert_eq!(mode("file"), 0o600, "a link is not followed");
    expect_errno(root.hold(name("none")), libc::ENOENT);
    expect_errno(root.hold(name("a/b")), libc::EINVAL);
}

pub fn makes_nodes(store: &Store) {
    let root = store.root();
    root.make_node(name("fifo"), Kind::Fifo, 0).unwrap();
    root.make_node(name("socket"), Kind::Socket, 0).unwrap();
    assert_eq!(root.stat_entry(name("fifo")).unwrap().kind, Kind::Fifo);
    assert_eq!(root.stat_entry(name("fifo")).unwrap().mode, 0o600);
    assert_eq!(root.stat_entry(name("socket")).unwrap().kind, Kind::Socket);
    for kind in [Kind::File, Kind::Dir, Kind::Symlink] {
        expect_errno(root.make_node(name("x"), kind, 0), libc::EINVAL);
    }
    let null = rustix::fs::makedev(1, 3);
    match root.make_node(name("null"), Kind::CharDevice, null) {
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => {}
        other => {
            other.unwrap();
            let stat = root.stat_entry(name("null")).unwrap();
            assert_eq!((stat.kind, stat.rdev), (Kind::CharDevice, null));
            expect_errno(root.open_file(name("null"), true), libc::EINVAL);
        }
    }
}

pub fn directory_gone(store: &Store) {
    let root = populated(store);
    let empty = root.open_dir(name("empty")).unwrap();
    root.remove_dir(name("empty")).unwrap();
    expect_errno(empty.create_file(name("x")), libc::ENOENT);
    expect_errno(empty.make_dir(name("x"), 0o700), libc::ENOENT);
    expect_errno(root.rename(name("file"), &*empty, name("x"), RenameMode::Replace), libc::ENOENT);
    expect_errno(root.link(name("file"), &*empty, name("x")), libc::ENOENT);
    expect_errno(empty.stat_entry(name("x")), libc::ENOENT);
    assert_eq!(empty.stat().unwrap().nlink, 0);
}

pub fn stat_of_the_store(store: &Store) {
    let s = store.backend.stat_fs().unwrap();
    assert!(s.block_size >= 512 && s.blocks >= s.blocks_free && s.blocks_free >= s.blocks_available);
    assert_eq!(s.name_max, 255);
    assert!(store.backend.root().stat().unwrap().kind == Kind::Dir);
}
