//! `run --check-config`: what it finds, and what it leaves alone.

use crate::common::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

fn check(lab: &Lab) -> Ran {
    lab.serve(&["run", "--check-config"])
}

/// Changes a file of the server's directory, or removes it, for as long as `then` takes.
fn with(lab: &Lab, name: &str, content: Option<&[u8]>, then: impl FnOnce()) {
    let path = lab.path("server").join(name);
    let before = fs::read(&path).ok();
    let put = |content: Option<&[u8]>| match content {
        Some(content) => fs::write(&path, content).unwrap(),
        None => fs::remove_file(&path).unwrap(),
    };
    if before.is_some() || content.is_some() {
        put(content);
    }
    then();
    put(before.as_deref());
}

/// With further lines in `server.toml`.
fn with_config(lab: &Lab, lines: &str, then: impl FnOnce()) {
    let config = fs::read_to_string(lab.path("server/server.toml")).unwrap();
    with(lab, "server.toml", Some(format!("{config}{lines}\n").as_bytes()), then);
}

/// What a check finds with such a file. It names the file.
fn finds(lab: &Lab, name: &str, content: Option<&[u8]>, code: i32, says: &str) {
    with(lab, name, content, || drop(check(lab).code(code).says(says).says(name)));
}

/// All files of a directory: their lengths, and when they changed.
fn files(dir: &Path) -> BTreeMap<PathBuf, (u64, SystemTime)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let (path, st) = entry.map(|entry| (entry.path(), entry.metadata().unwrap())).unwrap();
        if st.is_dir() {
            found.extend(files(&path));
        }
        found.insert(path, (st.len(), st.modified().unwrap()));
    }
    found
}

#[test]
fn what_a_start_cannot_read_is_found_beside_a_server_that_runs() {
    let mut lab = Lab::new();
    assert!(check(&lab).ok().out.contains("is good"));
    let another = Lab::new();
    let of_another = |name: &str| fs::read(another.path("server").join(name)).unwrap();
    finds(&lab, "authority.der", None, 26, "it is gone");
    finds(&lab, "authority.der", Some(b"no certificate"), 26, "no certificate");
    finds(&lab, "authority.der", Some(&of_another("authority.der")), 26, "not that of its key");
    finds(&lab, "authority.key", Some(b"no key"), 26, "no key of an authority");
    finds(&lab, "policy.toml", None, 13, "");
    finds(&lab, "policy.toml", Some(b"[[rule]]"), 13, "line 1");
    finds(&lab, "server.toml", None, 13, "all defaults");
    with(&lab, "authority.key", None, || drop(check(&lab).code(6).says("init")));
    // It has been there, and came back as it was: nothing of that has disturbed the server.
    lab.serve(&["status"]).ok();
    assert_eq!(lab.serve(&["status"]).ok().out.lines().next(), Some("running"));
    lab.stop("-TERM");
    let before = files(&lab.path("server"));
    check(&lab).ok();
    assert_eq!(files(&lab.path("server")), before);
    finds(&lab, "state.redb", Some(b""), 26, "it is gone, or empty");
    finds(&lab, "state.redb", None, 26, "it is gone, or empty");
    // Not an address of this machine: TEST-NET-1.
    let config = fs::read_to_string(lab.path("server/server.toml")).unwrap();
    let elsewhere = config.replacen("127.0.0.1", "192.0.2.1", 1);
    with(&lab, "server.toml", Some(elsewhere.as_bytes()), || {
        check(&lab).code(14).says("cannot listen on 192.0.2.1");
        lab.serve(&["run"]).code(14).says("cannot listen on 192.0.2.1");
    });
    fs::remove_dir_all(lab.path("server/anchors")).unwrap();
    check(&lab).ok();
    fs::write(lab.path("server/anchors"), "no directory").unwrap();
    check(&lab).code(5).says("anchors");
    fs::remove_file(lab.path("server/anchors")).unwrap();
    lab.start();
    check(&lab).ok();
}

