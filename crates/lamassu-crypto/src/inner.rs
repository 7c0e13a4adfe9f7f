//! Tier one: convergent encryption of data blocks under K_in (§10).
//!
//! Equal blocks under equal K_in with equal salt give equal keys and equal ciphertext, whatever else differs. A store
//! deduplicates because of that, so it must never change. The salt is empty except in narrow deduplication domains
//! ([`Salts`]).

use crate::compress;
use crate::kernel::{GROUP, Kernel};
use crate::oblivious::{Input, Oblivious, Token};
use crate::salt::Salts;
use crate::secret::{Secret, without_trace};
use crate::stages::{Stage, timed};
use crate::suite::{BlockHash, BlockKdf, CipherSuite, purpose};
use crate::{BlockKey, Suite};
use lamassu_format::Method;
use std::sync::{Arc, OnceLock};
use zeroize::Zeroizing;

/// K_in of one epoch, expanded for a suite.
pub struct InnerKey {
    suite: &'static CipherSuite,
    kernel: Kernel,
    k_in: Secret<32>,
    /// The server on which its keys depend; `None`: they follow from K_in alone.
    oblivious: Option<Arc<Oblivious>>,
    /// By [`Method::index`]: most vaults use only the suite's own method, so the others are expanded when they are
    /// needed.
    expanded: [OnceLock<Expanded>; Method::ALL.len()],
}

/// K_in, expanded for a method.
struct Expanded {
    hash: BlockHash,
    /// Derives keys; in an oblivious epoch the inputs of the server's function.
    kdf: Box<dyn BlockKdf>,
    /// In an oblivious epoch: derives the other half of a key, from its input and its token.
    check: Option<Box<dyn BlockKdf>>,
}

impl InnerKey {
    /// Expands `k_in`.
    pub fn new(suite: Suite, k_in: &Secret<32>) -> Self {
        Self::with_kernel(suite, k_in, Kernel::best())
    }

    /// The same on a kernel of choice.
    pub fn with_kernel(suite: Suite, k_in: &Secret<32>, kernel: Kernel) -> Self {
        Self::of_epoch(suite, k_in, None, kernel)
    }

    /// Expands `k_in` of an epoch that is oblivious, or not.
    ///
    /// # Panics
    /// If `suite` has no oblivious keys ([`Suite::takes_salt`]): such a keychain is refused when it is read.
    pub(crate) fn of_epoch(suite: Suite, k_in: &Secret<32>, oblivious: Option<Arc<Oblivious>>, kernel: Kernel) -> Self {
        assert!(oblivious.is_none() || suite.takes_salt(), "a keychain is checked against its suite");
        let (suite, k_in) = (CipherSuite::of(suite), k_in.duplicate());
        let key = InnerKey { suite, kernel, k_in, oblivious, expanded: Default::default() };
        key.by(Method::OF_SUITE);
        key
    }

    /// The server on which its keys depend.
    pub fn oblivious(&self) -> Option<&Arc<Oblivious>> {
        self.oblivious.as_ref()
    }

    /// # Panics
    /// If the suite does not have the method: as [`CipherSuite::cipher`].
    fn by(&self, method: Method) -> &Expanded {
        self.expanded[method.index()].get_or_init(|| {
            let suite = self.suite.id;
            assert!(method.check(suite).is_ok(), "a profile is checked against its suite");
            let expand = |purpose: &str| (self.suite.expand)(self.kernel, &self.k_in, purpose);
            let purpose = purpose(suite, method);
            without_trace(|| {
                let hash = BlockHash::new(suite, method.hash(suite), &self.k_in);
                match self.oblivious {
                    None => Expanded { hash, kdf: expand(&purpose), check: None },
                    Some(_) => Expanded {
                        hash,
                        kdf: expand(&format!("{purpose} oblivious")),
                        check: Some(expand(&format!("{purpose} oblivious check"))),
                    },
                }
            })
        })
    }

    /// Derives the keys and encrypts in place. Plain blocks keep their content, and get their hash as key. `blocks` is
    /// `keys.len()` blocks of `block_size` bytes.
    ///
    /// # Panics
    /// If the epoch is oblivious and the blocks are not plain: only [`crate::Engine`] asks the server.
    pub fn seal(&self, salts: Salts<'_>, blocks: &mut [u8], block_size: usize, keys: &mut [BlockKey]) {
        check_shape(blocks.len(), block_size, keys.len());
        assert!(self.oblivious.is_none() || salts.is_plain(), "oblivious keys follow from no hash alone");
        for (n, (group, keys)) in blocks.chunks_mut(GROUP * block_size).zip(keys.chunks_mut(GROUP)).enumerate() {
            let lens = Lens::packing(salts, group, block_size);
            let plain = lens.of(group);
            timed(Stage::Key, || {
                self.derive_group(salts.skip(n * GROUP), plain.as_slice(), keys);
                self.mark_group(&lens, keys);
            });
            if !salts.is_plain() {
                timed(Stage::Encrypt, || self.encrypt_group(salts.method(), group, keys, &lens));
            }
        }
    }

    /// Encrypts 1 to [`GROUP`] blocks in place, under given keys.
    pub(crate) fn encrypt_group(&self, method: Method, group: &mut [u8], keys: &[BlockKey], lens: &Lens) {
        self.suite.cipher(method).encrypt(self.kernel, keys, group, lens.of_first(keys.len()));
    }

    /// Marks the keys of the blocks that are compressed.
    pub(crate) fn mark_group(&self, lens: &Lens, keys: &mut [BlockKey]) {
        let is_compressed = |(at, _): &(usize, &mut BlockKey)| lens.is_short(*at);
        keys.iter_mut().enumerate().filter(is_compressed).for_each(|(_, key)| self.suite.mark_compressed(key));
    }

