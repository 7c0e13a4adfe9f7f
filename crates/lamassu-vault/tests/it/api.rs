//! The API but for names (`names.rs`), over memory and over a directory of this host.

use crate::common;

use common::*;
use lamassu_crypto::engine::device::Device;
use lamassu_crypto::engine::loop_back::LoopBack;
use lamassu_crypto::outer::RecordKind;
use lamassu_format::name::{LOCK, xattr_name};
use lamassu_store::Backend;
use lamassu_store::backend::LocalBackend;
use lamassu_vault::*;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

#[test]
fn files_hold_what_was_written_through_close_and_reopen() {
    everywhere(|recipe, backend| {
        let big: Vec<u8> = (0..1_500_000u32).map(|i| (i * 7 + i / 4096) as u8).collect();
        {
            let v = recipe.make(backend);
            v.dir("a");
            v.dir("a/b");
            v.put("a/b/big", &big);
            v.put("small", b"hello");
            v.put("empty", b"");
            assert_eq!(v.get("a/b/big"), big);
            assert_eq!(v.find("small").unwrap().attr.size, 5);
            v.close().unwrap();
        }
        let v = recipe.open(backend).unwrap();
        assert_eq!(v.find("a/b/big").unwrap().attr.size, big.len() as u64);
        assert_eq!(v.get("a/b/big"), big);
        assert_eq!(v.get("small"), b"hello");
        assert_eq!(v.get("empty"), b"");
        assert_eq!(v.list(""), ["a", "empty", "small"]);
        let report = v.clean();
        assert_eq!((report.files, report.directories, report.unsealed_empty), (3, 3, 0));
        assert_eq!(report.recovered, 0, "close settles everything");
    });
}

#[test]
fn a_second_writer_is_refused_and_readers_are_not() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        assert!(matches!(recipe.open(backend), Err(VaultError::Locked)));
        let reader = recipe.open_read_only(backend).unwrap();
        assert!(matches!(reader.mkdir(ROOT, n("x"), 0o755, me()), Err(VaultError::ReadOnly)));
        drop(reader);
        v.close().unwrap();
        recipe.open(backend).unwrap();
    });
}

#[test]
fn removing_the_lock_file_admits_no_second_writer() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let (dir, backend) = local();
        let v = recipe.make(&backend);
        v.put("f", b"first");
        std::fs::remove_file(dir.path().join(LOCK)).unwrap();
        // The second meets the file that the first has made, which nobody holds.
        for _ in 0..2 {
            let other: Arc<dyn Backend> = Arc::new(LocalBackend::open(dir.path()).unwrap());
            assert!(matches!(recipe.open(&other), Err(VaultError::Locked)));
            assert_eq!(recipe.open_read_only(&other).unwrap().list(""), ["f"], "readers take no lock");
        }
        v.put("f", b"still the only one");
        v.close().unwrap();
        let v = recipe.open(&backend).unwrap();
        assert_eq!(v.get("f"), b"still the only one");
        v.clean();
    }
}

#[test]
fn unlinked_files_work_until_they_are_closed() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        let (e, h) = v.new_file("f");
        v.write(h, 0, b"before").unwrap();
        v.unlink(ROOT, n("f")).unwrap();
        assert!(matches!(v.find("f"), Err(VaultError::NotFound)));
        v.write(h, 6, b" after").unwrap();
        let mut buf = [0; 32];
        assert_eq!(v.read(h, 0, &mut buf).unwrap(), 12);
        let attr = v.getattr(e.attr.ino, None).unwrap();
        assert_eq!((attr.size, attr.nlink), (12, 0));
        v.setattr(e.attr.ino, None, &SetAttr { size: Some(3), mode: Some(0o600), ..SetAttr::default() }).unwrap();
        assert_eq!(v.getattr(e.attr.ino, Some(h)).unwrap().size, 3);
        v.fsync(h, false).unwrap();
        // Another of that name is another file, also if the store gives it the same number.
        v.put("f", b"new");
        assert_ne!(v.ino("f"), e.attr.ino);
        assert_eq!(v.read(h, 0, &mut buf).unwrap(), 3);
        // Replaced by a rename: the same.
        let (g, hg) = v.new_file("g");
        v.write(hg, 0, b"replaced").unwrap();
        v.rename(ROOT, n("f"), ROOT, n("g"), RenameMode::Replace).unwrap();
        assert_eq!(v.read(hg, 0, &mut buf).unwrap(), 8);
        assert_eq!(v.get("g"), b"new");
        v.release(h).unwrap();
        v.flush(hg).unwrap();
        v.release(hg).unwrap();
        // An open that found the name before the rename still gets what it found.
        let late = v.open_file(g.attr.ino, RW).unwrap();
        assert_eq!(v.read(late, 0, &mut buf).unwrap(), 8);
        v.release(late).unwrap();
        for ino in [e.attr.ino, g.attr.ino] {
            assert_eq!(v.getattr(ino, None).unwrap().nlink, 0, "what was last known of it");
            v.forget(ino, 100);
            assert!(matches!(v.getattr(ino, None), Err(VaultError::Stale)));
            assert!(matches!(v.open_file(ino, RO), Err(VaultError::Stale)));
        }
        v.clean();
    });
}

