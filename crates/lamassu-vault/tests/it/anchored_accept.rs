//! The anchor of a vault that is there already, and what a person takes for the newest (`docs/freshness.md`,
//! section 6).
use crate::common;

use common::anchored::{anchor, assert_outdated, open_anchored};
use common::keyed::*;
use common::*;
use lamassu_anchor::table::{Change, MemoryTable, Space, Table};
use lamassu_anchor::{AnchorError, VaultRow};
use lamassu_store::BackendDir;
use lamassu_vault::anchor::{NewTrees, Rebuilt, rebuild};
use lamassu_vault::*;
use std::ffi::OsStr;
use std::sync::Arc;

/// A tree with everything in it.
fn grow(v: &Vault) {
    v.dir("d");
    v.dir("d/e");
    v.put("empty", b"");
    v.put("d/small", b"content");
    v.put("d/e/large", &vec![7; 3 << 20]);
    v.put(&"n".repeat(250), b"long name");
    v.link(v.ino("d/small"), v.ino("d/e"), n("hard")).unwrap();
    link_to(v, "l", b"target");
    link_to(v, "d/long", &[b't'; 3000]);
    v.mknod(v.ino(""), n("fifo"), Kind::Fifo, 0o600, 0, me()).unwrap();
    set(v, "d/small", "user.a", b"1");
    set(v, "d", DEFAULT, &acl(9, 6));
    v.put("d/inherits", b"x");
    // A sparse one.
    let (_, handle) = v.new_file("sparse");
    v.write(handle, 50 << 20, b"end").unwrap();
    v.release(handle).unwrap();
}

#[test]
fn an_anchor_is_made_of_what_is_there() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let backend = memory();
        let ring = recipe.ring_of_epochs(&[1], &[1]);
        Vault::make_tree(&*backend, &recipe.header(), &ring).unwrap();
        let v = recipe.open_with(&backend, &[1], &[1]);
        grow(&v);
        v.put("damaged", &vec![1; 10_000]);
        let damaged = v.stored_path(n("damaged")).unwrap();
        v.close().unwrap();
        backend.root().open_file(damaged.as_os_str(), true).unwrap().write_at(100, &[0xff; 100]).unwrap();
        let table: Arc<dyn Table> = Arc::new(MemoryTable::default());
        let (done, left_out) = rebuilt(&recipe, &backend, &table);
        assert!(left_out.len() == 1 && left_out[0].starts_with(damaged.to_str().unwrap()), "{left_out:?}");
        let expected = Rebuilt {
            objects: 12,
            entries: 12,
            files: 6,
            bytes: 7 + (3 << 20) + 9 + 1 + (50 << 20) + 3,
            datasets: 0,
            damaged: 1,
        };
        assert_eq!(done, expected);
        let lab = Lab { recipe, backend, table, outer: vec![1] };
        let v = lab.open();
        assert_eq!((v.get("d/e/hard"), v.get("empty")), (b"content".to_vec(), Vec::new()));
        assert_eq!(v.get("d/e/large"), vec![7; 3 << 20]);
        assert_eq!((v.get(&"n".repeat(250)), v.get("d/inherits")), (b"long name".to_vec(), b"x".to_vec()));
        assert_eq!(v.find("d/small").unwrap().attr.nlink, 2);
        assert_eq!(v.find("sparse").unwrap().attr.size, (50 << 20) + 3);
        let handle = v.open_file(v.ino("sparse"), RO).unwrap();
        let mut end = [0; 6];
        assert_eq!(v.read(handle, (50 << 20) - 3, &mut end).unwrap(), 6);
        assert_eq!(&end, b"\0\0\0end");
        v.release(handle).unwrap();
        assert_eq!(v.readlink(v.ino("d/long")).unwrap().len(), 3000);
        assert_eq!(get(&v, "d/small", "user.a").unwrap(), b"1");
        assert!(!get(&v, "d/inherits", ACCESS).unwrap().is_empty());
        assert!(matches!(v.find("damaged"), Err(VaultError::NotFound)));
        // It can be written to.
        v.put("d/small", b"another");
        v.put("empty", b"no more");
        set(&v, "d/small", "user.a", b"2");
        v.close().unwrap();
        assert_eq!(lab.kinds(), kinds(&["unrecorded"]));
        let v = lab.open();
        assert_eq!((v.get("d/e/hard"), v.get("empty")), (b"another".to_vec(), b"no more".to_vec()));
        v.close().unwrap();
        // Not twice, and not over a vault that is anchored.
        let v = lab.open();
        let refused =
            rebuild(&v, &recipe.header(), Arc::new(MemoryTable::default()), NewTrees::default(), &LeftOut::default());
        assert!(matches!(refused, Err(VaultError::Refused(_))));
        v.close().unwrap();
        let v = recipe.open_with(&lab.backend, &[1], &[1]);
        let refused = rebuild(&v, &recipe.header(), lab.table.clone(), NewTrees::default(), &LeftOut::default());
        assert!(matches!(refused, Err(VaultError::Anchor(AnchorError::Foreign))));
        v.close().unwrap();
    }
}

