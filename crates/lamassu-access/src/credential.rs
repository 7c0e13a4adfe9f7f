//! Credentials: what a person gets from the tenant, in the form that S3's clients take: access key, secret access key,
//! session token.
//!
//! The session token is a signed list of the person's tokens. The secret is not in it: it comes from a key that the
//! tenant agreed on with the proxy ([`crate::kem`]), of which the token holds the public half. So the proxy, which has
//! its private key, needs no table of people; and who has the session token alone has nothing to sign requests with.

use crate::bundle::{Bundle, Status};
use crate::signed::{self, Purpose};
use crate::{AccessError, Result, kem};
use data_encoding::{BASE64, HEXLOWER, HEXUPPER};
use lamassu_crypto::{Secret, random, wrap};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use zeroize::Zeroizing;

/// Longest life, seconds.
pub const SECONDS_MAX: u64 = 36 * 3600;
/// How far a clock may be ahead of another one, seconds.
pub const SKEW: u64 = 60;

/// What a session token says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claims {
    /// its number, which is the access key: 32 digits
    pub id: String,
    /// Who has it: the token of a person that rules name; otherwise its number, so that two credentials of one person
    /// have nothing in common but tokens.
    pub sub: String,
    /// tokens
    pub tokens: BTreeSet<String>,
    /// of the tokens
    pub epoch: u64,
    /// of the rules: [`crate::compile::Compiled::vocabulary_digest`]
    pub vocabulary: String,
    /// s since 1970
    pub begins: u64,
    /// s since 1970
    pub ends: u64,
    /// half of the key that the secret comes from, hex
    pub told: String,
}

/// A credential. Its holder keeps the secret.
pub struct Credential {
    /// the access key
    pub access_key: String,
    /// the secret access key
    pub secret: Zeroizing<String>,
    /// the session token
    pub session_token: String,
    /// s since 1970
    pub ends: u64,
}

impl std::fmt::Debug for Credential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credential").field("access_key", &self.access_key).finish_non_exhaustive()
    }
}

/// Why a proxy does not take a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is not signed by a tenant, or is no credential.
    #[error("the session token is no credential of a tenant here")]
    Forged,
    /// Its time is over.
    #[error("the credential has expired: get another one")]
    Expired,
    /// Its time has not come, or it is for longer than the proxy takes.
    #[error("the credential's time has not come, or it is for too long a time")]
    Time,
    /// It is of another epoch, or of other rules.
    #[error("the tenant has published other rules since: get another credential")]
    Outdated,
    /// It was revoked.
    #[error("the credential was revoked")]
    Revoked,
}

/// What a credential is made of.
pub struct Grant {
    /// the token of the person, if rules name it
    pub person: Option<String>,
    /// the person's tokens that rules ask for
    pub tokens: BTreeSet<String>,
    /// of the tokens
    pub epoch: u64,
    /// of the rules
    pub vocabulary: String,
    /// now, s since 1970
    pub now: u64,
    /// how long
    pub seconds: u64,
}

/// Issues a credential for the owner of the proxy's public key.
///
/// # Errors
/// [`AccessError::Argument`] for a time out of bounds or a proxy's key that is none; [`AccessError::Document`] for more
/// tokens than a header holds; [`AccessError::NoRandom`].
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

/// The bucket whose tenant a session token says it is of: not verified.
pub fn claimed_bucket(session_token: &str) -> Option<String> {
    signed::claimed_bucket(session_token)
}

impl Claims {
    /// Verifies a session token.
    ///
    /// # Errors
    /// [`Refusal::Forged`].
    pub fn verify(public: &[u8; 32], bucket: &str, session_token: &str) -> Result<Claims, Refusal> {
        let claims: Claims =
            signed::open(public, Purpose::Credential, bucket, session_token).map_err(|_| Refusal::Forged)?;
        let is_id = claims.id.len() == 32 && claims.id.bytes().all(|b| b.is_ascii_alphanumeric());
        if is_id { Ok(claims) } else { Err(Refusal::Forged) }
    }

    /// Whether it is good now, and goes with what is published.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn check(&self, bundle: &Bundle, status: &Status, now: u64, seconds_max: u64) -> Result<(), Refusal> {
        match () {
            () if self.ends <= now => Err(Refusal::Expired),
            () if self.begins > now + SKEW || self.ends.saturating_sub(self.begins) > seconds_max => Err(Refusal::Time),
            () if self.epoch != bundle.epoch || self.vocabulary != bundle.vocabulary => Err(Refusal::Outdated),
            () if status.revoked.contains(&self.id) => Err(Refusal::Revoked),
            () => Ok(()),
        }
    }

    /// The secret access key.
    ///
    /// # Errors
    /// [`Refusal::Forged`].
    pub fn secret(&self, private: &Secret<32>) -> Result<Zeroizing<String>, Refusal> {
        let told = HEXLOWER.decode(self.told.as_bytes()).ok().and_then(|bytes| <[u8; 32]>::try_from(bytes).ok());
        let shared = kem::decapsulate(private, &told.ok_or(Refusal::Forged)?).map_err(|_| Refusal::Forged)?;
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
