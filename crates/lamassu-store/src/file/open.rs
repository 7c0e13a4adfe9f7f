//! Opening: finding the last page and the size (§9 *Size*), interrupted commits (§12).
//!
//! What an interruption leaves is believed of pages of interrupted sessions alone ([`super::session`]).

use super::session::Standing;
use super::state::{Core, Entry, Held, State};
use super::types::{DamageKind, Integrity, StoreError};
use lamassu_crypto::{Keyed, Salts, Verify};
use lamassu_format::{BlockKey, Keys, PAGE_LEN, Page};
use std::sync::Arc;

/// Segments without a page that are looked through for the last page, holes apart.
const ABSENT_MAX: u32 = 1 << 16;

/// The key slot of a hole.
pub(super) const HOLE: BlockKey = [0; 32];

impl Core {
    /// Reads page 0 and the last page, and decides what the size is. Damage is kept for the reads that meet it.
    pub fn open_state(&self) -> Result<State, StoreError> {
        let mut st = State { len: self.backing.stat().map_err(StoreError::io("stat", 0))?.len, ..State::default() };
        if st.len == 0 {
            st.unsealed_empty = true;
            return Ok(st);
        }
        let zero = self.read_page(0)?;
        let one_segment_page = self.geo().pages_per_segment() == 1 && st.len <= self.geo().segment_len();
        let last = match &zero {
            Entry::Good(held) if held.page.cut => 0,
            Entry::Good(_) if one_segment_page => 0,
            Entry::Absent if st.len <= PAGE_LEN as u64 => {
                st.unsealed_empty = true;
                return Ok(st);
            }
            _ => self.last_page_present(st.len)?,
        };
        self.decide_size(&mut st, &zero, last)?;
        match zero {
            Entry::Good(held) => drop(st.unresolved.insert(0, Arc::unwrap_or_clone(held).page)),
            Entry::Bad(kind) => drop(st.pages.insert(0, Entry::Bad(kind))),
            Entry::Absent => {}
        }
        (st.size, st.inherited_size) = (st.disk_size, st.disk_size);
        Ok(st)
    }

    fn decide_size(&self, st: &mut State, zero: &Entry, last: u64) -> Result<(), StoreError> {
        let geo = *self.geo();
        let span = geo.page_span();
        let mut present = 0; // size told by the last page
        if last > 0 {
            match self.read_page(last)? {
                Entry::Good(held) if geo.last_page(held.page.size) == last => {
                    st.file_id = held.page.file_id;
                    present = held.page.size;
                    st.unresolved.insert(last, Arc::unwrap_or_clone(held).page);
                }
                Entry::Good(_) => self.bad_last(st, last, DamageKind::PageFormat),
                Entry::Bad(kind) => self.bad_last(st, last, kind),
                Entry::Absent => {}
            }
            if present == 0 {
                present = self.size_by_length(st.len).clamp(last * span + 1, (last + 1) * span);
            }
        }
        match zero {
            Entry::Good(held) => {
                let page = &held.page;
                let same = page.file_id == st.file_id && page.file_id != [0; 16];
                if last > 0 && !same && !st.pages.contains_key(&last) {
                    self.bad_last(st, last, DamageKind::PageOfOtherFile);
                }
                st.file_id = page.file_id;
                (st.cut, st.cut_open, st.sparse) = (page.cut, page.cut, page.sparse);
                let told = if page.cut || last == 0 { page.size } else { present.max(page.size) };
                let reached = if page.cut {
                    page.size
                } else if last == 0 {
                    span.min(page.size)
                } else {
                    present
                };
                if told > reached {
                    st.lost_from = Some(reached);
                }
                st.disk_size = told;
                st.interrupted = last > 0 && self.is_interrupted(st, last);
                st.floor = match geo.last_page(told) {
                    0 => 0,
                    // A session that was closed has raised the floor: this page 0 is an older one, and the pages above its floor must be there all the same.
                    _ if last > 0 && !page.cut && !st.interrupted => told,
                    _ => page.size,
                };
                st.unknown_from = (!page.cut && st.pages.contains_key(&last)).then_some(page.size);
            }
            Entry::Bad(_) if last == 0 => st.disk_size = self.size_by_length(st.len).clamp(1, span),
            Entry::Absent if last == 0 => {
                st.disk_size = self.size_by_length(st.len).clamp(1, span);
                st.pages.insert(0, Entry::Bad(DamageKind::PageMissing));
            }
            // Page 0 would tell whether pages may be absent: without it none may, and what they held is not known to be zeros.
            Entry::Bad(_) => (st.disk_size, st.floor) = (present, present),
            Entry::Absent => {
                (st.disk_size, st.floor) = (present, present);
                st.pages.insert(0, Entry::Bad(DamageKind::PageMissing));
            }
        }
        if st.disk_size > geo.size_max() {
            // No honest writer makes one; offsets beyond would overflow.
            st.disk_size = self.size_by_length(st.len).max(1);
            st.lost_from = Some(0);
        }
        Ok(())
    }

