//! A backing store that is a directory of this host's file system.
//!
//! Every operation is relative to an open directory and names one component in it. Nothing follows a symbolic link,
//! neither in the last component nor before it, so links put in place of entries of the store cannot make Lamassu read
//! or write outside of it. Links are followed only in the path given to [`LocalBackend::open`], which is the user's.
//!
//! Modes given to `make_dir` pass through the process's umask, as everywhere; a daemon that serves other processes'
//! modes sets its umask to 0 first.
//!
//! Only regular files and directories are ever opened, even if entries are exchanged meanwhile: a file is held with
//! `O_PATH`, looked at, and then opened by that descriptor. A device node in its place is never opened.
//!
//! Files, extended attributes, links and `chmod` on kernels before 6.6 need `/proc`.

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
use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, SeekFrom, Statx, StatxFlags, StatxTimestamp, Timespec, Timestamps,
    UTIME_NOW, UTIME_OMIT,
};
use rustix::io::Errno;
use std::any::Any;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A directory of the local file system as a backing store.
pub struct LocalBackend {
    root: Arc<OwnedFd>,
    /// The root, opened a second time, for directories that cannot be synced. The kernel tells each open file once of a
    /// write that was lost: a barrier through `root` for one directory would take that from [`Backend::sync`].
    beside: Arc<OwnedFd>,
    /// For stores whose syncfs(2) is no barrier.
    remote: Option<Arc<Remote>>,
    quiet: bool,
    /// It is a directory of another store. Its owner, this process's user, may have removed the own search permission.
    inner: bool,
}

impl LocalBackend {
    /// Opens the directory `path` (following links in it, since the user gave it). `ENOENT`, `ENOTDIR`, `EACCES` as
    /// open(2).
    pub fn open(path: impl AsRef<Path>) -> io::Result<LocalBackend> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = retry(|| rustix::fs::open(path.as_ref(), flags, Mode::empty()))?;
        let beside = retry(|| rustix::fs::openat(&root, ".", flags, Mode::empty()))?;
        LocalBackend::over(root, beside, false, false)
    }

    /// `beside`: the same directory, opened a second time.
    fn over(root: OwnedFd, beside: OwnedFd, quiet: bool, inner: bool) -> io::Result<LocalBackend> {
        let remote = Remote::new(rustix::fs::fstatfs(&root)?.f_type as u64);
        Ok(LocalBackend { root: Arc::new(root), beside: Arc::new(beside), remote, quiet, inner })
    }

    /// Makes reads leave access times unchanged, as far as the system permits (`O_NOATIME`: own files, or as root).
    #[must_use]
    pub fn without_access_times(self) -> LocalBackend {
        LocalBackend { quiet: true, ..self }
    }
}

impl Backend for LocalBackend {
    fn root(&self) -> Arc<dyn BackendDir> {
        Arc::new(LocalDir::root(self.root.clone(), self.beside.clone(), self.remote.clone(), self.quiet))
    }

