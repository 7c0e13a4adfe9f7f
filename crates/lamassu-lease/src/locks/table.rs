//! The locks of a vault, as its server sees them.

use super::spans::Spans;
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
type Answers = Vec<(SessionId, RequestNo, LockAnswer)>;

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

impl Waiting {
    fn owner(&self) -> Owner {
        (self.session, self.lock.key.owner)
    }
}

/// One kind of locks of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct File {
    owners: BTreeMap<Owner, Held>,
    waiting: VecDeque<Waiting>,
    /// The ranges of all owners, and those that are locked exclusively.
    all: Spans,
    exclusive: Spans,
}

impl File {
    /// Whether no lock of another owner is in the way.
    fn is_free_for(&self, owner: Owner, lock: &Lock) -> bool {
        #[cfg(test)]
        CHECKS.with(|checks| checks.set(checks.get() + 1));
        let in_the_way = match lock.mode {
            Mode::Exclusive => self.all.overlapping(lock.range),
            Mode::Shared => self.exclusive.overlapping(lock.range),
        };
        let own = self.owners.get(&owner).filter(|_| in_the_way > 0).into_iter();
        let own = own.flat_map(|held| held.ranges.overlapping(lock.range));
        own.filter(|(_, mode)| lock.mode == Mode::Exclusive || *mode == Mode::Exclusive).count() == in_the_way
    }

    /// Some ranges of an owner were replaced by others.
    fn replaced(&mut self, before: &[(Range, Mode)], after: &[(Range, Mode)]) {
        let all = |of: &[(Range, Mode)]| of.iter().map(|(range, _)| *range).collect::<Vec<_>>();
        self.all.replace(&all(before), &all(after));
        let exclusive = |of: &[(Range, Mode)]| {
            let of = of.iter().filter(|(_, mode)| *mode == Mode::Exclusive);
            of.map(|(range, _)| *range).collect::<Vec<_>>()
        };
        self.exclusive.replace(&exclusive(before), &exclusive(after));
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
    pub fn lock(&mut self, session: SessionId, request: RequestNo, lock: Lock, waits: bool) -> Answers {
        let (owner, place) = ((session, lock.key.owner), (lock.key.file, lock.key.kind));
        if self.count(session) >= LOCKS_MAX {
            return vec![(session, request, LockAnswer::TooMany)];
        }
        let file = self.files.entry(place).or_default();
        if file.is_free_for(owner, &lock) {
            let mut answers = vec![(session, request, LockAnswer::Done)];
            if self.set(place, owner, &lock) {
                self.serve(place, &mut answers);
            }
            return answers;
        }
        let its = || file.waiting.iter().filter(|waiting| waiting.session == session).count();
        let mut answers = Answers::new();
        match waits {
            false => answers.extend(file.conflict(owner, &lock).map(|by| (session, request, LockAnswer::Conflict(by)))),
            true if file.waiting.len() >= WAITING_OF_ALL_MAX || its() >= WAITING_MAX => {
                return vec![(session, request, LockAnswer::TooMany)];
            }
            true if lock.key.kind == LockKind::Range && self.would_lock_up(owner, place, &lock) => {
                answers.push((session, request, LockAnswer::Deadlock));
            }
            true => {
                file_waits(&mut self.waits, owner, place, true);
                self.counted(session, 0, 1);
                let waiting = Waiting { session, request, lock };
                self.files.entry(place).or_default().waiting.push_back(waiting);
            }
        }
        if lock.key.kind == LockKind::Whole && self.clear(place, owner, Range::ALL) {
            self.serve(place, &mut answers);
        }
        answers
    }

    /// Releases a range.
    pub fn unlock(&mut self, session: SessionId, request: RequestNo, key: LockKey, range: Range) -> Answers {
        if self.count(session) >= LOCKS_MAX && self.is_split_by(session, key, range) {
            return vec![(session, request, LockAnswer::TooMany)];
        }
        let (owner, place) = ((session, key.owner), (key.file, key.kind));
        let mut answers = vec![(session, request, LockAnswer::Done)];
        if self.held(owner, place).is_some() && self.clear(place, owner, range) {
            self.serve(place, &mut answers);
        }
        answers
    }

    fn held(&self, owner: Owner, place: Place) -> Option<&Held> {
        self.files.get(&place)?.owners.get(&owner)
    }

    /// Whether unlocking a range makes two of one.
    pub fn is_split_by(&self, session: SessionId, key: LockKey, range: Range) -> bool {
        let held = self.held((session, key.owner), (key.file, key.kind));
        held.is_some_and(|held| held.ranges.is_split_by(range))
    }

    /// Whether a lock could be taken now.
    pub fn test(&self, session: SessionId, lock: &Lock) -> LockAnswer {
        let file = self.files.get(&(lock.key.file, lock.key.kind));
        let conflict = file.and_then(|file| file.conflict((session, lock.key.owner), lock));
        conflict.map_or(LockAnswer::Done, LockAnswer::Conflict)
    }

    /// Ends the wait of a request. One that no longer waits was answered.
    pub fn cancel(&mut self, session: SessionId, request: RequestNo) -> Answers {
        let is_it = |waiting: &Waiting| waiting.session == session && waiting.request == request;
        let at = |file: &File| file.waiting.iter().position(is_it);
        let Some((place, at)) = self.files.iter().find_map(|(place, file)| Some((*place, at(file)?))) else {
            return Answers::new();
        };
        self.waits_no_longer(place, at);
        self.forget_unused(place);
        vec![(session, request, LockAnswer::Cancelled)]
    }

    /// A session reports its locks by a new connection: it has these and no others, and waits for nothing. False: it
    /// cannot have them, and has none.
    pub fn resume(&mut self, session: SessionId, held: &[Lock], answers: &mut Answers) -> bool {
        let before = self.take(session);
        // Compared with the locks of other sessions, before any of its own are there.
        let is_free = |lock: &Lock| {
            let file = self.files.get(&(lock.key.file, lock.key.kind));
            file.is_none_or(|file| file.is_free_for((session, lock.key.owner), lock))
        };
        let can_be = held.len() <= REPORTED_MAX && held.iter().all(is_free);
        if can_be {
            self.put(session, held);
        }
        before.into_iter().for_each(|place| self.serve(place, answers));
        can_be
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
            added.entry(place).or_default().extend(held.ranges.iter());
            self.counted(session, 0, held.ranges.len());
            self.files.entry(place).or_default().owners.insert((session, owner), held);
        }
        for (place, added) in added {
            self.files.entry(place).or_default().replaced(&[], &added);
        }
    }

