//! Computes the root over all pages of a file in one pass, from front to back, with memory for one record a level.

use super::record_digest;
use lamassu_format::tree::Shape;
use lamassu_format::{Digest, PageNo};

/// Computes a root from the digests of all pages, in order.
pub struct RootOf {
    shape: Shape,
    /// The record of each level, from 1, that is being filled: its index, its children.
    levels: Vec<(u64, Vec<Digest>)>,
    /// The digest of page 0.
    first: Digest,
}

impl RootOf {
    /// Begins without pages.
    pub fn new(shape: Shape) -> RootOf {
        RootOf { shape, levels: Vec::new(), first: Digest::NONE }
    }

    /// Adds the next existing page; ascending.
    pub fn add(&mut self, page: PageNo, digest: Digest) {
        if page == PageNo::ZERO {
            self.first = digest;
        }
        self.put(1, page.0, digest);
    }

    fn put(&mut self, level: usize, child: u64, digest: Digest) {
        let mut put = Some((level, child, digest));
        while let Some((level, child, digest)) = put.take() {
            let record = child >> self.shape.degree_log2();
            if self.levels.len() < level {
                self.levels.push((record, self.empty()));
            }
            let empty = self.empty();
            let (filled, children) = &mut self.levels[level - 1];
            if *filled != record {
                let done = record_digest(level as u32, children);
                put = Some((level + 1, *filled, done));
                (*filled, *children) = (record, empty);
            }
            children[child as usize & (self.shape.degree() - 1)] = digest;
        }
    }

    fn empty(&self) -> Vec<Digest> {
        vec![Digest::NONE; self.shape.degree()]
    }

    /// The root of a file that spans `pages` pages.
    pub fn finish(mut self, pages: u64) -> Digest {
        let height = self.shape.height(pages) as usize;
        if height == 0 {
            return self.first;
        }
        for level in 1..height {
            let Some((record, children)) = self.levels.get(level - 1) else { return Digest::NONE };
            let (record, digest) = (*record, record_digest(level as u32, children));
            self.put(level + 1, record, digest);
        }
        self.levels.get(height - 1).map_or(Digest::NONE, |(_, children)| record_digest(height as u32, children))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::integrity::{MemoryRecords, NoPages, Tree};
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::sync::Arc;

    proptest! {
        #[test]
        fn it_is_the_root_of_the_tree(
            degree in 1_u32..5,
            pages in proptest::collection::btree_set(0_u64..5000, 0..60),
            more in 0_u64..200,
        ) {
            let shape = Shape::new(1 << degree).unwrap();
            let pages: BTreeSet<u64> = pages;
            let count = pages.last().map_or(0, |last| last + 1) + more;
            let digest = |page: u64| Digest([page as u8 | 1; 32]);
            let mut tree = Tree::new(shape, Digest::NONE, 0, Arc::new(MemoryRecords::default()), 1 << 20);
            let mut root = RootOf::new(shape);
            for page in &pages {
                tree.set(PageNo(*page), digest(*page), &NoPages).unwrap();
                root.add(PageNo(*page), digest(*page));
            }
            tree.extend_to(count);
            prop_assert_eq!(root.finish(count), tree.root());
        }
    }
}
