//! `lamassu-server`: keeps the anchors of shared vaults, and knows the hosts that may use them.
#![forbid(unsafe_code)]

mod keys_command;
mod policy_command;

use clap::{Parser, Subcommand};
use lamassu_server::admin::{Answer, Request, ShownHost, ShownVault, ask, back_up, id_of, read_alerts, read_audit};
use lamassu_server::alerts::{Alert, Which, printable};
use lamassu_server::audit::{AuditEntry, ChainedEntry};
use lamassu_server::{Result, ServerError, preflight, run};
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  lamassu-server init /var/lib/lamassu-server && lamassu-server run /var/lib/lamassu-server
  lamassu-server enrol /var/lib/lamassu-server node1 | ssh node1 lamassu host join
  lamassu-server host revoke /var/lib/lamassu-server node1
docs/server.md tells how to set it up, and its exit codes.";

/// The server of shared Lamassu vaults: it keeps their anchors, grants leases, and knows which hosts may use them
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Create the directory of a new server: its authority, its state, and a configuration to edit
    Init {
        /// Directory to create; an existing one must be empty
        dir: PathBuf,
    },
    /// Serve until SIGTERM. SIGHUP reloads the policy and renews the certificate
    Run {
        /// Check the configuration, the policy, and every other file that a start reads, print the result, and exit
        #[arg(long)]
        check_config: bool,
        /// The server's directory
        dir: PathBuf,
    },
    /// Print a one-time token with which a host may join: one line, the input of `lamassu host join`
    Enrol {
        /// A vault that the host may use, by the id that `lamassu info` shows; repeatable
        #[arg(long, value_name = "ID")]
        vault: Vec<String>,
        /// The server's directory
        dir: PathBuf,
        /// The host's name at this server
        host: String,
    },
    /// Manage hosts that have joined
    #[command(subcommand)]
    Host(HostCommand),
    /// Manage keys kept for hosts, which use them as the key source `server://HOST/KEY`
    #[command(subcommand)]
    Keys(keys_command::KeysCommand),
    /// Show and test the policy: the protections and algorithms that hosts may use in vaults
    #[command(subcommand)]
    Policy(policy_command::PolicyCommand),
    /// Handle alerts: reports of hosts that a vault's content is not what was written
    #[command(subcommand)]
    Alerts(AlertsCommand),
    /// Retire the anchor of a vault that is not in use: its file is renamed, and hosts find no anchor here
    Forget {
        /// The server's directory
        dir: PathBuf,
        /// The vault, by the id that `lamassu info` shows
        vault: String,
    },
    /// Print the audit log, verified: which hosts joined, and which host used which vault when
    Audit {
        /// Print one line of JSON for each entry, with its head
        #[arg(long)]
        json: bool,
        /// Print only entries after this number
        #[arg(long, value_name = "NUMBER", default_value_t = 0)]
        after: u64,
        /// Fail unless an entry has this head, which was noted elsewhere earlier
        #[arg(long, value_name = "HEAD")]
        includes: Option<String>,
        /// The server's directory
        dir: PathBuf,
    },
    /// Make a backup in a new directory, whether the server runs or not: a server can run on it
    Backup {
        /// The server's directory
        dir: PathBuf,
        /// Directory to create; an existing one must be empty. It holds the server's key: keep it as secret as DIR
        to: PathBuf,
    },
    /// Move state and anchors into the etcd cluster that server.toml names; the server must not be running
    #[cfg(feature = "etcd")]
    ToEtcd {
        /// The server's directory
        dir: PathBuf,
    },
    /// Verify all stored data, and report what is inconsistent
    Check {
        /// The server's directory
        dir: PathBuf,
    },
    /// Show which vaults are in use, and by which hosts
    Status {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
        /// The server's directory
        dir: PathBuf,
    },
}

