//! Entries: made, removed, moved (`docs/freshness.md`, section 5).
//!
//! A *new* entry is queued after the store's step. A *removal* is queued, and the store's step follows its commit: see
//! [`Anchor::due`]. A *move* is durable before the store's step.

use super::state::{Nameless, Replaced, State, change_held};
use super::{Anchor, Result};
use crate::queue::{EntryMark, Layer, Scope};
use crate::queue::{behind_object, object_key};
use crate::row::{Content, EntryPlace, EntryRow, Inodes, Intent, Over, Row};
use crate::table::{Space, Table};
use crate::{AnchorError, Digests, ObjectId, ObjectKind, RecordNo};
use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;

/// The result of making an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// The entry is queued.
    Queued(ObjectId),
    /// The store has not carried out a removal of this name: commit, carry out what is due, and try again.
    NameIsGoing,
}

/// When the store may carry out a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// There is no such entry.
    NoEntry,
    /// At once: the entry was never durable.
    Now,
    /// When this intent is due.
    WhenDue(u64),
}

/// When the store may carry out a rename.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renamed {
    /// There is no source, or no target to exchange it with.
    NoEntry,
    /// At once: the entry was never durable. Then call [`Anchor::has_arrived`] or [`Anchor::has_stayed`]: until then no
    /// commit takes it (N4).
    Now,
    /// Now: the intent is durable. Then call [`Anchor::carried_out`].
    Intended(u64),
    /// Not yet: no barrier of the store covers the source or the target, or, if a directory would be replaced, all
    /// earlier steps. Nothing was changed: take a mark, make a barrier, and try again.
    NeedsBarrier,
}

impl Anchor {
    /// Queues an object under a name, both just made in the store. [`Anchor::may_make`] must be called before the
    /// store's step.
    ///
    /// # Errors
    /// Those of the table.
    pub fn make(&self, place: EntryPlace, row: Row) -> Result<Made> {
        let state = &mut *self.state.lock();
        if state.is_going(&place) {
            return Ok(Made::NameIsGoing);
        }
        let object = state.vault.next_object;
        state.vault.next_object.0 += 1;
        state.queued.vault = Some(state.vault.clone());
        let entry = EntryRow { kind: row.kind(), object };
        state.queued.objects.insert(object, Some(Row { links: 1, ..row }));
        state.make_entry(place, entry);
        Ok(Made::Queued(object))
    }

    /// Queues another name of an object, just made in the store.
    ///
    /// # Errors
    /// [`AnchorError::Unknown`], also if its last name was removed; those of the table.
    pub fn link(&self, place: EntryPlace, object: ObjectId) -> Result<Made> {
        self.link_if(place, object, |row| row.links > 0)
    }

    /// Queues a name of an object again, whose removal the store has not made.
    ///
    /// # Errors
    /// [`AnchorError::Unknown`]; those of the table.
    pub fn link_again(&self, place: EntryPlace, object: ObjectId) -> Result<Made> {
        self.link_if(place, object, |_| true)
    }

    fn link_if(&self, place: EntryPlace, object: ObjectId, may_be: impl FnOnce(&Row) -> bool) -> Result<Made> {
        let state = &mut *self.state.lock();
        if state.is_going(&place) {
            return Ok(Made::NameIsGoing);
        }
        let mut row = self.known(state, object)?;
        if !may_be(&row) {
            return Err(AnchorError::Unknown { object });
        }
        row.links += 1;
        let entry = EntryRow { kind: row.kind(), object };
        state.name_again(object);
        state.queue_row(object, row);
        state.make_entry(place, entry);
        Ok(Made::Queued(object))
    }

    /// Whether the store still has entries whose removal it is to carry out.
    pub fn has_removals(&self) -> bool {
        !self.state.lock().going.is_empty()
    }

    /// Whether a name may be made in the store: no removal of it is pending.
    pub fn may_make(&self, place: &EntryPlace) -> bool {
        !self.state.lock().is_going(place)
    }

    /// Queues the removal of an entry. Readers no longer see it.
    ///
    /// # Errors
    /// Those of the table.
    pub fn remove(&self, place: EntryPlace) -> Result<Removal> {
        let state = &mut *self.state.lock();
        let Some(was) = self.entry_in(state, &place)? else { return Ok(Removal::NoEntry) };
        let is_durable = self.has_durably_in(state, &place)?;
        let row = self.without_link(state, was.object)?;
        self.queue_less(state, was.object, row)?;
        if !is_durable {
            state.queued.forget_entry(&place);
            return Ok(Removal::Now);
        }
        let number = state.next_intent();
        state.queued.intend(number, Intent::Remove { at: place, was });
        state.queued.remove_entry(place, was, number);
        state.going.insert(place);
        Ok(Removal::WhenDue(number))
    }

