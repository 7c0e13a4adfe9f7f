//! The second tree of a file: over its blocks as they lie in the store, for vaults whose anchor wants one. With it a
//! whole store can be verified without a key ([`super::scrub`]).
//!
//! A block is hashed when its file becomes clean, and only after it was verified under its key: so the digest is that
//! of the block that was written. A file with a block that does not verify has no known root. A slot without a key has
//! no digest, whatever the store has there.
//!
//! After a crash the root is unknown until the file becomes clean again. Then all of its blocks are read once.

use super::form::Numbers;
use super::primitives::Core;
use super::state::{PageState, State};
use super::types::StoreError;
use crate::backend::BackendFile;
use crate::integrity::{Leaves, Tree, TreeError};
use lamassu_crypto::wrap;
use lamassu_format::{BlockNo, Digest, Geometry, PageNo};
use std::collections::BTreeSet;
use std::io;

/// The digest of a block as it lies in the store: H(0x04 ‖ block number as u64 ‖ stored bytes). No digest if those are
/// all zeros, as in a hole, and as zeros that a profile stores plain: in the store the two are the same.
pub(super) fn block_digest(block: BlockNo, stored: &[u8]) -> Digest {
    if stored.iter().all(|byte| *byte == 0) {
        return Digest::NONE;
    }
    let mut bytes = Vec::with_capacity(1 + 8 + stored.len());
    bytes.push(4);
    bytes.extend(block.0.to_le_bytes());
    bytes.extend(stored);
    Digest(wrap::sha256(&bytes))
}

/// The blocks of a backing file, for their tree.
pub(super) struct StoreBlocks<'a> {
    pub backing: &'a dyn BackendFile,
    pub geometry: &'a Geometry,
}

impl StoreBlocks<'_> {
    /// The digest of a block.
    pub fn digest(&self, block: BlockNo) -> io::Result<Digest> {
        let mut bytes = vec![0; self.geometry.block_size() as usize];
        let got = self.backing.read_at(self.geometry.block_offset(block).0, &mut bytes)?;
        bytes[got..].fill(0);
        Ok(block_digest(block, &bytes))
    }

    /// The first block from `from` on that may be present.
    pub fn next_present(&self, from: BlockNo) -> io::Result<Option<BlockNo>> {
        let geo = self.geometry;
        let Some(data) = self.backing.seek_data(geo.block_offset(from).0)? else { return Ok(None) };
        // An offset in the pages of a segment lies before its first block.
        let within = (data % geo.segment_len()).saturating_sub(geo.block_size()) / geo.block_size();
        let blocks = (geo.segment_len() - geo.block_size()) / geo.block_size();
        Ok(Some(BlockNo(data / geo.segment_len() * blocks + within).max(from)))
    }
}

/// Block numbers take the place of page numbers in this tree.
impl Leaves for StoreBlocks<'_> {
    fn leaf(&self, page: PageNo) -> io::Result<Digest> {
        self.digest(BlockNo(page.0))
    }

    fn next_present(&self, from: PageNo) -> io::Result<Option<PageNo>> {
        Ok(StoreBlocks::next_present(self, BlockNo(from.0))?.map(|block| PageNo(block.0)))
    }
}

/// What is known of the tree over blocks.
#[derive(Default)]
pub(super) struct BlockTree {
    /// The tree of the last known root; `None`: there was none.
    pub tree: Option<Tree>,
    /// Pages whose blocks may have changed since then.
    pub changed: BTreeSet<PageNo>,
    /// The file was cut here since then: blocks under pages from there on are gone, whatever its size is now.
    pub cut_at: Option<PageNo>,
}

/// Why blocks are not hashed.
enum HashError {
    Tree(TreeError),
    Store(StoreError),
}

impl From<TreeError> for HashError {
    fn from(error: TreeError) -> Self {
        HashError::Tree(error)
    }
}

impl From<StoreError> for HashError {
    fn from(error: StoreError) -> Self {
        HashError::Store(error)
    }
}

