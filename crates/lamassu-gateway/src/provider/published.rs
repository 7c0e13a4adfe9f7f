//! The publications of a tenant: its rules over tokens and its list of revocations. They are read every second. A
//! publication is accepted if the tenant signed it and it is not older than an accepted one, also across restarts of
//! the proxy.

use super::config::TenantConfig;
use crate::limits::Tenant;
use crate::{GatewayError, Result};
use data_encoding::HEXLOWER;
use lamassu_access::bundle::{BUNDLE_FILE, STATUS_FILE};
use lamassu_access::credential::SKEW;
use lamassu_access::{AccessError, Bundle, Decider, Status};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// File name in the proxy's state directory.
const SEEN_FILE: &str = "seen.json";

/// The newest numbers accepted from a tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Seen {
    bundle: u64,
    /// digest of the bundle's text: SHA-256, hex
    digest: String,
    status: u64,
}

/// The newest numbers of all tenants, by bucket; in memory and on disk.
pub struct Memory {
    path: PathBuf,
    seen: Mutex<BTreeMap<String, Seen>>,
}

impl Memory {
    /// Reads the file. A missing file is that of a new proxy.
    ///
    /// # Errors
    /// [`GatewayError::File`], [`GatewayError::Config`].
    pub fn open(state: &Path) -> Result<Memory> {
        let path = state.join(SEEN_FILE);
        let seen = match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|_| GatewayError::Config {
                path: path.clone(),
                detail: "it is damaged: put it back from a backup; without it, older publications would be taken"
                    .into(),
            })?,
            Err(error) if error.kind() == ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(GatewayError::file("read", &path)(error)),
        };
        Ok(Memory { path, seen: Mutex::new(seen) })
    }

    fn of(&self, bucket: &str) -> Seen {
        self.seen.lock().get(bucket).cloned().unwrap_or_default()
    }

    /// Records a tenant's numbers durably.
    fn remember(&self, bucket: &str, seen: Seen) -> std::io::Result<()> {
        let all = &mut *self.seen.lock();
        let before = all.insert(bucket.into(), seen);
        let written = || {
            let new = self.path.with_extension("new");
            let mut file = fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
            file.write_all(&serde_json::to_vec(&all)?)?;
            file.sync_all()?;
            fs::rename(&new, &self.path)?;
            self.path.parent().map_or(Ok(()), |dir| fs::File::open(dir)?.sync_all())
        };
        written().inspect_err(|_| match before {
            Some(before) => drop(all.insert(bucket.into(), before)),
            None => drop(all.remove(bucket)),
        })
    }
}

/// The reason why nothing of a tenant is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    /// The tenant has published nothing, or nothing that was accepted.
    #[error("the tenant has published no rules")]
    Nothing,
    /// The list of revocations is too old.
    #[error("the tenant's list of revocations is too old")]
    Old,
    /// The list names another bundle than the accepted one.
    #[error("the tenant has published other rules than those that are here")]
    Other,
}

/// A tenant's publications in force.
#[derive(Clone)]
pub struct InForce {
    /// rules
    pub decider: Arc<Decider>,
    /// revocations
    pub status: Arc<Status>,
}

/// A newly accepted document, with its text.
type New<T> = Option<(String, T)>;

#[derive(Default)]
struct Taken {
    bundle: Option<(String, Arc<Decider>)>,
    /// The previous rules, for requests that began with them. Older ones are dropped. So a tenant's rules are in memory
    /// at most twice, and a third time during a read, however often it publishes and however long requests take.
    before: Option<Arc<Decider>>,
    status: Option<(String, Arc<Status>)>,
    /// the last error, logged once
    error: Option<String>,
}

/// A tenant of the proxy.
pub struct Customer {
    /// its bucket, key and directory
    pub config: TenantConfig,
    /// its limits
    pub tenant: Arc<Tenant>,
    taken: RwLock<Taken>,
}

