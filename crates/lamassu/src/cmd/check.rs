//! `lamassu check`: a line per problem, or run of them in one file, as it is found, a summary, and an exit code that
//! says which of clean, mended, damaged.

use crate::alert::{AlertArg, Told};
use crate::fault::{Fault, Result};
use crate::keys::{self, KeyArg};
use crate::open;
use crate::output::{self, Ui};
use crate::progress::Meter;
use crate::text;
use lamassu_host::check::check;
use lamassu_vault::check::{Problem, Progress, Report, Tally};
use lamassu_vault::event::{Events, FoundBy};
use lamassu_vault::{FileSystem, shown_ranges};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  lamassu check /srv/store/vault
  lamassu check --repair /srv/store/vault
      completes interrupted commits, and moves what cannot be repaired to lamassu.lost
  lamassu check --json /srv/store/vault photos | jq -r '.problems[].path'
Exit status:
   0  clean
  26  damage is left
  27  everything found was repaired
  29  no damage, but writes of an interrupted session are missing
  30  no damage, but something is not the newest state
  51  no damage, but datasets were not verified, since their keys are not available";

/// Options of `check`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    /// Repair what can be repaired; without this, nothing is changed
    #[arg(short, long)]
    repair: bool,
    /// Keep the exit status when datasets were skipped because their keys are not available
    #[arg(long)]
    skip_locked: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    alert: AlertArg,
    /// The vault; must not be mounted for writing
    dir: PathBuf,
    /// Plain paths to check, with what is below them [default: everything]
    paths: Vec<PathBuf>,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

#[derive(Serialize)]
struct Summary<'a> {
    status: &'static str,
    #[serde(flatten)]
    report: &'a Report,
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    let told = Told::start(&args.alert, &args.dir, FoundBy::Check)?;
    let done = checked(ui, &args, told.events());
    told.end(done)
}

fn checked(ui: &Ui, args: &Args, events: &Events) -> Result<()> {
    let started = Instant::now();
    let unsealed = open::unlocked(ui, &args.dir, &args.key)?;
    // A repair takes the writer's lock as a writer does; a mere check may not change even the lock's owner's data, and
    // still must not race a writer.
    let lock = if args.repair { None } else { open::lock_out_writers(ui, &args.dir)? };
    let mut options = open::options(!args.repair);
    options.events = events.clone();
    let served = unsealed.open_forest(options)?;
    let shown = Shown { meter: Meter::bytes(ui, "verified"), json: args.json, last: Mutex::new(None) };
    let report = check(&served, &args.paths, args.repair, &shown);
    shown.flush();
    drop(shown);
    let closed = served.forest().close();
    drop(lock);
    let report = report?;
    match closed {
        // What the policy forbids stays as it was, as the report says.
        Err(error) if report.is_forbidden() && error.is_of_policy() => {}
        closed => closed?,
    }
    let status = status_of(&report, args.skip_locked);
    let printed = if args.json {
        output::print_json(&Summary { status, report: &report })
    } else if !ui.quiet {
        output::print(summary(&report, status, args.repair, started))
    } else {
        Ok(())
    };
    match status {
        "clean" => printed,
        // A reader that is gone (`| head`) does not make a damaged vault a clean one.
        "undone" => Err(Fault::Undone { problems: report.tally().undone }.into()),
        "locked" => Err(Fault::NotVerified { datasets: report.locked.len() }.into()),
        "repaired" => Err(Fault::Repaired { problems: report.tally().repaired }.into()),
        "stale" => Err(Fault::CheckStale { problems: report.tally().stale }.into()),
        _ => Err(Fault::DamageLeft { problems: report.tally().damaged }.into()),
    }
}

/// The worst that was found. What was not verified is worse than what was mended: the vault is not known to be clean.
fn status_of(report: &Report, skip_locked: bool) -> &'static str {
    if report.is_stale() {
        "stale"
    } else if report.is_damaged() {
        "damaged"
    } else if report.is_undone() {
        "undone"
    } else if !report.locked.is_empty() && !skip_locked {
        "locked"
    } else if report.is_repaired() {
        "repaired"
    } else {
        "clean"
    }
}

