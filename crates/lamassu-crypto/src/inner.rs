//! Tier one: convergent encryption of data blocks under K_in (§10).
//!
//! Equal blocks under equal K_in with equal salt give equal keys and equal ciphertext, whatever else differs: that is what lets a store deduplicate, and
//! it must never change. The salt is empty but in narrow deduplication domains ([`Salts`]).

use crate::kernel::{Kernel, RoundKeys};
use crate::salt::{SALT_MAX, Salts};
use crate::secret::{Locked, Secret, without_trace};
use crate::stages::{Stage, timed};
use crate::xaes::doubled;
use crate::{BlockKey, Suite, derive};
use chacha20::ChaCha20;
use chacha20::cipher::{KeyIvInit, StreamCipher};
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
    Aes { kdf: Locked<CmacKey> },
    Paper { kdf: Locked<RoundKeys> },
    Blake3 { hash: Secret<32>, key: Secret<32> },
}

impl InnerKey {
    /// Expands `k_in`.
    pub fn new(suite: Suite, k_in: &Secret<32>) -> Self {
        Self::with_kernel(suite, k_in, Kernel::best())
    }

    /// The same on a kernel of choice.
    pub fn with_kernel(suite: Suite, k_in: &Secret<32>, kernel: Kernel) -> Self {
        let state = without_trace(|| match suite {
            Suite::Aes => {
                State::Aes { kdf: Locked::new(CmacKey::new(kernel, derive(suite, k_in, "block key").expose())) }
            }
            Suite::Paper => State::Paper { kdf: Locked::new(kernel.expand(k_in.expose())) },
            Suite::Blake3 | Suite::Chacha => {
                State::Blake3 { hash: derive(suite, k_in, "block hash"), key: derive(suite, k_in, "block key") }
            }
        });
        InnerKey { suite, kernel, state }
    }

    /// The suite.
    pub fn suite(&self) -> Suite {
        self.suite
    }

    /// Keys of the blocks in `plain` (a whole number of blocks, `keys.len() * block_size` bytes).
    pub fn derive(&self, salts: Salts<'_>, plain: &[u8], block_size: usize, keys: &mut [BlockKey]) {
        check_shape(plain.len(), block_size, keys.len());
        for (n, (group, keys)) in plain.chunks(GROUP * block_size).zip(keys.chunks_mut(GROUP)).enumerate() {
            let blocks = Group::of(group.chunks_exact(block_size));
            self.derive_group(salts.skip(n * GROUP), blocks.as_slice(), keys);
        }
    }

    /// Derives the keys and encrypts in place. `blocks` is a whole number of blocks, `keys.len() * block_size` bytes.
    pub fn seal(&self, salts: Salts<'_>, blocks: &mut [u8], block_size: usize, keys: &mut [BlockKey]) {
        check_shape(blocks.len(), block_size, keys.len());
        for (n, (group, keys)) in blocks.chunks_mut(GROUP * block_size).zip(keys.chunks_mut(GROUP)).enumerate() {
            let plain = Group::of(group.chunks_exact(block_size));
            timed(Stage::Key, || self.derive_group(salts.skip(n * GROUP), plain.as_slice(), keys));
            timed(Stage::Encrypt, || self.encrypt_group(group, block_size, keys));
        }
    }

    /// Encrypts at most [`GROUP`] blocks in place, under keys that are known already.
    pub(crate) fn encrypt_group(&self, group: &mut [u8], block_size: usize, keys: &[BlockKey]) {
        match self.suite {
            Suite::Aes | Suite::Paper => {
                let mut lanes: Vec<&mut [u8]> = group.chunks_exact_mut(block_size).collect();
                self.kernel.cbc_encrypt(keys, &mut lanes);
            }
            // A stream cipher is its own inverse.
            Suite::Blake3 | Suite::Chacha => decrypt_with(self.kernel, self.suite, group, block_size, keys),
        }
    }

    /// Keys of at most [`GROUP`] blocks.
    fn derive_group(&self, salts: Salts<'_>, blocks: &[&[u8]], keys: &mut [BlockKey]) {
        let mut hashes = Zeroizing::new([[0u8; 32]; GROUP]);
        let hashes = &mut hashes[..blocks.len()];
        self.hash_group(blocks, hashes);
        self.keys_of_hashes(hashes, salts, keys);
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
                without_trace(|| self.kernel.keyed_blake3(hash.expose(), blocks, hashes));
            }
        }
    }

    /// K of each h, at most [`GROUP`].
    pub(crate) fn keys_of_hashes(&self, hashes: &[[u8; 32]], salts: Salts<'_>, keys: &mut [BlockKey]) {
        without_trace(|| match &self.state {
            State::Aes { kdf } => sp800_108(self.kernel, kdf, hashes, salts, keys),
            State::Paper { kdf } => {
                assert_eq!(salts.len(), 0, "a header with suite paper names no domain that has a salt");
                keys.copy_from_slice(hashes);
                let (halves, _) = keys.as_flattened_mut().as_chunks_mut::<16>();
                self.kernel.ecb_encrypt(kdf, halves);
            }
            State::Blake3 { key, .. } => {
                let mut input = Zeroizing::new([0; 32 + SALT_MAX]);
                let input = &mut input[..32 + salts.len()];
                for (at, (h, k)) in hashes.iter().zip(keys.iter_mut()).enumerate() {
                    input[..32].copy_from_slice(h);
                    salts.write(at, &mut input[32..]);
                    *k = blake3::keyed_hash(key.expose(), input).into();
                }
            }
        });
        keys.iter_mut().for_each(|k| finish(self.suite, k));
    }
}

