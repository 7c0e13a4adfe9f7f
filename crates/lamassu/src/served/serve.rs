//! The daemon's side: one [`Served`] per mount, which answers. It keeps the file key, so slots change without the old key; each change of the header takes the
//! header's lock, reads it anew, and is written down with who asked for it.

use super::job::{self, Job, Task};
use super::parcel::Channels;
use super::protocol::{Answer, Changed, Channel, Epoch, Epochs, Failed, Parcel, Progress, Request, Status, ZoneParcel};
use crate::cmd::key::{about, check_label};
use crate::fault::Fault;
use crate::open::Unsealed;
use crate::text;
use anyhow::{Context, Result};
use data_encoding::HEXLOWER;
use lamassu_format::header::{Header, VaultHeader, ZoneFile};
use lamassu_format::name;
use lamassu_fuse::control::{Caller, Calls};
use lamassu_keys::history::Kind;
use lamassu_keys::{Event, KeyError, Keychain, NewSlot, Role, Terms, Tier, Unlocked, Update, header_file, unix_now};
use lamassu_vault::Vault;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use zeroize::Zeroizing;

/// A vault that this process has mounted, with the keys that opened it.
pub struct Served {
    /// absolute
    dir: PathBuf,
    keys: Mutex<Unlocked>,
    vault: Arc<Vault>,
    read_only: bool,
    channels: Channels,
    job: Mutex<Option<Arc<Job>>>,
}

impl Served {
    /// Takes over the keys that opened `vault`. `dir` is absolute: a daemon leaves its working directory.
    pub fn new(dir: PathBuf, unsealed: Unsealed, vault: Arc<Vault>, read_only: bool) -> Arc<Served> {
        let keys = Mutex::new(unsealed.keys);
        Arc::new(Served { dir, keys, vault, read_only, channels: Channels::default(), job: Mutex::default() })
    }

    /// What answers the calls of a mount.
    pub fn calls(self: &Arc<Self>) -> Calls {
        let served = self.clone();
        Arc::new(move |caller, request| served.answer(caller, request))
    }

    fn answer(&self, caller: &Caller, request: &[u8]) -> Zeroizing<Vec<u8>> {
        // The parser's own words may quote a request; the caller has them, the log must not.
        let parsed = serde_json::from_slice(request)
            .context("the daemon of this mount does not know the request: it is of another version");
        let answered = parsed.and_then(|request| self.carry_out(caller, request));
        answered.unwrap_or_else(|error| {
            let failed = job::failed(&error);
            tracing::debug!(code = failed.code, uid = caller.uid, "a request failed");
            refused(failed)
        })
    }

    fn carry_out(&self, caller: &Caller, request: Request) -> Result<Zeroizing<Vec<u8>>> {
        match request {
            Request::Status {} => done(&self.status()),
            Request::Channel {} => {
                let (number, key) = self.channels.add()?;
                let mut digits = Zeroizing::new([0; 64]);
                HEXLOWER.encode_mut(key.expose(), &mut *digits);
                let key = std::str::from_utf8(&*digits).unwrap_or_default();
                done(&Channel { number, key })
            }
            Request::AddSlot { secret, label, use_only, expires } => {
                let role = if use_only { Role::Use } else { Role::Administrator };
                done(&self.add_slot(caller, &secret, &label, Terms { role, expires })?)
            }
            Request::ChangeSlot { secret, slot, label, use_only, expires } => {
                let role = use_only.then_some(Role::Use);
                done(&self.change_slot(caller, &secret, slot, label, (role, expires))?)
            }
            Request::RemoveSlot { slot } => done(&self.change(caller, |keys, header| {
                let event = about(Kind::SlotRemoved, slot, header);
                Ok((keys.remove_slot(header, slot)?.to_string(), event))
            })?),
            Request::Epochs {} => done(&epochs(self.keys().keychain())),
            Request::Rotate { tier, leave_zone, zone } => done(&self.rotate(caller, tier, leave_zone, zone)?),
            Request::RekeyStart { full, bytes_per_second } => {
                done(&self.rekey(Task { full, bytes_per_second, uid: caller.uid })?)
            }
            Request::RekeyStatus {} => done(&self.job()?),
            Request::RekeyCancel {} => {
                if let Some(job) = &*self.job.lock().unwrap_or_else(PoisonError::into_inner) {
                    job.cancel();
                }
                done(&())
            }
        }
    }

