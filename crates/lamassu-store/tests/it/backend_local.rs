//! What only a local directory has: permissions of a daemon that is not root, links planted by others, many entries.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use lamassu_store::backend::ByName;
use lamassu_store::backend::{
    Backend, BackendDir, CopyError, LocalBackend, Privileges, RenameMode, SetTime, Watch, lock_staging, next_data,
    open_regular,
};
use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::sync::Arc;

const NOBODY: u32 = 65534;

fn name(s: &str) -> &OsStr {
    OsStr::new(s)
}

fn errno<T>(result: std::io::Result<T>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

/// Runs `f` as a user without privileges, who owns `dir`. Only this thread changes its user.
fn unprivileged(dir: &Path, f: impl FnOnce(Arc<dyn BackendDir>) + Send) {
    let root = rustix::process::geteuid().is_root();
    if root {
        chown(dir, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if root {
                // SAFETY: the system call, unlike the function of libc, concerns the calling thread alone, and no
                // memory.
                let rc = unsafe { libc::syscall(libc::SYS_setresuid, -1i64, i64::from(NOBODY), -1i64) };
                assert_eq!(rc, 0);
            }
            f(LocalBackend::open(dir).unwrap().root());
        });
    });
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o7777
}

#[test]
fn opens_its_own_files_whatever_their_mode() {
    let dir = tempfile::tempdir().unwrap();
    unprivileged(dir.path(), |root| {
        let path = dir.path().join("f");
        root.create_file(name("f")).unwrap().write_at(0, b"secret").unwrap();
        for bits in [0, 0o444, 0o200, 0o4044] {
            root.set_mode_entry(name("f"), bits).unwrap();
            for write in [false, true] {
                let file = root.open_file(name("f"), write).unwrap();
                let mut buf = [0; 6];
                assert_eq!(file.read_at(0, &mut buf).unwrap(), 6);
                assert_eq!(&buf, b"secret");
                assert_eq!(file.write_at(0, b"s").is_ok(), write);
                assert_eq!(mode(&path), bits & !(0o4000 * u32::from(write)), "the mode was not given back");
            }
        }
    });
}

#[test]
fn lent_modes_never_show_and_undo_no_chmod() {
    let dir = tempfile::tempdir().unwrap();
    unprivileged(dir.path(), |root| {
        root.create_file(name("f")).unwrap().set_mode(0).unwrap();
        std::thread::scope(|scope| {
            // The user belongs to the thread that set it, and threads inherit it.
            let opener = scope.spawn(|| (0..300).for_each(|_| drop(root.open_file(name("f"), true).unwrap())));
            for bits in [0, 0o040, 0o004].into_iter().cycle() {
                root.set_mode_entry(name("f"), bits).unwrap();
                for _ in 0..10 {
                    assert_eq!(root.stat_entry(name("f")).unwrap().mode, bits);
                }
                if opener.is_finished() {
                    break;
                }
            }
        });
    });
}

#[test]
fn another_users_files_stay_closed() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("theirs"), b"x").unwrap();
    std::fs::set_permissions(dir.path().join("theirs"), std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::create_dir(dir.path().join("shut")).unwrap();
    std::fs::set_permissions(dir.path().join("shut"), std::fs::Permissions::from_mode(0o700)).unwrap();
    unprivileged(dir.path(), |root| {
        assert_eq!(errno(root.open_file(name("theirs"), false)), Some(libc::EACCES));
        assert_eq!(errno(root.open_file(name("theirs"), true)), Some(libc::EACCES));
        let shut = root.open_dir(name("shut")).unwrap().lending().unwrap();
        assert_eq!(errno(shut.stat_entry(name("f"))), Some(libc::EACCES));
    });
    assert_eq!(mode(&dir.path().join("theirs")), 0o600);
    assert_eq!(mode(&dir.path().join("shut")), 0o700);
}

#[test]
fn a_directory_that_may_only_be_searched_still_serves() {
    let dir = tempfile::tempdir().unwrap();
    unprivileged(dir.path(), |root| {
        root.make_dir(name("d"), 0o700).unwrap();
        root.set_mode_entry(name("d"), 0o300).unwrap();
        let d = root.open_dir(name("d")).unwrap();
        d.create_file(name("f")).unwrap().write_at(0, b"x").unwrap();
        assert_eq!(d.stat_entry(name("f")).unwrap().len, 1);
        assert_eq!(errno(d.read_dir()), Some(libc::EACCES));
        d.sync().unwrap();
        d.set_times(lamassu_store::backend::SetTime::Now, lamassu_store::backend::SetTime::Keep).unwrap();
        d.set_mode(0o700).unwrap();
        assert_eq!(d.stat().unwrap().mode, 0o700);
        assert_eq!(d.read_dir().unwrap().len(), 1);
    });
}

