//! A vault by turns: several hosts use it as a whole, one after the other, or read it together (rules R1 to R13 of
//! `docs/sharing.md`).
//!
//! Locks: `copy` is held while a turn is being taken, then `attended`.

use super::locks::{Done, HeldLocks};
use super::mirrored::copy::{existing, noted, session_of, up_to_date};
use super::mirrored::reconcile;
use super::session::{AGAIN_AFTER, Attended, Use};
use super::{Connection, Mirrored, Result, Session};
use crate::CHANGES_MAX;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{Change, DiskTable, Doubt, Standing, Table};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::header::VaultId;
use lamassu_lease::locks::{Asked, Holder};
use lamassu_lease::{Mode, RequestNo};
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Sessions that may end while one turn is waited for.
const SESSIONS_MAX: usize = 8;

/// A session that uses the vault by turns. It ends when this is dropped, or by [`Turns::leave`].
pub struct Turns {
    connection: Connection,
    vault: VaultId,
    file: PathBuf,
    attended: Mutex<Arc<Attended>>,
    locks: Arc<HeldLocks>,
    copy: Mutex<Copy>,
    has_left: AtomicBool,
}

/// This host's copy of the table. Its file is locked while it is open.
struct Copy {
    table: Option<Arc<DiskTable>>,
    /// The table that last wrote it.
    last: Weak<Mirrored>,
    /// What was changed in it since the last turn began, in order; `None`: unknown. A session that ends while the copy
    /// is brought up to date leaves changes here that no turn has reported.
    changed: Option<Vec<Change>>,
}

/// A notice to the holder of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Another host wants the vault: release it soon, within a term at most.
    Recalled,
    /// The turn is over: the session has ended, and changes that were not committed are lost.
    Ended,
}

/// One turn. Dropping it releases the vault.
pub struct Turn {
    /// the table of this turn, for [`lamassu_anchor::Anchor::open`]
    pub table: Arc<Mirrored>,
    /// An earlier holder ended without releasing the vault: what it left must be recovered first, then
    /// [`Turn::taken_over`] is called. The turn is exclusive, whatever mode was requested.
    pub takes_over: bool,
    /// head of the table when the turn began
    pub head: Head,
    /// The changes since this host's copy was last written, in order; `None`: unknown, so perhaps everything changed.
    pub changed: Option<Vec<Change>>,
    mode: Mode,
    /// Keeps the session alive.
    _turns: Arc<Turns>,
}

fn fault(error: &AnchorError) -> Option<&ServerFault> {
    if let AnchorError::Server { fault, .. } = error { Some(fault) } else { None }
}

/// Repeats a call while the server is unreachable, for a limited time.
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
    /// Begins a session, which holds nothing yet. From now on only this process uses the copy in `file`.
    ///
    /// # Errors
    /// As [`Mirrored::open`].
    pub fn begin(connection: &Connection, vault: VaultId, file: &Path) -> Result<Arc<Turns>> {
        let (table, is_new) = match DiskTable::open(file) {
            // Created now, so that it can be locked.
            Err(AnchorError::Missing { .. }) => (Some(Arc::new(DiskTable::create(file)?)), true),
            opened => (existing(opened)?, false),
        };
        let earlier = table.as_deref().map(session_of).transpose()?.flatten();
        let mut copy = Copy { table, last: Weak::new(), changed: Some(Vec::new()) };
        let locks = Arc::<HeldLocks>::default();
        let attended = copy.attend(connection, vault, earlier, &locks).inspect_err(|_| {
            // An empty file would be taken for an anchor that has lost its rows.
            if is_new {
                let _ = std::fs::remove_file(file);
            }
        })?;
        Ok(Arc::new(Turns {
            connection: connection.clone(),
            vault,
            file: file.to_owned(),
            attended: Mutex::new(attended),
            locks,
            copy: Mutex::new(copy),
            has_left: AtomicBool::new(false),
        }))
    }

    /// Waits until this host holds the vault in this mode, and brings the copy up to date. An earlier turn of this host
    /// must have been passed. If the session has ended, another one begins.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError::Server`]: `Unreachable` after a term of silence, `Ended` after [`Turns::leave`];
    /// those of the copy.
    pub fn take(self: &Arc<Self>, mode: Mode) -> Result<Turn> {
        self.take_if(mode, None)?.ok_or_else(|| self.connection.error(ServerFault::Ended))
    }

    /// The same, as long as it is wanted, which is asked now and then: `None` after that.
    ///
    /// # Errors
    /// As [`Turns::take`].
    pub fn take_while(self: &Arc<Self>, mode: Mode, is_wanted: &dyn Fn() -> bool) -> Result<Option<Turn>> {
        self.take_if(mode, Some(is_wanted))
    }

    fn take_if(self: &Arc<Self>, mode: Mode, is_wanted: Option<&dyn Fn() -> bool>) -> Result<Option<Turn>> {
        let copy = &mut *self.copy.lock();
        let mut sessions = 1;
        loop {
            let attended = self.attended.lock().clone();
            let error = match self.take_by(&attended, copy, (mode, is_wanted)) {
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
            let next = patiently(patience, || copy.attend(&self.connection, self.vault, number, &self.locks))?;
            *self.attended.lock() = next.clone();
            if self.has_left.load(Ordering::SeqCst) {
                next.leave();
            }
        }
    }

    fn take_by(
        self: &Arc<Self>,
        attended: &Attended,
        copy: &mut Copy,
        (mode, is_wanted): (Mode, Option<&dyn Fn() -> bool>),
    ) -> Result<Option<Turn>> {
        let Some(session) = attended.take_while(mode, is_wanted)? else { return Ok(None) };
        let table = patiently(attended.patience(), || copy.bring_up_to_date(&session, self.vault, &self.file));
        let (table, changed) = table.inspect_err(|_| session.give_back())?;
        let (head, takes_over) = (session.head, session.takes_over);
        let mode = session.mode().unwrap_or(mode);
        let table = Arc::new(Mirrored::of(session, table));
        copy.last = Arc::downgrade(&table);
        Ok(Some(Turn { table, takes_over, head, changed, mode, _turns: self.clone() }))
    }

    /// Makes a request about locks in the session of the moment; no turn is needed. `done` is told how it ends, maybe
    /// before this returns: [`Outcome::Ended`] if there is no session, until the next turn begins one.
    pub fn lock(&self, asked: Asked, done: Done) -> Option<LockRequest> {
        let attended = self.attended.lock().clone();
        let request = attended.ask(asked, done)?;
        Some(LockRequest { attended: Arc::downgrade(&attended), request })
    }

    /// What is known of this host's locks without asking the server.
    pub fn locks<T>(&self, look: impl FnOnce(&mut Holder) -> T) -> T {
        self.locks.look(look)
    }

    /// Ends the session, and its turn. No further turn can be taken.
    pub fn leave(&self) {
        self.has_left.store(true, Ordering::SeqCst);
        let attended = self.attended.lock().clone();
        attended.leave();
        // Another process, or another session of this one, may use the copy.
        if let Some(mut copy) = self.copy.try_lock() {
            copy.table = None;
        }
    }
}

