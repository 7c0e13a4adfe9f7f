//! What docs/threat-model.md says of the process that serves a mount, looked up in /proc; and mounts of an ordinary
//! user.

use crate::mounts::{daemon_of, is_mounted, kill, wait_for};
use crate::support::{Bench, noise};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};

/// CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, IPC_LOCK, SYS_ADMIN, MKNOD.
const KEPT: u64 = 1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 14 | 1 << 21 | 1 << 27;

const USER: u32 = 65_534;

fn can_mount_as_root() -> bool {
    let can = Path::new("/dev/fuse").exists() && rustix::process::geteuid().is_root();
    if !can {
        eprintln!("SKIPPED: takes root and /dev/fuse");
    }
    can
}

/// A field of a `status` file.
fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("{name} is missing")).trim()
}

fn mask(status: &str, name: &str) -> u64 {
    u64::from_str_radix(field(status, name), 16).unwrap()
}

fn no_core_dumps(pid: i32) {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let core: Vec<_> =
        limits.lines().find(|l| l.starts_with("Max core file size")).unwrap().split_whitespace().collect();
    assert_eq!(core[4..6], ["0", "0"], "soft and hard");
    // What is not dumpable belongs to root in /proc, whoever runs it; so no other process of the user can trace it or
    // read its memory.
    assert_eq!(fs::metadata(format!("/proc/{pid}/mem")).unwrap().uid(), 0);
}

#[test]
fn a_mount_of_root_keeps_what_it_needs_and_no_more() {
    if !can_mount_as_root() {
        return;
    }
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    for ended_by in ["umount", "signal"] {
        b.run("mount v m").ok();
        let pid = daemon_of(&b);
        no_core_dumps(pid);
        let mut threads = 0;
        for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
            assert_eq!((field(&status, "NoNewPrivs"), field(&status, "Seccomp")), ("1", "2"), "{status}");
            for set in ["CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"] {
                assert_eq!(mask(&status, set) & !KEPT, 0, "{set} of {}", field(&status, "Name"));
            }
            assert_ne!(field(&status, "VmLck"), "0 kB", "key memory is locked");
            threads += 1;
        }
        assert!(threads >= 3, "there is more than the main thread");
        // Everything still works: owners, modes, nodes, a file that its owner may not read.
        let file = b.path("m/file");
        fs::write(&file, noise(100_000, 1)).unwrap();
        chown(&file, Some(USER), Some(USER)).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).unwrap();
        assert!(fs::read(&file).unwrap() == noise(100_000, 1));
        rustix::fs::mkfifoat(rustix::fs::CWD, b.path("m/fifo"), rustix::fs::Mode::RUSR).unwrap();
        fs::remove_file(b.path("m/fifo")).unwrap();
        fs::remove_file(&file).unwrap();
        match ended_by {
            "umount" => b.unmount("m"),
            _ => {
                kill(pid, "-TERM");
                wait_for("it does not end", || !Path::new(&format!("/proc/{pid}")).exists());
                assert!(!is_mounted(&b.path("m")), "it unmounts by itself");
            }
        }
    }
    b.run("check v").ok();
}

/// The program as an ordinary user, everything in the bench being that user's.
struct AsUser {
    bench: Bench,
}

impl AsUser {
    /// `None`, with a line that says why, where that cannot be.
    fn new() -> Option<AsUser> {
        let there = |program: &str| Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok();
        if !can_mount_as_root() || !there("fusermount3") || !there("setpriv") {
            eprintln!("SKIPPED: takes root, fusermount3 and setpriv");
            return None;
        }
        if fs::metadata("/dev/fuse").is_ok_and(|node| node.mode() & 0o006 != 0o006) {
            eprintln!("SKIPPED: /dev/fuse is not open to ordinary users here, as udev's rule would have it");
            return None;
        }
        let bench = Bench::new();
        for name in ["", "key"] {
            chown(bench.path(name), Some(USER), Some(USER)).unwrap();
        }
        // Where it was built the user may not go.
        fs::copy(env!("CARGO_BIN_EXE_lamassu"), bench.path("lamassu")).unwrap();
        Some(AsUser { bench })
    }

    fn command(&self, program: &str, words: &str) -> Command {
        let mut command = Command::new("setpriv");
        command
            .args([&format!("--reuid={USER}"), &format!("--regid={USER}"), "--clear-groups", "--"])
            .arg(program)
            .args(words.split_whitespace())
            .current_dir(self.bench.path(""))
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("LAMASSU_KEY", format!("raw:file:{}", self.bench.path("key").display()))
            .env("XDG_STATE_HOME", self.bench.path("state"))
            .stdin(Stdio::null());
        command
    }

    fn run(&self, words: &str) -> crate::support::Ran {
        let program = self.bench.path("lamassu");
        self.command(program.to_str().unwrap(), words).output().unwrap().into()
    }