#[test]
fn lent_modes_of_directories_never_show_and_undo_no_chmod() {
    let dir = tempfile::tempdir().unwrap();
    unprivileged(dir.path(), |root| {
        root.make_dir(name("d"), 0o700).unwrap();
        let d = root.open_dir(name("d")).unwrap();
        d.create_file(name("f")).unwrap();
        d.make_dir(name("e"), 0o700).unwrap();
        d.set_mode(0).unwrap();
        let denied = |d: &dyn BackendDir| assert_eq!(errno(d.stat_entry(name("f"))), Some(libc::EACCES));
        denied(&*d);
        let lending = d.lending().unwrap();
        // Who finds the lock taken does not wait until its holder has made the staging directory: both are made here.
        drop(lending.as_backend(true).unwrap().try_lock(name("lock")).unwrap());
        let looks = || {
            for _ in 0..200 {
                assert_eq!(lending.stat_entry(name("f")).unwrap().len, 0);
                lending.open_file(name("f"), true).unwrap();
                lending.open_dir(name("e")).unwrap().read_dir().unwrap();
                let backend = lending.as_backend(true).unwrap();
                match backend.try_lock(name("lock")) {
                    Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
                    Ok(lock) => drop(lock),
                }
                // The file, the directory, the lock and the staging directory.
                assert_eq!(lending.read_dir().unwrap().len(), 4);
            }
        };
        std::thread::scope(|scope| {
            let lookers = [scope.spawn(looks), scope.spawn(looks)];
            for bits in [0, 0o040, 0o300, 0o500].into_iter().cycle() {
                d.set_mode(bits).unwrap();
                for _ in 0..10 {
                    assert_eq!(d.stat().unwrap().mode, bits);
                    assert_eq!(root.stat_entry(name("d")).unwrap().mode, bits);
                }
                if lookers.iter().all(|looker| looker.is_finished()) {
                    break;
                }
            }
        });
        d.set_mode(0).unwrap();
        // Nothing but stats, one after the other: some of them meet a lent mode.
        std::thread::scope(|scope| {
            let looker = scope.spawn(looks);
            while !looker.is_finished() {
                assert_eq!(d.stat().unwrap().mode, 0);
            }
        });
        denied(&*lending.as_backend(true).unwrap().root());
        denied(&*d);
    });
}

#[test]
fn a_lock_outlives_the_removal_of_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let take = || LocalBackend::open(dir.path()).unwrap().try_lock(name("lock"));
    let held = take().unwrap();
    std::fs::remove_file(dir.path().join("lock")).unwrap();
    for _ in 0..2 {
        assert_eq!(take().map(drop).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        // The second time there is a file again, and nobody holds it.
        assert!(dir.path().join("lock").exists());
    }
    // A directory in it is another store.
    let root = LocalBackend::open(dir.path()).unwrap().root();
    root.make_dir(name("inner"), 0o700).unwrap();
    let inner = root.open_dir(name("inner")).unwrap();
    let inner = inner.as_backend(true).unwrap();
    let inner_held = inner.try_lock(name("lock")).unwrap();
    assert!(inner.try_lock(name("lock")).is_err(), "by another open of this process, too");
    drop(held);
    drop(take().unwrap());
    drop(inner_held);
    drop(inner.try_lock(name("lock")).unwrap());
}

#[test]
fn a_staging_directory_that_is_locked_is_busy_and_one_that_is_missing_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let open = || std::fs::File::open(dir.path()).unwrap();
    assert!(lock_staging(open()).unwrap().is_none());
    std::fs::create_dir(dir.path().join("lamassu.staging")).unwrap();
    let held = lock_staging(open()).unwrap().expect("this host locks directories");
    assert_eq!(errno(lock_staging(open())), Some(libc::EWOULDBLOCK));
    assert_eq!(errno(LocalBackend::open(dir.path()).unwrap().try_lock(name("lock"))), Some(libc::EWOULDBLOCK));
    drop(held);
    drop(LocalBackend::open(dir.path()).unwrap().try_lock(name("lock")).unwrap());
    // Something else by that name is no reason to go on with half a lock.
    std::fs::remove_dir(dir.path().join("lamassu.staging")).unwrap();
    std::fs::write(dir.path().join("lamassu.staging"), "").unwrap();
    assert_eq!(errno(lock_staging(open())), Some(libc::ENOTDIR));
    assert_eq!(errno(LocalBackend::open(dir.path()).unwrap().try_lock(name("lock"))), Some(libc::ENOTDIR));
}

