//! This host's copy of a table that a server keeps, and how it is brought up to date.
//!
//! If the server still has the commits that the copy lacks, the copy takes those. It verifies by the digests that they
//! lead from its own head to the session's head. Otherwise all rows are fetched into a new file, which replaces the
//! copy when it is complete.

use super::put::in_messages;
use crate::convert::{self, Counted};
use crate::host::{Result, Session};
use crate::{CHANGES_MAX, DELTA_COMMITS_MAX, DELTA_MAX, proto};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{Change, DiskTable, FILE_MODE, Space, Table};
use lamassu_anchor::{Anchor, AnchorError, Revision, ServerFault};
use lamassu_format::header::VaultId;
use rustix::fs::OFlags;
use std::ffi::OsString;
use std::fs::{self, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Limit on rows that a server may send: an anchor of 10⁹ files has fewer.
const ROWS_OF_A_TABLE_MAX: u64 = 1 << 33;
/// How long another process of this host that makes the copy is waited for, and how often it is looked at.
const ALONE_WAIT: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// The key under which the copy stores the number of the session that writes it.
const SESSION: &[u8] = b"session";

/// A copy that may be missing.
pub(crate) fn existing(opened: Result<DiskTable>) -> Result<Option<Arc<DiskTable>>> {
    match opened {
        Err(AnchorError::Missing { .. } | AnchorError::Empty) => Ok(None),
        opened => opened.map(|table| Some(Arc::new(table))),
    }
}

/// The session that last wrote a copy.
pub(crate) fn session_of(table: &DiskTable) -> Result<Option<u64>> {
    Ok(table.get(Space::Head, SESSION)?.and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes))
}

/// The change that stores the session's number.
pub(crate) fn noted(session: u64) -> Change {
    Change { space: Space::Head, key: SESSION.to_vec(), value: Some(session.to_le_bytes().to_vec()) }
}

/// The revision of the anchor in a table; `None`: the table is empty.
pub(super) fn revision(table: &Arc<DiskTable>, vault: &VaultId) -> Result<Option<Revision>> {
    match Anchor::open(table.clone(), vault) {
        Ok(anchor) => Ok(Some(anchor.vault().revision)),
        Err(AnchorError::Empty) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The copy, equal to the server's table as of the session's grant, and the changes that were applied to it, in order;
/// `None`: they are unknown.
///
/// The session may have ended meanwhile. The copy is kept then too: the next session fetches only the commits since.
/// Otherwise a host that needs longer for all rows than it may keep others waiting would never get a turn.
pub(crate) fn up_to_date(
    session: &Session,
    vault: VaultId,
    file: &Path,
    local: Option<Arc<DiskTable>>,
) -> Result<(Arc<DiskTable>, Option<Vec<Change>>)> {
    // An open copy keeps other processes out. Without one, two would fill the same new file.
    let _alone = if local.is_none() { Some(alone(session, file)?) } else { None };
    let local = if local.is_none() { existing(DiskTable::open(file))? } else { local };
    let known = local.as_ref().map(|local| Head::of(&**local)).transpose()?.flatten();
    let seen = match &local {
        Some(local) if known == Some(session.head) => return Ok((local.clone(), Some(Vec::new()))),
        // The copy was put at the server, and the answer was lost.
        Some(local) if known.is_none() && in_messages(local, |_, _| ())? == session.head => {
            local.commit(&[session.head.change()])?;
            return Ok((local.clone(), Some(Vec::new())));
        }
        Some(local) => revision(local, &vault)?,
        None => None,
    };
    let new = beside(file, ".new");
    // An interrupted run may have left it.
    let _ = fs::remove_file(&new);
    let placed = fetch(session, known, &new).and_then(|fetched| match (fetched, &local) {
        (Fetched::Commits(changes), Some(local)) => {
            local.commit(&changes.iter().cloned().chain([session.head.change()]).collect::<Vec<_>>())?;
            Ok((local.clone(), Some(changes)))
        }
        (Fetched::Commits(_), None) => Err(session.connection().garbled("commits that were not asked for")),
        (Fetched::All(table), _) => {
            let found = revision(&Arc::new(table), &vault)?.ok_or(AnchorError::Empty)?;
            if let Some(seen) = seen.filter(|seen| found <= *seen) {
                return Err(session.connection().error(ServerFault::Older { found, seen }));
            }
            let io = |source| AnchorError::Io { op: "put in place", path: file.to_owned(), source };
            fs::rename(&new, file).map_err(io)?;
            Ok((Arc::new(DiskTable::open(file)?), None))
        }
    });
    placed.inspect_err(|_| {
        let _ = fs::remove_file(&new);
    })
}

fn beside(file: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(file.as_os_str());
    name.push(suffix);
    name.into()
}

/// Waits until no other process of this host makes this copy, and keeps others from it. Not for long: other hosts may
/// wait for this session.
fn alone(session: &Session, file: &Path) -> Result<fs::File> {
    let (path, until) = (beside(file, ".lock"), Instant::now() + ALONE_WAIT);
    let mut options = fs::File::options();
    options.create(true).truncate(false).write(true).mode(FILE_MODE).custom_flags(OFlags::NOFOLLOW.bits() as i32);
    let failed = |source| AnchorError::Io { op: "lock", path: path.clone(), source };
    let lock = options.open(&path).map_err(failed)?;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::Error(source)) => return Err(failed(source)),
            Err(TryLockError::WouldBlock) if Instant::now() >= until => {
                return Err(AnchorError::Locked { path: file.to_owned() });
            }
            Err(TryLockError::WouldBlock) => {
                session.wait_until_good()?;
                std::thread::sleep(LOOK_AGAIN);
            }
        }
    }
}

