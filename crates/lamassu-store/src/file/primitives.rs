//! The primitives that every operation on an open file is made of: read, barrier, page read, page write, shorten,
//! punch.
//!
//! A primitive does one thing to the backing file and notes it in the state. It repairs nothing. In an anchored vault,
//! reading and writing a page also consults and updates `fresh` (rules A1, A3 and A6). The callers decide when a page
//! is loaded or recovered, how a failed barrier is repaired, and which order of steps keeps which invariant.

use super::concurrent::Concurrent;
use super::fresh::{Fresh, Shrinking};
use super::page_tree::{SealedPage, digest_of};
use super::session::Stamp;
use super::state::{Held, Identity, PageState, SizeFields, State};
use super::types::{Damage, DamageKind, FileContext, StoreError};
use crate::backend::BackendFile;
use lamassu_anchor::Window;
use lamassu_crypto::ring::OpenError;
use lamassu_crypto::secret::wipe;
use lamassu_format::profile::KeyKind;
use lamassu_format::{BlockNo, ByteOffset, FileId, Geometry, PAGE_LEN, Page, PageNo};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Instant;

/// Most damages reported for each open file.
const REPORTED_MAX: usize = 1024;

/// Which id a page carries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PageId {
    /// The file's, unless the page can be convergent: such a page has none.
    AsFits,
    /// The file's, because other pages follow (I4).
    OfFile,
}

/// What a barrier of a file covers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Covers {
    /// Everything that is needed to read it.
    Content,
    /// Mode, owner, times and extended attributes, too.
    All,
}

/// The parts of an open file that do not change, or have locks of their own.
pub(super) struct Core {
    pub ctx: Arc<FileContext>,
    pub backing: Arc<dyn BackendFile>,
    tag: String,
    clock: AtomicU64,
    /// The last known id of the file, to seal blocks without the lock of the state; zero: unknown. A hint: the file may
    /// have been emptied since.
    pub id_hint: Mutex<FileId>,
    /// The last known number of the file's profile, for the same use.
    pub profile_hint: AtomicU8,
    /// While the profile of the file is being changed: the form of the last block that was found, which is tried first.
    pub form_hint: AtomicU8,
    /// Damage that was reported already.
    reported: Mutex<HashSet<Damage>>,
    /// What other threads see and do during a commit.
    pub concurrent: Concurrent,
    /// What the anchor knows of the file; `None`: unanchored.
    pub fresh: Option<Fresh>,
}

impl Core {
    pub fn new(ctx: Arc<FileContext>, backing: Arc<dyn BackendFile>, tag: &str, fresh: Option<Fresh>) -> Core {
        Core {
            ctx,
            backing,
            tag: tag.to_owned(),
            clock: AtomicU64::new(1),
            id_hint: Mutex::default(),
            profile_hint: AtomicU8::default(),
            form_hint: AtomicU8::default(),
            reported: Mutex::default(),
            concurrent: Concurrent::default(),
            fresh,
        }
    }

    pub fn geo(&self) -> &Geometry {
        &self.ctx.geometry
    }

    /// A page without blocks, for this file.
    pub fn new_page(&self, st: &State) -> Page {
        let mut page = Page::empty(st.identity.id());
        page.profile = st.identity.profile();
        page
    }

    /// Makes a damage, passes it to the reporter, and returns the error for the caller.
    pub fn damaged(&self, kind: DamageKind, page: PageNo, block: Option<BlockNo>) -> StoreError {
        StoreError::Damaged(self.told(kind, page, block))
    }

    /// The same without the error.
    pub fn told(&self, kind: DamageKind, page: PageNo, block: Option<BlockNo>) -> Damage {
        let damage = self.damage(kind, page, block);
        // Once for each open file: a reader repeats the read in smaller pieces.
        let is_new = {
            let mut reported = self.reported.lock();
            reported.len() < REPORTED_MAX && reported.insert(damage)
        };
        if is_new && !(self.ctx.report)(&self.tag, &damage) {
            self.reported.lock().remove(&damage);
        }
        damage
    }

