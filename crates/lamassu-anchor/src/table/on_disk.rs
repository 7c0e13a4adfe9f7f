//! Tables in a redb file, on a disk that the store does not own.
//!
//! The file is opened once, by descriptor, and used only if it is a private regular file of this user. redb locks it:
//! one process writes; others read at the same time, or exclude writers while they read ([`Readers`]).
//!
//! * A small commit is a record in the log in front of the database (`log`). A large one goes to the database, together
//!   with all logged changes. These go there also when the log is full and when the file is closed. Reads see the
//!   logged changes on top of the database.
//! * A full or failing disk ends nothing: redb then gives up its database, and another one is opened on the same file
//!   (`backend`). A commit that returned an error did not happen. Until the disk answers again, all calls fail: it is
//!   unknown what is durable.
//! * A commit fails if the path no longer leads to the open file: a file that was removed or replaced would take all
//!   further commits with it.
//! * redb verifies checksums when it repairs a file, not on each read, and answers some damage with a panic. Panics are
//!   caught here and become an error; that database is not used again. [`DiskTable::verify`] verifies all checksums.
//!
//! Locks, in this order: `position`, `database`, then `logged`, the shared snapshot, and those of the backend.

mod anew;
mod backend;
mod close;
#[cfg(test)]
mod crash;
mod file;
mod log;
mod overlay;
mod role;
mod snapshot;
#[cfg(test)]
mod tests;

use self::backend::Backend;
pub use self::file::FILE_MODE;
use self::file::{existing, new, private, sync_parent};
use self::log::{Logged, Position};
use self::overlay::Overlay;
pub use self::role::Readers;
use self::role::{CACHE_BYTES, Handle, Role};
use self::snapshot::{Kept, Snapshot, View};
use super::{Change, Space, Table, Visit, VisitRow};
use crate::AnchorError;
use parking_lot::{Mutex, RwLock};
use redb::{Builder, Durability, TableDefinition};
use rustix::fs::OFlags;
use std::fs::File;
use std::io;
use std::ops::{Bound, ControlFlow};
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Longest file that is verified at each opening: about 100,000 files of a vault.
const SMALL_LEN: u64 = 16 << 20;
/// The longest time in which a writer writes one record: after that the end of its log has moved, or the log is
/// damaged.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Rows that a scan reads at a time.
const SCANNED_AT_ONCE: usize = 1024;

type Rows = TableDefinition<'static, &'static [u8], &'static [u8]>;
/// One row: the generation of the log, which is the number of transactions that emptied it.
const LOG: TableDefinition<'static, &'static str, u64> = TableDefinition::new("log");
const GENERATION: &str = "generation";
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
        Space::Head => "head",
    })
}

/// Tables in a file.
pub struct DiskTable {
    /// Absolute.
    path: PathBuf,
    role: Role,
    backend: Arc<Backend>,
    database: RwLock<Current>,
    /// Held during a commit.
    position: Mutex<Position>,
    /// The logged changes; empty in a reader. Taken after `position` and `database`.
    logged: Mutex<Arc<Logged>>,
    /// redb has panicked.
    is_broken: AtomicBool,
    /// Closing it gives no unused pages back.
    stays_loose: bool,
}

/// The open database.
struct Current {
    /// `None`: it was given up, and no other could be opened yet.
    handle: Option<Handle>,
    /// The shared snapshot.
    kept: Kept,
    /// The number of databases that were given up before.
    number: u64,
}

impl DiskTable {
    /// Makes a new file.
    ///
    /// # Errors
    /// [`AnchorError::Exists`], [`AnchorError::Io`].
    pub fn create(path: &Path) -> Result<DiskTable, AnchorError> {
        DiskTable::create_caching(path, CACHE_BYTES)
    }

    /// The same, with so many bytes of the file in memory: for who has very many tables.
    ///
    /// # Errors
    /// As [`DiskTable::create`].
    pub fn create_caching(path: &Path, bytes: usize) -> Result<DiskTable, AnchorError> {
        let file = new(path)?;
        // A file without content would prevent the next attempt.
        DiskTable::made(file, path, bytes).inspect_err(|_| drop(std::fs::remove_file(path)))
    }

