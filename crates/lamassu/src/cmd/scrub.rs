//! `lamassu scrub`: the whole store against the anchor, without any key of the vault: what an operator's timer runs.

use crate::fault::{Fault, Result};
use crate::open;
use crate::output::{self, Ui};
use crate::progress::Meter;
use crate::signals;
use crate::text;
use lamassu_anchor::{Anchor, Digest, ObjectId};
use lamassu_host::Error;
use lamassu_keys::witness;
use lamassu_store::Backend;
use lamassu_vault::VaultError;
use lamassu_vault::scrub::{ScrubFinding, ScrubWatch, Scrubbed, scrub};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  lamassu scrub /srv/store/vault
  lamassu scrub --limit 50M --state /var/lib/lamassu/vault.scrub /srv/store/vault
      reads no faster than that; goes on where it was stopped
  lamassu scrub --json /srv/store/vault | jq -r '.findings[].path'
Exit status: 0 all is as the anchor says, 30 something is not, 31 nothing is stale, but not all of it can be told without a key.";

/// How often the state is written.
const SAVE_EVERY: Duration = Duration::from_secs(5);
/// Findings that one report keeps; all are counted.
const FINDINGS_MAX: usize = 100_000;

/// Options of `scrub`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Bytes read a second at most: 500K, 50M, 1G
    #[arg(long, value_name = "BYTES", value_parser = text::parse_rate)]
    limit: Option<u64>,
    /// Remember in this file what was verified, and go on there the next time; removed at the end. Not in the vault's
    /// own directory
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault; it may be mounted
    dir: PathBuf,
}

/// A finding, for JSON.
#[derive(Serialize)]
struct Told {
    /// a word of docs/alerts.md, or `unreadable`
    kind: &'static str,
    /// path in the store
    path: String,
    what: String,
}

#[derive(Serialize)]
struct Summary {
    status: &'static str,
    entries: u64,
    files: u64,
    skipped: u64,
    pages: u64,
    blocks: u64,
    files_without_blocks: u64,
    unverified_blocks: u64,
    open_files: u64,
    open_pages: u64,
    /// entries that a writer has not finished
    unfinished: u64,
    datasets: u64,
    failures: u64,
    /// how many, also where not all are listed
    found: u64,
    findings: Vec<Told>,
}

/// What `--state` keeps.
#[derive(Serialize, Deserialize, Default)]
struct State {
    vault: String,
    /// numbers of the objects whose files were verified
    verified: BTreeSet<u64>,
}

struct Watch<'a> {
    meter: Meter,
    json: bool,
    findings: Vec<Told>,
    state: State,
    file: Option<&'a Path>,
    saved: Instant,
    failed: Option<std::io::Error>,
    throttle: Throttle,
}

/// Keeps reads below a rate.
struct Throttle {
    limit: Option<u64>,
    begun: Instant,
    read: u64,
}

impl Throttle {
    fn read(&mut self, bytes: u64) {
        self.read += bytes;
        let Some(limit) = self.limit else { return };
        let due = Duration::from_secs_f64(self.read as f64 / limit as f64);
        let ahead = due.saturating_sub(self.begun.elapsed());
        // A signal is noticed soon.
        if ahead > Duration::from_millis(20) {
            std::thread::sleep(ahead.min(Duration::from_millis(500)));
        }
    }
}

pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let found = open::found(ui, &args.dir)?;
    let header = found.header;
    if !header.is_anchored() {
        return Err(Error::NotAnchored.into());
    }
    let (_, table) = ui.policy.anchors.look(&header.id())?;
    let anchor = Anchor::open(Arc::new(table), &header.id()).map_err(|error| Error::from(VaultError::from(error)))?;
    let seen = Digest(witness::digest(&header).map_err(Error::from)?);
    let is_newest = anchor.vault().header.is_current(seen);
    let backend = lamassu_host::backend(&args.dir)?.without_access_times();
    let state = match &args.state {
        Some(file) => State::read(file, &text::hex(&header.id()))?,
        None => State::default(),
    };
    let mut watch = Watch {
        meter: Meter::bytes(ui, "verified"),
        json: args.json,
        findings: Vec::new(),
        state,
        file: args.state.as_deref(),
        saved: Instant::now(),
        failed: None,
        throttle: Throttle { limit: args.limit, begun: Instant::now(), read: 0 },
    };
    if !is_newest {
        watch.tell("stale", lamassu_format::name::HEADER, "the header is not the one that the anchor knows");
    }
    let done = scrub(backend.root(), &header, &anchor, &mut watch).map_err(Error::from);
    let is_stopped = signals::interrupted();
    if done.is_err() || is_stopped {
        watch.save();
    } else if let Some(file) = watch.file {
        let _ = std::fs::remove_file(file);
    }
    let (findings, failed) = (watch.findings, watch.failed);
    drop(watch.meter);
    if let (Some(source), Some(file)) = (failed, &args.state) {
        return Err(Fault::Local { op: "write", path: file.clone(), source }.into());
    }
    let done = done?;
    signals::check()?;
    report(ui, args, Scrubbed { findings: done.findings + u64::from(!is_newest), ..done }, findings)
}

