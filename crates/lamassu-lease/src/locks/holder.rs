//! The locks of this host's programs, as the host sees them.

use super::{Conflict, Lock, LockAnswer, LockKey, LockKind, Range, Ranges};
use crate::{Call, Object, RequestNo};
use std::collections::{BTreeMap, BTreeSet};

/// What a program asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Asked {
    /// A lock, through this open file. If it `waits`, it is refused only for other reasons than a conflict.
    Lock {
        /// the lock
        lock: Lock,
        /// the open file, by the caller's number
        handle: u64,
        /// whether to wait
        waits: bool,
    },
    /// To release a range.
    Unlock {
        /// whose, and of what
        key: LockKey,
        /// the range
        range: Range,
    },
    /// Whether a lock could be taken.
    Test {
        /// the lock
        lock: Lock,
    },
}

/// How a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It is done; a test found no conflict.
    Done,
    /// A lock is in the way.
    Conflict(Conflict),
    /// Waiting would never end.
    Deadlock,
    /// This host has too many locks.
    TooMany,
    /// The program no longer waits.
    Cancelled,
    /// The owner has lost locks of this file with an earlier session, and has not unlocked them since.
    Lost,
    /// The server has not answered in time.
    Unanswered,
    /// The session has ended. The request can be made again in another one.
    Ended,
}

/// An answered request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Answered {
    /// the request
    pub request: RequestNo,
    /// how it has ended
    pub outcome: Outcome,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Held {
    ranges: Ranges,
    pid: u32,
    /// The open files through which they were taken.
    handles: BTreeSet<u64>,
    /// Their session has ended.
    is_lost: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Pending {
    asked: Asked,
    is_cancelled: bool,
    /// A later request of its owner was granted, so the server has received this one before, and the lock of a whole
    /// file that it gives up was given up then.
    is_overtaken: bool,
}

/// The locks of this host's programs in one vault, for all sessions of a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Holder {
    held: BTreeMap<LockKey, Held>,
    pending: BTreeMap<RequestNo, Pending>,
    next: u64,
    /// Owners that have lost locks.
    lost: usize,
    /// A request was given up since the last report.
    must_report: bool,
}

impl Holder {
    /// Makes a request. Returns its number, and the call to send; or how it has ended, if the server need not be asked.
    ///
    /// # Errors
    /// The outcome, without a request.
    pub fn ask(&mut self, asked: Asked) -> Result<(RequestNo, Call), Outcome> {
        match asked {
            Asked::Lock { lock, .. } if self.has_lost(&lock.key) => return Err(Outcome::Lost),
            Asked::Unlock { key, range } if self.has_lost(&key) => {
                self.change(&key, |held| held.ranges.clear(range));
                return Err(Outcome::Done);
            }
            Asked::Lock { .. } | Asked::Unlock { .. } | Asked::Test { .. } => {}
        }
        let request = RequestNo(self.next);
        self.next += 1;
        self.pending.insert(request, Pending { asked, is_cancelled: false, is_overtaken: false });
        Ok((request, call(request, asked)))
    }

    /// The program no longer waits for a request. The server's answer is awaited nevertheless: the lock may have been
    /// granted.
    pub fn cancel(&mut self, request: RequestNo) -> Option<Call> {
        let pending = self.pending.get_mut(&request).filter(|pending| !pending.is_cancelled)?;
        pending.is_cancelled = true;
        Some(Call::CancelLock { request })
    }

    /// Gives a request up whose answer does not come. A new connection must follow, whose report tells the server what
    /// this host has. Until then answers are ignored: after them the server may have carried out what was given up.
    /// The other requests are made again. False: it was answered.
    pub fn abandon(&mut self, request: RequestNo) -> bool {
        let Some(pending) = self.pending.remove(&request) else { return false };
        self.must_report = true;
        self.doubt(pending);
        true
    }

    /// Whether a request was given up since the last report: another connection must follow, and nothing is sent by
    /// this one.
    pub fn must_report(&self) -> bool {
        self.must_report
    }

    /// Handles an answer of the server. `None`: nothing waits for it, or it is ignored.
    pub fn answer(&mut self, request: RequestNo, answer: LockAnswer) -> Option<Answered> {
        if self.must_report {
            return None;
        }
        let Pending { asked, is_overtaken, .. } = self.pending.remove(&request)?;
        // The server gives up a lock of a whole file before it refuses another mode, or lets that wait.
        let gives_up = |holder: &mut Holder| {
            if let Asked::Lock { lock, .. } = asked
                && lock.key.kind == LockKind::Whole
                && !is_overtaken
            {
                holder.change(&lock.key, |held| held.ranges.clear(Range::ALL));
            }
        };
        let outcome = match answer {
            LockAnswer::Done => {
                match asked {
                    Asked::Lock { lock, handle, .. } => {
                        self.overtake(request, &lock.key);
                        self.change(&lock.key, |held| {
                            held.ranges.set(lock.range, lock.mode);
                            held.pid = lock.pid;
                            held.handles.insert(handle);
                        });
                    }
                    Asked::Unlock { key, range } => self.change(&key, |held| held.ranges.clear(range)),
                    Asked::Test { .. } => {}
                }
                Outcome::Done
            }
            LockAnswer::Conflict(conflict) => {
                gives_up(self);
                Outcome::Conflict(conflict)
            }
            LockAnswer::Cancelled => {
                gives_up(self);
                Outcome::Cancelled
            }
            LockAnswer::Deadlock => Outcome::Deadlock,
            LockAnswer::TooMany => Outcome::TooMany,
        };
        Some(Answered { request, outcome })
    }

