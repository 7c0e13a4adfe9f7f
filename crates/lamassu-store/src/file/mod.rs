//! An encrypted file: segments, pages, the commit protocol and recovery (`docs/format.md` §8 to §13).
//!
//! Guarantee: each block of the file is old or new after a crash, whatever was synced is new, and nothing durable
//! becomes unreadable, provided the store writes B bytes atomically where it replaces data and 4096 bytes for pages.
//! Damage is an error for the range it concerns, never wrong data.
//!
//! Writers must have issued a [`crate::Backend::sync`] after they took the vault's lock: then what an earlier process
//! left in the page cache is durable, and a page without pending bits is really clean.
//!
//! | module | what it does |
//! |---|---|
//! | `state/` | what is known of an open file, in parts with their own invariants; no I/O |
//! | `primitives` | primitives: read, barrier, page read and write, shorten, punch |
//! | `barrier`, `recover` | barriers after failures; loading pages and resolving interrupted commits |
//! | `open` | finding the last page and the size |
//! | `plan`, `ciphertext`, `round`, `commit` | what a round changes, its ciphertext, its steps; the rounds of a commit |
//! | `settle`, `shrink` | what follows a barrier; making a file shorter |
//! | `read`, `write`, `seek`, `copy` | the operations of a file's users |
//! | `form`, `profile` | how blocks are keyed and stored by the file's profile; changing it |
//! | `check`, `rekey` | verifying a whole file; bringing it to the newest keys |
//! | `concurrent`, `presealed` | what runs during a commit; blocks sealed before the lock is taken |
//! | `anchored`, `fresh`, `page_tree`, `judge`, `anchor_commit` | files of anchored vaults: what is current, what a crash left, what the anchor learns |
//! | `survey` | the row that an anchor would have of a file |
//! | `blocks`, `scrub`, `beside`, `fetching` | the tree over stored blocks; verifying without a key; tree records fetched along with pages |
//! | `session`, `types`, `block` | sessions of writers; shared types and errors; memory for plaintext |
//!
//! The invariants I1 to I14 that comments name are those of `docs/format.md` section 13. The order of locks is in
//! `concurrent`.

mod anchor_commit;
mod anchored;
mod barrier;
mod beside;
mod block;
mod blocks;
mod check;
mod ciphertext;
mod commit;
mod concurrent;
mod copy;
mod fetching;
mod form;
mod fresh;
mod judge;
mod open;
mod page_tree;
mod plan;
mod presealed;
mod primitives;
mod profile;
mod read;
mod recover;
mod rekey;
mod round;
mod scrub;
mod seek;
mod session;
mod settle;
mod shrink;
mod state;
mod survey;
mod types;
mod write;

pub use anchored::{AnchoredFiles, ClosedFiles, TreeOf, Trees};
pub use fetching::Fetching;
pub use presealed::{trim_spare, wipe_spare};
pub use rekey::{Rekey, RekeyStep};
pub use scrub::{FileScrub, ScrubContext, StaleRanges};
pub use session::{Ended, SessionKeeper, Sessions, Standing};
pub use state::Mark;
pub use survey::Surveyed;
pub use types::{
    Damage, DamageKind, Durability, FileCheck, FileContext, FileTag, FirstPage, Hole, Integrity, Reporter, StoreError,
};

use self::primitives::Core;
use crate::backend::{BackendFile, SetTime, Stat, Time};
use concurrent::{Exclusive, PATIENCE};
use fresh::Fresh;
use lamassu_anchor::ObjectId;
use lamassu_format::tree::Shape;
use lamassu_format::{FileId, PageNo, Profile};
use parking_lot::{RwLock, RwLockReadGuard};
use presealed::Presealed;
use state::State;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use write::Committer;

/// How much a search for data looks at before it lets other calls go on: what pages cover, bytes.
const LOOKED_AT_MAX: u64 = 256 << 20;

