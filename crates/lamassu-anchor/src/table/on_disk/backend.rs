//! The open file: the log in its first part, after it the data of redb, and redb's locks, which outlive a database that
//! has failed.
//!
//! redb gives up a database at the first error of its disk. Then another one is opened on the same file. Until it is:
//!
//! * Locks stay. They belong to the open file, which stays the same, so that no other process gets the file.
//! * A failed transaction is rolled back, whatever of it was written. redb never overwrites what its last durable
//!   transaction refers to, so restoring that transaction's header is enough.
//! * A record of the log that was perhaps written is made void: its commit may have returned an error.
//!
//! Before redb sees a longer file, space is reserved if the file system can do that. So a full disk is noticed before a
//! transaction writes anything. Bytes of the disk stay free for others ([`Backend::keep_free`]): redb doubles its file,
//! and would take all that is left.

use super::log::{BLOCK_LEN, DATABASE_AT, Record};
use parking_lot::Mutex;
use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};
use rustix::fs::FallocateFlags;
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Bound;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes at the start of the database that say which transaction is the last.
const HEADER_LEN: usize = 320;
/// The byte of the header whose lowest bit selects one of two descriptions of the last transaction. Each transaction
/// changes it, in its last write before a barrier.
const LAST_AT: usize = 9;
/// Bytes of the disk that no file grows into, unless its owner asks for more.
const KEPT_FREE: u64 = 256 << 10;

/// Files of this process grow one at a time: two that grow at once would both take the same free space for theirs.
static GROWING: Mutex<()> = Mutex::new(());

type Range = (Bound<u64>, Bound<u64>);

/// The open file of a table: the log, redb's data, and the locks.
#[derive(Debug)]
pub(super) struct Backend {
    /// The same open file as that of `redb`.
    file: File,
    redb: FileBackend,
    locks: Mutex<Locks>,
    header: Mutex<Header>,
    unsettled: Mutex<Unsettled>,
    /// Bytes by which the file could not be extended.
    short_of: AtomicU64,
    /// Bytes of the disk that stay free when the file grows.
    kept_free: AtomicU64,
    /// Bytes written to the database.
    written: AtomicU64,
    /// Bytes of the file that redb caches.
    pub cache_bytes: usize,
    #[cfg(test)]
    pub fails: Mutex<Option<Fails>>,
    #[cfg(test)]
    pub traced: Mutex<Option<Vec<Traced>>>,
    #[cfg(test)]
    pub hooks: super::tests::Hooks,
}

/// The record of the log, if any, that may have been written although its commit has not returned success; and where
/// the record begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Unsettled {
    #[default]
    None,
    /// Its commit is under way: only that commit makes it void.
    Writing(u64),
    /// Its commit has failed. Until it is void, nothing is answered; any thread may make it void.
    Failed(u64),
}

/// Operations on the file, for tests.
#[cfg(test)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Traced {
    Written { at: u64, bytes: Vec<u8> },
    Length(u64),
    Flushed,
}

#[derive(Debug, Default)]
struct Locks {
    held: HashSet<Range>,
    /// Locks that stay held whatever redb does, while one database replaces another.
    kept: HashSet<Range>,
}

#[derive(Debug, Default)]
struct Header {
    /// The header as last written; empty while the file has none.
    written: Vec<u8>,
    /// The header as of the last barrier.
    durable: Vec<u8>,
}

/// Makes calls fail, for tests.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Fails {
    pub call: &'static str,
    /// Number of calls that succeed first.
    pub after: u32,
    pub errno: i32,
}

