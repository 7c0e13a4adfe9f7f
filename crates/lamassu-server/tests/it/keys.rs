//! Keys that a server makes and keeps for hosts: `server://HOST/ID`.

use crate::common::raw::channel;
use crate::common::*;
use lamassu_rpc::proto;
use lamassu_rpc::proto::keys_client::KeysClient;
use redb::{Database, ReadableTable, TableDefinition};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use tokio::runtime::Runtime;
use tonic::Code;

/// Bytes of a key as it is wrapped, in hexadecimal digits.
const WRAPPED: usize = 2 * (24 + 16 + 32);

/// A server that keeps keys under the master key in the file `master`.
fn lab() -> Lab {
    let mut lab = Lab::new();
    for (name, byte) in [("master", 11), ("other-master", 12), ("audit", 13)] {
        fs::write(lab.path(name), [byte; 32]).unwrap();
        fs::set_permissions(lab.path(name), PermissionsExt::from_mode(0o600)).unwrap();
    }
    lab.stop("-TERM");
    set_master(&lab, Some("master"));
    lab.start();
    lab
}

fn set_master(lab: &Lab, file: Option<&str>) {
    let path = lab.path("server/server.toml");
    let config = fs::read_to_string(&path).unwrap();
    let mut lines: Vec<String> =
        config.lines().filter(|line| !line.starts_with("master_key")).map(String::from).collect();
    lines.extend(file.map(|file| format!("master_key = \"{}\"", raw(lab, file))));
    fs::write(path, lines.join("\n")).unwrap();
}

fn raw(lab: &Lab, file: &str) -> String {
    format!("raw:file:{}", lab.path(file).display())
}

/// The source of a key.
fn key(lab: &Lab, name: &str) -> String {
    format!("{}/{name}", lab.url())
}

/// A host is granted a key, and makes it.
fn make(host: Host<'_>, name: &str) {
    host.lab.serve(&["keys", "grant", &format!("@{}", host.name), &format!("@{name}")]).ok();
    host.run(&format!("key generate {}", key(host.lab, name))).ok().says("made a key");
}

fn audit(lab: &Lab) -> Vec<Value> {
    let out = lab.serve(&["audit", "--json"]).ok().says("verified").out;
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// How often the log has an event of a host and a key.
fn noted(lab: &Lab, event: &str, host: &str, key: &str) -> usize {
    let is_it = |entry: &&Value| entry["event"] == event && entry["host"] == host && entry["key"] == key;
    audit(lab).iter().filter(is_it).count()
}

/// Every text that is, or was, wrapped, as far as the database's file has it.
fn wrapped(lab: &Lab) -> BTreeSet<Vec<u8>> {
    const BEFORE: &[u8] = b"\"wrapped\":\"";
    let bytes = fs::read(lab.path("server/state.redb")).unwrap();
    let found = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(BEFORE));
    let texts = found.filter_map(|at| bytes.get(at + BEFORE.len()..at + BEFORE.len() + WRAPPED));
    texts.map(<[u8]>::to_vec).collect()
}

fn has(lab: &Lab, text: &[u8]) -> bool {
    let bytes = fs::read(lab.path("server/state.redb")).unwrap();
    bytes.windows(text.len()).any(|window| window == text)
}

