//! What goes on beside a commit: attributes, reads, and writes of whole blocks.
//!
//! A commit holds the state of its file for itself alone, for as long as the store takes: over barriers, for seconds perhaps. Others need not wait for it.
//! What `stat` shows lies outside the state ([`Shown`]). While a commit is *open* ([`Core::open_to_others`]), readers go by the state as it was when the
//! commit began ([`Beside::seen`]), and blocks that are written gather beside it. Whoever opened it takes those over before he lets go of the state: so
//! nothing lies beside it for who gets the state, and the commit protocol knows nothing of all this.
//!
//! Invariants:
//! * A commit, a barrier and a settling of a sound state change no content, and end with the first error. Bytes on disk change under blocks that are buffered
//!   (the last one is, where the file grows), and those are read from the buffer as it was; all others hold under the pages before what they hold under
//!   those after. What may change content is never opened: the repair of what a failure left ([`Core::is_sound`]), truncation, punching, copying, re-keying.
//! * A write beside a commit cannot fail later but as any buffered write can: it fills whole blocks, under pages that are good or past the end, and the store can hold a file of that length.
//! * Readers and writers hold `seen` while they are at it; closing takes it away from them first.
//! * Locks are taken in the order state, `seen`, `times`, `shown`; the hint of the id is held with no other that comes after it.

use super::chunk::Ahead;
use super::open::HOLE;
use super::state::{Core, Dirty, Entry, State};
use super::types::{Durability, StoreError};
use super::write::REPLACE_BUFFER_LEN;
use crate::backend::{SetTime, Time};
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Bytes that are written beside a commit at most.
const LATE_LEN_MAX: usize = 16 << 20;
/// Bytes buffered from which on a commit takes long enough to be opened, barriers or not.
const OPEN_LEN_MIN: usize = 1 << 20;
/// How long who wants the state waits for it before he looks whether a commit has been opened.
pub(super) const PATIENCE: Duration = Duration::from_millis(1);
/// How often he looks, before he waits in line: whoever has the state may open a commit at any time.
const TRIES_MAX: u32 = 100;

/// What is known of a file without its state.
#[derive(Default)]
pub(super) struct Beside {
    shown: Mutex<Shown>,
    /// Held while the store is asked for a modification time or told one, which may take it long: who only looks does not wait for that.
    times: Mutex<()>,
    /// While a commit is open: the state as it was when that began, as far as readers need it.
    seen: RwLock<Option<State>>,
}

/// What became of an attempt to do something beside a commit.
pub(super) enum Attempt<T> {
    Done(T),
    /// It has to wait for the state.
    Refused,
    /// No commit is open.
    Closed,
}

/// Does something with the state, if that is `had`, or beside a commit: `Break` with what `beside` gave; or `Continue` with the state, for which `try_again` waits a little.
/// `None`: he has to wait in line.
pub(super) fn or_hold<G, T, E>(
    mut had: Option<G>,
    mut beside: impl FnMut() -> Result<Attempt<T>, E>,
    try_again: impl Fn() -> Option<G>,
) -> Result<ControlFlow<T, Option<G>>, E> {
    for _ in 0..TRIES_MAX {
        if had.is_some() {
            break;
        }
        match beside()? {
            Attempt::Done(done) => return Ok(ControlFlow::Break(done)),
            Attempt::Refused => break,
            Attempt::Closed => had = try_again(),
        }
    }
    Ok(ControlFlow::Continue(had))
}

/// What `stat` shows, and what waits beside an open commit.
#[derive(Default)]
struct Shown {
    /// Logical size, all that was written included.
    size: u64,
    /// Time of the last buffered write, to be set once it is committed.
    mtime: Option<Time>,
    /// The backing file's modification time while Lamassu itself changes that file: to be set again.
    kept: Option<Time>,
    /// What it was last set to, if nothing has changed it since: whoever asked the store while it was not what it must be goes by this.
    known: Option<Time>,
    /// Something has to be committed.
    is_dirty: bool,
    /// Bytes that blocks in the state take.
    buffered: u64,
    /// Blocks written beside a commit.
    late: BTreeMap<u64, Dirty>,
}

/// The state for one caller alone; what `stat` shows follows when he lets go of it.
pub(super) struct Alone<'a> {
    core: &'a Core,
    st: RwLockWriteGuard<'a, State>,
}

