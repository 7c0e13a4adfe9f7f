//! Disk space that only the server's state may use, and the state's database, which uses it.
//!
//! The server refuses calls that take space while its disk is nearly full ([`crate::anchor_store::RESERVE`]), but other
//! programs may take the rest of the disk. Some writes cannot be refused: the end of a session, for example. So the
//! database's file is allocated as a whole whenever it grows, which is when its content has doubled. For that moment
//! the server keeps another allocated file: when the database finds no space, that file is removed, and the write is
//! repeated. Without this the state would fail, and the server with it.

use crate::{Result, ServerError};
use redb::backends::FileBackend;
use redb::{BackendError, Database, DatabaseError, StorageBackend, StorageError};
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::ops::Bound;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Its name in a server's directory.
pub const FILE: &str = "reserve";

/// Its length.
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
        // A copy of it may have no space of its own.
        let is_whole = |st: fs::Metadata| st.is_file() && st.len() == LEN && st.blocks() * 512 >= LEN;
        if self.path.symlink_metadata().is_ok_and(is_whole) {
            return Ok(());
        }
        // Whatever is there instead is never followed or waited for.
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let st = rustix::fs::statvfs(self.path.parent().unwrap_or(&self.path))?;
        if st.f_bavail.saturating_mul(st.f_frsize) < keeping_free + LEN {
            return Err(ErrorKind::StorageFull.into());
        }
        let file = File::options().write(true).create_new(true).mode(0o600).open(&self.path)?;
        let allocated = fallocate(&file, FallocateFlags::empty(), 0, LEN);
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
    pub(crate) fn within<T>(&self, write: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match write() {
            Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                if self.give_up() { write() } else { Err(error) }
            }
            done => done,
        }
    }
}

/// The file of a database, allocated as far as the disk allows, whose writes may use the reserve.
#[derive(Debug)]
struct Reserved {
    file: FileBackend,
    /// the same file
    allocated: File,
    reserve: Reserve,
}

impl Reserved {
    /// Allocates up to `len`. The file may become longer.
    fn allocate(&self, len: u64) -> io::Result<()> {
        Ok(fallocate(&self.allocated, FallocateFlags::empty(), 0, len)?)
    }
}

/// Opens or makes the database of a server's directory.
///
/// # Errors
/// [`ServerError::Running`], [`ServerError::Damaged`], [`ServerError::Database`].
pub(crate) fn database(dir: &Path, path: &Path) -> Result<Database> {
    let opened = open(dir, path).and_then(|file| Database::builder().create_with_backend(file));
    opened.map_err(|error| match error {
        DatabaseError::DatabaseAlreadyOpen => ServerError::Running { dir: dir.into() },
        error if is_damage(&error) => {
            ServerError::Damaged { path: path.into(), what: "it is no database, or not a whole one" }
        }
        error => ServerError::Database { path: path.into(), source: Box::new(error.into()) },
    })
}

fn open(dir: &Path, path: &Path) -> std::result::Result<Reserved, DatabaseError> {
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    let mut options = File::options();
    let file =
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(flags).open(path)?;
    let allocated = file.try_clone()?;
    let reserved = Reserved { file: FileBackend::new(file)?, allocated, reserve: Reserve::of(dir) };
    // A copy of a server's directory may have holes.
    let len = reserved.file.len()?;
    if len > 0 {
        let _ = reserved.allocate(len);
    }
    Ok(reserved)
}

/// Whether the error means that the file is no valid database, and not that it cannot be read.
pub(crate) fn is_damage(error: &DatabaseError) -> bool {
    match error {
        DatabaseError::Storage(StorageError::Corrupted(_)) | DatabaseError::UpgradeRequired(_) => true,
        DatabaseError::Storage(StorageError::Io(error)) => {
            matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof)
        }
        _ => false,
    }
}

impl StorageBackend for Reserved {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let added = len.saturating_sub(self.file.len()?);
        if added > 0 {
            // Without this the file has holes, and the writes that fill them may need the reserve.
            let _ = if added <= LEN { self.reserve.within(|| self.allocate(len)) } else { self.allocate(len) };
        }
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

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> std::result::Result<bool, BackendError> {
        self.file.try_lock_range(start, end)
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> std::result::Result<bool, BackendError> {
        self.file.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> std::result::Result<(), BackendError> {
        self.file.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> std::result::Result<(), BackendError> {
        self.file.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> std::result::Result<(), BackendError> {
        self.file.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> std::result::Result<bool, BackendError> {
        self.file.query_lock_range(start, end)
    }
}
