//! Memory for the plaintext of buffered blocks.

use parking_lot::Mutex;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Bytes kept for use again. The allocator would return freed blocks to the system one by one, and a fresh block costs
/// a page fault.
const SPARE_LEN_MAX: usize = 16 << 20;

/// Blocks that are not in use, and their bytes in all.
static SPARE: Mutex<(Vec<Arc<[u8]>>, usize)> = Mutex::new((Vec::new(), 0));

/// The plaintext of one block. A clone is the same memory until one of both is changed.
#[derive(Clone)]
pub(super) struct Block(Arc<[u8]>);

impl Block {
    /// One of `len` zeros.
    pub fn zeroed(len: usize) -> Block {
        match Block::spare(len) {
            Some(mut block) => {
                block.fill(0);
                block
            }
            None => Block(std::iter::repeat_n(0, len).collect()),
        }
    }

    /// A block that holds what is in `bytes`.
    pub fn of(bytes: &[u8]) -> Block {
        match Block::spare(bytes.len()) {
            Some(mut block) => {
                block.copy_from_slice(bytes);
                block
            }
            None => Block(bytes.into()),
        }
    }

    /// One that still holds its last content.
    fn spare(len: usize) -> Option<Block> {
        let (blocks, bytes) = &mut *SPARE.lock();
        // Almost always the last: vaults with blocks of different length are seldom open together.
        let at = blocks.iter().rposition(|block| block.len() == len)?;
        *bytes -= len;
        Some(Block(blocks.swap_remove(at)))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if Arc::get_mut(&mut self.0).is_none() {
            return; // another clone still needs it
        }
        let len = self.0.len();
        let (blocks, bytes) = &mut *SPARE.lock();
        // Blocks of another length, of a vault that is no longer in use, make room.
        while *bytes + len > SPARE_LEN_MAX && blocks.first().is_some_and(|block| block.len() != len) {
            *bytes -= blocks.swap_remove(0).len();
        }
        if *bytes + len <= SPARE_LEN_MAX {
            *bytes += len;
            blocks.push(std::mem::take(&mut self.0));
        }
    }
}

/// Wipes the spare blocks and frees them.
pub(super) fn wipe_spare() {
    let (mut blocks, _) = std::mem::take(&mut *SPARE.lock());
    blocks.iter_mut().filter_map(Arc::get_mut).for_each(lamassu_crypto::secret::wipe);
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        Arc::make_mut(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_keeps_what_it_held() {
        let mut one = Block::of(&[1; 512]);
        let other = one.clone();
        one[0] = 2;
        drop(one);
        assert_eq!(*Block::of(&[3; 512]), [3; 512]);
        assert_eq!(*other, [1; 512]);
    }

    #[test]
    fn used_again_a_block_holds_nothing_of_the_last() {
        for len in [4096, 65536, 4096] {
            drop(Block::of(&vec![7; len]));
            assert_eq!(*Block::zeroed(len), vec![0; len][..]);
            assert_eq!(*Block::of(&vec![9; len]), vec![9; len][..]);
        }
    }

    #[test]
    fn what_is_kept_is_bounded_and_goes_with_the_vault() {
        for len in [65536, 4096, 65536] {
            let many: Vec<Block> = (0..2 * SPARE_LEN_MAX / len).map(|_| Block::zeroed(len)).collect();
            drop(many);
            let (blocks, bytes) = &*SPARE.lock();
            assert!(*bytes <= SPARE_LEN_MAX);
            assert_eq!(blocks.iter().map(|block| block.len()).sum::<usize>(), *bytes);
            assert!(blocks.iter().any(|block| block.len() == len), "those of another length make room");
        }
        wipe_spare();
        assert!(SPARE.lock().1 < SPARE_LEN_MAX, "but for what other tests put there since");
    }
}
