//! Publishes rules and revocations, issues credentials, and tests rules.

use super::audit::Event;
use super::files::{place, placed};
use super::rows::{put, remove};
use super::{ISSUED, Issued, META, Manager, Published, STANDING, Standing, revoke_all, seed_of};
use crate::bundle::{BUNDLE_FILE, STATUS_FILE};
use crate::compile::{self, Compiled};
use crate::credential::{Grant, issue};
use crate::names::Names;
use crate::token::TokenKey;
use crate::{AccessError, Action, Attributes, Bundle, Claims, Credential, Decider, Result, Status, attribute};
use data_encoding::HEXLOWER;
use lamassu_crypto::{Secret, sign};
use std::collections::BTreeSet;
use std::path::Path;

impl Manager {
    /// Publishes changed rules and the current revocation list into a directory: `to`, or the last one used. Missing
    /// files are written again. If the directory has another bundle of this manager, the rules get a higher number,
    /// since a proxy may have taken that bundle.
    ///
    /// # Errors
    /// [`AccessError::Argument`]: no directory was ever given. Errors of files. [`AccessError::Rule`] or
    /// [`AccessError::Document`]: the rules cannot be published, and the present epoch has no published rules that
    /// could stay (see [`Published::unfit`]).
    pub fn publish(&self, to: Option<&Path>, now: u64) -> Result<Published> {
        let seed = seed_of(self.root()?);
        let to =
            to.map(Path::to_owned).map_or_else(|| self.standing().map(|standing| standing.to), |to| Ok(Some(to)))?;
        let to = to.ok_or_else(|| AccessError::Argument("it was never said where to publish: --to DIR".into()))?;
        let to = to.canonicalize().map_err(AccessError::file("look at", &to))?;
        let there = placed(&to, BUNDLE_FILE, Bundle::most());
        let is_behind = self.catch_up(&to, there.as_deref(), now)?;
        let mut standing = self.standing()?;
        let (is_new, unfit) = match self.renewed(&standing, there.as_deref(), now) {
            Ok(None) => (false, None),
            Ok(Some(new)) => {
                standing = new;
                (true, None)
            }
            // Revocations do not wait for rules, as long as the earlier rules may stay in force.
            Err(error) if standing.published_epoch == standing.epoch => (false, Some(error)),
            Err(error) => return Err(error),
        };
        let mut events = Vec::new();
        if is_new {
            let Standing { bundle, epoch, ref policies, .. } = standing;
            events.push(Event::Published { bundle, epoch, statements: policies.len() });
        }
        let issued = self.issued()?;
        standing.settled = standing.settle(issued.values().map(|one| one.ends).min(), now);
        standing.published = now;
        // A proxy that accepts this status knows by its own clock that the omitted ones have ended. They are kept:
        // if the clock here is ahead, it refuses this status, and needs them in a later one.
        let (is_listed, reached) = (|one: &Issued| one.is_revoked && one.is_taken(now), standing.reached(now));
        let over: Vec<&String> = issued.iter().filter(|(_, one)| one.is_over(reached)).map(|(id, _)| id).collect();
        standing.status = next_number(standing.status, now);
        standing.to = Some(to.clone());
        let revoked: BTreeSet<String> =
            issued.iter().filter(|(_, one)| is_listed(one)).map(|(id, _)| id.clone()).collect();
        let status = Status { seq: standing.status, bundle: standing.bundle, time: now, revoked };
        let signed = status.sign(&seed, &self.config.bucket)?;
        // The numbers are stored as used before the files can be seen.
        self.change(now, |write| {
            over.iter().try_for_each(|id| remove(write, ISSUED, id))?;
            put(write, META, STANDING, &standing).map(|()| events)
        })?;
        place(&to, BUNDLE_FILE, &standing.signed)?;
        place(&to, STATUS_FILE, &signed)?;
        let (bundle, status, revoked) = (standing.bundle, status.seq, status.revoked.len());
        Ok(Published { bundle, is_new, is_behind, unfit, status, revoked, to })
    }

    /// The present rules, signed under a new number, if they differ from the published ones or from the bundle `there`.
    /// `None` if not: a bundle that could not be placed keeps its number.
    fn renewed(&self, standing: &Standing, there: Option<&str>, now: u64) -> Result<Option<Standing>> {
        let compiled = self.compiled()?;
        let is_same = standing.compiled() == compiled && standing.published_epoch == standing.epoch;
        let public = sign::public(&seed_of(self.root()?));
        let is_other = |text: &str| *text != *standing.signed && Bundle::verify(&public, self.bucket(), text).is_ok();
        if is_same && !there.is_some_and(is_other) {
            return Ok(None);
        }
        let (seq, epoch, to) = (next_number(standing.bundle, now), standing.epoch, standing.to.clone());
        let signed = bundle_of(&compiled, (seq, epoch), now).sign(&seed_of(self.root()?), &self.config.bucket)?;
        let Compiled { policies, vocabulary, cuts } = compiled;
        Ok(Some(Standing {
            epoch,
            bundle: seq,
            policies,
            vocabulary,
            cuts,
            published_epoch: epoch,
            signed,
            to,
            ..*standing
        }))
    }

