//! The tree of an open file.
//!
//! * A record that is *in memory* was verified, or follows from digests that were set. A *changed* record, and every
//!   record above it, stays in memory until it is committed. Clean records stay while there is room.
//! * Digests of changed records are not computed before a root is asked for.
//! * While pages of a record change, its state at the last seal is kept, since an anchor holds that (rule A1 of
//!   `docs/freshness.md`). A commit replaces it by the new state.

use super::in_vain::{Counted, InVain};
use super::{Leaves, Records, Stale, record_digest};
use lamassu_format::tree::{Children, RecordPlace, Shape};
use lamassu_format::{Digest, PageNo, RecordNo};
use lru::LruCache;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::Arc;

/// Why a digest is unknown.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// The store's: pages do not fit the root, and no record tells which of them.
    #[error("pages {} to {} are not the newest: their digest is {:?}, not {:?}", .0.first, .0.first.0 + .0.pages - 1, .0.found, .0.expected)]
    Stale(Stale),
    /// The store failed.
    #[error("{op}: {source}")]
    Io {
        /// what was tried
        op: &'static str,
        /// of the store
        source: io::Error,
    },
}

fn failed(op: &'static str) -> impl Fn(io::Error) -> TreeError {
    move |source| TreeError::Io { op, source }
}

/// The tree at a mark, to be committed once a barrier of the store has covered that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// Its root.
    pub root: Digest,
    /// How many pages it spans: one more than the last page's number.
    pub pages: u64,
    /// The records of pages that have changed since the last commit, as they are now.
    pub changed: BTreeMap<RecordNo, Children>,
}

struct Record {
    children: Children,
    /// Its digest is not in the record above it yet.
    is_dirty: bool,
}

/// The tree of an open file, with the records that are in memory.
pub struct Tree {
    shape: Shape,
    file: Arc<dyn Records>,
    pages: u64,
    /// The digest that covers all pages: that of the page itself if there is only one, otherwise that of the top record
    /// unless it is dirty.
    top: Digest,
    changed: HashMap<RecordPlace, Record>,
    clean: LruCache<RecordPlace, Record>,
    clean_max: usize,
    /// How many of the pages at the last seal, or at the beginning, were not cut off since.
    sealed_pages: u64,
    /// Records of pages that were changed since, in their state then. Records past the end at that time are not needed.
    before: BTreeMap<RecordNo, Children>,
    /// Records of pages that were changed since.
    touched: BTreeSet<RecordNo>,
    /// Records that were changed before that seal, and after the last commit.
    sealing: BTreeSet<RecordNo>,
    /// Records that were fetched with a page, by their offsets in the file. Not verified.
    brought: BTreeMap<u64, Vec<u8>>,
    in_vain: InVain,
}

impl Tree {
    /// The tree of a file with a committed root over `pages` pages. Of clean records at most `bytes_max` bytes stay in
    /// memory.
    pub fn new(shape: Shape, root: Digest, pages: u64, file: Arc<dyn Records>, bytes_max: usize) -> Tree {
        Tree {
            shape,
            file,
            pages,
            top: root,
            changed: HashMap::new(),
            clean: LruCache::unbounded(),
            clean_max: (bytes_max / shape.record_len()).max(1),
            sealed_pages: pages,
            before: BTreeMap::new(),
            touched: BTreeSet::new(),
            sealing: BTreeSet::new(),
            brought: BTreeMap::new(),
            in_vain: InVain::default(),
        }
    }

    /// Where its records lie.
    pub fn records(&self) -> Arc<dyn Records> {
        self.file.clone()
    }

    /// Takes records that the caller has read from there, by their offsets, so that the next use of one need not read
    /// it. They replace those of the call before.
    pub fn bring(&mut self, records: impl IntoIterator<Item = (u64, Vec<u8>)>) {
        self.brought = records.into_iter().collect();
    }

    /// Makes it span at least `pages` pages, with absent ones at its end.
    pub fn extend_to(&mut self, pages: u64) {
        if pages > self.pages {
            self.grow(pages);
        }
    }

