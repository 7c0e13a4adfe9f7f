//! Opening, unloading and loading members, and operations on all members at once.

use super::member::{Inside, KnownMember, Member, State};
use super::{Forest, Number, Opening, ROOT_MEMBER, Unverified, global, read_header, tell_damage};
use crate::root::Top;
use crate::{Ino, Owner, ROOT, Result, Vault, VaultError};
use lamassu_format::header::VaultHeader;
use lamassu_format::root::RootRecord;
use lamassu_store::Backend;
use parking_lot::MutexGuard;
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long unloading waits for a vault that requests still use. They end by themselves, and the last one drops the
/// keys.
const ENDING: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(1);
/// References to the vault that unloading itself holds: its own, and [`Owed::ending`].
const HELD_HERE: usize = 2;
/// Threads that make the kernel drop its caches.
const DROPPING: usize = 16;

/// A dataset that was unloaded and is to be removed. It is not loaded again in between.
pub struct Destroying<'a> {
    forest: &'a Forest,
    slot: Arc<KnownMember>,
    _changing: MutexGuard<'a, ()>,
}

impl Destroying<'_> {
    /// Removes it with everything in it. Returns where it was, for [`Forest::changed_beside_kernel`], and what is left
    /// to be deleted, as [`Vault::remove_dataset`].
    ///
    /// # Errors
    /// Those of [`Vault::remove_dataset`].
    pub fn remove(self) -> Result<((Ino, OsString), Option<OsString>)> {
        let Destroying { forest, slot, .. } = &self;
        let (dir, name) = forest.plain_place(slot.number).ok_or(VaultError::KeyNotLoaded)?;
        // It may have been renamed meanwhile, and another one may have its name.
        let left = forest.at(dir)?.remove_dataset(super::local(dir), &name, slot.store)?;
        forest.table.write().remove(&slot.number);
        forest.crossings.write().retain(|_, n| *n != slot.number);
        Ok(((dir, name), left))
    }
}

impl Forest {
    /// Opens a member that was only sighted.
    pub(super) fn open_slot(&self, slot: &Arc<KnownMember>) -> Result<Arc<Vault>> {
        let _one = slot.opening.lock();
        if let Some(vault) = slot.loaded() {
            return Ok(vault);
        }
        if slot.state() != State::Sighted {
            return Err(VaultError::KeyNotLoaded);
        }
        let _open = self.unfrozen()?;
        let (parent, ino) = slot.place().ok_or(VaultError::KeyNotLoaded)?;
        let above = self.vault(parent).ok_or(VaultError::KeyNotLoaded)?;
        let told = |error: &VaultError| tell_damage(&above, ino, error);
        let header = read_header(Some(&above), &slot.backend.root()).inspect_err(told)?;
        if header.id() != slot.id {
            return Err(VaultError::Stale);
        }
        match self.opener.open(slot.number, (parent, &above), header).inspect_err(told)? {
            Some(opening) => self.fill(slot, opening),
            None => {
                *slot.inside.write() = Inside::Locked;
                Err(VaultError::KeyNotLoaded)
            }
        }
    }

    /// Opens the vault of a member; the caller holds its `opening`. The opener drops the keys if that fails.
    fn fill(&self, slot: &KnownMember, opening: Opening) -> Result<Arc<Vault>> {
        self.filled(slot, opening).inspect_err(|_| self.opener.unloading(slot.number))
    }

    fn filled(&self, slot: &KnownMember, Opening { header, ring, options, cached }: Opening) -> Result<Arc<Vault>> {
        let top = if slot.number == ROOT_MEMBER { Top::FileSystem } else { Top::Dataset };
        let vault = Vault::open_with(slot.backend.clone(), &header, ring, options, self.engine.clone(), top);
        let vault = Arc::new(vault?);
        if let Some(row) = self.entry_row(slot)? {
            vault.root_permissions.follow(RootRecord { mode: row.mode, uid: row.uid, gid: row.gid });
        }
        slot.set_cached(cached);
        self.opener.opened(slot.number, &vault);
        slot.set_loaded(vault.clone());
        Ok(vault)
    }

