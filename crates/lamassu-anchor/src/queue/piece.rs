//! A part of the queue that one commit can take.
//!
//! A queue may be longer than a message to a server may be, if the server has refused commits for long, since its disk
//! is full. With an object come all its queued names and held records, the new directories on the way to it, and, if it
//! is a directory that is removed, what is removed in it. What no barrier covers stays out of the commit, with all that
//! is in such a directory. So each commit of a piece leaves a state that an fsync of the same objects could have left.

use super::{EntryMark, Layer, QueuedEntry, QueuedIntent};
use crate::row::EntryPlace;
use crate::{ObjectId, Token};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Bytes of the changes in one commit, roughly, unless one object needs more. Well below what a message may have; a
/// cluster of several servers makes so much durable in a few seconds.
pub(crate) const PIECE_MAX: usize = 1 << 20;

/// Bytes of an object's row and its keys, roughly.
const ROW: usize = 256;
/// Bytes of an entry and its key.
const ENTRY: usize = 64;
/// Bytes of an intent, roughly.
const INTENT: usize = 128;
/// Bytes of a held record at the usual degree, and its key.
const HELD: usize = 16 + 16 * 32;

/// What is to be made durable.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wanted<'a> {
    /// Everything, except what is of these objects.
    AllBut(&'a HashSet<ObjectId>),
    /// What is of these objects.
    Only(&'a HashSet<ObjectId>),
}

impl Layer {
    /// The bytes of its changes, roughly; never too few, unless a tree has an unusual degree.
    pub fn weight(&self) -> usize {
        self.objects.len() * ROW + self.entries.len() * ENTRY + self.held.len() * HELD + self.intents.len() * INTENT
    }

    /// Objects to commit next, if one commit cannot take all that is wanted and a commit up to `mark` may take; `None`:
    /// one commit can.
    pub fn piece(&self, wanted: Wanted<'_>, mark: EntryMark) -> Option<HashSet<ObjectId>> {
        let is_light = |wanted: Wanted<'_>| match wanted {
            Wanted::AllBut(_) => false,
            Wanted::Only(objects) => {
                let held: usize = objects.iter().map(|object| self.held_of(*object).count()).sum();
                objects.len() * (ROW + ENTRY + INTENT) + held * HELD <= PIECE_MAX
            }
        };
        // The usual cases, without looking at the whole queue.
        if self.weight() <= PIECE_MAX || is_light(wanted) {
            return None;
        }
        let late = match wanted {
            Wanted::AllBut(_) => self.held_back(mark, None),
            Wanted::Only(objects) => self.held_back(mark, Some(objects)),
        };
        let is_wanted = |object: &ObjectId| {
            !late.contains(object)
                && match wanted {
                    Wanted::AllBut(but) => !but.contains(object),
                    Wanted::Only(only) => only.contains(object),
                }
        };
        let index = Index::of(self);
        let mut piece = Piece { layer: self, index: &index, objects: HashSet::new(), weight: 0 };
        for object in index.order.iter().filter(|object| is_wanted(object)) {
            piece.add(*object);
            if piece.weight > PIECE_MAX {
                return Some(piece.objects);
            }
        }
        None
    }

    /// The objects of queued removals, in the order in which they were queued: a directory comes after what is in it.
    /// Then all others by their numbers.
    fn in_order(&self) -> Vec<ObjectId> {
        let removed = self.entries.values().filter_map(|queued| Some((queued.intent?, queued.object)));
        let removed: BTreeMap<u64, ObjectId> = removed.collect();
        let mut others: Vec<ObjectId> = self.objects.keys().copied().collect();
        others.extend(self.held.keys().map(|(object, _)| *object));
        others.extend(self.entries.values().map(|queued| queued.object));
        others.sort_unstable();
        others.dedup();
        removed.into_values().chain(others).collect()
    }
}

/// What is queued of each object.
struct Index<'a> {
    order: Vec<ObjectId>,
    names: HashMap<ObjectId, Vec<(&'a EntryPlace, &'a QueuedEntry)>>,
    held: HashMap<ObjectId, usize>,
}

impl<'a> Index<'a> {
    fn of(layer: &'a Layer) -> Index<'a> {
        let (mut names, mut held) = (HashMap::<_, Vec<_>>::new(), HashMap::new());
        for (place, queued) in &layer.entries {
            names.entry(queued.object).or_default().push((place, queued));
        }
        for (object, _) in layer.held.keys() {
            *held.entry(*object).or_default() += 1;
        }
        Index { order: layer.in_order(), names, held }
    }
}

struct Piece<'a> {
    layer: &'a Layer,
    index: &'a Index<'a>,
    objects: HashSet<ObjectId>,
    weight: usize,
}

impl Piece<'_> {
    /// Adds an object, and what must be committed with it or before it. The commit leaves out what is late.
    fn add(&mut self, object: ObjectId) {
        let mut left = vec![object];
        while let Some(object) = left.pop() {
            if !self.objects.insert(object) {
                continue;
            }
            let row = self.layer.objects.get(&object);
            self.weight += row.map_or(0, |_| ROW) + self.index.held.get(&object).map_or(0, |records| records * HELD);
            for (place, queued) in self.index.names.get(&object).into_iter().flatten() {
                self.weight += ENTRY + queued.intent.map_or(0, |_| INTENT);
                left.extend(queued.value.map(|_| place.dir));
            }
            if matches!(row, Some(None)) {
                let (first, last) = (Token([0; 16]), Token([0xff; 16]));
                let places = EntryPlace { dir: object, name: first }..=EntryPlace { dir: object, name: last };
                left.extend(self.layer.entries.range(places).map(|(_, queued)| queued.object));
            }
        }
    }
}

/// Whether an intent has ended, as far as a commit up to this mark may know.
pub(super) fn has_ended(queued: &QueuedIntent, mark: EntryMark) -> bool {
    matches!(queued, QueuedIntent::CarriedOut { number } if *number <= mark.0)
}
