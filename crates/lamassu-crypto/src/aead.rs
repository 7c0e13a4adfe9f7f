//! Authenticated encryption with associated data.

use crate::Unauthentic;

/// An AEAD with nonces of 24 bytes and tags of 16.
pub(crate) trait Aead: Send + Sync {
    /// Encrypts in place; returns the tag.
    fn seal(&self, nonce: &[u8; 24], aad: &[u8], content: &mut [u8]) -> [u8; 16];

    /// Decrypts in place. On failure the content is unspecified.
    fn open(&self, nonce: &[u8; 24], aad: &[u8], content: &mut [u8], tag: &[u8; 16]) -> Result<(), Unauthentic>;
}
