//! Anchors that a server keeps (`docs/sharing.md`). This host has a copy in the usual place, as of its last session.
//! Its identities at servers are in a directory beside that of anchors.

use super::place::make_dir_of;
use super::{Access, Anchors};
use crate::{Error, Result};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{DiskTable, Table};
use lamassu_anchor::{Anchor, AnchorError, ServerFault};
use lamassu_format::header::VaultId;
use lamassu_lease::Mode;
use lamassu_rpc::host::{Connection, Joined, Mirrored, Session, Turn, Turns, give_up, is_on_its_way, join, put};
use lamassu_rpc::token::Token;
use lamassu_vault::VaultError;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};

/// Sessions by one connection. A server takes 64 streams in one, and 8 calls of one host at a time beside them.
const USERS_MAX: usize = 48;

/// A session by turns.
pub(super) struct ByTurns {
    turns: Arc<Turns>,
    /// Its turn, before the turns' driver takes it and after the driver has ended.
    turn: Option<Turn>,
}

impl ByTurns {
    fn leave(self) {
        self.turns.leave();
        drop(self.turn);
    }
}

/// The connections to a server.
pub(super) struct Connections {
    last: Connection,
    /// how many have got the last one
    users: usize,
}

impl Anchors {
    /// The directory of this host's identities, by server.
    pub(crate) fn servers(&self) -> Result<PathBuf> {
        self.dir().map(|dir| dir.with_file_name("servers")).ok_or(Error::NoAnchorPlace)
    }

    /// Joins a server.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError::Server`], [`Error::NoAnchorPlace`].
    pub fn join(&self, token: &Token) -> Result<Joined> {
        Ok(join(&self.servers()?, token)?)
    }

    /// Whether this host has joined a server. If not, nothing in this process ever needs the network: it has no
    /// identity at any server.
    pub fn has_joined(&self) -> bool {
        let entries = self.servers().ok().and_then(|dir| std::fs::read_dir(dir).ok());
        entries.is_some_and(|mut entries| entries.next().is_some())
    }

    /// The table of this host's first turn.
    pub(super) fn in_turn(&self, server: &str, vault: &VaultId, access: Access, copy: &Path) -> Result<Arc<dyn Table>> {
        let connection = self.connection(server)?;
        make_dir_of(copy)?;
        let turns = Turns::begin(&connection, *vault, copy)?;
        let turn = turns.take(access.mode())?;
        self.remember_server(vault, server)?;
        let table = turn.table.clone();
        self.turns().insert(*vault, ByTurns { turns, turn: Some(turn) });
        Ok(table)
    }

    /// Begins a session by turns of a dataset.
    pub(crate) fn begin_turns(&self, dataset: &VaultId) -> Result<Arc<Turns>> {
        let server = self.server_of(dataset)?.ok_or(Error::NotAtServer)?;
        let copy = self.file_of(dataset)?.ok_or(Error::NoAnchorPlace)?;
        let connection = self.connection(&server)?;
        make_dir_of(&copy)?;
        let turns = Turns::begin(&connection, *dataset, &copy)?;
        self.remember_server(dataset, &server)?;
        self.turns().insert(*dataset, ByTurns { turns: turns.clone(), turn: None });
        Ok(turns)
    }

    /// The session by turns of a vault, and its turn.
    pub(crate) fn take_turn(&self, vault: &VaultId) -> Option<(Arc<Turns>, Turn)> {
        let mut all = self.turns();
        let by_turns = all.get_mut(vault)?;
        Some(by_turns.turns.clone()).zip(by_turns.turn.take())
    }

    /// Keeps a turn, which ends with the session.
    pub(crate) fn keep_turn(&self, vault: &VaultId, turn: Turn) {
        if let Some(by_turns) = self.turns().get_mut(vault) {
            by_turns.turn = Some(turn);
        }
    }

    fn turns(&self) -> MutexGuard<'_, HashMap<VaultId, ByTurns>> {
        self.shared.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this process uses a vault by turns.
    pub(super) fn has_sessions_by_turns(&self) -> bool {
        !self.turns().is_empty()
    }

