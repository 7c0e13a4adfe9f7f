//! After a barrier: pending bits cleared, the floor raised, `cut` cleared, the backing file cut to what is in use, and a clean
//! one-page file given its convergent page.

use super::open::keep_bits;
use super::state::{Core, Entry, Held, State};
use super::types::StoreError;

impl Core {
    /// Whether [`Core::settle`] would find something to do, now or after the next barrier.
    pub fn needs_settle(&self, st: &State) -> bool {
        if st.lost_from.is_some() || matches!(st.pages.get(&0), Some(Entry::Bad(_))) {
            return false; // nothing can be written while page 0 tells nothing, or the store has lost the end
        }
        if st.barrier_failed {
            return true;
        }
        let last = self.geo().last_page(st.disk_size);
        let pending = |entry: &Entry| matches!(entry, Entry::Good(held) if held.page.pending & !held.lost != 0);
        let stray_tail = matches!(st.pages.get(&0), Some(Entry::Good(held)) if !held.page.tail.is_empty());
        let is_known = !stray_tail && st.unknown_from.is_none();
        let floor_is_low = last > 0 && st.floor != st.disk_size && is_known;
        let random = match st.pages.get(&0) {
            Some(Entry::Good(held)) => last == 0 && self.wants_convergent(held),
            _ => false,
        };
        st.cut || floor_is_low || random || st.excess || st.pages.values().any(pending)
    }

    /// Whether every page that was written here is as it stays. What was never written here is another session's.
    pub fn is_settled(&self, st: &State) -> bool {
        if st.seq == 0 {
            return true;
        }
        let is_bad = |g| matches!(st.pages.get(&g), Some(Entry::Bad(_)));
        let under_way = |entry: &Entry| matches!(entry, Entry::Good(held) if held.page.pending & !held.lost != 0);
        let floor_is_low = self.geo().last_page(st.disk_size) > 0 && st.floor != st.disk_size && !is_bad(0);
        let failed = st.barrier_failed || st.unsure || !st.unsure_pages.is_empty();
        !st.cut && !floor_is_low && !failed && !st.pages.values().any(under_way)
    }

    fn wants_convergent(&self, held: &Held) -> bool {
        self.ctx.convergent_small_files && held.page.file_id != [0; 16] && held.lost == 0
    }

    /// Names the writes so far; the size they tell is durable once a barrier covers them.
    pub fn mark(&self, st: &mut State) -> u64 {
        st.marked = (st.seq, st.disk_size);
        st.seq
    }

    /// Barrier and settle.
    pub fn settle_now(&self, st: &mut State) -> Result<(), StoreError> {
        let mark = self.mark(st);
        self.sync_data(st)?;
        self.settle(st, mark)
    }

    /// Settles what a barrier has covered up to `mark`.
    pub fn settle(&self, st: &mut State, mark: u64) -> Result<(), StoreError> {
        if self.ctx.read_only {
            return Ok(());
        }
        if st.barrier_failed {
            return self.settle_now(st); // the caller's barrier did not cover what the failed one has lost
        }
        st.covered = st.covered.max(mark);
        if !self.needs_settle(st) {
            return Ok(());
        }
        self.keeping_mtime(st, |core, st| {
            if st.cut_open {
                core.redo_cut(st)?; // `cut` must stand until its steps are done
            }
            core.cut_excess(st)?;
            core.settle_page_zero(st)?;
            let covered = st.covered;
            let open = |entry: &Entry| {
                matches!(entry, Entry::Good(held) if held.page.pending & !held.lost != 0 && held.data_mark <= covered)
            };
            let pages: Vec<u64> = st.pages.iter().filter(|(_, e)| open(e)).map(|(g, _)| *g).collect();
            for g in pages {
                core.settle_page(st, g)?;
            }
            Ok(())
        })
    }

    /// Writes a page as it is now, what a barrier has covered no longer pending.
    pub fn settle_page(&self, st: &mut State, g: u64) -> Result<(), StoreError> {
        let Some(Entry::Good(held)) = st.pages.get(&g) else { return Ok(()) };
        let (mut page, lost) = (held.page.clone(), held.lost);
        if held.data_mark <= st.covered {
            keep_bits(&mut page, lost);
        }
        page.cut = g == 0 && st.cut;
        self.write_page(st, g, page, lost)
    }

