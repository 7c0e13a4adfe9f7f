//! The daemon's side: one [`Served`] per mount, which answers. It keeps the file keys, so slots change without the old key; each change of a header takes the
//! header's lock, reads it anew, and is written down with who asked for it. A request is about the vault whose root was called, or about the directory.

use super::datasets;
use super::job::{self, Job, Task};
use super::keeper::Keeper;
use super::parcel::Channels;
use super::protocol::{
    Answer, Changed, Channel, Epoch, Epochs, Failed, Parcel, Progress, Request, Status, UNKNOWN, ZoneParcel,
};
use crate::cmd::key::{about, check_label};
use crate::fault::Fault;
use crate::open::{Opened, Unsealed};
use crate::{keys, text};
use anyhow::{Context, Result};
use data_encoding::HEXLOWER;
use lamassu_format::header::{Header, VaultHeader, ZoneFile};
use lamassu_format::name;
use lamassu_fuse::control::{Caller, Calls};
use lamassu_keys::history::Kind;
use lamassu_keys::{Event, KeyError, Keychain, NewSlot, Role, Terms, Tier, Unlocked, Update, header_file, unix_now};
use lamassu_vault::forest::{Number, ROOT_VOLUME};
use lamassu_vault::{Forest, Ino, VaultError};
use serde::Serialize;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use zeroize::Zeroizing;

/// The vaults that this process has open, with the keys that opened them.
pub struct Served {
    forest: Arc<Forest>,
    keeper: Arc<Keeper>,
    read_only: bool,
    channels: Channels,
    jobs: Mutex<HashMap<Number, Arc<Job>>>,
}

impl Served {
    /// Serves `vault` and the datasets in it. Takes over the keys that opened it; `keeper` is of its directory.
    pub fn new(unsealed: Unsealed, opened: Opened, keeper: Arc<Keeper>) -> Result<Arc<Served>> {
        let Unsealed { found, keys } = unsealed;
        let (id, read_only) = (found.header.id(), opened.read_only);
        let opening = keeper.opening(ROOT_VOLUME, None, found.header, keys)?;
        let forest = Forest::new(opened.vault, opened.backend, id, opening.cached, keeper.clone())?;
        keeper.serve(&forest);
        Ok(Arc::new(Served { forest, keeper, read_only, channels: Channels::default(), jobs: Mutex::default() }))
    }

    /// The file system of all these vaults.
    pub fn forest(&self) -> &Arc<Forest> {
        &self.forest
    }

    pub fn keeper(&self) -> &Arc<Keeper> {
        &self.keeper
    }

    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// What answers the calls of a mount.
    pub fn calls(self: &Arc<Self>) -> Calls {
        let served = self.clone();
        Arc::new(move |caller, dir, request| served.answer(caller, dir, request))
    }

    fn answer(&self, caller: &Caller, dir: Ino, request: &[u8]) -> Zeroizing<Vec<u8>> {
        // The parser's own words may quote a request; the caller has them, the log must not.
        let parsed = serde_json::from_slice(request).with_context(|| format!("{UNKNOWN}: it is of another version"));
        let answered = parsed.and_then(|request| self.carry_out(caller, dir, request));
        answered.unwrap_or_else(|error| {
            let failed = job::failed(&error);
            tracing::debug!(code = failed.code, uid = caller.uid, "a request failed");
            refused(failed)
        })
    }

