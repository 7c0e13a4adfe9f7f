//! What a database is opened for: to write, or to read beside a writer or instead of one.

use super::backend::{Backend, Shared};
use redb::{Builder, ConcurrencyMode, Database, ReadOnlyDatabase, ReadTransaction, ReadableDatabase};
use std::io;
use std::sync::Arc;

/// Bytes of the file that redb caches, unless the caller has very many tables.
pub(super) const CACHE_BYTES: usize = 16 << 20;

/// How a reading process shares the file with a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// It reads while a writer has the file open, and sees its commits.
    BesideWriter,
    /// Neither opens the file while the other has it open.
    InsteadOfWriter,
}

pub(super) enum Handle {
    Writer(Database),
    Reader(ReadOnlyDatabase),
}

impl Handle {
    pub fn begin_read(&self) -> Result<ReadTransaction, redb::Error> {
        Ok(match self {
            Handle::Writer(database) => database.begin_read()?,
            Handle::Reader(database) => database.begin_read()?,
        })
    }

    /// The database for writing; for a reader the error of a read-only disk.
    pub fn writer(&self) -> Result<&Database, redb::Error> {
        match self {
            Handle::Writer(database) => Ok(database),
            Handle::Reader(_) => Err(redb::Error::Io(io::Error::from_raw_os_error(libc::EROFS))),
        }
    }
}

/// The purpose for which a database is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Writer,
    Reader(Readers),
}

impl Role {
    pub fn open(self, backend: &Arc<Backend>) -> Result<Handle, redb::DatabaseError> {
        let mode = match self {
            Role::Writer | Role::Reader(Readers::BesideWriter) => ConcurrencyMode::SingleWriter,
            Role::Reader(Readers::InsteadOfWriter) => ConcurrencyMode::ExclusiveWriter,
        };
        let mut builder = Builder::new();
        builder.set_cache_size(backend.cache_bytes).set_concurrency_mode(mode);
        let backend = Shared(backend.clone());
        match self {
            Role::Writer => builder.create_with_backend(backend).map(Handle::Writer),
            Role::Reader(_) => builder.open_read_only_with_backend(backend).map(Handle::Reader),
        }
    }
}
