//! Finds the daemons of mounts, and sends them requests.
//!
//! Root and the user who mounted may ask. A request fails with the exit code and the message that the command would
//! have given without a mount.

use crate::control;
use crate::fault::{Fault, Result};
use crate::mounts;
use lamassu_fuse::control::{Asked, ControlError};
use lamassu_host::control::AskError;
use lamassu_host::control::protocol::{Failed, Parcel, Request, Status};
use lamassu_keys::{Argon2Params, Material};
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};

/// The directory at a path, if it is a Lamassu mount point, or the root of a dataset in a Lamassu mount, that root or
/// this user has mounted. Commands that take a vault's directory ask the daemon there.
///
/// # Errors
/// [`ControlError::LeadsAway`].
pub fn at(path: &Path) -> Result<Option<Asked>> {
    let Some(asked) = opened(path)? else { return Ok(None) };
    let is_ours = asked.fs_type() == mounts::TYPE;
    let is_root = asked.path() == asked.mountpoint();
    let answers = |asked: &Asked| control::ask::<Status>(asked, &Request::Status {}).is_ok();
    Ok(((is_ours && is_root) || ((is_ours || is_root) && answers(&asked))).then_some(asked))
}

/// The directory, if it lies in a FUSE mount that root or this user has mounted. A path that another user may have led
/// elsewhere is none of a vault's directory either.
fn opened(path: &Path) -> Result<Option<Asked>> {
    match Asked::open(path) {
        Ok(asked) => Ok(Some(asked)),
        Err(error @ ControlError::LeadsAway { .. }) => Err(error.into()),
        Err(_) => Ok(None),
    }
}

/// The directory, if it lies in a Lamassu mount that root or this user has mounted.
///
/// # Errors
/// [`ControlError::LeadsAway`].
pub fn within(path: &Path) -> Result<Option<Asked>> {
    Ok(opened(path)?.filter(|asked| asked.fs_type() == mounts::TYPE))
}

/// The same for a path that must lie in one.
///
/// # Errors
/// [`Fault::NotInAMount`], [`Fault::AboveNotLoaded`]; as [`within`].
pub fn must_be_within(path: &Path) -> Result<Asked> {
    Ok(within(path)?.ok_or_else(|| not_within(path))?)
}

fn is_within(path: &Path) -> bool {
    within(path).is_ok_and(|asked| asked.is_some())
}

/// The error for a path that does not lie in one.
pub fn not_within(path: &Path) -> Fault {
    let lies_within = |path: &Path| path.canonicalize().is_ok_and(|path| path.parent().is_some_and(is_within));
    match hidden(path).or_else(|| missing(path)) {
        Some(fault) => fault,
        // A file.
        None if lies_within(path) => lamassu_host::Error::NotADataset.into(),
        None => Fault::NotInAMount { path: path.into() },
    }
}

/// The fault of a path that leads into a Lamassu mount and does not exist there.
fn missing(path: &Path) -> Option<Fault> {
    let is_missing = |path: &Path| path.canonicalize().is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    let absolute = std::path::absolute(path).ok()?;
    let missing = absolute.ancestors().take_while(|above| is_missing(above)).last()?;
    is_within(missing.parent()?).then(|| Fault::MissingInMount { path: path.into(), missing: missing.into() })
}

/// The fault of a path that cannot be followed because a dataset on the way, or the mount's own vault, is not loaded.
pub fn hidden(path: &Path) -> Option<Fault> {
    let is_hidden = |path: &Path| path.canonicalize().is_err_and(|e| e.raw_os_error() == Some(libc::ENOKEY));
    if !is_hidden(path) {
        return None;
    }
    let absolute = std::path::absolute(path).ok()?;
    let above = absolute.ancestors().skip(1).find(|above| !is_hidden(above))?.canonicalize().ok()?;
    is_within(&above).then(|| Fault::AboveNotLoaded { path: path.into(), above })
}

/// As [`at`], or the mount for writing of the vault in that directory: for changes that its daemon must know.
///
/// # Errors
/// [`ControlError::LeadsAway`].
pub fn of(path: &Path) -> Result<Option<Asked>> {
    Ok(at(path)?.or_else(|| mounts::of_vault(path)?.root()))
}

/// The directory of the vault that a path names: itself, or that of the vault mounted there.
pub fn dir_of(path: &Path) -> Result<PathBuf> {
    match at(path)? {
        Some(mountpoint) => Ok(ask::<Status>(&mountpoint, &Request::Status {})?.dir.into()),
        None => Ok(path.into()),
    }
}

/// Asks the daemon of a mount.
///
/// # Errors
/// The daemon's error ([`Fault::Told`]), or why it could not be asked.
pub fn ask<T: DeserializeOwned>(dir: &Asked, request: &Request) -> Result<T> {
    control::ask(dir, request).map_err(|error| not_asked(dir.path(), error))
}

/// Packs the material for a slot, existing or new, for the daemon of a mount.
pub fn pack(dir: &Asked, material: &Material, cost: Argon2Params) -> Result<Parcel> {
    control::pack(dir, material, cost).map_err(|error| not_asked(dir.path(), error))
}

/// The error of a request to a daemon, for people.
pub fn not_asked(dir: &Path, error: AskError<ControlError>) -> crate::fault::Error {
    match error {
        AskError::Transport(error) => hindered(dir, error),
        AskError::Told(Failed { kind, message }) => {
            Fault::Told(Failed { kind, message: crate::text::printable(&message) }).into()
        }
        AskError::Garbled => Fault::GarbledAnswer { path: dir.into() }.into(),
        AskError::Here(error) => error.into(),
    }
}

/// Why a daemon could not be asked: the directory lies below a dataset that is not loaded, is that of a dataset which a
/// frozen mount does not open, does not exist, or is of a mount that fails.
fn hindered(dir: &Path, error: ControlError) -> crate::fault::Error {
    let errno = match &error {
        ControlError::Io { op: _, source } => source.raw_os_error(),
        ControlError::NotMounted(_)
        | ControlError::AlreadyFrozen
        | ControlError::DatasetsChange
        | ControlError::FreezeLost
        | ControlError::NotFrozen
        | ControlError::NotPermitted
        | ControlError::LeadsAway { .. }
        | ControlError::Strangers(_)
        | ControlError::TooLong => None,
    };
    match errno {
        Some(libc::EBUSY) => lamassu_host::Error::Frozen.into(),
        Some(libc::EIO) => Fault::FailingMount { path: dir.into() }.into(),
        Some(libc::ENOKEY) => hidden(dir).map_or_else(|| error.into(), Into::into),
        Some(libc::ENOENT) => missing(dir).map_or_else(|| error.into(), Into::into),
        _ => error.into(),
    }
}
