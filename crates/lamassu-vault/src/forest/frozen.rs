//! Freezing what several hosts use by turns. This host takes an exclusive turn of the mount's own vault and of every
//! dataset in it, and keeps all of them until the thaw. A dataset that it does not use, or has no key for, is held too.
//!
//! Each vault is taken before those in it. Whoever else freezes does the same, and so no two hosts wait for each other.
//!
//! The freeze is lost as soon as one of the sessions is not good: other hosts may have got that vault since.

use super::member::KnownMember;
use super::{Forest, HeldDataset, ROOT_MEMBER};
use crate::error::errno;
use crate::{Result, Vault, VaultError};
use lamassu_anchor::table::Standing;
use lamassu_format::header::VaultId;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long files are taken over that a killed host has left open, before the vault counts as frozen.
const TAKING_OVER: Duration = Duration::from_secs(24 * 3600);

/// What a freeze has taken so far.
#[derive(Default)]
pub(super) struct Kept {
    members: Vec<Weak<Vault>>,
    held: Vec<Box<dyn HeldDataset>>,
    state: State,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// Nothing is frozen, or about to be.
    #[default]
    No,
    Kept,
    /// A session was not good, or the thaw came while the freeze was waiting.
    Lost,
}

impl Kept {
    fn is_good(&self) -> bool {
        let is_good = |vault: &Weak<Vault>| vault.upgrade().is_some_and(|vault| is_good(&vault));
        self.state == State::Kept && self.members.iter().all(is_good) && self.held.iter().all(|held| held.is_good())
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
    /// As [`crate::FileSystem::freeze`].
    pub(super) fn freeze_turns(&self) -> Result<()> {
        // Does not wait: see there.
        let Some(_one) = self.changing.try_lock() else { return Err(errno("freeze", libc::EBUSY)) };
        self.kept.lock().state = State::Kept;
        let done = self.take_all().and_then(|()| match self.kept.lock().is_good() {
            true => Ok(()),
            false => Err(VaultError::FreezeLost),
        });
        if done.is_err() {
            self.let_go();
            self.kept.lock().state = State::No;
        }
        done
    }

    fn take_all(&self) -> Result<()> {
        let root = self.take(&self.root)?.ok_or_else(|| self.not_open(ROOT_MEMBER))?;
        // From here on nothing is entered that was not.
        self.frozen.store(true, Ordering::Release);
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
        if let Some(slot) = slot
            && let Some(vault) = self.take(&slot)?
        {
            return Ok(Taken::Member(vault));
        }
        let Some(held) = self.opener.hold(id, around)? else { return Ok(Taken::Not) };
        let kept = &mut *self.kept.lock();
        kept.held.push(held);
        match kept.state {
            State::Kept => Ok(Taken::Held(kept.held.len() - 1)),
            State::No | State::Lost => Err(VaultError::FreezeLost),
        }
    }

    /// Takes a member, and freezes its vault. `None`: it takes no turns here.
    fn take(&self, slot: &Arc<KnownMember>) -> Result<Option<Arc<Vault>>> {
        let Some(by_turns) = slot.by_turns() else { return Ok(None) };
        if !by_turns.turns.freeze() {
            // It turned out that there is no key.
            return match slot.by_turns() {
                None => Ok(None),
                Some(_) => Err(self.not_open(slot.number)),
            };
        }
        let vault = slot.loaded();
        {
            let kept = &mut *self.kept.lock();
            kept.members.push(vault.as_ref().map(Arc::downgrade).unwrap_or_default());
            if kept.state != State::Kept {
                return Err(VaultError::FreezeLost);
            }
        }
        let vault = vault.ok_or_else(|| self.not_open(slot.number))?;
        vault.recover_for(TAKING_OVER)?;
        vault.freeze()?;
        Ok(Some(vault))
    }

    /// As [`crate::FileSystem::thaw`]. While a freeze waits, it gives up.
    pub(super) fn thaw_turns(&self) -> Result<()> {
        let is_lost = {
            let kept = self.kept.lock();
            kept.state != State::No && !kept.is_good()
        };
        let is_waiting = self.changing.is_locked();
        self.let_go();
        if is_waiting {
            self.opener.stop_holding();
        } else {
            self.kept.lock().state = State::No;
        }
        if is_lost { Err(VaultError::FreezeLost) } else { Ok(()) }
    }

    /// Called now and then by who drives turns that are kept: ends the freeze if a session is not good.
    pub fn watch_freeze(&self) {
        let is_lost = {
            let kept = self.kept.lock();
            kept.state == State::Kept && !kept.is_good()
        };
        if is_lost {
            tracing::error!("the vault is frozen no longer: this host was out of touch with the server");
            self.let_go();
        }
    }

    /// Lets changes go on, here and on other hosts. The freeze counts as lost, unless it is the thaw that does this.
    fn let_go(&self) {
        let held = std::mem::replace(&mut *self.kept.lock(), Kept { state: State::Lost, ..Kept::default() }).held;
        self.frozen.store(false, Ordering::Release);
        // Also what the freeze still waits for.
        for slot in self.slots() {
            // Before the turn may end.
            if let Some(vault) = slot.loaded() {
                let _ = vault.thaw();
            }
            if let Some(by_turns) = slot.by_turns() {
                by_turns.turns.thaw();
            }
        }
        // A session that ends may wait for the server: who drives turns does not.
        if let Err(error) = std::thread::Builder::new().name("lamassu-thaw".into()).spawn(move || drop(held)) {
            tracing::warn!(%error, "no thread");
        }
    }
}
