//! Anchors that a server keeps (`docs/sharing.md`). This host has a copy in the usual place, as of its last session.
//! Its identities at servers are in a directory beside that of anchors.

use super::moved::{copy, present, refuse_existing, replace};
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
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Sessions by one connection. A server takes 64 streams in one, and 8 calls of one host at a time beside them.
const USERS_MAX: usize = 48;

/// How long a session waits for an earlier one of the same vault in this process, and how often it looks.
const LEAVING: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A session by turns.
pub(super) struct ByTurns<S = Turns, T = Turn> {
    turns: Arc<S>,
    /// Its turn, before the turns' driver takes it and after the driver has ended.
    turn: Option<T>,
}

/// Removes a session of a vault, unless another one has taken its place.
fn remove_session<S, T>(
    all: &mut HashMap<VaultId, ByTurns<S, T>>,
    vault: &VaultId,
    turns: &Arc<S>,
) -> Option<ByTurns<S, T>> {
    let is_it = all.get(vault).is_some_and(|known| Arc::ptr_eq(&known.turns, turns));
    if is_it { all.remove(vault) } else { None }
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
        self.wait_until_left(dataset);
        let turns = Turns::begin(&connection, *dataset, &copy)?;
        self.remember_server(dataset, &server)?;
        self.turns().insert(*dataset, ByTurns { turns: turns.clone(), turn: None });
        Ok(turns)
    }

    /// Waits for a while for an earlier session by turns of this process: two cannot have the same copy.
    fn wait_until_left(&self, vault: &VaultId) {
        let until = Instant::now() + LEAVING;
        // In this order: it is among those that are ending before it is away here.
        while (self.turns().contains_key(vault) || self.is_ending(vault)) && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn is_ending(&self, vault: &VaultId) -> bool {
        let mut ending = self.ending();
        ending.retain(|(_, turns)| turns.upgrade().is_some_and(|turns| !turns.is_closed()));
        ending.iter().any(|(of, _)| of == vault)
    }

    fn ending(&self) -> MutexGuard<'_, Vec<(VaultId, Weak<Turns>)>> {
        self.shared.ending.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Ends this session by turns of a vault, and no later one.
    pub(crate) fn leave_turns(&self, vault: &VaultId, turns: &Arc<Turns>) {
        self.leave_by_turns(vault, |all| remove_session(all, vault, turns));
    }

    fn leave_by_turns(&self, vault: &VaultId, remove: impl FnOnce(&mut HashMap<VaultId, ByTurns>) -> Option<ByTurns>) {
        let by_turns = {
            let mut all = self.turns();
            let by_turns = remove(&mut all);
            // Before others see that it is gone.
            self.ending().extend(by_turns.iter().map(|by_turns| (*vault, Arc::downgrade(&by_turns.turns))));
            by_turns
        };
        by_turns.into_iter().for_each(ByTurns::leave);
    }

    /// Ends the session of a vault that was closed, so that other hosts get it at once.
    pub(crate) fn leave(&self, vault: &VaultId) {
        self.leave_by_turns(vault, |all| all.remove(vault));
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
        self.server_of(vault)?.map_or(Ok(false), |server| self.is_kept_by(&server, vault))
    }

    /// The same for a server.
    pub(super) fn is_kept_by(&self, server: &str, vault: &VaultId) -> Result<bool> {
        match Session::begin(&self.connection(server)?, *vault, Mode::Shared, None) {
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
    /// that may be outdated. An interrupted move is repeated: the server accepts the same rows twice. If it refuses a
    /// repetition, it may have accepted the first attempt all the same, and other hosts may have gone on from there. So
    /// only a refusal of the first attempt makes the file the anchor again.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError`]; [`Error::Local`], [`Error::NoAnchorPlace`], [`Error::AnchorAtServer`],
    /// [`Error::PerhapsAtServer`].
    pub fn move_to_server(&self, vault: &VaultId, dir: &Path, server: &str) -> Result<()> {
        self.move_to_server_in(vault, server, self.around_at_server(vault, dir, server))
    }

    /// The same; `around`: the vault that it lies in, if it is a dataset, whose anchor is at that server.
    pub(super) fn move_to_server_in(&self, vault: &VaultId, server: &str, around: Option<VaultId>) -> Result<()> {
        let usual = self.usual(vault).ok_or(Error::NoAnchorPlace)?;
        // A server keeps one anchor for an id, and that is the original's.
        if let Some(path) = self.copied(vault) {
            return Err(Error::OfCopiedDataset { path });
        }
        let is_repeated = match self.server_of(vault)? {
            Some(noted) if noted == server && is_on_its_way(&usual)? => true,
            Some(server) => return Err(Error::AnchorAtServer { server }),
            None => false,
        };
        let perhaps =
            |error| Error::PerhapsAtServer { server: server.into(), path: usual.clone(), source: Box::new(error) };
        let connection = self.connection(server)?;
        // Checks that the server answers.
        match Session::begin(&connection, *vault, Mode::Shared, None) {
            Err(AnchorError::Server { fault: ServerFault::UnknownVault, .. }) => {}
            Err(error) if is_repeated => return Err(perhaps(error.into())),
            begun => drop(begun?),
        }
        let from = self.file_of(vault)?.ok_or(Error::NoAnchorPlace)?;
        if from != usual {
            // Any file in the usual place is of an interrupted move: the remembered file is another one.
            make_dir_of(&usual)?;
            self.move_file(vault, &from, &usual)?;
        }
        Anchor::open(Arc::new(DiskTable::open(&usual)?), vault)?;
        let sent = self.put_file((server, &connection), (vault, around), &usual);
        let Err(error) = sent else { return Ok(()) };
        let refused = matches!(
            fault_of(&error),
            Some(ServerFault::Refused { .. } | ServerFault::Policy { .. } | ServerFault::Untrusted { .. })
        );
        let error = match refused {
            true if !is_repeated => return Err(self.remember(vault, &usual).err().unwrap_or(error)),
            true => match self.session(server, vault, Access::Read, &usual) {
                Ok(_) => return Ok(()),
                Err(unknown) if is_unknown(&unknown) => error,
                Err(other) => other,
            },
            false => error,
        };
        Err(perhaps(error))
    }

    /// Sends the rows of an anchor's file to a server, which is remembered first. The file becomes this host's copy.
    pub(super) fn put_file(
        &self,
        (server, connection): (&str, &Connection),
        (vault, around): (&VaultId, Option<VaultId>),
        file: &Path,
    ) -> Result<()> {
        let table = Arc::new(DiskTable::open(file)?);
        // The server could not tell damage from what is right.
        table.verify()?;
        // An anchor that was taken back from another server still has that server's head.
        table.commit(&[Head::none()])?;
        self.remember_server(vault, server)?;
        Ok(put(connection, *vault, around, &table)?)
    }

    /// Takes a vault's anchor back from its server into a new file. In the usual place this host's copy becomes the
    /// anchor. The caller must keep writers out.
    ///
    /// The file is noted before the server is asked to give the anchor up. If the answer to that was lost, and the
    /// server has no anchor any more, the same call again makes the noted file the anchor.
    ///
    /// # Errors
    /// As [`Anchors::move_to_server`]; [`Error::NotTakenBack`].
    pub(super) fn move_from_server(&self, server: &str, vault: &VaultId, to: &Path) -> Result<()> {
        let usual = self.usual(vault).ok_or(Error::NoAnchorPlace)?;
        let is_usual = super::settled(&usual).is_ok_and(|usual| usual == to);
        let to = if is_usual { &usual } else { to };
        let is_repeated = self.is_taken_to(vault, to)?;
        let is_ours = is_usual || (is_repeated && present(to, vault)?.is_some());
        if !is_ours {
            refuse_existing(to)?;
        }
        let table = match self.session(server, vault, Access::Write, &usual) {
            Err(error) if is_repeated && is_unknown(&error) && self.is_as_new(vault, to, &usual)? => {
                return self.is_taken_back(vault, to, &usual);
            }
            begun => begun?,
        };
        // It becomes the anchor, and the server gives up its own.
        table.copy().verify()?;
        self.note_taken_to(vault, to)?;
        if !is_usual {
            replace(to, |new| copy(table.copy(), &new))?;
        }
        let given_up = give_up(table.session());
        drop(table);
        self.given_up(vault, to, &usual, given_up.map_err(Error::from))
    }

    /// The server has given up the anchor, has refused that, or its answer was lost. The new file may be the anchor in
    /// the last case, too.
    pub(super) fn given_up(&self, vault: &VaultId, to: &Path, usual: &Path, answer: Result<()>) -> Result<()> {
        let done = match answer {
            Err(error) if has_refused(&error) => {
                if to != usual {
                    let _ = std::fs::remove_file(to);
                }
                self.forget_taken(vault);
                return Err(error);
            }
            answer => answer.and_then(|()| self.is_taken_back(vault, to, usual)),
        };
        done.map_err(|source| Error::NotTakenBack { path: to.into(), source: Box::new(source) })
    }

    /// The server has given up the anchor: `to` is the anchor.
    fn is_taken_back(&self, vault: &VaultId, to: &Path, usual: &Path) -> Result<()> {
        self.remember(vault, to)?;
        self.forget_taken(vault);
        if to != usual
            && let Err(error) = std::fs::remove_file(usual)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!(copy = %usual.display(), %error, "a copy that is no longer needed stays");
        }
        Ok(())
    }

    /// Whether a file is a whole anchor of this vault, and not older than this host's copy.
    fn is_as_new(&self, vault: &VaultId, file: &Path, copy: &Path) -> Result<bool> {
        let Some(anchor) = present(file, vault)? else { return Ok(false) };
        let revision = anchor.vault().revision;
        drop(anchor);
        DiskTable::open(file)?.verify()?;
        Ok(present(copy, vault)?.is_none_or(|copy| copy.vault().revision <= revision))
    }
}

/// Whether a server has no anchor of the vault, or none for this host.
fn is_unknown(error: &Error) -> bool {
    matches!(fault_of(error), Some(ServerFault::UnknownVault))
}

/// Whether a server has certainly not done what it was asked for.
fn has_refused(error: &Error) -> bool {
    match fault_of(error) {
        None | Some(ServerFault::Unreachable { .. } | ServerFault::Failed { .. }) => false,
        Some(
            ServerFault::Untrusted { .. }
            | ServerFault::NotJoined { .. }
            | ServerFault::Refused { .. }
            | ServerFault::Policy { .. }
            | ServerFault::UnknownVault
            | ServerFault::InUse { .. }
            | ServerFault::Ended
            | ServerFault::Version { .. }
            | ServerFault::Older { .. }
            | ServerFault::Restored { .. },
        ) => true,
    }
}

fn fault_of(error: &Error) -> Option<&ServerFault> {
    match error.innermost() {
        Error::Vault(VaultError::Anchor(AnchorError::Server { fault, .. })) => Some(fault),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever ends a session late ends none that has begun since.
    #[test]
    fn a_session_that_has_begun_since_is_not_ended() {
        let (id, [first, second]) = (VaultId([7; 16]), [Arc::new(1), Arc::new(2)]);
        let begun = |turns: &Arc<i32>| ByTurns::<i32, ()> { turns: turns.clone(), turn: None };
        let mut all = HashMap::from([(id, begun(&first))]);
        assert!(remove_session(&mut all, &id, &first).is_some_and(|by_turns| Arc::ptr_eq(&by_turns.turns, &first)));
        assert!(remove_session(&mut all, &id, &first).is_none());
        all.insert(id, begun(&second));
        assert!(remove_session(&mut all, &id, &first).is_none());
        assert!(all.get(&id).is_some_and(|by_turns| Arc::ptr_eq(&by_turns.turns, &second)), "it has gone, too");
    }
}