/// An open encrypted file. Methods take `&self` and may be called from several threads.
pub struct File {
    core: Core,
    state: RwLock<State>,
    /// Bytes of chunks that sealed blocks in the buffer lie in, without the lock.
    chunk_len: Arc<AtomicUsize>,
    /// How many barriers have failed, without the lock.
    lost_barriers: Arc<AtomicU64>,
}

impl File {
    /// Opens a backing file. `tag` names it in reports. Reads page 0 and the last page. Damage there does not prevent
    /// opening; reads of the damaged ranges give errors. Writes nothing.
    pub fn open(ctx: Arc<FileContext>, backing: Arc<dyn BackendFile>, tag: &str) -> Result<File, StoreError> {
        let len = backing.stat().map_err(StoreError::io("stat", 0u64))?.len;
        Self::open_with_len(ctx, backing, len, tag)
    }

    /// The same for a backing file whose stat has just shown this length.
    pub fn open_with_len(
        ctx: Arc<FileContext>,
        backing: Arc<dyn BackendFile>,
        len: u64,
        tag: &str,
    ) -> Result<File, StoreError> {
        Self::open_core(Core::new(ctx, backing, tag, None), len)
    }

    /// The size in the pages of a backing file whose stat has just shown this length. It reads no block, so it also
    /// works for files that do not open because their hash is not approved.
    ///
    /// # Errors
    /// As [`File::open_object`].
    pub fn recorded_size(
        ctx: Arc<FileContext>,
        backing: Arc<dyn BackendFile>,
        len: u64,
        tag: &str,
        object: ObjectId,
    ) -> Result<u64, StoreError> {
        Ok(Self::open_pages(ctx, backing, len, tag, object)?.size())
    }

    /// The same with what [`File::first_page`] tells.
    ///
    /// # Errors
    /// As [`File::open_object`].
    pub fn first_page_of(
        ctx: Arc<FileContext>,
        backing: Arc<dyn BackendFile>,
        len: u64,
        tag: &str,
        object: ObjectId,
    ) -> Result<(u64, FirstPage), StoreError> {
        let file = Self::open_pages(ctx, backing, len, tag, object)?;
        Ok((file.size(), file.first_page()?))
    }

    /// For callers that read no block.
    fn open_pages(
        ctx: Arc<FileContext>,
        backing: Arc<dyn BackendFile>,
        len: u64,
        tag: &str,
        object: ObjectId,
    ) -> Result<File, StoreError> {
        let open = |fresh| Self::open_any(Core::new(ctx.clone(), backing, tag, fresh), len);
        match &ctx.anchored {
            Some(files) => Fresh::opened(&ctx, files, object, |fresh| open(Some(fresh))),
            None => open(None),
        }
    }

    fn open_core(core: Core, len: u64) -> Result<File, StoreError> {
        let file = Self::open_any(core, len)?;
        file.core.ctx.check_approved(file.profile().0)?;
        Ok(file)
    }

    fn open_any(core: Core, len: u64) -> Result<File, StoreError> {
        let state = core.open_state(len)?;
        core.publish(&state);
        let (chunk_len, lost_barriers) = (state.buffer.chunk_len(), state.failures.lost_barriers());
        Ok(File { core, chunk_len, lost_barriers, state: RwLock::new(state) })
    }

    /// Opens the backing file of an object of the anchor, whose stat has just shown this length. If sessions that ended
    /// may have changed it since its row was committed, it is recovered first: its pages are judged.
    ///
    /// # Errors
    /// As [`File::open`]; [`StoreError::Anchor`].
    pub fn open_object(
        ctx: Arc<FileContext>,
        backing: Arc<dyn BackendFile>,
        len: u64,
        tag: &str,
        object: ObjectId,
    ) -> Result<File, StoreError> {
        let Some(files) = &ctx.anchored else { return Self::open_with_len(ctx, backing, len, tag) };
        let open = |fresh| Self::open_core(Core::new(ctx.clone(), backing, tag, Some(fresh)), len);
        let file = Fresh::opened(&ctx, files, object, open)?;
        if !ctx.read_only {
            let st = &mut *file.exclusive();
            file.core.recover(st)?;
        }
        Ok(file)
    }

