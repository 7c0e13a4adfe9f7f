//! Opening, reading, writing, and the clearing of set-uid and set-gid bits (`FUSE_HANDLE_KILLPRIV_V2`).
//!
//! With that capability the kernel leaves clearing these bits to the adapter. It sets a flag in writes
//! (`FUSE_WRITE_KILL_SUIDGID`) and in truncations. But `fuser` 0.18 does not pass on those of truncations
//! (`FATTR_KILL_SUIDGID`, `FUSE_OPEN_KILL_SUIDGID`): there every caller except root counts as lacking `CAP_FSETID`. On
//! chown the bits are always cleared.

use super::acl::{CAPABILITY, Caller};
use super::{About, CacheWrite, Shared, convert, failed};
use crate::options::CacheMode;
use fuser::{FopenFlags, OpenFlags, ReplyData, ReplyWrite, WriteFlags};
use lamassu_vault::turns::Need;
use lamassu_vault::{
    Access, Attr, DirEntry, Entry, Fallocate, FileSystem, HandleId, Ino, Kind, Owner, Result, SetAttr, VaultError,
};
use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

thread_local! {
    /// One read buffer per request thread, kept between requests: clearing a fresh MiB for each would cost more than
    /// the copy.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A write without its data.
#[derive(Clone, Copy)]
pub(super) struct WriteRequest {
    pub(super) ino: Ino,
    pub(super) handle: HandleId,
    pub(super) offset: u64,
    pub(super) flags: WriteFlags,
    pub(super) open_flags: OpenFlags,
    pub(super) caller: Caller,
}

fn send_data(result: Result<&[u8]>, reply: ReplyData) {
    match result {
        Ok(bytes) => reply.data(bytes),
        Err(error) => reply.error(failed("read", &error)),
    }
}

impl<F: FileSystem> Shared<F> {
    /// Whether contents of this open file bypass the page cache.
    pub(super) fn is_direct(&self, handle: HandleId, flags: OpenFlags) -> bool {
        !self.may_cache(flags) || flags.0 & libc::O_DIRECT != 0 || self.uncached.read().contains(&handle.0)
    }

    /// Whether the page cache is used for files opened with these flags. With turns, not for writing: a write into the
    /// page cache would hold locks of pages, which must be dropped before the turn that it waits for.
    fn may_cache(&self, flags: OpenFlags) -> bool {
        let is_for_reading = flags.0 & libc::O_ACCMODE == libc::O_RDONLY;
        self.cache != CacheMode::None && (is_for_reading || !self.fs.hosts_take_turns())
    }

    /// Notes that a file was opened. The kernel decides at this moment whether the handle bypasses the page cache. It
    /// stays so, even if a program takes O_DIRECT from the flags later (`F_SETFL`).
    fn opened(&self, ino: Ino, handle: HandleId, access: Access, flags: OpenFlags, caller: Caller) {
        self.descriptors.opened(caller, handle, Some(ino));
        let is_direct = flags.0 & libc::O_DIRECT != 0;
        if is_direct || !self.fs.may_cache(ino) || !self.keeps(ino) {
            self.uncached.write().insert(handle.0);
        }
        if access.write && flags.0 & libc::O_DSYNC != 0 {
            self.synchronous.write().insert(handle.0);
        }
        self.add_use(ino, access.write, !self.is_direct(handle, flags));
    }

    /// Forgets what was noted of a handle.
    pub(super) fn forget_flags(&self, handle: HandleId) {
        for noted in [&self.uncached, &self.synchronous] {
            if !noted.read().is_empty() {
                noted.write().remove(&handle.0);
            }
        }
    }

    /// Whether changes of contents through this handle are durable before they are answered.
    pub(super) fn is_synchronous(&self, handle: HandleId) -> bool {
        self.syncs_content || self.synchronous.read().contains(&handle.0)
    }

    /// Makes a change of a file's content durable, where the kernel sends no fsync after it as it does after a write.
    fn sync_content(&self, handle: HandleId) -> Result<()> {
        if self.is_synchronous(handle) { self.fs.fsync(handle, false) } else { Ok(()) }
    }

    pub(super) fn open_reply_flags(&self, handle: HandleId, flags: OpenFlags) -> FopenFlags {
        if self.is_direct(handle, flags) {
            FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
        } else {
            FopenFlags::FOPEN_KEEP_CACHE
        }
    }

    pub(super) fn access(&self, flags: OpenFlags) -> Access {
        convert::access(flags, self.cache == CacheMode::WriteBack)
    }

    pub(super) fn open(&self, ino: Ino, flags: OpenFlags, caller: Caller) -> Result<HandleId> {
        let access = self.access(flags);
        self.descriptors.check(caller)?;
        if access.truncate && !caller.is_root() {
            self.drop_privileges(ino, None, caller)?;
        }
        let handle = self.fs.open_file(ino, access)?;
        self.opened(ino, handle, access, flags, caller);
        Ok(handle)
    }

    pub(super) fn open_dir(&self, ino: Ino, caller: Caller) -> Result<HandleId> {
        self.descriptors.check(caller)?;
        let handle = self.fs.open_dir(ino)?;
        self.descriptors.opened(caller, handle, None);
        Ok(handle)
    }

    pub(super) fn read_dir(
        &self,
        handle: HandleId,
        cookie: u64,
        fill: &mut dyn FnMut(&DirEntry, u64) -> bool,
    ) -> Result<()> {
        self.measured(handle, cookie, || self.fs.read_dir(handle, cookie, fill))
    }

    pub(super) fn read_dir_plus(
        &self,
        handle: HandleId,
        cookie: u64,
        fill: &mut dyn FnMut(&DirEntry, Option<Entry>, u64) -> bool,
    ) -> Result<()> {
        self.measured(handle, cookie, || self.fs.read_dir_plus(handle, cookie, fill))
    }

    fn measured(&self, handle: HandleId, cookie: u64, list: impl FnOnce() -> Result<()>) -> Result<()> {
        let may_begin = self.descriptors.check_listing(handle, cookie)?;
        let done = list();
        if may_begin {
            self.descriptors.listed(handle, self.fs.listing_bytes(handle));
        }
        done
    }

    pub(super) fn fsync(&self, handle: HandleId, data_only: bool) -> Result<()> {
        self.check_locks(handle)?;
        self.fs.fsync(handle, data_only)
    }

    pub(super) fn fallocate(&self, handle: HandleId, mode: Fallocate, offset: u64, len: u64) -> Result<()> {
        self.check_locks(handle)?;
        self.fs.fallocate(handle, mode, offset, len)?;
        self.sync_content(handle)
    }

    pub(super) fn copy_range(&self, from: (HandleId, u64), to: (HandleId, u64), len: u64) -> Result<Option<u64>> {
        self.check_locks(from.0)?;
        self.check_locks(to.0)?;
        let copied = self.fs.copy_range(from, to, len)?;
        // Without one the kernel copies by writes.
        copied.map_or(Ok(()), |_| self.sync_content(to.0))?;
        Ok(copied)
    }

    pub(super) fn release(&self, handle: HandleId) -> Result<()> {
        let done = self.fs.release(handle);
        self.descriptors.closed(handle);
        done
    }

    pub(super) fn release_dir(&self, handle: HandleId) -> Result<()> {
        let done = self.fs.release_dir(handle);
        self.descriptors.closed(handle);
        done
    }

    /// Creates and opens. The kernel sends this when it knows of no such entry, and then checks no permission of the
    /// file that is opened. So an existing one is never opened here: an open without `O_EXCL` fails as stale, and the
    /// kernel looks the name up again, checks, and sends an open.
    pub(super) fn create(
        &self,
        parent: Ino,
        name: &OsStr,
        mode: u32,
        flags: OpenFlags,
        owner: Owner,
        caller: Caller,
    ) -> Result<(Entry, HandleId)> {
        let access = self.access(flags);
        let mode = self.without_others_group(parent, mode, caller)?;
        self.descriptors.check(caller)?;
        let made = self.fs.create(parent, name, mode, Access { truncate: false, ..access }, owner);
        let made = self.synced(&[parent], made, |(entry, handle)| {
            let _ = self.fs.release(handle);
            self.fs.forget(entry.attr.ino, 1);
        });
        match made {
            Ok((entry, handle)) => {
                self.opened(entry.attr.ino, handle, access, flags, caller);
                Ok((entry, handle))
            }
            Err(VaultError::Exists) if flags.0 & libc::O_EXCL == 0 => Err(VaultError::Stale),
            Err(error) => Err(error),
        }
    }

    pub(super) fn mknod(
        &self,
        (parent, name): (Ino, &OsStr),
        kind: Kind,
        mode: u32,
        rdev: u64,
        (owner, caller): (Owner, Caller),
    ) -> Result<Entry> {
        let mode = self.without_others_group(parent, mode, caller)?;
        self.fs.mknod(parent, name, kind, mode, rdev, owner)
    }

    /// The mode of a new entry that is no directory. An executable that runs as the directory's group is not for a
    /// caller outside of it to make. The kernel clears the bit since version 6.0.
    fn without_others_group(&self, parent: Ino, mode: u32, caller: Caller) -> Result<u32> {
        let as_group = libc::S_ISGID | libc::S_IXGRP;
        if mode & as_group != as_group || caller.is_root() {
            return Ok(mode);
        }
        let dir = self.fs.permissions(parent)?;
        let is_inherited = dir.mode & libc::S_ISGID != 0;
        Ok(if is_inherited && !caller.is_in_group(dir.gid) { mode & !libc::S_ISGID } else { mode })
    }

    /// `direct`: the request is a read(2) past the page cache. If the request came from the page cache instead, a short
    /// answer would be filled up with zeros, and invalidating pages would wait for the page that this request fills.
    pub(super) fn read(self: &Arc<Self>, ino: Ino, handle: HandleId, at: Range<u64>, direct: bool, reply: ReplyData) {
        let writeback = self.cache == CacheMode::WriteBack;
        self.read_into_buffer(handle, at.clone(), direct, |result| match result {
            // Before a direct read the kernel writes back only the pages of its range. If the file seems to end within
            // the range, its true end may lie in dirty pages behind it. They are written back first; otherwise the
            // caller would see a wrong end.
            Ok(bytes) if direct && writeback && bytes.len() < (at.end - at.start) as usize && self.is_written(ino) => {
                self.aside("read", move |shared| {
                    shared.push_out(ino, at.start, 0);
                    shared.read_into_buffer(handle, at, direct, |result| send_data(result, reply));
                });
            }
            result => send_data(result, reply),
        });
    }

    fn read_into_buffer(&self, handle: HandleId, at: Range<u64>, direct: bool, then: impl FnOnce(Result<&[u8]>)) {
        READ_BUFFER.with_borrow_mut(|buffer| {
            let size = (at.end - at.start) as usize;
            if buffer.len() < size {
                buffer.resize(size, 0);
            }
            let done = self.read_full(handle, at.start, &mut buffer[..size], direct);
            then(done.map(|n| &buffer[..n]));
        });
    }

    /// Reads until the buffer is full or the file ends. The kernel takes a short answer for the end of the file, and
    /// fills up with zeros. So if a part cannot be read, the whole request must fail. (The kernel then asks again page
    /// by page.)
    pub(super) fn read_full(&self, handle: HandleId, offset: u64, buffer: &mut [u8], direct: bool) -> Result<usize> {
        self.check_locks(handle)?;
        let mut done = 0;
        while done < buffer.len() {
            match self.fs.read(handle, offset + done as u64, &mut buffer[done..]) {
                Ok(0) => break,
                Ok(n) => done += n,
                // read(2) itself may be short if nothing is cached.
                Err(_) if direct && done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    pub(super) fn write(
        self: &Arc<Self>,
        request: WriteRequest,
        data: &[u8],
        counted: Option<CacheWrite<F>>,
        reply: ReplyWrite,
    ) {
        let done = self.write_all(request, data);
        let written = u32::try_from(data.len()).unwrap_or(u32::MAX);
        match done {
            // The kernel dropped the pages of the range before this request, but pages may have been read in since.
            Ok(()) if self.is_direct_write(&request) && self.is_cached(request.ino) => {
                self.aside("write", move |shared| {
                    shared.push_out(request.ino, request.offset, written.into());
                    reply.written(written);
                });
            }
            Ok(()) => reply.written(written),
            Err(error) => reply.error(failed("write", &error)),
        }
        drop(counted);
    }

    /// The same for a write that may wait for keys.
    pub(super) fn write_aside(
        self: &Arc<Self>,
        need: Need,
        request: WriteRequest,
        data: Vec<u8>,
        counted: Option<CacheWrite<F>>,
        reply: ReplyWrite,
    ) {
        self.in_turn_aside(About::Content(request.ino), need, move |shared| {
            let write = move |s: &Arc<Self>| s.write(request, &data, counted, reply);
            match shared.gate.enter() {
                Some(_pass) => _ = shared.answer("write", || write(shared)),
                None => {
                    let s = shared.clone();
                    shared.gate.defer(request.ino, Box::new(move || _ = s.serve("write", || write(&s))));
                }
            }
        });
    }

    fn is_direct_write(&self, request: &WriteRequest) -> bool {
        self.is_direct(request.handle, request.open_flags) && !request.flags.contains(WriteFlags::FUSE_WRITE_CACHE)
    }

    fn write_all(&self, request: WriteRequest, data: &[u8]) -> Result<()> {
        let WriteRequest { ino, handle, offset, flags, open_flags, caller } = request;
        let direct = self.is_direct_write(&request);
        self.check_locks(handle)?;
        if flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
            self.drop_privileges(ino, Some(handle), caller)?;
        }
        // For every caller: unlike the bits, capabilities are cleared for root too.
        if direct {
            self.drop_capability(ino, handle)?;
        }
        // If other hosts write too, the kernel does not know where a file ends.
        let appends = direct && open_flags.0 & libc::O_APPEND != 0 && self.fs.hosts_take_turns();
        let mut done = if appends { self.fs.append(handle, data)? } else { 0 };
        while done < data.len() {
            let (at, rest) = (offset + done as u64, &data[done..]);
            let written = match flags.contains(WriteFlags::FUSE_WRITE_CACHE) {
                true => self.fs.write_pages(handle, at, rest)?,
                false => self.fs.write(handle, at, rest)?,
            };
            match written {
                0 => return Err(VaultError::Io { op: "write", source: io::ErrorKind::WriteZero.into() }),
                n => done += n,
            }
        }
        // The kernel follows cached synchronous writes with an fsync of its own; direct ones it leaves to us, with the
        // option `sync` too.
        if direct && (self.syncs_content || open_flags.0 & libc::O_DSYNC != 0) {
            self.fs.fsync(handle, open_flags.0 & libc::O_SYNC != libc::O_SYNC)?;
        }
        Ok(())
    }

    /// Clears set-uid and set-gid bits where there are any. The kernel uses the mode that it knows, in exec(2) too,
    /// until it is told to forget it.
    pub(super) fn drop_privileges(&self, ino: Ino, handle: Option<HandleId>, caller: Caller) -> Result<()> {
        let attr = self.fs.getattr(ino, handle)?;
        if let Some(mode) = convert::without_privileges(&attr, |group| caller.is_in_group(group)) {
            self.fs.setattr(ino, handle, &SetAttr { mode: Some(mode), ..SetAttr::default() })?;
            self.forget_attributes(ino);
        }
        Ok(())
    }

    /// Removes file capabilities, as a direct write must; for other writes the kernel does it. Checks first whether
    /// there is one: even the removal of an absent attribute takes a right that daemons of ordinary users lack.
    ///
    /// The file is known to have none until one is set through this mount ([`Shared::set_xattr`]; the kernel's lock of
    /// the inode keeps the two apart), or in another host's turn.
    fn drop_capability(&self, ino: Ino, handle: HandleId) -> Result<()> {
        let turn = self.fs.join_turns(ino).map_or(0, |turns| turns.number());
        if self.without_capability.lock().get(&ino) == Some(&turn) {
            return Ok(());
        }
        let name = OsStr::new(CAPABILITY);
        let before = self.capabilities_set.load(Ordering::SeqCst);
        let found = match self.fs.get_xattr(ino, name) {
            // Another host may have given it the only name that it has. The handle opens it in this turn.
            Err(VaultError::Stale) => self.fs.getattr(ino, Some(handle)).and_then(|_| self.fs.get_xattr(ino, name)),
            found => found,
        };
        match found {
            Ok(_) => self.fs.remove_xattr(ino, name)?,
            Err(VaultError::NoAttribute | VaultError::Unsupported) => {}
            // The kernel cannot read it either, so it gives nothing. Of a file that is gone, the write tells.
            Err(VaultError::Damaged { .. } | VaultError::Outdated { .. } | VaultError::Stale) => return Ok(()),
            Err(error) => return Err(error),
        }
        let mut without = self.without_capability.lock();
        // Asynchronous writes are not kept apart from a change by the kernel's lock.
        if self.capabilities_set.load(Ordering::SeqCst) == before {
            without.insert(ino, turn);
        }
        Ok(())
    }

    /// setattr. Truncation and a change of owner also clear set-uid and set-gid bits.
    pub(super) fn setattr(&self, ino: Ino, handle: Option<HandleId>, mut set: SetAttr, caller: Caller) -> Result<Attr> {
        self.check_setattr(ino, handle, &set, caller)?;
        handle.map_or(Ok(()), |handle| self.check_locks(handle))?;
        let chown = set.uid.is_some() || set.gid.is_some();
        if set.mode.is_none() && (chown || (set.size.is_some() && !caller.is_root())) {
            let attr = self.fs.getattr(ino, handle)?;
            if attr.kind != Kind::Dir {
                set.mode = convert::without_privileges(&attr, |group| caller.is_in_group(group));
            }
        }
        self.fs.setattr(ino, handle, &set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::MountOptions;
    use lamassu_plain::PlainFs;
    use lamassu_vault::ROOT;
    use std::os::unix::fs::PermissionsExt;

    /// As kernels before 6.0 send it.
    #[test]
    fn no_executable_of_a_group_is_made_by_who_is_not_in_it() {
        const GROUP: u32 = 4321;
        let dir = tempfile::tempdir().unwrap();
        if std::os::unix::fs::chown(dir.path(), None, Some(GROUP)).is_err() {
            eprintln!("SKIPPED: takes root");
            return;
        }
        let bits = libc::S_ISUID | libc::S_ISGID;
        for inherits in [false, true] {
            let mode = if inherits { 0o2777 } else { 0o777 };
            std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            let fs = Arc::new(PlainFs::open(dir.path()).unwrap());
            let shared = Shared::new(fs, &MountOptions::default(), 0, None).unwrap();
            let made = |name: &str, mode: u32, caller: Caller| {
                let owner = Owner { uid: caller.uid(), gid: caller.uid(), umask: 0 };
                let mut found = Vec::new();
                let (name, flags) = (OsStr::new(name), OpenFlags(libc::O_RDWR));
                let (entry, handle) = shared.create(ROOT, name, mode, flags, owner, caller).unwrap();
                found.push(entry.attr.mode & bits);
                shared.release(handle).unwrap();
                std::fs::remove_file(dir.path().join(name)).unwrap();
                let entry = shared.mknod((ROOT, name), Kind::Fifo, mode, 0, (owner, caller)).unwrap();
                found.push(entry.attr.mode & bits);
                std::fs::remove_file(dir.path().join(name)).unwrap();
                assert_eq!(found[0], found[1], "{mode:o}");
                found[0]
            };
            let (outsider, member, root) = (Caller::some(1), Caller::some(GROUP), Caller::some(0));
            assert_eq!(made("outsider", 0o6775, outsider), if inherits { libc::S_ISUID } else { bits });
            assert_eq!(made("locking", 0o2765, outsider), libc::S_ISGID, "no one runs it as the group");
            assert_eq!(made("member", 0o2775, member), libc::S_ISGID);
            assert_eq!(made("root", 0o2775, root), libc::S_ISGID);
        }
    }
}
