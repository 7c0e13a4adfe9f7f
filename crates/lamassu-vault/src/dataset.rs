//! Directories of a tree that are vaults of their own: recognised, made whole and removed whole. Their content belongs
//! to their own vault (`forest`).

use crate::anchored::{Departing, Fresh};
use crate::digests::digest_of_dataset;
use crate::error::{errno, io, is_not_found};
use crate::event::IntegrityKind;
use crate::inode::StoreId;
use crate::names::{NameFault, Names};
use crate::record::{RecordFault, remove_companion};
use crate::staging::{Staging, dataset_name, delete_tree};
use crate::stored::{PRIVATE, lending, rename_no_replace};
use crate::walk::{Failed, Met, Visit, has_header, header_id, walk};
use crate::wanted::Wanted;
use crate::{Entry, Ino, Kind, Owner, ROOT, Result, Vault, VaultError};
use lamassu_anchor::Digest;
use lamassu_format::header::VaultId;
use lamassu_format::name::{DIR_RECORD, STAGING};
use lamassu_store::backend::{Listed, Stat, Time};
use lamassu_store::{Backend, BackendDir};
use lru::LruCache;
use parking_lot::Mutex;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::num::NonZeroUsize;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A dataset that a walk found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dataset {
    /// Plain path, where it is known.
    pub plain: Option<PathBuf>,
    /// Path in the store, relative to the vault's directory.
    pub stored: PathBuf,
}

/// What a walk found.
#[derive(Debug, Default)]
pub struct Sighted {
    /// by plain path
    pub datasets: Vec<Dataset>,
    /// Directories that could not be looked into, by plain path: datasets may lie in them.
    pub unseen: Vec<(PathBuf, VaultError)>,
}

/// For how many directories that deny search it is remembered whether they are datasets.
const SHUT_MAX: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// Whether directories that deny search are dataset roots; looking into one takes a lent permission. An entry is valid
/// while the directory has this change time.
pub(crate) struct Shut(Mutex<LruCache<StoreId, (Time, bool)>>);

impl Default for Shut {
    fn default() -> Self {
        Shut(Mutex::new(LruCache::new(SHUT_MAX)))
    }
}

impl Vault {
    /// Whether directories of the tree may be datasets.
    pub fn has_datasets(&self) -> bool {
        self.datasets.load(Ordering::Acquire)
    }

    /// Whether this dataset lies in the vault, as its anchor says.
    ///
    /// # Errors
    /// Those of the anchor.
    pub fn has_dataset(&self, dataset: &VaultId) -> Result<bool> {
        let Some(anchor) = &self.options.anchor else { return Ok(false) };
        Ok(crate::anchor::is_dataset_of(anchor.table(), dataset)?)
    }

    /// From now on directories may be datasets: the header says so.
    pub fn allow_datasets(&self) {
        self.datasets.store(true, Ordering::Release);
    }

    /// The backing directory of a dataset's root in this tree; `None` for every other directory, and at once where
    /// there are no datasets.
    pub(crate) fn dataset_at(&self, ino: Ino) -> Result<Option<Arc<dyn BackendDir>>> {
        if !self.has_datasets() || ino == ROOT {
            return Ok(None);
        }
        let _tree = self.tree.read();
        let dir = self.dir(ino)?.handle.clone();
        match has_header(&*dir) {
            Err(e) if e.kind() == stdio::ErrorKind::PermissionDenied => {}
            // No error makes it a directory of this vault: contents would be read and made there with the wrong keys.
            seen => return Ok(seen.map_err(io("look for a dataset's header"))?.then_some(dir)),
        }
        // No user enters the directory then: this vault sets no mode that would permit it.
        if self.options.read_only {
            return Ok(None);
        }
        let stat = || dir.stat().map_err(io("stat a directory"));
        let st = stat()?;
        let known = self.shut.0.lock().get(&StoreId::from(&st)).copied();
        if let Some((_, is_dataset)) = known.filter(|(ctime, _)| *ctime == st.ctime) {
            return Ok(is_dataset.then_some(dir));
        }
        let is_dataset = self.look_into(&dir, "look for a dataset's header", has_header)?;
        let st = stat()?;
        self.shut.0.lock().put(StoreId::from(&st), (st.ctime, is_dataset));
        Ok(is_dataset.then_some(dir))
    }

