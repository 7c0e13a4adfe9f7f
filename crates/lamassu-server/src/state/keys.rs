//! Keys that are kept for hosts, wrapped, and what they are wrapped under.
//!
//! What is wrapped stands in the file behind a *mark*, 16 random bytes that nobody outside knows, with its length. So
//! what the database has left of it in free pages is found, and overwritten, when a key is deleted or all are wrapped
//! anew: see [`State::overwrite_dead`].

use super::{HOSTS, Host, State};
use crate::audit::Event;
use crate::guard::Caller;
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_crypto::Secret;
use lamassu_keys::receipt::served::GoneKey;
use redb::{ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

/// By name: a [`Key`], JSON.
const KEYS: TableDefinition<'static, &'static str, &'static [u8]> = TableDefinition::new("keys");
/// [`MARK`], [`ZONE`] and [`DEAD`].
const MASTER: TableDefinition<'static, &'static str, &'static [u8]> = TableDefinition::new("master key");
const MARK: &str = "mark";
/// What holds the key that keys are wrapped under, marked.
const ZONE: &str = "zone";
/// There, with nothing in it, while the file may have left what is to be overwritten.
const DEAD: &str = "dead";
/// Hexadecimal digits of a mark, and of the length behind it.
const MARK_LEN: usize = 32;
const LENGTH_LEN: usize = 8;
/// Longest that is wrapped.
const WRAPPED_MAX: usize = 64 << 10;
/// Bytes of the file that are looked through at a time.
const AT_ONCE: usize = 4 << 20;

/// A key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum Key {
    /// It is given to hosts that were granted it.
    Active(KeptKey),
    /// It is given to nobody.
    Retired(KeptKey),
    /// It is gone.
    Deleted(GoneKey),
}

/// A key that is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptKey {
    /// s since 1970
    pub made: u64,
    /// the host that had it made
    pub made_by: String,
    /// see [`lamassu_keys::receipt::served::digest`]
    pub digest: String,
    /// wrapped, and marked
    wrapped: String,
}

impl KeptKey {
    /// As it is wrapped.
    pub fn wrapped(&self) -> &str {
        self.wrapped.get(MARK_LEN + LENGTH_LEN..).unwrap_or_default()
    }
}

impl Key {
    /// What is kept of it, if it is there.
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
    /// hex
    mark: String,
    /// marked
    zone: String,
    keys: BTreeMap<String, Key>,
}

/// Why a host gets no key, or none is made for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRefusal {
    /// There is none, or the host was not granted it.
    Unknown,
    /// It was made already.
    Exists,
    /// It is given to nobody.
    Retired,
    /// It is gone.
    Deleted,
    /// What is kept of it does not open.
    Damaged,
}

type Rows<T> = std::result::Result<T, redb::Error>;
type Asked<T> = std::result::Result<T, KeyRefusal>;

/// Makes the tables, where there are none.
pub(super) fn make(write: &WriteTransaction) -> Rows<()> {
    write.open_table(KEYS)?;
    write.open_table(MASTER)?;
    Ok(())
}

fn damaged() -> redb::Error {
    redb::Error::Corrupted("a key".into())
}

fn parsed(row: &[u8]) -> Rows<Key> {
    serde_json::from_slice(row).map_err(|_| damaged())
}

fn put(write: &WriteTransaction, name: &str, key: &Key) -> Rows<()> {
    let bytes = serde_json::to_vec(key).map_err(|_| damaged())?;
    write.open_table(KEYS)?.insert(name, &bytes[..])?;
    Ok(())
}

fn get(write: &WriteTransaction, name: &str) -> Rows<Option<Key>> {
    let row = write.open_table(KEYS)?.get(name)?.map(|row| row.value().to_vec());
    row.map(|row| parsed(&row)).transpose()
}

/// As of this moment: a host that is revoked, or loses its grant, meanwhile gets nothing behind that.
fn is_granted(write: &WriteTransaction, to: &Caller, name: &str) -> Rows<bool> {
    let row = write.open_table(HOSTS)?.get(&*to.name)?.map(|row| row.value().to_vec());
    let host: Option<Host> = row.map(|row| serde_json::from_slice(&row).map_err(|_| damaged())).transpose()?;
    Ok(host.is_some_and(|host| may_have(&host, &to.key, name)))
}

