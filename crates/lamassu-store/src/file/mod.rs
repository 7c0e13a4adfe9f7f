//! An encrypted file: segments, pages, the commit protocol and recovery (`docs/format.md` §8 to §13).
//!
//! Guarantee: each block of the file is old or new after a crash, whatever was synced is new, and nothing durable becomes unreadable,
//! provided the store writes B bytes atomically where it replaces data and 4096 bytes for pages. Damage is an error for the range it
//! concerns, never wrong data.
//!
//! Writers must have issued a [`crate::Backend::sync`] after they took the vault's lock: what an earlier process left in
//! the page cache then is durable, and the clean state of a page means what it says.

mod beside;
mod block;
mod check;
mod chunk;
mod ciphertext;
mod commit;
mod copy;
mod open;
mod plan;
mod read;
mod rekey;
mod seek;
mod session;
mod settle;
mod shrink;
mod state;
mod types;
mod write;
mod zeros;

pub use block::wipe_spare;
pub use chunk::trim_spare;
pub use rekey::{Rekey, RekeyStep};
pub use session::{SessionKeeper, Sessions, Standing};
pub use types::{Damage, DamageKind, Durability, FileCheck, FileContext, FileTag, Integrity, Reporter, StoreError};

use crate::backend::{BackendFile, SetTime, Stat, Time};
use beside::{Alone, PATIENCE};
use parking_lot::{RwLock, RwLockReadGuard};
use state::{Core, State};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// An open encrypted file. Methods take `&self` and may be called from several threads.
pub struct File {
    core: Core,
    state: RwLock<State>,
    /// [`State::chunk_len`], without the lock.
    chunk_len: Arc<AtomicUsize>,
    /// [`State::barriers_lost`], without the lock.
    barriers_lost: Arc<AtomicU64>,
}

impl File {
    /// Opens a backing file. `tag` names it in reports. Reads page 0 and the last page; damage there is not an error here:
    /// the file opens, and what is damaged reads as an error. Writes nothing.
    pub fn open(ctx: Arc<FileContext>, backing: Arc<dyn BackendFile>, tag: &str) -> Result<File, StoreError> {
        let core = Core {
            ctx,
            backing,
            tag: tag.to_owned(),
            clock: AtomicU64::new(1),
            id_hint: Default::default(),
            reported: Default::default(),
            beside: Default::default(),
        };
        let state = core.open_state()?;
        core.publish(&state);
        Ok(File {
            core,
            chunk_len: state.chunk_len.clone(),
            barriers_lost: state.barriers_lost.clone(),
            state: RwLock::new(state),
        })
    }

    /// Takes a backing file just created: it gets its page even if it stays empty.
    pub fn create(ctx: Arc<FileContext>, backing: Arc<dyn BackendFile>, tag: &str) -> Result<File, StoreError> {
        let file = File::open(ctx, backing, tag)?;
        {
            let mut st = file.alone();
            st.wants_page = true;
            st.born = st.len == 0;
        }
        Ok(file)
    }

    /// The backing file.
    pub fn backing(&self) -> &Arc<dyn BackendFile> {
        &self.core.backing
    }

    /// Logical size, bytes, buffered writes included.
    pub fn size(&self) -> u64 {
        self.core.shown_size()
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
        let beside = || self.core.read_beside(offset, buf);
        match beside::or_hold(self.state.try_read(), beside, || self.state.try_read_for(PATIENCE))? {
            ControlFlow::Break(n) => Ok(n),
            ControlFlow::Continue(st) => self.read_holding(st.unwrap_or_else(|| self.state.read()), offset, buf),
        }
    }

    fn read_holding(&self, st: RwLockReadGuard<'_, State>, offset: u64, buf: &mut [u8]) -> Result<usize, StoreError> {
        if let Some(n) = self.core.read_shared(&st, offset, buf)? {
            return Ok(n);
        }
        drop(st);
        self.core.read_alone(&mut self.alone(), offset, buf)
    }

