//! What a vault leaves to the next one over the same tree: when this host's turn ends, the vault is closed, and the
//! next turn opens another one (`docs/sharing.md`). Programs and the kernel continue to use their inode numbers and
//! handles.
//!
//! The anchor is asked for the names of each node: the node keeps those that still lead to it, and gets those that it
//! was given meanwhile. A handle is opened again when it is used. A node without any name is gone with the turn in
//! which it lost the last one, unless it is an open file that this host has removed or replaced ([`crate::nameless`]).
//! A directory that another host has removed was empty, and stays so for those who have it ([`Vault::dir_of_names`]).
//! A node that no commit has recorded is gone with a turn that is lost: another host may have given its number to
//! something else.

use crate::error::errno;
use crate::handles::{Handle, OpenFile, fresh_handle};
use crate::inode::{Go, NodeTable};
use crate::listing::{OpenDir, Snapshot};
use crate::moved::Moved;
use crate::nameless::NamelessFile;
use crate::{Access, HandleId, Ino, ROOT, Result, Vault, VaultError};
use lamassu_anchor::row::Content;
use lamassu_anchor::{EntryPlace, ObjectId, Token, Touched};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A directory deeper than this is not looked for.
const DEPTH_MAX: usize = 1_000;

/// The nodes and handles that one vault leaves to the next one over the same tree.
pub struct Left {
    nodes: NodeTable,
    handles: LeftHandles,
    /// Open files without a name.
    nameless: HashMap<Ino, NamelessFile>,
    /// Objects that are gone, of which there may be tree records: files that were closed since, and what the last vault
    /// has left of that work. All with numbers that a commit has recorded: others may be another host's by now.
    gone: Vec<ObjectId>,
    /// For the walk over the tree that is under way.
    moved: Option<Arc<Moved>>,
}

/// A handle that is opened again when it is used.
enum LeftHandle {
    File {
        ino: Ino,
        access: Access,
    },
    Dir {
        ino: Ino,
        parent: Ino,
        listing: Option<Arc<Snapshot>>,
    },
    /// Of the root, for requests to the daemon alone: it is never opened again.
    Requests,
}

impl LeftHandle {
    fn of_file(&self) -> Option<Ino> {
        if let LeftHandle::File { ino, .. } = self { Some(*ino) } else { None }
    }

    fn ino(&self) -> Ino {
        match self {
            LeftHandle::File { ino, .. } | LeftHandle::Dir { ino, .. } => *ino,
            LeftHandle::Requests => ROOT,
        }
    }
}

/// All left handles, by id.
#[derive(Default)]
pub(crate) struct LeftHandles {
    is_any: AtomicBool,
    all: Mutex<AllLeft>,
    /// Of which files there were any when the turn began. Held for a moment only: callers hold other locks.
    files: Mutex<HashSet<Ino>>,
}

#[derive(Default)]
struct AllLeft {
    handles: HashMap<u64, LeftHandle>,
    /// Handles, also those that were opened again, through which something was written that could not be committed.
    /// An fsync or a write through one fails once. A close fails as well, but each process that inherited the
    /// descriptor closes it: so that does not count as the report.
    lost: HashSet<u64>,
}

impl LeftHandles {
    fn of(all: AllLeft) -> LeftHandles {
        let left = LeftHandles::default();
        left.change(|now| *now = all);
        left
    }

    fn change<T>(&self, change: impl FnOnce(&mut AllLeft) -> T) -> T {
        let mut all = self.all.lock();
        let done = change(&mut all);
        self.is_any.store(!(all.handles.is_empty() && all.lost.is_empty()), Ordering::Release);
        done
    }

    fn replace(&self, by: LeftHandles) {
        let all = by.all.into_inner();
        *self.files.lock() = all.handles.values().filter_map(LeftHandle::of_file).collect();
        self.change(|now| *now = all);
    }

    fn take(&self) -> AllLeft {
        self.change(std::mem::take)
    }

    /// A handle is closed. `None`: it was opened again, or is of this vault.
    pub fn remove(&self, id: HandleId) -> Option<()> {
        if !self.is_any.load(Ordering::Acquire) {
            return None;
        }
        self.change(|all| {
            all.lost.remove(&id.0);
            all.handles.remove(&id.0).map(drop)
        })
    }

    /// Fails if what was written through a handle is lost; `once`: and not again.
    pub fn tell_lost(&self, id: HandleId, once: bool) -> Result<()> {
        if !self.is_any.load(Ordering::Acquire) {
            return Ok(());
        }
        let is_lost = self.change(|all| if once { all.lost.remove(&id.0) } else { all.lost.contains(&id.0) });
        match is_lost {
            true => Err(errno("commit what was changed in an earlier turn", libc::EIO)),
            false => Ok(()),
        }
    }

