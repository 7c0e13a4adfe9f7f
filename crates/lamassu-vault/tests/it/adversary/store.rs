//! A store that means ill: it keeps all that it ever saw, and shows any mixture of it.

use super::walk::BLOCK;
use lamassu_store::backend::MemoryBackend;
use lamassu_store::backend::{Kind, RenameMode};
use lamassu_store::{Backend, BackendDir};
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::sync::Arc;

/// Numbers that are the same every time.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides.max(1)
    }

    pub fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.roll(all.len())]
    }
}

type Place = Vec<OsString>;

/// What it can do to one place.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// What lay there at an earlier time, with all below it; or nothing did.
    PutBack,
    /// The same without a new inode, where it is a file.
    PutBackContent,
    /// Pages and blocks of an earlier time, or of another file.
    PutBackPieces,
    /// Attributes of an earlier time, or of another object.
    PutBackAttributes,
    /// What lies or lay elsewhere, as a copy.
    Copy,
    /// What lies elsewhere, by another name of it.
    Link,
    Exchange,
    Move,
    Remove,
    Cut,
    Mode,
    /// Something of another kind.
    Kind,
}

const ACTS: [Act; 16] = [
    Act::PutBack,
    Act::PutBack,
    Act::PutBack,
    Act::PutBackContent,
    Act::PutBackContent,
    Act::PutBackPieces,
    Act::PutBackPieces,
    Act::PutBackAttributes,
    Act::Copy,
    Act::Link,
    Act::Exchange,
    Act::Move,
    Act::Remove,
    Act::Cut,
    Act::Mode,
    Act::Kind,
];

/// Makes of `store` a mixture of what it is and what it was, and says how.
pub fn mix(store: &MemoryBackend, before: &[Arc<MemoryBackend>], dice: &mut Dice) -> Vec<String> {
    let mut told = Vec::new();
    let is_put_back_whole = dice.roll(8) == 0;
    if is_put_back_whole {
        let older = dice.of(before);
        for name in names_in(&*store.root()).into_iter().chain(names_in(&*older.root())) {
            // Of an older record of sessions no writer goes on: what that hides is looked at every other time.
            if name == "lamassu.sessions" && dice.roll(2) == 0 {
                continue;
            }
            put(&older.root(), &name, &store.root(), &name);
        }
        told.push("all of it put back".to_owned());
    }
    let places = all_places(store, before, dice);
    let each = dice.roll(5) == 0;
    let acts = if is_put_back_whole { dice.roll(3) } else { 1 + dice.roll(4) };
    let chosen: Vec<&Place> = match each {
        true => places.iter().filter(|_| dice.roll(3) == 0).collect(),
        false => (0..acts.min(places.len() * 4)).map(|_| dice.of(&places)).collect(),
    };
    for place in chosen {
        let act = *dice.of(&ACTS);
        let other = dice.of(&places);
        let older = dice.of(before);
        if act_on(store, older, place, other, act, dice).is_ok() {
            told.push(format!("{act:?} {place:?} {other:?}"));
        }
    }
    told
}

/// What there is, and what there was at some time.
fn all_places(store: &MemoryBackend, before: &[Arc<MemoryBackend>], dice: &mut Dice) -> Vec<Place> {
    let mut places = Vec::new();
    places_in(&store.root(), &mut Vec::new(), &mut places);
    places_in(&dice.of(before).root(), &mut Vec::new(), &mut places);
    let mut known = HashSet::new();
    places.retain(|place| known.insert(place.clone()));
    places
}

/// By their inodes: stored names are other ones each time.
fn names_in(dir: &dyn BackendDir) -> Vec<OsString> {
    let mut entries = dir.read_dir().unwrap();
    entries.sort_by_key(|entry| entry.ino);
    entries.into_iter().map(|entry| entry.name).collect()
}

