//! The parser of vault headers and zone files: what it accepts and refuses, and that the canonical form covers all of
//! it.
#![allow(clippy::unwrap_used)] // helpers outside of #[test] functions; a panic is a failed test

use lamassu_format::header::{
    Admin, AdminPin, Argon2Params, Caching, Destroyed, Header, HeaderError, HistoryMark, KeyArea, NameMode,
    Predecessor, Role, SealedKeychain, Slot, SlotKind, TokenMechanism, TokenSealed, VaultHeader, VaultParams, Verified,
    ZoneFile, ZoneParams,
};
use lamassu_format::{Domain, Geometry, Suite};
use proptest::prelude::*;
use serde_json::{Value, json};

fn slot() -> Value {
    json!({
        "id": 3, "kind": "passphrase", "label": "Zoë's \"laptop\" \\ /", "created": 1700000001u64,
        "salt": "11".repeat(32), "argon2": {"memory_kib": 65536, "passes": 3, "lanes": 4},
        "nonce": "22".repeat(24), "wrapped": "33".repeat(48),
    })
}

fn raw_slot() -> Value {
    json!({
        "id": 5, "kind": "raw", "label": "", "created": 0,
        "salt": "44".repeat(32), "nonce": "55".repeat(24), "wrapped": "66".repeat(48),
    })
}

fn vault() -> Value {
    json!({
        "format": "lamassu-vault", "version": 1, "features": [], "id": "77".repeat(16), "zone": "88".repeat(16),
        "suite": "aes", "block_size": 4096, "reserved_slots": 8, "names": "encrypted", "name_max": 255,
        "small_files": "convergent", "created": 1700000000u64, "next_slot": 6, "slots": [slot(), raw_slot()],
        "keychain": {"nonce": "99".repeat(24), "sealed": "aa".repeat(40)}, "mac": "bb".repeat(32),
    })
}

fn zone() -> Value {
    let mut zone = vault();
    let members = zone.as_object_mut().unwrap();
    for name in ["zone", "reserved_slots", "names", "name_max", "small_files"] {
        members.remove(name);
    }
    members["format"] = json!("lamassu-zone");
    zone
}

fn parse(value: &Value) -> Result<VaultHeader, HeaderError> {
    VaultHeader::parse(value.to_string().as_bytes())
}

/// The sample with one member changed, by its JSON pointer.
fn with(pointer: &str, to: Value) -> Result<VaultHeader, HeaderError> {
    let mut value = vault();
    *value.pointer_mut(pointer).unwrap() = to;
    parse(&value)
}

#[test]
fn a_good_header_parses() {
    let h = parse(&vault()).unwrap();
    assert_eq!((h.suite(), h.names(), h.name_max()), (Suite::Aes, NameMode::Encrypted, 255));
    assert_eq!(h.geometry(), Geometry::new(4096, 8).unwrap());
    assert_eq!((h.id(), h.zone(), h.created()), ([0x77; 16], [0x88; 16], 1_700_000_000));
    assert!(h.convergent_small_files());
    let keys = h.keys();
    assert_eq!((keys.next_slot, keys.mac), (6, [0xbb; 32]));
    assert_eq!(keys.keychain, SealedKeychain { nonce: [0x99; 24], sealed: vec![0xaa; 40] });
    assert_eq!(keys.slots.len(), 2);
    let slot = keys.slot(3).unwrap();
    assert_eq!((slot.kind, slot.label.as_str()), (SlotKind::Passphrase, "Zoë's \"laptop\" \\ /"));
    assert_eq!(slot.argon2, Argon2Params::new(65536, 3, 4));
    assert_eq!(keys.slot(5).unwrap().argon2, None);
    assert_eq!(keys.slot(4), None);

    let z = ZoneFile::parse(zone().to_string().as_bytes()).unwrap();
    assert_eq!((z.suite(), z.block_size(), z.id()), (Suite::Aes, 4096, [0x77; 16]));
    assert_eq!(z.keys(), keys);
}

#[test]
fn a_snapshot_says_so_and_others_say_nothing() {
    let mut value = vault();
    assert!(!parse(&value).unwrap().is_snapshot());
    let before = parse(&value).unwrap().mac_input();
    value["read_only"] = json!(true);
    let snapshot = parse(&value).unwrap();
    assert!(snapshot.is_snapshot() && snapshot.mac_input() != before);
    assert_eq!(parse(&vault()).unwrap().into_snapshot(), snapshot);
    for bad in [json!(false), json!(null), json!(1), json!("true")] {
        value["read_only"] = bad;
        assert!(parse(&value).is_err(), "{value}");
    }
    let mut of_zone = zone();
    of_zone["read_only"] = json!(true);
    assert!(ZoneFile::parse(of_zone.to_string().as_bytes()).is_err());
}

