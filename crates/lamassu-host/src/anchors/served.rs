//! Anchors that a server keeps (`docs/sharing.md`). This host has a copy in the usual place, which is as new as its
//! last session; who this host is at each server lies in a directory beside that of anchors.

use super::place::make_dir_of;
use super::{Access, Anchors};
use crate::{Error, Result};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{DiskTable, Table};
use lamassu_anchor::{Anchor, AnchorError, ServerFault};
use lamassu_lease::Mode;
use lamassu_rpc::host::{Connection, Joined, Mirrored, Session, Turn, Turns, give_up, is_on_its_way, join, put};
use lamassu_rpc::token::Token;
use lamassu_vault::VaultError;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};

impl Anchors {
    /// The directory of who this host is, by server.
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

    /// Whether this host has joined a server. Otherwise nothing in this process ever needs the network: who this host is
    /// at a server stands there.
    pub fn has_joined(&self) -> bool {
        let entries = self.servers().ok().and_then(|dir| std::fs::read_dir(dir).ok());
        entries.is_some_and(|mut entries| entries.next().is_some())
    }

    /// The table of this host's first turn.
    pub(super) fn in_turn(
        &self,
        server: &str,
        vault: &[u8; 16],
        access: Access,
        copy: &Path,
    ) -> Result<Arc<dyn Table>> {
        let connection = self.connection(server)?;
        make_dir_of(copy)?;
        let turns = Turns::begin(&connection, *vault, copy)?;
        let turn = turns.take(access.mode())?;
        self.remember_server(vault, server)?;
        let table = turn.table.clone();
        // One command opens one vault so.
        let _ = self.shared.turns.set(turns);
        self.keep_turn(turn);
        Ok(table)
    }

    /// The session that has the vault by turns, and its turn.
    pub(crate) fn take_turn(&self) -> Option<(Arc<Turns>, Turn)> {
        self.shared.turns.get().cloned().zip(self.turn().take())
    }

    /// A turn that ends with the session.
    pub(crate) fn keep_turn(&self, turn: Turn) {
        *self.turn() = Some(turn);
    }

    fn turn(&self) -> MutexGuard<'_, Option<Turn>> {
        self.shared.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn connection(&self, server: &str) -> Result<Connection> {
        Ok(Connection::new(&self.servers()?, server)?)
    }

    /// The table of a vault's anchor that a server keeps. A server that a person named is remembered.
    pub(super) fn at_server(
        &self,
        server: &str,
        vault: &[u8; 16],
        access: Access,
        copy: &Path,
    ) -> Result<Arc<dyn Table>> {
        let table = self.session(server, vault, access, copy)?;
        let table = Arc::new(table);
        self.sessions().push(Arc::downgrade(&table));
        if table.session().takes_over {
            tracing::warn!(server, "the last session of this vault did not end: what it had not synced is lost");
        }
        Ok(table)
    }

    fn sessions(&self) -> MutexGuard<'_, Vec<Weak<Mirrored>>> {
        self.shared.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the sessions of this process at servers, so that other hosts have the vaults at once. Nothing more is read
    /// or written by them.
    pub fn leave_servers(&self) {
        if let Some(turns) = self.shared.turns.get() {
            turns.leave();
            drop(self.turn().take());
        }
        for table in self.sessions().drain(..) {
            if let Some(table) = table.upgrade() {
                table.session().leave();
            }
        }
    }

    fn session(&self, server: &str, vault: &[u8; 16], access: Access, copy: &Path) -> Result<Mirrored> {
        let connection = self.connection(server)?;
        make_dir_of(copy)?;
        let table = Mirrored::open(&connection, *vault, access.mode(), copy)?;
        self.remember_server(vault, server)?;
        Ok(table)
    }

    /// Before a look at the copy of an anchor that a server keeps: it is as new as the server's, or a process of this
    /// host is writing it.
    pub(super) fn bring_copy_up_to_date(&self, vault: &[u8; 16], copy: &Path) -> Result<()> {
        let Some(server) = self.server_of(vault)? else { return Ok(()) };
        match self.session(&server, vault, Access::Read, copy) {
            Err(error) if super::is_locked(&error) => Ok(()),
            done => done.map(drop),
        }
    }

    /// Gives a vault's anchor to a server. The file that it lies in becomes this host's copy. The caller keeps writers
    /// out.
    ///
    /// From the first row that goes there on the server is noted, so that nobody here goes on with a file that may be
    /// the older of two. Broken off, it is done again: the same rows are taken twice.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError`]; [`Error::Local`], [`Error::NoAnchorPlace`], [`Error::AnchorAtServer`].
    pub fn move_to_server(&self, vault: &[u8; 16], server: &str) -> Result<()> {
        let usual = self.usual(vault).ok_or(Error::NoAnchorPlace)?;
        match self.server_of(vault)? {
            Some(noted) if noted == server && is_on_its_way(&usual)? => {}
            Some(server) => return Err(Error::AnchorAtServer { server }),
            None => {}
        }
        let connection = self.connection(server)?;
        // Whether it answers at all.
        match Session::begin(&connection, *vault, Mode::Shared, None) {
            Err(AnchorError::Server { fault: ServerFault::UnknownVault, .. }) => {}
            begun => drop(begun?),
        }
        let from = self.file_of(vault)?.ok_or(Error::NoAnchorPlace)?;
        if from != usual {
            // What lies there is of a move that was cut off: another file is noted.
            make_dir_of(&usual)?;
            self.move_file(vault, &from, &usual)?;
        }
        let table = Arc::new(DiskTable::open(&usual)?);
        Anchor::open(table.clone(), vault)?;
        // One that another server gave up says how far it came there.
        table.commit(&[Head::none()])?;
        self.remember_server(vault, server)?;
        put(&connection, *vault, &table).map_err(|error| match &error {
            // It says that it has not taken it.
            AnchorError::Server {
                fault: ServerFault::Refused { .. } | ServerFault::Policy { .. } | ServerFault::Untrusted { .. },
                ..
            } => self.remember(vault, &usual).err().unwrap_or(error.into()),
            _ => error.into(),
        })
    }

    /// Takes a vault's anchor back from its server, into a file, which must not exist. The caller keeps writers out.
    ///
    /// # Errors
    /// As [`Anchors::move_to_server`].
    pub(super) fn move_from_server(&self, server: &str, vault: &[u8; 16], to: &Path) -> Result<()> {
        let usual = self.usual(vault).ok_or(Error::NoAnchorPlace)?;
        super::moved::refuse_existing(to)?;
        let table = self.session(server, vault, Access::Write, &usual)?;
        super::moved::replace(to, |new| super::moved::copy(table.copy(), &new))?;
        let taken = give_up(table.session()).map_err(Error::from).and_then(|()| self.remember(vault, to));
        taken.inspect_err(|error| {
            // An answer that was lost may have been a good one: then this is the anchor.
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
