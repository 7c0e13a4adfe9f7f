//! The cipher suites (§2, §10). Each is a value of data and trait objects, in a file of its own.
//!
//! A suite says what is computed; a [`Kernel`] says by which code. [`CipherSuite::of`] is the only place in this crate
//! that branches on the id of a suite. `tests.rs` runs every suite through one test suite.
//!
//! | suite | H | K of H | block cipher | AEAD |
//! |---|---|---|---|---|
//! | [`aes`] | SHA-256 | SP 800-108 over AES-CMAC | AES-256-CBC | XAES-256-GCM |
//! | [`paper`] | SHA-256 | AES-ECB | AES-256-CBC | XAES-256-GCM |
//! | [`blake3`] | keyed BLAKE3 | keyed BLAKE3 | AES-256-CTR | XAES-256-GCM |
//! | [`chacha`] | keyed BLAKE3 | keyed BLAKE3 | ChaCha20 | XChaCha20-Poly1305 |
//!
//! Files may have AES-128 in place of AES-256, and the other of the two hashes, as far as the suite allows: a
//! [`Method`]. Each method derives its block keys under a key of its own ([`purpose`]), so a block's key by one method
//! tells nothing about its key by another.

mod aes;
mod blake3;
pub(crate) mod chacha;
mod hash;
mod paper;
#[cfg(test)]
mod tests;

pub(crate) use hash::BlockHash;

use crate::aead::Aead;
use crate::kernel::Kernel;
use crate::salt::Salts;
use crate::secret::Secret;
use crate::{BlockKey, Suite};
use lamassu_format::{Hash, Method, is_hole};
use std::borrow::Cow;

/// What a suite is made of.
pub(crate) struct CipherSuite {
    /// Its number and name in the format.
    pub(crate) id: Suite,
    /// Encrypts blocks under their keys.
    cipher: &'static dyn BlockCipher,
    /// The same with keys of 128 bits, if files may have them.
    short_cipher: Option<&'static dyn BlockCipher>,
    /// Expands K_in, for one [`purpose`].
    pub(crate) expand: fn(Kernel, &Secret<32>, &str) -> Box<dyn BlockKdf>,
    /// The AEAD of pages and records under a key.
    pub(crate) aead: fn(&Secret<32>) -> Box<dyn Aead>,
    /// Why no NIST publication approves of it; `None` if one does.
    pub(crate) unapproved: Option<&'static str>,
    /// The K_in of the self-test.
    pub(crate) known_k_in: [u8; 32],
    /// The known answers for each method of the suite, its own first.
    pub(crate) known_answers: &'static [KnownAnswer],
}

/// One block of 4096 zero bytes: a row of `testdata/vectors/blocks.json`, or of `methods.json` if the method is not the
/// suite's.
pub(crate) struct KnownAnswer {
    /// The name in reports: the suite, and what is not the suite's.
    pub(crate) name: &'static str,
    pub(crate) method: Method,
    pub(crate) key: BlockKey,
    /// SHA-256 of the ciphertext.
    pub(crate) ciphertext: [u8; 32],
}

/// Encrypts blocks, each under a key of its own, without an IV: a key has one plaintext.
pub(crate) trait BlockCipher: Sync {
    /// Encrypts a group in place: `keys.len()` blocks of equal length, at most [`crate::kernel::GROUP`]. Encrypts the
    /// first `lens` bytes of each, whole cipher blocks; the bytes behind them are zero and stay so.
    fn encrypt(&self, kernel: Kernel, keys: &[BlockKey], group: &mut [u8], lens: &[usize]);

    /// Decrypts one block in place.
    fn decrypt(&self, kernel: Kernel, key: &BlockKey, block: &mut [u8]);
}

/// K_in of one epoch, expanded for one method: what derives keys of blocks, at most [`crate::kernel::GROUP`] at once.
pub(crate) trait BlockKdf: Send + Sync {
    /// K of each H, before the bits that the format fixes.
    fn keys(&self, kernel: Kernel, hashes: &[[u8; 32]], salts: Salts<'_>, keys: &mut [BlockKey]);
}

impl CipherSuite {
    /// The suite with this id.
    pub(crate) fn of(id: Suite) -> &'static CipherSuite {
        match id {
            Suite::Aes => &aes::SUITE,
            Suite::Paper => &paper::SUITE,
            Suite::Blake3 => &blake3::SUITE,
            Suite::Chacha => &chacha::SUITE,
        }
    }

    /// The cipher of a method.
    ///
    /// # Panics
    /// If the suite does not have it: a page or record that names such a profile is refused when it is read.
    pub(crate) fn cipher(&self, method: Method) -> &'static dyn BlockCipher {
        match method.has_short_key() {
            true => self.short_cipher.expect("a profile is checked against its suite"),
            false => self.cipher,
        }
    }

    /// Sets the bits of K that the format fixes (§10), for a block that is not compressed. K is never all zero, which
    /// stands for a hole.
    pub(crate) fn finish(&self, key: &mut BlockKey) {
        if self.id.marks_compressed() {
            key[31] &= 0xfe;
        }
        if is_hole(key) {
            key[0] = 0x80;
        }
    }

    /// Marks a K as that of a compressed block.
    pub(crate) fn mark_compressed(&self, key: &mut BlockKey) {
        debug_assert!(self.id.marks_compressed(), "a header of such a suite names no compression");
        key[31] |= 1;
    }
}

/// Why no NIST publication approves of a suite; `None` if one does.
pub fn unapproved(suite: Suite) -> Option<&'static str> {
    CipherSuite::of(suite).unapproved
}

/// Why no NIST publication approves of a hash; `None` if one does.
pub fn unapproved_hash(hash: Hash) -> Option<&'static str> {
    match hash {
        Hash::Sha256 => None,
        Hash::Blake3 => Some("BLAKE3 is no hash of FIPS 180-4 or 202; use sha-256"),
    }
}

/// The purpose of the key under which a method derives keys of blocks (§10). It names the cipher and the hash if they
/// are not the suite's.
pub(crate) fn purpose(suite: Suite, method: Method) -> Cow<'static, str> {
    const OF_SUITE: &str = "block key";
    let cipher = method.has_short_key().then(|| method.cipher(suite).name());
    let hash = method.has_other_hash().then(|| method.hash(suite).name());
    match (cipher, hash) {
        (None, None) => OF_SUITE.into(),
        (Some(one), None) | (None, Some(one)) => format!("{OF_SUITE} {one}").into(),
        (Some(cipher), Some(hash)) => format!("{OF_SUITE} {cipher} {hash}").into(),
    }
}
