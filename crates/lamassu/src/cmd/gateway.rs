//! `lamassu gateway`: a vault served by other protocols than that of a mount, and mounted at the same time by the same
//! process where its configuration says so: there is one writer of a vault.

use crate::confine;
use crate::control;
use crate::exit::Code;
use crate::fault::{Context, Result};
use crate::keys::{self, KeyArg, SourceText};
use crate::log;
use crate::open;
use crate::output::{Ui, print};
use crate::private::{self, Access};
use crate::signals;
use lamassu_anchor::AnchorError;
use lamassu_fuse::{CacheMode, MountError, MountOptions, Mountpoint, Unmounter};
use lamassu_gateway::provider::{self, ProviderConfig};
use lamassu_gateway::{Config, Serving, config, credentials, watch};
use lamassu_host::Error as HostError;
use lamassu_host::{Keeper, Place, Served};
use lamassu_vault::forest::ROOT_MEMBER;
use lamassu_vault::{FileSystem, Forest, VaultError};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

const EXAMPLES: &str = "\
Examples:
  lamassu gateway config > /etc/lamassu/gateway.toml
  lamassu gateway config --credentials > credentials.toml && chmod 600 credentials.toml
  lamassu gateway s3 --config /etc/lamassu/gateway.toml --check-config
  lamassu -v gateway s3 --config /etc/lamassu/gateway.toml
With -v each request is logged. SIGHUP reloads credentials and certificate. At SIGTERM, requests
end, then the vault is closed. docs/gateway.md says more.";

const PROVIDER_EXAMPLES: &str = "\
Examples:
  lamassu gateway config --provider > /etc/lamassu/proxy.toml
  lamassu gateway provider --config /etc/lamassu/proxy.toml --public-key
  lamassu gateway provider --config /etc/lamassu/proxy.toml --check-config
  lamassu -v gateway provider --config /etc/lamassu/proxy.toml
The tenants' side is `lamassu policy`. docs/access.md says more.";

/// How a vault, or a provider's store, is served.
#[derive(clap::Subcommand, Debug)]
pub enum GatewayCommand {
    /// Serve the directories of a vault as buckets, over S3
    S3(Args),
    /// Serve a provider's directory of ciphertext objects over S3, with access decided by tenants' rules over tokens
    Provider(ProviderArgs),
    /// Print a commented configuration with every option
    Config(ConfigArgs),
}

/// Options of `gateway s3`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    /// Configuration file; `lamassu gateway config` prints an example
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Check configuration, credentials and certificate, report what is wrong, and exit
    #[arg(long)]
    check_config: bool,
}

/// Options of `gateway provider`.
#[derive(clap::Args, Debug)]
#[command(after_help = PROVIDER_EXAMPLES)]
pub struct ProviderArgs {
    /// Configuration file; `lamassu gateway config --provider` prints an example
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Check the configuration and the files that it names, report what is wrong, and exit
    #[arg(long)]
    check_config: bool,
    /// Print the proxy's public key, which tenants need for `lamassu policy init`, and exit. The first call creates the
    /// key
    #[arg(long, conflicts_with = "check_config")]
    public_key: bool,
}

/// Options of `gateway config`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ConfigArgs {
    /// Print the credentials file instead
    #[arg(long)]
    credentials: bool,
    /// Print the configuration of `gateway provider` instead
    #[arg(long, conflicts_with = "credentials")]
    provider: bool,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

pub fn run(ui: &Ui, command: GatewayCommand) -> Result<Code> {
    match command {
        GatewayCommand::Config(args) => {
            let text = match (args.credentials, args.provider) {
                (true, _) => credentials::COMMENTED,
                (_, true) => provider::config::COMMENTED,
                (false, false) => config::COMMENTED,
            };
            print(text.trim_end())?;
        }
        GatewayCommand::S3(args) => serve(ui, &args)?,
        GatewayCommand::Provider(args) => serve_provider(ui, &args)?,
    }
    Ok(Code::Done)
}

fn serve(ui: &Ui, args: &Args) -> Result<()> {
    let config = Config::read(&args.config)?;
    lamassu_gateway::check(&config)?;
    if args.check_config {
        ui.note(format_args!("{} is good", args.config.display()));
        return Ok(());
    }
    // Before the capability for it is dropped.
    open::raise_descriptor_limit();
    confine::drop_capabilities();
    signals::survive_file_size_limit();
    let opened = Gateway::open(ui, args, &config)?;
    log::connect();
    // It takes connections, whatever the vault's anchor is.
    confine::seal(true);
    let served = opened.serve(ui, &config);
    let closed = opened.close();
    ui.policy.anchors.leave_servers();
    served?;
    closed
}

fn serve_provider(ui: &Ui, args: &ProviderArgs) -> Result<()> {
    let config = ProviderConfig::read(&args.config)?;
    if args.public_key {
        return print(provider::public_key(&config)?);
    }
    provider::check(&config)?;
    if args.check_config {
        ui.note(format_args!("{} is good", args.config.display()));
        return Ok(());
    }
    open::raise_descriptor_limit();
    confine::drop_capabilities();
    signals::survive_file_size_limit();
    log::connect();
    confine::seal(true);
    // Modes of objects are those that the proxy says.
    rustix::process::umask(rustix::fs::Mode::empty());
    let told = ui.clone();
    Ok(provider::serve(&config, Box::new(move |address| told.note(format_args!("serving on {address}"))))?)
}

