//! What a vault shows, all of it: each fact, or the error in its place.

use super::store::Dice;
use crate::common::anchored::LONG;
use crate::common::{RO, RW, n};
use lamassu_vault::*;
use std::collections::BTreeMap;

/// The names that are used, and asked for also where nothing lists them.
pub const NAMES: [&str; 4] = ["a", "b", "c", LONG];
/// Bytes of a block, or of a part of a larger one, and of what an error is told of.
pub const BLOCK: usize = 4096;
/// No file of these tests is longer. The size of one that is, is a lie, and it is not read.
const SIZE_MAX: u64 = 4 << 20;
/// Directories are not deeper than names are moved; an unanchored store makes them so.
const DEPTH_MAX: usize = 12;

/// What is shown, or why it is not.
pub type Fact<T> = std::result::Result<T, VaultError>;
pub type Attributes = BTreeMap<Vec<u8>, Vec<u8>>;

/// An object as it is shown.
pub struct Seen {
    pub ino: Ino,
    pub kind: Kind,
    pub mode: u32,
    pub owner: (u32, u32),
    pub rdev: u64,
    pub attributes: Fact<Attributes>,
    /// Of the root: whether mode and owner are those that it was given.
    pub permissions: Fact<()>,
    pub body: Body,
}

/// Its content.
pub enum Body {
    File { size: u64, blocks: Vec<Fact<Vec<u8>>> },
    Dir(Names),
    Link(Fact<Vec<u8>>),
    Special,
}

/// A directory. `listed` is what was listed before the end or an error.
pub struct Names {
    pub listed: BTreeMap<String, Kind>,
    pub listing: Fact<()>,
    /// `None`: no such entry.
    pub found: BTreeMap<String, Fact<Option<Seen>>>,
}

/// How much was shown, and how much refused.
#[derive(Debug, Default)]
pub struct Tally {
    pub facts: u64,
    pub refusals: u64,
    /// The last refusal.
    pub last: Option<String>,
}

impl Tally {
    fn of<T>(&mut self, fact: &Fact<T>) {
        match fact {
            Ok(_) => self.facts += 1,
            Err(error) => self.refused(error),
        }
    }

    fn refused(&mut self, error: &VaultError) {
        self.refusals += 1;
        self.last = Some(error.to_string());
    }
}

/// Everything, from the root on.
pub fn walk(v: &Vault, tally: &mut Tally) -> Fact<Seen> {
    let root = v.resolve(n(""))?;
    let permissions = v.verify_root_permissions();
    tally.of(&permissions);
    let seen = Seen { permissions, ..object(v, &root.attr, 0, tally) };
    v.forget(ROOT, 1);
    Ok(seen)
}

fn object(v: &Vault, attr: &Attr, depth: usize, tally: &mut Tally) -> Seen {
    let attributes = attributes(v, attr.ino);
    tally.of(&attributes);
    let body = match attr.kind {
        Kind::Dir => Body::Dir(names(v, attr.ino, depth, tally)),
        Kind::File => Body::File { size: attr.size, blocks: blocks(v, attr, tally) },
        Kind::Symlink => {
            let target = v.readlink(attr.ino);
            tally.of(&target);
            Body::Link(target)
        }
        _ => Body::Special,
    };
    let Attr { ino, kind, mode, uid, gid, rdev, .. } = *attr;
    Seen { ino, kind, mode, owner: (uid, gid), rdev, attributes, permissions: Ok(()), body }
}

fn attributes(v: &Vault, ino: Ino) -> Fact<Attributes> {
    let names = v.list_xattr(ino)?.into_iter();
    names
        .map(|name| {
            let value = v.get_xattr(ino, n(&String::from_utf8_lossy(&name)))?;
            Ok((name, value))
        })
        .collect()
}

