//! Entries: made, removed, moved (`docs/freshness.md`, section 5).
//!
//! What is *made* is queued after the store's step. What *goes* is queued, and the store's step follows its commit: see
//! [`Anchor::due`]. What *moves* is durable before the store's step.

use super::{Anchor, Result, State};
use crate::queue::{Layer, Mark, Scope};
use crate::queue::{behind_object, object_key};
use crate::row::{Content, Entry, EntryPlace, Intent, Over, Row};
use crate::table::{Space, Table};
use crate::{AnchorError, ObjectId, RecordNo};
use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;

/// How an entry was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// It is queued.
    Queued(ObjectId),
    /// A removal of this name is not carried out yet: commit, carry out what is due, and make it then.
    NameIsGoing,
}

/// What a removal needs of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// There is no such entry.
    NoEntry,
    /// The store's step may be done at once: the anchor never had the entry durably.
    Now,
    /// The store's step is done when this intent is due.
    WhenDue(u64),
}

/// What a rename needs of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renamed {
    /// There is nothing to move, or nothing to exchange it with.
    NoEntry,
    /// The store's step may be done at once: the anchor never had these entries durably.
    Now,
    /// It is durable: the store's step may be done; then [`Anchor::carried_out`].
    Intended(u64),
    /// What moves, or where it goes, is not covered by a barrier of the store yet. Nothing was changed: take a mark,
    /// have a barrier, and ask again.
    NeedsBarrier,
}

