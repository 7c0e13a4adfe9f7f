//! The administrator's signature: who may change a header, and what somebody who may not cannot do unnoticed.
use lamassu_crypto::{Secret, SecretBytes, sign, wrap};
use lamassu_format::header::{Admin, AdminPin, Header, NameMode, Predecessor, PublicKey, Role, VaultHeader, ZoneFile};
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_keys::{
    Argon2Params, KeyError, Material, NewSlot, NewVault, NewZone, SlotKind, Terms, Tier, Unlocked, Zone, admin,
    create_vault, create_zone, unlock,
};

fn raw(byte: u8) -> Material {
    Material::new(SlotKind::Raw, SecretBytes::new(vec![byte; 32])).unwrap()
}

fn slot(material: &Material) -> NewSlot<'_> {
    NewSlot { material, cost: Argon2Params::new(64, 1, 2).unwrap(), label: "", created: 5 }
}

const USE: Terms = Terms { role: Role::Use, expires: None };

/// Slot 1 is the administrator's (key 1), slot 2 is for use (key 2).
fn vault() -> (VaultHeader, Unlocked) {
    let new = NewVault {
        suite: Suite::Aes,
        geometry: Geometry::new(4096, 8).unwrap(),
        names: NameMode::Encrypted,
        name_max: 255,
        convergent_small_files: true,
        compression: None,
        domain: Domain::Zone,
        zone: Zone::Private,
        created: 5,
    };
    let (mut header, keys) = create_vault(&new, &slot(&raw(1))).unwrap();
    keys.add_slot_on(&mut header, &slot(&raw(2)), USE).unwrap();
    (header, keys)
}

fn public(header: &VaultHeader) -> PublicKey {
    header.keys().admin.as_ref().unwrap().public
}

#[test]
fn a_use_only_slot_does_not_hide_an_administrators() {
    let (mut header, keys) = vault();
    let id = keys.add_slot(&mut header, &slot(&raw(2))).unwrap();
    let opened = unlock(&header, &raw(2)).unwrap();
    assert!(opened.is_administrator() && opened.slot() == id);
    keys.remove_slot(&mut header, id).map(drop).unwrap();
    assert_eq!(unlock(&header, &raw(2)).unwrap().slot(), 2);
}

#[test]
fn a_use_only_slot_opens_and_changes_nothing() {
    let (mut header, keys) = vault();
    assert!(keys.is_administrator());
    assert_eq!(header.keys().slots.iter().map(|s| s.wrapped.len()).collect::<Vec<_>>(), [80, 48]);
    let before = header.clone();
    let mut user = unlock(&header, &raw(2)).unwrap();
    assert!(!user.is_administrator());
    assert_eq!(user.keychain().inner()[0].key().expose(), keys.keychain().inner()[0].key().expose());
    let refused = |result: Result<(), KeyError>| assert!(matches!(result, Err(KeyError::NotAdministrator { slot: 2 })));
    refused(user.add_slot(&mut header, &slot(&raw(3))).map(drop));
    refused(user.remove_slot(&mut header, 1).map(drop));
    refused(user.change_slot(&mut header, 2, &slot(&raw(3))).map(drop));
    refused(user.rotate(&mut header, Tier::Outer, 6).map(drop));
    refused(user.may_change(&header));
    assert_eq!(header, before);
    // The administrator may, and whom the administrator makes one.
    keys.add_slot(&mut header, &slot(&raw(3))).unwrap();
    let mut other = unlock(&header, &raw(3)).unwrap();
    other.rotate(&mut header, Tier::Outer, 6).unwrap();
    other.remove_slot(&mut header, 2).map(drop).unwrap();
    assert!(unlock(&header, &raw(2)).is_err());
    admin::verify_signature(&header).unwrap();
}

#[test]
fn the_last_administrator_stays() {
    let (mut header, keys) = vault();
    assert!(matches!(keys.remove_slot(&mut header, 1), Err(KeyError::LastAdministrator { id: 1 })));
    assert!(matches!(
        keys.change_slot_on(&mut header, 1, &slot(&raw(1)), USE),
        Err(KeyError::LastAdministrator { id: 1 })
    ));
    // A change keeps the role unless told otherwise.
    let (id, _) = keys.change_slot(&mut header, 2, &slot(&raw(4))).unwrap();
    assert_eq!(header.keys().slot(id).unwrap().role, Role::Use);
    let (id, _) = keys.change_slot_on(&mut header, id, &slot(&raw(4)), Terms::default()).unwrap();
    assert!(unlock(&header, &raw(4)).unwrap().is_administrator());
    keys.remove_slot(&mut header, 1).map(drop).unwrap();
    assert_eq!(header.keys().slots[0].id, id);
}

