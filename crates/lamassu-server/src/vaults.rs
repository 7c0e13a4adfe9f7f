//! The vaults whose anchors are kept here: for each the table of its rows and its leases.
//!
//! Locks: a slot of [`Vaults`], then the inside of its vault, then those of the state.

use crate::audit::Event;
use crate::guard::Caller;
use crate::policy::{self, At, Subject};
use crate::state::State;
use crate::vault::{Common, Inner, Vault};
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{Change, DiskTable, Table};
use lamassu_anchor::{Anchor, AnchorError, Revision};
use lamassu_lease::{SessionId, Terms};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The directory of tables in the server's directory.
pub const DIR: &str = "anchors";
/// How a file ends that is being put.
const NEW: &str = "new";
/// What stays free on the server's disk for the state, in bytes: a commit is refused before.
const RESERVE: u64 = 64 << 20;
/// Between two lines of the log that say so.
const SAID_EVERY: Duration = Duration::from_secs(60);
/// How an anchor's file ends that was put away.
const AWAY: &str = "given-up";

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
    /// The vault was put back from a backup, and hosts may know more of it.
    Restored {
        /// which
        waits_for: Vec<String>,
    },
    /// The session has ended, or has no lease for this.
    Ended,
    /// The changes go on from another head.
    OtherHead,
    /// The vault is known already.
    Known,
    /// The rows are no anchor of this vault.
    NoAnchor,
    /// The call makes no sense.
    Nonsense,
    /// A rule of the policy forbids it.
    Policy {
        /// its name
        rule: String,
        /// what it forbids
        what: String,
    },
    /// This host may not use the vault.
    NotGranted,
    /// Too much at once.
    TooMuch(&'static str),
    /// The vault is being opened again, or put.
    NotNow,
    /// The server's disk.
    Failed(ServerError),
    /// See there.
    Lost(Lost),
}

/// What could not be made durable may be in memory: the server ends.
#[derive(Debug)]
pub struct Lost(pub ServerError);

impl From<Lost> for Refused {
    fn from(lost: Lost) -> Refused {
        Refused::Lost(lost)
    }
}

impl From<ServerError> for Refused {
    fn from(error: ServerError) -> Refused {
        Refused::Failed(error)
    }
}

impl From<AnchorError> for Refused {
    fn from(error: AnchorError) -> Refused {
        Refused::Failed(error.into())
    }
}

/// With a [`Refused`].
pub type Answer<T> = std::result::Result<T, Refused>;

/// All of them.
pub struct Vaults {
    dir: PathBuf,
    terms: Terms,
    common: Common,
    slots: Mutex<HashMap<[u8; 16], Arc<Mutex<Slot>>>>,
    /// When the log was told that the disk is nearly full.
    said: Mutex<Option<Instant>>,
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

impl Vaults {
    /// Those in a server's directory. What was being put when a server ended is removed.
    ///
    /// # Errors
    /// [`ServerError::File`].
    pub fn new(dir: &Path, terms: Terms, common: Common) -> Result<Vaults> {
        let dir = dir.join(DIR);
        fs::create_dir_all(&dir).map_err(ServerError::file("make", &dir))?;
        for entry in fs::read_dir(&dir).map_err(ServerError::file("list", &dir))? {
            let path = entry.map_err(ServerError::file("list", &dir))?.path();
            if path.extension().is_some_and(|end| end == NEW) {
                fs::remove_file(&path).map_err(ServerError::file("remove", &path))?;
            }
        }
        Ok(Vaults { dir, terms, common, slots: Mutex::default(), said: Mutex::default() })
    }

    fn state(&self) -> &State {
        &self.common.state
    }

    /// How long leases last.
    pub fn terms(&self) -> Terms {
        self.terms
    }

