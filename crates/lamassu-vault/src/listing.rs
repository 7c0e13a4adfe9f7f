//! An open directory, and the snapshot that its listing goes through.

use crate::dirs::Dir;
use crate::{Ino, Kind, Result};
use lamassu_store::backend;
use parking_lot::Mutex;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// An open directory.
pub(crate) struct OpenDir {
    pub ino: Ino,
    /// `None`: the directory was removed before it was opened, and lists nothing.
    pub dir: Option<Arc<Dir>>,
    pub parent: Ino,
    /// The snapshot of the current listing. `None` before the first: entries made between opendir(3) and rewinddir(3)
    /// belong to it.
    entries: Mutex<Option<Arc<Snapshot>>>,
}

/// The entries of a directory at one time; all names in one piece of memory.
pub(crate) struct Snapshot {
    names: Box<[u8]>,
    rows: Box<[Row]>,
    /// The anchor has entries that the store did not show, or whose names it did not show.
    is_incomplete: AtomicBool,
    /// The error of the store if it could not read the name of an entry; 0: it read all.
    unread: AtomicI32,
    /// A move from or to the directory had no outcome then.
    pub had_unsettled: bool,
}

/// An entry without its name. The name ends at `end`, and begins where the name before ends.
struct Row {
    end: usize,
    ino: u64,
    kind: Option<Kind>,
}

/// An entry of the store.
pub(crate) struct Listed<'a> {
    pub name: &'a OsStr,
    pub ino: u64,
    pub kind: Option<Kind>,
}

impl Snapshot {
    /// A snapshot of these entries; `is_incomplete`: the anchor has others.
    pub fn of(entries: Vec<backend::Listed>, is_incomplete: bool) -> Self {
        let mut names = Vec::with_capacity(entries.iter().map(|entry| entry.name.len()).sum());
        let mut row = |entry: backend::Listed| {
            names.extend_from_slice(entry.name.as_bytes());
            Row { end: names.len(), ino: entry.ino, kind: entry.kind }
        };
        let rows: Vec<_> = entries.into_iter().map(&mut row).collect();
        let (is_incomplete, unread) = (AtomicBool::new(is_incomplete), AtomicI32::new(0));
        Snapshot { names: names.into(), rows: rows.into(), is_incomplete, unread, had_unsettled: false }
    }

    /// The same of a directory from or to which a move may have no outcome.
    pub fn beside_unsettled(self, had_unsettled: bool) -> Self {
        Snapshot { had_unsettled, ..self }
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        self.names.len() + size_of_val(&*self.rows)
    }

    /// The entries from `first` on, with their indices.
    pub fn from(&self, first: usize) -> impl Iterator<Item = (usize, Listed<'_>)> {
        let begin = |index: usize| index.checked_sub(1).map_or(0, |before| self.rows[before].end);
        self.rows.iter().enumerate().skip(first).map(move |(index, row)| {
            let name = OsStr::from_bytes(&self.names[begin(index)..row.end]);
            (index, Listed { name, ino: row.ino, kind: row.kind })
        })
    }

    /// Notes that the name of an entry is not shown.
    pub fn lacks_one(&self) {
        self.is_incomplete.store(true, Ordering::Relaxed);
    }

    /// Notes that the store could not read the name of an entry.
    pub fn lacks_unread(&self, error: &io::Error) {
        self.unread.store(error.raw_os_error().unwrap_or(libc::EIO), Ordering::Relaxed);
    }

    /// The error of the store if it could not read a name.
    pub fn unread(&self) -> Option<io::Error> {
        Some(self.unread.load(Ordering::Relaxed)).filter(|errno| *errno != 0).map(io::Error::from_raw_os_error)
    }

    /// Whether the anchor has entries that the store did not show, or whose names it did not show.
    pub fn is_incomplete(&self) -> bool {
        self.is_incomplete.load(Ordering::Relaxed)
    }
}

impl OpenDir {
    pub fn new(ino: Ino, dir: Option<Arc<Dir>>, parent: Ino, entries: Option<Arc<Snapshot>>) -> OpenDir {
        OpenDir { ino, dir, parent, entries: Mutex::new(entries) }
    }

    /// The snapshot of the current listing.
    pub fn listing(&self) -> Option<Arc<Snapshot>> {
        self.entries.lock().clone()
    }

    /// The snapshot, taken anew by `take` at the start and at a rewind.
    pub fn entries(&self, cookie: u64, take: impl FnOnce() -> Result<Snapshot>) -> Result<Arc<Snapshot>> {
        if cookie > 0
            && let Some(entries) = &*self.entries.lock()
        {
            return Ok(entries.clone());
        }
        let entries = Arc::new(take()?);
        *self.entries.lock() = Some(entries.clone());
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_gives_its_entries_from_any_place_and_takes_little_more_than_their_names() {
        let entry = |(name, ino): (&str, u64)| backend::Listed { name: name.into(), ino, kind: Some(Kind::File) };
        let names = [("a", 1), ("", 2), ("long", 3)];
        let snapshot = Snapshot::of(names.into_iter().map(entry).collect(), false);
        let from =
            |first| snapshot.from(first).map(|(at, e)| (at, e.name.to_str().unwrap(), e.ino)).collect::<Vec<_>>();
        assert_eq!(from(0), [(0, "a", 1), (1, "", 2), (2, "long", 3)]);
        assert_eq!((from(2), from(3), from(usize::MAX)), (vec![(2, "long", 3)], vec![], vec![]));
        assert_eq!(snapshot.bytes(), "along".len() + 3 * size_of::<Row>());
        assert!(size_of::<Row>() <= 24);
        assert_eq!(Snapshot::of(Vec::new(), false).from(0).count(), 0);
    }
}
