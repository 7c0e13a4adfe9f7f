//! Opens headers under a policy. The front-end gets key material from a source or a person.

use crate::error::At;
use crate::pins::Succession;
use crate::policy::Policy;
use crate::{Error, Result};
use lamassu_format::header::{Header, PublicKey, SlotKind, VaultHeader, VaultId};
use lamassu_format::name;
use lamassu_keys::dataset::{inherits, vaults_above};
use lamassu_keys::{Attempt, KeyError, Material, Slots, Unlocked, admin, header_file, unlock_by_parent};
use std::path::{Path, PathBuf};

/// The most vaults above a dataset that are tried: the store can nest directories without limit.
const ABOVE_MAX: usize = 64;

/// The directories above, nearest first.
type Above<'a> = dyn Iterator<Item = PathBuf> + 'a;

impl Policy {
    /// Opens the header in `dir` (for a zone: in that file) by its own slots or, for a dataset, by the vault around it
    /// in the store. `named`: the one slot to try.
    ///
    /// # Errors
    /// [`Error::NotApproved`], [`KeyError::WrongKey`] and others of keys, those of [`crate::Pins::check`].
    pub fn unlock<H: Header>(
        &self,
        header: &H,
        material: &Material,
        named: Option<u32>,
        dir: &Path,
    ) -> Result<(Unlocked, Option<Succession>)> {
        self.check_ciphers(header)?;
        let above = &mut vaults_above(dir).take(ABOVE_MAX);
        let unlocked = self.open(header, &mut self.attempt(material), named, above).at(dir)?;
        let succession = self.pins.check(header).at(dir)?;
        self.notes.opened(&header.keys().id, unlocked.slot());
        Ok((unlocked, succession))
    }

    /// Opens a header by its own slots alone.
    ///
    /// # Errors
    /// [`Error::NotApproved`]; [`KeyError::WrongKey`] and others of keys.
    pub fn try_slots<H: Header>(&self, header: &H, material: &Material, named: Option<u32>) -> Result<Unlocked> {
        self.try_slots_in(header, &mut self.attempt(material), named)
    }

    /// The same as a part of an attempt, whose limits hold for all headers that belong to it.
    ///
    /// # Errors
    /// As [`Policy::try_slots`].
    pub(crate) fn try_slots_in<H: Header>(
        &self,
        header: &H,
        attempt: &mut Attempt<'_>,
        named: Option<u32>,
    ) -> Result<Unlocked> {
        self.check_ciphers(header)?;
        let pinned = self.pinned_for(header, attempt.material())?;
        Ok(attempt.open_signed(header, self.slots(&header.keys().id, named), &pinned)?)
    }

    /// The administrators who are known for a vault, where a token may need one to vouch for its slot.
    fn pinned_for<H: Header>(&self, header: &H, material: &Material) -> Result<Vec<PublicKey>> {
        let (true, Material::Token(_)) = (H::IS_VAULT, material) else { return Ok(Vec::new()) };
        let id = &VaultId(header.keys().id);
        let mut pinned = self.pins.known(id)?;
        match self.pins.of(id) {
            // A given zone file is about the vault that the command names, not about its datasets.
            Err(Error::NoZonePin { .. }) => {}
            given => pinned.extend(given?),
        }
        Ok(pinned)
    }

    /// Refuses a header whose suite, or whose keys, the policy does not allow.
    ///
    /// # Errors
    /// [`Error::NotApproved`].
    pub(crate) fn check_ciphers<H: Header>(&self, header: &H) -> Result<()> {
        self.check_suite(header.suite())?;
        self.check_oblivious(header.keys().keychain.oblivious)
    }

    pub(crate) fn attempt<'a>(&self, material: &'a Material) -> Attempt<'a> {
        Attempt::new(material).with_any_memory(self.allows_any_memory())
    }

    /// The named slot, or all, starting with the one that opened last.
    fn slots(&self, id: &[u8; 16], named: Option<u32>) -> Slots {
        match (named, self.notes.of(id).last) {
            (Some(slot), _) => Slots::Only(slot),
            (None, Some(slot)) => Slots::First(slot),
            (None, None) => Slots::All,
        }
    }

    /// Opens a header by its own slots, or by the vault above, which may itself be opened by the one above it. The way
    /// that opened last comes first. All of this counts as one attempt.
    fn open<H: Header>(
        &self,
        header: &H,
        attempt: &mut Attempt<'_>,
        named: Option<u32>,
        above: &mut Above<'_>,
    ) -> Result<Unlocked> {
        let keys = header.keys();
        let goes_above = named.is_none() && inherits(header);
        let last = self.notes.of(&keys.id).last.and_then(|id| keys.slot(id));
        let begins_above = goes_above && last.is_some_and(|slot| slot.kind == SlotKind::Parent);
        let mut destroyed = None;
        if begins_above {
            match self.by_parent(header, attempt, above) {
                Ok(Some(opened)) => return Ok(opened),
                Ok(None) => {}
                // Its own slots open it all the same.
                Err(error @ Error::Key(KeyError::Destroyed(_))) => destroyed = Some(error),
                Err(error) => return Err(error),
            }
        }
        let pinned = self.pinned_for(header, attempt.material())?;
        match attempt.open_signed(header, self.slots(&keys.id, named), &pinned) {
            Err(own) if own.is_wrong_key() && goes_above && !begins_above => {
                match self.by_parent(header, attempt, above)? {
                    Some(opened) => Ok(opened),
                    None => Err(own.into()),
                }
            }
            Err(own) if own.is_wrong_key() => Err(destroyed.unwrap_or_else(|| own.into())),
            done => Ok(done?),
        }
    }

    /// Opens a header by the vault above; `None`: there is none, or this key does not open it.
    fn by_parent<H: Header>(
        &self,
        header: &H,
        attempt: &mut Attempt<'_>,
        above: &mut Above<'_>,
    ) -> Result<Option<Unlocked>> {
        let Some(dir) = above.next() else { return Ok(None) };
        let Ok(parent) = header_file::read::<VaultHeader>(&dir.join(name::HEADER)) else { return Ok(None) };
        self.check_ciphers(&parent)?;
        let keys = match self.open(&parent, attempt, None, above) {
            Ok(keys) => keys,
            Err(Error::Key(error)) if error.is_wrong_key() => return Ok(None),
            Err(error) => return Err(error),
        };
        self.notes.opened(&parent.keys().id, keys.slot());
        Ok(Some(unlock_by_parent(header, &keys.key_ring(parent.suite())?)?))
    }

    /// Verifies the administrator's signature over a header, and that it is the pinned administrator's.
    ///
    /// # Errors
    /// Those of the signature and of [`crate::Pins::of`].
    pub fn check_signed(&self, header: &VaultHeader) -> Result<()> {
        admin::verify_signature(header)?;
        admin::check_pinned(header, &self.pins.of(&header.id())?)?;
        Ok(())
    }

    /// Refuses a destroyed vault. Anyone who can write to the store can claim that keys were destroyed. So if the vault
    /// has an administrator, the pinned one must have signed the header.
    ///
    /// # Errors
    /// [`KeyError::Destroyed`]; those of [`Policy::check_signed`].
    pub fn refuse_destroyed(&self, header: &VaultHeader) -> Result<()> {
        let Some(destroyed) = header.destroyed() else { return Ok(()) };
        self.check_signed(header)?;
        Err(KeyError::Destroyed(destroyed).into())
    }
}
