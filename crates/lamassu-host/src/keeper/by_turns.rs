//! Keys and headers of vaults that hosts use by turns.

use super::{Keeper, Kept};
use crate::anchors::{self, Access, check};
use crate::open::{LOOK_AGAIN, SHOWN_WITHIN};
use crate::{Place, Result};
use lamassu_anchor::Anchor;
use lamassu_crypto::KeyRing;
use lamassu_format::header::{Header, VaultHeader, VaultId};
use lamassu_format::name;
use lamassu_keys::{Unlocked, header_file};
use lamassu_vault::forest::{Number, Opener};
use lamassu_vault::locks::Locks;
use lamassu_vault::turns::Turns;
use lamassu_vault::{Forest, Options, Vault, VaultError};
use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

/// Starts taking turns with a dataset.
type Drive = fn(&Arc<Forest>, &Arc<Keeper>, Number) -> Result<(Arc<Turns>, Arc<dyn Locks>)>;

/// Who starts taking turns with datasets, where hosts take turns.
pub(super) type Driving = OnceLock<Drive>;

/// How the vault is opened in each turn.
pub struct TurnOpening {
    pub(crate) header: VaultHeader,
    pub(crate) ring: KeyRing,
    pub(crate) options: Options,
}

impl TurnOpening {
    /// As the vault was opened in the first turn, with this header.
    pub fn of(header: &VaultHeader, vault: &Vault) -> TurnOpening {
        let options = Options { anchor: None, ..vault.options().clone() };
        TurnOpening { header: header.clone(), ring: vault.ring().clone(), options }
    }
}

/// What is kept of a dataset that hosts use by turns, also between its turns.
pub(super) struct InTurns {
    /// its directory, held open: between turns of the vault around it its path is not known
    pub(super) place: Place,
}

impl Keeper {
    /// The directory of a dataset by turns.
    pub(super) fn place_by_turns(&self, member: Number) -> Option<Place> {
        self.kept().get(&member)?.by_turns.as_ref()?.place.again().ok()
    }

    /// Takes over the header of a vault that hosts use by turns, which another host has replaced. Called in a turn,
    /// with the turn's anchor. Epochs that it has in addition come into `ring`.
    ///
    /// # Errors
    /// [`VaultError::Outdated`] if the store does not show the newest; those of keys that this process cannot use.
    pub(crate) fn take_header(
        &self,
        member: Number,
        anchor: &Anchor,
        access: Access,
        ring: &KeyRing,
    ) -> Result<VaultHeader> {
        let until = Instant::now() + SHOWN_WITHIN;
        loop {
            match self.shown_header(member, anchor, access, ring) {
                // A network file system may show the one before for a moment.
                Err(error) if anchors::is_older_header(&error) && Instant::now() < until => {
                    std::thread::sleep(LOOK_AGAIN);
                }
                header => return header,
            }
        }
    }

    fn shown_header(&self, member: Number, anchor: &Anchor, access: Access, ring: &KeyRing) -> Result<VaultHeader> {
        let place = self.place(member)?;
        let header: VaultHeader = header_file::read(&place.file(name::HEADER))?;
        self.alone_with(header.id(), || {
            let mut kept = self.kept();
            let keys = &mut kept.get_mut(&member).ok_or(VaultError::KeyNotLoaded)?.keys;
            let mut now = keys.reopen(&header)?;
            check(anchor, access, &header, &now, &place.path())?;
            self.policy.check_oblivious(header.keys().keychain.oblivious)?;
            self.can_use(&now, keys)?;
            now.saw(&header);
            now.update_ring(ring);
            *keys = now;
            Ok(header)
        })
    }

