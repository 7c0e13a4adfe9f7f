//! The calls of a file system. Each goes to the vault whose member number it carries, and the numbers in the answer
//! become those of the whole.

use super::member::GivenBack;
use super::{Forest, Number, ROOT_MEMBER, State, global, global_handle, local, local_handle, member_of};
use crate::error::{errno, io};
use crate::file_system::FileSystem;
use crate::handles::fresh_handle;
use crate::locks::{Locks, Object};
use crate::turns::Turns;
use crate::{
    Access, Attr, DirEntry, Entry, Fallocate, HandleId, Ino, Kind, Owner, Permissions, ROOT, RenameMode, Result,
    SetAttr, SetXattr, Sought, StatFs, Upkeep, Vault, VaultError, Whence,
};
use lamassu_format::root::MODE_BITS;
use lamassu_store::Hole;
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What a directory shows of its parent.
const PARENT: &str = "..";

/// How a directory's `.`, `..` and entries are numbered in the whole.
struct Dots {
    member: Number,
    /// For the root of a dataset: the directory that it lies in.
    above: Option<Ino>,
}

impl Dots {
    fn number(&self, entry: &DirEntry) -> Ino {
        self.above.filter(|_| entry.name == PARENT).unwrap_or_else(|| global(self.member, entry.ino))
    }
}

fn is_dot(entry: &DirEntry) -> bool {
    entry.name == "." || entry.name == PARENT
}

/// Helpers of the calls.
impl Forest {
    fn attr(member: Number, result: Result<Attr>) -> Result<Attr> {
        result.map(|attr| Attr { ino: global(member, attr.ino), ..attr })
    }

    /// The mode and owner of a dataset's root belong to its entry in the vault it lies in. That vault's anchor learns
    /// of them when they may have changed. A lookup before that still shows the old ones.
    fn root_changed(&self, ino: Ino, vault: &Vault) -> Result<()> {
        let member = member_of(ino);
        if member == ROOT_MEMBER || local(ino) != ROOT {
            return Ok(());
        }
        let Some((parent, entry)) = self.slot(member)?.place() else { return Ok(()) };
        let Some(above) = self.vault(parent) else { return Ok(()) };
        let Attr { mode, uid, gid, .. } = vault.getattr(ROOT, None)?;
        above.record_change(entry, |row| (row.mode, row.uid, row.gid) = (mode & MODE_BITS, uid, gid))
    }

    /// The vault of an inode whose attributes are about to change. The root of a dataset first takes over what its
    /// entry in the vault around it says: another host may have changed that.
    fn to_change(&self, ino: Ino) -> Result<Arc<Vault>> {
        let (vault, member) = (self.at(ino)?, member_of(ino));
        if self.hosts_take_turns() && member != ROOT_MEMBER && local(ino) == ROOT {
            let slot = self.slot(member)?;
            self.dataset_root_attr(&slot)?;
            slot.entry.lock().iter().for_each(|entry| vault.root_permissions.follow(*entry));
        }
        Ok(vault)
    }

    /// The vault of an open handle.
    fn of(&self, handle: HandleId) -> Result<Arc<Vault>> {
        self.at(handle.0)
    }

    /// The same; `None` if the vault is closed, which is no error.
    fn still_of(&self, handle: HandleId) -> Option<Arc<Vault>> {
        self.vault(member_of(handle.0))
    }

    fn made(&self, parent: Ino, make: impl FnOnce(&Vault, Ino) -> Result<Entry>) -> Result<Entry> {
        let mut entry = make(&*self.at(parent)?, local(parent))?;
        entry.attr.ino = global(member_of(parent), entry.attr.ino);
        Ok(entry)
    }

    /// The vault of an open directory, and how its listing is numbered.
    fn listed(&self, handle: HandleId) -> Result<(Arc<Vault>, Dots)> {
        let (vault, member) = (self.of(handle)?, member_of(handle.0));
        let mut above = None;
        if vault.dir_of(local_handle(handle))?.ino == ROOT
            && let Some((parent, ino)) = self.slot(member)?.place()
        {
            let dir = self.vault(parent).and_then(|parent| parent.nodes.lock().parent(ino));
            above = dir.map(|dir| global(parent, dir));
        }
        Ok((vault, Dots { member, above }))
    }

    /// Whether an inode is the root of a dataset for which there is no key: it has no attributes but those of stat.
    fn is_locked_root(&self, ino: Ino) -> bool {
        let state = || self.slot(member_of(ino)).map(|slot| slot.state());
        local(ino) == ROOT
            && matches!(self.at(ino), Err(VaultError::KeyNotLoaded))
            && matches!(state(), Ok(State::Locked | State::Unloaded))
    }
}

