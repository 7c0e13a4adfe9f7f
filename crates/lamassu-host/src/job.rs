//! A re-keying on a thread of its own: its progress is asked for, and it can be cancelled.

use crate::control::protocol::{Ended, Failed, Progress};
use crate::{Error, Place, Result};
use lamassu_keys::Event;
use lamassu_keys::history::{EventKind, History};
use lamassu_vault::{Rekey, RekeyProgress, Rekeyed, Vault, VaultError};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Failures that are told one by one, and how much of each.
const FAILURES_MAX: usize = 20;
const FAILURE_CHARS_MAX: usize = 300;

/// What a re-keying is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// also data
    pub full: bool,
    /// read and written of files; `None`: no limit
    pub bytes_per_second: Option<u64>,
    /// of the user who asked for it
    pub uid: u32,
}

/// Brings the parent slot of a dataset, by its path in the vault's store, to the vault's newest key.
pub type Reseal = Box<dyn Fn(&Path) -> Result<()> + Send + Sync>;

/// A re-keying under way, or at its end.
pub struct Job {
    task: Task,
    reseal: Reseal,
    total: AtomicU64,
    done: AtomicU64,
    cancelled: AtomicBool,
    failures: Mutex<Vec<String>>,
    ended: Mutex<Option<Ended>>,
}

impl Job {
    /// Begins. It is written down in the history, where that can be written, which lies in `place`.
    pub fn start(
        vault: Arc<Vault>,
        (mut history, place): (History, Place),
        task: Task,
        reseal: Reseal,
    ) -> Result<Arc<Job>> {
        let job = Arc::new(Job {
            task,
            reseal,
            total: AtomicU64::new(0),
            done: AtomicU64::new(0),
            cancelled: AtomicBool::new(false),
            failures: Mutex::default(),
            ended: Mutex::default(),
        });
        let running = job.clone();
        let body = move || {
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| running.run(&vault, &mut history)));
            // A bug. The end is recorded all the same: a waiting command must not wait for ever.
            if ended.is_err() {
                let failed = Failed::from(&Error::RekeyPanicked);
                *running.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(Ended::Failed(failed));
            }
            // The history was written through its descriptor until now.
            drop(place);
        };
        std::thread::Builder::new()
            .name("lamassu-rekey".into())
            .spawn(body)
            .map_err(|source| Error::NoThread { source })?;
        Ok(job)
    }

    fn run(&self, vault: &Vault, history: &mut History) {
        let work = if self.task.full { Rekey::Full } else { Rekey::Outer };
        let name = if self.task.full { "full" } else { "outer" };
        let mut note = |kind, detail: Option<&Rekeyed>| {
            let event = Event::new(kind).by(self.task.uid).detail("what", name);
            let event = match detail {
                Some(done) => event
                    .detail("complete", done.complete)
                    .detail("pages", done.pages)
                    .detail("blocks", done.blocks)
                    .detail("failed", done.failed),
                None => event,
            };
            if let Err(error) = history.note(event) {
                tracing::warn!(%error, "the history does not record a re-keying");
            }
        };
        note(EventKind::RekeyBegun, None);
        let ended = match vault.rekey(work, self.task.bytes_per_second, self) {
            Ok(done) => {
                note(EventKind::RekeyEnded, Some(&done));
                Ended::Done(done)
            }
            Err(error) => Ended::Failed(Failed::from(&Error::from(error))),
        };
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(ended);
    }

    /// Whether it does the same, and is not at its end.
    pub fn is_under_way_with(&self, full: bool) -> bool {
        self.task.full == full && self.progress().ended.is_none()
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        // First: what it has failed at is complete when it has ended.
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Progress {
            total: self.total.load(Ordering::Relaxed),
            done: self.done.load(Ordering::Relaxed),
            failures: self.failures.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            ended,
        }
    }

    /// Ends it soon.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

impl RekeyProgress for Job {
    fn total(&self, bytes: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.total.store(bytes, Ordering::Relaxed);
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn failed(&self, stored: &str, error: &VaultError) {
        tracing::error!(stored, %error, "not re-keyed");
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.len() < FAILURES_MAX {
            failures.push(format!("{stored}: {error}").chars().take(FAILURE_CHARS_MAX).collect());
        }
    }

    fn dataset(&self, stored: &Path) -> lamassu_vault::Result<()> {
        (self.reseal)(stored).map_err(|error| VaultError::Io {
            op: "seal the parent slot of a dataset",
            source: std::io::Error::other(error.message()),
        })
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}
