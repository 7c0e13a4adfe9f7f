//! Committing, settling, syncing: when buffers go to the store, when pending bits are cleared, and what fsync covers in
//! addition to the file.
//!
//! One barrier of the whole store serves any number of files: their marks are taken before it, and each is settled up
//! to its mark after it.

use crate::anchored::RECOVERY_STEP;
use crate::error::io;
use crate::handles::{Millis, OpenFile};
use crate::inode::StoreId;
use crate::{HandleId, Ino, ROOT, Result, Vault, VaultError};
use lamassu_anchor::ObjectId;
use lamassu_store::StoreError;
use lamassu_store::file::Mark;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Buffers older than this are committed by [`Vault::maintain`].
const COMMIT_AFTER: Millis = 5_000;
/// Files whose oldest unsettled write is older than this are settled: within 30 s even if `maintain` comes every few
/// seconds only.
const SETTLE_AFTER: Millis = 20_000;
/// Bytes that all files together may buffer, and how many bytes may be written between two checks of that.
const BUFFERS_MAX: u64 = 256 << 20;
const BUFFERS_LOOK_EVERY: u64 = 32 << 20;
/// A session whose writes have all been settled for this time is closed: then its pages, if a store kept them, have no
/// pending state any more.
const CLOSE_AFTER: Millis = 60_000;
/// With more unsynced names than this, `maintain` syncs the store to forget them.
const UNSYNCED_MAX: usize = 65_536;

/// After the store took too little of the buffers, writes are refused without an attempt for this time: each attempt
/// seals all of it again.
const OVERFULL: Duration = Duration::from_secs(1);

/// The buffers exceed their limit, since the store does not take them.
#[derive(Clone, Copy)]
pub(crate) struct Overfull {
    since: Instant,
    errno: i32,
}

fn refused(errno: i32) -> VaultError {
    io("write")(std::io::Error::from_raw_os_error(errno))
}

fn errno_of(error: &StoreError) -> Option<i32> {
    if let StoreError::Io { source, .. } = error { source.raw_os_error() } else { None }
}

/// Entries that were made or moved in this mount and whose parent directory is not known to be synced since.
#[derive(Default)]
pub(crate) struct Unsynced {
    /// Each with its number. A sync covers the numbers that were given before it began.
    entries: Mutex<(HashMap<StoreId, u64>, u64)>,
}

impl Unsynced {
    pub fn add(&self, id: StoreId) {
        let (entries, last) = &mut *self.entries.lock();
        *last += 1;
        entries.insert(id, *last);
    }

    /// The entry is gone.
    pub fn remove(&self, id: StoreId) {
        self.entries.lock().0.remove(&id);
    }

    /// The number of an entry that is not synced.
    fn number(&self, id: StoreId) -> Option<u64> {
        self.entries.lock().0.get(&id).copied()
    }

    fn len(&self) -> usize {
        self.entries.lock().0.len()
    }

    /// The last number given.
    fn last(&self) -> u64 {
        self.entries.lock().1
    }

    /// The entry is synced as it was when it had `number`.
    fn synced(&self, id: StoreId, number: u64) {
        let (entries, _) = &mut *self.entries.lock();
        if entries.get(&id) == Some(&number) {
            entries.remove(&id);
        }
    }

    /// Everything up to `number` is synced.
    fn all_synced(&self, number: u64) {
        self.entries.lock().0.retain(|_, n| *n > number);
    }
}

/// Barriers of the whole store, one at a time. The store tells one caller only that it has lost something. So the next
/// barrier begins when that is noted in all that it concerns.
#[derive(Default)]
pub(crate) struct Barriers {
    begun: AtomicU64,
    failed: AtomicU64,
    /// The number of the last one that succeeded.
    last_good: Mutex<u64>,
}

/// The first error of several steps; all steps are done.
struct First(Result<()>);

impl First {
    fn note(&mut self, result: Result<()>) {
        if let (Err(e), Ok(())) = (result, &self.0) {
            self.0 = Err(e);
        }
    }
}