    /// What opens a dataset in its turns, and its id. Its keys are kept from now on.
    ///
    /// # Errors
    /// [`VaultError::KeyNotLoaded`]: there is none here; [`VaultError::Stale`]: another one has taken its place; those
    /// of the store, and of the policy.
    pub(crate) fn dataset_by_turns(&self, forest: &Forest, member: Number) -> Result<(VaultId, TurnOpening)> {
        let id = forest.member(member)?.id;
        let parent = forest.parent(member).ok_or(VaultError::Stale)?;
        let dir = forest.backing_dir(member)?;
        let dir = dir.descriptor().ok_or(VaultError::Stale)?;
        let place = Place::held(dir, self.dir(parent)?.join(format!("(dataset {id})")))?;
        let header: VaultHeader = header_file::read(&place.file(name::HEADER))?;
        if header.id() != id {
            return Err(VaultError::Stale.into());
        }
        let brought = self.brought().get(&member).map(|keys| keys.reopen(&header)).transpose()?;
        let keys = match brought {
            Some(keys) => keys,
            None => {
                let by_parent = self.keys_by_parent(member, &header, &self.ring(parent)?)?;
                by_parent.ok_or(VaultError::KeyNotLoaded)?
            }
        };
        self.policy.check_ciphers(&header)?;
        self.policy.check_small_files(header.convergent_small_files())?;
        self.policy.check_oblivious(header.keys().keychain.oblivious)?;
        let ring = keys.key_ring(header.suite())?;
        let ((integrity, cached), cache) = (self.settings(Some(parent), &header), header.cache());
        let read_only = self.options.read_only || header.is_snapshot();
        let approved_only = self.policy.is_approved_only();
        let options = Options { integrity, read_only, approved_only, anchor: None, ..self.options.clone() };
        self.policy.anchors.lies_in(&id, &forest.member(parent)?.id);
        self.policy.anchors.report_to_server(&id, &self.options.events)?;
        let by_turns = Some(InTurns { place });
        self.kept()
            .insert(member, Kept { id, keys, suite: header.suite(), by_turns, integrity, cached, cache, anchor: None });
        forest.set_cached(member, cached)?;
        Ok((id, TurnOpening { header, ring, options }))
    }

    /// Sets who starts taking turns with datasets; once.
    pub(crate) fn drive_datasets(&self, drive: Drive) {
        // There is one way to take turns.
        let _ = self.driving.set(drive);
    }

    /// Starts taking turns with a dataset.
    ///
    /// # Errors
    /// Those of threads; hosts take no turns here.
    pub(super) fn take_turns_with(&self, member: Number) -> Result<(Arc<Turns>, Arc<dyn Locks>)> {
        let me = self.me.upgrade().ok_or(VaultError::KeyNotLoaded)?;
        let drive = self.driving.get().ok_or(VaultError::KeyNotLoaded)?;
        drive(&self.forest()?, &me, member)
    }

    /// Takes over what a header that was verified says of how its vault is read.
    ///
    /// # Errors
    /// [`VaultError::Stale`].
    pub(crate) fn follow_header(&self, forest: &Forest, member: Number, opening: &mut TurnOpening) -> Result<()> {
        let header = &opening.header;
        let (integrity, cached) = self.settings(forest.parent(member), header);
        opening.options.integrity = integrity;
        opening.options.read_only = self.options.read_only || header.is_snapshot();
        if let Some(kept) = self.kept().get_mut(&member) {
            (kept.integrity, kept.cached, kept.cache) = (integrity, cached, header.cache());
        }
        // What the kernel has goes at the end of a turn.
        for (one, cached) in self.cached_in(forest, member) {
            match forest.will_cache(one, cached) {
                // A dataset in it that is gone by now.
                Err(VaultError::Stale) if one != member => {}
                set => set?,
            }
        }
        Ok(())
    }

    /// The keys that were brought for a dataset have opened it.
    pub(crate) fn has_used_brought(&self, member: Number) {
        self.brought().remove(&member);
    }

    /// Drops the keys of a dataset that could not be opened.
    pub(crate) fn forget(&self, member: Number) {
        Opener::unloading(self, member);
    }

    /// Keys that open a dataset when its turns begin.
    pub(crate) fn bring(&self, member: Number, keys: Unlocked) {
        self.brought().insert(member, keys);
    }

    pub(super) fn brought(&self) -> MutexGuard<'_, HashMap<Number, Unlocked>> {
        self.brought.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
