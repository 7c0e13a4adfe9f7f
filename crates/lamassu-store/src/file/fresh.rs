//! The freshness of one open file (`docs/freshness.md`, section 3): its tree, what the anchor knows of it, and which of
//! its pages are accepted.
//!
//! Invariants:
//! * The tree has the digest of every page as this process wrote it last, or as it is under the committed root. A page
//!   is accepted only if it has that digest.
//! * A page that was accepted because a crash may have left it is `in flight` until its pending bits are resolved. No
//!   root is committed before that: after a commit, pending bits must give the store no choice (A5).
//! * If a write of a page failed, the store may have the old bytes or the new ones. Both are accepted until one of them
//!   was read, and no root is committed meanwhile.
//!
//! The lock here is taken with or without that of the file's state, and never held while waiting for the anchor.

mod opening;

pub(super) use opening::Shrinking;

use super::anchored::{AnchoredFiles, ClosedFile, TreeOf};
use super::blocks::BlockTree;
use super::page_tree::{Before, PageTree, SealedPage, digest_of};
use super::types::{Damage, DamageKind, FileContext, StoreError};
use crate::backend::BackendFile;
use crate::integrity::{Leaves, Tree, TreeError};
use lamassu_anchor::row::FileRow;
use lamassu_anchor::{AnchorError, Digest, FileCommit, ObjectId, Window};
use lamassu_format::{ByteOffset, FileId, Geometry, PAGE_LEN, PageNo, Profile, RecordNo};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of clean tree records that an open file keeps.
const CLEAN_RECORDS_LEN: usize = 64 << 10;

/// The pages of a backing file, for its tree.
pub(super) struct StorePages<'a> {
    pub backing: &'a dyn BackendFile,
    pub geometry: &'a Geometry,
}

impl StorePages<'_> {
    /// The bytes of a page; zeros past the end.
    pub fn read(&self, page: PageNo) -> io::Result<[u8; PAGE_LEN]> {
        let mut bytes = [0; PAGE_LEN];
        let got = self.backing.read_at(self.geometry.page_offset(page).0, &mut bytes)?;
        bytes[got..].fill(0);
        Ok(bytes)
    }
}

impl Leaves for StorePages<'_> {
    fn leaf(&self, page: PageNo) -> io::Result<Digest> {
        Ok(digest_of(page, &self.read(page)?))
    }

    fn next_present(&self, from: PageNo) -> io::Result<Option<PageNo>> {
        let geo = self.geometry;
        let data = self.backing.seek_data(geo.page_offset(from).0)?;
        Ok(data.map(|data| geo.first_page_at(ByteOffset(data)).max(from)))
    }
}

/// The freshness of one open file: its tree and its accepted pages.
pub(super) struct Fresh {
    files: Arc<AnchoredFiles>,
    object: ObjectId,
    geometry: Geometry,
    known: Mutex<Known>,
}

/// What is known of the file.
pub(super) struct Known {
    pub tree: PageTree,
    /// As the anchor has it, queued changes included.
    pub row: FileRow,
    /// The size, if the pages do not determine it.
    pub size: Option<u64>,
    /// The profile of a file without pages, or whose size is set here.
    profile: Profile,
    /// A crash may have changed it since its root was committed.
    pub is_interrupted: bool,
    /// Pages that are accepted because of that, and whose pending bits are not resolved yet.
    pub in_flight: BTreeSet<PageNo>,
    /// The sessions of those pages, as they were found, and the sessions in which this process has written.
    pub accepted: BTreeSet<u32>,
    /// A page was not accepted.
    pub has_refused: bool,
    /// Pages whose last write failed, as they would be.
    doubtful: BTreeMap<PageNo, Digest>,
    /// The session whose window is in the row.
    opened: Option<u32>,
    /// The durable row may note a shrink that no page 0 records: the first page that it removes; page 0: not known.
    pub unmade: Option<PageNo>,
    /// Tree records that the anchor holds.
    held: BTreeSet<RecordNo>,
    /// The session that wrote pages since the last commit, and the highest sequence; `None`: none with a stamp.
    last: Option<Window>,
    /// Whether pages were written, or taken over, since the last commit.
    is_ahead: bool,
    /// Pages were taken over from this file as it was closed, and no barrier is known to have covered them: how many
    /// barriers of the store had failed then.
    taken_over: Option<u64>,
    /// After a crash the store could choose whether the first page exists (A6), and no commit has recorded the choice
    /// yet.
    has_chosen: bool,
    /// The file is closed: if it was opened again, the new `File` reports to the anchor.
    is_put_away: bool,
    /// The tree over its blocks, in vaults that have one.
    pub blocks: BlockTree,
}

