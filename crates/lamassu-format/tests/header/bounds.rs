//! What is refused: values out of bounds, members that are missing, unknown or twice, texts that are cut.

use crate::samples::{parse, slot, vault, with, zone};
use lamassu_format::header::{Argon2Params, Header, HeaderError, VaultHeader, ZoneFile};
use serde_json::{Value, json};

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
fn the_feature_of_oblivious_epochs_is_known_once_and_not_in_paper() {
    let mut with = vault();
    with["features"] = json!(["oblivious"]);
    let header = parse(&with).unwrap();
    assert!(header.keys().keychain.oblivious && !parse(&vault()).unwrap().keys().keychain.oblivious);
    assert!(String::from_utf8(header.to_json().unwrap()).unwrap().contains("\"oblivious\""));
    for features in
        [json!(["oblivious", "oblivious"]), json!(["oblivious", "merkle"]), json!("oblivious"), json!([null])]
    {
        with["features"] = features;
        assert!(parse(&with).is_err());
    }
    let mut paper = vault();
    (paper["suite"], paper["features"]) = (json!("paper"), json!(["oblivious"]));
    assert!(matches!(parse(&paper), Err(HeaderError::Member { member: "features", .. })));
    let mut file = zone();
    file["features"] = json!(["oblivious"]);
    assert!(ZoneFile::parse(file.to_string().as_bytes()).unwrap().keys().keychain.oblivious);
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
