//! Changes of key slots, of an open vault ([`add`], [`remove`], [`replace`]) and of a header alone ([`SlotChange`]).
//!
//! A header is changed under its update lock, which is taken before the header is read. Each change returns the event
//! for the history.

use crate::error::At;
use crate::{Error, Place, Policy, Result};
use lamassu_crypto::KeyRing;
use lamassu_format::header::{Header, Slot, VaultHeader, VaultId};
use lamassu_format::name;
use lamassu_keys::dataset::{inherits, parent_epoch};
use lamassu_keys::history::EventKind;
use lamassu_keys::{
    Argon2Params, Event, KeyError, Material, NewSlot, Removed, Role, Terms, Unlocked, Update, Witness, header_file,
    unix_now, unlock_by_parent,
};
use lamassu_vault::VaultError;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Checks that a label can be stored and printed.
///
/// # Errors
/// [`Error::Member`].
pub fn check_label(label: &str) -> Result<()> {
    let is_shown_as_it_is = !label.chars().any(is_unsafe);
    if is_shown_as_it_is && lamassu_format::header::check_label(label).is_ok() {
        return Ok(());
    }
    let rule = "at most 255 bytes, without control characters and those that set the direction of what follows";
    Err(Error::Member { option: "--label", rule })
}

/// Whether a character affects the line that it stands in: control characters, line and paragraph separators, and those
/// that set the direction of text.
pub fn is_unsafe(c: char) -> bool {
    const DIRECTIONS: [std::ops::RangeInclusive<char>; 2] = ['\u{202a}'..='\u{202e}', '\u{2066}'..='\u{2069}'];
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}') || DIRECTIONS.iter().any(|range| range.contains(&c))
}

/// The history's event about a slot.
pub fn about<H: Header>(kind: EventKind, id: u32, header: &H) -> Event {
    let event = Event::new(kind).slot(id);
    match header.keys().slot(id) {
        Some(slot) => {
            let event = event.detail("kind", slot.kind.name()).detail("label", &slot.label);
            if slot.role == Role::Use { event.detail("role", "use") } else { event }
        }
        None => event,
    }
}

/// Adds a slot. Returns its number, and the event.
///
/// # Errors
/// [`Error::Key`].
pub fn add<H: Header + Clone>(
    keys: &Unlocked,
    header: &mut H,
    new: &NewSlot<'_>,
    terms: Terms,
) -> Result<(u32, Event)> {
    let id = keys.add_slot_on(header, new, terms)?;
    Ok((id, about(EventKind::SlotAdded, id, header)))
}

/// Removes a slot. The event describes it.
///
/// # Errors
/// [`Error::Key`].
pub fn remove<H: Header + Clone>(keys: &Unlocked, header: &mut H, id: u32) -> Result<(Removed, Event)> {
    let event = about(EventKind::SlotRemoved, id, header);
    Ok((keys.remove_slot(header, id)?, event))
}

/// A slot that replaces another one. `None` keeps the old slot's value.
#[derive(Clone, Copy, Debug)]
pub struct Replacement<'a> {
    /// the new key material
    pub material: &'a Material,
    /// cost, for passphrases
    pub cost: Argon2Params,
    /// label
    pub label: Option<&'a str>,
    /// whether it may change slots
    pub role: Option<Role>,
    /// when users are warned to renew it, in seconds since 1970; `None`: never
    pub expires: Option<u64>,
}

/// Replaces a slot. Returns the new one's number, a description of the old one, and the event.
///
/// # Errors
/// [`KeyError::NoSlot`] and others of keys.
pub fn replace<H: Header + Clone>(
    keys: &Unlocked,
    header: &mut H,
    old: u32,
    new: &Replacement<'_>,
) -> Result<(u32, Removed, Event)> {
    let there = slot(header, old)?;
    let label = new.label.map_or_else(|| there.label.clone(), Into::into);
    let terms = Terms { role: new.role.unwrap_or(there.role), expires: new.expires };
    let made = NewSlot { material: new.material, cost: new.cost, label: &label, created: unix_now() };
    let (id, removed) = keys.change_slot_on(header, old, &made, terms)?;
    Ok((id, removed, about(EventKind::SlotChanged, id, header).detail("instead_of", old)))
}

fn slot<H: Header>(header: &H, id: u32) -> Result<&Slot> {
    Ok(header.keys().slot(id).ok_or(KeyError::NoSlot { id })?)
}

/// A header of a vault or a zone whose slots are about to be changed, once. No other process changes it meanwhile.
pub struct SlotChange<H> {
    policy: Policy,
    file: PathBuf,
    update: Update,
    header: H,
}

