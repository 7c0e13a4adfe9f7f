//! `lamassu scrub`: the whole store against the anchor, without any key of the vault: what an operator's timer runs.

use crate::fault::{Fault, Result};
use crate::open;
use crate::output::{self, Ui};
use crate::progress::Meter;
use crate::signals;
use crate::text;
use lamassu_anchor::{Anchor, ObjectId};
use lamassu_host::Error;
use lamassu_host::anchors::{ComparedRecords, compare_records};
use lamassu_store::Backend;
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
Exit status: 0 all is as the anchor says, 30 something is not, 31 nothing is stale, but some of it cannot be verified without a key.";

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
    /// Remember in this file what was verified, and continue from there the next time; removed at the end. Not in the
    /// vault's own directory
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
    /// Datasets that were met, by their paths in the store.
    datasets: Vec<PathBuf>,
}

/// How soon a signal is noticed.
const NAP: Duration = Duration::from_millis(200);

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
        while let Some(left) = due.checked_sub(self.begun.elapsed())
            && !signals::interrupted()
        {
            std::thread::sleep(left.min(NAP));
        }
    }
}

pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let found = open::found(ui, &args.dir)?;
    let header = found.header;
    ui.policy.anchors.require(&header)?;
    let (_, table) = ui.policy.anchors.look(&header.id())?;
    let anchor = Anchor::open(Arc::new(table), &header.id()).map_err(Error::from)?;
    let backend = lamassu_host::backend(&args.dir)?.without_access_times();
    let state = match &args.state {
        Some(file) => State::read(file, &args.dir, &text::hex(&header.id()))?,
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
        datasets: Vec::new(),
    };
    let compared = compare_records(&args.dir, &anchor)?;
    let mut records = tell_records(ui, &mut watch, &args.dir, Path::new(""), &compared);
    let done = scrub(backend.root(), &header, &anchor, &mut watch).map_err(Error::from);
    let is_stopped = signals::interrupted();
    if done.is_err() || is_stopped {
        watch.save();
    } else if let Some(file) = watch.file {
        let _ = std::fs::remove_file(file);
    }
    let mut failures = 0;
    if done.is_ok() && !is_stopped {
        for stored in std::mem::take(&mut watch.datasets) {
            // One dataset hinders the others as little as one file does.
            match dataset_records(ui, &mut watch, &args.dir, &stored) {
                Ok(found) => records += found,
                Err(error) => {
                    let what = format!("the dataset's header and history are not compared: {}", error.message());
                    watch.tell("unreadable", stored.display().to_string(), what);
                    failures += 1;
                }
            }
        }
    }
    let (findings, failed) = (watch.findings, watch.failed);
    drop(watch.meter);
    if let (Some(source), Some(file)) = (failed, &args.state) {
        return Err(Error::Local { op: "write", path: file.clone(), source }.into());
    }
    let done = done?;
    signals::check()?;
    report(
        ui,
        args,
        Scrubbed { findings: done.findings + records, failures: done.failures + failures, ..done },
        findings,
    )
}

/// Tells what of the header, the history and the record of sessions of the vault in `dir` is not as its anchor knows,
/// and how many those are. `stored`: where the vault lies in the store that is gone through.
fn tell_records(ui: &Ui, watch: &mut Watch<'_>, dir: &Path, stored: &Path, compared: &ComparedRecords) -> u64 {
    if compared.is_history_unreadable {
        ui.warn(format_args!("{}: the history cannot be read, and was not compared", dir.display()));
    }
    for found in &compared.findings {
        watch.tell(found.kind, stored.join(found.name).display().to_string(), found.what);
    }
    compared.findings.len() as u64
}

/// The same of a dataset, where this host has its anchor.
fn dataset_records(ui: &Ui, watch: &mut Watch<'_>, dir: &Path, stored: &Path) -> Result<u64> {
    let dir = dir.join(stored);
    match ui.policy.anchors.compare_records_of_dataset(&dir)? {
        Some(compared) => Ok(tell_records(ui, watch, &dir, stored, &compared)),
        None => {
            ui.warn(format_args!(
                "{}: the anchor of this dataset is not on this machine: its header and history were not compared",
                dir.display()
            ));
            Ok(0)
        }
    }
}

fn report(ui: &Ui, args: &Args, done: Scrubbed, findings: Vec<Told>) -> Result<()> {
    let unverified = done.unverified_blocks + done.open_pages;
    let status = match (done.findings, done.failures, unverified) {
        (0, 0, 0) => "clean",
        (0, 0, _) => "unverified",
        (0, ..) => "unreadable",
        _ => "stale",
    };
    let printed = if args.json {
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
        })
    } else if !ui.quiet {
        output::print(shown(status, &done))
    } else {
        Ok(())
    };
    match status {
        "clean" => printed,
        // A reader that is gone (`| head`) does not make a stale store a current one.
        "unverified" => Err(Fault::ScrubUnverified { pages: done.open_pages, blocks: done.unverified_blocks }.into()),
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
    /// The state in a file, which may not be there yet. Another file than the state of a scrub of this vault is
    /// refused: it would be replaced, and removed in the end.
    fn read(file: &Path, dir: &Path, vault: &str) -> Result<State> {
        let refused = || Fault::NotAScrubState { path: file.to_owned() };
        let local = |source| Error::Local { op: "read", path: file.to_owned(), source };
        let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let parent = parent.canonicalize().map_err(local)?;
        if parent.starts_with(dir.canonicalize().map_err(local)?) {
            return Err(refused().into());
        }
        let bytes = match file.symlink_metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(State { vault: vault.into(), verified: BTreeSet::new() });
            }
            Ok(st) if !st.is_file() => return Err(refused().into()),
            Ok(_) => std::fs::read(file).map_err(local)?,
            Err(error) => return Err(local(error).into()),
        };
        let read: State = serde_json::from_slice(&bytes).map_err(|_| refused())?;
        if read.vault == vault { Ok(read) } else { Err(refused().into()) }
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
        let mut beside = file.as_os_str().to_owned();
        beside.push(".new");
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

    fn dataset(&mut self, stored: &Path) {
        self.datasets.push(stored.to_owned());
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
