//! The policy: which protections and algorithms hosts may use in which vaults (`docs/server.md`).
//!
//! | module | what it does |
//! |---|---|
//! | this one | rules, and their effect on a host, a vault and a profile. Pure |
//! | `file` | `policy.toml`: what an administrator writes |
//! | `current` | the policy in force, and earlier ones while they still count |
//! | `shown` | rules, as administrators see them |
//! | `rows` | whether the rows of a commit, or of an anchor that is put, comply |
//!
//! A rule forbids values, or mandates some and so forbids all others. No rule allows what another one forbids, so the
//! order of rules only decides which name is reported. Without rules everything is allowed.
//!
//! A vault stands for itself and for all datasets in it, at any depth, also where a rule excepts it: who may use a
//! vault makes datasets in it, and gives them ids that no rule can name.
//!
//! A decision depends on the suite and the domain of a vault, which its row fixes when it is put here, and on the
//! profile in the row of each file. A host that lies about its data is not detected: no row shows it.

pub mod current;
mod file;
mod rows;
mod shown;
#[cfg(test)]
mod tests;

pub use current::Policies;
pub use file::{COMMENTED, FILE, parse};
pub use rows::{Judged, judge, vault_row, violations};
pub use shown::ShownRule;

use lamassu_anchor::VaultRow;
use lamassu_format::header::VaultId;
use lamassu_format::profile::{KeyKind, Protection};
use lamassu_format::{Cipher, Domain, Hash, Profile, Suite};
use lamassu_rpc::limits::{Forbidden, Limits};

/// All rules, in the order of the file.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    rules: Vec<Rule>,
}

/// One rule.
#[derive(Clone, Debug)]
struct Rule {
    name: String,
    hosts: Patterns,
    vaults: Patterns,
    suites: Words<Suite>,
    domains: Words<Domain>,
    protections: Words<Protection>,
    ciphers: Words<Cipher>,
    hashes: Words<Hash>,
    keys: Words<KeyKind>,
}

/// What a rule says about one aspect.
#[derive(Clone, Debug)]
struct Words<T> {
    forbidden: Vec<T>,
    /// none: every value complies
    required: Option<Vec<T>>,
}

impl<T: PartialEq> Words<T> {
    fn forbids(&self, word: &T) -> bool {
        self.forbidden.contains(word) || self.required.as_ref().is_some_and(|required| !required.contains(word))
    }

    /// The same for an absent value: it violates a mandate.
    fn forbids_nothing(&self) -> bool {
        self.required.is_some()
    }
}

/// Names that a rule applies to.
#[derive(Clone, Debug, Default)]
struct Patterns {
    /// empty: all
    those: Vec<String>,
    but: Vec<String>,
}

impl Patterns {
    fn matches(&self, name: &str) -> bool {
        self.matches_one_of(&[name])
    }

    /// Whether one of these names is meant, and none is excepted.
    fn matches_one_of(&self, names: &[&str]) -> bool {
        let is_one = |pattern: &String| names.iter().any(|name| matches(pattern, name));
        (self.those.is_empty() || self.those.iter().any(is_one)) && !self.but.iter().any(is_one)
    }
}

/// Whether a name matches a pattern, in which `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut left) = name.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(at) = left.find(part) else { return false };
        left = &left[at + part.len()..];
    }
    left.ends_with(last)
}

/// A vault, as a host uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// the host's name
    pub host: String,
    /// the vault's id, hex
    pub vault: String,
    /// the vaults that it lies in, if it is a dataset; hex, from the inside out
    pub around: Vec<String>,
    /// as its row has it
    pub suite: Suite,
    /// as its row has it
    pub domain: Domain,
}

impl Subject {
    /// The vault that has this row. `within`: it and the vaults that it lies in, from the inside out.
    pub fn of(host: &str, row: &VaultRow, within: impl IntoIterator<Item = VaultId>) -> Subject {
        let around = within.into_iter().filter(|vault| *vault != row.vault).map(|vault| vault.to_string()).collect();
        Subject { host: host.into(), vault: row.vault.to_string(), around, suite: row.suite, domain: row.domain }
    }

    /// The names that a rule may mean it by.
    fn vaults(&self) -> Vec<&str> {
        std::iter::once(&self.vault).chain(&self.around).map(String::as_str).collect()
    }
}

impl Policy {
    /// How many rules there are.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Whether there is no rule.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    fn about<'a>(&'a self, subject: &'a Subject) -> impl Iterator<Item = &'a Rule> {
        let vaults = subject.vaults();
        let is_about = move |rule: &&Rule| rule.hosts.matches(&subject.host) && rule.vaults.matches_one_of(&vaults);
        self.rules.iter().filter(is_about)
    }

    /// Why a host may only read a vault, if that is so.
    pub fn forbids_vault(&self, subject: &Subject) -> Option<Forbidden> {
        self.about(subject).find_map(|rule| rule.forbids_vault(subject))
    }

    /// All reasons why a host may have no files of a profile in a vault, in the order of the rules.
    pub fn reasons<'a>(&'a self, subject: &'a Subject, profile: Profile) -> impl Iterator<Item = Forbidden> + use<'a> {
        let reason = move |rule: &Rule| rule.forbids_vault(subject).or_else(|| rule.forbids(subject.suite, profile));
        self.about(subject).filter_map(reason)
    }

    /// The limits of a host in a vault, as it is told of them.
    pub fn limits(&self, subject: &Subject) -> Limits {
        match self.is_empty() {
            true => Limits::default(),
            false => Limits::of(|profile| self.reasons(subject, profile).next()),
        }
    }
}

impl Rule {
    fn because(&self, what: String) -> Option<Forbidden> {
        Some(Forbidden { rule: self.name.as_str().into(), what: what.into() })
    }

    fn forbids_vault(&self, subject: &Subject) -> Option<Forbidden> {
        match () {
            () if self.suites.forbids(&subject.suite) => self.because(format!("suite {}", subject.suite.name())),
            () if self.domains.forbids(&subject.domain) => self.because(format!("domain {}", subject.domain.name())),
            () => None,
        }
    }

    fn forbids(&self, suite: Suite, profile: Profile) -> Option<Forbidden> {
        let (protection, method) = (profile.protection(), profile.method());
        if self.protections.forbids(&protection) {
            return self.because(format!("protection {}", protection.name()));
        }
        let hash = method.hash(suite);
        if self.hashes.forbids(&hash) {
            return self.because(format!("hash {}", hash.name()));
        }
        if protection.is_plain() {
            let lacks = match () {
                () if self.ciphers.forbids_nothing() => "a cipher",
                () if self.keys.forbids_nothing() => "block keys",
                () => return None,
            };
            return self.because(format!("protection {}, which has not {lacks}", protection.name()));
        }
        let (cipher, key) = (method.cipher(suite), profile.key());
        match () {
            () if self.ciphers.forbids(&cipher) => self.because(format!("cipher {}", cipher.name())),
            () if self.keys.forbids(&key) => self.because(format!("block keys {}", key.name())),
            () => None,
        }
    }
}
