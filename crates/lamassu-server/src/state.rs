//! What outlives the process: hosts, tokens, and who holds what of which vault. One redb file; each change is one
//! durable transaction.

use crate::{Result, ServerError};
use lamassu_lease::server::{Change, Durable};
use lamassu_lease::{GrantNo, Object, SessionId};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Its name in the server's directory.
pub const FILE: &str = "state.redb";

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

/// The open file.
pub struct State {
    path: PathBuf,
    database: Database,
}

impl State {
    /// Opens the state in a server's directory, or makes it.
    ///
    /// # Errors
    /// [`ServerError::Running`], [`ServerError::Database`].
    pub fn open(dir: &Path) -> Result<State> {
        let path = dir.join(FILE);
        let database = match Database::create(&path) {
            Err(redb::DatabaseError::DatabaseAlreadyOpen) => return Err(ServerError::Running { dir: dir.into() }),
            Err(error) => return Err(ServerError::Database { path, source: Box::new(error.into()) }),
            Ok(database) => database,
        };
        let state = State { path, database };
        state.write(|write| {
            write.open_table(HOSTS)?;
            write.open_table(TOKENS)?;
            write.open_table(LEASES)?;
            Ok(())
        })?;
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

    /// A host.
    ///
    /// # Errors
    /// [`ServerError::Database`], [`ServerError::Damaged`].
    pub fn host(&self, name: &str) -> Result<Option<Host>> {
        let bytes = self.read(|read| Ok(read.open_table(HOSTS)?.get(name)?.map(|row| row.value().to_vec())))?;
        bytes.map(|bytes| serde_json::from_slice(&bytes).map_err(|_| self.damaged("a host"))).transpose()
    }

    /// All hosts, by name.
    ///
    /// # Errors
    /// As [`State::host`].
    pub fn hosts(&self) -> Result<Vec<(String, Host)>> {
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

    /// Replaces a host, or notes a new one.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn put_host(&self, name: &str, host: &Host) -> Result<()> {
        let bytes = serde_json::to_vec(host).unwrap_or_default();
        self.write(|write| {
            write.open_table(HOSTS)?.insert(name, &bytes[..])?;
            Ok(())
        })
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

    /// A token that is still good.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn token(&self, key: &[u8], now: u64) -> Result<Option<Pending>> {
        let bytes = self.read(|read| Ok(read.open_table(TOKENS)?.get(key)?.map(|row| row.value().to_vec())))?;
        let pending = bytes.and_then(|bytes| serde_json::from_slice::<Pending>(&bytes).ok());
        Ok(pending.filter(|pending| pending.until > now))
    }

    /// Uses a token up for a host: both in one step, so that it is used once.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn use_token(&self, key: &[u8], now: u64, host_key: &[u8]) -> Result<Option<(String, Host)>> {
        self.write(|write| {
            let mut tokens = write.open_table(TOKENS)?;
            let bytes = tokens.remove(key)?.map(|row| row.value().to_vec());
            let pending = bytes.and_then(|bytes| serde_json::from_slice::<Pending>(&bytes).ok());
            let Some(pending) = pending.filter(|pending| pending.until > now) else { return Ok(None) };
            let key = data_encoding::HEXLOWER.encode(host_key);
            let host = Host { key, joined: now, is_revoked: false, vaults: pending.vaults };
            let bytes = serde_json::to_vec(&host).unwrap_or_default();
            write.open_table(HOSTS)?.insert(&*pending.host, &bytes[..])?;
            Ok(Some((pending.host, host)))
        })
    }

    /// Lets a host use a vault, or no longer.
    ///
    /// # Errors
    /// [`ServerError::NoHost`], [`ServerError::Database`].
    pub fn grant(&self, name: &str, vault: &str, may: bool) -> Result<()> {
        let mut host = self.host(name)?.ok_or_else(|| ServerError::NoHost { name: name.into() })?;
        match may {
            true => drop(host.vaults.insert(vault.into())),
            false => drop(host.vaults.remove(vault)),
        }
        self.put_host(name, &host)
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
        let state = State::open(dir.path()).expect("opens");
        state.change_leases(&vault, &changes, |session| format!("host{}", session.0)).expect("writes");
        state.change_leases(&other, &[Change::Run(1)], |_| String::new()).expect("writes");
        assert!(matches!(State::open(dir.path()), Err(ServerError::Running { .. })));
        drop(state);
        let state = State::open(dir.path()).expect("opens");
        let mut expected = Durable::default();
        changes.iter().for_each(|change| expected.apply(change));
        assert_eq!(state.leases(&vault).expect("reads"), (expected, vec![(SessionId(5), "host5".into())]));
    }

    #[test]
    fn a_token_is_used_once_and_in_time() {
        let dir = tempfile::tempdir().expect("a directory");
        let state = State::open(dir.path()).expect("opens");
        let pending = |host: &str| Pending { host: host.into(), until: 100, vaults: BTreeSet::new() };
        state.put_token(b"a", &pending("one"), 50).expect("writes");
        state.put_token(b"b", &pending("two"), 50).expect("writes");
        assert!(state.token(b"a", 100).expect("reads").is_none(), "its time is over");
        assert!(state.use_token(b"a", 99, b"key").expect("writes").is_some_and(|(name, _)| name == "one"));
        assert!(state.use_token(b"a", 99, b"key").expect("writes").is_none());
        // A second token for a host takes the place of the first.
        state.put_token(b"c", &pending("two"), 50).expect("writes");
        assert!(state.token(b"b", 50).expect("reads").is_none());
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
