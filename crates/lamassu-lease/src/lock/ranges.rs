//! The locked ranges of one owner in one file.

use crate::ids::Mode;

#[cfg(test)]
thread_local! {
    /// How many ranges were looked at one by one.
    pub(crate) static LOOKED_AT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

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

    /// Whether they have bytes in common.
    pub fn overlaps(self, other: Range) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// From the first to the last byte of both.
    pub fn with(self, other: Range) -> Range {
        Range { first: self.first.min(other.first), last: self.last.max(other.last) }
    }
}

/// Ranges in order, with at least one byte between two of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Apart(Vec<Range>);

impl Apart {
    /// Those that overlap a range.
    fn overlapping(&self, range: Range) -> &[Range] {
        self.0.get(self.places(range)).unwrap_or_default()
    }

    fn places(&self, range: Range) -> std::ops::Range<usize> {
        // What ends before the range also begins before its end.
        let begun = self.0.partition_point(|own| own.first <= range.last);
        self.0.partition_point(|own| own.last < range.first)..begun
    }

    fn clear(&mut self, range: Range) {
        let cleared = self.overlapping(range);
        let (Some(first), Some(last)) = (cleared.first(), cleared.last()) else { return };
        let before = (first.first < range.first).then(|| Range { first: first.first, last: range.first - 1 });
        let after = (range.last < last.last).then(|| Range { first: range.last + 1, last: last.last });
        self.0.splice(self.places(range), before.into_iter().chain(after));
    }

    fn add(&mut self, range: Range) {
        let near = range.with_neighbours();
        let all = self.overlapping(near).iter().fold(range, |all, own| all.with(*own));
        self.0.splice(self.places(near), [all]);
    }
}

/// Ranges with their modes. They do not overlap, and neighbours have different modes. Except for those that take or
/// return ranges one by one, each operation searches, however many there are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ranges {
    shared: Apart,
    exclusive: Apart,
}

impl Ranges {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.shared.0.len() + self.exclusive.0.len()
    }

    /// Whether nothing is locked.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Range, Mode)> + '_ {
        self.overlapping(Range::ALL)
    }

    /// Those that overlap a range, in order.
    pub fn overlapping(&self, range: Range) -> impl Iterator<Item = (Range, Mode)> + '_ {
        let mut shared = self.shared.overlapping(range).iter().copied().peekable();
        let mut exclusive = self.exclusive.overlapping(range).iter().copied().peekable();
        let all = std::iter::from_fn(move || match (shared.peek(), exclusive.peek()) {
            (Some(one), Some(other)) if one < other => shared.next().map(|one| (one, Mode::Shared)),
            (Some(_), None) => shared.next().map(|one| (one, Mode::Shared)),
            _ => exclusive.next().map(|one| (one, Mode::Exclusive)),
        });
        #[cfg(test)]
        let all = all.inspect(|_| LOOKED_AT.with(|count| count.set(count.get() + 1)));
        all
    }

    /// Those that conflict with a lock of another owner: some of each mode, in order.
    fn conflicts(&self, range: Range, mode: Mode) -> [(&[Range], Mode); 2] {
        let shared = if mode == Mode::Exclusive { self.shared.overlapping(range) } else { &[] };
        [(shared, Mode::Shared), (self.exclusive.overlapping(range), Mode::Exclusive)]
    }

    /// The first one that conflicts with a lock of another owner.
    pub fn conflict(&self, range: Range, mode: Mode) -> Option<(Range, Mode)> {
        self.conflicts(range, mode).into_iter().filter_map(|(all, mode)| Some((*all.first()?, mode))).min()
    }

    /// How many conflict with a lock of another owner.
    pub fn in_the_way(&self, range: Range, mode: Mode) -> usize {
        self.conflicts(range, mode).into_iter().map(|(all, _)| all.len()).sum()
    }

    /// Where in a range more is locked than this mode, from the first to the last byte. `None`: nowhere.
    pub fn above(&self, range: Range, mode: Option<Mode>) -> Option<Range> {
        let of = [(&self.shared, Mode::Shared), (&self.exclusive, Mode::Exclusive)];
        let more = of.into_iter().filter(|(_, held)| Some(*held) > mode).map(|(of, _)| of.overlapping(range));
        let all = more.flat_map(|of| of.first().into_iter().chain(of.last())).copied().reduce(Range::with)?;
        Some(Range { first: all.first.max(range.first), last: all.last.min(range.last) })
    }

    /// Whether unlocking a range makes two of one.
    pub fn is_split_by(&self, range: Range) -> bool {
        let both = [&self.shared, &self.exclusive].map(|of| of.overlapping(range).first());
        both.into_iter().flatten().any(|own| own.first < range.first && range.last < own.last)
    }

    /// Unlocks a range.
    pub fn clear(&mut self, range: Range) {
        self.shared.clear(range);
        self.exclusive.clear(range);
    }

    /// Locks a range in this mode, whatever parts of it were locked before.
    pub fn set(&mut self, range: Range, mode: Mode) {
        self.clear(range);
        match mode {
            Mode::Shared => self.shared.add(range),
            Mode::Exclusive => self.exclusive.add(range),
        }
    }

    /// Reduces what is locked in a range to `mode`: what is weaker stays as it is, and nothing is added.
    pub fn weaken(&mut self, range: Range, mode: Option<Mode>) {
        match mode {
            None => self.clear(range),
            Some(Mode::Shared) => {
                for own in self.exclusive.overlapping(range).to_vec() {
                    let part = Range { first: own.first.max(range.first), last: own.last.min(range.last) };
                    self.set(part, Mode::Shared);
                }
            }
            Some(Mode::Exclusive) => {}
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
            let above: Vec<_> = (from.min(to)..=from.max(to)).filter(|at| single[*at as usize] > Some(asked)).collect();
            let hull = above.first().zip(above.last()).map(|(first, last)| range(*first, *last));
            prop_assert_eq!(ranges.above(range(from, to), Some(asked)), hull);
            let in_the_way = |held: &Option<Mode>| held.is_some_and(|held| held == Mode::Exclusive || asked == Mode::Exclusive);
            let is_any = single[bytes(from, to)].iter().any(in_the_way);
            let all: Vec<_> = ranges.overlapping(range(from, to)).filter(|(_, own)| in_the_way(&Some(*own))).collect();
            prop_assert_eq!(ranges.conflict(range(from, to), asked), all.first().copied());
            prop_assert_eq!((ranges.in_the_way(range(from, to), asked), all.is_empty()), (all.len(), !is_any));
        }
    }
}
