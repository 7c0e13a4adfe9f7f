//! Listings. A listing takes a snapshot of the stored names at its start and after a rewind. Names are opened when they
//! are handed out.
//!
//! A snapshot lives until its handle is closed, so it is kept small. [`Vault::listing_bytes`] gives its size, so that
//! front-ends can limit what a user holds.

use crate::dirs::Dir;
use crate::error::{io, is_not_found, no_outcome};
use crate::event::IntegrityKind;
use crate::handles::Handle;
use crate::listing::{Listed, OpenDir, Snapshot};
use crate::names::NameFault;
use crate::{DirEntry, Entry, HandleId, Ino, Kind, ROOT, Result, Vault, VaultError};
use crate::{digests, walk};
use lamassu_store::backend;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::sync::Arc;

/// Cookies of the entries begin here; 1 and 2 come after `.` and `..`.
const FIRST: u64 = 2;

/// An element of a listing.
enum Item<'a> {
    /// `.` or `..`.
    Dot(DirEntry),
    /// An entry of the store, and its plain name.
    Named(Listed<'a>, OsString),
}

/// Takes the directory, an element, and the cookie that comes after it. False: it has enough.
type Each<'a> = &'a mut dyn FnMut(&Dir, Item<'_>, u64) -> Result<bool>;

impl Vault {
    /// Opens a directory for listing. A directory that was removed since the front-end found it opens too, as on a
    /// local file system: another directory may have its name by now, so no error would be right.
    ///
    /// # Errors
    /// [`VaultError::NotDirectory`], [`VaultError::Stale`], [`VaultError::Damaged`] if its record does not open, those
    /// of the store.
    pub fn open_dir(&self, ino: Ino) -> Result<HandleId> {
        let opened = {
            let _tree = self.tree.read();
            self.dir(ino)
        };
        let dir = match opened.and_then(|dir| self.names(&dir).map(drop).map(|()| dir)) {
            Ok(dir) => Some(dir),
            Err(_) if self.is_removed_dir(ino) => None,
            Err(error) => return Err(error),
        };
        let parent = self.nodes.lock().parent(ino).unwrap_or(ROOT);
        self.nodes.lock().pin(ino);
        Ok(self.handles.add(Handle::Dir(Arc::new(OpenDir::new(ino, dir, parent, None)))))
    }

    /// The same, if the result is still valid when the call ends (R4 of `docs/sharing.md`).
    pub(crate) fn open_dir_now(&self, ino: Ino) -> Result<HandleId> {
        let handle = self.open_dir(ino)?;
        self.verify_current().inspect_err(|_| drop(self.release_dir(handle)))?;
        Ok(handle)
    }

    /// Calls `fill(entry, next_cookie)` from `cookie` (0: the start, with `.` and `..` first) until it returns false
    /// (the reply is full) or the listing ends. Entries whose names do not open are left out and logged; `check` lists
    /// them.
    ///
    /// # Errors
    /// [`VaultError::BadHandle`], those of the store. At the end, after all entries were handed out:
    /// [`VaultError::Outdated`] if the store lacks entries, and the error of the store if it could not read a name.
    pub fn read_dir(&self, handle: HandleId, cookie: u64, fill: &mut dyn FnMut(&DirEntry, u64) -> bool) -> Result<()> {
        let open = self.dir_of(handle)?;
        self.list(&open, cookie, &mut |dir, item, at| match item {
            Item::Dot(entry) => Ok(fill(&entry, at)),
            Item::Named(listed, name) => {
                // It may be gone since the snapshot was taken.
                let kind = listed.kind.or_else(|| dir.handle.stat_entry(listed.name).ok().map(|st| st.kind));
                let ino = self.nodes.lock().shown(dir.dev, listed.ino);
                Ok(kind.is_none_or(|kind| fill(&DirEntry { ino, kind, name }, at)))
            }
        })
    }

    /// The same, with what [`Vault::lookup`] finds of each entry except `.` and `..`, and with a reference to it.
    /// `fill` takes over the reference whatever it returns. Entries removed since the listing began are left out.
    ///
    /// # Errors
    /// Those of [`Vault::read_dir`]; entries that `fill` has taken may have come before.
    pub fn read_dir_plus(
        &self,
        handle: HandleId,
        cookie: u64,
        fill: &mut dyn FnMut(&DirEntry, Option<Entry>, u64) -> bool,
    ) -> Result<()> {
        let open = self.dir_of(handle)?;
        self.list(&open, cookie, &mut |dir, item, at| match item {
            Item::Dot(entry) => Ok(fill(&entry, None, at)),
            Item::Named(listed, name) => {
                let entry = match self.entry_stored(dir, listed.name, listed.ino) {
                    Ok(entry) => entry,
                    // It was removed since the listing began.
                    Err(VaultError::NotFound) if !self.is_recorded(dir, listed.name)? => return Ok(true),
                    // Its name is listed. Looking the entry up gives the error.
                    Err(_) => {
                        let kind = listed.kind.unwrap_or(Kind::File);
                        let ino = self.nodes.lock().shown(dir.dev, listed.ino);
                        return Ok(fill(&DirEntry { ino, kind, name }, None, at));
                    }
                };
                Ok(fill(&DirEntry { ino: entry.attr.ino, kind: entry.attr.kind, name }, Some(entry), at))
            }
        })
    }

    /// Goes through the entries from `cookie` on until `each` returns false.
    fn list(&self, open: &OpenDir, cookie: u64, each: Each<'_>) -> Result<()> {
        self.read_current(|| self.go_through(open, cookie, each))
    }

    fn go_through(&self, open: &OpenDir, cookie: u64, each: Each<'_>) -> Result<()> {
        let dir = open.dir.as_deref().ok_or(VaultError::NotFound)?;
        let entries = open.entries(cookie, || self.snapshot(dir))?;
        let dots = [(".", open.ino), ("..", open.parent)];
        for (at, (name, ino)) in (1..).zip(dots) {
            if cookie < at && !each(dir, Item::Dot(DirEntry { ino, kind: Kind::Dir, name: name.into() }), at)? {
                return Ok(());
            }
        }
        let names = self.names(dir)?;
        let from = cookie.saturating_sub(FIRST);
        let skipped = usize::try_from(from).map_err(|_| VaultError::Invalid)?;
        // Any cookie may be asked for (seekdir(3)), also one past the last entry.
        for (index, listed) in entries.from(skipped) {
            let at = index as u64 + FIRST + 1;
            match names.open(&*dir.handle, listed.name) {
                Ok(None) => {}
                Ok(Some(name)) => {
                    if !each(dir, Item::Named(listed, name), at)? {
                        return Ok(());
                    }
                }
                // The store failed, which says nothing about the entry. The others follow.
                Err(NameFault::Unreadable(error)) => entries.lacks_unread(&error),
                Err(fault) => {
                    let path = self.path_in(open.ino, listed.name).display().to_string();
                    let text = format!("left out of a listing, its name does not open: {fault}");
                    self.tell(IntegrityKind::from(&fault).at(path, text).of_inode(listed.ino));
                    if self.is_recorded(dir, listed.name)? {
                        entries.lacks_one();
                    }
                }
            }
        }
        match entries.is_incomplete() {
            // An entry may be under the other name of such a move.
            true if entries.had_unsettled => Err(no_outcome()),
            true => Err(self.outdated("listing", open.ino, OsStr::new(""))),
            false => entries.unread().map_or(Ok(()), |error| Err(io("read a companion")(error))),
        }
    }

    /// Whether the anchor has an entry of this stored name; in an unanchored vault nothing is recorded.
    fn is_recorded(&self, dir: &Dir, stored: &OsStr) -> Result<bool> {
        let Some(anchored) = &self.anchored else { return Ok(false) };
        Ok(anchored.anchor.entry(&anchored.place(dir.object, stored))?.is_some())
    }

    /// The entries that users see in a directory: in an anchored vault those that the anchor has and the store shows.
    fn snapshot(&self, dir: &Dir) -> Result<Snapshot> {
        let Some(anchored) = &self.anchored else {
            return Ok(Snapshot::of(dir.handle.read_dir().map_err(|e| self.not_listed(dir, e))?, false));
        };
        let (entries, mut recorded, has_unsettled) = {
            let _tree = self.tree.read();
            let _names = self.names_of(dir.ino).read();
            let has_unsettled = anchored.has_unsettled() && anchored.must_stay_in(dir.object);
            (dir.handle.read_dir(), anchored.anchor.entries(dir.object)?, has_unsettled)
        };
        let entries = entries.map_err(|e| self.not_listed(dir, e))?;
        let (mut shown, mut unrecorded) = (Vec::with_capacity(recorded.len()), Vec::new());
        for entry in entries {
            match recorded.remove(&anchored.place(dir.object, &entry.name).name) {
                Some(of) => shown.push(backend::Listed { kind: Some(digests::kind(of.kind)), ..entry }),
                None if walk::is_entry(self.name_mode, &entry.name) => unrecorded.push(entry.name),
                None => {}
            }
        }
        self.meet_unrecorded(dir, &unrecorded);
        Ok(Snapshot::of(shown, !recorded.is_empty()).beside_unsettled(has_unsettled))
    }

    /// The error of a directory that cannot be listed. The store answers `ENOENT` for a directory that it removed,
    /// which programs take for the end of a listing (readdir(3)). It is returned only for a directory that was removed
    /// through the vault.
    fn not_listed(&self, dir: &Dir, error: stdio::Error) -> VaultError {
        if !is_not_found(&error) || self.has_left(dir.ino) {
            return io("list a directory")(error);
        }
        match &self.anchored {
            Some(_) => self.outdated("directory", dir.ino, OsStr::new("")),
            None => VaultError::Stale,
        }
    }

    /// The memory that the listing of an open directory takes until it is closed, bytes.
    pub fn listing_bytes(&self, handle: HandleId) -> usize {
        let open = self.dir_of(handle).ok();
        open.and_then(|open| open.listing()).map_or(0, |entries| entries.bytes())
    }

    /// Closes a directory.
    ///
    /// # Errors
    /// [`VaultError::BadHandle`].
    pub fn release_dir(&self, handle: HandleId) -> Result<()> {
        if self.left.remove(handle).is_some() {
            return Ok(());
        }
        let open = self.handles.dir(handle)?;
        if self.handles.remove(handle).is_some() {
            self.nodes.lock().unpin(open.ino);
        }
        Ok(())
    }
}
