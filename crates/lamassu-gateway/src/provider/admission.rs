//! Admits the holder of a credential that the tenant of a bucket has signed.

use super::bounded::Bounded;
use super::published::{Absent, Customer, InForce};
use crate::credentials::{Rules, User};
use crate::door::Admit;
use lamassu_access::{Action, Claims, Decider, Refusal, credential};
use lamassu_crypto::Secret;
use parking_lot::Mutex;
use s3s::auth::SecretKey;
use s3s::{S3Error, S3Result, s3_error};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Instant, SystemTime};

/// Length of a holder's name in the log, in characters.
const NAME_LEN: usize = 8;

/// Admits requests by their session tokens.
pub struct Admission {
    /// the proxy's private key
    pub private: Secret<32>,
    /// tenants by bucket
    pub customers: HashMap<String, Arc<Customer>>,
    /// the age limits
    pub most: Most,
    /// what of it is logged
    pub told: Told,
}

/// Bounds of what is logged. Requests are refused before their signatures are verified, so everybody can send any
/// number of them: strangers, whom no tenant knows, leave lines for those with a credential.
#[derive(Default)]
pub struct Told {
    strangers: Mutex<Bounded>,
    holders: Mutex<Bounded>,
}

/// Age limits, in seconds.
#[derive(Clone, Copy)]
pub struct Most {
    /// the longest life of a credential
    pub credential_seconds: u64,
    /// the greatest age of a list of revocations
    pub status_seconds: u64,
}

impl Most {
    /// Checks a credential against what its tenant has published.
    fn check(self, customer: &Customer, claims: &Claims, now: u64) -> Result<InForce, Refused> {
        let found = customer.in_force(now, self.status_seconds)?;
        claims.check(found.decider.bundle(), &found.status, now, self.credential_seconds)?;
        Ok(found)
    }
}

/// The present time, seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl Admit for Admission {
    fn admit(&self, session_token: Option<&str>) -> S3Result<Arc<User>> {
        let Some(token) = session_token else {
            return Err(s3_error!(
                AccessDenied,
                "a request has a session token: the tenant issues one with its credential"
            ));
        };
        let (bucket, refusal) = match self.user_of(token) {
            Ok(user) => return Ok(Arc::new(user)),
            Err(refused) => refused,
        };
        self.told.tell(bucket.as_deref(), &refusal, Instant::now());
        Err(refusal.into())
    }
}

impl Told {
    fn tell(&self, bucket: Option<&str>, refusal: &Refused, now: Instant) {
        let bound = match refusal {
            Refused::Credential(Refusal::Forged) => &self.strangers,
            Refused::Credential(_) | Refused::Absent(_) => &self.holders,
        };
        let (left_out, is_told) = bound.lock().one_more(now);
        if left_out > 0 {
            tracing::warn!(left_out, "more requests were refused than are told of here");
        }
        if is_told {
            tracing::warn!(bucket = bucket.unwrap_or("-"), "refused: {refusal}");
        }
    }
}

impl Admission {
    fn user_of(&self, token: &str) -> Result<User, (Option<String>, Refused)> {
        let claimed = credential::claimed_bucket(token);
        let customer = claimed.as_ref().and_then(|bucket| self.customers.get(bucket));
        let customer = customer.ok_or((None, Refused::Credential(Refusal::Forged)))?;
        self.user(customer, token, now()).map_err(|refused| (Some(customer.config.bucket.clone()), refused))
    }

    fn user(&self, customer: &Arc<Customer>, token: &str, now: u64) -> Result<User, Refused> {
        let claims = Claims::verify(&customer.config.key, &customer.config.bucket, token)?;
        let found = self.most.check(customer, &claims, now)?;
        let secret = SecretKey::from(claims.secret(&self.private)?.as_str());
        let name = claims.sub.chars().take(NAME_LEN).collect();
        let key = (claims.id.clone(), secret);
        let (tenant, customer) = (customer.tenant.clone(), customer.clone());
        let rules = Begun { decider: Arc::downgrade(&found.decider), claims, customer, most: self.most };
        Ok(User::of_credential(name, tenant, key, Box::new(rules)))
    }
}

/// The rules that a request began with. The request does not keep them in memory: if newer publications have displaced
/// them, it may do nothing more.
struct Begun {
    decider: Weak<Decider>,
    claims: Claims,
    customer: Arc<Customer>,
    most: Most,
}

impl Rules for Begun {
    fn allow(&self, action: Action, key: &str) -> bool {
        self.decider.upgrade().is_some_and(|decider| decider.allows(&self.claims, action, key))
    }

    fn are_there(&self) -> bool {
        self.decider.strong_count() > 0
    }

    /// Checks the credential against the newest publications. Long requests do so repeatedly.
    fn in_force(&self) -> S3Result<()> {
        Ok(self.most.check(&self.customer, &self.claims, now()).map(drop)?)
    }
}

/// The reason why a request is not served.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Credential(#[from] Refusal),
    #[error(transparent)]
    Absent(#[from] Absent),
}

impl From<Refused> for S3Error {
    fn from(refused: Refused) -> S3Error {
        let said = refused.to_string();
        match refused {
            Refused::Credential(Refusal::Forged | Refusal::Unknown | Refusal::Time) => {
                s3_error!(InvalidToken, "{said}")
            }
            Refused::Credential(Refusal::Expired | Refusal::Outdated) => s3_error!(ExpiredToken, "{said}"),
            Refused::Credential(Refusal::Revoked) => s3_error!(AccessDenied, "{said}"),
            Refused::Absent(_) => s3_error!(ServiceUnavailable, "{said}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::lines::Lines;
    use crate::provider::bounded::SPAN;

    #[test]
    fn strangers_write_few_lines_and_leave_some_for_others() {
        let (lines, forged) = (Lines::default(), Refused::Credential(Refusal::Forged));
        let admission = Admission {
            private: Secret::new(&mut [5; 32]),
            customers: HashMap::new(),
            most: Most { credential_seconds: 60, status_seconds: 60 },
            told: Told::default(),
        };
        let (told, now) = (Told::default(), Instant::now());
        lines.while_doing(|| {
            for _ in 0..1000 {
                assert!(admission.admit(Some("made up")).is_err());
            }
            assert!(lines.0.lock().len() < 500, "{:?}", lines.0.lock());
            lines.0.lock().clear();
            (0..1000).for_each(|_| told.tell(None, &forged, now));
            told.tell(Some("acme"), &Refused::Credential(Refusal::Expired), now);
            told.tell(Some("acme"), &Refused::Credential(Refusal::Unknown), now);
            told.tell(None, &forged, now + SPAN);
        });
        let lines = lines.0.lock();
        let has = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
        assert_eq!((has("refused: "), has("acme"), has("left_out=980"), lines.len()), (23, 2, 1, 24), "{lines:?}");
    }
}