impl Forest {
    /// As [`FileSystem::write`], but a commit that is due is left to the thread that calls [`FileSystem::work_off`].
    /// The caller waits only if that thread is late.
    ///
    /// # Errors
    /// As [`FileSystem::write`].
    pub fn write_behind(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<usize> {
        self.of(handle)?.write_behind(local_handle(handle), offset, data)
    }
}

impl FileSystem for Forest {
    fn keeps_acls(&self) -> bool {
        self.keeps_acls
    }

    fn may_cache(&self, ino: Ino) -> bool {
        self.slot(member_of(ino)).is_ok_and(|slot| slot.cached()) && self.is_as_known(ino)
    }

    fn waits_for_keys(&self, ino: Ino) -> bool {
        self.vault(member_of(ino)).is_some_and(|vault| vault.waits_for_keys(local(ino)))
    }

    // Datasets before the vaults that they lie in.
    fn close(&self) -> Result<()> {
        let _one = self.changing.lock();
        self.each_loaded(Vault::close)
    }

    fn maintain(&self) -> Result<()> {
        // Also if nothing is loaded any more.
        lamassu_store::file::trim_spare();
        self.each_open(Vault::maintain)
    }

    fn upkeep(&self) -> Upkeep {
        self.upkeep.clone()
    }

    fn work_off(&self) -> Result<()> {
        self.each_open(Vault::work_off)
    }

    // Unloads everything when the idle time is over.
    fn unload_idle(&self) -> Result<()> {
        self.let_go_of_gone();
        if !self.is_idle() {
            return Ok(());
        }
        tracing::info!("unloaded: no request came for the time that was set; `lamassu key load` loads it again");
        self.unload(ROOT_MEMBER).map(drop)
    }

    // All vaults that are open; none is opened until the thaw. `EAGAIN` while one is loaded, unloaded or destroyed.
    fn freeze(&self) -> Result<()> {
        if self.hosts_take_turns() {
            return self.freeze_turns();
        }
        // Does not wait: unloading waits for requests of the kernel, which a front-end holds back while it freezes.
        let Some(_one) = self.changing.try_lock() else { return Err(errno("freeze", libc::EAGAIN)) };
        self.frozen.store(true, Ordering::Release);
        drop(self.opens.write());
        self.each_loaded(Vault::freeze).inspect_err(|_| {
            // If one cannot be frozen, none stays frozen.
            let _ = self.each_loaded(Vault::thaw);
            self.frozen.store(false, Ordering::Release);
        })
    }

    fn thaw(&self) -> Result<()> {
        if self.hosts_take_turns() {
            return self.thaw_turns();
        }
        self.frozen.store(false, Ordering::Release);
        self.each_loaded(Vault::thaw)
    }

    fn stop_freezing(&self) -> bool {
        self.stop_freezing_turns()
    }

    // That of the mount's own vault: `Vault::statfs` in `attr.rs` decides what `df` shows. Without it, the store's own.
    fn statfs(&self) -> Result<StatFs> {
        match self.root.loaded() {
            Some(vault) => vault.statfs(),
            None => self.root.backend.stat_fs().map_err(io("statfs")),
        }
    }

    fn lookup(&self, parent: Ino, name: &OsStr) -> Result<Entry> {
        let vault = self.at(parent)?;
        let entry = vault.lookup(local(parent), name)?;
        self.entered(&vault, member_of(parent), entry)
    }

    fn forget(&self, ino: Ino, count: u64) {
        let _ = self.give_back(member_of(ino), GivenBack::References(local(ino), count));
    }

    // The root of a dataset shows whether it is open or not.
    fn getattr(&self, ino: Ino, handle: Option<HandleId>) -> Result<Attr> {
        let member = member_of(ino);
        if local(ino) == ROOT {
            return self.root_attr(&*self.slot(member)?);
        }
        Self::attr(member, self.at(ino)?.getattr(local(ino), handle.map(local_handle)))
    }

    fn setattr(&self, ino: Ino, handle: Option<HandleId>, set: &SetAttr) -> Result<Attr> {
        let vault = self.to_change(ino)?;
        let done = vault.setattr(local(ino), handle.map(local_handle), set);
        if ino == ROOT
            && let Ok(attr) = done
        {
            let _ = self.root_or_as_last_known(Ok(attr));
        }
        if done.is_ok() && (set.mode.is_some() || set.uid.is_some() || set.gid.is_some()) {
            self.root_changed(ino, &vault)?;
        }
        Self::attr(member_of(ino), done)
    }

    fn readlink(&self, ino: Ino) -> Result<Vec<u8>> {
        self.at(ino)?.readlink(local(ino))
    }

    fn mknod(&self, parent: Ino, name: &OsStr, kind: Kind, mode: u32, rdev: u64, owner: Owner) -> Result<Entry> {
        self.made(parent, |vault, dir| vault.mknod(dir, name, kind, mode, rdev, owner))
    }

