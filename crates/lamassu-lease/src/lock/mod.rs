//! A lock of a program, and the answer to a request for one. [`crate::locks`] says what they mean.

mod ranges;

#[cfg(test)]
pub(crate) use ranges::LOOKED_AT;
pub use ranges::{Range, Ranges};

use crate::ids::{Mode, Object};

/// Most locked ranges of a session, and most of its requests that may wait.
pub const LOCKS_MAX: usize = 8192;
/// Most requests for locks of one file that a session may have waiting: an unlock may have to look at all of a file.
pub const WAITING_MAX: usize = 1024;
/// Those of all sessions. A chain of locks, each of which becomes weaker when it lets the next request in, costs a look
/// at all of them for each.
pub const WAITING_OF_ALL_MAX: usize = 2048;
/// Most ranges that a session can report: its last lock may have made three of one.
pub const REPORTED_MAX: usize = LOCKS_MAX + 1;

/// The two kinds of locks, which do not conflict with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LockKind {
    /// fcntl(2): of ranges.
    Range,
    /// flock(2): of whole files. A request for another mode first gives up the lock that the owner has.
    Whole,
}

/// One owner's locks of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LockKey {
    /// the file
    pub file: Object,
    /// the kind
    pub kind: LockKind,
    /// the owner, by the number that its host gives it
    pub owner: u64,
}

/// A lock, held or asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lock {
    /// whose, and of what
    pub key: LockKey,
    /// the range
    pub range: Range,
    /// the mode
    pub mode: Mode,
    /// the process, for people
    pub pid: u32,
}

/// The lock that is in the way of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Conflict {
    /// its range
    pub range: Range,
    /// its mode
    pub mode: Mode,
    /// its process; 0 if it is one of another session
    pub pid: u32,
}

/// The answer to a request about locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockAnswer {
    /// It is done; a test found no conflict.
    Done,
    /// A lock is in the way.
    Conflict(Conflict),
    /// Waiting would never end: the holder waits for this owner.
    Deadlock,
    /// The session has too many locks.
    TooMany,
    /// The request waited, and no longer does.
    Cancelled,
}
