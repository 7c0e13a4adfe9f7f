//! An anchored vault (`docs/freshness.md`): users see what the anchor says, and the anchor is told in the right order.
//! This module is not used in a vault without an anchor.
//!
//! | module | what it does |
//! |---|---|
//! | this one | the state of an anchored vault; rows of nodes; outdated objects |
//! | `entries` | what names lead to; modes and owners |
//! | `make`, `moves`, `depart` | entries that are made, moved, and removed |
//! | `unsettled` | a move without an outcome, and places that must stay as they are |
//! | `lost` | unrecorded entries |
//! | `recover`, `history`, `kept`, `locate` | recovery of names after a crash |
//! | `takeover` | files that another host left open |
//! | `commit` | commits of the anchor, and what fsync waits for |
//! | `sealed` | records, link targets, attributes: verified by their digests, replaced in order |
//! | `rebuild`, `accept`, `take` | anchors of existing vaults; a person's acceptance |
//! | `trees` | where tree records of files are stored |
//! | `used` | whether a writer uses the vault |

pub(crate) mod accept;
mod commit;
mod depart;
mod entries;
mod history;
mod kept;
mod locate;
mod lost;
mod make;
mod moves;
pub(crate) mod rebuild;
mod recover;
mod sealed;
mod take;
mod takeover;
mod trees;
mod unsettled;
mod used;

pub(crate) use depart::{Blocked, Departing};
pub(crate) use entries::over_row;
pub(crate) use make::Fresh;
pub(crate) use moves::Moving;
pub(crate) use recover::{MovesLeft, RECOVERY_STEP, is_absent};
pub(crate) use take::shown as shown_attrs;
pub(crate) use trees::TreeFiles;
pub(crate) use unsettled::{End, Unsettled};

use crate::dirs::Dir;
use crate::event::{IntegrityEvent, IntegrityKind, place_of};
use crate::handles::OpenFile;
use crate::{Ino, Result, Vault, VaultError};
use lamassu_anchor::{Anchor, AnchorError, EntryMark, EntryPlace, ObjectId, Row};
use lamassu_store::BackendDir;
use lamassu_store::file::AnchoredFiles;
use parking_lot::{Mutex, RwLock};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Files that earlier writers left open: as objects and, once one is needed, by place.
#[derive(Default)]
struct ToRecover {
    objects: HashSet<ObjectId>,
    places: Vec<EntryPlace>,
}

/// The state of an anchored vault.
pub(crate) struct Anchored {
    pub anchor: Arc<Anchor>,
    pub files: Arc<AnchoredFiles>,
    trees: Arc<TreeFiles>,
    /// Objects that are gone, of which there may be tree records: removed in the background where hosts take turns.
    gone: Mutex<Vec<ObjectId>>,
    /// The mark of the last barrier of the whole store for names.
    covered: Mutex<EntryMark>,
    /// When the first uncommitted change was queued; 0: there is none.
    queued_since: AtomicU64,
    departures: depart::Departures,
    unsettled: unsettled::Unsettleds,
    /// Held during a pass that carries out removals.
    carrying: Mutex<()>,
    /// An earlier writer ended without closing the vault: unrecorded entries are probably its last ones.
    after_crash: AtomicBool,
    /// The anchor durably says that this process uses the vault.
    in_use: AtomicBool,
    /// A commit that ends the use has failed, and may have been made.
    is_use_in_doubt: AtomicBool,
    /// Files that earlier writers left open.
    to_recover: Mutex<ToRecover>,
    /// Unrecorded entries that were reported.
    told: Mutex<HashSet<EntryPlace>>,
    /// Nodes whose mode or owner the store does not accept.
    unmendable: Mutex<HashSet<Ino>>,
    /// Held shared to read a node's attributes as a whole, and exclusively to change them.
    attrs_locks: [RwLock<()>; crate::STRIPES],
    /// Held while the mode and the owner of a node change in the store and in its row: a lookup corrects one by the
    /// other.
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
            gone: Mutex::default(),
            covered,
            queued_since: AtomicU64::new(0),
            departures: depart::Departures::default(),
            unsettled: unsettled::Unsettleds::default(),
            carrying: Mutex::new(()),
            after_crash: AtomicBool::new(false),
            in_use: AtomicBool::new(false),
            is_use_in_doubt: AtomicBool::new(false),
            to_recover: Mutex::default(),
            told: Mutex::default(),
            unmendable: Mutex::default(),
            attrs_locks: std::array::from_fn(|_| RwLock::new(())),
            mode_locks: std::array::from_fn(|_| Mutex::new(())),
        }
    }

    /// Keeps a file that has lost its last name until the store has removed it.
    pub fn keep(&self, open: Arc<OpenFile>) {
        self.departures.keep(open);
    }

    fn note_open(&self, objects: Vec<ObjectId>) {
        self.to_recover.lock().objects.extend(objects);
    }

    /// The next of these files, by place.
    fn next_open(&self) -> Result<Option<EntryPlace>> {
        let to_recover = &mut *self.to_recover.lock();
        if !to_recover.objects.is_empty() {
            to_recover.places = self.anchor.places_of(&to_recover.objects)?.into_values().collect();
            to_recover.objects.clear();
        }
        Ok(to_recover.places.pop())
    }

    /// The anchor's place of an entry of the store.
    pub fn place(&self, dir: ObjectId, stored: &OsStr) -> EntryPlace {
        EntryPlace { dir, name: self.anchor.token(dir, stored.as_bytes()) }
    }
}

impl Vault {
    /// The row of a node's object; `None` in a vault without an anchor.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn row_of(&self, ino: Ino) -> Result<Option<Row>> {
        let Some(anchored) = &self.anchored else { return Ok(None) };
        let object = self.nodes.lock().object(ino);
        Ok(Some(anchored.anchor.row(object)?))
    }

    /// The same for an object.
    ///
    /// # Errors
    /// As [`Vault::row_of`].
    pub(crate) fn row_of_object(&self, object: ObjectId) -> Result<Option<Row>> {
        self.anchored.as_ref().map(|anchored| Ok(anchored.anchor.row(object)?)).transpose()
    }

    /// The object that the anchor has at a place; `None` also in a vault without an anchor.
    ///
    /// # Errors
    /// As [`Vault::row_of`].
    pub(crate) fn object_if_recorded(&self, dir: &Dir, stored: &OsStr) -> Result<Option<ObjectId>> {
        let Some(anchored) = &self.anchored else { return Ok(None) };
        Ok(anchored.anchor.entry(&anchored.place(dir.object, stored))?.map(|entry| entry.object))
    }

    /// The object of a node, if the anchor has a name for it.
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

    /// The error, and the event, for an outdated object: `what` is under the name `stored` of a directory.
    pub(crate) fn outdated(&self, what: &'static str, parent: Ino, stored: &OsStr) -> VaultError {
        let stored = self.path_in(parent, stored).display().to_string();
        self.outdated_as(IntegrityKind::Stale, what, stored)
    }

    /// The same with a kind of its own.
    pub(crate) fn outdated_as(&self, kind: IntegrityKind, what: &'static str, stored: String) -> VaultError {
        let (path, inode) = place_of(&stored);
        let event = kind.at(path, format!("{what}: the store shows another state than the newest"));
        self.tell(IntegrityEvent { inode, ..event });
        VaultError::Outdated { what, stored }
    }
}
