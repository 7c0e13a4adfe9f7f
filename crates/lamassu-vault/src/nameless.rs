//! Files without a name that programs have open, or that the kernel still refers to.
//!
//! A file whose last name a rename(2) has replaced is kept for an open that is under way.
//! Between looking up a name and opening the file, the kernel may pass on another process's rename over that name. On a
//! local file system the open succeeds, since an inode lives while it is referred to. Here the backing inode would be
//! gone with its name. The kernel repeats the lookup after `ESTALE`, but while a program replaces the file again and
//! again the second one fails too. So the backing file is opened before the name goes, and kept until the kernel
//! forgets the inode, which it does at once unless it is about to open it. (After unlink(2) the second lookup finds
//! nothing, which is right, so nothing is kept for an open.)
//!
//! Where hosts take turns, a file that programs have open is kept from one turn to the next: its backing file stays
//! open, and its row goes from the anchor of one turn to that of the next ([`NamelessFile`]), under the same number. No
//! other host sees it. A handle that was not used in the turn in which its file loses the last name has no backing file
//! yet, so that is opened before.
//!
//! Uncommitted data of such a file exist in this process alone: barriers and commits of the anchor do not cover a file
//! without a name. So the file also stays in the table of files until the kernel has forgotten it.

use crate::handles::OpenFile;
use crate::inode::StoreId;
use crate::room::Closing;
use crate::{Ino, Kind, Vault};
use lamassu_anchor::{ObjectId, Row};
use lamassu_store::backend::{Stat, fenced_again};
use lamassu_store::{BackendDir, BackendFile};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::sync::Arc;

/// Most files kept for an open that is under way, since each takes a descriptor. Beyond that the open fails as on NFS
/// (`ESTALE`).
const KEPT_MAX: usize = 256;

/// A backing file, and whether it may be written through.
pub(crate) type Kept = (Arc<dyn BackendFile>, bool);

/// A kept file. The backing file is dropped before its [`Closing`].
struct Held {
    kept: Kept,
    closing: Closing,
    /// Its removal was committed in an earlier turn.
    is_of_earlier_turn: bool,
}

/// Backing files by inode number.
#[derive(Default)]
pub(crate) struct Nameless {
    /// Kept for an open that is under way.
    kept: Mutex<HashMap<Ino, Held>>,
    /// Kept for handles of earlier turns: each would have a descriptor anyway.
    left: Mutex<HashMap<Ino, Held>>,
}

impl Nameless {
    fn both(&self) -> [&Mutex<HashMap<Ino, Held>>; 2] {
        [&self.left, &self.kept]
    }

    fn with<T>(&self, ino: Ino, read: impl Fn(&Held) -> T) -> Option<T> {
        self.both().into_iter().find_map(|kept| kept.lock().get(&ino).map(&read))
    }

    pub fn get(&self, ino: Ino) -> Option<Kept> {
        self.with(ino, |held| held.kept.clone())
    }

    pub fn remove(&self, ino: Ino) {
        for kept in self.both() {
            let gone = kept.lock().remove(&ino);
            drop(gone);
        }
    }

    /// The last name is gone.
    pub fn note_nameless(&self, ino: Ino) {
        self.with(ino, |held| held.closing.is_nameless());
    }

    pub fn clear(&self) {
        self.both().into_iter().for_each(|kept| kept.lock().clear());
    }
}

/// A file without a name that programs have open, at the end of a turn.
pub(crate) struct OpenNameless {
    ino: Ino,
    object: ObjectId,
    backing: Kept,
    is_of_earlier_turn: bool,
}

/// Such a file between two turns.
pub(crate) struct NamelessFile {
    pub object: ObjectId,
    row: Row,
    backing: Kept,
}

impl Vault {
    /// The files without a name that some handles refer to, of these inodes.
    pub(crate) fn open_without_name(&self, of_handles: HashSet<Ino>) -> Vec<OpenNameless> {
        let gone: Vec<(Ino, ObjectId)> = {
            let nodes = self.nodes.lock();
            let gone = of_handles.into_iter().filter(|ino| !nodes.is_live(*ino));
            gone.map(|ino| (ino, nodes.object(ino))).collect()
        };
        let of = |(ino, object)| {
            let open = self.files.get(ino).map(|open| (open.file().backing().clone(), open.is_writable()));
            let backing = match (open, self.nameless.get(ino)) {
                (Some((_, false)), Some(kept @ (_, true))) => Some(kept),
                (open, kept) => open.or(kept),
            };
            let is_of_earlier_turn = self.nameless.with(ino, |held| held.is_of_earlier_turn).unwrap_or_default();
            backing.map(|backing| OpenNameless { ino, object, backing, is_of_earlier_turn })
        };
        gone.into_iter().filter_map(of).collect()
    }

    /// What is left of such files after the vault was closed, for the next turn: those of which everything is
    /// committed, so none of those that were written in vain (`uncommitted`). A file that may get its name again is not
    /// kept: its removal was not committed, or the store has not carried it out. What else was not committed, perhaps
    /// another user's, does not matter.
    pub(crate) fn leave_without_name(
        &self,
        open: Vec<OpenNameless>,
        uncommitted: &HashSet<Ino>,
    ) -> HashMap<Ino, NamelessFile> {
        let Some(anchored) = &self.anchored else { return HashMap::new() };
        let mut left = HashMap::new();
        for OpenNameless { ino, object, backing: (file, writable), is_of_earlier_turn } in open {
            if uncommitted.contains(&ino) {
                continue;
            }
            let is_removed = is_of_earlier_turn || anchored.anchor.is_removed_for_good(object);
            if let Some(row) = anchored.anchor.take_nameless(object).filter(|_| is_removed) {
                let backing = (file.unfenced().unwrap_or(file), writable);
                left.insert(ino, NamelessFile { object, row, backing });
            }
        }
        left
    }