    /// Whether a directory has newer publications of this manager than its database knows. Then the database was
    /// restored from a backup and lacks credentials that were issued or revoked since. So a new epoch begins, and all
    /// numbers continue above those in the directory.
    fn catch_up(&self, to: &Path, bundle: Option<&str>, now: u64) -> Result<bool> {
        let (mut standing, public, bucket) =
            (self.standing()?, sign::public(&seed_of(self.root()?)), &self.config.bucket);
        let bundle = bundle.and_then(|text| Bundle::verify(&public, bucket, text).ok());
        let status = placed(to, STATUS_FILE, Status::most());
        let status = status.and_then(|text| Status::verify(&public, bucket, &text).ok());
        let (seq, epoch) = bundle.map_or((0, 0), |bundle| (bundle.seq, bundle.epoch));
        let status = status.map_or(0, |status| status.seq);
        if seq <= standing.bundle && status <= standing.status {
            return Ok(false);
        }
        (standing.bundle, standing.status) = (standing.bundle.max(seq), standing.status.max(status));
        standing.epoch = next_number(standing.epoch.max(epoch), now);
        let event = Event::Rotated { epoch: standing.epoch };
        self.change(now, |write| put(write, META, STANDING, &standing).map(|()| vec![event]))?;
        Ok(true)
    }

    /// Issues a credential for the published rules.
    ///
    /// # Errors
    /// [`AccessError::NotFound`], [`AccessError::Unpublished`], [`AccessError::Argument`].
    pub fn issue(&self, person: &str, seconds: u64, now: u64) -> Result<Credential> {
        let (root, standing) = (self.root()?, self.standing()?);
        let people = self.people()?;
        let attributes = people.get(person);
        let attributes = attributes.ok_or_else(|| AccessError::NotFound { what: "person", name: person.into() })?;
        if standing.published_epoch == 0 || standing.published_epoch != standing.epoch {
            return Err(AccessError::Unpublished);
        }
        let proxy = HEXLOWER.decode(self.config.proxy.as_bytes()).ok().and_then(|key| key.try_into().ok());
        let proxy: [u8; 32] =
            proxy.ok_or_else(|| AccessError::Damaged { path: self.path.clone(), what: "the proxy's key" })?;
        let seed = seed_of(root);
        let credential = issue(
            &seed,
            &self.config.bucket,
            &proxy,
            self.grant(root, &standing, (person, attributes), now, seconds)?,
        )?;
        let kept = Issued { person: person.into(), ends: credential.ends, is_revoked: false };
        let id = credential.access_key.clone();
        let event = Event::Issued { person: person.into(), credential: id.clone(), ends: credential.ends };
        // The credential is recorded before it is handed out.
        self.change(now, |write| put(write, ISSUED, &id, &kept).map(|()| vec![event]))?;
        Ok(credential)
    }

    fn grant(
        &self,
        root: &Secret<32>,
        standing: &Standing,
        (person, attributes): (&str, &Attributes),
        now: u64,
        seconds: u64,
    ) -> Result<Grant> {
        let key = TokenKey::of(root, standing.epoch);
        let all = key.of_attributes(&self.attributes()?, attributes, &standing.cuts);
        let token = key.person(person);
        Ok(Grant {
            person: standing.vocabulary.contains(&token).then_some(token),
            tokens: all.intersection(&standing.vocabulary).cloned().collect(),
            epoch: standing.epoch,
            vocabulary: standing.compiled().vocabulary_digest(),
            now,
            seconds,
        })
    }

    /// Revokes a credential by its number, or all credentials of a person. Returns the numbers of those that have time
    /// left. The next publication tells the proxy.
    ///
    /// # Errors
    /// [`AccessError::NotFound`].
    pub fn revoke(&self, what: &str, now: u64) -> Result<Vec<String>> {
        let found = self.to_revoke(|id, one| id == what || one.person == what)?;
        if found.is_empty() {
            let missing = "unrevoked credential of a person, or with a number,";
            return Err(AccessError::NotFound { what: missing, name: what.into() });
        }
        self.change(now, |write| revoke_all(write, &found))?;
        self.with_time_left(found, now)
    }

    /// Begins an epoch: tokens change, and all earlier credentials become invalid. The epoch is in force once it is
    /// published. Its number is new, also in a database that was restored from a backup, because tokens are derived
    /// from it.
    ///
    /// # Errors
    /// Those of the database.
    pub fn rotate(&self, now: u64) -> Result<u64> {
        let mut standing = self.standing()?;
        standing.epoch = next_number(standing.epoch, now);
        let epoch = standing.epoch;
        self.change(now, |write| put(write, META, STANDING, &standing).map(|()| vec![Event::Rotated { epoch }]))?;
        Ok(epoch)
    }

    /// Seals a plain key to the key that is stored at the provider.
    ///
    /// # Errors
    /// [`AccessError::Key`].
    pub fn seal_key(&self, plain: &str) -> Result<String> {
        Names::of(self.root()?).seal(plain)
    }

