//! The keys of all vaults that are open in this process, by member. Those of datasets are loaded when a dataset is
//! entered, and dropped when it is unloaded.

mod by_turns;
mod frozen;

pub use by_turns::TurnOpening;
pub(crate) use frozen::headers_below;

use crate::anchors::{self, Access, NewTrees, check};
use crate::control::counters::{Counters, Operation};
use crate::open::{LOOKS_MAX, takes_the_place};
use crate::{Error, Place, Policy, Result, backend, guard};
use lamassu_anchor::table::Standing;
use lamassu_anchor::{Anchor, Digest, VaultRow};
use lamassu_crypto::KeyRing;
use lamassu_format::header::{Caching, VaultHeader, VaultId, Verified};
use lamassu_format::{Suite, name};
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, FileError, History, KeyError, Unlocked, admin, header_file, unlock_by_parent};
use lamassu_store::Backend;
use lamassu_vault::event::Events;
use lamassu_vault::forest::{HeldDataset, Number, Opener, Opening, ROOT_MEMBER};
use lamassu_vault::locks::Locks;
use lamassu_vault::turns::Turns;
use lamassu_vault::{Forest, Integrity, Options, Vault, VaultError};
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// What is kept for an open vault.
pub struct Kept {
    /// the vault's id
    id: VaultId,
    /// the keys that opened it
    pub keys: Unlocked,
    suite: Suite,
    /// what is kept of a dataset that hosts use by turns
    by_turns: Option<by_turns::InTurns>,
    /// the header's properties for datasets that do not set their own
    integrity: Integrity,
    cached: bool,
    /// the header's own value when it was last verified
    cache: Option<Caching>,
    /// its anchor
    anchor: Option<Arc<Anchor>>,
}

/// One lock for each vault, by its id. It is held while the vault's header is compared with its anchor, or replaced,
/// and while its history is appended to. So opening a vault waits for a change of its header, and sees the result.
/// Taken before [`Keeper::kept`].
#[derive(Default)]
struct Headers(Mutex<HashMap<VaultId, Arc<Mutex<()>>>>);

impl Headers {
    fn of(&self, vault: VaultId) -> Arc<Mutex<()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(vault).or_default().clone()
    }
}

/// What a vault is opened with.
struct Newest {
    header: VaultHeader,
    keys: Unlocked,
    anchor: Option<Arc<Anchor>>,
}

/// Keeps the loaded keys of all open vaults of this process.
pub struct Keeper {
    /// directory of the mount's own vault, held open: another directory may come to its path, which is absolute
    own: Place,
    /// how vaults are opened; integrity unless the header asks for more
    options: Options,
    /// whether the mount keeps contents in the page cache
    cached: bool,
    /// for the histories; `None`: no mount, so loading and unloading are not recorded
    mountpoint: Option<PathBuf>,
    policy: Policy,
    counters: Arc<Counters>,
    kept: Mutex<HashMap<Number, Kept>>,
    /// Keys that open datasets when their turns begin.
    brought: Mutex<HashMap<Number, Unlocked>>,
    driving: by_turns::Driving,
    headers: Headers,
    forest: OnceLock<Weak<Forest>>,
    me: Weak<Keeper>,
}

impl Keeper {
    /// For a mount, or a command that works without one. The own vault is opened with `options`.
    pub fn new(own: Place, options: Options, cached: bool, mountpoint: Option<PathBuf>, policy: Policy) -> Arc<Keeper> {
        Arc::new_cyclic(|me| Keeper {
            own,
            options,
            cached,
            mountpoint,
            policy,
            counters: Arc::default(),
            kept: Mutex::default(),
            brought: Mutex::default(),
            driving: OnceLock::new(),
            headers: Headers::default(),
            forest: OnceLock::new(),
            me: me.clone(),
        })
    }

    /// The policy under which vaults are opened.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Where integrity events go.
    pub fn events(&self) -> &Events {
        &self.options.events
    }

    /// The counters of this process.
    pub(crate) fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Sets the forest of the vaults whose keys these are; once.
    pub fn serve(&self, forest: &Arc<Forest>) {
        // A keeper has one forest.
        let _ = self.forest.set(Arc::downgrade(forest));
    }

