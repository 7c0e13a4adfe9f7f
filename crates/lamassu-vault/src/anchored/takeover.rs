//! Takeover of files that another host left open (rule R9 of `docs/sharing.md`).
//!
//! That host may have sent writes which reach the store at any later time. So such a file is copied to a new inode
//! before it is recovered, and the new inode gets all its names: a late write goes to the old one, which has none. The
//! copy has the pages as they are; the file is recovered from them as always, and its row is not clean before the names
//! are durable. So a crash in between leaves a file that is still open by its row, and is taken over again.
//!
//! Nobody writes to the file meanwhile. Its owner, mode, times and attributes may be set: the copy has those of the
//! moment when it gets the names.

use super::{Anchored, shown_attrs};
use crate::dirs::Dir;
use crate::error::io;
use crate::inode::StoreId;
use crate::stored::replace;
use crate::target::SET_ID;
use crate::{Ino, Kind, Result, SetTime, Vault, VaultError};
use lamassu_anchor::AnchorError;
use lamassu_format::Profile;
use lamassu_format::name::COMPANION_PREFIX;
use lamassu_store::backend::Stat;
use lamassu_store::{BackendDir, BackendFile, File};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Limits of what is copied: other hosts wait for the vault meanwhile, and this one loses it if it takes too long. A
/// file beyond them keeps its inode.
struct Limits {
    /// Bytes, if the store cannot share them.
    bytes: u64,
    /// For copying them.
    time: Duration,
}

/// Of a file with one name.
const OF_ONE: Limits = Limits { bytes: 256 << 20, time: Duration::from_secs(2) };
/// Of a file with several. A takeover that is cut off between two names leaves them on two inodes, and must not be
/// given up then. So the only limits are those that are the same for the next host.
const OF_SEVERAL: Limits = Limits { bytes: 16 << 20, time: Duration::MAX };
/// Copies of a file whose names change while it is copied.
const COPIES_MAX: usize = 3;
/// Most names.
const NAMES_MAX: u64 = 256;
/// Permissions of a copy while attributes are set, in a directory that nobody else can enter.
const COPYING: u32 = 0o600;
/// Bytes between two looks at the clock.
const PIECE_LEN: u64 = 1 << 20;
/// Bytes that are read at once.
const READ_LEN: usize = 1 << 20;

