//! Making, finding and removing entries. Renames are in `rename`.
//!
//! Locks: `tree` is held shared to find an entry by a name or number, and exclusively by renames and rmdir, which
//! change where other threads find entries. Under it, the lock `names_of(parent)` orders changes within one directory.

use crate::anchored::{Blocked, Departing, Fresh};
use crate::attr::New;
use crate::dirs::Dir;
use crate::error::{errno, io, no_outcome};
use crate::handles::Handle;
use crate::inode::{Leads, Met, Referenced, StoreId};
use crate::names::StoredName;
use crate::record::remove_companion;
use crate::staging;
use crate::stored::{is_entry_empty, rename_no_replace};
use crate::symlink;
use crate::target::{Asks, Target, hold};
use crate::wanted::Wanted;
use crate::{Access, Entry, HandleId, Ino, Kind, Owner, Result, Vault, VaultError};
use lamassu_anchor::ObjectId;
use lamassu_store::backend::Stat;
use lamassu_store::{BackendDir, BackendFile, File};
use std::ffi::{OsStr, OsString};
use std::ops::ControlFlow;
use std::sync::Arc;

/// How often an entry is looked up if its number is known as that of another inode.
const LOOKS_MAX: usize = 8;

impl Vault {
    /// Counts one reference to the entry `stored` and returns it.
    ///
    /// # Errors
    /// As [`Vault::referenced`].
    pub(crate) fn entry(&self, dir: &Dir, stored: &OsStr, st: &Stat) -> Result<Entry> {
        let (found, st) = self.referenced(dir, stored, st)?;
        self.entry_of(&found, dir, stored, &st)
    }

    /// The entry of a node to which a reference was counted. The reference is given back on failure.
    fn entry_of(&self, found: &Referenced, dir: &Dir, stored: &OsStr, st: &Stat) -> Result<Entry> {
        let is_its_inode = self.nodes.lock().id(found.ino).is_some_and(|id| id.is_of(st));
        let attr = match is_its_inode {
            true => self.mend(found.ino, dir, stored, st).and_then(|()| self.attr_of_entry(found.ino, dir, stored, st)),
            // It lies under another of its names.
            false => self.getattr_locked(found.ino),
        };
        let attr = attr.inspect_err(|_| self.forget(found.ino, 1))?;
        Ok(Entry { attr, generation: found.generation })
    }

    /// The same for an entry that was just made, and is this object of the anchor.
    pub(crate) fn new_entry(&self, dir: &Dir, stored: &OsStr, st: &Stat, object: ObjectId) -> Result<Entry> {
        let found = self.nodes.lock().reference_new(dir.ino, stored, st, object);
        if st.kind == Kind::Dir {
            self.dirs.drop_dir(found.ino);
        }
        self.entry_of(&found, dir, stored, st)
    }

    /// Counts one reference to the entry `stored`. Returns its node and its stat, which may have changed.
    ///
    /// # Errors
    /// Those of the store; [`VaultError::Stale`] for an entry that keeps being exchanged; those of [`Vault::judged`].
    pub(crate) fn referenced(&self, dir: &Dir, stored: &OsStr, st: &Stat) -> Result<(Referenced, Stat)> {
        let (mut st, mut gone) = (*st, None);
        for _ in 0..LOOKS_MAX {
            let object = self.judged(dir, stored, Some(st.kind))?.ok_or(VaultError::NotFound)?;
            let found =
                self.told_apart(object, &st, |nodes, go| nodes.reference(dir.ino, stored, &st, object, (gone, go)))?;
            match found {
                Ok(found) => {
                    if found.has_followed {
                        self.note_followed(found.ino, &st);
                    } else if found.is_new && st.kind == Kind::Dir {
                        self.dirs.drop_dir(found.ino);
                    }
                    return Ok((found, st));
                }
                // The stat may be older than the node. After a new stat the node cannot be newer, so if it still
                // belongs to another inode, that inode is gone.
                Err(Met::OtherObject | Met::MayGo(_)) => return Err(self.outdated("entry", dir.ino, stored)),
                Err(Met::OtherInode(other)) => {
                    gone = Some(other);
                    st = dir.handle.stat_entry(stored).map_err(io("stat"))?;
                }
            }
        }
        Err(VaultError::Stale)
    }

