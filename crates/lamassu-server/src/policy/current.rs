//! The policy in force, and earlier ones.
//!
//! A new policy applies at once to whatever begins after it: a session, a turn, an anchor that is put. A session under
//! way is told of it with the next reply. For two more terms it may commit what the policy allows under which it began.
//! By then a host that follows what it is told has committed what it had queued, so a reload costs no honest host
//! anything.
//!
//! The text in force is also stored in a file of its own, so that a restarted server knows what hosts were last told.

use super::{FILE, Policy, Subject, parse};
use crate::audit::Event;
use crate::metrics::Metrics;
use crate::refused::{At, Lost, Refused};
use crate::state::State;
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_crypto::wrap::sha256;
use lamassu_lease::{Millis, Terms};
use lamassu_rpc::clock::now;
use lamassu_rpc::limits::{Forbidden, Limits};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The text in force, in the server's directory.
const APPLIED: &str = "policy.applied";
/// The previous text. The file's age is the time since that policy was replaced.
const BEFORE: &str = "policy.before";
/// Minimum time between two entries of the audit log about the same refusal.
const NOTED_EVERY: Duration = Duration::from_secs(60);
/// Refusals that are remembered for that.
const NOTED_MAX: usize = 10_000;

/// The number of a policy: how many there were before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyNo(u64);

struct Earlier {
    number: PolicyNo,
    policy: Arc<Policy>,
    /// From then on it counts for no session.
    until: Millis,
}

struct Inner {
    number: PolicyNo,
    now: Arc<Policy>,
    text: String,
    earlier: Vec<Earlier>,
}

/// The host, the vault, the rule, and the request of a refusal.
type Noted = (String, String, Arc<str>, At);

/// The policy in force, and earlier ones whose grace has not ended.
pub struct Policies {
    dir: PathBuf,
    grace: Millis,
    inner: RwLock<Inner>,
    noted: Mutex<HashMap<Noted, Instant>>,
    state: Arc<State>,
    metrics: Metrics,
}

/// Whether a file was written within this time. A time in the future counts too, since the clock may have been set.
fn is_younger(path: &Path, time: Millis) -> bool {
    let written = path.metadata().and_then(|metadata| metadata.modified());
    written.is_ok_and(|at| at.elapsed().map_or(true, |age| age < Duration::from_millis(time.0)))
}

fn digest(text: &str) -> String {
    HEXLOWER.encode(&sha256(text.as_bytes()))
}

impl Policies {
    /// The policies of a server's directory.
    ///
    /// # Errors
    /// [`ServerError::Config`], [`ServerError::File`].
    pub fn start(dir: &Path, terms: Terms, (state, metrics): (Arc<State>, Metrics)) -> Result<Policies> {
        let (policy, text) = Policy::read(dir)?;
        // A text that does not parse, for example of a later version, was never in force here.
        let applied = super::file::read_text(dir, APPLIED)?.unwrap_or_default();
        let grace = Millis(2 * terms.term().0);
        // Sessions that reconnect may have begun under the previous policy: their grace starts again.
        let before = match is_younger(&dir.join(BEFORE), grace) {
            true => super::file::read_text(dir, BEFORE)?,
            false => None,
        };
        let first = before.as_ref().unwrap_or(&applied);
        let (now, earlier) = (Arc::new(parse(first).unwrap_or_default()), Vec::new());
        let inner = Inner { number: PolicyNo(0), now, text: first.clone(), earlier };
        let noted = Mutex::default();
        let policies = Policies { dir: dir.into(), grace, inner: RwLock::new(inner), noted, state, metrics };
        if before.is_some() {
            policies.follow(parse(&applied).unwrap_or_default(), applied);
        }
        policies.apply_unless_same(policy, text)?;
        Ok(policies)
    }

    /// Applies the file's current text. An invalid file changes nothing.
    ///
    /// # Errors
    /// [`ServerError::Config`], [`ServerError::File`].
    pub fn reload(&self) -> Result<()> {
        let read = Policy::read(&self.dir).and_then(|(policy, text)| self.apply_unless_same(policy, text));
        self.metrics.policy_read(read.is_ok());
        read
    }