#[derive(Subcommand)]
enum HostCommand {
    /// List all hosts, with the vaults that each may use
    List {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
        /// The server's directory
        dir: PathBuf,
    },
    /// Revoke a host: its sessions end, and all its calls are refused
    Revoke {
        /// The server's directory
        dir: PathBuf,
        /// The host's name
        host: String,
    },
    /// Allow a host to use a vault, or end that
    Grant {
        /// End the grant: the host may no longer use the vault
        #[arg(long)]
        not: bool,
        /// The server's directory
        dir: PathBuf,
        /// The host's name
        host: String,
        /// The vault, by the id that `lamassu info` shows
        vault: String,
    },
}

#[derive(Subcommand)]
enum AlertsCommand {
    /// List open alerts, oldest first
    List {
        /// Print one line of JSON for each alert
        #[arg(long)]
        json: bool,
        /// List only alerts that are not acknowledged
        #[arg(long)]
        new: bool,
        /// List only alerts of this vault, by the id that `lamassu info` shows
        #[arg(long, value_name = "ID")]
        vault: Option<String>,
        /// The server's directory
        dir: PathBuf,
    },
    /// Acknowledge alerts: they stay open, but no longer count as new
    Acknowledge {
        /// Text to store with the acknowledgement
        #[arg(long, value_name = "TEXT", default_value = "")]
        note: String,
        #[command(flatten)]
        which: AlertsChosen,
    },
    /// Close alerts: a later finding at the same place makes a new alert
    Close {
        #[command(flatten)]
        which: AlertsChosen,
    },
}

#[derive(clap::Args)]
struct AlertsChosen {
    /// Select all open alerts
    #[arg(long, conflicts_with = "number")]
    all: bool,
    /// With --all: only those of this vault, by the id that `lamassu info` shows
    #[arg(long, value_name = "ID", requires = "all")]
    vault: Option<String>,
    /// The server's directory
    dir: PathBuf,
    /// Numbers of the alerts
    #[arg(required_unless_present = "all")]
    number: Vec<u64>,
}

impl AlertsChosen {
    fn which(self) -> (PathBuf, Which) {
        match self.all {
            true => (self.dir, Which::All { vault: self.vault }),
            false => (self.dir, Which::Numbers(self.number.into_iter().collect())),
        }
    }
}

fn main() -> ExitCode {
    // Everything that is created is private to its owner, even in a directory that is not.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    // No key in a core dump, and none for a tracer. The server works without these limits too, so failure is ignored.
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
    let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
    let command = Args::parse().command;
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    // The heads of the audit log must be known elsewhere, so a server logs them at any level. A command has no log.
    let is_server = matches!(command, Command::Run { check_config: false, .. });
    let audit = if is_server { "audit=info" } else { "audit=off" };
    let filter = match audit.parse() {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    };
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    log.with_ansi(std::io::stderr().is_terminal()).init();
    match carry_out(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lamassu-server: {error}");
            ExitCode::from(error.code())
        }
    }
}

fn carry_out(command: Command) -> Result<()> {
    match command {
        Command::Init { dir } => {
            run::init(&dir)?;
            let config = dir.join("server.toml");
            say(format_args!("made; see {}, then: lamassu-server run {}", config.display(), dir.display()))
        }
        Command::Run { check_config: true, dir } => {
            let unread = preflight::check(&dir)?;
            say("the configuration is good")?;
            unread.map_or(Ok(()), |source| {
                say(format_args!("not read: the master key, which a start gets from {source}"))
            })
        }
        Command::Run { check_config: false, dir } => run::run(&dir),
        Command::Enrol { vault, dir, host } => {
            match ask(&dir, Request::Enrol { host, vaults: vault.into_iter().collect() })? {
                Answer::Token { line, .. } => say(line),
                _ => Ok(()),
            }
        }
        Command::Host(command) => of_hosts(command),
        Command::Keys(command) => keys_command::run(command),
        Command::Policy(command) => policy_command::run(command),
        Command::Alerts(command) => of_alerts(command),
        Command::Forget { dir, vault } => ask(&dir, Request::Forget { vault }).map(drop),
        Command::Audit { json, after, includes, dir } => print_audit(&dir, after, json, includes.as_deref()),
        Command::Backup { dir, to } => {
            let made = back_up(&dir, &to)?;
            say(format_args!("{} hosts, {} anchors: lamassu-server run {}", made.hosts, made.anchors, to.display()))?;
            done_unless_wrong(&made.lacks)
        }
        #[cfg(feature = "etcd")]
        Command::ToEtcd { dir } => {
            let moved = lamassu_server::origin::etcd::to_etcd(&dir)?;
            say(format_args!("moved, with {} anchors: lamassu-server run {}", moved.anchors, dir.display()))
        }
        Command::Check { dir } => {
            let Answer::Checked { good, bad } = ask(&dir, Request::Check)? else { return Ok(()) };
            say_each(&good)?;
            done_unless_wrong(&bad)
        }
        Command::Status { json, dir } => print_status(&dir, json),
    }
}

