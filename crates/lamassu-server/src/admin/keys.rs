//! An administrator's requests about keys: grants, retirement, deletion, and another master key.

use crate::administered::Administered;
use crate::audit::{AuditEntry, ChainedEntry, Event};
use crate::keys::{Master, load, source_in};
use crate::state::{KeptKey, Key, Use};
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_keys::providers::server::is_name;
use lamassu_keys::receipt::served::{Given, GoneKey};
use lamassu_keys::{KeySource, Purpose, unix_now};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// A request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "about")]
pub enum KeyRequest {
    /// All keys.
    List,
    /// Grants a host a key, which it may also create; or ends the grant.
    Grant {
        /// the host's name
        host: String,
        /// the key's name
        key: String,
        /// true to grant, false to end the grant
        may: bool,
    },
    /// Retires a key, or reinstates it.
    Retire {
        /// the key's name
        key: String,
        /// whether the key is retired
        is_retired: bool,
    },
    /// Deletes a key that was retired.
    Delete {
        /// the key's name
        key: String,
    },
}

/// An answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "about")]
pub enum KeyAnswer {
    /// All keys.
    Keys {
        /// by name
        keys: Vec<ShownKey>,
    },
    /// The request was carried out.
    Done {
        /// whether a key of this name exists
        is_there: bool,
    },
    /// The key was deleted.
    Gone {
        /// the digest of the certificate of the server's authority, hex
        server: String,
        /// the record of the deleted key
        gone: GoneKey,
    },
}

/// A key, as it is shown.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShownKey {
    /// the key's name
    pub key: String,
    /// whether it is an oblivious key, which evaluates for hosts and is given to none
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub evaluates: bool,
    /// `active`, `retired`, `deleted`; `granted`: not made yet
    pub state: String,
    /// time of creation, seconds since 1970
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made: Option<u64>,
    /// the host that made it
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_by: Option<String>,
    /// hosts that have a grant for it
    pub hosts: Vec<String>,
}

/// Answers a request.
///
/// # Errors
/// [`ServerError`].
pub fn answer(of: &Administered, request: KeyRequest) -> Result<KeyAnswer> {
    match request {
        KeyRequest::List => Ok(KeyAnswer::Keys { keys: shown(of)? }),
        KeyRequest::Grant { host, key, may } => {
            check_name(&key)?;
            of.state.grant_key(&host, &key, may)?;
            Ok(KeyAnswer::Done { is_there: of.state.key(&key)?.is_some() })
        }
        KeyRequest::Retire { key, is_retired } => {
            check_name(&key)?;
            of.state.retire_key(&key, is_retired)?;
            Ok(KeyAnswer::Done { is_there: true })
        }
        KeyRequest::Delete { key } => {
            check_name(&key)?;
            delete(of, &key)
        }
    }
}

fn check_name(name: &str) -> Result<()> {
    if is_name(name) { Ok(()) } else { Err(ServerError::KeyName { name: name.into() }) }
}

fn granted(of: &Administered, key: &str) -> Vec<String> {
    let hosts = of.state.hosts();
    let may_have = hosts.iter().filter(|(_, host)| !host.is_revoked && host.keys.contains(key));
    may_have.map(|(name, _)| name.clone()).collect()
}

