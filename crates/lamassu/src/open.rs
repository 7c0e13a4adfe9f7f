//! From a directory to an open vault: find the header, unlock it, open the tree.

use crate::fault::Fault;
use crate::keys::{self, KeyArg};
use crate::output::Ui;
use anyhow::{Context, Result};
use lamassu_format::header::VaultHeader;
use lamassu_format::name;
use lamassu_keys::{Unlocked, header_file};
use lamassu_store::backend::LocalBackend;
use lamassu_vault::{Durability, Integrity, Options, Vault, VaultError};
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
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
    Options { integrity: Integrity::Full, durability: Durability::Ordered, read_only, threads: 0 }
}

impl Found {
    /// Reads the header below `dir`.
    pub fn at(dir: &Path) -> Result<Found> {
        let meta = std::fs::metadata(dir).map_err(|source| Fault::NotADirectory { dir: dir.into(), source })?;
        if !meta.is_dir() {
            let source = io::Error::from_raw_os_error(libc::ENOTDIR);
            return Err(Fault::NotADirectory { dir: dir.into(), source }.into());
        }
        let path = dir.join(name::HEADER);
        match header_file::read(&path) {
            Ok(header) => Ok(Found { dir: dir.into(), header }),
            Err(header_file::FileError::Missing { path: _ }) => Err(Fault::NotAVault { dir: dir.into() }.into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Loads the keys.
    pub fn unlock(self, ui: &Ui, key: &KeyArg) -> Result<Unsealed> {
        let keys = keys::unlock(ui, &self.header, &key.source()?, &self.dir)?;
        Ok(Unsealed { found: self, keys })
    }
}

impl Unsealed {
    /// Opens the tree.
    pub fn open(&self, options: Options) -> Result<Arc<Vault>> {
        self.open_over(options, backend)
    }

    /// Opens the tree; reading it leaves the access times of the stored files alone.
    pub fn open_without_access_times(&self, options: Options) -> Result<Arc<Vault>> {
        self.open_over(options, |dir| Ok(backend(dir)?.without_access_times()))
    }

    fn open_over(&self, options: Options, backend: impl Fn(&Path) -> Result<LocalBackend>) -> Result<Arc<Vault>> {
        let Found { dir, header } = &self.found;
        if options.integrity == Integrity::Metadata && header.suite().is_malleable() {
            return Err(Fault::SuiteNeedsFull { suite: header.suite().name() }.into());
        }
        once_closed(dir, || {
            let ring = self.keys.key_ring(header.suite())?;
            match Vault::open(Arc::new(backend(dir)?), header, ring, options.clone()) {
                Ok(vault) => Ok(Arc::new(vault)),
                Err(VaultError::Locked) => Err(locked(dir).into()),
                Err(error) => Err(error).with_context(|| format!("cannot open the vault in {}", dir.display())),
            }
        })
    }
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

/// Finds, unlocks and opens.
pub fn vault(ui: &Ui, dir: &Path, key: &KeyArg, read_only: bool) -> Result<Arc<Vault>> {
    Found::at(dir)?.unlock(ui, key)?.open(options(read_only))
}

/// The store below a vault.
pub fn backend(dir: &Path) -> Result<LocalBackend> {
    LocalBackend::open(dir).map_err(|source| Fault::NotADirectory { dir: dir.into(), source }.into())
}

/// Holds the writer's lock of a vault without changing anything in it; `None` where no writer was ever there.
///
/// # Errors
/// [`Fault::Locked`].
pub fn lock_out_writers(dir: &Path) -> Result<Option<File>> {
    let path = dir.join(name::LOCK);
    let file = match File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Fault::Backing { op: "open", path, source }.into()),
    };
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(locked(dir).into()),
        Err(TryLockError::Error(source)) => Err(Fault::Backing { op: "lock", path, source }.into()),
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
