//! The locks of a vault, as its server sees them.
//!
//! A lock that is granted may leave its owner with less than before, which lets another request in, and so on: one
//! unlock may be followed by as many grants as there are requests, with a look at all of them for each. So a call only
//! notes where somebody has less. [`Table::serve`] looks at the requests that wait there, as far as a [`Work`] reaches.
//! It is repeated until [`Table::is_served`].

use super::spans::Locked;
use super::work::Work;
use super::{
    Conflict, LOCKS_MAX, Lock, LockAnswer, LockKey, LockKind, REPORTED_MAX, Range, Ranges, WAITING_MAX,
    WAITING_OF_ALL_MAX,
};
use crate::{Mode, Object, RequestNo, SessionId};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// An owner, among all sessions.
type Owner = (SessionId, u64);
/// One kind of locks of one file.
type Place = (Object, LockKind);
/// Answers to requests, each with its session.
pub(crate) type Answers = Vec<(SessionId, RequestNo, LockAnswer)>;

/// Owners that a search for a deadlock looks at. If it needs more, there counts as none.
const SEARCH_MAX: usize = 1024;
/// Locks and waiting requests that it looks at, likewise.
const STEPS_MAX: usize = 1 << 18;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Held {
    ranges: Ranges,
    pid: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Waiting {
    session: SessionId,
    request: RequestNo,
    lock: Lock,
}

/// A session reports locks that it cannot have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CannotHave {
    /// The session that has one of them, or one that conflicts.
    pub beside: Option<SessionId>,
}

impl Waiting {
    fn owner(&self) -> Owner {
        (self.session, self.lock.key.owner)
    }
}

/// One kind of locks of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct File {
    /// Boxed: most files have one, and a map has room for several.
    owners: BTreeMap<Owner, Box<Held>>,
    waiting: VecDeque<Waiting>,
    /// The ranges of all owners.
    locked: Locked,
    /// Where somebody has less than when the waiting requests were last looked at.
    freed: Option<Range>,
}

impl File {
    /// Whether no lock of another owner is in the way.
    fn is_free_for(&self, owner: Owner, lock: &Lock) -> bool {
        #[cfg(test)]
        CHECKS.with(|checks| checks.set(checks.get() + 1));
        let in_the_way = self.locked.in_the_way(lock);
        let own = || self.owners.get(&owner).map_or(0, |held| held.ranges.in_the_way(lock.range, lock.mode));
        in_the_way == 0 || in_the_way == own()
    }

    /// The first lock of another owner that is in the way. This looks at all owners.
    fn conflict(&self, owner: Owner, lock: &Lock) -> Option<Conflict> {
        self.conflicts(owner, lock).next().map(|(_, conflict)| conflict)
    }

    fn conflicts<'a>(&'a self, owner: Owner, lock: &'a Lock) -> impl Iterator<Item = (Owner, Conflict)> + 'a {
        let others = self.owners.iter().filter(move |(other, _)| **other != owner);
        others.filter_map(move |(other, held)| {
            let (range, mode) = held.ranges.conflict(lock.range, lock.mode)?;
            let pid = if other.0 == owner.0 { held.pid } else { 0 };
            Some((*other, Conflict { range, mode, pid }))
        })
    }
}

/// The locks of one vault.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Table {
    files: BTreeMap<Place, File>,
    /// Those in which somebody has less than before, each once.
    due: VecDeque<Place>,
    /// Where an owner has locks.
    holds: BTreeSet<(Owner, Place)>,
    /// How many ranges, and how many waiting requests, a session has.
    counts: BTreeMap<SessionId, usize>,
    /// How many requests of an owner wait where.
    waits: BTreeMap<(Owner, Place), usize>,
}

#[cfg(test)]
thread_local! {
    /// How often a lock was compared with those that are held.
    pub(super) static CHECKS: Cell<usize> = const { Cell::new(0) };
}

impl Table {
    /// Whether a session has locks, or waits for some.
    pub fn has(&self, session: SessionId) -> bool {
        self.counts.contains_key(&session)
    }

