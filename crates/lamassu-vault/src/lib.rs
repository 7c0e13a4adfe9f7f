//! The Lamassu file system without a kernel: tree, names, inodes, extended attributes, check.
//!
//! Front-ends (FUSE, the command line, gateways) call a [`Vault`]; it never names any of them.

pub mod types;
pub use types::*;

use std::ffi::OsStr;
use std::sync::Arc;

/// An open vault. Methods take `&self` and may be called from many threads.
pub struct Vault {
    _p: (),
}

#[allow(unused_variables, missing_docs)]
impl Vault {
    /// Opens the tree below `backend` with loaded keys. The root inode is [`ROOT`]. Not read-only: takes the writer's lock, clears the staging directory.
    pub fn open(
        backend: Arc<dyn lamassu_store::Backend>,
        header: &lamassu_format::header::VaultHeader,
        ring: lamassu_crypto::KeyRing,
        options: Options,
    ) -> Result<Vault> {
        todo!()
    }
    /// Commits, settles and closes everything, releases the lock.
    pub fn close(&self) -> Result<()> {
        todo!()
    }
    /// To be called every few seconds: commits buffers older than 5 s, settles files at most 30 s after their last write.
    pub fn maintain(&self) -> Result<()> {
        todo!()
    }
    /// Everything committed, durable and settled.
    pub fn sync_all(&self) -> Result<()> {
        todo!()
    }
    /// Commits, settles, and blocks every change until `thaw`. Reads go on.
    pub fn freeze(&self) -> Result<()> {
        todo!()
    }
    pub fn thaw(&self) -> Result<()> {
        todo!()
    }
    pub fn is_frozen(&self) -> bool {
        todo!()
    }

    // --- inodes: every Entry returned adds one lookup reference, given back by `forget`
    pub fn lookup(&self, parent: Ino, name: &OsStr) -> Result<Entry> {
        todo!()
    }
    pub fn forget(&self, ino: Ino, count: u64) {
        todo!()
    }
    pub fn getattr(&self, ino: Ino, handle: Option<HandleId>) -> Result<Attr> {
        todo!()
    }
    pub fn setattr(&self, ino: Ino, handle: Option<HandleId>, set: &SetAttr) -> Result<Attr> {
        todo!()
    }
    pub fn readlink(&self, ino: Ino) -> Result<Vec<u8>> {
        todo!()
    }

    // --- tree
    pub fn mknod(&self, parent: Ino, name: &OsStr, kind: Kind, mode: u32, rdev: u64, owner: Owner) -> Result<Entry> {
        todo!()
    }
    pub fn mkdir(&self, parent: Ino, name: &OsStr, mode: u32, owner: Owner) -> Result<Entry> {
        todo!()
    }
    pub fn symlink(&self, parent: Ino, name: &OsStr, target: &[u8], owner: Owner) -> Result<Entry> {
        todo!()
    }
    pub fn link(&self, ino: Ino, parent: Ino, name: &OsStr) -> Result<Entry> {
        todo!()
    }
    pub fn unlink(&self, parent: Ino, name: &OsStr) -> Result<()> {
        todo!()
    }
    pub fn rmdir(&self, parent: Ino, name: &OsStr) -> Result<()> {
        todo!()
    }
    pub fn rename(&self, parent: Ino, name: &OsStr, to_parent: Ino, to_name: &OsStr, mode: RenameMode) -> Result<()> {
        todo!()
    }

