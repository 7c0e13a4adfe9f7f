//! `lamassu volume export`: starts nbdkit with this program's plugin, and waits for its end.
//!
//! The plugin opens the vaults, in nbdkit's process: no data pass through this one. It tells by a pipe how that went,
//! so that a failure has its exit code.

mod check;
mod socket;

use crate::fault::{Fault, Result};
use crate::keys::{KeyArg, SourceText};
use crate::open;
use crate::output::{Ui, print};
use crate::signals;
use crate::terminal;
use lamassu_host::control::protocol::Failed;
use lamassu_host::pins::Given;
use lamassu_host::{Error as HostError, FaultKind};
use lamassu_volume::Name;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, kill_process};
use socket::Claim;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

const EXAMPLES: &str = "\
Examples:
  lamassu volume export --socket /run/vm1.sock /srv/store/vault
  lamassu volume export --listen 0.0.0.0:10809 --tls-certificates /etc/nbd /srv/store/vault
  lamassu volume export --socket /run/nbd.sock a=/disk1/vault b=/disk2/vault
  lamassu volume export -k raw:file:a.key -k raw:file:b.key --socket nbd.sock a=/disk1/a b=/disk2/b
  lamassu volume export --socket /run/vm1.sock --filter rate /srv/store/vault -- rate=100M
Clients name an export by its volume: nbd+unix:///vm1?socket=/run/vm1.sock; with several vaults, by
VAULT/VOLUME. At SIGTERM everything written is committed, and the vaults are closed.
docs/volumes.md says more.";

/// The plugin as cargo builds it, and as it is installed.
const PLUGIN_BUILT: &str = "liblamassu_nbdkit.so";
const PLUGIN_INSTALLED: &str = "../lib/lamassu/nbdkit-lamassu-plugin.so";
/// The exit code of nbdkit if the plugin could not close a vault.
const NOT_CLOSED: i32 = 5;

/// Options of `volume export`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct Args {
    #[command(flatten)]
    _opening: crate::opening::OpeningArg,
    /// Key source that opens the vaults: once for all, or once for each vault, in order [default: passphrase:prompt]
    /// [env: LAMASSU_KEY]
    #[arg(short, long, value_name = "SOURCE")]
    key: Vec<SourceText>,
    /// Unix socket to listen on; only this user can connect
    #[arg(long, value_name = "FILE", required_unless_present = "listen", conflicts_with = "listen")]
    socket: Option<PathBuf>,
    /// TCP address to listen on; the usual port is 10809
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Require TLS, and of each client a certificate signed by the authority in ca-cert.pem: directory with that file,
    /// server-cert.pem and server-key.pem
    #[arg(long, value_name = "DIR")]
    tls_certificates: Option<PathBuf>,
    /// Take clients without a certificate, too: anyone who reaches the port can read and write everything
    #[arg(long, requires = "tls_certificates")]
    tls_any_client: bool,
    /// Require TLS: file with the clients' pre-shared keys (psktool makes it)
    #[arg(long, value_name = "FILE", conflicts_with = "tls_certificates")]
    tls_psk: Option<PathBuf>,
    /// Listen without TLS. Anyone who reaches the port can read and write everything; on a loopback address, every user
    /// of this machine
    #[arg(long, conflicts_with_all = ["tls_certificates", "tls_psk"])]
    no_tls: bool,
    /// Export only this volume or snapshot of the one vault; repeatable [default: all]
    #[arg(long = "volume", value_name = "VOLUME")]
    volumes: Vec<String>,
    /// Export everything read-only
    #[arg(long)]
    read_only: bool,
    /// Concurrent requests of one connection. With more than one, nbdkit 1.32 ends if a client disconnects in the
    /// middle of its answers
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    threads: u16,
    /// An nbdkit filter; repeatable, the outermost first
    #[arg(long = "filter", value_name = "NAME")]
    filters: Vec<OsString>,
    /// Write counts of each export to this file every few seconds, in Prometheus' text format
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// File for the server's process id: written when clients can connect, and removed at the end
    #[arg(long, value_name = "FILE")]
    pidfile: Option<PathBuf>,
    /// The nbdkit program [default: nbdkit]
    #[arg(long, value_name = "PROGRAM", default_value = "nbdkit", hide_default_value = true)]
    nbdkit: PathBuf,
    /// The plugin [default: the one installed with this program]
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// Print the command that would be run, and exit
    #[arg(long)]
    print_command: bool,
    /// Check everything that can be checked without serving, and end: options, nbdkit and the plugin, TLS's files,
    /// keys, volumes
    #[arg(long, conflicts_with = "print_command")]
    check: bool,
    /// The vault; several: NAME=DIR, or DIR for the name of the directory
    #[arg(required = true, value_name = "[NAME=]DIR")]
    vaults: Vec<OsString>,
    /// Parameters of the filters
    #[arg(last = true, value_name = "PARAMETER=VALUE")]
    parameters: Vec<OsString>,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", crate::keys::HELP)
}

pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let words = args.words(ui)?;
    if args.print_command {
        let quoted = |word: &OsString| format!("'{}'", word.to_string_lossy().replace('\'', "'\\''"));
        let line: Vec<String> = [args.nbdkit.clone().into()].iter().chain(&words).map(quoted).collect();
        return print(line.join(" "));
    }
    if args.check {
        return check::check(ui, args);
    }
    check::tls_files(args)?;
    let claim = args.socket.as_deref().map(Claim::take).transpose()?;
    claim.iter().try_for_each(|claim| claim.share(true))?;
    open::raise_descriptor_limit();
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(std::io::Error::from)?;
    fcntl_setfd(&write, FdFlags::empty()).map_err(std::io::Error::from)?;
    let mut command = Command::new(&args.nbdkit);
    command.args(&words).arg(format!("report={}", write.as_raw_fd())).args(&args.parameters).stdout(Stdio::null());
    let before = terminal::Settings::now();
    let started = command.spawn().map_err(|source| Fault::NoNbdkit { program: args.nbdkit.clone(), source });
    let child = started?;
    drop(write);
    claim.iter().try_for_each(|claim| claim.share(false))?;
    args.forget_keys();
    let done = served(ui, args, child, read);
    // The plugin asks for passphrases, and may have been ended by a signal meanwhile.
    before.iter().for_each(terminal::Settings::put_back);
    done
}

/// Waits until vaults are served, then for the end.
fn served(ui: &Ui, args: &Args, mut child: Child, report: OwnedFd) -> Result<()> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    signals::call(move || {
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::TERM);
        }
    });
    let mut said = String::new();
    File::from(report).read_to_string(&mut said)?;
    // An error: it ended before it called the plugin.
    let told = serde_json::from_str::<Option<Failed>>(&said);
    if let Ok(None) = told {
        match (&args.socket, args.listen) {
            (Some(socket), _) => ui.note(format_args!("serving on {}", socket.display())),
            (None, address) => address.iter().for_each(|address| ui.note(format_args!("serving on {address}"))),
        }
    }
    let status = child.wait();
    // Its number may be another's now.
    signals::flag_only();
    let status = status?;
    match told {
        Ok(Some(failed)) => Err(Fault::Told(failed).into()),
        Ok(None) if status.success() => Ok(()),
        Ok(None) if status.code() == Some(NOT_CLOSED) => {
            let message =
                "a vault could not be closed at the end (the log says why): data that clients had not flushed \
                           are lost; what was flushed is there"
                    .into();
            Err(Fault::Told(Failed { kind: FaultKind::Store, message }).into())
        }
        // Before it served anything: at a prompt, which Ctrl-C ends, or by a signal of this process.
        Err(_) if was_ended(status) => Err(HostError::Interrupted.into()),
        Ok(None) => Err(Fault::NbdkitKilled { status }.into()),
        Err(_) => Err(Fault::NbdkitEnded { status }.into()),
    }
}

/// Whether a signal has ended a process that ends programs on request.
fn was_ended(status: ExitStatus) -> bool {
    let signals = [Signal::INT, Signal::TERM, Signal::HUP].map(Signal::as_raw);
    status.signal().is_some_and(|signal| signals.contains(&signal))
}

/// `KEY=VALUE`.
fn parameter(key: &str, value: impl AsRef<OsStr>) -> OsString {
    let mut word = OsString::from(format!("{key}="));
    word.push(value);
    word
}

impl Args {
    /// nbdkit's arguments, but for the descriptor of the report and the filters' parameters.
    fn words(&self, ui: &Ui) -> Result<Vec<OsString>> {
        self.check_tls()?;
        // It ends with its parent, so that no vault stays open unnoticed.
        let mut words: Vec<OsString> = vec!["--foreground".into(), "--exit-with-parent".into()];
        let mut option = |name: &str, value: Option<&OsStr>| {
            if let Some(value) = value {
                words.extend([OsString::from(name), value.into()]);
            }
        };
        option("--unix", self.socket.as_ref().map(|path| path.as_os_str()));
        if let Some(address) = self.listen {
            option("--ipaddr", Some(address.ip().to_string().as_ref()));
            option("--port", Some(address.port().to_string().as_ref()));
        }
        option("--tls-certificates", self.tls_certificates.as_ref().map(|path| path.as_os_str()));
        option("--tls-psk", self.tls_psk.as_ref().map(|path| path.as_os_str()));
        option("--threads", Some(self.threads.to_string().as_ref()));
        self.filters.iter().for_each(|filter| option("--filter", Some(filter)));
        if self.tls_certificates.is_some() || self.tls_psk.is_some() {
            words.push("--tls=require".into());
        }
        if self.tls_certificates.is_some() && !self.tls_any_client {
            words.push("--tls-verify-peer".into());
        }
        words.push(self.plugin()?.into());
        words.extend(policy(ui));
        words.extend(self.metrics.iter().map(|file| parameter("metrics", file)));
        // Not nbdkit's own option: nbdkit writes the file before the plugin opens the vaults.
        words.extend(self.pidfile.iter().map(|file| parameter("pidfile", file)));
        self.vault_words(ui, &mut words)?;
        Ok(words)
    }

