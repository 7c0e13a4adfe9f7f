//! How vaults are opened and closed. One that is open takes two of the files that the process may open, and memory. So
//! there are only so many: one that nobody uses gives way to one that is used.
//!
//! Closing waits for the disk. Meanwhile the slot says so, and is not locked: who wants the vault waits a moment, and
//! administrators for no vault at all.

use super::{Standing, VaultSlot, Vaults};
use crate::ServerError;
use crate::caller::Caller;
use crate::counts::{Counted, Counts};
use crate::refused::{Answer, Lost, Refused};
use crate::vault::{Users, Vault};
use lamassu_anchor::AnchorError;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::Table;
use lamassu_format::header::VaultId;
use lamassu_lease::Millis;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// ms. A vault without sessions is closed after this time. Before that it can send the newest changes alone.
pub(super) const UNUSED: u64 = 600_000;
/// While more are open, those without sessions are closed as soon as possible.
pub(super) const OPEN_MANY: usize = 1000;
/// Vaults that are being closed at once because nobody uses them: disks have other work.
const CLOSING_AT_ONCE: usize = 4;
/// How long an opening waits for who closes the same anchor.
const CLOSED_WITHIN: Duration = Duration::from_millis(500);
const AGAIN_AFTER: Duration = Duration::from_millis(20);

pub(super) type Slot = Arc<Mutex<VaultSlot>>;

/// How many vaults are open, and may be.
#[derive(Default)]
pub(super) struct Room {
    most: usize,
    open: Counts<()>,
    closing: Counts<()>,
}

impl Room {
    pub fn of(most: usize) -> Room {
        Room { most, ..Room::default() }
    }

    /// Room for one more. For the server itself there always is: it opens few at a time, or those that have sessions.
    fn take(&self, is_for_host: bool) -> Option<Counted<()>> {
        self.open.one_more(&(), if is_for_host { self.most } else { usize::MAX })
    }
}

/// What came of the attempt to close a vault that nobody uses.
enum Tried {
    Closed,
    /// One is being closed, or used for a moment.
    NotNow,
    /// All have sessions.
    AllAttended,
}

/// A vault that is being closed. When this is dropped, it is closed, and can be opened again.
pub(super) struct Closing {
    slot: Slot,
    vault: Option<Arc<Vault>>,
    _one: Option<Counted<()>>,
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.vault = None;
        let slot = &mut *self.slot.lock();
        if matches!(slot, VaultSlot::Closing) {
            *slot = VaultSlot::Closed;
        }
    }
}

/// Takes the vault out of its slot, if it has had no user for `unused` ms.
pub(super) fn close(slot: &Slot, unused: u64, one: Option<Counted<()>>) -> Option<Closing> {
    let place = &mut *slot.try_lock()?;
    // Others get it from the slot alone, which is locked.
    let is_unused = |vault: &Arc<Vault>| Arc::strong_count(vault) == 1 && vault.close_if_unused(unused);
    match place {
        VaultSlot::Open(vault) if is_unused(vault) => match std::mem::replace(place, VaultSlot::Closing) {
            VaultSlot::Open(vault) => Some(Closing { slot: slot.clone(), vault: Some(vault), _one: one }),
            VaultSlot::Closed | VaultSlot::Closing | VaultSlot::BeingPut => None,
        },
        VaultSlot::Open(_) | VaultSlot::Closed | VaultSlot::Closing | VaultSlot::BeingPut => None,
    }
}

impl Vaults {
    pub(super) fn slot(&self, id: &VaultId) -> Slot {
        self.slots.lock().entry(*id).or_default().clone()
    }

