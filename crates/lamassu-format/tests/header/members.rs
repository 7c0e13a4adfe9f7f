//! What a header says, member by member, and which members are optional.

use crate::samples::{parse, raw_slot, slot, vault, zone};
use lamassu_format::header::{
    Admin, AdminPin, Argon2Params, Caching, Destroyed, Header, HeaderError, HistoryHead, HistoryMark, NameMode,
    Predecessor, PublicKey, Role, SealedKeychain, SlotKind, TokenMechanism, VaultHeader, VaultId, Verified, ZoneFile,
    ZoneId,
};
use lamassu_format::{Domain, Geometry, Suite};
use serde_json::{Value, json};

#[test]
fn a_good_header_parses() {
    let h = parse(&vault()).unwrap();
    assert_eq!((h.suite(), h.names(), h.name_max()), (Suite::Aes, NameMode::Encrypted, 255));
    assert_eq!(h.geometry(), Geometry::new(4096, 8).unwrap());
    assert_eq!((h.id(), h.zone(), h.created()), (VaultId([0x77; 16]), ZoneId([0x88; 16]), 1_700_000_000));
    assert!(h.convergent_small_files());
    let keys = h.keys();
    assert_eq!((keys.next_slot, keys.mac), (6, [0xbb; 32]));
    assert_eq!(keys.keychain, SealedKeychain { nonce: [0x99; 24], sealed: vec![0xaa; 40], oblivious: false });
    assert_eq!(keys.slots.len(), 2);
    let slot = keys.slot(3).unwrap();
    assert_eq!((slot.kind, slot.label.as_str()), (SlotKind::Passphrase, "Zoë's \"laptop\" \\ /"));
    assert_eq!(slot.argon2, Argon2Params::new(65536, 3, 4));
    assert_eq!(keys.slot(5).unwrap().argon2, None);
    assert_eq!(keys.slot(4), None);

    let z = ZoneFile::parse(zone().to_string().as_bytes()).unwrap();
    assert_eq!((z.suite(), z.block_size(), z.id()), (Suite::Aes, 4096, ZoneId([0x77; 16])));
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
    assert_eq!(z.pins()[1], AdminPin { vault: VaultId([12; 16]), admin: PublicKey([13; 32]) });
    assert_ne!(z.mac_input(), before, "they are under the MAC");
    z.set_pin(AdminPin { vault: VaultId([10; 16]), admin: PublicKey([14; 32]) });
    assert_eq!(
        ZoneFile::parse(&z.to_json().unwrap()).unwrap().pins()[1],
        AdminPin { vault: VaultId([10; 16]), admin: PublicKey([14; 32]) }
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
    assert_eq!(keys.admin, Some(Admin { public: PublicKey([0xcc; 32]), signature: [0xdd; 64], before: vec![] }));
    assert_eq!(keys.history, Some(HistoryMark { count: 7, head: HistoryHead([0xee; 32]) }));
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
    let before = Predecessor { public: PublicKey([0x11; 32]), signature: [0x22; 64] };
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

#[test]
fn every_value_has_one_word() {
    assert!(SlotKind::ALL.into_iter().all(|kind| SlotKind::from_name(kind.name()) == Some(kind)));
    assert!(TokenMechanism::ALL.into_iter().all(|one| TokenMechanism::from_name(one.name()) == Some(one)));
    assert!(Domain::ALL.into_iter().all(|domain| Domain::from_name(domain.name()) == Some(domain)));
    assert_eq!((SlotKind::ALL.len(), TokenMechanism::ALL.len(), Domain::ALL.len()), (7, 3, 4));
    assert_eq!((Domain::from_name("Zone"), Domain::from_name("")), (None, None));
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
