//! Datasets of vaults whose anchors are at a server.

use crate::common::raw::{channel, id_of};
use crate::common::*;
use crate::shared::{listed, shared, unmounted_and_checked, until};
use lamassu_rpc::proto::{self, anchors_client::AnchorsClient};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::runtime::Runtime;
use tonic::Code;

/// The directories in the store of the datasets that lie directly in a directory of it.
fn datasets_in(lab: &Lab, dir: &str) -> Vec<String> {
    let entries = fs::read_dir(lab.path(dir)).unwrap().map(|entry| entry.unwrap());
    let found = entries.filter(|entry| entry.path().join("lamassu.vault").exists());
    found.map(|entry| format!("{dir}/{}", entry.file_name().to_str().unwrap())).collect()
}

pub(crate) fn the_dataset_in(lab: &Lab, dir: &str) -> String {
    let [dataset] = &datasets_in(lab, dir)[..] else { panic!("not one dataset in {dir}") };
    dataset.clone()
}

/// Whoever was granted a vault may use the datasets in it, also those in datasets, and finds their anchors.
#[test]
fn datasets_go_from_host_to_host_with_the_vault_around_them() {
    let lab = Lab::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| lab.joined(name));
    let id = lab.vault(a);
    lab.grant(b, &id);
    a.mount().ok();
    a.run("dataset create m-a/p").ok();
    a.run("dataset create m-a/p/q").ok();
    a.write("p/f", "one").unwrap();
    a.write("p/q/g", "two").unwrap();
    assert_eq!(lab.vaults().len(), 3);
    b.mount().code(63).says("host a");
    a.umount().ok();
    lab.wait_until_free();
    b.mount().ok();
    assert_eq!(fs::read_to_string(b.file("p/q/g")).unwrap(), "two");
    assert_eq!(fs::read_to_string(b.file("p/f")).unwrap(), "one");
    b.write("p/q/g", "three").unwrap();
    b.run("dataset create m-b/r").ok();
    b.write("r/f", "of b").unwrap();
    b.umount().ok();
    lab.wait_until_free();
    assert_eq!(a.run("cat store/v p/q/g").ok().out, "three");
    assert_eq!(a.run("cat store/v r/f").ok().out, "of b");
    a.run("check store/v").ok();
    // A dataset's anchor is known on a host from its first use on, also for its own directory.
    let dataset = datasets_in(&lab, "store/v").into_iter().find(|dir| !datasets_in(&lab, dir).is_empty()).unwrap();
    c.run(&format!("info --anchor {} {dataset}", lab.url())).ok();
    c.run(&format!("check --anchor {} {dataset}", lab.url())).code(68).says("keeps no anchor of this vault");
    // An older state of a dataset alone.
    copy(&lab.path(&dataset), &lab.path("old"));
    a.mount().ok();
    a.write("p/f", "newer").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    fs::remove_dir_all(lab.path(&dataset)).unwrap();
    copy(&lab.path("old"), &lab.path(&dataset));
    b.run("cat store/v p/f").code(30);
    b.run("check store/v").code(30);
}

/// The grant is that of the vault around: without it no dataset opens, and its sessions end.
#[test]
fn who_loses_the_grant_of_a_vault_loses_its_datasets() {
    let lab = Lab::new();
    let [a, b] = ["a", "b"].map(|name| lab.joined(name));
    let id = lab.vault(a);
    a.mount().ok();
    a.run("dataset create m-a/p").ok();
    a.write("p/f", "one").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    let dataset = the_dataset_in(&lab, "store/v");
    let inner = a.id(&dataset);
    let opened = |host: Host<'_>| host.run(&format!("ls --anchor {} {dataset}", lab.url()));
    b.mount().code(68);
    opened(b).code(68);
    // A dataset can be granted alone, too.
    lab.grant(b, &inner);
    b.run(&format!("check --anchor {} {dataset}", lab.url())).ok();
    b.mount().code(68);
    a.mount().ok();
    assert_eq!(fs::read_to_string(a.file("p/f")).unwrap(), "one");
    lab.serve(&["host", "grant", "--not", "@a", &format!("@{id}")]).ok();
    let mut refused = fs::write(a.file("p/g"), "more");
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while refused.is_ok() && std::time::Instant::now() < until {
        refused = fs::write(a.file("p/g"), "more").and_then(|()| fs::File::open(a.file("p/g"))?.sync_all());
    }
    assert!(refused.is_err(), "what the host writes counts without a grant");
}