    fn carry_out(&self, caller: &Caller, dir: Ino, request: Request) -> Result<Zeroizing<Vec<u8>>> {
        // What is not listed here is not a delegate's to ask.
        let is_anybodys = matches!(
            request,
            Request::Status {}
                | Request::CreateDataset { .. }
                | Request::ListDatasets { .. }
                | Request::Unload {}
                | Request::Load { .. }
        );
        if !caller.is_owner && !is_anybodys {
            return Err(Fault::NotPermitted.into());
        }
        match request {
            Request::Status {} => done(&self.status(self.volume(dir)?)?),
            Request::Sync {} => done(&self.sync()?),
            Request::Channel {} => {
                let (number, key) = self.channels.add()?;
                let mut digits = Zeroizing::new([0; 64]);
                HEXLOWER.encode_mut(key.expose(), &mut *digits);
                let key = std::str::from_utf8(&*digits).unwrap_or_default();
                done(&Channel { number, key })
            }
            Request::AddSlot { secret, label, use_only, expires } => {
                let role = if use_only { Role::Use } else { Role::Administrator };
                done(&self.add_slot(caller, self.volume(dir)?, &secret, &label, Terms { role, expires })?)
            }
            Request::ChangeSlot { secret, slot, label, use_only, expires } => {
                let role = use_only.then_some(Role::Use);
                done(&self.change_slot(caller, self.volume(dir)?, &secret, slot, label, (role, expires))?)
            }
            Request::RemoveSlot { slot } => done(&self.change(caller, self.volume(dir)?, |keys, header| {
                let event = about(Kind::SlotRemoved, slot, header);
                Ok((keys.remove_slot(header, slot)?.to_string(), event))
            })?),
            Request::Epochs {} => {
                let kept = self.keeper.kept();
                let kept = kept.get(&self.volume(dir)?).ok_or(VaultError::KeyNotLoaded)?;
                done(&epochs(kept.keys.keychain()))
            }
            Request::Rotate { tier, leave_zone, zone } => {
                done(&self.rotate(caller, self.volume(dir)?, tier, leave_zone, zone)?)
            }
            Request::RekeyStart { full, bytes_per_second } => {
                done(&self.rekey(self.volume(dir)?, Task { full, bytes_per_second, uid: caller.uid })?)
            }
            Request::RekeyStatus {} => done(&self.job(self.volume(dir)?)?),
            Request::RekeyCancel {} => {
                if let Some(job) = self.jobs().get(&self.volume(dir)?) {
                    job.cancel();
                }
                done(&())
            }
            Request::CreateDataset { name, spec, secret } => {
                let own = datasets::unpacked(&self.channels, secret.as_ref())?;
                let name = datasets::name_from_hex(&name)?;
                done(&self.create_dataset(caller, dir, &name, &spec, own.as_ref())?)
            }
            Request::ListDatasets { after } => done(&self.list_datasets(caller, dir, after.as_deref())?),
            Request::SetDataset { properties, inherit } => {
                done(&self.set_dataset(caller, dir, &properties, inherit)?)
            }
            Request::DestroyDataset { force } => done(&self.destroy_dataset(caller, dir, force)?),
            Request::Unload {} => done(&self.unload(caller, dir)?),
            Request::Load { secret, slot } => {
                let own = datasets::unpacked(&self.channels, secret.as_ref())?;
                done(&self.load(caller, dir, own.as_ref().map(|(material, _)| (material, slot)))?)
            }
        }
    }

