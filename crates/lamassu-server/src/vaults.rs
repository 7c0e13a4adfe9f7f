//! The vaults whose anchors are kept here: for each the table of its rows and its leases.
//!
//! A vault is used as a whole: its sessions hold a lease of [`VAULT`]. What changes the leases is durable before
//! anybody hears of it; where that fails the server ends ([`Refused::Lost`]), and starts again on what is durable. A
//! table that cannot be written concerns its vault alone, which is opened again on what is durable.
//!
//! Locks: a slot of [`Vaults`], then the inside of its vault, then those of the state.

use crate::guard::Caller;
use crate::state::State;
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{Change, DiskTable, Table};
use lamassu_anchor::{Anchor, AnchorError};
use lamassu_lease::server::{Server, Step};
use lamassu_lease::{Call, Millis, Mode, Object, Reply, SessionId, Terms};
use lamassu_rpc::clock::now;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::mpsc::{Sender, error::TrySendError};

/// The vault as a whole.
pub const VAULT: Object = Object(0);
/// The directory of tables in the server's directory.
pub const DIR: &str = "anchors";
/// How a file ends that is being put.
const NEW: &str = "new";
/// Sessions of one host in one vault.
const SESSIONS_MAX: usize = 16;
/// Replies that a session may be behind with: its connection is broken then.
pub const REPLIES_MAX: usize = 64;
/// What stays free on the server's disk for the state, in bytes: a commit is refused before.
const RESERVE: u64 = 64 << 20;
/// A tick that is so much later than it should be: the server was stopped, and so was what hosts have said meanwhile.
const PAUSED: u64 = 2000;

/// Why a host does not get what it asked for.
#[derive(Debug)]
pub enum Refused {
    /// The vault is not known here.
    Unknown,
    /// Another session has it.
    InUse {
        /// the host
        by: String,
    },
    /// The session has ended, or has no lease for this.
    Ended,
    /// The changes go on from another head.
    OtherHead,
    /// The vault is known already.
    Known,
    /// The rows are no anchor of this vault.
    NoAnchor,
    /// This host may not use the vault.
    NotGranted,
    /// Too much at once.
    TooMuch(&'static str),
    /// The vault is being opened again, or put.
    NotNow,
    /// The server's disk.
    Failed(ServerError),
    /// What could not be made durable may be in memory: the server ends.
    Lost(ServerError),
}

impl<E: Into<ServerError>> From<E> for Refused {
    fn from(error: E) -> Refused {
        Refused::Failed(error.into())
    }
}

/// With a [`Refused`].
pub type Answer<T> = std::result::Result<T, Refused>;

/// All of them.
pub struct Vaults {
    dir: PathBuf,
    terms: Terms,
    state: Arc<State>,
    slots: Mutex<HashMap<[u8; 16], Arc<Mutex<Slot>>>>,
}

/// What there is of a vault.
#[derive(Default)]
enum Slot {
    /// Perhaps a file.
    #[default]
    Closed,
    /// Its rows are coming.
    BeingPut,
    Open(Arc<Vault>),
}

/// One vault.
pub struct Vault {
    id: [u8; 16],
    state: Arc<State>,
    inner: Mutex<Inner>,
}

struct Inner {
    table: Arc<DiskTable>,
    head: Head,
    leases: Server,
    /// The hosts of sessions, and where replies to them go.
    sessions: HashMap<SessionId, Attending>,
    /// When time has passed last.
    ticked: Millis,
    is_given_up: bool,
    /// A commit has failed: what is durable is not known.
    is_in_doubt: bool,
}

struct Attending {
    host: String,
    mode: Mode,
    heard: Millis,
    /// Its connections so far: what an earlier one says is not heard any more.
    connections: u64,
    replies: Option<Sender<Reply>>,
}

/// One connection of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// its session
    pub session: SessionId,
    number: u64,
}

/// A session that has begun.
pub struct Begun {
    /// the session, and the connection it speaks by
    pub line: Line,
    /// the head of the vault's table
    pub head: Head,
}

