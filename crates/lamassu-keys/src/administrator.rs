//! The administrator of a header: named, exchanged for another, pinned.

use crate::admin::succession;
use crate::slot::refuse_parent;
use crate::{KeyError, Material, NewSlot, Terms, Unlocked};
use lamassu_crypto::sign;
use lamassu_format::header::{Admin, AdminPin, Header, Predecessor, PublicKey, Role, Slot, ZoneFile};

/// The administrator's key was exchanged.
#[derive(Clone, Debug)]
#[must_use = "the user has to be told which slots are gone"]
pub struct Exchanged {
    /// the new public key
    pub public: PublicKey,
    /// the one before
    pub before: PublicKey,
    /// other administrators' slots: they held the old seed, and the new one could not be given to them
    pub gone: Vec<Slot>,
}

impl Unlocked {
    /// Gives a header an administrator's key: the slot that these keys opened, rebuilt from the same material, is the
    /// administrator's, and every other is for use alone until it is changed.
    ///
    /// # Errors
    /// [`KeyError::HasAdministrator`], [`KeyError::NoSlot`], [`KeyError::ParentSlot`], and as [`Unlocked::add_slot`].
    /// `header` is then unchanged.
    pub fn make_administrator<H: Header + Clone>(
        &mut self,
        header: &mut H,
        material: &Material,
    ) -> Result<PublicKey, KeyError> {
        self.owns(header)?;
        if header.keys().admin.is_some() {
            return Err(KeyError::HasAdministrator);
        }
        refuse_parent(header, self.slot())?;
        let mut next = header.clone();
        let keys = next.keys_mut();
        let at = keys.slots.iter().position(|s| s.id == self.slot()).ok_or(KeyError::NoSlot { id: self.slot() })?;
        keys.slots.iter_mut().for_each(|s| s.role = Role::Use);
        let old = keys.slots[at].clone();
        let cost = old.argon2.unwrap_or(crate::cost::FALLBACK);
        let again = NewSlot { material, cost, label: &old.label, created: old.created };
        let seed = sign::seed()?;
        let public = PublicKey(sign::public(&seed));
        keys.admin = Some(Admin { public, signature: [0; 64], before: Vec::new() });
        let signing = self.with_seed(seed);
        keys.slots[at] =
            signing.make_slot(old.id, &again, Terms { role: Role::Administrator, expires: old.expires })?;
        signing.sign(&mut next);
        next.to_json()?;
        *header = next;
        *self = signing;
        Ok(public)
    }

    /// Gives the administrator a new key, signed by the old one. The slot that these keys opened is rebuilt from the
    /// same material; other administrators' slots go, since their secrets are not known, that of a dataset's parent
    /// too; use-only slots stay. A reader that has seen the new key takes no header that is signed with the old seed.
    ///
    /// # Errors
    /// [`KeyError::NoAdministrator`], [`KeyError::NotAdministrator`], [`KeyError::NoSlot`], [`KeyError::ParentSlot`],
    /// and as [`Unlocked::add_slot`]. Both are then unchanged.
    pub fn exchange_administrator<H: Header + Clone>(
        &mut self,
        header: &mut H,
        material: &Material,
    ) -> Result<Exchanged, KeyError> {
        self.may_change(header)?;
        refuse_parent(header, self.slot())?;
        let (Some(admin), Some(old_seed)) = (&header.keys().admin, self.seed()) else {
            return Err(KeyError::NoAdministrator);
        };
        let fresh = self.with_seed(sign::seed()?);
        let public = fresh.seed().map(|seed| PublicKey(sign::public(seed))).expect("it was given one");
        let mut admin = admin.clone();
        let before = admin.public;
        let signature = sign::sign(old_seed, &succession(&self.id(), &public));
        admin.before.push(Predecessor { public: before, signature });
        admin.before.drain(..admin.before.len().saturating_sub(Admin::BEFORE_MAX));
        admin.public = public;
        let mut next = header.clone();
        let keys = next.keys_mut();
        keys.admin = Some(admin);
        let is_other = |slot: &mut Slot| slot.role == Role::Administrator && slot.id != self.slot();
        let gone: Vec<Slot> = keys.slots.extract_if(.., is_other).collect();
        let old = keys.slots.iter_mut().find(|s| s.id == self.slot()).ok_or(KeyError::NoSlot { id: self.slot() })?;
        let cost = old.argon2.unwrap_or(crate::cost::FALLBACK);
        let again = NewSlot { material, cost, label: &old.label, created: old.created };
        *old = fresh.make_slot(old.id, &again, Terms { role: Role::Administrator, expires: old.expires })?;
        fresh.sign(&mut next);
        next.to_json()?;
        *header = next;
        *self = fresh;
        Ok(Exchanged { public, before, gone })
    }

    /// Pins a vault's administrator in a zone file, which these keys opened.
    ///
    /// # Errors
    /// [`KeyError::HeaderAltered`], [`KeyError::OtherHeader`]; [`KeyError::Header`] where there are too many. `zone` is
    /// then unchanged.
    pub fn pin(&self, zone: &mut ZoneFile, pin: AdminPin) -> Result<(), KeyError> {
        self.edit(zone, |next| {
            next.set_pin(pin);
            Ok(())
        })
    }
}
