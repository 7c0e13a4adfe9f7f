//! The tenant's policy manager. One redb file holds people, attributes, rules, publications and issued credentials;
//! each change is one transaction with its entry in the audit trail.
//!
//! All keys are derived from one root key. It is stored wrapped, in the form of a zone file (docs/format.md, section
//! 4), which a key of any source opens. People and rules are not encrypted: the directory is the tenant's own, mode
//! 0700.
//!
//! Never: stores an unwrapped key; keeps a secret access key.

pub mod audit;
mod files;
mod publish;
mod rows;

use crate::attribute;
use crate::compile::{self, Compiled, Rules};
use crate::credential::{SECONDS_MAX, SKEW};
use crate::names::Names;
use crate::token::{Cuts, TokenKey};
use crate::{AccessError, AttributeKind, Attributes, Declarations, Result};
use audit::{AuditEntry, Event};
use data_encoding::HEXLOWER;
use files::{check_private, sync_dir};
use lamassu_crypto::{Secret, sign, wrap};
use lamassu_format::Suite;
use lamassu_format::header::{Header, ZoneFile};
use lamassu_keys::{KeyError, Material, NewSlot, NewZone, SlotKind, Unlocked, cost, create_zone, unlock};
use redb::backends::FileBackend;
use redb::{Database, ReadableDatabase, TableDefinition, WriteTransaction};
use rows::{all, get, put, remove};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Name of the database in the manager's directory.
pub const FILE: &str = "policy.redb";
/// How long to wait for another command to close the database.
const FREE_WITHIN: Duration = Duration::from_secs(10);
const AGAIN_AFTER: Duration = Duration::from_millis(20);
/// How long a credential is kept after its end, by the settled clock ([`Standing::settled`]).
const KEPT: u64 = SECONDS_MAX;
/// Most seconds by which one publication moves the settled clock.
const STEP_MAX: u64 = 2 * 3600;
/// Longest name of a person or a rule, in bytes.
const NAME_MAX: usize = 128;
/// Longest text of a rule, in bytes.
const RULE_MAX: usize = 64 << 10;

type Texts = TableDefinition<'static, &'static str, &'static [u8]>;
/// One row for [`Config`] and one for [`Standing`], JSON.
const META: Texts = TableDefinition::new("meta");
/// By name: an [`AttributeKind`], JSON.
const ATTRIBUTES: Texts = TableDefinition::new("attributes");
/// By name: [`Attributes`], JSON.
const PEOPLE: Texts = TableDefinition::new("people");
/// By name: a text, JSON.
const RULES: Texts = TableDefinition::new("rules");
/// By number: an [`Issued`], JSON.
const ISSUED: Texts = TableDefinition::new("issued");
const CONFIG: &str = "config";
const STANDING: &str = "standing";

/// Settings that never change.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Config {
    /// the tenant's bucket at the provider
    bucket: String,
    /// public key of the proxy, hex
    proxy: String,
    /// this manager's public key, hex
    public: String,
    /// the zone file that holds the root key
    zone: String,
}

/// The published state and the next numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Standing {
    epoch: u64,
    bundle: u64,
    status: u64,
    policies: Vec<Json>,
    vocabulary: BTreeSet<String>,
    cuts: Cuts,
    /// the epoch of `policies`; 0: nothing was published
    published_epoch: u64,
    /// the signed bundle
    signed: String,
    /// directory of the last publication
    to: Option<PathBuf>,
    /// the system's time at the last publication
    #[serde(default)]
    published: u64,
    /// A clock that follows the system's at no more than twice its speed, and by [`STEP_MAX`] when that jumps; 0: not
    /// set yet. So credentials are not forgotten because of a clock that was ahead, for hours, and was then corrected.
    #[serde(default)]
    settled: u64,
}

