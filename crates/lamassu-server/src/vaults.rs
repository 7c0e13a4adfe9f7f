//! The vaults whose anchors are kept here, each with its table and its leases.
//!
//! Locks: a slot of [`Vaults`], then the inside of its vault, then those of the state.

mod opening;

use self::opening::{Room, Slot, UNUSED};
use crate::Result;
use crate::anchor_store::{AnchorStore, NewAnchor, RESERVE};
use crate::arrivals::Arrivals;
use crate::audit::Event;
use crate::caller::Caller;
use crate::pauses::Pauses;
use crate::policy::{self, Subject};
use crate::refused::{Answer, At, Lost, Refused};
use crate::state::leases::Use;
use crate::state::{Misplaced, State};
use crate::vault::{Begun, Common, Inner, Standing, Told, Vault};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{Change, Table};
use lamassu_anchor::{Anchor, Revision, VaultRow, export};
use lamassu_format::header::VaultId;
use lamassu_lease::{GrantNo, SessionId, Terms};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Sender;

/// Minimum time between two log lines about this.
const SAID_EVERY: Duration = Duration::from_secs(60);
/// Vaults that a server which starts opens at once.
const OPENED_AT_ONCE: usize = 16;

/// All vaults of a server.
pub struct Vaults {
    anchors: Arc<dyn AnchorStore>,
    terms: Terms,
    common: Common,
    slots: Mutex<HashMap<VaultId, Slot>>,
    /// Held while a vault gets its place. Taken after its slot.
    placing: Mutex<()>,
    /// When the log was last told that the disk is nearly full.
    said: Mutex<Option<Instant>>,
    /// For the vaults that are open.
    room: Room,
    /// That of [`UNUSED`].
    unused: u64,
}

/// The state of a vault here.
#[derive(Default)]
enum VaultSlot {
    /// Not open; there may be an anchor.
    #[default]
    Closed,
    /// Its file is being closed.
    Closing,
    /// Its rows are being received.
    BeingPut,
    Open(Arc<Vault>),
}

impl Vaults {
    /// The vaults whose anchors are in a store. `most`: how many may be open.
    pub fn new(anchors: Arc<dyn AnchorStore>, terms: Terms, common: Common, most: usize) -> Vaults {
        let (slots, placing, said) = Default::default();
        Vaults { anchors, terms, common, slots, placing, said, room: Room::of(most), unused: UNUSED }
    }

    /// The store of anchors.
    pub fn anchors(&self) -> &dyn AnchorStore {
        &*self.anchors
    }

    fn state(&self) -> &State {
        &self.common.state
    }

    /// The clock of all vaults.
    pub fn pauses(&self) -> &Arc<Pauses> {
        &self.common.pauses
    }

    /// What sessions have sent and waits for a vault.
    pub fn arrivals(&self) -> &Arrivals {
        &self.common.arrivals
    }

    /// How long leases last.
    pub fn terms(&self) -> Terms {
        self.terms
    }

    /// Opens the vaults that have sessions from before a restart, so that their leases are enforced; others are opened
    /// when they are used. One that does not open is logged, and tried again at the next call for it. Returns how many
    /// anchors there are.
    ///
    /// # Errors
    /// Those of the store of anchors, and of the state.
    pub fn open_attended(&self) -> Result<usize> {
        for id in missing(self.anchors(), self.state())? {
            tracing::error!(anchor = %self.anchors.name(&id), "this anchor was kept here, and is gone");
        }
        let all = self.anchors.all()?;
        self.state().note_gone(&all)?;
        for id in &all {
            if !self.state().keeps(id)? {
                self.state().note_found(id)?;
            }
        }
        let attended = self.state().attended()?;
        let those: Vec<_> = all.iter().filter(|id| attended.contains(id)).copied().collect();
        self.open_all(&those).map(|()| all.len())
    }

