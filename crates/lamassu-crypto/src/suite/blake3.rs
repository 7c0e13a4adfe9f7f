//! Suite `blake3`: keyed BLAKE3 for H and K, AES-256-CTR, XAES-256-GCM.

use super::{BlockCipher, BlockKdf, CipherSuite, KnownAnswer};
use crate::hex::hex;
use crate::kernel::{AES_128, AES_256, Kernel};
use crate::salt::{SALT_MAX, Salts};
use crate::secret::Secret;
use crate::xaes::Xaes;
use crate::{BlockKey, derive};
use lamassu_format::{Method, Suite};
use zeroize::Zeroizing;

pub(super) static SUITE: CipherSuite = CipherSuite {
    id: Suite::Blake3,
    cipher: &Ctr::<AES_256>,
    short_cipher: Some(&Ctr::<AES_128>),
    expand: |_, k_in, purpose| Box::new(KeyedHash(derive(Suite::Blake3, k_in, purpose))),
    aead: |key| Box::new(Xaes::new(key)),
    unapproved: Some("suite blake3 hashes with BLAKE3, which FIPS 180-4 and 202 do not know; use aes"),
    known_k_in: hex("d687463f95454ee0433bc617c6ae8864bdca6a364f9ab843dc7e8dced1a45dce"),
    known_answers: &[
        KnownAnswer {
            name: "suite blake3",
            method: Method::OF_SUITE,
            key: hex("ce62c9ddc66e3b6fa9c5e6f0acba1851313e31e09432e4883c1e066475ab5b04"),
            ciphertext: hex("917c6fbb8fcd0b4c191596d6b3dcff8fee3f0cc5eee2ea571cbbbfc7c451c02f"),
        },
        KnownAnswer {
            name: "suite blake3, sha-256",
            method: Method::new(false, true),
            key: hex("772670cc7b72daab1c228e5ce9cbd2bcc8b226dd3e150e747ef6e6b911d749fa"),
            ciphertext: hex("35f54704a3dcb3e2e9a293ad874ec820b7c438196c38527ca7c265d3609ae1c4"),
        },
        KnownAnswer {
            name: "suite blake3, aes-128, sha-256",
            method: Method::new(true, true),
            key: hex("ba9b56eef3f961c87ef398554e4438fda9496cd61094ec665e637ac859dfbc98"),
            ciphertext: hex("f7e65365efb623d1c53dbcd0abc201587ccbaca59e434c6cdde5cff0e481f661"),
        },
        KnownAnswer {
            name: "suite blake3, aes-128",
            method: Method::new(true, false),
            key: hex("f33ba070c1a84142f33239317885a38cf87875950b876c8b92470544294fb922"),
            ciphertext: hex("d907795d88bc8238cfc01be7544c0f94e3edafb128779f539b80aadae9ad3cf7"),
        },
    ],
};

/// AES-CTR with a zero counter, by the number of round keys. Malleable.
struct Ctr<const N: usize>;

impl<const N: usize> BlockCipher for Ctr<N> {
    fn encrypt(&self, kernel: Kernel, keys: &[BlockKey], group: &mut [u8], lens: &[usize]) {
        let blocks = group.chunks_exact_mut(group.len() / keys.len());
        blocks.zip(keys).zip(lens).for_each(|((block, key), len)| kernel.ctr::<N>(key, &mut block[..*len]));
    }

    fn decrypt(&self, kernel: Kernel, key: &BlockKey, block: &mut [u8]) {
        kernel.ctr::<N>(key, block);
    }
}

/// The key of keyed BLAKE3 for K. Suite `chacha` has the same, under another label.
pub(super) struct KeyedHash(pub(super) Secret<32>);

impl BlockKdf for KeyedHash {
    fn keys(&self, _: Kernel, hashes: &[[u8; 32]], salts: Salts<'_>, keys: &mut [BlockKey]) {
        let mut input = Zeroizing::new([0; 32 + SALT_MAX]);
        let input = &mut input[..32 + salts.len()];
        for (at, (h, k)) in hashes.iter().zip(keys.iter_mut()).enumerate() {
            input[..32].copy_from_slice(h);
            salts.write(at, &mut input[32..]);
            *k = ::blake3::keyed_hash(self.0.expose(), input).into();
        }
    }
}
