//! The parts of a copied entry that give rights on the host, and whether they are kept.
//!
//! The store decides types, modes, owners and device numbers in a vault (`docs/threat-model.md`). A copy out of it,
//! above all by root, gives none of them effect unless it is told to.

use super::Meta;
use crate::fault::Fault;
use crate::output::Ui;
use lamassu_vault::Kind;
use std::cell::Cell;

/// Whether set-id bits, device nodes, owners, and attributes that give privilege are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grants {
    /// They are kept: the source is trusted with them.
    Kept,
    /// They are left out. Modes lose this mask; an existing directory stays as it is.
    LeftOut { mask: u32 },
}

/// How much was left out.
#[derive(Debug, Default)]
pub struct LeftOut {
    set_id: Cell<u64>,
    attributes: Cell<u64>,
    owners: Cell<u64>,
}

/// Whether an attribute is one of users, or an access control list, which gives no more than the mode's group bits,
/// since the mode is set after it. Other attributes belong to their own system, or give privilege.
pub fn is_harmless(attribute: &[u8]) -> bool {
    attribute.starts_with(b"user.") || attribute.starts_with(b"system.posix_acl_")
}

impl Grants {
    /// The mode an entry gets.
    pub fn mode(self, meta: &Meta, left_out: &LeftOut) -> u32 {
        match self {
            Grants::Kept => meta.mode,
            Grants::LeftOut { mask } => {
                // On a directory they give no rights, so there is nothing to report.
                if meta.kind != Kind::Dir && meta.mode & 0o6000 != 0 {
                    add(&left_out.set_id);
                }
                meta.mode & 0o777 & !mask
            }
        }
    }

    /// Whether an entry gets the owner that it has in the source.
    pub fn keeps_owner(self, meta: &Meta, left_out: &LeftOut) -> bool {
        let keeps = self == Grants::Kept;
        // Other users cannot change owners in any case.
        let user = rustix::process::geteuid();
        if !keeps && user.is_root() && meta.uid != user.as_raw() {
            add(&left_out.owners);
        }
        keeps
    }

    /// Whether an attribute is carried over.
    pub fn keeps_attribute(self, attribute: &[u8], left_out: &LeftOut) -> bool {
        let keeps = self == Grants::Kept || is_harmless(attribute);
        if !keeps {
            add(&left_out.attributes);
        }
        keeps
    }

    /// Refuses a device node whose device number would come from the store.
    pub fn check_kind(self, meta: &Meta) -> Result<(), Fault> {
        match (self, meta.kind) {
            (Grants::LeftOut { .. }, Kind::CharDevice | Kind::BlockDevice) => Err(Fault::DeviceNode),
            _ => Ok(()),
        }
    }
}

fn add(count: &Cell<u64>) {
    count.set(count.get() + 1);
}

impl LeftOut {
    /// Says once what was left out.
    pub fn tell(&self, ui: &Ui) {
        let counts = [
            (&self.set_id, "set-id bits of", "entries"),
            (&self.attributes, "", "attributes that may give privilege"),
            (&self.owners, "owners of", "entries, which are yours now"),
        ];
        let told: Vec<String> = counts
            .iter()
            .filter(|(count, ..)| count.get() > 0)
            .map(|(count, before, after)| format!("{before} {} {after}", count.get()).trim_start().to_owned())
            .collect();
        if !told.is_empty() {
            ui.warn(format_args!(
                "left out, since nothing vouches for what the store says there: {}; --trust-store takes them",
                told.join(", ")
            ));
        }
    }
}
