//! What every AES kernel shares. Kernels are generic over the number of round keys, which is known when they are
//! compiled: it decides how many rounds there are, and how many bytes of a block's key are the cipher's.

use lamassu_format::BlockKey;
use zeroize::{Zeroize, ZeroizeOnDrop};

/// Round keys of AES-128: one more than rounds.
pub const AES_128: usize = 11;
/// Round keys of AES-256.
pub const AES_256: usize = 15;

/// Bytes of the key from which `n` round keys come (FIPS 197 §5: Nk = Nr − 6 words).
pub(super) const fn key_len(n: usize) -> usize {
    4 * (n - 7)
}

/// The part of a block's key that the cipher takes: the first bytes.
pub(super) fn key_of<const N: usize>(key: &BlockKey) -> &[u8] {
    &key[..key_len(N)]
}

/// The round keys of one AES key, in the byte order of FIPS 197; the first are the key itself.
#[derive(Zeroize, ZeroizeOnDrop)]
pub(crate) struct RoundKeys<const N: usize>(pub(super) [[u8; 16]; N]);

impl RoundKeys<AES_256> {
    /// The key they were expanded from.
    pub(super) fn key(&self) -> [u8; 32] {
        self.0[..2].as_flattened().try_into().expect("two round keys are 32 bytes")
    }
}
