//! The anchors of this host's vaults: where they are, opening them, and checking headers and histories against them
//! (`docs/freshness.md`).
//!
//! | module | what it does |
//! |---|---|
//! | [`disk`] | whether a file can be an anchor: the store's owner must not be able to restore it |
//! | `place` | which file is the anchor of a vault |
//! | `proof` | compares a header and a history with the anchor |
//! | `records` | compares header, history and record of sessions with the anchor, without a key |
//! | `made` | new anchors, removed again if their purpose fails; anchors rebuilt from the store |
//! | `moved` | export, import, moving to another place |
//! | `datasets` | anchors of datasets at servers |
//! | `served` | anchors at a server, with copies on this host |
//! | `reports` | integrity events for the server |
//!
//! A process opens an anchor once: further calls get the same one. A vault whose header says that it is anchored is
//! opened only with its anchor, unless the user chose `none`; then it is read-only.
//!
//! Never: reads a page or a name of the store.

mod datasets;
pub mod disk;
mod made;
mod moved;
mod place;
mod proof;
mod records;
mod reports;
mod served;

pub use datasets::Stayed;
pub use disk::MOUNT_TYPE;
pub use lamassu_vault::anchor::{NewTrees, Rebuilt};
pub use made::Made;
pub use moved::{CopiedDatasets, ImportError, Imported};
pub use place::{Choice, SERVER, refuse_within, server_named, settled};
pub use proof::check;
pub use records::{ComparedRecords, RecordFinding, compare_records};

use crate::{Error, Policy, Result, lock};
use lamassu_anchor::row::Sealed;
use lamassu_anchor::table::{DiskTable, Readers, Table};
use lamassu_anchor::{Anchor, AnchorError, HeaderBasis};
use lamassu_format::header::{VaultHeader, VaultId};
use lamassu_keys::witness::{Basis, Replacement, Replacing, Taken, ToReplace, Witness, WitnessError};
use lamassu_lease::Mode;
use lamassu_rpc::host::{Mirrored, Turns};
use lamassu_vault::VaultError;
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How often to look for an anchor that is being closed.
const CLOSING_POLL: Duration = Duration::from_millis(1);
/// How long it may take. After that, opening it fails since its file is locked.
const CLOSING_MAX: Duration = Duration::from_secs(20);

/// The purpose of opening an anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// For reading; no other process writes meanwhile.
    Read,
    /// For writing; no other process uses it.
    Write,
}

impl Access {
    /// The access that opening a vault needs.
    pub fn of(read_only: bool) -> Access {
        if read_only { Access::Read } else { Access::Write }
    }

    /// The mode of the lease that it needs.
    fn mode(self) -> Mode {
        match self {
            Access::Read => Mode::Shared,
            Access::Write => Mode::Exclusive,
        }
    }
}

/// The anchors of this host. Cheap to clone; clones share the open anchors.
#[derive(Clone, Debug, Default)]
pub struct Anchors {
    dir: Option<PathBuf>,
    choice: Choice,
    /// The vault is opened by turns.
    by_turns: bool,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// The vault of the chosen file: the first one that is asked for, which is what the command is about.
    chosen_for: OnceLock<VaultId>,
    /// The open tables at servers.
    sessions: Mutex<Vec<(VaultId, Weak<Mirrored>)>>,
    /// The sessions by turns.
    turns: Mutex<HashMap<VaultId, served::ByTurns>>,
    /// Those that are ending. Locked after `turns`.
    ending: Mutex<Vec<(VaultId, Weak<Turns>)>>,
    open: Mutex<HashMap<VaultId, Open>>,
    reporting: Mutex<Vec<reports::Reporting>>,
    connections: Mutex<HashMap<String, served::Connections>>,
    /// By dataset, the vault that it lies in.
    around: Mutex<HashMap<VaultId, VaultId>>,
}

struct Open {
    anchor: Weak<Anchor>,
    /// Alive until the anchor is closed.
    while_open: Weak<()>,
    access: Access,
    /// Its session was ended: it is no longer of use, and is being closed.
    has_left: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("chosen_for", &self.chosen_for).finish_non_exhaustive()
    }
}

impl Open {
    fn of(anchor: &Arc<Anchor>, access: Access) -> Open {
        Open { anchor: Arc::downgrade(anchor), while_open: anchor.while_open(), access, has_left: false }
    }

    /// The anchor, if it is open.
    fn get(&self) -> Option<Arc<Anchor>> {
        self.anchor.upgrade().filter(|_| !self.has_left)
    }

    /// Whether a thread is closing it: its file is locked until then.
    fn is_closing(&self) -> bool {
        (self.has_left || self.anchor.strong_count() == 0) && self.while_open.strong_count() > 0
    }
}