impl Standing {
    /// The settled clock at a publication. `first`: the earliest end of a kept credential, which a database that has no
    /// such clock yet starts from.
    fn settle(&self, first: Option<u64>, now: u64) -> u64 {
        match first {
            // There is nothing to forget.
            None => now,
            Some(first) if self.settled == 0 => now.min(first),
            Some(_) => {
                let most = now.abs_diff(self.published).saturating_mul(2).min(STEP_MAX);
                now.clamp(self.settled.saturating_sub(most), self.settled.saturating_add(most))
            }
        }
    }

    /// A time that was reached, whatever the system's clock says now.
    fn reached(&self, now: u64) -> u64 {
        if self.settled == 0 { now } else { now.min(self.settled) }
    }

    fn compiled(&self) -> Compiled {
        Compiled { policies: self.policies.clone(), vocabulary: self.vocabulary.clone(), cuts: self.cuts.clone() }
    }
}

/// An issued credential.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Issued {
    /// the holder's name
    pub person: String,
    /// end of validity, seconds since 1970
    pub ends: u64,
    /// whether it was revoked
    pub is_revoked: bool,
}

impl Issued {
    /// Whether a proxy may accept it that accepts a status of the time `now`. Clocks may differ by [`SKEW`], so this
    /// lasts longer than the credential.
    fn is_taken(&self, now: u64) -> bool {
        self.ends.saturating_add(SKEW) > now
    }

    /// Whether it can be forgotten at a time that was reached.
    fn is_over(&self, reached: u64) -> bool {
        !self.is_taken(reached.saturating_sub(KEPT))
    }
}

/// The outcome of a publication.
#[derive(Debug)]
pub struct Published {
    /// the bundle's number
    pub bundle: u64,
    /// whether this bundle is new
    pub is_new: bool,
    /// whether the directory had newer publications than the database knew, so that a new epoch began
    pub is_behind: bool,
    /// the reason why the present rules cannot be published; then the earlier ones stay in force
    pub unfit: Option<AccessError>,
    /// the status's number
    pub status: u64,
    /// number of credentials that it revokes
    pub revoked: usize,
    /// the directory that it was written to
    pub to: PathBuf,
}

/// An open policy manager.
pub struct Manager {
    path: PathBuf,
    database: Database,
    config: Config,
    root: Option<Secret<32>>,
}

/// The keys of a manager, apart from its database.
pub struct Keys(Secret<32>);

fn zone_error(error: KeyError) -> AccessError {
    error.into()
}

fn root_of(keys: &Unlocked) -> Result<Secret<32>> {
    let newest = keys.keychain().inner().last().ok_or(KeyError::KeychainInvalid)?;
    Ok(wrap::hkdf(newest.key().expose(), b"", b"lamassu v1 access root"))
}

fn seed_of(root: &Secret<32>) -> Secret<32> {
    wrap::hkdf(root.expose(), b"", b"lamassu v1 access sign")
}

fn check_label(what: &str, name: &str) -> Result<()> {
    let is_good = !name.is_empty() && name.len() <= NAME_MAX && !name.chars().any(char::is_control);
    match is_good {
        true => Ok(()),
        false => Err(AccessError::Argument(format!(
            "the name of a {what} has 1 to {NAME_MAX} bytes, none a control character"
        ))),
    }
}

/// Whether a text can be a bucket's name in S3.
pub fn is_bucket(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (3..=63).contains(&name.len()) && name.bytes().all(inner) && !name.starts_with('-') && !name.ends_with('-')
}

