//! The rules for names (`docs/freshness.md`, section 5), played in small.
//!
//! Names are made, removed, renamed, synced and committed in every order up to a depth. The process may end between any
//! two steps; the store then keeps any prefix of the changes that no barrier has covered. After recovery by N1 to N3
//! every name must lead where it led when it was last acknowledged, or since; and nothing that is recorded may be
//! missing. What a hostile store shows instead is an entry that the anchor does not have, or another object than the
//! anchor says: it is never what is served, so there is nothing to search for.
use crate::doubtful::Doubtful;
use lamassu_anchor::row::{Content, EntryPlace, FileRow, Inodes, Intent, Row, Sealed};
use lamassu_anchor::table::Table;
use lamassu_anchor::{Anchor, AnchorError, EntryMark, Made, ObjectId, Removal, Renamed, Token, TokenKey, VaultRow};
use lamassu_format::header::VaultId;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

const NAMES: u8 = 3;
/// `LAMASSU_MODEL_DEPTH` asks for more.
const DEPTH: usize = 7;

fn depth() -> usize {
    std::env::var("LAMASSU_MODEL_DEPTH").ok().and_then(|depth| depth.parse().ok()).unwrap_or(DEPTH)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Make(u8),
    Remove(u8),
    /// Asks the anchor; the store's step is the next.
    Rename(u8, u8),
    Exchange(u8, u8),
    /// The store's step of a rename.
    Move,
    /// fsync of what has a name.
    Sync(u8),
    /// Takes a mark and has a barrier.
    Barrier,
    /// Commits all that this barrier covers.
    Commit,
    /// Carries out what is due.
    Carry,
    /// The process ends, and the store keeps so many changes more than its barriers covered.
    Crash(usize),
    /// The next commit fails, and nobody knows whether it was made. True: it was.
    Doubt(bool),
}

/// A rule that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// Removals are carried out before they are committed.
    RemoveFirst,
    /// The store renames before the anchor knows.
    RenameFirst,
    /// N4: entries are committed that no barrier covers.
    Barrier,
    /// Names are made again while a removal of them waits.
    Going,
    /// N3: places are put right together.
    Together,
    /// Intents stay until a barrier has covered their step.
    Stay,
    /// N4: an entry that was never durable and is renamed waits for a barrier after the store's step.
    Arrival,
}

type Names = BTreeMap<u8, ObjectId>;

struct World {
    table: Arc<Doubtful>,
    anchor: Anchor,
    /// Names in the store, what its barriers covered, and the states in between.
    store: Names,
    kept: Vec<Names>,
    /// What users see, and what they may see after a crash.
    seen: Names,
    allowed: BTreeMap<u8, BTreeSet<Option<ObjectId>>>,
    covered: EntryMark,
    /// The number of its intent, if it has one.
    moving: Option<(Option<u64>, u8, u8, bool)>,
    crashes: usize,
    doubts: usize,
    lie: Option<String>,
}

fn place(name: u8) -> EntryPlace {
    EntryPlace { dir: ObjectId::ROOT, name: Token([name; 16]) }
}

fn row(content: Content) -> Row {
    Row { mode: 0o644, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing }
}

impl World {
    fn new() -> World {
        let table = Arc::new(Doubtful::default());
        let vault = VaultRow::new(VaultId([1; 16]), TokenKey::new([2; 32]));
        let root = Content::Dir { record: Sealed::Nothing, parent: ObjectId::ROOT, name: Token([0; 16]) };
        let anchor = Anchor::create(table.clone(), vault, row(root)).unwrap();
        World {
            covered: anchor.mark(),
            table,
            anchor,
            store: Names::new(),
            kept: vec![Names::new()],
            seen: Names::new(),
            allowed: (0..NAMES).map(|name| (name, BTreeSet::from([None]))).collect(),
            moving: None,
            crashes: 0,
            doubts: 0,
            lie: None,
        }
    }

    fn change_store(&mut self, change: impl FnOnce(&mut Names)) {
        change(&mut self.store);
        self.kept.push(self.store.clone());
    }

    fn sees(&mut self, name: u8, object: Option<ObjectId>) {
        match object {
            Some(object) => self.seen.insert(name, object),
            None => self.seen.remove(&name),
        };
        self.allowed.entry(name).or_default().insert(object);
    }

    fn acknowledge(&mut self, name: u8) {
        self.allowed.insert(name, BTreeSet::from([self.seen.get(&name).copied()]));
    }

    fn barrier(&mut self) {
        self.covered = self.anchor.mark();
        self.kept = vec![self.store.clone()];
    }