/// Settles what the store's barrier has covered, with a barrier of the file's own if that one did not count for it.
fn settle_file(open: &OpenFile, mark: Mark) -> std::result::Result<(), StoreError> {
    let file = open.file();
    file.settle(mark)?;
    let written_since = open.unsettled_since.load(Ordering::Relaxed) != 0;
    if file.needs_settle() && !written_since { file.settle_now() } else { Ok(()) }
}

impl Vault {
    /// A barrier for the whole store. On success every name made before it is durable.
    pub(crate) fn sync_store(&self) -> Result<()> {
        let begun = self.anchored.as_ref().map(|anchored| (anchored, anchored.before_barrier()));
        let last = self.unsynced.last();
        self.barrier()?;
        // Only now: an fsync meanwhile must still find the file's name among the unsynced ones.
        self.unsynced.all_synced(last);
        begun.map_or(Ok(()), |(anchored, begun)| anchored.after_barrier(begun))
    }

    /// A barrier of its own, or one that began after this call. It also fails if another one does meanwhile: that one
    /// got the report about what this one should have covered.
    fn barrier(&self) -> Result<()> {
        let barriers = &self.barriers;
        let (begun, failed) = (barriers.begun.load(Ordering::Acquire), barriers.failed.load(Ordering::Acquire));
        let mut last_good = barriers.last_good.lock();
        if barriers.failed.load(Ordering::Acquire) != failed {
            return Err(io("sync the store")(std::io::Error::from_raw_os_error(libc::EIO)));
        }
        if *last_good > begun {
            return Ok(());
        }
        let number = barriers.begun.fetch_add(1, Ordering::AcqRel) + 1;
        match self.backend.sync() {
            Ok(()) => *last_good = number,
            Err(error) => {
                // In this order: who takes this failure for its own has written before the files are told, and is told.
                barriers.failed.fetch_add(1, Ordering::AcqRel);
                self.note_failed_barrier();
                return Err(io("sync the store")(error));
            }
        }
        Ok(())
    }

    /// The store has lost a write of any file, and will not say so again. Open files write again what it concerns. What
    /// files have left that were closed since the last barrier is no longer known to be in the store: it is judged like
    /// that of a killed process, in this session and, since this one stays open, in later ones.
    fn note_failed_barrier(&self) {
        // In this order: a file that is closed in between is either told or forgotten.
        self.files.all().iter().for_each(|open| open.file().barrier_failed());
        if let Some(anchored) = &self.anchored {
            anchored.files.barrier_failed();
        }
        if self.ctx.sessions.is_under_way() {
            self.ctx.sessions.note_left_behind();
        }
    }

    /// Makes everything durable by `settle`, with a second attempt if the store failed. The store reports a lost
    /// barrier once; open files then write again what it concerns. But it may also concern a small file that was closed
    /// before, and is no longer in memory. So a lost barrier is reported whatever the second attempt gives.
    pub(crate) fn settle_twice(&self, settle: impl Fn(&Self) -> Result<()>) -> Result<()> {
        let failed_before = self.barriers.failed.load(Ordering::Acquire);
        let Err(first) = settle(self) else { return Ok(()) };
        // The first attempt gave damaged data up, so the second would not report it.
        let is_damaged = matches!(first, VaultError::Damaged { .. } | VaultError::Store(StoreError::Damaged(_)));
        let second = self.with_room_of_closes(|| settle(self));
        let is_lost = is_damaged || self.barriers.failed.load(Ordering::Acquire) != failed_before;
        match second {
            Ok(()) if is_lost => Err(first),
            second => second,
        }
    }

    /// Commits and settles `files`, and drops those without handles. Files that fail stay as they are, for the next
    /// attempt.
    pub(crate) fn settle(&self, files: Vec<Arc<OpenFile>>) -> Result<()> {
        let done = self.settle_marked(files);
        // A removal may be due now.
        done.and(self.carry_out().map(drop))
    }

