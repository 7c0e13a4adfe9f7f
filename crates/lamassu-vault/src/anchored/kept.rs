//! How many of the interrupted moves the store has kept (N3).
//!
//! The numbers are tried from the highest down: usually a store has kept all. From one number to the next, one move
//! changes where objects lie. So only what it moves is judged again, and recovery takes no longer for many moves that
//! the store has lost than for many that it has kept. Everything is judged again only if a directory moves in which
//! some of the places are.

use super::Anchored;
use super::history::History;
use super::locate::Located;
use crate::Vault;
use lamassu_anchor::row::Over;
use lamassu_anchor::{EntryPlace, EntryRow};
use std::collections::{BTreeMap, HashMap};

/// What speaks against a number of moves, the most important first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Faults {
    /// Recorded objects that are elsewhere.
    misplaced: usize,
    /// Recorded objects with another inode number.
    strange: usize,
    /// Missing objects that a later move or removal needs.
    absent: usize,
    /// Unexpected objects.
    left: usize,
}

impl Faults {
    fn is_none(self) -> bool {
        self == Faults::default()
    }
}

/// An object of which the history says something, by a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    /// What is recorded in a place.
    Recorded(usize),
    /// What was removed.
    Removed(usize),
    /// What a move has moved. It is followed from before that move.
    Moved(usize),
    /// What a move has replaced. Likewise.
    Replaced(usize),
}

/// An object, and where it lies; `None`: it was made later.
#[derive(Clone, Copy, Debug)]
struct Followed {
    of: Of,
    at: Option<EntryPlace>,
}

/// Where the objects of a history lie if the store has kept `kept` moves.
struct Positions<'a> {
    history: &'a History,
    kept: usize,
    followed: Vec<Followed>,
    /// Those that earlier moves may have brought to a place.
    here: HashMap<EntryPlace, Vec<usize>>,
    /// Removed objects that are not among them yet: their removal came before the next move back. By the number of
    /// moves before it.
    waiting: Vec<(usize, usize)>,
    /// Removed objects that have to be there before the next move back.
    needed: Vec<usize>,
}

impl<'a> Positions<'a> {
    /// With all moves kept.
    fn new(history: &'a History, recorded: impl Iterator<Item = EntryPlace>) -> Positions<'a> {
        let mut positions = Positions {
            history,
            kept: history.moves.len(),
            followed: Vec::new(),
            here: HashMap::new(),
            waiting: Vec::new(),
            needed: Vec::new(),
        };
        for (number, place) in recorded.enumerate() {
            positions.follow(Of::Recorded(number), place);
        }
        for (number, removed) in history.removed.iter().enumerate() {
            positions.waiting.push((removed.until, positions.followed.len()));
            positions.followed.push(Followed { of: Of::Removed(number), at: Some(removed.at) });
        }
        positions.waiting.sort_unstable();
        positions.take_up_removed();
        positions
    }

    fn follow(&mut self, of: Of, place: EntryPlace) -> usize {
        let number = self.followed.len();
        self.followed.push(Followed { of, at: Some(place) });
        self.here.entry(place).or_default().push(number);
        number
    }

    fn take_up_removed(&mut self) {
        while let Some((_, number)) = self.waiting.pop_if(|(until, _)| *until >= self.kept) {
            if let Some(place) = self.followed.get(number).and_then(|followed| followed.at) {
                self.here.entry(place).or_default().push(number);
            }
            self.needed.push(number);
        }
    }

    fn put(&mut self, numbers: &[usize], at: Option<EntryPlace>) {
        for number in numbers {
            if let Some(followed) = self.followed.get_mut(*number) {
                followed.at = at;
            }
        }
        if let Some(place) = at {
            self.here.entry(place).or_default().extend(numbers);
        }
    }

    /// Takes one move back. Returns what has to be judged again; `None`: there is no other move.
    fn step_back(&mut self) -> Option<Vec<usize>> {
        let kept = self.kept.checked_sub(1)?;
        let undone = self.history.moves.get(kept)?;
        self.kept = kept;
        let arrived = self.here.remove(&undone.to).unwrap_or_default();
        let gone = self.here.remove(&undone.from).unwrap_or_default();
        self.put(&arrived, Some(undone.from));
        self.put(&gone, Some(undone.to).filter(|_| undone.over == Over::Exchanged));
        let mut changed = std::mem::take(&mut self.needed);
        changed.extend(arrived);
        changed.extend(gone);
        changed.push(self.follow(Of::Moved(kept), undone.from));
        if undone.over == Over::Replaced {
            changed.push(self.follow(Of::Replaced(kept), undone.to));
        }
        self.take_up_removed();
        Some(changed)
    }
}

/// What one object contributes.
#[derive(Clone, Copy, Debug, Default)]
struct Judgement {
    faults: Faults,
    /// The place that it takes: what lies there is not unexpected.
    takes: Option<EntryPlace>,
}

/// A number of moves that is being tried.
struct Trial<'a> {
    history: &'a History,
    recorded: Vec<(EntryPlace, EntryRow)>,
    inodes: HashMap<EntryPlace, u64>,
    positions: Positions<'a>,
    located: Located<'a>,
    judged: Vec<Judgement>,
    /// How many objects take a place.
    taken: HashMap<EntryPlace, usize>,
    /// Whether something lies in a place.
    occupied: HashMap<EntryPlace, bool>,
    faults: Faults,
}

