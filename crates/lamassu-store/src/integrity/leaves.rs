//! The digests of a file's pages as they lie in the store.

use lamassu_format::{Digest, PageNo};
use std::io;

/// Digests of pages, for rebuilding records.
pub trait Leaves {
    /// The digest of a page as it lies in the store; that of no page if it is absent.
    ///
    /// # Errors
    /// Those of the store.
    fn leaf(&self, page: PageNo) -> io::Result<Digest>;

    /// The first page from `from` on that may be present; `None` past the last. Skipped pages are absent.
    ///
    /// # Errors
    /// Those of the store.
    fn next_present(&self, from: PageNo) -> io::Result<Option<PageNo>>;
}

/// Pages of which at least one does not fit the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    /// the first
    pub first: PageNo,
    /// how many
    pub pages: u64,
    /// their digest by the tree
    pub expected: Digest,
    /// their digest in the store
    pub found: Digest,
}
