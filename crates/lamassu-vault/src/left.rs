//! What a vault leaves to the next one over the same tree: when this host's turn ends, the vault is closed, and the
//! next turn opens another one (`docs/sharing.md`). Programs and the kernel continue to use their inode numbers and
//! handles.
//!
//! The anchor is asked for the names of each node: the node keeps those that still lead to it, and gets those that it
//! was given meanwhile. A handle is opened again when it is used. A node without any name is gone with the turn in
//! which it lost the last one.

use crate::dir::{OpenDir, Snapshot};
use crate::error::errno;
use crate::inode::NodeTable;
use crate::open::{Handle, OpenFile};
use crate::{Access, HandleId, Ino, Result, Vault, VaultError};
use lamassu_anchor::row::Content;
use lamassu_anchor::{EntryPlace, ObjectId, Token, Touched};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A directory deeper than this is not looked for.
const DEPTH_MAX: usize = 1_000;

/// See the module's head.
pub struct Left {
    nodes: NodeTable,
    handles: LeftHandles,
}

/// A handle that is opened again when it is used.
enum LeftHandle {
    File {
        ino: Ino,
        access: Access,
        /// Data written through it could not be committed: the next call reports that.
        is_lost: bool,
    },
    Dir {
        ino: Ino,
        parent: Ino,
        listing: Option<Arc<Snapshot>>,
    },
}

impl LeftHandle {
    /// Fails once if data written through it is lost.
    fn tell_lost(&mut self) -> Result<()> {
        match self {
            LeftHandle::File { is_lost, .. } if *is_lost => {
                *is_lost = false;
                Err(errno("commit what was written in an earlier turn", libc::EIO))
            }
            LeftHandle::File { .. } | LeftHandle::Dir { .. } => Ok(()),
        }
    }
}

/// All left handles, by id.
#[derive(Default)]
pub(crate) struct LeftHandles {
    is_any: AtomicBool,
    handles: Mutex<HashMap<u64, LeftHandle>>,
}

impl LeftHandles {
    fn of(handles: HashMap<u64, LeftHandle>) -> LeftHandles {
        LeftHandles { is_any: AtomicBool::new(!handles.is_empty()), handles: Mutex::new(handles) }
    }

    fn replace(&self, by: LeftHandles) {
        let handles = by.handles.into_inner();
        self.is_any.store(!handles.is_empty(), Ordering::Release);
        *self.handles.lock() = handles;
    }

    fn take(&self) -> HashMap<u64, LeftHandle> {
        self.is_any.store(false, Ordering::Release);
        std::mem::take(&mut *self.handles.lock())
    }

    /// Removes a handle that is closed before it was used again.
    pub fn remove(&self, id: HandleId) -> Option<()> {
        if !self.is_any.load(Ordering::Acquire) {
            return None;
        }
        let mut handles = self.handles.lock();
        let removed = handles.remove(&id.0).map(drop);
        self.is_any.store(!handles.is_empty(), Ordering::Release);
        removed
    }

    /// The result of a sync through a handle: its data was committed, or is lost.
    fn synced(&self, id: HandleId) -> Result<()> {
        match self.handles.lock().get_mut(&id.0) {
            Some(left) => left.tell_lost(),
            None => Err(VaultError::BadHandle),
        }
    }
}

impl Left {
    /// The kernel releases references.
    pub fn forget(&mut self, ino: Ino, count: u64) {
        self.nodes.forget(ino, count);
    }

    /// Closes a handle.
    ///
    /// # Errors
    /// [`VaultError::BadHandle`].
    pub fn release(&self, handle: HandleId) -> Result<()> {
        self.handles.remove(handle).ok_or(VaultError::BadHandle)
    }

    /// fsync(2) and close(2): the data was committed, or is lost, which is reported once.
    ///
    /// # Errors
    /// The loss; [`VaultError::BadHandle`].
    pub fn sync(&self, handle: HandleId) -> Result<()> {
        self.handles.synced(handle)
    }

    /// The number of open files.
    pub fn open_files(&self) -> usize {
        self.handles.handles.lock().values().filter(|left| matches!(left, LeftHandle::File { .. })).count()
    }
}