    /// Takes a lock, or lets the request wait if it `waits`.
    pub fn lock(
        &mut self,
        session: SessionId,
        request: RequestNo,
        lock: Lock,
        waits: bool,
        work: &mut Work,
    ) -> Answers {
        let (owner, place) = ((session, lock.key.owner), (lock.key.file, lock.key.kind));
        if self.count(session) >= LOCKS_MAX {
            return vec![(session, request, LockAnswer::TooMany)];
        }
        work.did(1);
        let file = self.files.entry(place).or_default();
        if file.is_free_for(owner, &lock) {
            self.set(place, owner, &lock);
            return vec![(session, request, LockAnswer::Done)];
        }
        let its = || file.waiting.iter().filter(|waiting| waiting.session == session).count();
        let mut answers = Answers::new();
        match waits {
            false => {
                work.did(file.owners.len());
                answers.extend(file.conflict(owner, &lock).map(|by| (session, request, LockAnswer::Conflict(by))));
            }
            true if file.waiting.len() >= WAITING_OF_ALL_MAX || its() >= WAITING_MAX => {
                return vec![(session, request, LockAnswer::TooMany)];
            }
            true if lock.key.kind == LockKind::Range && self.would_lock_up(owner, place, &lock, work) => {
                answers.push((session, request, LockAnswer::Deadlock));
            }
            true => {
                file_waits(&mut self.waits, owner, place, true);
                self.counted(session, 0, 1);
                let waiting = Waiting { session, request, lock };
                self.files.entry(place).or_default().waiting.push_back(waiting);
            }
        }
        if lock.key.kind == LockKind::Whole {
            self.clear(place, owner, Range::ALL);
        }
        answers
    }

    /// Releases a range.
    pub fn unlock(&mut self, session: SessionId, request: RequestNo, key: LockKey, range: Range) -> Answers {
        if self.count(session) >= LOCKS_MAX && self.is_split_by(session, key, range) {
            return vec![(session, request, LockAnswer::TooMany)];
        }
        self.clear((key.file, key.kind), (session, key.owner), range);
        vec![(session, request, LockAnswer::Done)]
    }

    fn held(&self, owner: Owner, place: Place) -> Option<&Held> {
        self.files.get(&place)?.owners.get(&owner).map(AsRef::as_ref)
    }

    /// Whether unlocking a range makes two of one.
    pub fn is_split_by(&self, session: SessionId, key: LockKey, range: Range) -> bool {
        let held = self.held((session, key.owner), (key.file, key.kind));
        held.is_some_and(|held| held.ranges.is_split_by(range))
    }

    /// Whether a lock could be taken now.
    pub fn test(&self, session: SessionId, lock: &Lock, work: &mut Work) -> LockAnswer {
        let Some(file) = self.files.get(&(lock.key.file, lock.key.kind)) else { return LockAnswer::Done };
        let owner = (session, lock.key.owner);
        if file.is_free_for(owner, lock) {
            return LockAnswer::Done;
        }
        work.did(file.owners.len());
        let conflict = file.conflict(owner, lock);
        conflict.map_or(LockAnswer::Done, LockAnswer::Conflict)
    }

    /// Ends the wait of a request. One that no longer waits was answered.
    pub fn cancel(&mut self, session: SessionId, request: RequestNo, work: &mut Work) -> Answers {
        let is_it = |waiting: &Waiting| waiting.session == session && waiting.request == request;
        let its = self.waits.range(first_of(session)..).map(|(its, _)| its);
        let places: BTreeSet<_> = its.take_while(|((of, _), _)| *of == session).map(|(_, place)| *place).collect();
        let mut files = places.iter().filter_map(|place| Some((*place, self.files.get(place)?)));
        let found = files.find_map(|(place, file)| {
            work.did(file.waiting.len());
            Some((place, file.waiting.iter().position(is_it)?))
        });
        let Some((place, at)) = found else { return Answers::new() };
        self.waits_no_longer(place, at);
        self.forget_unused(place);
        vec![(session, request, LockAnswer::Cancelled)]
    }

    /// A session reports its locks by a new connection: it has these and no others, and waits for nothing.
    ///
    /// # Errors
    /// [`CannotHave`]; it has none then.
    pub fn resume(&mut self, session: SessionId, held: &[Lock]) -> Result<(), CannotHave> {
        self.end(session);
        if held.len() > REPORTED_MAX {
            return Err(CannotHave { beside: None });
        }
        // Compared with the locks of other sessions, before any of its own are there.
        for lock in held {
            let Some(file) = self.files.get(&(lock.key.file, lock.key.kind)) else { continue };
            let owner = (session, lock.key.owner);
            if !file.is_free_for(owner, lock) {
                return Err(CannotHave { beside: file.conflicts(owner, lock).next().map(|((other, _), _)| other) });
            }
        }
        self.put(session, held);
        Ok(())
    }

