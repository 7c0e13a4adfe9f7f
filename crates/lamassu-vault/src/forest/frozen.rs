//! Freezing what several hosts use by turns. This host takes an exclusive turn of the mount's own vault and of every
//! dataset in it, and keeps all of them until the thaw. A dataset that it does not use, or has no key for, is held too.
//!
//! Each vault is taken before those in it. Whoever else freezes does the same, and so no two hosts wait for each other.
//!
//! The freeze is lost as soon as one of the sessions is not good: other hosts may have got that vault since.
//!
//! Locks: `kept` is the last one, after those of turns.

use super::member::KnownMember;
use super::{Forest, HeldDataset, ROOT_MEMBER};
use crate::error::errno;
use crate::turns::Need;
use crate::{Result, Vault, VaultError};
use lamassu_anchor::table::Standing;
use lamassu_format::header::VaultId;
use parking_lot::MutexGuard;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long files are taken over that a killed host has left open, before it is looked whether the freeze is still
/// wanted.
const TAKING_OVER: Duration = Duration::from_millis(200);
/// Threads that end the sessions of datasets that were held. Each waits for the server.
const LEAVING: usize = 8;
/// How often whoever waits for `changing` looks whether a freeze has it.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// What a freeze has taken so far.
#[derive(Default)]
pub(super) struct Kept {
    /// those that are frozen
    members: Vec<Weak<Vault>>,
    held: Vec<Box<dyn HeldDataset>>,
    state: State,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// Nothing is frozen, or about to be.
    #[default]
    No,
    /// A freeze is under way.
    Taking,
    Kept,
    /// A session was not good, or the freeze was stopped while it was under way.
    Lost,
}

impl Kept {
    fn is_good(&self) -> bool {
        let is_good = |vault: &Weak<Vault>| vault.upgrade().is_some_and(|vault| is_good(&vault));
        matches!(self.state, State::Taking | State::Kept)
            && self.members.iter().all(is_good)
            && self.held.iter().all(|held| held.is_good())
    }
}

fn is_good(vault: &Vault) -> bool {
    vault.options().anchor.as_ref().is_some_and(|anchor| anchor.standing() == Standing::Good)
}

/// Where the anchor of a vault is that was taken.
enum Taken {
    Member(Arc<Vault>),
    /// by its place among those that are held
    Held(usize),
    /// Hosts do not use it by turns.
    Not,
}