/// A name of a file: its directory, the stored name, and what the store has there.
type Named = (Arc<Dir>, Box<OsStr>, Stat);

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
    /// cannot be copied and has all names itself. The caller may be inside the gate.
    ///
    /// # Errors
    /// Those of the store if the names lead to several inodes, or may do so by now: the file is still open by its row,
    /// and the next attempt begins anew. Those of the content if the names lead to several inodes, and this one is not
    /// current; [`VaultError::ReadOnly`] after the vault was closed; [`VaultError::Anchor`].
    pub(crate) fn taken_over(&self, ino: Ino, old: Arc<dyn BackendFile>) -> Result<Arc<dyn BackendFile>> {
        let Some(anchored) = &self.anchored else { return Ok(old) };
        let _pass = self.gate.enter_again();
        if self.closed.load(Ordering::Acquire) {
            return Err(VaultError::ReadOnly);
        }
        // Not the copy that another user has put under a name: all names of the file would get it.
        if self.has_several_names(ino)? {
            self.must_have_its_owner(ino, || old.stat().map_err(io("stat")))?;
        }
        // If this cannot be told, neither can the old inode be used.
        let is_split = self.is_split(anchored, ino, &old)?;
        if is_split {
            self.must_match_its_row(ino, &old)?;
        }
        let mut tried = 0;
        let mut done = Err(VaultError::Stale);
        for _ in 0..COPIES_MAX {
            let mut names = 0;
            done = self.copy_left_open(anchored, ino, &old).and_then(|copy| {
                names = copy.names.len() as u64;
                let done = self.put_in_place(anchored, ino, (&*old, &copy), &mut tried);
                drop(copy.dir);
                self.drop_staged_dir(&copy.dir_name);
                done.map(|()| copy.file)
            });
            // Its names have changed meanwhile. The next copy has as many.
            let is_stale = tried == 0 && matches!(done, Err(VaultError::Stale));
            if !is_stale || anchored.anchor.row(self.object_of(ino))?.links == names {
                break;
            }
        }
        match done {
            Ok(new) => {
                tracing::info!(file = self.tag(ino), "taken over from a host whose session ended");
                Ok(new)
            }
            // Nothing has changed, and the old inode has all names.
            Err(error) if tried == 0 && !is_split => {
                tracing::warn!(
                    file = self.tag(ino),
                    %error,
                    "another host left this file open, and it cannot be copied: if the store still has writes of that \
                     host in transit, they may destroy what is written now (that would be reported)"
                );
                Ok(old)
            }
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
        let links = anchored.anchor.row(object)?.links;
        if links > NAMES_MAX {
            return Err(VaultError::Refused("it has too many names"));
        }
        let (dir, dir_name) = self.staged_dir()?;
        let names: Vec<_> = (1..=links).map(|number| format!("{COMPANION_PREFIX}{number}").into()).collect();
        let limits = if links > 1 { OF_SEVERAL } else { OF_ONE };
        match copied(&**from, &st, &*dir, &names, &limits) {
            Ok(file) => Ok(Copy { dir, dir_name, names, file }),
            Err(error) => {
                drop(dir);
                self.drop_staged_dir(&dir_name);
                Err(error)
            }
        }
    }

    /// Gives a copy all names of its original, durably, and what was set of that while it was copied. `tried`: how many
    /// names it may have. A step that failed may have been made, or have failed after the name was given.
    fn put_in_place(
        &self,
        anchored: &Anchored,
        ino: Ino,
        (old, copy): (&dyn BackendFile, &Copy),
        tried: &mut usize,
    ) -> Result<()> {
        // Held by the caller, if it is open: attributes are read and set through it.
        let reading = self.files.get(ino).map(|open| {
            let file = self.new_file(ino, copy.file.clone(), false, Profile::DEFAULT)?;
            Ok::<_, VaultError>((open, file))
        });
        let reading = reading.transpose()?;
        {
            // Owner, mode, times and attributes are set with this lock held: from here on, those of the copy.
            let _tree = self.tree.write();
            let id = self.nodes.lock().id(ino).ok_or(VaultError::Stale)?;
            let places = self.places_of_node(anchored, ino)?;
            // A name that stayed with the old inode would be called stale.
            if places.is_empty() || places.len() != copy.names.len() {
                return Err(VaultError::Stale);
            }
            if made_like(old, &*copy.file)? {
                copy.file.sync_all().map_err(io("sync a copy"))?;
            }
            for ((dir, to, _), from) in places.iter().zip(&copy.names) {
                *tried += 1;
                replace(&*copy.dir, from, &*dir.handle, to)?;
            }
            let st = copy.file.stat().map_err(io("stat"))?;
            self.nodes.lock().exchanged(id, StoreId::from(&st));
            self.unsynced.add(StoreId::from(&st));
            if let Some((open, file)) = reading {
                open.go_to(file);
            }
        }
        self.sync_store()
    }

    /// The known names of a file, by the anchor, and what the store has there, whichever inode that is. The caller
    /// holds the tree lock, or looks again.
    fn places_of_node(&self, anchored: &Anchored, ino: Ino) -> Result<Vec<Named>> {
        let (links, object) = {
            let nodes = self.nodes.lock();
            (nodes.links(ino), nodes.object(ino))
        };
        let mut places = Vec::new();
        for link in links {
            let dir = self.dir(link.parent)?;
            let recorded = anchored.anchor.entry(&anchored.place(dir.object, &link.name))?;
            match self.shown(&dir, &link.name)? {
                Some(st) if st.kind == Kind::File && recorded.is_some_and(|entry| entry.object == object) => {
                    places.push((dir, link.name, st));
                }
                Some(_) | None => {}
            }
        }
        Ok(places)
    }

    /// Whether the names of a file lead to several inodes: a takeover was cut off, or a hostile store has made one.
    /// Afterwards its node has all its names.
    fn is_split(&self, anchored: &Anchored, ino: Ino, from: &Arc<dyn BackendFile>) -> Result<bool> {
        let object = self.object_of(ino);
        // Not by the inode, which has one of them if there are two.
        if !(2..=NAMES_MAX).contains(&anchored.anchor.row(object)?.links) {
            return Ok(false);
        }
        self.meet_all_names(anchored, object)?;
        let st = from.stat().map_err(io("stat"))?;
        let _tree = self.tree.read();
        Ok(self.places_of_node(anchored, ino)?.iter().any(|place| !place.2.is_same(&st)))
    }

    /// All names get a copy of one inode, which therefore has to be current as a whole if they lead to several. If it
    /// is not, opening the file by this name fails, and by another it may not.
    fn must_match_its_row(&self, ino: Ino, from: &Arc<dyn BackendFile>) -> Result<()> {
        let len = from.stat().map_err(io("stat"))?.len;
        let (object, tag) = (self.object_of(ino), self.tag(ino));
        let file = File::open_object(self.ctx_silent.clone(), from.clone(), len, &tag, object)?;
        let (mut at, mut buf) = (0, vec![0; READ_LEN]);
        loop {
            match file.read_at(at, &mut buf)? {
                0 => return Ok(()),
                read => at += read as u64,
            }
        }
    }
}

