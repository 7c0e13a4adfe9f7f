//! The walk over a tree, which re-keying and changes of profiles share. It can be interrupted at any page and between
//! any two entries, and continued, also by the vault of a later turn.
//!
//! It goes in rounds. In a round each directory is listed once. A re-keying then looks at what was moved meanwhile
//! ([`crate::moved`]) until nothing is left that it has not seen. It begins another round if the keys were rotated in
//! the middle, if a turn was lost with what it had done, or if nobody knows what was moved. A change of profiles is
//! complete when a round has found nothing to do, since entries may be made in a directory before its record is put
//! into place.

use super::RekeyRun;
use super::links::LinkGroups;
use crate::anchored::{Anchored, is_absent};
use crate::inode::StoreId;
use crate::moved::{Identity, Moved, Notes};
use crate::{Ino, Kind, ROOT, Rekeyed, Result, VaultError};
use lamassu_anchor::{ObjectId, Token};
use lamassu_format::PageNo;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most rounds.
const ROUNDS_MAX: usize = 5;
/// How often a round looks at what was moved.
const LOOKS_MAX: usize = 1_000;
/// How often it looks for an entry of which another host has told, before it counts as withheld.
const SEARCHES: usize = 3;

/// The progress of a walk, kept from turn to turn.
#[derive(Default)]
pub struct Walk {
    /// Directories still to walk, each with a reference except the root.
    todo: Vec<Ino>,
    is_in_round: bool,
    rounds: usize,
    /// The count of changes when this round began.
    changed: u64,
    /// Whether the total is computed first, which takes a walk over everything.
    tells_total: bool,
    /// Something that this round has done may be undone, or was not looked at.
    is_short: bool,
    /// For re-keying.
    watch: Option<Watch>,
    /// Files with several names that were done in this round.
    pub(super) seen: HashSet<StoreId>,
    /// The directory in which the walk was interrupted: the last one of those to walk.
    within: Option<Within>,
    /// What is done of the directory that is being walked.
    pub(super) finished: HashSet<ObjectId>,
    /// The file in which it was interrupted, and the page to continue with.
    pub(super) half: Option<(ObjectId, PageNo)>,
    pub(super) groups: LinkGroups,
    /// What the store withholds, as far as this round knows.
    pub(super) missing: HashSet<ObjectId>,
    pub(super) done: Rekeyed,
    started: Option<Instant>,
}

/// A directory that is being walked. It is listed once, however often the walk is interrupted in it: what comes to it
/// meanwhile is noted, or is under the newest keys. A change of profiles has no notes, and lists it again at its end.
pub(super) struct Within {
    pub ino: Ino,
    /// Stored names of entries still to do, the next one last; `None`: it was not listed yet.
    pub left: Option<Vec<OsString>>,
    /// Directories in it, each with a reference.
    pub inside: Vec<Ino>,
    /// The walk was interrupted since it was listed.
    pub was_cut: bool,
}

impl Within {
    fn of(ino: Ino) -> Within {
        Within { ino, left: None, inside: Vec::new(), was_cut: false }
    }
}

/// What a re-keying has to know to miss nothing.
struct Watch {
    moved: Arc<Moved>,
    /// The newest epochs when this round began.
    newest: (u32, u32),
    /// The number that the next object got then: from it on, all objects are under these epochs.
    first_new: ObjectId,
    /// What was moved, and looked at afterwards.
    settled: HashSet<Identity>,
    looks: usize,
}

/// What a round has left to do.
enum Rest {
    Nothing,
    /// Something that was moved.
    Some,
    /// Everything.
    All,
}

impl Walk {
    /// A walk that computes the total first.
    pub(super) fn with_total() -> Walk {
        Walk { tells_total: true, ..Walk::default() }
    }

    /// The work done so far.
    pub fn done(&self) -> Rekeyed {
        self.done
    }

    /// By how much the walk is ahead of a limit, in bytes of files per second.
    pub fn ahead_by(&self, bytes_per_second: u64) -> Option<Duration> {
        let due = (self.done.read + self.done.written) as f64 / bytes_per_second.max(1) as f64;
        Duration::from_secs_f64(due).checked_sub(self.started?.elapsed()).filter(|left| !left.is_zero())
    }

