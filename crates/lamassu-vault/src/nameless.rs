//! Files whose last name a rename(2) has replaced, but which the kernel still refers to.
//!
//! Between looking up a name and opening the file, the kernel may pass on another process's rename over that name. On a
//! local file system the open succeeds, since an inode lives while it is referred to. Here the backing inode would be
//! gone with its name. The kernel repeats the lookup after `ESTALE`, but while a program replaces the file again and
//! again the second one fails too. So the backing file is opened before the name goes, and kept until the kernel
//! forgets the inode, which it does at once unless it is about to open it. (After unlink(2) the second lookup finds
//! nothing, which is right, so nothing is kept.)
//!
//! Uncommitted data of such a file exist in this process alone: barriers and commits of the anchor do not cover a file
//! without a name. So the file also stays in the table of files until the kernel has forgotten it.

use crate::handles::OpenFile;
use crate::inode::StoreId;
use crate::room::Closing;
use crate::{Ino, Kind, Vault};
use lamassu_store::backend::Stat;
use lamassu_store::{BackendDir, BackendFile};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::Arc;

/// Most files kept, since each takes a descriptor. Beyond that the open fails as on NFS (`ESTALE`).
const KEPT_MAX: usize = 256;

/// A backing file, and whether it may be written through.
type Kept = (Arc<dyn BackendFile>, bool);

/// Backing files by inode number. Each is dropped before its [`Closing`].
#[derive(Default)]
pub(crate) struct Nameless {
    kept: Mutex<HashMap<Ino, (Kept, Closing)>>,
}

impl Nameless {
    pub fn get(&self, ino: Ino) -> Option<Kept> {
        self.kept.lock().get(&ino).map(|(kept, _)| kept.clone())
    }

    pub fn remove(&self, ino: Ino) {
        let gone = self.kept.lock().remove(&ino);
        drop(gone);
    }

    /// The last name is gone.
    pub fn note_nameless(&self, ino: Ino) {
        if let Some((_, closing)) = self.kept.lock().get(&ino) {
            closing.is_nameless();
        }
    }

    pub fn clear(&self) {
        self.kept.lock().clear();
    }
}

impl Vault {
    /// To be called before the entry `name` with stat `st` is replaced. If that is the last name of a file that the
    /// kernel refers to, keeps the backing file, and returns the inode number. If the name stays after all, give the
    /// number to [`Nameless::remove`].
    pub(crate) fn keep_nameless(&self, dir: &dyn BackendDir, name: &OsStr, st: &Stat) -> Option<Ino> {
        if st.kind != Kind::File || st.nlink > 1 {
            return None;
        }
        let ino = self.nodes.lock().find(StoreId::from(st))?;
        let open = |write| dir.open_same(name, st, write).ok().flatten().map(|file| (file, write));
        let (file, writable) = open(true).or_else(|| open(false))?;
        let mut kept = self.nameless.kept.lock();
        if kept.len() >= KEPT_MAX {
            let nodes = self.nodes.lock();
            kept.retain(|ino, _| nodes.kind(*ino).is_some());
        }
        if kept.len() >= KEPT_MAX {
            return None;
        }
        kept.insert(ino, ((file, writable), self.room.closing(ino)));
        Some(ino)
    }

    /// Whether the kernel may yet open such a file.
    pub(crate) fn may_be_opened_nameless(&self, ino: Ino) -> bool {
        self.nameless.get(ino).is_some() && self.nodes.lock().is_referred_to(ino)
    }

    /// To be called when references were given back. The file is dropped with the last one.
    pub(crate) fn forget_nameless(&self, ino: Ino) {
        if self.nameless.get(ino).is_some() && !self.nodes.lock().is_referred_to(ino) {
            self.let_go(ino, true);
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
