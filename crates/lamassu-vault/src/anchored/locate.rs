//! Where recovery finds recorded objects if the store has kept a given number of moves: directories by their objects,
//! entries by their tokens; and whether what is there matches the record.
//!
//! Nothing changes meanwhile. So what was seen of the store holds for every number: each directory is listed once, and
//! each entry is looked at once.
//!
//! What the store does not show is not there. If it fails to show something, nothing is known: that would speak against
//! the right number, and another one would be taken. So the first such error is kept ([`Located::failure`]).

use super::Anchored;
use super::history::History;
use crate::digests::{digest_of_dataset, digest_of_text, object_kind};
use crate::error::{io, is_not_found};
use crate::inode::StoreId;
use crate::record::read_text;
use crate::walk::header_id;
use crate::{Kind, Result, Vault, VaultError, symlink};
use lamassu_anchor::row::{Content, Sealed};
use lamassu_anchor::{AnchorError, Digest, EntryPlace, EntryRow, ObjectId, Row, Token};
use lamassu_format::name::DIR_RECORD;
use lamassu_store::backend::Stat;
use lamassu_store::{BackendDir, File, StoreError};
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;

/// A directory deeper than this is not looked for: its names stay as they are.
const DEPTH_MAX: usize = 1_000;

/// An entry in one of the places.
#[derive(Clone)]
pub(super) struct Item {
    pub dir: Arc<dyn BackendDir>,
    pub name: OsString,
    pub st: Stat,
    /// Among all entries that were seen.
    number: usize,
}

impl Item {
    /// An entry that is there now.
    pub fn now(dir: Arc<dyn BackendDir>, name: OsString, st: Stat) -> Item {
        Item { dir, name, st, number: usize::MAX }
    }

    pub fn is_dir(&self) -> bool {
        self.st.kind == Kind::Dir
    }
}

/// A directory of the store.
#[derive(Clone)]
struct Found {
    dir: Arc<dyn BackendDir>,
    id: StoreId,
}

/// An entry of the store. `None`: it was not looked at, or opened, yet; inside: it is not there.
struct Entry {
    name: OsString,
    st: Option<Option<Stat>>,
    opened: Option<Option<Found>>,
}

/// The store as it would be if it had kept `kept` moves.
pub(super) struct Located<'a> {
    vault: &'a Vault,
    anchored: &'a Anchored,
    history: &'a History,
    kept: usize,
    /// Directories that were looked for, with this number.
    dirs: HashMap<ObjectId, Option<Found>>,
    looking_for: HashSet<ObjectId>,
    /// What was seen, with any number.
    entries: Vec<Entry>,
    listed: HashMap<(ObjectId, StoreId), HashMap<Token, usize>>,
    fitting: HashMap<(ObjectId, usize), bool>,
    failure: Option<VaultError>,
}

