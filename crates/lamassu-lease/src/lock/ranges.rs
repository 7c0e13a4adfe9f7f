//! The locked ranges of one owner in one file.

use crate::ids::Mode;
use std::collections::BTreeMap;

/// Bytes of a file, from the first to the last one, both included. A range without an end goes to [`u64::MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Range {
    first: u64,
    last: u64,
}

impl Range {
    /// The whole file, however long it becomes.
    pub const ALL: Range = Range { first: 0, last: u64::MAX };

    /// `None`: the last byte is before the first one.
    pub fn new(first: u64, last: u64) -> Option<Range> {
        (first <= last).then_some(Range { first, last })
    }

    /// The first byte.
    pub fn first(self) -> u64 {
        self.first
    }

    /// The last byte.
    pub fn last(self) -> u64 {
        self.last
    }

    /// With the bytes before and behind it.
    pub fn with_neighbours(self) -> Range {
        Range { first: self.first.saturating_sub(1), last: self.last.saturating_add(1) }
    }

    fn overlaps(self, other: Range) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Ranges with their modes. They do not overlap, and neighbours have different modes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ranges {
    /// by the first byte: the last one, and the mode
    of: BTreeMap<u64, (u64, Mode)>,
}

impl Ranges {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.of.len()
    }

    /// Whether nothing is locked.
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Range, Mode)> + '_ {
        self.of.iter().map(|(&first, &(last, mode))| (Range { first, last }, mode))
    }

    /// Those that overlap a range, in order.
    pub fn overlapping(&self, range: Range) -> impl Iterator<Item = (Range, Mode)> + '_ {
        // At most one that begins before the range reaches into it.
        let before = self.of.range(..range.first).next_back();
        let inside = self.of.range(range.first..=range.last);
        let all = before.into_iter().chain(inside).map(|(&first, &(last, mode))| (Range { first, last }, mode));
        all.filter(move |(other, _)| other.overlaps(range))
    }

    /// The first one that conflicts with a lock of another owner.
    pub fn conflict(&self, range: Range, mode: Mode) -> Option<(Range, Mode)> {
        self.overlapping(range).find(|(_, own)| mode == Mode::Exclusive || *own == Mode::Exclusive)
    }

    /// Whether unlocking a range makes two of one.
    pub fn is_split_by(&self, range: Range) -> bool {
        self.overlapping(range).any(|(own, _)| own.first < range.first && range.last < own.last)
    }

    /// Unlocks a range.
    pub fn clear(&mut self, range: Range) {
        let overlapping: Vec<_> = self.overlapping(range).collect();
        for (own, mode) in overlapping {
            self.of.remove(&own.first);
            if own.first < range.first {
                self.of.insert(own.first, (range.first - 1, mode));
            }
            if range.last < own.last {
                self.of.insert(range.last + 1, (own.last, mode));
            }
        }
    }

    /// Locks a range in this mode, whatever parts of it were locked before.
    pub fn set(&mut self, range: Range, mode: Mode) {
        self.clear(range);
        let Range { mut first, mut last } = range;
        let is_next_to = |of: Option<(&u64, &(u64, Mode))>| of.map(|(first, (last, mode))| (*first, *last, *mode));
        if let Some((before, end, same)) = is_next_to(self.of.range(..first).next_back())
            && same == mode
            && end.checked_add(1) == Some(first)
        {
            self.of.remove(&before);
            first = before;
        }
        if let Some(next) = last.checked_add(1)
            && let Some(&(end, same)) = self.of.get(&next)
            && same == mode
        {
            self.of.remove(&next);
            last = end;
        }
        self.of.insert(first, (last, mode));
    }

    /// Reduces what is locked in a range to `mode`: what is weaker stays as it is, and nothing is added.
    pub fn weaken(&mut self, range: Range, mode: Option<Mode>) {
        let Some(mode) = mode else { return self.clear(range) };
        let overlapping: Vec<_> = self.overlapping(range).collect();
        for (own, held) in overlapping {
            let part = Range { first: own.first.max(range.first), last: own.last.min(range.last) };
            self.set(part, held.min(mode));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Cells that a test locks: the first 20 bytes, all between, and the last four.
    const CELLS: u64 = 25;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Set(Mode),
        Clear,
        Weaken(Option<Mode>),
    }

    fn modes() -> impl Strategy<Value = Mode> {
        prop_oneof![Just(Mode::Shared), Just(Mode::Exclusive)]
    }

    fn steps() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => modes().prop_map(Step::Set),
            2 => Just(Step::Clear),
            1 => proptest::option::of(modes()).prop_map(Step::Weaken),
        ]
    }

    fn first_of(cell: u64) -> u64 {
        if cell <= CELLS - 5 { cell } else { u64::MAX - (CELLS - 1 - cell) }
    }

    fn last_of(cell: u64) -> u64 {
        if cell < CELLS - 5 { cell } else { u64::MAX - (CELLS - 1 - cell) }
    }

    proptest! {
        /// Compared with one mode for each cell.
        #[test]
        fn ranges_are_as_single_bytes(
            all in prop::collection::vec((steps(), 0..CELLS, 0..CELLS), 1..60),
            (asked, from, to) in (modes(), 0..CELLS, 0..CELLS),
        ) {
            let range = |from: u64, to: u64| Range::new(first_of(from.min(to)), last_of(from.max(to))).unwrap();
            let bytes = |from: u64, to: u64| from.min(to) as usize..=from.max(to) as usize;
            let (mut ranges, mut single) = (Ranges::default(), [None; CELLS as usize]);
            for (step, from, to) in all {
                let splits = ranges.is_split_by(range(from, to));
                let before = ranges.len();
                match step {
                    Step::Set(mode) => {
                        ranges.set(range(from, to), mode);
                        single[bytes(from, to)].fill(Some(mode));
                    }
                    Step::Clear => {
                        ranges.clear(range(from, to));
                        prop_assert_eq!(splits, ranges.len() > before);
                        single[bytes(from, to)].fill(None);
                    }
                    Step::Weaken(mode) => {
                        ranges.weaken(range(from, to), mode);
                        for byte in &mut single[bytes(from, to)] {
                            *byte = (*byte).min(mode);
                        }
                    }
                }
                prop_assert!(ranges.len() <= before + 2);
                let mut last: Option<(Range, Mode)> = None;
                for (range, mode) in ranges.iter() {
                    if let Some((before, same)) = last {
                        prop_assert!(before.last < range.first, "they overlap");
                        prop_assert!(before.last + 1 < range.first || same != mode, "they could be one");
                    }
                    last = Some((range, mode));
                }
                for at in 0..CELLS {
                    let here = range(at, at);
                    prop_assert_eq!(ranges.overlapping(here).next().map(|(_, mode)| mode), single[at as usize]);
                }
            }
            let in_the_way = |held: &Option<Mode>| held.is_some_and(|held| held == Mode::Exclusive || asked == Mode::Exclusive);
            let is_any = single[bytes(from, to)].iter().any(in_the_way);
            prop_assert_eq!(ranges.conflict(range(from, to), asked).is_some(), is_any);
        }
    }
}
