//! What an operation on an inode acts on: its open file, or its entry in a backing directory.

use crate::digests::{digest_of_dataset, digest_of_text};
use crate::dirs::Dir;
use crate::error::{errno, io, is_not_found};
use crate::handles::OpenFile;
use crate::names::DirFault;
use crate::root::RootPermissions;
use crate::stored::{lending, set_root_times};
use crate::walk::header_id;
use crate::{Ino, Kind, ROOT, Result, SetTime, Vault, VaultError};
use lamassu_anchor::{AnchorError, Digest, ObjectId, Row, SealedPart};
use lamassu_format::header::NameMode;
use lamassu_store::backend::Stat;
use lamassu_store::{BackendEntry, File, FirstPage, StoreError};
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::sync::Arc;

/// Permissions by which a directory of root's is told from another where it is moved or removed. A crash within seconds
/// of root's `chmod` leaves such a difference, too.
const MOVED: u32 = 0o777;

/// The object of an operation on an inode. An open file can be used without a name, too.
pub(crate) enum Target {
    Open(Arc<OpenFile>),
    /// With the stat that was found. For each change the entry is held and compared with it.
    Entry {
        dir: Arc<Dir>,
        name: OsString,
        st: Stat,
    },
    /// The root, whose permissions may be a record's.
    Root(Arc<Dir>, Arc<RootPermissions>),
    /// An open directory, for its attributes.
    Dir(Arc<Dir>),
}

impl Vault {
    /// A place of `ino`: any of its names that still leads to it. The caller holds the tree lock.
    pub(crate) fn place(&self, ino: Ino) -> Result<(Arc<Dir>, OsString, Stat)> {
        let (links, id) = {
            let nodes = self.nodes.lock();
            (nodes.links(ino), nodes.id(ino).ok_or(VaultError::Stale)?)
        };
        let mut others = Vec::new();
        for link in links {
            let dir = match self.dir(link.parent) {
                Err(VaultError::Stale) => continue,
                other => other?,
            };
            match dir.handle.stat_entry(&link.name) {
                Ok(st) if id.is_of(&st) => return Ok((dir, link.name.into_os_string(), st)),
                Ok(st) => others.push((dir, link.name.into_os_string(), st)),
                Err(e) if is_not_found(&e) => {}
                Err(e) => return Err(io("stat")(e)),
            }
        }
        for (dir, name, st) in others {
            if self.is_taken_over(ino, &dir, &name, &st)? {
                return Ok((dir, name, st));
            }
        }
        self.refuse_missing(ino)?;
        Err(VaultError::Stale)
    }

    /// Whether another inode is under a name of a node because a host has taken the file over (rule R9). The node then
    /// goes to that inode.
    fn is_taken_over(&self, ino: Ino, dir: &Dir, name: &OsStr, st: &Stat) -> Result<bool> {
        let is_possible = self.is_shared_by_hosts() && st.kind == Kind::File && self.files.get(ino).is_none();
        if !is_possible || self.judged(dir, name, Some(st.kind))? != Some(self.object_of(ino)) {
            return Ok(false);
        }
        Ok(self.nodes.lock().follows(ino, st))
    }

