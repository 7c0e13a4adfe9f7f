//! What outlives the process: hosts, tokens, and who holds what of which vault. One redb file; each change is one
//! durable transaction.

use crate::service::seconds;
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_lease::server::{Change, Durable};
use lamassu_lease::{GrantNo, Object, SessionId};
use parking_lot::{Mutex, RwLock};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Its name in the server's directory.
pub const FILE: &str = "state.redb";
/// How long another process may have it for a moment.
const FREE_WITHIN: Duration = Duration::from_secs(3);
const AGAIN_AFTER: Duration = Duration::from_millis(20);

/// By name: a [`Host`], JSON.
const HOSTS: TableDefinition<'static, &'static str, &'static [u8]> = TableDefinition::new("hosts");
/// By public key: a [`Pending`], JSON.
const TOKENS: TableDefinition<'static, &'static [u8], &'static [u8]> = TableDefinition::new("tokens");
/// By vault, kind and number: see [`lease_key`].
const LEASES: TableDefinition<'static, &'static [u8], &'static [u8]> = TableDefinition::new("leases");

/// A host that has joined.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Host {
    /// its public key, a subject public key info, hex
    pub key: String,
    /// s since 1970
    pub joined: u64,
    /// it may do nothing any more
    pub is_revoked: bool,
    /// vaults that it may use, hex
    pub vaults: BTreeSet<String>,
}

/// A token that was not used.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pending {
    /// the host that it is for
    pub host: String,
    /// s since 1970
    pub until: u64,
    /// vaults that the host may use, hex
    pub vaults: BTreeSet<String>,
}

/// Who has a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Who {
    /// A host that has joined.
    Host {
        /// its name
        name: String,
        /// it may do nothing any more
        is_revoked: bool,
    },
    /// Somebody who may join.
    Token,
}

/// Hosts by name.
type Hosts = BTreeMap<String, Host>;

/// The open file. Hosts are in memory as well: who calls is looked up without waiting for a disk.
pub struct State {
    path: PathBuf,
    database: Database,
    hosts: RwLock<Arc<Hosts>>,
    /// Held while hosts are changed.
    changing: Mutex<()>,
    /// Says that hosts have changed.
    changed: watch::Sender<()>,
}