    fn settle_marked(&self, files: Vec<Arc<OpenFile>>) -> Result<()> {
        let _one_at_a_time = self.settling.lock();
        let mut first = First(Ok(()));
        let mut marked = Vec::with_capacity(files.len());
        for open in files {
            // Another pass may have settled and dropped it; if it is open again, that is another `File`.
            if !self.files.get(open.ino).is_some_and(|now| Arc::ptr_eq(&now, &open)) {
                continue;
            }
            // Before the commit: a concurrent write sets it again.
            let since = open.unsettled_since.swap(0, Ordering::Relaxed);
            match open.flush() {
                Ok(()) => marked.push((open.file().covered_mark(), open)),
                Err(e) => {
                    open.unsettled_since.store(since, Ordering::Relaxed);
                    self.failed(&open, e, &mut first);
                }
            }
        }
        if marked.is_empty() && first.0.is_err() {
            return first.0;
        }
        // Even if another pass has settled all of them: its barrier may have begun before the last write.
        let synced = self.sync_store();
        let is_synced = synced.is_ok();
        first.note(synced);
        let (marked, failed) = self.commit_covered(marked, is_synced);
        for (open, e) in failed {
            self.failed(&open, e, &mut first);
        }
        for (mark, open) in marked {
            match settle_file(&open, mark) {
                // A file that is still unsettled, and was not written since, has a damaged block, which never settles.
                Ok(()) => self.let_go_if(open.ino, |open| {
                    let is_stuck = open.unsettled_since.load(Ordering::Relaxed) == 0 && !open.file().is_dirty();
                    is_stuck || !open.is_unsettled()
                }),
                Err(e) => self.failed(&open, e, &mut first),
            }
        }
        first.0
    }

    /// Failures of the store are tried again. A commit that damage prevents never succeeds, and is given up with the
    /// last handle.
    fn failed(&self, open: &OpenFile, e: StoreError, first: &mut First) {
        // It was removed meanwhile, and is not open: there is nothing to commit.
        if !self.files.get(open.ino).is_some_and(|now| std::ptr::eq(&raw const *now, open)) {
            return;
        }
        let file = self.tag(open.ino);
        if matches!(e, StoreError::Damaged(_)) && self.files.is_idle(open.ino) {
            tracing::error!(file, error = %e, "given up: the file is damaged where the change belongs");
            self.let_go(open.ino, true);
        } else {
            tracing::error!(file, error = %e, "a file could not be committed; it will be tried again");
            open.touched(self.now());
        }
        first.note(Err(e.into()));
    }

    /// To be called before `len` bytes are written at `offset`. Keeps the buffers of all files together within a limit:
    /// after every [`BUFFERS_LOOK_EVERY`] bytes the largest are committed if necessary.
    ///
    /// # Errors
    /// The store's error if it takes too little of them: then nothing more may be buffered. After a while it is tried
    /// again.
    pub(crate) fn bound_buffers(&self, offset: u64, len: usize) -> Result<()> {
        let overfull = *self.overfull.lock();
        match overfull {
            Some(Overfull { since, errno }) if since.elapsed() < OVERFULL => return Err(refused(errno)),
            Some(_) => {}
            None if self.written_little(offset, len as u64) => return Ok(()),
            None => {}
        }
        self.written.store(0, Ordering::Relaxed);
        let mut files: Vec<_> = self.files.all().into_iter().map(|f| (f.file().dirty_len(), f)).collect();
        let mut total: u64 = files.iter().map(|(len, _)| len).sum();
        let mut errno = libc::EIO;
        if total > BUFFERS_MAX {
            files.sort_by_key(|(len, _)| std::cmp::Reverse(*len));
            for (len, open) in files {
                if total <= BUFFERS_MAX / 2 {
                    break;
                }
                match open.flush() {
                    Ok(()) => total -= len,
                    Err(e) => {
                        errno = errno_of(&e).unwrap_or(errno);
                        self.failed(&open, e, &mut First(Ok(())));
                    }
                }
            }
        }
        let is_over = total > BUFFERS_MAX;
        *self.overfull.lock() = is_over.then(|| Overfull { since: Instant::now(), errno });
        if is_over { Err(refused(errno)) } else { Ok(()) }
    }

