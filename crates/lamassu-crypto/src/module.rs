//! The approved primitives, computed by the FIPS module of AWS-LC (feature `fips`).
//!
//! Keys are expanded for each call and wiped after it, by `aws-lc-rs` when its keys are dropped. So no expanded key
//! stays in memory that is not locked.
//!
//! The module fails only in its error state, and then it has ended the process. Lengths exclude every other failure.

use crate::Unauthentic;
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::cipher::{
    AES_128, AES_256, DecryptingKey, DecryptionContext, EncryptingKey, EncryptionContext, UnboundCipherKey,
};
use aws_lc_rs::iv::FixedLength;
use aws_lc_rs::{digest, hkdf, hmac, rand};

const SOUND: &str = "a module that is not in its error state";

/// Whether the module has passed its self-tests and is in its approved mode.
pub(crate) fn is_approved() -> bool {
    aws_lc_rs::try_fips_mode().is_ok()
}

/// Random bytes of the module's generator, which seeds itself.
pub(crate) fn random(out: &mut [u8]) -> Result<(), getrandom::Error> {
    rand::fill(out).map_err(|_| getrandom::Error::UNEXPECTED)
}

pub(crate) fn sha256(message: &[u8]) -> [u8; 32] {
    digest::digest(&digest::SHA256, message).as_ref().try_into().expect("32 bytes")
}

/// HMAC-SHA-256 of parts, joined.
pub(crate) fn hmac(key: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    parts.iter().for_each(|part| mac.update(part));
    mac.sign().as_ref().try_into().expect("32 bytes")
}

struct Len(usize);

impl hkdf::KeyType for Len {
    fn len(&self) -> usize {
        self.0
    }
}

/// HKDF-SHA-256, to at most 8160 bytes.
pub(crate) fn hkdf(ikm: &[u8], salt: &[u8], info: &[u8], out: &mut [u8]) {
    let prk = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(ikm);
    prk.expand(&[info], Len(out.len())).and_then(|okm| okm.fill(out)).expect(SOUND);
}

/// AES by the length of the key.
fn aes(key: &[u8]) -> UnboundCipherKey {
    let algorithm = if key.len() == 16 { &AES_128 } else { &AES_256 };
    UnboundCipherKey::new(algorithm, key).expect("a key of 16 or 32 bytes")
}

fn zero_iv() -> FixedLength<16> {
    FixedLength::from([0; 16])
}

/// AES-256 of each cipher block on its own.
pub(crate) fn ecb_encrypt(key: &[u8; 32], data: &mut [u8]) {
    EncryptingKey::ecb(aes(key)).and_then(|key| key.encrypt(data)).expect(SOUND);
}

/// AES-CBC under a zero IV, whole cipher blocks.
pub(crate) fn cbc_encrypt(key: &[u8], data: &mut [u8]) {
    let key = EncryptingKey::cbc(aes(key));
    key.and_then(|key| key.less_safe_encrypt(data, EncryptionContext::Iv128(zero_iv()))).expect(SOUND);
}

/// And back.
pub(crate) fn cbc_decrypt(key: &[u8], data: &mut [u8]) {
    let key = DecryptingKey::cbc(aes(key)).expect(SOUND);
    key.decrypt(data, DecryptionContext::Iv128(zero_iv())).expect(SOUND);
}

/// AES-CTR, the initial counter block zero.
pub(crate) fn ctr(key: &[u8], data: &mut [u8]) {
    let key = EncryptingKey::ctr(aes(key));
    key.and_then(|key| key.less_safe_encrypt(data, EncryptionContext::Iv128(zero_iv()))).expect(SOUND);
}

fn gcm(key: &[u8; 32]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("a key of 32 bytes"))
}

/// AES-256-GCM in place; returns the tag.
pub(crate) fn gcm_seal(key: &[u8; 32], nonce: &[u8; 12], aad: &[u8], content: &mut [u8]) -> [u8; 16] {
    let nonce = Nonce::assume_unique_for_key(*nonce);
    let tag = gcm(key).seal_in_place_separate_tag(nonce, Aad::from(aad), content).expect(SOUND);
    tag.as_ref().try_into().expect("16 bytes")
}

/// And back. On failure the content is unspecified.
pub(crate) fn gcm_open(
    key: &[u8; 32],
    nonce: &[u8; 12],
    aad: &[u8],
    content: &mut [u8],
    tag: &[u8; 16],
) -> Result<(), Unauthentic> {
    let (nonce, sealed) = (Nonce::assume_unique_for_key(*nonce), content.to_vec());
    gcm(key).open_separate_gather(nonce, Aad::from(aad), &sealed, tag, content).map_err(|_| Unauthentic)
}

#[cfg(test)]
mod tests {
    use crate::aead::Aead;
    use crate::xaes::Xaes;
    use crate::{Provider, Secret, Unauthentic, wrap};
    use proptest::prelude::*;

    const BOTH: [Provider; 2] = [Provider::Own, Provider::Module];

    #[test]
    fn it_is_the_fips_module() {
        assert!(super::is_approved());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn both_give_the_same_macs_and_keys(mut key: [u8; 32], parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 0..4)) {
            let key = Secret::new(&mut key);
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let [own, module] = BOTH.map(|by| wrap::hmac_by(by, &key, &parts));
            prop_assert_eq!(own, module);
            let (salt, info) = (parts.first().copied().unwrap_or_default(), parts.last().copied().unwrap_or_default());
            let [own, module] = BOTH.map(|by| *wrap::hkdf_by::<64>(by, key.expose(), salt, info).expose());
            prop_assert_eq!(own, module);
            prop_assert_eq!(super::sha256(&parts.concat()), wrap::sha256(&parts.concat()));
        }

        #[test]
        fn each_opens_what_the_other_has_sealed(mut key: [u8; 32], nonce: [u8; 24], aad: [u8; 17], content in proptest::collection::vec(any::<u8>(), 0..5000)) {
            let key = Secret::new(&mut key);
            let [own, module] = BOTH.map(|by| Xaes::by(by, &key));
            let (mut by_own, mut by_module) = (content.clone(), content.clone());
            let tags = [own.seal(&nonce, &aad, &mut by_own), module.seal(&nonce, &aad, &mut by_module)];
            prop_assert_eq!((&by_own, tags[0]), (&by_module, tags[1]));
            prop_assert_eq!(module.open(&nonce, &aad, &mut by_own, &tags[0]), Ok(()));
            prop_assert_eq!(own.open(&nonce, &aad, &mut by_module, &tags[1]), Ok(()));
            prop_assert!(by_own == content && by_module == content);
            prop_assert_eq!(module.open(&nonce, b"other", &mut by_own, &tags[0]), Err(Unauthentic));
        }
    }
}