/// A durable copy of a file, with its attributes, owner, mode and times, under names of a directory.
fn copied(
    from: &dyn BackendFile,
    st: &Stat,
    dir: &dyn BackendDir,
    names: &[OsString],
    limits: &Limits,
) -> Result<Arc<dyn BackendFile>> {
    let Some((name, more)) = names.split_first() else { return Err(VaultError::Stale) };
    let to = dir.create_file(name).map_err(io("create a copy"))?;
    if !to.share_all(from).map_err(io("share the blocks of a file"))? {
        copy_data(from, st.len, &*to, limits)?;
    }
    made_like(from, &*to)?;
    to.sync_all().map_err(io("sync a copy"))?;
    for other in more {
        dir.hold(name).and_then(|held| held.link(dir, other)).map_err(io("link"))?;
    }
    Ok(to)
}

/// Gives a copy the attributes, the owner, the mode and the times that its original has now. False: it had them.
fn made_like(from: &dyn BackendFile, to: &dyn BackendFile) -> Result<bool> {
    let attrs_of = |file: &dyn BackendFile| shown_attrs(|| file.list_xattr(), |attr| file.get_xattr(attr));
    let (attrs, had) = (attrs_of(from)?, attrs_of(to)?);
    let (st, made) = (from.stat().map_err(io("stat"))?, to.stat().map_err(io("stat"))?);
    // As `Vault::mode_in_store`.
    let mode = st.mode & !SET_ID;
    let shown = |st: &Stat, mode| (st.uid, st.gid, mode, st.atime, st.mtime);
    if attrs == had && shown(&st, mode) == shown(&made, made.mode) {
        return Ok(false);
    }
    if attrs != had {
        // It may have the mode already, which may deny that to its owner, which is this process.
        to.set_mode(COPYING).map_err(io("set the mode"))?;
    }
    for (attr, value) in attrs.iter().filter(|(attr, value)| had.get(*attr) != Some(*value)) {
        to.set_xattr(attr, value, 0).map_err(io("set an attribute"))?;
    }
    for attr in had.keys().filter(|attr| !attrs.contains_key(*attr)) {
        to.remove_xattr(attr).map_err(io("remove an attribute"))?;
    }
    if (made.uid, made.gid) != (st.uid, st.gid) {
        to.set_owner(Some(st.uid), Some(st.gid)).map_err(io("set the owner"))?;
    }
    to.set_mode(mode).map_err(io("set the mode"))?;
    to.set_times(SetTime::At(st.atime), SetTime::At(st.mtime)).map_err(io("set times"))?;
    Ok(true)
}

/// Copies the data of a file of length `len`, and leaves its holes.
fn copy_data(from: &dyn BackendFile, len: u64, to: &dyn BackendFile, limits: &Limits) -> Result<()> {
    let (begun, mut at, mut done) = (Instant::now(), 0, 0);
    while let Some(data) = from.seek_data(at).map_err(io("seek data"))?.filter(|data| *data < len) {
        let end = from.seek_hole(data).map_err(io("seek a hole"))?.map_or(len, |hole| hole.min(len));
        at = end.min(data + PIECE_LEN);
        done += at - data;
        if done > limits.bytes || begun.elapsed() > limits.time {
            return Err(VaultError::Refused("the store cannot share its blocks, and to copy it takes too long"));
        }
        to.copy_from(from, data, data, at - data).map_err(io("copy"))?;
    }
    to.set_len(len).map_err(io("set the length"))
}
