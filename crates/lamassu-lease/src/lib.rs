//! Leases: which host may use an object of a vault, and for how long (`docs/sharing.md`).
//!
//! Two state machines without I/O, threads, clocks or locks. The caller passes in events and the time. It gets back
//! what to make durable, and what to send after that.
//!
//! | module | what it does |
//! |---|---|
//! | `ids`, `lock`, `messages` | objects, sessions, leases, modes, moments; a lock of a program; messages |
//! | `terms` | how long leases last, within the bounds that the proof needs |
//! | `durable` | the state that outlives the server's process |
//! | `server` | the server's side: grants, recalls, expiry, takeover, restart |
//! | `client` | a host's side: admission of operations, recalls, the end of its session |
//! | `locks` | locks of programs: the server's table of them, and a host's view |
//!
//! Wrong orders cannot be expressed: what must be durable before a message is in the same [`server::Step`] as the
//! message, and an operation gets a [`client::Ticket`] only while its lease is good.

pub mod client;
mod durable;
mod ids;
mod lock;
pub mod locks;
mod messages;
pub mod server;
pub mod terms;

pub use ids::{Grant, GrantNo, Millis, Mode, Object, RequestNo, SessionId};
pub use messages::{Call, Reply};
pub use terms::{Terms, TermsError};
