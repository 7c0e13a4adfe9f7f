//! Loading pages, and resolving what an interrupted commit left in them (`docs/format.md` §12).
//!
//! What an interruption leaves is accepted only in pages of interrupted sessions ([`super::session`]).
//!
//! Recovery is lazy: the first load of a page with pending bits resolves it. It keeps I10: the content that it finds is
//! made durable before anything new is written under the page. It keeps I11: a page whose write failed in this process
//! is resolved in the same way. And the data that it finds are written again: a barrier of an earlier process may have
//! failed, and then a barrier that succeeds now says nothing about them.

use super::form::Numbers;
use super::primitives::{Core, PageId};
use super::session::Standing;
use super::state::{Held, PageState, State};
use super::types::{DamageKind, FirstPage, StoreError};
use lamassu_crypto::Verify;
use lamassu_crypto::compress::stored_len;
use lamassu_format::{BlockNo, ByteOffset, Keys, PAGE_LEN, Page, PageNo, SlotKey};
use std::collections::BTreeSet;
use std::sync::Arc;

impl Core {
    /// Makes sure page `g` is in memory (a void one past the size is not kept) and returns it.
    pub fn page<'a>(&self, st: &'a mut State, g: PageNo) -> Result<&'a PageState, StoreError> {
        if !st.pages.contains(g) {
            if !st.is_within(self.geo(), g) {
                return Ok(&PageState::Absent);
            }
            let entry = self.load_page(st, g)?;
            st.evict(self.geo());
            st.pages.put(g, entry);
        }
        let entry = st.pages.get(g).expect("just looked for or put there");
        self.touch(entry);
        Ok(entry)
    }

    /// The page if it is good, `None` if absent; a bad one is an error.
    pub fn good_page<'a>(&self, st: &'a mut State, g: PageNo) -> Result<Option<&'a Held>, StoreError> {
        match self.page(st, g)? {
            PageState::Absent => Ok(None),
            PageState::Good(held) => Ok(Some(held)),
            PageState::Bad(kind) => Err(self.damaged(*kind, g, None)),
        }
    }

    /// See [`super::File::first_page`]. Pages before it are holes.
    pub fn first_page(&self, st: &mut State) -> Result<FirstPage, StoreError> {
        let Some(data) = self.backing.seek_data(0).map_err(StoreError::io("seek data", 0u64))? else {
            return Ok(FirstPage::Absent);
        };
        let pages = self.geo().pages_per_segment();
        let first = PageNo(data / self.geo().segment_len() * pages);
        for page in first.until(PageNo(first.0 + pages)) {
            match self.page_as_shown(st, page)? {
                PageState::Absent => {}
                PageState::Good(_) => return Ok(FirstPage::Verified),
                PageState::Bad(kind) => return Ok(FirstPage::Unverified(self.told(kind, page, None))),
            }
        }
        Ok(FirstPage::Unverified(self.damage(DamageKind::PageMissing, first, None)))
    }

    /// A page without its interrupted commit being resolved, which reads blocks: as it is known, or the store shows it.
    fn page_as_shown(&self, st: &mut State, g: PageNo) -> Result<PageState, StoreError> {
        if let Some(known) = st.pages.get(g) {
            return Ok(known.clone());
        }
        if !st.is_within(self.geo(), g) {
            return Ok(PageState::Absent);
        }
        let was_unresolved = st.pages.unresolved(g).is_some();
        let entry = self.unresolved_page(st, g)?;
        if let Some(held) = entry.good().filter(|_| was_unresolved) {
            st.pages.put_unresolved(g, held.page().clone());
        }
        Ok(entry)
    }

    /// Takes over the pages that readers have loaded. The first step of every caller that gets the state alone.
    pub fn take_shared(&self, st: &mut State) {
        if st.pages.take_shared() {
            st.evict(self.geo());
        }
    }

    /// Page `g` of an open file as the store shows it, in its place, with what an interrupted commit has left.
    fn unresolved_page(&self, st: &mut State, g: PageNo) -> Result<PageState, StoreError> {
        let entry = match st.pages.take_unresolved(g) {
            Some(page) => PageState::Good(Arc::new(Held::new(page, 0))),
            None if g == PageNo::ZERO && st.identity.is_unsealed_empty() => PageState::Absent,
            None => self.read_page(g)?,
        };
        if let Some(held) = entry.good()
            && st.identity.id().is_none()
            && st.pages.is_bad(PageNo::ZERO)
        {
            st.identity.found_page(held.page()); // page 0 and the last one were unreadable
        }
        Ok(self.place_page(st, g, entry))
    }

    /// Loads page `g` of an open file: absent, good with its interrupted commit resolved, or bad.
    pub fn load_page(&self, st: &mut State, g: PageNo) -> Result<PageState, StoreError> {
        match self.unresolved_page(st, g)? {
            PageState::Good(held) => {
                self.note_session(st, g, held.page().session);
                if let Some(block) = self.unwritten_from(st, g, held.page()) {
                    self.note_undone(st, self.damage(DamageKind::Unwritten, g, Some(block)));
                }
                match held.page().pending {
                    0 => {
                        self.note_resolved(g);
                        Ok(PageState::Good(held))
                    }
                    _ => self.resolve(st, g, Arc::unwrap_or_clone(held).into_page()),
                }
            }
            PageState::Absent => {
                if self.is_unwritten(st, g) {
                    self.note_undone(st, self.damage(DamageKind::Unwritten, g, None));
                }
                Ok(PageState::Absent)
            }
            PageState::Bad(kind) => Ok(PageState::Bad(kind)),
        }
    }

    /// Whether an absent page is one that an interrupted session may have written: it lies below the size that this
    /// session recorded, and above what was known durable before.
    pub fn is_unwritten(&self, st: &State, g: PageNo) -> bool {
        let start = self.geo().page_start(g);
        let (from, until) = (st.sizes.floor(), st.inherited.size().min(st.sizes.stored()));
        st.inherited.is_interrupted() && g > PageNo::ZERO && (from..until).contains(&start) && !st.sizes.is_sparse()
    }

    /// Whether a page has fewer blocks than belong to it in a file of `size`: it was written when the file ended in it.
    pub fn lacks_blocks(&self, page: &Page, g: PageNo, size: u64) -> bool {
        let geo = self.geo();
        let blocks = geo.end_block(size).0.saturating_sub(geo.first_block(g).0).min(geo.blocks_per_page());
        blocks_in(page) < blocks
    }

    /// Whether other pages follow page `g`.
    fn is_followed(&self, st: &State, g: PageNo) -> bool {
        !st.inherited.is_truncated() && g < st.last_page(self.geo())
    }

    /// Up to which size page `g` must have its blocks. Beyond the size that was known durable, an interrupted session
    /// may have left the page unwritten.
    fn told_size(&self, st: &State, g: PageNo) -> u64 {
        let floor = st.sizes.floor();
        let is_open = st.inherited.is_interrupted() && floor < st.inherited.size();
        if is_open || st.failures.uncertain_pages().contains(&g) { floor } else { st.sizes.stored() }
    }

    /// From which block on a page has the state before an interrupted session made the file longer.
    fn unwritten_from(&self, st: &State, g: PageNo, page: &Page) -> Option<BlockNo> {
        let may_be_short = st.inherited.is_interrupted() && self.is_followed(st, g);
        let is_short = may_be_short && self.lacks_blocks(page, g, st.inherited.size().min(st.sizes.stored()));
        is_short.then(|| self.geo().first_block(g) + blocks_in(page))
    }

    /// Reports once that a file has pages of a session that the record does not know: the record is older than the
    /// page.
    fn note_session(&self, st: &mut State, g: PageNo, session: u32) {
        let is_reported = st.inherited.undone().iter().any(|d| d.kind == DamageKind::UnknownSession);
        if !is_reported && self.ctx.sessions.standing(session) == Standing::Unknown {
            self.note_undone(st, self.damage(DamageKind::UnknownSession, g, None));
        }
    }

    /// Loads a page without changing the state; `None` if the state would have to change.
    pub fn load_clean_page(&self, st: &State, g: PageNo) -> Result<Option<PageState>, StoreError> {
        if g == PageNo::ZERO || st.identity.id().is_none() || st.pages.unresolved(g).is_some() {
            return Ok(None);
        }
        match self.place_page(st, g, self.read_page(g)?) {
            PageState::Good(held) if held.page().pending != 0 => Ok(None),
            // Reports are made with the state held alone.
            PageState::Good(held) if self.ctx.sessions.standing(held.page().session) == Standing::Unknown => Ok(None),
            PageState::Good(held) if self.unwritten_from(st, g, held.page()).is_some() => Ok(None),
            PageState::Absent if self.is_unwritten(st, g) => Ok(None),
            entry => Ok(Some(entry)),
        }
    }

    /// A page that was read, in its place in the file: slots past the size are dropped, pages of other files refused.
    fn place_page(&self, st: &State, g: PageNo, entry: PageState) -> PageState {
        let geo = *self.geo();
        let id = st.identity.id();
        match entry {
            PageState::Bad(kind) => PageState::Bad(kind),
            PageState::Absent => self.absent_page(st, g),
            // A file of several pages has an id; zero belongs to a convergent page, which is alone.
            PageState::Good(held) if g > PageNo::ZERO && (held.page().file_id != id || id.is_none()) => {
                PageState::Bad(DamageKind::PageOfOtherFile)
            }
            PageState::Good(held) if g > PageNo::ZERO && !st.identity.allows(held.page()) => {
                PageState::Bad(DamageKind::PageStale)
            }
            PageState::Good(held)
                if self.fresh.is_none()
                    && self.is_followed(st, g)
                    && self.lacks_blocks(held.page(), g, self.told_size(st, g)) =>
            {
                PageState::Bad(DamageKind::PageStale)
            }
            PageState::Good(mut held) => {
                let size = st.sizes.stored();
                let blocks = geo.end_block(size).0.saturating_sub(geo.first_block(g).0);
                let page = Arc::make_mut(&mut held).page_mut();
                clip(page, blocks.min(geo.blocks_per_page()) as usize, size, &geo, g);
                if page.pending != 0 && !self.is_believed(st, g, page) && self.verify(&st.identity) == Verify::Full {
                    keep_bits(page, 0);
                }
                PageState::Good(held)
            }
        }
    }

    /// Whether the data of pending blocks may be missing: their session was interrupted, or the page was written here
    /// by a write that failed. Otherwise all of it arrived long ago, and the session left a later page than this. Then
    /// the keys of this page hold for its blocks, without a choice. If blocks are not hashed on each read, these are
    /// hashed once nevertheless.
    fn is_believed(&self, st: &State, g: PageNo, page: &Page) -> bool {
        let is_interrupted = || match &self.fresh {
            Some(fresh) => fresh.is_in_flight(g),
            None => self.ctx.sessions.may_be_interrupted(page.session),
        };
        st.failures.uncertain_pages().contains(&g) || is_interrupted()
    }

    /// The pending bits of a page were looked at: there were none.
    fn note_resolved(&self, g: PageNo) {
        if let Some(fresh) = &self.fresh {
            fresh.note_resolved(g);
        }
    }

    fn absent_page(&self, st: &State, g: PageNo) -> PageState {
        if self.fresh.is_some() {
            return PageState::Absent; // it was judged
        }
        let (start, end) = (self.geo().page_start(g), self.geo().page_start(g.next()));
        let is_inside = start < st.sizes.stored();
        if is_inside && st.inherited.lost_from().is_some_and(|from| end > from) {
            return PageState::Bad(DamageKind::Truncated);
        }
        if g > PageNo::ZERO && is_inside && st.inherited.unknown_from().is_some_and(|from| end > from) {
            return PageState::Bad(DamageKind::PageMissing);
        }
        match g > PageNo::ZERO && start < st.sizes.floor() && !st.sizes.is_sparse() {
            true => PageState::Bad(DamageKind::PageMissing),
            false => PageState::Absent,
        }
    }

    /// Resolves the pending slots of a page found on disk (§12); a writer makes the result durable and writes it.
    fn resolve(&self, st: &mut State, g: PageNo, mut page: Page) -> Result<PageState, StoreError> {
        let (mut lost, mut found) = (0u128, 0u128);
        let believed = self.is_believed(st, g, &page);
        for i in (0..page.keys.len()).filter(|i| page.pending >> i & 1 == 1) {
            match self.resolve_block(g, i, &page, believed)? {
                Some(Resolved { key, is_new, opened }) => {
                    let is_equal =
                        |opened: Vec<u8>| self.seals_to_key(&opened, i, &page, self.geo().first_block(g) + i as u64);
                    if !is_new && !opened.is_some_and(is_equal) {
                        let kind = if key.is_hole() { DamageKind::Unwritten } else { DamageKind::Reverted };
                        self.note_undone(st, self.damage(kind, g, Some(self.geo().first_block(g) + i as u64)));
                    }
                    page.keys.set(i, &key);
                    found |= 1 << i;
                    st.inherited.note_recovered();
                }
                None => lost |= 1 << i,
            }
        }
        let replaced = page.replaced;
        keep_bits(&mut page, lost);
        // The rest of a file whose end the store has lost must not be overwritten.
        if self.ctx.read_only || st.inherited.is_truncated() {
            return Ok(PageState::Good(Arc::new(Held::new(page, lost))));
        }
        self.keeping_mtime(st, |core, st| {
            // I10: the content that was found must be durable before a page that relies on it alone is written (I1).
            if !st.inherited.is_written_again() || st.failures.any_barrier_lost() {
                let has_written = core.write_found_again(st, g, &page, found, replaced)?;
                if has_written || !st.inherited.is_durable() || st.failures.any_barrier_lost() {
                    core.barrier(st)?;
                    st.inherited.note_durable();
                }
            }
            core.write_page(st, g, page, lost, st.sizes.fields(), PageId::AsFits)?;
            // I10: until the page is durable, recovery chooses among the old candidates, and new data is none of them.
            st.marks.hold_data_back();
            Ok(())
        })?;
        st.pages.take(g).ok_or(StoreError::ReadOnly)
    }

    /// I11: writes the data of the pending blocks of these pages again and makes them durable, with one barrier for all
    /// pages. What resolving does to these pages next needs none.
    pub fn write_pending_again(&self, st: &mut State, pages: &BTreeSet<PageNo>) -> Result<(), StoreError> {
        let mut has_found = false;
        for &g in pages {
            let is_unresolved = st.pages.unresolved(g).is_some();
            let PageState::Good(held) = self.unresolved_page(st, g)? else { continue };
            if held.page().pending != 0 {
                let mut page = held.page().clone();
                let (believed, mut found) = (self.is_believed(st, g, &page), 0);
                for i in (0..page.keys.len()).filter(|i| held.page().pending >> i & 1 == 1) {
                    if let Some(resolved) = self.resolve_block(g, i, held.page(), believed)? {
                        page.keys.set(i, &resolved.key);
                        found |= 1 << i;
                    }
                }
                self.write_found_again(st, g, &page, found, page.replaced)?;
                has_found |= found != 0;
            }
            if is_unresolved {
                st.pages.put_unresolved(g, Arc::unwrap_or_clone(held).into_page());
            }
        }
        if has_found {
            self.barrier(st)?;
            st.inherited.note_durable();
        }
        st.inherited.note_written_again(true);
        Ok(())
    }

    /// I11: writes the blocks that recovery has found again, in their place. The kernel takes pages that it failed to
    /// write for clean, and still shows them. It has told that once, perhaps to an earlier process. `replaced`: those
    /// that have, or had, a previous key. Returns whether there was one.
    fn write_found_again(
        &self,
        st: &mut State,
        g: PageNo,
        page: &Page,
        found: u128,
        replaced: u128,
    ) -> Result<bool, StoreError> {
        let mut has_written = false;
        for i in (0..page.keys.len()).filter(|i| found >> i & 1 == 1) {
            let offset = self.geo().block_offset(self.geo().first_block(g) + i as u64);
            if !page.keys.is_keyed(i) {
                // Without a previous key the place was zero, durably, before (I6), and a full store has none for zeros.
                if replaced >> i & 1 == 1 {
                    has_written |= self.clear_again(st, offset)?;
                }
                continue;
            }
            let mut bytes = vec![0u8; self.ctx.block_len()];
            self.read_padded(offset, &mut bytes)?;
            let (len, zeros_from) = self.len_to_write(page, i, &bytes, replaced);
            self.backing.write_at(offset.0, &bytes[..len]).map_err(StoreError::io("write", offset))?;
            st.note_block_write(offset, len as u64);
            st.slack.note(offset + zeros_from as u64..offset + len as u64, st.marks.written());
            has_written = true;
        }
        Ok(has_written)
    }

    /// I6, I11: makes the place of a block that was found to be a hole zero again, if the store has anything there: the
    /// kernel may show zeros that it failed to write. Returns whether the store had.
    fn clear_again(&self, st: &mut State, offset: ByteOffset) -> Result<bool, StoreError> {
        let until = (offset + self.geo().block_size()).min(st.space.end());
        let data = self.backing.seek_data(offset.0).map_err(StoreError::io("seek data", offset))?;
        if data.is_none_or(|data| data >= until.0) {
            return Ok(false);
        }
        st.slack.forget(offset..until);
        self.punch(st, offset, until - offset)?;
        Ok(true)
    }

    /// How much of a block in slot `i` is written when it is written again, and from where on that is zeros which need
    /// not be kept. Of a compressed block that has filled a hole the store may have the ciphertext alone (I6), and no
    /// space for the rest. If a block was replaced, all of its place is allocated, and may hold other bytes (I13).
    pub fn len_to_write(&self, page: &Page, i: usize, bytes: &[u8], replaced: u128) -> (usize, usize) {
        let is_compressed = page.keys.get(i).is_some_and(|key| key.is_compressed(self.ctx.ring.suite()));
        let stored = if is_compressed { stored_len(bytes).next_multiple_of(PAGE_LEN) } else { bytes.len() };
        (if replaced >> i & 1 == 1 { bytes.len() } else { stored }, stored)
    }

    /// The key under which a pending block's bytes verify; `None` if it is lost. Only the new key counts if the page is
    /// not `believed` ([`Core::is_believed`]).
    pub fn resolve_block(
        &self,
        g: PageNo,
        i: usize,
        page: &Page,
        believed: bool,
    ) -> Result<Option<Resolved>, StoreError> {
        let block = self.geo().first_block(g) + i as u64;
        let mut bytes = vec![0u8; self.ctx.block_len()];
        self.read_padded(self.geo().block_offset(block), &mut bytes)?;
        let is_zero = is_zero(&bytes);
        let before = || page.previous_key(i).unwrap_or(SlotKey::HOLE);
        let candidates = page.keys.get(i).map(|key| (key, true)).into_iter();
        for (key, is_new) in candidates.chain(believed.then(|| (before(), false))) {
            if key.is_hole() {
                if is_zero {
                    return Ok(Some(Resolved { key, is_new, opened: None }));
                }
            } else if let Some(opened) = self.opened(&bytes, &key, page, block) {
                // Plain zeros also verify if they never arrived, past the end of the store's file. A hole has the same
                // content, and needs no data.
                let key = if is_zero && self::is_zero(&opened) { SlotKey::HOLE } else { key };
                return Ok(Some(Resolved { key, is_new, opened: Some(opened) }));
            }
        }
        Ok(None)
    }

    /// Whether content gets the key in slot `i` if it is sealed: then re-keying gave it that key. Every epoch of K_in
    /// is tried, with the vault's compression and without. A block that was compressed by a codec which the vault has
    /// no longer is not recognised.
    fn seals_to_key(&self, content: &[u8], i: usize, page: &Page, block: BlockNo) -> bool {
        let Some(key) = page.keys.get(i).filter(|key| !key.is_hole()) else { return false };
        let (suite, inners) = (self.ctx.ring.suite(), self.ctx.ring.inners());
        let is_compressed = |key: &SlotKey| key.is_compressed(suite);
        let may_be_compressed = is_compressed(&key) || page.previous_key(i).is_some_and(|key| is_compressed(&key));
        // In one epoch, and without compression, equal content has one key.
        if inners.len() == 1 && self.ctx.compression.is_none() && !may_be_compressed && !page.changing {
            return false;
        }
        let salts = self.forms_of(page).salts(Numbers::From(block));
        let (mut sealed, mut keys) = (vec![0; content.len()], Keys::holes(1));
        // Recovery asks no server.
        inners.into_iter().filter(|inner| inner.oblivious().is_none()).any(|inner| {
            [salts, salts.compressed(None)].into_iter().any(|salts| {
                let len = content.len();
                let done = self.ctx.engine.seal_to(&inner, salts, content, &mut sealed, len, keys.raw_mut());
                done.is_ok() && keys.get(0).as_ref() == Some(&key)
            })
        })
    }

    /// Whether a block is pending and its content fits none of the keys in its page.
    pub fn is_lost(&self, st: &State, block: BlockNo) -> bool {
        let (g, i) = self.geo().slot_of(block);
        st.pages.good(g).is_some_and(|held| held.is_lost(i))
    }

    /// Whether a stored block verifies under `key`, which is of this page.
    pub fn block_matches(&self, stored: &[u8], key: &SlotKey, page: &Page, block: BlockNo) -> bool {
        self.opened(stored, key, page, block).is_some()
    }

    fn opened(&self, stored: &[u8], key: &SlotKey, page: &Page, block: BlockNo) -> Option<Vec<u8>> {
        let mut bytes = stored.to_vec();
        let failed = self.open_blocks(self.forms_of(page), &mut bytes, key.as_batch(), Numbers::From(block));
        failed.is_empty().then_some(bytes)
    }
}

