//! The end of a table: logged changes are moved to the database, and unused pages are given back to the system.
//!
//! redb keeps the pages that its transactions free, and a file that was filled by many of them is up to twice as long
//! as what it holds. So a writer that has written much compacts the database when it closes it.
//!
//! * The transactions of a compaction move pages and change no row. Whenever it is interrupted or fails, the rows are
//!   unchanged, and the next process repairs the database as after any kill. So its errors are ignored.
//! * It reads all of the database, and writes less than that. So it comes after a process that has written a good part
//!   of it itself, and not in a database beyond [`COMPACTED_LEN_MAX`].
//! * Who opens and closes a file again and again leaves it as it is ([`DiskTable::staying_loose`]).
//! * Where another process reads, pages cannot be moved: then it is left to the next writer.

use super::role::{Handle, Role};
use super::{DiskTable, fenced};
use redb::{Database, Error};
use std::sync::atomic::Ordering;

/// Shortest database that is worth it.
const COMPACTED_LEN_MIN: u64 = 1 << 20;
/// Longest one, some 4 million files of a vault just filled: more takes longer than a close should.
const COMPACTED_LEN_MAX: u64 = 1 << 30;
/// This part of its length is to have been written by the process, at least.
const WRITTEN_PART: u64 = 4;
/// This part of its length is to become free, at least.
const FREE_PART: u64 = 6;

impl DiskTable {
    /// Gives back pages that are free, if there are many. The caller has no transaction.
    fn compact(&self, database: &mut Database) -> Result<(), Error> {
        let len = self.backend.database_len()?;
        let is_of_size = (COMPACTED_LEN_MIN..=COMPACTED_LEN_MAX).contains(&len);
        let has_written_much = self.backend.written() >= len / WRITTEN_PART;
        if is_of_size && has_written_much && is_loose(database, len)? {
            database.compact()?;
        }
        Ok(())
    }
}

/// Whether a good part of the database holds nothing.
fn is_loose(database: &Database, len: u64) -> Result<bool, Error> {
    let look = database.begin_write()?;
    let stats = look.stats()?;
    look.abort()?;
    let used = (stats.leaf_pages() + stats.branch_pages()) * stats.page_size() as u64;
    Ok(len.saturating_sub(used) >= len / FREE_PART)
}

impl Drop for DiskTable {
    fn drop(&mut self) {
        if self.role == Role::Writer && !self.is_broken.load(Ordering::Acquire) {
            let position = &mut *self.position.lock();
            if position.is_in_doubt || !self.logged.lock().is_empty() {
                // Where that fails, the log keeps it.
                let _ = self.store("close", position, &[]);
            }
        }
        let current = &mut *self.database.write();
        current.kept.forget();
        let mut handle = current.handle.take();
        if self.is_broken.load(Ordering::Acquire) {
            // It would go on where it has panicked. The system closes the file with the process.
            std::mem::forget(handle);
            return;
        }
        if let Some(Handle::Writer(database)) = handle.as_mut().filter(|_| !self.stays_loose) {
            // Nothing of the vault depends on it; see the module's head.
            let _ = fenced(|| self.compact(database));
        }
        fenced(|| drop(handle));
        self.backend.release();
    }
}
