//! A life of a vault: random steps, and all that it showed after each of them.

use super::oracle::{Ack, History, Moment, State};
use super::store::Dice;
use super::walk::{NAMES, Tally, walk};
use crate::common::anchored::{fsync, fsync_dir, in_dir, open_anchored, tried};
use crate::common::{RW, Recipe, me, n};
use lamassu_anchor::table::Table;
use lamassu_store::Backend;
use lamassu_vault::*;
use std::sync::Arc;

/// So many steps of a life make something.
const MAKING: u64 = 12;

/// Where a vault lies, and whether an anchor knows of it.
pub struct Place {
    pub recipe: Recipe,
    pub backend: Arc<dyn Backend>,
    pub table: Option<Arc<dyn Table>>,
}

impl Place {
    pub fn open(&self, read_only: bool) -> Result<Vault> {
        match (&self.table, read_only) {
            (Some(table), _) => open_anchored(&self.recipe, &self.backend, table, read_only),
            (None, false) => self.recipe.open(&self.backend),
            (None, true) => self.recipe.open_read_only(&self.backend),
        }
    }
}

/// What a life was.
pub struct Lived {
    /// Still open where it was not closed.
    pub vault: Vault,
    pub is_closed: bool,
    pub history: History,
    pub steps: Vec<String>,
}

/// Lives: makes a vault where there is none, and takes so many steps. `moment` tells when it is, and is called after
/// each step.
pub fn live(place: &Place, dice: &mut Dice, steps: usize, moment: &mut dyn FnMut() -> Moment) -> Lived {
    if place.backend.root().read_dir().unwrap().is_empty() {
        Vault::make_tree(&*place.backend, &place.recipe.header(), &place.recipe.ring()).unwrap();
    }
    let mut vault = place.open(false).unwrap();
    let (mut history, mut told) = (History::default(), Vec::new());
    // What an earlier life left open is recovered when it is looked at.
    let seen = state(&vault, &history);
    vault.sync_all().unwrap();
    history.push(moment(), seen, Ack::Everything);
    for number in 0..steps {
        if dice.roll(16) == 0 {
            told.push("opened again".to_owned());
            vault.close().unwrap();
            vault = place.open(false).unwrap();
            let state = state(&vault, &history);
            history.push(moment(), state, Ack::Everything);
            continue;
        }
        let (step, ack) = step(&vault, dice, number as u64);
        // What a look at it has the vault do is part of the step.
        let state = state(&vault, &history);
        told.push(step);
        history.push(moment(), state, ack);
    }
    let is_closed = dice.roll(3) == 0;
    if is_closed {
        let state = state(&vault, &history);
        vault.close().unwrap();
        history.push(moment(), state, Ack::Everything);
    }
    Lived { vault, is_closed, history, steps: told }
}

fn state(v: &Vault, history: &History) -> State {
    State::of(&walk(v, &mut Tally::default()).unwrap(), history.last())
}

fn path(dice: &mut Dice) -> String {
    let mut name = || NAMES[if dice.roll(12) == 0 { 3 } else { dice.roll(3) }];
    let (first, second) = (name(), name());
    if dice.roll(3) == 0 { first.to_owned() } else { format!("{first}/{second}") }
}

