//! References to entries, and handles of open files, as guards: what was counted or opened is given back when they are
//! dropped. For every caller that is not the kernel, which counts its own.
//!
//! A lookup counts a reference to the entry that it finds, and the entry's number is valid as long as one is left
//! ([`FileSystem::forget`]). Invariant: an [`EntryRef`] owns exactly one, unless it is of a
//! root, which needs none.
//!
//! This is the vault's interface by paths, for front-ends other than a mount: an entry is found ([`Forest::resolve`],
//! [`EntryRef::child`]), listed, opened; an open file is read and written whole ([`read_full`], [`write_all`]). The
//! trees of the command line, volumes and the gateway's objects are built on it.
//!
//! [`Forest::resolve`]: crate::Forest::resolve

use crate::{Access, Attr, Entry, FileSystem, HandleId, Ino, Kind, Result, VaultError};
use std::ffi::{OsStr, OsString};
use std::ops::Deref;

/// An entry of a file system, with one reference to it. `P` points to the file system: a borrow or an `Arc`.
pub struct EntryRef<P>
where
    P: Deref,
    P::Target: FileSystem,
{
    fs: P,
    entry: Entry,
}

impl<P> Drop for EntryRef<P>
where
    P: Deref,
    P::Target: FileSystem,
{
    fn drop(&mut self) {
        self.fs.forget(self.entry.attr.ino, 1);
    }
}

impl<P> EntryRef<P>
where
    P: Deref,
    P::Target: FileSystem,
{
    /// Takes over the reference to an entry that was looked up or made.
    pub fn new(fs: P, entry: Entry) -> EntryRef<P> {
        EntryRef { fs, entry }
    }

    /// Finds an entry by its name.
    ///
    /// # Errors
    /// Those of [`FileSystem::lookup`].
    pub fn find(fs: P, parent: Ino, name: &OsStr) -> Result<EntryRef<P>> {
        let entry = fs.lookup(parent, name)?;
        Ok(EntryRef::new(fs, entry))
    }

    /// Its number.
    pub fn ino(&self) -> Ino {
        self.entry.attr.ino
    }

    /// Its attributes when it was looked up.
    pub fn attr(&self) -> &Attr {
        &self.entry.attr
    }

    /// The file system that it lies in.
    pub fn fs(&self) -> &P {
        &self.fs
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.entry.attr.kind == Kind::Dir
    }

    /// The entry of this directory with a name.
    ///
    /// # Errors
    /// [`VaultError::NotDirectory`]; those of [`FileSystem::lookup`].
    pub fn child(&self, name: &OsStr) -> Result<EntryRef<P>>
    where
        P: Clone,
    {
        match self.is_dir() {
            true => EntryRef::find(self.fs.clone(), self.ino(), name),
            false => Err(VaultError::NotDirectory),
        }
    }

    /// The same; `None` if there is none.
    ///
    /// # Errors
    /// As [`EntryRef::child`].
    pub fn child_if_there(&self, name: &OsStr) -> Result<Option<EntryRef<P>>>
    where
        P: Clone,
    {
        match self.child(name) {
            Err(VaultError::NotFound) => Ok(None),
            found => found.map(Some),
        }
    }

    /// Calls `each` for the entries of this directory except `.` and `..`.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn each_name(&self, each: &mut dyn FnMut(&OsStr, Kind)) -> Result<()> {
        each_name(&*self.fs, self.ino(), each)
    }

    /// The names in this directory except `.` and `..`, sorted.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn names(&self) -> Result<Vec<OsString>> {
        let mut names = Vec::new();
        self.each_name(&mut |name, _| names.push(name.to_owned()))?;
        names.sort_unstable();
        Ok(names)
    }

    /// Makes the names in this directory durable.
    ///
    /// # Errors
    /// Those of the store.
    pub fn sync_names(&self) -> Result<()> {
        in_dir(&*self.fs, self.ino(), |handle| self.fs.fsync_dir(handle))
    }

    /// Opens this file.
    ///
    /// # Errors
    /// Those of [`FileSystem::open_file`].
    pub fn open(self, access: Access) -> Result<OpenEntry<P>> {
        let handle = self.fs.open_file(self.ino(), access)?;
        Ok(OpenEntry { entry: self, handle })
    }
}