    /// Keys of at most [`GROUP`] blocks.
    fn derive_group(&self, salts: Salts<'_>, blocks: &[&[u8]], keys: &mut [BlockKey]) {
        let mut hashes = Zeroizing::new([[0u8; 32]; GROUP]);
        let hashes = &mut hashes[..blocks.len()];
        self.hash_group(salts.method(), blocks, hashes);
        self.keys_of_hashes(hashes, salts, keys);
    }

    /// The inputs for the server of at most [`GROUP`] blocks in an oblivious epoch.
    pub(crate) fn inputs_of_group(&self, salts: Salts<'_>, blocks: &[&[u8]], inputs: &mut [Input]) {
        let mut hashes = Zeroizing::new([[0u8; 32]; GROUP]);
        let hashes = &mut hashes[..blocks.len()];
        self.hash_group(salts.method(), blocks, hashes);
        without_trace(|| self.by(salts.method()).kdf.keys(self.kernel, hashes, salts, inputs));
    }

    /// The keys for at most [`GROUP`] inputs and their tokens.
    pub(crate) fn keys_of_tokens(&self, method: Method, inputs: &[Input], tokens: &[Token], keys: &mut [BlockKey]) {
        let check = self.by(method).check.as_ref().expect("an oblivious epoch has it");
        without_trace(|| check.keys(self.kernel, inputs, Salts::of_tokens(tokens), keys));
        for (key, token) in keys.iter_mut().zip(tokens) {
            // The token, followed by the first half of the derived bytes.
            key.copy_within(..16, 16);
            key[..16].copy_from_slice(token);
            self.suite.finish(key);
        }
    }

    /// The keys that at most [`GROUP`] blocks with these hashes must have, if their stored keys are right. An oblivious
    /// key contains its token.
    pub(crate) fn expected_keys<'k>(
        &self,
        hashes: &[[u8; 32]],
        salts: Salts<'_>,
        stored: impl Iterator<Item = &'k BlockKey>,
        keys: &mut [BlockKey],
    ) {
        if self.oblivious.is_none() || salts.is_plain() {
            return self.keys_of_hashes(hashes, salts, keys);
        }
        let mut inputs = Zeroizing::new([[0u8; 32]; GROUP]);
        let mut tokens = Zeroizing::new([[0u8; 16]; GROUP]);
        let (inputs, tokens) = (&mut inputs[..hashes.len()], &mut tokens[..hashes.len()]);
        tokens.iter_mut().zip(stored).for_each(|(token, key)| token.copy_from_slice(&key[..16]));
        without_trace(|| self.by(salts.method()).kdf.keys(self.kernel, hashes, salts, inputs));
        self.keys_of_tokens(salts.method(), inputs, tokens, keys);
    }

    /// Whether H itself depends on K_in.
    pub(crate) fn is_hash_keyed(&self, method: Method) -> bool {
        self.by(method).hash.is_keyed()
    }

    /// H of at most [`GROUP`] blocks.
    pub(crate) fn hash_group(&self, method: Method, blocks: &[&[u8]], hashes: &mut [[u8; 32]]) {
        self.by(method).hash.of(self.kernel, blocks, hashes);
    }

    /// K of each H, at most [`GROUP`]; for plain blocks H itself.
    pub(crate) fn keys_of_hashes(&self, hashes: &[[u8; 32]], salts: Salts<'_>, keys: &mut [BlockKey]) {
        match salts.is_plain() {
            true => keys.copy_from_slice(&hashes[..keys.len()]),
            false => without_trace(|| self.by(salts.method()).kdf.keys(self.kernel, hashes, salts, keys)),
        }
        keys.iter_mut().for_each(|k| self.suite.finish(k));
    }
}

/// Panics if the caller's slices do not fit one another. That is a bug in the program, whatever a file contains.
pub(crate) fn check_shape(bytes: usize, block_size: usize, keys: usize) {
    assert!(block_size > 0 && block_size.is_multiple_of(16), "a block is whole cipher blocks");
    assert_eq!(bytes, keys * block_size, "one key a block");
}

/// How many bytes of each of at most [`GROUP`] blocks are encrypted: all, unless the block is compressed.
#[derive(Clone, Copy)]
pub(crate) struct Lens {
    block_size: usize,
    lens: [usize; GROUP],
}

impl Lens {
    /// Blocks that are not compressed.
    pub(crate) fn whole(block_size: usize) -> Lens {
        Lens { block_size, lens: [block_size; GROUP] }
    }

    /// Replaces blocks by their payloads, if `salts` asks for compression and it saves enough.
    pub(crate) fn packing(salts: Salts<'_>, group: &mut [u8], block_size: usize) -> Lens {
        let mut lens = Lens::whole(block_size);
        if let Some(compression) = salts.compression() {
            timed(Stage::Compress, || {
                let blocks = group.chunks_exact_mut(block_size).zip(&mut lens.lens);
                blocks.for_each(|(block, len)| *len = compress::pack(compression, block));
            });
        }
        lens
    }

    pub(crate) fn set(&mut self, at: usize, len: usize) {
        self.lens[at] = len;
    }

    pub(crate) fn at(&self, at: usize) -> usize {
        self.lens[at]
    }

    pub(crate) fn of_first(&self, count: usize) -> &[usize] {
        &self.lens[..count]
    }

    fn is_short(&self, at: usize) -> bool {
        self.lens[at] < self.block_size
    }

    /// The bytes of each block of a group that are encrypted.
    pub(crate) fn of<'a>(&self, group: &'a [u8]) -> Group<'a> {
        Group::of(group.chunks_exact(self.block_size).zip(self.lens).map(|(block, len)| &block[..len]))
    }
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
