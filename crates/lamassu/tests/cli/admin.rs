//! Administrators, use-only slots, pins, and slots that expire.

use crate::support::Bench;
use std::path::PathBuf;

/// A vault `v` with a use-only slot 2; the source that opens it.
fn vault(b: &Bench) -> String {
    b.run("init v").ok().says("administrator's key is");
    let job = b.key("job");
    b.run(&format!("key add --use-only -n {job} --label job v")).ok();
    job
}

fn public(b: &Bench, vault: &str) -> String {
    b.run(&format!("key admin show --json {vault}")).ok().json()["administrator"].as_str().unwrap().to_string()
}

#[test]
fn a_use_only_slot_opens_and_changes_nothing() {
    let b = Bench::new();
    let job = vault(&b);
    b.run(&format!("ls -k {job} v")).ok();
    b.file("x", b"content");
    b.run(&format!("cp -k {job} v x vault:")).ok();
    b.run(&format!("history -k {job} v")).ok();
    let slots = b.run("key list --json v").ok().json()["slots"].clone();
    assert_eq!((&slots[0]["role"], &slots[1]["role"]), (&"administrator".into(), &"use".into()));
    let before = std::fs::read(b.path("v/lamassu.vault")).unwrap();
    let log = std::fs::read(b.path("v/lamassu.history")).unwrap();
    let other = b.key("other");
    for line in [
        format!("key add -k {job} -n {other} v"),
        format!("key add -k {job} --recovery v"),
        format!("key change -k {job} -n {other} v"),
        format!("key remove -k {job} v 1"),
        format!("key remove -k {job} v 2"),
    ] {
        let refused = b.run(&line).code(28).says("slot 2 is use-only");
        assert!(refused.out.is_empty());
    }
    b.run("key backup v copy").ok();
    b.run(&format!("key restore -k {job} copy v")).code(28).says("use-only");
    assert_eq!(std::fs::read(b.path("v/lamassu.vault")).unwrap(), before);
    assert_eq!(std::fs::read(b.path("v/lamassu.history")).unwrap(), log);
    // A header that is gone comes back with any key that opens it.
    std::fs::remove_file(b.path("v/lamassu.vault")).unwrap();
    b.run(&format!("key restore -k {job} copy v")).ok();
    assert_eq!(std::fs::read(b.path("v/lamassu.vault")).unwrap(), before);

    // The administrator makes another one, and may then go.
    b.run("key change --slot 1 --use-only -n raw:file:key v").code(28).says("last administrator");
    b.run("key remove v 1").code(28).says("last administrator");
    b.run(&format!("key add -n {other} v")).ok();
    b.run(&format!("key remove -k {other} v 1")).ok();
    b.run(&format!("key change -k {other} --slot 2 -n {job} v")).ok();
    let slots = b.run("key list --json v").ok().json()["slots"].clone();
    assert_eq!((slots[0]["role"].as_str(), slots[1]["role"].as_str()), (Some("administrator"), Some("use")), "kept");
    // A zone's slots are all alike.
    b.run("zone create -k raw:file:key z").ok();
    b.run(&format!("key add --use-only -k raw:file:key -n {job} z")).code(28).says("no administrator");
}