impl<'a> Alone<'a> {
    pub fn new(core: &'a Core, mut st: RwLockWriteGuard<'a, State>) -> Alone<'a> {
        core.take_loaded(&mut st);
        Alone { core, st }
    }
}

impl Deref for Alone<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.st
    }
}

impl DerefMut for Alone<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.st
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.core.publish(&self.st);
    }
}

/// An open commit. Closes it when dropped.
struct Opened<'a> {
    core: &'a Core,
    st: &'a mut State,
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        let seen = self.core.beside.seen.write().take();
        if let Some(seen) = seen {
            *self.st.loaded.get_mut() = seen.loaded.into_inner();
            self.core.take_loaded(self.st);
        }
        let mut shown = self.core.beside.shown.lock();
        let late = std::mem::take(&mut shown.late);
        if !late.is_empty() {
            self.st.size = shown.size;
        }
        drop(shown);
        for (block, dirty) in late {
            self.st.replaces |= self.core.may_replace(self.st, block);
            self.st.dirty.insert(block, dirty);
        }
    }
}

impl Core {
    /// Shows others what the state says.
    pub fn publish(&self, st: &State) {
        if self.ctx.domain.is_salted() {
            *self.id_hint.lock() = st.file_id;
        }
        let (is_dirty, buffered) = (self.needs_commit(st), self.buffered_len(st) as u64);
        let mut shown = self.beside.shown.lock();
        (shown.size, shown.is_dirty, shown.buffered) = (st.size, is_dirty, buffered);
    }

    /// Logical size, bytes.
    pub fn shown_size(&self) -> u64 {
        self.beside.shown.lock().size
    }

    /// Whether buffered writes wait, or a time that is to be set with them.
    pub fn is_dirty(&self) -> bool {
        let shown = self.beside.shown.lock();
        shown.is_dirty || shown.mtime.is_some() || !shown.late.is_empty()
    }

    /// Bytes that all buffered blocks take, without what chunks hold beyond them.
    pub fn shown_buffered(&self) -> u64 {
        let shown = self.beside.shown.lock();
        shown.buffered + (shown.late.len() * self.ctx.block_len()) as u64
    }

    /// The modification time to be shown instead of the backing file's.
    pub fn shown_mtime(&self) -> Option<Time> {
        let shown = self.beside.shown.lock();
        shown.mtime.or(shown.kept).or(shown.known)
    }

    /// To be called before the store changes the backing file's modification time by itself, outside of [`Core::keeping_mtime`].
    pub fn forget_known_mtime(&self) {
        self.beside.shown.lock().known = None;
    }

    /// Notes that the content changes now.
    pub fn note_change(&self) {
        self.beside.shown.lock().mtime = Some(Time::now());
    }

    /// The writes whose time was to be set are committed, with their time. Not where others have come meanwhile: theirs is still to be set.
    pub fn forget_mtime(&self) {
        let mut shown = self.beside.shown.lock();
        if shown.late.is_empty() {
            shown.mtime = None;
        }
    }

    /// Sets the time of buffered writes, where there is nothing to be committed but that.
    pub fn set_mtime(&self) -> Result<(), StoreError> {
        let _times = self.beside.times.lock();
        let time = self.beside.shown.lock().mtime;
        match time {
            Some(time) => self.restore(time).map_err(StoreError::io("set times", 0)),
            None => Ok(()),
        }
    }

    /// Sets the modification time. The caller holds `times`.
    fn restore(&self, time: Time) -> std::io::Result<()> {
        let done = self.backing.set_times(SetTime::Keep, SetTime::At(time));
        self.beside.shown.lock().known = done.is_ok().then_some(time);
        done
    }

    /// Sets times now; what is committed later leaves the modification time as it is.
    pub fn set_times(&self, atime: SetTime, mtime: SetTime) -> Result<(), StoreError> {
        if self.ctx.read_only {
            return Err(StoreError::ReadOnly);
        }
        let _times = self.beside.times.lock();
        let time = match mtime {
            SetTime::Keep => None,
            SetTime::At(time) => Some(time),
            SetTime::Now => Some(Time::now()),
        };
        self.backing.set_times(atime, mtime).map_err(StoreError::io("set times", 0))?;
        if let Some(time) = time {
            let mut shown = self.beside.shown.lock();
            shown.mtime = shown.mtime.map(|_| time);
            shown.kept = shown.kept.map(|_| time);
            shown.known = Some(time);
        }
        Ok(())
    }

