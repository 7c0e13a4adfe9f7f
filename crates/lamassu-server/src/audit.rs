//! The audit log: which hosts were let in, and which host had which vault when. An entry about hosts, tokens or
//! sessions is made durable in the same transaction as the change that it records. An entry about a file (an anchor
//! that is received, taken back or retired) follows at once.
//!
//! Entries are chained: each has the digest of the whole log up to it, its *head*. A log that was changed, or cut in
//! the middle, does not verify. A log that was rewritten from some entry on does verify. Comparing it with a head that
//! was noted elsewhere shows the change (the system's log gets each head).

use crate::ServerError;
use crate::writing::{WriteTable, Writing};
use data_encoding::HEXLOWER;
use lamassu_crypto::wrap::sha256;
use redb::{ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// By number: the entry's head, 32 bytes, and an [`AuditEntry`], JSON.
pub(crate) const ENTRIES: TableDefinition<'static, u64, &'static [u8]> = TableDefinition::new("audit");
/// [`LAST`]: the number of the last entry that was removed, u64 little-endian, and its head. [`BYTES`]: the bytes of
/// all entries that are kept, u64 little-endian.
pub(crate) const REMOVED: TableDefinition<'static, &'static str, &'static [u8]> = TableDefinition::new("audit removed");
const LAST: &str = "last";
const BYTES: &str = "bytes";

/// How much of the log is kept. The oldest entries beyond either limit are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// entries
    pub entries: u64,
    /// bytes of all entries
    pub bytes: u64,
}

impl Kept {
    /// All of it.
    pub const ALL: Kept = Kept { entries: u64::MAX, bytes: u64::MAX };
    /// By default with etcd: who takes over reads all of it, and hosts wait.
    pub const IN_ETCD: Kept = Kept { entries: 100_000, bytes: 64 << 20 };
}

impl Default for Kept {
    fn default() -> Kept {
        Kept { entries: 1_000_000, bytes: 512 << 20 }
    }
}

/// Entries removed in one transaction at most: after a limit was lowered, it takes several to reach it.
const REMOVED_AT_ONCE: usize = 1000;