#[test]
fn a_dataset_that_is_destroyed_is_gone_at_the_server_too() {
    let lab = Lab::new();
    let a = lab.joined("a");
    lab.vault(a);
    a.mount().ok();
    a.run("dataset create m-a/p").ok();
    a.write("p/f", "one").unwrap();
    a.run("dataset create m-a/q").ok();
    assert_eq!(lab.vaults().len(), 3);
    a.run("dataset destroy m-a/p").ok();
    assert_eq!(lab.vaults().len(), 2);
    // With those in it.
    for dataset in ["o", "o/i", "o/i/n", "o/j"] {
        a.run(&format!("dataset create m-a/{dataset}")).ok();
    }
    a.write("o/i/n/f", "deep").unwrap();
    assert_eq!(lab.vaults().len(), 6);
    a.run("dataset destroy m-a/o").ok();
    assert_eq!(lab.vaults().len(), 2);
    // The key of a dataset's own is not that of the vault.
    fs::write(lab.path("other"), [8; 32]).unwrap();
    fs::set_permissions(lab.path("other"), fs::Permissions::from_mode(0o600)).unwrap();
    a.run("dataset create --new-key raw:file:other m-a/own").ok();
    a.write("own/f", "mine").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    a.mount().ok();
    assert!(fs::read(a.file("own/f")).is_err(), "it opens with the key of the vault");
    a.run("key load --key raw:file:other m-a/own").ok();
    assert_eq!(fs::read_to_string(a.file("own/f")).unwrap(), "mine");
    a.umount().ok();
    lab.wait_until_free();
    a.run("check --skip-locked store/v").ok();
}

/// Anchors of datasets move with that of the vault, and only those that the vault's anchor knows.
#[test]
fn datasets_move_to_the_server_with_the_vault_around_them() {
    let lab = Lab::new();
    let [a, b] = ["a", "b"].map(|name| lab.joined(name));
    a.run("init store/v").ok();
    a.run("init store/w").ok();
    a.run("mount store/v m-a").ok();
    for (path, content) in [("p", "one"), ("p/q", "two"), ("r", "three")] {
        a.run(&format!("dataset create m-a/{path}")).ok();
        a.write(&format!("{path}/f"), content).unwrap();
    }
    a.umount().ok();
    // The store shows the header of another vault of this host in place of a dataset's.
    let lone = datasets_in(&lab, "store/v").into_iter().find(|dir| datasets_in(&lab, dir).is_empty()).unwrap();
    let (header, own) = (PathBuf::from(&lone).join("lamassu.vault"), lab.path("own"));
    copy(&lab.path(header.to_str().unwrap()), &own);
    copy(&lab.path("store/w/lamassu.vault"), &lab.path(header.to_str().unwrap()));
    let id = a.id("store/v");
    [a, b].iter().for_each(|host| lab.grant(*host, &id));
    let told = a.run(&format!("anchor move store/v {}", lab.url())).ok();
    told.says("those of 2 datasets").says("stays where it is");
    assert_eq!(lab.vaults().len(), 3, "the anchor of a vault that does not lie there was moved");
    a.run("check store/w").ok();
    copy(&own, &lab.path(header.to_str().unwrap()));
    b.mount().ok();
    assert_eq!(fs::read_to_string(b.file("p/f")).unwrap(), "one");
    assert_eq!(fs::read_to_string(b.file("p/q/f")).unwrap(), "two");
    // Nobody but this host has the anchor of the third.
    assert!(fs::read(b.file("r/f")).is_err());
    b.umount().ok();
    lab.wait_until_free();
    assert_eq!(a.run("cat store/v r/f").ok().out, "three");
    a.run("check store/v").ok();
    // The third by itself, when the store shows it again: it belongs to the vault around it, as the others do.
    a.run(&format!("anchor move {lone} {}", lab.url())).ok();
    assert_eq!(lab.vaults().iter().filter(|vault| vault.contains("(dataset in")).count(), 3);
    assert_eq!(b.run("cat store/v r/f").ok().out, "three");
}

