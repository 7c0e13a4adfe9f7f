//! What the vault header needs (§4): XAES-256-GCM, HKDF, HMAC, Argon2id.
use crate::{NoRandom, Secret, Unauthentic};
/// HKDF-SHA-256 to 32 bytes.
pub fn hkdf(ikm: &[u8], salt: &[u8], info: &[u8]) -> Secret<32> {
    let _ = (ikm, salt, info);
    todo!()
}
/// HMAC-SHA-256.
pub fn hmac(key: &Secret<32>, data: &[u8]) -> [u8; 32] {
    let _ = (key, data);
    todo!()
}
/// Constant-time comparison.
pub fn equal(a: &[u8], b: &[u8]) -> bool {
    let _ = (a, b);
    todo!()
}
/// XAES-256-GCM: (nonce, tag ‖ ciphertext).
pub fn seal(key: &Secret<32>, aad: &[u8], content: &[u8]) -> Result<([u8; 24], Vec<u8>), NoRandom> {
    let _ = (key, aad, content);
    todo!()
}
/// And back.
pub fn open(key: &Secret<32>, nonce: &[u8; 24], aad: &[u8], sealed: &[u8]) -> Result<crate::SecretBytes, Unauthentic> {
    let _ = (key, nonce, aad, sealed);
    todo!()
}
/// Cost of Argon2id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Argon2Cost {
    /// m
    pub memory_kib: u32,
    /// t
    pub passes: u32,
    /// p
    pub lanes: u32,
}
/// Argon2id v0x13; `None` where the cost is outside what §4 allows.
pub fn argon2id(passphrase: &[u8], salt: &[u8; 32], cost: Argon2Cost) -> Option<Secret<32>> {
    let _ = (passphrase, salt, cost);
    todo!()
}
