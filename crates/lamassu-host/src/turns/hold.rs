//! Turns for requests of commands.

use crate::{Error, Result};
use lamassu_vault::forest::{Number, State, member_of, root_of};
use lamassu_vault::turns::{Need, TOGETHER, Turns, Use};
use lamassu_vault::{EntryRef, FileSystem, Forest, Ino, Vault, VaultError};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Instant;

/// Waits until this host holds the vault of an inode as a request needs it, and keeps it while the result is alive.
/// `None`: it is not used by turns, or there will be no further turn. If no turn can be taken now, the result has no
/// open vault.
///
/// A thread that holds a vault must not wait for it again: the second wait may be for the next turn. If it holds
/// several, then a vault before the datasets in it; and it does not keep the outer one for long while it waits for the
/// inner one, which another host may have frozen.
pub(crate) fn hold(forest: &Forest, ino: Ino, need: Need) -> Option<Use> {
    held(&forest.join_turns(ino)?, need)
}

/// Why [`hold`] gave no open vault of a member: there is no key, or `no_turn`.
pub(crate) fn why_away(forest: &Forest, member: Number, no_turn: Error) -> Error {
    let state = forest.member(member).map(|member| member.state);
    match state {
        Ok(State::Locked | State::Unloaded) => VaultError::KeyNotLoaded.into(),
        _ if !forest.hosts_take_turns() => VaultError::KeyNotLoaded.into(),
        _ => no_turn,
    }
}

/// The same for the attributes of an inode.
pub(crate) fn hold_shown(forest: &Forest, ino: Ino, need: Need) -> Option<Use> {
    held(&forest.turns_that_show(ino)?, need)
}

/// The same, unless it takes long: another host may have frozen the vault.
pub(crate) fn hold_shown_soon(forest: &Forest, ino: Ino, need: Need) -> Option<Use> {
    wait_for(&forest.turns_that_show(ino)?, need, Some(Instant::now() + TOGETHER)).ok()?
}

fn held(turns: &Arc<Turns>, need: Need) -> Option<Use> {
    wait_for(turns, need, None).ok()?
}

/// The dataset cannot be had soon.
struct Late(Arc<Turns>);

/// The same for who holds a vault around it.
fn hold_inside(forest: &Forest, ino: Ino, need: Need) -> std::result::Result<Option<Use>, Late> {
    let Some(turns) = forest.join_turns(ino) else { return Ok(None) };
    wait_for(&turns, need, Some(Instant::now() + TOGETHER))
}

fn wait_for(turns: &Arc<Turns>, need: Need, until: Option<Instant>) -> std::result::Result<Option<Use>, Late> {
    let (given, got) = mpsc::sync_channel(1);
    turns.run_until(until, need, move |held| drop(given.send(held)));
    match got.recv() {
        Ok(None) => Err(Late(turns.clone())),
        Ok(held) => Ok(held),
        Err(_) => Ok(None),
    }
}

/// Holds the vaults through which a plain path below the root of a member leads.
///
/// # Errors
/// Those of resolving the path.
pub(crate) fn hold_along(forest: &Arc<Forest>, member: Number, path: &Path, need: Need) -> Result<Vec<Use>> {
    if !forest.hosts_take_turns() {
        return Ok(Vec::new());
    }
    loop {
        match try_along(forest, member, path, need)? {
            Ok(held) => return Ok(held),
            // Nothing else is held meanwhile.
            Err(Late(turns)) => drop(held(&turns, need)),
        }
    }
}

fn try_along(
    forest: &Arc<Forest>,
    member: Number,
    path: &Path,
    need: Need,
) -> Result<std::result::Result<Vec<Use>, Late>> {
    let mut at = member;
    let mut held: Vec<_> = hold(forest, root_of(at), need).into_iter().collect();
    let mut reached = PathBuf::new();
    for name in path {
        reached.push(name);
        let entry = EntryRef::new(forest.clone(), forest.resolve_from(member, reached.as_os_str())?);
        if member_of(entry.ino()) != at {
            at = member_of(entry.ino());
            match hold_inside(forest, entry.ino(), need) {
                Ok(inside) => held.extend(inside),
                Err(late) => return Ok(Err(late)),
            }
        }
    }
    Ok(Ok(held))
}

/// Holds the dataset at a path in the store of `above`, which the caller holds.
///
/// # Errors
/// Those of finding it; [`Error::NoTurn`] if it cannot be had soon: the caller must let go of `above` first.
pub(crate) fn hold_stored(
    forest: &Arc<Forest>,
    (member, above): (Number, &Vault),
    stored: &Path,
    need: Need,
) -> Result<Option<Use>> {
    if !forest.hosts_take_turns() {
        return Ok(None);
    }
    let plain = above.plain_path(stored)?;
    let entry = EntryRef::new(forest.clone(), forest.resolve_from(member, plain.as_os_str())?);
    hold_inside(forest, entry.ino(), need).map_err(|_| Error::NoTurn)
}
