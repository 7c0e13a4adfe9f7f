//! The protocol between hosts and the server of shared vaults (`docs/sharing.md`).
//!
//! | module | what it does |
//! |---|---|
//! | `proto` | the messages and services, generated from `proto/lamassu.proto` |
//! | `convert` | messages from and to leases, rows and heads |
//! | `token` | what lets a host join: one line |
//! | `identity` | who a host is: its key, its certificate and the server's authority, in a directory |
//! | `tls` | TLS 1.3 with certificates on both sides |
//! | `limits` | what a server's policy forbids a host |
//! | `clock` | the clock that leases go by |
//! | `host/` | a host's side: joining, a connection, a session, the table of an anchor that a server keeps, its keys |
//!
//! The async runtime stays in here: what `host` offers blocks its caller.
//!
//! Locks of a session: its state machine, then what it has received; no call is made with either held.
#![forbid(unsafe_code)]

pub mod clock;
pub mod convert;
pub mod host;
pub mod identity;
pub mod limits;
pub mod tls;
pub mod token;

/// The messages and services of `proto/lamassu.proto`.
#[allow(missing_docs, clippy::doc_markdown, rust_2018_idioms)]
pub mod proto {
    tonic::include_proto!("lamassu.v1");
}

/// Shows nothing of the key.
impl std::fmt::Debug for proto::Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Drop for proto::Key {
    fn drop(&mut self) {
        zeroize::Zeroize::zeroize(&mut self.key);
    }
}

/// The version of the protocol: the package of its messages.
pub const PROTOCOL: &str = "lamassu.v1";

/// Rows of a table that one message brings, at most.
pub const ROWS_MAX: usize = 1024;

/// Changes of one commit, at most.
pub const CHANGES_MAX: usize = 200_000;

/// The newest commits, of which a server sends the changes alone to who knows what was before: so many at most.
pub const DELTA_COMMITS_MAX: usize = 1024;

/// Bytes of their changes, at most.
pub const DELTA_MAX: usize = 4 << 20;

/// Findings of one report, at most.
pub const FINDINGS_MAX: usize = 200;

/// Bytes of one report, at most.
pub const REPORT_MAX: usize = 1 << 20;

/// Bytes of one message about a key, or of elements that are to be evaluated, at most.
pub const KEYS_MESSAGE_MAX: usize = 40 << 10;

/// In the metadata of an answer to who asks for too much: in how many ms it may ask again.
pub const AGAIN: &str = "lamassu-again-ms";

/// Bytes of one message, at most.
pub const MESSAGE_MAX: usize = 16 << 20;
