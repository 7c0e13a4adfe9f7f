//! Copies of headers, without which a vault cannot be read: made, and restored.
//!
//! A restore verifies the copy first: it opens with the key, its MAC verifies, its keys open the vault's root
//! directory, and no epoch is lost that the present header is known to have.

use crate::anchors::Access;
use crate::error::At;
use crate::keeper::remember;
use crate::open::{backend, options};
use crate::pins::Succession;
use crate::rotation::settle_history;
use crate::{Error, Policy, Result, hex};
use lamassu_crypto::wrap::{equal, sha256};
use lamassu_format::header::{Header, HeaderError, VaultHeader, ZoneFile};
use lamassu_format::name;
use lamassu_keys::history::EventKind;
use lamassu_keys::{Epoch, Event, FileError, KeyError, Material, Unlocked, Update, header_file};
use lamassu_vault::{ROOT, Vault, VaultError};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How long a copy that goes on record waits for other changes of the header. Most take less; one that waits for its
/// user, or proves for hours that a key is in use no more, takes longer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Records in the history that a copy of a vault's header, `bytes`, was made: for a later destruction of keys, the user
/// wants to know which copies exist. The header's lock is held: a renewal of the file key that has read the history
/// already would miss the entry, and after one these keys have no history. Where a server keeps the anchor, this host
/// takes the vault for that: another one may be writing the history, and its lock does not reach every store.
///
/// # Errors
/// [`Error::History`]; those of the anchor, if another host has the vault; those of keys and of the header's file, if
/// the header is changed meanwhile. The copy itself is valid.
pub fn record_copy<H: Header>(
    policy: &Policy,
    dir: &Path,
    (header, keys): (&H, &Unlocked),
    copy: &Path,
    bytes: &[u8],
) -> Result<()> {
    let is_local = |id| -> Result<bool> {
        let file = policy.anchors.file_of(id)?;
        Ok(policy.anchors.server_of(id)?.is_none() && file.is_some_and(|file| file.exists()))
    };
    let anchor = match VaultHeader::parse(bytes) {
        Ok(header) if header.is_anchored() && !is_local(&header.id())? => {
            policy.anchor_of(&header, Access::Write, dir)?
        }
        _ => None,
    };
    let file = std::path::absolute(copy).unwrap_or_else(|_| copy.to_path_buf());
    let event = Event::new(EventKind::BackedUp).slot(keys.slot()).detail("file", file.display());
    let event = event.detail("sha256", hex(&sha256(bytes))).detail("slots", listed(&slots_of(header)));
    let update = Update::begin_within(PATIENCE, &dir.join(name::HEADER), &policy.witness())?;
    let mut history = keys.history(dir, &update.read::<H>()?)?;
    history.note(event)?;
    remember(anchor.as_deref(), &history)
}

/// A copy of a header, read and not verified. Its kind decides what a restore replaces.
pub enum Copy {
    /// Of a vault, in whose directory it belongs.
    Vault(Box<VaultHeader>),
    /// Of a zone, which is a file of its own.
    Zone(Box<ZoneFile>),
}

