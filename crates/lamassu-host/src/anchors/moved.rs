//! Export, import and moving of anchors.

use super::Anchors;
use super::place::{SERVER, make_dir_of, refuse_within, settled};
use crate::Result;
use crate::places::sync_dir_of;
use lamassu_anchor::export::{self, ExportError, Exported};
use lamassu_anchor::table::{Change, DiskTable, Table};
use lamassu_anchor::{Anchor, AnchorError, Revision};
use lamassu_crypto::Secret;
use lamassu_format::header::VaultId;
use lamassu_vault::VaultError;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Rows in one commit of an import.
const AT_ONCE: usize = 8192;

/// The result of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// what was imported
    pub exported: Exported,
    /// the new anchor's file
    pub path: PathBuf,
    /// the revision of the anchor that it replaced
    pub replaced: Option<Revision>,
}

/// Why an export was not imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The export's fault.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The user's: newer knowledge of the present anchor would be lost.
    #[error(
        "the export is of revision {found}, and the anchor here of revision {present}; --older takes it all the same"
    )]
    Older {
        /// of the export
        found: Revision,
        /// of the anchor
        present: Revision,
    },
}

impl Anchors {
    /// Imports an export as a vault's anchor, in place of an existing one if there is one. The caller must keep writers
    /// out.
    ///
    /// # Errors
    /// [`crate::Error::Import`], [`AnchorError`], [`crate::Error::AnchorInStore`], [`crate::Error::Local`].
    pub fn import(
        &self,
        vault: &VaultId,
        dir: &Path,
        from: &mut dyn Read,
        key: &Secret<32>,
        takes_older: bool,
    ) -> Result<Imported> {
        self.refuse_server(vault)?;
        let path = self.file_to_replace(vault)?;
        if path.parent() == self.dir() {
            make_dir_of(&path)?;
        }
        refuse_within(&path, dir)?;
        // Held open, so that no process writes the anchor that is about to be replaced.
        let present = present(&path, vault)?;
        let replaced = present.as_ref().map(|anchor| anchor.vault().revision);
        let at_least = replaced.filter(|_| !takes_older);
        let exported = replace(&path, |table| fill(&table, vault, from, key, at_least))?;
        self.remember(vault, &settled(&path)?)?;
        self.opened().remove(vault);
        Ok(Imported { exported, path, replaced })
    }

    /// Moves a vault's anchor to a new file. The caller must keep writers out.
    ///
    /// # Errors
    /// [`AnchorError`], [`crate::Error::AnchorInStore`], [`crate::Error::Local`].
    pub fn move_to(&self, vault: &VaultId, dir: &Path, to: &Path) -> Result<(PathBuf, PathBuf)> {
        let from = self.file_of(vault)?.ok_or(crate::Error::NoAnchorPlace)?;
        let to = settled(to)?;
        refuse_within(&to, dir)?;
        if let Some(server) = self.server_of(vault)? {
            self.move_from_server(&server, vault, &to)?;
            return Ok((PathBuf::from(format!("{SERVER}{server}")), to));
        }
        refuse_existing(&to)?;
        self.move_file(vault, &from, &to)?;
        Ok((from, to))
    }

    /// Moves a vault's anchor from one file to another, and replaces an existing file.
    pub(super) fn move_file(&self, vault: &VaultId, from: &Path, to: &Path) -> Result<()> {
        let table = Arc::new(DiskTable::open(from)?);
        // A copy would give damage checksums that are right.
        table.verify()?;
        Anchor::open(table.clone(), vault)?;
        // By another path: the directory of anchors may be reached through a link.
        if is_one_file(from, to)? {
            return self.remember(vault, to).map(drop);
        }
        replace(to, |new| copy(&table, &new))?;
        self.remember(vault, to)?;
        drop(table);
        std::fs::remove_file(from).map_err(|source| crate::Error::Local { op: "remove", path: from.into(), source })
    }
}

/// Whether two paths lead to one file. The second need not exist.
fn is_one_file(file: &Path, other: &Path) -> Result<bool> {
    let look = |path: &Path| path.symlink_metadata().map(|st| (st.dev(), st.ino()));
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| crate::Error::Local { op: "look at", path, source }
    };
    match look(other) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        there => Ok(look(file).map_err(failed(file))? == there.map_err(failed(other))?),
    }
}

/// Refuses an existing file.
pub(super) fn refuse_existing(file: &Path) -> Result<()> {
    match file.symlink_metadata() {
        Ok(_) => Err(AnchorError::Exists { path: file.into() }.into()),
        Err(_) => Ok(()),
    }
}

/// Anchors of datasets that were copied with their vault. Unless [`CopiedDatasets::kept`] is called, they are removed.
#[derive(Debug, Default)]
#[must_use = "they are taken back when this is dropped"]
pub struct CopiedDatasets {
    files: Vec<PathBuf>,
    missing: Vec<VaultId>,
}