impl Manager {
    /// Creates a manager in a new directory.
    ///
    /// # Errors
    /// [`AccessError::Argument`], [`AccessError::NotEmpty`], [`AccessError::MasterKey`], errors of files.
    pub fn init(dir: &Path, bucket: &str, proxy: &[u8; 32], material: &Material, now: u64) -> Result<Manager> {
        if !is_bucket(bucket) {
            return Err(AccessError::Argument(format!(
                "{bucket:?} is no name of a bucket: 3 to 63 small letters, digits and hyphens"
            )));
        }
        let cost = match material.kind() {
            SlotKind::Passphrase => cost::measure(cost::TARGET),
            _ => cost::FALLBACK,
        };
        let slot = NewSlot { material, cost, label: "policy manager", created: now };
        // Only K_in of the zone is used.
        let new = NewZone { suite: Suite::Aes, block_size: 4096, compression: None, outer: false, created: now };
        let (file, keys) = create_zone(&new, &slot).map_err(zone_error)?;
        let zone = String::from_utf8_lossy(&file.to_json().map_err(|error| zone_error(error.into()))?).into_owned();
        let root = root_of(&keys)?;
        let config = Config {
            bucket: bucket.into(),
            proxy: HEXLOWER.encode(proxy),
            public: HEXLOWER.encode(&sign::public(&seed_of(&root))),
            zone,
        };
        match fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                let mut entries = fs::read_dir(dir).map_err(AccessError::file("list", dir))?;
                if entries.next().is_some() {
                    return Err(AccessError::NotEmpty(dir.into()));
                }
                check_private(dir)?;
            }
            made => made.map_err(AccessError::file("make", dir))?,
        }
        let path = dir.join(FILE);
        let file = fs::File::options().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(AccessError::file("make", &path))?;
        let failed = |error: redb::Error| AccessError::Database { path: path.clone(), source: Box::new(error) };
        let database = FileBackend::new(file).and_then(|file| Database::builder().create_with_backend(file));
        let database = database.map_err(|error| failed(error.into()))?;
        let manager = Manager { path: path.clone(), database, config: config.clone(), root: Some(root) };
        manager.change(now, |write| {
            for table in [ATTRIBUTES, PEOPLE, RULES, ISSUED] {
                write.open_table(table)?;
            }
            put(write, META, CONFIG, &config)?;
            put(write, META, STANDING, &Standing { epoch: 1, ..Standing::default() })?;
            Ok(vec![Event::Made { bucket: bucket.into() }])
        })?;
        sync_dir(dir)?;
        Ok(manager)
    }

    /// Opens a manager without its keys, which most calls do not need.
    ///
    /// # Errors
    /// [`AccessError::Missing`], [`AccessError::NotPrivate`], [`AccessError::Locked`], [`AccessError::Damaged`].
    pub fn open(dir: &Path) -> Result<Manager> {
        let path = dir.join(FILE);
        if !path.is_file() {
            return Err(AccessError::Missing(dir.into()));
        }
        check_private(dir)?;
        let until = Instant::now() + FREE_WITHIN;
        let database = loop {
            match Database::open(&path) {
                Ok(database) => break database,
                Err(redb::DatabaseError::DatabaseAlreadyOpen) if Instant::now() < until => {
                    std::thread::sleep(AGAIN_AFTER);
                }
                Err(redb::DatabaseError::DatabaseAlreadyOpen) => return Err(AccessError::Locked(dir.into())),
                Err(error) => return Err(AccessError::Database { path, source: Box::new(error.into()) }),
            }
        };
        let failed = |error: redb::Error| AccessError::Database { path: path.clone(), source: Box::new(error) };
        let config = get::<Config>(&database, META, CONFIG).map_err(failed)?;
        let config = config.ok_or(AccessError::Damaged { path: path.clone(), what: "its configuration is missing" })?;
        Ok(Manager { path, database, config, root: None })
    }

    /// Loads the manager's keys.
    ///
    /// # Errors
    /// [`AccessError::MasterKey`].
    pub fn unlock(&mut self, material: &Material) -> Result<()> {
        let file = ZoneFile::parse(self.config.zone.as_bytes()).map_err(|error| zone_error(error.into()))?;
        self.root = Some(root_of(&unlock(&file, material).map_err(zone_error)?)?);
        Ok(())
    }

    /// Closes the database, so that other commands can use it. Returns the loaded keys.
    ///
    /// # Errors
    /// [`AccessError::Argument`]: no keys are loaded.
    pub fn close(self) -> Result<Keys> {
        self.root().map(|root| Keys(root.duplicate()))
    }

    /// Opens a manager with keys that are already loaded.
    ///
    /// # Errors
    /// As [`Manager::open`].
    pub fn open_with(dir: &Path, keys: &Keys) -> Result<Manager> {
        let mut manager = Manager::open(dir)?;
        manager.root = Some(keys.0.duplicate());
        Ok(manager)
    }

    fn root(&self) -> Result<&Secret<32>> {
        self.root.as_ref().ok_or_else(|| AccessError::Argument("the manager's key is not loaded".into()))
    }

    /// The public key, hex, that verifies this manager's signatures. It belongs in the provider's configuration.
    pub fn public(&self) -> &str {
        &self.config.public
    }

    /// The tenant's bucket.
    pub fn bucket(&self) -> &str {
        &self.config.bucket
    }

    fn failed(&self) -> impl Fn(redb::Error) -> AccessError + '_ {
        |error| match error {
            redb::Error::Corrupted(_) => {
                AccessError::Damaged { path: self.path.clone(), what: "a row is not what it was" }
            }
            error => AccessError::Database { path: self.path.clone(), source: Box::new(error) },
        }
    }

    /// Makes changes in one durable transaction, together with the audit entries that `body` returns.
    fn change(
        &self,
        now: u64,
        body: impl FnOnce(&WriteTransaction) -> Result<Vec<Event>, redb::Error>,
    ) -> Result<Vec<Event>> {
        let changed = || {
            let write = self.database.begin_write()?;
            let events = body(&write)?;
            {
                let mut entries = write.open_table(audit::ENTRIES)?;
                for event in &events {
                    audit::append(&mut entries, now, event.clone())?;
                }
            }
            write.commit()?;
            Ok(events)
        };
        changed().map_err(self.failed())
    }

    fn all<T: DeserializeOwned>(&self, table: Texts) -> Result<BTreeMap<String, T>> {
        all(&self.database, table).map_err(self.failed())
    }

    fn standing(&self) -> Result<Standing> {
        let standing = get(&self.database, META, STANDING).map_err(self.failed())?;
        standing.ok_or_else(|| AccessError::Damaged { path: self.path.clone(), what: "its state is missing" })
    }

    /// The published state: the present epoch, the bundle's number, and the directory of the last publication.
    ///
    /// # Errors
    /// Those of the database.
    pub fn in_force(&self) -> Result<(u64, u64, Option<PathBuf>)> {
        let standing = self.standing()?;
        Ok((standing.epoch, standing.bundle, standing.to))
    }

    /// The public key of the proxy that credentials are for, hex.
    pub fn proxy(&self) -> &str {
        &self.config.proxy
    }

    /// The declared attributes.
    ///
    /// # Errors
    /// Errors of the database; the same holds for the methods that follow.
    pub fn attributes(&self) -> Result<Declarations> {
        self.all(ATTRIBUTES)
    }

    /// People, with their attributes.
    ///
    /// # Errors
    /// See [`Manager::attributes`].
    pub fn people(&self) -> Result<BTreeMap<String, Attributes>> {
        self.all(PEOPLE)
    }

    /// Rules by name.
    ///
    /// # Errors
    /// See [`Manager::attributes`].
    pub fn rules(&self) -> Result<Rules> {
        self.all(RULES)
    }

    /// Issued credentials by number. They are kept for a day and a half after their end, or longer.
    ///
    /// # Errors
    /// See [`Manager::attributes`].
    pub fn issued(&self) -> Result<BTreeMap<String, Issued>> {
        self.all(ISSUED)
    }

    /// The audit trail, verified, each entry with its head.
    ///
    /// # Errors
    /// [`AccessError::Chain`].
    pub fn audit(&self) -> Result<Vec<(AuditEntry, String)>> {
        let read = || audit::verified(&self.database.begin_read()?.open_table(audit::ENTRIES)?);
        read().map_err(self.failed())?
    }

    /// Declares an attribute. An attribute in use keeps its kind.
    ///
    /// # Errors
    /// [`AccessError::Name`], [`AccessError::InUse`].
    pub fn set_attribute(&self, name: &str, kind: AttributeKind, now: u64) -> Result<()> {
        attribute::check_name(name)?;
        let declared = self.attributes()?;
        if declared.get(name).is_some_and(|before| *before != kind) {
            self.check_unused(name, &declared)?;
        }
        let event = Event::AttributeSet { name: name.into(), kind: kind.name().into() };
        self.change(now, |write| put(write, ATTRIBUTES, name, &kind).map(|()| vec![event])).map(drop)
    }

    /// Removes the declaration of an attribute.
    ///
    /// # Errors
    /// [`AccessError::NotDeclared`], [`AccessError::InUse`].
    pub fn remove_attribute(&self, name: &str, now: u64) -> Result<()> {
        let declared = self.attributes()?;
        if !declared.contains_key(name) {
            return Err(AccessError::NotDeclared(name.into()));
        }
        self.check_unused(name, &declared)?;
        let event = Event::AttributeRemoved { name: name.into() };
        self.change(now, |write| remove(write, ATTRIBUTES, name).map(|()| vec![event])).map(drop)
    }

    fn check_unused(&self, name: &str, declared: &Declarations) -> Result<()> {
        let used = |by: String| Err(AccessError::InUse { name: name.into(), by });
        if let Some((person, _)) = self.people()?.iter().find(|(_, attributes)| attributes.contains_key(name)) {
            return used(format!("the person {person:?}"));
        }
        let mut without = declared.clone();
        without.remove(name);
        let rules = self.rules()?;
        match rules.iter().find(|(rule, text)| check_rule(rule, text, &without).is_err()) {
            Some((rule, _)) => used(format!("the rule {rule:?}")),
            None => Ok(()),
        }
    }

    /// Replaces all attributes of a person. If they change, the next publication revokes the person's credentials.
    /// Returns the numbers of those that have time left.
    ///
    /// # Errors
    /// [`AccessError::Argument`].
    pub fn set_person(&self, name: &str, attributes: &Attributes, now: u64) -> Result<Vec<String>> {
        check_label("person", name)?;
        if self.people()?.get(name).is_some_and(|before| before == attributes) {
            return Ok(Vec::new());
        }
        let revoked = self.to_revoke(|_, one| one.person == name)?;
        let text = serde_json::to_string(attributes).unwrap_or_default();
        let event = Event::PersonSet { person: name.into(), attributes: text };
        self.change(now, |write| {
            put(write, PEOPLE, name, attributes)?;
            revoke_all(write, &revoked).map(|events| [vec![event], events].concat())
        })?;
        self.with_time_left(revoked, now)
    }

    /// Removes a person. The next publication revokes the person's credentials. Returns the numbers of those that have
    /// time left.
    ///
    /// # Errors
    /// [`AccessError::NotFound`].
    pub fn remove_person(&self, name: &str, now: u64) -> Result<Vec<String>> {
        if !self.people()?.contains_key(name) {
            return Err(AccessError::NotFound { what: "person", name: name.into() });
        }
        let revoked = self.to_revoke(|_, one| one.person == name)?;
        self.change(now, |write| {
            remove(write, PEOPLE, name)?;
            let events = revoke_all(write, &revoked)?;
            Ok([vec![Event::PersonRemoved { person: name.into() }], events].concat())
        })?;
        self.with_time_left(revoked, now)
    }

    /// Credentials that a revocation concerns: also those that have ended, since the clock here may be ahead.
    fn to_revoke(&self, is_meant: impl Fn(&str, &Issued) -> bool) -> Result<BTreeMap<String, Issued>> {
        let mut issued = self.issued()?;
        issued.retain(|id, one| !one.is_revoked && is_meant(id, one));
        Ok(issued)
    }

    fn with_time_left(&self, revoked: BTreeMap<String, Issued>, now: u64) -> Result<Vec<String>> {
        let reached = self.standing()?.reached(now);
        Ok(revoked.into_iter().filter(|(_, one)| one.is_taken(reached)).map(|(id, _)| id).collect())
    }

    /// Writes a rule, provided that all rules together can then be published. The next publication puts it in force.
    ///
    /// # Errors
    /// [`AccessError::Rule`], [`AccessError::Argument`]; [`AccessError::Key`].
    pub fn set_rule(&self, name: &str, text: &str, now: u64) -> Result<()> {
        check_label("rule", name)?;
        if text.len() > RULE_MAX {
            return Err(AccessError::Argument(format!("a rule has {RULE_MAX} bytes at most")));
        }
        let (declared, mut rules) = (self.attributes()?, self.rules()?);
        rules.insert(name.into(), text.into());
        // Its own faults first.
        check_rule(name, text, &declared)?;
        check_all(name, (&rules, &declared), &self.config.bucket)?;
        let event = Event::RuleSet { rule: name.into(), text: text.into() };
        self.change(now, |write| put(write, RULES, name, &text).map(|()| vec![event])).map(drop)
    }

    /// Removes a rule. It stays in force until the next publication.
    ///
    /// # Errors
    /// [`AccessError::NotFound`].
    pub fn remove_rule(&self, name: &str, now: u64) -> Result<()> {
        if !self.rules()?.contains_key(name) {
            return Err(AccessError::NotFound { what: "rule", name: name.into() });
        }
        let event = Event::RuleRemoved { rule: name.into() };
        self.change(now, |write| remove(write, RULES, name).map(|()| vec![event])).map(drop)
    }

    /// The present rules, compiled for the present epoch.
    ///
    /// # Errors
    /// [`AccessError::Rule`].
    pub fn compiled(&self) -> Result<Compiled> {
        let (root, standing) = (self.root()?, self.standing()?);
        let (tokens, names) = (TokenKey::of(root, standing.epoch), Names::of(root));
        compile::compile(&self.rules()?, &self.attributes()?, &tokens, &names)
    }
}