impl State {
    /// Makes the state of a new server.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn make(dir: &Path) -> Result<State> {
        State::open_file(dir, dir.join(FILE))
    }

    /// Opens the state in a server's directory.
    ///
    /// # Errors
    /// [`ServerError::Running`], [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn open(dir: &Path) -> Result<State> {
        let path = dir.join(FILE);
        // A new one would know no host and no lease, and nobody would be told.
        match path.metadata() {
            Ok(st) if st.len() > 0 => State::open_file(dir, path),
            _ => Err(ServerError::Damaged { path, what: "it is gone, or empty" }),
        }
    }

    /// The same for a server: an administrator's command, or a server that ends, may have it for a moment.
    ///
    /// # Errors
    /// As [`State::open`].
    pub fn open_when_free(dir: &Path) -> Result<State> {
        let until = Instant::now() + FREE_WITHIN;
        loop {
            match State::open(dir) {
                Err(ServerError::Running { .. }) if Instant::now() < until => std::thread::sleep(AGAIN_AFTER),
                opened => return opened,
            }
        }
    }

    fn open_file(dir: &Path, path: PathBuf) -> Result<State> {
        let database = match Database::create(&path) {
            Err(redb::DatabaseError::DatabaseAlreadyOpen) => return Err(ServerError::Running { dir: dir.into() }),
            Err(error) => return Err(ServerError::Database { path, source: Box::new(error.into()) }),
            Ok(database) => database,
        };
        let state = State {
            path,
            database,
            hosts: RwLock::default(),
            changing: Mutex::new(()),
            changed: watch::Sender::new(()),
        };
        state.write(|write| {
            write.open_table(HOSTS)?;
            write.open_table(TOKENS)?;
            write.open_table(LEASES)?;
            Ok(())
        })?;
        let hosts = state.read_hosts()?;
        *state.hosts.write() = Arc::new(hosts);
        Ok(state)
    }

    fn failed(&self, error: impl Into<redb::Error>) -> ServerError {
        ServerError::Database { path: self.path.clone(), source: Box::new(error.into()) }
    }

    fn damaged(&self, what: &'static str) -> ServerError {
        ServerError::Damaged { path: self.path.clone(), what }
    }

    fn write<T>(&self, work: impl FnOnce(&redb::WriteTransaction) -> std::result::Result<T, redb::Error>) -> Result<T> {
        let write = self.database.begin_write().map_err(|e| self.failed(e))?;
        let done = work(&write).map_err(|e| self.failed(e))?;
        write.commit().map_err(|e| self.failed(e))?;
        Ok(done)
    }

    fn read<T>(&self, work: impl FnOnce(&redb::ReadTransaction) -> std::result::Result<T, redb::Error>) -> Result<T> {
        let read = self.database.begin_read().map_err(|e| self.failed(e))?;
        work(&read).map_err(|e| self.failed(e))
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

    /// Who has this public key, a subject public key info; `None`: nobody that is known.
    pub fn who(&self, key: &[u8]) -> Option<Who> {
        let hex = HEXLOWER.encode(key);
        if let Some((name, host)) = self.hosts().iter().find(|(_, host)| host.key == hex) {
            return Some(Who::Host { name: name.clone(), is_revoked: host.is_revoked });
        }
        let token = self.token(key, seconds());
        token.is_ok_and(|pending| pending.is_some()).then_some(Who::Token)
    }

    /// Whether this key is that of a host which may use a vault now.
    pub fn may_use(&self, key: &[u8], vault: &[u8; 16]) -> bool {
        let (key, vault) = (HEXLOWER.encode(key), HEXLOWER.encode(vault));
        self.hosts().values().any(|host| host.key == key && !host.is_revoked && host.vaults.contains(&vault))
    }

    /// Hears of each change of hosts.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Changes a host, or notes a new one. Whoever looks afterwards sees that.
    ///
    /// # Errors
    /// [`ServerError::NoHost`], [`ServerError::Database`].
    pub fn change_host(&self, name: &str, change: impl FnOnce(&mut Host)) -> Result<()> {
        let _alone = self.changing.lock();
        let mut hosts = Hosts::clone(&self.hosts());
        let host = hosts.get_mut(name).ok_or_else(|| ServerError::NoHost { name: name.into() })?;
        change(host);
        let bytes = serde_json::to_vec(host).unwrap_or_default();
        self.write(|write| {
            write.open_table(HOSTS)?.insert(name, &bytes[..])?;
            Ok(())
        })?;
        self.now_are(hosts);
        Ok(())
    }

    fn now_are(&self, hosts: Hosts) {
        *self.hosts.write() = Arc::new(hosts);
        self.changed.send_replace(());
    }

    /// Notes a token by its public key; those whose time is over go.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn put_token(&self, key: &[u8], pending: &Pending, now: u64) -> Result<()> {
        let bytes = serde_json::to_vec(pending).unwrap_or_default();
        self.write(|write| {
            let mut table = write.open_table(TOKENS)?;
            table.retain(|_, old| {
                serde_json::from_slice::<Pending>(old).is_ok_and(|old| old.until > now && old.host != pending.host)
            })?;
            table.insert(key, &bytes[..])?;
            Ok(())
        })
    }

    /// Makes the tokens of a host void. False: it had none.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn cancel_tokens(&self, host: &str) -> Result<bool> {
        let _alone = self.changing.lock();
        self.write(|write| {
            let mut had = false;
            write.open_table(TOKENS)?.retain(|_, token| {
                let is_its = serde_json::from_slice::<Pending>(token).is_ok_and(|pending| pending.host == host);
                had |= is_its;
                !is_its
            })?;
            Ok(had)
        })
    }

    /// A token that is still good.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn token(&self, key: &[u8], now: u64) -> Result<Option<Pending>> {
        let bytes = self.read(|read| Ok(read.open_table(TOKENS)?.get(key)?.map(|row| row.value().to_vec())))?;
        let pending = bytes.and_then(|bytes| serde_json::from_slice::<Pending>(&bytes).ok());
        Ok(pending.filter(|pending| pending.until > now))
    }

    /// Uses a token up for a host with a key: both in one step, so that it is used once. Returns the host's name.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn use_token(&self, token: &[u8], now: u64, host_key: &[u8]) -> Result<Option<String>> {
        let _alone = self.changing.lock();
        let joined = self.write(|write| {
            let mut tokens = write.open_table(TOKENS)?;
            let bytes = tokens.remove(token)?.map(|row| row.value().to_vec());
            let pending = bytes.and_then(|bytes| serde_json::from_slice::<Pending>(&bytes).ok());
            let Some(pending) = pending.filter(|pending| pending.until > now) else { return Ok(None) };
            let key = HEXLOWER.encode(host_key);
            let host = Host { key, joined: now, is_revoked: false, vaults: pending.vaults };
            let bytes = serde_json::to_vec(&host).unwrap_or_default();
            write.open_table(HOSTS)?.insert(&*pending.host, &bytes[..])?;
            Ok(Some((pending.host, host)))
        })?;
        let Some((name, host)) = joined else { return Ok(None) };
        let mut hosts = Hosts::clone(&self.hosts());
        hosts.insert(name.clone(), host);
        self.now_are(hosts);
        Ok(Some(name))
    }

    /// Lets a host use a vault, or no longer.
    ///
    /// # Errors
    /// [`ServerError::NoHost`], [`ServerError::Database`].
    pub fn grant(&self, name: &str, vault: &str, may: bool) -> Result<()> {
        self.change_host(name, |host| match may {
            true => drop(host.vaults.insert(vault.into())),
            false => drop(host.vaults.remove(vault)),
        })
    }

    /// What is durable of the leases of a vault; and the hosts of its sessions.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn leases(&self, vault: &[u8; 16]) -> Result<(Durable, Vec<(SessionId, String)>)> {
        let rows = self.read(|read| {
            let table = read.open_table(LEASES)?;
            let mut rows = Vec::new();
            for row in table.range(&vault[..]..)? {
                let (key, value) = row?;
                if !key.value().starts_with(vault) {
                    break;
                }
                rows.push((key.value()[16..].to_vec(), value.value().to_vec()));
            }
            Ok(rows)
        })?;
        let (mut durable, mut hosts) = (Durable::default(), Vec::new());
        for (key, value) in rows {
            let damaged = || self.damaged("a lease");
            let (kind, number) = key.split_first().ok_or_else(damaged)?;
            let number = u64::from_be_bytes(number.try_into().map_err(|_| damaged())?);
            let word = |at: usize| {
                let bytes = value.get(at * 8..at * 8 + 8).and_then(|bytes| bytes.try_into().ok());
                bytes.map(u64::from_le_bytes).ok_or_else(damaged)
            };
            match *kind {
                RUNS => durable.runs = word(0)?,
                SESSION => {
                    durable.sessions.insert(SessionId(number));
                    hosts.push((SessionId(number), String::from_utf8(value).map_err(|_| damaged())?));
                }
                EXCLUSIVE => {
                    durable.exclusive.insert(Object(number), (SessionId(word(0)?), GrantNo(word(1)?)));
                }
                ABANDONED => drop(durable.abandoned.insert(Object(number))),
                _ => return Err(damaged()),
            }
        }
        Ok((durable, hosts))
    }

    /// Makes changes of the leases of a vault durable, together. `host_of` names the host of a session that began.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn change_leases(
        &self,
        vault: &[u8; 16],
        changes: &[Change],
        host_of: impl Fn(SessionId) -> String,
    ) -> Result<()> {
        if changes.is_empty() {
            return Ok(());
        }
        self.write(|write| {
            let mut table = write.open_table(LEASES)?;
            for change in changes {
                let (kind, number, value) = match *change {
                    Change::Run(runs) => (RUNS, 0, Some(runs.to_le_bytes().to_vec())),
                    Change::Began(session) => (SESSION, session.0, Some(host_of(session).into_bytes())),
                    Change::Ended(session) => (SESSION, session.0, None),
                    Change::Exclusive(object, session, grant) => {
                        (EXCLUSIVE, object.0, Some([session.0.to_le_bytes(), grant.0.to_le_bytes()].concat()))
                    }
                    Change::Released(object) => (EXCLUSIVE, object.0, None),
                    Change::Abandoned(object) => (ABANDONED, object.0, Some(Vec::new())),
                    Change::TakenOver(object) => (ABANDONED, object.0, None),
                };
                let key = lease_key(vault, kind, number);
                match value {
                    Some(value) => drop(table.insert(&key[..], &value[..])?),
                    None => drop(table.remove(&key[..])?),
                }
            }
            Ok(())
        })
    }
}