impl std::fmt::Debug for Open {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Open").field("access", &self.access).finish_non_exhaustive()
    }
}

impl From<AnchorError> for Error {
    fn from(error: AnchorError) -> Self {
        Error::Vault(VaultError::Anchor(error))
    }
}

impl Anchors {
    /// Anchors in a directory, which is created when needed.
    pub fn within(dir: Option<PathBuf>) -> Anchors {
        Anchors { dir, ..Anchors::default() }
    }

    /// The same, with the user's choice for the vault that a command is about.
    #[must_use]
    pub fn chosen(self, choice: Choice) -> Anchors {
        Anchors { choice, ..self }
    }

    /// The same, for a vault by turns.
    #[must_use]
    pub fn by_turns(self) -> Anchors {
        Anchors { by_turns: true, ..self }
    }

    /// The user's choice.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    fn opened(&self) -> MutexGuard<'_, HashMap<VaultId, Open>> {
        self.shared.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, as soon as no thread is closing the anchor of this vault. Others use the map meanwhile.
    fn opened_unless_closing(&self, vault: &VaultId) -> MutexGuard<'_, HashMap<VaultId, Open>> {
        let until = Instant::now() + CLOSING_MAX;
        loop {
            let opened = self.opened();
            if !opened.get(vault).is_some_and(Open::is_closing) || Instant::now() >= until {
                return opened;
            }
            drop(opened);
            std::thread::sleep(CLOSING_POLL);
        }
    }

    /// Opens the anchor of a vault, or returns the open one.
    ///
    /// # Errors
    /// [`AnchorError`]; [`Error::NoAnchorPlace`], [`Error::Local`]; [`Error::NoTurn`] between turns, or in one for
    /// reading.
    pub fn open(&self, vault: &VaultId, access: Access) -> Result<Arc<Anchor>> {
        let mut opened = self.opened_unless_closing(vault);
        let there = opened.get(vault).and_then(|open| Some((open.get()?, open.access)));
        if let Some((anchor, _)) = there.filter(|(_, has)| access == Access::Read || *has == Access::Write) {
            return Ok(anchor);
        }
        // A command opens one vault by turns itself; datasets in it follow by `Anchors::begin_turns`.
        if self.has_sessions_by_turns() {
            return Err(Error::NoTurn);
        }
        let path = self.file_of(vault)?.ok_or(Error::NoAnchorPlace)?;
        if let Some(server) = self.server_of(vault)? {
            let table = match self.by_turns {
                true => self.in_turn(&server, vault, access, &path)?,
                false => self.at_server(&server, vault, access, &path)?,
            };
            let anchor = Arc::new(Anchor::open(table, vault)?);
            opened.insert(*vault, Open::of(&anchor, access));
            return Ok(anchor);
        }
        if self.by_turns {
            // Another host may have moved it to a server, of which this one does not know.
            let is_here = path.try_exists().unwrap_or(true);
            return Err(if is_here { Error::NotAtServer } else { AnchorError::Missing { path }.into() });
        }
        let table = match access {
            Access::Read => DiskTable::open_read_only(&path, Readers::InsteadOfWriter)?,
            Access::Write => DiskTable::open(&path)?,
        };
        // Verified now: damage by its disk would later look like damage in the store, or not be noticed.
        if table.is_small() {
            table.verify()?;
        }
        let anchor = Arc::new(Anchor::open(Arc::new(table), vault)?);
        opened.insert(*vault, Open::of(&anchor, access));
        Ok(anchor)
    }

    /// The anchor of a vault in a turn of this host. It is the open one until the turn ends.
    pub(crate) fn opened_in_turn(&self, vault: &VaultId, anchor: &Arc<Anchor>, access: Access) {
        self.opened().insert(*vault, Open::of(anchor, access));
    }

    /// Opens the tables of a vault's anchor for reading, also while another process has it open.
    ///
    /// # Errors
    /// As [`Anchors::open`].
    pub fn look(&self, vault: &VaultId) -> Result<(PathBuf, DiskTable)> {
        let path = self.file_of(vault)?.ok_or(Error::NoAnchorPlace)?;
        self.bring_copy_up_to_date(vault, &path)?;
        self.look_as_it_is(vault)
    }

    /// The same without asking its server, if it is at one: a process of this host keeps others from changing it.
    ///
    /// # Errors
    /// As [`Anchors::look`].
    pub(crate) fn look_as_it_is(&self, vault: &VaultId) -> Result<(PathBuf, DiskTable)> {
        let path = self.file_of(vault)?.ok_or(Error::NoAnchorPlace)?;
        let beside = DiskTable::open_read_only(&path, Readers::BesideWriter);
        let table = match beside {
            // Another reader keeps writers out, but reading beside it is possible.
            Err(AnchorError::Locked { .. }) => DiskTable::open_read_only(&path, Readers::InsteadOfWriter),
            opened => opened,
        }?;
        Ok((path, table))
    }

    /// The same, with all checksums verified. False: they were not, because a writer has it open.
    ///
    /// # Errors
    /// As [`Anchors::open`].
    pub fn look_closely(&self, vault: &VaultId) -> Result<(PathBuf, DiskTable, bool)> {
        let path = self.file_of(vault)?.ok_or(Error::NoAnchorPlace)?;
        self.bring_copy_up_to_date(vault, &path)?;
        match DiskTable::open_read_only(&path, Readers::InsteadOfWriter) {
            Err(AnchorError::Locked { .. }) => self.look(vault).map(|(path, table)| (path, table, false)),
            table => {
                let table = table?;
                table.verify()?;
                Ok((path, table, true))
            }
        }
    }

    /// The anchor for opening a vault with this header; `None`: it has none, or the user chose to read without it.
    ///
    /// # Errors
    /// As [`Anchors::open`]; [`Error::UnverifiedWrite`], [`Error::NotAnchored`]; [`VaultError::Outdated`] if the vault
    /// was anchored before.
    pub fn of_header(&self, header: &VaultHeader, access: Access) -> Result<Option<Arc<Anchor>>> {
        let id = header.id();
        match (&self.choice, header.is_anchored()) {
            (Choice::Unverified, true) if access == Access::Write => Err(Error::UnverifiedWrite),
            (Choice::Unverified, _) => Ok(None),
            (_, true) => self.open(&id, access).map(Some),
            (Choice::File(_) | Choice::Server(_), false) if self.is_chosen_for(&id) => Err(Error::NotAnchored),
            (Choice::File(_) | Choice::Server(_) | Choice::Remembered, false) => match self.is_anywhere(&id)? {
                true => Err(proof::outdated(proof::HEADER)),
                false => Ok(None),
            },
        }
    }

    /// Refuses work on the anchor if the user chose to work without it.
    ///
    /// # Errors
    /// [`Error::WithoutAnchor`].
    pub fn are_used(&self) -> Result<()> {
        if matches!(self.choice, Choice::Unverified) { Err(Error::WithoutAnchor) } else { Ok(()) }
    }

    /// Checks that a vault with this header is anchored, for work on its anchor.
    ///
    /// # Errors
    /// [`Error::WithoutAnchor`], [`Error::Unanchored`]; [`VaultError::Outdated`] if it was anchored before: the header
    /// is older than that, or was edited.
    pub fn require(&self, header: &VaultHeader) -> Result<()> {
        self.are_used()?;
        match header.is_anchored() {
            true => Ok(()),
            false if self.is_anywhere(&header.id())? => Err(proof::outdated(proof::HEADER)),
            false => Err(Error::Unanchored),
        }
    }

    /// The anchor that has to know of a new header; `None`: there is none.
    fn to_replace_header(&self, vault: &VaultId, is_anchored: bool) -> Result<Option<Arc<Anchor>>> {
        match (&self.choice, is_anchored) {
            (Choice::Unverified, true) => Err(Error::UnverifiedWrite),
            (Choice::Unverified, false) => Ok(None),
            (_, true) => self.open(vault, Access::Write).map(Some),
            // It was anchored before: the user restores an older header.
            (_, false) if self.is_there(vault)? => self.open(vault, Access::Write).map(Some),
            (_, false) => Ok(None),
        }
    }

    /// Whether there is an anchor of this vault here, or at the server that keeps it or that of the vault around it.
    fn is_anywhere(&self, vault: &VaultId) -> Result<bool> {
        Ok(self.is_there(vault)? || self.is_at_server(vault)?)
    }

    /// Whether there is an anchor of this vault on this host. One that is remembered elsewhere than in the usual place
    /// counts, although its file is not there: its disk may not be mounted yet.
    fn is_there(&self, vault: &VaultId) -> Result<bool> {
        let Some(path) = self.file_of(vault)? else { return Ok(false) };
        match path.symlink_metadata() {
            Ok(_) => Ok(true),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                self.is_noted_in(vault, &path)
            }
            Err(source) => Err(Error::Local { op: "look at", path, source }),
        }
    }
}

