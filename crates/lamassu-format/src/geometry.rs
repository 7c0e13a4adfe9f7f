//! The offsets of pages and blocks in a backing file (§8). Pure arithmetic.

use crate::{BlockNo, ByteOffset, PAGE_LEN, PageNo};

/// Key slots in a page.
pub const SLOTS: usize = 124;
/// Smallest and largest block size, in bytes.
pub const BLOCK_SIZE_MIN: u32 = 4096;
/// See [`BLOCK_SIZE_MIN`].
pub const BLOCK_SIZE_MAX: u32 = 1 << 20;
/// Largest number of transient slots: at least half of a page stays for data blocks.
pub const RESERVED_MAX: u16 = 62;

/// The associated data of a page: suite, geometry and page number (§9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageAad(pub [u8; 16]);

/// Block size and transient slots of a vault, and everything that follows from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    block_size: u32,
    reserved: u16,
}

impl Geometry {
    /// A geometry, or `None` if `block_size` is no power of two in 4096..=1048576 or `reserved` not in 1..=62.
    pub fn new(block_size: u32, reserved: u16) -> Option<Self> {
        let good = block_size.is_power_of_two()
            && (BLOCK_SIZE_MIN..=BLOCK_SIZE_MAX).contains(&block_size)
            && (1..=RESERVED_MAX).contains(&reserved);
        good.then_some(Geometry { block_size, reserved })
    }

    /// B, in bytes.
    pub const fn block_size(&self) -> u64 {
        self.block_size as u64
    }

    /// R, transient slots per page.
    pub const fn reserved(&self) -> usize {
        self.reserved as usize
    }

    /// N, data blocks a page covers.
    pub const fn blocks_per_page(&self) -> u64 {
        SLOTS as u64 - self.reserved as u64
    }

    /// P, pages per metadata area.
    pub const fn pages_per_segment(&self) -> u64 {
        self.block_size as u64 / PAGE_LEN as u64
    }

    /// Logical bytes a page covers.
    pub const fn page_span(&self) -> u64 {
        self.blocks_per_page() * self.block_size()
    }

    /// Backing bytes of a segment.
    pub const fn segment_len(&self) -> u64 {
        self.block_size() + self.pages_per_segment() * self.page_span()
    }

    /// The largest logical size whose backing offsets stay below 2⁶³.
    pub const fn size_max(&self) -> u64 {
        (i64::MAX as u64 / self.segment_len() - 1) * self.pages_per_segment() * self.page_span()
    }

    /// Backing offset of page `g`.
    pub const fn page_offset(&self, g: PageNo) -> ByteOffset {
        let p = self.pages_per_segment();
        ByteOffset((g.0 / p) * self.segment_len() + (g.0 % p) * PAGE_LEN as u64)
    }

    /// Backing offset of block `b`.
    pub const fn block_offset(&self, b: BlockNo) -> ByteOffset {
        let per_segment = self.pages_per_segment() * self.blocks_per_page();
        let in_segment = self.block_size() + (b.0 % per_segment) * self.block_size();
        ByteOffset((b.0 / per_segment) * self.segment_len() + in_segment)
    }

    /// Page and slot of block `b`.
    pub const fn slot_of(&self, b: BlockNo) -> (PageNo, usize) {
        (self.page_of(b), (b.0 % self.blocks_per_page()) as usize)
    }

    /// Page of block `b`.
    pub const fn page_of(&self, b: BlockNo) -> PageNo {
        PageNo(b.0 / self.blocks_per_page())
    }

    /// Pages of blocks `first..=last`.
    pub fn pages_of(&self, first: BlockNo, last: BlockNo) -> impl DoubleEndedIterator<Item = PageNo> + Clone {
        self.page_of(first).until(self.page_of(last).next())
    }

    /// First block of page `g`.
    pub const fn first_block(&self, g: PageNo) -> BlockNo {
        BlockNo(g.0 * self.blocks_per_page())
    }

    /// Logical offset at which page `g` begins.
    pub const fn page_start(&self, g: PageNo) -> u64 {
        g.0 * self.page_span()
    }

    /// Logical offset at which block `b` begins.
    pub const fn block_start(&self, b: BlockNo) -> u64 {
        b.0 * self.block_size()
    }

    /// The block that contains the logical offset `at`.
    pub const fn block_at(&self, at: u64) -> BlockNo {
        BlockNo(at / self.block_size())
    }

    /// The block after the last one, the partial one included, of a file of `size` bytes.
    pub const fn end_block(&self, size: u64) -> BlockNo {
        BlockNo(size.div_ceil(self.block_size()))
    }

    /// The segment that holds page `g`.
    pub const fn segment_of(&self, g: PageNo) -> u64 {
        g.0 / self.pages_per_segment()
    }

    /// The first page of the segment that holds the backing offset `at`.
    pub const fn first_page_at(&self, at: ByteOffset) -> PageNo {
        PageNo(at.0 / self.segment_len() * self.pages_per_segment())
    }

    /// The last page of a file of `size` bytes. A size exactly on a page border belongs to the earlier page.
    pub const fn last_page(&self, size: u64) -> PageNo {
        PageNo(if size == 0 { 0 } else { (size.div_ceil(self.block_size()) - 1) / self.blocks_per_page() })
    }

    /// AAD of page `g` (§9).
    pub fn page_aad(&self, suite: crate::Suite, g: PageNo) -> PageAad {
        let mut aad = [0u8; 16];
        aad[0..2].copy_from_slice(&crate::VERSION.to_le_bytes());
        aad[2] = suite.id();
        aad[3] = self.block_size.trailing_zeros() as u8;
        aad[4..6].copy_from_slice(&self.reserved.to_le_bytes());
        aad[8..16].copy_from_slice(&g.0.to_le_bytes());
        PageAad(aad)
    }
}