/// Rows are committed in batches: names of one object may be far apart.
/// The server that keeps an anchor judges by these, and does not see the header.
#[test]
fn an_anchor_that_says_another_suite_or_domain_than_the_header_is_refused() {
    let recipe = Recipe::default();
    let backend = memory();
    Vault::make_tree(&*backend, &recipe.header(), &recipe.ring()).unwrap();
    let table: Arc<dyn Table> = Arc::new(MemoryTable::default());
    open_anchored(&recipe, &backend, &table, false).unwrap().close().unwrap();
    let row = anchor(&recipe, &table).vault();
    let (suite, domain) = (lamassu_format::Suite::Chacha, lamassu_format::Domain::None);
    for lie in [VaultRow { suite, ..row.clone() }, VaultRow { domain, ..row.clone() }] {
        let lie = Change { space: Space::Vault, key: b"vault".to_vec(), value: Some(lie.encode()) };
        table.commit(&[lie]).unwrap();
        let refused = open_anchored(&recipe, &backend, &table, true);
        assert!(matches!(refused, Err(VaultError::Anchor(AnchorError::OtherProperties { .. }))));
    }
}

#[test]
fn an_anchor_of_many_entries_is_made_in_batches() {
    let recipe = Recipe::plain();
    let backend = memory();
    let v = recipe.make(&backend);
    v.put("0-first", b"one");
    for number in 0..11_000 {
        v.mknod(ROOT, n(&format!("{number}")), Kind::Fifo, 0o600, 0, me()).unwrap();
    }
    v.link(v.ino("0-first"), ROOT, n("z-last")).unwrap();
    v.close().unwrap();
    let table = Arc::new(MemoryTable::default());
    let v = recipe.open(&backend).unwrap();
    let (anchor, done) =
        rebuild(&v, &recipe.header(), table.clone(), NewTrees::default(), &LeftOut::default()).unwrap();
    v.close().unwrap();
    assert_eq!((done.objects, done.entries, done.files, done.damaged), (11_002, 11_002, 1, 0));
    assert!(table.commits() >= 3, "{}", table.commits());
    assert_eq!(anchor.entries(lamassu_anchor::ObjectId::ROOT).unwrap().len(), 11_002);
    let v = open_anchored(&recipe, &backend, &(table as Arc<dyn Table>), true).unwrap();
    assert_eq!((v.get("z-last"), v.find("0-first").unwrap().attr.nlink), (b"one".to_vec(), 2));
    v.close().unwrap();
}

fn content_of(dir: &Arc<dyn BackendDir>, name: &OsStr) -> Vec<u8> {
    let file = dir.open_file(name, false).unwrap();
    let mut bytes = vec![0; file.stat().unwrap().len as usize];
    file.read_at(0, &mut bytes).unwrap();
    bytes
}

fn put_content(dir: &Arc<dyn BackendDir>, name: &OsStr, bytes: &[u8]) {
    let file = dir.open_file(name, true).unwrap();
    file.set_len(0).unwrap();
    file.write_at(0, bytes).unwrap();
}

#[test]
fn what_is_accepted_is_readable_and_nothing_else_is() {
    let lab = Lab::new(Recipe::default());
    let v = lab.open();
    v.dir("d");
    v.dir("d/e");
    let (one, two) = (vec![1; 20_000], vec![2; 30_000]);
    for path in ["a", "b", "d/c", "d/e/x", "d/gone"] {
        v.put(path, &one);
    }
    v.close().unwrap();
    let place = |path| lab.stored(path);
    let (a, b, c, x) = (place("a"), place("b"), place("d/c"), place("d/e/x"));
    let older: Vec<_> = [&a, &b, &c, &x].iter().map(|(dir, name)| content_of(dir, name)).collect();
    let v = lab.open();
    for path in ["a", "b", "d/c", "d/e/x"] {
        v.put(path, &two);
    }
    v.close().unwrap();
    for ((dir, name), bytes) in [&a, &b, &c, &x].iter().zip(&older) {
        put_content(dir, name, bytes);
    }
    let read = |v: &Vault, path: &str| -> Result<Vec<u8>> {
        let entry = v.find(path)?;
        let handle = v.open_file(entry.attr.ino, RO)?;
        let mut bytes = vec![0; 40_000];
        let read = v.read(handle, 0, &mut bytes);
        v.release(handle).unwrap();
        read.map(|len| bytes[..len].to_vec())
    };
    // The store drops one, puts one back that was removed, and makes a directory of a file.
    let gone = place("d/gone");
    gone.0.unlink(&gone.1).unwrap();
    assert_eq!(lab.kinds(), kinds(&["missing", "stale"]));
    let done = lab.accept("a", false);
    assert_eq!((done.changed, done.kept), (1, 0));
    let v = lab.open();
    assert_eq!(read(&v, "a").unwrap(), one);
    for path in ["b", "d/c", "d/e/x"] {
        assert!(read(&v, path).is_err(), "{path}");
    }
    assert_outdated(v.find("d/gone"));
    v.close().unwrap();
    let done = lab.accept("d", false);
    assert_eq!((done.changed, done.kept), (0, 1), "the directory itself is as it was");
    let done = lab.accept("d", true);
    assert_eq!((done.changed, done.removed, done.kept), (2, 1, 2), "{done:?}");
    let v = lab.open();
    assert_eq!((read(&v, "d/c").unwrap(), read(&v, "d/e/x").unwrap()), (one.clone(), one.clone()));
    assert!(matches!(v.find("d/gone"), Err(VaultError::NotFound)));
    assert!(read(&v, "b").is_err());
    v.put("d/c", b"goes on");
    v.close().unwrap();
    assert_eq!(lab.accept("", true).changed, 1);
    let v = lab.open();
    assert_eq!((read(&v, "b").unwrap(), read(&v, "d/c").unwrap()), (one, b"goes on".to_vec()));
    v.clean();
    v.close().unwrap();
}

