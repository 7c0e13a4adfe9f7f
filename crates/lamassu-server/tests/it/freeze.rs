//! `freeze` and `thaw` of a vault that several hosts have mounted by turns.

use crate::common::*;
use crate::datasets::the_dataset_in;
use crate::shared::{Map, listed, mount, shared, unmounted_and_checked, until};
use rustix::mm::ProtFlags;
use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

/// More than a holder has that does not say that it keeps the vault.
const LONG: Duration = Duration::from_secs(3 * TERM);

/// A write of another host, which waits for the thaw.
fn writing(host: Host<'_>, name: &str) -> JoinHandle<std::io::Result<()>> {
    let (file, text): (PathBuf, _) = (host.file(name), format!("late {name}"));
    spawn(move || fs::write(file, text))
}

fn freeze(host: Host<'_>) {
    host.run(&format!("freeze m-{}", host.name)).ok();
}

fn thaw(host: Host<'_>) -> Ran {
    host.run(&format!("thaw m-{}", host.name))
}

/// A copy of the store, as a backup takes it.
fn copied(lab: &Lab, name: &str) {
    copy(&lab.path("store"), &lab.path(name));
}

#[track_caller]
fn assert_unchanged(lab: &Lab, copy: &str) {
    let differ =
        Command::new("diff").args(["-r", "--no-dereference"]).args([lab.path("store"), lab.path(copy)]).output();
    let Ran { code, out, err } = differ.unwrap().into();
    assert_eq!(code, 0, "the store changed: {out}{err}");
}

