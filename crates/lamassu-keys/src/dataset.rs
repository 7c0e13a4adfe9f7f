//! Datasets: vaults that lie in a directory of another vault, their parent (§4).
//!
//! A dataset has a keychain of its own, and always a K_out of its own. It *inherits* its wrapping key by a parent slot:
//! the slot's secret is sealed as a record under a K_out of the parent, so opening the parent opens the dataset,
//! whatever happens to the parent's slots, passphrases and file key.
//!
//! Invariant: a header has at most one parent slot. Without it, or without the parent's K_out, only the dataset's own
//! keys open it.

use crate::create::{FIRST_SLOT, assemble_with, random_id};
use crate::unlock::{INFO, unwrap};
use crate::{KeyError, Keychain, NewSlot, Removed, Role, Terms, Unlocked};
use lamassu_crypto::outer::RecordKind;
use lamassu_crypto::ring::{EpochNumber, KeyRing};
use lamassu_crypto::{Secret, SecretBytes, wrap};
use lamassu_format::header::{
    Caching, Header, NameMode, PARENT_RECORD_LEN, Slot, SlotKind, VaultHeader, VaultId, VaultParams, Verified,
};
use lamassu_format::{Compression, Domain, Geometry, Suite, name};
use std::path::{Path, PathBuf};

/// A dataset to make.
#[derive(Clone, Copy, Debug)]
pub struct NewDataset<'a> {
    /// suite; with [`Domain::Zone`] that of the parent
    pub suite: Suite,
    /// block size and transient slots
    pub geometry: Geometry,
    /// how names are kept
    pub names: NameMode,
    /// the bounds within which equal blocks deduplicate; [`Domain::Zone`]: with the parent, whose K_in it gets
    pub domain: Domain,
    /// compression of its blocks
    pub compression: Option<Compression>,
    /// what is verified on reads; `None`: as in the parent
    pub integrity: Option<Verified>,
    /// what stays in the page cache; `None`: as in the parent
    pub cache: Option<Caching>,
    /// whether the parent's keys open it
    pub inherit: bool,
    /// a key of its own; required unless it inherits
    pub slot: Option<NewSlot<'a>>,
    /// seconds since 1970
    pub created: u64,
}

/// Makes the header of a dataset in the vault of `parent`; `keys` opened that, and `ring` has its loaded keys. Nothing
/// is written.
///
/// # Errors
/// [`KeyError::NoParentSlot`] if nothing would open it; [`KeyError::ZoneSuite`] for a K_in of another suite;
/// [`KeyError::NoZoneToShare`] for the domain zone in a parent with another domain; [`KeyError::HeaderAltered`] or
/// [`KeyError::OtherHeader`] for the parent; [`KeyError::Header`] for values out of bounds, [`KeyError::Argon2`],
/// [`KeyError::NoRandom`].
pub fn create_dataset(
    parent: &VaultHeader,
    keys: &Unlocked,
    ring: &KeyRing,
    new: &NewDataset<'_>,
) -> Result<(VaultHeader, Unlocked), KeyError> {
    keys.owns(parent)?;
    let id = random_id()?;
    let (zone, keychain) = match new.domain {
        Domain::Zone if parent.domain() != Domain::Zone => {
            return Err(KeyError::NoZoneToShare { domain: parent.domain() });
        }
        Domain::Zone if new.suite != parent.suite() => {
            return Err(KeyError::ZoneSuite { zone: parent.suite(), wanted: new.suite });
        }
        Domain::Zone => (parent.zone(), Keychain::sharing_inner(keys.keychain(), new.created)?),
        Domain::Family | Domain::File | Domain::None => {
            (VaultId(id).private_zone(), Keychain::generate(true, new.created)?)
        }
    };
    let params = VaultParams {
        zone,
        suite: new.suite,
        geometry: new.geometry,
        names: new.names,
        name_max: parent.params().name_max,
        convergent_small_files: parent.convergent_small_files() && !new.domain.is_salted(),
        domain: new.domain,
        created: new.created,
    };
    let first = |keys: &Unlocked| match (&new.slot, new.inherit) {
        (Some(slot), _) => keys.make_slot(FIRST_SLOT, slot, Terms::default()),
        (None, true) => keys.make_parent_slot(FIRST_SLOT, ring, new.created),
        (None, false) => Err(KeyError::NoParentSlot),
    };
    let (mut header, unlocked) = assemble_with(id, keychain, first, |keys| {
        let mut header = VaultHeader::new(params, keys);
        header.set_compression(new.compression);
        header.set_integrity(new.integrity);
        header.set_cache(new.cache);
        header
    })?;
    if new.inherit && new.slot.is_some() {
        unlocked.add_parent_slot(&mut header, ring, new.created)?;
    }
    Ok((header, unlocked))
}

