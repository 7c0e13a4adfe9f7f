//! What other threads may do while a commit runs: read, write whole blocks, read attributes.
//!
//! A commit holds the lock of the file's state over barriers, perhaps for seconds. Other threads need not wait for it.
//! Attributes lie outside the state ([`Published`]). While a commit is *open* ([`Core::open_to_others`]), readers use a
//! snapshot of the state from before the commit ([`Concurrent::snapshot`]), and whole blocks that are written collect
//! in an overlay. The thread that opened the commit moves the overlay into the buffer before it releases the lock. So a
//! lock holder never sees uncollected writes, and the commit protocol knows nothing of this module. Nothing here writes
//! pages or blocks: I1 to I14 are kept by the commit that runs, and by the next one for what the overlay held.
//!
//! Invariants:
//! * A commit, a barrier and a settling of a sound state change no content, and stop at the first error. They change
//!   bytes on disk under buffered blocks (the last block is one, if the file grows), and the snapshot has those in its
//!   buffer. Every other block holds under the old pages what it holds under the new ones. Operations that may change
//!   content are never opened: the repair of a failure ([`Core::is_sound`]), truncation, punching, copying, re-keying.
//! * A write into the overlay can fail later only as any buffered write can: it fills whole blocks, under pages that
//!   are good or past the end, and the store can hold a file of that length.
//! * Readers and writers hold the lock of `snapshot` while they work; closing takes the snapshot away first.
//! * Lock order: state, `snapshot`, `times`, `published`. The lock of `Core::id_hint` is held with none of them.

use super::presealed::Presealed;
use super::primitives::Core;
use super::state::{Dirty, PageState, State};
use super::types::{Durability, StoreError};
use super::write::{Committer, REPLACE_BUFFER_LEN};
use crate::backend::{SetTime, Time};
use lamassu_format::{BlockNo, PageNo};
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Bytes in the overlay at most, if writers commit: they go on for the time of a short commit, and otherwise wait.
const OVERLAY_LEN_MAX: usize = 16 << 20;
/// The same, if another thread commits: as much as the next commit takes.
const BEHIND_OVERLAY_LEN_MAX: usize = REPLACE_BUFFER_LEN;
/// Bytes buffered from which on a commit takes long enough to be opened, barriers or not.
const OPEN_LEN_MIN: usize = 1 << 20;
/// How long a thread waits for the state before it checks whether a commit has been opened.
pub(super) const PATIENCE: Duration = Duration::from_millis(1);
/// How often it checks before it queues for the lock: the holder of the state may open a commit at any time.
const TRIES_MAX: u32 = 100;

/// What can be used of a file without the lock of its state.
#[derive(Default)]
pub(super) struct Concurrent {
    published: Mutex<Published>,
    /// Held while the store reads or sets a modification time, which may take long. Readers of `published` do not wait
    /// for that.
    times: Mutex<()>,
    /// While a commit is open: the state as it was when the commit began, as far as readers need it.
    snapshot: RwLock<Option<State>>,
}

/// The outcome of an attempt to work without the lock of the state.
pub(super) enum Attempt<T> {
    Done(T),
    /// The operation needs the state.
    Refused,
    /// No commit is open.
    Closed,
}

/// Does something during an open commit, or gets the state for it. `had` is the state, if the lock was free. `Break`:
/// what `attempt` gave. `Continue`: the state, for which `try_again` waits a little; `None`: the caller has to queue
/// for the lock.
pub(super) fn attempt_or_hold<G, T, E>(
    mut had: Option<G>,
    mut attempt: impl FnMut() -> Result<Attempt<T>, E>,
    try_again: impl Fn() -> Option<G>,
) -> Result<ControlFlow<T, Option<G>>, E> {
    for _ in 0..TRIES_MAX {
        if had.is_some() {
            break;
        }
        match attempt()? {
            Attempt::Done(done) => return Ok(ControlFlow::Break(done)),
            Attempt::Refused => break,
            Attempt::Closed => had = try_again(),
        }
    }
    Ok(ControlFlow::Continue(had))
}

/// The attributes that `stat` shows, and the overlay of an open commit.
#[derive(Default)]
struct Published {
    /// Logical size, all writes included.
    size: u64,
    /// Time of the last buffered write, to be set once it is committed.
    mtime: Option<Time>,
    /// The backing file's modification time while Lamassu itself changes that file: to be set again.
    kept: Option<Time>,
    /// The time it was last set to, if nothing has changed it since. A `stat` that asked the store in between shows
    /// this time.
    known: Option<Time>,
    /// Something has to be committed.
    is_dirty: bool,
    /// So much is buffered that a commit is due, and none is open.
    is_full: bool,
    /// Bytes that blocks in the state take.
    buffered: u64,
    /// Blocks written during an open commit.
    overlay: BTreeMap<BlockNo, Dirty>,
}

