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
use crate::inode::StoreId;
use crate::moved::{Identity, Moved, Notes};
use crate::{Ino, Kind, ROOT, Rekeyed, Result, VaultError};
use lamassu_anchor::ObjectId;
use lamassu_format::PageNo;
use std::collections::HashSet;
use std::ffi::OsStr;
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
    /// What is done of the directory in which the walk was interrupted, and the directory itself.
    pub(super) finished: HashSet<ObjectId>,
    /// The file in which it was interrupted, and the page to continue with.
    pub(super) half: Option<(ObjectId, PageNo)>,
    pub(super) groups: LinkGroups,
    /// What the store withholds, as far as this round knows.
    pub(super) missing: HashSet<ObjectId>,
    pub(super) done: Rekeyed,
    started: Option<Instant>,
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
        todo.chain(self.groups.take()).collect()
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

    /// Walks directories until none is left or it is interrupted. Then the current directory stays in the list, with
    /// what was done of it.
    fn directories(&mut self) -> Result<()> {
        while let Some(&ino) = self.walk.todo.last() {
            if self.is_cancelled() {
                return Ok(());
            }
            let mut inside = Vec::new();
            let visited = self.directory(ino, &mut inside);
            let kept = self.note(ino, visited);
            if self.is_cut || kept.is_err() {
                inside.into_iter().for_each(|ino| self.leave(ino));
                return kept;
            }
            self.walk.todo.pop();
            self.walk.todo.extend(inside);
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
        for search in 1..=SEARCHES {
            let mut left = Vec::new();
            for (object, place) in &notes.elsewhere {
                let entry = anchored.anchor.entry(place)?;
                // It may have been moved once more, here, or be gone.
                if entry.is_some_and(|entry| entry.object == *object) {
                    left.push((*object, *place));
                }
            }
            notes.elsewhere = left.into_iter().collect();
            let met = self.vault.nodes_at(anchored, notes.elsewhere.values().copied());
            let mut met = met.into_iter();
            while let Some(ino) = met.next() {
                let object = self.vault.object_of(ino);
                let link = self.vault.nodes.lock().first_link(ino).map(|(link, _)| link);
                let looked = match link {
                    Some(link) => self.came(link.parent, &link.name, Identity::of_object(object)),
                    None => Ok(true),
                };
                self.leave(ino);
                if self.is_cut || looked.is_err() {
                    met.for_each(|ino| self.leave(ino));
                    return looked.map(|_| true);
                }
                notes.elsewhere.remove(&object);
            }
            if notes.elsewhere.is_empty() {
                break;
            }
            if search == SEARCHES {
                for (object, _) in std::mem::take(&mut notes.elsewhere) {
                    self.withheld(ROOT, object);
                }
            }
        }
        Ok(is_some)
    }
}
