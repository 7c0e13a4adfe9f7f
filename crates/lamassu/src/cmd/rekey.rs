//! `lamassu rekey`: brings what is stored to the newest keys, in a mounted vault by its daemon, otherwise here.

use crate::fault::{Fault, Result};
use crate::keys::{self, KeyArg};
use crate::open;
use crate::output::{self, Ui};
use crate::progress::Meter;
use crate::{served, signals, text};
use lamassu_fuse::control::Asked;
use lamassu_host::Error as HostError;
use lamassu_host::Served;
use lamassu_host::control::protocol::{Ended, Progress, Request};
use lamassu_host::job::Task;
use lamassu_vault::forest::ROOT_VOLUME;
use lamassu_vault::{FileSystem, Rekeyed};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How often progress is asked for.
const POLL: Duration = Duration::from_millis(100);

const EXAMPLES: &str = "\
Examples:
  lamassu key rotate --outer /srv/store/vault && lamassu rekey --outer /srv/store/vault
  lamassu rekey --full --limit 50M ~/private        where it is mounted: goes on while it is used
May be stopped at any moment, and run again: it goes on with what is left.";

/// Options of `rekey`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    work: Work,
    /// Read and write at most so many bytes of files a second, e.g. 50M [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
    limit: Option<u64>,
    /// Print what was done as JSON
    #[arg(long)]
    json: bool,
    /// The vault, or where it is mounted
    dir: PathBuf,
}

#[derive(clap::Args, Clone, Copy, Debug)]
#[group(required = true, multiple = false)]
struct Work {
    /// Metadata alone, to the newest outer key: pages, directories, links, attributes; under 2 % of the bytes
    #[arg(long)]
    outer: bool,
    /// Data too: all blocks are encrypted anew under the newest inner key
    #[arg(long)]
    full: bool,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

/// Where the work is done.
enum Worker {
    Daemon(Asked),
    Here(Arc<Served>),
}

impl Worker {
    fn start(ui: &Ui, args: &Args) -> Result<Worker> {
        let (full, bytes_per_second) = (args.work.full, args.limit);
        if let Some(mountpoint) = served::of(&args.dir) {
            let _: Progress = served::ask(&mountpoint, &Request::RekeyStart { full, bytes_per_second })?;
            return Ok(Worker::Daemon(mountpoint));
        }
        let served = open::unlocked(ui, &args.dir, &args.key)?.open_forest(open::options(false))?;
        let uid = rustix::process::getuid().as_raw();
        served.rekey(ROOT_VOLUME, Task { full, bytes_per_second, uid })?;
        Ok(Worker::Here(served))
    }

    fn progress(&self) -> Result<Progress> {
        match self {
            Worker::Daemon(mountpoint) => served::ask(mountpoint, &Request::RekeyStatus {}),
            Worker::Here(served) => Ok(served.job(ROOT_VOLUME)?),
        }
    }

    fn cancel(&self) -> Result<()> {
        match self {
            Worker::Daemon(mountpoint) => served::ask(mountpoint, &Request::RekeyCancel {}),
            Worker::Here(served) => {
                served.end_jobs(ROOT_VOLUME);
                Ok(())
            }
        }
    }

    fn close(self) -> Result<()> {
        match self {
            Worker::Daemon(_) => Ok(()),
            Worker::Here(served) => Ok(served.forest().close()?),
        }
    }
}

pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let worker = Worker::start(ui, args)?;
    // From here on Ctrl-C ends the work, not only this process: a daemon would go on.
    signals::flag_only();
    let (ended, stopped) = watch(ui, &worker)?;
    worker.close()?;
    let done = match ended {
        Ended::Failed(failed) => return Err(Fault::Told(failed).into()),
        Ended::Done(done) => done,
    };
    if args.json {
        output::print_json(&done)?;
    } else {
        ui.note(summary(&done));
    }
    match done {
        _ if stopped => Err(HostError::Interrupted.into()),
        Rekeyed { failed, .. } if failed > 0 => Err(Fault::NotRekeyed { failed }.into()),
        Rekeyed { complete: false, .. } => Err(Fault::RekeyIncomplete.into()),
        _ => {
            let what = if args.work.full {
                "`lamassu key retire --inner` and `--outer` end"
            } else {
                "`lamassu key retire --outer` ends"
            };
            ui.note(format_args!("earlier epochs have nothing left to do; {what} them"));
            Ok(())
        }
    }
}

/// Shows progress until the end; whether it was cancelled here.
fn watch(ui: &Ui, worker: &Worker) -> Result<(Ended, bool)> {
    let meter = Meter::bytes(ui, "re-keyed");
    let (mut total, mut told, mut stopped) = (0, 0, false);
    loop {
        let progress = worker.progress()?;
        if progress.total != total {
            total = progress.total;
            meter.set_total(total);
        }
        meter.reach(progress.done.min(total));
        for line in progress.failures.iter().skip(told) {
            meter.suspend(|| ui.warn(format_args!("not re-keyed: {}", text::printable(line))));
        }
        told = told.max(progress.failures.len());
        if let Some(ended) = progress.ended {
            return Ok((ended, stopped));
        }
        if signals::interrupted() && !stopped {
            worker.cancel()?;
            stopped = true;
        }
        std::thread::sleep(POLL);
    }
}

fn summary(done: &Rekeyed) -> String {
    let Rekeyed { records, links, attributes, pages, blocks, read, written, .. } = *done;
    if records + links + attributes + pages + blocks == 0 {
        return "everything is under the newest keys already".into();
    }
    format!(
        "sealed again: {pages} pages, {records} directories, {links} links, {attributes} attributes; encrypted again: {blocks} blocks \
         ({} read and {} written of files)",
        text::bytes(read),
        text::bytes(written)
    )
}
