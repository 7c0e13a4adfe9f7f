//! The durable state: hosts, tokens, leases of vaults, alerts, keys, the policy, and the audit log. Each change is one
//! durable transaction, together with its entries in the audit log. The state is one redb file, or rows elsewhere
//! ([`Upstream`]) of which this process has a copy in memory.

mod alerts;
pub mod bell;
mod file;
mod keys;
pub mod leases;
mod places;
mod policy;
mod restored;
mod rights;

pub use self::alerts::{ALERTS_AT_ONCE, AlertCounts};
pub use self::keys::{KeptKey, Key, KeyRefusal, Use};
pub use self::places::Misplaced;
use self::places::Places;
pub use self::policy::Taken;
pub use self::restored::Copied;
use self::restored::Restored;
use crate::audit::{self, ChainEnd, Event};
use crate::reserve::is_damage;
use crate::writing::{AnyTable, Fill, Filling, RowChange, Writing};
use crate::{Result, ServerError};
use bell::Bell;
use data_encoding::HEXLOWER;
use lamassu_format::header::VaultId;
use lamassu_keys::unix_now;
use parking_lot::{Mutex, RwLock};
use redb::backends::InMemoryBackend;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// File name in the server's directory.
pub const FILE: &str = "state.redb";
/// How long to wait for another process that has it open.
pub(crate) const FREE_WITHIN: Duration = Duration::from_secs(3);
pub(crate) const AGAIN_AFTER: Duration = Duration::from_millis(20);
/// Entries of the audit log that are read at a time.
const ENTRIES_AT_ONCE: usize = 1000;

/// A table with bytes as key and value.
type Bytes = TableDefinition<'static, &'static [u8], &'static [u8]>;
/// By name: a [`Host`], JSON.
const HOSTS: TableDefinition<'static, &'static str, &'static [u8]> = TableDefinition::new("hosts");
/// By public key: a [`Pending`], JSON.
const TOKENS: Bytes = TableDefinition::new("tokens");
/// By vault, kind and number: see [`lease_key`].
const LEASES: Bytes = TableDefinition::new("leases");
/// Numbers by name, such as [`RUNS_BEFORE`].
const NUMBERS: TableDefinition<'static, &'static str, u64> = TableDefinition::new("numbers");
/// An upper bound of the number of starts on any vault before this state was made as a backup.
const RUNS_BEFORE: &str = "runs before";
/// By vault that was restored from a backup: the hosts that may have newer rows, JSON.
const RESTORED: Bytes = TableDefinition::new("restored");

/// A host that has joined.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Host {
    /// its public key, a subject public key info, hex
    pub key: String,
    /// time of joining, seconds since 1970
    pub joined: u64,
    /// whether it was revoked
    pub is_revoked: bool,
    /// vaults that it may use, hex
    pub vaults: BTreeSet<String>,
    /// names of keys that it has grants for
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub keys: BTreeSet<String>,
}

/// A token that has not been used.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pending {
    /// the host that it is for
    pub host: String,
    /// end of validity, seconds since 1970
    pub until: u64,
    /// vaults that the host may use, hex
    pub vaults: BTreeSet<String>,
}

/// The owner of a public key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Who {
    /// A host that has joined.
    Host {
        /// its name
        name: String,
        /// whether it was revoked
        is_revoked: bool,
    },
    /// A token, with which a host may join.
    Token,
}

/// The reason why a host cannot join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotJoined {
    /// The token was used, or has expired, or a host of its name has joined.
    NoToken,
    /// The key is that of another host, or of a token.
    KnownKey,
}

/// The state's own tables; those of [`alerts`], [`keys`] and [`policy`] come in addition.
const TABLES: [&dyn AnyTable; 7] = [&HOSTS, &TOKENS, &LEASES, &RESTORED, &NUMBERS, &audit::ENTRIES, &audit::REMOVED];

fn tables() -> impl Iterator<Item = &'static dyn AnyTable> {
    TABLES.into_iter().chain(alerts::TABLES).chain(keys::TABLES).chain(policy::TABLES)
}