#[test]
fn a_pinned_administrator_has_to_have_signed() {
    let b = Bench::new();
    let job = vault(&b);
    b.run("init w").ok();
    let (ours, theirs) = (public(&b, "v"), public(&b, "w"));
    assert_ne!(ours, theirs);
    b.run(&format!("ls --admin-key {ours} -k {job} v")).ok();
    for line in ["ls", "check", "key admin show", "key admin pin", "key backup -k raw:file:key v header"] {
        let (command, place) = line.split_once(" v ").map_or((line, ""), |(command, rest)| (command, rest));
        let done = b.run(&format!("{command} --admin-key {theirs} v {place}"));
        done.code(50).says("not signed by the administrator");
    }
    // What verifies no signature takes no such option.
    for line in ["key list v", "info v", "scrub v", "umount m", "key generate k", "policy show v", "zone show z"] {
        b.run(&format!("{line} --admin-key {ours}")).code(2).says("--admin-key");
    }
    b.dir("m");
    b.run(&format!("mount --admin-key {theirs} v m")).code(50);
    b.run("ls --admin-key abc v").code(2);
    b.run(&format!("key admin show --admin-key {theirs} v")).code(50);
    assert_eq!(b.run(&format!("key admin show --json --admin-key {ours} v")).ok().json()["pinned"], true);

    // known-vaults: who made a vault has pinned it; others do so by hand.
    let config = |b: &Bench, line: &str| b.run_in("XDG_CONFIG_HOME", &b.path("config"), line);
    let known = b.path("config/lamassu/known-vaults");
    config(&b, "init mine").ok().says("pinned in");
    let text = std::fs::read_to_string(&known).unwrap();
    assert!(text.contains(&public(&b, "mine")) && text.lines().count() == 1, "{text}");
    config(&b, "key admin pin v").ok().says(&ours);
    config(&b, "key admin pin v").ok();
    assert_eq!(std::fs::read_to_string(&known).unwrap().lines().count(), 2);
    config(&b, "ls v").ok();
    std::fs::write(&known, text + &std::fs::read_to_string(&known).unwrap().replace(&ours, &theirs)).unwrap();
    config(&b, "ls v").code(50).says(&ours);
    config(&b, "ls mine").ok();
    config(&b, "ls w").ok();
    config(&b, "key admin pin v").code(50);
    std::fs::write(&known, "no hex\n").unwrap();
    config(&b, "ls v").code(9).says("line 1");
    b.run_in("XDG_CONFIG_HOME", &PathBuf::from("/nonexistent"), "ls v").ok();
}

#[test]
fn an_exchanged_administrator_is_followed() {
    let b = Bench::new();
    let config = |line: &str| b.run_in("XDG_CONFIG_HOME", &b.path("config"), line);
    let known = b.path("config/lamassu/known-vaults");
    config("init v").ok();
    let job = b.key("job");
    let second = b.key("second");
    b.run(&format!("key add --use-only -n {job} v")).ok();
    b.run(&format!("key add -n {second} --label second v")).ok();
    let old = public(&b, "v");
    std::fs::copy(b.path("v/lamassu.vault"), b.path("older")).unwrap();
    b.run(&format!("key admin rotate -k {job} v")).code(28).says("use-only");
    b.dir("m");
    b.run("mount v m").ok();
    b.run("key admin rotate m").code(11);
    b.run("key admin rotate v").code(11);
    b.unmount("m");
    // By somebody who has pinned nothing: others hear of it when they next open the vault.
    b.run("key admin rotate v").ok().says("these administrators' slots are gone, add them again: 3 (\"second\")");
    let new = public(&b, "v");
    assert_ne!(new, old);
    let shown = config("key admin show --json v").ok().json();
    assert_eq!(
        (&shown["follows"], &shown["before"], &shown["pinned"]),
        (&old.clone().into(), &vec![old.clone()].into(), &true.into())
    );
    assert!(std::fs::read_to_string(&known).unwrap().contains(&old), "showing changes nothing");
    config(&format!("ls -k {job} v")).ok().says(&format!("{old} has signed {new}; the pin in"));
    let lines = std::fs::read_to_string(&known).unwrap();
    assert!(
        lines.contains(&new) && !lines.contains(&old) && lines.lines().count() == 1 && lines.ends_with("v\n"),
        "{lines}"
    );
    assert!(!config("ls v").ok().err.contains("signed"), "once");
    let beside = std::fs::read_dir(b.path("config/lamassu")).unwrap().map(|file| file.unwrap().file_name());
    let beside: Vec<_> = beside.filter(|name| name != "known-vaults").collect();
    assert_eq!(beside, ["known-vaults.lock"], "nothing else is left beside it");
    // Given by hand it does not follow by itself.
    b.run(&format!("ls --admin-key {old} v")).ok().says("give that one to --admin-key");
    b.run(&format!("ls --admin-key {new} v")).ok();
    b.run(&format!("ls -k {second} v")).code(12);
    let history = b.run("history --json v").ok().json();
    let entry = history["entries"].as_array().unwrap().iter().rfind(|e| e["event"] == "admin-set").unwrap().clone();
    assert_eq!((&entry["details"]["key"], &entry["details"]["instead_of"]), (&new.clone().into(), &old.clone().into()));
    b.run(&format!("key add -n {second} v")).ok();
    // The old key signs nothing any more that is taken by who has seen the new one.
    std::fs::copy(b.path("older"), b.path("v/lamassu.vault")).unwrap();
    config("ls v").code(50).says(&old);
}

