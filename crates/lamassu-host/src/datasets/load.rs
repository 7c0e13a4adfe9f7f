//! Datasets of a served vault: unloaded, loaded again, destroyed.

use crate::control::protocol::Caller;
use crate::serve::Served;
use crate::{Error, Result, turns};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, Material, admin};
use lamassu_vault::forest::{Number, ROOT_MEMBER, root_of};
use lamassu_vault::turns::Need;
use lamassu_vault::{FileSystem, Ino, VaultError};
use std::ffi::OsStr;

/// The error for a dataset that another host uses.
fn in_use(error: Error) -> Error {
    match error.innermost() {
        Error::Vault(VaultError::Anchor(AnchorError::Server { fault: ServerFault::InUse { by }, .. })) => {
            Error::DatasetInUse { by: by.clone() }
        }
        _ => error,
    }
}

impl Served {
    /// Unloads and removes a dataset, with those in it. Returns what is left of it, for the user: with `forced` other
    /// hosts may use it, and then its anchor stays at the server.
    pub fn destroy_dataset(&self, caller: &Caller, dir: Ino, forced: bool) -> Result<Option<String>> {
        let member = self.member(dir)?;
        let above = self.forest().parent(member).ok_or(Error::NotADataset)?;
        if self.is_read_only() {
            return Err(Error::ReadOnlyMount);
        }
        self.refuse_frozen()?;
        let id = self.forest().member(member)?.id;
        let place = {
            let _turn = turns::hold(self.forest(), root_of(above), Need::LOOK);
            self.keeper().place(member)?
        };
        self.end_jobs(member);
        let unloaded = self.forest().unload_to_destroy(member, forced)?;
        let anchors = &self.policy().anchors;
        let (held, left) = match anchors.hold_to_remove(&id, &place.path()) {
            Ok(held) => (Ok(held), None),
            Err(error) if forced => (Ok(Vec::new()), Some(error.message())),
            Err(error) => (Err(in_use(error)), None),
        };
        let removed = held.and_then(|anchor| {
            let _turn = turns::hold(self.forest(), root_of(above), Need::CHANGE);
            let place = unloaded.remove()?;
            let event = Event::new(EventKind::DatasetDestroyed).by(caller.uid).detail("dataset", id.to_string());
            self.note(above, event);
            Ok((place, anchor))
        });
        let (((dir, name), rest), anchor) = removed.inspect_err(|_| {
            // It is still there. With turns, the next request opens it again.
            if self.hosts_take_turns() {
                let _ = self.forest().take_turns_again(member);
            }
        })?;
        self.forest().changed_beside_kernel(dir, &name);
        let left = left.or_else(|| anchors.remove_held(&id, anchor).err().map(|error| error.message()));
        if let Some(rest) = rest {
            self.delete_destroyed(above, &rest);
        }
        Ok(left.map(|why| {
            tracing::warn!(why, "the anchor of the dataset that was destroyed is left");
            format!("the anchor of dataset {id} is left, since {why}")
        }))
    }

    /// Deletes a dataset that was destroyed, in as many turns as other hosts want between. What is left in the end is
    /// deleted when the next turns begin, on any host.
    fn delete_destroyed(&self, above: Number, name: &OsStr) {
        let root = root_of(above);
        loop {
            let Some(turn) = turns::hold(self.forest(), root, Need::CHANGE) else { return };
            let turns = self.forest().join_turns(root);
            let is_to_end = || turns.as_ref().is_none_or(|turns| turns.is_to_end());
            let vault = self.forest().vault(above).ok_or(VaultError::KeyNotLoaded);
            let done = vault.and_then(|vault| vault.delete_destroyed(name, &is_to_end));
            drop(turn);
            match done {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => {
                    let text = "a destroyed dataset stays in lamassu.staging until the next turns";
                    return tracing::warn!(entry = %name.to_string_lossy(), %error, "{text}");
                }
            }
        }
    }

    /// Closes a vault and those in it, and drops their keys.
    pub fn unload(&self, caller: &Caller, dir: Ino) -> Result<bool> {
        let member = self.member(dir)?;
        if member == ROOT_MEMBER && !caller.is_owner {
            return Err(Error::NotPermitted);
        }
        self.may_work_in(caller, dir)?;
        self.refuse_frozen()?;
        self.end_jobs(member);
        Ok(self.forest().unload(member)?)
    }

    /// Opens a vault again: with the keys of the vault around it, or with a key in the request.
    pub fn load(&self, caller: &Caller, dir: Ino, brought: Option<(&Material, Option<u32>)>) -> Result<()> {
        let member = self.member(dir)?;
        self.may_work_in(caller, dir)?;
        if self.hosts_take_turns() {
            return self.load_by_turns(caller, member, brought);
        }
        let Some((material, slot)) = brought else {
            self.forest().load_again(member)?;
            return Ok(());
        };
        if !caller.is_owner {
            return Err(Error::NotPermitted);
        }
        let header = self.forest().header(member)?;
        let (header, unlocked) = header.verified(|header| self.policy().try_slots(header, material, slot))?;
        let pinned = match member {
            ROOT_MEMBER => self.policy().pins.of(&header.id())?,
            _ => self.policy().pins.known(&header.id())?,
        };
        admin::check_pinned(&header, &pinned)?;
        let opening = || self.keeper().opening(member, self.forest().parent(member), header, unlocked);
        self.forest().load(member, opening)?;
        Ok(())
    }

    /// The same where hosts take turns: the dataset is opened in its next turn.
    fn load_by_turns(&self, caller: &Caller, member: Number, brought: Option<(&Material, Option<u32>)>) -> Result<()> {
        if member == ROOT_MEMBER {
            return Err(Error::SharedMount);
        }
        self.refuse_frozen()?;
        if let Some((material, slot)) = brought {
            if !caller.is_owner {
                return Err(Error::NotPermitted);
            }
            let header = self.forest().stored_header(member)?;
            let (header, unlocked) = header.verified(|header| self.policy().try_slots(header, material, slot))?;
            admin::check_pinned(&header, &self.policy().pins.known(&header.id())?)?;
            self.keeper().bring(member, unlocked);
            self.forest().take_turns_again(member).inspect_err(|_| self.keeper().has_used_brought(member))?;
        } else {
            self.forest().take_turns_again(member)?;
        }
        let _turn = turns::hold(self.forest(), root_of(member), Need::LOOK);
        self.forest().at(root_of(member))?;
        Ok(())
    }
}
