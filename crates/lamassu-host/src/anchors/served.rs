//! Anchors that a server keeps (`docs/sharing.md`). This host has a copy in the usual place, which is as new as its
//! last session; who this host is at each server lies in a directory beside that of anchors.

use super::place::make_dir_of;
use super::{Access, Anchors};
use crate::{Error, Result};
use lamassu_anchor::Anchor;
use lamassu_anchor::table::{DiskTable, Table};
use lamassu_lease::Mode;
use lamassu_rpc::host::{Connection, Joined, Mirrored, give_up, join, put};
use lamassu_rpc::token::Token;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};

impl Anchors {
    /// The directory of who this host is, by server.
    fn servers(&self) -> Result<PathBuf> {
        self.dir().map(|dir| dir.with_file_name("servers")).ok_or(Error::NoAnchorPlace)
    }

    /// Joins a server.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError::Server`], [`Error::NoAnchorPlace`].
    pub fn join(&self, token: &Token) -> Result<Joined> {
        Ok(join(&self.servers()?, token)?)
    }

    /// Whether an anchor was opened that a server keeps.
    pub fn has_connections(&self) -> bool {
        !self.sessions().is_empty()
    }

    fn connection(&self, server: &str) -> Result<Connection> {
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
        for table in self.sessions().drain(..) {
            if let Some(table) = table.upgrade() {
                table.session().leave();
            }
        }
    }

    fn session(&self, server: &str, vault: &[u8; 16], access: Access, copy: &Path) -> Result<Mirrored> {
        let connection = self.connection(server)?;
        make_dir_of(copy)?;
        let mode = match access {
            Access::Read => Mode::Shared,
            Access::Write => Mode::Exclusive,
        };
        let table = Mirrored::open(&connection, *vault, mode, copy)?;
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
    /// # Errors
    /// [`lamassu_anchor::AnchorError`]; [`Error::Local`], [`Error::NoAnchorPlace`], [`Error::AnchorAtServer`].
    pub fn move_to_server(&self, vault: &[u8; 16], server: &str) -> Result<()> {
        self.refuse_server(vault)?;
        let (from, usual) = (self.file_of(vault)?, self.usual(vault));
        let (from, usual) = from.zip(usual).ok_or(Error::NoAnchorPlace)?;
        let connection = self.connection(server)?;
        let table = Arc::new(DiskTable::open(&from)?);
        Anchor::open(table.clone(), vault)?;
        put(&connection, *vault, &table)?;
        drop(table);
        self.remember_server(vault, server)?;
        if from == usual {
            return Ok(());
        }
        // Another disk's: the copy is fetched when it is needed.
        std::fs::remove_file(&from).map_err(|source| Error::Local { op: "remove", path: from, source })
    }

    /// Takes a vault's anchor back from its server, into a file, which must not exist. The caller keeps writers out.
    ///
    /// # Errors
    /// As [`Anchors::move_to_server`].
    pub(super) fn move_from_server(&self, server: &str, vault: &[u8; 16], to: &Path) -> Result<()> {
        let usual = self.usual(vault).ok_or(Error::NoAnchorPlace)?;
        let table = self.session(server, vault, Access::Write, &usual)?;
        let new = DiskTable::create(to)?;
        let taken = super::moved::copy(table.copy(), &new).and_then(|()| {
            give_up(table.session())?;
            self.remember(vault, to)
        });
        taken.inspect_err(|_| {
            let _ = std::fs::remove_file(to);
        })?;
        drop(table);
        std::fs::remove_file(&usual).map_err(|source| Error::Local { op: "remove", path: usual, source })
    }
}
