//! Modes, owners, times, extended attributes.

use super::support::{as_user, errno, is_root, read_write};
use rustix::fs::{AtFlags, CWD, FallocateFlags, StatxFlags, Timespec, Timestamps, XattrFlags, utimensat};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// Asked for without times and sizes, which a write makes the kernel ask the daemon for: so it may answer from what it
/// remembers.
fn mode_alone(path: &Path) -> u32 {
    let found = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::MODE).unwrap();
    u32::from(found.stx_mode) & 0o7777
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

pub fn modes_and_umask(dir: &Path) {
    // A process of its own: the umask is the process's.
    let script = "umask 027; touch f; mkdir d; mkfifo p; stat -c %a f d p";
    let out = Command::new("sh").args(["-c", script]).current_dir(dir).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stdout), "640\n750\n640\n");
    for m in [0o000, 0o400, 0o777, 0o1777, 0o2755, 0o4755, 0o7777] {
        for name in ["f", "d"] {
            chmod(&dir.join(name), m);
            assert_eq!(mode(&dir.join(name)), m);
        }
    }
    chmod(&dir.join("f"), 0o644);
    let file = File::open(dir.join("f")).unwrap();
    file.set_permissions(Permissions::from_mode(0o600)).unwrap();
    assert_eq!(mode(&dir.join("f")), 0o600);
    if is_root() {
        chown(dir.join("f"), Some(1000), Some(1001)).unwrap();
        let meta = fs::metadata(dir.join("f")).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (1000, 1001));
        // New entries of a set-gid directory get its group, new directories the bit too.
        chown(dir.join("d"), None, Some(1001)).unwrap();
        chmod(&dir.join("d"), 0o2775);
        fs::create_dir(dir.join("d/sub")).unwrap();
        fs::write(dir.join("d/file"), b"").unwrap();
        assert_eq!(fs::metadata(dir.join("d/sub")).unwrap().gid(), 1001);
        assert_eq!(fs::metadata(dir.join("d/file")).unwrap().gid(), 1001);
        assert_eq!(mode(&dir.join("d/sub")) & libc::S_ISGID, libc::S_ISGID);
    }
}

pub fn times_to_the_nanosecond(dir: &Path) {
    fs::write(dir.join("f"), b"x").unwrap();
    fs::create_dir(dir.join("d")).unwrap();
    std::os::unix::fs::symlink("f", dir.join("l")).unwrap();
    let at = |sec, nsec| Timespec { tv_sec: sec, tv_nsec: nsec };
    for name in ["f", "d", "l"] {
        let path = dir.join(name);
        for (a, m) in [((1, 1), (2_000_000_000, 999_999_999)), ((-5, 250_000_001), (-1, 0)), ((1 << 33, 7), (0, 0))] {
            let times = Timestamps { last_access: at(a.0, a.1), last_modification: at(m.0, m.1) };
            utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
            let meta = fs::symlink_metadata(&path).unwrap();
            assert_eq!((meta.atime(), meta.atime_nsec()), a, "{name}");
            assert_eq!((meta.mtime(), meta.mtime_nsec()), m, "{name}");
        }
        let times = Timestamps { last_access: at(0, libc::UTIME_OMIT), last_modification: at(0, libc::UTIME_NOW) };
        utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
        let meta = fs::symlink_metadata(&path).unwrap();
        assert_eq!((meta.atime(), meta.atime_nsec()), (1 << 33, 7));
        assert!(meta.mtime() > 1_600_000_000);
    }
    // A time set by hand stays, although written data reaches the store later.
    let file = read_write(&dir.join("f"));
    file.write_all_at(&[1; 100_000], 0).unwrap();
    let old = Timestamps { last_access: at(10, 1), last_modification: at(20, 2) };
    rustix::fs::futimens(&file, &old).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let meta = fs::metadata(dir.join("f")).unwrap();
    assert_eq!((meta.mtime(), meta.mtime_nsec(), meta.len()), (20, 2, 100_000));
}

