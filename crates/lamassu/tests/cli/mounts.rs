//! Real mounts under FUSE.

use crate::support::{Bench, Ran, flip, noise};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A vault, and a mount point.
pub fn bench(init: &str) -> Bench {
    let b = Bench::new();
    b.run(&format!("init {init} v")).ok();
    b.dir("m");
    b
}

pub fn is_mounted(path: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().any(|l| l.split(' ').nth(4) == path.to_str())
}

/// The process that serves the vault `v`.
pub fn daemon_of(b: &Bench) -> i32 {
    serving(&b.path("v"))
}

/// The process that has a directory mounted, and so has it open.
pub fn serving(dir: &Path) -> i32 {
    let pids = fs::read_dir("/proc").unwrap().filter_map(|e| e.unwrap().file_name().to_str()?.parse::<i32>().ok());
    let serves = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        line.split(|c| *c == 0).any(|word| word == b"mount")
            && open.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|path| path.starts_with(dir))
    };
    pids.filter(|pid| *pid != std::process::id() as i32)
        .find(serves)
        .unwrap_or_else(|| panic!("no process serves {}", dir.display()))
}

/// A mount as fusermount3 makes it for an ordinary user: the kernel is told who it was, and what the mount calls itself
/// is the user's choice. Nobody serves it: it hangs until it is detached, or what this returns is dropped.
pub fn strangers_mount(source: &Path, mountpoint: &Path) -> fs::File {
    let device = fs::File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&device);
    let options = format!("fd={fd},rootmode=40000,user_id=12345,group_id=12345\0");
    let data = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).unwrap();
    rustix::mount::mount(source, mountpoint, "fuse.lamassu", rustix::mount::MountFlags::empty(), data).unwrap();
    let seen = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(seen.lines().any(|l| l.contains("fuse.lamassu") && l.contains(source.to_str().unwrap())));
    device
}

pub fn kill(pid: i32, signal: &str) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_is_written_is_there_after_a_remount() {
    for init in ["", "--suite chacha -b 64K", "--suite paper --names plain", "--suite blake3 --small-files random"] {
        let b = bench(init);
        b.run("mount v m").ok();
        let big = noise(3_333_333, 7);
        fs::create_dir(b.path("m/dir")).unwrap();
        fs::write(b.path("m/dir/big"), &big).unwrap();
        fs::write(b.path("m/small"), b"small").unwrap();
        std::os::unix::fs::symlink("dir/big", b.path("m/link")).unwrap();
        b.unmount("m");
        assert!(!is_mounted(&b.path("m")));
        // The vault is closed: it can be read, checked and written at once.
        b.run("check v").ok();
        assert!(b.run("cat v dir/big").ok().out == big);
        b.run_with("cp v - vault:added", b"added").ok();
        b.run("mount v m").ok();
        assert!(fs::read(b.path("m/link")).unwrap() == big);
        assert_eq!(fs::read(b.path("m/added")).unwrap(), b"added");
        b.unmount("m");
    }
}

#[test]
fn options_of_mount() {
    let b = bench("");
    let m = b.path("m");
    b.run("mount -o noatime,noexec,cache=through,integrity=metadata,durability=relaxed,nofail v m").ok();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table.lines().find(|l| l.split(' ').nth(4) == m.to_str()).unwrap();
    assert!(line.contains("noatime") && line.contains("noexec") && line.contains(" fuse.lamassu "), "{line}");
    assert!(line.contains(b.path("v").to_str().unwrap()), "the vault is the source: {line}");
    b.unmount("m");
    b.run("mount -o fsname=a\\,b v m").ok();
    assert!(fs::read_to_string("/proc/self/mountinfo").unwrap().contains(" fuse.lamassu a,b "));
    b.unmount("m");
    for options in ["nosuch", "cache=fast", "integrity=none", "durability="] {
        b.run(&format!("mount -o {options} v m")).code(2);
    }
    assert!(!is_mounted(&m));
    // Of an option and its word, the option; of a word and LAMASSU_KEY, the word.
    let other = b.key("other");
    b.run(&format!("mount -k raw:file:key -o key={other},cache=none --cache through v m")).ok();
    b.unmount("m");
    b.run(&format!("mount -k {other} -o key=raw:file:key v m")).code(12);
    b.run(&format!("mount -o key={other} v m")).code(12);
    let c = bench("--suite blake3");
    c.run("mount --integrity metadata v m").code(28).says("--integrity full");
    c.run("mount --integrity full v m").ok();
    c.unmount("m");
}

