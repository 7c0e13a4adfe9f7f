//! What the provider learns from its own files, and what it learns in addition from people of the tenant who help it.
//!
//! The inputs are the provider's own files: the bundle, and the keys and sizes of objects. An *insider* is a person
//! whose credential and attributes the provider knows. With several insiders, the provider can match tokens to
//! attributes: a token belongs to an attribute that exactly the same insiders have.

use crate::expression::{KEY, PERSON};
use crate::{Bundle, Claims};
use serde::Serialize;
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};

/// A person of the tenant who helps the provider.
pub struct Insider {
    /// contents of the insider's session token
    pub claims: Claims,
    /// the insider's own attributes, each as `dept=finance`
    pub attributes: BTreeSet<String>,
}

/// Knowledge about one token.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct TokenLeak {
    /// number of statements that contain the token
    pub statements: usize,
    /// most other tokens in a statement that contains it
    pub beside: usize,
    /// number of insiders who have the token
    pub insiders: usize,
    /// possible meanings by the insiders' attributes; `has dept`: the attribute exists; `dept~4`: an interval with 4 in
    /// it
    pub candidates: BTreeSet<String>,
}

/// Knowledge about a tenant's rules.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Leak {
    /// number of statements that permit
    pub permits: usize,
    /// number of statements that forbid
    pub forbids: usize,
    /// tokens of attributes, with what is known of each
    pub tokens: BTreeMap<String, TokenLeak>,
    /// tokens of people whom statements name
    pub people: BTreeSet<String>,
    /// keys and folders that statements name, as they are stored; the value is the number of statements
    pub keys: BTreeMap<String, usize>,
}

impl Leak {
    /// Computes what a bundle shows with the help of these insiders.
    pub fn of(bundle: &Bundle, insiders: &[Insider]) -> Leak {
        let mut leak = Leak::default();
        for policy in &bundle.policies {
            match policy["effect"].as_str() {
                Some("forbid") => leak.forbids += 1,
                _ => leak.permits += 1,
            }
            let mut found = Found::default();
            found.search(policy);
            for token in &found.tokens {
                let known = leak.tokens.entry(token.clone()).or_default();
                known.statements += 1;
                known.beside = known.beside.max(found.tokens.len() - 1);
            }
            leak.people.extend(found.people);
            found.keys.into_iter().for_each(|key| *leak.keys.entry(key).or_default() += 1);
        }
        for (token, known) in &mut leak.tokens {
            let having: Vec<&Insider> = insiders.iter().filter(|one| one.claims.tokens.contains(token)).collect();
            known.insiders = having.len();
            if let Some(first) = having.first() {
                let fits = |fact: &String| {
                    insiders.iter().all(|one| facts(one).contains(fact) == one.claims.tokens.contains(token))
                };
                known.candidates = facts(first).into_iter().filter(fits).collect();
            }
        }
        leak
    }
}

/// The possible meanings of an insider's tokens.
fn facts(of: &Insider) -> BTreeSet<String> {
    let pairs = of.attributes.iter().filter_map(|text| text.split_once('='));
    let facts = pairs.flat_map(|(name, value)| {
        let interval = value.parse::<i64>().ok().map(|number| format!("{name}~{number}"));
        [Some(format!("{name}={value}")), Some(format!("has {name}")), interval]
    });
    facts.flatten().collect()
}

#[derive(Default)]
struct Found {
    tokens: BTreeSet<String>,
    people: BTreeSet<String>,
    keys: BTreeSet<String>,
}

impl Found {
    fn search(&mut self, json: &Json) {
        match json {
            Json::Object(object) => {
                if let (Some(Json::String(kind)), Some(Json::String(id))) = (object.get("type"), object.get("id")) {
                    match kind.as_str() {
                        PERSON => drop(self.people.insert(id.clone())),
                        KEY => drop(self.keys.insert(id.clone())),
                        _ => {}
                    }
                }
                if let Some(Json::String(token)) = object.get("Value") {
                    self.tokens.insert(token.clone());
                }
                object.values().for_each(|value| self.search(value));
            }
            Json::Array(all) => all.iter().for_each(|value| self.search(value)),
            Json::Null | Json::Bool(_) | Json::Number(_) | Json::String(_) => {}
        }
    }
}