fn may_have(host: &Host, key: &[u8], name: &str) -> bool {
    !host.is_revoked && host.key == HEXLOWER.encode(key) && host.keys.contains(name)
}

fn marked(mark: &[u8], wrapped: &str) -> String {
    format!("{}{:08x}{wrapped}", HEXLOWER.encode(mark), wrapped.len())
}

fn mark_in(write: &WriteTransaction) -> Rows<Vec<u8>> {
    let row = write.open_table(MASTER)?.get(MARK)?.map(|row| row.value().to_vec());
    row.filter(|mark| mark.len() * 2 == MARK_LEN).ok_or_else(damaged)
}

impl State {
    /// What holds the key that all keys are wrapped under, if there is one.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn zone(&self) -> Result<Option<String>> {
        let zone = self.copied_keys()?.map(|keys| keys.zone);
        Ok(zone.map(|zone| zone.get(MARK_LEN + LENGTH_LEN..).unwrap_or_default().to_owned()))
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

    /// Whether a host was granted a key, which need not be there.
    pub fn may_have_key(&self, host: &Caller, name: &str) -> bool {
        self.host(&host.name).is_some_and(|known| may_have(&known, &host.key, name))
    }

    /// Lets a host have a key, and make it if it is not there; or no longer.
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

    /// Keeps what holds the key that all keys are going to be wrapped under. There is none yet.
    ///
    /// # Errors
    /// [`ServerError::NoRandom`], [`ServerError::Database`].
    pub fn put_zone(&self, zone: &str) -> Result<()> {
        let mut mark = [0; MARK_LEN / 2];
        lamassu_crypto::random(&mut mark).map_err(|_| ServerError::NoRandom)?;
        self.write(|write, events| {
            let mut master = write.open_table(MASTER)?;
            master.insert(MARK, &mark[..])?;
            master.insert(ZONE, marked(&mark, zone).as_bytes())?;
            events.push(Event::MasterKeyTaken);
            Ok(())
        })
    }