impl Vaults {
    /// Those in a server's directory. What was being put when a server ended is removed.
    ///
    /// # Errors
    /// [`ServerError::File`].
    pub fn new(dir: &Path, terms: Terms, state: Arc<State>) -> Result<Vaults> {
        let dir = dir.join(DIR);
        fs::create_dir_all(&dir).map_err(ServerError::file("make", &dir))?;
        for entry in fs::read_dir(&dir).map_err(ServerError::file("list", &dir))? {
            let path = entry.map_err(ServerError::file("list", &dir))?.path();
            if path.extension().is_some_and(|end| end == NEW) {
                fs::remove_file(&path).map_err(ServerError::file("remove", &path))?;
            }
        }
        Ok(Vaults { dir, terms, state, slots: Mutex::default() })
    }

    /// How long leases last.
    pub fn terms(&self) -> Terms {
        self.terms
    }

    fn file(&self, id: &[u8; 16]) -> PathBuf {
        self.dir.join(format!("{}.anchor", HEXLOWER.encode(id)))
    }

    fn slot(&self, id: &[u8; 16]) -> Arc<Mutex<Slot>> {
        self.slots.lock().entry(*id).or_default().clone()
    }

    /// Those that are open, by slots as they are locked.
    fn opened<'a>(
        slots: &'a [Arc<Mutex<Slot>>],
        lock: impl Fn(&'a Mutex<Slot>) -> Option<MutexGuard<'a, Slot>>,
    ) -> Vec<Arc<Vault>> {
        let vault = |slot: &'a Arc<Mutex<Slot>>| match &*lock(slot)? {
            Slot::Open(vault) => Some(vault.clone()),
            Slot::Closed | Slot::BeingPut => None,
        };
        slots.iter().filter_map(vault).collect()
    }

    fn slots(&self) -> Vec<Arc<Mutex<Slot>>> {
        self.slots.lock().values().cloned().collect()
    }

    /// Opens all, so that what their sessions held before a restart is watched. One that does not open is said, and
    /// tried again when it is asked for: the others are served. Returns how many are open.
    ///
    /// # Errors
    /// [`ServerError::File`]; those of the state.
    pub fn open_all(&self) -> Result<usize> {
        let entries = fs::read_dir(&self.dir).map_err(ServerError::file("list", &self.dir))?;
        let mut opened = 0;
        for entry in entries {
            let name = entry.map_err(ServerError::file("list", &self.dir))?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".anchor"));
            let id = id.and_then(|id| HEXLOWER.decode(id.as_bytes()).ok()).and_then(|id| id.try_into().ok());
            let Some(id) = id else { continue };
            match self.vault(&id) {
                Ok(_) => opened += 1,
                Err(Refused::Lost(error)) => return Err(error),
                Err(Refused::Failed(error)) => {
                    tracing::error!(file = %self.file(&id).display(), %error, "this anchor cannot be used; the others are served");
                }
                Err(_) => {}
            }
        }
        Ok(opened)
    }

    /// A vault, opened if it was not.
    ///
    /// # Errors
    /// [`Refused::Unknown`], [`Refused::NotNow`], [`Refused::Failed`], [`Refused::Lost`].
    pub fn vault(&self, id: &[u8; 16]) -> Answer<Arc<Vault>> {
        let slot = self.slot(id);
        let slot = &mut *slot.lock();
        match slot {
            Slot::Open(vault) if !vault.inner.lock().is_in_doubt => return Ok(vault.clone()),
            // What uses its table yet keeps it open for a moment.
            Slot::Open(_) | Slot::Closed => *slot = Slot::Closed,
            Slot::BeingPut => return Err(Refused::Unknown),
        }
        let table = match DiskTable::open(&self.file(id)) {
            Err(AnchorError::Missing { .. }) => return Err(Refused::Unknown),
            Err(AnchorError::Locked { .. }) => return Err(Refused::NotNow),
            table => Arc::new(table?),
        };
        let head = Head::of(&*table)?.ok_or(ServerError::Anchor(AnchorError::Empty))?;
        let (durable, hosts) = self.state.leases(id)?;
        let (leases, step) = Server::start(self.terms, durable, now());
        let sessions = hosts.into_iter().map(|(session, host)| {
            let mode = leases.mode_of(session, VAULT).unwrap_or(Mode::Shared);
            (session, Attending { host, mode, heard: now(), connections: 0, replies: None })
        });
        let sessions = sessions.collect();
        let ticked = now();
        let inner = Inner { table, head, leases, sessions, ticked, is_given_up: false, is_in_doubt: false };
        let vault = Arc::new(Vault { id: *id, state: self.state.clone(), inner: Mutex::new(inner) });
        vault.carry_out(&mut vault.inner.lock(), step)?;
        *slot = Slot::Open(vault.clone());
        Ok(vault)
    }

    /// Begins to take the anchor of a vault whose anchor is not kept here.
    ///
    /// # Errors
    /// [`Refused::NotGranted`], [`Refused::NotNow`], [`Refused::TooMuch`], [`Refused::Failed`].
    pub fn begin_put(self: &Arc<Vaults>, caller: &Caller, id: &[u8; 16]) -> Answer<Put> {
        if !self.state.may_use(&caller.key, id) {
            return Err(Refused::NotGranted);
        }
        self.check_room()?;
        {
            let slot = self.slot(id);
            let slot = &mut *slot.lock();
            match slot {
                // One that is there may be the same: what comes is compared at its end.
                Slot::Closed | Slot::Open(_) if self.file(id).symlink_metadata().is_ok() => {}
                Slot::Closed => *slot = Slot::BeingPut,
                Slot::BeingPut | Slot::Open(_) => return Err(Refused::NotNow),
            }
        }
        static PUTS: AtomicU64 = AtomicU64::new(0);
        let number = PUTS.fetch_add(1, Ordering::Relaxed);
        let new = self.dir.join(format!("{}-{number}.{NEW}", HEXLOWER.encode(id)));
        // From here on it is taken back when it is dropped.
        let mut put = Put { vaults: self.clone(), id: *id, new, table: None, head: Head([0; 32]) };
        put.table = Some(Arc::new(DiskTable::create(&put.new)?));
        Ok(put)
    }

    /// Refuses what takes room that the state may need.
    fn check_room(&self) -> Answer<()> {
        let free = rustix::fs::statvfs(&self.dir).map_or(u64::MAX, |st| st.f_bavail.saturating_mul(st.f_frsize));
        match free < RESERVE {
            true => Err(Refused::TooMuch("the server's disk is nearly full")),
            false => Ok(()),
        }
    }

    /// Makes changes durable, as [`Vault::commit`] does.
    ///
    /// # Errors
    /// Those, and [`Refused::TooMuch`].
    pub fn commit(&self, id: &[u8; 16], of: (&str, SessionId), base: Head, changes: &[Change]) -> Answer<Head> {
        self.check_room()?;
        self.vault(id)?.commit(of.0, of.1, base, changes)
    }

    /// Time has passed, for all that are open.
    ///
    /// # Errors
    /// [`ServerError`]: nobody must be told what is not durable, so that the server ends.
    pub fn tick(&self) -> Result<()> {
        // One that is being opened is not waited for: its time comes with the next tick.
        for vault in Vaults::opened(&self.slots(), Mutex::try_lock) {
            let inner = &mut *vault.inner.lock();
            let step = inner.tick();
            vault.carry_out(inner, step).map_err(lost)?;
        }
        Ok(())
    }

    /// A host may do nothing any more, or nothing in one vault: its sessions end.
    ///
    /// # Errors
    /// As [`Vaults::tick`].
    pub fn end_sessions_of(&self, host: &str, of: Option<&[u8; 16]>) -> Result<()> {
        let opened = Vaults::opened(&self.slots(), |slot| Some(slot.lock()));
        for vault in opened.into_iter().filter(|vault| of.is_none_or(|id| *id == vault.id)) {
            let inner = &mut *vault.inner.lock();
            let its = inner.sessions.iter().filter(|(_, attending)| attending.host == host);
            let its: Vec<_> = its.map(|(session, _)| *session).collect();
            for session in its {
                let step = inner.leases.end_session(session, now());
                vault.carry_out(inner, step).map_err(lost)?;
            }
        }
        Ok(())
    }

    /// The vaults whose anchors are kept here, and the hosts that have sessions of them.
    pub fn in_use(&self) -> Vec<([u8; 16], Vec<String>)> {
        let hosts = |vault: &Vault| vault.inner.lock().sessions.values().map(|one| one.host.clone()).collect();
        let opened = Vaults::opened(&self.slots(), |slot| Some(slot.lock()));
        opened.iter().map(|vault| (vault.id, hosts(vault))).collect()
    }

    /// An administrator has the anchor of a vault put away that nobody uses: it is kept under another name.
    ///
    /// # Errors
    /// [`Refused::Unknown`], [`Refused::InUse`], [`Refused::Failed`].
    pub fn forget(&self, id: &[u8; 16]) -> Answer<()> {
        let slot = self.slot(id);
        let slot = &mut *slot.lock();
        if let Slot::Open(vault) = slot {
            let inner = &mut *vault.inner.lock();
            if let Some(one) = inner.sessions.values().next() {
                return Err(Refused::InUse { by: format!("host {}", one.host) });
            }
            inner.is_given_up = true;
        }
        self.put_away(id, slot)
    }

    /// Renames the file of a vault.
    fn put_away(&self, id: &[u8; 16], slot: &mut Slot) -> Answer<()> {
        let (file, away) = (self.file(id), self.dir.join(format!("{}.given-up", HEXLOWER.encode(id))));
        match fs::rename(&file, &away) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(Refused::Unknown),
            done => done.map_err(ServerError::file("rename", &file))?,
        }
        *slot = Slot::Closed;
        self.sync_dir()
    }

    fn sync_dir(&self) -> Answer<()> {
        let synced = fs::File::open(&self.dir).and_then(|dir| dir.sync_all());
        Ok(synced.map_err(ServerError::file("sync", &self.dir))?)
    }

    /// Gives up the anchor of a vault that a session has alone: it is kept under another name.
    ///
    /// # Errors
    /// [`Refused::Ended`], [`Refused::Failed`].
    pub fn give_up(&self, id: &[u8; 16], session: SessionId, host: &str) -> Answer<()> {
        let vault = self.vault(id)?;
        let slot = self.slot(id);
        let slot = &mut *slot.lock();
        let inner = &mut *vault.inner.lock();
        inner.may_change(session, host)?;
        self.put_away(id, slot)?;
        inner.is_given_up = true;
        Ok(())
    }
}

