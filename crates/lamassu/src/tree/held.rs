//! Local directories that are written to, and entries in them, only by descriptors.
//!
//! The owner of a directory may rename entries in it at any time, and the copy may run as root. So a path is resolved
//! once, for the directory that the user named. Below it one name at a time is opened, no link is followed, and owner,
//! mode, times and attributes are set by a descriptor. A file is changed by the descriptor that created it. No call
//! returns a descriptor of a new directory, link or node: those are opened after they were made, and an entry that does
//! not match is not changed.

use super::{Dir, Meta, Node, Output};
use crate::fault::{Context, Fault, Result};
use lamassu_host::Error as HostError;
use lamassu_host::created::{is_empty, is_ours};
use lamassu_vault::{Kind, Time, VaultError};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::IntoRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Holds an entry, whatever its permissions.
const HOLD: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

pub(super) fn failed(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> HostError {
    let path = path.to_path_buf();
    move |source| HostError::Local { op, path, source }
}

pub(super) fn meta_of(st: &Stat) -> Meta {
    let kind = match FileType::from_raw_mode(st.st_mode) {
        FileType::Directory => Kind::Dir,
        FileType::Symlink => Kind::Symlink,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::CharacterDevice => Kind::CharDevice,
        FileType::BlockDevice => Kind::BlockDevice,
        _ => Kind::File,
    };
    Meta {
        kind,
        mode: st.st_mode & 0o7777,
        uid: st.st_uid,
        gid: st.st_gid,
        rdev: st.st_rdev,
        size: u64::try_from(st.st_size).unwrap_or(0),
        atime: Time { seconds: st.st_atime, nanos: u32::try_from(st.st_atime_nsec).unwrap_or(0) },
        mtime: Time { seconds: st.st_mtime, nanos: u32::try_from(st.st_mtime_nsec).unwrap_or(0) },
        ino: (st.st_dev, st.st_ino),
        #[allow(clippy::unnecessary_cast, reason = "its width depends on the architecture")]
        links: st.st_nlink as u64,
    }
}

/// A link, a node or a directory, held with `O_PATH`.
struct Held {
    fd: OwnedFd,
    kind: Kind,
}

impl Held {
    /// A path that leads to it without a name: some calls do not take such descriptors.
    fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.fd.as_raw_fd())
    }
}

fn ino_of(fd: BorrowedFd<'_>) -> Result<(u64, u64)> {
    let st = rustix::fs::fstat(fd).map_err(io::Error::from).context("cannot stat")?;
    Ok((st.st_dev, st.st_ino))
}

impl Node for Held {
    fn ino(&self) -> Result<(u64, u64)> {
        ino_of(self.fd.as_fd())
    }

    fn set_owner(&self, uid: u32, gid: u32) -> Result<()> {
        set_owner(self.fd.as_fd(), uid, gid)
    }

    fn set_xattr(&self, name: &OsStr, value: &[u8]) -> Result<()> {
        // Only the link of /proc is followed, not a held link.
        Ok(rustix::fs::setxattr(self.path(), name, value, XattrFlags::empty()).map_err(io::Error::from)?)
    }

    fn set_times(&self, atime: Time, mtime: Time) -> Result<()> {
        let times = timestamps(atime, mtime);
        let set = rustix::fs::utimensat(&self.fd, "", &times, AtFlags::EMPTY_PATH);
        set.map_err(io::Error::from).context("cannot set the times")
    }

    fn set_mode(&self, mode: u32) -> Result<()> {
        if self.kind == Kind::Symlink {
            return Ok(());
        }
        let set = rustix::fs::chmod(self.path(), Mode::from_raw_mode(mode));
        set.map_err(io::Error::from).context("cannot set the mode")
    }
}

fn set_owner(fd: BorrowedFd<'_>, uid: u32, gid: u32) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    let set = rustix::fs::chownat(fd, "", uid, gid, AtFlags::EMPTY_PATH);
    set.map_err(io::Error::from).context("cannot set the owner")
}

fn timestamps(atime: Time, mtime: Time) -> Timestamps {
    let spec = |t: Time| Timespec { tv_sec: t.seconds, tv_nsec: t.nanos.into() };
    Timestamps { last_access: spec(atime), last_modification: spec(mtime) }
}

/// A local directory.
pub struct LocalDir {
    held: Held,
    /// for messages
    path: PathBuf,
}

impl LocalDir {
    /// Opens the directory that the user named, following links.
    pub fn open(path: &Path) -> Result<LocalDir> {
        let named = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(CWD, named, flags, Mode::empty()).map_err(|e| failed("open", path)(e.into()))?;
        Ok(LocalDir { held: Held { fd, kind: Kind::Dir }, path: path.into() })
    }

