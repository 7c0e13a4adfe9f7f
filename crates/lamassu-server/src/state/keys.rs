//! Keys that are kept for hosts, wrapped, and the zone that they are wrapped under.
//!
//! When a key is deleted or rewrapped, its old bytes stay in free pages of the database file until these are reused.
//! They are wrapped, and of no use without the master key of their time.

use super::{HOSTS, Host, State};
use crate::audit::{self, ChainedEntry, Event};
use crate::caller::Caller;
use crate::writing::{AnyTable, Writing};
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_crypto::Secret;
use lamassu_keys::receipt::served::GoneKey;
use redb::{ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// By name: a [`Key`], JSON.
const KEYS: TableDefinition<'static, &'static str, &'static [u8]> = TableDefinition::new("keys");
/// [`ZONE`].
const MASTER: TableDefinition<'static, &'static str, &'static [u8]> = TableDefinition::new("master key");
/// The row of the zone whose key wraps the others.
const ZONE: &str = "zone";

/// A key, by its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum Key {
    /// Hosts that were granted it can get it.
    Active(KeptKey),
    /// No host can get it.
    Retired(KeptKey),
    /// The key was deleted.
    Deleted(GoneKey),
}

/// A key that was not deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptKey {
    /// time of creation, seconds since 1970
    pub made: u64,
    /// the host that made it
    pub made_by: String,
    /// digest of the key, as [`lamassu_keys::receipt::served::digest`] computes it
    pub digest: String,
    /// the key's use
    #[serde(default, skip_serializing_if = "Use::is_given")]
    pub r#use: Use,
    /// the wrapped key
    wrapped: String,
}

/// The use of a key, which never changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Use {
    /// hosts get the key
    #[default]
    Given,
    /// it evaluates for hosts, and no host gets it
    Evaluates,
}

impl Use {
    fn is_given(&self) -> bool {
        *self == Use::Given
    }
}

impl KeptKey {
    /// The wrapped key.
    pub fn wrapped(&self) -> &str {
        &self.wrapped
    }
}

impl Key {
    /// What is kept of the key, unless it was deleted.
    pub fn kept(&self) -> Option<&KeptKey> {
        match self {
            Key::Active(kept) | Key::Retired(kept) => Some(kept),
            Key::Deleted(_) => None,
        }
    }

    fn kept_mut(&mut self) -> Option<&mut KeptKey> {
        match self {
            Key::Active(kept) | Key::Retired(kept) => Some(kept),
            Key::Deleted(_) => None,
        }
    }
}

/// All keys, for a backup.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CopiedKeys {
    zone: String,
    keys: BTreeMap<String, Key>,
}

/// Why a host is refused a key, or its making.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRefusal {
    /// There is no such key, or it was not granted to the host.
    Unknown,
    /// The key exists already.
    Exists,
    /// The key is retired.
    Retired,
    /// The key was deleted.
    Deleted,
    /// The stored key does not open.
    Damaged,
}

type RedbResult<T> = std::result::Result<T, redb::Error>;
type Asked<T> = std::result::Result<T, KeyRefusal>;

/// The tables.
pub(super) const TABLES: [&dyn AnyTable; 2] = [&KEYS, &MASTER];

fn damaged() -> redb::Error {
    redb::Error::Corrupted("a key".into())
}

fn parsed(row: &[u8]) -> RedbResult<Key> {
    serde_json::from_slice(row).map_err(|_| damaged())
}

fn put(write: &Writing<'_>, name: &str, key: &Key) -> RedbResult<()> {
    let bytes = serde_json::to_vec(key).map_err(|_| damaged())?;
    write.open_table(KEYS)?.insert(name, &bytes[..])?;
    Ok(())
}

fn get(write: &Writing<'_>, name: &str) -> RedbResult<Option<Key>> {
    let row = write.open_table(KEYS)?.get(name)?.map(|row| row.value().to_vec());
    row.map(|row| parsed(&row)).transpose()
}

/// Checked in the transaction: a host that is revoked, or loses its grant, gets nothing after that.
fn is_granted(write: &Writing<'_>, to: &Caller, name: &str) -> RedbResult<bool> {
    let row = write.open_table(HOSTS)?.get(&*to.name)?.map(|row| row.value().to_vec());
    let host: Option<Host> = row.map(|row| serde_json::from_slice(&row).map_err(|_| damaged())).transpose()?;
    Ok(host.is_some_and(|host| may_have(&host, &to.key, name)))
}

