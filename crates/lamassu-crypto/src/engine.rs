//! The cipher engine: batches of blocks over a bounded worker pool; the submitting thread works too.
use crate::{BlockKey, InnerKey, KeyRing};
/// How much a read checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// Decrypt, re-hash, compare (L7 `full`).
    Full,
    /// Decrypt alone.
    No,
}
/// A pool of cipher workers.
pub struct Engine {
    threads: usize,
}
impl Engine {
    /// `threads` in all, the submitting thread included; at least 1.
    pub fn new(threads: usize) -> Self {
        Engine { threads }
    }
    /// Threads that work on one batch.
    pub fn threads(&self) -> usize {
        self.threads
    }
    /// Derives keys and encrypts a batch in place. `blocks.len() == keys.len() * block_size`.
    pub fn seal(&self, key: &InnerKey, blocks: &mut [u8], block_size: usize, keys: &mut [BlockKey]) {
        key.seal(blocks, block_size, keys)
    }
    /// Decrypts a batch in place and verifies it under any K_in epoch of `ring`. Returns the indices of blocks that failed, ascending;
    /// their bytes in `blocks` are zeroed. Blocks whose key is all zero are zeroed and never fail.
    pub fn open(
        &self,
        ring: &KeyRing,
        blocks: &mut [u8],
        block_size: usize,
        keys: &[BlockKey],
        verify: Verify,
    ) -> Vec<usize> {
        let _ = (ring, blocks, block_size, keys, verify);
        todo!()
    }
}