#[test]
fn a_store_that_may_only_be_searched_is_read() {
    let dir = tempfile::tempdir().unwrap();
    unprivileged(dir.path(), |root| {
        root.make_dir(name("d"), 0o700).unwrap();
        let d = root.open_dir(name("d")).unwrap();
        d.create_file(name("f")).unwrap().write_at(0, b"x").unwrap();
        d.set_mode(0o300).unwrap();
        assert_eq!(errno(d.as_backend(true)), Some(libc::EACCES));
        let inner = d.as_backend(false).unwrap().root();
        assert_eq!(inner.open_file(name("f"), false).unwrap().stat().unwrap().len, 1);
        assert_eq!(errno(inner.read_dir()), Some(libc::EACCES));
        assert_eq!(inner.stat().unwrap().mode, 0o300);
    });
}

/// A file with a lease on it.
struct Leased(std::fs::File);

impl Leased {
    fn new(path: std::path::PathBuf) -> Leased {
        std::fs::write(&path, b"content").unwrap();
        let leased = Leased(std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap());
        const F_SETSIG: i32 = 10;
        // One that is ignored unless a program wants it.
        leased.call(F_SETSIG, libc::SIGURG);
        leased.call(libc::F_SETLEASE, libc::F_WRLCK);
        leased
    }

    fn call(&self, what: i32, value: i32) -> i32 {
        use std::os::fd::AsRawFd;
        // SAFETY: the calls concern an open descriptor, and no memory.
        let done = unsafe { libc::fcntl(self.0.as_raw_fd(), what, value) };
        assert!(done >= 0);
        done
    }

    fn give_way(&self) {
        self.call(libc::F_SETLEASE, libc::F_UNLCK);
    }

    /// The kernel shows what an open makes of it.
    fn is_recalled(&self) -> bool {
        self.call(libc::F_GETLEASE, 0) != libc::F_WRLCK
    }
}

/// Whoever owns a file can take a lease on it, for which open(2) waits 45 seconds. A holder that gives way, as a file
/// server does, holds nobody up for long, however many files it has.
#[test]
fn a_lease_on_a_file_holds_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    let root = LocalBackend::open(dir.path()).unwrap().root();
    let names: Vec<String> = (0..15).map(|number| format!("f{number}")).collect();
    let mut leased: Vec<Leased> = names.iter().map(|name| Leased::new(dir.path().join(name))).collect();
    let opened: Vec<_> = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !leased.is_empty() {
                leased.extract_if(.., |leased| leased.is_recalled()).for_each(|leased| leased.give_way());
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        names.iter().map(|file| errno(root.open_file(name(file), true))).collect()
    });
    assert!(opened.iter().all(Option::is_none), "{opened:?}");
    let kept = Leased::new(dir.path().join("kept"));
    for write in [false, true] {
        assert_eq!(errno(root.open_file(name("kept"), write)), Some(libc::EWOULDBLOCK));
    }
    kept.give_way();
    root.open_file(name("kept"), true).unwrap();
}

#[test]
fn planted_links_lead_nowhere() {
    let (outside, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(outside.path().join("victim"), b"untouched").unwrap();
    let before = outside.path().join("victim").metadata().unwrap();
    let root = LocalBackend::open(dir.path()).unwrap().root();
    symlink(outside.path(), dir.path().join("d")).unwrap();
    symlink(outside.path().join("victim"), dir.path().join("f")).unwrap();
    symlink(outside.path().join("new"), dir.path().join("dangling")).unwrap();
    assert_eq!(errno(root.open_dir(name("d"))), Some(libc::ENOTDIR));
    assert_eq!(errno(root.open_file(name("f"), true)), Some(libc::ELOOP));
    assert_eq!(errno(root.create_file(name("dangling"))), Some(libc::EEXIST));
    assert_eq!(errno(root.set_mode_entry(name("f"), 0o777)), Some(libc::EOPNOTSUPP));
    assert!(root.set_xattr_entry(name("f"), name("user.x"), b"x", 0).is_err());
    let _ = root.set_owner_entry(name("f"), Some(NOBODY), None);
    root.unlink(name("f")).unwrap();
    let after = outside.path().join("victim").metadata().unwrap();
    assert_eq!((before.mode(), before.uid(), before.ctime_nsec()), (after.mode(), after.uid(), after.ctime_nsec()));
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 1);
}

