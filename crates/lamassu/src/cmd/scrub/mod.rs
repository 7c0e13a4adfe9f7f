//! `lamassu scrub`: the whole store against the anchor, without any key of the vault: what an operator's timer runs.

mod state;
mod throttle;

use self::state::State;
use self::throttle::Throttle;
use crate::alert::{AlertArg, Told};
use crate::fault::{Fault, Result};
use crate::open;
use crate::output::{self, Ui};
use crate::progress::Meter;
use crate::signals;
use crate::text;
use lamassu_anchor::{Anchor, ObjectId};
use lamassu_format::header::{VaultHeader, VaultId};
use lamassu_format::name;
use lamassu_host::Error;
use lamassu_host::anchors::compare_records;
use lamassu_keys::header_file;
use lamassu_store::Backend;
use lamassu_vault::event::{Events, FoundBy};
use lamassu_vault::scrub::{RowDigest, ScrubFinding, ScrubWatch, Scrubbed, scrub};
use serde::Serialize;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  lamassu scrub /srv/store/vault
  lamassu scrub --limit 50M --state /var/lib/lamassu/vault.scrub /srv/store/vault
      reads no faster than 50 MB/s, and continues where it was stopped
  lamassu scrub --json /srv/store/vault | jq -r '.findings[].path'
Exit status:
   0  everything matches the anchor
  30  something does not match
  31  everything checked matches, but some of it cannot be verified without a key";

/// How often the state is written.
const SAVE_EVERY: Duration = Duration::from_secs(5);
/// Findings that one report keeps; all are counted.
const FINDINGS_MAX: usize = 100_000;

/// Options of `scrub`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    _opening: crate::opening::AnchorArg,
    /// Read at most this many bytes per second: 500K, 50M, 1G
    #[arg(long, value_name = "BYTES", value_parser = text::parse_rate)]
    limit: Option<u64>,
    /// Record progress in this file, and continue from there the next time. The file is removed at the end; it must not
    /// be in the vault's directory
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Keep the exit status when datasets were skipped because their anchors are not on this machine
    #[arg(long)]
    skip_unanchored: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    alert: AlertArg,
    /// The vault; it may be mounted
    dir: PathBuf,
}

/// A finding, for JSON.
#[derive(Serialize)]
struct Finding {
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
    /// those with content, in an anchor that keeps roots over blocks
    files_with_unverified_blocks: u64,
    unverified_blocks: u64,
    open_files: u64,
    open_pages: u64,
    /// entries that a writer has not finished
    unfinished: u64,
    /// directories among them that were not entered
    unverified_dirs: u64,
    unread_histories: u64,
    datasets: u64,
    /// paths in the store of those whose anchors this host does not have: nothing in them was verified
    datasets_without_anchor: Vec<String>,
    failures: u64,
    /// how many, also where not all are listed
    found: u64,
    findings: Vec<Finding>,
}

/// A vault that is gone through: the one that was named, or a dataset in it.
struct Here {
    /// its id, in hex
    vault: String,
    /// where it lies in the store of the one that was named
    stored: PathBuf,
}

struct Watch<'a> {
    meter: Meter,
    json: bool,
    here: Here,
    findings: Vec<Finding>,
    state: State,
    file: Option<&'a Path>,
    saved: Instant,
    failed: Option<std::io::Error>,
    throttle: Throttle,
    /// Datasets that were met and not gone through yet: their paths in the store, and ids.
    datasets: VecDeque<(PathBuf, VaultId)>,
    without_anchor: Vec<PathBuf>,
}

pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let told = Told::start(&args.alert, &args.dir, FoundBy::Scrub)?;
    // What was verified is written down before it ends.
    signals::flag_only();
    let done = scrubbed(ui, args, told.events());
    told.end(done)
}

