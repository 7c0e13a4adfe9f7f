//! An administrator's requests about the policy: its rules, their effect on a host and a vault, and the files that do
//! not comply.

use super::checked;
use crate::administered::Administered;
use crate::policy::{Policy, ShownRule, Subject, violations};
use crate::{Result, ServerError};
use lamassu_anchor::table::Table;
use lamassu_anchor::{Anchor, AnchorError, VaultRow};
use lamassu_format::header::VaultId;
use lamassu_format::profile::{Choice, KeyKind, Protection};
use lamassu_format::{Cipher, Hash, Profile, Suite};
use lamassu_rpc::limits::Forbidden;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Files of one vault in an answer at most.
const FOUND_MAX: usize = 10_000;

/// A request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "about")]
pub enum PolicyRequest {
    /// The rules.
    Show,
    /// Whether a host may have files of certain profiles in a vault.
    Test {
        /// the host's name
        host: String,
        /// the vault, hex
        vault: String,
        /// parts of a profile, separated by commas; `None`: all profiles
        profile: Option<String>,
        /// use the file instead of the policy in force
        file: bool,
    },
    /// The files that do not comply.
    Check {
        /// the vault, hex
        vault: String,
    },
}

/// An answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "about")]
pub enum PolicyAnswer {
    /// The rules.
    Rules {
        /// in the order of the file
        rules: Vec<ShownRule>,
        /// Whether they are in force, as those of a running server are. The file may have changed since.
        in_force: bool,
        /// a remark on the file
        note: Option<String>,
    },
    /// Whether profiles are allowed.
    Decided {
        /// by profile
        decided: Vec<Decided>,
    },
    /// Files that do not comply.
    Found {
        /// by object number
        files: Vec<Violation>,
        /// number of further files
        more: u64,
    },
}

/// Whether a host may have files of a profile.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Decided {
    /// words for people
    pub profile: String,
    /// the rules that forbid it, each with what it forbids; empty: it is allowed
    pub forbidden: Vec<(String, String)>,
}

/// A file whose profile is forbidden.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// its number in the anchor
    pub object: u64,
    /// the dataset that it is in, hex; none: the vault itself
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dataset: Option<String>,
    /// words for people
    pub profile: String,
    /// the first rule that forbids it
    pub rule: String,
    /// the hosts to which that applies
    pub hosts: BTreeSet<String>,
}

/// The profile given by some of its parts, in a vault of a suite.
fn profile_of(parts: &str, suite: Suite) -> std::result::Result<Profile, String> {
    let mut choice = Choice::default();
    for part in parts.split(',').map(str::trim) {
        // No word names parts of two kinds.
        let is_first = if let Some(word) = Protection::from_name(part) {
            choice.protection.replace(word).is_none()
        } else if let Some(word) = KeyKind::from_name(part) {
            choice.key.replace(word).is_none()
        } else if let Some(word) = Cipher::from_name(part) {
            choice.cipher.replace(word).is_none()
        } else if let Some(word) = Hash::from_name(part) {
            choice.hash.replace(word).is_none()
        } else {
            return Err(format!("{part:?} is no protection, kind of block keys, cipher or hash"));
        };
        if !is_first {
            return Err(format!("{part:?} is the second of its kind"));
        }
    }
    choice.over(Profile::DEFAULT, suite).map_err(|error| error.to_string())
}

/// Answers a request.
///
/// # Errors
/// [`ServerError`].
pub fn answer(of: &Administered, asked: PolicyRequest) -> Result<PolicyAnswer> {
    match asked {
        PolicyRequest::Show => {
            let Some(policies) = &of.policies else {
                let rules = Policy::read(&of.dir)?.0.shown();
                return Ok(PolicyAnswer::Rules { rules, in_force: false, note: None });
            };
            let note = match policies.differs_from_file() {
                Ok(false) => None,
                Ok(true) => {
                    Some(format!("{} says something else by now: reload the server", policies.path().display()))
                }
                Err(error) => Some(format!("a reload would fail: {error}")),
            };
            Ok(PolicyAnswer::Rules { rules: policies.now().1.shown(), in_force: true, note })
        }
        PolicyRequest::Test { host, vault, profile, file } => {
            let subject = subject(of, &vault_of(of, &checked(&vault)?)?.1, &host);
            let policy = policy(of, file)?;
            let profiles = match profile {
                Some(parts) => {
                    vec![profile_of(&parts, subject.suite).map_err(|detail| ServerError::Garbled { detail })?]
                }
                None => {
                    let all = (0..=u8::MAX).filter_map(Profile::of_number);
                    all.filter(|profile| profile.check(subject.suite).is_ok()).collect()
                }
            };
            let decided = |profile: Profile| Decided {
                profile: profile.named(subject.suite).to_string(),
                forbidden: (policy.reasons(&subject, profile))
                    .map(|Forbidden { rule, what }| (rule.to_string(), what.to_string()))
                    .collect(),
            };
            Ok(PolicyAnswer::Decided { decided: profiles.into_iter().map(decided).collect() })
        }
        PolicyRequest::Check { vault } => check(of, &vault),
    }
}

fn policy(of: &Administered, file: bool) -> Result<Arc<Policy>> {
    match &of.policies {
        Some(policies) if !file => Ok(policies.now().1),
        _ => Ok(Arc::new(Policy::read(&of.dir)?.0)),
    }
}

/// The table of a vault that is kept here, and its row.
fn vault_of(of: &Administered, id: &VaultId) -> Result<(Arc<dyn Table>, VaultRow)> {
    let table = of.table(id)?.map_err(|error| match error {
        AnchorError::Missing { .. } => ServerError::NoVault { id: id.to_string() },
        error => error.into(),
    })?;
    let row = Anchor::open(table.clone(), id)?.vault();
    Ok((table, row))
}

/// A vault, as a host would use it.
fn subject(of: &Administered, row: &VaultRow, host: &str) -> Subject {
    Subject::of(host, row, of.state.with_those_around(&row.vault))
}

/// The files of a vault and of the datasets in it.
fn check(of: &Administered, vault: &str) -> Result<PolicyAnswer> {
    let (policy, id) = (policy(of, false)?, checked(vault)?);
    let mut files: BTreeMap<(VaultId, u64, String), Violation> = BTreeMap::new();
    let mut more = BTreeSet::new();
    for inner in of.state.with_those_inside(&id) {
        of.visit_table(&inner, || {
            let (table, row) = vault_of(of, &inner)?;
            for host in of.state.who_may_use(&inner) {
                let subject = subject(of, &row, &host);
                violations(&*table, (&policy, &subject), |object, profile, Forbidden { rule, .. }| {
                    let key = (inner, object.0, rule.to_string());
                    if files.len() >= FOUND_MAX && !files.contains_key(&key) {
                        more.insert((inner, object.0));
                        return ControlFlow::Continue(());
                    }
                    let found = files.entry(key).or_insert_with(|| Violation {
                        object: object.0,
                        dataset: (inner != id).then(|| inner.to_string()),
                        profile: profile.named(subject.suite).to_string(),
                        rule: rule.to_string(),
                        hosts: BTreeSet::new(),
                    });
                    found.hosts.insert(host.clone());
                    ControlFlow::Continue(())
                })?;
            }
            Ok(())
        })?;
    }
    Ok(PolicyAnswer::Found { files: files.into_values().collect(), more: more.len() as u64 })
}