    /// Continues with such a file of an earlier turn.
    pub(crate) fn take_up_without_name(&self, ino: Ino, file: NamelessFile) {
        let Some(anchored) = &self.anchored else { return };
        let NamelessFile { object, row, backing: (backing, writable) } = file;
        anchored.anchor.keep_nameless(object, row);
        let closing = self.room.closing(ino);
        closing.has_no_name();
        let kept = (fenced_again(backing, &anchored.anchor), writable);
        self.nameless.left.lock().insert(ino, Held { kept, closing, is_of_earlier_turn: true });
    }

    /// To be called before the entry `name` with stat `st` is removed: keeps the backing file if handles of an earlier
    /// turn refer to it. (Those of this turn have the file open.) Whether this is the last name is not asked: another
    /// thread may be about to remove the other one. A file that keeps a name is opened by that; and if this name stays
    /// after all, the backing file still must, for that thread.
    pub(crate) fn keep_left_open(&self, dir: &dyn BackendDir, name: &OsStr, st: &Stat) {
        let Some(ino) = self.nodes.lock().find(StoreId::from(st)).filter(|ino| self.left.had_file(*ino)) else {
            return;
        };
        if st.kind == Kind::File
            && let Some(kept) = self.backing_of(ino, dir, name, st)
        {
            self.keep_left(ino, kept);
        }
    }

    fn keep_left(&self, ino: Ino, kept: Kept) {
        let held = Held { kept, closing: self.room.closing(ino), is_of_earlier_turn: false };
        let replaced = self.nameless.left.lock().insert(ino, held);
        drop(replaced);
    }

    /// The backing file of an entry: the one that is open for writing, or opened anew.
    fn backing_of(&self, ino: Ino, dir: &dyn BackendDir, name: &OsStr, st: &Stat) -> Option<Kept> {
        let open = |write| dir.open_same(name, st, write).ok().flatten().map(|file| (file, write));
        match self.files.get(ino).filter(|open| open.is_writable()) {
            Some(open) => Some((open.file().backing().clone(), true)),
            None => open(true).or_else(|| open(false)),
        }
    }

    /// To be called before the entry `name` with stat `st` is replaced. If that is the last name of a file that the
    /// kernel refers to, keeps the backing file, and returns the inode number. If the name stays after all, give the
    /// number to [`Nameless::remove`].
    pub(crate) fn keep_nameless(&self, dir: &dyn BackendDir, name: &OsStr, st: &Stat) -> Option<Ino> {
        if st.kind != Kind::File {
            return None;
        }
        let (ino, object) = {
            let nodes = self.nodes.lock();
            let ino = nodes.find(StoreId::from(st))?;
            (ino, nodes.object(ino))
        };
        // The store may still have names that are removed already.
        let names = self.anchored.as_ref().and_then(|anchored| anchored.anchor.row(object).ok()).map(|row| row.links);
        if names.unwrap_or(st.nlink) > 1 {
            return None;
        }
        let file = self.backing_of(ino, dir, name, st)?;
        if self.left.had_file(ino) {
            self.keep_left(ino, file);
            return Some(ino);
        }
        let mut kept = self.nameless.kept.lock();
        if kept.len() >= KEPT_MAX {
            let nodes = self.nodes.lock();
            kept.retain(|ino, _| nodes.kind(*ino).is_some());
        }
        if kept.len() >= KEPT_MAX {
            return None;
        }
        let closing = self.room.closing(ino);
        kept.insert(ino, Held { kept: file, closing, is_of_earlier_turn: false });
        Some(ino)
    }

    /// Whether the kernel may yet open such a file.
    pub(crate) fn may_be_opened_nameless(&self, ino: Ino) -> bool {
        self.nameless.get(ino).is_some() && self.nodes.lock().is_referred_to(ino)
    }

    /// To be called when references were given back. The file is dropped with the last one. While the outcome of a move
    /// over its name is unknown it may keep that name, so what it buffers stays.
    pub(crate) fn forget_nameless(&self, ino: Ino) {
        if self.nameless.get(ino).is_none() {
            return;
        }
        let (is_referred_to, is_live) = {
            let nodes = self.nodes.lock();
            (nodes.is_referred_to(ino), nodes.is_live(ino))
        };
        if !is_referred_to {
            self.let_go(ino, !is_live);
        }
        if self.nameless.get(ino).is_some() && self.nodes.lock().kind(ino).is_none() {
            self.nameless.remove(ino);
        }
    }

    /// Such a file, for stat, by a caller that will not write. Nothing is reported: unsettled data of a writer are lost
    /// with the file.
    pub(crate) fn open_nameless(&self, ino: Ino) -> Option<Arc<OpenFile>> {
        let (backing, _) = self.nameless.get(ino)?;
        let len = backing.stat().ok()?.len;
        let file = self.file_of_node(ino, &self.ctx_silent, backing, len, &self.tag(ino)).ok()?;
        Some(OpenFile::new(ino, file, false, &self.room))
    }
}