    /// The open vaults, among the slots that `lock` can lock. To be used one by one: none can be closed while it is had
    /// from here.
    pub(super) fn opened<'a>(
        slots: &'a [Slot],
        lock: impl Fn(&'a Mutex<VaultSlot>) -> Option<MutexGuard<'a, VaultSlot>> + 'a,
    ) -> impl Iterator<Item = Arc<Vault>> + 'a {
        slots.iter().filter_map(move |slot| match &*lock(slot)? {
            VaultSlot::Open(vault) => Some(vault.clone()),
            VaultSlot::Closed | VaultSlot::Closing | VaultSlot::BeingPut => None,
        })
    }

    pub(super) fn slots(&self) -> Vec<Slot> {
        self.slots.lock().values().cloned().collect()
    }

    /// Whether a vault is open, or may be at this moment.
    pub fn is_open(&self, id: &VaultId) -> bool {
        let slot = self.slots.lock().get(id).cloned();
        slot.is_some_and(|slot| slot.try_lock().is_none_or(|slot| matches!(*slot, VaultSlot::Open(_))))
    }

    /// Closes a vault that nobody uses, at once.
    pub fn close_unused(&self, id: &VaultId) {
        drop(close(&self.slot(id), 0, None));
    }

    /// A vault, which is opened if necessary; for the server itself.
    ///
    /// # Errors
    /// [`Refused::Unknown`], [`Refused::NotNow`], [`Refused::Failed`], [`Refused::Lost`].
    pub fn vault(&self, id: &VaultId) -> Answer<Arc<Vault>> {
        self.vault_when_closed(id, false)
    }

    /// The same for a host. A vault that the host may not use is unknown to it.
    ///
    /// # Errors
    /// As [`Vaults::vault`]; [`Refused::TooMuch`].
    pub fn vault_for(&self, caller: &Caller, id: &VaultId) -> Answer<Arc<Vault>> {
        match self.state().may_use(&caller.key, id) {
            true => self.vault_when_closed(id, true),
            false => Err(Refused::Unknown),
        }
    }

    /// Waits while it is being closed, and while others must be closed first; with no slot locked.
    fn vault_when_closed(&self, id: &VaultId, is_for_host: bool) -> Answer<Arc<Vault>> {
        let until = Instant::now() + CLOSED_WITHIN;
        loop {
            let slot = self.slot(id);
            let answer = self.vault_in(id, &mut slot.lock(), is_for_host);
            let may_be_soon = match &answer {
                _ if Instant::now() >= until => false,
                Err(Refused::NotNow) => true,
                Err(Refused::TooMuch(_)) => match self.close_one_unused() {
                    Tried::Closed => continue,
                    Tried::NotNow => true,
                    Tried::AllAttended => false,
                },
                _ => false,
            };
            if !may_be_soon {
                return answer;
            }
            std::thread::sleep(AGAIN_AFTER);
        }
    }

    /// The same, with its slot locked. Waits for nobody.
    pub(super) fn vault_in(&self, id: &VaultId, slot: &mut VaultSlot, is_for_host: bool) -> Answer<Arc<Vault>> {
        match slot {
            VaultSlot::Open(vault) if vault.standing() == Standing::Good => return Ok(vault.clone()),
            // Another user of its table keeps it open for a moment.
            VaultSlot::Open(_) | VaultSlot::Closed => *slot = VaultSlot::Closed,
            VaultSlot::Closing => return Err(Refused::NotNow),
            VaultSlot::BeingPut => return Err(Refused::Unknown),
        }
        let vault = self.open(id, is_for_host).inspect_err(|refused| {
            if let Refused::Failed(error) = refused {
                tracing::error!(anchor = %self.anchors.name(id), %error, "this anchor cannot be used; the others are served");
            }
        });
        let vault = Arc::new(vault?);
        *slot = VaultSlot::Open(vault.clone());
        Ok(vault)
    }

    /// The head of the anchor of a vault, with its slot locked. The vault is not opened for that: whoever asks for the
    /// heads of many would open more than may be.
    ///
    /// # Errors
    /// [`Refused::Unknown`], [`Refused::NotNow`], [`Refused::Failed`].
    pub(super) fn head_in(&self, id: &VaultId, slot: &mut VaultSlot) -> Answer<Head> {
        match slot {
            VaultSlot::Open(vault) if vault.standing() == Standing::Good => return Ok(vault.head()),
            VaultSlot::Open(_) | VaultSlot::Closed => *slot = VaultSlot::Closed,
            VaultSlot::Closing => return Err(Refused::NotNow),
            VaultSlot::BeingPut => return Err(Refused::Unknown),
        }
        let head = Head::of(&*self.table(id)?)?;
        head.ok_or_else(|| ServerError::Anchor(AnchorError::Empty).into())
    }

    fn table(&self, id: &VaultId) -> Answer<Arc<dyn Table>> {
        match self.anchors.open(id) {
            Err(AnchorError::Missing { .. }) => Err(Refused::Unknown),
            Err(AnchorError::Locked { .. }) => Err(Refused::NotNow),
            table => Ok(table?),
        }
    }

    fn open(&self, id: &VaultId, is_for_host: bool) -> Answer<Vault> {
        // Its sessions had room when they began, and their hosts wait.
        let room = self.room.take(is_for_host && self.state().leases(id)?.1.is_empty());
        let room = room.ok_or(Refused::TooMuch("the server has as many vaults open as it may"))?;
        Ok(Vault::open(*id, self.table(id)?, self.terms, self.common.clone())?.taking(room))
    }

    /// Closes the vault that has been without users for the longest time.
    fn close_one_unused(&self) -> Tried {
        let (slots, mut without) = (self.slots(), Tried::AllAttended);
        let mut oldest: Option<(Millis, &Slot)> = None;
        for slot in &slots {
            let Some(place) = slot.try_lock() else {
                without = Tried::NotNow;
                continue;
            };
            let users = match &*place {
                VaultSlot::Open(vault) => match vault.users() {
                    Users::NoneSince(_) if Arc::strong_count(vault) > 1 => Users::Passing,
                    users => users,
                },
                VaultSlot::Closing => Users::Passing,
                VaultSlot::Closed | VaultSlot::BeingPut => continue,
            };
            match users {
                Users::Sessions => {}
                Users::Passing => without = Tried::NotNow,
                Users::NoneSince(since) if oldest.is_some_and(|(before, _)| before <= since) => {}
                Users::NoneSince(since) => oldest = Some((since, slot)),
            }
        }
        match oldest.map(|(_, slot)| close(slot, 0, None).is_some()) {
            Some(true) => Tried::Closed,
            // Somebody uses it by now.
            Some(false) => Tried::NotNow,
            None => without,
        }
    }

    /// Lets time pass for all open vaults, and closes some of those that are not used.
    ///
    /// # Errors
    /// [`Lost`].
    pub fn tick(&self) -> std::result::Result<(), Lost> {
        // A vault that is being opened is skipped: its time advances with the next tick.
        let slots = self.slots();
        let mut count = 0;
        Vaults::opened(&slots, Mutex::try_lock).try_for_each(|vault| {
            count += 1;
            vault.tick()
        })?;
        let unused = self.may_be_unused(count);
        for slot in &slots {
            let Some(one) = self.room.closing.one_more(&(), CLOSING_AT_ONCE) else { break };
            if let Some(closing) = close(slot, unused, Some(one)) {
                let _ = std::thread::Builder::new().name("close".into()).spawn(move || drop(closing));
            }
        }
        drop(slots);
        // Who uses a slot has got it under this lock.
        let is_free = |slot: &VaultSlot| matches!(slot, VaultSlot::Closed);
        self.slots
            .lock()
            .retain(|_, slot| Arc::strong_count(slot) > 1 || !slot.try_lock().is_some_and(|it| is_free(&it)));
        Ok(())
    }

    /// How long a vault stays open without sessions while so many are open, ms.
    pub(super) fn may_be_unused(&self, open: usize) -> u64 {
        if open > OPEN_MANY { 0 } else { self.unused }
    }
}
