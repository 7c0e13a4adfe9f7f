//! What is in force of an anchor and not yet durable: queued changes, the changes in flight, and objects between names.

use super::Result;
use crate::queue::Layer;
use crate::row::{EntryPlace, Intent, Row, VaultRow};
use crate::table::Table;
use crate::{AnchorError, Digests, ObjectId, RecordNo, Revision};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

pub(super) struct State {
    pub vault: VaultRow,
    /// The next number of an object, as of the last commit.
    pub durable_next: ObjectId,
    pub queued: Layer,
    /// The changes in flight. They stay there if their commit fails in doubt: they may be, or become, durable.
    pub flying: Option<Arc<Layer>>,
    /// The number of entries made so far.
    pub made: u64,
    /// Objects without an entry that are still in use.
    pub nameless: HashMap<ObjectId, Nameless>,
    /// The object that loses its last entry by the move that is being committed.
    pub replacing: Option<Replaced>,
    /// Changes of names that are durable here, for the store to carry out.
    pub due: BTreeMap<u64, Intent>,
    /// The same, handed out and not carried out yet.
    pub handed_out: BTreeMap<u64, Intent>,
    /// Removed names, until the store has carried out the removal.
    pub going: HashSet<EntryPlace>,
    /// Replacements that no barrier covers yet.
    pub replaced: super::replace::Replaced,
}

/// What would be recorded of an object if it had an entry. It may get one again: a removal that fails in the store is
/// undone.
pub(super) struct Nameless {
    pub row: Row,
    pub held: BTreeMap<RecordNo, Digests>,
}

/// An object that loses its last entry by a move. Until that is durable, its removal is in flight, and changes of it
/// are queued. So nothing is lost if the commit fails.
pub(super) struct Replaced {
    pub object: ObjectId,
    /// The object without an entry; `None`: it is no longer in use.
    pub without: Option<Nameless>,
}

/// The error of a commit, and the changes that were in flight; `None`: they still are.
pub(super) type Failed = Box<(AnchorError, Option<Layer>)>;

impl State {
    /// Puts a layer in flight: it is in force, and about to be durable.
    pub fn fly(&mut self, mut layer: Layer) -> Arc<Layer> {
        self.vault.revision = Revision(self.vault.revision.0 + 1);
        layer.vault = Some(self.vault.clone());
        let layer = Arc::new(layer);
        self.flying = Some(layer.clone());
        layer
    }

    /// The changes in flight are durable, or are given back; or they stay in flight, if the commit is in doubt.
    pub fn landed(
        &mut self,
        table: &dyn Table,
        flying: Arc<Layer>,
        done: Result<()>,
    ) -> std::result::Result<(), Failed> {
        let done = match done {
            Err(error) if table.may_be_in_doubt() => return Err(Box::new((error, None))),
            done => done,
        };
        self.flying = None;
        // No other reference exists: readers use it under this lock only.
        let layer = Arc::into_inner(flying).unwrap_or_default();
        match done {
            Ok(()) => {
                self.durable_next = layer.vault.as_ref().map_or(self.durable_next, |vault| vault.next_object);
                // A move that was taken back is not due.
                let queued = &self.queued;
                self.due.extend(layer.intents().filter(|(intent, _)| !queued.is_carried_out(*intent)));
                Ok(())
            }
            Err(error) => Err(Box::new((error, Some(layer)))),
        }
    }

    pub fn put_back(&mut self, failed: Failed) -> AnchorError {
        let (error, layer) = *failed;
        self.queued.put_back(layer.unwrap_or_default());
        error
    }

    /// The row of an object that has lost its last entry and is still in use.
    pub fn row_without_entry(&self, object: ObjectId) -> Option<Row> {
        let replaced = self.replacing.as_ref().filter(|replaced| replaced.object == object);
        let nameless = self.nameless.get(&object).or_else(|| replaced?.without.as_ref());
        nameless.map(|nameless| nameless.row.clone())
    }

    /// Queued changes and those in flight, newest first.
    pub fn layers(&self) -> [Option<&Layer>; 2] {
        [Some(&self.queued), self.flying.as_deref()]
    }

    /// Objects of a directory's entries that are not durable yet, and of those in directories that are removed with
    /// them.
    pub fn objects_in(&self, dir: ObjectId) -> HashSet<ObjectId> {
        let (mut objects, mut removed, mut left) = (HashSet::new(), HashSet::new(), vec![dir]);
        while let Some(dir) = left.pop() {
            for (object, is_removed) in self.layers().into_iter().flatten().flat_map(|layer| layer.objects_in(dir)) {
                objects.insert(object);
                left.extend(Some(object).filter(|_| is_removed && removed.insert(object)));
            }
        }
        objects
    }

    /// Queues the new row of an object.
    pub fn queue_row(&mut self, object: ObjectId, row: Row) {
        match self.nameless.get_mut(&object) {
            Some(nameless) => nameless.row = row,
            None => drop(self.queued.objects.insert(object, Some(row))),
        }
    }

    /// The queued changes of an object's held records.
    pub fn queued_held(&self, object: ObjectId) -> QueuedHeld {
        let held = self.layers().into_iter().rev().flatten().flat_map(|layer| layer.held_of(object));
        held.map(|(record, digests)| (record, digests.clone())).collect()
    }

    /// An object is about to get an entry again: its held records are queued, and its row is returned for the caller to
    /// queue.
    pub fn name_again(&mut self, object: ObjectId) -> Option<Row> {
        let Nameless { row, held } = self.nameless.remove(&object)?;
        self.queued.held.extend(held.into_iter().map(|(record, digests)| ((object, record), Some(digests))));
        Some(row)
    }
}

/// Changes of an object's held records; `None`: no longer held.
pub(super) type QueuedHeld = BTreeMap<RecordNo, Option<Digests>>;

pub(super) fn change_held(held: &mut BTreeMap<RecordNo, Digests>, changes: QueuedHeld) {
    for (record, digests) in changes {
        match digests {
            Some(digests) => held.insert(record, digests),
            None => held.remove(&record),
        };
    }
}