    pub fn status(&self, volume: Number) -> Result<Status> {
        Ok(Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            vault: text::hex(&self.forest.volume(volume)?.id),
            dir: self.keeper.dir(volume)?.to_string_lossy().into_owned(),
            read_only: self.read_only,
            open_files: self.forest.open_files(volume),
        })
    }

    /// Everything into the store, of all vaults that are open. What fails stays in memory, to be tried again; but what damage forbids is given up.
    fn sync(&self) -> Result<()> {
        Ok(self.forest.sync_all()?)
    }

    /// Changes the header of a volume, and gives the open vault the keys it then has.
    pub fn change<T>(
        &self,
        caller: &Caller,
        volume: Number,
        change: impl FnOnce(&mut Unlocked, &mut VaultHeader) -> Result<(T, Event)>,
    ) -> Result<T> {
        self.changed(volume, |keys, header| {
            change(keys, header).map(|(done, event)| (done, vec![event.by(caller.uid)]))
        })
    }

    /// The same, of what the history need not know.
    pub fn change_without_event<T>(
        &self,
        volume: Number,
        change: impl FnOnce(&mut Unlocked, &mut VaultHeader) -> Result<T>,
    ) -> Result<T> {
        self.changed(volume, |keys, header| Ok((change(keys, header)?, Vec::new())))
    }

    fn changed<T>(
        &self,
        volume: Number,
        change: impl FnOnce(&mut Unlocked, &mut VaultHeader) -> Result<(T, Vec<Event>)>,
    ) -> Result<T> {
        if self.read_only {
            return Err(Fault::ReadOnlyMount.into());
        }
        if self.forest.is_frozen() {
            return Err(Fault::Frozen.into());
        }
        let vault = self.forest.vault(volume).ok_or(VaultError::KeyNotLoaded)?;
        let place = self.keeper.place(volume)?;
        let mut all = self.keeper.kept();
        let keys = &mut all.get_mut(&volume).ok_or(VaultError::KeyNotLoaded)?.keys;
        let update = Update::begin(&place.file(name::HEADER))?;
        let mut header: VaultHeader = update.read()?;
        let mut now = keys.reopen(&header)?;
        let (done, events) = change(&mut now, &mut header)?;
        update.record(&mut header, &now, &events)?;
        now.update_ring(vault.ring());
        *keys = now;
        Ok(done)
    }

    fn add_slot(&self, caller: &Caller, volume: Number, secret: &Parcel, label: &str, terms: Terms) -> Result<u32> {
        check_label(label)?;
        let (material, cost) = self.channels.unpack(secret)?;
        self.change(caller, volume, |keys, header| {
            let new = NewSlot { material: &material, cost, label, created: unix_now() };
            let id = keys.add_slot_on(header, &new, terms)?;
            Ok((id, about(Kind::SlotAdded, id, header)))
        })
    }

    fn change_slot(
        &self,
        caller: &Caller,
        volume: Number,
        secret: &Parcel,
        slot: u32,
        label: Option<String>,
        (role, expires): (Option<Role>, Option<u64>),
    ) -> Result<Changed> {
        label.as_deref().map_or(Ok(()), check_label)?;
        let (material, cost) = self.channels.unpack(secret)?;
        self.change(caller, volume, |keys, header| {
            let old = header.keys().slot(slot).map(|s| s.label.clone());
            let label = label.or(old).ok_or(KeyError::NoSlot { id: slot })?;
            let new = NewSlot { material: &material, cost, label: &label, created: unix_now() };
            let kept = header.keys().slot(slot).map_or(Role::Administrator, |s| s.role);
            let role = role.unwrap_or(kept);
            let (id, removed) = keys.change_slot_on(header, slot, &new, Terms { role, expires })?;
            let event = about(Kind::SlotChanged, id, header).detail("instead_of", slot);
            Ok((Changed { id, removed: removed.to_string() }, event))
        })
    }

    fn rotate(
        &self,
        caller: &Caller,
        volume: Number,
        tier: Tier,
        leave_zone: bool,
        zone: Option<ZoneParcel>,
    ) -> Result<Epochs> {
        let zone = match zone {
            Some(ZoneParcel { file, secret }) => {
                let (material, _) = self.channels.unpack(&secret)?;
                let file = ZoneFile::parse(file.as_bytes()).map_err(KeyError::from)?;
                let keys = keys::try_slots(&file, &material, None)?;
                Some((file, keys))
            }
            None => None,
        };
        self.change(caller, volume, |keys, header| {
            let event = rotate(keys, header, tier, leave_zone, zone.as_ref())?;
            Ok((epochs(keys.keychain()), event))
        })
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<Number, Arc<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to re-key a volume, unless the same is under way there.
    pub fn rekey(&self, volume: Number, task: Task) -> Result<Progress> {
        if self.read_only {
            return Err(Fault::ReadOnlyMount.into());
        }
        let mut jobs = self.jobs();
        if let Some(job) = jobs.get(&volume).filter(|job| job.is_under_way_with(task.full)) {
            return Ok(job.progress());
        }
        // One that does something else and is still under way makes this one fail, by the vault's own lock.
        let vault = self.forest.vault(volume).ok_or(VaultError::KeyNotLoaded)?;
        let place = self.keeper.place(volume)?;
        let header: VaultHeader = header_file::read(&place.file(name::HEADER))?;
        let history = {
            let kept = self.keeper.kept();
            let kept = kept.get(&volume).ok_or(VaultError::KeyNotLoaded)?;
            kept.keys.history(&place.path(), &header)?
        };
        // The directory as it is when it is met: it may have been moved. No keys are kept here: they go with the vault.
        let keeper = self.keeper.clone();
        let reseal = move |stored: &Path| {
            let above = keeper.vault(volume)?;
            datasets::reseal(&keeper.place(volume)?.below(stored)?, above.ring(), task.uid)
        };
        let started = Job::start(vault, (history, place), task, Box::new(reseal))?;
        jobs.insert(volume, started.clone());
        Ok(started.progress())
    }

    /// How far that is.
    pub fn job(&self, volume: Number) -> Result<Progress> {
        Ok(self.jobs().get(&volume).ok_or(Fault::NoRekey)?.progress())
    }

    /// Ends the re-keying of a volume and of those in it: they are to be closed.
    pub fn end_jobs(&self, volume: Number) {
        let jobs = self.jobs();
        jobs.iter().filter(|(n, _)| self.forest.is_below(**n, volume)).for_each(|(_, job)| job.cancel());
    }
}

/// Starts an epoch, or takes those of a zone over; what the history says of it.
pub fn rotate(
    keys: &mut Unlocked,
    header: &mut VaultHeader,
    tier: Tier,
    leave_zone: bool,
    zone: Option<&(ZoneFile, Unlocked)>,
) -> Result<Event> {
    let Some((file, zone_keys)) = zone else {
        let number = keys.rotate_vault(header, tier, leave_zone, unix_now())?;
        return Ok(Event::new(Kind::Rotated).epoch(tier, number));
    };
    let adopted = keys.adopt_zone(header, tier, file, zone_keys)?;
    let newest = adopted.last().ok_or(Fault::ZoneNotAhead)?;
    Ok(Event::new(Kind::Rotated).epoch(tier, *newest).detail("zone", text::hex(&file.id())))
}

/// What a keychain holds, without its keys.
pub fn epochs(keychain: &Keychain) -> Epochs {
    let of = |tier| {
        let epochs = keychain.epochs(tier).iter();
        epochs.map(|e| Epoch { epoch: e.number(), created: e.created() }).collect()
    };
    Epochs { inner: of(Tier::Inner), outer: of(Tier::Outer) }
}

/// An answer, in memory that does not move while it grows: it may hold a channel's key.
fn done(value: &impl Serialize) -> Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(lamassu_fuse::control::CALL_LEN_MAX));
    serde_json::to_writer(&mut *bytes, &Answer::Done(value))?;
    Ok(bytes)
}

fn refused(failed: Failed) -> Zeroizing<Vec<u8>> {
    Zeroizing::new(serde_json::to_vec(&Answer::<()>::Failed(failed)).unwrap_or_default())
}