fn summary(report: &Report, status: &str, repair: bool, started: Instant) -> String {
    let mut out = format!(
        "{status}: {} files, {} directories, {} links, {} others, {} attributes; {} pages and {} blocks verified in {:.1} s",
        report.files,
        report.directories,
        report.symlinks,
        report.other,
        report.xattrs,
        report.pages,
        report.blocks,
        started.elapsed().as_secs_f64()
    );
    if report.recovered > 0 {
        let what = if repair { "completed" } else { "good; `--repair` or the next use of the file completes them" };
        out.push_str(&format!("\n{} blocks of interrupted commits: {what}", report.recovered));
    }
    if report.unsealed_empty > 0 {
        out.push_str(&format!("\n{} empty files whose creation was never made durable", report.unsealed_empty));
    }
    if !report.open_sessions.is_empty() {
        let ranges = shown_ranges(&report.open_sessions);
        out.push_str(&format!(
            "\nsessions that were not closed: {ranges}; `--repair` of the whole vault completes them"
        ));
    }
    if !report.locked.is_empty() {
        let all: Vec<String> = report.locked.iter().map(|path| text::printable(path)).collect();
        out.push_str(&format!("\nlocked, checked as far as that takes no key: {}", all.join(", ")));
    }
    let Tally { damaged, undone, repaired: mended, harmless, .. } = report.tally();
    if damaged + undone + mended + harmless > 0 {
        out.push_str(&format!("\nproblems: {damaged} damaged, {mended} mended, {harmless} harmless"));
    }
    if undone > 0 {
        out.push_str(&format!(
            "\n{undone} ranges do not hold what was written last: an interruption took it, or the store"
        ));
    }
    if harmless > 0 && !repair {
        out.push_str(" (`--repair` clears away what is harmless)");
    }
    out
}

/// Shows a check as it goes.
pub struct Shown {
    meter: Meter,
    /// Print no lines.
    json: bool,
    /// What is not printed yet: the next problem may go on where it ends.
    last: Mutex<Option<Run>>,
}

/// Problems of one kind in one file, each where the one before it ends.
struct Run {
    first: Problem,
    /// In the content of the file, where that is what they concern.
    end: Option<u64>,
    problems: u64,
}

impl Run {
    fn of(problem: &Problem) -> Run {
        Run { first: problem.clone(), end: end_of(problem), problems: problem.blocks.unwrap_or(1) }
    }

    fn goes_on_with(&self, p: &Problem) -> bool {
        let same = |a: &Problem| (&a.path, &a.stored, &a.kind) == (&p.path, &p.stored, &p.kind);
        self.end.is_some() && self.end == p.offset && same(&self.first)
    }
}

fn end_of(p: &Problem) -> Option<u64> {
    p.offset?.checked_add(p.length?)
}

impl Shown {
    /// Prints what is left.
    fn flush(&self) {
        let run = self.last.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.print(run);
    }

    fn print(&self, run: Option<Run>) {
        if let Some(run) = run {
            // A reader that is gone does not end a repair.
            let _ = self.meter.suspend(|| output::print(line(&run)));
        }
    }
}

impl Progress for Shown {
    fn total(&self, _files: u64, bytes: u64) {
        self.meter.set_total(bytes);
    }

    fn advance(&self, files: u64, bytes: u64) {
        if files > 0 {
            self.flush();
        }
        self.meter.advance(bytes);
    }

    fn problem(&self, problem: &Problem) {
        if self.json {
            return;
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *last {
            Some(run) if run.goes_on_with(problem) => {
                run.end = end_of(problem);
                run.problems += problem.blocks.unwrap_or(1);
            }
            _ => self.print(last.replace(Run::of(problem))),
        }
    }
}

fn line(run: &Run) -> String {
    let p = &run.first;
    let word = match (p.repaired, p.harmless, p.undone) {
        (true, _, _) => "mended",
        (false, true, _) => "harmless",
        (false, false, true) => "undone",
        (false, false, false) => "damaged",
    };
    let place = match &p.path {
        Some(path) => format!("/{}", path.trim_start_matches('/')),
        None => format!("(stored) {}", p.stored),
    };
    let mut out = format!("{word}: {}", text::printable(&place));
    if let (Some(from), Some(end)) = (p.offset, run.end) {
        out.push_str(&format!(", bytes {from} to {}", end.saturating_sub(1)));
    }
    if run.problems > 1 {
        let what = if p.block.is_some() { "blocks" } else { "ranges" };
        out.push_str(&format!(
            ": {} in {} {what} in a row: {}",
            p.kind,
            run.problems,
            if p.undone { "what was written last is not there" } else { "they read as errors, the rest is readable" }
        ));
    } else if p.segment.is_some() {
        out.push_str(&format!(": {}", text::printable(&p.text)));
    } else {
        out.push_str(&format!(": {}: {}", p.kind, text::printable(&p.text)));
    }
    if p.path.is_some() {
        out.push_str(&format!(" [stored as {}]", text::printable(&p.stored)));
    }
    out
}
