//! `lamassu receipt verify|key`: what `key destroy` and `lamassu-server keys delete` have left on record.

use crate::fault::{Context, Result};
use crate::keys::SourceText;
use crate::output;
use crate::{policy, text};
use lamassu_host::Error as HostError;
use lamassu_keys::receipt::served::{self, KeyReceipt};
use lamassu_keys::receipt::{AuditKey, RECEIPT_MAX, Receipt as Document};
use lamassu_keys::{Ask, KeyError, Purpose, Tier};
use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};

const VERIFY_EXAMPLES: &str = "\
Examples:
  lamassu receipt verify --audit-key HEX seven.receipt";

const KEY_EXAMPLES: &str = "\
Examples:
  lamassu key generate audit.key
  lamassu receipt key --audit-key raw:file:audit.key        the public half, for verifiers";

/// Receipt commands.
#[derive(clap::Subcommand, Debug)]
pub enum Receipt {
    /// Verify a receipt and print its contents
    Verify(Verify),
    /// Print the public half of an audit key
    Key(Key),
}

/// Options of `receipt verify`.
#[derive(clap::Args, Debug)]
#[command(after_help = VERIFY_EXAMPLES)]
pub struct Verify {
    /// Public half of the audit key, as `lamassu receipt key` prints it
    #[arg(long, value_name = "HEX", value_parser = policy::parse_other_key)]
    audit_key: [u8; 32],
    /// Print the receipt as one JSON document
    #[arg(long)]
    json: bool,
    /// File with the receipt
    file: PathBuf,
}

/// Options of `receipt key`.
#[derive(clap::Args, Debug)]
#[command(after_help = KEY_EXAMPLES)]
pub struct Key {
    /// The audit key: 32 bytes, for example from `lamassu key generate`
    #[arg(long, value_name = "SOURCE")]
    audit_key: SourceText,
}

pub fn run(command: &Receipt) -> Result<()> {
    match command {
        Receipt::Verify(args) => verify(args),
        Receipt::Key(args) => output::print(text::hex(&load(&args.audit_key)?.public())),
    }
}

/// An audit key from its source.
pub fn load(source: &SourceText) -> Result<AuditKey> {
    const OPTION: &str = "--audit-key";
    let source = source.parse(OPTION)?;
    let ask = Ask { subject: "the audit key", purpose: Purpose::Unlock, stdin: true };
    let material = source.load(&ask).context(OPTION)?.material;
    AuditKey::of(&material).context(OPTION)
}

/// Reads a receipt and verifies it.
pub fn read(file: &Path, public: &[u8; 32]) -> Result<Document> {
    let receipt = Document::verified(&bytes(file)?, public).map_err(KeyError::from);
    receipt.with_context(|| file.display().to_string())
}