/// The state for one caller alone. What others see of it is published when it is dropped.
pub(super) struct Exclusive<'a> {
    core: &'a Core,
    st: RwLockWriteGuard<'a, State>,
}

impl<'a> Exclusive<'a> {
    pub fn new(core: &'a Core, mut st: RwLockWriteGuard<'a, State>) -> Exclusive<'a> {
        core.take_shared(&mut st);
        Exclusive { core, st }
    }
}

impl Deref for Exclusive<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.st
    }
}

impl DerefMut for Exclusive<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.st
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.core.publish(&self.st);
    }
}

/// An open commit. Closes it when dropped.
struct OpenCommit<'a> {
    core: &'a Core,
    st: &'a mut State,
}

impl Drop for OpenCommit<'_> {
    fn drop(&mut self) {
        let snapshot = self.core.concurrent.snapshot.write().take();
        if let Some(snapshot) = snapshot {
            self.st.pages.adopt_shared(snapshot.pages);
            self.core.take_shared(self.st);
        }
        let mut published = self.core.concurrent.published.lock();
        let overlay = std::mem::take(&mut published.overlay);
        if !overlay.is_empty() {
            self.st.sizes.set_logical(published.size);
        }
        drop(published);
        for (block, dirty) in overlay {
            let replaces = self.core.may_replace(self.st, block);
            self.st.buffer.put(block, dirty, replaces);
        }
    }
}

impl Core {
    /// Publishes size, times and buffers of the state.
    pub fn publish(&self, st: &State) {
        self.profile_hint.store(st.identity.profile().number(), Ordering::Release);
        if self.is_salted(&st.identity) {
            *self.id_hint.lock() = st.identity.id();
        }
        let (is_dirty, is_full) = (self.needs_commit(st), self.is_full(st));
        let buffered = self.buffered_len(st) as u64;
        let mut published = self.concurrent.published.lock();
        (published.size, published.buffered) = (st.sizes.logical(), buffered);
        (published.is_dirty, published.is_full) = (is_dirty, is_full);
    }

    /// Logical size, bytes.
    pub fn published_size(&self) -> u64 {
        self.concurrent.published.lock().size
    }

    /// Whether buffered writes wait, or a time that is to be set with them.
    pub fn is_dirty(&self) -> bool {
        let published = self.concurrent.published.lock();
        published.is_dirty || published.mtime.is_some() || !published.overlay.is_empty()
    }

    /// Whether so much is buffered that a commit is due, and none is open.
    pub fn wants_commit(&self) -> bool {
        self.concurrent.published.lock().is_full
    }

    /// Bytes that all buffered blocks take, without what chunks hold beyond them.
    pub fn published_buffered(&self) -> u64 {
        let published = self.concurrent.published.lock();
        published.buffered + (published.overlay.len() * self.ctx.block_len()) as u64
    }

    /// The modification time to be shown instead of the backing file's.
    pub fn published_mtime(&self) -> Option<Time> {
        let published = self.concurrent.published.lock();
        published.mtime.or(published.kept).or(published.known)
    }

    /// To be called before the store changes the backing file's modification time by itself, outside of
    /// [`Core::keeping_mtime`].
    pub fn forget_known_mtime(&self) {
        self.concurrent.published.lock().known = None;
    }

    /// Notes that the content changes now.
    pub fn note_change(&self) {
        self.concurrent.published.lock().mtime = Some(Time::now());
    }

    /// The writes whose time was to be set are committed, with their time. If the overlay holds later ones, their time
    /// is still to be set.
    pub fn forget_mtime(&self) {
        let mut published = self.concurrent.published.lock();
        if published.overlay.is_empty() {
            published.mtime = None;
        }
    }

    /// Sets the time of buffered writes, if nothing else has to be committed.
    pub fn set_mtime(&self) -> Result<(), StoreError> {
        let _times = self.concurrent.times.lock();
        let time = self.concurrent.published.lock().mtime;
        match time {
            Some(time) => self.restore(time).map_err(StoreError::io("set times", 0u64)),
            None => Ok(()),
        }
    }

    /// Sets the modification time. The caller holds `times`.
    fn restore(&self, time: Time) -> std::io::Result<()> {
        let done = self.backing.set_times(SetTime::Keep, SetTime::At(time));
        self.concurrent.published.lock().known = done.is_ok().then_some(time);
        done
    }