#[test]
fn a_freeze_holds_other_hosts_up_and_the_store_is_complete() {
    let mut lab = Lab::new();
    {
        let [a, b, c] = shared(&lab);
        a.write("of-a", "synced").unwrap();
        fs::write(b.file("of-b"), "not synced").unwrap();
        fs::write(a.file("of-a-too"), "not synced").unwrap();
        fs::create_dir(a.file("d")).unwrap();
        freeze(a);
        a.run("freeze m-a").code(1).says("already frozen");
        let late = writing(b, "late");
        // In another directory than those that are looked at: the kernel locks it for as long as that waits.
        let own = writing(a, "d/own");
        copied(&lab, "copy");
        // For longer than a host may keep a vault that others ask for.
        sleep(LONG);
        assert!(!late.is_finished() && !own.is_finished(), "something was written while the vault was frozen");
        assert_eq!(fs::read_to_string(a.file("of-b")).unwrap(), "not synced");
        assert_eq!(listed(&a.file("")), ["d", "of-a", "of-a-too", "of-b"]);
        a.run("key rotate --outer m-a").code(28).says("frozen");
        assert_unchanged(&lab, "copy");
        assert_eq!(lab.metric("sessions_held_on_total"), 0.0);
        // What was written is there, and nothing has to be repaired.
        for name in ["of-a", "of-a-too", "of-b"] {
            let text = c.run(&format!("cat --anchor none copy/v {name}")).ok().out;
            assert!(text.contains("synced"), "{text}");
        }
        c.run("check --anchor none copy/v").ok();
        thaw(a).ok();
        late.join().unwrap().unwrap();
        own.join().unwrap().unwrap();
        assert_eq!(fs::read_to_string(c.file("late")).unwrap(), "late late");
        assert_eq!(fs::read_to_string(c.file("d/own")).unwrap(), "late d/own");
        thaw(a).code(1);
        freeze(b);
    }
    // A server that starts anew.
    lab.stop("-KILL");
    lab.start();
    let [a, b, c] = ["a", "b", "c"].map(|name| Host { lab: &lab, name });
    let late = writing(c, "later");
    sleep(LONG);
    assert!(!late.is_finished());
    thaw(b).ok();
    late.join().unwrap().unwrap();
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// A freeze that did not last says so when it ends, and nobody waits for it.
#[test]
fn a_freeze_that_is_lost_is_reported() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    let id = a.id("store/v");
    // A host that was stopped.
    freeze(a);
    let daemon = a.daemon();
    kill(daemon, "-STOP");
    fs::write(b.file("of-b"), "while a is stopped").unwrap();
    kill(daemon, "-CONT");
    thaw(a).code(69).says("do not use a copy");
    fs::write(a.file("of-a"), "goes on").unwrap();
    assert_eq!(fs::read_to_string(b.file("of-a")).unwrap(), "goes on");
    freeze(a);
    thaw(a).ok();
    // A host that loses its grant.
    freeze(a);
    let late = writing(b, "late");
    lab.serve(&["host", "grant", "--not", "@a", &format!("@{id}")]).ok();
    late.join().unwrap().unwrap();
    thaw(a).code(69);
    lab.grant(a, &id);
    // A host that is killed.
    a.write("again", "of a").unwrap();
    freeze(a);
    kill(a.daemon(), "-KILL");
    fs::write(b.file("of-b"), "after a was killed").unwrap();
    assert_eq!(fs::read_to_string(c.file("again")).unwrap(), "of a");
    let _ = Command::new("umount").arg("-l").arg(a.file("")).output();
    mount(a);
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// A freeze that waits for another host is given up by a thaw, and ends with who asked for it. What changes datasets
/// does not wait for it.
#[test]
fn a_freeze_that_waits_can_be_given_up() {
    // Longer than what comes while a host is stopped.
    let lab = Lab::with_term(60);
    let [a, b, c] = shared(&lab);
    for name in ["p", "q"] {
        a.run(&format!("dataset create m-a/{name}")).ok();
        fs::write(a.file(&format!("{name}/f")), "of a").unwrap();
    }
    fs::write(b.file("p/f"), "of b").unwrap();
    // It has the turn of `p` alone.
    fs::write(a.file("f"), "of a").unwrap();
    let stopped = b.daemon();
    kill(stopped, "-STOP");
    // Nothing is asserted before it goes on: what waits for it would wait for the whole term.
    let waits = || until("it waits", || a.run("dataset create m-a/none").code == 28);
    let freezing = std::thread::scope(|scope| {
        let freezing = scope.spawn(|| a.run("freeze m-a"));
        waits();
        let refused = [a.run("key unload m-a/q"), a.run("dataset destroy m-a/q")];
        let waited = !freezing.is_finished();
        let thawed = thaw(a);
        (freezing.join().unwrap(), refused, waited, thawed)
    });
    let own = fs::write(a.file("q/own"), "goes on");
    // A freeze whose process is killed while it waits: that ends when its request is answered.
    let mut killed = a.command().args(["freeze", "m-a"]).spawn().unwrap();
    waits();
    kill(killed.id(), "-KILL");
    kill(stopped, "-CONT");
    let (freezing, refused, waited, thawed) = freezing;
    freezing.code(69);
    for ran in refused {
        ran.code(28).says("frozen");
    }
    assert!(waited, "it was given up by something else");
    thawed.ok();
    own.unwrap();
    killed.wait().unwrap();
    let late = writing(a, "late");
    until("what was frozen for nobody goes on", || late.is_finished());
    late.join().unwrap().unwrap();
    thaw(a).code(1);
    // The same at Ctrl-C.
    fs::write(b.file("p/f"), "of b").unwrap();
    fs::write(a.file("f"), "of a").unwrap();
    kill(stopped, "-STOP");
    let mut interrupted = a.command().args(["freeze", "m-a"]).spawn().unwrap();
    waits();
    kill(interrupted.id(), "-INT");
    kill(stopped, "-CONT");
    assert!(!interrupted.wait().unwrap().success());
    let late = writing(a, "later");
    until("what was frozen for nobody goes on", || late.is_finished());
    late.join().unwrap().unwrap();
    assert_eq!(fs::read_to_string(c.file("p/f")).unwrap(), "of b");
    hosts_are_done(&lab, &[a, b, c]);
}

/// Datasets are frozen with the vault: one that another host has, one that this host has no key for, and one in that.
#[test]
fn datasets_are_frozen_with_the_vault_around_them() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    fs::write(lab.path("other"), [8; 32]).unwrap();
    fs::set_permissions(lab.path("other"), fs::Permissions::from_mode(0o600)).unwrap();
    a.run("dataset create m-a/p").ok();
    b.run("dataset create --new-key raw:file:other m-b/own").ok();
    b.run("dataset create m-b/own/in").ok();
    c.run("dataset create m-c/unseen").ok();
    fs::write(a.file("p/f"), "of a").unwrap();
    fs::write(b.file("p/g"), "of b").unwrap();
    fs::write(b.file("own/in/f"), "not synced").unwrap();
    fs::write(c.file("unseen/f"), "not synced").unwrap();
    assert!(fs::read(a.file("own/f")).is_err(), "it opens with the key of the vault");
    freeze(a);
    copied(&lab, "copy");
    let late = [(b, "p/late"), (b, "own/late"), (b, "own/in/late"), (c, "unseen/late"), (c, "late")];
    let late = late.map(|(host, name)| writing(host, name));
    sleep(LONG);
    assert!(late.iter().all(|late| !late.is_finished()), "something was written while the vault was frozen");
    assert_eq!(fs::read_to_string(a.file("p/g")).unwrap(), "of b");
    a.run("dataset create m-a/new").code(28).says("frozen");
    a.run("key load --key raw:file:other m-a/own").code(28).says("frozen");
    assert_unchanged(&lab, "copy");
    assert_eq!(a.run("cat --anchor none copy/v p/g").ok().out, "of b");
    assert_eq!(a.run("cat --anchor none copy/v unseen/f").ok().out, "not synced");
    thaw(a).ok();
    // Nothing waits for the sessions that end.
    for _ in 0..2 {
        freeze(a);
        thaw(a).ok();
    }
    assert_eq!(fs::read_to_string(a.file("unseen/f")).unwrap(), "not synced");
    for late in late {
        late.join().unwrap().unwrap();
    }
    assert_eq!(fs::read_to_string(a.file("unseen/late")).unwrap(), "late unseen/late");
    hosts_are_done(&lab, &[a, b, c]);
}

