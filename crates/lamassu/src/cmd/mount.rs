//! `lamassu mount`.

use crate::alert::{self, CommandSink};
use crate::cmd::remount;
use crate::confine;
use crate::control;
use crate::daemon::{self, Ready, Side};
use crate::exit::Code;
use crate::fault::{Context, Fault, Result};
use crate::keys::{self, KeyArg, SourceText};
use crate::log;
use crate::mounts;
use crate::open;
use crate::output::Ui;
use crate::private::{self, Access};
use crate::signals;
use crate::users;
use clap::ValueEnum;
use lamassu_fuse::{CacheMode, MountError, MountOptions, Mounted, Mountpoint, OptionError};
use lamassu_host::Error as HostError;
use lamassu_host::anchors::Choice;
use lamassu_host::{Keeper, Place, Served, TurnOpening};
use lamassu_vault::event::{Events, FoundBy};
use lamassu_vault::{Durability, Forest, Freshness, Integrity, Options, ROOT, Vault};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  lamassu mount /srv/store/vault ~/private
  lamassu mount -k raw:file:/root/vault.key --read-only /srv/store/vault /mnt
  lamassu mount -o allow_other,noatime,cache=through /srv/store/vault /mnt
In /etc/fstab, if /sbin/mount.fuse.lamassu is a link to this program (`make install` makes it):
  /srv/store/vault  /mnt  fuse.lamassu  key=raw:file:/root/vault.key,allow_other  0 0

The command returns when the mount is usable. Later integrity errors go to the journal or syslog, or
to --log-file.";

/// How long the end of a mount waits until events are handed to the process that tells of them.
const LAST_EVENTS: Duration = Duration::from_secs(2);

