//! What goes wrong with an anchor, by whose fault it is.

use std::io;
use std::path::{Path, PathBuf};

/// A part of an anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// What is said of the vault as a whole.
    Vault,
    /// The row of an object.
    Row,
    /// An entry of a directory.
    Entry,
    /// Digests of a tree record.
    Held,
    /// A change of names that is under way.
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

/// What goes wrong with the server that keeps an anchor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServerFault {
    /// It does not answer, or not any more.
    #[error("it does not answer: {detail}")]
    Unreachable {
        /// what the network says
        detail: String,
    },
    /// It is not the server that this host joined, or the other way round.
    #[error("it is not the server that this host has joined: {detail}")]
    Untrusted {
        /// what TLS says
        detail: String,
    },
    /// This host has not joined it.
    #[error("this host has not joined it")]
    NotJoined,
    /// This host may not do that there.
    #[error("it refuses: {detail}")]
    Refused {
        /// what it says
        detail: String,
    },
    /// A rule of its policy forbids it.
    #[error("a rule of its policy forbids {what}: {rule:?}")]
    Policy {
        /// the rule's name
        rule: String,
        /// what it forbids
        what: String,
    },
    /// It keeps no anchor of this vault.
    #[error("it keeps no anchor of this vault")]
    UnknownVault,
    /// Another session has the vault.
    #[error("the vault is in use by {by}")]
    InUse {
        /// the host
        by: String,
    },
    /// The session has ended there: another host may have the vault by now.
    #[error("this mount was silent for too long, and its session has ended: what was not synced is lost")]
    Ended,
    /// It speaks another version of the protocol.
    #[error("it speaks another version of the protocol: {detail}")]
    Version {
        /// what it says
        detail: String,
    },
    /// It knows less than this host has seen: its state was put back.
    #[error(
        "it is at revision {found}, and this host has seen {seen}: its state is older than it was, or another one's"
    )]
    Older {
        /// of the server
        found: crate::Revision,
        /// of this host's copy
        seen: crate::Revision,
    },
    /// It was put back from a backup, and other hosts may know more of the vault.
    #[error("it was put back from a backup, and these hosts may know more of this vault: {waits_for}")]
    Restored {
        /// their names
        waits_for: String,
    },
    /// It has failed.
    #[error("it has failed: {detail}")]
    Failed {
        /// what it says
        detail: String,
    },
}

/// Errors of an anchor. None of them changes anything.
#[derive(Debug, thiserror::Error)]
pub enum AnchorError {
    /// There is none: it was never made, it was lost, or it lies elsewhere.
    #[error("there is no anchor at {}", path.display())]
    Missing {
        /// where it was looked for
        path: PathBuf,
    },
    /// There is one already.
    #[error("there is an anchor at {} already", path.display())]
    Exists {
        /// where
        path: PathBuf,
    },
    /// Another process has it open.
    #[error("the anchor {} is in use by another process", path.display())]
    Locked {
        /// where
        path: PathBuf,
    },
    /// Others could change it: it is not a private regular file of ours.
    #[error("the anchor {} is not a regular file that is yours alone (mode 0600, one name)", path.display())]
    NotPrivate {
        /// where
        path: PathBuf,
    },
    /// It is an older copy of itself, or the vault was written where it was not told: sessions that it never heard of
    /// wrote to the vault. (A session is announced to the anchor before the store can know of it.)
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
    /// It is of another vault.
    #[error("the anchor is of another vault")]
    Foreign,
    /// It was made for a vault of another suite or domain than the header says: whoever made it has lied to its server,
    /// or the header is another vault's.
    #[error("the anchor is of a vault of suite {} and domain {}, which the header does not say", suite.name(), domain.name())]
    OtherProperties {
        /// as it says
        suite: lamassu_format::Suite,
        /// as it says
        domain: lamassu_format::Domain,
    },
    /// Written by a later Lamassu.
    #[error("the anchor has version {found}, which is not supported; use a newer lamassu")]
    Version {
        /// version found
        found: u8,
    },
    /// Its file knows no vault: it is new, or was emptied, or its making was cut off.
    #[error("the anchor is empty: it knows no vault; it was emptied, or its making was cut off")]
    Empty,
    /// Its bytes are not what a commit wrote: its disk failed, or somebody changed it.
    #[error("the anchor is damaged: {part}")]
    Damaged {
        /// what does not parse
        part: Part,
    },
    /// Its file does not open or verify as a database.
    #[error("the anchor is damaged: {detail}")]
    Unreadable {
        /// what the database says
        detail: Box<redb::Error>,
    },
    /// Its file is damaged so that the database gave up.
    #[error("the anchor is damaged: its database cannot go on")]
    Broken,
    /// An object that it does not know: a fault of the caller, or rows were lost.
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
    /// Its file was removed or replaced while it was open: what is written to it nobody would find.
    #[error(
        "the anchor {} was removed or replaced while it is in use, and nothing is written to what nobody would find: \
         put that file back (docs/freshness.md tells how)",
        path.display()
    )]
    Gone {
        /// where it was
        path: PathBuf,
    },
    /// The server that keeps it cannot be asked.
    #[error("the anchor's server {server}: {fault}")]
    Server {
        /// its address
        server: String,
        /// why
        fault: ServerFault,
    },
    /// The system could not read or write it.
    #[error("{op} the anchor {}: {source}", path.display())]
    Io {
        /// what was tried
        op: &'static str,
        /// where it lies
        path: PathBuf,
        /// the system's error
        source: io::Error,
    },
}

fn sessions(first: u32, last: u32) -> String {
    if first == last { format!("session {first}") } else { format!("sessions from {first} to {last}") }
}

impl AnchorError {
    /// Whether a rule of its server's policy forbids it.
    pub fn is_of_policy(&self) -> bool {
        matches!(self, AnchorError::Server { fault: ServerFault::Policy { .. }, .. })
    }

    /// Wraps an error of the system.
    pub(crate) fn io(op: &'static str, path: &Path) -> impl Fn(io::Error) -> AnchorError {
        move |source| AnchorError::Io { op, path: path.to_owned(), source }
    }
}
