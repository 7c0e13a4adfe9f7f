//! Tables in a redb file, on a disk that the store does not own.
//!
//! The file is opened once, by descriptor, and used only if it is a regular file that is ours alone. redb locks it: one
//! process writes; others read beside it, or keep writers out while they read ([`Readers`]).
//!
//! redb verifies checksums when it repairs a file, not on each read: it answers some damage with a panic. Those are
//! caught here and are an error like any other; nothing is asked of that database again.

use super::{Change, Space, Table, Visit};
use crate::AnchorError;
use redb::backends::FileBackend;
use redb::{
    Builder, ConcurrencyMode, Database, Durability, ReadOnlyDatabase, ReadTransaction, ReadableDatabase,
    TableDefinition,
};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io;
use std::ops::Bound;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Permissions of the file.
pub const FILE_MODE: u32 = 0o600;
/// Bytes of the file that redb keeps in memory.
const CACHE_BYTES: usize = 16 << 20;
/// Rows that a scan reads at a time.
const SCANNED_AT_ONCE: usize = 1024;

type Rows = TableDefinition<'static, &'static [u8], &'static [u8]>;
/// A key and its value.
type Row = (Vec<u8>, Vec<u8>);

fn definition(space: Space) -> Rows {
    TableDefinition::new(match space {
        Space::Vault => "vault",
        Space::Objects => "objects",
        Space::Open => "open",
        Space::Entries => "entries",
        Space::Held => "held",
        Space::Intents => "intents",
    })
}

/// How a file is shared with a process that writes it, by one that only reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// Reads beside it, and sees its commits.
    BesideWriter,
    /// Neither begins while the other has the file open.
    InsteadOfWriter,
}

enum Handle {
    Writer(Database),
    Reader(ReadOnlyDatabase),
}

impl Handle {
    fn begin_read(&self) -> Result<ReadTransaction, redb::Error> {
        Ok(match self {
            Handle::Writer(database) => database.begin_read()?,
            Handle::Reader(database) => database.begin_read()?,
        })
    }

    /// To be written through; a reader writes nothing, like a disk that is read-only.
    fn writer(&self) -> Result<&Database, redb::Error> {
        match self {
            Handle::Writer(database) => Ok(database),
            Handle::Reader(_) => Err(redb::Error::Io(io::Error::from_raw_os_error(libc::EROFS))),
        }
    }
}

/// Tables in a file.
pub struct DiskTable {
    /// `None` only while it is dropped.
    database: Option<Handle>,
    /// redb has panicked.
    is_broken: AtomicBool,
}