/// The datasets of a clone keep their ids, and have anchors of their own on the host that made it. What is written to
/// them concerns the original on no host.
#[test]
fn datasets_of_a_clone_leave_the_originals_alone() {
    let lab = Lab::new();
    let [a, b] = ["a", "b"].map(|name| lab.joined(name));
    let id = lab.vault(a);
    lab.grant(b, &id);
    a.mount().ok();
    a.run("dataset create m-a/p").ok();
    a.write("p/f", "one").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    a.run("clone store/v store/c").ok();
    a.run("mount store/c m-a").ok();
    a.write("p/f", "of the clone").unwrap();
    a.umount().ok();
    b.mount().ok();
    assert_eq!(fs::read_to_string(b.file("p/f")).unwrap(), "one");
    b.write("p/f", "two").unwrap();
    b.umount().ok();
    lab.wait_until_free();
    let each_has_its_own = || {
        assert_eq!(a.run("cat store/c p/f").ok().out, "of the clone");
        a.run("check store/c").ok();
        assert_eq!(a.run("cat store/v p/f").ok().out, "two");
        a.run("check store/v").ok();
        assert_eq!(b.run("cat store/v p/f").ok().out, "two");
    };
    each_has_its_own();
    // A server has one anchor for an id.
    lab.grant(a, &a.id("store/c"));
    a.run(&format!("anchor move store/c {}", lab.url())).ok().says("has the id of the original");
    each_has_its_own();
    a.run("mount store/c m-a").ok();
    a.run("dataset destroy m-a/p").ok();
    a.umount().ok();
    lab.wait_until_free();
    assert_eq!(lab.vaults().len(), 3, "the original's anchor is gone");
    assert_eq!(a.run("cat store/v p/f").ok().out, "two");
    a.run("check store/v").ok();
}

/// A host gives rights only in what it may use itself.
#[test]
fn a_dataset_is_put_into_no_vault_but_ones_own() {
    let lab = Lab::new();
    let (a, evil) = (lab.joined("a"), lab.joined("evil"));
    let id = lab.vault(a);
    evil.run("init store/e").ok();
    let own = evil.id("store/e");
    lab.grant(evil, &own);
    Runtime::new().unwrap().block_on(async {
        let anchors = AnchorsClient::new(channel(&lab, "evil"));
        let nobodys = vec![9; 16];
        // Into another host's vault; into one that the server does not have; into itself.
        for (vault, around) in [(&nobodys, id_of(&id)), (&nobodys, id_of(&own)), (&id_of(&own), id_of(&own))] {
            let first = proto::PutRequest { vault: vault.clone(), around, ..Default::default() };
            let put = anchors.clone().put(tokio_stream::iter([first])).await;
            assert_eq!(put.unwrap_err().code(), Code::PermissionDenied);
        }
        // Nor one that another host was granted, and has not put there yet.
        tokio::task::block_in_place(|| lab.grant(a, &"07".repeat(16)));
        let first = proto::PutRequest { vault: vec![7; 16], around: id_of(&own), ..Default::default() };
        let put = anchors.clone().put(tokio_stream::iter([first])).await;
        assert_eq!(put.unwrap_err().code(), Code::PermissionDenied);
        let first = proto::PutRequest { vault: nobodys, around: vec![1; 3], ..Default::default() };
        let put = anchors.clone().put(tokio_stream::iter([first])).await;
        assert_eq!(put.unwrap_err().code(), Code::InvalidArgument);
    });
    // What another host has to do with cannot be claimed for a vault of one's own.
    evil.run(&format!("anchor move store/e {}", lab.url())).ok();
    Runtime::new().unwrap().block_on(async {
        let anchors = AnchorsClient::new(channel(&lab, "evil"));
        for vault in [id_of(&id), vec![7; 16]] {
            let first = proto::PutRequest { vault, around: id_of(&own), ..Default::default() };
            let put = anchors.clone().put(tokio_stream::iter([first])).await;
            assert_eq!(put.unwrap_err().code(), Code::PermissionDenied);
        }
    });
    let status = evil.run(&format!("ls --anchor {} store/v", lab.url()));
    status.code(68);
    a.run("check store/v").ok();
}