    /// Whether a file had any when the turn began.
    pub fn had_file(&self, ino: Ino) -> bool {
        self.files.lock().contains(&ino)
    }

    /// A handle of the root for requests to the daemon alone.
    fn add_for_requests(&self) -> HandleId {
        let id = fresh_handle();
        self.change(|all| all.handles.insert(id.0, LeftHandle::Requests));
        id
    }

    fn has(&self, id: HandleId) -> Result<()> {
        match self.all.lock().handles.contains_key(&id.0) {
            true => Ok(()),
            false => Err(VaultError::BadHandle),
        }
    }
}

impl Left {
    /// Opens the root for requests to the daemon alone.
    pub fn open_for_requests(&self) -> HandleId {
        self.handles.add_for_requests()
    }

    /// Whether something was written that could not be committed.
    pub fn has_lost(&self) -> bool {
        !self.handles.all.lock().lost.is_empty()
    }

    /// The kernel's references.
    pub fn references(&self) -> Vec<(Ino, u64)> {
        self.nodes.references()
    }

    /// The kernel releases references.
    pub fn forget(&mut self, ino: Ino, count: u64) {
        self.nodes.forget(ino, count);
        if self.nodes.kind(ino).is_none()
            && let Some(file) = self.nameless.remove(&ino)
        {
            self.gone.push(file.object);
        }
    }

    /// The object of a node; the default one: there is no such node.
    pub fn object_of(&self, ino: Ino) -> ObjectId {
        self.nodes.object(ino)
    }

    /// Closes a handle.
    ///
    /// # Errors
    /// [`VaultError::BadHandle`].
    pub fn release(&self, handle: HandleId) -> Result<()> {
        self.handles.remove(handle).ok_or(VaultError::BadHandle)
    }

    /// fsync(2): what was written is committed, or lost, which is reported once.
    ///
    /// # Errors
    /// The loss; [`VaultError::BadHandle`].
    pub fn sync(&self, handle: HandleId) -> Result<()> {
        self.handles.has(handle)?;
        self.handles.tell_lost(handle, true)
    }

    /// close(2) of one descriptor of a handle: as fsync(2), which still reports a loss after this.
    ///
    /// # Errors
    /// As [`Left::sync`].
    pub fn flush(&self, handle: HandleId) -> Result<()> {
        self.handles.has(handle)?;
        self.handles.tell_lost(handle, false)
    }

    /// The number of open files.
    pub fn open_files(&self) -> usize {
        self.handles.all.lock().handles.values().filter(|left| matches!(left, LeftHandle::File { .. })).count()
    }
}

impl Vault {
    /// The object of a node; the default one: there is no such node, or no anchor.
    pub(crate) fn object_of(&self, ino: Ino) -> ObjectId {
        self.nodes.lock().object(ino)
    }

    /// The objects of files that programs have open.
    pub(crate) fn open_objects(&self) -> HashMap<Ino, ObjectId> {
        let mut open = self.handles.file_inos();
        open.extend(self.left.all.lock().handles.values().map(LeftHandle::ino));
        let nodes = self.nodes.lock();
        open.into_iter().map(|ino| (ino, nodes.object(ino))).collect()
    }

    /// Closes the vault, and returns what is left for the next one. No call is under way, and none follows.
    ///
    /// # Errors
    /// Returned in addition to what is left: as [`Vault::close`].
    pub fn leave(&self) -> (Left, Result<()>) {
        let mut left_handles = self.left.take();
        let open = self.handles.take_all();
        let mut files: Vec<Arc<OpenFile>> = self.files.all();
        // Before: settling writes pages again whose content is committed. A file that was written to the store, and
        // that no barrier covers, need not be unsettled.
        files.retain(|open| open.is_writable() && open.file().has_uncommitted());
        let opened = open.into_iter().map(|(id, handle)| match handle {
            Handle::File { file, access } => (id, LeftHandle::File { ino: file.ino, access }),
            Handle::Dir(dir) => (id, LeftHandle::Dir { ino: dir.ino, parent: dir.parent, listing: dir.listing() }),
        });
        left_handles.handles.extend(opened);
        let nameless = self.open_without_name(left_handles.handles.values().filter_map(LeftHandle::of_file).collect());
        let done = self.close();
        let uncommitted: HashSet<Ino> = match done {
            Ok(()) => HashSet::new(),
            Err(_) => files.iter().filter(|open| open.file().has_uncommitted()).map(|open| open.ino).collect(),
        };
        let queued = match &self.anchored {
            Some(anchored) if done.is_err() => anchored.anchor.queued_about(),
            Some(_) | None => HashSet::new(),
        };
        // All handles, also those that were not used in this turn: fsync(2) covers what was written through another
        // handle that wrote the file, and the owner, mode, names and entries of what was opened, however they were
        // changed.
        for (id, left) in &left_handles.handles {
            let wrote = matches!(left, LeftHandle::File { ino, access } if access.write && uncommitted.contains(ino));
            if wrote || queued.contains(&self.nodes.lock().object(left.ino())) {
                left_handles.lost.insert(*id);
            }
        }
        let nameless = self.leave_without_name(nameless, &uncommitted);
        let mut gone = Vec::new();
        if let Some(anchored) = &self.anchored {
            let first_loose = anchored.anchor.first_loose();
            self.nodes.lock().bury_from(first_loose);
            gone = anchored.take_records_left();
            gone.retain(|object| *object < first_loose);
        }
        let open = left_handles.handles.values().filter_map(LeftHandle::of_file).collect();
        let (nodes, handles) = (self.nodes.lock().take(&open), LeftHandles::of(left_handles));
        (Left { nodes, handles, nameless, gone, moved: self.moved.take() }, done)
    }