impl DiskTable {
    /// Makes a new file, which must not exist.
    ///
    /// # Errors
    /// [`AnchorError::Exists`], [`AnchorError::Io`].
    pub fn create(path: &Path) -> Result<DiskTable, AnchorError> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::from_raw_mode(FILE_MODE)).map_err(|errno| match errno {
            rustix::io::Errno::EXIST => AnchorError::Exists { path: path.to_owned() },
            errno => AnchorError::io("create")(errno.into()),
        })?;
        let table = DiskTable::of(file.into(), path)?;
        table.make_tables()?;
        sync_parent(path)?;
        Ok(table)
    }

    /// Opens a file.
    ///
    /// # Errors
    /// [`AnchorError::Missing`], [`AnchorError::NotPrivate`], [`AnchorError::Locked`], [`AnchorError::Unreadable`],
    /// [`AnchorError::Io`].
    pub fn open(path: &Path) -> Result<DiskTable, AnchorError> {
        let table = DiskTable::of(existing(path, OFlags::RDWR)?, path)?;
        // A file that a killed process has just made has no tables yet, and no vault.
        table.make_tables()?;
        Ok(table)
    }

    /// Opens a file to read it. What a process that was killed has left is mended first, if the file can be written.
    ///
    /// # Errors
    /// As [`DiskTable::open`]; a commit is refused as on a read-only disk.
    pub fn open_read_only(path: &Path, readers: Readers) -> Result<DiskTable, AnchorError> {
        match DiskTable::reader(path, readers)? {
            Some(table) => Ok(table),
            None => {
                // Opened for writing, it is mended; closed, it says so.
                drop(DiskTable::open(path)?);
                DiskTable::reader(path, readers)?.ok_or_else(|| AnchorError::Locked { path: path.to_owned() })
            }
        }
    }

    /// `None`: its last writer was killed, so that it has to be mended.
    fn reader(path: &Path, readers: Readers) -> Result<Option<DiskTable>, AnchorError> {
        let file = private(existing(path, OFlags::RDONLY)?, path)?;
        let mode = match readers {
            Readers::BesideWriter => ConcurrencyMode::SingleWriter,
            Readers::InsteadOfWriter => ConcurrencyMode::ExclusiveWriter,
        };
        let opened = fenced(|| {
            let mut builder = Builder::new();
            builder.set_cache_size(CACHE_BYTES).set_concurrency_mode(mode);
            FileBackend::new(file).and_then(|backend| builder.open_read_only_with_backend(backend))
        });
        match opened.ok_or(AnchorError::Broken)? {
            Ok(database) => Ok(Some(DiskTable::with(Handle::Reader(database)))),
            Err(redb::DatabaseError::RepairAborted) => Ok(None),
            Err(error) => Err(not_opened(error, path)),
        }
    }

    fn of(file: File, path: &Path) -> Result<DiskTable, AnchorError> {
        let file = private(file, path)?;
        let opened = fenced(|| {
            let mut builder = Builder::new();
            builder.set_cache_size(CACHE_BYTES).set_concurrency_mode(ConcurrencyMode::SingleWriter);
            FileBackend::new(file).and_then(|backend| builder.create_with_backend(backend))
        });
        let database = opened.ok_or(AnchorError::Broken)?.map_err(|error| not_opened(error, path))?;
        Ok(DiskTable::with(Handle::Writer(database)))
    }

    fn with(handle: Handle) -> DiskTable {
        DiskTable { database: Some(handle), is_broken: AtomicBool::new(false) }
    }

    fn make_tables(&self) -> Result<(), AnchorError> {
        self.ask("open", |database| {
            let write = database.writer()?.begin_write()?;
            for space in Space::ALL {
                write.open_table(definition(space))?;
            }
            Ok(write.commit()?)
        })
    }

    /// Asks the database, unless it has panicked.
    fn ask<T>(&self, op: &'static str, work: impl FnOnce(&Handle) -> Result<T, redb::Error>) -> Result<T, AnchorError> {
        let database = self.database.as_ref().filter(|_| !self.is_broken.load(Ordering::Acquire));
        let done = database.and_then(|database| fenced(|| work(database)));
        if done.is_none() {
            self.is_broken.store(true, Ordering::Release);
        }
        done.ok_or(AnchorError::Broken)?.map_err(|error| failed(op, error))
    }

    /// Visits all rows of all tables as of one moment, in the order of [`Space::ALL`] and of keys. `visit` stops it by
    /// an error of its own.
    ///
    /// # Errors
    /// That of `visit`; [`AnchorError::Io`], [`AnchorError::Unreadable`].
    pub fn visit_all<E: From<AnchorError>>(
        &self,
        mut visit: impl FnMut(Space, &[u8], &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let done = self.ask("read", |database| {
            let read = database.begin_read()?;
            for space in Space::ALL {
                for row in read.open_table(definition(space))?.range::<&[u8]>(..)? {
                    let (key, value) = row?;
                    if let Err(stopped) = visit(space, key.value(), value.value()) {
                        return Ok(Err(stopped));
                    }
                }
            }
            Ok(Ok(()))
        });
        done?
    }

    /// The next rows of a scan: those that begin with `prefix`, behind the key `after`.
    fn rows(&self, space: Space, prefix: &[u8], after: Option<&[u8]>) -> Result<Vec<Row>, AnchorError> {
        self.ask("read", |database| {
            let table = database.begin_read()?.open_table(definition(space))?;
            let from = after.map_or(Bound::Included(prefix), Bound::Excluded);
            let mut rows = Vec::new();
            for row in table.range::<&[u8]>((from, Bound::Unbounded))?.take(SCANNED_AT_ONCE) {
                let (key, value) = row?;
                if !key.value().starts_with(prefix) {
                    break;
                }
                rows.push((key.value().to_vec(), value.value().to_vec()));
            }
            Ok(rows)
        })
    }
}

