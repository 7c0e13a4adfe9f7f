//! A disk that fails under an open file, at every call that it is asked for.
#![allow(clippy::unwrap_used)] // a panic is a failed test

use super::backend::{Fails, Traced};
use super::*;
use std::collections::HashMap;
use std::sync::mpsc::channel;

/// A read is between its looks at the log and at the database.
pub(super) const BETWEEN_READS: &str = "between reads";
/// A call is about to make a failed record void, if there is one.
pub(super) const BEFORE_VOIDING: &str = "before voiding";
/// Another database is about to be opened.
pub(super) const OPENS_ANEW: &str = "opens anew";
/// A commit has failed; its record is not void yet.
pub(super) const RECORD_FAILED: &str = "record failed";
/// A record is durable, and its commit has not returned.
pub(super) const RECORD_WRITTEN: &str = "record written";

type Hook = Box<dyn FnOnce() + Send>;

/// What a test does at a place of the code, once.
#[derive(Default)]
pub(super) struct Hooks(Mutex<HashMap<&'static str, Hook>>);

impl std::fmt::Debug for Hooks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hooks")
    }
}

impl Hooks {
    fn set(&self, place: &'static str, hook: impl FnOnce() + Send + 'static) {
        self.0.lock().insert(place, Box::new(hook));
    }

    pub fn run(&self, place: &str) {
        let hook = self.0.lock().remove(place);
        if let Some(hook) = hook {
            hook();
        }
    }
}

fn put(key: &[u8], value: &[u8]) -> Change {
    Change { space: Space::Objects, key: key.to_vec(), value: Some(value.to_vec()) }
}

fn fail(table: &DiskTable, call: &'static str, after: u32, errno: i32) {
    *table.backend.fails.lock() = Some(Fails { call, after, errno });
}

fn mend(table: &DiskTable) {
    *table.backend.fails.lock() = None;
}

fn value(table: &DiskTable, key: &[u8]) -> Option<Vec<u8>> {
    table.get(Space::Objects, key).unwrap()
}

fn errno(done: Result<(), AnchorError>) -> Option<i32> {
    match done {
        Err(AnchorError::Io { source, .. }) => source.raw_os_error(),
        Err(other) => panic!("{other:?}"),
        Ok(()) => None,
    }
}

/// A commit whose disk fails at a call, after so many of them. How many there were where it does not.
fn failing(call: &'static str, after: u32) -> Option<u32> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let table = DiskTable::create(&path).unwrap();
    table.commit(&[put(b"a", b"1")]).unwrap();
    let changes = (0..8000_u32).map(|n| put(&n.to_be_bytes(), &[7; 200]));
    let changes: Vec<_> = changes.chain([put(b"a", b"2")]).collect();
    fail(&table, call, after, libc::ENOSPC);
    let done = table.commit(&changes);
    let calls = table.backend.fails.lock().as_ref().map(|fails| after - fails.after);
    let has_failed = done.is_err();
    if has_failed {
        assert_eq!(errno(done), Some(libc::ENOSPC), "{call} {after}");
        // The disk may let the file be read, or not: nothing else is answered.
        if let Ok(found) = table.get(Space::Objects, b"a") {
            assert_eq!(found.unwrap(), b"1", "{call} {after}");
        }
        assert!(table.commit(&changes).is_err(), "{call} {after}");
    }
    mend(&table);
    assert_eq!(value(&table, b"a").unwrap(), if has_failed { b"1" } else { b"2" }, "{call} {after}");
    assert!(matches!(DiskTable::open(&path), Err(AnchorError::Locked { .. })), "the locks stay");
    let reader = DiskTable::open_read_only(&path, Readers::BesideWriter).unwrap();
    table.commit(&[put(b"a", b"3")]).unwrap();
    assert_eq!(value(&table, b"a").unwrap(), b"3");
    assert_eq!(value(&reader, b"a").unwrap(), b"3");
    drop((table, reader));
    let table = DiskTable::open(&path).unwrap();
    assert_eq!(value(&table, b"a").unwrap(), b"3");
    assert_eq!(value(&table, &7_u32.to_be_bytes()).is_some(), !has_failed);
    calls.filter(|_| !has_failed)
}

