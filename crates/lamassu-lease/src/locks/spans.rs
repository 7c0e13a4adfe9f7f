//! How many ranges of a file overlap a given one, whoever has them. The answer costs two searches, however many ranges
//! there are: a host may have as many as it likes, and have many requests wait for one of them.

use super::{Lock, Range};
use crate::Mode;

/// More changes than this at once are made in one pass over all ranges.
const FEW: usize = 16;

/// Ranges, which may overlap: where they begin and where they end, each ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Spans {
    firsts: Vec<u64>,
    lasts: Vec<u64>,
}

impl Spans {
    /// How many of them overlap a range.
    fn overlapping(&self, range: Range) -> usize {
        // What ends before the range also begins before its end.
        let begun = self.firsts.partition_point(|first| *first <= range.last());
        begun - self.lasts.partition_point(|last| *last < range.first())
    }

    /// Removes ranges that are in it, and adds others.
    fn replace(&mut self, removed: &[Range], added: &[Range]) {
        replace(&mut self.firsts, removed, added, Range::first);
        replace(&mut self.lasts, removed, added, Range::last);
    }
}

/// The locked ranges of all owners of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Locked {
    all: Spans,
    exclusive: Spans,
}

impl Locked {
    /// How many of them conflict with a lock of another owner.
    pub fn in_the_way(&self, lock: &Lock) -> usize {
        match lock.mode {
            Mode::Exclusive => self.all.overlapping(lock.range),
            Mode::Shared => self.exclusive.overlapping(lock.range),
        }
    }

    /// Removes ranges that are in it, and adds others.
    pub fn replace(&mut self, removed: &[(Range, Mode)], added: &[(Range, Mode)]) {
        let all = |of: &[(Range, Mode)]| of.iter().map(|(range, _)| *range).collect::<Vec<_>>();
        self.all.replace(&all(removed), &all(added));
        let exclusive = |of: &[(Range, Mode)]| {
            let of = of.iter().filter(|(_, mode)| *mode == Mode::Exclusive);
            of.map(|(range, _)| *range).collect::<Vec<_>>()
        };
        self.exclusive.replace(&exclusive(removed), &exclusive(added));
    }
}

fn replace(all: &mut Vec<u64>, removed: &[Range], added: &[Range], end: impl Fn(Range) -> u64) {
    if removed.len() + added.len() <= FEW {
        for value in removed.iter().map(|range| end(*range)) {
            if let Ok(at) = all.binary_search(&value) {
                all.remove(at);
            }
        }
        for value in added.iter().map(|range| end(*range)) {
            all.insert(all.partition_point(|other| *other < value), value);
        }
        return;
    }
    let mut removed: Vec<_> = removed.iter().map(|range| end(*range)).collect();
    removed.sort_unstable();
    let mut removed = removed.into_iter().peekable();
    all.retain(|value| {
        while removed.next_if(|gone| gone < value).is_some() {}
        removed.next_if_eq(value).is_none()
    });
    all.extend(added.iter().map(|range| end(*range)));
    // Two ascending runs, which this merges.
    all.sort();
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn some(most: usize) -> impl Strategy<Value = Vec<Range>> {
        let range = (0..30u64, 0..30u64).prop_map(|(a, b)| Range::new(a.min(b), a.max(b)).unwrap());
        prop::collection::vec(range, 0..most)
    }

    proptest! {
        #[test]
        fn counts_are_those_of_single_ranges(first in some(60), added in some(40), few in some(6), asked in some(10)) {
            let mut spans = Spans::default();
            spans.replace(&[], &first);
            spans.replace(&first[first.len() / 2..], &added);
            let mut all: Vec<_> = first[..first.len() / 2].iter().chain(&added).copied().collect();
            for range in few {
                spans.replace(&all.pop().into_iter().collect::<Vec<_>>(), &[range]);
                all.insert(0, range);
            }
            for range in asked {
                let count = all.iter().filter(|one| one.first() <= range.last() && range.first() <= one.last()).count();
                prop_assert_eq!(spans.overlapping(range), count);
            }
        }
    }
}
