//! Settling, after a barrier: pages are written again without their pending state.
//!
//! | step | what it does | keeps |
//! |---|---|---|
//! | 1 | the steps of a shrink are repeated, if a barrier after them failed | I10, I11 |
//! | 2 | the backing file is cut to what is in use, once the last page is durable | I8 |
//! | 3 | page 0: `cut` and `sparse` cleared, the floor raised, a clean one-page file given its convergent page | I5, I5a, I10 |
//! | 4 | pending bits cleared in pages whose data a barrier has covered | I3 |
//! | 5 | zeros behind compressed blocks punched that a barrier has covered | I13 |
//!
//! Nothing that is written here needs a barrier after it: until it is durable, the pages on disk describe the same
//! content.

use super::anchor_commit::Outlook;
use super::block::Block;
use super::primitives::{Core, PageId};
use super::recover::keep_bits;
use super::state::{Dirty, Held, Identity, Mark, PageState, SizeFields, State};
use super::types::StoreError;
use lamassu_format::page::TAG_AT;
use lamassu_format::{Page, PageNo};

/// Most pages that one settling reads to see whether they exist.
const DENSE_LOOKS_MAX: u32 = 1024;

impl super::File {
    /// Whether settling will give space of the store back: of what was punched or cut off, or behind compressed blocks.
    pub fn owes_space(&self) -> bool {
        // A thread that has the state is changing the file: its own call tells what it frees.
        self.state.try_read().is_some_and(|st| st.shrink.has_excess() || !st.slack.is_empty())
    }
}

impl Core {
    /// Whether [`Core::settle`] would find something to do, now or after the next barrier.
    pub fn needs_settle(&self, st: &State) -> bool {
        if self.is_mute(st) {
            return false;
        }
        let zero = st.pages.good(PageNo::ZERO).filter(|_| st.last_page(self.geo()) == PageNo::ZERO);
        let is_random = zero.is_some_and(|held| self.wants_convergent(&st.identity, held));
        self.is_under_way(st) || is_random || st.shrink.has_excess()
    }

    /// Whether every page that this process has written is final. Other pages belong to other sessions.
    pub fn is_settled(&self, st: &State) -> bool {
        !st.marks.has_written() || (st.failures.is_clear() && !self.is_under_way(st))
    }

    /// Whether pages on disk have state that only settling removes. State that cannot be settled does not count: for
    /// example, a damaged last page records no size to which the floor could be raised. Otherwise a store could keep
    /// the session open by damaging a page.
    fn is_under_way(&self, st: &State) -> bool {
        let is_known = st.inherited.unknown_from().is_none() && !self.is_mute(st);
        let has_floor = st.last_page(self.geo()) > PageNo::ZERO;
        let is_floor_low = has_floor && st.sizes.floor() != st.sizes.stored() && is_known;
        st.shrink.is_cut() || self.needs_rewrite(st) || is_floor_low || st.pages.has_open()
    }

    /// Whether the file cannot be written: page 0 is unreadable, or the store has lost the end.
    pub fn is_mute(&self, st: &State) -> bool {
        st.inherited.is_truncated() || st.pages.is_bad(PageNo::ZERO)
    }

    fn wants_convergent(&self, identity: &Identity, held: &Held) -> bool {
        self.may_be_convergent(identity) && !held.page().file_id.is_none() && held.lost() == 0
    }

    /// Names the writes so far; the size that they record is durable once a barrier covers them.
    pub fn mark(&self, st: &mut State) -> Mark {
        st.marks.take(st.sizes.stored())
    }

    /// Barrier and settle.
    pub fn settle_now(&self, st: &mut State) -> Result<(), StoreError> {
        let mark = self.mark(st);
        self.sync_data(st)?;
        self.anchor_covered(st, Outlook::Rests)?;
        self.settle(st, mark)
    }

    /// Settles what a barrier has covered up to `mark`.
    pub fn settle(&self, st: &mut State, mark: Mark) -> Result<(), StoreError> {
        if self.ctx.read_only {
            return Ok(());
        }
        if self.needs_rewrite(st) {
            return self.settle_now(st); // I11: the caller's barrier did not cover what the failed one has lost
        }
        st.marks.cover(mark);
        if !self.needs_settle(st) {
            return Ok(());
        }
        self.keeping_mtime(st, |core, st| {
            if st.shrink.has_open_steps() {
                core.redo_cut(st)?; // step 1, I10: `cut` stands until its steps are done
            }
            core.cut_excess(st)?; // step 2
            core.settle_page_zero(st)?; // step 3
            let marks = &st.marks;
            let open = st.pages.numbers_of(|held| held.is_open() && held.is_data_durable(marks));
            if st.last_page(core.geo()) > PageNo::ZERO {
                core.open_pages(st, open.iter().copied(), None)?;
            }
            for g in open {
                core.settle_page(st, g)?; // step 4
            }
            core.punch_slack(st); // step 5
            Ok(())
        })
    }