    /// Finds an entry by its plain name.
    ///
    /// # Errors
    /// [`VaultError::NotFound`], [`VaultError::NotDirectory`], [`VaultError::NameTooLong`], [`VaultError::Damaged`] if
    /// the directory's record does not open.
    pub fn lookup(&self, parent: Ino, name: &OsStr) -> Result<Entry> {
        self.settle_moves_beside();
        let found = self.look_up(parent, name);
        if matches!(found, Err(VaultError::NotFound)) {
            self.meet_unrecorded_name(parent, name);
        }
        self.verify_current().inspect_err(|_| {
            if let Ok(entry) = &found {
                self.forget(entry.attr.ino, 1);
            }
        })?;
        found
    }

    fn look_up(&self, parent: Ino, name: &OsStr) -> Result<Entry> {
        let _tree = self.tree.read();
        let _names = self.names_of(parent).read();
        let dir = self.dir_of_names(parent)?;
        let stored = match self.stored(&dir, name) {
            // No entry can have such a name.
            Err(VaultError::InvalidName) => return Err(VaultError::NotFound),
            other => other?,
        };
        let shown = self.shown(&dir, &stored.name)?;
        if shown.is_none() {
            // It may be missing.
            self.judged(&dir, &stored.name, None)?;
        }
        self.entry(&dir, &stored.name, &shown.ok_or(VaultError::NotFound)?)
    }

    /// The same for a listed entry, by its stored name and the store's number. An unknown file is opened at once, since
    /// its size is in it.
    pub(crate) fn entry_stored(&self, dir: &Dir, stored: &OsStr, number: u64) -> Result<Entry> {
        let _tree = self.tree.read();
        let _names = self.names_of(dir.ino).read();
        // An anchor mostly knows the size.
        let is_known = self.anchored.is_some() || self.nodes.lock().is_known(dir.dev, number);
        let (st, opened) = match is_known {
            true => dir.handle.stat_entry(stored).map(|st| (st, None)),
            false => dir.handle.stat_and_open(stored),
        }
        .map_err(io("stat"))?;
        let (found, now) = self.referenced(dir, stored, &st)?;
        if let Some(backing) = opened.filter(|_| now.is_same(&st)) {
            self.remember_size(found.ino, &st, backing);
        }
        self.entry_of(&found, dir, stored, &now)
    }

    /// Gives back `count` references of `ino`.
    pub fn forget(&self, ino: Ino, count: u64) {
        let gone = {
            let mut nodes = self.nodes.lock();
            let was_dir = nodes.kind(ino) == Some(Kind::Dir);
            nodes.forget(ino, count);
            was_dir && nodes.kind(ino).is_none()
        };
        if gone {
            self.dirs.drop_dir(ino);
        }
        self.forget_nameless(ino);
        self.forget_objects();
    }

    /// The common part of all creations: makes the companion of a long name, calls `make`, and removes the companion
    /// again if that failed.
    pub(crate) fn create_with<T>(&self, dir: &Dir, stored: &StoredName, make: impl FnOnce() -> Result<T>) -> Result<T> {
        let companion_made = match &stored.companion {
            Some(companion) => companion.ensure(&*dir.handle)?,
            None => false,
        };
        let made = make();
        match (&made, &stored.companion) {
            // The existing entry needs it, and lacked it.
            (Err(VaultError::Exists) | Ok(_), _) | (_, None) => {}
            // So does one that was made although the store has reported a failure.
            (Err(_), Some(companion)) if companion_made && matches!(self.shown(dir, &stored.name), Ok(None)) => {
                remove_companion(&*dir.handle, &companion.name);
            }
            (Err(_), Some(_)) => {}
        }
        made
    }

    /// Makes an entry by `make` where no other user can reach it, gives it its owner and mode there, and moves it to
    /// its place. A call that makes a node or a link returns no descriptor. So in a user's directory the user could
    /// exchange the new entry unnoticed.
    fn make_and_place(
        &self,
        dir: &Dir,
        stored: &OsStr,
        wanted: &Wanted,
        make: impl FnOnce(&dyn BackendDir, &OsStr) -> std::io::Result<()>,
    ) -> Result<Fresh> {
        let (shop, temp) = self.workshop()?;
        make(&*shop, &temp).map_err(io("create"))?;
        let placed = || {
            let held = shop.hold(&temp).map_err(io("hold"))?;
            let fresh = self.own_new(New::Entry(&*held), wanted)?;
            rename_no_replace(&*shop, &temp, &*dir.handle, stored).map_err(io("create"))?;
            // The move may have changed its change time.
            Ok(Fresh { st: held.stat().map_err(io("stat"))?, ..fresh })
        };
        placed().inspect_err(|_| {
            if let Err(error) = shop.unlink(&temp)
                && !crate::error::is_not_found(&error)
            {
                tracing::warn!(entry = %temp.to_string_lossy(), %error, "left in lamassu.staging");
            }
        })
    }

