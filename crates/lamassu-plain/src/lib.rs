//! `PlainFs`: an unencrypted directory, behind the interface of vaults. A provider's proxy keeps ciphertext objects in
//! one; benchmarks and tests of mounts compare with it.
//!
//! It has the same cost structure as a vault over a local directory, less the cryptography. It is no sandbox: a
//! caller acts with the process's rights on the directory (in a mount the kernel checks modes and owners,
//! `default_permissions`). Each referenced inode keeps one `O_PATH` descriptor: raise the limit on open files.
//!
//! | module | what it does |
//! |---|---|
//! | `node` | referenced inodes, each with its descriptor |
//! | `ops` | the operations of a file system |
//!
//! Locks, in this order: the entries of an open directory, while they are passed on; the inodes. Those of open files
//! and of open directories are held alone.
//!
//! Never: encrypts, verifies, changes the process's umask or limits.

mod node;
mod ops;

use lamassu_vault::{HandleId, Ino, Result, VaultError};
use node::Nodes;
use parking_lot::{Mutex, RwLock};
use rustix::fs::{Mode, OFlags};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A local directory as a file system.
pub struct PlainFs {
    nodes: Nodes,
    files: RwLock<HashMap<u64, Arc<OwnedFd>>>,
    dirs: Mutex<HashMap<u64, Arc<ops::Listing>>>,
    next_handle: AtomicU64,
}

impl PlainFs {
    /// Opens a directory. The caller has set the process's umask to 0: modes are those that requests say.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn open(dir: &Path) -> Result<PlainFs> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| io("open", e))?;
        Ok(PlainFs {
            nodes: Nodes::new(root)?,
            files: RwLock::default(),
            dirs: Mutex::default(),
            next_handle: AtomicU64::new(1),
        })
    }

    fn add_file(&self, fd: OwnedFd) -> HandleId {
        let id = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.files.write().insert(id, Arc::new(fd));
        HandleId(id)
    }

    fn file(&self, handle: HandleId) -> Result<Arc<OwnedFd>> {
        self.files.read().get(&handle.0).cloned().ok_or(VaultError::BadHandle)
    }

    fn add_dir(&self, ino: Ino) -> Result<HandleId> {
        let node = self.nodes.get(ino)?;
        let id = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.dirs.lock().insert(id, Arc::new(ops::Listing::new(ino, node)));
        Ok(HandleId(id))
    }
}

/// As the vault has it: what callers distinguish has a kind of its own.
fn io(op: &'static str, error: rustix::io::Errno) -> VaultError {
    use rustix::io::Errno;
    match error {
        Errno::NOENT => VaultError::NotFound,
        Errno::EXIST => VaultError::Exists,
        Errno::NOTDIR => VaultError::NotDirectory,
        Errno::ISDIR => VaultError::IsDirectory,
        Errno::NOTEMPTY => VaultError::NotEmpty,
        Errno::NAMETOOLONG => VaultError::NameTooLong,
        Errno::INVAL => VaultError::Invalid,
        Errno::ROFS => VaultError::ReadOnly,
        Errno::OPNOTSUPP => VaultError::Unsupported,
        Errno::NODATA => VaultError::NoAttribute,
        Errno::STALE => VaultError::Stale,
        error => VaultError::Io { op, source: error.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_vault::{Access, FileSystem, Owner, ROOT, SetXattr};
    use std::ffi::OsStr;

    #[test]
    fn a_file_is_written_named_and_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let fs = PlainFs::open(dir.path()).expect("opens");
        let owner =
            Owner { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw(), umask: 0 };
        let access = Access { read: true, write: true, truncate: false };
        let (entry, handle) = fs.create(ROOT, OsStr::new("a"), 0o600, access, owner).expect("creates");
        assert_eq!(fs.write(handle, 0, b"content").expect("writes"), 7);
        fs.set_xattr(entry.attr.ino, OsStr::new("user.x"), b"y", SetXattr::Any).expect("sets");
        fs.fsync(handle, false).expect("syncs");
        fs.release(handle).expect("closes");
        assert_eq!(std::fs::read(dir.path().join("a")).expect("reads"), b"content");
        let found = fs.lookup(ROOT, OsStr::new("a")).expect("finds").attr;
        assert_eq!((found.ino, found.size), (entry.attr.ino, 7));
        assert_eq!(fs.get_xattr(found.ino, OsStr::new("user.x")).expect("gets"), b"y");
        assert!(matches!(fs.get_xattr(found.ino, OsStr::new("user.z")), Err(VaultError::NoAttribute)));
        assert!(matches!(fs.lookup(ROOT, OsStr::new("b")), Err(VaultError::NotFound)));
        fs.forget(found.ino, 2);
        assert!(matches!(fs.getattr(found.ino, None), Err(VaultError::Stale)));
    }

    #[test]
    fn names_are_told_as_they_are_listed() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(dir.path().join("d")).expect("makes");
        ["a", "b"].iter().for_each(|name| std::fs::write(dir.path().join(name), "").expect("writes"));
        let fs = PlainFs::open(dir.path()).expect("opens");
        let (mut told, mut listed) = (Vec::new(), Vec::new());
        fs.each_name(ROOT, &mut |name, kind| told.push((name.to_owned(), kind))).expect("reads");
        let handle = fs.open_dir(ROOT).expect("opens");
        let mut each = |entry: &lamassu_vault::DirEntry, _| {
            listed.push((entry.name.clone(), entry.kind));
            true
        };
        fs.read_dir(handle, 0, &mut each).expect("lists");
        fs.release_dir(handle).expect("closes");
        assert_eq!(listed.drain(..2).map(|(name, _)| name).collect::<Vec<_>>(), [".", ".."]);
        assert_eq!(told, listed);
        assert_eq!(told.len(), 3);
    }
}
