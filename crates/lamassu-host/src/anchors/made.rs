//! New anchors, for a vault that is being created and for an existing one.

use super::place::{make_dir_of, refuse_within, settled};
use super::{Access, Anchors, Open};
use crate::open::{backend, options};
use crate::{Place, Result};
use lamassu_anchor::export::{self, Rights};
use lamassu_anchor::table::DiskTable;
use lamassu_anchor::{Anchor, VaultRow};
use lamassu_format::header::{VaultHeader, VaultId};
use lamassu_keys::Unlocked;
use lamassu_vault::anchor::{NewTrees, RebuildProgress, Rebuilt, rebuild};
use lamassu_vault::{Vault, VaultError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A progress display that shows nothing: making the anchor of a new vault is quick.
struct Unwatched;

impl RebuildProgress for Unwatched {
    fn advance(&self, _: u64, _: u64) {}

    fn damaged(&self, _: &Path, _: &VaultError) {}
}

/// A new anchor. It is removed unless it is [kept](Made::keep).
#[must_use = "it is taken back when it is dropped"]
pub struct Made {
    pub(super) anchors: Anchors,
    pub(super) vault: VaultId,
    pub(super) path: PathBuf,
    /// `None`: it is closed
    pub(super) anchor: Option<Arc<Anchor>>,
    pub(super) is_kept: bool,
}

impl Made {
    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps the anchor.
    pub fn keep(mut self) -> PathBuf {
        self.is_kept = true;
        self.path.clone()
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        self.anchor = None;
        if !self.is_kept {
            // No record leads to it, so a file that cannot be removed does no harm.
            let _ = std::fs::remove_file(&self.path);
            let _ = self.anchors.forget(&self.vault);
        }
    }
}

impl Anchors {
    /// Makes the anchor of a new vault from its tree, in a new file. `dir`: the vault's store.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError`]; [`crate::Error::AnchorInStore`], [`crate::Error::Local`],
    /// [`crate::Error::NoRandom`]; those of the vault.
    pub fn make(
        &self,
        header: &VaultHeader,
        keys: &Unlocked,
        trees: NewTrees,
        file: &Path,
        dir: &Path,
    ) -> Result<Made> {
        let ring = keys.key_ring(header.suite())?;
        let vault = Vault::open(Arc::new(backend(dir)?), header, ring, options(true))?;
        self.made(header.id(), file, dir, |table| {
            let (anchor, _) = rebuild(&vault, header, table, trees, &Unwatched)?;
            Ok(anchor)
        })
    }

    /// Makes the anchor of a new, empty dataset, beside that of the vault around it, or this host's copy of that, and
    /// records it in the dataset's header. To be kept by [`Made::keep_below`].
    ///
    /// # Errors
    /// As [`Anchors::make`]; those of keys.
    pub(crate) fn make_below(
        &self,
        parent: &VaultId,
        header: &mut VaultHeader,
        keys: &Unlocked,
        trees: NewTrees,
        place: &Place,
    ) -> Result<Made> {
        keys.set_anchored(header)?;
        let file = self.file_for_new(&header.id(), Some(parent))?;
        self.make(header, keys, trees, &file, &place.path())
    }

    /// Rebuilds the anchor of a vault from its store, in place of the present one, if there is one. `vault` is open for
    /// writing without an anchor. Header and history are unset in the new anchor.
    ///
    /// # Errors
    /// As [`Anchors::make`]; [`lamassu_anchor::AnchorError::Locked`].
    pub fn rebuild(
        &self,
        vault: &Vault,
        header: &VaultHeader,
        dir: &Path,
        progress: &dyn RebuildProgress,
    ) -> Result<(PathBuf, Rebuilt)> {
        let (id, mut trees) = (header.id(), NewTrees::default());
        let file = self.file_to_replace(&id)?;
        if file.parent() == self.dir() {
            make_dir_of(&file)?;
        }
        refuse_within(&file, dir)?;
        // Held open, so that no process writes the anchor that is about to be replaced.
        let present = super::moved::present(&file, &id)?;
        let mut replaced = None;
        if let Some(present) = &present {
            let VaultRow { degree_log2, blocks, revision, .. } = present.vault();
            trees = NewTrees { degree_log2, blocks };
            replaced = Some(revision);
        }
        let rebuilt = super::moved::replace(&file, |table| {
            let (anchor, rebuilt) = rebuild(vault, header, table, trees, progress)?;
            replaced.map_or(Ok(()), |replaced| anchor.revisions_go_on_after(replaced))?;
            Ok(rebuilt)
        })?;
        drop(present);
        self.remember(&id, &settled(&file)?)?;
        self.opened().remove(&id);
        Ok((file, rebuilt))
    }

    /// Makes the anchor of a copy of a vault: the same objects, the same names.
    ///
    /// # Errors
    /// As [`Anchors::make`].
    pub fn make_copy(&self, of: &DiskTable, vault: VaultId, rights: Rights, file: &Path, dir: &Path) -> Result<Made> {
        self.made(vault, file, dir, |table| {
            export::copy_to(of, &*table, vault, rights)?;
            Ok(Anchor::open(table, &vault)?)
        })
    }

    pub(super) fn made(
        &self,
        vault: VaultId,
        file: &Path,
        dir: &Path,
        fill: impl FnOnce(Arc<DiskTable>) -> Result<Anchor>,
    ) -> Result<Made> {
        // A directory that the user chose must exist already.
        if file.parent() == self.dir() {
            make_dir_of(file)?;
        }
        refuse_within(file, dir)?;
        let file = &settled(file)?;
        let table = DiskTable::create(file)?;
        let mut made = Made { anchors: self.clone(), vault, path: file.clone(), anchor: None, is_kept: false };
        let anchor = Arc::new(fill(Arc::new(table))?);
        self.remember(&vault, file)?;
        self.opened().insert(vault, Open::of(&anchor, Access::Write));
        made.anchor = Some(anchor);
        Ok(made)
    }
}
