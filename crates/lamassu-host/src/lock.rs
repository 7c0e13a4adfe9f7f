//! Takes the writer's lock of a vault without opening the vault, and waits while a writer closes.

use crate::anchors;
use crate::policy::Policy;
use crate::{Error, Place, Result};
use lamassu_format::name;
use lamassu_store::backend::{Lock, lock_staging, open_regular};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long to wait for a writer that is closing its vault, and how often to look.
const CLOSING: Duration = Duration::from_secs(30);
/// The same if only the anchor is locked: by a process that is closing, or by readers, who may stay.
const READING: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(20);

/// The writer's lock of a vault: a lock on the lock file, and one on the staging directory. Dropping it releases the
/// staging directory first, so a process that gets the file's lock finds the other free.
pub struct WriterLock {
    _staging: Option<Lock>,
    _file: Option<File>,
}

/// Takes the writer's lock of a vault, and changes nothing else in it. `None`: there is nothing to lock, and this
/// process may not create the lock file.
///
/// # Errors
/// [`Error::Locked`].
pub fn lock_out_writers(policy: &Policy, dir: &Path) -> Result<Option<WriterLock>> {
    lock_in(policy, &Place::of(dir)?)
}

fn lock_in(policy: &Policy, place: &Place) -> Result<Option<WriterLock>> {
    let (at, lock, dir) = (place.as_fd(), name::LOCK, place.dir());
    let failed = |op, name| move |source| Error::Backing { op, path: dir.join(name), source };
    let mut opened = open_regular(at, Path::new(lock));
    if matches!(&opened, Err(error) if error.kind() == io::ErrorKind::NotFound) {
        // Created as a writer would, so that a writer finds it.
        let made = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        opened = match rustix::fs::openat(at, lock, made, Mode::RUSR | Mode::WUSR) {
            Err(Errno::EXIST) => open_regular(at, Path::new(lock)),
            made => made.map(File::from).map_err(io::Error::from),
        };
    }
    let file = match opened {
        // There never was a writer, or the lock file was deleted.
        Err(error) if may_not_make(&error) && !exists(at, lock) => None,
        Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {
            return Err(failed("lock, since it is no regular file,", lock)(error));
        }
        opened => Some(opened.map_err(failed("open", lock))?),
    };
    match file.as_ref().map_or(Ok(()), File::try_lock) {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(policy.locked(dir)),
        Err(TryLockError::Error(source)) => return Err(failed("lock", lock)(source)),
    }
    let staging = match lock_staging(at) {
        Ok(staging) => staging,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(policy.locked(dir)),
        Err(source) => return Err(failed("lock", name::STAGING)(source)),
    };
    let is_held = file.is_some() || staging.is_some();
    Ok(is_held.then_some(WriterLock { _staging: staging, _file: file }))
}

fn may_not_make(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::ROFS | Errno::ACCESS | Errno::PERM))
}

fn exists(at: BorrowedFd<'_>, name: &str) -> bool {
    rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

/// Takes the writer's lock of every dataset in the vault, since each can be opened on its own by its directory in the
/// store. Each takes two descriptors.
///
/// # Errors
/// [`Error::Locked`], and those of the store.
pub fn lock_out_writers_below(policy: &Policy, dir: &Path) -> Result<Vec<WriterLock>> {
    raise_descriptor_limit();
    let below = lamassu_vault::datasets_below(dir);
    let mut held = Vec::new();
    for stored in below.map_err(|source| Error::CannotList { dir: dir.into(), source })? {
        held.extend(lock_out_writers_of(policy, dir, &stored)?);
    }
    Ok(held)
}

/// Takes the writer's lock of one dataset, by its path in the store of the vault in `dir`.
///
/// # Errors
/// [`Error::Locked`], and those of the store.
pub fn lock_out_writers_of(policy: &Policy, dir: &Path, stored: &Path) -> Result<Option<WriterLock>> {
    lock_in(policy, &Place::of(dir)?.below(stored)?)
}

/// Raises the limit of open files to the maximum, for holding many at once. With `SYS_RESOURCE`, as for root, that is
/// the system's maximum for a process.
pub fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let most = std::fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|text| text.trim().parse().ok());
    let most = most.filter(|most| maximum.is_some_and(|maximum| maximum < *most));
    if most.is_some() && setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).is_ok() {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}

/// Repeats `attempt` until the vault is free. umount(8) returns before the daemon has closed the vault, so a writer
/// without a mount may be about to close it.
///
/// # Errors
/// Those of `attempt`: [`Error::Locked`] at once if it is known where the vault is open, otherwise after [`CLOSING`];
/// [`Error::Interrupted`].
pub fn once_closed<T>(policy: &Policy, dir: &Path, attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let begun = Instant::now();
    let is_held = |error: &Error| match error.innermost() {
        Error::Locked { .. } => true,
        _ => anchors::is_locked(error) && begun.elapsed() < READING,
    };
    while_locked(policy, dir, is_held, attempt)
}

/// The same with the caller's error type. `is_locked`: whether an error is [`Error::Locked`].
///
/// # Errors
/// As [`once_closed`].
pub fn while_locked<T, E: From<Error>>(
    policy: &Policy,
    dir: &Path,
    is_locked: impl Fn(&E) -> bool,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let deadline = Instant::now() + CLOSING;
    loop {
        let error = match attempt() {
            Err(error) if is_locked(&error) => error,
            done => return done,
        };
        if Instant::now() > deadline || policy.surroundings.writer_of(dir).is_some() {
            return Err(error);
        }
        if policy.surroundings.is_interrupted() {
            return Err(Error::Interrupted.into());
        }
        std::thread::sleep(POLL);
    }
}

impl Policy {
    /// The error for a vault in `dir` that another writer has open, with the place where it is open, if known.
    pub fn locked(&self, dir: &Path) -> Error {
        Error::Locked { dir: dir.into(), mountpoint: self.surroundings.writer_of(dir) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_store::Backend;
    use lamassu_store::backend::LocalBackend;
    use std::ffi::OsStr;

    #[test]
    fn a_vault_that_nobody_ever_wrote_is_locked_too() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock_out_writers(&Policy::default(), dir.path()).unwrap().expect("a lock");
        let writer = LocalBackend::open(dir.path()).unwrap();
        let refused = writer.try_lock(OsStr::new(name::LOCK)).map(drop).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        drop(held);
        drop(writer.try_lock(OsStr::new(name::LOCK)).unwrap());
    }
}