/// Checks that a rule compiles. The result does not depend on keys.
fn check_rule(name: &str, text: &str, declared: &Declarations) -> Result<()> {
    let any = Secret::filled_by(|_| {});
    let rules = [(name.to_owned(), text.to_owned())].into();
    compile::compile(&rules, declared, &TokenKey::of(&any, 0), &Names::of(&any)).map(drop)
}

/// Checks that all rules can be published together. The result does not depend on keys, since all tokens have one
/// length.
fn check_all(name: &str, (rules, declared): (&Rules, &Declarations), bucket: &str) -> Result<()> {
    let any = Secret::new(&mut [1; 32]);
    let compiled = compile::compile(rules, declared, &TokenKey::of(&any, 0), &Names::of(&any));
    let compiled = compiled.map_err(|error| match error {
        AccessError::Rule { rule, detail } if rule != name => {
            let detail = format!("remove this one first, which was taken before and is not valid now: {detail}");
            AccessError::Rule { rule, detail }
        }
        error => error,
    })?;
    let bundle = publish::bundle_of(&compiled, (u64::MAX, u64::MAX), u64::MAX);
    let too_much = |error| AccessError::Rule { rule: name.into(), detail: format!("with it, of all rules: {error}") };
    bundle.sign(&any, bucket).map(drop).map_err(too_much)
}

fn revoke_all(write: &WriteTransaction, found: &BTreeMap<String, Issued>) -> Result<Vec<Event>, redb::Error> {
    let mut events = Vec::new();
    for (id, one) in found {
        put(write, ISSUED, id, &Issued { is_revoked: true, ..one.clone() })?;
        events.push(Event::Revoked { person: one.person.clone(), credential: id.clone() });
    }
    Ok(events)
}
