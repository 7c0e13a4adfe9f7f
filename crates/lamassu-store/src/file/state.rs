//! What is known of an open file, and the primitives every operation is made of: barrier, page load, page write.
//!
//! Time is counted in marks: `seq` grows with every write to the backing file, `covered` is the mark up to which a barrier has made
//! everything durable. A page remembers the mark of its own last write and of the last data write it covers; its pending bits may be
//! cleared once `data_mark <= covered` (I3).

use super::beside::Beside;
use super::block::Block;
use super::chunk::SealedBlock;
use super::copy::Elsewhere;
use super::types::{Damage, DamageKind, Durability, FileContext, StoreError};
use super::zeros::Zeros;
use crate::backend::BackendFile;
use lamassu_crypto::Salts;
use lamassu_crypto::ring::OpenError;
use lamassu_format::{Geometry, PAGE_LEN, Page};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use zeroize::Zeroize;

/// Clean pages kept per file; the oldest go first. One page stands for 116 blocks.
const CLEAN_PAGES_MAX: usize = 1024;

/// The same once all files together hold [`ALL_PAGES_MAX`].
const CLEAN_PAGES_SHARE: usize = 128;

/// Pages in memory, of all files of this process, from which on each keeps its share alone: about 40 MiB.
const ALL_PAGES_MAX: usize = 8192;

/// Pages in memory, of all files of this process.
static ALL_PAGES: AtomicUsize = AtomicUsize::new(0);

/// Whether `count` clean pages are more than a file may keep now.
pub(super) fn are_too_many(count: usize) -> bool {
    count >= CLEAN_PAGES_MAX || (count >= CLEAN_PAGES_SHARE && ALL_PAGES.load(Ordering::Relaxed) >= ALL_PAGES_MAX)
}

/// A page in memory, counted while this lives.
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

/// Damages reported per open file; a file with more is damaged enough.
const REPORTED_MAX: usize = 1024;

/// What interrupted sessions have left undone, kept per open file.
const UNDONE_MAX: usize = 1 << 16;

/// A buffered change of one block. Cheap to clone.
#[derive(Clone)]
pub(super) enum Dirty {
    /// New content, one block long.
    Data(Block),
    /// New content, sealed already.
    Sealed(SealedBlock),
    /// New content, sealed already, that lies in another file. Only during [`Core::copy_blocks`].
    Elsewhere(Elsewhere),
    /// A hole.
    Hole,
}

/// A metadata page held in memory.
pub(super) struct Held {
    /// As it is on disk, interrupted commits resolved and slots past the size dropped.
    pub page: Page,
    /// Pending blocks that no candidate opens. They keep their candidates on disk.
    pub lost: u128,
    /// Mark of the last data write under this page.
    pub data_mark: u64,
    /// Mark of the last write of the page itself; 0 if this process never wrote it.
    pub write_mark: u64,
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
    pub fn new(page: Page, lost: u128) -> Held {
        Held { page, lost, data_mark: 0, write_mark: 0, used_at: AtomicU64::new(0), _counted: Counted::new() }
    }

    /// Pending bits that a barrier has to cover before they may be cleared.
    pub fn is_uncovered(&self, covered: u64) -> bool {
        self.page.pending & !self.lost != 0 && self.data_mark > covered
    }
}

/// What lies where a page belongs. Cheap to clone: a page is shared until one of its owners changes it.
#[derive(Clone)]
pub(super) enum Entry {
    Absent,
    Bad(DamageKind),
    Good(Arc<Held>),
}

