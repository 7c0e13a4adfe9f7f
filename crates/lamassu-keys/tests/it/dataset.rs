//! Headers of datasets: whose keys they have, and the slot that their parent opens.
#![allow(missing_docs, clippy::unwrap_used)]

use lamassu_crypto::{KeyRing, SecretBytes};
use lamassu_format::header::{Header, NameMode, SlotKind, VaultHeader};
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_keys::dataset::{inherits, parent_epoch};
use lamassu_keys::{
    Argon2Params, KeyError, Material, NewClone, NewDataset, NewSlot, NewVault, Tier, Unlocked, Zone, clone_vault,
    create_dataset, create_vault, unlock, unlock_by_parent,
};

fn raw(byte: u8) -> Material {
    Material::new(SlotKind::Raw, SecretBytes::new(vec![byte; 32])).unwrap()
}

fn slot(material: &Material) -> NewSlot<'_> {
    NewSlot { material, cost: Argon2Params::new(64, 1, 2).unwrap(), label: "", created: 0 }
}

fn parent() -> (VaultHeader, Unlocked, KeyRing) {
    let new = NewVault {
        domain: Domain::Zone,
        suite: Suite::Aes,
        geometry: Geometry::new(4096, 8).unwrap(),
        names: NameMode::Encrypted,
        name_max: 200,
        convergent_small_files: false,
        compression: None,
        zone: Zone::Private,
        created: 200,
    };
    let (header, keys) = create_vault(&new, &slot(&raw(1))).unwrap();
    let ring = keys.key_ring(header.suite()).unwrap();
    (header, keys, ring)
}

fn inheriting() -> NewDataset<'static> {
    NewDataset {
        suite: Suite::Aes,
        geometry: Geometry::new(8192, 8).unwrap(),
        names: NameMode::Plain,
        domain: Domain::Zone,
        compression: None,
        integrity: None,
        cache: None,
        inherit: true,
        slot: None,
        created: 300,
    }
}

fn key_of(keys: &Unlocked, tier: Tier) -> [u8; 32] {
    *keys.keychain().epochs(tier).last().unwrap().key().expose()
}

#[test]
fn a_domain_says_whose_inner_key_it_is_and_the_outer_key_is_always_its_own() {
    let (header, keys, ring) = parent();
    let (zone, of_zone) = create_dataset(&header, &keys, &ring, &inheriting()).unwrap();
    let (family, of_family) =
        create_dataset(&header, &keys, &ring, &NewDataset { domain: Domain::Family, ..inheriting() }).unwrap();
    assert_eq!((zone.zone(), family.zone()), (header.zone(), family.id().private_zone()));
    assert_eq!((zone.domain(), family.domain()), (Domain::Zone, Domain::Family));
    assert_eq!(key_of(&of_zone, Tier::Inner), key_of(&keys, Tier::Inner));
    assert_ne!(key_of(&of_family, Tier::Inner), key_of(&keys, Tier::Inner));
    for own in [&of_zone, &of_family] {
        assert_ne!(key_of(own, Tier::Outer), key_of(&keys, Tier::Outer));
    }
    assert_ne!(key_of(&of_zone, Tier::Outer), key_of(&of_family, Tier::Outer));
    // What a dataset has of its parent, and what is its own.
    assert_eq!((zone.name_max(), zone.convergent_small_files()), (200, false));
    assert_eq!((zone.names(), zone.geometry().block_size()), (NameMode::Plain, 8192));
    // A K_in belongs to its suite.
    let other = NewDataset { suite: Suite::Blake3, ..inheriting() };
    assert!(matches!(create_dataset(&header, &keys, &ring, &other), Err(KeyError::ZoneSuite { .. })));
    for domain in [Domain::Family, Domain::File, Domain::None] {
        let (made, own) = create_dataset(&header, &keys, &ring, &NewDataset { domain, ..other }).unwrap();
        assert_eq!((made.domain(), made.zone()), (domain, made.id().private_zone()));
        assert_ne!(key_of(&own, Tier::Inner), key_of(&keys, Tier::Inner));
    }
}

/// A key in the place of the parent's slot would end the inheritance, and nobody would have asked for that.
#[test]
fn no_key_takes_the_place_of_the_parents_slot() {
    let (header, keys, ring) = parent();
    let (mut child, _) = create_dataset(&header, &keys, &ring, &inheriting()).unwrap();
    let mut opened = unlock_by_parent(&child, &ring).unwrap();
    let id = opened.slot();
    let own = opened.add_slot(&mut child, &slot(&raw(2))).unwrap();
    let before = child.clone();
    assert!(matches!(opened.exchange_administrator(&mut child, &raw(1)), Err(KeyError::ParentSlot { .. })));
    assert!(matches!(opened.change_slot(&mut child, id, &slot(&raw(3))), Err(KeyError::ParentSlot { .. })));
    assert!(matches!(opened.remove_slot(&mut child, id), Err(KeyError::ParentSlot { .. })));
    assert_eq!(child, before);
    // Of its own slots it may be done; the parent's held the old key, and is named among those that are gone.
    let mut by_own = unlock(&child, &raw(2)).unwrap();
    let done = by_own.exchange_administrator(&mut child, &raw(2)).unwrap();
    assert_eq!(done.gone.iter().map(|s| s.kind).collect::<Vec<_>>(), [SlotKind::Parent]);
    assert!(!inherits(&child) && child.keys().slot(own).is_some());
    by_own.add_parent_slot(&mut child, &ring, 9).unwrap();
    assert!(unlock_by_parent(&child, &ring).is_ok());
    let _removed = by_own.remove_parent_slot(&mut child).unwrap();
}