/// An anchor on its way here. Dropped before its end, it is taken back.
pub struct Put {
    vaults: Arc<Vaults>,
    id: [u8; 16],
    new: PathBuf,
    table: Option<Arc<DiskTable>>,
    head: Head,
}

impl Put {
    /// Takes some rows.
    ///
    /// # Errors
    /// [`Refused::TooMuch`], [`Refused::Failed`].
    pub fn take(&mut self, rows: &[Change]) -> Answer<()> {
        self.vaults.check_room()?;
        if let Some(table) = &self.table {
            table.commit(rows)?;
        }
        self.head = self.head.after(rows);
        Ok(())
    }

    /// All rows have come. The same rows once more are here already: an answer that was lost is told again.
    ///
    /// # Errors
    /// [`Refused::Known`], [`Refused::NoAnchor`], [`Refused::NotGranted`], [`Refused::Failed`].
    pub fn finish(mut self, caller: &Caller) -> Answer<Head> {
        let Some(table) = self.table.take() else { return Err(Refused::NotNow) };
        Anchor::open(table.clone(), &self.id).map_err(|_| Refused::NoAnchor)?;
        table.commit(&[self.head.change()])?;
        // Closed before it is in its place.
        drop(table);
        if !self.vaults.state.may_use(&caller.key, &self.id) {
            return Err(Refused::NotGranted);
        }
        let file = self.vaults.file(&self.id);
        {
            let slot = self.vaults.slot(&self.id);
            let _alone = slot.lock();
            // No other process is in this directory.
            if file.symlink_metadata().is_err() {
                fs::rename(&self.new, &file).map_err(ServerError::file("put in place", &file))?;
                self.vaults.sync_dir()?;
                return Ok(self.head);
            }
        }
        let there = self.vaults.vault(&self.id)?.inner.lock().head;
        if there == self.head { Ok(there) } else { Err(Refused::Known) }
    }
}