    /// Takes a backing file just created, which is empty, and which its caller has just made an object of the anchor
    /// ([`Anchor::make`](lamassu_anchor::Anchor::make)).
    ///
    /// # Errors
    /// As [`File::open_object`].
    pub fn create_object(
        ctx: Arc<FileContext>,
        backing: Arc<dyn BackendFile>,
        tag: &str,
        object: ObjectId,
    ) -> Result<File, StoreError> {
        let file = Self::open_object(ctx, backing, 0, tag, object)?;
        file.note_created();
        Ok(file)
    }

    /// Takes a backing file just created, which is empty: it gets its page even if it stays so.
    pub fn create(ctx: Arc<FileContext>, backing: Arc<dyn BackendFile>, tag: &str) -> Result<File, StoreError> {
        let file = File::open_with_len(ctx, backing, 0, tag)?;
        file.note_created();
        Ok(file)
    }

    fn note_created(&self) {
        let st = &mut *self.exclusive();
        st.identity.want_page();
        st.identity.note_made(st.marks.written());
    }

    /// The backing file.
    pub fn backing(&self) -> &Arc<dyn BackendFile> {
        &self.core.backing
    }

    /// Logical size, bytes, buffered writes included.
    pub fn size(&self) -> u64 {
        self.core.published_size()
    }

    /// The id that all pages of the file carry. A file that is written gets one now if it has none; it loses it again
    /// when it comes to be one convergent page.
    ///
    /// # Errors
    /// Those of the store; no randomness.
    pub fn id(&self) -> Result<FileId, StoreError> {
        let mut st = self.exclusive();
        if self.core.ctx.read_only {
            return Ok(st.identity.id());
        }
        self.core.prepare_write(&mut st)?;
        st.identity.ensure_id()
    }

