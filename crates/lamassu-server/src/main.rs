//! `lamassu-server`: keeps the anchors of shared vaults, and knows the hosts that may use them.
#![forbid(unsafe_code)]

use clap::{Parser, Subcommand};
use lamassu_server::admin::{Answer, Request, ShownHost, ask};
use lamassu_server::config::Config;
use lamassu_server::{Result, run};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  lamassu-server init /var/lib/lamassu-server && lamassu-server run /var/lib/lamassu-server
  lamassu-server enrol /var/lib/lamassu-server node1 | ssh node1 lamassu host join
  lamassu-server host revoke /var/lib/lamassu-server node1
docs/server.md tells how to set it up, and its exit codes.";

/// The server of shared Lamassu vaults: their anchors, leases, and who may use them
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make the directory of a new server: its authority, its state, and a configuration to edit
    Init {
        /// Made, if it is not there; must be empty
        dir: PathBuf,
    },
    /// Serve until SIGTERM; SIGHUP has it take a new certificate
    Run {
        /// Read the configuration, say whether it is good, and end
        #[arg(long)]
        check_config: bool,
        /// The server's directory
        dir: PathBuf,
    },
    /// Print a token with which a host may join, once: one line, for its `lamassu host join`
    Enrol {
        /// A vault that the host may use, by its id in `lamassu info`; again for more
        #[arg(long, value_name = "ID")]
        vault: Vec<String>,
        /// The server's directory
        dir: PathBuf,
        /// The host's name here
        host: String,
    },
    /// Hosts that have joined
    #[command(subcommand)]
    Host(HostCommand),
    /// Put the anchor of a vault away that nobody uses: its file is renamed, and hosts find no anchor here
    Forget {
        /// The server's directory
        dir: PathBuf,
        /// The vault, by its id in `lamassu info`
        vault: String,
    },
    /// Tell which vaults are in use, by which hosts
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
    /// List them, with the vaults that each may use
    List {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
        /// The server's directory
        dir: PathBuf,
    },
    /// From now on a host may do nothing: its sessions end
    Revoke {
        /// The server's directory
        dir: PathBuf,
        /// The host's name
        host: String,
    },
    /// A host may use a vault
    Grant {
        /// It may no longer
        #[arg(long)]
        not: bool,
        /// The server's directory
        dir: PathBuf,
        /// The host's name
        host: String,
        /// The vault, by its id in `lamassu info`
        vault: String,
    },
}

fn main() -> ExitCode {
    // Whatever is made is its owner's alone, also where a directory is not.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    // No key in a core dump.
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match carry_out(Args::parse().command) {
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
            println!("made; see {}, then: lamassu-server run {}", dir.join("server.toml").display(), dir.display());
            Ok(())
        }
        Command::Run { check_config: true, dir } => {
            run::check_dir(&dir)?;
            Config::read(&dir)?;
            println!("the configuration is good");
            Ok(())
        }
        Command::Run { check_config: false, dir } => run::run(&dir),
        Command::Enrol { vault, dir, host } => {
            if let Answer::Token { line, .. } = ask(&dir, Request::Enrol { host, vaults: vault.into_iter().collect() })?
            {
                println!("{line}");
            }
            Ok(())
        }
        Command::Host(HostCommand::List { json, dir }) => {
            let answer = ask(&dir, Request::Hosts)?;
            match answer {
                Answer::Hosts { hosts } if json => print_json(&hosts),
                Answer::Hosts { hosts } => hosts.iter().for_each(|host| println!("{}", shown(host))),
                _ => {}
            }
            Ok(())
        }
        Command::Host(HostCommand::Revoke { dir, host }) => ask(&dir, Request::Revoke { host }).map(drop),
        Command::Host(HostCommand::Grant { not, dir, host, vault }) => {
            ask(&dir, Request::Grant { host, vault, may: !not }).map(drop)
        }
        Command::Forget { dir, vault } => ask(&dir, Request::Forget { vault }).map(drop),
        Command::Status { json, dir } => {
            let answer = ask(&dir, Request::Status)?;
            match &answer {
                Answer::Status { .. } if json => print_json(&answer),
                Answer::Status { is_running, authority, vaults } => {
                    println!("{}", if *is_running { "running" } else { "not running" });
                    println!("authority {authority}");
                    for vault in vaults {
                        let hosts = vault.hosts.join(", ");
                        println!("{}  {}", vault.vault, if hosts.is_empty() { "not in use" } else { &hosts });
                    }
                }
                _ => {}
            }
            Ok(())
        }
    }
}

fn shown(host: &ShownHost) -> String {
    let vaults: Vec<_> = host.vaults.iter().map(String::as_str).collect();
    let state = if host.is_revoked { "revoked" } else { "joined " };
    format!("{}  {state}  {}", host.host, if vaults.is_empty() { "no vaults".into() } else { vaults.join(" ") })
}

fn print_json(value: &impl serde::Serialize) {
    println!("{}", serde_json::to_string_pretty(value).unwrap_or_default());
}