impl Customer {
    /// A tenant whose publications have not been read yet.
    pub fn new(config: TenantConfig) -> Customer {
        let tenant = Arc::new(Tenant::new(&config.bucket, config.limits));
        Customer { config, tenant, taken: RwLock::default() }
    }

    /// The publications in force, if the list of revocations is at most `age_max` seconds old.
    ///
    /// # Errors
    /// [`Absent`].
    pub fn in_force(&self, now: u64, age_max: u64) -> std::result::Result<InForce, Absent> {
        let taken = self.taken.read();
        let (Some((_, decider)), Some((_, status))) = (&taken.bundle, &taken.status) else {
            return Err(Absent::Nothing);
        };
        match () {
            () if now.saturating_sub(status.time) > age_max => Err(Absent::Old),
            () if decider.bundle().seq != status.bundle => Err(Absent::Other),
            () => Ok(InForce { decider: decider.clone(), status: status.clone() }),
        }
    }

    /// Reads the publications and accepts new ones. Rules are in force together with the list that names them: newer
    /// rules wait for the next list.
    pub fn read(&self, memory: &Memory, now: u64) {
        let bucket = &self.config.bucket;
        let mut seen = memory.of(bucket);
        let error = match self.new_status(&mut seen, now) {
            Err(error) => Some(error),
            Ok(status) => {
                let named = status.as_ref().map(|(_, status)| status.bundle);
                let named = named.or_else(|| self.taken.read().status.as_ref().map(|(_, status)| status.bundle));
                // The revocations take effect even if the rules are refused.
                let (bundle, error) = match self.new_bundle(&mut seen, named) {
                    Ok(bundle) => (bundle, None),
                    Err(error) => (None, Some(error)),
                };
                self.take(memory, seen, (status, bundle)).err().or(error)
            }
        };
        let said = &mut self.taken.write().error;
        match &error {
            Some(error) if said.as_ref() != Some(error) => tracing::warn!(bucket, "not taken: {error}"),
            _ => {}
        }
        *said = error;
    }

    /// Records new publications durably, then puts them in force.
    fn take(
        &self,
        memory: &Memory,
        seen: Seen,
        (status, bundle): (New<Status>, New<Decider>),
    ) -> std::result::Result<(), String> {
        let bucket = &self.config.bucket;
        if status.is_none() && bundle.is_none() {
            return Ok(());
        }
        memory.remember(bucket, seen).map_err(|error| format!("cannot remember it: {error}"))?;
        let taken = &mut *self.taken.write();
        if let Some((text, status)) = status {
            taken.status = Some((text, Arc::new(status)));
        }
        if let Some((text, decider)) = bundle {
            let (seq, epoch) = (decider.bundle().seq, decider.bundle().epoch);
            taken.before = taken.bundle.replace((text, Arc::new(decider))).map(|(_, decider)| decider);
            tracing::info!(bucket, seq, epoch, "rules are in force");
        }
        Ok(())
    }

    fn text(&self, name: &str, most: usize) -> std::result::Result<String, String> {
        let path = self.config.published.join(name);
        let failed = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
        // A FIFO in the directory must not block the open.
        let nonblock = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let file = fs::File::options().read(true).custom_flags(nonblock).open(&path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(format!("{} is no regular file", path.display()));
        }
        let mut text = String::new();
        file.take(most as u64 + 1).read_to_string(&mut text).map_err(failed)?;
        Ok(text)
    }

    /// A newer list of revocations, if there is one; enters its number into `seen`.
    fn new_status(&self, seen: &mut Seen, now: u64) -> std::result::Result<New<Status>, String> {
        let text = self.text(STATUS_FILE, Status::most())?;
        if self.taken.read().status.as_ref().is_some_and(|(before, _)| *before == text) {
            return Ok(None);
        }
        let status = Status::verify(&self.config.key, &self.config.bucket, &text).map_err(|error| error.to_string())?;
        if status.seq < seen.status {
            return Err(format!("the status has number {}, and {} was taken before", status.seq, seen.status));
        }
        if status.time > now + SKEW {
            return Err("the status is of the future: the clock here or the tenant's is wrong".into());
        }
        seen.status = status.seq;
        Ok(Some((text, status)))
    }