/// Where changes are made durable before they are applied here.
pub trait Upstream: Send + Sync {
    /// Makes all changes durable, in full.
    ///
    /// # Errors
    /// The changes may have been made despite an error. Then nothing more is committed: the process must end.
    fn commit(&self, changes: &[RowChange]) -> Result<()>;
}

/// Hosts by name.
type Hosts = BTreeMap<String, Host>;

/// Unused tokens by public key.
type Tokens = BTreeMap<Vec<u8>, Pending>;

/// The open state. Hosts and tokens are also in memory, so that a caller is looked up without waiting for a disk or a
/// verification: anyone may cause lookups before a handshake has ended, on a thread that serves all.
pub struct State {
    path: PathBuf,
    /// `None`: the file itself is durable.
    upstream: Option<Arc<dyn Upstream>>,
    /// Locked for writing while its checksums are verified.
    database: RwLock<Database>,
    hosts: RwLock<Arc<Hosts>>,
    tokens: RwLock<Tokens>,
    /// Held while hosts or tokens are changed.
    changing: Mutex<()>,
    /// Signals that hosts have changed.
    changed: watch::Sender<()>,
    /// A copy in memory: by vault, the hosts that have not reported yet.
    restored: RwLock<Restored>,
    /// A copy in memory: where datasets lie.
    places: RwLock<Places>,
    audit_kept: RwLock<audit::Kept>,
    /// Signals a new alert.
    pub alerted: Bell,
    /// Whether its disk has failed: the state cannot be used any more, and its server has to end.
    pub unusable: watch::Sender<bool>,
}

impl State {
    /// A copy in memory of a state that is durable elsewhere. `fill` puts its rows, one by one: there may be a million.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`]; those of `fill`.
    pub fn copy_of(name: PathBuf, upstream: Arc<dyn Upstream>, fill: Fill<'_>) -> Result<State> {
        let made = Database::builder().create_with_backend(InMemoryBackend::new());
        let database =
            made.map_err(|error| ServerError::Database { path: name.clone(), source: Box::new(error.into()) })?;
        State::of(name, database, Some(upstream), fill)
    }

    fn of(path: PathBuf, database: Database, upstream: Option<Arc<dyn Upstream>>, fill: Fill<'_>) -> Result<State> {
        let state = State {
            path,
            upstream,
            database: RwLock::new(database),
            hosts: RwLock::default(),
            tokens: RwLock::default(),
            changing: Mutex::new(()),
            changed: watch::Sender::new(()),
            restored: RwLock::default(),
            places: RwLock::default(),
            audit_kept: RwLock::new(audit::Kept::ALL),
            alerted: Bell::default(),
            unusable: watch::Sender::new(false),
        };
        state.fill_tables(fill)?;
        let (hosts, restored) = (state.read_hosts()?, state.read_restored()?);
        *state.hosts.write() = Arc::new(hosts);
        *state.tokens.write() = state.read_tokens()?;
        *state.restored.write() = restored;
        *state.places.write() = Places::of(state.read_lies_in()?);
        state.fill_queues()?;
        Ok(state)
    }

    /// Makes the tables that are missing, and puts rows into them.
    fn fill_tables(&self, fill: Fill<'_>) -> Result<()> {
        let database = self.database.read();
        let write = database.begin_write().map_err(|e| self.failed(e))?;
        for table in tables() {
            table.make(&write).map_err(|e| self.failed(e))?;
        }
        let mut filling = Filling::of(&write);
        fill(&mut |RowChange { table, key, value }| {
            let (Some(to), Some(value)) = (tables().find(|one| one.name() == table), value) else {
                return Err(self.damaged("a row of a table that is unknown"));
            };
            match filling.put(to, key, value).map_err(|e| self.failed(e))? {
                true => Ok(()),
                false => Err(self.damaged("a row that does not fit its table")),
            }
        })?;
        drop(filling);
        write.commit().map_err(|e| self.failed(e))
    }

    /// All rows, as [`State::copy_of`] takes them.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`]; those of `each`.
    pub fn visit_rows(&self, mut each: impl FnMut(RowChange) -> Result<()>) -> Result<()> {
        let mut rows = Vec::new();
        for table in tables() {
            self.read(|read| table.visit(read, &mut rows))?;
            rows.drain(..).try_for_each(&mut each)?;
        }
        Ok(())
    }

