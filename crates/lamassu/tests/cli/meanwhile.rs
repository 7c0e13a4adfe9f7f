//! Commands that wait for their key while others change what they were told to open, or to mount on.

use crate::alerts::{can_mount, collector};
use crate::mounts::{bench, is_mounted, wait_for};
use crate::support::{Bench, Ran};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::process::{Child, Stdio};

/// A command that has found its vault and reads its key from a fifo.
struct Waiting {
    child: Child,
    fifo: File,
}

impl Waiting {
    /// `command` and its options take the key, and `rest` follows.
    fn begin(b: &Bench, command: &[&str], rest: &[&str]) -> Waiting {
        let path = b.path("fifo");
        if !path.exists() {
            mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        }
        let key = format!("raw:file:{}", path.display());
        let mut command = b.command([command, &["-k", &key], rest].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut opened = None;
        wait_for("the command opens the fifo", || {
            // There is no other end before the command has it.
            opened = File::options().write(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(&path).ok();
            opened.is_some() || child.try_wait().unwrap().is_some()
        });
        let Some(fifo) = opened else { panic!("{:?}", Ran::from(child.wait_with_output().unwrap())) };
        Waiting { child, fifo }
    }

    /// The key comes.
    fn goes_on(mut self, b: &Bench) -> Ran {
        self.fifo.write_all(&fs::read(b.path("key")).unwrap()).unwrap();
        drop(self.fifo);
        self.child.wait_with_output().unwrap().into()
    }
}

/// Records of an epoch that was added meanwhile are whole, and not taken for lost ones.
#[test]
fn a_repair_uses_the_epochs_that_were_added_while_it_waited() {
    if !can_mount() {
        return;
    }
    for init in ["--anchor none", ""] {
        for repair in [&["check", "--repair"][..], &["check"]] {
            let b = bench(init);
            let waiting = Waiting::begin(&b, repair, &["v"]);
            b.run("key rotate --outer v").ok();
            b.run("mount v m").ok();
            fs::create_dir(b.path("m/d")).unwrap();
            fs::write(b.path("m/d/f"), b"content").unwrap();
            b.unmount("m");
            waiting.goes_on(&b).ok();
            assert_eq!(b.run("cat v d/f").ok().text(), "content");
            assert!(!b.path("v/lamassu.lost").exists());
        }
    }
}

/// The store is honest: whoever waits has read a header that is the newest no more, and says so to nobody.
#[test]
fn a_header_that_was_replaced_while_a_command_waited_is_no_alert() {
    if !can_mount() {
        return;
    }
    for init in ["--anchor none", ""] {
        let b = bench(init);
        b.key("new");
        let add = format!("key add -n raw:file:{} v", b.path("new").display());
        let command = collector(&b);
        let told = ["--on-integrity-failure", &command];
        let waiting = Waiting::begin(&b, &[&["check"], &told[..]].concat(), &["v"]);
        b.run(&add).ok();
        waiting.goes_on(&b).ok();
        let waiting = Waiting::begin(&b, &[&["mount"], &told[..]].concat(), &["v", "m"]);
        b.run(&add).ok();
        waiting.goes_on(&b).ok();
        fs::write(b.path("m/f"), b"content").unwrap();
        b.unmount("m");
        let waiting = Waiting::begin(&b, &["ls"], &["v"]);
        b.run(&add).ok();
        assert_eq!(waiting.goes_on(&b).ok().text().trim(), "f");
        assert!(!b.path("seen").exists(), "{:?}", fs::read_to_string(b.path("seen")));
    }
}

/// A key that was removed meanwhile opens nothing, which is no alert either.
#[test]
fn a_key_that_was_removed_while_a_command_waited_is_a_wrong_key() {
    for init in ["--anchor none", ""] {
        let b = Bench::new();
        b.run(&format!("init {init} v")).ok();
        let waiting = Waiting::begin(&b, &["ls"], &["v"]);
        b.key("new");
        b.run(&format!("key change -n raw:file:{} v", b.path("new").display())).ok();
        waiting.goes_on(&b).code(12);
    }
}

/// Whoever owns the directory above may exchange the mount point while root types.
#[test]
fn a_mount_point_that_was_exchanged_while_the_command_waited_is_refused() {
    if !can_mount() {
        return;
    }
    let b = bench("");
    let at = |name: &str| b.path(name);
    let nothing = || assert!(!["m", "moved", "other"].map(|name| is_mounted(&at(name))).contains(&true));
    b.dir("other");
    let waiting = Waiting::begin(&b, &["mount"], &["v", "m"]);
    fs::rename(at("m"), at("moved")).unwrap();
    symlink(at("other"), at("m")).unwrap();
    waiting.goes_on(&b).code(10).says("moved or removed");
    nothing();
    fs::remove_file(at("m")).unwrap();
    fs::rename(at("moved"), at("m")).unwrap();
    let waiting = Waiting::begin(&b, &["mount"], &["v", "m"]);
    fs::write(at("m/file"), b"").unwrap();
    waiting.goes_on(&b).code(10).says("not empty");
    nothing();
    fs::remove_file(at("m/file")).unwrap();
    // What it was is what it is: a link that was given is followed when the command begins.
    symlink(at("m"), at("link")).unwrap();
    let waiting = Waiting::begin(&b, &["mount"], &["v", "link"]);
    fs::remove_file(at("link")).unwrap();
    symlink(at("other"), at("link")).unwrap();
    waiting.goes_on(&b).ok();
    assert!(is_mounted(&at("m")) && !is_mounted(&at("other")));
    b.unmount("m");
}