    fn settle_page_zero(&self, st: &mut State) -> Result<(), StoreError> {
        if let Entry::Bad(_) = self.page(st, 0)? {
            return Ok(()); // it tells no floor that could be raised; the other pages settle without it
        }
        let last = self.geo().last_page(st.disk_size);
        let last_mark = match st.pages.get(&last) {
            Some(Entry::Good(held)) => held.write_mark,
            _ => 0,
        };
        let cut_done = st.cut && !st.cut_open && st.drop_mark <= st.covered && last_mark <= st.covered;
        let (mark, durable) = st.marked;
        let stray_tail = last > 0 && self.good_page(st, 0)?.is_some_and(|held| !held.page.tail.is_empty());
        let is_known = !stray_tail && st.unknown_from.is_none();
        let raises = last > 0 && is_known && mark <= st.covered && durable > st.floor && durable <= st.disk_size;
        let Some(held) = self.good_page(st, 0)? else { return Ok(()) };
        let settled = held.page.pending & !held.lost == 0;
        let convergent = last == 0 && settled && self.wants_convergent(held);
        if !cut_done && !raises && !convergent {
            return Ok(());
        }
        if raises {
            self.note_absent_pages(st, durable)?;
        }
        let before = (st.cut, st.floor);
        if cut_done {
            (st.cut, st.floor) = (false, st.disk_size);
        }
        if raises {
            st.floor = durable;
        }
        let settled = self.settle_page(st, 0);
        if settled.is_err() {
            (st.cut, st.floor) = before; // as it is on disk
        }
        settled
    }

    /// To be called before the floor is raised to `durable`: pages that a crash lost above the old floor read as holes; below the new one only `sparse`
    /// allows that. What this process wrote it knows to be there.
    pub fn note_absent_pages(&self, st: &mut State, durable: u64) -> Result<(), StoreError> {
        if st.floor >= st.inherited_size || st.sparse {
            return Ok(());
        }
        let last = self.geo().last_page(durable.min(st.inherited_size));
        let mut g = self.geo().last_page(st.floor);
        while g <= last {
            if matches!(self.page(st, g)?, Entry::Absent) {
                st.sparse = true;
                break;
            }
            // A run of pages that nobody knows of may be as long as the store likes.
            g = self.end_of_bad(st, g)?;
        }
        Ok(())
    }

    /// Whether [`Core::note_absent_pages`] may come to look at pages that nobody has looked at yet.
    pub fn may_lack_pages(&self, st: &State) -> bool {
        st.floor < st.inherited_size && !st.sparse && self.geo().last_page(st.inherited_size) > 0
    }

    fn cut_excess(&self, st: &mut State) -> Result<(), StoreError> {
        let last = self.geo().last_page(st.disk_size);
        let covered = st.covered;
        match self.page(st, last)? {
            Entry::Good(held) if held.write_mark <= covered => {}
            _ => return Ok(()),
        }
        let implied = self.implied_len(st)?;
        if st.len > implied {
            self.shorten(st, implied)?;
        }
        st.excess = false;
        Ok(())
    }

    /// After a failed barrier the kernel may have dropped what it could not write: everything uncovered is read back,
    /// verified and written again. What is gone falls back to its previous key, or is lost; the next fsync says so ([`State::untold`]).
    pub fn write_uncovered_again(&self, st: &mut State) -> Result<(), StoreError> {
        let covered = st.covered;
        if st.shorten_mark > covered {
            // Nothing was written past the end since: that waits for a barrier.
            self.backing.set_len(st.len).map_err(StoreError::io("truncate", st.len))?;
        }
        let open = |entry: &Entry| matches!(entry, Entry::Good(held) if held.write_mark > covered || held.is_uncovered(covered));
        let pages: Vec<u64> = st.pages.iter().filter(|(_, e)| open(e)).map(|(g, _)| *g).collect();
        for g in pages {
            let Some(Entry::Good(held)) = st.pages.get(&g) else { continue };
            let (mut page, mut lost) = (held.page.clone(), held.lost);
            let open_bits = page.pending & !lost;
            for i in (0..page.keys.len()).filter(|i| open_bits >> i & 1 == 1) {
                let block = self.geo().first_block(g) + i as u64;
                let offset = self.geo().block_offset(block);
                let mut bytes = vec![0u8; self.ctx.block_len()];
                self.read_padded(offset, &mut bytes)?;
                let is_zero = bytes.iter().all(|&b| b == 0);
                let salts = self.salts(page.file_id, block);
                let matches = |key: &[u8; 32]| match *key == [0; 32] {
                    true => is_zero,
                    false => self.block_matches(&bytes, key, salts),
                };
                if !matches(&page.keys[i]) {
                    match page.previous_key(i).or(Some([0; 32])).filter(matches) {
                        Some(previous) => page.keys[i] = previous,
                        None => {
                            lost |= 1 << i;
                            continue;
                        }
                    }
                }
                if page.keys[i] != [0; 32] {
                    self.backing.write_at(offset, &bytes).map_err(StoreError::io("write", offset))?;
                }
            }
            self.write_page(st, g, page, lost)?;
        }
        Ok(())
    }
}