fn scrubbed(ui: &Ui, args: &Args, events: &Events) -> Result<()> {
    let header = open::found(ui, &args.dir)?.header;
    ui.policy.anchors.require(&header)?;
    ui.policy.anchors.report_to_server(&header.id(), events)?;
    let (_, table) = ui.policy.anchors.look(&header.id())?;
    let anchor = Anchor::open(Arc::new(table), &header.id()).map_err(Error::from)?;
    let id = header.id().to_string();
    let state = match &args.state {
        Some(file) => State::read(file, &args.dir, &id)?,
        None => State::of(&id),
    };
    let mut watch = Watch {
        meter: Meter::bytes(ui, "verified"),
        json: args.json,
        here: Here { vault: id, stored: PathBuf::new() },
        findings: Vec::new(),
        state,
        file: args.state.as_deref(),
        saved: Instant::now(),
        failed: None,
        throttle: Throttle::new(args.limit),
        datasets: VecDeque::new(),
        without_anchor: Vec::new(),
    };
    let done = Scrub { ui, args, events }.store(&header, &anchor, &mut watch);
    if done.is_err() || signals::interrupted() {
        watch.save();
    } else if let (Some(file), None) = (watch.file, &watch.failed) {
        // One that stayed would have the next scrub skip what it has.
        let removed = std::fs::remove_file(file);
        watch.failed = removed.err().filter(|error| error.kind() != std::io::ErrorKind::NotFound);
    }
    let Watch { meter, findings, failed, without_anchor, .. } = watch;
    drop(meter);
    if let (Some(source), Some(file)) = (failed, &args.state) {
        return Err(Error::Local { op: "write", path: file.clone(), source }.into());
    }
    let done = done?;
    signals::check()?;
    report(ui, args, &done, findings, &without_anchor)
}

/// A scrub of a vault and the datasets in it.
struct Scrub<'a> {
    ui: &'a Ui,
    args: &'a Args,
    events: &'a Events,
}

impl Scrub<'_> {
    /// Verifies the whole store. A dataset that cannot be verified does not keep the others from being verified.
    fn store(&self, header: &VaultHeader, anchor: &Anchor, watch: &mut Watch<'_>) -> Result<Scrubbed> {
        let mut done = self.vault(&self.args.dir, header, anchor, watch)?;
        while let Some((stored, id)) = watch.datasets.pop_front().filter(|_| !watch.is_stopped()) {
            let vault = id.to_string();
            match self.dataset(Here { vault, stored: stored.clone() }, &id, watch) {
                Ok(Some(found)) => done += found,
                Ok(None) => {
                    if !self.args.skip_unanchored {
                        self.ui.warn(format_args!(
                            "{}: the anchor of this dataset is not on this machine: nothing in it was verified",
                            self.args.dir.join(&stored).display()
                        ));
                    }
                    watch.without_anchor.push(stored);
                }
                Err(error) => {
                    let what = format!("the dataset is not verified, or not all of it: {}", error.message());
                    watch.tell("unreadable", stored.display().to_string(), what);
                    done.failures += 1;
                }
            }
        }
        Ok(done)
    }

    /// A dataset, by the anchor that this host has of it. `None`: it has none.
    fn dataset(&self, here: Here, id: &VaultId, watch: &mut Watch<'_>) -> Result<Option<Scrubbed>> {
        let Some(anchor) = self.ui.policy.anchors.look_at_dataset(id)? else { return Ok(None) };
        let dir = self.args.dir.join(&here.stored);
        let header = header_file::read::<VaultHeader>(&dir.join(name::HEADER))?;
        if header.id() != *id {
            return Err(Fault::DatasetExchanged { dir }.into());
        }
        let above = std::mem::replace(&mut watch.here, here);
        let done = self.vault(&dir, &header, &anchor, watch);
        watch.here = above;
        done.map(Some)
    }

    /// One vault, whose directory is `dir`: what is in its tree, and its header, history and record of sessions.
    fn vault(&self, dir: &Path, header: &VaultHeader, anchor: &Anchor, watch: &mut Watch<'_>) -> Result<Scrubbed> {
        let compared = compare_records(dir, anchor)?;
        if compared.is_history_unreadable {
            self.ui.warn(format_args!("{}: the history cannot be read, and was not compared", dir.display()));
        }
        let events = self.events.of_vault(&header.id());
        for found in &compared.findings {
            events.found(found.kind.at(found.name, found.what).by(FoundBy::Scrub));
            watch.tell_here(found.kind.word(), Path::new(found.name), found.what.into());
        }
        let backend = lamassu_host::backend(dir)?.without_access_times();
        let mut done = scrub(backend.root(), header, anchor, self.events, watch).map_err(Error::from)?;
        done.findings += compared.findings.len() as u64;
        done.unread_histories += u64::from(compared.is_history_unreadable);
        Ok(done)
    }
}