    fn mkdir(&self, parent: Ino, name: &OsStr, mode: u32, owner: Owner) -> Result<Entry> {
        self.made(parent, |vault, dir| vault.mkdir(dir, name, mode, owner))
    }

    fn symlink(&self, parent: Ino, name: &OsStr, target: &[u8], owner: Owner) -> Result<Entry> {
        self.made(parent, |vault, dir| vault.symlink(dir, name, target, owner))
    }

    fn link(&self, ino: Ino, parent: Ino, name: &OsStr) -> Result<Entry> {
        if member_of(ino) != member_of(parent) {
            return Err(VaultError::OtherDataset);
        }
        self.made(parent, |vault, dir| vault.link(local(ino), dir, name))
    }

    fn unlink(&self, parent: Ino, name: &OsStr) -> Result<()> {
        self.at(parent)?.unlink(local(parent), name)
    }

    fn rmdir(&self, parent: Ino, name: &OsStr) -> Result<()> {
        let vault = self.at(parent)?;
        if self.leads_to_dataset(&vault, local(parent), name)? {
            return Err(VaultError::DatasetRoot);
        }
        vault.rmdir(local(parent), name)
    }

    // A dataset moves with its directory within the vault it lies in.
    fn rename(&self, parent: Ino, name: &OsStr, to_parent: Ino, to_name: &OsStr, mode: RenameMode) -> Result<()> {
        if member_of(parent) != member_of(to_parent) {
            return Err(VaultError::OtherDataset);
        }
        let vault = self.at(parent)?;
        if mode == RenameMode::Replace && self.leads_to_dataset(&vault, local(to_parent), to_name)? {
            return Err(VaultError::DatasetRoot);
        }
        vault.rename(local(parent), name, local(to_parent), to_name, mode)
    }

    fn create(&self, parent: Ino, name: &OsStr, mode: u32, access: Access, owner: Owner) -> Result<(Entry, HandleId)> {
        let member = member_of(parent);
        let (mut entry, handle) = self.at(parent)?.create(local(parent), name, mode, access, owner)?;
        entry.attr.ino = global(member, entry.attr.ino);
        Ok((entry, global_handle(member, handle)))
    }

    fn open_file(&self, ino: Ino, access: Access) -> Result<HandleId> {
        self.at(ino)?.open_file(local(ino), access).map(|handle| global_handle(member_of(ino), handle))
    }

    fn read(&self, handle: HandleId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.of(handle)?.read(local_handle(handle), offset, buf)
    }