    fn made(file: File, path: &Path, cache_bytes: usize) -> Result<DiskTable, AnchorError> {
        log::make_front(&file).map_err(AnchorError::io("write", path))?;
        let table = DiskTable::of(file, path, cache_bytes)?;
        table.make_tables()?;
        table.read_log()?;
        sync_parent(path)?;
        Ok(table)
    }

    /// Opens a file.
    ///
    /// # Errors
    /// [`AnchorError::Missing`], [`AnchorError::NotPrivate`], [`AnchorError::Locked`], [`AnchorError::Unreadable`],
    /// [`AnchorError::Io`].
    pub fn open(path: &Path) -> Result<DiskTable, AnchorError> {
        DiskTable::open_caching(path, CACHE_BYTES)
    }

    /// The same, with so many bytes of the file in memory: for who has very many tables.
    ///
    /// # Errors
    /// As [`DiskTable::open`].
    pub fn open_caching(path: &Path, bytes: usize) -> Result<DiskTable, AnchorError> {
        let table = DiskTable::of(existing(path, OFlags::RDWR)?, path, bytes)?;
        // A file that a killed process has just made has no tables yet.
        table.make_tables()?;
        table.read_log()?;
        Ok(table)
    }

    /// Opens a file for reading. If its last writer was killed, it is repaired first, if the file can be written.
    ///
    /// # Errors
    /// As [`DiskTable::open`]; a commit is refused as on a read-only disk.
    pub fn open_read_only(path: &Path, readers: Readers) -> Result<DiskTable, AnchorError> {
        match DiskTable::reader(path, readers)? {
            Some(table) => Ok(table),
            None => {
                // Opening for writing repairs it, and closing marks it clean.
                drop(DiskTable::open(path)?);
                DiskTable::reader(path, readers)?.ok_or_else(|| AnchorError::Locked { path: path.to_owned() })
            }
        }
    }

    /// `None`: its last writer was killed, so it must be repaired.
    fn reader(path: &Path, readers: Readers) -> Result<Option<DiskTable>, AnchorError> {
        match DiskTable::with(existing(path, OFlags::RDONLY)?, path, Role::Reader(readers), CACHE_BYTES)? {
            Ok(table) => {
                table.read_log()?;
                Ok(Some(table))
            }
            Err(redb::DatabaseError::RepairAborted) => Ok(None),
            Err(error) => Err(not_opened(error, path)),
        }
    }

    fn of(file: File, path: &Path, cache_bytes: usize) -> Result<DiskTable, AnchorError> {
        DiskTable::with(file, path, Role::Writer, cache_bytes)?.map_err(|error| not_opened(error, path))
    }

    fn with(
        file: File,
        path: &Path,
        role: Role,
        cache_bytes: usize,
    ) -> Result<Result<DiskTable, redb::DatabaseError>, AnchorError> {
        let file = private(file, path)?;
        if file.metadata().map_err(AnchorError::io("stat", path))?.len() == 0 {
            return Err(AnchorError::Empty);
        }
        log::check_front(&file).map_err(|error| failed("open", error.into(), path))?;
        // The process may change its working directory.
        let absolute = std::path::absolute(path).map_err(AnchorError::io("find", path))?;
        let backend = Arc::new(Backend::new(file, cache_bytes).map_err(AnchorError::io("open", path))?);
        let opened = fenced(|| role.open(&backend)).ok_or(AnchorError::Broken)?;
        if opened.is_err() {
            backend.release();
        }
        Ok(opened.map(|handle| DiskTable {
            path: absolute,
            role,
            backend,
            database: RwLock::new(Current { handle: Some(handle), kept: Kept::default(), number: 0 }),
            position: Mutex::default(),
            logged: Mutex::default(),
            is_broken: AtomicBool::new(false),
            stays_loose: false,
        }))
    }

    fn make_tables(&self) -> Result<(), AnchorError> {
        let made = self.ask_once("open", |database, _| {
            let write = database.writer()?.begin_write()?;
            for space in Space::ALL {
                write.open_table(definition(space))?;
            }
            write.open_table(LOG)?;
            Ok(write.commit()?)
        });
        made.map_err(|(error, _)| error)
    }