    /// A connection to a server for one more session. The first one finds the server, before the process is confined.
    pub(super) fn connection(&self, server: &str) -> Result<Connection> {
        let mut connections = self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(known) = connections.get_mut(server) else {
            let last = Connection::new(&self.servers()?, server)?;
            connections.insert(server.into(), Connections { last: last.clone(), users: 1 });
            return Ok(last);
        };
        if known.users == USERS_MAX {
            *known = Connections { last: known.last.another()?, users: 0 };
        }
        known.users += 1;
        Ok(known.last.clone())
    }

    /// The table of an anchor at a server. A server that the user named is remembered.
    pub(super) fn at_server(
        &self,
        server: &str,
        vault: &VaultId,
        access: Access,
        copy: &Path,
    ) -> Result<Arc<dyn Table>> {
        let table = self.session(server, vault, access, copy)?;
        let table = Arc::new(table);
        {
            let mut sessions = self.sessions();
            sessions.retain(|(_, table)| table.strong_count() > 0);
            sessions.push((*vault, Arc::downgrade(&table)));
        }
        if table.session().takes_over {
            tracing::warn!(server, "the last session of this vault did not end: what it had not synced is lost");
        }
        Ok(table)
    }

    fn sessions(&self) -> MutexGuard<'_, Vec<(VaultId, Weak<Mirrored>)>> {
        self.shared.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the session of a vault that was closed, so that other hosts get it at once.
    pub(crate) fn leave(&self, vault: &VaultId) {
        if let Some(by_turns) = { self.turns().remove(vault) } {
            by_turns.leave();
        }
        let of_it: Vec<_> = self.sessions().extract_if(.., |(of, _)| of == vault).collect();
        for table in of_it.into_iter().filter_map(|(_, table)| table.upgrade()) {
            if let Some(open) = self.opened().get_mut(vault) {
                open.has_left = true;
            }
            table.session().leave();
        }
    }

    /// Ends the sessions of this process at servers, so that other hosts get the vaults at once. Nothing is read or
    /// written by them after that.
    pub fn leave_servers(&self) {
        let by_turns = std::mem::take(&mut *self.turns());
        by_turns.into_values().for_each(ByTurns::leave);
        for (_, table) in self.sessions().drain(..) {
            if let Some(table) = table.upgrade() {
                table.session().leave();
            }
        }
    }

    pub(super) fn session(&self, server: &str, vault: &VaultId, access: Access, copy: &Path) -> Result<Mirrored> {
        let connection = self.connection(server)?;
        make_dir_of(copy)?;
        let table = Mirrored::open(&connection, *vault, access.mode(), copy)?;
        self.remember_server(vault, server)?;
        Ok(table)
    }

    /// Whether an anchor of this vault is at the server where this host would look for it.
    pub(super) fn is_at_server(&self, vault: &VaultId) -> Result<bool> {
        let Some(server) = self.server_of(vault)? else { return Ok(false) };
        match Session::begin(&self.connection(&server)?, *vault, Mode::Shared, None) {
            Err(AnchorError::Server { fault: ServerFault::UnknownVault, .. }) => Ok(false),
            Err(AnchorError::Server { fault: ServerFault::InUse { .. }, .. }) => Ok(true),
            begun => Ok(begun.map(|_| true)?),
        }
    }

    /// Brings the copy of a server's anchor up to date before it is read, unless a process of this host is writing it.
    pub(super) fn bring_copy_up_to_date(&self, vault: &VaultId, copy: &Path) -> Result<()> {
        let Some(server) = self.server_of(vault)? else { return Ok(()) };
        match self.session(&server, vault, Access::Read, copy) {
            Err(error) if super::is_locked(&error) => Ok(()),
            done => done.map(drop),
        }
    }

