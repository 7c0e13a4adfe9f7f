//! XAES-256-GCM (C2SP): AES-256-GCM with 192-bit nonces, so that random nonces never run out (§2).

use crate::aead::Aead;
use crate::secret::{Locked, Secret};
use crate::{Provider, Unauthentic};
use aes::Aes256;
use aes::cipher::{Block, BlockCipherEncrypt, KeyInit};
use aes_gcm::Aes256Gcm;
use aes_gcm::aead::AeadInOut;
use zeroize::{Zeroize, Zeroizing};

/// A key of XAES-256-GCM.
pub(crate) enum Xaes {
    Own(Locked<Expanded>),
    /// Not expanded: the module expands it for each call.
    #[cfg(feature = "fips")]
    Module(Secret<32>),
}

pub(crate) struct Expanded {
    cipher: Aes256,
    /// The first CMAC subkey, which every derivation uses.
    k1: Zeroizing<[u8; 16]>,
}

impl Xaes {
    pub(crate) fn new(key: &Secret<32>) -> Self {
        Self::by(Provider::current(), key)
    }

    pub(crate) fn by(provider: Provider, key: &Secret<32>) -> Self {
        match provider {
            Provider::Own => Self::expanded(key),
            #[cfg(feature = "fips")]
            Provider::Module => Xaes::Module(Secret::filled_by(|out| *out = *key.expose())),
        }
    }

    fn expanded(key: &Secret<32>) -> Self {
        let cipher = Aes256::new(key.expose().into());
        let mut l = Block::<Aes256>::default();
        cipher.encrypt_block(&mut l);
        let k1 = Zeroizing::new(doubled(&l.into()));
        l.zeroize();
        Xaes::Own(Locked::new(Expanded { cipher, k1 }))
    }

    /// The key of AES-256-GCM that the first half of the nonce gives.
    fn derived(&self, nonce: &[u8; 24]) -> Zeroizing<[u8; 32]> {
        let mut key = Zeroizing::new([0u8; 32]);
        for (counter, half) in (1u8..).zip(key.chunks_exact_mut(16)) {
            half[..4].copy_from_slice(&[0, counter, 0x58, 0]);
            half[4..].copy_from_slice(&nonce[..12]);
        }
        let masked = |key: &mut [u8; 32], k1: &[u8; 16]| {
            key.as_chunks_mut::<16>().0.iter_mut().for_each(|half| half.iter_mut().zip(k1).for_each(|(m, k)| *m ^= k));
        };
        match self {
            Xaes::Own(own) => {
                masked(&mut key, &own.k1);
                own.cipher.encrypt_blocks(Block::<Aes256>::slice_as_chunks_mut(&mut *key).0);
            }
            #[cfg(feature = "fips")]
            Xaes::Module(root) => {
                let mut k1 = Zeroizing::new([0; 16]);
                crate::module::ecb_encrypt(root.expose(), &mut *k1);
                *k1 = doubled(&k1);
                masked(&mut key, &k1);
                crate::module::ecb_encrypt(root.expose(), &mut *key);
            }
        }
        key
    }
}

impl Aead for Xaes {
    fn seal(&self, nonce: &[u8; 24], aad: &[u8], content: &mut [u8]) -> [u8; 16] {
        let (key, nonce) = (self.derived(nonce), nonce_rest(nonce));
        match self {
            Xaes::Own(_) => {
                let tag = Aes256Gcm::new((&*key).into()).encrypt_inout_detached(nonce.into(), aad, content.into());
                tag.expect("content and AAD are far below the 64 GiB of GCM").into()
            }
            #[cfg(feature = "fips")]
            Xaes::Module(_) => crate::module::gcm_seal(&key, nonce, aad, content),
        }
    }

    fn open(&self, nonce: &[u8; 24], aad: &[u8], content: &mut [u8], tag: &[u8; 16]) -> Result<(), Unauthentic> {
        let (key, nonce) = (self.derived(nonce), nonce_rest(nonce));
        match self {
            Xaes::Own(_) => Aes256Gcm::new((&*key).into())
                .decrypt_inout_detached(nonce.into(), aad, content.into(), tag.into())
                .map_err(|_| Unauthentic),
            #[cfg(feature = "fips")]
            Xaes::Module(_) => crate::module::gcm_open(&key, nonce, aad, content, tag),
        }
    }
}

fn nonce_rest(nonce: &[u8; 24]) -> &[u8; 12] {
    nonce.last_chunk().expect("24 bytes have a last 12")
}

/// Doubling in GF(2¹²⁸), as CMAC makes its subkeys.
pub(crate) fn doubled(block: &[u8; 16]) -> [u8; 16] {
    let x = u128::from_be_bytes(*block);
    // Without a branch: the bit that is shifted out is secret.
    ((x << 1) ^ ((x >> 127) * 0x87)).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C2SP XAES-256-GCM, "Test vectors".
    #[test]
    fn c2sp_vectors() {
        for (key, aad, expected) in [
            (1u8, &b""[..], "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
            (3, b"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
        ] {
            let x = Xaes::new(&Secret::new(&mut [key; 32]));
            let mut content = *b"XAES-256-GCM";
            let nonce = b"ABCDEFGHIJKLMNOPQRSTUVWX";
            let tag = x.seal(nonce, aad, &mut content);
            let sealed = [&content[..], &tag[..]].concat();
            assert_eq!(data_encoding::HEXLOWER.encode(&sealed), expected);
            x.open(nonce, aad, &mut content, &tag).unwrap();
            assert_eq!(&content, b"XAES-256-GCM");
            assert_eq!(x.open(nonce, b"other", &mut content, &tag), Err(Unauthentic));
        }
    }
}
