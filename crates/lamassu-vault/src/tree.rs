//! Making, finding and removing entries. Renames are in `rename`.
//!
//! Locks: `tree` is shared by everything that goes from a name or a number to an entry, and exclusive for renames and
//! rmdir, which change what lies where for others. Below it, one lock of `names_of(parent)` orders changes within one
//! directory.

use crate::attr::{New, Wanted};
use crate::dirs::Dir;
use crate::error::io;
use crate::inode::{Referenced, StoreId};
use crate::names::StoredName;
use crate::open::Handle;
use crate::record::remove_companion;
use crate::staging;
use crate::symlink;
use crate::target::hold;
use crate::{Access, Entry, HandleId, Ino, Kind, Owner, Result, Vault, VaultError};
use lamassu_store::backend::Stat;
use lamassu_store::{BackendDir, BackendFile, File};
use std::ffi::OsStr;
use std::sync::Arc;

/// How often an entry is looked at if its number is known as that of another inode.
const LOOKS_MAX: usize = 8;

impl Vault {
    /// Counts one reference to the entry `stored` and returns it.
    ///
    /// # Errors
    /// As [`Vault::referenced`].
    pub(crate) fn entry(&self, dir: &Dir, stored: &OsStr, st: &Stat) -> Result<Entry> {
        let (found, st) = self.referenced(dir, stored, st)?;
        Ok(Entry { attr: self.attr_of_entry(found.ino, dir, stored, &st), generation: found.generation })
    }

    /// The same of what was just made.
    pub(crate) fn new_entry(&self, dir: &Dir, stored: &OsStr, st: &Stat) -> Entry {
        let found = self.nodes.lock().reference_new(dir.ino, stored, st);
        if st.kind == Kind::Dir {
            self.dirs.drop_dir(found.ino);
        }
        Entry { attr: self.attr_of_entry(found.ino, dir, stored, st), generation: found.generation }
    }

