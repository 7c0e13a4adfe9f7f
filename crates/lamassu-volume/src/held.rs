//! Entries and open files of a vault, which release their references and handles when they are dropped.

use lamassu_vault::{Access, Attr, Entry, FileSystem, Forest, HandleId, Ino, Result, SetAttr, VaultError, Whence};
use std::ffi::OsStr;
use std::sync::Arc;

/// Bytes that are copied at once if blocks cannot be copied by their keys.
const PIECE: usize = 1 << 20;

/// A referenced entry.
pub struct Held {
    pub fs: Arc<Forest>,
    pub attr: Attr,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.fs.forget(self.attr.ino, 1);
    }
}

impl Held {
    /// Takes over the reference to an entry.
    pub fn new(fs: &Arc<Forest>, entry: Entry) -> Held {
        Held { fs: fs.clone(), attr: entry.attr }
    }

    pub fn ino(&self) -> Ino {
        self.attr.ino
    }

    /// The entry of this directory with a name; `None` if there is none.
    pub fn child(&self, name: &OsStr) -> Result<Option<Held>> {
        match self.fs.lookup(self.ino(), name) {
            Ok(entry) => Ok(Some(Held::new(&self.fs, entry))),
            Err(VaultError::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes the names in this directory durable.
    pub fn sync_names(&self) -> Result<()> {
        let handle = self.fs.open_dir(self.ino())?;
        let synced = self.fs.fsync_dir(handle);
        synced.and(self.fs.release_dir(handle))
    }

    /// The names in this directory except `.` and `..`.
    pub fn names(&self) -> Result<Vec<std::ffi::OsString>> {
        let mut names = Vec::new();
        let handle = self.fs.open_dir(self.ino())?;
        let listed = self.fs.read_dir(handle, 0, &mut |entry, _| {
            if entry.name != "." && entry.name != ".." {
                names.push(entry.name.clone());
            }
            true
        });
        listed.and(self.fs.release_dir(handle))?;
        names.sort_unstable();
        Ok(names)
    }

    /// Opens this file.
    pub fn open(self, write: bool) -> Result<Open> {
        let handle = self.fs.open_file(self.ino(), Access { read: true, write, truncate: false })?;
        Ok(Open { node: self, handle })
    }
}

/// An open file.
pub struct Open {
    pub node: Held,
    pub handle: HandleId,
}

impl Drop for Open {
    fn drop(&mut self) {
        // Data that a caller was promised to be durable is synced already. The vault keeps the rest, and retries until
        // it is closed.
        // closed.
        let _ = self.node.fs.release(self.handle);
    }
}

impl Open {
    pub fn fs(&self) -> &Forest {
        &self.node.fs
    }

    /// Makes content and size durable.
    pub fn sync(&self) -> Result<()> {
        self.fs().fsync(self.handle, true)
    }

    pub fn set_size(&self, size: u64) -> Result<()> {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        self.fs().setattr(self.node.ino(), Some(self.handle), &set).map(drop)
    }

    /// Fills `buf` from `offset`.
    pub fn read(&self, mut offset: u64, mut buf: &mut [u8]) -> Result<()> {
        while !buf.is_empty() {
            match self.fs().read(self.handle, offset, buf)? {
                0 => return Err(VaultError::NoData),
                n => {
                    offset += n as u64;
                    buf = &mut buf[n..];
                }
            }
        }
        Ok(())
    }

    /// Writes all of `data` at `offset`.
    pub fn write(&self, mut offset: u64, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let written = self.fs().write_behind(self.handle, offset, data)?;
            offset += written as u64;
            data = &data[written..];
        }
        Ok(())
    }

    /// The first data at or after `offset`; `None`: no data before the end.
    pub fn data_from(&self, offset: u64) -> Result<Option<u64>> {
        match self.fs().seek(self.handle, offset, Whence::Data) {
            Ok(at) => Ok(Some(at)),
            Err(VaultError::NoData) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Copies all data of another file to the same offsets. Keys of blocks are copied if possible, so nothing is
    /// encrypted again and the store may share the blocks. Holes stay holes.
    pub fn copy_all(&self, from: &Open, size: u64) -> Result<()> {
        let mut at = 0;
        while let Some(start) = from.data_from(at)? {
            let end = from.fs().data_until(from.handle, start, size)?;
            self.copy(from, start, end)?;
            at = end;
            if at >= size {
                break;
            }
        }
        Ok(())
    }

    fn copy(&self, from: &Open, mut at: u64, end: u64) -> Result<()> {
        while at < end {
            let by_keys = match self.fs().copy_range((from.handle, at), (self.handle, at), end - at) {
                Err(VaultError::OtherDataset | VaultError::Unsupported) => None,
                done => done?,
            };
            at += match by_keys {
                Some(done) if done > 0 => done,
                _ => {
                    let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(PIECE);
                    let mut data = vec![0; len];
                    from.read(at, &mut data)?;
                    self.write(at, &data)?;
                    len as u64
                }
            };
        }
        Ok(())
    }
}
