//! The messages between clients and the server.

use crate::ids::{Grant, Mode, Object, RequestNo};
use crate::lock::{Lock, LockAnswer, LockKey, Range};

/// A message of a client. The calls of one connection arrive in the order in which they were made, or not at all. Those
/// of an earlier connection may arrive late, and the server takes none of them: the numbers of reports say which
/// connection is the newest.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// The session is alive. The answer repeats `beat`.
    Heartbeat {
        /// the heartbeat's number, ascending
        beat: u64,
    },
    /// The session has a new connection, and holds these leases and locks, and no others.
    Resume {
        /// the report's number, ascending, from 1 on
        number: u64,
        /// its leases
        held: Vec<Grant>,
        /// those of them that it keeps ([`Call::Keep`])
        kept: Vec<Object>,
        /// Leases that it has released, whose objects it had taken over: the server may have heard neither.
        taken_over: Vec<Grant>,
        /// its locks
        locks: Vec<Lock>,
    },
    /// Requests a lease.
    Acquire {
        /// the client's number
        request: RequestNo,
        /// the object
        object: Object,
        /// the mode
        mode: Mode,
    },
    /// Releases a lease, or reduces it to a shared one. All changes under it are committed.
    Release {
        /// the grant
        grant: Grant,
        /// what is kept: nothing, or a shared lease
        keeps: Option<Mode>,
    },
    /// The session keeps a lease although others want it, from now on or no longer.
    Keep {
        /// the grant
        grant: Grant,
        /// whether it is kept
        kept: bool,
    },
    /// The state that an earlier holder left has been recovered and committed.
    TakenOver {
        /// the grant
        grant: Grant,
    },
    /// Requests a lock for a program.
    Lock {
        /// the client's number
        request: RequestNo,
        /// the lock
        lock: Lock,
        /// whether to wait for locks that are in the way
        waits: bool,
    },
    /// Releases a range.
    Unlock {
        /// the client's number
        request: RequestNo,
        /// whose locks, and of what
        key: LockKey,
        /// the range
        range: Range,
    },
    /// Asks whether a lock could be taken.
    TestLock {
        /// the client's number
        request: RequestNo,
        /// the lock
        lock: Lock,
    },
    /// A request for a lock is to wait no longer. If it still waits, that is its answer.
    CancelLock {
        /// the request
        request: RequestNo,
    },
    /// The session ends. All its changes are committed.
    Leave,
}

/// A message of the server to one session. Replies arrive in the order in which they were made, or not at all.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Reply {
    /// Answers a heartbeat.
    Alive {
        /// the heartbeat's number
        beat: u64,
    },
    /// Grants a lease.
    Granted {
        /// the lease; exclusive if the object must be taken over
        grant: Grant,
        /// the request
        request: RequestNo,
        /// An earlier holder ended without releasing it: the state that it left must be recovered before anything else.
        takes_over: bool,
    },
    /// Another session wants a conflicting lease.
    Recall {
        /// the grant
        grant: Grant,
        /// the mode that may be kept
        keeps: Option<Mode>,
    },
    /// Answers a request about a lock.
    Lock {
        /// the request
        request: RequestNo,
        /// the answer
        answer: LockAnswer,
    },
    /// The session has expired, or never existed: none of its leases is valid.
    Ended,
}