/// Options of `mount`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    /// What is verified on every read: `full` re-hashes each block; `metadata` trusts the blocks (faster; only in the
    /// suites aes and paper) [default: full]
    #[arg(short, long, value_enum)]
    integrity: Option<IntegrityArg>,
    /// What the kernel caches of file contents: reads and writes, only reads, or nothing (no plaintext stays in memory)
    /// [default: writeback]
    #[arg(short, long, value_enum)]
    cache: Option<CacheArg>,
    /// `ordered` survives power cuts; `relaxed` omits barriers, and survives only a killed process [default: ordered]
    #[arg(long, value_enum)]
    durability: Option<DurabilityArg>,
    /// When the anchor records what an fsync covers: before the fsync returns, so that no older state passes for it
    /// (`fsync`), or some seconds later (`interval`, faster) [default: fsync]
    #[arg(long, value_enum)]
    freshness: Option<FreshnessArg>,
    /// Let several hosts mount the vault at once, in turns. The anchor must be at a server, and the store must show
    /// every host at once what another one wrote (docs/sharing.md)
    #[arg(long)]
    shared: bool,
    /// Change nothing in the store; several hosts can then mount it at once
    #[arg(short, long, visible_alias = "ro")]
    read_only: bool,
    /// Let other users use the mount (unless you are root, /etc/fuse.conf must have user_allow_other)
    #[arg(long)]
    allow_other: bool,
    /// Stay in the foreground; SIGINT and SIGTERM unmount
    #[arg(short, long)]
    foreground: bool,
    /// Unload the vault and its datasets with their keys after this time without a request and without an open file;
    /// `lamassu key load` loads them again
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u32).range(1..=525_600))]
    idle: Option<u32>,
    /// Let this user (a name or number) create datasets that inherit their key, in directories that the user owns, and
    /// list, unload and load them; repeatable
    #[arg(long, value_name = "USER")]
    delegate: Vec<String>,
    /// Run this command with /bin/sh, as the mounting user, when something in the store is not as it was written. The
    /// command reads the event as JSON (docs/alerts.md)
    #[arg(long, value_name = "COMMAND")]
    on_integrity_failure: Option<String>,
    /// Number of cipher threads; 0: one per processor
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: u16,
    /// Options as mount(8) and fstab write them, separated by commas: ro, allow_other, noatime, nodev, nosuid, noexec,
    /// fsname=…, keep_awake=never|always (all of them: docs/cli.md), allow_dev and allow_suid (which TRUST THE STORE:
    /// its device numbers, set-uid bits, owners and file capabilities then count); and key=, integrity=, cache=,
    /// durability=, freshness=, anchor=, on_integrity_failure=, which count where the option of that name is not given
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
    /// Directory to mount at; must be empty
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
enum FreshnessArg {
    Fsync,
    Interval,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DurabilityArg {
    Ordered,
    Relaxed,
}

/// Everything decided before a key is asked for.
struct Plan {
    dir: PathBuf,
    mountpoint: Mountpoint,
    key: KeyArg,
    vault: Options,
    mount: MountOptions,
    /// without a request for so long, everything is unloaded
    idle: Option<Duration>,
    /// hosts have it in turn
    shared: bool,
    /// where the anchor lies, by `-o`
    anchor: Option<Choice>,
    /// the command that gets integrity events
    alert: Option<String>,
    /// the process that runs that, once it is started
    broker: Option<UnixStream>,
}

pub fn run(ui: &Ui, args: Args) -> Result<Code> {
    let words: Vec<String> = args.options.iter().flat_map(|o| split_options(o)).collect();
    if remount::is_wanted(&words) {
        remount::run(&args.mountpoint, &words, args.read_only)?;
        return Ok(Code::Done);
    }
    let (foreground, fake) = (args.foreground, args.fake);
    let mut plan = Plan::of(ui, args)?;
    let ui = &plan.with_anchor(ui);
    if fake {
        open::found(ui, &plan.dir)?;
        return Ok(Code::Done);
    }
    // Before the capability for it is dropped.
    open::raise_descriptor_limit();
    if foreground {
        plan.start_broker()?;
        confine::drop_capabilities();
        signals::start();
        return serve(ui, plan, None);
    }
    match daemon::fork()? {
        Side::Parent(waiter) => {
            plan.forget_key();
            waiter.wait()
        }
        Side::Child(ready) => {
            plan.start_broker()?;
            confine::drop_capabilities();
            signals::start();
            serve(ui, plan, Some(ready))
        }
    }
}

impl Plan {
    fn of(ui: &Ui, args: Args) -> Result<Plan> {
        let mut vault = crate::open::options(false);
        vault.threads = args.threads.into();
        let mut mount = MountOptions::default();
        let mut shared = args.shared;
        let (mut key, mut anchor, mut alert, mut asks_for_write_back) = (None, None, None, false);
        for words in &args.options {
            for word in split_options(words) {
                asks_for_write_back |= word == "cache=writeback";
                match word.split_once('=') {
                    Some(("key", source)) => key = Some(SourceText::from(source)),
                    Some(("integrity", value)) => vault.integrity = parse::<IntegrityArg>("integrity", value)?.into(),
                    Some(("anchor", file)) => anchor = Some(Choice::from_argument(file.into())),
                    Some(("freshness", value)) => vault.freshness = parse::<FreshnessArg>("freshness", value)?.into(),
                    Some(("durability", value)) => {
                        vault.durability = parse::<DurabilityArg>("durability", value)?.into()
                    }
                    Some(("on_integrity_failure", command)) => alert = Some(command.to_owned()),
                    None if word == "shared" => shared = true,
                    Some(_) | None => match mount.apply_word(&word) {
                        Err(error @ OptionError::Unknown(_)) if args.sloppy => ui.warn(error),
                        done => done?,
                    },
                }
            }
        }
        let fsname_given = mount.fsname != MountOptions::default().fsname;
        let dir =
            args.dir.canonicalize().map_err(|source| HostError::NotADirectory { dir: args.dir.clone(), source })?;
        if !fsname_given {
            mount.fsname = dir.to_string_lossy().into_owned();
        }
        if let Some(integrity) = args.integrity {
            vault.integrity = integrity.into();
        }
        if let Some(durability) = args.durability {
            vault.durability = durability.into();
        }
        if let Some(freshness) = args.freshness {
            vault.freshness = freshness.into();
        }
        if let Some(cache) = args.cache {
            mount.cache = cache.into();
        }
        mount.read_only |= args.read_only;
        mount.allow_other |= args.allow_other;
        vault.read_only = mount.read_only;
        mount.delegates = args.delegate.iter().map(|user| users::uid_of(user)).collect::<Result<_>>()?;
        if !mount.delegates.is_empty() && !mount.allow_other {
            return Err(HostError::Usage("--delegate is for other users: it needs --allow-other").into());
        }
        let mountpoint = mountpoint(&args.mountpoint, &dir)?;
        if mount.allow_other && mounts::has_vault(&dir) {
            private::check(&dir, None)?;
        }
        if shared && args.idle.is_some() {
            return Err(
                HostError::Usage("--idle unloads a vault, which a shared mount cannot: leave out one of them").into()
            );
        }
        asks_for_write_back = args.cache.map_or(asks_for_write_back, |cache| matches!(cache, CacheArg::Writeback));
        if shared && asks_for_write_back {
            return Err(HostError::Usage(
                "other hosts would not see what the kernel has yet to write: --shared goes with --cache=through or none",
            )
            .into());
        }
        if shared && matches!(vault.freshness, Freshness::Interval) {
            return Err(HostError::Usage(
                "what an fsync has returned for is in the anchor when another host has the vault: --shared goes with --freshness=fsync",
            )
            .into());
        }
        let key = args.key.or(key);
        let idle = args.idle.map(|minutes| Duration::from_secs(60 * u64::from(minutes)));
        let alert = args.on_integrity_failure.or(alert);
        Ok(Plan { dir, mountpoint, key, vault, mount, idle, shared, anchor, alert, broker: None })
    }
}

/// An existing directory, held open, that is not inside the vault: a mount over the store would hide it, one inside it
/// would become part of the tree.
pub fn mountpoint(path: &Path, dir: &Path) -> Result<Mountpoint, Fault> {
    let held = Mountpoint::open(path).map_err(|source| Fault::Mountpoint { path: path.into(), source })?;
    if held.path().starts_with(dir) || dir.starts_with(held.path()) {
        return Err(Fault::MountpointInVault { path: path.into() });
    }
    Ok(held)
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
fn serve(ui: &Ui, mut plan: Plan, ready: Option<Ready>) -> Result<Code> {
    let events = plan.send_events()?;
    let mounted = plan.attach(ui).inspect_err(|error| {
        alert::tell_refusal(&events, &plan.dir, FoundBy::Read, error);
        events.end(LAST_EVENTS);
    })?;
    let Plan { dir, mountpoint, .. } = plan;
    // From here on it is only named: who has it open keeps the file system below it from being unmounted.
    let mountpoint = mountpoint.into_path();
    log::connect();
    // Its zone, or one of a dataset, may become oblivious later: then every new block needs a server.
    confine::seal(ui.policy.anchors.has_joined());
    ui.detail(format_args!("{} is mounted on {}", dir.display(), mountpoint.display()));
    let Some(ready) = ready else {
        let ended = mounted.wait();
        ui.policy.anchors.leave_servers();
        events.end(LAST_EVENTS);
        ended?;
        return Ok(Code::Done);
    };
    ready.tell()?;
    tracing::info!(dir = %dir.display(), mountpoint = %mountpoint.display(), "mounted");
    // Standard error has no reader any more.
    let ended = mounted.wait().inspect_err(|error| tracing::error!(%error, "the mount ended with an error"));
    ui.policy.anchors.leave_servers();
    events.end(LAST_EVENTS);
    tracing::info!(dir = %dir.display(), "unmounted");
    ended?;
    Ok(Code::Done)
}

impl Plan {
    /// Starts the process that runs the command of `--on-integrity-failure`.
    fn start_broker(&mut self) -> Result<()> {
        self.broker = self
            .alert
            .as_ref()
            .map(|alert| alert::start_broker(alert, &self.dir, Some(self.mountpoint.path())))
            .transpose()?;
        Ok(())
    }

    /// Events of this mount go to the log, and to that process from now on.
    fn send_events(&mut self) -> Result<Events> {
        if let Some(broker) = self.broker.take() {
            self.vault.events = Events::with_sink(Arc::new(CommandSink::new(broker)))?;
        }
        Ok(self.vault.events.clone())
    }

    /// What gave the key stays neither in the environment of the process that serves nor among its descriptors: the
    /// mount may be unloaded later.
    fn forget_key(&self) {
        if let Ok(source) = self.key.source() {
            source.forget();
        }
    }

    /// An `anchor=` of `-o` counts where `--anchor` is not given.
    fn with_anchor(&self, ui: &Ui) -> Ui {
        let mut anchors = ui.policy.anchors.clone();
        if let (Some(choice), Choice::Remembered) = (&self.anchor, anchors.choice()) {
            anchors = anchors.chosen(choice.clone());
        }
        if self.shared {
            anchors = anchors.by_turns();
        }
        Ui { policy: ui.policy.clone().anchored_by(anchors), ..ui.clone() }
    }

    /// Opens what is mounted, and mounts it; signals unmount it from then on.
    fn attach(&self, ui: &Ui) -> Result<Mounted> {
        let mut options = self.mount.clone();
        let found = open::found(ui, &self.dir)?;
        let mut vault = Options { by_turns: self.shared, ..self.vault.clone() };
        if found.header.is_snapshot() && !vault.read_only {
            ui.note("a snapshot: mounted read-only");
            (vault.read_only, options.read_only) = (true, true);
        }
        let mut unsealed = open::unlock(ui, found, &self.key)?;
        self.forget_key();
        let opened = unsealed.open_to_serve(vault.clone(), options.noatime)?;
        if options.allow_other {
            let st = opened.backend.root().stat()?;
            private::check(&self.dir, Some(Access { mode: st.mode, uid: st.uid }))?;
            tell_closed_root(ui, &opened.vault, self.mountpoint.path())?;
        }
        // A mount without it would answer every call with an error.
        opened.vault.verify_root().with_context(|| format!("cannot open the vault in {}", self.dir.display()))?;
        if !lamassu_crypto::secret::memory_is_locked() {
            ui.warn(format_args!("keys may reach the swap space: their memory could not be locked; raise `ulimit -l`"));
        }
        // A signal between here and the handler below must not leave a mount without a daemon.
        signals::flag_only();
        options.max_read = options.max_read.max(unsealed.found.header.geometry().block_size() as u32);
        take_modes_as_they_come();
        let may_end = opened.anchor.as_ref().is_some_and(|anchor| anchor.may_end());
        if (may_end || self.shared) && options.cache == CacheMode::WriteBack {
            // With it the kernel takes sizes and times for its own, and believes them whatever it is told.
            options.cache = CacheMode::Through;
        }
        let in_turn = match self.shared {
            true => Some(TurnOpening::of(&unsealed.found.header, &opened.vault)),
            false => None,
        };
        let cached = options.cache != CacheMode::None;
        let own = Place::of(&self.dir)?;
        // The history does not tell of shared mounts: it would of each turn.
        let mountpoint = in_turn.is_none().then(|| self.mountpoint.path().into());
        let keeper = Keeper::new(own, vault, cached, mountpoint, ui.policy.clone());
        let served = Served::new(unsealed, opened, keeper)?;
        if let Some(opening) = in_turn {
            served.take_turns(opening)?;
        }
        let forest = served.forest().clone();
        let calls = Some(control::answering(&served));
        let mounted = lamassu_fuse::mount_answering(forest.clone(), &self.mountpoint, &options, calls)?;
        forest.set_cache(mounted.cache());
        served.counts_of(Arc::new(control::Requests(mounted.request_counts())));
        served.keeper().mounted();
        if let Some(idle) = self.idle {
            forest.unload_after(idle);
        }
        unmount_on_signal(&mounted, Arc::downgrade(&forest));
        Ok(mounted)
    }
}

/// Others may use the mount, and its root may not let them in.
fn tell_closed_root(ui: &Ui, vault: &Vault, mountpoint: &Path) -> Result<()> {
    if vault.getattr(ROOT, None)?.mode & private::SEARCH_BY_OTHERS == 0 {
        ui.note(format_args!(
            "only its owner can enter the mount's root; `chmod 755 {}` lets others in",
            mountpoint.display()
        ));
    }
    Ok(())
}

/// Empties the umask: the kernel has already applied those of the applications. Call it after the keys are loaded:
/// files that loading writes must obey the umask.
fn take_modes_as_they_come() {
    rustix::process::umask(rustix::fs::Mode::empty());
}

/// `forest`: to be made durable where the mount is in use and can only be detached. Not held: signals are waited for
/// until the process ends, and with the mount the vault and its anchor are closed.
fn unmount_on_signal(mounted: &Mounted, forest: Weak<Forest>) {
    let unmounter = mounted.unmounter();
    let mountpoint = mounted.mountpoint().to_path_buf();
    let unmount = move || match unmounter.unmount(false) {
        Ok(()) => {}
        Err(MountError::Busy(_)) => {
            tracing::warn!(mountpoint = %mountpoint.display(), "busy: the mount point is free now, the vault is closed when the last file there is");
            if let Some(Err(error)) = forest.upgrade().map(|forest| forest.sync_all()) {
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

impl From<FreshnessArg> for Freshness {
    fn from(arg: FreshnessArg) -> Self {
        match arg {
            FreshnessArg::Fsync => Freshness::Fsync,
            FreshnessArg::Interval => Freshness::Interval,
        }
    }
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
