//! Verifying a file against its row in the anchor, without any key (`docs/freshness.md`, section 6).
//!
//! Every page is read and hashed, and compared with the tree under the row's root. Blocks are bound by keys in the
//! pages, which are not read here: they are verified if the row has a root over blocks ([`super::blocks`]).

use super::anchored::{TreeOf, Trees};
use super::blocks::StoreBlocks;
use super::fresh::StorePages;
use super::page_tree::digest_of;
use crate::backend::BackendFile;
use crate::integrity::{Leaves, RootOf, Tree, TreeError};
use lamassu_anchor::ObjectId;
use lamassu_anchor::row::FileRow;
use lamassu_format::tree::Shape;
use lamassu_format::{Digest, Geometry, PAGE_LEN, PageNo};
use std::cell::RefCell;
use std::io;
use std::sync::Arc;

/// Bytes of clean records in memory: a file is read once, from the front.
const RECORDS_LEN: usize = 64 << 10;
/// Ranges that a file's report names at most.
const RANGES_MAX: usize = 64;

/// Pages or blocks that do not match the anchor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaleRanges {
    /// First and last of each run, the first runs.
    pub runs: Vec<(u64, u64)>,
    /// How many there are in all.
    pub count: u64,
}

impl StaleRanges {
    /// Adds those from `first` on, before `end`.
    fn note(&mut self, first: u64, end: u64) {
        self.count += end - first;
        let more = self.runs.len() < RANGES_MAX;
        match self.runs.last_mut() {
            Some((_, last)) if *last + 1 == first => *last = end - 1,
            _ if more => self.runs.push((first, end - 1)),
            _ => {}
        }
    }
}

/// What a scrub of one file found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileScrub {
    /// Pages that match the anchor.
    pub pages: u64,
    /// Blocks that match it.
    pub blocks: u64,
    /// Pages that do not.
    pub stale_pages: StaleRanges,
    /// Blocks that do not.
    pub stale_blocks: StaleRanges,
    /// Blocks that cannot be verified: the tree records of the file are lost, and the store has data where there is no
    /// block. The records are made anew when the file is written, or checked with keys.
    pub unverified_blocks: u64,
    /// Pages that a session may have written which has the file open, or left it open: without a key they cannot be
    /// distinguished from stale ones.
    pub open_pages: u64,
    /// Whether the anchor has a root over its blocks, so that they were verified, too.
    pub has_blocks: bool,
}

/// What a scrub of files needs of their vault.
#[derive(Clone)]
pub struct ScrubContext {
    /// Geometry of the vault.
    pub geometry: Geometry,
    /// Shape of its trees.
    pub shape: Shape,
    /// Where tree records lie; never trusted.
    pub trees: Arc<dyn Trees>,
}

/// The results for single pages or blocks.
#[derive(Default)]
struct Seen {
    good: u64,
    stale: StaleRanges,
    unverified: u64,
}

/// Leaves of a tree that are read for a scrub. Each is counted before it is read, also when the tree reads it to make
/// lost records anew.
struct Told<'a> {
    leaves: &'a dyn Leaves,
    bytes: u64,
    progress: RefCell<&'a mut dyn FnMut(u64) -> io::Result<()>>,
}

impl Leaves for Told<'_> {
    fn leaf(&self, at: PageNo) -> io::Result<Digest> {
        (self.progress.borrow_mut())(self.bytes)?;
        self.leaves.leaf(at)
    }

    fn next_present(&self, from: PageNo) -> io::Result<Option<PageNo>> {
        self.leaves.next_present(from)
    }
}

