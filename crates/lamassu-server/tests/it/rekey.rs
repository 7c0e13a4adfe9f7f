//! Re-keying on one host while others have the vault mounted: afterwards nothing needs the old keys, whatever happened
//! meanwhile.

use crate::common::*;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const FILES: usize = 24;
const FILE_LEN: usize = 400_000;

/// Two hosts that have a vault mounted.
fn shared(lab: &Lab) -> [Host<'_>; 2] {
    let hosts = ["a", "b"].map(|name| lab.joined(name));
    let id = lab.vault(hosts[0]);
    lab.grant(hosts[1], &id);
    hosts.iter().for_each(|host| drop(mount_shared(*host).ok()));
    hosts
}

fn mount_shared(host: Host<'_>) -> Ran {
    host.run(&format!(
        "mount --log-file log-{} --shared --anchor {} store/v m-{}",
        host.name,
        host.lab.url(),
        host.name
    ))
}

fn rotate(host: Host<'_>, tier: &str) {
    host.run(&format!("key rotate --{tier} m-{}", host.name)).ok();
}

fn begin_rekey(host: Host<'_>, limit: &str) -> Child {
    let mut command = host.command();
    command.args(["rekey", "--full", "--limit", limit, &format!("m-{}", host.name)]);
    command.stderr(Stdio::piped()).spawn().unwrap()
}