impl CopiedDatasets {
    /// Keeps them. Returns the datasets that have no anchor on this host.
    pub fn kept(mut self) -> Vec<VaultId> {
        self.files.clear();
        std::mem::take(&mut self.missing)
    }
}

impl Drop for CopiedDatasets {
    fn drop(&mut self) {
        for file in &self.files {
            // No record leads to it, so a file that cannot be removed does no harm.
            let _ = std::fs::remove_file(file);
        }
    }
}

impl Anchors {
    /// Copies the anchors of datasets for `root`, a copy of the vault around them.
    ///
    /// # Errors
    /// [`AnchorError`]; [`crate::Error::Local`], [`crate::Error::NoAnchorPlace`].
    pub(crate) fn copy_datasets(
        &self,
        datasets: &BTreeSet<VaultId>,
        root: &VaultId,
        look: impl Fn(&VaultId) -> Result<(PathBuf, DiskTable)>,
    ) -> Result<CopiedDatasets> {
        let mut done = CopiedDatasets::default();
        for dataset in datasets {
            let to = self.of_copied(root, dataset).ok_or(crate::Error::NoAnchorPlace)?;
            let from = match look(dataset) {
                Err(crate::Error::Vault(VaultError::Anchor(AnchorError::Missing { .. }))) => {
                    done.missing.push(*dataset);
                    continue;
                }
                found => found?.1,
            };
            make_dir_of(&to)?;
            let table = DiskTable::create(&to)?;
            done.files.push(to);
            copy(&from, &table)?;
        }
        Ok(done)
    }
}

pub(super) fn copy(from: &DiskTable, to: &DiskTable) -> Result<()> {
    let mut rows = Batch { to, rows: Vec::new() };
    from.visit_all(|space, key, value| rows.take(Change { space, key: key.to_vec(), value: Some(value.to_vec()) }))?;
    Ok(rows.end()?)
}

/// Collects rows for commits to a table.
struct Batch<'a> {
    to: &'a DiskTable,
    rows: Vec<Change>,
}

impl Batch<'_> {
    fn take(&mut self, row: Change) -> Result<(), AnchorError> {
        self.rows.push(row);
        if self.rows.len() < AT_ONCE {
            return Ok(());
        }
        self.to.commit(&self.rows)?;
        self.rows.clear();
        Ok(())
    }

    fn end(self) -> Result<(), AnchorError> {
        self.to.commit(&self.rows)
    }
}

/// Holds open the anchor of a vault in a file; `None`: there is none, or nothing of it can be used, so that it may be
/// replaced.
///
/// # Errors
/// [`AnchorError`]: the file is another vault's anchor, or may be a good one.
pub(super) fn present(file: &Path, vault: &VaultId) -> Result<Option<Anchor>> {
    match DiskTable::open(file).and_then(|table| Anchor::open(Arc::new(table), vault)) {
        Ok(anchor) => Ok(Some(anchor)),
        Err(
            AnchorError::Missing { .. }
            | AnchorError::Empty
            | AnchorError::Damaged { .. }
            | AnchorError::Unreadable { .. }
            | AnchorError::Broken,
        ) => Ok(None),
        Err(other) => Err(other.into()),
    }
}

/// Fills a new table, and then replaces a file by it.
pub(super) fn replace<T>(file: &Path, fill: impl FnOnce(Arc<DiskTable>) -> Result<T>) -> Result<T> {
    let new = suffixed(file, ".new");
    // An interrupted run may have left it.
    let _ = std::fs::remove_file(&new);
    let filled = DiskTable::create(&new).map_err(Into::into).and_then(|table| fill(Arc::new(table)));
    let done = filled.and_then(|filled| {
        let renamed = std::fs::rename(&new, file).and_then(|()| sync_dir_of(file));
        renamed.map_err(|source| crate::Error::Local { op: "put in place", path: file.into(), source })?;
        Ok(filled)
    });
    done.inspect_err(|_| {
        let _ = std::fs::remove_file(&new);
    })
}

/// Fills a table from an export of this vault that verifies, and whose revision is not lower.
fn fill(
    table: &DiskTable,
    vault: &VaultId,
    from: &mut dyn Read,
    key: &Secret<32>,
    at_least: Option<Revision>,
) -> Result<Exported> {
    let mut rows = Batch { to: table, rows: Vec::new() };
    let exported = export::read(from, vault, key, &mut |row| rows.take(row)).map_err(ImportError::from)?;
    if let Some(present) = at_least.filter(|present| exported.revision < *present) {
        return Err(ImportError::Older { found: exported.revision, present }.into());
    }
    rows.end()?;
    Ok(exported)
}

fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path.as_os_str());
    name.push(suffix);
    name.into()
}
