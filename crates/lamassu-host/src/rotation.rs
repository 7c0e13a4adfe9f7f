//! New keys for new writes, and the retirement of old ones: epochs of a keychain are started, taken over from a zone,
//! listed, and retired.
//!
//! A retirement is proven first: everything in the vault is opened, decrypted and re-hashed with the remaining keys.

use crate::anchors::{Access, check};
use crate::control::protocol::{Epoch, Epochs};
use crate::error::At;
use crate::lock::{lock_out_writers, once_closed};
use crate::needing::Needing;
use crate::open::{Found, backend, options};
use crate::{Error, Policy, Result, WriterLock, hex};
use lamassu_crypto::KeyRing;
use lamassu_format::header::{Header, Slot, VaultHeader, ZoneFile};
use lamassu_format::name;
use lamassu_keys::administrator::Exchanged;
use lamassu_keys::dataset::parent_epoch;
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, Keychain, Material, NewSlot, Tier, Unlocked, Update, cost, header_file, unix_now};
use lamassu_store::Backend;
use lamassu_vault::check::{Progress, Tally};
use lamassu_vault::{Dataset, Options, Vault};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Starts an epoch, or takes over those of a zone. Returns the event for the history.
pub fn rotate(
    keys: &mut Unlocked,
    header: &mut VaultHeader,
    tier: Tier,
    leave_zone: bool,
    zone: Option<&(ZoneFile, Unlocked)>,
) -> Result<Event> {
    let Some((file, zone_keys)) = zone else {
        let number = keys.rotate_vault(header, tier, leave_zone, unix_now())?;
        return Ok(Event::new(EventKind::Rotated).epoch(tier, number));
    };
    let adopted = keys.adopt_zone(header, tier, file, zone_keys)?;
    let newest = adopted.last().ok_or(Error::ZoneNotAhead)?;
    Ok(Event::new(EventKind::Rotated).epoch(tier, *newest).detail("zone", file.id().to_string()))
}

/// Puts the history of the header in place into its place, if a change of the header was interrupted before that. A
/// change to another file key would set it aside: then no key of the new header opens it.
pub(crate) fn settle_history<H: Header>(keys: &Unlocked, header: &H, dir: &Path) {
    if let Err(error) = keys.history(dir, header).and_then(|history| Ok(history.put_in_place()?)) {
        tracing::warn!(%error, "the history of the present header is not in its place");
    }
}

/// The epochs of a keychain, without keys.
pub fn epochs(keychain: &Keychain) -> Epochs {
    let of = |tier| {
        let epochs = keychain.epochs(tier).iter();
        epochs.map(|e| Epoch { epoch: e.number(), created: e.created() }).collect()
    };
    Epochs { inner: of(Tier::Inner), outer: of(Tier::Outer) }
}

/// A vault that no process has open for writing, and whose header only the holder changes.
pub struct Alone {
    policy: Policy,
    dir: PathBuf,
    update: Update,
    header: VaultHeader,
    _lock: Option<WriterLock>,
}

/// The result of [`Alone::renew`].
#[derive(Debug)]
#[must_use = "the user has to be told which slots are gone, and what the history lacks"]
pub struct Renewed {
    /// the only slot now
    pub slot: u32,
    /// the other slots that existed before
    pub gone: Vec<Slot>,
    /// why the new history may lack copies of the header, clones or snapshots that were once on record; `None`: it has
    /// them all
    pub lacks: Option<String>,
}

/// Receives the progress of a proof. A reported problem is something that needs the epoch; it is intact while the epoch
/// stays.
pub trait Proof: Progress {
    /// The parent slot of this dataset, a path in the vault or the store, needs the epoch.
    fn dataset(&self, path: &Path);
}

impl Alone {
    /// Takes the writer's lock of the vault in `dir`, then that of its header.
    ///
    /// # Errors
    /// Those of [`Found::at`], [`Error::Locked`], [`Error::File`].
    pub fn with(policy: &Policy, dir: &Path) -> Result<Alone> {
        Found::at(policy, dir)?;
        let lock = once_closed(policy, dir, || lock_out_writers(policy, dir))?;
        let update = Update::begin(&dir.join(name::HEADER), &policy.witness())?;
        let header: VaultHeader = update.read()?;
        policy.check_ciphers(&header)?;
        Ok(Alone { policy: policy.clone(), dir: dir.into(), update, header, _lock: lock })
    }

    /// Its header before the change.
    pub fn header(&self) -> &VaultHeader {
        &self.header
    }

    /// Refuses a snapshot, which is never written.
    ///
    /// # Errors
    /// [`Error::Snapshot`].
    pub fn refuse_snapshot(&self) -> Result<()> {
        if self.header.is_snapshot() { Err(Error::Snapshot) } else { Ok(()) }
    }

    /// Starts an epoch, or takes over those of a zone: see [`rotate`].
    ///
    /// # Errors
    /// Those of [`rotate`] and of the header's file.
    pub fn rotate(
        mut self,
        keys: &mut Unlocked,
        tier: Tier,
        leave_zone: bool,
        zone: Option<&(ZoneFile, Unlocked)>,
    ) -> Result<Epochs> {
        let event = rotate(keys, &mut self.header, tier, leave_zone, zone)?;
        self.policy.refuse_older_anchor(&self.header, keys, &self.dir)?;
        self.policy.go_through()?;
        self.update.record(&mut self.header, keys, &[event])?;
        Ok(epochs(keys.keychain()))
    }