fn hosts_are_done(lab: &Lab, hosts: &[Host<'_>]) {
    hosts.iter().for_each(|host| drop(host.umount().ok()));
    lab.wait_until_free();
    hosts[0].run("check --skip-locked store/v").ok();
}

/// Who freezes takes the vault before what lies in it, and so nobody waits for ever.
#[test]
fn two_hosts_freeze_at_once() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    a.run("dataset create m-a/p").ok();
    a.run("dataset create m-a/p/q").ok();
    for round in 0..5 {
        fs::write(a.file("p/q/f"), round.to_string()).unwrap();
        fs::write(b.file("p/f"), round.to_string()).unwrap();
        std::thread::scope(|scope| {
            for host in [a, b] {
                scope.spawn(move || {
                    freeze(host);
                    assert_eq!(fs::read_to_string(host.file("p/f")).unwrap(), round.to_string());
                    thaw(host).ok();
                });
            }
        });
        fs::write(c.file("p/q/f"), "goes on").unwrap();
    }
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// `snapshot` and `clone` freeze the vault themselves.
#[test]
fn snapshots_and_clones_are_made_of_a_shared_mount() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    a.run("dataset create m-a/p").ok();
    fs::write(b.file("f"), "not synced").unwrap();
    fs::write(b.file("p/f"), "not synced").unwrap();
    assert_eq!(fs::read_to_string(a.file("p/f")).unwrap(), "not synced");
    a.run("snapshot store/v store/s").ok();
    a.run("clone store/v store/c").ok();
    fs::write(b.file("f"), "later").unwrap();
    for copy in ["s", "c"] {
        for name in ["f", "p/f"] {
            assert_eq!(a.run(&format!("cat store/{copy} {name}")).ok().out, "not synced");
        }
        a.run(&format!("check store/{copy}")).ok();
    }
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// Files of a vault that is copied: so many that a copy is not over as soon as it has begun.
const FILES: usize = 300;

/// A snapshot that has frozen the vault, and whose process stands still then.
fn stopped_snapshot(host: Host<'_>) -> Child {
    let dir = host.lab.path("store/s");
    loop {
        let mut made = host.command().args(["snapshot", "store/v", "store/s"]).spawn().unwrap();
        // Nothing is made before the vault is frozen.
        while !dir.exists() {
            assert!(made.try_wait().unwrap().is_none(), "no snapshot");
        }
        kill(made.id(), "-STOP");
        let is_stopped = || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", made.id())).unwrap();
            stat.rsplit_once(") ").unwrap().1.starts_with('T')
        };
        until("it stands still", is_stopped);
        if !dir.join("lamassu.vault").exists() {
            return made;
        }
        // Too late.
        kill(made.id(), "-CONT");
        made.wait().unwrap();
        fs::remove_dir_all(&dir).unwrap();
    }
}

#[track_caller]
fn goes_on(mut made: Child, code: i32, lab: &Lab) {
    kill(made.id(), "-CONT");
    assert_eq!(made.wait().unwrap().code(), Some(code));
    assert_eq!(lab.path("store/s").exists(), code == 0);
}

