//! Entries of a vault, and its open files.

use crate::VolumeError;
use lamassu_vault::{
    Access, EntryRef, FileSystem, Forest, HandleId, Hole, OpenEntry, Result, SetAttr, VaultError, read_full, write_all,
};
use std::sync::Arc;

/// Bytes that are looked at, or copied, before it is asked whether a copy goes on.
const PIECE: u64 = 64 << 20;
/// Bytes that are read and written at once if blocks cannot be copied by their keys.
const BUFFER: usize = 1 << 20;

/// An entry of the vault.
pub type Held = EntryRef<Arc<Forest>>;

/// An open file.
pub struct Open(OpenEntry<Arc<Forest>>);

impl Open {
    pub fn new(file: Held, handle: HandleId) -> Open {
        Open(OpenEntry::new(file, handle))
    }

    /// Opens a file.
    pub fn of(file: Held, write: bool) -> Result<Open> {
        file.open(Access { read: true, write, truncate: false }).map(Open)
    }

    pub fn node(&self) -> &Held {
        self.0.entry()
    }

    pub fn handle(&self) -> HandleId {
        self.0.handle()
    }

    pub fn fs(&self) -> &Forest {
        self.0.fs()
    }

    /// Makes content and size durable.
    pub fn sync(&self) -> Result<()> {
        self.fs().fsync(self.handle(), true)
    }

    pub fn set_size(&self, size: u64) -> Result<()> {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        self.fs().setattr(self.node().ino(), Some(self.handle()), &set).map(drop)
    }

    /// Fills `buf` from `offset`.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let there = read_full(self.fs(), self.handle(), offset, buf)?;
        if there < buf.len() { Err(VaultError::NoData) } else { Ok(()) }
    }

    /// Writes all of `data` at `offset`.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        write_all(offset, data, |at, part| self.fs().write_behind(self.handle(), at, part))
    }

    /// The hole at `offset`, which lies before `until`; empty where there are data. It may go on behind its end, if
    /// pages of `most` bytes were looked at.
    pub fn hole_at(&self, offset: u64, until: u64, most: u64) -> Result<Hole> {
        match self.fs().hole_at(self.handle(), offset, until, most) {
            Err(VaultError::NoData) => Ok(Hole { end: until, looked_at: 0 }),
            hole => hole,
        }
    }

    /// Copies all data of another file to the same offsets: by the keys of blocks if possible, so that nothing is
    /// encrypted again and the store may share the blocks. Holes stay holes. `goes_on` is asked before each piece.
    ///
    /// # Errors
    /// [`VolumeError::Interrupted`] when it answers false; those of the vault.
    pub fn copy_all(&self, from: &Open, size: u64, goes_on: &dyn Fn() -> bool) -> Result<(), VolumeError> {
        let mut at = 0;
        while at < size {
            if !goes_on() {
                return Err(VolumeError::Interrupted);
            }
            let hole = from.hole_at(at, size, PIECE)?;
            if hole.end > at {
                at = hole.end;
                continue;
            }
            let end = from.fs().data_until(from.handle(), at, size.min(at + PIECE))?;
            self.copy(from, at, end)?;
            at = end;
        }
        Ok(())
    }

    fn copy(&self, from: &Open, mut at: u64, end: u64) -> Result<()> {
        while at < end {
            let by_keys = match self.fs().copy_range((from.handle(), at), (self.handle(), at), end - at) {
                Err(VaultError::OtherDataset | VaultError::Unsupported) => None,
                done => done?,
            };
            at += match by_keys {
                Some(done) if done > 0 => done,
                _ => {
                    let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(BUFFER);
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
