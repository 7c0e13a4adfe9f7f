//! Members that several hosts use by turns: the mount's own vault, and datasets in it, each with turns of its own. Each
//! turn opens a vault over the same tree, which takes over the numbers and handles of the vault of the turn before.
//!
//! A dataset's turns begin when it is first used, and end when it is unloaded. Its root has two sides. The entry, with
//! its mode and owner, is in the vault around it: those are shown in a turn of that vault. Its content is in a turn of
//! the dataset. A change of both takes both turns, the outer one first.

use super::member::{ByTurns, GivenBack, Inside, KnownMember};
use super::{Cache, Forest, Number, ROOT_MEMBER, State, global, local, member_of};
use crate::error::{errno, is_not_found};
use crate::left::Left;
use crate::locks::Locks;
use crate::root::Top;
use crate::turns::{Kept, Turns};
use crate::{Attr, HandleId, Ino, Options, Permissions, ROOT, Result, Vault, VaultError};
use lamassu_anchor::{ObjectId, Touched};
use lamassu_crypto::KeyRing;
use lamassu_format::header::VaultHeader;
use lamassu_format::root::RootRecord;
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Forest {
    /// Starts taking turns; called once. The open vault is that of this host's first turn. Requests wait in `turns` for
    /// the next ones. `locks`: those of programs on all hosts.
    pub fn take_turns(&self, turns: Arc<Turns>, locks: Arc<dyn Locks>) {
        let root = self.root.loaded().and_then(|vault| vault.getattr(ROOT, None).ok());
        *self.root.by_turns.write() = Some(ByTurns::new(turns, locks, root));
        self.hosts_take_turns.store(true, Ordering::Release);
    }

    /// Whether several hosts take turns.
    pub fn hosts_take_turns(&self) -> bool {
        self.hosts_take_turns.load(Ordering::Acquire)
    }

    fn by_turns(&self, member: Number) -> Option<Arc<ByTurns>> {
        if self.hosts_take_turns() { self.slot(member).ok()?.by_turns() } else { None }
    }

    /// Opens the vault of a member for a turn. `touched`: objects that other hosts changed since the last turn; `None`:
    /// unknown.
    ///
    /// # Errors
    /// Those of opening it, and of the anchor. Then the state is as before.
    pub fn begin_turn(
        &self,
        member: Number,
        header: &VaultHeader,
        ring: KeyRing,
        options: Options,
        touched: Option<&Touched>,
    ) -> Result<()> {
        let slot = self.slot(member)?;
        let by_turns = slot.by_turns().ok_or(VaultError::Invalid)?;
        let top = if member == ROOT_MEMBER { Top::FileSystem } else { Top::Dataset };
        let options = Options { by_turns: true, ..options };
        let vault = Vault::open_with(slot.backend.clone(), header, ring, options, self.engine.clone(), top)?;
        vault.verify_root()?;
        if let Some(entry) = *slot.entry.lock() {
            vault.root_permissions.follow(entry);
        }
        let root = vault.getattr(ROOT, None)?;
        let mut left = by_turns.left.write();
        if let Some(before) = left.take()
            && let Err((before, error)) = vault.take_up(before.into_inner(), touched)
        {
            *left = Some(Mutex::new(*before));
            return Err(error);
        }
        *by_turns.root.lock() = Some(root);
        slot.set_loaded(Arc::new(vault));
        drop(left);
        by_turns.take_back(&slot);
        Ok(())
    }

    /// Recovers files that another host left open, until a time has passed.
    ///
    /// # Errors
    /// Those of the store, and of the anchor.
    pub fn recover_for(&self, member: Number, time: Duration) -> Result<()> {
        self.vault(member).map_or(Ok(()), |vault| vault.recover_for(time).map(drop))
    }

    /// Closes the vault of a member at the end of a turn. No request is under way.
    ///
    /// # Errors
    /// The first change that could not be committed. It is lost, and the program that wrote it gets an error.
    pub fn end_turn(&self, member: Number) -> Result<()> {
        let slot = self.slot(member)?;
        let Some(by_turns) = slot.by_turns() else { return Ok(()) };
        if let Some(vault) = slot.loaded() {
            *by_turns.open_objects.lock() = vault.open_objects();
        }
        let mut left = by_turns.left.write();
        let Some(vault) = slot.take_loaded() else { return Ok(()) };
        let (now_left, done) = vault.leave();
        *left = Some(Mutex::new(now_left));
        by_turns.has_lost.fetch_or(done.is_err(), Ordering::AcqRel);
        drop(left);
        by_turns.take_back(&slot);
        done
    }

    /// Lets no further turn begin, on any member: the mount ends. Returns when the present ones have ended, or are
    /// kept.
    pub(super) fn stop_all_turns(&self) {
        // Datasets before the vaults that they lie in.
        let all: Vec<_> = self.at_or_below(ROOT_MEMBER).iter().filter_map(|slot| slot.by_turns()).collect();
        // All at once: a driver may wait for a turn.
        all.iter().for_each(|by_turns| by_turns.turns.will_stop());
        all.iter().for_each(|by_turns| by_turns.turns.stop());
    }

    /// Ends the turns of a dataset that is unloaded. The kernel's references to its numbers are owed from then on.
    /// Returns whether it took turns.
    ///
    /// # Errors
    /// Something that was written could not be committed. It is unloaded nevertheless.
    pub(super) fn retire_turns(&self, slot: &KnownMember) -> Result<bool> {
        let Some(by_turns) = slot.by_turns() else { return Ok(false) };
        by_turns.turns.retire();
        by_turns.take_back(slot);
        let left = by_turns.left.write().take().map(Mutex::into_inner);
        let has_lost = by_turns.has_lost.load(Ordering::Acquire) || left.as_ref().is_some_and(Left::has_lost);
        {
            let _opening = slot.opening.lock();
            *slot.inside.write() = Inside::Unloaded;
            *slot.by_turns.write() = None;
        }
        let references = left.map(|left| left.references()).unwrap_or_default();
        {
            let mut owed = slot.owed.lock();
            for (ino, count) in &references {
                *owed.counts.entry(*ino).or_default() += count;
            }
        }
        if let Some(cache) = self.cache.get() {
            references.iter().for_each(|(ino, _)| cache.drop_inode(global(slot.number, *ino)));
        }
        match has_lost {
            true => Err(errno("commit what was written before it was unloaded", libc::EIO)),
            false => Ok(true),
        }
    }

    /// Ends the turns of datasets whose directories are gone from the store: another host has destroyed them, or the
    /// store has lost them, which the vault around them then shows.
    pub(super) fn let_go_of_gone(&self) {
        if !self.hosts_take_turns() {
            return;
        }
        let is_gone = |slot: &KnownMember| match slot.backend.root().stat() {
            Ok(st) => st.nlink == 0,
            Err(error) => is_not_found(&error) || error.raw_os_error() == Some(libc::ESTALE),
        };
        let Some(_one) = self.changing.try_lock() else { return };
        for slot in self.at_or_below(ROOT_MEMBER) {
            if slot.number != ROOT_MEMBER && is_gone(&slot) {
                if slot.by_turns().is_some() {
                    tracing::warn!(
                        dataset = %slot.id,
                        "the directory of a dataset that is in use here is gone: another host has destroyed it, or the \
                         store has lost it"
                    );
                }
                // What was written there is gone with it.
                let _ = self.retire_turns(&slot);
                self.opener.unloading(slot.number);
                self.table.write().remove(&slot.number);
                self.crossings.write().retain(|_, number| *number != slot.number);
            }
        }
    }

    /// Notes that there is no key for a dataset. Called by who drives its turns, before the last requests are carried
    /// out.
    pub fn has_no_key(&self, member: Number) {
        let Ok(slot) = self.slot(member) else { return };
        let _opening = slot.opening.lock();
        *slot.inside.write() = Inside::Locked;
        *slot.by_turns.write() = None;
    }

    /// Lets turns of a dataset begin that is locked or unloaded: there is a key for it now.
    ///
    /// # Errors
    /// [`VaultError::Stale`]; [`VaultError::Refused`] if it takes turns already.
    pub fn take_turns_again(&self, member: Number) -> Result<()> {
        let slot = self.slot(member)?;
        let _opening = slot.opening.lock();
        if slot.by_turns().is_some() {
            return Err(VaultError::Refused("its key is loaded already"));
        }
        *slot.inside.write() = Inside::Sighted;
        Ok(())
    }

    /// Where requests about the content of a member wait. For a dataset, turns begin with the first one. `None`: they
    /// are carried out at once, and fail if its vault is not open.
    pub(super) fn queue_of(&self, member: Number) -> Option<Arc<Turns>> {
        if !self.hosts_take_turns() {
            return None;
        }
        let slot = self.slot(member).ok()?;
        let there = |slot: &KnownMember| slot.by_turns().map(|by_turns| by_turns.turns.clone());
        if let Some(turns) = there(&slot) {
            return Some(turns);
        }
        let _one = slot.opening.lock();
        if let Some(turns) = there(&slot) {
            return Some(turns);
        }
        if slot.state() != State::Sighted || self.is_frozen() {
            return None;
        }
        match self.opener.take_turns(member) {
            Ok((turns, locks)) => {
                *slot.by_turns.write() = Some(ByTurns::new(turns.clone(), locks, None));
                Some(turns)
            }
            Err(error) => {
                tracing::error!(member, %error, "turns of a dataset cannot begin");
                None
            }
        }
    }

    /// The same for what is shown of an inode: of a dataset's root, the vault around it shows the attributes.
    pub(super) fn shows(&self, ino: Ino) -> Option<Arc<Turns>> {
        match (local(ino), member_of(ino)) {
            (ROOT, member) if member != ROOT_MEMBER => self.queue_of(self.parent(member)?),
            (_, member) => self.queue_of(member),
        }
    }

    /// Makes the kernel write back and drop all pages of these files. Waits for its requests.
    pub fn drop_pages(&self, files: &[Ino]) {
        if let Some(cache) = self.cache.get() {
            files.iter().for_each(|ino| cache.drop_inode(*ino));
        }
    }

    /// The same for pages in a part of a file.
    pub fn drop_part(&self, ino: Ino, part: Range<u64>) {
        if let Some(cache) = self.cache.get() {
            cache.drop_part(ino, part);
        }
    }

    /// Makes the kernel ask again for names and attributes. Waits for its requests.
    pub fn expire(&self, turns: &Turns, kept: &Kept) {
        let Some(cache) = self.cache.get() else { return };
        let cache: &dyn Cache = &**cache;
        kept.inodes.iter().for_each(|ino| cache.expire_attributes(*ino));
        turns.expire_names(|dir, name| cache.expire_entry(dir, name));
    }

    /// Whether the kernel may cache anything of an inode. If another host has changed the inode since the kernel learnt
    /// of it, and the kernel is told to drop it while a request for it is under way, the kernel ignores the answer and
    /// keeps the attributes from before the change. The root of a dataset changes in turns in which its attributes are
    /// not shown.
    pub(super) fn is_as_known(&self, ino: Ino) -> bool {
        let member = member_of(ino);
        match self.hosts_take_turns() {
            true if member != ROOT_MEMBER && local(ino) == ROOT => false,
            true => self.vault(member).is_some_and(|vault| !vault.is_changed_elsewhere(local(ino))),
            false => true,
        }
    }

    /// The kernel gives something back. It does not wait for a turn that begins or ends, which may take as long as the
    /// store and the server do.
    ///
    /// # Errors
    /// Those of closing a handle, if it was not put off.
    pub(super) fn give_back(&self, member: Number, what: GivenBack) -> Result<()> {
        let Ok(slot) = self.slot(member) else { return Ok(()) };
        let Some(by_turns) = self.by_turns(member) else { return slot.take_back(what) };
        by_turns.given_back.lock().push(what);
        by_turns.take_back(&slot);
        Ok(())
    }

    /// Does an operation that needs no turn: on the left state if no vault is open.
    pub(super) fn beside_turns<T>(
        &self,
        member: Number,
        away: impl FnOnce(&mut Left) -> T,
        here: impl FnOnce() -> T,
    ) -> T {
        let Some(by_turns) = self.by_turns(member) else { return here() };
        match &*by_turns.left.read() {
            Some(left) => away(&mut left.lock()),
            None => here(),
        }
    }

    /// Calls `call` for each open vault. A turn of it does not end meanwhile. All are called, even if one fails.
    ///
    /// # Errors
    /// The first of them.
    pub(super) fn each_open(&self, mut call: impl FnMut(&Vault) -> Result<()>) -> Result<()> {
        let mut done = Ok(());
        for slot in self.at_or_below(ROOT_MEMBER) {
            let now = || slot.loaded().map_or(Ok(()), |vault| call(&vault));
            let now = self.beside_turns(slot.number, |_| Ok(()), now);
            done = done.and(now);
        }
        done
    }

    /// Opens the root of the whole. While this host can have no turn the handle is for requests to the daemon alone:
    /// the kernel permitted the open by attributes that may be outdated, so it never lists anything.
    pub(super) fn root_opened(&self, vault: Result<Arc<Vault>>) -> Result<HandleId> {
        let Some(by_turns) = self.by_turns(ROOT_MEMBER) else { return vault?.open_dir_now(ROOT) };
        // Held: so the turn does not end meanwhile.
        let left = by_turns.left.read();
        match (&*left, self.root.loaded()) {
            (Some(left), _) => Ok(left.lock().open_for_requests()),
            (None, Some(vault)) => vault.open_dir_now(ROOT).or_else(|_| Ok(vault.open_for_requests())),
            (None, None) => Err(self.not_open(ROOT_MEMBER)),
        }
    }

    /// The root's attributes. This may be asked without a turn, while one begins or ends.
    pub(super) fn mounts_root_attr(&self) -> Result<Attr> {
        let not_open = || Err(self.not_open(ROOT_MEMBER));
        let Some(by_turns) = self.by_turns(ROOT_MEMBER) else { return not_open() };
        // Held: so the turn does not end meanwhile.
        let left = by_turns.left.try_read().filter(|left| left.is_none());
        let vault = left.as_ref().and_then(|_| self.root.loaded());
        self.root_or_as_last_known(vault.map_or_else(not_open, |vault| vault.getattr(ROOT, None)))
    }

    /// The root's attributes, as they were last read if they cannot be read now. Only these are answered without a
    /// turn.
    pub(super) fn root_or_as_last_known(&self, read: Result<Attr>) -> Result<Attr> {
        let Some(by_turns) = self.by_turns(ROOT_MEMBER) else { return read };
        let mut known = by_turns.root.lock();
        if let Ok(attr) = read {
            *known = Some(attr);
        }
        known.map_or(read, Ok)
    }

    /// The attributes of a dataset's root, in a turn of the vault around it.
    pub(super) fn dataset_root_attr(&self, slot: &KnownMember) -> Result<Attr> {
        let row = self.entry_row(slot)?.ok_or_else(|| self.not_open(ROOT_MEMBER))?;
        let entry = RootRecord { mode: row.mode, uid: row.uid, gid: row.gid };
        *slot.entry.lock() = Some(entry);
        let RootRecord { mode, uid, gid } = entry;
        Ok(Attr { mode, uid, gid, ..slot.backing_attr()? })
    }

    /// The permissions of a directory, for a decision in a turn of its member: those of a dataset's root as they were
    /// last shown.
    pub(super) fn dir_permissions(&self, dir: Ino) -> Result<Permissions> {
        let member = member_of(dir);
        if self.hosts_take_turns() && member != ROOT_MEMBER && local(dir) == ROOT {
            let entry = *self.slot(member)?.entry.lock();
            let RootRecord { mode, uid, gid } = entry.ok_or_else(|| self.not_open(member))?;
            return Ok(Permissions { mode, uid, gid });
        }
        let Attr { mode, uid, gid, .. } = crate::FileSystem::getattr(self, dir, None)?;
        Ok(Permissions { mode, uid, gid })
    }

    pub(super) fn shared_locks(&self, member: Number) -> Option<Arc<dyn Locks>> {
        self.by_turns(member).map(|by_turns| by_turns.locks.clone())
    }

    /// The object of a node, in a turn or not.
    pub(super) fn object_of(&self, ino: Ino) -> Result<ObjectId> {
        let (member, node) = (member_of(ino), local(ino));
        let here = || self.vault(member).map(|vault| vault.object_of(node)).unwrap_or_default();
        let known = self.by_turns(member).and_then(|by_turns| match by_turns.left.try_read() {
            Some(left) => Some(left.as_ref().map_or_else(here, |left| left.lock().object_of(node))),
            // A turn that begins or ends is not waited for.
            None => by_turns.open_objects.lock().get(&node).copied(),
        });
        let object = known.unwrap_or_else(|| self.beside_turns(member, |left| left.object_of(node), here));
        if object == ObjectId::default() { Err(VaultError::Stale) } else { Ok(object) }
    }

    /// How many files of a member are open.
    pub(super) fn open_files_of(&self, slot: &KnownMember) -> usize {
        let here = || slot.loaded().map_or(0, |vault| vault.handles.files());
        self.beside_turns(slot.number, |left| left.open_files(), here)
    }

    /// Why the vault of a member is not open.
    pub(super) fn not_open(&self, member: Number) -> VaultError {
        let is_away = match member {
            ROOT_MEMBER => self.hosts_take_turns(),
            _ => self.hosts_take_turns() && self.slot(member).is_ok_and(|slot| slot.by_turns().is_some()),
        };
        match is_away {
            true => errno("have the vault, which other hosts use too", libc::EIO),
            false if self.is_frozen() && self.slot(member).is_ok_and(|slot| slot.state() == State::Sighted) => {
                VaultError::Frozen
            }
            false => VaultError::KeyNotLoaded,
        }
    }
}

impl ByTurns {
    /// Takes back what the kernel has given back, unless a turn begins or ends at this moment: that does it afterwards.
    fn take_back(&self, slot: &KnownMember) {
        let Some(left) = self.left.try_read() else { return };
        for what in std::mem::take(&mut *self.given_back.lock()) {
            let done = match (&*left, what) {
                (Some(left), GivenBack::References(ino, count)) => {
                    left.lock().forget(ino, count);
                    Ok(())
                }
                (Some(left), GivenBack::File(handle) | GivenBack::Dir(handle)) => left.lock().release(handle),
                (None, what) => slot.take_back(what),
            };
            if let Err(error) = done {
                tracing::warn!(%error, "a file could not be closed");
            }
        }
    }
}

impl KnownMember {
    fn take_back(&self, what: GivenBack) -> Result<()> {
        match (what, self.loaded()) {
            (GivenBack::References(ino, count), _) => {
                self.forget(ino, count);
                Ok(())
            }
            (GivenBack::File(handle), Some(vault)) => vault.release(handle),
            (GivenBack::Dir(handle), Some(vault)) => vault.release_dir(handle),
            // What a vault had open ended with it.
            (GivenBack::File(_) | GivenBack::Dir(_), None) => Ok(()),
        }
    }
}
