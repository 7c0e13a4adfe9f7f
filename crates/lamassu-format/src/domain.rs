//! Deduplication domains (§10): the scope in which equal blocks are equal in the store.

use crate::{Suite, words};

/// The scope in which blocks are shared. It is chosen when a vault is made, and never changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Domain {
    /// Every vault that has the zone's K_in.
    #[default]
    Zone,
    /// The vault and its clones: K_in is their own.
    Family,
    /// Each file by itself.
    File,
    /// Nothing: each block of each file by itself.
    None,
}

words! {
    /// Every domain, the widest first.
    Domain { Zone = "zone", Family = "family", File = "file", None = "none" }
}

impl Domain {
    /// Whether a block's key depends on the file it is in. Then a vault has no convergent pages, every page names its
    /// file, and ciphertext cannot be used in another file.
    pub const fn is_salted(self) -> bool {
        matches!(self, Domain::File | Domain::None)
    }

    /// Whether a suite supports it.
    pub fn is_for(self, suite: Suite) -> bool {
        !self.is_salted() || suite.takes_salt()
    }
}
