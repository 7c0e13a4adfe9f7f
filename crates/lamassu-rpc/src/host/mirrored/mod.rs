//! The table of an anchor that a server keeps: read from a copy on this host, committed at the server first.
//!
//! * The copy is as the server's table was when its **head** was noted in it ([`lamassu_anchor::head`]). A session that
//!   gets the vault compares the two, and fetches what was changed since, or all rows, where they differ.
//! * A commit says which head it goes on from. The server takes it once, however often it is sent: an answer that was
//!   lost leaves no doubt for longer than the next commit.
//! * What is read counts only while the session is good, before and after (rule R4 of `docs/sharing.md`).

pub(super) mod copy;
mod put;

pub use self::put::{give_up, is_on_its_way, put};

use self::copy::{existing, noted, session_of, up_to_date};
pub(super) use self::put::reconcile;
use super::{Connection, Result, Session};
use crate::{convert, proto};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{self, Change, DiskTable, Readers, Space, Standing, Table, Visit};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::Profile;
use lamassu_lease::Mode;
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two tries of a commit.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// See the module's head.
pub struct Mirrored {
    /// Ends first: a process of this host that finds the copy free finds the vault free, too.
    session: Session,
    local: Arc<DiskTable>,
    commits: Mutex<Commits>,
}

struct Commits {
    head: Head,
    /// Of which nobody knows whether the server has it.
    unsettled: Option<Vec<Change>>,
    /// What the server has and the copy has not: it could not be written.
    behind: Vec<Change>,
    /// The copy is another's to write.
    is_closed: bool,
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
                reconcile(connection, vault, existing(DiskTable::open(file))?)?;
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
                let earlier = local.as_deref().map(session_of).transpose()?.flatten();
                let session = Session::begin(connection, vault, mode, earlier)?;
                let (local, _) = up_to_date(&session, vault, file, local)?;
                local.commit(&[noted(session.number())])?;
                (session, local)
            }
            Mode::Shared => {
                let reader = || DiskTable::open_read_only(file, Readers::InsteadOfWriter);
                // No process of this host writes it: whoever did is gone.
                let there = existing(reader());
                let earlier = there.as_ref().ok().and_then(Option::as_deref).map(session_of).transpose()?.flatten();
                // What the server says comes first.
                let session = Session::begin(connection, vault, mode, earlier)?;
                let there = there?;
                let is_current = match &there {
                    Some(local) => Head::of(&**local)? == Some(session.head),
                    None => false,
                };
                match there.filter(|_| is_current) {
                    Some(local) => (session, local),
                    None => {
                        drop(up_to_date(&session, vault, file, existing(DiskTable::open(file))?)?);
                        (session, Arc::new(reader()?))
                    }
                }
            }
        };
        Ok(Mirrored::of(session, local))
    }

    /// Of what a session has, and a copy that is as it is there.
    pub(super) fn of(session: Session, local: Arc<DiskTable>) -> Mirrored {
        let commits = Commits { head: session.head, unsettled: None, behind: Vec::new(), is_closed: false };
        Mirrored { local, session, commits: Mutex::new(commits) }
    }

    /// Nothing more gets into the copy by this. Waits for a commit that is under way.
    pub(super) fn close(&self) {
        self.commits.lock().is_closed = true;
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

    fn check_profile(&self, profile: Profile) -> Result<()> {
        self.session.check_profile(profile)
    }

    fn commit(&self, changes: &[Change]) -> Result<()> {
        let commits = &mut *self.commits.lock();
        if commits.is_closed {
            return Err(self.session.connection().error(ServerFault::Ended));
        }
        self.session.wait_until_good()?;
        if self.session.mode() == Some(Mode::Shared) {
            let detail = "the vault is held to read".into();
            return Err(self.session.connection().error(ServerFault::Refused { detail }));
        }
        if !commits.behind.is_empty() {
            self.catch_up(commits)?;
        }
        if let Some(unsettled) = commits.unsettled.take() {
            self.commit_one(commits, &unsettled)?;
        }
        self.commit_one(commits, changes)
    }
}
