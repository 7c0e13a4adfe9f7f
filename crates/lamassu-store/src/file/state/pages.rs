//! Metadata pages in memory.
//!
//! Invariants:
//! * A good page is as it is on disk, interrupted commits resolved and slots past the size dropped.
//! * Void pages past the size are never kept.
//! * Pages in `shared` are as good as those in `known`. `shared` is empty while one caller holds the state alone
//!   ([`Pages::take_shared`]); readers fill it under the shared lock, or under an open commit.
//! * A page with pending bits, or one that no barrier has covered, is never evicted: its marks are kept nowhere else.

use super::{Mark, Marks};
use crate::file::types::DamageKind;
use lamassu_format::{Page, PageNo};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Clean pages kept per file; the oldest go first. One page stands for 118 blocks by default.
const CLEAN_PAGES_MAX: usize = 4096;

/// The same once all files together hold [`ALL_PAGES_MAX`].
const CLEAN_PAGES_SHARE: usize = 128;

/// Pages of a file, those with pending bits included, before they are settled by force.
const OPEN_PAGES_MAX: usize = 8192;

/// The same once all files together hold [`ALL_PAGES_MAX`].
const OPEN_PAGES_SHARE: usize = 2048;

/// Pages in memory of all files of this process: about 40 MiB. Beyond that each file keeps only its share.
const ALL_PAGES_MAX: usize = 8192;

/// Pages in memory, of all files of this process.
static ALL_PAGES: AtomicUsize = AtomicUsize::new(0);

/// Whether `count` clean pages are more than a file may keep now.
fn are_too_many(count: usize) -> bool {
    count >= CLEAN_PAGES_MAX || (count >= CLEAN_PAGES_SHARE && ALL_PAGES.load(Ordering::Relaxed) >= ALL_PAGES_MAX)
}

/// Counts a page in memory while this lives.
struct Counted;

