//! `lamassu history`: what was done to a vault's keys.

use crate::fault::{Fault, Result};
use crate::keys::{self, KeyArg};
use crate::open;
use crate::output::{self, Ui};
use crate::{served, text};
use lamassu_format::header::Header;
use lamassu_keys::history::{HistoryEntry, Report};
use serde::Serialize;
use std::fmt::Write as _;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  lamassu history /srv/store/vault
  lamassu history ~/private                                  where it is mounted
  lamassu history --json /srv/store/vault | jq '.entries[] | select(.event == \"backed-up\")'
An attacker can remove the newest entries unnoticed as far as the header does not count them yet,
and can restore an old history with an old header: note the number and head of the last entry
elsewhere, and compare.";

/// Options of `history`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault, or where it is mounted
    dir: PathBuf,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

#[derive(Serialize)]
struct Shown<'a> {
    verified: bool,
    fault: Option<String>,
    /// entries that the header has seen
    counted: u64,
    /// bytes of an append that was interrupted
    torn_bytes: u64,
    /// SHA-256 of the last entry that the header has seen, to be kept elsewhere
    head: Option<String>,
    entries: Vec<Numbered<'a>>,
}

#[derive(Serialize)]
struct Numbered<'a> {
    sequence: u64,
    #[serde(flatten)]
    entry: &'a HistoryEntry,
}

pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let dir = served::dir_of(&args.dir)?;
    let unsealed = open::unlocked(ui, &dir, &args.key)?;
    let mark = unsealed.found.header.keys().history;
    let report = unsealed.keys.history(&dir, &unsealed.found.header)?.read()?;
    let counted = mark.map_or(0, |m| m.count);
    if args.json {
        output::print_json(&Shown {
            verified: report.fault.is_none(),
            fault: report.fault.map(|f| f.to_string()),
            counted,
            torn_bytes: report.torn_bytes,
            head: mark.map(|m| text::hex(&m.head.0)),
            entries: report.entries.iter().map(|entry| Numbered { sequence: entry.sequence, entry }).collect(),
        })?;
    } else {
        if report.torn_bytes > 0 {
            ui.note("an append was interrupted; the next one removes what it left");
        }
        output::print(table(&report))?;
    }
    match report.fault {
        Some(fault) => Err(Fault::HistoryDamaged { dir, fault }.into()),
        None => Ok(()),
    }
}

fn table(report: &Report) -> String {
    let mut out = String::from("entry  time                  event             by                        what");
    for entry in &report.entries {
        let time = text::time(i64::try_from(entry.time).unwrap_or(i64::MAX / 2));
        let user = entry.user.clone().unwrap_or_else(|| format!("uid {}", entry.uid));
        let by = text::printable(&format!("{user}@{}", entry.host));
        let _ = write!(
            out,
            "\n{:<5}  {time:<20}  {:<16}  {by:<24}  {}",
            entry.sequence,
            text::printable(&entry.event),
            what(entry)
        );
    }
    out
}

fn what(entry: &HistoryEntry) -> String {
    let mut parts = Vec::new();
    parts.extend(entry.slot.map(|id| format!("slot {id}")));
    if let Some(epoch) = entry.epoch {
        parts.push(format!("{} epoch {epoch}", entry.tier.as_deref().unwrap_or("")).trim_start().to_string());
    }
    parts.extend(entry.details.iter().map(|(name, value)| format!("{name}: {value}")));
    text::printable(&parts.join(", "))
}
