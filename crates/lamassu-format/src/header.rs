//! The vault header and the zone file (§4): JSON, parsed strictly, and the canonical form under the MAC.

use crate::{Geometry, Suite};

/// How names are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameMode {
    /// sealed
    Encrypted,
    /// as they are
    Plain,
}

/// A parsed vault header (not yet authenticated). Fields are added by whoever builds this module out; these accessors stay.
#[derive(Clone, Debug)]
pub struct VaultHeader {
    _p: (),
}
impl VaultHeader {
    /// Suite.
    pub fn suite(&self) -> Suite {
        todo!()
    }
    /// Geometry.
    pub fn geometry(&self) -> Geometry {
        todo!()
    }
    /// Name mode.
    pub fn names(&self) -> NameMode {
        todo!()
    }
    /// Longest stored name.
    pub fn name_max(&self) -> usize {
        todo!()
    }
    /// Whether clean one-page files are convergent.
    pub fn convergent_small_files(&self) -> bool {
        todo!()
    }
    /// Vault id.
    pub fn id(&self) -> [u8; 16] {
        todo!()
    }
}