/// A key of AES-256-CMAC (SP 800-38B).
struct CmacKey {
    keys: RoundKeys,
    /// For messages of whole cipher blocks.
    k1: Zeroizing<[u8; 16]>,
    /// For others.
    k2: Zeroizing<[u8; 16]>,
}

impl CmacKey {
    fn new(kernel: Kernel, key: &[u8; 32]) -> Self {
        let keys = kernel.expand(key);
        let mut l = Zeroizing::new([[0; 16]]);
        kernel.ecb_encrypt(&keys, &mut *l);
        let k1 = Zeroizing::new(doubled(&l[0]));
        CmacKey { k2: Zeroizing::new(doubled(&k1)), k1, keys }
    }
}

/// Of the KDF's input: the counter, the label and its end, h.
const HASH_AT: usize = 12;
const SALT_AT: usize = HASH_AT + 32;
/// Bytes of the KDF's longest input, in whole cipher blocks.
const INPUT_MAX: usize = (SALT_AT + SALT_MAX + 4).next_multiple_of(16);

/// SP 800-108 counter KDF over AES-256-CMAC: c ‖ `lamassu` ‖ 00 ‖ h ‖ salt ‖ 256, for c = 1 and 2, for at most [`GROUP`] h at once.
fn sp800_108(kernel: Kernel, kdf: &CmacKey, hashes: &[[u8; 32]], salts: Salts<'_>, keys: &mut [BlockKey]) {
    let salt_end = SALT_AT + salts.len();
    let len = salt_end + 4;
    let padded = len.next_multiple_of(16);
    // What both counters have in common, with the subkey of CMAC where it goes: in the last cipher block.
    let mut inputs = Zeroizing::new([[0; INPUT_MAX]; GROUP]);
    for (at, (input, h)) in inputs.iter_mut().zip(hashes).enumerate() {
        input[4..HASH_AT].copy_from_slice(b"lamassu\0");
        input[HASH_AT..SALT_AT].copy_from_slice(h);
        salts.write(at, &mut input[SALT_AT..salt_end]);
        input[salt_end..len].copy_from_slice(&256u32.to_be_bytes());
        let subkey = match len == padded {
            true => &kdf.k1,
            false => {
                input[len] = 0x80;
                &kdf.k2
            }
        };
        xor(&mut input[padded - 16..padded], &**subkey);
    }
    let (macs, _) = keys.as_flattened_mut().as_chunks_mut::<16>();
    for (i, mac) in macs.iter_mut().enumerate() {
        mac[..4].copy_from_slice(&(i as u32 % 2 + 1).to_be_bytes());
        mac[4..].copy_from_slice(&inputs[i / 2][4..16]);
    }
    kernel.ecb_encrypt(&kdf.keys, macs);
    for block in (16..padded).step_by(16) {
        for (i, mac) in macs.iter_mut().enumerate() {
            xor(mac, &inputs[i / 2][block..block + 16]);
        }
        kernel.ecb_encrypt(&kdf.keys, macs);
    }
}