fn names(v: &Vault, dir: Ino, depth: usize, tally: &mut Tally) -> Names {
    let mut listed = BTreeMap::new();
    let listing = v.open_dir(dir).and_then(|handle| {
        let done = v.read_dir(handle, 0, &mut |e, _| {
            listed.insert(e.name.to_string_lossy().into_owned(), e.kind);
            true
        });
        v.release_dir(handle)?;
        done
    });
    listed.retain(|name, _| name != "." && name != "..");
    tally.of(&listing);
    let asked: Vec<String> =
        listed.keys().cloned().chain(NAMES.map(String::from)).filter(|_| depth < DEPTH_MAX).collect();
    let mut found = BTreeMap::new();
    for name in asked {
        if found.contains_key(&name) {
            continue;
        }
        let entry = match v.lookup(dir, n(&name)) {
            Ok(entry) => {
                let seen = object(v, &entry.attr, depth + 1, tally);
                v.forget(entry.attr.ino, 1);
                Ok(Some(seen))
            }
            Err(VaultError::NotFound) => Ok(None),
            Err(error) => Err(error),
        };
        tally.of(&entry);
        found.insert(name, entry);
    }
    Names { listed, listing, found }
}

/// Block by block, where not all of it can be read at once.
fn blocks(v: &Vault, attr: &Attr, tally: &mut Tally) -> Vec<Fact<Vec<u8>>> {
    if attr.size > SIZE_MAX {
        return Vec::new();
    }
    let handle = match v.open_file(attr.ino, RO) {
        Ok(handle) => handle,
        Err(error) => {
            tally.refused(&error);
            return vec![Err(error)];
        }
    };
    let size = attr.size as usize;
    let read = |offset: usize, len: usize| {
        let mut bytes = vec![0; len];
        let read = v.read(handle, offset as u64, &mut bytes)?;
        bytes.truncate(read);
        Ok(bytes)
    };
    let blocks: Vec<_> = match read(0, size) {
        Ok(all) => all.chunks(BLOCK).map(|block| Ok(block.to_vec())).collect(),
        Err(_) => (0..size).step_by(BLOCK).map(|offset| read(offset, BLOCK.min(size - offset))).collect(),
    };
    blocks.iter().for_each(|block| tally.of(block));
    // A handle of a file that was found stale closes with that error.
    let _ = v.release(handle);
    blocks
}

/// Does again what is seen to have been done: what refuses nothing is afterwards as it was, and nothing that is not
/// current becomes so.
pub fn do_again(v: &Vault, seen: &Seen, dice: &mut Dice) -> Fact<()> {
    let done = match (dice.roll(6), &seen.attributes, &seen.body) {
        (0, Ok(attributes), _) => attributes.iter().try_for_each(|(name, value)| {
            v.set_xattr(seen.ino, n(&String::from_utf8_lossy(name)), value, SetXattr::Any)
        }),
        (1, ..) if seen.kind != Kind::Symlink => {
            let set = SetAttr { mode: Some(seen.mode), ..SetAttr::default() };
            v.setattr(seen.ino, None, &set).map(drop)
        }
        (2, _, Body::File { size, .. }) => {
            let set = SetAttr { size: Some(*size), ..SetAttr::default() };
            v.setattr(seen.ino, None, &set).map(drop)
        }
        (3.., _, Body::File { blocks, .. }) => match blocks.iter().position(Result::is_ok) {
            Some(number) => write_again(v, seen.ino, number, blocks[number].as_deref().unwrap_or_default(), dice),
            None => Ok(()),
        },
        _ => Ok(()),
    };
    if let Body::Dir(names) = &seen.body {
        for (name, found) in &names.found {
            let Ok(Some(found)) = found else { continue };
            // Looked up again: its number is given for a reference.
            let Ok(entry) = v.lookup(seen.ino, n(name)) else { continue };
            if entry.attr.ino == found.ino {
                let _ = do_again(v, found, dice);
            }
            v.forget(entry.attr.ino, 1);
        }
    }
    done
}

fn write_again(v: &Vault, file: Ino, number: usize, block: &[u8], dice: &mut Dice) -> Fact<()> {
    let handle = v.open_file(file, RW)?;
    let len = if dice.roll(2) == 0 { block.len() } else { block.len().min(10) };
    let written = v.write(handle, (number * BLOCK) as u64, &block[..len]).map(drop);
    let synced = if dice.roll(2) == 0 { v.fsync(handle, false) } else { v.flush(handle) };
    v.release(handle).and(written).and(synced)
}
