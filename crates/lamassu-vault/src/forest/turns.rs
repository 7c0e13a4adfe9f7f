//! The mount's own vault, if several hosts take turns with it. Each turn opens a vault over the same tree, which takes
//! over the numbers and handles of the vault of the turn before.

use super::Forest;
use crate::error::errno;
use crate::left::Left;
use crate::locks::Locks;
use crate::root::Top;
use crate::turns::{Kept, Turns};
use crate::{Attr, HandleId, Ino, Options, ROOT, Result, Vault, VaultError};
use lamassu_anchor::{ObjectId, Touched};
use lamassu_crypto::KeyRing;
use lamassu_format::header::VaultHeader;
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::time::Duration;

/// The mount's own vault of the present turn, and what the next turn takes over.
pub(super) struct ByTurns {
    turns: Arc<Turns>,
    locks: Arc<dyn Locks>,
    /// State that the last vault has left, while none is open. Held shared by operations without a turn, exclusively to
    /// begin or end a turn.
    left: RwLock<Option<Mutex<Left>>>,
    /// The root's attributes as this host last read them: in this turn, or in its last one. Requests to the daemon go
    /// to the root, which therefore opens also while this host can have no turn.
    root: Mutex<Option<Attr>>,
}

impl Forest {
    /// Starts taking turns; called once. The open vault is that of this host's first turn. Requests wait in `turns` for
    /// the next ones. `locks`: those of programs on all hosts.
    pub fn take_turns(&self, turns: Arc<Turns>, locks: Arc<dyn Locks>) {
        let root = self.root.loaded().and_then(|vault| vault.getattr(ROOT, None).ok());
        // There is one driver of turns.
        let _ = self.by_turns.set(ByTurns { turns, locks, left: RwLock::default(), root: Mutex::new(root) });
    }

    /// Opens the vault for a turn. `touched`: objects that other hosts changed since the last turn; `None`: unknown.
    ///
    /// # Errors
    /// Those of opening it, and of the anchor. Then the state is as before.
    pub fn begin_turn(
        &self,
        header: &VaultHeader,
        ring: KeyRing,
        options: Options,
        touched: Option<&Touched>,
    ) -> Result<()> {
        let Some(by_turns) = self.by_turns.get() else { return Err(VaultError::Invalid) };
        let (backend, engine) = (self.root.backend.clone(), self.engine.clone());
        let vault = Vault::open_with(backend, header, ring, options, engine, Top::FileSystem)?;
        vault.verify_root()?;
        let root = vault.getattr(ROOT, None)?;
        let mut left = by_turns.left.write();
        if let Some(before) = left.take()
            && let Err((before, error)) = vault.take_up(before.into_inner(), touched)
        {
            *left = Some(Mutex::new(*before));
            return Err(error);
        }
        *by_turns.root.lock() = Some(root);
        self.root.set_loaded(Arc::new(vault));
        Ok(())
    }

    /// Recovers files that another host left open, until a time has passed.
    ///
    /// # Errors
    /// Those of the store, and of the anchor.
    pub fn recover_for(&self, time: Duration) -> Result<()> {
        self.root.loaded().map_or(Ok(()), |vault| vault.recover_for(time))
    }

    /// Closes the vault at the end of a turn. No request is under way.
    ///
    /// # Errors
    /// The first change that could not be committed. It is lost, and the program that wrote it gets an error.
    pub fn end_turn(&self) -> Result<()> {
        let Some(by_turns) = self.by_turns.get() else { return Ok(()) };
        let mut left = by_turns.left.write();
        let Some(vault) = self.root.take_loaded() else { return Ok(()) };
        let (now_left, done) = vault.leave();
        *left = Some(Mutex::new(now_left));
        done
    }

    /// Makes the kernel write back and drop all pages of these files. Waits for its requests.
    pub fn drop_pages(&self, files: &[Ino]) {
        if let Some(cache) = self.cache.get() {
            files.iter().for_each(|ino| cache.drop_inode(*ino));
        }
    }

    /// Makes the kernel ask again for names and attributes. Waits for its requests.
    pub fn expire(&self, turns: &Turns, kept: &Kept) {
        let Some(cache) = self.cache.get() else { return };
        kept.inodes.iter().for_each(|ino| cache.expire_attributes(*ino));
        turns.expire_names(|dir, name| cache.expire_entry(dir, name));
    }

    /// Whether the kernel may cache anything of an inode. If another host has changed the inode since the kernel learnt
    /// of it, and the kernel is told to drop it while a request for it is under way, the kernel ignores the answer and
    /// keeps the attributes from before the change.
    pub(super) fn is_as_known(&self, ino: Ino) -> bool {
        match self.by_turns.get() {
            Some(_) => self.root.loaded().is_some_and(|vault| !vault.is_changed_elsewhere(ino)),
            None => true,
        }
    }

    /// Does an operation that needs no turn: on the left state if no vault is open.
    pub(super) fn beside_turns<T>(&self, away: impl FnOnce(&mut Left) -> T, here: impl FnOnce() -> T) -> T {
        let Some(by_turns) = self.by_turns.get() else { return here() };
        match &*by_turns.left.read() {
            Some(left) => away(&mut left.lock()),
            None => here(),
        }
    }

    /// Opens the root of the whole. While this host can have no turn the handle is for requests to the daemon alone:
    /// the kernel permitted the open by attributes that may be outdated, so it never lists anything.
    pub(super) fn root_opened(&self, vault: Result<Arc<Vault>>) -> Result<HandleId> {
        let opened = vault.and_then(|vault| vault.open_dir_now(ROOT));
        let Some(by_turns) = self.by_turns.get().filter(|_| opened.is_err()) else { return opened };
        match (&*by_turns.left.read(), self.root.loaded()) {
            (Some(left), _) => Ok(left.lock().open_for_requests()),
            (None, Some(vault)) => Ok(vault.open_for_requests()),
            (None, None) => opened,
        }
    }

    /// The root's attributes, as they were last read if they cannot be read now. Only these are answered without a
    /// turn.
    pub(super) fn root_or_as_last_known(&self, read: Result<Attr>) -> Result<Attr> {
        let Some(by_turns) = self.by_turns.get() else { return read };
        let mut known = by_turns.root.lock();
        if let Ok(attr) = read {
            *known = Some(attr);
        }
        known.map_or(read, Ok)
    }

    pub(super) fn waits_in(&self) -> Option<&Arc<Turns>> {
        self.by_turns.get().map(|by_turns| &by_turns.turns)
    }

    pub(super) fn shared_locks(&self) -> Option<&Arc<dyn Locks>> {
        self.by_turns.get().map(|by_turns| &by_turns.locks)
    }

    /// The object of a node, in a turn or not.
    pub(super) fn object_of(&self, ino: Ino) -> Result<ObjectId> {
        let here = || self.root.loaded().map(|vault| vault.object_of(ino)).unwrap_or_default();
        let object = self.beside_turns(|left| left.object_of(ino), here);
        if object == ObjectId::default() { Err(VaultError::Stale) } else { Ok(object) }
    }

    /// How many files are open in the state that a vault has left.
    pub(super) fn left_open(&self) -> usize {
        let by_turns = self.by_turns.get();
        by_turns.and_then(|by_turns| Some(by_turns.left.read().as_ref()?.lock().open_files())).unwrap_or_default()
    }

    /// Why the mount's own vault is not open.
    pub(super) fn not_loaded(&self) -> VaultError {
        match self.by_turns.get() {
            Some(_) => errno("have the vault, which other hosts use too", libc::EIO),
            None => VaultError::KeyNotLoaded,
        }
    }
}
