//! What a person decides: rows and entries are replaced by what the store shows (`docs/freshness.md`, section 6).

use super::names::held_of;
use super::{Anchor, Result};
use crate::queue::Layer;
use crate::row::{Entry, EntryPlace, Row};
use crate::{AnchorError, ObjectId};
use std::collections::BTreeMap;

/// Rows and entries as they are from now on; none: they go.
#[derive(Clone, Debug, Default)]
pub struct Decided {
    /// By object.
    pub rows: BTreeMap<ObjectId, Option<Row>>,
    /// By place, with the object that is, or was, there.
    pub entries: BTreeMap<EntryPlace, (ObjectId, Option<Entry>)>,
}

impl Decided {
    /// How many keys change.
    pub fn len(&self) -> usize {
        self.rows.len() + self.entries.len()
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Anchor {
    /// A number for an object that is decided on. It is never given again.
    pub fn new_object(&self) -> ObjectId {
        let state = &mut *self.state.lock();
        let object = state.vault.next_object;
        state.vault.next_object.0 += 1;
        state.queued.vault = Some(state.vault.clone());
        object
    }

    /// Replaces rows and entries, durably, with what is held of those objects. Nobody changes the same at that time,
    /// and nothing of it is queued.
    ///
    /// # Errors
    /// [`AnchorError::Order`] for what is queued; those of the table: nothing has changed then.
    pub fn decide(&self, decided: Decided) -> Result<()> {
        let _in_order = self.committing.lock();
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
        self.state.lock().landed(flying, done).map_err(|(error, _)| error)
    }
}