/// A commit that returns an error did not happen, wherever its disk failed; and the next one does.
#[test]
fn what_failed_did_not_happen_and_what_follows_does() {
    for call in ["write", "sync", "reserve"] {
        let calls = failing(call, u32::MAX).unwrap();
        assert!(calls > 0, "{call}");
        let first = 0..calls.min(3);
        let last = calls.saturating_sub(8).max(first.end)..calls;
        for after in first.chain((3..last.start).step_by(211)).chain(last) {
            // What follows the last barrier may fail without harm.
            assert!(failing(call, after).is_none() || after + 1 == calls, "{call} {after} of {calls}");
        }
    }
}

/// The record of a small commit may be in the file, although its barrier has failed, and the database did not take the
/// commit either.
#[test]
fn what_was_perhaps_logged_is_void_before_anything_is_answered() {
    for (call, errno) in [("sync", libc::EIO), ("reserve", libc::ENOSPC)] {
        let dir = tempfile::tempdir().unwrap();
        let (path, copy) = (dir.path().join("anchor"), dir.path().join("copy"));
        let table = DiskTable::create(&path).unwrap();
        table.commit(&[put(b"a", b"1")]).unwrap();
        if call == "reserve" {
            // From now on each transaction asks for space first, and finds none.
            let large: Vec<_> = (0..8000_u32).map(|n| put(&n.to_be_bytes(), &[7; 200])).collect();
            fail(&table, "reserve", 0, errno);
            assert!(table.commit(&large).is_err());
            assert_eq!(value(&table, b"a").unwrap(), b"1");
            mend(&table);
        }
        fail(&table, "sync", 0, libc::EIO);
        assert!(table.commit(&[put(b"b", b"2")]).is_err(), "{call}");
        mend(&table);
        assert_eq!(value(&table, b"b"), None, "{call}");
        // As if the process were killed now.
        std::fs::copy(&path, &copy).unwrap();
        std::fs::set_permissions(&copy, std::os::unix::fs::PermissionsExt::from_mode(FILE_MODE)).unwrap();
        let after = DiskTable::open(&copy).unwrap();
        assert_eq!((value(&after, b"a").as_deref(), value(&after, b"b")), (Some(&b"1"[..]), None), "{call}");
        table.commit(&[put(b"b", b"3")]).unwrap();
        drop(table);
        assert_eq!(value(&DiskTable::open(&path).unwrap(), b"b").unwrap(), b"3");
    }
}

/// A record whose commit has failed and that cannot be made void yet. The database is open.
fn failed_record(path: &Path) -> Arc<DiskTable> {
    let table = Arc::new(DiskTable::create(path).unwrap());
    table.commit(&[put(b"a", b"1")]).unwrap();
    fail(&table, "sync", 0, libc::EIO);
    // The disk answers for a moment.
    let of = table.clone();
    table.backend.hooks.set(OPENS_ANEW, move || mend(&of));
    let of = table.clone();
    table.backend.hooks.set(RECORD_FAILED, move || fail(&of, "sync", 0, libc::EIO));
    assert_eq!(errno(table.commit(&[put(b"b", b"2")])), Some(libc::EIO));
    assert!(table.database.read().handle.is_some());
    table
}

/// Opens a copy, as if the process were killed now.
fn killed(path: &Path) -> DiskTable {
    let copy = path.with_extension("copy");
    std::fs::copy(path, &copy).unwrap();
    std::fs::set_permissions(&copy, std::os::unix::fs::PermissionsExt::from_mode(FILE_MODE)).unwrap();
    DiskTable::open(&copy).unwrap()
}

/// A slow reader that is about to make a failed record void does not make void that of a later commit.
#[test]
fn a_reader_makes_no_record_void_but_the_failed_one() {
    let limit = Duration::from_secs(60);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let table = failed_record(&path);
    mend(&table);
    let ((waits, is_waiting), (go_on, may_go_on), (ends, has_ended)) = (channel(), channel(), channel());
    table.backend.hooks.set(BEFORE_VOIDING, move || {
        waits.send(()).unwrap();
        may_go_on.recv_timeout(limit).unwrap();
    });
    let of = table.clone();
    let reads = std::thread::spawn(move || {
        let found = value(&of, b"a");
        ends.send(()).unwrap();
        found
    });
    is_waiting.recv_timeout(limit).unwrap();
    // The record is void, and the log begins anew.
    table.commit(&[put(b"c", b"3")]).unwrap();
    table.backend.hooks.set(RECORD_WRITTEN, move || {
        go_on.send(()).unwrap();
        has_ended.recv_timeout(limit).unwrap();
    });
    table.commit(&[put(b"d", b"4")]).unwrap();
    assert_eq!(reads.join().unwrap().unwrap(), b"1");
    let after = killed(&path);
    assert_eq!([b"c", b"d"].map(|key| value(&after, key)), [Some(b"3".to_vec()), Some(b"4".to_vec())]);
    assert_eq!(value(&after, b"b"), None, "what failed did not happen");
}

