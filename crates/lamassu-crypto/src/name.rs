//! Names in a directory (§6).
use crate::{Secret, Unauthentic};
/// Key of the names of one directory.
pub struct NameKey {
    id: [u8; 16],
}
impl NameKey {
    /// From a directory record.
    pub fn new(secret: &Secret<32>, id: [u8; 16]) -> Self {
        let _ = secret;
        NameKey { id }
    }
    /// AES-SIV of a name.
    pub fn seal(&self, name: &[u8]) -> Vec<u8> {
        let _ = (name, self.id);
        todo!()
    }
    /// And back.
    pub fn open(&self, sealed: &[u8]) -> Result<Vec<u8>, Unauthentic> {
        let _ = sealed;
        todo!()
    }
    /// SHA-256 of a sealed name, for long names.
    pub fn hash(sealed: &[u8]) -> [u8; 32] {
        let _ = sealed;
        todo!()
    }
}
