//! Shared mounts whose server stands still or ends, or whose host may not use the vault any more.

use crate::common::*;
use crate::shared::{listed, shared, unmounted_and_checked, until};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// While the server is silent, calls wait for it. What the kernel has is not read meanwhile: another host may have
/// changed it.
#[test]
fn cached_pages_are_dropped_in_doubt_although_calls_wait() {
    const TERM: u64 = 6;
    // In doubt from 0.9 terms on; a call waits for a term.
    let (dropped, awaited) = (Duration::from_secs(TERM + 3), Duration::from_secs(TERM + 5));
    let lab = Lab::with_term(TERM);
    let [a, b, c] = shared(&lab);
    a.write("f", "of a").unwrap();
    // The host has had the vault for a while, so the kernel keeps pages of what is opened now.
    std::thread::sleep(Duration::from_secs(1));
    let file = File::open(a.file("f")).unwrap();
    let read = || file.read_exact_at(&mut [0; 4], 0);
    read().unwrap();
    let (server, is_over) = (lab.server.as_ref().unwrap().id(), AtomicBool::new(false));
    kill(server, "-STOP");
    let stopped = Instant::now();
    let reads = std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0.. {
                let _ = a.file(&format!("absent-{number}")).metadata();
                if is_over.load(Ordering::SeqCst) {
                    break;
                }
            }
        });
        let reads = scope.spawn(|| {
            let mut reads = Vec::new();
            while !is_over.load(Ordering::SeqCst) {
                let begun = stopped.elapsed();
                let is_read = read().is_ok();
                reads.push((begun, stopped.elapsed(), is_read));
                std::thread::sleep(Duration::from_millis(20));
            }
            reads
        });
        std::thread::sleep(awaited);
        is_over.store(true, Ordering::SeqCst);
        kill(server, "-CONT");
        reads.join().unwrap()
    });
    assert!(reads.iter().any(|(_, _, is_read)| *is_read));
    let late = reads.iter().find(|(begun, ended, is_read)| *is_read && *begun > dropped && *ended < awaited);
    assert!(late.is_none(), "read in doubt: {late:?}");
    until("it is read again", || read().is_ok());
    drop(file);
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// The server is killed and started again: what waits goes on, and nothing acknowledged is gone.
#[test]
fn a_server_that_is_killed_holds_hosts_up_and_loses_nothing() {
    let mut lab = Lab::new();
    {
        let [a, ..] = shared(&lab);
        a.write("before", "1").unwrap();
    }
    let mount = lab.path("m-b");
    let written = std::thread::spawn(move || fs::write(mount.join("meanwhile"), "2"));
    lab.stop("-KILL");
    lab.start();
    written.join().unwrap().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| lab.host(name));
    assert_eq!(fs::read_to_string(c.file("before")).unwrap(), "1");
    assert_eq!(fs::read_to_string(a.file("meanwhile")).unwrap(), "2");
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// Files are to be emptied while the server stands still: the calls fail, and what was synced stays.
#[test]
fn what_cannot_be_emptied_stays() {
    const LENGTHS: [usize; 2] = [2_560, 3_000_000];
    let lab = Lab::new();
    let hosts = shared(&lab);
    let [a, b, _] = hosts;
    let server = lab.server.as_ref().unwrap().id();
    for len in LENGTHS {
        let mut file = File::create_new(a.file(&len.to_string())).unwrap();
        file.write_all(&vec![7; len]).unwrap();
        file.sync_all().unwrap();
    }
    assert_eq!(listed(&b.file("")).len(), 2);
    let files = LENGTHS.map(|len| File::options().write(true).open(a.file(&len.to_string())).unwrap());
    kill(server, "-STOP");
    let failed = std::thread::scope(|scope| {
        let cut = |file| scope.spawn(move || File::set_len(file, 0).is_err());
        files.iter().map(cut).collect::<Vec<_>>().into_iter().all(|cut| cut.join().unwrap())
    });
    kill(server, "-CONT");
    assert!(failed, "the anchor did not know of it");
    drop(files);
    for len in LENGTHS {
        for host in [a, b] {
            let mut found = None;
            until("it is read again", || {
                found = fs::read(host.file(&len.to_string())).ok();
                found.is_some()
            });
            assert!(found == Some(vec![7; len]), "{len} on {}", host.name);
        }
    }
    unmounted_and_checked(&lab, &hosts);
}

/// What this process asks of a mount, and how it unmounts it, does not depend on the server, or on hosts that have the
/// vault meanwhile.
fn is_asked_and_unmounted(host: Host<'_>, other: Host<'_>) {
    assert!(fs::read_dir(host.file("")).and_then(|mut entries| entries.next().unwrap()).is_err());
    assert!(fs::metadata(host.file("")).unwrap().is_dir());
    host.run(&format!("info m-{}", host.name)).ok();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // The other host never passes the vault on by itself.
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                let _ = fs::write(other.file("busy"), "of the other");
            }
        });
        let daemon = host.daemon();
        host.umount().ok();
        is_over.store(true, Ordering::SeqCst);
        // Its parent may not have asked for its exit status.
        let status = fs::read_to_string(format!("/proc/{daemon}/status")).unwrap_or_default();
        assert!(status.is_empty() || status.contains("(zombie)"), "{status}");
    });
}

#[test]
fn a_mount_whose_host_was_revoked_is_asked_and_unmounted() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    a.write("f", "of a").unwrap();
    // It has the vault, and everything in it is synced.
    lab.serve(&["host", "revoke", "@a"]).ok();
    until("it is out", || fs::read(a.file("f")).is_err());
    until("the other has the vault", || b.write("f", "of b").is_ok());
    is_asked_and_unmounted(a, b);
    unmounted_and_checked(&lab, &[b, c]);
}

/// The host had the last turn, and had synced everything. Then what it has not synced.
#[test]
fn a_mount_that_wrote_last_is_unmounted_without_its_server() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    a.write("f", "of a").unwrap();
    kill(lab.server.as_ref().unwrap().id(), "-STOP");
    until("it is out", || fs::read(a.file("f")).is_err());
    a.umount().ok();
    kill(lab.server.as_ref().unwrap().id(), "-CONT");
    assert_eq!(fs::read_to_string(b.file("f")).unwrap(), "of a");
    // What was queued before is committed, and this host has the vault: it needs no server for what comes now.
    b.write("synced", "of b").unwrap();
    kill(lab.server.as_ref().unwrap().id(), "-STOP");
    fs::write(b.file("unsynced"), "of b").unwrap();
    b.umount().code(66).says("nothing was unmounted");
    kill(lab.server.as_ref().unwrap().id(), "-CONT");
    until("it is committed, or lost with the session", || b.umount().code == 0);
    unmounted_and_checked(&lab, &[c]);
}

#[test]
fn a_mount_that_cannot_reach_its_server_is_asked_and_unmounted() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    a.write("f", "of a").unwrap();
    kill(lab.server.as_ref().unwrap().id(), "-STOP");
    until("it is out", || fs::read(a.file("f")).is_err());
    is_asked_and_unmounted(a, b);
    // Opened by attributes that may be outdated, so it lists nothing, also when the host has turns again.
    let mut blind = fs::read_dir(b.file("")).unwrap();
    kill(lab.server.as_ref().unwrap().id(), "-CONT");
    until("the other works again", || fs::read(b.file("f")).is_ok());
    assert!(blind.next().unwrap().is_err());
    assert!(fs::read_dir(b.file("")).unwrap().next().unwrap().is_ok());
    drop(blind);
    unmounted_and_checked(&lab, &[b, c]);
}
