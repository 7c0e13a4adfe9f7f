//! The directory of a server.

use crate::{Result, ServerError};
use std::fs::{self, DirBuilder, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

/// A directory for a new server, locked against other commands while this lives.
pub(crate) struct Made {
    /// whether the directory was created
    is_new: bool,
    _lock: fs::File,
}

impl Made {
    /// Removes what a command that has failed has left in the directory, which was empty before.
    pub fn take_back(&self, dir: &Path) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let _ = fs::remove_file(entry.path()).or_else(|_| fs::remove_dir_all(entry.path()));
        }
        if self.is_new {
            let _ = fs::remove_dir(dir);
        }
    }
}

/// Creates a directory that only its owner may read, or accepts an empty one of the same owner.
///
/// # Errors
/// [`ServerError::NotEmpty`], [`ServerError::NotPrivate`], [`ServerError::File`].
pub(crate) fn make_dir(dir: &Path) -> Result<Made> {
    let is_new = dir.symlink_metadata().is_err();
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(ServerError::file("make", dir))?;
    let lock = fs::File::open(dir).map_err(ServerError::file("open", dir))?;
    if lock.metadata().map_err(ServerError::file("look at", dir))?.uid() != rustix::process::geteuid().as_raw() {
        return Err(ServerError::NotPrivate { dir: dir.into() });
    }
    let not_empty = || ServerError::NotEmpty { dir: dir.into() };
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(|_| not_empty())?;
    if fs::read_dir(dir).map_err(ServerError::file("list", dir))?.next().is_some() {
        return Err(not_empty());
    }
    lock.set_permissions(Permissions::from_mode(0o700)).map_err(ServerError::file("chmod", dir))?;
    Ok(Made { is_new, _lock: lock })
}

/// Checks that a directory is a server's, and that only its owner may read it.
///
/// # Errors
/// [`ServerError::NoServer`], [`ServerError::NotPrivate`].
pub fn check_dir(dir: &Path) -> Result<()> {
    let no_server = || ServerError::NoServer { dir: dir.into() };
    let st = dir.metadata().map_err(|_| no_server())?;
    if !dir.join("authority.key").is_file() {
        return Err(no_server());
    }
    let is_private = st.mode() & 0o077 == 0 && st.uid() == rustix::process::geteuid().as_raw();
    if is_private { Ok(()) } else { Err(ServerError::NotPrivate { dir: dir.into() }) }
}