    /// The error if the anchor has a place for a node that was not found.
    fn refuse_missing(&self, ino: Ino) -> Result<()> {
        let (links, object) = {
            let nodes = self.nodes.lock();
            (nodes.links(ino), nodes.object(ino))
        };
        match links.iter().map(|link| self.gone(link, object)).find(|error| !matches!(error, VaultError::Stale)) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// The stat of an open directory, with the permissions that the root shows if it is the root.
    pub(crate) fn dir_stat(&self, dir: &Dir) -> Result<Stat> {
        let st = dir.handle.stat().map_err(io("stat"))?;
        if dir.ino == ROOT { Ok(self.root_permissions.shown().over(st)) } else { self.over_row(dir.ino, st) }
    }

    /// The target of `ino`, and its stat as the tree shows it.
    pub(crate) fn target(&self, ino: Ino) -> Result<(Target, Stat)> {
        if let Some(open) = self.files.get(ino) {
            let st = open.file().stat().map_err(io("stat"))?;
            return Ok((Target::Open(open), self.over_row(ino, st)?));
        }
        if ino == ROOT {
            let dir = self.dirs.root().clone();
            let st = self.dir_stat(&dir)?;
            return Ok((Target::Root(dir, self.root_permissions.clone()), st));
        }
        match self.place(ino) {
            Err(VaultError::Stale) => {
                let open = self.open_nameless(ino).ok_or(VaultError::Stale)?;
                let st = open.file().stat().map_err(io("stat"))?;
                Ok((Target::Open(open), self.over_row(ino, st)?))
            }
            other => {
                let (dir, name, st) = other?;
                Ok((Target::Entry { dir, name, st }, self.over_row(ino, st)?))
            }
        }
    }
}

impl Vault {
    /// As [`Vault::target`], for a change by a user: `by`, if known.
    ///
    /// The kernel permits it by the owner in the row: see [`Vault::must_be_its_own`]. Root may change any entry, and so
    /// mends an owner that differs.
    pub(crate) fn target_to_change(&self, ino: Ino, by: Option<u32>) -> Result<(Target, Stat)> {
        let (target, st) = self.target(ino)?;
        match &target {
            _ if by == Some(0) => {}
            Target::Entry { dir, name, st } => self.must_be_its_own_entry(ino, (dir, name), st)?,
            Target::Open(open) => self.must_be_its_own_file(open)?,
            Target::Root(..) | Target::Dir(_) => {}
        }
        Ok((target, st))
    }

    /// As [`Vault::acquire`], for a write that a user asks for: not of a file that may be another one
    /// ([`Vault::must_be_its_own`]). `empties`: it is to lose its whole content.
    pub(crate) fn acquire_to_change(&self, ino: Ino, empties: bool) -> Result<Arc<OpenFile>> {
        let open = self.acquire(ino, true)?;
        let checked = if empties { self.must_be_its_own_to_empty(&open) } else { self.must_be_its_own_file(&open) };
        match checked {
            Ok(()) => Ok(open),
            Err(error) => {
                self.unhold(&open);
                Err(error)
            }
        }
    }

    /// Refuses an open file that may be another one than that of its row: see [`Vault::must_be_its_own`]. No page has
    /// to be read where the owner is right, since a write reads it.
    ///
    /// # Errors
    /// `EPERM`; those of the store; [`VaultError::Anchor`].
    fn must_be_its_own_file(&self, open: &OpenFile) -> Result<()> {
        self.must_be_its_own_if(open, |_| true)
    }

    /// The same where the file is to lose its whole content, which no page has to be read for: it may have other names,
    /// which only others may remove.
    ///
    /// # Errors
    /// As [`Vault::must_be_its_own_file`].
    pub(crate) fn must_be_its_own_to_empty(&self, open: &OpenFile) -> Result<()> {
        self.must_be_its_own_if(open, |shown| shown.nlink <= 1)
    }

    /// `suffices`: whether the right owner does, without a look at the first page.
    fn must_be_its_own_if(&self, open: &OpenFile, suffices: impl Fn(&Stat) -> bool) -> Result<()> {
        self.must_be_its_own_content(open.ino, &open.file(), suffices)
    }

    /// The same for a file that is not in the table of open files yet.
    pub(crate) fn must_be_its_own_content(
        &self,
        ino: Ino,
        file: &File,
        suffices: impl Fn(&Stat) -> bool,
    ) -> Result<()> {
        let object = self.nodes.lock().object(ino);
        let shown = || file.backing().stat().map_err(io("stat"));
        let (shown, asked) = self.row_of_unchanging(ino, object, shown)?;
        let is_its_own = match asked {
            None => true,
            Some((_, true)) => suffices(&shown) || file.first_page()? != FirstPage::Unverified,
            // The page of an empty file is that of any.
            Some((_, false)) => file.size() > 0 && file.first_page()? == FirstPage::Verified,
        };
        if is_its_own { Ok(()) } else { Err(unidentified(&shown)) }
    }

    /// Refuses an entry that may be another one than that of its row. A user who can write to a directory of the store
    /// can put another user's entry in the place of one of their own, and has no right to it: their rights go by the
    /// row. Content tells files apart, and records directories whose names are encrypted. Others are told apart by
    /// their owner alone.
    ///
    /// Asked only where it matters: in a process of root's, over a store that keeps owners. A crash may have left the
    /// owner of before, or the one of after, in a row: such an entry waits until root gives it an owner. So this is no
    /// finding.
    ///
    /// # Errors
    /// `EPERM`.
    pub(crate) fn must_be_its_own(&self, object: ObjectId, shown: &Stat) -> Result<()> {
        match self.row_of_shown(object, shown)? {
            Some((_, false)) => Err(unidentified(shown)),
            Some((_, true)) | None => Ok(()),
        }
    }

