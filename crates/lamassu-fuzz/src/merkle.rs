//! Tree records as the store shows them (`docs/freshness-tree.md`): a cache that is never trusted. Whatever lies there,
//! and whichever pages the store has put back,
//! * the digest that a tree tells of a page is that under the root, or what was set since;
//! * with all pages as they were, records that are lost or made up cost nothing but their rebuilding.

use crate::bytes::Bytes;
use lamassu_format::tree::Shape;
use lamassu_format::{Digest, PageNo};
use lamassu_store::integrity::{Leaves, MemoryRecords, Tree, TreeError};
use std::io;
use std::sync::Arc;

/// Pages of the file.
const PAGES_MAX: u64 = 300;
/// Most things done to records and pages, and most changes afterwards.
const ACTS_MAX: usize = 24;
/// Bytes of records that a tree keeps: a few, so that they are read again.
const KEPT: usize = 1 << 11;

/// Digests of pages as the store shows them.
struct Shown(Vec<Digest>);

impl Leaves for Shown {
    fn leaf(&self, page: PageNo) -> io::Result<Digest> {
        Ok(usize::try_from(page.0).ok().and_then(|n| self.0.get(n)).copied().unwrap_or_default())
    }

    fn next_present(&self, from: PageNo) -> io::Result<Option<PageNo>> {
        let there = |n: &u64| !self.0[*n as usize].is_none();
        Ok((from.0..self.0.len() as u64).find(there).map(PageNo))
    }
}

/// The digest of a page in one of its versions.
fn digest(page: u64, version: u8) -> Digest {
    let mut digest = [version; 32];
    digest[..8].copy_from_slice(&page.to_le_bytes());
    Digest(digest)
}

/// A tree over these pages, and its records.
fn honest(shape: Shape, pages: &[Digest]) -> (Digest, Arc<MemoryRecords>) {
    let records = Arc::new(MemoryRecords::default());
    let mut tree = Tree::new(shape, Digest::NONE, 0, records.clone(), KEPT);
    for (n, digest) in (0..).zip(pages) {
        tree.set(PageNo(n), *digest, &Shown(Vec::new())).expect("nothing is read");
    }
    let root = tree.seal().root;
    tree.committed();
    (root, records)
}

/// The first byte says the degree, two more how many pages, the next which of them are holes.
pub fn tree_records(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    let shape = Shape::new(bytes.one_of(&[2, 4, 16])).expect("a degree");
    let count = 1 + u64::from(bytes.u16()) % PAGES_MAX;
    let every = u64::from(bytes.u8());
    // The last one is there.
    let is_hole = |n: u64| every > 0 && !n.is_multiple_of(every + 1) && n + 1 < count;
    let mut pages: Vec<_> = (0..count).map(|n| if is_hole(n) { Digest::NONE } else { digest(n, 1) }).collect();
    let (root, records) = honest(shape, &pages);
    let mut shown = Shown(pages.clone());
    for _ in 0..ACTS_MAX {
        let (what, place) = (bytes.u8(), u64::from(bytes.u16()));
        match what % 6 {
            0 => shown.0[(place % count) as usize] = digest(place % count, 2),
            1 => shown.0[(place % count) as usize] = Digest::NONE,
            2 => records.clear(),
            how => {
                let made_up = bytes.take(usize::from(what >> 3));
                // By its place alone: their order is not the input's.
                records.change(|offset, record| {
                    if offset / shape.record_len() as u64 % 8 != place % 8 {
                        return;
                    }
                    match how {
                        3 => record.truncate(usize::from(what)),
                        4 => record.iter_mut().zip(made_up).for_each(|(to, from)| *to ^= from),
                        _ => *record = made_up.repeat(40),
                    }
                });
            }
        }
    }
    let is_altered = shown.0 != pages;
    let mut tree = Tree::new(shape, root, count, records, KEPT);
    look(&mut tree, &shown, &pages, is_altered);
    for _ in 0..ACTS_MAX {
        let n = u64::from(bytes.u16()) % count;
        if tree.set(PageNo(n), digest(n, 3), &shown).is_ok() {
            pages[n as usize] = digest(n, 3);
            shown.0[n as usize] = digest(n, 3);
        }
        if bytes.u8() & 7 == 0 {
            tree.seal();
            tree.committed();
        }
    }
    look(&mut tree, &shown, &pages, is_altered);
    assert!(is_altered || tree.root() == honest(shape, &pages).0, "another root, with all pages as they are");
}

/// What a tree tells of each page.
fn look(tree: &mut Tree, shown: &Shown, pages: &[Digest], is_altered: bool) {
    for n in (0..pages.len() as u64).rev() {
        match tree.leaf(PageNo(n), shown) {
            Ok(told) => assert_eq!(told, pages[n as usize], "page {n}"),
            Err(TreeError::Stale(stale)) => {
                let range = stale.first.0..stale.first.0 + stale.pages;
                assert!(is_altered && range.contains(&n), "page {n}: {stale:?}");
            }
            Err(error) => panic!("memory does not fail: {error}"),
        }
    }
    let mut at = 0;
    loop {
        let next = (at..pages.len() as u64).find(|n| !pages[*n as usize].is_none());
        match tree.next_leaf(PageNo(at), shown) {
            Ok(told) => assert_eq!(told.map(|page| page.0), next, "from {at} on"),
            Err(TreeError::Stale(_)) if is_altered => return,
            Err(error) => panic!("{error}"),
        }
        match next {
            Some(next) => at = next + 1,
            None => return,
        }
    }
}
