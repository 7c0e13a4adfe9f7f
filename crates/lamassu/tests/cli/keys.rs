//! init, zone, info, key: headers, slots and sources.

use crate::support::Bench;
use serde_json::Value;

#[test]
fn init_and_info_agree() {
    let b = Bench::new();
    let made =
        b.run("init --json --suite blake3 -b 128K -R 4 --names plain --small-files random --label mine v").ok().json();
    let info = b.run("info --json v").ok().json();
    for (name, value) in info.as_object().unwrap() {
        assert_eq!(&made[name], value, "{name}");
    }
    assert!(made["store"]["type"].is_string() && made["warnings"].is_array());
    for (name, value) in [
        ("format", Value::from("lamassu-vault")),
        ("version", 1.into()),
        ("suite", "blake3".into()),
        ("block_size", 131_072.into()),
        ("reserved_slots", 4.into()),
        ("blocks_per_page", 120.into()),
        ("names", "plain".into()),
        ("small_files", "random".into()),
        ("private_zone", true.into()),
    ] {
        assert_eq!(info[name], value, "{name}");
    }
    assert_eq!(info["slots"][0]["label"], "mine");
    assert_eq!(info["slots"][0]["kind"], "raw");
    assert!(b.run("info v").ok().text().contains("blake3"));
}

#[test]
fn a_vault_is_made_in_an_empty_directory_alone() {
    let b = Bench::new();
    b.dir("empty");
    b.run("init empty").ok();
    b.run("init empty").code(6).says("not empty");
    b.file("x", b"");
    b.dir("full");
    b.file("full/file", b"");
    b.run("init full").code(6);
    assert_eq!(std::fs::read_dir(b.path("full")).unwrap().count(), 1);
    b.run("init x").code(6);
    b.run("init no/such/parent").code(6);
    b.run("info full").code(6).says("not a vault");
    b.run("info nosuch").code(6);
    b.run("ls x").code(6);
}

#[test]
fn a_failed_init_leaves_nothing() {
    let b = Bench::new();
    b.dir("there");
    for dir in ["new", "there"] {
        b.run(&format!("init --key raw:file:nosuch {dir}")).code(9);
        b.run(&format!("init --label {} {dir}", "x".repeat(300))).code(2);
        // It would be made here all the same, and nobody would notice.
        b.run(&format!("init --anchor server://host:7433 {dir}")).code(2).says("anchor move");
    }
    assert!(!b.path("new").exists());
    assert_eq!(std::fs::read_dir(b.path("there")).unwrap().count(), 0);
}

#[test]
fn sources_that_give_no_key() {
    let b = Bench::new();
    b.run("init v").ok();
    b.secret("short", b"too short");
    b.secret("empty", b"\n");
    b.secret("hex", "0123456789abcdef".repeat(4).as_bytes());
    for (source, code) in [
        ("raw:file:nosuch", 9),
        ("raw:file:short", 9),
        ("hex:file:short", 9),
        ("passphrase:env:NOT_SET", 9),
        ("passphrase:prompt", 9),
        ("passphrase:file:empty", 22),
        ("passphrase:file:short", 12),
        ("hex:file:hex", 12),
    ] {
        b.run(&format!("ls --key {source} v")).code(code);
    }
    b.run("init --key passphrase:file:empty w").code(22);
    assert!(!b.path("w").exists());
}

#[test]
fn wrong_key_is_12_everywhere() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    let other = b.key("other");
    let z = b.run(&format!("zone create -k {other} z"));
    z.ok();
    for line in [
        "ls -k OTHER v",
        "cat -k OTHER v x",
        "cp -k OTHER v x vault:y",
        "check -k OTHER v",
        "inspect -k OTHER v x",
        "path -k OTHER v x",
        "mount -k OTHER v m",
        "mount -o key=OTHER v m",
        "key add -k OTHER -n OTHER v",
        "key remove -k OTHER v 1",
        "key change -k OTHER -n OTHER v",
        "cat -k OTHER --header v/lamassu.vault x",
        "zone show -k raw:file:key z",
        "init --zone z --zone-key raw:file:key w",
    ] {
        b.run(&line.replace("OTHER", &other)).code(12).says("wrong key");
    }
    assert!(!b.path("w").exists());
}

#[test]
fn passphrases_go_through_argon2() {
    let b = Bench::new();
    b.secret("pass", "grüße\n".as_bytes());
    b.run("init --key passphrase:file:pass --argon2-ms 1 v").ok();
    let info = b.run("info --json v").ok().json();
    assert!(info["slots"][0]["argon2"]["memory_kib"].as_u64().unwrap() >= 16 << 10);
    b.run("ls --key passphrase:file:pass v").ok();
    // The same from the environment, and as the first line of standard input where that is no terminal.
    let env = b.command(["ls", "--key", "passphrase:env:PASS", "v"]).env("PASS", "grüße").output().unwrap();
    crate::support::Ran::from(env).ok();
    b.run_with("ls --key passphrase:prompt v", "grüße\nmore".as_bytes()).ok();
    b.run_with("ls --key passphrase:prompt v", b"guess\n").code(12);
}