    /// Counts one reference to the entry `stored`. Returns its node, and its stat where that is another by now.
    ///
    /// # Errors
    /// Those of the store; [`VaultError::Stale`] for an entry that keeps being exchanged.
    pub(crate) fn referenced(&self, dir: &Dir, stored: &OsStr, st: &Stat) -> Result<(Referenced, Stat)> {
        let (mut st, mut gone) = (*st, None);
        for _ in 0..LOOKS_MAX {
            let found = self.nodes.lock().reference(dir.ino, stored, &st, gone);
            match found {
                Ok(found) => {
                    if found.is_new && st.kind == Kind::Dir {
                        self.dirs.drop_dir(found.ino);
                    }
                    return Ok((found, st));
                }
                // The stat may be the older one. After this one the node cannot be newer, so if it still is another's,
                // that one is gone.
                Err(other) => {
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
        let _tree = self.tree.read();
        let _names = self.names_of(parent).read();
        let dir = self.dir(parent)?;
        let stored = match self.stored(&dir, name) {
            // Nothing can be there by such a name.
            Err(VaultError::InvalidName) => return Err(VaultError::NotFound),
            other => other?,
        };
        let st = dir.handle.stat_entry(&stored.name).map_err(io("stat"))?;
        self.entry(&dir, &stored.name, &st)
    }

    /// The same of what a listing shows by its stored name and the store's number. A file that nothing is known of yet
    /// is opened as it is looked at: its size is in it.
    pub(crate) fn entry_stored(&self, dir: &Dir, stored: &OsStr, number: u64) -> Result<Entry> {
        let _tree = self.tree.read();
        let _names = self.names_of(dir.ino).read();
        let is_known = self.nodes.lock().is_known(dir.dev, number);
        let (st, opened) = match is_known {
            true => dir.handle.stat_entry(stored).map(|st| (st, None)),
            false => dir.handle.stat_and_open(stored),
        }
        .map_err(io("stat"))?;
        let (found, now) = self.referenced(dir, stored, &st)?;
        if let Some(backing) = opened.filter(|_| now.is_same(&st)) {
            self.remember_size(found.ino, &st, backing);
        }
        Ok(Entry { attr: self.attr_of_entry(found.ino, dir, stored, &now), generation: found.generation })
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
    }

    /// What every creation has in common: the companion of a long name first, `make`, and the companion away again if
    /// that failed.
    pub(crate) fn create_with<T>(&self, dir: &Dir, stored: &StoredName, make: impl FnOnce() -> Result<T>) -> Result<T> {
        let companion_made = match &stored.companion {
            Some(companion) => companion.ensure(&*dir.handle)?,
            None => false,
        };
        let made = make();
        match (&made, &stored.companion) {
            // The entry that exists needs it, and lacked it.
            (Err(VaultError::Exists) | Ok(_), _) | (_, None) => {}
            (Err(_), Some(companion)) if companion_made => remove_companion(&*dir.handle, &companion.name),
            (Err(_), Some(_)) => {}
        }
        made
    }

    /// Makes an entry by `make` where no other user can reach it, gives it its owner and mode there, and moves it to
    /// its place. A call that makes a node or a link returns no descriptor: in a directory of a user, who could
    /// exchange what was made, the exchange would go unnoticed.
    fn make_and_place(
        &self,
        dir: &Dir,
        stored: &OsStr,
        wanted: &Wanted,
        make: impl FnOnce(&dyn BackendDir, &OsStr) -> std::io::Result<()>,
    ) -> Result<Stat> {
        let (shop, temp) = self.workshop()?;
        make(&*shop, &temp).map_err(io("create"))?;
        let placed = || {
            let held = shop.hold(&temp).map_err(io("hold"))?;
            self.own_new(New::Entry(&*held), wanted)?;
            staging::rename_no_replace(&*shop, &temp, &*dir.handle, stored).map_err(io("create"))?;
            // Moved, it may have another change time.
            held.stat().map_err(io("stat"))
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
        mode: u32,
        owner: Owner,
    ) -> Result<(Arc<dyn BackendFile>, Stat)> {
        let wanted = self.wanted(dir, Kind::File, mode, owner)?;
        self.create_with(dir, stored, || {
            let file = dir.handle.create_file(&stored.name).map_err(io("create"))?;
            let st = self.own_new(New::File(&*file), &wanted).inspect_err(|_| {
                if let Err(error) = dir.handle.unlink(&stored.name) {
                    let path = self.path_in(dir.ino, &stored.name);
                    tracing::warn!(entry = %path.display(), %error, "a half-made entry could not be removed");
                }
            })?;
            Ok((file, st))
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
        let _pass = self.change()?;
        let _tree = self.tree.read();
        let _names = self.names_of(parent).write();
        let dir = self.dir(parent)?;
        let stored = self.stored(&dir, name)?;
        let (backing, st) = self.create_backing(&dir, &stored, mode, owner)?;
        let Referenced { ino, generation, .. } = self.nodes.lock().reference_new(dir.ino, &stored.name, &st);
        self.unsynced.add(StoreId::from(&st));
        let file = File::create(self.ctx.clone(), backing, &self.tag(ino)).inspect_err(|_| self.forget(ino, 1))?;
        let open = self.insert_held(ino, file, true);
        open.touched(self.now());
        let entry = Entry { attr: self.attr_of_entry(ino, &dir, &stored.name, &st), generation };
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
            self.make_and_place(dir, &stored.name, &wanted, |shop, temp| shop.make_node(temp, kind, rdev))
        })
    }

    /// Creates a directory.
    ///
    /// # Errors
    /// As [`Vault::create`].
    pub fn mkdir(&self, parent: Ino, name: &OsStr, mode: u32, owner: Owner) -> Result<Entry> {
        self.make_new(parent, name, |dir, stored| {
            let wanted = self.wanted(dir, Kind::Dir, mode, owner)?;
            self.stage_dir(dir, &stored.name, &wanted)
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
            made.inspect_err(|_| sealed.remove_rest(&*dir.handle))
        })
    }

    /// The common frame of creations that open nothing. `make` returns the stat of what it made.
    fn make_new(
        &self,
        parent: Ino,
        name: &OsStr,
        make: impl FnOnce(&Arc<Dir>, &StoredName) -> Result<Stat>,
    ) -> Result<Entry> {
        self.make(parent, name, |dir, stored| {
            let st = self.create_with(dir, stored, || make(dir, stored))?;
            self.unsynced.add(StoreId::from(&st));
            Ok(self.new_entry(dir, &stored.name, &st))
        })
    }

    /// Admission, locks and stored name of a new entry of a directory.
    fn make(
        &self,
        parent: Ino,
        name: &OsStr,
        make: impl FnOnce(&Arc<Dir>, &StoredName) -> Result<Entry>,
    ) -> Result<Entry> {
        let _pass = self.change()?;
        let _tree = self.tree.read();
        let _names = self.names_of(parent).write();
        let dir = self.dir(parent)?;
        let stored = self.stored(&dir, name)?;
        make(&dir, &stored)
    }

    /// Gives an inode, not a directory, another name.
    ///
    /// # Errors
    /// As [`Vault::create`]; `EPERM` for a directory, [`VaultError::Stale`] for a file without a name.
    pub fn link(&self, ino: Ino, parent: Ino, name: &OsStr) -> Result<Entry> {
        self.make(parent, name, |dir, stored| {
            self.moves.fetch_add(1, std::sync::atomic::Ordering::AcqRel);
            let (from, from_name, st) = self.place(ino)?;
            staging::is_directory("link", st.kind)?;
            if let Some(rest) = symlink::rest_of(&self.ctx.ring, &*from.handle, &from_name, &st)
                && from.ino != dir.ino
            {
                symlink::copy_rest(&rest, &*from.handle, &*dir.handle)?;
            }
            let held = hold(&from, &from_name, &st).map_err(io("link"))?;
            self.create_with(dir, stored, || held.link(&*dir.handle, &stored.name).map_err(io("link")))?;
            // Known by this name before a lookup can find it there.
            self.nodes.lock().add_link(ino, dir.ino, &stored.name);
            let st = held.stat().map_err(io("stat"))?;
            self.unsynced.add(StoreId::from(&st));
            self.entry(dir, &stored.name, &st)
        })
    }

    /// Removes a name of anything but a directory. An open file stays usable.
    ///
    /// # Errors
    /// [`VaultError::NotFound`], [`VaultError::IsDirectory`], those of the store.
    pub fn unlink(&self, parent: Ino, name: &OsStr) -> Result<()> {
        let _pass = self.change()?;
        let _tree = self.tree.read();
        let _names = self.names_of(parent).write();
        let dir = self.dir(parent)?;
        let stored = self.stored(&dir, name)?;
        let st = dir.handle.stat_entry(&stored.name).map_err(io("stat"))?;
        if st.kind == Kind::Dir {
            return Err(VaultError::IsDirectory);
        }
        let rest = symlink::rest_of(&self.ctx.ring, &*dir.handle, &stored.name, &st);
        dir.handle.unlink(&stored.name).map_err(io("unlink"))?;
        if let Some(companion) = &stored.companion {
            remove_companion(&*dir.handle, &companion.name);
        }
        self.entry_gone(&dir, &stored.name, &st, rest.as_deref());
        Ok(())
    }

    /// The entry `stored` with stat `st` (before) is gone from `dir`: its link companion goes if no other name may need
    /// it, and the node table hears of it.
    pub(crate) fn entry_gone(&self, dir: &Dir, stored: &OsStr, st: &Stat, rest: Option<&OsStr>) {
        let last = st.kind == Kind::Dir || st.nlink <= 1;
        if let Some(rest) = rest
            && (last || !symlink::is_named_in(&*dir.handle, st))
        {
            remove_companion(&*dir.handle, rest);
        }
        let id = StoreId::from(st);
        if last {
            self.unsynced.remove(id);
        }
        let ino = self.nodes.lock().unlinked(st, dir.ino, stored, last);
        let Some(ino) = ino.filter(|_| last) else { return };
        match st.kind {
            Kind::Dir => self.dirs.drop_dir(ino),
            // It has no handles: what waits to be committed need not be.
            _ => self.let_go(ino, true),
        }
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`VaultError::NotEmpty`], [`VaultError::NotDirectory`], [`VaultError::NotFound`], those of the store.
    pub fn rmdir(&self, parent: Ino, name: &OsStr) -> Result<()> {
        let _pass = self.change()?;
        let _tree = self.tree.write();
        let dir = self.dir(parent)?;
        let stored = self.stored(&dir, name)?;
        let st = dir.handle.stat_entry(&stored.name).map_err(io("stat"))?;
        if st.kind != Kind::Dir {
            return Err(VaultError::NotDirectory);
        }
        self.require_empty(&dir, &stored.name)?;
        self.unstage_dir(&*dir.handle, &stored.name, &st)?;
        if let Some(companion) = &stored.companion {
            remove_companion(&*dir.handle, &companion.name);
        }
        self.entry_gone(&dir, &stored.name, &st, None);
        Ok(())
    }

    pub(crate) fn require_empty(&self, parent: &Dir, stored: &OsStr) -> Result<()> {
        match staging::is_entry_empty(&*parent.handle, stored).map_err(io("list a directory"))? {
            true => Ok(()),
            false => Err(VaultError::NotEmpty),
        }
    }
}
