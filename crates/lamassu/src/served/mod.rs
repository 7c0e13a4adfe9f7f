//! What the process that serves a mount does when it is asked, and how other commands ask it.
//!
//! A request and its answer are JSON, carried by [`lamassu_fuse::control::call`]; root and the user who mounted may ask. [`protocol`] is what is said, [`serve`]
//! the daemon's side, and this page the asking side. A request fails with the exit code and the message that the command would have given without a mount.
//!
//! Never: lets a secret travel in the clear ([`parcel`]).

pub mod datasets;
pub mod job;
pub mod keeper;
mod parcel;
pub mod protocol;
pub mod serve;

use crate::cmd::umount;
use crate::fault::Fault;
use crate::mounts;
use anyhow::Result;
use data_encoding::HEXLOWER;
use lamassu_crypto::Secret;
use lamassu_fuse::control::{self, ControlError};
use lamassu_keys::{Argon2Params, Material};
use protocol::{Answer, Channel, Parcel, Request, Status};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// The mount point of ours that a path is, or the root of a dataset in a mount of ours; commands that take a vault's directory ask the daemon there, if root or
/// this user has mounted it.
pub fn at(path: &Path) -> Option<PathBuf> {
    match umount::ours(path) {
        Ok((path, mount)) => mount.is_trusted().then_some(path),
        Err(_) => within(path).filter(|dir| ask::<Status>(dir, &Request::Status {}).is_ok()),
    }
}

/// The path without links, if it is a directory in a mount of ours that root or this user has mounted.
pub fn within(path: &Path) -> Option<PathBuf> {
    let dir = path.canonicalize().ok()?;
    mounts::containing(&dir).filter(|m| m.fs_type == mounts::TYPE && m.is_trusted()).map(|_| dir)
}

/// The same of a path that has to lie in one.
///
/// # Errors
/// [`Fault::NotInAMount`], [`Fault::AboveNotLoaded`].
pub fn must_be_within(path: &Path) -> Result<PathBuf, Fault> {
    within(path).ok_or_else(|| not_within(path))
}

/// Why a path does not lie in one.
pub fn not_within(path: &Path) -> Fault {
    hidden(path).or_else(|| missing(path)).unwrap_or_else(|| Fault::NotInAMount { path: path.into() })
}

/// The fault of a path of which the way leads into a mount of ours, and ends there.
fn missing(path: &Path) -> Option<Fault> {
    let is_missing = |path: &Path| path.canonicalize().is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    let absolute = std::path::absolute(path).ok()?;
    let missing = absolute.ancestors().take_while(|above| is_missing(above)).last()?;
    within(missing.parent()?)?;
    Some(Fault::MissingInMount { path: path.into(), missing: missing.into() })
}

/// The fault of a path that cannot be followed, since a dataset on the way or the mount's own vault is not loaded.
pub fn hidden(path: &Path) -> Option<Fault> {
    let is_hidden = |path: &Path| path.canonicalize().is_err_and(|e| e.raw_os_error() == Some(libc::ENOKEY));
    if !is_hidden(path) {
        return None;
    }
    let absolute = std::path::absolute(path).ok()?;
    let above = absolute.ancestors().skip(1).find(|above| !is_hidden(above)).and_then(within)?;
    Some(Fault::AboveNotLoaded { path: path.into(), above })
}

/// As [`at`], or where the vault in that directory is mounted for writing: for what a daemon must know of.
pub fn of(path: &Path) -> Option<PathBuf> {
    at(path).or_else(|| mounts::of_vault(path).filter(mounts::Mount::is_trusted).map(|m| m.mountpoint))
}

/// The directory of the vault that a path names: itself, or that of the vault mounted there.
pub fn dir_of(path: &Path) -> Result<PathBuf> {
    match at(path) {
        Some(mountpoint) => Ok(ask::<Status>(&mountpoint, &Request::Status {})?.dir.into()),
        None => Ok(path.into()),
    }
}

/// Asks the daemon of a mount.
///
/// # Errors
/// What it answers ([`Fault::Told`]), or what hinders asking.
pub fn ask<T: DeserializeOwned>(mountpoint: &Path, request: &Request) -> Result<T> {
    let answer = call(mountpoint, request)?;
    told(mountpoint, &answer)
}

fn call(mountpoint: &Path, request: &Request) -> Result<Zeroizing<Vec<u8>>> {
    control::call(mountpoint, &serde_json::to_vec(request)?).map_err(|error| hindered(mountpoint, error))
}

/// What hinders asking: the directory lies below what is not loaded, is that of a dataset which a frozen mount does not open, or is not there.
fn hindered(dir: &Path, error: ControlError) -> anyhow::Error {
    let errno = match &error {
        ControlError::Io { op: _, source } => source.raw_os_error(),
        ControlError::NotMounted(_)
        | ControlError::AlreadyFrozen
        | ControlError::NotFrozen
        | ControlError::NotPermitted
        | ControlError::TooLong => None,
    };
    match errno {
        Some(libc::EBUSY) => Fault::Frozen.into(),
        Some(libc::ENOKEY) => hidden(dir).map_or_else(|| error.into(), Into::into),
        Some(libc::ENOENT) => missing(dir).map_or_else(|| error.into(), Into::into),
        _ => error.into(),
    }
}

fn told<'a, T: Deserialize<'a>>(mountpoint: &Path, answer: &'a [u8]) -> Result<T> {
    // Not the parser's error: it may quote what must not be shown.
    match serde_json::from_slice(answer).map_err(|_| garbled(mountpoint))? {
        Answer::Done(value) => Ok(value),
        Answer::Failed(failed) => {
            Err(Fault::Told { code: failed.code, message: crate::text::printable(&failed.message) }.into())
        }
    }
}

fn garbled(mountpoint: &Path) -> Fault {
    Fault::GarbledAnswer { path: mountpoint.into() }
}

/// Packs what opens or shall open a slot for the daemon of a mount.
pub fn pack(mountpoint: &Path, material: &Material, cost: Argon2Params) -> Result<Parcel> {
    let answer = call(mountpoint, &Request::Channel {})?;
    let Channel { number, key } = told(mountpoint, &answer)?;
    let mut bytes = Zeroizing::new([0; 32]);
    match HEXLOWER.decode_mut(key.as_bytes(), &mut *bytes) {
        Ok(32) if key.len() == 64 => parcel::pack(number, &Secret::new(&mut bytes), material, cost),
        Ok(_) | Err(_) => Err(garbled(mountpoint).into()),
    }
}