    fn create_backing(
        &self,
        dir: &Arc<Dir>,
        stored: &StoredName,
        wanted: &Wanted,
    ) -> Result<(Arc<dyn BackendFile>, Fresh)> {
        self.create_with(dir, stored, || {
            let file = dir.handle.create_file(&stored.name).map_err(io("create"))?;
            let fresh = self.own_new(New::File(&*file), wanted).inspect_err(|_| {
                if let Err(error) = dir.handle.unlink(&stored.name) {
                    let path = self.path_in(dir.ino, &stored.name);
                    tracing::warn!(entry = %path.display(), %error, "a half-made entry could not be removed");
                }
            })?;
            Ok((file, fresh))
        })
    }

    /// Creates a regular file and opens it.
    ///
    /// # Errors
    /// [`VaultError::Exists`], [`VaultError::InvalidName`], [`VaultError::NameTooLong`], [`VaultError::ReadOnly`],
    /// those of the store.
    pub fn create(
        &self,
        parent: Ino,
        name: &OsStr,
        mode: u32,
        access: Access,
        owner: Owner,
    ) -> Result<(Entry, HandleId)> {
        let (entry, open) = self.make(parent, name, |dir, stored| {
            let wanted = self.wanted(dir, Kind::File, mode, owner)?;
            let profile = self.profile_in(dir)?;
            self.ctx.check_allowed(profile)?;
            let (backing, fresh) = self.create_backing(dir, stored, &wanted)?;
            let fresh = Fresh { profile, ..fresh };
            let object = self.record_made(dir, stored, &fresh, &wanted)?;
            let st = fresh.st;
            let found = self.nodes.lock().reference_new(dir.ino, &stored.name, &st, object);
            let ino = found.ino;
            self.unsynced.add(StoreId::from(&st));
            let created = match &self.anchored {
                Some(_) => File::create_object(self.ctx.clone(), backing, &self.tag(ino), object),
                None => File::create(self.ctx.clone(), backing, &self.tag(ino)),
            };
            let file = created.and_then(|file| file.inherit(profile).map(|()| file));
            let file = file.inspect_err(|_| self.forget(ino, 1))?;
            let open = self.insert_held(ino, file, true);
            open.touched(self.now());
            Ok((self.entry_of(&found, dir, &stored.name, &st), open))
        })?;
        // Not under the locks of the tree: it may settle other files.
        let entry = entry.inspect_err(|_| self.unhold(&open))?;
        Ok((entry, self.handles.add(Handle::File { file: open, access })))
    }

    /// Creates a regular file, fifo, socket or device node.
    ///
    /// # Errors
    /// As [`Vault::create`]; [`VaultError::Invalid`] for directories and symbolic links.
    pub fn mknod(&self, parent: Ino, name: &OsStr, kind: Kind, mode: u32, rdev: u64, owner: Owner) -> Result<Entry> {
        match kind {
            Kind::Dir | Kind::Symlink => return Err(VaultError::Invalid),
            Kind::File => {
                let access = Access { read: true, write: true, truncate: false };
                let (entry, handle) = self.create(parent, name, mode, access, owner)?;
                self.release(handle)?;
                return Ok(entry);
            }
            Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {}
        }
        self.make_new(parent, name, |dir, stored| {
            let wanted = self.wanted(dir, kind, mode, owner)?;
            let made = self.make_and_place(dir, &stored.name, &wanted, |shop, temp| shop.make_node(temp, kind, rdev));
            Ok((Fresh { rdev, ..made? }, wanted))
        })
    }

    /// Creates a directory.
    ///
    /// # Errors
    /// As [`Vault::create`].
    pub fn mkdir(&self, parent: Ino, name: &OsStr, mode: u32, owner: Owner) -> Result<Entry> {
        self.make_new(parent, name, |dir, stored| {
            let wanted = self.wanted(dir, Kind::Dir, mode, owner)?;
            Ok((self.stage_dir(dir, &stored.name, &wanted)?, wanted))
        })
    }

    /// Creates a symbolic link to `target`, 1 to 4095 bytes.
    ///
    /// # Errors
    /// As [`Vault::create`]; [`VaultError::NameTooLong`] also for a target longer than the store keeps.
    pub fn symlink(&self, parent: Ino, name: &OsStr, target: &[u8], owner: Owner) -> Result<Entry> {
        Self::check_target(target)?;
        self.make_new(parent, name, |dir, stored| {
            let wanted = self.wanted(dir, Kind::Symlink, 0o777, owner)?;
            let sealed = symlink::seal(&self.ctx.ring, target)?;
            sealed.create_rest(&*dir.handle).map_err(io("symlink"))?;
            let made = self.make_and_place(dir, &stored.name, &wanted, |shop, temp| {
                shop.make_symlink(temp, sealed.text()) //
            });
            let made = made.inspect_err(|_| sealed.remove_rest(&*dir.handle))?;
            Ok((Fresh { content: sealed.digest(), ..made }, wanted))
        })
    }