    /// How many pages it spans.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    fn height(&self) -> u32 {
        self.shape.height(self.pages)
    }

    /// The digest of a page: the one that was set last, or the one under the root.
    ///
    /// # Errors
    /// [`TreeError`]: the page's own record is unavailable, so the page may have any digest.
    pub fn leaf(&mut self, page: PageNo, leaves: &dyn Leaves) -> Result<Digest, TreeError> {
        match self.height() {
            _ if page.0 >= self.pages => Ok(Digest::NONE),
            0 => Ok(self.top),
            _ => {
                let place = self.shape.record_of(page, 1);
                self.load(place, leaves)?;
                self.clean.promote(&place);
                Ok(self.children(place).get(self.shape.child_of(page, 1)).copied().unwrap_or_default())
            }
        }
    }

    /// The records in the store that are needed for the digests of these pages: to be fetched with the pages.
    pub fn wanted(&self, pages: impl IntoIterator<Item = PageNo>) -> BTreeSet<u64> {
        let mut offsets = BTreeSet::new();
        for page in pages.into_iter().filter(|page| page.0 < self.pages) {
            let places = (1..=self.height()).map(|level| self.shape.record_of(page, level));
            let missing = places.take_while(|place| !self.is_known(place));
            offsets.extend(missing.map(|place| self.shape.offset(self.shape.number(place))));
        }
        offsets
    }

    /// Notes the digest of a page that is about to be written; the digest of no page removes it.
    ///
    /// # Errors
    /// [`TreeError`]: nothing was noted.
    pub fn set(&mut self, page: PageNo, digest: Digest, leaves: &dyn Leaves) -> Result<(), TreeError> {
        if page.0 >= self.pages {
            if digest.is_none() {
                return Ok(());
            }
            self.grow(page.0 + 1);
        }
        if self.height() == 0 {
            self.top = digest;
            return Ok(());
        }
        let place = self.pinned(page, leaves)?;
        self.keep_before(place);
        let child = self.shape.child_of(page, 1);
        self.change(place, |children| children[child] = digest);
        Ok(())
    }

    /// Whether the record of a page is in memory until it is committed, and its earlier state is kept: then
    /// [`Tree::set_noted`] may set the page's digest, now or later.
    pub fn is_noted(&self, page: PageNo) -> bool {
        if page.0 >= self.pages || self.height() == 0 {
            return page.0 < self.pages;
        }
        let place = self.shape.record_of(page, 1);
        self.changed.contains_key(&place) && self.touched.contains(&self.shape.number(place))
    }

    /// Sets the digest of a page that [is noted](Tree::is_noted).
    pub fn set_noted(&mut self, page: PageNo, digest: Digest) {
        if self.height() == 0 {
            self.top = digest;
            return;
        }
        let (place, child) = (self.shape.record_of(page, 1), self.shape.child_of(page, 1));
        self.change(place, |children| children[child] = digest);
    }

    /// The record of a page, at the last seal: an anchor must hold it before the page is changed. `None`: there was
    /// none, because a single page is its own root, or because the record lies past the end.
    ///
    /// # Errors
    /// [`TreeError`].
    pub fn record_before(
        &mut self,
        page: PageNo,
        leaves: &dyn Leaves,
    ) -> Result<Option<(RecordNo, Children)>, TreeError> {
        let place = self.shape.record_of(page, 1);
        let number = self.shape.number(place);
        if let Some(before) = self.before.get(&number) {
            return Ok(Some((number, before.clone())));
        }
        if !self.was_there(place) {
            return Ok(None);
        }
        self.load(place, leaves)?;
        Ok(Some((number, self.children(place).into())))
    }

    /// The records of every level on the way to a page, at the last commit: an anchor must hold them before pages after
    /// that one are cut off, since the records above cannot be rebuilt without those pages. Nothing was changed since
    /// that commit.
    ///
    /// # Errors
    /// [`TreeError`].
    pub fn way_to(&mut self, page: PageNo, leaves: &dyn Leaves) -> Result<Vec<(RecordNo, Children)>, TreeError> {
        let mut way = Vec::new();
        for level in 1..=self.height() {
            let place = self.shape.record_of(page, level);
            self.load(place, leaves)?;
            way.push((self.shape.number(place), self.children(place).into()));
        }
        Ok(way)
    }

    /// Takes over the records of pages that an anchor holds, in their state under the root: their pages may have
    /// changed since. To be called by recovery, before anything else.
    ///
    /// # Errors
    /// [`TreeError`].
    pub fn hold(&mut self, held: BTreeMap<RecordNo, Children>, leaves: &dyn Leaves) -> Result<(), TreeError> {
        let of_pages = held.keys().filter_map(|number| Some((*number, self.shape.place(*number)?)));
        let of_pages: Vec<_> = of_pages.filter(|(_, place)| place.level == 1).collect();
        self.before.extend(held);
        for (number, place) in of_pages {
            self.touched.insert(number);
            if self.was_there(place) {
                self.pinned(self.shape.first_page(place), leaves)?;
            }
        }
        Ok(())
    }

    /// The first page from `from` on that has a digest.
    ///
    /// # Errors
    /// [`TreeError`]: for the range that it names it is unknown which pages exist.
    pub fn next_leaf(&mut self, from: PageNo, leaves: &dyn Leaves) -> Result<Option<PageNo>, TreeError> {
        self.root(); // so that changes are in the records above, too
        let mut at = from;
        while at.0 < self.pages {
            let height = self.height();
            if height == 0 {
                return Ok((!self.top.is_none()).then_some(at));
            }
            // Goes up while nothing more lies below a record, and then on to the next one.
            let mut skipped = 1;
            for level in 1..=height {
                let place = self.shape.record_of(at, level);
                self.load(place, leaves)?;
                let child = self.shape.child_of(at, level);
                // Above the first level: nothing more lies below the child that it comes from.
                let first = if level == 1 { child } else { child + 1 };
                let passed = self.children(place).iter().skip(first).position(|digest| !digest.is_none());
                match passed {
                    Some(0) if level == 1 => return Ok(Some(at)),
                    Some(passed) => {
                        skipped = self.to_child(at, level, first + passed);
                        break;
                    }
                    None => skipped = self.to_child(at, level, self.shape.degree()),
                }
            }
            at = PageNo(at.0 + skipped.max(1));
        }
        Ok(None)
    }

    /// How many pages lie between a page and the first page below a child of its record of a level.
    fn to_child(&self, page: PageNo, level: u32, child: usize) -> u64 {
        let start = self.shape.first_page(self.shape.record_of(page, level)).0;
        (start + child as u64 * self.shape.span(level - 1)).saturating_sub(page.0)
    }

    /// Whether a record of pages existed at the last seal.
    fn was_there(&self, place: RecordPlace) -> bool {
        self.shape.height(self.sealed_pages) > 0 && self.shape.first_page(place).0 < self.sealed_pages
    }

    fn keep_before(&mut self, place: RecordPlace) {
        let number = self.shape.number(place);
        if self.touched.insert(number) && self.was_there(place) {
            let children = self.children(place).into();
            self.before.insert(number, children);
        }
    }

    /// The tree becomes longer: the old top is the first child of a new one.
    fn grow(&mut self, pages: u64) {
        let (old, new) = (self.height(), self.shape.height(pages));
        for level in old + 1..=new {
            let place = RecordPlace { level, index: 0 };
            let mut children = vec![Digest::NONE; self.shape.degree()].into_boxed_slice();
            if level == old + 1 {
                // The digest of a changed top is not computed yet; it comes with the next root.
                children[0] = self.top;
            }
            if level == 1 {
                self.touched.insert(self.shape.number(place));
            }
            self.changed.insert(place, Record { children, is_dirty: true });
        }
        self.pages = pages;
    }

    /// The file becomes shorter: only the first `pages` pages are left.
    ///
    /// # Errors
    /// [`TreeError`]: nothing has changed.
    pub fn truncate(&mut self, pages: u64, leaves: &dyn Leaves) -> Result<(), TreeError> {
        if pages >= self.pages {
            return Ok(());
        }
        let (old, new) = (self.height(), self.shape.height(pages));
        // The way to the new last page, and the digest of the rest of the top.
        let last = PageNo(pages.saturating_sub(1));
        if old > 0 {
            self.pinned(last, leaves)?;
        }
        let kept = match (pages, new) {
            (0, _) => Digest::NONE,
            (_, 0) if old > 0 => self.children(RecordPlace { level: 1, index: 0 }).first().copied().unwrap_or_default(),
            _ => self.top,
        };
        for level in 1..=old {
            let place = self.shape.record_of(last, level);
            let child = self.shape.child_of(last, level);
            // A file without pages keeps no record.
            let kept = if pages == 0 { 0 } else { child + 1 };
            if level == 1 {
                self.keep_before(place);
            }
            self.change(place, |children| children[kept..].fill(Digest::NONE));
        }
        let shape = self.shape;
        let stays = |place: &RecordPlace| place.level <= new && shape.first_page(*place).0 < pages;
        self.changed.retain(|place, _| stays(place));
        let gone: Vec<RecordPlace> = self.clean.iter().map(|(place, _)| *place).filter(|place| !stays(place)).collect();
        gone.iter().for_each(|place| drop(self.clean.pop(place)));
        (self.top, self.pages) = (kept, pages);
        // Pages behind a cut are void, and are not compared with their earlier state.
        self.sealed_pages = self.sealed_pages.min(pages);
        Ok(())
    }

    /// The working root.
    pub fn root(&mut self) -> Digest {
        let height = self.height();
        for level in 1..=height {
            let places: Vec<RecordPlace> = self.changed.keys().copied().filter(|place| place.level == level).collect();
            for place in places {
                let Some(record) = self.changed.get_mut(&place).filter(|record| record.is_dirty) else { continue };
                record.is_dirty = false;
                let digest = record_digest(level, &record.children);
                if level == height {
                    self.top = digest;
                } else {
                    let (above, child) = self.shape.parent(place);
                    self.change(above, |children| children[child] = digest);
                }
            }
        }
        self.top
    }

    /// The present tree, to be committed after a barrier.
    pub fn seal(&mut self) -> Sealed {
        let root = self.root();
        self.before.clear();
        self.sealed_pages = self.pages;
        self.sealing.append(&mut self.touched);
        let places = self.sealing.iter().filter_map(|number| Some((*number, self.shape.place(*number)?)));
        let there = places.filter(|(_, place)| self.was_there(*place));
        // A record that is not in memory was cut off, and lies in a hole since the file became longer again.
        let known = there.filter_map(|(number, place)| Some((number, &self.changed.get(&place)?.children)));
        let changed = known.map(|(number, children)| (number, children.clone())).collect();
        Sealed { root, pages: self.pages, changed }
    }

    /// The last seal was committed. Records go to their file, as far as it takes them.
    pub fn committed(&mut self) {
        self.sealing.clear();
        self.root();
        // Records that were changed since that seal stay.
        let (shape, touched) = (self.shape, &self.touched);
        let is_done = |place: &RecordPlace| !touched.contains(&shape.number(*place));
        let done: Vec<_> = self.changed.extract_if(|place, _| is_done(place)).collect();
        done.into_iter().for_each(|(place, record)| self.put_out(place, record));
    }

    /// Writes records out that lie wholly before a page, as far as their file takes them. A pass that sets digests from
    /// front to back keeps only the records on the way to that page in memory. Only for a tree whose records no anchor
    /// holds: their earlier state is forgotten.
    pub fn leave(&mut self, until: PageNo) {
        let shape = self.shape;
        for level in 1..self.height() {
            let is_left =
                |place: &RecordPlace| place.level == level && shape.first_page(*place).0 + shape.span(level) <= until.0;
            let left: Vec<(RecordPlace, Record)> = self.changed.extract_if(|place, _| is_left(place)).collect();
            for (place, record) in left {
                let (above, child) = shape.parent(place);
                let digest = record_digest(level, &record.children);
                self.change(above, |children| children[child] = digest);
                self.before.remove(&shape.number(place));
                self.put_out(place, Record { is_dirty: false, ..record });
            }
        }
    }

    /// Writes a record that is not changed any more to its file. It is a cache: a record that cannot be written is
    /// rebuilt later.
    fn put_out(&mut self, place: RecordPlace, record: Record) {
        let bytes: Vec<u8> = record.children.iter().flat_map(|child| child.0).collect();
        let _ = self.file.write(self.shape.offset(self.shape.number(place)), &bytes);
        keep(&mut self.clean, self.clean_max, place, record);
    }

    fn is_known(&self, place: &RecordPlace) -> bool {
        self.changed.contains_key(place) || self.clean.peek(place).is_some()
    }

    /// A record in memory.
    fn children(&self, place: RecordPlace) -> &[Digest] {
        let record = self.changed.get(&place).or_else(|| self.clean.peek(&place));
        record.map_or(&[], |record| &record.children)
    }

    /// Changes a record that is pinned.
    fn change(&mut self, place: RecordPlace, change: impl FnOnce(&mut [Digest])) {
        if let Some(record) = self.changed.get_mut(&place) {
            change(&mut record.children);
            record.is_dirty = true;
        }
    }

    /// The record of a page, which stays in memory with all records above it until it is committed.
    fn pinned(&mut self, page: PageNo, leaves: &dyn Leaves) -> Result<RecordPlace, TreeError> {
        for level in (1..=self.height()).rev() {
            let place = self.shape.record_of(page, level);
            self.load(place, leaves)?;
            if let Some(record) = self.clean.pop(&place) {
                self.changed.insert(place, record);
            }
        }
        Ok(self.shape.record_of(page, 1))
    }

    /// Brings a record into memory, verified by those above it.
    fn load(&mut self, place: RecordPlace, leaves: &dyn Leaves) -> Result<(), TreeError> {
        let page = self.shape.first_page(place);
        let levels = place.level..=self.height();
        let way: Vec<RecordPlace> = levels.map(|level| self.shape.record_of(page, level)).collect();
        let known = way.iter().position(|place| self.is_known(place));
        let shape = self.shape;
        let below = |children: &[Digest], level| children.get(shape.child_of(page, level)).copied();
        // Loads the records below the lowest known one, from the top down.
        let mut expected = match known {
            Some(at) => below(self.children(way[at]), way[at].level).unwrap_or_default(),
            None => self.top,
        };
        let mut loaded = Vec::new();
        for place in way[..known.unwrap_or(way.len())].iter().rev() {
            let children = self.fetched(*place, expected, leaves)?;
            expected = below(&children, place.level).unwrap_or_default();
            loaded.push((*place, Record { children, is_dirty: false }));
        }
        // The requested record comes last, so that it stays.
        loaded.into_iter().for_each(|(place, record)| keep(&mut self.clean, self.clean_max, place, record));
        Ok(())
    }

    /// A record with this digest: from its file, or rebuilt from pages.
    fn fetched(&mut self, place: RecordPlace, expected: Digest, leaves: &dyn Leaves) -> Result<Children, TreeError> {
        if expected.is_none() {
            return Ok(vec![Digest::NONE; self.shape.degree()].into());
        }
        let is_expected = |children: &Children| record_digest(place.level, children) == expected;
        if let Some(held) = self.before.get(&self.shape.number(place)).filter(|held| is_expected(held)) {
            return Ok(held.clone());
        }
        let offset = self.shape.offset(self.shape.number(place));
        let as_expected = |bytes: &[u8]| self.shape.children(bytes).filter(is_expected);
        // A fetched record may be from before this process wrote it.
        if let Some(children) = self.brought.remove(&offset).as_deref().and_then(as_expected) {
            return Ok(children);
        }
        let mut bytes = vec![0; self.shape.record_len()];
        let is_read = self.file.read(offset, &mut bytes).is_ok();
        if let Some(children) = as_expected(&bytes).filter(|_| is_read) {
            return Ok(children);
        }
        if let Some(stale) = self.in_vain.known(place, expected) {
            return Err(TreeError::Stale(stale));
        }
        let counted = Counted::new(leaves);
        let children = self.rebuilt(place, &counted)?;
        let found = record_digest(place.level, &children);
        if found != expected {
            let first = self.shape.first_page(place);
            let pages = self.shape.span(place.level).min(self.pages - first.0);
            let stale = Stale { first, pages, expected, found };
            self.in_vain.note(place, stale, &counted);
            return Err(TreeError::Stale(stale));
        }
        let bytes: Vec<u8> = children.iter().flat_map(|child| child.0).collect();
        let _ = self.file.write(offset, &bytes);
        Ok(children)
    }

    /// The first page from `from` on that may have had a digest at the last seal.
    fn next_rebuilt(&self, from: PageNo, leaves: &dyn Leaves) -> Result<Option<PageNo>, TreeError> {
        let present = leaves.next_present(from).map_err(failed("find a page"))?;
        let number = self.shape.number(self.shape.record_of(from, 1));
        let of_pages = |number: &RecordNo| self.shape.place(*number).filter(|place| place.level == 1);
        let held = self.before.range(number..).find_map(|(number, _)| of_pages(number));
        let held = held.map(|place| self.shape.first_page(place).max(from));
        Ok(present.into_iter().chain(held).min())
    }

    /// A record rebuilt from the pages in the store, or as it is held.
    fn rebuilt(&self, place: RecordPlace, leaves: &dyn Leaves) -> Result<Children, TreeError> {
        let mut children = vec![Digest::NONE; self.shape.degree()].into_boxed_slice();
        let first = self.shape.first_page(place).0;
        let end = (first + self.shape.span(place.level)).min(self.pages);
        // Held records of the levels above may belong to an earlier root.
        if let Some(held) = self.before.get(&self.shape.number(place)).filter(|_| place.level == 1) {
            return Ok(held.clone());
        }
        let mut at = PageNo(first);
        while let Some(page) = self.next_rebuilt(at, leaves)?.filter(|page| page.0 < end) {
            let child = self.shape.child_of(page, place.level);
            if place.level == 1 {
                children[child] = leaves.leaf(page).map_err(failed("read a page"))?;
                at = page.next();
            } else {
                let below = self.shape.record_of(page, place.level - 1);
                children[child] = record_digest(below.level, &self.rebuilt(below, leaves)?);
                at = PageNo(self.shape.first_page(below).0 + self.shape.span(below.level));
            }
        }
        Ok(children)
    }
}

