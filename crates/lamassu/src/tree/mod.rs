//! Trees of files to copy between: the local file system, an open vault, single stored files. One set of traits, so
//! that copying is written once.
//!
//! Sources are read by paths. Targets are held: a directory is opened once, entries in it go by one name, and
//! attributes are set on the entry that was made.
//!
//! The trees are no part of `lamassu-vault`: the other end of a copy is a local directory, which [`whole`] completes
//! files in as it does in a vault, and errors name entries as the user does. What every front-end needs of a vault is
//! `lamassu_vault::EntryRef` and `OpenEntry`.

pub mod copy;
pub mod grants;
pub mod held;
pub mod local;
pub mod stored;
pub mod vault;
pub mod whole;

use crate::fault::{Error, Fault, Result};
use lamassu_host::Error as HostError;
use lamassu_store::StoreError;
use lamassu_vault::{Kind, Time, VaultError};
use rustix::fd::BorrowedFd;
use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::path::Path;

/// The metadata of an entry that a copy keeps.
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
    /// distinguishes entries of the same tree
    pub ino: (u64, u64),
    /// names that the entry has
    pub links: u64,
}

/// A tree of files. Links are never followed. Paths are those of the tree itself.
pub trait Tree {
    /// A path as messages name it.
    fn name(&self, path: &Path) -> String;
    /// The error for a path that is missing, or leads to the wrong kind of entry.
    fn fault(&self, path: &Path, what: VaultError) -> Error {
        Error::from(what).context(self.name(path))
    }
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
    /// Opens the directory at a path, to write in it. Links are followed if the tree has them, since the user named the
    /// path.
    fn dir(&self, path: &Path) -> Result<Box<dyn Dir>>;
    /// Whether a path is the local directory with this (st_dev, st_ino), or lies in it. Links are followed, including
    /// the last component.
    fn lies_in(&self, _path: &Path, _dir: (u64, u64)) -> bool {
        false
    }
}

/// An entry that was made, or a directory that was opened. Calls change this entry, even if another one has its name by
/// now. Errors only say why: the caller adds which entry it is.
pub trait Node {
    /// Its [`Meta::ino`].
    fn ino(&self) -> Result<(u64, u64)>;
    /// Only for root; for other users it has no effect.
    fn set_owner(&self, uid: u32, gid: u32) -> Result<()>;
    fn set_xattr(&self, name: &OsStr, value: &[u8]) -> Result<()>;
    fn set_times(&self, atime: Time, mtime: Time) -> Result<()>;
    /// Does nothing for links, which have no mode.
    fn set_mode(&self, mode: u32) -> Result<()>;
}

/// An open directory that is written to. Names are single components, and links are not followed.
pub trait Dir: Node {
    /// The path of an entry, as messages name it.
    fn name(&self, name: &OsStr) -> String;
    /// As [`Tree::fault`].
    fn fault(&self, name: &OsStr, what: VaultError) -> Error;
    /// lstat; `None` if nothing is there.
    fn stat(&self, name: &OsStr) -> Result<Option<Meta>>;
    /// Opens a directory in it.
    fn open(&self, name: &OsStr) -> Result<Box<dyn Dir>>;
    /// Makes a directory, for its owner alone.
    fn make_dir(&self, name: &OsStr) -> Result<Box<dyn Dir>>;
    /// Makes a regular file, for its owner alone, and opens it for writing; fails if something is there.
    fn create(&self, name: &OsStr) -> Result<Box<dyn Output>>;
    /// Makes a symbolic link.
    fn make_symlink(&self, name: &OsStr, target: &OsStr) -> Result<Box<dyn Node>>;
    /// Makes a device node, fifo or socket, for its owner alone.
    fn make_node(&self, name: &OsStr, meta: &Meta) -> Result<Box<dyn Node>>;
    /// Gives the file `file` in `from`, a directory of the same tree, a further name here. Fails if it no longer has
    /// this [`Meta::ino`], or if the tree cannot link.
    fn link(&self, from: &dyn Dir, file: &OsStr, ino: (u64, u64), name: &OsStr) -> Result<()>;
    /// Its descriptor, if it is a local directory.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Removes an entry that is not a directory.
    fn remove(&self, name: &OsStr) -> Result<()>;
    /// Renames an entry that is not a directory. With `replaces` it may replace another entry; otherwise the name must
    /// be free.
    fn rename(&self, from: &OsStr, to: &OsStr, replaces: bool) -> Result<()>;
    /// Whether a symbolic link leads to anything other than a regular file or nothing. Targets of a vault's links are
    /// known only in a mount.
    fn leads_to_no_file(&self, _link: &OsStr) -> bool {
        false
    }
}

/// A file being read.
pub trait Input {
    /// Reads up to `buf.len()` bytes; short only at the end.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize>;
    /// The next range with data at or after `offset`: start and end. `None`: only a hole is left.
    fn next_data(&self, offset: u64) -> Result<Option<(u64, u64)>>;
    /// The present size by stat, in bytes. More or less may be readable: files of /proc have size 0, some of /sys a
    /// whole page, and others change.
    fn size(&self) -> Result<u64>;
}

