//! Assured delete of the wrapping keys at KMIP servers and in tokens, with the vault.

use crate::destroy::{DESTROY, killed_at, receipt, straced};
use crate::support::Bench;
use crate::tokens::Hsm;
use serde_json::Value;

#[cfg(feature = "kmip")]
#[test]
fn the_wrapping_key_at_a_kmip_server_goes_too_if_asked() {
    let b = Bench::new();
    let mut kms = crate::pykmip::PyKmip::start(&b.dir("kms"));
    let (key, other) = (kms.uri("?name=vault"), kms.uri("?name=other"));
    let zone = kms.uri("?zone=7");
    for source in [&key, &other, &zone] {
        b.run(&format!("key generate {source}")).ok();
    }
    b.key("audit");
    let public: String = b.run("receipt key --audit-key raw:file:audit").ok().text().trim().into();
    b.run(&format!("init -k {key} --zone {zone} v")).ok();
    b.run(&format!("init -k {key} beside")).ok();

    // Never a zone's keys; never a key that is not this vault's; nothing at all while the server is down.
    b.run(&format!("{DESTROY} -k {key} --with-server={zone} v")).code(28).says("zone");
    b.run(&format!("{DESTROY} -k {key} --with-server={other} v")).code(12);
    kms.stop();
    b.run(&format!("{DESTROY} -k {key} --with-server v")).code(40);
    kms.restart();
    b.run(&format!("ls -k {key} v")).ok();
    assert!(!b.path("r").exists());

    b.run(&format!("{DESTROY} -k {key} --with-server v")).ok().says("revoked").says("destroyed");
    b.run(&format!("ls -k {key} v")).code(52);
    // It cannot be told who else used it: this one did.
    b.run(&format!("ls -k {key} beside")).code(43);
    let r = receipt(&b, &public);
    assert_eq!(r["servers"][0]["destroyed"], true);
    assert!(r["servers"][0]["answers"][1].as_str().unwrap().starts_with("destroyed"), "{r}");
    assert!(!r["servers"][0]["source"].as_str().unwrap().is_empty());
    let inner = &r["epochs"][0];
    assert_eq!((&inner["key"], &inner["zone_shares"]), (&"inner".into(), &true.into()));
    assert!(r["cannot_know"].to_string().contains("Members of zone"), "{r}");
    assert_eq!(r["cannot_know"].to_string().matches("backups and replicas of a key server").count(), 1, "{r}");
    b.run(&format!("init -k {other} --zone {zone} w")).ok();
    // Without being asked the server's key stays.
    b.run(&format!("key destroy --yes -k {other} w")).ok();
    b.run(&format!("init -k {other} w2")).ok();
}