    /// Writes a page in its present state, without the pending bits that a barrier has covered.
    pub fn settle_page(&self, st: &mut State, g: PageNo) -> Result<(), StoreError> {
        let (is_cut, fields) = (st.shrink.is_cut(), st.sizes.fields());
        self.settle_page_as(st, g, is_cut, fields)
    }

    /// The same; page 0 gets this `cut` and this floor.
    fn settle_page_as(&self, st: &mut State, g: PageNo, cut: bool, fields: SizeFields) -> Result<(), StoreError> {
        if st.pages.good(g).is_none() {
            return Ok(());
        }
        let Some((mut page, lost)) = self.page_as_covered(st, g)? else { return Ok(()) };
        page.cut = g == PageNo::ZERO && cut;
        self.write_page(st, g, page, lost, fields, PageId::AsFits)
    }

    /// A good page, to be written again with a change: without the pending bits that a barrier has covered (A9); and
    /// its lost blocks.
    pub fn page_as_covered(&self, st: &mut State, g: PageNo) -> Result<Option<(Page, u128)>, StoreError> {
        self.good_page(st, g)?;
        let Some(held) = st.pages.good(g) else { return Ok(None) };
        let (mut page, lost) = (held.page().clone(), held.lost());
        if held.is_data_durable(&st.marks) {
            keep_bits(&mut page, lost); // I3
        }
        Ok(Some((page, lost)))
    }

    /// Step 3.
    fn settle_page_zero(&self, st: &mut State) -> Result<(), StoreError> {
        if let PageState::Bad(_) = self.page(st, PageNo::ZERO)? {
            return Ok(()); // it has no floor to raise; the other pages settle without it
        }
        // I5: a barrier has covered the pages that record this size. A page whose write failed may still be from before
        // the file grew.
        let has_floor = st.last_page(self.geo()) > PageNo::ZERO;
        let is_known = st.inherited.unknown_from().is_none() && st.failures.uncertain_pages().is_empty();
        let SizeFields { size, floor, .. } = st.sizes.fields();
        let raised = st.marks.durable_size().filter(|durable| *durable > floor && *durable <= size);
        let raised = raised.filter(|_| has_floor && is_known);
        if let Some(durable) = raised {
            self.mend_above_floor(st, durable)?; // a commit may follow
        }
        let last = st.last_page(self.geo());
        let is_last_durable = st.pages.good(last).is_none_or(|held| held.is_durable(&st.marks));
        // I10: the steps after `cut` are done, and a barrier has covered them.
        let is_cut_done = st.shrink.is_cut() && !st.shrink.has_open_steps();
        let is_cut_done = is_cut_done && !st.marks.holds_data_back() && is_last_durable;
        let Some(zero) = self.good_page(st, PageNo::ZERO)? else { return Ok(()) };
        let convergent = last == PageNo::ZERO && !zero.is_open();
        let convergent =
            convergent && st.pages.good(PageNo::ZERO).is_some_and(|zero| self.wants_convergent(&st.identity, zero));
        let convergent = convergent && self.may_settle_convergent();
        let fills = st.sizes.is_sparse() && last > PageNo::ZERO && self.is_dense(st)?;
        if !is_cut_done && raised.is_none() && !convergent && !fills {
            return Ok(());
        }
        let cut = st.shrink.is_cut() && !is_cut_done;
        let SizeFields { size, floor, sparse } = st.sizes.fields();
        let floor = raised.unwrap_or(if is_cut_done { size } else { floor });
        self.settle_page_as(st, PageNo::ZERO, cut, SizeFields { size, floor, sparse: sparse && !fills })?;
        if fills {
            // I5a: no page below the floor is absent.
            st.sizes.note_dense();
        }
        Ok(())
    }

