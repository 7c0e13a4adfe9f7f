//! What an operation on an inode acts on: its open file, or its entry in a backing directory.

use crate::dirs::Dir;
use crate::error::{io, is_not_found};
use crate::open::OpenFile;
use crate::root::RootPermissions;
use crate::{Ino, ROOT, Result, SetTime, Vault, VaultError};
use lamassu_store::backend::Stat;
use lamassu_store::{BackendEntry, StoreError};
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::sync::Arc;

/// See the module's head. An open file works without a name, too.
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
        for link in links {
            let dir = match self.dir(link.parent) {
                Err(VaultError::Stale) => continue,
                other => other?,
            };
            match dir.handle.stat_entry(&link.name) {
                Ok(st) if id.is_of(&st) => return Ok((dir, link.name.into_os_string(), st)),
                Ok(_) => {}
                Err(e) if is_not_found(&e) => {}
                Err(e) => return Err(io("stat")(e)),
            }
        }
        self.refuse_missing(ino)?;
        Err(VaultError::Stale)
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
    /// The kernel permits it by the owner in the row. If the store shows another owner, another entry may lie there: a
    /// user who can write to a directory of the store can put one of root's in the place of their own. Root may change
    /// it nevertheless, as a crash may have left an owner that the row does not have.
    pub(crate) fn target_to_change(&self, ino: Ino, by: Option<u32>) -> Result<(Target, Stat)> {
        let (target, st) = self.target(ino)?;
        let shown = match &target {
            Target::Entry { st, .. } => *st,
            Target::Open(open) => open.file().stat().map_err(io("stat"))?,
            Target::Root(..) | Target::Dir(_) => return Ok((target, st)),
        };
        if by != Some(0) {
            self.must_show_owner(ino, &shown)?;
        }
        Ok((target, st))
    }

    /// Fails unless the store shows the owner in the row. Checked only in a process of root: another process cannot
    /// change entries of other users.
    pub(crate) fn must_show_owner(&self, ino: Ino, shown: &Stat) -> Result<()> {
        if self.anchored.is_none() || !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let row = self.over_row(ino, *shown)?;
        match (shown.uid, shown.gid) == (row.uid, row.gid) {
            true => Ok(()),
            false => Err(self.outdated_at("owner", self.tag(ino))),
        }
    }
}

/// Holds the entry that was found under a name; `ESTALE` if the name leads to another entry by now.
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
            Target::Root(dir, _) | Target::Dir(dir) => dir.handle.set_times(atime, mtime),
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