    fn file(&self, id: &[u8; 16]) -> PathBuf {
        file_of(&self.dir, id)
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
        let mut opened = 0;
        for id in missing(&self.dir, self.state())? {
            tracing::error!(file = %file_of(&self.dir, &id).display(), "this anchor was kept here, and is gone");
        }
        for id in all_in(&self.dir)? {
            match self.vault(&id) {
                Ok(_) => opened += 1,
                Err(Refused::Lost(Lost(error))) => return Err(error),
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
        self.vault_in(id, &mut slot.lock())
    }

    /// The same, in its slot.
    fn vault_in(&self, id: &[u8; 16], slot: &mut Slot) -> Answer<Arc<Vault>> {
        match slot {
            Slot::Open(vault) if !vault.is_in_doubt() => return Ok(vault.clone()),
            // What uses its table yet keeps it open for a moment.
            Slot::Open(_) | Slot::Closed => *slot = Slot::Closed,
            Slot::BeingPut => return Err(Refused::Unknown),
        }
        let table = match DiskTable::open(&self.file(id)) {
            Err(AnchorError::Missing { .. }) => return Err(Refused::Unknown),
            Err(AnchorError::Locked { .. }) => return Err(Refused::NotNow),
            table => Arc::new(table?),
        };
        let vault = Arc::new(Vault::open(*id, table, self.terms, self.common.clone())?);
        *slot = Slot::Open(vault.clone());
        Ok(vault)
    }

    /// The same for a host, which is told of no vault that it may not use.
    ///
    /// # Errors
    /// As [`Vaults::vault`].
    pub fn vault_for(&self, caller: &Caller, id: &[u8; 16]) -> Answer<Arc<Vault>> {
        match self.state().may_use(&caller.key, id) {
            true => self.vault(id),
            false => Err(Refused::Unknown),
        }
    }

    /// Whether a host is to send the rows that it has of a vault that was put back from a backup: it knows more than
    /// the server. One that does not has told what it knows.
    ///
    /// # Errors
    /// [`Refused::Unknown`], [`Refused::NotNow`], [`Refused::Failed`], [`Refused::Lost`].
    pub fn wants_rows(&self, caller: &Caller, id: &[u8; 16], revision: Revision, head: Option<Head>) -> Answer<bool> {
        let vault = self.vault_for(caller, id)?;
        if !self.waits_for(caller, id) {
            return Ok(false);
        }
        let ours = Anchor::open(vault.table_to_look_at(), id)?.vault().revision;
        if revision > ours || (revision == ours && head != Some(vault.head())) {
            return Ok(true);
        }
        self.state().reconciled(id, &caller.name, false).map_err(Lost)?;
        Ok(false)
    }

    fn waits_for(&self, caller: &Caller, id: &[u8; 16]) -> bool {
        self.state().waits_for(id).is_some_and(|hosts| hosts.contains(&*caller.name))
    }

    /// Begins to take the anchor of a vault: one that is not kept here, or of one that was put back from a backup
    /// what a host has; `known`: the head of that.
    ///
    /// # Errors
    /// [`Refused::NotGranted`], [`Refused::NotNow`], [`Refused::TooMuch`], [`Refused::Failed`].
    pub fn begin_put(self: &Arc<Vaults>, caller: &Caller, id: &[u8; 16], known: Option<Head>) -> Answer<Put> {
        if !self.state().may_use(&caller.key, id) {
            return Err(Refused::NotGranted);
        }
        self.check_room()?;
        let has_slot = {
            let slot = self.slot(id);
            let slot = &mut *slot.lock();
            match slot {
                // One that is there may be the same: what comes is compared at its end.
                Slot::Closed | Slot::Open(_) if self.file(id).symlink_metadata().is_ok() => false,
                Slot::Closed => {
                    *slot = Slot::BeingPut;
                    true
                }
                Slot::BeingPut | Slot::Open(_) => return Err(Refused::NotNow),
            }
        };
        static PUTS: AtomicU64 = AtomicU64::new(0);
        let number = PUTS.fetch_add(1, Ordering::Relaxed);
        let new = self.dir.join(format!("{}-{number}.{NEW}", HEXLOWER.encode(id)));
        // From here on it is taken back when it is dropped.
        let mut put = Put { vaults: self.clone(), id: *id, has_slot, new, table: None, head: Head([0; 32]), known };
        put.table = Some(Arc::new(DiskTable::create(&put.new)?));
        Ok(put)
    }

    /// Refuses what takes room that the state may need.
    ///
    /// # Errors
    /// [`Refused::TooMuch`].
    pub fn check_room(&self) -> Answer<()> {
        let free = rustix::fs::statvfs(&self.dir).map_or(u64::MAX, |st| st.f_bavail.saturating_mul(st.f_frsize));
        if free >= RESERVE {
            return Ok(());
        }
        let mut said = self.said.lock();
        if said.is_none_or(|said| said.elapsed() >= SAID_EVERY) {
            *said = Some(Instant::now());
            tracing::error!(dir = %self.dir.display(), free, "the disk is nearly full: no commit is made, and no report taken, before there is room");
        }
        Err(Refused::TooMuch("the server's disk is nearly full"))
    }

    /// Makes changes durable, as [`Vault::commit`] does.
    ///
    /// # Errors
    /// Those, and [`Refused::TooMuch`].
    pub fn commit(&self, id: &[u8; 16], of: (&Caller, SessionId), base: Head, changes: &[Change]) -> Answer<Head> {
        let vault = self.vault_for(of.0, id)?;
        self.check_room()?;
        vault.commit(&of.0.name, of.1, base, changes)
    }

    /// Time has passed, for all that are open.
    ///
    /// # Errors
    /// [`Lost`].
    pub fn tick(&self) -> std::result::Result<(), Lost> {
        // One that is being opened is not waited for: its time comes with the next tick.
        for vault in Vaults::opened(&self.slots(), Mutex::try_lock) {
            vault.tick()?;
        }
        Ok(())
    }

    /// A host may do nothing any more, or nothing in one vault: its sessions end.
    ///
    /// # Errors
    /// [`Lost`].
    pub fn end_sessions_of(&self, host: &str, of: Option<&[u8; 16]>) -> std::result::Result<(), Lost> {
        let opened = Vaults::opened(&self.slots(), |slot| Some(slot.lock()));
        for vault in opened.into_iter().filter(|vault| of.is_none_or(|id| *id == vault.id())) {
            vault.end_sessions_of(host)?;
        }
        Ok(())
    }

    /// The vaults whose anchors are kept here, and the hosts that have sessions of them.
    pub fn in_use(&self) -> Vec<([u8; 16], Vec<String>)> {
        let opened = Vaults::opened(&self.slots(), |slot| Some(slot.lock()));
        opened.iter().map(|vault| (vault.id(), vault.hosts())).collect()
    }

    /// An administrator has the anchor of a vault put away that nobody uses: it is kept under another name.
    ///
    /// # Errors
    /// [`Refused::Unknown`], [`Refused::InUse`], [`Refused::Failed`].
    pub fn forget(&self, id: &[u8; 16]) -> Answer<()> {
        let slot = self.slot(id);
        let slot = &mut *slot.lock();
        let event = Event::AnchorForgotten { vault: HEXLOWER.encode(id) };
        let Slot::Open(vault) = &*slot else { return self.put_away(id, slot, event) };
        vault.clone().give_up(|inner| inner.nobody_has_it(None), || self.put_away(id, slot, event))
    }

    /// Renames the file of a vault.
    fn put_away(&self, id: &[u8; 16], slot: &mut Slot, event: Event) -> Answer<()> {
        let (file, away) = (self.file(id), self.file(id).with_extension(AWAY));
        match fs::rename(&file, &away) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(Refused::Unknown),
            done => done.map_err(ServerError::file("rename", &file))?,
        }
        *slot = Slot::Closed;
        self.sync_dir()?;
        Ok(self.state().note_not_kept(id, event).map_err(Lost)?)
    }

    fn sync_dir(&self) -> Answer<()> {
        let synced = fs::File::open(&self.dir).and_then(|dir| dir.sync_all());
        Ok(synced.map_err(ServerError::file("sync", &self.dir))?)
    }

    /// Gives up the anchor of a vault that a session has alone: it is kept under another name.
    ///
    /// # Errors
    /// [`Refused::Ended`], [`Refused::InUse`], [`Refused::Failed`].
    pub fn give_up(&self, id: &[u8; 16], session: SessionId, caller: &Caller) -> Answer<()> {
        let (vault, host) = (self.vault_for(caller, id)?, &*caller.name);
        let slot = self.slot(id);
        let slot = &mut *slot.lock();
        let event = Event::AnchorTaken { host: host.into(), vault: HEXLOWER.encode(id) };
        // Others that have it by turns would go on with what is nobody's.
        let may_be = |inner: &Inner| inner.may_change(session, host).and_then(|()| inner.nobody_has_it(Some(session)));
        vault.give_up(may_be, || self.put_away(id, slot, event))
    }
}

/// The file of a vault's anchor in the directory of anchors.
pub fn file_of(dir: &Path, id: &[u8; 16]) -> PathBuf {
    dir.join(format!("{}.anchor", HEXLOWER.encode(id)))
}

/// The vaults whose anchors are in the directory of anchors.
///
/// # Errors
/// [`ServerError::File`].
pub fn all_in(dir: &Path) -> Result<Vec<[u8; 16]>> {
    let mut all = Vec::new();
    let entries = match fs::read_dir(dir) {
        // Of a server that has never run. What should be there is known from the state (`missing`).
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(all),
        entries => entries.map_err(ServerError::file("list", dir))?,
    };
    for entry in entries {
        let name = entry.map_err(ServerError::file("list", dir))?.file_name();
        let id = name.to_str().and_then(|name| name.strip_suffix(".anchor"));
        all.extend(id.and_then(|id| HEXLOWER.decode(id.as_bytes()).ok()).and_then(|id| <[u8; 16]>::try_from(id).ok()));
    }
    Ok(all)
}

/// The vaults whose anchors should be there and are not.
///
/// # Errors
/// Those of the state.
pub fn missing(dir: &Path, state: &State) -> Result<Vec<[u8; 16]>> {
    // One that was put away is none of them, also where the server was stopped before it noted that.
    let is_there = |file: PathBuf| file.symlink_metadata().is_ok();
    let is_gone = |id: &[u8; 16]| !is_there(file_of(dir, id)) && !is_there(file_of(dir, id).with_extension(AWAY));
    Ok(state.kept()?.into_iter().filter(is_gone).collect())
}

/// An anchor on its way here. Dropped before its end, it is taken back.
pub struct Put {
    vaults: Arc<Vaults>,
    id: [u8; 16],
    /// [`Slot::BeingPut`] is its own.
    has_slot: bool,
    new: PathBuf,
    table: Option<Arc<DiskTable>>,
    head: Head,
    /// Of a host's copy of what a server had that is lost.
    known: Option<Head>,
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
    /// [`Refused::Known`], [`Refused::NoAnchor`], [`Refused::NotGranted`], [`Refused::Policy`], [`Refused::Failed`].
    pub fn finish(mut self, caller: &Caller) -> Answer<Head> {
        let Some(table) = self.table.take() else { return Err(Refused::NotNow) };
        let anchor = Anchor::open(table.clone(), &self.id).map_err(|_| Refused::NoAnchor)?;
        let row = anchor.vault();
        let revision = row.revision;
        drop(anchor);
        let is_waited_for = self.vaults.waits_for(caller, &self.id);
        if let Some(known) = self.known.filter(|_| is_waited_for) {
            // It is the same state: other hosts that have come as far need nothing.
            self.head = known;
        }
        // What was acknowledged once is taken back whatever the policy says by now.
        let forbidden = if is_waited_for { None } else { self.forbidden(&table, &Subject::of(&caller.name, &row))? };
        table.commit(&[self.head.change()])?;
        // Closed before it is in its place.
        drop(table);
        if !self.vaults.state().may_use(&caller.key, &self.id) {
            return Err(Refused::NotGranted);
        }
        let file = self.vaults.file(&self.id);
        let state = self.vaults.state();
        if is_waited_for {
            return self.reconcile(caller, revision);
        }
        if let Some(refused) = forbidden {
            return Err(refused);
        }
        {
            let slot = self.vaults.slot(&self.id);
            let slot = slot.lock();
            // No other process is in this directory.
            if file.symlink_metadata().is_err() {
                if !self.has_slot && matches!(*slot, Slot::BeingPut) {
                    return Err(Refused::NotNow);
                }
                fs::rename(&self.new, &file).map_err(ServerError::file("put in place", &file))?;
                self.vaults.sync_dir()?;
                state.note_kept(&caller.name, &self.id).map_err(Lost)?;
                return Ok(self.head);
            }
        }
        let there = self.vaults.vault(&self.id)?.head();
        if there == self.head { Ok(there) } else { Err(Refused::Known) }
    }