/// Everything that changes about an open file, under its lock.
#[derive(Default)]
pub(super) struct State {
    /// Logical size, buffered changes included.
    pub size: u64,
    /// Size the pages written so far tell.
    pub disk_size: u64,
    /// Page 0's size field while the file has more pages: known durable.
    pub floor: u64,
    /// Size that was in the pages when the mark of the same name was taken.
    pub marked: (u64, u64),
    /// Id of the file, zero until one is needed: in a salted domain by the first block that is sealed, otherwise by the first page that is not convergent.
    pub file_id: [u8; 16],
    /// Pages in memory. Void pages past the size are never kept.
    pub pages: HashMap<u64, Entry>,
    /// Pages that readers loaded under the shared lock, or beside a commit; as good as those in `pages`. Empty for who holds the lock alone
    /// ([`Core::take_loaded`]).
    pub loaded: Mutex<HashMap<u64, Entry>>,
    /// Pages read at open, not yet resolved or clipped.
    pub unresolved: BTreeMap<u64, Page>,
    /// Buffered blocks.
    pub dirty: BTreeMap<u64, Dirty>,
    /// Bytes of the chunks that sealed blocks among them lie in; a chunk lives until the last of its blocks is gone.
    pub chunk_len: Arc<AtomicUsize>,
    /// Some buffered block replaces one that is stored: committing it takes barriers.
    pub replaces: bool,
    /// Mark of the last write.
    pub seq: u64,
    /// Everything up to this mark is durable.
    pub covered: u64,
    /// Length of the backing file.
    pub len: u64,
    /// The store can hold a file of this length.
    pub len_possible: u64,
    /// Mark of the last write that gave up backing space: a shortening, or a page that dropped keyed slots or finished a punch. No data and nothing past
    /// the end is written before a barrier covers it, since what is durable may still refer to that space.
    pub drop_mark: u64,
    /// Size found at open; pages below it that the floor does not cover may be absent.
    pub inherited_size: u64,
    /// Where the backing file is known to read as zeros between its pages.
    pub zeros: Zeros,
    /// Page 0 on disk says `sparse`, or must.
    pub sparse: bool,
    /// Page 0 on disk says `cut`.
    pub cut: bool,
    /// Steps of a shrink that follow `cut` are still to be done or repeated.
    pub cut_open: bool,
    /// The backing file has been cut to what its metadata implies.
    pub prepared: bool,
    /// A barrier since open has covered whatever an earlier process wrote.
    pub inherited_covered: bool,
    /// The file must have a page although it is empty: it was created or emptied here.
    pub wants_page: bool,
    /// The file was created or emptied here, when `seq` was `born_mark`: no earlier content of it is durable.
    pub born: bool,
    /// See `born`.
    pub born_mark: u64,
    /// Page 0 must carry the file's id, because other pages follow (I4).
    pub needs_id: bool,
    /// What a barrier that has something to cover takes, in the mean of the last ones.
    pub barrier_took: Option<Duration>,
    /// A barrier failed; everything uncovered must be written again before the next one counts.
    pub barrier_failed: bool,
    /// A barrier failed since the application last heard how its data fares: the next fsync says so, whoever asked for that barrier.
    pub untold: bool,
    /// How many have failed. [`super::File`] looks at it without the lock: of several that wait for an fsync none may miss a failure that another was told of.
    pub barriers_lost: Arc<AtomicU64>,
    /// A barrier has failed since open: that a hole reads as zeros no longer says that it is one on disk.
    pub zeros_unsure: bool,
    /// A round failed: pages on disk may name keys that those in memory do not. Until a commit succeeds data waits for its pages.
    pub unsure: bool,
    /// Pages whose last write failed: what is on disk in their place is not known, so they are written again, or made void past the end.
    pub unsure_pages: BTreeSet<u64>,
    /// Mark of the last shortening of the backing file.
    pub shorten_mark: u64,
    /// The store refused the last commit.
    pub refused: Option<super::write::Refused>,
    /// The backing file is longer than its metadata implies: space of a shrink, to be given back once that is durable.
    pub excess: bool,
    /// Buffered content of the last block as the last shrink left it: what goes to disk before the size grows again.
    pub at_cut: Option<(u64, Block)>,
    /// Whether the last block on disk holds anything past the size, if known.
    pub ragged: Option<bool>,
    /// The last page is of an interrupted session: pages above the floor may never have arrived.
    pub interrupted: bool,
    /// What was found of interrupted sessions since open, and is no damage.
    pub undone: BTreeSet<Damage>,
    /// Where the store lost the end of the file, in logical bytes.
    pub lost_from: Option<u64>,
    /// The last page is damaged: from here on, in logical bytes, nothing tells how far the file goes, nor that a page or slot that is empty is a hole.
    pub unknown_from: Option<u64>,
    /// Blocks of interrupted commits resolved so far.
    pub recovered: u64,
    /// An empty backing file, or a zeroed page that stands for one.
    pub unsealed_empty: bool,
}

