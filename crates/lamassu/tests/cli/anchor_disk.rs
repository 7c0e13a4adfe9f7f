//! The disk that the anchor lies on is full, or gone, while the vault is mounted.

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
        let refused = b.run("umount m").code(64).says("nothing was unmounted").says("No space left");
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