impl Anchor {
    /// Queues an object that was just made in the store, under a name. Call [`Anchor::may_make`] before the store's
    /// step.
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
        let entry = Entry { kind: row.kind(), object };
        state.queued.objects.insert(object, Some(Row { links: 1, ..row }));
        state.make_entry(place, entry);
        Ok(Made::Queued(object))
    }

    /// Queues another name, just made in the store, of an object.
    ///
    /// # Errors
    /// [`AnchorError::Unknown`]; those of the table.
    pub fn link(&self, place: EntryPlace, object: ObjectId) -> Result<Made> {
        let state = &mut *self.state.lock();
        if state.is_going(&place) {
            return Ok(Made::NameIsGoing);
        }
        let mut row = self.known(state, object)?;
        row.links += 1;
        let entry = Entry { kind: row.kind(), object };
        state.nameless.remove(&object);
        state.queue_row(object, row);
        state.make_entry(place, entry);
        Ok(Made::Queued(object))
    }

    /// Whether the store has something that was removed, and that it is to let go of.
    pub fn has_removals(&self) -> bool {
        let state = &*self.state.lock();
        let queued = state.layers().into_iter().flatten().flat_map(|layer| layer.intents().map(|(_, intent)| intent));
        let all = queued.chain(state.due.values().cloned()).chain(state.handed_out.values().cloned());
        all.into_iter().any(|intent| matches!(intent, Intent::Remove { .. }))
    }

    /// Whether a name may be made in the store: no removal of it waits to be carried out.
    pub fn may_make(&self, place: &EntryPlace) -> bool {
        !self.state.lock().is_going(place)
    }

    /// Queues the removal of an entry. It is gone for readers at once.
    ///
    /// # Errors
    /// Those of the table.
    pub fn remove(&self, place: EntryPlace) -> Result<Removal> {
        let state = &mut *self.state.lock();
        let Some(was) = self.entry_in(state, &place)? else { return Ok(Removal::NoEntry) };
        let is_flying = state.flying.as_ref().is_some_and(|layer| layer.entry(&place).is_some());
        let is_durable = is_flying || self.durable_entry(&place)?.is_some();
        let row = self.without_link(state, was.object)?;
        self.queue_less(state, was.object, row)?;
        if !is_durable {
            state.queued.forget_entry(&place);
            return Ok(Removal::Now);
        }
        let number = state.next_intent();
        state.queued.intend(number, Intent::Remove { at: place, was });
        state.queued.remove_entry(place, was, number);
        Ok(Removal::WhenDue(number))
    }

    fn without_link(&self, state: &State, object: ObjectId) -> Result<Row> {
        let mut row = self.known(state, object)?;
        row.links = row.links.saturating_sub(1);
        Ok(row)
    }

    /// Queues the row of an object that has lost an entry; without any it goes, with all that is held of it.
    fn queue_less(&self, state: &mut State, object: ObjectId, row: Row) -> Result<()> {
        if row.links > 0 {
            state.queue_row(object, row);
            return Ok(());
        }
        state.queued.objects.insert(object, None);
        let held = held_of(&*self.table, state, object)?;
        state.queued.held.extend(held.into_iter().map(|record| ((object, record), None)));
        state.nameless.insert(object, row);
        Ok(())
    }

    /// An object without an entry is in use no longer.
    pub fn forget(&self, object: ObjectId) {
        self.state.lock().nameless.remove(&object);
    }

    /// Moves an entry, over what is there, or exchanges two. `to_name` is the stored name that it will have. `covered`
    /// is a mark that a barrier of the store has covered.
    ///
    /// # Errors
    /// Those of the table: nothing has changed then.
    pub fn rename(
        &self,
        from: EntryPlace,
        (to, to_name): (EntryPlace, &[u8]),
        is_exchange: bool,
        covered: Mark,
    ) -> Result<Renamed> {
        let _in_order = self.committing.lock();
        let (source, target) = {
            let state = &mut *self.state.lock();
            let (source, target) = (self.entry_in(state, &from)?, self.entry_in(state, &to)?);
            let Some(source) = source.filter(|_| target.is_some() || !is_exchange) else {
                return Ok(Renamed::NoEntry);
            };
            if state.is_going(&to) || source_and_target_are_one(&source, &target) {
                return Err(AnchorError::Order {
                    object: source.object,
                    rule: "a name that is going was renamed over",
                });
            }
            let is_new = self.durable_entry(&from)?.is_none();
            if is_new && target.is_none() {
                state.queued.forget_entry(&from);
                self.place(state, to, source)?;
                state.make_entry(to, source);
                return Ok(Renamed::Now);
            }
            let ends = [Some(source.object), Some(from.dir), Some(to.dir), target.map(|target| target.object)];
            if ends.into_iter().flatten().any(|object| state.queued.is_late(object, covered)) {
                return Ok(Renamed::NeedsBarrier);
            }
            (source, target)
        };
        // What the move builds on becomes durable first, so that the move is a commit of its own.
        let ends: HashSet<_> = [source.object, from.dir, to.dir].into_iter().chain(target.map(|t| t.object)).collect();
        self.commit_taken(Scope::Objects(&ends), covered)?;
        let (layer, number) = self.move_layer((from, source), (to, target, to_name), is_exchange)?;
        let nameless = target.filter(|_| !is_exchange).map(|target| target.object);
        let nameless = nameless.filter(|object| matches!(layer.objects.get(object), Some(None)));
        let row = nameless.map(|object| self.row(object).map(|row| (object, row))).transpose()?;
        self.commit_layer(layer).map_err(|failed| failed.0)?;
        let state = &mut *self.state.lock();
        // The caller carries it out itself.
        state.due.remove(&number);
        state.nameless.extend(row.map(|(object, row)| (object, Row { links: 0, ..row })));
        Ok(Renamed::Intended(number))
    }

    /// What a move changes. The caller holds `committing`, and nothing of it is queued.
    fn move_layer(
        &self,
        (from, source): (EntryPlace, Entry),
        (to, target, to_name): (EntryPlace, Option<Entry>, &[u8]),
        is_exchange: bool,
    ) -> Result<(Layer, u64)> {
        let state = &mut *self.state.lock();
        let number = state.next_intent();
        let mut layer = Layer::default();
        let over = match target {
            None => Over::Nothing,
            Some(_) if is_exchange => Over::Exchanged,
            Some(_) => Over::Replaced,
        };
        layer.intend(number, Intent::Move { from, to, to_name: to_name.into(), over });
        layer.move_entry(to, source);
        layer.objects.extend(self.moved_dir(state, to, source)?);
        match target {
            Some(target) if is_exchange => {
                layer.move_entry(from, target);
                layer.objects.extend(self.moved_dir(state, from, target)?);
            }
            target => {
                layer.remove_entry(from, source, number);
                if let Some(target) = target {
                    let row = self.without_link(state, target.object)?;
                    let is_gone = row.links == 0;
                    layer.objects.insert(target.object, (!is_gone).then_some(row));
                    let held = if is_gone { held_of(&*self.table, state, target.object)? } else { Vec::new() };
                    layer.held.extend(held.into_iter().map(|record| ((target.object, record), None)));
                }
            }
        }
        Ok((layer, number))
    }

    /// The row of a directory that is somewhere else from now on.
    fn moved_dir(&self, state: &State, to: EntryPlace, entry: Entry) -> Result<Option<(ObjectId, Option<Row>)>> {
        let mut row = self.known(state, entry.object)?;
        let Content::Dir { parent, name, .. } = &mut row.content else { return Ok(None) };
        (*parent, *name) = (to.dir, to.name);
        Ok(Some((entry.object, Some(row))))
    }

    fn place(&self, state: &mut State, to: EntryPlace, entry: Entry) -> Result<()> {
        if let Some((object, row)) = self.moved_dir(state, to, entry)? {
            state.queued.objects.insert(object, row);
        }
        Ok(())
    }

    /// Hands out the removals that are durable: the store carries them out, and then [`Anchor::carried_out`].
    pub fn due(&self) -> BTreeMap<u64, Intent> {
        let state = &mut *self.state.lock();
        let due = std::mem::take(&mut state.due);
        state.handed_out.extend(due.iter().map(|(number, intent)| (*number, intent.clone())));
        due
    }

    /// The store has carried out changes of names. Recovery knows of them until a barrier has covered that.
    pub fn carried_out(&self, intents: impl IntoIterator<Item = u64>) {
        let state = &mut *self.state.lock();
        for intent in intents {
            state.handed_out.remove(&intent);
            state.made += 1;
            state.queued.carried_out(intent, state.made);
        }
    }
}