    /// Runs an internal change of the backing file and restores its modification time: such writes are not the application's.
    pub fn keeping_mtime<T>(
        &self,
        st: &mut State,
        change: impl FnOnce(&Self, &mut State) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let kept = Kept::new(self).map_err(StoreError::io("stat", 0))?;
        let result = change(self, st);
        let restored = {
            let _times = self.beside.times.lock();
            self.shown_mtime().map_or(Ok(()), |time| self.restore(time))
        };
        drop(kept);
        match result {
            Ok(value) => restored.map(|()| value).map_err(StoreError::io("set times", 0)),
            Err(error) => Err(error),
        }
    }

    /// Does `work`, a commit or what follows one, and lets others read and write beside it.
    pub fn open_to_others<T>(&self, st: &mut State, work: impl FnOnce(&Core, &mut State) -> T) -> T {
        if !self.is_sound(st) {
            return work(self, st);
        }
        debug_assert!(
            !st.dirty.values().any(|dirty| matches!(dirty, Dirty::Elsewhere(_))),
            "copies are committed alone"
        );
        self.publish(st);
        *self.beside.seen.write() = Some(st.for_readers());
        let opened = Opened { core: self, st };
        work(self, opened.st)
    }

    /// Whether a commit now, and the barrier behind it if it `syncs`, takes so long that it is worth opening.
    pub fn takes_long(&self, st: &State, syncs: bool) -> bool {
        let has_barriers = syncs || (st.replaces && self.ctx.durability == Durability::Ordered);
        self.buffered_len(st) >= OPEN_LEN_MIN || (has_barriers && st.barrier_took.is_none_or(|took| took >= PATIENCE))
    }

    /// Whether a block that is buffered may replace one that is stored. Looks at what is in memory alone.
    fn may_replace(&self, st: &State, block: u64) -> bool {
        let (g, i) = self.geo().slot_of(block);
        match st.pages.get(&g) {
            Some(Entry::Good(held)) => held.page.keys.get(i).is_some_and(|key| *key != HOLE),
            Some(Entry::Absent) => false,
            Some(Entry::Bad(_)) => true,
            None => self.is_within(st, g),
        }
    }

    /// Reads beside an open commit.
    pub fn read_beside(&self, offset: u64, buf: &mut [u8]) -> Result<Attempt<usize>, StoreError> {
        let seen = self.beside.seen.read();
        let Some(seen) = &*seen else { return Ok(Attempt::Closed) };
        let shown = self.beside.shown.lock();
        let size = shown.size;
        let Some((first, last)) = self.touched(size, offset, buf.len()) else { return Ok(Attempt::Done(0)) };
        let late: BTreeMap<u64, Dirty> = shown.late.range(first..=last).map(|(b, dirty)| (*b, dirty.clone())).collect();
        drop(shown);
        if !self.are_still(seen, first, last) {
            return Ok(Attempt::Refused);
        }
        let Some(view) = self.view(seen, first, last)? else { return Ok(Attempt::Refused) };
        let read = self.read_sound(&view.with(size, late), offset, buf)?;
        Ok(read.map_or(Attempt::Refused, Attempt::Done))
    }

    /// Whether the pages of blocks `first..=last` are in memory, or not written by the commit.
    fn are_still(&self, st: &State, first: u64, last: u64) -> bool {
        let geo = self.geo();
        let is_written = |g: u64| {
            let first = geo.first_block(g);
            let has_dirty = st.dirty.range(first..first + geo.blocks_per_page()).next().is_some();
            has_dirty || [0, geo.last_page(st.disk_size), geo.last_page(st.size)].contains(&g)
        };
        // Those past the end are void, and nobody reads them.
        let is_still = |g: u64| st.pages.contains_key(&g) || !self.is_within(st, g) || !is_written(g);
        (geo.slot_of(first).0..=geo.slot_of(last).0).all(is_still)
    }

    /// Whether blocks `first..=last` can be committed later: no page of theirs is damaged.
    fn are_good(&self, seen: &State, first: u64, last: u64) -> bool {
        if !self.are_still(seen, first, last) {
            return false;
        }
        // An error is met again by who has the state.
        let Ok(Some(view)) = self.view(seen, first, last) else { return false };
        (self.geo().slot_of(first).0..=self.geo().slot_of(last).0)
            .all(|g| !matches!(view.entry(g), Some(Entry::Bad(_))))
    }