/// Bytes that nothing else has.
fn bytes(number: u64, len: usize) -> Vec<u8> {
    let words =
        (0..len as u64).map(|at| (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left((at % 64) as u32));
    words.map(|word| word as u8 | 1).collect()
}

/// Takes a step. One that cannot be taken where it fell is not.
fn step(v: &Vault, dice: &mut Dice, number: u64) -> (String, Ack) {
    // At first something is made, for the rest to be done to.
    let kind = if number < MAKING { *dice.of(&[2, 4, 4, 6, 19, 19, 19, 19]) } else { dice.roll(32) };
    let (one, other) = (path(dice), path(dice));
    let (offset, len) = (*dice.of(&[0, 0, 100, 5000, 20_000, 260_000]), *dice.of(&[10, 700, 4096, 9000, 30_000]));
    let mode = *dice.of(&[RenameMode::Replace, RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange]);
    let told = format!("{number}: {kind} {one} {other} {offset} {len} {mode:?}").replace(NAMES[3], "LONG");
    match kind {
        0 => {
            v.sync_all().unwrap();
            return (told, Ack::Everything);
        }
        1 => v.maintain().unwrap(),
        _ => {}
    }
    let Some((dir, name)) = in_dir(v, &one) else { return (told, Ack::Nothing) };
    let name = n(name);
    let found = v.lookup(dir, name).ok().map(|entry| entry.attr);
    match (kind, found) {
        (2..4, _) => {
            let target = format!("{number}").repeat(if dice.roll(4) == 0 { 1500 } else { 5 });
            tried(v.symlink(dir, name, target.as_bytes(), me()).map(drop));
        }
        (4..6, _) => tried(v.mkdir(dir, name, 0o755, me()).map(drop)),
        (6, _) => tried(v.mknod(dir, name, Kind::Fifo, 0o600, 0, me()).map(drop)),
        (7, Some(Attr { kind: Kind::Dir, .. })) => tried(v.rmdir(dir, name)),
        (7..9, _) => tried(v.unlink(dir, name)),
        (9..13, _) => {
            if let Some((to, to_name)) = in_dir(v, &other) {
                tried(v.rename(dir, name, to, n(to_name), mode));
            }
        }
        (13, Some(file)) => {
            if let Some((to, to_name)) = in_dir(v, &other) {
                tried(v.link(file.ino, to, n(to_name)).map(drop));
            }
        }
        (14..17, Some(Attr { ino, kind: Kind::File | Kind::Dir, .. })) => {
            let attribute = n(*dice.of(&["user.one", "user.two"]));
            tried(match dice.roll(4) {
                0 => v.remove_xattr(ino, attribute),
                _ => v.set_xattr(ino, attribute, &bytes(number, 20), SetXattr::Any),
            });
        }
        (17, Some(found)) => {
            let mode = Some(*dice.of(&[0o600, 0o640, 0o700]));
            tried(v.setattr(found.ino, None, &SetAttr { mode, ..SetAttr::default() }).map(drop));
        }
        (18, Some(found)) => {
            let uid = Some(1 + number as u32);
            tried(v.setattr(found.ino, None, &SetAttr { uid, ..SetAttr::default() }).map(drop));
        }
        (19..22, None) => {
            if let Ok((entry, handle)) = v.create(dir, name, 0o644, RW, me()) {
                return (told, write(v, entry.attr.ino, handle, dice, offset, &bytes(number, len)));
            }
        }
        (19..28, Some(Attr { ino, kind: Kind::File, size, .. })) => {
            let handle = v.open_file(ino, RW).unwrap();
            match kind {
                19 => {
                    let size = Some(dice.roll(size as usize + 1) as u64);
                    v.setattr(ino, Some(handle), &SetAttr { size, ..SetAttr::default() }).unwrap();
                    v.release(handle).unwrap();
                }
                20 => {
                    v.fallocate(handle, Fallocate::Punch, offset as u64, len as u64).unwrap();
                    v.release(handle).unwrap();
                }
                _ => return (told, write(v, ino, handle, dice, offset, &bytes(number, len))),
            }
        }
        (28..30, Some(Attr { ino, kind: Kind::File, .. })) => {
            fsync(v, &one);
            return (told, Ack::File(ino));
        }
        (28..32, _) => {
            let (parent, _) = one.rsplit_once('/').unwrap_or_default();
            fsync_dir(v, parent);
            return (told, Ack::Dir(dir));
        }
        _ => {}
    }
    (told, Ack::Nothing)
}

/// One write, and sometimes an fsync behind it.
fn write(v: &Vault, file: Ino, handle: HandleId, dice: &mut Dice, offset: usize, bytes: &[u8]) -> Ack {
    assert_eq!(v.write(handle, offset as u64, bytes).unwrap(), bytes.len());
    let is_synced = dice.roll(3) == 0;
    match is_synced {
        true => v.fsync(handle, false).unwrap(),
        false => v.flush(handle).unwrap(),
    }
    v.release(handle).unwrap();
    if is_synced { Ack::File(file) } else { Ack::Nothing }
}
