//! The changes of one file that no barrier covered, and what a crash may leave of them.

use crate::backend::Time;
use crate::backend::memory::{Content, PAGE_BYTES, Page, Part, parts, written, zeroed};
use std::collections::BTreeMap;
use std::sync::Arc;

/// How a page came to be as it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// A write that ended at this offset of the file.
    Write(u64),
    Punch,
    /// The n-th uncovered `set_len`, from 1.
    SetLen(usize),
}

/// A page after one of the uncovered changes.
#[derive(Clone)]
struct Version {
    /// Number of the change in this file.
    seq: u64,
    image: Option<Arc<Page>>,
    cause: Cause,
    /// Part of a piece that spans its whole block, or the beginning of it.
    whole: bool,
}

#[derive(Clone)]
struct DirtyPage {
    versions: Vec<Version>,
    /// Whether the next barrier writes it; false after a failed one.
    dirty: bool,
}

/// See the module.
#[derive(Clone)]
pub(super) struct Dirty {
    pages: BTreeMap<u64, DirtyPage>,
    /// Sequence number and length of each uncovered `set_len`.
    set_lens: Vec<(u64, u64)>,
    seq: u64,
    /// Length as the application sees it.
    len: u64,
    /// Of the last change.
    pub(super) time: Time,
}

/// Decides what survives.
pub(super) trait Choice {
    /// A number from `least` to `most`.
    fn pick(&mut self, least: usize, most: usize) -> usize;
}

impl Dirty {
    pub(super) fn new(covered: &Content) -> Dirty {
        Dirty { pages: BTreeMap::new(), set_lens: Vec::new(), seq: 0, len: covered.len(), time: Time::default() }
    }

    fn latest(&self, covered: &Content, page: u64) -> Option<Arc<Page>> {
        match self.pages.get(&page).and_then(|p| p.versions.last()) {
            Some(version) => version.image.clone(),
            None => covered.page(page).cloned(),
        }
    }

    fn add(&mut self, page: u64, image: Option<Arc<Page>>, cause: Cause, whole: bool) {
        let version = Version { seq: self.seq, image, cause, whole };
        let page = self.pages.entry(page).or_insert_with(|| DirtyPage { versions: Vec::new(), dirty: true });
        page.versions.push(version);
        page.dirty = true;
    }

    pub(super) fn write(&mut self, covered: &Content, offset: u64, data: &[u8], granularity: u64) {
        self.seq += 1;
        let whole = data.len() as u64 <= granularity && offset.is_multiple_of(granularity);
        let mut rest = data;
        for part in parts(offset, data.len() as u64) {
            let (now, later) = rest.split_at(part.len());
            rest = later;
            let old = if part.is_whole() { None } else { self.latest(covered, part.page) };
            self.add(part.page, Some(written(old, part, now)), Cause::Write(part.end()), whole);
        }
        self.len = self.len.max(offset + data.len() as u64);
    }

    pub(super) fn punch(&mut self, covered: &Content, offset: u64, len: u64, granularity: u64) {
        self.seq += 1;
        let whole = len == granularity && offset.is_multiple_of(granularity);
        for part in parts(offset, len) {
            let image = zeroed(self.latest(covered, part.page), part);
            self.add(part.page, image, Cause::Punch, whole);
        }
    }

    pub(super) fn set_len(&mut self, covered: &Content, len: u64) {
        self.seq += 1;
        self.set_lens.push((self.seq, len));
        if len < self.len {
            let first = len / PAGE_BYTES;
            let mut cut: Vec<u64> = covered.pages_from(first).map(|(n, _)| n).collect();
            cut.extend(self.pages.range(first..).map(|(n, _)| *n));
            cut.sort_unstable();
            cut.dedup();
            for page in cut {
                let from = len.saturating_sub(page * PAGE_BYTES) as usize;
                let part = Part { page, from, to: PAGE_BYTES as usize };
                let image = zeroed(self.latest(covered, page), part);
                self.add(page, image, Cause::SetLen(self.set_lens.len()), false);
            }
        }
        self.len = len;
    }

