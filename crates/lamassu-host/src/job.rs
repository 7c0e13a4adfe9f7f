//! Long work in an open vault, on a thread of its own: its progress is asked for, and it can be cancelled.

use crate::control::protocol::{Ended, Failed, Progress};
use crate::{Error, Place, Result};
use lamassu_format::profile::{Choice, ProfileError};
use lamassu_keys::Event;
use lamassu_keys::history::{EventKind, History};
use lamassu_vault::forest::{Number, local};
use lamassu_vault::{FileSystem, Forest, Ino, Rekey, RekeyProgress, Rekeyed, Vault, VaultError};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Lines for people that are kept, of each kind, and how much of each.
const LINES_MAX: usize = 20;
const LINE_CHARS_MAX: usize = 300;
/// Jobs that are remembered after their end.
const ENDED_MAX: usize = 64;

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// To bring everything to the newest keys.
    Rekey {
        /// also data
        full: bool,
        /// read and written of files; `None`: no limit
        bytes_per_second: Option<u64>,
    },
    /// To give a file, or what is made in a directory, another profile.
    Profile {
        /// which, as the forest numbers it
        ino: Ino,
        /// what is chosen of it
        choice: Choice,
        /// also of what is in the directory already
        below: bool,
    },
}

/// What a job does of a dataset that it meets, by its path in the vault's store.
pub type OnDataset = Box<dyn Fn(&Job, &Path) -> Result<()> + Send + Sync>;

/// Work under way, or at its end.
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
    // A tree is walked through again where it was changed meanwhile.
    if lines.len() < LINES_MAX && !lines.contains(&line) {
        lines.push(line);
    }
}

impl Job {
    /// Begins on a thread.
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
            // A panic is a bug. The end is recorded all the same: a waiting command must not wait for ever.
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

    /// How far it is.
    pub fn progress(&self) -> Progress {
        // First: what it has failed at is complete when it has ended.
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

    /// Ends it soon.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Notes what stays as it is, and why.
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
        (self.on_dataset)(self, stored).map_err(|error| VaultError::Io {
            op: "seal the parent slot of a dataset",
            source: std::io::Error::other(error.message()),
        })
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

/// Re-keys a vault, written down in its history, where that can be written, which lies in `place`.
pub(crate) fn rekey(
    job: &Job,
    vault: &Vault,
    (mut history, place): (History, Place),
    (full, bytes_per_second, uid): (bool, Option<u64>, u32),
) -> Result<Rekeyed> {
    let (work, name) = if full { (Rekey::Full, "full") } else { (Rekey::Outer, "outer") };
    let mut note = |kind, detail: Option<&Rekeyed>| {
        let event = Event::new(kind).by(uid).detail("what", name);
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
    let done = vault.rekey(work, bytes_per_second, job)?;
    note(EventKind::RekeyEnded, Some(&done));
    // The history was written through its descriptor until now.
    drop(place);
    Ok(done)
}

/// The number of an entry of the vaults that a process has open, to which a reference is held.
pub(crate) struct Named {
    forest: Arc<Forest>,
    ino: Ino,
}

impl Drop for Named {
    fn drop(&mut self) {
        self.forest.forget(self.ino, 1);
    }
}

impl Named {
    pub fn forest(&self) -> &Arc<Forest> {
        &self.forest
    }

    pub fn ino(&self) -> Ino {
        self.ino
    }
}

/// The same, and its vault.
pub(crate) struct Held {
    named: Named,
    pub vault: Arc<Vault>,
    pub ino: Ino,
}

impl Held {
    /// By its plain path in a volume.
    ///
    /// # Errors
    /// Those of resolving it.
    pub fn at(forest: &Arc<Forest>, volume: Number, path: &Path) -> Result<Held> {
        let ino = forest.resolve_from(volume, path.as_os_str())?.attr.ino;
        let named = Named { forest: forest.clone(), ino };
        Ok(Held { vault: forest.at(ino)?, named, ino })
    }

    /// Its number in its own vault.
    pub fn local(&self) -> Ino {
        local(self.ino)
    }

    /// Without its vault.
    pub fn into_named(self) -> Named {
        self.named
    }
}

/// The jobs of a process, by number.
#[derive(Default)]
pub(crate) struct Jobs {
    last: u64,
    all: BTreeMap<u64, (Number, Arc<Job>)>,
}

impl Jobs {
    /// The job under way in a volume, if that does the same.
    ///
    /// # Errors
    /// [`Error::JobUnderWay`] where it does something else.
    pub fn under_way(&self, volume: Number, task: Task) -> Result<Option<u64>> {
        let mut under_way = self.all.iter().filter(|(_, (of, job))| *of == volume && !job.has_ended());
        match under_way.next() {
            None => Ok(None),
            Some((number, (_, job))) if job.task == task => Ok(Some(*number)),
            Some(_) => Err(Error::JobUnderWay),
        }
    }

    /// Adds one in a volume; its number.
    pub fn add(&mut self, volume: Number, job: Arc<Job>) -> u64 {
        let ended = self.all.iter().filter(|(_, (_, job))| job.has_ended()).map(|(number, _)| *number);
        let ended: Vec<u64> = ended.collect();
        for number in ended.iter().take(ended.len().saturating_sub(ENDED_MAX)) {
            self.all.remove(number);
        }
        self.last += 1;
        self.all.insert(self.last, (volume, job));
        self.last
    }

    /// One, by its number.
    ///
    /// # Errors
    /// [`Error::NoJob`].
    pub fn get(&self, number: u64) -> Result<Arc<Job>> {
        self.all.get(&number).map(|(_, job)| job.clone()).ok_or(Error::NoJob)
    }

    /// All in volumes of a kind.
    pub fn of(&self, is_meant: impl Fn(Number) -> bool) -> impl Iterator<Item = &Arc<Job>> {
        self.all.values().filter(move |(volume, _)| is_meant(*volume)).map(|(_, job)| job)
    }
}
