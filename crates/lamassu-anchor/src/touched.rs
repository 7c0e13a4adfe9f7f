//! The objects and directories that other writers' commits have changed.

use crate::queue::{behind_object, number_of};
use crate::table::{Change, Space};
use crate::{EntryPlace, EntryRow, ObjectId, Token};
use std::collections::{HashMap, HashSet};

/// Directories whose entries were changed, and the new places of objects.
#[derive(Debug, Default)]
pub struct Touched {
    /// directories, by their objects
    pub dirs: HashSet<ObjectId>,
    /// objects whose rows or held records were changed
    pub objects: HashSet<ObjectId>,
    /// for each object, one of its new entries
    pub places: HashMap<ObjectId, EntryPlace>,
}

impl Touched {
    /// Whether an object was changed.
    pub fn is_of(&self, object: ObjectId) -> bool {
        self.objects.contains(&object) || self.dirs.contains(&object)
    }

    /// Adds the changes of a commit.
    pub fn add(&mut self, changes: &[Change]) {
        for change in changes {
            let Some(object) = number_of(&change.key) else { continue };
            if matches!(change.space, Space::Objects | Space::Open | Space::Held) {
                self.objects.insert(ObjectId(object));
            }
            let Some(name) = behind_object(&change.key).filter(|_| change.space == Space::Entries) else { continue };
            let dir = object;
            let place = EntryPlace { dir: ObjectId(dir), name: Token(name) };
            self.dirs.insert(place.dir);
            // An entry that does not parse is reported when it is read.
            if let Some(Ok(entry)) = change.value.as_deref().map(EntryRow::decode) {
                self.places.insert(entry.object, place);
            }
        }
    }
}
