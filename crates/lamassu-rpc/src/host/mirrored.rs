//! The table of an anchor that a server keeps: read from a copy on this host, committed at the server first.
//!
//! * The copy is as the server's table was when its **head** was noted in it ([`lamassu_anchor::head`]). A session that
//!   begins compares the two, and fetches all rows where they differ.
//! * A commit says which head it goes on from. The server takes it once, however often it is sent: an answer that was
//!   lost leaves no doubt for longer than the next commit.
//! * What is read counts only while the session is good, before and after (rule R4 of `docs/sharing.md`).

use super::{Connection, Result, Session};
use crate::convert::{self, Batch};
use crate::proto;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{self, Change, DiskTable, Readers, Space, Standing, Table, Visit};
use lamassu_anchor::{Anchor, AnchorError, Revision, ServerFault};
use lamassu_lease::Mode;
use parking_lot::Mutex;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two tries of a commit.
const AGAIN_AFTER: Duration = Duration::from_millis(200);
/// More rows than an anchor of a thousand million files has are no anchor's.
const ROWS_OF_A_TABLE_MAX: u64 = 1 << 33;
/// For the server's answer when all rows have gone to it.
const PUT_TIMEOUT: Duration = Duration::from_secs(120);
/// Under which the copy keeps the number of the session that writes it.
const SESSION: &[u8] = b"session";

/// See the module's head.
pub struct Mirrored {
    /// Ends first: a process of this host that finds the copy free finds the vault free, too.
    session: Session,
    local: DiskTable,
    commits: Mutex<Commits>,
}

struct Commits {
    head: Head,
    /// Of which nobody knows whether the server has it.
    unsettled: Option<Vec<Change>>,
    /// What the server has and the copy has not: it could not be written.
    behind: Vec<Change>,
}

impl Mirrored {
    /// Begins a session, and brings the copy in `file` up to date. A server that was put back from a backup is told
    /// what the copy knows.
    ///
    /// # Errors
    /// [`AnchorError::Server`]; those of the copy.
    pub fn open(connection: &Connection, vault: [u8; 16], mode: Mode, file: &Path) -> Result<Mirrored> {
        match Mirrored::begin(connection, vault, mode, file) {
            Err(AnchorError::Server { fault: ServerFault::Restored { .. }, .. }) => {
                reconcile(connection, vault, file)?;
                Mirrored::begin(connection, vault, mode, file)
            }
            begun => begun,
        }
    }

    fn begin(connection: &Connection, vault: [u8; 16], mode: Mode, file: &Path) -> Result<Mirrored> {
        let (session, local) = match mode {
            Mode::Exclusive => {
                // Locked before: whoever wrote it is gone.
                let local = existing(DiskTable::open(file))?;
                let earlier = local.as_ref().map(session_of).transpose()?.flatten();
                let session = Session::begin(connection, vault, mode, earlier)?;
                let local = up_to_date(&session, vault, file, local)?;
                local.commit(&[noted(session.number())])?;
                (session, local)
            }
            Mode::Shared => {
                let reader = || DiskTable::open_read_only(file, Readers::InsteadOfWriter);
                // No process of this host writes it: whoever did is gone.
                let there = existing(reader());
                let earlier = there.as_ref().ok().and_then(Option::as_ref).map(session_of).transpose()?.flatten();
                // What the server says comes first.
                let session = Session::begin(connection, vault, mode, earlier)?;
                let there = there?;
                let is_current = match &there {
                    Some(local) => Head::of(local)? == Some(session.head),
                    None => false,
                };
                match there.filter(|_| is_current) {
                    Some(local) => (session, local),
                    None => {
                        drop(up_to_date(&session, vault, file, existing(DiskTable::open(file))?)?);
                        (session, reader()?)
                    }
                }
            }
        };
        let commits = Mutex::new(Commits { head: session.head, unsettled: None, behind: Vec::new() });
        Ok(Mirrored { local, session, commits })
    }

    /// The session.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The copy.
    pub fn copy(&self) -> &DiskTable {
        &self.local
    }

    /// What `read` gives, if the session is good until then.
    fn reading<T>(&self, read: impl FnOnce() -> Result<T>) -> Result<T> {
        self.session.wait_until_good()?;
        let done = read()?;
        self.session.wait_until_good().map(|()| done)
    }

    /// Has the server make changes durable that go on from `head`, for as long as the session may come back.
    fn commit_at_server(&self, head: Head, changes: &[Change]) -> Result<Head> {
        let connection = self.session.connection();
        let request =
            proto::CommitRequest { of: Some(self.session.of()), base: head.0.to_vec(), changes: table::pack(changes) };
        let until = Instant::now() + self.session.patience();
        loop {
            self.session.wait_until_good()?;
            match connection.call(connection.anchors().commit(request.clone())) {
                Err(AnchorError::Server { fault: ServerFault::Unreachable { .. }, .. }) if Instant::now() < until => {
                    std::thread::sleep(AGAIN_AFTER);
                }
                done => {
                    let after = convert::head(&done?.head).map_err(|error| connection.garbled(error.0))?;
                    return match after == head.after(changes) {
                        true => Ok(after),
                        false => Err(connection.garbled("a commit came to another head")),
                    };
                }
            }
        }
    }

