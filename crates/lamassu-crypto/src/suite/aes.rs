//! Suite `aes`: SHA-256, an SP 800-108 KDF over AES-256-CMAC, AES-256-CBC, XAES-256-GCM. The approved one.

use super::{BlockCipher, BlockKdf, CipherSuite, KnownAnswer};
use crate::hex::hex;
use crate::kernel::{AES_128, AES_256, GROUP, Kernel, RoundKeys};
use crate::salt::{SALT_MAX, Salts};
use crate::secret::Locked;
use crate::xaes::{Xaes, doubled};
use crate::{BlockKey, derive};
use lamassu_format::{Method, Suite};
use zeroize::Zeroizing;

pub(super) static SUITE: CipherSuite = CipherSuite {
    id: Suite::Aes,
    cipher: &Cbc::<AES_256>,
    short_cipher: Some(&Cbc::<AES_128>),
    expand: |kernel, k_in, purpose| {
        Box::new(Locked::new(CmacKey::new(kernel, derive(Suite::Aes, k_in, purpose).expose())))
    },
    aead: |key| Box::new(Xaes::new(key)),
    unapproved: None,
    known_k_in: hex("24f01a8e27d42c792be7dedd824d8d96c4291f8e5cdf7606977a830364bba9f6"),
    known_answers: &[
        KnownAnswer {
            name: "suite aes",
            method: Method::OF_SUITE,
            key: hex("6b5cd13d015f14d37f66e742ee3c615621e01aafd7240034e66fbccf48ad2716"),
            ciphertext: hex("51270759e472250c292af774c351db56a5c5c0ed0e6612be3fedfe1cd0314ad7"),
        },
        KnownAnswer {
            name: "suite aes, blake3",
            method: Method::new(false, true),
            key: hex("ac55046dbd1c3f9be4369cb9a0e5081be09ea1db79bea9c32476a3270748a468"),
            ciphertext: hex("5ebe74ae961c7740d82bc57baa591940503276dd6543ec86fbefe83f6cad4812"),
        },
        KnownAnswer {
            name: "suite aes, aes-128",
            method: Method::new(true, false),
            key: hex("2bc408a09e81f9596b6f4c3d399cc52f6bcddaffb787aa38a14c6ee827410126"),
            ciphertext: hex("519123c913dbe5fee117c8d36af56e1c918887d899d8512e28841aaab3d9d886"),
        },
        KnownAnswer {
            name: "suite aes, aes-128, blake3",
            method: Method::new(true, true),
            key: hex("0ec63a7c136b4ff4173cc8e279251a6eb9275a76d017c3849094bac54eb3c8b2"),
            ciphertext: hex("eeede9a99f2173aa6631cf950c24c3581a73d6592ea24434bd28b11a8d9d375f"),
        },
    ],
};

/// AES-CBC with a zero IV, by the number of round keys.
pub(super) struct Cbc<const N: usize>;

impl<const N: usize> BlockCipher for Cbc<N> {
    /// All lanes run to the end of the longest: the kernels take lanes of one length, and the others would idle.
    fn encrypt(&self, kernel: Kernel, keys: &[BlockKey], group: &mut [u8], lens: &[usize]) {
        let longest = lens.iter().max().copied().unwrap_or_default();
        let blocks = group.chunks_exact_mut(group.len() / keys.len());
        let mut lanes: Vec<&mut [u8]> = blocks.map(|block| &mut block[..longest]).collect();
        kernel.cbc_encrypt::<N>(keys, &mut lanes);
        lanes.iter_mut().zip(lens).for_each(|(lane, len)| lane[*len..].fill(0));
    }

    fn decrypt(&self, kernel: Kernel, key: &BlockKey, block: &mut [u8]) {
        kernel.cbc_decrypt::<N>(key, block);
    }
}

/// A key of AES-256-CMAC (SP 800-38B).
struct CmacKey {
    keys: RoundKeys<AES_256>,
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
    /// SP 800-108 counter KDF over AES-256-CMAC: c ‖ `lamassu` ‖ 00 ‖ H ‖ salt ‖ 256, for c = 1 and 2.
    fn keys(&self, kernel: Kernel, hashes: &[[u8; 32]], salts: Salts<'_>, keys: &mut [BlockKey]) {
        let salt_end = SALT_AT + salts.len();
        let len = salt_end + 4;
        let padded = len.next_multiple_of(16);
        // The common part of both inputs. The subkey of CMAC is in the last cipher block.
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
