//! The questions that every state is asked: does the judge raise a false alarm after an honest crash, and does it
//! believe what a hostile store puts together?

use super::store::PageBytes;
use super::{FILES, Left, Lie, PAGES, World, root_of};
use lamassu_anchor::Digest;
use lamassu_anchor::judge::{self, Pages, Shown, Verdict};
use lamassu_anchor::row::FileRow;
use lamassu_format::PageNo;
use std::collections::HashSet;

impl World {
    /// Asks both of this state.
    pub(super) fn lie(&self, left: Option<Left>) -> Option<Lie> {
        (0..FILES).find_map(|file| {
            let row = self.row(file);
            let held = self.held(file);
            self.honest(file, &row, held, left).or_else(|| self.hostile(file, &row, held, left))
        })
    }

    fn honest(&self, file: usize, row: &FileRow, held: Option<[Digest; PAGES]>, left: Option<Left>) -> Option<Lie> {
        let slots = &self.slots[file];
        for first in slots[0].pages_after_crash() {
            for second in slots[1].pages_after_crash() {
                let verdicts = judged(row, held, [first.as_ref(), second.as_ref()], left);
                for (page, bytes) in [&first, &second].into_iter().enumerate() {
                    for data in slots[page].data_after_crash() {
                        let content = resolve(verdicts[page], bytes.as_ref(), data, left);
                        if content.is_none_or(|content| !self.files[file].allowed[page].contains(&content)) {
                            return Some(Lie::FalseAlarm { file, page, path: self.path.clone() });
                        }
                    }
                }
            }
        }
        None
    }

    fn hostile(&self, file: usize, row: &FileRow, held: Option<[Digest; PAGES]>, left: Option<Left>) -> Option<Lie> {
        let seen = |page: usize| -> Vec<Option<PageBytes>> {
            let all: HashSet<_> = self.slots.iter().flat_map(|slots| slots[page].all_pages()).cloned().collect();
            all.into_iter().collect()
        };
        let (firsts, seconds) = (seen(0), seen(1));
        for first in &firsts {
            for second in &seconds {
                let verdicts = judged(row, held, [first.as_ref(), second.as_ref()], left);
                for (page, bytes) in [first, second].into_iter().enumerate() {
                    for data in 0..self.next_content {
                        let content = resolve(verdicts[page], bytes.as_ref(), data, left);
                        if let Some(content) = content.filter(|c| !self.files[file].allowed[page].contains(c)) {
                            return Some(Lie::Wrong { file, page, content, path: self.path.clone() });
                        }
                    }
                }
            }
        }
        None
    }
}

/// Judges both pages, as recovery and reading do.
pub(super) fn judged(
    row: &FileRow,
    held: Option<[Digest; PAGES]>,
    pages: [Option<&PageBytes>; PAGES],
    left: Option<Left>,
) -> [Verdict; PAGES] {
    let digests = pages.map(|page| page.map_or(Digest::NONE, PageBytes::digest));
    let count = if row.size == 1 { Pages::One } else { Pages::Several };
    let leaves = match (row.root.is_none(), count, held) {
        (true, ..) => [Digest::NONE; PAGES],
        (_, Pages::One, _) => [row.root, Digest::NONE],
        (.., Some(held)) => held,
        // The record is computed from the pages: it is right, or nothing is known of either.
        (_, Pages::Several, None) if root_of(&digests) == row.root => digests,
        (_, Pages::Several, None) => [Digest([0xff; 32]); PAGES],
    };
    let mut row = row.clone();
    if left == Some(Left::Sequence) {
        row.open.iter_mut().flat_map(|open| &mut open.windows).for_each(|window| window.covered = 0);
    }
    let shown = |page: usize| {
        let stamp = pages[page].and_then(|page| page.stamp);
        Shown { page: PageNo(page as u64), digest: digests[page], stamp }
    };
    let first = judge::page(&row, count, leaves[0], None, &shown(0));
    let zero = pages[0].and_then(|page| page.stamp).filter(|_| first == Verdict::InFlight);
    let second = judge::page(&row, count, leaves[1], zero, &shown(1));
    let is_cut = zero.is_some() && pages[0].is_some_and(|page| page.cut);
    // Section 9 of the format: a page past the cut that was written after it makes page 0 damaged.
    let sequence = |page: usize| pages[page].and_then(|page| page.stamp).map_or(0, |stamp| stamp.sequence);
    match is_cut && second == Verdict::InFlight && sequence(1) > sequence(0) {
        true => [Verdict::Stale, second],
        // What lies past the cut is not read.
        false if is_cut => [first, Verdict::Hole],
        false => [first, second],
    }
}

/// What a block reads as; `None`: an error.
pub(super) fn resolve(verdict: Verdict, page: Option<&PageBytes>, data: u8, left: Option<Left>) -> Option<u8> {
    let verdict = match verdict {
        Verdict::Acknowledged if left == Some(Left::Covered) => Verdict::InFlight,
        verdict => verdict,
    };
    let page = match verdict {
        Verdict::Hole => return Some(0),
        Verdict::Stale => return None,
        Verdict::Acknowledged | Verdict::InFlight => page?,
    };
    let before = page.pending.filter(|_| verdict == Verdict::InFlight);
    // The zero key is a hole, whatever lies there.
    let is_hole = page.key == 0 && before.is_none();
    if is_hole { Some(0) } else { Some(data).filter(|data| *data == page.key || Some(*data) == before) }
}