    /// The same for an entry of `dir`, whose owner may be changing.
    ///
    /// # Errors
    /// `EPERM`; those of the store.
    pub(crate) fn must_be_its_own_entry(&self, ino: Ino, (dir, name): (&Dir, &OsStr), st: &Stat) -> Result<()> {
        let object = self.nodes.lock().object(ino);
        let mut seen = Some(*st);
        let shown = || match seen.take() {
            Some(st) => Ok(st),
            None => hold(dir, name, st).and_then(|held| held.stat()).map_err(io("stat")),
        };
        match self.row_of_unchanging(ino, object, shown)? {
            (shown, Some((_, false))) => Err(unidentified(&shown)),
            (_, Some((_, true)) | None) => Ok(()),
        }
    }

    /// The same for a directory whose names are plain. Root has private ones and ones that others may write to, of one
    /// owner: so the store may not show fewer of these permissions of one of root's than its row has.
    ///
    /// # Errors
    /// `EPERM`.
    pub(crate) fn must_be_its_own_plain_dir(&self, object: ObjectId, shown: &Stat, permissions: u32) -> Result<()> {
        self.must_be_its_own(object, shown)?;
        let has_fewer = |row: &Row| shown.uid == 0 && row.mode & !shown.mode & permissions != 0;
        match self.row_of_shown(object, shown)? {
            Some((row, _)) if has_fewer(&row) && self.staging()?.keeps_modes() => Err(unidentified(shown)),
            Some(_) | None => Ok(()),
        }
    }

    /// As [`Vault::row_of_shown`], with what the store shows. While an owner changes, that and the row differ for a
    /// moment.
    fn row_of_unchanging(
        &self,
        ino: Ino,
        object: ObjectId,
        mut shown: impl FnMut() -> Result<Stat>,
    ) -> Result<(Stat, Option<(Row, bool)>)> {
        let st = shown()?;
        match self.row_of_shown(object, &st)? {
            Some((_, false)) => {
                let _unchanging = self.hold_mode(ino);
                let st = shown()?;
                Ok((st, self.row_of_shown(object, &st)?))
            }
            row => Ok((st, row)),
        }
    }

    /// The row of an object, and whether an entry with this stat may be the object's by its owner. `None`: nothing is
    /// asked.
    fn row_of_shown(&self, object: ObjectId, shown: &Stat) -> Result<Option<(Row, bool)>> {
        // A reader changes nothing, and asks the store nothing that it would have to write for.
        let is_asked = !self.options.read_only && rustix::process::geteuid().is_root();
        let Some(anchored) = self.anchored.as_ref().filter(|_| is_asked) else { return Ok(None) };
        let row = match anchored.anchor.row(object) {
            Err(AnchorError::Unknown { .. }) => return Ok(None),
            row => row?,
        };
        let has_owner = row.uid == shown.uid || !self.staging()?.keeps_owners();
        Ok(Some((row, has_owner)))
    }

