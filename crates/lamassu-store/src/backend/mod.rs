//! What Lamassu asks of the store below: a tree of directories with stored names, and files of bytes.
//!
//! Every operation names one path component inside an open directory; nothing here follows a symbolic link, so a store
//! that swaps directories for links cannot lead Lamassu out of the vault. Errors are [`std::io::Error`] with the
//! operating system's errno.
//!
//! **Entries are held, not named.** Any user with write permission to a directory of the store can exchange its entries
//! at any moment, so that user chooses what a name leads to after it was looked up. So no owner, mode, time or
//! attribute is ever changed by name. It is changed through the descriptor that made a file, through an open directory,
//! or through an entry that is held ([`BackendDir::hold_same`]) and was compared with what was looked up. Entries that
//! are made without a descriptor (nodes, links, directories) are made in a directory that no other user can write to,
//! and then moved to their place.
//!
//! Moving and removing can only go by name. An exchanged entry is then another one of the same directory, which the
//! user who exchanged it could have moved or removed directly. An entry that was moved to be deleted is compared before
//! it is deleted.

#[cfg(any(test, feature = "testing"))]
pub mod crash;
#[cfg(any(test, feature = "testing"))]
pub mod fault;
mod fence;
mod local;
#[cfg(any(test, feature = "testing"))]
pub mod memory;

#[cfg(any(test, feature = "testing"))]
pub use crash::{CrashBackend, CrashSim};
#[cfg(any(test, feature = "testing"))]
pub use fault::FaultBackend;
pub use fence::{fenced, fenced_again};
pub use local::{
    Copied, CopyError, LocalBackend, Lock, Privileges, Watch, lock_staging, next_data, open_regular, open_regular_in,
};
#[cfg(any(test, feature = "testing"))]
pub use memory::MemoryBackend;

use rustix::fd::BorrowedFd;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

/// Refuses a name that is not one path component, so that neither a caller's mistake nor a hostile name can leave the
/// directory.
pub(crate) fn check_name(name: &OsStr) -> io::Result<&OsStr> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.iter().any(|b| matches!(b, b'/' | 0)) {
        return Err(errno(libc::EINVAL));
    }
    Ok(name)
}

/// The error of an errno.
pub(crate) fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

/// Kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// regular file
    File,
    /// directory
    Dir,
    /// symbolic link
    Symlink,
    /// fifo
    Fifo,
    /// socket
    Socket,
    /// character device
    CharDevice,
    /// block device
    BlockDevice,
}

/// Seconds and nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Time {
    /// s
    pub seconds: i64,
    /// ns, 0..1e9
    pub nanos: u32,
}

impl Time {
    /// The current time.
    pub fn now() -> Time {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Time { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() }
    }
}

/// `stat` of a backing entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// device and inode number of the store
    pub dev: u64,
    /// inode
    pub ino: u64,
    /// kind
    pub kind: Kind,
    /// permission bits (07777)
    pub mode: u32,
    /// links
    pub nlink: u64,
    /// owner
    pub uid: u32,
    /// group
    pub gid: u32,
    /// device number of device nodes
    pub rdev: u64,
    /// bytes
    pub len: u64,
    /// 512-byte units allocated
    pub blocks: u64,
    /// access time
    pub atime: Time,
    /// modification time
    pub mtime: Time,
    /// change time
    pub ctime: Time,
    /// When it was made, in ns since 1970 (modulo 2^64); 0: unknown. It cannot be set, so it distinguishes an inode
    /// from an earlier one of the same number.
    pub born: u64,
}

impl Stat {
    /// Whether it is a regular file that is not empty.
    pub(crate) fn is_full_file(&self) -> bool {
        self.kind == Kind::File && self.len > 0
    }

    /// Whether both are of one inode. The number alone is not enough, since a store may reuse numbers. A birth time
    /// that one of them lacks is ignored.
    pub fn is_same(&self, other: &Stat) -> bool {
        (self.dev, self.ino, self.kind) == (other.dev, other.ino, other.kind) && may_be_one(self.born, other.born)
    }
}

/// Whether two birth times may be those of one inode.
pub fn may_be_one(born: u64, other: u64) -> bool {
    born == other || born == 0 || other == 0
}

