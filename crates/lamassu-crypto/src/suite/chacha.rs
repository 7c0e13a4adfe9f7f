//! Suite `chacha`: keyed BLAKE3 for H and K, ChaCha20, XChaCha20-Poly1305. It needs no AES instructions.

use super::blake3::KeyedHash;
use super::{Aead, BlockCipher, CipherSuite, KnownAnswer};
use crate::hex::hex;
use crate::kernel::Kernel;
use crate::secret::{Locked, Secret};
use crate::{BlockKey, Unauthentic, derive};
use chacha20::ChaCha20;
use chacha20::cipher::{KeyIvInit, StreamCipher};
use chacha20poly1305::XChaCha20Poly1305;
use chacha20poly1305::aead::{AeadInOut, KeyInit};
use lamassu_format::{Method, Suite};

pub(super) static SUITE: CipherSuite = CipherSuite {
    id: Suite::Chacha,
    cipher: &Stream,
    short_cipher: None,
    expand: |_, k_in, purpose| Box::new(KeyedHash(derive(Suite::Chacha, k_in, purpose))),
    aead: |key| Box::new(XChaCha::new(key)),
    unapproved: Some("suite chacha encrypts with ChaCha20, which is not approved; use aes"),
    known_k_in: hex("df89ae669a278c6db3a9a20205e2d33888ae1fc6ace5d5fa6bb765573982badd"),
    known_answers: &[
        KnownAnswer {
            name: "suite chacha",
            method: Method::OF_SUITE,
            key: hex("8f5d4a97b503f75a5945e46e79e611c6f2a6015fc5e91a201a0db2863730f144"),
            ciphertext: hex("9737e64968fe23a595e7ad33ac5b46e643df61df23ff4568a420984dd0a1ed10"),
        },
        KnownAnswer {
            name: "suite chacha, sha-256",
            method: Method::new(false, true),
            key: hex("83f4ca6f4994445207e58b9abf2b4817a3d1abb307adc00e8566a6eed7e8d14c"),
            ciphertext: hex("91b45877076dcdb61fe19a4e0db75967457f8cd1e0a6941dd8482603e7dfb930"),
        },
    ],
};

/// ChaCha20 with a zero nonce. Malleable.
struct Stream;

impl BlockCipher for Stream {
    fn encrypt(&self, kernel: Kernel, keys: &[BlockKey], group: &mut [u8], lens: &[usize]) {
        let blocks = group.chunks_exact_mut(group.len() / keys.len());
        blocks.zip(keys).zip(lens).for_each(|((block, key), len)| self.decrypt(kernel, key, &mut block[..*len]));
    }

    /// A stream cipher is its own inverse.
    fn decrypt(&self, _: Kernel, key: &BlockKey, block: &mut [u8]) {
        ChaCha20::new(key.into(), &[0; 12].into()).apply_keystream(block);
    }
}

/// XChaCha20-Poly1305 (draft-irtf-cfrg-xchacha-03).
pub(crate) struct XChaCha(Locked<XChaCha20Poly1305>);

impl XChaCha {
    pub(crate) fn new(key: &Secret<32>) -> Self {
        XChaCha(Locked::new(XChaCha20Poly1305::new(key.expose().into())))
    }
}

impl Aead for XChaCha {
    fn seal(&self, nonce: &[u8; 24], aad: &[u8], content: &mut [u8]) -> [u8; 16] {
        let tag = self.0.encrypt_inout_detached(nonce.into(), aad, content.into());
        tag.expect("content is far below the 256 GiB of ChaCha20").into()
    }

    fn open(&self, nonce: &[u8; 24], aad: &[u8], content: &mut [u8], tag: &[u8; 16]) -> Result<(), Unauthentic> {
        self.0.decrypt_inout_detached(nonce.into(), aad, content.into(), tag.into()).map_err(|_| Unauthentic)
    }
}