#[test]
fn opening_the_store_follows_the_users_own_link_only() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("real")).unwrap();
    symlink("real", dir.path().join("link")).unwrap();
    LocalBackend::open(dir.path().join("link")).unwrap().root().make_dir(name("x"), 0o700).unwrap();
    assert!(dir.path().join("real/x").is_dir());
    std::fs::write(dir.path().join("file"), b"").unwrap();
    assert_eq!(errno(LocalBackend::open(dir.path().join("file"))), Some(libc::ENOTDIR));
    assert_eq!(errno(LocalBackend::open(dir.path().join("none"))), Some(libc::ENOENT));
}

#[test]
fn access_times_can_be_left_alone() {
    use lamassu_store::backend::SetTime;
    let dir = tempfile::tempdir().unwrap();
    let root = LocalBackend::open(dir.path()).unwrap().without_access_times().root();
    root.make_dir(name("d"), 0o700).unwrap();
    let d = root.open_dir(name("d")).unwrap();
    d.create_file(name("f")).unwrap().write_at(0, b"x").unwrap();
    let long_ago = SetTime::At(lamassu_store::backend::Time { seconds: 1000, nanos: 0 });
    let atimes = || (d.stat().unwrap().atime.seconds, d.stat_entry(name("f")).unwrap().atime.seconds);
    for write in [false, true] {
        d.set_times(long_ago, SetTime::Keep).unwrap();
        d.set_times_entry(name("f"), long_ago, SetTime::Keep).unwrap();
        assert_eq!(d.open_file(name("f"), write).unwrap().read_at(0, &mut [0; 9]).unwrap(), 1);
        assert_eq!(root.open_dir(name("d")).unwrap().read_dir().unwrap().len(), 1);
        assert_eq!(atimes(), (1000, 1000));
    }
}

/// Somebody swaps a directory for a link to elsewhere, and back, as fast as they can. Nothing ever happens elsewhere.
#[test]
fn a_directory_swapped_for_a_link_leads_nowhere() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let (outside, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(outside.path().join("f"), b"untouched").unwrap();
    std::fs::write(outside.path().join("g"), b"untouched").unwrap();
    std::fs::create_dir(dir.path().join("d")).unwrap();
    std::fs::write(dir.path().join("d/f"), b"inside").unwrap();
    symlink(outside.path(), dir.path().join("link")).unwrap();
    let seen = |name: &str| {
        let meta = outside.path().join(name).metadata().unwrap();
        (meta.mode(), meta.uid(), meta.ctime(), meta.ctime_nsec(), std::fs::read(outside.path().join(name)).unwrap())
    };
    let itself = || {
        let meta = outside.path().metadata().unwrap();
        (meta.mode(), meta.ctime(), meta.ctime_nsec())
    };
    let before = (seen("f"), seen("g"), itself());
    let root = LocalBackend::open(dir.path()).unwrap().root();
    let done = AtomicBool::new(false);
    let (mut reached, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let top = rustix::fs::open(dir.path(), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
            while !done.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(&top, "d", &top, "link", rustix::fs::RenameFlags::EXCHANGE).unwrap();
            }
        });
        while reached < 300 || refused < 300 {
            match root.open_dir(name("d")) {
                Err(_) => refused += 1,
                Ok(d) => {
                    reached += 1;
                    // By now the name may lead elsewhere; the open directory does not.
                    let f = d.open_file(name("f"), true).unwrap();
                    let mut inside = [0; 6];
                    assert_eq!((f.read_at(0, &mut inside).unwrap(), &inside), (6, b"inside"));
                    f.write_at(0, b"inside").unwrap();
                    d.set_mode_entry(name("f"), 0o600).unwrap();
                    let _ = d.set_xattr_entry(name("f"), name("user.x"), b"x", 0);
                    d.create_file(name("g")).unwrap();
                    d.rename(name("g"), &*d, name("h"), RenameMode::Replace).unwrap();
                    d.unlink(name("h")).unwrap();
                }
            }
            // These name the entry itself, whatever it is at that moment.
            let _ = root.set_times_entry(name("d"), SetTime::Now, SetTime::Now);
            let _ = root.set_mode_entry(name("d"), 0o755);
            let _ = root.set_xattr_entry(name("d"), name("user.x"), b"x", 0);
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!((seen("f"), seen("g"), itself()), before);
    let mut left: Vec<_> = std::fs::read_dir(outside.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["f", "g"]);
}