/// Whatever the 64 bits of a time hold, the call is answered, and so is whoever calls next. By system calls of our own:
/// a library might look at the values.
pub fn times_at_the_ends_of_the_range(dir: &Path) {
    let path = dir.join("f");
    fs::write(&path, b"x").unwrap();
    if is_root() {
        // Any user who owns a file there can do this.
        chown(&path, Some(1000), Some(1000)).unwrap();
        fs::set_permissions(dir, Permissions::from_mode(0o777)).unwrap();
    }
    let call = || {
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        let seconds = [i64::MIN, i64::MIN + 1, i64::MIN + 2, i64::MIN / 1_000_000_000, -1, i64::MAX - 1, i64::MAX];
        for (a, m) in seconds.into_iter().flat_map(|a| seconds.map(|m| (a, m))) {
            for nanos in [0, 1, 500_000_000, 999_999_999, 1_000_000_000, -1, i64::MAX, i64::MIN] {
                let times = [(a, nanos), (m, 999_999_999)].map(|(tv_sec, tv_nsec)| libc::timespec { tv_sec, tv_nsec });
                // SAFETY: a path that ends in a zero and two times, all alive during the call.
                let rc =
                    unsafe { libc::syscall(libc::SYS_utimensat, libc::AT_FDCWD, name.as_ptr(), times.as_ptr(), 0) };
                let error = (rc != 0).then(|| std::io::Error::last_os_error().raw_os_error());
                // The kernel itself refuses what are no nanoseconds; a store below may refuse a time it cannot keep.
                assert!(
                    matches!(error, None | Some(Some(libc::EINVAL | libc::ERANGE | libc::EOVERFLOW))),
                    "{a}, {m}, {nanos}: {error:?}"
                );
            }
        }
    };
    if is_root() {
        as_user(1000, call)
    } else {
        call()
    }
    // More requests than there are request threads.
    for i in 0..100 {
        assert_eq!(fs::read(&path).unwrap(), b"x");
        fs::metadata(&path).unwrap();
        fs::write(dir.join(format!("g{i}")), b"y").unwrap();
    }
}

pub fn sizes_and_times_follow_writes(dir: &Path) {
    let path = dir.join("f");
    let file = read_write(&path);
    let zero = Timestamps {
        last_access: Timespec { tv_sec: 1, tv_nsec: 0 },
        last_modification: Timespec { tv_sec: 1, tv_nsec: 0 },
    };
    rustix::fs::futimens(&file, &zero).unwrap();
    file.write_all_at(&super::support::pattern(12_345, 1), 100_000).unwrap();
    let meta = fs::metadata(&path).unwrap();
    assert_eq!(meta.len(), 112_345);
    assert!(meta.mtime() > 1_600_000_000);
    // Space is taken when data reaches the store: shown at the latest once the file is closed.
    drop(file);
    assert!(fs::metadata(&path).unwrap().blocks() >= 24);
    let before = fs::metadata(dir).unwrap().mtime_nsec();
    fs::write(dir.join("g"), b"").unwrap();
    assert_ne!(fs::metadata(dir).unwrap().mtime_nsec(), before, "a new entry changes its directory");
}

pub fn xattrs(dir: &Path) {
    use rustix::fs::{getxattr, listxattr, removexattr, setxattr};
    let path = dir.join("f");
    fs::write(&path, b"x").unwrap();
    fs::create_dir(dir.join("d")).unwrap();
    let mut buf = vec![0u8; 65_536];
    for path in [&path, &dir.join("d")] {
        let value = super::support::pattern(3000, 3);
        setxattr(path, "user.one", &value, XattrFlags::CREATE).unwrap();
        setxattr(path, "user.empty", b"", XattrFlags::empty()).unwrap();
        assert_eq!(setxattr(path, "user.one", b"", XattrFlags::CREATE), Err(rustix::io::Errno::EXIST));
        assert_eq!(setxattr(path, "user.none", b"", XattrFlags::REPLACE), Err(rustix::io::Errno::NODATA));
        assert_eq!(getxattr(path, "user.one", &mut buf[..]), Ok(3000));
        assert_eq!(buf[..3000], value);
        assert_eq!(getxattr(path, "user.one", &mut [0u8; 100][..]), Err(rustix::io::Errno::RANGE));
        assert_eq!(rustix::fs::getxattr_query(path, "user.one"), Ok(3000));
        assert_eq!(getxattr(path, "user.empty", &mut buf[..]), Ok(0));
        assert_eq!(getxattr(path, "user.none", &mut buf[..]), Err(rustix::io::Errno::NODATA));
        let n = listxattr(path, &mut buf[..]).unwrap();
        assert_eq!(rustix::fs::listxattr_query(path), Ok(n));
        assert_eq!(listxattr(path, &mut [0u8; 3][..]), Err(rustix::io::Errno::RANGE));
        let mut names: Vec<_> = buf[..n].split(|b| *b == 0).filter(|n| n.starts_with(b"user.")).collect();
        names.sort();
        assert_eq!(names, [&b"user.empty"[..], b"user.one"]);
        setxattr(path, "user.one", b"short", XattrFlags::REPLACE).unwrap();
        assert_eq!(getxattr(path, "user.one", &mut buf[..]), Ok(5));
        removexattr(path, "user.one").unwrap();
        assert_eq!(removexattr(path, "user.one"), Err(rustix::io::Errno::NODATA));
        for name in ["foo", "lamassu.x", "User.one"] {
            let unsupported = rustix::io::Errno::OPNOTSUPP;
            assert_eq!(setxattr(path, name, b"1", XattrFlags::empty()), Err(unsupported), "{name}");
            assert_eq!(getxattr(path, name, &mut buf[..]), Err(unsupported), "{name}");
            assert_eq!(removexattr(path, name), Err(unsupported), "{name}");
        }
        assert_eq!(setxattr(path, "user.", b"1", XattrFlags::empty()), Err(rustix::io::Errno::INVAL));
    }
}

