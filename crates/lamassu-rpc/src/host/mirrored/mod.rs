//! The table of an anchor that a server keeps: read from a copy on this host, committed at the server first.
//!
//! * The copy is the server's table as of the **head** that is stored in it ([`lamassu_anchor::head`]). A session that
//!   is granted the vault compares the heads. If they differ, it fetches the changes since, or all rows.
//! * A commit names the head that it is based on. The server applies it once, however often it is sent. One without an
//!   answer is *pending*: before anything else is committed, it is sent again.
//! * A read counts only if the session is good before and after it (rule R4 of `docs/sharing.md`).

pub(super) mod copy;
mod put;

pub use self::put::{give_up, is_on_its_way, put};

use self::copy::{existing, noted, session_of, up_to_date};
pub(super) use self::put::reconcile;
use super::{Connection, Result, Session};
use crate::{convert, proto};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{self, Change, DiskTable, Doubt, Readers, Space, Standing, Table, Visit};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::Profile;
use lamassu_format::header::VaultId;
use lamassu_lease::Mode;
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    /// The server has it, and the copy does not: it could not be written.
    is_made: bool,
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

    /// Makes changes based on `head` durable at the server. Retries as long as the session may recover.
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

    /// Makes the pending commit durable at the server, and then in the copy. It stays pending, unless it is durable in
    /// both, or has certainly not been made.
    fn settle(&self, Commits { head, pending, .. }: &mut Commits) -> Result<()> {
        let Some(Pending { changes, is_made }) = pending else { return Ok(()) };
        if !*is_made {
            match self.commit_at_server(*head, changes) {
                Ok(after) => (*head, *is_made) = (after, true),
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
            commits.pending = Some(Pending { changes: changes.to_vec(), is_made: false });
            self.settle(commits)?;
        }
        Ok(())
    }

    fn may_be_in_doubt(&self) -> bool {
        self.commits.lock().pending.is_some()
    }
}
