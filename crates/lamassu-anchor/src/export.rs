//! All rows of an anchor as one stream: a backup, a move to another machine, or a comparison.
//!
//! ```text
//! offset  bytes
//!      0     15  "lamassu anchor\0"
//!     15      1  version, 1
//!     16     16  the vault's id
//!     32      8  revision, little-endian
//!     40         frames: length u32, 1 to 1 MiB; whole rows
//!             4  0
//!             8  how many rows
//!            32  HMAC-SHA-256 over the digest
//! ```
//!
//! A row is its table (u8, the place in [`Space::ALL`]), then its key and its value, each behind its length (LEB128).
//! Rows are strictly ascending by table and key, so that equal anchors have equal digests; the first is the vault's.
//!
//! The digest is a chain, so that a stream of any length is read in little memory. It starts as SHA-256 of the head;
//! each frame changes it to SHA-256(digest ‖ frame); the number of rows closes it. The division into frames is fixed:
//! each frame takes rows until the next one would exceed 64 KiB; a longer row has a frame of its own.
//!
//! Guarantee: a stream that does not parse, is incomplete, or does not verify is an error. Rows are passed on *before*
//! the end is verified: the caller must keep them apart until then.

use crate::codec::{Reader, put};
use crate::queue::{VAULT_KEY, decode_digests};
use crate::row::{EntryRow, Intent, Row, VaultRow};
use crate::table::{Change, DiskTable, Space, Table};
use crate::{AnchorError, ObjectKind, Revision};
use lamassu_crypto::{Secret, wrap};
use lamassu_format::header::VaultId;
use std::io::{self, Read, Write};

const MAGIC: &[u8; 15] = b"lamassu anchor\0";
const VERSION: u8 = 1;
const HEAD_LEN: usize = 40;
/// Bytes of a frame, unless one row is longer.
const FRAME_LEN: usize = 64 << 10;
/// Most bytes of a frame.
const FRAME_MAX: usize = 1 << 20;
/// Bytes of the code at the end.
const MAC_LEN: usize = 32;

/// Describes an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exported {
    /// the vault's id
    pub vault: VaultId,
    /// the anchor's revision
    pub revision: Revision,
    /// the number of rows
    pub rows: u64,
    /// over all of them
    pub digest: [u8; 32],
}

/// Errors of writing or reading an export.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The data is not an export.
    #[error("this is no export of an anchor")]
    NotAnExport,
    /// A later version of Lamassu wrote it.
    #[error("the export has version {found}, which is not supported; use a newer lamassu")]
    Version {
        /// version found
        found: u8,
    },
    /// It is incomplete, or invalid.
    #[error("the export is damaged: it makes no sense, or ends, behind {rows} rows")]
    Damaged {
        /// valid rows before the damage
        rows: u64,
    },
    /// It was changed, or made under other keys.
    #[error("the export does not verify: it was changed, or made under another file key of the vault")]
    Unauthentic,
    /// An error of the anchor.
    #[error(transparent)]
    Anchor(#[from] AnchorError),
    /// The system could not read or write.
    #[error("cannot {op} the export: {source}")]
    Io {
        /// the operation
        op: &'static str,
        /// the system's error
        source: io::Error,
    },
}

fn failed(op: &'static str) -> impl Fn(io::Error) -> ExportError {
    move |source| ExportError::Io { op, source }
}

/// Writes all rows of an anchor, as of one moment.
///
/// # Errors
/// [`ExportError::Anchor`], [`ExportError::Io`].
pub fn write(table: &DiskTable, key: &Secret<32>, out: &mut dyn Write) -> Result<Exported, ExportError> {
    let (mut out, mut writer) = (Some(out), None);
    table.visit_all(|space, name, value| {
        if space == Space::Vault
            && let Some(out) = out.take()
        {
            writer = Some(Writer::begin(out, &VaultRow::decode(value)?)?);
        }
        // The vault's row is the first one.
        let writer = writer.as_mut().ok_or(AnchorError::Empty)?;
        writer.row(space, name, value)
    })?;
    writer.ok_or(AnchorError::Empty)?.end(key)
}

/// What [`write()`] would write, without writing it.
///
/// # Errors
/// [`ExportError::Anchor`].
pub fn digest(table: &DiskTable) -> Result<Exported, ExportError> {
    // The digest does not depend on the key.
    write(table, &Secret::new(&mut [0; 32]), &mut io::sink())
}

