//! The Merkle tree over the pages of one file (`docs/freshness-tree.md`).
//!
//! Guarantees: a digest that [`Tree`] gives for a page is that under the committed root, or the one set since; a record
//! from the store is used only if its digest is the one in the record above it. The file of records is a *cache*: it is
//! never synced, and a record that is lost, older, foreign or forged costs a rebuild from the pages.
//!
//! Never: decides whether a page is current (`lamassu_anchor::judge` does), keeps more clean records than it may.

mod in_vain;
mod leaves;
mod records;
mod root;
mod tree;

pub use leaves::{Leaves, Stale};
pub use records::{FileRecords, MemoryRecords, Records};
pub use root::RootOf;
pub use tree::{Sealed, Tree, TreeError};

use lamassu_crypto::wrap;
use lamassu_format::{Digest, PAGE_LEN, PageNo};

/// The digest of a page as it lies in the store: H(0x00 ‖ page number as u64 ‖ page).
pub fn leaf_digest(page: PageNo, sealed: &[u8; PAGE_LEN]) -> Digest {
    Digest(wrap::sha256_of(&[&[0], &page.0.to_le_bytes(), sealed]))
}

/// The digest of a record: H(0x01 ‖ level as u8 ‖ its children); of one without children none.
pub fn record_digest(level: u32, children: &[Digest]) -> Digest {
    if children.iter().all(|child| child.is_none()) {
        return Digest::NONE;
    }
    let mut bytes = Vec::with_capacity(2 + size_of_val(children));
    bytes.extend([1, level as u8]);
    bytes.extend(children.iter().flat_map(|child| child.0));
    Digest(wrap::sha256(&bytes))
}

/// A store without pages, for tests.
#[cfg(test)]
pub(crate) struct NoPages;

#[cfg(test)]
impl Leaves for NoPages {
    fn leaf(&self, _: PageNo) -> std::io::Result<Digest> {
        Ok(Digest::NONE)
    }

    fn next_present(&self, _: PageNo) -> std::io::Result<Option<PageNo>> {
        Ok(None)
    }
}