#[test]
fn a_key_is_made_at_the_server_and_opens_a_vault_for_who_was_granted_it() {
    let mut lab = lab();
    let (a, _) = (lab.joined("a"), lab.joined("b"));
    let (k, k2) = (key(&lab, "k"), key(&lab, "k2"));
    a.run(&format!("key generate {k}")).code(43).says("was not granted it");
    lab.serve(&["keys", "grant", "@a", "@k"]).ok().says("host a may make it");
    lab.serve(&["keys", "grant", "@nobody", "@k"]).code(3);
    lab.serve(&["keys", "grant", "@a", "@../k"]).code(2);
    a.run(&format!("init -k {k} --generate-key store/v")).ok().says("made a key");
    a.run(&format!("key generate {k}")).code(28);
    a.run(&format!("mount -k {k} store/v m-a")).ok();
    a.write("f", "one").unwrap();
    a.umount().ok();
    lab.stop("-TERM");
    // Where the server is away nothing is had of it, and the key is not somewhere else.
    let a = lab.host("a");
    a.run(&format!("cat -k {k} store/v f")).code(40);
    lab.start();
    let (a, b) = (lab.host("a"), lab.host("b"));
    assert_eq!(a.run(&format!("cat -k {k} store/v f")).ok().out, "one");
    // As with any other source.
    make(a, "k2");
    a.run(&format!("key add -k {k} --new-key {k2} store/v")).ok();
    a.run(&format!("key rotate -k {k2} --outer store/v")).ok();
    a.run(&format!("key remove -k {k2} store/v 1")).ok();
    a.run(&format!("cat -k {k} store/v f")).code(12);
    assert_eq!(a.run(&format!("cat -k {k2} store/v f")).ok().out, "one");
    // Another host, before and behind its grant.
    b.run(&format!("init -k {k2} store/w")).code(43);
    lab.serve(&["keys", "grant", "@b", "@k2"]).ok();
    b.run(&format!("init -k {k2} store/w")).ok();
    let listed = lab.serve(&["keys", "list"]).ok().out;
    assert!(listed.contains("k2  active ") && listed.contains("for a  a, b"), "{listed}");
    lab.serve(&["keys", "grant", "--not", "@b", "@k2"]).ok();
    b.run(&format!("ls -k {k2} store/w")).code(43);
    lab.serve(&["keys", "grant", "@b", "@k2"]).ok();
    b.run(&format!("ls -k {k2} store/w")).ok();
    lab.serve(&["host", "revoke", "@b"]).ok();
    b.run(&format!("ls -k {k2} store/w")).code(42).says("revoked");
    // Who has not joined, and a server that is none.
    lab.host("c").run(&format!("ls -k {k2} store/w")).code(42).says("host join");
    a.run("ls -k server://127.0.0.1/../x store/v").code(2).says("server://HOST");
    assert_eq!(noted(&lab, "key-given", "b", "k2"), 2);
    assert_eq!(noted(&lab, "key-made", "a", "k2"), 1);
    assert_eq!(noted(&lab, "key-given", "c", "k2"), 0);
    assert!(lab.metric("keys_asked_for_total{given=\"yes\"}") >= 5.0);
    assert!(lab.metric("keys_asked_for_total{given=\"no\"}") >= 2.0);
    assert_eq!(lab.metric("keys"), 2.0);
    lab.serve(&["check"]).ok();
}

/// Whoever was given a key is in the log, also if the server's machine stops right behind that.
#[test]
fn a_key_that_was_given_is_in_the_log() {
    let mut lab = lab();
    let a = lab.joined("a");
    make(a, "k");
    let k = key(&lab, "k");
    a.run(&format!("init -k {k} store/v")).ok();
    a.run(&format!("ls -k {k} store/v")).ok();
    lab.stop("-KILL");
    assert_eq!(noted(&lab, "key-given", "a", "k"), 2);
    lab.start();
}

#[test]
fn a_key_that_was_deleted_opens_nothing_and_its_receipt_verifies() {
    let mut lab = lab();
    let a = lab.joined("a");
    make(a, "k");
    let (k, other) = (key(&lab, "k"), key(&lab, "other"));
    // All that there is of the first, in the file and in whatever pages it had before.
    let of_k = wrapped(&lab);
    assert_eq!(of_k.len(), 1);
    make(a, "other");
    a.run(&format!("init -k {k} store/v")).ok();
    a.run(&format!("init -k {other} store/w")).ok();
    lab.serve(&["backup", &format!("@{}", lab.path("backup").display())]).ok();
    let public = a.run("receipt key --audit-key raw:file:audit").ok().out.trim().to_owned();
    let receipt = lab.path("receipt");
    let audit_key = raw(&lab, "audit");
    let delete = |lab: &Lab, to: &str, name: &str| -> Ran {
        let mut command = Command::new(server_program());
        command.args(["keys", "delete", "--audit-key", &audit_key, "--receipt"]).arg(lab.path(to));
        command.arg(lab.path("server")).arg(name).output().unwrap().into()
    };
    // It is given to hosts: nothing is done, and no receipt is left.
    delete(&lab, "receipt", "k").code(11).says("retire");
    assert!(!receipt.exists());
    delete(&lab, "receipt", "nothing").code(3);
    lab.serve(&["keys", "retire", "@k"]).ok();
    a.run(&format!("ls -k {k} store/v")).code(47).says("retired");
    lab.serve(&["keys", "retire", "--not", "@k"]).ok();
    a.run(&format!("ls -k {k} store/v")).ok();
    lab.serve(&["keys", "retire", "@k"]).ok();
    assert!(of_k.iter().all(|text| has(&lab, text)));
    delete(&lab, "receipt", "k").ok();
    a.run(&format!("ls -k {k} store/v")).code(47).says("deleted");
    a.run(&format!("key generate {k}")).code(47);
    a.run(&format!("ls -k {other} store/w")).ok();
    lab.serve(&["keys", "retire", "@k"]).code(47);
    let verified = a.run(&format!("receipt verify --audit-key {public} receipt")).ok().out;
    for words in ["key k of the server", "a, last", "Backups on record", "What cannot be known"] {
        assert!(verified.contains(words), "{verified}");
    }
    let told: Value =
        serde_json::from_str(&a.run(&format!("receipt verify --json --audit-key {public} receipt")).ok().out).unwrap();
    assert!(told["gone"]["backups"][0].is_u64(), "{told}");
    let text = fs::read_to_string(&receipt).unwrap();
    fs::write(lab.path("forged"), text.replace("\"key\": \"k\"", "\"key\": \"q\"")).unwrap();
    a.run(&format!("receipt verify --audit-key {public} forged")).code(26).says("signature");
    // Told again, with what was told before.
    delete(&lab, "again", "k").ok();
    let again: Value = serde_json::from_str(&fs::read_to_string(lab.path("again")).unwrap()).unwrap();
    assert_eq!(again["gone"], told["gone"]);
    delete(&lab, "again", "k").code(5);
    lab.serve(&["check"]).ok();
    lab.stop("-TERM");
    lab.start();
    lab.host("a").run(&format!("ls -k {k} store/v")).code(47);
    // What was backed up before has it.
    lab.stop("-TERM");
    fs::remove_dir_all(lab.path("server")).unwrap();
    fs::rename(lab.path("backup"), lab.path("server")).unwrap();
    lab.start();
    lab.host("a").run(&format!("ls -k {k} store/v")).ok();
    // Its log does not have what was since, and the receipt says so.
    lab.serve(&["keys", "retire", "@k"]).ok();
    delete(&lab, "restored", "k").ok();
    let verify =
        |form: &str| lab.host("a").run(&format!("receipt verify {form}--audit-key {public} restored")).ok().out;
    assert!(verify("").contains("Restored from a backup") && !verified.contains("Restored"), "{}", verify(""));
    let restored: Value = serde_json::from_str(&verify("--json ")).unwrap();
    let made = audit(&lab).into_iter().find(|entry| entry["event"] == "made-from-backup").unwrap();
    assert_eq!(restored["gone"]["restored"], serde_json::json!([made["time"]]));
    for gone in [&told["gone"], &restored["gone"]] {
        assert_eq!(gone["log_begins"], audit(&lab)[0]["time"]);
    }
}