    fn keys(&self) -> std::sync::MutexGuard<'_, Unlocked> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status(&self) -> Status {
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            vault: text::hex(&self.keys().id()),
            dir: self.dir.to_string_lossy().into_owned(),
            read_only: self.read_only,
        }
    }

    /// Changes the header, and gives the open vault the keys it then has.
    fn change<T>(
        &self,
        caller: &Caller,
        change: impl FnOnce(&mut Unlocked, &mut VaultHeader) -> Result<(T, Event)>,
    ) -> Result<T> {
        if self.read_only {
            return Err(Fault::ReadOnlyMount.into());
        }
        if self.vault.is_frozen() {
            return Err(Fault::Frozen.into());
        }
        let mut keys = self.keys();
        let update = Update::begin(&self.dir.join(name::HEADER))?;
        let mut header: VaultHeader = update.read()?;
        let mut now = keys.reopen(&header)?;
        let (done, event) = change(&mut now, &mut header)?;
        update.record(&mut header, &now, &[event.by(caller.uid)])?;
        now.update_ring(self.vault.ring());
        *keys = now;
        Ok(done)
    }

    fn add_slot(&self, caller: &Caller, secret: &Parcel, label: &str, terms: Terms) -> Result<u32> {
        check_label(label)?;
        let (material, cost) = self.channels.unpack(secret)?;
        self.change(caller, |keys, header| {
            let new = NewSlot { material: &material, cost, label, created: unix_now() };
            let id = keys.add_slot_on(header, &new, terms)?;
            Ok((id, about(Kind::SlotAdded, id, header)))
        })
    }

    fn change_slot(
        &self,
        caller: &Caller,
        secret: &Parcel,
        slot: u32,
        label: Option<String>,
        (role, expires): (Option<Role>, Option<u64>),
    ) -> Result<Changed> {
        label.as_deref().map_or(Ok(()), check_label)?;
        let (material, cost) = self.channels.unpack(secret)?;
        self.change(caller, |keys, header| {
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

    fn rotate(&self, caller: &Caller, tier: Tier, leave_zone: bool, zone: Option<ZoneParcel>) -> Result<Epochs> {
        let zone = match zone {
            Some(ZoneParcel { file, secret }) => {
                let (material, _) = self.channels.unpack(&secret)?;
                let file = ZoneFile::parse(file.as_bytes()).map_err(KeyError::from)?;
                let keys = lamassu_keys::unlock(&file, &material)?;
                Some((file, keys))
            }
            None => None,
        };
        self.change(caller, |keys, header| {
            let event = rotate(keys, header, tier, leave_zone, zone.as_ref())?;
            Ok((epochs(keys.keychain()), event))
        })
    }

    fn rekey(&self, task: Task) -> Result<Progress> {
        if self.read_only {
            return Err(Fault::ReadOnlyMount.into());
        }
        let mut job = self.job.lock().unwrap_or_else(PoisonError::into_inner);
        match &*job {
            Some(job) if job.is_under_way_with(task.full) => Ok(job.progress()),
            _ => {
                // One that does something else and is still under way makes this one fail, by the vault's own lock.
                let header: VaultHeader = header_file::read(&self.dir.join(name::HEADER))?;
                let history = self.keys().reopen(&header)?.history(&self.dir);
                let started = Job::start(self.vault.clone(), history, header.keys().history, task)?;
                Ok(job.insert(started).progress())
            }
        }
    }

    fn job(&self) -> Result<Progress> {
        let job = self.job.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(job.as_ref().ok_or(Fault::NoRekey)?.progress())
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