impl Drop for Put {
    fn drop(&mut self) {
        self.table = None;
        let _ = fs::remove_file(&self.new);
        let slot = self.vaults.slot(&self.id);
        let slot = &mut *slot.lock();
        if matches!(slot, Slot::BeingPut) {
            *slot = Slot::Closed;
        }
    }
}

impl Vault {
    /// First what is to be durable, then what is to be said.
    fn carry_out(&self, inner: &mut Inner, step: Step) -> Answer<()> {
        let host_of = |session| inner.sessions.get(&session).map(|one| one.host.clone()).unwrap_or_default();
        self.state.change_leases(&self.id, &step.changes, host_of).map_err(Refused::Lost)?;
        for (session, reply) in step.replies {
            let Some(one) = inner.sessions.get_mut(&session) else { continue };
            // Who does not listen comes back by another connection, and is told then.
            if let Some(Err(TrySendError::Full(_))) = one.replies.as_ref().map(|replies| replies.try_send(reply)) {
                one.replies = None;
                one.connections += 1;
            }
        }
        inner.sessions.retain(|session, _| inner.leases.is_alive(*session));
        Ok(())
    }

    /// Begins a session that is going to ask for the vault in this mode, if nobody has it otherwise. `replaces`: a
    /// session of the same host that is gone.
    ///
    /// # Errors
    /// [`Refused::InUse`], [`Refused::TooMuch`], [`Refused::Unknown`], [`Refused::Lost`].
    pub fn begin(&self, caller: &Caller, mode: Mode, replaces: SessionId, replies: Sender<Reply>) -> Answer<Begun> {
        let (host, inner) = (&*caller.name, &mut *self.inner.lock());
        // Looked up under the lock that a revocation takes behind its own note.
        if inner.is_given_up || !self.state.may_use(&caller.key, &self.id) {
            return Err(Refused::Unknown);
        }
        if inner.sessions.get(&replaces).is_some_and(|one| one.host == host) {
            let step = inner.leases.end_session(replaces, now());
            self.carry_out(inner, step)?;
        }
        let step = inner.tick();
        self.carry_out(inner, step)?;
        let is_in_the_way = |one: &&Attending| mode == Mode::Exclusive || one.mode == Mode::Exclusive;
        if let Some(one) = inner.sessions.values().find(is_in_the_way) {
            let by = match now().0.saturating_sub(one.heard.0) / 1000 {
                0..=9 => format!("host {}", one.host),
                seconds => format!("host {}, which was heard of {seconds} s ago", one.host),
            };
            return Err(Refused::InUse { by });
        }
        if inner.sessions.values().filter(|one| one.host == host).count() >= SESSIONS_MAX {
            return Err(Refused::TooMuch("too many sessions of this host"));
        }
        let (session, step) = inner.leases.join(now());
        let attending = Attending { host: host.into(), mode, heard: now(), connections: 1, replies: Some(replies) };
        inner.sessions.insert(session, attending);
        self.carry_out(inner, step)?;
        Ok(Begun { line: Line { session, number: 1 }, head: inner.head })
    }

