//! The protocol between hosts and the server of shared vaults (`docs/sharing.md`).
//!
//! | module | what it does |
//! |---|---|
//! | `proto` | the messages and services, generated from `proto/lamassu.proto` |
//! | `error` | errors of certificates and keys |
//! | `convert` | messages from and to leases, rows and heads |
//! | `token` | the token with which a host joins: one line |
//! | `identity` | a host's identity at a server: its key, and the server's authority, in a directory |
//! | `tls` | TLS 1.3 with certificates on both sides |
//! | `limits` | what a server's policy forbids a host |
//! | `protocol` | versions of the protocol |
//! | `clock` | the clock for leases |
//! | `host/` | the host's side: joining, a connection, a session, a mirrored table, turns, keys at the server |
//!
//! The async runtime is internal: the functions of `host` block their caller.
//!
//! Locks, in this order: `copy` of [`host::Turns`] while a turn is taken; its `attended`, or `commits` of a
//! mirrored table during a commit; the `state` of a session. `limits` and `told_of` of a session are held alone. The
//! network is never used with `state` held.
#![forbid(unsafe_code)]

pub mod clock;
pub mod convert;
mod error;
pub mod host;
pub mod identity;
pub mod limits;
pub mod protocol;
pub mod tls;
pub mod token;

pub use error::TlsError;

/// The messages and services of `proto/lamassu.proto`.
#[allow(missing_docs, clippy::doc_markdown, clippy::too_many_lines, rust_2018_idioms)]
pub mod proto {
    tonic::include_proto!("lamassu.v1");
}

/// Does not show the key.
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

/// Rows in one message, at most.
pub const ROWS_MAX: usize = 1024;

/// Changes in one commit, at most.
pub const CHANGES_MAX: usize = 200_000;

/// Newest commits that a server sends as changes only, to a session that has the state before them: at most this many.
pub const DELTA_COMMITS_MAX: usize = 1024;

/// Bytes of these changes, at most.
pub const DELTA_MAX: usize = 4 << 20;

/// Bytes of one message of a session to the server, at most: a report of all its locks is the longest one.
pub const SESSION_MESSAGE_MAX: usize = 640 << 10;

/// Findings in one report, at most.
pub const FINDINGS_MAX: usize = 200;

/// Bytes of one report, at most.
pub const REPORT_MAX: usize = 1 << 20;

/// Bytes of one message about a key, or of elements to evaluate, at most.
pub const KEYS_MESSAGE_MAX: usize = 40 << 10;

/// Metadata of a refusal for exceeding the limit: milliseconds until the next try.
pub const AGAIN: &str = "lamassu-again-ms";

/// Bytes of one message, at most.
pub const MESSAGE_MAX: usize = 16 << 20;
