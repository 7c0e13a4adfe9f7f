//! Ciphers and hashes of blocks (§2).

use crate::words;

/// A cipher of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cipher {
    /// AES with keys of 256 bits.
    Aes256,
    /// AES with keys of 128 bits.
    Aes128,
    /// ChaCha20.
    Chacha20,
}

words! {
    /// Every cipher.
    Cipher { Aes256 = "aes-256", Aes128 = "aes-128", Chacha20 = "chacha20" }
}

/// A hash of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hash {
    /// SHA-256.
    Sha256,
    /// BLAKE3, keyed by the zone.
    Blake3,
}

words! {
    /// Every hash.
    Hash { Sha256 = "sha-256", Blake3 = "blake3" }
}