    /// A session speaks by a new connection.
    ///
    /// # Errors
    /// [`Refused::Ended`].
    pub fn resumes(&self, host: &str, session: SessionId, replies: Sender<Reply>) -> Answer<Begun> {
        let inner = &mut *self.inner.lock();
        let known = inner.sessions.get_mut(&session).filter(|one| one.host == host).ok_or(Refused::Ended)?;
        known.replies = Some(replies);
        known.connections += 1;
        Ok(Begun { line: Line { session, number: known.connections }, head: inner.head })
    }

    /// A session says something, by its newest connection. What it leaves is durable when this returns.
    ///
    /// # Errors
    /// [`Refused::Ended`]: there is a newer connection, or no session; [`Refused::Failed`].
    pub fn call(&self, line: Line, call: Call) -> Answer<()> {
        if !is_of_the_vault(&call) {
            return Err(Refused::NoAnchor);
        }
        let inner = &mut *self.inner.lock();
        if inner.is_in_doubt {
            return Err(Refused::NotNow);
        }
        let known = inner.sessions.get_mut(&line.session).filter(|one| one.connections == line.number);
        known.ok_or(Refused::Ended)?.heard = now();
        let step = inner.leases.call(line.session, call, now());
        self.carry_out(inner, step)
    }

    /// Makes changes durable that go on from `base`, for a session that has the vault alone. The same changes once more
    /// are done already.
    ///
    /// # Errors
    /// [`Refused::Ended`], [`Refused::OtherHead`], [`Refused::Failed`].
    pub fn commit(&self, host: &str, session: SessionId, base: Head, changes: &[Change]) -> Answer<Head> {
        let inner = &mut *self.inner.lock();
        let step = inner.tick();
        self.carry_out(inner, step)?;
        inner.may_change(session, host)?;
        let after = base.after(changes);
        if inner.head == after {
            return Ok(after);
        }
        if inner.head != base {
            return Err(Refused::OtherHead);
        }
        let noted: Vec<_> = changes.iter().cloned().chain([after.change()]).collect();
        inner.table.commit(&noted).inspect_err(|_| inner.is_in_doubt = true)?;
        inner.head = after;
        Ok(after)
    }

