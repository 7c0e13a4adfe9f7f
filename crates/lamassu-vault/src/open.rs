//! Operations on open files.

use crate::error::{errno, io, is_not_found};
use crate::handles::{Handle, OpenFile};
use crate::inode::CachedSize;
use crate::{Access, Fallocate, HandleId, Ino, Kind, ROOT, Result, Sought, Vault, VaultError, Whence};
use lamassu_format::{PAGE_LEN, PageNo, Profile};
use lamassu_store::file::Rekey;
use lamassu_store::{BackendFile, File, FileContext, Hole};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Vault {
    /// How reports and the log name a file.
    pub(crate) fn tag(&self, ino: Ino) -> String {
        match self.nodes.lock().stored_path(ino) {
            Some(path) => format!("{} (inode {ino})", path.display()),
            None => format!("(inode {ino})"),
        }
    }

    /// The open file of `ino`, held once more; opened if it was not. Two opens of one inode never overlap: the second
    /// would cut the backing file to a length that the first has exceeded since.
    pub(crate) fn acquire(&self, ino: Ino, write: bool) -> Result<Arc<OpenFile>> {
        let _opening = self.opening(ino).lock();
        if let Some(open) = self.files.get_and_hold(ino) {
            if write && !open.is_writable() {
                match self.open_backing(ino, true, false).and_then(|opened| self.opened_file(ino, opened)) {
                    Ok(file) => open.upgrade(file),
                    Err(e) => {
                        self.unhold(&open);
                        return Err(e);
                    }
                }
            }
            return Ok(open);
        }
        // A reader does not wait for the gate. While that is closed, it mends nothing: no file is recovered, or taken
        // over.
        let pass = if write || self.options.read_only { None } else { self.gate.try_enter() };
        let may_mend = pass.is_some() && !self.closed.load(Ordering::Acquire);
        let opened = self.open_backing(ino, write, may_mend)?;
        let writable = opened.1;
        let file = self.opened_file(ino, opened)?;
        Ok(self.insert_held(ino, file, writable))
    }

    /// The file of what [`Vault::open_backing`] has opened.
    fn opened_file(
        &self,
        ino: Ino,
        (backing, writable, profile): (Arc<dyn BackendFile>, bool, Profile),
    ) -> Result<File> {
        // First: to open a file that was left open is to recover it.
        let is_left_open = writable && self.is_left_open_by_another_host(ino)?;
        let backing = if is_left_open { self.taken_over(ino, backing)? } else { backing };
        self.new_file(ino, backing, writable, profile)
    }

    /// Puts a file just opened or created into the table.
    pub(crate) fn insert_held(&self, ino: Ino, file: File, writable: bool) -> Arc<OpenFile> {
        let open = OpenFile::new(ino, file, writable, &self.room);
        self.nodes.lock().pin(ino);
        self.files.insert_held(&open);
        open
    }

    /// The file of an inode. `profile`: that of its directory, which holds if the file has no page.
    pub(crate) fn new_file(
        &self,
        ino: Ino,
        backing: Arc<dyn BackendFile>,
        write: bool,
        profile: Profile,
    ) -> Result<File> {
        let ctx = if write { &self.ctx } else { &self.ctx_read };
        let len = backing.stat().map_err(io("stat"))?.len;
        let file = self.file_of_node(ino, ctx, backing, len, &self.tag(ino))?;
        file.inherit(profile)?;
        Ok(file)
    }

    /// The file of a node: in an anchored vault as an object of the anchor.
    pub(crate) fn file_of_node(
        &self,
        ino: Ino,
        ctx: &Arc<FileContext>,
        backing: Arc<dyn BackendFile>,
        len: u64,
        tag: &str,
    ) -> Result<File> {
        if self.anchored.is_none() {
            return Ok(File::open_with_len(ctx.clone(), backing, len, tag)?);
        }
        let object = self.nodes.lock().object(ino);
        Ok(File::open_object(ctx.clone(), backing, len, tag, object)?)
    }

    /// Opens a backing file. Returns whether it is open for writing, and the profile of its directory. If it
    /// `may_mend`, a writer's vault also opens files that are only read for writing, if the mode allows it: an
    /// interrupted commit is completed when it is found.
    fn open_backing(&self, ino: Ino, write: bool, may_mend: bool) -> Result<(Arc<dyn BackendFile>, bool, Profile)> {
        let _tree = self.tree.read();
        if ino == ROOT {
            return Err(VaultError::IsDirectory);
        }
        let (dir, name, st) = match self.place(ino) {
            Err(VaultError::Stale) => return self.backing_without_name(ino, write),
            other => other?,
        };
        match st.kind {
            Kind::File => {
                self.must_be_its_own_to_open(ino, (&dir, &name), &st)?;
                let may_mend = may_mend && st.mode & libc::S_IWUSR != 0;
                let open = |write| dir.handle.open_same(&name, &st, write).map(|file| (file, write));
                let mended = if may_mend && !write { open(true).ok() } else { None };
                // Since `place` the name may have been removed, or given to another file.
                match mended.map_or_else(|| open(write), Ok) {
                    Ok((Some(file), writable)) => {
                        // A longer file has a page, which says its profile.
                        let may_lack_page = st.len <= PAGE_LEN as u64;
                        let profile = if may_lack_page { self.profile_in(&dir)? } else { Profile::DEFAULT };
                        Ok((file, writable, profile))
                    }
                    Ok((None, _)) => self.backing_without_name(ino, write),
                    Err(e) if is_not_found(&e) => self.backing_without_name(ino, write),
                    Err(e) => Err(io("open")(e)),
                }
            }
            Kind::Dir => Err(VaultError::IsDirectory),
            Kind::Symlink => Err(errno("open", libc::ELOOP)),
            Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => Err(errno("open", libc::ENXIO)),
        }
    }

    /// The backing file of an inode that lost its name between lookup and open.
    fn backing_without_name(&self, ino: Ino, write: bool) -> Result<(Arc<dyn BackendFile>, bool, Profile)> {
        match self.nameless.get(ino) {
            Some((_, false)) if write => Err(errno("open", libc::EACCES)),
            // In a turn that only looks it is not written.
            Some((backing, writable)) => Ok((backing, writable && !self.options.read_only, Profile::DEFAULT)),
            None => Err(VaultError::Stale),
        }
    }

    /// Gives a hold back. With the last one the file is dropped, or stays in the table until it is settled.
    pub(crate) fn unhold(&self, open: &Arc<OpenFile>) {
        if !self.files.unhold(open.ino) {
            return;
        }
        let stays = self.nodes.lock().is_live(open.ino) || self.may_be_opened_nameless(open.ino);
        if stays && open.is_unsettled() {
            open.touched(self.now());
            let idle = self.files.idle_count();
            if idle > self.idle_max
                && let Err(e) = self.settle_idle()
            {
                tracing::error!(error = %e, "files that were closed could not be settled");
            } else if idle == self.idle_max / 2 {
                self.options.upkeep.want();
            }
        } else {
            self.let_go(open.ino, !stays);
        }
    }

    /// Takes a file without handles out of the table, unless something in it is not settled. With `force` unsettled
    /// data are lost, which is right for a removed file and for one that fails permanently.
    pub(crate) fn let_go(&self, ino: Ino, force: bool) {
        self.let_go_if(ino, |f| force || !f.is_unsettled());
    }

    /// The same if `may_go`. No other thread can change that in between.
    pub(crate) fn let_go_if(&self, ino: Ino, may_go: impl Fn(&OpenFile) -> bool) {
        let Some(open) = self.files.remove_idle(ino, may_go) else { return };
        let file = open.file();
        let size = match file.backing().stat() {
            Ok(st) if !file.is_dirty() => CachedSize::new(&st, file.size()),
            Ok(_) | Err(_) => None,
        };
        // From here on only `open` refers to it, which tells when it is closed.
        drop(file);
        {
            let mut nodes = self.nodes.lock();
            open.closing.is_let_go(nodes.is_live(open.ino));
            nodes.set_cached_size(open.ino, size);
            nodes.unpin(open.ino);
        }
        self.forget_nameless(open.ino);
        if let Some(anchored) = &self.anchored {
            anchored.keep(open);
            self.forget_objects();
        }
    }

    // --- the public calls

    /// Opens a file. Reading is always possible through the handle: a kernel that caches writes reads through handles
    /// opened for writing.
    ///
    /// # Errors
    /// [`VaultError::ReadOnly`] for a write to a read-only vault, [`VaultError::IsDirectory`], [`VaultError::Stale`],
    /// [`StoreError::Anchor`](lamassu_store::StoreError::Anchor) for a write of a file whose profile the policy of the
    /// anchor's server forbids; those of the store.
    pub fn open_file(&self, ino: Ino, access: Access) -> Result<HandleId> {
        let opened = self.with_room(|| self.open_once(ino, access));
        if access.truncate {
            self.room.gained();
        }
        opened
    }

    fn open_once(&self, ino: Ino, access: Access) -> Result<HandleId> {
        let write = access.write || access.truncate;
        let _pass = if write { Some(self.change()?) } else { None };
        let open = if write { self.acquire_to_change(ino, access.truncate)? } else { self.acquire(ino, false)? };
        let mut done = if write { self.ctx.check_allowed(open.file().profile().0) } else { Ok(()) };
        if access.truncate && done.is_ok() {
            done = open.file().truncate(0);
            open.touched(self.now());
        }
        if let Err(e) = done {
            self.unhold(&open);
            return Err(e.into());
        }
        Ok(self.handles.add(Handle::File { file: open, access }))
    }

    /// Reads up to `buf.len()` bytes; short only at the end of the file.
    ///
    /// # Errors
    /// [`VaultError::Store`] where the range is damaged.
    pub fn read(&self, handle: HandleId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let (open, _) = self.file_of(handle)?;
        self.read_current(|| Ok(open.file().read_at(offset, buf)?))
    }

    fn writing(&self, handle: HandleId) -> Result<Arc<OpenFile>> {
        let (open, access) = self.file_of(handle)?;
        self.left.tell_lost(handle, true)?;
        if access.write { Ok(open) } else { Err(VaultError::BadHandle) }
    }

    /// Writes what the kernel had cached. No program waits for that: so what an earlier turn has lost is reported by
    /// the program's own next write or sync, and this is written.
    ///
    /// # Errors
    /// As [`Vault::write`].
    pub fn write_pages(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<usize> {
        self.with_room(|| match self.file_of(handle)? {
            (open, access) if access.write => self.write_to(&open, offset, data),
            _ => Err(VaultError::BadHandle),
        })
    }

    /// Writes all of `data`.
    ///
    /// # Errors
    /// [`VaultError::BadHandle`] unless opened for writing; those of the store.
    pub fn write(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<usize> {
        self.with_room(|| self.write_once(handle, offset, data))
    }

    fn write_once(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<usize> {
        let open = self.writing(handle)?;
        self.write_to(&open, offset, data)
    }

    fn write_to(&self, open: &OpenFile, offset: u64, data: &[u8]) -> Result<usize> {
        let _pass = self.change()?;
        self.bound_buffers(offset, data.len())?;
        let done = open.file().write_at(offset, data);
        open.touched(self.now());
        Ok(done.map(|()| data.len())?)
    }

    /// As [`Vault::write`], but a commit that is due is left to the thread that calls [`Vault::work_off`]: the caller
    /// waits only if that thread is late.
    ///
    /// # Errors
    /// As [`Vault::write`].
    pub fn write_behind(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<usize> {
        self.with_room(|| {
            let open = self.writing(handle)?;
            let _pass = self.change()?;
            self.bound_buffers(offset, data.len())?;
            let done = open.file().write_behind(offset, data);
            open.touched(self.now());
            if done? {
                self.options.upkeep.want();
            }
            Ok(data.len())
        })
    }

    /// Writes at the end, atomically among appends: for front-ends whose kernel does not resolve O_APPEND itself.
    ///
    /// # Errors
    /// As [`Vault::write`].
    pub fn append(&self, handle: HandleId, data: &[u8]) -> Result<usize> {
        let open = self.writing(handle)?;
        self.with_room(|| {
            let _pass = self.change()?;
            self.bound_buffers(open.file().size(), data.len())?;
            let done = open.file().append(data);
            open.touched(self.now());
            Ok(done.map(|_| data.len())?)
        })
    }

    /// close(2) of one descriptor: writes buffers to the store, and reports errors.
    ///
    /// # Errors
    /// Those of the store.
    pub fn flush(&self, handle: HandleId) -> Result<()> {
        if let Ok((open, _)) = self.handles.file(handle) {
            open.closing.is_being_closed();
        }
        self.with_room(|| self.flush_once(handle))
    }

    fn flush_once(&self, handle: HandleId) -> Result<()> {
        let (open, access) = self.file_of(handle)?;
        self.left.tell_lost(handle, false)?;
        if !access.write || !open.file().is_dirty() {
            return Ok(());
        }
        match self.change_unless_still()? {
            Some(_pass) => Ok(open.flush()?),
            None => Ok(()),
        }
    }

    /// Closes a handle.
    ///
    /// # Errors
    /// [`VaultError::BadHandle`]; the store's error when buffers were written (they stay, and are written again).
    pub fn release(&self, handle: HandleId) -> Result<()> {
        if self.left.remove(handle).is_some() {
            return Ok(());
        }
        self.handles.file(handle)?;
        let Some(Handle::File { file: open, access }) = self.handles.remove(handle) else {
            return Err(VaultError::BadHandle);
        };
        let dirty = access.write && open.file().is_dirty() && self.nodes.lock().is_live(open.ino);
        let pass = if dirty { self.change_unless_still() } else { Ok(None) };
        let flushed = match pass {
            Ok(Some(_pass)) => open.flush().map_err(VaultError::from),
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        self.unhold(&open);
        flushed
    }

    /// fallocate(2).
    ///
    /// # Errors
    /// [`VaultError::Invalid`] for an empty or impossible range, [`VaultError::BadHandle`], those of the store.
    pub fn fallocate(&self, handle: HandleId, mode: Fallocate, offset: u64, len: u64) -> Result<()> {
        let done = self.with_room(|| self.fallocate_once(handle, mode, offset, len));
        match mode {
            Fallocate::Punch | Fallocate::Zero { .. } => self.room.gained(),
            Fallocate::Reserve | Fallocate::KeepSize => {}
        }
        done
    }

    fn fallocate_once(&self, handle: HandleId, mode: Fallocate, offset: u64, len: u64) -> Result<()> {
        let open = self.writing(handle)?;
        offset.checked_add(len).filter(|_| len > 0).ok_or(VaultError::Invalid)?;
        let _pass = self.change()?;
        let file = open.file();
        let done = match mode {
            Fallocate::Reserve => file.allocate(offset, len, false),
            Fallocate::KeepSize => file.allocate(offset, len, true),
            Fallocate::Punch => file.punch(offset, len),
            Fallocate::Zero { keep_size } => file.zero(offset, len, keep_size),
        };
        open.touched(self.now());
        Ok(done?)
    }

    /// Copies a range of one open file into another, (handle, offset) each, without decrypting it: the keys go from
    /// page to page, and the ciphertext from file to file in the store, which may share it. Returns how many bytes were
    /// copied, which may be fewer; `None`: the caller has to read and write.
    ///
    /// # Errors
    /// [`VaultError::BadHandle`] unless opened for writing; those of the store.
    pub fn copy_range(&self, from: (HandleId, u64), to: (HandleId, u64), len: u64) -> Result<Option<u64>> {
        let (source, _) = self.file_of(from.0)?;
        let target = self.writing(to.0)?;
        self.with_room(|| {
            let _pass = self.change()?;
            // Copied blocks keep their keys, which may be of an older epoch, and a re-keying may have passed this file
            // already.
            if crate::is_server_held(&self.options) && self.ctx.ring.inners().len() > 1 {
                return Ok(None); // a re-keying on another host would not know
            }
            let copying = self.copying(target.ino);
            let done = target.file().copy_from(&source.file(), from.1, to.1, len);
            drop(copying);
            target.touched(self.now());
            Ok(done?)
        })
    }

    /// Gives a file that has no content the profile of another; durable when it returns.
    ///
    /// # Errors
    /// [`VaultError::BadHandle`] unless opened for writing; [`VaultError::Refused`] if it has content; the error for
    /// profiles that the policy of the anchor's server forbids; those of the store.
    pub fn take_profile(&self, from: HandleId, to: HandleId) -> Result<()> {
        self.with_room(|| self.take_profile_once(from, to))
    }

    fn take_profile_once(&self, from: HandleId, to: HandleId) -> Result<()> {
        let profile = self.file_of(from)?.0.file().profile().0;
        let target = self.writing(to)?;
        let file = target.file();
        let _pass = self.change()?;
        if file.size() > 0 {
            return Err(VaultError::Refused("only a file without content takes over a profile at once"));
        }
        if file.begin_profile(profile)? {
            // It has its first page, without blocks.
            file.rekey(Rekey::Profile, PageNo::ZERO)?;
            if !file.end_profile()? {
                return Err(VaultError::Damaged { what: "file", stored: self.tag(target.ino) });
            }
        }
        Ok(())
    }

    /// lseek(2) for data and holes. Looks at `most` bytes of the file, roughly.
    ///
    /// # Errors
    /// [`VaultError::NoData`] past the end, or where no data follows.
    pub fn seek(&self, handle: HandleId, offset: u64, whence: Whence, most: u64) -> Result<Sought> {
        let (open, _) = self.file_of(handle)?;
        let file = open.file();
        let found = self.read_current(|| match whence {
            Whence::Data => Ok(file.hole_at(offset, u64::MAX, most)?.map(|hole| match hole.end == offset {
                true => Sought::Found(offset),
                false => Sought::NotBefore(hole.end),
            })),
            Whence::Hole => {
                let until = offset.saturating_add(most);
                let found = file.seek_hole_before(offset, until)?;
                // The end of the file is a hole, too.
                let goes_on = found == Some(until) && file.hole_at(until, until, 0)?.is_some();
                Ok(found.map(|found| if goes_on { Sought::NotBefore(found) } else { Sought::Found(found) }))
            }
        });
        found?.ok_or(VaultError::NoData)
    }

    /// The hole at `offset`, empty where there are data: as far as `until`, and as far as pages of `most` bytes tell.
    ///
    /// # Errors
    /// [`VaultError::NoData`] past the end.
    pub fn hole_at(&self, handle: HandleId, offset: u64, until: u64, most: u64) -> Result<Hole> {
        let (open, _) = self.file_of(handle)?;
        let file = open.file();
        self.read_current(|| Ok(file.hole_at(offset, until, most)?))?.ok_or(VaultError::NoData)
    }

    /// Where the data at `offset` ends: at a hole, or at `until`, where the search stops.
    ///
    /// # Errors
    /// [`VaultError::NoData`] past the end.
    pub fn data_until(&self, handle: HandleId, offset: u64, until: u64) -> Result<u64> {
        let (open, _) = self.file_of(handle)?;
        let file = open.file();
        self.read_current(|| Ok(file.seek_hole_before(offset, until)?))?.ok_or(VaultError::NoData)
    }
}