    /// Continues with what an earlier vault over the same tree left. `touched`: what others have changed since; `None`:
    /// perhaps everything. No call is under way yet.
    ///
    /// # Errors
    /// Those of the anchor; then nothing was taken over.
    pub fn take_up(&self, left: Left, touched: Option<&Touched>) -> std::result::Result<(), (Box<Left>, VaultError)> {
        let Left { nodes, handles, nameless, gone, moved } = left;
        let own = std::mem::replace(&mut *self.nodes.lock(), nodes);
        if let Err(error) = self.find_again(touched) {
            let nodes = std::mem::replace(&mut *self.nodes.lock(), own);
            return Err((Box::new(Left { nodes, handles, nameless, gone, moved }), error));
        }
        nameless.into_iter().for_each(|(ino, file)| self.take_up_without_name(ino, file));
        if let Some(anchored) = &self.anchored {
            self.remove_records(anchored, gone);
        }
        self.left.replace(handles);
        self.moved.take_over(moved, touched);
        Ok(())
    }

    /// Opens the root for requests to the daemon alone, so that neither store nor server is asked.
    pub(crate) fn open_for_requests(&self) -> HandleId {
        self.left.add_for_requests()
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
                self.nodes.lock().lose_link(named.ino, named.link.parent, &named.link.name);
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
        let _tree = self.tree.read();
        let found = Finder { vault: self, places, listed: HashMap::new() }.node(object, 0)?;
        Ok(found == Some(ino))
    }

    fn open_again(&self, id: HandleId) -> Result<()> {
        self.left.change(|all| self.open_one_again(id, &mut all.handles))
    }

    fn open_one_again(&self, id: HandleId, handles: &mut HashMap<u64, LeftHandle>) -> Result<()> {
        // Where there is none another call has opened it meanwhile, or it never was.
        let Some(left) = handles.get(&id.0) else { return Ok(()) };
        let handle = match left {
            LeftHandle::File { ino, access } => {
                // In a turn that only looks nothing is written.
                let writes = access.write && !self.options.read_only;
                let file = match self.acquire(*ino, writes) {
                    Err(VaultError::Stale) if self.find_name(*ino)? => self.acquire(*ino, writes),
                    acquired => acquired,
                }?;
                Handle::File { file, access: *access }
            }
            LeftHandle::Dir { ino, parent, listing } => {
                let opened = {
                    let _tree = self.tree.read();
                    self.dir(*ino)
                };
                let dir = match opened {
                    Ok(dir) => Some(dir),
                    Err(_) if self.is_removed_dir(*ino) => None,
                    Err(error) => return Err(error),
                };
                self.nodes.lock().pin(*ino);
                Handle::Dir(Arc::new(OpenDir::new(*ino, dir, *parent, listing.clone())))
            }
            LeftHandle::Requests => return Err(errno("list what was opened without a turn", libc::EIO)),
        };
        self.handles.put(id, handle);
        handles.remove(&id.0);
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
        let other_inode = {
            let nodes = self.vault.nodes.lock();
            nodes.of_object(object).filter(|ino| !nodes.id(*ino).is_some_and(|id| id.is_of(&st)))
        };
        // Without a name it waits for a lookup of one that is its own.
        if let Some(ino) = other_inode
            && self.vault.may_go(ino, object, &st)? != Go::To
        {
            return Ok(None);
        }
        Ok(self.vault.nodes.lock().met(parent, name, &st, object))
    }
}
