//! What every table does: one suite, over memory and a redb file.
use lamassu_anchor::AnchorError;
use lamassu_anchor::table::{Change, DiskTable, FILE_MODE, MemoryTable, Readers, Space, Table};
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

/// The log at the front of a file.
const LOG_LEN: usize = 1 << 20;

fn put(space: Space, key: &[u8], value: &[u8]) -> Change {
    Change { space, key: key.to_vec(), value: Some(value.to_vec()) }
}

fn remove(space: Space, key: &[u8]) -> Change {
    Change { space, key: key.to_vec(), value: None }
}

fn scanned(table: &dyn Table, space: Space, prefix: &[u8], most: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut found = Vec::new();
    let visit = &mut |key: &[u8], value: &[u8]| {
        found.push((key.to_vec(), value.to_vec()));
        if found.len() == most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    table.scan(space, prefix, visit).unwrap();
    found
}

/// The suite.
fn conforms(table: &dyn Table) {
    assert_eq!(table.get(Space::Objects, b"a").unwrap(), None);
    assert!(scanned(table, Space::Objects, b"", 9).is_empty());
    let keys: [&[u8]; 4] = [b"b1", b"a", b"b", b"c"];
    table.commit(&keys.map(|key| put(Space::Objects, key, b"1"))).unwrap();
    table.commit(&[put(Space::Entries, b"b", b"2")]).unwrap();
    assert_eq!(table.get(Space::Objects, b"b").unwrap().unwrap(), b"1");
    assert_eq!(table.get(Space::Entries, b"b").unwrap().unwrap(), b"2", "tables are apart");
    let names = |found: Vec<(Vec<u8>, _)>| found.into_iter().map(|(key, _)| key).collect::<Vec<_>>();
    assert_eq!(names(scanned(table, Space::Objects, b"", 9)), [&b"a"[..], b"b", b"b1", b"c"]);
    assert_eq!(names(scanned(table, Space::Objects, b"b", 9)), [&b"b"[..], b"b1"]);
    assert_eq!(names(scanned(table, Space::Objects, b"b", 1)), [&b"b"[..]], "it ends when it is told to");
    assert!(scanned(table, Space::Objects, b"d", 9).is_empty());
    // The last change of a key counts, in one commit too; what is not there is removed without ado.
    let changes = [put(Space::Objects, b"a", b"x"), remove(Space::Objects, b"a"), remove(Space::Held, b"none")];
    table.commit(&changes).unwrap();
    assert_eq!(table.get(Space::Objects, b"a").unwrap(), None);
    table.commit(&[put(Space::Open, b"", b"")]).unwrap();
    assert_eq!(table.get(Space::Open, b"").unwrap().unwrap(), b"", "an empty value is a value");
    table.commit(&[]).unwrap();
}

#[test]
fn memory_conforms() {
    conforms(&MemoryTable::default());
}

#[test]
fn a_file_conforms_and_keeps_what_was_committed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let table = DiskTable::create(&path).unwrap();
    conforms(&table);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, FILE_MODE);
    drop(table);
    let table = DiskTable::open(&path).unwrap();
    assert_eq!(table.get(Space::Entries, b"b").unwrap().unwrap(), b"2");
    assert!(matches!(DiskTable::create(&path), Err(AnchorError::Exists { .. })));
}

#[test]
fn a_commit_that_fails_changes_nothing() {
    let table = MemoryTable::default();
    table.commit(&[put(Space::Objects, b"a", b"1")]).unwrap();
    table.refuse(Some(libc::ENOSPC));
    let failed = table.commit(&[put(Space::Objects, b"a", b"2")]);
    assert!(matches!(failed, Err(AnchorError::Io { source, .. }) if source.raw_os_error() == Some(libc::ENOSPC)));
    assert_eq!(table.get(Space::Objects, b"a").unwrap().unwrap(), b"1");
}

#[test]
fn one_process_writes_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let _first = DiskTable::create(&path).unwrap();
    assert!(matches!(DiskTable::open(&path), Err(AnchorError::Locked { .. })));
}

#[test]
fn readers_read_beside_a_writer_or_keep_it_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let writer = DiskTable::create(&path).unwrap();
    writer.commit(&[put(Space::Objects, b"a", b"1")]).unwrap();
    let beside = DiskTable::open_read_only(&path, Readers::BesideWriter).unwrap();
    assert_eq!(beside.get(Space::Objects, b"a").unwrap().unwrap(), b"1");
    writer.commit(&[put(Space::Objects, b"a", b"2")]).unwrap();
    assert_eq!(beside.get(Space::Objects, b"a").unwrap().unwrap(), b"2");
    let refused = beside.commit(&[put(Space::Objects, b"a", b"3")]);
    assert!(matches!(refused, Err(AnchorError::Io { source, .. }) if source.raw_os_error() == Some(libc::EROFS)));
    let instead = || DiskTable::open_read_only(&path, Readers::InsteadOfWriter);
    assert!(matches!(instead(), Err(AnchorError::Locked { .. })));
    drop((writer, beside));
    let (first, second) = (instead().unwrap(), instead().unwrap());
    assert!(matches!(DiskTable::open(&path), Err(AnchorError::Locked { .. })));
    let mut all = Vec::new();
    let visited = second.visit_all(|space, key, value| {
        all.push((space, key.to_vec(), value.to_vec()));
        Ok::<(), AnchorError>(())
    });
    visited.unwrap();
    assert_eq!(all, [(Space::Objects, b"a".to_vec(), b"2".to_vec())]);
    drop((first, second));
    DiskTable::open(&path).unwrap();
}

