//! The tables as of the last commit, opened once for all that is read until the next one. To begin a transaction of
//! redb for each read would take four locks of the file, which readers in other processes make necessary, and five
//! times as long as the read itself.
//!
//! Only the process that writes keeps one: no other process changes what it reads. One is dropped before a commit,
//! since it would keep the pages that the commit before has freed, and one that was made meanwhile behind it.

use super::super::Space;
use super::{Handle, definition};
use parking_lot::Mutex;
use redb::ReadOnlyTable;
use std::sync::Arc;

type Rows = ReadOnlyTable<&'static [u8], &'static [u8]>;

/// All tables at one moment.
pub(super) struct Snapshot(Vec<(Space, Rows)>);

impl Snapshot {
    fn of(database: &Handle) -> Result<Snapshot, redb::Error> {
        let read = database.begin_read()?;
        let open = |space| Ok((space, read.open_table(definition(space))?));
        Ok(Snapshot(Space::ALL.into_iter().map(open).collect::<Result<_, redb::Error>>()?))
    }

    /// One of its tables.
    pub fn table(&self, space: Space) -> Result<&Rows, redb::Error> {
        let found = self.0.iter().find(|(own, _)| *own == space).map(|(_, rows)| rows);
        found.ok_or_else(|| redb::Error::TableDoesNotExist(format!("{space:?}")))
    }
}

/// The one that reads share.
#[derive(Default)]
pub(super) struct Kept {
    snapshot: Mutex<Option<Arc<Snapshot>>>,
}

impl Kept {
    /// The one that is kept, or a new one.
    pub fn get(&self, database: &Handle) -> Result<Arc<Snapshot>, redb::Error> {
        if matches!(database, Handle::Reader(_)) {
            return Ok(Arc::new(Snapshot::of(database)?));
        }
        let mut kept = self.snapshot.lock();
        if let Some(snapshot) = &*kept {
            return Ok(snapshot.clone());
        }
        let snapshot = Arc::new(Snapshot::of(database)?);
        *kept = Some(snapshot.clone());
        Ok(snapshot)
    }

    /// Lets go of it: what is read from now on is what was committed before this call, or later.
    pub fn forget(&self) {
        drop(self.snapshot.lock().take());
    }
}
