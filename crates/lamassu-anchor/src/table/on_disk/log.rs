//! A log of commits in front of the database. A small commit is one write and one flush of its changes, where redb
//! writes pages of several trees and flushes twice.
//!
//! The log is the first part of the file, a fixed number of blocks that were written when the file was made. So a
//! commit allocates nothing, and its flush writes no metadata of the file system:
//!
//! ```text
//! block 0     magic of the file
//! block 1 …   records, one after the other, each beginning with a block:
//!             magic (8) ‖ generation (8) ‖ sequence (8) ‖ length (8) ‖ SHA-256 of all but itself (32) ‖ changes
//! ```
//!
//! * The **generation** is stored in the database. A commit to the database includes everything that was logged, and
//!   raises the generation in the same transaction: from then on all records in the log are void.
//! * **Sequences** ascend from 0 in a generation. The log ends at the first record that is not valid. A commit returns
//!   when its record is durable, and no two records share a block. So a crash can tear only the last record, whose
//!   commit has not returned.
//! * A valid record beyond the end of the log means that one before it was damaged.

use super::super::packed::{pack, unpack};
use super::super::{Change, Space};
use super::backend::Backend;
use lamassu_crypto::wrap::sha256;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Bound;
use std::os::unix::fs::FileExt;

/// The unit of writing, and of tearing.
pub(super) const BLOCK_LEN: usize = 4096;
/// Number of blocks of the log, with the one for the file's magic.
const BLOCKS: u64 = 256;
/// Where the database begins in the file.
pub(super) const DATABASE_AT: u64 = BLOCKS * BLOCK_LEN as u64;
/// Longest record. Larger changes go to the database directly, since they would be written twice.
const RECORD_MAX: usize = 8 * BLOCK_LEN;
/// The first bytes of the file.
const FILE_MAGIC: &[u8; 16] = b"LAMASSU ANCHOR\0\x01";
/// The first bytes of a record.
const MAGIC: &[u8; 8] = b"ANCHORED";
const HEAD_LEN: usize = 64;
/// Bytes of the head that the digest covers.
const COVERED_LEN: usize = 32;

/// Writes the first part of a new file.
pub(super) fn make_front(file: &File) -> io::Result<()> {
    let mut front = vec![0; DATABASE_AT as usize];
    front[..FILE_MAGIC.len()].copy_from_slice(FILE_MAGIC);
    file.write_all_at(&front, 0)
}

