//! What is moved while a walk over the whole tree is under way. Such a walk lists each directory once, so it misses an
//! entry that is moved from a directory that it has not reached to one that it has left. Whoever moves an entry, gives
//! it another name, or copies blocks with their keys, therefore notes that here, and the walk looks there again. In
//! turns of several hosts the notes go from turn to turn, and those of other hosts are added when a turn begins.
//!
//! Entries that are made meanwhile are not noted: they are sealed under the newest keys.

use crate::inode::StoreId;
use crate::{Ino, Vault};
use lamassu_anchor::{EntryPlace, ObjectId, Touched};
use lamassu_store::backend::Stat;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most notes. Beyond, the tree has to be walked again.
const NOTES_MAX: usize = 200_000;

/// What an entry is, whatever its name: its object, in a vault without an anchor its inode in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    pub object: ObjectId,
    inode: Option<StoreId>,
}

impl Identity {
    pub fn of(object: ObjectId, st: &Stat) -> Identity {
        Identity { object, inode: (object == ObjectId::default()).then(|| StoreId::from(st)) }
    }

    pub fn of_object(object: ObjectId) -> Identity {
        Identity { object, inode: None }
    }
}

/// What a walk has to look at again.
#[derive(Default)]
pub(crate) struct Notes {
    /// Places that entries came to. The directory of each has a reference.
    pub here: HashMap<(Ino, OsString), Identity>,
    /// Files that blocks were copied to, each with a reference.
    pub copied: HashSet<Ino>,
    /// Objects that came to a place on another host.
    pub elsewhere: HashMap<ObjectId, EntryPlace>,
    /// More was moved than is noted.
    pub is_incomplete: bool,
}

impl Notes {
    fn len(&self) -> usize {
        self.here.len() + self.copied.len() + self.elsewhere.len()
    }

    /// All references.
    pub fn references(&mut self) -> Vec<Ino> {
        std::mem::take(&mut self.here).into_keys().map(|(dir, _)| dir).chain(std::mem::take(&mut self.copied)).collect()
    }
}

#[derive(Default)]
struct State {
    notes: Notes,
    /// Something was moved since the walk began.
    is_any: bool,
    is_over: bool,
}

/// The notes for one walk.
#[derive(Default)]
pub(crate) struct Moved(Mutex<State>);

impl Moved {
    /// Takes all notes. The caller gives the references back.
    pub fn take(&self) -> Notes {
        std::mem::take(&mut self.0.lock().notes)
    }

    /// Puts notes back, with their references, which were not looked at. A newer note of the same place has a reference
    /// of its own: those that are left over are returned.
    pub fn put_back(&self, notes: Notes) -> Vec<Ino> {
        let mut left = Vec::new();
        let mut state = self.0.lock();
        let now = &mut state.notes;
        for (place, identity) in notes.here {
            // What came there later may have been put in the place of it: both count.
            match now.here.contains_key(&place) {
                true => left.push(place.0),
                false => drop(now.here.insert(place, identity)),
            }
        }
        left.extend(notes.copied.into_iter().filter(|ino| !now.copied.insert(*ino)));
        for (object, place) in notes.elsewhere {
            now.elsewhere.entry(object).or_insert(place);
        }
        now.is_incomplete |= notes.is_incomplete;
        left
    }

    /// The tree is walked again. Returns all references.
    pub fn begin_again(&self) -> Vec<Ino> {
        let mut state = self.0.lock();
        state.is_any = false;
        std::mem::take(&mut state.notes).references()
    }

    /// Whether anything was moved since the walk began.
    pub fn is_any(&self) -> bool {
        self.0.lock().is_any
    }

    /// Ends the notes; returns all references.
    pub fn end(&self) -> Vec<Ino> {
        let mut state = self.0.lock();
        state.is_over = true;
        std::mem::take(&mut state.notes).references()
    }

    fn is_over(&self) -> bool {
        self.0.lock().is_over
    }

    /// Adds what other hosts have changed; `None`: nobody knows.
    fn elsewhere(&self, touched: Option<&Touched>) {
        let mut state = self.0.lock();
        let Some(touched) = touched else {
            (state.notes.is_incomplete, state.is_any) = (true, true);
            return;
        };
        state.is_any |= !touched.places.is_empty();
        state.notes.elsewhere.extend(touched.places.iter().map(|(object, place)| (*object, *place)));
        state.notes.is_incomplete |= state.notes.len() > NOTES_MAX;
        if state.notes.is_incomplete {
            state.notes.elsewhere.clear();
        }
    }

