//! The commit: everything buffered is brought to the store (`docs/format.md` §13, the invariants I1 to I13).
//!
//! A commit runs in rounds ([`super::round`]) of at most R replaced blocks a page. A crash between any two of its
//! writes leaves each block old or new. It ends without a barrier: its data stays `pending` until a barrier covers it
//! and the page is settled ([`super::settle`]).
//!
//! | step | keeps |
//! |---|---|
//! | [`Core::prepare_change`]: an interrupted shrink is completed, bytes past the end are cut off | I6, I10 |
//! | a barrier, if page 0 says `cut` | I10 |
//! | [`Core::smooth_end`]: the last block gets zeros past its old size, if the file grows from within it | I9 |
//! | rounds until nothing is left | I1 to I4, I6 to I8, I11 to I13 |
//! | [`Core::drop_stray_pages`]: pages past the end that a failed write may have left are made void | I11 |

use super::anchor_commit::Outlook;
use super::primitives::{Core, Covers};
use super::read::View;
use super::state::{Dirty, PageState, State};
use super::types::StoreError;
use lamassu_format::PageNo;
use std::sync::atomic::Ordering;

/// The error of an fsync whose own barrier was good, after another has failed.
pub(super) fn lost_barrier() -> StoreError {
    StoreError::io("sync", 0u64)(std::io::Error::from_raw_os_error(libc::EIO))
}

impl super::File {
    /// Commits and makes durable, as fdatasync(2): the content.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.sync_as(Covers::Content)
    }

    /// The same as fsync(2): also mode, owner, times and extended attributes.
    pub fn sync_all(&self) -> Result<(), StoreError> {
        self.sync_as(Covers::All)
    }

    fn sync_as(&self, covers: Covers) -> Result<(), StoreError> {
        if self.core.ctx.read_only {
            return Ok(());
        }
        let before = self.lost_barriers.load(Ordering::Acquire);
        let mut st = self.exclusive();
        match self.core.takes_long(&st, true) {
            true => self.core.open_to_others(&mut st, |core, st| core.sync(st, covers)),
            false => self.core.sync(&mut st, covers),
        }?;
        match self.lost_barriers.load(Ordering::Acquire) == before {
            true => Ok(()),
            false => Err(lost_barrier()), // while this call waited; another call reported it
        }
    }
}

impl Core {
    /// Whether anything is buffered.
    pub fn needs_commit(&self, st: &State) -> bool {
        !st.buffer.is_empty()
            || st.sizes.logical() != st.sizes.stored()
            || !st.failures.uncertain_pages().is_empty()
            || (st.identity.wants_page() && !matches!(st.pages.get(PageNo::ZERO), Some(PageState::Good(_))))
    }

    /// Writes everything buffered to the store. No barrier at the end.
    pub fn commit(&self, st: &mut State) -> Result<(), StoreError> {
        if self.needs_commit(st) {
            self.prepare_change(st)?;
            let done = self.keeping_mtime(st, Core::commit_buffered);
            note_outcome(st, &done);
            done?;
        } else {
            self.set_mtime()?;
        }
        self.forget_mtime();
        if st.pages.are_too_many_open() {
            self.settle_now(st)?;
        }
        Ok(())
    }

    /// The rounds of a commit, once the file is prepared for writing.
    pub fn commit_buffered(&self, st: &mut State) -> Result<(), StoreError> {
        if st.shrink.is_cut() {
            // I10: the steps of the shrink are durable before page 0 is written without `cut`.
            self.barrier(st)?;
        }
        let (size, stored) = (st.sizes.logical(), st.sizes.stored());
        if size > stored && self.is_ragged(st)? {
            self.smooth_end(st)?;
        }
        self.rounds(st, size)?;
        self.drop_stray_pages(st)?;
        if size > stored {
            st.shrink.set_ragged(false); // a last block written here is padded with zeros
        }
        st.identity.note_committed();
        st.buffer.note_committed();
        st.shrink.note_committed();
        Ok(())
    }

