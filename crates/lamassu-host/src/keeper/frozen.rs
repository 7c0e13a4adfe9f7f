//! Datasets that are kept from other hosts while the vault around them is frozen here, and that this host does not use,
//! or has no key for: only their leases are needed.

use super::Keeper;
use crate::Result;
use crate::anchors::Anchors;
use crate::error::Error;
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::header::{VaultHeader, VaultId};
use lamassu_format::name;
use lamassu_keys::header_file;
use lamassu_lease::Mode;
use lamassu_rpc::host::Turn;
use lamassu_vault::anchor::is_dataset_of;
use lamassu_vault::forest::{HeldDataset, ROOT_MEMBER};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// The dataset that is waited for.
#[derive(Default)]
pub(super) struct Holding(Mutex<Option<VaultId>>);

impl Holding {
    fn set(&self, dataset: Option<VaultId>) -> Option<VaultId> {
        std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), dataset)
    }

    /// Waits no longer.
    pub(super) fn stop(&self, anchors: &Anchors) {
        if let Some(dataset) = self.set(None) {
            anchors.leave(&dataset);
        }
    }
}

/// The lease of a dataset.
struct Held {
    /// `None`: it is being dropped.
    turn: Option<Turn>,
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
        self.anchors.leave(&self.dataset);
    }
}

/// Takes the lease of a dataset in `around`; see [`lamassu_vault::forest::Opener::hold`].
///
/// # Errors
/// Those of the server.
pub(super) fn hold_dataset(
    anchors: &Anchors,
    holding: &Holding,
    (dataset, around): (&VaultId, &VaultId),
) -> Result<Option<Box<dyn HeldDataset>>> {
    anchors.lies_in(dataset, around);
    let turns = match anchors.begin_turns(dataset) {
        Ok(turns) => turns,
        Err(error) if is_not_at_server(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    holding.set(Some(*dataset));
    let taken = turns.take(Mode::Exclusive);
    holding.set(None);
    let turn = taken.inspect_err(|_| anchors.leave(dataset))?;
    turn.keep(true);
    Ok(Some(Box::new(Held { turn: Some(turn), dataset: *dataset, anchors: anchors.clone() })))
}

/// Whether hosts do not use it by turns: its anchor is not at the server.
fn is_not_at_server(error: &Error) -> bool {
    match error.innermost() {
        Error::NotAtServer => true,
        Error::Vault(lamassu_vault::VaultError::Anchor(error)) => {
            matches!(error, AnchorError::Server { fault: ServerFault::UnknownVault, .. })
        }
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
    let id_in =
        |stored: &PathBuf| header_file::read::<VaultHeader>(&dir.join(stored).join(name::HEADER)).map(|h| h.id());
    let mut below =
        lamassu_vault::datasets_below(&dir).map_err(|source| Error::CannotList { dir: dir.clone(), source })?;
    below.sort();
    let mut known = HashMap::from([(PathBuf::new(), id_in(&PathBuf::new())?)]);
    let mut all = Vec::new();
    for stored in below {
        let Ok(id) = id_in(&stored) else { continue };
        let Some(around) = stored.ancestors().skip(1).find_map(|above| known.get(above)).copied() else { continue };
        known.insert(stored, id);
        all.push((around, id));
    }
    Ok(all)
}
