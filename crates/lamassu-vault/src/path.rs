//! Paths for tools: plain to stored and back. Nothing here follows a symbolic link.

use crate::error::io;
use crate::names::NameFault;
use crate::reference::EntryRef;
use crate::{Entry, FileSystem, ROOT, Result, Vault, VaultError};
use lamassu_anchor::ObjectId;
use std::ffi::OsStr;
use std::ops::Deref;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// The components of a path relative to the root.
pub(crate) fn components(path: &OsStr) -> Result<Vec<&OsStr>> {
    path.as_bytes()
        .split(|&b| b == b'/')
        .map(OsStr::from_bytes)
        .filter(|c| !c.is_empty() && *c != ".")
        .map(|c| if c == ".." { Err(VaultError::Invalid) } else { Ok(c) })
        .collect()
}

/// The entry that the names of a path lead to from `top`.
///
/// # Errors
/// [`VaultError::NotDirectory`]; those of the lookups.
pub(crate) fn descend<P>(top: EntryRef<P>, names: &[&OsStr]) -> Result<EntryRef<P>>
where
    P: Deref + Clone,
    P::Target: FileSystem,
{
    names.iter().try_fold(top, |at, name| at.child(name))
}

impl Vault {
    /// The entry at a plain path, one reference counted. Components are separated by `/`; empty ones and `.` are
    /// skipped.
    ///
    /// # Errors
    /// [`VaultError::Invalid`] for a path with `..`; those of [`Vault::lookup`].
    pub fn resolve(&self, path: &OsStr) -> Result<Entry> {
        self.found_at(&components(path)?).map(EntryRef::into_entry)
    }

    fn found_at(&self, names: &[&OsStr]) -> Result<EntryRef<&Vault>> {
        let root = {
            let _tree = self.tree.read();
            let attr = self.getattr_locked(ROOT)?;
            self.nodes.lock().add_reference(ROOT);
            Entry { attr, generation: 0 }
        };
        descend(EntryRef::new(self, root), names)
    }

    /// Path in the store of the entry at a plain path.
    ///
    /// # Errors
    /// As [`Vault::resolve`].
    pub fn stored_path(&self, path: &OsStr) -> Result<PathBuf> {
        let names = components(path)?;
        let _entry = self.found_at(&names)?;
        let mut dir = self.dirs.root().handle.clone();
        let mut stored = PathBuf::new();
        let last = names.len().saturating_sub(1);
        for (i, name) in names.iter().enumerate() {
            let kept = self.read_names(&*dir).map_err(|_| VaultError::Stale)?.seal(name)?;
            if i < last {
                dir = dir.open_dir(&kept.name).map_err(io("open a directory"))?;
            }
            stored.push(kept.name);
        }
        Ok(stored)
    }

    /// Plain path of the entry at a path in the store, relative to the vault's directory.
    ///
    /// # Errors
    /// [`VaultError::Invalid`] for a path that leaves the vault, [`VaultError::InvalidName`] for the format's own
    /// files, [`VaultError::NotFound`] if nothing is there, [`VaultError::Damaged`] if a record or name does not open.
    pub fn plain_path(&self, stored: &Path) -> Result<PathBuf> {
        let mut dir = self.dirs.root().handle.clone();
        let mut object = ObjectId::ROOT;
        let mut plain = PathBuf::new();
        let mut walked = PathBuf::new();
        let mut parts = stored.components().filter(|c| *c != Component::CurDir).peekable();
        while let Some(part) = parts.next() {
            let Component::Normal(name) = part else { return Err(VaultError::Invalid) };
            let damaged = |what, at: &Path| VaultError::Damaged { what, stored: at.display().to_string() };
            let names = self.read_names(&*dir).map_err(|_| damaged("directory record", &walked))?;
            walked.push(name);
            let opened = names.open(&*dir, name);
            // The format's own files are no entries: the anchor does not know them either.
            if !matches!(opened, Ok(None)) {
                object = self.recorded_in(&*dir, object, name, &walked)?;
            }
            match opened {
                Ok(Some(name)) => plain.push(name),
                Ok(None) => return Err(VaultError::InvalidName),
                Err(NameFault::NoCompanion | NameFault::WrongCompanion) => return Err(damaged("companion", &walked)),
                Err(NameFault::Unreadable(error)) => return Err(io("read a companion")(error)),
                Err(_) => return Err(damaged("name", &walked)),
            }
            if parts.peek().is_some() {
                dir = dir.open_dir(name).map_err(io("open a directory"))?;
            }
        }
        Ok(plain)
    }
}