    /// Ends the walk, done or not. Returns the nodes to which it has references: the caller gives them back.
    pub fn end(&mut self) -> Vec<Ino> {
        let mut inos = self.leave_round();
        inos.extend(self.watch.take().into_iter().flat_map(|watch| watch.moved.end()));
        inos
    }

    /// Ends a round; returns references.
    fn leave_round(&mut self) -> Vec<Ino> {
        self.is_in_round = false;
        let todo = std::mem::take(&mut self.todo).into_iter().filter(|ino| *ino != ROOT);
        let inside = self.within.take().into_iter().flat_map(|within| within.inside);
        todo.chain(inside).chain(self.groups.take()).collect()
    }

    /// A part of the walk has ended. If it has failed, what it did may be lost with the turn.
    pub(super) fn ended_with(&mut self, done: &Result<()>) {
        if done.is_err() {
            self.is_short = true;
            self.done.complete = false;
        }
    }

    /// This round did not look at everything, or not for the last time.
    pub(super) fn falls_short(&mut self) {
        self.is_short = true;
    }

    /// Whether it is noted what is moved meanwhile.
    pub(super) fn has_notes(&self) -> bool {
        self.watch.is_some()
    }

    /// Whether entries were moved in this round.
    pub(super) fn has_moves(&self) -> bool {
        self.watch.as_ref().is_some_and(|watch| watch.moved.is_any())
    }
}