/// A vault that this process has open, and mounted if that is wanted.
struct Gateway {
    served: Arc<Served>,
    mount: Option<Mount>,
    /// Whether the mount has ended, or the session at the server that keeps the vault's anchor.
    ended: watch::Receiver<bool>,
    /// the session's end
    lost: Arc<Mutex<Option<AnchorError>>>,
}

/// The mount, and the thread that waits for its end.
struct Mount {
    unmounter: Unmounter,
    waiter: JoinHandle<Result<(), MountError>>,
}

impl Gateway {
    fn open(ui: &Ui, args: &Args, config: &Config) -> Result<Gateway> {
        let dir = &config.vault;
        let dir = dir.canonicalize().map_err(|source| HostError::NotADirectory { dir: dir.clone(), source })?;
        let mountpoint = config.mountpoint.as_deref().map(|path| super::mount::mountpoint(path, &dir)).transpose()?;
        let found = open::found(ui, &dir)?;
        let mut vault = open::options(config.read_only || found.header.is_snapshot());
        vault.read_only |= config.read_only;
        let key = args.key.clone().or(config.key().map(SourceText::from));
        let mut unsealed = open::unlock(ui, found, &key)?;
        if let Ok(source) = key.source() {
            source.forget();
        }
        let opened = unsealed.open_to_serve(vault.clone(), true)?;
        opened.vault.verify_root().with_context(|| format!("cannot open the vault in {}", dir.display()))?;
        if !lamassu_crypto::secret::memory_is_locked() {
            ui.warn(format_args!("keys may reach the swap space: their memory could not be locked; raise `ulimit -l`"));
        }
        if config.allow_other && mountpoint.is_some() {
            let st = opened.backend.root().stat()?;
            private::check(&dir, Some(Access { mode: st.mode, uid: st.uid }))?;
        }
        let mut options = MountOptions {
            // What the kernel has not written back yet, clients of the gateway would not see.
            cache: CacheMode::Through,
            read_only: vault.read_only,
            allow_other: config.allow_other,
            noatime: true,
            fsname: dir.to_string_lossy().into_owned(),
            ..MountOptions::default()
        };
        options.max_read = options.max_read.max(unsealed.found.header.geometry().block_size() as u32);
        // Modes are those that the configuration and the programs in the mount say.
        rustix::process::umask(rustix::fs::Mode::empty());
        let recorded = mountpoint.as_ref().map(|mountpoint| mountpoint.path().into());
        let keeper = Keeper::new(Place::of(&dir)?, vault, true, recorded, ui.policy.clone());
        let served = Served::new(unsealed, opened, keeper)?;
        let (end, ended) = watch::channel(false);
        let lost = Self::watch_session(&served, end.clone())?;
        let mount = mountpoint.map(|mountpoint| Self::mount(&served, &mountpoint, &options, end)).transpose()?;
        Ok(Gateway { served, mount, ended, lost })
    }

    /// Has the gateway end with its session: nothing would be answered any more. A service manager starts it again.
    fn watch_session(served: &Arc<Served>, end: watch::Sender<bool>) -> Result<Arc<Mutex<Option<AnchorError>>>> {
        let lost = Arc::new(Mutex::new(None));
        let found = lost.clone();
        let Some(root) = served.forest().vault(ROOT_MEMBER) else { return Ok(lost) };
        lamassu_host::when_session_ends(&root, move |error| {
            tracing::error!(%error, "this host has the vault no longer: the gateway ends, to be started again");
            *found.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            end.send_replace(true);
        })?;
        Ok(lost)
    }

    fn mount(
        served: &Arc<Served>,
        mountpoint: &Mountpoint,
        options: &MountOptions,
        end: watch::Sender<bool>,
    ) -> Result<Mount> {
        let (forest, calls) = (served.forest().clone(), Some(control::answering(served)));
        let mounted = lamassu_fuse::mount_answering(forest.clone(), mountpoint, options, calls)?;
        forest.set_cache(mounted.cache());
        served.counts_of(Arc::new(control::Requests(mounted.request_counts())));
        served.keeper().mounted();
        let unmounter = mounted.unmounter();
        // Unmounting ends the gateway: the vault is closed then.
        let wait = move || {
            let done = mounted.wait();
            end.send_replace(true);
            done
        };
        let waiter = std::thread::Builder::new().name("lamassu-mounted".into()).spawn(wait)?;
        Ok(Mount { unmounter, waiter })
    }

    fn forest(&self) -> &Arc<Forest> {
        self.served.forest()
    }

    fn serve(&self, ui: &Ui, config: &Config) -> Result<()> {
        let told = ui.clone();
        let serving = Serving {
            maintains: self.mount.is_none(),
            ready: Box::new(move |address| told.note(format_args!("serving on {address}"))),
        };
        lamassu_gateway::serve(config, self.forest(), serving, self.ended.clone())?;
        match self.lost.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(HostError::Vault(VaultError::Anchor(error)).into()),
            None => Ok(()),
        }
    }

    /// Unmounts, and closes the vault.
    fn close(self) -> Result<()> {
        let Some(Mount { unmounter, waiter }) = self.mount else { return Ok(self.served.forest().close()?) };
        match unmounter.unmount(false) {
            Err(MountError::Busy(path)) => {
                tracing::warn!(mountpoint = %path.display(), "busy: the vault is closed when the last file there is");
                self.served.forest().sync_all()?;
                unmounter.unmount(true)?;
            }
            done => done?,
        }
        Ok(waiter.join().unwrap_or(Ok(()))?)
    }
}