    fn carry(&mut self) {
        for (number, intent) in self.anchor.due() {
            match intent {
                Intent::Remove { at, .. } => self.change_store(|store| _ = store.remove(&at.name.0[0])),
                Intent::Move { .. } => self.lie = Some("a move is due that was not asked for, or has failed".into()),
            }
            self.anchor.carried_out([number]);
        }
    }

    /// False: the step is not possible now.
    fn take(&mut self, step: Step, left: Option<Left>) -> bool {
        // What other threads do meanwhile matters if nothing is durable of the move.
        let is_others = matches!(step, Step::Barrier | Step::Commit) && matches!(self.moving, Some((None, ..)));
        if self.moving.is_some() && !is_others && !matches!(step, Step::Move | Step::Crash(_)) {
            return false;
        }
        let is_possible = self.take_step(step, left);
        if self.doubts > 0 && self.moving.is_none() && self.lie.is_none() {
            let recorded: Names = (0..NAMES).filter_map(|name| Some((name, self.recorded(name)?))).collect();
            if recorded != self.seen {
                self.lie = Some(format!("{recorded:?} is in force, and {:?} is seen", self.seen));
            }
        }
        is_possible
    }

    fn take_step(&mut self, step: Step, left: Option<Left>) -> bool {
        match step {
            Step::Make(name) => self.make(name, left),
            Step::Remove(name) => self.remove(name, left),
            Step::Rename(from, to) => self.rename(from, to, false, left),
            Step::Exchange(from, to) => self.rename(from, to, true, left),
            Step::Move => {
                let Some((number, from, to, is_exchange)) = self.moving.take() else { return false };
                if left == Some(Left::RenameFirst) {
                    return self.tell_late(from, to, is_exchange);
                }
                self.change_store(|store| move_name(store, from, to, is_exchange));
                match number {
                    Some(number) => self.anchor.carried_out([number]),
                    None => self.anchor.has_arrived(place(to)),
                }
                if left == Some(Left::Stay) {
                    self.anchor.commit(self.anchor.mark()).unwrap();
                }
                true
            }
            Step::Sync(name) => {
                let Some(object) = self.seen.get(&name).copied() else { return false };
                if left != Some(Left::Barrier) {
                    self.barrier();
                }
                let covered = if left == Some(Left::Barrier) { self.anchor.mark() } else { self.covered };
                match self.anchor.commit_objects(&HashSet::from([object]), covered) {
                    Ok(()) => self.acknowledge(name),
                    Err(error) => self.is_of_doubt(&error),
                }
                true
            }
            Step::Barrier => {
                let is_new = self.covered != self.anchor.mark() || self.kept.len() > 1;
                self.barrier();
                is_new
            }
            Step::Commit => {
                let was_queued = self.anchor.queued();
                if let Err(error) = self.anchor.commit(self.covered) {
                    self.is_of_doubt(&error);
                    return true;
                }
                let is_all = self.anchor.queued() == 0;
                (0..NAMES).filter(|_| is_all).for_each(|name| self.acknowledge(name));
                was_queued != self.anchor.queued()
            }
            Step::Carry => {
                let before = self.store.clone();
                self.carry();
                before != self.store
            }
            Step::Crash(more) => self.crash(more, left),
            Step::Doubt(is_made) => {
                self.doubts += 1;
                self.table.doubt(is_made);
                true
            }
        }
    }

    fn is_of_doubt(&self, error: &AnchorError) {
        assert!(self.doubts > 0 && self.table.may_be_in_doubt(), "{error}");
    }

    fn make(&mut self, name: u8, left: Option<Left>) -> bool {
        if self.seen.contains_key(&name) {
            return false;
        }
        if !self.anchor.may_make(&place(name)) && left != Some(Left::Going) {
            return false; // the caller commits and carries out first
        }
        let new = row(Content::File(FileRow::default()));
        let Made::Queued(object) = self.anchor.make(place(name), new).unwrap() else {
            // The mutant goes on, over what is going, as if the anchor had not said so.
            self.change_store(|store| _ = store.insert(name, ObjectId(99)));
            self.sees(name, Some(ObjectId(99)));
            return true;
        };
        self.change_store(|store| _ = store.insert(name, object));
        self.sees(name, Some(object));
        true
    }

    fn remove(&mut self, name: u8, left: Option<Left>) -> bool {
        let removal = self.anchor.remove(place(name)).unwrap();
        if removal == Removal::NoEntry {
            return false;
        }
        if removal == Removal::Now || left == Some(Left::RemoveFirst) {
            self.change_store(|store| _ = store.remove(&name));
        }
        self.sees(name, None);
        true
    }