/// Keeps a clean record, and others while there is room. The table is only as large as necessary: most files have no
/// record at all.
fn keep(clean: &mut LruCache<RecordPlace, Record>, most: usize, place: RecordPlace, record: Record) {
    clean.put(place, record);
    while clean.len() > most {
        clean.pop_lru();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::integrity::{MemoryRecords, NoPages, RootOf};

    /// 5000 pages in records of four have more than a thousand records.
    #[test]
    fn a_pass_keeps_only_the_records_on_its_way() {
        let shape = Shape::new(4).unwrap();
        let digest = |page: u64, round: u8| Digest([page as u8 ^ round | 1; 32]);
        let mut tree = Tree::new(shape, Digest::NONE, 0, Arc::new(MemoryRecords::default()), 1);
        for round in [0, 2] {
            let mut root = RootOf::new(shape);
            for page in (0..5000).map(PageNo) {
                tree.set(page, digest(page.0, round), &NoPages).unwrap();
                root.add(page, digest(page.0, round));
                tree.leave(page);
                let most = 2 * shape.height(5000) as usize;
                assert!(tree.changed.len() <= most && tree.before.len() <= most, "page {page:?}");
            }
            assert_eq!(tree.seal().root, root.finish(5000));
            tree.committed();
            assert_eq!(tree.leaf(PageNo(77), &NoPages).unwrap(), digest(77, round));
        }
    }
}