#[test]
fn processors_are_kept_awake_if_so_wished() {
    let device = Path::new("/dev/cpu_dma_latency");
    if fs::File::options().write(true).open(device).is_err() {
        eprintln!("SKIPPED: {} cannot be opened here", device.display());
        return;
    }
    let b = bench("");
    for (options, held) in [("-o keep_awake=always", true), ("-o keep_awake=never", false), ("", false)] {
        b.run(&format!("mount {options} v m")).ok();
        // Many requests in a burst, and on.
        for i in 0..500 {
            fs::write(b.path(&format!("m/{i}")), [b'x'; 100]).unwrap();
        }
        let open = fs::read_dir(format!("/proc/{}/fd", daemon_of(&b))).unwrap().flatten();
        let holds = open.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|path| path == device);
        assert_eq!(holds, held, "mount {options}");
        b.unmount("m");
    }
    b.run("check v").ok();
    b.run("mount -o keep_awake=yes v m").code(2).says("keep_awake");
}

#[test]
fn mount_failures_have_their_own_codes() {
    let b = bench("");
    b.run("mount nosuch m").code(6);
    b.run("mount m m").code(10);
    b.dir("plain");
    b.run("mount plain m").code(6).says("not a vault");
    b.run("mount v nosuch").code(10);
    b.run("mount v key").code(10);
    b.run("mount v v").code(10);
    b.dir("v/inside");
    b.run("mount v v/inside").code(10);
    b.dir("full/x");
    b.run("mount v full").code(10).says("not empty");
    b.run("umount m").code(10);
    b.run("umount nosuch").code(10);
    b.run("umount /").code(10);
    b.run("freeze m").code(10);
    b.run("thaw m").code(10);
    flip(&b.path("v/lamassu.vault"), 3);
    b.run("mount v m").code(23);
}

#[test]
fn a_second_writer_is_refused_and_readers_are_not() {
    let b = bench("");
    b.dir("m2");
    b.run("mount v m").ok();
    fs::write(b.path("m/f"), b"content").unwrap();
    let wait = fs::File::open(b.path("m/f")).unwrap();
    wait.sync_all().unwrap();
    b.run("mount v m2").code(11).says(b.path("m").to_str().unwrap());
    b.run_with("cp v - vault:g", b"").code(11);
    b.run("check v").code(11);
    b.run("check --repair v").code(11);
    // What is newest the writer knows; beside it only what the store shows can be read.
    b.run("mount --read-only v m2").code(63).says("--anchor none");
    b.run("ls v").code(63);
    b.run("mount --read-only --anchor none v m2").ok();
    assert_eq!(fs::read(b.path("m2/f")).unwrap(), b"content");
    b.run("ls --anchor none v").ok();
    b.unmount("m2");
    drop(wait);
    b.unmount("m");
    b.run("check v").ok();
}

#[test]
fn read_only_mounts_change_nothing() {
    let b = bench("");
    b.run_with("cp v - vault:f", b"content").ok();
    let before = fs::read(b.stored("v", "f")).unwrap();
    for options in ["--read-only", "-r", "-o ro"] {
        b.run(&format!("mount {options} v m")).ok();
        assert_eq!(fs::read(b.path("m/f")).unwrap(), b"content");
        let refused = fs::write(b.path("m/f"), b"other").unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(30), "{refused}");
        assert!(fs::create_dir(b.path("m/d")).is_err());
        b.unmount("m");
    }
    assert_eq!(fs::read(b.stored("v", "f")).unwrap(), before);
}

#[test]
fn a_killed_daemon_loses_nothing_synced() {
    let b = bench("");
    b.run(&format!("mount v {}", b.path("m").display())).ok();
    let content = noise(5_000_000, 3);
    fs::write(b.path("m/f"), &content).unwrap();
    fs::File::open(b.path("m/f")).unwrap().sync_all().unwrap();
    // Overwritten, in part, without a sync.
    let f = fs::OpenOptions::new().write(true).open(b.path("m/f")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&f, &noise(300_000, 4), 4096).unwrap();
    kill(daemon_of(&b), "-KILL");
    drop(f);
    // A dead mount is taken down like any other.
    wait_for("the lock is free", || b.run("umount --lazy m").code == 0 || !is_mounted(&b.path("m")));
    b.run("mount v m").ok();
    let now = fs::read(b.path("m/f")).unwrap();
    let replaced = noise(300_000, 4);
    assert_eq!(now.len(), content.len());
    for (i, block) in now.chunks(4096).enumerate() {
        let at = i * 4096;
        let end = at + block.len();
        let is_old = block == &content[at..end];
        let mut new = content[at..end].to_vec();
        for (j, byte) in new.iter_mut().enumerate() {
            if let Some(r) = (at + j).checked_sub(4096).and_then(|k| replaced.get(k)) {
                *byte = *r;
            }
        }
        assert!(is_old || block == new, "block {i} is neither old nor new");
    }
    b.unmount("m");
    b.run("check v").ok();
}