fn places_in(dir: &Arc<dyn BackendDir>, at: &mut Place, places: &mut Vec<Place>) {
    for name in names_in(&**dir) {
        at.push(name.clone());
        places.push(at.clone());
        if let Ok(below) = dir.open_dir(&name) {
            places_in(&below, at, places);
        }
        at.pop();
    }
}

/// The directory of a place, if it is there.
fn dir_of(store: &MemoryBackend, place: &Place) -> io::Result<Arc<dyn BackendDir>> {
    place[..place.len() - 1].iter().try_fold(store.root(), |dir, name| dir.open_dir(name))
}

/// What cannot be done in a place is not.
fn act_on(
    store: &MemoryBackend,
    older: &MemoryBackend,
    place: &Place,
    other: &Place,
    act: Act,
    dice: &mut Dice,
) -> io::Result<()> {
    let (dir, name) = (dir_of(store, place)?, &place[place.len() - 1]);
    let (source, other_name) = (dir_of(if dice.roll(2) == 0 { store } else { older }, other), &other[other.len() - 1]);
    match act {
        Act::PutBack => put(&dir_of(older, place)?, name, &dir, name),
        Act::PutBackContent => set_content(&dir, name, &content(&*dir_of(older, place)?, name)?)?,
        Act::PutBackPieces => {
            let from = if dice.roll(4) == 0 {
                content(&*source?, other_name)?
            } else {
                content(&*dir_of(older, place)?, name)?
            };
            let mut now = content(&*dir, name)?;
            let share = 1 + dice.roll(4);
            for piece in (0..from.len().max(now.len()).div_ceil(BLOCK)).filter(|_| dice.roll(share) == 0) {
                let (start, end) = (piece * BLOCK, from.len().min((piece + 1) * BLOCK));
                now.resize(now.len().max(start + BLOCK), 0);
                now[start..start + BLOCK].fill(0);
                if let Some(part) = from.get(start..end) {
                    now[start..end].copy_from_slice(part);
                }
            }
            set_content(&dir, name, &now)?;
        }
        Act::PutBackAttributes => {
            let from = if dice.roll(3) == 0 { (source?, other_name) } else { (dir_of(older, place)?, name) };
            copy_attributes(&*from.0, from.1, &*dir, name)?;
        }
        Act::Copy => put(&source?, other_name, &dir, name),
        Act::Link => {
            let held = dir_of(store, other)?.hold(other_name)?;
            remove(&*dir, name)?;
            held.link(&*dir, name)?;
        }
        Act::Exchange => dir.rename(name, &*dir_of(store, other)?, other_name, RenameMode::Exchange)?,
        Act::Move => dir.rename(name, &*dir_of(store, other)?, other_name, RenameMode::Replace)?,
        Act::Remove => remove(&*dir, name)?,
        Act::Cut => {
            let file = dir.open_file(name, true)?;
            file.set_len(dice.roll(file.stat()?.len as usize + 1) as u64)?;
        }
        Act::Mode => {
            let held = dir.hold(name)?;
            held.set_mode([0o600, 0o644, 0o4755, 0o777][dice.roll(4)])?;
            held.set_owner(Some(1234), None)?;
        }
        Act::Kind => {
            remove(&*dir, name)?;
            match dice.roll(4) {
                0 => dir.make_node(name, Kind::Fifo, 0)?,
                1 => dir.make_dir(name, 0o755)?,
                2 => drop(dir.create_file(name)?),
                _ => dir.make_symlink(name, OsStr::new("elsewhere"))?,
            }
        }
    }
    Ok(())
}

/// Puts in one place what lies in another, or nothing where nothing does.
fn put(from: &Arc<dyn BackendDir>, from_name: &OsStr, to: &Arc<dyn BackendDir>, name: &OsStr) {
    // Held first: it may lie in what it replaces.
    let copied = Copied::of(&**from, from_name);
    let _ = remove(&**to, name);
    if let Ok(copied) = copied {
        copied.put(&**to, name);
    }
}