    /// Looks into a directory. If its mode denies that to its owner, which is this process, the directory is given the
    /// permission for the time of each call of `look`. A read-only vault changes nothing, so the look is denied there.
    ///
    /// # Errors
    /// Those of the store; [`VaultError::Frozen`] if a permission would have to be lent.
    pub(crate) fn look_into<T>(
        &self,
        dir: &Arc<dyn BackendDir>,
        op: &'static str,
        look: impl Fn(&dyn BackendDir) -> stdio::Result<T>,
    ) -> Result<T> {
        match look(&**dir) {
            Err(e) if e.kind() == stdio::ErrorKind::PermissionDenied && !self.options.read_only => {}
            done => return done.map_err(io(op)),
        }
        // Does not wait: the callers change nothing, and may hold locks that others wait for.
        let pass = self.gate.try_enter();
        if self.closed.load(Ordering::Acquire) {
            return Err(VaultError::ReadOnly);
        }
        let _pass = pass.ok_or(VaultError::Frozen)?;
        look(&*lending(dir)).map_err(io(op))
    }

    /// A dataset's root was looked into again, which may have advanced its change time.
    pub(crate) fn seen_again(&self, ino: Ino) {
        let _tree = self.tree.read();
        let Ok(dir) = self.dir(ino) else { return };
        if let Ok(st) = dir.handle.stat()
            && let Some((ctime, true)) = self.shut.0.lock().get_mut(&StoreId::from(&st))
        {
            *ctime = st.ctime;
        }
    }

    /// Path in the store of an inode in use, relative to the vault's directory.
    pub(crate) fn stored_path_of(&self, ino: Ino) -> Option<PathBuf> {
        self.nodes.lock().stored_path(ino)
    }

    /// The directory an inode lies in, and its plain name there.
    pub(crate) fn plain_place(&self, ino: Ino) -> Option<(Ino, OsString)> {
        let (link, _) = self.nodes.lock().first_link(ino)?;
        let _tree = self.tree.read();
        let dir = self.dir(link.parent).ok()?;
        let name = self.names(&dir).ok()?.open(&*dir.handle, &link.name).ok()??;
        Some((link.parent, name))
    }

    /// Plain names of the root's entries that are in use.
    pub(crate) fn names_in_root(&self) -> Vec<OsString> {
        let stored = self.nodes.lock().names_in(ROOT);
        let root = self.dirs.root();
        let Ok(names) = self.names(root) else { return Vec::new() };
        stored.iter().filter_map(|name| names.open(&*root.handle, name).ok().flatten()).collect()
    }

    /// Makes a directory that is a dataset. `fill` is given its place as a store, and the path of that place in this
    /// vault's store, and makes a whole vault there; only then does the directory appear in the tree. A dataset's root
    /// inherits no access control list: attributes are sealed under its own key.
    ///
    /// # Errors
    /// As [`Vault::mkdir`], [`VaultError::Refused`] before [`Vault::allow_datasets`], and those of `fill`; nothing is
    /// then left of it.
    pub fn make_dataset<E: From<VaultError>>(
        &self,
        parent: Ino,
        name: &OsStr,
        mode: u32,
        owner: Owner,
        fill: impl FnOnce(&dyn Backend, &Path) -> std::result::Result<(), E>,
    ) -> std::result::Result<Entry, E> {
        if !self.has_datasets() {
            return Err(VaultError::Refused("the header of this vault does not say that it has datasets").into());
        }
        let _pass = self.change()?;
        self.commit_anchor()?;
        let made = self.make_recorded_dataset(parent, name, mode, owner, fill)?;
        // Its contents are recorded by its own anchor, its existence by this one: so it is durable from the beginning.
        self.commit_anchor()?;
        Ok(made)
    }

