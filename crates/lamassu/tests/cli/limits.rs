//! A user of a mount who takes as much as the system gives: what is left for the others.

use crate::mounts::{daemon_of, is_mounted, wait_for};
use crate::support::{Bench, flip, noise};
use rustix::fs::{Gid, Uid};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// `CAP_SYS_RESOURCE`.
const SYS_RESOURCE: u32 = 24;
const ANN: u32 = 65_533;
const BEN: u32 = 65_534;

/// A mount of root's for all, with a directory of each user, served by a process of that limit of descriptors.
fn bench_for_all(limit: u64, how: &str) -> Option<Bench> {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: takes root and /dev/fuse");
        return None;
    }
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run(&format!("mount --allow-other {how} v m")).ok();
    for dir in [".", "m"] {
        fs::set_permissions(b.path(dir), fs::Permissions::from_mode(0o755)).unwrap();
    }
    for (name, uid) in [("ann", ANN), ("ben", BEN)] {
        chown(b.dir(&format!("m/{name}")), Some(uid), Some(uid)).unwrap();
    }
    let pid = Pid::from_raw(daemon_of(&b)).unwrap();
    prlimit(Some(pid), Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    Some(b)
}

/// Runs `body` as a user, on a thread of its own.
fn as_user<T: Send>(uid: u32, body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(uid));
            rustix::thread::set_thread_groups(&[]).unwrap();
            rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            body()
        });
        run.join().unwrap()
    })
}

/// Opens files until that is refused: what is open, and why no more.
fn open_until_refused(dir: &Path) -> (Vec<File>, i32) {
    let mut held = Vec::new();
    for i in 0..5000 {
        match File::create(dir.join(i.to_string())) {
            Ok(file) => held.push(file),
            Err(error) => return (held, error.raw_os_error().unwrap()),
        }
    }
    panic!("nothing was refused");
}

fn opens(path: PathBuf) -> io::Result<()> {
    File::create(path).map(drop)
}

#[test]
fn open_files_of_one_user_leave_others_theirs_and_those_of_all_leave_root_some() {
    const LIMIT: u64 = 512;
    let Some(b) = bench_for_all(LIMIT, "") else { return };
    let (ann, ben) = (b.path("m/ann"), b.path("m/ben"));
    let (of_ann, refused) = as_user(ANN, || open_until_refused(&ann));
    assert_eq!((of_ann.len() as u64, refused), (LIMIT / 4, libc::EMFILE));
    // A directory takes one as well, and what is open already takes no more.
    assert_eq!(as_user(ANN, || fs::read_dir(&ann).map(drop)).unwrap_err().raw_os_error(), Some(libc::EMFILE));
    as_user(BEN, || opens(ben.join("f"))).unwrap();
    let (of_ben, refused) = as_user(BEN, || open_until_refused(&ben));
    assert_eq!(refused, libc::ENFILE, "{} open", of_ben.len());
    assert!(of_ben.len() as u64 > LIMIT / 8);
    // Names are still found, and root does as before.
    as_user(BEN, || fs::metadata(ben.join("f"))).unwrap();
    let of_root: Vec<_> = (0..60).map(|i| File::create(b.path(&format!("m/root{i}"))).unwrap()).collect();
    b.dir("m/d/e/f/g");
    assert_eq!(fs::read_dir(b.path("m")).unwrap().count(), 63);
    b.run("info m").ok();
    drop((of_root, of_ann, of_ben));
    let patience = Instant::now() + Duration::from_secs(60);
    while let Err(error) = as_user(ANN, || opens(ann.join("again"))) {
        assert!(Instant::now() < patience, "given back: {error}");
    }
    b.unmount("m");
    b.run("check v").ok();
}