fn report(ui: &Ui, args: &Args, done: &Scrubbed, findings: Vec<Finding>, without_anchor: &[PathBuf]) -> Result<()> {
    let datasets = if args.skip_unanchored { 0 } else { without_anchor.len() };
    let of_files = done.unverified_blocks + done.open_pages + done.files_with_unverified_blocks;
    let unverified = of_files + done.unverified_dirs + done.unread_histories;
    let is_all_verified = unverified == 0 && datasets == 0;
    let status = match (done.findings, done.failures, is_all_verified) {
        (0, 0, true) => "clean",
        (0, 0, false) => "unverified",
        (0, ..) => "unreadable",
        _ => "stale",
    };
    let printed = if args.json {
        let datasets_without_anchor = without_anchor.iter().map(|path| path.display().to_string()).collect();
        output::print_json(&Summary {
            status,
            entries: done.entries,
            files: done.files,
            skipped: done.skipped,
            pages: done.pages,
            blocks: done.blocks,
            files_without_blocks: done.files_without_blocks,
            files_with_unverified_blocks: done.files_with_unverified_blocks,
            unverified_blocks: done.unverified_blocks,
            open_files: done.open_files,
            open_pages: done.open_pages,
            unfinished: done.unfinished,
            unverified_dirs: done.unverified_dirs,
            unread_histories: done.unread_histories,
            datasets: done.datasets,
            datasets_without_anchor,
            failures: done.failures,
            found: done.findings,
            findings,
        })
    } else if !ui.quiet {
        output::print(shown(status, done, without_anchor.len() as u64))
    } else {
        Ok(())
    };
    match status {
        "clean" => printed,
        // A reader that is gone (`| head`) does not make a stale store a current one.
        "unverified" => {
            let (pages, blocks, files) = (done.open_pages, done.unverified_blocks, done.files_with_unverified_blocks);
            let (dirs, histories) = (done.unverified_dirs, done.unread_histories);
            Err(Fault::ScrubUnverified { pages, blocks, files, dirs, histories, datasets }.into())
        }
        "unreadable" => Err(Fault::ScrubUnreadable { places: done.failures }.into()),
        _ => Err(Fault::ScrubStale { findings: done.findings }.into()),
    }
}

fn shown(status: &str, done: &Scrubbed, without_anchor: u64) -> String {
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
        (done.datasets, "datasets were met, and verified by the anchors that this machine has of them"),
        (without_anchor, "of these were not verified: their anchors are not on this machine"),
    ];
    for (count, what) in more.into_iter().filter(|(count, _)| *count > 0) {
        out += &format!("\n{count} {what}");
    }
    out
}

impl Watch<'_> {
    /// `path`: in the vault that is gone through.
    fn tell_here(&mut self, kind: &'static str, path: &Path, what: String) {
        self.tell(kind, self.here.stored.join(path).display().to_string(), what);
    }

    fn tell(&mut self, kind: &'static str, path: String, what: String) {
        let found = Finding { kind, path, what };
        if !self.json {
            let line = format!("{kind}: {}: {}", text::printable(&found.path), found.what);
            // A closed standard output is reported at the end.
            let _ = self.meter.suspend(|| output::print(line));
        } else if self.findings.len() < FINDINGS_MAX {
            self.findings.push(found);
        }
    }

    fn save(&mut self) {
        let Some(file) = self.file else { return };
        self.failed = self.failed.take().or(self.state.write(file).err());
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
        self.tell_here(kind, &finding.path, finding.what.clone());
    }

    fn dataset(&mut self, stored: &Path, id: VaultId) {
        self.datasets.push_back((self.here.stored.join(stored), id));
    }

    fn verified(&mut self, object: ObjectId, row: RowDigest) {
        if self.file.is_some() {
            self.state.add(&self.here.vault, object, row);
            if self.saved.elapsed() >= SAVE_EVERY {
                self.save();
            }
        }
    }

    fn is_verified(&self, object: ObjectId, row: RowDigest) -> bool {
        self.state.has(&self.here.vault, object, row)
    }

    fn is_stopped(&self) -> bool {
        signals::interrupted() || self.failed.is_some()
    }
}
