//! Mounts over a store that is full, or read-only: a small file system of its own.

use crate::mounts::is_mounted;
use crate::support::Bench;
use std::fs;
use std::io::Write;
use std::process::Command;

/// A store of 8 MiB at `store`; `false`, with a line that says so, where this user may not mount one.
fn small_store(b: &Bench) -> bool {
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=8m", "none"]).arg(b.dir("store")).output();
    let is_there = mounted.is_ok_and(|out| out.status.success());
    if !is_there {
        eprintln!("SKIPPED: cannot mount a tmpfs");
    }
    is_there
}

/// Leaves no room in that store.
fn fill(b: &Bench) {
    let mut ballast = fs::File::create(b.path("store/ballast")).unwrap();
    while ballast.write_all(&[1; 4096]).is_ok() {}
}

#[test]
fn what_the_store_does_not_take_keeps_the_mount() {
    let b = Bench::new();
    if !small_store(&b) {
        return;
    }
    b.run("init store/v").ok();
    b.dir("m");
    b.run("mount store/v m").ok();
    // As `echo important >doc`, which does not look at what close(2) says.
    let write = |name: &str| fs::File::create(b.path(name)).unwrap().write_all(b"important").unwrap();
    fill(&b);
    write("m/doc");
    for _ in 0..2 {
        b.run("umount m").code(5).says("nothing was unmounted").says("No space left");
        assert!(is_mounted(&b.path("m")));
    }
    fs::remove_file(b.path("store/ballast")).unwrap();
    b.unmount("m");
    assert_eq!(b.run("cat store/v doc").ok().text(), "important");
    // Whoever says so gives it up.
    b.run("mount store/v m").ok();
    fill(&b);
    write("m/lost");
    b.run("umount m").code(5).says("umount --lazy");
    b.run("umount --lazy m").ok();
    assert!(!is_mounted(&b.path("m")));
}

#[test]
fn a_read_only_store_is_called_that() {
    let b = Bench::new();
    if !small_store(&b) {
        return;
    }
    b.run("init store/v").ok();
    b.run_with("cp store/v - vault:f", b"content").ok();
    b.dir("m");
    assert!(Command::new("mount").args(["-o", "remount,ro"]).arg(b.path("store")).status().unwrap().success());
    b.run("mount store/v m").code(1).says("the store of").says("mount --read-only");
    b.run("check --repair store/v").code(1).says("the store of");
    b.run("check store/v").ok();
    b.run("mount --read-only store/v m").ok();
    assert_eq!(fs::read(b.path("m/f")).unwrap(), b"content");
    b.unmount("m");
}