/// Killed around the servers' part: the same command finishes it, and the receipt knows of each key, whoever destroyed
/// it.
#[cfg(feature = "kmip")]
#[test]
fn a_kill_beside_a_server_is_finished_too() {
    let b = Bench::new();
    let kms = crate::pykmip::PyKmip::start(&b.dir("kms"));
    b.key("audit");
    let public: String = b.run("receipt key --audit-key raw:file:audit").ok().text().trim().into();
    let is_there = |source: &str| {
        let made = b.run(&format!("zone create -k {source} z"));
        made.code == 0 && std::fs::remove_file(b.path("z")).is_ok()
    };
    let (mut after_one, mut after_both, mut unknown) = (0, 0, 0);
    // The note of a slot's use, the receipt's draft, the header, the receipt after each key, and when all is done; then
    // what is taken away.
    for (call, n) in (1..=6).map(|n| ("rename", n)).chain((1..=2).map(|n| ("unlink", n))).chain([("fallocate", 1)]) {
        let step = format!("{call} {n}");
        let [one, two] = ["one", "two"].map(|name| kms.uri(&format!("?name={call}-{n}-{name}")));
        for source in [&one, &two] {
            b.run(&format!("key generate {source}")).ok();
        }
        b.run(&format!("init -k {one} v")).ok();
        b.run(&format!("key add -k {one} -n {two} v")).ok();
        let line = format!("{DESTROY} -k {one} --with-server --with-server={two} v");
        assert_ne!(killed_at(&b, &line, call, n).code, 0, "step {step}");
        let there = [&one, &two].map(|source| is_there(source));
        // PyKMIP shows no key that was destroyed: only a receipt that says so tells.
        let told = if b.path("r").exists() { receipt(&b, &public)["servers"].clone() } else { Value::Null };
        let is_known = |i: usize| there[i] || told[i]["destroyed"] == true;
        after_one += usize::from(there == [false, true]);
        after_both += usize::from(there == [false, false]);
        b.run(&line).ok();
        let r = receipt(&b, &public);
        assert_eq!(r["complete"], true, "step {step}");
        let servers = r["servers"].as_array().unwrap();
        assert_eq!(servers.len(), 2, "step {step}: {r}");
        for (i, (asked, source)) in servers.iter().zip([&one, &two]).enumerate() {
            assert_eq!(asked["destroyed"], is_known(i), "step {step}: {r}");
            assert!(is_known(i) || asked["answers"].to_string().contains("nothing tells"), "step {step}: {r}");
            unknown += usize::from(!is_known(i));
            assert!(source.contains(asked["source"].as_str().unwrap().trim_start_matches("kmip:")), "step {step}: {r}");
            assert!(!is_there(source), "step {step}");
        }
        b.run(&format!("ls -k {one} v")).code(52);
        assert!(!b.path("v/lamassu.vault.replacing").exists(), "step {step}");
        std::fs::remove_file(b.path("r")).unwrap();
        std::fs::remove_dir_all(b.path("v")).unwrap();
    }
    assert!(after_one >= 1 && after_both >= 1 && unknown >= 1, "{after_one} {after_both} {unknown}");

    // Finished without the option, the receipt tells what was begun; and without a receipt nothing is claimed that
    // cannot be known.
    for with_receipt in [true, false] {
        let key = kms.uri(&format!("?name=last-{with_receipt}"));
        b.run(&format!("init --generate-key -k {key} v")).ok();
        let (line, call, n) = match with_receipt {
            true => (DESTROY, "rename", 4),
            false => ("key destroy --yes", "fallocate", 1),
        };
        let line = format!("{line} -k {key} --with-server v");
        assert_ne!(killed_at(&b, &line, call, n).code, 0);
        assert!(!is_there(&key));
        b.run(&format!("ls -k {key} v")).code(52);
        if with_receipt {
            b.run(&format!("{DESTROY} v")).code(1).says("not the key of");
            assert_eq!(receipt(&b, &public)["servers"][0]["destroyed"], false);
        } else {
            b.run(&line).ok().says("no such key").says("cut off");
        }
        std::fs::remove_dir_all(b.path("v")).unwrap();
    }
}

/// The run that was cut off may not have made the new header's name durable: a key that a server destroys is gone for
/// good.
#[cfg(feature = "kmip")]
#[test]
fn the_second_run_asks_no_server_before_the_new_header_is_durable() {
    let b = Bench::new();
    let kms = crate::pykmip::PyKmip::start(&b.dir("kms"));
    let key = kms.uri("?name=vault");
    b.run(&format!("init --generate-key -k {key} v")).ok();
    let line = format!("key destroy --yes -k {key} --with-server v");
    let is_begun = |n| {
        killed_at(&b, &line, "fsync", n);
        b.run(&format!("ls -k {key} v")).code == 52
    };
    assert!((1..40).any(is_begun));
    let log = b.path("calls").display().to_string();
    straced(&b, &line, &["-o", &log, "-y", "-e", "trace=fsync,connect"]).ok();
    let calls = std::fs::read_to_string(log).unwrap();
    let first = |is: &dyn Fn(&str) -> bool| calls.lines().position(is).unwrap();
    let is_synced = |call: &str| call.contains("fsync(") && call.contains("/v>");
    assert!(first(&is_synced) < first(&|call| call.contains("AF_INET")), "{calls}");
}