    /// Whether an entry is durable or in flight: then it is removed by an intent.
    ///
    /// # Errors
    /// Those of the table.
    pub fn has_durably(&self, place: &EntryPlace) -> Result<bool> {
        self.has_durably_in(&self.state.lock(), place)
    }

    fn has_durably_in(&self, state: &State, place: &EntryPlace) -> Result<bool> {
        let is_flying = state.flying.as_ref().is_some_and(|layer| layer.entry(place).is_some());
        Ok(is_flying || self.durable_entry(place)?.is_some())
    }

    fn without_link(&self, state: &State, object: ObjectId) -> Result<Row> {
        let mut row = self.known(state, object)?;
        row.links = row.links.saturating_sub(1);
        Ok(row)
    }

    /// Queues the row of an object that has lost an entry. Without any entry, its row and its held records are removed.
    fn queue_less(&self, state: &mut State, object: ObjectId, row: Row) -> Result<()> {
        if row.links > 0 {
            state.queue_row(object, row);
            return Ok(());
        }
        let (held, records) = self.held_in(state, object)?;
        state.queued.objects.insert(object, None);
        state.queued.held.extend(records.into_iter().map(|record| ((object, record), None)));
        state.nameless.insert(object, Nameless { row, held });
        Ok(())
    }

    /// The held records of an object, and the numbers of all its records that the table has or may get.
    fn held_in(&self, state: &State, object: ObjectId) -> Result<(BTreeMap<RecordNo, Digests>, Vec<RecordNo>)> {
        let records = held_of(&*self.table, state, object)?;
        let held =
            if records.is_empty() { BTreeMap::new() } else { self.held_under(state.queued_held(object), object)? };
        Ok((held, records))
    }

    /// Moves an entry, replacing the target if there is one, or exchanges two. `to_name` is the new stored name,
    /// `inodes` a hint for recovery. `covered` is a mark that a barrier of the store has covered.
    ///
    /// # Errors
    /// Those of the table: then nothing has changed.
    pub fn rename(
        &self,
        from: EntryPlace,
        (to, to_name): (EntryPlace, &[u8]),
        is_exchange: bool,
        inodes: Inodes,
        covered: EntryMark,
    ) -> Result<Renamed> {
        self.rename_and_restore(from, (to, to_name), is_exchange, inodes, covered, None)
    }

    /// Takes a move back that the store has not made: as [`Anchor::rename`], and the object that it had replaced has
    /// its entry at `from` again, in the same commit. So no crash leaves that object unrecorded. (If the answer is not
    /// [`Renamed::Intended`], that is left to [`Anchor::link`].)
    ///
    /// # Errors
    /// [`AnchorError::Unknown`]; those of the table: then nothing has changed.
    pub fn rename_back(
        &self,
        from: EntryPlace,
        to: (EntryPlace, &[u8]),
        inodes: Inodes,
        covered: EntryMark,
        replaced: ObjectId,
    ) -> Result<Renamed> {
        self.rename_and_restore(from, to, false, inodes, covered, Some(replaced))
    }

    fn rename_and_restore(
        &self,
        from: EntryPlace,
        (to, to_name): (EntryPlace, &[u8]),
        is_exchange: bool,
        inodes: Inodes,
        covered: EntryMark,
        restored: Option<ObjectId>,
    ) -> Result<Renamed> {
        let _in_order = self.committing.lock();
        let look = |state: &mut State| self.look_at_ends(state, (from, to), is_exchange, covered, restored);
        let looked = look(&mut self.state.lock())?;
        // What the move is based on becomes durable first, so that the move is a commit of its own.
        match looked {
            Looked::Done(renamed) => return Ok(renamed),
            Looked::Ends(ends) => {
                self.settle_doubt()?;
                self.end_taken_back()?;
                self.commit_taken(Scope::Objects(&ends.objects), covered)?;
            }
        }
        let (flying, moving) = {
            let state = &mut *self.state.lock();
            let ends = match look(state)? {
                Looked::Done(renamed) => return Ok(renamed),
                Looked::Ends(ends) => ends,
            };
            // What was queued of it meanwhile. Nothing more can be queued now.
            let (basis, _) = state.queued.take(Scope::Objects(&ends.objects), covered);
            if !basis.is_of_vault_alone() {
                let flying = state.fly(basis);
                let done = self.table.commit(&flying.changes());
                state.landed(&*self.table, flying, done).map_err(|failed| state.put_back(failed))?;
            }
            let (mut layer, mut moving) =
                self.move_layer(state, (from, ends.source), (to, ends.target, to_name), is_exchange, inodes)?;
            if let Some(object) = restored {
                self.restore(state, &mut layer, &mut moving, (from, object))?;
            }
            (state.fly(layer), moving)
        };
        let done = self.table.commit(&flying.changes());
        let state = &mut *self.state.lock();
        let number = moving.number;
        match state.landed(&*self.table, flying, done) {
            Ok(()) => state.has_moved(),
            Err(failed) => {
                let (error, layer) = *failed;
                match layer {
                    Some(layer) => state.has_not_moved(&layer, moving),
                    None => state.take_move_back(moving),
                }
                return Err(error);
            }
        }
        // The caller carries it out itself.
        state.due.remove(&number);
        Ok(Renamed::Intended(number))
    }

