//! Locks of programs, fcntl(2) and flock(2), in a vault that several hosts use (`docs/sharing.md`). They need no turn.

pub use lamassu_lease::locks::{Asked, Conflict, Lock, LockKey, LockKind, Outcome, Range};
pub use lamassu_lease::{Mode as LockMode, Object};

/// Is told how a request has ended.
pub type Done = Box<dyn FnOnce(Outcome) + Send>;

/// Locks that hold among all hosts.
pub trait Locks: Send + Sync {
    /// Makes a request. `done` is told how it ends, maybe before this returns. [`Outcome::Ended`]: there is no session
    /// until the next turn begins.
    fn ask(&self, asked: Asked, done: Done) -> Option<Box<dyn Waiting>>;
    /// What close(2) of an open file releases.
    fn closes(&self, file: Object, owner: u64) -> Option<Asked>;
    /// What the last close of an open file releases.
    fn closed(&self, handle: u64) -> Vec<Asked>;
    /// Whether a lock was lost that was taken through this open file.
    fn is_lost(&self, handle: u64) -> bool;
}

/// A request that was made.
pub trait Waiting: Send {
    /// The caller no longer waits: the request ends soon, maybe nevertheless with the lock.
    fn cancel(&self);
}