    pub fn damage(&self, kind: DamageKind, page: PageNo, block: Option<BlockNo>) -> Damage {
        Damage { kind, segment: self.geo().segment_of(page), page, pages: 1, block }
    }

    /// Notes what an interrupted session has left, and reports the first of each kind: one interruption may
    /// concern thousands of blocks. `check` names them all.
    pub fn note_undone(&self, st: &mut State, damage: Damage) {
        if st.inherited.note_undone(damage) {
            let _ = (self.ctx.report)(&self.tag, &damage);
        }
    }

    /// Notes that a page was used.
    pub fn touch(&self, entry: &PageState) {
        if let Some(held) = entry.good() {
            held.note_used(self.tick());
        }
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    /// Reads exactly `buf.len()` bytes, zeros past the end. Returns how many were there.
    pub fn read_padded(&self, offset: ByteOffset, buf: &mut [u8]) -> Result<usize, StoreError> {
        let got = self.backing.read_at(offset.0, buf).map_err(StoreError::io("read", offset))?;
        buf[got..].fill(0);
        Ok(got)
    }

    /// fdatasync or fsync of the backing file. [`Core::sync_as`] is the barrier that first repairs what an earlier one
    /// lost.
    pub fn issue_barrier(&self, st: &mut State, covers: Covers) -> Result<(), StoreError> {
        let start = Instant::now();
        let done = match covers {
            Covers::Content => self.backing.sync_data(),
            Covers::All => self.backing.sync_all(),
        };
        if let Err(source) = done {
            st.note_failed_barrier();
            if let Some(fresh) = &self.fresh {
                fresh.note_failed_barrier();
            }
            return Err(StoreError::Io { op: "sync", offset: 0, source });
        }
        if st.marks.has_uncovered() {
            st.marks.note_barrier_time(start.elapsed());
        }
        st.note_barrier();
        if let Some(fresh) = &self.fresh {
            fresh.note_barrier();
        }
        if st.slack.is_empty() {
            return Ok(());
        }
        self.keeping_mtime(st, |core, st| {
            core.punch_slack(st);
            Ok(())
        })
    }

    /// Reads, opens and parses page `g`, without looking at the rest of the file.
    pub fn read_page(&self, g: PageNo) -> Result<PageState, StoreError> {
        let mut bytes = [0u8; PAGE_LEN];
        let offset = self.geo().page_offset(g);
        match &self.fresh {
            Some(fresh) => fresh.read_beside(g, || self.read_padded(offset, &mut bytes))?,
            None => self.read_padded(offset, &mut bytes)?,
        };
        let seen = self.fresh.as_ref().map(|fresh| (fresh, digest_of(g, &bytes)));
        let opened = self.opened_page(g, &mut bytes);
        let Some((fresh, digest)) = seen else {
            return Ok(match opened.good().map(Held::page) {
                Some(page) if page.cut && !self.ctx.sessions.may_be_interrupted(page.session) => {
                    PageState::Bad(DamageKind::PageStale)
                }
                Some(_) | None => opened,
            });
        };
        // Also for an absent page. A page that does not open has a fault of its own, which is reported instead.
        let is_stale = !matches!(opened, PageState::Bad(_)) && !fresh.is_current(&*self.backing, g, digest)?;
        Ok(if is_stale { PageState::Bad(DamageKind::Stale) } else { opened })
    }

    /// Opens and parses the bytes of page `g`, whatever its freshness.
    pub fn opened_page(&self, g: PageNo, bytes: &mut [u8; PAGE_LEN]) -> PageState {
        if bytes.iter().all(|&b| b == 0) {
            return PageState::Absent;
        }
        let aad = self.geo().page_aad(self.ctx.ring.suite(), g);
        let entry = match self.ctx.ring.open_page(&aad, bytes) {
            Err(OpenError::NoKey | OpenError::Truncated) => PageState::Bad(DamageKind::PageKey),
            Err(OpenError::Unauthentic) => PageState::Bad(DamageKind::PageSeal),
            Ok(_) => match Page::parse(bytes, self.geo(), g) {
                Ok(page) if self.ctx.domain.is_salted() && page.file_id.is_none() => {
                    PageState::Bad(DamageKind::PageFormat)
                }
                // No program writes a profile that the suite cannot keep.
                Ok(page) if page.profile.check(self.ctx.ring.suite()).is_err() => {
                    PageState::Bad(DamageKind::PageFormat)
                }
                Ok(page) => PageState::Good(Arc::new(Held::new(page, 0))),
                Err(_) => PageState::Bad(DamageKind::PageFormat),
            },
        };
        wipe(bytes); // the keys of blocks
        entry
    }

    /// Seals and writes page `g`, and keeps it as the one on disk. Its size, id, profile, session and sequence are set
    /// here, from `fields` and `id`. The caller changes the sizes in the state; the floor changes with page 0.
    pub fn write_page(
        &self,
        st: &mut State,
        g: PageNo,
        mut page: Page,
        lost: u128,
        fields: SizeFields,
        id: PageId,
    ) -> Result<(), StoreError> {
        let last = self.geo().last_page(fields.size);
        page.size = self.size_field(g, &page, fields);
        page.sparse = g == PageNo::ZERO && last > PageNo::ZERO && fields.sparse;
        set_profile(&mut page, g, &st.identity);
        let is_clean_single = g == PageNo::ZERO && last == PageNo::ZERO && !page.cut && page.pending == 0;
        let fits = is_clean_single && self.may_be_convergent(&st.identity) && id == PageId::AsFits;
        // I12: the session is durably open, and stays so while the stamp is held. A convergent page carries no session,
        // but is not written outside of one either.
        let stamp = self.ctx.sessions.stamp().map_err(StoreError::io("begin a session", 0u64))?;
        let convergent = if fits { self.convergent_page(&page)? } else { None };
        let bytes = match convergent {
            Some(bytes) => {
                page.clear_stamp();
                bytes
            }
            None => self.stamped_page(st, g, &mut page, &stamp)?,
        };
        let window = (page.session != 0).then_some(Window {
            session: page.session,
            tag: page.session_tag,
            covered: page.sequence,
        });
        let note = |fresh: &Fresh| fresh.note_write(&*self.backing, g, &bytes, window);
        let noted = self.fresh.as_ref().map(note).transpose()?;
        let offset = self.geo().page_offset(g);
        // I13: one aligned write of 4096 bytes.
        let written = self.backing.write_at(offset.0, &bytes[..]);
        if let (Some(fresh), Some(noted)) = (&self.fresh, noted) {
            match &written {
                Ok(()) => fresh.note_written(&noted),
                Err(_) => fresh.note_failed(noted, &bytes),
            }
        }
        if let Err(source) = written {
            st.pages.forget_absent(g);
            st.failures.note_page(g);
            if g == PageNo::ZERO {
                st.identity.note_failed_page_zero();
            }
            self.note_failed_write(st, offset, PAGE_LEN as u64);
            return Err(StoreError::Io { op: "write page", offset: offset.0, source });
        }
        drop(stamp);
        st.note_page_write(offset);
        self.keep_written_page(st, g, page, lost, last > PageNo::ZERO);
        Ok(())
    }

    /// Whether the clean page of a file of one page is convergent. The keys of random ones come from the file's id.
    pub fn may_be_convergent(&self, identity: &Identity) -> bool {
        let is_random = identity.profile().key() == KeyKind::Random;
        self.ctx.convergent_small_files && !is_random && !identity.is_changing()
    }

    /// Page 0 sealed as a convergent page, if it may be written: in an anchored vault only if the anchor knows it (A6).
    fn convergent_page(&self, page: &Page) -> Result<Option<SealedPage>, StoreError> {
        let Some(fresh) = &self.fresh else { return Ok(Some(self.seal_convergent(page))) };
        if !fresh.may_be_convergent() {
            return Ok(None);
        }
        let bytes = self.seal_convergent(page);
        let may_be = fresh.may_write_convergent(digest_of(PageNo::ZERO, &bytes), page.size)?;
        Ok(may_be.then_some(bytes))
    }

    /// Page 0 sealed as a convergent page, whether or not it may be written.
    pub fn seal_convergent(&self, page: &Page) -> SealedPage {
        let mut page = page.clone();
        page.clear_stamp();
        let mut bytes = page.build(self.geo(), PageNo::ZERO);
        let aad = self.geo().page_aad(self.ctx.ring.suite(), PageNo::ZERO);
        self.ctx.ring.outer().seal_page_convergent(&aad, &mut bytes);
        bytes
    }

    /// A page with the file's id and the stamp of this session, sealed under a random nonce. A1: in an anchored vault
    /// the anchor knows of it first.
    fn stamped_page(
        &self,
        st: &mut State,
        g: PageNo,
        page: &mut Page,
        stamp: &Stamp<'_>,
    ) -> Result<SealedPage, StoreError> {
        let shrinking = match g == PageNo::ZERO && page.cut {
            true => Shrinking::Recorded(self.geo().last_page(page.size).next()),
            false => Shrinking::Not,
        };
        self.open_in_anchor(st, stamp, [g], shrinking)?;
        page.file_id = st.identity.ensure_id()?;
        (page.session, page.session_tag, page.sequence) = (stamp.session(), stamp.tag(), stamp.next_sequence());
        let mut bytes = page.build(self.geo(), g);
        let aad = self.geo().page_aad(self.ctx.ring.suite(), g);
        self.ctx.ring.outer().seal_page(&aad, &mut bytes)?;
        Ok(bytes)
    }

    /// A1: what [`Fresh::open_pages`] does, under a stamp.
    fn open_in_anchor(
        &self,
        st: &mut State,
        stamp: &Stamp<'_>,
        pages: impl IntoIterator<Item = PageNo>,
        shrinking: Shrinking,
    ) -> Result<(), StoreError> {
        let Some(fresh) = &self.fresh else { return Ok(()) };
        if let Some(id) = fresh.file_id().filter(|_| st.identity.id().is_none()) {
            st.identity.found_id(id); // a file that is open keeps its id
        }
        let window = Window { session: stamp.session(), tag: stamp.tag(), covered: stamp.last_sequence() };
        fresh.open_pages(&*self.backing, pages, (st.identity.ensure_id()?, window), shrinking)
    }

    /// A1 for pages that are about to be written one after another, with one wait for the anchor. `cut`: a shrink is
    /// announced too, and page 0 is the next page that is written. Does nothing in an unanchored vault.
    pub fn open_pages(
        &self,
        st: &mut State,
        pages: impl IntoIterator<Item = PageNo>,
        cut: Option<PageNo>,
    ) -> Result<(), StoreError> {
        if self.fresh.is_none() {
            return Ok(());
        }
        let stamp = self.ctx.sessions.stamp().map_err(StoreError::io("begin a session", 0u64))?;
        self.open_in_anchor(st, &stamp, pages, cut.map_or(Shrinking::Not, Shrinking::Announced))
    }

    /// The size field of page `g`: a floor in page 0 of a longer file, otherwise the size as far as the page reaches.
    fn size_field(&self, g: PageNo, page: &Page, fields: SizeFields) -> u64 {
        let geo = self.geo();
        if !page.tail.is_empty() {
            // The tail's length follows from this field, even if a crash has left a tail in a page that is not the
            // last.
            let block = geo.first_block(g) + page.keys.len() as u64;
            return geo.block_start(block) + page.tail.len() as u64;
        }
        match g {
            PageNo::ZERO if geo.last_page(fields.size) > PageNo::ZERO && !page.cut => fields.floor,
            PageNo::ZERO => fields.size,
            _ => fields.size.min(geo.page_start(g.next())),
        }
    }

    /// Notes that a page was written, and keeps it.
    fn keep_written_page(&self, st: &mut State, g: PageNo, page: Page, lost: u128, has_more_pages: bool) {
        st.failures.note_page_written(g);
        if g == PageNo::ZERO {
            st.shrink.note_page_zero(page.cut);
            st.sizes.set_floor(if has_more_pages { page.size } else { 0 });
            st.identity.note_page_zero(&page, st.marks.written());
        }
        let before = st.pages.good(g);
        let data_mark = before.map(Held::data_mark).unwrap_or_default();
        if let Some(old) = before.map(Held::page) {
            let dropped = old.keys.any_keyed_from(page.keys.len());
            if dropped || ends_a_punch(old, &page) {
                st.marks.give_up_space(); // I8
            }
            if dropped {
                st.shrink.note_excess();
            }
        }
        let held = Held::written(page, lost, st.marks.written(), data_mark);
        held.note_used(self.tick());
        st.pages.put(g, PageState::Good(Arc::new(held)));
    }

    /// Notes a write that failed, but that the store may have done, completely or in part.
    pub fn note_failed_write(&self, st: &mut State, offset: ByteOffset, len: u64) {
        st.marks.advance();
        st.slack.clear();
        st.space.note_failed(offset, len, self.backing.stat().ok().map(|found| found.len));
    }

    /// Sets the length of the backing file. The caller keeps I8 for the space past the new end.
    pub fn set_backing_len(&self, st: &mut State, len: u64) -> Result<(), StoreError> {
        self.backing.set_len(len).map_err(StoreError::io("truncate", len))?;
        st.marks.advance();
        st.marks.note_shortened();
        st.slack.forget(ByteOffset(len)..ByteOffset(u64::MAX));
        st.space.note_cut(len);
        Ok(())
    }

    /// Makes a range of the backing file read as zeros, and frees it if the store can.
    pub fn punch(&self, st: &mut State, offset: ByteOffset, len: u64) -> Result<(), StoreError> {
        match self.backing.punch(offset.0, len) {
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                let zeros = vec![0u8; len as usize];
                self.backing.write_at(offset.0, &zeros).map_err(StoreError::io("write", offset))?;
            }
            other => other.map_err(StoreError::io("punch", offset))?,
        }
        st.marks.advance();
        Ok(())
    }

