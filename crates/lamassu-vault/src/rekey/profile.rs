//! Profiles of files and directories: what they are, and how they are changed, by the same walk as re-keying.
//!
//! A file keeps its profile wherever it is moved to. A directory has one for what is made in it, in its record: sealed,
//! and in an anchored vault the anchor has its digest. So a store can choose neither.

use super::RekeyRun;
use crate::regions::bytes_of;
use crate::{Ino, Kind, ROOT, Rekey, RekeyProgress, Rekeyed, Result, Vault, VaultError};
use lamassu_format::Profile;
use lamassu_format::header::NameMode;
use lamassu_format::profile::Choice;

/// Walks over a tree in which things are made and changed all the while.
const WALKS_MAX: usize = 5;

/// What is known of the profile of a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownProfile {
    /// That of the blocks of a file, or of what is made in a directory.
    pub profile: Profile,
    /// A change was begun, and not ended: blocks of a file may still be as before.
    pub is_changing: bool,
}

impl Vault {
    /// The profile of a file, or of what is made in a directory.
    ///
    /// # Errors
    /// [`VaultError::Invalid`] for what has none; those of opening it.
    pub fn profile(&self, ino: Ino) -> Result<KnownProfile> {
        match self.kind_of(ino)? {
            Kind::Dir => {
                let _tree = self.tree.read();
                let dir = self.dir(ino)?;
                Ok(KnownProfile { profile: self.profile_in(&dir)?, is_changing: false })
            }
            Kind::File => {
                let open = self.acquire(ino, false)?;
                let (profile, is_changing) = open.file().profile();
                self.unhold(&open);
                Ok(KnownProfile { profile, is_changing })
            }
            _ => Err(VaultError::Invalid),
        }
    }

    /// Gives a file another profile, or a directory one for what will be made in it; `below`: also everything that is
    /// in that directory already, of which each keeps what is not chosen. While others use the vault, and resumably:
    /// broken off, what is done stays done, and every file is whole.
    ///
    /// # Errors
    /// [`VaultError::Refused`] where the vault cannot keep it; [`lamassu_store::StoreError::NotApproved`]; as
    /// [`Vault::rekey`].
    pub fn set_profile(&self, ino: Ino, choice: Choice, below: bool, progress: &dyn RekeyProgress) -> Result<Rekeyed> {
        drop(self.change()?);
        let kind = self.kind_of(ino)?;
        let Ok(profile) = choice.over(self.profile(ino)?.profile, self.ctx.ring.suite()) else {
            return Err(VaultError::Refused("this vault has no files of that profile"));
        };
        self.ctx.check_allowed(profile)?;
        if kind == Kind::Dir && self.name_mode == NameMode::Plain {
            return Err(VaultError::Refused(
                "directories of a vault with plain names have no record that could hold a profile: set those of files",
            ));
        }
        let _one = self.rekeying.try_lock().ok_or(super::UNDER_WAY)?;
        let mut run = RekeyRun { choice: Some(choice), ..RekeyRun::new(self, Rekey::Profile, progress) };
        match kind {
            Kind::File => run.one_file(ino)?,
            Kind::Dir => run.directories(ino, below)?,
            _ => return Err(VaultError::Invalid),
        }
        let _pass = self.change()?;
        self.settle_all()?;
        self.sync_store()?;
        Ok(run.done)
    }

    fn kind_of(&self, ino: Ino) -> Result<Kind> {
        if ino == ROOT { Ok(Kind::Dir) } else { self.nodes.lock().kind(ino).ok_or(VaultError::Stale) }
    }
}

impl RekeyRun<'_> {
    /// The profile that an object gets which has another one: that one where nothing is chosen, or where it cannot have
    /// what is.
    pub(super) fn chosen(&self, ino: Ino, before: Profile) -> Result<Profile> {
        let Some(choice) = self.choice else { return Ok(before) };
        match choice.over(before, self.vault.ctx.ring.suite()) {
            Ok(profile) => {
                self.vault.ctx.check_allowed(profile)?;
                Ok(profile)
            }
            Err(why) => {
                self.progress.passed_over(&self.vault.tag(ino), &why);
                Ok(before)
            }
        }
    }

    fn one_file(&mut self, ino: Ino) -> Result<()> {
        let st = {
            let _tree = self.vault.tree.read();
            self.vault.place(ino)?.2
        };
        self.progress.total(bytes_of(&st));
        let done = self.file(ino, &st);
        self.note(ino, done)?;
        self.done.complete = self.done.failed == 0 && !self.progress.is_cancelled();
        Ok(())
    }

    /// A directory, and all that lies below it: walked through until a walk finds nothing to do, since things may be
    /// made in a directory before its record is put into place.
    fn directories(&mut self, ino: Ino, below: bool) -> Result<()> {
        if !below {
            let staged = self.stage_record(ino);
            self.note(ino, staged)?;
            let flushed = self.flush();
            self.batch.clear(self.vault);
            self.done.complete = flushed.is_ok() && self.done.failed == 0;
            return flushed;
        }
        for _ in 0..WALKS_MAX {
            let changed = self.done.changed();
            self.done.failed = 0;
            self.seen.clear();
            let dir = self.vault.dir(ino)?.handle.clone();
            self.progress.total(self.bytes_ahead(dir)?);
            if ino != ROOT {
                self.vault.nodes.lock().add_reference(ino);
            }
            let mut todo = vec![ino];
            let walked = self.walk(&mut todo);
            todo.into_iter().for_each(|ino| self.leave(ino));
            let finished = walked.and_then(|()| self.flush());
            self.batch.clear(self.vault);
            finished?;
            if self.progress.is_cancelled() {
                break;
            }
            if self.done.changed() == changed {
                self.done.complete = true;
                break;
            }
        }
        Ok(())
    }
}
