//! Documents that a tenant signs: PASETO v4.public, JSON under Ed25519. The version fixes the algorithm, so a document
//! cannot choose one. The signature covers the document's purpose, which is not sent (the implicit assertion), so a
//! document of one kind cannot pass as another kind. The footer names the tenant's bucket, by which the proxy finds the
//! public key.

use crate::{AccessError, Result};
use lamassu_crypto::{Secret, sign};
use pasetors::Public;
use pasetors::keys::{AsymmetricPublicKey, AsymmetricSecretKey};
use pasetors::token::UntrustedToken;
use pasetors::version4::{PublicToken, V4};
use serde::Serialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

/// Most JSON values in a document, whatever its length: a value takes many times more memory than text.
pub const VALUES_MAX: usize = 200_000;

/// The purpose of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// a person's session token
    Credential,
    /// rules over tokens
    Bundle,
    /// revocations
    Status,
}

impl Purpose {
    const fn assertion(self) -> &'static [u8] {
        match self {
            Purpose::Credential => b"lamassu access credential v1",
            Purpose::Bundle => b"lamassu access bundle v1",
            Purpose::Status => b"lamassu access status v1",
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Purpose::Credential => "the credential",
            Purpose::Bundle => "the bundle",
            Purpose::Status => "the status",
        }
    }

    /// Maximum length of a document, in bytes.
    pub const fn most(self) -> usize {
        match self {
            Purpose::Credential => 16 << 10,
            Purpose::Bundle => 8 << 20,
            Purpose::Status => 4 << 20,
        }
    }

    fn wrong(self, detail: &'static str) -> AccessError {
        AccessError::Document { what: self.name(), detail }
    }
}

/// Signs a document.
///
/// # Errors
/// [`AccessError::Document`]: it is too long.
pub fn seal(seed: &Secret<32>, purpose: Purpose, bucket: &str, document: &impl Serialize) -> Result<String> {
    let text = serde_json::to_vec(document).map_err(|_| purpose.wrong("it cannot be written as JSON"))?;
    if !has_few_values(&text) {
        return Err(purpose.wrong(MANY_VALUES));
    }
    let mut pair = Zeroizing::new([0; 64]);
    pair[..32].copy_from_slice(seed.expose());
    pair[32..].copy_from_slice(&sign::public(seed));
    let key = AsymmetricSecretKey::<V4>::from(&pair[..]).map_err(|_| purpose.wrong("the key is not one"))?;
    let signed = PublicToken::sign(&key, &text, Some(bucket.as_bytes()), Some(purpose.assertion()));
    let signed = signed.map_err(|_| purpose.wrong("it cannot be signed"))?;
    match signed.len() <= purpose.most() {
        true => Ok(signed),
        false => Err(purpose.wrong("it is too long")),
    }
}

/// Verifies a document.
///
/// # Errors
/// [`AccessError::Document`].
pub fn open<T: DeserializeOwned>(public: &[u8; 32], purpose: Purpose, bucket: &str, text: &str) -> Result<T> {
    read(purpose, &verified(public, purpose, bucket, text)?)
}

/// Verifies the signature of a document, and returns what was signed.
///
/// # Errors
/// [`AccessError::Document`].
pub fn verified(public: &[u8; 32], purpose: Purpose, bucket: &str, text: &str) -> Result<String> {
    if text.len() > purpose.most() {
        return Err(purpose.wrong("it is too long"));
    }
    let untrusted = UntrustedToken::<Public, V4>::try_from(text.trim_end());
    let untrusted = untrusted.map_err(|_| purpose.wrong("it is no signed document (PASETO v4.public)"))?;
    let key = AsymmetricPublicKey::<V4>::from(&public[..]).map_err(|_| purpose.wrong("the key is not one"))?;
    let verified = PublicToken::verify(&key, &untrusted, Some(bucket.as_bytes()), Some(purpose.assertion()));
    let verified = verified.map_err(|_| purpose.wrong("it is not signed by the tenant of this bucket"))?;
    Ok(verified.payload().to_owned())
}

