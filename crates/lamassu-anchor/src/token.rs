//! Tokens stand for names of the store in the anchor.

use crate::ObjectId;
use lamassu_crypto::{Secret, wrap};
use std::sync::Arc;

/// HMAC-SHA-256(token key, directory as u64 ‖ stored name)[0..16].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub [u8; 16]);

/// The anchor's own key, not the vault's: so a scrub without the vault's keys can compute tokens.
#[derive(Clone, Debug)]
pub struct TokenKey(Arc<Secret<32>>);

impl TokenKey {
    /// Bytes of a token key.
    pub const LEN: usize = 32;

    /// From its bytes.
    pub fn new(mut bytes: [u8; Self::LEN]) -> TokenKey {
        TokenKey(Arc::new(Secret::new(&mut bytes)))
    }

    /// Makes a new key.
    ///
    /// # Errors
    /// The system has no randomness.
    pub fn random() -> Result<TokenKey, lamassu_crypto::NoRandom> {
        Secret::random().map(|secret| TokenKey(Arc::new(secret)))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.0.expose()
    }

    /// The token of a stored name in a directory.
    pub fn token(&self, dir: ObjectId, stored: &[u8]) -> Token {
        let mut data = Vec::with_capacity(8 + stored.len());
        data.extend(dir.0.to_le_bytes());
        data.extend(stored);
        let mac = wrap::hmac(&self.0, &data);
        let mut token = [0; 16];
        token.copy_from_slice(&mac[..16]);
        Token(token)
    }
}