    /// Reads what the last writer has logged.
    fn read_log(&self) -> Result<(), AnchorError> {
        const OP: &str = "read the log of";
        let failed = AnchorError::io(OP, &self.path);
        let position = &mut *self.position.lock();
        let mut seen = None;
        let log::Found { logged, end, last } = loop {
            let snapshot = self.ask_once(OP, |database, _| Snapshot::of(database)).map_err(|(error, _)| error)?;
            let found = log::read(&self.backend, snapshot.generation).map_err(&failed)?;
            if !log::is_damaged(&self.backend, &found.end).map_err(&failed)? {
                break found;
            }
            // A concurrent writer may have continued between the two reads: then the end has moved.
            let end = found.end.number();
            if self.role != Role::Reader(Readers::BesideWriter) || seen == Some(end) {
                let detail = redb::Error::Corrupted("its log has a record behind one that is not whole".into());
                return Err(AnchorError::Unreadable { detail: Box::new(detail) });
            }
            seen = Some(end);
            std::thread::sleep(LOOK_AGAIN);
        };
        if self.role == Role::Writer {
            // The last record may not be durable: its process was killed, or its flush failed. After a failed flush the
            // system has it in memory and counts it as written, so it is written again.
            if let Some(last) = last {
                self.backend.write_record(&last).map_err(&failed)?;
            }
            *position = end;
            *self.logged.lock() = Arc::new(logged);
        }
        Ok(())
    }

    /// The committed state.
    fn view(&self, database: &Handle, kept: &Kept) -> Result<View, redb::Error> {
        if self.role == Role::Writer {
            // Read before the snapshot: changes that a transaction has just moved into the database are then in at
            // least one.
            let logged = self.logged.lock().clone();
            #[cfg(test)]
            self.backend.hooks.run(tests::BETWEEN_READS);
            let snapshot = kept.get(database)?;
            // Then the database has them, and newer values, too. This waits for no commit, which may wait for readers.
            let is_void = snapshot.generation > logged.generation;
            let logged = if is_void { Arc::new(Logged::none_of(snapshot.generation)) } else { logged };
            return Ok(View { snapshot, logged });
        }
        loop {
            let snapshot = Snapshot::of(database)?;
            let log::Found { logged, .. } = log::read(&self.backend, snapshot.generation)?;
            // If the generation has changed, the writer has emptied the log, and may have begun to write it again.
            if Snapshot::of(database)?.generation == snapshot.generation {
                return Ok(View { snapshot: Arc::new(snapshot), logged: Arc::new(logged) });
            }
        }
    }

    /// Reads the committed state. If the database fails, or had failed before, opens another one and reads again.
    fn ask<T>(
        &self,
        op: &'static str,
        mut work: impl FnMut(&View) -> Result<T, redb::Error>,
    ) -> Result<T, AnchorError> {
        self.void_failed_record(op)?;
        let mut read = |handle: &Handle, kept: &Kept| work(&self.view(handle, kept)?);
        match self.ask_once(op, &mut read) {
            Err((AnchorError::Io { .. }, number)) => {
                self.open_anew(op, number)?;
                self.ask_once(op, read).map_err(|(error, _)| error)
            }
            done => done.map_err(|(error, _)| error),
        }
    }

    /// Uses the database, unless redb has panicked. An error comes with the number of the database.
    fn ask_once<T>(
        &self,
        op: &'static str,
        work: impl FnOnce(&Handle, &Kept) -> Result<T, redb::Error>,
    ) -> Result<T, (AnchorError, u64)> {
        let current = self.database.read();
        if self.is_broken.load(Ordering::Acquire) {
            return Err((AnchorError::Broken, current.number));
        }
        let done = match &current.handle {
            Some(handle) => fenced(|| work(handle, &current.kept)),
            None => Some(Err(redb::Error::PreviousIo)),
        };
        if done.is_none() {
            self.is_broken.store(true, Ordering::Release);
        }
        match done {
            Some(done) => done.map_err(|error| (self.failed(op, error), current.number)),
            None => Err((AnchorError::Broken, current.number)),
        }
    }

    /// From now on so many bytes of the disk stay free when the file grows: a commit fails before it takes them.
    #[must_use]
    pub fn keeping_free(self, bytes: u64) -> DiskTable {
        self.backend.keep_free(bytes);
        self
    }

    /// Closing it does not wait until unused pages are given back to the system: somebody may wait for the file.
    #[must_use]
    pub fn staying_loose(mut self) -> DiskTable {
        self.stays_loose = true;
        self
    }

