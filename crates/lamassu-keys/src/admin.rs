//! The administrator's signature over a header (§4), and what pins it.
//!
//! The holder of a use-only slot knows the file key, and so can compute the header's MAC, but not this signature. Three
//! things reveal a header that such a person has changed: the signature itself, which has to verify under the key that
//! the header names; an administrator's slot, which holds the seed of the right key; and a pin of the right key, in
//! case all of that was exchanged.
//!
//! The key can be exchanged for another, which the old one signs: pins of the old one lead to the new one. A holder of
//! the old seed can sign another successor, for users whose pins have not followed yet.

use crate::unlock::refuse_parent;
use crate::{KeyError, Material, NewSlot, Terms, Unlocked};
use lamassu_crypto::{Secret, sign};
use lamassu_format::header::{Admin, AdminPin, Header, Predecessor, Role, Slot, ZoneFile};

/// Public key of an administrator.
pub type Public = [u8; 32];

fn message<H: Header>(header: &H) -> Vec<u8> {
    [&b"lamassu v1 admin"[..], &header.signature_input()].concat()
}

/// Signs, where the header has an administrator.
pub(crate) fn sign<H: Header>(header: &mut H, seed: &Secret<32>) {
    let public = sign::public(seed);
    match &mut header.keys_mut().admin {
        Some(admin) => admin.public = public,
        None => return,
    }
    let signature = sign::sign(seed, &message(header));
    if let Some(admin) = &mut header.keys_mut().admin {
        admin.signature = signature;
    }
}

/// Verifies the signature, where the header has an administrator, and that it is the one whose seed an administrator's
/// slot held.
pub(crate) fn verify<H: Header>(header: &H, seed: Option<&Secret<32>>) -> Result<(), KeyError> {
    let Some(admin) = &header.keys().admin else {
        // The slot is an administrator's, so there was one.
        return if seed.is_some() { Err(KeyError::SignatureInvalid) } else { Ok(()) };
    };
    if seed.is_some_and(|seed| sign::public(seed) != admin.public) {
        return Err(KeyError::SignatureInvalid);
    }
    sign::verify(&admin.public, &message(header), &admin.signature).map_err(|_| KeyError::SignatureInvalid)
}

/// Verifies the signature alone, where there is one. Takes no key; so says nothing of the rest of the header but that
/// it is what was signed.
///
/// # Errors
/// [`KeyError::SignatureInvalid`].
pub fn verify_signature<H: Header>(header: &H) -> Result<(), KeyError> {
    verify(header, None)
}

/// Whether the administrator of a header whose signature was verified is one of `pinned`, or has followed one, each
/// having signed the next. Returns the pinned key that was followed. If nothing is pinned, any administrator is
/// accepted.
///
/// # Errors
/// [`KeyError::OtherAdministrator`].
pub fn check_pinned<H: Header>(header: &H, pinned: &[Public]) -> Result<Option<Public>, KeyError> {
    let admin = header.keys().admin.as_ref();
    if pinned.is_empty() || admin.is_some_and(|admin| pinned.contains(&admin.public)) {
        return Ok(None);
    }
    let found = admin.map(|admin| data_encoding::HEXLOWER.encode(&admin.public));
    let followed = admin.and_then(|admin| followed(&header.keys().id, admin, pinned));
    followed.map(Some).ok_or(KeyError::OtherAdministrator { found })
}

/// What an earlier key signs for the one after it.
fn succession(id: &[u8; 16], next: &Public) -> Vec<u8> {
    [&b"lamassu v1 admin successor"[..], id, next].concat()
}

/// The latest of `pinned` from which every key up to the present one was signed by the one before.
fn followed(id: &[u8; 16], admin: &Admin, pinned: &[Public]) -> Option<Public> {
    let mut next = admin.public;
    for before in admin.before.iter().rev() {
        sign::verify(&before.public, &succession(id, &next), &before.signature).ok()?;
        if pinned.contains(&before.public) {
            return Some(before.public);
        }
        next = before.public;
    }
    None
}

/// The administrator's key was exchanged.
#[derive(Clone, Debug)]
#[must_use = "the user has to be told which slots are gone"]
pub struct Exchanged {
    /// the new public key
    pub public: Public,
    /// the one before
    pub before: Public,
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
    ) -> Result<[u8; 32], KeyError> {
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
        let public = sign::public(&seed);
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
        let public = fresh.seed().map(sign::public).expect("it was given one");
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

/// Whether a slot is left that can change the header, now that slot `id` is gone.
pub(crate) fn is_left<H: Header>(header: &H, id: u32) -> Result<(), KeyError> {
    let keys = header.keys();
    match keys.admin.is_some() && keys.slots.iter().all(|s| s.role == Role::Use) {
        true => Err(KeyError::LastAdministrator { id }),
        false => Ok(()),
    }
}