/// Found by a front-end, removed by another caller, and opened then: as on a local file system.
#[test]
fn a_directory_that_was_removed_meanwhile_opens_and_lists_nothing() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        removed_directories_open(&v);
        v.clean();
    });
}

#[test]
fn handles_of_one_file_see_each_other() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        v.put("f", b"0123456789");
        let ino = v.ino("f");
        let reader = v.open_file(ino, RO).unwrap();
        let writer = v.open_file(ino, RW).unwrap();
        v.write(writer, 3, b"xyz").unwrap();
        let mut buf = [0; 10];
        v.read(reader, 0, &mut buf).unwrap();
        assert_eq!(&buf, b"012xyz6789");
        assert!(matches!(v.write(reader, 0, b"no"), Err(VaultError::BadHandle)));
        assert_eq!(v.append(writer, b"ABC").unwrap(), 3);
        assert_eq!(v.getattr(ino, None).unwrap().size, 13);
        v.fallocate(writer, Fallocate::Punch, 0, 2).unwrap();
        v.fallocate(writer, Fallocate::Zero { keep_size: false }, 12, 4).unwrap();
        assert_eq!(v.get("f"), b"\0\x002xyz6789AB\0\0\0\0");
        v.fallocate(writer, Fallocate::Reserve, 0, 9000).unwrap();
        assert_eq!(v.getattr(ino, None).unwrap().size, 9000);
        v.fallocate(writer, Fallocate::KeepSize, 0, 99000).unwrap();
        assert_eq!(v.getattr(ino, None).unwrap().size, 9000);
        assert!(matches!(v.fallocate(writer, Fallocate::Punch, 0, 0), Err(VaultError::Invalid)));
        let seek = |offset, whence| v.seek(writer, offset, whence, u64::MAX);
        assert_eq!(seek(0, Whence::Data).unwrap(), Sought::Found(0));
        assert!(matches!(seek(8999, Whence::Hole).unwrap(), Sought::Found(8999..=9000)));
        assert!(matches!(seek(9000, Whence::Data), Err(VaultError::NoData)));
        // In pieces, to the end.
        v.write(writer, 0, &[1; 50_000]).unwrap();
        let (mut at, mut pieces) = (0, 0);
        let end = loop {
            match v.seek(writer, at, Whence::Hole, 4096).unwrap() {
                Sought::Found(end) => break end,
                Sought::NotBefore(next) => (at, pieces) = (next, pieces + 1),
            }
        };
        assert_eq!(end, 50_000);
        assert!(pieces >= 10, "{pieces}");
        v.release(reader).unwrap();
        assert!(matches!(v.release(reader), Err(VaultError::BadHandle)));
        v.release(writer).unwrap();
        let again = v.open_file(ino, Access { truncate: true, ..RW }).unwrap();
        assert_eq!(v.getattr(ino, None).unwrap().size, 0);
        v.release(again).unwrap();
        v.clean();
    });
}