    /// What is known of a member.
    ///
    /// # Errors
    /// [`VaultError::Stale`].
    pub fn member(&self, number: Number) -> Result<Member> {
        let slot = self.slot(number)?;
        Ok(Member { number, id: slot.id, state: slot.state() })
    }

    /// The header of a member, as it is in the store now.
    ///
    /// # Errors
    /// [`VaultError::Damaged`], those of the store.
    pub fn header(&self, number: Number) -> Result<Unverified<VaultHeader>> {
        let slot = self.slot(number)?;
        let above = || self.vault(slot.place()?.0);
        read_header(slot.loaded().or_else(above).as_deref(), &slot.backend.root()).map(Unverified)
    }

    /// The same, also if no vault is open. A header that only its owner's rights would show is not read.
    ///
    /// # Errors
    /// As [`Forest::header`].
    pub fn stored_header(&self, number: Number) -> Result<Unverified<VaultHeader>> {
        read_header(None, &self.slot(number)?.backend.root()).map(Unverified)
    }

    /// Sets whether the kernel may cache contents of a member's files that are opened from now on. Contents that it may
    /// no longer cache are dropped.
    ///
    /// # Errors
    /// [`VaultError::Stale`].
    pub fn set_cached(&self, number: Number, cached: bool) -> Result<()> {
        self.will_cache(number, cached)?;
        let slot = self.slot(number)?;
        if let Some(vault) = slot.loaded().filter(|_| !cached) {
            self.drop_cached(&slot, &vault);
        }
        Ok(())
    }

    /// Sets the same, and drops nothing.
    ///
    /// # Errors
    /// [`VaultError::Stale`].
    pub fn will_cache(&self, number: Number, cached: bool) -> Result<()> {
        self.slot(number)?.set_cached(cached);
        Ok(())
    }

    /// Members at or below one, the deepest first.
    pub(super) fn at_or_below(&self, number: Number) -> Vec<Arc<KnownMember>> {
        let mut found: Vec<(usize, Arc<KnownMember>)> = self
            .slots()
            .into_iter()
            .filter_map(|slot| {
                let (mut depth, mut above) = (0, slot.number);
                while above != number {
                    (above, _) = self.slot(above).ok()?.place()?;
                    depth += 1;
                }
                Some((depth, slot))
            })
            .collect();
        found.sort_by_key(|(depth, _)| std::cmp::Reverse(*depth));
        found.into_iter().map(|(_, slot)| slot).collect()
    }

    /// A member and those in it, the ones above before those in them.
    pub fn at_and_below(&self, number: Number) -> Vec<Number> {
        self.at_or_below(number).iter().rev().map(|slot| slot.number).collect()
    }

    /// Files that are open in a member and in those below it.
    pub fn open_files(&self, number: Number) -> usize {
        self.at_or_below(number).iter().map(|slot| self.open_files_of(slot)).sum()
    }

    /// Closes a member and those in it, deepest first, and drops their keys. The kernel first writes back and drops
    /// what it caches of them. Files that are open there can no longer be read or written. Returns whether any was
    /// open.
    ///
    /// # Errors
    /// [`VaultError::Frozen`]; the first failed commit: all are closed nevertheless.
    pub fn unload(&self, number: Number) -> Result<bool> {
        self.unload_by(&self.change()?, number)
    }

