//! The operations of [`PlainFs`], each one system call or two.

use super::node::{Node, attr, kind_of};
use super::{PlainFs, io};
use lamassu_vault::{
    Access, Attr, DirEntry, Entry, Fallocate, FileSystem, HandleId, Ino, Kind, Owner, RenameMode, Result, SetAttr,
    SetTime, SetXattr, Sought, StatFs, VaultError, Whence,
};
use parking_lot::Mutex;
use rustix::fs::{
    AtFlags, CWD, Dir, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, SeekFrom, Timespec, Timestamps, Uid,
    XattrFlags,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

/// Largest extended attribute and list of names on Linux, bytes.
const XATTR_MAX: usize = 64 * 1024;

/// An open directory; its entries are read when a listing starts.
pub(super) struct Listing {
    ino: Ino,
    node: Arc<Node>,
    entries: Mutex<Option<Vec<DirEntry>>>,
}

impl Listing {
    pub(super) fn new(ino: Ino, node: Arc<Node>) -> Listing {
        Listing { ino, node, entries: Mutex::new(None) }
    }

    fn read(&self) -> Result<Vec<DirEntry>> {
        let dot = |name: &str| DirEntry { ino: self.ino, kind: Kind::Dir, name: name.into() };
        let mut entries = vec![dot("."), dot("..")];
        each_entry(&self.node, &mut |ino, kind, name| entries.push(DirEntry { ino, kind, name: name.to_owned() }))?;
        Ok(entries)
    }
}

/// Calls `each` for the entries of a directory except `.` and `..`, as they are read.
fn each_entry(dir: &Node, each: &mut dyn FnMut(Ino, Kind, &OsStr)) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(dir.fd(), ".", flags, Mode::empty()).map_err(|e| io("opendir", e))?;
    for entry in Dir::new(fd).map_err(|e| io("readdir", e))? {
        let entry = entry.map_err(|e| io("readdir", e))?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            each(entry.ino(), kind_of(entry.file_type()), OsStr::from_bytes(name));
        }
    }
    Ok(())
}

fn mode_of(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & 0o7777)
}

fn timespec(time: Option<SetTime>) -> Timespec {
    let special = |nsec: i64| Timespec { tv_sec: 0, tv_nsec: nsec };
    match time {
        None | Some(SetTime::Keep) => special(libc::UTIME_OMIT),
        Some(SetTime::Now) => special(libc::UTIME_NOW),
        Some(SetTime::At(t)) => Timespec { tv_sec: t.seconds, tv_nsec: t.nanos.into() },
    }
}

/// Runs an xattr call with a buffer that is large enough for any answer.
fn with_xattr_buffer(call: impl FnOnce(&mut Vec<u8>) -> rustix::io::Result<usize>) -> Result<Vec<u8>> {
    let mut buffer = vec![0; XATTR_MAX];
    let len = call(&mut buffer).map_err(|e| match e {
        Errno::NODATA => VaultError::NoAttribute,
        e => io("xattr", e),
    })?;
    buffer.truncate(len);
    Ok(buffer)
}

impl PlainFs {
    /// Calls `each` for the entries of a directory except `.` and `..`, in no order, as they are read: a listing keeps
    /// all of them, since it can go back, and this keeps none.
    ///
    /// # Errors
    /// [`VaultError::Stale`]; those of the directory.
    pub fn each_name(&self, dir: Ino, each: &mut dyn FnMut(&OsStr, Kind)) -> Result<()> {
        each_entry(&*self.nodes.get(dir)?, &mut |_, kind, name| each(name, kind))
    }

    /// Whether the file system of an inode has free blocks: another one may be mounted below the root.
    ///
    /// # Errors
    /// [`VaultError::Stale`]; those of fstatvfs(3).
    pub fn has_space(&self, ino: Ino) -> Result<bool> {
        let node = self.nodes.get(ino)?;
        Ok(rustix::fs::fstatvfs(node.fd()).map_err(|e| io("statfs", e))?.f_bavail > 0)
    }

