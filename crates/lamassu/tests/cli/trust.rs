//! What whoever can write the store would have root make outside of a vault: set-id programs, device nodes,
//! capabilities; and who owns the directory that is copied to.

use crate::support::Bench;
use rustix::fs::{CWD, FileType, Mode, XattrFlags, makedev, mknodat};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, lchown};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// CAP_SETUID, effective, as `setcap` writes it.
const CAPABILITY: &[u8; 20] = b"\x01\x00\x00\x02\x80\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
const CAPABILITY_NAME: &str = "security.capability";

pub fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("SKIPPED: this takes root");
    }
    is_root
}

/// A vault `v` with a tree `t`, whose store was then changed: `suid` is set-user-id of root, `disk` a block device,
/// `own` another user's, and `capable` has a capability that went in through a mount.
fn changed_store(b: &Bench) {
    // Without an anchor, whose word would count, and not the store's.
    b.run("init --anchor none v").ok();
    b.dir("t/sub");
    for name in ["suid", "disk", "capable", "own", "sub/plain"] {
        b.file(&format!("t/{name}"), name.as_bytes());
    }
    b.run("cp -r v t vault:").ok();
    let mnt = b.dir("mnt");
    b.run("mount v mnt").ok();
    rustix::fs::setxattr(mnt.join("t/capable"), CAPABILITY_NAME, CAPABILITY, XattrFlags::empty()).unwrap();
    rustix::fs::setxattr(mnt.join("t/capable"), "user.colour", b"blue", XattrFlags::empty()).unwrap();
    b.unmount("mnt");
    fs::set_permissions(b.stored("v", "t/suid"), fs::Permissions::from_mode(0o6755)).unwrap();
    lchown(b.stored("v", "t/own"), Some(1234), Some(1234)).unwrap();
    let disk = b.stored("v", "t/disk");
    fs::remove_file(&disk).unwrap();
    mknodat(CWD, &disk, FileType::BlockDevice, Mode::from_raw_mode(0o666), makedev(7, 99)).unwrap();
    b.run("check v").ok();
}

fn has_attribute(path: &Path, name: &str) -> bool {
    rustix::fs::lgetxattr(path, name, &mut [0; 64][..]).is_ok()
}

#[test]
fn a_clone_has_nothing_that_gives_rights() {
    if !is_root() {
        return;
    }
    let b = Bench::new();
    changed_store(&b);
    fs::set_permissions(b.path("v"), fs::Permissions::from_mode(0o777)).unwrap();
    lchown(b.path("v"), Some(1234), Some(1234)).unwrap();
    let stored = |name: &str, copy: &str| b.path(copy).join(b.stored("v", name).strip_prefix(b.path("v")).unwrap());
    let top = |copy: &str| {
        let m = b.path(copy).metadata().unwrap();
        (m.uid(), m.mode() & 0o7777)
    };
    for (copy, line) in [("w", "clone --json v w"), ("s", "snapshot --json v s")] {
        let ran = b.run(line).ok().says("set-id bits of 1 entries").says("1 device nodes").says("--trust-store");
        let made = &ran.json()["copies"][0];
        assert_eq!((&made["set_id_dropped"], &made["devices_left_out"]), (&1.into(), &1.into()));
        assert_eq!(stored("t/suid", copy).metadata().unwrap().mode() & 0o7777, 0o755);
        assert!(stored("t/disk", copy).symlink_metadata().is_err());
        assert_eq!(stored("t/own", copy).metadata().unwrap().uid(), 1234, "whose a file is in a mount");
        assert_eq!(top(copy), (0, 0o700));
        assert_eq!(b.run(&format!("cat {copy} t/suid")).ok().text(), "suid");
        b.run(&format!("check {copy}")).ok();
    }
    let made = b.run("clone --trust-store --json v x").ok().json();
    let made = &made["copies"][0];
    assert_eq!((&made["set_id_dropped"], &made["devices_left_out"]), (&0.into(), &0.into()));
    assert_eq!(stored("t/suid", "x").metadata().unwrap().mode() & 0o7777, 0o6755);
    let disk = stored("t/disk", "x").symlink_metadata().unwrap();
    assert!(disk.file_type().is_block_device() && disk.rdev() == makedev(7, 99) && disk.mode() & 0o777 == 0o644);
    assert_eq!(top("x"), (1234, 0o777));
}

