//! Recovery when a vault is opened for writing (N3), before anything of it is served.
//!
//! The places that intents name are put right together: what is recorded in one of them is looked for among what lies in
//! all of them, and moved to where it is recorded. Every step moves one entry from one of these places to another, or
//! two against each other, so that a crash in between leaves what recovery can go on with. The intents go when a barrier
//! has covered all of it.
//!
//! What cannot be done is told, and its intents stay for the next time. Nothing is lost by that: what is not where it is
//! recorded is missing, and an error to who looks at it.

use super::Anchored;
use super::locate::{Item, Places};
use crate::error::io;
use crate::record::remove_companion;
use crate::staging::{is_entry_empty, rename_no_replace};
use crate::symlink;
use crate::{RenameMode, Result, Vault, VaultError};
use lamassu_anchor::row::Intent;
use lamassu_anchor::{Entry, EntryPlace};
use lamassu_format::name::{Stored, classify, companion_name};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;

impl Vault {
    /// Puts right what an earlier writer had under way, and notes which files it left open.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn recover_names(&self) -> Result<()> {
        let Some(anchored) = &self.anchored else { return Ok(()) };
        let (intents, open) = (anchored.anchor.intents()?, anchored.anchor.open_objects()?);
        let is_after_crash = !intents.is_empty() || !open.is_empty() || !self.book.interrupted().is_empty();
        anchored.after_crash.store(is_after_crash, Ordering::Relaxed);
        anchored.note_open(open);
        if intents.is_empty() {
            return Ok(());
        }
        let done = self.put_right(anchored, &intents).and_then(|()| {
            anchored.anchor.carried_out(intents.keys().copied());
            self.sync_store()?;
            anchored.commit()
        });
        if let Err(error) = done {
            tracing::error!(%error, "names that were being changed at a crash could not all be put right");
        }
        Ok(())
    }

    fn put_right(&self, anchored: &Anchored, intents: &BTreeMap<u64, Intent>) -> Result<()> {
        let mut places = Places::of(self, anchored, intents);
        let found: Vec<Item> = places.all().into_iter().filter_map(|place| places.item(place)).collect();
        let mut recorded = BTreeMap::new();
        for place in places.all() {
            recorded.extend(anchored.anchor.entry(&place)?.map(|entry| (place, entry)));
        }
        let mut work = Work { vault: self, lies: BTreeMap::new(), belongs: BTreeMap::new() };
        let assigned = assign(&places, &recorded, &found);
        for (at, item) in found.into_iter().enumerate() {
            let to = assigned.iter().find(|(_, of)| **of == at).map(|(place, _)| *place);
            work.belongs.extend(to.map(|to| (item.place, to)));
            work.lies.insert(item.place, item);
        }
        let removed: BTreeSet<EntryPlace> = intents.values().filter_map(removed_place).collect();
        work.clear(&|place| removed.contains(place) && !recorded.contains_key(place))?;
        work.move_all(&mut places)?;
        work.clear_rest()
    }
}

fn removed_place(intent: &Intent) -> Option<EntryPlace> {
    if let Intent::Remove { at, .. } = intent { Some(*at) } else { None }
}

/// Which of the items that were found each recorded entry is. What lies where it is recorded comes first.
fn assign(places: &Places<'_>, recorded: &BTreeMap<EntryPlace, Entry>, found: &[Item]) -> BTreeMap<EntryPlace, usize> {
    let mut assigned: BTreeMap<EntryPlace, usize> = BTreeMap::new();
    for is_at_home in [true, false] {
        for (place, entry) in recorded {
            if assigned.contains_key(place) {
                continue;
            }
            let taken: BTreeSet<usize> = assigned.values().copied().collect();
            let mut left = found.iter().enumerate().filter(|(at, item)| {
                !taken.contains(at) && (item.place == *place) == is_at_home && places.fits(entry, item)
            });
            if let Some((at, _)) = left.next() {
                assigned.insert(*place, at);
            }
        }
    }
    assigned
}

/// What lies where, and where it belongs.
struct Work<'a> {
    vault: &'a Vault,
    lies: BTreeMap<EntryPlace, Item>,
    /// By where it lies now.
    belongs: BTreeMap<EntryPlace, EntryPlace>,
}