    fn rename(&mut self, from: u8, to: u8, is_exchange: bool, left: Option<Left>) -> bool {
        if from == to || !self.seen.contains_key(&from) || !self.anchor.may_make(&place(to)) {
            return false;
        }
        let (source, target) = (self.seen.get(&from).copied(), self.seen.get(&to).copied());
        if left == Some(Left::RenameFirst) {
            self.change_store(|store| move_name(store, from, to, is_exchange));
            self.moving = Some((None, from, to, is_exchange));
            self.sees(to, source);
            self.sees(from, target.filter(|_| is_exchange));
            return true;
        }
        let answer = self.ask(from, to, is_exchange);
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                // It has failed, so nobody sees it. After a crash it may have been made.
                self.is_of_doubt(&error);
                self.allowed.entry(to).or_default().insert(source);
                self.allowed.entry(from).or_default().insert(target.filter(|_| is_exchange));
                return true;
            }
        };
        match answer {
            Renamed::NoEntry => return false,
            Renamed::Now => {
                self.moving = Some((None, from, to, is_exchange));
                if left == Some(Left::Arrival) {
                    self.anchor.has_arrived(place(to));
                }
            }
            Renamed::Intended(number) => self.moving = Some((Some(number), from, to, is_exchange)),
            Renamed::NeedsBarrier => panic!("a barrier covers everything"),
        }
        self.sees(to, source);
        self.sees(from, target.filter(|_| is_exchange));
        if matches!(answer, Renamed::Intended(_)) {
            self.acknowledge(from);
            self.acknowledge(to);
        }
        true
    }

    fn ask(&mut self, from: u8, to: u8, is_exchange: bool) -> Result<Renamed, AnchorError> {
        let ask = |world: &World| {
            world.anchor.rename(place(from), (place(to), &[to]), is_exchange, Inodes::default(), world.covered)
        };
        match ask(self) {
            Ok(Renamed::NeedsBarrier) => {
                self.barrier();
                ask(self)
            }
            answer => answer,
        }
    }

    /// The mutant that has moved a name in the store already.
    fn tell_late(&mut self, from: u8, to: u8, is_exchange: bool) -> bool {
        match self.ask(from, to, is_exchange) {
            Ok(Renamed::Now) => self.anchor.has_arrived(place(to)),
            Ok(Renamed::Intended(number)) => self.anchor.carried_out([number]),
            Ok(Renamed::NoEntry | Renamed::NeedsBarrier) | Err(_) => return false,
        }
        true
    }

    fn crash(&mut self, more: usize, left: Option<Left>) -> bool {
        if more >= self.kept.len() || self.crashes == 2 {
            return false;
        }
        self.crashes += 1;
        self.store = self.kept[more].clone();
        self.table.begin_again();
        self.anchor = Anchor::open(self.table.clone(), &VaultId([1; 16])).unwrap();
        self.moving = None;
        self.recover(left);
        true
    }

    fn recorded(&self, name: u8) -> Option<ObjectId> {
        self.anchor.entry(&place(name)).unwrap().map(|entry| entry.object)
    }

    /// N1 to N3.
    fn recover(&mut self, left: Option<Left>) {
        let intents = self.anchor.intents().unwrap();
        let places = intents.values().flat_map(|intent| match intent {
            Intent::Remove { at, .. } => vec![at.name.0[0]],
            Intent::Move { from, to, .. } => vec![from.name.0[0], to.name.0[0]],
        });
        let places: BTreeSet<u8> = places.collect();
        if left == Some(Left::Together) {
            self.redo_one_by_one(intents.values());
        } else {
            // What lies in these places, and is recorded in one of them, goes there; the rest is not recorded.
            let found: Vec<ObjectId> = places.iter().filter_map(|name| self.store.remove(name)).collect();
            for name in places {
                let recorded = self.recorded(name).filter(|recorded| found.contains(recorded));
                self.store.extend(recorded.map(|object| (name, object)));
            }
        }
        self.anchor.carried_out(intents.into_keys());
        for name in 0..NAMES {
            match (self.recorded(name), self.store.get(&name).copied()) {
                (Some(recorded), shown) if shown != Some(recorded) => {
                    self.lie = Some(format!("{name} is {recorded:?}, and the store has {shown:?}"));
                }
                (None, Some(_)) => _ = self.store.remove(&name), // N2: to `lamassu.lost`
                _ => {}
            }
        }
        self.seen = self.store.clone();
        for name in 0..NAMES {
            let now = self.seen.get(&name).copied();
            if !self.allowed[&name].contains(&now) {
                self.lie.get_or_insert(format!("{name} is {now:?}, not one of {:?}", self.allowed[&name]));
            }
        }
        self.kept = vec![self.store.clone()];
        self.covered = self.anchor.mark();
        self.anchor.commit(self.covered).unwrap();
        (0..NAMES).for_each(|name| self.acknowledge(name));
    }

    fn redo_one_by_one<'a>(&mut self, intents: impl Iterator<Item = &'a Intent>) {
        for intent in intents {
            match intent {
                Intent::Remove { at, .. } => _ = self.store.remove(&at.name.0[0]),
                Intent::Move { from, to, .. } => {
                    let (from, to) = (from.name.0[0], to.name.0[0]);
                    if self.store.contains_key(&from) {
                        move_name(&mut self.store, from, to, false);
                    }
                }
            }
        }
    }

    fn steps(&self, doubts: usize) -> Vec<Step> {
        let names = || 0..NAMES;
        let mut steps: Vec<Step> = names().flat_map(|name| [Step::Make(name), Step::Remove(name)]).collect();
        steps.extend(names().flat_map(|from| names().map(move |to| Step::Rename(from, to))));
        steps.extend([
            Step::Exchange(0, 1),
            Step::Move,
            Step::Barrier,
            Step::Commit,
            Step::Carry,
            Step::Sync(0),
            Step::Sync(1),
        ]);
        steps.extend((0..self.kept.len()).map(Step::Crash));
        if doubts > self.doubts {
            steps.extend([false, true].map(Step::Doubt));
        }
        steps
    }

    fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.table.hash(&mut hasher);
        (&self.store, &self.kept, &self.seen, &self.allowed, self.moving, self.crashes).hash(&mut hasher);
        self.doubts.hash(&mut hasher);
        (self.anchor.queued(), self.anchor.mark() == self.covered).hash(&mut hasher);
        names_of(&self.anchor).hash(&mut hasher);
        hasher.finish()
    }
}

