//! A header and a history against what the anchor remembers of them.

use super::Access;
use crate::open::backend;
use crate::{Error, Policy, Result};
use lamassu_anchor::row::Sealed;
use lamassu_anchor::{Anchor, Digest};
use lamassu_format::header::{HistoryMark, VaultHeader};
use lamassu_format::name;
use lamassu_keys::{HistoryError, KeyError, Unlocked, witness};
use lamassu_store::Backend;
use lamassu_vault::VaultError;
use std::fs::File;
use std::path::Path;

pub(super) const HEADER: &str = "vault header";
const HISTORY: &str = "history";

/// The error of a header or a history that is not the newest.
pub(super) fn outdated(what: &'static str) -> Error {
    let stored = if what == HEADER { name::HEADER } else { name::HISTORY };
    VaultError::Outdated { what, stored: stored.into() }.into()
}

/// That a header, which `keys` opened, and the history in `dir` are the newest.
///
/// # Errors
/// [`VaultError::Outdated`]; those of the history's file; those of the anchor.
pub fn check(anchor: &Anchor, access: Access, header: &VaultHeader, keys: &Unlocked, dir: &Path) -> Result<()> {
    let seen = Digest(witness::digest(header)?);
    let known = anchor.vault();
    if !known.header.is_current(seen) {
        return Err(outdated(HEADER));
    }
    let (count, head) = known.history;
    if count > 0 {
        let goes_on = match keys.history(dir, header) {
            Ok(history) => history.goes_to(HistoryMark { count, head: head.0 }),
            Err(KeyError::History(error)) => Err(error),
            Err(error) => return Err(error.into()),
        };
        match goes_on {
            // The mode of a dataset's directory may deny it to its owner, which is this process. The header was
            // compared; the history is when the directory is open.
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
    if access == Access::Write && known.header != Sealed::Is(seen) {
        // One of two, after an interruption: this one, once the store cannot lose it any more.
        let synced = File::open(dir).and_then(|dir| dir.sync_all());
        synced.map_err(|source| Error::Backing { op: "sync", path: dir.into(), source })?;
        anchor.header_replaced(seen)?;
    }
    Ok(())
}

/// That the vault was not written since the anchor was last told of anything, as far as its record of sessions tells.
/// A record that does not open is told of where it is needed.
fn refuse_older(anchor: &Anchor, header: &VaultHeader, keys: &Unlocked, dir: &Path) -> Result<()> {
    // The mode of a dataset's directory may deny it to its owner. The record is compared when the directory is open.
    let Ok(backend) = backend(dir) else { return Ok(()) };
    let (root, ring) = (backend.root(), keys.key_ring(header.suite())?);
    match lamassu_vault::last_session(&*root, &ring, &header.id()) {
        Ok(last) => Ok(anchor.may_be_recorded(last).map(drop)?),
        Err(_) => Ok(()),
    }
}

impl Policy {
    /// Refuses to change the header of the vault in `dir` by an older anchor: the newest would not know the change.
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