    /// Whether the last page, just read, is of a session that was interrupted. A bad one may be.
    fn is_interrupted(&self, st: &State, last: u64) -> bool {
        st.unresolved.get(&last).is_none_or(|page| self.ctx.sessions.may_be_interrupted(page.session))
    }

    fn bad_last(&self, st: &mut State, last: u64, kind: DamageKind) {
        st.unresolved.remove(&last);
        st.pages.insert(last, Entry::Bad(kind));
    }

    /// A size to show when no page tells it: what the data blocks present amount to.
    fn size_by_length(&self, len: u64) -> u64 {
        let geo = self.geo();
        let (segment, within) = (len / geo.segment_len(), len % geo.segment_len());
        segment * geo.pages_per_segment() * geo.page_span() + within.saturating_sub(geo.block_size())
    }

    /// The highest page that is neither past the end nor all zeros; 0 if there is none above.
    ///
    /// # Errors
    /// A store that knows no holes, and shows a file whose last segments without a page are too many to be read: no writer leaves such a one.
    fn last_page_present(&self, len: u64) -> Result<u64, StoreError> {
        let geo = *self.geo();
        let pages = geo.pages_per_segment();
        let mut segment = (len - 1) / geo.segment_len();
        for _ in 0..ABSENT_MAX {
            let start = segment * geo.segment_len();
            let end = len.min(start + geo.block_size());
            if let Some(at) = self.last_nonzero_page(start, end)? {
                return Ok(segment * pages + (at - start) / PAGE_LEN as u64);
            }
            if segment == 0 {
                return Ok(0);
            }
            // A hole below, of whatever length a store makes up, is skipped in one search.
            segment = (segment - 1).min(self.last_data(start)? / geo.segment_len());
        }
        Err(self.damaged(DamageKind::PageMissing, segment * pages, None))
    }

