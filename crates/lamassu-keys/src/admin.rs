//! The administrator's signature over a header (§4), and what pins it.
//!
//! The holder of a use-only slot knows the file key, and so can compute the header's MAC, but not this signature. Three
//! things reveal a header that such a person has changed: the signature itself, which has to verify under the key that
//! the header names; an administrator's slot, which holds the seed of the right key; and a pin of the right key, in
//! case all of that was exchanged.
//!
//! The key can be exchanged for another, which the old one signs: pins of the old one lead to the new one. A holder of
//! the old seed can sign another successor, for users whose pins have not followed yet.

use crate::KeyError;
use lamassu_crypto::{Secret, sign};
use lamassu_format::header::{Admin, Header, PublicKey, Role};

fn message<H: Header>(header: &H) -> Vec<u8> {
    [&b"lamassu v1 admin"[..], &header.signature_input()].concat()
}

/// Signs, where the header has an administrator.
pub(crate) fn sign<H: Header>(header: &mut H, seed: &Secret<32>) {
    let public = PublicKey(sign::public(seed));
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
    if seed.is_some_and(|seed| PublicKey(sign::public(seed)) != admin.public) {
        return Err(KeyError::SignatureInvalid);
    }
    sign::verify(&admin.public.0, &message(header), &admin.signature).map_err(|_| KeyError::SignatureInvalid)
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
pub fn check_pinned<H: Header>(header: &H, pinned: &[PublicKey]) -> Result<Option<PublicKey>, KeyError> {
    let admin = header.keys().admin.as_ref();
    if pinned.is_empty() || admin.is_some_and(|admin| pinned.contains(&admin.public)) {
        return Ok(None);
    }
    let found = admin.map(|admin| data_encoding::HEXLOWER.encode(&admin.public.0));
    let followed = admin.and_then(|admin| followed(&header.keys().id, admin, pinned));
    followed.map(Some).ok_or(KeyError::OtherAdministrator { found })
}

/// What an earlier key signs for the one after it.
pub(crate) fn succession(id: &[u8; 16], next: &PublicKey) -> Vec<u8> {
    [&b"lamassu v1 admin successor"[..], id, &next.0].concat()
}

/// The latest of `pinned` from which every key up to the present one was signed by the one before.
fn followed(id: &[u8; 16], admin: &Admin, pinned: &[PublicKey]) -> Option<PublicKey> {
    let mut next = admin.public;
    for before in admin.before.iter().rev() {
        sign::verify(&before.public.0, &succession(id, &next), &before.signature).ok()?;
        if pinned.contains(&before.public) {
            return Some(before.public);
        }
        next = before.public;
    }
    None
}

/// Whether a slot is left that can change the header, now that slot `id` is gone.
pub(crate) fn is_left<H: Header>(header: &H, id: u32) -> Result<(), KeyError> {
    let keys = header.keys();
    match keys.admin.is_some() && keys.slots.iter().all(|s| s.role == Role::Use) {
        true => Err(KeyError::LastAdministrator { id }),
        false => Ok(()),
    }
}