    fn at(&self, name: &OsStr) -> PathBuf {
        self.path.join(name)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.held.fd.as_fd()
    }

    fn failed(&self, op: &'static str, name: &OsStr) -> impl FnOnce(Errno) -> HostError {
        let path = self.at(name);
        move |e| failed(op, &path)(e.into())
    }

    /// Opens the entry that was just made under this name, and refuses another one that has the name by now.
    fn hold(&self, name: &OsStr, is_it: impl FnOnce(&OwnedFd, &Meta) -> rustix::io::Result<bool>) -> Result<Held> {
        let fd = rustix::fs::openat(self.fd(), name, HOLD, Mode::empty()).map_err(self.failed("open", name))?;
        let seen = rustix::fs::fstat(&fd).and_then(|st| {
            let meta = meta_of(&st);
            let is_it = is_it(&fd, &meta)? && (meta.kind == Kind::Dir || st.st_nlink == 1);
            let dir = if meta.kind == Kind::Dir { fd.as_fd() } else { self.fd() };
            Ok((meta.kind, is_it && is_ours(dir, meta.uid)?))
        });
        match seen.map_err(self.failed("look at", name))? {
            (kind, true) => Ok(Held { fd, kind }),
            (_, false) => Err(Fault::Moved { path: self.at(name) }.into()),
        }
    }
}

impl Node for LocalDir {
    fn ino(&self) -> Result<(u64, u64)> {
        self.held.ino().with_context(|| self.path.display().to_string())
    }

    fn set_owner(&self, uid: u32, gid: u32) -> Result<()> {
        self.held.set_owner(uid, gid)
    }

    fn set_xattr(&self, name: &OsStr, value: &[u8]) -> Result<()> {
        self.held.set_xattr(name, value)
    }

    fn set_times(&self, atime: Time, mtime: Time) -> Result<()> {
        self.held.set_times(atime, mtime)
    }

    fn set_mode(&self, mode: u32) -> Result<()> {
        self.held.set_mode(mode)
    }
}

impl Dir for LocalDir {
    fn name(&self, name: &OsStr) -> String {
        self.at(name).display().to_string()
    }

    fn fault(&self, name: &OsStr, what: VaultError) -> crate::fault::Error {
        Fault::LocalPath { path: self.at(name), source: what }.into()
    }

    fn stat(&self, name: &OsStr) -> Result<Option<Meta>> {
        match rustix::fs::statat(self.fd(), name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(st) => Ok(Some(meta_of(&st))),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(self.failed("stat", name)(e).into()),
        }
    }

    fn open(&self, name: &OsStr) -> Result<Box<dyn Dir>> {
        let flags = HOLD | OFlags::DIRECTORY;
        let fd = rustix::fs::openat(self.fd(), name, flags, Mode::empty()).map_err(self.failed("open", name))?;
        Ok(Box::new(LocalDir { held: Held { fd, kind: Kind::Dir }, path: self.at(name) }))
    }

    fn make_dir(&self, name: &OsStr) -> Result<Box<dyn Dir>> {
        rustix::fs::mkdirat(self.fd(), name, Mode::RWXU).map_err(self.failed("make directory", name))?;
        let held = self.hold(name, |fd, meta| Ok(meta.kind == Kind::Dir && is_empty(fd.as_fd())?))?;
        Ok(Box::new(LocalDir { held, path: self.at(name) }))
    }

