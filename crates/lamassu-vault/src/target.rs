//! What an operation on an inode acts on: its open file, or its entry in a backing directory.

use crate::dirs::Dir;
use crate::error::{io, is_not_found, no_outcome};
use crate::handles::OpenFile;
use crate::inode::{Elsewhere, StoreId};
use crate::root::RootPermissions;
use crate::stored::set_root_times;
use crate::{Ino, ROOT, Result, SetTime, Vault, VaultError};
use lamassu_store::backend::Stat;
use lamassu_store::{BackendEntry, StoreError};
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::sync::Arc;

/// Set-user-ID and set-group-ID.
pub(crate) const SET_ID: u32 = libc::S_ISUID | libc::S_ISGID;

/// What a change needs of the names of its file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asks {
    /// None that is known leads elsewhere.
    Content,
    /// The same, and the content is its own if a program may have used a name that is not known any more.
    Owner,
    /// All are known, and lead to its inode, whose content is its own, since owners tell nothing: where root mends an
    /// owner that differs, and for set-id bits. Whoever asks for these may just have become the owner, by a call under
    /// another name.
    All,
}

impl Asks {
    /// For a change to this mode.
    pub fn to_set(mode: u32) -> Asks {
        if mode & SET_ID == 0 { Asks::Owner } else { Asks::All }
    }
}

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
        let (links, id, kind) = {
            let nodes = self.nodes.lock();
            let id = nodes.id(ino).ok_or(VaultError::Stale)?;
            (nodes.links(ino), id, nodes.kind(ino))
        };
        let mut others = Vec::new();
        for link in links {
            let dir = match self.dir(link.parent) {
                Err(VaultError::Stale) => continue,
                other => other?,
            };
            match dir.handle.stat_entry(&link.name) {
                // A store without birth times may have reused the number.
                Ok(st) if id.is_of(&st) && kind == Some(st.kind) => return Ok((dir, link.name.into_os_string(), st)),
                Ok(st) => others.push((dir, link.name.into_os_string(), st)),
                Err(e) if is_not_found(&e) => {}
                Err(e) => return Err(io("stat")(e)),
            }
        }
        let mut may_be_anothers = false;
        for (dir, name, st) in others {
            match self.elsewhere(ino, &dir, &name, &st)? {
                Elsewhere::Follows => return Ok((dir, name, st)),
                Elsewhere::MayBeAnothers => may_be_anothers = true,
                Elsewhere::No => {}
            }
        }
        // A lookup makes a node for that.
        if !may_be_anothers {
            self.refuse_missing(ino)?;
        }
        Err(VaultError::Stale)
    }

    /// What another inode is that the store shows under a name of a node, by the anchor. It may be the node's now: a
    /// host has taken the file over (rule R9), or the store numbers entries by their paths, and another host has moved
    /// it. Then the node goes to it.
    pub(crate) fn elsewhere(&self, ino: Ino, dir: &Dir, name: &OsStr, st: &Stat) -> Result<Elsewhere> {
        let Some(anchored) = self.anchored.as_ref().filter(|_| self.is_shared_by_hosts()) else {
            return Ok(Elsewhere::No);
        };
        if self.files.get(ino).is_some() {
            return Ok(Elsewhere::No);
        }
        if anchored.is_unsettled(&anchored.place(dir.object, name)) {
            return Err(no_outcome());
        }
        // Nothing is reported: a call may be making another entry under this name.
        let object = self.object_of(ino);
        if self.object_if_recorded(dir, name)? != Some(object) {
            return Ok(Elsewhere::No);
        }
        if !self.may_go_there(ino, object, st)? {
            return Ok(Elsewhere::MayBeAnothers);
        }
        if !self.nodes.lock().follows(ino, st) {
            return Ok(Elsewhere::No);
        }
        self.note_followed(ino, st);
        Ok(Elsewhere::Follows)
    }

    /// A node has gone to another inode: what was open of it is not that, and the name of that may not be durable.
    pub(crate) fn note_followed(&self, ino: Ino, st: &Stat) {
        self.dirs.drop_dir(ino);
        self.unsynced.add(StoreId::from(st));
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
    /// mends an owner that differs. No change reaches what lies under another name ([`Asks::Content`]).
    pub(crate) fn target_to_change(&self, ino: Ino, by: Option<u32>) -> Result<(Target, Stat)> {
        let (target, st) = self.target(ino)?;
        match &target {
            _ if by == Some(0) => {
                if !self.has_its_owner(ino, &target)? {
                    self.must_be_under_its_names(ino, &target, Asks::All)?;
                }
            }
            Target::Entry { dir, name, st } => self.must_be_its_own_entry(ino, (dir, name), st)?,
            Target::Open(open) => self.must_be_its_own_file(open)?,
            Target::Root(..) | Target::Dir(_) => {}
        }
        self.must_be_under_its_names(ino, &target, Asks::Content)?;
        Ok((target, st))
    }

    /// As [`Vault::acquire`], for a write that a user asks for: not of a file that may be another one
    /// ([`Vault::must_be_its_own`]). `empties`: it is to lose its whole content.
    pub(crate) fn acquire_to_change(&self, ino: Ino, empties: bool) -> Result<Arc<OpenFile>> {
        let open = self.acquire(ino, true)?;
        let owner = if empties { self.must_be_its_own_to_empty(&open) } else { self.must_be_its_own_file(&open) };
        let checked = owner.and_then(|()| {
            let _tree = self.tree.read();
            self.must_be_under_its_names(ino, &Target::Open(open.clone()), Asks::Content)
        });
        match checked {
            Ok(()) => Ok(open),
            Err(error) => {
                self.unhold(&open);
                Err(error)
            }
        }
    }
}

/// Holds the entry that was found under a name; `ESTALE` if it is another one's by now.
pub(crate) fn hold(dir: &Dir, name: &OsStr, st: &Stat) -> stdio::Result<Arc<dyn BackendEntry>> {
    dir.handle.hold_same(name, st)?.ok_or_else(|| stdio::Error::from_raw_os_error(libc::ESTALE))
}

impl Target {
    /// What the store shows of it.
    pub fn stat(&self) -> stdio::Result<Stat> {
        match self {
            Target::Open(f) => f.file().backing().stat(),
            Target::Entry { dir, name, st } => hold(dir, name, st)?.stat(),
            Target::Root(dir, _) | Target::Dir(dir) => dir.handle.stat(),
        }
    }

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
