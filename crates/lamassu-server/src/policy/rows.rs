//! Whether rows comply with a policy.
//!
//! | a row of a file | is |
//! |---|---|
//! | with an allowed profile | accepted |
//! | with a forbidden profile, of a file that is new, or had another profile | refused |
//! | with a profile that was forbidden already, and the same content | accepted: names, modes, owners and attributes may change, and the file may be settled |
//! | the same, and the file is opened | accepted: it may be converted to another profile |
//! | the same, with other content, of a file that an earlier turn left open | accepted: a crash left it, or it was written before the policy came |
//! | the same, with other content | refused |
//!
//! So existing files can be read, moved, removed, recovered and converted to an allowed profile, but not written.

use super::{Policy, Subject};
use lamassu_anchor::row::FileRow;
use lamassu_anchor::table::{Change, Space, Table};
use lamassu_anchor::{AnchorError, ObjectId, ObjectKind, Row, VaultRow, export};
use lamassu_format::{Digest, Profile};
use lamassu_rpc::limits::{Forbidden, Limits};
use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

/// The decision on changes.
#[derive(Debug, PartialEq, Eq)]
pub enum Judged {
    /// The changes may be committed. The keys of the files with forbidden profiles that they open.
    Good(Vec<Vec<u8>>),
    /// A rule forbids them.
    Forbidden(Forbidden),
    /// They are not rows of this vault, or change what a vault keeps for good.
    Nonsense,
}

/// Whether two successive rows have the same content. A file of one page may have two roots, the one as written and the
/// one as settled. It changes from one to the other, or to either alone; the count of blocks becomes known later.
fn has_same_content(before: &FileRow, after: &FileRow) -> bool {
    let FileRow { root, size, profile, twin, blocks: _, open: _ } = after;
    let is_known = |root: &Digest| *root == before.root || before.twin.as_ref() == Some(root);
    (*size, *profile) == (before.size, before.profile) && is_known(root) && twin.as_ref().is_none_or(is_known)
}

/// The most by which one commit raises what a vault counts: so no host can use the numbers up for the others.
const STEP_MAX: u64 = u32::MAX as u64;

/// Whether a vault's row may come after another one. What it counts goes up. Otherwise numbers would be given twice;
/// and a host with an older copy would pass for one with a newer.
fn follows(before: &VaultRow, after: &VaultRow) -> bool {
    let kept = |row: &VaultRow| (row.vault, row.suite, row.domain);
    let counts = |row: &VaultRow| [row.revision.0, row.next_object.0, row.next_intent];
    let may_go = |(before, after): (u64, u64)| after.checked_sub(before).is_some_and(|step| step <= STEP_MAX);
    kept(after) == kept(before)
        && after.revision > before.revision
        && counts(before).into_iter().zip(counts(after)).all(may_go)
}

/// Judges changes of a table before they are made. They comply if any of `limits` allows them. `opened`: the files of
/// forbidden profiles that were opened in this turn.
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
    // One row that no anchor has written would make the whole anchor useless, to hosts and in a backup.
    let is_row = |Change { space, key, value }: &Change| {
        value.as_ref().is_none_or(|value| export::is_row_of(vault, *space, key, value))
    };
    if !changes.iter().all(is_row) {
        return Ok(Judged::Nonsense);
    }
    let root = ObjectId::ROOT.0.to_be_bytes();
    for Change { space, key, value } in changes {
        match (space, value) {
            (Space::Vault, Some(row)) => {
                let Ok(row) = VaultRow::decode(row) else { return Ok(Judged::Nonsense) };
                if !follows(vault, &row) {
                    return Ok(Judged::Nonsense);
                }
            }
            (Space::Vault, None) => return Ok(Judged::Nonsense),
            // Without its root no host can open the vault.
            (Space::Objects, None) if *key == root => return Ok(Judged::Nonsense),
            (Space::Objects, Some(row)) => {
                let Ok(row) = Row::decode(row) else { return Ok(Judged::Nonsense) };
                if *key == root && row.kind() != ObjectKind::Dir {
                    return Ok(Judged::Nonsense);
                }
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

/// The vault's row after these changes, if they change it.
pub fn vault_row(changes: &[Change]) -> Option<VaultRow> {
    let last = changes.iter().rev().find(|change| change.space == Space::Vault)?;
    last.value.as_deref().and_then(|value| VaultRow::decode(value).ok())
}

/// The first reason against a profile, unless some of these limits allow it.
fn forbidden(limits: &[Arc<Limits>], profile: Profile) -> Option<Forbidden> {
    let is_forbidden = |limits: &Arc<Limits>| limits.forbids(profile).is_some();
    let first = limits.first()?.forbids(profile)?;
    limits.iter().all(is_forbidden).then(|| first.clone())
}

/// Calls `found` for the files whose profiles a policy forbids, until it breaks.
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
