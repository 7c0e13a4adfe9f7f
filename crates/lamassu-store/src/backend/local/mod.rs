//! A backing store that is a directory of this host's file system.
//!
//! Every operation is relative to an open directory and names one component in it. Nothing follows a symbolic link,
//! neither in the last component nor before it, so whoever swaps entries of the store for links cannot make Lamassu
//! read or write outside of it. The path given to [`LocalBackend::open`] alone is followed: it is the user's.
//!
//! Modes given to `make_dir` pass through the process's umask, as everywhere; a daemon that serves other processes' modes sets its
//! umask to 0 first.
//!
//! Extended attributes, links and `chmod` on kernels before 6.6 need `/proc`.

mod copy;
mod dir;
mod entry;
mod file;
mod mode;
mod remote;
mod xattr;

pub use copy::{Copied, CopyError, Privileges, Watch};

use super::{Backend, BackendDir, Kind, SetTime, Stat, StatFs, Time};
use dir::LocalDir;
use lamassu_format::name::STAGING;
use remote::Remote;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, SeekFrom, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno;
use std::any::Any;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A directory of the local file system as a backing store.
pub struct LocalBackend {
    root: Arc<OwnedFd>,
    /// Of stores whose syncfs(2) is no barrier.
    remote: Option<Arc<Remote>>,
    quiet: bool,
    /// It is a directory of another store, which its owner, who we are, may have shut.
    inner: bool,
}

impl LocalBackend {
    /// Opens the directory `path` (following links in it, as it is the user's own word). `ENOENT`, `ENOTDIR`,
    /// `EACCES` as open(2).
    pub fn open(path: impl AsRef<Path>) -> io::Result<LocalBackend> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = retry(|| rustix::fs::open(path.as_ref(), flags, Mode::empty()))?;
        LocalBackend::over(root, false, false)
    }

    fn over(root: OwnedFd, quiet: bool, inner: bool) -> io::Result<LocalBackend> {
        let remote = Remote::new(rustix::fs::fstatfs(&root)?.f_type as u64);
        Ok(LocalBackend { root: Arc::new(root), remote, quiet, inner })
    }

    /// Reading files and directories leaves their access times alone, as far as the system lets us (`O_NOATIME`: one's own, or as root).
    #[must_use]
    pub fn without_access_times(self) -> LocalBackend {
        LocalBackend { quiet: true, ..self }
    }
}

impl Backend for LocalBackend {
    fn root(&self) -> Arc<dyn BackendDir> {
        Arc::new(LocalDir::root(self.root.clone(), self.remote.clone(), self.quiet))
    }

    fn stat_fs(&self) -> io::Result<StatFs> {
        let s = rustix::fs::fstatfs(&*self.root)?;
        // Old kernels leave f_frsize at zero.
        let unit = if s.f_frsize > 0 { s.f_frsize } else { s.f_bsize };
        Ok(StatFs {
            block_size: unit as u64,
            blocks: s.f_blocks as u64,
            blocks_free: s.f_bfree as u64,
            blocks_available: s.f_bavail as u64,
            files: s.f_files as u64,
            files_free: s.f_ffree as u64,
            name_max: u32::try_from(s.f_namelen).unwrap_or(255),
            fs_type: s.f_type as u64,
        })
    }

    fn sync(&self) -> io::Result<()> {
        if let Some(remote) = &self.remote {
            remote.sync()?;
        }
        Ok(retry(|| rustix::fs::syncfs(&*self.root))?)
    }

    fn try_lock(&self, name: &OsStr) -> io::Result<Box<dyn Any + Send + Sync>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let name = super::check_name(name)?;
        let open = || retry(|| rustix::fs::openat(&*self.root, name, flags, Mode::RUSR | Mode::WUSR));
        let file = match open() {
            Err(Errno::ACCESS) if self.inner => mode::lend_dir(self.root.as_fd(), open)?,
            other => other?,
        };
        let file = Lock::take(file)?;
        let root = self.root.as_fd();
        let staging = match make_staging(root) {
            Err(Errno::ACCESS) if self.inner => mode::lend_dir(root, || make_staging(root))?,
            other => other?,
        };
        // Dropped in this order: whoever gets the file's lock finds the directory's free.
        Ok(Box::new((lock_where_possible(staging)?, file)))
    }
}

/// Takes an exclusive lock on the staging directory in a vault's, beside that on the lock file, which people delete. It is its owner's alone, so that nobody else
/// can hold writers up with it, as they could with the vault's directory. `None` where it is missing, which it is while nobody writes only, or where the
/// store locks no directories.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`]: somebody else holds it. Those of the store.
pub fn lock_staging(dir: impl AsFd) -> io::Result<Option<Lock>> {
    match open_staging(dir.as_fd()) {
        Err(Errno::NOENT) => Ok(None),
        opened => lock_where_possible(opened?),
    }
}