/// `statvfs` of the store.
#[derive(Clone, Copy, Debug, Default)]
pub struct StatFs {
    /// fragment size, bytes
    pub block_size: u64,
    /// blocks in all
    pub blocks: u64,
    /// free
    pub blocks_free: u64,
    /// free for users
    pub blocks_available: u64,
    /// inodes
    pub files: u64,
    /// free inodes
    pub files_free: u64,
    /// longest name, bytes
    pub name_max: u32,
    /// f_type of statfs(2), 0 if unknown
    pub fs_type: u64,
}

/// A new value for a timestamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// leave
    Keep,
    /// current time of the store
    Now,
    /// given
    At(Time),
}

/// Flags of a rename.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode {
    /// replace what is there
    Replace,
    /// EEXIST if something is there
    NoReplace,
    /// both must exist
    Exchange,
}

/// An entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// stored name
    pub name: OsString,
    /// inode
    pub ino: u64,
    /// kind, where the store tells it without a stat
    pub kind: Option<Kind>,
}

/// The common operations of open files, open directories and held entries. All methods act on the object that is open
/// or held, whatever its name leads to by now.
pub trait BackendNode: Send + Sync {
    /// stat.
    fn stat(&self) -> io::Result<Stat>;
    /// futimens.
    fn set_times(&self, atime: SetTime, mtime: SetTime) -> io::Result<()>;
    /// chmod; `EOPNOTSUPP` for a symbolic link.
    fn set_mode(&self, mode: u32) -> io::Result<()>;
    /// chown; `None` leaves.
    fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> io::Result<()>;
    /// The value of an extended attribute, by its raw name.
    fn get_xattr(&self, name: &OsStr) -> io::Result<Vec<u8>>;
    /// `flags` as setxattr(2): 0, XATTR_CREATE, XATTR_REPLACE.
    fn set_xattr(&self, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()>;
    /// All raw names.
    fn list_xattr(&self) -> io::Result<Vec<OsString>>;
    /// Removes one.
    fn remove_xattr(&self, name: &OsStr) -> io::Result<()>;
}

/// An open backing file. All methods take `&self`; concurrent calls are allowed.
pub trait BackendFile: BackendNode {
    /// The file itself, if this is one behind the fence of [`fenced`].
    fn unfenced(&self) -> Option<Arc<dyn BackendFile>> {
        None
    }
    /// Reads up to `buf.len()` bytes; short only at the end of the file.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
    /// Writes all of `data`.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// The same for bytes in several buffers: one write to the store.
    fn write_vectored_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        match parts {
            [data] => self.write_at(offset, data),
            _ => self.write_at(offset, &parts.concat()),
        }
    }
    /// Writes `len` bytes at `offset` that lie at `from_offset` of another file of this store or another. A store that
    /// can do so shares their blocks instead. `EIO` if the other file ends before that.
    fn copy_from(&self, from: &dyn BackendFile, from_offset: u64, offset: u64, len: u64) -> io::Result<()> {
        copy_through_memory(self, from, from_offset, offset, len)
    }

    /// Makes this file a copy of another one of this store that shares all its blocks. False: the store cannot, and
    /// nothing was changed.
    fn share_all(&self, _from: &dyn BackendFile) -> io::Result<bool> {
        Ok(false)
    }