#[test]
fn another_master_key_and_a_wrong_one() {
    let mut lab = lab();
    let a = lab.joined("a");
    let (k, from) = (key(&lab, "k"), raw(&lab, "master"));
    make(a, "k");
    make(a, "gone");
    a.run(&format!("init -k {k} store/v")).ok();
    lab.serve(&["keys", "retire", "@gone"]).ok();
    lab.serve(&["keys", "delete", "@gone"]).ok();
    lab.serve(&["keys", "rewrap", "--from", &from]).code(11);
    lab.stop("-TERM");
    lab.serve(&["check"]).ok();
    set_master(&lab, Some("other-master"));
    lab.serve(&["run"]).code(12).says("master key");
    lab.serve(&["check"]).code(26).says("keys: the master key");
    set_master(&lab, Some("no-such-file"));
    lab.serve(&["run"]).code(9).says("no-such-file");
    set_master(&lab, None);
    lab.serve(&["run"]).code(9).says("master_key");
    set_master(&lab, Some("other-master"));
    lab.serve(&["keys", "rewrap", "--from", &raw(&lab, "audit")]).code(12);
    let done = lab.serve(&["keys", "rewrap", "--from", &from]).ok();
    assert_eq!(done.out, "1 keys are wrapped again\n");
    lab.serve(&["keys", "rewrap", "--from", &from]).code(12);
    lab.serve(&["check"]).ok();
    lab.start();
    let a = lab.host("a");
    a.run(&format!("ls -k {k} store/v")).ok();
    a.run(&format!("ls -k {} store/v", key(&lab, "gone"))).code(47);
    // A key in the file that was exchanged for another's.
    make(a, "k2");
    lab.stop("-TERM");
    exchange(&lab, "k", "k2");
    lab.serve(&["check"]).code(26).says("key k ");
    lab.start();
    lab.host("a").run(&format!("ls -k {k} store/v")).code(44).says("its log says why");
    assert!(lab.log().contains("key k does not open"), "{}", lab.log());
}

/// Puts what is kept of one key in the place of another's, of a server that does not run.
fn exchange(lab: &Lab, to: &str, from: &str) {
    const KEYS: TableDefinition<'static, &'static str, &'static [u8]> = TableDefinition::new("keys");
    let database = Database::open(lab.path("server/state.redb")).unwrap();
    let write = database.begin_write().unwrap();
    {
        let mut keys = write.open_table(KEYS).unwrap();
        let row = keys.get(from).unwrap().unwrap().value().to_vec();
        keys.insert(to, &row[..]).unwrap();
    }
    write.commit().unwrap();
}