/// Headers are replaced under this witness: see [`Witness`].
impl Witness for Anchors {
    fn take(&self, header: &ToReplace) -> Result<Box<dyn Taken>, WitnessError> {
        let anchor = self.to_replace_header(&header.id, header.is_anchored)?;
        if let Some(anchor) = &anchor {
            anchor.wait_until_good().map_err(Error::from)?;
            match header.basis {
                Basis::Read(read) if !anchor.vault().header.is_current(lamassu_anchor::Digest(read)) => {
                    return Err(proof::outdated(proof::HEADER).into());
                }
                Basis::Read(_) | Basis::Decided(_) => {}
            }
        }
        Ok(Box::new(Held { anchor }))
    }

    fn replacing(&self, replacement: &Replacement<'_>) -> Result<Box<dyn Replacing>, WitnessError> {
        let Replacement { dir, id, is_anchored, basis, new, history, begins_history } = replacement;
        let Some(anchor) = self.to_replace_header(id, *is_anchored)? else {
            return Ok(Box::new(Noted { anchor: None, new: *new }));
        };
        if matches!(anchor.vault().header, Sealed::Becomes { .. }) {
            proof::sync(dir)?;
        }
        let basis = match basis {
            Basis::Decided(in_place) => HeaderBasis::Decided(in_place.map(lamassu_anchor::Digest)),
            Basis::Read(read) => HeaderBasis::Read(lamassu_anchor::Digest(*read)),
        };
        let history = history.map(|mark| (mark.count, lamassu_anchor::Digest(mark.head.0)));
        let new_header = lamassu_anchor::Digest(*new);
        let noted = match history {
            Some(history) if *begins_history => anchor.replacing_header_and_history(basis, new_header, history),
            Some(_) | None => anchor.replacing_header(basis, new_header, history),
        };
        match noted.map_err(Error::from)? {
            true => Ok(Box::new(Noted { anchor: Some(anchor), new: *new })),
            false => Err(proof::outdated(proof::HEADER).into()),
        }
    }
}

