//! Vaults as commands name them: found, unlocked by the key options, opened.

use crate::fault::{Fault, Result};
use crate::keys::KeyArg;
use crate::output::Ui;
use crate::{keys, mounts, served};
use lamassu_host::Error as HostError;
use lamassu_host::{Error, lock};
use lamassu_keys::header_file;
use lamassu_vault::Forest;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use lamassu_host::lock::raise_descriptor_limit;
pub use lamassu_host::{Found, Unsealed, WriterLock, backend, options};

/// Finds the vault in a directory.
pub fn found(ui: &Ui, dir: &Path) -> Result<Found> {
    Found::at(&ui.policy, dir).map_err(|error| explained(dir, error))
}

/// The error for a directory without a vault, improved by what the mounts of this machine tell.
pub fn explained(dir: &Path, error: Error) -> crate::fault::Error {
    match error {
        Error::NotADirectory { .. } => served::hidden(dir).map_or(error.into(), Into::into),
        Error::NotAVault { .. } | Error::NoHeader { .. } | Error::HeaderIsKept { .. } => match mounts::ours_at(dir) {
            Ok((_, mount)) => Fault::IsAMount { dir: dir.into(), vault: mount.vault() }.into(),
            Err(_) => error.into(),
        },
        error => error.into(),
    }
}

/// Loads the keys of a vault that was found.
pub fn unlock(ui: &Ui, found: Found, key: &KeyArg) -> Result<Unsealed> {
    ui.policy.check_small_files(found.header.convergent_small_files())?;
    let keys = keys::unlock(ui, &found.header, key.with(&key.source()?), &found.dir)?;
    Ok(Unsealed::new(found, keys, ui.policy.clone()))
}

/// Finds and unlocks a vault.
pub fn unlocked(ui: &Ui, dir: &Path, key: &KeyArg) -> Result<Unsealed> {
    unlock(ui, found(ui, dir)?, key)
}

/// Finds, unlocks and opens a vault, with the datasets in it.
pub fn forest(ui: &Ui, dir: &Path, key: &KeyArg, read_only: bool) -> Result<Arc<Forest>> {
    let served = unlocked(ui, dir, key)?.open_forest(options(read_only))?;
    Ok(served.forest().clone())
}

/// Repeats `attempt` until the vault is free: see [`lock::while_locked`].
pub fn once_closed<T>(ui: &Ui, dir: &Path, attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let is_locked = |error: &crate::fault::Error| matches!(error.fault(), Fault::Host(Error::Locked { .. }));
    lock::while_locked(&ui.policy, dir, is_locked, attempt)
}

/// Takes the writer's lock of a vault; waits while a writer closes.
pub fn lock_out_writers(ui: &Ui, dir: &Path) -> Result<Option<WriterLock>> {
    Ok(lock::once_closed(&ui.policy, dir, || lock::lock_out_writers(&ui.policy, dir))?)
}

/// Options for reading one stored file without its vault's tree: where the header is.
#[derive(clap::Args, Clone, Debug)]
pub struct OrphanArg {
    /// Read single stored files, given by the paths of their ciphertext, with this vault header (lamassu.vault, or a
    /// copy of it) instead of DIR
    #[arg(long, value_name = "FILE")]
    header: Option<PathBuf>,
    /// Read single stored files, with the header of the vault DIR
    #[arg(long, conflicts_with = "header")]
    orphan: bool,
}

impl OrphanArg {
    /// The header for stored files, and the remaining paths; `None`: DIR is a vault to be opened, and the paths are
    /// plain.
    pub fn found<'p>(&self, ui: &Ui, places: &'p [PathBuf]) -> Result<Option<(Found, &'p [PathBuf])>> {
        if let Some(path) = &self.header {
            let header = header_file::read(path)?;
            return Ok(Some((Found { dir: path.clone(), header }, places)));
        }
        if !self.orphan {
            return Ok(None);
        }
        let (dir, rest) = places.split_first().ok_or(HostError::Usage("give the vault, then stored files"))?;
        Ok(Some((found(ui, dir)?, rest)))
    }
}
