//! Checks a vault and the datasets in it. Datasets whose keys are available are checked as the vault itself, others as
//! far as possible without keys.

use crate::anchors;
use crate::lock::{self, WriterLock};
use crate::{Error, FaultKind, Result, Served, backend};
use lamassu_format::name;
use lamassu_vault::check::{Problem, Progress, Report, check_locked, kind};
use lamassu_vault::event::{Events, FoundBy, IntegrityKind};
use lamassu_vault::forest::{Number, ROOT_MEMBER, member_of};
use lamassu_vault::{Dataset, VaultError};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Checks an open vault and the datasets in it: everything, or what is at and below plain paths. No other process may
/// have the vault open for writing; writers of datasets are locked out here, one dataset at a time.
///
/// # Errors
/// Those of the store, [`Error::Locked`] among them. Findings are not errors.
pub fn check(served: &Served, paths: &[PathBuf], repair: bool, shown: &dyn Progress) -> Result<Report> {
    let mut walk = Walk { served, repair, shown, report: Report::default() };
    walk.member(ROOT_MEMBER, Path::new(""), Path::new(""), paths)?;
    Ok(walk.report)
}

/// A check of several vaults.
struct Walk<'a> {
    served: &'a Served,
    repair: bool,
    shown: &'a dyn Progress,
    report: Report,
}

/// Prefixes the paths of one vault with its directory.
struct Below<'a> {
    shown: &'a dyn Progress,
    plain: &'a Path,
    stored: &'a Path,
}

impl Below<'_> {
    fn placed(&self, problem: &Problem) -> Problem {
        Problem {
            path: problem.path.as_ref().map(|p| self.plain.join(p).display().to_string()),
            stored: self.stored.join(&problem.stored).display().to_string(),
            ..problem.clone()
        }
    }
}

impl Progress for Below<'_> {
    fn total(&self, files: u64, bytes: u64) {
        self.shown.total(files, bytes);
    }

    fn advance(&self, files: u64, bytes: u64) {
        self.shown.advance(files, bytes);
    }

    fn problem(&self, problem: &Problem) {
        self.shown.problem(&self.placed(problem));
    }
}