    /// Makes a new file key, which only a slot of `material` opens; the slot is like the one that opened. The copies of
    /// the header, clones and snapshots on record stay so: they have the same keychain.
    ///
    /// # Errors
    /// Those of keys and of the header's file; [`Error::History`] if another program holds the history.
    pub fn renew(mut self, keys: &mut Unlocked, material: &Material) -> Result<Renewed> {
        let (opened, gone): (Vec<Slot>, Vec<Slot>) =
            self.header.keys().slots.iter().cloned().partition(|slot| slot.id == keys.slot());
        let old = opened.into_iter().next();
        let label = old.as_ref().map_or_else(String::new, |s| s.label.clone());
        let cost = old.and_then(|s| s.argon2).unwrap_or(cost::FALLBACK);
        let new = NewSlot { material, cost, label: &label, created: unix_now() };
        settle_history(keys, &self.header, &self.dir);
        // No key of the new header opens the history that is there.
        let copies = keys.history(&self.dir, &self.header)?.copies()?;
        let lacks = copies.lacks().map(str::to_owned);
        let slot = keys.renew(&mut self.header, &new)?;
        let event =
            Event::new(EventKind::SlotChanged).slot(slot).detail("what", "a fresh file key; this slot is the only one");
        self.policy.refuse_older_anchor(&self.header, keys, &self.dir)?;
        self.policy.go_through()?;
        self.update.record_renewed(&mut self.header, keys, copies, &[event])?;
        Ok(Renewed { slot, gone, lacks })
    }

    /// Replaces the administrator's key by a new one, which the old one signs. Returns the new header too.
    ///
    /// # Errors
    /// Those of keys and of the header's file.
    pub fn exchange_administrator(
        mut self,
        keys: &mut Unlocked,
        material: &Material,
    ) -> Result<(Exchanged, VaultHeader)> {
        let done = keys.exchange_administrator(&mut self.header, material)?;
        let event = Event::new(EventKind::AdminSet)
            .slot(keys.slot())
            .detail("key", hex(&done.public.0))
            .detail("instead_of", hex(&done.before.0));
        self.policy.refuse_older_anchor(&self.header, keys, &self.dir)?;
        self.policy.go_through()?;
        self.update.record(&mut self.header, keys, &[event])?;
        Ok((done, self.header))
    }

    /// Proves that nothing needs an epoch, and removes it from the keychain. Returns the header without it.
    ///
    /// # Errors
    /// [`Error::EpochNeeded`], [`Error::LostNotEmpty`]; those of keys, the store, and the header's file.
    pub fn retire(mut self, keys: &mut Unlocked, tier: Tier, epoch: u32, shown: &dyn Proof) -> Result<VaultHeader> {
        self.prove(keys, tier, epoch, shown)?;
        keys.retire(&mut self.header, tier, epoch)?;
        let event = Event::new(EventKind::Retired).epoch(tier, epoch);
        self.policy.refuse_older_anchor(&self.header, keys, &self.dir)?;
        self.policy.go_through()?;
        self.update.record(&mut self.header, keys, &[event])?;
        Ok(self.header)
    }

    /// Opens everything with the remaining keys.
    fn prove(&self, keys: &Unlocked, tier: Tier, epoch: u32, shown: &dyn Proof) -> Result<()> {
        let ring = keys.ring_without(&self.header, tier, epoch)?;
        // For writing: the header is replaced after the proof, and it is settled now which of two headers is the
        // newest.
        let anchor = self.policy.anchors.of_header(&self.header, Access::Write)?;
        if let Some(anchor) = &anchor {
            check(anchor, Access::Read, &self.header, keys, &self.dir)?;
        }
        self.refuse_lost()?;
        let backend = backend(&self.dir)?;
        backend.sync().map_err(|source| Error::CannotSync { source })?;
        let vault = Vault::open(Arc::new(backend), &self.header, ring.clone(), Options { anchor, ..options(true) })
            .map_err(|source| Error::CannotOpen { dir: self.dir.clone(), source })?;
        let report = vault.check(&[], false, shown)?;
        vault.close()?;
        let (slots, work) = match tier {
            Tier::Outer => {
                let all = keys.key_ring(self.header.suite())?;
                (self.datasets_needing(&report.datasets, &ring, &all, shown)?, "outer")
            }
            Tier::Inner => (0, "full"),
        };
        let needing = Needing::of(report.problems.iter().filter(|p| !p.harmless), slots);
        // Not all problems are stored, but all are counted.
        let Tally { damaged, undone, repaired, .. } = report.tally();
        match damaged + undone + repaired == 0 && needing.is_nothing() {
            true => Ok(()),
            false => Err(Error::EpochNeeded { tier: tier.name(), epoch, needing, work }),
        }
    }

    /// Refuses while lamassu.lost has files: the keys that they need are unknown.
    fn refuse_lost(&self) -> Result<()> {
        let lost = self.dir.join(name::LOST);
        match std::fs::read_dir(&lost).map(|mut entries| entries.next().is_none()) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::LostNotEmpty { dir: lost }),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(Error::Local { op: "list", path: lost, source }),
        }
    }

    /// Counts datasets whose parent slot is sealed under the epoch.
    fn datasets_needing(&self, found: &[Dataset], left: &KeyRing, all: &KeyRing, shown: &dyn Proof) -> Result<usize> {
        let mut needing = 0;
        for dataset in found {
            let dir = self.dir.join(&dataset.stored);
            let header: VaultHeader = header_file::read(&dir.join(name::HEADER))?;
            // An outdated header would not show what the newest one needs.
            self.policy.anchors.refuse_older_header(&header).at(&dir)?;
            if parent_epoch(&header, left).is_none() && parent_epoch(&header, all).is_some() {
                needing += 1;
                shown.dataset(dataset.plain.as_ref().unwrap_or(&dataset.stored));
            }
        }
        Ok(needing)
    }
}
