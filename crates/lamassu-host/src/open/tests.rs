use super::*;
use crate::rotation::rotate;
use crate::testing::{anchored, key, vault};
use lamassu_crypto::SecretBytes;
use lamassu_keys::{Event, NewSlot, Tier, Update, cost, unlock};
use std::cell::Cell;
use std::fs;

/// A vault in a directory, with and without an anchor.
fn both(dir: &Path) -> [(PathBuf, Policy); 2] {
    let unanchored = dir.join("u");
    fs::create_dir(&unanchored).unwrap();
    vault(&unanchored);
    [anchored(dir), (unanchored, Policy::default())]
}

/// The vault as a command has it that has its key, but has not opened it yet.
fn unsealed(dir: &Path, policy: &Policy) -> Unsealed {
    let found = Found::at(policy, dir).unwrap();
    let keys = unlock(&found.header, &key()).unwrap();
    Unsealed::new(found, keys, policy.clone())
}

/// Another process replaces the header.
fn replace(dir: &Path, policy: &Policy, change: impl FnOnce(&mut Unlocked, &mut VaultHeader) -> Event) {
    let update = Update::begin(&dir.join(name::HEADER), &policy.witness()).unwrap();
    let mut header: VaultHeader = update.read().unwrap();
    let mut keys = unlock(&header, &key()).unwrap();
    let event = change(&mut keys, &mut header);
    update.record(&mut header, &keys, &[event]).unwrap();
}

fn rotate_outer(dir: &Path, policy: &Policy) {
    replace(dir, policy, |keys, header| rotate(keys, header, Tier::Outer, false, None).unwrap());
}

fn epochs(unsealed: &Unsealed) -> usize {
    unsealed.keys.keychain().outer().len()
}

#[test]
fn a_vault_is_opened_with_the_epochs_that_were_added_since_its_header_was_read() {
    let dir = tempfile::tempdir().unwrap();
    for (place, policy) in both(dir.path()) {
        for (read_only, count) in [(false, 2), (true, 3)] {
            let mut waits = unsealed(&place, &policy);
            rotate_outer(&place, &policy);
            drop(waits.open(options(read_only)).unwrap());
            assert_eq!(epochs(&waits), count);
            assert!(waits.found.header == Found::at(&policy, &place).unwrap().header);
        }
    }
}

#[test]
fn a_tree_without_its_anchor_is_opened_with_the_present_epochs_too() {
    let dir = tempfile::tempdir().unwrap();
    for (place, policy) in both(dir.path()) {
        let mut waits = unsealed(&place, &policy);
        rotate_outer(&place, &policy);
        waits.open_unanchored().unwrap().close().unwrap();
        assert_eq!(epochs(&waits), 2);
    }
}

/// The tree is opened while a rotation is under way. Afterwards none can be.
#[test]
fn without_an_anchor_the_header_is_compared_when_the_vault_is_locked() {
    let dir = tempfile::tempdir().unwrap();
    let [_, (place, policy)] = both(dir.path());
    let rotations = Cell::new(0);
    let mut opens = unsealed(&place, &policy);
    let opened = opens.open_over(options(false), |dir| {
        if rotations.replace(rotations.get() + 1) < 2 {
            rotate_outer(dir, &policy);
        }
        backend(dir)
    });
    opened.unwrap().vault.close().unwrap();
    assert_eq!((rotations.get(), epochs(&opens)), (3, 3));
}

/// The newest header decides who may open the vault. The store was honest, so that is not called outdated.
#[test]
fn a_key_that_was_removed_meanwhile_opens_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for (place, policy) in both(dir.path()) {
        let mut waits = unsealed(&place, &policy);
        let material = Material::new(SlotKind::Raw, SecretBytes::new(vec![8; 32])).unwrap();
        let slot = NewSlot { material: &material, cost: cost::FALLBACK, label: "", created: 1 };
        replace(&place, &policy, |keys, header| {
            let (id, _) = keys.change_slot(header, keys.slot(), &slot).unwrap();
            Event::new(lamassu_keys::history::EventKind::SlotChanged).slot(id)
        });
        let refused = waits.open(options(false)).map(drop).unwrap_err();
        let is_wrong = matches!(refused.innermost(), Error::Key(KeyError::WrongKey { .. }));
        assert!(is_wrong, "{refused}");
    }
}

#[test]
fn an_older_header_in_the_place_of_the_newest_stays_outdated() {
    let dir = tempfile::tempdir().unwrap();
    let (place, policy) = anchored(dir.path());
    let file = place.join(name::HEADER);
    let older = fs::read(&file).unwrap();
    rotate_outer(&place, &policy);
    let newest = fs::read(&file).unwrap();
    let mut waits = unsealed(&place, &policy);
    fs::write(&file, &older).unwrap();
    // It is the store's header that is outdated, and not the one that was read.
    waits.open(options(true)).unwrap();
    let mut waits = unsealed(&place, &policy);
    let refused = waits.open(options(true)).map(drop).unwrap_err();
    assert!(is_older_header(&refused), "{refused}");
    fs::write(&file, newest).unwrap();
    waits.open(options(true)).unwrap();
    // Nothing else that the store shows then is another answer.
    fs::write(&file, older).unwrap();
    let mut waits = unsealed(&place, &policy);
    fs::write(&file, "no header").unwrap();
    assert!(is_older_header(&waits.open(options(true)).map(drop).unwrap_err()));
    fs::remove_file(&file).unwrap();
    assert!(is_older_header(&waits.open(options(true)).map(drop).unwrap_err()));
}