fn of_hosts(command: HostCommand) -> Result<()> {
    match command {
        HostCommand::List { json, dir } => match ask(&dir, Request::Hosts)? {
            Answer::Hosts { hosts } if json => print_json(&hosts),
            Answer::Hosts { hosts } => say_each(hosts.iter().map(shown)),
            _ => Ok(()),
        },
        HostCommand::Revoke { dir, host } => ask(&dir, Request::Revoke { host }).map(drop),
        HostCommand::Grant { not, dir, host, vault } => ask(&dir, Request::Grant { host, vault, may: !not }).map(drop),
    }
}

fn of_alerts(command: AlertsCommand) -> Result<()> {
    match command {
        AlertsCommand::List { json, new, vault, dir } => list_alerts(&dir, json, new, vault),
        AlertsCommand::Acknowledge { note, which } => {
            let (dir, alerts) = which.which();
            print_changed("acknowledged", &ask(&dir, Request::Acknowledge { alerts, note })?)
        }
        AlertsCommand::Close { which } => {
            let (dir, alerts) = which.which();
            print_changed("closed", &ask(&dir, Request::Close { alerts })?)
        }
    }
}

fn print_status(dir: &Path, json: bool) -> Result<()> {
    let answer = ask(dir, Request::Status)?;
    match &answer {
        Answer::Status { .. } if json => print_json(&answer),
        Answer::Status { is_running, authority, vaults } => {
            let is_running = if *is_running { "running" } else { "not running" };
            let lines = [is_running.into(), format!("authority {authority}")];
            say_each(lines.into_iter().chain(vaults.iter().map(shown_vault)))
        }
        _ => Ok(()),
    }
}

fn shown_vault(shown: &ShownVault) -> String {
    let ShownVault { vault, hosts, waits_for, lies_in } = shown;
    let lies_in = lies_in.as_ref().map(|around| format!("  (dataset in {around})")).unwrap_or_default();
    let waits_for = waits_for.iter().flatten().map(String::as_str).collect::<Vec<_>>().join(", ");
    match () {
        () if !waits_for.is_empty() => format!("{vault}  put back from a backup, waits for {waits_for}{lies_in}"),
        () if hosts.is_empty() => format!("{vault}  not in use{lies_in}"),
        () => format!("{vault}  {}{lies_in}", hosts.join(", ")),
    }
}

fn shown(host: &ShownHost) -> String {
    let vaults: Vec<_> = host.vaults.iter().map(String::as_str).collect();
    let state = if host.is_revoked { "revoked" } else { "joined " };
    format!("{}  {state}  {}", host.host, if vaults.is_empty() { "no vaults".into() } else { vaults.join(" ") })
}

fn done_unless_wrong(wrong: &[String]) -> Result<()> {
    wrong.iter().for_each(|line| eprintln!("lamassu-server: {line}"));
    match wrong.len() {
        0 => Ok(()),
        count => Err(ServerError::Wrong { count }),
    }
}