    fn make_recorded_dataset<E: From<VaultError>>(
        &self,
        parent: Ino,
        name: &OsStr,
        mode: u32,
        owner: Owner,
        fill: impl FnOnce(&dyn Backend, &Path) -> std::result::Result<(), E>,
    ) -> std::result::Result<Entry, E> {
        let _tree = self.tree.read();
        let _names = self.names_of(parent).write();
        let dir = self.dir(parent)?;
        let stored = self.stored(&dir, name)?;
        if !self.may_make(&dir, &stored)? {
            return Err(errno("create a dataset", libc::EBUSY).into());
        }
        match dir.handle.stat_entry(&stored.name) {
            Err(e) if is_not_found(&e) => {}
            Err(e) => return Err(io("stat")(e).into()),
            Ok(_) => return Err(VaultError::Exists.into()),
        }
        let wanted = self.wanted(&dir, Kind::Dir, mode, Owner { umask: 0, ..owner })?;
        let setgid = wanted.mode.unwrap_or(0) & libc::S_ISGID;
        let wanted = Wanted { mode: Some(mode & 0o777 & !owner.umask | setgid), inherited: None, ..wanted };
        let (made, temp) = self.staged_dataset()?;
        let staging = &*self.staging()?.dir;
        let made = self.fill_dataset(made, &temp, &wanted, fill).and_then(|made| {
            let place = || rename_no_replace(staging, &temp, &*dir.handle, &stored.name);
            self.create_with(&dir, &stored, || place().map_err(io("create a dataset")))?;
            // Moving a directory takes write permission on it, so the mode comes last.
            let set = || made.set_mode(wanted.mode.unwrap_or(PRIVATE)).map_err(io("set the mode"));
            let done = set().and_then(|()| dir.handle.sync().map_err(io("sync a directory")));
            if let Err(error) = done {
                // Taken out of the tree again, and then its companion. If it cannot be taken out, it stays, with its
                // name.
                let _ = made.set_mode(PRIVATE);
                rename_no_replace(&*dir.handle, &stored.name, staging, &temp).map_err(io("take a dataset back"))?;
                stored.companion.iter().for_each(|companion| remove_companion(&*dir.handle, &companion.name));
                return Err(error.into());
            }
            Ok(made)
        });
        let made = made.inspect_err(|_| {
            if let Err(error) = delete_tree(staging, &temp, &mut || true)
                && !is_not_found(&error)
            {
                tracing::warn!(entry = %temp.to_string_lossy(), %error, "stays in lamassu.staging until the next open");
            }
        })?;
        let st = made.stat().map_err(io("stat"))?;
        self.unsynced.add(StoreId::from(&st));
        // Another directory may have had this number, and the store's clock may be too coarse to tell them apart.
        self.shut.0.lock().pop(&StoreId::from(&st));
        let content = match &self.anchored {
            Some(_) => {
                let id = self.look_into(&made, "read a dataset's header", header_id)?;
                let damaged = || VaultError::Damaged {
                    what: "dataset header",
                    stored: self.path_in(dir.ino, &stored.name).display().to_string(),
                };
                digest_of_dataset(&id.ok_or_else(damaged)?)
            }
            None => Digest::NONE,
        };
        let object = self.record_made(&dir, &stored, &Fresh { content, ..Fresh::new(st, wanted.mode) }, &wanted)?;
        Ok(self.new_entry(&dir, &stored.name, &st, object)?)
    }

    fn fill_dataset<E: From<VaultError>>(
        &self,
        made: Arc<dyn BackendDir>,
        temp: &OsStr,
        wanted: &Wanted,
        fill: impl FnOnce(&dyn Backend, &Path) -> std::result::Result<(), E>,
    ) -> std::result::Result<Arc<dyn BackendDir>, E> {
        let backend = made.as_backend(true).map_err(io("create a dataset"))?;
        fill(&*backend, &Path::new(STAGING).join(temp))?;
        backend.sync().map_err(io("sync the store"))?;
        // Last: after a crash, entries of another user are not cleared away.
        let st = made.stat().map_err(io("stat"))?;
        if let Some((uid, gid)) = wanted.owner_change(&st) {
            made.set_owner(uid, gid).map_err(io("set the owner"))?;
        }
        Ok(made)
    }

