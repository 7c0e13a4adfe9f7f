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

mod aes;
mod blake3;
pub(crate) mod chacha;
mod paper;
#[cfg(test)]
mod tests;

use crate::kernel::Kernel;
use crate::salt::Salts;
use crate::secret::Secret;
use crate::{BlockKey, Suite, Unauthentic};

/// What a suite is made of.
pub(crate) struct CipherSuite {
    /// Its number and name in the format.
    pub(crate) id: Suite,
    /// Encrypts blocks under their keys.
    pub(crate) cipher: &'static dyn BlockCipher,
    /// Expands K_in.
    pub(crate) expand: fn(Kernel, &Secret<32>) -> Box<dyn BlockKdf>,
    /// Whether H depends on K_in. Then it is computed again for each epoch.
    pub(crate) is_hash_keyed: bool,
    /// Whether the last bit of every block key is clear (§10). A key with that bit set marks what version 1 does not
    /// write.
    pub(crate) is_last_bit_clear: bool,
    /// The AEAD of pages and records under a key.
    pub(crate) aead: fn(&Secret<32>) -> Box<dyn Aead>,
    /// Why no NIST publication approves of it; `None` if one does.
    pub(crate) unapproved: Option<&'static str>,
    /// What the self-test expects.
    pub(crate) known_answer: KnownAnswer,
}

/// A row `zeros` of `testdata/vectors/blocks.json`: one block of 4096 zero bytes.
#[derive(Clone, Copy)]
pub(crate) struct KnownAnswer {
    /// The suite's name in reports.
    pub(crate) name: &'static str,
    pub(crate) k_in: [u8; 32],
    pub(crate) key: BlockKey,
    /// SHA-256 of the ciphertext.
    pub(crate) ciphertext: [u8; 32],
}

/// Encrypts blocks, each under a key of its own, without an IV: a key has one plaintext.
pub(crate) trait BlockCipher: Sync {
    /// Encrypts a group in place: `keys.len()` blocks of equal length, at most [`crate::inner::GROUP`].
    fn encrypt(&self, kernel: Kernel, keys: &[BlockKey], group: &mut [u8]);

    /// Decrypts one block in place.
    fn decrypt(&self, kernel: Kernel, key: &BlockKey, block: &mut [u8]);
}

/// K_in of one epoch, expanded: what hashes blocks and derives their keys, at most [`crate::inner::GROUP`] at once.
pub(crate) trait BlockKdf: Send + Sync {
    /// H of each block.
    fn hash(&self, kernel: Kernel, blocks: &[&[u8]], hashes: &mut [[u8; 32]]);

    /// K of each H, before the bits that the format fixes.
    fn keys(&self, kernel: Kernel, hashes: &[[u8; 32]], salts: Salts<'_>, keys: &mut [BlockKey]);
}

/// An AEAD with nonces of 24 bytes and tags of 16.
pub(crate) trait Aead: Send + Sync {
    /// Encrypts in place; returns the tag.
    fn seal(&self, nonce: &[u8; 24], aad: &[u8], content: &mut [u8]) -> [u8; 16];

    /// Decrypts in place. On failure the content is unspecified.
    fn open(&self, nonce: &[u8; 24], aad: &[u8], content: &mut [u8], tag: &[u8; 16]) -> Result<(), Unauthentic>;
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

    /// Sets the bits of K that the format fixes (§10). K is never all zero, which stands for a hole.
    pub(crate) fn finish(&self, key: &mut BlockKey) {
        if self.is_last_bit_clear {
            key[31] &= 0xfe;
        }
        if *key == [0; 32] {
            key[0] = 0x80;
        }
    }

    /// Whether this suite can have derived a stored key.
    pub(crate) fn is_possible(&self, key: &BlockKey) -> bool {
        !self.is_last_bit_clear || key[31] & 1 == 0
    }
}

/// Why no NIST publication approves of a suite; `None` if one does.
pub fn unapproved(suite: Suite) -> Option<&'static str> {
    CipherSuite::of(suite).unapproved
}