/// Checks the first part of a file.
///
/// # Errors
/// [`io::ErrorKind::UnexpectedEof`]: the file is too short. [`io::ErrorKind::InvalidData`]: it is not an anchor.
pub(super) fn check_front(file: &File) -> io::Result<()> {
    let mut magic = [0; FILE_MAGIC.len()];
    file.read_exact_at(&mut magic, 0)?;
    match (magic == *FILE_MAGIC, file.metadata()?.len() < DATABASE_AT) {
        (true, false) => Ok(()),
        (true, true) => Err(io::ErrorKind::UnexpectedEof.into()),
        (false, _) => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Logged changes that are not in the database yet: the newest value of each key, `None` if it was removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Logged {
    changes: BTreeMap<(Space, Vec<u8>), Option<Vec<u8>>>,
    /// The generation of their records. A database of a later one includes them.
    pub generation: u64,
}

impl Logged {
    /// No changes in a generation.
    pub fn none_of(generation: u64) -> Logged {
        Logged { changes: BTreeMap::new(), generation }
    }

    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Adds the changes of a commit.
    pub fn take(&mut self, changes: impl IntoIterator<Item = Change>) {
        self.changes.extend(changes.into_iter().map(|Change { space, key, value }| ((space, key), value)));
    }

    /// The logged value of a key; the outer `None`: it was not changed.
    pub fn get(&self, space: Space, key: &[u8]) -> Option<Option<&[u8]>> {
        self.changes.get(&(space, key.to_vec())).map(Option::as_deref)
    }

    /// The changed keys of a table, ascending.
    pub fn range(&self, space: Space, from: Bound<&[u8]>) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        let from = match from {
            Bound::Unbounded => Bound::Included((space, Vec::new())),
            from => from.map(|key| (space, key.to_vec())),
        };
        let in_space = self.changes.range((from, Bound::Unbounded)).take_while(move |((own, _), _)| *own == space);
        in_space.map(|((_, key), value)| (&key[..], value.as_deref()))
    }

    /// All changes.
    pub fn changes(&self) -> impl Iterator<Item = (Space, &[u8], Option<&[u8]>)> {
        self.changes.iter().map(|((space, key), value)| (*space, &key[..], value.as_deref()))
    }
}

/// The position of the next record.
#[derive(Debug, Default)]
pub(super) struct Position {
    pub generation: u64,
    sequence: u64,
    block: u64,
    /// A write or a flush has failed, so it is unknown what is durable: the next commit goes to the database.
    pub is_in_doubt: bool,
}

/// A record, and its place.
pub(super) struct Record {
    pub at: u64,
    pub bytes: Vec<u8>,
}

impl Position {
    /// The start of an empty log.
    pub fn front_of(generation: u64) -> Position {
        Position { generation, sequence: 0, block: 1, is_in_doubt: false }
    }

    /// The generation and the sequence of the next record.
    pub fn number(&self) -> (u64, u64) {
        (self.generation, self.sequence)
    }

    /// The record of a commit; `None`: it goes to the database.
    pub fn record(&self, changes: &[Change]) -> Option<Record> {
        let len: usize =
            changes.iter().map(|change| change.key.len() + change.value.as_ref().map_or(0, Vec::len)).sum();
        if self.is_in_doubt || len > RECORD_MAX {
            return None;
        }
        let bytes = encode(self.generation, self.sequence, changes);
        let is_fitting = bytes.len() <= RECORD_MAX && self.block + blocks_of(bytes.len()) <= BLOCKS;
        is_fitting.then(|| Record { at: self.block * BLOCK_LEN as u64, bytes })
    }

    /// A record of this length was made durable.
    pub fn advance(&mut self, len: usize) {
        self.sequence += 1;
        self.block += blocks_of(len);
    }
}

fn blocks_of(len: usize) -> u64 {
    len.div_ceil(BLOCK_LEN) as u64
}

fn encode(generation: u64, sequence: u64, changes: &[Change]) -> Vec<u8> {
    let mut bytes = vec![0; HEAD_LEN];
    bytes.extend(pack(changes));
    let len = (bytes.len() - HEAD_LEN) as u64;
    bytes[..8].copy_from_slice(MAGIC);
    for (at, number) in [(8, generation), (16, sequence), (24, len)] {
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
    }
    let digest = digest_of(&bytes);
    bytes[COVERED_LEN..HEAD_LEN].copy_from_slice(&digest);
    bytes.resize(bytes.len().next_multiple_of(BLOCK_LEN), 0);
    bytes
}

/// The digest of a record without padding.
fn digest_of(record: &[u8]) -> [u8; 32] {
    sha256(&[&record[..COVERED_LEN], &record[HEAD_LEN..]].concat())
}

/// A record at the start of some bytes.
struct Parsed {
    generation: u64,
    sequence: u64,
    len: usize,
    changes: Vec<Change>,
}

/// `None`: the bytes do not start with a complete record.
fn parse(bytes: &[u8]) -> Option<Parsed> {
    let head: &[u8; HEAD_LEN] = bytes.first_chunk()?;
    if !head.starts_with(MAGIC) {
        return None;
    }
    let (numbers, _) = head[8..COVERED_LEN].as_chunks::<8>();
    let [generation, sequence, len] = [0, 1, 2].map(|at| u64::from_le_bytes(numbers[at]));
    let len = HEAD_LEN + usize::try_from(len).ok().filter(|len| *len <= RECORD_MAX)?;
    let record = bytes.get(..len)?;
    if digest_of(record) != head[COVERED_LEN..] {
        return None;
    }
    let changes = unpack(&record[HEAD_LEN..], usize::MAX)?;
    Some(Parsed { generation, sequence, len, changes })
}

/// What the log has of a generation.
pub(super) struct Found {
    pub logged: Logged,
    pub end: Position,
    /// The last record.
    pub last: Option<Record>,
}

/// Reads the records of a generation.
pub(super) fn read(backend: &Backend, generation: u64) -> io::Result<Found> {
    let (mut logged, mut position) = (Logged::none_of(generation), Position::front_of(generation));
    let mut last = None;
    let mut bytes = vec![0; RECORD_MAX];
    while position.block < BLOCKS {
        // Most records are one block.
        let at = position.block * BLOCK_LEN as u64;
        let room = usize::try_from(DATABASE_AT - at).unwrap_or(RECORD_MAX).min(RECORD_MAX);
        backend.read_log(at, &mut bytes[..BLOCK_LEN])?;
        let is_record = bytes.starts_with(MAGIC);
        let mut parsed = parse(&bytes[..BLOCK_LEN]);
        if is_record && parsed.is_none() {
            backend.read_log(at, &mut bytes[..room])?;
            parsed = parse(&bytes[..room]);
        }
        let next = parsed.filter(|parsed| (parsed.generation, parsed.sequence) == (generation, position.sequence));
        let Some(parsed) = next else { break };
        logged.take(parsed.changes);
        let len = parsed.len.next_multiple_of(BLOCK_LEN).min(bytes.len());
        last = Some(Record { at, bytes: bytes[..len].to_vec() });
        position.advance(parsed.len);
    }
    Ok(Found { logged, end: position, last })
}

/// Whether a record follows the end of the log, which only damage explains. No process may be writing the log.
pub(super) fn is_damaged(backend: &Backend, end: &Position) -> io::Result<bool> {
    let at = end.block * BLOCK_LEN as u64;
    let mut rest = vec![0; usize::try_from(DATABASE_AT.saturating_sub(at)).unwrap_or(0)];
    backend.read_log(at, &mut rest)?;
    let later = |parsed: Parsed| parsed.generation == end.generation && parsed.sequence > end.sequence;
    Ok((0..rest.len()).step_by(BLOCK_LEN).any(|at| parse(&rest[at..]).is_some_and(later)))
}

/// Parses a record, for a fuzzer.
#[cfg(feature = "testing")]
pub(super) fn fuzz(bytes: &[u8]) {
    if let Some(Parsed { generation, sequence, len, changes }) = parse(bytes) {
        assert_eq!(encode(generation, sequence, &changes)[..len], bytes[..len], "one encoding");
    }
    // Without the digest, which a fuzzer cannot forge.
    let Some(changes) = unpack(bytes, usize::MAX) else { return };
    assert_eq!(pack(&changes), bytes, "one encoding");
    assert!(changes.is_empty() || unpack(bytes, changes.len() - 1).is_none(), "no more than there may be");
    let record = encode(1, 2, &changes);
    let parsed = parse(&record).filter(|parsed| parsed.changes == changes);
    assert!(parsed.is_some() || bytes.len() > RECORD_MAX, "what was written reads");
}