impl Copy {
    /// Reads a copy.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn read(file: &Path) -> Result<Copy> {
        match header_file::read::<VaultHeader>(file) {
            Ok(header) => Ok(Copy::Vault(Box::new(header))),
            Err(FileError::Header { source: HeaderError::WrongFormat { .. }, path: _ }) => {
                Ok(Copy::Zone(Box::new(header_file::read(file)?)))
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// A restore: what, and where to.
#[derive(Clone, Copy)]
pub struct Restore<'a> {
    /// the policy under which vaults are opened
    pub policy: &'a Policy,
    /// the copy
    pub file: &'a Path,
    /// the vault's directory, or the zone file
    pub dir: &'a Path,
    /// the one slot of the copy to try; `None`: all
    pub slot: Option<u32>,
    /// also replace a header of another vault, or one with newer keys
    pub force: bool,
    /// called with what the user must know, as soon as it is known
    pub tell: &'a dyn Fn(&Notice),
}

/// What the user must know about a restore that proceeds.
#[derive(Debug, thiserror::Error)]
pub enum Notice {
    /// The copy's administrator has a successor.
    #[error("the administrator has another key")]
    Succession(Succession),
    /// Forced: nothing proves that the header belongs to the vault.
    #[error("the root directory does not open with this header's keys")]
    RootDoesNotOpen,
    /// The restored header says more than the copy: that there are datasets.
    #[error("the copy is from before the first dataset; the restored header says that there are some")]
    HasDatasets,
    /// Forced, with a slot that cannot sign.
    #[error(
        "the copy is from before the first dataset: datasets are not found, and `check --repair` would move what they hold to lamassu.lost, until `key restore --force` is run with an administrator's slot"
    )]
    DatasetsNotSaid,
    /// Forced, with a slot that cannot sign.
    #[error(
        "the copy is from before the vault was anchored, and cannot be signed again to say that it is: run `lamassu anchor accept` with an administrator's slot"
    )]
    AnchorNotSaid,
    /// The present header cannot be read from the store.
    #[error("{0}; keys the header in place may have gained since the backup are not known")]
    Unreadable(FileError),
    /// The header in place opens by another key.
    #[error(
        "the header in place does not open with this key ({0}), so keys it may have gained since the backup are not known"
    )]
    DoesNotOpen(KeyError),
    /// Slots that had been removed exist again.
    #[error("slots removed since the backup open the vault again: {}", listed(.0))]
    SlotsBack(Vec<u32>),
    /// Slots that had been added no longer exist.
    #[error("slots added since the backup are gone: {}", listed(.0))]
    SlotsGone(Vec<u32>),
    /// The restore is not in the history: a slot that cannot sign can still restore a header.
    #[error("the history does not record the restore: {0}")]
    NotOnRecord(KeyError),
}