#[test]
fn a_backup_has_the_keys_and_their_grants() {
    let mut lab = lab();
    let a = lab.joined("a");
    make(a, "k");
    let k = key(&lab, "k");
    a.run(&format!("init -k {k} store/v")).ok();
    lab.serve(&["backup", &format!("@{}", lab.path("backup").display())]).ok();
    let checked = Command::new(server_program()).arg("check").arg(lab.path("backup")).output().unwrap();
    assert!(Ran::from(checked).ok().out.contains("keys: 1, and each opens"));
    lab.stop("-KILL");
    fs::remove_dir_all(lab.path("server")).unwrap();
    fs::rename(lab.path("backup"), lab.path("server")).unwrap();
    lab.start();
    let a = lab.host("a");
    a.run(&format!("ls -k {k} store/v")).ok();
    // And keys are made in it, and deleted.
    make(a, "k2");
    lab.serve(&["keys", "retire", "@k"]).ok();
    lab.serve(&["keys", "delete", "@k"]).ok();
    a.run(&format!("ls -k {k} store/v")).code(47);
    lab.serve(&["check"]).ok();
}

#[test]
fn a_server_without_a_master_key_keeps_none_and_another_server_is_not_asked() {
    let mut lab = Lab::new();
    let a = lab.joined("a");
    lab.serve(&["keys", "grant", "@a", "@k"]).ok();
    let k = key(&lab, "k");
    a.run(&format!("key generate {k}")).code(44).says("master_key");
    lab.serve(&["check"]).ok();
    lab.serve(&["keys", "retire", "@k"]).code(3);
    lab.serve(&["keys", "delete", "@k"]).code(3);
    lab.stop("-TERM");
    lab.serve(&["keys", "rewrap", "--from", "raw:file:key"]).code(3);
    // Servers do not keep master keys for one another.
    let path = lab.path("server/server.toml");
    let config = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("{config}master_key = \"{k}\"\n")).unwrap();
    lab.serve(&["run"]).code(9).says("cannot get keys from a Lamassu server");
    fs::write(&path, format!("{config}master_key = \"hunter2\"\n")).unwrap();
    assert!(!lab.serve(&["run"]).code(13).err.contains("hunter2"));
    // Another server with the same address.
    let mut other = Lab::new();
    other.stop("-TERM");
    fs::write(other.path("server/server.toml"), config).unwrap();
    other.port = lab.port;
    other.start();
    lab.host("a").run(&format!("key generate {k}")).code(41).says("not the server that this host has joined");
}

/// A host that asks for keys of others is told what it is told of those that there are not, and is not in the log.
#[test]
fn what_is_not_granted_is_as_what_is_not_there() {
    let lab = lab();
    let (a, _) = (lab.joined("a"), lab.joined("evil"));
    make(a, "k");
    make(a, "gone");
    make(a, "old");
    lab.serve(&["keys", "retire", "@old"]).ok();
    lab.serve(&["keys", "retire", "@gone"]).ok();
    lab.serve(&["keys", "delete", "@gone"]).ok();
    Runtime::new().unwrap().block_on(async {
        let mut keys = KeysClient::new(channel(&lab, "evil"));
        let mut told = BTreeSet::new();
        for name in ["k", "gone", "old", "nothing", "K"] {
            let name = proto::KeyName { name: name.into() };
            for status in [keys.give_key(name.clone()).await.unwrap_err(), keys.make_key(name).await.unwrap_err()] {
                told.insert((status.code() as i32, status.message().to_owned()));
            }
        }
        assert!(told.len() == 1 && told.first().unwrap().0 == Code::NotFound as i32, "{told:?}");
        for name in ["", ".", "a/b", "a\0", "ä", &"x".repeat(64), "k ", "../state.redb"] {
            let status = keys.give_key(proto::KeyName { name: name.into() }).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{name:?}");
        }
        let long = proto::KeyName { name: "x".repeat(1 << 20) };
        assert!(keys.give_key(long).await.is_err());
        // What is said shows no key, whoever writes it to a log.
        let mut of_a = KeysClient::new(channel(&lab, "a"));
        let given = of_a.give_key(proto::KeyName { name: "k".into() }).await.unwrap().into_inner();
        assert_eq!((given.key.len(), format!("{given:?}").as_str()), (32, "Key"));
        // Nor has the disk, or the log, a key that is not wrapped.
        let hex = data_encoding::HEXLOWER.encode(&given.key);
        assert!(!has(&lab, &given.key) && !has(&lab, hex.as_bytes()) && !lab.log().contains(&hex));
    });
    let of_evil = audit(&lab).into_iter().filter(|entry| entry["host"] == "evil" && !entry["key"].is_null());
    assert_eq!(of_evil.filter(|entry| entry["event"] != "joined").count(), 0);
    a.run(&format!("init -k {} store/v", key(&lab, "k"))).ok();
}
