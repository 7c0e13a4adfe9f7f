//! Whether rows keep to a policy.
//!
//! | a row of a file | is |
//! |---|---|
//! | whose profile is allowed | taken |
//! | whose profile is forbidden, of a file that is new, or had another profile | refused |
//! | whose profile was forbidden already, with the same content | taken: names, modes, owners, attributes may change, and it is settled |
//! | the same, and the file is opened | taken: it may be brought to another profile |
//! | the same, with other content, of a file that an earlier turn left open | taken: it is what a crash left, or what was written before the policy came |
//! | the same, with other content | refused |
//!
//! So what is there can be read, moved, removed, recovered and brought to an allowed profile, and not written.

use super::{Policy, Subject};
use lamassu_anchor::row::FileRow;
use lamassu_anchor::table::{Change, Space, Table};
use lamassu_anchor::{AnchorError, ObjectId, Row, VaultRow};
use lamassu_format::{Digest, Profile};
use lamassu_rpc::limits::{Forbidden, Limits};
use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

/// What becomes of changes.
#[derive(Debug, PartialEq, Eq)]
pub enum Judged {
    /// They may be committed. These files of forbidden profiles are opened by them: their keys.
    Good(Vec<Vec<u8>>),
    /// A rule forbids them.
    Forbidden(Forbidden),
    /// They are no rows of this vault, or change what a vault keeps for good.
    Nonsense,
}

/// Whether two rows in turn are of the same content. A file of one page may have two roots, as it was written and as it
/// is settled, and goes from the one to the other, or to either alone; what its blocks come to is learnt later.
fn has_same_content(before: &FileRow, after: &FileRow) -> bool {
    let FileRow { root, size, profile, twin, blocks: _, open: _ } = after;
    let is_known = |root: &Digest| *root == before.root || before.twin.as_ref() == Some(root);
    (*size, *profile) == (before.size, before.profile) && is_known(root) && twin.as_ref().is_none_or(is_known)
}

/// Judges changes of a table before they are made. `limits`: each of them will do. `opened`: the files of forbidden
/// profiles that were opened in this turn.
///
/// # Errors
/// Those of the table.
pub fn judge(
    table: &dyn Table,
    vault: &VaultRow,
    changes: &[Change],
    limits: &[Arc<Limits>],
    opened: &HashSet<Vec<u8>>,
) -> Result<Judged, AnchorError> {
    let mut opens = Vec::new();
    let allows_all = limits.iter().any(|limits| limits.is_empty());
    for Change { space, key, value } in changes {
        match (space, value) {
            (Space::Vault, Some(row)) => {
                let Ok(row) = VaultRow::decode(row) else { return Ok(Judged::Nonsense) };
                if (row.vault, row.suite, row.domain) != (vault.vault, vault.suite, vault.domain) {
                    return Ok(Judged::Nonsense);
                }
            }
            (Space::Vault, None) => return Ok(Judged::Nonsense),
            (Space::Objects, Some(row)) => {
                let Ok(row) = Row::decode(row) else { return Ok(Judged::Nonsense) };
                let Some(file) = row.file().filter(|_| !allows_all) else { continue };
                let Some(forbidden) = forbidden(limits, file.profile) else { continue };
                let before = table.get(Space::Objects, key)?.map(|bytes| Row::decode(&bytes)).transpose()?;
                let before = before.as_ref().and_then(Row::file).filter(|before| before.profile == file.profile);
                let Some(before) = before else { return Ok(Judged::Forbidden(forbidden)) };
                let was_left_open = before.open.is_some() && !opened.contains(key);
                if !has_same_content(before, file) && !was_left_open {
                    return Ok(Judged::Forbidden(forbidden));
                }
                if before.open.is_none() && file.open.is_some() {
                    opens.push(key.clone());
                }
            }
            _ => {}
        }
    }
    Ok(Judged::Good(opens))
}

/// Why none of these limits allows a profile, as the first has it.
fn forbidden(limits: &[Arc<Limits>], profile: Profile) -> Option<Forbidden> {
    let is_forbidden = |limits: &Arc<Limits>| limits.forbids(profile).is_some();
    let first = limits.first()?.forbids(profile)?;
    limits.iter().all(is_forbidden).then(|| first.clone())
}

/// The files whose profiles a policy forbids; `found` ends it by breaking.
///
/// # Errors
/// Those of the table; [`AnchorError::Damaged`].
pub fn violations(
    table: &dyn Table,
    (policy, subject): (&Policy, &Subject),
    mut found: impl FnMut(ObjectId, Profile, &Forbidden) -> ControlFlow<()>,
) -> Result<(), AnchorError> {
    let limits = policy.limits(subject);
    if limits.is_empty() {
        return Ok(());
    }
    let mut done = Ok(());
    table.scan(Space::Objects, &[], &mut |key, value| {
        let row = match Row::decode(value) {
            Ok(row) => row,
            Err(error) => {
                done = Err(error);
                return ControlFlow::Break(());
            }
        };
        let Some(profile) = row.file().map(|file| file.profile) else { return ControlFlow::Continue(()) };
        let object = key.try_into().map_or(ObjectId(0), |key| ObjectId(u64::from_be_bytes(key)));
        limits.forbids(profile).map_or(ControlFlow::Continue(()), |forbidden| found(object, profile, forbidden))
    })?;
    done
}