/// After a flush that failed, the system may count as written what the disk does not have.
#[test]
fn whoever_opens_the_file_writes_the_last_record_again() {
    for lens in [&[10, 10][..], &[10, 9000], &[30_000]] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("anchor");
        let table = DiskTable::create(&path).unwrap();
        *table.backend.traced.lock() = Some(Vec::new());
        for (n, len) in lens.iter().enumerate() {
            table.commit(&[put(&[n as u8], &vec![7; *len])]).unwrap();
        }
        let written = table.backend.traced.lock().take().unwrap();
        let after = killed(&path);
        *after.backend.traced.lock() = Some(Vec::new());
        after.read_log().unwrap();
        let again = after.backend.traced.lock().take().unwrap();
        assert!(matches!(again[..], [Traced::Written { .. }, Traced::Flushed]), "{again:?}");
        assert_eq!(again, written[written.len() - 2..]);
    }
}

/// Whatever is read.
#[test]
fn nothing_is_answered_beside_a_failed_record() {
    let dir = tempfile::tempdir().unwrap();
    let table = failed_record(&dir.path().join("anchor"));
    let visit = || table.visit_all(|_, _, _| Ok::<_, AnchorError>(()));
    assert_eq!(errno(table.get(Space::Objects, b"a").map(drop)), Some(libc::EIO));
    assert_eq!(errno(visit()), Some(libc::EIO));
    assert_eq!(errno(table.verify().map(drop)), Some(libc::EIO));
    mend(&table);
    visit().unwrap();
    assert!(table.verify().unwrap());
    assert_eq!(value(&killed(&table.path), b"b"), None);
}

/// A file whose disk is gone for a while is read again when it is back.
#[test]
fn reads_fail_while_the_disk_does() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let writer = DiskTable::create(&path).unwrap();
    // More than is kept in memory.
    for first in [0, 10_000, 20_000_u32] {
        let rows: Vec<_> = (first..first + 10_000).map(|n| put(&n.to_be_bytes(), &[7; 1000])).collect();
        writer.commit(&rows).unwrap();
    }
    drop(writer);
    let writer = DiskTable::open(&path).unwrap();
    let reader = DiskTable::open_read_only(&path, Readers::BesideWriter).unwrap();
    let count = |table: &DiskTable| {
        let mut count = 0;
        let counted = table.scan(Space::Objects, &[], &mut |_, _| {
            count += 1;
            std::ops::ControlFlow::Continue(())
        });
        counted.map(|()| count)
    };
    for table in [writer, reader] {
        assert_eq!(count(&table).unwrap(), 30_000);
        for _ in 0..2 {
            fail(&table, "read", 0, libc::EIO);
            assert_eq!(errno(count(&table).map(drop)), Some(libc::EIO));
            assert_eq!(errno(table.get(Space::Objects, &[]).map(drop)), Some(libc::EIO));
            mend(&table);
            assert_eq!(count(&table).unwrap(), 30_000);
        }
    }
}

/// A read that begins before a commit and looks at the database behind it sees all of the commit, or nothing.
#[test]
fn a_read_beside_a_commit_that_empties_the_log_is_not_torn() {
    let dir = tempfile::tempdir().unwrap();
    let table = Arc::new(DiskTable::create(&dir.path().join("anchor")).unwrap());
    table.commit(&[put(b"a", b"1"), put(b"b", b"1")]).unwrap();
    for to in [b"2", b"3"] {
        // Too much for the log.
        let rows: Vec<_> = (0..2000_u32).map(|n| put(&n.to_be_bytes(), &[7; 200])).collect();
        let rows: Vec<_> = rows.into_iter().chain([put(b"b", to), put(b"c", to)]).collect();
        let of = table.clone();
        table.backend.hooks.set(BETWEEN_READS, move || of.commit(&rows).unwrap());
        let mut seen = Vec::new();
        let visited = table.visit_all(|_, key, value| {
            seen.extend([b"a", b"b", b"c"].iter().any(|one| key == *one).then(|| (key.to_vec(), value.to_vec())));
            Ok::<_, AnchorError>(())
        });
        visited.unwrap();
        let all = [(b"a", b"1"), (b"b", to), (b"c", to)].map(|(key, value)| (key.to_vec(), value.to_vec()));
        assert_eq!(seen, all);
        table.commit(&[put(b"b", b"logged")]).unwrap();
    }
    assert_eq!(value(&table, b"b").unwrap(), b"logged");
}