/// A file being written.
pub trait Output: Node {
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()>;
    fn set_len(&self, len: u64) -> Result<()>;
    /// Reports failed writes; `durable`: returns only when the data would survive a power cut. To be called after the
    /// last write.
    fn flush(&self, durable: bool) -> Result<()>;
}

/// Whether an error is damage of the range that was read, so that the rest may still be good.
pub fn is_damage(error: &Error) -> bool {
    matches!(error.fault(), Fault::Host(HostError::Vault(VaultError::Store(StoreError::Damaged(_)))))
}

/// Bytes read at once.
pub const CHUNK: usize = 1 << 20;
/// Bytes read at once if a chunk has damage: the smallest block.
const GRAIN: usize = 4096;

/// Passes every range of data, in order, to `sink`, and returns the length of the file. Reads find the end of the data;
/// the size is used only for a hole at the end. A damaged range gives an error only after everything before it was
/// passed on.
pub fn read_data(input: &dyn Input, mut sink: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<u64> {
    let mut buf = vec![0u8; CHUNK];
    // Where the last range ended.
    let mut done = 0;
    loop {
        let (start, end) = match input.next_data(done)? {
            Some(range) => range,
            // Only a hole up to the size is left, as far as is known. After it the file is read until a read gives
            // nothing.
            None => (input.size()?.max(done), u64::MAX),
        };
        let reached = read_range(input, start..end, &mut buf, &mut sink)?;
        if reached < end {
            // A read at the start of a range gave nothing: the file may have shrunk into the hole before it.
            return if reached > start { Ok(reached) } else { Ok(input.size()?.min(start).max(done)) };
        }
        done = end;
    }
}

/// Passes a range on in chunks. Returns where it, or the file, ended.
fn read_range(
    input: &dyn Input,
    range: Range<u64>,
    buf: &mut [u8],
    sink: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<u64> {
    let mut at = range.start;
    while at < range.end {
        let want = CHUNK.min(usize::try_from(range.end - at).unwrap_or(CHUNK));
        let n = match input.read_at(at, &mut buf[..want]) {
            // Reads again in small pieces: the data before the damage are good.
            Err(error) if is_damage(&error) && want > GRAIN => input.read_at(at, &mut buf[..GRAIN])?,
            other => other?,
        };
        if n == 0 {
            break;
        }
        sink(at, &buf[..n])?;
        at += n as u64;
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file whose size and data differ from what can be read.
    struct Said<'a> {
        content: &'a [u8],
        data: Option<(u64, u64)>,
        size: u64,
    }

    impl Input for Said<'_> {
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
            let left = usize::try_from(offset).ok().and_then(|at| self.content.get(at..)).unwrap_or_default();
            let n = left.len().min(buf.len());
            buf[..n].copy_from_slice(&left[..n]);
            Ok(n)
        }

        fn next_data(&self, offset: u64) -> Result<Option<(u64, u64)>> {
            Ok(self.data.filter(|(_, end)| offset < *end).map(|(start, end)| (start.max(offset), end)))
        }

        fn size(&self) -> Result<u64> {
            Ok(self.size)
        }
    }

    #[test]
    fn a_file_ends_where_reading_does() {
        let ten: &[u8] = b"0123456789";
        for (content, data, size, expected) in [
            (ten, Some((0, 10)), 10, (10, 10)),
            // As /proc has them, and /sys.
            (ten, None, 0, (10, 10)),
            (ten, Some((0, 4096)), 4096, (10, 10)),
            (&ten[..0], None, 0, (0, 0)),
            // It grew behind what was known of it, and it shrank into the hole before its data.
            (ten, Some((0, 4)), 4, (10, 10)),
            (&ten[..4], Some((8, 16)), 4, (0, 4)),
            // A hole at the end.
            (&ten[..4], Some((0, 4)), 64, (4, 64)),
            (&ten[..0], None, 64, (0, 64)),
        ] {
            let mut read = 0;
            let len = read_data(&Said { content, data, size }, |offset, data| {
                assert_eq!(data, &content[offset as usize..][..data.len()]);
                read += data.len();
                Ok(())
            });
            assert_eq!((read, len.unwrap()), expected, "{data:?} {size}");
        }
    }

    #[test]
    fn holes_of_local_files_are_no_data() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = std::fs::File::create(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"middle", 4 << 20).unwrap();
        file.set_len(8 << 20).unwrap();
        let tree = local::Local;
        let input = tree.open(&path).unwrap();
        let mut seen = 0;
        let len = read_data(&*input, |_, data| {
            seen += data.len();
            Ok(())
        });
        assert_eq!(len.unwrap(), 8 << 20);
        assert!((6..=8 << 20).contains(&seen), "{seen}");
    }
}
