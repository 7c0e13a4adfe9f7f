//! What the changes that other writers committed are about.

use crate::queue::{behind_object, number_of};
use crate::table::{Change, Space};
use crate::{Entry, EntryPlace, ObjectId, Token};
use std::collections::{HashMap, HashSet};

/// Directories whose entries were changed, and where objects lie since.
#[derive(Debug, Default)]
pub struct Touched {
    /// by their objects
    pub dirs: HashSet<ObjectId>,
    /// of each object one of the entries that were made
    pub places: HashMap<ObjectId, EntryPlace>,
}

impl Touched {
    /// Takes a commit in.
    pub fn add(&mut self, changes: &[Change]) {
        for change in changes.iter().filter(|change| change.space == Space::Entries) {
            let Some((dir, name)) = number_of(&change.key).zip(behind_object(&change.key)) else { continue };
            let place = EntryPlace { dir: ObjectId(dir), name: Token(name) };
            self.dirs.insert(place.dir);
            // An entry that does not parse is met when it is read.
            if let Some(Ok(entry)) = change.value.as_deref().map(Entry::decode) {
                self.places.insert(entry.object, place);
            }
        }
    }
}
