//! Open vaults, and their exports.

use crate::failure::{Failure, Result};
use crate::log::printable;
use crate::settings::{Settings, VaultSettings};
use lamassu_crypto::Provider;
use lamassu_host::notes::Notes;
use lamassu_host::{Anchors, Found, Pins, Policy, Served, options, places};
use lamassu_keys::{Ask, KeySource, Loaded, Purpose};
use lamassu_vault::{FileSystem, Forest, keep_up};
use lamassu_volume::{Info, Name, Volume, VolumeError, Volumes};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// The environment variable with the default key source.
const KEY: &str = "LAMASSU_KEY";
const PROMPT: &str = "passphrase:prompt";

/// A vault, and the thread that maintains it.
struct OpenVault {
    settings: VaultSettings,
    served: Arc<Served>,
    policy: Policy,
    stopping: Arc<AtomicBool>,
    upkeep: Option<JoinHandle<()>>,
}

/// All open vaults.
pub struct Opened {
    vaults: Vec<OpenVault>,
}

/// A volume that clients can ask for.
pub struct Export {
    pub name: String,
    pub description: String,
}

/// A vault that is about to be opened, with the material of its key source.
pub struct Prepared {
    settings: VaultSettings,
    policy: Policy,
    source: KeySource,
    loaded: Loaded,
}

/// Asks the key sources of all vaults: they may need the terminal.
///
/// # Errors
/// Those of keys; a vault does not exist.
pub fn prepare(settings: Settings) -> Result<Vec<Prepared>> {
    if settings.fips {
        let late = |_| Failure::Setting("fips: this process has used other cryptography before".into());
        Provider::APPROVED.install().map_err(late)?;
    }
    let mut prepared = Vec::new();
    for vault in settings.vaults {
        let pins = Pins::new(settings.given.clone(), places::known_vaults());
        let anchors = Anchors::within(places::anchors()).chosen(vault.anchor.clone());
        let policy = Policy::default().with(pins, Notes::within(places::state()));
        let mut policy = policy.with_any_memory(settings.any_memory).anchored_by(anchors);
        if settings.fips {
            policy = policy.approved_only()?;
        }
        lamassu_host::served_keys::ask_as(&policy.anchors);
        prepared.push(Prepared::of(vault, policy)?);
    }
    // What gave the keys does not stay in the environment of the process that serves, nor among its descriptors. After
    // the last one: several vaults may have one source.
    prepared.iter().for_each(|vault| vault.source.forget());
    Ok(prepared)
}

impl Prepared {
    fn of(settings: VaultSettings, policy: Policy) -> Result<Prepared> {
        let found = Found::at(&policy, &settings.dir)?;
        policy.check_suite(found.header.suite())?;
        let source = match &settings.key {
            Some(source) => source.clone(),
            None => std::env::var(KEY).as_deref().unwrap_or(PROMPT).parse::<KeySource>()?,
        };
        policy.check_kind(source.kind())?;
        let subject = printable(&settings.dir.display().to_string());
        let loaded = source.load(&Ask { subject: &subject, purpose: Purpose::Unlock, stdin: true })?;
        loaded.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        Ok(Prepared { settings, policy, source, loaded })
    }
}

impl Opened {
    /// Opens the vaults. If one cannot be opened, those opened before are closed again.
    ///
    /// # Errors
    /// Those of vaults; [`lamassu_volume::VolumeError::NotFound`] for a volume that was named.
    pub fn open(prepared: Vec<Prepared>) -> Result<Opened> {
        let mut opened = Opened { vaults: Vec::new() };
        lamassu_host::lock::raise_descriptor_limit();
        for vault in prepared {
            opened.vaults.push(OpenVault::open(vault)?);
            if let Some(vault) = opened.vaults.last() {
                vault.check()?;
            }
        }
        Ok(opened)
    }

    /// All exports, by name. `failed` is called for what cannot be described: it hides no other export.
    pub fn exports(&self, failed: &mut dyn FnMut(VolumeError)) -> Vec<Export> {
        let mut found = Vec::new();
        for vault in &self.vaults {
            for info in vault.infos(failed) {
                let what = if info.name.is_snapshot() { "snapshot" } else { "volume" };
                let description = format!("{what}, {} bytes, blocks of {}", info.size, info.block_size.bytes());
                found.push(Export { name: vault.shown(&info.name), description });
            }
        }
        found
    }

    /// The export for a client that names none: the only one, if there is only one.
    ///
    /// # Errors
    /// Those of the vaults: what could not be described may be another one.
    pub fn default_export(&self) -> Result<Option<String>> {
        let mut first = None;
        let mut all = self.exports(&mut |error| _ = first.get_or_insert(error));
        match first {
            Some(error) => Err(error.into()),
            None if all.len() == 1 => Ok(all.pop().map(|export| export.name)),
            None => Ok(None),
        }
    }

