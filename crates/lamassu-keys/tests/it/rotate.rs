//! Rotation, adoption of a zone's epochs, retirement.
#![allow(missing_docs, clippy::unwrap_used)]

use lamassu_crypto::SecretBytes;
use lamassu_format::header::{Header, NameMode, VaultHeader, ZoneFile};
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_keys::{
    Argon2Params, Epoch, KeyError, Material, NewSlot, NewVault, NewZone, ObliviousKey, Outer, SlotKind, Tier, Unlocked,
    Zone, create_oblivious_zone, create_vault, create_zone, unlock,
};

fn raw(byte: u8) -> Material {
    Material::new(SlotKind::Raw, SecretBytes::new(vec![byte; 32])).unwrap()
}

fn slot(material: &Material) -> NewSlot<'_> {
    NewSlot { material, cost: Argon2Params::new(64, 1, 2).unwrap(), label: "", created: 0 }
}

fn new(zone: Zone<'_>) -> NewVault<'_> {
    NewVault {
        suite: Suite::Aes,
        geometry: Geometry::new(4096, 8).unwrap(),
        names: NameMode::Encrypted,
        name_max: 255,
        convergent_small_files: true,
        compression: None,
        domain: Domain::Zone,
        zone,
        created: 200,
    }
}

fn zone() -> (ZoneFile, Unlocked) {
    create_zone(
        &NewZone { suite: Suite::Aes, block_size: 4096, compression: None, outer: true, created: 100 },
        &slot(&raw(1)),
    )
    .unwrap()
}

fn member(zone: &(ZoneFile, Unlocked), outer: Outer) -> (VaultHeader, Unlocked) {
    let (file, keys) = zone;
    create_vault(&new(Zone::Member { file, keys, outer }), &slot(&raw(2))).unwrap()
}

fn numbers(epochs: &[Epoch]) -> Vec<u32> {
    epochs.iter().map(Epoch::number).collect()
}

#[test]
fn a_rotated_header_opens_with_both_epochs_until_one_is_retired() {
    let (mut header, mut keys) = create_vault(&new(Zone::Private), &slot(&raw(2))).unwrap();
    let old = keys.reopen(&header).unwrap();
    for tier in [Tier::Inner, Tier::Outer] {
        assert_eq!(keys.rotate_vault(&mut header, tier, false, 300).unwrap(), 2);
        assert!(matches!(keys.retire(&mut header, tier, 2), Err(KeyError::NewestEpoch { .. })));
        assert!(matches!(keys.retire(&mut header, tier, 3), Err(KeyError::NoEpoch { .. })));
        assert!(keys.ring_without(&header, tier, 2).is_err());
    }
    let again = unlock(&header, &raw(2)).unwrap();
    assert_eq!((numbers(again.keychain().inner()), numbers(again.keychain().outer())), (vec![1, 2], vec![1, 2]));
    // Who had it open before sees the new epochs, and a ring in use takes them.
    let ring = old.key_ring(header.suite()).unwrap();
    old.reopen(&header).unwrap().update_ring(&ring);
    assert_eq!(ring.newest(), (2, 2));
    assert_eq!(keys.ring_without(&header, Tier::Inner, 1).unwrap().inners().len(), 1);

    keys.retire(&mut header, Tier::Outer, 1).unwrap();
    let again = unlock(&header, &raw(2)).unwrap();
    assert_eq!((numbers(again.keychain().inner()), numbers(again.keychain().outer())), (vec![1, 2], vec![2]));
    assert_eq!(keys.rotate_vault(&mut header, Tier::Outer, false, 400).unwrap(), 3, "numbers are never used again");
    let (other, _) = create_vault(&new(Zone::Private), &slot(&raw(2))).unwrap();
    assert!(matches!(keys.reopen(&other), Err(KeyError::OtherHeader)));
}

#[test]
fn a_renewed_header_is_closed_to_who_knew_its_file_key() {
    let (mut header, mut keys) = create_vault(&new(Zone::Private), &slot(&raw(2))).unwrap();
    keys.add_slot(&mut header, &slot(&raw(3))).unwrap();
    let theirs = unlock(&header, &raw(3)).unwrap();
    let _removed = keys.remove_slot(&mut header, 2).unwrap();
    assert!(theirs.reopen(&header).is_ok(), "removal of a slot alone does not shut them out");
    let inner = *keys.keychain().inner()[0].key().expose();
    assert_eq!(keys.renew(&mut header, &slot(&raw(2))).unwrap(), 3, "a new id");
    assert!(matches!(theirs.reopen(&header), Err(KeyError::HeaderAltered)));
    let again = unlock(&header, &raw(2)).unwrap();
    assert_eq!(*again.keychain().inner()[0].key().expose(), inner, "the keys of data stay");
    assert!(unlock(&header, &raw(3)).is_err());
    keys.rotate_vault(&mut header, Tier::Outer, false, 300).unwrap();
}

#[test]
fn a_shared_key_is_rotated_by_its_zone_or_left() {
    let mut z = zone();
    let (mut header, mut keys) = member(&z, Outer::Shared);
    let before = header.clone();
    for tier in [Tier::Inner, Tier::Outer] {
        assert!(matches!(keys.rotate_vault(&mut header, tier, false, 300), Err(KeyError::SharedKey { .. })));
        let (file, zone_keys) = &z;
        assert_eq!(keys.adopt_zone(&mut header, tier, file, zone_keys).unwrap(), [0; 0], "nothing new yet");
    }
    assert_eq!(header.zone(), before.zone());
    for tier in [Tier::Inner, Tier::Inner, Tier::Outer] {
        z.1.rotate(&mut z.0, tier, 250).unwrap();
    }
    assert_eq!(keys.adopt_zone(&mut header, Tier::Inner, &z.0, &z.1).unwrap(), [2, 3]);
    assert_eq!(keys.adopt_zone(&mut header, Tier::Outer, &z.0, &z.1).unwrap(), [2]);
    let (_, newer) = member(&z, Outer::Own);
    let same =
        |a: &Unlocked, b: &Unlocked| a.keychain().inner()[2].key().expose() == b.keychain().inner()[2].key().expose();
    assert!(same(&keys, &newer), "vaults of the zone deduplicate again");

    // An own key from now on; the zone's later ones do not fit it any more.
    assert_eq!(keys.rotate_vault(&mut header, Tier::Inner, true, 300).unwrap(), 4);
    assert!(header.has_private_zone());
    assert!(matches!(keys.adopt_zone(&mut header, Tier::Inner, &z.0, &z.1), Err(KeyError::OtherZone)));
    assert_eq!(keys.rotate_vault(&mut header, Tier::Inner, false, 300).unwrap(), 5);
    unlock(&header, &raw(2)).unwrap();
}

/// A store puts an earlier header back: everything is authentic about it.
#[test]
fn keys_in_use_take_no_header_from_before_the_one_they_saw() {
    let (mut header, mut keys) = create_vault(&new(Zone::Private), &slot(&raw(2))).unwrap();
    keys.saw(&header);
    let first = header.clone();
    let older =
        |keys: &Unlocked, header: &VaultHeader| matches!(keys.reopen(header), Err(KeyError::OlderHeader { .. }));
    keys.reopen(&first).unwrap();
    let id = keys.add_slot(&mut header, &slot(&raw(3))).unwrap();
    keys.saw(&header);
    assert!(older(&keys, &first), "a slot is gone");
    let with_slot = header.clone();
    let _removed = keys.remove_slot(&mut header, id).unwrap();
    for tier in [Tier::Inner, Tier::Outer] {
        let before = header.clone();
        keys.rotate(&mut header, tier, 300).unwrap();
        assert!(older(&keys, &before) && older(&keys, &with_slot), "an epoch is gone");
        // Another one of that number.
        let (mut forked, mut others) = (before.clone(), unlock(&before, &raw(2)).unwrap());
        others.rotate(&mut forked, tier, 300).unwrap();
        assert!(older(&keys, &forked));
        // A ring in use gives none up, whoever asks it to.
        let ring = keys.key_ring(header.suite()).unwrap();
        unlock(&before, &raw(2)).unwrap().update_ring(&ring);
        let (inner, outer) = (keys.keychain().inner().len() as u32, keys.keychain().outer().len() as u32);
        assert_eq!(ring.newest(), (inner, outer));
    }
    keys.reopen(&header).unwrap();
    keys.saw(&header);
    keys.reopen(&header).unwrap();
}

#[test]
fn keys_of_another_zone_or_an_older_copy_are_refused() {
    let (mut z, other) = (zone(), zone());
    let old = z.0.clone();
    let old_keys = z.1.reopen(&old).unwrap();
    z.1.rotate(&mut z.0, Tier::Inner, 250).unwrap();
    let (mut header, mut keys) = member(&z, Outer::Own);
    assert!(matches!(keys.adopt_zone(&mut header, Tier::Inner, &old, &old_keys), Err(KeyError::OtherEpochs { .. })));
    assert!(matches!(keys.adopt_zone(&mut header, Tier::Inner, &other.0, &other.1), Err(KeyError::OtherZone)));
    assert!(matches!(keys.adopt_zone(&mut header, Tier::Inner, &z.0, &other.1), Err(KeyError::OtherHeader)));
    assert!(!keys.is_shared(&header, Tier::Outer) && keys.is_shared(&header, Tier::Inner));
    assert!(matches!(keys.adopt_zone(&mut header, Tier::Outer, &z.0, &z.1), Err(KeyError::OtherEpochs { .. })));
    assert_eq!(keys.rotate_vault(&mut header, Tier::Outer, false, 300).unwrap(), 2, "its own");
}

#[test]
fn a_zone_is_oblivious_by_the_epoch_and_its_vaults_with_it() {
    let key = |name: &str| ObliviousKey { server: "keeper:7433".into(), name: name.into(), public: [1; 32] };
    let of = |suite| NewZone { suite, block_size: 4096, compression: None, outer: true, created: 100 };
    let refused = create_oblivious_zone(&of(Suite::Paper), key("k"), &slot(&raw(1))).map(drop);
    assert!(matches!(refused, Err(KeyError::SuiteNotOblivious { suite: Suite::Paper })));
    let mut z = create_oblivious_zone(&of(Suite::Aes), key("k"), &slot(&raw(1))).unwrap();
    let (mut header, mut keys) = member(&z, Outer::Own);
    let says = |header: &VaultHeader| header.keys().keychain.oblivious;
    assert!(z.0.keys().keychain.oblivious && says(&header));
    let again = unlock(&VaultHeader::parse(&header.to_json().unwrap()).unwrap(), &raw(2)).unwrap();
    assert_eq!(again.keychain().oblivious(), Some(&key("k")));
    // What the header says of it is under its MAC, and has to be what the keychain has.
    let mut other = header.clone();
    other.keys_mut().keychain.oblivious = false;
    assert!(matches!(unlock(&other, &raw(2)), Err(KeyError::HeaderAltered)));
    // An epoch is as the one before, or by another key, or by none.
    z.1.rotate(&mut z.0, Tier::Inner, 110).unwrap();
    z.1.rotate(&mut z.0, Tier::Outer, 110).unwrap();
    z.1.rotate_zone(&mut z.0, Some(key("k2")), 120).unwrap();
    z.1.rotate_zone(&mut z.0, None, 130).unwrap();
    assert_eq!(keys.adopt_zone(&mut header, Tier::Inner, &z.0, &z.1).unwrap(), [2, 3, 4]);
    let by: Vec<_> = keys.keychain().inner().iter().map(Epoch::oblivious).collect();
    assert_eq!(by, [Some(&key("k")), Some(&key("k")), Some(&key("k2")), None]);
    assert!(keys.keychain().outer().iter().all(|epoch| epoch.oblivious().is_none()));
    let ring = keys.key_ring(Suite::Aes).unwrap();
    assert!(ring.inner().oblivious().is_none() && ring.inners()[1].oblivious().is_some());
    for epoch in [1, 2] {
        keys.retire(&mut header, Tier::Inner, epoch).unwrap();
        assert!(says(&header));
    }
    keys.retire(&mut header, Tier::Inner, 3).unwrap();
    assert!(!says(&header), "a reader need not know it any more");
    // A vault that leaves is on its own.
    let (mut left, mut keys) =
        member(&create_oblivious_zone(&of(Suite::Aes), key("k"), &slot(&raw(1))).unwrap(), Outer::Own);
    keys.rotate_vault(&mut left, Tier::Inner, true, 300).unwrap();
    assert!(keys.keychain().oblivious().is_none() && says(&left));
}