    /// Keeps a new key of a name that the host was granted. `key`: how it is wrapped, and its digest.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn make_key(&self, to: &Caller, name: &str, now: u64, key: (&str, String)) -> Result<Asked<()>> {
        self.write(|write, events| {
            if !is_granted(write, to, name)? {
                return Ok(Err(KeyRefusal::Unknown));
            }
            match get(write, name)? {
                Some(Key::Deleted(_)) => return Ok(Err(KeyRefusal::Deleted)),
                Some(_) => return Ok(Err(KeyRefusal::Exists)),
                None => {}
            }
            let (wrapped, digest) = (marked(&mark_in(write)?, key.0), key.1);
            put(write, name, &Key::Active(KeptKey { made: now, made_by: to.name.clone(), digest, wrapped }))?;
            events.push(Event::KeyMade { host: to.name.clone(), key: name.into() });
            Ok(Ok(()))
        })
    }

    /// A key for a host that was granted it. The audit log has that when this returns.
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
                Some(Key::Active(kept)) => kept,
                Some(Key::Retired(_)) => return Ok(Err(KeyRefusal::Retired)),
                Some(Key::Deleted(_)) => return Ok(Err(KeyRefusal::Deleted)),
                None => return Ok(Err(KeyRefusal::Unknown)),
            };
            let Some(key) = unwrap(kept.wrapped()) else { return Ok(Err(KeyRefusal::Damaged)) };
            events.push(Event::KeyGiven { host: to.name.clone(), key: name.into() });
            Ok(Ok(key))
        })
    }

    /// Changes a key that is there.
    fn change_key(&self, name: &str, change: impl FnOnce(KeptKey, bool, &mut Vec<Event>) -> Result<Key>) -> Result<()> {
        let no_key = || ServerError::NoKey { name: name.into() };
        self.write(|write, events| {
            let (kept, is_retired) = match get(write, name)? {
                Some(Key::Active(kept)) => (kept, false),
                Some(Key::Retired(kept)) => (kept, true),
                Some(Key::Deleted(_)) => return Ok(Err(ServerError::KeyDeleted { name: name.into() })),
                None => return Ok(Err(no_key())),
            };
            match change(kept, is_retired, events) {
                Ok(key) => {
                    if key.kept().is_none() {
                        write.open_table(MASTER)?.insert(DEAD, &[][..])?;
                    }
                    put(write, name, &key).map(Ok)
                }
                Err(error) => Ok(Err(error)),
            }
        })?
    }

    /// A key is given to nobody from now on; or to who was granted it, again.
    ///
    /// # Errors
    /// [`ServerError::NoKey`], [`ServerError::KeyDeleted`], [`ServerError::Database`].
    pub fn retire_key(&self, name: &str, is_retired: bool) -> Result<()> {
        self.change_key(name, |kept, _, events| {
            let key = name.to_owned();
            events.push(if is_retired { Event::KeyRetired { key } } else { Event::KeyReinstated { key } });
            Ok(if is_retired { Key::Retired(kept) } else { Key::Active(kept) })
        })
    }

    /// A key that was retired is gone. What the file has left of it is there until [`State::overwrite_dead`].
    ///
    /// # Errors
    /// [`ServerError::NoKey`], [`ServerError::KeyDeleted`], [`ServerError::KeyInUse`], [`ServerError::Database`].
    pub fn delete_key(&self, gone: &GoneKey) -> Result<()> {
        self.change_key(&gone.key, |kept, is_retired, events| {
            if !is_retired {
                return Err(ServerError::KeyInUse { name: gone.key.clone() });
            }
            events.push(Event::KeyDeleted { key: gone.key.clone(), digest: kept.digest });
            Ok(Key::Deleted(gone.clone()))
        })
    }

    /// Wraps all keys anew, under what `zone` holds. What the file has left of how they were wrapped is there until
    /// [`State::overwrite_dead`]. Returns how many.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`]; nothing is changed where one key does not open.
    pub fn rewrap(&self, zone: &str, mut rewrap: impl FnMut(&str, &str) -> Option<String>) -> Result<u64> {
        let keys = self.keys()?;
        self.write(|write, events| {
            let (mark, mut count) = (mark_in(write)?, 0);
            for (name, mut key) in keys {
                let Some(kept) = key.kept_mut() else { continue };
                kept.wrapped = marked(&mark, &rewrap(&name, kept.wrapped()).ok_or_else(damaged)?);
                put(write, &name, &key)?;
                count += 1;
            }
            let mut master = write.open_table(MASTER)?;
            master.insert(ZONE, marked(&mark, zone).as_bytes())?;
            master.insert(DEAD, &[][..])?;
            events.push(Event::KeysRewrapped { keys: count });
            Ok(count)
        })
    }

    /// Whether the file may have left what is to be overwritten: that was cut off.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn has_dead(&self) -> Result<bool> {
        self.read(|read| Ok(read.open_table(MASTER)?.get(DEAD)?.is_some()))
    }

    /// Overwrites what the file has left, in pages that are free, of keys that are gone and of how keys were wrapped
    /// before; notes that of the keys that are gone. Returns how many places it were. Whoever needs the state waits
    /// meanwhile.
    ///
    /// # Errors
    /// [`ServerError::File`], [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn overwrite_dead(&self) -> Result<u64> {
        let (keys, count) = {
            // Nobody makes a key meanwhile, which would be one that is not known.
            let database = self.database.write();
            // What a crash could go back to is behind the change, too.
            for _ in 0..2 {
                let write = database.begin_write().map_err(|error| self.failed(error))?;
                write.commit().map_err(|error| self.failed(error))?;
            }
            let read = database.begin_read().map_err(|error| self.failed(error))?;
            let Some(copied) = copied(&read).map_err(|error| self.failed(error))? else { return Ok(0) };
            drop(read);
            let wrapped = copied.keys.values().filter_map(Key::kept).map(|kept| kept.wrapped.clone());
            let live: BTreeSet<String> = wrapped.chain([copied.zone]).collect();
            let done = overwrite(&self.path, &copied.mark, &live);
            (copied.keys, done.map_err(ServerError::file("overwrite keys in", &self.path))?)
        };
        self.verify()?;
        self.write(|write, _| {
            write.open_table(MASTER)?.remove(DEAD)?;
            for (name, key) in keys {
                match key {
                    Key::Deleted(gone) if gone.overwritten.is_none() => {
                        put(write, &name, &Key::Deleted(GoneKey { overwritten: Some(count), ..gone }))?;
                    }
                    _ => {}
                }
            }
            Ok(())
        })?;
        Ok(count)
    }

    /// What a backup has of keys.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::Database`].
    pub(super) fn copied_keys(&self) -> Result<Option<CopiedKeys>> {
        self.read(copied)
    }
}