    fn unload_by(&self, _changing: &MutexGuard<'_, ()>, number: Number) -> Result<bool> {
        if self.frozen.load(Ordering::Acquire) {
            return Err(VaultError::Frozen);
        }
        if number == ROOT_MEMBER && self.hosts_take_turns() {
            return Err(VaultError::Refused("hosts use this vault in turn: unmount it, and its keys are gone here"));
        }
        let by_request: Vec<Number> =
            self.at_or_below(number).iter().filter(|s| s.state() == State::Unloaded).map(|s| s.number).collect();
        let mut done = Ok(());
        let (mut any, mut closed_here) = (false, HashSet::new());
        let slots = loop {
            let slots = self.at_or_below(number);
            for slot in &slots {
                let retired = self.retire_turns(slot);
                if !matches!(retired, Ok(false)) {
                    any = true;
                    closed_here.insert(slot.number);
                    self.opener.unloading(slot.number);
                    done = done.and(retired.map(drop));
                }
            }
            // After this no opening is under way, and none begins.
            let mut is_used_again = false;
            for slot in &slots {
                let _opening = slot.opening.lock();
                if slot.by_turns().is_some() && slot.number != ROOT_MEMBER {
                    is_used_again = true;
                    continue;
                }
                if slot.loaded().is_none() {
                    *slot.inside.write() = Inside::Unloaded;
                    // Keys of an opening that failed may be kept, too.
                    if closed_here.insert(slot.number) {
                        self.opener.unloading(slot.number);
                    }
                }
            }
            if is_used_again {
                continue;
            }
            let loaded: Vec<_> = slots.iter().filter_map(|s| Some((s, s.loaded()?))).collect();
            if loaded.is_empty() {
                break slots;
            }
            for (slot, vault) in loaded {
                any = true;
                closed_here.insert(slot.number);
                let closed = self.unload_one(slot, vault);
                done = done.and(closed);
            }
        };
        // Members that were closed because they lie in another open again with it.
        for slot in slots.iter().filter(|s| s.number != number) {
            *slot.place.lock() = None;
            if !by_request.contains(&slot.number) {
                *slot.inside.write() = Inside::Sighted;
            }
        }
        let below: Vec<Number> = slots.iter().map(|s| s.number).collect();
        self.crossings.write().retain(|ino, _| !below.contains(&super::member_of(*ino)));
        done.map(|()| any)
    }

    fn unload_one(&self, slot: &KnownMember, vault: Arc<Vault>) -> Result<()> {
        // First, while the keys are loaded: dirty data of the kernel need them.
        self.drop_cached(slot, &vault);
        // References that are given back from here on still belong to this vault, until they are counted.
        slot.owed.lock().ending = Some(vault.clone());
        {
            let _opening = slot.opening.lock();
            *slot.inside.write() = Inside::Unloaded;
        }
        // References that requests under way hand out are counted too, and their names are no longer shown.
        let until = Instant::now() + ENDING;
        while Arc::strong_count(&vault) > HELD_HERE && Instant::now() < until {
            std::thread::sleep(POLL);
        }
        if Arc::strong_count(&vault) > HELD_HERE {
            tracing::warn!(
                member = slot.number,
                "a request still uses a vault that was unloaded; its keys go when that ends"
            );
        }
        let names = self.names_in_root(slot, &vault);
        let place = self.plain_place(slot.number);
        // Closing seals its last records with its keys, so the keys are dropped after that.
        let closed = vault.close();
        self.opener.unloading(slot.number);
        self.drop_cached(slot, &vault);
        self.drop_names(names.into_iter().chain(place));
        let mut owed = slot.owed.lock();
        owed.ending = None;
        for (ino, count) in vault.nodes.lock().references() {
            *owed.counts.entry(ino).or_default() += count;
        }
        closed
    }

    /// Makes the kernel drop names, and everything below them. The order of locks: none that requests need is held.
    pub(super) fn drop_names(&self, names: impl IntoIterator<Item = (Ino, OsString)>) {
        if let Some(cache) = self.cache.get() {
            self.dropping.drop_names(cache, names);
        }
    }