impl ScrubContext {
    /// Verifies a file. `progress` gets bytes about to be read; an error of it ends the work.
    ///
    /// # Errors
    /// Those of the store, and of `progress`.
    pub fn file(
        &self,
        backing: &dyn BackendFile,
        object: ObjectId,
        row: &FileRow,
        progress: &mut dyn FnMut(u64) -> io::Result<()>,
    ) -> io::Result<FileScrub> {
        let mut found = FileScrub { has_blocks: row.blocks.is_some() && row.open.is_none(), ..FileScrub::default() };
        let pages = StorePages { backing, geometry: &self.geometry };
        let count = if row.root.is_none() { 0 } else { self.geometry.last_page(row.size).0 + 1 };
        let is_twin =
            count <= 1 && row.twin.is_some() && row.twin == Some(digest_of(PageNo::ZERO, &pages.read(PageNo::ZERO)?));
        let told = Told { leaves: &pages, bytes: PAGE_LEN as u64, progress: RefCell::new(progress) };
        if is_twin {
            found.pages = 1;
        } else if let Some(good) = self.is_whole(&told, row.root, count)? {
            found.pages = good;
        } else {
            let seen = self.tell(&told, (object, TreeOf::Pages), row.root, count)?;
            (found.pages, found.stale_pages) = (seen.good, seen.stale);
            if row.open.is_some() {
                found.open_pages = std::mem::take(&mut found.stale_pages).count;
            }
        }
        if row.open.is_some() && !is_twin {
            let mut at = PageNo(count);
            while let Some(next) = pages.next_present(at)? {
                // Data behind a page that is not there make it look present.
                found.open_pages += u64::from(!told.leaf(next)?.is_none());
                at = next.next();
            }
        }
        if let Some(root) = row.blocks.filter(|_| found.has_blocks) {
            let blocks = StoreBlocks { backing, geometry: &self.geometry };
            let count = self.geometry.end_block(row.size).0;
            let told = Told { leaves: &blocks, bytes: self.geometry.block_size(), progress: told.progress };
            match self.is_whole(&told, root, count)? {
                Some(good) => found.blocks = good,
                // Data in the place of a slot without a key has no digest, and does not matter.
                None => {
                    let seen = self.tell(&told, (object, TreeOf::Blocks), root, count)?;
                    (found.blocks, found.stale_blocks) = (seen.good, seen.stale);
                    found.unverified_blocks = seen.unverified;
                }
            }
        }
        Ok(found)
    }

    /// If everything that the store shows of the first `count` leaves hashes to the root: how many there are. One pass,
    /// whose memory does not grow with the file.
    fn is_whole(&self, told: &Told<'_>, root: Digest, count: u64) -> io::Result<Option<u64>> {
        let mut shown = RootOf::new(self.shape);
        let (mut at, mut there) = (PageNo::ZERO, 0);
        while let Some(next) = told.next_present(at)?.filter(|next| next.0 < count) {
            let digest = told.leaf(next)?;
            if !digest.is_none() {
                shown.add(next, digest);
                there += 1;
            }
            at = next.next();
        }
        let is_whole = shown.finish(count) == root;
        Ok(is_whole.then_some(there))
    }

    /// Verifies leaves one by one, by the tree under the root.
    fn tell(&self, told: &Told<'_>, (object, of): (ObjectId, TreeOf), root: Digest, count: u64) -> io::Result<Seen> {
        let mut tree = Tree::new(self.shape, root, count, self.trees.records(object, of), RECORDS_LEN);
        let mut seen = Seen::default();
        let mut at = PageNo::ZERO;
        loop {
            let expected = match tree.next_leaf(at, told) {
                Ok(next) => Ok(next),
                Err(TreeError::Stale(stale)) if of == TreeOf::Blocks => {
                    seen.unverified += stale.pages;
                    at = PageNo((stale.first.0 + stale.pages).max(at.0 + 1));
                    continue;
                }
                Err(TreeError::Stale(stale)) => Err(stale),
                Err(error) => return Err(of_tree(error)),
            };
            // Blocks that nothing refers to may lie anywhere.
            let shown = if of == TreeOf::Pages { told.next_present(at)? } else { None };
            let expected = match expected {
                // The records over these leaves are lost, and the leaves in the store do not give them. So these leaves
                // cannot be distinguished, and are handled together.
                Err(stale) if shown.is_none_or(|shown| stale.first <= shown) => {
                    let first = stale.first.max(at).0;
                    let end = stale.first.0.saturating_add(stale.pages).min(count.max(1));
                    if end > first {
                        seen.stale.note(first, end);
                    }
                    at = PageNo(end.max(first + 1));
                    continue;
                }
                Err(_) => None,
                Ok(next) => next,
            };
            let next = expected.into_iter().chain(shown).min().filter(|next| next.0 < count.max(1));
            let Some(next) = next else { return Ok(seen) };
            let digest = told.leaf(next)?;
            match tree.leaf(next, told) {
                Ok(leaf) if leaf == digest => seen.good += u64::from(!digest.is_none()),
                Ok(_) | Err(TreeError::Stale(_)) => seen.stale.note(next.0, next.0 + 1),
                Err(error) => return Err(of_tree(error)),
            }
            at = next.next();
        }
    }
}

fn of_tree(error: TreeError) -> io::Error {
    match error {
        TreeError::Io { source, .. } => source,
        TreeError::Stale(_) => io::ErrorKind::InvalidData.into(),
    }
}