    fn commit_one(&self, commits: &mut Commits, changes: &[Change]) -> Result<()> {
        let head = match self.commit_at_server(commits.head, changes) {
            Err(error @ AnchorError::Server { fault: ServerFault::Unreachable { .. }, .. }) => {
                commits.unsettled = Some(changes.to_vec());
                return Err(error);
            }
            done => done?,
        };
        commits.head = head;
        commits.behind.extend(changes.iter().cloned().chain([head.change()]));
        self.catch_up(commits)
    }

    /// Brings the copy to where the server is. Where that fails the commit has failed, for its caller keeps what it was
    /// about, so that reads see it; and it is tried again with the next one.
    fn catch_up(&self, commits: &mut Commits) -> Result<()> {
        self.local.commit(&commits.behind)?;
        commits.behind.clear();
        Ok(())
    }
}

impl Table for Mirrored {
    fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.reading(|| self.local.get(space, key))
    }

    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<()> {
        self.reading(|| self.local.scan(space, prefix, visit))
    }

    fn may_end(&self) -> bool {
        true
    }

    fn standing(&self) -> Standing {
        self.session.standing()
    }

    fn wait_until_good(&self) -> Result<()> {
        self.session.wait_until_good()
    }

    fn has_caches(&self) {
        self.session.has_caches();
    }

    fn caches_are_dropped(&self) {
        self.session.caches_are_dropped();
    }

    fn wait_while_good(&self) {
        self.session.wait_while_good();
    }

    fn commit(&self, changes: &[Change]) -> Result<()> {
        let commits = &mut *self.commits.lock();
        if !commits.behind.is_empty() {
            self.catch_up(commits)?;
        }
        if let Some(unsettled) = commits.unsettled.take() {
            self.commit_one(commits, &unsettled)?;
        }
        self.commit_one(commits, changes)
    }
}

fn existing(opened: Result<DiskTable>) -> Result<Option<DiskTable>> {
    match opened {
        Err(AnchorError::Missing { .. } | AnchorError::Empty) => Ok(None),
        opened => opened.map(Some),
    }
}

fn session_of(table: &DiskTable) -> Result<Option<u64>> {
    Ok(table.get(Space::Head, SESSION)?.and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes))
}

fn noted(session: u64) -> Change {
    Change { space: Space::Head, key: SESSION.to_vec(), value: Some(session.to_le_bytes().to_vec()) }
}