    /// Sets times now; later commits leave the modification time as it is.
    pub fn set_times(&self, atime: SetTime, mtime: SetTime) -> Result<(), StoreError> {
        if self.ctx.read_only {
            return Err(StoreError::ReadOnly);
        }
        let _times = self.concurrent.times.lock();
        let time = match mtime {
            SetTime::Keep => None,
            SetTime::At(time) => Some(time),
            SetTime::Now => Some(Time::now()),
        };
        self.backing.set_times(atime, mtime).map_err(StoreError::io("set times", 0u64))?;
        if let Some(time) = time {
            let mut published = self.concurrent.published.lock();
            published.mtime = published.mtime.map(|_| time);
            published.kept = published.kept.map(|_| time);
            published.known = Some(time);
        }
        Ok(())
    }

    /// Runs an internal change of the backing file and restores its modification time, which only the application's
    /// writes may change.
    pub fn keeping_mtime<T>(
        &self,
        st: &mut State,
        change: impl FnOnce(&Self, &mut State) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let kept = KeepMtime::new(self).map_err(StoreError::io("stat", 0u64))?;
        let result = change(self, st);
        let restored = {
            let _times = self.concurrent.times.lock();
            self.published_mtime().map_or(Ok(()), |time| self.restore(time))
        };
        drop(kept);
        match result {
            Ok(value) => restored.map(|()| value).map_err(StoreError::io("set times", 0u64)),
            Err(error) => Err(error),
        }
    }

    /// Does `work`, a commit or what follows one, and lets other threads read and write meanwhile.
    pub fn open_to_others<T>(&self, st: &mut State, work: impl FnOnce(&Core, &mut State) -> T) -> T {
        if !self.is_sound(st) {
            return work(self, st);
        }
        debug_assert!(!st.buffer.range(..).any(|(_, dirty)| dirty.is_copy()), "copies are committed alone");
        self.publish(st);
        self.concurrent.published.lock().is_full = false;
        *self.concurrent.snapshot.write() = Some(st.snapshot());
        let opened = OpenCommit { core: self, st };
        work(self, opened.st)
    }

    /// Whether a commit now, and the barrier behind it if it `syncs`, takes so long that it is worth opening.
    pub fn takes_long(&self, st: &State, syncs: bool) -> bool {
        let has_barriers = syncs || (st.buffer.replaces() && self.ctx.durability == Durability::Ordered);
        self.buffered_len(st) >= OPEN_LEN_MIN || (has_barriers && st.marks.is_barrier_at_least(PATIENCE))
    }

    /// Whether a buffered block may replace a stored one, by what is in memory alone.
    fn may_replace(&self, st: &State, block: BlockNo) -> bool {
        let (g, i) = self.geo().slot_of(block);
        match st.pages.get(g) {
            Some(PageState::Good(held)) => held.is_keyed(i),
            Some(PageState::Absent) => false,
            Some(PageState::Bad(_)) => true,
            None => st.is_within(self.geo(), g),
        }
    }

    /// Reads during an open commit.
    pub fn read_concurrent(&self, offset: u64, buf: &mut [u8]) -> Result<Attempt<usize>, StoreError> {
        let snapshot = self.concurrent.snapshot.read();
        let Some(snapshot) = &*snapshot else { return Ok(Attempt::Closed) };
        let published = self.concurrent.published.lock();
        let size = published.size;
        let Some((first, last)) = self.touched(size, offset, buf.len()) else { return Ok(Attempt::Done(0)) };
        let overlay: BTreeMap<BlockNo, Dirty> =
            published.overlay.range(first..=last).map(|(b, dirty)| (*b, dirty.clone())).collect();
        drop(published);
        if !self.are_unaffected(snapshot, first, last) {
            return Ok(Attempt::Refused);
        }
        let Some(view) = self.view(snapshot, first, last)? else { return Ok(Attempt::Refused) };
        let read = self.read_undamaged(&view.with(size, overlay), offset, buf)?;
        Ok(read.map_or(Attempt::Refused, Attempt::Done))
    }

    /// Whether the pages of blocks `first..=last` are in memory, or not written by the commit.
    fn are_unaffected(&self, st: &State, first: BlockNo, last: BlockNo) -> bool {
        let geo = self.geo();
        let is_written = |g: PageNo| {
            let first = geo.first_block(g);
            let has_dirty = st.buffer.first_in(first..first + geo.blocks_per_page()).is_some();
            has_dirty || [PageNo::ZERO, st.last_page(geo), geo.last_page(st.sizes.logical())].contains(&g)
        };
        // Pages past the end are void and are not read.
        let is_unaffected = |g: PageNo| st.pages.contains(g) || !st.is_within(geo, g) || !is_written(g);
        geo.pages_of(first, last).all(is_unaffected)
    }

