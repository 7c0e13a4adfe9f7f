//! The requests, one by one.

use super::acl::Caller;
use super::admin::IoctlRequest;
use super::convert::{self, file_attr, file_type, negative_entry, node_kind, removed_attr, rename_mode, set_time};
use super::file_io::WriteRequest;
use super::locks::LockRequest;
use super::reply::{is_not_found, send_empty, send_xattr};
use super::{About, Adapter, CacheWrite, Shared, failed};
use crate::options::CacheMode;
use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo,
    IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, RequestId, TimeOrNow, WriteFlags,
};
use lamassu_vault::turns::Need;
use lamassu_vault::{FileSystem, HandleId, ROOT, SetAttr, SetXattr, VaultError, Whence, is_listed_for};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The longest read that is accepted. The kernel asks for at most [`crate::MountOptions::max_read`]; a buffer of the
/// requested length is allocated.
const READ_LEN_MAX: u32 = 16 << 20;
/// Bytes copied for one request: the caller asks again for the rest, and can be interrupted in between. Less where
/// other hosts wait for the end of the turn, in which the requests of many callers may be carried out.
const COPY_LEN_MAX: [u64; 2] = [256 << 20, 8 << 20];

impl<F: FileSystem> Filesystem for Adapter<F> {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        self.negotiate(config);
        Ok(())
    }

    fn destroy(&mut self) {
        self.0.finish();
    }

    // --- inodes

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.to_owned();
        self.0.look(parent.0, "lookup", move |s| match s.fs.lookup(parent.0, &name) {
            Err(error) if is_not_found(&error) => {
                reply.entry(&s.absent(parent.0, &name), &negative_entry(), Generation(0));
            }
            result => s.send_entry("lookup", (parent.0, &name), result, reply),
        });
    }

    fn forget(&self, _req: &Request, ino: INodeNo, count: u64) {
        self.0.answer("forget", || self.0.fs.forget(ino.0, count));
    }

    fn getattr(&self, req: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        let (handle, by) = (fh.map(|fh| HandleId(fh.0)), (ino.0, req.uid()));
        self.0.look_shown(by, "getattr", move |s| s.send_attr("getattr", s.fs.getattr(ino.0, handle), reply));
    }

    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mode = mode.map(|m| m & 0o7777);
        let (handle, caller) = (fh.map(|fh| HandleId(fh.0)), Caller::of(req));
        let by = Some(req.uid());
        let set = SetAttr { mode, uid, gid, size, atime: set_time(atime), mtime: set_time(mtime), by };
        // Callers cannot set ctime: it comes with the times that the kernel kept while it gathered writes.
        let from_cache = ctime.is_some();
        let job = move |s: &Arc<Shared<F>>| match s.setattr(ino.0, handle, set, caller) {
            // The inode is gone, so the times do not matter; but an error here would be reported by the next sync.
            Err(VaultError::Stale) if from_cache => reply.attr(&Duration::ZERO, &removed_attr(ino)),
            result => s.send_attr("setattr", result, reply),
        };
        if size.is_none() {
            return self.0.change_shown(ino.0, "setattr", job);
        }
        self.0.claimed(ino.0, "setattr", move |shared, claim| {
            shared.resize(ino.0, "setattr", move |s| {
                job(s);
                drop(claim);
            });
        });
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        self.0.look(ino.0, "readlink", move |s| match s.fs.readlink(ino.0) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(failed("readlink", &error)),
        });
    }

    // --- tree

    fn mknod(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, rdev: u32, reply: ReplyEntry) {
        let (name, owner, by) = (name.to_owned(), self.0.owner(req, umask), Caller::of(req));
        let Some(kind) = node_kind(mode) else { return reply.error(Errno::EPERM) };
        self.0.change_names(parent.0, "mknod", move |s| {
            let made = s.mknod((parent.0, &name), kind, mode & 0o7777, rdev.into(), (owner, by));
            s.send_entry("mknod", (parent.0, &name), s.synced_entry(parent.0, made), reply);
        });
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let (name, owner) = (name.to_owned(), self.0.owner(req, umask));
        self.0.change_names(parent.0, "mkdir", move |s| {
            let made = s.fs.mkdir(parent.0, &name, mode & 0o7777, owner);
            s.send_entry("mkdir", (parent.0, &name), s.synced_entry(parent.0, made), reply);
        });
    }

    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (name, caller) = (name.to_owned(), Caller::of(req));
        self.0.change_names(parent.0, "unlink", move |s| {
            let allowed = s.check_sticky(parent.0, &name, caller);
            let done = allowed.and_then(|()| s.fs.unlink(parent.0, &name));
            send_empty("unlink", s.synced(&[parent.0], done, |()| {}), reply);
        });
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (name, caller) = (name.to_owned(), Caller::of(req));
        self.0.change_names(parent.0, "rmdir", move |s| {
            let allowed = s.check_sticky(parent.0, &name, caller);
            let done = allowed.and_then(|()| s.fs.rmdir(parent.0, &name));
            send_empty("rmdir", s.synced(&[parent.0], done, |()| {}), reply);
        });
    }

    fn symlink(&self, req: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let (name, target, owner) = (name.to_owned(), target.as_os_str().as_bytes().to_vec(), self.0.owner(req, 0));
        self.0.change_names(parent.0, "symlink", move |s| {
            let made = s.fs.symlink(parent.0, &name, &target, owner);
            s.send_entry("symlink", (parent.0, &name), s.synced_entry(parent.0, made), reply);
        });
    }

    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let Some(mode) = rename_mode(flags) else { return reply.error(Errno::EINVAL) };
        let (name, newname, caller) = (name.to_owned(), newname.to_owned(), Caller::of(req));
        if !self.0.is_one(parent.0, newparent.0) {
            return reply.error(Errno::EXDEV);
        }
        self.0.change_names(parent.0, "rename", move |s| {
            let allowed = s.check_sticky(parent.0, &name, caller);
            let allowed = allowed.and_then(|()| s.check_sticky(newparent.0, &newname, caller));
            let done = allowed.and_then(|()| s.fs.rename(parent.0, &name, newparent.0, &newname, mode));
            s.moved([(parent.0, &name), (newparent.0, &newname)]);
            send_empty("rename", s.synced(&[newparent.0, parent.0], done, |()| {}), reply);
        });
    }

    fn link(&self, _req: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let name = newname.to_owned();
        self.0.change_names(ino.0, "link", move |s| {
            let made = s.fs.link(ino.0, newparent.0, &name);
            s.send_entry("link", (newparent.0, &name), s.synced_entry(newparent.0, made), reply);
        });
    }

    // --- files

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let (name, owner, flags, by) = (name.to_owned(), self.0.owner(req, umask), OpenFlags(flags), Caller::of(req));
        self.0.change_names(parent.0, "create", move |s| {
            match s.create(parent.0, &name, mode & 0o7777, flags, owner, by) {
                // A fill that began before this handle was counted may be of a former file of that number.
                Ok((entry, handle)) => s.after_fill(entry.attr.ino, "create", move |s| {
                    let attr = file_attr(&entry.attr);
                    let how = s.open_reply_flags(handle, flags);
                    // There is one TTL for name and attributes: the smaller of the two.
                    let ttl = s.ttl(entry.attr.ino).min(s.name_ttl(parent.0, &name));
                    reply.created(&ttl, &attr, Generation(entry.generation), FileHandle(handle.0), how);
                }),
                Err(error) => reply.error(failed("create", &error)),
            }
        });
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let caller = Caller::of(req);
        let job = move |s: &Shared<F>| match s.open(ino.0, flags, caller) {
            Ok(handle) => reply.opened(FileHandle(handle.0), s.open_reply_flags(handle, flags)),
            Err(error) => reply.error(failed("open", &error)),
        };
        let access = self.0.access(flags);
        if access.write || access.truncate {
            // Opening for writing may already repair the file.
            self.0.claimed(ino.0, "open", move |shared, claim| {
                shared.change(ino.0, "open", move |s| {
                    job(s);
                    drop(claim);
                });
            });
        } else {
            self.0.look(ino.0, "open", move |s| job(s));
        }
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if size > READ_LEN_MAX {
            return reply.error(Errno::EINVAL);
        }
        let at = offset..offset.saturating_add(size.into());
        // A map of a file that was opened for direct I/O still reads through the page cache. Such reads have no lock
        // owner.
        let is_direct = self.0.is_direct(HandleId(fh.0), flags);
        let direct = is_direct && lock_owner.is_some();
        match is_direct {
            false if self.0.keeps(ino.0) => self.0.tuning.cached_read(ino.0, &at, || self.0.is_written(ino.0)),
            true if !direct => self.0.note_cached(ino.0),
            false | true => {}
        }
        // Only reads of the page cache have no lock owner.
        let pages = if lock_owner.is_none() { convert::pages_around(&at) } else { 0..0 };
        let job = move |s: &Arc<Shared<F>>| _ = s.answer("read", || s.read(ino.0, HandleId(fh.0), at, direct, reply));
        match direct {
            true => self.0.in_turn(About::Content(ino.0), Need::LOOK, job),
            false => self.0.read_pages(ino.0, &pages, job),
        }
    }

    fn write(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let request = WriteRequest {
            ino: ino.0,
            handle: HandleId(fh.0),
            offset,
            flags: write_flags,
            open_flags: flags,
            caller: Caller::of(req),
        };
        let counted = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE).then(|| CacheWrite::new(&self.0));
        if counted.is_some() {
            self.0.tuning.write_back(data.len());
        }
        let need = if counted.is_some() { Need::WRITE_PAGES } else { Need::CHANGE };
        if self.0.fs.waits_for_keys(ino.0) {
            return self.0.write_aside(need, request, data.to_vec(), counted, reply);
        }
        let turn = self.0.fs.join_turns(ino.0).and_then(|turns| turns.enter(need));
        // Most writes are carried out at once, without a copy of their data.
        if self.0.fs.hosts_take_turns() == turn.is_some()
            && let Some(_pass) = self.0.gate.enter()
        {
            self.0.answer("write", || self.0.write(request, data, counted, reply));
            return;
        }
        drop(turn);
        let data = data.to_vec();
        self.0.in_turn(About::Content(ino.0), need, move |shared| {
            let write = move |s: &Arc<Shared<F>>| s.write(request, &data, counted, reply);
            if let Some(_pass) = shared.gate.enter() {
                shared.answer("write", || write(shared));
                return;
            }
            let s = shared.clone();
            shared.gate.defer(ino.0, Box::new(move || _ = s.serve("write", || write(&s))));
        });
    }

    fn flush(&self, _req: &Request, ino: INodeNo, fh: FileHandle, lock_owner: LockOwner, reply: ReplyEmpty) {
        let flush = move |s: &Shared<F>| {
            let done = s.fs.flush(HandleId(fh.0));
            s.close_locks(ino.0, lock_owner, move || send_empty("flush", done, reply));
        };
        // Where hosts take turns, it waits while a turn ends.
        match self.0.fs.waits_for_keys(ino.0) || self.0.fs.hosts_take_turns() {
            true => self.0.sync(ino.0, "flush", flush),
            false => self.0.in_order(ino.0, "flush", flush),
        }
    }

    fn release(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let shared = self.0.clone();
        self.0.in_order(ino.0, "release", move |s| {
            shared.drop_use(ino.0, s.access(flags).write);
            s.without_capability.lock().remove(&ino.0);
            s.forget_flags(HandleId(fh.0));
            s.release_locks(HandleId(fh.0));
            send_empty("release", s.release(HandleId(fh.0)), reply);
        });
    }

    fn fsync(&self, _req: &Request, ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        self.0.sync(ino.0, "fsync", move |s| send_empty("fsync", s.fsync(HandleId(fh.0), datasync), reply));
    }

    fn fallocate(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let Some(mode) = convert::fallocate(mode) else { return reply.error(Errno::EOPNOTSUPP) };
        let (handle, caller) = (HandleId(fh.0), Caller::of(req));
        self.0.change_content((ino.0, handle), "fallocate", move |s| {
            let privileges = if caller.is_root() { Ok(()) } else { s.drop_privileges(ino.0, Some(handle), caller) };
            send_empty("fallocate", privileges.and_then(|()| s.fallocate(handle, mode, offset, length)), reply);
        });
    }

    fn lseek(&self, _req: &Request, ino: INodeNo, fh: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let whence = match whence {
            libc::SEEK_DATA => Whence::Data,
            libc::SEEK_HOLE => Whence::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        match u64::try_from(offset) {
            Ok(offset) => self.0.seek(ino.0, HandleId(fh.0), offset, whence, reply),
            Err(_) => reply.error(Errno::ENXIO),
        }
    }

    fn copy_file_range(
        &self,
        req: &Request,
        _ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let (from, to) = ((HandleId(fh_in.0), offset_in), (HandleId(fh_out.0), offset_out));
        let most = COPY_LEN_MAX[usize::from(self.0.fs.hosts_take_turns())];
        let (caller, len) = (Caller::of(req), len.min(most));
        self.0.change_content((ino_out.0, to.0), "copy_file_range", move |s| {
            let privileges = if caller.is_root() { Ok(()) } else { s.drop_privileges(ino_out.0, Some(to.0), caller) };
            match privileges.and_then(|()| s.copy_range(from, to, len)) {
                Ok(Some(n)) => reply.written(u32::try_from(n).unwrap_or(u32::MAX)),
                // The kernel then copies through the page cache, this once. (After `ENOSYS` it would always do so.)
                Ok(None) => reply.error(Errno::EOPNOTSUPP),
                Err(error) => reply.error(failed("copy_file_range", &error)),
            }
        });
    }

    fn getlk(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        flock: bool,
        reply: ReplyLock,
    ) {
        let request = LockRequest { ino, handle: HandleId(fh.0), owner: lock_owner, start, end, typ, pid, flock };
        self.0.test_lock(request, reply);
    }

    fn setlk(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        sleep: bool,
        flock: bool,
        reply: ReplyEmpty,
    ) {
        let request = LockRequest { ino, handle: HandleId(fh.0), owner: lock_owner, start, end, typ, pid, flock };
        self.0.set_lock(request, sleep, req.unique(), reply);
    }

    fn interrupt(&self, unique: RequestId) -> Result<(), Errno> {
        self.0.interrupt(unique)
    }

    // --- directories

    fn opendir(&self, req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let how = match self.0.cache {
            _ if self.0.fs.hosts_take_turns() => FopenFlags::empty(),
            CacheMode::None => FopenFlags::empty(),
            CacheMode::WriteBack | CacheMode::Through => FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE,
        };
        let caller = Caller::of(req);
        self.0.look_into((ino.0, req.uid()), "opendir", move |s| match s.open_dir(ino.0, caller) {
            Ok(handle) => reply.opened(FileHandle(handle.0), how),
            Err(error) => reply.error(failed("opendir", &error)),
        });
    }

    fn readdir(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        self.0.look(fh.0, "readdir", move |s| {
            let mut is_empty = true;
            let listed = s.read_dir(HandleId(fh.0), offset, &mut |entry, next| {
                let full = reply.add(INodeNo(entry.ino), next, file_type(entry.kind), &entry.name);
                is_empty &= full;
                !full
            });
            match listed {
                Err(error) if is_empty => reply.error(failed("readdir", &error)),
                // Entries listed before the error are sent; the next request gets the error.
                Ok(()) | Err(_) => reply.ok(),
            }
        });
    }

    fn readdirplus(&self, _req: &Request, ino: INodeNo, fh: FileHandle, offset: u64, reply: ReplyDirectoryPlus) {
        self.0.look(fh.0, "readdirplus", move |s| {
            Self::send_listing_with_attributes(s, ino.0, HandleId(fh.0), offset, reply);
        });
    }

    fn releasedir(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        self.0.answer("releasedir", || {
            self.0.thaw_with(HandleId(fh.0));
            send_empty("releasedir", self.0.release_dir(HandleId(fh.0)), reply);
        });
    }

    fn fsyncdir(&self, _req: &Request, ino: INodeNo, fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        self.0.sync(ino.0, "fsyncdir", move |s| send_empty("fsyncdir", s.fs.fsync_dir(HandleId(fh.0)), reply));
    }

    // --- attributes and statistics

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        self.0.look(ROOT, "statfs", move |s| match s.fs.statfs() {
            Ok(s) => {
                let block = u32::try_from(s.block_size).unwrap_or(4096);
                reply.statfs(
                    s.blocks,
                    s.blocks_free,
                    s.blocks_available,
                    s.files,
                    s.files_free,
                    block,
                    s.name_max,
                    block,
                );
            }
            Err(error) => reply.error(failed("statfs", &error)),
        });
    }

    fn setxattr(
        &self,
        req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        if let Err(errno) = self.0.refuse_acl(name) {
            return reply.error(errno);
        }
        let mode = match flags {
            0 => SetXattr::Any,
            libc::XATTR_CREATE => SetXattr::Create,
            libc::XATTR_REPLACE => SetXattr::Replace,
            _ => return reply.error(Errno::EINVAL),
        };
        let (name, value, caller) = (name.to_owned(), value.to_vec(), Caller::of(req));
        self.0.change_shown(ino.0, "setxattr", move |s| {
            send_empty("setxattr", s.set_xattr(ino.0, &name, &value, mode, caller), reply);
        });
    }

    fn getxattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        if let Err(errno) = self.0.refuse_acl(name) {
            return reply.error(errno);
        }
        let name = name.to_owned();
        self.0.look(ino.0, "getxattr", move |s| send_xattr("getxattr", s.fs.get_xattr(ino.0, &name), size, reply));
    }

    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let uid = req.uid();
        self.0.look(ino.0, "listxattr", move |s| {
            let names = s.fs.list_xattr(ino.0).map(|names| {
                let mut list = Vec::new();
                for name in names.into_iter().filter(|name| is_listed_for(uid, name)) {
                    list.extend_from_slice(&name);
                    list.push(0);
                }
                list
            });
            send_xattr("listxattr", names, size, reply);
        });
    }

    fn removexattr(&self, req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        if let Err(errno) = self.0.refuse_acl(name) {
            return reply.error(errno);
        }
        let (name, caller) = (name.to_owned(), Caller::of(req));
        self.0.change_shown(ino.0, "removexattr", move |s| {
            send_empty("removexattr", s.remove_xattr(ino.0, &name, caller), reply);
        });
    }

    fn access(&self, _req: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        // The kernel checks by itself (default_permissions) and need not ask again.
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        flags: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        out_size: u32,
        reply: ReplyIoctl,
    ) {
        if !flags.contains(IoctlFlags::FUSE_IOCTL_DIR) {
            return reply.error(Errno::ENOTTY);
        }
        let caller = self.0.caller(req);
        let request = IoctlRequest { handle: HandleId(fh.0), command: cmd, input: in_data, out_size };
        self.0.answer("ioctl", || self.0.ioctl(ino.0, caller, request, reply));
    }
}