fn bytes(file: &Path) -> Result<Vec<u8>> {
    let failed = |source| HostError::Local { op: "read", path: file.into(), source };
    let mut bytes = Vec::new();
    let opened = std::fs::File::open(file).map_err(failed)?;
    opened.take(RECEIPT_MAX as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

fn verify(args: &Verify) -> Result<()> {
    let json = bytes(&args.file)?;
    if is_of_server(&json) {
        let receipt = KeyReceipt::verified(&json, &args.audit_key).map_err(KeyError::from);
        let receipt = receipt.with_context(|| args.file.display().to_string())?;
        return if args.json { output::print_json(&receipt) } else { output::print(shown_of_server(&receipt)) };
    }
    let receipt = read(&args.file, &args.audit_key)?;
    if args.json { output::print_json(&receipt) } else { output::print(shown(&receipt)) }
}

/// Whether it says that it is the receipt of a key that a server kept.
fn is_of_server(receipt: &[u8]) -> bool {
    let value: Option<serde_json::Value> = serde_json::from_slice(receipt).ok();
    value.is_some_and(|value| value["format"] == served::FORMAT)
}

fn shown_of_server(receipt: &KeyReceipt) -> String {
    let time = |seconds: u64| text::time(i64::try_from(seconds).unwrap_or(i64::MAX / 2));
    let gone = &receipt.gone;
    let mut out = format!(
        "signed by {} on {}\nkey {} of the server with the authority {}: deleted on {}; made on {} for {}, digest {}\n",
        receipt.audit_key,
        time(receipt.time),
        text::printable(&gone.key),
        text::printable(&receipt.server),
        time(gone.deleted),
        time(gone.made),
        text::printable(&gone.made_by),
        text::printable(&gone.digest),
    );
    let given = gone.given.iter().map(|given| format!("{}, last {}", given.host, time(given.last)));
    let backups = gone.backups.iter().map(|made| time(*made));
    let begins = gone.log_begins.iter().map(|begins| time(*begins));
    let restored = gone.restored.iter().map(|made| time(*made));
    for (title, lines) in [
        ("Oldest entry of the audit log:", begins.collect()),
        ("Restored from a backup, so that the log lacks what was between that and the loss:", restored.collect()),
        ("Hosts that were granted it to the end:", gone.granted.clone()),
        ("Hosts that were given it, as far as the audit log goes back:", given.collect()),
        ("Backups on record that have it, wrapped:", backups.collect()),
        ("What cannot be known:", receipt.cannot_know.clone()),
    ] {
        if !lines.is_empty() {
            let _ = writeln!(out, "{title}");
            lines.iter().for_each(|line| _ = writeln!(out, "  {}", text::printable(line)));
        }
    }
    out.truncate(out.trim_end().len());
    out
}

/// A receipt for people.
pub fn shown(receipt: &Document) -> String {
    let time = |seconds: u64| text::time(i64::try_from(seconds).unwrap_or(i64::MAX / 2));
    let id = text::printable(&receipt.id);
    let mut out = format!("receipt {id}, signed by {}\n", text::printable(&receipt.audit_key));
    let state = if receipt.complete { "destroyed" } else { "NOT FINISHED: run `lamassu key destroy` again; begun" };
    let by = receipt.by.user.clone().unwrap_or_else(|| format!("uid {}", receipt.by.uid));
    let _ = writeln!(
        out,
        "keys of vault {} ({}) {state} on {} by {}@{}",
        text::printable(&receipt.vault),
        text::printable(&receipt.path),
        time(receipt.time),
        text::printable(&by),
        text::printable(&receipt.by.host)
    );
    let mut section = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            let _ = writeln!(out, "{title}");
            lines.iter().for_each(|line| {
                let _ = writeln!(out, "  {}", text::printable(line));
            });
        }
    };
    let epochs = receipt.epochs.iter().map(|e| {
        let name = match e.key {
            Tier::Inner => "K_in",
            Tier::Outer => "K_out",
        };
        let kept = if e.zone_shares { "; its zone, or a dataset, keeps it" } else { "" };
        format!("{name} epoch {}, made {}, digest {}{kept}", e.epoch, time(e.created), e.digest)
    });
    section("Keys that are gone from it:", epochs.collect());
    let slots = receipt.slots.iter().map(|s| format!("slot {}: {}, {:?}", s.id, s.kind, s.label));
    section("Slots erased:", slots.collect());
    section(
        "Became unreadable:",
        receipt.stored_bytes.iter().map(|b| format!("{} in the store", text::bytes(*b))).collect(),
    );
    let erased = receipt.erased.iter().map(|e| {
        let given = if e.punched { ", blocks given back" } else { "" };
        let names = if e.other_names > 0 { format!(", {} more names led to it", e.other_names) } else { String::new() };
        format!("{}: {} bytes overwritten{given}, removed{names}", e.file, e.bytes)
    });
    section("Files erased:", erased.collect());
    let servers = receipt.servers.iter().map(|s| {
        let what = if s.destroyed { "destroyed" } else { "NOT DESTROYED" };
        format!("{}: {what}: {}", s.source, s.answers.join("; "))
    });
    section("Keys at servers and in tokens:", servers.collect());
    let backups = receipt.backups.iter().map(|b| {
        let slots = b.slots.as_deref().unwrap_or("not recorded");
        format!("{} on {}, made {}, slots {slots}: {}", b.file, b.host, time(b.time), b.now)
    });
    section("Copies of the header on record, each of which would still open it:", backups.collect());
    section("Copies of the header beside the vault's own files, left alone:", receipt.copies_beside.clone());
    let clones = receipt.clones.iter().map(|c| format!("{} {}, made {}", c.kind, c.id, time(c.time)));
    section("Clones on record, which have the same keys:", clones.collect());
    let datasets = receipt.datasets.iter().map(|d| {
        let shares = if d.zone_shares { "; it has the same K_in" } else { "" };
        format!("{}, id {}{shares}", d.stored, d.id.as_deref().unwrap_or("not known: its header could not be read"))
    });
    section("Datasets in it that open without its keys:", datasets.collect());
    section("What cannot be known:", receipt.cannot_know.clone());
    out.truncate(out.trim_end().len());
    out
}
