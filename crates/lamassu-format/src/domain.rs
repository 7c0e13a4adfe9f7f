//! Deduplication domains (§10): within which bounds equal blocks are equal in the store.

use crate::Suite;

/// What shares equal blocks. It is chosen when a vault is made, and never changes.
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

impl Domain {
    /// Every domain, the widest first.
    pub const ALL: [Domain; 4] = [Domain::Zone, Domain::Family, Domain::File, Domain::None];

    /// Its name in headers and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Domain::Zone => "zone",
            Domain::Family => "family",
            Domain::File => "file",
            Domain::None => "none",
        }
    }

    /// The domain of a name, or `None`.
    pub fn from_name(name: &str) -> Option<Domain> {
        Domain::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Whether a block's key depends on the file it is in. Then a vault has no convergent pages, every page names its
    /// file, and ciphertext means nothing in another file.
    pub const fn is_salted(self) -> bool {
        matches!(self, Domain::File | Domain::None)
    }

    /// Whether a suite can keep it.
    pub fn is_for(self, suite: Suite) -> bool {
        !self.is_salted() || suite.takes_salt()
    }
}
