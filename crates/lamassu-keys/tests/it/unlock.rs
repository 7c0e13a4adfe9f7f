//! Making, opening and changing headers: every way in, and every alteration refused.
use lamassu_crypto::{Secret, SecretBytes};
use lamassu_format::header::{
    Header, NameMode, SLOTS_MAX, TokenMechanism, TokenSealed, TokenSignature, TokenSigning, VaultHeader, ZoneFile,
};
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_keys::{
    Argon2Params, Attempt, Epoch, KeyError, Material, NewSlot, NewVault, NewZone, Outer, SlotKind, Slots, SourceError,
    Tier, TokenFault, Unlocked, Zone, create_vault, create_zone, unlock,
};
use serde_json::{Value, json};

const NOW: u64 = 1_700_000_000;

fn passphrase(text: &str) -> Material {
    Material::new(SlotKind::Passphrase, SecretBytes::new(text.as_bytes().to_vec())).unwrap()
}

fn raw(byte: u8) -> Material {
    Material::new(SlotKind::Raw, SecretBytes::new(vec![byte; 32])).unwrap()
}

fn hex(byte: u8) -> Material {
    Material::new(SlotKind::Hex, SecretBytes::new(format!("{byte:02x}").repeat(32).into_bytes())).unwrap()
}

fn slot<'a>(material: &'a Material, label: &'a str) -> NewSlot<'a> {
    NewSlot { material, cost: Argon2Params::new(64, 1, 2).unwrap(), label, created: NOW }
}

fn private() -> NewVault<'static> {
    NewVault {
        suite: Suite::Aes,
        geometry: Geometry::new(4096, 8).unwrap(),
        names: NameMode::Encrypted,
        name_max: 255,
        convergent_small_files: true,
        compression: None,
        domain: Domain::Zone,
        zone: Zone::Private,
        created: NOW,
    }
}

/// A vault with a slot of each kind: 1 opened by "correct horse", 2 by raw(2), 3 by hex(3).
fn three_slots() -> (VaultHeader, Unlocked) {
    let (mut header, keys) = create_vault(&private(), &slot(&passphrase("correct horse"), "first")).unwrap();
    assert_eq!(keys.add_slot(&mut header, &slot(&raw(2), "second")).unwrap(), 2);
    assert_eq!(keys.add_slot(&mut header, &slot(&hex(3), "third")).unwrap(), 3);
    (header, keys)
}

fn exposed(epochs: &[Epoch]) -> Vec<(u32, [u8; 32])> {
    epochs.iter().map(|e| (e.number(), *e.key().expose())).collect()
}

fn again<H: Header>(header: &H) -> H {
    H::parse(&header.to_json().unwrap()).unwrap()
}

#[test]
fn every_slot_opens_the_same_keychain() {
    let (header, keys) = three_slots();
    let header = again(&header);
    assert!(header.has_private_zone(), "a private zone is the vault's own");
    for (material, id) in [(passphrase("correct horse"), 1), (raw(2), 2), (hex(3), 3), (raw(3), 3), (hex(2), 2)] {
        let opened = unlock(&header, &material).unwrap();
        assert_eq!(opened.slot(), id);
        assert_eq!(exposed(opened.keychain().inner()), exposed(keys.keychain().inner()));
        assert_eq!(exposed(opened.keychain().outer()), exposed(keys.keychain().outer()));
    }
    assert_ne!(exposed(keys.keychain().inner()), exposed(keys.keychain().outer()));
}

