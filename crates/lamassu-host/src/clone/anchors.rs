//! The anchors of a copy: copies of the original's, since the ciphertext is the same.

use super::{Original, Quiet, Top};
use crate::anchors::{Access, Choice, CopiedDatasets, Made, check, disk};
use crate::keeper::headers_below;
use crate::open::backend;
use crate::{Error, Policy, Result};
use lamassu_anchor::Anchor;
use lamassu_anchor::export::Rights;
use lamassu_anchor::table::DiskTable;
use lamassu_format::header::{VaultHeader, VaultId};
use lamassu_keys::Unlocked;
use lamassu_store::Backend as _;
use lamassu_store::backend::Privileges;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

impl Original {
    /// The tables of the original's anchor, if it has one, after checking that header and history are the newest. A
    /// frozen mount has made everything durable in them.
    pub(super) fn anchor(
        &self,
        policy: &Policy,
        header: &VaultHeader,
        keys: &Unlocked,
        quiet: &impl Quiet,
    ) -> Result<Option<Arc<DiskTable>>> {
        if !header.is_anchored() {
            return Ok(None);
        }
        if *policy.anchors.choice() == Choice::Unverified {
            return Err(Error::UnverifiedWrite);
        }
        let id = header.id();
        let (_, table) = look(policy, &id, quiet)?;
        let table = Arc::new(table);
        let anchor = Anchor::open(table.clone(), &id)?;
        check(&anchor, Access::Read, header, keys, &self.dir)?;
        // The whole store may have been restored to an older state. Files are copied as they are: those that are
        // outdated in the original are outdated in the copy too, by its anchor.
        let (root, ring) = (backend(&self.dir)?.root(), keys.key_ring(header.suite())?);
        lamassu_vault::verify_sessions(&*root, &ring, &id, anchor.vault().sessions.recorded)?;
        Ok(Some(table))
    }

    /// Makes the copy's own anchor: the same objects and names, as the ciphertext is the same.
    pub(super) fn copy_anchor(
        &self,
        policy: &Policy,
        of: &DiskTable,
        copy: &VaultHeader,
        top: &Top,
        privileges: Privileges,
    ) -> Result<Made> {
        let rights = match privileges {
            Privileges::Kept => Rights::Kept,
            Privileges::Dropped => Rights::Dropped,
        };
        let file = policy.anchors.file_for_new(&copy.id(), Some(&self.header.id()))?;
        disk::check(&file, &top.path())?;
        policy.anchors.make_copy(of, copy.id(), rights, &file, &top.path())
    }

    /// Makes those of the datasets in it, which keep their ids. Their headers are not authenticated: one that names
    /// another vault gets a copy to which no record leads.
    pub(super) fn copy_anchors_below(
        &self,
        policy: &Policy,
        copy: &VaultHeader,
        quiet: &impl Quiet,
    ) -> Result<CopiedDatasets> {
        let mut ids = BTreeSet::new();
        if copy.is_anchored() && copy.has_datasets() {
            let headers = headers_below(&self.dir)?.into_iter().map(|(_, header)| header);
            ids.extend(headers.filter(VaultHeader::is_anchored).map(|header| header.id()));
        }
        policy.anchors.copy_datasets(&ids, &copy.id(), |dataset| look(policy, dataset, quiet))
    }
}

/// The anchor of what is copied. The daemon of a frozen mount has the newest; hosts that take turns are in the way of
/// another session.
pub(super) fn look(policy: &Policy, vault: &VaultId, quiet: &impl Quiet) -> Result<(PathBuf, DiskTable)> {
    if quiet.is_frozen() { policy.anchors.look_as_it_is(vault) } else { policy.anchors.look(vault) }
}