fn ends_well(rekeying: Child) {
    let ended = rekeying.wait_with_output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

fn content(number: usize) -> Vec<u8> {
    (0..FILE_LEN).map(|at| (at / 4096 * 31 + at + number * 7) as u8).collect()
}

/// Something of everything.
fn furnish(host: Host<'_>) {
    for dir in ["d", "d/early", "d/late", "e"] {
        fs::create_dir(host.file(dir)).unwrap();
    }
    for number in 0..FILES {
        let dir = ["d/early", "d/late", "e"][number % 3];
        let mut file = File::create(host.file(&format!("{dir}/{number}"))).unwrap();
        file.write_all(&content(number)).unwrap();
    }
    fs::hard_link(host.file("e/2"), host.file("d/again")).unwrap();
    symlink("e/2", host.file("short")).unwrap();
    symlink("t".repeat(3000), host.file("d/far")).unwrap();
    fs::hard_link(host.file("d/far"), host.file("e/far too")).unwrap();
    rustix::fs::setxattr(host.file("e/5"), "user.note", b"of e/5", rustix::fs::XattrFlags::empty()).unwrap();
}

fn has_all(host: Host<'_>) {
    for number in 0..FILES {
        let at = ["d/early", "d/late", "e"].iter().find_map(|dir| fs::read(host.file(&format!("{dir}/{number}"))).ok());
        assert!(at.is_some_and(|now| now == content(number)), "{number}");
    }
    assert!(fs::read(host.file("d/again")).unwrap() == content(2));
    assert_eq!(fs::read_link(host.file("short")).unwrap().to_str(), Some("e/2"));
    for link in ["d/far", "e/far too"] {
        assert_eq!(fs::read_link(host.file(link)).unwrap().to_str().unwrap().len(), 3000);
    }
    let mut note = [0; 16];
    let len = rustix::fs::getxattr(host.file("e/5"), "user.note", &mut note).unwrap();
    assert_eq!(&note[..len], b"of e/5");
}

/// Nothing in the unmounted vault needs an epoch before `inner` and `outer`.
fn old_keys_are_retired(lab: &Lab, hosts: &[Host<'_>], inner: u32, outer: u32) {
    hosts.iter().for_each(|host| drop(host.umount().ok()));
    lab.wait_until_free();
    hosts[0].run("check store/v").ok();
    for (tier, newest) in [("inner", inner), ("outer", outer)] {
        for epoch in 1..newest {
            hosts[0].run(&format!("key retire --{tier} {epoch} store/v")).ok();
        }
    }
    mount_shared(hosts[1]).ok();
    has_all(hosts[1]);
    hosts[1].umount().ok();
}

#[test]
fn a_vault_is_rekeyed_by_one_host_while_others_use_it() {
    let lab = Lab::new();
    let [a, b] = shared(&lab);
    furnish(a);
    let open = File::open(b.file("e/2")).unwrap();
    rotate(a, "inner");
    rotate(b, "outer");
    let is_over = AtomicBool::new(false);
    let rounds = std::thread::scope(|scope| {
        let works = scope.spawn(|| {
            let mut round = 0;
            while !is_over.load(Ordering::Relaxed) || round < 3 {
                b.write("count", &round.to_string()).unwrap();
                assert_eq!(fs::read_to_string(b.file("count")).unwrap(), round.to_string());
                // There and back, past the walk.
                let (from, to) = if round % 2 == 0 { ("d/late", "d/early") } else { ("d/early", "d/late") };
                for number in (1..FILES).step_by(3) {
                    fs::rename(b.file(&format!("{from}/{number}")), b.file(&format!("{to}/{number}"))).unwrap();
                }
                if round % 2 == 0 {
                    fs::rename(b.file("d"), b.file("e/d")).unwrap();
                    fs::rename(b.file("e/d"), b.file("d")).unwrap();
                }
                File::options().append(true).open(b.file("log")).or_else(|_| File::create(b.file("log"))).unwrap();
                round += 1;
            }
            if round % 2 == 1 {
                for number in (1..FILES).step_by(3) {
                    fs::rename(b.file(&format!("d/early/{number}")), b.file(&format!("d/late/{number}"))).unwrap();
                }
            }
            round
        });
        let done = a.run("rekey --full --limit 12M --json m-a").ok();
        is_over.store(true, Ordering::Relaxed);
        let told: serde_json::Value = serde_json::from_str(&done.out).unwrap();
        assert_eq!((told["complete"].as_bool(), told["failed"].as_u64()), (Some(true), Some(0)), "{told}");
        works.join().unwrap()
    });
    assert!(rounds >= 3, "{rounds}");
    let mut held = Vec::new();
    (&open).read_to_end(&mut held).unwrap();
    assert!(held == content(2), "a file that was open all the time");
    drop(open);
    // All of it is done.
    let told: serde_json::Value = serde_json::from_str(&b.run("rekey --full --json m-b").ok().out).unwrap();
    assert_eq!((told["blocks"].as_u64(), told["complete"].as_bool()), (Some(0), Some(true)), "{told}");
    let history = a.run("history store/v").out;
    assert!(history.contains("rekey-begun") && history.contains("rekey-ended"), "{history}");
    old_keys_are_retired(&lab, &[a, b], 2, 2);
}

#[test]
fn what_a_killed_host_has_not_rekeyed_another_one_does() {
    let lab = Lab::with_term(5);
    let [a, b] = shared(&lab);
    furnish(a);
    rotate(a, "inner");
    // It takes 20 seconds at least. The limit does not hold others up.
    let mut rekeying = begin_rekey(a, "1M");
    std::thread::sleep(Duration::from_millis(1500));
    b.write("meanwhile", "of b").unwrap();
    assert!(rekeying.try_wait().unwrap().is_none(), "it is under way");
    kill(a.daemon(), "-KILL");
    rekeying.wait().unwrap();
    let _ = std::process::Command::new("umount").arg("-l").arg(a.file("")).output();
    b.run("rekey --full m-b").ok();
    has_all(b);
    mount_shared(a).ok();
    has_all(a);
    old_keys_are_retired(&lab, &[a, b], 2, 1);
}

#[test]
fn an_epoch_that_another_host_begins_in_the_middle_is_the_one_that_all_is_under_at_the_end() {
    let lab = Lab::new();
    let [a, b] = shared(&lab);
    furnish(a);
    rotate(a, "inner");
    let mut rekeying = begin_rekey(a, "4M");
    std::thread::sleep(Duration::from_millis(1000));
    rotate(b, "inner");
    rotate(b, "outer");
    assert!(rekeying.try_wait().unwrap().is_none(), "it is under way");
    b.write("meanwhile", "of b").unwrap();
    ends_well(rekeying);
    old_keys_are_retired(&lab, &[a, b], 3, 2);
}

#[test]
fn two_hosts_rekey_at_once() {
    let lab = Lab::new();
    let [a, b] = shared(&lab);
    furnish(a);
    rotate(a, "inner");
    rotate(b, "outer");
    [begin_rekey(a, "16M"), begin_rekey(b, "16M")].into_iter().for_each(ends_well);
    old_keys_are_retired(&lab, &[a, b], 2, 2);
}

/// The server stands still for longer than a term, so the host's session ends in the middle.
#[test]
fn it_goes_on_after_a_session_that_has_ended() {
    const TERM: u64 = 5;
    let lab = Lab::with_term(TERM);
    let [a, b] = shared(&lab);
    furnish(a);
    rotate(a, "inner");
    let mut rekeying = begin_rekey(a, "4M");
    std::thread::sleep(Duration::from_millis(1500));
    let server = lab.server.as_ref().unwrap().id();
    kill(server, "-STOP");
    std::thread::sleep(Duration::from_secs(TERM + 2));
    kill(server, "-CONT");
    assert!(rekeying.try_wait().unwrap().is_none(), "it is under way");
    ends_well(rekeying);
    old_keys_are_retired(&lab, &[a, b], 2, 1);
}