    /// A barrier that failed: what it should have written counts as clean.
    pub(super) fn fail(&mut self) {
        for page in self.pages.values_mut() {
            page.dirty = false;
        }
    }

    /// A barrier: brings the covered content up to date, except pages that a failed barrier took for clean. False if
    /// none of those is left.
    pub(super) fn cover(&mut self, covered: &mut Content) -> bool {
        self.pages.retain(|&number, page| {
            // The lengths are covered, and with them what they cut.
            let cut = page.versions.iter().rposition(|v| matches!(v.cause, Cause::SetLen(_)));
            let upto = if page.dirty { Some(page.versions.len() - 1) } else { cut };
            if let Some(upto) = upto {
                covered.put_page(number, page.versions[upto].image.clone());
                page.versions.drain(..=upto);
            }
            !page.versions.is_empty()
        });
        self.set_lens.clear();
        covered.force_len(self.len);
        !self.pages.is_empty()
    }

    /// One of the contents a crash may leave.
    pub(super) fn crash(&self, covered: &Content, granularity: u64, choice: &mut dyn Choice) -> Content {
        let mut content = covered.clone();
        let applied = choice.pick(0, self.set_lens.len());
        let (since, mut len) = match applied {
            0 => (0, covered.len()),
            n => self.set_lens[n - 1],
        };
        let per_block = granularity / PAGE_BYTES;
        let mut pages = self.pages.iter().peekable();
        let mut block = Vec::new();
        while let Some((&number, page)) = pages.next() {
            block.push((number, page));
            if pages.peek().is_some_and(|&(&next, _)| next / per_block == number / per_block) {
                continue;
            }
            choose_block(&block, applied, choice, |number, versions| {
                if let Some(last) = versions.last() {
                    content.put_page(number, last.image.clone());
                }
                for version in versions.iter().filter(|v| v.seq > since) {
                    if let Cause::Write(end) = version.cause {
                        len = len.max(end);
                    }
                }
            });
            block.clear();
        }
        content.force_len(len);
        content
    }
}

/// Number of versions of a page that are certain, given how many `set_len` calls were applied.
fn certain(page: &DirtyPage, applied: usize) -> usize {
    page.versions.iter().rposition(|v| matches!(v.cause, Cause::SetLen(n) if n <= applied)).map_or(0, |at| at + 1)
}

/// Chooses, for the pages of one block, how many versions of each survive.
fn choose_block(
    block: &[(u64, &DirtyPage)],
    applied: usize,
    choice: &mut dyn Choice,
    mut keep: impl FnMut(u64, &[Version]),
) {
    // A piece is in all of its pages, except those covered since.
    let versions = block.iter().flat_map(|(_, page)| &page.versions);
    let mut wholes: Vec<u64> = versions.filter(|v| v.whole).map(|v| v.seq).collect();
    wholes.sort_unstable();
    wholes.dedup();
    let settled = block.iter().filter_map(|(_, p)| Some(p.versions[certain(p, applied).checked_sub(1)?].seq)).max();
    let least = wholes.iter().filter(|&&seq| Some(seq) <= settled).count();
    let kept = choice.pick(least, wholes.len());
    let kept_until = kept.checked_sub(1).map_or(0, |n| wholes[n]);
    for (number, page) in block {
        let versions = &page.versions;
        let pieces = || versions.iter().filter(|v| v.whole).map(|v| v.seq);
        let from = pieces().filter(|seq| *seq <= kept_until).max().unwrap_or(0);
        let before = pieces().find(|seq| *seq > kept_until).unwrap_or(u64::MAX);
        let least = certain(page, applied).max(versions.iter().filter(|v| v.seq <= from).count());
        let most = versions.iter().filter(|v| v.seq < before).count();
        let mut count = choice.pick(least, most.max(least));
        // If a `set_len` was not applied, its change of the page alone did not happen either.
        while count > least && matches!(versions[count - 1].cause, Cause::SetLen(_)) {
            count -= 1;
        }
        keep(*number, &versions[..count]);
    }
}