/// Each open directory that was listed keeps its listing. 3,000 names of 160 bytes take some 260 bytes each.
#[test]
fn listings_of_one_user_take_no_more_memory_than_they_may() {
    const NAMES: usize = 3000;
    const OPENED: usize = 300;
    // Without a cache of the kernel, which would answer for us.
    let Some(b) = bench_for_all(4096, "--cache none") else { return };
    let (ann, ben) = (b.path("m/ann"), b.path("m/ben"));
    opens(b.path("m/one")).unwrap();
    (0..NAMES).for_each(|i| fs::hard_link(b.path("m/one"), ann.join(format!("{i:0160}"))).unwrap());
    let begin = |dir: &Path| {
        let mut listing = fs::read_dir(dir)?;
        listing.next().unwrap_or(Err(io::ErrorKind::NotFound.into()))?;
        io::Result::Ok(listing)
    };
    let (held, refused): (Vec<_>, Vec<_>) = as_user(ANN, || (0..OPENED).map(|_| begin(&ann)).partition(Result::is_ok));
    let why = refused.first().expect("some are refused").as_ref().err();
    assert_eq!(why.and_then(io::Error::raw_os_error), Some(libc::ENOMEM));
    // 128 MiB, of which each takes at least the names in the clear.
    assert!(held.len() > 50 && held.len() * NAMES * 160 < 129 << 20, "{}", held.len());
    // A small one neither; but others list, root does, and so does she when some are closed.
    as_user(ANN, || fs::create_dir(ann.join("sub"))).unwrap();
    as_user(BEN, || fs::create_dir(ben.join("sub"))).unwrap();
    assert_eq!(as_user(ANN, || begin(&ann)).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
    as_user(BEN, || begin(&ben)).unwrap();
    begin(&ann).unwrap();
    drop((held, refused));
    let mut whole = 0;
    wait_for("what was closed", || as_user(ANN, || begin(&ann).map(|rest| whole = 1 + rest.count())).is_ok());
    assert_eq!(whole, NAMES + 1);
    b.unmount("m");
}

#[test]
fn a_mount_of_root_may_have_as_many_open_files_as_any_process() {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let granted = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    if u64::from_str_radix(granted.trim(), 16).unwrap() & 1 << SYS_RESOURCE == 0 {
        eprintln!("SKIPPED: takes SYS_RESOURCE");
        return;
    }
    let Some(b) = bench_for_all(4096, "") else { return };
    b.unmount("m");
    let line = format!("ulimit -n 300; exec {} mount v m", env!("CARGO_BIN_EXE_lamassu"));
    let direct = b.command(["mount"]);
    let environment = direct.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let mut command = Command::new("sh");
    command.args(["-c", &line]).current_dir(b.path(".")).envs(environment);
    assert!(command.status().unwrap().success());
    let limits = fs::read_to_string(format!("/proc/{}/limits", daemon_of(&b))).unwrap();
    let most = fs::read_to_string("/proc/sys/fs/nr_open").unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(files.split_whitespace().nth(3), Some(most.trim()), "{files}");
    b.unmount("m");
}

/// Reads a damaged block again and again: how many lines of the failed request the log then has, and how many were left
/// out by its own account.
fn lines_of_reads_that_fail(b: &Bench, reads: usize, how: &str) -> (usize, usize) {
    let _ = fs::remove_file(b.path("log"));
    let line = format!("mount --cache none --log-file log {how} v m");
    let mut process = b.command(line.split_whitespace()).spawn().unwrap();
    if how.is_empty() {
        assert!(process.wait().unwrap().success());
    }
    wait_for("a mount", || is_mounted(&b.path("m")));
    let file = File::open(b.path("m/f")).unwrap();
    for _ in 0..reads {
        let error = std::os::unix::fs::FileExt::read_at(&file, &mut [0; 4096], 2 * 4096).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
    drop(file);
    b.unmount("m");
    assert!(process.wait().unwrap().success());
    let mut told = (0, 0);
    // The daemon may still be about to end.
    wait_for("all lines", || {
        let log = fs::read_to_string(b.path("log")).unwrap();
        let of_reads = log.lines().filter(|line| line.contains("input/output error"));
        let (counts, lines): (Vec<_>, Vec<_>) = of_reads.partition(|line| line.contains("left out"));
        let number = |line: &&str| {
            let (_, from) = line.split_once("repeated=").unwrap();
            from.split(' ').next().unwrap().parse::<usize>().unwrap()
        };
        told = (lines.len(), counts.iter().map(number).sum());
        told.0 + told.1 >= reads
    });
    told
}

#[test]
fn a_user_fills_no_log_and_what_is_left_out_is_counted() {
    const READS: usize = 300;
    if !Path::new("/dev/fuse").exists() {
        return eprintln!("SKIPPED: takes /dev/fuse");
    }
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.file("f", &noise(100_000, 5));
    b.run("cp v f vault:").ok();
    flip(&b.stored("v", "f"), 3 * 4096);
    let (lines, left_out) = lines_of_reads_that_fail(&b, READS, "");
    assert_eq!(lines + left_out, READS);
    assert!(lines <= 10, "{lines} of the same");
    assert_eq!(lines_of_reads_that_fail(&b, READS, "--foreground"), (READS, 0));
}

/// What root has just looked at is in the kernel's caches. Another user gets none of it.
#[test]
fn a_mount_for_root_and_its_owner_shows_others_nothing_that_is_cached() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: takes root");
        return;
    }
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount -o allow_root v m").ok();
    for dir in [".", "m"] {
        fs::set_permissions(b.path(dir), fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::create_dir(b.path("m/d")).unwrap();
    std::os::unix::fs::symlink("secret", b.path("m/d/link")).unwrap();
    for _ in 0..3 {
        let stat = |path: &str| fs::metadata(b.path(path)).map(drop);
        let look = || [stat("m"), stat("m/d"), fs::read_link(b.path("m/d/link")).map(drop)];
        // The kernel asks for access lists, if it has to judge others than the owner.
        for dir in ["m", "m/d"] {
            let _ = rustix::fs::getxattr(b.path(dir), "system.posix_acl_access", &mut [0_u8; 512][..]);
        }
        assert!(look().iter().all(Result::is_ok));
        for done in as_user(ANN, look) {
            assert_eq!(done.unwrap_err().raw_os_error(), Some(libc::EACCES));
        }
    }
    b.unmount("m");
}
