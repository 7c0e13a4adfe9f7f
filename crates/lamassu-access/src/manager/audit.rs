//! The audit trail of a policy manager. Each entry carries the digest of the whole trail up to it, its *head*. A
//! changed entry or a gap fails verification. A trail that was rewritten from some entry on verifies; only a head noted
//! elsewhere reveals it.

use crate::{AccessError, Result};
use data_encoding::HEXLOWER;
use lamassu_crypto::wrap::sha256_of;
use redb::{ReadableTable, Table, TableDefinition};
use serde::{Deserialize, Serialize};

/// Key: the entry's number. Value: its head, 32 bytes, then an [`AuditEntry`], JSON.
pub(super) const ENTRIES: TableDefinition<'static, u64, &'static [u8]> = TableDefinition::new("audit");

/// The change that an entry records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum Event {
    /// The manager was created.
    Made {
        /// the tenant's bucket
        bucket: String,
    },
    /// An attribute was declared, or its declaration was changed.
    AttributeSet {
        /// the attribute's name
        name: String,
        /// its kind
        kind: String,
    },
    /// The declaration of an attribute was removed.
    AttributeRemoved {
        /// the attribute's name
        name: String,
    },
    /// A person's attributes were set.
    PersonSet {
        /// the person's name
        person: String,
        /// all attributes of the person, JSON
        attributes: String,
    },
    /// A person was removed.
    PersonRemoved {
        /// the person's name
        person: String,
    },
    /// A rule was written.
    RuleSet {
        /// the rule's name
        rule: String,
        /// Cedar text
        text: String,
    },
    /// A rule was removed.
    RuleRemoved {
        /// the rule's name
        rule: String,
    },
    /// Changed rules, or rules of a new epoch, were published.
    Published {
        /// the bundle's number
        bundle: u64,
        /// the epoch of its tokens
        epoch: u64,
        /// number of its statements
        statements: usize,
    },
    /// A credential was issued.
    Issued {
        /// the person's name
        person: String,
        /// the credential's number
        credential: String,
        /// end of validity, seconds since 1970
        ends: u64,
    },
    /// A credential was revoked.
    Revoked {
        /// the person's name
        person: String,
        /// the credential's number
        credential: String,
    },
    /// A new epoch began: all earlier credentials are invalid.
    Rotated {
        /// the new epoch
        epoch: u64,
    },
}

/// One entry of the trail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// position in the trail, from 1
    pub number: u64,
    /// time of the change, seconds since 1970
    pub time: u64,
    /// the change
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
    let entry = AuditEntry { number: number + 1, time, event };
    let text = serde_json::to_vec(&entry).map_err(|_| damaged())?;
    let row = [&head_after(&head, &text)[..], &text].concat();
    entries.insert(entry.number, &row[..])?;
    Ok(())
}

/// All entries, verified, each with its head as hex.
pub(super) fn verified(
    entries: &impl ReadableTable<u64, &'static [u8]>,
) -> Result<Result<Vec<(AuditEntry, String)>>, redb::Error> {
    let (mut all, mut place, mut head) = (Vec::new(), 0, [0; 32]);
    for row in entries.iter()? {
        let (number, row) = row?;
        let next = split(row.value()).and_then(|(said, text)| {
            let entry: AuditEntry = serde_json::from_slice(text).ok()?;
            let is_next = number.value() == place + 1 && entry.number == place + 1 && said == head_after(&head, text);
            is_next.then_some((said, entry))
        });
        let Some((said, entry)) = next else { return Ok(Err(AccessError::Chain { number: place + 1 })) };
        (place, head) = (place + 1, said);
        all.push((entry, HEXLOWER.encode(&head)));
    }
    Ok(Ok(all))
}
