//! The page and record AEAD of a suite (§2): both take 24-byte nonces and give 16-byte tags.

use crate::secret::{Locked, Secret};
use crate::xaes::Xaes;
use crate::{Suite, Unauthentic};
use chacha20poly1305::XChaCha20Poly1305;
use chacha20poly1305::aead::{AeadInOut, KeyInit};

pub(crate) enum Aead {
    Xaes(Xaes),
    XChaCha(Locked<XChaCha20Poly1305>),
}

impl Aead {
    pub(crate) fn new(suite: Suite, key: &Secret<32>) -> Self {
        match suite {
            Suite::Aes | Suite::Paper | Suite::Blake3 => Aead::Xaes(Xaes::new(key)),
            Suite::Chacha => Aead::XChaCha(Locked::new(XChaCha20Poly1305::new(key.expose().into()))),
        }
    }

    /// Encrypts in place; returns the tag.
    pub(crate) fn seal(&self, nonce: &[u8; 24], aad: &[u8], content: &mut [u8]) -> [u8; 16] {
        match self {
            Aead::Xaes(x) => x.seal(nonce, aad, content),
            Aead::XChaCha(x) => {
                let tag = x.encrypt_inout_detached(nonce.into(), aad, content.into());
                tag.expect("content is far below the 256 GiB of ChaCha20").into()
            }
        }
    }

    /// Decrypts in place. On failure the content is unspecified.
    pub(crate) fn open(
        &self,
        nonce: &[u8; 24],
        aad: &[u8],
        content: &mut [u8],
        tag: &[u8; 16],
    ) -> Result<(), Unauthentic> {
        match self {
            Aead::Xaes(x) => x.open(nonce, aad, content, tag),
            Aead::XChaCha(x) => {
                x.decrypt_inout_detached(nonce.into(), aad, content.into(), tag.into()).map_err(|_| Unauthentic)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use data_encoding::HEXLOWER;

    /// draft-irtf-cfrg-xchacha-03, A.3.1.
    #[test]
    fn xchacha_draft_vector() {
        let mut key: [u8; 32] = std::array::from_fn(|i| 0x80 + i as u8);
        let a = Aead::new(Suite::Chacha, &Secret::new(&mut key));
        let nonce: [u8; 24] = std::array::from_fn(|i| 0x40 + i as u8);
        let aad = HEXLOWER.decode(b"50515253c0c1c2c3c4c5c6c7").unwrap();
        let text = b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would be it.";
        let mut content = *text;
        let tag = a.seal(&nonce, &aad, &mut content);
        assert_eq!(HEXLOWER.encode(&tag), "c0875924c1c7987947deafd8780acf49");
        assert_eq!(HEXLOWER.encode(&content[..16]), "bd6d179d3e83d43b9576579493c0e939");
        a.open(&nonce, &aad, &mut content, &tag).unwrap();
        assert_eq!(&content, text);
    }
}