#[test]
fn a_copy_has_nothing_that_gives_rights() {
    if !is_root() {
        return;
    }
    let b = Bench::new();
    changed_store(&b);
    let of = |path: &str| b.path(path).symlink_metadata().unwrap();
    let bits = |path: &str| of(path).mode() & 0o7777;
    let ran = b.run("cp -r v vault:t out").code(28).says("t/disk: is a device node").says("1 of 7 could not be done");
    ran.says("set-id bits of 1 entries").says("1 attributes").says("owners of 1 entries").says("--trust-store");
    assert_eq!((bits("out/suid"), of("out/suid").uid()), (0o755, 0));
    assert!(!b.path("out/disk").exists());
    assert!(!has_attribute(&b.path("out/capable"), CAPABILITY_NAME));
    assert!(has_attribute(&b.path("out/capable"), "user.colour"));
    assert_eq!((of("out/own").uid(), of("out/own").gid()), (0, 0));
    assert_eq!(fs::read(b.path("out/sub/plain")).unwrap(), b"sub/plain", "the rest goes on");

    b.run("cp v vault:t/disk d").code(28).says("vault:t/disk: is a device node");
    assert!(!b.path("d").exists());
    b.run(&format!("cp --orphan v {} found", b.stored("v", "t/suid").display())).ok().says("set-id bits of 1");
    assert_eq!(bits("found"), 0o755);
    // A directory that is there stays its owner's, as it is.
    fs::set_permissions(b.dir("shut"), fs::Permissions::from_mode(0o700)).unwrap();
    lchown(b.path("shut"), Some(1234), None).unwrap();
    b.run("cp -r v vault:t/. shut").code(28);
    assert_eq!((bits("shut"), of("shut").uid(), bits("shut/sub")), (0o700, 1234, 0o755));
    let line = format!("umask 077; exec {} cp -r v vault:t/sub masked", env!("CARGO_BIN_EXE_lamassu"));
    let mut masked = std::process::Command::new("sh");
    masked
        .args(["-c", &line])
        .current_dir(b.path(""))
        .env("LAMASSU_KEY", format!("raw:file:{}", b.path("key").display()))
        .env("XDG_STATE_HOME", b.path("state"));
    crate::support::Ran::from(masked.output().unwrap()).ok();
    assert_eq!((bits("masked"), bits("masked/plain")), (0o700, 0o600));

    let ran = b.run("cp -r --trust-store v vault:t all").ok();
    assert!(!ran.err.contains("left out"), "{}", ran.err);
    assert_eq!((bits("all/suid"), of("all/own").uid()), (0o6755, 1234));
    assert!(of("all/disk").file_type().is_block_device() && of("all/disk").rdev() == makedev(7, 99));
    assert!(has_attribute(&b.path("all/capable"), CAPABILITY_NAME));
    // Into a vault, and within it, what is there is trusted.
    b.run("cp -r v all vault:").ok();
    b.run("cp -r v vault:all vault:again").ok();
    assert_eq!(b.stored("v", "again/suid").metadata().unwrap().mode() & 0o7777, 0o6755);
}

/// Who owns the directory that root copies into, and exchanges what is in it all the while.
struct Attacker {
    home: std::path::PathBuf,
    victim: std::path::PathBuf,
    exchanged: AtomicUsize,
}

/// Ends the attack, also when a test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

const ATTACKER: u32 = 54321;
const EVIL: &[u8] = b"evil";

/// The metadata of the entry, if it is a file with the attacker's content. Both are read by one descriptor, since the
/// name may be exchanged at any time. A fifo in its place is not waited for.
fn evil(path: &Path) -> Option<fs::Metadata> {
    let opened = fs::File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(path);
    let (mut file, mut content) = (opened.ok()?, Vec::new());
    file.read_to_end(&mut content).ok()?;
    file.metadata().ok().filter(|m| m.is_file() && content == EVIL)
}

