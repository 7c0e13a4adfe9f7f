//! Errors of an anchor, by whose fault they are.

use std::io;
use std::path::{Path, PathBuf};

/// A part of an anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The vault's row.
    Vault,
    /// The row of an object.
    Row,
    /// An entry of a directory.
    Entry,
    /// Held digests of a tree record.
    Held,
    /// A pending change of names.
    Intent,
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Part::Vault => "the vault's row",
            Part::Row => "an object's row",
            Part::Entry => "an entry",
            Part::Held => "digests of a tree record",
            Part::Intent => "a change of names",
        })
    }
}

/// Errors of the server that keeps an anchor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServerFault {
    /// It does not answer.
    #[error("it does not answer: {detail}")]
    Unreachable {
        /// the network's error
        detail: String,
    },
    /// It is not the server that this host joined, or it does not know this host.
    #[error("it is not the server that this host has joined: {detail}")]
    Untrusted {
        /// the error of TLS
        detail: String,
    },
    /// This host has not joined it.
    #[error("this host has not joined it{}", joined_instead(joined))]
    NotJoined {
        /// the servers that it has joined
        joined: Vec<String>,
    },
    /// The server refuses this to this host.
    #[error("it refuses: {detail}")]
    Refused {
        /// the server's reason
        detail: String,
    },
    /// A rule of the server's policy forbids it.
    #[error("a rule of its policy forbids {what}: {rule:?}")]
    Policy {
        /// the rule's name
        rule: String,
        /// what it forbids
        what: String,
    },
    /// The server has no anchor of this vault.
    #[error("it keeps no anchor of this vault")]
    UnknownVault,
    /// A session of another host is in the way.
    #[error("the vault is in use by {by}")]
    InUse {
        /// the host
        by: String,
    },
    /// The session has ended at the server: another host may use the vault now.
    #[error("this mount was silent for too long, and its session has ended: what was not synced is lost")]
    Ended,
    /// The server has another version of the protocol.
    #[error("it speaks another version of the protocol: {detail}")]
    Version {
        /// the server's message
        detail: String,
    },
    /// Its state is older than what this host has seen: it was restored from a backup.
    #[error("it is at revision {found}, and this host has seen {seen}: its state is an older one, or another server's")]
    Older {
        /// of the server
        found: crate::Revision,
        /// of this host's copy
        seen: crate::Revision,
    },
    /// It was restored from a backup, and other hosts may have newer rows.
    #[error("it was put back from a backup, and these hosts may know more of this vault: {waits_for}")]
    Restored {
        /// their names
        waits_for: String,
    },
    /// The server failed.
    #[error("it has failed: {detail}")]
    Failed {
        /// its message
        detail: String,
    },
}

/// Errors of an anchor. After an error nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum AnchorError {
    /// There is no anchor: it was never made, it was lost, or it is elsewhere.
    #[error("there is no anchor at {}", path.display())]
    Missing {
        /// the path
        path: PathBuf,
    },
    /// The anchor exists already.
    #[error("there is an anchor at {} already", path.display())]
    Exists {
        /// the path
        path: PathBuf,
    },
    /// Another process has it open.
    #[error("the anchor {} is in use by another process", path.display())]
    Locked {
        /// the path
        path: PathBuf,
    },
    /// It is not a private regular file of this user: others could change it.
    #[error("the anchor {} is not a regular file that is yours alone (mode 0600, one name)", path.display())]
    NotPrivate {
        /// the path
        path: PathBuf,
    },
    /// It is an older copy of itself, or the vault was written without it: sessions that were not announced to it wrote
    /// to the vault. (A session is announced to the anchor before the store can know of it.)
    #[error(
        "the anchor is older than the vault, to which {} wrote since: its file was put back, or the vault was written \
         on another machine", sessions(*first, *last)
    )]
    Older {
        /// the first session that it does not know
        first: u32,
        /// the last session of the vault
        last: u32,
    },
    /// It belongs to another vault.
    #[error("the anchor is of another vault")]
    Foreign,
    /// Its suite or domain differs from the header's: the host that made it reported other properties to its server, or
    /// the header belongs to another vault.
    #[error("the anchor is of a vault of suite {} and domain {}, which the header does not say", suite.name(), domain.name())]
    OtherProperties {
        /// the anchor's
        suite: lamassu_format::Suite,
        /// the anchor's
        domain: lamassu_format::Domain,
    },
    /// A later version of Lamassu wrote it.
    #[error("the anchor has version {found}, which is not supported; use a newer lamassu")]
    Version {
        /// version found
        found: u8,
    },
    /// Its file has no vault: it is new, was emptied, or its making was interrupted.
    #[error("the anchor is empty: it knows no vault; it was emptied, or making it was interrupted")]
    Empty,
    /// Its bytes are not what a commit wrote: its disk failed, or it was changed.
    #[error("the anchor is damaged: {part}")]
    Damaged {
        /// the part that does not parse
        part: Part,
    },
    /// Its file does not open or verify as a database.
    #[error("the anchor is damaged: {detail}")]
    Unreadable {
        /// the database's error
        detail: Box<redb::Error>,
    },
    /// Its file is damaged so that the database panicked.
    #[error("the anchor is damaged: its database cannot go on")]
    Broken,
    /// An unknown object: a fault of the caller, or rows were lost.
    #[error("the anchor knows no object {object}")]
    Unknown {
        /// the object
        object: crate::ObjectId,
    },
    /// A fault of the caller: this order would break a rule of `docs/freshness.md`.
    #[error("object {object}: {rule}")]
    Order {
        /// the object
        object: crate::ObjectId,
        /// the rule
        rule: &'static str,
    },
    /// Its file was removed or replaced while it was open: further commits would be lost.
    #[error(
        "the anchor {} was removed or replaced while in use, and commits to a file without a name would be lost: \
         put that file back (docs/freshness.md tells how)",
        path.display()
    )]
    Gone {
        /// where it was
        path: PathBuf,
    },
    /// The server that keeps it cannot be used.
    #[error("the anchor's server {server}: {fault}")]
    Server {
        /// its address
        server: String,
        /// the reason
        fault: ServerFault,
    },
    /// The system could not read or write it.
    #[error("{op} the anchor {}: {source}", path.display())]
    Io {
        /// the operation
        op: &'static str,
        /// the path
        path: PathBuf,
        /// the system's error
        source: io::Error,
    },
}

fn joined_instead(joined: &[String]) -> String {
    if joined.is_empty() { String::new() } else { format!(", but {}", joined.join(", ")) }
}

fn sessions(first: u32, last: u32) -> String {
    if first == last { format!("session {first}") } else { format!("sessions from {first} to {last}") }
}

impl AnchorError {
    /// Whether a rule of the server's policy forbids it.
    pub fn is_of_policy(&self) -> bool {
        matches!(self, AnchorError::Server { fault: ServerFault::Policy { .. }, .. })
    }

    /// Wraps an error of the system.
    pub(crate) fn io(op: &'static str, path: &Path) -> impl Fn(io::Error) -> AnchorError {
        move |source| AnchorError::Io { op, path: path.to_owned(), source }
    }
}
