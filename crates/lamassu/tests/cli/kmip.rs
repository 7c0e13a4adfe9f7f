//! Keys at a KMIP server: PyKMIP, started by the tests (`scripts/setup` installs it).

use crate::pykmip::PyKmip;
use crate::support::Bench;

fn kms(b: &Bench) -> PyKmip {
    PyKmip::start(&b.dir("kms"))
}

#[test]
fn a_vault_is_opened_by_a_key_of_the_server() {
    let b = Bench::new();
    let mut kms = kms(&b);
    let key = kms.uri("?name=vault");
    b.run(&format!("init -k {key} v")).code(43).says("no such key");
    assert!(!b.path("v").exists());
    b.run(&format!("init --generate-key -k {key} v")).ok().says("made a key");
    b.run(&format!("init --generate-key -k {key} w")).code(28).says("already");
    b.run("init --generate-key w").code(2).says("kmip:");
    b.file("x", b"content");
    b.run(&format!("cp -k {key} v x vault:")).ok();

    // A second key, by its identifier; slots come and go.
    let made = b.run(&format!("key generate {}", kms.uri(""))).ok();
    let id = made.err.split("identifier ").nth(1).unwrap().split(' ').next().unwrap();
    let second = kms.uri(id);
    b.run(&format!("ls -k {second} v")).code(12);
    b.run(&format!("key add -k {key} -n {second} -l second v")).ok();
    b.run(&format!("key add -k {key} -n raw:file:key v")).ok();
    assert_eq!(b.run(&format!("cat -k {second} v x")).ok().out, b"content");
    b.run(&format!("key generate --kind hex {}", kms.uri("?name=other"))).code(2);

    // A server that goes away disturbs nothing that is mounted; what needs it says that it is down.
    b.dir("m");
    b.run(&format!("mount -k {key} v m")).ok();
    kms.stop();
    assert_eq!(std::fs::read(b.path("m/x")).unwrap(), b"content");
    std::fs::write(b.path("m/y"), "written without a server").unwrap();
    b.unmount("m");
    b.run(&format!("mount -k {key} v m")).code(40).says("cannot be reached").says("another slot");
    b.run("ls v").ok();
    kms.restart();
    b.run(&format!("mount -k {key} v m")).ok();
    assert_eq!(std::fs::read_to_string(b.path("m/y")).unwrap(), "written without a server");
    b.unmount("m");
}

#[test]
fn each_fault_of_a_kmip_server_is_its_own() {
    let b = Bench::new();
    let mut kms = kms(&b);
    let key = kms.uri("?name=vault");
    b.run(&format!("key generate {key}")).ok();
    b.run(&format!("init -k {key} v")).ok();
    let ls = |uri: &str| b.run(&format!("ls -k {uri} v"));
    ls(&kms.uri("1")).ok();
    ls(&kms.uri("77")).code(43);
    ls(&kms.uri("?name=nothing")).code(43);
    ls(&kms.uri_as("1", "other.pem")).code(42).says("does not permit us");
    ls(&key.replace("client.pem", "nosuch.pem")).code(9).says("nosuch.pem");
    ls(&key.replace("/ca.pem", "/client.pem")).code(41);
    ls(key.split("&cert=").next().unwrap()).code(42).says("client certificate");
    ls(&key.replace("?name", "?color")).code(2).says("kmip://HOST");
    ls(&key.replace("//", "//joe:hunter2@")).code(2);
    let made = kms.admin("create early 256 + create short 128 + activate _");
    ls(&kms.uri(&made[0])).code(42).says("not active");
    ls(&kms.uri(&made[1])).code(44).says("16 bytes");

    // Neither at its most talkative does it show what it got.
    let loud = b.run(&format!("-vv ls -k {key} v")).ok();
    assert!(!loud.err.contains("TTLV") && !loud.err.contains("KeyMaterial"), "{}", loud.err);

    kms.admin("revoke 1");
    ls(&key).code(47).says("revoked").says("another slot");
    kms.admin("destroy 1");
    ls(&key).code(43);
    kms.stop();
    ls(&key).code(40);
}

/// As in the paper: the server keeps K_in and K_out, and hosts that get them deduplicate with one another without a
/// file between them.
#[test]
fn a_zone_whose_keys_the_server_keeps() {
    let b = Bench::new();
    let kms = kms(&b);
    let zone = kms.uri("?zone=7");
    b.run(&format!("init -k {zone} --zone {zone} v")).code(43);
    b.run(&format!("init --generate-key -k {zone} --zone {zone} --outer shared v")).ok();
    b.run(&format!("key generate {zone}")).code(28);
    b.run(&format!("init -k {zone} --zone {zone} --outer shared w")).ok();
    b.run(&format!("init --zone {zone} own")).ok();
    let other = kms.uri("?zone=eight");
    b.run(&format!("key generate {other}")).ok();
    b.run(&format!("init --zone {other} other")).ok();

    let id = |vault: &str| b.run(&format!("info --json {vault}")).ok().json()["zone"].clone();
    assert!(id("v") == id("w") && id("v") == id("own") && id("v") != id("other"));
    assert_eq!(b.run("info --json v").ok().json()["private_zone"], false);
    b.file("x", &crate::support::noise(50_000, 7));
    b.file("small", b"one page");
    for (vault, key) in [("v", zone.as_str()), ("w", &zone), ("own", "raw:file:key"), ("other", "raw:file:key")] {
        b.run(&format!("cp -k {key} {vault} x small vault:")).ok();
    }
    let stored = |vault: &str, key: &str, name: &str| {
        let path = b.run(&format!("path -k {key} {vault} {name}")).ok().text();
        std::fs::read(b.path(vault).join(path.trim_end())).unwrap()
    };
    let v = stored("v", &zone, "x");
    assert_eq!(v[4096..], stored("w", &zone, "x")[4096..]);
    assert_eq!(v[4096..], stored("own", "raw:file:key", "x")[4096..]);
    assert_ne!(v[4096..], stored("other", "raw:file:key", "x")[4096..]);
    let small = stored("v", &zone, "small");
    assert_eq!(small, stored("w", &zone, "small"));
    assert_ne!(small, stored("own", "raw:file:key", "small"));

    // For a host that does not reach the server.
    b.run(&format!("zone create -k raw:file:key --from {zone} office.zone")).ok();
    assert_eq!(b.run("zone show --json office.zone").ok().json()["id"], id("v"));
    b.run("init --zone office.zone --zone-key raw:file:key --outer shared offline").ok();
    assert_eq!(id("offline"), id("v"));
    b.run("cp offline small vault:").ok();
    assert_eq!(small, stored("offline", "raw:file:key", "small"));
    b.run(&format!("zone create -k raw:file:key --from {} z", kms.uri("?name=x"))).code(2).says("zone=ZONE");
    b.run(&format!("init --zone {} z", kms.uri("1"))).code(2).says("zone=ZONE");

    // Taken away there, the vault opens no more; what has a slot of its own does.
    kms.admin("revoke 1");
    b.run(&format!("ls -k {zone} v")).code(47).says("revoked");
    b.run("ls own").ok();
}
