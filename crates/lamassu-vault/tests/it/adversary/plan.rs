//! A life of a vault: random steps, and all that it showed after each of them.

use super::oracle::{Ack, History, Moment, State};
use super::store::Dice;
use super::walk::{NAMES, Tally, walk};
use crate::common::anchored::{anchor, fsync, fsync_dir, in_dir, tried};
use crate::common::keyed::rebuilt;
use crate::common::{Quiet, RW, Recipe, me, n, options};
use lamassu_anchor::VaultRow;
use lamassu_anchor::table::{Change, Space, Table};
use lamassu_format::root::RootRecord;
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
    /// Whether there is a tree over the blocks of files, too.
    pub has_blocks: bool,
}

impl Place {
    /// An empty vault, whose root has permissions of its own.
    fn make(&self) {
        let (header, ring) = (self.recipe.header(), self.recipe.ring());
        Vault::make_tree(&*self.backend, &header, &ring).unwrap();
        let Owner { uid, gid, .. } = me();
        create_root_record(&*self.backend.root(), &ring, RootRecord { mode: 0o755, uid, gid }).unwrap();
        if let Some(table) = &self.table {
            let (made, left_out) = rebuilt(&self.recipe, &self.backend, table);
            assert_eq!((made.objects, left_out.len()), (1, 0));
            let mut row = VaultRow::decode(&table.get(Space::Vault, b"vault").unwrap().unwrap()).unwrap();
            row.blocks = self.has_blocks;
            let change = Change { space: Space::Vault, key: b"vault".to_vec(), value: Some(row.encode()) };
            table.commit(&[change]).unwrap();
        }
    }

    /// Opens it by two keys, of which the older one was the only one at first.
    pub fn open(&self, read_only: bool) -> Result<Vault> {
        self.open_by(&[2, 1], read_only)
    }