    /// Verifies the checksums of the whole file. All other users wait meanwhile.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn verify(&self) -> Result<()> {
        match self.database.write().check_integrity() {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.damaged("its checksums do not fit")),
            Err(error) if is_damage(&error) => Err(self.damaged("its checksums do not fit")),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Sets how much of the audit log is kept. Before that it is all: who only fills a backup removes nothing from it.
    pub fn keep_audit(&self, most: audit::Kept) {
        *self.audit_kept.write() = most;
    }

    fn failed(&self, error: impl Into<redb::Error>) -> ServerError {
        match error.into() {
            redb::Error::Corrupted(_) => self.damaged("what it says makes no sense"),
            source => {
                // redb refuses everything from then on.
                if matches!(source, redb::Error::Io(_) | redb::Error::PreviousIo) {
                    self.unusable.send_replace(true);
                }
                ServerError::Database { path: self.path.clone(), source: Box::new(source) }
            }
        }
    }

    fn damaged(&self, what: &'static str) -> ServerError {
        ServerError::Damaged { path: self.path.clone(), what }
    }

    /// Runs one durable transaction. The events that `work` adds are written to the audit log.
    fn write<T>(
        &self,
        work: impl FnOnce(&Writing<'_>, &mut Vec<Event>) -> std::result::Result<T, redb::Error>,
    ) -> Result<T> {
        let database = self.database.read();
        let write = database.begin_write().map_err(|e| self.failed(e))?;
        let (mut events, writing) = (Vec::new(), Writing::of(&write));
        let done = work(&writing, &mut events).map_err(|e| self.failed(e))?;
        let most = *self.audit_kept.read();
        let noted = audit::append(&writing, unix_now(), events, most).map_err(|e| self.failed(e))?;
        let changes = writing.into_changes();
        if let Some(upstream) = &self.upstream {
            upstream.commit(&changes)?;
        }
        write.commit().map_err(|e| self.failed(e))?;
        noted.iter().for_each(audit::ChainedEntry::say);
        Ok(done)
    }

    /// Writes an event to the audit log that changes nothing else here.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn note(&self, event: Event) -> Result<()> {
        self.write(|_, events| {
            events.push(event);
            Ok(())
        })
    }

    /// Reads all of the audit log, an excerpt at a time, each with the end of the chain before it.
    ///
    /// # Errors
    /// As [`State::audit`]; those of `each`.
    pub fn read_audit(&self, mut each: impl FnMut(ChainEnd, &audit::Excerpt) -> Result<()>) -> Result<()> {
        let mut place = ChainEnd::default();
        loop {
            let page = self.audit(place.number, ENTRIES_AT_ONCE)?;
            place = page.begins.unwrap_or(place);
            each(place, &page)?;
            if page.entries.is_empty() {
                return Ok(());
            }
            place = page.end(place);
        }
    }