    /// Opens the volume of an export.
    ///
    /// # Errors
    /// [`Failure::NoExport`]; those of the vault.
    pub fn volume(&self, export: &str, read_only: bool) -> Result<Volume> {
        let of = |vault: &OpenVault| match &vault.settings.name {
            Some(name) => export.strip_prefix(name.as_str())?.strip_prefix('/').map(str::to_owned),
            None => Some(export.to_owned()),
        };
        let found = self.vaults.iter().find_map(|vault| Some((vault, of(vault)?.parse::<Name>().ok()?)));
        let (vault, name) = found.filter(|(vault, name)| vault.exports(name)).ok_or(Failure::NoExport)?;
        match vault.volumes().open(&name, read_only || vault.read_only()) {
            Err(VolumeError::NotFound(_)) => Err(Failure::NoExport),
            volume => Ok(volume?),
        }
    }

    /// Commits everything.
    ///
    /// # Errors
    /// The first failed commit; everything else is committed.
    pub fn commit(&self) -> Result<()> {
        let mut first = Ok(());
        for vault in &self.vaults {
            first = first.and(vault.forest().sync_all().map_err(Failure::from));
        }
        first
    }

    /// Commits everything, and closes the vaults: the last first.
    ///
    /// # Errors
    /// The first failed commit; everything is closed nevertheless.
    pub fn close(mut self) -> Result<()> {
        let mut first = Ok(());
        while let Some(vault) = self.vaults.pop() {
            first = first.and(vault.close());
        }
        first
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        while let Some(vault) = self.vaults.pop() {
            let _ = vault.close();
        }
    }
}

impl OpenVault {
    fn open(prepared: Prepared) -> Result<OpenVault> {
        let Prepared { settings, policy, source: _, loaded } = prepared;
        let found = Found::at(&policy, &settings.dir)?;
        let options = options(settings.read_only || found.header.is_snapshot());
        let (unsealed, succession) = found.unlock(&policy, &loaded.material, settings.slot)?;
        if succession.is_some() {
            tracing::warn!(vault = %settings.dir.display(), "the vault's administrator has another key, which the pinned one has signed");
        }
        if !lamassu_crypto::secret::memory_is_locked() {
            tracing::warn!("keys may reach the swap space: their memory could not be locked; raise `ulimit -l`");
        }
        let read_only = options.read_only;
        let served = unsealed.open_forest(options)?;
        let stopping = Arc::new(AtomicBool::new(false));
        let mut vault = OpenVault { settings, served, policy, stopping, upkeep: None };
        if let Some(root) = vault.forest().vault(lamassu_vault::forest::ROOT_MEMBER) {
            root.verify_root()?;
            let dir = vault.settings.dir.clone();
            // The process goes on: a server that is started again would take requests of clients that do not know that
            // writes were lost.
            lamassu_host::when_session_ends(&root, move |error| {
                let vault = dir.display();
                tracing::error!(%vault, %error, "this host has the vault no longer: all requests fail from now on; end \
                    this export and its clients, and begin again");
            })?;
        }
        if !read_only {
            let (forest, stopping) = (vault.forest().clone(), vault.stopping.clone());
            let thread = std::thread::Builder::new().name("lamassu-upkeep".into());
            vault.upkeep = Some(thread.spawn(move || keep_up(&*forest, &stopping))?);
        }
        Ok(vault)
    }

    /// Checks that the named volumes exist.
    fn check(&self) -> Result<()> {
        self.settings.volumes.iter().try_for_each(|name| Ok(self.volumes().info(name).map(drop)?))
    }

    fn forest(&self) -> &Arc<Forest> {
        self.served.forest()
    }

    fn read_only(&self) -> bool {
        self.served.is_read_only()
    }

    fn volumes(&self) -> Volumes {
        Volumes::of(self.forest())
    }

    fn exports(&self, name: &Name) -> bool {
        self.settings.volumes.is_empty() || self.settings.volumes.contains(name)
    }

    /// What it exports. Volumes that are not exported are not looked at.
    fn infos(&self, failed: &mut dyn FnMut(VolumeError)) -> Vec<Info> {
        let volumes = self.volumes();
        if self.settings.volumes.is_empty() {
            let odd = &mut |_: &str, error: VolumeError| match error {
                VolumeError::NotAVolume { .. } => tracing::debug!(%error, "not exported"),
                error => failed(error),
            };
            return volumes.list(odd).unwrap_or_else(|error| {
                failed(error);
                Vec::new()
            });
        }
        let mut found = Vec::new();
        for name in &self.settings.volumes {
            match volumes.info(name) {
                Ok(info) => found.push(info),
                Err(error) => failed(error),
            }
        }
        found
    }

    fn shown(&self, volume: &Name) -> String {
        match &self.settings.name {
            Some(name) => format!("{name}/{volume}"),
            None => volume.to_string(),
        }
    }

    fn close(mut self) -> Result<()> {
        self.stopping.store(true, Ordering::Relaxed);
        self.forest().upkeep().want();
        if let Some(upkeep) = self.upkeep.take() {
            let _ = upkeep.join();
        }
        let closed = self.forest().close();
        self.policy.anchors.leave_servers();
        self.policy.anchors.end_reports();
        Ok(closed?)
    }
}