/// A directory above a mount point may be another user's, who renames it.
#[test]
fn signals_unmount_what_was_moved() {
    let b = bench("");
    b.dir("above/m");
    b.run("mount v above/m").ok();
    let pid = daemon_of(&b);
    fs::write(b.path("above/m/f"), b"unsynced").unwrap();
    fs::rename(b.path("above"), b.path("elsewhere")).unwrap();
    b.dir("above/m");
    kill(pid, "-TERM");
    wait_for("the end of the mount", || !is_mounted(&b.path("elsewhere/m")));
    wait_for("the vault's end", || b.run("check v").code == 0);
    assert_eq!(b.run("cat v f").ok().text(), "unsynced");
}

#[test]
fn signals_unmount() {
    for foreground in [false, true] {
        let b = bench("");
        let line = format!("mount v {}", b.path("m").display());
        let mut child = None;
        let pid = if foreground {
            let c = b.command(format!("{line} --foreground").split(' ')).stderr(Stdio::piped()).spawn().unwrap();
            let pid = c.id() as i32;
            child = Some(c);
            wait_for("the mount", || is_mounted(&b.path("m")));
            pid
        } else {
            b.run(&line).ok();
            daemon_of(&b)
        };
        fs::write(b.path("m/f"), b"unsynced").unwrap();
        kill(pid, if foreground { "-INT" } else { "-TERM" });
        wait_for("the end of the mount", || !is_mounted(&b.path("m")));
        if let Some(mut c) = child {
            assert_eq!(c.wait().unwrap().code(), Some(0));
        }
        wait_for("the vault's end", || b.run("check v").code == 0);
        assert_eq!(b.run("cat v f").ok().text(), "unsynced");
    }
}

#[test]
fn a_mount_in_use_is_busy() {
    let b = bench("");
    b.run("mount v m").ok();
    fs::write(b.path("m/f"), b"open").unwrap();
    let mut open = fs::File::open(b.path("m/f")).unwrap();
    b.run("umount m").code(10).says("busy");
    assert!(is_mounted(&b.path("m")));
    b.run("umount --lazy m").ok();
    assert!(!is_mounted(&b.path("m")));
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "open", "usable until it is closed");
    drop(open);
    wait_for("the vault's end", || b.run("check v").code == 0);
}

#[test]
fn freeze_and_thaw() {
    let b = bench("");
    b.run("mount v m").ok();
    fs::write(b.path("m/f"), b"before").unwrap();
    b.run("freeze m").ok();
    b.run("freeze m").code(1).says("already");
    // A plain copy of a frozen store is a whole vault.
    assert!(Command::new("cp").arg("-a").arg(b.path("v")).arg(b.path("copy")).status().unwrap().success());
    // Of the same vault, whose anchor the mount has.
    assert_eq!(b.run("cat --anchor none copy f").ok().text(), "before");
    b.run("check --anchor none copy").ok();
    // The kernel locks the directory in which something waits to be made: no name may have to be looked up there.
    let before = File::open(b.path("m/f")).unwrap();
    let target = b.path("m/g");
    let writer = std::thread::spawn(move || fs::write(target, b"after").unwrap());
    std::thread::sleep(Duration::from_millis(200));
    assert!(!writer.is_finished(), "writers wait");
    let mut content = [0; 6];
    before.read_exact_at(&mut content, 0).unwrap();
    drop(before);
    assert_eq!(&content, b"before", "readers do not");
    b.run("thaw m").ok();
    writer.join().unwrap();
    b.run("thaw m").code(1);
    b.run("freeze m").ok();
    b.unmount("m");
    assert_eq!(b.run("cat v g").ok().text(), "after");
}

#[test]
fn every_slot_mounts() {
    let b = bench("");
    b.run_with("cp v - vault:f", b"content").ok();
    let (second, third) = (b.key("second"), b.key("third"));
    b.run(&format!("key add -n {second} v")).ok();
    b.run(&format!("key change --slot 1 -n {third} v")).ok();
    for key in [&second, &third] {
        b.run(&format!("mount -k {key} v m")).ok();
        assert_eq!(fs::read(b.path("m/f")).unwrap(), b"content");
        b.unmount("m");
    }
    b.run("mount v m").code(12);
    // While it is mounted, too.
    b.run(&format!("mount -o key={second} v m")).ok();
    b.run(&format!("key remove -k {third} v 2")).ok();
    assert_eq!(fs::read(b.path("m/f")).unwrap(), b"content");
    b.unmount("m");
    b.run(&format!("mount -k {second} v m")).code(12);
    b.run(&format!("mount -k {third} v m")).ok();
    b.unmount("m");
}