#[test]
fn wrong_keys_are_told_from_altered_headers() {
    let (header, keys) = three_slots();
    for wrong in [passphrase("correct horse "), passphrase("Correct horse"), raw(9), hex(9)] {
        let e = unlock(&header, &wrong).unwrap_err();
        assert!(matches!(e, KeyError::WrongKey { .. }) && e.is_wrong_key(), "{e}");
    }
    // Slots of other kinds that such a key could open count too, and are not called slots of its kind.
    let said = unlock(&header, &raw(9)).unwrap_err().to_string();
    assert!(said.contains("that a raw key can open") && said.contains("2 tried"), "{said}");
    let mut raw_only = header.clone();
    let removed = keys.remove_slot(&mut raw_only, 1).unwrap();
    assert!(removed.to_string().contains("older copy"));
    let e = unlock(&raw_only, &passphrase("correct horse")).unwrap_err();
    assert!(matches!(&e, KeyError::NoSlotOfKind { have, .. } if have[..] == [SlotKind::Raw, SlotKind::Hex]), "{e}");
    assert!(e.is_wrong_key());

    let mut altered = header.clone();
    altered.keys_mut().mac[0] ^= 1;
    let e = unlock(&altered, &raw(2)).unwrap_err();
    assert!(matches!(e, KeyError::HeaderAltered) && !e.is_wrong_key());
    assert!(unlock(&header, &raw(2)).is_ok());
}

/// Pointers of all members that are no objects or arrays themselves, and of each array element.
fn leaves(value: &Value, at: &str, out: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(name, v)| leaves(v, &format!("{at}/{name}"), out)),
        Value::Array(items) => items.iter().enumerate().for_each(|(i, v)| leaves(v, &format!("{at}/{i}"), out)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => out.push(at.into()),
    }
}

/// Other values for a member, as many of them valid as there are.
fn others(value: &Value) -> Vec<Value> {
    if let Some(n) = value.as_u64() {
        return [n + 1, n * 2, n / 2, n.saturating_sub(1)].into_iter().filter(|m| *m != n).map(Value::from).collect();
    }
    let text = value.as_str().unwrap();
    let words: &[&[&str]] = &[
        &["aes", "paper", "blake3", "chacha"],
        &["encrypted", "plain"],
        &["convergent", "random"],
        &["passphrase", "raw", "hex"],
        &["lamassu-vault", "lamassu-zone"],
        &["first", "second", "third", ""],
    ];
    if let Some(words) = words.iter().find(|w| w.contains(&text)) {
        return words.iter().filter(|w| **w != text).map(|w| json!(w)).collect();
    }
    let flip = |at: usize| {
        let mut b = text.as_bytes().to_vec();
        b[at] = if b[at] == b'0' { b'1' } else { b'0' };
        json!(String::from_utf8(b).unwrap())
    };
    vec![flip(0), flip(text.len() / 2), flip(text.len() - 1), json!(format!("{text}00")), json!(text[2..])]
}

#[test]
fn every_altered_member_is_refused() {
    let (header, _) = three_slots();
    let good: Value = serde_json::from_slice(&header.to_json().unwrap()).unwrap();
    let materials = [passphrase("correct horse"), raw(2), hex(3)];
    let mut pointers = Vec::new();
    leaves(&good, "", &mut pointers);
    assert!(pointers.len() > 35, "{pointers:?}");
    let (mut by_mac, mut by_parser) = (0, 0);
    for pointer in &pointers {
        for other in others(good.pointer(pointer).unwrap()) {
            let mut altered = good.clone();
            *altered.pointer_mut(pointer).unwrap() = other.clone();
            let Ok(header) = VaultHeader::parse(altered.to_string().as_bytes()) else {
                by_parser += 1;
                continue;
            };
            for (i, material) in materials.iter().enumerate() {
                match unlock(&header, material) {
                    Err(KeyError::HeaderAltered) => by_mac += 1,
                    // The slot itself, or the id every slot is bound to: then no slot opens.
                    Err(KeyError::WrongKey { .. } | KeyError::NoSlotOfKind { .. }) => {
                        let own = pointer.starts_with(&format!("/slots/{i}/")) || pointer == "/id";
                        assert!(own, "{pointer} = {other}, material {i}");
                    }
                    other => panic!("{pointer}: {other:?}"),
                }
            }
        }
    }
    assert!(by_mac > 60 && by_parser > 20, "{by_mac} {by_parser}");
}