const RUNS: u8 = 0;
const SESSION: u8 = 1;
const EXCLUSIVE: u8 = 2;
const ABANDONED: u8 = 3;

/// The vault, the kind, and the number of the session or object.
fn lease_key(vault: &[u8; 16], kind: u8, number: u64) -> Vec<u8> {
    [&vault[..], &[kind], &number.to_be_bytes()].concat()
}

/// A name that a host can have.
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
mod tests {
    use super::*;

    #[test]
    fn leases_come_back() {
        let dir = tempfile::tempdir().expect("a directory");
        let (vault, other) = ([7; 16], [8; 16]);
        let changes = [
            Change::Run(3),
            Change::Began(SessionId(5)),
            Change::Began(SessionId(6)),
            Change::Exclusive(Object(0), SessionId(5), GrantNo(9)),
            Change::Abandoned(Object(1)),
            Change::Ended(SessionId(6)),
        ];
        let state = State::make(dir.path()).expect("opens");
        state.change_leases(&vault, &changes, |session| format!("host{}", session.0)).expect("writes");
        state.change_leases(&other, &[Change::Run(1)], |_| String::new()).expect("writes");
        assert!(matches!(State::open(dir.path()), Err(ServerError::Running { .. })));
        drop(state);
        let state = State::make(dir.path()).expect("opens");
        let mut expected = Durable::default();
        changes.iter().for_each(|change| expected.apply(change));
        assert_eq!(state.leases(&vault).expect("reads"), (expected, vec![(SessionId(5), "host5".into())]));
    }