    /// All kept keys, locked.
    pub fn kept(&self) -> MutexGuard<'_, HashMap<Number, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` while no other thread of this process uses the header or the history of the same vault.
    pub(crate) fn alone_with<T>(&self, vault: VaultId, work: impl FnOnce() -> T) -> T {
        let lock = self.headers.of(vault);
        let _one = lock.lock().unwrap_or_else(PoisonError::into_inner);
        work()
    }

    /// The present directory of a member's vault, for messages. To open files in it, use [`Keeper::place`].
    pub fn dir(&self, member: Number) -> Result<PathBuf, VaultError> {
        match self.place_by_turns(member) {
            Some(place) => Ok(self.own.shown(&place).unwrap_or_else(|| place.dir().into())),
            None if member == ROOT_MEMBER => Ok(self.own.dir().into()),
            None => Ok(self.own.dir().join(self.stored_dir(member)?)),
        }
    }

    /// The same, held open. For the mount's own vault it is the directory that was opened first, wherever it is now.
    ///
    /// # Errors
    /// [`VaultError::KeyNotLoaded`]; [`Error::Backing`], also if there is a link in the path now.
    pub fn place(&self, member: Number) -> Result<Place> {
        match self.place_by_turns(member) {
            Some(place) => Ok(place),
            None if member == ROOT_MEMBER => self.own.again(),
            None => self.own.below(&self.stored_dir(member)?),
        }
    }

    /// Checks that a store is that of the vault whose keys these are.
    ///
    /// # Errors
    /// [`Error::Backing`] with `ESTALE`: another directory came to its path during opening.
    pub(crate) fn require_store(&self, store: &dyn Backend) -> Result<()> {
        let own = backend(&self.own.path())?.root().stat();
        let is_same = own.and_then(|own| Ok(own.is_same(&store.root().stat()?)));
        let stale = || Err(io::Error::from_raw_os_error(libc::ESTALE));
        is_same.and_then(|is_same| if is_same { Ok(()) } else { stale() }).map_err(|source| Error::Backing {
            op: "open",
            path: self.own.dir().into(),
            source,
        })
    }

    /// The path of a dataset in the store of the mount's own vault.
    fn stored_dir(&self, member: Number) -> Result<PathBuf, VaultError> {
        self.forest()?.stored_dir(member).ok_or(VaultError::KeyNotLoaded)
    }

    fn forest(&self) -> Result<Arc<Forest>, VaultError> {
        self.forest.get().and_then(Weak::upgrade).ok_or(VaultError::KeyNotLoaded)
    }

    /// The open vault of a member.
    pub fn vault(&self, member: Number) -> Result<Arc<Vault>, VaultError> {
        self.forest()?.vault(member).ok_or(VaultError::KeyNotLoaded)
    }

    /// How to open a vault, whose keys are kept from now on. Called while no other thread can open or close the member.
    /// `parent`: the member around it. `header`: as it was read; if it was replaced since, the present one is opened.
    ///
    /// # Errors
    /// [`Error::NotApproved`]; [`VaultError::Outdated`]; never [`KeyError::NoOuterKey`] for a vault.
    pub fn opening(
        &self,
        member: Number,
        parent: Option<Number>,
        header: VaultHeader,
        keys: Unlocked,
    ) -> Result<Opening> {
        self.alone_with(header.id(), || self.opening_alone(member, parent, header, keys))
    }

