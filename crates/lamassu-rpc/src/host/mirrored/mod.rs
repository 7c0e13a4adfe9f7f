//! The table of an anchor that a server keeps: read from a copy on this host, committed at the server first.
//!
//! * The copy is the server's table as of the **head** that is stored in it ([`lamassu_anchor::head`]). A session that
//!   is granted the vault compares the heads. If they differ, it fetches the changes since, or all rows.
//! * A commit names the head that it is based on. The server applies it once, however often it is sent. One without an
//!   answer is *pending*: before anything else is committed, it is sent again. From then on only the server's answer
//!   about this commit tells whether it was made: that it is not taken now, for another reason, says nothing of before.
//! * A read counts only if the session is good before and after it (rule R4 of `docs/sharing.md`).

pub(super) mod copy;
mod put;

pub use self::put::{give_up, is_on_its_way, put};

use self::copy::{existing, noted, session_of, up_to_date};
pub(super) use self::put::reconcile;
use super::{Connection, Result, Session};
use crate::limits::RULE_KEY;
use crate::{convert, proto};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{self, Change, DiskTable, Doubt, Readers, Space, Standing, Table, Visit};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::Profile;
use lamassu_format::header::VaultId;
use lamassu_lease::Mode;
use parking_lot::Mutex;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tonic::{Code, Status};

/// Time between two attempts at a commit.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// A local copy of a table at a server, which commits at the server first.
pub struct Mirrored {
    /// Dropped first: when another process of this host finds the copy unlocked, the vault is released too.
    session: Session,
    local: Arc<DiskTable>,
    commits: Mutex<Commits>,
}

struct Commits {
    head: Head,
    pending: Option<Pending>,
    /// Another table writes the copy now.
    is_closed: bool,
}

/// A commit that has failed, and may be durable at the server, or will be.
struct Pending {
    changes: Vec<Change>,
    at_server: AtServer,
}

/// What is known of a commit at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AtServer {
    /// It was not made.
    NotMade,
    /// It was sent, and may have been made.
    Unknown,
    /// The server has it, and the copy does not: it could not be written.
    Made,
}

/// Whether the server has looked at the commit, and refuses it. Nobody else commits while this session is good, so it
/// was not made before either. `Aborted`: the session has ended, and this table with it. `OutOfRange`: the server has
/// another head, with or without the commit. Then this table fits it no more, and the next session brings the copy up
/// to date.
fn is_about_the_commit(status: &Status) -> bool {
    status.source().is_none()
        && (status.metadata().contains_key(RULE_KEY)
            || matches!(status.code(), Code::OutOfRange | Code::InvalidArgument | Code::Aborted))
}

impl Mirrored {
    /// Begins a session, and brings the copy in `file` up to date. A server that was restored from a backup gets the
    /// copy's state.
    ///
    /// # Errors
    /// [`AnchorError::Server`]; those of the copy.
    pub fn open(connection: &Connection, vault: VaultId, mode: Mode, file: &Path) -> Result<Mirrored> {
        match Mirrored::begin(connection, vault, mode, file) {
            Err(AnchorError::Server { fault: ServerFault::Restored { .. }, .. }) => {
                reconcile(connection, vault, existing(DiskTable::open(file))?)?;
                Mirrored::begin(connection, vault, mode, file)
            }
            begun => begun,
        }
    }