impl State {
    /// The file's id, made now if there is none. Page 0 must have been looked at: a damaged one may have had another.
    pub fn ensure_id(&mut self) -> Result<[u8; 16], StoreError> {
        if self.file_id == [0; 16] {
            lamassu_crypto::random(&mut self.file_id)?;
        }
        Ok(self.file_id)
    }

    /// A barrier has failed: nothing since the last good one is known to be on disk, or ever to get there without being written again.
    pub fn note_failed_barrier(&mut self) {
        self.barrier_failed = true;
        self.untold = true;
        self.barriers_lost.fetch_add(1, Ordering::AcqRel);
        self.zeros_unsure = true;
        self.cut_open |= self.cut; // the steps of a shrink are repeated
    }

    /// Notes that a page was written.
    pub fn wrote_page(&mut self, offset: u64) {
        self.seq += 1;
        self.zeros.skipped(self.len..offset);
        self.len = self.len.max(offset + PAGE_LEN as u64);
    }

    /// Notes any other write to the backing file.
    pub fn wrote(&mut self, offset: u64, len: u64) {
        let end = offset + len;
        self.seq += 1;
        self.zeros.skipped(self.len..offset);
        self.zeros.wrote(offset..end);
        self.len = self.len.max(end);
    }
}

/// The parts of an open file that do not change.
pub(super) struct Core {
    pub ctx: Arc<FileContext>,
    pub backing: Arc<dyn BackendFile>,
    pub tag: String,
    pub clock: AtomicU64,
    /// What the file's id was last, for who seals blocks without the lock of the state; zero: not known. A hint: the file may have been emptied since.
    pub id_hint: Mutex<[u8; 16]>,
    /// Damage that was reported already.
    pub reported: Mutex<HashSet<Damage>>,
    /// What goes on without the state.
    pub beside: Beside,
}

impl Core {
    pub fn geo(&self) -> &Geometry {
        &self.ctx.geometry
    }