#[test]
fn attributes_change_as_asked() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        v.put("f", &[7; 10_000]);
        v.dir("d");
        v.symlink(ROOT, n("l"), b"f", me()).unwrap();
        let at = |s, ns| Time { seconds: s, nanos: ns };
        for path in ["f", "d", "l", ""] {
            let ino = v.ino(path);
            let set = SetAttr {
                atime: Some(SetTime::At(at(100, 1))),
                mtime: Some(SetTime::At(at(200, 999_999_999))),
                ..SetAttr::default()
            };
            let attr = v.setattr(ino, None, &set).unwrap();
            assert_eq!((attr.atime, attr.mtime), (at(100, 1), at(200, 999_999_999)), "{path}");
            if path != "l" {
                let attr = v.setattr(ino, None, &SetAttr { mode: Some(0o711), ..SetAttr::default() }).unwrap();
                assert_eq!(attr.mode, 0o711);
            }
        }
        let h = v.open_file(v.ino("f"), RW).unwrap();
        let set = SetAttr { size: Some(5), ..SetAttr::default() };
        assert_eq!(v.setattr(v.ino("f"), Some(h), &set).unwrap().size, 5);
        v.release(h).unwrap();
        assert_eq!(v.setattr(v.ino("f"), None, &SetAttr { size: Some(9), ..set }).unwrap().size, 9);
        assert_eq!(v.get("f"), b"\x07\x07\x07\x07\x07\0\0\0\0");
        assert!(matches!(v.setattr(v.ino("d"), None, &set), Err(VaultError::IsDirectory)));
        // Times given while writes are buffered stay through the commit.
        let h = v.open_file(v.ino("f"), RW).unwrap();
        v.write(h, 0, b"later").unwrap();
        let set = SetAttr { mtime: Some(SetTime::At(at(300, 3))), ..SetAttr::default() };
        v.setattr(v.ino("f"), Some(h), &set).unwrap();
        v.release(h).unwrap();
        v.sync_all().unwrap();
        assert_eq!(v.getattr(v.ino("f"), None).unwrap().mtime, at(300, 3));
        assert_eq!(v.statfs().unwrap().name_max, 255);
        // What pages will take is left out of what there is.
        let (here, below) = (v.statfs().unwrap().blocks, backend.stat_fs().unwrap().blocks);
        assert!(
            here <= below && below - here <= below / 100 + 1 && (here < below || below < 4000),
            "{here} of {below}"
        );
    });
}

#[test]
fn extended_attributes_are_kept_and_hidden() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        v.put("f", b"x");
        let d = v.dir("d");
        let h = v.open_file(v.ino("f"), RW).unwrap();
        for ino in [v.ino("f"), d, ROOT] {
            let names = ["user.comment", "trusted.overlay.opaque", "security.capability", "user.lamassu.x"];
            for name in names {
                v.set_xattr(ino, n(name), name.as_bytes(), SetXattr::Create).unwrap();
                assert!(matches!(v.set_xattr(ino, n(name), b"", SetXattr::Create), Err(VaultError::Exists)));
            }
            let mut listed = v.list_xattr(ino).unwrap();
            listed.sort();
            let mut expected = names.map(|s| s.as_bytes().to_vec());
            expected.sort();
            assert_eq!(listed, expected);
            v.set_xattr(ino, n("user.comment"), b"", SetXattr::Replace).unwrap();
            assert_eq!(v.get_xattr(ino, n("user.comment")).unwrap(), b"");
            assert_eq!(v.get_xattr(ino, n("user.lamassu.x")).unwrap(), b"user.lamassu.x");
            v.remove_xattr(ino, n("user.comment")).unwrap();
            assert!(matches!(v.remove_xattr(ino, n("user.comment")), Err(VaultError::NoAttribute)));
            assert!(matches!(v.get_xattr(ino, n("user.comment")), Err(VaultError::NoAttribute)));
            let absent = v.set_xattr(ino, n("user.comment"), b"", SetXattr::Replace);
            assert!(matches!(absent, Err(VaultError::NoAttribute)));
            assert!(v.set_xattr(ino, n("user.big"), &[0; 65_537], SetXattr::Any).is_err());
        }
        v.release(h).unwrap();
        let raw = backend.root().list_xattr().unwrap();
        assert!(raw.iter().filter(|r| r.as_bytes().starts_with(b"user.")).count() == 3);
        assert!(raw.iter().all(|r| !r.to_string_lossy().contains("comment")));
        assert_eq!(v.clean().xattrs, 9);
    });
}

