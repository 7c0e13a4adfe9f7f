//! Open backing directories and the keys of their names, held in a bounded cache and reopened through the chain of
//! parents.

use crate::error::{io, is_not_found};
use crate::event::IntegrityKind;
use crate::inode::{DEPTH_MAX, Elsewhere, Link, NodeTable, StoreId};
use crate::names::{self, DirFault, Names, StoredName};
use crate::record;
use crate::stored::lending;
use crate::{Ino, Kind, ROOT, Result, Vault, VaultError};
use lamassu_anchor::ObjectId;
use lamassu_format::Profile;
use lamassu_format::header::NameMode;
use lamassu_format::name::DIR_RECORD;
use lamassu_store::BackendDir;
use lru::LruCache;
use parking_lot::Mutex;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long the removal of a directory takes at most, once it has begun.
const REMOVAL_MAX: Duration = Duration::from_secs(1);
/// Permissions by which a directory of root's is told from another where it is opened. A crash within seconds of root's
/// `chmod` leaves such a difference, too: so as few as possible.
const WRITTEN_BY_OTHERS: u32 = 0o022;

/// An open backing directory.
pub(crate) struct Dir {
    pub ino: Ino,
    pub dev: u64,
    /// Its number in the anchor; 0: unanchored.
    pub object: ObjectId,
    pub handle: Arc<dyn BackendDir>,
    names: OnceLock<Names>,
    /// The number of the profile for new entries, from its record, once `names` is known.
    profile: AtomicU8,
}

impl Dir {
    pub fn new(ino: Ino, dev: u64, object: ObjectId, handle: Arc<dyn BackendDir>) -> Arc<Self> {
        Arc::new(Dir { ino, dev, object, handle, names: OnceLock::new(), profile: AtomicU8::default() })
    }
}

/// The cache.
pub(crate) struct Dirs {
    root: Arc<Dir>,
    open: Mutex<LruCache<Ino, Arc<Dir>>>,
}

impl Dirs {
    pub fn new(root: Arc<Dir>, capacity: NonZeroUsize) -> Self {
        Dirs { root, open: Mutex::new(LruCache::new(capacity)) }
    }

    pub fn root(&self) -> &Arc<Dir> {
        &self.root
    }

    fn get(&self, ino: Ino) -> Option<Arc<Dir>> {
        if ino == ROOT { Some(self.root.clone()) } else { self.open.lock().get(&ino).cloned() }
    }

    fn put(&self, dir: &Arc<Dir>) {
        self.open.lock().put(dir.ino, dir.clone());
    }

    /// Closes a directory that was removed or forgotten.
    pub fn drop_dir(&self, ino: Ino) {
        self.open.lock().pop(&ino);
    }

    pub fn clear(&self) {
        self.open.lock().clear();
    }
}

/// The directories that have to be opened, one below the other, the deepest first.
type Chain = Vec<(Ino, Link, StoreId)>;

/// The directories on the way from an open one to `ino`.
fn chain_to_open(nodes: &NodeTable, dirs: &Dirs, ino: Ino) -> Result<(Arc<Dir>, Chain)> {
    let mut chain = Vec::new();
    let mut cur = ino;
    loop {
        if let Some(dir) = dirs.get(cur) {
            return Ok((dir, chain));
        }
        if nodes.kind(cur).is_some_and(|k| k != Kind::Dir) {
            return Err(VaultError::NotDirectory);
        }
        let (link, id) = nodes.first_link(cur).ok_or(VaultError::Stale)?;
        let parent = link.parent;
        chain.push((cur, link, id));
        if chain.len() > DEPTH_MAX {
            return Err(VaultError::Stale);
        }
        cur = parent;
    }
}

impl Vault {
    /// The open backing directory of `ino`. The caller holds the tree lock: the directory that is opened under a name
    /// must still have that name when it is looked at.
    pub(crate) fn dir(&self, ino: Ino) -> Result<Arc<Dir>> {
        let (mut dir, mut chain) = chain_to_open(&self.nodes.lock(), &self.dirs, ino)?;
        while let Some((ino, link, id)) = chain.pop() {
            let object = self.nodes.lock().object(ino);
            let handle = dir.handle.open_dir(&link.name).map_err(|e| match is_not_found(&e) {
                true => self.gone(&link, object),
                false => io("open a directory")(e),
            })?;
            let st = handle.stat().map_err(io("stat a directory"))?;
            if !id.is_of(&st) && self.elsewhere(ino, &dir, &link.name, &st)? != Elsewhere::Follows {
                return Err(self.gone(&link, object));
            }
            dir = Dir::new(ino, st.dev, object, handle);
            self.dirs.put(&dir);
        }
        Ok(dir)
    }

    /// The same for a call that looks for a name in it, changes one, or gives it a new one: there is none in a
    /// directory that was removed, and none is made there. (A kernel passes such calls on if another host has removed
    /// what is open here.)
    pub(crate) fn dir_of_names(&self, ino: Ino) -> Result<Arc<Dir>> {
        match self.dir(ino) {
            Err(VaultError::Stale) if self.nodes.lock().is_removed_dir(ino) => Err(VaultError::NotFound),
            opened => opened,
        }
    }