impl Vault {
    /// Closes the vault, and returns what is left for the next one. No call is under way, and none follows.
    ///
    /// # Errors
    /// Returned in addition to what is left: as [`Vault::close`].
    pub fn leave(&self) -> (Left, Result<()>) {
        let mut handles = self.left.take();
        let open = self.handles.take_all();
        let files: Vec<Arc<OpenFile>> = self.files.all();
        let done = self.close();
        let lost: HashSet<Ino> = match done {
            Ok(()) => HashSet::new(),
            Err(_) => files.iter().filter(|open| open.is_unsettled()).map(|open| open.ino).collect(),
        };
        for (id, handle) in open {
            let left = match handle {
                Handle::File { file, access } => {
                    LeftHandle::File { ino: file.ino, access, is_lost: access.write && lost.contains(&file.ino) }
                }
                Handle::Dir(dir) => LeftHandle::Dir { ino: dir.ino, parent: dir.parent, listing: dir.listing() },
            };
            handles.insert(id, left);
        }
        (Left { nodes: self.nodes.lock().take(), handles: LeftHandles::of(handles) }, done)
    }

    /// Continues with what an earlier vault over the same tree left. `touched`: what others have changed since; `None`:
    /// perhaps everything. No call is under way yet.
    ///
    /// # Errors
    /// Those of the anchor; then nothing was taken over.
    pub fn take_up(&self, left: Left, touched: Option<&Touched>) -> std::result::Result<(), (Box<Left>, VaultError)> {
        let Left { nodes, handles } = left;
        let own = std::mem::replace(&mut *self.nodes.lock(), nodes);
        if let Err(error) = self.find_again(touched) {
            let nodes = std::mem::replace(&mut *self.nodes.lock(), own);
            return Err((Box::new(Left { nodes, handles }), error));
        }
        self.left.replace(handles);
        Ok(())
    }

    /// Whether another host has changed a node since it was given to the kernel.
    pub(crate) fn is_changed_elsewhere(&self, ino: Ino) -> bool {
        self.nodes.lock().is_changed_elsewhere(ino)
    }

