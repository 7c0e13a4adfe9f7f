//! What a new slot is made of.

use crate::{KeyError, Material};
use lamassu_format::header::{Argon2Params, Header, Role, SlotKind};

/// A slot to make.
#[derive(Clone, Copy, Debug)]
pub struct NewSlot<'a> {
    /// the material that will open it
    pub material: &'a Material,
    /// cost of Argon2id; used for passphrases only
    pub cost: Argon2Params,
    /// for people; at most 255 bytes without control characters
    pub label: &'a str,
    /// seconds since 1970
    pub created: u64,
}

/// The terms of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// whether its holder may change the header; without an administrator in the header, every holder may
    pub role: Role,
    /// seconds since 1970 from which users are warned to replace it
    pub expires: Option<u64>,
}

impl Default for Terms {
    fn default() -> Self {
        Terms { role: Role::Administrator, expires: None }
    }
}

/// The parent slot has its own operations: a key in its place would silently end the inheritance.
pub(crate) fn refuse_parent<H: Header>(header: &H, id: u32) -> Result<(), KeyError> {
    match header.keys().slot(id) {
        Some(slot) if slot.kind == SlotKind::Parent => Err(KeyError::ParentSlot { id }),
        Some(_) | None => Ok(()),
    }
}
