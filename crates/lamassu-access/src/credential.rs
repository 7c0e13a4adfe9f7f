//! Credentials of people, in the form that S3 clients take: access key, secret access key, session token.
//!
//! The session token is a signed list of the person's tokens. It does not hold the secret. The secret comes from a key
//! that the tenant agrees on with the proxy ([`crate::kem`]); the token holds the key's encapsulation, and the proxy's
//! private key recovers it. So the proxy needs no table of people, and the session token alone cannot sign requests.

use crate::bundle::{Bundle, Status};
use crate::signed::{self, Purpose};
use crate::{AccessError, Result, kem};
use data_encoding::{BASE64, HEXLOWER, HEXUPPER};
use lamassu_crypto::{Secret, random, wrap};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use zeroize::Zeroizing;

/// Longest life of a credential, in seconds.
pub const SECONDS_MAX: u64 = 36 * 3600;
/// Greatest difference between two clocks that is accepted, in seconds.
pub const SKEW: u64 = 60;

/// The contents of a session token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claims {
    /// the credential's number, which is the access key: 32 hexadecimal digits
    pub id: String,
    /// The holder: the person's token if rules name the person, otherwise the credential's number. So two credentials
    /// of one unnamed person share nothing but attribute tokens.
    pub sub: String,
    /// the holder's tokens that rules ask for
    pub tokens: BTreeSet<String>,
    /// the epoch of the tokens
    pub epoch: u64,
    /// digest of the vocabulary: [`crate::compile::Compiled::vocabulary_digest`]
    pub vocabulary: String,
    /// begin of validity, seconds since 1970
    pub begins: u64,
    /// end of validity, seconds since 1970
    pub ends: u64,
    /// encapsulation of the key that the secret is derived from ([`crate::kem`]), hex
    pub told: String,
}

/// A credential as its holder gets it.
pub struct Credential {
    /// the access key
    pub access_key: String,
    /// the secret access key
    pub secret: Zeroizing<String>,
    /// the session token
    pub session_token: String,
    /// end of validity, seconds since 1970
    pub ends: u64,
}

impl std::fmt::Debug for Credential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credential").field("access_key", &self.access_key).finish_non_exhaustive()
    }
}

/// The reason why a proxy refuses a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is not a credential, or no known tenant signed it.
    #[error("the session token is no credential of a tenant here")]
    Forged,
    /// A tenant here signed it, and this version cannot use it: another version or another program made it.
    #[error("the tenant has signed the credential, but this version cannot use it")]
    Unknown,
    /// It has expired.
    #[error("the credential has expired: get another one")]
    Expired,
    /// It is not valid yet, or it is valid for longer than the proxy accepts.
    #[error("the credential is not valid yet, or its period of validity is too long")]
    Time,
    /// It belongs to another epoch or to another vocabulary of rules.
    #[error("the tenant has published other rules since: get another credential")]
    Outdated,
    /// It was revoked.
    #[error("the credential was revoked")]
    Revoked,
}

/// The inputs of a new credential.
pub struct Grant {
    /// the token of the person, if rules name the person
    pub person: Option<String>,
    /// the person's attribute tokens that rules ask for
    pub tokens: BTreeSet<String>,
    /// the epoch of the tokens
    pub epoch: u64,
    /// digest of the rules' vocabulary
    pub vocabulary: String,
    /// present time, seconds since 1970
    pub now: u64,
    /// life, seconds
    pub seconds: u64,
}

