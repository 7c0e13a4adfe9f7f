//! The locations a key can come from: one provider each, listed in [`LOCATIONS`].

mod env;
mod file;
mod prompt;

use crate::source::KeyProvider;
use lamassu_format::header::SlotKind;
use std::sync::Arc;

/// A location of key source URIs.
pub struct Location {
    /// its word in a URI
    pub name: &'static str,
    /// how it is written
    pub usage: &'static str,
    /// the formats that can come from there
    pub kinds: &'static [SlotKind],
    /// whether a person is asked
    pub interactive: bool,
    /// its provider for an argument, or `None` where that is not one it can have
    pub provider: fn(Option<&str>) -> Option<Arc<dyn KeyProvider>>,
}

/// Every location.
pub static LOCATIONS: &[Location] = &[prompt::LOCATION, file::LOCATION, env::LOCATION];

/// Every valid form of a key source, for help and errors: `passphrase:prompt, …`.
pub fn forms() -> String {
    let mut forms = Vec::new();
    for location in LOCATIONS {
        for kind in location.kinds {
            forms.push(format!("{}:{}", kind.name(), location.usage));
        }
    }
    forms.join(", ")
}
