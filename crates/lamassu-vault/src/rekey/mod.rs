//! Re-keying a whole vault while it is in use: records and pages under an older K_out are sealed under the newest one,
//! and on demand data are encrypted under the newest K_in.
//!
//! Every object has its own epoch, so no progress has to be recorded: if a run is interrupted at any moment, a later
//! run does the rest. Names in directories are under the directories' own secrets and stay as they are. Contents, sizes
//! and modification times never change.
//!
//! In an anchored vault, entries that the anchor has and the store does not show are named, and count as failed.
//!
//! An entry may be moved from a directory that the walk has not reached to one that it has left. So whatever is moved
//! meanwhile is looked at again (`crate::moved`). The walk itself, which can be interrupted, is in `walk`.

mod attrs;
mod links;
mod profile;
mod records;
mod walk;

use crate::error::{io, is_not_found};
use crate::event::IntegrityKind;
use crate::inode::StoreId;
use crate::regions::bytes_of;
use crate::target::{SET_ID, Target, hold};
use crate::walk::{Ahead, Met, is_entry};
use crate::{Ino, Kind, ROOT, Result, Vault, VaultError};
use lamassu_anchor::ObjectId;
use lamassu_anchor::table::Standing;
use lamassu_format::PageNo;
use lamassu_format::header::NameMode;
use lamassu_format::profile::{Choice, ProfileError};
use lamassu_store::BackendDir;
use lamassu_store::backend::Stat;
use records::Batch;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use lamassu_store::file::Rekey;
pub use profile::KnownProfile;
pub use walk::Walk;
use walk::Within;

const UNDER_WAY: VaultError = VaultError::Refused("the vault is being re-keyed, or profiles in it are being changed");
/// How long a throttled run sleeps before it checks whether it was cancelled.
const NAP: Duration = Duration::from_millis(50);

/// Progress of a re-keying, which can end it.
pub trait RekeyProgress: Send + Sync {
    /// The total, in bytes of the store. Called again if the tree is walked again.
    fn total(&self, bytes: u64);
    /// More done.
    fn advance(&self, bytes: u64);
    /// An object could not be re-keyed: its path in the store, and why. The run continues.
    fn failed(&self, stored: &str, error: &VaultError);
    /// An object cannot have the chosen profile, and stays as it is: its path in the store, and why.
    fn passed_over(&self, stored: &str, why: &ProfileError);
    /// A dataset lies at this path in the store. Its parent slot may be sealed under an older key. It is not entered.
    fn dataset(&self, stored: &std::path::Path) -> Result<()>;
    /// Whether to end now; what is done stays done.
    fn is_cancelled(&self) -> bool;
}

/// What a re-keying did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Rekeyed {
    /// Directory records sealed again.
    pub records: u64,
    /// Symbolic links sealed again.
    pub links: u64,
    /// Extended attributes sealed again.
    pub attributes: u64,
    /// Pages of files sealed again.
    pub pages: u64,
    /// Data blocks encrypted again.
    pub blocks: u64,
    /// Bytes of files read from the store.
    pub read: u64,
    /// Bytes of files written to it.
    pub written: u64,
    /// Objects that could not be re-keyed: they are damaged, or the store failed.
    pub failed: u64,
    /// Whether everything in the tree was reached: when the run ended, only objects that failed were left under older
    /// keys. False if the run was cancelled, or the tree changed faster than it could be walked: run it again.
    pub complete: bool,
}

impl Rekeyed {
    fn changed(&self) -> u64 {
        self.records + self.links + self.attributes + self.pages + self.blocks
    }
}

/// A re-keying under way, in a vault that is open.
struct RekeyRun<'a> {
    vault: &'a Vault,
    work: Rekey,
    /// The parts of a profile to set, if this run changes profiles.
    choice: Option<Choice>,
    bytes_per_second: Option<u64>,
    progress: &'a dyn RekeyProgress,
    walk: &'a mut Walk,
    batch: Batch,
    /// It was interrupted before it was complete.
    is_cut: bool,
}

impl<'a> RekeyRun<'a> {
    fn new(vault: &'a Vault, work: Rekey, walk: &'a mut Walk, progress: &'a dyn RekeyProgress) -> RekeyRun<'a> {
        RekeyRun {
            vault,
            work,
            choice: None,
            bytes_per_second: None,
            progress,
            walk,
            batch: Batch::default(),
            is_cut: false,
        }
    }

    /// Whether to end now, incomplete.
    fn is_cancelled(&mut self) -> bool {
        self.is_cut |= self.progress.is_cancelled();
        self.is_cut
    }
}

impl Vault {
    /// Brings everything to the newest keys while the vault is in use, reading and writing at most `bytes_per_second`
    /// of files.
    ///
    /// # Errors
    /// [`VaultError::ReadOnly`]; [`VaultError::Refused`] if one is under way; those of the store if the whole run
    /// fails. Failures of single objects are counted.
    pub fn rekey(&self, work: Rekey, bytes_per_second: Option<u64>, progress: &dyn RekeyProgress) -> Result<Rekeyed> {
        let mut walk = Walk::with_total();
        let gone = self.rekey_in_turn((work, bytes_per_second), (&mut walk, progress));
        walk.end().into_iter().for_each(|ino| self.forget(ino, 1));
        gone.map(|_| walk.done())
    }