/// Every host sees every dataset, and all of them are one file system.
#[test]
fn hosts_share_datasets_as_they_share_the_vault() {
    let lab = Lab::new();
    let hosts = shared(&lab);
    let [a, b, c] = hosts;
    a.run("dataset create m-a/p").ok();
    b.run("dataset create m-b/p/q").ok();
    assert_eq!(listed(&c.file("p")), ["q"]);
    for round in 0..20 {
        let [writes, reads] = if round % 2 == 0 { [a, b] } else { [b, c] };
        for place in ["count", "p/count", "p/q/count"] {
            fs::write(writes.file(place), format!("{place} {round}")).unwrap();
            assert_eq!(fs::read_to_string(reads.file(place)).unwrap(), format!("{place} {round}"));
        }
    }
    // Handles, numbers and names outlive turns in a dataset, too.
    let mut open = File::options().read(true).write(true).create_new(true).open(a.file("p/one")).unwrap();
    open.write_all(b"one").unwrap();
    fs::rename(b.file("p/one"), b.file("p/two")).unwrap();
    open.write_all(b", two").unwrap();
    assert_eq!(fs::read_to_string(c.file("p/two")).unwrap(), "one, two");
    assert_eq!(open.metadata().unwrap().ino(), fs::metadata(a.file("p/two")).unwrap().ino());
    fs::rename(c.file("p"), c.file("moved")).unwrap();
    open.write_all(b", three").unwrap();
    assert_eq!(fs::read_to_string(b.file("moved/two")).unwrap(), "one, two, three");
    assert_eq!(listed(&a.file("moved/q")), ["count"]);
    // What belongs to the entry of a dataset, and what to its inside.
    for (host, mode) in [(a, 0o711), (b, 0o750), (c, 0o777)] {
        fs::set_permissions(host.file("moved"), fs::Permissions::from_mode(mode)).unwrap();
        hosts.iter().for_each(|host| assert_eq!(fs::metadata(host.file("moved")).unwrap().mode() & 0o777, mode));
    }
    // A handle inside, whose host does not look the dataset up again; and a change of its inside by that host.
    let inside = File::options().write(true).create(true).truncate(false).open(b.file("moved/inside")).unwrap();
    fs::set_permissions(a.file("moved"), fs::Permissions::from_mode(0o700)).unwrap();
    (&inside).write_all(b"text").unwrap();
    let root = File::open(b.file("moved")).unwrap();
    fs::set_permissions(a.file("moved"), fs::Permissions::from_mode(0o701)).unwrap();
    (&inside).write_all(b"text").unwrap();
    rustix::fs::fsetxattr(&root, "user.by", b"handle", rustix::fs::XattrFlags::empty()).unwrap();
    assert_eq!(fs::metadata(c.file("moved")).unwrap().mode() & 0o777, 0o701);
    drop((inside, root));
    let attribute = Command::new("setfattr").args(["-n", "user.of", "-v", "root"]).arg(a.file("moved")).status();
    assert!(attribute.unwrap().success());
    let shown =
        Command::new("getfattr").args(["--only-values", "-n", "user.of"]).arg(b.file("moved")).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&shown.stdout), "root");
    let across = |error: std::io::Error| assert_eq!(error.kind(), ErrorKind::CrossesDevices);
    across(fs::rename(a.file("count"), a.file("moved/other")).unwrap_err());
    across(fs::rename(a.file("moved/q/count"), a.file("moved/other")).unwrap_err());
    across(fs::hard_link(a.file("moved/two"), a.file("other")).unwrap_err());
    fs::copy(a.file("moved/two"), b.file("moved/q/copy")).unwrap();
    fs::remove_dir(a.file("moved/q")).unwrap_err();
    // Locks of programs hold among all hosts, by dataset.
    let (first, second) = (File::open(a.file("moved/two")).unwrap(), File::open(b.file("moved/two")).unwrap());
    first.try_lock().unwrap();
    assert!(matches!(second.try_lock(), Err(fs::TryLockError::WouldBlock)));
    File::open(b.file("count")).unwrap().try_lock().unwrap();
    first.unlock().unwrap();
    second.try_lock().unwrap();
    drop((first, second, open));
    c.run("dataset list m-c/moved").ok();
    c.run("profile show m-c moved/two").ok();
    c.run("profile show m-c/moved two").ok();
    let datasets = c.run("dataset list m-c").ok();
    assert_eq!(datasets.out.lines().filter(|line| line.contains("moved")).count(), 2, "{}", datasets.out);
    b.run("dataset set m-b/moved compress=lz4").ok();
    a.run("key rotate --outer m-a/moved").ok();
    fs::write(c.file("moved/after"), "the rotation").unwrap();
    assert_eq!(fs::read_to_string(b.file("moved/after")).unwrap(), "the rotation");
    unmounted_and_checked(&lab, &hosts);
}