fn report(ui: &Ui, args: &Args, done: Scrubbed, findings: Vec<Told>) -> Result<()> {
    let untold = done.unverified_blocks + done.open_pages;
    let status = match (done.findings, done.failures, untold) {
        (0, 0, 0) => "clean",
        (0, 0, _) => "unverified",
        (0, ..) => "unreadable",
        _ => "stale",
    };
    if args.json {
        let Scrubbed { entries, files, skipped, pages, blocks, files_without_blocks, .. } = done;
        let Scrubbed {
            unverified_blocks, open_files, open_pages, datasets, failures, findings: found, unfinished, ..
        } = done;
        output::print_json(&Summary {
            status,
            entries,
            files,
            skipped,
            pages,
            blocks,
            files_without_blocks,
            unverified_blocks,
            open_files,
            open_pages,
            unfinished,
            datasets,
            failures,
            found,
            findings,
        })?;
    } else if !ui.quiet {
        output::print(shown(status, &done))?;
    }
    match status {
        "clean" => Ok(()),
        "unverified" => Err(Fault::ScrubUntold { pages: done.open_pages, blocks: done.unverified_blocks }.into()),
        "unreadable" => Err(Fault::ScrubUnreadable { places: done.failures }.into()),
        _ => Err(Fault::ScrubStale { findings: done.findings }.into()),
    }
}

fn shown(status: &str, done: &Scrubbed) -> String {
    let mut out = format!("{status}: {} entries, {} files, {} pages and ", done.entries, done.files, done.pages);
    out += &match done.files_without_blocks {
        0 => format!("{} blocks are as the anchor says", done.blocks),
        without => format!(
            "{} blocks are as the anchor says; of {without} files the blocks were not verified, as the anchor has no \
             root over them (`lamassu init --tree-leaves blocks`), or they are open",
            done.blocks
        ),
    };
    let more = [
        (done.skipped, "files were verified before this scrub went on"),
        (done.open_files, "files are open, or were left so by a crash"),
        (
            done.unfinished,
            "entries are unfinished: a mount is making or moving them, or did when it was interrupted; they are recorded \
             within seconds, or settled by `lamassu check --repair`",
        ),
        (done.datasets, "datasets have anchors of their own: scrub each by its directory"),
    ];
    for (count, what) in more.into_iter().filter(|(count, _)| *count > 0) {
        out += &format!("\n{count} {what}");
    }
    out
}

impl State {
    /// What an earlier scrub of this vault has verified; of another one nothing counts.
    fn read(file: &Path, vault: &str) -> Result<State> {
        let fresh = State { vault: vault.into(), verified: BTreeSet::new() };
        let local = |source| Fault::Local { op: "read", path: file.to_owned(), source };
        let bytes = match std::fs::read(file) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(fresh),
            read => read.map_err(local)?,
        };
        // Half a state is none.
        let read: State = serde_json::from_slice(&bytes).unwrap_or_default();
        Ok(if read.vault == vault { read } else { fresh })
    }
}

impl Watch<'_> {
    fn tell(&mut self, kind: &'static str, path: impl Into<String>, what: impl Into<String>) {
        let told = Told { kind, path: path.into(), what: what.into() };
        if !self.json {
            let line = format!("{kind}: {}: {}", text::printable(&told.path), told.what);
            // That standard output is closed is told at the end.
            let _ = self.meter.suspend(|| output::print(line));
        } else if self.findings.len() < FINDINGS_MAX {
            self.findings.push(told);
        }
    }

    /// Whole or not at all: it is written beside, then renamed.
    fn save(&mut self) {
        let Some(file) = self.file else { return };
        let beside = file.with_extension("new");
        let bytes = serde_json::to_vec(&self.state).map_err(std::io::Error::other);
        let written =
            bytes.and_then(|bytes| std::fs::write(&beside, bytes)).and_then(|()| std::fs::rename(&beside, file));
        self.failed = self.failed.take().or(written.err());
        self.saved = Instant::now();
    }
}

impl ScrubWatch for Watch<'_> {
    fn read(&mut self, bytes: u64) {
        self.meter.advance(bytes);
        self.throttle.read(bytes);
    }

    fn found(&mut self, finding: &ScrubFinding) {
        let kind = finding.kind.map_or("unreadable", |kind| kind.word());
        self.tell(kind, finding.path.display().to_string(), finding.what.clone());
    }

    fn verified(&mut self, object: ObjectId) {
        if self.file.is_some() {
            self.state.verified.insert(object.0);
            if self.saved.elapsed() >= SAVE_EVERY {
                self.save();
            }
        }
    }

    fn is_verified(&self, object: ObjectId) -> bool {
        self.state.verified.contains(&object.0)
    }

    fn is_stopped(&self) -> bool {
        signals::interrupted() || self.failed.is_some()
    }
}