    fn apply_unless_same(&self, policy: Policy, text: String) -> Result<()> {
        if self.inner.read().text == text {
            return Ok(());
        }
        let (path, before) = (self.dir.join(APPLIED), self.dir.join(BEFORE));
        // A crash loses these files, and so the grace of sessions that were told of the previous policy.
        fs::write(&before, &self.inner.read().text).map_err(ServerError::file("write", &before))?;
        fs::write(&path, &text).map_err(ServerError::file("write", &path))?;
        let rules = policy.len() as u64;
        if !(policy.is_empty() && self.now().1.is_empty()) {
            self.state.note(Event::PolicyTaken { rules, digest: digest(&text) })?;
        }
        if policy.is_empty() && !self.now().1.is_empty() {
            tracing::warn!("the policy has no rules any more: everything is allowed");
        }
        self.follow(policy, text);
        tracing::info!(rules, "the policy is in force");
        Ok(())
    }

    /// Puts another policy in force.
    fn follow(&self, policy: Policy, text: String) {
        let inner = &mut *self.inner.write();
        let at = now();
        inner.earlier.retain(|earlier| at < earlier.until);
        let (number, until) = (inner.number, Millis(at.0 + self.grace.0));
        inner.earlier.push(Earlier { number, policy: inner.now.clone(), until });
        inner.number.0 += 1;
        (inner.now, inner.text) = (Arc::new(policy), text);
    }

    /// The policy in force.
    pub fn now(&self) -> (PolicyNo, Arc<Policy>) {
        let inner = self.inner.read();
        (inner.number, inner.now.clone())
    }

    /// The number of the policy in force.
    pub fn number(&self) -> PolicyNo {
        self.inner.read().number
    }

    /// The text in force.
    pub fn text(&self) -> String {
        self.inner.read().text.clone()
    }

    /// The limits of a host in a vault that was told of policy `known`: those of the policy in force first, then those
    /// of each policy since `known` that still counts.
    pub fn limits(&self, subject: &Subject, known: PolicyNo, cache: &mut LimitsCache) -> Vec<Arc<Limits>> {
        let inner = self.inner.read();
        let at = now();
        let earlier = inner.earlier.iter().filter(|earlier| earlier.number >= known && at < earlier.until);
        let all = std::iter::once((inner.number, &inner.now)).chain(earlier.map(|one| (one.number, &one.policy)));
        let all: Vec<_> = all.map(|(number, policy)| (number, cache.of(number, || policy.limits(subject)))).collect();
        cache.0.retain(|number, _| all.iter().any(|(used, _)| used == number));
        all.into_iter().map(|(_, limits)| limits).collect()
    }

    /// Records a refusal, and returns the error for it.
    pub fn refuse(&self, subject: &Subject, at: At, Forbidden { rule, what }: Forbidden) -> Refused {
        self.metrics.policy_refused(at);
        let (host, vault) = (subject.host.clone(), subject.vault.clone());
        if self.is_to_be_noted((host.clone(), vault.clone(), rule.clone(), at)) {
            let (rule, what) = (rule.to_string(), what.to_string());
            let event = Event::PolicyRefused { host, vault, rule, what, at: at.name().into() };
            if let Err(error) = self.state.note(event) {
                return Refused::Lost(Lost(error));
            }
        }
        Refused::Policy { rule: rule.to_string(), what: what.to_string() }
    }

    /// Whether a refusal is to be recorded: not each time, since a host can be refused as often as it likes.
    fn is_to_be_noted(&self, what: Noted) -> bool {
        let noted = &mut *self.noted.lock();
        if noted.get(&what).is_some_and(|at| at.elapsed() < NOTED_EVERY) {
            return false;
        }
        if noted.len() >= NOTED_MAX {
            noted.retain(|_, at| at.elapsed() < NOTED_EVERY);
        }
        if noted.len() < NOTED_MAX {
            noted.insert(what, Instant::now());
        }
        true
    }

    /// Whether the file differs from the policy in force; an error: what is wrong with the file.
    ///
    /// # Errors
    /// [`ServerError::Config`], [`ServerError::File`].
    pub fn differs_from_file(&self) -> Result<bool> {
        Ok(Policy::read(&self.dir)?.1 != self.text())
    }

    /// The file's path, for messages.
    pub fn path(&self) -> PathBuf {
        self.dir.join(FILE)
    }
}

/// The limits for one host and vault, by policy.
#[derive(Default)]
pub struct LimitsCache(HashMap<PolicyNo, Arc<Limits>>);

impl LimitsCache {
    fn of(&mut self, number: PolicyNo, limits: impl FnOnce() -> Limits) -> Arc<Limits> {
        self.0.entry(number).or_insert_with(|| Arc::new(limits())).clone()
    }
}
