//! The vaults whose anchors are kept here: for each the table of its rows and its leases.
//!
//! A vault is used as a whole: its sessions hold a lease of [`VAULT`]. What changes the leases is durable before
//! anybody hears of it; what fails to become durable ends the server, which starts again on what is durable.

use crate::state::State;
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{Change, DiskTable, Table};
use lamassu_anchor::{Anchor, AnchorError};
use lamassu_lease::server::{Server, Step};
use lamassu_lease::{Call, Millis, Mode, Object, Reply, SessionId, Terms};
use lamassu_rpc::clock::now;
use parking_lot::Mutex;
use ring::rand::{SecureRandom, SystemRandom};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedSender;

/// The vault as a whole.
pub const VAULT: Object = Object(0);
/// The directory of tables in the server's directory.
pub const DIR: &str = "anchors";

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
    /// The server's disk.
    Failed(ServerError),
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
    open: Mutex<HashMap<[u8; 16], Arc<Vault>>>,
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
    is_given_up: bool,
}

struct Attending {
    host: String,
    mode: Mode,
    heard: Millis,
    /// Its connections so far: what an earlier one says is not heard any more.
    connections: u64,
    replies: Option<UnboundedSender<Reply>>,
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
    /// Those in a server's directory.
    ///
    /// # Errors
    /// [`ServerError::File`].
    pub fn new(dir: &Path, terms: Terms, state: Arc<State>) -> Result<Vaults> {
        let dir = dir.join(DIR);
        fs::create_dir_all(&dir).map_err(ServerError::file("make", &dir))?;
        Ok(Vaults { dir, terms, state, open: Mutex::default() })
    }

    /// How long leases last.
    pub fn terms(&self) -> Terms {
        self.terms
    }

    fn file(&self, id: &[u8; 16]) -> PathBuf {
        self.dir.join(format!("{}.anchor", HEXLOWER.encode(id)))
    }

    /// Whether an anchor of this vault is kept here.
    pub fn has(&self, id: &[u8; 16]) -> bool {
        self.file(id).symlink_metadata().is_ok()
    }

    /// Opens all, so that what their sessions held before a restart is watched.
    ///
    /// # Errors
    /// Those of each.
    pub fn open_all(&self) -> Result<usize> {
        let entries = fs::read_dir(&self.dir).map_err(ServerError::file("list", &self.dir))?;
        let mut opened = 0;
        for entry in entries {
            let name = entry.map_err(ServerError::file("list", &self.dir))?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".anchor"));
            let id = id.and_then(|id| HEXLOWER.decode(id.as_bytes()).ok()).and_then(|id| id.try_into().ok());
            if let Some(id) = id {
                self.vault(&id).map_err(|refused| match refused {
                    Refused::Failed(error) => error,
                    _ => ServerError::NoVault { id: HEXLOWER.encode(&id) },
                })?;
                opened += 1;
            }
        }
        Ok(opened)
    }

    /// A vault, opened if it was not.
    ///
    /// # Errors
    /// [`Refused::Unknown`], [`Refused::Failed`].
    pub fn vault(&self, id: &[u8; 16]) -> Answer<Arc<Vault>> {
        let mut open = self.open.lock();
        if let Some(vault) = open.get(id) {
            return Ok(vault.clone());
        }
        let table = match DiskTable::open(&self.file(id)) {
            Err(AnchorError::Missing { .. }) => return Err(Refused::Unknown),
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
        let inner = Inner { table, head, leases, sessions, is_given_up: false };
        let vault = Arc::new(Vault { id: *id, state: self.state.clone(), inner: Mutex::new(inner) });
        vault.carry_out(&mut vault.inner.lock(), step)?;
        open.insert(*id, vault.clone());
        Ok(vault)
    }

    /// Keeps the anchor of a vault that is not known: rows, as they come. `None` from `rows`: the client has given up.
    ///
    /// # Errors
    /// [`Refused::Known`], [`Refused::NoAnchor`], [`Refused::Failed`].
    pub fn put(&self, id: &[u8; 16], rows: &mut dyn Iterator<Item = Option<Vec<Change>>>) -> Answer<Head> {
        let (file, new) = (self.file(id), self.dir.join(format!("{}.new", HEXLOWER.encode(id))));
        if self.has(id) {
            return Err(Refused::Known);
        }
        // Two that put one vault at once: the second finds the first's file.
        let table = Arc::new(DiskTable::create(&new).map_err(|error| match error {
            AnchorError::Exists { .. } => Refused::Known,
            error => Refused::Failed(error.into()),
        })?);
        let put = || {
            for some in rows {
                table.commit(&some.ok_or(Refused::Ended)?)?;
            }
            Anchor::open(table.clone(), id).map_err(|_| Refused::NoAnchor)?;
            let mut head = Head([0; 32]);
            SystemRandom::new().fill(&mut head.0).map_err(|_| ServerError::NoRandom)?;
            table.commit(&[head.change()])?;
            // Not over another one.
            fs::hard_link(&new, &file).map_err(ServerError::file("put in place", &file))?;
            Ok(head)
        };
        let done = put();
        let _ = fs::remove_file(&new);
        let synced = fs::File::open(&self.dir).and_then(|dir| dir.sync_all());
        synced.map_err(ServerError::file("sync", &self.dir))?;
        done
    }

    /// Time has passed, for all that are open.
    ///
    /// # Errors
    /// [`ServerError`]: nobody must be told what is not durable, so that the server ends.
    pub fn tick(&self) -> Result<()> {
        let open: Vec<_> = self.open.lock().values().cloned().collect();
        for vault in open {
            let inner = &mut *vault.inner.lock();
            let step = inner.leases.tick(now());
            vault.carry_out(inner, step)?;
        }
        Ok(())
    }

    /// A host may do nothing any more: its sessions end.
    ///
    /// # Errors
    /// As [`Vaults::tick`].
    pub fn end_sessions_of(&self, host: &str) -> Result<()> {
        let open: Vec<_> = self.open.lock().values().cloned().collect();
        for vault in open {
            let inner = &mut *vault.inner.lock();
            let its = inner.sessions.iter().filter(|(_, attending)| attending.host == host);
            let its: Vec<_> = its.map(|(session, _)| *session).collect();
            for session in its {
                let step = inner.leases.end_session(session, now());
                vault.carry_out(inner, step)?;
            }
        }
        Ok(())
    }

    /// The vaults that are open, and the hosts that have sessions of them.
    pub fn in_use(&self) -> Vec<([u8; 16], Vec<String>)> {
        let open: Vec<_> = self.open.lock().values().cloned().collect();
        let hosts = |vault: &Vault| vault.inner.lock().sessions.values().map(|one| one.host.clone()).collect();
        open.iter().map(|vault| (vault.id, hosts(vault))).collect()
    }

    /// Gives up the anchor of a vault that a session has alone: it is kept under another name.
    ///
    /// # Errors
    /// [`Refused::Ended`], [`Refused::Failed`].
    pub fn give_up(&self, id: &[u8; 16], session: SessionId, host: &str) -> Answer<()> {
        let vault = self.vault(id)?;
        let mut open = self.open.lock();
        let inner = &mut *vault.inner.lock();
        inner.may_change(session, host)?;
        let (file, away) = (self.file(id), self.dir.join(format!("{}.given-up", HEXLOWER.encode(id))));
        fs::rename(&file, &away).map_err(ServerError::file("rename", &file))?;
        inner.is_given_up = true;
        open.remove(id);
        Ok(())
    }
}

