//! The primitives of headers (§4): HKDF, HMAC, XAES-256-GCM, and Argon2id, which is in `argon`.

use crate::aead::Aead;
use crate::secret::{Secret, SecretBytes, without_trace};
use crate::xaes::Xaes;
use crate::{NoRandom, Provider, Unauthentic, random};
use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

pub use crate::argon::{argon2id, calibrate, memory_to_spare_kib};

/// Bytes of an AEAD tag.
const TAG_LEN: usize = 16;

/// HKDF-SHA-256 (RFC 5869) to N bytes, at most 8160.
pub fn hkdf<const N: usize>(ikm: &[u8], salt: &[u8], info: &[u8]) -> Secret<N> {
    hkdf_by(Provider::current(), ikm, salt, info)
}

pub(crate) fn hkdf_by<const N: usize>(provider: Provider, ikm: &[u8], salt: &[u8], info: &[u8]) -> Secret<N> {
    const { assert!(N <= 255 * 32) };
    without_trace(|| match provider {
        Provider::Own => {
            let prk = Hkdf::<Sha256>::new(Some(salt), ikm);
            Secret::filled_by(|out| prk.expand(info, out).expect("the length is within RFC 5869, checked above"))
        }
        #[cfg(feature = "fips")]
        Provider::Module => Secret::filled_by(|out| crate::module::hkdf(ikm, salt, info, out)),
    })
}

/// HMAC-SHA-256.
pub fn hmac(key: &Secret<32>, data: &[u8]) -> [u8; 32] {
    hmac_of(key, &[data])
}

/// HMAC-SHA-256 of parts, joined.
pub(crate) fn hmac_of(key: &Secret<32>, parts: &[&[u8]]) -> [u8; 32] {
    hmac_by(Provider::current(), key, parts)
}

pub(crate) fn hmac_by(provider: Provider, key: &Secret<32>, parts: &[&[u8]]) -> [u8; 32] {
    without_trace(|| match provider {
        Provider::Own => {
            let mut mac = Hmac::<Sha256>::new_from_slice(key.expose()).expect("HMAC takes keys of any length");
            parts.iter().for_each(|p| mac.update(p));
            mac.finalize().into_bytes().into()
        }
        #[cfg(feature = "fips")]
        Provider::Module => crate::module::hmac(key.expose(), parts),
    })
}

/// SHA-256.
pub fn sha256(data: &[u8]) -> [u8; 32] {
    match Provider::current() {
        Provider::Own => Sha256::digest(data).into(),
        #[cfg(feature = "fips")]
        Provider::Module => crate::module::sha256(data),
    }
}

/// SHA-256 of parts, joined.
pub fn sha256_of(parts: &[&[u8]]) -> [u8; 32] {
    match Provider::current() {
        Provider::Own => parts.iter().fold(Sha256::new(), |hash, part| hash.chain_update(part)).finalize().into(),
        #[cfg(feature = "fips")]
        Provider::Module => crate::module::sha256(&parts.concat()),
    }
}

/// Constant-time comparison. Lengths are public.
pub fn equal(a: &[u8], b: &[u8]) -> bool {
    a.ct_eq(b).into()
}

/// XAES-256-GCM under a fresh nonce: (nonce, tag ‖ ciphertext).
///
/// # Errors
/// [`NoRandom`] when getrandom(2) fails.
pub fn seal(key: &Secret<32>, aad: &[u8], content: &[u8]) -> Result<([u8; 24], Vec<u8>), NoRandom> {
    let nonce = fresh_nonce(&hkdf(key.expose(), b"", b"lamassu v1 nonce"), aad, content)?;
    Ok((nonce, seal_with(key, &nonce, aad, content)))
}

/// A nonce that no other content gets under `key`, which is a key for nonces alone: a PRF of 32 random bytes, the AAD
/// and the content. Two virtual machines that are resumed from one memory image draw the same random bytes. Even then
/// only equal contents get equal nonces, and they are sealed to equal bytes.
pub(crate) fn fresh_nonce(key: &Secret<32>, aad: &[u8], content: &[u8]) -> Result<[u8; 24], NoRandom> {
    let mut drawn = [0; 32];
    random(&mut drawn)?;
    Ok(nonce_of(key, &drawn, aad, content))
}

fn nonce_of(key: &Secret<32>, drawn: &[u8; 32], aad: &[u8], content: &[u8]) -> [u8; 24] {
    let prf = hmac_of(key, &[drawn, &(aad.len() as u64).to_le_bytes(), aad, content]);
    *prf.first_chunk().expect("32 bytes have a first 24")
}

