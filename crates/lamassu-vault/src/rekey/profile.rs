//! Shows and changes the profiles of files and directories, by the same walk as re-keying.
//!
//! A file keeps its profile wherever it is moved. A directory's record has one for its new entries. The record is
//! sealed, and in an anchored vault the anchor has its digest. So a store can choose neither.

use super::RekeyRun;
use crate::inode::StoreId;
use crate::regions::bytes_of;
use crate::{Ino, Kind, ROOT, Rekey, RekeyProgress, Rekeyed, Result, Vault, VaultError};
use lamassu_anchor::ObjectId;
use lamassu_format::header::NameMode;
use lamassu_format::profile::Choice;
use lamassu_format::{PageNo, Profile};
use lamassu_store::backend::Stat;
use std::collections::HashSet;

/// Most walks over a tree in which entries keep being made and changed.
const WALKS_MAX: usize = 5;

/// What is known of the profile of a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownProfile {
    /// The profile of a file's blocks, or of a directory's new entries.
    pub profile: Profile,
    /// A change was begun, but not completed: some blocks of the file may be in the old form.
    pub is_changing: bool,
}

/// The progress of a change of profiles, kept from turn to turn.
#[derive(Default)]
pub struct ProfileWalk {
    /// Directories still to walk, each with a reference except the root.
    todo: Vec<Ino>,
    walks: usize,
    /// The count of changes when this walk began.
    changed: u64,
    /// Whether the total is computed first, which takes a walk over everything.
    tells_total: bool,
    seen: HashSet<StoreId>,
    files: HashSet<ObjectId>,
    half: Option<(ObjectId, PageNo)>,
    done: Rekeyed,
}

impl ProfileWalk {
    /// The work done so far.
    pub fn done(&self) -> Rekeyed {
        self.done
    }

    /// The directories to which it has references, when it ends: the caller gives them back.
    pub fn left(&mut self) -> Vec<Ino> {
        std::mem::take(&mut self.todo).into_iter().filter(|ino| *ino != ROOT).collect()
    }
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
        let mut walk = ProfileWalk { tells_total: true, ..ProfileWalk::default() };
        let gone = self.set_profile_in_turn(ino, choice, below, (&mut walk, progress));
        walk.left().into_iter().for_each(|ino| self.forget(ino, 1));
        gone.map(|_| walk.done)
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
        (walk, progress): (&mut ProfileWalk, &dyn RekeyProgress),
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
        let mut run = RekeyRun { choice: Some(choice), ..RekeyRun::new(self, Rekey::Profile, progress) };
        (run.done, run.half) = (walk.done, walk.half.take());
        (run.seen, run.files) = (std::mem::take(&mut walk.seen), std::mem::take(&mut walk.files));
        let gone = match kind {
            Kind::File => run.one_file(ino),
            Kind::Dir => run.directories(ino, below, walk),
            _ => Err(VaultError::Invalid),
        };
        let RekeyRun { done, half, seen, files, is_cut, .. } = run;
        (walk.done, walk.half, walk.seen, walk.files) = (done, half, seen, files);
        gone?;
        let _pass = self.change()?;
        self.settle_all()?;
        self.sync_store()?;
        Ok(!is_cut)
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

    /// Changes a file, unless this walk has done it already.
    pub(super) fn file_once(&mut self, ino: Ino, st: &Stat) -> Result<()> {
        let (object, id) = (self.object(ino), (st.nlink > 1).then(|| StoreId::from(st)));
        let is_done = object.is_some_and(|object| self.files.contains(&object));
        if is_done || id.as_ref().is_some_and(|id| self.seen.contains(id)) {
            return Ok(());
        }
        let done = self.file(ino, st);
        if !self.is_cut {
            self.files.extend(object);
            self.seen.extend(id);
        }
        done
    }

    fn one_file(&mut self, ino: Ino) -> Result<()> {
        let st = {
            let _tree = self.vault.tree.read();
            self.vault.place(ino)?.2
        };
        self.progress.total(bytes_of(&st));
        self.done.failed = 0;
        let done = self.file(ino, &st);
        self.note(ino, done)?;
        self.done.complete = self.done.failed == 0 && !self.is_cut;
        Ok(())
    }

    /// Changes a directory and everything below it. Walks until a walk finds nothing to do, since entries may be made
    /// in a directory before its record is put into place.
    fn directories(&mut self, ino: Ino, below: bool, walk: &mut ProfileWalk) -> Result<()> {
        if !below {
            let staged = self.stage_record(ino);
            self.note(ino, staged)?;
            let flushed = self.flush();
            self.batch.clear(self.vault);
            self.done.complete = flushed.is_ok() && self.done.failed == 0;
            return flushed;
        }
        loop {
            if walk.todo.is_empty() {
                if walk.walks == WALKS_MAX {
                    return Ok(());
                }
                (walk.walks, walk.changed) = (walk.walks + 1, self.done.changed());
                self.done.failed = 0;
                self.seen.clear();
                self.files.clear();
                if walk.tells_total {
                    let dir = self.vault.dir(ino)?.handle.clone();
                    self.progress.total(self.bytes_ahead(dir)?);
                }
                if ino != ROOT {
                    self.vault.nodes.lock().add_reference(ino);
                }
                walk.todo.push(ino);
            }
            let gone = self.go_on(walk).and_then(|()| self.flush());
            self.batch.clear(self.vault);
            gone?;
            if self.is_cut {
                return Ok(());
            }
            if self.done.changed() == walk.changed {
                self.done.complete = true;
                return Ok(());
            }
        }
    }

    /// Walks directories until none is left or it is interrupted. Then the current directory stays in the list, with
    /// what was done of it.
    fn go_on(&mut self, walk: &mut ProfileWalk) -> Result<()> {
        while let Some(&ino) = walk.todo.last() {
            if self.is_cancelled() {
                return Ok(());
            }
            let mut inside = Vec::new();
            let visited = self.directory(ino, &mut inside);
            let kept = self.note(ino, visited);
            if self.is_cut {
                inside.into_iter().for_each(|ino| self.leave(ino));
                return kept;
            }
            walk.todo.pop();
            walk.todo.extend(inside);
            self.files.clear();
            self.leave(ino);
            kept?;
            self.progress.advance(0);
        }
        Ok(())
    }
}
