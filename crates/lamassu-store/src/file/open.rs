//! Opening: finding the last page and the size (`docs/format.md` §9 *Size*). Reads alone; pages that an interrupted
//! commit has left are resolved when they are first asked for ([`super::recover`]).

use super::primitives::Core;
use super::session::Standing;
use super::state::{Held, Inherited, PageState, Shrink, Sizes, Space, State};
use super::types::{DamageKind, StoreError};
use lamassu_format::{ByteOffset, PAGE_LEN, Page, PageNo};
use std::sync::Arc;

/// How many segments without a page are searched for the last page, besides holes.
const ABSENT_MAX: u32 = 1 << 16;

/// How many pages are tried to find one that was written after a shrink.
const CUT_TRIES_MAX: u32 = 16;

/// The size by the pages.
#[derive(Default)]
struct Found {
    stored: u64,
    floor: u64,
    lost_from: Option<u64>,
    unknown_from: Option<u64>,
    interrupted: bool,
}

impl Core {
    /// Reads page 0 and the last page, and decides the size. Damage is kept for the reads that touch it.
    pub fn open_state(&self, len: u64) -> Result<State, StoreError> {
        let mut st = State { space: Space::new(len), ..State::default() };
        if let Some(fresh) = &self.fresh {
            self.open_anchored(fresh, &mut st)?;
            return Ok(st);
        }
        if len == 0 {
            st.identity.found_unsealed();
            return Ok(st);
        }
        let zero = match self.read_page(PageNo::ZERO)? {
            PageState::Good(held) if held.page().cut && self.is_cut_stale(held.page(), len)? => {
                PageState::Bad(DamageKind::PageStale)
            }
            zero => zero,
        };
        let one_segment_page = self.geo().pages_per_segment() == 1 && len <= self.geo().segment_len();
        let last = match &zero {
            PageState::Good(held) if held.page().cut => PageNo::ZERO,
            PageState::Good(_) if one_segment_page => PageNo::ZERO,
            PageState::Absent if len <= PAGE_LEN as u64 => {
                st.identity.found_unsealed();
                return Ok(st);
            }
            _ => self.last_page_present(len)?,
        };
        let present = self.size_in_last_page(&mut st, last)?;
        let zero = match zero {
            // A closed session has completed page 0, so this page 0 is an older one.
            PageState::Good(held)
                if last > PageNo::ZERO
                    && !self.is_interrupted(&st, last)
                    && self.lacks_blocks(held.page(), PageNo::ZERO, u64::MAX) =>
            {
                PageState::Bad(DamageKind::PageStale)
            }
            zero => zero,
        };
        let found = self.decide_size(&mut st, zero.good().map(Held::page), last, present);
        let (cut, sparse) = zero.good().map_or((false, false), |held| (held.page().cut, held.page().sparse));
        let written_by = zero.good().map(|held| held.page().session);
        st.sizes = Sizes::opened(found.stored, found.floor, sparse);
        st.shrink = Shrink::opened(cut);
        st.inherited = Inherited::opened(found.stored, found.interrupted, found.lost_from, found.unknown_from);
        match zero {
            PageState::Good(held) => st.pages.put_unresolved(PageNo::ZERO, Arc::unwrap_or_clone(held).into_page()),
            PageState::Bad(kind) => st.pages.put(PageNo::ZERO, PageState::Bad(kind)),
            PageState::Absent => st.pages.put(PageNo::ZERO, PageState::Bad(DamageKind::PageMissing)),
        }
        if st.shrink.is_cut() {
            self.note_shortened(&mut st, written_by);
        }
        Ok(st)
    }

    /// Reports an interrupted shrink; `written_by`: the session of page 0. Not reported if this process left it itself,
    /// in a file without a name that it closed and opens again.
    pub fn note_shortened(&self, st: &mut State, written_by: Option<u32>) {
        if written_by.is_none() || written_by != self.ctx.sessions.under_way() {
            let last = st.last_page(self.geo());
            self.note_undone(st, self.damage(DamageKind::Shortened, last, None));
        }
    }

