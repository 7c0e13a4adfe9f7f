//! Open files and handles: one [`File`] per inode, shared by its handles, and kept after the last close until its pages
//! are settled.

use crate::room::{Closing, Room};
use crate::{Access, HandleId, Ino, Result, VaultError};
use lamassu_store::{File, StoreError};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Time in the vault's own milliseconds, from 1; 0 stands for never.
pub(crate) type Millis = u64;

/// An open inode. Its `File` is exchanged when a file that was opened for reading is opened for writing: a read-only
/// file buffers nothing.
pub(crate) struct OpenFile {
    pub ino: Ino,
    file: RwLock<Arc<File>>,
    writable: AtomicBool,
    /// When the oldest write that is not yet in the store was made.
    pub dirty_since: AtomicU64,
    /// When the oldest write that is not yet settled was made.
    pub unsettled_since: AtomicU64,
    /// The last field: it is dropped after `file` has closed the descriptor.
    pub closing: Closing,
}

impl OpenFile {
    pub fn new(ino: Ino, file: File, writable: bool, room: &Room) -> Arc<Self> {
        Arc::new(OpenFile {
            ino,
            file: RwLock::new(Arc::new(file)),
            writable: AtomicBool::new(writable),
            dirty_since: AtomicU64::new(0),
            unsettled_since: AtomicU64::new(0),
            closing: room.closing(ino),
        })
    }

    /// To be dropped before the reference to `self`: the end of that says that the descriptor is closed.
    pub fn file(&self) -> Arc<File> {
        self.file.read().clone()
    }

    pub fn is_writable(&self) -> bool {
        self.writable.load(Ordering::Acquire)
    }

    pub fn upgrade(&self, file: File) {
        self.go_to(file);
        self.writable.store(true, Ordering::Release);
    }

    /// The inode of a file that is open for reading has got a copy in its place.
    pub fn go_to(&self, file: File) {
        *self.file.write() = Arc::new(file);
    }

    /// To be called after each change of content.
    pub fn touched(&self, now: Millis) {
        // Only the first of several counts. If two threads race to be first, either time is right.
        for since in [&self.dirty_since, &self.unsettled_since] {
            if since.load(Ordering::Relaxed) == 0 {
                since.store(now, Ordering::Relaxed);
            }
        }
    }

    /// Writes buffers to the store.
    pub fn flush(&self) -> std::result::Result<(), StoreError> {
        // Cleared first: a write that comes in between sets it again.
        self.dirty_since.store(0, Ordering::Relaxed);
        self.file().flush()
    }

    pub fn is_unsettled(&self) -> bool {
        let file = self.file();
        self.is_writable() && (file.is_dirty() || file.needs_settle())
    }
}

struct HeldFile {
    file: Arc<OpenFile>,
    handles: u32,
}

/// Every open inode, by number.
#[derive(Default)]
pub(crate) struct OpenFiles {
    files: Mutex<HashMap<Ino, HeldFile>>,
}

impl OpenFiles {
    pub fn get(&self, ino: Ino) -> Option<Arc<OpenFile>> {
        self.files.lock().get(&ino).map(|s| s.file.clone())
    }

    pub fn get_and_hold(&self, ino: Ino) -> Option<Arc<OpenFile>> {
        self.files.lock().get_mut(&ino).map(|s| {
            s.handles += 1;
            s.file.clone()
        })
    }

    pub fn insert_held(&self, file: &Arc<OpenFile>) {
        self.files.lock().insert(file.ino, HeldFile { file: file.clone(), handles: 1 });
    }

    /// Gives a hold back. True: it was the last.
    pub fn unhold(&self, ino: Ino) -> bool {
        self.files.lock().get_mut(&ino).is_some_and(|s| {
            s.handles = s.handles.saturating_sub(1);
            s.handles == 0
        })
    }

    /// Takes a file without handles out of the table if `may_go`. That is asked under the lock, so no write comes in
    /// between. The file is also put away under the lock: other threads may still refer to it, and a call that opens it
    /// meanwhile continues from the state that it left.
    pub fn remove_idle(&self, ino: Ino, may_go: impl Fn(&OpenFile) -> bool) -> Option<Arc<OpenFile>> {
        let mut files = self.files.lock();
        let go = files.get(&ino).is_some_and(|s| s.handles == 0 && may_go(&s.file));
        let gone = if go { files.remove(&ino).map(|s| s.file) } else { None };
        gone.inspect(|open| open.file().put_away())
    }

    pub fn all(&self) -> Vec<Arc<OpenFile>> {
        self.files.lock().values().map(|s| s.file.clone()).collect()
    }

    /// Files without handles.
    pub fn idle(&self) -> Vec<Arc<OpenFile>> {
        self.files.lock().values().filter(|s| s.handles == 0).map(|s| s.file.clone()).collect()
    }

    pub fn is_idle(&self, ino: Ino) -> bool {
        self.files.lock().get(&ino).is_some_and(|s| s.handles == 0)
    }

    pub fn idle_count(&self) -> usize {
        self.files.lock().values().filter(|s| s.handles == 0).count()
    }

    pub fn clear(&self) {
        self.files.lock().clear();
    }
}

/// What a handle refers to.
#[derive(Clone)]
pub(crate) enum Handle {
    File { file: Arc<OpenFile>, access: Access },
    Dir(Arc<crate::listing::OpenDir>),
}

/// Ids of handles are never reused in a process, so a handle of a closed vault is invalid in every other.
static HANDLES: AtomicU64 = AtomicU64::new(1);

/// An id that no other handle has.
pub(crate) fn fresh_handle() -> HandleId {
    HandleId(HANDLES.fetch_add(1, Ordering::Relaxed))
}

/// Handles given out.
#[derive(Default)]
pub(crate) struct Handles {
    open: RwLock<HashMap<u64, Handle>>,
}

impl Handles {
    pub fn add(&self, handle: Handle) -> HandleId {
        let id = fresh_handle();
        self.open.write().insert(id.0, handle);
        id
    }

    /// The same for a handle that has an id.
    pub fn put(&self, id: HandleId, handle: Handle) {
        self.open.write().insert(id.0, handle);
    }

    /// The inodes of open files.
    pub fn file_inos(&self) -> Vec<Ino> {
        let of_file = |handle: &Handle| if let Handle::File { file, .. } = handle { Some(file.ino) } else { None };
        self.open.read().values().filter_map(of_file).collect()
    }

    /// Takes all of them.
    pub fn take_all(&self) -> HashMap<u64, Handle> {
        std::mem::take(&mut *self.open.write())
    }

    pub fn remove(&self, id: HandleId) -> Option<Handle> {
        self.open.write().remove(&id.0)
    }

    pub fn file(&self, id: HandleId) -> Result<(Arc<OpenFile>, Access)> {
        match self.open.read().get(&id.0) {
            Some(Handle::File { file, access }) => Ok((file.clone(), *access)),
            Some(Handle::Dir(_)) | None => Err(VaultError::BadHandle),
        }
    }

    pub fn dir(&self, id: HandleId) -> Result<Arc<crate::listing::OpenDir>> {
        match self.open.read().get(&id.0) {
            Some(Handle::Dir(dir)) => Ok(dir.clone()),
            Some(Handle::File { .. }) | None => Err(VaultError::BadHandle),
        }
    }

    /// How many files are open, without those of [`crate::left`].
    pub fn files(&self) -> usize {
        self.open.read().values().filter(|h| matches!(h, Handle::File { .. })).count()
    }

    pub fn clear(&self) {
        self.open.write().clear();
    }
}