    /// Newer rules, if there are any and their number is `named`; enters them into `seen`.
    fn new_bundle(&self, seen: &mut Seen, named: Option<u64>) -> std::result::Result<New<Decider>, String> {
        let text = self.text(BUNDLE_FILE, Bundle::most())?;
        if self.taken.read().bundle.as_ref().is_some_and(|(before, _)| *before == text) {
            return Ok(None);
        }
        let said = |error: AccessError| error.to_string();
        let bundle = Bundle::verify(&self.config.key, &self.config.bucket, &text).map_err(said)?;
        let (seq, digest) = (bundle.seq, HEXLOWER.encode(&lamassu_crypto::wrap::sha256(text.as_bytes())));
        if seq < seen.bundle || (seq == seen.bundle && digest != seen.digest) {
            return Err(format!("the bundle has number {seq}, and {} was taken before", seen.bundle));
        }
        match named {
            Some(named) if named == seq => {}
            // The tenant writes the bundle first. The list that names it follows.
            Some(named) if named < seq => return Ok(None),
            Some(named) => return Err(format!("the bundle has number {seq}, and the status names {named}")),
            None => return Ok(None),
        }
        let decider = Decider::of(bundle).map_err(said)?;
        (seen.bundle, seen.digest) = (seq, digest);
        Ok(Some((text, decider)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;
    use lamassu_crypto::{Secret, sign};
    use std::collections::BTreeSet;

    #[test]
    fn what_is_older_is_never_taken_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let (seed, stranger) = (Secret::new(&mut [5; 32]), Secret::new(&mut [6; 32]));
        let customer = |published: &Path| {
            Customer::new(TenantConfig {
                bucket: "acme".into(),
                key: sign::public(&seed),
                published: published.into(),
                limits: Limits::default(),
            })
        };
        let bundle = |seq, seed: &Secret<32>, epoch| {
            let bundle = Bundle { seq, epoch, vocabulary: String::new(), time: 100, policies: Vec::new() };
            fs::write(dir.path().join(BUNDLE_FILE), bundle.sign(seed, "acme").expect("signs")).expect("writes");
        };
        let status = |seq, bundle, time| {
            let status = Status { seq, bundle, time, revoked: BTreeSet::new() };
            fs::write(dir.path().join(STATUS_FILE), status.sign(&seed, "acme").expect("signs")).expect("writes");
        };
        let memory = Memory::open(dir.path()).expect("opens");
        let one = customer(dir.path());
        one.read(&memory, 100);
        assert_eq!(one.in_force(100, 60).err(), Some(Absent::Nothing));
        bundle(2, &seed, 1);
        status(7, 2, 100);
        one.read(&memory, 100);
        assert_eq!(one.in_force(160, 60).expect("in force").decider.bundle().seq, 2);
        assert_eq!(one.in_force(161, 60).err(), Some(Absent::Old));
        // Older ones, those of strangers, another one of the same number, one of the future.
        status(6, 2, 160);
        one.read(&memory, 160);
        assert_eq!(one.in_force(161, 60).err(), Some(Absent::Old));
        status(8, 2, 1000);
        one.read(&memory, 160);
        assert_eq!(one.in_force(161, 60).err(), Some(Absent::Old));
        status(8, 2, 160);
        for (seq, seed, epoch) in [(1, &seed, 1), (3, &stranger, 1), (2, &seed, 9)] {
            bundle(seq, seed, epoch);
            one.read(&memory, 160);
            let found = one.in_force(161, 60).expect("in force");
            assert_eq!((found.decider.bundle().seq, found.decider.bundle().epoch), (2, 1));
        }
        status(9, 3, 160);
        one.read(&memory, 160);
        assert_eq!(one.in_force(161, 60).err(), Some(Absent::Other));
        bundle(3, &seed, 1);
        one.read(&memory, 160);
        assert_eq!(one.in_force(161, 60).expect("in force").decider.bundle().seq, 3);
        // Newer rules wait for the list that names them.
        bundle(4, &seed, 2);
        one.read(&memory, 160);
        assert_eq!(one.in_force(161, 60).expect("in force").decider.bundle().seq, 3);
        status(10, 4, 160);
        one.read(&memory, 160);
        assert_eq!(one.in_force(161, 60).expect("in force").decider.bundle().seq, 4);
        // A tenant with an older copy of its database: a new list, but rules that are not those in force.
        bundle(3, &seed, 1);
        status(11, 3, 160);
        one.read(&memory, 160);
        assert_eq!(one.in_force(161, 60).err(), Some(Absent::Other));
        status(12, 4, 160);
        one.read(&memory, 160);
        assert_eq!(one.in_force(161, 60).expect("in force").decider.bundle().seq, 4);
        // After a restart.
        let (memory, again) = (Memory::open(dir.path()).expect("opens"), customer(dir.path()));
        status(8, 2, 160);
        bundle(2, &seed, 1);
        again.read(&memory, 160);
        assert_eq!(again.in_force(161, 60).err(), Some(Absent::Nothing));
        status(13, 5, 160);
        bundle(5, &seed, 1);
        again.read(&memory, 160);
        assert!(again.in_force(161, 60).is_ok());
        fs::write(dir.path().join(SEEN_FILE), "{").expect("writes");
        assert!(Memory::open(dir.path()).is_err());
    }

    #[test]
    fn rules_are_in_memory_twice_at_most() {
        let dir = tempfile::tempdir().expect("a directory");
        let seed = Secret::new(&mut [5; 32]);
        let published = dir.path().to_owned();
        let config =
            TenantConfig { bucket: "acme".into(), key: sign::public(&seed), published, limits: Limits::default() };
        let (memory, customer) = (Memory::open(dir.path()).expect("opens"), Customer::new(config));
        let mut all = Vec::new();
        for seq in 1..6 {
            let bundle = Bundle { seq, epoch: 1, vocabulary: String::new(), time: 100, policies: Vec::new() };
            let status = Status { seq, bundle: seq, time: 100, revoked: BTreeSet::new() };
            for (name, text) in [(BUNDLE_FILE, bundle.sign(&seed, "acme")), (STATUS_FILE, status.sign(&seed, "acme"))] {
                fs::write(dir.path().join(name), text.expect("signs")).expect("writes");
            }
            customer.read(&memory, 100);
            all.push(Arc::downgrade(&customer.in_force(100, 60).expect("in force").decider));
            let alive = all.iter().map(|one| one.strong_count()).sum::<usize>();
            assert_eq!(alive, all.len().min(2), "the newest, and the one before");
        }
        // What verifies and does not load ends nothing.
        let policies = vec![serde_json::json!({ "effect": "neither" })];
        let bundle = Bundle { seq: 6, epoch: 1, vocabulary: String::new(), time: 100, policies };
        let status = Status { seq: 6, bundle: 6, time: 100, revoked: BTreeSet::new() };
        for (name, text) in [(BUNDLE_FILE, bundle.sign(&seed, "acme")), (STATUS_FILE, status.sign(&seed, "acme"))] {
            fs::write(dir.path().join(name), text.expect("signs")).expect("writes");
        }
        customer.read(&memory, 100);
        assert_eq!(customer.in_force(100, 60).err(), Some(Absent::Other));
        assert_eq!(all.iter().map(|one| one.strong_count()).sum::<usize>(), 2);
    }
}