    fn stat_fs(&self) -> io::Result<StatFs> {
        let s = rustix::fs::fstatfs(&*self.root)?;
        Ok(StatFs {
            block_size: unit(&s),
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
        Ok(barrier(self.root.as_fd(), |fd| rustix::fs::syncfs(fd))?)
    }

    fn try_lock(&self, name: &OsStr) -> io::Result<Box<dyn Any + Send + Sync>> {
        let name = super::check_name(name)?;
        let open = || open_or_make(self.root.as_fd(), name);
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
        // Dropped in this order, so that the next holder of the file's lock finds the directory's lock free.
        Ok(Box::new((lock_where_possible(staging)?, file)))
    }
}

/// Takes an exclusive lock on a vault's staging directory, in addition to the one on the lock file, which people
/// delete. The staging directory is its owner's alone, so that other users cannot block writers by a lock, as they
/// could with the vault's directory. `None` if it is missing, which means that there is no writer, or if the store
/// cannot lock directories.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`]: another process holds it. Those of the store.
pub fn lock_staging(dir: impl AsFd) -> io::Result<Option<Lock>> {
    match open_staging(dir.as_fd()) {
        Err(Errno::NOENT) => Ok(None),
        opened => lock_where_possible(opened?),
    }
}

/// The staging directory, made if it is missing: copies without empty directories lose it, and a writer without it
/// would hold only one of the two locks.
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

/// The file of a lock, made if it is missing. Never opens an entry of another kind that has its name.
fn open_or_make(dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    const ATTEMPTS_MAX: usize = 16;
    let made = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for _ in 0..ATTEMPTS_MAX {
        match hold(dir, name) {
            Err(Errno::NOENT) => {}
            held => return mode::open_regular_as_it_is(held?.as_fd(), OFlags::RDWR),
        }
        match retry(|| rustix::fs::openat(dir, name, made, Mode::RUSR | Mode::WUSR)) {
            // It was made meanwhile.
            Err(Errno::EXIST) => {}
            made => return made,
        }
    }
    Err(Errno::AGAIN)
}

/// The entry of this name, by an `O_PATH` descriptor: it is not opened, and no link is followed.
fn hold(dir: impl AsFd, name: impl rustix::path::Arg + Copy) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    retry(|| rustix::fs::openat(&dir, name, flags, Mode::empty()))
}

/// Opens a regular file of a store for reading, by its path below `dir`. Never opens an entry of another kind, even if
/// it is put there at this moment.
///
/// # Errors
/// `EISDIR`, `ELOOP` for a link in the last component, `EINVAL` for other kinds of entries, and those of the store.
pub fn open_regular(dir: impl AsFd, path: &Path) -> io::Result<std::fs::File> {
    Ok(mode::open_regular_as_it_is(hold(dir, path)?.as_fd(), OFlags::RDONLY)?.into())
}

/// The same for an entry of an open directory, without following links. No mode is changed for it.
///
/// # Errors
/// As [`open_regular`]; `EOPNOTSUPP` in a store that is not local.
pub fn open_regular_in(dir: &dyn BackendDir, name: &OsStr) -> io::Result<std::fs::File> {
    open_regular(dir.descriptor().ok_or(Errno::OPNOTSUPP)?, Path::new(name))
}

fn open_staging(dir: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    retry(|| rustix::fs::openat(dir, STAGING, flags, Mode::empty()))
}

fn lock_where_possible(dir: OwnedFd) -> io::Result<Option<Lock>> {
    match Lock::take(dir) {
        Ok(lock) => Ok(Some(lock)),
        // These errors do not mean that the store cannot lock directories.
        Err(error @ (Errno::WOULDBLOCK | Errno::NOMEM | Errno::IO | Errno::STALE)) => Err(error.into()),
        // For an exclusive lock NFS needs a descriptor open for writing, which a directory cannot have. Other stores
        // have no locks at all.
        Err(_) => Ok(None),
    }
}

/// A held flock(2). It is released explicitly, not only by closing: a child process between fork and exec has the
/// descriptor too.
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

/// A barrier, and then a check that the store still works. If XFS shuts down during fsync(2) of a file that grew, fsync
/// may succeed although the log is never written; fstat(2) fails from then on. An anchor on another device must not
/// learn that such a barrier has covered anything.
fn barrier(
    fd: BorrowedFd<'_>,
    mut sync: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    retry(|| sync(fd))?;
    retry(|| rustix::fs::fstat(fd)).map(drop)
}

/// Where the next stretch of data from `at` on begins and ends (SEEK_DATA, SEEK_HOLE) in a file of `len` bytes; `len`
/// twice if only a hole follows. A store without holes has one stretch, up to `len`. A stretch that begins before `len`
/// ends after `at`, so that a caller's loop terminates. Moves the descriptor's own position.
///
/// # Errors
/// Those of lseek(2), and an error if the store's answers go backwards.
pub fn next_data(file: impl AsFd, at: u64, len: u64) -> io::Result<(u64, u64)> {
    let start = match retry(|| rustix::fs::seek(&file, SeekFrom::Data(at))) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok((len, len)),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((at.min(len), len)),
        Err(e) => return Err(e.into()),
    };
    let end = match retry(|| rustix::fs::seek(&file, SeekFrom::Hole(start))) {
        Ok(end) => end,
        // It has shrunk since: the read will report it.
        Err(Errno::NXIO) => len,
        Err(e) => return Err(e.into()),
    };
    forward(at, start)?;
    forward(start.saturating_add(1), end)?;
    Ok((start.min(len), end.min(len)))
}