/// The staging directory, made where it is missing: copies that leave out empty directories lose it, and a writer without it would hold half a lock.
fn make_staging(dir: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    match open_staging(dir) {
        Err(Errno::NOENT) => {}
        opened => return opened,
    }
    match rustix::fs::mkdirat(dir, STAGING, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => open_staging(dir),
        Err(error) => Err(error),
    }
}

fn open_staging(dir: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    retry(|| rustix::fs::openat(dir, STAGING, flags, Mode::empty()))
}

fn lock_where_possible(dir: OwnedFd) -> io::Result<Option<Lock>> {
    match Lock::take(dir) {
        Ok(lock) => Ok(Some(lock)),
        // These say nothing of what the store can do.
        Err(error @ (Errno::WOULDBLOCK | Errno::NOMEM | Errno::IO | Errno::STALE)) => Err(error.into()),
        // NFS locks for writing only what is open for writing, which no directory is; others know no locks at all.
        Err(_) => Ok(None),
    }
}

/// A held flock(2). Given back by word and not by closing alone: a child process between fork and exec has the descriptor too.
#[must_use = "dropped, it is given back"]
pub struct Lock(OwnedFd);

impl Lock {
    fn take(fd: OwnedFd) -> rustix::io::Result<Lock> {
        retry(|| rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive))?;
        Ok(Lock(fd))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Nothing can be done about an error; closing follows.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Repeats a call that a signal interrupted.
fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// Where the next stretch of data from `at` on begins and ends (SEEK_DATA, SEEK_HOLE) in a file of `len` bytes; `len` twice where only a hole follows. A store
/// that knows no holes has one stretch, up to `len`. Moves the descriptor's own position.
///
/// # Errors
/// Those of lseek(2).
pub fn next_data(file: impl AsFd, at: u64, len: u64) -> io::Result<(u64, u64)> {
    let start = match retry(|| rustix::fs::seek(&file, SeekFrom::Data(at))) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok((len, len)),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((at.min(len), len)),
        Err(e) => return Err(e.into()),
    };
    let end = match retry(|| rustix::fs::seek(&file, SeekFrom::Hole(start))) {
        Ok(end) => end,
        // It has shrunk since: reading it says so.
        Err(Errno::NXIO) => len,
        Err(e) => return Err(e.into()),
    };
    Ok((start.min(len), end.min(len)))
}

fn kind_of(file_type: FileType) -> Option<Kind> {
    match file_type {
        FileType::RegularFile => Some(Kind::File),
        FileType::Directory => Some(Kind::Dir),
        FileType::Symlink => Some(Kind::Symlink),
        FileType::Fifo => Some(Kind::Fifo),
        FileType::Socket => Some(Kind::Socket),
        FileType::CharacterDevice => Some(Kind::CharDevice),
        FileType::BlockDevice => Some(Kind::BlockDevice),
        _ => None,
    }
}

/// Converts, and refuses a kind of entry that Linux does not have (`EIO`: the store is broken).
#[allow(clippy::unnecessary_cast, reason = "the width of st_nlink depends on the architecture")]
fn stat_of(s: &rustix::fs::Stat) -> io::Result<Stat> {
    let kind = kind_of(FileType::from_raw_mode(s.st_mode)).ok_or(Errno::IO)?;
    let time = |seconds, nanos| Time { seconds, nanos };
    Ok(Stat {
        dev: s.st_dev,
        ino: s.st_ino,
        kind,
        mode: s.st_mode & 0o7777,
        nlink: s.st_nlink as u64,
        uid: s.st_uid,
        gid: s.st_gid,
        rdev: s.st_rdev,
        len: s.st_size.max(0) as u64,
        blocks: s.st_blocks.max(0) as u64,
        atime: time(s.st_atime, s.st_atime_nsec as u32),
        mtime: time(s.st_mtime, s.st_mtime_nsec as u32),
        ctime: time(s.st_ctime, s.st_ctime_nsec as u32),
    })
}

fn timestamps(atime: SetTime, mtime: SetTime) -> io::Result<Timestamps> {
    let convert = |t| match t {
        SetTime::Keep => Ok(Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }),
        SetTime::Now => Ok(Timespec { tv_sec: 0, tv_nsec: UTIME_NOW }),
        // UTIME_NOW and UTIME_OMIT lie above 1e9, so an unchecked value could turn into either.
        SetTime::At(Time { nanos, .. }) if nanos >= 1_000_000_000 => Err(Errno::INVAL),
        SetTime::At(Time { seconds, nanos }) => Ok(Timespec { tv_sec: seconds, tv_nsec: nanos.into() }),
    };
    Ok(Timestamps { last_access: convert(atime)?, last_modification: convert(mtime)? })
}

fn owner(uid: Option<u32>, gid: Option<u32>) -> (Option<rustix::fs::Uid>, Option<rustix::fs::Gid>) {
    (uid.map(rustix::fs::Uid::from_raw), gid.map(rustix::fs::Gid::from_raw))
}
