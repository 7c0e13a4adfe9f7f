//! Oblivious keys of zones: a server's part in the keys of blocks.

use crate::common::raw::channel;
use crate::common::*;
use lamassu_rpc::proto::keys_client::KeysClient;
use lamassu_rpc::{AGAIN, proto};
use redb::{Database, ReadableTable, TableDefinition};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use tokio::runtime::Runtime;
use tonic::Code;

/// A server that keeps keys, with more lines of configuration.
fn lab(config: &str) -> Lab {
    let mut lab = Lab::new();
    for (name, byte) in [("master", 11), ("zone.key", 12)] {
        fs::write(lab.path(name), [byte; 32]).unwrap();
        fs::set_permissions(lab.path(name), PermissionsExt::from_mode(0o600)).unwrap();
    }
    lab.stop("-TERM");
    let path = lab.path("server/server.toml");
    let before = fs::read_to_string(&path).unwrap();
    let master = lab.path("master");
    fs::write(path, format!("{before}master_key = \"raw:file:{}\"\n{config}\n", master.display())).unwrap();
    lab.start();
    lab
}

fn grant(lab: &Lab, host: &str, key: &str) {
    lab.serve(&["keys", "grant", &format!("@{host}"), &format!("@{key}")]).ok();
}

/// Makes a zone file with the key of this name.
fn zone(host: Host<'_>, key: &str, file: &str) -> Ran {
    host.run(&format!("zone create -k raw:file:zone.key --oblivious {}/{key} {file}", host.lab.url()))
}

const OF_ZONE: &str = "--zone-key raw:file:zone.key";

fn init(host: Host<'_>, zone: &str, vault: &str) {
    host.run(&format!("init --zone {zone} {OF_ZONE} {vault}")).ok();
}

/// A file of blocks that differ.
fn content(lab: &Lab, name: &str, seed: u64, blocks: u64) {
    let mut file = fs::File::create(lab.path(name)).unwrap();
    for n in 0..blocks {
        file.write_all(&[seed, n].map(u64::to_le_bytes).concat().repeat(256)).unwrap();
    }
}

/// One file whose blocks can have no keys is in no other's way when another host wants the vault.
#[test]
fn a_file_that_cannot_be_committed_is_lost_alone() {
    let lab = lab("");
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    ["a", "b"].into_iter().for_each(|host| grant(&lab, host, "office"));
    zone(a, "office", "office.zone").ok();
    init(a, "office.zone", "store/v");
    let id = a.id("store/v");
    [a, b].into_iter().for_each(|host| lab.grant(host, &id));
    a.run(&format!("anchor move store/v {}", lab.url())).ok();
    [a, b].into_iter().for_each(|host| {
        drop(host.run(&format!("mount --shared --anchor {} store/v m-{}", lab.url(), host.name)).ok())
    });
    let long = "of some blocks ".repeat(4000);
    a.write("log", &long).unwrap();
    lab.serve(&["keys", "grant", "--not", "@a", "@office"]).ok();
    let mut log = fs::File::options().append(true).open(a.file("log")).unwrap();
    log.write_all(&[7; 9000]).unwrap();
    fs::write(a.file("small"), "it fits its page").unwrap();
    fs::create_dir(a.file("dir")).unwrap();
    std::os::unix::fs::symlink("small", a.file("link")).unwrap();
    fs::write(a.file("moved"), "from here").unwrap();
    fs::rename(a.file("moved"), a.file("dir/to")).unwrap();
    for host in [b, a] {
        assert_eq!(fs::read_to_string(host.file("link")).unwrap(), "it fits its page");
        assert_eq!(fs::read_to_string(host.file("dir/to")).unwrap(), "from here");
        let read = fs::read_to_string(host.file("log")).unwrap();
        assert!(read == long, "host {} has {} bytes of {}", host.name, read.len(), long.len());
    }
    // Its writer is told, also if a process that it has started has closed its copy of the descriptor before.
    drop(log.try_clone().unwrap());
    assert_eq!(log.sync_all().unwrap_err().raw_os_error(), Some(5));
    drop(log);
    [a, b].into_iter().for_each(|host| drop(host.umount().ok()));
    lab.wait_until_free();
    a.run("check store/v").ok();
}