impl Vault {
    /// First what is to be durable, then what is to be said.
    fn carry_out(&self, inner: &mut Inner, step: Step) -> Result<()> {
        let host_of = |session| inner.sessions.get(&session).map(|one| one.host.clone()).unwrap_or_default();
        self.state.change_leases(&self.id, &step.changes, host_of)?;
        for (session, reply) in step.replies {
            if let Some(replies) = inner.sessions.get(&session).and_then(|one| one.replies.as_ref()) {
                let _ = replies.send(reply);
            }
        }
        inner.sessions.retain(|session, _| inner.leases.is_alive(*session));
        Ok(())
    }

    /// Begins a session that is going to ask for the vault in this mode, if nobody has it otherwise. `replaces`: a
    /// session of the same host that is gone.
    ///
    /// # Errors
    /// [`Refused::InUse`], [`Refused::Failed`].
    pub fn begin(&self, host: &str, mode: Mode, replaces: SessionId, replies: UnboundedSender<Reply>) -> Answer<Begun> {
        let inner = &mut *self.inner.lock();
        if inner.is_given_up {
            return Err(Refused::Unknown);
        }
        if inner.sessions.get(&replaces).is_some_and(|one| one.host == host) {
            let step = inner.leases.end_session(replaces, now());
            self.carry_out(inner, step)?;
        }
        let step = inner.leases.tick(now());
        self.carry_out(inner, step)?;
        let is_in_the_way = |one: &&Attending| mode == Mode::Exclusive || one.mode == Mode::Exclusive;
        if let Some(one) = inner.sessions.values().find(is_in_the_way) {
            let by = match now().0.saturating_sub(one.heard.0) / 1000 {
                0..=9 => format!("host {}", one.host),
                seconds => format!("host {}, which was heard of {seconds} s ago", one.host),
            };
            return Err(Refused::InUse { by });
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
    pub fn resumes(&self, host: &str, session: SessionId, replies: UnboundedSender<Reply>) -> Answer<Begun> {
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
        let inner = &mut *self.inner.lock();
        let known = inner.sessions.get_mut(&line.session).filter(|one| one.connections == line.number);
        known.ok_or(Refused::Ended)?.heard = now();
        let step = inner.leases.call(line.session, call, now());
        Ok(self.carry_out(inner, step)?)
    }

    /// Makes changes durable that go on from `base`, for a session that has the vault alone. The same changes once more
    /// are done already.
    ///
    /// # Errors
    /// [`Refused::Ended`], [`Refused::OtherHead`], [`Refused::Failed`].
    pub fn commit(&self, host: &str, session: SessionId, base: Head, changes: &[Change]) -> Answer<Head> {
        let inner = &mut *self.inner.lock();
        let step = inner.leases.tick(now());
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
        inner.table.commit(&noted)?;
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

impl Inner {
    fn may_change(&self, session: SessionId, host: &str) -> Answer<()> {
        let is_its = self.sessions.get(&session).is_some_and(|one| one.host == host);
        match is_its && self.leases.may_change(session, VAULT) && !self.is_given_up {
            true => Ok(()),
            false => Err(Refused::Ended),
        }
    }
}
