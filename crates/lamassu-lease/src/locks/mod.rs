//! Locks that programs take on files, by fcntl(2) and flock(2). The server knows all of them, so they hold among all
//! hosts.
//!
//! * **Owners.** A lock belongs to an owner of a session: a process, or an open file, as the host's kernel numbers it.
//!   Locks of one owner never conflict. A new lock of an owner replaces its earlier ones in that range.
//! * **Waiting.** A request that conflicts is refused, or waits. It is granted when it conflicts with no lock: locks
//!   that others ask for later may come first, as in Linux.
//! * **Sessions.** The locks of a session last until it ends. They are not durable at the server: on each new
//!   connection a host reports its locks, and what it does not name is released. After a restart nothing is granted
//!   until every session has reported, or has expired.
//! * **Loss.** A host whose session has ended has lost its locks. The owner's open files fail from then on, until the
//!   owner has unlocked what it lost, or closed them ([`Holder::is_lost`]).

mod holder;
mod spans;
mod table;
mod work;

pub use crate::lock::{
    Conflict, LOCKS_MAX, Lock, LockAnswer, LockKey, LockKind, REPORTED_MAX, Range, Ranges, WAITING_MAX,
    WAITING_OF_ALL_MAX,
};
pub use holder::{Answered, Asked, Holder, Outcome};
pub(crate) use table::{Answers, CannotHave, Table};
pub(crate) use work::Work;

#[cfg(test)]
mod tests;