/// Blocks of 4096 bytes of the ciphertext of a file, without its pages.
fn data_blocks(b: &Bench, vault: &str, plain: &str) -> Vec<Vec<u8>> {
    let bytes = fs::read(b.stored(vault, plain)).unwrap();
    bytes.chunks(4096).enumerate().filter(|(i, _)| i % 117 != 0).map(|(_, c)| c.to_vec()).collect()
}

#[test]
fn equal_blocks_are_equal_within_a_zone_alone() {
    let b = Bench::new();
    let zone_key = b.key("zone-key");
    for zone in ["blue", "green"] {
        b.run(&format!("zone create -k {zone_key} {zone}")).ok();
    }
    for (vault, zone, outer) in
        [("one", "blue", "shared"), ("two", "blue", "shared"), ("own", "blue", "own"), ("far", "green", "shared")]
    {
        b.run(&format!("init --zone {zone} --zone-key {zone_key} --outer {outer} {vault}")).ok();
    }
    b.run("init alone").ok();
    b.file("f", &noise(1 << 20, 9));
    b.file("small", b"a small file");
    b.dir("m");
    for vault in ["one", "two", "own", "far", "alone"] {
        b.run(&format!("mount {vault} m")).ok();
        fs::copy(b.path("f"), b.path("m/f")).unwrap();
        fs::copy(b.path("small"), b.path("m/small")).unwrap();
        b.unmount("m");
    }
    let one = data_blocks(&b, "one", "f");
    assert!(one.len() == 256);
    let equal = |vault| data_blocks(&b, vault, "f").iter().filter(|block| one.contains(block)).count();
    assert_eq!(equal("two"), 256);
    assert_eq!(equal("own"), 256, "deduplication does not need the outer key");
    assert_eq!(equal("far"), 0);
    assert_eq!(equal("alone"), 0);
    let small = |vault| fs::read(b.stored(vault, "small")).unwrap();
    assert!(small("one") == small("two"), "small files deduplicate under one outer key");
    assert!(small("one") != small("own") && small("one") != small("far"));
    // Shared outer key: each other's files, by their path in the store. Own: not.
    let foreign = b.stored("two", "f").strip_prefix(b.path("")).unwrap().display().to_string();
    assert!(b.run(&format!("cat --orphan one {foreign}")).ok().out == noise(1 << 20, 9));
    b.run(&format!("cat --orphan own {foreign}")).code(26);
}

#[test]
fn damage_reaches_applications_and_the_log() {
    let b = bench("");
    b.file("f", &noise(100_000, 5));
    b.run("cp v f vault:").ok();
    flip(&b.stored("v", "f"), 3 * 4096);
    b.run("mount --log-file log v m").ok();
    let mut bytes = vec![0; 100_000];
    let file = fs::File::open(b.path("m/f")).unwrap();
    let error = std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes[..4096], 2 * 4096).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5));
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes[..4096], 10 * 4096).unwrap();
    drop(file);
    b.unmount("m");
    let log = fs::read_to_string(b.path("log")).unwrap();
    let line = log.lines().find(|l| l.contains("ERROR")).expect("a line for the administrator");
    assert!(line.contains("block=2") && line.contains("segment=0"), "{line}");
}

#[test]
fn without_fuse_is_19() {
    let b = bench("");
    let line = format!("mount --bind /dev/null /dev/fuse && exec {} mount v m", env!("CARGO_BIN_EXE_lamassu"));
    let key = format!("raw:file:{}", b.path("key").display());
    let ran = Command::new("unshare")
        .args(["--mount", "sh", "-c", &line])
        .current_dir(b.path(""))
        .env("LAMASSU_KEY", key)
        .env("XDG_STATE_HOME", b.path("state"))
        .output()
        .unwrap();
    let ran = crate::support::Ran::from(ran);
    if ran.err.contains("unshare") {
        eprintln!("no mount namespaces: nothing to test");
        return;
    }
    ran.code(19).says("hint: FUSE needs /dev/fuse");
    assert!(!is_mounted(&b.path("m")));
    // Nothing holds the vault after that.
    b.run("check v").ok();
}