impl Restore<'_> {
    /// Restores a copy that `material` opens. Returns where the replaced header is kept, if there was one.
    ///
    /// # Errors
    /// [`Error::OtherVault`], [`Error::OtherId`], [`Error::NewerKeys`]; [`Error::Usage`] for a copy that the restore
    /// would overwrite; those of keys, of headers' files and of the store. Then the header has not changed; one that an
    /// earlier restore has kept may be gone if the store failed.
    pub fn put_back(&self, copy: &Copy, material: &Material) -> Result<Option<PathBuf>> {
        match copy {
            Copy::Vault(header) => {
                let place = self.dir.join(name::HEADER);
                let backend = Arc::new(backend(self.dir)?);
                let belongs = |keys: &Unlocked| self.check_root(backend, header, keys);
                let carry = |keys: &Unlocked, header: &mut VaultHeader, now: Option<&VaultHeader>| {
                    self.carry_anchored(keys, header, now)?;
                    self.carry_datasets(keys, header, now)
                };
                self.put(&place, &**header, material, belongs, carry)
            }
            Copy::Zone(zone) => {
                // A zone file is the user's own, and may be a link to its place.
                let place = fs::canonicalize(self.dir).unwrap_or_else(|_| self.dir.to_path_buf());
                self.put(&place, &**zone, material, |_| Ok(()), |_, _, _| Ok(()))
            }
        }
    }

    /// Checks that the keys open the vault's root directory.
    fn check_root(
        &self,
        backend: Arc<impl lamassu_store::Backend + 'static>,
        header: &VaultHeader,
        keys: &Unlocked,
    ) -> Result<()> {
        let ring = keys.key_ring(header.suite())?;
        // The root directory's record is read when it is opened.
        match Vault::open(backend, header, ring, options(true)).and_then(|vault| vault.open_dir(ROOT)) {
            Ok(_) => Ok(()),
            Err(VaultError::Damaged { .. } | VaultError::NotFound) if self.force => {
                (self.tell)(&Notice::RootDoesNotOpen);
                Ok(())
            }
            Err(VaultError::Damaged { .. } | VaultError::NotFound) => {
                Err(Error::OtherVault { file: self.file.into(), dir: self.dir.into() })
            }
            Err(source) => Err(Error::CannotOpen { dir: self.dir.into(), source }),
        }
    }

    /// Keeps the mark that there may be datasets (format.md, section 4c): without it their directories would be taken
    /// for damaged ones of the vault's own.
    fn carry_datasets(&self, keys: &Unlocked, header: &mut VaultHeader, now: Option<&VaultHeader>) -> Result<()> {
        if header.has_datasets() {
            return Ok(());
        }
        let has_some = match now {
            // A forced restore may repair an earlier one that could not set the mark.
            Some(now) if now.has_datasets() || !self.force => now.has_datasets(),
            Some(_) | None => lamassu_vault::has_dataset(self.dir)?,
        };
        if !has_some {
            return Ok(());
        }
        match keys.allow_datasets(header) {
            Ok(_) => (self.tell)(&Notice::HasDatasets),
            // A use-only slot cannot sign.
            Err(KeyError::NotAdministrator { slot: _ }) if self.force => (self.tell)(&Notice::DatasetsNotSaid),
            Err(source) => return Err(Error::CannotSignCopy { lacks: "the first dataset", source }),
        }
        Ok(())
    }

    /// Keeps the mark that the vault is anchored: without it, older states would pass for the newest.
    fn carry_anchored(&self, keys: &Unlocked, header: &mut VaultHeader, now: Option<&VaultHeader>) -> Result<()> {
        let known = self.policy.anchors.file_of(&header.id())?;
        let is_anchored = now.is_some_and(VaultHeader::is_anchored) || known.is_some_and(|file| file.exists());
        if header.is_anchored() || !is_anchored {
            return Ok(());
        }
        match keys.set_anchored(header) {
            Ok(_) => {}
            Err(KeyError::NotAdministrator { slot: _ }) if self.force => (self.tell)(&Notice::AnchorNotSaid),
            Err(source) => return Err(Error::CannotSignCopy { lacks: "the vault was anchored", source }),
        }
        Ok(())
    }

    fn put<H: Header + Clone>(
        &self,
        place: &Path,
        header: &H,
        material: &Material,
        belongs: impl FnOnce(&Unlocked) -> Result<()>,
        carry: impl FnOnce(&Unlocked, &mut H, Option<&H>) -> Result<()>,
    ) -> Result<Option<PathBuf>> {
        if is_working_copy(self.file, place) {
            let text = "FILE is a working copy that the restore would overwrite: copy it, and restore the copy";
            return Err(Error::Usage(text));
        }
        // A restore decides which header is the newest: it is not based on the present one.
        let mut update = Update::begin(place, &self.policy.witness())?.decided();
        let unlocked = self.policy.try_slots(header, material, self.slot).at(self.file)?;
        if let Some(succession) = self.policy.pins.check(header).at(self.file)? {
            (self.tell)(&Notice::Succession(succession));
        }
        belongs(&unlocked)?;
        // Its keys would not be compared otherwise, and the next change would overwrite it.
        update.put_back()?;
        let mut now = None;
        match update.read::<H>() {
            Ok(found) => {
                // The present header is trusted if the key opens it.
                let is_authentic = self.compare(&found, header, &unlocked, material)?;
                now = is_authentic.then_some(found);
            }
            // An unreadable header is a reason for a restore.
            Err(FileError::Missing { .. } | FileError::Header { .. }) => {}
            // A block that the store cannot read must not prevent the restore of a good copy.
            Err(error @ FileError::Read { .. }) => (self.tell)(&Notice::Unreadable(error)),
            Err(
                error @ (FileError::Exists { .. }
                | FileError::NotAFile { .. }
                | FileError::Busy { .. }
                | FileError::Witness { .. }
                | FileError::Write { .. }),
            ) => return Err(error.into()),
        }
        let mut header = header.clone();
        carry(&unlocked, &mut header, now.as_ref())?;
        if H::IS_VAULT {
            // A vault in use refuses it. What an earlier restore has kept gives way to this one's only after that.
            update.take_witness(&header)?;
        }
        self.policy.go_through()?;
        let replaced = update.keeping_replaced();
        self.commit(place, update, &mut header, &unlocked)?;
        Ok(replaced.get().cloned())
    }

    fn commit<H: Header + Clone>(&self, place: &Path, update: Update, header: &mut H, keys: &Unlocked) -> Result<()> {
        let event = Event::new(EventKind::Restored).detail("from", self.file.display());
        let is_there = place.symlink_metadata().is_ok();
        match keys.may_change(header) {
            Ok(()) if is_there => update.record(header, keys, &[event])?,
            Ok(()) => update.create_recorded(header, keys, &[event])?,
            // A use-only slot cannot sign, and need not: the copy is restored as it was signed.
            Err(KeyError::NotAdministrator { slot }) => {
                if is_there {
                    update.replace(header)?
                } else {
                    update.create(header)?
                }
                let event = event.detail("with_use_only_slot", slot);
                if let Err(error) = keys.history(self.dir, header).and_then(|mut history| history.note(event)) {
                    (self.tell)(&Notice::NotOnRecord(error));
                }
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Compares the present header with the one to restore, if both can be read. Returns whether the present one
    /// belongs to that vault, and opens.
    fn compare<H: Header>(&self, now: &H, then: &H, restored: &Unlocked, material: &Material) -> Result<bool> {
        let (file, dir) = (|| self.file.to_path_buf(), || self.dir.to_path_buf());
        if now.keys().id != then.keys().id {
            return if self.force { Ok(false) } else { Err(Error::OtherId { file: file(), dir: dir() }) };
        }
        let present = self.policy.try_slots(now, material, None);
        let opens = present.is_ok();
        match present {
            Ok(present) if !self.force && has_more(&present, restored) => {
                return Err(Error::NewerKeys { file: file(), dir: dir() });
            }
            // Slots that were removed would exist again. While the present header is intact, only an administrator may
            // decide that.
            Ok(present) => {
                present.may_change(now)?;
                settle_history(&present, now, self.dir);
            }
            Err(Error::Key(error)) => (self.tell)(&Notice::DoesNotOpen(error)),
            Err(error) => return Err(error),
        }
        let (now, then) = (slots_of(now), slots_of(then));
        let lacking =
            |of: &[u32], others: &[u32]| -> Vec<u32> { of.iter().filter(|id| !others.contains(id)).copied().collect() };
        let (back, gone) = (lacking(&then, &now), lacking(&now, &then));
        if !back.is_empty() {
            (self.tell)(&Notice::SlotsBack(back));
        }
        if !gone.is_empty() {
            (self.tell)(&Notice::SlotsGone(gone));
        }
        Ok(opens)
    }
}

fn slots_of<H: Header>(header: &H) -> Vec<u32> {
    header.keys().slots.iter().map(|slot| slot.id).collect()
}

fn listed(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// Whether `present` has a key that `restored` lacks: data written under it would become unreadable. Two rotations of
/// one copy give epochs of the same number with different keys, so keys are compared, not numbers.
fn has_more(present: &Unlocked, restored: &Unlocked) -> bool {
    let is_same = |a: &Epoch, b: &Epoch| equal(a.key().expose(), b.key().expose());
    let lacks = |had: &[Epoch], has: &[Epoch]| had.iter().any(|e| !has.iter().any(|r| is_same(e, r)));
    let (p, r) = (present.keychain(), restored.keychain());
    lacks(p.inner(), r.inner()) || lacks(p.outer(), r.outer())
}

fn beside(place: &Path, suffix: &str) -> PathBuf {
    let mut name = place.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Whether `file` is the name under which the new header is made, or one under which old headers are kept, where a
/// restore would overwrite it.
fn is_working_copy(file: &Path, place: &Path) -> bool {
    let id = |path: &Path| path.metadata().map(|m| (m.dev(), m.ino())).ok();
    let suffixes = [".new", ".replacing", ".replaced"];
    suffixes.iter().any(|suffix| id(file).is_some() && id(file) == id(&beside(place, suffix)))
}