impl Turns {
    /// Whether it was left, and another session may use the copy.
    pub fn is_closed(&self) -> bool {
        self.has_left.load(Ordering::SeqCst) && self.copy.try_lock().is_some_and(|copy| copy.table.is_none())
    }
}

/// A request about locks that was sent.
pub struct LockRequest {
    attended: Weak<Attended>,
    request: RequestNo,
}

impl LockRequest {
    /// The program no longer waits. The request ends soon, maybe nevertheless with the lock.
    pub fn cancel(&self) {
        if let Some(attended) = self.attended.upgrade() {
            attended.cancel(self.request);
        }
    }
}

impl Copy {
    /// Begins a session, and stores its number in the copy. A server that was restored from a backup gets the copy's
    /// state.
    fn attend(
        &mut self,
        connection: &Connection,
        vault: VaultId,
        replaces: Option<u64>,
        locks: &Arc<HeldLocks>,
    ) -> Result<Arc<Attended>> {
        let begin = || Attended::begin(connection, vault, Use::ByTurns, replaces, locks);
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
        vault: VaultId,
        file: &Path,
    ) -> Result<(Arc<DiskTable>, Option<Vec<Change>>)> {
        // The last turn may have ended while its holder still has the table.
        if let Some(last) = self.last.upgrade() {
            last.close();
        }
        let (table, changed) = up_to_date(session, vault, file, self.table.clone())?;
        let is_all_new = changed.is_none();
        self.changed = match (self.changed.take(), changed) {
            (Some(earlier), Some(changed)) if earlier.len() + changed.len() <= CHANGES_MAX => {
                Some([earlier, changed].concat())
            }
            _ => None,
        };
        if is_all_new {
            // First: the earlier table has lost its name.
            self.table = Some(table.clone());
            table.commit(&[noted(session.number())])?;
        }
        // The turn counts only if its session is good with the copy at hand.
        session.wait_until_good()?;
        Ok((table, self.changed.replace(Vec::new())))
    }
}

/// Waits on another thread for notices to the holder of a turn. It does not keep the turn alive.
pub struct Listener(Arc<Mirrored>);

impl Listener {
    /// As [`Turn::wait`]; [`Told::Ended`] if the turn was passed.
    pub fn wait(&self, time: Duration) -> Option<Told> {
        self.0.session().wait_to_be_told(time)
    }
}

impl Turn {
    /// A listener for another thread.
    pub fn listener(&self) -> Listener {
        Listener(self.table.clone())
    }

    /// The mode in which the vault is held.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The next notice to the holder; `None`: there was none within `time`.
    pub fn wait(&self, time: Duration) -> Option<Told> {
        self.table.session().wait_to_be_told(time)
    }

    /// The same, without waiting.
    pub fn told(&self) -> Option<Told> {
        self.wait(Duration::ZERO)
    }

    /// Reports that what an earlier holder left has been recovered and committed.
    pub fn taken_over(&self) {
        self.table.session().taken_over();
    }

    /// The vault is kept although other hosts want it, from now on or no longer. Meanwhile the server ends the session
    /// only if this host is silent.
    pub fn keep(&self, kept: bool) {
        self.table.session().keep(kept);
    }

    /// Releases the vault. All changes must be committed, and nothing may be cached. From now on every call of this
    /// turn's table fails with `Ended`.
    pub fn pass(self) {
        drop(self);
    }

    /// Whether reads of the table are valid now.
    pub fn is_good(&self) -> bool {
        self.table.standing() == Standing::Good
    }

    /// Why reads of the table are not valid now: see [`Table::doubt`].
    pub fn doubt(&self) -> Option<Doubt> {
        self.table.doubt()
    }

    /// From now on, what is read in this turn may be cached: see [`Table::has_caches`].
    pub fn has_caches(&self) {
        self.table.has_caches();
    }

    /// Caches were dropped during this doubt: see [`Table::caches_are_dropped`].
    pub fn caches_are_dropped(&self, doubt: Doubt) {
        self.table.caches_are_dropped(doubt);
    }

    /// Caches were dropped, and nothing is cached from now on.
    pub fn has_no_caches(&self) {
        self.table.session().has_no_caches();
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.table.close();
        self.table.session().give_back();
    }
}
