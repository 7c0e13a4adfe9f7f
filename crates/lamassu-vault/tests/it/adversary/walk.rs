//! What a vault shows, all of it: each fact, or the error in its place.

use crate::common::anchored::LONG;
use crate::common::{RO, n};
use lamassu_vault::*;
use std::collections::BTreeMap;

/// The names that are used, and asked for also where nothing lists them.
pub const NAMES: [&str; 4] = ["a", "b", "c", LONG];
/// Bytes of a block, and of what an error is told of.
pub const BLOCK: usize = 4096;
/// No file of these tests is longer. The size of one that is, is a lie, and it is not read.
const SIZE_MAX: u64 = 4 << 20;
/// Directories are not deeper than names are moved; an un-anchored store makes them so.
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
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub facts: u64,
    pub refusals: u64,
}

impl Tally {
    fn of<T>(&mut self, fact: &Fact<T>) {
        match fact {
            Ok(_) => self.facts += 1,
            Err(_) => self.refusals += 1,
        }
    }
}

/// Everything, from the root on.
pub fn walk(v: &Vault, tally: &mut Tally) -> Fact<Seen> {
    let root = v.resolve(n(""))?;
    let seen = object(v, &root.attr, 0, tally);
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
    Seen { ino, kind, mode, owner: (uid, gid), rdev, attributes, body }
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
            tally.refusals += 1;
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