#[test]
fn a_mount_is_found_whatever_it_shows_as_its_source() {
    let b = bench("");
    b.dir("m2");
    for (round, source) in ["x", "/no/such/directory"].into_iter().enumerate() {
        b.run(&format!("mount -o fsname={source} v m")).ok();
        fs::write(b.path("m/f"), noise(3_000_000, 8)).unwrap();
        b.run("mount v m2").code(11).says(b.path("m").to_str().unwrap());
        b.run("key rotate --outer v").ok();
        b.run("rekey --outer v").ok();
        b.run(&format!("snapshot v s{round}")).ok();
        b.unmount("m");
        // Closed, and not just about to be.
        fs::File::open(b.path("v/lamassu.lock")).unwrap().try_lock().expect("the daemon has let go of it");
    }
}

#[test]
fn a_dead_mount_is_called_that() {
    let b = bench("");
    b.run("mount v m").ok();
    kill(daemon_of(&b), "-KILL");
    wait_for("the end of the daemon", || fs::metadata(b.path("m")).is_err());
    b.run("mount v m").code(10).says("is gone; `lamassu umount m`");
    for line in ["freeze m", "thaw m", "info m", "key list m"] {
        b.run(line).code(10).says("hint: the process that served a mount there is gone");
    }
    b.run("ls m").code(6).says("hint: the process that served a mount there is gone");
    b.run("umount m").ok().says("had ended before").says("lamassu check");
    assert!(!is_mounted(&b.path("m")));
    b.run("mount v nosuch").code(10).says("make the directory first");
    let ran = b.run("mount v key").code(10);
    assert!(!ran.err.contains("make the directory"), "{}", ran.err);
}

#[test]
fn what_is_wrong_with_a_path_is_said() {
    let b = bench("");
    b.run("mount v m").ok();
    for line in [
        "dataset create m/a/b",
        "dataset list m/nope",
        "dataset list m nope",
        "dataset set m/nope cache=none",
        "dataset set m nope cache=none",
        "dataset destroy m/nope",
        "dataset destroy m nope",
        "key unload m/nope",
        "key load m/nope",
    ] {
        b.run(line).code(3).says("does not exist");
    }
    // A name alone is one in the directory where the command runs.
    let made = b.command(["dataset", "create", "here"]).current_dir(b.path("m")).output().unwrap();
    Ran::from(made).ok();
    b.run("dataset destroy m/here").ok();
    b.run("key unload nope").code(10).says("does not lie in a mounted vault");
    for line in ["check m", "ls m", "leak m", "key backup m copy"] {
        b.run(line).code(6).says(b.path("v").to_str().unwrap()).says("give the vault's own directory");
    }
    b.run("check v").code(11).says("can be read meanwhile");
    b.unmount("m");
    b.run("key backup v copy").ok();
    fs::remove_file(b.path("v/lamassu.vault")).unwrap();
    b.run("ls v").code(6).says("`lamassu key restore BACKUP DIR`");
    // No advice to restore what is merely not there.
    for line in ["key restore nosuch v", "zone show nosuch", "inspect --header nosuch f", "ls --admin-zone nosuch v"] {
        let ran = b.run(line);
        assert!(ran.code != 0 && !ran.err.contains("hint:"), "{line}: {ran:?}");
    }
    b.run("key restore copy v").ok();
    b.run("ls v").ok();
}

/// A change of names that was answered is there after a crash of the daemon.
#[test]
fn names_are_durable_at_once_with_dirsync() {
    for option in ["dirsync", "sync"] {
        let b = bench("");
        b.run(&format!("mount -o {option} v m")).ok();
        let at = |name: &str| b.path("m").join(name);
        for name in ["gone", "old", "replaced"] {
            fs::write(at(name), name).unwrap();
        }
        fs::create_dir(at("dir")).unwrap();
        fs::create_dir(at("no")).unwrap();
        fs::remove_dir(at("no")).unwrap();
        fs::remove_file(at("gone")).unwrap();
        fs::rename(at("old"), at("dir/new")).unwrap();
        fs::hard_link(at("replaced"), at("dir/linked")).unwrap();
        std::os::unix::fs::symlink("x", at("link")).unwrap();
        kill(daemon_of(&b), "-KILL");
        wait_for("the dead mount can be detached", || Command::new("umount").arg(at("")).status().unwrap().success());
        b.run("mount v m").ok();
        let listed = |dir: &str| {
            let names = fs::read_dir(at(dir)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<_> = names.collect();
            names.sort();
            names
        };
        assert_eq!(listed(""), ["dir", "link", "replaced"], "{option}");
        assert_eq!(listed("dir"), ["linked", "new"], "{option}");
        b.unmount("m");
    }
}