/// Re-keying a vault seals the slots anew by which it opens its datasets, in turns of those.
#[test]
fn a_vault_with_datasets_is_rekeyed_while_hosts_use_them() {
    let lab = Lab::new();
    let hosts = shared(&lab);
    let [a, b, c] = hosts;
    a.run("dataset create m-a/p").ok();
    a.run("dataset create m-a/p/q").ok();
    b.write("p/f", "inside").unwrap();
    c.write("p/q/g", "deep").unwrap();
    a.run("key rotate --outer m-a").ok();
    b.run("key rotate --outer m-b/p").ok();
    // The host that re-keys has not used the inner one.
    c.run("rekey --outer m-c").ok();
    a.run("rekey --full m-a/p").ok();
    for host in hosts {
        assert_eq!(fs::read_to_string(host.file("p/f")).unwrap(), "inside");
        assert_eq!(fs::read_to_string(host.file("p/q/g")).unwrap(), "deep");
    }
    hosts.iter().for_each(|host| drop(host.umount().ok()));
    lab.wait_until_free();
    a.run("key retire --outer 1 store/v").ok();
    a.run(&format!("key retire --outer 1 {}", the_dataset_in(&lab, "store/v"))).ok();
    b.run("check store/v").ok();
    assert_eq!(b.run("cat store/v p/q/g").ok().out, "deep");
}

/// A host that has one dataset and stands still is in nobody's way elsewhere.
#[test]
fn hosts_in_different_datasets_do_not_wait_for_each_other() {
    let lab = Lab::with_term(20);
    let hosts = shared(&lab);
    let [a, b, _] = hosts;
    for dataset in ["p", "q"] {
        a.run(&format!("dataset create m-a/{dataset}")).ok();
    }
    fs::write(a.file("p/f"), "of a").unwrap();
    // Another host has the vault around them, and the other dataset.
    fs::write(b.file("q/f"), "of b").unwrap();
    fs::write(b.file("f"), "of b").unwrap();
    let stopped = a.daemon();
    kill(stopped, "-STOP");
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| {
            let text = fs::read_to_string(b.file("p/f")).unwrap();
            is_done.store(true, Ordering::SeqCst);
            text
        });
        for round in 0..20 {
            b.write("q/f", &format!("of b, {round}")).unwrap();
            fs::create_dir(b.file(&format!("d{round}"))).unwrap();
        }
        assert!(!is_done.load(Ordering::SeqCst), "it was read while the other host may have changed it");
        kill(stopped, "-CONT");
        assert_eq!(reads.join().unwrap(), "of a");
    });
    unmounted_and_checked(&lab, &hosts);
}

/// What a killed host had synced in a dataset is there for the next, which takes the rest over.
#[test]
fn a_host_that_is_killed_in_a_dataset_is_taken_over_there() {
    let lab = Lab::with_term(5);
    let hosts = shared(&lab);
    let [a, b, c] = hosts;
    a.run("dataset create m-a/p").ok();
    a.write("p/synced", "synced").unwrap();
    let mut open = File::create(a.file("p/open")).unwrap();
    open.write_all(b"not synced").unwrap();
    kill(a.daemon(), "-KILL");
    drop(open);
    let _ = Command::new("umount").arg("-l").arg(a.file("")).output();
    b.write("elsewhere", "goes on").unwrap();
    assert_eq!(fs::read_to_string(b.file("p/synced")).unwrap(), "synced");
    b.write("p/synced", "more").unwrap();
    assert_eq!(fs::read_to_string(c.file("p/synced")).unwrap(), "more");
    unmounted_and_checked(&lab, &hosts[1..]);
}

