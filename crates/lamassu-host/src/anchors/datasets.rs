//! Anchors of datasets at servers. A dataset whose anchor this host does not know of is looked for at the server that
//! keeps the anchor of the vault around it. That vault's anchor says which datasets lie in it, so a store that shows
//! another one there gets nobody any rights.

use super::{Access, Anchors, Made};
use crate::{Error, Result};
use lamassu_format::header::{VaultHeader, VaultId};
use lamassu_format::name;
use lamassu_keys::header_file;
use lamassu_rpc::host::{Mirrored, give_up};
use lamassu_vault::anchor::is_dataset_of;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{MutexGuard, PoisonError};

/// A dataset whose anchor stayed where it was when that of the vault around it moved to a server.
#[derive(Debug)]
pub struct Stayed {
    /// its path in the store, relative to the vault's directory
    pub stored: PathBuf,
    /// the reason
    pub error: Error,
}

impl Anchors {
    /// Notes that a dataset lies in another vault, as the anchor of that vault says.
    pub(crate) fn lies_in(&self, dataset: &VaultId, around: &VaultId) {
        self.around().insert(*dataset, *around);
    }

    fn around(&self) -> MutexGuard<'_, HashMap<VaultId, VaultId>> {
        self.shared.around.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server at which to look for the anchor of a dataset that has none on this host.
    pub(super) fn server_of_around(&self, dataset: &VaultId) -> Result<Option<String>> {
        let around = self.around().get(dataset).copied();
        let is_here = || self.usual(dataset).is_some_and(|file| file.symlink_metadata().is_ok());
        match around.filter(|_| !is_here()) {
            Some(around) => self.server_of(&around),
            None => Ok(None),
        }
    }

    /// Holds the anchors of a dataset that is about to be destroyed, in the directory `dir` of the store, and of those
    /// in it, as far as they are at a server: no other host begins to use them.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError::Server`], for example if another host uses one.
    pub(crate) fn hold_to_remove(&self, dataset: &VaultId, dir: &Path) -> Result<Vec<(VaultId, Mirrored)>> {
        let mut held: Vec<_> = self.held_at_server(dataset)?.map(|table| (*dataset, table)).into_iter().collect();
        if held.is_empty() {
            return Ok(held);
        }
        for stored in below(dir)? {
            let id = header_in(&dir.join(stored))?.id();
            // The header is not authenticated: only what an anchor around it has is removed.
            for at in 0..held.len() {
                let (around, table) = &held[at];
                if is_dataset_of(table.copy(), &id)? {
                    self.lies_in(&id, around);
                    held.extend(self.held_at_server(&id)?.map(|table| (id, table)));
                    break;
                }
            }
        }
        Ok(held)
    }

    fn held_at_server(&self, dataset: &VaultId) -> Result<Option<Mirrored>> {
        let Some(server) = self.server_of(dataset)? else { return Ok(None) };
        // A thread may be closing it.
        drop(self.opened_unless_closing(dataset));
        let copy = self.usual(dataset).ok_or(Error::NoAnchorPlace)?;
        self.session(&server, dataset, Access::Write, &copy).map(Some)
    }

    /// Removes the anchors of a dataset that no longer exists, and of those that were in it.
    ///
    /// # Errors
    /// [`Error::Local`]; [`lamassu_anchor::AnchorError::Server`].
    pub(crate) fn remove_held(&self, dataset: &VaultId, held: Vec<(VaultId, Mirrored)>) -> Result<()> {
        // Those inside first: the right to them is that to the vault around them.
        for (id, table) in held.into_iter().rev() {
            give_up(table.session())?;
            drop(table);
            self.remove(&id)?;
        }
        self.remove(dataset)
    }

    /// Puts the anchors of the datasets in the vault in `dir` at the server to which its own was moved. Those that the
    /// vault's anchor does not know are left, and datasets that have none. The caller must keep writers out of all of
    /// them.
    ///
    /// # Errors
    /// Those of listing the datasets. A dataset whose anchor cannot be moved is in the result.
    pub fn move_datasets_to_server(&self, vault: &VaultId, dir: &Path, server: &str) -> Result<(usize, Vec<Stayed>)> {
        let (mut known, mut stayed) = (HashMap::from([(PathBuf::new(), *vault)]), Vec::new());
        for stored in below(dir)? {
            let around = stored.ancestors().skip(1).find_map(|above| known.get(above)).copied().unwrap_or(*vault);
            match self.move_dataset(&dir.join(&stored), &around, server) {
                Ok(id) => drop(known.insert(stored, id)),
                Err(error) => stayed.push(Stayed { stored, error }),
            }
        }
        Ok((known.len() - 1, stayed))
    }

    /// Returns the dataset's id.
    fn move_dataset(&self, dir: &Path, around: &VaultId, server: &str) -> Result<VaultId> {
        let header = header_in(dir)?;
        self.require(&header)?;
        let id = header.id();
        let (_, table) = self.look(around)?;
        // The header is not authenticated: it may name any vault of this host.
        if !is_dataset_of(&table, &id)? {
            return Err(super::proof::outdated(super::proof::HEADER));
        }
        self.move_to_server_in(&id, server, Some(*around))?;
        Ok(id)
    }

    /// The vault around the dataset in a directory of the store, if its anchor is at this server and has the dataset
    /// there.
    pub(super) fn around_at_server(&self, dataset: &VaultId, dir: &Path, server: &str) -> Option<VaultId> {
        let dir = dir.canonicalize().ok()?;
        let above = dir.ancestors().skip(1).find(|above| above.join(name::HEADER).exists())?;
        let around = header_in(above).ok()?.id();
        let is_there = self.server_of(&around).ok()?.is_some_and(|its| its == server);
        let (_, table) = is_there.then(|| self.look(&around).ok())??;
        is_dataset_of(&table, dataset).ok()?.then_some(around)
    }
}

/// The datasets in a directory of the store, by their paths in it, each after the one that it lies in.
fn below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut below =
        lamassu_vault::datasets_below(dir).map_err(|source| Error::CannotList { dir: dir.into(), source })?;
    below.sort();
    Ok(below)
}

fn header_in(dir: &Path) -> Result<VaultHeader> {
    Ok(header_file::read(&dir.join(name::HEADER))?)
}

impl Made {
    /// Keeps the anchor of a new dataset where that of the vault around it is: at its server, if there is one.
    ///
    /// # Errors
    /// Those of the server. Then the anchor is removed, and so must be the dataset.
    pub(crate) fn keep_below(mut self, around: &VaultId) -> Result<()> {
        if let Some(server) = self.anchors.server_of(around)? {
            let connection = self.anchors.connection(&server)?;
            let while_open = self.anchor.take().map(|anchor| anchor.while_open());
            self.anchors.opened().remove(&self.vault);
            // Those who registered the header have it open no longer.
            debug_assert!(while_open.is_none_or(|open| open.strong_count() == 0));
            self.anchors.put_file((&server, &connection), (&self.vault, Some(*around)), &self.path)?;
        }
        self.is_kept = true;
        Ok(())
    }
}