/// Every block of 4096 bytes of every file of a vault.
fn stored(lab: &Lab, vault: &str) -> BTreeSet<Vec<u8>> {
    fn visit(dir: &Path, all: &mut BTreeSet<Vec<u8>>) {
        for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                visit(&entry.path(), all);
            } else if kind.is_file() {
                all.extend(fs::read(entry.path()).unwrap().chunks_exact(4096).map(<[u8]>::to_vec));
            }
        }
    }
    let mut all = BTreeSet::new();
    visit(&lab.path(vault), &mut all);
    all
}

fn have_in_common(lab: &Lab, one: &str, other: &str) -> usize {
    stored(lab, one).intersection(&stored(lab, other)).count()
}

fn audit(lab: &Lab, event: &str, host: &str, key: &str) -> usize {
    let out = lab.serve(&["audit", "--json"]).ok().out;
    let entries = out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    entries.filter(|entry| entry["event"] == event && entry["host"] == host && entry["key"] == key).count()
}

#[test]
fn hosts_deduplicate_by_the_server_and_read_without_it() {
    let mut lab = lab("");
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    zone(a, "office", "office.zone").code(43).says("was not granted it");
    a.run(&format!("zone create -k raw:file:zone.key -s paper --oblivious {}/office z", lab.url())).code(28);
    a.run("zone create -k raw:file:zone.key --oblivious kmip://x/y z").code(2).says("server://HOST");
    ["a", "b"].into_iter().for_each(|host| grant(&lab, host, "office"));
    zone(a, "office", "office.zone").ok();
    let shown = a.run("zone show -k raw:file:zone.key office.zone").ok().out;
    assert!(shown.contains(&format!("epoch 1, by {}/office", lab.url())), "{shown}");
    init(a, "office.zone", "store/a");
    init(b, "office.zone", "store/b");
    content(&lab, "data", 1, 100);
    a.run("cp store/a data vault:/").ok();
    b.run("cp store/b data vault:/").ok();
    assert_eq!(have_in_common(&lab, "store/a", "store/b"), 100);
    let header = fs::read_to_string(lab.path("store/a/lamassu.vault")).unwrap();
    assert!(header.contains("\"oblivious\""), "a reader that does not know it refuses it");
    for host in ["a", "b"] {
        assert_eq!(audit(&lab, "key-evaluates", host, "office"), 1);
    }
    assert_eq!(lab.metric("evaluations_total"), 200.0);
    let listed = lab.serve(&["keys", "list"]).ok().out;
    assert!(listed.contains("office  active") && listed.contains("oblivious"), "{listed}");
    // It is given to nobody.
    a.run(&format!("key generate {}/office", lab.url())).code(28);
    a.run(&format!("init -k {}/office store/x", lab.url())).code(43);
    // A dataset that deduplicates with the vault it lies in has its K_in, and all that goes with it.
    a.run("dataset create store/a sub").ok();
    a.run("cp store/a data vault:/sub/").ok();
    assert_eq!(have_in_common(&lab, "store/a", "store/b"), 100);
    assert_eq!(lab.metric("evaluations_total"), 300.0);
    // Without the server everything is read and verified, and nothing new is written.
    lab.stop("-TERM");
    let (a, b) = (lab.host("a"), lab.host("b"));
    assert_eq!(b.run("cat store/b data").ok().out.len(), 100 * 4096);
    a.run("check store/a").ok();
    a.run("leak store/a").ok();
    a.run("dedup-estimate data").ok();
    a.run("clone --key raw:file:key store/a store/clone").ok();
    a.run("check store/clone").ok();
    content(&lab, "more", 2, 100);
    a.run("cp store/a more vault:/").code(40).says("office").says("What is stored can be read");
    // What has a K_in of its own needs no server.
    a.run("clone --key raw:file:key --new-key store/a store/own").ok();
    a.run("cp store/own more vault:/").ok();
    a.run("check store/own").ok();
    // A small file has no block.
    fs::write(lab.path("small"), "small").unwrap();
    a.run("cp store/a small vault:/").ok();
    a.run("mount store/a m-a").ok();
    assert_eq!(fs::read(a.file("data")).unwrap(), fs::read(lab.path("data")).unwrap());
    let failed = a.write("late", &"late ".repeat(60_000)).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc_eio()), "{failed}");
    assert_eq!(fs::read(a.file("data")).unwrap().len(), 100 * 4096);
    lab.start();
    let a = lab.host("a");
    let until = std::time::Instant::now() + PATIENCE;
    while a.write("late", &"late ".repeat(60_000)).is_err() {
        assert!(std::time::Instant::now() < until, "the mount does not find the server again");
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    a.umount().ok();
    a.run("check store/a").ok();
    assert_eq!(a.run("cat store/a late").ok().out, "late ".repeat(60_000));
}

