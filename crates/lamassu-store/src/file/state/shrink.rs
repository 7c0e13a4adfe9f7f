//! The remaining steps of a shrink: the steps after `cut`, bytes past the size in the last block, space to give back.
//!
//! Invariants:
//! * `cut` is the flag of page 0 on disk. It stays until the steps after it are durable (I10).
//! * `steps_open` says that these steps are still to be done, or to be repeated after a failed barrier.
//! * `ragged` is `Some(false)` only while the last block on disk is known to hold zeros past the size (I9).
//! * `last_block` is the buffered content of the last block as the last shrink left it. It goes to disk before the size
//!   grows again. It is kept until a commit is complete, or another shrink.

use crate::file::block::Block;
use lamassu_format::BlockNo;

/// The state of shrinking of one open file.
#[derive(Default)]
pub(in crate::file) struct Shrink {
    cut: bool,
    steps_open: bool,
    excess: bool,
    ragged: Option<bool>,
    last_block: Option<(BlockNo, Block)>,
}

impl Shrink {
    /// For a file that was just opened; `cut`: whether its page 0 has the flag.
    pub fn opened(cut: bool) -> Shrink {
        Shrink { cut, steps_open: cut, ..Shrink::default() }
    }

    /// Whether page 0 on disk has `cut`.
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// Page 0 was written.
    pub fn note_page_zero(&mut self, cut: bool) {
        self.cut = cut;
    }

    /// Whether steps that follow `cut` are to be done or repeated.
    pub fn has_open_steps(&self) -> bool {
        self.steps_open
    }

    /// `cut` is on disk, and the steps after it begin.
    pub fn begin_steps(&mut self) {
        self.steps_open = true;
    }

    /// All steps after `cut` are done; a barrier has to cover them.
    pub fn end_steps(&mut self) {
        self.steps_open = false;
    }

    /// A barrier failed: steps that it may not have covered are repeated.
    pub fn note_failed_barrier(&mut self) {
        self.steps_open |= self.cut;
    }

    /// Whether the backing file is longer than its metadata implies, by space to be given back once that is durable.
    pub fn has_excess(&self) -> bool {
        self.excess
    }

    /// A page dropped blocks: their space is to be given back.
    pub fn note_excess(&mut self) {
        self.excess = true;
    }

    /// The backing file was cut to what its metadata implies.
    pub fn note_no_excess(&mut self) {
        self.excess = false;
    }

    /// Whether the last block on disk holds anything past the size, if known.
    pub fn ragged(&self) -> Option<bool> {
        self.ragged
    }

    /// The last block on disk was looked at, or written.
    pub fn set_ragged(&mut self, ragged: bool) {
        self.ragged = Some(ragged);
    }

    /// The size on disk is about to fall into another block.
    pub fn forget_ragged(&mut self) {
        self.ragged = None;
    }

    /// A shrink left this content in a buffered last block.
    pub fn keep_last_block(&mut self, block: BlockNo, content: Block) {
        self.last_block = Some((block, content));
    }

    /// A shrink left nothing in the buffer for the last block.
    pub fn forget_last_block(&mut self) {
        self.last_block = None;
    }

    /// The content that the last shrink left in `block`, if that was its last one.
    pub fn last_block(&self, block: BlockNo) -> Option<Block> {
        self.last_block.as_ref().filter(|(b, _)| *b == block).map(|(_, content)| content.clone())
    }

    /// A commit is complete.
    pub fn note_committed(&mut self) {
        self.last_block = None;
    }

    /// The file was emptied, as a whole.
    pub fn note_emptied(&mut self) {
        (self.cut, self.steps_open, self.ragged) = (false, false, Some(false));
        self.last_block = None;
    }
}