    /// An offset at or behind which, within a segment, the last data of the first `len` bytes of the backing file lies: bisected, since SEEK_DATA goes forward.
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
            self.read_padded(at, &mut bytes)?;
            if bytes.iter().any(|&b| b != 0) {
                found = Some(at);
            }
            at += page_len;
        }
        Ok(found)
    }

    /// Loads page `g` of an open file: absent, good with its interrupted commit resolved, or bad.
    pub fn load_page(&self, st: &mut State, g: u64) -> Result<Entry, StoreError> {
        let entry = match st.unresolved.remove(&g) {
            Some(page) => Entry::Good(Arc::new(Held::new(page, 0))),
            None if g == 0 && st.unsealed_empty => Entry::Absent,
            None => self.read_page(g)?,
        };
        if let Entry::Good(held) = &entry
            && st.file_id == [0; 16]
            && matches!(st.pages.get(&0), Some(Entry::Bad(_)))
        {
            st.file_id = held.page.file_id; // page 0 and the last one were unreadable
        }
        match self.place_page(st, g, entry) {
            Entry::Good(held) => {
                self.note_session(st, g, held.page.session);
                match held.page.pending {
                    0 => Ok(Entry::Good(held)),
                    _ => self.resolve(st, g, Arc::unwrap_or_clone(held).page),
                }
            }
            Entry::Absent => {
                if self.is_unwritten(st, g) {
                    self.note_undone(st, self.damage(DamageKind::Unwritten, g, None));
                }
                Ok(Entry::Absent)
            }
            Entry::Bad(kind) => Ok(Entry::Bad(kind)),
        }
    }

    /// Whether an absent page is one that an interrupted session may have written: it lies below the size that this session told, and above what was known
    /// durable before.
    pub fn is_unwritten(&self, st: &State, g: u64) -> bool {
        let start = g * self.geo().page_span();
        st.interrupted && g > 0 && start >= st.floor && start < st.inherited_size.min(st.disk_size) && !st.sparse
    }

    /// That a file has pages of a session that the record does not know is told once: the record is older than the page.
    fn note_session(&self, st: &mut State, g: u64, session: u32) {
        let is_told = st.undone.iter().any(|d| d.kind == DamageKind::UnknownSession);
        if !is_told && self.ctx.sessions.standing(session) == Standing::Unknown {
            self.note_undone(st, self.damage(DamageKind::UnknownSession, g, None));
        }
    }

    /// The same where nothing has to change; `None` where it would have to.
    pub fn load_clean_page(&self, st: &State, g: u64) -> Result<Option<Entry>, StoreError> {
        if g == 0 || st.file_id == [0; 16] || st.unresolved.contains_key(&g) {
            return Ok(None);
        }
        match self.place_page(st, g, self.read_page(g)?) {
            Entry::Good(held) if held.page.pending != 0 => Ok(None),
            // What has to be told is told by who holds the lock alone.
            Entry::Good(held) if self.ctx.sessions.standing(held.page.session) == Standing::Unknown => Ok(None),
            Entry::Absent if self.is_unwritten(st, g) => Ok(None),
            entry => Ok(Some(entry)),
        }
    }

    /// What a page read from disk is at its place in the file: slots past the size dropped, pages of other files refused.
    fn place_page(&self, st: &State, g: u64, entry: Entry) -> Entry {
        let geo = *self.geo();
        match entry {
            Entry::Bad(kind) => Entry::Bad(kind),
            Entry::Absent => self.absent_page(st, g),
            // A file of several pages has an id; zero belongs to a convergent page, which is alone.
            Entry::Good(held) if g > 0 && (held.page.file_id != st.file_id || st.file_id == [0; 16]) => {
                Entry::Bad(DamageKind::PageOfOtherFile)
            }
            Entry::Good(mut held) => {
                let blocks = geo.blocks(st.disk_size).saturating_sub(geo.first_block(g));
                let page = &mut Arc::make_mut(&mut held).page;
                clip(page, blocks.min(geo.blocks_per_page()) as usize, st.disk_size, &geo, g);
                if page.pending != 0 && !self.is_believed(st, g, page) && self.ctx.integrity == Integrity::Full {
                    keep_bits(page, 0);
                }
                Entry::Good(held)
            }
        }
    }

    /// Whether the data of pending blocks may be missing: their session was interrupted, or the page was written here by a write that failed. Otherwise all of it
    /// has arrived long ago, and the page as the session left it is another. Its keys then hold for its blocks, without a choice; where blocks are not hashed on
    /// each read, they are hashed once all the same.
    fn is_believed(&self, st: &State, g: u64, page: &Page) -> bool {
        st.unsure_pages.contains(&g) || self.ctx.sessions.may_be_interrupted(page.session)
    }

    fn absent_page(&self, st: &State, g: u64) -> Entry {
        let start = g * self.geo().page_span();
        match st.lost_from {
            Some(from) if (g + 1) * self.geo().page_span() > from && start < st.disk_size => {
                return Entry::Bad(DamageKind::Truncated);
            }
            _ => {}
        }
        if g > 0 && start < st.disk_size && st.unknown_from.is_some_and(|from| start + self.geo().page_span() > from) {
            return Entry::Bad(DamageKind::PageMissing);
        }
        match g > 0 && start < st.floor && !st.sparse {
            true => Entry::Bad(DamageKind::PageMissing),
            false => Entry::Absent,
        }
    }

    /// Resolves the pending slots of a page found on disk (§12); a writer makes the result durable and writes it.
    fn resolve(&self, st: &mut State, g: u64, mut page: Page) -> Result<Entry, StoreError> {
        let (mut lost, mut found) = (0u128, 0u128);
        let believed = self.is_believed(st, g, &page);
        for i in (0..page.keys.len()).filter(|i| page.pending >> i & 1 == 1) {
            match self.resolve_block(g, i, &page, believed)? {
                Some(key) => {
                    if key != page.keys[i] {
                        let kind = if key == HOLE { DamageKind::Unwritten } else { DamageKind::Reverted };
                        self.note_undone(st, self.damage(kind, g, Some(self.geo().first_block(g) + i as u64)));
                    }
                    page.keys[i] = key;
                    found |= 1 << i;
                    st.recovered += 1;
                }
                None => lost |= 1 << i,
            }
        }
        keep_bits(&mut page, lost);
        // What a truncated file still tells must not be overwritten.
        if self.ctx.read_only || st.lost_from.is_some() {
            return Ok(Entry::Good(Arc::new(Held::new(page, lost))));
        }
        self.keeping_mtime(st, |core, st| {
            if !st.inherited_covered || st.zeros_unsure {
                if st.zeros_unsure {
                    // The kernel takes what it once failed to write for clean, and shows it all the same: so it is written again.
                    core.write_found_again(st, g, &page, found)?;
                }
                core.barrier(st)?;
                st.inherited_covered = true;
            }
            core.write_page(st, g, page, lost)?;
            // Until that is durable the candidates rule, and new data is none of them.
            st.drop_mark = st.seq;
            Ok(())
        })?;
        st.pages.remove(&g).ok_or(StoreError::ReadOnly)
    }

    /// Writes the blocks that recovery has found to where they are.
    fn write_found_again(&self, st: &mut State, g: u64, page: &Page, found: u128) -> Result<(), StoreError> {
        let keyed = |i: &usize| found >> i & 1 == 1 && page.keys[*i] != HOLE;
        for i in (0..page.keys.len()).filter(keyed) {
            let offset = self.geo().block_offset(self.geo().first_block(g) + i as u64);
            let mut bytes = vec![0u8; self.ctx.block_len()];
            self.read_padded(offset, &mut bytes)?;
            self.backing.write_at(offset, &bytes).map_err(StoreError::io("write", offset))?;
            st.wrote(offset, bytes.len() as u64);
        }
        Ok(())
    }

    /// The key a pending block's bytes verify under; the hole key for a hole; `None` if it is lost. Where that is not `believed` ([`Core::is_believed`]),
    /// only the new key counts.
    pub fn resolve_block(&self, g: u64, i: usize, page: &Page, believed: bool) -> Result<Option<BlockKey>, StoreError> {
        let block = self.geo().first_block(g) + i as u64;
        let mut bytes = vec![0u8; self.ctx.block_len()];
        self.read_padded(self.geo().block_offset(block), &mut bytes)?;
        let is_zero = bytes.iter().all(|&b| b == 0);
        let before = || page.previous_key(i).unwrap_or(HOLE);
        for key in std::iter::once(page.keys[i]).chain(believed.then(before)) {
            if key == HOLE {
                if is_zero {
                    return Ok(Some(HOLE));
                }
            } else if self.block_matches(&bytes, &key, self.salts(page.file_id, block)) {
                return Ok(Some(key));
            }
        }
        Ok(None)
    }

    /// Whether ciphertext verifies under `key`.
    pub fn block_matches(&self, ciphertext: &[u8], key: &BlockKey, salts: Salts<'_>) -> bool {
        let mut copy = ciphertext.to_vec();
        let failed = self.ctx.engine.open(
            &self.ctx.ring,
            &mut copy,
            self.ctx.block_len(),
            Keyed { keys: std::slice::from_ref(key), salts },
            Verify::Full,
        );
        failed.is_empty()
    }
}

/// Keeps the pending bits in `keep`, and the previous keys of those among them that have one.
pub(super) fn keep_bits(page: &mut Page, keep: u128) {
    let mut previous = Keys::default();
    for i in (0..page.keys.len()).filter(|i| keep >> i & 1 == 1) {
        if let Some(key) = page.previous_key(i) {
            previous.push(key);
        }
    }
    page.pending &= keep;
    page.replaced &= keep;
    page.previous = previous;
}

/// Drops what lies past the size: key slots, their bits, the tail or its end.
pub(super) fn clip(page: &mut Page, blocks: usize, size: u64, geo: &lamassu_format::Geometry, g: u64) {
    let used = page.keys.len();
    if !page.tail.is_empty() {
        let start = (geo.first_block(g) + used as u64) * geo.block_size();
        let left = size.saturating_sub(start).min(page.tail.len() as u64);
        page.tail.truncate(left as usize);
    }
    if used > blocks {
        let keep = (1u128 << blocks) - 1;
        keep_bits(page, page.pending & keep);
        page.keys.truncate(blocks);
    }
}
