//! An encrypted file: segments, pages, the commit protocol and recovery (`docs/format.md` §8 to §13).

use crate::backend::{BackendFile, SetTime, Time};
use lamassu_crypto::{Engine, KeyRing};
use lamassu_format::Geometry;
use std::sync::Arc;

/// What a damaged range turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DamageKind {
    /// A page's seal is broken.
    PageSeal,
    /// No loaded key matches a page's epoch tag.
    PageKey,
    /// A page with a good seal that breaks the format.
    PageFormat,
    /// A page of another file.
    PageOfOtherFile,
    /// A page that must be there is not.
    PageMissing,
    /// A block does not hash to its key.
    BlockHash,
    /// A block lies past the end of the backing file.
    BlockMissing,
    /// A pending block that none of its candidates opens.
    BlockPending,
    /// A block marked with a flag that version 1 does not know.
    BlockFlag,
    /// The store lost the end of the file.
    Truncated,
}

/// One damage, as reported and logged: where in the file, and what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// What.
    pub kind: DamageKind,
    /// Segment number.
    pub segment: u64,
    /// Page number in the file.
    pub page: u64,
    /// Block number in the file, if it concerns one block.
    pub block: Option<u64>,
}

/// Errors of an encrypted file.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The backing file is damaged there; the rest is readable.
    #[error("damaged: {0:?}")]
    Damaged(Damage),
    /// The store failed.
    #[error("{op} at {offset}: {source}")]
    Io {
        /// What was tried.
        op: &'static str,
        /// Offset in the backing file.
        offset: u64,
        /// The store's error.
        source: std::io::Error,
    },
    /// The file or mount is read-only.
    #[error("read-only")]
    ReadOnly,
    /// Past the largest size of the geometry.
    #[error("file too large")]
    TooLarge,
    /// No randomness.
    #[error(transparent)]
    NoRandom(#[from] lamassu_crypto::NoRandom),
}

/// How much is verified on read (L7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Integrity {
    /// Re-hash every block.
    Full,
    /// Pages only; refused for malleable suites.
    Metadata,
}
/// Which barriers are issued (DESIGN §3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// All of them.
    Ordered,
    /// None but at fsync: safe against a killed process, not against a power cut.
    Relaxed,
}

/// Where damage is reported to, as it is met.
pub type Reporter = Arc<dyn Fn(&FileTag, &Damage) + Send + Sync>;

/// How reports name a file: whatever the caller gave at open (a path, an inode).
pub type FileTag = str;

/// What all files of a vault share.
pub struct FileContext {
    /// Keys.
    pub ring: KeyRing,
    /// Geometry.
    pub geometry: Geometry,
    /// Cipher engine.
    pub engine: Arc<Engine>,
    /// Integrity mode.
    pub integrity: Integrity,
    /// Durability mode.
    pub durability: Durability,
    /// Whether clean one-page files get convergent pages.
    pub convergent_small_files: bool,
    /// Nothing is ever written.
    pub read_only: bool,
    /// Called for every damage met.
    pub report: Reporter,
}

/// An open encrypted file. Methods take `&self` and may be called from several threads.
pub struct File {
    _p: (),
}

/// Summary of a check of one file.
#[derive(Default, Debug, Clone)]
pub struct FileCheck {
    /// Logical size.
    pub size: u64,
    /// Pages and blocks verified.
    pub pages: u64,
    /// Blocks verified.
    pub blocks: u64,
    /// Blocks that were pending and are resolved.
    pub recovered: u64,
    /// Empty file whose page was never written.
    pub unsealed_empty: bool,
    /// Backing bytes past what the metadata implies (a lost append).
    pub excess: u64,
    /// Everything found damaged.
    pub damage: Vec<Damage>,
}

impl File {
    /// Opens a backing file. `tag` names it in reports. Reads page 0 and the last page; damage there is not an error here:
    /// the file opens, and what is damaged reads as an error.
    pub fn open(ctx: Arc<FileContext>, backing: Arc<dyn BackendFile>, tag: &str) -> Result<File, StoreError> {
        let _ = (ctx, backing, tag);
        todo!()
    }
    /// The backing file.
    pub fn backing(&self) -> &Arc<dyn BackendFile> {
        todo!()
    }
    /// Logical size, bytes, buffered writes included.
    pub fn size(&self) -> u64 {
        todo!()
    }
    /// Reads; short only at the end. Holes read as zeros. A damaged block is an error for a read that touches it.
    /// (A read that begins before the damage returns the good bytes before it.)
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, StoreError> {
        let _ = (offset, buf);
        todo!()
    }
    /// Writes into the buffer of dirty blocks; commits when that grows past its bound. Extends the file.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), StoreError> {
        let _ = (offset, data);
        todo!()
    }
    /// Atomically appends; returns the offset.
    pub fn append(&self, data: &[u8]) -> Result<u64, StoreError> {
        let _ = data;
        todo!()
    }
    /// Shrinks or grows.
    pub fn truncate(&self, size: u64) -> Result<(), StoreError> {
        let _ = size;
        todo!()
    }
    /// Makes a range a hole; never changes the size.
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), StoreError> {
        let _ = (offset, len);
        todo!()
    }
    /// Reserves backing space for a range; grows the file to its end unless `keep_size`.
    pub fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> Result<(), StoreError> {
        let _ = (offset, len, keep_size);
        todo!()
    }
    /// First data at or after `offset`, `None`: no data before the end.
    pub fn seek_data(&self, offset: u64) -> Result<Option<u64>, StoreError> {
        let _ = offset;
        todo!()
    }
    /// First hole at or after `offset`; the end counts as one. `None` past the end.
    pub fn seek_hole(&self, offset: u64) -> Result<Option<u64>, StoreError> {
        let _ = offset;
        todo!()
    }
    /// Hands buffered writes to the store, without making them durable.
    pub fn flush(&self) -> Result<(), StoreError> {
        todo!()
    }
    /// Commits and makes durable.
    pub fn sync(&self) -> Result<(), StoreError> {
        todo!()
    }
    /// Whether pages on disk still carry pending bits, a stale floor or a random page where a convergent one could be.
    pub fn needs_settle(&self) -> bool {
        todo!()
    }
    /// Whether buffered writes wait.
    pub fn is_dirty(&self) -> bool {
        todo!()
    }
    /// After a barrier that covered this file (its own `sync`, or a `Backend::sync` between `covered_mark` and this call): clears pending bits, raises
    /// the floor, cuts the backing file. `mark` is what [`File::covered_mark`] returned before the barrier.
    pub fn settle(&self, mark: u64) -> Result<(), StoreError> {
        let _ = mark;
        todo!()
    }
    /// A token that names the writes so far, for [`File::settle`].
    pub fn covered_mark(&self) -> u64 {
        todo!()
    }
    /// Times that reads of `stat` must show although commits happen later; `None`: the backing file's own.
    pub fn mtime(&self) -> Option<Time> {
        todo!()
    }
    /// Sets times now and keeps commits of earlier writes from changing them.
    pub fn set_times(&self, atime: SetTime, mtime: SetTime) -> Result<(), StoreError> {
        let _ = (atime, mtime);
        todo!()
    }
    /// Verifies every page and block; with `repair` completes interrupted commits. `progress` gets backing bytes done.
    pub fn check(&self, repair: bool, progress: &mut dyn FnMut(u64)) -> Result<FileCheck, StoreError> {
        let _ = (repair, progress);
        todo!()
    }
}
