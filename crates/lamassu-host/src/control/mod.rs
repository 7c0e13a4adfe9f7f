//! The control protocol between a server of vaults and its clients.
//!
//! [`protocol`] has the messages, [`client`] is the client's side, and `Served::answer` the server's. A transport
//! carries the bytes: a mount uses ioctl(2). The client's end implements [`client::Transport`]; the server's end passes
//! requests to `Served::answer`, with the [`protocol::Caller`] as the system reports it.
//!
//! Secrets are never sent in the clear ([`parcel`]).

pub mod client;
pub mod counters;
pub mod parcel;
pub mod protocol;

pub use client::{AskError, Transport};
pub use counters::{Counted, Counters, Operation};