/// Writes rows, in the order in which the caller passes them.
pub struct Writer<'a> {
    out: &'a mut dyn Write,
    exported: Exported,
    frame: Vec<u8>,
}

impl<'a> Writer<'a> {
    /// Begins the stream.
    ///
    /// # Errors
    /// [`ExportError::Io`].
    pub fn begin(out: &'a mut dyn Write, vault: &VaultRow) -> Result<Writer<'a>, ExportError> {
        let mut head = [0; HEAD_LEN];
        head[..15].copy_from_slice(MAGIC);
        head[15] = VERSION;
        head[16..32].copy_from_slice(&vault.vault.0);
        head[32..].copy_from_slice(&vault.revision.0.to_le_bytes());
        out.write_all(&head).map_err(failed("write"))?;
        let exported = Exported { vault: vault.vault, revision: vault.revision, rows: 0, digest: wrap::sha256(&head) };
        Ok(Writer { out, exported, frame: Vec::new() })
    }

    /// Writes a row.
    ///
    /// # Errors
    /// [`ExportError::Io`]; [`ExportError::Damaged`] for a row that is too long.
    pub fn row(&mut self, space: Space, key: &[u8], value: &[u8]) -> Result<(), ExportError> {
        let mut row = vec![number_of(space)];
        for part in [key, value] {
            put(&mut row, part.len() as u64);
            row.extend(part);
        }
        if row.len() > FRAME_MAX {
            return Err(ExportError::Damaged { rows: self.exported.rows });
        }
        if !self.frame.is_empty() && self.frame.len() + row.len() > FRAME_LEN {
            self.put_frame()?;
        }
        self.frame.extend(row);
        self.exported.rows += 1;
        Ok(())
    }

    fn put_frame(&mut self) -> Result<(), ExportError> {
        let len = (self.frame.len() as u32).to_le_bytes();
        let written = self.out.write_all(&len).and_then(|()| self.out.write_all(&self.frame));
        written.map_err(failed("write"))?;
        self.exported.digest = chained(&self.exported.digest, &self.frame);
        self.frame.clear();
        Ok(())
    }

    /// Ends the stream; its digest is final.
    ///
    /// # Errors
    /// [`ExportError::Io`].
    pub fn end(mut self, key: &Secret<32>) -> Result<Exported, ExportError> {
        if !self.frame.is_empty() {
            self.put_frame()?;
        }
        let rows = self.exported.rows.to_le_bytes();
        self.exported.digest = chained(&self.exported.digest, &rows);
        let mac = wrap::hmac(key, &self.exported.digest);
        let end = [&0_u32.to_le_bytes()[..], &rows, &mac].concat();
        self.out.write_all(&end).and_then(|()| self.out.flush()).map_err(failed("write"))?;
        Ok(self.exported)
    }
}

/// Reads an export of a vault and verifies it. `each` gets every row before that is complete.
///
/// # Errors
/// [`ExportError`], [`AnchorError::Foreign`] for another vault's; then the rows that `each` got must be discarded.
pub fn read(
    from: &mut dyn Read,
    vault: &VaultId,
    key: &Secret<32>,
    each: &mut dyn FnMut(Change) -> Result<(), AnchorError>,
) -> Result<Exported, ExportError> {
    let (exported, mac) = parse(from, Some(vault), each)?;
    match wrap::equal(&wrap::hmac(key, &exported.digest), &mac) {
        true => Ok(exported),
        false => Err(ExportError::Unauthentic),
    }
}

/// The same without the key, for one vault or for any. Only the form is checked.
///
/// # Errors
/// As [`read`], but for [`ExportError::Unauthentic`].
pub fn parse(
    from: &mut dyn Read,
    of: Option<&VaultId>,
    each: &mut dyn FnMut(Change) -> Result<(), AnchorError>,
) -> Result<(Exported, [u8; MAC_LEN]), ExportError> {
    let mut head = [0; HEAD_LEN];
    exactly(from, &mut head, 0).map_err(|error| match error {
        ExportError::Damaged { .. } => ExportError::NotAnExport,
        error => error,
    })?;
    if head[..15] != *MAGIC {
        return Err(ExportError::NotAnExport);
    }
    if head[15] != VERSION {
        return Err(ExportError::Version { found: head[15] });
    }
    let (mut vault, mut revision) = ([0; 16], [0; 8]);
    vault.copy_from_slice(&head[16..32]);
    revision.copy_from_slice(&head[32..]);
    if of.is_some_and(|of| *of != VaultId(vault)) {
        return Err(AnchorError::Foreign.into());
    }
    let revision = Revision(u64::from_le_bytes(revision));
    let mut rows = Rows { vault: VaultId(vault), revision, degree: 0, last: None, count: 0 };
    let mut digest = wrap::sha256(&head);
    let mut frame = Vec::new();
    loop {
        let mut len = [0; 4];
        exactly(from, &mut len, rows.count)?;
        match u32::from_le_bytes(len) as usize {
            0 => break,
            len if len > FRAME_MAX => return Err(rows.damaged()),
            len => frame.resize(len, 0),
        }
        exactly(from, &mut frame, rows.count)?;
        digest = chained(&digest, &frame);
        rows.take(&frame, each)?;
    }
    let (mut count, mut mac) = ([0; 8], [0; MAC_LEN]);
    exactly(from, &mut count, rows.count)?;
    exactly(from, &mut mac, rows.count)?;
    let is_end = from.read(&mut [0]).map_err(failed("read"))? == 0;
    if !is_end || u64::from_le_bytes(count) != rows.count || rows.degree == 0 {
        return Err(rows.damaged());
    }
    let digest = chained(&digest, &count);
    Ok((Exported { vault: VaultId(vault), revision, rows: rows.count, digest }, mac))
}

/// Checks that the anchor of this vault could have written every row of a table. Returns its revision, and the number
/// of rows.
///
/// # Errors
/// [`ExportError::Damaged`], [`ExportError::Anchor`].
pub fn check(table: &dyn Table, vault: &VaultId) -> Result<(Revision, u64), ExportError> {
    let mut rows: Option<Rows> = None;
    table.visit_all(|space, key, value| {
        let rows = match &mut rows {
            Some(rows) => rows,
            // The vault's row is the first one.
            None => {
                let revision = VaultRow::decode(value)?.revision;
                rows.insert(Rows { vault: *vault, revision, degree: 0, last: None, count: 0 })
            }
        };
        rows.check(space, key, value).ok_or_else(|| rows.damaged())?;
        rows.count += 1;
        Ok::<(), ExportError>(())
    })?;
    rows.map(|rows| (rows.revision, rows.count)).ok_or(AnchorError::Empty.into())
}

/// Whether the anchor of this vault could have written a row. The row of the vault may have another revision, but not
/// another degree: all other rows were written for that.
pub fn is_row_of(vault: &VaultRow, space: Space, key: &[u8], value: &[u8]) -> bool {
    let revision = match space {
        Space::Vault => VaultRow::decode(value).ok().filter(|row| row.degree_log2 == vault.degree_log2),
        _ => Some(vault.clone()),
    };
    let Some(VaultRow { revision, .. }) = revision else { return false };
    let mut rows = Rows { vault: vault.vault, revision, degree: 1 << vault.degree_log2, last: None, count: 0 };
    rows.check(space, key, value).is_some()
}

fn exactly(from: &mut dyn Read, bytes: &mut [u8], rows: u64) -> Result<(), ExportError> {
    from.read_exact(bytes).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => ExportError::Damaged { rows },
        _ => failed("read")(error),
    })
}