    /// Whether a page past the end that page 0 records with `cut` was written after it: then the shrink was completed
    /// before, and page 0 is an older one. The store can remove or damage such pages. Then their content is lost, and
    /// the shrink is reported.
    fn is_cut_stale(&self, zero: &Page, len: u64) -> Result<bool, StoreError> {
        let last = self.geo().last_page(zero.size.min(self.geo().size_max()));
        let mut until = len;
        for _ in 0..CUT_TRIES_MAX {
            let g = match self.last_page_present(until) {
                Ok(g) if g > last => g,
                Ok(_) | Err(StoreError::Damaged(_)) => return Ok(false),
                Err(error) => return Err(error),
            };
            if let PageState::Good(held) = self.read_page(g)?
                && held.page().file_id == zero.file_id
                && self.ctx.sessions.standing(held.page().session) != Standing::Unknown
            {
                return Ok((held.page().session, held.page().sequence) > (zero.session, zero.sequence));
            }
            until = self.geo().page_offset(g).0;
        }
        Ok(false)
    }

    /// The size by page 0, if it is good, and by a last page that records the size `present`.
    fn decide_size(&self, st: &mut State, zero: Option<&Page>, last: PageNo, present: u64) -> Found {
        let by_length = self.size_by_length(st.space.len());
        let found = match zero {
            Some(page) => self.found_by_page_zero(st, page, last, present),
            None if last == PageNo::ZERO => {
                Found { stored: by_length.clamp(1, self.geo().page_span()), ..Found::default() }
            }
            // Only page 0 says whether pages may be absent. Without it none may, and absent pages are not known to be
            // zeros.
            None => Found { stored: present, floor: present, ..Found::default() },
        };
        match found.stored > self.geo().size_max() {
            // No honest writer makes such a size: offsets beyond it would overflow.
            true => Found { stored: by_length.max(1), lost_from: Some(0), ..found },
            false => found,
        }
    }

    /// The size that page `last` records; 0 for page 0, which is handled elsewhere. If the page is bad, the size is
    /// estimated from the length. Keeps the page, or its damage, and the file's id.
    fn size_in_last_page(&self, st: &mut State, last: PageNo) -> Result<u64, StoreError> {
        if last == PageNo::ZERO {
            return Ok(0);
        }
        let geo = *self.geo();
        match self.read_page(last)? {
            PageState::Good(held) if geo.last_page(held.page().size) == last => {
                let page = Arc::unwrap_or_clone(held).into_page();
                let size = page.size;
                st.identity.found_page(&page);
                st.pages.put_unresolved(last, page);
                return Ok(size);
            }
            PageState::Good(_) => st.pages.put(last, PageState::Bad(DamageKind::PageFormat)),
            PageState::Bad(kind) => st.pages.put(last, PageState::Bad(kind)),
            PageState::Absent => {}
        }
        let (start, end) = (geo.page_start(last), geo.page_start(last.next()));
        Ok(self.size_by_length(st.space.len()).clamp(start + 1, end))
    }

