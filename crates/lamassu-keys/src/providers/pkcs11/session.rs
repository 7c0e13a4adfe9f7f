//! A key of a token, in a logged-in session: sealing and unsealing 32 bytes with it, and its signatures.

use super::failed;
use super::uri::{Class, Uri};
use crate::fault::TokenFault;
use crate::source::{SourceError, Token};
use cryptoki::error::{Error, RvError};
use cryptoki::mechanism::aead::GcmParams;
use cryptoki::mechanism::rsa::{PkcsMgfType, PkcsOaepParams, PkcsOaepSource, PkcsPssParams};
use cryptoki::mechanism::{Mechanism, MechanismType};
use cryptoki::object::{Attribute, AttributeType, KeyType, ObjectClass, ObjectHandle};
use cryptoki::session::Session;
use lamassu_crypto::Secret;
use lamassu_format::header::{TokenMechanism, TokenSealed, TokenSignature, TokenSigning};
use zeroize::Zeroizing;

const GCM_NONCE: usize = 12;
const GCM_TAG_BITS: u64 = 128;

/// A key that is ready for use.
pub(super) struct TokenKey {
    session: Session,
    /// what unseals
    key: ObjectHandle,
    kind: KeyKind,
    /// label and id, to find the public half
    named: Vec<Attribute>,
    class: Option<Class>,
    /// how many private and secret keys have that name, also unsuitable ones
    seen: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum KeyKind {
    Rsa,
    Aes,
}

impl TokenKey {
    /// The one key that matches the URI.
    pub(super) fn find(session: Session, uri: &Uri) -> Result<TokenKey, TokenFault> {
        let mut named = Vec::new();
        named.extend(uri.object.clone().map(Attribute::Label));
        named.extend(uri.id.clone().map(Attribute::Id));
        let keys = keys_of(&session, &named, uri.class)?;
        let seen = keys.len();
        let suitable: Vec<_> = keys.into_iter().filter_map(|key| Some((key, kind_of(&session, key)?))).collect();
        match suitable[..] {
            [(key, kind)] => Ok(TokenKey { session, key, kind, named, class: uri.class, seen }),
            [] if seen > 0 => Err(TokenFault::Unsuitable),
            [] => Err(TokenFault::NoObject { wanted: "private or secret key" }),
            _ => Err(TokenFault::ManyObjects { count: suitable.len() }),
        }
    }

    /// Destroys the key and its public half. Returns what was done. The session must be able to write.
    pub(super) fn destroy(&self) -> Result<Vec<String>, TokenFault> {
        let public = if self.kind == KeyKind::Rsa { self.public_half(&self.public_keys()?) } else { None };
        self.session.destroy_object(self.key).map_err(failed("destroy the key"))?;
        let mut said = vec![match self.kind {
            KeyKind::Rsa => "destroyed the private key".to_string(),
            KeyKind::Aes => "destroyed the secret key".to_string(),
        }];
        // Without the private half, the public one opens nothing.
        match public.map(|public| self.session.destroy_object(public)) {
            None => {}
            Some(Ok(())) => said.push("destroyed its public half".into()),
            Some(Err(_)) => said.push("its public half stays: it opens nothing".into()),
        }
        let left = self.session.find_objects(&self.named).map_err(failed("list its keys"))?;
        said.push(format!("objects of that name left in the token: {}", left.len()));
        check_gone(self.seen, keys_of(&self.session, &self.named, self.class)?.len())?;
        Ok(said)
    }

    /// The key that encrypts: the key itself, or its public half. If the token does not tell which public key belongs
    /// to it, one with the same name is used; the sealing is tested.
    fn sealing_key(&self) -> Result<ObjectHandle, TokenFault> {
        if self.kind == KeyKind::Aes {
            return Ok(self.key);
        }
        let found = self.public_keys()?;
        let half = self.public_half(&found).or(found.first().copied());
        half.ok_or(TokenFault::NoObject { wanted: "public key" })
    }

    /// RSA public keys with the given name; some may belong to other pairs.
    fn public_keys(&self) -> Result<Vec<ObjectHandle>, TokenFault> {
        let mut template = self.named.clone();
        template.push(Attribute::Class(ObjectClass::PUBLIC_KEY));
        template.push(Attribute::KeyType(KeyType::RSA));
        self.session.find_objects(&template).map_err(failed("list its keys"))
    }