    /// Opens vaults, several at once: each waits for the disk or for etcd, and all hosts wait for them.
    fn open_all(&self, vaults: &[VaultId]) -> Result<()> {
        let next = AtomicUsize::new(0);
        let open = || {
            while let Some(id) = vaults.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(Refused::Lost(Lost(error))) = self.vault(id) {
                    return Err(error);
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..OPENED_AT_ONCE.min(vaults.len())).map(|_| scope.spawn(open)).collect();
            let done = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            done.collect()
        })
    }

    /// Whether a host is to send its rows of a vault that was restored from a backup, since it knows more than the
    /// server. If it does not, it has reported.
    ///
    /// # Errors
    /// [`Refused::Unknown`], [`Refused::NotNow`], [`Refused::Failed`], [`Refused::Lost`].
    pub fn wants_rows(&self, caller: &Caller, id: &VaultId, revision: Revision, head: Option<Head>) -> Answer<bool> {
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

    fn waits_for(&self, caller: &Caller, id: &VaultId) -> bool {
        self.state().waits_for(id).is_some_and(|hosts| hosts.contains(&*caller.name))
    }

    /// Begins to receive the anchor of a vault: a new one, or a host's copy of one that was restored from a backup.
    /// `known`: the head of such a copy. `around`: the vault that it lies in, if it is a dataset. Who may use that may
    /// put it.
    ///
    /// # Errors
    /// [`Refused::NotGranted`], [`Refused::Gone`], [`Refused::NotNow`], [`Refused::TooMuch`], [`Refused::Failed`].
    pub fn begin_put(
        self: &Arc<Vaults>,
        caller: &Caller,
        id: &VaultId,
        known: Option<Head>,
        around: Option<VaultId>,
    ) -> Answer<Put> {
        self.may_put(caller, id, around)?;
        self.check_room()?;
        // What the host has may be older than what is gone.
        if self.is_missing(id)? {
            return Err(Refused::Gone);
        }
        let has_slot = {
            let slot = self.slot(id);
            let slot = &mut *slot.lock();
            match slot {
                // The present anchor may be the same: the two are compared at the end.
                VaultSlot::Closed | VaultSlot::Closing | VaultSlot::Open(_) if self.anchors.has(id)? => false,
                VaultSlot::Closed => {
                    *slot = VaultSlot::BeingPut;
                    true
                }
                VaultSlot::Closing | VaultSlot::BeingPut | VaultSlot::Open(_) => return Err(Refused::NotNow),
            }
        };
        // From here on, dropping it undoes the slot.
        let mut put = Put { vaults: self.clone(), id: *id, around, has_slot, new: None, head: Head([0; 32]), known };
        put.new = Some(self.anchors.begin(id)?);
        Ok(put)
    }

    fn may_put(&self, caller: &Caller, id: &VaultId, around: Option<VaultId>) -> Answer<()> {
        let state = self.state();
        let may = match around {
            None => state.may_use(&caller.key, id),
            // The rights of the vault around it become those of the dataset. So nobody may say this of a vault that
            // others have to do with.
            Some(around) => {
                let may_use_around = around != *id && state.keeps(&around)? && state.may_use(&caller.key, &around);
                let is_here = self.anchors.has(id)?;
                let is_free = || -> Result<bool> { Ok(!is_here && !state.is_spoken_for(id, &around)?) };
                // It came by a put whose end was in doubt. What is put now is compared with it.
                let has_just_come =
                    || -> Result<bool> { Ok(is_here && !state.keeps(id)? && state.is_on_its_way(id, &around)?) };
                may_use_around && (state.may_use(&caller.key, id) || is_free()? || has_just_come()?)
            }
        };
        if may { self.may_lie(id, around) } else { Err(Refused::NotGranted) }
    }

    /// Whether a vault may lie there.
    fn may_lie(&self, id: &VaultId, around: Option<VaultId>) -> Answer<()> {
        let Some(around) = around else { return Ok(()) };
        self.state().check_place(id, &around).map_err(|misplaced| match misplaced {
            Misplaced::Circle => Refused::NotGranted,
            Misplaced::Deep => Refused::TooMuch("datasets are nested as deep as this server keeps them"),
            Misplaced::Full => Refused::TooMuch("the vault has as many datasets as this server keeps of one vault"),
        })
    }

    /// Refuses calls that take space which the state may need.
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
                "the disk is nearly full: no commit is made, no session begun, and no report taken, before there is room"
            );
        }
        Err(Refused::TooMuch("the server's disk is nearly full"))
    }

    /// Makes changes durable, as [`Vault::commit`] does.
    ///
    /// # Errors
    /// Those, and [`Refused::TooMuch`].
    pub fn commit(
        &self,
        id: &VaultId,
        (caller, of): (&Caller, (SessionId, GrantNo)),
        base: Head,
        changes: &[Change],
    ) -> Answer<Head> {
        let vault = self.vault_for(caller, id)?;
        self.check_room()?;
        vault.commit(caller, of, base, changes)
    }

    /// Begins a session, as [`Vault::begin`] does. It is refused while there is little space: a session adds entries to
    /// the audit log, and its end, which cannot be refused, needs space as well.
    ///
    /// # Errors
    /// Those, and [`Refused::TooMuch`].
    pub fn begin(
        &self,
        id: &VaultId,
        caller: &Caller,
        (used, replaces): (Use, SessionId),
        replies: Sender<Told>,
    ) -> Answer<(Arc<Vault>, Begun)> {
        let vault = self.vault_for(caller, id)?;
        self.check_room()?;
        let begun = vault.begin(caller, used, replaces, replies)?;
        Ok((vault, begun))
    }

    /// A host was revoked, or lost a grant: its sessions of vaults that it may no longer use end. No vault is waited
    /// for: one that is at work looks at rights before it does anything else.
    ///
    /// # Errors
    /// [`Lost`].
    pub fn rights_have_changed(&self) -> std::result::Result<(), Lost> {
        let slots = self.slots();
        Vaults::opened(&slots, Mutex::try_lock).try_for_each(|vault| vault.tick())
    }

    /// The vaults whose anchors are kept here, and the hosts that have sessions of them.
    pub fn in_use(&self) -> Vec<(VaultId, Vec<String>)> {
        let slots = self.slots();
        Vaults::opened(&slots, |slot| Some(slot.lock())).map(|vault| (vault.id(), vault.hosts())).collect()
    }

    /// Retires the anchor of an unused vault, for an administrator: it is kept under another name.
    ///
    /// # Errors
    /// [`Refused::Unknown`], [`Refused::InUse`], [`Refused::Failed`].
    pub fn forget(&self, id: &VaultId) -> Answer<()> {
        let slot = self.slot(id);
        let slot = &mut *slot.lock();
        let event = Event::AnchorForgotten { vault: id.to_string() };
        if matches!(slot, VaultSlot::Open(vault) if vault.standing() != Standing::Good) {
            self.vault_in(id, slot, false)?;
        }
        let VaultSlot::Open(vault) = &*slot else { return self.put_away(id, slot, event) };
        vault.clone().give_up(|inner| inner.nobody_has_it(None), || self.put_away(id, slot, event))
    }

    /// Whether the anchor of a vault should be here, and is not.
    fn is_missing(&self, id: &VaultId) -> Answer<bool> {
        Ok(self.state().keeps(id)? && !self.anchors.has(id)?)
    }

    /// Retires the anchor of a vault. An anchor that is missing already is no longer expected after that.
    fn put_away(&self, id: &VaultId, slot: &mut VaultSlot, event: Event) -> Answer<()> {
        let was_missing = self.is_missing(id)?;
        self.state().will_put_away(id).map_err(Lost)?;
        if !self.anchors.put_away(id)? && !was_missing {
            return Err(Refused::Unknown);
        }
        *slot = VaultSlot::Closed;
        Ok(self.state().note_not_kept(id, event).map_err(Lost)?)
    }

    /// Retires the anchor that a session with an exclusive lease has taken back: it is kept under another name.
    ///
    /// # Errors
    /// [`Refused::Unknown`], [`Refused::Ended`], [`Refused::InUse`], [`Refused::Failed`].
    pub fn give_up(&self, id: &VaultId, session: SessionId, caller: &Caller) -> Answer<()> {
        let (vault, host) = (self.vault_for(caller, id)?, &*caller.name);
        let slot = self.slot(id);
        let slot = &mut *slot.lock();
        let event = Event::AnchorTaken { host: host.into(), vault: id.to_string() };
        // Other sessions by turns would continue with an anchor that is no longer here.
        let may_be = |inner: &Inner| {
            // As `Vault::usable_by`.
            let may_use = self.state().may_use(&caller.key, id).then_some(()).ok_or(Refused::Unknown);
            may_use.and(inner.may_change(session, host)).and_then(|()| inner.nobody_has_it(Some(session)))
        };
        vault.give_up(may_be, || self.put_away(id, slot, event))
    }
}