impl<F: FileSystem + ?Sized> EntryRef<&F> {
    /// The entry. Its reference passes to the caller.
    pub(crate) fn into_entry(self) -> Entry {
        let entry = self.entry;
        // Only the reference would be given back: a borrow needs no drop.
        std::mem::forget(self);
        entry
    }
}

/// An open file, with its entry. When it is dropped, its handle is closed without a report: whoever needs to know that
/// data are durable calls fsync before.
pub struct OpenEntry<P>
where
    P: Deref,
    P::Target: FileSystem,
{
    entry: EntryRef<P>,
    handle: HandleId,
}

impl<P> Drop for OpenEntry<P>
where
    P: Deref,
    P::Target: FileSystem,
{
    fn drop(&mut self) {
        // The vault keeps what it could not commit, and retries until it is closed.
        let _ = self.entry.fs.release(self.handle);
    }
}

impl<P> OpenEntry<P>
where
    P: Deref,
    P::Target: FileSystem,
{
    /// Takes over an open handle of an entry.
    pub fn new(entry: EntryRef<P>, handle: HandleId) -> OpenEntry<P> {
        OpenEntry { entry, handle }
    }

    /// The entry.
    pub fn entry(&self) -> &EntryRef<P> {
        &self.entry
    }

    /// The file system that it lies in.
    pub fn fs(&self) -> &P::Target {
        &self.entry.fs
    }

    /// Its handle, open as long as this exists.
    pub fn handle(&self) -> HandleId {
        self.handle
    }
}

/// Calls `each` for the entries of a directory except `.` and `..`.
///
/// # Errors
/// Those of the directory.
pub fn each_name(fs: &(impl FileSystem + ?Sized), dir: Ino, each: &mut dyn FnMut(&OsStr, Kind)) -> Result<()> {
    in_dir(fs, dir, |handle| {
        fs.read_dir(handle, 0, &mut |entry, _| {
            if entry.name != "." && entry.name != ".." {
                each(&entry.name, entry.kind);
            }
            true
        })
    })
}

/// Reads from `offset` on until `buf` is full or the file ends. Returns how many bytes there were.
///
/// # Errors
/// Those of [`FileSystem::read`].
pub fn read_full(fs: &(impl FileSystem + ?Sized), handle: HandleId, offset: u64, buf: &mut [u8]) -> Result<usize> {
    let mut filled = 0;
    while filled < buf.len() {
        match fs.read(handle, offset + filled as u64, &mut buf[filled..])? {
            0 => break,
            n => filled += n,
        }
    }
    Ok(filled)
}

/// Writes all of `data` at `offset` with `write`, which takes an offset and bytes, and returns how many it has written.
///
/// # Errors
/// Those of `write`; an I/O error if it takes none.
pub fn write_all(mut offset: u64, mut data: &[u8], mut write: impl FnMut(u64, &[u8]) -> Result<usize>) -> Result<()> {
    while !data.is_empty() {
        let written = write(offset, data)?;
        if written == 0 {
            return Err(VaultError::Io { op: "write", source: std::io::ErrorKind::WriteZero.into() });
        }
        offset += written as u64;
        data = &data[written..];
    }
    Ok(())
}

/// Opens a directory for one call. An error of the call comes before one of closing.
fn in_dir(fs: &(impl FileSystem + ?Sized), dir: Ino, call: impl FnOnce(HandleId) -> Result<()>) -> Result<()> {
    let handle = fs.open_dir(dir)?;
    let called = call(handle);
    called.and(fs.release_dir(handle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_written_even_if_each_call_takes_little() {
        let (data, mut store) = (b"0123456789", vec![0; 15]);
        let few = |at: u64, part: &[u8]| {
            let n = part.len().min(3);
            store[at as usize..][..n].copy_from_slice(&part[..n]);
            Ok(n)
        };
        write_all(5, data, few).unwrap();
        assert_eq!(store, b"\0\0\0\0\x000123456789");
        assert!(matches!(write_all(0, data, |_, _| Err(VaultError::NoData)), Err(VaultError::NoData)));
        let stuck = write_all(0, data, |_, _| Ok(0));
        assert!(matches!(stuck, Err(VaultError::Io { source, .. }) if source.kind() == std::io::ErrorKind::WriteZero));
        write_all(0, b"", |_, _| panic!("there is nothing to write")).unwrap();
    }
}
