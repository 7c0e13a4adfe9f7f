//! Disk space that only the server's state may use.
//!
//! The server refuses calls that take space while its disk is nearly full ([`crate::anchor_store::RESERVE`]), but other
//! programs may take the rest of the disk. Some writes cannot be refused: the end of a session, for example. So the
//! server keeps an allocated file. When a write of the state finds no space, the file is removed and the write is
//! repeated. Without that the state would fail, and the server with it.

use redb::backends::FileBackend;
use redb::{BackendError, Database, DatabaseError, StorageBackend};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::ops::Bound;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Its name in a server's directory.
pub const FILE: &str = "reserve";

/// Its length. While the disk is nearly full the state grows by the ends of sessions and by changes that an
/// administrator makes: some KiB each.
pub const LEN: u64 = 16 << 20;

/// The allocated file of a server's directory.
#[derive(Clone, Debug)]
pub struct Reserve {
    path: PathBuf,
}

impl Reserve {
    /// That of a directory.
    pub fn of(dir: &Path) -> Reserve {
        Reserve { path: dir.join(FILE) }
    }

    /// Allocates the file if it is not there. `keeping_free`: space on the disk that must be left.
    ///
    /// # Errors
    /// Those of the file system; [`ErrorKind::StorageFull`] if less would be left.
    pub fn take(&self, keeping_free: u64) -> io::Result<()> {
        if self.path.metadata().is_ok_and(|st| st.len() == LEN) {
            return Ok(());
        }
        let st = rustix::fs::statvfs(self.path.parent().unwrap_or(&self.path))?;
        if st.f_bavail.saturating_mul(st.f_frsize) < keeping_free + LEN {
            return Err(ErrorKind::StorageFull.into());
        }
        let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&self.path)?;
        let allocated = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, LEN);
        allocated.inspect_err(|_| drop(fs::remove_file(&self.path)))?;
        Ok(())
    }

    /// Removes the file. False: there was none.
    fn give_up(&self) -> bool {
        let was_there = fs::remove_file(&self.path).is_ok();
        if was_there {
            tracing::error!(file = %self.path.display(), "the disk is full: the state uses the space that was kept for it");
        }
        was_there
    }

    /// Runs `write`, and once more in the space of the file if there was none.
    fn within<T>(&self, write: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match write() {
            Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                if self.give_up() { write() } else { Err(error) }
            }
            done => done,
        }
    }
}

/// The file of a database whose writes may use the reserve.
#[derive(Debug)]
struct Reserved {
    file: FileBackend,
    reserve: Reserve,
}

/// Opens or makes the database of a server's directory.
///
/// # Errors
/// Those of [`Database::create`].
pub(crate) fn database(dir: &Path, path: &Path) -> Result<Database, DatabaseError> {
    let file = File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    Database::builder().create_with_backend(Reserved { file: FileBackend::new(file)?, reserve: Reserve::of(dir) })
}

impl StorageBackend for Reserved {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.reserve.within(|| self.file.set_len(len))
    }

    // Not repeated: after a failed fsync(2) the kernel may have dropped what was written.
    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.reserve.within(|| self.file.write(offset, data))
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.file.try_lock_range(start, end)
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.file.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.file.query_lock_range(start, end)
    }
}