impl<'a> Trial<'a> {
    fn new(history: &'a History, recorded: &BTreeMap<EntryPlace, EntryRow>, located: Located<'a>) -> Trial<'a> {
        let mut trial = Trial {
            history,
            recorded: recorded.iter().map(|(place, entry)| (*place, *entry)).collect(),
            inodes: history.inodes(),
            positions: Positions::new(history, recorded.keys().copied()),
            located,
            judged: Vec::new(),
            taken: HashMap::new(),
            occupied: HashMap::new(),
            faults: Faults::default(),
        };
        trial.judge_all();
        trial
    }

    fn judge_all(&mut self) {
        self.judged.clear();
        self.taken.clear();
        self.occupied.clear();
        for place in &self.history.places {
            let is_occupied = self.located.item(*place).is_some();
            self.occupied.insert(*place, is_occupied);
        }
        let left = self.occupied.values().filter(|is_occupied| **is_occupied).count();
        self.faults = Faults { left, ..Faults::default() };
        (0..self.positions.followed.len()).for_each(|number| self.judge_again(number));
    }

    /// False: there is no other move.
    fn step_back(&mut self) -> bool {
        let Some(changed) = self.positions.step_back() else { return false };
        let is_elsewhere = changed.iter().any(|number| self.is_looked_for(*number));
        self.located.set_kept(self.positions.kept, is_elsewhere);
        match is_elsewhere {
            true => self.judge_all(),
            false => changed.into_iter().for_each(|number| self.judge_again(number)),
        }
        true
    }

    fn is_looked_for(&self, number: usize) -> bool {
        let object = match self.positions.followed.get(number).map(|followed| followed.of) {
            Some(Of::Recorded(number)) => self.recorded.get(number).map(|(_, entry)| entry.object),
            Some(Of::Removed(number)) => self.history.removed.get(number).map(|removed| removed.was.object),
            Some(Of::Moved(_) | Of::Replaced(_)) | None => None,
        };
        object.is_some_and(|object| self.located.has_looked_for(object))
    }

    fn judge_again(&mut self, number: usize) {
        let Some(followed) = self.positions.followed.get(number).copied() else { return };
        if self.judged.len() <= number {
            self.judged.resize(number + 1, Judgement::default());
        }
        let now = self.judge(followed);
        let Some(judged) = self.judged.get_mut(number) else { return };
        let before = std::mem::replace(judged, now);
        let change = |total: &mut usize, of: fn(&Faults) -> usize| {
            *total = (*total + of(&now.faults)).saturating_sub(of(&before.faults));
        };
        change(&mut self.faults.misplaced, |faults| faults.misplaced);
        change(&mut self.faults.strange, |faults| faults.strange);
        change(&mut self.faults.absent, |faults| faults.absent);
        if before.takes == now.takes {
            return;
        }
        let is_occupied = |place: &EntryPlace| usize::from(self.occupied.get(place).copied().unwrap_or_default());
        if let Some(place) = now.takes {
            let count = self.taken.entry(place).or_default();
            if *count == 0 {
                self.faults.left = self.faults.left.saturating_sub(is_occupied(&place));
            }
            *count += 1;
        }
        if let Some(place) = before.takes {
            let count = self.taken.entry(place).or_default();
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.faults.left += is_occupied(&place);
            }
        }
    }

    fn judge(&mut self, followed: Followed) -> Judgement {
        let item = followed.at.and_then(|at| self.located.item(at));
        let has_inode = |inode: u64| item.as_ref().is_some_and(|item| item.st.ino == inode);
        let absent = |is_there: bool| Faults { absent: usize::from(!is_there), ..Faults::default() };
        let none = Faults::default();
        let (faults, takes) = match followed.of {
            Of::Recorded(number) => {
                let Some((place, entry)) = self.recorded.get(number).copied() else { return Judgement::default() };
                let is_strange = self.inodes.get(&place).is_some_and(|inode| !has_inode(*inode));
                let is_misplaced = !item.is_some_and(|item| self.located.fits(&entry, &item));
                let (misplaced, strange) = (usize::from(is_misplaced), usize::from(is_strange));
                (Faults { misplaced, strange, ..none }, followed.at)
            }
            Of::Removed(number) => {
                let until = self.history.removed.get(number).map_or(0, |removed| removed.until);
                let is_needed = self.positions.kept < until && followed.at.is_some();
                (absent(!is_needed || item.is_some()), followed.at)
            }
            Of::Moved(number) => {
                let inode = self.history.moves.get(number).map(|moved| moved.inodes.source);
                (absent(followed.at.is_none() || inode.is_none_or(has_inode)), None)
            }
            Of::Replaced(_) => (none, followed.at),
        };
        Judgement { faults, takes }
    }
}