    fn opening_alone(
        &self,
        member: Number,
        parent: Option<Number>,
        header: VaultHeader,
        keys: Unlocked,
    ) -> Result<Opening> {
        if let Some(parent) = parent {
            self.policy.anchors.lies_in(&header.id(), &self.forest()?.member(parent)?.id);
        }
        let Newest { header, mut keys, anchor } = self.newest(member, header, keys)?;
        if anchor.is_some() {
            self.policy.anchors.report_to_server(&header.id(), &self.options.events)?;
        }
        keys.saw(&header);
        self.policy.check_ciphers(&header)?;
        self.policy.check_small_files(header.convergent_small_files())?;
        let ring = keys.key_ring(header.suite())?;
        let read_only = self.options.read_only || header.is_snapshot();
        let (integrity, cached) = self.settings(parent, &header);
        let cache = header.cache();
        if let Some(anchor) = anchor.as_ref().filter(|anchor| anchor.may_end() && self.mountpoint.is_some()) {
            let me = self.me.clone();
            guard::start(move || me.upgrade()?.forest().ok(), anchor)?;
        }
        let (id, suite) = (header.id(), header.suite());
        self.kept()
            .insert(member, Kept { id, keys, suite, by_turns: None, integrity, cached, cache, anchor: anchor.clone() });
        let approved_only = self.policy.is_approved_only();
        let options = Options { integrity, read_only, approved_only, anchor, ..self.options.clone() };
        Ok(Opening { header, ring, options, cached })
    }

    /// How a vault with this header is verified, and whether the kernel may cache its contents.
    fn settings(&self, parent: Option<Number>, header: &VaultHeader) -> (Integrity, bool) {
        let kept = self.kept();
        let above = parent.and_then(|parent| kept.get(&parent));
        let (integrity, cached) = above.map_or((self.options.integrity, self.cached), |k| (k.integrity, k.cached));
        let integrity = match header.integrity() {
            // An inherited setting applies as far as the suite allows it; full is always allowed.
            None if header.suite().is_malleable() => Integrity::Full,
            None => integrity,
            Some(Verified::Full) => Integrity::Full,
            Some(Verified::Metadata) => Integrity::Metadata,
        };
        (integrity, self.caches(header.cache(), cached))
    }

    /// The newest header of a member's vault, by its anchor: the one that was read, or the one that has replaced it.
    fn newest(&self, member: Number, mut header: VaultHeader, mut keys: Unlocked) -> Result<Newest> {
        let mut looks_left = LOOKS_MAX;
        loop {
            let access = Access::of(self.options.read_only || header.is_snapshot());
            let outdated = match self.anchor(member, &header, &keys, access) {
                Err(error) if anchors::is_older_header(&error) => error,
                anchor => return Ok(Newest { anchor: anchor?, header, keys }),
            };
            looks_left -= 1;
            match header_file::read::<VaultHeader>(&self.place(member)?.file(name::HEADER)) {
                Ok(now) if looks_left > 0 && takes_the_place(&now, &header, &keys)? => {
                    (keys, header) = (keys.reopen(&now)?, now);
                }
                Ok(_) | Err(_) => return Err(outdated),
            }
        }
    }

    /// Opens the anchor of a member's vault, and checks that header and history are the newest that it knows.
    fn anchor(
        &self,
        member: Number,
        header: &VaultHeader,
        keys: &Unlocked,
        access: Access,
    ) -> Result<Option<Arc<Anchor>>> {
        let dir = self.dir(member)?;
        let Some(anchor) = self.policy.anchor_of(header, access, &dir)? else { return Ok(None) };
        check(&anchor, access, header, keys, &self.place(member)?.path())?;
        Ok(Some(anchor))
    }