#[test]
fn entries_that_nobody_recorded_are_accepted_with_all_below_them() {
    let lab = Lab::new(Recipe::default());
    let v = lab.open();
    v.dir("d");
    v.put("d/f", b"1");
    v.link(v.ino("d/f"), v.ino("d"), n("twin")).unwrap();
    v.put("kind", b"file");
    v.close().unwrap();
    let (dir, name) = lab.stored("d");
    let (_, kind) = lab.stored("kind");
    // The anchor believes that it is removed; the store keeps it.
    let aside = n("aside");
    dir.rename(&name, &*dir, aside, RenameMode::NoReplace).unwrap();
    assert_eq!(lab.accept("d", false).removed, 1);
    dir.rename(aside, &*dir, &name, RenameMode::NoReplace).unwrap();
    dir.unlink(&kind).unwrap();
    dir.make_dir(&kind, 0o700).unwrap();
    let v = lab.open();
    assert!(matches!(v.find("d"), Err(VaultError::NotFound)));
    assert_outdated(v.find("kind"));
    v.close().unwrap();
    assert_eq!(lab.kinds(), kinds(&["other-kind", "unrecorded"]));
    let done = lab.accept("d", true);
    assert_eq!((done.added, done.damaged), (3, 0), "{done:?}");
    let v = lab.open();
    assert_eq!((v.get("d/f"), v.get("d/twin"), v.find("d/f").unwrap().attr.nlink), (b"1".to_vec(), b"1".to_vec(), 2));
    // A directory without a record does not open.
    assert!(matches!(v.accept(n("kind"), false), Err(VaultError::Damaged { .. })));
    assert!(matches!(v.accept(n("nothing"), false), Err(VaultError::NotFound)));
    v.close().unwrap();
    assert_eq!(lab.kinds(), kinds(&["other-kind"]));
}

/// Entries whose rows were lost: what the store shows in their place is new, and what it no longer has is removed.
#[test]
fn entries_that_lead_nowhere_are_accepted_or_removed() {
    let lab = Lab::new(Recipe::default());
    let v = lab.open();
    v.dir("d");
    for path in ["d/there", "d/gone", "d/whole"] {
        v.put(path, path.as_bytes());
    }
    v.close().unwrap();
    let anchored = anchor(&lab.recipe, &lab.table);
    let dir = anchored.entries(lamassu_anchor::ObjectId::ROOT).unwrap().into_values().next().unwrap().object;
    let names: Vec<_> = ["d/there", "d/gone"].iter().map(|path| (lab.stored(path), *path)).collect();
    let mut lost: Vec<_> = anchored.entries(dir).unwrap().into_values().map(|entry| entry.object).collect();
    assert_eq!(lost.len(), 3);
    drop(anchored);
    // Objects are numbered in the order in which they were made.
    lost.sort();
    let rows = lost[..2].iter().map(|object| object.0.to_be_bytes().to_vec());
    let lose = rows.map(|key| Change { space: Space::Objects, key, value: None }).collect::<Vec<_>>();
    lose.iter().for_each(|row| assert!(lab.table.get(Space::Objects, &row.key).unwrap().is_some(), "not its key"));
    lab.table.commit(&lose).unwrap();
    let ((gone_dir, gone), _) = &names[1];
    gone_dir.unlink(gone).unwrap();
    let done = lab.accept("d", true);
    assert_eq!((done.added, done.removed, done.damaged), (1, 1, 0), "{done:?}");
    let v = lab.open();
    assert_eq!((v.get("d/there"), v.get("d/whole")), (b"d/there".to_vec(), b"d/whole".to_vec()));
    assert!(matches!(v.find("d/gone"), Err(VaultError::NotFound)));
    v.close().unwrap();
    assert_eq!(lab.kinds(), kinds(&[]));
}