    /// Goes through a listing from `cookie` on, with the cookie that comes after each entry, until `each` returns
    /// false.
    fn list(&self, handle: HandleId, cookie: u64, each: &mut dyn FnMut(&Node, &DirEntry, u64) -> bool) -> Result<()> {
        let listing = self.dirs.lock().get(&handle.0).cloned().ok_or(VaultError::BadHandle)?;
        let mut entries = listing.entries.lock();
        if cookie == 0 || entries.is_none() {
            *entries = Some(listing.read()?);
        }
        let skip = usize::try_from(cookie).unwrap_or(usize::MAX);
        for (i, entry) in entries.iter().flatten().enumerate().skip(skip) {
            if !each(&listing.node, entry, i as u64 + 1) {
                break;
            }
        }
        Ok(())
    }

    /// xattr calls do not take `O_PATH` descriptors, and symbolic links cannot be named through /proc: they have no
    /// attributes here.
    fn xattr_path(&self, ino: Ino) -> Result<(Arc<Node>, String)> {
        let node = self.nodes.get(ino)?;
        if node.kind == Kind::Symlink {
            return Err(VaultError::Unsupported);
        }
        let path = node.proc_path();
        Ok((node, path))
    }

    /// Makes a regular file. Owner and then mode are set through the descriptor that made it; until then the file is
    /// the daemon's alone.
    fn make_file(
        &self,
        parent: Ino,
        name: &OsStr,
        mode: u32,
        access: Access,
        owner: Owner,
    ) -> Result<(Entry, OwnedFd)> {
        let dir = self.nodes.get(parent)?;
        let flags = open_flags(access) | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let fd = rustix::fs::openat(dir.fd(), name, flags, Mode::RUSR | Mode::WUSR).map_err(|e| match e {
            Errno::EXIST => VaultError::Exists,
            e => io("create", e),
        })?;
        let made = rustix::fs::fstat(&fd).map_err(|e| io("stat", e))?;
        if let Some((uid, gid)) = new_owner(&dir.stat()?, &made, owner) {
            rustix::fs::fchown(&fd, Some(uid), Some(gid)).map_err(|e| io("chown", e))?;
        }
        rustix::fs::fchmod(&fd, mode_of(mode)).map_err(|e| io("chmod", e))?;
        let entry = self.nodes.look_up(parent, name)?;
        let node = self.nodes.get(entry.attr.ino)?.stat()?;
        if (node.st_dev, node.st_ino) != (made.st_dev, made.st_ino) {
            self.nodes.forget(entry.attr.ino, 1);
            return Err(VaultError::Stale);
        }
        Ok((entry, fd))
    }

    /// Gives a new entry its owner and mode where the call that made it returned no descriptor. The entry is found by
    /// its name, and may have been exchanged meanwhile: only its user and its kind are checked. So a mount for other
    /// users is safe only where they cannot write to the directory below.
    fn adopt(&self, parent: Ino, name: &OsStr, kind: Kind, mode: Option<u32>, owner: Owner) -> Result<Entry> {
        let entry = self.nodes.look_up(parent, name)?;
        let node = self.nodes.get(entry.attr.ino)?;
        let made = node.stat()?;
        if node.kind != kind || made.st_uid != rustix::process::geteuid().as_raw() {
            self.nodes.forget(entry.attr.ino, 1);
            return Err(VaultError::Stale);
        }
        if let Some((uid, gid)) = new_owner(&self.nodes.get(parent)?.stat()?, &made, owner) {
            rustix::fs::chownat(node.fd(), "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
                .map_err(|e| io("chown", e))?;
        }
        if let Some(mode) = mode {
            // The store itself sets the set-group-id bit that a directory inherits.
            let kept = made.st_mode & libc::S_ISGID;
            rustix::fs::chmod(node.proc_path(), mode_of(mode | kept)).map_err(|e| io("chmod", e))?;
        }
        Ok(Entry { attr: attr(&node.stat()?, entry.attr.ino), ..entry })
    }
}

/// The owner that a new entry is to get; `None` where it has that already. Below a parent with the set-group-id bit the
/// entry keeps its group.
fn new_owner(parent: &rustix::fs::Stat, made: &rustix::fs::Stat, owner: Owner) -> Option<(Uid, Gid)> {
    let gid = if parent.st_mode & libc::S_ISGID != 0 { made.st_gid } else { owner.gid };
    ((made.st_uid, made.st_gid) != (owner.uid, gid)).then(|| (Uid::from_raw(owner.uid), Gid::from_raw(gid)))
}

impl FileSystem for PlainFs {
    fn freeze(&self) -> Result<()> {
        let root = self.nodes.get(lamassu_vault::ROOT)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(root.fd(), ".", flags, Mode::empty()).map_err(|e| io("open", e))?;
        rustix::fs::syncfs(fd).map_err(|e| io("syncfs", e))
    }