    fn create(&self, name: &OsStr) -> Result<Box<dyn Output>> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(self.fd(), name, flags, Mode::RUSR | Mode::WUSR);
        let file = made.map_err(self.failed("create", name))?.into();
        Ok(Box::new(NewFile { file, path: self.at(name) }))
    }

    fn make_symlink(&self, name: &OsStr, target: &OsStr) -> Result<Box<dyn Node>> {
        rustix::fs::symlinkat(target, self.fd(), name).map_err(self.failed("make link", name))?;
        let leads_there = |fd: &OwnedFd| {
            let found = rustix::fs::readlinkat(fd, "", Vec::new())?;
            Ok(found.as_bytes() == target.as_bytes())
        };
        Ok(Box::new(self.hold(name, |fd, meta| Ok(meta.kind == Kind::Symlink && leads_there(fd)?))?))
    }

    fn make_node(&self, name: &OsStr, meta: &Meta) -> Result<Box<dyn Node>> {
        let (kind, rdev) = match meta.kind {
            Kind::Fifo => (FileType::Fifo, 0),
            Kind::Socket => (FileType::Socket, 0),
            Kind::CharDevice => (FileType::CharacterDevice, meta.rdev),
            Kind::BlockDevice => (FileType::BlockDevice, meta.rdev),
            Kind::File | Kind::Dir | Kind::Symlink => return Err(self.fault(name, VaultError::Invalid)),
        };
        let made = rustix::fs::mknodat(self.fd(), name, kind, Mode::RUSR | Mode::WUSR, rdev);
        made.map_err(self.failed("make", name))?;
        Ok(Box::new(self.hold(name, |_, found| Ok((found.kind, found.rdev) == (meta.kind, rdev)))?))
    }

    fn link(&self, from: &dyn Dir, file: &OsStr, ino: (u64, u64), name: &OsStr) -> Result<()> {
        let from = from.descriptor().ok_or(VaultError::Unsupported)?;
        let held = rustix::fs::openat(from, file, HOLD, Mode::empty()).map_err(self.failed("link", name))?;
        let held = Held { fd: held, kind: Kind::File };
        if held.ino()? != ino {
            return Err(Fault::Moved { path: self.at(name) }.into());
        }
        // Only the link of /proc is followed, so the held entry is linked.
        let linked = rustix::fs::linkat(CWD, held.path(), self.fd(), name, AtFlags::SYMLINK_FOLLOW);
        Ok(linked.map_err(self.failed("link", name))?)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd())
    }

    fn remove(&self, name: &OsStr) -> Result<()> {
        Ok(rustix::fs::unlinkat(self.fd(), name, AtFlags::empty()).map_err(self.failed("remove", name))?)
    }

    fn rename(&self, from: &OsStr, to: &OsStr, replaces: bool) -> Result<()> {
        let dir = self.fd();
        if replaces {
            return Ok(rustix::fs::renameat(dir, from, dir, to).map_err(self.failed("replace", to))?);
        }
        let renamed = match rustix::fs::renameat_with(dir, from, dir, to, RenameFlags::NOREPLACE) {
            // NFS and a few others do not support flags. The caller has just checked that the name is free.
            Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::renameat(dir, from, dir, to),
            other => other,
        };
        Ok(renamed.map_err(self.failed("make", to))?)
    }

    /// A link of /proc (/dev/stdout leads to one) stands for a descriptor of a process, not for a file with that name.
    /// If a link cannot be followed, its target is unknown.
    fn leads_to_no_file(&self, link: &OsStr) -> bool {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let led_to = match rustix::fs::openat2(self.fd(), link, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS) {
            Ok(file) => rustix::fs::fstat(file),
            // Linux before 5.6, and sandboxes without the call.
            Err(Errno::NOSYS | Errno::PERM) => rustix::fs::statat(self.fd(), link, AtFlags::empty()),
            Err(error) => Err(error),
        };
        match led_to {
            Ok(stat) => FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile,
            Err(Errno::NOENT | Errno::NOTDIR) => false,
            Err(_) => true,
        }
    }
}

/// A file by the descriptor that created it.
struct NewFile {
    file: File,
    path: PathBuf,
}

impl Node for NewFile {
    fn ino(&self) -> Result<(u64, u64)> {
        ino_of(self.file.as_fd())
    }

    fn set_owner(&self, uid: u32, gid: u32) -> Result<()> {
        set_owner(self.file.as_fd(), uid, gid)
    }

    fn set_xattr(&self, name: &OsStr, value: &[u8]) -> Result<()> {
        Ok(rustix::fs::fsetxattr(&self.file, name, value, XattrFlags::empty()).map_err(io::Error::from)?)
    }

    fn set_times(&self, atime: Time, mtime: Time) -> Result<()> {
        let set = rustix::fs::futimens(&self.file, &timestamps(atime, mtime));
        set.map_err(io::Error::from).context("cannot set the times")
    }

    fn set_mode(&self, mode: u32) -> Result<()> {
        let set = rustix::fs::fchmod(&self.file, Mode::from_raw_mode(mode));
        set.map_err(io::Error::from).context("cannot set the mode")
    }
}

impl Output for NewFile {
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        Ok(self.file.write_all_at(data, offset).map_err(failed("write", &self.path))?)
    }

    fn set_len(&self, len: u64) -> Result<()> {
        Ok(self.file.set_len(len).map_err(failed("set the length of", &self.path))?)
    }

    fn flush(&self, durable: bool) -> Result<()> {
        let synced = if durable { self.file.sync_data() } else { Ok(()) };
        let closed = synced.and_then(|()| close(self.file.try_clone()?));
        Ok(closed.map_err(failed("write", &self.path))?)
    }
}

/// close(2) with its result, which `File` ignores: NFS and FUSE report failed writes there. They do so for each
/// descriptor of a file, so a duplicate is closed to get the result.
fn close(file: File) -> io::Result<()> {
    // SAFETY: the descriptor is open, and since `file` has given it up nothing else closes it.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
