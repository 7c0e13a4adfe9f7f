//! Shows and changes the profiles of files and directories, by the same walk as re-keying.
//!
//! A file keeps its profile wherever it is moved. A directory's record has one for its new entries. The record is
//! sealed, and in an anchored vault the anchor has its digest. So a store can choose neither.

use super::{RekeyRun, Walk};
use crate::regions::bytes_of;
use crate::{Ino, Kind, ROOT, Rekey, RekeyProgress, Rekeyed, Result, Vault, VaultError};
use lamassu_anchor::ObjectId;
use lamassu_format::Profile;
use lamassu_format::header::NameMode;
use lamassu_format::profile::Choice;

/// What is known of the profile of a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownProfile {
    /// The profile of a file's blocks, or of a directory's new entries.
    pub profile: Profile,
    /// A change was begun, but not completed: some blocks of the file may be in the old form.
    pub is_changing: bool,
}

impl Vault {
    /// The profile of a file, or of a directory's new entries.
    ///
    /// # Errors
    /// [`VaultError::Invalid`] for entries of other kinds; those of opening it.
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

    /// Changes the profile of a file, or of a directory's new entries; `below`: also of everything in that directory.
    /// Each keeps the parts that are not chosen. The vault may be in use meanwhile. If the change is interrupted, what
    /// is done stays done, every file is whole, and a later call continues.
    ///
    /// # Errors
    /// [`VaultError::Refused`] if the vault cannot keep it; [`lamassu_store::StoreError::NotApproved`]; the error for
    /// profiles that the policy of the anchor's server forbids; as [`Vault::rekey`].
    pub fn set_profile(&self, ino: Ino, choice: Choice, below: bool, progress: &dyn RekeyProgress) -> Result<Rekeyed> {
        let mut walk = Walk::with_total();
        let gone = self.set_profile_in_turn(ino, choice, below, (&mut walk, progress));
        walk.end().into_iter().for_each(|ino| self.forget(ino, 1));
        gone.map(|_| walk.done())
    }

    /// The same in turns, for a vault that several hosts share: continues a walk until `progress` cancels it. True: it
    /// is done.
    ///
    /// # Errors
    /// As [`Vault::set_profile`].
    pub fn set_profile_in_turn(
        &self,
        ino: Ino,
        choice: Choice,
        below: bool,
        (walk, progress): (&mut Walk, &dyn RekeyProgress),
    ) -> Result<bool> {
        drop(self.change()?);
        let kind = self.kind_of(ino)?;
        self.may_have(ino, choice)?;
        if kind == Kind::Dir && self.name_mode == NameMode::Plain {
            return Err(VaultError::Refused(
                "directories of a vault with plain names have no record that could hold a profile: set those of files",
            ));
        }
        let _one = self.rekeying.try_lock().ok_or(super::UNDER_WAY)?;
        let mut run = RekeyRun { choice: Some(choice), ..RekeyRun::new(self, Rekey::Profile, walk, progress) };
        let gone = match (kind, below) {
            (Kind::File, _) => run.one_file(ino),
            (Kind::Dir, false) => run.one_directory(ino),
            (Kind::Dir, true) => run.rounds(ino),
            _ => Err(VaultError::Invalid),
        };
        let is_cut = run.is_cut;
        let done = gone.and_then(|()| {
            let _pass = self.change()?;
            self.settle_all()?;
            self.sync_store()
        });
        walk.ended_with(&done);
        done.map(|()| !is_cut)
    }

    /// Whether a file, or a directory's new entries, may have the chosen profile.
    ///
    /// # Errors
    /// As [`Vault::set_profile`].
    pub fn may_have(&self, ino: Ino, choice: Choice) -> Result<()> {
        let Ok(profile) = choice.over(self.profile(ino)?.profile, self.ctx.ring.suite()) else {
            return Err(VaultError::Refused("this vault has no files of that profile"));
        };
        Ok(self.ctx.check_allowed(profile)?)
    }

    fn kind_of(&self, ino: Ino) -> Result<Kind> {
        if ino == ROOT { Ok(Kind::Dir) } else { self.nodes.lock().kind(ino).ok_or(VaultError::Stale) }
    }
}

impl RekeyRun<'_> {
    /// The profile that an object gets which has `before`: the same one if nothing is chosen, or if it cannot have the
    /// choice.
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

    /// The key under which a file's progress is kept from turn to turn: its object.
    pub(super) fn object(&self, ino: Ino) -> Option<ObjectId> {
        self.vault.anchored.as_ref().map(|_| self.vault.nodes.lock().object(ino))
    }

    fn one_file(&mut self, ino: Ino) -> Result<()> {
        let st = {
            let _tree = self.vault.tree.read();
            self.vault.place(ino)?.2
        };
        self.progress.total(bytes_of(&st));
        self.walk.done.failed = 0;
        let done = self.file(ino, &st);
        self.note(ino, done)?;
        self.walk.done.complete = self.walk.done.failed == 0 && !self.is_cut;
        Ok(())
    }

    /// The profile of a directory's new entries.
    fn one_directory(&mut self, ino: Ino) -> Result<()> {
        let staged = self.stage_record(ino);
        self.note(ino, staged)?;
        let flushed = self.flush();
        self.batch.clear(self.vault);
        self.walk.done.complete = flushed.is_ok() && self.walk.done.failed == 0;
        flushed
    }
}