    /// A session has ended: it has no locks.
    pub fn end(&mut self, session: SessionId, answers: &mut Answers) {
        let before = self.take(session);
        before.into_iter().for_each(|place| self.serve(place, answers));
    }

    /// Removes all that a session has. Returns where that was.
    fn take(&mut self, session: SessionId) -> Vec<Place> {
        if self.counts.remove(&session).is_none() {
            return Vec::new();
        }
        self.waits.retain(|((of, _), _), _| *of != session);
        let mut places = Vec::new();
        for (place, file) in &mut self.files {
            let before = file.owners.len() + file.waiting.len();
            let mut gone = Vec::new();
            file.owners.retain(|(of, _), held| {
                if *of == session {
                    gone.extend(held.ranges.iter());
                }
                *of != session
            });
            file.waiting.retain(|waiting| waiting.session != session);
            if file.owners.len() + file.waiting.len() < before {
                file.replaced(&gone, &[]);
                places.push(*place);
            }
        }
        places
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

    /// Changes the locks of an owner in a range.
    fn change(&mut self, place: Place, owner: Owner, range: Range, change: impl FnOnce(&mut Held)) {
        let file = self.files.entry(place).or_default();
        let held = file.owners.entry(owner).or_default();
        // Neighbours may become one with what is set, and parts remain of what is cleared.
        let near = range.with_neighbours();
        let before: Vec<_> = held.ranges.overlapping(near).collect();
        change(held);
        let after: Vec<_> = held.ranges.overlapping(near).collect();
        if held.ranges.is_empty() {
            file.owners.remove(&owner);
        }
        file.replaced(&before, &after);
        self.counted(owner.0, before.len(), after.len());
    }

    /// Locks a range for an owner. Whether it has less than before in a part of it.
    fn set(&mut self, place: Place, owner: Owner, lock: &Lock) -> bool {
        let mut is_weaker = false;
        self.change(place, owner, lock.range, |held| {
            is_weaker = held.ranges.overlapping(lock.range).any(|(_, mode)| mode > lock.mode);
            held.ranges.set(lock.range, lock.mode);
            held.pid = lock.pid;
        });
        is_weaker
    }

    /// Unlocks a range of an owner. Whether it had something there.
    fn clear(&mut self, place: Place, owner: Owner, range: Range) -> bool {
        let mut is_weaker = false;
        self.change(place, owner, range, |held| {
            is_weaker = held.ranges.overlapping(range).next().is_some();
            held.ranges.clear(range);
        });
        is_weaker
    }

    /// Removes a waiting request of a file.
    fn waits_no_longer(&mut self, place: Place, at: usize) {
        let waiting = self.files.get_mut(&place).and_then(|file| file.waiting.remove(at));
        if let Some(waiting) = waiting {
            file_waits(&mut self.waits, waiting.owner(), place, false);
            self.counted(waiting.session, 1, 0);
        }
    }

    /// Grants the waiting requests of a file that can be granted, the oldest first. Only needed where an owner has less
    /// than before: all others that wait have been compared with what it has.
    fn serve(&mut self, place: Place, answers: &mut Answers) {
        // An older request may conflict no longer if a lock became weaker: they are looked at once more, all together.
        while self.serve_once(place, answers) {}
        self.forget_unused(place);
    }

    /// The same, looking at each request once. Whether an owner has less than before.
    fn serve_once(&mut self, place: Place, answers: &mut Answers) -> bool {
        let (mut at, mut is_weaker) = (0, false);
        while let Some(file) = self.files.get(&place)
            && let Some(waiting) = file.waiting.get(at).copied()
        {
            if !file.is_free_for(waiting.owner(), &waiting.lock) {
                at += 1;
                continue;
            }
            self.waits_no_longer(place, at);
            is_weaker |= self.set(place, waiting.owner(), &waiting.lock);
            answers.push((waiting.session, waiting.request, LockAnswer::Done));
        }
        is_weaker
    }

    fn forget_unused(&mut self, place: Place) {
        if self.files.get(&place).is_some_and(|file| file.owners.is_empty() && file.waiting.is_empty()) {
            self.files.remove(&place);
        }
    }

    /// Whether a request of this owner would wait for an owner that waits, by any number of steps, for it.
    fn would_lock_up(&self, owner: Owner, place: Place, lock: &Lock) -> bool {
        let left = Cell::new(STEPS_MAX);
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

/// Counts a request of an owner that begins to wait, or no longer waits.
fn file_waits(waits: &mut BTreeMap<(Owner, Place), usize>, owner: Owner, place: Place, more: bool) {
    let count = waits.entry((owner, place)).or_default();
    *count = if more { *count + 1 } else { count.saturating_sub(1) };
    if *count == 0 {
        waits.remove(&(owner, place));
    }
}