    /// Whether [`Table::verify`], which reads everything, takes no noticeable time.
    pub fn is_small(&self) -> bool {
        self.backend.file().metadata().is_ok_and(|st| st.len() <= SMALL_LEN)
    }

    /// Checks that the path still leads to the open file: otherwise later commits would be lost.
    fn is_in_place(&self) -> Result<(), AnchorError> {
        let open = self.backend.file().metadata().map_err(AnchorError::io("stat", &self.path))?;
        match self.path.symlink_metadata() {
            Ok(there) if (there.dev(), there.ino()) == (open.dev(), open.ino()) => Ok(()),
            // This process may not be allowed to read the path.
            Err(error) if error.kind() != io::ErrorKind::NotFound => Ok(()),
            Ok(_) | Err(_) => Err(AnchorError::Gone { path: self.path.clone() }),
        }
    }

    /// An error of redb: a system error, or damage.
    fn failed(&self, op: &'static str, error: redb::Error) -> AnchorError {
        failed(op, error, &self.path)
    }

    /// Visits all rows of the vault as of one moment. `visit` stops it by its own error.
    ///
    /// # Errors
    /// That of `visit`; those of [`Table::visit_spaces`].
    pub fn visit_all<E: From<AnchorError>>(
        &self,
        visit: impl FnMut(Space, &[u8], &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let table: &dyn Table = self;
        table.visit_all(visit)
    }

    /// The next rows of a scan: those that begin with `prefix`, after the key `after`.
    fn rows(&self, space: Space, prefix: &[u8], after: Option<&[u8]>) -> Result<Vec<Row>, AnchorError> {
        self.ask("read", |view| {
            let from = after.map_or(Bound::Included(prefix), Bound::Excluded);
            let mut rows = Vec::new();
            view.visit(space, from, |key, value| {
                if !key.starts_with(prefix) {
                    return ControlFlow::Break(());
                }
                rows.push((key.to_vec(), value.to_vec()));
                if rows.len() < SCANNED_AT_ONCE { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            })?;
            Ok(rows)
        })
    }

    /// Makes changes durable in the log. False: they must go to the database, which is then right whatever the log
    /// holds.
    fn log(&self, position: &mut Position, changes: &[Change]) -> bool {
        let Some(record) = position.record(changes) else { return false };
        if self.backend.write_record(&record).is_err() {
            position.is_in_doubt = true;
            return false;
        }
        position.advance(record.bytes.len());
        Arc::make_mut(&mut self.logged.lock()).take(changes.iter().cloned());
        true
    }

    /// Makes the logged changes and these ones durable in the database. The log is empty after that.
    fn store(&self, op: &'static str, position: &mut Position, changes: &[Change]) -> Result<(), AnchorError> {
        let stored = self.store_now(op, position, changes);
        if stored.is_err() {
            // Where that fails, the next call tries it again, before it answers anything.
            let _ = self.backend.record_has_failed();
        }
        stored
    }

    fn store_now(&self, op: &'static str, position: &mut Position, changes: &[Change]) -> Result<(), AnchorError> {
        self.backend.reserve_again().map_err(AnchorError::io(op, &self.path))?;
        let given_up = Some(self.database.read()).filter(|current| current.handle.is_none());
        if let Some(number) = given_up.map(|current| current.number) {
            self.open_anew(op, number)?;
        }
        let before = self.backend.last_transaction();
        let (logged, generation) = (self.logged.lock().clone(), position.generation + 1);
        let done = self.ask_once(op, |database, kept| write(database, kept, &logged, changes, generation));
        if let Err((error, number)) = done {
            // The database may have either generation.
            position.is_in_doubt = true;
            if !matches!(error, AnchorError::Io { .. }) || self.role != Role::Writer {
                return Err(error);
            }
            let is_durable = self.backend.last_transaction() != before;
            // Opened now, so that the next call finds a database; if the disk fails, a later call opens it.
            match self.open_anew(op, number) {
                Ok(()) | Err(AnchorError::Io { .. }) if is_durable => {}
                Ok(()) | Err(AnchorError::Io { .. }) => return Err(error),
                Err(other) => return Err(other),
            }
        }
        self.backend.log_is_void();
        *position = Position::front_of(generation);
        *self.logged.lock() = Arc::new(Logged::none_of(generation));
        Ok(())
    }
}

/// Parses bytes as a record of the log, for a fuzzer.
#[cfg(feature = "testing")]
pub fn fuzz_log(bytes: &[u8]) {
    log::fuzz(bytes);
}

/// Runs what may panic on damage. After a panic its data is not used again.
fn fenced<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}

fn not_opened(error: redb::DatabaseError, path: &Path) -> AnchorError {
    match error {
        redb::DatabaseError::DatabaseAlreadyOpen => AnchorError::Locked { path: path.to_owned() },
        error => failed("open", error.into(), path),
    }
}

/// Whether the error means that the file is truncated, or not a database; not that it could not be read.
fn is_of_content(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData)
}