    #[test]
    fn a_token_is_used_once_and_in_time() {
        let dir = tempfile::tempdir().expect("a directory");
        let state = State::make(dir.path()).expect("opens");
        let pending = |host: &str| Pending { host: host.into(), until: 100, vaults: BTreeSet::new() };
        state.put_token(b"a", &pending("one"), 50).expect("writes");
        state.put_token(b"b", &pending("two"), 50).expect("writes");
        assert!(state.token(b"a", 100).expect("reads").is_none(), "its time is over");
        assert!(state.use_token(b"a", 99, b"key").expect("writes").is_some_and(|name| name == "one"));
        assert!(state.use_token(b"a", 99, b"key").expect("writes").is_none());
        // A second token for a host takes the place of the first.
        state.put_token(b"c", &pending("two"), 50).expect("writes");
        assert!(state.token(b"b", 50).expect("reads").is_none());
    }

    #[test]
    fn a_key_is_a_hosts_until_it_is_revoked_or_joins_anew() {
        let dir = tempfile::tempdir().expect("a directory");
        let state = State::make(dir.path()).expect("opens");
        let vault = [5; 16];
        let pending =
            Pending { host: "one".into(), until: seconds() + 100, vaults: BTreeSet::from([HEXLOWER.encode(&vault)]) };
        state.put_token(b"t", &pending, 0).expect("writes");
        assert_eq!((state.who(b"t"), state.who(b"k")), (Some(Who::Token), None));
        let mut changes = state.changes();
        state.use_token(b"t", 0, b"k").expect("writes").expect("is good");
        assert!(changes.has_changed().expect("there is a sender"));
        let host = |is_revoked| Some(Who::Host { name: "one".into(), is_revoked });
        assert_eq!((state.who(b"t"), state.who(b"k")), (None, host(false)));
        assert!(state.may_use(b"k", &vault) && !state.may_use(b"k", &[6; 16]) && !state.may_use(b"j", &vault));
        state.grant("one", &HEXLOWER.encode(&vault), false).expect("writes");
        assert!(!state.may_use(b"k", &vault));
        state.grant("one", &HEXLOWER.encode(&vault), true).expect("writes");
        changes.mark_unchanged();
        state.change_host("one", |host| host.is_revoked = true).expect("writes");
        assert!(!state.may_use(b"k", &vault) && changes.has_changed().expect("there is a sender"));
        assert_eq!(state.who(b"k"), host(true));
        assert!(state.grant("two", "x", true).is_err_and(|error| error.code() == 3));
        drop(state);
        let state = State::make(dir.path()).expect("opens");
        assert_eq!(state.who(b"k"), host(true));
        state.put_token(b"u", &pending, 0).expect("writes");
        state.use_token(b"u", 0, b"l").expect("writes").expect("is good");
        assert_eq!((state.who(b"k"), state.who(b"l")), (None, host(false)));
    }

    #[test]
    fn names_of_hosts_are_plain() {
        for good in ["a", "node-1.example", "9"] {
            check_name(good).expect(good);
        }
        for bad in ["", "-a", ".", "a b", "a/b", "\u{e9}", &"x".repeat(64), "a\n"] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }
}