/// How far the anchor in a table has come; `None`: there is none.
fn revision(table: DiskTable, vault: &[u8; 16]) -> Result<Option<(Revision, Arc<DiskTable>)>> {
    let table = Arc::new(table);
    match Anchor::open(table.clone(), vault) {
        Ok(anchor) => Ok(Some((anchor.vault().revision, table))),
        Err(AnchorError::Empty) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The copy as the session found the server's table.
fn up_to_date(session: &Session, vault: [u8; 16], file: &Path, local: Option<DiskTable>) -> Result<DiskTable> {
    let seen = match local {
        Some(local) if Head::of(&local)? == Some(session.head) => return Ok(local),
        // It went to the server, and the answer was lost.
        Some(local) if Head::of(&local)?.is_none() && in_messages(&local, drop)? == session.head => {
            local.commit(&[session.head.change()])?;
            return Ok(local);
        }
        Some(local) => revision(local, &vault)?,
        None => None,
    };
    let new = beside(file);
    // Left by a run that was cut off.
    let _ = fs::remove_file(&new);
    let fetched = fetch(session, &new).and_then(|table| {
        let (found, _) = revision(table, &vault)?.ok_or(AnchorError::Empty)?;
        match seen.as_ref().filter(|(seen, _)| found <= *seen) {
            Some((seen, _)) => Err(session.connection().error(ServerFault::Older { found, seen: *seen })),
            None => Ok(()),
        }
    });
    let placed = fetched.and_then(|()| {
        let io = |source| AnchorError::Io { op: "put in place", path: file.to_owned(), source };
        fs::rename(&new, file).map_err(io)?;
        DiskTable::open(file)
    });
    placed.inspect_err(|_| {
        let _ = fs::remove_file(&new);
    })
}

fn beside(file: &Path) -> PathBuf {
    let mut name = OsString::from(file.as_os_str());
    name.push(".new");
    name.into()
}

/// All rows of the server's table, into a new file.
fn fetch(session: &Session, file: &Path) -> Result<DiskTable> {
    let connection = session.connection();
    let table = DiskTable::create(file)?;
    let mut rows = connection.call(connection.anchors().rows(session.of()))?;
    let mut head = None;
    let mut left = ROWS_OF_A_TABLE_MAX;
    while let Some(some) = connection.in_time(rows.message())? {
        if head.is_none() {
            head = Some(convert::head(&some.head).map_err(|error| connection.garbled(error.0))?);
        }
        let rows = convert::to_rows(&some.rows).map_err(|error| connection.garbled(error.0))?;
        left = left.checked_sub(rows.len() as u64).ok_or_else(|| connection.garbled("rows without end"))?;
        table.commit(&rows)?;
    }
    match head {
        Some(head) if head == session.head => {
            table.commit(&[head.change()])?;
            Ok(table)
        }
        _ => Err(connection.garbled("the rows are not those of the session's head")),
    }
}

/// Tells a server that was put back from a backup what the copy in `file` knows of a vault.
fn reconcile(connection: &Connection, vault: [u8; 16], file: &Path) -> Result<()> {
    let copy = match existing(DiskTable::open(file))? {
        Some(copy) => {
            let head = Head::of(&copy)?;
            revision(copy, &vault)?.map(|(revision, copy)| (revision, head, copy))
        }
        None => None,
    };
    let known = proto::Known {
        vault: vault.to_vec(),
        revision: copy.as_ref().map_or(0, |(revision, ..)| revision.0),
        head: copy.as_ref().and_then(|(_, head, _)| *head).map_or(Vec::new(), |head| head.0.to_vec()),
    };
    let wanted = connection.call(connection.anchors().reconcile(known))?;
    match copy.filter(|_| wanted.rows) {
        Some((_, head, copy)) => {
            let (sent, has) = send_rows(connection, vault, &copy, head)?;
            // Another host may have known more meanwhile: then the session fetches that.
            if head.is_none() && sent == has { copy.commit(&[sent.change()]) } else { Ok(()) }
        }
        None => Ok(()),
    }
}

/// Gives a server the anchor of a vault that it does not know: all rows of a table, which becomes the copy.
///
/// # Errors
/// [`AnchorError::Server`]; those of the table.
pub fn put(connection: &Connection, vault: [u8; 16], table: &DiskTable) -> Result<()> {
    match send_rows(connection, vault, table, None)? {
        (sent, has) if sent == has => table.commit(&[sent.change()]),
        _ => Err(connection.garbled("the anchor came to another head")),
    }
}

/// Sends all rows of a table, which has this head if a server knew it. Returns the head that the rows come to, and that
/// which the server has then.
fn send_rows(connection: &Connection, vault: [u8; 16], table: &DiskTable, head: Option<Head>) -> Result<(Head, Head)> {
    let (up, rows) = tokio::sync::mpsc::channel(4);
    let all_gone = tokio::sync::Notify::new();
    std::thread::scope(|scope| {
        let state = scope.spawn(|| {
            let mut anchors = connection.anchors();
            let put = anchors.put(tokio_stream::wrappers::ReceiverStream::new(rows));
            let sent = super::wait(async {
                tokio::pin!(put);
                tokio::select! {
                    answer = &mut put => answer,
                    // All has gone: now its time runs.
                    () = async { all_gone.notified().await; tokio::time::sleep(PUT_TIMEOUT).await } => {
                        Err(tonic::Status::unavailable("no answer in time"))
                    }
                }
            })?;
            sent.map_err(|status| connection.failed(&status))
        });
        let (mut vault, mut head) = (vault.to_vec(), head.map_or(Vec::new(), |head| head.0.to_vec()));
        // A server that has refused takes nothing more: its answer says why.
        let send = |rows| {
            let (vault, head) = (std::mem::take(&mut vault), std::mem::take(&mut head));
            drop(up.blocking_send(proto::PutRequest { vault, rows, head }));
        };
        let first = in_messages(table, send)?;
        drop(up);
        all_gone.notify_one();
        let state = state.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?.into_inner();
        Ok((first, convert::head(&state.head).map_err(|error| connection.garbled(error.0))?))
    })
}

/// The rows of a table in the messages that bring them to a server, and the head that it has there at first.
fn in_messages(table: &DiskTable, mut message: impl FnMut(Vec<u8>)) -> Result<Head> {
    let (mut batch, mut head) = (Batch::default(), Head([0; 32]));
    let mut next = |rows: Vec<u8>| {
        head = head.after(&convert::to_rows(&rows).unwrap_or_default());
        message(rows);
    };
    table.visit_all(|space, key, value| {
        batch.push(space, key, value).into_iter().for_each(&mut next);
        Ok::<(), AnchorError>(())
    })?;
    next(batch.rest());
    Ok(head)
}

/// Whether a copy was to be given to a server, and nobody here knows whether that has it.
///
/// # Errors
/// Those of the table.
pub fn is_on_its_way(copy: &Path) -> Result<bool> {
    match existing(DiskTable::open_read_only(copy, Readers::BesideWriter))? {
        Some(table) => Ok(Head::of(&table)?.is_none()),
        None => Ok(false),
    }
}

/// Has the server give up the anchor of a vault that a session has alone.
///
/// # Errors
/// [`AnchorError::Server`].
pub fn give_up(session: &Session) -> Result<()> {
    let connection = session.connection();
    connection.call(connection.anchors().give_up(session.of())).map(drop)
}
