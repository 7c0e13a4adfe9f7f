//! From a directory to an open vault: find the header, unlock it, open the tree.

use crate::anchors::{Access, check, is_older_header};
use crate::error::At;
use crate::lock::once_closed;
use crate::pins::Succession;
use crate::{Error, Policy, Result};
use lamassu_anchor::{Anchor, Digest};
use lamassu_format::header::{Header, SlotKind, VaultHeader};
use lamassu_format::name;
use lamassu_keys::{KeyError, Material, Unlocked, header_file, witness};
use lamassu_store::Backend;
use lamassu_store::backend::LocalBackend;
use lamassu_vault::{Durability, Freshness, Integrity, Options, Vault, VaultError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a header is read again that other processes replace meanwhile.
pub(crate) const LOOKS_MAX: u32 = 5;
/// How long the store may take to show the header that another host has put there, and how often to look.
pub(crate) const SHOWN_WITHIN: Duration = Duration::from_secs(2);
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(50);

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
    /// [`Error::NotADirectory`], [`Error::NotAVault`], [`Error::NoHeader`], [`Error::HeaderIsKept`],
    /// [`lamassu_keys::KeyError::Destroyed`], [`Error::File`].
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
    if header_file::read::<VaultHeader>(&dir.join(name::HEADER_REPLACING)).is_ok() {
        return Error::HeaderIsKept { dir: dir.into() };
    }
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

    /// Opens the tree. If another process has replaced the header since it was read, the present one and its keys take
    /// their places in `self`.
    ///
    /// # Errors
    /// [`Error::SuiteNeedsFull`], [`Error::Locked`], [`Error::StoreReadOnly`], [`Error::CannotOpen`],
    /// [`Error::Interrupted`]; [`KeyError::WrongKey`] if the present header no longer has the slot that opened.
    pub fn open(&mut self, options: Options) -> Result<Arc<Vault>> {
        self.open_over(options, backend).map(|opened| opened.vault)
    }

    /// Opens the tree in order to serve it. With `quiet`, reads do not change the access times of the stored files.
    ///
    /// # Errors
    /// As [`Unsealed::open`].
    pub fn open_to_serve(&mut self, options: Options, quiet: bool) -> Result<Opened> {
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

    /// Opens the tree for writing without its anchor, which is about to be rebuilt from the tree. As for
    /// [`Unsealed::open`], the present header counts.
    ///
    /// # Errors
    /// [`Error::AnchorAtServer`]: other hosts may write the vault; as [`Unsealed::open`].
    pub fn open_unanchored(&mut self) -> Result<Vault> {
        self.policy.anchors.refuse_server(&self.found.header.id())?;
        let (policy, dir) = (self.policy.clone(), self.found.dir.clone());
        once_closed(&policy, &dir, || {
            let mut looks_left = LOOKS_MAX;
            loop {
                self.take_present()?;
                let header = &self.found.header;
                let ring = self.keys.key_ring(header.suite())?;
                let approved_only = policy.is_approved_only();
                let options = Options { approved_only, ..options(header.is_snapshot()) };
                let opened = self.opened(Vault::open(Arc::new(backend(&dir)?), header, ring, options));
                looks_left -= 1;
                if let Some(opened) = self.of_present(opened, looks_left == 0) {
                    return opened;
                }
            }
        })
    }

    fn open_over(&mut self, options: Options, backend: impl Fn(&Path) -> Result<LocalBackend>) -> Result<Opened> {
        let header = &self.found.header;
        if options.integrity == Integrity::Metadata && header.suite().is_malleable() {
            return Err(Error::SuiteNeedsFull { suite: header.suite().name() });
        }
        let (policy, dir) = (self.policy.clone(), self.found.dir.clone());
        once_closed(&policy, &dir, || self.open_newest(&options, &backend))
    }

    /// A key was waited for since the header was read, or a writer: meanwhile another process may have replaced it.
    fn open_newest(&mut self, options: &Options, backend: impl Fn(&Path) -> Result<LocalBackend>) -> Result<Opened> {
        if self.found.header.is_anchored() && self.policy.anchors.are_used().is_ok() {
            self.policy.anchors.report_to_server(&self.found.header.id(), &options.events)?;
        }
        let mut looks_left = LOOKS_MAX;
        loop {
            let anchor = self.anchor_of_newest(Access::of(options.read_only), options.by_turns)?;
            let is_compared = anchor.is_some();
            let opened = self.open_with(anchor, options, &backend);
            looks_left -= 1;
            if let Some(opened) = self.of_present(opened, is_compared || looks_left == 0) {
                return opened;
            }
        }
    }

    /// What was opened, or failed to open, with the header that is in the store now; `None`: another has taken its
    /// place, and what was opened is closed. A tree whose header no anchor compares is asked for when it is open: from
    /// then on the writer's lock keeps others from adding epochs, which all writes must use.
    fn of_present<T>(&self, opened: Result<T>, is_last: bool) -> Option<Result<T>> {
        if is_last || matches!(opened, Err(Error::Locked { .. })) {
            return Some(opened);
        }
        match (self.is_present(), opened) {
            (Ok(true), opened) | (Err(_), opened @ Err(_)) => Some(opened),
            (Err(error), Ok(_)) => Some(Err(error)),
            // The error of an old header is not the vault's.
            (Ok(false), _) => None,
        }
    }

    fn open_with(
        &self,
        anchor: Option<Arc<Anchor>>,
        options: &Options,
        backend: impl Fn(&Path) -> Result<LocalBackend>,
    ) -> Result<Opened> {
        let Found { dir, header } = &self.found;
        let ring = self.keys.key_ring(header.suite())?;
        if !options.read_only {
            ring.prepare();
        }
        let backend: Arc<dyn Backend> = Arc::new(backend(dir)?);
        let approved_only = self.policy.is_approved_only();
        let options = Options { anchor: anchor.clone(), approved_only, ..options.clone() };
        let read_only = options.read_only;
        let vault = self.opened(Vault::open(backend.clone(), header, ring, options))?;
        Ok(Opened { vault: Arc::new(vault), backend, read_only, anchor })
    }

    fn opened(&self, opened: lamassu_vault::Result<Vault>) -> Result<Vault> {
        let dir = &self.found.dir;
        opened.map_err(|error| match error {
            VaultError::Locked => self.policy.locked(dir),
            VaultError::ReadOnly => Error::StoreReadOnly { dir: dir.clone() },
            source => Error::CannotOpen { dir: dir.clone(), source },
        })
    }

    /// Opens the anchor of the header that is in the store now, by the anchor the newest. `None`: it has no anchor.
    fn anchor_of_newest(&mut self, access: Access, by_turns: bool) -> Result<Option<Arc<Anchor>>> {
        let (mut looks_left, until) = (LOOKS_MAX, Instant::now() + SHOWN_WITHIN);
        // Held from look to look: in a turn it is opened once.
        let mut held: Option<Arc<Anchor>> = None;
        loop {
            let Found { dir, header } = &self.found;
            let outdated = match self.policy.anchor_of(header, access, dir) {
                Ok(None) => None,
                Ok(Some(anchor)) => match check(&anchor, access, header, &self.keys, dir).at(dir) {
                    Err(error) if is_older_header(&error) => {
                        held = Some(anchor);
                        Some(error)
                    }
                    checked => return checked.map(|()| Some(anchor)),
                },
                Err(error) if is_older_header(&error) => Some(error),
                Err(error) => return Err(error),
            };
            let (now, outdated) = match (Found::at(&self.policy, dir), outdated) {
                (Ok(Found { header, .. }), outdated) => (header, outdated),
                // What is there now, or is not, changes nothing in the anchor's answer.
                (Err(_), Some(outdated)) => return Err(outdated),
                (Err(error), None) => return Err(error),
            };
            let digest = witness::digest(&now)?;
            let is_present = digest == witness::digest(header)?;
            looks_left -= 1;
            match outdated {
                None if is_present || looks_left == 0 => return Ok(None),
                // A network file system may show the one before for a moment.
                Some(_) if is_present && by_turns && Instant::now() < until => {
                    looks_left += 1;
                    std::thread::sleep(LOOK_AGAIN);
                    continue;
                }
                Some(error) if is_present || looks_left == 0 => return Err(error),
                // A store that shows a header without this slot gets no other answer than the anchor's.
                Some(error)
                    if !has_slot_of(&now, &self.keys)
                        && !held.as_ref().is_some_and(|anchor| anchor.vault().header.is_current(Digest(digest))) =>
                {
                    return Err(error);
                }
                Some(error) => match self.take_over(now) {
                    // Who may open the vault is decided by the newest header.
                    Err(refused) if !is_about_who_may_open(&refused) => return Err(error),
                    taken => taken?,
                },
                None => self.take_over(now)?,
            }
        }
    }

    /// Whether the header is that in the store.
    fn is_present(&self) -> Result<bool> {
        let now = Found::at(&self.policy, &self.found.dir)?.header;
        Ok(witness::digest(&now)? == witness::digest(&self.found.header)?)
    }

    fn take_present(&mut self) -> Result<()> {
        if self.is_present()? {
            return Ok(());
        }
        let now = Found::at(&self.policy, &self.found.dir)?.header;
        self.take_over(now)
    }

    /// Takes over a header that has replaced the one that was read, with its keys.
    fn take_over(&mut self, now: VaultHeader) -> Result<()> {
        let Found { dir, header } = &self.found;
        if !has_slot_of(&now, &self.keys) {
            let kind = header.keys().slot(self.keys.slot()).map_or(SlotKind::Raw, |slot| slot.kind);
            let tried = now.keys().slots.iter().filter(|slot| slot.kind == kind).count();
            return Err(KeyError::WrongKey { kind, tried }).at(dir);
        }
        let mut keys = self.keys.reopen(&now).at(dir)?;
        self.policy.check_ciphers(&now)?;
        self.policy.check_small_files(now.convergent_small_files())?;
        if self.policy.pins.check(&now).at(dir)?.is_some() {
            tracing::warn!(vault = %dir.display(), "the vault's administrator has another key, which the pinned one has signed");
        }
        keys.saw(&now);
        (self.keys, self.found.header) = (keys, now);
        Ok(())
    }
}

fn is_about_who_may_open(error: &Error) -> bool {
    matches!(error.innermost(), Error::Key(KeyError::WrongKey { .. } | KeyError::Destroyed(_)))
}

/// Whether a header replaces the one that `keys` opened: it differs, and still has the slot that they came from. The
/// newest header decides who may open the vault.
pub(crate) fn takes_the_place(now: &VaultHeader, opened: &VaultHeader, keys: &Unlocked) -> Result<bool> {
    Ok(witness::digest(now)? != witness::digest(opened)? && has_slot_of(now, keys))
}

fn has_slot_of(header: &VaultHeader, keys: &Unlocked) -> bool {
    header.keys().slot(keys.slot()).is_some()
}

#[cfg(test)]
mod tests;