/// What the provider sees of a tenant's objects.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Objects {
    /// number of objects
    pub objects: u64,
    /// number of folders with objects
    pub folders: u64,
    /// most folders above one object
    pub depth: usize,
    /// size of all objects, bytes
    pub bytes: u64,
    /// number of distinct sizes
    pub sizes: usize,
}

impl Objects {
    /// Computes it from the keys of a bucket and the sizes of their objects.
    pub fn of<'a>(all: impl IntoIterator<Item = (&'a str, u64)>) -> Objects {
        let (mut seen, mut folders, mut sizes) = (Objects::default(), BTreeSet::new(), BTreeSet::new());
        for (key, size) in all {
            seen.objects += 1;
            seen.bytes += size;
            sizes.insert(size);
            seen.depth = seen.depth.max(crate::attribute::above(key).count());
            folders.extend(crate::attribute::above(key).map(String::from));
        }
        (seen.folders, seen.sizes) = (folders.len() as u64, sizes.len());
        seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::compile;
    use crate::names::Names;
    use crate::token::TokenKey;
    use crate::{AttributeKind, Declarations, attribute};
    use lamassu_crypto::Secret;

    #[test]
    fn insiders_name_tokens_by_what_they_have_and_lack() {
        let declared: Declarations =
            [("dept".into(), AttributeKind::Text), ("projects".into(), AttributeKind::Set)].into();
        let root = Secret::new(&mut [1; 32]);
        let (tokens, names) = (TokenKey::of(&root, 1), Names::of(&root));
        let text = "permit(principal, action, resource in Key::\"a\") when { principal has dept && principal.dept == \
            \"finance\" && principal.projects.contains(\"apollo\") }; forbid(principal == User::\"eve\", action, \
            resource);";
        let rules = [("r".to_owned(), text.to_owned())].into();
        let compiled = compile(&rules, &declared, &tokens, &names).expect("compiles");
        let bundle = Bundle {
            seq: 1,
            epoch: 1,
            vocabulary: compiled.vocabulary_digest(),
            time: 0,
            policies: compiled.policies.clone(),
        };
        let insider = |words: &[&str]| {
            let attributes = attribute::parse(&declared, words.iter().copied()).expect("good");
            let all = tokens.of_attributes(&declared, &attributes, &compiled.cuts);
            let claims = Claims {
                id: String::new(),
                sub: String::new(),
                tokens: all.intersection(&compiled.vocabulary).cloned().collect(),
                epoch: 1,
                vocabulary: bundle.vocabulary.clone(),
                begins: 0,
                ends: 0,
                told: String::new(),
            };
            Insider { claims, attributes: words.iter().map(|word| (*word).to_owned()).collect() }
        };
        let alone = Leak::of(&bundle, &[]);
        assert_eq!((alone.permits, alone.forbids, alone.tokens.len()), (1, 1, 3));
        assert_eq!((alone.people.len(), alone.keys.len()), (1, 1));
        assert!(alone.tokens.values().all(|token| token.candidates.is_empty() && token.beside == 2));
        let finance = tokens.text("dept", "finance");
        let one = Leak::of(&bundle, &[insider(&["dept=finance", "projects=apollo"])]);
        assert!(one.tokens[&finance].candidates.len() > 1, "one insider cannot tell which is which: {one:?}");
        let two = Leak::of(
            &bundle,
            &[insider(&["dept=finance", "projects=apollo"]), insider(&["dept=law", "projects=apollo"])],
        );
        assert_eq!(two.tokens[&finance].candidates, ["dept=finance".to_owned()].into());
    }

    #[test]
    fn objects_are_counted() {
        let seen = Objects::of([("a/b/c", 5), ("a/d", 5), ("e", 1)]);
        assert_eq!(seen, Objects { objects: 3, folders: 2, depth: 2, bytes: 11, sizes: 2 });
    }
}