    /// For a backend to recognise what it can copy without reading it.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// ftruncate.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// `EFBIG` if no file of the store can be so long. Changes nothing.
    fn check_len(&self, _len: u64) -> io::Result<()> {
        Ok(())
    }
    /// fdatasync: a barrier for every write, punch and length change of this file so far.
    fn sync_data(&self) -> io::Result<()>;
    /// fsync.
    fn sync_all(&self) -> io::Result<()>;
    /// Frees a range; it reads as zeros. Never changes the length. `EOPNOTSUPP` if the store cannot.
    fn punch(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Bytes that the store has free for replacing existing content, as far as it says. A store that overwrites in
    /// place needs none, and answers `u64::MAX`.
    fn room_to_replace(&self) -> io::Result<u64> {
        Ok(u64::MAX)
    }
    /// Reserves space without changing the length.
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()>;
    /// First data at or after `offset`; `None` if there is none. Stores without holes answer `offset` while it lies
    /// before the end.
    fn seek_data(&self, offset: u64) -> io::Result<Option<u64>>;
    /// First hole at or after `offset` (the end counts as one); `None` past the end.
    fn seek_hole(&self, offset: u64) -> io::Result<Option<u64>>;
}

/// [`BackendFile::copy_from`] for stores without a better way.
pub(crate) fn copy_through_memory<F: BackendFile + ?Sized>(
    to: &F,
    from: &dyn BackendFile,
    from_offset: u64,
    offset: u64,
    len: u64,
) -> io::Result<()> {
    const PIECE_LEN: u64 = 1 << 20;
    let mut buf = vec![0u8; len.min(PIECE_LEN) as usize];
    let mut done = 0;
    while done < len {
        let piece = &mut buf[..(len - done).min(PIECE_LEN) as usize];
        if from.read_at(from_offset + done, piece)? < piece.len() {
            return Err(errno(libc::EIO));
        }
        to.write_at(offset + done, piece)?;
        done += piece.len() as u64;
    }
    Ok(())
}

/// A held entry of a directory: calls read and change this entry, whatever its name leads to by now. It is not open.
pub trait BackendEntry: BackendNode {
    /// link(2): another name of it, `to_name` in `to`.
    fn link(&self, to: &dyn BackendDir, to_name: &OsStr) -> io::Result<()>;
}

/// Changes by name, for tests, which have no race to lose.
#[cfg(any(test, feature = "testing"))]
pub trait ByName {
    /// chmod.
    fn set_mode_entry(&self, name: &OsStr, mode: u32) -> io::Result<()>;
    /// lchown.
    fn set_owner_entry(&self, name: &OsStr, uid: Option<u32>, gid: Option<u32>) -> io::Result<()>;
    /// utimensat.
    fn set_times_entry(&self, name: &OsStr, atime: SetTime, mtime: SetTime) -> io::Result<()>;
    /// link(2).
    fn link(&self, name: &OsStr, to: &dyn BackendDir, to_name: &OsStr) -> io::Result<()>;
    /// getxattr(2), not following.
    fn get_xattr_entry(&self, name: &OsStr, attr: &OsStr) -> io::Result<Vec<u8>>;
    /// setxattr(2), not following.
    fn set_xattr_entry(&self, name: &OsStr, attr: &OsStr, value: &[u8], flags: i32) -> io::Result<()>;
    /// listxattr(2), not following.
    fn list_xattr_entry(&self, name: &OsStr) -> io::Result<Vec<OsString>>;
    /// removexattr(2), not following.
    fn remove_xattr_entry(&self, name: &OsStr, attr: &OsStr) -> io::Result<()>;
}

#[cfg(any(test, feature = "testing"))]
impl ByName for dyn BackendDir {
    fn set_mode_entry(&self, name: &OsStr, mode: u32) -> io::Result<()> {
        self.hold(name)?.set_mode(mode)
    }
    fn set_owner_entry(&self, name: &OsStr, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        self.hold(name)?.set_owner(uid, gid)
    }
    fn set_times_entry(&self, name: &OsStr, atime: SetTime, mtime: SetTime) -> io::Result<()> {
        self.hold(name)?.set_times(atime, mtime)
    }
    fn link(&self, name: &OsStr, to: &dyn BackendDir, to_name: &OsStr) -> io::Result<()> {
        self.hold(name)?.link(to, to_name)
    }
    fn get_xattr_entry(&self, name: &OsStr, attr: &OsStr) -> io::Result<Vec<u8>> {
        self.hold(name)?.get_xattr(attr)
    }
    fn set_xattr_entry(&self, name: &OsStr, attr: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        self.hold(name)?.set_xattr(attr, value, flags)
    }
    fn list_xattr_entry(&self, name: &OsStr) -> io::Result<Vec<OsString>> {
        self.hold(name)?.list_xattr()
    }
    fn remove_xattr_entry(&self, name: &OsStr, attr: &OsStr) -> io::Result<()> {
        self.hold(name)?.remove_xattr(attr)
    }
}

/// An open backing directory.
pub trait BackendDir: BackendNode {
    /// For [`open_regular_in`].
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Opens a subdirectory (never through a link).
    fn open_dir(&self, name: &OsStr) -> io::Result<Arc<dyn BackendDir>>;
    /// Opens a regular file; `write` false opens read-only. A file of this process's user is opened even if its mode
    /// denies that.
    fn open_file(&self, name: &OsStr, write: bool) -> io::Result<Arc<dyn BackendFile>>;
    /// The same for the regular file that stat has just shown under this name; `None` if the name leads to another one
    /// by now.
    fn open_same(&self, name: &OsStr, seen: &Stat, write: bool) -> io::Result<Option<Arc<dyn BackendFile>>> {
        let file = self.open_file(name, write)?;
        let now = file.stat()?;
        Ok(now.is_same(seen).then_some(file))
    }
    /// Creates a regular file (O_EXCL) and opens it for reading and writing. It is its owner's alone (mode 0600) until
    /// the caller gives it an owner and then a mode, through the returned file.
    fn create_file(&self, name: &OsStr) -> io::Result<Arc<dyn BackendFile>>;
    /// mkdir. Without permissions for others it can be given to its owner before any other user reaches it.
    fn make_dir(&self, name: &OsStr, mode: u32) -> io::Result<()>;
    /// mknod of a fifo, socket or device, with mode 0600. To be held, given an owner and a mode, and moved to its
    /// place.
    fn make_node(&self, name: &OsStr, kind: Kind, rdev: u64) -> io::Result<()>;
    /// symlink.
    fn make_symlink(&self, name: &OsStr, target: &OsStr) -> io::Result<()>;
    /// readlink.
    fn read_link(&self, name: &OsStr) -> io::Result<OsString>;
    /// Holds an entry of whatever kind, never what a link leads to.
    fn hold(&self, name: &OsStr) -> io::Result<Arc<dyn BackendEntry>>;
    /// The same for the entry that stat has just shown under this name; `None` if the name leads to another one by now.
    fn hold_same(&self, name: &OsStr, seen: &Stat) -> io::Result<Option<Arc<dyn BackendEntry>>> {
        let held = self.hold(name)?;
        let now = held.stat()?;
        Ok(now.is_same(seen).then_some(held))
    }
    /// renameat2.
    fn rename(&self, name: &OsStr, to: &dyn BackendDir, to_name: &OsStr, mode: RenameMode) -> io::Result<()>;
    /// unlink of anything but a directory.
    fn unlink(&self, name: &OsStr) -> io::Result<()>;
    /// rmdir.
    fn remove_dir(&self, name: &OsStr) -> io::Result<()>;
    /// lstat of an entry.
    fn stat_entry(&self, name: &OsStr) -> io::Result<Stat>;
    /// lstat of an entry; if it is a regular file that is not empty, also the file itself, opened for reading. One
    /// lookup serves both.
    fn stat_and_open(&self, name: &OsStr) -> io::Result<(Stat, Option<Arc<dyn BackendFile>>)> {
        let st = self.stat_entry(name)?;
        let opened = if st.is_full_file() { self.open_same(name, &st, false).ok().flatten() } else { None };
        Ok((st, opened))
    }
    /// Entries except `.` and `..`, in the store's order.
    fn read_dir(&self) -> io::Result<Vec<Listed>>;
    /// fsync of the directory.
    fn sync(&self) -> io::Result<()>;
    /// This directory as a store of its own, for a vault that lies in another's tree. `write` false: for reading alone,
    /// even if the directory may be searched and not listed. `EOPNOTSUPP` if the store cannot do that.
    fn as_backend(&self, write: bool) -> io::Result<Arc<dyn Backend>> {
        let _ = write;
        Err(errno(libc::EOPNOTSUPP))
    }
    /// This directory, for calls in it although its mode denies them to its owner, this process's user. Opening,
    /// reading links, stat, making directories, listing, and `as_backend` lend it the permission, each for the time of
    /// one system call. No stat of this process shows the lent mode, and lending undoes no chmod. Directories that are
    /// opened through it lend nothing. `None` if the store never denies access.
    fn lending(&self) -> Option<Arc<dyn BackendDir>> {
        None
    }
    /// For backends to recognise their own directories in `link` and `rename`.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// A backing store.
pub trait Backend: Send + Sync {
    /// The directory the vault lies in.
    fn root(&self) -> Arc<dyn BackendDir>;
    /// statvfs.
    fn stat_fs(&self) -> io::Result<StatFs>;
    /// syncfs: a barrier for everything so far.
    fn sync(&self) -> io::Result<()>;
    /// Takes an exclusive lock on the file `name` in the root (created if missing) and, if the store can, on the
    /// staging directory, since a file can be removed. Held until the returned guard is dropped.
    /// [`io::ErrorKind::WouldBlock`] if either is held already. It excludes other processes and other opens in this
    /// one. A store that is a directory of another lends for it, as [`BackendDir::lending`] does.
    fn try_lock(&self, name: &OsStr) -> io::Result<Box<dyn std::any::Any + Send + Sync>> {
        let _ = name;
        Err(io::ErrorKind::Unsupported.into())
    }
}
