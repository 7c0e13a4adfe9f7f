//! What the access proxy of a provider takes from strangers and from tenants, and the rules that a tenant writes.

use crate::bytes::Bytes;
use lamassu_access::compile::{compile, plain};
use lamassu_access::names::Names;
use lamassu_access::token::TokenKey;
use lamassu_access::{
    Action, AttributeKind, Attributes, Bundle, Claims, Decider, Declarations, Status, attribute, credential,
};
use lamassu_crypto::{Secret, sign};

/// The first byte says what the rest is: a session token and publications as they come, the content of such a document
/// behind its signature, or a rule.
pub fn access(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    let kind = bytes.u8() % 4;
    let Ok(text) = std::str::from_utf8(bytes.rest()) else { return };
    let (seed, root) = (Secret::new(&mut [3; 32]), Secret::new(&mut [4; 32]));
    let public = sign::public(&seed);
    match kind {
        0 => {
            let bucket = credential::claimed_bucket(text).unwrap_or_default();
            assert!(Claims::verify(&public, &bucket, text).is_err(), "nobody but the tenant signs");
            assert!(Bundle::verify(&public, &bucket, text).is_err() && Status::verify(&public, &bucket, text).is_err());
        }
        1 => {
            let Ok(bundle) = serde_json::from_str::<Bundle>(text) else { return };
            let signed = bundle.sign(&seed, "acme").expect("it is not long");
            assert_eq!(Bundle::verify(&public, "acme", &signed).as_ref().ok(), Some(&bundle));
            let Ok(decider) = Decider::of(bundle) else { return };
            for action in Action::ALL {
                decider.allows(&claims(), action, "a/b");
            }
        }
        2 => {
            let Ok(claims) = serde_json::from_str::<Claims>(text) else { return };
            let bundle = Bundle { seq: 1, epoch: 1, vocabulary: "v".into(), time: 0, policies: Vec::new() };
            let status = Status { seq: 1, bundle: 1, time: 0, revoked: Default::default() };
            let _ = claims.check(&bundle, &status, 1000, 600);
            let _ = claims.secret(&root);
            let all = serde_json::json!({ "op": "All" });
            let permits = serde_json::json!({
                "effect": "permit", "principal": all, "action": all, "resource": all, "conditions": []
            });
            let decider = Decider::of(Bundle { policies: vec![permits], ..bundle }).expect("Cedar");
            assert!(decider.allows(&claims, Action::Read, "a"), "whoever has a credential");
        }
        _ => {
            let declared: Declarations = [
                ("dept".into(), AttributeKind::Text),
                ("teams".into(), AttributeKind::Set),
                ("level".into(), AttributeKind::Number),
            ]
            .into();
            let rules = [("r".to_owned(), text.to_owned())].into();
            let (tokens, names) = (TokenKey::of(&root, 1), Names::of(&root));
            let Ok(compiled) = compile(&rules, &declared, &tokens, &names) else { return };
            let vocabulary = compiled.vocabulary_digest();
            let bundle = Bundle { seq: 1, epoch: 1, vocabulary, time: 0, policies: compiled.policies.clone() };
            let decider = Decider::of(bundle).expect("what is compiled is Cedar");
            let plain = plain(&rules, &declared).expect("what compiles is valid");
            let nobody = Attributes::new();
            let stored = names.seal("a/b").expect("a key");
            let person = tokens.person("x");
            let sub = if compiled.vocabulary.contains(&person) { person } else { "x".into() };
            let claims = Claims { tokens: Default::default(), sub, ..claims() };
            for action in Action::ALL {
                let decided = attribute::decide(&plain, &declared, ("x", &nobody), action, ("a/b", &stored));
                let decided = decided.expect("a key");
                assert_eq!(decider.allows(&claims, action, &stored), decided, "both sides are equal");
            }
        }
    }
}

fn claims() -> Claims {
    Claims {
        id: "0".repeat(32),
        sub: "x".into(),
        tokens: ["a".to_owned()].into(),
        epoch: 1,
        vocabulary: "v".into(),
        begins: 0,
        ends: 600,
        told: "00".repeat(32),
    }
}