    /// Frees the zeros behind compressed blocks that a barrier has covered. It changes no content, so a crash before or
    /// after it makes no difference, and no mark counts it. A store that cannot punch is not asked again. After any
    /// other failure, such as a full store's, the rest waits for the next barrier.
    pub fn punch_slack(&self, st: &mut State) {
        let end = st.space.end();
        for range in st.slack.durable(st.marks.durable()) {
            let until = range.end.min(end);
            let done =
                if range.start < until { self.backing.punch(range.start.0, until - range.start) } else { Ok(()) };
            match done {
                Ok(()) => st.slack.forget(range),
                Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => return st.slack.give_up(),
                Err(_) => return,
            }
        }
    }

    /// Writes zeros if a barrier failed, since a range that reads as zeros may have other bytes on disk then.
    pub fn write_zeros(&self, st: &mut State, from: ByteOffset, until: ByteOffset) -> Result<(), StoreError> {
        self.backing.write_at(from.0, &vec![0; (until - from) as usize]).map_err(StoreError::io("write", from))?;
        st.note_block_write(from, until - from);
        Ok(())
    }
}

/// Gives a page that is about to be written the profile of its file. If it names blocks of another profile, it gets
/// `changing` (I14).
fn set_profile(page: &mut Page, g: PageNo, identity: &Identity) {
    if g == PageNo::ZERO {
        page.changing = identity.is_changing();
    } else if page.profile != identity.profile() {
        page.changing = true;
    }
    page.profile = identity.profile();
}

/// Whether a slot that was being punched no longer is: until that is durable, recovery expects zeros there.
fn ends_a_punch(old: &Page, new: &Page) -> bool {
    let punched = |page: &Page, i: usize| page.pending >> i & 1 == 1 && page.keys.is_hole(i);
    (0..old.keys.len().min(new.keys.len())).any(|i| punched(old, i) && !punched(new, i))
}
