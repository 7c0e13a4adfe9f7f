//! Compares the records outside of a vault's tree with its anchor, without a key: the header, the history and the
//! record of sessions.

use super::Anchors;
use crate::{Error, Result};
use lamassu_anchor::{Anchor, AnchorError, Digest, VaultRow};
use lamassu_format::header::{HistoryHead, HistoryMark, VaultHeader, VaultId};
use lamassu_format::name;
use lamassu_keys::{HistoryError, header_file, history, witness};
use lamassu_vault::VaultError;
use lamassu_vault::event::IntegrityKind;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// How often the records are read again if a writer replaces them meanwhile.
const LOOKS_MAX: u32 = 5;

/// A record that differs from what the anchor knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordFinding {
    /// stale, or missing
    pub kind: IntegrityKind,
    /// its name in the vault's directory
    pub name: &'static str,
    /// a sentence for people
    pub what: &'static str,
}

/// The result of a comparison.
#[derive(Clone, Debug, Default)]
pub struct ComparedRecords {
    /// the records that differ
    pub findings: Vec<RecordFinding>,
    /// the history was not compared, because this process may not read it
    pub is_history_unreadable: bool,
}

impl Anchors {
    /// Opens the anchor of a dataset for reading, by the dataset's id; it may be in use. `None`: it has none on this
    /// host.
    ///
    /// # Errors
    /// As [`Anchors::look`].
    pub fn look_at_dataset(&self, id: &VaultId) -> Result<Option<Anchor>> {
        let table = match self.look(id) {
            Err(Error::Vault(VaultError::Anchor(AnchorError::Missing { .. })) | Error::NoAnchorPlace) => {
                return Ok(None);
            }
            found => found?.1,
        };
        Ok(Some(Anchor::open(Arc::new(table), id)?))
    }

    /// Compares the records of a dataset with its anchor, which may be in use. `dir`: its directory in the store.
    /// `None`: it has no anchor on this host.
    ///
    /// # Errors
    /// As [`compare_records`].
    pub fn compare_records_of_dataset(&self, dir: &Path) -> Result<Option<ComparedRecords>> {
        let id = header_file::read::<VaultHeader>(&dir.join(name::HEADER))?.id();
        let anchor = self.look_at_dataset(&id)?;
        anchor.map(|anchor| compare_records(dir, &anchor)).transpose()
    }
}

/// Compares the records of the vault in `dir` with its anchor.
///
/// # Errors
/// Those of the anchor, of the header's file and of the history.
pub fn compare_records(dir: &Path, anchor: &Anchor) -> Result<ComparedRecords> {
    let mut compared = ComparedRecords::default();
    for _ in 0..LOOKS_MAX {
        let known = anchor.vault_now()?;
        compared = look(dir, &known)?;
        // A writer may have replaced a record in between: the anchor is told of that before the store.
        if compared.findings.is_empty() || anchor.vault_now()?.revision == known.revision {
            break;
        }
    }
    Ok(compared)
}

fn look(dir: &Path, known: &VaultRow) -> Result<ComparedRecords> {
    let mut found = ComparedRecords::default();
    let mut add = |kind, name, what| found.findings.push(RecordFinding { kind, name, what });
    let seen = header_file::read::<VaultHeader>(&dir.join(name::HEADER))?;
    let digest = Digest(witness::digest(&seen)?);
    if !known.header.is_current(digest) {
        add(IntegrityKind::Stale, name::HEADER, "the header is not the one that the anchor knows");
    }
    let (count, Digest(head)) = known.history_of(digest);
    let has_history = match history::reaches(dir, HistoryMark { count, head: HistoryHead(head) }) {
        // The mode of a dataset's directory may deny it to its owner.
        Err(HistoryError::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => None,
        read => Some(read?),
    };
    if has_history == Some(false) {
        let is_there = dir.join(name::HISTORY).symlink_metadata().is_ok();
        let kind = if is_there { IntegrityKind::Stale } else { IntegrityKind::Missing };
        add(kind, name::HISTORY, "the history does not go as far as the anchor knows");
    }
    let record = dir.join(name::SESSIONS).join(name::SESSIONS_RECORD);
    if record.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        add(IntegrityKind::Missing, name::SESSIONS, "the record of sessions is not there");
    }
    found.is_history_unreadable = has_history.is_none();
    Ok(found)
}
