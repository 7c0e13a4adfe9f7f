//! Buffered changes: what was written and no commit has brought to the store yet.
//!
//! Invariants:
//! * A block that is here rules over what its page says, for readers as for a commit.
//! * `replaces` is set once a buffered block is noted to replace a stored one, and clear while nothing is buffered by a
//!   write. It only decides how much is buffered and whether a commit is worth opening; no safety depends on it.
//! * `refused` stands until a commit succeeds or the file gives space back.

use crate::file::block::Block;
use crate::file::copy::CopiedBlock;
use crate::file::presealed::SealedBlock;
use lamassu_format::BlockNo;
use std::collections::BTreeMap;
use std::ops::RangeBounds;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long after the store refused a commit a large buffer grows no more, before all of it is sealed and tried again.
const REFUSAL: Duration = Duration::from_secs(1);

/// A buffered change of one block. Cheap to clone.
#[derive(Clone)]
pub(in crate::file) enum Dirty {
    /// New content, one block long.
    Data(Block),
    /// New content, sealed already.
    Sealed(SealedBlock),
    /// New content, sealed already, that lies in another file. Only during [`crate::file::copy::copy`].
    Copied(CopiedBlock),
    /// A hole.
    Hole,
}

impl Dirty {
    /// Whether the content lies in another file.
    pub fn is_copy(&self) -> bool {
        matches!(self, Dirty::Copied(_))
    }
}

/// That the store refused a commit.
struct Refused {
    at: Instant,
    errno: i32,
}

/// The buffered changes of one open file, by block.
#[derive(Default)]
pub(in crate::file) struct Buffer {
    blocks: BTreeMap<BlockNo, Dirty>,
    /// Bytes of the chunks that sealed blocks lie in; a chunk lives until the last of its blocks is gone.
    chunk_len: Arc<AtomicUsize>,
    replaces: bool,
    refused: Option<Refused>,
}

impl Buffer {
    /// What readers of a snapshot need. Contents are shared with it.
    pub fn snapshot(&self) -> Buffer {
        Buffer { blocks: self.blocks.clone(), chunk_len: self.chunk_len.clone(), ..Buffer::default() }
    }

    /// Whether nothing is buffered.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// How many blocks are buffered.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// The change of a block.
    pub fn get(&self, block: BlockNo) -> Option<&Dirty> {
        self.blocks.get(&block)
    }

    /// Whether a block is buffered.
    pub fn contains(&self, block: BlockNo) -> bool {
        self.blocks.contains_key(&block)
    }

    /// The changes of a range of blocks, ascending.
    pub fn range(&self, range: impl RangeBounds<BlockNo>) -> impl Iterator<Item = (BlockNo, &Dirty)> {
        self.blocks.range(range).map(|(block, dirty)| (*block, dirty))
    }

    /// The first buffered block of a range.
    pub fn first_in(&self, range: impl RangeBounds<BlockNo>) -> Option<BlockNo> {
        self.blocks.range(range).next().map(|(block, _)| *block)
    }

    /// Buffers a change, in place of an earlier one; `replaces`: of a block that is stored.
    pub fn put(&mut self, block: BlockNo, dirty: Dirty, replaces: bool) {
        self.replaces |= replaces;
        self.blocks.insert(block, dirty);
    }

    /// The plaintext of a buffered block, to be changed.
    pub fn data_mut(&mut self, block: BlockNo) -> Option<&mut Block> {
        match self.blocks.get_mut(&block) {
            Some(Dirty::Data(bytes)) => Some(bytes),
            _ => None,
        }
    }

    /// Takes a change out.
    pub fn take(&mut self, block: BlockNo) -> Option<Dirty> {
        self.blocks.remove(&block)
    }

    /// Drops the blocks from `end` on: the file ends before them.
    pub fn drop_from(&mut self, end: BlockNo) {
        drop(self.blocks.split_off(&end));
        self.replaces &= !self.blocks.is_empty();
    }

    /// Drops all: the file is emptied.
    pub fn clear(&mut self) {
        self.blocks.clear();
        (self.replaces, self.refused) = (false, None);
    }

    /// Drops what lies in other files, and returns the numbers of those blocks.
    pub fn drop_copies(&mut self) -> Vec<BlockNo> {
        let copies: Vec<BlockNo> = self.blocks.iter().filter(|(_, dirty)| dirty.is_copy()).map(|(b, _)| *b).collect();
        copies.iter().for_each(|block| drop(self.blocks.remove(block)));
        copies
    }

    /// Takes all changes out, for [`Buffer::put_back`].
    pub fn set_aside(&mut self) -> BTreeMap<BlockNo, Dirty> {
        std::mem::take(&mut self.blocks)
    }

    /// The changes that [`Buffer::set_aside`] took out are all there is.
    pub fn put_back(&mut self, blocks: BTreeMap<BlockNo, Dirty>) {
        self.blocks = blocks;
    }

    /// Whether a commit may replace stored blocks, which takes barriers.
    pub fn replaces(&self) -> bool {
        self.replaces
    }

    /// A commit brought everything to the store.
    pub fn note_committed(&mut self) {
        self.replaces = false;
    }

    /// Bytes that the buffered blocks take, of `block_len` bytes each.
    pub fn bytes(&self, block_len: usize) -> usize {
        (self.blocks.len() * block_len).max(self.chunk_bytes())
    }

    /// Bytes of the chunks that sealed blocks lie in.
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_len.load(Ordering::Relaxed)
    }

    /// The counter of these bytes.
    pub fn chunk_len(&self) -> Arc<AtomicUsize> {
        self.chunk_len.clone()
    }

    /// The store refused a commit now, with this error.
    pub fn note_refused(&mut self, errno: Option<i32>) {
        self.refused = errno.map(|errno| Refused { at: Instant::now(), errno });
    }

    /// The store took a commit, or space comes back.
    pub fn forget_refusal(&mut self) {
        self.refused = None;
    }

    /// Whether the store refused the last commit.
    pub fn is_refused(&self) -> bool {
        self.refused.is_some()
    }

    /// The error with which the store refused a commit a moment ago.
    pub fn recent_refusal(&self) -> Option<i32> {
        self.refused.as_ref().filter(|refused| refused.at.elapsed() < REFUSAL).map(|refused| refused.errno)
    }
}
