//! Tier one: convergent encryption of data blocks under K_in (§10).
//!
//! Equal blocks under equal K_in give equal keys and equal ciphertext, whatever else differs: that is what lets a store deduplicate, and it
//! must never change.

use crate::kernel::Kernel;
use crate::secret::{Locked, Secret};
use crate::{BlockKey, Suite, derive};
use aes::Aes256;
use aes::cipher::{BlockCipherEncrypt, KeyInit};
use chacha20::ChaCha20;
use chacha20::cipher::{KeyIvInit, StreamCipher};
use cmac::{Cmac, Mac};
use zeroize::Zeroizing;

/// Blocks that go through the kernels together: as many as the widest kernel has lanes.
pub(crate) const GROUP: usize = 16;

/// K_in of one epoch, expanded for a suite.
pub struct InnerKey {
    suite: Suite,
    kernel: Kernel,
    state: State,
}

enum State {
    Aes { kdf: Locked<Cmac<Aes256>> },
    Paper { kdf: Locked<Aes256> },
    Blake3 { hash: Secret<32>, key: Secret<32> },
}

impl InnerKey {
    /// Expands `k_in`.
    pub fn new(suite: Suite, k_in: &Secret<32>) -> Self {
        Self::with_kernel(suite, k_in, Kernel::best())
    }

    /// The same on a kernel of choice.
    pub fn with_kernel(suite: Suite, k_in: &Secret<32>, kernel: Kernel) -> Self {
        let state = match suite {
            Suite::Aes => {
                let key = derive(suite, k_in, "block key");
                State::Aes { kdf: Locked::new(Cmac::<Aes256>::new(key.expose().into())) }
            }
            Suite::Paper => State::Paper { kdf: Locked::new(Aes256::new(k_in.expose().into())) },
            Suite::Blake3 | Suite::Chacha => {
                State::Blake3 { hash: derive(suite, k_in, "block hash"), key: derive(suite, k_in, "block key") }
            }
        };
        InnerKey { suite, kernel, state }
    }

    /// The suite.
    pub fn suite(&self) -> Suite {
        self.suite
    }

    /// Keys of the blocks in `plain` (a whole number of blocks, `keys.len() * block_size` bytes).
    pub fn derive(&self, plain: &[u8], block_size: usize, keys: &mut [BlockKey]) {
        check_shape(plain.len(), block_size, keys.len());
        for (group, keys) in plain.chunks(GROUP * block_size).zip(keys.chunks_mut(GROUP)) {
            let blocks = Group::of(group.chunks_exact(block_size));
            self.derive_group(blocks.as_slice(), keys);
        }
    }

    /// Derives the keys and encrypts in place. `blocks` is a whole number of blocks, `keys.len() * block_size` bytes.
    pub fn seal(&self, blocks: &mut [u8], block_size: usize, keys: &mut [BlockKey]) {
        check_shape(blocks.len(), block_size, keys.len());
        for (group, keys) in blocks.chunks_mut(GROUP * block_size).zip(keys.chunks_mut(GROUP)) {
            self.derive_group(Group::of(group.chunks_exact(block_size)).as_slice(), keys);
            match self.suite {
                Suite::Aes | Suite::Paper => {
                    let mut lanes: Vec<&mut [u8]> = group.chunks_exact_mut(block_size).collect();
                    self.kernel.cbc_encrypt(keys, &mut lanes);
                }
                // A stream cipher is its own inverse.
                Suite::Blake3 | Suite::Chacha => decrypt_with(self.kernel, self.suite, group, block_size, keys),
            }
        }
    }

    /// Keys of at most [`GROUP`] blocks.
    pub(crate) fn derive_group(&self, blocks: &[&[u8]], keys: &mut [BlockKey]) {
        let mut hashes = Zeroizing::new([[0u8; 32]; GROUP]);
        let hashes = &mut hashes[..blocks.len()];
        self.hash_group(blocks, hashes);
        self.keys_of_hashes(hashes, keys);
    }

    /// Whether H itself depends on K_in.
    pub(crate) fn hash_is_keyed(&self) -> bool {
        matches!(self.state, State::Blake3 { .. })
    }