impl Backend {
    pub fn new(file: File, cache_bytes: usize) -> io::Result<Backend> {
        let mut header = vec![0; HEADER_LEN];
        match file.read_exact_at(&mut header, DATABASE_AT) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => header.clear(),
            done => done?,
        }
        let redb = FileBackend::new(file.try_clone()?).map_err(io::Error::other)?;
        Ok(Backend {
            file,
            redb,
            locks: Mutex::default(),
            header: Mutex::new(Header { durable: header.clone(), written: header }),
            unsettled: Mutex::default(),
            short_of: AtomicU64::new(0),
            kept_free: AtomicU64::new(KEPT_FREE),
            written: AtomicU64::new(0),
            cache_bytes,
            #[cfg(test)]
            fails: Mutex::new(None),
            #[cfg(test)]
            traced: Mutex::new(None),
            #[cfg(test)]
            hooks: super::tests::Hooks::default(),
        })
    }

    /// Reads from the log.
    pub fn read_log(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        self.check("read")?;
        self.file.read_exact_at(out, at)
    }

    /// Writes a record of the log, durably.
    pub fn write_record(&self, record: &Record) -> io::Result<()> {
        *self.unsettled.lock() = Unsettled::Writing(record.at);
        self.check("write")?;
        self.write_at(record.at, &record.bytes)?;
        self.flush()?;
        #[cfg(test)]
        self.hooks.run(super::tests::RECORD_WRITTEN);
        *self.unsettled.lock() = Unsettled::None;
        Ok(())
    }

    /// The commit of the record that may have been written has failed: makes the record void, durably.
    pub fn record_has_failed(&self) -> io::Result<()> {
        let mut unsettled = self.unsettled.lock();
        if let Unsettled::Writing(at) = *unsettled {
            *unsettled = Unsettled::Failed(at);
        }
        drop(unsettled);
        #[cfg(test)]
        self.hooks.run(super::tests::RECORD_FAILED);
        self.void_failed_record()
    }

    /// Makes void, durably, a record whose commit has failed. Others wait: who finds none knows that it is void.
    pub fn void_failed_record(&self) -> io::Result<()> {
        let unsettled = &mut *self.unsettled.lock();
        if let Unsettled::Failed(at) = *unsettled {
            self.check("write")?;
            self.write_at(at, &[0; BLOCK_LEN])?;
            self.flush()?;
            *unsettled = Unsettled::None;
        }
        Ok(())
    }

    /// The log begins anew: its former records are void.
    pub fn log_is_void(&self) {
        *self.unsettled.lock() = Unsettled::None;
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        #[cfg(test)]
        self.trace(|| Traced::Written { at, bytes: bytes.to_vec() });
        self.file.write_all_at(bytes, at)
    }

    /// Makes durable what was written.
    pub fn flush(&self) -> io::Result<()> {
        self.check("sync")?;
        self.file.sync_data()?;
        // After XFS has shut down, fsync may succeed although data was lost; stat then fails.
        self.file.metadata()?;
        #[cfg(test)]
        self.trace(|| Traced::Flushed);
        Ok(())
    }

    #[cfg(test)]
    fn trace(&self, done: impl FnOnce() -> Traced) {
        if let Some(all) = self.traced.lock().as_mut() {
            all.push(done());
        }
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The length of the database.
    pub fn database_len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len().saturating_sub(DATABASE_AT))
    }

    /// Bytes written to the database since the file was opened.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// From now on held locks stay. No transaction may be under way.
    pub fn keep_locks(&self) {
        let locks = &mut *self.locks.lock();
        locks.kept.extend(locks.held.iter().copied());
    }

    /// A database owns the locks again.
    pub fn leave_locks(&self) {
        self.locks.lock().kept.clear();
    }

    /// Releases all locks: no database will use the file again.
    pub fn release(&self) {
        // Closing the file does the same, but later if a process that is being started has a copy of it.
        let _ = self.redb.close();
    }

    /// A value that changes with each durable transaction, whatever failed after that.
    pub fn last_transaction(&self) -> Option<u8> {
        self.header.lock().durable.get(LAST_AT).map(|byte| byte & 1)
    }

    /// Undoes the writes of a failed transaction.
    pub fn roll_back(&self) -> io::Result<()> {
        let header = &mut *self.header.lock();
        if header.written != header.durable && !header.durable.is_empty() {
            self.check("write")?;
            self.write_at(DATABASE_AT, &header.durable)?;
            header.written.clone_from(&header.durable);
        }
        // Needed even if the header is unchanged: after a failed barrier nothing is known.
        self.flush()
    }

    /// From now on so many bytes of the disk stay free when the file grows.
    pub fn keep_free(&self, bytes: u64) {
        self.kept_free.store(bytes, Ordering::Relaxed);
    }

    /// Fails if the file still cannot be extended: then a transaction need not be begun.
    pub fn reserve_again(&self) -> io::Result<()> {
        let short_of = self.short_of.load(Ordering::Acquire);
        if short_of == 0 {
            return Ok(());
        }
        let len = self.file.metadata()?.len();
        self.reserve(len, short_of)?;
        // What is reserved now would not count as free when redb asks for it.
        self.end_at(len)
    }

    /// Reserves space after the end of the file, if the file system can. The length stays: redb accepts only lengths
    /// that it chose itself, and a crash must leave one of those.
    fn reserve(&self, end: u64, more: u64) -> io::Result<()> {
        let _alone = GROWING.lock();
        let reserved = self.check("reserve").and_then(|()| self.check_free(more)).and_then(|()| {
            rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, end, more).map_err(io::Error::from)
        });
        let is_full = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
        match reserved {
            Err(error) if is_full(&error) => {
                self.short_of.store(more, Ordering::Release);
                // ext4 keeps what it found before it failed: all that was free.
                let _ = self.end_at(end);
                Err(error)
            }
            Ok(()) | Err(_) => {
                self.short_of.store(0, Ordering::Release);
                Ok(())
            }
        }
    }

    /// Fails if the disk would have too little space left.
    fn check_free(&self, more: u64) -> io::Result<()> {
        let disk = rustix::fs::fstatvfs(&self.file)?;
        let left = disk.f_bavail.saturating_mul(disk.f_frsize).checked_sub(more);
        // A file system without a number of blocks does not know what is free.
        match disk.f_blocks == 0 || left.is_some_and(|left| left >= self.kept_free.load(Ordering::Relaxed)) {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        }
    }

    /// Gives back what is reserved after the end of the file.
    fn end_at(&self, len: u64) -> io::Result<()> {
        Ok(rustix::fs::ftruncate(&self.file, len)?)
    }

    /// Fails where a test asks for it.
    #[cfg(test)]
    fn check(&self, call: &'static str) -> io::Result<()> {
        let fails = &mut *self.fails.lock();
        let Some(fails) = fails.as_mut().filter(|fails| fails.call == call) else { return Ok(()) };
        if fails.after > 0 {
            fails.after -= 1;
            return Ok(());
        }
        Err(io::Error::from_raw_os_error(fails.errno))
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self, clippy::unnecessary_wraps)] // the same as for tests
    fn check(&self, _: &'static str) -> io::Result<()> {
        Ok(())
    }
}