/// The same under a given nonce, for stored vectors.
#[doc(hidden)]
pub fn seal_with(key: &Secret<32>, nonce: &[u8; 24], aad: &[u8], content: &[u8]) -> Vec<u8> {
    // Reserved in full at once, so that no reallocation leaves plaintext behind.
    let mut sealed = Vec::with_capacity(TAG_LEN + content.len());
    sealed.resize(TAG_LEN, 0);
    sealed.extend_from_slice(content);
    let tag = without_trace(|| Xaes::new(key).seal(nonce, aad, &mut sealed[TAG_LEN..]));
    sealed[..TAG_LEN].copy_from_slice(&tag);
    sealed
}

/// And back.
///
/// # Errors
/// [`Unauthentic`] for another key, another AAD, a changed or a short `sealed`.
pub fn open(key: &Secret<32>, nonce: &[u8; 24], aad: &[u8], sealed: &[u8]) -> Result<SecretBytes, Unauthentic> {
    let (tag, ciphertext) = sealed.split_first_chunk::<TAG_LEN>().ok_or(Unauthentic)?;
    let mut result = Ok(());
    let content = SecretBytes::filled_by(ciphertext.len(), |content| {
        content.copy_from_slice(ciphertext);
        result = without_trace(|| Xaes::new(key).open(nonce, aad, content, tag));
    });
    result.map(|()| content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use data_encoding::HEXLOWER;

    /// RFC 5869, A.1 and A.3 (the first 32 of their 42 bytes).
    #[test]
    fn hkdf_rfc5869() {
        let salt = HEXLOWER.decode(b"000102030405060708090a0b0c").unwrap();
        let info = HEXLOWER.decode(b"f0f1f2f3f4f5f6f7f8f9").unwrap();
        let okm = hkdf::<32>(&[0x0b; 22], &salt, &info);
        assert_eq!(HEXLOWER.encode(okm.expose()), "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf");
        let okm = hkdf::<42>(&[0x0b; 22], b"", b"");
        assert_eq!(
            HEXLOWER.encode(okm.expose()),
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
        );
    }

    /// RFC 4231, test case 4 has a 25-byte key; this is RFC 4868 §2.7.1 AUTH256-1: a 32-byte key.
    #[test]
    fn hmac_rfc4868() {
        let mac = hmac(&Secret::new(&mut [0x0b; 32]), b"Hi There");
        assert_eq!(HEXLOWER.encode(&mac), "198a607eb44bfbc69903a0f1cf2bbdc5ba0aa3f3d9ae3c1c7a3b1696a0b68cf7");
    }

    #[test]
    fn the_same_randomness_gives_other_contents_other_nonces() {
        let (key, drawn) = (Secret::new(&mut [5; 32]), [6; 32]);
        let of = |aad: &[u8], content: &[u8]| nonce_of(&key, &drawn, aad, content);
        let all = [of(b"aad", b"content"), of(b"aad", b"Content"), of(b"AAD", b"content"), of(b"aadc", b"ontent")];
        for (i, nonce) in all.iter().enumerate() {
            assert!(!all[..i].contains(nonce));
        }
        assert_eq!(all[0], of(b"aad", b"content"));
        assert_ne!(fresh_nonce(&key, b"aad", b"content").unwrap(), fresh_nonce(&key, b"aad", b"content").unwrap());
    }

    #[test]
    fn sealed_content_opens_and_every_change_is_seen() {
        let key = Secret::new(&mut [5; 32]);
        let (nonce, sealed) = seal(&key, b"aad", b"content").unwrap();
        assert_eq!(sealed.len(), 16 + 7);
        assert_eq!(open(&key, &nonce, b"aad", &sealed).unwrap().expose(), b"content");
        for i in 0..sealed.len() {
            let mut bad = sealed.clone();
            bad[i] ^= 1;
            assert!(open(&key, &nonce, b"aad", &bad).is_err(), "byte {i}");
        }
        assert!(open(&key, &nonce, b"axd", &sealed).is_err());
        assert!(open(&key, &[0; 24], b"aad", &sealed).is_err());
        assert!(open(&Secret::new(&mut [6; 32]), &nonce, b"aad", &sealed).is_err());
        for len in 0..sealed.len() {
            assert!(open(&key, &nonce, b"aad", &sealed[..len]).is_err(), "cut to {len}");
        }
    }
}