/// Stores tell of holes in units of their own, or not at all.
#[test]
fn data_is_found_up_to_a_length() {
    use std::os::unix::fs::FileExt;
    const MIB: u64 = 1 << 20;
    let file = tempfile::tempfile().unwrap();
    file.set_len(3 * MIB).unwrap();
    file.write_all_at(b"data", MIB).unwrap();
    let (start, end) = next_data(&file, 0, 3 * MIB).unwrap();
    assert!(start <= MIB && MIB < end && end <= 3 * MIB, "{start} {end}");
    for behind in [end, 3 * MIB, 4 * MIB] {
        assert_eq!(next_data(&file, behind, 3 * MIB).unwrap(), (3 * MIB, 3 * MIB));
    }
    assert_eq!(next_data(&file, MIB, MIB + 1).unwrap(), (MIB, MIB + 1), "no more than was asked for");
}

/// A device has no data in places that grow, and whoever goes on from them would never come to an end.
#[test]
fn data_is_never_found_where_it_was_looked_for_before() {
    let zero = std::fs::File::open("/dev/zero").unwrap();
    assert!(next_data(&zero, 0, 4096).is_err());
}

/// Copies all there is.
struct All;

impl Watch for All {
    fn wants(&mut self, _: &Path, _: &OsStr) -> bool {
        true
    }

    fn advance(&mut self, _: u64, _: u64) -> bool {
        true
    }
}

/// A file of the store is exchanged with a fifo all the while, in the place of which a device could be. The kernel
/// tells of each open of the fifo.
#[test]
fn what_is_exchanged_for_a_file_is_never_opened() {
    use rustix::fs::{CWD, FileType, Mode, RenameFlags, inotify};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};
    let (dir, side) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (file, fifo) = (dir.path().join("f"), side.path().join("fifo"));
    std::fs::write(&file, b"content").unwrap();
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    let opens = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&opens, &fifo, inotify::WatchFlags::OPEN).unwrap();
    let stop = AtomicBool::new(false);
    let (mut opened, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(CWD, &file, CWD, &fifo, RenameFlags::EXCHANGE).unwrap();
            }
        });
        let store = LocalBackend::open(dir.path()).unwrap();
        let root = store.root();
        let begun = Instant::now();
        let mut count = |result: bool| if result { opened += 1 } else { refused += 1 };
        while begun.elapsed() < Duration::from_secs(3) {
            count(root.open_file(name("f"), false).is_ok());
            count(root.open_file(name("f"), true).is_ok());
            if let Ok(seen) = root.stat_entry(name("f")) {
                count(root.open_same(name("f"), &seen, false).is_ok_and(|same| same.is_some()));
            }
            count(root.stat_and_open(name("f")).is_ok_and(|(_, opened)| opened.is_some()));
            count(store.try_lock(name("f")).is_ok());
            count(open_regular(CWD, &file).is_ok());
            let to = tempfile::tempdir().unwrap();
            let copy = store.copy_to(&LocalBackend::open(to.path()).unwrap(), Privileges::Dropped, &mut All);
            let copied = std::fs::symlink_metadata(to.path().join("f")).ok();
            match copied.filter(std::fs::Metadata::is_file) {
                Some(_) => assert_eq!(std::fs::read(to.path().join("f")).unwrap(), b"content"),
                None if copy.is_ok() => {}
                None => assert!(matches!(copy, Err(CopyError::Exchanged { .. })), "{copy:?}"),
            }
            count(copy.is_ok());
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(opened > 0 && refused > 0, "{opened} {refused}");
    let mut buf = [std::mem::MaybeUninit::uninit(); 1024];
    assert!(inotify::Reader::new(&opens, &mut buf).next().is_err(), "the fifo was opened");
}