/// The file key of a use slot, got as its holder can get it: by the format page alone.
fn file_key(header: &VaultHeader, key: u8) -> Secret<32> {
    let slot = header.keys().slots.iter().find(|s| s.role == Role::Use).unwrap();
    let wrapping = wrap::hkdf(&[key; 32], &slot.salt, b"lamassu v1 slot");
    let aad = [&b"lamassu v1 slot"[..], &header.id().0, &slot.id.to_le_bytes()].concat();
    Secret::from_slice(wrap::open(&wrapping, &slot.nonce, &aad, &slot.wrapped).unwrap().expose()).unwrap()
}

/// What a use slot's holder can do: a MAC over anything.
fn macd(mut header: VaultHeader) -> VaultHeader {
    let key = file_key(&header, 2);
    header.keys_mut().mac = wrap::hmac(&wrap::hkdf(key.expose(), b"", b"lamassu v1 header"), &header.mac_input());
    header
}

fn signed_by(mut header: VaultHeader, seed: &Secret<32>) -> VaultHeader {
    header.keys_mut().admin = Some(Admin { public: PublicKey(sign::public(seed)), signature: [0; 64], before: vec![] });
    let message = [&b"lamassu v1 admin"[..], &header.signature_input()].concat();
    header.keys_mut().admin.as_mut().unwrap().signature = sign::sign(seed, &message);
    macd(header)
}

#[test]
fn what_a_use_slot_s_holder_changes_is_found() {
    let (header, _) = vault();
    let real = public(&header);
    assert_eq!(macd(header.clone()), header, "the lab computes what the crate does");

    // A changed header with a good MAC: nobody opens it.
    let mut relabelled = header.clone();
    relabelled.keys_mut().slots[0].label = "mine".into();
    let mut expired = header.clone();
    expired.keys_mut().slots[0].expires = Some(1);
    let mut added = header.clone();
    let mut extra = header.keys().slots[1].clone();
    (extra.id, added.keys_mut().next_slot) = (3, 4);
    added.keys_mut().slots.push(extra);
    let mut removed = header.clone();
    removed.keys_mut().slots.remove(0);
    for changed in [relabelled.clone(), expired, added, removed] {
        let changed = macd(changed);
        for key in [1, 2] {
            let opened = unlock(&changed, &raw(key));
            assert!(matches!(opened, Err(KeyError::SignatureInvalid | KeyError::WrongKey { .. })), "{opened:?}");
        }
    }

    // Signed with a key of their own: an administrator's slot holds the right seed and tells; who opens a use slot has
    // to have pinned the key.
    let own = Secret::new(&mut [9; 32]);
    let forged = signed_by(relabelled, &own);
    assert!(matches!(unlock(&forged, &raw(1)), Err(KeyError::SignatureInvalid)));
    unlock(&forged, &raw(2)).unwrap();
    // Keys that were opened before, as a mount has them, take neither for the header they opened, whatever slot that
    // was by.
    let opened_before = [1, 2].map(|key| unlock(&header, &raw(key)).unwrap());
    for keys in &opened_before {
        assert!(matches!(keys.reopen(&forged), Err(KeyError::OtherAdministrator { found: Some(_) })));
        keys.reopen(&header).unwrap();
    }
    admin::check_pinned(&header, &[real]).unwrap();
    admin::check_pinned(&header, &[PublicKey([1; 32]), real]).unwrap();
    admin::check_pinned(&forged, &[]).unwrap();
    let refused = admin::check_pinned(&forged, &[real]).unwrap_err();
    assert!(matches!(&refused, KeyError::OtherAdministrator { found: Some(_) }), "{refused}");

    // Without a signature, as headers were before: slots that hold a seed do not parse then, so they have to go.
    let mut stripped = header.clone();
    stripped.keys_mut().admin = None;
    stripped.keys_mut().slots[1].role = Role::Administrator;
    assert!(VaultHeader::parse(&stripped.to_json().unwrap_or_default()).is_err());
    stripped.keys_mut().slots.remove(0);
    let key = file_key(&header, 2);
    stripped.keys_mut().mac = wrap::hmac(&wrap::hkdf(key.expose(), b"", b"lamassu v1 header"), &stripped.mac_input());
    let stripped = VaultHeader::parse(&stripped.to_json().unwrap()).unwrap();
    unlock(&stripped, &raw(2)).unwrap();
    for keys in &opened_before {
        assert!(matches!(keys.reopen(&stripped), Err(KeyError::OtherAdministrator { found: None })));
        assert!(matches!(keys.may_change(&stripped), Err(KeyError::OtherAdministrator { found: None })));
    }
    assert!(matches!(unlock(&stripped, &raw(1)), Err(KeyError::WrongKey { .. })));
    assert!(matches!(admin::check_pinned(&stripped, &[real]), Err(KeyError::OtherAdministrator { found: None })));
}