/// The anchor of a vault whose header is going to be replaced, if there is one: no other process opens it meanwhile.
struct Held {
    anchor: Option<Arc<Anchor>>,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("is_anchored", &self.anchor.is_some()).finish()
    }
}

impl Taken for Held {}

/// A header whose replacement was announced to an anchor, if there is one.
struct Noted {
    anchor: Option<Arc<Anchor>>,
    new: [u8; 32],
}

impl std::fmt::Debug for Noted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Noted").field("is_anchored", &self.anchor.is_some()).finish_non_exhaustive()
    }
}

impl Replacing for Noted {
    fn may_go_on(&self) -> Result<(), WitnessError> {
        match self.anchor.as_ref().map(|anchor| anchor.wait_until_good()) {
            None | Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(Error::from(error).into()),
        }
    }

    fn replaced(self: Box<Self>) -> Result<(), WitnessError> {
        let Some(anchor) = &self.anchor else { return Ok(()) };
        match anchor.header_is(lamassu_anchor::Digest(self.new)).map_err(Error::from)? {
            true => Ok(()),
            false => Err(proof::outdated(proof::HEADER).into()),
        }
    }
}

impl Policy {
    /// The witness that remembers the newest headers of vaults on this host.
    pub fn witness(&self) -> Arc<dyn Witness> {
        Arc::new(self.anchors.clone())
    }

    /// Opens the anchor of the vault in `dir`. If another process has it open, the writer's lock tells more about that
    /// process than the anchor.
    pub(crate) fn anchor_of(&self, header: &VaultHeader, access: Access, dir: &Path) -> Result<Option<Arc<Anchor>>> {
        if let Choice::File(file) = self.anchors.choice()
            && self.anchors.is_chosen_for(&header.id())
        {
            refuse_within(file, dir)?;
        }
        match self.anchors.of_header(header, access) {
            Err(error) if is_locked(&error) => match lock::lock_out_writers(self, dir) {
                Err(locked @ Error::Locked { .. }) if access == Access::Write => Err(locked),
                Ok(_) | Err(_) => Err(error),
            },
            done => done,
        }
    }
}

/// Whether the header or the history of a vault is outdated: `anchor accept` without a path accepts those.
pub(crate) fn is_of_vault(error: &VaultError) -> bool {
    matches!(error, VaultError::Outdated { what: proof::HEADER | proof::HISTORY, .. })
}

/// Whether a header is outdated.
pub(crate) fn is_older_header(error: &Error) -> bool {
    matches!(error.innermost(), Error::Vault(VaultError::Outdated { what: proof::HEADER, .. }))
}

/// Whether another process has the anchor open.
pub(crate) fn is_locked(error: &Error) -> bool {
    matches!(error.innermost(), Error::Vault(VaultError::Anchor(AnchorError::Locked { .. })))
}

#[cfg(test)]
mod tests;
