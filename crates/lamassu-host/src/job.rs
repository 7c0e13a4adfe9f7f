//! Long work in an open vault, on a thread of its own. Clients can ask for its progress, and cancel it.

use crate::control::protocol::{Ended, Failed, Progress};
use crate::{Error, Place, Result};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::profile::{Choice, ProfileError};
use lamassu_keys::Event;
use lamassu_keys::history::{EventKind, History};
use lamassu_vault::forest::{Number, local};
use lamassu_vault::{EntryRef, Forest, Ino, Rekey, RekeyProgress, Rekeyed, Vault, VaultError};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Lines for the user that are kept, of each kind, and their longest length.
const LINES_MAX: usize = 20;
const LINE_CHARS_MAX: usize = 300;
/// Ended jobs that are remembered.
const ENDED_MAX: usize = 64;

/// The work of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Re-keys everything to the newest keys.
    Rekey {
        /// also data
        full: bool,
        /// read and written of files; `None`: no limit
        bytes_per_second: Option<u64>,
    },
    /// Gives a file, or new files in a directory, another profile.
    Profile {
        /// the file or directory, by the forest's number
        ino: Ino,
        /// the chosen parts
        choice: Choice,
        /// also what is in the directory already
        below: bool,
    },
}

/// Called for each dataset that a job finds, with its path in the vault's store.
pub type OnDataset = Box<dyn Fn(&Job, &Path) -> Result<()> + Send + Sync>;