/// What an entry records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case", tag = "event")]
pub enum Event {
    /// The server began to serve.
    Started {
        /// of the program
        version: String,
    },
    /// A token was made for a host.
    TokenMade {
        /// the host
        host: String,
        /// vaults that it may use, hex
        vaults: BTreeSet<String>,
        /// end of validity, seconds since 1970
        until: u64,
    },
    /// The tokens of a host were invalidated.
    TokenVoid {
        /// the host
        host: String,
    },
    /// A host has joined.
    Joined {
        /// the host
        host: String,
        /// its public key, a subject public key info, hex
        key: String,
    },
    /// A host was revoked.
    Revoked {
        /// the host
        host: String,
    },
    /// A host may use a vault.
    Granted {
        /// the host
        host: String,
        /// the vault, hex
        vault: String,
    },
    /// A host may no longer use a vault.
    GrantEnded {
        /// the host
        host: String,
        /// the vault, hex
        vault: String,
    },
    /// A host has begun a session of a vault.
    SessionBegan {
        /// the host
        host: String,
        /// the vault, hex
        vault: String,
        /// the session's number
        session: u64,
        /// whether it may write
        writes: bool,
    },
    /// A session has ended.
    SessionEnded {
        /// the host
        host: String,
        /// the vault, hex
        vault: String,
        /// the session's number
        session: u64,
        /// the reason
        why: Why,
        /// The host that has the lock which this one claimed, or one that conflicts. Either of the two may have lied.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        against: Option<String>,
    },
    /// A host has given the anchor of a vault to the server.
    AnchorPut {
        /// the host
        host: String,
        /// the vault, hex
        vault: String,
        /// for a dataset: the vault that it lies in, hex
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lies_in: Option<String>,
    },
    /// An anchor was found at a start that the state did not know of: the server had ended just when the anchor was
    /// received or taken back.
    AnchorFound {
        /// the vault, hex
        vault: String,
    },
    /// A host has taken the anchor back.
    AnchorTaken {
        /// the host
        host: String,
        /// the vault, hex
        vault: String,
    },
    /// An administrator has retired the anchor.
    AnchorForgotten {
        /// the vault, hex
        vault: String,
    },
    /// A host was granted a key.
    KeyGranted {
        /// the host
        host: String,
        /// the key's name
        key: String,
    },
    /// A host may no longer have a key.
    KeyGrantEnded {
        /// the host
        host: String,
        /// the key's name
        key: String,
    },
    /// A key was made at a host's request.
    KeyMade {
        /// the host
        host: String,
        /// the key's name
        key: String,
    },
    /// A key evaluates for a host: noted at the first evaluation, then once in each minute with evaluations.
    KeyEvaluates {
        /// the host
        host: String,
        /// the key's name
        key: String,
        /// elements since the previous entry
        elements: u64,
    },
    /// A host has exceeded its limit of evaluations: noted once an hour.
    EvaluationsLimited {
        /// the host
        host: String,
        /// the key's name
        key: String,
    },
    /// A host was given a key.
    KeyGiven {
        /// the host
        host: String,
        /// the key's name
        key: String,
    },
    /// A key was retired: no host gets it.
    KeyRetired {
        /// its name
        key: String,
    },
    /// A retired key was reinstated.
    KeyReinstated {
        /// its name
        key: String,
    },
    /// A key was deleted.
    KeyDeleted {
        /// its name
        key: String,
        /// identifies the key if a copy turns up
        digest: String,
    },
    /// A master key was set up: keys are kept from now on.
    MasterKeyTaken,
    /// All keys were rewrapped under another master key.
    KeysRewrapped {
        /// how many
        keys: u64,
    },
    /// A policy came into force.
    PolicyTaken {
        /// how many rules it has
        rules: u64,
        /// SHA-256 of its text, hex
        digest: String,
    },
    /// The policy refused a host's request. The same refusal is noted once a minute at most.
    PolicyRefused {
        /// the host
        host: String,
        /// the vault, hex
        vault: String,
        /// the rule's name
        rule: String,
        /// what it forbids
        what: String,
        /// the request: a session, a commit, or to put an anchor
        at: String,
    },
    /// A backup of the server is being made: it contains the authority's key.
    BackupBegun,
    /// This directory was made as a backup: what the server does from here on is based on the backup's data.
    MadeFromBackup,
    /// A host has reported its state of a vault that was restored from a backup.
    Reconciled {
        /// the host
        host: String,
        /// the vault, hex
        vault: String,
        /// Whether the host had newer rows, which the server has taken.
        was_newer: bool,
    },
    /// All hosts have reported: the vault can be used again.
    Reopened {
        /// the vault, hex
        vault: String,
    },
    /// An administrator has acknowledged an alert.
    AlertAcknowledged {
        /// its number
        alert: u64,
        /// the administrator's note
        #[serde(default, skip_serializing_if = "String::is_empty")]
        note: String,
    },
    /// An administrator has closed an alert.
    AlertClosed {
        /// its number
        alert: u64,
        /// the vault, hex
        vault: String,
        /// what was found
        kind: String,
    },
}

/// The reason why a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    /// The host ended it.
    Left,
    /// It was silent for a term.
    Silent,
    /// It did not release a recalled lease within a term, although it sent heartbeats.
    HeldOn,
    /// Its process is gone: the same host has begun another session.
    Replaced,
    /// The host was revoked, or may no longer use the vault.
    Revoked,
    /// It reported what it cannot have.
    Misreported,
}

/// An entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// from 1 on
    pub number: u64,
    /// time of the event, seconds since 1970
    pub time: u64,
    /// what it records
    #[serde(flatten)]
    pub event: Event,
}

/// The end of a chain: the number and the head of its last entry; both zero before the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainEnd {
    /// of the entry
    pub number: u64,
    /// of the entry
    #[serde(with = "hex")]
    pub head: [u8; 32],
}

impl ChainEnd {
    /// The head, for people.
    pub fn head_hex(&self) -> String {
        HEXLOWER.encode(&self.head)
    }
}

mod hex {
    use data_encoding::HEXLOWER;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(bytes: &[u8; 32], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&HEXLOWER.encode(bytes))
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<[u8; 32], D::Error> {
        let text = String::deserialize(from)?;
        let bytes = HEXLOWER.decode(text.as_bytes()).ok().and_then(|bytes| bytes.try_into().ok());
        bytes.ok_or_else(|| D::Error::custom("not 64 hexadecimal digits"))
    }
}

/// An entry as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainedEntry {
    /// of the entry
    #[serde(with = "hex")]
    pub head: [u8; 32],
    /// an [`AuditEntry`], JSON
    pub entry: String,
}