impl RekeyRun<'_> {
    /// Walks a directory, and everything below it, until nothing is left to do, or it is interrupted.
    pub(super) fn rounds(&mut self, top: Ino) -> Result<()> {
        self.walk.started.get_or_insert_with(Instant::now);
        if self.walk.is_in_round && self.is_in_vain() {
            self.leave_round();
        }
        loop {
            if !self.walk.is_in_round {
                if self.walk.rounds == ROUNDS_MAX {
                    return Ok(());
                }
                self.begin_round(top)?;
            }
            let gone = self.directories().and_then(|()| self.flush()).and_then(|()| self.relink_groups());
            self.batch.clear(self.vault);
            gone?;
            if self.is_cut {
                return Ok(());
            }
            match self.rest()? {
                Rest::Nothing => {
                    self.walk.done.complete = true;
                    return Ok(());
                }
                Rest::Some => {}
                Rest::All => self.leave_round(),
            }
        }
    }

    fn begin_round(&mut self, top: Ino) -> Result<()> {
        let walk = &mut *self.walk;
        (walk.is_in_round, walk.is_short) = (true, false);
        (walk.rounds, walk.changed) = (walk.rounds + 1, walk.done.changed());
        walk.done.failed = 0;
        walk.seen.clear();
        walk.finished.clear();
        walk.missing.clear();
        // A file that was left in the middle may be under an older key before that.
        walk.half = None;
        if self.choice.is_none() {
            self.watch();
        }
        if top != ROOT {
            self.vault.nodes.lock().add_reference(top);
        }
        self.walk.todo.push(top);
        if self.walk.tells_total {
            let dir = self.vault.dir(top)?.handle.clone();
            self.progress.total(self.bytes_ahead(dir)?);
        }
        Ok(())
    }

    /// From now on, what is moved is noted.
    fn watch(&mut self) {
        let earlier = self.walk.watch.take().map(|watch| watch.moved);
        let moved = match earlier {
            Some(moved) if self.vault.is_watched_by(&moved) => {
                moved.begin_again().into_iter().for_each(|ino| self.leave(ino));
                moved
            }
            earlier => {
                let left = earlier.into_iter().flat_map(|moved| moved.end());
                left.for_each(|ino| self.leave(ino));
                self.vault.watch_moves()
            }
        };
        // In this order: what gets a number later is sealed later.
        let newest = self.vault.ring().newest();
        let first_new = self.vault.anchored.as_ref().map(|of| of.anchor.vault().next_object).unwrap_or_default();
        self.walk.watch = Some(Watch { moved, newest, first_new, settled: HashSet::new(), looks: 0 });
    }

    fn leave_round(&mut self) {
        self.walk.leave_round().into_iter().for_each(|ino| self.vault.forget(ino, 1));
    }

    /// Whether this round would be followed by another one anyway: what was done before a rotation is under the epoch
    /// that was the newest then, or nobody knows what was moved.
    fn is_in_vain(&self) -> bool {
        self.walk
            .watch
            .as_ref()
            .is_some_and(|watch| watch.newest != self.vault.ring().newest() || !self.vault.is_watched_by(&watch.moved))
    }

    /// Walks directories until none is left or it is interrupted. Then the current directory stays in the list, and
    /// what is left of it is kept.
    fn directories(&mut self) -> Result<()> {
        while let Some(&ino) = self.walk.todo.last() {
            if self.is_cancelled() {
                return Ok(());
            }
            let mut within = self.walk.within.take().unwrap_or_else(|| Within::of(ino));
            let visited = self.directory(&mut within);
            let kept = self.note(ino, visited);
            if self.is_cut || kept.is_err() {
                self.walk.within = Some(within);
                return kept;
            }
            self.walk.todo.pop();
            self.walk.todo.extend(within.inside);
            self.walk.finished.clear();
            self.leave(ino);
            self.progress.advance(0);
        }
        Ok(())
    }

    /// What is left to do when all directories were walked.
    fn rest(&mut self) -> Result<Rest> {
        let Some(watch) = &mut self.walk.watch else {
            return Ok(match self.walk.done.changed() == self.walk.changed && !self.walk.is_short {
                true => Rest::Nothing,
                false => Rest::All,
            });
        };
        watch.looks += 1;
        let (is_busy, moved) = (watch.looks > LOOKS_MAX, watch.moved.clone());
        if is_busy || self.walk.is_short || self.is_in_vain() {
            return Ok(Rest::All);
        }
        let is_copying = self.vault.is_copying();
        let mut notes = moved.take();
        if notes.is_incomplete {
            notes.references().into_iter().for_each(|ino| self.leave(ino));
            return Ok(Rest::All);
        }
        let mut is_some = is_copying || !notes.copied.is_empty();
        let looked = self.look_again(&mut notes, &mut is_some);
        // What was not looked at.
        moved.put_back(notes).into_iter().for_each(|ino| self.leave(ino));
        looked?;
        if is_copying {
            std::thread::sleep(super::NAP);
        }
        Ok(if is_some { Rest::Some } else { Rest::Nothing })
    }

    /// Looks at what was moved. What was looked at is removed from the notes. `is_some`: something was not settled
    /// before.
    fn look_again(&mut self, notes: &mut Notes, is_some: &mut bool) -> Result<()> {
        for ino in notes.copied.iter().copied().collect::<Vec<_>>() {
            self.copied(ino)?;
            if self.is_cut {
                return Ok(());
            }
            notes.copied.remove(&ino);
            self.leave(ino);
        }
        for (place, identity) in notes.here.iter().map(|(place, of)| (place.clone(), *of)).collect::<Vec<_>>() {
            *is_some |= self.came(place.0, &place.1, identity)?;
            if self.is_cut {
                *is_some = true;
                return Ok(());
            }
            notes.here.remove(&place);
            self.leave(place.0);
        }
        *is_some |= self.came_elsewhere(notes)?;
        Ok(())
    }

    /// Blocks were copied to a file.
    fn copied(&mut self, ino: Ino) -> Result<()> {
        let placed = {
            let _tree = self.vault.tree.read();
            self.vault.place(ino)
        };
        let done = placed.and_then(|(_, _, st)| self.file(ino, &st));
        self.note(ino, done)
    }

    /// An entry came to a place. False: it was settled before.
    fn came(&mut self, parent: Ino, name: &OsStr, identity: Identity) -> Result<bool> {
        let Some(watch) = &self.walk.watch else { return Ok(false) };
        let is_settled = |of: &Identity| {
            let is_new = self.vault.anchored.is_some() && of.object >= watch.first_new;
            is_new || watch.settled.contains(of)
        };
        let (child, st) = match self.enter(parent, name) {
            // It is gone on, and noted there, or removed.
            Ok(None) | Err(VaultError::Stale) => return Ok(!is_settled(&identity)),
            Ok(Some(found)) => found,
            Err(error) => return self.note(parent, Err(error)).map(|()| false),
        };
        let identity = Identity::of(self.vault.object_of(child), &st);
        if is_settled(&identity) {
            self.leave(child);
            return Ok(false);
        }
        match st.kind {
            Kind::Dir => self.walk.todo.push(child),
            _ => {
                self.walk.seen.remove(&StoreId::from(&st));
                let done = self.leaf(child, parent, name, &st);
                let done = self.note(child, done);
                self.leave(child);
                done?;
            }
        }
        if let Some(watch) = self.walk.watch.as_mut().filter(|_| !self.is_cut) {
            watch.settled.insert(identity);
        }
        Ok(true)
    }

    /// Entries came to places on other hosts. False: all were settled before.
    fn came_elsewhere(&mut self, notes: &mut Notes) -> Result<bool> {
        let (Some(anchored), Some(watch)) = (&self.vault.anchored, &self.walk.watch) else { return Ok(false) };
        let is_settled = |of: ObjectId| of >= watch.first_new || watch.settled.contains(&Identity::of_object(of));
        notes.elsewhere.retain(|object, _| !is_settled(*object));
        let is_some = !notes.elsewhere.is_empty();
        for _ in 0..SEARCHES {
            self.keep_recorded(notes)?;
            self.search(anchored, notes)?;
            if self.is_cut {
                return Ok(true);
            }
        }
        self.keep_recorded(notes)?;
        for object in std::mem::take(&mut notes.elsewhere).into_keys() {
            self.withheld(ROOT, object)?;
        }
        Ok(is_some)
    }

    /// Drops the notes of what was moved once more, here, or is gone.
    fn keep_recorded(&self, notes: &mut Notes) -> Result<()> {
        let Some(anchored) = &self.vault.anchored else { return Ok(()) };
        let mut left = HashMap::new();
        for (object, place) in &notes.elsewhere {
            if anchored.anchor.entry(place)?.is_some_and(|entry| entry.object == *object) {
                left.insert(*object, *place);
            }
        }
        notes.elsewhere = left;
        Ok(())
    }

    /// Looks where entries came to on other hosts. What is not there stays in the notes. What could not be looked at
    /// counts as failed: an error of the store says nothing about the object.
    fn search(&mut self, anchored: &Anchored, notes: &mut Notes) -> Result<()> {
        let mut wanted: BTreeMap<ObjectId, HashMap<Token, ObjectId>> = BTreeMap::new();
        for (object, place) in &notes.elsewhere {
            wanted.entry(place.dir).or_default().insert(place.name, *object);
        }
        for (dir, names) in wanted {
            let at = self.vault.nodes.lock().of_object(dir).unwrap_or(ROOT);
            let reached = match self.vault.met_at(anchored, dir, &|name| names.contains_key(&name)) {
                Ok(reached) => reached,
                Err(error) if is_absent(&error) => continue,
                Err(error) => {
                    self.note(at, Err(error))?;
                    for object in names.values() {
                        notes.elsewhere.remove(object);
                    }
                    continue;
                }
            };
            let mut reached = reached.into_iter();
            while let Some((name, met)) = reached.next() {
                let looked = match met {
                    Ok(ino) => self.came_to(ino),
                    Err(error) if is_absent(&error) => continue,
                    Err(error) => self.note(at, Err(error)),
                };
                if self.is_cut || looked.is_err() {
                    reached.filter_map(|(_, met)| met.ok()).for_each(|ino| self.leave(ino));
                    return looked;
                }
                names.get(&name).map(|object| notes.elsewhere.remove(object));
            }
        }
        Ok(())
    }

    /// Looks at a node that came to a place on another host; gives its reference back.
    fn came_to(&mut self, ino: Ino) -> Result<()> {
        let object = self.vault.object_of(ino);
        let link = self.vault.nodes.lock().first_link(ino).map(|(link, _)| link);
        let looked = link.map_or(Ok(true), |link| self.came(link.parent, &link.name, Identity::of_object(object)));
        self.leave(ino);
        looked.map(drop)
    }
}
