//! The tree over the pages of an open file, which hashes a page when its digest is asked for, and not at each write: a
//! page is written many times between two commits.
//!
//! Invariants:
//! * A page that is *unhashed* lies in a record that is noted already ([`Tree::is_noted`]), so that its digest can be
//!   set at any later time, and cannot fail.
//! * The digest of an unhashed page is never read from the tree: a request for one page hashes that page, and a request
//!   for records or the root hashes all.

use crate::integrity::{Leaves, Records, Sealed, Tree, TreeError, leaf_digest};
use lamassu_format::tree::Children;
use lamassu_format::{Digest, PAGE_LEN, PageNo, RecordNo};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The bytes of a sealed page.
pub(super) type SealedPage = Box<[u8; PAGE_LEN]>;

/// The digest of a page as it lies in the store; that of no page if it is absent.
pub(super) fn digest_of(page: PageNo, bytes: &[u8; PAGE_LEN]) -> Digest {
    if bytes.iter().all(|byte| *byte == 0) { Digest::NONE } else { leaf_digest(page, bytes) }
}

/// Most unhashed pages of all files of this process, 16 MiB. Beyond that pages are hashed at once.
const UNHASHED_MAX: usize = 4096;

/// A count of unhashed pages of several files.
type Count = AtomicUsize;

/// The count for all files of this process, since its memory is limited.
static UNHASHED: Count = Count::new(0);

/// The bytes of a page as it was written; counted while this value lives.
struct Unhashed {
    bytes: SealedPage,
    count: &'static Count,
}

impl Unhashed {
    /// `None`: there are too many.
    fn new(bytes: &SealedPage, count: &'static Count) -> Option<Unhashed> {
        if count.fetch_add(1, Ordering::Relaxed) >= UNHASHED_MAX {
            count.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Unhashed { bytes: bytes.clone(), count })
    }
}

impl Drop for Unhashed {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The state of a page before it was written.
pub(super) struct Before(Was);

enum Was {
    Hashed(Digest),
    Unhashed(Unhashed),
}

/// The tree over the pages of an open file, with the pages whose digests are not computed yet.
pub(super) struct PageTree {
    tree: Tree,
    unhashed: BTreeMap<PageNo, Unhashed>,
    count: &'static Count,
}

impl PageTree {
    pub fn new(tree: Tree) -> PageTree {
        PageTree::counted(tree, &UNHASHED)
    }

    fn counted(tree: Tree, count: &'static Count) -> PageTree {
        PageTree { tree, unhashed: BTreeMap::new(), count }
    }

    /// How many pages it spans.
    pub fn pages(&self) -> u64 {
        self.tree.pages()
    }

    /// Notes a page that is about to be written; returns its state before.
    pub fn write(&mut self, page: PageNo, bytes: &SealedPage, leaves: &dyn Leaves) -> Result<Before, TreeError> {
        let before = match self.unhashed.remove(&page) {
            Some(before) => Was::Unhashed(before),
            None => Was::Hashed(self.tree.leaf(page, leaves)?),
        };
        let unhashed = if self.tree.is_noted(page) { Unhashed::new(bytes, self.count) } else { None };
        match unhashed {
            Some(unhashed) => drop(self.unhashed.insert(page, unhashed)),
            None => self.tree.set(page, digest_of(page, bytes), leaves)?,
        }
        Ok(Before(before))
    }

    /// The write has failed. Notes the page as it was before, and returns the digest of what was to be written.
    pub fn take_back(&mut self, page: PageNo, bytes: &SealedPage, before: Before) -> Digest {
        self.unhashed.remove(&page);
        match before.0 {
            Was::Hashed(digest) => self.tree.set_noted(page, digest),
            Was::Unhashed(before) => drop(self.unhashed.insert(page, before)),
        }
        digest_of(page, bytes)
    }

    /// The digest of a page: the one that was set last, or the one under the root.
    pub fn leaf(&mut self, page: PageNo, leaves: &dyn Leaves) -> Result<Digest, TreeError> {
        if let Some(unhashed) = self.unhashed.remove(&page) {
            self.tree.set_noted(page, digest_of(page, &unhashed.bytes));
        }
        self.tree.leaf(page, leaves)
    }

    /// Notes the digest of a page; the digest of no page removes it.
    pub fn set(&mut self, page: PageNo, digest: Digest, leaves: &dyn Leaves) -> Result<(), TreeError> {
        self.tree.set(page, digest, leaves)?;
        self.unhashed.remove(&page);
        Ok(())
    }

    /// See [`Tree::record_before`]. Records with unhashed pages keep their earlier state.
    pub fn record_before(
        &mut self,
        page: PageNo,
        leaves: &dyn Leaves,
    ) -> Result<Option<(RecordNo, Children)>, TreeError> {
        self.tree.record_before(page, leaves)
    }

    /// See [`Tree::way_to`].
    pub fn way_to(&mut self, page: PageNo, leaves: &dyn Leaves) -> Result<Vec<(RecordNo, Children)>, TreeError> {
        self.hashed().way_to(page, leaves)
    }

    /// See [`Tree::hold`].
    pub fn hold(&mut self, held: BTreeMap<RecordNo, Children>, leaves: &dyn Leaves) -> Result<(), TreeError> {
        self.hashed().hold(held, leaves)
    }