/// The parent slot of a header.
fn parent_slot<H: Header>(header: &H) -> Option<(&Slot, &[u8; PARENT_RECORD_LEN])> {
    header.keys().slots.iter().find_map(|slot| Some((slot, slot.parent.as_ref()?)))
}

/// Whether, according to this header, the parent's keys open it.
pub fn inherits<H: Header>(header: &H) -> bool {
    parent_slot(header).is_some()
}

/// The directory of the vault around the one in `dir`, by the store's directories.
pub fn vault_above(dir: &Path) -> Option<PathBuf> {
    vaults_above(dir).next()
}

/// The directories of all vaults around the one in `dir`, nearest first. The path is resolved once: a store can nest
/// directories without limit.
pub fn vaults_above(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let mut above = dir.canonicalize().unwrap_or_default();
    std::iter::from_fn(move || {
        while above.pop() {
            if above.join(name::HEADER).is_file() {
                return Some(above.clone());
            }
        }
        None
    })
}

/// The epoch of the parent's K_out that seals the parent slot; `None`: there is no slot, or no loaded key opens it.
pub fn parent_epoch(header: &VaultHeader, ring: &KeyRing) -> Option<EpochNumber> {
    let (_, record) = parent_slot(header)?;
    ring.record_epoch(RecordKind::ParentSlot, &header.id().0, record)
}

/// Opens a dataset's header with the loaded keys of its parent.
///
/// # Errors
/// [`KeyError::NoParentSlot`], [`KeyError::OtherParent`]; if the slot opens, as [`crate::unlock`].
pub fn unlock_by_parent<H: Header>(header: &H, ring: &KeyRing) -> Result<Unlocked, KeyError> {
    let (slot, record) = parent_slot(header).ok_or(KeyError::NoParentSlot)?;
    let id = header.keys().id;
    let secret = ring.open_record(RecordKind::ParentSlot, &id, record).map_err(|_| KeyError::OtherParent)?;
    let secret = SecretBytes::new(secret);
    let key = wrap::hkdf(secret.expose(), &slot.salt, INFO);
    unwrap(&id, slot, &key).ok_or(KeyError::OtherParent)?.verified(header, slot.id)
}

impl Unlocked {
    /// Lets the keys of the parent open this header.
    ///
    /// # Errors
    /// [`KeyError::HasParentSlot`], and as [`Unlocked::add_slot`]. `header` is then unchanged.
    pub fn add_parent_slot(&self, header: &mut VaultHeader, ring: &KeyRing, created: u64) -> Result<u32, KeyError> {
        if inherits(header) {
            return Err(KeyError::HasParentSlot);
        }
        self.edit(header, |next| Self::push_made(next, |id| self.make_parent_slot(id, ring, created)))
    }

    /// Removes the parent slot.
    ///
    /// # Errors
    /// [`KeyError::NoParentSlot`], and as [`Unlocked::remove_slot`]: not if it is the only slot.
    pub fn remove_parent_slot(&self, header: &mut VaultHeader) -> Result<Removed, KeyError> {
        let id = parent_slot(header).map(|(slot, _)| slot.id).ok_or(KeyError::NoParentSlot)?;
        self.take_slot(header, id)
    }