    /// Counts the blocks of a write. Returns whether it is too early to check the buffers again.
    fn written_little(&self, offset: u64, len: u64) -> bool {
        let size = self.ctx.geometry.block_size();
        // A byte takes a whole block.
        let blocks = offset.saturating_add(len).div_ceil(size) - offset / size;
        let written = blocks * size;
        self.written.fetch_add(written, Ordering::Relaxed) + written < BUFFERS_LOOK_EVERY
    }

    fn unsettled(&self, mut files: Vec<Arc<OpenFile>>) -> Vec<Arc<OpenFile>> {
        files.retain(|f| f.is_unsettled());
        files
    }

    /// Settles the files without handles. Those that fail again are given up once the table is twice over its bound:
    /// memory is bounded.
    pub(crate) fn settle_idle(&self) -> Result<()> {
        let done = self.settle(self.unsettled(self.files.idle()));
        if done.is_err() && self.files.idle_count() > 2 * self.idle_max {
            for open in self.files.idle() {
                tracing::error!(file = self.tag(open.ino), "given up: what was written since its last commit is lost");
                self.let_go(open.ino, true);
            }
        }
        done
    }

    /// Commits, makes durable and settles everything, without passing the gate. Files that fail stay as they are; all
    /// others are done.
    pub(crate) fn settle_all(&self) -> Result<()> {
        let files = self.unsettled(self.files.all());
        let mut first = First(Ok(()));
        if !files.is_empty() {
            first.note(self.settle(files));
        } else if self.anchored.is_none() {
            first.note(self.sync_store());
        }
        // Even if a file could not be committed: the others must not wait for it, or be lost with it.
        first.note(self.anchor_all());
        first.0
    }

    pub(crate) fn maintain_at(&self, now: Millis) -> Result<()> {
        if self.options.read_only {
            return Ok(());
        }
        self.close_quiet_session(now)?;
        let Some(_pass) = self.gate.try_enter() else { return Ok(()) };
        let older = |since: &AtomicU64, age: Millis| {
            let since = since.load(Ordering::Relaxed);
            since != 0 && now.saturating_sub(since) >= age
        };
        let gains = self.room.gains();
        let all = self.unsettled(self.files.all());
        let (settle, rest): (Vec<_>, Vec<_>) = all.into_iter().partition(|f| older(&f.unsettled_since, SETTLE_AFTER));
        let mut first = First(Ok(()));
        for open in rest.iter().filter(|f| older(&f.dirty_since, COMMIT_AFTER)) {
            match open.flush() {
                // A file that was closed while the store failed, and has nothing left to settle.
                Ok(()) => self.let_go(open.ino, false),
                Err(e) => self.failed(open, e, &mut first),
            }
        }
        if !settle.is_empty() {
            first.note(self.settle(settle));
        } else if self.unsynced.len() > UNSYNCED_MAX {
            first.note(self.sync_store());
        }
        self.settle_moves();
        first.note(self.commit_anchor_at(now));
        first.note(self.recover_for(RECOVERY_STEP).map(drop));
        self.clear_more();
        self.remove_more_records();
        first.0.inspect_err(|_| self.room.doubt_refusals(gains))
    }

