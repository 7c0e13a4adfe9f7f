//! The tables as of the last commit: a snapshot of the database, which all reads share until its next transaction, and
//! the logged changes on top. Beginning a transaction of redb for each read would take four file locks, which readers
//! in other processes make necessary, and five times as long as the read itself.
//!
//! Only the writing process keeps a snapshot, since no other process changes what it reads. A snapshot is dropped
//! before a transaction, because it would keep the pages that the previous transaction freed. A snapshot that a read
//! has made meanwhile is dropped after it.

use super::super::Space;
use super::log::Logged;
use super::{GENERATION, Handle, LOG, definition};
use parking_lot::Mutex;
use redb::ReadOnlyTable;
use std::ops::{Bound, ControlFlow};
use std::sync::Arc;

type Rows = ReadOnlyTable<&'static [u8], &'static [u8]>;

/// All tables of the database at one moment.
pub(super) struct Snapshot {
    rows: Vec<(Space, Rows)>,
    /// The generation of the log on top of it.
    pub generation: u64,
}

impl Snapshot {
    pub fn of(database: &Handle) -> Result<Snapshot, redb::Error> {
        let read = database.begin_read()?;
        let open = |space| Ok((space, read.open_table(definition(space))?));
        let rows = Space::ALL.into_iter().map(open).collect::<Result<_, redb::Error>>()?;
        let generation = read.open_table(LOG)?.get(GENERATION)?.map_or(0, |generation| generation.value());
        Ok(Snapshot { rows, generation })
    }

    /// One of its tables.
    fn table(&self, space: Space) -> Result<&Rows, redb::Error> {
        let found = self.rows.iter().find(|(own, _)| *own == space).map(|(_, rows)| rows);
        found.ok_or_else(|| redb::Error::TableDoesNotExist(format!("{space:?}")))
    }
}

/// What a read sees: a snapshot, and the logged changes.
pub(super) struct View {
    pub snapshot: Arc<Snapshot>,
    pub logged: Arc<Logged>,
}

impl View {
    /// The value of a key.
    pub fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, redb::Error> {
        match self.logged.get(space, key) {
            Some(value) => Ok(value.map(<[u8]>::to_vec)),
            None => Ok(self.snapshot.table(space)?.get(key)?.map(|value| value.value().to_vec())),
        }
    }

    /// Visits keys and values of a table, ascending, until `visit` breaks.
    pub fn visit(
        &self,
        space: Space,
        from: Bound<&[u8]>,
        mut visit: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<(), redb::Error> {
        let mut logged = self.logged.range(space, from).peekable();
        for row in self.snapshot.table(space)?.range::<&[u8]>((from, Bound::Unbounded))? {
            let (key, value) = row?;
            while let Some((own, value)) = logged.next_if(|(own, _)| *own < key.value()) {
                if value.is_some_and(|value| visit(own, value).is_break()) {
                    return Ok(());
                }
            }
            let newer = logged.next_if(|(own, _)| *own == key.value());
            let value = newer.map_or_else(|| Some(value.value()), |(_, value)| value);
            if value.is_some_and(|value| visit(key.value(), value).is_break()) {
                return Ok(());
            }
        }
        let mut rest = logged.filter_map(|(key, value)| value.map(|value| (key, value)));
        let _ = rest.try_for_each(|(key, value)| visit(key, value));
        Ok(())
    }
}

/// The snapshot that reads share.
#[derive(Default)]
pub(super) struct Kept {
    snapshot: Mutex<Option<Arc<Snapshot>>>,
}

impl Kept {
    /// The shared snapshot, or a new one.
    pub fn get(&self, database: &Handle) -> Result<Arc<Snapshot>, redb::Error> {
        let mut kept = self.snapshot.lock();
        if let Some(snapshot) = &*kept {
            return Ok(snapshot.clone());
        }
        let snapshot = Arc::new(Snapshot::of(database)?);
        *kept = Some(snapshot.clone());
        Ok(snapshot)
    }

    /// Drops it: later reads see what was committed before this call, or later.
    pub fn forget(&self) {
        drop(self.snapshot.lock().take());
    }
}
