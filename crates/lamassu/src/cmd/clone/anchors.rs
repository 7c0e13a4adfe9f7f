//! The anchors of a copy: begun as copies of the original's, since its ciphertext is the same.

use super::{Original, Top};
use crate::fault::Result;
use crate::output::Ui;
use crate::{anchor_place, open, text};
use lamassu_anchor::Anchor;
use lamassu_anchor::export::Rights;
use lamassu_anchor::table::DiskTable;
use lamassu_format::header::VaultHeader;
use lamassu_format::name;
use lamassu_host::anchors::{self, Access, Choice, CopiedDatasets, Made};
use lamassu_keys::{Unlocked, header_file};
use lamassu_store::Backend as _;
use lamassu_store::backend::Privileges;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Original {
    /// The tables of the original's anchor, if it has one, and that its header and history are the newest. A mount that
    /// is frozen has made everything durable in them.
    pub(super) fn anchor(&self, ui: &Ui, header: &VaultHeader, keys: &Unlocked) -> Result<Option<Arc<DiskTable>>> {
        if !header.is_anchored() {
            return Ok(None);
        }
        if *ui.policy.anchors.choice() == Choice::Unverified {
            return Err(lamassu_host::Error::UnverifiedWrite.into());
        }
        let id = header.id();
        let (_, table) = ui.policy.anchors.look(&id)?;
        let table = Arc::new(table);
        let anchor = Anchor::open(table.clone(), &id).map_err(lamassu_host::Error::from)?;
        anchors::check(&anchor, Access::Read, header, keys, &self.dir)?;
        // A store that was put back whole. Files are copied as they lie there: those that are not the newest are not in
        // the copy either, by its anchor.
        let (root, ring) = (open::backend(&self.dir)?.root(), keys.key_ring(header.suite())?);
        lamassu_vault::verify_sessions(&*root, &ring, &id, anchor.vault().session)?;
        Ok(Some(table))
    }

    /// The copy's own: the same objects, and names, as its ciphertext is the same.
    pub(super) fn copy_anchor(
        &self,
        ui: &Ui,
        of: &DiskTable,
        copy: &VaultHeader,
        top: &Top,
        privileges: Privileges,
    ) -> Result<Made> {
        let rights = match privileges {
            Privileges::Kept => Rights::Kept,
            Privileges::Dropped => Rights::Dropped,
        };
        let anchors = &ui.policy.anchors;
        let file = anchors.file_for_new(&copy.id(), Some(&self.header.id()))?;
        anchor_place::check(&file, &top.path())?;
        Ok(anchors.make_copy(of, copy.id(), rights, &file, &top.path())?)
    }

    /// Those of the datasets in it, which keep their ids. Their headers are not authenticated: one that names another
    /// vault gets a copy that nothing leads to.
    pub(super) fn copy_anchors_below(&self, ui: &Ui, copy: &VaultHeader) -> Result<CopiedDatasets> {
        let mut ids = BTreeSet::new();
        if copy.is_anchored() && copy.has_datasets() {
            for stored in lamassu_vault::datasets_below(&self.dir)? {
                let header = header_file::read::<VaultHeader>(&self.dir.join(stored).join(name::HEADER));
                ids.extend(header.ok().filter(VaultHeader::is_anchored).map(|header| header.id()));
            }
        }
        let copied = ui.policy.anchors.copy_datasets(&ids, &copy.id())?;
        for id in &copied.missing {
            ui.warn(format_args!("the dataset {} has no anchor on this host, and its copy gets none", text::hex(id)));
        }
        Ok(copied)
    }
}
