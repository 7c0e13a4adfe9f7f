//! Tier one: convergent encryption of data blocks under K_in (§10).
use crate::{BlockKey, Secret, Suite};
/// K_in of one epoch, expanded for a suite.
pub struct InnerKey {
    suite: Suite,
}
impl InnerKey {
    /// Expands `k_in`.
    pub fn new(suite: Suite, k_in: &Secret<32>) -> Self {
        let _ = k_in;
        InnerKey { suite }
    }
    /// The suite.
    pub fn suite(&self) -> Suite {
        self.suite
    }
    /// Keys of the blocks in `plain` (a whole number of blocks).
    pub fn derive(&self, plain: &[u8], block_size: usize, keys: &mut [BlockKey]) {
        let _ = (plain, block_size, keys);
        todo!()
    }
    /// Derives the keys and encrypts in place.
    pub fn seal(&self, blocks: &mut [u8], block_size: usize, keys: &mut [BlockKey]) {
        let _ = (blocks, block_size, keys);
        todo!()
    }
}
/// Decrypts in place, without verification.
pub fn decrypt(suite: Suite, blocks: &mut [u8], block_size: usize, keys: &[BlockKey]) {
    let _ = (suite, blocks, block_size, keys);
    todo!()
}