    fn begin(connection: &Connection, vault: VaultId, mode: Mode, file: &Path) -> Result<Mirrored> {
        let (session, local) = match mode {
            Mode::Exclusive => {
                // The copy is locked before the session begins: the process that wrote it is gone.
                let local = existing(DiskTable::open(file))?;
                let earlier = local.as_deref().map(session_of).transpose()?.flatten();
                let session = Session::begin(connection, vault, mode, earlier)?;
                let (local, _) = up_to_date(&session, vault, file, local)?;
                local.commit(&[noted(session.number())])?;
                (session, local)
            }
            Mode::Shared => {
                let reader = || DiskTable::open_read_only(file, Readers::InsteadOfWriter);
                // No process of this host writes it: the one that did is gone.
                let there = existing(reader());
                let earlier = there.as_ref().ok().and_then(Option::as_deref).map(session_of).transpose()?.flatten();
                // The server's refusal takes precedence over errors of the copy.
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

    /// From a session and a copy that is up to date with the server's table.
    pub(super) fn of(session: Session, local: Arc<DiskTable>) -> Mirrored {
        let commits = Commits { head: session.head, pending: None, is_closed: false };
        Mirrored { local, session, commits: Mutex::new(commits) }
    }

    /// Lets this table write nothing more to the copy. Waits for a commit that is under way.
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

    /// The result of `read`, if the session is good before and after it.
    fn reading<T>(&self, read: impl FnOnce() -> Result<T>) -> Result<T> {
        self.session.wait_until_good()?;
        let done = read()?;
        self.session.wait_until_good().map(|()| done)
    }

    /// Makes changes based on `head` durable at the server. Retries as long as the session may recover. `at_server`:
    /// what is known of them there.
    fn commit_at_server(&self, head: Head, changes: &[Change], at_server: &mut AtServer) -> Result<Head> {
        let (connection, expected) = (self.session.connection(), head.after(changes));
        let (of, base) = (Some(self.session.of()), head.0.to_vec());
        let request = proto::CommitRequest { of, base, changes: table::pack(changes), grant: self.session.grant.0 };
        let until = Instant::now() + self.session.patience();
        loop {
            self.session.wait_until_good()?;
            let error = match connection.answer(connection.anchors().commit(request.clone()))? {
                Ok(state) => match convert::head(&state.head) {
                    Ok(after) if after == expected => return Ok(after),
                    // It says nothing of the commit.
                    Ok(_) => connection.garbled("a commit came to another head"),
                    Err(error) => connection.garbled(error.0),
                },
                Err(status) => {
                    let error = connection.failed(&status);
                    let is_unanswered =
                        matches!(error, AnchorError::Server { fault: ServerFault::Unreachable { .. }, .. });
                    let is_known = *at_server == AtServer::NotMade && !is_unanswered;
                    if is_known || is_about_the_commit(&status) {
                        return Err(error);
                    }
                    error
                }
            };
            *at_server = AtServer::Unknown;
            if Instant::now() >= until {
                return Err(connection.error(match error {
                    AnchorError::Server { fault: fault @ ServerFault::Unreachable { .. }, .. } => fault,
                    AnchorError::Server { fault, .. } => ServerFault::Unreachable { detail: fault.to_string() },
                    error => ServerFault::Unreachable { detail: error.to_string() },
                }));
            }
            std::thread::sleep(AGAIN_AFTER);
        }
    }

    /// Makes the pending commit durable at the server, and then in the copy. It stays pending, unless it is durable in
    /// both, or has certainly not been made.
    fn settle(&self, Commits { head, pending, .. }: &mut Commits) -> Result<()> {
        let Some(Pending { changes, at_server }) = pending else { return Ok(()) };
        if *at_server != AtServer::Made {
            match self.commit_at_server(*head, changes, at_server) {
                Ok(after) => (*head, *at_server) = (after, AtServer::Made),
                Err(error @ AnchorError::Server { fault: ServerFault::Unreachable { .. }, .. }) => return Err(error),
                Err(error) => {
                    *pending = None;
                    return Err(error);
                }
            }
        }
        self.local.commit(&changes.iter().cloned().chain([head.change()]).collect::<Vec<_>>())?;
        *pending = None;
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

    fn doubt(&self) -> Option<Doubt> {
        self.session.doubt()
    }

    fn caches_are_dropped(&self, doubt: Doubt) {
        self.session.caches_are_dropped(doubt);
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
        let is_pending = commits.pending.as_ref().is_some_and(|pending| pending.changes == changes);
        self.settle(commits)?;
        if !is_pending {
            commits.pending = Some(Pending { changes: changes.to_vec(), at_server: AtServer::NotMade });
            self.settle(commits)?;
        }
        Ok(())
    }

    fn may_be_in_doubt(&self) -> bool {
        self.commits.lock().pending.is_some()
    }
}
