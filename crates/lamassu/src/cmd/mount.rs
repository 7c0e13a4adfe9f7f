//! `lamassu mount`.

use crate::cmd::remount;
use crate::confine;
use crate::daemon::{self, Ready, Side};
use crate::exit::Code;
use crate::fault::Fault;
use crate::keys::{self, KeyArg, SourceText};
use crate::open::{self, Found};
use crate::output::Ui;
use crate::served::keeper::Keeper;
use crate::served::serve::Served;
use crate::signals;
use crate::users;
use anyhow::{Context, Result};
use clap::ValueEnum;
use lamassu_crypto::engine::device::{Device, LoopBack};
use lamassu_crypto::speed::DEVICE_DEPTH;
use lamassu_crypto::stages;
use lamassu_format::name;
use lamassu_fuse::plain::PlainFs;
use lamassu_fuse::{CacheMode, MountError, MountOptions, Mounted, OptionError};
use lamassu_vault::{Durability, Forest, Integrity, Options};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  lamassu mount /srv/store/vault ~/private
  lamassu mount -k raw:file:/root/vault.key --read-only /srv/store/vault /mnt
  lamassu mount -o allow_other,noatime,cache=through /srv/store/vault /mnt
In /etc/fstab, where a link /sbin/mount.fuse.lamassu leads to this program (`make install` makes it):
  /srv/store/vault  /mnt  fuse.lamassu  key=raw:file:/root/vault.key,allow_other  0 0

The command returns when the mount is usable. Integrity errors then go to syslog, or to --log-file.";

/// Options of `mount`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    /// What is verified on every read: `full` re-hashes each block; `metadata` trusts the blocks (faster; suites aes and paper alone) [default: full]
    #[arg(short, long, value_enum)]
    integrity: Option<IntegrityArg>,
    /// What the kernel keeps of file contents: reads and writes, reads alone, or nothing (no plaintext stays in memory) [default: writeback]
    #[arg(short, long, value_enum)]
    cache: Option<CacheArg>,
    /// `ordered` survives power cuts; `relaxed` leaves barriers out: safe against a killed process, not against a power cut [default: ordered]
    #[arg(long, value_enum)]
    durability: Option<DurabilityArg>,
    /// Change nothing in the store; several hosts may mount so
    #[arg(short, long, visible_alias = "ro")]
    read_only: bool,
    /// Let other users use the mount (for others than root: if /etc/fuse.conf says user_allow_other)
    #[arg(long)]
    allow_other: bool,
    /// Stay in the foreground; SIGINT and SIGTERM unmount
    #[arg(short, long)]
    foreground: bool,
    /// Unload the vault and its datasets, keys and all, after this time without a request and without an open file; `lamassu key load` loads them again
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u32).range(1..=525_600))]
    idle: Option<u32>,
    /// Let this user (a name or number) create datasets that inherit their key, in its own directories, and list, unload and load its own
    #[arg(long, value_name = "USER")]
    delegate: Vec<String>,
    /// Cipher threads, 0 for one per processor
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: u16,
    /// NO ENCRYPTION: DIR, which must not be a vault, is mounted as it is. Only to compare with in benchmarks
    #[arg(long, conflicts_with_all = ["integrity", "durability", "threads", "idle", "delegate"])]
    passthrough: bool,
    /// Options as mount(8) and fstab write them, separated by commas: ro, allow_other, noatime, nodev, nosuid, noexec, fsname=…, keep_awake=auto|always|thread|never (all
    /// of them: docs/cli.md), allow_dev and allow_suid (which TRUST THE STORE: its device numbers, set-uid bits, owners and file capabilities then count); and key=, integrity=, cache=, durability=, which count where the option of that name is not given
    #[arg(short, long, value_name = "A,B")]
    options: Vec<String>,
    /// Warn of unknown words in --options instead of refusing them, as mount(8) wants it of its helpers with -s
    #[arg(long, hide = true)]
    sloppy: bool,
    /// Do everything but the mount itself, as mount(8) wants it with -f
    #[arg(long, hide = true)]
    fake: bool,
    /// The vault
    dir: PathBuf,
    /// An empty directory
    mountpoint: PathBuf,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