impl<H: Header + Clone> SlotChange<H> {
    /// Takes the update lock of the header in `file`, then reads it.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn begin(policy: &Policy, file: &Path) -> Result<SlotChange<H>> {
        let update = Update::begin(file, &policy.witness())?;
        let header = update.read()?;
        Ok(SlotChange { policy: policy.clone(), file: file.into(), update, header })
    }

    /// The header before the change.
    pub fn header(&self) -> &H {
        &self.header
    }

    /// Refuses a missing slot, before a key is asked for.
    ///
    /// # Errors
    /// [`KeyError::NoSlot`].
    pub fn has(&self, id: u32) -> Result<()> {
        slot(&self.header, id).map(drop)
    }

    /// Adds a slot, and returns its number.
    ///
    /// # Errors
    /// Those of keys and of the header's file.
    pub fn add(mut self, keys: &Unlocked, new: &NewSlot<'_>, terms: Terms) -> Result<u32> {
        let (id, event) = add(keys, &mut self.header, new, terms)?;
        self.record(keys, event)?;
        Ok(id)
    }

    /// Removes a slot.
    ///
    /// # Errors
    /// As [`SlotChange::add`].
    pub fn remove(mut self, keys: &Unlocked, id: u32) -> Result<Removed> {
        let (removed, event) = remove(keys, &mut self.header, id)?;
        self.record(keys, event)?;
        Ok(removed)
    }

    /// Removes the slot of a recovery key whose words could not be shown.
    ///
    /// # Errors
    /// As [`SlotChange::add`].
    pub fn remove_unshown(mut self, keys: &Unlocked, id: u32) -> Result<()> {
        let _no_copy_opens_it = keys.remove_slot(&mut self.header, id)?;
        let event = Event::new(EventKind::SlotRemoved).slot(id).detail("why", "its words could not be printed");
        // It undoes a change: a signal that came meanwhile must not prevent that.
        self.record_anyway(keys, event).map(drop)
    }

    /// Replaces a slot, and returns the number of the new one.
    ///
    /// # Errors
    /// As [`replace`], and those of the header's file.
    pub fn replace(mut self, keys: &Unlocked, old: u32, new: &Replacement<'_>) -> Result<(u32, Removed)> {
        let (id, removed, event) = replace(keys, &mut self.header, old, new)?;
        self.record(keys, event)?;
        Ok((id, removed))
    }

    fn record(self, keys: &Unlocked, event: Event) -> Result<H> {
        self.policy.go_through()?;
        self.record_anyway(keys, event)
    }

    fn record_anyway(mut self, keys: &Unlocked, event: Event) -> Result<H> {
        if H::IS_VAULT {
            let dir = self.file.parent().unwrap_or(Path::new("."));
            self.policy.refuse_older_anchor(&header_file::read(&self.file)?, keys, dir)?;
        }
        self.update.record(&mut self.header, keys, &[event])?;
        Ok(self.header)
    }
}

impl SlotChange<VaultHeader> {
    /// Makes the slot that `material` opens the administrator of a vault without one. Returns the new header.
    ///
    /// # Errors
    /// [`KeyError::HasAdministrator`]; as [`SlotChange::add`].
    pub fn make_administrator(mut self, keys: &mut Unlocked, material: &Material) -> Result<VaultHeader> {
        let public = keys.make_administrator(&mut self.header, material)?;
        let event = Event::new(EventKind::AdminSet).slot(keys.slot()).detail("key", crate::hex(&public.0));
        self.record(keys, event)
    }
}

/// Seals the parent slot of a dataset under the newest K_out of the vault around it. `ring`: that vault's loaded keys.
/// A dataset that inherits nothing is left alone. `place` must hold the dataset with this id.
///
/// # Errors
/// Those of the header's file; [`lamassu_keys::KeyError::OtherParent`]; [`VaultError::Stale`]: the directory has
/// another dataset.
pub fn reseal_parent_slot(
    (place, id): (&Place, VaultId),
    ring: &KeyRing,
    uid: u32,
    witness: &Arc<dyn Witness>,
) -> Result<()> {
    let update = Update::begin(&place.file(name::HEADER), witness)?;
    let mut header: VaultHeader = update.read()?;
    if header.id() != id {
        return Err(VaultError::Stale.into());
    }
    if !inherits(&header) || parent_epoch(&header, ring) == Some(ring.newest().1) {
        return Ok(());
    }
    let keys = unlock_by_parent(&header, ring).at(place.dir())?;
    if keys.reseal_parent_slot(&mut header, ring)? {
        let event = Event::new(EventKind::SlotChanged)
            .by(uid)
            .slot(keys.slot())
            .detail("what", "sealed under the newest key of its parent");
        update.record(&mut header, &keys, &[event])?;
    }
    Ok(())
}