    /// Whether no page of the file is absent, durably: then page 0 does not need `sparse`, which allows a store to
    /// remove a page. Continues where it stopped the last time: a page that exists is removed only with the end of the
    /// file.
    fn is_dense(&self, st: &mut State) -> Result<bool, StoreError> {
        if !st.failures.uncertain_pages().is_empty() {
            return Ok(false);
        }
        let last = st.last_page(self.geo());
        let mut looked = 0;
        while st.sizes.dense_until() <= last {
            let g = st.sizes.dense_until();
            let is_there = match st.pages.get(g) {
                Some(PageState::Good(held)) => held.is_durable(&st.marks),
                Some(PageState::Bad(_) | PageState::Absent) => false,
                None => {
                    looked += 1;
                    looked <= DENSE_LOOKS_MAX && self.has_nonce(g)?
                }
            };
            if !is_there {
                return Ok(false);
            }
            st.sizes.note_dense_page();
        }
        Ok(true)
    }

    /// Whether a page lies in the place of page `g`: every written page begins with a nonce.
    fn has_nonce(&self, g: PageNo) -> Result<bool, StoreError> {
        let mut nonce = [0; TAG_AT];
        let got = self.read_padded(self.geo().page_offset(g), &mut nonce)?;
        Ok(got > 0 && nonce.iter().any(|&b| b != 0))
    }

    /// To be called before the floor is raised to `durable` (I5). A crash may have left pages above the old floor
    /// absent, or in the state before the file grew past them. Below the new floor only `sparse` allows the former, and
    /// nothing allows the latter. Pages that this process wrote are known to exist.
    pub fn mend_above_floor(&self, st: &mut State, durable: u64) -> Result<(), StoreError> {
        if st.sizes.floor() >= st.inherited.size() {
            return Ok(());
        }
        let last = self.geo().last_page(durable.min(st.inherited.size()));
        let (mut next, mut mended) = (self.geo().last_page(st.sizes.floor()), false);
        while next <= last {
            let found = self.next_page(st, next)?;
            if found != Some(next) {
                // I5a: page 0 gets `sparse` with the floor that is raised past an absent page.
                st.sizes.note_sparse();
            }
            let Some(g) = found.filter(|g| *g <= last) else { break };
            mended |= self.mend_short_page(st, g)?;
            // The store decides how long a run of unknown pages is.
            next = self.end_of_bad(st, g)?;
        }
        if mended {
            self.prepare_change(st)?;
            self.commit_buffered(st)?;
            self.barrier(st)?;
        }
        Ok(())
    }

    /// Completes a page that is not the last. A tail goes to its block with the next commit, which also writes the
    /// page.
    fn mend_short_page(&self, st: &mut State, g: PageNo) -> Result<bool, StoreError> {
        let geo = *self.geo();
        if g >= st.last_page(&geo) {
            return Ok(false);
        }
        let PageState::Good(held) = self.page(st, g)? else { return Ok(false) };
        if !self.lacks_blocks(held.page(), g, u64::MAX) && held.page().tail.is_empty() {
            return Ok(false);
        }
        let Some((mut page, lost)) = self.page_as_covered(st, g)? else { return Ok(false) };
        if !page.tail.is_empty() {
            let block = geo.first_block(g) + page.keys.len() as u64;
            let mut bytes = Block::zeroed(self.ctx.block_len());
            bytes[..page.tail.len()].copy_from_slice(&page.tail);
            if !st.buffer.contains(block) {
                st.buffer.put(block, Dirty::Data(bytes), false);
            }
            return Ok(true);
        }
        page.keys.resize(geo.blocks_per_page() as usize);
        self.write_page(st, g, page, lost, st.sizes.fields(), PageId::AsFits)?;
        Ok(true)
    }

    /// Whether [`Core::mend_above_floor`] may have to load pages that are not known yet.
    pub fn may_lack_pages(&self, st: &State) -> bool {
        let inherited = st.inherited.size();
        st.sizes.floor() < inherited && self.geo().last_page(inherited) > PageNo::ZERO
    }

    /// Step 2. I8: the page that gave up the space is durable before the space goes.
    fn cut_excess(&self, st: &mut State) -> Result<(), StoreError> {
        let last = st.last_page(self.geo());
        self.page(st, last)?;
        if !st.pages.good(last).is_some_and(|held| held.is_durable(&st.marks)) {
            return Ok(());
        }
        self.shorten_to_implied(st)?;
        st.shrink.note_no_excess();
        Ok(())
    }
}
