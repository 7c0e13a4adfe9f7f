//! A vault directory is its owner's alone, and the root of the tree keeps permissions of its own.

use crate::mounts::bench;
use crate::support::{Bench, Ran, flip};
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

const STRANGER: &str = "65534";
const RECORD: &str = "v/lamassu.root";

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().mode() & 0o7777
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("SKIPPED: only root can be somebody else");
    }
    is_root
}

/// What a stranger gets of a file, or is told.
fn as_stranger(program: &str, path: &Path) -> Ran {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", STRANGER, "--regid", STRANGER, "--clear-groups", program]).arg(path);
    command.output().unwrap().into()
}

#[test]
fn init_closes_the_directory_and_the_root_shows_what_it_was() {
    let b = Bench::new();
    b.dir("v");
    b.dir("m");
    chmod(&b.path("v"), 0o2750);
    b.run("init v").ok();
    assert_eq!(mode(&b.path("v")), 0o700);
    b.run("mount v m").ok();
    assert_eq!(mode(&b.path("m")), 0o2750);
    let made = b.path("m/d");
    fs::create_dir(&made).unwrap();
    assert_eq!(mode(&made) & 0o2000, 0o2000, "what is made in a set-gid root is set-gid");
    b.unmount("m");

    let output = Command::new("sh")
        .args(["-c", "umask 027; exec \"$0\" init fresh", env!("CARGO_BIN_EXE_lamassu")])
        .current_dir(b.path("."))
        .env("LAMASSU_KEY", format!("raw:file:{}", b.path("key").display()))
        .env("XDG_STATE_HOME", b.path("state"))
        .output();
    Ran::from(output.unwrap()).ok();
    assert_eq!(mode(&b.path("fresh")), 0o700);
    b.run("mount fresh m").ok();
    assert_eq!(mode(&b.path("m")), 0o750);
    b.unmount("m");
}

#[test]
fn a_failed_init_gives_the_directory_its_mode_back() {
    if !is_root() {
        return;
    }
    let b = Bench::new();
    let store = b.dir("v");
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "mode=755,nr_inodes=2", "none"]).arg(&store).status();
    assert!(mounted.unwrap().success());
    b.run("init v").code(5).says("space");
    assert_eq!(mode(&store), 0o755);
    assert_eq!(fs::read_dir(&store).unwrap().count(), 0);
}

#[test]
fn chmod_and_chown_of_the_root_last_and_leave_the_store_closed() {
    let b = bench("");
    b.run("mount v m").ok();
    let before = b.path("m").metadata().unwrap();
    chmod(&b.path("m"), 0o1777);
    let after = b.path("m").metadata().unwrap();
    assert_eq!(after.mode() & 0o7777, 0o1777);
    assert_eq!((before.mtime(), before.mtime_nsec()), (after.mtime(), after.mtime_nsec()), "chmod moves no mtime");
    assert!((after.ctime(), after.ctime_nsec()) > (before.ctime(), before.ctime_nsec()));
    if is_root() {
        std::os::unix::fs::chown(b.path("m"), Some(12_345), Some(54_321)).unwrap();
    }
    b.unmount("m");
    assert_eq!(mode(&b.path("v")), 0o700);
    assert_eq!(b.path("v").metadata().unwrap().uid(), rustix::process::geteuid().as_raw());
    b.run("mount v m").ok();
    let meta = b.path("m").metadata().unwrap();
    assert_eq!(meta.mode() & 0o7777, 0o1777);
    if is_root() {
        assert_eq!((meta.uid(), meta.gid()), (12_345, 54_321));
    }
    b.unmount("m");
    b.run("check v").ok();
}

#[test]
fn others_use_a_mount_and_never_its_store() {
    if !is_root() {
        return;
    }
    let b = bench("");
    chmod(&b.path("."), 0o755);
    b.run("mount --allow-other v m").ok();
    fs::write(b.path("m/f"), "for all").unwrap();
    assert_eq!(as_stranger("cat", &b.path("m/f")).ok().text(), "for all");
    as_stranger("ls", &b.path("v")).code(2).says("Permission denied");
    // Also while no key is loaded the root lets its users in.
    b.run("key unload m").ok();
    as_stranger("stat", &b.path("m")).ok();
    assert_eq!(mode(&b.path("m")), 0o755);
    b.unmount("m");
}