    /// Gives a session that has none these locks.
    fn put(&mut self, session: SessionId, locks: &[Lock]) {
        let mut owners = BTreeMap::<(Place, u64), Held>::new();
        for lock in locks {
            let held = owners.entry(((lock.key.file, lock.key.kind), lock.key.owner)).or_default();
            held.ranges.set(lock.range, lock.mode);
            held.pid = lock.pid;
        }
        // By files, so that each is changed once.
        let mut added = BTreeMap::<Place, Vec<_>>::new();
        for ((place, owner), held) in owners {
            let ranges: Vec<_> = held.ranges.iter().collect();
            added.entry(place).or_default().extend(ranges);
            self.counted(session, 0, held.ranges.len());
            self.holds.insert(((session, owner), place));
            self.files.entry(place).or_default().owners.insert((session, owner), Box::new(held));
        }
        for (place, added) in added {
            self.files.entry(place).or_default().locked.replace(&[], &added);
        }
    }

    /// A session has no locks any more, and waits for nothing.
    pub fn end(&mut self, session: SessionId) {
        if self.counts.remove(&session).is_none() {
            return;
        }
        let its = |(of, _): &Owner| *of == session;
        let waits = self.waits.range(first_of(session)..).map(|(one, _)| *one).take_while(|(owner, _)| its(owner));
        let waits: Vec<_> = waits.collect();
        let holds = self.holds.range(first_of(session)..).copied().take_while(|(owner, _)| its(owner));
        let holds: Vec<_> = holds.collect();
        for one in &waits {
            self.waits.remove(one);
        }
        // By files, so that each is changed once.
        let mut gone: BTreeMap<Place, Vec<(Range, Mode)>> =
            waits.iter().map(|(_, place)| (*place, Vec::new())).collect();
        for (owner, place) in holds {
            self.holds.remove(&(owner, place));
            let held = self.files.get_mut(&place).and_then(|file| file.owners.remove(&owner));
            gone.entry(place).or_default().extend(held.iter().flat_map(|held| held.ranges.iter()));
        }
        for (place, gone) in gone {
            let Some(file) = self.files.get_mut(&place) else { continue };
            file.waiting.retain(|waiting| waiting.session != session);
            file.locked.replace(&gone, &[]);
            let freed = gone.into_iter().map(|(range, _)| range).reduce(Range::with);
            self.is_freed(place, freed);
        }
    }

    /// How many locks a session has, and requests that wait.
    pub fn count(&self, session: SessionId) -> usize {
        self.counts.get(&session).copied().unwrap_or_default()
    }

    fn counted(&mut self, session: SessionId, before: usize, after: usize) {
        let count = self.counts.entry(session).or_default();
        *count = *count + after - before;
        if *count == 0 {
            self.counts.remove(&session);
        }
    }

    /// Locks a range for an owner.
    fn set(&mut self, place: Place, owner: Owner, lock: &Lock) {
        self.change(place, owner, (lock.range, Some(lock.mode)), |held| {
            held.ranges.set(lock.range, lock.mode);
            held.pid = lock.pid;
        });
    }

    /// Unlocks a range of an owner.
    fn clear(&mut self, place: Place, owner: Owner, range: Range) {
        if self.held(owner, place).is_some() {
            self.change(place, owner, (range, None), |held| held.ranges.clear(range));
        }
    }

    /// Changes the locks of an owner in a range, to this mode.
    fn change(
        &mut self,
        place: Place,
        owner: Owner,
        (range, mode): (Range, Option<Mode>),
        change: impl FnOnce(&mut Held),
    ) {
        let file = self.files.entry(place).or_default();
        let held = file.owners.entry(owner).or_default();
        let freed = held.ranges.above(range, mode);
        // Neighbours may become one with what is set, and parts remain of what is cleared.
        let near = range.with_neighbours();
        let before: Vec<_> = held.ranges.overlapping(near).collect();
        change(held);
        let after: Vec<_> = held.ranges.overlapping(near).collect();
        if held.ranges.is_empty() {
            file.owners.remove(&owner);
            self.holds.remove(&(owner, place));
        } else {
            self.holds.insert((owner, place));
        }
        file.locked.replace(&before, &after);
        self.counted(owner.0, before.len(), after.len());
        self.is_freed(place, freed);
    }

    /// Somebody has less than before in a range of a file, if in any.
    fn is_freed(&mut self, place: Place, range: Option<Range>) {
        if let Some(file) = self.files.get_mut(&place).filter(|file| !file.waiting.is_empty())
            && let Some(range) = range
        {
            if file.freed.is_none() {
                self.due.push_back(place);
            }
            file.freed = Some(file.freed.map_or(range, |freed| freed.with(range)));
        }
        self.forget_unused(place);
    }

