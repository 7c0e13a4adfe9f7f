//! A vault by turns: any number of hosts have it whole, one after the other, or read it together (rules R1 to R13 of
//! `docs/sharing.md`).
//!
//! Lock: the copy, which who takes a turn holds until it has it.

use super::mirrored::copy::{existing, noted, session_of, up_to_date};
use super::mirrored::reconcile;
use super::session::{AGAIN_AFTER, Attended, Use};
use super::{Connection, Mirrored, Result, Session};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{Change, DiskTable, Standing, Table};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_lease::Mode;
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Sessions that end one after the other while a turn is waited for.
const SESSIONS_MAX: usize = 8;

/// A session that has the vault by turns. Dropped, or by [`Turns::leave`], it ends.
pub struct Turns {
    connection: Connection,
    vault: [u8; 16],
    file: PathBuf,
    attended: Mutex<Arc<Attended>>,
    copy: Mutex<Copy>,
    has_left: AtomicBool,
}

/// This host's copy of the table, which is locked as long as it is open.
struct Copy {
    table: Option<Arc<DiskTable>>,
    /// Who wrote it last.
    last: Weak<Mirrored>,
}

/// What the holder of a turn is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Another host wants the vault: pass it on soon, within a term at most.
    Recalled,
    /// The turn is over: the session has ended, and what was not committed is lost.
    Ended,
}

/// One turn. Dropped, it is passed.
pub struct Turn {
    /// the table of this turn, for [`lamassu_anchor::Anchor::open`]
    pub table: Arc<Mirrored>,
    /// An earlier holder ended without passing the vault: what it left is to be put right before anything else, then
    /// [`Turn::taken_over`]. The turn is exclusive, whatever was asked for.
    pub takes_over: bool,
    /// head of the table when the turn began
    pub head: Head,
    /// What was changed since this host's copy was written last, in order; `None`: perhaps everything.
    pub changed: Option<Vec<Change>>,
    mode: Mode,
    /// The session does not end before.
    _turns: Arc<Turns>,
}

fn fault(error: &AnchorError) -> Option<&ServerFault> {
    if let AnchorError::Server { fault, .. } = error { Some(fault) } else { None }
}

/// Does something again until a server that is away is back, for so long.
fn patiently<T>(patience: Duration, mut act: impl FnMut() -> Result<T>) -> Result<T> {
    let until = Instant::now() + patience;
    loop {
        match act() {
            Err(error) if matches!(fault(&error), Some(ServerFault::Unreachable { .. })) && Instant::now() < until => {
                std::thread::sleep(AGAIN_AFTER);
            }
            done => return done,
        }
    }
}

impl Turns {
    /// Begins a session, which has nothing yet. The copy in `file` is this process's alone from now on.
    ///
    /// # Errors
    /// As [`Mirrored::open`].
    pub fn begin(connection: &Connection, vault: [u8; 16], file: &Path) -> Result<Arc<Turns>> {
        let table = match DiskTable::open(file) {
            // It is there, so that it can be locked.
            Err(AnchorError::Missing { .. }) => Some(Arc::new(DiskTable::create(file)?)),
            opened => existing(opened)?,
        };
        let earlier = table.as_deref().map(session_of).transpose()?.flatten();
        let mut copy = Copy { table, last: Weak::new() };
        let attended = copy.attend(connection, vault, earlier)?;
        Ok(Arc::new(Turns {
            connection: connection.clone(),
            vault,
            file: file.to_owned(),
            attended: Mutex::new(attended),
            copy: Mutex::new(copy),
            has_left: AtomicBool::new(false),
        }))
    }

