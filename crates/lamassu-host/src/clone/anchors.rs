//! The anchors of a copy: begun as copies of the original's, since its ciphertext is the same.

use super::{Original, Top};
use crate::anchors::{Access, Choice, CopiedDatasets, Made, check, disk};
use crate::open::backend;
use crate::{Error, Policy, Result};
use lamassu_anchor::Anchor;
use lamassu_anchor::export::Rights;
use lamassu_anchor::table::DiskTable;
use lamassu_format::header::VaultHeader;
use lamassu_format::name;
use lamassu_keys::{Unlocked, header_file};
use lamassu_store::Backend as _;
use lamassu_store::backend::Privileges;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Original {
    /// The tables of the original's anchor, if it has one, and that its header and history are the newest. A mount that
    /// is frozen has made everything durable in them.
    pub(super) fn anchor(
        &self,
        policy: &Policy,
        header: &VaultHeader,
        keys: &Unlocked,
    ) -> Result<Option<Arc<DiskTable>>> {
        if !header.is_anchored() {
            return Ok(None);
        }
        if *policy.anchors.choice() == Choice::Unverified {
            return Err(Error::UnverifiedWrite);
        }
        let id = header.id();
        let (_, table) = policy.anchors.look(&id)?;
        let table = Arc::new(table);
        let anchor = Anchor::open(table.clone(), &id)?;
        check(&anchor, Access::Read, header, keys, &self.dir)?;
        // A store that was put back whole. Files are copied as they lie there: those that are not the newest are not in
        // the copy either, by its anchor.
        let (root, ring) = (backend(&self.dir)?.root(), keys.key_ring(header.suite())?);
        lamassu_vault::verify_sessions(&*root, &ring, &id, anchor.vault().sessions.recorded)?;
        Ok(Some(table))
    }

    /// The copy's own: the same objects, and names, as its ciphertext is the same.
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

    /// Those of the datasets in it, which keep their ids. Their headers are not authenticated: one that names another
    /// vault gets a copy that nothing leads to.
    pub(super) fn copy_anchors_below(&self, policy: &Policy, copy: &VaultHeader) -> Result<CopiedDatasets> {
        let mut ids = BTreeSet::new();
        if copy.is_anchored() && copy.has_datasets() {
            for stored in lamassu_vault::datasets_below(&self.dir)? {
                let header = header_file::read::<VaultHeader>(&self.dir.join(stored).join(name::HEADER));
                ids.extend(header.ok().filter(VaultHeader::is_anchored).map(|header| header.id()));
            }
        }
        policy.anchors.copy_datasets(&ids, &copy.id())
    }
}