    fn open_by(&self, outer: &[u8], read_only: bool) -> Result<Vault> {
        let anchor = self.table.as_ref().map(|table| anchor(&self.recipe, table));
        let ring = self.recipe.ring_of_epochs(&[1], outer);
        Vault::open(self.backend.clone(), &self.recipe.header(), ring, Options { anchor, ..options(read_only) })
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
    let is_new = place.backend.root().read_dir().unwrap().is_empty();
    if is_new {
        place.make();
    }
    let mut vault = place.open_by(if is_new { &[1] } else { &[2, 1] }, false).unwrap();
    let (mut history, mut told, mut held) = (History::default(), Vec::new(), Vec::new());
    // What an earlier life left open is recovered when it is looked at.
    let seen = state(&vault, &history);
    vault.sync_all().unwrap();
    history.push(moment(), seen, Ack::Everything);
    for number in 0..steps {
        if dice.roll(16) == 0 {
            told.push("opened again".to_owned());
            vault.close().unwrap();
            held.clear();
            vault = place.open(false).unwrap();
            let state = state(&vault, &history);
            history.push(moment(), state, Ack::Everything);
            continue;
        }
        let there = history.last().map(State::paths).unwrap_or_default();
        let (step, ack) = step(&vault, dice, number as u64, &there, &mut held);
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

/// Where something is to be done: mostly where something is.
fn path(dice: &mut Dice, there: &[String]) -> String {
    if !there.is_empty() && dice.roll(3) > 0 {
        return dice.of(there).clone();
    }
    let mut name = || NAMES[if dice.roll(12) == 0 { 3 } else { dice.roll(3) }];
    let (first, second) = (name(), name());
    if dice.roll(3) == 0 { first.to_owned() } else { format!("{first}/{second}") }
}

/// Files that are kept open.
type Held = Vec<(Ino, HandleId)>;

/// Bytes that nothing else has. Those of a third of the steps do not compress.
fn bytes(number: u64, len: usize) -> Vec<u8> {
    let word = |at: u64| (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left((at % 64) as u32);
    let mut noise = Dice(number);
    let byte = |at: u64| if number.is_multiple_of(3) { noise.roll(256) as u8 } else { word(at) as u8 };
    (0..len as u64).map(byte).map(|byte| byte | 1).collect()
}

/// Takes a step. One that cannot be taken where it fell is not.
fn step(v: &Vault, dice: &mut Dice, number: u64, there: &[String], held: &mut Held) -> (String, Ack) {
    let is_making = number < MAKING;
    // At first something is made, for the rest to be done to.
    let kind = if is_making { *dice.of(&[2, 4, 4, 6, 19, 19, 19, 19]) } else { dice.roll(32) };
    let (one, other) = (path(dice, if is_making { &[] } else { there }), path(dice, there));
    let (offset, len) = (*dice.of(&[0, 0, 0, 100, 5000, 20_000, 260_000]), *dice.of(&[10, 700, 4096, 9000, 30_000]));
    let told = format!("{number}: {kind} {one} {other} {offset} {len}").replace(NAMES[3], "LONG");
    let mut hand = Hand { v, dice, held, number, offset, len };
    let ack = match hand.anywhere(kind) {
        Some(ack) => ack,
        None => hand.at(kind, &one, &other),
    };
    (told, ack)
}

/// Whoever takes a step.
struct Hand<'a> {
    v: &'a Vault,
    dice: &'a mut Dice,
    held: &'a mut Held,
    number: u64,
    /// Of what is written.
    offset: u64,
    len: usize,
}

impl Hand<'_> {
    /// A step that is not of a path.
    fn anywhere(&mut self, kind: usize) -> Option<Ack> {
        let v = self.v;
        match (kind, self.dice.roll(8)) {
            (0, _) => {
                v.sync_all().unwrap();
                return Some(Ack::Everything);
            }
            (1, 0..4) => v.maintain().unwrap(),
            (1, _) => {
                let done = v.rekey(Rekey::Outer, None, &Quiet).unwrap();
                assert!(done.complete && done.failed == 0, "{done:?}");
            }
            (14..17, 0) => tried(v.set_xattr(ROOT, n("user.one"), &bytes(self.number, 20), SetXattr::Any)),
            (17, 0..4) => self.set_mode(ROOT, &[0o711, 0o750, 0o755]),
            (25..28, _) if !self.held.is_empty() => {
                let file = self.held.swap_remove(self.dice.roll(self.held.len()));
                // What is written to a file without a name is seen by nobody, until a crash has the name back.
                if v.getattr(file.0, Some(file.1)).unwrap().nlink > 0 {
                    return Some(self.write(file));
                }
                v.release(file.1).unwrap();
            }
            _ => return None,
        }
        Some(Ack::Nothing)
    }

    fn at(&mut self, kind: usize, one: &str, other: &str) -> Ack {
        let v = self.v;
        let Some((dir, name)) = in_dir(v, one) else { return Ack::Nothing };
        let found = v.lookup(dir, n(name)).ok().map(|entry| entry.attr);
        match (kind, found) {
            (14..17, Some(Attr { ino, kind: Kind::File | Kind::Dir, .. })) => self.attribute(ino),
            (17, Some(found)) => self.set_mode(found.ino, &[0o600, 0o640, 0o700]),
            (18, Some(found)) => {
                let uid = Some(1 + self.number as u32);
                tried(v.setattr(found.ino, None, &SetAttr { uid, ..SetAttr::default() }).map(drop));
            }
            (19..22, None) => {
                if let Ok((entry, handle)) = v.create(dir, n(name), 0o644, RW, me()) {
                    return self.write((entry.attr.ino, handle));
                }
            }
            (19..28, Some(Attr { ino, kind: Kind::File, size, .. })) => return self.file(kind, ino, size),
            (28..30, Some(Attr { ino, kind: Kind::File, .. })) => {
                fsync(v, one);
                return Ack::File(ino);
            }
            (28..32, _) => {
                let (parent, _) = one.rsplit_once('/').unwrap_or_default();
                fsync_dir(v, parent);
                return Ack::Dir(dir);
            }
            _ => self.name(kind, (dir, name), found, other),
        }
        Ack::Nothing
    }

    /// Makes, moves and removes.
    fn name(&mut self, kind: usize, (dir, name): (Ino, &str), found: Option<Attr>, other: &str) {
        let (v, name, other) = (self.v, n(name), in_dir(self.v, other));
        match (kind, found, other) {
            (2..4, ..) => {
                let times = if self.dice.roll(4) == 0 { 1500 } else { 5 };
                tried(v.symlink(dir, name, self.number.to_string().repeat(times).as_bytes(), me()).map(drop));
            }
            (4..6, ..) => tried(v.mkdir(dir, name, 0o755, me()).map(drop)),
            (6, ..) => tried(v.mknod(dir, name, Kind::Fifo, 0o600, 0, me()).map(drop)),
            (7, Some(Attr { kind: Kind::Dir, .. }), _) => tried(v.rmdir(dir, name)),
            (7..9, ..) => tried(v.unlink(dir, name)),
            (9..13, _, Some((to, to_name))) => {
                let modes = [RenameMode::Replace, RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange];
                tried(v.rename(dir, name, to, n(to_name), *self.dice.of(&modes)));
            }
            (13, Some(file), Some((to, to_name))) => tried(v.link(file.ino, to, n(to_name)).map(drop)),
            _ => {}
        }
    }

    fn attribute(&mut self, ino: Ino) {
        let name = [n("user.one"), n("user.two")][self.dice.roll(2)];
        tried(match self.dice.roll(4) {
            0 => self.v.remove_xattr(ino, name),
            _ => self.v.set_xattr(ino, name, &bytes(self.number, 20), SetXattr::Any),
        });
    }

    fn set_mode(&mut self, ino: Ino, modes: &[u32]) {
        let mode = Some(*self.dice.of(modes));
        tried(self.v.setattr(ino, None, &SetAttr { mode, ..SetAttr::default() }).map(drop));
    }

    fn file(&mut self, kind: usize, ino: Ino, size: u64) -> Ack {
        let v = self.v;
        let handle = v.open_file(ino, RW).unwrap();
        match kind {
            19 => {
                let size = Some(self.dice.roll(size as usize + 1) as u64);
                v.setattr(ino, Some(handle), &SetAttr { size, ..SetAttr::default() }).unwrap();
            }
            20 => v.fallocate(handle, Fallocate::Punch, self.offset, self.len as u64).unwrap(),
            _ => return self.write((ino, handle)),
        }
        v.release(handle).unwrap();
        Ack::Nothing
    }

    /// One write, and sometimes an fsync behind it. Of a file that stays open the anchor keeps the sessions.
    fn write(&mut self, file: (Ino, HandleId)) -> Ack {
        let (v, (ino, handle)) = (self.v, file);
        assert_eq!(v.write(handle, self.offset, &bytes(self.number, self.len)).unwrap(), self.len);
        let is_synced = self.dice.roll(2) == 0;
        match is_synced {
            true => v.fsync(handle, false).unwrap(),
            false => v.flush(handle).unwrap(),
        }
        match self.dice.roll(3) {
            0 => v.release(handle).unwrap(),
            _ => self.held.push(file),
        }
        if is_synced { Ack::File(ino) } else { Ack::Nothing }
    }
}
