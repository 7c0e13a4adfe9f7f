//! A person's decisions: rows and entries are replaced by what the store shows (`docs/freshness.md`, section 6).

use super::names::held_of;
use super::{Anchor, Result};
use crate::queue::Layer;
use crate::row::{EntryPlace, EntryRow, Row};
use crate::{AnchorError, ObjectId};
use std::collections::BTreeMap;

/// The new rows and entries; `None`: removed.
#[derive(Clone, Debug, Default)]
pub struct Decided {
    /// by object
    pub rows: BTreeMap<ObjectId, Option<Row>>,
    /// by place, with the object that is, or was, there
    pub entries: BTreeMap<EntryPlace, (ObjectId, Option<EntryRow>)>,
}

impl Decided {
    /// The number of keys that change.
    pub fn len(&self) -> usize {
        self.rows.len() + self.entries.len()
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Anchor {
    /// A new number for an object. Numbers are never used again.
    pub fn new_object(&self) -> ObjectId {
        let state = &mut *self.state.lock();
        let object = state.vault.next_object;
        state.vault.next_object.0 += 1;
        state.queued.vault = Some(state.vault.clone());
        object
    }

    /// Replaces rows and entries, durably, and the held records of those objects. No one else may change them at the
    /// same time, and no change of them may be queued.
    ///
    /// # Errors
    /// [`AnchorError::Order`] if a change is queued; those of the table: then nothing has changed.
    pub fn decide(&self, decided: Decided) -> Result<()> {
        let _in_order = self.in_order()?;
        let flying = {
            let (state, mut layer) = (&mut *self.state.lock(), Layer::default());
            for (object, row) in decided.rows {
                if state.queued.objects.contains_key(&object) {
                    return Err(AnchorError::Order { object, rule: "decided upon, and still queued" });
                }
                let held = held_of(&*self.table, state, object)?;
                layer.held.extend(held.into_iter().map(|record| ((object, record), None)));
                layer.objects.insert(object, row);
            }
            for (place, (object, entry)) in decided.entries {
                match entry {
                    Some(entry) => layer.move_entry(place, entry),
                    None => layer.drop_entry(place, object),
                }
            }
            state.fly(layer)
        };
        let done = self.table.commit(&flying.changes());
        self.state.lock().landed(&*self.table, flying, done).map_err(|failed| failed.0)
    }
}
