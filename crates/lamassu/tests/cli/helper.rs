//! The mount helper, called by mount(8) itself, in a mount namespace whose /sbin holds what `make install` would put
//! there.

use crate::support::{Bench, Ran};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_lamassu");

/// A vault `v`, an empty `m`, a file `f` in the vault, and a directory `sbin` with the helper.
fn bench() -> Bench {
    let b = Bench::new();
    b.run("init v").ok();
    b.run_with("cp v - vault:f", b"content").ok();
    b.dir("m");
    b.dir("sbin");
    symlink(PROGRAM, b.path("sbin/mount.fuse.lamassu")).unwrap();
    symlink(PROGRAM, b.path("sbin/lamassu")).unwrap();
    b
}

/// Runs a shell script where `sbin` is /sbin; `None`, with a line that says so, where namespaces or FUSE are not to be
/// had. In it, `$D` is the bench's directory. What is mounted there is seen nowhere else, and goes with it.
fn run(b: &Bench, script: &str) -> Option<Ran> {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: mount(8) takes root and /dev/fuse");
        return None;
    }
    let script = format!("mount --bind $D/sbin $(realpath /sbin) || exit 99; cd $D; {script}");
    let out = Command::new("unshare")
        .args(["--mount", "sh", "-euc", &script])
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("D", b.path("v").parent().unwrap())
        .env("XDG_STATE_HOME", b.path("state"))
        .output()
        .unwrap();
    let ran = Ran::from(out);
    if ran.err.contains("unshare failed") || ran.code == 99 {
        eprintln!("SKIPPED: no mount namespaces here: {}", ran.err);
        return None;
    }
    Some(ran)
}

#[test]
fn a_mount_by_type() {
    let b = bench();
    let script = "mount -t fuse.lamassu -o key=raw:file:$D/key,noexec,allow_other $D/v m; cat m/f; grep $D/m /proc/self/mountinfo; \
        echo new > m/g; lamassu umount m; lamassu check -k raw:file:$D/key -q v";
    let Some(ran) = run(&b, script) else { return };
    let text = ran.ok().text();
    assert!(text.starts_with("content") && text.contains("noexec") && text.contains("allow_other"), "{text}");
    assert!(text.contains(" fuse.lamassu "), "{text}");
    assert_eq!(b.run("cat v g").ok().text(), "new\n");
}

#[test]
fn a_line_of_fstab() {
    let b = bench();
    let line = format!(
        "{0}/v {0}/m fuse.lamassu key=raw:file:{0}/key,ro,noauto,nofail,_netdev,x-systemd.automount,x-systemd.requires=network-online.target 0 0\n",
        b.path("").display().to_string().trim_end_matches('/')
    );
    b.file("fstab", line.as_bytes());
    // Twice: mount -a leaves alone what is mounted. Then by umount(8).
    let script = "mount -T fstab m; cat m/f; ! touch m/g 2>&-; sed -i s/noauto,// fstab; mount -T fstab -a; grep -c $D/m /proc/self/mountinfo; umount m; \
        ! grep $D/m /proc/self/mountinfo";
    let Some(ran) = run(&b, script) else { return };
    assert_eq!(ran.ok().text(), "content1\n");
}

#[test]
fn flags_of_mount_8() {
    let b = bench();
    let options = "mount -t fuse.lamassu -o key=raw:file:$D/key";
    // Fake: nothing is mounted, but what is wrong is said.
    let script = format!(
        "{options} -f v m; {options} -f m m 2>err && exit 1; grep -q 'not a vault\\|in one another' err; ! grep $D/m /proc/self/mountinfo; \
         {options},nosuch v m 2>err && exit 1; grep -q nosuch err; \
         {options},nosuch -s v m 2>err; grep -q 'warning: .*nosuch' err; cat m/f; umount m"
    );
    let Some(ran) = run(&b, &script) else { return };
    assert_eq!(ran.ok().text(), "content");
}

#[test]
fn a_vault_that_is_just_being_closed_is_waited_for() {
    let b = bench();
    // umount(8) returns before the daemon has written everything and given the vault up.
    let script = "for i in 1 2 3; do mount -t fuse.lamassu -o key=raw:file:$D/key v m; head -c 20000000 /dev/urandom > m/f$i; umount m; done; \
        lamassu check -q -k raw:file:$D/key v; lamassu ls -k raw:file:$D/key v";
    let Some(ran) = run(&b, script) else { return };
    assert_eq!(ran.ok().text(), "f\nf1\nf2\nf3\n");
}