    /// The common frame of creations that open nothing. `make` returns what it made.
    fn make_new(
        &self,
        parent: Ino,
        name: &OsStr,
        make: impl Fn(&Arc<Dir>, &StoredName) -> Result<(Fresh, Wanted)>,
    ) -> Result<Entry> {
        self.make(parent, name, |dir, stored| {
            let (fresh, wanted) = self.create_with(dir, stored, || make(dir, stored))?;
            let object = self.record_made(dir, stored, &fresh, &wanted)?;
            self.unsynced.add(StoreId::from(&fresh.st));
            self.new_entry(dir, &stored.name, &fresh.st, object)
        })
    }

    /// Calls `make` with admission, locks and the stored name of a new entry; once more if the store was full.
    fn make<T>(&self, parent: Ino, name: &OsStr, make: impl Fn(&Arc<Dir>, &StoredName) -> Result<T>) -> Result<T> {
        self.with_room(|| self.make_once(parent, name, &make))
    }

    fn make_once<T>(&self, parent: Ino, name: &OsStr, make: impl Fn(&Arc<Dir>, &StoredName) -> Result<T>) -> Result<T> {
        let _pass = self.change_recorded()?;
        self.settle_moves_in_passing();
        self.until_not_blocked("create", |_| {
            let _tree = self.tree.read();
            let _names = self.names_of(parent).write();
            let dir = self.dir_of_names(parent)?;
            let stored = self.stored(&dir, name)?;
            match self.may_make(&dir, &stored)? {
                true => make(&dir, &stored).map(ControlFlow::Break),
                false => Ok(ControlFlow::Continue(Blocked::Going)),
            }
        })
    }

    /// Gives an inode, not a directory, another name.
    ///
    /// # Errors
    /// As [`Vault::create`]; `EPERM` for a directory, [`VaultError::Stale`] for a file without a name.
    pub fn link(&self, ino: Ino, parent: Ino, name: &OsStr) -> Result<Entry> {
        self.make(parent, name, |dir, stored| {
            let (from, from_name, st) = self.place(ino)?;
            staging::is_directory("link", st.kind)?;
            if let Some(rest) = symlink::rest_of(&self.ctx.ring, &*from.handle, &from_name, &st)
                && from.ino != dir.ino
            {
                symlink::copy_rest(&rest, &*from.handle, &*dir.handle)?;
            }
            let held = hold(&from, &from_name, &st).map_err(io("link"))?;
            self.must_be_its_own_entry(ino, (&from, &from_name), &st)?;
            // What lies under another name gets none here.
            let target = Target::Entry { dir: from.clone(), name: from_name, st };
            self.must_be_under_its_names(ino, &target, Asks::Content)?;
            let object = self.nodes.lock().object(ino);
            // Under the lock of the directory's names: whoever looks there waits for the outcome.
            self.note_moved((dir.ino, &stored.name), object, &st);
            self.create_with(dir, stored, || held.link(&*dir.handle, &stored.name).map_err(io("link")))?;
            if let Err(error) = self.record_link(dir, stored, object) {
                self.take_link_back(dir, stored, &st);
                return Err(error);
            }
            // The node must have this name before a lookup can find it there.
            self.nodes.lock().add_link(ino, dir.ino, &stored.name, Leads::Here);
            let st = held.stat().map_err(io("stat"))?;
            self.unsynced.add(StoreId::from(&st));
            self.entry(dir, &stored.name, &st)
        })
    }

    /// Removes a name that could not be recorded. If the store shows something else there, or fails, it stays, as
    /// after a crash.
    fn take_link_back(&self, dir: &Dir, stored: &StoredName, st: &Stat) {
        if !matches!(self.shown(dir, &stored.name), Ok(Some(now)) if now.is_same(st)) {
            return;
        }
        match (dir.handle.unlink(&stored.name), &stored.companion) {
            (Ok(()), Some(companion)) => remove_companion(&*dir.handle, &companion.name),
            (Ok(()), None) => {}
            (Err(error), _) => tracing::error!(%error, "a new name could not be recorded, and stays in the store"),
        }
    }