/// A reader may be as slow as whoever is sent what it reads. A commit that fails meanwhile returns, and so do those
/// after it.
#[test]
fn a_slow_reader_holds_up_no_commit_that_fails() {
    let dir = tempfile::tempdir().unwrap();
    let table = Arc::new(DiskTable::create(&dir.path().join("anchor")).unwrap());
    table.commit(&[put(b"a", b"1")]).unwrap();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (begins, begun) = std::sync::mpsc::channel();
    let of = table.clone();
    let reads = std::thread::spawn(move || {
        let mut count = 0;
        let visited = of.visit_all(|_, _, _| {
            count += 1;
            let _ = begins.send(());
            let _ = released.recv();
            Ok::<_, AnchorError>(())
        });
        visited.map(|()| count)
    });
    begun.recv().unwrap();
    let (said, done) = std::sync::mpsc::channel();
    let of = table.clone();
    let commits = std::thread::spawn(move || {
        let rows: Vec<_> = (0..8000_u32).map(|n| put(&n.to_be_bytes(), &[7; 200])).collect();
        fail(&of, "sync", 0, libc::EIO);
        let failed = errno(of.commit(&rows));
        mend(&of);
        // The reader has the failed database still.
        let failed = [failed, errno(of.commit(&rows)), errno(of.commit(&[put(b"b", b"1")]))];
        said.send(failed.map(|errno| errno.is_some())).unwrap();
    });
    let failed = done.recv_timeout(Duration::from_secs(60)).ok();
    drop(release);
    commits.join().unwrap();
    assert_eq!(failed, Some([true; 3]), "a commit waits for the reader");
    assert_eq!(reads.join().unwrap().unwrap(), 1);
    assert_eq!(value(&table, b"a").unwrap(), b"1");
    table.commit(&[put(b"a", b"2")]).unwrap();
    assert_eq!(value(&table, b"a").unwrap(), b"2");
    assert_eq!(value(&table, &7_u32.to_be_bytes()), None, "what failed did not happen");
}

/// Nothing is begun while the file cannot become longer.
#[test]
fn a_full_disk_shows_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let table = DiskTable::create(&dir.path().join("anchor")).unwrap();
    let many: Vec<_> = (0..20_000_u32).map(|n| put(&n.to_be_bytes(), &[7; 200])).collect();
    fail(&table, "reserve", 0, libc::ENOSPC);
    assert_eq!(errno(table.commit(&many)), Some(libc::ENOSPC));
    let number = table.database.read().number;
    for _ in 0..3 {
        assert_eq!(errno(table.commit(&[put(b"a", b"1")])), Some(libc::ENOSPC));
    }
    assert_eq!(table.database.read().number, number, "no other database had to be opened");
    mend(&table);
    table.commit(&many).unwrap();
}

