//! What is known of an open file, split by idea: each part keeps its own invariants and knows nothing of the others.
//!
//! | part | what it knows |
//! |---|---|
//! | [`Identity`] | the file's id, whether it was made here, whether it has a page |
//! | [`Sizes`] | the size for users, the size on disk, the floor |
//! | [`Shrink`] | what a shrink has left to do |
//! | [`Marks`] | which writes were made, and which of them are durable |
//! | [`Failures`] | writes and barriers that failed |
//! | [`Space`] | the backing file's length, and where it reads as zeros |
//! | [`Slack`] | zeros behind compressed blocks that take space in the store |
//! | [`Pages`] | metadata pages in memory |
//! | [`Buffer`] | buffered changes |
//! | [`Inherited`] | what earlier sessions and the store left |
//!
//! Operations on several parts at once are here. Nothing in this module does I/O.

mod buffer;
mod failures;
mod fullness;
mod identity;
mod inherited;
mod marks;
mod pages;
mod shrink;
mod sizes;
mod slack;
mod space;
mod zeros;

pub(super) use buffer::{Buffer, Dirty};
pub(super) use failures::Failures;
pub(super) use fullness::{Fullness, has_room};
pub(super) use identity::Identity;
pub(super) use inherited::Inherited;
pub use marks::Mark;
pub(super) use marks::Marks;
pub(super) use pages::{Held, PageState, Pages};
pub(super) use shrink::Shrink;
pub(super) use sizes::{SizeFields, Sizes};
pub(super) use slack::Slack;
pub(super) use space::Space;

use lamassu_format::{ByteOffset, Geometry, PageNo};

/// Everything that changes about an open file, under its lock.
#[derive(Default)]
pub(super) struct State {
    pub identity: Identity,
    pub sizes: Sizes,
    pub shrink: Shrink,
    pub marks: Marks,
    pub failures: Failures,
    pub space: Space,
    pub slack: Slack,
    pub fullness: Fullness,
    pub pages: Pages,
    pub buffer: Buffer,
    pub inherited: Inherited,
}

impl State {
    /// The part that readers need while a commit changes the state. Pages and contents are shared, not copied.
    pub fn snapshot(&self) -> State {
        State {
            identity: self.identity.snapshot(),
            sizes: self.sizes.clone(),
            space: self.space.snapshot(),
            pages: self.pages.snapshot(),
            buffer: self.buffer.snapshot(),
            ..State::default()
        }
    }

    /// The last page of the size on disk.
    pub fn last_page(&self, geo: &Geometry) -> PageNo {
        geo.last_page(self.sizes.stored())
    }

    /// Whether page `g` exists on disk at all, given the size: pages past the last are void.
    pub fn is_within(&self, geo: &Geometry, g: PageNo) -> bool {
        g == PageNo::ZERO || (self.sizes.stored() > 0 && g <= self.last_page(geo))
    }

    /// A page was written at `offset`.
    pub fn note_page_write(&mut self, offset: ByteOffset) {
        self.marks.advance();
        self.space.note_page(offset);
    }

    /// `len` bytes of blocks were written at `offset`.
    pub fn note_block_write(&mut self, offset: ByteOffset, len: u64) {
        self.marks.advance();
        self.space.note_blocks(offset, len);
    }

    /// A barrier has covered everything written so far, by this process and by earlier ones.
    pub fn note_barrier(&mut self) {
        self.marks.cover_all();
        self.inherited.note_durable();
        self.failures.note_barrier_done();
    }

    /// A barrier has failed: nothing since the last good one is known to be on disk, or ever to get there without being
    /// written again (I11).
    pub fn note_failed_barrier(&mut self) {
        self.failures.note_barrier();
        self.shrink.note_failed_barrier();
        self.slack.clear();
    }

    /// Drops the clean pages used longest ago if there are too many.
    pub fn evict(&mut self, geo: &Geometry) {
        self.pages.evict(&self.marks, geo.last_page(self.sizes.stored()));
    }
}
