//! The administrator's signature over a header (§4), and what pins it.
//!
//! Who opens a use-only slot knows the file key, and so can compute the header's MAC, but not this signature. Each of three finds a header that such a person
//! has changed: the signature itself, which has to verify under the key the header names; an administrator's slot, which holds the seed of the right key; and
//! whoever has pinned the right key, in case all of that was exchanged.

use crate::KeyError;
use lamassu_crypto::{Secret, sign};
use lamassu_format::header::{Header, Role};

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

/// Verifies the signature, where the header has an administrator, and that it is the one whose seed an administrator's slot held.
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

/// Verifies the signature alone, where there is one. Takes no key; so says nothing of the rest of the header but that it is what was signed.
///
/// # Errors
/// [`KeyError::SignatureInvalid`].
pub fn verify_signature<H: Header>(header: &H) -> Result<(), KeyError> {
    verify(header, None)
}

/// Whether the administrator of a header whose signature was verified is one of `pinned`. Nothing pinned: whoever it is.
///
/// # Errors
/// [`KeyError::OtherAdministrator`].
pub fn check_pinned<H: Header>(header: &H, pinned: &[Public]) -> Result<(), KeyError> {
    let found = header.keys().admin.as_ref().map(|admin| admin.public);
    if pinned.is_empty() || found.is_some_and(|found| pinned.contains(&found)) {
        return Ok(());
    }
    Err(KeyError::OtherAdministrator { found: found.map(|key| data_encoding::HEXLOWER.encode(&key)) })
}

/// Whether somebody can still change the header, now that slot `id` is gone.
pub(crate) fn is_left<H: Header>(header: &H, id: u32) -> Result<(), KeyError> {
    let keys = header.keys();
    match keys.admin.is_some() && keys.slots.iter().all(|s| s.role == Role::Use) {
        true => Err(KeyError::LastAdministrator { id }),
        false => Ok(()),
    }
}
