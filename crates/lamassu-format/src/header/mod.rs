//! The vault header and the zone file (§4): JSON, parsed strictly, and the canonical form under the MAC.
//!
//! Guarantees: a header that [`Header::parse`] returns satisfies every bound of §4, and its canonical form is that of
//! the parsed bytes. So a MAC over [`Header::mac_input`] covers every member.
//!
//! Never: computes or checks a MAC (`lamassu-keys` does), so nothing here is authenticated.

mod argon2;
mod canonical;
mod error;
mod id;
mod json;
mod slot;
mod vault;
mod wire;
mod zone;

pub use argon2::Argon2Params;
pub use canonical::canonical;
pub use error::{HeaderError, JsonFault};
pub use id::{VaultId, ZoneId};
pub use slot::{
    Admin, AdminPin, Destroyed, HistoryHead, HistoryMark, KeyArea, PARENT_RECORD_LEN, Predecessor, PublicKey, Role,
    SealedKeychain, Slot, SlotKind, TokenMechanism, TokenSealed, TokenSignature, TokenSigning, check_label,
};
pub use vault::{Caching, NameMode, VaultHeader, VaultParams, Verified};
pub use zone::{ZoneFile, ZoneParams};

use crate::Suite;

/// Largest header or zone file, in bytes.
pub const HEADER_MAX: usize = 1 << 20;
/// Most key slots in a header.
pub const SLOTS_MAX: usize = 64;
/// Most pins of a zone file.
pub const PINS_MAX: usize = 4096;
/// Longest label of a slot, in bytes.
pub const LABEL_MAX: usize = 255;
/// Shortest and longest `name_max`, in bytes.
pub const NAME_MAX: std::ops::RangeInclusive<u64> = 64..=255;

mod sealed {
    /// The members of a header as they are in its file. Only vault headers and zone files have them.
    pub trait Members {
        type Wire: serde::Serialize;

        fn wire(&self) -> Self::Wire;
    }
}

/// The common part of vault headers and zone files, so that other crates handle slots, keychain and MAC once.
pub trait Header: Sized + PartialEq + std::fmt::Debug + sealed::Members {
    /// The member `format`.
    const FORMAT: &'static str;
    /// Whether the keychain must have an epoch of K_out. A zone may share K_in alone.
    const OUTER_REQUIRED: bool;
    /// Whether it has a history and an administrator's signature. Vaults do, zones do not.
    const IS_VAULT: bool;

    /// Parses the bytes of a file, not yet authenticated.
    ///
    /// # Errors
    /// See [`HeaderError`]; never panics, whatever the bytes.
    fn parse(bytes: &[u8]) -> Result<Self, HeaderError>;

    /// The bytes to store, indented to be read. They are parsed again first, so nothing unreadable is ever written.
    ///
    /// # Errors
    /// [`HeaderError`] if `self` violates a bound of §4, for example by a label that is too long.
    fn to_json(&self) -> Result<Vec<u8>, HeaderError> {
        let bytes = json::to_vec(&self.wire());
        let again = Self::parse(&bytes)?;
        debug_assert_eq!(&again, self, "a header reads back as it was written");
        Ok(bytes)
    }

    /// C of §4: the canonical form without `mac`.
    fn mac_input(&self) -> Vec<u8> {
        json::mac_input(&self.wire())
    }

    /// S of §4: the canonical form without `mac` and without the signature in `admin`.
    fn signature_input(&self) -> Vec<u8> {
        json::signature_input(&self.wire())
    }

    /// Slots, keychain and MAC.
    fn keys(&self) -> &KeyArea;

    /// Slots, keychain and MAC, to be changed. The caller renews the MAC.
    fn keys_mut(&mut self) -> &mut KeyArea;

    /// Suite.
    fn suite(&self) -> Suite;

    /// Whether its keys were destroyed, and when. A zone's never are, since its members have them.
    fn destroyed(&self) -> Option<Destroyed> {
        None
    }

    /// Whether something outside the store remembers its newest state. Never for a zone.
    fn is_anchored(&self) -> bool {
        false
    }
}
