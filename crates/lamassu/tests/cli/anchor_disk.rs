//! The disk that the anchor lies on is full, read-only, or gone. Scripts tell these apart: 74, 75, 64.

use crate::mounts::is_mounted;
use crate::support::{Bench, noise};
use std::fs::{self, File};
use std::io::Write;
use std::process::Command;

/// A mounted vault whose anchor lies on a small disk of its own, at `disk`; `None`, with a line that says so, where
/// this user may not mount one.
fn bench() -> Option<Bench> {
    let b = Bench::new();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=6m", "none"]).arg(b.dir("disk")).output();
    if !mounted.is_ok_and(|out| out.status.success()) {
        eprintln!("SKIPPED: cannot mount a tmpfs");
        return None;
    }
    b.run("init --anchor disk/a v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    Some(b)
}

/// Leaves no room on that disk.
fn fill(b: &Bench) {
    let mut ballast = File::create(b.path("disk/ballast")).unwrap();
    while ballast.write_all(&[1; 4096]).is_ok() {}
}

fn make_room(b: &Bench) {
    fs::remove_file(b.path("disk/ballast")).unwrap();
}

fn errno<T>(done: std::io::Result<T>) -> Option<i32> {
    done.err().and_then(|error| error.raw_os_error())
}

/// Makes files, each synced, until that fails: how many were, and the error.
fn files_until_it_fails(b: &Bench) -> (usize, Option<i32>) {
    for n in 0..40_000 {
        let made = File::create(b.path(&format!("m/{n}"))).and_then(|mut file| {
            file.write_all(&n.to_string().into_bytes())?;
            file.sync_all()
        });
        if made.is_err() {
            return (n, errno(made));
        }
    }
    panic!("the anchor never needs more room");
}

#[test]
fn a_full_disk_of_the_anchor_is_a_full_disk() {
    let Some(b) = bench() else { return };
    let text = noise(200_000, 3);
    fs::write(b.path("m/before"), &text).unwrap();
    File::open(b.path("m/before")).unwrap().sync_all().unwrap();
    fill(&b);
    let (made, error) = files_until_it_fails(&b);
    assert_eq!(error, Some(libc::ENOSPC), "after {made} files");
    // It goes on being so, and everything can be read, what is not in the anchor, too.
    for _ in 0..3 {
        assert_eq!(errno(File::open(b.path(&format!("m/{made}"))).unwrap().sync_all()), Some(libc::ENOSPC));
        assert_eq!(fs::read(b.path("m/before")).unwrap(), text);
        assert_eq!(fs::read(b.path("m/0")).unwrap(), b"0");
        assert_eq!(fs::read_to_string(b.path(&format!("m/{made}"))).unwrap(), made.to_string());
    }
    for _ in 0..2 {
        let refused = b.run("umount m").code(74).says("nothing was unmounted").says("No space left");
        refused.says("disk/a").says("make room on the disk that the anchor lies on");
        assert!(is_mounted(&b.path("m")));
    }
    make_room(&b);
    File::open(b.path(&format!("m/{made}"))).unwrap().sync_all().unwrap();
    fs::write(b.path("m/after"), b"after").unwrap();
    b.unmount("m");
    b.run("check v").ok();
    b.run("scrub v").ok();
    for (name, content) in [(made.to_string(), made.to_string()), ("after".into(), "after".into())] {
        assert_eq!(b.run(&format!("cat v {name}")).ok().text(), content);
    }
}

/// Nothing is lost either where the first thing that the anchor is to learn of a mount finds it full.
#[test]
fn a_writer_begins_when_there_is_room() {
    let Some(b) = bench() else { return };
    fs::write(b.path("m/f"), b"before").unwrap();
    b.unmount("m");
    // Sparse or short: every write to that disk fails.
    fill(&b);
    b.run("mount v m").ok();
    assert_eq!(fs::read(b.path("m/f")).unwrap(), b"before");
    make_room(&b);
    fs::write(b.path("m/g"), b"after").unwrap();
    File::open(b.path("m/g")).unwrap().sync_all().unwrap();
    b.unmount("m");
    b.run("check v").ok();
}

/// A vault is not begun on a full disk, and what was left of that is in nobody's way.
#[test]
fn an_anchor_is_made_when_there_is_room() {
    let Some(b) = bench() else { return };
    b.unmount("m");
    fill(&b);
    b.run("init --anchor disk/b w").code(74).says("No space left").says("disk/b").says("make room on the disk");
    make_room(&b);
    b.run("init --anchor disk/b w").ok();
    b.run("check w").ok();
    b.run("check v").ok();
}

/// Reads need nothing of a disk that is read-only; what would write says so, and goes on when it may.
#[test]
fn a_read_only_disk_of_the_anchor_is_told_from_a_full_one() {
    let Some(b) = bench() else { return };
    fs::write(b.path("m/f"), b"content").unwrap();
    b.unmount("m");
    let remount = |how: &str| {
        let done = Command::new("mount").args(["-o", &format!("remount,{how}")]).arg(b.path("disk")).status();
        assert!(done.is_ok_and(|status| status.success()));
    };
    remount("ro");
    for command in ["mount v m", "check --repair v"] {
        let refused = b.run(command).code(75).says("disk/a").says("Read-only file system");
        refused.says("have the disk that the anchor lies on mounted for writing");
    }
    b.run("init --anchor disk/b w").code(75).says("disk/b");
    assert_eq!(b.run("cat v f").ok().text(), "content");
    b.run("check v").ok();
    b.run("mount --read-only v m").ok();
    assert_eq!(fs::read(b.path("m/f")).unwrap(), b"content");
    b.unmount("m");
    remount("rw");
    b.run("mount v m").ok();
    fs::write(b.path("m/g"), b"more").unwrap();
    b.unmount("m");
    assert_eq!(b.run("cat v g").ok().text(), "more");
}

/// A file system that met an error makes itself read-only under a vault that is mounted.
#[test]
fn a_disk_that_becomes_read_only_keeps_what_was_acknowledged() {
    let b = Bench::new();
    let (image, disk) = (b.path("image"), b.dir("disk"));
    let is_done = |command: &mut Command| command.output().is_ok_and(|out| out.status.success());
    File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let mount = || is_done(Command::new("mount").args(["-o", "loop,errors=remount-ro"]).arg(&image).arg(&disk));
    let device = || Command::new("findmnt").args(["-no", "SOURCE"]).arg(&disk).output().unwrap().stdout;
    let switch = || {
        let device = String::from_utf8(device()).unwrap();
        format!("/sys/fs/ext4/{}/trigger_fs_error", device.trim().trim_start_matches("/dev/"))
    };
    if !is_done(Command::new("mkfs.ext4").arg("-q").arg(&image)) || !mount() || !fs::exists(switch()).unwrap() {
        eprintln!("SKIPPED: takes an ext4 in a loop image, and its switch for errors");
        return;
    }
    b.run("init --anchor disk/a v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    let sync = |name: &str| {
        let mut file = File::create(b.path(name))?;
        file.write_all(b"content")?;
        file.sync_all()
    };
    for n in 0..20 {
        sync(&format!("m/{n}")).unwrap();
    }
    fs::write(switch(), "1").unwrap();
    for _ in 0..3 {
        assert_eq!(errno(sync("m/late")), Some(libc::EROFS));
    }
    let refused = b.run("umount m").code(75).says("nothing was unmounted").says("Read-only file system");
    refused.says("have the disk that the anchor lies on mounted for writing");
    // Such a file system takes no write before it was unmounted: the daemon has to let go of it.
    b.run("umount --lazy m").ok();
    crate::mounts::wait_for("the end of the daemon", || is_done(Command::new("umount").arg(&disk)));
    // It mends what there is to mend, and says so by its code.
    let _ = Command::new("e2fsck").args(["-fy"]).arg(&image).output().unwrap();
    assert!(mount());
    b.run("mount v m").ok();
    for n in 0..20 {
        assert_eq!(fs::read(b.path(&format!("m/{n}"))).unwrap(), b"content");
    }
    sync("m/after").unwrap();
    b.unmount("m");
    b.run("check v").ok();
}

/// A file that the path no longer leads to takes no commit: it would end with the process.
#[test]
fn an_anchor_that_is_taken_away_is_missed() {
    let b = Bench::new();
    b.dir("disk");
    b.dir("m");
    b.run("init --anchor disk/a v").ok();
    b.run("mount v m").ok();
    let sync = |name: &str| {
        let mut file = File::create(b.path(name))?;
        file.write_all(b"content")?;
        file.sync_all()
    };
    sync("m/f").unwrap();
    fs::rename(b.path("disk/a"), b.path("disk/away")).unwrap();
    assert_eq!(errno(sync("m/g")), Some(libc::EIO));
    assert_eq!(fs::read(b.path("m/f")).unwrap(), b"content");
    b.run("umount m").code(64).says("was removed or replaced").says("nothing was unmounted");
    // A copy is another file: it does not get what is written to the first.
    fs::copy(b.path("disk/away"), b.path("disk/a")).unwrap();
    assert_eq!(errno(sync("m/h")), Some(libc::EIO));
    fs::rename(b.path("disk/away"), b.path("disk/a")).unwrap();
    sync("m/h").unwrap();
    b.unmount("m");
    b.run("check v").ok();

    // What was removed for good: the daemon still has it, as of the last commit.
    b.run("mount v m").ok();
    sync("m/i").unwrap();
    fs::remove_file(b.path("disk/a")).unwrap();
    assert_eq!(errno(sync("m/j")), Some(libc::EIO));
    let daemon = crate::mounts::daemon_of(&b);
    let open = fs::read_dir(format!("/proc/{daemon}/fd")).unwrap().flatten();
    let is_it = |path: &std::path::Path| fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("disk/a"));
    let kept = open.map(|fd| fd.path()).find(|path| is_it(path)).expect("the open file");
    b.secret("copy", &fs::read(kept).unwrap());
    b.run("umount --lazy m").ok();
    crate::mounts::wait_for("the end of the daemon", || b.run("path v .").code == 0 && !is_mounted(&b.path("m")));
    fs::rename(b.path("copy"), b.path("disk/a")).unwrap();
    crate::mounts::wait_for("the vault", || b.run("mount v m").code == 0);
    for name in ["m/f", "m/g", "m/h", "m/i"] {
        assert_eq!(fs::read(b.path(name)).unwrap(), b"content", "{name}");
    }
    b.unmount("m");
}