    /// Ends the current session if nothing was written for a while. Changes wait for the time of a barrier that has
    /// nothing to write.
    fn close_quiet_session(&self, now: Millis) -> Result<()> {
        let sessions = &self.ctx.sessions;
        // One that has left something behind is never closed.
        if sessions.are_closed() || sessions.has_left_behind() || self.files.all().iter().any(|f| f.is_unsettled()) {
            self.quiet_since.store(0, Ordering::Relaxed);
            return Ok(());
        }
        let quiet_since = self.quiet_since.load(Ordering::Relaxed);
        if quiet_since == 0 {
            self.quiet_since.store(now, Ordering::Relaxed);
            return Ok(());
        }
        let Some(_closing) = self.closing.try_lock().filter(|_| now.saturating_sub(quiet_since) >= CLOSE_AFTER) else {
            return Ok(());
        };
        self.quiet_since.store(0, Ordering::Relaxed);
        if !self.gate.close() {
            return Ok(()); // frozen: the freeze has ended it
        }
        // Again, now that no thread writes.
        let done = self.settle_all().and_then(|()| self.sync_store());
        if done.is_ok() {
            self.end_session();
        }
        self.gate.open();
        done
    }

    /// Does in the background what calls would have to do later. To be called when [`crate::Upkeep`] asks for it.
    ///
    /// # Errors
    /// As [`Vault::maintain`].
    pub fn work_off(&self) -> Result<()> {
        let Some(_pass) = self.gate.try_enter().filter(|_| !self.options.read_only) else { return Ok(()) };
        let gains = self.room.gains();
        let mut first = First(self.work_off_departures());
        for open in self.files.all().into_iter().filter(|open| open.file().wants_commit()) {
            if let Err(e) = open.flush() {
                self.failed(&open, e, &mut first);
            }
        }
        if self.files.idle_count() >= self.idle_max / 2 {
            first.note(self.settle_idle());
        }
        self.clear_more();
        self.remove_more_records();
        first.0.inspect_err(|_| self.room.doubt_refusals(gains))
    }

    /// To be called every few seconds: commits buffers older than 5 s, settles files at most 30 s after their last
    /// write, gives memory back.
    ///
    /// # Errors
    /// The first failure. The rest was done, and what failed is tried again next time.
    pub fn maintain(&self) -> Result<()> {
        lamassu_store::file::trim_spare();
        self.maintain_at(self.now())
    }

    /// Commits, makes durable and settles everything.
    ///
    /// # Errors
    /// As [`Vault::maintain`].
    pub fn sync_all(&self) -> Result<()> {
        if self.options.read_only {
            return Ok(());
        }
        // Frozen: everything is settled already.
        let Some(_pass) = self.gate.enter_unless_still() else { return Ok(()) };
        self.settle_twice(Vault::settle_all)
    }

    /// Whether the end of this process would lose nothing: no write is buffered, and the anchor has no queued change.
    pub(crate) fn is_committed(&self) -> bool {
        let is_dirty = |open: &Arc<OpenFile>| open.is_writable() && open.file().is_dirty();
        let is_queued = self.anchored.as_ref().is_some_and(|anchored| !anchored.anchor.queued_about().is_empty());
        !is_queued && !self.files.all().iter().any(is_dirty)
    }

    /// Commits, settles, and blocks every change until [`Vault::thaw`]. Reads go on. A frozen vault stays so.
    ///
    /// # Errors
    /// As [`Vault::maintain`]; the vault is then not frozen.
    pub fn freeze(&self) -> Result<()> {
        let _closing = self.closing.lock();
        if self.options.read_only || !self.gate.close() {
            return Ok(());
        }
        // The second barrier is for copies that are made below the page cache.
        let done = self.settle_all().and_then(|()| self.sync_store());
        match done {
            Ok(()) => {
                // A copy made now contains no change under way, and its record of sessions says so.
                self.close_workshop();
                self.end_session_for_good();
                self.gate.now_still();
            }
            Err(_) => self.gate.open(),
        }
        done
    }

    /// Ends the freeze.
    ///
    /// # Errors
    /// None today.
    pub fn thaw(&self) -> Result<()> {
        self.gate.open();
        Ok(())
    }

    /// Whether changes wait for [`Vault::thaw`].
    pub fn is_frozen(&self) -> bool {
        self.gate.is_closed()
    }