    /// The first page from `from` on that has a digest.
    pub fn next_leaf(&mut self, from: PageNo, leaves: &dyn Leaves) -> Result<Option<PageNo>, TreeError> {
        self.hashed().next_leaf(from, leaves)
    }

    /// Notes that only the first `pages` pages are left.
    pub fn truncate(&mut self, pages: u64, leaves: &dyn Leaves) -> Result<(), TreeError> {
        self.hashed().truncate(pages, leaves)
    }

    /// Makes it span at least `pages` pages, with absent ones at its end.
    pub fn extend_to(&mut self, pages: u64) {
        self.hashed().extend_to(pages);
    }

    /// The tree as it is, to be committed after a barrier.
    pub fn seal(&mut self) -> Sealed {
        self.hashed().seal()
    }

    /// The last seal was committed.
    pub fn committed(&mut self) {
        self.hashed().committed();
    }

    /// The tree, with the digest of each page.
    fn hashed(&mut self) -> &mut Tree {
        for (page, unhashed) in std::mem::take(&mut self.unhashed) {
            self.tree.set_noted(page, digest_of(page, &unhashed.bytes));
        }
        &mut self.tree
    }

    /// See [`Tree::wanted`].
    pub fn wanted(&self, page: PageNo) -> BTreeSet<u64> {
        self.tree.wanted([page])
    }

    /// See [`Tree::bring`].
    pub fn bring(&mut self, records: impl IntoIterator<Item = (u64, Vec<u8>)>) {
        self.tree.bring(records);
    }

    /// See [`Tree::records`].
    pub fn records(&self) -> Arc<dyn Records> {
        self.tree.records()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::integrity::{MemoryRecords, NoPages};
    use lamassu_format::tree::Shape;

    fn tree() -> Tree {
        Tree::new(Shape::new(4).unwrap(), Digest::NONE, 0, Arc::new(MemoryRecords::default()), 1 << 16)
    }

    fn bytes(n: u64) -> SealedPage {
        let mut bytes = Box::new([7; PAGE_LEN]);
        bytes[..8].copy_from_slice(&n.to_le_bytes());
        bytes
    }

    /// Writes, failures, cuts, lookups and commits in some order: whatever is asked for is what a tree tells that has
    /// the digest of each page at once.
    #[test]
    fn whoever_asks_finds_the_digest_of_the_last_write() {
        static COUNT: Count = Count::new(0);
        let mut random = 1_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for _ in 0..200 {
            let (mut lazy, mut eager) = (PageTree::counted(tree(), &COUNT), tree());
            let mut was_unhashed = false;
            for n in 0..120 {
                let page = PageNo(next(21));
                match next(12) {
                    0..6 => {
                        lazy.write(page, &bytes(n), &NoPages).unwrap();
                        eager.set(page, digest_of(page, &bytes(n)), &NoPages).unwrap();
                    }
                    6 => {
                        // As a file is longer after a write of a page that has failed.
                        let before = eager.leaf(page, &NoPages).unwrap();
                        eager.set(page, digest_of(page, &bytes(n)), &NoPages).unwrap();
                        eager.set(page, before, &NoPages).unwrap();
                        let before = lazy.write(page, &bytes(n), &NoPages).unwrap();
                        assert_eq!(lazy.take_back(page, &bytes(n), before), digest_of(page, &bytes(n)));
                    }
                    7 => {
                        lazy.truncate(page.0, &NoPages).unwrap();
                        eager.truncate(page.0, &NoPages).unwrap();
                    }
                    8 => {
                        let told = lazy.record_before(page, &NoPages).unwrap();
                        assert_eq!(told, eager.record_before(page, &NoPages).unwrap());
                    }
                    9 => assert_eq!(lazy.leaf(page, &NoPages).unwrap(), eager.leaf(page, &NoPages).unwrap()),
                    10 => assert_eq!(lazy.next_leaf(page, &NoPages).unwrap(), eager.next_leaf(page, &NoPages).unwrap()),
                    _ => {
                        assert_eq!(lazy.seal(), eager.seal());
                        assert!(lazy.unhashed.is_empty());
                        lazy.committed();
                        eager.committed();
                    }
                }
                was_unhashed |= !lazy.unhashed.is_empty();
                assert_eq!(lazy.pages(), eager.pages());
            }
            assert_eq!(lazy.seal(), eager.seal());
            assert!(was_unhashed);
        }
    }

    #[test]
    fn with_too_many_unhashed_pages_one_is_hashed_at_once() {
        static COUNT: Count = Count::new(0);
        let mut lazy = PageTree::counted(tree(), &COUNT);
        for page in 0..UNHASHED_MAX as u64 + 8 {
            lazy.write(PageNo(page), &bytes(page), &NoPages).unwrap();
            lazy.write(PageNo(page), &bytes(page + 1), &NoPages).unwrap();
        }
        assert!(lazy.unhashed.len() <= UNHASHED_MAX);
        let last = PageNo(UNHASHED_MAX as u64 + 7);
        assert_eq!(lazy.leaf(last, &NoPages).unwrap(), digest_of(last, &bytes(last.0 + 1)));
    }
}