    /// Brings the names of all nodes up to date.
    fn find_again(&self, touched: Option<&Touched>) -> Result<()> {
        let Some(anchored) = &self.anchored else { return Ok(()) };
        self.nodes.lock().changed_elsewhere(|object| touched.is_none_or(|touched| touched.is_of(object)));
        let is_touched = |dir: ObjectId| touched.is_none_or(|touched| touched.dirs.contains(&dir));
        let named = self.nodes.lock().named_in(is_touched);
        for named in named {
            let place = anchored.place(named.dir, &named.link.name);
            if anchored.anchor.entry(&place)?.is_none_or(|entry| entry.object != named.object) {
                self.nodes.lock().remove_link(named.ino, named.link.parent, &named.link.name);
            }
        }
        let nameless = self.nodes.lock().nameless();
        // They were removed, or moved.
        let mut moved = HashSet::new();
        for object in nameless {
            match anchored.anchor.row(object) {
                Ok(_) => drop(moved.insert(object)),
                Err(lamassu_anchor::AnchorError::Unknown { .. }) => {
                    let mut nodes = self.nodes.lock();
                    if let Some(ino) = nodes.of_object(object) {
                        nodes.is_gone(ino);
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        let known = |object: &ObjectId| touched.is_some_and(|touched| touched.places.contains_key(object));
        let mut places = match moved.iter().all(known) {
            true => HashMap::new(),
            false => anchored.anchor.places_of(&moved)?,
        };
        places.extend(touched.into_iter().flat_map(|touched| touched.places.iter().map(|(of, place)| (*of, *place))));
        let mut finder = Finder { vault: self, places, listed: HashMap::new() };
        for object in moved {
            // If it is not found, the calls that need it report that.
            finder.node(object, 0)?;
        }
        Ok(())
    }

    /// The file of a handle, which may come from an earlier vault.
    pub(crate) fn file_of(&self, id: HandleId) -> Result<(Arc<OpenFile>, Access)> {
        match self.handles.file(id) {
            Err(VaultError::BadHandle) if self.left.is_any.load(Ordering::Acquire) => {
                self.open_again(id)?;
                self.handles.file(id)
            }
            found => found,
        }
    }

    /// The same for a directory.
    pub(crate) fn dir_of(&self, id: HandleId) -> Result<Arc<OpenDir>> {
        match self.handles.dir(id) {
            Err(VaultError::BadHandle) if self.left.is_any.load(Ordering::Acquire) => {
                self.open_again(id)?;
                self.handles.dir(id)
            }
            found => found,
        }
    }

    /// Whether another host has given a new name to a node whose known name is gone.
    fn find_name(&self, ino: Ino) -> Result<bool> {
        let (Some(anchored), Some(object)) = (&self.anchored, self.recorded(ino)?) else { return Ok(false) };
        if self.nodes.lock().is_named(ino) {
            return Ok(false);
        }
        let places = anchored.anchor.places_of(&HashSet::from([object]))?;
        let found = Finder { vault: self, places, listed: HashMap::new() }.node(object, 0)?;
        Ok(found == Some(ino))
    }

    fn open_again(&self, id: HandleId) -> Result<()> {
        let mut handles = self.left.handles.lock();
        // No entry: another call has reopened the handle, or it never existed.
        let Some(left) = handles.get_mut(&id.0) else { return Ok(()) };
        left.tell_lost()?;
        let handle = match left {
            LeftHandle::File { ino, access, .. } => {
                // Nothing is written in a shared turn.
                let writes = access.write && !self.options.read_only;
                let file = match self.acquire(*ino, writes) {
                    Err(VaultError::Stale) if self.find_name(*ino)? => self.acquire(*ino, writes),
                    acquired => acquired,
                }?;
                Handle::File { file, access: *access }
            }
            LeftHandle::Dir { ino, parent, listing } => {
                let dir = match self.dir(*ino) {
                    Ok(dir) => Some(dir),
                    Err(_) if self.is_removed_dir(*ino) => None,
                    Err(error) => return Err(error),
                };
                self.nodes.lock().pin(*ino);
                Handle::Dir(Arc::new(OpenDir::new(*ino, dir, *parent, listing.clone())))
            }
        };
        self.handles.put(id, handle);
        handles.remove(&id.0);
        self.left.is_any.store(!handles.is_empty(), Ordering::Release);
        Ok(())
    }
}

/// Finds objects in the store where the anchor says that they are.
struct Finder<'a> {
    vault: &'a Vault,
    places: HashMap<ObjectId, EntryPlace>,
    listed: HashMap<ObjectId, HashMap<Token, OsString>>,
}

impl Finder<'_> {
    /// The node of an object, with a name, and of all directories above it; `None`: the store does not show it.
    fn node(&mut self, object: ObjectId, depth: usize) -> Result<Option<Ino>> {
        let (known, above) = {
            let nodes = self.vault.nodes.lock();
            let known = nodes.of_object(object).filter(|ino| nodes.is_named(*ino));
            (known, known.map(|ino| nodes.dirs_of(ino)).unwrap_or_default())
        };
        if depth > DEPTH_MAX {
            return Ok(known);
        }
        // It still has its name, but a directory above it may have been moved.
        for dir in above {
            self.node(dir, depth + 1)?;
        }
        if known.is_some() {
            return Ok(known);
        }
        let Some(anchored) = &self.vault.anchored else { return Ok(None) };
        let place = match self.places.get(&object) {
            Some(place) => *place,
            None => match anchored.anchor.row(object)?.content {
                Content::Dir { parent, name, .. } => EntryPlace { dir: parent, name },
                _ => return Ok(None),
            },
        };
        // The remembered place may have been removed again.
        if anchored.anchor.entry(&place)?.is_none_or(|entry| entry.object != object) {
            return Ok(None);
        }
        let Some(parent) = self.node(place.dir, depth + 1)? else { return Ok(None) };
        let Ok(dir) = self.vault.dir(parent) else { return Ok(None) };
        let listed = self.listed.entry(place.dir).or_insert_with(|| {
            let entries = dir.handle.read_dir().unwrap_or_default().into_iter();
            entries.map(|entry| (anchored.place(place.dir, &entry.name).name, entry.name)).collect()
        });
        let Some(name) = listed.get(&place.name) else { return Ok(None) };
        let Ok(st) = dir.handle.stat_entry(name) else { return Ok(None) };
        Ok(self.vault.nodes.lock().met(parent, name, &st, object))
    }
}