    /// Reads; short only at the end. Holes read as zeros. A read that touches damage is an error as a whole.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, StoreError> {
        let mut done = 0;
        for piece in buf.chunks_mut(read::PIECE_LEN) {
            let n = self.read_piece(offset + done as u64, piece)?;
            done += n;
            if n < piece.len() {
                break;
            }
        }
        Ok(done)
    }

    fn read_piece(&self, offset: u64, buf: &mut [u8]) -> Result<usize, StoreError> {
        let attempt = || self.core.read_concurrent(offset, buf);
        match concurrent::attempt_or_hold(self.state.try_read(), attempt, || self.state.try_read_for(PATIENCE))? {
            ControlFlow::Break(n) => Ok(n),
            ControlFlow::Continue(st) => self.read_holding(st.unwrap_or_else(|| self.state.read()), offset, buf),
        }
    }

    fn read_holding(&self, st: RwLockReadGuard<'_, State>, offset: u64, buf: &mut [u8]) -> Result<usize, StoreError> {
        if let Some(n) = self.core.read_shared(&st, offset, buf)? {
            return Ok(n);
        }
        drop(st);
        self.core.read_alone(&mut self.exclusive(), offset, buf)
    }

    /// The state, for this caller alone.
    fn exclusive(&self) -> Exclusive<'_> {
        Exclusive::new(&self.core, self.state.write())
    }

    /// Writes into the buffer of dirty blocks; commits when that grows past its bound. Extends the file.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), StoreError> {
        self.write_by(offset, data, Committer::Writer)
    }

    /// The same, but leaves the commit to the caller, who is to have another thread call [`File::flush`] if the result
    /// is true. Until that thread does, up to twice as much is buffered; then the writer commits.
    ///
    /// # Errors
    /// As [`File::write_at`].
    pub fn write_behind(&self, offset: u64, data: &[u8]) -> Result<bool, StoreError> {
        self.write_by(offset, data, Committer::Other)?;
        Ok(self.wants_commit())
    }

    /// Whether so much is buffered that a commit is due, and none is open.
    pub fn wants_commit(&self) -> bool {
        self.core.wants_commit()
    }

    fn write_by(&self, offset: u64, data: &[u8], committer: Committer) -> Result<(), StoreError> {
        let mut at = offset;
        for piece in data.chunks(write::PIECE_LEN) {
            let presealed = self.core.preseal(at, piece, &self.chunk_len, || self.sealed_as())?;
            self.write_piece(at, piece, &presealed, committer)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn write_piece(
        &self,
        offset: u64,
        piece: &[u8],
        presealed: &Presealed,
        committer: Committer,
    ) -> Result<(), StoreError> {
        let attempt = || Ok::<_, StoreError>(self.core.write_concurrent(offset, piece, presealed, committer));
        match concurrent::attempt_or_hold(self.state.try_write(), attempt, || self.state.try_write_for(PATIENCE))? {
            ControlFlow::Break(()) => Ok(()),
            ControlFlow::Continue(st) => {
                let st = st.unwrap_or_else(|| self.state.write());
                self.core.write_range(&mut Exclusive::new(&self.core, st), offset, piece, presealed, committer)
            }
        }
    }

    /// The id and the profile with which blocks are sealed before the lock is taken; no id if the keys do not depend on
    /// it.
    fn sealed_as(&self) -> Result<(FileId, Profile), StoreError> {
        let profile = Profile::of_number(self.core.profile_hint.load(Ordering::Acquire)).unwrap_or_default();
        if !form::is_salted(&self.core.ctx, profile) {
            return Ok((FileId::NONE, profile));
        }
        let hint = *self.core.id_hint.lock();
        if !hint.is_none() {
            return Ok((hint, profile));
        }
        let mut st = self.exclusive();
        self.core.prepare_write(&mut st)?;
        let (id, profile) = (st.identity.ensure_id()?, st.identity.profile());
        *self.core.id_hint.lock() = id;
        Ok((id, profile))
    }

    /// Appends atomically; returns the offset.
    pub fn append(&self, data: &[u8]) -> Result<u64, StoreError> {
        let mut st = self.exclusive();
        let offset = st.sizes.logical();
        self.core.write_range(&mut st, offset, data, &Presealed::default(), Committer::Writer)?;
        Ok(offset)
    }

    /// Copies whole blocks of another file without decrypting them: keys into the pages, ciphertext from store to
    /// store, which may share it. The blocks are committed like any others. Fewer bytes than asked for are copied if a
    /// block's content is not in ciphertext, or a tail follows. `None`: no byte was copied, and the caller must read
    /// and write. Always so if a block's key depends on its file. Both files must be of one vault.
    pub fn copy_from(&self, from: &File, from_offset: u64, offset: u64, len: u64) -> Result<Option<u64>, StoreError> {
        copy::copy(from, self, from_offset, offset, len)
    }

    /// Shrinks or grows.
    pub fn truncate(&self, size: u64) -> Result<(), StoreError> {
        self.core.set_size(&mut self.exclusive(), size)
    }

    /// Makes a range a hole; never changes the size.
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), StoreError> {
        self.core.punch_range(&mut self.exclusive(), offset, len)
    }

    /// Reserves backing space for a range; grows the file to its end unless `keep_size`.
    pub fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> Result<(), StoreError> {
        let mut st = self.exclusive();
        self.core.prepare_write(&mut st)?;
        let geo = *self.core.geo();
        let end = offset.checked_add(len).filter(|end| *end <= geo.size_max()).ok_or(StoreError::TooLarge)?;
        if len > 0 {
            let (first, last) = (geo.block_at(offset), geo.block_at(end - 1));
            let from = geo.page_offset(geo.page_of(first)).min(geo.block_offset(first));
            let until = geo.block_offset(last) + geo.block_size();
            self.core.forget_known_mtime();
            self.core.backing.allocate(from.0, until - from).map_err(StoreError::io("allocate", from))?;
        }
        match keep_size {
            true => Ok(()),
            false => self.core.grow_to(&mut st, end),
        }
    }

    /// Makes a range read as zeros; grows the file to its end unless `keep_size`.
    pub fn zero(&self, offset: u64, len: u64, keep_size: bool) -> Result<(), StoreError> {
        // Under one hold of the lock: an append in between would be cut off.
        let mut st = self.exclusive();
        self.core.punch_range(&mut st, offset, len)?;
        match keep_size {
            true => Ok(()),
            false => self.core.grow_to(&mut st, offset.checked_add(len).ok_or(StoreError::TooLarge)?),
        }
    }

    /// First data at or after `offset`, `None`: no data before the end. Other calls go on between the parts of a long
    /// search.
    pub fn seek_data(&self, offset: u64) -> Result<Option<u64>, StoreError> {
        let mut at = offset;
        while let Some(hole) = self.hole_at(at, u64::MAX, LOOKED_AT_MAX)? {
            if hole.end == at {
                return Ok(Some(at));
            }
            at = hole.end;
        }
        Ok(None)
    }

    /// The hole at `offset`, as far as `until`, and as far as pages of `most` bytes tell, but at least one. It is empty
    /// where there are data; `None` past the end. A file whose blocks were punched has pages to be looked at, so a
    /// caller that others wait for gives limits.
    pub fn hole_at(&self, offset: u64, until: u64, most: u64) -> Result<Option<Hole>, StoreError> {
        self.core.hole_at(&mut self.exclusive(), offset, until, most)
    }

    /// First hole at or after `offset`; the end counts as one. `None` past the end.
    pub fn seek_hole(&self, offset: u64) -> Result<Option<u64>, StoreError> {
        self.core.seek_hole(&mut self.exclusive(), offset, u64::MAX)
    }

    /// The same, but the search stops at `until`, which is returned then. A file without holes is searched block by
    /// block, so a caller that needs only a part gives a limit.
    pub fn seek_hole_before(&self, offset: u64, until: u64) -> Result<Option<u64>, StoreError> {
        self.core.seek_hole(&mut self.exclusive(), offset, until)
    }

    /// Writes the buffer to the store, without making it durable.
    pub fn flush(&self) -> Result<(), StoreError> {
        if self.core.ctx.read_only {
            return Ok(());
        }
        let mut st = self.exclusive();
        match self.core.takes_long(&st, false) {
            true => self.core.open_to_others(&mut st, Core::commit),
            false => self.core.commit(&mut st),
        }
    }

    /// Whether buffered writes wait.
    pub fn is_dirty(&self) -> bool {
        self.core.is_dirty()
    }

    /// Bytes of memory that buffered blocks take.
    pub fn dirty_len(&self) -> u64 {
        self.core.published_buffered().max(self.chunk_len.load(Ordering::Relaxed) as u64)
    }

    /// Whether pages on disk still carry pending bits, a stale floor, or a random page where a convergent one could be.
    /// Also true while the file is being changed.
    pub fn needs_settle(&self) -> bool {
        // The caller does not wait for a thread that holds the state.
        !self.core.ctx.read_only && self.state.try_read().is_none_or(|st| self.core.needs_settle(&st))
    }

    /// Forgets that the store refused the last commit: space came back.
    pub fn space_came_back(&self) {
        self.exclusive().buffer.forget_refusal();
    }

    /// A token that names the writes so far, for [`File::settle`].
    pub fn covered_mark(&self) -> Mark {
        self.core.mark(&mut self.exclusive())
    }

    /// After a barrier that covered this file (a successful [`crate::Backend::sync`] between `covered_mark` and this
    /// call): clears pending bits, raises the floor, cuts the backing file. `mark` is what [`File::covered_mark`]
    /// returned before the barrier.
    pub fn settle(&self, mark: Mark) -> Result<(), StoreError> {
        let mut st = self.exclusive();
        match self.core.needs_settle(&st) {
            true => self.core.open_to_others(&mut st, |core, st| core.settle(st, mark)),
            false => self.core.settle(&mut st, mark),
        }
    }

    /// Commits, makes durable and settles, with a barrier of its own.
    pub fn settle_now(&self) -> Result<(), StoreError> {
        if self.core.ctx.read_only {
            return Ok(());
        }
        let mut st = self.exclusive();
        self.core.open_to_others(&mut st, |core, st| core.commit(st).and_then(|()| core.settle_now(st)))
    }

    /// The backing file's stat, with the modification time that the file has for its users.
    ///
    /// # Errors
    /// Those of the store.
    pub fn stat(&self) -> std::io::Result<Stat> {
        // Looked up before and after the store's answer: a commit may begin in between.
        let before = self.mtime();
        let st = self.core.backing.stat()?;
        Ok(Stat { mtime: self.mtime().or(before).unwrap_or(st.mtime), ..st })
    }

    /// The modification time that `stat` must show, where that is known; `None`: the backing file's own.
    pub fn mtime(&self) -> Option<Time> {
        self.core.published_mtime()
    }

    /// Sets times now, and keeps commits of earlier writes from changing the modification time.
    pub fn set_times(&self, atime: SetTime, mtime: SetTime) -> Result<(), StoreError> {
        self.core.set_times(atime, mtime)
    }

    /// Brings pages, and with [`Rekey::Full`] blocks, to the newest keys: from page `from` on (first 0), as many as fit
    /// in a step. Call it again with [`RekeyStep::next`] until that is `None`. Pages and blocks under the newest keys
    /// are not written. Damage is counted and stays. It makes durable only what the commit protocol requires.
    ///
    /// # Errors
    /// Those of the store; [`StoreError::Damaged`] where the file cannot be written at all; [`StoreError::ReadOnly`].
    pub fn rekey(&self, work: Rekey, from: PageNo) -> Result<RekeyStep, StoreError> {
        self.core.rekey(&mut self.exclusive(), work, from)
    }

    /// Whether the first page that the store has was verified. For a file with an anchor: it is one of this object.
    /// Other files' pages are too, if they have the same content and no salt. No block is read.
    ///
    /// # Errors
    /// Those of the store.
    pub fn first_page(&self) -> Result<FirstPage, StoreError> {
        self.core.first_page(&mut self.exclusive())
    }

    /// Whether every page that this file has written is final, except for damaged blocks; on disk once a barrier has
    /// covered it.
    pub fn is_settled(&self) -> bool {
        self.core.ctx.read_only
            || (!self.is_dirty() && self.state.try_read().is_some_and(|st| self.core.is_settled(&st)))
    }

    /// Closes the file, even if other threads still refer to it. From here on it reports nothing to the anchor, and the
    /// next open takes over its state. To be called before that open, when no call changes the file any more.
    pub fn put_away(&self) {
        self.core.put_away(&mut self.exclusive());
    }

    /// The row that an anchor would have of the file as the store shows it. Opens every page, and completes what an
    /// interruption left. For an anchored file, whose pages are judged, the result is its row.
    ///
    /// # Errors
    /// [`StoreError::Damaged`] for the first page that does not open; [`StoreError::ReadOnly`] if an interruption would
    /// have to be completed; those of the store.
    pub fn survey(&self, shape: Shape) -> Result<Surveyed, StoreError> {
        self.core.survey(&mut self.exclusive(), shape)
    }

    /// Verifies every page and block; with `repair` completes interrupted commits. `progress` gets backing bytes done.
    pub fn check(&self, repair: bool, progress: &mut dyn FnMut(u64)) -> Result<FileCheck, StoreError> {
        self.core.check(&mut self.exclusive(), repair, progress)
    }
}

/// A file that is closed unsettled leaves its open commits to the next session, as a crash does.
impl Drop for File {
    fn drop(&mut self) {
        if self.core.ctx.read_only {
            return;
        }
        let st = self.state.get_mut();
        // Not in `put_away`: the store may be about to remove its last name, and then it is never opened again.
        let has_name = || self.core.backing.stat().map_or(true, |st| st.nlink > 0);
        if !self.core.is_settled(st) && has_name() {
            self.core.ctx.sessions.note_left_behind();
        }
        self.core.put_away(st);
    }
}