/// An ordinary user's own directory, read and not searched: its attributes, whose seal names the id in a record that
/// cannot be reached, are there as on a local file system. In a process of an ordinary user.
#[test]
fn attributes_of_a_directory_that_may_not_be_searched() {
    use std::os::unix::fs::PermissionsExt;
    if rustix::process::getuid().is_root() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let copy = dir.path().join("test");
        std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
        let mut again = std::process::Command::new("setpriv");
        again.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(copy).env("TMPDIR", dir.path());
        let out = again.args(["--exact", "api::attributes_of_a_directory_that_may_not_be_searched"]).output().unwrap();
        let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        assert!(out.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let (recipe, (_dir, backend)) = (Recipe::default(), local());
    let v = recipe.make(&backend);
    let ino = v.dir("shut");
    v.set_xattr(ino, n("user.note"), b"kept", SetXattr::Any).unwrap();
    let mode = |mode| v.setattr(ino, None, &SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
    mode(0o600);
    v.close().unwrap();
    drop(v);
    let v = recipe.open(&backend).unwrap();
    let ino = v.ino("shut");
    assert_eq!(v.get_xattr(ino, n("user.note")).unwrap(), b"kept");
    v.set_xattr(ino, n("user.note"), b"changed", SetXattr::Replace).unwrap();
    assert_eq!(v.getattr(ino, None).unwrap().mode & 0o777, 0o600);
    v.setattr(ino, None, &SetAttr { mode: Some(0o700), ..SetAttr::default() }).unwrap();
    v.clean();
}

#[test]
fn attributes_are_of_the_namespaces_that_local_file_systems_know() {
    // Plain names: directories have no id that the seal below would have to name.
    let (recipe, backend) = (Recipe::plain(), memory());
    let v = recipe.make(&backend);
    let unsupported = |done: Result<()>, name: &str| assert!(matches!(done, Err(VaultError::Unsupported)), "{name}");
    for name in ["foo", "user", "User.x", "system.nfs4_acl", "btrfs.compression", "lamassu.x"] {
        for mode in [SetXattr::Any, SetXattr::Create, SetXattr::Replace] {
            unsupported(v.set_xattr(ROOT, n(name), b"1", mode), name);
        }
        unsupported(v.get_xattr(ROOT, n(name)).map(drop), name);
        unsupported(v.remove_xattr(ROOT, n(name)), name);
    }
    for name in ["user.", "trusted.", "security."] {
        assert!(matches!(v.set_xattr(ROOT, n(name), b"1", SetXattr::Any), Err(VaultError::Invalid)), "{name}");
        assert!(matches!(v.get_xattr(ROOT, n(name)), Err(VaultError::Invalid)), "{name}");
    }
    assert!(v.list_xattr(ROOT).unwrap().is_empty());
    // One from before there was this rule is not lost.
    let ring = recipe.ring();
    let stored = xattr_name(&ring.seal_xattr_names(b"foo")[0]);
    let context = [stored.as_bytes(), b"/"].concat();
    let sealed = ring.outer().seal_record(RecordKind::Xattr, &context, b"kept").unwrap();
    backend.root().set_xattr(n(&stored), &sealed, 0).unwrap();
    assert_eq!(v.list_xattr(ROOT).unwrap(), [b"foo".to_vec()]);
    assert_eq!(v.get_xattr(ROOT, n("foo")).unwrap(), b"kept");
    unsupported(v.set_xattr(ROOT, n("foo"), b"other", SetXattr::Replace), "foo");
    v.remove_xattr(ROOT, n("foo")).unwrap();
    assert!(v.list_xattr(ROOT).unwrap().is_empty());
    v.clean();
}

#[test]
fn attributes_of_an_older_epoch_are_found_and_replaced() {
    let (recipe, backend) = (Recipe::default(), memory());
    let old = recipe.make(&backend);
    old.set_xattr(ROOT, n("user.a"), b"old", SetXattr::Any).unwrap();
    old.set_xattr(ROOT, n("user.b"), b"old", SetXattr::Any).unwrap();
    old.put("f", b"old epoch");
    old.close().unwrap();
    let v = Vault::open(backend.clone(), &recipe.header(), recipe.ring_of(&[9, 2]), options(false)).unwrap();
    assert_eq!(v.get("f"), b"old epoch");
    assert!(matches!(v.set_xattr(ROOT, n("user.a"), b"", SetXattr::Create), Err(VaultError::Exists)));
    v.set_xattr(ROOT, n("user.a"), b"new", SetXattr::Replace).unwrap();
    assert_eq!(v.get_xattr(ROOT, n("user.a")).unwrap(), b"new");
    assert_eq!(v.list_xattr(ROOT).unwrap().len(), 2);
    v.remove_xattr(ROOT, n("user.b")).unwrap();
    assert_eq!(v.list_xattr(ROOT).unwrap(), [b"user.a".to_vec()]);
    v.clean();
}

#[test]
fn special_files_are_themselves() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        let fifo = v.mknod(ROOT, n("fifo"), Kind::Fifo, 0o640, 0, me()).unwrap();
        assert_eq!((fifo.attr.kind, fifo.attr.mode), (Kind::Fifo, 0o640));
        let file = v.mknod(ROOT, n("file"), Kind::File, 0o604, 0, me()).unwrap();
        assert_eq!((file.attr.kind, file.attr.mode, file.attr.size), (Kind::File, 0o604, 0));
        v.mknod(ROOT, n("socket"), Kind::Socket, 0o600, 0, me()).unwrap();
        assert!(v.open_file(fifo.attr.ino, RO).is_err());
        let report = v.clean();
        assert_eq!((report.files, report.other), (1, 2));
    });
}