#[test]
fn remounts_change_flags_alone() {
    let b = bench();
    let script = "mount -t fuse.lamassu -o key=raw:file:$D/key,allow_other $D/v m; echo one > m/one; \
        exec 3<>m/gone; head -c 2000000 /dev/zero >&3; rm m/gone; exec 3>&-; mount -o remount,ro m || echo busy; ! touch m/two 2>&-; cat m/one; mount -o remount,rw,noexec m; echo two > m/two; cat m/two; \
        grep 'nosuid,nodev,noexec' /proc/self/mountinfo | grep -o 'noexec.*allow_other'; mount -t fuse.lamassu -o remount,ro v sbin 2>&- || echo no; umount m";
    let Some(ran) = run(&b, script) else { return };
    let text = ran.ok().text();
    assert!(text.starts_with("one\ntwo\nnoexec") && text.ends_with("no\n"), "{text}");
}

#[test]
fn devices_are_allowed_through_mount_8() {
    let b = bench();
    let script = "for o in dev,suid allow_dev,allow_suid allow_dev,allow_suid,nosuid; do \
        mount -t fuse.lamassu -o key=raw:file:$D/key,$o v m; grep \" $D/m \" /proc/self/mountinfo | cut -d' ' -f6; umount m; done";
    let Some(ran) = run(&b, script) else { return };
    let text = ran.ok().text();
    let flags: Vec<_> = text.lines().map(|line| (line.contains("nodev"), line.contains("nosuid"))).collect();
    assert_eq!(flags, [(true, true), (false, false), (false, true)], "{text}");
}

#[test]
fn failures_reach_mount_8() {
    let b = bench();
    b.key("other");
    let script =
        "mount -t fuse.lamassu -o key=raw:file:$D/other v m || echo failed with $?; ! grep $D/m /proc/self/mountinfo";
    let Some(ran) = run(&b, script) else { return };
    let ran = ran.ok();
    assert!(ran.err.contains("wrong key") || ran.err.contains("opens no slot"), "{}", ran.err);
    assert_eq!(ran.text(), "failed with 12\n");
}

#[test]
fn by_mount_fuse3_without_a_helper_of_its_own() {
    let b = bench();
    let Ok(general) = std::fs::copy("/sbin/mount.fuse3", b.path("sbin/mount.fuse")) else {
        eprintln!("SKIPPED: there is no /sbin/mount.fuse3");
        return;
    };
    assert!(general > 0);
    std::fs::remove_file(b.path("sbin/mount.fuse.lamassu")).unwrap();
    let script = "mount -t fuse.lamassu -o key=raw:file:$D/key,ro $D/v $D/m; cat m/f; umount m";
    let Some(ran) = run(&b, script) else { return };
    assert_eq!(ran.ok().text(), "content");
}

#[test]
fn make_install_puts_everything_in_place() {
    let b = Bench::new();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let make = |goal: &str| {
        let dest = format!("DESTDIR={}", b.path("dest").display());
        let program = format!("program={PROGRAM}");
        let out = Command::new("make").args(["-s", "-C", root, goal, &dest, &program, "PREFIX=/usr"]).output().unwrap();
        Ran::from(out).ok();
    };
    make("install");
    for link in ["mount.fuse.lamassu", "mount.lamassu"] {
        let target = std::fs::read_link(b.path(&format!("dest/sbin/{link}"))).unwrap();
        assert_eq!(target, Path::new("/usr/bin/lamassu"));
    }
    assert!(std::fs::read(b.path("dest/usr/bin/lamassu")).unwrap() == std::fs::read(PROGRAM).unwrap());
    let completions = b.path("dest/usr/share/bash-completion/completions/lamassu");
    assert!(Command::new("bash").arg("-n").arg(&completions).status().unwrap().success());
    assert!(std::fs::read_to_string(completions).unwrap().contains("freeze"));
    let unit = std::fs::read_to_string(b.path("dest/usr/lib/systemd/system/lamassu-server.service")).unwrap();
    assert!(unit.contains("\nExecStart=/usr/bin/lamassu-server run ") && !unit.contains("/usr/local"));
    assert!(b.path("dest/usr/lib/sysusers.d/lamassu-server.conf").exists());
    make("uninstall");
    let left = Command::new("find").arg(b.path("dest")).args(["!", "-type", "d"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&left.stdout), "");
}