    /// Makes the kernel drop all that it caches of open vaults. Several threads do it, so that a request that holds a
    /// page delays only that one. A program that holds the root's directory delays names in it, and nothing else.
    pub fn drop_all_cached(&self) {
        let Some(cache) = self.cache.get() else { return };
        let mut known: Vec<Ino> = Vec::new();
        let open: Vec<_> = self.slots().into_iter().filter_map(|slot| Some((slot.loaded()?, slot))).collect();
        for (vault, slot) in &open {
            known.extend(vault.nodes.lock().references().into_iter().map(|(ino, _)| global(slot.number, ino)));
        }
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| self.drop_names(open.iter().flat_map(|(vault, slot)| self.names_in_root(slot, vault))));
            for _ in 0..DROPPING {
                scope.spawn(|| {
                    while let Some(ino) = known.get(next.fetch_add(1, Ordering::Relaxed)) {
                        cache.drop_inode(*ino);
                    }
                });
            }
        });
    }

    /// Names that make the kernel drop all names of a member. A dataset's names go with the name of its root.
    fn names_in_root(&self, slot: &KnownMember, vault: &Vault) -> Vec<(Ino, OsString)> {
        if slot.number != ROOT_MEMBER {
            return Vec::new();
        }
        let absent = self.cache.get().map(|cache| cache.take_absent()).unwrap_or_default();
        let names = vault.names_in_root().into_iter().chain(absent);
        names.map(|name| (global(ROOT_MEMBER, ROOT), name)).collect()
    }

    fn drop_cached(&self, slot: &KnownMember, vault: &Vault) {
        let Some(cache) = self.cache.get() else { return };
        let known: Vec<Ino> = vault.nodes.lock().references().into_iter().map(|(ino, _)| ino).collect();
        known.into_iter().for_each(|ino| cache.drop_inode(global(slot.number, ino)));
    }

    /// Opens a member with the caller's keys. `opening` is called for them once it is certain that the member may be
    /// opened.
    ///
    /// # Errors
    /// Those of `opening` and of [`Vault::open`]; [`VaultError::Refused`] if it is open, [`VaultError::Frozen`],
    /// [`VaultError::KeyNotLoaded`] if the vault it lies in is not open.
    pub fn load<E: From<VaultError>>(
        &self,
        number: Number,
        opening: impl FnOnce() -> std::result::Result<Opening, E>,
    ) -> std::result::Result<Arc<Vault>, E> {
        let _one = self.change()?;
        let slot = self.slot(number)?;
        let _opening = slot.opening.lock();
        self.may_load(&slot)?;
        let opening = opening()?;
        if opening.header.id() != slot.id {
            self.opener.unloading(number);
            return Err(VaultError::Stale.into());
        }
        let vault = self.fill(&slot, opening)?;
        self.shown_anew(&slot);
        Ok(vault)
    }

    /// Opens a member with the opener's keys.
    ///
    /// # Errors
    /// [`VaultError::KeyNotLoaded`] if the opener has none, and as [`Forest::load`].
    pub fn load_again(&self, number: Number) -> Result<Arc<Vault>> {
        let _one = self.change()?;
        let slot = self.slot(number)?;
        {
            let _opening = slot.opening.lock();
            self.may_load(&slot)?;
            if number == ROOT_MEMBER {
                return Err(VaultError::KeyNotLoaded);
            }
            *slot.inside.write() = Inside::Sighted;
        }
        let vault = self.open_slot(&slot)?;
        self.shown_anew(&slot);
        Ok(vault)
    }

    fn may_load(&self, slot: &KnownMember) -> Result<()> {
        if slot.loaded().is_some() {
            return Err(VaultError::Refused("its key is loaded already"));
        }
        if self.frozen.load(Ordering::Acquire) {
            return Err(VaultError::Frozen);
        }
        let lies_in_an_open_one = || slot.place().is_some_and(|(parent, _)| self.vault(parent).is_some());
        if slot.number != ROOT_MEMBER && !lies_in_an_open_one() {
            return Err(VaultError::KeyNotLoaded);
        }
        Ok(())
    }

    fn shown_anew(&self, slot: &KnownMember) {
        if let Some(cache) = self.cache.get() {
            cache.drop_inode(global(slot.number, ROOT));
        }
    }

    /// Makes a dataset in directory `parent`; see [`Vault::make_dataset`]. Returns its member. The kernel may have
    /// cached that the name does not exist: see [`Forest::changed_beside_kernel`].
    ///
    /// # Errors
    /// Those of [`Vault::make_dataset`] and of [`Forest::at`].
    pub fn make_dataset<E: From<VaultError>>(
        &self,
        parent: Ino,
        name: &OsStr,
        mode: u32,
        owner: Owner,
        fill: impl FnOnce(&dyn Backend, &Path) -> std::result::Result<(), E>,
    ) -> std::result::Result<Number, E> {
        let vault = self.at(parent)?;
        let entry = vault.make_dataset(super::local(parent), name, mode, owner, fill)?;
        let entry = self.entered(&vault, super::member_of(parent), entry)?;
        Ok(super::member_of(entry.attr.ino))
    }

    /// Unloads a dataset that is about to be removed. With `forced` also while files in it are open.
    ///
    /// # Errors
    /// [`VaultError::Refused`] for files that are open, and for the mount's own vault; [`VaultError::Frozen`].
    pub fn unload_to_destroy(&self, number: Number, forced: bool) -> Result<Destroying<'_>> {
        if number == ROOT_MEMBER {
            return Err(VaultError::Refused("this is the mount's own vault, not a dataset"));
        }
        let changing = self.change()?;
        if !forced && self.open_files(number) > 0 {
            return Err(VaultError::Refused("files in it are open: close them, or give --force"));
        }
        let slot = self.slot(number)?;
        if let Err(error) = self.unload_by(&changing, number) {
            if slot.loaded().is_some() {
                return Err(error);
            }
            tracing::warn!(%error, "a dataset that is destroyed could not be committed");
        }
        Ok(Destroying { forest: self, slot, _changing: changing })
    }

    /// Sets after how long without requests and open files everything is unloaded.
    pub fn unload_after(&self, idle: Duration) {
        self.idle.lock().after = Some(idle);
    }

    fn is_rekeying(&self) -> bool {
        self.slots().iter().filter_map(|s| s.loaded()).any(|vault| vault.rekeying.is_locked())
    }

    /// Whether that time is over.
    pub(super) fn is_idle(&self) -> bool {
        let mut idle = self.idle.lock();
        let Some(after) = idle.after else { return false };
        if self.used.swap(false, Ordering::Relaxed) || self.open_files(ROOT_MEMBER) > 0 || self.is_rekeying() {
            idle.since = Instant::now();
        }
        idle.since.elapsed() >= after && self.root.loaded().is_some()
    }

    pub(super) fn each_loaded(&self, mut call: impl FnMut(&Vault) -> Result<()>) -> Result<()> {
        let loaded: Vec<_> = self.at_or_below(ROOT_MEMBER).iter().filter_map(|s| s.loaded()).collect();
        // All of them, even if one fails.
        let mut done = Ok(());
        for vault in &loaded {
            let now = call(vault);
            done = done.and(now);
        }
        done
    }

    /// Everything committed, durable and settled. With turns: committed and durable. If this host can have no turn, the
    /// next one settles.
    ///
    /// # Errors
    /// As [`Vault::sync_all`].
    pub fn sync_all(&self) -> Result<()> {
        let sync = |vault: &Vault| {
            let loses_nothing = self.hosts_take_turns() && vault.is_committed();
            vault.sync_all().or_else(|error| if loses_nothing { Ok(()) } else { Err(error) })
        };
        self.each_open(sync)
    }

    /// Holds off a freeze until the returned value is dropped: for code that writes to the store outside the vaults,
    /// such as to their headers.
    ///
    /// # Errors
    /// [`VaultError::Frozen`].
    pub fn unfrozen(&self) -> Result<impl Sized + '_> {
        let open = self.opens.read();
        if self.frozen.load(Ordering::Acquire) { Err(VaultError::Frozen) } else { Ok(open) }
    }

    /// Whether changes wait for [`Forest::thaw`].
    pub fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Acquire)
    }
}
