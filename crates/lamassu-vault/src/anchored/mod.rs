//! An anchored vault (`docs/freshness.md`): what is served is what the anchor says, and the anchor is told in the right
//! order. Nothing here is reached in an un-anchored vault.
//!
//! | module | what it does |
//! |---|---|
//! | this one | what an anchored vault keeps; rows of nodes; what is stale |
//! | `entries` | what names lead to; modes and owners |
//! | `make`, `moves`, `depart` | entries that are made, that move, and that go |
//! | `lost` | what is not recorded |
//! | `recover`, `history`, `locate` | what a crash left |
//! | `commit` | commits of the anchor, and what fsync waits for |
//! | `sealed` | records, link targets, attributes: read by their digests, replaced in order |
//! | `rebuild`, `accept`, `take` | anchors of what is there already; what a person accepts |
//! | `digest` | those digests |
//! | `trees` | where tree records of files lie |

pub(crate) mod accept;
mod commit;
mod depart;
mod digest;
mod entries;
mod history;
mod locate;
mod lost;
mod make;
mod moves;
pub(crate) mod rebuild;
mod recover;
mod sealed;
mod take;
mod trees;
mod used;

pub(crate) use depart::Departing;
pub(crate) use digest::{StoredAttrs, digest_of_attributes, digest_of_dataset, digest_of_link, digest_of_text};
pub(crate) use entries::over_row;
pub(crate) use make::{Fresh, TRIES_MAX};
pub(crate) use moves::Moving;
pub(crate) use recover::MovesLeft;
pub(crate) use sealed::ShownLink;
pub(crate) use take::shown as shown_attrs;
pub(crate) use trees::TreeFiles;

use crate::event::{IntegrityEvent, IntegrityKind, place_of};
use crate::open::OpenFile;
use crate::{Ino, Kind, Result, Vault, VaultError};
use lamassu_anchor::{Anchor, AnchorError, EntryPlace, Mark, ObjectId, ObjectKind, Row};
use lamassu_store::BackendDir;
use lamassu_store::file::AnchoredFiles;
use parking_lot::{Mutex, RwLock};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Files that earlier writers left open: as objects, and once one is needed by where they lie.
#[derive(Default)]
struct ToRecover {
    objects: HashSet<ObjectId>,
    places: Vec<EntryPlace>,
}

/// What an anchored vault keeps.
pub(crate) struct Anchored {
    pub anchor: Arc<Anchor>,
    pub files: Arc<AnchoredFiles>,
    trees: Arc<TreeFiles>,
    /// Up to where a barrier of the whole store has covered names.
    covered: Mutex<Mark>,
    /// When the first change was queued that is not committed; 0: there is none.
    queued_since: AtomicU64,
    departures: depart::Departures,
    /// One pass of carrying out at a time.
    carrying: Mutex<()>,
    /// An earlier writer ended without closing the vault: what is not recorded is likely what it made last.
    after_crash: AtomicBool,
    /// The anchor says durably that this process uses the vault.
    in_use: AtomicBool,
    /// Files that earlier writers left open.
    to_recover: Mutex<ToRecover>,
    /// Unrecorded entries that people were told of.
    told: Mutex<HashSet<EntryPlace>>,
    /// Nodes whose mode or owner the store does not take.
    unmendable: Mutex<HashSet<Ino>>,
    /// Attributes of a node are looked at together, and change alone.
    attrs_locks: [RwLock<()>; crate::STRIPES],
    /// The mode and the owner of a node change in the store and in its row together: a lookup mends one by the other.
    mode_locks: [Mutex<()>; crate::STRIPES],
}

impl Anchored {
    pub fn new(anchor: Arc<Anchor>, root: Arc<dyn BackendDir>, read_only: bool) -> Anchored {
        let trees = Arc::new(TreeFiles::new(root, read_only));
        let files = AnchoredFiles::new(anchor.clone(), trees.clone());
        // Nothing is queued yet.
        let covered = Mutex::new(anchor.mark());
        Anchored {
            anchor,
            files,
            trees,
            covered,
            queued_since: AtomicU64::new(0),
            departures: depart::Departures::default(),
            carrying: Mutex::new(()),
            after_crash: AtomicBool::new(false),
            in_use: AtomicBool::new(false),
            to_recover: Mutex::default(),
            told: Mutex::default(),
            unmendable: Mutex::default(),
            attrs_locks: std::array::from_fn(|_| RwLock::new(())),
            mode_locks: std::array::from_fn(|_| Mutex::new(())),
        }
    }

    /// Keeps a file that has lost its last name until the store knows.
    pub fn keep(&self, open: Arc<OpenFile>) {
        self.departures.keep(open);
    }

    fn note_open(&self, objects: Vec<ObjectId>) {
        self.to_recover.lock().objects.extend(objects);
    }

    /// The next of these files, by where they lie.
    fn next_open(&self, most: usize) -> Result<Vec<EntryPlace>> {
        let to_recover = &mut *self.to_recover.lock();
        if !to_recover.objects.is_empty() {
            to_recover.places = self.anchor.places_of(&to_recover.objects)?.into_values().collect();
            to_recover.objects.clear();
        }
        let left = to_recover.places.len().saturating_sub(most);
        Ok(to_recover.places.split_off(left))
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

/// What users call it.
pub(crate) fn kind(kind: ObjectKind) -> Kind {
    match kind {
        ObjectKind::File => Kind::File,
        ObjectKind::Dir => Kind::Dir,
        ObjectKind::Link => Kind::Symlink,
        ObjectKind::Fifo => Kind::Fifo,
        ObjectKind::Socket => Kind::Socket,
        ObjectKind::Char => Kind::CharDevice,
        ObjectKind::Block => Kind::BlockDevice,
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

    /// The object of a node, if the anchor has it under a name.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn recorded(&self, ino: Ino) -> Result<Option<ObjectId>> {
        let Some(anchored) = &self.anchored else { return Ok(None) };
        let object = self.nodes.lock().object(ino);
        match anchored.anchor.row(object) {
            Ok(row) => Ok((row.links > 0).then_some(object)),
            Err(AnchorError::Unknown { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The error, and the event, for what is not the newest: `what` is under the name `stored` of a directory.
    pub(crate) fn outdated(&self, what: &'static str, parent: Ino, stored: &OsStr) -> VaultError {
        let stored = self.path_in(parent, stored).display().to_string();
        self.outdated_as(IntegrityKind::Stale, what, stored)
    }

    /// The same of a kind of its own.
    pub(crate) fn outdated_as(&self, kind: IntegrityKind, what: &'static str, stored: String) -> VaultError {
        let (path, inode) = place_of(&stored);
        let event = kind.at(path, format!("{what}: the store shows another state than the newest"));
        self.tell(IntegrityEvent { inode, ..event });
        VaultError::Outdated { what, stored }
    }
}
