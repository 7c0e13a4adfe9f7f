//! Helpers for unit tests: small vaults, served.
#![allow(clippy::unwrap_used)] // a panic is a failed test

use crate::anchors::{Anchors, NewTrees};
use crate::create::VaultPlace;
use crate::{Found, Keeper, Place, Policy, Served, Unsealed, backend, options};
use lamassu_crypto::SecretBytes;
use lamassu_format::header::NameMode;
use lamassu_format::{Domain, Geometry, Suite, name};
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, Material, NewSlot, NewVault, SlotKind, Update, Zone, cost, create_vault, unlock};
use lamassu_vault::Vault;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub fn key() -> Material {
    Material::new(SlotKind::Raw, SecretBytes::new(vec![7; 32])).unwrap()
}

fn new_vault() -> NewVault<'static> {
    let geometry = Geometry::new(4096, 8).unwrap();
    let (suite, names, domain) = (Suite::Aes, NameMode::Encrypted, Domain::Zone);
    let (zone, created) = (Zone::Private, 1);
    NewVault {
        domain,
        suite,
        geometry,
        names,
        name_max: 255,
        convergent_small_files: true,
        compression: None,
        zone,
        created,
    }
}

/// An anchored vault in `v`, and under what it is opened.
pub fn anchored(dir: &Path) -> (PathBuf, Policy) {
    let policy = Policy::default().anchored_by(Anchors::within(Some(dir.join("state"))));
    let slot = NewSlot { material: &key(), cost: cost::FALLBACK, label: "", created: 1 };
    let (place, _) = VaultPlace::prepare(&dir.join("v"), 0o700).unwrap();
    place.fill(&policy, &new_vault(), &slot, NewTrees::default()).unwrap();
    (dir.join("v"), policy)
}

/// A vault whose history has two entries; the length of the first.
pub fn vault(dir: &Path) -> usize {
    let slot = NewSlot { material: &key(), cost: cost::FALLBACK, label: "", created: 1 };
    let (mut header, keys) = create_vault(&new_vault(), &slot).unwrap();
    Vault::make_tree(&backend(dir).unwrap(), &header, &keys.key_ring(header.suite()).unwrap()).unwrap();
    let place = dir.join(name::HEADER);
    let begun = [Event::new(EventKind::Created)];
    Update::begin(&place, &lamassu_keys::nobody()).unwrap().create_recorded(&mut header, &keys, &begun).unwrap();
    let first = fs::metadata(dir.join(name::HISTORY)).unwrap().len();
    keys.add_slot(&mut header, &slot).unwrap();
    Update::begin(&place, &lamassu_keys::nobody())
        .unwrap()
        .record(&mut header, &keys, &[Event::new(EventKind::SlotAdded)])
        .unwrap();
    usize::try_from(first).unwrap()
}

/// A mount of it that is up, but not recorded yet.
pub fn served(dir: &Path) -> Arc<Served> {
    served_under(Policy::default(), dir)
}

/// The same under a policy.
pub fn served_under(policy: Policy, dir: &Path) -> Arc<Served> {
    let found = Found::at(&policy, dir).unwrap();
    let keys = unlock(&found.header, &key()).unwrap();
    let mut unsealed = Unsealed::new(found, keys, policy.clone());
    let opened = unsealed.open_to_serve(options(false), false).unwrap();
    let keeper = Keeper::new(Place::of(dir).unwrap(), options(false), true, Some("/m".into()), policy);
    Served::new(unsealed, opened, keeper).unwrap()
}