fn may_have(host: &Host, key: &[u8], name: &str) -> bool {
    !host.is_revoked && host.key == HEXLOWER.encode(key) && host.keys.contains(name)
}

impl State {
    /// The zone whose key wraps all others, if there is one.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn zone(&self) -> Result<Option<String>> {
        Ok(self.copied_keys()?.map(|keys| keys.zone))
    }

    /// All keys, by name.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn keys(&self) -> Result<BTreeMap<String, Key>> {
        self.read(all)
    }

    /// A key.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn key(&self, name: &str) -> Result<Option<Key>> {
        let row = self.read(|read| Ok(read.open_table(KEYS)?.get(name)?.map(|row| row.value().to_vec())))?;
        row.map(|row| parsed(&row)).transpose().map_err(|error| self.failed(error))
    }

    /// Whether a host was granted a key, which may not exist yet.
    pub fn may_have_key(&self, host: &Caller, name: &str) -> bool {
        self.host(&host.name).is_some_and(|known| may_have(&known, &host.key, name))
    }

    /// Grants a host a key, which it may also make; or ends the grant.
    ///
    /// # Errors
    /// [`ServerError::NoHost`], [`ServerError::Database`].
    pub fn grant_key(&self, host: &str, key: &str, may: bool) -> Result<()> {
        let (name, granted) = (host.to_owned(), key.to_owned());
        let event = match may {
            true => Event::KeyGranted { host: name, key: granted },
            false => Event::KeyGrantEnded { host: name, key: granted },
        };
        self.change_host(host, event, |host| match may {
            true => drop(host.keys.insert(key.into())),
            false => drop(host.keys.remove(key)),
        })
    }

    /// Stores the zone whose key will wrap all others. There must be none yet.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn put_zone(&self, zone: &str) -> Result<()> {
        self.write(|write, events| {
            write.open_table(MASTER)?.insert(ZONE, zone.as_bytes())?;
            events.push(Event::MasterKeyTaken);
            Ok(())
        })
    }

    /// Stores a new key under a name that the host was granted. `key`: the wrapped key, its digest, its use.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn make_key(&self, to: &Caller, name: &str, now: u64, key: (&str, String, Use)) -> Result<Asked<()>> {
        self.write(|write, events| {
            if !is_granted(write, to, name)? {
                return Ok(Err(KeyRefusal::Unknown));
            }
            match get(write, name)? {
                Some(Key::Deleted(_)) => return Ok(Err(KeyRefusal::Deleted)),
                Some(_) => return Ok(Err(KeyRefusal::Exists)),
                None => {}
            }
            let (wrapped, digest, r#use) = (key.0.to_owned(), key.1, key.2);
            put(write, name, &Key::Active(KeptKey { made: now, made_by: to.name.clone(), digest, r#use, wrapped }))?;
            events.push(Event::KeyMade { host: to.name.clone(), key: name.into() });
            Ok(Ok(()))
        })
    }

    /// Gives a key to a host that was granted it. The audit log has that when this returns.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn give_key(
        &self,
        to: &Caller,
        name: &str,
        unwrap: impl FnOnce(&str) -> Option<Secret<32>>,
    ) -> Result<Asked<Secret<32>>> {
        self.write(|write, events| {
            if !is_granted(write, to, name)? {
                return Ok(Err(KeyRefusal::Unknown));
            }
            let kept = match get(write, name)? {
                Some(Key::Active(kept)) if kept.r#use == Use::Given => kept,
                // A key that evaluates is never given out.
                Some(Key::Active(_)) => return Ok(Err(KeyRefusal::Unknown)),
                Some(Key::Retired(_)) => return Ok(Err(KeyRefusal::Retired)),
                Some(Key::Deleted(_)) => return Ok(Err(KeyRefusal::Deleted)),
                None => return Ok(Err(KeyRefusal::Unknown)),
            };
            let Some(key) = unwrap(kept.wrapped()) else { return Ok(Err(KeyRefusal::Damaged)) };
            events.push(Event::KeyGiven { host: to.name.clone(), key: name.into() });
            Ok(Ok(key))
        })
    }

    /// Notes how many elements a key has evaluated for a host since the last note. The audit log has it when this
    /// returns.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn note_evaluations(&self, host: &str, key: &str, elements: u64, is_limited: bool) -> Result<()> {
        let (host, key) = (host.to_owned(), key.to_owned());
        self.write(|_, events| {
            events.push(match is_limited {
                false => Event::KeyEvaluates { host, key, elements },
                true => Event::EvaluationsLimited { host, key },
            });
            Ok(())
        })
    }

    /// Changes a key that was not deleted.
    fn change_key(
        &self,
        name: &str,
        change: impl FnOnce(&Writing<'_>, KeptKey, bool, &mut Vec<Event>) -> RedbResult<Result<Key>>,
    ) -> Result<()> {
        let no_key = || ServerError::NoKey { name: name.into() };
        self.write(|write, events| {
            let (kept, is_retired) = match get(write, name)? {
                Some(Key::Active(kept)) => (kept, false),
                Some(Key::Retired(kept)) => (kept, true),
                Some(Key::Deleted(_)) => return Ok(Err(ServerError::KeyDeleted { name: name.into() })),
                None => return Ok(Err(no_key())),
            };
            match change(write, kept, is_retired, events)? {
                Ok(key) => put(write, name, &key).map(Ok),
                Err(error) => Ok(Err(error)),
            }
        })?
    }

    /// Retires a key, or reinstates it.
    ///
    /// # Errors
    /// [`ServerError::NoKey`], [`ServerError::KeyDeleted`], [`ServerError::Database`].
    pub fn retire_key(&self, name: &str, is_retired: bool) -> Result<()> {
        self.change_key(name, |_, kept, _, events| {
            let key = name.to_owned();
            events.push(if is_retired { Event::KeyRetired { key } } else { Event::KeyReinstated { key } });
            Ok(Ok(if is_retired { Key::Retired(kept) } else { Key::Active(kept) }))
        })
    }

    /// Deletes a key that was retired. `gone` gets what was kept of it, and the entries of the audit log after `looked`
    /// at that moment, and says what is left on record.
    ///
    /// # Errors
    /// [`ServerError::NoKey`], [`ServerError::KeyDeleted`], [`ServerError::KeyInUse`], [`ServerError::Database`].
    pub fn delete_key(
        &self,
        name: &str,
        looked: u64,
        gone: impl FnOnce(&KeptKey, &[ChainedEntry]) -> GoneKey,
    ) -> Result<()> {
        self.change_key(name, |write, kept, is_retired, events| {
            if !is_retired {
                return Ok(Err(ServerError::KeyInUse { name: name.into() }));
            }
            let gone = gone(&kept, &audit::entries_after(write, looked)?);
            events.push(Event::KeyDeleted { key: name.into(), digest: kept.digest });
            Ok(Ok(Key::Deleted(gone)))
        })
    }

    /// Rewraps all keys under the key of `zone`. Returns how many.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`]; nothing is changed if a key does not open.
    pub fn rewrap(&self, zone: &str, mut rewrap: impl FnMut(&str, &str) -> Option<String>) -> Result<u64> {
        let keys = self.keys()?;
        self.write(|write, events| {
            let mut count = 0;
            for (name, mut key) in keys {
                let Some(kept) = key.kept_mut() else { continue };
                kept.wrapped = rewrap(&name, kept.wrapped()).ok_or_else(damaged)?;
                put(write, &name, &key)?;
                count += 1;
            }
            write.open_table(MASTER)?.insert(ZONE, zone.as_bytes())?;
            events.push(Event::KeysRewrapped { keys: count });
            Ok(count)
        })
    }

    /// The keys, for a backup.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    pub(super) fn copied_keys(&self) -> Result<Option<CopiedKeys>> {
        self.read(copied)
    }
}

fn copied(read: &redb::ReadTransaction) -> RedbResult<Option<CopiedKeys>> {
    let table = read.open_table(MASTER)?;
    let row = |name| RedbResult::Ok(table.get(name)?.map(|row| row.value().to_vec()));
    let Some(zone) = row(ZONE)? else { return Ok(None) };
    let zone = String::from_utf8(zone).map_err(|_| damaged())?;
    Ok(Some(CopiedKeys { zone, keys: all(read)? }))
}

fn all(read: &redb::ReadTransaction) -> RedbResult<BTreeMap<String, Key>> {
    let mut keys = BTreeMap::new();
    for row in read.open_table(KEYS)?.iter()? {
        let (name, key) = row?;
        keys.insert(name.value().to_owned(), parsed(key.value())?);
    }
    Ok(keys)
}

/// Fills the state of a backup with keys.
pub(super) fn fill(write: &Writing<'_>, copied: &CopiedKeys) -> RedbResult<()> {
    write.open_table(MASTER)?.insert(ZONE, copied.zone.as_bytes())?;
    copied.keys.iter().try_for_each(|(name, key)| put(write, name, key))
}

#[cfg(test)]
mod tests;