    /// Seals the secret of the parent slot under the parent's newest K_out, unless it is already. Returns whether
    /// anything changed.
    ///
    /// # Errors
    /// [`KeyError::NoParentSlot`], [`KeyError::OtherParent`], and as [`Unlocked::add_slot`]. `header` is then
    /// unchanged.
    pub fn reseal_parent_slot(&self, header: &mut VaultHeader, ring: &KeyRing) -> Result<bool, KeyError> {
        let (slot, record) = parent_slot(header).ok_or(KeyError::NoParentSlot)?;
        let (slot, context) = (slot.id, header.id());
        let epoch = ring.record_epoch(RecordKind::ParentSlot, &context.0, record);
        if epoch == Some(ring.newest().1) {
            return Ok(false);
        }
        let secret = ring.open_record(RecordKind::ParentSlot, &context.0, record).map_err(|_| KeyError::OtherParent)?;
        let secret = SecretBytes::new(secret);
        let fresh = seal(&secret, &context.0, ring)?;
        self.edit(header, |next| {
            let slots = &mut next.keys_mut().slots;
            slots.iter_mut().filter(|s| s.id == slot).for_each(|s| s.parent = Some(fresh));
            Ok(true)
        })
    }

    /// Marks in a parent's header that directories of its tree may be datasets. True: the mark is new.
    ///
    /// # Errors
    /// As [`Unlocked::add_slot`].
    pub fn allow_datasets(&self, header: &mut VaultHeader) -> Result<bool, KeyError> {
        if header.has_datasets() {
            return Ok(false);
        }
        self.edit(header, |next| {
            next.allow_datasets();
            Ok(true)
        })
    }

    /// Marks in the header that the vault is anchored. False: it was marked already.
    ///
    /// # Errors
    /// As [`Unlocked::add_slot`].
    pub fn set_anchored(&self, header: &mut VaultHeader) -> Result<bool, KeyError> {
        if header.is_anchored() {
            return Ok(false);
        }
        self.edit(header, |next| {
            next.set_anchored();
            Ok(true)
        })
    }

    /// Sets what is verified on reads, and what stays in the page cache; `None` means as in the parent.
    ///
    /// # Errors
    /// As [`Unlocked::add_slot`].
    pub fn set_properties(
        &self,
        header: &mut VaultHeader,
        integrity: Option<Verified>,
        cache: Option<Caching>,
    ) -> Result<(), KeyError> {
        self.edit(header, |next| {
            next.set_integrity(integrity);
            next.set_cache(cache);
            Ok(())
        })
    }

    /// Sets the compression of new blocks. Stored blocks do not change.
    ///
    /// # Errors
    /// As [`Unlocked::add_slot`].
    pub fn set_compression(&self, header: &mut VaultHeader, compression: Option<Compression>) -> Result<(), KeyError> {
        self.edit(header, |next| {
            next.set_compression(compression);
            Ok(())
        })
    }

    /// An administrator's slot: the parent's keys permit changing the dataset.
    fn make_parent_slot(&self, id: u32, ring: &KeyRing, created: u64) -> Result<Slot, KeyError> {
        let mut salt = [0u8; 32];
        lamassu_crypto::random(&mut salt)?;
        let secret = Secret::<32>::random()?;
        let key = wrap::hkdf(secret.expose(), &salt, INFO);
        let (nonce, wrapped) = self.wrap(&key, id, Role::Administrator)?;
        let content = SecretBytes::filled_by(32, |bytes| bytes.copy_from_slice(secret.expose()));
        Ok(Slot {
            id,
            kind: SlotKind::Parent,
            label: String::new(),
            created,
            salt,
            argon2: None,
            token: None,
            parent: Some(seal(&content, &self.id(), ring)?),
            role: Role::Administrator,
            expires: None,
            nonce,
            wrapped,
        })
    }
}

fn seal(secret: &SecretBytes, context: &[u8; 16], ring: &KeyRing) -> Result<[u8; PARENT_RECORD_LEN], KeyError> {
    let record = ring.outer().seal_record(RecordKind::ParentSlot, context, secret.expose())?;
    record.try_into().map_err(|_| KeyError::OtherParent)
}