/// A copy of the file as a killed writer leaves it.
#[test]
fn what_a_killed_writer_left_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (path, copy) = (dir.path().join("anchor"), dir.path().join("copy"));
    let writer = DiskTable::create(&path).unwrap();
    writer.commit(&[put(Space::Objects, b"a", b"1")]).unwrap();
    fs::copy(&path, &copy).unwrap();
    for readers in [Readers::InsteadOfWriter, Readers::BesideWriter] {
        let table = DiskTable::open_read_only(&copy, readers).unwrap();
        assert_eq!(table.get(Space::Objects, b"a").unwrap().unwrap(), b"1");
    }
}

#[test]
fn what_is_not_a_private_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    assert!(matches!(DiskTable::open(&at("none")), Err(AnchorError::Missing { .. })));
    drop(DiskTable::create(&at("good")).unwrap());
    symlink(at("good"), at("link")).unwrap();
    fs::create_dir(at("dir")).unwrap();
    fs::hard_link(at("good"), at("second")).unwrap();
    let fifo = std::process::Command::new("mkfifo").arg(at("fifo")).status().unwrap();
    assert!(fifo.success());
    for name in ["link", "dir", "good", "fifo"] {
        assert!(matches!(DiskTable::open(&at(name)), Err(AnchorError::NotPrivate { .. })), "{name}");
    }
    fs::remove_file(at("second")).unwrap();
    fs::set_permissions(at("good"), fs::Permissions::from_mode(0o640)).unwrap();
    assert!(matches!(DiskTable::open(&at("good")), Err(AnchorError::NotPrivate { .. })));
    fs::set_permissions(at("good"), fs::Permissions::from_mode(0o600)).unwrap();
    DiskTable::open(&at("good")).unwrap();
}

/// Every value of a table that opens, or an error.
fn all_values(path: &Path) -> Result<usize, AnchorError> {
    let table = DiskTable::open(path)?;
    let mut count = 0;
    for space in Space::ALL {
        table.scan(space, &[], &mut |_, _| {
            count += 1;
            ControlFlow::Continue(())
        })?;
    }
    Ok(count)
}

/// A damaged file is an error or is what it was: never a panic.
#[test]
fn damage_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let table = DiskTable::create(&path).unwrap();
    let rows: Vec<_> = (0..300_u32).map(|n| put(Space::Objects, &n.to_be_bytes(), &[7; 90])).collect();
    table.commit(&rows).unwrap();
    drop(table);
    let whole = fs::read(&path).unwrap();
    // The system's own errors aside, a length that is cut is found.
    for len in [0, 1, 100, 4096, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..len]).unwrap();
        assert!(all_values(&path).is_err() || len == 0, "{len} bytes");
    }
    let mut noticed = 0;
    for at in (0..LOG_LEN).step_by(40_009).chain((LOG_LEN..whole.len()).step_by(509)) {
        let mut file = fs::File::options().read(true).write(true).truncate(true).create(true).open(&path).unwrap();
        file.write_all(&whole).unwrap();
        let mut byte = [0];
        file.seek(SeekFrom::Start(at as u64)).unwrap();
        file.read_exact(&mut byte).unwrap();
        file.seek(SeekFrom::Start(at as u64)).unwrap();
        file.write_all(&[byte[0] ^ 0x5a]).unwrap();
        drop(file);
        noticed += usize::from(!matches!(all_values(&path), Ok(300)));
    }
    // Most of the file is free space.
    assert!(noticed > 0);
}

/// The checksums of all that is in use are compared, whoever opens the file: each bit that is flipped there is found.
#[test]
fn a_flipped_bit_is_found_by_a_verification() {
    let dir = tempfile::tempdir().unwrap();
    let (path, bad) = (dir.path().join("anchor"), dir.path().join("bad"));
    let table = DiskTable::create(&path).unwrap();
    let rows: Vec<_> = (0..300_u32).map(|n| put(Space::Objects, &n.to_be_bytes(), &[7; 90])).collect();
    table.commit(&rows).unwrap();
    assert!(table.is_small() && table.verify().unwrap());
    let beside = DiskTable::open_read_only(&path, Readers::BesideWriter).unwrap();
    assert!(!beside.verify().unwrap(), "a writer may be writing");
    table.commit(&[put(Space::Objects, b"more", b"1")]).unwrap();
    assert!(table.verify().unwrap(), "nothing was changed by that");
    drop((table, beside));
    let whole = fs::read(&path).unwrap();
    let read = |path: &Path| {
        let mut all = Vec::new();
        let table = DiskTable::open_read_only(path, Readers::InsteadOfWriter)?;
        table.visit_all(|space, key, value| {
            all.push((space, key.to_vec(), value.to_vec()));
            Ok::<(), AnchorError>(())
        })?;
        Ok::<_, AnchorError>(all)
    };
    let (before, mut found) = (read(&path).unwrap(), 0);
    for at in (0..LOG_LEN).step_by(40_009).chain((LOG_LEN..whole.len()).step_by(331)) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(&bad, &bytes).unwrap();
        fs::set_permissions(&bad, fs::Permissions::from_mode(FILE_MODE)).unwrap();
        let verified = DiskTable::open_read_only(&bad, Readers::InsteadOfWriter).and_then(|table| table.verify());
        match verified {
            // It was in what is not in use.
            Ok(verified) => assert!(verified && read(&bad).unwrap() == before, "{at}"),
            Err(_) => found += 1,
        }
        assert_eq!(fs::read(&bad).unwrap(), bytes, "it changes nothing");
    }
    assert!(found > 50, "{found}");
    fs::copy(&path, &bad).unwrap();
    let good = DiskTable::open_read_only(&bad, Readers::InsteadOfWriter).unwrap();
    assert!(good.verify().unwrap());
}
