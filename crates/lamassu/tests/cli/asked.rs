//! Whoever owns a directory in a mount exchanges what root's commands are about, for something else.

use crate::datasets::{mounted, write};
use crate::support::{Bench, Ran};
use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

const ANN: &str = "65534";

/// Runs a shell script as root in a mount namespace of its own, where users may let others into their mounts. In it,
/// `$D` is the bench's directory, `$L` the program, and `$A` runs what follows as another user, ann, who owns `$D/ann`.
fn played(b: &Bench, script: &str) -> Option<Ran> {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: takes root and /dev/fuse");
        return None;
    }
    b.file("fuse.conf", b"user_allow_other\n");
    let ann = format!(
        "setpriv --reuid {ANN} --regid {ANN} --clear-groups env -u XDG_STATE_HOME HOME={0} LAMASSU_KEY=raw:file:{0}/key",
        b.dir("ann").display()
    );
    let script = format!("mount --bind $D/fuse.conf /etc/fuse.conf; chmod 755 $D; cd $D; chown -R {ANN} ann; {script}");
    let out = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-euc", &script])
        .env("D", b.path("").parent().unwrap().join(b.path("").file_name().unwrap()))
        .env("L", env!("CARGO_BIN_EXE_lamassu"))
        .env("A", ann)
        .env("XDG_STATE_HOME", b.path("state"))
        .env("LAMASSU_KEY", format!("raw:file:{}", b.path("key").display()))
        .output()
        .unwrap();
    let ran = Ran::from(out);
    if ran.err.contains("unshare failed") {
        eprintln!("SKIPPED: no mount namespaces here: {}", ran.err);
        return None;
    }
    Some(ran)
}

/// While root's command waits for its key, the owner of the directory exchanges the dataset for a link to a mount of
/// theirs, whose daemon takes what it is sent.
#[test]
fn a_key_goes_to_the_daemon_that_was_asked_first() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.dir("ann/evil");
    b.key("new");
    b.key("ann/key");
    b.run_in(
        "LAMASSU_KEY",
        Path::new(&format!("raw:file:{}", b.path("ann/key").display())),
        "init --anchor none ann/own",
    )
    .ok();
    // Whoever opens a fifo waits for the other end: the key is asked for when the directory is open.
    let script = "$L mount --allow-other v m; mkdir m/ann; $L dataset create m/ann/proj; chown 65534 m/ann; \
        $A $L mount --allow-other ann/own ann/evil; \
        mkfifo fifo; $L key add -n raw:file:$D/fifo m/ann/proj 9>&- & \
        exec 9>fifo; $A mv m/ann/proj m/ann/away; $A ln -s $D/ann/evil m/ann/proj; cat new >&9; exec 9>&-; wait $!; \
        echo; $L key list --json m/ann/away; \
        $L key add -n raw:file:new m/ann/proj && exit 3; \
        $L key load -k raw:file:new m/ann/proj && exit 4; \
        $L key list --json v; $A $L umount ann/evil; $L umount m";
    let Some(ran) = played(&b, script) else { return };
    let text = ran.ok().text();
    assert_eq!(text.matches("\"kind\":\"raw\"").count() + text.matches("\"kind\": \"raw\"").count(), 2, "{text}");
    let slots = b.run("key list --json ann/own").ok().json();
    assert_eq!(slots["slots"].as_array().unwrap().len(), 1, "ann has root's key: {slots}");
}

