//! Suite `aes`: SHA-256, an SP 800-108 KDF over AES-256-CMAC, AES-256-CBC, XAES-256-GCM. The approved one.

use super::{BlockCipher, BlockKdf, CipherSuite, KnownAnswer};
use crate::inner::GROUP;
use crate::kernel::{Kernel, RoundKeys};
use crate::salt::{SALT_MAX, Salts};
use crate::secret::Locked;
use crate::selftest::hex;
use crate::xaes::{Xaes, doubled};
use crate::{BlockKey, derive};
use lamassu_format::Suite;
use zeroize::Zeroizing;

pub(super) static SUITE: CipherSuite = CipherSuite {
    id: Suite::Aes,
    cipher: &Cbc,
    expand: |kernel, k_in| Box::new(Locked::new(CmacKey::new(kernel, derive(Suite::Aes, k_in, "block key").expose()))),
    is_hash_keyed: false,
    is_last_bit_clear: true,
    aead: |key| Box::new(Xaes::new(key)),
    unapproved: None,
    known_answer: KnownAnswer {
        name: "suite aes",
        k_in: hex("24f01a8e27d42c792be7dedd824d8d96c4291f8e5cdf7606977a830364bba9f6"),
        key: hex("6b5cd13d015f14d37f66e742ee3c615621e01aafd7240034e66fbccf48ad2716"),
        ciphertext: hex("51270759e472250c292af774c351db56a5c5c0ed0e6612be3fedfe1cd0314ad7"),
    },
};

/// AES-256-CBC with a zero IV.
pub(super) struct Cbc;

impl BlockCipher for Cbc {
    fn encrypt(&self, kernel: Kernel, keys: &[BlockKey], group: &mut [u8]) {
        let mut lanes: Vec<&mut [u8]> = group.chunks_exact_mut(group.len() / keys.len()).collect();
        kernel.cbc_encrypt(keys, &mut lanes);
    }

    fn decrypt(&self, kernel: Kernel, key: &BlockKey, block: &mut [u8]) {
        kernel.cbc_decrypt(key, block);
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

/// Of the KDF's input: the counter, the label and its end, H.
const HASH_AT: usize = 12;
const SALT_AT: usize = HASH_AT + 32;
/// Bytes of the KDF's longest input, in whole cipher blocks.
const INPUT_MAX: usize = (SALT_AT + SALT_MAX + 4).next_multiple_of(16);

impl BlockKdf for Locked<CmacKey> {
    fn hash(&self, kernel: Kernel, blocks: &[&[u8]], hashes: &mut [[u8; 32]]) {
        kernel.sha256(blocks, hashes);
    }

    /// SP 800-108 counter KDF over AES-256-CMAC: c ‖ `lamassu` ‖ 00 ‖ H ‖ salt ‖ 256, for c = 1 and 2.
    fn keys(&self, kernel: Kernel, hashes: &[[u8; 32]], salts: Salts<'_>, keys: &mut [BlockKey]) {
        let salt_end = SALT_AT + salts.len();
        let len = salt_end + 4;
        let padded = len.next_multiple_of(16);
        // What both counters have in common. The last cipher block has the subkey of CMAC in it.
        let mut inputs = Zeroizing::new([[0; INPUT_MAX]; GROUP]);
        for (at, (input, h)) in inputs.iter_mut().zip(hashes).enumerate() {
            input[4..HASH_AT].copy_from_slice(b"lamassu\0");
            input[HASH_AT..SALT_AT].copy_from_slice(h);
            salts.write(at, &mut input[SALT_AT..salt_end]);
            input[salt_end..len].copy_from_slice(&256u32.to_be_bytes());
            let subkey = match len == padded {
                true => &self.k1,
                false => {
                    input[len] = 0x80;
                    &self.k2
                }
            };
            xor(&mut input[padded - 16..padded], &**subkey);
        }
        let (macs, _) = keys.as_flattened_mut().as_chunks_mut::<16>();
        for (i, mac) in macs.iter_mut().enumerate() {
            mac[..4].copy_from_slice(&(i as u32 % 2 + 1).to_be_bytes());
            mac[4..].copy_from_slice(&inputs[i / 2][4..16]);
        }
        kernel.ecb_encrypt(&self.keys, macs);
        for block in (16..padded).step_by(16) {
            for (i, mac) in macs.iter_mut().enumerate() {
                xor(mac, &inputs[i / 2][block..block + 16]);
            }
            kernel.ecb_encrypt(&self.keys, macs);
        }
    }
}

fn xor(to: &mut [u8], from: &[u8]) {
    to.iter_mut().zip(from).for_each(|(a, b)| *a ^= b);
}
