//! Assured delete (§4d): a vault's keys are made unrecoverable while its ciphertext stays.
//!
//! The header is replaced by one without slots, whose keychain is noise, as if wrapped under a key that was thrown
//! away. The old one is first given a second name, durably, and is then overwritten where it lies, with everything else
//! in the vault's directory that wraps keys. So a vault is, after a crash at any moment, whole, or destroyed with a
//! rest that the next run finds and finishes.
//!
//! Not reached: copies of the header elsewhere, and what the store keeps of overwritten blocks. A [`crate::receipt`]
//! says so.

use crate::header_file::{self, erase, regular};
use crate::history::{Copy, Report};
use crate::receipt::{AuditKey, Backup, Copied, GoneEpoch, GoneHistory, GoneSlot, Receipt};
use crate::{Event, FileError, KeyError, Tier, Unlocked, Update, Witness, rotate};
use data_encoding::HEXLOWER;
use lamassu_crypto::wrap;
use lamassu_format::header::{Destroyed, HEADER_MAX, Header, VaultHeader, VaultId};
use lamassu_format::name;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

pub use erase::Erased;

/// The right to destroy the keys of one vault, held against all other changes of its header. The caller holds the
/// writers' lock as well, so that no process has the vault open.
#[derive(Debug)]
pub struct Destruction {
    update: Update,
    header: VaultHeader,
    /// the old header, if it had lost its name and was overwritten at once
    nameless: Option<Erased>,
}

/// What was found and done in the vault's directory.
#[derive(Debug, Default)]
pub struct Cleared {
    /// files that wrapped keys, and are gone
    pub erased: Vec<Erased>,
    /// files beside the vault's own that are headers of it: copies that a person made, left alone
    pub copies: Vec<String>,
    /// files that lie where old headers are kept, are not headers that can be read, and have other names: not
    /// Lamassu's, left alone
    pub foreign: Vec<String>,
}

impl Destruction {
    /// Takes the header at `path`, `lamassu.vault` of a vault's directory.
    ///
    /// # Errors
    /// [`FileError`] in a [`KeyError::File`].
    pub fn begin(path: &Path, witness: &Arc<dyn Witness>) -> Result<Destruction, KeyError> {
        let update = Update::begin(path, witness)?;
        update.put_back()?;
        let header: VaultHeader = update.read()?;
        if header.destroyed().is_some() {
            // A run that was cut off may have renamed it a moment ago. What follows cannot be undone.
            header_file::sync_dir_of(path)?;
        }
        Ok(Destruction { update, header, nameless: None })
    }