    /// Writes the buffer to the store, and sets the size in the pages to `size`, in as many rounds as necessary.
    fn rounds(&self, st: &mut State, size: u64) -> Result<(), StoreError> {
        let mut goal = self.goal(st, size)?;
        loop {
            if self.needs_rewrite(st) {
                // I11: what a failed barrier lost is written again here, and never between the pages of a round and its
                // data: there the blocks that are still to be written would be taken for lost.
                self.sync_data(st)?;
            }
            let round = self.plan(st, &goal)?;
            if round.pages.is_empty() {
                st.failures.note_rounds_done();
                return Ok(());
            }
            let left = (st.buffer.len(), goal.unwritten.len());
            if let Err(error) = self.run(st, round, &mut goal) {
                if error.is_out_of_space() && !st.slack.is_empty() {
                    let _ = self.sync_data(st); // frees zeros: the next try may find room
                }
                return Err(error);
            }
            if (st.buffer.len(), goal.unwritten.len()) == left {
                // A page without room for what must change under it. The planner never makes one. Should it ever, an
                // error is better than an endless loop.
                debug_assert!(false, "a round of a commit changed nothing");
                let source = std::io::Error::from_raw_os_error(libc::EIO);
                return Err(StoreError::Io { op: "commit without progress", offset: 0, source });
            }
        }
    }

    /// Whether the last block on disk holds anything but zeros past the size, as a shrink leaves it (I9).
    fn is_ragged(&self, st: &mut State) -> Result<bool, StoreError> {
        let stored = st.sizes.stored();
        let inside = (stored % self.geo().block_size()) as usize;
        if inside == 0 || st.shrink.ragged() == Some(false) {
            return Ok(false);
        }
        let block = self.geo().block_at(stored);
        self.load_pages(st, block, block)?;
        let mut bytes = vec![0u8; self.ctx.block_len()];
        let buffered = st.buffer.take(block);
        let mut damaged = false;
        let read = self.read_blocks(&View::of(st), block, &mut bytes, lamassu_crypto::Verify::Full, &mut |_, _| {
            damaged = true;
            Ok(())
        });
        if let Some(buffered) = buffered {
            st.buffer.put(block, buffered, false);
        }
        read?;
        // A damaged block has no content that could come back.
        let ragged = !damaged && bytes[inside..].iter().any(|&b| b != 0);
        st.shrink.set_ragged(ragged);
        Ok(ragged)
    }

    /// I9: rewrites the last block with zeros past the size, durably, before the size grows. Otherwise a crash while it
    /// grows could fall back to the previous key, and bring back bytes that a shrink had cut off. A10: the anchor knows
    /// it, too. Otherwise the store could show the page as it was acknowledged, whose last block is whole, beside one
    /// that makes the file longer.
    fn smooth_end(&self, st: &mut State) -> Result<(), StoreError> {
        let stored = st.sizes.stored();
        let block = self.geo().block_at(stored);
        let buffered = st.buffer.set_aside();
        // The content that the file had at that length, not the buffered one: no block is ever a mixture of versions.
        let old = match st.shrink.last_block(block) {
            Some(bytes) => Ok(bytes),
            None => self.load_block_within(st, block, stored),
        };
        let done = old.and_then(|bytes| {
            st.buffer.put(block, Dirty::Data(bytes), false);
            self.rounds(st, stored)?;
            if self.fresh.is_none() {
                return self.barrier(st);
            }
            // In every durability mode: what is committed is in the store.
            self.sync_data(st)?;
            self.anchor_covered(st, Outlook::GoesOn)
        });
        st.buffer.put_back(buffered);
        done
    }

    /// Commits and makes everything durable, for the application. Fails once if a barrier has failed since the last
    /// call, in the middle of a write or in the background: what was written before that may be gone, and what could be
    /// written again says nothing about the rest.
    pub fn sync(&self, st: &mut State, covers: Covers) -> Result<(), StoreError> {
        let done = self.commit(st).and_then(|()| self.sync_as(st, covers));
        let done = done.and_then(|()| self.covered(st, st.marks.written(), Outlook::GoesOn));
        let unreported = st.failures.take_unreported();
        done?;
        match unreported {
            true => Err(lost_barrier()),
            false => Ok(()),
        }
    }
}

/// Notes how a commit ended.
fn note_outcome(st: &mut State, done: &Result<(), StoreError>) {
    match done {
        Err(StoreError::Io { source, .. }) => st.buffer.note_refused(source.raw_os_error()),
        // Nothing was written, and nothing will be until the server of the zone's keys answers.
        Err(StoreError::NotEvaluated(_)) => st.buffer.note_refused(Some(libc::EIO)),
        Ok(()) => st.buffer.forget_refusal(),
        Err(_) => {}
    }
}
