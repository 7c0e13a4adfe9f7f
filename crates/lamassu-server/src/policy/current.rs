//! The policy in force, and earlier ones.
//!
//! A new policy applies at once to whatever begins after it: a session, a turn, an anchor that is put. A session under
//! way is told of it with the next reply. For two more terms it may commit what the policy allows under which it began.
//! By then a host that follows what it is told has committed what it had queued, so a reload costs no honest host
//! anything.
//!
//! The text in force is part of the durable state, and so is the one before: a server that restarts, or takes over,
//! knows what hosts were told last. It gives grace for what was in force, and for nothing else: a text that is not in
//! the state was never in force.

use super::{FILE, Policy, Subject, parse};
use crate::Result;
use crate::audit::Event;
use crate::metrics::Metrics;
use crate::refused::{At, Lost, Refused};
use crate::state::{State, Taken};
use data_encoding::HEXLOWER;
use lamassu_crypto::wrap::sha256;
use lamassu_keys::unix_now;
use lamassu_lease::{Millis, Terms};
use lamassu_rpc::clock::now;
use lamassu_rpc::limits::{Forbidden, Limits};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// Whether this time, seconds since 1970, was at most so long ago. A time in the future counts too, since the clock may
/// have been set.
fn is_younger(at: u64, time: Millis) -> bool {
    unix_now().saturating_sub(at).saturating_mul(1000) < time.0
}

fn digest(text: &str) -> String {
    HEXLOWER.encode(&sha256(text.as_bytes()))
}

impl Policies {
    /// The policies of a server's directory and state.
    ///
    /// # Errors
    /// [`ServerError::Config`], [`ServerError::File`]; those of the state.
    pub fn start(dir: &Path, terms: Terms, (state, metrics): (Arc<State>, Metrics)) -> Result<Policies> {
        let (policy, text) = Policy::read(dir)?;
        let grace = Millis(2 * terms.term().0);
        let parsed = |text: String| parse(&text).ok().map(|policy| (policy, text));
        let (applied, before) = match state.policy_taken()? {
            Some(Taken { text, before }) => (parsed(text), before),
            None => (None, None),
        };
        // Sessions that reconnect may have begun under the previous policy: their grace starts again.
        let before = before.filter(|(_, replaced)| is_younger(*replaced, grace)).and_then(|(text, _)| parsed(text));
        let is_known = applied.is_some();
        let (first, next) = match (before, applied) {
            (Some(before), Some(applied)) => (before, Some(applied)),
            (None, Some(applied)) => (applied, None),
            // None was in force, or a server of a later version has written it: there is no grace for that.
            (_, None) => ((policy.clone(), text.clone()), None),
        };
        let inner = Inner { number: PolicyNo(0), now: Arc::new(first.0), text: first.1, earlier: Vec::new() };
        let noted = Mutex::default();
        let policies = Policies { dir: dir.into(), grace, inner: RwLock::new(inner), noted, state, metrics };
        if let Some((applied, text)) = next {
            policies.follow(applied, text);
        }
        match is_known {
            true => policies.apply_unless_same(policy, text)?,
            false => policies.make_durable(&policy, &text)?,
        }
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
        self.make_durable(&policy, &text)?;
        if policy.is_empty() && !self.now().1.is_empty() {
            tracing::warn!("the policy has no rules any more: everything is allowed");
        }
        let rules = policy.len();
        self.follow(policy, text);
        tracing::info!(rules, "the policy is in force");
        Ok(())
    }

    /// Stores the text that is to be in force: a server that takes over gives no grace to what it has not seen.
    fn make_durable(&self, policy: &Policy, text: &str) -> Result<()> {
        let has_rules = !policy.is_empty() || !self.now().1.is_empty();
        let event = || Event::PolicyTaken { rules: policy.len() as u64, digest: digest(text) };
        self.state.take_policy(text, unix_now(), has_rules.then(event))
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

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_format::{Domain, Profile, Suite};
    use std::fs;

    const NO_PLAIN: &str = "[[rule]]\nname = \"r\"\nforbid.protections = [\"none\"]\n";

    /// A server that starts with this file, on this state.
    fn start(dir: &Path, state: &Arc<State>, text: &str) -> Policies {
        fs::write(dir.join(FILE), text).expect("writes");
        Policies::start(dir, Terms::DEFAULT, (state.clone(), Metrics::default())).expect("starts")
    }

    /// Whether a plain file is forbidden to a session that was told of this policy last.
    fn forbids(policies: &Policies, knows: PolicyNo) -> bool {
        let (suite, domain) = (Suite::Aes, Domain::Zone);
        let subject = Subject { host: "a".into(), vault: "00".repeat(16), around: Vec::new(), suite, domain };
        let plain = Profile::of_number(3).expect("none");
        let limits = policies.limits(&subject, knows, &mut LimitsCache::default());
        limits.iter().all(|limits| limits.forbids(plain).is_some())
    }

    /// A session from before a start may follow what was in force then. What is only in a file of the directory was
    /// not: a replica that stood by has an old one, and a crash leaves an empty one.
    #[test]
    fn who_began_before_a_start_has_grace_for_what_was_in_force_and_for_nothing_else() {
        const FIRST: PolicyNo = PolicyNo(0);
        let dir = tempfile::tempdir().expect("a directory");
        for left in [None, Some(""), Some("# an older one")] {
            if let Some(text) = left {
                fs::write(dir.path().join("policy.applied"), text).expect("writes");
            }
            let state = tempfile::tempdir().expect("a directory");
            let state = Arc::new(State::make(state.path()).expect("makes"));
            assert!(forbids(&start(dir.path(), &state, NO_PLAIN), FIRST), "{left:?}");
            assert!(forbids(&start(dir.path(), &state, NO_PLAIN), FIRST), "{left:?}");
        }
        let state = Arc::new(State::make(dir.path()).expect("makes"));
        assert!(!forbids(&start(dir.path(), &state, ""), FIRST));
        let policies = start(dir.path(), &state, NO_PLAIN);
        assert!(!forbids(&policies, FIRST) && forbids(&policies, policies.number()));
        let policies = start(dir.path(), &state, NO_PLAIN);
        assert!(!forbids(&policies, FIRST) && forbids(&policies, policies.number()), "another start right behind");
        // It was replaced long ago.
        let long_ago = unix_now() - 3 * Terms::DEFAULT.term().0 / 1000;
        state.take_policy("", long_ago, None).expect("writes");
        state.take_policy(NO_PLAIN, long_ago, None).expect("writes");
        assert!(forbids(&start(dir.path(), &state, NO_PLAIN), FIRST));
        // A later version has put it into force, and what was before counts for nobody.
        state.take_policy("", unix_now(), None).expect("writes");
        state.take_policy("words = \"unknown\"", unix_now(), None).expect("writes");
        assert!(forbids(&start(dir.path(), &state, NO_PLAIN), FIRST));
    }
}