#[test]
fn a_zone_file_may_pin_administrators() {
    let mut value = zone();
    let read = |value: &Value| ZoneFile::parse(value.to_string().as_bytes());
    assert!(read(&value).unwrap().pins().is_empty());
    let before = read(&value).unwrap().mac_input();
    let pin = |vault: &str, admin: &str| json!({"vault": vault.repeat(16), "admin": admin.repeat(32)});
    value["pins"] = json!([pin("0a", "0b"), pin("0c", "0d")]);
    let mut z = read(&value).unwrap();
    assert_eq!(z.pins()[1], AdminPin { vault: [12; 16], admin: [13; 32] });
    assert_ne!(z.mac_input(), before, "they are under the MAC");
    z.set_pin(AdminPin { vault: [10; 16], admin: [14; 32] });
    assert_eq!(
        ZoneFile::parse(&z.to_json().unwrap()).unwrap().pins()[1],
        AdminPin { vault: [10; 16], admin: [14; 32] }
    );
    assert_eq!(z.pins().len(), 2);
    for bad in [json!(null), json!([]), json!([pin("0a", "0b"), pin("0a", "0d")]), json!([{"vault": "0a".repeat(16)}])]
    {
        value["pins"] = bad;
        assert!(read(&value).is_err(), "{value}");
    }
    let mut of_vault = vault();
    of_vault["pins"] = json!([pin("0a", "0b")]);
    assert!(parse(&of_vault).is_err());
}

#[test]
fn a_domain_narrower_than_the_zone_is_named_and_fits_the_rest() {
    assert_eq!(parse(&vault()).unwrap().domain(), Domain::Zone);
    let before = parse(&vault()).unwrap().mac_input();
    let header = |domain: &str, suite: &str, small_files: &str| {
        let mut value = vault();
        value["domain"] = json!(domain);
        value["suite"] = json!(suite);
        value["small_files"] = json!(small_files);
        parse(&value)
    };
    for domain in Domain::ALL {
        for suite in Suite::ALL {
            for small_files in ["convergent", "random"] {
                let fits = match domain {
                    Domain::Zone => false, // is left out
                    Domain::Family => true,
                    Domain::File | Domain::None => suite != Suite::Paper && small_files == "random",
                };
                let what = (domain, suite, small_files);
                match header(domain.name(), suite.name(), small_files) {
                    Ok(h) => assert!(fits && h.domain() == domain && h.mac_input() != before, "{what:?}"),
                    Err(HeaderError::Member { member, .. }) => assert!(!fits && member == "domain", "{what:?}"),
                    Err(other) => panic!("{what:?}: {other}"),
                }
            }
        }
    }
    for bad in [json!(null), json!("Family"), json!(""), json!(1), json!(["file"])] {
        let mut value = vault();
        value["domain"] = bad;
        assert!(parse(&value).is_err(), "{value}");
    }
    let mut of_zone = zone();
    of_zone["domain"] = json!("family");
    assert!(ZoneFile::parse(of_zone.to_string().as_bytes()).is_err());
}

#[test]
fn only_a_destroyed_vault_has_no_slots() {
    let mut value = vault();
    value["slots"] = json!([]);
    assert!(parse(&value).is_err());
    value["destroyed"] = json!({"time": 1800000000u64, "receipt": "ab".repeat(16)});
    let gone = parse(&value).unwrap();
    assert_eq!(gone.destroyed(), Some(Destroyed { time: 1_800_000_000, receipt: [0xab; 16] }));
    assert_eq!(parse(&vault()).unwrap().into_destroyed(gone.destroyed().unwrap()), gone);
    assert_eq!(VaultHeader::parse(&gone.to_json().unwrap()).unwrap(), gone);
    for bad in [
        json!(null),
        json!(true),
        json!({}),
        json!([1, "ab"]),
        json!({"time": 1, "receipt": "ab"}),
        json!({"time": 1, "receipt": "ab".repeat(16), "more": 1}),
    ] {
        let mut other = value.clone();
        other["destroyed"] = bad;
        assert!(parse(&other).is_err(), "{other}");
    }
    value["slots"] = vault()["slots"].clone();
    assert!(parse(&value).is_err(), "what opens was not destroyed");
    let mut of_zone = zone();
    of_zone["slots"] = json!([]);
    of_zone["destroyed"] = json!({"time": 1, "receipt": "ab".repeat(16)});
    assert!(ZoneFile::parse(of_zone.to_string().as_bytes()).is_err());
}