/// An entry with all below it.
enum Copied {
    File(Vec<u8>, Sealed),
    Dir(Vec<(OsString, Copied)>, Sealed),
    Link(OsString),
    Node(Kind),
}

/// Mode and attributes.
struct Sealed(u32, Vec<(OsString, Vec<u8>)>);

impl Copied {
    fn of(dir: &dyn BackendDir, name: &OsStr) -> io::Result<Copied> {
        let st = dir.stat_entry(name)?;
        let sealed = || Ok::<_, io::Error>(Sealed(st.mode, attributes(dir, name)?));
        Ok(match st.kind {
            Kind::File => Copied::File(content(dir, name)?, sealed()?),
            Kind::Dir => {
                let below = dir.open_dir(name)?;
                let of = |name: OsString| Ok((name.clone(), Copied::of(&*below, &name)?));
                Copied::Dir(names_in(&*below).into_iter().map(of).collect::<io::Result<_>>()?, sealed()?)
            }
            Kind::Symlink => Copied::Link(dir.read_link(name)?),
            kind => Copied::Node(kind),
        })
    }

    fn put(&self, dir: &dyn BackendDir, name: &OsStr) {
        let (Sealed(mode, attributes), is_made) = match self {
            Copied::File(bytes, sealed) => {
                (sealed, dir.create_file(name).and_then(|file| file.write_at(0, bytes)).is_ok())
            }
            Copied::Dir(entries, sealed) => {
                let below = dir.make_dir(name, 0o755).and_then(|()| dir.open_dir(name)).unwrap();
                entries.iter().for_each(|(name, entry)| entry.put(&*below, name));
                (sealed, true)
            }
            Copied::Link(target) => return dir.make_symlink(name, target).unwrap(),
            Copied::Node(kind) => return dir.make_node(name, *kind, 0).unwrap(),
        };
        assert!(is_made);
        let held = dir.hold(name).unwrap();
        held.set_mode(*mode).unwrap();
        for (attribute, value) in attributes {
            held.set_xattr(attribute, value, 0).unwrap();
        }
    }
}

fn attributes(dir: &dyn BackendDir, name: &OsStr) -> io::Result<Vec<(OsString, Vec<u8>)>> {
    let held = dir.hold(name)?;
    let names = held.list_xattr()?.into_iter();
    names.map(|attribute| Ok((attribute.clone(), held.get_xattr(&attribute)?))).collect()
}

fn copy_attributes(from: &dyn BackendDir, from_name: &OsStr, to: &dyn BackendDir, name: &OsStr) -> io::Result<()> {
    let (others, held) = (attributes(from, from_name)?, to.hold(name)?);
    held.list_xattr()?.iter().try_for_each(|attribute| held.remove_xattr(attribute))?;
    others.iter().try_for_each(|(attribute, value)| held.set_xattr(attribute, value, 0))
}

fn content(dir: &dyn BackendDir, name: &OsStr) -> io::Result<Vec<u8>> {
    let file = dir.open_file(name, false)?;
    let mut bytes = vec![0; file.stat()?.len as usize];
    file.read_at(0, &mut bytes)?;
    Ok(bytes)
}

fn set_content(dir: &Arc<dyn BackendDir>, name: &OsStr, bytes: &[u8]) -> io::Result<()> {
    let file = dir.open_file(name, true)?;
    file.set_len(0)?;
    // What is zeros may be a hole.
    for (piece, bytes) in bytes.chunks(BLOCK).enumerate().filter(|(_, bytes)| bytes.iter().any(|byte| *byte != 0)) {
        file.write_at((piece * BLOCK) as u64, bytes)?;
    }
    file.set_len(bytes.len() as u64)
}

/// Removes an entry with all below it.
fn remove(dir: &dyn BackendDir, name: &OsStr) -> io::Result<()> {
    let Ok(below) = dir.open_dir(name) else { return dir.unlink(name) };
    names_in(&*below).iter().try_for_each(|name| remove(&*below, name))?;
    dir.remove_dir(name)
}
