//! What several unit tests need: a small vault, served.
#![allow(clippy::unwrap_used)] // a panic is a failed test

use crate::{Found, Keeper, Place, Policy, Served, Unsealed, backend, options};
use lamassu_crypto::SecretBytes;
use lamassu_format::header::NameMode;
use lamassu_format::{Domain, Geometry, Suite, name};
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, Material, NewSlot, NewVault, SlotKind, Update, Zone, cost, create_vault, unlock};
use lamassu_vault::Vault;
use std::fs;
use std::path::Path;
use std::sync::Arc;

pub fn key() -> Material {
    Material::new(SlotKind::Raw, SecretBytes::new(vec![7; 32])).unwrap()
}

/// A vault whose history has two entries; the length of the first.
pub fn vault(dir: &Path) -> usize {
    let geometry = Geometry::new(4096, 8).unwrap();
    let (suite, names, domain) = (Suite::Aes, NameMode::Encrypted, Domain::Zone);
    let (zone, created) = (Zone::Private, 1);
    let new = NewVault { domain, suite, geometry, names, name_max: 255, convergent_small_files: true, zone, created };
    let slot = NewSlot { material: &key(), cost: cost::FALLBACK, label: "", created: 1 };
    let (mut header, keys) = create_vault(&new, &slot).unwrap();
    Vault::make_tree(&backend(dir).unwrap(), &header, &keys.key_ring(suite).unwrap()).unwrap();
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

/// A mount of it that is up, but not written down yet.
pub fn served(dir: &Path) -> Arc<Served> {
    let found = Found::at(&Policy::default(), dir).unwrap();
    let keys = unlock(&found.header, &key()).unwrap();
    let unsealed = Unsealed::new(found, keys, Policy::default());
    let opened = unsealed.open_to_serve(options(false), false).unwrap();
    let keeper = Keeper::new(Place::of(dir).unwrap(), options(false), true, Some("/m".into()), Policy::default());
    Served::new(unsealed, opened, keeper).unwrap()
}