/// What a server sends of its table.
enum Fetched {
    /// All rows, in a new file.
    All(DiskTable),
    /// The changes since the head in the request.
    Commits(Vec<Change>),
}

/// Fetches the changes since a head, or all rows, into a new file.
fn fetch(session: &Session, since: Option<Head>, new: &Path) -> Result<Fetched> {
    let connection = session.connection();
    let garbled = |error: convert::Garbled| connection.garbled(error.0);
    let proto::Of { vault, session: number } = session.of();
    let since_bytes = since.map_or(Vec::new(), |since| since.0.to_vec());
    let request = proto::RowsRequest { vault, session: number, since: since_bytes };
    let mut rows = connection.call(connection.anchors().rows(request))?;
    let mut next = || connection.in_time(rows.message());
    let first = next()?.ok_or_else(|| connection.garbled("no rows"))?;
    // The server reads the rows as of one moment, before it sends the first. If the session is good after that moment,
    // the rows are those of its head, even if it ends while they are being sent. Commits prove it by their digests.
    session.wait_until_good()?;
    match since.filter(|_| first.is_commit) {
        Some(since) => {
            let mut delta = Delta::since(since);
            let mut some = Some(first);
            while let Some(commit) = some {
                delta.take(&commit).map_err(garbled)?;
                some = next()?;
            }
            delta.finish(session.head).map_err(garbled).map(Fetched::Commits)
        }
        None => fetch_all(session, first, next, new).map(Fetched::All),
    }
}

fn fetch_all(
    session: &Session,
    first: proto::SomeRows,
    mut next: impl FnMut() -> Result<Option<proto::SomeRows>>,
    new: &Path,
) -> Result<DiskTable> {
    let connection = session.connection();
    let garbled = |error: convert::Garbled| connection.garbled(error.0);
    let table = DiskTable::create(new)?;
    let head = convert::head(&first.head).map_err(garbled)?;
    let (mut some, mut left, mut counted) = (Some(first), ROWS_OF_A_TABLE_MAX, Counted::default());
    while let Some(more) = some {
        let rows = convert::to_rows(&more.rows).map_err(garbled)?;
        counted.take(rows.len(), more.all).map_err(garbled)?;
        left = left.checked_sub(rows.len() as u64).ok_or_else(|| connection.garbled("rows without end"))?;
        table.commit(&rows)?;
        some = next()?;
    }
    counted.finish().map_err(garbled)?;
    if head != session.head {
        return Err(connection.garbled("the rows are not those of the session's head"));
    }
    table.commit(&[head.change()])?;
    Ok(table)
}

/// Successive commits, and the head after them.
struct Delta {
    head: Head,
    commits: usize,
    len: usize,
    changes: Vec<Change>,
}

impl Delta {
    fn since(head: Head) -> Delta {
        Delta { head, commits: 0, len: 0, changes: Vec::new() }
    }

    fn take(&mut self, commit: &proto::SomeRows) -> std::result::Result<(), convert::Garbled> {
        if !commit.is_commit {
            return Err(convert::Garbled("rows between commits"));
        }
        (self.commits, self.len) = (self.commits + 1, self.len + commit.rows.len());
        if self.commits > DELTA_COMMITS_MAX || self.len > DELTA_MAX {
            return Err(convert::Garbled("commits without end"));
        }
        let changes = convert::to_changes(&commit.rows, CHANGES_MAX)?;
        self.head = self.head.after(&changes);
        self.changes.extend(changes);
        Ok(())
    }
    /// Their changes, if they lead to this head.
    fn finish(self, head: Head) -> std::result::Result<Vec<Change>, convert::Garbled> {
        match self.head == head {
            true => Ok(self.changes),
            false => Err(convert::Garbled("the commits do not lead to the session's head")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_anchor::table;

    fn commit(value: u8) -> Vec<Change> {
        vec![Change { space: Space::Objects, key: vec![1], value: Some(vec![value]) }]
    }

    fn said(changes: &[Change]) -> proto::SomeRows {
        proto::SomeRows { rows: table::pack(changes), is_commit: true, ..proto::SomeRows::default() }
    }

    fn taken(said: &[proto::SomeRows], head: Head) -> Option<Vec<Change>> {
        let mut delta = Delta::since(Head([0; 32]));
        said.iter().try_for_each(|said| delta.take(said)).ok()?;
        delta.finish(head).ok()
    }

    #[test]
    fn commits_are_taken_that_lead_to_the_head_and_no_others() {
        let head = Head([0; 32]).after(&commit(1)).after(&commit(2));
        let (one, two) = (said(&commit(1)), said(&commit(2)));
        assert_eq!(taken(&[one.clone(), two.clone()], head), Some([commit(1), commit(2)].concat()));
        let together = said(&[commit(1), commit(2)].concat());
        let rows = proto::SomeRows { is_commit: false, ..two.clone() };
        let garbage = proto::SomeRows { rows: vec![0xff; 9], ..two.clone() };
        for lie in [
            vec![],
            vec![one.clone()],
            vec![two.clone(), one.clone()],
            vec![one.clone(), said(&commit(3))],
            vec![one.clone(), two.clone(), two.clone()],
            vec![together],
            vec![one.clone(), rows],
            vec![one.clone(), garbage],
        ] {
            assert_eq!(taken(&lie, head), None, "{lie:?}");
        }
        // The head is the server's to say, and a delta ends.
        let own = Change { space: Space::Head, key: vec![1], value: None };
        assert_eq!(taken(&[said(std::slice::from_ref(&own))], Head([0; 32]).after(&[own])), None);
        let many = vec![said(&[]); DELTA_COMMITS_MAX + 1];
        let all = many.iter().fold(Head([0; 32]), |head, _| head.after(&[]));
        assert_eq!(taken(&many, all), None);
    }
}