#[test]
fn slots_come_and_go() {
    let b = Bench::new();
    b.run("init v").ok();
    let (second, third) = (b.key("second"), b.key("third"));
    b.secret("hex", "0123456789abcdef".repeat(4).as_bytes());
    b.run(&format!("key add -n {second} -l second v")).ok();
    b.run("key add -n hex:file:hex v").ok();
    b.run(&format!("ls -k {second} v")).ok();
    b.run("ls -k hex:file:hex v").ok();
    let listed = b.run("key list --json v").ok().json();
    let ids: Vec<_> = listed["slots"].as_array().unwrap().iter().map(|s| s["id"].as_u64().unwrap()).collect();
    assert_eq!(ids, [1, 2, 3]);
    assert!(b.run("key list v").ok().text().contains("second"));

    b.run(&format!("key change -k {second} -n {third} v")).ok();
    b.run(&format!("ls -k {second} v")).code(12);
    b.run(&format!("ls -k {third} v")).ok();
    let listed = b.run("key list --json v").ok().json();
    assert_eq!(listed["slots"][2]["label"], "second", "the label stays");
    b.run(&format!("key change --slot 9 -n {third} v")).code(2);

    b.run("key remove v 3").ok().says("older copy of the header");
    b.run("key remove v 1").ok();
    b.run("ls v").code(12);
    b.run(&format!("key remove -k {third} v 77")).code(2);
    b.run(&format!("key remove -k {third} v 4")).code(28).says("last");
    b.run(&format!("ls -k {third} v")).ok();
}

#[test]
fn damaged_headers() {
    let b = Bench::new();
    b.run("init v").ok();
    let path = b.path("v/lamassu.vault");
    let good = std::fs::read_to_string(&path).unwrap();
    for (bad, words) in [
        (good.replace("\"aes\"", "\"paper\""), "altered"),
        (good.replace("\"block_size\": 4096", "\"block_size\": 8192"), "altered"),
        (good.replace("\"version\": 1", "\"version\": 2"), "version 2"),
        (good.replace("\"features\": []", "\"features\": [\"dragons\"]"), "dragons"),
        (good.replace("\"reserved_slots\": 8", "\"reserved_slots\": 63"), "reserved_slots"),
        (good.replace("lamassu-vault", "lamassu-zone"), "lamassu-zone"),
        (good[..good.len() / 2].to_string(), "header"),
        (String::new(), "header"),
        ("\u{1b}[2J".repeat(9), "header"),
    ] {
        assert_ne!(bad, good);
        std::fs::write(&path, &bad).unwrap();
        let ran = b.run("ls v").code(23).says(words);
        assert!(!ran.err.contains('\u{1b}'), "control characters reach the terminal");
        b.run("key change -n raw:file:key v").code(23);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), bad, "a header that cannot be read is not touched");
    }
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    b.run("info v").code(23);
    b.run("cat --header nosuch x").code(23);
}

#[test]
fn zones() {
    let b = Bench::new();
    let zone_key = b.key("zone-key");
    let made = b.run(&format!("zone create -k {zone_key} -s chacha -b 16K --json z")).ok().json();
    b.run(&format!("zone create -k {zone_key} z")).code(24).says("exists");
    let shown = b.run("zone show --json z").ok().json();
    assert_eq!(shown["id"], made["id"]);
    assert_eq!((&shown["suite"], &shown["block_size"]), (&"chacha".into(), &16384.into()));
    assert!(shown.get("keychain").is_none());
    let opened = b.run(&format!("zone show --key {zone_key} --json z")).ok().json();
    assert_eq!(opened["keychain"]["inner_epochs"], serde_json::json!([1]));
    assert_eq!(opened["keychain"]["outer_epochs"], serde_json::json!([1]));
    b.run("zone show nosuch").code(23);
    b.run("zone show key").code(23);

    let init = |options: &str| b.run(&format!("init --zone z --zone-key {zone_key} {options}"));
    init("v").ok();
    let info = b.run("info --json v").ok().json();
    assert_eq!((&info["zone"], &info["private_zone"]), (&made["id"], &false.into()));
    assert_eq!((&info["suite"], &info["block_size"]), (&"chacha".into(), &16384.into()), "the zone's");
    init("--suite aes w").code(28).says("suite");
    assert!(!b.path("w").exists());

    b.run(&format!("zone create -k {zone_key} --inner-only inner")).ok();
    let inner = b.run(&format!("zone show -k {zone_key} --json inner")).ok().json();
    assert_eq!(inner["keychain"]["outer_epochs"], serde_json::json!([]));
    b.run(&format!("init --zone inner --zone-key {zone_key} --outer shared w")).code(28);
    b.run(&format!("init --zone inner --zone-key {zone_key} --outer own w")).ok();

    // A zone file has slots like a vault.
    let other = b.key("other");
    b.run(&format!("key add -k {zone_key} -n {other} z")).ok();
    b.run(&format!("zone show -k {other} z")).ok();
    b.run(&format!("key remove -k {other} z 1")).ok();
    b.run(&format!("zone show -k {zone_key} z")).code(12);
}

#[test]
fn the_header_names_no_secret() {
    let b = Bench::new();
    b.secret("pass", b"correct horse");
    b.run("init --key passphrase:file:pass --argon2-ms 1 v").ok();
    let header = std::fs::read(b.path("v/lamassu.vault")).unwrap();
    assert!(!header.windows(7).any(|w| w == b"correct"));
    let ran = b.run("-vv ls --key passphrase:file:pass v").ok();
    assert!(!ran.err.contains("correct"));
}