fn print_audit(dir: &Path, after: u64, json: bool, includes: Option<&str>) -> Result<()> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let includes = includes.map(str::to_ascii_lowercase);
    let mut is_included = includes.is_none();
    let mut count = 0;
    let place = read_audit(dir, |kept, entry| {
        count += 1;
        is_included |= includes.as_ref().is_some_and(|head| *head == kept.head_hex());
        if entry.number > after {
            let line = if json { kept.json() } else { shown_entry(kept, entry) };
            writeln!(out, "{line}").map_err(ServerError::printing)?;
        }
        Ok(())
    })?;
    out.flush().map_err(ServerError::printing)?;
    match includes {
        Some(head) if !is_included => Err(ServerError::NoHead { head }),
        _ => {
            eprintln!("verified: {count} entries to number {}, head {}", place.number, place.head_hex());
            Ok(())
        }
    }
}

/// `2026-11-26T19:30:00Z`
fn shown_time(seconds: u64) -> String {
    let time = time::OffsetDateTime::from_unix_timestamp(seconds.try_into().unwrap_or_default());
    let time = time.ok().and_then(|time| time.format(&time::format_description::well_known::Rfc3339).ok());
    time.unwrap_or_default()
}

fn print_changed(how: &str, answer: &Answer) -> Result<()> {
    match answer {
        Answer::Changed { count } => say(format_args!("{how}: {count}")),
        _ => Ok(()),
    }
}

fn list_alerts(dir: &Path, json: bool, new: bool, vault: Option<String>) -> Result<()> {
    let vault = vault.map(|vault| id_of(&vault)).transpose()?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    read_alerts(dir, |alert| {
        let is_meant = vault.as_ref().is_none_or(|vault| *vault == alert.vault);
        if !is_meant || (new && alert.acknowledged.is_some()) {
            return Ok(());
        }
        let line = if json { serde_json::to_string(&alert).unwrap_or_default() } else { shown_alert(&alert) };
        writeln!(out, "{line}").map_err(ServerError::printing)
    })?;
    out.flush().map_err(ServerError::printing)
}

/// `3  new  2026-11-26T19:30:00Z  stale  5f0c…  "ab/cd"  by node1, 4 times, last 2026-11-26T19:41:10Z: damaged page`
fn shown_alert(alert: &Alert) -> String {
    let Alert { number, vault, count, first, last, hosts, finding, acknowledged, .. } = alert;
    let (state, note) = match acknowledged {
        Some(known) if known.note.is_empty() => ("known", String::new()),
        Some(known) => ("known", format!("  ({})", known.note)),
        None => ("new", String::new()),
    };
    let times = if *count > 1 { format!(", {count} times, last {}", shown_time(*last)) } else { String::new() };
    let hosts = hosts.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
    let (kind, first, path, text) = (&finding.kind, shown_time(*first), &finding.path, &finding.text);
    format!("{number}  {state}  {first}  {kind}  {vault}  {path:?}  by {hosts}{times}: {text}{note}")
}

/// `2026-11-26T19:30:00Z  12  session-began  host=a vault=…`
fn shown_entry(kept: &ChainedEntry, entry: &AuditEntry) -> String {
    let fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&kept.entry).unwrap_or_default();
    let shown = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let rest = fields.iter().filter(|(name, _)| !matches!(&***name, "number" | "time" | "event"));
    // The log's file may have been changed, so control characters are escaped.
    let rest: Vec<_> = rest.map(|(name, value)| printable(&format!("{name}={}", shown(value)))).collect();
    let event = fields.get("event").map(shown).unwrap_or_default();
    format!("{}  {}  {event}  {}", shown_time(entry.time), entry.number, rest.join(" ")).trim_end().to_owned()
}

fn print_json(value: &impl serde::Serialize) -> Result<()> {
    say(serde_json::to_string_pretty(value).unwrap_or_default())
}

/// Prints one line. Standard output may be closed.
fn say(line: impl Display) -> Result<()> {
    say_each([line])
}

/// Prints lines.
fn say_each(lines: impl IntoIterator<Item = impl Display>) -> Result<()> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let written = lines.into_iter().try_for_each(|line| writeln!(out, "{line}"));
    written.and_then(|()| out.flush()).map_err(ServerError::printing)
}