impl Forest {
    /// Waits until nobody else loads, unloads or destroys a member.
    ///
    /// # Errors
    /// [`VaultError::Frozen`] while a freeze is under way: it may wait for other hosts.
    pub(super) fn change(&self) -> Result<MutexGuard<'_, ()>> {
        loop {
            if let Some(changing) = self.changing.try_lock_for(LOOK_AGAIN) {
                return Ok(changing);
            }
            if self.is_freezing() {
                return Err(VaultError::Frozen);
            }
        }
    }

    /// Whether a freeze by turns is under way, which may wait for other hosts.
    pub fn is_freezing(&self) -> bool {
        self.kept.lock().state == State::Taking
    }

    /// As [`crate::FileSystem::freeze`].
    pub(super) fn freeze_turns(&self) -> Result<()> {
        // Does not wait: see there.
        let Some(_one) = self.changing.try_lock() else { return Err(errno("freeze", libc::EAGAIN)) };
        self.kept.lock().state = State::Taking;
        let done = self.take_all().and_then(|()| {
            let kept = &mut *self.kept.lock();
            if !kept.is_good() {
                return Err(VaultError::FreezeLost);
            }
            kept.state = State::Kept;
            Ok(())
        });
        done.map_err(|error| {
            let was_stopped = !self.is_freezing();
            self.let_go();
            self.kept.lock().state = State::No;
            if was_stopped { VaultError::FreezeLost } else { error }
        })
    }

    fn take_all(&self) -> Result<()> {
        let root = self.take(&self.root)?.ok_or_else(|| self.not_open(ROOT_MEMBER))?;
        // From here on nothing is entered that was not.
        self.frozen.store(true, Ordering::Release);
        if !self.is_freezing() {
            // It was stopped before.
            return Err(VaultError::FreezeLost);
        }
        drop(self.opens.write());
        if !root.has_datasets() {
            return Ok(());
        }
        let mut taken = HashMap::from([(self.root.id, Taken::Member(root))]);
        // Until nothing is found that another host made before the vault around it was taken.
        loop {
            let before = taken.len();
            for (around, id) in self.opener.stored_datasets()? {
                let lies_there = match taken.get(&around) {
                    _ if taken.contains_key(&id) => false,
                    Some(Taken::Member(vault)) => vault.has_dataset(&id)?,
                    Some(Taken::Held(at)) => self.kept.lock().held.get(*at).map_or(Ok(false), |held| held.has(&id))?,
                    Some(Taken::Not) | None => false,
                };
                if lies_there {
                    let now = self.take_dataset(&id, &around)?;
                    taken.insert(id, now);
                }
            }
            if taken.len() == before {
                return Ok(());
            }
        }
    }

    fn take_dataset(&self, id: &VaultId, around: &VaultId) -> Result<Taken> {
        let slot = self.slots().into_iter().find(|slot| slot.id == *id);
        if let Some(slot) = slot {
            // Turns that were about to begin have begun after this, and no others do.
            drop(slot.opening.lock());
            if let Some(vault) = self.take(&slot)? {
                return Ok(Taken::Member(vault));
            }
        }
        let held = self.opener.hold((id, around), &|| self.is_freezing())?;
        let Some(held) = held else { return Ok(Taken::Not) };
        let kept = &mut *self.kept.lock();
        if kept.state != State::Taking {
            return Err(VaultError::FreezeLost);
        }
        kept.held.push(held);
        Ok(Taken::Held(kept.held.len() - 1))
    }

    /// Takes a member, and freezes its vault. `None`: it takes no turns here.
    fn take(&self, slot: &Arc<KnownMember>) -> Result<Option<Arc<Vault>>> {
        let Some(by_turns) = slot.by_turns() else { return Ok(None) };
        if !by_turns.turns.freeze(|| self.is_freezing()) {
            // It turned out that there is no key.
            return match slot.by_turns() {
                None => Ok(None),
                Some(_) => Err(self.not_open(slot.number)),
            };
        }
        // The turn does not end meanwhile, even if the freeze is stopped.
        let _turn = by_turns.turns.enter(Need::LOOK).ok_or(VaultError::FreezeLost)?;
        let vault = slot.loaded().ok_or_else(|| self.not_open(slot.number))?;
        // What changes nothing takes nothing over either.
        while !vault.is_read_only() && !vault.recover_for(TAKING_OVER)? {
            if !self.is_freezing() {
                return Err(VaultError::FreezeLost);
            }
        }
        vault.freeze()?;
        {
            let kept = &mut *self.kept.lock();
            if kept.state == State::Taking {
                kept.members.push(Arc::downgrade(&vault));
                return Ok(Some(vault));
            }
        }
        // Whoever stopped the freeze did not know of this one.
        vault.thaw()?;
        Err(VaultError::FreezeLost)
    }

    /// As [`crate::FileSystem::thaw`].
    pub(super) fn thaw_turns(&self) -> Result<()> {
        let is_lost = {
            let kept = self.kept.lock();
            kept.state != State::No && !kept.is_good()
        };
        self.let_go();
        self.kept.lock().state = State::No;
        if is_lost { Err(VaultError::FreezeLost) } else { Ok(()) }
    }

    /// As [`crate::FileSystem::stop_freezing`].
    pub(super) fn stop_freezing_turns(&self) -> bool {
        self.let_go_if(|kept| kept.state == State::Taking)
    }

    /// Called now and then by who drives turns that are kept: ends the freeze if a session is not good.
    pub fn watch_freeze(&self) {
        self.lose_if(|kept| !kept.is_good());
    }

    /// Called by who drives turns when a session is in doubt, before caches are dropped: that waits for changes that a
    /// freeze holds back. The session may be good again already, and the freeze counts as lost all the same.
    pub fn lose_freeze(&self) {
        self.lose_if(|_| true);
    }

    fn lose_if(&self, is_lost: impl FnOnce(&Kept) -> bool) {
        if self.let_go_if(|kept| matches!(kept.state, State::Taking | State::Kept) && is_lost(kept)) {
            tracing::error!("the vault is frozen no longer: this host was out of touch with the server");
        }
    }

    /// Lets changes go on, here and on other hosts. The freeze counts as lost, unless it is the thaw that does this.
    fn let_go(&self) {
        self.let_go_if(|_| true);
    }

    /// The same, if it is so. Whether it was.
    fn let_go_if(&self, is_so: impl FnOnce(&Kept) -> bool) -> bool {
        let kept = {
            let kept = &mut *self.kept.lock();
            if !is_so(kept) {
                return false;
            }
            std::mem::replace(kept, Kept { state: State::Lost, ..Kept::default() })
        };
        self.release(kept);
        true
    }

    fn release(&self, Kept { members, held, state: _ }: Kept) {
        self.frozen.store(false, Ordering::Release);
        // Before their turns may end.
        for vault in members.iter().filter_map(Weak::upgrade) {
            let _ = vault.thaw();
        }
        // Also what the freeze still waits for.
        for by_turns in self.slots().iter().filter_map(|slot| slot.by_turns()) {
            by_turns.turns.thaw();
        }
        if held.is_empty() {
            return;
        }
        // A session that ends may wait for the server: who drives turns does not.
        let leave = move || {
            let held = parking_lot::Mutex::new(held);
            std::thread::scope(|scope| {
                for _ in 0..LEAVING.min(held.lock().len()) {
                    scope.spawn(|| {
                        loop {
                            let Some(next) = ({ held.lock().pop() }) else { return };
                            drop(next);
                        }
                    });
                }
            });
        };
        if let Err(error) = std::thread::Builder::new().name("lamassu-thaw".into()).spawn(leave) {
            tracing::warn!(%error, "no thread");
        }
    }
}