    /// Checks that this process can use new keys in place of those that it had.
    ///
    /// # Errors
    /// [`Error::NoNetwork`].
    pub(crate) fn can_use(&self, now: &Unlocked, before: &Unlocked) -> Result<()> {
        let key = now.keychain().oblivious().filter(|key| before.keychain().oblivious() != Some(*key));
        match key {
            Some(key) if !self.policy.surroundings.has_network() => {
                Err(Error::NoNetwork { server: key.server.clone() })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Drops the anchor of a member: each turn opens it again.
    pub(crate) fn forget_anchor(&self, member: Number) {
        if let Some(kept) = self.kept().get_mut(&member) {
            kept.anchor = None;
        }
    }

    fn caches(&self, cache: Option<Caching>, above: bool) -> bool {
        match cache {
            None => above,
            Some(Caching::Mount) => self.cached,
            Some(Caching::None) => false,
        }
    }

    /// The trees by which the anchor of an open member verifies files; `None`: it has no anchor.
    pub(crate) fn trees(&self, member: Number) -> Option<NewTrees> {
        let VaultRow { degree_log2, blocks, .. } = self.vault(member).ok()?.options().anchor.as_ref()?.vault();
        Some(NewTrees { degree_log2, blocks })
    }

    /// The header of a member now says `cache`; called by its writer.
    pub fn set_cache(&self, member: Number, cache: Option<Caching>) {
        if let Some(kept) = self.kept().get_mut(&member) {
            kept.cache = cache;
        }
    }

    /// Whether contents of files of a member, and of those in it, may be cached after a change of its header.
    pub(crate) fn cached_in(&self, forest: &Forest, member: Number) -> Vec<(Number, bool)> {
        let all = forest.at_and_below(member);
        all.into_iter().map(|one| (one, self.cached_by(one, forest.parent(one)))).collect()
    }

    /// Whether contents of a member's files may be cached, after a change above it. The store's present header is not
    /// asked.
    fn cached_by(&self, member: Number, parent: Option<Number>) -> bool {
        let mut kept = self.kept();
        let above = parent.and_then(|parent| kept.get(&parent)).map_or(self.cached, |k| k.cached);
        let cached = self.caches(kept.get(&member).and_then(|k| k.cache), above);
        if let Some(kept) = kept.get_mut(&member) {
            kept.cached = cached;
        }
        cached
    }

    /// The mount exists: only now is the loading of its own vault recorded, since a mount that was refused must leave
    /// no record.
    pub fn mounted(&self) {
        if let Ok(vault) = self.vault(ROOT_MEMBER) {
            self.write_down_or_warn(ROOT_MEMBER, &vault);
        }
    }

    fn write_down_or_warn(&self, member: Number, vault: &Vault) {
        let id = self.forest().and_then(|forest| Ok(forest.member(member)?.id));
        let written = id.map_err(Error::from).and_then(|id| self.alone_with(id, || self.write_down(member, vault)));
        if let Err(error) = written {
            tracing::warn!(%error, "the history does not record that the vault was loaded");
        }
    }

    /// Records that a vault was loaded, and at its closing that it was unloaded. A failure to record does not affect
    /// the vault.
    fn write_down(&self, member: Number, vault: &Vault) -> Result<()> {
        let Some(mountpoint) = self.mountpoint.as_ref().filter(|_| !self.options.read_only) else { return Ok(()) };
        let place = self.place(member)?;
        let header: VaultHeader = header_file::read(&place.file(name::HEADER))?;
        if header.is_snapshot() {
            return Ok(());
        }
        let (mut history, slot, anchor) = {
            let kept = self.kept();
            let Kept { keys, anchor, .. } = kept.get(&member).ok_or(VaultError::KeyNotLoaded)?;
            (keys.history(&place.path(), &header)?, keys.slot(), anchor.clone())
        };
        let loaded = Event::new(EventKind::Loaded).detail("mountpoint", mountpoint.display());
        history.note(loaded.slot(slot))?;
        remember(anchor.as_deref(), &history)?;
        let (me, id) = (self.me.clone(), header.id());
        vault.at_close(move || {
            let note = |keeper: &Keeper| {
                // Another host may have the vault by now.
                if anchor.as_ref().is_some_and(|anchor| anchor.standing() != Standing::Good) {
                    return Ok(());
                }
                // Its place at that time: directories can be renamed.
                let place = keeper.place(member)?;
                let mut history = history.moved_to(&place.path());
                history.note(Event::new(EventKind::Unloaded).slot(slot))?;
                remember(anchor.as_deref(), &history)
            };
            let noted = me.upgrade().map(|keeper| keeper.alone_with(id, || note(&keeper)));
            if let Some(Err(error)) = noted {
                tracing::warn!(%error, "the history does not record the end of the mount");
            }
        });
        Ok(())
    }

    /// The keys of a dataset by those of the vault around it; `None`: they do not open it.
    fn keys_by_parent(
        &self,
        member: Number,
        header: &VaultHeader,
        above: &KeyRing,
    ) -> lamassu_vault::Result<Option<Unlocked>> {
        let keys = match unlock_by_parent(header, above) {
            Ok(keys) => keys,
            Err(KeyError::NoParentSlot) => return Ok(None),
            Err(error @ KeyError::OtherParent) => {
                tracing::warn!(member, %error, "locked");
                return Ok(None);
            }
            Err(error) => return Err(refused(&error)),
        };
        let pinned = self.policy.pins.known(&header.id()).map_err(|e| refused(&e))?;
        admin::check_pinned(header, &pinned).map_err(|e| refused(&e))?;
        Ok(Some(keys))
    }

    /// The keys of an open member.
    ///
    /// # Errors
    /// [`VaultError::KeyNotLoaded`].
    pub(crate) fn ring(&self, member: Number) -> Result<KeyRing> {
        let kept = self.kept();
        let kept = kept.get(&member).ok_or(VaultError::KeyNotLoaded)?;
        Ok(kept.keys.key_ring(kept.suite)?)
    }

    /// Whether vaults are opened read-only.
    pub(crate) fn is_read_only(&self) -> bool {
        self.options.read_only
    }

    fn open_dataset(
        &self,
        member: Number,
        parent: Number,
        above: &Vault,
        header: VaultHeader,
    ) -> lamassu_vault::Result<Option<Opening>> {
        let Some(keys) = self.keys_by_parent(member, &header, above.ring())? else { return Ok(None) };
        self.opening(member, Some(parent), header, keys).map(Some).map_err(|error| match error {
            Error::NotApproved { why } => VaultError::Refused(why),
            // Opened on its own, by its directory in the store.
            Error::Locked { .. } => VaultError::Locked,
            error if anchors::is_locked(&error) => VaultError::Locked,
            // Another process changes it.
            Error::File(FileError::Busy { .. }) => VaultError::Locked,
            // The anchor's error, or an outdated state that it has found.
            Error::Vault(error) => error,
            error => refused(&error),
        })
    }
}

/// The error for a dataset whose header is not accepted.
fn refused(error: &dyn std::fmt::Display) -> VaultError {
    VaultError::Damaged { what: "dataset header", stored: error.to_string() }
}

/// Tells the anchor the end of a history that was just appended to.
pub(crate) fn remember(anchor: Option<&Anchor>, history: &History) -> Result<()> {
    if let (Some(anchor), Some(mark)) = (anchor, history.mark()) {
        anchor.history_goes_to(mark.count, Digest(mark.head.0))?;
    }
    Ok(())
}

impl Opener for Keeper {
    fn open(
        &self,
        member: Number,
        (parent, above): (Number, &Vault),
        header: VaultHeader,
    ) -> lamassu_vault::Result<Option<Opening>> {
        self.counters.count(Operation::OpenDataset, || self.open_dataset(member, parent, above, header))
    }

    fn take_turns(&self, member: Number) -> lamassu_vault::Result<(Arc<Turns>, Arc<dyn Locks>)> {
        self.take_turns_with(member).map_err(of_turns)
    }

    fn stored_datasets(&self) -> lamassu_vault::Result<Vec<(VaultId, VaultId)>> {
        frozen::stored_datasets(self).map_err(of_turns)
    }

    fn hold(
        &self,
        dataset: (&VaultId, &VaultId),
        is_wanted: &dyn Fn() -> bool,
    ) -> lamassu_vault::Result<Option<Box<dyn HeldDataset>>> {
        frozen::hold_dataset(&self.policy.anchors, dataset, is_wanted).map_err(of_turns)
    }

    fn opened(&self, member: Number, vault: &Arc<Vault>) {
        // The mount's own vault is opened before the mount exists: see `mounted`.
        if self.forest.get().is_some() {
            self.write_down_or_warn(member, vault);
        }
    }

    fn unloading(&self, member: Number) {
        self.brought().remove(&member);
        let unloaded = self.kept().remove(&member);
        let is_anchored = |kept: &Kept| kept.anchor.is_some() || kept.by_turns.is_some();
        if let Some(Kept { id, .. }) = unloaded.filter(is_anchored) {
            self.policy.anchors.leave(&id);
        }
    }
}

fn of_turns(error: Error) -> VaultError {
    match error {
        Error::Vault(error) => error,
        error => VaultError::Io { op: "take turns", source: io::Error::other(error.message()) },
    }
}

#[cfg(test)]
mod tests;