    /// The public key of the same pair, by the modulus.
    fn public_half(&self, among: &[ObjectHandle]) -> Option<ObjectHandle> {
        let modulus = |key| match self.session.get_attributes(key, &[AttributeType::Modulus]).ok()?.pop() {
            Some(Attribute::Modulus(modulus)) if !modulus.is_empty() => Some(modulus),
            Some(_) | None => None,
        };
        let ours = modulus(self.key)?;
        among.iter().copied().find(|key| modulus(*key).as_ref() == Some(&ours))
    }

    fn encrypt(&self, mechanism: TokenMechanism, secret: &Secret<32>) -> Result<TokenSealed, SourceError> {
        let key = self.sealing_key()?;
        let plain = secret.expose();
        let sealed = match mechanism {
            TokenMechanism::RsaOaepSha256 | TokenMechanism::RsaOaepSha1 => {
                self.session.encrypt(&oaep(mechanism), key, plain).map_err(failed("encrypt"))?
            }
            TokenMechanism::AesGcm => {
                let mut nonce = [0; GCM_NONCE];
                lamassu_crypto::random(&mut nonce)?;
                let mut sealed = nonce.to_vec();
                let params = GcmParams::new(&mut nonce, &[], GCM_TAG_BITS.into()).map_err(failed("encrypt"))?;
                let ciphertext = self.session.encrypt(&Mechanism::AesGcm(params), key, plain);
                sealed.extend(ciphertext.map_err(failed("encrypt"))?);
                // Some tokens replace the nonce by their own.
                sealed[..GCM_NONCE].copy_from_slice(&nonce);
                sealed
            }
        };
        if sealed.len() > TokenSealed::MAX {
            return Err(TokenFault::Unsuitable.into());
        }
        Ok(TokenSealed { mechanism, sealed, signature: None })
    }