    /// Makes durable that a move was taken back whose commit was in doubt. The store has not made it, and recovery
    /// takes the store to have made all moves up to one of them (N7).
    fn end_taken_back(&self) -> Result<()> {
        let has_any = || self.state.lock().queued.has_ended(EntryMark::NOTHING);
        if !has_any() {
            return Ok(());
        }
        match self.commit_allowed(EntryMark::NOTHING) {
            Err(error) if error.is_of_policy() && !has_any() => Ok(()),
            done => done,
        }
    }

    /// The ends of a move, unless nothing must be made durable, or not yet.
    fn look_at_ends(
        &self,
        state: &mut State,
        (from, to): (EntryPlace, EntryPlace),
        is_exchange: bool,
        covered: EntryMark,
        restored: Option<ObjectId>,
    ) -> Result<Looked> {
        let (source, target) = (self.entry_in(state, &from)?, self.entry_in(state, &to)?);
        let Some(source) = source.filter(|_| target.is_some() || !is_exchange) else {
            return Ok(Looked::Done(Renamed::NoEntry));
        };
        if state.is_going(&to) || source_and_target_are_one(&source, &target) {
            return Err(AnchorError::Order { object: source.object, rule: "a name that is going was renamed over" });
        }
        let is_new = !self.has_durably_in(state, &from)?;
        // A removal that is queued there must not be replaced: it would be missed if the store does not make this move.
        if is_new && target.is_none() && state.queued.entry(&to).is_none() {
            self.place(state, to, source)?;
            state.queued.forget_entry(&from);
            state.queued.await_entry(to, source);
            return Ok(Looked::Done(Renamed::Now));
        }
        let objects = [Some(source.object), Some(from.dir), Some(to.dir), target.map(|target| target.object), restored];
        let objects: HashSet<_> = objects.into_iter().flatten().collect();
        // Nothing durable has the place of a replaced directory. So recovery could not find there what an earlier step
        // has taken out of it, or out of a directory that was in it, if the store had lost that step.
        let is_over_dir = !is_exchange && target.is_some_and(|target| target.kind == ObjectKind::Dir);
        if state.queued.is_any_late(&objects, covered) || (is_over_dir && state.queued.has_uncovered_steps(covered)) {
            return Ok(Looked::Done(Renamed::NeedsBarrier));
        }
        Ok(Looked::Ends(Ends { source, target, objects }))
    }

    /// The changes of a move. The caller holds `committing`, and no change of these objects is queued.
    fn move_layer(
        &self,
        state: &mut State,
        (from, source): (EntryPlace, EntryRow),
        (to, target, to_name): (EntryPlace, Option<EntryRow>, &[u8]),
        is_exchange: bool,
        inodes: Inodes,
    ) -> Result<(Layer, Moving)> {
        let number = state.next_intent();
        let mut moving = Moving { number, before: Vec::new(), restored: None, ends: ((from, source), (to, target)) };
        let mut layer = Layer::default();
        let over = match target {
            None => Over::Nothing,
            Some(_) if is_exchange => Over::Exchanged,
            Some(_) => Over::Replaced,
        };
        layer.intend(number, Intent::Move { from, to, to_name: to_name.into(), over, inodes });
        layer.move_entry(to, source);
        let mut move_dir = |layer: &mut Layer, state: &State, to, entry: EntryRow| {
            let moved = self.moved_dir(state, to, entry)?;
            if moved.is_some() {
                moving.before.push((entry.object, self.known(state, entry.object)?));
            }
            layer.objects.extend(moved);
            Ok(())
        };
        move_dir(&mut layer, state, to, source)?;
        match target {
            Some(target) if is_exchange => {
                layer.move_entry(from, target);
                move_dir(&mut layer, state, from, target)?;
            }
            target => {
                layer.remove_entry(from, source, number);
                if let Some(EntryRow { object, .. }) = target {
                    moving.before.push((object, self.known(state, object)?));
                    let row = self.without_link(state, object)?;
                    let is_gone = row.links == 0;
                    layer.objects.insert(object, (!is_gone).then_some(row.clone()));
                    if is_gone {
                        let (held, records) = self.held_in(state, object)?;
                        layer.held.extend(records.into_iter().map(|record| ((object, record), None)));
                        state.replacing = Some(Replaced { object, without: Some(Nameless { row, held }) });
                    }
                }
            }
        }
        Ok((layer, moving))
    }