fn failed(op: &'static str, error: redb::Error, path: &Path) -> AnchorError {
    match error {
        redb::Error::Io(source) if !is_of_content(&source) => AnchorError::io(op, path)(source),
        redb::Error::PreviousIo => AnchorError::io(op, path)(io::Error::from_raw_os_error(libc::EIO)),
        detail => AnchorError::Unreadable { detail: Box::new(detail) },
    }
}

/// One transaction: the logged changes, further changes, and the generation that makes the log void.
fn write(
    database: &Handle,
    kept: &Kept,
    logged: &Logged,
    changes: &[Change],
    generation: u64,
) -> Result<(), redb::Error> {
    kept.forget();
    let mut write = database.writer()?.begin_write()?;
    write.set_durability(Durability::Immediate)?;
    let changes = changes.iter().map(|change| (change.space, &change.key[..], change.value.as_deref()));
    let changes: Vec<_> = logged.changes().chain(changes).collect();
    for space in Space::ALL {
        let mut of_space = changes.iter().filter(|(own, ..)| *own == space).peekable();
        if of_space.peek().is_none() {
            continue;
        }
        let mut table = write.open_table(definition(space))?;
        for (_, key, value) in of_space {
            match value {
                Some(value) => drop(table.insert(key, value)?),
                None => drop(table.remove(key)?),
            }
        }
    }
    write.open_table(LOG)?.insert(GENERATION, generation)?;
    let done = write.commit();
    kept.forget();
    Ok(done?)
}

impl Table for DiskTable {
    fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, AnchorError> {
        self.ask("read", |view| view.get(space, key))
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

    fn visit_spaces(&self, spaces: &[Space], visit: &mut VisitRow<'_>) -> Result<(), AnchorError> {
        const OP: &str = "read";
        self.void_failed_record(OP)?;
        let done = self.ask_once(OP, |database, kept| {
            let view = self.view(database, kept)?;
            let mut done = ControlFlow::Continue(());
            for space in spaces.iter().copied() {
                view.visit(space, Bound::Unbounded, |key, value| {
                    done = visit(space, key, value);
                    done
                })?;
                if done.is_break() {
                    break;
                }
            }
            Ok(())
        });
        done.map_err(|(error, _)| error)
    }

    /// False: another process may be writing the file.
    fn verify(&self) -> Result<bool, AnchorError> {
        const OP: &str = "verify";
        if self.role == Role::Reader(Readers::BesideWriter) {
            return Ok(false);
        }
        let _no_commit = self.position.lock();
        self.void_failed_record(OP)?;
        let overlay = Overlay::over(self.backend.file()).map_err(AnchorError::io(OP, &self.path))?;
        let verified = fenced(|| {
            let mut builder = Builder::new();
            builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
            builder.create_with_backend(overlay).map(drop)
        });
        match verified {
            Some(verified) => verified.map(|()| true).map_err(|error| self.failed(OP, error.into())),
            None => Err(AnchorError::Broken),
        }
    }

    fn commit(&self, changes: &[Change]) -> Result<(), AnchorError> {
        const OP: &str = "commit to";
        if self.role == Role::Writer {
            self.is_in_place()?;
        }
        let position = &mut *self.position.lock();
        if self.is_broken.load(Ordering::Acquire) {
            return Err(AnchorError::Broken);
        }
        self.void_failed_record(OP)?;
        if self.role == Role::Writer && self.log(position, changes) {
            return Ok(());
        }
        self.store(OP, position, changes)
    }
}