fn names_of(anchor: &Anchor) -> Vec<(Option<ObjectId>, bool)> {
    let of = |name| (anchor.entry(&place(name)).unwrap().map(|entry| entry.object), anchor.may_make(&place(name)));
    (0..NAMES).map(of).collect()
}

fn move_name(store: &mut Names, from: u8, to: u8, is_exchange: bool) {
    let (source, target) = (store.remove(&from), store.remove(&to));
    if let Some(source) = source {
        store.insert(to, source);
    }
    if let Some(target) = target.filter(|_| is_exchange) {
        store.insert(from, target);
    }
}

/// An anchor's queue cannot be copied: each state is reached anew from the beginning.
fn replay(path: &[Step], left: Option<Left>) -> Option<World> {
    let mut world = World::new();
    path.iter().all(|step| world.take(*step, left)).then_some(world)
}

/// Goes through every order of steps. The first lie, with the way to it; and how many states there are.
fn explore(left: Option<Left>, depth: usize, doubts: usize) -> (usize, Option<(String, Vec<Step>)>) {
    let mut seen = HashSet::new();
    let mut now: Vec<Vec<Step>> = vec![vec![]];
    for _ in 0..depth {
        let mut next = Vec::new();
        for path in &now {
            let steps = replay(path, left).map(|world| world.steps(doubts)).unwrap_or_default();
            for step in steps {
                let path: Vec<Step> = path.iter().copied().chain([step]).collect();
                let Some(world) = replay(&path, left) else { continue };
                if !seen.insert(world.fingerprint()) {
                    continue;
                }
                if let Some(lie) = world.lie {
                    return (seen.len(), Some((lie, path)));
                }
                next.push(path);
            }
        }
        now = next;
    }
    (seen.len(), None)
}

#[test]
fn the_rules_hold() {
    let (states, lie) = explore(None, depth(), 0);
    assert_eq!(lie, None);
    println!("{states} states");
    assert!(states > 50_000, "{states} states");
}

/// What has failed in doubt must neither count as made nor as not made.
#[test]
fn the_rules_hold_where_commits_are_in_doubt() {
    let (states, lie) = explore(None, depth() - 1, 1);
    assert_eq!(lie, None);
    println!("{states} states");
    assert!(states > 30_000, "{states} states");
}

fn finds(left: Left) {
    let (_, lie) = explore(Some(left), DEPTH, 0);
    assert!(lie.is_some(), "{left:?}");
}

#[test]
fn a_removal_that_the_store_knows_first_is_called_missing() {
    finds(Left::RemoveFirst);
}

#[test]
fn a_rename_that_the_store_knows_first_is_called_stale() {
    finds(Left::RenameFirst);
}

#[test]
fn an_entry_that_no_barrier_covers_is_called_missing() {
    finds(Left::Barrier);
}

#[test]
fn a_renamed_entry_that_counts_as_made_before_the_store_has_moved_it_is_called_missing() {
    finds(Left::Arrival);
}

#[test]
fn a_name_that_is_going_may_not_be_made() {
    finds(Left::Going);
}

#[test]
fn moves_that_are_done_again_one_by_one_go_over_what_has_arrived() {
    finds(Left::Together);
}

#[test]
fn an_intent_that_goes_before_its_step_is_durable_is_missed() {
    finds(Left::Stay);
}