impl Work<'_> {
    /// Removes what belongs nowhere and lies under the name of a removal: a directory after what is in it. One that is
    /// not empty goes to `lamassu.lost`.
    fn clear(&mut self, is_removed: &dyn Fn(&EntryPlace) -> bool) -> Result<()> {
        let is_left = |place: &EntryPlace, belongs: &BTreeMap<EntryPlace, EntryPlace>| {
            is_removed(place) && !belongs.contains_key(place)
        };
        let left: Vec<EntryPlace> = self.lies.keys().filter(|p| is_left(p, &self.belongs)).copied().collect();
        let (dirs, others): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|place| self.lies.get(place).is_some_and(Item::is_dir));
        for place in others {
            if let Some(item) = self.lies.remove(&place) {
                item.dir.unlink(&item.name).map_err(io("unlink"))?;
                self.remove_companion_of(&item);
            }
        }
        let mut dirs = dirs;
        // Some lie in others, so as long as one of them is empty it is the turn of another.
        while !dirs.is_empty() {
            let before = dirs.len();
            let mut left = Vec::new();
            for place in dirs {
                let Some(item) = self.lies.get(&place) else { continue };
                if !is_entry_empty(&*item.dir, &item.name).map_err(io("list a directory"))? {
                    left.push(place);
                    continue;
                }
                self.vault.unstage_dir(&*item.dir, &item.name, &item.st)?;
                self.remove_companion_of(item);
                self.lies.remove(&place);
            }
            if left.len() == before {
                break;
            }
            dirs = left;
        }
        Ok(())
    }

    fn remove_companion_of(&self, item: &Item) {
        if let Some(companion) = companion_of(self.vault, &item.name) {
            remove_companion(&*item.dir, &companion);
        }
    }

    /// Moves everything to where it belongs. A directory that would come to lie in itself waits until another has moved.
    fn move_all(&mut self, places: &mut Places<'_>) -> Result<()> {
        loop {
            let mut displaced: Vec<_> = self.belongs.iter().map(|(from, to)| (*from, *to)).collect();
            displaced.retain(|(from, to)| from != to);
            // First what goes to a free name: that needs no exchange.
            displaced.sort_by_key(|(_, to)| self.lies.contains_key(to));
            let Some(first) = displaced.first().copied() else { return Ok(()) };
            let mut has_moved = false;
            for (from, to) in displaced {
                has_moved = self.move_one(from, to, places)?;
                if has_moved {
                    break;
                }
            }
            if !has_moved {
                // Its directory is not there, or the store cannot exchange names.
                tracing::error!(dir = first.1.dir.0, "an entry cannot be moved to where it is recorded");
                return Err(VaultError::Unsupported);
            }
        }
    }

    /// False: not now, and nothing has changed.
    fn move_one(&mut self, from: EntryPlace, to: EntryPlace, places: &mut Places<'_>) -> Result<bool> {
        let (Some(item), there) = (self.lies.get(&from), self.lies.get(&to)) else { return Ok(false) };
        let name = there.map(|there| there.name.clone()).or_else(|| places.name(&to));
        let target = there.map(|there| there.dir.clone()).or_else(|| places.dir(to.dir));
        let Some((name, target)) = name.zip(target) else { return Ok(false) };
        if let Some(rest) = symlink::rest_of(&self.vault.ctx.ring, &*item.dir, &item.name, &item.st) {
            symlink::copy_rest(&rest, &*item.dir, &*target)?;
        }
        // What was replaced goes; anything else changes places.
        let is_replaced = |there: &Item| !self.belongs.contains_key(&to) && !there.is_dir() && !item.is_dir();
        let moved = match there {
            None => rename_no_replace(&*item.dir, &item.name, &*target, &name),
            Some(there) if is_replaced(there) => item.dir.rename(&item.name, &*target, &name, RenameMode::Replace),
            Some(_) => item.dir.rename(&item.name, &*target, &name, RenameMode::Exchange),
        };
        match moved {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => return Ok(false),
            moved => moved.map_err(io("put a name right"))?,
        }
        let left = there.filter(|there| !is_replaced(there)).map(|there| Item {
            place: from,
            dir: item.dir.clone(),
            name: item.name.clone(),
            st: there.st,
        });
        let arrived = Item { place: to, dir: target, name, st: item.st };
        let belongs = self.belongs.insert(to, to);
        self.belongs.remove(&from);
        self.belongs.extend(belongs.filter(|_| left.is_some()).map(|belongs| (from, belongs)));
        self.lies.remove(&from);
        self.lies.extend(left.map(|left| (from, left)));
        self.lies.insert(to, arrived);
        Ok(true)
    }

    /// What belongs nowhere was recorded by nobody: an empty directory holds nothing, the rest goes to `lamassu.lost`.
    fn clear_rest(&mut self) -> Result<()> {
        let left: Vec<EntryPlace> =
            self.lies.keys().filter(|place| !self.belongs.contains_key(place)).copied().collect();
        for place in left {
            let Some(item) = self.lies.remove(&place) else { continue };
            let is_empty = item.is_dir() && is_entry_empty(&*item.dir, &item.name).unwrap_or(false);
            match is_empty {
                true => self.vault.unstage_dir(&*item.dir, &item.name, &item.st)?,
                false => {
                    let entry = item.name.to_string_lossy().into_owned();
                    self.vault.move_handle_to_lost(&*item.dir, &item.name, &entry)?;
                }
            }
        }
        Ok(())
    }
}

