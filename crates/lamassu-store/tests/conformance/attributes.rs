//! Modes, owners, times and extended attributes.

use super::{Store, expect_errno, name};
use lamassu_store::backend::ByName;
use lamassu_store::backend::{Kind, SetTime, Stat, Time};

fn at(seconds: i64, nanos: u32) -> SetTime {
    SetTime::At(Time { seconds, nanos })
}

pub fn modes(store: &Store) {
    let root = store.root();
    let file = root.create_file(name("f")).unwrap();
    root.make_dir(name("d"), 0o751).unwrap();
    let mode = |n: &str| root.stat_entry(name(n)).unwrap().mode;
    assert_eq!((mode("f"), mode("d")), (0o600, 0o751), "a new file is its owner's alone");
    file.set_mode(0o4711).unwrap();
    assert_eq!(file.stat().unwrap().mode, 0o4711);
    root.set_mode_entry(name("f"), 0o123).unwrap();
    assert_eq!(mode("f"), 0o123);
    let dir = root.open_dir(name("d")).unwrap();
    dir.set_mode(0o1777).unwrap();
    assert_eq!(dir.stat().unwrap().mode, 0o1777);
    root.set_mode_entry(name("d"), 0o700).unwrap();
    assert_eq!(mode("d"), 0o700);
    root.make_node(name("fifo"), Kind::Fifo, 0).unwrap();
    root.set_mode_entry(name("fifo"), 0o644).unwrap();
    assert_eq!(mode("fifo"), 0o644);
    expect_errno(root.set_mode_entry(name("none"), 0o644), libc::ENOENT);
}

pub fn owners(store: &Store) {
    let root = store.root();
    let file = root.create_file(name("f")).unwrap();
    root.make_symlink(name("l"), name("f")).unwrap();
    let before = file.stat().unwrap();
    file.set_owner(None, None).unwrap();
    file.set_owner(Some(before.uid), Some(before.gid)).unwrap();
    root.set_owner(Some(before.uid), None).unwrap();
    if !rustix::process::geteuid().is_root() {
        return;
    }
    root.set_owner_entry(name("l"), Some(1001), Some(1002)).unwrap();
    let (link, target) = (root.stat_entry(name("l")).unwrap(), file.stat().unwrap());
    assert_eq!((link.uid, link.gid), (1001, 1002));
    assert_eq!((target.uid, target.gid), (before.uid, before.gid));
    file.set_owner(None, Some(7)).unwrap();
    assert_eq!(file.stat().unwrap().gid, 7);
    root.make_dir(name("d"), 0o700).unwrap();
    let dir = root.open_dir(name("d")).unwrap();
    dir.set_owner(Some(5), Some(6)).unwrap();
    assert_eq!((dir.stat().unwrap().uid, dir.stat().unwrap().gid), (5, 6));
}

pub fn times(store: &Store) {
    let root = store.root();
    let file = root.create_file(name("f")).unwrap();
    root.make_dir(name("d"), 0o700).unwrap();
    let dir = root.open_dir(name("d")).unwrap();
    let pair = |s: Stat| (s.atime, s.mtime);
    let set = (Time { seconds: 1, nanos: 999_999_999 }, Time { seconds: 2_000_000_000, nanos: 1 });
    file.set_times(SetTime::At(set.0), SetTime::At(set.1)).unwrap();
    dir.set_times(SetTime::At(set.0), SetTime::At(set.1)).unwrap();
    assert_eq!(pair(file.stat().unwrap()), set);
    assert_eq!(pair(dir.stat().unwrap()), set);
    file.set_times(SetTime::Keep, at(-5, 7)).unwrap();
    assert_eq!(pair(file.stat().unwrap()), (set.0, Time { seconds: -5, nanos: 7 }));
    root.set_times_entry(name("d"), at(3, 3), SetTime::Keep).unwrap();
    assert_eq!(pair(dir.stat().unwrap()), (Time { seconds: 3, nanos: 3 }, set.1));
    file.set_times(SetTime::Now, SetTime::Keep).unwrap();
    assert!(file.stat().unwrap().atime.seconds > 2 && file.stat().unwrap().mtime.seconds == -5);
    expect_errno(file.set_times(at(0, 1_000_000_000), SetTime::Keep), libc::EINVAL);
    expect_errno(file.set_times(at(0, 0x3fff_fffe), SetTime::Keep), libc::EINVAL);
}

pub fn times_not_through_links(store: &Store) {
    let root = store.root();
    let file = root.create_file(name("f")).unwrap();
    file.set_times(at(10, 0), at(10, 0)).unwrap();
    root.make_symlink(name("l"), name("f")).unwrap();
    root.set_times_entry(name("l"), at(20, 0), at(21, 0)).unwrap();
    assert_eq!(root.stat_entry(name("l")).unwrap().mtime.seconds, 21);
    assert_eq!(file.stat().unwrap().mtime.seconds, 10);
}

/// Whether the store has extended attributes at all.
fn has_xattrs(store: &Store) -> bool {
    let probe = store.root().set_xattr(name("user.probe"), b"", 0);
    if matches!(&probe, Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP)) {
        return false;
    }
    probe.unwrap();
    store.root().remove_xattr(name("user.probe")).unwrap();
    true
}