/// The run that finishes is another client's, to which the server does not show the key.
#[cfg(feature = "kmip")]
#[test]
fn a_key_that_is_not_shown_is_not_called_destroyed() {
    let b = Bench::new();
    let kms = crate::pykmip::PyKmip::start(&b.dir("kms"));
    b.key("audit");
    let public: String = b.run("receipt key --audit-key raw:file:audit").ok().text().trim().into();
    let key = kms.uri("?name=vault");
    b.run(&format!("init --generate-key -k {key} v")).ok();
    b.run(&format!("init -k {key} beside")).ok();
    let line = format!("{DESTROY} -k {key} --with-server v");
    // Between the header and the server.
    let is_begun = |n| {
        killed_at(&b, &line, "fsync", n);
        b.run(&format!("ls -k {key} v")).code == 52
    };
    assert!((1..40).any(is_begun));
    b.run(&format!("ls -k {key} beside")).ok();
    let own = std::fs::read(b.path("kms/client.pem")).unwrap();
    std::fs::copy(b.path("kms/other.pem"), b.path("kms/client.pem")).unwrap();
    b.run(&line).ok().says("nothing tells that it was destroyed");
    let r = receipt(&b, &public);
    assert_eq!((&r["complete"], &r["servers"][0]["destroyed"]), (&true.into(), &false.into()), "{r}");
    std::fs::write(b.path("kms/client.pem"), own).unwrap();
    b.run(&format!("ls -k {key} beside")).ok();
}

#[test]
fn the_wrapping_key_in_a_token_goes_too_if_asked() {
    let h = Hsm::new();
    h.token("office");
    h.rsa("office", "wrap", "01");
    h.key("office", "sym", "02", &["--keygen", "--key-type", "aes:32"]);
    let (rsa, aes) = (h.uri("token=office;object=wrap"), h.uri("token=office;object=sym"));
    h.b.key("audit");
    let public: String = h.run("receipt key --audit-key raw:file:audit").ok().text().trim().into();
    h.run(&format!("init -k {rsa} v")).ok();
    h.run(&format!("key add -k {rsa} -n {aes} v")).ok();
    h.run(&format!("{DESTROY} -k {rsa} --with-server --with-server={aes} v")).ok();
    h.run(&format!("ls -k {rsa} v")).code(52);
    for gone in [&rsa, &aes] {
        h.run(&format!("init -k {gone} w")).code(43);
    }
    let r = receipt(&h.b, &public);
    let answers = |i: usize| r["servers"][i]["answers"].to_string();
    assert!(answers(0).contains("private key") && answers(0).contains("public half"), "{r}");
    assert!(answers(1).contains("secret key") && answers(1).contains("left in the token: 0"), "{r}");
}

/// A name may be that of several keys, of which one private key alone can be meant: only its own public half goes with
/// it.
#[test]
fn another_pairs_public_key_stays_in_the_token() {
    let h = Hsm::new();
    h.token("office");
    // Two pairs, the first of which is left without its private half. SoftHSM lists objects in no order of its own.
    for id in ["01", "02", "03", "04"] {
        h.rsa("office", "wrap", id);
    }
    let publics = || h.objects("office", "pubkey");
    for id in ["01", "02", "03"] {
        h.delete("office", "privkey", id);
    }
    let source = h.uri("token=office");
    h.run(&format!("init -k {source} v")).ok();
    assert_eq!(publics(), ["01", "02", "03", "04"]);
    h.run(&format!("key destroy --yes -k {source} --with-server v")).ok().says("destroyed its public half");
    assert_eq!(publics(), ["01", "02", "03"]);
}
