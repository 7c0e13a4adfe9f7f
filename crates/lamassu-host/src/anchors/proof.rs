//! Compares a header and a history with the anchor.

use super::{Access, Anchors};
use crate::open::backend;
use crate::{Error, Policy, Result};
use lamassu_anchor::row::Sealed;
use lamassu_anchor::{Anchor, Digest};
use lamassu_format::header::{HistoryHead, HistoryMark, VaultHeader};
use lamassu_format::name;
use lamassu_keys::{HistoryError, KeyError, Unlocked, Update, header_file, witness};
use lamassu_store::Backend;
use lamassu_vault::VaultError;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long to wait for a process that replaces a header, which takes a moment.
const REPLACING: Duration = Duration::from_secs(5);

pub(super) const HEADER: &str = "vault header";
pub(super) const HISTORY: &str = "history";

/// The error of a header or a history that is not the newest.
pub(super) fn outdated(what: &'static str) -> Error {
    let stored = if what == HEADER { name::HEADER } else { name::HISTORY };
    VaultError::Outdated { what, stored: stored.into() }.into()
}

/// Checks that a header, which `keys` opened, and the history in `dir` are the newest. For writing, it also settles
/// which of two headers is the newest. The caller must not hold the right to replace the header.
///
/// # Errors
/// [`VaultError::Outdated`]; those of the history's file and of the header's; those of the anchor.
pub fn check(anchor: &Anchor, access: Access, header: &VaultHeader, keys: &Unlocked, dir: &Path) -> Result<()> {
    let seen = Digest(witness::digest(header)?);
    let known = anchor.vault();
    if !known.header.is_current(seen) {
        return Err(outdated(HEADER));
    }
    let (count, head) = known.history_of(seen);
    if count > 0 {
        let goes_on = match keys.history(dir, header) {
            Ok(history) => history.goes_to(HistoryMark { count, head: HistoryHead(head.0) }),
            Err(KeyError::History(error)) => Err(error),
            Err(error) => return Err(error.into()),
        };
        match goes_on {
            // The mode of a dataset's directory may deny it to its owner, which is this process. The header was
            // compared; the history is compared when the directory is open.
            Err(HistoryError::Io { source, .. }) if source.kind() == std::io::ErrorKind::PermissionDenied => {
                tracing::warn!(dir = %dir.display(), "the history cannot be read, and was not compared with the anchor");
            }
            Ok(true) => {}
            Ok(false) | Err(HistoryError::Damaged { .. } | HistoryError::NotAFile { .. }) => {
                return Err(outdated(HISTORY));
            }
            Err(error @ (HistoryError::Io { .. } | HistoryError::Busy { .. })) => {
                return Err(KeyError::from(error).into());
            }
        }
    }
    refuse_older(anchor, header, keys, dir)?;
    match access == Access::Write && known.header != Sealed::Is(seen) {
        true => settle(anchor, seen, dir),
        false => Ok(()),
    }
}

/// After an interruption, settles which of two headers is the newest: the one in the store, after the store has made it
/// durable. Nobody may replace the header meanwhile: a process that is about to do so has told the anchor, so this call
/// would set the anchor to another header than the store will have. The right to replace ensures that, or the lease: a
/// process without it replaces nothing, though it may still have the right, for example since it was stopped.
fn settle(anchor: &Anchor, seen: Digest, dir: &Path) -> Result<()> {
    let path = dir.join(name::HEADER);
    // Nothing is replaced with the right, so no witness is needed.
    let right = || Update::begin_within(REPLACING, &path, &lamassu_keys::nobody());
    let _right = if anchor.may_end() { None } else { Some(right()?) };
    let now = Digest(witness::digest(&header_file::read::<VaultHeader>(&path)?)?);
    if now != seen {
        return Err(outdated(HEADER));
    }
    sync(dir)?;
    if anchor.header_is(seen)? { Ok(()) } else { Err(outdated(HEADER)) }
}

/// Makes the present header of a directory durable.
pub(super) fn sync(dir: &Path) -> Result<()> {
    let synced = File::open(dir).and_then(|dir| dir.sync_all());
    synced.map_err(|source| Error::Backing { op: "sync", path: dir.into(), source })
}

/// Checks, by the vault's record of sessions, that the vault was not written since the anchor was last told anything. A
/// record that does not open is reported where it is used.
fn refuse_older(anchor: &Anchor, header: &VaultHeader, keys: &Unlocked, dir: &Path) -> Result<()> {
    // The mode of a dataset's directory may deny it to its owner. The record is compared when the directory is open.
    let Ok(backend) = backend(dir) else { return Ok(()) };
    let (root, ring) = (backend.root(), keys.key_ring(header.suite())?);
    match lamassu_vault::last_session(&*root, &ring, &header.id()) {
        Ok(last) => Ok(anchor.may_be_recorded(last).map(drop)?),
        Err(_) => Ok(()),
    }
}

impl Anchors {
    /// Refuses a header if the anchor of its vault knows a newer one. If the anchor cannot be read, or the vault is
    /// opened without it, the header is not refused.
    ///
    /// # Errors
    /// [`VaultError::Outdated`].
    pub(crate) fn refuse_older_header(&self, header: &VaultHeader) -> Result<()> {
        if !header.is_anchored() || self.are_used().is_err() {
            return Ok(());
        }
        let seen = Digest(witness::digest(header)?);
        let known = self.look(&header.id()).and_then(|(_, table)| Ok(Anchor::open(Arc::new(table), &header.id())?));
        match known {
            Ok(anchor) if !anchor.vault().header.is_current(seen) => Err(outdated(HEADER)),
            Ok(_) | Err(_) => Ok(()),
        }
    }
}

impl Policy {
    /// Refuses to change the header of the vault in `dir` with an outdated anchor: the newest anchor would not know the
    /// change.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError::Older`]; those of the anchor.
    pub(crate) fn refuse_older_anchor(&self, header: &VaultHeader, keys: &Unlocked, dir: &Path) -> Result<()> {
        match self.anchors.of_header(header, Access::Read)? {
            Some(anchor) => refuse_older(&anchor, header, keys, dir),
            None => Ok(()),
        }
    }
}