#[test]
fn modes_and_groups_pass_on_from_setgid_directories() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        let d = v.mkdir(ROOT, n("d"), 0o2770, me()).unwrap();
        assert_eq!(d.attr.mode, 0o2770);
        let sub = v.mkdir(d.attr.ino, n("sub"), 0o700, me()).unwrap();
        assert_eq!(sub.attr.mode, 0o2700);
        let (f, h) = v.create(d.attr.ino, n("f"), 0o600, RW, me()).unwrap();
        assert_eq!((f.attr.mode, f.attr.gid), (0o600, d.attr.gid));
        v.release(h).unwrap();
        let closed = v.mkdir(ROOT, n("closed"), 0o000, me()).unwrap();
        assert_eq!(closed.attr.mode, 0);
        v.rmdir(ROOT, n("closed")).unwrap();
    });
}

#[test]
fn owners_are_set_where_we_may() {
    if !rustix::process::getuid().is_root() {
        return;
    }
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        let them = Owner { uid: 1234, gid: 4321, umask: 0 };
        let e = v.mkdir(ROOT, n("d"), 0o755, them).unwrap();
        assert_eq!((e.attr.uid, e.attr.gid), (1234, 4321));
        let (f, h) = v.create(e.attr.ino, n("f"), 0o4755, RW, them).unwrap();
        assert_eq!((f.attr.uid, f.attr.gid, f.attr.mode), (1234, 4321, 0o4755));
        v.release(h).unwrap();
        let l = v.symlink(e.attr.ino, n("l"), b"f", them).unwrap();
        assert_eq!((l.attr.uid, l.attr.gid), (1234, 4321));
    });
}

#[test]
fn a_frozen_vault_is_still_and_thaws() {
    let backend = memory();
    let recipe = Recipe::default();
    let v = Arc::new(recipe.make(&backend));
    let (_, h) = v.new_file("f");
    v.write(h, 0, b"before").unwrap();
    v.freeze().unwrap();
    assert!(v.is_frozen());
    // Everything is in the store, settled.
    let copy = recipe.open_read_only(&backend).unwrap();
    assert_eq!(copy.get("f"), b"before");
    assert_eq!(copy.clean().recovered, 0);
    let writer = {
        let v = v.clone();
        std::thread::spawn(move || v.write(h, 0, b"after!").unwrap())
    };
    let mut buf = [0; 6];
    v.read(h, 0, &mut buf).unwrap();
    assert_eq!(&buf, b"before");
    v.maintain().unwrap();
    v.sync_all().unwrap();
    v.fsync(h, false).unwrap();
    v.flush(h).unwrap();
    assert!(v.is_frozen() && !writer.is_finished());
    v.thaw().unwrap();
    writer.join().unwrap();
    assert_eq!(v.get("f"), b"after!");
    v.release(h).unwrap();
}

/// What one of them has written the other reads, and changes.
#[test]
fn a_device_in_place_of_threads() {
    everywhere(|recipe, backend| {
        recipe.make(backend).close().unwrap();
        let content: Vec<u8> = (0..3_000_001u32).map(|i| (i * 7 + i / 4096) as u8).collect();
        for round in 0..4 {
            let loop_back: Arc<dyn Device> = Arc::new(LoopBack::new(2, 3));
            let device = (round % 2 == 0).then_some(loop_back);
            let options = Options { device, ..options(false) };
            let v = Vault::open(backend.clone(), &recipe.header(), recipe.ring(), options).unwrap();
            if round > 0 {
                assert_eq!(v.get("f"), [&[round - 1; 70_000][..], &content[70_000..]].concat());
                assert_eq!(v.get("small"), [round - 1; 5]);
            } else {
                v.put("f", &content);
            }
            v.put("small", &[round; 5]);
            let h = v.open_file(v.ino("f"), RW).unwrap();
            v.write(h, 0, &[round; 70_000]).unwrap();
            v.release(h).unwrap();
            v.clean();
            v.close().unwrap();
        }
    });
}
