//! Keys and slots that one host changes while others have the vault mounted.

use crate::common::*;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Two hosts that have a vault mounted.
fn shared(lab: &Lab) -> [Host<'_>; 2] {
    let hosts = ["a", "b"].map(|name| lab.joined(name));
    let id = lab.vault(hosts[0]);
    lab.grant(hosts[1], &id);
    hosts.iter().for_each(|host| drop(mount_shared(*host).ok()));
    hosts
}

fn mount_shared(host: Host<'_>) -> Ran {
    host.run(&format!("mount --shared --anchor {} store/v m-{}", host.lab.url(), host.name))
}

fn rotate(host: Host<'_>, tier: &str) -> Ran {
    host.run(&format!("key rotate --{tier} m-{}", host.name))
}

/// How many epochs of K_in and K_out a mount has.
fn epochs(host: Host<'_>) -> (usize, usize) {
    let told = host.run(&format!("key epochs --json m-{}", host.name)).ok().out;
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let count = |tier: &str| told[tier].as_array().unwrap().len();
    (count("inner"), count("outer"))
}

fn unmounted_and_checked(lab: &Lab, hosts: &[Host<'_>]) {
    hosts.iter().for_each(|host| drop(host.umount().ok()));
    lab.wait_until_free();
    hosts[0].run("check store/v").ok();
}

#[test]
fn an_epoch_that_one_host_begins_is_known_to_all() {
    let lab = Lab::new();
    let [a, b] = shared(&lab);
    a.write("first", "of a").unwrap();
    let open = fs::File::open(b.file("first")).unwrap();
    rotate(a, "inner").ok();
    a.write("second", "under the new key").unwrap();
    assert_eq!(fs::read_to_string(b.file("second")).unwrap(), "under the new key");
    assert_eq!(std::io::read_to_string(&open).unwrap(), "of a");
    rotate(b, "outer").ok();
    b.write("third", "with a page under the new key").unwrap();
    fs::rename(b.file("first"), b.file("renamed")).unwrap();
    assert_eq!(fs::read_to_string(a.file("third")).unwrap(), "with a page under the new key");
    assert_eq!(fs::read_to_string(a.file("renamed")).unwrap(), "of a");
    assert_eq!((epochs(a), epochs(b)), ((2, 2), (2, 2)));
    // A slot is used on any host.
    let key = lab.path("other.key");
    fs::write(&key, [9; 32]).unwrap();
    fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
    a.run("key add --new-key raw:file:other.key --label other m-a").ok();
    assert!(b.run("key list m-b").ok().out.contains("other"));
    b.run("key remove m-b 2").ok();
    drop(open);
    unmounted_and_checked(&lab, &[a, b]);
    a.run("ls -k raw:file:other.key store/v").code(12);
    a.run("rekey --full store/v").ok();
    for epoch in ["--inner 1", "--outer 1"] {
        a.run(&format!("key retire {epoch} store/v")).ok();
    }
    assert_eq!(b.run("cat store/v third").ok().out, "with a page under the new key");
}

#[test]
fn keys_are_rotated_beside_writers_and_a_host_that_is_killed_meanwhile_leaves_one_of_both_headers() {
    let lab = Lab::with_term(5);
    let [a, b] = shared(&lab);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writes = scope.spawn(|| {
            let mut written = 0;
            while !is_over.load(Ordering::Relaxed) {
                let text = format!("{written}");
                b.write("count", &text).unwrap();
                assert_eq!(fs::read_to_string(b.file("count")).unwrap(), text);
                written += 1;
            }
            written
        });
        for round in 0..4 {
            rotate(a, if round % 2 == 0 { "inner" } else { "outer" }).ok();
            a.write(&format!("of-{round}"), "x").unwrap();
        }
        for round in 0..3 {
            std::thread::scope(|scope| {
                let rotates = scope.spawn(|| (0..50).take_while(|_| rotate(a, "inner").code == 0).count());
                std::thread::sleep(Duration::from_millis(150 + 70 * round));
                kill(a.daemon(), "-KILL");
                rotates.join().unwrap();
            });
            let _ = std::process::Command::new("umount").arg("-l").arg(a.file("")).status();
            let end = Instant::now() + PATIENCE;
            while mount_shared(a).code != 0 {
                assert!(Instant::now() < end, "it is mounted again");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(writes.join().unwrap() > 3);
    });
    assert_eq!(epochs(a), epochs(b));
    assert_eq!(fs::read_to_string(b.file("of-3")).unwrap(), "x");
    assert_eq!(fs::read_to_string(a.file("count")).unwrap(), fs::read_to_string(b.file("count")).unwrap());
    unmounted_and_checked(&lab, &[a, b]);
}

#[test]
fn an_older_header_in_the_store_is_not_believed() {
    let lab = Lab::new();
    let [a, b] = shared(&lab);
    a.write("f", "of a").unwrap();
    let header = lab.path("store/v/lamassu.vault");
    let before = fs::read(&header).unwrap();
    rotate(a, "inner").ok();
    let after = fs::read(&header).unwrap();
    fs::write(&header, before).unwrap();
    fs::read(b.file("f")).unwrap_err();
    assert_ne!(rotate(b, "inner").code, 0);
    fs::write(&header, after).unwrap();
    let end = Instant::now() + PATIENCE;
    while fs::read_to_string(b.file("f")).ok().as_deref() != Some("of a") {
        assert!(Instant::now() < end, "it is read again");
        std::thread::sleep(Duration::from_millis(100));
    }
    b.write("g", "of b").unwrap();
    unmounted_and_checked(&lab, &[a, b]);
}
