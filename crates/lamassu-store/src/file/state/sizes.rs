//! The sizes of a file: the one that users see, the one in its pages on disk, and the one known durable
//! (`docs/format.md` §9).
//!
//! Invariants:
//! * `stored` is the size that the pages on disk give the file. It changes with a page write that succeeded, never
//!   before.
//! * In a file of several pages `floor` is a size known durable: the one in page 0 on disk, or the one that page 0 may
//!   get next (I5).
//! * Page 0 on disk has `sparse`, or is written with it before the floor is raised past an absent page. The flag is
//!   cleared only after every page was found to exist, durably (I5a).
//! * All pages below `dense_until` were found to exist, durably. An existing page is removed only with the end of the
//!   file, so this decreases only with the last page.

use lamassu_format::PageNo;

/// The sizes of one open file, in bytes.
#[derive(Clone, Default)]
pub(in crate::file) struct Sizes {
    logical: u64,
    stored: u64,
    floor: u64,
    sparse: bool,
    dense_until: PageNo,
}

impl Sizes {
    /// From the pages of a file that was just opened.
    pub fn opened(stored: u64, floor: u64, sparse: bool) -> Sizes {
        Sizes { logical: stored, stored, floor, sparse, dense_until: PageNo::ZERO }
    }

    /// The size with buffered changes: what the file's users see.
    pub fn logical(&self) -> u64 {
        self.logical
    }

    /// Sets the size that users see.
    pub fn set_logical(&mut self, size: u64) {
        self.logical = size;
    }

    /// A buffered write ends at `end`.
    pub fn extend_to(&mut self, end: u64) {
        self.logical = self.logical.max(end);
    }

    /// The size in the pages on disk.
    pub fn stored(&self) -> u64 {
        self.stored
    }

    /// Pages that were written give the file this size.
    pub fn set_stored(&mut self, size: u64) {
        self.stored = size;
    }

    /// The size in page 0 while the file has more pages; 0 in a file of one page.
    pub fn floor(&self) -> u64 {
        self.floor
    }

    /// Page 0 has this floor, or its size as the only page is durable.
    pub fn set_floor(&mut self, floor: u64) {
        self.floor = floor;
    }

    /// Whether pages below the floor may be absent.
    pub fn is_sparse(&self) -> bool {
        self.sparse
    }

    /// Pages below the size may be absent from now on.
    pub fn note_sparse(&mut self) {
        self.sparse = true;
    }

    /// Page 0 is without `sparse`: no page below the floor may be absent.
    pub fn note_dense(&mut self) {
        self.sparse = false;
    }

    /// The first page that was not yet found to exist, durably.
    pub fn dense_until(&self) -> PageNo {
        self.dense_until
    }

    /// The page [`Sizes::dense_until`] exists, durably.
    pub fn note_dense_page(&mut self) {
        self.dense_until = self.dense_until.next();
    }

    /// Pages from `g` on may be absent again: the file ends there.
    pub fn forget_dense_from(&mut self, g: PageNo) {
        self.dense_until = self.dense_until.min(g);
    }

    /// The file is empty on disk.
    pub fn clear(&mut self) {
        *self = Sizes::default();
    }

    /// The fields for a page write that changes no size.
    pub fn fields(&self) -> SizeFields {
        SizeFields { size: self.stored, floor: self.floor, sparse: self.sparse }
    }
}

/// The sizes that a page write records.
#[derive(Clone, Copy)]
pub(in crate::file) struct SizeFields {
    /// The size of the file.
    pub size: u64,
    /// The floor, for page 0 of a file of several pages.
    pub floor: u64,
    /// Whether pages below the floor may be absent, for page 0 of a file of several pages.
    pub sparse: bool,
}
