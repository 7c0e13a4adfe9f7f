//! Tier one: convergent encryption of data blocks under K_in (§10).
//!
//! Equal blocks under equal K_in with equal salt give equal keys and equal ciphertext, whatever else differs. A store
//! deduplicates because of that, so it must never change. The salt is empty except in narrow deduplication domains
//! ([`Salts`]).

use crate::kernel::Kernel;
use crate::salt::Salts;
use crate::secret::{Secret, without_trace};
use crate::stages::{Stage, timed};
use crate::suite::{BlockHash, BlockKdf, CipherSuite, purpose};
use crate::{BlockKey, Suite};
use lamassu_format::Method;
use std::sync::OnceLock;
use zeroize::Zeroizing;

/// Blocks that go through the kernels together: as many as the widest kernel has lanes.
pub(crate) const GROUP: usize = 16;

/// K_in of one epoch, expanded for a suite.
pub struct InnerKey {
    suite: &'static CipherSuite,
    kernel: Kernel,
    k_in: Secret<32>,
    /// By [`Method::index`]: most vaults use that of the suite alone, so the others are expanded when they are needed.
    expanded: [OnceLock<Expanded>; Method::ALL.len()],
}

/// K_in, expanded for a method.
struct Expanded {
    hash: BlockHash,
    kdf: Box<dyn BlockKdf>,
}

impl InnerKey {
    /// Expands `k_in`.
    pub fn new(suite: Suite, k_in: &Secret<32>) -> Self {
        Self::with_kernel(suite, k_in, Kernel::best())
    }

    /// The same on a kernel of choice.
    pub fn with_kernel(suite: Suite, k_in: &Secret<32>, kernel: Kernel) -> Self {
        let (suite, k_in) = (CipherSuite::of(suite), k_in.duplicate());
        let key = InnerKey { suite, kernel, k_in, expanded: Default::default() };
        key.by(Method::OF_SUITE);
        key
    }

    /// # Panics
    /// If the suite does not have the method: as [`CipherSuite::cipher`].
    fn by(&self, method: Method) -> &Expanded {
        self.expanded[method.index()].get_or_init(|| {
            let suite = self.suite.id;
            assert!(method.check(suite).is_ok(), "a profile is checked against its suite");
            without_trace(|| Expanded {
                hash: BlockHash::new(suite, method.hash(suite), &self.k_in),
                kdf: (self.suite.expand)(self.kernel, &self.k_in, &purpose(suite, method)),
            })
        })
    }

    /// Derives the keys and encrypts in place; blocks that are to be stored plain keep their content, and get their
    /// hash for a key. `blocks` is `keys.len()` blocks of `block_size` bytes.
    pub fn seal(&self, salts: Salts<'_>, blocks: &mut [u8], block_size: usize, keys: &mut [BlockKey]) {
        check_shape(blocks.len(), block_size, keys.len());
        for (n, (group, keys)) in blocks.chunks_mut(GROUP * block_size).zip(keys.chunks_mut(GROUP)).enumerate() {
            let plain = Group::of(group.chunks_exact(block_size));
            timed(Stage::Key, || self.derive_group(salts.skip(n * GROUP), plain.as_slice(), keys));
            if !salts.is_plain() {
                timed(Stage::Encrypt, || self.encrypt_group(salts.method(), group, keys));
            }
        }
    }

    /// Encrypts 1 to [`GROUP`] blocks in place, under keys that are known already.
    pub(crate) fn encrypt_group(&self, method: Method, group: &mut [u8], keys: &[BlockKey]) {
        self.suite.cipher(method).encrypt(self.kernel, keys, group);
    }

    /// Keys of at most [`GROUP`] blocks.
    fn derive_group(&self, salts: Salts<'_>, blocks: &[&[u8]], keys: &mut [BlockKey]) {
        let mut hashes = Zeroizing::new([[0u8; 32]; GROUP]);
        let hashes = &mut hashes[..blocks.len()];
        self.hash_group(salts.method(), blocks, hashes);
        self.keys_of_hashes(hashes, salts, keys);
    }

    /// Whether H itself depends on K_in.
    pub(crate) fn is_hash_keyed(&self, method: Method) -> bool {
        self.by(method).hash.is_keyed()
    }

    /// H of at most [`GROUP`] blocks.
    pub(crate) fn hash_group(&self, method: Method, blocks: &[&[u8]], hashes: &mut [[u8; 32]]) {
        self.by(method).hash.of(self.kernel, blocks, hashes);
    }

    /// K of each H, at most [`GROUP`]; of plain blocks H itself.
    pub(crate) fn keys_of_hashes(&self, hashes: &[[u8; 32]], salts: Salts<'_>, keys: &mut [BlockKey]) {
        match salts.is_plain() {
            true => keys.copy_from_slice(&hashes[..keys.len()]),
            false => without_trace(|| self.by(salts.method()).kdf.keys(self.kernel, hashes, salts, keys)),
        }
        keys.iter_mut().for_each(|k| self.suite.finish(k));
    }
}

/// Panics where the caller's slices do not fit one another. That is an error in the program, whatever a file holds.
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
