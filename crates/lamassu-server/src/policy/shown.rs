//! Rules, as administrators see them.

use super::{Patterns, Policy, Rule, Words};
use lamassu_format::profile::{KeyKind, Protection};
use lamassu_format::{Cipher, Domain, Hash, Suite};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A rule, as it is shown.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShownRule {
    /// its name
    pub rule: String,
    /// patterns of hosts
    pub hosts: Vec<String>,
    /// patterns of vaults
    pub vaults: Vec<String>,
    /// by aspect
    pub forbids: BTreeMap<String, Vec<String>>,
    /// by aspect
    pub requires: BTreeMap<String, Vec<String>>,
}

/// The values that a rule forbids or requires, by aspect.
fn aspects(rule: &Rule, required: bool) -> BTreeMap<String, Vec<String>> {
    fn names<T: Copy>(words: &Words<T>, required: bool, name: fn(T) -> &'static str) -> Vec<String> {
        let values = if required { words.required.as_deref().unwrap_or_default() } else { &words.forbidden };
        values.iter().map(|value| name(*value).to_owned()).collect()
    }
    let all = [
        ("suites", names(&rule.suites, required, Suite::name)),
        ("domains", names(&rule.domains, required, Domain::name)),
        ("protections", names(&rule.protections, required, Protection::name)),
        ("ciphers", names(&rule.ciphers, required, Cipher::name)),
        ("hashes", names(&rule.hashes, required, Hash::name)),
        ("keys", names(&rule.keys, required, KeyKind::name)),
    ];
    let said = all.into_iter().filter(|(_, words)| !words.is_empty());
    said.map(|(aspect, words)| (aspect.to_owned(), words)).collect()
}

fn shown(patterns: &Patterns) -> Vec<String> {
    let all = if patterns.those.is_empty() { vec!["*".to_owned()] } else { patterns.those.clone() };
    all.into_iter().chain(patterns.but.iter().map(|but| format!("!{but}"))).collect()
}

impl Policy {
    /// The rules, as they are shown.
    pub fn shown(&self) -> Vec<ShownRule> {
        let shown = |rule: &Rule| ShownRule {
            rule: rule.name.clone(),
            hosts: shown(&rule.hosts),
            vaults: shown(&rule.vaults),
            forbids: aspects(rule, false),
            requires: aspects(rule, true),
        };
        self.rules.iter().map(shown).collect()
    }
}