#[test]
fn the_parents_keys_open_it_and_nobody_elses() {
    let (header, keys, ring) = parent();
    let (child, made) = create_dataset(&header, &keys, &ring, &inheriting()).unwrap();
    assert_eq!(child.keys().slots.len(), 1);
    let opened = unlock_by_parent(&child, &ring).unwrap();
    assert_eq!(key_of(&opened, Tier::Outer), key_of(&made, Tier::Outer));
    assert!(opened.is_administrator());
    let (_, _, strange) = parent();
    assert!(matches!(unlock_by_parent(&child, &strange), Err(KeyError::OtherParent)));
    assert!(matches!(unlock(&child, &raw(1)), Err(KeyError::NoSlotOfKind { .. })), "no source opens it");
    // The slot of one dataset in the header of another.
    let (mut other, _) = create_dataset(&header, &keys, &ring, &inheriting()).unwrap();
    other.keys_mut().slots = child.keys().slots.clone();
    assert!(matches!(unlock_by_parent(&other, &ring), Err(KeyError::OtherParent)));
    // An altered header is found, however it was opened.
    let mut altered = child.clone();
    altered.keys_mut().slots[0].created += 1;
    assert!(matches!(unlock_by_parent(&altered, &ring), Err(KeyError::HeaderAltered)));
}

#[test]
fn the_parent_slot_outlives_the_parents_slots_and_file_key() {
    let (mut header, mut keys, ring) = parent();
    let (child, _) = create_dataset(&header, &keys, &ring, &inheriting()).unwrap();
    keys.renew(&mut header, &slot(&raw(9))).unwrap();
    let again = unlock(&header, &raw(9)).unwrap();
    unlock_by_parent(&child, &again.key_ring(header.suite()).unwrap()).unwrap();
    let new = NewClone { new_keys: true, snapshot: false, created: 400 };
    let (copy, of_copy) = clone_vault(&header, &again, new, &slot(&raw(2))).unwrap();
    unlock_by_parent(&child, &of_copy.key_ring(copy.suite()).unwrap()).unwrap();
}

#[test]
fn it_is_sealed_anew_under_the_newest_key_and_then_needs_no_other() {
    let (mut header, mut keys, ring) = parent();
    let (mut child, made) = create_dataset(&header, &keys, &ring, &inheriting()).unwrap();
    assert_eq!(parent_epoch(&child, &ring), Some(1));
    assert!(!made.reseal_parent_slot(&mut child, &ring).unwrap(), "nothing to do");
    keys.rotate_vault(&mut header, Tier::Outer, false, 500).unwrap();
    keys.update_ring(&ring);
    unlock_by_parent(&child, &ring).unwrap();
    let without = keys.ring_without(&header, Tier::Outer, 1).unwrap();
    assert_eq!(parent_epoch(&child, &without), None, "a user of the old epoch");
    assert!(made.reseal_parent_slot(&mut child, &ring).unwrap());
    assert_eq!(parent_epoch(&child, &without), Some(2));
    unlock_by_parent(&child, &without).unwrap();
    assert_eq!(VaultHeader::parse(&child.to_json().unwrap()).unwrap(), child);
}

#[test]
fn inheritance_is_added_and_taken_away() {
    let (header, keys, ring) = parent();
    let material = raw(5);
    let own = NewDataset { inherit: false, slot: Some(slot(&material)), ..inheriting() };
    let (mut child, made) = create_dataset(&header, &keys, &ring, &own).unwrap();
    assert!(!inherits(&child));
    assert!(matches!(unlock_by_parent(&child, &ring), Err(KeyError::NoParentSlot)));
    assert!(matches!(made.remove_parent_slot(&mut child), Err(KeyError::NoParentSlot)));
    made.add_parent_slot(&mut child, &ring, 600).unwrap();
    assert!(matches!(made.add_parent_slot(&mut child, &ring, 600), Err(KeyError::HasParentSlot)));
    unlock_by_parent(&child, &ring).unwrap();
    let _ = made.remove_parent_slot(&mut child).unwrap();
    unlock(&child, &material).unwrap();
    // Where nothing would open it, it is not made; nor is the last slot taken.
    let none = NewDataset { inherit: false, ..inheriting() };
    assert!(matches!(create_dataset(&header, &keys, &ring, &none), Err(KeyError::NoParentSlot)));
    let (mut only, made) = create_dataset(&header, &keys, &ring, &inheriting()).unwrap();
    assert!(matches!(made.remove_parent_slot(&mut only), Err(KeyError::LastSlot { .. })));
    let both = NewDataset { slot: Some(slot(&material)), ..inheriting() };
    let (both, _) = create_dataset(&header, &keys, &ring, &both).unwrap();
    assert_eq!(both.keys().slots.len(), 2);
    unlock(&both, &material).unwrap();
    unlock_by_parent(&both, &ring).unwrap();
}

#[test]
fn a_parent_slot_is_no_source() {
    for uri in ["parent:file:/k", "parent:prompt", "parent:stdin", "parent:x"] {
        assert!(uri.parse::<lamassu_keys::KeySource>().is_err(), "{uri}");
    }
    assert!(Material::new(SlotKind::Parent, SecretBytes::new(vec![1; 32])).is_err());
}