fn shown(of: &Administered) -> Result<Vec<ShownKey>> {
    let mut keys: BTreeMap<String, Option<Key>> =
        of.state.keys()?.into_iter().map(|(name, key)| (name, Some(key))).collect();
    for host in of.state.hosts().values() {
        for key in &host.keys {
            keys.entry(key.clone()).or_default();
        }
    }
    let shown = |(name, key): (String, Option<Key>)| {
        let evaluates = key.as_ref().and_then(Key::kept).is_some_and(|kept| kept.r#use == Use::Evaluates);
        let (state, made) = match key {
            Some(Key::Active(kept)) => ("active", Some((kept.made, kept.made_by))),
            Some(Key::Retired(kept)) => ("retired", Some((kept.made, kept.made_by))),
            Some(Key::Deleted(gone)) => ("deleted", Some((gone.made, gone.made_by))),
            None => ("granted", None),
        };
        let (made, made_by) = made.unzip();
        ShownKey { hosts: granted(of, &name), key: name, evaluates, state: state.into(), made, made_by }
    };
    Ok(keys.into_iter().map(shown).collect())
}

/// Deletes a retired key. For a key that was deleted before, the answer is the same again.
fn delete(of: &Administered, name: &str) -> Result<KeyAnswer> {
    match of.state.key(name)? {
        Some(Key::Active(_)) => return Err(ServerError::KeyInUse { name: name.into() }),
        Some(Key::Retired(_)) => {
            let (mut found, mut looked) = (OnRecord::default(), 0);
            of.state.read_audit(|place, excerpt| {
                found.take(name, &excerpt.entries);
                looked = excerpt.end(place).number;
                Ok(())
            })?;
            // What was recorded since then is looked at in the transaction.
            of.state.delete_key(name, looked, |kept, since| {
                found.take(name, since);
                found.gone(name, kept, granted(of, name))
            })?;
        }
        Some(Key::Deleted(_)) | None => {}
    }
    match of.state.key(name)? {
        Some(Key::Deleted(gone)) => Ok(KeyAnswer::Gone { server: HEXLOWER.encode(&of.authority.digest()), gone }),
        _ => Err(ServerError::NoKey { name: name.into() }),
    }
}

/// What the audit log has about a key. Its entries count by their order: the clock may have been set between two.
#[derive(Debug, Default, PartialEq, Eq)]
struct OnRecord {
    /// when the first entry was made
    begins: Option<u64>,
    given: BTreeMap<String, u64>,
    backups: Vec<u64>,
    restored: Vec<u64>,
}

impl OnRecord {
    /// The next entries.
    fn take(&mut self, name: &str, entries: &[ChainedEntry]) {
        for kept in entries {
            // An entry that was changed is skipped.
            let Ok(AuditEntry { time, event, .. }) = serde_json::from_str(&kept.entry) else { continue };
            self.begins.get_or_insert(time);
            match event {
                // What was before does not have it.
                Event::KeyMade { key, .. } if key == name => {
                    self.backups.clear();
                    self.restored.clear();
                }
                Event::KeyGiven { host, key } if key == name => drop(self.given.insert(host, time)),
                Event::BackupBegun => self.backups.push(time),
                Event::MadeFromBackup => self.restored.push(time),
                _ => {}
            }
        }
    }

    /// The statement about the key, which is deleted now.
    fn gone(&mut self, name: &str, kept: &KeptKey, granted: Vec<String>) -> GoneKey {
        let OnRecord { begins, given, backups, restored } = std::mem::take(self);
        GoneKey {
            key: name.into(),
            made: kept.made,
            made_by: kept.made_by.clone(),
            digest: kept.digest.clone(),
            deleted: unix_now(),
            granted,
            given: given.into_iter().map(|(host, last)| Given { host, last }).collect(),
            backups,
            log_begins: begins,
            restored,
        }
    }
}

/// Rewraps all keys under the master key that the configuration names now; `from`: the previous one. The server must
/// not be running. Returns how many.
///
/// # Errors
/// [`ServerError`]; [`ServerError::Running`].
pub fn rewrap(dir: &Path, from: &KeySource) -> Result<u64> {
    let of = Administered::of(dir)?;
    let zone = of.state.zone()?.ok_or(ServerError::NoKeys)?;
    let to = source_in(&of.config)?.ok_or(ServerError::NoMasterKey)?;
    let before = Master::open(&zone, &load(from, Purpose::Unlock)?)?;
    let (zone, master) = Master::make(&load(&to, Purpose::Create)?)?;
    of.state.rewrap(&zone, |name, wrapped| {
        let key = before.unwrap(name, wrapped)?;
        master.wrap(name, &key).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clock was set back again and again: a backup that came after the key has it, whatever the times say.
    #[test]
    fn what_is_on_record_of_a_key_goes_by_the_order_of_the_log() {
        let events = [
            Event::MadeFromBackup,
            Event::BackupBegun,
            Event::KeyMade { host: "a".into(), key: "other".into() },
            Event::KeyMade { host: "a".into(), key: "k".into() },
            Event::KeyGiven { host: "a".into(), key: "k".into() },
            Event::BackupBegun,
            Event::KeyGiven { host: "b".into(), key: "other".into() },
            Event::MadeFromBackup,
            Event::KeyGiven { host: "a".into(), key: "k".into() },
            Event::BackupBegun,
        ];
        let entry = |(number, event): (u64, Event)| {
            let entry = AuditEntry { number, time: 100 - number, event };
            ChainedEntry { head: [0; 32], entry: serde_json::to_string(&entry).expect("serializes") }
        };
        let entries: Vec<_> = (1..).zip(events).map(entry).collect();
        for cut in 0..entries.len() {
            let mut found = OnRecord::default();
            found.take("k", &entries[..cut]);
            found.take("k", &entries[cut..]);
            let expected = OnRecord {
                begins: Some(99),
                given: [("a".to_owned(), 91)].into(),
                backups: vec![94, 90],
                restored: vec![92],
            };
            assert_eq!(found, expected);
        }
        // The log no longer has the making of the key: then all that it has may be about it.
        let mut found = OnRecord::default();
        found.take("k", &entries[4..]);
        assert_eq!((found.begins, found.backups), (Some(95), vec![94, 90]));
    }
}