#[test]
fn headers_from_before_gain_an_administrator() {
    let old = VaultHeader::parse(include_bytes!("../data/vault.json")).unwrap();
    let material = raw(0x51);
    let mut header = old.clone();
    let mut keys = unlock(&header, &material).unwrap();
    assert!(!keys.is_administrator());
    keys.may_change(&header).unwrap();
    assert!(matches!(keys.add_slot_on(&mut header, &slot(&raw(2)), USE), Err(KeyError::NoAdministrator)));
    let made = keys.make_administrator(&mut header, &material).unwrap();
    assert_eq!(made, public(&header));
    let roles: Vec<_> = header.keys().slots.iter().map(|s| s.role == Role::Administrator).collect();
    assert_eq!(roles.iter().filter(|admin| **admin).count(), 1);
    let again = unlock(&VaultHeader::parse(&header.to_json().unwrap()).unwrap(), &material).unwrap();
    assert!(again.is_administrator() && again.slot() == keys.slot());
    keys.add_slot_on(&mut header, &slot(&raw(2)), USE).unwrap();
    assert!(matches!(keys.make_administrator(&mut header, &material), Err(KeyError::HasAdministrator)));
}

#[test]
fn zones_have_no_administrator() {
    let new = NewZone { suite: Suite::Aes, block_size: 4096, compression: None, outer: true, created: 0 };
    let (mut zone, keys) = create_zone(&new, &slot(&raw(1))).unwrap();
    assert!(zone.keys().admin.is_none() && !keys.is_administrator());
    assert!(matches!(keys.add_slot_on(&mut zone, &slot(&raw(2)), USE), Err(KeyError::NoAdministrator)));
    let terms = Terms { expires: Some(77), ..Terms::default() };
    keys.add_slot_on(&mut zone, &slot(&raw(2)), terms).unwrap();
    let zone = ZoneFile::parse(&zone.to_json().unwrap()).unwrap();
    assert_eq!(zone.keys().slots[1].expires, Some(77));
    unlock(&zone, &raw(2)).unwrap();
}

#[test]
fn an_exchanged_key_is_signed_by_the_one_before() {
    let (mut header, mut keys) = vault();
    keys.add_slot(&mut header, &slot(&raw(3))).unwrap();
    let first = public(&header);
    let before = header.clone();
    let opened_before = [1, 2].map(|key| unlock(&before, &raw(key)).unwrap());

    let mut user = unlock(&header, &raw(2)).unwrap();
    let refused = user.exchange_administrator(&mut header, &raw(2)).unwrap_err();
    assert!(matches!(refused, KeyError::NotAdministrator { slot: 2 }) && header == before);
    let done = keys.exchange_administrator(&mut header, &raw(1)).unwrap();
    assert_eq!((done.before, done.public), (first, public(&header)));
    assert_ne!(done.public, first);
    assert_eq!(done.gone.iter().map(|s| s.id).collect::<Vec<_>>(), [3], "it held the old seed");
    let header = VaultHeader::parse(&header.to_json().unwrap()).unwrap();
    assert!(unlock(&header, &raw(1)).unwrap().is_administrator() && keys.is_administrator());
    assert!(!unlock(&header, &raw(2)).unwrap().is_administrator());
    assert!(unlock(&header, &raw(3)).is_err());

    // A pin of the old key leads to the new one, and says that it did.
    assert_eq!(admin::check_pinned(&header, &[first]).unwrap(), Some(first));
    assert_eq!(admin::check_pinned(&header, &[first, done.public]).unwrap(), None);
    assert!(admin::check_pinned(&header, &[PublicKey([1; 32])]).is_err());
    assert!(admin::check_pinned(&before, &[done.public]).is_err(), "and never back");
    // Keys that were opened before follow, but their seed is an old one.
    for keys in &opened_before {
        let now = keys.reopen(&header).unwrap();
        assert!(!now.is_administrator() && matches!(now.may_change(&header), Err(KeyError::NotAdministrator { .. })));
        assert!(matches!(keys.may_change(&header), Err(KeyError::NotAdministrator { .. })));
    }

    // Again: every link of the chain has to hold.
    let mut newer = header.clone();
    let second = keys.exchange_administrator(&mut newer, &raw(1)).unwrap();
    assert_eq!(newer.keys().admin.as_ref().unwrap().before.len(), 2);
    assert_eq!(admin::check_pinned(&newer, &[first]).unwrap(), Some(first));
    assert_eq!(admin::check_pinned(&newer, &[first, done.public]).unwrap(), Some(done.public), "the latest");
    for link in 0..2 {
        let mut broken = newer.clone();
        broken.keys_mut().admin.as_mut().unwrap().before[link].signature[3] ^= 1;
        let leads = |from: PublicKey| admin::check_pinned(&broken, &[from]).is_ok();
        assert_eq!((leads(first), leads(done.public), leads(second.public)), (false, link == 0, true));
    }
    let mut shorter = newer.clone();
    shorter.keys_mut().admin.as_mut().unwrap().before.remove(1);
    assert!(admin::check_pinned(&shorter, &[first]).is_err(), "a link is missing");
    let mut elsewhere = newer.clone();
    elsewhere.keys_mut().id[0] ^= 1;
    assert!(admin::check_pinned(&elsewhere, &[first]).is_err(), "a chain belongs to one vault");
}