    /// The table, for a session that has a lease of the vault; and its head.
    ///
    /// # Errors
    /// [`Refused::Ended`].
    pub fn table(&self, host: &str, session: SessionId) -> Answer<(Arc<DiskTable>, Head)> {
        let inner = self.inner.lock();
        inner.sessions.get(&session).filter(|one| one.host == host).ok_or(Refused::Ended)?;
        match inner.leases.mode_of(session, VAULT) {
            Some(_) => Ok((inner.table.clone(), inner.head)),
            None => Err(Refused::Ended),
        }
    }
}

/// The error of a step that was not carried out.
fn lost(refused: Refused) -> ServerError {
    match refused {
        Refused::Lost(error) | Refused::Failed(error) => error,
        refused => ServerError::Garbled { detail: format!("{refused:?}") },
    }
}

/// Leases are of the vault as a whole: no other object has one.
fn is_of_the_vault(call: &Call) -> bool {
    match call {
        Call::Heartbeat { .. } | Call::Leave => true,
        Call::Resume { held } => held.len() <= 1 && held.iter().all(|grant| grant.object == VAULT),
        Call::Acquire { object, .. } => *object == VAULT,
        Call::Release { grant, .. } | Call::TakenOver { grant } => grant.object == VAULT,
    }
}

impl Inner {
    /// Time has passed.
    fn tick(&mut self) -> Step {
        let now = now();
        if now.0.saturating_sub(self.ticked.0) > PAUSED {
            // What hosts said meanwhile is on its way: as after a restart all have been heard of now.
            self.leases.was_away(now);
        }
        self.ticked = now;
        self.leases.tick(now)
    }

    fn may_change(&self, session: SessionId, host: &str) -> Answer<()> {
        let is_its = self.sessions.get(&session).is_some_and(|one| one.host == host);
        match is_its && self.leases.may_change(session, VAULT) && !self.is_given_up {
            true => Ok(()),
            false => Err(Refused::Ended),
        }
    }
}