impl ChainedEntry {
    /// The end of the chain with this entry, and the entry, if it follows `place`.
    pub fn after(&self, place: ChainEnd) -> Option<(ChainEnd, AuditEntry)> {
        let entry: AuditEntry = serde_json::from_str(&self.entry).ok()?;
        let is_next = entry.number == place.number + 1 && self.head == head_after(&place.head, &self.entry);
        is_next.then_some((ChainEnd { number: entry.number, head: self.head }, entry))
    }

    /// The head, for people.
    pub fn head_hex(&self) -> String {
        HEXLOWER.encode(&self.head)
    }

    /// The entry with its head, one JSON document.
    pub fn json(&self) -> String {
        // An object, as all entries are.
        format!("{},\"head\":\"{}\"}}", self.entry.strip_suffix('}').unwrap_or_default(), self.head_hex())
    }

    fn of(bytes: &[u8]) -> Option<ChainedEntry> {
        let (head, entry) = bytes.split_first_chunk()?;
        Some(ChainedEntry { head: *head, entry: std::str::from_utf8(entry).ok()?.to_owned() })
    }

    /// The value of its row.
    pub(crate) fn row(&self) -> Vec<u8> {
        [&self.head[..], self.entry.as_bytes()].concat()
    }

    /// Writes it to the system's log.
    pub(crate) fn say(&self) {
        tracing::info!(target: "audit", head = HEXLOWER.encode(&self.head), "{}", self.entry);
    }
}

fn head_after(head: &[u8; 32], entry: &str) -> [u8; 32] {
    sha256(&[b"lamassu audit", &head[..], entry.as_bytes()].concat())
}

/// Some entries, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Excerpt {
    /// the end of the chain before the first entry, if that is the oldest one kept
    pub begins: Option<ChainEnd>,
    /// the entries
    pub entries: Vec<ChainedEntry>,
}

impl Excerpt {
    /// The end of the chain after these entries, which follow `place`; not verified.
    pub fn end(&self, place: ChainEnd) -> ChainEnd {
        let end = |last: &ChainedEntry| ChainEnd { number: place.number + self.entries.len() as u64, head: last.head };
        self.entries.last().map_or(place, end)
    }

    /// The entries and the end of the chain, if each entry follows the one before, and the first follows `place`.
    ///
    /// # Errors
    /// [`ServerError::Chain`].
    pub fn verified(&self, mut place: ChainEnd) -> crate::Result<(ChainEnd, Vec<AuditEntry>)> {
        let mut entries = Vec::new();
        for kept in &self.entries {
            let (next, entry) = kept.after(place).ok_or(ServerError::Chain { number: place.number + 1 })?;
            place = next;
            entries.push(entry);
        }
        Ok((place, entries))
    }
}

/// Adds entries, in the transaction that makes the changes that they record, and removes the oldest above `most`.
///
/// # Errors
/// Those of redb; [`redb::Error::Corrupted`] if the last entry is invalid.
pub(crate) fn append(
    write: &Writing<'_>,
    time: u64,
    events: Vec<Event>,
    most: Kept,
) -> Result<Vec<ChainedEntry>, redb::Error> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let damaged = || redb::Error::Corrupted("an entry of the audit log".into());
    let mut place = {
        let entries = write.open_table(ENTRIES)?;
        match entries.last()? {
            Some((number, row)) => {
                ChainEnd { number: number.value(), head: ChainedEntry::of(row.value()).ok_or_else(damaged)?.head }
            }
            None => read_removed(&*write.open_table(REMOVED)?)?.ok_or_else(damaged)?,
        }
    };
    let (mut all, begins) = (Vec::new(), place.number + 1);
    for event in events {
        let entry = AuditEntry { number: place.number + 1, time, event };
        let entry = serde_json::to_string(&entry).map_err(|_| damaged())?;
        let kept = ChainedEntry { head: head_after(&place.head, &entry), entry };
        place = ChainEnd { number: place.number + 1, head: kept.head };
        all.push(kept);
    }
    put_entries(write, begins, &all)?;
    remove_oldest(write, most)?;
    Ok(all)
}