/// Rows of an export during parsing.
struct Rows {
    vault: VaultId,
    revision: Revision,
    /// degree of the trees, once the vault's row was read; 0 before
    degree: usize,
    last: Option<(Space, Vec<u8>)>,
    count: u64,
}

impl Rows {
    fn damaged(&self) -> ExportError {
        ExportError::Damaged { rows: self.count }
    }

    fn take(
        &mut self,
        frame: &[u8],
        each: &mut dyn FnMut(Change) -> Result<(), AnchorError>,
    ) -> Result<(), ExportError> {
        let mut from = Reader(frame);
        while !from.0.is_empty() {
            let (space, key, value) = row(&mut from).ok_or_else(|| self.damaged())?;
            let name = (space, key.to_vec());
            if self.last.as_ref().is_some_and(|last| *last >= name) {
                return Err(self.damaged());
            }
            self.check(space, key, value).ok_or_else(|| self.damaged())?;
            self.last = Some(name);
            self.count += 1;
            each(Change { space, key: key.to_vec(), value: Some(value.to_vec()) })?;
        }
        Ok(())
    }

    /// Checks that an anchor could have written this row.
    fn check(&mut self, space: Space, key: &[u8], value: &[u8]) -> Option<()> {
        let has_len = |len: usize| (key.len() == len).then_some(());
        match space {
            Space::Vault => {
                let vault = VaultRow::decode(value).ok()?;
                self.degree = 1 << vault.degree_log2;
                let is_it = key == VAULT_KEY && vault.vault == self.vault && vault.revision == self.revision;
                is_it.then_some(())
            }
            // The vault's row must come first.
            _ if self.degree == 0 => None,
            Space::Objects => has_len(8).and_then(|()| Row::decode(value).ok().map(drop)),
            Space::Open => has_len(8).filter(|()| value.is_empty()),
            Space::Entries => has_len(24).and_then(|()| EntryRow::decode(value).ok().map(drop)),
            Space::Held => has_len(16).and_then(|()| decode_digests(value, self.degree).ok().map(drop)),
            Space::Intents => has_len(8).and_then(|()| Intent::decode(value).ok().map(drop)),
            Space::Head => None,
        }
    }
}

