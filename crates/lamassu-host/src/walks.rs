//! Walks over a vault that several hosts use by turns: re-keying, and changes of profiles. A walk is made in exclusive
//! turns, one after the other. Each lasts until another host wants the vault, and makes some progress. Since taking a
//! turn costs as much as some steps, that is more than one step, unless steps take long.

use crate::job::{Asked, Job, warn_unless};
use crate::{Error, Place, Result, turns};
use lamassu_anchor::table::Standing;
use lamassu_format::profile::ProfileError;
use lamassu_keys::History;
use lamassu_vault::forest::{Number, global, root_of};
use lamassu_vault::turns::{Need, Turns};
use lamassu_vault::{FileSystem, Forest, RekeyProgress, Rekeyed, Vault, VaultError, Walk};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The steps or bytes after which a turn ends that another host wants, and the time. It always makes one step.
const STEPS: u64 = 64;
const BYTES: u64 = 8 << 20;
const SHARE: Duration = Duration::from_millis(100);
/// How long to sleep before looking whether the job was cancelled.
const NAP: Duration = Duration::from_millis(50);
/// How long to try again without any progress, before the walk ends with an error.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time between two attempts.
const TRY_AGAIN: Duration = Duration::from_millis(300);

/// Makes a walk in turns. `go` continues it in a turn, and returns whether it has ended. A turn that is lost, because
/// the server was away for too long, is followed by another one, which does again what was lost.
pub(crate) fn in_turns(
    (forest, member): (&Forest, Number),
    bytes_per_second: Option<u64>,
    job: &Job,
    mut go: impl FnMut(&Vault, (&mut Walk, &dyn RekeyProgress)) -> Result<bool>,
) -> Result<Rekeyed> {
    let mut walk = Walk::default();
    let mut went_on = Instant::now();
    let gone = loop {
        let Some(turn) = turns::hold(forest, root_of(member), Need::CHANGE) else {
            break Err(turns::why_away(forest, member, Error::NoFurtherTurn));
        };
        let progress = InTurn { job, turns: forest.join_turns(root_of(member)), done: Done::default() };
        let vault = forest.vault(member);
        let gone = match &vault {
            Some(vault) => go(vault, (&mut walk, &progress)),
            None => Err(Error::NoFurtherTurn),
        };
        let is_lost = vault.is_none_or(|vault| is_lost(&vault)) || gone.as_ref().is_err_and(is_of_session);
        drop(turn);
        if progress.done.is_any() || !is_lost {
            went_on = Instant::now();
        }
        let is_over =
            went_on.elapsed() > PATIENCE || forest.join_turns(root_of(member)).is_none_or(|turns| turns.is_last());
        match gone {
            Ok(is_done) if is_done || job.is_cancelled() => break Ok(()),
            Err(_) if is_lost && job.is_cancelled() => break Ok(()),
            Err(error) if !is_lost => break Err(error),
            Err(_) if is_over => break Err(Error::NoFurtherTurn),
            Err(_) => std::thread::sleep(TRY_AGAIN),
            Ok(_) => {}
        }
        // Not in a turn: other hosts go on meanwhile.
        while let Some(left) = bytes_per_second.and_then(|limit| walk.ahead_by(limit))
            && !job.is_cancelled()
        {
            std::thread::sleep(left.min(NAP));
        }
    };
    walk.end().into_iter().for_each(|ino| forest.forget(global(member, ino), 1));
    gone.map(|()| walk.done())
}

/// Re-keys a vault in turns of this host. `history` opens the history in the present turn, by its place, which must
/// stay open: another host may have replaced the header since the last turn.
pub(crate) fn rekey_in_turns(
    job: &Job,
    (forest, member): (&Forest, Number),
    history: impl Fn() -> Result<(History, Place)>,
    asked: Asked,
) -> Result<Rekeyed> {
    let mut is_noted = false;
    in_turns((forest, member), asked.bytes_per_second, job, |vault, (walk, progress)| {
        let note = |done: Option<&Rekeyed>| {
            let noted = history().and_then(|(mut history, _place)| match is_lost(vault) {
                // Another host may write it by now.
                true => Err(Error::NoFurtherTurn),
                false => asked.note(&mut history, done),
            });
            warn_unless(noted);
        };
        if !std::mem::replace(&mut is_noted, true) {
            note(None);
        }
        let is_done = vault.rekey_in_turn((asked.work(), asked.bytes_per_second), (walk, progress))?;
        if is_done || job.is_cancelled() {
            note(Some(&walk.done()));
        }
        Ok(is_done)
    })
}

/// Whether what was done in a turn may be lost.
pub(crate) fn is_lost(vault: &Vault) -> bool {
    vault.options().anchor.as_ref().is_some_and(|anchor| anchor.standing() != Standing::Good)
}

/// The session may be good again by now.
fn is_of_session(error: &Error) -> bool {
    matches!(error.innermost(), Error::Vault(error) if error.is_of_session())
}

/// What was done in a turn.
struct Done {
    begun: Instant,
    steps: AtomicU64,
    bytes: AtomicU64,
}

impl Default for Done {
    fn default() -> Done {
        Done { begun: Instant::now(), steps: AtomicU64::new(0), bytes: AtomicU64::new(0) }
    }
}

impl Done {
    fn add(&self, bytes: u64) {
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn is_any(&self) -> bool {
        self.steps.load(Ordering::Relaxed) > 0
    }

    /// Whether a turn that another host wants may end.
    fn is_enough(&self) -> bool {
        let is_much = || self.steps.load(Ordering::Relaxed) >= STEPS || self.bytes.load(Ordering::Relaxed) >= BYTES;
        self.is_any() && (is_much() || self.begun.elapsed() >= SHARE)
    }
}

/// The progress of a job in a turn: it also stops when the turn is to end, once enough was done.
struct InTurn<'a> {
    job: &'a Job,
    turns: Option<Arc<Turns>>,
    done: Done,
}

impl RekeyProgress for InTurn<'_> {
    fn total(&self, bytes: u64) {
        self.job.total(bytes);
    }

    fn advance(&self, bytes: u64) {
        self.done.add(bytes);
        self.job.advance(bytes);
    }

    fn failed(&self, stored: &str, error: &VaultError) {
        self.job.failed(stored, error);
    }

    fn passed_over(&self, stored: &str, why: &ProfileError) {
        self.job.passed_over(stored, why);
    }

    fn dataset(&self, stored: &Path) -> lamassu_vault::Result<()> {
        self.job.dataset(stored)
    }

    fn is_cancelled(&self) -> bool {
        let is_to_end = || self.turns.as_ref().is_some_and(|turns| turns.is_to_end());
        self.job.is_cancelled() || (self.done.is_enough() && is_to_end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(steps: u64, bytes: u64) -> Done {
        Done { steps: AtomicU64::new(steps), bytes: AtomicU64::new(bytes), ..Done::default() }
    }

    #[test]
    fn a_turn_that_is_wanted_at_once_does_more_than_one_step() {
        // Their time is not over.
        let now = |done: Done| Done { begun: Instant::now() + SHARE, ..done };
        for (steps, bytes, is_enough) in
            [(0, 0, false), (1, 0, false), (STEPS - 1, BYTES - 1, false), (STEPS, 0, true), (1, BYTES, true)]
        {
            assert_eq!(now(done(steps, bytes)).is_enough(), is_enough, "{steps} {bytes}");
        }
        let late = |done: Done| Done { begun: Instant::now().checked_sub(2 * SHARE).unwrap(), ..done };
        assert!(late(done(1, 0)).is_enough() && !late(done(0, 0)).is_enough());
    }
}
