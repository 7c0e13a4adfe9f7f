//! Access control lists and file capabilities: shell scripts whose output must be the same in the mount and in a local
//! directory.

use super::support::is_root;
use std::path::Path;
use std::process::Command;

/// Runs `script` in `dir`; `as ID GROUPS COMMAND…` in it runs as another user, and `try COMMAND…` says whether that
/// went well.
fn run(dir: &Path, script: &str) -> String {
    const FRAME: &str = r#"
        as() { u=$1 g=$2; shift 2; setpriv --reuid=$u --regid=$u --groups=$g -- "$@" 2>/dev/null; }
        try() { if "$@" >/dev/null 2>&1; then echo "$*: done"; else echo "$*: refused"; fi; }
        show() { getfacl -cnp "$@"; stat -c '%A %a %n' "$@"; }
        chmod 755 . || exit; umask 022
    "#;
    let out = Command::new("bash").args(["-uc", &format!("{FRAME}\n{script}")]).current_dir(dir).output().unwrap();
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(out.status.success(), "{text}");
    text
}

/// The mount's directory behaves as a local one.
fn same_as_local(dir: &Path, script: &str) {
    if !is_root() {
        return eprintln!("SKIPPED: this takes root");
    }
    let local = tempfile::tempdir().unwrap();
    let supported = Command::new("setfacl").args(["-m", "u:1:r"]).arg(local.path()).status();
    if !supported.is_ok_and(|s| s.success()) {
        return eprintln!("SKIPPED: no setfacl, or no access control lists in {}", local.path().display());
    }
    std::fs::create_dir(local.path().join("d")).unwrap();
    let expected = run(&local.path().join("d"), script);
    let found = run(dir, script);
    assert!(found == expected, "--- local\n{expected}\n--- mount\n{found}");
    assert!(expected.lines().count() > 10, "the script says what it sees: {expected}");
}

pub fn access_lists_are_enforced(dir: &Path) {
    same_as_local(
        dir,
        "echo text > f; chmod 640 f
        access() { for who in '1234 1234' '1235 77' '1236 1236'; do
            try as $who cat f; try as $who sh -c 'echo more >> f'; done; show f; }
        access
        setfacl -m u:1234:rw,g:77:r f; access
        chmod g-w f; access
        chmod 600 f; access
        chmod 660 f; access
        setfacl -x u:1234 f; access
        setfacl -m u:1235:- f; access
        setfacl -n -m u:1236:rw,m::r f; access
        chown 1234:77 f; access
        chmod 4755 f; show f; setfacl -m g::- f; show f
        ln f g; setfacl -m u:9:x g; show f g; mv g h; show h
        cp -a h copy; show copy
        setfacl -b f; access
        try setfattr -x system.posix_acl_access f
        try setfattr -n system.posix_acl_access -v 0x0200 f
        try setfattr -n system.posix_acl_access -v 0x02000000 f; show f
        setfacl -m u:1234:rwx f; setfattr -x system.posix_acl_access f; access
        getfattr -m - -d f",
    );
}

pub fn lists_of_directories_are_enforced(dir: &Path) {
    same_as_local(
        dir,
        "mkdir d; chmod 700 d; echo text > d/f
        access() { try as 1234 1234 ls d; try as 1234 1234 cat d/f; try as 1234 1234 touch d/new; try as 1234 1234 rm d/new; show d; }
        access
        setfacl -m u:1234:x d; access
        setfacl -m u:1234:rx d; access
        setfacl -m u:1234:rwx d; access
        chmod 0700 d; access
        try as 1234 1234 setfacl -m u:1234:rwx d
        try as 1234 1234 chmod 777 d",
    );
}

pub fn default_lists_are_inherited(dir: &Path) {
    same_as_local(
        dir,
        "mkdir d; setfacl -d -m u:1234:rwx,g:77:rx,o::- d; show d
        umask 077
        cd d; touch f; mkdir sub; mkdir -m 711 narrow; (umask 0; touch open; mkdir wide); install -m 755 /dev/null program; cp -p f copied
        show f sub narrow open wide program copied
        mkdir -p sub/a/b; touch sub/a/b/deep; show sub/a sub/a/b sub/a/b/deep
        ln -s f link; mv f renamed; show renamed
        try as 1234 1234 sh -c 'echo x > wide/theirs'; show wide/theirs
        setfacl -k sub; touch sub/plain; mkdir sub/plaindir; show sub sub/plain sub/plaindir
        setfacl -d -m u::r,g::r,o::r narrow; umask 0; touch narrow/f; mkdir narrow/d; show narrow/f narrow/d
        setfacl -b -k .; touch last; show . last
        touch ../f; try setfacl -d -m u:1:r ../f; show ../f
        chmod 2770 wide; chgrp 77 wide; mkdir wide/group; touch wide/file; show wide wide/group wide/file",
    );
}

pub fn set_group_id_falls_when_outsiders_set_lists(dir: &Path) {
    same_as_local(
        dir,
        "for who in '1234 1234' '1234 77' '1235 77'; do
            rm -f f; touch f; mkdir -p d; chown 1234:77 f d; chmod 2771 f d
            try as $who setfacl -m u:9:r f; try as $who setfacl -m u:9:r d; try as $who setfacl -d -m u:9:r d; show f d
        done
        chmod 2771 f; setfacl -m u:8:r f; show f",
    );
}

pub fn capabilities_are_kept_and_cleared(dir: &Path) {
    same_as_local(
        dir,
        "cap() { touch $1; chmod 777 $1; setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 $1; }
        left() { getfattr -e hex -n security.capability $1 2>&1 | grep -q =0x && echo $1: kept || echo $1: gone; }
        cap kept; left kept; mv kept moved; chmod 755 moved; ln moved linked; cat moved; touch moved; left linked
        try as 1234 1234 setfattr -x security.capability moved; left moved
        for who in '0 0' '1234 1234'; do
            cap w; as $who sh -c 'echo x >> w'; left w
            cap t; as $who truncate -s 3 t; left t
            cap o; as $who sh -c ': > o'; left o
            cap a; as $who fallocate -l 9 a; left a
            cap d; as $who dd if=/dev/zero of=d bs=4096 count=1 oflag=direct status=none conv=notrunc; left d
            # Before a block that is not whole, dd takes O_DIRECT from the flags.
            cap p; head -c 3000 /dev/zero | as $who dd of=p bs=4096 oflag=direct status=none conv=notrunc; left p
        done
        exec 3>> d; echo 1 >&3; left d; cap d; left d; echo 2 >&3; left d; cap d; echo 3 >&3; left d; exec 3>&-
        cap c; chown 1234 c; left c; cap c; chgrp 77 c; left c
        cap x; setfattr -x security.capability x; left x",
    );
}
