//! The locks of a vault, as its server sees them.

use super::{Conflict, LOCKS_MAX, Lock, LockAnswer, LockKey, LockKind, REPORTED_MAX, Range, Ranges};
use crate::{Object, RequestNo, SessionId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// An owner, among all sessions.
type Owner = (SessionId, u64);
/// Answers to requests, each with its session.
type Answers = Vec<(SessionId, RequestNo, LockAnswer)>;

/// Owners that a search for a deadlock looks at. If it needs more, there counts as none.
const SEARCH_MAX: usize = 1024;

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
}

impl File {
    /// The first lock of another owner that is in the way, and its owner.
    fn conflict(&self, owner: Owner, lock: &Lock) -> Option<(Owner, Conflict)> {
        self.conflicts(owner, lock).next()
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
    files: BTreeMap<(Object, LockKind), File>,
    /// How many ranges, and how many waiting requests, a session has.
    counts: BTreeMap<SessionId, usize>,
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
        let conflict = self.files.entry(place).or_default().conflict(owner, &lock);
        let Some((_, conflict)) = conflict else {
            self.change(place, owner, |held| {
                held.ranges.set(lock.range, lock.mode);
                held.pid = lock.pid;
            });
            // A weaker lock may let others in.
            let mut answers = vec![(session, request, LockAnswer::Done)];
            self.serve(place, &mut answers);
            return answers;
        };
        let mut answers = Answers::new();
        if lock.key.kind == LockKind::Whole {
            self.change(place, owner, |held| held.ranges.clear(Range::ALL));
        }
        match waits {
            false => answers.push((session, request, LockAnswer::Conflict(conflict))),
            true if lock.key.kind == LockKind::Range && self.would_lock_up(owner, place, &lock) => {
                answers.push((session, request, LockAnswer::Deadlock));
            }
            true => {
                self.files.entry(place).or_default().waiting.push_back(Waiting { session, request, lock });
                *self.counts.entry(session).or_default() += 1;
            }
        }
        self.serve(place, &mut answers);
        answers
    }

    /// Releases a range.
    pub fn unlock(&mut self, session: SessionId, request: RequestNo, key: LockKey, range: Range) -> Answers {
        let (owner, place) = ((session, key.owner), (key.file, key.kind));
        let held = self.files.get(&place).and_then(|file| file.owners.get(&owner));
        if self.count(session) >= LOCKS_MAX && held.is_some_and(|held| held.ranges.is_split_by(range)) {
            return vec![(session, request, LockAnswer::TooMany)];
        }
        let mut answers = vec![(session, request, LockAnswer::Done)];
        if held.is_some() {
            self.change(place, owner, |held| held.ranges.clear(range));
            self.serve(place, &mut answers);
        }
        answers
    }

    /// Whether a lock could be taken now.
    pub fn test(&self, session: SessionId, lock: &Lock) -> LockAnswer {
        let file = self.files.get(&(lock.key.file, lock.key.kind));
        let conflict = file.and_then(|file| file.conflict((session, lock.key.owner), lock));
        conflict.map_or(LockAnswer::Done, |(_, conflict)| LockAnswer::Conflict(conflict))
    }

    /// Ends the wait of a request. One that no longer waits was answered.
    pub fn cancel(&mut self, session: SessionId, request: RequestNo) -> Answers {
        let is_it = |waiting: &Waiting| waiting.session == session && waiting.request == request;
        let at = |file: &File| file.waiting.iter().position(is_it);
        let Some((place, at)) = self.files.iter().find_map(|(place, file)| Some((*place, at(file)?))) else {
            return Answers::new();
        };
        if let Some(file) = self.files.get_mut(&place) {
            file.waiting.remove(at);
        }
        self.counted(session, 1, 0);
        self.forget_unused(place);
        vec![(session, request, LockAnswer::Cancelled)]
    }

    /// A session reports its locks by a new connection: it has these and no others, and waits for nothing. False: it
    /// cannot have them.
    pub fn resume(&mut self, session: SessionId, held: &[Lock], answers: &mut Answers) -> bool {
        let is_in_the_way = |lock: &Lock| {
            let file = self.files.get(&(lock.key.file, lock.key.kind));
            file.is_some_and(|file| file.conflicts((session, lock.key.owner), lock).any(|(by, _)| by.0 != session))
        };
        if held.len() > REPORTED_MAX || held.iter().any(is_in_the_way) {
            return false;
        }
        let before = self.take(session);
        for lock in held {
            self.change((lock.key.file, lock.key.kind), (session, lock.key.owner), |held| {
                held.ranges.set(lock.range, lock.mode);
                held.pid = lock.pid;
            });
        }
        before.into_iter().for_each(|place| self.serve(place, answers));
        true
    }