    #[track_caller]
    fn shell(&self, script: &str) -> String {
        let mut command = self.command("sh", "-c");
        let out = command.arg(script).output().unwrap();
        assert!(out.status.success(), "{script}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    }
}

#[test]
fn an_ordinary_user_mounts_and_unmounts() {
    let Some(user) = AsUser::new() else { return };
    user.shell("mkdir m");
    user.run("init v").ok();
    if Path::new("/dev/cpu_dma_latency").exists() {
        user.run("mount -o keep_awake=always v m").code(2).says("mount as root");
    }
    for ended_by in ["lamassu umount m", "fusermount3 -u m", "signal"] {
        user.run("mount v m").ok();
        let pid = daemon_of(&user.bench);
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert_eq!(field(&status, "Uid").split_whitespace().next(), Some("65534"));
        assert_eq!(mask(&status, "CapEff") | mask(&status, "CapPrm"), 0, "no capability at all");
        no_core_dumps(pid);
        user.shell(
            "echo hello > m/f && mkdir -p m/d && mv m/f m/d/f && ln -sf d/f m/l && chmod 400 m/d/f && cat m/l > copy",
        );
        assert_eq!(fs::read(user.bench.path("copy")).unwrap(), b"hello\n");
        assert_eq!(user.shell("stat -c %u:%a m/d/f"), "65534:400\n");
        // The mount is its owner's alone: not even root enters.
        assert_eq!(fs::read_dir(user.bench.path("m")).unwrap_err().raw_os_error(), Some(libc::EACCES));
        match ended_by.strip_prefix("lamassu ") {
            Some(words) => drop(user.run(words).ok()),
            None if ended_by == "signal" => {
                user.shell(&format!("kill -TERM {pid}"));
            }
            None => drop(user.shell(ended_by)),
        }
        wait_for("the daemon does not end", || !Path::new(&format!("/proc/{pid}")).exists());
        assert!(!is_mounted(&user.bench.path("m")), "{ended_by}");
    }
    user.run("mount v m").ok();
    assert_eq!(user.shell("cat m/l"), "hello\n");
    user.run("umount m").ok();
    user.run("check v").ok();
}

/// A daemon that is not root may not look into a directory that its owner has shut: whether it is a dataset it finds
/// out all the same.
#[test]
fn an_ordinary_users_shut_directories_stay_what_they_are() {
    let Some(user) = AsUser::new() else { return };
    user.shell("mkdir m");
    user.run("init v").ok();
    user.run("mount v m").ok();
    user.run("dataset create m/a").ok();
    user.run("dataset create m/b").ok();
    user.shell("cd m && mkdir d e && echo plain > d/f && echo mine > a/f && echo unlisted > b/f");
    user.shell("cd m && chmod 600 d && chmod 0 a e && chmod 300 b");
    let again = || {
        user.run("umount m").ok();
        user.run("mount v m").ok();
    };
    again();
    let shown = |dir: &str| user.shell(&format!("cd m && stat -c '%n %a' {dir}"));
    assert_eq!(user.shell("ls m"), "a\nb\nd\ne\n");
    assert_eq!(shown("a b d e"), "a 0\nb 300\nd 600\ne 0\n");
    assert_eq!(shown("a b d e"), "a 0\nb 300\nd 600\ne 0\n", "asked again");
    user.run("umount m").ok();
    // A read-only mount shows the same and lends nothing.
    let store = || {
        let out = Command::new("find").arg(user.bench.path("v")).args(["-printf", "%P %m %C@\n"]).output().unwrap();
        assert!(out.status.success());
        String::from_utf8(out.stdout).unwrap()
    };
    let before = store();
    user.run("mount -o ro v m").ok();
    assert_eq!(shown("a b d e"), "a 0\nb 300\nd 600\ne 0\n");
    assert_eq!(user.shell("cat m/b/f"), "unlisted\n");
    user.run("umount m").ok();
    assert_eq!(store(), before);
    let checked = user.run("check --repair --json v").code(26).json();
    let kinds = checked["problems"].as_array().unwrap().iter().map(|p| p["kind"].as_str().unwrap());
    assert_eq!(kinds.collect::<Vec<_>>(), ["io"; 4], "nothing in them is taken for the vault's own: {checked}");
    user.run("mount v m").ok();
    // Both are renamed; one is a dataset still, and the other is removed like a directory.
    user.shell("cd m && mv d d2 && mv a a2 && rmdir e && ! rmdir a2 2> ../said && cat b/f > ../copy");
    assert_eq!(fs::read(user.bench.path("copy")).unwrap(), b"unlisted\n");
    assert!(fs::read_to_string(user.bench.path("said")).unwrap().contains("busy"));
    again();
    assert_eq!(user.shell("cd m && chmod 700 d2 a2 b && cat d2/f a2/f b/f"), "plain\nmine\nunlisted\n");
    again();
    // A new directory in the place of one that was no dataset is looked at anew.
    user.shell("cd m && mkdir x && chmod 0 x && stat x && rmdir x");
    user.run("dataset create m/x").ok();
    user.shell("cd m && echo new > x/f && chmod 0 x");
    again();
    assert_eq!(user.shell("cd m && stat x > ../copy && chmod 700 x && cat x/f"), "new\n");
    user.run("umount m").ok();
    user.run("check v").ok();
}