    /// Whether blocks `first..=last` can be committed later: none of their pages is damaged.
    fn are_good(&self, snapshot: &State, first: BlockNo, last: BlockNo) -> bool {
        if !self.are_unaffected(snapshot, first, last) {
            return false;
        }
        // The caller gets the state then, and meets the error again.
        let Ok(Some(view)) = self.view(snapshot, first, last) else { return false };
        self.geo().pages_of(first, last).all(|g| !matches!(view.entry(g), Some(PageState::Bad(_))))
    }

    /// Takes a write of whole blocks into the overlay of an open commit.
    pub fn write_concurrent(
        &self,
        offset: u64,
        data: &[u8],
        presealed: &Presealed,
        committer: Committer,
    ) -> Attempt<()> {
        let snapshot = self.concurrent.snapshot.read();
        let Some(snapshot) = &*snapshot else { return Attempt::Closed };
        let (geo, len) = (self.geo(), self.ctx.block_len());
        let size = geo.block_size();
        let end = offset.saturating_add(data.len() as u64);
        if data.is_empty() || !offset.is_multiple_of(size) || !end.is_multiple_of(size) || end > geo.size_max() {
            return Attempt::Refused;
        }
        let (first, last) = (geo.block_at(offset), geo.block_at(end - 1));
        let backing_len = (geo.block_offset(last) + size).0;
        let fits = snapshot.space.can_hold(backing_len) || self.backing.check_len(backing_len).is_ok();
        if !fits || !presealed.is_for(&self.ctx, &snapshot.identity) || !self.are_good(snapshot, first, last) {
            return Attempt::Refused;
        }
        let overlay_len_max = match committer {
            Committer::Writer => OVERLAY_LEN_MAX,
            Committer::Other => BEHIND_OVERLAY_LEN_MAX,
        };
        let mut published = self.concurrent.published.lock();
        // Commits that fail leave all of it buffered: what lies in the overlay then adds to that at most once.
        let is_full = published.overlay.len() * len + data.len() > overlay_len_max
            || snapshot.buffer.bytes(len) > committer.buffer_len_max()
            || snapshot.buffer.chunk_bytes() > REPLACE_BUFFER_LEN + overlay_len_max;
        if offset > published.size || is_full {
            return Attempt::Refused;
        }
        for (block, bytes) in first.until(last.next()).zip(data.chunks_exact(len)) {
            let dirty = match presealed.block(block, len) {
                Some(sealed) => Dirty::Sealed(sealed),
                None => Dirty::Data(super::block::Block::of(bytes)),
            };
            published.overlay.insert(block, dirty);
        }
        published.size = published.size.max(end);
        published.mtime = Some(Time::now());
        Attempt::Done(())
    }

    /// Whether no failure, crash or damage is left to repair. Otherwise the next commit or settling repairs it first
    /// (I10, I11), which may change the content of blocks, and pages that readers of a snapshot use.
    fn is_sound(&self, st: &State) -> bool {
        st.inherited.is_prepared()
            && !st.shrink.has_open_steps()
            && st.failures.is_clear()
            && !self.needs_rewrite(st)
            && !st.inherited.is_truncated()
            && st.inherited.unknown_from().is_none()
            && !st.buffer.is_refused()
            && !self.may_lack_pages(st)
    }
}

/// Keeps the backing file's modification time in [`Published::kept`] until it is dropped, by a panic too. Of several
/// nested ones the outermost does.
struct KeepMtime<'a> {
    core: &'a Core,
    is_outermost: bool,
}

impl<'a> KeepMtime<'a> {
    fn new(core: &'a Core) -> std::io::Result<KeepMtime<'a>> {
        let _times = core.concurrent.times.lock();
        let is_outermost = core.concurrent.published.lock().kept.is_none();
        if is_outermost {
            let before = core.backing.stat()?.mtime;
            core.concurrent.published.lock().kept = Some(before);
        }
        Ok(KeepMtime { core, is_outermost })
    }
}

impl Drop for KeepMtime<'_> {
    fn drop(&mut self) {
        if self.is_outermost {
            self.core.concurrent.published.lock().kept = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::convert::Infallible;

    /// A lock that the last attempt got is passed on. Releasing it and queueing would make the thread wait for itself.
    #[test]
    fn the_state_is_handed_on_whenever_it_comes() {
        for at in [0, 1, 2, TRIES_MAX - 1, TRIES_MAX, TRIES_MAX + 1] {
            let tries = Cell::new(0);
            let had = (at == 0).then_some(0);
            let again = || {
                tries.set(tries.get() + 1);
                (tries.get() == at).then_some(at)
            };
            let Ok(got) = attempt_or_hold(had, || Ok::<Attempt<()>, Infallible>(Attempt::Closed), again);
            assert_eq!(got, ControlFlow::Continue((at <= TRIES_MAX).then_some(at)), "at try {at}");
            assert_eq!(tries.get(), at.min(TRIES_MAX));
        }
    }
}