impl Known {
    /// Whether pages were written, or taken over, since the last commit.
    pub fn is_ahead(&self) -> bool {
        self.is_ahead
    }

    /// Size and profile, if the pages do not determine them. Otherwise the profile is the one for a file without pages.
    pub fn told(&self) -> (Option<u64>, Profile) {
        (self.size, self.profile)
    }

    /// The pages that are accepted because the store shows them: those in flight, and the first one if that was chosen
    /// (A6).
    pub fn chosen_pages(&self) -> BTreeSet<PageNo> {
        let first = self.has_chosen.then_some(PageNo::ZERO);
        self.in_flight.iter().copied().chain(first).collect()
    }

    /// Page 0 exists although the root does not have it, or it never existed.
    pub fn note_chosen(&mut self) {
        (self.is_ahead, self.has_chosen) = (true, true);
    }
}

/// A page write that is noted in the tree.
pub(super) struct NotedWrite {
    page: PageNo,
    before: Before,
    has_stamp: bool,
}

/// The tree over the pages of a file with this root.
fn page_tree(files: &AnchoredFiles, object: ObjectId, root: Digest, pages: u64) -> PageTree {
    PageTree::new(Tree::new(files.shape(), root, pages, files.records(object, TreeOf::Pages), CLEAN_RECORDS_LEN))
}

impl Fresh {
    /// What `open` makes of the freshness of an object. If it succeeds, a writer has taken over what this process
    /// remembers of the object.
    pub fn opened<T>(
        ctx: &FileContext,
        files: &Arc<AnchoredFiles>,
        object: ObjectId,
        open: impl FnOnce(Fresh) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let writes = !ctx.read_only;
        let opened = Fresh::open(files.clone(), object, ctx.geometry, writes).and_then(open);
        if writes {
            files.opened(object, opened.is_ok());
        }
        opened
    }

    /// From the anchor's row of an object, and what this process remembers of it.
    fn open(
        files: Arc<AnchoredFiles>,
        object: ObjectId,
        geometry: Geometry,
        writes: bool,
    ) -> Result<Fresh, StoreError> {
        // In this order: what is no longer remembered is in the row. A barrier that fails in between counts.
        let lost_barriers = files.lost_barriers();
        let remembered = files.remembered(object, writes);
        let row = files.anchor().row(object)?;
        let row = row.file().ok_or(AnchorError::Unknown { object })?.clone();
        let pages = if row.root.is_none() { 0 } else { geometry.last_page(row.size).0 + 1 };
        let (root, pages) = remembered.as_ref().map_or((row.root, pages), |closed| (closed.root, closed.pages));
        let known = Known {
            tree: page_tree(&files, object, root, pages),
            size: match (&remembered, &row.open) {
                (Some(closed), _) => Some(closed.size),
                (None, None) => Some(row.size),
                (None, Some(_)) => None,
            },
            profile: remembered.as_ref().map_or(row.profile, |closed| closed.profile),
            is_interrupted: remembered.is_none() && row.open.is_some(),
            in_flight: BTreeSet::new(),
            accepted: BTreeSet::new(),
            has_refused: false,
            doubtful: BTreeMap::new(),
            opened: None,
            unmade: remembered.as_ref().map_or(Some(PageNo::ZERO), |closed| closed.unmade),
            held: BTreeSet::new(),
            last: remembered.as_ref().and_then(|closed| closed.last),
            is_ahead: remembered.is_some(),
            taken_over: remembered.is_some().then_some(lost_barriers),
            has_chosen: false,
            is_put_away: false,
            blocks: BlockTree::default(),
            row,
        };
        let blocks = match &remembered {
            Some(closed) => closed.blocks,
            None => known.row.blocks.filter(|_| known.row.open.is_none()),
        };
        let size = known.size.unwrap_or_default();
        let fresh = Fresh { files, object, geometry, known: Mutex::new(known) };
        let tree = blocks.map(|root| fresh.block_tree(root, geometry.end_block(size).0));
        fresh.known.lock().blocks.tree = tree;
        Ok(fresh)
    }