/// Reads what was signed.
///
/// # Errors
/// [`AccessError::Document`].
pub fn read<T: DeserializeOwned>(purpose: Purpose, verified: &str) -> Result<T> {
    if !has_few_values(verified.as_bytes()) {
        return Err(purpose.wrong(MANY_VALUES));
    }
    serde_json::from_str(verified).map_err(|_| purpose.wrong("it is not what this version knows"))
}

const MANY_VALUES: &str = "it has more than 200,000 values";

/// Whether a JSON text has at most [`VALUES_MAX`] values. It counts the whole text as one, and each comma and each
/// opening bracket or brace as one more.
fn has_few_values(text: &[u8]) -> bool {
    let (mut is_text, mut is_escaped, mut values) = (false, false, 1);
    for byte in text {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            b',' | b'[' | b'{' if !is_text => values += 1,
            _ => {}
        }
    }
    values <= VALUES_MAX
}

/// The bucket that a document claims to belong to. The claim is not verified.
pub fn claimed_bucket(text: &str) -> Option<String> {
    if text.len() > Purpose::Credential.most() {
        return None;
    }
    let untrusted = UntrustedToken::<Public, V4>::try_from(text).ok()?;
    Some(std::str::from_utf8(untrusted.untrusted_footer()).ok()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_of_one_signer_purpose_and_bucket() {
        let seed = Secret::new(&mut [5; 32]);
        let public = sign::public(&seed);
        let text = seal(&seed, Purpose::Status, "acme", &vec![1, 2]).expect("signs");
        let read =
            |public: &[u8; 32], purpose, bucket: &str, text: &str| open::<Vec<u8>>(public, purpose, bucket, text);
        assert_eq!(read(&public, Purpose::Status, "acme", &text).expect("verifies"), [1, 2]);
        assert_eq!(claimed_bucket(&text).as_deref(), Some("acme"));
        assert!(read(&public, Purpose::Bundle, "acme", &text).is_err());
        assert!(read(&public, Purpose::Status, "other", &text).is_err());
        assert!(read(&sign::public(&Secret::new(&mut [6; 32])), Purpose::Status, "acme", &text).is_err());
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).expect("ASCII");
            assert!(read(&public, Purpose::Status, "acme", &changed).is_err(), "at {at}");
        }
        // The document without its signature, and other versions of PASETO.
        for wrong in ["", "v4.public.", "v4.local.AAAA", &text.replacen("v4", "v3", 1), &text[..40]] {
            assert!(read(&public, Purpose::Status, "acme", wrong).is_err());
            assert!(claimed_bucket(wrong).is_none());
        }
    }

    #[test]
    fn a_document_of_very_many_values_is_neither_signed_nor_read() {
        let seed = Secret::new(&mut [5; 32]);
        let public = sign::public(&seed);
        // The array itself is a value, too.
        let text = seal(&seed, Purpose::Bundle, "acme", &vec![7; VALUES_MAX - 2]).expect("signs");
        open::<Vec<u8>>(&public, Purpose::Bundle, "acme", &text).expect("is read");
        let many = vec![7; VALUES_MAX];
        assert!(seal(&seed, Purpose::Bundle, "acme", &many).is_err());
        // A document signed by another library.
        let mut pair = [0; 64];
        pair[..32].copy_from_slice(seed.expose());
        pair[32..].copy_from_slice(&public);
        let key = AsymmetricSecretKey::<V4>::from(&pair).expect("a key");
        let text = serde_json::to_vec(&many).expect("JSON");
        let text = PublicToken::sign(&key, &text, Some(b"acme"), Some(Purpose::Bundle.assertion())).expect("signs");
        assert!(text.len() < Purpose::Bundle.most());
        let said = open::<Vec<u8>>(&public, Purpose::Bundle, "acme", &text).expect_err("too many").to_string();
        assert!(said.contains("200,000"), "{said}");
        // Commas and brackets within a string literal are not values.
        let said = vec![",[{\\\"".repeat(VALUES_MAX)];
        let text = seal(&seed, Purpose::Bundle, "acme", &said).expect("signs");
        assert_eq!(open::<Vec<String>>(&public, Purpose::Bundle, "acme", &text).expect("is read"), said);
    }
}
