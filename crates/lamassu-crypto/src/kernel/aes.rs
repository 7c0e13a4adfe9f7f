//! What every AES kernel shares.

use zeroize::{Zeroize, ZeroizeOnDrop};

/// Rounds of AES-256.
pub(super) const ROUNDS: usize = 14;

/// The round keys of one AES-256 key, in the byte order of FIPS 197; the first two are the key itself.
#[derive(Default, Zeroize, ZeroizeOnDrop)]
pub(crate) struct RoundKeys(pub(super) [[u8; 16]; ROUNDS + 1]);

impl RoundKeys {
    /// The key they were expanded from.
    pub(super) fn key(&self) -> [u8; 32] {
        self.0[..2].as_flattened().try_into().expect("two round keys are 32 bytes")
    }
}
