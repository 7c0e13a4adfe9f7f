//! What the process that serves a mount does when it is asked, and how other commands ask it.
//!
//! A request and its answer are JSON, carried by [`lamassu_fuse::control::call`]; root and the user who mounted may ask. [`protocol`] is what is said, [`serve`]
//! the daemon's side, and this page the asking side. A request fails with the exit code and the message that the command would have given without a mount.
//!
//! Never: lets a secret travel in the clear ([`protocol`] says how it does).

pub mod protocol;
pub mod serve;

use crate::cmd::umount;
use crate::fault::Fault;
use anyhow::Result;
use lamassu_fuse::control;
use protocol::{Answer, Request, Status};
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// The mount point of ours that a path is; commands that take a vault's directory ask the daemon there, if root or this user has mounted it.
pub fn at(path: &Path) -> Option<PathBuf> {
    umount::ours(path).ok().filter(|(_, mount)| mount.is_trusted()).map(|(path, _)| path)
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
    let answer = control::call(mountpoint, &serde_json::to_vec(request)?)?;
    // Not the parser's error: it may quote what must not be shown.
    let garbled = || Fault::GarbledAnswer { path: mountpoint.into() };
    match serde_json::from_slice(&answer).map_err(|_| garbled())? {
        Answer::Done(value) => Ok(value),
        Answer::Failed { code, message } => Err(Fault::Told { code, message: crate::text::printable(&message) }.into()),
    }
}
