//! Takeover of files that another host left open (rule R9 of `docs/sharing.md`).
//!
//! That host may have sent writes which reach the store at any later time. So such a file is copied to a new inode
//! before it is recovered, and the new inode gets all its names: a late write goes to the old one, which has none. The
//! copy has the pages as they are; the file is recovered from them as always, and its row is not clean before the names
//! are durable. So a crash in between leaves a file that is still open by its row, and is taken over again.

use super::Anchored;
use super::shown_attrs;
use crate::error::{io, is_not_found};
use crate::inode::StoreId;
use crate::stored::replace;
use crate::{Ino, Kind, Result, SetTime, Vault, VaultError};
use lamassu_anchor::AnchorError;
use lamassu_format::name::COMPANION_PREFIX;
use lamassu_store::backend::Stat;
use lamassu_store::{BackendDir, BackendFile, File};
use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes that are copied at most if the store cannot share them: meanwhile other hosts wait for the vault. A file with
/// more keeps its inode.
const COPIED_MAX: u64 = 256 << 20;

/// A copy of a file, in a directory of its own in the staging directory. Its names are of the kind that is cleared with
/// that.
struct Copy {
    dir: Arc<dyn BackendDir>,
    /// The directory's name.
    dir_name: OsString,
    /// Its names: as many as the file has.
    names: Vec<OsString>,
    file: Arc<dyn BackendFile>,
}

impl Vault {
    /// Whether the row of a file says that a session of another host has changed it, and did not end.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn is_left_open_by_another_host(&self, ino: Ino) -> Result<bool> {
        let Some(anchored) = self.anchored.as_ref().filter(|_| self.is_shared_by_hosts()) else { return Ok(false) };
        let row = match anchored.anchor.row(self.object_of(ino)) {
            Err(AnchorError::Unknown { .. }) => return Ok(false),
            row => row?,
        };
        let own = self.ctx.sessions.under_way();
        let open = row.file().and_then(|file| file.open.as_ref());
        Ok(open.is_some_and(|open| open.windows.iter().any(|window| Some(window.session) != own)))
    }

    /// A new inode with the pages of a file that another host left open, and with all its names; the old one if it
    /// cannot be copied.
    ///
    /// # Errors
    /// Those of the store after the copy has got a first name; [`VaultError::Anchor`].
    pub(crate) fn taken_over(&self, ino: Ino, old: Arc<dyn BackendFile>) -> Result<Arc<dyn BackendFile>> {
        let Some(anchored) = &self.anchored else { return Ok(old) };
        // While a freeze waits, nothing is changed: the file is recovered where it is.
        let Some(_pass) = self.gate.try_enter().filter(|_| !self.closed.load(Ordering::Acquire)) else {
            return Ok(old);
        };
        let mut placed = 0;
        let done = self.copy_left_open(anchored, ino, &old).and_then(|copy| {
            let done = self.put_in_place(anchored, ino, &copy, &mut placed);
            drop(copy.dir);
            self.drop_staged_dir(&copy.dir_name);
            done.map(|()| copy.file)
        });
        match done {
            Ok(new) => {
                tracing::info!(file = self.tag(ino), "taken over from a host whose session ended");
                Ok(new)
            }
            // Nothing has changed.
            Err(error) if placed == 0 => {
                tracing::warn!(
                    file = self.tag(ino),
                    %error,
                    "another host left this file open, and it cannot be copied: if the store still has writes of that \
                     host in transit, they may destroy what is written now (that would be reported)"
                );
                Ok(old)
            }
            // It is still open by its row, so the next attempt begins anew.
            Err(error) => Err(error),
        }
    }

    fn copy_left_open(&self, anchored: &Anchored, ino: Ino, from: &Arc<dyn BackendFile>) -> Result<Copy> {
        let st = from.stat().map_err(io("stat"))?;
        // Whoever may write to a directory of the store can put another user's file there, which is left alone. This
        // looks at the pages without the row.
        let shown = File::open_with_len(self.ctx_silent.clone(), from.clone(), st.len, &self.tag(ino))?;
        self.must_be_its_own_content(ino, &shown, |_| false)?;
        let object = self.object_of(ino);
        // Not by the inode: a takeover that a crash cut off has left two.
        let links = anchored.anchor.row(object)?.links;
        if links > 1 {
            for place in anchored.anchor.names_of(object)? {
                let found = self.reach(anchored, place)?;
                self.forget(found, 1);
            }
        }
        let (dir, dir_name) = self.staged_dir()?;
        let names: Vec<_> = (1..=links).map(|number| format!("{COMPANION_PREFIX}{number}").into()).collect();
        match copied(&**from, &st, &*dir, &names) {
            Ok(file) => Ok(Copy { dir, dir_name, names, file }),
            Err(error) => {
                drop(dir);
                self.drop_staged_dir(&dir_name);
                Err(error)
            }
        }
    }

    /// Gives a copy all names of its original, durably. `placed`: how many it has.
    fn put_in_place(&self, anchored: &Anchored, ino: Ino, copy: &Copy, placed: &mut usize) -> Result<()> {
        {
            let _tree = self.tree.write();
            let (links, id, object) = {
                let nodes = self.nodes.lock();
                (nodes.links(ino), nodes.id(ino).ok_or(VaultError::Stale)?, nodes.object(ino))
            };
            let mut places = Vec::new();
            for link in links {
                let dir = self.dir(link.parent)?;
                let recorded = anchored.anchor.entry(&anchored.place(dir.object, &link.name))?;
                // Whichever inode is there: a crash may have left both.
                match dir.handle.stat_entry(&link.name) {
                    Ok(st) if st.kind == Kind::File && recorded.is_some_and(|entry| entry.object == object) => {
                        places.push((dir, link.name));
                    }
                    Ok(_) => {}
                    Err(error) if is_not_found(&error) => {}
                    Err(error) => return Err(io("stat")(error)),
                }
            }
            // A name that stayed with the old inode would be called stale.
            if places.is_empty() || places.len() != copy.names.len() {
                return Err(VaultError::Stale);
            }
            for ((dir, to), from) in places.iter().zip(&copy.names) {
                replace(&*copy.dir, from, &*dir.handle, to)?;
                *placed += 1;
            }
            let st = copy.file.stat().map_err(io("stat"))?;
            self.nodes.lock().exchanged(id, StoreId::from(&st));
            self.unsynced.add(StoreId::from(&st));
        }
        self.sync_store()
    }
}

