//! The audit trail of a policy manager. Each entry has the digest of the whole trail up to it, its *head*: one that was
//! changed, or cut in the middle, does not verify. One that was rewritten from some entry on does; a head that was
//! noted elsewhere shows that.

use crate::{AccessError, Result};
use data_encoding::HEXLOWER;
use lamassu_crypto::wrap::sha256_of;
use redb::{ReadableTable, Table, TableDefinition};
use serde::{Deserialize, Serialize};

/// By number: the entry's head, 32 bytes, and an [`Entry`], JSON.
pub(super) const ENTRIES: TableDefinition<'static, u64, &'static [u8]> = TableDefinition::new("audit");

/// What an entry records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum Event {
    /// The manager was made.
    Made {
        /// of the tenant
        bucket: String,
    },
    /// An attribute was declared, or declared otherwise.
    AttributeSet {
        /// the attribute
        name: String,
        /// its kind
        kind: String,
    },
    /// An attribute is declared no more.
    AttributeRemoved {
        /// the attribute
        name: String,
    },
    /// A person has these attributes.
    PersonSet {
        /// the person
        person: String,
        /// JSON
        attributes: String,
    },
    /// A person was removed.
    PersonRemoved {
        /// the person
        person: String,
    },
    /// A rule was written.
    RuleSet {
        /// the rule
        rule: String,
        /// Cedar
        text: String,
    },
    /// A rule was removed.
    RuleRemoved {
        /// the rule
        rule: String,
    },
    /// Other rules, or a new epoch, are in force.
    Published {
        /// the bundle's number
        bundle: u64,
        /// of the tokens
        epoch: u64,
        /// statements
        statements: usize,
    },
    /// A credential was issued.
    Issued {
        /// the person
        person: String,
        /// its number
        credential: String,
        /// s since 1970
        ends: u64,
    },
    /// A credential was revoked.
    Revoked {
        /// the person
        person: String,
        /// its number
        credential: String,
    },
    /// A new epoch begins: all credentials are void.
    Rotated {
        /// the new one
        epoch: u64,
    },
}

/// An entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// from 1 on
    pub number: u64,
    /// s since 1970
    pub time: u64,
    /// what it records
    #[serde(flatten)]
    pub event: Event,
}

fn head_after(head: &[u8; 32], entry: &[u8]) -> [u8; 32] {
    sha256_of(&[b"lamassu policy audit", head, entry])
}

fn split(row: &[u8]) -> Option<([u8; 32], &[u8])> {
    let (head, entry) = row.split_first_chunk::<32>()?;
    Some((*head, entry))
}

/// Adds an entry, in the transaction that makes the change it records.
pub(super) fn append(entries: &mut Table<'_, u64, &'static [u8]>, time: u64, event: Event) -> Result<(), redb::Error> {
    let damaged = || redb::Error::Corrupted("an entry of the audit trail".into());
    let (number, head) = match entries.last()? {
        Some((number, row)) => (number.value(), split(row.value()).ok_or_else(damaged)?.0),
        None => (0, [0; 32]),
    };
    let entry = Entry { number: number + 1, time, event };
    let text = serde_json::to_vec(&entry).map_err(|_| damaged())?;
    let row = [&head_after(&head, &text)[..], &text].concat();
    entries.insert(entry.number, &row[..])?;
    Ok(())
}

/// All entries, verified, each with its head in hex.
pub(super) fn verified(
    entries: &impl ReadableTable<u64, &'static [u8]>,
) -> Result<Result<Vec<(Entry, String)>>, redb::Error> {
    let (mut all, mut place, mut head) = (Vec::new(), 0, [0; 32]);
    for row in entries.iter()? {
        let (number, row) = row?;
        let next = split(row.value()).and_then(|(said, text)| {
            let entry: Entry = serde_json::from_slice(text).ok()?;
            let is_next = number.value() == place + 1 && entry.number == place + 1 && said == head_after(&head, text);
            is_next.then_some((said, entry))
        });
        let Some((said, entry)) = next else { return Ok(Err(AccessError::Chain { number: place + 1 })) };
        (place, head) = (place + 1, said);
        all.push((entry, HEXLOWER.encode(&head)));
    }
    Ok(Ok(all))
}