    /// Takes a dataset out of the tree, with everything in it, and deletes it. `id` is its root's: another dataset that
    /// has the name by now stays. In a turn it is not deleted, which may take long: the result is for
    /// [`Vault::delete_destroyed`], and what is not deleted so is when the next turns begin.
    ///
    /// # Errors
    /// [`VaultError::NotFound`]; [`VaultError::Invalid`] if it is not a dataset; those of the store. If deleting fails
    /// after it has left the tree, that is logged, and done when the vault is next opened for writing.
    pub(crate) fn remove_dataset(&self, parent: Ino, name: &OsStr, id: StoreId) -> Result<Option<OsString>> {
        let _pass = self.change()?;
        let (staging, temp) = (self.staging()?, dataset_name()?);
        {
            let tree = self.tree.write();
            let dir = self.dir(parent)?;
            let stored = self.stored(&dir, name)?;
            let st = dir.handle.stat_entry(&stored.name).map_err(io("stat"))?;
            if !id.is_of(&st) {
                return Err(VaultError::NotFound);
            }
            let is_dataset = || {
                let inside = dir.handle.open_dir(&stored.name)?;
                has_header(&*lending(&inside))
            };
            if st.kind != Kind::Dir || !is_dataset().map_err(io("look for a dataset's header"))? {
                return Err(VaultError::Invalid);
            }
            let (_, object) = self.found(&dir, &stored.name)?;
            if self.anchored.is_some() {
                let name = stored.name.clone();
                let dataset = Some(temp.clone());
                let departing = Departing { dir: dir.clone(), stored, st, rest: None, object, is_last: false, dataset };
                let is_last = self.depart(departing)?;
                self.entry_gone(&dir, &name, &st, is_last, object);
                self.shut.0.lock().pop(&id);
                drop(tree);
                self.commit_anchor()?;
                return Ok(self.options.by_turns.then_some(temp));
            }
            let is_known = staging.take_out(&*dir.handle, &stored.name, &st, &temp).map_err(io("remove a dataset"))?;
            if let Some(companion) = &stored.companion {
                remove_companion(&*dir.handle, &companion.name);
            }
            self.entry_gone(&dir, &stored.name, &st, true, object);
            // Another directory may get its number.
            self.shut.0.lock().pop(&id);
            dir.handle.sync().map_err(io("sync a directory"))?;
            delete_if_known(staging, &temp, is_known);
        }
        Ok(None)
    }

    /// Takes a dataset that is going out of the tree, and deletes it, except in a turn.
    pub(crate) fn unstage_dataset(
        &self,
        parent: &dyn BackendDir,
        stored: &OsStr,
        st: &Stat,
        temp: &OsStr,
    ) -> Result<()> {
        let staging = self.staging()?;
        let is_known = staging.take_out(parent, stored, st, temp).map_err(io("remove a dataset"))?;
        if !self.options.by_turns {
            delete_if_known(staging, temp, is_known);
        }
        Ok(())
    }

    /// The datasets in this tree, below a directory of it, without those inside them.
    ///
    /// # Errors
    /// [`VaultError::Stale`] for an unknown directory, and as [`Vault::plain_path`]. Directories that cannot be looked
    /// into, this one included, are in [`Sighted::unseen`].
    pub fn datasets(&self, below: Ino) -> Result<Sighted> {
        if !self.has_datasets() {
            return Ok(Sighted::default());
        }
        let (start, stored) = {
            let _tree = self.tree.read();
            (self.dir(below)?.handle.clone(), self.stored_path_of(below).ok_or(VaultError::Stale)?)
        };
        let plain = self.plain_path(&stored)?;
        let mut search = Search { vault: self, found: Sighted::default() };
        walk(Met::first(start, stored, plain), &mut search)?;
        let mut found = search.found;
        found.datasets.sort_by(|a, b| a.plain.cmp(&b.plain));
        found.unseen.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    /// The first directory on a path in the store that is a dataset.
    pub(crate) fn dataset_above(&self, stored: &Path) -> Result<Option<PathBuf>> {
        if !self.has_datasets() {
            return Ok(None);
        }
        let (mut dir, mut walked) = (self.dirs.root().handle.clone(), PathBuf::new());
        for part in stored.components() {
            let Component::Normal(name) = part else { return Ok(None) };
            dir = match dir.open_dir(name) {
                Ok(below) => below,
                // A file, or absent: it lies in no dataset.
                Err(_) => return Ok(None),
            };
            walked.push(name);
            if has_header(&*dir).map_err(io("look for a dataset's header"))? {
                return Ok(Some(walked));
            }
        }
        Ok(None)
    }

    /// Where a plain path leads in this tree: its own entry, or the dataset on the way and the rest of the path in it.
    ///
    /// # Errors
    /// As [`Vault::resolve`].
    pub fn dataset_on(&self, path: &OsStr) -> Result<Option<(Dataset, PathBuf)>> {
        if !self.has_datasets() {
            return Ok(None);
        }
        let (mut dir, mut stored, mut plain) = (self.dirs.root().handle.clone(), PathBuf::new(), PathBuf::new());
        let parts: Vec<&OsStr> = crate::path::components(path)?;
        for (i, part) in parts.iter().enumerate() {
            let kept = self.read_names(&*dir).map_err(|_| damaged(self, &stored))?.seal(part)?;
            match dir.stat_entry(&kept.name) {
                Ok(st) if st.kind == Kind::Dir => {}
                Err(e) if !is_not_found(&e) => return Err(io("stat")(e)),
                Ok(_) | Err(_) => return Ok(None),
            }
            dir = dir.open_dir(&kept.name).map_err(io("open a directory"))?;
            stored.push(&kept.name);
            plain.push(part);
            if has_header(&*dir).map_err(io("look for a dataset's header"))? {
                let rest = parts[i + 1..].iter().collect();
                return Ok(Some((Dataset { plain: Some(plain), stored }, rest)));
            }
        }
        Ok(None)
    }
}

fn delete_if_known(staging: &Staging, name: &OsStr, is_known: stdio::Result<()>) {
    if let Err(error) = is_known.and_then(|()| delete_tree(&*staging.dir, name, &mut || true).map(drop)) {
        let text = "a destroyed dataset stays in lamassu.staging until the next open";
        tracing::warn!(entry = %name.to_string_lossy(), %error, "{text}");
    }
}

/// A search for datasets. A directory passes its plain path on to those in it.
struct Search<'a> {
    vault: &'a Vault,
    found: Sighted,
}