#[test]
fn slots_cannot_be_moved_about() {
    let (header, _) = three_slots();
    let altered = |change: &dyn Fn(&mut VaultHeader)| {
        let mut h = header.clone();
        change(&mut h);
        matches!(unlock(&again(&h), &raw(2)), Err(KeyError::HeaderAltered))
    };
    assert!(altered(&|h| h.keys_mut().slots.swap(0, 2)));
    assert!(altered(&|h| drop(h.keys_mut().slots.remove(0))));
    let (other, _) = three_slots();
    assert!(altered(&|h| h.keys_mut().slots[0] = other.keys().slots[0].clone()));
    assert!(altered(&|h| h.keys_mut().keychain = other.keys().keychain.clone()));
    let mut whole = header.clone();
    *whole.keys_mut() = other.keys().clone();
    assert!(unlock(&whole, &raw(2)).is_err(), "the properties of one vault with the keys of another");
}

#[test]
fn a_hostile_cost_is_refused_before_it_is_paid() {
    let (header, _) = three_slots();
    let mut value: Value = serde_json::from_slice(&header.to_json().unwrap()).unwrap();
    value["slots"][0]["argon2"]["memory_kib"] = json!(u32::MAX);
    assert!(VaultHeader::parse(value.to_string().as_bytes()).is_err());
}

#[test]
fn slots_come_and_go() {
    let (mut header, keys) = three_slots();
    assert!(matches!(keys.remove_slot(&mut header, 4), Err(KeyError::NoSlot { id: 4 })));
    let _ = keys.remove_slot(&mut header, 3).unwrap();
    assert!(matches!(unlock(&header, &hex(3)), Err(KeyError::WrongKey { .. })));
    // An id is never used again: repeating `remove 3` must not hit this one.
    assert_eq!(keys.add_slot(&mut header, &slot(&raw(4), "")).unwrap(), 4);
    let _ = keys.remove_slot(&mut header, 1).unwrap();
    let _ = keys.remove_slot(&mut header, 2).unwrap();
    let before = header.clone();
    assert!(matches!(keys.remove_slot(&mut header, 4), Err(KeyError::LastSlot { id: 4 })));
    assert_eq!(header, before);

    // The last slot can be changed, also to another kind.
    let (id, removed) = keys.change_slot(&mut header, 4, &slot(&passphrase("new"), "p")).unwrap();
    assert_eq!((id, removed.id), (5, 4));
    let header = again(&header);
    assert!(unlock(&header, &raw(4)).is_err());
    assert_eq!(unlock(&header, &passphrase("new")).unwrap().slot(), 5);
    assert!(unlock(&before, &raw(4)).is_ok(), "an old copy still opens, as `Removed` says");
}

#[test]
fn a_changed_slot_has_a_fresh_salt_even_for_the_same_key() {
    let (mut header, keys) = three_slots();
    let old = header.keys().slot(2).unwrap().clone();
    let (id, _) = keys.change_slot(&mut header, 2, &slot(&raw(2), "")).unwrap();
    let new = header.keys().slot(id).unwrap();
    assert!(new.salt != old.salt && new.nonce != old.nonce && new.wrapped != old.wrapped);
}

#[test]
fn slots_are_bounded() {
    let (mut header, keys) = create_vault(&private(), &slot(&raw(0), "")).unwrap();
    for _ in 1..SLOTS_MAX {
        keys.add_slot(&mut header, &slot(&raw(1), "")).unwrap();
    }
    let full = header.clone();
    assert!(matches!(keys.add_slot(&mut header, &slot(&raw(1), "")), Err(KeyError::SlotsFull { .. })));
    assert_eq!(header, full);
    let _ = keys.change_slot(&mut header, 5, &slot(&raw(7), "")).unwrap();
    assert!(unlock(&header, &raw(7)).is_ok());
    assert!(matches!(keys.add_slot(&mut header, &slot(&raw(1), "a\nb")), Err(KeyError::SlotsFull { .. })));

    let (mut header, keys) = create_vault(&private(), &slot(&raw(0), "")).unwrap();
    let before = header.clone();
    assert!(matches!(keys.add_slot(&mut header, &slot(&raw(1), "a\nb")), Err(KeyError::Header(_))));
    assert_eq!(header, before);
}

