//! The control protocol: what a server of vaults is asked, and answers.
//!
//! [`protocol`] has the messages, [`client`] is the client's side, and `Served::answer` the server's. How
//! bytes get from one to the other is a transport's: a mount carries them by ioctl(2). The client's end implements
//! [`client::Transport`]; the server's hands requests to `Served::answer`, with the [`protocol::Caller`] as the system
//! names it.
//!
//! Never: lets a secret travel in the clear ([`parcel`]).

pub mod client;
pub mod counters;
pub mod parcel;
pub mod protocol;

pub use client::{AskError, Transport};
pub use counters::{Counted, Counters, Operation};