/// The companion of a long name.
fn companion_of(vault: &Vault, name: &OsStr) -> Option<OsString> {
    match classify(vault.name_mode, name.as_bytes()) {
        Stored::Long(hash) => Some(companion_name(&hash).into()),
        _ => None,
    }
}

/// Files recovered in one step of [`Vault::maintain`].
const RECOVERED_AT_ONCE: usize = 16;

impl Vault {
    /// Recovers some of the files that earlier writers left open: opening them does it.
    ///
    /// # Errors
    /// [`VaultError::Anchor`]. A file that cannot be recovered is told, and is an error to who opens it.
    pub(crate) fn recover_some(&self) -> Result<()> {
        let Some(anchored) = &self.anchored else { return Ok(()) };
        for place in anchored.next_open(RECOVERED_AT_ONCE)? {
            if let Err(error) = self.recover_file(anchored, place) {
                tracing::warn!(dir = place.dir.0, %error, "a file that a crash left open could not be recovered");
            }
        }
        Ok(())
    }

    fn recover_file(&self, anchored: &Anchored, place: EntryPlace) -> Result<()> {
        let Some(entry) = anchored.anchor.entry(&place)? else { return Ok(()) };
        if anchored.anchor.row(entry.object)?.file().is_none_or(|file| file.open.is_none()) {
            return Ok(());
        }
        let ino = self.reach(anchored, place)?;
        let opened = self.acquire(ino, true).map(|open| self.unhold(&open));
        self.forget(ino, 1);
        opened
    }

    /// The node of what is recorded at a place, with a reference.
    fn reach(&self, anchored: &Anchored, place: EntryPlace) -> Result<crate::Ino> {
        let mut way = vec![place];
        while let Some(last) = way.last().copied().filter(|last| last.dir != lamassu_anchor::ObjectId::ROOT) {
            let row = anchored.anchor.row(last.dir)?;
            let lamassu_anchor::row::Content::Dir { parent, name, .. } = row.content else {
                return Err(VaultError::NotDirectory);
            };
            way.push(EntryPlace { dir: parent, name });
            if way.len() > crate::inode::DEPTH_MAX {
                return Err(VaultError::Stale);
            }
        }
        let mut ino = crate::ROOT;
        while let Some(place) = way.pop() {
            let next = self.step_to(anchored, ino, place);
            if ino != crate::ROOT {
                self.forget(ino, 1);
            }
            ino = next?;
        }
        Ok(ino)
    }

    fn step_to(&self, anchored: &Anchored, parent: crate::Ino, place: EntryPlace) -> Result<crate::Ino> {
        let _tree = self.tree.read();
        let _names = self.names_of(parent).read();
        let dir = self.dir(parent)?;
        let listed = dir.handle.read_dir().map_err(io("list a directory"))?;
        let is_it = |name: &OsStr| anchored.place(dir.object, name) == place;
        let found = listed.into_iter().find(|entry| is_it(&entry.name)).ok_or(VaultError::NotFound)?;
        let st = self.shown(&dir, &found.name)?.ok_or(VaultError::NotFound)?;
        self.referenced(&dir, &found.name, &st).map(|(found, _)| found.ino)
    }
}