    /// An empty tree over blocks.
    pub fn new_block_tree(&self) -> Tree {
        self.block_tree(Digest::NONE, 0)
    }

    fn block_tree(&self, root: Digest, blocks: u64) -> Tree {
        let records = self.files.records(self.object, TreeOf::Blocks);
        Tree::new(self.files.shape(), root, blocks, records, CLEAN_RECORDS_LEN)
    }

    pub fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock()
    }

    pub fn files(&self) -> &AnchoredFiles {
        &self.files
    }

    pub fn object(&self) -> ObjectId {
        self.object
    }

    pub fn pages<'a>(&'a self, backing: &'a dyn BackendFile) -> StorePages<'a> {
        StorePages { backing, geometry: &self.geometry }
    }

    /// The error of a tree.
    pub fn failed(&self, error: TreeError) -> StoreError {
        match error {
            TreeError::Stale(stale) => StoreError::Damaged(Damage {
                kind: DamageKind::Stale,
                segment: self.geometry.segment_of(stale.first),
                page: stale.first,
                pages: stale.pages,
                block: None,
            }),
            TreeError::Io { op, source } => StoreError::Io { op, offset: 0, source },
        }
    }

    /// Whether a page as the store shows it is the newest.
    pub fn is_current(&self, backing: &dyn BackendFile, page: PageNo, seen: Digest) -> Result<bool, StoreError> {
        let known = &mut *self.known.lock();
        let leaf = match known.tree.leaf(page, &self.pages(backing)) {
            Ok(leaf) => leaf,
            Err(TreeError::Stale(_)) => return Ok(false),
            Err(error) => return Err(self.failed(error)),
        };
        if seen == leaf {
            return Ok(true);
        }
        if known.doubtful.get(&page) != Some(&seen) {
            return Ok(false);
        }
        known.doubtful.remove(&page);
        known.tree.set(page, seen, &self.pages(backing)).map_err(|error| self.failed(error))?;
        Ok(true)
    }

    /// The first page from `from` on that has a digest. If that is unknown for a range, its first page counts.
    pub fn next_page(&self, backing: &dyn BackendFile, from: PageNo) -> Result<Option<PageNo>, StoreError> {
        match self.known.lock().tree.next_leaf(from, &self.pages(backing)) {
            Ok(next) => Ok(next),
            Err(TreeError::Stale(stale)) => Ok(Some(stale.first.max(from))),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Whether the pending state of a page counts.
    pub fn is_in_flight(&self, page: PageNo) -> bool {
        self.known.lock().in_flight.contains(&page)
    }

    /// Notes that the pending bits of a page were examined: there were none.
    pub fn note_resolved(&self, page: PageNo) {
        self.known.lock().in_flight.remove(&page);
    }

    /// Whether a crash may have changed the file since its root was committed.
    pub fn is_interrupted(&self) -> bool {
        self.known.lock().is_interrupted
    }

    /// Whether a crash has left a choice to the store that no commit has recorded yet.
    pub fn must_recover(&self) -> bool {
        let known = self.known.lock();
        known.is_interrupted || known.has_chosen
    }

    /// The id that pages must carry, if the row names one.
    pub fn file_id(&self) -> Option<FileId> {
        self.known.lock().row.open.as_ref().map(|open| open.file)
    }

    /// Page 0 with `cut` may have pages past its end beside it that are in flight: they are void.
    pub fn forget_in_flight_after(&self, last: PageNo) {
        self.known.lock().in_flight.retain(|page| *page <= last);
    }

    /// Whether the anchor may know a convergent page of this file, which carries no stamp (A6). If not, it is not worth
    /// sealing.
    pub fn may_be_convergent(&self) -> bool {
        let known = self.known.lock();
        let is_first = known.tree.pages() == 0 && !known.is_ahead && known.row.open.is_none();
        is_first || known.row.twin.is_some()
    }

    /// A6: whether this convergent page may be written. The first page of a new file is announced to the anchor for
    /// that.
    pub fn may_write_convergent(&self, digest: Digest, size: u64) -> Result<bool, StoreError> {
        let (is_first, is_twin) = {
            let known = self.known.lock();
            let is_first = known.tree.pages() == 0 && !known.is_ahead;
            (is_first, known.row.twin == Some(digest))
        };
        if is_twin {
            return Ok(self.files.anchor().has_twin(self.object, digest)?);
        }
        let is_noted = is_first && self.files.anchor().note_first_page(self.object, digest, size)?;
        if is_noted {
            self.known.lock().row.twin = Some(digest);
        }
        Ok(is_noted)
    }

    /// Notes a page that is about to be written; `window`: its stamp, if it carries one.
    pub fn note_write(
        &self,
        backing: &dyn BackendFile,
        page: PageNo,
        bytes: &SealedPage,
        window: Option<Window>,
    ) -> Result<NotedWrite, StoreError> {
        let known = &mut *self.known.lock();
        let before = known.tree.write(page, bytes, &self.pages(backing)).map_err(|error| self.failed(error))?;
        known.last = window.or(known.last);
        known.is_ahead = true;
        if known.blocks.tree.is_some() {
            known.blocks.changed.insert(page);
        }
        Ok(NotedWrite { page, before, has_stamp: window.is_some() })
    }

    /// The write has succeeded.
    pub fn note_written(&self, noted: &NotedWrite) {
        let known = &mut *self.known.lock();
        known.in_flight.remove(&noted.page);
        known.doubtful.remove(&noted.page);
        if noted.page == PageNo::ZERO && noted.has_stamp {
            known.unmade = None;
        }
    }

    /// The write has failed, but the store may have the page nevertheless.
    pub fn note_failed(&self, noted: NotedWrite, bytes: &SealedPage) {
        let known = &mut *self.known.lock();
        let digest = known.tree.take_back(noted.page, bytes, noted.before);
        known.doubtful.insert(noted.page, digest);
    }

    /// Notes that only the first `pages` pages are left.
    pub fn truncate(&self, backing: &dyn BackendFile, pages: u64) -> Result<(), StoreError> {
        let known = &mut *self.known.lock();
        if known.tree.pages() > pages {
            known.is_ahead = true;
        }
        known.doubtful.retain(|page, _| page.0 < pages);
        known.in_flight.retain(|page| page.0 < pages);
        let cut_at = known.blocks.cut_at.map_or(pages, |before| before.0.min(pages));
        known.blocks.cut_at = Some(PageNo(cut_at)).filter(|_| known.blocks.tree.is_some());
        known.tree.truncate(pages, &self.pages(backing)).map_err(|error| self.failed(error))
    }

    /// Notes that all pages are gone, including those that did not match the tree.
    pub fn clear(&self) {
        let known = &mut *self.known.lock();
        known.tree = page_tree(&self.files, self.object, Digest::NONE, 0);
        known.is_ahead = true;
        known.unmade = None; // as far as the row notes one, all those pages are gone
        known.blocks = BlockTree::default();
        known.doubtful.clear();
        known.in_flight.clear();
    }

    /// Whether the anchor lacks the file's present state.
    pub fn is_ahead(&self) -> bool {
        let known = self.known.lock();
        known.is_ahead || known.row.open.is_some()
    }

    /// Whether pages were written that no commit has, not even one that is queued.
    pub fn has_written(&self) -> bool {
        self.known.lock().is_ahead
    }

    /// Whether a root may be committed.
    pub fn is_certain(&self) -> bool {
        let known = self.known.lock();
        known.in_flight.is_empty() && known.doubtful.is_empty()
    }

    /// Whether pages with a stamp were written since the file was clean.
    pub fn has_stamped(&self) -> bool {
        self.known.lock().last.is_some()
    }

    /// A4: queues the file's state as of a barrier that has covered every page of it. `pages`: how many it has; `twin`:
    /// the digest of the convergent page that will be written next; `blocks`: the root over its blocks; `is_clean`: no
    /// other page is about to be written (A7).
    pub fn commit(
        &self,
        backing: &dyn BackendFile,
        pages: u64,
        (size, profile): (u64, Profile),
        (twin, blocks): (Option<Digest>, Option<Digest>),
        is_clean: bool,
    ) -> Result<(), StoreError> {
        let known = &mut *self.known.lock();
        if known.tree.pages() > pages {
            known.tree.truncate(pages, &self.pages(backing)).map_err(|error| self.failed(error))?;
        }
        // After a crash in a shrink the last page may be absent. The size includes it, so the tree must too.
        known.tree.extend_to(pages);
        let sealed = known.tree.seal();
        let window = known.last;
        let held: Vec<_> = if is_clean { Vec::new() } else { sealed.changed.into_iter().collect() };
        let records: Vec<RecordNo> = held.iter().map(|(record, _)| *record).collect();
        let (object, root) = (self.object, sealed.root);
        let drops_cut = known.unmade.is_some();
        let commit = FileCommit { object, root, size, profile, twin, blocks, window, held, is_clean, drops_cut };
        match self.files.anchor().commit_file(commit) {
            Err(AnchorError::Unknown { .. }) => return Ok(()), // it was removed
            done => done?,
        }
        known.tree.committed();
        (known.is_ahead, known.taken_over) = (false, None);
        (known.is_interrupted, known.has_chosen) = (false, false);
        let row = self.files.anchor().row(self.object)?;
        known.row = row.file().cloned().unwrap_or_default();
        if is_clean {
            known.opened = None;
            known.held.clear();
            known.last = None;
        } else {
            known.held = records.into_iter().collect();
        }
        Ok(())
    }

    /// Whether a barrier has failed that should have covered pages which were taken over: then they have to be written
    /// again.
    pub fn has_lost(&self) -> bool {
        self.known.lock().taken_over.is_some_and(|before| before != self.files.lost_barriers())
    }

    /// A barrier of the file has covered what was taken over.
    pub fn note_barrier(&self) {
        self.known.lock().taken_over = None;
    }

    /// A barrier of the file has failed, which counts like one of the store.
    pub fn note_failed_barrier(&self) {
        self.known.lock().taken_over.iter_mut().for_each(|before| *before = u64::MAX);
    }

    /// Where pages lie that may have been written since the last commit: page 0, whose row may accept two (A6), those
    /// under records that the anchor holds, and those past the committed end (A1).
    pub fn uncommitted(&self) -> Result<Vec<Range<PageNo>>, StoreError> {
        let (shape, row) = (self.files.shape(), self.known.lock().row.clone());
        let committed = if row.root.is_none() { PageNo::ZERO } else { self.geometry.last_page(row.size).next() };
        let held = self.files.anchor().held(self.object)?;
        let places = held.keys().filter_map(|number| shape.place(*number).filter(|place| place.level == 1));
        let pages = places.map(|place| shape.first_page(place)).map(|first| first..PageNo(first.0 + shape.span(1)));
        Ok([PageNo::ZERO..PageNo(1), committed..PageNo(u64::MAX)].into_iter().chain(pages).collect())
    }

    /// Whether the file is closed.
    pub fn is_put_away(&self) -> bool {
        self.known.lock().is_put_away
    }

    /// Notes that it is.
    pub fn note_put_away(&self) {
        self.known.lock().is_put_away = true;
    }

    /// The file is closed in its present state: remembers what no commit covers, and writes records to their file.
    pub fn remember(&self, (size, profile): (u64, Profile), blocks: Option<Digest>) {
        let known = &mut *self.known.lock();
        let sealed = known.tree.seal();
        known.tree.committed();
        let (root, pages, last, unmade) = (sealed.root, sealed.pages, known.last, known.unmade);
        self.files.remember(self.object, ClosedFile { root, pages, size, profile, last, unmade, blocks, number: 0 });
    }
}