fn source_and_target_are_one(source: &Entry, target: &Option<Entry>) -> bool {
    target.is_some_and(|target| target.object == source.object)
}

/// Tree records that are held of an object, durably or not.
pub(super) fn held_of(table: &dyn Table, state: &State, object: ObjectId) -> Result<Vec<RecordNo>> {
    let mut records = Vec::new();
    table.scan(Space::Held, &object_key(object), &mut |key, _| {
        records.extend(behind_object(key).map(|bytes| RecordNo(u64::from_be_bytes(bytes))));
        ControlFlow::Continue(())
    })?;
    for layer in state.layers().into_iter().flatten() {
        let of_object = layer.held.range((object, RecordNo(0))..=(object, RecordNo(u64::MAX)));
        records.extend(of_object.map(|((_, record), _)| *record));
    }
    Ok(records)
}

impl State {
    fn make_entry(&mut self, place: EntryPlace, entry: Entry) {
        self.made += 1;
        self.queued.make_entry(place, entry, self.made);
    }

    fn next_intent(&mut self) -> u64 {
        let number = self.vault.next_intent;
        self.vault.next_intent += 1;
        self.queued.vault = Some(self.vault.clone());
        number
    }

    /// Whether a removal of this name is not carried out yet.
    fn is_going(&self, place: &EntryPlace) -> bool {
        let is_it = |intent: &Intent| matches!(intent, Intent::Remove { at, .. } if at == place);
        let queued = self.layers().into_iter().flatten().flat_map(|layer| layer.intents().map(|(_, intent)| intent));
        let mut queued = queued.filter(is_it);
        queued.next().is_some() || self.due.values().chain(self.handed_out.values()).any(is_it)
    }
}