    /// fsync(2), or fdatasync(2) if `data_only`: the file, and every directory above it in which an entry of its path
    /// was made in this mount and not synced since.
    ///
    /// # Errors
    /// [`VaultError::BadHandle`], those of the store.
    pub fn fsync(&self, handle: HandleId, data_only: bool) -> Result<()> {
        self.with_room(|| self.fsync_once(handle, data_only))
    }

    fn fsync_once(&self, handle: HandleId, data_only: bool) -> Result<()> {
        let (open, _) = self.file_of(handle)?;
        self.left.tell_lost(handle, true)?;
        // Frozen: everything is durable already, so the caller need not wait.
        let Some(_pass) = self.sync_pass() else { return Ok(()) };
        if open.is_writable() {
            open.dirty_since.store(0, Ordering::Relaxed);
            if let Err(e) = if data_only { open.file().sync() } else { open.file().sync_all() } {
                open.touched(self.now());
                return Err(e.into());
            }
        } else if !data_only {
            // Its attributes may have changed nevertheless.
            open.file().backing().sync_all().map_err(io("sync a file"))?;
        }
        // fdatasync too promises that the data can be found again.
        self.anchor_object(open.ino, || self.sync_way_to(open.ino))
    }

    /// fsync(2) of a directory.
    ///
    /// # Errors
    /// As [`Vault::fsync`].
    pub fn fsync_dir(&self, handle: HandleId) -> Result<()> {
        let open = self.dir_of(handle)?;
        self.left.tell_lost(handle, true)?;
        let (Some(dir), Some(_pass)) = (&open.dir, self.sync_pass()) else { return Ok(()) };
        let ino = open.ino;
        self.anchor_dir(ino, || {
            dir.handle.sync().map_err(io("sync a directory"))?;
            Ok(self.sync_way_to(ino)?.is_some())
        })
    }

    /// `None` if nothing can be left to sync: read-only, or frozen.
    fn sync_pass(&self) -> Option<crate::gate::Pass<'_>> {
        if self.options.read_only { None } else { self.gate.enter_unless_still() }
    }

    /// Syncs the directories on the path of an inode whose entries there may not be synced. Returns the directory in
    /// which the inode has its name on this path, or no object's number if it has none; `None`: one of them has moved,
    /// and is not synced.
    fn sync_way_to(&self, ino: Ino) -> Result<Option<ObjectId>> {
        let _tree = self.tree.read();
        let mut is_synced = true;
        let (chain, dir) = {
            let nodes = self.nodes.lock();
            let chain = nodes.ancestry(ino).unwrap_or_default();
            let dir = chain.get(1).map_or(ObjectId::default(), |dir| nodes.object(*dir));
            (chain, dir)
        };
        for pair in chain.windows(2) {
            let [below, parent] = pair else { continue };
            let Some(id) = self.nodes.lock().id(*below) else { continue };
            let Some(number) = self.unsynced.number(id).filter(|_| *below != ROOT) else { continue };
            match self.dir(*parent).and_then(|d| d.handle.sync().map_err(io("sync a directory"))) {
                Ok(()) => self.unsynced.synced(id, number),
                Err(VaultError::Stale | VaultError::NotFound) => is_synced = false,
                Err(e) => return Err(e),
            }
        }
        Ok(is_synced.then_some(dir))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_sync_covered_is_synced() {
        let unsynced = Unsynced::default();
        let [a, b] = [1, 2].map(|inode| StoreId { dev: 1, ino: inode, born: 0 });
        unsynced.add(a);
        let before = unsynced.last();
        assert!(unsynced.number(a).is_some(), "it is unsynced until the sync is done");
        unsynced.add(b);
        unsynced.all_synced(before);
        assert_eq!((unsynced.number(a), unsynced.len()), (None, 1));
        let number = unsynced.number(b).expect("made since");
        unsynced.add(b);
        unsynced.synced(b, number);
        assert!(unsynced.number(b).is_some(), "moved once more since");
        unsynced.remove(b);
        assert_eq!(unsynced.len(), 0);
    }
}