    /// Waits until this host has the vault in this mode, and brings the copy up to date. Waits for the turn before to
    /// be passed, too. Where the session has ended another one is begun.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError::Server`]: `Unreachable` after a term of silence, `Ended` behind [`Turns::leave`];
    /// those of the copy.
    pub fn take(self: &Arc<Self>, mode: Mode) -> Result<Turn> {
        let copy = &mut *self.copy.lock();
        let mut sessions = 1;
        loop {
            let attended = self.attended.lock().clone();
            let error = match self.take_by(&attended, copy, mode) {
                Ok(turn) => return Ok(turn),
                Err(error) => error,
            };
            let has_ended = matches!(fault(&error), Some(ServerFault::Ended));
            if !has_ended || sessions == SESSIONS_MAX || self.has_left.load(Ordering::SeqCst) {
                return Err(error);
            }
            tracing::info!(server = self.connection.server(), "the session has ended: another one begins");
            sessions += 1;
            let (number, patience) = (Some(attended.number()), attended.patience());
            let next = patiently(patience, || copy.attend(&self.connection, self.vault, number))?;
            *self.attended.lock() = next.clone();
            if self.has_left.load(Ordering::SeqCst) {
                next.leave();
            }
        }
    }

    fn take_by(self: &Arc<Self>, attended: &Attended, copy: &mut Copy, mode: Mode) -> Result<Turn> {
        let session = attended.take(mode)?;
        let table = patiently(attended.patience(), || copy.bring_up_to_date(&session, self.vault, &self.file));
        let (table, changed) = table.inspect_err(|_| session.give_back())?;
        let (head, takes_over) = (session.head, session.takes_over);
        let mode = session.mode().unwrap_or(mode);
        let table = Arc::new(Mirrored::of(session, table));
        copy.last = Arc::downgrade(&table);
        Ok(Turn { table, takes_over, head, changed, mode, _turns: self.clone() })
    }

    /// Ends the session, and a turn with it. Nothing is taken by it any more.
    pub fn leave(&self) {
        self.has_left.store(true, Ordering::SeqCst);
        let attended = self.attended.lock().clone();
        attended.leave();
    }
}

impl Copy {
    /// Begins a session, which is noted in the copy. A server that was put back from a backup is told what this knows.
    fn attend(&mut self, connection: &Connection, vault: [u8; 16], replaces: Option<u64>) -> Result<Arc<Attended>> {
        let begin = || Attended::begin(connection, vault, Use::ByTurns, replaces);
        let attended = match begin() {
            Err(error) if matches!(fault(&error), Some(ServerFault::Restored { .. })) => {
                reconcile(connection, vault, self.table.clone())?;
                begin()?
            }
            begun => begun?,
        };
        if let Some(table) = &self.table {
            table.commit(&[noted(attended.number())])?;
        }
        Ok(Arc::new(attended))
    }

    fn bring_up_to_date(
        &mut self,
        session: &Session,
        vault: [u8; 16],
        file: &Path,
    ) -> Result<(Arc<DiskTable>, Option<Vec<Change>>)> {
        // A turn that has ended under its holder.
        if let Some(last) = self.last.upgrade() {
            last.close();
        }
        let (table, changed) = up_to_date(session, vault, file, self.table.clone())?;
        if changed.is_none() {
            table.commit(&[noted(session.number())])?;
            self.table = Some(table.clone());
        }
        Ok((table, changed))
    }
}

/// Waits for what the holder of a turn is told, on another thread. It does not keep the turn.
pub struct Listener(Arc<Mirrored>);

impl Listener {
    /// As [`Turn::wait`]; of a turn that was passed: that it is over.
    pub fn wait(&self, time: Duration) -> Option<Told> {
        self.0.session().wait_to_be_told(time)
    }
}

impl Turn {
    /// To be told on another thread.
    pub fn listener(&self) -> Listener {
        Listener(self.table.clone())
    }

    /// How the vault is held.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// What the holder is told, once that is something; `None`: nothing, for so long.
    pub fn wait(&self, time: Duration) -> Option<Told> {
        self.table.session().wait_to_be_told(time)
    }

    /// The same, now.
    pub fn told(&self) -> Option<Told> {
        self.wait(Duration::ZERO)
    }

    /// What an earlier holder left is put right, and committed.
    pub fn taken_over(&self) {
        self.table.session().taken_over();
    }

    /// All is committed, and nothing is cached any more: the vault goes on. The table of this turn fails every call
    /// with `Ended` from now on.
    pub fn pass(self) {
        drop(self);
    }

    /// Whether what the table says may be believed now.
    pub fn is_good(&self) -> bool {
        self.table.standing() == Standing::Good
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.table.close();
        self.table.session().give_back();
    }
}