#[test]
fn a_use_slot_s_holder_makes_no_successor() {
    let (header, _) = vault();
    let own = Secret::new(&mut [9; 32]);
    let mut forged = signed_by(header.clone(), &own);
    // With the right key named, and a signature of their own over the succession.
    let message = [&b"lamassu v1 admin successor"[..], &header.id().0, &sign::public(&own)].concat();
    let link = Predecessor { public: public(&header), signature: sign::sign(&own, &message) };
    forged.keys_mut().admin.as_mut().unwrap().before.push(link);
    let message = [&b"lamassu v1 admin"[..], &forged.signature_input()].concat();
    forged.keys_mut().admin.as_mut().unwrap().signature = sign::sign(&own, &message);
    let forged = macd(forged);
    admin::verify_signature(&forged).unwrap();
    assert!(matches!(admin::check_pinned(&forged, &[public(&header)]), Err(KeyError::OtherAdministrator { .. })));
    for key in [1, 2] {
        let opened_before = unlock(&header, &raw(key)).unwrap();
        assert!(matches!(opened_before.reopen(&forged), Err(KeyError::OtherAdministrator { .. })));
    }
}

#[test]
fn the_oldest_keys_of_a_long_chain_are_forgotten() {
    let (mut header, mut keys) = vault();
    let mut all = vec![public(&header)];
    for _ in 0..Admin::BEFORE_MAX + 2 {
        all.push(keys.exchange_administrator(&mut header, &raw(1)).unwrap().public);
    }
    let header = VaultHeader::parse(&header.to_json().unwrap()).unwrap();
    assert_eq!(header.keys().admin.as_ref().unwrap().before.len(), Admin::BEFORE_MAX);
    assert!(admin::check_pinned(&header, &all[..2]).is_err());
    assert_eq!(admin::check_pinned(&header, &all[..3]).unwrap(), Some(all[2]));
    unlock(&header, &raw(1)).unwrap();
}

#[test]
fn a_zone_file_pins_a_vault_s_administrator() {
    let (header, _) = vault();
    let new = NewZone { suite: Suite::Aes, block_size: 4096, compression: None, outer: true, created: 0 };
    let (mut zone, keys) = create_zone(&new, &slot(&raw(1))).unwrap();
    let (_, others) = create_zone(&new, &slot(&raw(1))).unwrap();
    let pin = |admin| AdminPin { vault: header.id(), admin };
    assert!(matches!(others.pin(&mut zone, pin(PublicKey([7; 32]))), Err(KeyError::OtherHeader)));
    for admin in [PublicKey([7; 32]), public(&header)] {
        keys.pin(&mut zone, pin(admin)).unwrap();
    }
    let zone = ZoneFile::parse(&zone.to_json().unwrap()).unwrap();
    assert_eq!(zone.pins(), [pin(public(&header))]);
    unlock(&zone, &raw(1)).unwrap();
    let mut edited = zone.clone();
    edited.set_pin(pin(PublicKey([8; 32])));
    assert!(matches!(unlock(&edited, &raw(1)), Err(KeyError::HeaderAltered)), "under the MAC");
}