    /// A session has ended: it has no locks.
    pub fn end(&mut self, session: SessionId, answers: &mut Answers) {
        let before = self.take(session);
        before.into_iter().for_each(|place| self.serve(place, answers));
    }

    /// Removes all that a session has. Returns where that was.
    fn take(&mut self, session: SessionId) -> Vec<(Object, LockKind)> {
        if self.counts.remove(&session).is_none() {
            return Vec::new();
        }
        let mut places = Vec::new();
        for (place, file) in &mut self.files {
            let before = file.owners.len() + file.waiting.len();
            file.owners.retain(|(of, _), _| *of != session);
            file.waiting.retain(|waiting| waiting.session != session);
            if file.owners.len() + file.waiting.len() < before {
                places.push(*place);
            }
        }
        places
    }

    fn count(&self, session: SessionId) -> usize {
        self.counts.get(&session).copied().unwrap_or_default()
    }

    fn counted(&mut self, session: SessionId, before: usize, after: usize) {
        let count = self.counts.entry(session).or_default();
        *count = *count + after - before;
        if *count == 0 {
            self.counts.remove(&session);
        }
    }

    fn change(&mut self, place: (Object, LockKind), owner: Owner, change: impl FnOnce(&mut Held)) {
        let owners = &mut self.files.entry(place).or_default().owners;
        let held = owners.entry(owner).or_default();
        let before = held.ranges.len();
        change(held);
        let after = held.ranges.len();
        if after == 0 {
            owners.remove(&owner);
        }
        self.counted(owner.0, before, after);
    }

    /// Grants the waiting requests of a file that can be granted, the oldest first.
    fn serve(&mut self, place: (Object, LockKind), answers: &mut Answers) {
        let mut at = 0;
        while let Some(file) = self.files.get_mut(&place)
            && let Some(waiting) = file.waiting.get(at).copied()
        {
            if file.conflict(waiting.owner(), &waiting.lock).is_some() {
                at += 1;
                continue;
            }
            file.waiting.remove(at);
            self.counted(waiting.session, 1, 0);
            let before = self.files.get(&place).and_then(|file| file.owners.get(&waiting.owner())).cloned();
            self.change(place, waiting.owner(), |held| {
                held.ranges.set(waiting.lock.range, waiting.lock.mode);
                held.pid = waiting.lock.pid;
            });
            answers.push((waiting.session, waiting.request, LockAnswer::Done));
            // The owner has less than before in a part of the range: an older request may no longer conflict.
            let is_weaker = before.is_some_and(|before| {
                before.ranges.overlapping(waiting.lock.range).any(|(_, mode)| mode > waiting.lock.mode)
            });
            at = if is_weaker { 0 } else { at };
        }
        self.forget_unused(place);
    }

    fn forget_unused(&mut self, place: (Object, LockKind)) {
        if self.files.get(&place).is_some_and(|file| file.owners.is_empty() && file.waiting.is_empty()) {
            self.files.remove(&place);
        }
    }

    /// Whether a request of this owner would wait for an owner that waits, by any number of steps, for it.
    fn would_lock_up(&self, owner: Owner, place: (Object, LockKind), lock: &Lock) -> bool {
        let in_the_way = |owner: Owner, place: &(Object, LockKind), lock: &Lock| {
            let file = self.files.get(place);
            let found = file.map(|file| file.conflicts(owner, lock).map(|(by, _)| by).collect::<Vec<_>>());
            found.unwrap_or_default()
        };
        let (mut seen, mut next) = (BTreeSet::new(), in_the_way(owner, &place, lock));
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
            let ranges = self.files.iter().filter(|((_, kind), _)| *kind == LockKind::Range);
            for (place, file) in ranges {
                for waiting in file.waiting.iter().filter(|waiting| waiting.owner() == holder) {
                    next.extend(in_the_way(holder, place, &waiting.lock));
                }
            }
        }
        false
    }
}