    /// The plaintext, or `None` if another key made the ciphertext.
    fn decrypt(&self, sealed: &TokenSealed) -> Result<Option<Zeroizing<Vec<u8>>>, TokenFault> {
        let plain = match (sealed.mechanism, self.kind) {
            (TokenMechanism::RsaOaepSha256 | TokenMechanism::RsaOaepSha1, KeyKind::Rsa) => {
                self.session.decrypt(&oaep(sealed.mechanism), self.key, &sealed.sealed)
            }
            (TokenMechanism::AesGcm, KeyKind::Aes) => {
                let Some((nonce, ciphertext)) = sealed.sealed.split_first_chunk::<GCM_NONCE>() else { return Ok(None) };
                let mut nonce = *nonce;
                let params = GcmParams::new(&mut nonce, &[], GCM_TAG_BITS.into()).map_err(failed("decrypt"))?;
                self.session.decrypt(&Mechanism::AesGcm(params), self.key, ciphertext)
            }
            (TokenMechanism::RsaOaepSha256 | TokenMechanism::RsaOaepSha1, KeyKind::Aes)
            | (TokenMechanism::AesGcm, KeyKind::Rsa) => return Ok(None),
        };
        match plain {
            Ok(plain) => Ok(Some(Zeroizing::new(plain))),
            Err(e) if is_anothers(&e) => Ok(None),
            Err(e) => Err(failed("decrypt")(e)),
        }
    }
}

impl Token for TokenKey {
    fn seal(&self, secret: &Secret<32>) -> Result<TokenSealed, SourceError> {
        let mechanisms: &[TokenMechanism] = match self.kind {
            KeyKind::Rsa => &[TokenMechanism::RsaOaepSha256, TokenMechanism::RsaOaepSha1],
            KeyKind::Aes => &[TokenMechanism::AesGcm],
        };
        let mut last = SourceError::Token(TokenFault::Unsuitable);
        for &mechanism in mechanisms {
            let sealed = match self.encrypt(mechanism, secret) {
                Ok(sealed) => sealed,
                Err(e) => {
                    last = e;
                    continue;
                }
            };
            // Public keys are often used in software, which supports more mechanisms than the token; and a public key
            // may belong to another pair.
            match self.unseal(&sealed) {
                Ok(Some(opened)) if lamassu_crypto::wrap::equal(opened.expose(), secret.expose()) => return Ok(sealed),
                Ok(_) => last = TokenFault::Unsuitable.into(),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    fn unseal(&self, sealed: &TokenSealed) -> Result<Option<Secret<32>>, SourceError> {
        Ok(self.decrypt(sealed)?.and_then(|plain| Secret::from_slice(&plain)))
    }

    fn sign(&self, message: &[u8]) -> Result<Option<TokenSignature>, SourceError> {
        if self.kind != KeyKind::Rsa {
            return Ok(None);
        }
        for mechanism in TokenSigning::ALL {
            // A card that may only decrypt says so in one of many ways.
            let Ok(value) = self.session.sign(&signing(mechanism), self.key, message) else { continue };
            let signature = TokenSignature { mechanism, value };
            if (1..=TokenSealed::MAX).contains(&signature.value.len())
                && self.has_signed(message, &signature).is_ok_and(|good| good)
            {
                return Ok(Some(signature));
            }
        }
        Ok(None)
    }

    fn has_signed(&self, message: &[u8], signature: &TokenSignature) -> Result<bool, SourceError> {
        if self.kind != KeyKind::Rsa {
            return Ok(false);
        }
        // Another public key of the same name would let its owner sign.
        let Some(public) = self.public_half(&self.public_keys()?) else { return Ok(false) };
        match self.session.verify(&signing(signature.mechanism), public, message, &signature.value) {
            Ok(()) => Ok(true),
            Err(Error::Pkcs11(RvError::SignatureInvalid | RvError::SignatureLenRange, _)) => Ok(false),
            Err(e) => Err(failed("verify a signature")(e).into()),
        }
    }
}

/// The private and secret keys with a name.
fn keys_of(session: &Session, named: &[Attribute], class: Option<Class>) -> Result<Vec<ObjectHandle>, TokenFault> {
    let mut keys = Vec::new();
    for (of, object) in [(Class::Private, ObjectClass::PRIVATE_KEY), (Class::Secret, ObjectClass::SECRET_KEY)] {
        if class.is_none_or(|wanted| wanted == of) {
            let template = [named, &[Attribute::Class(object)]].concat();
            keys.extend(session.find_objects(&template).map_err(failed("list its keys"))?);
        }
    }
    Ok(keys)
}

/// A token can report success and do nothing: one key of that name must be missing.
fn check_gone(before: usize, left: usize) -> Result<(), TokenFault> {
    if left < before { Ok(()) } else { Err(TokenFault::NotDestroyed { left }) }
}

/// RSA or AES, if the key can decrypt.
fn kind_of(session: &Session, key: ObjectHandle) -> Option<KeyKind> {
    let attributes = session.get_attributes(key, &[AttributeType::KeyType, AttributeType::Decrypt]).ok()?;
    attributes.contains(&Attribute::Decrypt(true)).then_some(())?;
    attributes.into_iter().find_map(|a| match a {
        Attribute::KeyType(KeyType::RSA) => Some(KeyKind::Rsa),
        Attribute::KeyType(KeyType::AES) => Some(KeyKind::Aes),
        _ => None,
    })
}

fn signing(mechanism: TokenSigning) -> Mechanism<'static> {
    match mechanism {
        TokenSigning::RsaPssSha256 => Mechanism::Sha256RsaPkcsPss(PkcsPssParams {
            hash_alg: MechanismType::SHA256,
            mgf: PkcsMgfType::MGF1_SHA256,
            s_len: 32.into(),
        }),
        TokenSigning::RsaPkcs1Sha256 => Mechanism::Sha256RsaPkcs,
    }
}

fn oaep(mechanism: TokenMechanism) -> Mechanism<'static> {
    let (hash, mgf) = match mechanism {
        TokenMechanism::RsaOaepSha256 => (MechanismType::SHA256, PkcsMgfType::MGF1_SHA256),
        TokenMechanism::RsaOaepSha1 | TokenMechanism::AesGcm => (MechanismType::SHA1, PkcsMgfType::MGF1_SHA1),
    };
    Mechanism::RsaPkcsOaep(PkcsOaepParams::new(hash, mgf, PkcsOaepSource::empty()))
}

/// Whether an error means that a ciphertext does not open, and not that the token failed. Tokens use different codes
/// for that.
fn is_anothers(e: &Error) -> bool {
    matches!(
        e,
        Error::Pkcs11(
            RvError::EncryptedDataInvalid
                | RvError::EncryptedDataLenRange
                | RvError::DataInvalid
                | RvError::DataLenRange
                | RvError::GeneralError
                | RvError::FunctionFailed,
            _
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_still_there_was_not_destroyed() {
        assert!(check_gone(1, 0).is_ok() && check_gone(2, 1).is_ok());
        assert!(matches!(check_gone(1, 1), Err(TokenFault::NotDestroyed { left: 1 })));
    }
}