/// The vaults whose anchors should be here and are missing.
///
/// # Errors
/// Those of the store and of the state.
pub fn missing(anchors: &dyn AnchorStore, state: &State) -> Result<Vec<VaultId>> {
    // With etcd each question is one to its members, and there may be thousands: all of them are one.
    let mut kept = state.kept()?;
    let there: HashSet<_> = anchors.all()?.into_iter().collect();
    kept.retain(|id| !there.contains(id));
    Ok(kept)
}

/// An anchor that is being received. If it is dropped before its end, the put is undone.
pub struct Put {
    vaults: Arc<Vaults>,
    id: VaultId,
    around: Option<VaultId>,
    /// Whether [`VaultSlot::BeingPut`] was set by this put.
    has_slot: bool,
    /// `None`: not begun yet, or finished. Let go of with no slot locked: that removes its rows, and with etcd part by
    /// part, while all who use the vault would wait.
    new: Option<Box<dyn NewAnchor>>,
    head: Head,
    /// The head of a host's copy, if the server's anchor was lost.
    known: Option<Head>,
}

impl Put {
    /// Receives some rows.
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

    /// All rows have been received. If the same rows are here already, an earlier answer was lost, and this succeeds.
    ///
    /// # Errors
    /// [`Refused::Known`], [`Refused::NoAnchor`], [`Refused::NotGranted`], [`Refused::Policy`], [`Refused::Failed`].
    pub fn finish(mut self, caller: &Caller) -> Answer<Head> {
        let Some(table) = self.new.as_ref().map(|new| new.table()) else { return Err(Refused::NotNow) };
        let anchor = Anchor::open(table.clone(), &self.id).map_err(|_| Refused::NoAnchor)?;
        let row = anchor.vault();
        let revision = row.revision;
        drop(anchor);
        export::check(&*table, &self.id).map_err(|_| Refused::NoAnchor)?;
        let is_waited_for = self.vaults.waits_for(caller, &self.id);
        if let Some(known) = self.known.filter(|_| is_waited_for) {
            // The state is the same, so it keeps its head: other hosts with the same state need not send theirs.
            self.head = known;
        }
        // These are compared with what is here, and change nothing.
        let is_here = !is_waited_for && self.vaults.anchors.has(&self.id)?;
        // Rows that were acknowledged once are taken back whatever the policy says by now.
        let is_exempt = is_waited_for || is_here;
        let forbidden = if is_exempt { None } else { self.forbidden(&*table, &self.subject(caller, &row))? };
        table.commit(&[self.head.change()])?;
        drop(table);
        self.vaults.may_put(caller, &self.id, self.around)?;
        if is_waited_for {
            return self.reconcile(caller, revision);
        }
        if let Some(refused) = forbidden {
            return Err(refused);
        }
        if is_here || !self.install(caller)? {
            // It takes as many files as the anchor that is looked at.
            self.new = None;
            self.compare(caller)?;
        }
        Ok(self.head)
    }