impl Vault {
    /// How many of the moves the store has kept: the number for which most recorded objects are where they should be,
    /// and fewest are elsewhere. Rows do not identify a file whose content was never synced. Where they leave a choice,
    /// inode numbers decide: a moved object has kept its own, and an object made in its old place has another. Nothing
    /// is recorded of objects that were moved and then removed: for those it counts whether everything still exists
    /// that would have to.
    pub(super) fn how_many_were_kept<'a>(
        &'a self,
        anchored: &'a Anchored,
        history: &'a History,
        recorded: &BTreeMap<EntryPlace, EntryRow>,
    ) -> (usize, Located<'a>) {
        let all = history.moves.len();
        let mut trial = Trial::new(history, recorded, Located::new(self, anchored, history, all));
        let (mut least, mut best) = (trial.faults, all);
        while !least.is_none() && trial.step_back() {
            // Of several that are as good, the highest.
            if trial.faults < least {
                (least, best) = (trial.faults, trial.positions.kept);
            }
        }
        let mut located = trial.located;
        located.set_kept(best, true);
        (best, located)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_anchor::row::{Inodes, Intent};
    use lamassu_anchor::{ObjectId, ObjectKind, Token};
    use proptest::prelude::*;

    fn at(name: u8) -> EntryPlace {
        EntryPlace { dir: ObjectId::ROOT, name: Token([name; 16]) }
    }

    fn step() -> impl Strategy<Value = Intent> {
        let over = prop_oneof![Just(Over::Nothing), Just(Over::Replaced), Just(Over::Exchanged)];
        let moved = (0..4_u8, 1..4_u8, over).prop_map(|(from, more, over)| {
            let to = (from + more) % 4;
            Intent::Move { from: at(from), to: at(to), to_name: [to].into(), over, inodes: Inodes::default() }
        });
        let removed = (0..4_u8).prop_map(|name| {
            let was = EntryRow { kind: ObjectKind::File, object: ObjectId(u64::from(name)) };
            Intent::Remove { at: at(name), was }
        });
        prop_oneof![3 => moved, 1 => removed]
    }

    proptest! {
        /// Step by step everything comes to where [`History::back`] has it.
        #[test]
        fn every_object_is_followed(steps in prop::collection::vec(step(), 0..12)) {
            let history = History::of(&(0_u64..).zip(steps).collect());
            let recorded: Vec<_> = history.places.iter().copied().collect();
            let mut positions = Positions::new(&history, recorded.iter().copied());
            for kept in (0..=history.moves.len()).rev() {
                prop_assert_eq!(positions.kept, kept);
                let mut moves = 0;
                for Followed { of, at } in &positions.followed {
                    let expected = match of {
                        Of::Recorded(number) => history.recorded_at(recorded[*number], kept),
                        Of::Removed(number) => {
                            let removed = &history.removed[*number];
                            history.back(removed.at, removed.until, kept)
                        }
                        Of::Moved(number) => {
                            moves += 1;
                            history.back(history.moves[*number].from, *number, kept)
                        }
                        Of::Replaced(number) => history.back(history.moves[*number].to, *number, kept),
                    };
                    prop_assert_eq!(*at, expected, "{:?} of {} moves", of, kept);
                }
                prop_assert_eq!(moves, history.moves.len() - kept);
                positions.step_back();
            }
        }
    }
}