    /// H of at most [`GROUP`] blocks.
    pub(crate) fn hash_group(&self, blocks: &[&[u8]], hashes: &mut [[u8; 32]]) {
        match &self.state {
            State::Aes { .. } | State::Paper { .. } => self.kernel.sha256(blocks, hashes),
            State::Blake3 { hash, .. } => {
                for (b, h) in blocks.iter().zip(hashes) {
                    *h = blake3::keyed_hash(hash.expose(), b).into();
                }
            }
        }
    }

    /// K of each h.
    pub(crate) fn keys_of_hashes(&self, hashes: &[[u8; 32]], keys: &mut [BlockKey]) {
        for (h, k) in hashes.iter().zip(keys.iter_mut()) {
            match &self.state {
                State::Aes { kdf } => sp800_108(kdf, h, k),
                State::Paper { kdf } => {
                    *k = *h;
                    for half in k.chunks_exact_mut(16) {
                        kdf.encrypt_block(half.try_into().expect("half of 32 bytes"));
                    }
                }
                State::Blake3 { key, .. } => *k = blake3::keyed_hash(key.expose(), h).into(),
            }
            finish(self.suite, k);
        }
    }
}

/// SP 800-108 counter KDF over AES-256-CMAC: c ‖ `lamassu` ‖ 00 ‖ h ‖ 256, for c = 1 and 2.
fn sp800_108(kdf: &Cmac<Aes256>, h: &[u8; 32], key: &mut BlockKey) {
    for (c, half) in (1u32..).zip(key.chunks_exact_mut(16)) {
        let mut mac = kdf.clone();
        mac.update(&c.to_be_bytes());
        mac.update(b"lamassu\0");
        mac.update(h);
        mac.update(&256u32.to_be_bytes());
        half.copy_from_slice(&mac.finalize().into_bytes());
    }
}

/// The bits of K that the format fixes: the last bit is clear in every suite but `paper`, and K is never all zero, which stands for a hole.
fn finish(suite: Suite, key: &mut BlockKey) {
    if suite != Suite::Paper {
        key[31] &= 0xfe;
    }
    if *key == [0; 32] {
        key[0] = 0x80;
    }
}

/// Whether a stored key is one that the suite's KDF can give. Others mark what version 1 does not write (§10).
pub(crate) fn is_possible(suite: Suite, key: &BlockKey) -> bool {
    suite == Suite::Paper || key[31] & 1 == 0
}

/// Decrypts in place, without verification. `keys.len() * block_size` bytes.
pub fn decrypt(suite: Suite, blocks: &mut [u8], block_size: usize, keys: &[BlockKey]) {
    decrypt_with(Kernel::best(), suite, blocks, block_size, keys);
}

/// The same on a kernel of choice.
pub fn decrypt_with(kernel: Kernel, suite: Suite, blocks: &mut [u8], block_size: usize, keys: &[BlockKey]) {
    check_shape(blocks.len(), block_size, keys.len());
    for (block, key) in blocks.chunks_exact_mut(block_size).zip(keys) {
        match suite {
            Suite::Aes | Suite::Paper => kernel.cbc_decrypt(key, block),
            Suite::Blake3 => kernel.ctr(key, block),
            Suite::Chacha => ChaCha20::new(key.into(), &[0; 12].into()).apply_keystream(block),
        }
    }
}

/// Panics where the caller's slices do not fit one another: an error in the program, whatever a file holds.
pub(crate) fn check_shape(bytes: usize, block_size: usize, keys: usize) {
    assert!(block_size > 0 && block_size.is_multiple_of(16), "a block is whole cipher blocks");
    assert_eq!(bytes, keys * block_size, "one key a block");
}

/// At most [`GROUP`] blocks, without the heap.
pub(crate) struct Group<'a> {
    blocks: [&'a [u8]; GROUP],
    len: usize,
}

impl<'a> Group<'a> {
    pub(crate) fn of(blocks: impl Iterator<Item = &'a [u8]>) -> Self {
        let mut group = Group { blocks: [&[]; GROUP], len: 0 };
        for block in blocks {
            group.blocks[group.len] = block;
            group.len += 1;
        }
        group
    }

    pub(crate) fn as_slice(&self) -> &[&'a [u8]] {
        &self.blocks[..self.len]
    }
}