fn row<'a>(from: &mut Reader<'a>) -> Option<(Space, &'a [u8], &'a [u8])> {
    let [space] = from.bytes()?;
    let space = *Space::ALL.get(usize::from(space))?;
    Some((space, part(from)?, part(from)?))
}

fn part<'a>(from: &mut Reader<'a>) -> Option<&'a [u8]> {
    let len = usize::try_from(from.number()?).ok()?;
    let (part, rest) = from.0.split_at_checked(len)?;
    from.0 = rest;
    Some(part)
}

fn number_of(space: Space) -> u8 {
    Space::ALL.iter().position(|one| *one == space).map_or(0, |at| at as u8)
}

fn chained(digest: &[u8; 32], bytes: &[u8]) -> [u8; 32] {
    wrap::sha256(&[&digest[..], bytes].concat())
}

/// Whether a copy of a vault keeps what grants rights: device nodes, and set-id bits of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Kept as in the original.
    Kept,
    /// Both dropped.
    Dropped,
}

/// Copies all rows for a copy of the vault in the store: the same objects and names, another id. Its header and its
/// history are unset. The vault's row comes last: an interrupted copy is not an anchor.
///
/// # Errors
/// Those of both tables.
pub fn copy_to(from: &DiskTable, to: &dyn Table, vault: VaultId, rights: Rights) -> Result<(), AnchorError> {
    /// Rows in one commit.
    const AT_ONCE: usize = 4096;
    let mut changes = Vec::new();
    let mut own = None;
    from.visit_all(|space, key, value| {
        if space == Space::Vault {
            let row = VaultRow::decode(value)?;
            own = Some(VaultRow {
                vault,
                revision: Revision(1),
                header: crate::row::Sealed::Nothing,
                history: Default::default(),
                next_history: None,
                ..row
            });
            return Ok(());
        }
        let value = match rights {
            Rights::Kept => Some(value.to_vec()),
            Rights::Dropped => without_rights(space, value)?,
        };
        changes.extend(value.map(|value| Change { space, key: key.to_vec(), value: Some(value) }));
        if changes.len() >= AT_ONCE {
            to.commit(&changes)?;
            changes.clear();
        }
        Ok::<(), AnchorError>(())
    })?;
    let own = own.ok_or(AnchorError::Empty)?;
    changes.push(Change { space: Space::Vault, key: VAULT_KEY.to_vec(), value: Some(own.encode()) });
    to.commit(&changes)
}

/// A row of a copy without rights; `None`: the row is left out.
fn without_rights(space: Space, value: &[u8]) -> Result<Option<Vec<u8>>, AnchorError> {
    /// Set-user-id and set-group-id.
    const SET_ID: u32 = 0o6000;
    let is_device = |kind| matches!(kind, ObjectKind::Char | ObjectKind::Block);
    match space {
        Space::Entries if is_device(EntryRow::decode(value)?.kind) => Ok(None),
        Space::Objects => {
            let mut row = Row::decode(value)?;
            // On a directory these bits grant no rights.
            if row.kind() != ObjectKind::Dir {
                row.mode &= !SET_ID;
            }
            Ok((!is_device(row.kind())).then(|| row.encode()))
        }
        Space::Vault | Space::Open | Space::Entries | Space::Held | Space::Intents => Ok(Some(value.to_vec())),
        Space::Head => Ok(None),
    }
}
