//! From a directory to an open vault: find the header, unlock it, open the tree.

use crate::cmd::umount;
use crate::fault::Fault;
use crate::fips;
use crate::keys::{self, KeyArg};
use crate::output::Ui;
use crate::pins;
use crate::served;
use crate::served::keeper::Keeper;
use crate::served::serve::Served;
use anyhow::{Context, Result};
use lamassu_format::header::{Header, VaultHeader};
use lamassu_format::name;
use lamassu_keys::{KeyError, Unlocked, admin, header_file};
use lamassu_store::Backend;
use lamassu_store::backend::{LocalBackend, Lock, lock_staging};
use lamassu_vault::{Durability, Forest, Integrity, Options, Vault, VaultError};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ffi::OsStr;
use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a writer that is closing its vault is waited for, and how often it is looked for.
const CLOSING: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);

/// A vault that was found, not opened yet. The header is not authenticated.
pub struct Found {
    /// as given
    pub dir: PathBuf,
    /// its header
    pub header: VaultHeader,
}

/// A vault whose keys are loaded.
pub struct Unsealed {
    /// where, and the header
    pub found: Found,
    /// the keys
    pub keys: Unlocked,
}

/// How a vault is opened when nothing else is said: fully verified, every barrier.
pub fn options(read_only: bool) -> Options {
    Options { integrity: Integrity::Full, durability: Durability::Ordered, read_only, threads: 0, device: None }
}