/// The sample with an administrator: slot 3 has the signing seed, slot 5 is for use alone.
fn with_admin() -> Value {
    let mut value = vault();
    value["admin"] = json!({"public": "cc".repeat(32), "signature": "dd".repeat(64)});
    value["history"] = json!({"count": 7, "head": "ee".repeat(32)});
    value["slots"][0]["wrapped"] = json!("33".repeat(80));
    value["slots"][0]["expires"] = json!(1800000000u64);
    value["slots"][1]["role"] = json!("use");
    value
}

#[test]
fn an_administrator_and_a_history_are_optional() {
    let h = parse(&with_admin()).unwrap();
    let keys = h.keys();
    assert_eq!(keys.admin, Some(Admin { public: [0xcc; 32], signature: [0xdd; 64], before: vec![] }));
    assert_eq!(keys.history, Some(HistoryMark { count: 7, head: [0xee; 32] }));
    assert_eq!((keys.slots[0].role, keys.slots[1].role), (Role::Administrator, Role::Use));
    assert_eq!((keys.slots[0].expires, keys.slots[1].expires), (Some(1_800_000_000), None));
    // The signature covers all but itself and the MAC; the MAC covers the signature too.
    let (signed, macd) = (h.signature_input(), h.mac_input());
    let text = String::from_utf8(signed.clone()).unwrap();
    assert!(text.contains(&format!(r#""admin":{{"public":"{}"}}"#, "cc".repeat(32))) && !text.contains("dddd"));
    let mut other = h.clone();
    other.keys_mut().admin.as_mut().unwrap().signature = [1; 64];
    assert!(other.signature_input() == signed && other.mac_input() != macd);
    other.keys_mut().history.as_mut().unwrap().count = 8;
    assert_ne!(other.signature_input(), signed);

    // Earlier keys, the oldest first.
    let mut value = with_admin();
    let link = json!({"public": "11".repeat(32), "signature": "22".repeat(64)});
    value["admin"]["before"] = json!([link]);
    let h = parse(&value).unwrap();
    let before = Predecessor { public: [0x11; 32], signature: [0x22; 64] };
    assert_eq!(h.keys().admin.as_ref().unwrap().before, [before]);
    assert!(h.signature_input() != signed && String::from_utf8(h.signature_input()).unwrap().contains("\"before\""));
    for bad in [json!(null), json!([]), json!([{"public": "11".repeat(32)}]), json!(vec![link; 65])] {
        value["admin"]["before"] = bad;
        assert!(parse(&value).is_err());
    }

    for (pointer, bad) in [
        ("/admin", json!(null)),
        ("/admin/public", json!("cc".repeat(31))),
        ("/admin/signature", json!("dd".repeat(63))),
        ("/history/count", json!(0)),
        ("/history/head", json!("")),
        ("/slots/0/wrapped", json!("33".repeat(48))),
        ("/slots/0/expires", json!(-1)),
        ("/slots/1/wrapped", json!("33".repeat(80))),
        ("/slots/1/role", json!("admin")),
        ("/slots/1/role", json!(null)),
    ] {
        let mut value = with_admin();
        *value.pointer_mut(pointer).unwrap() = bad.clone();
        assert!(parse(&value).is_err(), "{pointer} {bad}");
    }
    let mut value = with_admin();
    value.as_object_mut().unwrap().remove("admin");
    assert!(parse(&value).is_err(), "a role and no administrator");
    for member in ["admin", "history"] {
        let mut value = zone();
        value[member] = with_admin()[member].clone();
        assert!(ZoneFile::parse(value.to_string().as_bytes()).is_err(), "a zone has no {member}");
    }
}

/// Printed by Python: `json.dumps(sample without mac, sort_keys=True, separators=(",", ":"), ensure_ascii=False)`. Runs
/// of one byte are shortened here.
#[test]
fn canonical_form_is_what_python_prints() {
    let run = |digits: &str, n: usize| digits.repeat(n);
    let expected = format!(
        concat!(
            r#"{{"block_size":4096,"created":1700000000,"features":[],"format":"lamassu-vault","id":"{id}","#,
            r#""keychain":{{"nonce":"{kn}","sealed":"{ks}"}},"name_max":255,"names":"encrypted","next_slot":6,"#,
            r#""reserved_slots":8,"slots":[{{"argon2":{{"lanes":4,"memory_kib":65536,"passes":3}},"created":1700000001,"#,
            r#""id":3,"kind":"passphrase","label":"Zoë's \"laptop\" \\ /","nonce":"{n1}","salt":"{s1}","wrapped":"{w1}"}},"#,
            r#"{{"created":0,"id":5,"kind":"raw","label":"","nonce":"{n2}","salt":"{s2}","wrapped":"{w2}"}}],"#,
            r#""small_files":"convergent","suite":"aes","version":1,"zone":"{zone}"}}"#
        ),
        id = run("77", 16),
        kn = run("99", 24),
        ks = run("aa", 40),
        n1 = run("22", 24),
        s1 = run("11", 32),
        w1 = run("33", 48),
        n2 = run("55", 24),
        s2 = run("44", 32),
        w2 = run("66", 48),
        zone = run("88", 16),
    );
    assert_eq!(String::from_utf8(parse(&vault()).unwrap().mac_input()).unwrap(), expected);
}

#[test]
fn values_out_of_bounds_are_refused() {
    let h = |n: usize| json!("ab".repeat(n));
    let cases: &[(&str, &[Value])] = &[
        ("/id", &[h(15), h(17), json!("AB".repeat(16)), json!("zz".repeat(16)), json!("a".repeat(31)), json!(5)]),
        ("/zone", &[h(15), json!("")]),
        ("/suite", &[json!("AES"), json!(""), json!({"aes": null}), json!(1), json!("aes\u{0}")]),
        (
            "/block_size",
            &[
                json!(0),
                json!(2048),
                json!(4097),
                json!(2097152),
                json!(4294971392u64),
                json!(4096.0),
                json!("4096"),
                json!(-4096),
            ],
        ),
        ("/reserved_slots", &[json!(0), json!(63), json!(65544), json!(u64::MAX)]),
        ("/names", &[json!("Encrypted"), json!(""), json!(null)]),
        ("/name_max", &[json!(63), json!(256), json!(319), json!(u64::MAX)]),
        ("/small_files", &[json!("yes"), json!(true)]),
        ("/created", &[json!(-1), json!(1.5), json!("0"), json!(null)]),
        ("/next_slot", &[json!(0), json!(5), json!(4294967296u64), json!(null)]),
        ("/slots", &[json!([]), json!({}), json!(null), Value::Array((0..65).map(|_| slot()).collect())]),
        ("/slots/0", &[json!([]), json!(null), json!(5), json!({})]),
        ("/slots/0/id", &[json!(0), json!(-1), json!(6), json!(4294967299u64)]),
        ("/slots/0/kind", &[json!("raw"), json!("hex"), json!("other"), json!({"passphrase": null})]),
        ("/slots/0/label", &[json!("x".repeat(256)), json!("a\nb"), json!("\u{7f}"), json!("\u{85}"), json!(null)]),
        ("/slots/0/salt", &[h(31), h(33)]),
        ("/slots/0/argon2", &[json!(null), json!([65536, 3, 4]), json!({})]),
        ("/slots/0/nonce", &[h(23), h(12)]),
        ("/slots/0/wrapped", &[h(47), h(49), json!("")]),
        ("/keychain", &[json!(null), json!(["99".repeat(24), "aa".repeat(40)])]),
        ("/keychain/nonce", &[h(12)]),
        ("/keychain/sealed", &[json!(""), h(15), json!("a".repeat(33)), json!("AA".repeat(40))]),
        ("/mac", &[h(31), json!(null), json!("BB".repeat(32))]),
    ];
    for (pointer, values) in cases {
        for value in *values {
            assert!(with(pointer, value.clone()).is_err(), "{pointer} = {value}");
        }
    }
    assert!(with("/slots/0/label", json!("x".repeat(255))).is_ok());
    assert!(with("/next_slot", json!(4294967295u64)).is_ok());
    assert!(with("/created", json!(u64::MAX)).is_ok());
    assert!(matches!(with("/slots/1/id", json!(3)), Err(HeaderError::DuplicateSlot { id: 3 })));
}

#[test]
fn hostile_argon2_costs_are_refused() {
    let cost = |m: u64, t: u64, p: u64| with("/slots/0/argon2", json!({"memory_kib": m, "passes": t, "lanes": p}));
    for (m, t, p) in [
        (31, 3, 4),
        ((4 << 20) + 1, 3, 4),
        (u64::from(u32::MAX), 3, 4),
        ((1 << 32) + 65536, 3, 4),
        (u64::MAX, u64::MAX, u64::MAX),
        (65536, 0, 4),
        (65536, 65, 4),
        (65536, 3, 0),
        (65536, 3, 17),
        (65536, 3, (1 << 32) + 4),
    ] {
        let refused = matches!(cost(m, t, p), Err(HeaderError::Member { member: "argon2", .. }));
        assert!(refused, "m = {m}, t = {t}, p = {p}");
    }
    assert!(cost(32, 1, 4).is_ok() && cost(4 << 20, 16, 16).is_ok());
}

#[test]
fn the_cost_of_argon2_has_bounds() {
    let allowed = |memory_kib, passes, lanes| Argon2Params::new(memory_kib, passes, lanes).is_some();
    assert!(allowed(64, 1, 4) && allowed(32, 1, 4) && allowed(4 << 20, 64, 16) && allowed(8, 1, 1));
    for (memory_kib, passes, lanes) in [
        (31, 1, 4),
        ((4 << 20) + 1, 1, 4),
        (64, 0, 4),
        (64, 65, 4),
        (64, 1, 0),
        (1024, 1, 17),
        (64, 1, u32::MAX),
        (u32::MAX, 1, u32::MAX),
    ] {
        assert!(!allowed(memory_kib, passes, lanes), "{memory_kib} {passes} {lanes}");
    }
}

#[test]
fn every_value_has_one_word() {
    assert!(SlotKind::ALL.into_iter().all(|kind| SlotKind::from_name(kind.name()) == Some(kind)));
    assert!(TokenMechanism::ALL.into_iter().all(|one| TokenMechanism::from_name(one.name()) == Some(one)));
    assert!(Domain::ALL.into_iter().all(|domain| Domain::from_name(domain.name()) == Some(domain)));
    assert_eq!((SlotKind::ALL.len(), TokenMechanism::ALL.len(), Domain::ALL.len()), (7, 3, 4));
    assert_eq!((Domain::from_name("Zone"), Domain::from_name("")), (None, None));
}

/// Each slot is within its bounds, but all together would keep a machine busy for hours before any member is authentic.
#[test]
fn slots_that_ask_for_too_much_together_are_refused() {
    let slots = |n: u32, memory_kib: u64, passes: u64| {
        let mut value = vault();
        let slot = value["slots"][0].clone();
        let many = (1..=n).map(|id| {
            let mut slot = slot.clone();
            slot["id"] = json!(id);
            slot["argon2"] = json!({"memory_kib": memory_kib, "passes": passes, "lanes": 1});
            slot
        });
        value["slots"] = many.collect();
        value["next_slot"] = json!(n + 1);
        parse(&value)
    };
    assert!(matches!(slots(64, 4 << 20, 64), Err(HeaderError::Argon2Work { asked: 16384 })));
    assert!(matches!(slots(1, 4 << 20, 64), Err(HeaderError::Argon2Work { asked: 256 })));
    assert!(matches!(slots(64, 1 << 20, 2), Err(HeaderError::Argon2Work { asked: 128 })));
    assert!(matches!(slots(64, (1 << 20) + 1, 1), Err(HeaderError::Argon2Work { asked: 65 })));
    for (n, memory_kib, passes) in [(64, 1 << 20, 1), (1, 1 << 20, 64), (21, 1 << 20, 3), (4, 1 << 20, 16)] {
        assert!(slots(n, memory_kib, passes).is_ok(), "{n} {memory_kib} {passes}");
    }
}

/// Every object in the sample, by JSON pointer.
const OBJECTS: [&str; 5] = ["", "/slots/0", "/slots/1", "/slots/0/argon2", "/keychain"];

#[test]
fn missing_unknown_and_duplicate_members_are_refused() {
    for pointer in OBJECTS {
        let names: Vec<String> = vault().pointer(pointer).unwrap().as_object().unwrap().keys().cloned().collect();
        for name in names {
            let mut missing = vault();
            missing.pointer_mut(pointer).unwrap().as_object_mut().unwrap().remove(&name);
            assert!(parse(&missing).is_err(), "{pointer} without {name}");

            // The same member twice, with the same value. `Value` cannot hold that, so a marker is replaced in the
            // text.
            let mut twice = vault();
            let object = twice.pointer_mut(pointer).unwrap().as_object_mut().unwrap();
            let again = format!("{}:{}", json!(name), object[&name]);
            object.insert("MARK".into(), json!("MARK"));
            let text = twice.to_string().replace("\"MARK\":\"MARK\"", &again);
            assert!(VaultHeader::parse(text.as_bytes()).is_err(), "{pointer} with {name} twice");
        }
        let mut unknown = vault();
        unknown.pointer_mut(pointer).unwrap().as_object_mut().unwrap().insert("new".into(), json!(1));
        assert!(matches!(parse(&unknown), Err(HeaderError::Json(_))), "{pointer} with an unknown member");
    }
    let mut slot_with_cost = vault();
    slot_with_cost["slots"][1]["argon2"] = slot_with_cost["slots"][0]["argon2"].clone();
    assert!(parse(&slot_with_cost).is_err(), "a raw slot has no argon2");
    let token = |token: Value| {
        let mut v = vault();
        v["slots"][1]["kind"] = json!("pkcs11");
        v["slots"][1]["token"] = token;
        parse(&v)
    };
    assert!(token(json!({"mechanism": "aes-gcm", "sealed": "00".repeat(2048)})).is_ok());
    for bad in [
        json!(null),
        json!(["aes-gcm", "00"]),
        json!({"mechanism": "aes-gcm"}),
        json!({"mechanism": "aes-gcm", "sealed": ""}),
        json!({"mechanism": "aes-gcm", "sealed": "0G"}),
        json!({"mechanism": "aes-gcm", "sealed": "00".repeat(2049)}),
        json!({"mechanism": "rsa-pkcs1", "sealed": "00"}),
        json!({"mechanism": "aes-gcm", "sealed": "00", "more": 1}),
    ] {
        assert!(token(bad.clone()).is_err(), "{bad}");
    }
    let mut without = vault();
    without["slots"][1]["kind"] = json!("pkcs11");
    assert!(parse(&without).is_err(), "a pkcs11 slot has a token");
}

#[test]
fn later_versions_are_named_before_their_members_are_looked_at() {
    let mut later = vault();
    later["version"] = json!(2);
    later["slots"] = json!("moved elsewhere");
    later["something"] = json!({"new": []});
    let e = parse(&later).unwrap_err();
    assert!(matches!(e, HeaderError::Version { found: 2 }) && e.is_unsupported());

    let mut feature = vault();
    feature["features"] = json!(["merkle\u{1b}[31m"]);
    feature["merkle"] = json!(1);
    let e = parse(&feature).unwrap_err();
    assert!(matches!(&e, HeaderError::Feature { name } if name.starts_with("merkle")) && e.is_unsupported());
    assert!(!e.to_string().contains('\u{1b}'), "{e}");

    assert!(matches!(parse(&zone()), Err(HeaderError::WrongFormat { expected: "lamassu-vault", .. })));
    assert!(ZoneFile::parse(vault().to_string().as_bytes()).is_err());
}

#[test]
fn truncated_and_padded_texts_are_refused() {
    let text = vault().to_string();
    for len in 0..text.len() {
        assert!(VaultHeader::parse(&text.as_bytes()[..len]).is_err(), "cut to {len}");
    }
    for tail in ["x", "{}", "\0", ","] {
        assert!(VaultHeader::parse(format!("{text}{tail}").as_bytes()).is_err());
    }
    assert!(VaultHeader::parse(format!(" \r\n\t{text} \n").as_bytes()).is_ok(), "white space is no content");
    let huge = format!("{text}{}", " ".repeat(1 << 20));
    assert!(matches!(VaultHeader::parse(huge.as_bytes()), Err(HeaderError::TooLarge { .. })));
    for odd in ["", "[]", "null", "5", "\"lamassu-vault\"", "{}", "\u{feff}{}", "[[[[[[[[", "{\"version\":1e999}"] {
        assert!(VaultHeader::parse(odd.as_bytes()).is_err(), "{odd:?}");
    }
    let deep = "[".repeat(100_000);
    assert!(VaultHeader::parse(deep.as_bytes()).is_err());
    let array: Vec<Value> = vault().as_object().unwrap().values().cloned().collect();
    assert!(parse(&Value::Array(array)).is_err(), "a struct's members are no array");
}

#[test]
fn errors_show_no_control_characters_of_the_file() {
    let mut value = vault();
    value.as_object_mut().unwrap().insert("\u{1b}]0;owned\u{7}\u{202e}".into(), json!(1));
    let text = parse(&value).unwrap_err().to_string();
    assert!(text.chars().all(|c| c.is_ascii_graphic() || c == ' '), "{text:?}");
}

#[test]
fn nothing_out_of_bounds_is_written() {
    let mut h = parse(&vault()).unwrap();
    h.keys_mut().slots[0].label = "a\nb".into();
    assert!(h.to_json().is_err());
    let mut h = parse(&vault()).unwrap();
    h.keys_mut().slots.clear();
    assert!(h.to_json().is_err());
    let mut h = parse(&vault()).unwrap();
    h.keys_mut().keychain.sealed = vec![0; 1 << 20];
    assert!(matches!(h.to_json(), Err(HeaderError::TooLarge { .. })));
}

#[test]
fn datasets_and_their_properties_are_optional_members() {
    let plain = parse(&vault()).unwrap();
    assert!(!plain.has_datasets());
    assert_eq!((plain.integrity(), plain.cache()), (None, None));
    let mut value = vault();
    value["datasets"] = json!(true);
    value["integrity"] = json!("metadata");
    value["cache"] = json!("none");
    let read = parse(&value).unwrap();
    assert!(read.has_datasets() && read.mac_input() != plain.mac_input());
    assert_eq!((read.integrity(), read.cache()), (Some(Verified::Metadata), Some(Caching::None)));
    let mut made = plain.clone();
    made.allow_datasets();
    made.set_integrity(Some(Verified::Metadata));
    made.set_cache(Some(Caching::None));
    assert_eq!(made, read);
    assert_eq!(VaultHeader::parse(&made.to_json().unwrap()).unwrap(), read);
    for (member, bad) in
        [("datasets", json!(false)), ("datasets", json!(1)), ("integrity", json!("some")), ("cache", json!(null))]
    {
        let mut value = vault();
        value[member] = bad;
        assert!(parse(&value).is_err(), "{value}");
    }
}

#[test]
fn a_header_has_one_parent_slot_at_most() {
    let of_parent = |id: u32| {
        let mut slot = raw_slot();
        slot["id"] = json!(id);
        slot["kind"] = json!("parent");
        slot["parent"] = json!("77".repeat(88));
        slot
    };
    let mut value = vault();
    value["slots"] = json!([slot(), of_parent(5)]);
    let header = parse(&value).unwrap();
    assert_eq!(header.keys().slot(5).map(|s| (s.kind, s.parent)), Some((SlotKind::Parent, Some([0x77; 88]))));
    assert_eq!(VaultHeader::parse(&header.to_json().unwrap()).unwrap(), header);
    value["slots"] = json!([of_parent(4), of_parent(5)]);
    assert!(parse(&value).is_err());
    for (member, bad) in [("kind", json!("raw")), ("parent", json!("77".repeat(87))), ("parent", json!(null))] {
        let mut slot = of_parent(5);
        slot[member] = bad;
        value["slots"] = json!([slot]);
        assert!(parse(&value).is_err(), "{value}");
    }
    let mut bare = of_parent(5);
    bare.as_object_mut().unwrap().remove("parent");
    value["slots"] = json!([bare]);
    assert!(parse(&value).is_err());
}

fn any_slot(id: u32) -> impl Strategy<Value = Slot> {
    // Four of them are within what a header may ask for.
    let cost =
        (1u32..=16, 1u32..=64, 128u32..=4 << 20).prop_map(|(p, t, m)| Argon2Params::new(m.min((16 << 20) / t), t, p));
    let label = "\\PC{0,60}".prop_filter("no control characters", |l| !l.chars().any(char::is_control));
    let token = (0..TokenMechanism::ALL.len(), prop::collection::vec(any::<u8>(), 1..300))
        .prop_map(|(m, sealed)| TokenSealed { mechanism: TokenMechanism::ALL[m], sealed });
    let kinds = (0..SlotKind::ALL.len()).prop_map(|k| SlotKind::ALL[k]);
    let bytes = (any::<[u8; 32]>(), any::<[u8; 24]>(), any::<[u8; 32]>(), any::<[u8; 16]>());
    (kinds, label, any::<u64>(), cost, token, bytes).prop_map(
        move |(kind, label, created, cost, token, (salt, nonce, w1, w2))| {
            let argon2 = if kind == SlotKind::Passphrase { cost } else { None };
            let token = (kind == SlotKind::Pkcs11).then_some(token);
            let parent = (kind == SlotKind::Parent).then_some([w2[0]; 88]);
            let role = Role::Administrator;
            let expires = w1[0].is_multiple_of(2).then_some(created);
            let wrapped = [&w1[..], &w2[..]].concat();
            Slot { id, kind, label, created, salt, argon2, token, parent, role, expires, nonce, wrapped }
        },
    )
}

fn any_keys() -> impl Strategy<Value = KeyArea> {
    let slots = prop::collection::btree_set(1u32..u32::MAX, 1..5)
        .prop_flat_map(|ids| ids.into_iter().map(any_slot).collect::<Vec<_>>());
    let sealed = prop::collection::vec(any::<u8>(), 16..300);
    (any::<[u8; 16]>(), slots, any::<[u8; 24]>(), sealed, any::<[u8; 32]>()).prop_map(
        |(id, mut slots, nonce, sealed, mac)| {
            // One parent slot at most.
            let mut seen = false;
            slots.retain(|s| s.kind != SlotKind::Parent || !std::mem::replace(&mut seen, true));
            let next_slot = slots.iter().map(|s| s.id).max().unwrap() + 1;
            let keychain = SealedKeychain { nonce, sealed };
            KeyArea { id, next_slot, slots, keychain, admin: None, history: None, mac }
        },
    )
}

/// With an administrator, a use slot and a mark of the history, for three of four values of `by`.
fn signed(mut keys: KeyArea, by: u64) -> KeyArea {
    keys.history = (by & 1 == 1).then_some(HistoryMark { count: 1 + (by >> 8), head: [by as u8; 32] });
    if by & 2 == 2 {
        let before = vec![Predecessor { public: [1; 32], signature: [2; 64] }; by as usize % 3];
        keys.admin = Some(Admin { public: keys.mac, signature: [by as u8; 64], before });
        for (i, slot) in keys.slots.iter_mut().enumerate() {
            if i > 0 && by >> i & 1 == 1 {
                slot.role = Role::Use;
            } else {
                slot.wrapped.resize(80, 1);
            }
        }
    }
    keys
}

prop_compose! {
    fn any_vault()(
        keys in any_keys(), zone in any::<[u8; 16]>(), suite in 0usize..4, log in 12u32..=20, reserved in 1u16..=62,
        plain in any::<bool>(), name_max in 64u8..=255, convergent in any::<bool>(), created in any::<u64>(),
        snapshot in any::<bool>(), domain in prop::sample::select(&Domain::ALL[..]),
    ) -> VaultHeader {
        let domain = if domain.is_for(Suite::ALL[suite]) { domain } else { Domain::Family };
        let params = VaultParams {
            zone, suite: Suite::ALL[suite], geometry: Geometry::new(1 << log, reserved).unwrap(),
            names: if plain { NameMode::Plain } else { NameMode::Encrypted }, name_max,
            convergent_small_files: convergent && !domain.is_salted(), domain, created,
        };
        let header = VaultHeader::new(params, signed(keys, created));
        if snapshot { header.into_snapshot() } else { header }
    }
}

proptest! {
    #[test]
    fn vaults_round_trip(h in any_vault()) {
        let json = h.to_json().unwrap();
        let again = VaultHeader::parse(&json).unwrap();
        prop_assert_eq!(&again, &h);
        prop_assert_eq!(again.mac_input(), h.mac_input());
    }

    #[test]
    fn zones_round_trip(keys in any_keys(), suite in 0usize..4, log in 12u32..=20, created in any::<u64>()) {
        let z = ZoneFile::new(ZoneParams { suite: Suite::ALL[suite], block_size: 1 << log, created }, keys);
        prop_assert_eq!(ZoneFile::parse(&z.to_json().unwrap()).unwrap(), z);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = VaultHeader::parse(&bytes);
        let _ = ZoneFile::parse(&bytes);
    }

    /// Whatever is changed in the text: it is refused, or means the same, or the input of the MAC (or the MAC) differs.
    #[test]
    fn every_change_is_refused_or_covered(at in any::<prop::sample::Index>(), to in any::<u8>(), cut in any::<bool>()) {
        let good = parse(&vault()).unwrap();
        let mut text = vault().to_string().into_bytes();
        let at = at.index(text.len());
        if cut { text.remove(at); } else { text[at] = to; }
        if let Ok(h) = VaultHeader::parse(&text) {
            let same = h.mac_input() == good.mac_input() && h.keys().mac == good.keys().mac;
            prop_assert_eq!(same, h == good);
        }
    }
}
