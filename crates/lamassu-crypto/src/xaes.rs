//! XAES-256-GCM (C2SP): AES-256-GCM with 192-bit nonces, so that random nonces never run out (§2).

use crate::Unauthentic;
use crate::secret::{Locked, Secret};
use aes::Aes256;
use aes::cipher::{Block, BlockCipherEncrypt, KeyInit};
use aes_gcm::Aes256Gcm;
use aes_gcm::aead::AeadInOut;
use zeroize::{Zeroize, Zeroizing};

/// A key of XAES-256-GCM, expanded.
pub(crate) struct Xaes {
    key: Locked<Expanded>,
}

struct Expanded {
    cipher: Aes256,
    /// The first CMAC subkey, which every derivation uses.
    k1: Zeroizing<[u8; 16]>,
}

impl Xaes {
    pub(crate) fn new(key: &Secret<32>) -> Self {
        let cipher = Aes256::new(key.expose().into());
        let mut l = Block::<Aes256>::default();
        cipher.encrypt_block(&mut l);
        let k1 = Zeroizing::new(doubled(&l.into()));
        l.zeroize();
        Xaes { key: Locked::new(Expanded { cipher, k1 }) }
    }

    /// AES-256-GCM under the key that the first half of the nonce gives.
    fn derived(&self, nonce: &[u8; 24]) -> Aes256Gcm {
        let mut key = Zeroizing::new([0u8; 32]);
        for (counter, half) in (1u8..).zip(key.chunks_exact_mut(16)) {
            half[..4].copy_from_slice(&[0, counter, 0x58, 0]);
            half[4..].copy_from_slice(&nonce[..12]);
            half.iter_mut().zip(self.key.k1.iter()).for_each(|(m, k)| *m ^= k);
            let block: &mut Block<Aes256> = half.try_into().expect("half of 32 bytes");
            self.key.cipher.encrypt_block(block);
        }
        Aes256Gcm::new((&*key).into())
    }

    /// Encrypts in place; returns the tag.
    pub(crate) fn seal(&self, nonce: &[u8; 24], aad: &[u8], content: &mut [u8]) -> [u8; 16] {
        let tag = self.derived(nonce).encrypt_inout_detached(nonce_rest(nonce).into(), aad, content.into());
        tag.expect("content and AAD are far below the 64 GiB of GCM").into()
    }

    /// Decrypts in place. On failure the content is unspecified.
    pub(crate) fn open(
        &self,
        nonce: &[u8; 24],
        aad: &[u8],
        content: &mut [u8],
        tag: &[u8; 16],
    ) -> Result<(), Unauthentic> {
        let gcm = self.derived(nonce);
        gcm.decrypt_inout_detached(nonce_rest(nonce).into(), aad, content.into(), tag.into()).map_err(|_| Unauthentic)
    }
}

fn nonce_rest(nonce: &[u8; 24]) -> &[u8; 12] {
    nonce.last_chunk().expect("24 bytes have a last 12")
}

/// Doubling in GF(2¹²⁸), as CMAC makes its subkeys.
pub(crate) fn doubled(block: &[u8; 16]) -> [u8; 16] {
    let x = u128::from_be_bytes(*block);
    // Without a branch: the bit that falls out is secret.
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