/// An answer of SEEK_DATA or SEEK_HOLE, which must not lie before `from`: loops over the data of a file rely on it.
fn forward(from: u64, found: u64) -> io::Result<u64> {
    match found < from {
        true => Err(io::Error::other(
            "the store finds data at places that go backwards: it is broken, or this is no regular file",
        )),
        false => Ok(found),
    }
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

/// lstat of an entry, with its birth time if the store has one.
fn stat_at(dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<Statx> {
    rustix::fs::statx(dir, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS | StatxFlags::BTIME)
}

/// fstat, likewise.
fn stat_fd(fd: BorrowedFd<'_>) -> rustix::io::Result<Statx> {
    rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::BTIME)
}

/// Converts, and refuses a kind of entry that Linux does not have (`EIO`: the store is broken).
fn stat_of(s: &Statx) -> io::Result<Stat> {
    const NANOS: u64 = 1_000_000_000;
    let kind = kind_of(FileType::from_raw_mode(s.stx_mode.into())).ok_or(Errno::IO)?;
    let time = |t: StatxTimestamp| Time { seconds: t.tv_sec, nanos: t.tv_nsec };
    let has_birth = StatxFlags::from_bits_retain(s.stx_mask).contains(StatxFlags::BTIME);
    let birth = (s.stx_btime.tv_sec as u64).wrapping_mul(NANOS).wrapping_add(s.stx_btime.tv_nsec.into());
    Ok(Stat {
        dev: rustix::fs::makedev(s.stx_dev_major, s.stx_dev_minor),
        ino: s.stx_ino,
        kind,
        mode: u32::from(s.stx_mode) & 0o7777,
        nlink: s.stx_nlink.into(),
        uid: s.stx_uid,
        gid: s.stx_gid,
        rdev: rustix::fs::makedev(s.stx_rdev_major, s.stx_rdev_minor),
        len: s.stx_size,
        blocks: s.stx_blocks,
        atime: time(s.stx_atime),
        mtime: time(s.stx_mtime),
        ctime: time(s.stx_ctime),
        born: if has_birth { birth } else { 0 },
    })
}

/// Bytes of the units in which a file system counts its space.
fn unit(s: &rustix::fs::StatFs) -> u64 {
    // Old kernels leave f_frsize at zero.
    (if s.f_frsize > 0 { s.f_frsize } else { s.f_bsize }) as u64
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_that_goes_backwards_is_an_error() {
        assert_eq!(forward(10, 10).expect("data right there"), 10);
        assert_eq!(forward(10, 11).expect("a hole before it"), 11);
        assert!(forward(10, 9).is_err());
    }

    /// The kernel tells each open file once of a lost write. Flags of the open file tell two of them apart.
    #[test]
    fn the_barrier_of_a_directory_takes_nothing_from_that_of_the_store() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = LocalBackend::open(dir.path()).expect("opens");
        let opened = |fd: BorrowedFd<'_>| rustix::fs::fcntl_getfl(fd).expect("flags").contains(OFlags::NONBLOCK);
        rustix::fs::fcntl_setfl(&*store.root, OFlags::NONBLOCK).expect("sets a flag");
        assert!(opened(store.root.as_fd()) && !opened(store.beside.as_fd()));
        let [root, beside] = [&store.root, &store.beside].map(|fd| rustix::fs::fstat(fd).expect("stats").st_ino);
        assert_eq!(root, beside, "the same directory");
    }
}