    /// How names are kept in `dir`; reads its record the first time.
    pub(crate) fn names<'a>(&self, dir: &'a Dir) -> Result<&'a Names> {
        if let Some(names) = dir.names.get() {
            return Ok(names);
        }
        let read = match self.record_text(&*dir.handle) {
            // The owner of a directory without search permission may still list it and use its attributes, whose seal
            // has the directory's id.
            Err(DirFault::Unreadable(e)) if e.kind() == ErrorKind::PermissionDenied && !self.is_read_only() => {
                self.record_text(&*lending(&dir.handle))
            }
            other => other,
        };
        if read.is_err() && self.has_left(dir.ino) {
            return Err(VaultError::Stale);
        }
        let path = || self.path_in(dir.ino, OsStr::new(DIR_RECORD));
        // Also with plain names: it may be the place of a dataset.
        if let Ok(_) | Err(DirFault::Missing | DirFault::NotARecord) = read {
            self.verify_record(dir.object, read.as_ref().ok().and_then(|t| t.as_deref()), &|| {
                path().display().to_string()
            })?;
        }
        if self.name_mode == NameMode::Plain && dir.ino != ROOT {
            let _unchanging = self.hold_mode(dir.ino);
            let st = dir.handle.stat().map_err(io("stat"))?;
            self.must_be_its_own_plain_dir(dir.object, &st, WRITTEN_BY_OTHERS)?;
        }
        let names = read.and_then(|text| self.names_of_text(text)).map_err(|fault| {
            let stored = path().display().to_string();
            let text = format!("a directory record does not open: {fault}");
            self.tell(IntegrityKind::DirectoryRecord.at(&*stored, text).of_inode(dir.ino));
            VaultError::Damaged { what: "directory record", stored }
        })?;
        Ok(dir.names.get_or_init(|| {
            dir.profile.store(names.profile().number(), Ordering::Release);
            names
        }))
    }

    /// Whether a directory was removed, with its record, since it was opened. Its node tells; the store cannot. The
    /// caller may hold the tree's lock.
    pub(crate) fn has_left(&self, ino: Ino) -> bool {
        // Waits for a removal under way. If this takes longer, this thread holds the lock itself.
        let _tree = self.tree.try_read_for(REMOVAL_MAX);
        ino != ROOT && self.nodes.lock().first_link(ino).is_none()
    }

    /// Whether `ino` is a directory that was removed, while a front-end refers to it.
    pub(crate) fn is_removed_dir(&self, ino: Ino) -> bool {
        self.has_left(ino) && self.nodes.lock().is_removed_dir(ino)
    }

    /// The profile of new entries of `dir`.
    pub(crate) fn profile_in(&self, dir: &Dir) -> Result<Profile> {
        self.names(dir)?;
        Ok(Profile::of_number(dir.profile.load(Ordering::Acquire)).unwrap_or_default())
    }

    /// Notes that the record of `dir` has a new profile.
    ///
    /// # Errors
    /// Those of [`Vault::names`].
    pub(crate) fn profile_changed(&self, dir: &Dir, profile: Profile) -> Result<()> {
        self.names(dir)?; // so that the record is not read for the first time later
        dir.profile.store(profile.number(), Ordering::Release);
        Ok(())
    }

    /// The same for a directory outside of the node table.
    pub(crate) fn read_names(&self, handle: &dyn BackendDir) -> std::result::Result<Names, DirFault> {
        self.record_text(handle).and_then(|text| self.names_of_text(text))
    }

    /// The text of a directory's record; `None` if names are plain.
    pub(crate) fn record_text(&self, handle: &dyn BackendDir) -> std::result::Result<Option<Vec<u8>>, DirFault> {
        match self.name_mode {
            NameMode::Plain => Ok(None),
            NameMode::Encrypted => Ok(Some(record::read_text(handle, OsStr::new(DIR_RECORD))?)),
        }
    }

    pub(crate) fn names_of_text(&self, text: Option<Vec<u8>>) -> std::result::Result<Names, DirFault> {
        let name_max = self.name_max;
        Ok(match text {
            None => Names::Plain { name_max },
            Some(text) => {
                let (key, profile) = names::open_record(&self.ctx.ring, &text)?;
                Names::Sealed { key, name_max, profile }
            }
        })
    }

    /// The stored form of `name` in `dir`.
    pub(crate) fn stored(&self, dir: &Dir, name: &OsStr) -> Result<StoredName> {
        self.names(dir)?.seal(name)
    }

    /// Stored path of an entry, for messages; as much of it as is known.
    pub(crate) fn path_in(&self, parent: Ino, stored: &OsStr) -> PathBuf {
        let base = self.nodes.lock().stored_path(parent);
        base.unwrap_or_else(|| Path::new("?").to_owned()).join(stored)
    }
}
