//! The moves that recovery finds as intents: how many of them the store has kept, and where everything was after each.
//!
//! The store makes moves in the order of their intents, and after a crash it has kept the first n of them. The number n
//! is not recorded: it is the one for which every recorded object is where it should be.

use lamassu_anchor::row::{Inodes, Intent, Over};
use lamassu_anchor::{EntryPlace, EntryRow, ObjectId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

/// A move.
pub(super) struct Move {
    number: u64,
    pub from: EntryPlace,
    pub to: EntryPlace,
    pub to_name: OsString,
    pub over: Over,
    pub inodes: Inodes,
}

/// A removal.
pub(super) struct Removed {
    pub at: EntryPlace,
    pub was: EntryRow,
    /// The number of moves before it.
    pub until: usize,
}

/// All moves and removals, in order.
pub(super) struct History {
    pub moves: Vec<Move>,
    pub removed: Vec<Removed>,
    /// Every place in them.
    pub places: BTreeSet<EntryPlace>,
    by_object: HashMap<ObjectId, usize>,
}

impl History {
    pub fn of(intents: &BTreeMap<u64, Intent>) -> History {
        let mut history =
            History { moves: Vec::new(), removed: Vec::new(), places: BTreeSet::new(), by_object: HashMap::new() };
        for (number, intent) in intents {
            match intent {
                Intent::Remove { at, was } => {
                    history.places.insert(*at);
                    history.by_object.insert(was.object, history.removed.len());
                    history.removed.push(Removed { at: *at, was: *was, until: history.moves.len() });
                }
                Intent::Move { from, to, to_name, over, inodes } => {
                    history.places.extend([*from, *to]);
                    let (from, to, over, inodes) = (*from, *to, *over, *inodes);
                    let to_name = OsString::from_vec(to_name.to_vec());
                    history.moves.push(Move { number: *number, from, to, to_name, over, inodes });
                }
            }
        }
        debug_assert!(history.moves.is_sorted_by_key(|of| of.number));
        history
    }

    /// Where the object at a place after `until` moves was when the store had made `kept` moves. `None`: it was made
    /// there since.
    pub fn back(&self, place: EntryPlace, until: usize, kept: usize) -> Option<EntryPlace> {
        if !self.places.contains(&place) {
            return Some(place);
        }
        let mut at = place;
        for done in self.moves.get(kept..until).unwrap_or_default().iter().rev() {
            if done.to == at {
                at = done.from;
            } else if done.from == at {
                at = Some(done.to).filter(|_| done.over == Over::Exchanged)?;
            }
        }
        Some(at)
    }

    /// Where the object recorded at a place was then.
    pub fn recorded_at(&self, place: EntryPlace, kept: usize) -> Option<EntryPlace> {
        self.back(place, self.moves.len(), kept)
    }

    /// The inode numbers in the store of the objects recorded at the places of moves, at their last move. Those that
    /// were not moved have none.
    pub fn inodes(&self) -> HashMap<EntryPlace, u64> {
        let mut inodes = HashMap::new();
        for done in &self.moves {
            inodes.insert(done.to, done.inodes.source);
            match done.over {
                Over::Exchanged => _ = inodes.insert(done.from, done.inodes.target),
                Over::Nothing | Over::Replaced => _ = inodes.remove(&done.from),
            }
        }
        inodes
    }

    /// Where an object was then that was removed later.
    pub fn removed_at(&self, object: ObjectId, kept: usize) -> Option<EntryPlace> {
        let Removed { at, until, .. } = self.removed.get(*self.by_object.get(&object)?)?;
        self.back(*at, *until, kept)
    }

    /// Where removed objects are after all moves.
    pub fn removed_places(&self) -> impl Iterator<Item = EntryPlace> + '_ {
        self.removed.iter().filter_map(|removed| self.forward(removed.at, removed.until))
    }

    /// Where the object at a place after `until` moves is after all moves. `None`: another one has replaced it.
    fn forward(&self, place: EntryPlace, until: usize) -> Option<EntryPlace> {
        let mut at = place;
        for done in self.moves.get(until..).unwrap_or_default() {
            if done.from == at {
                at = done.to;
            } else if done.to == at {
                at = Some(done.from).filter(|_| done.over == Over::Exchanged)?;
            }
        }
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_anchor::{ObjectKind, Token};

    fn at(name: u8) -> EntryPlace {
        EntryPlace { dir: ObjectId::ROOT, name: Token([name; 16]) }
    }

    #[test]
    fn everything_is_followed_back() {
        let moved = |from, to, over| {
            let inodes = Inodes { source: 100 + u64::from(from), target: 100 + u64::from(to) };
            Intent::Move { from: at(from), to: at(to), to_name: [to].into(), over, inodes }
        };
        let was = EntryRow { kind: ObjectKind::File, object: ObjectId(7) };
        let intents = [
            (1, moved(1, 2, Over::Nothing)),
            (3, Intent::Remove { at: at(2), was }),
            (4, moved(3, 2, Over::Nothing)),
            (6, moved(2, 4, Over::Exchanged)),
        ];
        let history = History::of(&intents.into());
        let of = |name, kept| history.recorded_at(at(name), kept);
        assert_eq!((of(4, 3), of(4, 2), of(4, 1), of(4, 0)), (Some(at(4)), Some(at(2)), Some(at(3)), Some(at(3))));
        assert_eq!((of(2, 3), of(2, 2), of(2, 1)), (Some(at(2)), Some(at(4)), Some(at(4))));
        assert_eq!(of(3, 1), None, "made since");
        assert_eq!(history.removed_at(ObjectId(7), 1), Some(at(2)));
        assert_eq!(history.removed_at(ObjectId(7), 0), Some(at(1)));
        let inodes = history.inodes();
        assert_eq!(inodes, HashMap::from([(at(2), 104), (at(4), 102)]));
    }
}