/// The backend as redb sees it.
#[derive(Clone, Debug)]
pub(super) struct Shared(pub Arc<Backend>);

impl Shared {
    fn locked(&self, range: Range, locked: Result<bool, BackendError>) -> Result<bool, BackendError> {
        if matches!(locked, Ok(true)) {
            self.0.locks.lock().held.insert(range);
        }
        locked
    }
}

/// The place in the file of a byte of the database.
fn in_file(offset: u64) -> io::Result<u64> {
    offset.checked_add(DATABASE_AT).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

impl StorageBackend for Shared {
    fn len(&self) -> io::Result<u64> {
        self.0.check("read")?;
        Ok(self.0.redb.len()?.saturating_sub(DATABASE_AT))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.check("read")?;
        self.0.redb.read(in_file(offset)?, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let (now, len) = (self.0.file.metadata()?.len(), in_file(len)?);
        #[cfg(test)]
        self.0.trace(|| Traced::Length(len));
        if len > now {
            self.0.reserve(now, len - now)?;
            return self.0.redb.set_len(len);
        }
        // A longer file does no harm, and the transaction that no longer needs the space is durable.
        let _ = self.0.redb.set_len(len);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.flush()?;
        let header = &mut *self.0.header.lock();
        header.durable.clone_from(&header.written);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        if at < HEADER_LEN {
            // Noted first: a write that fails may still have been made in part.
            let header = &mut *self.0.header.lock();
            header.written.resize(HEADER_LEN, 0);
            let len = data.len().min(HEADER_LEN - at);
            header.written[at..at + len].copy_from_slice(&data[..len]);
        }
        self.0.check("write")?;
        self.0.written.fetch_add(data.len() as u64, Ordering::Relaxed);
        self.0.write_at(in_file(offset)?, data)
    }

    /// The table releases the locks when it ends.
    fn close(&self) -> io::Result<()> {
        Ok(())
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.locked((start, end), self.0.redb.try_lock_range(start, end))
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.locked((start, end), self.0.redb.try_lock_shared_range(start, end))
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.redb.lock_range(start, end)?;
        self.locked((start, end), Ok(true)).map(drop)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.redb.lock_shared_range(start, end)?;
        self.locked((start, end), Ok(true)).map(drop)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        let locks = &mut *self.0.locks.lock();
        if locks.kept.contains(&(start, end)) {
            return Ok(());
        }
        self.0.redb.unlock_range(start, end)?;
        locks.held.remove(&(start, end));
        Ok(())
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.redb.query_lock_range(start, end)
    }
}
