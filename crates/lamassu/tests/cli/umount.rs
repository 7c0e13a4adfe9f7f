//! `umount` where a daemon or its store stands still, where the mount was changed since it was made, and where others
//! hold it.

use crate::mounts::{bench, daemon_of, is_mounted, kill, strangers_mount, wait_for};
use crate::support::Bench;
use lamassu_fuse::control::Root;
use std::fs;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};

/// A process that stands still for as long as this lives.
struct Stopped(i32);

impl Stopped {
    fn new(pid: i32) -> Stopped {
        kill(pid, "-STOP");
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-CONT", &self.0.to_string()]).status();
    }
}

/// The exit code of a program that a fault could keep from ending.
fn ended(program: &mut Child) -> Option<i32> {
    let mut status = None;
    wait_for("the program does not end", || {
        status = program.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap().code()
}

/// Starts `umount m`, whose words go to the file `said`; returns once these are among them.
fn start_umount(b: &Bench, words: &str) -> Child {
    let said = fs::File::create(b.path("said")).unwrap();
    let umount = b.command(["umount", "m"]).stdout(Stdio::piped()).stderr(said).spawn().unwrap();
    wait_for(words, || fs::read_to_string(b.path("said")).unwrap().contains(words));
    umount
}

#[test]
fn lazily_it_goes_through_whatever_the_daemon_does() {
    for (frozen, stands_still) in [(false, true), (true, false), (true, true)] {
        let b = bench("");
        b.run("mount v m").ok();
        fs::write(b.path("m/f"), b"content").unwrap();
        let writer = frozen.then(|| {
            b.run("freeze m").ok();
            let target = b.path("m/g");
            let writer = std::thread::spawn(move || fs::write(target, b"after").unwrap());
            wait_for("the writer waits", || {
                Root::open(&b.path("m")).and_then(|root| root.status()).unwrap().waiting > 0
            });
            writer
        });
        let stopped = stands_still.then(|| Stopped::new(daemon_of(&b)));
        let mut umount = b.command(["umount", "--lazy", "m"]).spawn().unwrap();
        assert_eq!(ended(&mut umount), Some(0));
        assert!(!is_mounted(&b.path("m")));
        drop(stopped);
        if let Some(writer) = writer {
            wait_for("the writer goes on", || writer.is_finished());
            writer.join().unwrap();
        }
        // Nothing keeps the vault open.
        b.run("check v").ok();
        assert_eq!(b.run("cat v f").ok().text(), "content");
        if frozen {
            assert_eq!(b.run("cat v g").ok().text(), "after");
        }
    }
}

/// Has `umount` wait until it says this, and ends it.
fn interrupt(b: &Bench, words: &str) {
    let mut umount = start_umount(b, words);
    let mut out = umount.stdout.take().unwrap();
    kill(umount.id() as i32, "-TERM");
    assert_eq!(ended(&mut umount), Some(15));
    // Nor does what it left behind hold what its caller may read to the end.
    let reader = std::thread::spawn(move || out.read_to_end(&mut Vec::new()).unwrap());
    wait_for("the end of its output", || reader.is_finished());
    let said = fs::read_to_string(b.path("said")).unwrap();
    assert!(said.contains("stopped before the work was done"), "{said}");
    assert!(is_mounted(&b.path("m")), "nothing is unmounted before everything is in the store");
}

#[test]
fn waiting_for_a_daemon_that_stands_still_ends_at_a_signal() {
    let b = bench("");
    b.run("mount v m").ok();
    fs::write(b.path("m/f"), b"content").unwrap();
    let stopped = Stopped::new(daemon_of(&b));
    interrupt(&b, "`lamassu umount --lazy` unmounts at once");
    drop(stopped);
    b.unmount("m");
    assert_eq!(b.run("cat v f").ok().text(), "content");
}

/// The daemon chooses when it answers, and whoever owns a directory above what its path leads to by then.
#[test]
fn nothing_is_unmounted_but_the_mount_that_was_found() {
    let b = bench("");
    for dir in ["a", "a/home", "victim", "victim/home"] {
        b.dir(dir);
    }
    b.run("init w").ok();
    b.run("mount w victim/home").ok();
    b.run("mount v a/home").ok();
    let stopped = Stopped::new(daemon_of(&b));
    let said = fs::File::create(b.path("said")).unwrap();
    let mut umount = b.command(["umount", "a/home"]).stdout(Stdio::piped()).stderr(said).spawn().unwrap();
    wait_for("the daemon is asked", || fs::read_to_string(b.path("said")).unwrap().contains("waiting until"));
    fs::rename(b.path("a"), b.path("b")).unwrap();
    std::os::unix::fs::symlink(b.path("victim"), b.path("a")).unwrap();
    drop(stopped);
    assert_eq!(ended(&mut umount), Some(0));
    assert!(!is_mounted(&b.path("b/home")), "it is unmounted where it is now");
    assert!(is_mounted(&b.path("victim/home")));
    b.unmount("victim/home");
}

/// The daemon has taken the request then, and whoever sent it ends no sooner than it is answered.
#[test]
fn waiting_for_a_store_that_stands_still_ends_at_a_signal() {
    let b = bench("");
    b.dir("store");
    // The store of this vault is a mount of another one, whose daemon can be stopped.
    b.run("mount v store").ok();
    b.run("init store/inner").ok();
    // Closing the file would put it into the store; until then the daemon has it.
    b.run("mount --cache through store/inner m").ok();
    let mut file = fs::File::create(b.path("m/f")).unwrap();
    file.write_all(b"content").unwrap();
    let stopped = Stopped::new(daemon_of(&b));
    interrupt(&b, "nothing is unmounted before");
    drop((stopped, file));
    b.unmount("m");
    assert_eq!(b.run("cat store/inner f").ok().text(), "content");
    b.unmount("store");
}

/// A process whose mount namespace has a copy of every mount there is; `None`, with a line that says why, where there
/// can be none.
fn copy_of_mounts() -> Option<Child> {
    let mut holder = Command::new("unshare")
        .args(["--mount", "sh", "-c", "echo held && exec sleep 60"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    if holder.stdout.take().unwrap().read_exact(&mut [0; 4]).is_err() {
        eprintln!("SKIPPED: no mount namespaces here");
        holder.wait().unwrap();
        return None;
    }
    Some(holder)
}

/// That `umount m` returns when the copy of the mount is gone, and so the vault is closed; it says this before.
fn waits_for_the_copy(b: &Bench, mut holder: Child, words: &str) {
    let mut umount = start_umount(b, words);
    assert!(!is_mounted(&b.path("m")) && umount.try_wait().unwrap().is_none());
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert_eq!(ended(&mut umount), Some(0));
    fs::File::open(b.path("v/lamassu.lock")).unwrap().try_lock().expect("the daemon has let go of it");
}

const CLOSING: &str = "unmounted; waiting until everything is in the store";

#[test]
fn a_copy_of_the_mount_elsewhere_keeps_the_vault_open() {
    let b = bench("");
    b.run("mount v m").ok();
    let Some(holder) = copy_of_mounts() else { return };
    let holding = format!("(process {})", holder.id());
    waits_for_the_copy(&b, holder, &holding);
}

#[test]
fn a_mount_that_was_made_read_only_later_has_a_writer() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: remounting takes root");
        return;
    }
    let b = bench("");
    b.dir("m2");
    b.run("mount v m").ok();
    fs::write(b.path("m/f"), b"content").unwrap();
    b.run("mount -o remount,ro v m").ok();
    assert!(fs::write(b.path("m/f"), b"other").is_err());
    b.run("mount v m2").code(11).says(&format!("mounted on {}", b.path("m").display()));
    if let Some(holder) = copy_of_mounts() {
        waits_for_the_copy(&b, holder, CLOSING);
    }
}

/// Whoever may mount FUSE gives the mount the name of any directory.
#[test]
fn a_strangers_mount_ends_no_wait_for_the_vault() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: another user takes root");
        return;
    }
    let b = bench("");
    b.run("mount v m").ok();
    let theirs = b.dir("m2");
    let _device = strangers_mount(&b.path("v").canonicalize().unwrap(), &theirs);
    if let Some(holder) = copy_of_mounts() {
        waits_for_the_copy(&b, holder, CLOSING);
    }
    rustix::mount::unmount(&theirs, rustix::mount::UnmountFlags::DETACH).unwrap();
}
