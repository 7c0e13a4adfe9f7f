//! Trees of files to copy between: the local file system, an open vault, single stored files. One trait, so that copying is written once.

pub mod copy;
pub mod local;
pub mod stored;
pub mod vault;

use anyhow::Result;
use lamassu_vault::{Kind, StoreError, Time, VaultError};
use std::ffi::OsString;
use std::path::Path;

/// What is kept of an entry when it is copied.
#[derive(Clone, Copy, Debug)]
pub struct Meta {
    pub kind: Kind,
    /// permission bits, 07777
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// of device nodes
    pub rdev: u64,
    /// bytes
    pub size: u64,
    pub atime: Time,
    pub mtime: Time,
    /// tells an entry from another in the same tree
    pub ino: (u64, u64),
}

/// A tree of files. Links are never followed. Paths are those of the tree itself.
pub trait Tree {
    /// A path as messages name it.
    fn name(&self, path: &Path) -> String;
    /// lstat; `None` if nothing is there.
    fn stat(&self, path: &Path) -> Result<Option<Meta>>;
    /// Names in a directory, sorted.
    fn list(&self, path: &Path) -> Result<Vec<OsString>>;
    /// Target of a symbolic link.
    fn read_link(&self, path: &Path) -> Result<OsString>;
    /// Extended attributes that can be carried over.
    fn xattrs(&self, path: &Path) -> Result<Vec<(OsString, Vec<u8>)>>;
    /// Opens a regular file for reading.
    fn open(&self, path: &Path) -> Result<Box<dyn Input + '_>>;
    /// Opens a regular file for writing, empty; makes it, for its owner alone, if it is not there.
    fn create(&self, path: &Path) -> Result<Box<dyn Output + '_>>;
    /// Makes a directory, for its owner alone.
    fn make_dir(&self, path: &Path) -> Result<()>;
    /// Makes a symbolic link.
    fn make_symlink(&self, path: &Path, target: &OsString) -> Result<()>;
    /// Makes a device node, fifo or socket.
    fn make_node(&self, path: &Path, meta: &Meta) -> Result<()>;
    /// Removes what is not a directory.
    fn remove(&self, path: &Path) -> Result<()>;
    /// Sets an extended attribute.
    fn set_xattr(&self, path: &Path, name: &OsString, value: &[u8]) -> Result<()>;
    /// Sets owner (as root alone), mode and times.
    fn set_meta(&self, path: &Path, meta: &Meta) -> Result<()>;
}

/// A file being read.
pub trait Input {
    /// Reads up to `buf.len()` bytes; short only at the end.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize>;
    /// The next range with data at or after `offset`: start and end. `None`: only a hole is left.
    fn next_data(&self, offset: u64) -> Result<Option<(u64, u64)>>;
}

/// A file being written.
pub trait Output {
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()>;
    fn set_len(&self, len: u64) -> Result<()>;
    /// Reports what could not be written.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// Whether an error is damage of the range read, so that the rest may still be good.
pub fn is_damage(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        matches!(cause.downcast_ref(), Some(StoreError::Damaged(_)))
            || matches!(cause.downcast_ref(), Some(VaultError::Store(StoreError::Damaged(_))))
    })
}

/// Bytes read at once.
pub const CHUNK: usize = 1 << 20;
/// Bytes read at once where a chunk holds damage: the smallest block.
const GRAIN: usize = 4096;

/// Hands every range of data, in order, to `sink`. A damaged range is an error only once everything before it was handed on.
pub fn read_data(input: &dyn Input, mut sink: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
    let mut buf = vec![0u8; CHUNK];
    let mut at = 0;
    while let Some((start, end)) = input.next_data(at)? {
        at = start;
        while at < end {
            let want = CHUNK.min(usize::try_from(end - at).unwrap_or(CHUNK));
            let n = match input.read_at(at, &mut buf[..want]) {
                // Again in small pieces: what comes before the damage is good.
                Err(error) if is_damage(&error) && want > GRAIN => input.read_at(at, &mut buf[..GRAIN])?,
                other => other?,
            };
            if n == 0 {
                return Ok(());
            }
            sink(at, &buf[..n])?;
            at += n as u64;
        }
    }
    Ok(())
}