/// A snapshot that was not frozen until its end is taken away, whatever became of the vault.
#[test]
fn a_snapshot_whose_freeze_has_ended_is_none() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    let id = a.id("store/v");
    fs::create_dir(a.file("d")).unwrap();
    for n in 0..FILES {
        fs::write(a.file(&format!("d/{n}")), "of a").unwrap();
    }
    // Thawed by somebody.
    let made = stopped_snapshot(a);
    thaw(a).ok();
    fs::write(b.file("meanwhile"), "of b").unwrap();
    goes_on(made, 69, &lab);
    // And frozen again: that freeze is not the snapshot's.
    let made = stopped_snapshot(a);
    thaw(a).ok();
    fs::write(b.file("meanwhile"), "of b, too").unwrap();
    freeze(a);
    goes_on(made, 69, &lab);
    thaw(a).ok();
    // Lost, and somebody else was told.
    let made = stopped_snapshot(a);
    lab.serve(&["host", "grant", "--not", "@a", &format!("@{id}")]).ok();
    fs::write(b.file("meanwhile"), "of b once more").unwrap();
    thaw(a).code(69);
    lab.grant(a, &id);
    goes_on(made, 69, &lab);
    // The mount is in use by it.
    let made = stopped_snapshot(a);
    a.run("umount m-a").code(10);
    goes_on(made, 0, &lab);
    fs::remove_dir_all(lab.path("store/s")).unwrap();
    // The daemon is killed.
    let made = stopped_snapshot(a);
    kill(a.daemon(), "-KILL");
    fs::write(b.file("meanwhile"), "after a was killed").unwrap();
    goes_on(made, 69, &lab);
    let _ = Command::new("umount").arg("-l").arg(a.file("")).output();
    mount(a);
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// Asks a root that is open to freeze. Returns the error.
fn asked_to_freeze(root: File) -> JoinHandle<Option<i32>> {
    const FREEZE_WHILE_OPEN: libc::Ioctl = 0xf54f;
    spawn(move || {
        // SAFETY: the descriptor is open; the request carries no argument.
        let frozen = unsafe { libc::ioctl(root.as_raw_fd(), FREEZE_WHILE_OPEN, 0) };
        (frozen < 0).then(|| std::io::Error::last_os_error().raw_os_error()).flatten()
    })
}

/// Waits for a command that must not wait for other hosts.
#[track_caller]
fn ends(host: Host<'_>, line: &str, code: i32) {
    let mut command = host.command().args(line.split(' ')).spawn().unwrap();
    until(line, || command.try_wait().unwrap().is_some());
    assert_eq!(command.wait().unwrap().code(), Some(code), "{line}");
}

/// Another host has frozen the vault that a freeze waits for: it is given up all the same, and so is the mount.
#[test]
fn a_freeze_that_waits_for_a_frozen_vault_can_be_given_up() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    let roots = [File::open(b.file("")).unwrap(), File::open(b.file("")).unwrap()];
    let daemon = b.daemon();
    freeze(a);
    let [first, second] = roots;
    let freezing = asked_to_freeze(first);
    ends(b, "key rotate --outer m-b", 28);
    ends(b, "dataset create m-b/none", 28);
    assert!(!freezing.is_finished());
    ends(b, "thaw m-b", 0);
    assert_eq!(freezing.join().unwrap(), Some(libc::EOWNERDEAD));
    let freezing = asked_to_freeze(second);
    ends(b, "key rotate --outer m-b", 28);
    kill(daemon, "-TERM");
    assert!(freezing.join().unwrap().is_some());
    until("the daemon ends", || !Path::new(&format!("/proc/{daemon}")).exists());
    // It was frozen until now.
    thaw(a).ok();
    mount(b);
    fs::write(c.file("f"), "goes on").unwrap();
    assert_eq!(fs::read_to_string(b.file("f")).unwrap(), "goes on");
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// A dataset that is mounted alone on another host, and frozen there: who needs it with the vault around it does not
/// keep that from others.
#[test]
fn a_frozen_dataset_holds_nobody_up_in_the_vault_around_it() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    a.run("dataset create m-a/p").ok();
    let dataset = the_dataset_in(&lab, "store/v");
    c.umount().ok();
    c.run(&format!("mount --shared --anchor {} {dataset} m-c", lab.url())).ok();
    freeze(c);
    let inside = a.file("p");
    let changing = spawn(move || fs::set_permissions(inside, fs::Permissions::from_mode(0o711)));
    let writes = |rounds: Range<u32>| {
        for round in rounds {
            sleep(Duration::from_millis(300));
            b.write("f", &round.to_string()).unwrap();
        }
    };
    writes(0..3);
    // Re-keying seals the slot of the dataset again.
    a.run("key rotate --outer m-a").ok();
    let mut rekeying = a.command().args(["rekey", "--outer", "m-a"]).spawn().unwrap();
    writes(3..9);
    assert!(!changing.is_finished() && rekeying.try_wait().unwrap().is_none());
    assert_eq!(lab.metric("sessions_held_on_total"), 0.0);
    thaw(c).ok();
    changing.join().unwrap().unwrap();
    assert!(rekeying.wait().unwrap().success());
    assert_eq!(fs::metadata(b.file("p")).unwrap().permissions().mode() & 0o777, 0o711);
    assert_eq!(fs::read_to_string(a.file("f")).unwrap(), "8");
    hosts_are_done(&lab, &[a, b, c]);
}

