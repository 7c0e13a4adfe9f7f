//! The proxy's side of a decision. Its inputs are rules over tokens, the tokens of a credential and a key as it is
//! stored; none of the tenant's keys is needed.

use crate::attribute::{above, decided, request, uid};
use crate::compile::STATEMENTS_MAX;
use crate::expression::{KEY, PERSON, TOKENS};
use crate::{AccessError, Action, Bundle, Claims, Result};
use cedar_policy::{Entities, Entity, Policy, PolicyId, PolicySet, RestrictedExpression};
use std::collections::{HashMap, HashSet};

/// A bundle that is in force.
pub struct Decider {
    /// without its statements, which are in `policies`
    bundle: Bundle,
    policies: PolicySet,
}

impl Decider {
    /// Makes a decider from a bundle whose signature is verified.
    ///
    /// # Errors
    /// [`AccessError::Document`]: its statements are not Cedar, or are too many.
    pub fn of(mut bundle: Bundle) -> Result<Decider> {
        let wrong = |detail| AccessError::Document { what: "the bundle", detail };
        if bundle.policies.len() > STATEMENTS_MAX {
            return Err(wrong("it has more than 10,000 statements"));
        }
        let mut policies = PolicySet::new();
        for (at, policy) in std::mem::take(&mut bundle.policies).into_iter().enumerate() {
            let policy = Policy::from_json(Some(PolicyId::new(at.to_string())), policy);
            let policy = policy.map_err(|_| wrong("a statement is not in Cedar's JSON format"))?;
            policies.add(policy).map_err(|_| wrong("two statements are one"))?;
        }
        Ok(Decider { bundle, policies })
    }

    /// The bundle, without its statements: only their parsed form is kept.
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// Decides one request. `key` is the key as it is stored, without a slash at its end; the empty key is the bucket
    /// itself.
    pub fn allows(&self, claims: &Claims, action: Action, key: &str) -> bool {
        let tokens = claims.tokens.iter().cloned().map(RestrictedExpression::new_string);
        let attributes = HashMap::from([(TOKENS.to_owned(), RestrictedExpression::new_set(tokens))]);
        let (principal, resource) = (uid(PERSON, &claims.sub), uid(KEY, key));
        let Ok(person) = Entity::new(principal.clone(), attributes, HashSet::new()) else { return false };
        let folders = above(key).map(|folder| uid(KEY, folder)).collect();
        let object = Entity::new_no_attrs(resource.clone(), folders);
        let Ok(entities) = Entities::from_entities([person, object], None) else { return false };
        request(principal, action, resource).is_some_and(|request| decided(&request, &self.policies, entities))
    }
}
