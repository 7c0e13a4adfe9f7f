//! The locations of keys: one provider each, listed in [`LOCATIONS`].

mod bytes;
mod credential;
mod env;
mod file;
#[cfg(feature = "https")]
mod https;
#[cfg(feature = "kmip")]
mod kmip;
#[cfg(feature = "pkcs11")]
mod pkcs11;
mod prompt;
pub mod server;
mod stdin;
#[cfg(any(feature = "https", feature = "kmip"))]
mod tls;

#[cfg(all(feature = "testing", feature = "kmip"))]
pub(crate) use kmip::take_answers as take_kmip_answers;

use crate::source::KeyProvider;
use lamassu_format::header::SlotKind;
use std::sync::Arc;

/// A location of key source URIs.
pub struct Location {
    /// its word in a URI
    pub name: &'static str,
    /// whether the word begins the URI, since only one format comes from there: `pkcs11:…`, not `FORMAT:pkcs11:…`
    pub is_scheme: bool,
    /// its syntax
    pub usage: &'static str,
    /// the formats that can come from there
    pub kinds: &'static [SlotKind],
    /// whether a person is asked
    pub interactive: bool,
    /// its provider for an argument; `None`: the argument is not valid
    pub provider: fn(Option<&str>) -> Option<Arc<dyn KeyProvider>>,
}

/// Every location.
pub static LOCATIONS: &[Location] = &[
    prompt::LOCATION,
    file::LOCATION,
    env::LOCATION,
    stdin::STDIN,
    stdin::FD,
    credential::LOCATION,
    #[cfg(feature = "https")]
    https::LOCATION,
    #[cfg(feature = "kmip")]
    kmip::LOCATION,
    server::LOCATION,
    #[cfg(feature = "pkcs11")]
    pkcs11::LOCATION,
];

/// The formats that are bytes.
const READABLE: &[SlotKind] =
    &[SlotKind::Passphrase, SlotKind::Raw, SlotKind::Hex, SlotKind::Recovery, SlotKind::RecoveryShares];

/// The syntax of a key of `kind` from `location`.
pub(crate) fn form(kind: SlotKind, location: &Location) -> String {
    if location.is_scheme { location.usage.into() } else { format!("{}:{}", kind.name(), location.usage) }
}

/// Every valid form of a key source, for help and errors: `passphrase:prompt, …`.
pub fn forms() -> String {
    let forms = LOCATIONS.iter().map(|location| match location.kinds {
        [kind] => form(*kind, location),
        kinds => format!("{}:{}", kinds.iter().map(|k| k.name()).collect::<Vec<_>>().join("|"), location.usage),
    });
    forms.collect::<Vec<_>>().join(", ")
}