pub fn xattrs_of_files(store: &Store) {
    if !has_xattrs(store) {
        return;
    }
    let file = store.root().create_file(name("f")).unwrap();
    let (a, b) = (name("user.a"), name("user.b"));
    expect_errno(file.get_xattr(a), libc::ENODATA);
    expect_errno(file.remove_xattr(a), libc::ENODATA);
    expect_errno(file.set_xattr(a, b"1", libc::XATTR_REPLACE), libc::ENODATA);
    file.set_xattr(a, b"1", libc::XATTR_CREATE).unwrap();
    expect_errno(file.set_xattr(a, b"2", libc::XATTR_CREATE), libc::EEXIST);
    file.set_xattr(a, b"", libc::XATTR_REPLACE).unwrap();
    assert_eq!(file.get_xattr(a).unwrap(), b"");
    // Above the size first asked for, within what every store takes.
    let long = vec![7; 3000];
    file.set_xattr(b, &long, 0).unwrap();
    assert_eq!(file.get_xattr(b).unwrap(), long);
    let mut names = file.list_xattr().unwrap();
    names.retain(|n| n.to_string_lossy().starts_with("user."));
    names.sort();
    assert_eq!(names, ["user.a", "user.b"]);
    file.remove_xattr(a).unwrap();
    expect_errno(file.get_xattr(a), libc::ENODATA);
    expect_errno(file.set_xattr(name("nonamespace"), b"", 0), libc::EOPNOTSUPP);
    expect_errno(file.set_xattr(a, b"", 64), libc::EINVAL);
    expect_errno(file.set_xattr(a, b"", -1), libc::EINVAL);
}

pub fn xattrs_of_entries(store: &Store) {
    if !has_xattrs(store) {
        return;
    }
    let root = store.root();
    root.create_file(name("f")).unwrap();
    root.make_dir(name("d"), 0o700).unwrap();
    root.make_symlink(name("l"), name("f")).unwrap();
    let a = name("user.a");
    for (entry, value) in [(name("f"), b"file"), (name("d"), b"subd")] {
        root.set_xattr_entry(entry, a, value, 0).unwrap();
        assert_eq!(root.get_xattr_entry(entry, a).unwrap(), value);
        assert!(root.list_xattr_entry(entry).unwrap().contains(&a.to_owned()));
    }
    root.set_xattr(a, b"self", 0).unwrap();
    assert_eq!(root.get_xattr(a).unwrap(), b"self");
    assert!(root.list_xattr().unwrap().contains(&a.to_owned()));
    assert_eq!(root.open_file(name("f"), false).unwrap().get_xattr(a).unwrap(), b"file");
    assert_eq!(root.open_dir(name("d")).unwrap().get_xattr(a).unwrap(), b"subd");
    expect_errno(root.get_xattr_entry(name("l"), a), libc::ENODATA);
    expect_errno(root.set_xattr_entry(name("l"), a, b"x", 0), libc::EPERM);
    expect_errno(root.get_xattr_entry(name("none"), a), libc::ENOENT);
    root.remove_xattr_entry(name("f"), a).unwrap();
    expect_errno(root.get_xattr_entry(name("f"), a), libc::ENODATA);
    root.remove_xattr(a).unwrap();
}

pub fn changes_move_times(store: &Store) {
    let root = store.root();
    let file = root.create_file(name("f")).unwrap();
    let past = at(100, 0);
    let changed = |stat: Stat| stat.mtime.seconds != 100;
    let reset = || {
        file.set_times(past, past).unwrap();
        root.set_times(past, past).unwrap();
        assert!(!changed(file.stat().unwrap()) && !changed(root.stat().unwrap()));
    };
    reset();
    file.write_at(0, b"x").unwrap();
    assert!(changed(file.stat().unwrap()) && !changed(root.stat().unwrap()));
    reset();
    file.set_len(5).unwrap();
    assert!(changed(file.stat().unwrap()));
    reset();
    file.set_mode(0o644).unwrap();
    assert!(!changed(file.stat().unwrap()));
    root.make_dir(name("d"), 0o700).unwrap();
    assert!(changed(root.stat().unwrap()));
    reset();
    root.remove_dir(name("d")).unwrap();
    assert!(changed(root.stat().unwrap()));
}

pub fn link_counts(store: &Store) {
    let root = store.root();
    let count = || root.stat().unwrap().nlink;
    let bare = count();
    if bare != 2 {
        // btrfs and others keep 1 for directories.
        return;
    }
    root.make_dir(name("a"), 0o700).unwrap();
    root.make_dir(name("b"), 0o700).unwrap();
    root.create_file(name("f")).unwrap();
    assert_eq!(count(), 4);
    let a = root.open_dir(name("a")).unwrap();
    root.rename(name("b"), &*a, name("b"), lamassu_store::backend::RenameMode::Replace).unwrap();
    assert_eq!((count(), a.stat().unwrap().nlink), (3, 3));
    a.remove_dir(name("b")).unwrap();
    assert_eq!(a.stat().unwrap().nlink, 2);
}