    /// Removes a name of anything but a directory. An open file stays usable.
    ///
    /// # Errors
    /// [`VaultError::NotFound`], [`VaultError::IsDirectory`], those of the store.
    pub fn unlink(&self, parent: Ino, name: &OsStr) -> Result<()> {
        let _pass = self.change_recorded()?;
        {
            let _tree = self.tree.read();
            let _names = self.names_of(parent).write();
            let dir = self.dir_of_names(parent)?;
            let stored = self.stored(&dir, name)?;
            let (st, object) = self.found(&dir, &stored.name)?;
            if st.kind == Kind::Dir {
                return Err(VaultError::IsDirectory);
            }
            // The anchor may have to record it again, under a name that a move has taken.
            if self.anchored.as_ref().is_some_and(|anchored| anchored.may_come_back(object)) {
                return Err(no_outcome());
            }
            let rest = symlink::rest_of(&self.ctx.ring, &*dir.handle, &stored.name, &st);
            self.keep_left_open(&*dir.handle, &stored.name, &st);
            self.take_away(&dir, stored, st, rest, object)?;
        }
        self.bound_departures();
        Ok(())
    }

    /// Removes the entry `stored`, which had the stat `st` and is this object of the anchor, from `dir`.
    fn take_away(
        &self,
        dir: &Arc<Dir>,
        stored: StoredName,
        st: Stat,
        rest: Option<OsString>,
        object: ObjectId,
    ) -> Result<()> {
        let name = stored.name.clone();
        let is_last =
            self.depart(Departing { dir: dir.clone(), stored, st, rest, object, is_last: false, dataset: None })?;
        self.entry_gone(dir, &name, &st, is_last, object);
        Ok(())
    }

    /// Tells the node table that the entry `stored`, which had the stat `st`, is gone from `dir`; `last`: it was the
    /// inode's last one.
    pub(crate) fn entry_gone(&self, dir: &Dir, stored: &OsStr, st: &Stat, last: bool, object: ObjectId) {
        let id = StoreId::from(st);
        if last {
            self.unsynced.remove(id);
        }
        let ino = self.nodes.lock().unlinked(object, st, (dir.ino, stored), last);
        if last {
            ino.inspect(|ino| self.note_nameless(*ino));
            self.room.gained();
        }
        match (ino.filter(|_| last), st.kind) {
            (None, _) if last => self.forget_object(object),
            (None, _) => {}
            (Some(ino), Kind::Dir) => self.dirs.drop_dir(ino),
            // It has no handles, so its buffers need not be committed.
            (Some(ino), _) => self.let_go(ino, !self.may_be_opened_nameless(ino)),
        }
        self.forget_objects();
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`VaultError::NotEmpty`], [`VaultError::NotDirectory`], [`VaultError::NotFound`], those of the store.
    pub fn rmdir(&self, parent: Ino, name: &OsStr) -> Result<()> {
        let _pass = self.change_recorded()?;
        self.settle_moves_in_passing();
        self.until_not_blocked("rmdir", |_| self.try_rmdir(parent, name))?;
        self.bound_departures();
        Ok(())
    }

    fn try_rmdir(&self, parent: Ino, name: &OsStr) -> Result<ControlFlow<(), Blocked>> {
        let _tree = self.tree.write();
        let dir = self.dir_of_names(parent)?;
        let stored = self.stored(&dir, name)?;
        let (st, object) = self.found(&dir, &stored.name)?;
        if st.kind != Kind::Dir {
            return Err(VaultError::NotDirectory);
        }
        self.require_empty(&dir, &stored.name, object)?;
        // What is left in it in the store goes to `lamassu.lost`.
        if self.anchored.as_ref().is_some_and(|anchored| anchored.must_stay_in(object)) {
            return Err(errno("rmdir", libc::EBUSY));
        }
        self.must_be_its_own_dir(&dir, &stored.name, &st, object)?;
        // Entries that were removed from it leave the store first.
        if self.leaves_at_once(&dir, &stored.name)? && self.has_going_in(object) {
            return Ok(ControlFlow::Continue(Blocked::Going));
        }
        self.take_away(&dir, stored, st, None, object)?;
        Ok(ControlFlow::Break(()))
    }

    /// Fails unless a directory, which is this object of the anchor, is empty: by the anchor if there is one.
    pub(crate) fn require_empty(&self, parent: &Dir, stored: &OsStr, object: ObjectId) -> Result<()> {
        if let Some(anchored) = &self.anchored {
            return if anchored.anchor.is_empty(object)? { Ok(()) } else { Err(VaultError::NotEmpty) };
        }
        match is_entry_empty(&*parent.handle, stored).map_err(io("list a directory"))? {
            true => Ok(()),
            false => Err(VaultError::NotEmpty),
        }
    }
}