impl<'a> Located<'a> {
    pub fn new(vault: &'a Vault, anchored: &'a Anchored, history: &'a History, kept: usize) -> Located<'a> {
        Located {
            vault,
            anchored,
            history,
            kept,
            dirs: HashMap::new(),
            looking_for: HashSet::new(),
            entries: Vec::new(),
            listed: HashMap::new(),
            fitting: HashMap::new(),
            failure: None,
        }
    }

    /// Goes on with another number. `is_elsewhere`: a directory that was looked for lies elsewhere then.
    pub fn set_kept(&mut self, kept: usize, is_elsewhere: bool) {
        self.kept = kept;
        if is_elsewhere {
            self.dirs.clear();
        }
    }

    /// Whether an object was looked for as a directory.
    pub fn has_looked_for(&self, object: ObjectId) -> bool {
        self.dirs.contains_key(&object)
    }

    /// The first error that left something unknown.
    pub fn failure(&mut self) -> Result<()> {
        self.failure.take().map_or(Ok(()), Err)
    }

    /// What the store shows; `None`: nothing is there, or this process may not see it, whatever the number is.
    fn seen<T>(&mut self, op: &'static str, done: stdio::Result<T>) -> Option<T> {
        let error = match done {
            Ok(seen) => return Some(seen),
            Err(error) => error,
        };
        let is_absent = is_not_found(&error)
            // Not what a record may be.
            || matches!(error.kind(), stdio::ErrorKind::PermissionDenied | stdio::ErrorKind::InvalidData)
            || matches!(error.raw_os_error(), Some(libc::ENOTDIR | libc::EISDIR | libc::ELOOP | libc::EINVAL));
        if !is_absent {
            tracing::error!(op, %error, "recovery of names cannot look at an entry");
            self.failed(io(op)(error));
        }
        None
    }

    fn failed(&mut self, error: VaultError) {
        self.failure.get_or_insert(error);
    }

    /// The entry at a place.
    pub fn item(&mut self, place: EntryPlace) -> Option<Item> {
        let found = self.found(place.dir)?;
        let number = self.entry_in(place, &found)?;
        let st = match self.entries.get(number)?.st {
            Some(st) => st,
            None => {
                let st = found.dir.stat_entry(&self.entries.get(number)?.name);
                let st = self.seen("stat", st);
                self.entries.get_mut(number)?.st = Some(st);
                st
            }
        }?;
        Some(Item { dir: found.dir, name: self.entries.get(number)?.name.clone(), st, number })
    }

    fn entry_in(&mut self, place: EntryPlace, found: &Found) -> Option<usize> {
        let key = (place.dir, found.id);
        if !self.listed.contains_key(&key) {
            let listed = self.seen("list a directory", found.dir.read_dir()).unwrap_or_default();
            let mut numbers = HashMap::with_capacity(listed.len());
            for entry in listed {
                numbers.insert(self.anchored.place(place.dir, &entry.name).name, self.entries.len());
                self.entries.push(Entry { name: entry.name, st: None, opened: None });
            }
            self.listed.insert(key, numbers);
        }
        self.listed.get(&key)?.get(&place.name).copied()
    }

    /// A directory at its place then.
    pub fn dir(&mut self, object: ObjectId) -> Option<Arc<dyn BackendDir>> {
        self.found(object).map(|found| found.dir)
    }

    fn found(&mut self, object: ObjectId) -> Option<Found> {
        if let Some(found) = self.dirs.get(&object) {
            return found.clone();
        }
        // A directory cannot contain itself.
        if self.looking_for.len() >= DEPTH_MAX || !self.looking_for.insert(object) {
            return None;
        }
        let found = if object == ObjectId::ROOT {
            let dir = self.vault.dirs.root().handle.clone();
            let st = dir.stat();
            self.seen("stat", st).map(|st| Found { dir, id: StoreId::from(&st) })
        } else {
            self.place_of(object).and_then(|place| self.item(place)).and_then(|item| self.opened(&item))
        };
        self.looking_for.remove(&object);
        self.dirs.insert(object, found.clone());
        found
    }

    fn place_of(&mut self, object: ObjectId) -> Option<EntryPlace> {
        match self.row(object).map(|row| row.content) {
            Some(Content::Dir { parent, name, .. }) => {
                self.history.recorded_at(EntryPlace { dir: parent, name }, self.kept)
            }
            Some(_) => None,
            None => self.history.removed_at(object, self.kept),
        }
    }

    fn row(&mut self, object: ObjectId) -> Option<Row> {
        match self.anchored.anchor.row(object) {
            Ok(row) => Some(row),
            Err(AnchorError::Unknown { .. }) => None,
            Err(error) => {
                self.failed(error.into());
                None
            }
        }
    }

    fn opened(&mut self, item: &Item) -> Option<Found> {
        if !item.is_dir() {
            return None;
        }
        if let Some(opened) = self.entries.get(item.number).and_then(|entry| entry.opened.clone()) {
            return opened;
        }
        let opened = item.dir.open_dir(&item.name).and_then(|dir| {
            let id = StoreId::from(&dir.stat()?);
            Ok(Found { dir, id })
        });
        let opened = self.seen("open a directory", opened);
        if let Some(entry) = self.entries.get_mut(item.number) {
            entry.opened = Some(opened.clone());
        }
        opened
    }

    /// Whether an item is the object of an entry, by its row.
    pub fn fits(&mut self, entry: &EntryRow, item: &Item) -> bool {
        let key = (entry.object, item.number);
        if let Some(fits) = self.fitting.get(&key) {
            return *fits;
        }
        let fits = self.look_whether_it_fits(entry, item);
        self.fitting.insert(key, fits);
        fits
    }

    fn look_whether_it_fits(&mut self, entry: &EntryRow, item: &Item) -> bool {
        let Some(row) = self.row(entry.object) else { return false };
        if object_kind(item.st.kind) != entry.kind || row.kind() != entry.kind {
            return false;
        }
        match &row.content {
            Content::File(_) => self.is_file(entry.object, item),
            Content::Dir { record, .. } => self.is_dir(entry.object, *record, item),
            Content::Link(target) => self.link_digest(item).is_some_and(|seen| target.is_current(seen)),
            Content::Char(device) | Content::Block(device) => item.st.rdev == *device,
            Content::Fifo | Content::Socket => true,
        }
    }

    /// A file matches its row if its first page does.
    fn is_file(&mut self, object: ObjectId, item: &Item) -> bool {
        let opened = item.dir.open_same(&item.name, &item.st, false);
        let Some(Some(backing)) = self.seen("open a file", opened) else { return false };
        let tag = item.name.to_string_lossy();
        // A mismatch here is no damage.
        let file = File::open_object(self.vault.ctx_silent.clone(), backing, item.st.len, &tag, object);
        match file.and_then(|file| file.read_at(0, &mut [0])) {
            Ok(_) => true,
            Err(StoreError::Io { op, source, .. }) => {
                self.seen::<()>(op, Err(source));
                false
            }
            Err(error @ StoreError::Anchor(_)) => {
                self.failed(error.into());
                false
            }
            Err(_) => false,
        }
    }

    /// A directory matches by its record; if it has none, by the entries recorded in it.
    fn is_dir(&mut self, object: ObjectId, record: Sealed, item: &Item) -> bool {
        let Some(Found { dir, .. }) = self.opened(item) else { return false };
        if record != Sealed::Nothing {
            let text = read_text(&*dir, OsStr::new(DIR_RECORD));
            let seen = self.seen("read a record", text).map_or(Digest::NONE, |text| digest_of_text(&text));
            if record.is_current(seen) {
                return true;
            }
            let dataset = self.seen("read a dataset's header", header_id(&*dir)).flatten();
            return dataset.is_some_and(|id| record.is_current(digest_of_dataset(&id)));
        }
        let recorded = match self.anchored.anchor.entries(object) {
            Ok(recorded) => recorded,
            Err(error) => {
                self.failed(error.into());
                return false;
            }
        };
        let listed = self.seen("list a directory", dir.read_dir()).unwrap_or_default();
        let shown: HashSet<Token> = listed.iter().map(|entry| self.anchored.place(object, &entry.name).name).collect();
        let is_moved = |name: &Token| self.history.places.contains(&EntryPlace { dir: object, name: *name });
        recorded.keys().all(|name| shown.contains(name) || is_moved(name))
    }

    fn link_digest(&mut self, item: &Item) -> Option<Digest> {
        let mut text = self.seen("read a link", item.dir.read_link(&item.name))?.into_vec();
        if let Some(rest) = symlink::rest_of(&self.vault.ctx.ring, &*item.dir, &item.name, &item.st) {
            text.extend(self.seen("read a companion", read_text(&*item.dir, &rest))?);
        }
        Some(digest_of_text(&text))
    }
}