    /// An object has an entry again, with this layer. Until that is durable, changes of it are queued as of any object
    /// that is recorded.
    fn restore(
        &self,
        state: &mut State,
        layer: &mut Layer,
        moving: &mut Moving,
        (place, object): (EntryPlace, ObjectId),
    ) -> Result<()> {
        let before = self.known(state, object)?;
        let row = Row { links: before.links + 1, ..before.clone() };
        layer.move_entry(place, EntryRow { kind: row.kind(), object });
        layer.objects.insert(object, Some(row));
        match state.nameless.remove(&object) {
            Some(nameless) => {
                let held = nameless.held.iter().map(|(record, digests)| ((object, *record), Some(digests.clone())));
                layer.held.extend(held);
                moving.restored = Some((object, nameless));
            }
            None => moving.before.push((object, before)),
        }
        Ok(())
    }

    /// The row of a directory at its new place.
    fn moved_dir(&self, state: &State, to: EntryPlace, entry: EntryRow) -> Result<Option<(ObjectId, Option<Row>)>> {
        let mut row = self.known(state, entry.object)?;
        let Content::Dir { parent, name, .. } = &mut row.content else { return Ok(None) };
        (*parent, *name) = (to.dir, to.name);
        Ok(Some((entry.object, Some(row))))
    }

    /// The store has moved an entry that was never durable ([`Renamed::Now`]): a barrier that begins from now on covers
    /// it.
    pub fn has_arrived(&self, to: EntryPlace) {
        let state = &mut *self.state.lock();
        state.made += 1;
        state.queued.has_arrived(&to, state.made);
    }

    /// The store has not moved it: it is where it was.
    pub fn has_stayed(&self, from: EntryPlace, to: EntryPlace) {
        let state = &mut *self.state.lock();
        let Some(entry) = state.queued.entry(&to).flatten() else { return };
        state.queued.forget_entry(&to);
        state.make_entry(from, entry);
        // A directory that has no durable entry has no durable row either.
        if let Some(Some(row)) = state.queued.objects.get_mut(&entry.object)
            && let Content::Dir { parent, name, .. } = &mut row.content
        {
            (*parent, *name) = (from.dir, from.name);
        }
    }

    /// Whether one of these objects, or a directory on the way to one, has a name to which the store has not moved it
    /// yet ([`Renamed::Now`]).
    pub fn awaits_any_of(&self, objects: &HashSet<ObjectId>) -> bool {
        self.state.lock().queued.awaits_any_of(objects)
    }

    fn place(&self, state: &mut State, to: EntryPlace, entry: EntryRow) -> Result<()> {
        if let Some((object, row)) = self.moved_dir(state, to, entry)? {
            state.queued.objects.insert(object, row);
        }
        Ok(())
    }

    /// Hands out the removals that are durable. The store carries them out; then call [`Anchor::carried_out`].
    pub fn due(&self) -> BTreeMap<u64, Intent> {
        let state = &mut *self.state.lock();
        let due = std::mem::take(&mut state.due);
        state.handed_out.extend(due.iter().map(|(number, intent)| (*number, intent.clone())));
        due
    }

    /// The store has carried out changes of names. Their intents stay until a barrier has covered that.
    pub fn carried_out(&self, intents: impl IntoIterator<Item = u64>) {
        let state = &mut *self.state.lock();
        for intent in intents {
            if let Some(Intent::Remove { at, .. }) = state.handed_out.remove(&intent) {
                state.going.remove(&at);
            }
            state.made += 1;
            state.queued.carried_out(intent, state.made);
        }
    }
}

/// The ends of a move.
struct Ends {
    source: EntryRow,
    target: Option<EntryRow>,
    /// the source, the target, and their directories
    objects: HashSet<ObjectId>,
}

enum Looked {
    Done(Renamed),
    Ends(Ends),
}

/// A move that is being committed.
struct Moving {
    number: u64,
    /// Objects whose rows change, with the rows before.
    before: Vec<(ObjectId, Row)>,
    /// The object that gets an entry again, as it was without one.
    restored: Option<(ObjectId, Nameless)>,
    /// The source and the target, with the entries before.
    ends: ((EntryPlace, EntryRow), (EntryPlace, Option<EntryRow>)),
}