    /// `add` returns the node that the new note refers to.
    fn note(&self, vault: &Vault, add: impl FnOnce(&mut Notes) -> Option<Ino>) {
        let mut state = self.0.lock();
        if state.is_over {
            return;
        }
        state.is_any = true;
        if state.notes.len() >= NOTES_MAX {
            state.notes.is_incomplete = true;
        } else if let Some(ino) = add(&mut state.notes) {
            // Under the lock, so that whoever ends the notes gives it back.
            vault.nodes.lock().add_reference(ino);
        }
    }
}

/// The notes for the walk that is under way, if there is one.
#[derive(Default)]
pub(crate) struct Watching {
    moved: Mutex<Option<Arc<Moved>>>,
    /// Copies of blocks that are under way.
    copies: AtomicUsize,
}

impl Watching {
    fn get(&self) -> Option<Arc<Moved>> {
        self.moved.lock().clone()
    }

    /// What the next vault over the same tree takes over.
    pub fn take(&self) -> Option<Arc<Moved>> {
        self.moved.lock().take()
    }

    /// Takes the notes over from the vault of an earlier turn. `touched`: what other hosts have changed since; `None`:
    /// perhaps everything.
    pub fn take_over(&self, moved: Option<Arc<Moved>>, touched: Option<&Touched>) {
        // Nobody reads the notes of a walk that has ended.
        let moved = moved.filter(|moved| !moved.is_over());
        if let Some(moved) = &moved {
            moved.elsewhere(touched);
        }
        *self.moved.lock() = moved;
    }
}

/// Blocks are being copied to a file.
pub(crate) struct Copying<'a>(&'a Vault, Ino);

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        let Copying(vault, ino) = *self;
        if let Some(moved) = vault.moved.get() {
            moved.note(vault, |notes| notes.copied.insert(ino).then_some(ino));
        }
        vault.moved.copies.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Vault {
    /// From now on, until the next call, what is moved is noted.
    pub(crate) fn watch_moves(&self) -> Arc<Moved> {
        let moved = Arc::<Moved>::default();
        *self.moved.moved.lock() = Some(moved.clone());
        moved
    }

    /// Whether moves have been noted there without a gap.
    pub(crate) fn is_watched_by(&self, moved: &Arc<Moved>) -> bool {
        self.moved.get().is_some_and(|now| Arc::ptr_eq(&now, moved))
    }

    /// Notes that an entry is about to come to a place. Called under a lock that whoever looks there needs.
    pub(crate) fn note_moved(&self, (dir, name): (Ino, &OsStr), object: ObjectId, st: &Stat) {
        if let Some(moved) = self.moved.get() {
            let identity = Identity::of(object, st);
            moved.note(self, |notes| notes.here.insert((dir, name.to_owned()), identity).is_none().then_some(dir));
        }
    }

    /// Notes that blocks are being copied to a file, until the result is dropped.
    pub(crate) fn copying(&self, ino: Ino) -> Copying<'_> {
        self.moved.copies.fetch_add(1, Ordering::AcqRel);
        Copying(self, ino)
    }

    /// Whether blocks are being copied to any file.
    pub(crate) fn is_copying(&self) -> bool {
        self.moved.copies.load(Ordering::Acquire) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_anchor::Token;

    #[test]
    fn nothing_is_noted_for_a_walk_that_has_ended() {
        let touched = |number: u8| {
            let place = EntryPlace { dir: ObjectId::ROOT, name: Token([number; 16]) };
            Touched { places: HashMap::from([(ObjectId(number.into()), place)]), ..Touched::default() }
        };
        let (watching, moved) = (Watching::default(), Arc::<Moved>::default());
        watching.take_over(Some(moved.clone()), Some(&touched(1)));
        assert_eq!(moved.0.lock().notes.len(), 1);
        moved.end();
        for number in 2..10 {
            watching.take_over(watching.take(), Some(&touched(number)));
        }
        assert_eq!(moved.0.lock().notes.len(), 0);
        assert!(watching.get().is_none());
    }
}