#[test]
fn a_store_that_others_can_search_is_refused_below_a_mount_for_others() {
    let b = bench("");
    let refused = |words: &str| {
        let ran = b.run("mount --allow-other v m").code(28).says("--allow-other is refused").says(words);
        assert!(!ran.err.contains("passphrase"));
        b.run("mount -o allow_other v m").code(28);
    };
    for mode in [0o755, 0o710, 0o701] {
        chmod(&b.path("v"), mode);
        refused(&format!("(mode {mode:04o}, owner "));
    }
    refused("`chmod 700 ");
    // A closed parent does not help: it may be opened later.
    chmod(&b.path("."), 0o700);
    refused("`chmod 700 ");
    // Without --allow-other no other user has a mount to be cheated through.
    b.run("mount v m").ok();
    b.unmount("m");
    if is_root() {
        chmod(&b.path("v"), 0o700);
        std::os::unix::fs::chown(b.path("v"), Some(12_345), None).unwrap();
        refused("`chown 0 ");
        std::os::unix::fs::chown(b.path("v"), Some(0), None).unwrap();
        b.run("mount --allow-other v m").ok();
        b.unmount("m");
    }
}

#[test]
fn an_access_list_opens_a_directory_too() {
    let b = bench("");
    let set = Command::new("setfacl").arg("-m").arg(format!("u:{STRANGER}:x")).arg(b.path("v")).output().unwrap();
    if !set.status.success() {
        eprintln!("SKIPPED: no access control lists here");
        return;
    }
    b.run("mount --allow-other v m").code(28).says("--allow-other is refused");
}

#[test]
fn a_dataset_below_a_private_vault_is_private() {
    let b = bench("");
    b.run("dataset create v d").ok();
    let stored = b.stored("v", "d");
    chmod(&stored, 0o755);
    let mount = |options: &str| b.run(&format!("mount {options} {} m", stored.display()));
    mount("--allow-other").ok();
    b.unmount("m");
    chmod(&b.path("v"), 0o755);
    mount("--allow-other").code(28).says("--allow-other is refused");
    // By itself it keeps a record, so that its directory can stay closed.
    chmod(&stored, 0o700);
    mount("--allow-other").ok().says("only its owner can enter");
    chmod(&b.path("m"), 0o755);
    b.unmount("m");
    assert_eq!(mode(&stored), 0o700);
    mount("--allow-other").ok();
    assert_eq!(mode(&b.path("m")), 0o755);
    b.unmount("m");
}

#[test]
fn without_its_record_the_root_is_its_owners_alone() {
    let b = bench("--anchor none");
    fs::remove_file(b.path(RECORD)).unwrap();
    b.run("check v").ok();
    b.run("mount v m").ok();
    assert_eq!(mode(&b.path("m")), 0o700);
    chmod(&b.path("m"), 0o750);
    b.unmount("m");
    assert_eq!((mode(&b.path("v")), b.path(RECORD).symlink_metadata().is_ok()), (0o700, true));
}

#[test]
fn a_record_that_does_not_open_is_damage_and_grants_nothing() {
    let b = bench("--anchor none");
    let record = fs::read_link(b.path(RECORD)).unwrap();
    fs::remove_file(b.path(RECORD)).unwrap();
    fs::write(b.path(RECORD), record.to_str().unwrap()).unwrap();
    b.run("check v").ok();
    flip(&b.path(RECORD), 80);
    assert_eq!(b.run("check --json v").code(26).json()["problems"][0]["kind"], "root-permissions");
    b.run("mount v m").ok();
    assert_eq!(mode(&b.path("m")), 0o700);
    b.unmount("m");
    b.run("check --repair v").code(27);
    b.run("check v").ok();
    b.run("mount v m").ok();
    assert_eq!(mode(&b.path("m")), 0o700);
    b.unmount("m");
}

#[test]
fn the_record_moves_to_new_keys_and_into_clones() {
    let b = bench("");
    b.run("mount v m").ok();
    chmod(&b.path("m"), 0o751);
    b.unmount("m");
    b.run("key rotate --outer v").ok();
    b.run("rekey --outer v").ok();
    b.run("key retire --outer 1 v").ok();
    b.run("clone v copy").ok();
    for vault in ["v", "copy"] {
        assert_eq!(mode(&b.path(vault)), 0o700);
        b.run(&format!("mount {vault} m")).ok();
        assert_eq!(mode(&b.path("m")), 0o751, "{vault}");
        b.unmount("m");
    }
}
