//! Long work in a vault: in a mounted vault by its daemon, otherwise in this process. It is watched to its end; an
//! interruption ends it.

use crate::fault::{Fault, Result};
use crate::keys::KeyArg;
use crate::output::Ui;
use crate::progress::Meter;
use crate::{open, served, signals, text};
use lamassu_fuse::control::Asked;
use lamassu_host::control::protocol::{Ended, Progress, Request};
use lamassu_host::{Error as HostError, Served};
use lamassu_vault::{FileSystem, Rekeyed};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How often progress is asked for.
const POLL: Duration = Duration::from_millis(100);

/// Where the work is done.
pub enum Worker {
    Daemon(Asked),
    Here(Arc<Served>),
}

/// Words for people.
#[derive(Clone, Copy)]
pub struct Words {
    /// the verb for the bytes that a meter shows
    pub done: &'static str,
    /// the text for an object that fails
    pub failed: &'static str,
}

impl Worker {
    /// The daemon of the vault, or the vault opened in this process.
    pub fn of(ui: &Ui, dir: &Path, key: &KeyArg, read_only: bool) -> Result<Worker> {
        Ok(match served::of(dir)? {
            Some(mountpoint) => Worker::Daemon(mountpoint),
            None => Worker::Here(open::unlocked(ui, dir, key)?.open_forest(open::options(read_only))?),
        })
    }

    /// Watches a job to its end. Returns what was done, even if the job failed, and whether it succeeded.
    ///
    /// # Errors
    /// The error that ended watching.
    pub fn watch(&self, ui: &Ui, job: u64, words: Words) -> Result<(Rekeyed, Result<()>)> {
        // From here on Ctrl-C ends the work, not only this process: a daemon would go on.
        signals::flag_only();
        let meter = Meter::bytes(ui, words.done);
        let (mut total, mut failed, mut passed_over, mut stopped) = (0, 0, 0, false);
        let ended = loop {
            let progress = self.progress(job)?;
            if progress.total != total {
                total = progress.total;
                meter.set_total(total);
            }
            meter.reach(progress.done.min(total));
            for line in progress.failures.iter().skip(failed) {
                meter.suspend(|| ui.warn(format_args!("{}: {}", words.failed, text::printable(line))));
            }
            for line in progress.passed_over.iter().skip(passed_over) {
                let line = text::printable(line);
                meter.suspend(|| ui.note(format_args!("stays as it is: {line}")));
            }
            (failed, passed_over) = (progress.failures.len().max(failed), progress.passed_over.len().max(passed_over));
            if let Some(ended) = progress.ended {
                break ended;
            }
            if signals::interrupted() && !stopped {
                self.cancel(job)?;
                stopped = true;
            }
            std::thread::sleep(POLL);
        };
        match ended {
            Ended::Failed(failed) => Err(Fault::Told(failed).into()),
            Ended::Done(done) if stopped => Ok((done, Err(HostError::Interrupted.into()))),
            Ended::Done(done) if done.failed > 0 => Ok((done, Err(Fault::NotRewritten { failed: done.failed }.into()))),
            Ended::Done(done) if !done.complete => Ok((done, Err(Fault::JobIncomplete.into()))),
            Ended::Done(done) => Ok((done, Ok(()))),
        }
    }

    fn progress(&self, job: u64) -> Result<Progress> {
        match self {
            Worker::Daemon(mountpoint) => served::ask(mountpoint, &Request::JobStatus { job }),
            Worker::Here(served) => Ok(served.job(job)?.progress()),
        }
    }

    fn cancel(&self, job: u64) -> Result<()> {
        match self {
            Worker::Daemon(mountpoint) => served::ask(mountpoint, &Request::JobCancel { job }),
            Worker::Here(served) => {
                served.job(job)?.cancel();
                Ok(())
            }
        }
    }

    /// Closes the vault if it was opened in this process.
    pub fn close(self) -> Result<()> {
        match self {
            Worker::Daemon(_) => Ok(()),
            Worker::Here(served) => Ok(served.forest().close()?),
        }
    }
}