pub fn statfs_makes_sense(dir: &Path) {
    let s = rustix::fs::statvfs(dir).unwrap();
    assert!(s.f_frsize >= 512 && s.f_blocks >= s.f_bfree && s.f_bfree >= s.f_bavail && s.f_bavail > 0);
    assert_eq!(s.f_namemax, 255);
    let out = Command::new("df").arg(dir).output().unwrap();
    assert!(out.status.success());
}

pub fn set_id_bits_fall_on_change_of_owner(dir: &Path) {
    if !is_root() {
        return;
    }
    let path = dir.join("f");
    fs::write(&path, b"").unwrap();
    chmod(&path, 0o6755);
    chown(&path, Some(7), None).unwrap();
    assert_eq!(mode(&path), 0o755);
    chmod(&path, 0o2745);
    chown(&path, None, Some(7)).unwrap();
    assert_eq!(mode(&path) & 0o777, 0o745);
    fs::create_dir(dir.join("d")).unwrap();
    chmod(&dir.join("d"), 0o2755);
    chown(dir.join("d"), Some(7), None).unwrap();
    assert_eq!(mode(&dir.join("d")), 0o2755, "directories keep the bit");
}

pub fn set_id_bits_fall_on_writes_of_others(dir: &Path) {
    if !is_root() {
        return;
    }
    chmod(dir, 0o777);
    let fresh = |name: &str| {
        let path = dir.join(name);
        fs::write(&path, [1; 10_000]).unwrap();
        chmod(&path, 0o6777);
        path
    };
    type Change = fn(&Path);
    let changes: [(&str, Change); 5] = [
        ("written", |p| read_write(p).write_all_at(b"x", 0).unwrap()),
        ("direct", |p| {
            let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(p).unwrap();
            // Whether the store takes unaligned direct writes does not matter: the adapter asks it for ordinary ones.
            file.write_all_at(b"x", 0).unwrap();
        }),
        ("cut", |p| read_write(p).set_len(5).unwrap()),
        ("punched", |p| {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(read_write(p), mode, 0, 4096).unwrap();
        }),
        ("emptied", |p| drop(File::options().write(true).truncate(true).open(p).unwrap())),
    ];
    for (name, change) in changes {
        let path = fresh(name);
        change(&path);
        assert_eq!(mode(&path), 0o6777, "root's {name} keeps them");
        as_user(65_534, || change(&path));
        assert_eq!(mode_alone(&path), 0o777, "{name}: the mode that the kernel remembers");
        assert_eq!(mode(&path), 0o777, "{name}");
        // Where the group may not execute, the bit is the group's to keep.
        for (group, left) in [(77, 0o666), (65_534, 0o2666)] {
            let path = fresh(&format!("{name}, group {group}"));
            chown(&path, None, Some(group)).unwrap();
            chmod(&path, 0o6666);
            as_user(65_534, || change(&path));
            assert_eq!(mode_alone(&path), left, "{name} by one who is of the group 65534; the file's is {group}");
        }
    }
}

pub fn others_are_kept_out(dir: &Path) {
    if !is_root() {
        return;
    }
    chmod(dir, 0o755);
    fs::write(dir.join("secret"), b"s").unwrap();
    chmod(&dir.join("secret"), 0o600);
    fs::write(dir.join("open"), b"o").unwrap();
    chmod(&dir.join("open"), 0o644);
    as_user(65_534, || {
        assert_eq!(errno(fs::read(dir.join("secret"))), libc::EACCES);
        assert_eq!(fs::read(dir.join("open")).unwrap(), b"o");
        assert_eq!(errno(fs::write(dir.join("open"), b"")), libc::EACCES);
        assert_eq!(errno(fs::write(dir.join("new"), b"")), libc::EACCES);
        assert_eq!(errno(fs::set_permissions(dir.join("open"), Permissions::from_mode(0o777))), libc::EPERM);
    });
    chmod(dir, 0o777);
    as_user(65_534, || {
        fs::write(dir.join("mine"), b"m").unwrap();
        fs::create_dir(dir.join("my-dir")).unwrap();
    });
    for name in ["mine", "my-dir"] {
        let meta = fs::metadata(dir.join(name)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (65_534, 65_534));
    }
}