    /// Opens a stored key.
    ///
    /// # Errors
    /// [`AccessError::Key`].
    pub fn open_key(&self, sealed: &str) -> Result<String> {
        Names::of(self.root()?).open(sealed)
    }

    /// Decides by the present rules, published or not: first over plain attributes, then as the proxy would over
    /// tokens.
    ///
    /// # Errors
    /// [`AccessError::NotFound`], [`AccessError::Rule`], [`AccessError::Key`].
    pub fn test(&self, person: &str, action: Action, key: &str) -> Result<(bool, bool)> {
        let (root, declared, people) = (self.root()?, self.attributes()?, self.people()?);
        let attributes =
            people.get(person).ok_or_else(|| AccessError::NotFound { what: "person", name: person.into() })?;
        let (plain, compiled, stored) =
            (compile::plain(&self.rules()?, &declared)?, self.compiled()?, self.seal_key(key)?);
        let in_the_clear = attribute::decide(&plain, &declared, (person, attributes), action, (key, &stored))?;
        let standing = Standing {
            policies: compiled.policies.clone(),
            vocabulary: compiled.vocabulary.clone(),
            cuts: compiled.cuts.clone(),
            ..self.standing()?
        };
        let grant = self.grant(root, &standing, (person, attributes), 0, 1)?;
        let claims = Claims {
            id: String::new(),
            sub: grant.person.unwrap_or_default(),
            tokens: grant.tokens,
            epoch: grant.epoch,
            vocabulary: grant.vocabulary,
            begins: 0,
            ends: 0,
            told: String::new(),
        };
        let vocabulary = claims.vocabulary.clone();
        let bundle = Bundle { seq: 0, epoch: claims.epoch, vocabulary, time: 0, policies: compiled.policies };
        let path = stored.strip_suffix('/').unwrap_or(&stored);
        Ok((in_the_clear, Decider::of(bundle)?.allows(&claims, action, path)))
    }
}

/// Makes the bundle that is published for compiled rules.
pub(super) fn bundle_of(compiled: &Compiled, (seq, epoch): (u64, u64), time: u64) -> Bundle {
    Bundle { seq, epoch, vocabulary: compiled.vocabulary_digest(), time, policies: compiled.policies.clone() }
}

/// Numbers follow the clock. So a database that was restored from a backup continues above the numbers already used.
fn next_number(last: u64, now: u64) -> u64 {
    (last + 1).max(now)
}

#[cfg(test)]
mod tests {
    use super::super::RULES;
    use super::*;
    use crate::{AttributeKind, Value, kem};
    use lamassu_keys::{Ask, KeySource, Purpose};
    use std::fs;

    const RULE: &str = "permit(principal, action, resource) when { principal has dept && principal.dept == \"law\" };";

    /// Stands for rules that an earlier version accepted and this one does not.
    #[test]
    fn revocations_are_published_whatever_the_rules_are() {
        let dir = tempfile::tempdir().expect("a directory");
        let (key, out) = (dir.path().join("key"), dir.path().join("out"));
        fs::write(&key, [1; 32]).expect("writes");
        fs::create_dir(&out).expect("a directory");
        let source: KeySource = format!("raw:file:{}", key.display()).parse().expect("a source");
        let ask = Ask { subject: "a test", purpose: Purpose::Create, stdin: false };
        let material = source.load(&ask).expect("loads").material;
        let proxy = kem::public(&Secret::new(&mut [8; 32]));
        let manager = Manager::init(&dir.path().join("policy"), "acme", &proxy, &material, 100).expect("makes");
        manager.set_attribute("dept", AttributeKind::Text, 100).expect("declares");
        let law = [("dept".to_owned(), Value::Text("law".into()))].into();
        manager.set_person("alice", &law, 100).expect("sets");
        manager.set_rule("law", RULE, 100).expect("writes");
        let first = manager.publish(Some(&out), 100).expect("publishes");
        let issued = manager.issue("alice", 600, 100).expect("issues");
        manager.change(110, |write| put(write, RULES, "old", &"permit(").map(|()| Vec::new())).expect("writes");
        manager.revoke("alice", 110).expect("revokes");
        let done = manager.publish(None, 110).expect("publishes");
        assert!(!done.is_new && done.bundle == first.bundle && done.status > first.status);
        assert!(matches!(done.unfit, Some(AccessError::Rule { ref rule, .. }) if rule == "old"));
        let text = fs::read_to_string(out.join(STATUS_FILE)).expect("reads");
        let public = sign::public(&seed_of(manager.root().expect("it is open")));
        let status = Status::verify(&public, "acme", &text).expect("verifies");
        assert!(status.bundle == first.bundle && status.revoked.contains(&issued.access_key));
        // An ended epoch must not continue only because the next one has no valid rules.
        manager.rotate(120).expect("rotates");
        assert!(matches!(manager.publish(None, 120), Err(AccessError::Rule { .. })));
        manager.remove_rule("old", 130).expect("removes");
        let done = manager.publish(None, 130).expect("publishes");
        assert!(done.is_new && done.unfit.is_none());
    }
}