/// A durable copy of a file, with its attributes, owner, mode and times, under names of a directory.
fn copied(from: &dyn BackendFile, st: &Stat, dir: &dyn BackendDir, names: &[OsString]) -> Result<Arc<dyn BackendFile>> {
    let Some((name, more)) = names.split_first() else { return Err(VaultError::Stale) };
    let to = dir.create_file(name).map_err(io("create a copy"))?;
    if !to.share_all(from).map_err(io("share the blocks of a file"))? {
        copy_data(from, st.len, &*to)?;
    }
    for (attr, value) in shown_attrs(|| from.list_xattr(), |attr| from.get_xattr(attr))? {
        to.set_xattr(&attr, &value, 0).map_err(io("set an attribute"))?;
    }
    let made = to.stat().map_err(io("stat"))?;
    if (made.uid, made.gid) != (st.uid, st.gid) {
        to.set_owner(Some(st.uid), Some(st.gid)).map_err(io("set the owner"))?;
    }
    to.set_mode(st.mode).map_err(io("set the mode"))?;
    to.set_times(SetTime::At(st.atime), SetTime::At(st.mtime)).map_err(io("set times"))?;
    to.sync_all().map_err(io("sync a copy"))?;
    for other in more {
        dir.hold(name).and_then(|held| held.link(dir, other)).map_err(io("link"))?;
    }
    Ok(to)
}

/// Copies the data of a file of length `len`, and leaves its holes.
fn copy_data(from: &dyn BackendFile, len: u64, to: &dyn BackendFile) -> Result<()> {
    let (mut at, mut done) = (0, 0);
    while let Some(data) = from.seek_data(at).map_err(io("seek data"))?.filter(|data| *data < len) {
        let end = from.seek_hole(data).map_err(io("seek a hole"))?.map_or(len, |hole| hole.min(len));
        done += end - data;
        if done > COPIED_MAX {
            return Err(VaultError::Refused("the store cannot share its blocks, and it is too large to be copied"));
        }
        to.copy_from(from, data, data, end - data).map_err(io("copy"))?;
        at = end;
    }
    to.set_len(len).map_err(io("set the length"))
}
