//! Datasets of vaults whose anchors are at a server.

use crate::common::raw::{channel, id_of};
use crate::common::*;
use lamassu_rpc::proto::{self, anchors_client::AnchorsClient};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use tokio::runtime::Runtime;
use tonic::Code;

/// The directories in the store of the datasets that lie directly in a directory of it.
fn datasets_in(lab: &Lab, dir: &str) -> Vec<String> {
    let entries = fs::read_dir(lab.path(dir)).unwrap().map(|entry| entry.unwrap());
    let found = entries.filter(|entry| entry.path().join("lamassu.vault").exists());
    found.map(|entry| format!("{dir}/{}", entry.file_name().to_str().unwrap())).collect()
}

fn the_dataset_in(lab: &Lab, dir: &str) -> String {
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
        let first = proto::PutRequest { vault: nobodys, around: vec![1; 3], ..Default::default() };
        let put = anchors.clone().put(tokio_stream::iter([first])).await;
        assert_eq!(put.unwrap_err().code(), Code::InvalidArgument);
    });
    // What another host's vault is cannot be claimed for one's own: the anchor is there already.
    evil.run(&format!("anchor move store/e {}", lab.url())).ok();
    Runtime::new().unwrap().block_on(async {
        let anchors = AnchorsClient::new(channel(&lab, "evil"));
        let first = proto::PutRequest { vault: id_of(&id), around: id_of(&own), ..Default::default() };
        anchors.clone().put(tokio_stream::iter([first])).await.unwrap_err();
    });
    let status = evil.run(&format!("ls --anchor {} store/v", lab.url()));
    status.code(68);
    a.run("check store/v").ok();
}