/// The outcome for a pending block.
pub(super) struct Resolved {
    /// The key of the content, or the hole key if that is zeros.
    pub key: SlotKey,
    /// It is the new key, not the previous one.
    pub is_new: bool,
    /// The content, unless it is a hole's.
    pub opened: Option<Vec<u8>>,
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// How many blocks a page describes, its tail with them.
fn blocks_in(page: &Page) -> u64 {
    page.keys.len() as u64 + u64::from(!page.tail.is_empty())
}

/// Keeps the pending bits in `keep`, and the previous keys of those among them that have one.
pub(super) fn keep_bits(page: &mut Page, keep: u128) {
    let mut previous = Keys::default();
    for i in (0..page.keys.len()).filter(|i| keep >> i & 1 == 1) {
        if let Some(key) = page.previous_key(i) {
            previous.push(&key);
        }
    }
    page.pending &= keep;
    page.replaced &= keep;
    page.previous = previous;
}

/// Drops everything past the size: key slots, their bits, the tail or its end.
pub(super) fn clip(page: &mut Page, blocks: usize, size: u64, geo: &lamassu_format::Geometry, g: PageNo) {
    let used = page.keys.len();
    if !page.tail.is_empty() {
        let start = geo.block_start(geo.first_block(g) + used as u64);
        let left = size.saturating_sub(start).min(page.tail.len() as u64);
        page.tail.truncate(left as usize);
    }
    if used > blocks {
        let keep = (1u128 << blocks) - 1;
        keep_bits(page, page.pending & keep);
        page.keys.truncate(blocks);
    }
}
