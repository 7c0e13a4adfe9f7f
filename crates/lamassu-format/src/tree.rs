//! The shape of the Merkle tree over a file's pages (`docs/freshness-tree.md`): which record covers which pages, and
//! where it lies in a tree file. Only numbers: nothing is hashed here.
//!
//! Leaves are pages. A *record* holds the digests of its k children: of pages at level 1, of records of the level below
//! above that. Records are numbered in pre-order over the tree of maximum depth. So a number does not depend on the
//! length of the file, and records that are read in sequence lie in sequence.

use crate::PageNo;
use std::fmt;

/// Bytes of a digest.
pub const DIGEST_LEN: usize = 32;

/// A SHA-256 digest; all zero means none: an absent page, a record without children.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; DIGEST_LEN]);

impl Digest {
    /// No digest.
    pub const NONE: Digest = Digest([0; DIGEST_LEN]);

    /// Whether it is [`Digest::NONE`].
    pub fn is_none(self) -> bool {
        self == Digest::NONE
    }
}

/// The first eight bytes suffice to distinguish digests.
impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The digests of a record's children.
pub type Children = Box<[Digest]>;

/// The number of a record, in pre-order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordNo(pub u64);

/// Page numbers are below 2 to this: a file of 2^63 bytes with the fewest blocks a page has fewer pages.
pub const PAGES_LOG2: u32 = 46;

/// How many children a record has: a power of two, 2 to 256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    degree_log2: u32,
}

impl Default for Shape {
    /// 16 children: records of 512 bytes.
    fn default() -> Self {
        Shape { degree_log2: 4 }
    }
}

/// A record by its place: those of a level are counted from 0, level 1 is above the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordPlace {
    /// from 1
    pub level: u32,
    /// from 0
    pub index: u64,
}

impl Shape {
    /// `None` for an invalid degree.
    pub fn new(degree: usize) -> Option<Shape> {
        let is_degree = degree.is_power_of_two() && (2..=256).contains(&degree);
        is_degree.then(|| Shape { degree_log2: degree.ilog2() })
    }

    /// Children of a record.
    pub fn degree(self) -> usize {
        1 << self.degree_log2
    }

    /// log2 of that.
    pub fn degree_log2(self) -> u32 {
        self.degree_log2
    }

    /// Bytes of a record.
    pub fn record_len(self) -> usize {
        self.degree() * DIGEST_LEN
    }

    /// Levels of the tree of maximum depth.
    pub fn levels(self) -> u32 {
        PAGES_LOG2.div_ceil(self.degree_log2)
    }

    /// How many pages a record of a level covers, as a power of two.
    fn span_log2(self, level: u32) -> u32 {
        level * self.degree_log2
    }

    /// How many pages a record of a level covers.
    pub fn span(self, level: u32) -> u64 {
        1 << self.span_log2(level)
    }

    /// The lowest level at which one record covers the first `pages` pages. 0: a page alone needs no record.
    pub fn height(self, pages: u64) -> u32 {
        match pages {
            0 | 1 => 0,
            // The bits of the last page's number.
            _ => (u64::BITS - (pages - 1).leading_zeros()).div_ceil(self.degree_log2),
        }
    }

    /// The record of a level that covers a page.
    pub fn record_of(self, page: PageNo, level: u32) -> RecordPlace {
        RecordPlace { level, index: page.0 >> self.span_log2(level) }
    }

    /// The index of the child below which a page lies, in the record of a level.
    pub fn child_of(self, page: PageNo, level: u32) -> usize {
        (page.0 >> self.span_log2(level - 1)) as usize & (self.degree() - 1)
    }

    /// The record that a record is a child of, and which.
    pub fn parent(self, place: RecordPlace) -> (RecordPlace, usize) {
        let child = place.index as usize & (self.degree() - 1);
        (RecordPlace { level: place.level + 1, index: place.index >> self.degree_log2 }, child)
    }

    /// The first page that a record covers.
    pub fn first_page(self, place: RecordPlace) -> PageNo {
        PageNo(place.index << self.span_log2(place.level))
    }

    /// Records of a whole subtree whose top is of a level: (k^level - 1) / (k - 1).
    fn subtree(self, level: u32) -> u64 {
        (0..level).fold(0, |records, _| (records << self.degree_log2) + 1)
    }

    /// The number of a record: 1 for each step down from the top, plus the sizes of the skipped subtrees.
    pub fn number(self, place: RecordPlace) -> RecordNo {
        let digit =
            |level: u32| (place.index >> ((level - place.level) * self.degree_log2)) & (self.degree() as u64 - 1);
        let steps = place.level..self.levels();
        RecordNo(steps.map(|level| 1 + digit(level) * self.subtree(level)).sum())
    }