/// What is verified on every read.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum IntegrityArg {
    Full,
    Metadata,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CacheArg {
    Writeback,
    Through,
    None,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DurabilityArg {
    Ordered,
    Relaxed,
}

/// Everything decided before a key is asked for.
struct Plan {
    dir: PathBuf,
    mountpoint: PathBuf,
    below: Below,
    mount: MountOptions,
    /// without a request for so long, everything is unloaded
    idle: Option<Duration>,
    /// what ciphers in the place of threads, to measure
    device: Option<DeviceArg>,
}

/// What is mounted.
enum Below {
    Vault {
        key: KeyArg,
        options: Options,
    },
    /// the directory itself, not encrypted
    Plain,
}

/// What `LAMASSU_ENGINE` may name: a loop-back device, a thread behind a ring of jobs in the place of an accelerator.
#[derive(Clone, Copy)]
enum DeviceArg {
    /// Awaits each block before the next.
    Alone,
    /// A pipeline of jobs.
    Pipelined,
}

impl DeviceArg {
    fn from_environment() -> Result<Option<DeviceArg>, Fault> {
        match std::env::var_os("LAMASSU_ENGINE") {
            None => Ok(None),
            Some(name) if name == "device-sync" => Ok(Some(DeviceArg::Alone)),
            Some(name) if name == "device" => Ok(Some(DeviceArg::Pipelined)),
            Some(_) => Err(Fault::Usage("LAMASSU_ENGINE must be device-sync or device, or not be there")),
        }
    }

    /// Starts its thread: not before the process is the one that serves.
    fn start(self) -> Arc<dyn Device> {
        Arc::new(match self {
            DeviceArg::Alone => LoopBack::one_at_a_time(),
            DeviceArg::Pipelined => LoopBack::new(1, DEVICE_DEPTH),
        })
    }
}

/// The type a mount without encryption shows in mount(8): it must not pass for a vault.
const PLAIN_SUBTYPE: &str = "lamassu-passthrough";

pub fn run(ui: &Ui, args: Args) -> Result<Code> {
    let words: Vec<String> = args.options.iter().flat_map(|o| split_options(o)).collect();
    if remount::is_wanted(&words) {
        remount::run(&args.mountpoint, &words, args.read_only)?;
        return Ok(Code::Done);
    }
    let (foreground, fake) = (args.foreground, args.fake);
    let plan = Plan::of(ui, args)?;
    if fake {
        if matches!(plan.below, Below::Vault { .. }) {
            Found::at(&plan.dir)?;
        }
        return Ok(Code::Done);
    }
    if foreground {
        plan.drop_capabilities();
        signals::start();
        return serve(ui, plan, None);
    }
    match daemon::fork()? {
        Side::Parent(waiter) => waiter.wait(),
        Side::Child(ready) => {
            plan.drop_capabilities();
            signals::start();
            serve(ui, plan, Some(ready))
        }
    }
}

impl Plan {
    fn of(ui: &Ui, args: Args) -> Result<Plan> {
        let device = DeviceArg::from_environment()?;
        let mut vault = crate::open::options(false);
        vault.threads = args.threads.into();
        let before = (vault.integrity, vault.durability);
        let mut mount = MountOptions::default();
        let mut key = None;
        for words in &args.options {
            for word in split_options(words) {
                match word.split_once('=') {
                    Some(("key", source)) => key = Some(SourceText::from(source)),
                    Some(("integrity", value)) => vault.integrity = parse::<IntegrityArg>("integrity", value)?.into(),
                    Some(("durability", value)) => {
                        vault.durability = parse::<DurabilityArg>("durability", value)?.into()
                    }
                    Some(_) | None => match mount.apply_word(&word) {
                        Err(error @ OptionError::Unknown(_)) if args.sloppy => ui.warn(error),
                        done => done?,
                    },
                }
            }
        }
        let fsname_given = mount.fsname != MountOptions::default().fsname;
        let dir = args.dir.canonicalize().map_err(|source| Fault::NotADirectory { dir: args.dir.clone(), source })?;
        if !fsname_given {
            mount.fsname = dir.to_string_lossy().into_owned();
        }
        if let Some(integrity) = args.integrity {
            vault.integrity = integrity.into();
        }
        if let Some(durability) = args.durability {
            vault.durability = durability.into();
        }
        if let Some(cache) = args.cache {
            mount.cache = cache.into();
        }
        mount.read_only |= args.read_only;
        mount.allow_other |= args.allow_other;
        vault.read_only = mount.read_only;
        mount.delegates = args.delegate.iter().map(|user| users::uid_of(user)).collect::<Result<_>>()?;
        if !mount.delegates.is_empty() && !mount.allow_other {
            return Err(Fault::Usage("--delegate is for other users: it needs --allow-other").into());
        }
        let mountpoint = mountpoint(&args.mountpoint, &dir)?;
        if args.passthrough {
            if key.is_some() || args.key.is_typed() || (vault.integrity, vault.durability) != before {
                return Err(Fault::Usage(
                    "--passthrough encrypts and verifies nothing: leave key, integrity and durability out",
                )
                .into());
            }
            refuse_vaults(&dir)?;
            mount.subtype = PLAIN_SUBTYPE.into();
            return Ok(Plan { dir, mountpoint, below: Below::Plain, mount, idle: None, device: None });
        }
        let below = Below::Vault { key: args.key.or(key), options: vault };
        let idle = args.idle.map(|minutes| Duration::from_secs(60 * u64::from(minutes)));
        Ok(Plan { dir, mountpoint, below, mount, idle, device })
    }
}

/// Neither a vault nor a part of one: through a passthrough mount its ciphertext would look like files to be edited.
fn refuse_vaults(dir: &Path) -> Result<(), Fault> {
    match dir.ancestors().find(|d| d.join(name::HEADER).symlink_metadata().is_ok()) {
        Some(vault) => Err(Fault::PassthroughOfVault { dir: dir.into(), vault: vault.into() }),
        None => Ok(()),
    }
}

/// An existing directory that is not inside the vault: a mount over the store would hide it, one inside it would become part of the tree.
fn mountpoint(path: &Path, dir: &Path) -> Result<PathBuf, Fault> {
    let wrong = |source| Fault::Mountpoint { path: path.into(), source };
    let canonical = path.canonicalize().map_err(wrong)?;
    // Of a mount that nobody serves any more, finding the path asks nothing and this does.
    if !canonical.metadata().map_err(wrong)?.is_dir() {
        return Err(wrong(io::Error::from_raw_os_error(libc::ENOTDIR)));
    }
    if canonical.starts_with(dir) || dir.starts_with(&canonical) {
        return Err(Fault::MountpointInVault { path: path.into() });
    }
    Ok(canonical)
}

/// Words between commas; `\,` is a comma, `\\` a backslash.
fn split_options(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        let word = words.last_mut().expect("never empty");
        match c {
            '\\' => word.extend(chars.next()),
            ',' => words.push(String::new()),
            c => word.push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

fn parse<T: ValueEnum>(option: &'static str, value: &str) -> Result<T, OptionError> {
    T::from_str(value, false).map_err(|_| OptionError::BadValue { option, value: value.into() })
}

/// Opens, mounts, tells the waiting process, and serves until the mount is gone.
fn serve(ui: &Ui, plan: Plan, ready: Option<Ready>) -> Result<Code> {
    open::raise_descriptor_limit();
    if std::env::var_os("LAMASSU_STAGES").is_some() {
        stages::measure();
    }
    let mounted = plan.attach(ui)?;
    confine::seal();
    ui.detail(format_args!("{} is mounted on {}", plan.dir.display(), plan.mountpoint.display()));
    let Some(ready) = ready else {
        mounted.wait()?;
        tell_stages();
        return Ok(Code::Done);
    };
    ready.tell()?;
    tracing::info!(dir = %plan.dir.display(), mountpoint = %plan.mountpoint.display(), "mounted");
    // Nobody reads our standard error any more.
    let ended = mounted.wait().inspect_err(|error| tracing::error!(%error, "the mount ended with an error"));
    tracing::info!(dir = %plan.dir.display(), "unmounted");
    tell_stages();
    ended?;
    Ok(Code::Done)
}

/// Where the time went, if that was measured.
fn tell_stages() {
    if let Some(times) = stages::times() {
        tracing::info!("seconds by stage: {times}");
    }
}

impl Plan {
    /// Before any thread starts. A passthrough mount keeps a descriptor per inode, and raising that limit takes `SYS_RESOURCE`; it guards no keys.
    fn drop_capabilities(&self) {
        match self.below {
            Below::Vault { .. } => confine::drop_capabilities(),
            Below::Plain => {}
        }
    }

    /// Opens what is mounted, and mounts it; signals unmount it from then on.
    fn attach(&self, ui: &Ui) -> Result<Mounted> {
        let mut options = self.mount.clone();
        match &self.below {
            Below::Vault { key, options: vault } => {
                let found = Found::at(&self.dir)?;
                let mut vault = vault.clone();
                vault.device = self.device.map(DeviceArg::start);
                if found.header.is_snapshot() && !vault.read_only {
                    ui.note("a snapshot: mounted read-only");
                    (vault.read_only, options.read_only) = (true, true);
                }
                let unsealed = found.unlock(ui, key)?;
                let opened = unsealed.open_to_serve(vault.clone(), options.noatime)?;
                // A mount without it would answer every call with an error.
                opened
                    .vault
                    .verify_root()
                    .with_context(|| format!("cannot open the vault in {}", self.dir.display()))?;
                if !lamassu_crypto::secret::memory_is_locked() {
                    ui.warn(format_args!(
                        "keys may reach the swap space: their memory could not be locked; raise `ulimit -l`"
                    ));
                }
                // A signal between here and the handler below must not leave a mount that nobody serves.
                signals::flag_only();
                options.max_read = options.max_read.max(unsealed.found.header.geometry().block_size() as u32);
                take_modes_as_they_come();
                let cached = options.cache != CacheMode::None;
                let keeper = Keeper::new(self.dir.clone(), vault, cached, Some(self.mountpoint.clone()));
                let served = Served::new(unsealed, opened, keeper)?;
                let forest = served.forest().clone();
                let calls = Some(served.calls());
                let mounted = lamassu_fuse::mount_answering(forest.clone(), &self.mountpoint, &options, calls)?;
                forest.set_cache(mounted.cache());
                served.keeper().mounted();
                if let Some(idle) = self.idle {
                    forest.unload_after(idle);
                }
                unmount_on_signal(&mounted, Some(forest));
                Ok(mounted)
            }
            Below::Plain => {
                let files = PlainFs::open(&self.dir).context("cannot open the directory")?;
                signals::flag_only();
                take_modes_as_they_come();
                let mounted = lamassu_fuse::mount(Arc::new(files), &self.mountpoint, &options)?;
                unmount_on_signal(&mounted, None);
                ui.note("NOT encrypted: what is written here is stored as it is");
                Ok(mounted)
            }
        }
    }
}

/// Modes are those applications ask for; their own masks were applied by the kernel. Not before the keys are loaded: what that writes is not for all.
fn take_modes_as_they_come() {
    rustix::process::umask(rustix::fs::Mode::empty());
}

/// `forest`: to be made durable where the mount is in use and can only be detached.
fn unmount_on_signal(mounted: &Mounted, forest: Option<Arc<Forest>>) {
    let unmounter = mounted.unmounter();
    let mountpoint = mounted.mountpoint().to_path_buf();
    let unmount = move || match unmounter.unmount(false) {
        Ok(()) => {}
        Err(MountError::Busy(_)) => {
            tracing::warn!(mountpoint = %mountpoint.display(), "busy: the mount point is free now, the vault is closed when the last file there is");
            if let Some(Err(error)) = forest.as_ref().map(|f| f.sync_all()) {
                tracing::error!(%error, "not everything could be made durable");
            }
            if let Err(error) = unmounter.unmount(true) {
                tracing::error!(%error, "cannot unmount");
            }
        }
        Err(error) => tracing::error!(%error, "cannot unmount"),
    };
    if signals::interrupted() {
        unmount();
    }
    signals::call(unmount);
}

impl From<IntegrityArg> for Integrity {
    fn from(arg: IntegrityArg) -> Self {
        match arg {
            IntegrityArg::Full => Integrity::Full,
            IntegrityArg::Metadata => Integrity::Metadata,
        }
    }
}

impl From<CacheArg> for CacheMode {
    fn from(arg: CacheArg) -> Self {
        match arg {
            CacheArg::Writeback => CacheMode::WriteBack,
            CacheArg::Through => CacheMode::Through,
            CacheArg::None => CacheMode::None,
        }
    }
}

impl From<DurabilityArg> for Durability {
    fn from(arg: DurabilityArg) -> Self {
        match arg {
            DurabilityArg::Ordered => Durability::Ordered,
            DurabilityArg::Relaxed => Durability::Relaxed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_split_at_bare_commas() {
        assert_eq!(split_options(r"ro,,key=raw:file:/a\,b,x\\y"), ["ro", "key=raw:file:/a,b", r"x\y"]);
        assert_eq!(split_options(""), Vec::<String>::new());
    }

    #[test]
    fn values_are_checked() {
        assert!(parse::<IntegrityArg>("integrity", "some").is_err());
        assert!(matches!(parse("integrity", "metadata"), Ok(IntegrityArg::Metadata)));
    }
}