fn xor(to: &mut [u8], from: &[u8]) {
    to.iter_mut().zip(from).for_each(|(a, b)| *a ^= b);
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

#[cfg(test)]
mod tests {
    use super::*;
    use aes::Aes256;
    use cmac::{Cmac, KeyInit, Mac};
    use lamassu_format::Domain;

    fn block(seed: u8) -> Vec<u8> {
        let mut out = vec![0; 4096];
        blake3::Hasher::new_keyed(&[seed; 32]).finalize_xof().fill(&mut out);
        out
    }

    const FILE: [u8; 16] = [7; 16];

    /// Those of block 5 of the file and those behind it, and the salt of the `n`th, spelt out.
    fn salts(domain: Domain, n: u64) -> (Salts<'static>, Vec<u8>) {
        let spelt = match domain {
            Domain::Zone | Domain::Family => vec![],
            Domain::File => FILE.to_vec(),
            Domain::None => [&FILE[..], &(5 + n).to_le_bytes()].concat(),
        };
        (Salts::from_block(domain, FILE, 5), spelt)
    }

    /// The KDF of `aes` against SP 800-108 spelt out with the `cmac` crate.
    #[test]
    fn aes_keys_are_those_of_the_library() {
        for domain in Domain::ALL {
            aes_keys_are_those_of_the_library_in(domain);
        }
    }

    fn aes_keys_are_those_of_the_library_in(domain: Domain) {
        let k_in = Secret::new(&mut [0x42; 32]);
        let plain: Vec<u8> = (0..21).flat_map(block).collect();
        let kdf = derive(Suite::Aes, &k_in, "block key");
        for kernel in Kernel::available() {
            let mut keys = [[0; 32]; 21];
            InnerKey::with_kernel(Suite::Aes, &k_in, kernel).derive(salts(domain, 0).0, &plain, 4096, &mut keys);
            for (n, (p, k)) in plain.chunks(4096).zip(&keys).enumerate() {
                let mut expected = [0; 32];
                for c in 1..=2u32 {
                    let mut mac = Cmac::<Aes256>::new(kdf.expose().into());
                    let h = <sha2::Sha256 as sha2::Digest>::digest(p);
                    let (_, salt) = salts(domain, n as u64);
                    mac.update(&[&c.to_be_bytes()[..], b"lamassu\0", &h[..], &salt, &[0, 0, 1, 0]].concat());
                    expected[16 * (c as usize - 1)..][..16].copy_from_slice(&mac.finalize().into_bytes());
                }
                expected[31] &= 0xfe;
                assert_eq!(*k, expected, "{kernel} {domain:?}");
            }
        }
    }

    #[test]
    fn blake3_keys_are_those_of_the_library() {
        for (suite, domain) in [Suite::Blake3, Suite::Chacha].into_iter().flat_map(|s| Domain::ALL.map(|d| (s, d))) {
            let k_in = Secret::new(&mut [0x42; 32]);
            let plain: Vec<u8> = (0..21).flat_map(block).collect();
            let mut keys = [[0; 32]; 21];
            InnerKey::new(suite, &k_in).derive(salts(domain, 0).0, &plain, 4096, &mut keys);
            let [hash, kdf] = ["block hash", "block key"].map(|purpose| derive(suite, &k_in, purpose));
            for (n, (p, k)) in plain.chunks(4096).zip(&keys).enumerate() {
                let h = blake3::keyed_hash(hash.expose(), p);
                let input = [&h.as_bytes()[..], &salts(domain, n as u64).1].concat();
                let mut expected: BlockKey = blake3::keyed_hash(kdf.expose(), &input).into();
                expected[31] &= 0xfe;
                assert_eq!(*k, expected, "{suite:?} {domain:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "suite paper")]
    fn paper_takes_no_salt() {
        let key = InnerKey::new(Suite::Paper, &Secret::new(&mut [1; 32]));
        key.seal(salts(Domain::File, 0).0, &mut block(1), 4096, &mut [[0; 32]]);
    }

    #[test]
    fn equal_blocks_have_equal_keys_and_ciphertext_wherever_they_stand() {
        for suite in Suite::ALL {
            let key = InnerKey::new(suite, &Secret::new(&mut [1; 32]));
            let mut alone = block(7);
            let mut alone_key = [[0; 32]];
            key.seal(Salts::EMPTY, &mut alone, 4096, &mut alone_key);
            let mut blocks: Vec<u8> = (0..37).flat_map(|i| block(i % 3 + 6)).collect();
            let mut keys = [[0; 32]; 37];
            key.seal(Salts::EMPTY, &mut blocks, 4096, &mut keys);
            for i in (1..37).step_by(3) {
                assert_eq!(keys[i], alone_key[0]);
                assert!(blocks[i * 4096..][..4096] == alone[..]);
            }
        }
    }

    #[test]
    fn zones_and_suites_share_nothing() {
        let mut seen = std::collections::HashSet::new();
        for suite in Suite::ALL {
            for zone in [1, 2] {
                let mut blocks = block(1);
                let mut keys = [[0; 32]];
                InnerKey::new(suite, &Secret::new(&mut [zone; 32])).seal(Salts::EMPTY, &mut blocks, 4096, &mut keys);
                assert!(seen.insert(keys[0]) && seen.insert(blocks[..32].try_into().unwrap()));
            }
        }
    }

    #[test]
    fn fixed_bits_of_a_key() {
        for suite in Suite::ALL {
            let mut key = [0xff; 32];
            finish(suite, &mut key);
            assert_eq!(key[31], if suite == Suite::Paper { 0xff } else { 0xfe });
            assert!(is_possible(suite, &key));
            let mut last_bit = [0; 32];
            last_bit[31] = 1;
            finish(suite, &mut last_bit);
            let expected = if suite == Suite::Paper { (0, 1) } else { (0x80, 0) };
            assert_eq!((last_bit[0], last_bit[31]), expected);
            let mut zero = [0; 32];
            finish(suite, &mut zero);
            assert_eq!(zero[0], 0x80, "a hole is not a key");
        }
    }
}