/// Keys of a dataset's own are for each host to load.
#[test]
fn a_dataset_with_a_key_of_its_own_opens_where_that_is_loaded() {
    let lab = Lab::new();
    let hosts = shared(&lab);
    let [a, b, c] = hosts;
    fs::write(lab.path("other"), [8; 32]).unwrap();
    fs::set_permissions(lab.path("other"), fs::Permissions::from_mode(0o600)).unwrap();
    a.run("dataset create --new-key raw:file:other m-a/own").ok();
    a.write("own/f", "mine").unwrap();
    let is_locked = |host: Host<'_>| {
        let error = fs::read(host.file("own/f")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOKEY), "{error}");
        assert_eq!(fs::metadata(host.file("own")).unwrap().mode() & 0o777, 0o755);
    };
    is_locked(b);
    b.run("key load m-b/own").code(12);
    b.run("key load --key raw:file:other m-b/own").ok();
    assert_eq!(fs::read_to_string(b.file("own/f")).unwrap(), "mine");
    b.write("own/g", "of b").unwrap();
    assert_eq!(fs::read_to_string(a.file("own/g")).unwrap(), "of b");
    b.run("key unload m-b/own").ok();
    is_locked(b);
    a.write("own/g", "of a").unwrap();
    b.run("key load --key raw:file:other m-b/own").ok();
    assert_eq!(fs::read_to_string(b.file("own/g")).unwrap(), "of a");
    // A dataset that another host uses stays, and can be used; one that nobody else has can be destroyed.
    a.run("dataset destroy m-a/own").code(28).says("host b");
    is_locked(c);
    b.run("key unload m-b/own").ok();
    a.run("key load --key raw:file:other m-a/own").ok();
    assert_eq!(fs::read_to_string(a.file("own/g")).unwrap(), "of a");
    a.run("dataset destroy m-a/own").ok();
    assert_eq!(lab.vaults().len(), 1);
    // By force beside another host, which lets go of it.
    a.run("dataset create m-a/p").ok();
    b.write("p/f", "of b").unwrap();
    a.run("dataset destroy --force m-a/p").ok().says("host b").says("forget");
    let of_p = || lab.vaults().into_iter().find(|vault| vault.contains("(dataset in"));
    until("the other host lets go of a dataset that is gone", || of_p().unwrap().contains("not in use"));
    let id = of_p().unwrap();
    lab.serve(&["forget", &format!("@{}", id.split(' ').next().unwrap())]).ok();
    hosts.iter().for_each(|host| assert!(listed(&host.file("")).is_empty()));
    assert_eq!(lab.vaults().len(), 1);
    unmounted_and_checked(&lab, &hosts);
}

/// What was left of datasets that were destroyed.
fn left(lab: &Lab) -> bool {
    let entries = fs::read_dir(lab.path("store/v/lamassu.staging")).unwrap();
    entries.flatten().any(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with("dataset-")))
}

/// A dataset with many entries. They are made in the store, which is faster, and deleted with the rest.
fn large(lab: &Lab, host: Host<'_>) {
    host.run(&format!("dataset create m-{}/p", host.name)).ok();
    host.write("p/f", "one").unwrap();
    let dataset = lab.path(&the_dataset_in(lab, "store/v"));
    (0..40_000).for_each(|number| drop(File::create(dataset.join(format!("entry{number}"))).unwrap()));
}

/// The tree of a dataset that is destroyed is deleted turn by turn.
#[test]
fn a_large_dataset_is_destroyed_while_others_use_the_vault_around_it() {
    let lab = Lab::with_term(5);
    let hosts = shared(&lab);
    let [a, b, _] = hosts;
    // On a busy machine a dataset may be gone before the other host has made one change. In one turn it always is.
    let have_turns = (0..5).any(|_| {
        large(&lab, a);
        let has_turn = std::thread::scope(|scope| {
            let destroys = scope.spawn(|| a.run("dataset destroy m-a/p"));
            let mut has_turn = false;
            while !destroys.is_finished() {
                let before = left(&lab);
                b.write("other", "text").unwrap();
                has_turn |= before && left(&lab);
            }
            destroys.join().unwrap().ok();
            has_turn
        });
        assert!(!left(&lab));
        has_turn
    });
    assert!(have_turns, "no other host could change anything while a dataset was deleted");
    assert_eq!(listed(&a.file("")), ["other"]);
    unmounted_and_checked(&lab, &hosts);
}

/// What a host that is killed meanwhile has not deleted, the next turns do, each a part.
#[test]
fn what_a_killed_host_has_left_of_a_dataset_others_delete() {
    let lab = Lab::with_term(5);
    let hosts = shared(&lab);
    let [a, b, _] = hosts;
    large(&lab, a);
    std::thread::scope(|scope| {
        let destroys = scope.spawn(|| a.run("dataset destroy m-a/p"));
        while !left(&lab) && !destroys.is_finished() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        kill(a.daemon(), "-KILL");
        let _ = Command::new("umount").arg("-l").arg(a.file("")).output();
    });
    assert!(left(&lab), "everything was deleted before the host was killed");
    until("the rest is deleted", || {
        b.write("other", "text").unwrap();
        !left(&lab)
    });
    unmounted_and_checked(&lab, &hosts[1..]);
}