    /// The entries of the audit log after a number, at most `most`.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn audit(&self, after: u64, most: usize) -> Result<audit::Excerpt> {
        self.read(|read| audit::excerpt(read, after, most))
    }

    fn read<T>(&self, work: impl FnOnce(&redb::ReadTransaction) -> std::result::Result<T, redb::Error>) -> Result<T> {
        // Held to the end, so that no file is verified or repaired while it is read.
        let database = self.database.read();
        let read = database.begin_read().map_err(|e| self.failed(e))?;
        work(&read).map_err(|e| self.failed(e))
    }

    /// All rows of a table.
    fn rows(&self, table: Bytes) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        self.read(|read| {
            let mut rows = Vec::new();
            for row in read.open_table(table)?.iter()? {
                let (key, value) = row?;
                rows.push((key.value().to_vec(), value.value().to_vec()));
            }
            Ok(rows)
        })
    }

    fn read_hosts(&self) -> Result<Hosts> {
        let rows = self.read(|read| {
            let table = read.open_table(HOSTS)?;
            let row = |row: std::result::Result<(redb::AccessGuard<'_, &str>, redb::AccessGuard<'_, &[u8]>), _>| {
                row.map(|(name, host)| (name.value().to_owned(), host.value().to_vec()))
            };
            Ok(table.iter()?.map(row).collect::<std::result::Result<Vec<_>, redb::StorageError>>()?)
        })?;
        let parsed = |(name, bytes): (String, Vec<u8>)| {
            let host = serde_json::from_slice(&bytes).map_err(|_| self.damaged("a host"))?;
            Ok((name, host))
        };
        rows.into_iter().map(parsed).collect()
    }

    /// All hosts, by name.
    pub fn hosts(&self) -> Arc<Hosts> {
        self.hosts.read().clone()
    }

    /// A host.
    pub fn host(&self, name: &str) -> Option<Host> {
        self.hosts().get(name).cloned()
    }

    /// The owner of this public key, a subject public key info; `None`: unknown.
    pub fn who(&self, key: &[u8]) -> Option<Who> {
        let hex = HEXLOWER.encode(key);
        if let Some((name, host)) = self.hosts().iter().find(|(_, host)| host.key == hex) {
            return Some(Who::Host { name: name.clone(), is_revoked: host.is_revoked });
        }
        self.token(key, unix_now()).map(|_| Who::Token)
    }

    /// Signals each change of hosts.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Changes a host. Every later lookup sees the change.
    fn change_host(&self, name: &str, event: Event, change: impl FnOnce(&mut Host)) -> Result<()> {
        let _alone = self.changing.lock();
        let mut hosts = Hosts::clone(&self.hosts());
        let host = hosts.get_mut(name).ok_or_else(|| ServerError::NoHost { name: name.into() })?;
        change(host);
        let bytes = serde_json::to_vec(host).unwrap_or_default();
        self.write(|write, events| {
            write.open_table(HOSTS)?.insert(name, &bytes[..])?;
            match &event {
                Event::Granted { vault, .. } => self.wait_also_for(write, vault, name)?,
                Event::GrantEnded { .. } | Event::Revoked { .. } => {
                    let may_use = |vault: &VaultId| host.may_use(&self.with_those_around(vault).collect::<Vec<_>>());
                    State::turn_out(write, name, may_use)?;
                }
                _ => {}
            }
            events.push(event);
            Ok(())
        })?;
        self.now_are(hosts);
        self.look_at_restored()
    }

    /// Revokes a host.
    ///
    /// # Errors
    /// [`ServerError::NoHost`], [`ServerError::Database`].
    pub fn revoke(&self, name: &str) -> Result<()> {
        self.change_host(name, Event::Revoked { host: name.into() }, |host| host.is_revoked = true)
    }

    fn now_are(&self, hosts: Hosts) {
        *self.hosts.write() = Arc::new(hosts);
        self.changed.send_replace(());
    }

    /// Stores a token by its public key, and removes those that have expired.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn put_token(&self, key: &[u8], pending: &Pending, now: u64) -> Result<()> {
        let _alone = self.changing.lock();
        let bytes = serde_json::to_vec(pending).unwrap_or_default();
        self.write(|write, events| {
            let mut table = write.open_table(TOKENS)?;
            table.retain(|_, old| {
                serde_json::from_slice::<Pending>(old).is_ok_and(|old| old.until > now && old.host != pending.host)
            })?;
            table.insert(key, &bytes[..])?;
            let Pending { host, until, vaults } = pending.clone();
            events.push(Event::TokenMade { host, until, vaults });
            Ok(())
        })?;
        self.look_at_tokens()
    }

    /// Invalidates the tokens of a host. False: there were none.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn cancel_tokens(&self, host: &str) -> Result<bool> {
        let _alone = self.changing.lock();
        let had = self.write(|write, events| {
            let mut had = false;
            write.open_table(TOKENS)?.retain(|_, token| {
                let is_its = serde_json::from_slice::<Pending>(token).is_ok_and(|pending| pending.host == host);
                had |= is_its;
                !is_its
            })?;
            events.extend(had.then(|| Event::TokenVoid { host: host.into() }));
            Ok(had)
        })?;
        self.look_at_tokens().map(|()| had)
    }

    /// A token that has not expired.
    pub fn token(&self, key: &[u8], now: u64) -> Option<Pending> {
        self.tokens.read().get(key).filter(|pending| pending.until > now).cloned()
    }

    /// The valid tokens. A row that does not parse is no token; `check` names it.
    fn read_tokens(&self) -> Result<Tokens> {
        let parsed = |(key, token): (Vec<u8>, Vec<u8>)| Some((key, serde_json::from_slice(&token).ok()?));
        Ok(self.rows(TOKENS)?.into_iter().filter_map(parsed).collect())
    }

    /// Brings the copy in memory up to date.
    fn look_at_tokens(&self) -> Result<()> {
        let tokens = self.read_tokens()?;
        *self.tokens.write() = tokens;
        Ok(())
    }

    /// How many tokens there are.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn tokens(&self) -> Result<usize> {
        let tokens = self.rows(TOKENS)?;
        match tokens.iter().all(|(_, token)| serde_json::from_slice::<Pending>(token).is_ok()) {
            true => Ok(tokens.len()),
            false => Err(self.damaged("a token")),
        }
    }

    /// Uses up a token to add a host with this key. Both are one step, so a token is used once, and no host takes the
    /// name or the key of another one. Returns the host's name.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn use_token(&self, token: &[u8], now: u64, host_key: &[u8]) -> Result<std::result::Result<String, NotJoined>> {
        // No host and no token changes meanwhile.
        let _alone = self.changing.lock();
        // A host that names another's key could not use it, but the key's owner would appear under this host's name.
        if self.who(host_key).is_some() {
            return Ok(Err(NotJoined::KnownKey));
        }
        let is_there = |name: &str| self.host(name).is_some_and(|host| !host.is_revoked);
        let joined = self.write(|write, events| {
            let mut tokens = write.open_table(TOKENS)?;
            let bytes = tokens.remove(token)?.map(|row| row.value().to_vec());
            let pending = bytes.and_then(|bytes| serde_json::from_slice::<Pending>(&bytes).ok());
            let is_good = |pending: &Pending| pending.until > now && !is_there(&pending.host);
            let Some(pending) = pending.filter(is_good) else { return Ok(None) };
            let key = HEXLOWER.encode(host_key);
            let host = Host { key, joined: now, is_revoked: false, vaults: pending.vaults, keys: BTreeSet::new() };
            let bytes = serde_json::to_vec(&host).unwrap_or_default();
            write.open_table(HOSTS)?.insert(&*pending.host, &bytes[..])?;
            for vault in &host.vaults {
                self.wait_also_for(write, vault, &pending.host)?;
            }
            events.push(Event::Joined { host: pending.host.clone(), key: host.key.clone() });
            Ok(Some((pending.host, host)))
        })?;
        let Some((name, host)) = joined else {
            self.look_at_tokens()?;
            return Ok(Err(NotJoined::NoToken));
        };
        // First what is durable: reading may fail.
        let mut hosts = Hosts::clone(&self.hosts());
        hosts.insert(name.clone(), host);
        self.now_are(hosts);
        self.look_at_tokens()?;
        self.look_at_restored()?;
        Ok(Ok(name))
    }

    /// Grants a host the use of a vault, or ends the grant.
    ///
    /// # Errors
    /// [`ServerError::NoHost`], [`ServerError::Database`].
    pub fn grant(&self, name: &str, vault: &str, may: bool) -> Result<()> {
        let (host, id) = (name.to_owned(), vault.to_owned());
        let event = match may {
            true => Event::Granted { host, vault: id },
            false => Event::GrantEnded { host, vault: id },
        };
        self.change_host(name, event, |host| match may {
            true => drop(host.vaults.insert(vault.into())),
            false => drop(host.vaults.remove(vault)),
        })
    }
}

/// Checks a host's name.
///
/// # Errors
/// [`ServerError::HostName`].
pub fn check_name(name: &str) -> Result<()> {
    let is_good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    let begins = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    match begins && name.len() <= 63 && name.chars().all(is_good) {
        true => Ok(()),
        false => Err(ServerError::HostName { name: name.into() }),
    }
}

#[cfg(test)]
mod tests;