    /// Makes the new anchor that of its vault. False: another one has come meanwhile.
    fn install(&mut self, caller: &Caller) -> Answer<bool> {
        let slot = self.vaults.slot(&self.id);
        let slot = slot.lock();
        // No other process opens these anchors.
        if self.vaults.anchors.has(&self.id)? {
            return Ok(false);
        }
        if !self.has_slot && matches!(*slot, VaultSlot::BeingPut) {
            return Err(Refused::NotNow);
        }
        // Two that come at once may lie in each other, or both be the last one for which there is room.
        let _one = self.vaults.placing.lock();
        self.vaults.may_lie(&self.id, self.around)?;
        let state = self.vaults.state();
        state.will_keep(&self.id, self.around.as_ref()).map_err(Lost)?;
        self.new.take().map_or(Ok(()), |new| new.install())?;
        state.note_kept(&caller.name, &self.id, self.around.as_ref()).map_err(Lost)?;
        Ok(true)
    }

    /// Checks that the anchor that is here has the same rows.
    fn compare(&self, caller: &Caller) -> Answer<()> {
        let slot = self.vaults.slot(&self.id);
        let slot = &mut *slot.lock();
        // One that was here is gone meanwhile: these rows were not judged.
        if !self.vaults.anchors.has(&self.id)? {
            return Err(Refused::NotNow);
        }
        if self.vaults.head_in(&self.id, slot)? != self.head {
            return Err(Refused::Known);
        }
        // An earlier end of the same put was in doubt.
        let state = self.vaults.state();
        if !state.keeps(&self.id)? {
            let _one = self.vaults.placing.lock();
            self.vaults.may_lie(&self.id, self.around)?;
            state.note_kept_after_all(&caller.name, &self.id).map_err(Lost)?;
        }
        Ok(())
    }

    /// The vault, as its host uses it where it is put.
    fn subject(&self, caller: &Caller, row: &VaultRow) -> Subject {
        let within = self.around.map(|around| self.vaults.state().with_those_around(&around));
        Subject::of(&caller.name, row, within.into_iter().flatten())
    }

    /// The policy's reason against a host's putting these rows, if there is one.
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

    /// Replaces the rows that came from the backup by these, unless the present rows are newer by now: then returns
    /// their head.
    fn reconcile(&mut self, caller: &Caller, revision: Revision) -> Answer<Head> {
        let (vaults, new) = (&self.vaults, &mut self.new);
        // Others are closed for it, which must not wait for this one.
        let opened = vaults.vault_for(caller, &self.id)?;
        // Held until the replacement: of two hosts, the one with the older rows must not replace the newer ones.
        let slot = vaults.slot(&self.id);
        let slot = &mut *slot.lock();
        let vault = vaults.vault_in(&self.id, slot, true)?;
        drop(opened);
        let ours = Anchor::open(vault.table_to_look_at(), &self.id)?.vault().revision;
        if ours > revision {
            vaults.state().reconciled(&self.id, &caller.name, false).map_err(Lost)?;
            return Ok(vault.head());
        }
        let may_be = |_: &_| if vaults.waits_for(caller, &self.id) { Ok(()) } else { Err(Refused::NotNow) };
        let replace = || {
            new.take().map_or(Ok(()), |new| new.install())?;
            *slot = VaultSlot::Closed;
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
            *self.vaults.slot(&self.id).lock() = VaultSlot::Closed;
        }
    }
}

#[cfg(test)]
mod tests;