#[test]
fn the_webhooks_files_and_the_master_key_are_read() {
    let lab = Lab::new();
    let (ca, key) = (lab.path("ca.pem"), lab.path("key"));
    with_config(&lab, "webhook = \"https://alerts.example.org/\"", || {
        finds(&lab, "webhook.secret", Some(b"no secret"), 13, "whsec_");
        // A start makes one.
        with(&lab, "webhook.secret", None, || drop(check(&lab).ok()));
    });
    let webhook = format!("webhook = \"https://alerts.example.org/\"\nwebhook_ca = {ca:?}");
    with_config(&lab, &webhook, || {
        check(&lab).code(13).says("ca.pem");
        fs::write(&ca, "nothing in PEM").unwrap();
        check(&lab).code(13).says("ca.pem");
    });
    with_config(&lab, &format!("master_key = \"raw:file:{}\"", key.display()), || {
        assert!(!check(&lab).ok().out.contains("not read"));
        fs::write(&key, "short").unwrap();
        check(&lab).code(9).says("master key");
        fs::remove_file(&key).unwrap();
        check(&lab).code(9).says(key.to_str().unwrap());
    });
    with_config(&lab, "master_key = \"server://keeper.example/a\"", || drop(check(&lab).code(9).says("server:")));
    // Whoever gives it is not asked.
    with_config(&lab, "master_key = \"passphrase:prompt\"", || {
        assert!(check(&lab).ok().out.contains("not read: the master key, which a start gets from passphrase:prompt"));
    });
}

#[cfg(feature = "etcd")]
#[test]
fn the_files_that_lead_to_etcd_are_read_and_no_member_is_asked() {
    use data_encoding::BASE64;
    use rcgen::{CertificateParams, KeyPair};
    let pem = |label: &str, der: &[u8]| {
        format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", BASE64.encode(der)).into_bytes()
    };
    let identity = || {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        (pem("CERTIFICATE", certificate.der()), pem("PRIVATE KEY", &key.serialize_der()))
    };
    let ((certificate, key), (_, another_key)) = (identity(), identity());
    let mut lab = Lab::new();
    let put = |name: &str, content: &[u8]| fs::write(lab.path("server").join(name), content).unwrap();
    put("ca.pem", &certificate);
    put("etcd.pem", &certificate);
    put("etcd.key", &key);
    put("password", b"a word\n");
    // Nobody listens there.
    let table = "[etcd]\nendpoints = [\"https://127.0.0.1:9\"]\nca = \"ca.pem\"\nleader_seconds = 2\n";
    let own = format!("{table}certificate = \"etcd.pem\"\nkey = \"etcd.key\"");
    with_config(&lab, &own, || drop(check(&lab).code(6).says("to-etcd")));
    lab.stop("-TERM");
    fs::rename(lab.path("server/state.redb"), lab.path("server/state.redb.moved")).unwrap();
    check(&lab).code(26).says("moved into etcd");
    with_config(&lab, &own, || {
        check(&lab).ok();
        for name in ["ca.pem", "etcd.pem", "etcd.key"] {
            finds(&lab, name, None, 13, "change server.toml");
            finds(&lab, name, Some(b"no PEM"), 13, "in PEM");
        }
        finds(&lab, "ca.pem", Some(&pem("CERTIFICATE", b"nonsense")), 13, "none of its certificates");
        finds(&lab, "etcd.key", Some(&pem("PRIVATE KEY", b"nonsense")), 13, "not the key of");
        finds(&lab, "etcd.key", Some(&another_key), 13, "not the key of");
        // A start says the same, and does not stand by for members that cannot answer.
        with(&lab, "etcd.key", Some(&another_key), || drop(lab.serve(&["run"]).code(13).says("not the key of")));
    });
    with_config(&lab, &format!("{table}user = \"lamassu\"\npassword_file = \"password\""), || {
        check(&lab).ok();
        finds(&lab, "password", None, 13, "change server.toml");
        finds(&lab, "password", Some(b"\n"), 13, "it is empty");
    });
}
