//! A vault that is put back from a backup, whole: what its anchor says, and how it is taken for the newest.

use crate::support::Bench;
use std::fs;
use std::process::Command;

fn copy(b: &Bench, from: &str, to: &str) {
    let _ = fs::remove_dir_all(b.path(to));
    let done = Command::new("cp").arg("-a").arg(b.path(from)).arg(b.path(to)).status().unwrap();
    assert!(done.success());
}

fn bench() -> Bench {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b
}

/// Several files and directories, written by a mount.
fn write(b: &Bench, text: &str) {
    b.run("mount v m").ok();
    fs::create_dir_all(b.path("m/d/e")).unwrap();
    for name in ["m/f", "m/d/g", "m/d/e/h"] {
        fs::write(b.path(name), text).unwrap();
    }
    b.unmount("m");
}

fn shows(b: &Bench, text: &str) {
    for name in ["m/f", "m/d/g", "m/d/e/h"] {
        assert_eq!(fs::read_to_string(b.path(name)).unwrap(), text, "{name}");
    }
}

#[test]
fn a_restored_store_is_accepted_and_mounted() {
    let b = bench();
    write(&b, "backed up");
    copy(&b, "v", "backup");
    let second = b.key("second");
    b.run(&format!("key add -n {second} v")).ok();
    write(&b, "lost");
    b.run("mount v m").ok();
    fs::write(b.path("m/new"), b"lost").unwrap();
    b.unmount("m");
    copy(&b, "backup", "v");
    b.run("mount v m").code(30).says("anchor accept");
    b.run("anchor accept v").ok().says("record of sessions").says("anchor accept -r v /");
    // It mounts, and what is older is named.
    b.run("mount v m").ok();
    assert_eq!(fs::read(b.path("m/f")).unwrap_err().raw_os_error(), Some(libc::EIO));
    b.unmount("m");
    b.run("check v").code(30);
    b.run("anchor accept -r v /").ok();
    b.run("check v").ok();
    b.run("scrub v").ok();
    b.run("mount v m").ok();
    shows(&b, "backed up");
    assert!(!b.path("m/new").exists());
    fs::write(b.path("m/f"), b"goes on").unwrap();
    b.unmount("m");
    assert_eq!(b.run("cat v f").ok().text(), "goes on");
    b.run("check v").ok();
}

/// docs/freshness.md, section 6: a snapshot of the store and an export that was made after it was closed.
#[test]
fn a_backup_with_an_export_is_restored_without_accepting_anything() {
    let b = bench();
    write(&b, "backed up");
    copy(&b, "v", "backup");
    b.run("anchor export v backup.anchor").ok();
    write(&b, "lost");
    copy(&b, "backup", "v");
    b.run("anchor import v backup.anchor").code(28).says("--older");
    b.run("anchor import --older v backup.anchor").ok().says("forgotten");
    b.run("check v").ok();
    b.run("scrub v").ok();
    b.run("mount v m").ok();
    shows(&b, "backed up");
    fs::write(b.path("m/f"), b"goes on").unwrap();
    b.unmount("m");
    b.run("check v").ok();

    // On another machine, which has no anchor of it.
    let other = |line: &str| b.run_in("XDG_STATE_HOME", &b.path("other"), line);
    copy(&b, "backup", "w");
    other("ls w").code(60);
    other("anchor import w backup.anchor").ok();
    assert_eq!(other("cat w d/g").ok().text(), "backed up");
    other("check w").ok();
}

/// The export of a mounted vault and a snapshot of its store are of one moment while it is frozen.
#[test]
fn a_backup_of_a_frozen_mount_is_as_good() {
    let b = bench();
    write(&b, "backed up");
    b.run("mount v m").ok();
    fs::write(b.path("m/f"), b"in the mount").unwrap();
    b.run("freeze m").ok();
    copy(&b, "v", "backup");
    b.run("anchor export v backup.anchor").ok();
    b.run("thaw m").ok();
    fs::write(b.path("m/f"), b"later").unwrap();
    b.unmount("m");
    copy(&b, "backup", "v");
    b.run("anchor import --older v backup.anchor").ok();
    b.run("check v").ok();
    assert_eq!(b.run("cat v f").ok().text(), "in the mount");
    b.run("mount v m").ok();
    fs::write(b.path("m/f"), b"goes on").unwrap();
    b.unmount("m");
    b.run("check v").ok();
}