    /// Takes a write of whole blocks, beside an open commit.
    pub fn write_beside(&self, offset: u64, data: &[u8], ahead: &Ahead) -> Attempt<()> {
        let seen = self.beside.seen.read();
        let Some(seen) = &*seen else { return Attempt::Closed };
        let (geo, len) = (self.geo(), self.ctx.block_len());
        let size = geo.block_size();
        let end = offset.saturating_add(data.len() as u64);
        if data.is_empty() || !offset.is_multiple_of(size) || !end.is_multiple_of(size) || end > geo.size_max() {
            return Attempt::Refused;
        }
        let (first, last) = (offset / size, end / size - 1);
        let backing_len = geo.block_offset(last) + size;
        let fits = backing_len <= seen.len.max(seen.len_possible) || self.backing.check_len(backing_len).is_ok();
        if !fits || !ahead.is_for(&self.ctx, seen.file_id) || !self.are_good(seen, first, last) {
            return Attempt::Refused;
        }
        let mut shown = self.beside.shown.lock();
        let is_full = (shown.late.len() + (last - first + 1) as usize) * len > LATE_LEN_MAX
            || seen.chunk_len.load(Ordering::Relaxed) > REPLACE_BUFFER_LEN + LATE_LEN_MAX;
        if offset > shown.size || is_full {
            return Attempt::Refused;
        }
        for (block, bytes) in (first..=last).zip(data.chunks_exact(len)) {
            let dirty = match ahead.block(block, len) {
                Some(sealed) => Dirty::Sealed(sealed),
                None => Dirty::Data(super::block::Block::of(bytes)),
            };
            shown.late.insert(block, dirty);
        }
        shown.size = shown.size.max(end);
        shown.mtime = Some(Time::now());
        Attempt::Done(())
    }

    /// Whether nothing is left of a failure, of a crash or of damage. What is makes the next commit or settling mend it first, which may change what blocks hold, and
    /// pages that readers beside it would look at.
    fn is_sound(&self, st: &State) -> bool {
        st.prepared
            && !(st.cut_open || st.barrier_failed || st.unsure)
            && st.unsure_pages.is_empty()
            && st.lost_from.is_none()
            && st.unknown_from.is_none()
            && st.refused.is_none()
            && !self.may_lack_pages(st)
    }
}

/// Keeps the backing file's modification time in [`Shown::kept`] until it is dropped, by a panic too; by the outermost of several.
struct Kept<'a> {
    core: &'a Core,
    is_outermost: bool,
}

impl<'a> Kept<'a> {
    fn new(core: &'a Core) -> std::io::Result<Kept<'a>> {
        let _times = core.beside.times.lock();
        let is_outermost = core.beside.shown.lock().kept.is_none();
        if is_outermost {
            let before = core.backing.stat()?.mtime;
            core.beside.shown.lock().kept = Some(before);
        }
        Ok(Kept { core, is_outermost })
    }
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        if self.is_outermost {
            self.core.beside.shown.lock().kept = None;
        }
    }
}

impl State {
    /// What readers need of it.
    fn for_readers(&self) -> State {
        State {
            size: self.size,
            disk_size: self.disk_size,
            floor: self.floor,
            file_id: self.file_id,
            pages: self.pages.clone(),
            dirty: self.dirty.clone(),
            unresolved: self.unresolved.clone(),
            len: self.len,
            len_possible: self.len_possible,
            chunk_len: self.chunk_len.clone(),
            sparse: self.sparse,
            unsealed_empty: self.unsealed_empty,
            ..State::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::convert::Infallible;

    /// The state that is had with the last try is handed on: to let go of it and wait in line would be to wait for oneself.
    #[test]
    fn the_state_is_handed_on_whenever_it_comes() {
        for at in [0, 1, 2, TRIES_MAX - 1, TRIES_MAX, TRIES_MAX + 1] {
            let tries = Cell::new(0);
            let had = (at == 0).then_some(0);
            let again = || {
                tries.set(tries.get() + 1);
                (tries.get() == at).then_some(at)
            };
            let Ok(got) = or_hold(had, || Ok::<Attempt<()>, Infallible>(Attempt::Closed), again);
            assert_eq!(got, ControlFlow::Continue((at <= TRIES_MAX).then_some(at)), "at try {at}");
            assert_eq!(tries.get(), at.min(TRIES_MAX));
        }
    }
}