/// Deleted, closed or changed is what was named, and not what a link in its place leads to.
#[test]
fn a_link_in_the_place_of_a_dataset_destroys_nothing() {
    let b = mounted("", "");
    b.dir("m/ann");
    b.dir("m/else");
    b.run("dataset create m/ann/proj").ok();
    b.run("dataset create m/finance").ok();
    b.run("dataset create m/else/proj").ok();
    write(&b, "m/finance/ledger", b"ledger");
    fs::rename(b.path("m/ann/proj"), b.path("m/ann/away")).unwrap();
    symlink(b.path("m/finance"), b.path("m/ann/proj")).unwrap();
    // A name that fits what the link leads to, a link on the way, and links to the root of this mount and of another.
    symlink(b.path("m/finance"), b.path("m/ann/finance")).unwrap();
    symlink(b.path("m/else"), b.path("m/ann/dir")).unwrap();
    symlink("..", b.path("m/ann/up")).unwrap();
    symlink(b.path("m"), b.path("m/ann/root")).unwrap();
    b.run("init w").ok();
    b.dir("n");
    b.run("mount w n").ok();
    b.run("dataset create n/finance").ok();
    symlink(b.path("n"), b.path("m/ann/other")).unwrap();
    let on_the_way = ["dir/proj", "up/finance", "up/ann/../finance", "root/finance", "other/finance"];
    let alone = ["proj", "proj/", "finance", "dir", "up", "root", "other"];
    let (second, places) = (b.key("second"), on_the_way.iter().chain(&alone));
    for place in places.map(|place| format!("m/ann/{place}")) {
        for line in [
            "dataset destroy",
            "dataset destroy --shred-key --yes",
            "dataset set",
            "key unload",
            "key load",
            "key rotate --inner",
            "key list",
            "info",
        ] {
            let more = if line == "dataset set" { " cache=none" } else { "" };
            b.run(&format!("{line} {place}{more}")).code(28).says("leads to");
        }
        b.run(&format!("key add -n {second} {place}")).code(28).says("leads to");
    }
    for place in on_the_way {
        b.run(&format!("dataset destroy v ann/{place}")).code(28).says("leads to");
    }
    for vault in ["m/ann/up", "m/ann/root", "m/ann/other"] {
        b.run(&format!("dataset destroy {vault} finance")).code(28).says("leads to");
        b.run(&format!("dataset create {vault}/new")).code(28).says("leads to");
    }
    b.unmount("n");
    assert_eq!(fs::read(b.path("m/finance/ledger")).unwrap(), b"ledger");

    // Links on the way to the mount count if they are the user's own, or root's.
    symlink(b.path("m"), b.path("mine")).unwrap();
    b.run("key unload mine/finance").ok();
    b.run("key load mine/finance").ok();
    b.run("dataset set ./mine/else/../finance cache=none").ok();
    b.run("dataset destroy mine/ann/away").ok();
    assert!(!b.path("m/ann/away").exists());
    b.unmount("m");
}

/// What is destroyed is the header of the dataset that was named, whatever the store puts in its place when that has
/// been closed.
#[test]
fn the_keys_of_another_vault_are_not_shredded_for_those_of_a_dataset() {
    let b = mounted("", "");
    b.run("dataset create m/d").ok();
    b.run("init payroll").ok();
    b.key("audit");
    let place = b.stored("v", "d").join("lamassu.vault");
    let (kept, payroll) = (fs::read(&place).unwrap(), fs::read(b.path("payroll/lamassu.vault")).unwrap());
    assert!(Command::new("mkfifo").arg(b.path("fifo")).status().unwrap().success());
    let line = "dataset destroy --shred-key --yes --receipt r --audit-key raw:file:fifo m/d";
    let shred = b.command(line.split(' ')).stderr(Stdio::piped()).spawn().unwrap();
    // Whoever opens a fifo waits for the other end: the key that signs is asked for when the dataset is closed.
    let mut fifo = fs::File::options().write(true).open(b.path("fifo")).unwrap();
    fs::write(&place, &payroll).unwrap();
    fifo.write_all(&fs::read(b.path("audit")).unwrap()).unwrap();
    drop(fifo);
    Ran::from(shred.wait_with_output().unwrap()).code(28).says("is not that of the dataset");
    assert!(fs::read(&place).unwrap() == payroll && !b.path("r").exists());
    fs::write(&place, kept).unwrap();
    b.run("dataset destroy --shred-key --yes m/d").ok();
    b.unmount("m");
}

/// Anybody who may mount FUSE can have a mount that says it is of root's vault.
#[test]
fn a_strangers_mount_keeps_nobody_from_destroying_keys() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("ann/evil");
    b.key("ann/key");
    b.run_in(
        "LAMASSU_KEY",
        Path::new(&format!("raw:file:{}", b.path("ann/key").display())),
        "init --anchor none ann/own",
    )
    .ok();
    let script = "$A $L mount -o fsname=$D/v ann/own ann/evil; grep -q \" $D/v \" /proc/self/mountinfo; \
        $L key destroy --yes v; $A $L umount ann/evil";
    let Some(ran) = played(&b, script) else { return };
    ran.ok().says("says that it is of this vault");
    b.run("ls v").code(52);
    // A mount of the owner's own does.
    b.run("init w").ok();
    b.dir("m");
    b.run("mount --read-only w m").ok();
    b.run("key destroy --yes w").code(11);
    b.unmount("m");
}