fn copied(read: &redb::ReadTransaction) -> Rows<Option<CopiedKeys>> {
    let table = read.open_table(MASTER)?;
    let row = |name| Rows::Ok(table.get(name)?.map(|row| row.value().to_vec()));
    let Some((mark, zone)) = row(MARK)?.zip(row(ZONE)?) else { return Ok(None) };
    let zone = String::from_utf8(zone).map_err(|_| damaged())?;
    Ok(Some(CopiedKeys { mark: HEXLOWER.encode(&mark), zone, keys: all(read)? }))
}

fn all(read: &redb::ReadTransaction) -> Rows<BTreeMap<String, Key>> {
    let mut keys = BTreeMap::new();
    for row in read.open_table(KEYS)?.iter()? {
        let (name, key) = row?;
        keys.insert(name.value().to_owned(), parsed(key.value())?);
    }
    Ok(keys)
}

/// Makes these the keys of a backup.
pub(super) fn fill(write: &WriteTransaction, copied: &CopiedKeys) -> Rows<()> {
    let mark = HEXLOWER.decode(copied.mark.as_bytes()).map_err(|_| damaged())?;
    let mut master = write.open_table(MASTER)?;
    master.insert(MARK, &mark[..])?;
    master.insert(ZONE, copied.zone.as_bytes())?;
    copied.keys.iter().try_for_each(|(name, key)| put(write, name, key))
}

/// Overwrites whatever stands behind the mark and is not one of the texts that are in use.
fn overwrite(path: &std::path::Path, mark: &str, live: &BTreeSet<String>) -> std::io::Result<u64> {
    let file = File::options().read(true).write(true).open(path)?;
    let (mut at, mut count, mut bytes) = (0, 0, vec![0; AT_ONCE + MARK_LEN + LENGTH_LEN + WRAPPED_MAX]);
    loop {
        let read = read_at_most(&file, &mut bytes, at)?;
        let mut from = 0;
        while let Some(found) = find(&bytes[from..read.min(AT_ONCE + MARK_LEN)], mark.as_bytes()) {
            let begin = from + found;
            from = begin + 1;
            let body = begin + MARK_LEN + LENGTH_LEN;
            let length = bytes.get(begin + MARK_LEN..body).and_then(|digits| std::str::from_utf8(digits).ok());
            let length = length.and_then(|digits| usize::from_str_radix(digits, 16).ok());
            let Some(length) = length.filter(|length| *length <= WRAPPED_MAX && body + *length <= read) else {
                continue;
            };
            let is_live = std::str::from_utf8(&bytes[begin..body + length]).is_ok_and(|text| live.contains(text));
            // The mark goes last: what is cut off is found again.
            if !is_live {
                file.write_all_at(&vec![b'0'; length], at + body as u64)?;
                file.sync_data()?;
                file.write_all_at(&[b'0'; MARK_LEN + LENGTH_LEN], at + begin as u64)?;
                count += 1;
            }
        }
        if read <= AT_ONCE {
            file.sync_all()?;
            return Ok(count);
        }
        at += AT_ONCE as u64;
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

fn read_at_most(file: &File, bytes: &mut [u8], at: u64) -> std::io::Result<usize> {
    let mut length = 0;
    while length < bytes.len() {
        match file.read_at(&mut bytes[length..], at + length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

#[cfg(test)]
mod tests;