fn source_and_target_are_one(source: &EntryRow, target: &Option<EntryRow>) -> bool {
    target.is_some_and(|target| target.object == source.object)
}

/// Numbers of the tree records held of an object, durably or queued.
pub(super) fn held_of(table: &dyn Table, state: &State, object: ObjectId) -> Result<Vec<RecordNo>> {
    let mut records = Vec::new();
    table.scan(Space::Held, &object_key(object), &mut |key, _| {
        records.extend(behind_object(key).map(|bytes| RecordNo(u64::from_be_bytes(bytes))));
        ControlFlow::Continue(())
    })?;
    for layer in state.layers().into_iter().flatten() {
        records.extend(layer.held_of(object).map(|(record, _)| record));
    }
    Ok(records)
}

impl State {
    /// A move is durable: the object that it replaced has no entry any more, and is no longer recorded.
    fn has_moved(&mut self) {
        if let Some(Replaced { object, without }) = self.replacing.take() {
            self.is_nameless(object, without);
        }
    }

    /// An object has no entry, and was as it is `without` one before it was changed: changes of it that are queued are
    /// of that. `None`: it is no longer in use.
    fn is_nameless(&mut self, object: ObjectId, without: Option<Nameless>) {
        let row = self.queued.objects.remove(&object).flatten();
        let all = (object, RecordNo(0))..=(object, RecordNo(u64::MAX));
        let held =
            self.queued.held.extract_if(all, |_, _| true).map(|((_, record), digests)| (record, digests)).collect();
        let Some(mut nameless) = without else { return };
        nameless.row = Row { links: 0, ..row.unwrap_or(nameless.row) };
        change_held(&mut nameless.held, held);
        self.nameless.insert(object, nameless);
    }

    /// A move could not be committed: changes that were queued meanwhile are applied to the rows from before the move.
    fn has_not_moved(&mut self, layer: &Layer, moving: Moving) {
        self.replacing = None;
        self.queued.vault = Some(self.vault.clone());
        if let Some((object, without)) = moving.restored {
            self.is_nameless(object, Some(without));
        }
        for (object, before) in moving.before {
            let moved_links = layer.objects.get(&object).and_then(Option::as_ref).map_or(0, |row| row.links);
            let nameless = self.name_again(object);
            let Some(mut row) = nameless.or_else(|| self.queued.objects.get(&object).cloned().flatten()) else {
                continue;
            };
            row.links = row.links + before.links - moved_links;
            if let (Content::Dir { parent, name, .. }, Content::Dir { parent: old_parent, name: old_name, .. }) =
                (&mut row.content, &before.content)
            {
                (*parent, *name) = (*old_parent, *old_name);
            }
            self.queued.objects.insert(object, Some(row));
        }
    }

    /// The commit of a move is in doubt, so it stays in flight; but the store will not make the move. What is queued
    /// above it takes it back.
    fn take_move_back(&mut self, moving: Moving) {
        let Some(flying) = self.flying.clone() else { return };
        let ((from, source), (to, target)) = moving.ends;
        self.queued.move_entry(from, source);
        match target {
            Some(target) => self.queued.move_entry(to, target),
            None => self.queued.drop_entry(to, source.object),
        }
        self.queued.carried_out(moving.number, 0);
        if let Some(Replaced { object, without: Some(Nameless { held, .. }) }) = self.replacing.take() {
            for (record, digests) in held {
                self.queued.held.entry((object, record)).or_insert(Some(digests));
            }
        }
        let before = moving.before.clone();
        let restored = moving.restored.as_ref().map(|(object, _)| *object);
        self.has_not_moved(&flying, moving);
        if let Some(object) = restored {
            self.queued.objects.insert(object, None);
            let held: Vec<_> = flying.held_of(object).map(|(record, _)| ((object, record), None)).collect();
            self.queued.held.extend(held);
        }
        for (object, row) in before {
            self.queued.objects.entry(object).or_insert(Some(row));
        }
    }

    fn make_entry(&mut self, place: EntryPlace, entry: EntryRow) {
        self.made += 1;
        self.queued.make_entry(place, entry, self.made);
    }

    fn next_intent(&mut self) -> u64 {
        let number = self.vault.next_intent;
        self.vault.next_intent += 1;
        self.queued.vault = Some(self.vault.clone());
        number
    }

    /// Whether the removal of this name has not been carried out yet.
    fn is_going(&self, place: &EntryPlace) -> bool {
        self.going.contains(place)
    }
}