/// Issues a credential that the owner of the proxy's public key accepts.
///
/// # Errors
/// [`AccessError::Argument`] for a life out of bounds or an invalid public key of the proxy; [`AccessError::Document`]
/// for more tokens than a header can hold; [`AccessError::NoRandom`].
pub fn issue(seed: &Secret<32>, bucket: &str, proxy: &[u8; 32], grant: Grant) -> Result<Credential> {
    if !(1..=SECONDS_MAX).contains(&grant.seconds) {
        return Err(AccessError::Argument(format!("a credential is for 1 second to {} hours", SECONDS_MAX / 3600)));
    }
    let mut id = [0; 16];
    random(&mut id)?;
    let id = HEXUPPER.encode(&id);
    let (told, shared) = kem::encapsulate(proxy).map_err(|error| match error {
        kem::KemError::Key(_) => AccessError::Argument("the proxy's key is no public key".into()),
        kem::KemError::NoRandom(error) => error.into(),
    })?;
    let claims = Claims {
        sub: grant.person.unwrap_or_else(|| id.clone()),
        tokens: grant.tokens,
        epoch: grant.epoch,
        vocabulary: grant.vocabulary,
        begins: grant.now,
        ends: grant.now + grant.seconds,
        told: HEXLOWER.encode(&told),
        id,
    };
    let session_token = signed::seal(seed, Purpose::Credential, bucket, &claims)?;
    let secret = secret_of(&shared, &claims.id);
    Ok(Credential { access_key: claims.id, secret, session_token, ends: claims.ends })
}

fn secret_of(shared: &Secret<32>, id: &str) -> Zeroizing<String> {
    let info = [b"lamassu v1 access secret ", id.as_bytes()].concat();
    Zeroizing::new(BASE64.encode(wrap::hkdf::<30>(shared.expose(), b"", &info).expose()))
}

/// The bucket that a session token claims to belong to. The claim is not verified.
pub fn claimed_bucket(session_token: &str) -> Option<String> {
    signed::claimed_bucket(session_token)
}

impl Claims {
    /// Verifies the signature of a session token.
    ///
    /// # Errors
    /// [`Refusal::Forged`], [`Refusal::Unknown`].
    pub fn verify(public: &[u8; 32], bucket: &str, session_token: &str) -> Result<Claims, Refusal> {
        let verified = signed::verified(public, Purpose::Credential, bucket, session_token);
        let verified = verified.map_err(|_| Refusal::Forged)?;
        let claims: Claims = signed::read(Purpose::Credential, &verified).map_err(|_| Refusal::Unknown)?;
        let is_id = claims.id.len() == 32 && claims.id.bytes().all(|b| b.is_ascii_alphanumeric());
        if is_id { Ok(claims) } else { Err(Refusal::Unknown) }
    }

    /// Whether the credential is valid now and matches the published bundle and status. A life of more than
    /// `seconds_max` is refused.
    ///
    /// # Errors
    /// The [`Refusal`] says why not.
    pub fn check(&self, bundle: &Bundle, status: &Status, now: u64, seconds_max: u64) -> Result<(), Refusal> {
        match () {
            () if self.ends <= now => Err(Refusal::Expired),
            () if self.begins > now + SKEW || self.ends.saturating_sub(self.begins) > seconds_max => Err(Refusal::Time),
            () if self.epoch != bundle.epoch || self.vocabulary != bundle.vocabulary => Err(Refusal::Outdated),
            () if status.revoked.contains(&self.id) => Err(Refusal::Revoked),
            () => Ok(()),
        }
    }