    // --- files
    pub fn create(
        &self,
        parent: Ino,
        name: &OsStr,
        mode: u32,
        access: Access,
        owner: Owner,
    ) -> Result<(Entry, HandleId)> {
        todo!()
    }
    pub fn open_file(&self, ino: Ino, access: Access) -> Result<HandleId> {
        todo!()
    }
    pub fn read(&self, handle: HandleId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        todo!()
    }
    pub fn write(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<usize> {
        todo!()
    }
    /// For front-ends whose kernel does not resolve O_APPEND itself.
    pub fn append(&self, handle: HandleId, data: &[u8]) -> Result<usize> {
        todo!()
    }
    /// close(2) of one descriptor: hands buffers to the store, reports what failed.
    pub fn flush(&self, handle: HandleId) -> Result<()> {
        todo!()
    }
    pub fn fsync(&self, handle: HandleId, data_only: bool) -> Result<()> {
        todo!()
    }
    pub fn release(&self, handle: HandleId) -> Result<()> {
        todo!()
    }
    pub fn fallocate(&self, handle: HandleId, mode: Fallocate, offset: u64, len: u64) -> Result<()> {
        todo!()
    }
    pub fn seek(&self, handle: HandleId, offset: u64, whence: Whence) -> Result<u64> {
        todo!()
    }

    // --- directories
    pub fn open_dir(&self, ino: Ino) -> Result<HandleId> {
        todo!()
    }
    /// Calls `fill(entry, next_cookie)` from `cookie` (0: the start, with `.` and `..` first) until it returns false (the reply is full) or the listing ends.
    pub fn read_dir(&self, handle: HandleId, cookie: u64, fill: &mut dyn FnMut(&DirEntry, u64) -> bool) -> Result<()> {
        todo!()
    }
    pub fn release_dir(&self, handle: HandleId) -> Result<()> {
        todo!()
    }
    pub fn fsync_dir(&self, handle: HandleId) -> Result<()> {
        todo!()
    }

    // --- attributes and statistics
    pub fn get_xattr(&self, ino: Ino, name: &OsStr) -> Result<Vec<u8>> {
        todo!()
    }
    pub fn set_xattr(&self, ino: Ino, name: &OsStr, value: &[u8], mode: SetXattr) -> Result<()> {
        todo!()
    }
    pub fn list_xattr(&self, ino: Ino) -> Result<Vec<Vec<u8>>> {
        todo!()
    }
    pub fn remove_xattr(&self, ino: Ino, name: &OsStr) -> Result<()> {
        todo!()
    }
    pub fn statfs(&self) -> Result<StatFs> {
        todo!()
    }

    // --- for tools: paths are relative to the root, components separated by '/', no links followed
    pub fn resolve(&self, path: &OsStr) -> Result<Entry> {
        todo!()
    }
    /// Plain path -> path in the store.
    pub fn stored_path(&self, path: &OsStr) -> Result<std::path::PathBuf> {
        todo!()
    }
    /// Path in the store (relative to DIR) -> plain path.
    pub fn plain_path(&self, stored: &std::path::Path) -> Result<std::path::PathBuf> {
        todo!()
    }
    /// Verifies the whole tree or the given plain paths; see [`check::Report`].
    pub fn check(&self, paths: &[&OsStr], repair: bool, progress: &dyn check::Progress) -> Result<check::Report> {
        todo!()
    }
}

/// What `lamassu check` finds.
pub mod check {
    /// Progress of a check, in files and backing bytes.
    pub trait Progress: Send + Sync {
        /// How much lies ahead, when known.
        fn total(&self, files: u64, bytes: u64);
        /// More done.
        fn advance(&self, files: u64, bytes: u64);
        /// A line for people (a problem found), as it is found.
        fn problem(&self, problem: &Problem);
    }
    /// One problem.
    #[derive(Debug, Clone, serde::Serialize)]
    pub struct Problem {
        /// Plain path, where known.
        pub path: Option<String>,
        /// Path in the store.
        pub stored: String,
        /// Kind, as a stable word: `block-hash`, `page-seal`, `name`, `directory-record`, `symlink`, `xattr`, `orphan-companion`, …
        pub kind: String,
        /// Segment, page, block where it concerns a file's content.
        pub segment: Option<u64>,
        /// Page.
        pub page: Option<u64>,
        /// Block.
        pub block: Option<u64>,
        /// Whether `--repair` mended it.
        pub repaired: bool,
        /// A sentence for people.
        pub text: String,
    }
    /// The result.
    #[derive(Debug, Clone, Default, serde::Serialize)]
    pub struct Report {
        /// Counted.
        pub files: u64,
        /// Counted.
        pub directories: u64,
        /// Counted.
        pub symlinks: u64,
        /// Counted.
        pub other: u64,
        /// Counted.
        pub xattrs: u64,
        /// Counted.
        pub pages: u64,
        /// Counted.
        pub blocks: u64,
        /// Blocks of interrupted commits found in a good state (completed if repairing).
        pub recovered: u64,
        /// Empty files whose page was never written.
        pub unsealed_empty: u64,
        /// Everything wrong.
        pub problems: Vec<Problem>,
    }
}