    /// The size by a good page 0, given a last page that records the size `present`.
    fn found_by_page_zero(&self, st: &mut State, page: &Page, last: PageNo, present: u64) -> Found {
        let geo = *self.geo();
        let is_same_file = page.file_id == st.identity.id() && !page.file_id.is_none();
        st.identity.found_page_zero(page);
        if last > PageNo::ZERO && !st.pages.contains(last) {
            let is_of_profile = st.pages.unresolved(last).is_none_or(|page| st.identity.allows(page));
            let kind = match (is_same_file, is_of_profile) {
                (false, _) => Some(DamageKind::PageOfOtherFile),
                (true, false) => Some(DamageKind::PageStale),
                (true, true) => None,
            };
            if let Some(kind) = kind {
                st.pages.take_unresolved(last);
                st.pages.put(last, PageState::Bad(kind));
            }
        }
        let recorded = if page.cut || last == PageNo::ZERO { page.size } else { present.max(page.size) };
        let reached = if page.cut {
            page.size
        } else if last == PageNo::ZERO {
            geo.page_span().min(page.size)
        } else {
            present
        };
        let interrupted = last > PageNo::ZERO && self.is_interrupted(st, last);
        let floor = match geo.last_page(recorded) {
            PageNo::ZERO => 0,
            // A closed session has raised the floor. So this page 0 is an older one, and the pages above its floor must
            // exist nevertheless.
            _ if last > PageNo::ZERO && !page.cut && !interrupted => recorded,
            // Before it wrote a page past the last one, the interrupted session wrote page 0 (I4). So this page 0, of a
            // session that is not open, is an older one.
            _ if st.pages.unresolved(last).is_some() && !self.ctx.sessions.may_be_interrupted(page.session) => {
                page.size.max(geo.page_start(last))
            }
            _ => page.size,
        };
        Found {
            stored: recorded,
            floor,
            lost_from: (recorded > reached).then_some(reached),
            unknown_from: (!page.cut && st.pages.contains(last)).then_some(page.size),
            interrupted,
        }
    }

    /// Whether the last page, just read, is of a session that was interrupted. A bad one may be.
    fn is_interrupted(&self, st: &State, last: PageNo) -> bool {
        st.pages.unresolved(last).is_none_or(|page| self.ctx.sessions.may_be_interrupted(page.session))
    }

    /// A size to show if no page records it: that of the data blocks present.
    fn size_by_length(&self, len: u64) -> u64 {
        let geo = self.geo();
        let (segment, within) = (len / geo.segment_len(), len % geo.segment_len());
        segment * geo.pages_per_segment() * geo.page_span() + within.saturating_sub(geo.block_size())
    }

    /// The highest page that is neither past the end nor all zeros; 0 if there is none above.
    ///
    /// # Errors
    /// The store has no holes, and the file ends with too many segments without a page to be read. No writer leaves
    /// such a file.
    fn last_page_present(&self, len: u64) -> Result<PageNo, StoreError> {
        let geo = *self.geo();
        let pages = geo.pages_per_segment();
        let mut segment = (len - 1) / geo.segment_len();
        for _ in 0..ABSENT_MAX {
            let start = segment * geo.segment_len();
            let end = len.min(start + geo.block_size());
            if let Some(at) = self.last_nonzero_page(start, end)? {
                return Ok(PageNo(segment * pages + (at - start) / PAGE_LEN as u64));
            }
            if segment == 0 {
                return Ok(PageNo::ZERO);
            }
            // A hole below, of whatever length a store makes up, is skipped in one search.
            segment = (segment - 1).min(self.last_data(start)? / geo.segment_len());
        }
        Err(self.damaged(DamageKind::PageMissing, PageNo(segment * pages), None))
    }

    /// An offset at most a segment past the last data in the first `len` bytes of the backing file. Bisected, since
    /// SEEK_DATA goes forward.
    fn last_data(&self, len: u64) -> Result<u64, StoreError> {
        let (mut low, mut high) = (0, len);
        while high - low > self.geo().segment_len() {
            let middle = low + (high - low) / 2;
            match self.backing.seek_data(middle).map_err(StoreError::io("seek data", middle))? {
                Some(data) if data < len => low = data.max(middle).min(high),
                _ => high = middle,
            }
        }
        Ok(high)
    }

    /// Offset of the last page in `start..end` that is not all zeros, holes skipped.
    fn last_nonzero_page(&self, start: u64, end: u64) -> Result<Option<u64>, StoreError> {
        let page_len = PAGE_LEN as u64;
        let (mut at, mut found) = (start, None);
        let mut bytes = [0u8; PAGE_LEN];
        while at < end {
            match self.backing.seek_data(at).map_err(StoreError::io("seek data", at))? {
                Some(data) if data < end => at = data / page_len * page_len,
                _ => break,
            }
            self.read_padded(ByteOffset(at), &mut bytes)?;
            if bytes.iter().any(|&b| b != 0) {
                found = Some(at);
            }
            at += page_len;
        }
        Ok(found)
    }
}