    /// The state, for this caller alone.
    fn alone(&self) -> Alone<'_> {
        Alone::new(&self.core, self.state.write())
    }

    /// Writes into the buffer of dirty blocks; commits when that grows past its bound. Extends the file.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), StoreError> {
        let mut at = offset;
        for piece in data.chunks(write::PIECE_LEN) {
            let ahead = self.core.seal_ahead(at, piece, &self.chunk_len, || self.sealing_id())?;
            self.write_piece(at, piece, &ahead)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn write_piece(&self, offset: u64, piece: &[u8], ahead: &chunk::Ahead) -> Result<(), StoreError> {
        let beside = || Ok::<_, StoreError>(self.core.write_beside(offset, piece, ahead));
        match beside::or_hold(self.state.try_write(), beside, || self.state.try_write_for(PATIENCE))? {
            ControlFlow::Break(()) => Ok(()),
            ControlFlow::Continue(st) => {
                let st = st.unwrap_or_else(|| self.state.write());
                self.core.write_range(&mut Alone::new(&self.core, st), offset, piece, ahead)
            }
        }
    }

    /// The id that blocks are sealed with before the lock is taken; zero where none goes into their keys.
    fn sealing_id(&self) -> Result<[u8; 16], StoreError> {
        if !self.core.ctx.domain.is_salted() {
            return Ok([0; 16]);
        }
        let hint = *self.core.id_hint.lock();
        if hint != [0; 16] {
            return Ok(hint);
        }
        let mut st = self.alone();
        self.core.prepare_write(&mut st)?;
        let id = st.ensure_id()?;
        *self.core.id_hint.lock() = id;
        Ok(id)
    }

    /// Appends atomically; returns the offset.
    pub fn append(&self, data: &[u8]) -> Result<u64, StoreError> {
        let mut st = self.alone();
        let offset = st.size;
        self.core.write_range(&mut st, offset, data, &chunk::Ahead::default())?;
        Ok(offset)
    }

    /// Copies whole blocks of another file without decrypting them: keys into the pages, ciphertext from store to store, which may share it. The blocks are
    /// committed like any others. Fewer bytes than asked for are copied where a block's content is no ciphertext, or a tail follows; `None`: none, and the
    /// caller copies as usual: so it is always where a block's key depends on its file. Both files must be of one vault.
    pub fn copy_from(&self, from: &File, from_offset: u64, offset: u64, len: u64) -> Result<Option<u64>, StoreError> {
        copy::copy(from, self, from_offset, offset, len)
    }

    /// Shrinks or grows.
    pub fn truncate(&self, size: u64) -> Result<(), StoreError> {
        self.core.set_size(&mut self.alone(), size)
    }

    /// Makes a range a hole; never changes the size.
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), StoreError> {
        self.core.punch_range(&mut self.alone(), offset, len)
    }

    /// Reserves backing space for a range; grows the file to its end unless `keep_size`.
    pub fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> Result<(), StoreError> {
        let mut st = self.alone();
        self.core.prepare_write(&mut st)?;
        let geo = *self.core.geo();
        let end = offset.checked_add(len).filter(|end| *end <= geo.size_max()).ok_or(StoreError::TooLarge)?;
        if len > 0 {
            let (first, last) = (offset / geo.block_size(), (end - 1) / geo.block_size());
            let from = geo.page_offset(geo.slot_of(first).0).min(geo.block_offset(first));
            let until = geo.block_offset(last) + geo.block_size();
            self.core.forget_known_mtime();
            self.core.backing.allocate(from, until - from).map_err(StoreError::io("allocate", from))?;
        }
        match keep_size {
            true => Ok(()),
            false => self.core.grow_to(&mut st, end),
        }
    }

    /// Makes a range read as zeros; grows the file to its end unless `keep_size`.
    pub fn zero(&self, offset: u64, len: u64, keep_size: bool) -> Result<(), StoreError> {
        // Under one hold of the lock: an append in between would be cut off.
        let mut st = self.alone();
        self.core.punch_range(&mut st, offset, len)?;
        match keep_size {
            true => Ok(()),
            false => self.core.grow_to(&mut st, offset.checked_add(len).ok_or(StoreError::TooLarge)?),
        }
    }

    /// First data at or after `offset`, `None`: no data before the end.
    pub fn seek_data(&self, offset: u64) -> Result<Option<u64>, StoreError> {
        self.core.seek_data(&mut self.alone(), offset)
    }

    /// First hole at or after `offset`; the end counts as one. `None` past the end.
    pub fn seek_hole(&self, offset: u64) -> Result<Option<u64>, StoreError> {
        self.core.seek_hole(&mut self.alone(), offset)
    }

    /// Hands buffered writes to the store, without making them durable.
    pub fn flush(&self) -> Result<(), StoreError> {
        if self.core.ctx.read_only {
            return Ok(());
        }
        let mut st = self.alone();
        match self.core.takes_long(&st, false) {
            true => self.core.open_to_others(&mut st, Core::commit),
            false => self.core.commit(&mut st),
        }
    }

    /// Commits and makes durable.
    pub fn sync(&self) -> Result<(), StoreError> {
        if self.core.ctx.read_only {
            return Ok(());
        }
        let lost = self.barriers_lost.load(Ordering::Acquire);
        let mut st = self.alone();
        match self.core.takes_long(&st, true) {
            true => self.core.open_to_others(&mut st, Core::sync),
            false => self.core.sync(&mut st),
        }?;
        match self.barriers_lost.load(Ordering::Acquire) == lost {
            true => Ok(()),
            false => Err(commit::lost_barrier()), // while this call waited; somebody else was told
        }
    }

    /// Whether buffered writes wait.
    pub fn is_dirty(&self) -> bool {
        self.core.is_dirty()
    }

    /// Bytes of memory that buffered blocks take.
    pub fn dirty_len(&self) -> u64 {
        self.core.shown_buffered().max(self.chunk_len.load(Ordering::Relaxed) as u64)
    }

    /// Whether pages on disk still carry pending bits, a stale floor, or a random page where a convergent one could be; or may, since the file is being changed.
    pub fn needs_settle(&self) -> bool {
        // While somebody has the state it is not: nobody is made to wait for that.
        !self.core.ctx.read_only && self.state.try_read().is_none_or(|st| self.core.needs_settle(&st))
    }

    /// A token that names the writes so far, for [`File::settle`].
    pub fn covered_mark(&self) -> u64 {
        self.core.mark(&mut self.alone())
    }

    /// After a barrier that covered this file (a successful [`crate::Backend::sync`] between `covered_mark` and this call): clears
    /// pending bits, raises the floor, cuts the backing file. `mark` is what [`File::covered_mark`] returned before the barrier.
    pub fn settle(&self, mark: u64) -> Result<(), StoreError> {
        let mut st = self.alone();
        match self.core.needs_settle(&st) {
            true => self.core.open_to_others(&mut st, |core, st| core.settle(st, mark)),
            false => self.core.settle(&mut st, mark),
        }
    }

    /// Tells that a barrier of the whole store failed: what it should have covered is written again before the next barrier counts.
    pub fn barrier_failed(&self) {
        let mut st = self.alone();
        if st.seq > st.covered {
            st.note_failed_barrier();
        }
    }

    /// Commits, makes durable and settles, with a barrier of its own.
    pub fn settle_now(&self) -> Result<(), StoreError> {
        if self.core.ctx.read_only {
            return Ok(());
        }
        let mut st = self.alone();
        self.core.open_to_others(&mut st, |core, st| core.commit(st).and_then(|()| core.settle_now(st)))
    }

    /// The backing file's stat, with the modification time that the file has for its users.
    ///
    /// # Errors
    /// Those of the store.
    pub fn stat(&self) -> std::io::Result<Stat> {
        // Looked for on both sides of the store's answer: a commit may begin meanwhile.
        let before = self.mtime();
        let st = self.core.backing.stat()?;
        Ok(Stat { mtime: self.mtime().or(before).unwrap_or(st.mtime), ..st })
    }

    /// The modification time that `stat` must show, where that is known; `None`: the backing file's own.
    pub fn mtime(&self) -> Option<Time> {
        self.core.shown_mtime()
    }

    /// Sets times now, and keeps commits of earlier writes from changing the modification time.
    pub fn set_times(&self, atime: SetTime, mtime: SetTime) -> Result<(), StoreError> {
        self.core.set_times(atime, mtime)
    }

    /// Brings pages, and with [`Rekey::Full`] blocks, to the newest keys, from page `from` on (0 first) as many as a step holds; call it again with
    /// [`RekeyStep::next`] until that is `None`. What is there already is not written. Damage is counted and stays as it is. Nothing is made durable but what
    /// the commit protocol asks for.
    ///
    /// # Errors
    /// Those of the store; [`StoreError::Damaged`] where the file cannot be written at all; [`StoreError::ReadOnly`].
    pub fn rekey(&self, work: Rekey, from: u64) -> Result<RekeyStep, StoreError> {
        self.core.rekey(&mut self.alone(), work, from)
    }

    /// Whether every page that this file has written is as it stays, but for damaged blocks; on disk once a barrier has covered it.
    pub fn is_settled(&self) -> bool {
        self.core.ctx.read_only
            || (!self.is_dirty() && self.state.try_read().is_some_and(|st| self.core.is_settled(&st)))
    }

    /// Verifies every page and block; with `repair` completes interrupted commits. `progress` gets backing bytes done.
    pub fn check(&self, repair: bool, progress: &mut dyn FnMut(u64)) -> Result<FileCheck, StoreError> {
        self.core.check(&mut self.alone(), repair, progress)
    }
}

/// A file that goes while its pages say what is under way leaves that to the next session, as a crash does.
impl Drop for File {
    fn drop(&mut self) {
        let has_name = || self.core.backing.stat().map_or(true, |st| st.nlink > 0);
        if !self.core.ctx.read_only && !self.core.is_settled(self.state.get_mut()) && has_name() {
            self.core.ctx.sessions.note_left_behind();
        }
    }
}
