//! An anchored vault (`docs/freshness.md`): what is served is what the anchor says, and the anchor is told in the right
//! order. Nothing here is reached in an un-anchored vault.
//!
//! | module | what it does |
//! |---|---|
//! | this one | what an anchored vault keeps; rows of nodes; what is stale |
//! | `digest` | digests of records and link targets |
//! | `trees` | where tree records of files lie |

mod digest;
mod trees;

pub(crate) use digest::digest_of_text;

use crate::dirs::Dir;
use crate::{Ino, Kind, Result, Vault, VaultError};
use lamassu_anchor::{Anchor, EntryPlace, Mark, ObjectId, ObjectKind, Row};
use lamassu_store::BackendDir;
use lamassu_store::file::AnchoredFiles;
use parking_lot::Mutex;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use trees::TreeFiles;

/// What an anchored vault keeps.
pub(crate) struct Anchored {
    pub anchor: Arc<Anchor>,
    pub files: Arc<AnchoredFiles>,
    trees: Arc<TreeFiles>,
    /// Up to where a barrier of the whole store has covered names.
    covered: Mutex<Mark>,
}

impl Anchored {
    pub fn new(anchor: Arc<Anchor>, root: Arc<dyn BackendDir>, read_only: bool) -> Anchored {
        let trees = Arc::new(TreeFiles::new(root, read_only));
        let files = AnchoredFiles::new(anchor.clone(), trees.clone());
        // Nothing is queued yet.
        let covered = Mutex::new(anchor.mark());
        Anchored { anchor, files, trees, covered }
    }

    /// Where an entry of the store is in the anchor.
    pub fn place(&self, dir: ObjectId, stored: &OsStr) -> EntryPlace {
        EntryPlace { dir, name: self.anchor.token(dir, stored.as_bytes()) }
    }
}

/// What the anchor calls a kind.
pub(crate) fn object_kind(kind: Kind) -> ObjectKind {
    match kind {
        Kind::File => ObjectKind::File,
        Kind::Dir => ObjectKind::Dir,
        Kind::Symlink => ObjectKind::Link,
        Kind::Fifo => ObjectKind::Fifo,
        Kind::Socket => ObjectKind::Socket,
        Kind::CharDevice => ObjectKind::Char,
        Kind::BlockDevice => ObjectKind::Block,
    }
}

impl Vault {
    /// The row of a node's object; `None` in an un-anchored vault.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn row_of(&self, ino: Ino) -> Result<Option<Row>> {
        let Some(anchored) = &self.anchored else { return Ok(None) };
        let object = self.nodes.lock().object(ino);
        Ok(Some(anchored.anchor.row(object)?))
    }

    /// The error, and the line of the log, for what is not the newest: `what` is under the name `stored` of a directory.
    pub(crate) fn outdated(&self, what: &'static str, parent: Ino, stored: &OsStr) -> VaultError {
        let stored = self.path_in(parent, stored).display().to_string();
        tracing::error!(entry = stored, "stale {what}: the store shows another state than the newest");
        VaultError::Outdated { what, stored }
    }

    /// Where an entry is in the anchor, if there is one.
    pub(crate) fn entry_place(&self, dir: &Dir, stored: &OsStr) -> Option<EntryPlace> {
        self.anchored.as_ref().map(|anchored| anchored.place(dir.object, stored))
    }
}
