//! From a directory to an open vault: find the header, unlock it, open the tree.

use crate::anchors::{Access, check};
use crate::error::At;
use crate::lock::once_closed;
use crate::pins::Succession;
use crate::{Error, Policy, Result};
use lamassu_anchor::Anchor;
use lamassu_format::header::VaultHeader;
use lamassu_format::name;
use lamassu_keys::{Material, Unlocked, header_file};
use lamassu_store::Backend;
use lamassu_store::backend::LocalBackend;
use lamassu_vault::{Durability, Freshness, Integrity, Options, Vault, VaultError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A vault directory with its header, not opened yet. The header is not authenticated.
pub struct Found {
    /// as given
    pub dir: PathBuf,
    /// its header
    pub header: VaultHeader,
}

/// A vault whose keys are loaded.
pub struct Unsealed {
    /// the directory and the header
    pub found: Found,
    /// the keys
    pub keys: Unlocked,
    pub(crate) policy: Policy,
}

/// An open vault and its store.
pub struct Opened {
    /// the tree
    pub vault: Arc<Vault>,
    /// its store
    pub backend: Arc<dyn Backend>,
    /// whether the vault is open read-only
    pub read_only: bool,
    /// its anchor
    pub anchor: Option<Arc<Anchor>>,
}

/// The default options: full verification, every barrier.
pub fn options(read_only: bool) -> Options {
    Options {
        integrity: Integrity::Full,
        durability: Durability::Ordered,
        read_only,
        approved_only: false,
        threads: 0,
        device: None,
        anchor: None,
        freshness: Freshness::default(),
        events: Default::default(),
        upkeep: Default::default(),
        by_turns: false,
    }
}

/// The store below a vault.
///
/// # Errors
/// [`Error::NotADirectory`].
pub fn backend(dir: &Path) -> Result<LocalBackend> {
    LocalBackend::open(dir).map_err(|source| Error::NotADirectory { dir: dir.into(), source })
}

impl Found {
    /// Reads the header below `dir`.
    ///
    /// # Errors
    /// [`Error::NotADirectory`], [`Error::NotAVault`], [`Error::NoHeader`], [`lamassu_keys::KeyError::Destroyed`],
    /// [`Error::File`].
    pub fn at(policy: &Policy, dir: &Path) -> Result<Found> {
        let unusable = |source| Error::NotADirectory { dir: dir.into(), source };
        if !std::fs::metadata(dir).map_err(unusable)?.is_dir() {
            return Err(unusable(io::Error::from_raw_os_error(libc::ENOTDIR)));
        }
        match header_file::read(&dir.join(name::HEADER)) {
            Ok(header) => {
                policy.refuse_destroyed(&header).at(dir)?;
                Ok(Found { dir: dir.into(), header })
            }
            Err(header_file::FileError::Missing { path: _ }) => Err(no_vault(dir)),
            Err(error) => Err(error.into()),
        }
    }

    /// Unlocks the header with key material; `slot`: the one slot to try.
    ///
    /// # Errors
    /// [`Error::NotApproved`]; those of [`Policy::unlock`].
    pub fn unlock(
        self,
        policy: &Policy,
        material: &Material,
        slot: Option<u32>,
    ) -> Result<(Unsealed, Option<Succession>)> {
        policy.check_small_files(self.header.convergent_small_files())?;
        let (keys, succession) = policy.unlock(&self.header, material, slot, &self.dir)?;
        Ok((Unsealed::new(self, keys, policy.clone()), succession))
    }
}

/// The error for a directory without a header.
fn no_vault(dir: &Path) -> Error {
    // `lamassu.lock` is not a sign of a vault: a process that only looked for another writer may have left one.
    let left = [name::DIR_RECORD, name::HISTORY, name::STAGING, name::HEADER_REPLACED, name::HEADER_REPLACING];
    match left.iter().any(|name| dir.join(name).symlink_metadata().is_ok()) {
        true => Error::NoHeader { dir: dir.into() },
        false => Error::NotAVault { dir: dir.into() },
    }
}

impl Unsealed {
    /// A vault whose header was opened with these keys.
    pub fn new(found: Found, keys: Unlocked, policy: Policy) -> Unsealed {
        Unsealed { found, keys, policy }
    }

    /// The policy under which it is opened.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Opens the tree.
    ///
    /// # Errors
    /// [`Error::SuiteNeedsFull`], [`Error::Locked`], [`Error::StoreReadOnly`], [`Error::CannotOpen`],
    /// [`Error::Interrupted`].
    pub fn open(&self, options: Options) -> Result<Arc<Vault>> {
        self.open_over(options, backend).map(|opened| opened.vault)
    }

    /// Opens the tree in order to serve it. With `quiet`, reads do not change the access times of the stored files.
    ///
    /// # Errors
    /// As [`Unsealed::open`].
    pub fn open_to_serve(&self, options: Options, quiet: bool) -> Result<Opened> {
        self.open_over(options, |dir| {
            let backend = backend(dir)?;
            Ok(if quiet { backend.without_access_times() } else { backend })
        })
    }

    /// Opens the vault's anchor, and checks that header and history are the newest that it knows.
    ///
    /// # Errors
    /// Those of [`crate::Anchors::of_header`]; [`VaultError::Outdated`].
    pub fn anchor(&self, access: Access) -> Result<Option<Arc<Anchor>>> {
        let Found { dir, header } = &self.found;
        let anchor = self.policy.anchor_of(header, access, dir)?;
        if let Some(anchor) = &anchor {
            check(anchor, access, header, &self.keys, dir).at(dir)?;
        }
        Ok(anchor)
    }

    /// Opens the tree for writing without its anchor, which is about to be rebuilt from the tree.
    ///
    /// # Errors
    /// [`Error::AnchorAtServer`]: other hosts may write the vault; as [`Unsealed::open`].
    pub fn open_unanchored(&self) -> Result<Vault> {
        let Found { dir, header } = &self.found;
        self.policy.anchors.refuse_server(&header.id())?;
        once_closed(&self.policy, dir, || {
            let ring = self.keys.key_ring(header.suite())?;
            let approved_only = self.policy.is_approved_only();
            let options = Options { approved_only, ..options(header.is_snapshot()) };
            match Vault::open(Arc::new(backend(dir)?), header, ring, options) {
                Err(VaultError::Locked) => Err(self.policy.locked(dir)),
                opened => opened.map_err(|source| Error::CannotOpen { dir: dir.clone(), source }),
            }
        })
    }

    fn open_over(&self, options: Options, backend: impl Fn(&Path) -> Result<LocalBackend>) -> Result<Opened> {
        let Found { dir, header } = &self.found;
        if options.integrity == Integrity::Metadata && header.suite().is_malleable() {
            return Err(Error::SuiteNeedsFull { suite: header.suite().name() });
        }
        once_closed(&self.policy, dir, || {
            let ring = self.keys.key_ring(header.suite())?;
            if header.is_anchored() && self.policy.anchors.are_used().is_ok() {
                self.policy.anchors.report_to_server(&header.id(), &options.events)?;
            }
            if !options.read_only {
                ring.prepare();
            }
            let anchor = self.anchor(Access::of(options.read_only))?;
            let backend: Arc<dyn Backend> = Arc::new(backend(dir)?);
            let approved_only = self.policy.is_approved_only();
            let options = Options { anchor: anchor.clone(), approved_only, ..options.clone() };
            match Vault::open(backend.clone(), header, ring, options.clone()) {
                Ok(vault) => Ok(Opened { vault: Arc::new(vault), backend, read_only: options.read_only, anchor }),
                Err(VaultError::Locked) => Err(self.policy.locked(dir)),
                Err(VaultError::ReadOnly) => Err(Error::StoreReadOnly { dir: dir.clone() }),
                Err(source) => Err(Error::CannotOpen { dir: dir.clone(), source }),
            }
        })
    }
}