/// A running or ended job.
pub struct Job {
    task: Task,
    on_dataset: OnDataset,
    total: AtomicU64,
    done: AtomicU64,
    cancelled: AtomicBool,
    failures: Mutex<Vec<String>>,
    passed_over: Mutex<Vec<String>>,
    ended: Mutex<Option<Ended>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn keep(lines: &Mutex<Vec<String>>, line: &str) {
    let mut lines = lock(lines);
    let line: String = line.chars().take(LINE_CHARS_MAX).collect();
    // A tree that was changed meanwhile is walked again.
    if lines.len() < LINES_MAX && !lines.contains(&line) {
        lines.push(line);
    }
}

impl Job {
    /// Starts a job on a thread.
    ///
    /// # Errors
    /// [`Error::NoThread`].
    pub fn start(
        task: Task,
        on_dataset: OnDataset,
        work: impl FnOnce(&Job) -> Result<Rekeyed> + Send + 'static,
    ) -> Result<Arc<Job>> {
        let job = Arc::new(Job {
            task,
            on_dataset,
            total: AtomicU64::new(0),
            done: AtomicU64::new(0),
            cancelled: AtomicBool::new(false),
            failures: Mutex::default(),
            passed_over: Mutex::default(),
            ended: Mutex::default(),
        });
        let running = job.clone();
        let body = move || {
            // A panic is a bug. The end is recorded nevertheless, since a command that waits must not wait for ever.
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&running)));
            let ended = match done.unwrap_or(Err(Error::JobPanicked)) {
                Ok(done) => Ended::Done(done),
                Err(error) => Ended::Failed(Failed::from(&error)),
            };
            *lock(&running.ended) = Some(ended);
        };
        let started = std::thread::Builder::new().name("lamassu-job".into()).spawn(body);
        started.map_err(|source| Error::NoThread { source })?;
        Ok(job)
    }

    /// The job's progress.
    pub fn progress(&self) -> Progress {
        // Read first: once a job has ended, its failures are complete.
        let ended = lock(&self.ended).clone();
        Progress {
            total: self.total.load(Ordering::Relaxed),
            done: self.done.load(Ordering::Relaxed),
            failures: lock(&self.failures).clone(),
            passed_over: lock(&self.passed_over).clone(),
            ended,
        }
    }

    fn has_ended(&self) -> bool {
        lock(&self.ended).is_some()
    }

    /// Cancels the job; it ends soon.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Notes something that is left unchanged, and why.
    pub(crate) fn pass_over(&self, line: &str) {
        keep(&self.passed_over, line);
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
        tracing::error!(stored, %error, "not rewritten");
        keep(&self.failures, &format!("{stored}: {error}"));
    }

    fn passed_over(&self, stored: &str, why: &ProfileError) {
        self.pass_over(&format!("{stored}: {why}"));
    }

    fn dataset(&self, stored: &Path) -> lamassu_vault::Result<()> {
        (self.on_dataset)(self, stored).map_err(|error| match error.innermost() {
            // Another host has it. The walk goes on there in a later turn, as after a session that ended.
            Error::NoTurn => {
                let fault = ServerFault::Unreachable { detail: "another host keeps a dataset".into() };
                VaultError::Anchor(AnchorError::Server { server: String::new(), fault })
            }
            error => VaultError::Io {
                op: "seal the parent slot of a dataset",
                source: std::io::Error::other(error.message()),
            },
        })
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

/// A re-keying that a user has asked for.
#[derive(Clone, Copy)]
pub(crate) struct Asked {
    /// also data
    pub full: bool,
    pub bytes_per_second: Option<u64>,
    pub uid: u32,
}

impl Asked {
    pub fn work(self) -> Rekey {
        if self.full { Rekey::Full } else { Rekey::Outer }
    }

    /// Records its beginning, or its end with what was done, in a history.
    pub fn note(self, history: &mut History, done: Option<&Rekeyed>) -> Result<()> {
        let kind = if done.is_some() { EventKind::RekeyEnded } else { EventKind::RekeyBegun };
        let mut event = Event::new(kind).by(self.uid).detail("what", if self.full { "full" } else { "outer" });
        if let Some(done) = done {
            event = event
                .detail("complete", done.complete)
                .detail("pages", done.pages)
                .detail("blocks", done.blocks)
                .detail("failed", done.failed);
        }
        Ok(history.note(event)?)
    }
}

/// A failure to record does not affect the re-keying.
pub(crate) fn warn_unless(noted: Result<()>) {
    if let Err(error) = noted {
        tracing::warn!(%error, "the history does not record a re-keying");
    }
}

/// Re-keys the vault in `place`, and records that in its history if possible.
pub(crate) fn rekey(job: &Job, vault: &Vault, (mut history, place): (History, Place), asked: Asked) -> Result<Rekeyed> {
    warn_unless(asked.note(&mut history, None));
    let done = vault.rekey(asked.work(), asked.bytes_per_second, job)?;
    warn_unless(asked.note(&mut history, Some(&done)));
    // The history was written through its descriptor until now.
    drop(place);
    Ok(done)
}

/// An entry in the open vaults of a process, with its vault.
pub(crate) struct Held {
    entry: EntryRef<Arc<Forest>>,
    pub vault: Arc<Vault>,
    pub ino: Ino,
}

impl Held {
    /// Resolves a plain path in a member.
    ///
    /// # Errors
    /// Those of resolving the path.
    pub fn at(forest: &Arc<Forest>, member: Number, path: &Path) -> Result<Held> {
        let entry = EntryRef::new(forest.clone(), forest.resolve_from(member, path.as_os_str())?);
        Ok(Held { vault: forest.at(entry.ino())?, ino: entry.ino(), entry })
    }

    /// The entry's number in its own vault.
    pub fn local(&self) -> Ino {
        local(self.ino)
    }

    /// Drops the vault, and keeps the reference to the entry.
    pub fn into_entry(self) -> EntryRef<Arc<Forest>> {
        self.entry
    }
}

/// The jobs of a process, by number.
#[derive(Default)]
pub(crate) struct Jobs {
    last: u64,
    all: BTreeMap<u64, (Number, Arc<Job>)>,
}

impl Jobs {
    /// The running job in a member, if it does the same.
    ///
    /// # Errors
    /// [`Error::JobUnderWay`] if it does something else.
    pub fn under_way(&self, member: Number, task: Task) -> Result<Option<u64>> {
        let mut under_way = self.all.iter().filter(|(_, (of, job))| *of == member && !job.has_ended());
        match under_way.next() {
            None => Ok(None),
            Some((number, (_, job))) if job.task == task => Ok(Some(*number)),
            Some(_) => Err(Error::JobUnderWay),
        }
    }

    /// Adds a job in a member; returns its number.
    pub fn add(&mut self, member: Number, job: Arc<Job>) -> u64 {
        let ended = self.all.iter().filter(|(_, (_, job))| job.has_ended()).map(|(number, _)| *number);
        let ended: Vec<u64> = ended.collect();
        for number in ended.iter().take(ended.len().saturating_sub(ENDED_MAX)) {
            self.all.remove(number);
        }
        self.last += 1;
        self.all.insert(self.last, (member, job));
        self.last
    }

    /// A job, by its number.
    ///
    /// # Errors
    /// [`Error::NoJob`].
    pub fn get(&self, number: u64) -> Result<Arc<Job>> {
        self.all.get(&number).map(|(_, job)| job.clone()).ok_or(Error::NoJob)
    }

    /// All jobs in members for which `is_meant` is true.
    pub fn of(&self, is_meant: impl Fn(Number) -> bool) -> impl Iterator<Item = &Arc<Job>> {
        self.all.values().filter(move |(member, _)| is_meant(*member)).map(|(_, job)| job)
    }
}