#[test]
fn only_an_authentic_header_of_its_own_is_changed() {
    let (mut header, keys) = three_slots();
    header.keys_mut().slots[0].label = "edited by someone".into();
    assert!(matches!(keys.add_slot(&mut header, &slot(&raw(5), "")), Err(KeyError::HeaderAltered)));
    assert!(matches!(keys.remove_slot(&mut header, 1), Err(KeyError::HeaderAltered)));
    let (mut other, _) = three_slots();
    assert!(matches!(keys.add_slot(&mut other, &slot(&raw(5), "")), Err(KeyError::OtherHeader)));
}

#[test]
fn rotation_adds_an_epoch_and_keeps_the_old_ones() {
    let (mut header, mut keys) = three_slots();
    let (inner, outer) = (exposed(keys.keychain().inner()), exposed(keys.keychain().outer()));
    assert_eq!(keys.rotate(&mut header, Tier::Outer, NOW + 1).unwrap(), 2);
    assert_eq!(keys.rotate(&mut header, Tier::Outer, NOW + 2).unwrap(), 3);
    let opened = unlock(&again(&header), &raw(2)).unwrap();
    assert_eq!(exposed(opened.keychain().inner()), inner);
    let now = exposed(opened.keychain().outer());
    assert_eq!(now[..1], outer[..]);
    assert_eq!(now.iter().map(|e| e.0).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(now[1].1 != now[2].1 && now[0].1 != now[1].1);
}

#[test]
fn vaults_of_a_zone_share_what_they_should() {
    let new = NewZone { suite: Suite::Aes, block_size: 4096, compression: None, outer: true, created: NOW };
    let (file, zone) = create_zone(&new, &slot(&raw(1), "zone")).unwrap();
    let zone_keys = unlock(&again(&file), &raw(1)).unwrap();
    let member = |outer| {
        let zone = Zone::Member { file: &file, keys: &zone_keys, outer };
        create_vault(&NewVault { zone, ..private() }, &slot(&raw(2), "")).unwrap()
    };
    let ((a, a_keys), (b, b_keys), (c, c_keys)) = (member(Outer::Shared), member(Outer::Shared), member(Outer::Own));
    for h in [&a, &b, &c] {
        assert_eq!(h.zone(), file.id());
        assert_ne!(h.id().private_zone(), file.id());
    }
    let inner = |k: &Unlocked| exposed(k.keychain().inner());
    let outer = |k: &Unlocked| exposed(k.keychain().outer());
    assert!(inner(&a_keys) == inner(&zone) && inner(&b_keys) == inner(&zone) && inner(&c_keys) == inner(&zone));
    assert!(outer(&a_keys) == outer(&zone) && outer(&b_keys) == outer(&zone));
    assert_ne!(outer(&c_keys), outer(&zone));
    assert!(unlock(&a, &raw(1)).is_err(), "the zone's key source does not open its vaults");
}

#[test]
fn zones_refuse_what_they_cannot_give() {
    let new = NewZone { suite: Suite::Chacha, block_size: 4096, compression: None, outer: false, created: NOW };
    let (file, keys) = create_zone(&new, &slot(&raw(1), "")).unwrap();
    let keys_again = unlock(&again(&file), &raw(1)).unwrap();
    assert!(matches!(keys_again.key_ring(Suite::Chacha), Err(KeyError::NoOuterKey)));
    let vault = |file, keys, suite, outer| {
        create_vault(&NewVault { suite, zone: Zone::Member { file, keys, outer }, ..private() }, &slot(&raw(2), ""))
    };
    assert!(matches!(vault(&file, &keys, Suite::Chacha, Outer::Shared), Err(KeyError::NoOuterKey)));
    assert!(matches!(vault(&file, &keys, Suite::Aes, Outer::Own), Err(KeyError::ZoneSuite { .. })));
    assert!(vault(&file, &keys, Suite::Chacha, Outer::Own).is_ok());
    let (other, _) = create_zone(&new, &slot(&raw(1), "")).unwrap();
    assert!(matches!(vault(&other, &keys, Suite::Chacha, Outer::Own), Err(KeyError::OtherHeader)));
}

#[test]
fn values_out_of_bounds_make_no_header() {
    let made = create_vault(&NewVault { name_max: 63, ..private() }, &slot(&raw(1), ""));
    assert!(matches!(made, Err(KeyError::Header(_))));
    let new = NewZone { suite: Suite::Aes, block_size: 5000, compression: None, outer: true, created: NOW };
    assert!(matches!(create_zone(&new, &slot(&raw(1), "")), Err(KeyError::Header(_))));
}

#[test]
fn nothing_shows_a_secret() {
    let (header, keys) = three_slots();
    let key = keys.keychain().inner()[0].key().expose();
    let shown = format!("{keys:?} {:?} {:?} {:?}", keys.keychain(), passphrase("correct horse"), raw(0xd7));
    assert!(!shown.contains("correct"), "{shown}");
    assert!(!shown.contains(&format!("{}, {}, {}", key[0], key[1], key[2])), "{shown}");
    assert!(!shown.contains("215, 215"), "{shown}");
    let e = unlock(&header, &passphrase("secret words")).unwrap_err();
    assert!(!format!("{e} {e:?}").contains("secret words"));
}

/// Headers made by `data/make_headers.py` from the format page alone.
#[test]
fn headers_of_another_implementation_open() {
    let vault = VaultHeader::parse(include_bytes!("../data/vault.json")).unwrap();
    assert_eq!((vault.suite(), vault.names(), vault.name_max()), (Suite::Chacha, NameMode::Plain, 143));
    assert_eq!(vault.geometry(), Geometry::new(131_072, 12).unwrap());
    assert!(!vault.convergent_small_files());
    for (material, id) in [(passphrase("pässphräse with spaces"), 1), (raw(0x51), 4), (hex(0x52), 9)] {
        let keys = unlock(&vault, &material).unwrap();
        assert_eq!(keys.slot(), id);
        assert_eq!(exposed(keys.keychain().inner()), [(1, [0x61; 32]), (3, [0x63; 32])]);
        assert_eq!(exposed(keys.keychain().outer()), [(2, [0x72; 32])]);
        assert_eq!(keys.keychain().inner()[1].created(), 1_600_000_003);
        let ring = keys.key_ring(vault.suite()).unwrap();
        assert_eq!((ring.suite(), ring.inners().len()), (Suite::Chacha, 2));
    }
    let zone = ZoneFile::parse(include_bytes!("../data/zone.json")).unwrap();
    assert_eq!(zone.id(), vault.zone());
    let keys = unlock(&zone, &raw(0x53)).unwrap();
    assert_eq!(exposed(keys.keychain().inner()), [(1, [0x61; 32]), (3, [0x63; 32])]);
    assert!(keys.keychain().outer().is_empty());
}

/// A token that cannot say anything of slots that another token sealed, but that it failed.
struct Stumbles;

impl lamassu_keys::source::Token for Stumbles {
    fn seal(&self, secret: &Secret<32>) -> Result<TokenSealed, SourceError> {
        Ok(TokenSealed { mechanism: TokenMechanism::AesGcm, sealed: secret.expose().to_vec(), signature: None })
    }

    fn unseal(&self, sealed: &TokenSealed) -> Result<Option<Secret<32>>, SourceError> {
        match sealed.mechanism {
            TokenMechanism::AesGcm => Ok(Secret::from_slice(&sealed.sealed)),
            TokenMechanism::RsaOaepSha256 | TokenMechanism::RsaOaepSha1 => {
                Err(TokenFault::Failed { op: "decrypt", source: "CKR_DEVICE_ERROR".into() }.into())
            }
        }
    }
}

/// Another token, whose slots the first one stumbles over.
struct Other;

impl lamassu_keys::source::Token for Other {
    fn seal(&self, _: &Secret<32>) -> Result<TokenSealed, SourceError> {
        Ok(TokenSealed { mechanism: TokenMechanism::RsaOaepSha256, sealed: vec![1; 256], signature: None })
    }

    fn unseal(&self, _: &TokenSealed) -> Result<Option<Secret<32>>, SourceError> {
        Ok(None)
    }
}

#[test]
fn a_token_that_fails_over_one_slot_opens_the_next() {
    let other = Material::Token(Box::new(Other));
    let (mut header, keys) = create_vault(&private(), &slot(&other, "another token")).unwrap();
    let ours = Material::Token(Box::new(Stumbles));
    assert!(matches!(unlock(&header, &ours), Err(KeyError::Source(SourceError::Token(TokenFault::Failed { .. })))));
    let id = keys.add_slot(&mut header, &slot(&ours, "ours")).unwrap();
    assert_eq!(unlock(&header, &ours).unwrap().slot(), id);
}

/// A card with an RSA key: anyone seals to it, it alone unseals and signs. (Sealing hides nothing here.)
struct Card {
    signs_with: Option<u8>,
}

impl Card {
    fn signature(key: u8, message: &[u8]) -> TokenSignature {
        let value = lamassu_crypto::wrap::hmac(&Secret::new(&mut [key; 32]), message).to_vec();
        TokenSignature { mechanism: TokenSigning::RsaPssSha256, value }
    }
}

impl lamassu_keys::source::Token for Card {
    fn seal(&self, secret: &Secret<32>) -> Result<TokenSealed, SourceError> {
        let mechanism = TokenMechanism::RsaOaepSha256;
        Ok(TokenSealed { mechanism, sealed: secret.expose().to_vec(), signature: None })
    }

    fn unseal(&self, sealed: &TokenSealed) -> Result<Option<Secret<32>>, SourceError> {
        Ok(Secret::from_slice(&sealed.sealed))
    }

    fn sign(&self, message: &[u8]) -> Result<Option<TokenSignature>, SourceError> {
        Ok(self.signs_with.map(|key| Card::signature(key, message)))
    }

    fn has_signed(&self, message: &[u8], signature: &TokenSignature) -> Result<bool, SourceError> {
        Ok(self.signs_with.is_some_and(|key| Card::signature(key, message) == *signature))
    }
}

fn card(signs_with: Option<u8>) -> Material {
    Material::Token(Box::new(Card { signs_with }))
}

/// Whoever knows the public half of a token's key makes a vault of his own that the token would open.
#[test]
fn what_was_sealed_to_a_public_key_proves_nothing_without_a_signature() {
    let ours = card(Some(1));
    let (own, _) = create_vault(&private(), &slot(&ours, "own")).unwrap();
    assert!(own.keys().slots[0].token.as_ref().unwrap().signature.is_some());
    assert_eq!(unlock(&own, &ours).unwrap().slot(), 1);
    for forger in [None, Some(2)] {
        let (forged, keys) = create_vault(&private(), &slot(&card(forger), "forged")).unwrap();
        assert!(matches!(unlock(&forged, &ours), Err(KeyError::TokenUnproven { slot: 1 })), "{forger:?}");
        // A signature of the token's for another header, or for another slot, is none for this one.
        let mut moved = forged.clone();
        let stolen = own.keys().slots[0].token.as_ref().unwrap().signature.clone();
        moved.keys_mut().slots[0].token.as_mut().unwrap().signature = stolen;
        assert!(matches!(unlock(&moved, &ours), Err(KeyError::TokenUnproven { slot: 1 })));
        // The administrator who is expected vouches for it, and no other.
        let admin = forged.keys().admin.as_ref().unwrap().public;
        let open = |pinned| Attempt::new(&ours).open_signed(&forged, Slots::All, &[pinned]);
        assert!(open(admin).is_ok());
        let other = own.keys().admin.as_ref().unwrap().public;
        assert!(matches!(open(other), Err(KeyError::OtherAdministrator { .. })));
        drop(keys);
    }
    // A zone has no administrator who could vouch for it.
    let new = NewZone { suite: Suite::Aes, block_size: 4096, compression: None, outer: true, created: 1 };
    assert!(create_zone(&new, &slot(&ours, "")).is_ok());
    assert!(matches!(create_zone(&new, &slot(&card(None), "")), Err(KeyError::TokenCannotSign)));
}