impl Found {
    /// Reads the header below `dir`.
    pub fn at(dir: &Path) -> Result<Found> {
        let meta = std::fs::metadata(dir).map_err(|source| {
            let not_there = || Fault::NotADirectory { dir: dir.into(), source };
            served::hidden(dir).unwrap_or_else(not_there)
        })?;
        if !meta.is_dir() {
            let source = io::Error::from_raw_os_error(libc::ENOTDIR);
            return Err(Fault::NotADirectory { dir: dir.into(), source }.into());
        }
        let path = dir.join(name::HEADER);
        match header_file::read(&path) {
            Ok(header) => {
                refuse_destroyed(&header).with_context(|| dir.display().to_string())?;
                Ok(Found { dir: dir.into(), header })
            }
            Err(header_file::FileError::Missing { path: _ }) => Err(no_vault(dir).into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Loads the keys.
    pub fn unlock(self, ui: &Ui, key: &KeyArg) -> Result<Unsealed> {
        fips::check_small_files(self.header.convergent_small_files())?;
        let keys = keys::unlock(ui, &self.header, key.with(&key.source()?), &self.dir)?;
        Ok(Unsealed { found: self, keys })
    }
}

/// An open vault, and where it lies.
pub struct Opened {
    /// the tree
    pub vault: Arc<Vault>,
    /// its store
    pub backend: Arc<dyn Backend>,
    /// whether nothing in it is changed
    pub read_only: bool,
}

impl Unsealed {
    /// Opens the tree.
    pub fn open(&self, options: Options) -> Result<Arc<Vault>> {
        self.open_over(options, backend).map(|opened| opened.vault)
    }

    /// Opens the tree, to serve it; with `quiet`, reading it leaves the access times of the stored files alone.
    pub fn open_to_serve(&self, options: Options, quiet: bool) -> Result<Opened> {
        self.open_over(options, |dir| {
            let backend = backend(dir)?;
            Ok(if quiet { backend.without_access_times() } else { backend })
        })
    }

    /// Opens the tree and, as they are entered, the datasets in it.
    pub fn open_forest(self, options: Options) -> Result<Arc<Served>> {
        let opened = self.open_to_serve(options.clone(), false)?;
        let dir = self.found.dir.canonicalize().unwrap_or_else(|_| self.found.dir.clone());
        Served::new(self, opened, Keeper::new(dir, options, true, None))
    }

    fn open_over(&self, options: Options, backend: impl Fn(&Path) -> Result<LocalBackend>) -> Result<Opened> {
        let Found { dir, header } = &self.found;
        if options.integrity == Integrity::Metadata && header.suite().is_malleable() {
            return Err(Fault::SuiteNeedsFull { suite: header.suite().name() }.into());
        }
        once_closed(dir, || {
            let ring = self.keys.key_ring(header.suite())?;
            let backend: Arc<dyn Backend> = Arc::new(backend(dir)?);
            match Vault::open(backend.clone(), header, ring, options.clone()) {
                Ok(vault) => Ok(Opened { vault: Arc::new(vault), backend, read_only: options.read_only }),
                Err(VaultError::Locked) => Err(locked(dir).into()),
                Err(VaultError::ReadOnly) => Err(Fault::StoreReadOnly { dir: dir.clone() }.into()),
                Err(error) => Err(error).with_context(|| format!("cannot open the vault in {}", dir.display())),
            }
        })
    }
}

/// What a directory without a header is.
fn no_vault(dir: &Path) -> Fault {
    if let Ok((_, mount)) = umount::ours(dir) {
        return Fault::IsAMount { dir: dir.into(), vault: mount.vault() };
    }
    // Not `lamassu.lock`: whoever looked whether somebody writes here may have left one.
    let left = [name::DIR_RECORD, name::HISTORY, name::STAGING, name::HEADER_REPLACED, name::HEADER_REPLACING];
    match left.iter().any(|name| dir.join(name).symlink_metadata().is_ok()) {
        true => Fault::NoHeader { dir: dir.into() },
        false => Fault::NotAVault { dir: dir.into() },
    }
}

/// Whoever can write to the store can say that keys were destroyed: where the vault has an administrator, it has to be signed, by the right one.
pub fn check_signed(header: &VaultHeader) -> Result<()> {
    admin::verify_signature(header)?;
    admin::check_pinned(header, &pins::of(&header.id())?)?;
    Ok(())
}

/// A destroyed vault opens no more, where it is one.
pub fn refuse_destroyed(header: &VaultHeader) -> Result<()> {
    let Some(destroyed) = header.destroyed() else { return Ok(()) };
    check_signed(header)?;
    Err(KeyError::Destroyed(destroyed).into())
}

/// Reading one stored file, without its vault's tree: where its header is.
#[derive(clap::Args, Clone, Debug)]
pub struct OrphanArg {
    /// Read single stored files, given by the paths of their ciphertext, with this vault header (lamassu.vault, or a copy of it); no DIR then
    #[arg(long, value_name = "FILE")]
    header: Option<PathBuf>,
    /// The same, with the header of DIR
    #[arg(long, conflicts_with = "header")]
    orphan: bool,
}

impl OrphanArg {
    /// The header for stored files, and the paths that are left; `None`: DIR is a vault to be opened, and the paths are plain.
    pub fn found<'p>(&self, places: &'p [PathBuf]) -> Result<Option<(Found, &'p [PathBuf])>> {
        if let Some(path) = &self.header {
            let header = header_file::read(path)?;
            return Ok(Some((Found { dir: path.clone(), header }, places)));
        }
        if !self.orphan {
            return Ok(None);
        }
        let (dir, rest) = places.split_first().ok_or(Fault::Usage("give the vault, then stored files"))?;
        Ok(Some((Found::at(dir)?, rest)))
    }
}

/// Finds, unlocks and opens a vault, with the datasets in it.
pub fn forest(ui: &Ui, dir: &Path, key: &KeyArg, read_only: bool) -> Result<Arc<Forest>> {
    let served = Found::at(dir)?.unlock(ui, key)?.open_forest(options(read_only))?;
    Ok(served.forest().clone())
}

/// The store below a vault.
pub fn backend(dir: &Path) -> Result<LocalBackend> {
    LocalBackend::open(dir).map_err(|source| Fault::NotADirectory { dir: dir.into(), source }.into())
}

/// The writer's lock of a vault, both its parts. Given back in this order: whoever gets the file's finds the other free.
pub struct WriterLock {
    _staging: Option<Lock>,
    _file: Option<File>,
}

/// Holds the writer's lock of a vault without changing anything else in it; `None` where there is nothing to be locked, and this process could make nothing.
///
/// # Errors
/// [`Fault::Locked`].
pub fn lock_out_writers(dir: &Path) -> Result<Option<WriterLock>> {
    lock_in(&Place::of(dir)?)
}

fn lock_in(place: &Place) -> Result<Option<WriterLock>> {
    let (at, lock, dir) = (place.at.as_fd(), name::LOCK, &place.dir);
    let failed = |op, name| move |source| Fault::Backing { op, path: dir.join(name), source };
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut opened = rustix::fs::openat(at, lock, flags | OFlags::RDONLY, Mode::empty());
    if matches!(opened, Err(Errno::NOENT)) {
        // As a writer makes it: one that comes now finds it.
        let made = flags | OFlags::RDWR | OFlags::CREATE;
        opened = rustix::fs::openat(at, lock, made, Mode::RUSR | Mode::WUSR);
    }
    let file = match opened {
        // Nobody wrote here, or the file was deleted, by people or under a writer.
        Err(Errno::ROFS | Errno::ACCESS | Errno::PERM) if !exists(at, lock) => None,
        opened => Some(File::from(opened.map_err(io::Error::from).map_err(failed("open", lock))?)),
    };
    match file.as_ref().map_or(Ok(()), File::try_lock) {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(locked(dir).into()),
        Err(TryLockError::Error(source)) => return Err(failed("lock", lock)(source).into()),
    }
    let staging = match lock_staging(at) {
        Ok(staging) => staging,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(locked(dir).into()),
        Err(source) => return Err(failed("lock", name::STAGING)(source).into()),
    };
    let is_held = file.is_some() || staging.is_some();
    Ok(is_held.then_some(WriterLock { _staging: staging, _file: file }))
}

fn exists(at: BorrowedFd<'_>, name: &str) -> bool {
    rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

/// The same of every dataset in the vault: each can be opened by itself, by its directory in the store. It takes two descriptors for each.
///
/// # Errors
/// [`Fault::Locked`], and those of the store.
pub fn lock_out_writers_below(dir: &Path) -> Result<Vec<WriterLock>> {
    raise_descriptor_limit();
    let below = lamassu_vault::datasets_below(dir);
    let mut held = Vec::new();
    for stored in below.with_context(|| format!("cannot look for datasets in {}", dir.display()))? {
        held.extend(lock_out_writers_of(dir, &stored)?);
    }
    Ok(held)
}

/// The same of one dataset, by its path in the store of the vault in `dir`.
///
/// # Errors
/// [`Fault::Locked`], and those of the store.
pub fn lock_out_writers_of(dir: &Path, stored: &Path) -> Result<Option<WriterLock>> {
    lock_in(&Place::of(dir)?.below(stored)?)
}

/// A directory of a vault, held open. Whoever can write to the store can put a link on the way to it at any time: files in it are reached through the
/// descriptor, which no link leads elsewhere, and never by its name.
pub struct Place {
    at: OwnedFd,
    dir: PathBuf,
}

impl Place {
    /// The vault that a person named: links on the way to it are theirs, and followed.
    pub fn of(dir: &Path) -> Result<Place> {
        let opened = search(rustix::fs::CWD, dir.as_os_str(), OFlags::empty());
        Place::opened(opened, dir.into())
    }

    /// A directory in it, by its path in the store.
    ///
    /// # Errors
    /// [`Fault::Backing`], as for a link on the way.
    pub fn below(&self, stored: &Path) -> Result<Place> {
        Place::opened(directory_below(self.at.as_fd(), stored), self.dir.join(stored))
    }

    fn opened(opened: io::Result<OwnedFd>, dir: PathBuf) -> Result<Place> {
        match opened {
            Ok(at) => Ok(Place { at, dir }),
            Err(source) => Err(Fault::Backing { op: "open", path: dir, source }.into()),
        }
    }

    /// The directory as a person knows it: to be shown, not to be opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The path of a file in it, through the descriptor: good for as long as this is kept.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// The same of the directory itself.
    pub fn path(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.at.as_raw_fd().to_string())
    }
}

/// A directory below another one, opened so that what is in it can be opened: name by name, as its path may be longer than the system takes, and no link is
/// followed.
fn directory_below(at: BorrowedFd<'_>, stored: &Path) -> io::Result<OwnedFd> {
    let mut at = search(at, OsStr::new("."), OFlags::NOFOLLOW)?;
    for component in stored {
        at = search(at.as_fd(), component, OFlags::NOFOLLOW)?;
    }
    Ok(at)
}

fn search(at: BorrowedFd<'_>, name: &OsStr, more: OFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | more;
    Ok(rustix::fs::openat(at, name, flags, Mode::empty())?)
}

/// As many files open as the system lets this process: for what holds many at once.
pub fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}

/// Tries until the vault is free. umount(8) returns before the daemon has closed the vault, so a writer that has it mounted nowhere may be about to
/// close it.
///
/// # Errors
/// Those of `attempt`: [`Fault::Locked`] at once where it is mounted, otherwise after [`CLOSING`].
pub fn once_closed<T>(dir: &Path, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + CLOSING;
    loop {
        let error = match attempt() {
            Err(error) if matches!(error.downcast_ref(), Some(Fault::Locked { .. })) => error,
            done => return done,
        };
        if Instant::now() > deadline || crate::mounts::of_vault(dir).is_some() {
            return Err(error);
        }
        crate::signals::check()?;
        std::thread::sleep(POLL);
    }
}

/// Another writer, and where it is mounted if that is on this machine.
pub fn locked(dir: &Path) -> Fault {
    let place = crate::mounts::of_vault(dir).map(|m| format!(": mounted on {}", m.mountpoint.display()));
    Fault::Locked { dir: dir.into(), place: place.unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vault_that_nobody_ever_wrote_is_locked_too() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock_out_writers(dir.path()).unwrap().expect("a lock");
        let writer = LocalBackend::open(dir.path()).unwrap();
        let refused = writer.try_lock(OsStr::new(name::LOCK)).map(drop).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        drop(held);
        drop(writer.try_lock(OsStr::new(name::LOCK)).unwrap());
    }

    #[test]
    fn a_place_is_left_by_no_link() {
        let (store, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let inner = store.path().join("a/inner");
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::create_dir(outside.path().join("inner")).unwrap();
        let of = |stored: &str| Place::of(store.path()).and_then(|place| place.below(Path::new(stored)));
        let place = of("a/inner").unwrap();
        assert_eq!(place.dir(), inner);
        std::fs::rename(store.path().join("a"), store.path().join("moved")).unwrap();
        std::os::unix::fs::symlink(outside.path(), store.path().join("a")).unwrap();
        std::fs::write(place.file("f"), b"content").unwrap();
        assert_eq!(std::fs::read(store.path().join("moved/inner/f")).unwrap(), b"content");
        for stored in ["a", "a/inner"] {
            let refused = of(stored).map(drop).unwrap_err().to_string();
            assert!(refused.contains(&store.path().join(stored).display().to_string()), "{refused}");
        }
        assert_eq!(std::fs::read_dir(outside.path().join("inner")).unwrap().count(), 0);
    }
}
