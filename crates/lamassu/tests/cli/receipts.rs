//! Receipts of assured delete: what they know of datasets and of zones.

use crate::destroy::{DESTROY, receipt, vault};
use crate::support::Bench;
use serde_json::Value;

/// A dataset with slots of its own needs no key of the vault: nobody is told that it went with it.
#[test]
fn datasets_that_stay_readable_are_named_and_not_counted() {
    let b = Bench::new();
    let public = vault(&b);
    let own = b.key("own");
    b.file("big", &crate::support::noise(300_000, 1));
    b.run("dataset create v inherits").ok();
    b.run("cp v big vault:/inherits/").ok();
    b.run(&format!("dataset create --new-key {own} v p")).ok();
    b.run(&format!("dataset create --new-key {own} --domain family v q")).ok();
    let stored = |name: &str| b.stored_path("v", name);
    let (p, q) = (stored("p"), stored("q"));
    b.run(&format!("cp -k {own} v/{p} big vault:")).ok();
    // One that inherits from a dataset that stays, stays with it.
    b.run(&format!("dataset create -k {own} v/{p} within")).ok();

    b.run(&format!("{DESTROY} v")).ok().says("a dataset in it opens without it, and has its inner key").says(&p);
    assert_eq!(b.run(&format!("ls -k {own} v/{p}")).ok().text().trim(), "big\nwithin");
    let r = receipt(&b, &public);
    let named = |stored: &str| r["datasets"].as_array().unwrap().iter().find(|d| d["stored"] == stored).cloned();
    assert_eq!(named(&p).unwrap()["zone_shares"], true);
    assert_eq!(named(&q).unwrap()["zone_shares"], false);
    assert_eq!(r["datasets"].as_array().unwrap().len(), 3, "{r}");
    let bytes = r["stored_bytes"].as_u64().unwrap();
    assert!((300_000..600_000).contains(&bytes), "that of inherits, and not of p: {bytes}");
    assert_eq!((&r["epochs"][0]["key"], &r["epochs"][0]["zone_shares"]), (&"inner".into(), &true.into()));
    assert!(r["cannot_know"].to_string().contains("K_in lives on in datasets"), "{r}");
    assert!(b.run(&format!("receipt verify --audit-key {public} r")).ok().text().contains(&p));

    // A clone of the vault took the dataset's header along, and the dataset's history does not know.
    std::fs::remove_file(b.path("r")).unwrap();
    b.run(&format!("{DESTROY} -k {own} v/{q}")).ok();
    let r = receipt(&b, &public);
    assert!(r["cannot_know"].to_string().contains("the vault that this dataset lies in"), "{r}");
    assert_eq!(r["datasets"], Value::Null);
}

/// A dataset that was moved here in the store inherits from the vault it comes from, and from this one nothing.
#[test]
fn a_dataset_of_another_vault_is_not_counted() {
    let b = Bench::new();
    let public = vault(&b);
    b.run("dataset create v own").ok();
    b.run("init w").ok();
    b.run("dataset create w d").ok();
    b.run("dataset create w d/e").ok();
    b.file("big", &crate::support::noise(300_000, 1));
    b.run("cp w big vault:/d/").ok();
    b.run("cp w big vault:/d/e/").ok();
    let place = b.stored("w", "d");
    std::fs::rename(&place, b.path("v/moved")).unwrap();

    b.run(&format!("{DESTROY} v")).ok().says("a dataset in it opens without it").says("moved");
    let r = receipt(&b, &public);
    let listed: Vec<_> = r["datasets"].as_array().unwrap().iter().map(|d| d["stored"].as_str().unwrap()).collect();
    assert!(listed.len() == 2 && listed[0] == "moved" && listed[1].starts_with("moved/"), "{r}");
    let bytes = r["stored_bytes"].as_u64().unwrap();
    assert!(bytes < 100_000, "{bytes}");
    // As the receipt says.
    std::fs::rename(b.path("v/moved"), &place).unwrap();
    assert_eq!(b.run("cat w d/e/big").ok().out.len(), 300_000);
}

/// A zone's key goes on being the zone's in the receipt, however young the vault is, whatever was rotated since, and
/// when the vault has left it.
#[test]
fn a_receipt_knows_which_keys_a_zone_has() {
    let b = Bench::new();
    let zone = b.key("zone");
    b.key("audit");
    let public = b.run("receipt key --audit-key raw:file:audit").ok().text();
    let with = format!("--zone office --zone-key {zone}");
    b.run(&format!("zone create -k {zone} office")).ok();
    // Made in the second of the zone, most likely.
    for vault in ["young", "rotated", "left"] {
        b.run(&format!("init {with} --outer shared {vault}")).ok();
    }
    b.run(&format!("init {with} own")).ok();
    b.run("key rotate --outer young").code(28).says("shares its outer key");
    b.run(&format!("zone rotate --outer -k {zone} office")).ok();
    b.run(&format!("key rotate --outer {with} rotated")).ok();
    b.run("key rotate --outer rotated").code(28).says("shares its outer key");
    b.run("key rotate --outer --leave-zone left").ok();
    b.run("key rotate --inner --leave-zone left").ok();
    b.run("key rotate --outer own").ok();
    let shared = |vault: &str| {
        b.run(&format!("key destroy --yes --receipt {vault}.r --audit-key raw:file:audit {vault}")).ok();
        let r = b.run(&format!("receipt verify --json --audit-key {} {vault}.r", public.trim())).ok().json();
        let of = |e: &Value| {
            (e["key"].as_str().unwrap().to_string(), e["epoch"].as_u64().unwrap(), e["zone_shares"] == true)
        };
        let reads = r["cannot_know"].to_string().contains("go on READING");
        let epochs: Vec<_> = r["epochs"].as_array().unwrap().iter().map(of).collect();
        assert_eq!(reads, epochs.iter().any(|(key, _, shared)| key == "outer" && *shared), "{r}");
        epochs
    };
    let e = |key: &str, epoch, shared| (key.to_string(), epoch, shared);
    assert_eq!(shared("young"), [e("inner", 1, true), e("outer", 1, true)]);
    assert_eq!(shared("rotated"), [e("inner", 1, true), e("outer", 1, true), e("outer", 2, true)]);
    let left = [e("inner", 1, true), e("inner", 2, false), e("outer", 1, true), e("outer", 2, false)];
    assert_eq!(shared("left"), left);
    assert_eq!(shared("own"), [e("inner", 1, true), e("outer", 1, false), e("outer", 2, false)]);
}

/// Only the keys of administrators are called so.
#[test]
fn a_key_that_is_none_names_the_option_and_not_an_administrator() {
    let b = Bench::new();
    let dir = b.path("policy").display().to_string();
    for (option, line) in [
        ("--audit-key", "receipt verify --audit-key 12 r".to_owned()),
        ("--provider", format!("policy init --bucket acme --provider 12 {dir}")),
    ] {
        let told = b.run(&line).code(2).says("a public key is 64 hex digits").says(option);
        assert!(!told.err.contains("administrator"), "{}", told.err);
    }
    b.run("ls --admin-key 12 v").code(2).says("an administrator's key is 64 hex digits");
}