    /// Derives the secret access key with the proxy's private key. For a credential that was issued for another key it
    /// is another one, and the request's signature does not match.
    ///
    /// # Errors
    /// [`Refusal::Unknown`].
    pub fn secret(&self, private: &Secret<32>) -> Result<Zeroizing<String>, Refusal> {
        let told = HEXLOWER.decode(self.told.as_bytes()).ok().and_then(|bytes| <[u8; 32]>::try_from(bytes).ok());
        let shared = kem::decapsulate(private, &told.ok_or(Refusal::Unknown)?).map_err(|_| Refusal::Unknown)?;
        Ok(secret_of(&shared, &self.id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_crypto::sign;

    fn grant(person: Option<&str>) -> Grant {
        Grant {
            person: person.map(String::from),
            tokens: ["a".to_owned(), "b".to_owned()].into(),
            epoch: 3,
            vocabulary: "v".into(),
            now: 1000,
            seconds: 600,
        }
    }

    #[test]
    fn the_proxy_has_the_secret_and_nobody_else() {
        let (seed, private) = (Secret::new(&mut [5; 32]), Secret::new(&mut [6; 32]));
        let issued = issue(&seed, "acme", &kem::public(&private), grant(None)).expect("issues");
        let claims = Claims::verify(&sign::public(&seed), "acme", &issued.session_token).expect("verifies");
        assert_eq!(claims.secret(&private).expect("a secret"), issued.secret);
        assert_eq!(issued.secret.len(), 40);
        assert_ne!(claims.secret(&Secret::new(&mut [7; 32])).expect("another"), issued.secret);
        assert!(!format!("{issued:?}").contains(&*issued.secret));
        assert_eq!((claims.sub.as_str(), claims.id.as_str()), (&*issued.access_key, &*issued.access_key));
        let named = issue(&seed, "acme", &kem::public(&private), grant(Some("p"))).expect("issues");
        let named = Claims::verify(&sign::public(&seed), "acme", &named.session_token).expect("verifies");
        assert_eq!(named.sub, "p");
        assert!(Claims::verify(&sign::public(&seed), "other", &issued.session_token).is_err());
        assert!(issue(&seed, "acme", &[0; 32], grant(None)).is_err());
        for seconds in [0, SECONDS_MAX + 1] {
            let grant = Grant { seconds, ..grant(None) };
            assert!(issue(&seed, "acme", &kem::public(&private), grant).is_err());
        }
    }

    /// A tenant's own mistake is told from what strangers send.
    #[test]
    fn what_a_tenant_has_signed_is_not_forged() {
        let (seed, private) = (Secret::new(&mut [5; 32]), Secret::new(&mut [6; 32]));
        let issued = issue(&seed, "acme", &kem::public(&private), grant(None)).expect("issues");
        let claims = Claims::verify(&sign::public(&seed), "acme", &issued.session_token).expect("verifies");
        let signed = |seed: &Secret<32>, claims: &serde_json::Value| {
            let token = signed::seal(seed, Purpose::Credential, "acme", claims).expect("signs");
            let verified = Claims::verify(&sign::public(&Secret::new(&mut [5; 32])), "acme", &token);
            verified.and_then(|claims| claims.secret(&private).map(drop))
        };
        let claims = serde_json::to_value(&claims).expect("JSON");
        assert_eq!(signed(&seed, &claims), Ok(()));
        // A field that this version does not know, a number that is none, and keys that are none.
        for (name, value) in [("more", "x".into()), ("id", "x".into()), ("told", "x".into()), ("told", "00".repeat(32))]
        {
            let mut claims = claims.clone();
            claims[name] = serde_json::Value::String(value);
            assert_eq!(signed(&seed, &claims), Err(Refusal::Unknown), "{name}");
            assert_eq!(signed(&Secret::new(&mut [7; 32]), &claims), Err(Refusal::Forged), "{name}");
        }
    }

    #[test]
    fn a_credential_is_good_for_its_time_and_rules() {
        let (seed, private) = (Secret::new(&mut [5; 32]), Secret::new(&mut [6; 32]));
        let issued = issue(&seed, "acme", &kem::public(&private), grant(None)).expect("issues");
        let claims = Claims::verify(&sign::public(&seed), "acme", &issued.session_token).expect("verifies");
        let bundle = Bundle { seq: 1, epoch: 3, vocabulary: "v".into(), time: 900, policies: Vec::new() };
        let mut status = Status { seq: 1, bundle: 1, time: 900, revoked: BTreeSet::new() };
        let check = |bundle: &Bundle, status: &Status, now, most| claims.check(bundle, status, now, most);
        assert_eq!(check(&bundle, &status, 1000, 600), Ok(()));
        assert_eq!(check(&bundle, &status, 1599, 600), Ok(()));
        assert_eq!(check(&bundle, &status, 1600, 600), Err(Refusal::Expired));
        assert_eq!(check(&bundle, &status, 940, 600), Ok(()));
        assert_eq!(check(&bundle, &status, 939, 600), Err(Refusal::Time));
        assert_eq!(check(&bundle, &status, 1000, 599), Err(Refusal::Time));
        let other = Bundle { epoch: 4, ..bundle.clone() };
        assert_eq!(check(&other, &status, 1000, 600), Err(Refusal::Outdated));
        let other = Bundle { vocabulary: "w".into(), ..bundle.clone() };
        assert_eq!(check(&other, &status, 1000, 600), Err(Refusal::Outdated));
        status.revoked.insert(claims.id.clone());
        assert_eq!(check(&bundle, &status, 1000, 600), Err(Refusal::Revoked));
    }
}