    /// Refuses a directory that is to be moved or removed and may be another one than that of its row: see
    /// [`Vault::must_be_its_own`].
    ///
    /// # Errors
    /// [`VaultError::Outdated`]; `EPERM`; those of the store.
    pub(crate) fn must_be_its_own_dir(&self, dir: &Dir, stored: &OsStr, st: &Stat, object: ObjectId) -> Result<()> {
        if self.anchored.is_none() || !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let handle = lending(&dir.handle.open_dir(stored).map_err(io("open a directory"))?);
        if !handle.stat().map_err(io("stat"))?.is_same(st) {
            return Err(VaultError::Stale);
        }
        let shown = match header_id(&*handle) {
            Ok(Some(id)) => digest_of_dataset(&id),
            Ok(None) | Err(_) if self.name_mode == NameMode::Plain => {
                return self.must_be_its_own_plain_dir(object, st, MOVED);
            }
            Ok(None) | Err(_) => match self.record_text(&*handle) {
                Err(DirFault::Unreadable(e)) => return Err(io("read a directory record")(e)),
                text => text.ok().flatten().map_or(Digest::NONE, |text| digest_of_text(&text)),
            },
        };
        match self.is_newest(object, SealedPart::Content, shown)? {
            true => Ok(()),
            false => Err(self.outdated_at("directory record", self.path_in(dir.ino, stored).display().to_string())),
        }
    }
}

/// The error of an entry that may be another one than that of its row.
fn unidentified(shown: &Stat) -> VaultError {
    tracing::warn!(
        inode = shown.ino,
        uid = shown.uid,
        "the store shows an entry under another owner than the newest, with more names, or with fewer permissions: it may \
         be another entry, and is not changed; if it is the right one, chown or chmod it as root"
    );
    errno("change an entry that may be another's", libc::EPERM)
}

/// Holds the entry that was found under a name; `ESTALE` if it is another one's by now.
pub(crate) fn hold(dir: &Dir, name: &OsStr, st: &Stat) -> stdio::Result<Arc<dyn BackendEntry>> {
    dir.handle.hold_same(name, st)?.ok_or_else(|| stdio::Error::from_raw_os_error(libc::ESTALE))
}

impl Target {
    pub fn set_mode(&self, mode: u32) -> stdio::Result<()> {
        match self {
            Target::Open(f) => f.file().backing().set_mode(mode),
            Target::Entry { dir, name, st } => hold(dir, name, st)?.set_mode(mode),
            Target::Root(_, permissions) => permissions.set_mode(mode),
            Target::Dir(dir) => dir.handle.set_mode(mode),
        }
    }

    pub fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> stdio::Result<()> {
        match self {
            Target::Open(f) => f.file().backing().set_owner(uid, gid),
            Target::Entry { dir, name, st } => hold(dir, name, st)?.set_owner(uid, gid),
            Target::Root(_, permissions) => permissions.set_owner(uid, gid),
            Target::Dir(dir) => dir.handle.set_owner(uid, gid),
        }
    }

    pub fn set_times(&self, atime: SetTime, mtime: SetTime) -> Result<()> {
        let done = match self {
            // The file keeps them through commits of earlier writes. One opened for reading has none.
            Target::Open(f) if f.is_writable() => match f.file().set_times(atime, mtime) {
                Err(StoreError::Io { source, .. }) => Err(source),
                other => return Ok(other?),
            },
            Target::Open(f) => f.file().backing().set_times(atime, mtime),
            Target::Entry { dir, name, st } => hold(dir, name, st).and_then(|held| held.set_times(atime, mtime)),
            Target::Root(dir, _) => set_root_times(&*dir.handle, atime, mtime),
            Target::Dir(dir) => dir.handle.set_times(atime, mtime),
        };
        done.map_err(io("set times"))
    }

    pub fn get_xattr(&self, attr: &OsStr) -> stdio::Result<Vec<u8>> {
        match self {
            Target::Open(f) => f.file().backing().get_xattr(attr),
            Target::Entry { dir, name, st } => hold(dir, name, st)?.get_xattr(attr),
            Target::Root(dir, _) | Target::Dir(dir) => dir.handle.get_xattr(attr),
        }
    }

    pub fn set_xattr(&self, attr: &OsStr, value: &[u8], flags: i32) -> stdio::Result<()> {
        match self {
            Target::Open(f) => f.file().backing().set_xattr(attr, value, flags),
            Target::Entry { dir, name, st } => hold(dir, name, st)?.set_xattr(attr, value, flags),
            Target::Root(dir, _) | Target::Dir(dir) => dir.handle.set_xattr(attr, value, flags),
        }
    }

    pub fn list_xattr(&self) -> stdio::Result<Vec<OsString>> {
        match self {
            Target::Open(f) => f.file().backing().list_xattr(),
            Target::Entry { dir, name, st } => hold(dir, name, st)?.list_xattr(),
            Target::Root(dir, _) | Target::Dir(dir) => dir.handle.list_xattr(),
        }
    }

    pub fn remove_xattr(&self, attr: &OsStr) -> stdio::Result<()> {
        match self {
            Target::Open(f) => f.file().backing().remove_xattr(attr),
            Target::Entry { dir, name, st } => hold(dir, name, st)?.remove_xattr(attr),
            Target::Root(dir, _) | Target::Dir(dir) => dir.handle.remove_xattr(attr),
        }
    }
}