fn libc_eio() -> i32 {
    std::io::Error::from(rustix::io::Errno::IO).raw_os_error().unwrap()
}

#[test]
fn who_lost_the_grant_reads_and_writes_nothing_new() {
    let lab = lab("");
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    ["a", "b"].into_iter().for_each(|host| grant(&lab, host, "office"));
    zone(a, "office", "office.zone").ok();
    init(a, "office.zone", "store/a");
    init(b, "office.zone", "store/b");
    content(&lab, "data", 1, 40);
    content(&lab, "more", 2, 40);
    b.run("cp store/b data vault:/").ok();
    lab.serve(&["keys", "grant", "--not", "@b", "@office"]).ok();
    b.run("cp store/b more vault:/").code(43).says("keys grant");
    // Not even what is there already: the host no longer knows its tokens.
    b.run("cp store/b data vault:/again").code(43);
    assert_eq!(b.run("cat store/b data").ok().out.len(), 40 * 4096);
    b.run("check store/b").ok();
    lab.serve(&["host", "revoke", "@b"]).ok();
    b.run("cp store/b more vault:/").code(42).says("revoked");
    zone(lab.host("c"), "office", "another.zone").code(42).says("host join");
    // A key that is retired, and another one from then on, for all that is written and by `rekey` for all that was.
    a.run("cp store/a data vault:/").ok();
    lab.serve(&["keys", "retire", "@office"]).ok();
    a.run("cp store/a more vault:/").code(47).says("retired");
    grant(&lab, "a", "office-2");
    let rotate = |oblivious: &str| {
        a.run(&format!("zone rotate --inner -k raw:file:zone.key{oblivious} office.zone")).ok();
        a.run(&format!("key rotate --inner --zone office.zone {OF_ZONE} store/a")).ok();
    };
    let before = stored(&lab, "store/a");
    rotate(&format!(" --oblivious {}/office-2", lab.url()));
    a.run("cp store/a more vault:/").ok();
    a.run("rekey --full store/a").ok();
    a.run("key retire --inner 1 store/a").ok();
    assert_eq!(before.intersection(&stored(&lab, "store/a")).count(), 0, "all blocks are encrypted anew");
    // An epoch after an oblivious one is oblivious by the same key, unless it is told otherwise.
    rotate("");
    let shown = a.run("zone show -k raw:file:zone.key office.zone").ok().out;
    assert!(shown.contains("epoch 3, by") && shown.matches("office-2").count() == 2, "{shown}");
    rotate(" --oblivious none");
    lab.serve(&["keys", "retire", "@office-2"]).ok();
    a.run("rekey --full store/a").ok();
    a.run("check store/a").ok();
    assert_eq!(a.run("cat store/a more").ok().out.len(), 40 * 4096);
}