impl Search<'_> {
    /// Looks into a directory. Returns how its names are kept; `None` for a dataset.
    fn look(&self, at: &Met<PathBuf>, dir: &Arc<dyn BackendDir>) -> Result<Option<Names>> {
        if !at.is_root() && has_header(&**dir).map_err(io("look for a dataset's header"))? {
            return Ok(None);
        }
        let is_gone = || !at.name.is_empty() && at.above.stat_entry(&at.name).is_err_and(|e| is_not_found(&e));
        let names = self.vault.read_names(&**dir).map_err(|fault| match fault {
            // Datasets may lie below it nevertheless.
            RecordFault::Missing if is_gone() => VaultError::NotFound,
            RecordFault::Unreadable(e) => io("read a directory record")(e),
            _ => damaged(self.vault, &at.stored),
        });
        names.map(Some)
    }

    fn note_unseen(&mut self, at: &Met<PathBuf>, error: VaultError) {
        // A directory that is gone by now is skipped.
        if !matches!(error, VaultError::NotFound) {
            self.found.unseen.push((at.passed.clone(), error));
        }
    }
}

impl Visit for Search<'_> {
    type Passed = PathBuf;
    type Here = Names;
    type Error = VaultError;

    fn enter(&mut self, at: &Met<PathBuf>, dir: &Arc<dyn BackendDir>) -> Result<Option<Names>> {
        match self.look(at, dir) {
            Ok(None) => {
                let plain = Some(at.passed.clone());
                self.found.datasets.push(Dataset { plain, stored: at.stored.clone() });
                Ok(None)
            }
            Ok(names) => Ok(names),
            Err(error) => {
                self.note_unseen(at, error);
                Ok(None)
            }
        }
    }

    fn entry(
        &mut self,
        at: &Met<PathBuf>,
        dir: &Arc<dyn BackendDir>,
        names: &mut Names,
        entry: &Listed,
    ) -> Result<Option<PathBuf>> {
        let is_dir = match entry.kind {
            Some(kind) => kind == Kind::Dir,
            None => dir.stat_entry(&entry.name).is_ok_and(|st| st.kind == Kind::Dir),
        };
        if !is_dir {
            return Ok(None);
        }
        let shown = match names.open(&**dir, &entry.name) {
            Ok(shown) => shown,
            Err(NameFault::Unreadable(error)) => {
                self.note_unseen(at, io("read a companion")(error));
                None
            }
            // An entry whose name does not open is not shown either; `check` names it.
            Err(_) => None,
        };
        Ok(shown.map(|shown| at.passed.join(shown)))
    }

    fn failed(&mut self, at: &Met<PathBuf>, what: Failed, error: stdio::Error) -> Result<()> {
        let op = if what == Failed::Open { "open a directory" } else { "list a directory" };
        self.note_unseen(at, io(op)(error));
        Ok(())
    }
}

fn damaged(vault: &Vault, stored: &Path) -> VaultError {
    let record = stored.join(DIR_RECORD).display().to_string();
    vault.tell(IntegrityKind::DirectoryRecord.at(record, "a directory record does not open"));
    VaultError::Damaged { what: "directory record", stored: stored.display().to_string() }
}
