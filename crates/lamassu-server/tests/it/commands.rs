//! Commands about a vault that several hosts have mounted.

use crate::common::*;
use crate::datasets::the_dataset_in;
use crate::shared::{shared, unmounted_and_checked};
use std::fs;
use std::os::unix::fs::PermissionsExt;

/// Commands on a dataset's mount point find its directory in the store, whether it is loaded or not.
#[test]
fn commands_name_a_dataset_by_its_place_in_a_shared_mount() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    a.run("dataset create m-a/p").ok();
    a.run("dataset create m-a/p/q").ok();
    fs::write(a.file("p/q/f"), "of a").unwrap();
    let id = a.id(&the_dataset_in(&lab, "store/v"));
    for host in [a, b] {
        for place in ["p", "p/q"] {
            let shown = host.run(&format!("info --json m-{}/{place}", host.name)).ok().out;
            assert_eq!(shown.contains(&id), place == "p", "{shown}");
            host.run(&format!("key list m-{}/{place}", host.name)).ok();
            host.run(&format!("history m-{}/{place}", host.name)).ok();
        }
    }
    // It is not loaded, which is not the server's fault.
    b.run("key unload m-b/p").ok();
    b.run("info m-b/p").ok();
    fs::write(lab.path("other"), [8; 32]).unwrap();
    fs::set_permissions(lab.path("other"), fs::Permissions::from_mode(0o600)).unwrap();
    b.run("key add --new-key raw:file:other m-b/p").code(51);
    b.run("rekey --outer m-b/p").code(51);
    b.run("key rotate --outer m-b").ok();
    let rekeyed = b.run("rekey --outer m-b");
    assert!(rekeyed.code != 0 && format!("{}{}", rekeyed.out, rekeyed.err).contains("key load"), "{rekeyed:?}");
    b.run("key load m-b/p").ok();
    b.run("rekey --outer m-b").ok();
    a.run("dataset destroy --shred-key --yes m-a/p/q").ok();
    assert!(b.file("p").exists() && !b.file("p/q").exists());
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// A copy of a header is made beside other hosts, whose history it leaves alone.
#[test]
fn a_copy_of_a_header_is_not_on_record_while_another_host_has_the_vault() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    a.write("f", "of a").unwrap();
    let history = lab.path("store/v/lamassu.history");
    let before = fs::read(&history).unwrap();
    b.umount().ok();
    b.run("key backup --key raw:file:key store/v copy").ok().says("not on record");
    assert!(lab.path("copy").exists());
    assert_eq!(fs::read(&history).unwrap(), before);
    a.umount().ok();
    c.umount().ok();
    lab.wait_until_free();
    let made = b.run("key backup --key raw:file:key store/v another").ok();
    assert!(!made.err.contains("not on record"), "{made:?}");
    assert_ne!(fs::read(&history).unwrap(), before);
    a.run("history store/v").ok();
    a.run("check store/v").ok();
}