    /// The session has a new connection. Returns the locks to report, and the calls to make again after that. An answer
    /// may have been lost: so nothing is reported that the server may have released or reduced. From then on the server
    /// has what is reported, so this host has no more than that either.
    pub fn resumed(&mut self) -> (Vec<Lock>, Vec<Call>) {
        self.must_report = false;
        // They are made again, after the report.
        self.pending.values_mut().for_each(|pending| pending.is_overtaken = false);
        let unanswered: Vec<_> = self.pending.values().copied().collect();
        unanswered.into_iter().for_each(|pending| self.doubt(pending));
        let held = self.held.iter().filter(|(_, held)| !held.is_lost);
        let all = held.flat_map(|(key, held)| {
            held.ranges.iter().map(|(range, mode)| Lock { key: *key, range, mode, pid: held.pid })
        });
        let again = self.pending.iter().flat_map(|(request, pending)| {
            let cancel = pending.is_cancelled.then_some(Call::CancelLock { request: *request });
            std::iter::once(call(*request, pending.asked)).chain(cancel)
        });
        (all.collect(), again.collect())
    }

    /// The session has ended: its locks are lost. Returns the requests that have ended with it.
    pub fn session_ended(&mut self) -> Vec<Answered> {
        for held in self.held.values_mut() {
            held.is_lost = true;
        }
        self.lost = self.held.len();
        self.must_report = false;
        let pending = std::mem::take(&mut self.pending);
        pending.into_keys().map(|request| Answered { request, outcome: Outcome::Ended }).collect()
    }

    /// Whether an owner has lost a lock that it took through this open file: what it reads and writes is not protected.
    pub fn is_lost(&self, handle: u64) -> bool {
        self.lost > 0 && self.held.values().any(|held| held.is_lost && held.handles.contains(&handle))
    }

    /// What close(2) of an open file releases: all that its owner has locked by ranges.
    pub fn closes(&self, file: Object, owner: u64) -> Option<Asked> {
        let key = LockKey { file, kind: LockKind::Range, owner };
        self.held.contains_key(&key).then_some(Asked::Unlock { key, range: Range::ALL })
    }

    /// The last close of an open file. Returns what it releases: the locks whose owner it is.
    pub fn closed(&mut self, handle: u64) -> Vec<Asked> {
        let of_it = self.held.iter_mut().filter(|(_, held)| held.handles.contains(&handle));
        let mut ends = Vec::new();
        for (key, held) in of_it {
            held.handles.remove(&handle);
            if held.handles.is_empty() {
                ends.push(Asked::Unlock { key: *key, range: Range::ALL });
            }
        }
        ends
    }

    fn has_lost(&self, key: &LockKey) -> bool {
        self.lost > 0 && self.held.get(key).is_some_and(|held| held.is_lost)
    }

    /// This host no longer has what the server has released or reduced, if it has received the request.
    fn doubt(&mut self, pending: Pending) {
        let (key, range, mode) = match pending.asked {
            Asked::Lock { lock, .. } => (lock.key, lock.range, Some(lock.mode)),
            Asked::Unlock { key, range } => (key, range, None),
            Asked::Test { .. } => return,
        };
        let Some(held) = self.held.get(&key) else { return };
        // A lock of a whole file is given up for one of another mode.
        let is_other = key.kind == LockKind::Whole && held.ranges.iter().any(|(_, held)| Some(held) != mode);
        let gives_up = is_other && !pending.is_overtaken;
        self.change(&key, |held| held.ranges.weaken(range, if gives_up { None } else { mode }));
    }

    /// A lock was granted: the server has received all earlier requests of its owner.
    fn overtake(&mut self, granted: RequestNo, key: &LockKey) {
        for (_, earlier) in self.pending.range_mut(..granted) {
            earlier.is_overtaken |= matches!(earlier.asked, Asked::Lock { lock, .. } if lock.key == *key);
        }
    }

    fn change(&mut self, key: &LockKey, change: impl FnOnce(&mut Held)) {
        let held = self.held.entry(*key).or_default();
        change(held);
        if held.ranges.is_empty() {
            self.lost -= usize::from(held.is_lost);
            self.held.remove(key);
        }
    }
}

fn call(request: RequestNo, asked: Asked) -> Call {
    match asked {
        Asked::Lock { lock, waits, .. } => Call::Lock { request, lock, waits },
        Asked::Unlock { key, range } => Call::Unlock { request, key, range },
        Asked::Test { lock } => Call::TestLock { request, lock },
    }
}
