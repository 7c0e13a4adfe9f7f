//! Suite `blake3`: keyed BLAKE3 for H and K, AES-256-CTR, XAES-256-GCM.

use super::{BlockCipher, BlockKdf, CipherSuite, KnownAnswer};
use crate::kernel::Kernel;
use crate::salt::{SALT_MAX, Salts};
use crate::secret::{Secret, without_trace};
use crate::selftest::hex;
use crate::xaes::Xaes;
use crate::{BlockKey, derive};
use lamassu_format::Suite;
use zeroize::Zeroizing;

pub(super) static SUITE: CipherSuite = CipherSuite {
    id: Suite::Blake3,
    cipher: &Ctr,
    expand: |_, k_in| Box::new(KeyedHash::new(Suite::Blake3, k_in)),
    is_hash_keyed: true,
    is_last_bit_clear: true,
    aead: |key| Box::new(Xaes::new(key)),
    unapproved: Some("suite blake3 hashes with BLAKE3, which FIPS 180-4 and 202 do not know; use aes"),
    known_answer: KnownAnswer {
        name: "suite blake3",
        k_in: hex("d687463f95454ee0433bc617c6ae8864bdca6a364f9ab843dc7e8dced1a45dce"),
        key: hex("ce62c9ddc66e3b6fa9c5e6f0acba1851313e31e09432e4883c1e066475ab5b04"),
        ciphertext: hex("917c6fbb8fcd0b4c191596d6b3dcff8fee3f0cc5eee2ea571cbbbfc7c451c02f"),
    },
};

/// AES-256-CTR with a zero counter. Malleable.
struct Ctr;

impl BlockCipher for Ctr {
    fn encrypt(&self, kernel: Kernel, keys: &[BlockKey], group: &mut [u8]) {
        let len = group.len() / keys.len();
        group.chunks_exact_mut(len).zip(keys).for_each(|(block, key)| kernel.ctr(key, block));
    }

    fn decrypt(&self, kernel: Kernel, key: &BlockKey, block: &mut [u8]) {
        kernel.ctr(key, block);
    }
}

/// The keys of both hashes. Suite `chacha` has the same, under other labels.
pub(super) struct KeyedHash {
    hash: Secret<32>,
    key: Secret<32>,
}

impl KeyedHash {
    pub(super) fn new(suite: Suite, k_in: &Secret<32>) -> Self {
        KeyedHash { hash: derive(suite, k_in, "block hash"), key: derive(suite, k_in, "block key") }
    }
}

impl BlockKdf for KeyedHash {
    fn hash(&self, kernel: Kernel, blocks: &[&[u8]], hashes: &mut [[u8; 32]]) {
        without_trace(|| kernel.keyed_blake3(self.hash.expose(), blocks, hashes));
    }

    fn keys(&self, _: Kernel, hashes: &[[u8; 32]], salts: Salts<'_>, keys: &mut [BlockKey]) {
        let mut input = Zeroizing::new([0; 32 + SALT_MAX]);
        let input = &mut input[..32 + salts.len()];
        for (at, (h, k)) in hashes.iter().zip(keys.iter_mut()).enumerate() {
            input[..32].copy_from_slice(h);
            salts.write(at, &mut input[32..]);
            *k = ::blake3::keyed_hash(self.key.expose(), input).into();
        }
    }
}
