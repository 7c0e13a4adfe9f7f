//! An open directory of the local file system.

use super::entry::LocalEntry;
use super::file::LocalFile;
use super::remote::{Handle, Remote};
use super::xattr::Target;
use super::{LocalBackend, barrier, kind_of, mode, owner, retry, stat_at, stat_fd, stat_of, timestamps};
use crate::backend::{
    Backend, BackendDir, BackendEntry, BackendFile, BackendNode, Kind, Listed, RenameMode, SetTime, Stat, check_name,
};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, RenameFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

/// Bytes asked of getdents(2) at once: about 1500 entries with stored names.
const LIST_BYTES: usize = 64 << 10;

pub(super) struct LocalDir {
    /// Read-only, or `O_PATH` if the directory may be searched but not read.
    fd: Arc<OwnedFd>,
    /// The root, for a barrier if `fd` cannot be synced; not the open file of the store's own barriers.
    beside: Arc<OwnedFd>,
    remote: Option<Arc<Remote>>,
    /// Reading leaves access times alone.
    quiet: bool,
    /// See [`BackendDir::lending`].
    lends: bool,
}

impl LocalDir {
    pub(super) fn root(fd: Arc<OwnedFd>, beside: Arc<OwnedFd>, remote: Option<Arc<Remote>>, quiet: bool) -> LocalDir {
        LocalDir { fd, beside, remote, quiet, lends: false }
    }

    /// Runs a call that looks a name up here.
    fn search<T>(&self, call: impl Fn() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
        match call() {
            Err(Errno::ACCESS) if self.lends => mode::lend_dir(self.fd(), call),
            done => done,
        }
    }

    /// Opens a directory for reading. Only root can leave access times of other users' entries unchanged.
    fn open(&self, name: &OsStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let open = |flags| retry(|| rustix::fs::openat(self.fd(), name, flags, Mode::empty()));
        self.search(|| match open(if self.quiet { flags | OFlags::NOATIME } else { flags }) {
            Err(Errno::PERM) if self.quiet => open(flags),
            done => done,
        })
    }

    /// Whether opening for reading leaves access times alone.
    fn access_times(&self) -> OFlags {
        if self.quiet { OFlags::NOATIME } else { OFlags::empty() }
    }

    /// Opens a regular file, and nothing else; `None` if it is not the entry `seen`.
    fn open_regular(&self, name: &OsStr, seen: Option<&Stat>, write: bool) -> io::Result<Option<LocalFile>> {
        let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
        let held = self.hold_fd(name)?;
        let now = stat_of(&stat_fd(held.as_fd())?)?;
        if seen.is_some_and(|seen| !now.is_same(seen)) {
            return Ok(None);
        }
        let fd = mode::open_regular(held.as_fd(), now.kind, access | self.access_times())?;
        Ok(Some(LocalFile { handle: Handle::new(fd, access, self.remote.clone()) }))
    }

    /// The entry of this name, by an `O_PATH` descriptor: nothing is opened.
    fn hold_fd(&self, name: &OsStr) -> rustix::io::Result<OwnedFd> {
        self.search(|| super::hold(self.fd(), name))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        (*self.fd).as_fd()
    }

    fn target(&self) -> Target<'_> {
        Target::followed(self.fd())
    }
}

/// The other directory of a link or rename; one of another backend is another device.
pub(super) fn local(dir: &dyn BackendDir) -> io::Result<&LocalDir> {
    dir.as_any().downcast_ref().ok_or(Errno::XDEV.into())
}

fn mode_bits(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & 0o7777)
}

impl BackendNode for LocalDir {
    fn stat(&self) -> io::Result<Stat> {
        stat_of(&mode::steady(|| stat_fd(self.fd()))?)
    }

    fn set_times(&self, atime: SetTime, mtime: SetTime) -> io::Result<()> {
        Ok(rustix::fs::utimensat(self.fd(), "", &timestamps(atime, mtime)?, AtFlags::EMPTY_PATH)?)
    }

    fn set_mode(&self, mode: u32) -> io::Result<()> {
        mode::chmod_fd(self.fd(), mode & 0o7777)
    }

    fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        let (uid, gid) = owner(uid, gid);
        Ok(rustix::fs::chownat(self.fd(), "", uid, gid, AtFlags::EMPTY_PATH)?)
    }

    fn get_xattr(&self, attr: &OsStr) -> io::Result<Vec<u8>> {
        self.target().get(attr)
    }

    fn set_xattr(&self, attr: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        self.target().set(attr, value, flags)
    }

    fn list_xattr(&self) -> io::Result<Vec<OsString>> {
        self.target().list()
    }

    fn remove_xattr(&self, attr: &OsStr) -> io::Result<()> {
        self.target().remove(attr)
    }
}

impl BackendDir for LocalDir {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd())
    }

    fn open_dir(&self, name: &OsStr) -> io::Result<Arc<dyn BackendDir>> {
        check_name(name)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = match self.open(name, flags | OFlags::RDONLY) {
            Err(Errno::ACCESS) => {
                let open = || rustix::fs::openat(self.fd(), name, flags | OFlags::PATH, Mode::empty());
                self.search(|| retry(open))?
            }
            other => other?,
        };
        let (beside, remote, quiet) = (self.beside.clone(), self.remote.clone(), self.quiet);
        Ok(Arc::new(LocalDir { fd: Arc::new(fd), beside, remote, quiet, lends: false }))
    }

    fn open_file(&self, name: &OsStr, write: bool) -> io::Result<Arc<dyn BackendFile>> {
        check_name(name)?;
        let file = self.open_regular(name, None, write)?.ok_or(Errno::STALE)?;
        Ok(Arc::new(file))
    }

    fn open_same(&self, name: &OsStr, seen: &Stat, write: bool) -> io::Result<Option<Arc<dyn BackendFile>>> {
        check_name(name)?;
        let file = self.open_regular(name, Some(seen), write)?;
        Ok(file.map(|file| Arc::new(file) as Arc<dyn BackendFile>))
    }

    fn create_file(&self, name: &OsStr) -> io::Result<Arc<dyn BackendFile>> {
        check_name(name)?;
        let mut flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // It belongs to this process alone: it is being made.
        flags.set(OFlags::NOATIME, self.quiet);
        let fd = retry(|| rustix::fs::openat(self.fd(), name, flags, Mode::RUSR | Mode::WUSR))?;
        Ok(Arc::new(LocalFile { handle: Handle::new(fd, OFlags::RDWR, self.remote.clone()) }))
    }

    fn make_dir(&self, name: &OsStr, mode: u32) -> io::Result<()> {
        check_name(name)?;
        Ok(self.search(|| rustix::fs::mkdirat(self.fd(), name, mode_bits(mode)))?)
    }

    fn make_node(&self, name: &OsStr, kind: Kind, rdev: u64) -> io::Result<()> {
        let file_type = match kind {
            Kind::Fifo => FileType::Fifo,
            Kind::Socket => FileType::Socket,
            Kind::CharDevice => FileType::CharacterDevice,
            Kind::BlockDevice => FileType::BlockDevice,
            Kind::File | Kind::Dir | Kind::Symlink => return Err(Errno::INVAL.into()),
        };
        Ok(rustix::fs::mknodat(self.fd(), check_name(name)?, file_type, Mode::RUSR | Mode::WUSR, rdev)?)
    }

    fn make_symlink(&self, name: &OsStr, target: &OsStr) -> io::Result<()> {
        Ok(rustix::fs::symlinkat(target, self.fd(), check_name(name)?)?)
    }

    fn read_link(&self, name: &OsStr) -> io::Result<OsString> {
        let name = check_name(name)?;
        let target = self.search(|| rustix::fs::readlinkat(self.fd(), name, Vec::new()))?;
        Ok(OsString::from_vec(target.into_bytes()))
    }

    fn hold(&self, name: &OsStr) -> io::Result<Arc<dyn BackendEntry>> {
        check_name(name)?;
        Ok(Arc::new(LocalEntry { fd: self.hold_fd(name)?, is_remote: self.remote.is_some() }))
    }

    fn rename(&self, name: &OsStr, to: &dyn BackendDir, to_name: &OsStr, mode: RenameMode) -> io::Result<()> {
        let to = local(to)?.fd();
        let (from, name, to_name) = (self.fd(), check_name(name)?, check_name(to_name)?);
        let flags = match mode {
            RenameMode::Replace => return Ok(rustix::fs::renameat(from, name, to, to_name)?),
            RenameMode::NoReplace => RenameFlags::NOREPLACE,
            RenameMode::Exchange => RenameFlags::EXCHANGE,
        };
        match rustix::fs::renameat_with(from, name, to, to_name, flags) {
            // NFS and a few others do not support flags. A vault has one writer, which holds its own lock over both
            // names here.
            Err(Errno::INVAL | Errno::NOSYS) if mode == RenameMode::NoReplace => {
                match rustix::fs::statat(to, to_name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(_) => Err(Errno::EXIST.into()),
                    Err(Errno::NOENT) => Ok(rustix::fs::renameat(from, name, to, to_name)?),
                    Err(e) => Err(e.into()),
                }
            }
            other => Ok(other?),
        }
    }

    fn unlink(&self, name: &OsStr) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(self.fd(), check_name(name)?, AtFlags::empty())?)
    }

    fn remove_dir(&self, name: &OsStr) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(self.fd(), check_name(name)?, AtFlags::REMOVEDIR)?)
    }

    fn stat_entry(&self, name: &OsStr) -> io::Result<Stat> {
        check_name(name)?;
        let stat = || stat_at(self.fd(), name);
        match mode::steady(stat) {
            Err(Errno::ACCESS) if self.lends => stat_of(&mode::lend_dir(self.fd(), stat)?),
            done => stat_of(&done?),
        }
    }

    fn stat_and_open(&self, name: &OsStr) -> io::Result<(Stat, Option<Arc<dyn BackendFile>>)> {
        check_name(name)?;
        let held = self.hold_fd(name)?;
        let st = stat_of(&mode::steady(|| stat_fd(held.as_fd()))?)?;
        if !st.is_full_file() {
            return Ok((st, None));
        }
        let access = OFlags::RDONLY | self.access_times();
        let opened = mode::open_regular(held.as_fd(), st.kind, access).ok();
        let file = |fd| LocalFile { handle: Handle::new(fd, OFlags::RDONLY, self.remote.clone()) };
        Ok((st, opened.map(|fd| Arc::new(file(fd)) as Arc<dyn BackendFile>)))
    }

    fn read_dir(&self) -> io::Result<Vec<Listed>> {
        // A descriptor of its own: the position of a listing belongs to the open file description.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = self.open(OsStr::new("."), flags)?;
        Ok(list(&fd)?)
    }

    fn sync(&self) -> io::Result<()> {
        match barrier(self.fd(), |fd| rustix::fs::fsync(fd)) {
            // An `O_PATH` descriptor cannot be synced, and this process may not open the directory in another way. So
            // the whole store is synced.
            Err(Errno::BADF) => Ok(barrier(self.beside.as_fd(), |fd| rustix::fs::syncfs(fd))?),
            // Some file systems have no fsync of a directory, because they need none.
            Err(Errno::INVAL) => Ok(()),
            other => Ok(other?),
        }
    }

    fn as_backend(&self, write: bool) -> io::Result<Arc<dyn Backend>> {
        // Opened again: this descriptor may be for searching alone.
        let open = |access| {
            let flags = access | OFlags::DIRECTORY | OFlags::CLOEXEC;
            self.search(|| retry(|| rustix::fs::openat(self.fd(), ".", flags, Mode::empty())))
        };
        let open = || match open(OFlags::RDONLY) {
            Err(Errno::ACCESS) if !write => open(OFlags::PATH),
            other => other,
        };
        Ok(Arc::new(LocalBackend::over(open()?, open()?, self.quiet, true)?))
    }

    fn lending(&self) -> Option<Arc<dyn BackendDir>> {
        let (fd, beside, remote) = (self.fd.clone(), self.beside.clone(), self.remote.clone());
        Some(Arc::new(LocalDir { fd, beside, remote, quiet: self.quiet, lends: true }))
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

/// What a directory holds, from where its descriptor stands.
pub(super) fn list(fd: &OwnedFd) -> rustix::io::Result<Vec<Listed>> {
    let mut buf = Vec::with_capacity(LIST_BYTES);
    let mut listing = RawDir::new(fd, buf.spare_capacity_mut());
    let mut entries = Vec::new();
    while let Some(entry) = listing.next() {
        let entry = match entry {
            Err(Errno::INTR) => continue,
            other => other?,
        };
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            let name = OsStr::from_bytes(name).to_owned();
            entries.push(Listed { name, ino: entry.ino(), kind: kind_of(entry.file_type()) });
        }
    }
    Ok(entries)
}