    /// The same in turns, for a vault that several hosts share: continues a walk until `progress` cancels it. True: it
    /// has ended. What is done then is durable. After an error, the walk may be continued in another turn.
    ///
    /// # Errors
    /// As [`Vault::rekey`].
    pub fn rekey_in_turn(
        &self,
        (work, bytes_per_second): (Rekey, Option<u64>),
        (walk, progress): (&mut Walk, &dyn RekeyProgress),
    ) -> Result<bool> {
        drop(self.change()?);
        let _one = self.rekeying.try_lock().ok_or(UNDER_WAY)?;
        let mut run = RekeyRun { bytes_per_second, ..RekeyRun::new(self, work, walk, progress) };
        let gone = run.rounds(ROOT);
        let is_cut = run.is_cut;
        let done = gone.and_then(|()| {
            // Everything written must be durable before the caller learns that the old keys are no longer needed.
            let _pass = self.change()?;
            self.book.reseal()?;
            self.root_permissions.reseal()?;
            self.settle_all()?;
            self.sync_store()
        });
        walk.ended_with(&done);
        done.map(|()| !is_cut)
    }
}

impl RekeyRun<'_> {
    fn leave(&self, ino: Ino) {
        if ino != ROOT {
            self.vault.forget(ino, 1);
        }
    }

    /// Handles the result for an object. An object that is gone is skipped, unless the anchor still has it. A failure
    /// is counted. A closed vault ends the run.
    fn note(&mut self, ino: Ino, result: Result<()>) -> Result<()> {
        match result {
            Ok(()) => Ok(()),
            Err(VaultError::Stale | VaultError::NotFound) => {
                self.vault.recorded(ino)?.map_or(Ok(()), |object| self.withheld(ino, object))
            }
            Err(VaultError::ReadOnly) => Err(VaultError::ReadOnly),
            // Then nothing can be said about the object.
            Err(error) if error.is_of_session() || !self.is_valid() => Err(error),
            Err(error) => {
                self.walk.done.failed += 1;
                self.progress.failed(&self.vault.tag(ino), &error);
                Ok(())
            }
        }
    }

    /// Whether what the anchor says counts now.
    fn is_valid(&self) -> bool {
        self.vault.anchored.as_ref().is_none_or(|anchored| anchored.anchor.standing() == Standing::Good)
    }

    /// Continues with a directory. If it is interrupted, `within` says what is left.
    fn directory(&mut self, within: &mut Within) -> Result<()> {
        let (vault, ino) = (self.vault, within.ino);
        if vault.dataset_at(ino)?.is_some() {
            let stored = vault.nodes.lock().stored_path(ino).ok_or(VaultError::Stale)?;
            // Not while the vault is frozen: the store would change.
            let resealed = vault.change().and_then(|_pass| self.progress.dataset(&stored));
            return self.note(ino, resealed);
        }
        let mut left = match within.left.take() {
            Some(left) => left,
            None => {
                self.itself(ino)?;
                self.names_in(ino)?
            }
        };
        loop {
            let gone = self.entries(ino, &mut left, &mut within.inside);
            within.was_cut |= self.is_cut;
            if self.is_cut || gone.is_err() {
                within.left = Some(left);
                return gone;
            }
            // Nothing notes what has come to it since it was listed.
            if self.walk.has_notes() || !std::mem::take(&mut within.was_cut) {
                return Ok(());
            }
            left = self.names_in(ino)?;
        }
    }

    /// The stored names of a directory's entries, the first one last.
    fn names_in(&mut self, ino: Ino) -> Result<Vec<OsString>> {
        let (entries, withheld) = self.vault.listed(ino)?;
        for object in withheld {
            self.withheld(ino, object)?;
        }
        let entries = entries.into_iter().rev().map(|entry| entry.name);
        Ok(entries.filter(|name| is_entry(self.vault.name_mode, name)).collect())
    }

