//! The vaults whose anchors are kept here: for each the table of its rows and its leases.
//!
//! Locks: a slot of [`Vaults`], then the inside of its vault, then those of the state.

use crate::anchor_store::{AnchorStore, NewAnchor};
use crate::audit::Event;
use crate::guard::Caller;
use crate::policy::{self, At, Subject};
use crate::state::State;
use crate::vault::{Common, Inner, Vault};
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{Change, Table};
use lamassu_anchor::{Anchor, AnchorError, Revision};
use lamassu_lease::{SessionId, Terms};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What stays free on the server's disk for the state, in bytes: a commit is refused before.
const RESERVE: u64 = 64 << 20;
/// Between two lines of the log that say so.
const SAID_EVERY: Duration = Duration::from_secs(60);

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
    /// The same, and what was asked for may be done all the same.
    InDoubt(ServerError),
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
    anchors: Arc<dyn AnchorStore>,
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
    /// Those whose anchors are there.
    pub fn new(anchors: Arc<dyn AnchorStore>, terms: Terms, common: Common) -> Vaults {
        Vaults { anchors, terms, common, slots: Mutex::default(), said: Mutex::default() }
    }

    /// Where their anchors are.
    pub fn anchors(&self) -> &dyn AnchorStore {
        &*self.anchors
    }

    fn state(&self) -> &State {
        &self.common.state
    }

    /// How long leases last.
    pub fn terms(&self) -> Terms {
        self.terms
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
    /// Those of where the anchors are, and of the state.
    pub fn open_all(&self) -> Result<usize> {
        let mut opened = 0;
        for id in missing(self.anchors(), self.state())? {
            tracing::error!(anchor = %self.anchors.name(&id), "this anchor was kept here, and is gone");
        }
        for id in self.anchors.all()? {
            match self.vault(&id) {
                Ok(_) => opened += 1,
                Err(Refused::Lost(Lost(error))) => return Err(error),
                Err(Refused::Failed(error)) => {
                    tracing::error!(anchor = %self.anchors.name(&id), %error, "this anchor cannot be used; the others are served");
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
        let table = match self.anchors.open(id) {
            Err(AnchorError::Missing { .. }) => return Err(Refused::Unknown),
            Err(AnchorError::Locked { .. }) => return Err(Refused::NotNow),
            table => table?,
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
                Slot::Closed | Slot::Open(_) if self.anchors.has(id)? => false,
                Slot::Closed => {
                    *slot = Slot::BeingPut;
                    true
                }
                Slot::BeingPut | Slot::Open(_) => return Err(Refused::NotNow),
            }
        };
        // From here on it is taken back when it is dropped.
        let mut put = Put { vaults: self.clone(), id: *id, has_slot, new: None, head: Head([0; 32]), known };
        put.new = Some(self.anchors.begin(id)?);
        Ok(put)
    }

    /// Refuses what takes room that the state may need.
    ///
    /// # Errors
    /// [`Refused::TooMuch`].
    pub fn check_room(&self) -> Answer<()> {
        let free = self.anchors.free();
        if free >= RESERVE {
            return Ok(());
        }
        let mut said = self.said.lock();
        if said.is_none_or(|said| said.elapsed() >= SAID_EVERY) {
            *said = Some(Instant::now());
            tracing::error!(
                free,
                "the disk is nearly full: no commit is made, and no report taken, before there is room"
            );
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

    /// Puts the anchor of a vault away.
    fn put_away(&self, id: &[u8; 16], slot: &mut Slot, event: Event) -> Answer<()> {
        if !self.anchors.put_away(id)? {
            return Err(Refused::Unknown);
        }
        *slot = Slot::Closed;
        Ok(self.state().note_not_kept(id, event).map_err(Lost)?)
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

/// The vaults whose anchors should be there and are not.
///
/// # Errors
/// Those of both.
pub fn missing(anchors: &dyn AnchorStore, state: &State) -> Result<Vec<[u8; 16]>> {
    let mut missing = Vec::new();
    for id in state.kept()? {
        // One that was put away is none of them, also where the server was stopped before it noted that.
        if !anchors.has(&id)? && !anchors.has_away(&id)? {
            missing.push(id);
        }
    }
    Ok(missing)
}

/// An anchor on its way here. Dropped before its end, it is taken back.
pub struct Put {
    vaults: Arc<Vaults>,
    id: [u8; 16],
    /// [`Slot::BeingPut`] is its own.
    has_slot: bool,
    /// `None`: it is not begun, or finished.
    new: Option<Box<dyn NewAnchor>>,
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
        if let Some(new) = &self.new {
            new.table().commit(rows)?;
        }
        self.head = self.head.after(rows);
        Ok(())
    }

    /// All rows have come. The same rows once more are here already: an answer that was lost is told again.
    ///
    /// # Errors
    /// [`Refused::Known`], [`Refused::NoAnchor`], [`Refused::NotGranted`], [`Refused::Policy`], [`Refused::Failed`].
    pub fn finish(mut self, caller: &Caller) -> Answer<Head> {
        let Some(new) = self.new.take() else { return Err(Refused::NotNow) };
        let table = new.table();
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
        let forbidden = if is_waited_for { None } else { self.forbidden(&*table, &Subject::of(&caller.name, &row))? };
        table.commit(&[self.head.change()])?;
        drop(table);
        if !self.vaults.state().may_use(&caller.key, &self.id) {
            return Err(Refused::NotGranted);
        }
        let state = self.vaults.state();
        if is_waited_for {
            return self.reconcile(caller, new, revision);
        }
        if let Some(refused) = forbidden {
            return Err(refused);
        }
        {
            let slot = self.vaults.slot(&self.id);
            let slot = slot.lock();
            // No other process has them.
            if !self.vaults.anchors.has(&self.id)? {
                if !self.has_slot && matches!(*slot, Slot::BeingPut) {
                    return Err(Refused::NotNow);
                }
                new.install()?;
                state.note_kept(&caller.name, &self.id).map_err(Lost)?;
                return Ok(self.head);
            }
        }
        let there = self.vaults.vault(&self.id)?.head();
        if there == self.head { Ok(there) } else { Err(Refused::Known) }
    }

    /// Why the policy does not let a host put these rows, if it does not.
    fn forbidden(&self, table: &dyn Table, subject: &Subject) -> Answer<Option<Refused>> {
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
    fn reconcile(&self, caller: &Caller, new: Box<dyn NewAnchor>, revision: Revision) -> Answer<Head> {
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
        let replace = || {
            new.install()?;
            *slot = Slot::Closed;
            Ok(())
        };
        vault.give_up(may_be, replace)?;
        vaults.state().reconciled(&self.id, &caller.name, true).map_err(Lost)?;
        Ok(self.head)
    }
}

impl Drop for Put {
    fn drop(&mut self) {
        self.new = None;
        if self.has_slot {
            *self.vaults.slot(&self.id).lock() = Slot::Closed;
        }
    }
}
