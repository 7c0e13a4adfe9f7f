//! H of blocks (§10).

use crate::kernel::Kernel;
use crate::secret::{Secret, without_trace};
use crate::{Suite, derive};
use lamassu_format::Hash;

/// A hash of blocks, with its key.
pub(crate) enum BlockHash {
    /// It has none.
    Sha256,
    /// Keyed by K_in.
    Blake3(Secret<32>),
}

impl BlockHash {
    pub(crate) fn new(suite: Suite, hash: Hash, k_in: &Secret<32>) -> BlockHash {
        match hash {
            Hash::Sha256 => BlockHash::Sha256,
            Hash::Blake3 => BlockHash::Blake3(derive(suite, k_in, "block hash")),
        }
    }

    /// Whether H depends on K_in. Then it is computed again for each epoch.
    pub(crate) fn is_keyed(&self) -> bool {
        matches!(self, BlockHash::Blake3(_))
    }

    /// H of at most [`crate::kernel::GROUP`] blocks.
    pub(crate) fn of(&self, kernel: Kernel, blocks: &[&[u8]], hashes: &mut [[u8; 32]]) {
        match self {
            BlockHash::Sha256 => kernel.sha256(blocks, hashes),
            BlockHash::Blake3(key) => without_trace(|| kernel.keyed_blake3(key.expose(), blocks, hashes)),
        }
    }
}