/// A file system that is unmounted when it is dropped.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// A growing file leaves the disk the bytes that it was told to, whether it grows or fails to. On ext4, a reservation
/// that fails keeps all that it found.
#[test]
fn a_growing_file_never_takes_what_is_kept_free() {
    let dir = tempfile::tempdir().unwrap();
    let (image, disk) = (dir.path().join("image"), dir.path().join("disk"));
    std::fs::create_dir(&disk).unwrap();
    File::create(&image).unwrap().set_len(160 << 20).unwrap();
    let run = |command: &mut std::process::Command| command.output().is_ok_and(|out| out.status.success());
    let has_disk = run(std::process::Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image))
        && run(std::process::Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&disk));
    if !has_disk {
        eprintln!("NOTE: an ext4 is made and mounted, which needs mkfs.ext4 and root: not run");
        return;
    }
    let _mounted = Mounted(disk.clone());
    let free = || rustix::fs::statvfs(&disk).map(|disk| disk.f_bavail * disk.f_frsize).unwrap();
    for kept in [None, Some(24 << 20)] {
        let path = disk.join("anchor");
        let table = DiskTable::create(&path).unwrap();
        let table = if let Some(kept) = kept { table.keeping_free(kept) } else { table };
        let rows = |n: u32| (0..2000).map(move |m| put(&(n * 2000 + m).to_be_bytes(), &[7; 900])).collect::<Vec<_>>();
        let fails = (0..200).find(|n| table.commit(&rows(*n)).is_err()).unwrap();
        for _ in 0..3 {
            assert_eq!(errno(table.commit(&rows(fails))), Some(libc::ENOSPC));
            assert!(free() >= kept.unwrap_or(128 << 10), "{} are left of {kept:?}", free());
        }
        // What was there is read, and what others have cleared up is used.
        assert!(
            value(&table, &1_u32.to_be_bytes()).is_some() && value(&table, &(fails * 2000).to_be_bytes()).is_none()
        );
        drop(table);
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_commit_is_in_the_file_that_the_path_leads_to() {
    let dir = tempfile::tempdir().unwrap();
    let (path, away) = (dir.path().join("anchor"), dir.path().join("away"));
    let table = DiskTable::create(&path).unwrap();
    table.commit(&[put(b"a", b"1")]).unwrap();
    std::fs::rename(&path, &away).unwrap();
    assert!(matches!(table.commit(&[put(b"a", b"2")]), Err(AnchorError::Gone { .. })));
    std::fs::copy(&away, &path).unwrap();
    assert!(matches!(table.commit(&[put(b"a", b"2")]), Err(AnchorError::Gone { .. })), "another file");
    assert_eq!(value(&table, b"a").unwrap(), b"1");
    std::fs::rename(&away, &path).unwrap();
    table.commit(&[put(b"a", b"2")]).unwrap();
}

/// A file that many commits have filled, and its table, still open.
fn filled(path: &Path) -> DiskTable {
    let table = DiskTable::create(path).unwrap();
    for n in 0..24_u64 {
        let key = |m: u64| (n * 200 + m).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
        let changes: Vec<_> = (0..200).map(|m| put(&key(m), &[n as u8; 180])).collect();
        table.commit(&changes).unwrap();
    }
    table
}

fn len(path: &Path) -> u64 {
    path.metadata().unwrap().len()
}

#[test]
fn a_close_gives_back_what_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let table = filled(&path);
    let open = len(&path);
    drop(table);
    let closed = len(&path);
    assert!(closed < open * 4 / 5, "{open} became {closed}");
    // There is little to be had from a few changes, and nothing is tried.
    let table = DiskTable::open(&path).unwrap();
    table.commit(&[put(b"a", b"1")]).unwrap();
    drop(table);
    let again = len(&path);
    assert!(again < closed + closed / 8, "{closed} became {again}");
}

/// Who opens it again at once would wait for that.
#[test]
fn one_that_stays_loose_is_closed_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let table = filled(&path).staying_loose();
    let open = len(&path);
    drop(table);
    assert_eq!(len(&path), open);
}

/// Where another process reads, pages stay where they are, and the next writer that has much to write moves them.
#[test]
fn a_close_beside_a_reader_moves_nothing_under_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let table = filled(&path);
    let reader = DiskTable::open_read_only(&path, Readers::BesideWriter).unwrap();
    let mut count = 0;
    let mut table = Some(table);
    let visited = reader.visit_all(|_, _, _| {
        drop(table.take());
        count += 1;
        Ok::<_, AnchorError>(())
    });
    visited.unwrap();
    assert_eq!(count, 24 * 200);
}

/// A disk that fails while a file is compacted: whoever opens it next finds every row.
#[test]
fn a_compaction_that_fails_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for call in ["read", "write", "sync", "reserve"] {
        for after in [0, 1, 2, 3, 5, 8, 20, 50, 100, 200] {
            let path = dir.path().join(format!("{call}{after}"));
            let table = filled(&path);
            fail(&table, call, after, libc::ENOSPC);
            drop(table);
            let table = DiskTable::open(&path).unwrap();
            assert_eq!(table.rows(Space::Objects, &[], None).unwrap().len(), SCANNED_AT_ONCE, "{call} {after}");
            let mut count = 0;
            let visited = table.visit_all(|_, _, value| {
                assert_eq!(value.len(), 180);
                count += 1;
                Ok::<_, AnchorError>(())
            });
            visited.unwrap();
            assert_eq!(count, 24 * 200, "{call} {after}");
            assert!(table.verify().unwrap(), "{call} {after}");
            table.commit(&[put(b"a", b"1")]).unwrap();
        }
    }
}