impl Core {
    /// The root over the blocks of a file in its present state, if its vault wants one. Everything that was written is
    /// covered by a barrier, or will be before the root is committed.
    pub fn block_root(&self, st: &mut State) -> Result<Option<Digest>, StoreError> {
        let Some(fresh) = self.fresh.as_ref().filter(|fresh| fresh.files().has_blocks()) else { return Ok(None) };
        let BlockTree { tree, changed, cut_at } = std::mem::take(&mut fresh.known().blocks);
        let mut hashed = None;
        if let Some(mut tree) = tree {
            let kept = cut_at.map_or(u64::MAX, |page| self.geo().first_block(page).0);
            let leaves = StoreBlocks { backing: &*self.backing, geometry: self.geo() };
            let cut = tree.truncate(kept, &leaves);
            hashed = match cut.map_err(HashError::from).and_then(|()| self.hash_blocks(st, tree, Some(&changed))) {
                // Its records are lost, and the store has data where there is no block: hash all blocks again.
                Err(HashError::Tree(TreeError::Stale(_))) => None,
                done => Some(done),
            };
        }
        let hashed = hashed.unwrap_or_else(|| self.hash_blocks(st, fresh.new_block_tree(), None));
        let tree = match hashed {
            Ok(tree) => tree,
            Err(HashError::Tree(error)) => return Err(fresh.failed(error)),
            Err(HashError::Store(error)) => return Err(error),
        };
        let Some(mut tree) = tree else { return Ok(None) };
        let root = tree.seal().root;
        tree.committed();
        fresh.known().blocks = BlockTree { tree: Some(tree), ..BlockTree::default() };
        Ok(Some(root))
    }

    /// Sets the digests of the blocks under some pages, or under all; `None` if one of them does not verify.
    fn hash_blocks(
        &self,
        st: &mut State,
        mut tree: Tree,
        changed: Option<&BTreeSet<PageNo>>,
    ) -> Result<Option<Tree>, HashError> {
        let geo = *self.geo();
        let end = geo.end_block(st.sizes.stored()).0;
        let leaves = StoreBlocks { backing: &*self.backing, geometry: &geo };
        tree.truncate(end, &leaves)?;
        let mut next = PageNo::ZERO;
        loop {
            let page = match changed {
                Some(changed) => changed.range(next..).next().copied(),
                None => self.next_page(st, next)?,
            };
            let Some(page) = page.filter(|page| *page <= st.last_page(&geo)) else { break };
            let Some(digests) = self.block_digests(st, page)? else { return Ok(None) };
            let first = geo.first_block(page).0;
            for (n, digest) in (first..end).zip(digests) {
                tree.set(PageNo(n), digest, &leaves)?;
            }
            tree.leave(PageNo(first));
            next = page.next();
        }
        tree.extend_to(end);
        Ok(Some(tree))
    }

    /// The digests of the blocks under a page; `None` if one of them does not verify.
    fn block_digests(&self, st: &mut State, page: PageNo) -> Result<Option<Vec<Digest>>, StoreError> {
        let geo = *self.geo();
        let first = geo.first_block(page);
        let per_page = geo.blocks_per_page() as usize;
        let keys = match self.page(st, page)? {
            PageState::Good(held) if held.lost() == 0 => held.page().keys.clone(),
            PageState::Absent => return Ok(Some(vec![Digest::NONE; per_page])),
            PageState::Good(_) | PageState::Bad(_) => return Ok(None),
        };
        let (len, mut digests) = (self.ctx.block_len(), vec![Digest::NONE; per_page]);
        let mut at = 0;
        while at < keys.len() {
            // Runs of blocks that have keys: the others are not read.
            if keys.is_hole(at) {
                at += 1;
                continue;
            }
            let count = (at..keys.len()).take_while(|n| keys.is_keyed(*n)).count();
            let mut bytes = vec![0; count * len];
            let run = first + at as u64;
            self.read_padded(geo.block_offset(run), &mut bytes)?;
            for (n, block) in bytes.chunks_exact(len).enumerate() {
                digests[at + n] = block_digest(run + n as u64, block);
            }
            let (forms, keys) = (self.forms(&st.identity), &keys.raw()[at..at + count]);
            if !self.open_blocks(forms, &mut bytes, keys, Numbers::From(run)).is_empty() {
                return Ok(None);
            }
            at += count;
        }
        Ok(Some(digests))
    }
}