/// A mount by root gives the network up, unless it may need a server later.
#[test]
fn a_vault_that_is_mounted_becomes_oblivious() {
    let lab = lab("");
    let (a, b) = (lab.joined("a"), lab.host("b"));
    grant(&lab, "a", "office");
    a.run("zone create -k raw:file:zone.key mounted.zone").ok();
    init(a, "mounted.zone", "store/a");
    init(b, "mounted.zone", "store/b");
    a.run("mount store/a m-a").ok();
    b.run("mount store/b m-b").ok();
    a.write("before", &"before ".repeat(10_000)).unwrap();
    let oblivious = format!("--oblivious {}/office", lab.url());
    a.run(&format!("zone rotate --inner -k raw:file:zone.key {oblivious} mounted.zone")).ok();
    let rotate = |mountpoint: &str| format!("key rotate --inner --zone mounted.zone {OF_ZONE} {mountpoint}");
    a.run(&rotate("m-a")).ok();
    a.write("behind", &"behind ".repeat(10_000)).unwrap();
    assert!(lab.metric("evaluations_total") > 0.0);
    // This one was mounted by a host that had joined no server.
    let token = lab.serve(&["enrol", "@b"]).ok().out;
    let b = lab.host("b");
    b.with_input(&["host", "join"], &token).ok();
    grant(&lab, "b", "office");
    b.run(&rotate("m-b")).code(28).says("mount it again");
    b.write("as before", &"as before ".repeat(10_000)).unwrap();
    b.umount().ok();
    b.run("mount store/b m-b").ok();
    b.run(&rotate("m-b")).ok();
    b.write("behind", &"behind ".repeat(10_000)).unwrap();
    for (host, store) in [(a, "store/a"), (b, "store/b")] {
        host.umount().ok();
        host.run(&format!("check {store}")).ok();
        assert_eq!(host.run(&format!("cat {store} behind")).ok().out, "behind ".repeat(10_000));
    }
}

#[test]
fn a_host_that_asks_for_too_much_waits() {
    let lab = lab("evaluations_per_second = 600\nevaluations_burst = 1024");
    let a = lab.joined("a");
    grant(&lab, "a", "office");
    zone(a, "office", "office.zone").ok();
    init(a, "office.zone", "store/a");
    content(&lab, "data", 1, 100);
    // Its allowance is used up, and owes a batch.
    Runtime::new().unwrap().block_on(async {
        let mut keys = KeysClient::new(channel(&lab, "a"));
        let public = keys.open_oblivious(proto::KeyName { name: "office".into() }).await.unwrap().into_inner().public;
        let batch = || proto::Blinded { name: "office".into(), elements: public.repeat(1024) };
        while keys.evaluate(batch()).await.is_ok() {}
    });
    a.run("cp store/a data vault:/").ok();
    a.run("check store/a").ok();
    assert!(lab.metric("evaluations_put_off_total") >= 1.0);
    assert_eq!(audit(&lab, "evaluations-limited", "a", "office"), 1);
    assert_eq!(audit(&lab, "key-evaluates", "a", "office"), 1);
}