    /// What the keys of blocks from `first` on depend on, in the file with this id.
    pub fn salts(&self, file_id: [u8; 16], first: u64) -> Salts<'static> {
        Salts::from_block(self.ctx.domain, file_id, first)
    }

    /// Makes a damage, tells the reporter, and returns the error for the caller.
    pub fn damaged(&self, kind: DamageKind, page: u64, block: Option<u64>) -> StoreError {
        let damage = self.damage(kind, page, block);
        let mut reported = self.reported.lock();
        // Once for each open file: a reader tries again, in smaller pieces.
        if reported.len() < REPORTED_MAX && reported.insert(damage) {
            (self.ctx.report)(&self.tag, &damage);
        }
        StoreError::Damaged(damage)
    }

    pub fn damage(&self, kind: DamageKind, page: u64, block: Option<u64>) -> Damage {
        Damage { kind, segment: page / self.geo().pages_per_segment(), page, pages: 1, block }
    }

    /// Reads exactly `buf.len()` bytes, zeros past the end. Returns how many were there.
    pub fn read_padded(&self, offset: u64, buf: &mut [u8]) -> Result<usize, StoreError> {
        let got = self.backing.read_at(offset, buf).map_err(StoreError::io("read", offset))?;
        buf[got..].fill(0);
        Ok(got)
    }

    /// A barrier for all writes so far (none is issued in `relaxed` durability, where order alone protects).
    pub fn barrier(&self, st: &mut State) -> Result<(), StoreError> {
        match self.ctx.durability {
            Durability::Ordered => self.sync_data(st),
            Durability::Relaxed => {
                st.covered = st.seq;
                Ok(())
            }
        }
    }

    /// fdatasync, in every durability mode.
    pub fn sync_data(&self, st: &mut State) -> Result<(), StoreError> {
        if st.barrier_failed {
            self.write_uncovered_again(st)?;
        }
        let start = Instant::now();
        if let Err(source) = self.backing.sync_data() {
            st.note_failed_barrier();
            return Err(StoreError::Io { op: "sync", offset: 0, source });
        }
        if st.seq > st.covered {
            let took = start.elapsed();
            st.barrier_took = Some(st.barrier_took.map_or(took, |before| (3 * before + took) / 4));
        }
        st.covered = st.seq;
        st.inherited_covered = true;
        st.barrier_failed = false;
        Ok(())
    }

    /// Whether the page exists on disk at all, given the size: pages past the last are void.
    pub fn is_within(&self, st: &State, g: u64) -> bool {
        st.disk_size > 0 && g <= self.geo().last_page(st.disk_size) || g == 0
    }

    /// Makes sure page `g` is in memory (a void one past the size is not kept) and returns it.
    pub fn page<'a>(&self, st: &'a mut State, g: u64) -> Result<&'a Entry, StoreError> {
        if !st.pages.contains_key(&g) {
            if !self.is_within(st, g) {
                return Ok(&Entry::Absent);
            }
            let entry = self.load_page(st, g)?;
            self.evict(st);
            st.pages.insert(g, entry);
        }
        let entry = &st.pages[&g];
        self.touch(entry);
        Ok(entry)
    }

    /// Notes that a page was used.
    pub fn touch(&self, entry: &Entry) {
        if let Entry::Good(held) = entry {
            held.used_at.store(self.clock.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Takes over what readers have loaded: to be called first by who gets the lock for itself alone.
    pub fn take_loaded(&self, st: &mut State) {
        let loaded = std::mem::take(st.loaded.get_mut());
        if loaded.is_empty() {
            return;
        }
        for (g, entry) in loaded {
            st.pages.entry(g).or_insert(entry);
        }
        self.evict(st);
    }

    /// The page if it is good, `None` if absent; a bad one is an error.
    pub fn good_page<'a>(&self, st: &'a mut State, g: u64) -> Result<Option<&'a Held>, StoreError> {
        match self.page(st, g)? {
            Entry::Absent => Ok(None),
            Entry::Good(held) => Ok(Some(held)),
            Entry::Bad(kind) => Err(self.damaged(*kind, g, None)),
        }
    }

    /// Drops the clean pages used longest ago if there are too many.
    pub fn evict(&self, st: &mut State) {
        if !are_too_many(st.pages.len()) {
            return;
        }
        let (covered, last) = (st.covered, self.geo().last_page(st.disk_size));
        let mut clean: Vec<(u64, u64)> = st
            .pages
            .iter()
            .filter_map(|(g, entry)| match entry {
                Entry::Bad(_) if *g == 0 || *g == last => None, // decided at open, from both
                Entry::Good(held) if *g != 0 && held.page.pending == 0 && held.write_mark <= covered => {
                    Some((held.used_at.load(Ordering::Relaxed), *g))
                }
                Entry::Good(_) => None,
                Entry::Bad(_) | Entry::Absent => Some((0, *g)),
            })
            .collect();
        if are_too_many(clean.len()) {
            clean.sort_unstable();
            for (_, g) in clean.iter().take(clean.len() / 2) {
                st.pages.remove(g);
            }
        }
    }

    /// Reads, opens and parses page `g`, without looking at the rest of the file.
    pub fn read_page(&self, g: u64) -> Result<Entry, StoreError> {
        let offset = self.geo().page_offset(g);
        let mut bytes = [0u8; PAGE_LEN];
        let got = self.read_padded(offset, &mut bytes)?;
        if bytes.iter().all(|&b| b == 0) {
            return Ok(Entry::Absent);
        }
        if got < PAGE_LEN {
            return Ok(Entry::Bad(DamageKind::PageSeal));
        }
        let aad = self.geo().page_aad(self.ctx.ring.suite(), g);
        let entry = match self.ctx.ring.open_page(&aad, &mut bytes) {
            Err(OpenError::NoKey | OpenError::Truncated) => Entry::Bad(DamageKind::PageKey),
            Err(OpenError::Unauthentic) => Entry::Bad(DamageKind::PageSeal),
            Ok(_) => match Page::parse(&bytes, self.geo(), g) {
                Ok(page) if self.ctx.domain.is_salted() && page.file_id == [0; 16] => {
                    Entry::Bad(DamageKind::PageFormat)
                }
                Ok(page) if page.cut && !self.ctx.sessions.may_be_interrupted(page.session) => {
                    Entry::Bad(DamageKind::PageStale)
                }
                Ok(page) => Entry::Good(Arc::new(Held::new(page, 0))),
                Err(_) => Entry::Bad(DamageKind::PageFormat),
            },
        };
        bytes.zeroize(); // the keys of blocks
        Ok(entry)
    }

    /// Notes what an interrupted session has left, and tells the reporter of the first of each kind.
    pub fn note_undone(&self, st: &mut State, damage: Damage) {
        debug_assert!(damage.kind.is_readable());
        if st.undone.len() >= UNDONE_MAX {
            return;
        }
        // Of thousands of blocks that one interruption took, the log has the first; `check` names all.
        let least = Damage { segment: 0, page: 0, pages: 0, block: None, ..damage };
        let is_first = st.undone.range(least..).next().is_none_or(|d| d.kind != damage.kind);
        st.undone.insert(damage);
        if is_first {
            (self.ctx.report)(&self.tag, &damage);
        }
    }

    /// Whether a block is pending and holds none of what its page has keys for.
    pub fn is_lost(&self, st: &State, block: u64) -> bool {
        let (g, i) = self.geo().slot_of(block);
        matches!(st.pages.get(&g), Some(Entry::Good(held)) if held.lost >> i & 1 == 1)
    }

    /// Seals and writes page `g`, and keeps it as the one on disk. `page.size`, id, session and sequence are set here.
    pub fn write_page(&self, st: &mut State, g: u64, mut page: Page, lost: u128) -> Result<(), StoreError> {
        let geo = *self.geo();
        let last = geo.last_page(st.disk_size);
        page.size = match g {
            0 if last > 0 && !page.cut => st.floor,
            0 => st.disk_size,
            _ => st.disk_size.min((g + 1) * geo.page_span()),
        };
        if !page.tail.is_empty() {
            // The tail's length follows from this field, also where a crash has left a tail in a page that is not the last.
            let block = geo.first_block(g) + page.keys.len() as u64;
            page.size = block * geo.block_size() + page.tail.len() as u64;
        }
        page.sparse = g == 0 && last > 0 && st.sparse;
        let convergent = g == 0 && last == 0 && !page.cut && page.pending == 0;
        let convergent = convergent && self.ctx.convergent_small_files && !st.needs_id;
        // Held until the page is written. A convergent page carries no session, but begins one, too: not even it is written outside of any.
        let stamp = self.ctx.sessions.stamp().map_err(StoreError::io("begin a session", 0))?;
        if convergent {
            (page.file_id, page.session, page.sequence) = ([0; 16], 0, 0);
        } else {
            page.file_id = st.ensure_id()?;
            let before = match st.pages.get(&g) {
                Some(Entry::Good(held)) if held.page.session == stamp.session() => held.page.sequence,
                _ => 0,
            };
            (page.session, page.sequence) = (stamp.session(), before.saturating_add(1));
        }
        let aad = geo.page_aad(self.ctx.ring.suite(), g);
        let mut bytes = page.build(&geo, g);
        match convergent {
            true => self.ctx.ring.outer().seal_page_convergent(&aad, &mut bytes),
            false => self.ctx.ring.outer().seal_page(&aad, &mut bytes)?,
        }
        let offset = geo.page_offset(g);
        if let Err(source) = self.backing.write_at(offset, &bytes[..]) {
            if let Some(Entry::Absent) = st.pages.get(&g) {
                st.pages.remove(&g); // it may be there all the same
            }
            st.unsure_pages.insert(g);
            self.wrote_perhaps(st, offset, PAGE_LEN as u64);
            return Err(StoreError::Io { op: "write page", offset, source });
        }
        drop(stamp);
        st.wrote_page(offset);
        st.unsure_pages.remove(&g);
        if g == 0 {
            st.cut = page.cut;
            st.floor = if last > 0 { page.size } else { 0 };
            st.unsealed_empty = false;
        }
        let mut data_mark = 0;
        if let Some(Entry::Good(held)) = st.pages.get(&g) {
            data_mark = held.data_mark;
            let dropped = held.page.keys.iter().skip(page.keys.len()).any(|key| *key != [0; 32]);
            if dropped || ends_a_punch(&held.page, &page) {
                st.drop_mark = st.seq;
                st.marked = (0, 0);
                st.excess |= dropped;
            }
        }
        let mut held = Held::new(page, lost);
        held.data_mark = data_mark;
        held.write_mark = st.seq;
        held.used_at.store(self.clock.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        st.pages.insert(g, Entry::Good(Arc::new(held)));
        Ok(())
    }

    /// Notes a write that failed, and that the store may have done all the same, or in part.
    pub fn wrote_perhaps(&self, st: &mut State, offset: u64, len: u64) {
        let before = st.len;
        st.zeros.failed(offset..offset + len);
        st.wrote(offset, len);
        st.len = self.backing.stat().map_or(st.len, |s| s.len.max(before));
    }

    /// Backing length that `size` and the last page's tail imply: everything in use ends there.
    pub fn implied_len(&self, st: &mut State) -> Result<u64, StoreError> {
        let geo = *self.geo();
        let g = geo.last_page(st.disk_size);
        let has_tail = matches!(self.page(st, g)?, Entry::Good(held) if !held.page.tail.is_empty());
        let blocks = geo.blocks(st.disk_size) - u64::from(has_tail);
        let page_end = geo.page_offset(g) + PAGE_LEN as u64;
        Ok(match blocks.checked_sub(1) {
            Some(last) => page_end.max(geo.block_offset(last) + geo.block_size()),
            None => page_end,
        })
    }

    /// Shortens the backing file. Nothing may be written past the new end before a barrier ([`State::drop_mark`]).
    pub fn shorten(&self, st: &mut State, len: u64) -> Result<(), StoreError> {
        self.backing.set_len(len).map_err(StoreError::io("truncate", len))?;
        st.seq += 1;
        st.len = len;
        (st.drop_mark, st.shorten_mark) = (st.seq, st.seq);
        st.marked = (0, 0);
        Ok(())
    }
}

/// Whether a slot that was being punched is no longer: until that is durable, recovery expects zeros there.
fn ends_a_punch(old: &Page, new: &Page) -> bool {
    let punched = |page: &Page, i: usize| page.pending >> i & 1 == 1 && page.keys[i] == [0; 32];
    (0..old.keys.len().min(new.keys.len())).any(|i| punched(old, i) && !punched(new, i))
}