    /// Puts the anchor of the vault in `dir` at a server. Its file becomes this host's copy. The caller must keep
    /// writers out. If it is a dataset in a vault whose anchor is at that server, whoever may use that vault may use
    /// it.
    ///
    /// The server is remembered before the first row is sent, so that no process of this host continues with a file
    /// that may be outdated. An interrupted move is repeated: the server accepts the same rows twice.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError`]; [`Error::Local`], [`Error::NoAnchorPlace`], [`Error::AnchorAtServer`].
    pub fn move_to_server(&self, vault: &VaultId, dir: &Path, server: &str) -> Result<()> {
        self.move_to_server_in(vault, server, self.around_at_server(vault, dir, server))
    }

    /// The same; `around`: the vault that it lies in, if it is a dataset, whose anchor is at that server.
    pub(super) fn move_to_server_in(&self, vault: &VaultId, server: &str, around: Option<VaultId>) -> Result<()> {
        let usual = self.usual(vault).ok_or(Error::NoAnchorPlace)?;
        match self.server_of(vault)? {
            Some(noted) if noted == server && is_on_its_way(&usual)? => {}
            Some(server) => return Err(Error::AnchorAtServer { server }),
            None => {}
        }
        let connection = self.connection(server)?;
        // Checks that the server answers.
        match Session::begin(&connection, *vault, Mode::Shared, None) {
            Err(AnchorError::Server { fault: ServerFault::UnknownVault, .. }) => {}
            begun => drop(begun?),
        }
        let from = self.file_of(vault)?.ok_or(Error::NoAnchorPlace)?;
        if from != usual {
            // Any file in the usual place is of an interrupted move: the remembered file is another one.
            make_dir_of(&usual)?;
            self.move_file(vault, &from, &usual)?;
        }
        Anchor::open(Arc::new(DiskTable::open(&usual)?), vault)?;
        self.put_file((server, &connection), (vault, around), &usual).map_err(|error| match error.innermost() {
            // The server says that it has not accepted the anchor.
            Error::Vault(VaultError::Anchor(AnchorError::Server {
                fault: ServerFault::Refused { .. } | ServerFault::Policy { .. } | ServerFault::Untrusted { .. },
                ..
            })) => self.remember(vault, &usual).err().unwrap_or(error),
            _ => error,
        })
    }

    /// Sends the rows of an anchor's file to a server, which is remembered first. The file becomes this host's copy.
    pub(super) fn put_file(
        &self,
        (server, connection): (&str, &Connection),
        (vault, around): (&VaultId, Option<VaultId>),
        file: &Path,
    ) -> Result<()> {
        let table = Arc::new(DiskTable::open(file)?);
        // An anchor that was taken back from another server still has that server's head.
        table.commit(&[Head::none()])?;
        self.remember_server(vault, server)?;
        Ok(put(connection, *vault, around, &table)?)
    }

    /// Takes a vault's anchor back from its server into a new file. The caller must keep writers out.
    ///
    /// # Errors
    /// As [`Anchors::move_to_server`].
    pub(super) fn move_from_server(&self, server: &str, vault: &VaultId, to: &Path) -> Result<()> {
        let usual = self.usual(vault).ok_or(Error::NoAnchorPlace)?;
        super::moved::refuse_existing(to)?;
        let table = self.session(server, vault, Access::Write, &usual)?;
        super::moved::replace(to, |new| super::moved::copy(table.copy(), &new))?;
        let taken = give_up(table.session()).map_err(Error::from).and_then(|()| self.remember(vault, to));
        taken.inspect_err(|error| {
            // If the answer was lost, the server may have succeeded: then this file is the anchor.
            if !is_unanswered(error) {
                let _ = std::fs::remove_file(to);
            }
        })?;
        drop(table);
        std::fs::remove_file(&usual).map_err(|source| Error::Local { op: "remove", path: usual, source })
    }
}

fn is_unanswered(error: &Error) -> bool {
    let Error::Vault(VaultError::Anchor(AnchorError::Server { fault, .. })) = error else { return false };
    matches!(fault, ServerFault::Unreachable { .. })
}