impl Walk<'_> {
    /// Checks all of a vault, or what is at and below plain paths in it; `plain` and `stored` are the vault's own
    /// paths.
    fn member(&mut self, member: Number, plain: &Path, stored: &Path, paths: &[PathBuf]) -> Result<()> {
        let vault = self.served.forest().vault(member).ok_or(VaultError::KeyNotLoaded)?;
        let (mut own, mut within) = (Vec::new(), Vec::new());
        for path in paths {
            match vault.dataset_on(path.as_os_str())? {
                Some((dataset, rest)) => within.push((dataset, rest)),
                None => own.push(path.as_os_str()),
            }
        }
        if paths.is_empty() || !own.is_empty() {
            let below = Below { shown: self.shown, plain, stored };
            let found = vault.check(&own, self.repair, &below)?;
            within.extend(found.datasets.iter().map(|dataset| (dataset.clone(), PathBuf::new())));
            self.merge(found, plain, stored);
        }
        if paths.is_empty() {
            self.history(member, vault.events(), plain, stored)?;
        }
        for (dataset, rest) in within {
            self.dataset(member, (plain, stored), &dataset, rest)?;
        }
        Ok(())
    }

    fn dataset(&mut self, above: Number, at: (&Path, &Path), dataset: &Dataset, rest: PathBuf) -> Result<()> {
        let stored = at.1.join(&dataset.stored);
        let forest = self.served.forest();
        let plain = dataset.plain.as_ref().map(|p| at.0.join(p));
        let opened = match &dataset.plain {
            Some(path) => forest.resolve_from(above, path.as_os_str()).and_then(|entry| {
                let ino = entry.attr.ino;
                forest.at(ino).map(|_| member_of(ino))
            }),
            // Its name does not open, so it cannot be entered.
            None => Err(VaultError::KeyNotLoaded),
        };
        match opened {
            Ok(member) => {
                // A repair has opened it as a writer, with the lock.
                let lock = if self.repair { Ok(None) } else { self.lock_out_writers(&stored) };
                let Some(_lock) = self.locked_out(lock, plain.as_deref(), &stored)? else { return Ok(()) };
                let paths = if rest.as_os_str().is_empty() { Vec::new() } else { vec![rest] };
                self.member(member, plain.as_deref().unwrap_or(&stored), &stored, &paths)
            }
            // Refused by --fips.
            Err(VaultError::KeyNotLoaded | VaultError::Refused(_)) => self.locked(plain.as_deref(), &stored),
            Err(VaultError::Locked) => {
                Err(self.served.policy().locked(&self.served.keeper().dir(ROOT_MEMBER)?.join(&stored)))
            }
            Err(error) => {
                self.unopened(&error, plain.as_deref(), &stored);
                Ok(())
            }
        }
    }

    /// Reports a dataset that does not open. An outdated one is not damaged.
    fn unopened(&mut self, error: &VaultError, plain: Option<&Path>, stored: &Path) {
        let kind = if FaultKind::from(error) == FaultKind::Stale { kind::STALE } else { kind::DATASET };
        let remedy = match (anchors::is_of_vault(error), self.served.keeper().dir(ROOT_MEMBER)) {
            (true, Ok(dir)) => {
                format!("; if it was put back on purpose: `lamassu anchor accept {}`", dir.join(stored).display())
            }
            (true, Err(_)) | (false, _) => String::new(),
        };
        self.say(kind, plain, stored, format!("the dataset does not open: {error}{remedy}"));
    }

    /// Another process may open it on its own, by its directory in the store.
    fn lock_out_writers(&self, stored: &Path) -> Result<Option<WriterLock>> {
        let dir = self.served.keeper().dir(ROOT_MEMBER)?;
        let lock = || lock::lock_out_writers_of(self.served.policy(), &dir, stored);
        lock::once_closed(self.served.policy(), &dir.join(stored), lock)
    }

    /// Locks a dataset. `None`: something else is in its place. That is reported, and the rest of the vault is checked.
    fn locked_out(
        &mut self,
        lock: Result<Option<WriterLock>>,
        plain: Option<&Path>,
        stored: &Path,
    ) -> Result<Option<Option<WriterLock>>> {
        match lock {
            Err(error) if matches!(error.innermost(), Error::Backing { .. }) => {
                self.say(
                    kind::DATASET,
                    plain,
                    stored,
                    format!("the dataset is not checked, since it cannot be locked: {error}"),
                );
                Ok(None)
            }
            lock => lock.map(Some),
        }
    }

    /// Checks a dataset without keys, and those in it.
    fn locked(&mut self, plain: Option<&Path>, stored: &Path) -> Result<()> {
        let lock = self.lock_out_writers(stored);
        let Some(_lock) = self.locked_out(lock, plain, stored)? else { return Ok(()) };
        let dir = self.served.keeper().dir(ROOT_MEMBER)?.join(stored);
        self.report.locked.push(plain.unwrap_or(stored).display().to_string());
        let header = match lamassu_keys::header_file::read(&dir.join(name::HEADER)) {
            Ok(header) => header,
            Err(error) => {
                self.say(kind::DATASET, plain, stored, format!("its header does not parse: {error}"));
                return Ok(());
            }
        };
        let found = check_locked(lamassu_store::Backend::root(&backend(&dir)?), &header)?;
        let datasets = found.datasets.clone();
        let events = self.served.keeper().events().of_vault(&header.id());
        for problem in &found.problems {
            Below { shown: self.shown, plain: stored, stored }.problem(problem);
            tell(&events, problem);
        }
        self.merge(found, stored, stored);
        datasets.iter().try_for_each(|inner| self.locked(None, &stored.join(&inner.stored)))
    }

    /// Reports problems of the history. A repair does not change it: the next change of slots or keys sets it aside and
    /// records that in a new one.
    fn history(&mut self, member: Number, events: &Events, plain: &Path, stored: &Path) -> Result<()> {
        let (header, place) = (self.served.forest().header(member)?, self.served.keeper().place(member)?);
        let (_, history) = header.verified(|header| {
            let kept = self.served.keeper().kept();
            let keys = &kept.get(&member).ok_or(VaultError::KeyNotLoaded)?.keys;
            Ok::<_, Error>(keys.history(&place.path(), header)?)
        })?;
        let read = history.read()?;
        if let Some(fault) = read.fault {
            let problem = Problem {
                kind: IntegrityKind::History.word().into(),
                text: fault.to_string(),
                ..unplaced(OsStr::new(name::HISTORY))
            };
            tell(events, &problem);
            let problem = Below { shown: self.shown, plain, stored }.placed(&problem);
            self.shown.problem(&problem);
            self.report.add(problem);
        }
        Ok(())
    }

    /// Reports an event of a dataset, by its path in the outermost vault.
    fn say(&mut self, kind: &str, plain: Option<&Path>, stored: &Path, text: String) {
        let path = plain.map(|p| p.display().to_string());
        let problem = Problem { path, kind: kind.into(), text, ..unplaced(stored.as_os_str()) };
        self.shown.problem(&problem);
        if let Some(vault) = self.served.forest().vault(ROOT_MEMBER) {
            tell(vault.events(), &problem);
        }
        self.report.add(problem);
    }

    fn merge(&mut self, found: Report, plain: &Path, stored: &Path) {
        let below = Below { shown: self.shown, plain, stored };
        let all = &mut self.report;
        all.files += found.files;
        all.directories += found.directories;
        all.symlinks += found.symlinks;
        all.other += found.other;
        all.xattrs += found.xattrs;
        all.pages += found.pages;
        all.blocks += found.blocks;
        all.recovered += found.recovered;
        all.unsealed_empty += found.unsealed_empty;
        all.add_problems_of(&found, |p| below.placed(p));
        all.open_sessions.extend(found.open_sessions);
    }
}

/// Reports a problem as an event of the vault to which its path belongs. A failure of the store is not such an event.
fn tell(events: &Events, problem: &Problem) {
    if let Some(what) = IntegrityKind::of_word(&problem.kind) {
        events.found(what.at(&*problem.stored, &*problem.text).by(FoundBy::Check));
    }
}

fn unplaced(stored: &OsStr) -> Problem {
    Problem { stored: stored.to_string_lossy().into_owned(), ..Problem::default() }
}
