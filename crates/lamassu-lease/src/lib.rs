//! Leases: which host may use what it knows of an object, and for how long (`docs/sharing.md`).
//!
//! Two state machines without I/O, threads or clocks. Whoever runs one tells it what happened, and when; it answers
//! with what is to be made durable, and what is to be sent after that.
//!
//! | module | what it does |
//! |---|---|
//! | `types` | objects, sessions, modes, moments, messages |
//! | `terms` | how long a lease lasts, within the bounds that the proof needs |
//! | `server` | who holds what: grants, recalls, expiry, takeover, restart |
//! | `client` | what this host holds: admission of operations, recalls, the end of its session |
//!
//! Wrong orders cannot be written: what must be durable before a message is sent is in the same [`server::Step`], and
//! an operation gets a [`client::Ticket`] only while its lease is good.

pub mod client;
pub mod server;
pub mod terms;
mod types;

pub use terms::{Terms, TermsError};
pub use types::{Call, Grant, GrantNo, Millis, Mode, Object, Reply, RequestNo, SessionId};