    /// Entries of a directory, from the last of these names on. Those that were done are removed.
    fn entries(&mut self, ino: Ino, left: &mut Vec<OsString>, inside: &mut Vec<Ino>) -> Result<()> {
        while let Some(name) = left.last() {
            if self.is_cancelled() {
                return Ok(());
            }
            self.entry(ino, name, inside)?;
            if self.is_cut {
                return Ok(());
            }
            left.pop();
            if self.batch.is_full() {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// An entry of a directory. Directories are added to `inside`.
    fn entry(&mut self, ino: Ino, name: &OsStr, inside: &mut Vec<Ino>) -> Result<()> {
        let (child, st) = match self.enter(ino, name) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(()),
            Err(error) => return self.note(ino, Err(error)),
        };
        if st.kind == Kind::Dir {
            let object = self.object(child);
            match object.is_some_and(|object| !self.walk.finished.insert(object)) {
                true => self.leave(child),
                false => inside.push(child),
            }
            return Ok(());
        }
        let done = self.leaf_once(child, ino, name, &st);
        let done = self.note(child, done);
        self.vault.forget(child, 1);
        done
    }

    /// The record and the attributes of a directory.
    fn itself(&mut self, ino: Ino) -> Result<()> {
        if self.vault.name_mode == NameMode::Encrypted {
            let staged = self.stage_record(ino);
            self.note(ino, staged)?;
        }
        if self.choice.is_none() {
            let resealed = self.attributes(ino);
            self.note(ino, resealed)?;
        }
        Ok(())
    }

    /// An object that the store does not show stays under its old keys, and the store may show it again when they are
    /// gone: so it counts as failed. Its name is unknown, since there is only a token.
    fn withheld(&mut self, at: Ino, object: ObjectId) -> Result<()> {
        // Otherwise another host may have removed it since.
        self.vault.verify_current()?;
        if !self.walk.missing.insert(object) {
            return Ok(());
        }
        let at = self.vault.tag(at);
        self.vault.outdated_as(IntegrityKind::Missing, "entry", at.clone());
        self.walk.done.failed += 1;
        let error = VaultError::Outdated { what: "entry", stored: format!("object {object} of the anchor") };
        self.progress.failed(&at, &error);
        Ok(())
    }

    /// Counts a reference to an entry; `None` if it is gone.
    fn enter(&self, parent: Ino, name: &OsStr) -> Result<Option<(Ino, Stat)>> {
        let vault = self.vault;
        let _tree = vault.tree.read();
        let _names = vault.names_of(parent).read();
        let dir = vault.dir(parent)?;
        let st = match dir.handle.stat_entry(name) {
            Err(e) if is_not_found(&e) => return vault.judged(&dir, name, None).map(|_| None),
            other => other.map_err(io("stat"))?,
        };
        match vault.referenced(&dir, name, &st) {
            Err(VaultError::NotFound) => Ok(None),
            other => other.map(|(found, st)| Some((found.ino, st))),
        }
    }

    /// Anything but a directory, unless this walk has done it already.
    fn leaf_once(&mut self, ino: Ino, parent: Ino, name: &OsStr, st: &Stat) -> Result<()> {
        // All names of a link are needed.
        let is_named_once = st.kind != Kind::Symlink || !self.has_other_names(ino, st)?;
        let object = self.object(ino).filter(|_| is_named_once);
        if object.is_some_and(|object| self.walk.finished.contains(&object)) {
            return Ok(());
        }
        let done = self.leaf(ino, parent, name, st);
        // What was refused under one name may be done under another.
        if !self.is_cut && done.is_ok() {
            self.walk.finished.extend(object);
        }
        done
    }

    /// Anything but a directory.
    fn leaf(&mut self, ino: Ino, parent: Ino, name: &OsStr, st: &Stat) -> Result<()> {
        if st.kind == Kind::Symlink {
            if self.choice.is_some() {
                return Ok(());
            }
            let is_new = match self.has_other_names(ino, st)? {
                false => self.stage_link(ino).map(|()| true)?,
                true => self.walk.groups.add(self.vault, StoreId::from(st), parent, name),
            };
            if is_new {
                self.progress.advance(0);
            }
            return Ok(());
        }
        let id = (st.nlink > 1).then(|| StoreId::from(st));
        if id.as_ref().is_some_and(|id| self.walk.seen.contains(id)) {
            self.progress.advance(if st.kind == Kind::File { bytes_of(st) } else { 0 });
            return Ok(());
        }
        {
            let _tree = self.vault.tree.read();
            let (target, _) = self.vault.target(ino)?;
            self.vault.must_be_its_own_to_rekey(ino, &target)?;
        }
        if self.choice.is_none() {
            let resealed = self.attributes(ino);
            self.note(ino, resealed)?;
        }
        let done = if st.kind == Kind::File { self.file(ino, st) } else { Ok(()) };
        if !self.is_cut {
            self.walk.seen.extend(id);
        }
        self.progress.advance(0);
        done
    }

    fn file(&mut self, ino: Ino, st: &Stat) -> Result<()> {
        let share = bytes_of(st);
        if st.len == 0 && self.choice.is_none() && !self.vault.files.get(ino).is_some_and(|open| open.file().is_dirty())
        {
            return Ok(());
        }
        let open = match self.vault.acquire(ino, true) {
            // Not what may be another's (EPERM).
            Err(error) if error.is_errno(libc::EACCES) => self.vault.acquire_read_only(ino)?,
            other => other?,
        };
        // Of what is written, and not of what was under the name before.
        let before = open.file().backing().stat();
        let done = match self.vault.must_be_its_own_to_rekey(ino, &Target::Open(open.clone())) {
            Ok(()) => self.steps(&open, share),
            refused => refused,
        };
        // Without privileges, a write clears set-id bits. Root's writes do not: who has cleared them meant to.
        if let (Ok(before), Ok(now)) = (before, open.file().backing().stat())
            && !rustix::process::geteuid().is_root()
            && before.mode & SET_ID != 0
            && (now.mode, now.uid, now.gid) == (before.mode & !SET_ID, before.uid, before.gid)
        {
            let _ = open.file().backing().set_mode(before.mode);
        }
        open.touched(self.vault.now());
        self.vault.unhold(&open);
        done
    }

    fn steps(&mut self, open: &crate::handles::OpenFile, share: u64) -> Result<()> {
        let (mut told, mut damaged, object) = (0, 0, self.object(open.ino));
        let mut half = self.walk.half.take().filter(|(half, _)| Some(*half) == object).map(|(_, page)| page);
        let mut from = Some(half.unwrap_or(PageNo::ZERO));
        if self.choice.is_some() {
            let _pass = self.vault.change()?;
            let was = open.file().profile();
            let profile = self.chosen(open.ino, was.0)?;
            if (profile, false) == was || !open.file().begin_profile(profile)? {
                self.progress.advance(share);
                self.walk.done.pages += u64::from(was != (profile, false));
                return Ok(());
            }
        }
        while let Some(page) = from {
            if self.is_cancelled() {
                // If something was damaged, the whole file is walked again.
                self.walk.half = object.filter(|_| damaged == 0).map(|object| (object, page));
                return Ok(());
            }
            let step = {
                let _pass = self.vault.change()?;
                open.file().rekey(self.work, page)?
            };
            self.walk.done.pages += step.resealed;
            self.walk.done.blocks += step.reencrypted;
            damaged += step.damaged;
            from = step.next;
            let reached = from.map_or(share, |next| share / step.pages.max(1) * next.0.min(step.pages));
            self.progress.advance(reached.saturating_sub(told));
            told = told.max(reached);
            self.walk.done.read += step.read;
            self.walk.done.written += step.written;
            self.pace();
            if from.is_none() && damaged == 0 && half.take().is_some() {
                let _pass = self.vault.change()?;
                // Pages before it may have been written since.
                from = (!open.file().end_profile()?).then_some(PageNo::ZERO);
            }
        }
        if damaged == 0 && self.work != Rekey::Outer {
            // Also for an interrupted change of the profile, which re-keying has continued.
            let _pass = self.vault.change()?;
            damaged += u64::from(!open.file().end_profile()?);
        }
        match damaged {
            0 => Ok(()),
            _ => Err(VaultError::Damaged { what: "file", stored: self.vault.tag(open.ino) }),
        }
    }

    /// Waits if more was read and written than the limit allows by now.
    fn pace(&self) {
        let Some(limit) = self.bytes_per_second else { return };
        while !self.progress.is_cancelled() {
            let Some(left) = self.walk.ahead_by(limit) else { break };
            std::thread::sleep(left.min(NAP));
        }
    }

    /// Bytes of all files below a directory.
    fn bytes_ahead(&self, dir: Arc<dyn BackendDir>) -> Result<u64> {
        let mut ahead = Ahead {
            mode: self.vault.name_mode,
            skips_datasets: self.vault.has_datasets(),
            measure: |st| if st.kind == Kind::File { bytes_of(st) } else { 0 },
            is_stopped: &|| self.progress.is_cancelled(),
            entries: 0,
            bytes: 0,
        };
        crate::walk::walk(Met::first(dir, PathBuf::new(), ()), &mut ahead)?;
        Ok(ahead.bytes)
    }
}

impl Vault {
    /// Opens for writing a file that its owner, which is this process, may only read. The permission is granted for the
    /// time of the call.
    fn acquire_read_only(&self, ino: Ino) -> Result<Arc<crate::handles::OpenFile>> {
        const LENT: u32 = 0o200;
        let (held, mode) = {
            let _tree = self.tree.read();
            let (dir, name, st) = self.place(ino)?;
            (hold(&dir, &name, &st).map_err(io("open an entry"))?, st.mode)
        };
        held.set_mode(mode | LENT).map_err(io("set the mode"))?;
        let opened = self.acquire(ino, true);
        if held.stat().is_ok_and(|st| st.mode == mode | LENT) {
            held.set_mode(mode).map_err(io("set the mode"))?;
        }
        opened
    }
}