/// Writes entries, whose numbers begin with `first`.
pub(crate) fn put_entries(write: &Writing<'_>, first: u64, all: &[ChainedEntry]) -> Result<(), redb::Error> {
    let (mut entries, mut removed) = (write.open_table(ENTRIES)?, write.open_table(REMOVED)?);
    let mut bytes = read_bytes(&*removed)?;
    for (number, kept) in (first..).zip(all) {
        let row = kept.row();
        bytes += row.len() as u64;
        entries.insert(number, &row[..])?;
    }
    removed.insert(BYTES, &bytes.to_le_bytes()[..])?;
    Ok(())
}

/// Removes the oldest entries above a limit.
fn remove_oldest(write: &Writing<'_>, most: Kept) -> Result<(), redb::Error> {
    let damaged = || redb::Error::Corrupted("an entry of the audit log".into());
    let (mut entries, mut removed) = (write.open_table(ENTRIES)?, write.open_table(REMOVED)?);
    let ends = |entry: Option<(redb::AccessGuard<'_, u64>, _)>| entry.map(|(number, _)| number.value());
    let (Some(first), Some(last)) = (ends(entries.first()?), ends(entries.last()?)) else { return Ok(()) };
    let (mut bytes, mut last_removed) = (read_bytes(&*removed)?, None);
    for number in (first..=last).take(REMOVED_AT_ONCE) {
        if last + 1 - number <= most.entries && bytes <= most.bytes {
            break;
        }
        let row = entries.remove(number)?.ok_or_else(damaged)?;
        bytes = bytes.saturating_sub(row.value().len() as u64);
        last_removed = Some(ChainEnd { number, head: ChainedEntry::of(row.value()).ok_or_else(damaged)?.head });
    }
    if let Some(place) = last_removed {
        removed.insert(BYTES, &bytes.to_le_bytes()[..])?;
        put_removed(&mut removed, place)?;
    }
    Ok(())
}

/// The bytes of all entries that are kept.
fn read_bytes(removed: &impl ReadableTable<&'static str, &'static [u8]>) -> Result<u64, redb::Error> {
    let bytes = removed.get(BYTES)?.map(|row| row.value().try_into().map(u64::from_le_bytes));
    bytes.unwrap_or(Ok(0)).map_err(|_| redb::Error::Corrupted("the length of the audit log".into()))
}

/// The end of the chain before the first entry that is kept; `None`: it is invalid.
pub(crate) fn read_removed(
    removed: &impl ReadableTable<&'static str, &'static [u8]>,
) -> Result<Option<ChainEnd>, redb::Error> {
    let Some(row) = removed.get(LAST)? else { return Ok(Some(ChainEnd::default())) };
    let place = row
        .value()
        .split_first_chunk()
        .and_then(|(number, head)| Some(ChainEnd { number: u64::from_le_bytes(*number), head: head.try_into().ok()? }));
    Ok(place)
}

pub(crate) fn put_removed(
    removed: &mut WriteTable<'_, &'static str, &'static [u8]>,
    place: ChainEnd,
) -> Result<(), redb::Error> {
    removed.insert(LAST, &[&place.number.to_le_bytes()[..], &place.head].concat()[..])?;
    Ok(())
}

/// The entries after a number, at most `most`.
///
/// # Errors
/// Those of redb; [`redb::Error::Corrupted`].
pub(crate) fn excerpt(read: &redb::ReadTransaction, after: u64, most: usize) -> Result<Excerpt, redb::Error> {
    let damaged = || redb::Error::Corrupted("an entry of the audit log".into());
    let entries = read.open_table(ENTRIES)?;
    let begins = read_removed(&read.open_table(REMOVED)?)?.ok_or_else(damaged)?;
    let mut excerpt = Excerpt { begins: (after <= begins.number).then_some(begins), entries: Vec::new() };
    for row in entries.range(after.saturating_add(1)..)?.take(most) {
        excerpt.entries.push(ChainedEntry::of(row?.1.value()).ok_or_else(damaged)?);
    }
    Ok(excerpt)
}

/// All entries after a number, in a transaction.
///
/// # Errors
/// Those of redb; [`redb::Error::Corrupted`].
pub(crate) fn entries_after(write: &Writing<'_>, after: u64) -> Result<Vec<ChainedEntry>, redb::Error> {
    let damaged = || redb::Error::Corrupted("an entry of the audit log".into());
    let entries = write.open_table(ENTRIES)?;
    let rows = entries.range(after.saturating_add(1)..)?;
    rows.map(|row| ChainedEntry::of(row?.1.value()).ok_or_else(damaged)).collect()
}