    /// Why the policy does not let a host put these rows, if it does not.
    fn forbidden(&self, table: &DiskTable, subject: &Subject) -> Answer<Option<Refused>> {
        let policies = &self.vaults.common.policies;
        let (_, policy) = policies.now();
        let mut first = policy.forbids_vault(subject);
        if first.is_none() {
            policy::violations(table, (&policy, subject), |_, _, forbidden| {
                first = Some(forbidden.clone());
                ControlFlow::Break(())
            })
            .map_err(|_| Refused::NoAnchor)?;
        }
        Ok(first.map(|forbidden| policies.refuse(subject, At::Anchor, forbidden)))
    }

    /// These rows take the place of what the backup had of a vault that was put back, unless that is newer by now:
    /// then its head is returned.
    fn reconcile(&self, caller: &Caller, revision: Revision) -> Answer<Head> {
        let vaults = &self.vaults;
        // Held from the look at what is there to the end: of two hosts the one that has seen less comes to nothing.
        let slot = vaults.slot(&self.id);
        let slot = &mut *slot.lock();
        let vault = vaults.vault_in(&self.id, slot)?;
        let ours = Anchor::open(vault.table_to_look_at(), &self.id)?.vault().revision;
        if ours > revision {
            vaults.state().reconciled(&self.id, &caller.name, false).map_err(Lost)?;
            return Ok(vault.head());
        }
        let may_be = |_: &_| if vaults.waits_for(caller, &self.id) { Ok(()) } else { Err(Refused::NotNow) };
        let file = vaults.file(&self.id);
        let replace = || {
            fs::rename(&self.new, &file).map_err(ServerError::file("put in place", &file))?;
            *slot = Slot::Closed;
            vaults.sync_dir()
        };
        vault.give_up(may_be, replace)?;
        vaults.state().reconciled(&self.id, &caller.name, true).map_err(Lost)?;
        Ok(self.head)
    }
}

impl Drop for Put {
    fn drop(&mut self) {
        self.table = None;
        let _ = fs::remove_file(&self.new);
        if self.has_slot {
            *self.vaults.slot(&self.id).lock() = Slot::Closed;
        }
    }
}
