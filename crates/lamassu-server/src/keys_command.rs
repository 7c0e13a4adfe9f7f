//! `lamassu-server keys`: an administrator's commands about keys kept for hosts.

use crate::{print_json, say, say_each, shown_time};
use clap::Subcommand;
use lamassu_keys::receipt::AuditKey;
use lamassu_keys::receipt::served::KeyReceipt;
use lamassu_keys::{Ask, KeySource, Purpose};
use lamassu_server::admin::keys::{KeyAnswer, KeyRequest, ShownKey, rewrap};
use lamassu_server::admin::{Answer, Request, ask};
use lamassu_server::{Result, ServerError};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

#[derive(Subcommand)]
pub enum KeysCommand {
    /// List all keys, with the hosts that may use each
    List {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
        /// The server's directory
        dir: PathBuf,
    },
    /// Allow a host to use a key, and to create it if it does not exist: an ordinary key by `lamassu key generate
    /// server://HOST/KEY`, or by `lamassu zone create --oblivious server://HOST/KEY` one that evaluates and is given to
    /// no host
    Grant {
        /// End the grant. The host may have kept a copy of the key
        #[arg(long)]
        not: bool,
        /// The server's directory
        dir: PathBuf,
        /// The host's name
        host: String,
        /// The key's name
        key: String,
    },
    /// Retire a key: no host gets it any more
    Retire {
        /// Reinstate the key: hosts with a grant get it again
        #[arg(long)]
        not: bool,
        /// The server's directory
        dir: PathBuf,
        /// The key's name
        key: String,
    },
    /// Delete a retired key for good. For a deleted key, say the same again
    Delete {
        /// Write a signed receipt to FILE, which must not exist
        #[arg(long, value_name = "FILE", requires = "audit_key")]
        receipt: Option<PathBuf>,
        /// Sign the receipt with this key: 32 bytes, kept apart from the server. `lamassu receipt key` prints its
        /// public half
        #[arg(long, value_name = "SOURCE", requires = "receipt")]
        audit_key: Option<String>,
        /// The server's directory
        dir: PathBuf,
        /// The key's name
        key: String,
    },
    /// Wrap all keys again under the master key that server.toml names now. The server must not be running
    Rewrap {
        /// The previous master key
        #[arg(long, value_name = "SOURCE")]
        from: String,
        /// The server's directory
        dir: PathBuf,
    },
}

pub fn run(command: KeysCommand) -> Result<()> {
    match command {
        KeysCommand::List { json, dir } => {
            let KeyAnswer::Keys { keys } = asked(&dir, KeyRequest::List)? else { return Ok(()) };
            match json {
                true => print_json(&keys),
                false => say_each(keys.iter().map(shown)),
            }
        }
        KeysCommand::Grant { not, dir, host, key } => {
            let done = asked(&dir, KeyRequest::Grant { host: host.clone(), key: key.clone(), may: !not })?;
            if matches!(done, KeyAnswer::Done { is_there: false }) && !not {
                eprintln!("there is no key {key} yet: host {host} may make it");
            }
            Ok(())
        }
        KeysCommand::Retire { not, dir, key } => asked(&dir, KeyRequest::Retire { key, is_retired: !not }).map(drop),
        KeysCommand::Delete { receipt, audit_key, dir, key } => delete(&dir, key, receipt.as_deref(), audit_key),
        KeysCommand::Rewrap { from, dir } => {
            say(format_args!("{} keys are wrapped again", rewrap(&dir, &source(&from, "--from")?)?))
        }
    }
}

fn asked(dir: &Path, ask_for: KeyRequest) -> Result<KeyAnswer> {
    match ask(dir, Request::Keys { asked: ask_for })? {
        Answer::Keys { told } => Ok(told),
        _ => Err(ServerError::Garbled { detail: "an answer that was not asked for".into() }),
    }
}

/// The text is never shown: it may be a key typed in the wrong place.
fn source(text: &str, role: &'static str) -> Result<KeySource> {
    text.parse().map_err(|source| ServerError::Source { role, source })
}

/// Signing and writing the receipt are checked before anything is deleted. A server that has deleted the key says so
/// again, so a receipt that was lost can be made again.
fn delete(dir: &Path, key: String, receipt: Option<&Path>, audit_key: Option<String>) -> Result<()> {
    const OPTION: &str = "--audit-key";
    let failed = |source| ServerError::Source { role: OPTION, source };
    let paper = match receipt.zip(audit_key) {
        Some((path, text)) => {
            let ask = Ask { subject: "the audit key", purpose: Purpose::Unlock, stdin: true };
            let loaded = source(&text, OPTION)?.load(&ask).map_err(failed)?;
            Some((AuditKey::of(&loaded.material).map_err(failed)?, path, new_file(path)?))
        }
        None => None,
    };
    let deleted = asked(dir, KeyRequest::Delete { key }).inspect_err(|_| {
        let _ = receipt.map(fs::remove_file);
    })?;
    let KeyAnswer::Gone { server, gone } = deleted else { return Ok(()) };
    let Some((audit, path, mut file)) = paper else {
        return say(format_args!("key {} is gone", gone.key));
    };
    let json = KeyReceipt::signed(&server, gone, &audit).to_json();
    let written = file.write_all(&json).and_then(|()| file.sync_all());
    written.map_err(|source| ServerError::File { op: "write", path: path.into(), source })
}

fn new_file(path: &Path) -> Result<File> {
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    made.map_err(|source| ServerError::File { op: "make", path: path.into(), source })
}

/// `vault-1  active   made 2026-11-26T19:30:00Z for node1  node1, node2`
fn shown(key: &ShownKey) -> String {
    let made = match (key.made, &key.made_by) {
        (Some(made), Some(by)) => format!("made {} for {by}", shown_time(made)),
        _ => "not made yet".into(),
    };
    let hosts = if key.hosts.is_empty() { "no hosts".into() } else { key.hosts.join(", ") };
    let what = if key.evaluates { "  oblivious" } else { "" };
    format!("{}  {:7}  {made}  {hosts}{what}", key.key, key.state)
}