impl Drop for DiskTable {
    fn drop(&mut self) {
        let database = self.database.take();
        if self.is_broken.load(Ordering::Acquire) {
            // It would go on where it has panicked. The system closes the file with the process.
            std::mem::forget(database);
        } else {
            fenced(|| drop(database));
        }
    }
}

/// Runs what may panic on damage. Nothing that it leaves is looked at again.
fn fenced<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}

/// A file that is there, whatever it is; waits for nothing, and follows no link.
fn existing(path: &Path, access: OFlags) -> Result<File, AnchorError> {
    let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
        rustix::io::Errno::NOENT => AnchorError::Missing { path: path.to_owned() },
        // A symbolic link, a directory, a fifo without a reader.
        rustix::io::Errno::LOOP | rustix::io::Errno::ISDIR | rustix::io::Errno::NXIO => not_private(path),
        errno => AnchorError::io("open")(errno.into()),
    })?;
    Ok(file.into())
}

/// The file, if it is a regular one that is ours alone.
fn private(file: File, path: &Path) -> Result<File, AnchorError> {
    let st = file.metadata().map_err(AnchorError::io("stat"))?;
    let is_ours = st.uid() == rustix::process::geteuid().as_raw();
    match st.is_file() && is_ours && st.mode() & 0o077 == 0 && st.nlink() == 1 {
        true => Ok(file),
        false => Err(not_private(path)),
    }
}

fn not_opened(error: redb::DatabaseError, path: &Path) -> AnchorError {
    match error {
        redb::DatabaseError::DatabaseAlreadyOpen => AnchorError::Locked { path: path.to_owned() },
        error => failed("open", error.into()),
    }
}

fn not_private(path: &Path) -> AnchorError {
    AnchorError::NotPrivate { path: path.to_owned() }
}

fn sync_parent(path: &Path) -> Result<(), AnchorError> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.map_or_else(|| PathBuf::from("."), Path::to_owned);
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(AnchorError::io("sync the directory of"))
}

/// Whether it says that the file is cut short, or no database: not that the system could not read it.
fn is_of_content(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData)
}

/// What redb says: the system's errors are told from damage.
fn failed(op: &'static str, error: redb::Error) -> AnchorError {
    match error {
        redb::Error::Io(source) if !is_of_content(&source) => AnchorError::Io { op, source },
        redb::Error::PreviousIo => AnchorError::Io { op, source: io::Error::from_raw_os_error(libc::EIO) },
        detail => AnchorError::Unreadable { detail: Box::new(detail) },
    }
}

impl Table for DiskTable {
    fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, AnchorError> {
        self.ask("read", |database| {
            let table = database.begin_read()?.open_table(definition(space))?;
            Ok(table.get(key)?.map(|value| value.value().to_vec()))
        })
    }

    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), AnchorError> {
        let mut rows = self.rows(space, prefix, None)?;
        while let Some((last, _)) = rows.last() {
            if rows.iter().any(|(key, value)| visit(key, value).is_break()) {
                break;
            }
            rows = self.rows(space, prefix, Some(last))?;
        }
        Ok(())
    }

    fn commit(&self, changes: &[Change]) -> Result<(), AnchorError> {
        self.ask("commit to", |database| {
            let mut write = database.writer()?.begin_write()?;
            write.set_durability(Durability::Immediate)?;
            for space in Space::ALL {
                let mut of_space = changes.iter().filter(|change| change.space == space).peekable();
                if of_space.peek().is_none() {
                    continue;
                }
                let mut table = write.open_table(definition(space))?;
                for Change { key, value, .. } in of_space {
                    match value {
                        Some(value) => drop(table.insert(&key[..], &value[..])?),
                        None => drop(table.remove(&key[..])?),
                    }
                }
            }
            Ok(write.commit()?)
        })
    }
}