    fn lookup(&self, parent: Ino, name: &OsStr) -> Result<Entry> {
        self.nodes.look_up(parent, name)
    }
    fn forget(&self, ino: Ino, count: u64) {
        self.nodes.forget(ino, count);
    }
    fn getattr(&self, ino: Ino, handle: Option<HandleId>) -> Result<Attr> {
        let stat = match handle {
            Some(handle) => rustix::fs::fstat(self.file(handle)?).map_err(|e| io("stat", e))?,
            None => self.nodes.get(ino)?.stat()?,
        };
        Ok(attr(&stat, ino))
    }
    fn setattr(&self, ino: Ino, handle: Option<HandleId>, set: &SetAttr) -> Result<Attr> {
        let node = self.nodes.get(ino)?;
        if set.uid.is_some() || set.gid.is_some() {
            let (uid, gid) = (set.uid.map(Uid::from_raw), set.gid.map(Gid::from_raw));
            rustix::fs::chownat(node.fd(), "", uid, gid, AtFlags::EMPTY_PATH).map_err(|e| io("chown", e))?;
        }
        if let Some(mode) = set.mode {
            rustix::fs::chmod(node.proc_path(), mode_of(mode)).map_err(|e| io("chmod", e))?;
        }
        if let Some(size) = set.size {
            let fd = match handle {
                Some(handle) => self.file(handle)?,
                None => Arc::new(
                    rustix::fs::open(node.proc_path(), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
                        .map_err(|e| io("open", e))?,
                ),
            };
            rustix::fs::ftruncate(&fd, size).map_err(|e| io("truncate", e))?;
        }
        if set.atime.is_some() || set.mtime.is_some() {
            let times = Timestamps { last_access: timespec(set.atime), last_modification: timespec(set.mtime) };
            rustix::fs::utimensat(node.fd(), "", &times, AtFlags::EMPTY_PATH).map_err(|e| io("utimens", e))?;
        }
        Ok(attr(&node.stat()?, ino))
    }
    fn readlink(&self, ino: Ino) -> Result<Vec<u8>> {
        let node = self.nodes.get(ino)?;
        Ok(rustix::fs::readlinkat(node.fd(), "", Vec::new()).map_err(|e| io("readlink", e))?.into_bytes())
    }

    fn mknod(&self, parent: Ino, name: &OsStr, kind: Kind, mode: u32, rdev: u64, owner: Owner) -> Result<Entry> {
        let file_type = match kind {
            Kind::File => {
                let access = Access { read: true, write: true, truncate: false };
                return self.make_file(parent, name, mode, access, owner).map(|(entry, _)| entry);
            }
            Kind::Fifo => FileType::Fifo,
            Kind::Socket => FileType::Socket,
            Kind::CharDevice => FileType::CharacterDevice,
            Kind::BlockDevice => FileType::BlockDevice,
            Kind::Dir | Kind::Symlink => return Err(VaultError::Invalid),
        };
        let dir = self.nodes.get(parent)?;
        rustix::fs::mknodat(dir.fd(), name, file_type, Mode::RUSR | Mode::WUSR, rdev).map_err(|e| io("mknod", e))?;
        self.adopt(parent, name, kind, Some(mode), owner)
    }
    fn mkdir(&self, parent: Ino, name: &OsStr, mode: u32, owner: Owner) -> Result<Entry> {
        let dir = self.nodes.get(parent)?;
        rustix::fs::mkdirat(dir.fd(), name, Mode::RWXU).map_err(|e| io("mkdir", e))?;
        self.adopt(parent, name, Kind::Dir, Some(mode), owner)
    }
    fn symlink(&self, parent: Ino, name: &OsStr, target: &[u8], owner: Owner) -> Result<Entry> {
        let dir = self.nodes.get(parent)?;
        rustix::fs::symlinkat(OsStr::from_bytes(target), dir.fd(), name).map_err(|e| io("symlink", e))?;
        self.adopt(parent, name, Kind::Symlink, None, owner)
    }
    fn link(&self, ino: Ino, parent: Ino, name: &OsStr) -> Result<Entry> {
        let (node, dir) = (self.nodes.get(ino)?, self.nodes.get(parent)?);
        rustix::fs::linkat(CWD, node.proc_path(), dir.fd(), name, AtFlags::SYMLINK_FOLLOW)
            .map_err(|e| io("link", e))?;
        self.nodes.look_up(parent, name)
    }
    fn unlink(&self, parent: Ino, name: &OsStr) -> Result<()> {
        let dir = self.nodes.get(parent)?;
        rustix::fs::unlinkat(dir.fd(), name, AtFlags::empty()).map_err(|e| io("unlink", e))
    }
    fn rmdir(&self, parent: Ino, name: &OsStr) -> Result<()> {
        let dir = self.nodes.get(parent)?;
        rustix::fs::unlinkat(dir.fd(), name, AtFlags::REMOVEDIR).map_err(|e| io("rmdir", e))
    }
    fn rename(&self, parent: Ino, name: &OsStr, to_parent: Ino, to_name: &OsStr, mode: RenameMode) -> Result<()> {
        let flags = match mode {
            RenameMode::Replace => RenameFlags::empty(),
            RenameMode::NoReplace => RenameFlags::NOREPLACE,
            RenameMode::Exchange => RenameFlags::EXCHANGE,
        };
        let (from, to) = (self.nodes.get(parent)?, self.nodes.get(to_parent)?);
        rustix::fs::renameat_with(from.fd(), name, to.fd(), to_name, flags).map_err(|e| io("rename", e))
    }

    fn create(&self, parent: Ino, name: &OsStr, mode: u32, access: Access, owner: Owner) -> Result<(Entry, HandleId)> {
        let (entry, fd) = self.make_file(parent, name, mode, access, owner)?;
        Ok((entry, self.add_file(fd)))
    }
    fn open_file(&self, ino: Ino, access: Access) -> Result<HandleId> {
        let node = self.nodes.get(ino)?;
        let fd = rustix::fs::open(node.proc_path(), open_flags(access), Mode::empty()).map_err(|e| io("open", e))?;
        Ok(self.add_file(fd))
    }
    fn read(&self, handle: HandleId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        rustix::io::pread(self.file(handle)?, buf, offset).map_err(|e| io("read", e))
    }
    fn write(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<usize> {
        rustix::io::pwrite(self.file(handle)?, data, offset).map_err(|e| io("write", e))
    }
    fn fsync(&self, handle: HandleId, data_only: bool) -> Result<()> {
        let fd = self.file(handle)?;
        if data_only { rustix::fs::fdatasync(fd) } else { rustix::fs::fsync(fd) }.map_err(|e| io("fsync", e))
    }
    fn release(&self, handle: HandleId) -> Result<()> {
        self.files.write().remove(&handle.0).map(drop).ok_or(VaultError::BadHandle)
    }
    fn fallocate(&self, handle: HandleId, mode: Fallocate, offset: u64, len: u64) -> Result<()> {
        let flags = match mode {
            Fallocate::Reserve => FallocateFlags::empty(),
            Fallocate::KeepSize => FallocateFlags::KEEP_SIZE,
            Fallocate::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Fallocate::Zero { keep_size: true } => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
            Fallocate::Zero { keep_size: false } => FallocateFlags::ZERO_RANGE,
        };
        rustix::fs::fallocate(self.file(handle)?, flags, offset, len).map_err(|e| io("fallocate", e))
    }
    fn seek(&self, handle: HandleId, offset: u64, whence: Whence, _: u64) -> Result<Sought> {
        let from = match whence {
            Whence::Data => SeekFrom::Data(offset),
            Whence::Hole => SeekFrom::Hole(offset),
        };
        rustix::fs::seek(self.file(handle)?, from).map(Sought::Found).map_err(|e| io("lseek", e))
    }

    fn open_dir(&self, ino: Ino) -> Result<HandleId> {
        self.add_dir(ino)
    }
    fn read_dir(&self, handle: HandleId, cookie: u64, fill: &mut dyn FnMut(&DirEntry, u64) -> bool) -> Result<()> {
        self.list(handle, cookie, &mut |_, entry, next| fill(entry, next))
    }
    fn read_dir_plus(
        &self,
        handle: HandleId,
        cookie: u64,
        fill: &mut dyn FnMut(&DirEntry, Option<Entry>, u64) -> bool,
    ) -> Result<()> {
        self.list(handle, cookie, &mut |dir, listed, next| {
            if listed.name == "." || listed.name == ".." {
                return fill(listed, None, next);
            }
            // An entry that was removed since the directory was read is left out.
            self.nodes.look_up_in(dir, &listed.name).map_or(true, |entry| fill(listed, Some(entry), next))
        })
    }
    fn release_dir(&self, handle: HandleId) -> Result<()> {
        self.dirs.lock().remove(&handle.0).map(drop).ok_or(VaultError::BadHandle)
    }
    fn fsync_dir(&self, handle: HandleId) -> Result<()> {
        let listing = self.dirs.lock().get(&handle.0).cloned().ok_or(VaultError::BadHandle)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(listing.node.fd(), ".", flags, Mode::empty()).map_err(|e| io("open", e))?;
        rustix::fs::fsync(fd).map_err(|e| io("fsync", e))
    }

    fn get_xattr(&self, ino: Ino, name: &OsStr) -> Result<Vec<u8>> {
        let (_node, path) = self.xattr_path(ino)?;
        with_xattr_buffer(|buffer| rustix::fs::getxattr(path, name, &mut buffer[..]))
    }
    fn set_xattr(&self, ino: Ino, name: &OsStr, value: &[u8], mode: SetXattr) -> Result<()> {
        let flags = match mode {
            SetXattr::Any => XattrFlags::empty(),
            SetXattr::Create => XattrFlags::CREATE,
            SetXattr::Replace => XattrFlags::REPLACE,
        };
        let (_node, path) = self.xattr_path(ino)?;
        rustix::fs::setxattr(path, name, value, flags).map_err(|e| io("setxattr", e))
    }
    fn list_xattr(&self, ino: Ino) -> Result<Vec<Vec<u8>>> {
        let (_node, path) = self.xattr_path(ino)?;
        let names = with_xattr_buffer(|buffer| rustix::fs::listxattr(path, &mut buffer[..]))?;
        Ok(names.split(|b| *b == 0).filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect())
    }
    fn remove_xattr(&self, ino: Ino, name: &OsStr) -> Result<()> {
        let (_node, path) = self.xattr_path(ino)?;
        rustix::fs::removexattr(path, name).map_err(|e| io("removexattr", e))
    }
    fn statfs(&self) -> Result<StatFs> {
        let root = self.nodes.get(lamassu_vault::ROOT)?;
        let s = rustix::fs::fstatvfs(root.fd()).map_err(|e| io("statfs", e))?;
        Ok(StatFs {
            block_size: s.f_frsize,
            blocks: s.f_blocks,
            blocks_free: s.f_bfree,
            blocks_available: s.f_bavail,
            files: s.f_files,
            files_free: s.f_ffree,
            name_max: u32::try_from(s.f_namemax).unwrap_or(255),
            fs_type: 0,
        })
    }
}

fn open_flags(access: Access) -> OFlags {
    let mut flags = match (access.read, access.write) {
        (_, false) => OFlags::RDONLY,
        (false, true) => OFlags::WRONLY,
        (true, true) => OFlags::RDWR,
    };
    flags.set(OFlags::TRUNC, access.truncate);
    flags | OFlags::CLOEXEC
}