#[test]
fn hostile_batches_are_refused() {
    let lab = lab("evaluations_per_second = 1\nevaluations_burst = 2048");
    let (a, _) = (lab.joined("a"), lab.joined("evil"));
    ["office", "given"].into_iter().for_each(|key| grant(&lab, "a", key));
    zone(a, "office", "office.zone").ok();
    a.run(&format!("key generate {}/given", lab.url())).ok();
    Runtime::new().unwrap().block_on(async {
        let mut keys = KeysClient::new(channel(&lab, "a"));
        let name = |name: &str| proto::KeyName { name: name.into() };
        let public = keys.open_oblivious(name("office")).await.unwrap().into_inner().public;
        assert_eq!(keys.open_oblivious(name("office")).await.unwrap().into_inner().public, public);
        assert_eq!(keys.open_oblivious(name("given")).await.unwrap_err().code(), Code::AlreadyExists);
        assert_eq!(keys.open_oblivious(name("other")).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(keys.give_key(name("office")).await.unwrap_err().code(), Code::NotFound);
        let batch = |name: &str, elements: Vec<u8>| proto::Blinded { name: name.into(), elements };
        for (elements, code) in [
            (vec![], Code::InvalidArgument),
            (vec![1; 31], Code::InvalidArgument),
            (public[..31].to_vec(), Code::InvalidArgument),
            (vec![0; 32], Code::InvalidArgument),
            (vec![0xff; 64], Code::InvalidArgument),
            ([&public[..], &[0; 32]].concat(), Code::InvalidArgument),
            (public.repeat(1025), Code::InvalidArgument),
            (vec![0; 1 << 20], Code::OutOfRange),
        ] {
            let len = elements.len();
            assert_eq!(keys.evaluate(batch("office", elements)).await.unwrap_err().code(), code, "{len} bytes");
        }
        for (bad, code) in
            [("", Code::InvalidArgument), ("../x", Code::InvalidArgument), ("given", Code::AlreadyExists)]
        {
            assert_eq!(keys.evaluate(batch(bad, public.clone())).await.unwrap_err().code(), code, "{bad:?}");
        }
        let mut evil = KeysClient::new(channel(&lab, "evil"));
        let status = evil.evaluate(batch("office", public.clone())).await.unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
        assert_eq!(evil.open_oblivious(name("office")).await.unwrap_err().code(), Code::NotFound);
        // What is refused counts, too: whoever sends nonsense has no more of it.
        let mut refused = None;
        for _ in 0..4 {
            refused = keys.evaluate(batch("office", public.repeat(1024))).await.err().or(refused);
        }
        let refused = refused.unwrap();
        let again: u64 = refused.metadata().get(AGAIN).unwrap().to_str().unwrap().parse().unwrap();
        assert!(refused.code() == Code::ResourceExhausted && again > 1000, "{refused:?}");
    });
    assert_eq!(audit(&lab, "key-evaluates", "evil", "office"), 0);
    assert_eq!(audit(&lab, "evaluations-limited", "a", "office"), 1);
}

#[test]
fn another_key_under_the_same_name_is_found_out_and_a_backup_has_the_right_one() {
    let mut lab = lab("");
    let a = lab.joined("a");
    ["office", "other"].into_iter().for_each(|key| grant(&lab, "a", key));
    zone(a, "office", "office.zone").ok();
    zone(a, "other", "other.zone").ok();
    init(a, "office.zone", "store/a");
    init(a, "office.zone", "store/b");
    content(&lab, "data", 1, 40);
    a.run("cp store/a data vault:/").ok();
    lab.serve(&["backup", &format!("@{}", lab.path("backup").display())]).ok();
    let checked = Command::new(server_program()).arg("check").arg(lab.path("backup")).output().unwrap();
    assert!(Ran::from(checked).ok().out.contains("keys: 2, and each opens"));
    lab.serve(&["keys", "retire", "@office"]).ok();
    lab.serve(&["keys", "delete", "@office"]).ok();
    a.run("cp store/b data vault:/").code(47).says("deleted");
    assert_eq!(a.run("cat store/a data").ok().out.len(), 40 * 4096);
    lab.stop("-TERM");
    fs::remove_dir_all(lab.path("server")).unwrap();
    fs::rename(lab.path("backup"), lab.path("server")).unwrap();
    lab.start();
    let a = lab.host("a");
    a.run("cp store/b data vault:/").ok();
    assert_eq!(have_in_common(&lab, "store/a", "store/b"), 40);
    // A server that answers with a key of its own choice.
    lab.stop("-TERM");
    lab.serve(&["keys", "delete", "@other"]).code(11);
    wrap_another(&lab, "office");
    lab.start();
    content(&lab, "more", 2, 40);
    let a = lab.host("a");
    a.run("cp store/a more vault:/").code(44).says("its log says why");
    a.run("check store/a").ok();
}

/// Spoils what is kept of a key, of a server that does not run.
fn wrap_another(lab: &Lab, name: &str) {
    const KEYS: TableDefinition<'static, &'static str, &'static [u8]> = TableDefinition::new("keys");
    let database = Database::open(lab.path("server/state.redb")).unwrap();
    let write = database.begin_write().unwrap();
    {
        let mut keys = write.open_table(KEYS).unwrap();
        let row = keys.get("other").unwrap().unwrap().value().to_vec();
        keys.insert(name, &row[..]).unwrap();
    }
    write.commit().unwrap();
}