    /// The header that still opens the vault: the one in place, or what a cut-off attempt has left of it.
    ///
    /// # Errors
    /// [`KeyError::File`]: it may be there.
    pub fn opens(&self) -> Result<Option<VaultHeader>, KeyError> {
        if self.begun().is_none() {
            return Ok(Some(self.header.clone()));
        }
        match header_file::read::<VaultHeader>(&self.update.kept_path()) {
            Ok(kept) => Ok(Some(kept).filter(|kept| kept.id() == self.header.id() && kept.destroyed().is_none())),
            Err(FileError::Missing { .. } | FileError::NotAFile { .. } | FileError::Header { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The header in place.
    pub fn header(&self) -> &VaultHeader {
        &self.header
    }

    /// Whether an attempt got past the point of no return, and when.
    pub fn begun(&self) -> Option<Destroyed> {
        self.header.destroyed()
    }

    /// Whether an earlier run came to its end: the old header, the last thing that [`Destruction::clear`] removes, is
    /// gone. Nor has a restore left another one since, that was cut off.
    ///
    /// # Errors
    /// [`KeyError::File`]: the store does not tell.
    pub fn is_cleared(&self) -> Result<bool, KeyError> {
        let has_left = self.update.has_left()? || erase::has_left(&self.update.kept_path(), &self.header.id())?;
        Ok(self.begun().is_some() && !has_left)
    }

    /// Puts a header without keys in place: from here on nothing opens the vault, and what is left is
    /// [`Destruction::clear`]. The old header is kept until then, so that keys at servers and in tokens can still be
    /// told to be its own. `event` is the history's last entry.
    ///
    /// # Errors
    /// [`KeyError::NotAdministrator`], [`KeyError::HeaderAltered`], [`KeyError::OtherHeader`], [`KeyError::Destroyed`],
    /// [`KeyError::History`], [`KeyError::File`], [`KeyError::NoRandom`]: the vault is whole then, unless only one of
    /// the last steps failed: a sync, or the overwriting of an old header whose name another host has removed.
    pub fn commit(self, keys: &Unlocked, destroyed: Destroyed, event: &Event) -> Result<Destruction, KeyError> {
        let Destruction { mut update, mut header, .. } = self;
        if let Some(earlier) = header.destroyed() {
            return Err(KeyError::Destroyed(earlier));
        }
        update.write_down(None, &mut header, keys, std::slice::from_ref(event))?;
        let mut gone = header.into_destroyed(destroyed);
        let area = gone.keys_mut();
        lamassu_crypto::random(&mut area.keychain.nonce)?;
        lamassu_crypto::random(&mut area.keychain.sealed)?;
        // The administrator's signature stays one that can be verified; a MAC would need a key that is gone.
        keys.sign(&mut gone);
        lamassu_crypto::random(&mut gone.keys_mut().mac)?;
        let (path, witness) = (update.path().to_path_buf(), update.witness().clone());
        let nameless = update.replace_keeping(&gone)?;
        event.announce(&path);
        Ok(Destruction { nameless, ..Destruction::begin(&path, &witness)? })
    }

    /// Overwrites and removes every file of the vault's directory that wraps its keys. A failure at one of them leaves
    /// no other as it is.
    ///
    /// # Errors
    /// [`KeyError::File`], the first one: run it again. [`KeyError::OtherHeader`] before [`Destruction::commit`].
    pub fn clear(mut self) -> Result<Cleared, KeyError> {
        if self.begun().is_none() {
            return Err(KeyError::OtherHeader);
        }
        // The present header's own other names: what is erased below is never that header.
        self.update.clear_second_names()?;
        self.update.remove_second_name(name::HEADER_REPLACING)?;
        let new = self.update.erase_new()?;
        let dir = self.update.path().parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let listing = |source| FileError::Read { op: "list", path: dir.into(), source };
        let id = self.header.id();
        let mut done = Cleared { erased: new.into_iter().chain(self.nameless).collect(), ..Cleared::default() };
        let header = self.update.path();
        let mut failed = None;
        for entry in std::fs::read_dir(dir).map_err(listing)? {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    failed.get_or_insert(listing(error));
                    continue;
                }
            };
            let file = entry.file_name();
            if file == name::HEADER || file == name::HEADER_NEW || file == name::HEADER_REPLACING {
                continue;
            }
            let path = entry.path();
            let by_name = file == name::HEADER_REPLACED || name::is_set_aside(file.as_bytes());
            if !by_name && !is_header_of(&path, &id) {
                continue;
            }
            if by_name || file.as_bytes().starts_with(name::RESERVED_PREFIX.as_bytes()) {
                if let Err(error) = erase::file(&path, header, &id).map(|outcome| done.note(&path, outcome)) {
                    failed.get_or_insert(error);
                }
            } else {
                done.copies.push(file.to_string_lossy().into_owned());
            }
        }
        // Last: while it has its name, the next run knows that there is something left to do.
        let kept = self.update.kept_path();
        if let Some(error) = failed {
            let _ = erase::content(&kept, header, &id);
            return Err(error.into());
        }
        let outcome = erase::file(&kept, header, &id)?;
        done.note(&kept, outcome);
        done.erased.sort_by(|a, b| a.file.cmp(&b.file));
        done.copies.sort();
        Ok(done)
    }
}

impl Cleared {
    fn note(&mut self, path: &Path, outcome: erase::Outcome) {
        match outcome {
            erase::Outcome::Nothing => {}
            erase::Outcome::Erased(erased) => self.erased.push(erased),
            erase::Outcome::Left => {
                self.foreign.push(path.file_name().unwrap_or_default().to_string_lossy().into_owned())
            }
        }
    }
}

/// Whether a file is a header that opens the vault of an id. Names and links prove nothing, content does.
fn is_header_of(path: &Path, id: &VaultId) -> bool {
    let small = path.symlink_metadata().is_ok_and(|m| m.is_file() && (1..=HEADER_MAX as u64).contains(&m.len()));
    let mut first = [0];
    let begins = small && regular::open(path).and_then(|mut f| f.read_exact(&mut first)).is_ok() && first == *b"{";
    begins && header_file::read::<VaultHeader>(path).is_ok_and(|h| h.id() == *id && h.destroyed().is_none())
}

/// What a receipt says before anything is done: what will be unreadable, and what stays. `dir` is the vault's, as it
/// was given.
///
/// # Errors
/// [`KeyError::NoRandom`].
pub fn draft(dir: &Path, header: &VaultHeader, keys: &Unlocked, audit: &AuditKey) -> Result<Receipt, KeyError> {
    let mut receipt = Receipt::begin(dir, header, audit)?;
    for tier in [Tier::Inner, Tier::Outer] {
        receipt.epochs.extend(keys.keychain().epochs(tier).iter().map(|epoch| GoneEpoch {
            key: tier,
            epoch: epoch.number(),
            created: epoch.created(),
            digest: HEXLOWER.encode(wrap::hkdf::<32>(epoch.key().expose(), b"", b"lamassu v1 receipt epoch").expose()),
            zone_shares: rotate::is_shared(header, tier, epoch),
        }));
    }
    receipt.slots = header
        .keys()
        .slots
        .iter()
        .map(|slot| GoneSlot {
            id: slot.id,
            kind: slot.kind.name().into(),
            label: slot.label.clone(),
            created: slot.created,
        })
        .collect();
    let mark = header.keys().history;
    let report = keys.history(dir, header)?.read();
    receipt.history = mark.map(|mark| GoneHistory {
        entries: mark.count,
        head: HEXLOWER.encode(&mark.head.0),
        verified: report.as_ref().is_ok_and(|r| r.fault.is_none()),
    });
    let lacks_copies = report.as_ref().map_or(true, Report::lacks_copies);
    for entry in report.map(|r| r.entries).unwrap_or_default() {
        match entry.copy() {
            Some(Copy::Header(_)) => receipt.backups.push(Backup::of(&entry)),
            Some(Copy::Vault { kind, id }) => {
                receipt.clones.push(Copied { time: entry.time, kind: kind.into(), id: id.into() });
            }
            None => {}
        }
    }
    receipt.tell_limits(header, keys);
    if crate::dataset::vault_above(dir).is_some() {
        receipt.cannot_know.push(
            "Clones, snapshots and copies of the vault that this dataset lies in: each holds the dataset's header with its slots as of then, and opens as before. They are on record in that \
             vault's history, if at all, and not here."
                .into(),
        );
    }
    if lacks_copies || receipt.history.is_none() {
        receipt.cannot_know.push("The history was missing or did not verify as a whole, now or when it began anew: backups and clones it once recorded may not be listed.".into());
    }
    Ok(receipt)
}
