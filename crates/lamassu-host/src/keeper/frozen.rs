//! Datasets that are kept from other hosts while the vault around them is frozen here, and that this host does not use,
//! or has no key for: only their leases are needed.

use super::Keeper;
use crate::Result;
use crate::anchors::Anchors;
use crate::error::Error;
use crate::place::Place;
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::header::{VaultHeader, VaultId};
use lamassu_format::name;
use lamassu_keys::{FileError, header_file};
use lamassu_lease::Mode;
use lamassu_rpc::host::{Turn, Turns};
use lamassu_vault::VaultError;
use lamassu_vault::anchor::is_dataset_of;
use lamassu_vault::forest::{HeldDataset, ROOT_MEMBER};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How often the store is listed while what was listed is gone when its header is read.
const LISTINGS_MAX: u32 = 16;

/// The lease of a dataset.
struct Held {
    /// `None`: it is being dropped.
    turn: Option<Turn>,
    turns: Arc<Turns>,
    dataset: VaultId,
    anchors: Anchors,
}

impl HeldDataset for Held {
    fn is_good(&self) -> bool {
        self.turn.as_ref().is_some_and(Turn::is_good)
    }

    fn has(&self, dataset: &VaultId) -> lamassu_vault::Result<bool> {
        let Some(turn) = &self.turn else { return Ok(false) };
        Ok(is_dataset_of(&*turn.table, dataset)?)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(turn) = self.turn.take() {
            turn.keep(false);
            turn.pass();
        }
        self.anchors.leave_turns(&self.dataset, &self.turns);
    }
}

/// Takes the lease of a dataset in `around`, as long as it is wanted; see [`lamassu_vault::forest::Opener::hold`].
///
/// # Errors
/// Those of the server; [`VaultError::FreezeLost`] if it is not wanted.
pub(super) fn hold_dataset(
    anchors: &Anchors,
    (dataset, around): (&VaultId, &VaultId),
    is_wanted: &dyn Fn() -> bool,
) -> Result<Option<Box<dyn HeldDataset>>> {
    anchors.lies_in(dataset, around);
    let turns = match anchors.begin_turns(dataset) {
        Ok(turns) => turns,
        Err(error) if is_not_at_server(&error) => {
            tracing::warn!(%dataset, "a dataset is not frozen with the vault: the server does not have it, or it is not granted to this host");
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let taken = turns.take_while(Mode::Exclusive, is_wanted);
    let taken = taken.map_err(Error::from).and_then(|turn| turn.ok_or_else(|| VaultError::FreezeLost.into()));
    let turn = taken.inspect_err(|_| anchors.leave_turns(dataset, &turns))?;
    turn.keep(true);
    Ok(Some(Box::new(Held { turn: Some(turn), turns, dataset: *dataset, anchors: anchors.clone() })))
}

/// Whether hosts do not use it by turns: its anchor is not at the server.
fn is_not_at_server(error: &Error) -> bool {
    match error.innermost() {
        Error::NotAtServer => true,
        Error::Vault(VaultError::Anchor(error)) => {
            matches!(error, AnchorError::Server { fault: ServerFault::UnknownVault, .. })
        }
        _ => false,
    }
}

/// The headers of the datasets in a vault's directory, those of outer ones first; not authenticated. What is no header
/// is left out: nobody uses a dataset by it. One that cannot be read is an error: it may be of a dataset in use.
///
/// # Errors
/// Those of the store.
pub(crate) fn headers_below(dir: &Path) -> Result<Vec<(PathBuf, VaultHeader)>> {
    let list =
        || lamassu_vault::datasets_below(dir).map_err(|source| Error::CannotList { dir: dir.to_owned(), source });
    headers_of(&Place::of(dir)?, list)
}

fn headers_of(place: &Place, mut list: impl FnMut() -> Result<Vec<PathBuf>>) -> Result<Vec<(PathBuf, VaultHeader)>> {
    let read =
        |stored: &Path| -> Result<VaultHeader> { Ok(header_file::read(&place.below(stored)?.file(name::HEADER))?) };
    let mut listings = 1..=LISTINGS_MAX;
    loop {
        let is_last = listings.next().is_none_or(|listing| listing == LISTINGS_MAX);
        let mut below = list()?;
        below.sort();
        let (mut all, mut is_gone) = (Vec::new(), false);
        for stored in below {
            match read(&stored) {
                Ok(header) => all.push((stored, header)),
                Err(Error::File(FileError::Header { .. })) => {}
                Err(error) if is_missing(&error) && !is_last => is_gone = true,
                Err(error) => return Err(error),
            }
        }
        if !is_gone {
            return Ok(all);
        }
    }
}

/// Whether a dataset was moved or removed after it was listed.
fn is_missing(error: &Error) -> bool {
    match error {
        Error::File(FileError::Missing { .. }) => true,
        Error::Backing { source, .. } => source.kind() == ErrorKind::NotFound,
        _ => false,
    }
}

/// The datasets in the store below the mount's own vault; see [`lamassu_vault::forest::Opener::stored_datasets`].
/// Headers are not authenticated: the anchor of the vault around each of them must have it.
///
/// # Errors
/// Those of the store.
pub(super) fn stored_datasets(keeper: &Keeper) -> Result<Vec<(VaultId, VaultId)>> {
    let place = keeper.place(ROOT_MEMBER)?;
    let dir = place.path();
    let root = header_file::read::<VaultHeader>(&dir.join(name::HEADER))?.id();
    let mut known = HashMap::from([(PathBuf::new(), root)]);
    let mut all = Vec::new();
    for (stored, header) in headers_below(&dir)? {
        let id = header.id();
        let Some(around) = stored.ancestors().skip(1).find_map(|above| known.get(above)).copied() else { continue };
        known.insert(stored, id);
        all.push((around, id));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use std::fs;

    #[test]
    fn headers_that_cannot_be_read_are_not_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "garbage", "no-file"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        testing::vault(&dir.path().join("a"));
        fs::write(dir.path().join("garbage").join(name::HEADER), "no header").unwrap();
        fs::create_dir(dir.path().join("no-file").join(name::HEADER)).unwrap();
        let place = Place::of(dir.path()).unwrap();
        let found = |listings: &[&[&str]]| {
            let mut listings = listings.iter();
            let found = headers_of(&place, || Ok(listings.next().unwrap().iter().map(PathBuf::from).collect()));
            found.map(|all| all.into_iter().map(|(stored, _)| stored).collect::<Vec<_>>())
        };
        assert_eq!(found(&[&["garbage", "a"]]).unwrap(), [PathBuf::from("a")]);
        assert!(found(&[&["a", "no-file"]]).is_err());
        // Moved from `gone` to `a` since the first listing.
        assert_eq!(found(&[&["gone"], &["a"]]).unwrap(), [PathBuf::from("a")]);
        assert!(found(&[&["gone"][..]; LISTINGS_MAX as usize]).is_err());
    }
}