    /// The record of a number; `None` past the last.
    pub fn place(self, number: RecordNo) -> Option<RecordPlace> {
        let mut at = RecordPlace { level: self.levels(), index: 0 };
        let mut left = number.0;
        if left >= self.subtree(at.level) {
            return None;
        }
        while left > 0 {
            let below = self.subtree(at.level - 1);
            let digit = (left - 1) / below;
            left = (left - 1) % below;
            at = RecordPlace { level: at.level - 1, index: at.index << self.degree_log2 | digit };
        }
        Some(at)
    }

    /// Where a record lies in a tree file.
    pub fn offset(self, number: RecordNo) -> u64 {
        number.0 * self.record_len() as u64
    }

    /// A record's children, from its bytes; `None` if there are too few or too many.
    pub fn children(self, bytes: &[u8]) -> Option<Children> {
        let (digests, rest) = bytes.as_chunks::<DIGEST_LEN>();
        (rest.is_empty() && digests.len() == self.degree()).then(|| digests.iter().copied().map(Digest).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shapes() -> impl Strategy<Value = Shape> {
        (1_u32..=8).prop_map(|log2| Shape::new(1 << log2).expect("a degree"))
    }

    /// Numbers by walking a small tree, as the definition says.
    fn walk(shape: Shape, top: RecordPlace, next: &mut u64, found: &mut Vec<(RecordPlace, u64)>) {
        found.push((top, *next));
        *next += 1;
        if top.level > 1 {
            for child in 0..shape.degree() as u64 {
                let index = top.index << shape.degree_log2 | child;
                walk(shape, RecordPlace { level: top.level - 1, index }, next, found);
            }
        }
    }

    #[test]
    fn numbers_are_in_pre_order() {
        for (degree, level) in [(2, 9), (4, 5), (16, 3), (256, 2)] {
            let shape = Shape::new(degree).unwrap();
            // The first subtree of that level lies below the first child of each record above it.
            let above = u64::from(shape.levels() - level);
            let (mut next, mut found) = (above, Vec::new());
            walk(shape, RecordPlace { level, index: 0 }, &mut next, &mut found);
            assert_eq!(found.len() as u64, shape.subtree(level));
            for (place, number) in found {
                assert_eq!(shape.number(place), RecordNo(number), "{place:?}");
                assert_eq!(shape.place(RecordNo(number)), Some(place));
            }
        }
    }

    proptest! {
        #[test]
        fn places_and_numbers_are_one_to_one(shape in shapes(), page in 0_u64..1 << PAGES_LOG2, level: prop::sample::Index) {
            let level = 1 + level.index(shape.levels() as usize) as u32;
            let place = shape.record_of(PageNo(page), level);
            let number = shape.number(place);
            prop_assert_eq!(shape.place(number), Some(place));
            prop_assert!(shape.offset(number) < 1 << 62);
            let (first, span) = (shape.first_page(place).0, shape.span(level));
            prop_assert!((first..first + span).contains(&page));
            if level < shape.levels() {
                let (above, child) = shape.parent(place);
                prop_assert_eq!(above, shape.record_of(PageNo(page), level + 1));
                prop_assert_eq!(child, shape.child_of(PageNo(page), level + 1));
                prop_assert!(shape.number(above) < number);
            }
        }

        #[test]
        fn the_height_is_the_lowest_that_covers(shape in shapes(), pages in 1_u64..=1 << PAGES_LOG2) {
            let height = shape.height(pages);
            prop_assert!(height <= shape.levels() && shape.span(height) >= pages);
            prop_assert!(height == 0 || shape.span(height - 1) < pages);
        }

        #[test]
        fn no_number_does_harm(shape in shapes(), number: u64) {
            if let Some(place) = shape.place(RecordNo(number)) {
                prop_assert_eq!(shape.number(place), RecordNo(number));
            }
        }
    }

    #[test]
    fn degrees_are_powers_of_two() {
        assert!([0, 1, 3, 512, usize::MAX].into_iter().all(|degree| Shape::new(degree).is_none()));
        let shape = Shape::default();
        assert_eq!((shape.degree(), shape.record_len(), shape.levels()), (16, 512, 12));
        assert_eq!([0, 1, 2, 16, 17, 256, 257].map(|pages| shape.height(pages)), [0, 0, 1, 1, 2, 2, 3]);
        assert!(shape.children(&[0; 511]).is_none() && shape.children(&[0; 512]).is_some());
    }
}