/// Writes that the kernel carries out while the program goes on.
struct Writes(libc::c_ulong);

/// `struct iocb` of Linux.
#[repr(C)]
#[derive(Default)]
struct Write {
    data: u64,
    key: [u32; 2],
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    len: u64,
    offset: i64,
    rest: [u64; 2],
}

/// `struct io_event` of Linux.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Written {
    data: u64,
    of: u64,
    len: i64,
    more: i64,
}

impl Writes {
    const OPCODE: u16 = 1;

    fn new(most: usize) -> Writes {
        let mut context = 0;
        // SAFETY: the kernel writes its number there.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, most, &raw mut context) };
        assert_eq!(made, 0);
        Writes(context)
    }

    fn begin(&self, file: &File, block: &Block, offset: usize) {
        let write = Write {
            opcode: Self::OPCODE,
            file: file.as_raw_fd() as u32,
            buffer: block.0.as_ptr() as u64,
            len: block.0.len() as u64,
            offset: offset as i64,
            ..Write::default()
        };
        let list = [&raw const write];
        // SAFETY: one write, of a block that outlives it.
        let begun = unsafe { libc::syscall(libc::SYS_io_submit, self.0, 1, list.as_ptr()) };
        assert_eq!(begun, 1);
    }

    fn wait(&self, count: usize) -> Vec<Written> {
        let mut all = vec![Written::default(); count];
        // SAFETY: there is room for that many.
        let done = unsafe {
            libc::syscall(libc::SYS_io_getevents, self.0, count, count, all.as_mut_ptr(), std::ptr::null::<u8>())
        };
        assert_eq!(done, count as i64);
        all
    }
}

#[repr(align(4096))]
struct Block([u8; 4096]);

/// Requests that the kernel has in the background wait for a dataset, as many as it usually sends. A page of the vault
/// around it is written all the same, which the end of a turn waits for.
#[test]
fn what_waits_for_a_frozen_dataset_is_in_no_other_vaults_way() {
    const WAITING: usize = 64;
    static BLOCK: Block = Block([5; 4096]);
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    a.run("dataset create m-a/p").ok();
    let dataset = the_dataset_in(&lab, "store/v");
    fs::write(a.file("map"), vec![0; 8192]).unwrap();
    let mapped = File::options().read(true).write(true).open(a.file("map")).unwrap();
    // The kernel makes no file longer in the background.
    fs::write(a.file("p/f"), vec![0; 4096 * WAITING]).unwrap();
    let direct = File::options().write(true).custom_flags(libc::O_DIRECT).open(a.file("p/f")).unwrap();
    c.umount().ok();
    c.run(&format!("mount --shared --anchor {} {dataset} m-c", lab.url())).ok();
    freeze(c);
    let writes = Writes::new(WAITING);
    (0..WAITING).for_each(|at| writes.begin(&direct, &BLOCK, 4096 * at));
    std::thread::scope(|scope| {
        let storing = scope.spawn(|| {
            let map = Map::of(&mapped, ProtFlags::READ | ProtFlags::WRITE);
            (0..10).for_each(|round| map.store(round, 9));
        });
        for round in 0..10 {
            b.write("f", &round.to_string()).unwrap();
        }
        storing.join().unwrap();
    });
    assert_eq!(lab.metric("sessions_held_on_total"), 0.0);
    assert_eq!(fs::read(b.file("map")).unwrap()[..10], [9; 10]);
    thaw(c).ok();
    assert!(writes.wait(WAITING).iter().all(|written| written.len == 4096));
    assert!(fs::read(b.file("p/f")).unwrap() == vec![5; 4096 * WAITING]);
    drop((mapped, direct));
    hosts_are_done(&lab, &[a, b, c]);
}