impl Counted {
    fn new() -> Counted {
        ALL_PAGES.fetch_add(1, Ordering::Relaxed);
        Counted
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        ALL_PAGES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A metadata page held in memory.
pub(in crate::file) struct Held {
    page: Page,
    lost: u128,
    data_mark: Mark,
    write_mark: Mark,
    used_at: AtomicU64,
    _counted: Counted,
}

impl Clone for Held {
    fn clone(&self) -> Held {
        Held {
            page: self.page.clone(),
            lost: self.lost,
            data_mark: self.data_mark,
            write_mark: self.write_mark,
            used_at: AtomicU64::new(self.used_at.load(Ordering::Relaxed)),
            _counted: Counted::new(),
        }
    }
}

impl Held {
    /// A page that was read. `lost`: pending blocks that no candidate opens; they keep their candidates on disk.
    pub fn new(page: Page, lost: u128) -> Held {
        let (data_mark, write_mark) = (Mark::default(), Mark::default());
        Held { page, lost, data_mark, write_mark, used_at: AtomicU64::new(0), _counted: Counted::new() }
    }

    /// A page that was written here, under which data was last written at `data_mark`.
    pub fn written(page: Page, lost: u128, write_mark: Mark, data_mark: Mark) -> Held {
        Held { write_mark, data_mark, ..Held::new(page, lost) }
    }

    /// The page.
    pub fn page(&self) -> &Page {
        &self.page
    }

    /// The same, for a page that nothing else refers to.
    pub fn page_mut(&mut self) -> &mut Page {
        &mut self.page
    }

    /// The page alone.
    pub fn into_page(self) -> Page {
        self.page
    }

    /// Pending blocks that no candidate opens.
    pub fn lost(&self) -> u128 {
        self.lost
    }

    /// Whether block `i` of the page is pending and no candidate opens it.
    pub fn is_lost(&self, i: usize) -> bool {
        self.lost >> i & 1 == 1
    }

    /// Whether block `i` of the page has a key: it is no hole, and not the tail.
    pub fn is_keyed(&self, i: usize) -> bool {
        self.page.keys.is_keyed(i)
    }

    /// Pending blocks whose data is being written: their bits are cleared once a barrier has covered it.
    pub fn open_bits(&self) -> u128 {
        self.page.pending & !self.lost
    }

    /// Whether there are such blocks.
    pub fn is_open(&self) -> bool {
        self.open_bits() != 0
    }

    /// Mark of the last data write under this page.
    pub fn data_mark(&self) -> Mark {
        self.data_mark
    }

    /// Mark of the last write of the page itself; the first mark if this process never wrote it.
    pub fn write_mark(&self) -> Mark {
        self.write_mark
    }

    /// Whether pending bits may be cleared: a barrier has covered all data under this page (I3).
    pub fn is_data_durable(&self, marks: &Marks) -> bool {
        marks.is_durable(self.data_mark)
    }

    /// Whether a barrier has covered the last write of the page.
    pub fn is_durable(&self, marks: &Marks) -> bool {
        marks.is_durable(self.write_mark)
    }

    /// Whether a barrier has to cover data before pending bits may be cleared.
    pub fn is_uncovered(&self, marks: &Marks) -> bool {
        self.is_open() && !self.is_data_durable(marks)
    }

    /// The page was used at this time.
    pub fn note_used(&self, now: u64) {
        self.used_at.store(now, Ordering::Relaxed);
    }
}

/// The content of a page's place. Cheap to clone: a page is shared until one of its owners changes it.
#[derive(Clone)]
pub(in crate::file) enum PageState {
    Absent,
    Bad(DamageKind),
    Good(Arc<Held>),
}

impl PageState {
    /// The page, if it is a good one.
    pub fn good(&self) -> Option<&Held> {
        match self {
            PageState::Good(held) => Some(held),
            PageState::Absent | PageState::Bad(_) => None,
        }
    }
}

/// The pages of one open file, by number.
#[derive(Default)]
pub(in crate::file) struct Pages {
    known: HashMap<PageNo, PageState>,
    shared: Mutex<HashMap<PageNo, PageState>>,
    /// Pages read at open, not yet resolved or clipped.
    unresolved: BTreeMap<PageNo, Page>,
}

impl Pages {
    /// What readers of a snapshot need. Pages are shared with it.
    pub fn snapshot(&self) -> Pages {
        Pages { known: self.known.clone(), shared: Mutex::default(), unresolved: self.unresolved.clone() }
    }

    /// What is known of page `g`.
    pub fn get(&self, g: PageNo) -> Option<&PageState> {
        self.known.get(&g)
    }

    /// Whether anything is known of page `g`.
    pub fn contains(&self, g: PageNo) -> bool {
        self.known.contains_key(&g)
    }

    /// Page `g`, if it is known and good.
    pub fn good(&self, g: PageNo) -> Option<&Held> {
        self.known.get(&g).and_then(PageState::good)
    }

    /// Whether page `g` is known to be damaged.
    pub fn is_bad(&self, g: PageNo) -> bool {
        matches!(self.known.get(&g), Some(PageState::Bad(_)))
    }

    /// Whether so many pages are known that those with pending bits are to be settled.
    pub fn are_too_many_open(&self) -> bool {
        let is_crowded = ALL_PAGES.load(Ordering::Relaxed) >= ALL_PAGES_MAX;
        self.known.len() > if is_crowded { OPEN_PAGES_SHARE } else { OPEN_PAGES_MAX }
    }

    /// Whether a page has blocks whose data is being written.
    pub fn has_open(&self) -> bool {
        self.known.values().any(|entry| entry.good().is_some_and(Held::is_open))
    }

    /// Numbers of the good pages that `choose` chooses.
    pub fn numbers_of(&self, choose: impl Fn(&Held) -> bool) -> Vec<PageNo> {
        self.known.iter().filter(|(_, entry)| entry.good().is_some_and(&choose)).map(|(g, _)| *g).collect()
    }

    /// Keeps the state of page `g`.
    pub fn put(&mut self, g: PageNo, entry: PageState) {
        self.known.insert(g, entry);
    }

    /// Takes page `g` out.
    pub fn take(&mut self, g: PageNo) -> Option<PageState> {
        self.known.remove(&g)
    }

    /// The write of page `g` failed: if it was absent, it may exist nevertheless.
    pub fn forget_absent(&mut self, g: PageNo) {
        if let Some(PageState::Absent) = self.known.get(&g) {
            self.known.remove(&g);
        }
    }

    /// Data was written under page `g`, at `mark`.
    pub fn note_data(&mut self, g: PageNo, mark: Mark) {
        if let Some(PageState::Good(held)) = self.known.get_mut(&g) {
            Arc::make_mut(held).data_mark = mark;
        }
    }

    /// Drops what lies past page `last`: those pages are void, and nothing may write them again.
    pub fn drop_after(&mut self, last: PageNo) {
        self.known.retain(|g, _| *g <= last);
        self.unresolved.retain(|g, _| *g <= last);
    }

    /// Drops all.
    pub fn clear(&mut self) {
        self.known.clear();
        self.unresolved.clear();
    }

    /// Keeps a page that was read at open until it is asked for.
    pub fn put_unresolved(&mut self, g: PageNo, page: Page) {
        self.unresolved.insert(g, page);
    }

    /// A page that was read at open and not asked for since.
    pub fn unresolved(&self, g: PageNo) -> Option<&Page> {
        self.unresolved.get(&g)
    }

    /// Takes such a page out.
    pub fn take_unresolved(&mut self, g: PageNo) -> Option<Page> {
        self.unresolved.remove(&g)
    }

    /// A page that another reader has loaded.
    pub fn shared(&self, g: PageNo) -> Option<PageState> {
        self.shared.lock().get(&g).cloned()
    }

    /// Keeps a page for other readers, and for the next caller that holds the state alone.
    pub fn share(&self, g: PageNo, entry: PageState) {
        let mut shared = self.shared.lock();
        if are_too_many(shared.len()) {
            let mut keep = false;
            shared.retain(|_, _| {
                keep = !keep;
                keep
            });
        }
        shared.insert(g, entry);
    }

    /// Takes over the pages that readers have loaded; returns whether there were any. The first step of a caller that
    /// holds the state alone.
    pub fn take_shared(&mut self) -> bool {
        let shared = std::mem::take(self.shared.get_mut());
        let is_any = !shared.is_empty();
        for (g, entry) in shared {
            self.known.entry(g).or_insert(entry);
        }
        is_any
    }

    /// Takes over what readers of a snapshot have loaded, in place of what is shared.
    pub fn adopt_shared(&mut self, snapshot: Pages) {
        self.shared = snapshot.shared;
    }

    /// Drops the clean pages used longest ago if there are too many. `last` is the last page of the size on disk.
    pub fn evict(&mut self, marks: &Marks, last: PageNo) {
        if !are_too_many(self.known.len()) {
            return;
        }
        let clean = |(g, entry): (&PageNo, &PageState)| match entry {
            PageState::Bad(_) if *g == PageNo::ZERO || *g == last => None, // decided at open, from page 0 and the last page
            PageState::Good(held) if *g != PageNo::ZERO && held.page.pending == 0 && held.is_durable(marks) => {
                Some((held.used_at.load(Ordering::Relaxed), *g))
            }
            PageState::Good(_) => None,
            PageState::Bad(_) | PageState::Absent => Some((0, *g)),
        };
        let mut clean: Vec<(u64, PageNo)> = self.known.iter().filter_map(clean).collect();
        if are_too_many(clean.len()) {
            clean.sort_unstable();
            for (_, g) in clean.iter().take(clean.len() / 2) {
                self.known.remove(g);
            }
        }
    }
}