    /// Removes a waiting request of a file.
    fn waits_no_longer(&mut self, place: Place, at: usize) {
        let waiting = self.files.get_mut(&place).and_then(|file| file.waiting.remove(at));
        if let Some(waiting) = waiting {
            file_waits(&mut self.waits, waiting.owner(), place, false);
            self.counted(waiting.session, 1, 0);
        }
    }

    /// Whether each request that waits conflicts with a lock.
    pub fn is_served(&self) -> bool {
        self.due.is_empty()
    }

    /// Grants waiting requests that can be granted, as far as the work reaches. All files have their turn.
    pub fn serve(&mut self, work: &mut Work, answers: &mut Answers) {
        while work.goes_on()
            && let Some(place) = self.due.pop_front()
        {
            self.serve_once(place, work, answers);
        }
    }

    /// Looks once at the requests that wait where somebody has less than before, the oldest first. If a lock that is
    /// granted here is weaker than what its owner had, an older request may conflict no longer: then all of them are
    /// looked at once more, together.
    fn serve_once(&mut self, place: Place, work: &mut Work, answers: &mut Answers) {
        let Some(mut freed) = self.files.get_mut(&place).and_then(|file| file.freed.take()) else { return };
        let mut at = 0;
        while let Some(file) = self.files.get(&place)
            && let Some(waiting) = file.waiting.get(at).copied()
        {
            work.did(1);
            freed = file.freed.map_or(freed, |more| freed.with(more));
            if !waiting.lock.range.overlaps(freed) || !file.is_free_for(waiting.owner(), &waiting.lock) {
                at += 1;
                continue;
            }
            self.waits_no_longer(place, at);
            self.set(place, waiting.owner(), &waiting.lock);
            answers.push((waiting.session, waiting.request, LockAnswer::Done));
        }
        self.forget_unused(place);
    }

    fn forget_unused(&mut self, place: Place) {
        let is_unused = |file: &File| file.owners.is_empty() && file.waiting.is_empty() && file.freed.is_none();
        if self.files.get(&place).is_some_and(is_unused) {
            self.files.remove(&place);
        }
    }

    /// Whether a request of this owner would wait for an owner that waits, by any number of steps, for it.
    fn would_lock_up(&self, owner: Owner, place: Place, lock: &Lock, work: &mut Work) -> bool {
        let left = Cell::new(STEPS_MAX);
        let is_found = self.is_in_a_circle(owner, place, lock, &left);
        work.did(STEPS_MAX - left.get());
        is_found
    }

    /// The same, with so many steps left.
    fn is_in_a_circle(&self, owner: Owner, place: Place, lock: &Lock, left: &Cell<usize>) -> bool {
        let step = || left.replace(left.get().saturating_sub(1)) > 0;
        let in_the_way = |owner: Owner, place: &Place, lock: &Lock, found: &mut Vec<Owner>| {
            let Some(file) = self.files.get(place) else { return };
            for (other, held) in file.owners.iter().take_while(|_| step()) {
                if *other != owner && held.ranges.conflict(lock.range, lock.mode).is_some() {
                    found.push(*other);
                }
            }
        };
        let (mut seen, mut next) = (BTreeSet::new(), Vec::new());
        in_the_way(owner, &place, lock, &mut next);
        while let Some(holder) = next.pop() {
            if holder == owner {
                return true;
            }
            if !seen.insert(holder) {
                continue;
            }
            if seen.len() > SEARCH_MAX {
                return false;
            }
            let from = (holder, (Object(0), LockKind::Range));
            let its = self.waits.range(from..).take_while(|((of, _), _)| *of == holder).map(|((_, place), _)| place);
            for place in its.filter(|(_, kind)| *kind == LockKind::Range) {
                let waiting = self.files.get(place).into_iter().flat_map(|file| &file.waiting);
                for waiting in waiting.take_while(|_| step()).filter(|waiting| waiting.owner() == holder) {
                    in_the_way(holder, place, &waiting.lock, &mut next);
                }
            }
        }
        false
    }
}

/// Before all that a session has, in the order of owners and places.
fn first_of(session: SessionId) -> (Owner, Place) {
    ((session, 0), (Object(0), LockKind::Range))
}

/// Counts a request of an owner that begins to wait, or no longer waits.
fn file_waits(waits: &mut BTreeMap<(Owner, Place), usize>, owner: Owner, place: Place, more: bool) {
    let count = waits.entry((owner, place)).or_default();
    *count = if more { *count + 1 } else { count.saturating_sub(1) };
    if *count == 0 {
        waits.remove(&(owner, place));
    }
}