    fn check_tls(&self) -> Result<()> {
        let has_tls = self.tls_certificates.is_some() || self.tls_psk.is_some();
        match self.listen {
            Some(_) if !has_tls && !self.no_tls => Err(HostError::Usage(
                "anyone who reaches the port could read and write everything, on a loopback address every user of this \
                 machine: give --tls-certificates DIR (then clients need a certificate) or --tls-psk FILE, or --socket \
                 PATH instead; --no-tls if that is intended",
            )
            .into()),
            Some(_) | None => Ok(()),
        }
    }

    /// The sources of the vaults' keys, all given or the default one.
    fn keys(&self) -> impl Iterator<Item = KeyArg> {
        let given = self.key.iter().cloned().map(Some);
        given.chain(self.key.is_empty().then_some(None)).map(KeyArg::of)
    }

    /// nbdkit has its own copies by now; this process goes on without them.
    fn forget_keys(&self) {
        self.keys().filter_map(|key| key.source().ok()).for_each(|source| source.forget());
    }

    fn vault_words(&self, ui: &Ui, words: &mut Vec<OsString>) -> Result<()> {
        if !self.volumes.is_empty() && self.vaults.len() > 1 {
            return Err(HostError::Usage("--volume is for one vault: of several, all volumes are exported").into());
        }
        if self.key.len() > 1 && self.key.len() != self.vaults.len() {
            return Err(HostError::Usage("give --key once for all vaults, or once for each").into());
        }
        for (n, vault) in self.vaults.iter().enumerate() {
            let (name, dir) = Args::named(vault);
            let dir = dir.canonicalize().map_err(|source| HostError::NotADirectory { dir: dir.into(), source })?;
            words.push(parameter("vault", &dir));
            if let Some(anchor) = ui.policy.anchors.choice().to_argument() {
                words.push(parameter("anchor", anchor));
            }
            if let Some(name) = name {
                words.push(parameter("name", name));
            }
            if let Some(key) = self.key.get(n).or(self.key.first()) {
                // What makes no sense may be a passphrase, and does not become an argument of another process.
                words.push(parameter("key", key.checked("--key")?));
            }
            for volume in &self.volumes {
                words.push(parameter("volume", volume.parse::<Name>()?.to_string()));
            }
            if self.read_only {
                words.push("read-only=true".into());
            }
        }
        Ok(())
    }

    /// Name and directory in `[NAME=]DIR`.
    fn named(vault: &OsStr) -> (Option<&str>, &Path) {
        match vault.to_str().and_then(|text| text.split_once('=')) {
            Some((name, dir)) if !name.contains('/') => (Some(name), Path::new(dir)),
            _ => (None, Path::new(vault)),
        }
    }

    fn plugin(&self) -> Result<PathBuf> {
        if let Some(plugin) = &self.plugin {
            return Ok(std::path::absolute(plugin)?);
        }
        let program = std::env::current_exe()?;
        let dir = program.parent().unwrap_or(Path::new("/"));
        let places = [PLUGIN_BUILT, PLUGIN_INSTALLED].map(|place| dir.join(place));
        match places.iter().find(|place| place.exists()) {
            Some(place) => Ok(place.clone()),
            None => Err(Fault::NoPlugin { dir: dir.into() }.into()),
        }
    }
}

/// What this process was told of every vault.
fn policy(ui: &Ui) -> Vec<OsString> {
    let mut words = Vec::new();
    match ui.policy.pins.given() {
        Some(Given::Key(key)) => words.push(parameter("admin-key", crate::text::hex(&key.0))),
        Some(Given::Zone(file)) => words.push(parameter("admin-zone", file)),
        None => {}
    }
    if ui.policy.allows_any_memory() {
        words.push("argon2-any-memory=true".into());
    }
    if ui.policy.is_approved_only() {
        words.push("fips=true".into());
    }
    words
}