impl Attacker {
    fn new(b: &Bench) -> Attacker {
        let attacker = Attacker { home: b.dir("home"), victim: b.dir("victim"), exchanged: AtomicUsize::new(0) };
        fs::write(attacker.victim.join("file"), b"secret").unwrap();
        fs::set_permissions(attacker.victim.join("file"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::set_permissions(b.dir("victim/dir"), fs::Permissions::from_mode(0o700)).unwrap();
        fs::set_permissions(b.path(""), fs::Permissions::from_mode(0o755)).unwrap();
        lchown(&attacker.home, Some(ATTACKER), Some(ATTACKER)).unwrap();
        attacker
    }

    fn exchange(&self, name: &std::ffi::OsStr, with: &str) {
        let (from, to) = (self.home.join(name), self.home.join(with));
        if rustix::fs::renameat_with(CWD, from, CWD, to, rustix::fs::RenameFlags::EXCHANGE).is_ok() {
            self.exchanged.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What is exchanged, made again where a copy took it.
    fn bait(&self) {
        if evil(&self.home.join("evil")).is_none() {
            let _ = fs::remove_file(self.home.join("evil"));
            let made = fs::File::create_new(self.home.join("evil"));
            let _ = made.and_then(|mut file| file.write_all(EVIL));
        }
        for (link, to) in [("to-file", "file"), ("to-dir", "dir")] {
            if fs::read_link(self.home.join(link)).is_err() {
                let _ = fs::rename(self.home.join(link), self.home.join("away"));
                let _ = std::os::unix::fs::symlink(self.victim.join(to), self.home.join(link));
            }
        }
    }

    fn run(&self, stop: &AtomicBool) {
        use rustix::fs::{Gid, Uid};
        // Of this thread alone.
        let (uid, gid) = (Uid::from_raw(ATTACKER), Gid::from_raw(ATTACKER));
        rustix::thread::set_thread_groups(&[]).unwrap();
        rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        let mut round = 0;
        while !stop.load(Ordering::Relaxed) {
            self.bait();
            for entry in fs::read_dir(&self.home).unwrap().flatten() {
                let name = entry.file_name();
                if name.as_encoded_bytes().starts_with(b".lamassu-cp-") {
                    round += 1;
                    self.exchange(&name, if round % 2 == 0 { "evil" } else { "to-file" });
                } else if name == "d" || name == "e" || name == "w" {
                    self.exchange(&name, "to-dir");
                }
            }
        }
    }

    /// Entries of its own that give it root's rights, or another's that were changed.
    fn wins(&self) -> Vec<String> {
        let mut wins = Vec::new();
        for entry in fs::read_dir(&self.home).unwrap().flatten() {
            let Some(m) = evil(&entry.path()) else { continue };
            if m.uid() != ATTACKER || m.mode() & 0o6000 != 0 {
                wins.push(format!("{:?} is {:o} of {}", entry.file_name(), m.mode(), m.uid()));
            }
        }
        let file = self.victim.join("file").metadata().unwrap();
        if (file.uid(), file.mode() & 0o7777) != (0, 0o600) {
            wins.push(format!("root's file is {:o} of {}", file.mode(), file.uid()));
        }
        let dir = self.victim.join("dir");
        if dir.metadata().unwrap().mode() & 0o7777 != 0o700 || fs::read_dir(&dir).unwrap().next().is_some() {
            wins.push("root's directory is changed".into());
        }
        wins
    }
}

/// Copied are set-id files, which are all that an attacker could wish for, links, fifos and directories.
#[test]
fn who_owns_the_directory_copied_to_gains_nothing() {
    use std::time::{Duration, Instant};
    const LONG: Duration = Duration::from_secs(12);
    if !is_root() {
        return;
    }
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("t/d");
    b.dir("t/e");
    let names: Vec<String> = (0..60).map(|i| format!("f{i}")).collect();
    for name in names.iter().map(String::as_str).chain(["d/f", "e/f"]) {
        b.file(&format!("t/{name}"), b"program");
        // Nobody else may write to them: whoever did would change what they do, and take their set-id bits.
        fs::set_permissions(b.path("t").join(name), fs::Permissions::from_mode(0o6755)).unwrap();
    }
    // A trusted copy gives the directory that it is made into the owner of its source.
    lchown(b.path("t"), Some(ATTACKER), Some(ATTACKER)).unwrap();
    for i in 0..10 {
        std::os::unix::fs::symlink("f0", b.path(&format!("t/l{i}"))).unwrap();
        mknodat(CWD, b.path(&format!("t/p{i}")), FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
    }
    for i in 0..10 {
        fs::hard_link(b.path(&format!("t/f{i}")), b.path(&format!("t/d/h{i}"))).unwrap();
    }
    b.run("cp -r v t vault:").ok();
    let attacker = Attacker::new(&b);
    let stop = AtomicBool::new(false);
    let mut runs = 0;
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| attacker.run(&stop));
        let begun = Instant::now();
        while begun.elapsed() < LONG {
            let exchanged = attacker.exchanged.load(Ordering::Relaxed);
            // What is exchanged may be refused.
            b.run(&format!("cp -r {} v vault:t/. home", if runs % 2 == 0 { "--trust-store" } else { "" }));
            runs += 1;
            let wins = attacker.wins();
            if !wins.is_empty() || runs % 4 == 0 {
                for name in ["d", "e"] {
                    let _ = fs::rename(attacker.home.join(name), b.path(&format!("gone-{name}{runs}")));
                }
            }
            assert!(wins.is_empty(), "in run {runs}: {wins:?}");
            assert!(attacker.exchanged.load(Ordering::Relaxed) > exchanged, "nothing was attacked in run {runs}");
        }
    });
}

#[test]
fn who_owns_the_directory_cloned_to_gains_nothing() {
    if !is_root() {
        return;
    }
    let b = Bench::new();
    changed_store(&b);
    let attacker = Attacker::new(&b);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| attacker.run(&stop));
        for run in 0..60 {
            // It may be refused.
            b.run(&format!("clone {} v home/w", if run % 2 == 0 { "--trust-store" } else { "" }));
            let wins = attacker.wins();
            for name in ["w", "to-dir"] {
                let _ = fs::rename(attacker.home.join(name), b.path(&format!("gone-{name}{run}")));
            }
            assert!(wins.is_empty(), "in run {run}: {wins:?}");
        }
    });
    assert!(attacker.exchanged.load(Ordering::Relaxed) > 0);
}