#[test]
fn a_zone_file_pins_administrators() {
    let b = Bench::new();
    let job = vault(&b);
    b.run("init w").ok();
    let zone_key = b.key("zone.key");
    b.run(&format!("zone create -k {zone_key} office.zone")).ok();
    b.run(&format!("ls --admin-zone office.zone -k {job} v")).code(50).says("pins no administrator");
    b.run("key admin pin --zone office.zone --zone-key raw:file:key v").code(12);
    b.run(&format!("key admin pin --zone office.zone --zone-key {zone_key} v")).ok().says(&public(&b, "v"));
    let pins = b.run("zone show --json office.zone").ok().json()["pins"].clone();
    assert_eq!((pins.as_array().unwrap().len(), &pins[0]["administrator"]), (1, &public(&b, "v").into()));
    assert!(b.run(&format!("zone show -k {zone_key} office.zone")).ok().text().contains(&public(&b, "v")));
    b.run(&format!("ls --admin-zone office.zone -k {job} v")).ok();
    b.run("ls --admin-zone office.zone w").code(50);
    b.run("ls --admin-zone nosuch v").code(23);
    b.run(&format!("ls --admin-zone office.zone --admin-key {} v", public(&b, "v"))).code(2);
    // The zone goes on working as a zone.
    b.run(&format!("init --zone office.zone --zone-key {zone_key} x")).ok();
    b.run(&format!("zone rotate --inner -k {zone_key} office.zone")).ok();
    assert_eq!(b.run("zone show --json office.zone").ok().json()["pins"], pins);
    // A new key of the administrator is followed and has to be pinned anew; then an older header is refused.
    std::fs::copy(b.path("v/lamassu.vault"), b.path("older")).unwrap();
    b.run("key admin rotate v").ok();
    b.run("ls --admin-zone office.zone v").ok().says("key admin pin --zone");
    b.run(&format!("key admin pin --zone office.zone --zone-key {zone_key} v")).ok();
    assert!(!b.run("ls --admin-zone office.zone v").ok().err.contains("pin"));
    std::fs::copy(b.path("older"), b.path("v/lamassu.vault")).unwrap();
    b.run("ls --admin-zone office.zone v").code(50).says("not signed by the administrator");
}

#[test]
fn an_edited_header_is_told_from_a_badly_signed_one() {
    let b = Bench::new();
    vault(&b);
    let path = b.path("v/lamassu.vault");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"job\"", "\"boj\"")).unwrap();
    b.run("ls v").code(23).says("altered");
    // Without a key nobody can tell who did it, but the signature is seen to be wrong.
    b.run("key admin show v").code(50).says("does not verify");
}

#[test]
fn slots_that_expire_warn_and_refuse_nothing() {
    let b = Bench::new();
    b.run("init v").ok();
    let (soon, late, gone) = (b.key("soon"), b.key("late"), b.key("gone"));
    b.run(&format!("key add --expires 10 --label soon -n {soon} v")).ok();
    b.run(&format!("key add --expires 2999-12-31 --label late -n {late} v")).ok();
    b.run(&format!("key add --expires 2020-02-29 --label gone -n {gone} v")).ok();
    let warned = |key: &str| b.run(&format!("ls -k {key} v")).ok().err;
    assert!(warned(&soon).contains("slot 2 (\"soon\") expires on"), "{}", warned(&soon));
    assert!(warned(&soon).contains("within 10 days"));
    assert!(warned(&gone).contains("slot 4 (\"gone\") expired on 2020-02-29"));
    assert!(warned(&late).is_empty());
    let listed = b.run("key list v").ok();
    assert!(listed.err.contains("soon") && listed.err.contains("gone") && !listed.err.contains("late"));
    assert!(listed.text().contains("2999-12-31"));
    let slots = b.run("key list --json v").ok().json()["slots"].clone();
    assert_eq!(slots[3]["expires"], 1_582_934_400u64);
    assert!(slots[0]["expires"].is_null());
    b.run(&format!("key change -k {gone} --expires never -n {gone} v")).ok();
    assert!(warned(&gone).is_empty());
    b.run(&format!("key add --expires 2020-02-30 -n {late} v")).code(2).says("2027-01-31");
}
