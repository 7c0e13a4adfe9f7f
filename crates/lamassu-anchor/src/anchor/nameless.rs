//! Objects without an entry: programs have them open, or the removal may be undone.

use super::Anchor;
use super::state::Nameless;
use crate::ObjectId;
use crate::row::{Intent, Row};
use std::collections::BTreeMap;

impl Anchor {
    /// An object without an entry is no longer in use.
    pub fn forget(&self, object: ObjectId) {
        let state = &mut *self.state.lock();
        state.nameless.remove(&object);
        if let Some(replaced) = state.replacing.as_mut().filter(|replaced| replaced.object == object) {
            replaced.without = None;
        }
    }

    /// Takes the row of a file without an entry, for [`Anchor::keep_nameless`] of the anchor of this host's next turn.
    /// `None`: there is none, or not all of its content is committed.
    pub fn take_nameless(&self, object: ObjectId) -> Option<Row> {
        let Nameless { row, held } = self.state.lock().nameless.remove(&object)?;
        let is_clean = held.is_empty() && row.file().is_some_and(|file| file.open.is_none());
        is_clean.then_some(row)
    }

    /// Continues with a file without an entry that programs of this host have open. Its row is only in memory. Its
    /// number is nobody else's: numbers up to a commit are never given again.
    pub fn keep_nameless(&self, object: ObjectId, row: Row) {
        let nameless = Nameless { row: Row { links: 0, ..row }, held: BTreeMap::new() };
        self.state.lock().nameless.insert(object, nameless);
    }

    /// Whether an object has no entry, and will get none again, whatever becomes of what is still queued: its removal
    /// is durable, and the store has carried it out. No if the table cannot tell.
    pub fn is_removed_for_good(&self, object: ObjectId) -> bool {
        let state = &*self.state.lock();
        let is_of_it = |intent: &Intent| matches!(intent, Intent::Remove { was, .. } if was.object == object);
        let is_going = state.due.values().chain(state.handed_out.values()).any(is_of_it);
        let is_changing = state.layers().into_iter().flatten().any(|layer| layer.objects.contains_key(&object));
        // A number that no commit has given away may become another object's.
        let is_recorded = object < state.durable_next;
        is_recorded && !is_going && !is_changing && matches!(self.durable_row(object), Ok(None))
    }
}