/// A header from before a dataset had an anchor, by which it would be read unverified.
#[test]
fn a_dataset_whose_anchor_the_server_has_is_not_believed_to_have_none() {
    let lab = Lab::new();
    let [a, b] = ["a", "b"].map(|name| lab.joined(name));
    a.run("init --anchor none store/v").ok();
    a.run("mount store/v m-a").ok();
    for dataset in ["p", "q"] {
        a.run(&format!("dataset create m-a/{dataset}")).ok();
        a.write(&format!("{dataset}/f"), dataset).unwrap();
    }
    a.umount().ok();
    let datasets = datasets_in(&lab, "store/v");
    let [anchored, other] = &datasets[..] else { panic!("{datasets:?}") };
    for file in ["lamassu.vault", "lamassu.history"] {
        copy(&lab.path(anchored).join(file), &lab.path(file));
    }
    a.run("anchor rebuild store/v").ok();
    a.run(&format!("anchor rebuild {anchored}")).ok();
    let id = a.id("store/v");
    [a, b].iter().for_each(|host| lab.grant(*host, &id));
    // One without an anchor stays behind, and that is said.
    let told = a.run(&format!("anchor move store/v {}", lab.url())).ok();
    told.says("those of 1 datasets").says(&format!("{other}\" was skipped")).says("not anchored");
    for file in ["lamassu.vault", "lamassu.history"] {
        copy(&lab.path(file), &lab.path(anchored).join(file));
    }
    let opened = ["p", "q"].map(|name| b.run(&format!("cat --anchor {} store/v {name}/f", lab.url())));
    let codes = opened.map(|ran| ran.code);
    assert!(codes == [30, 0] || codes == [0, 30], "{codes:?}");
    b.run(&format!("check --anchor {} store/v", lab.url())).code(30);
}

/// How a dataset is verified is in its header, which another host may change.
#[test]
fn a_dataset_is_verified_as_the_newest_header_says() {
    let lab = Lab::new();
    let hosts = shared(&lab);
    let [a, b, _] = hosts;
    a.run("dataset create m-a/p").ok();
    a.run("dataset set m-a/p integrity=metadata").ok();
    let text = "text ".repeat(20_000);
    b.write("p/f", &text).unwrap();
    assert_eq!(fs::read_to_string(a.file("p/f")).unwrap(), text);
    let dataset = lab.path(&the_dataset_in(&lab, "store/v"));
    let files = fs::read_dir(dataset).unwrap().map(|entry| entry.unwrap().path());
    let file = files.into_iter().find(|path| path.symlink_metadata().unwrap().len() > 100_000).unwrap();
    let mut bytes = fs::read(&file).unwrap();
    let at = bytes.len() - 6_000;
    bytes[at] ^= 1;
    fs::write(&file, bytes).unwrap();
    b.write("p/other", "a turn of another host").unwrap();
    assert_ne!(fs::read(a.file("p/f")).unwrap(), text.as_bytes(), "the damage is not where contents are");
    b.run("dataset set m-b/p integrity=full").ok();
    assert_eq!(fs::read(a.file("p/f")).unwrap_err().raw_os_error(), Some(libc::EIO));
    hosts.iter().for_each(|host| drop(host.umount().ok()));
}

/// A store that puts a copy of a dataset's directory in its place, and then the directory back.
#[test]
fn a_dataset_whose_directory_was_away_is_used_again() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    a.run("dataset create m-a/p").ok();
    fs::write(a.file("p/f"), "of a").unwrap();
    let content = |host: Host<'_>| fs::read_to_string(host.file("p/f"));
    assert_eq!(content(b).unwrap(), "of a");
    let (stored, aside) = (lab.path(&the_dataset_in(&lab, "store/v")), lab.path("aside"));
    fs::rename(&stored, &aside).unwrap();
    copy(&aside, &stored);
    for host in [b, a] {
        // By its open directory, or not at all.
        assert!(content(host).map_or(true, |content| content == "of a"));
    }
    fs::remove_dir_all(&stored).unwrap();
    fs::rename(&aside, &stored).unwrap();
    for host in [a, b] {
        until("it is read again", || content(host).is_ok_and(|content| content == "of a"));
        fs::write(host.file(&format!("p/of-{}", host.name)), "later").unwrap();
    }
    assert_eq!(listed(&a.file("p")), ["f", "of-a", "of-b"]);
    unmounted_and_checked(&lab, &[a, b, c]);
}