    fn write(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<usize> {
        self.of(handle)?.write(local_handle(handle), offset, data)
    }

    fn write_pages(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<usize> {
        self.of(handle)?.write_pages(local_handle(handle), offset, data)
    }

    fn append(&self, handle: HandleId, data: &[u8]) -> Result<usize> {
        self.of(handle)?.append(local_handle(handle), data)
    }

    fn hosts_take_turns(&self) -> bool {
        self.hosts_take_turns()
    }

    fn join_turns(&self, number: u64) -> Option<Arc<Turns>> {
        self.queue_of(member_of(number))
    }

    fn turns_that_show(&self, ino: Ino) -> Option<Arc<Turns>> {
        self.shows(ino)
    }

    fn stop_turns(&self) {
        self.stop_all_turns();
    }

    fn permissions(&self, dir: Ino) -> Result<Permissions> {
        self.dir_permissions(dir)
    }

    fn is_open(&self, ino: Ino) -> Result<()> {
        self.at(ino).map(drop)
    }

    fn locks(&self, number: u64) -> Option<Arc<dyn Locks>> {
        self.shared_locks(member_of(number))
    }

    fn locked_file(&self, ino: Ino) -> Result<Object> {
        self.object_of(ino).map(|object| Object(object.0))
    }

    // A vault that was closed has nothing left to write.
    fn flush(&self, handle: HandleId) -> Result<()> {
        let flush = || self.still_of(handle).map_or(Ok(()), |vault| vault.flush(local_handle(handle)));
        self.beside_turns(member_of(handle.0), |left| left.flush(local_handle(handle)), flush)
    }

    fn fsync(&self, handle: HandleId, data_only: bool) -> Result<()> {
        let fsync = || self.of(handle)?.fsync(local_handle(handle), data_only);
        self.beside_turns(member_of(handle.0), |left| left.sync(local_handle(handle)), fsync)
    }

    fn release(&self, handle: HandleId) -> Result<()> {
        self.give_back(member_of(handle.0), GivenBack::File(local_handle(handle)))
    }

    fn fallocate(&self, handle: HandleId, mode: Fallocate, offset: u64, len: u64) -> Result<()> {
        self.of(handle)?.fallocate(local_handle(handle), mode, offset, len)
    }

    // Between datasets the caller has to read and write: their keys differ.
    fn copy_range(&self, from: (HandleId, u64), to: (HandleId, u64), len: u64) -> Result<Option<u64>> {
        if member_of(from.0.0) != member_of(to.0.0) {
            return Ok(None);
        }
        self.of(to.0)?.copy_range((local_handle(from.0), from.1), (local_handle(to.0), to.1), len)
    }

    fn seek(&self, handle: HandleId, offset: u64, whence: Whence, most: u64) -> Result<Sought> {
        self.of(handle)?.seek(local_handle(handle), offset, whence, most)
    }

    fn hole_at(&self, handle: HandleId, offset: u64, until: u64, most: u64) -> Result<Hole> {
        self.of(handle)?.hole_at(local_handle(handle), offset, until, most)
    }

    fn data_until(&self, handle: HandleId, offset: u64, until: u64) -> Result<u64> {
        self.of(handle)?.data_until(local_handle(handle), offset, until)
    }

    // The root of a dataset whose key is not loaded opens too, so that it can be addressed, and lists nothing.
    fn open_dir(&self, ino: Ino) -> Result<HandleId> {
        let member = member_of(ino);
        let opened = match self.at(ino) {
            Err(VaultError::KeyNotLoaded) if local(ino) == ROOT => Ok(fresh_handle()),
            vault if ino == ROOT => self.root_opened(vault),
            vault => vault?.open_dir(local(ino)),
        };
        opened.map(|handle| global_handle(member, handle))
    }

    fn read_dir(&self, handle: HandleId, cookie: u64, fill: &mut dyn FnMut(&DirEntry, u64) -> bool) -> Result<()> {
        let (vault, dots) = self.listed(handle)?;
        let crossings = if vault.has_datasets() { Some(self.crossings.read().clone()) } else { None };
        vault.read_dir(local_handle(handle), cookie, &mut |entry, next| {
            let ino = dots.number(entry);
            let below = crossings.as_ref().filter(|_| !is_dot(entry)).and_then(|c| c.get(&ino));
            fill(&DirEntry { ino: below.map_or(ino, |below| global(*below, ROOT)), ..entry.clone() }, next)
        })
    }

    // The root of a dataset that cannot be read is listed without attributes: a call for it gets the error.
    fn read_dir_plus(
        &self,
        handle: HandleId,
        cookie: u64,
        fill: &mut dyn FnMut(&DirEntry, Option<Entry>, u64) -> bool,
    ) -> Result<()> {
        let (vault, dots) = self.listed(handle)?;
        vault.read_dir_plus(local_handle(handle), cookie, &mut |listed, entry, next| match entry {
            None => fill(&DirEntry { ino: dots.number(listed), ..listed.clone() }, None, next),
            Some(entry) => match self.entered(&vault, dots.member, entry) {
                Ok(entry) => fill(&DirEntry { ino: entry.attr.ino, ..listed.clone() }, Some(entry), next),
                Err(_) => fill(&DirEntry { ino: dots.number(listed), ..listed.clone() }, None, next),
            },
        })
    }

    fn listing_bytes(&self, handle: HandleId) -> usize {
        self.still_of(handle).map_or(0, |vault| vault.listing_bytes(local_handle(handle)))
    }

    fn release_dir(&self, handle: HandleId) -> Result<()> {
        self.give_back(member_of(handle.0), GivenBack::Dir(local_handle(handle)))
    }

    fn fsync_dir(&self, handle: HandleId) -> Result<()> {
        let fsync = || self.of(handle)?.fsync_dir(local_handle(handle));
        self.beside_turns(member_of(handle.0), |left| left.sync(local_handle(handle)), fsync)
    }

    fn get_xattr(&self, ino: Ino, name: &OsStr) -> Result<Vec<u8>> {
        if self.is_locked_root(ino) {
            return Err(VaultError::NoAttribute);
        }
        self.at(ino)?.get_xattr(local(ino), name)
    }

    fn set_xattr(&self, ino: Ino, name: &OsStr, value: &[u8], mode: SetXattr) -> Result<()> {
        let vault = self.to_change(ino)?;
        vault.set_xattr(local(ino), name, value, mode)?;
        // An access list contains a mode.
        self.root_changed(ino, &vault)
    }

    fn list_xattr(&self, ino: Ino) -> Result<Vec<Vec<u8>>> {
        if self.is_locked_root(ino) {
            return Ok(Vec::new());
        }
        self.at(ino)?.list_xattr(local(ino))
    }

    fn remove_xattr(&self, ino: Ino, name: &OsStr) -> Result<()> {
        let vault = self.to_change(ino)?;
        vault.remove_xattr(local(ino), name)?;
        self.root_changed(ino, &vault)
    }
}
