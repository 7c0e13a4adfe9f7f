//! State that the files of an anchored vault share (`docs/freshness.md`, section 3): the anchor, where tree records
//! lie, and the files that were closed before the anchor could learn their state.
//!
//! A file is closed as soon as its pages are final. Its last pages may not be durable then, and no commit of the anchor
//! may record them (A4). Until a barrier of the whole store has covered them, the file is remembered here, so that the
//! process knows every page that it wrote.

use super::fetching::{Fetching, ReadTime};
use crate::integrity::Records;
use lamassu_anchor::{Anchor, AnchorError, Digest, FileCommit, ObjectId, Window};
use lamassu_format::tree::Shape;
use lamassu_format::{PageNo, Profile};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where the tree records of files lie: a cache that is never trusted.
pub trait Trees: Send + Sync {
    /// Those of one of a file's trees.
    fn records(&self, object: ObjectId, of: TreeOf) -> Arc<dyn Records>;
}

/// What a tree of a file is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TreeOf {
    /// Its pages.
    Pages,
    /// Its blocks, as they lie in the store.
    Blocks,
}

/// The state of a closed file whose last pages no commit of the anchor covers.
#[derive(Clone, Debug)]
pub(super) struct ClosedFile {
    pub root: Digest,
    pub pages: u64,
    pub size: u64,
    pub profile: Profile,
    /// The session that wrote its pages last, and the highest sequence. `None`: no page with a stamp.
    pub last: Option<Window>,
    /// The durable row may note a shrink that no page 0 records, see `Known`.
    pub unmade: Option<PageNo>,
    /// The root over its blocks, if that is known.
    pub blocks: Option<Digest>,
    /// Distinguishes it from the same file, closed again.
    pub number: u64,
}

/// The number of a file that is being opened: no barrier covers it, since its writer is about to take it over.
const OPENING: u64 = 0;

#[derive(Default)]
struct Closed {
    files: HashMap<ObjectId, ClosedFile>,
    numbers: u64,
}

/// The anchor and the state that all files of an anchored vault share.
pub struct AnchoredFiles {
    anchor: Arc<Anchor>,
    trees: Arc<dyn Trees>,
    shape: Shape,
    has_blocks: bool,
    fetching: Fetching,
    read_time: ReadTime,
    closed: Mutex<Closed>,
    /// Barriers of the whole store that failed.
    lost_barriers: AtomicU64,
}

/// Which files were closed before a barrier of the whole store began.
#[derive(Clone, Debug, Default)]
pub struct ClosedFiles(Vec<(ObjectId, u64)>);

impl ClosedFiles {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl AnchoredFiles {
    /// Over an open anchor.
    pub fn new(anchor: Arc<Anchor>, trees: Arc<dyn Trees>) -> Arc<AnchoredFiles> {
        AnchoredFiles::with(anchor, trees, Fetching::default())
    }

    /// The same, with a choice of how tree records are fetched.
    pub fn with(anchor: Arc<Anchor>, trees: Arc<dyn Trees>, fetching: Fetching) -> Arc<AnchoredFiles> {
        // An invalid degree is refused with the row of the vault.
        let shape = Shape::new(anchor.degree()).unwrap_or_default();
        let has_blocks = anchor.has_blocks();
        let (read_time, closed, lost_barriers) = Default::default();
        Arc::new(AnchoredFiles { anchor, trees, shape, has_blocks, fetching, read_time, closed, lost_barriers })
    }

    /// The anchor.
    pub fn anchor(&self) -> &Arc<Anchor> {
        &self.anchor
    }

    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    pub(super) fn fetching(&self) -> Fetching {
        self.fetching
    }

    pub(super) fn read_time(&self) -> &ReadTime {
        &self.read_time
    }

    pub(super) fn has_blocks(&self) -> bool {
        self.has_blocks
    }

    pub(super) fn records(&self, object: ObjectId, of: TreeOf) -> Arc<dyn Records> {
        self.trees.records(object, of)
    }

    /// To be called before a barrier of the whole store: the files that were closed until now, with pages that no
    /// commit of the anchor covers.
    pub fn closed(&self) -> ClosedFiles {
        let closed = self.closed.lock();
        let closed = closed.files.iter().filter(|(_, file)| file.number != OPENING);
        ClosedFiles(closed.map(|(object, file)| (*object, file.number)).collect())
    }

    /// To be called when such a barrier has failed: forgets all of them. What the store has of their last pages is not
    /// known, and a later barrier says nothing about it (I11). Their rows still accept both that and what was committed
    /// before (A1, A6): they are judged when they are opened again. Files that have taken a state over write it again.
    pub fn barrier_failed(&self) {
        let closed = &mut *self.closed.lock();
        closed.files.clear();
        self.lost_barriers.fetch_add(1, Ordering::AcqRel);
    }

    /// How often [`AnchoredFiles::barrier_failed`] was called.
    pub(super) fn lost_barriers(&self) -> u64 {
        self.lost_barriers.load(Ordering::Acquire)
    }

    /// To be called after that barrier has succeeded: queues the states of those files for the anchor's next commit,
    /// except files that were opened again meanwhile.
    ///
    /// # Errors
    /// Those of the anchor; the files stay remembered.
    pub fn covered(&self, closed: ClosedFiles) -> Result<(), AnchorError> {
        for (object, number) in closed.0 {
            let closed = &mut *self.closed.lock();
            let Some(file) = closed.files.get(&object).filter(|file| file.number == number) else { continue };
            let ClosedFile { root, size, profile, last: window, blocks, unmade, .. } = *file;
            let (twin, held, is_clean, drops_cut) = (None, Vec::new(), true, unmade.is_some());
            let commit = FileCommit { object, root, size, profile, twin, blocks, window, held, is_clean, drops_cut };
            match self.anchor.commit_file(commit) {
                // It is removed.
                Ok(()) | Err(AnchorError::Unknown { .. }) => drop(closed.files.remove(&object)),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Remembers a file that is closed.
    pub(super) fn remember(&self, object: ObjectId, file: ClosedFile) {
        let closed = &mut *self.closed.lock();
        closed.numbers += 1;
        closed.files.insert(object, ClosedFile { number: closed.numbers, ..file });
    }

    /// The remembered state of a file that is being opened. It stays remembered until [`AnchoredFiles::opened`]: if the
    /// file cannot be opened now, the next attempt must find it.
    pub(super) fn remembered(&self, object: ObjectId, takes_over: bool) -> Option<ClosedFile> {
        let closed = &mut *self.closed.lock();
        let file = closed.files.get_mut(&object)?;
        if takes_over {
            file.number = OPENING;
        }
        Some(file.clone())
    }

    /// A writer's attempt to open a file has ended. If it `is_open`, it has the state that was remembered.
    pub(super) fn opened(&self, object: ObjectId, is_open: bool) {
        let Closed { files, numbers } = &mut *self.closed.lock();
        let Some(file) = files.get_mut(&object).filter(|file| file.number == OPENING) else { return };
        if is_open {
            files.remove(&object);
        } else {
            *numbers += 1;
            file.number = *numbers;
        }
    }

    /// The size of a file that is remembered.
    pub fn remembered_size(&self, object: ObjectId) -> Option<u64> {
        self.closed.lock().files.get(&object).map(|closed| closed.size)
    }

    /// Forgets an object that is removed.
    pub fn forget(&self, object: ObjectId) {
        self.closed.lock().files.remove(&object);
    }
}
