//! Refusals of host requests.

use crate::ServerError;
use lamassu_anchor::AnchorError;
use parking_lot::Mutex;
use std::io::ErrorKind::{QuotaExceeded, StorageFull};
use std::time::{Duration, Instant};

/// Minimum time between two lines of the log about a disk without room.
const SAID_EVERY: Duration = Duration::from_secs(60);

/// The reason why a host's request is refused.
#[derive(Debug)]
pub enum Refused {
    /// The vault is not known here.
    Unknown,
    /// A session of another host is in the way.
    InUse {
        /// the host
        by: String,
    },
    /// The vault was restored from a backup, and some hosts may have newer rows.
    Restored {
        /// those hosts
        waits_for: Vec<String>,
    },
    /// The session has ended, or has no lease for this.
    Ended,
    /// The changes are based on another head.
    OtherHead,
    /// The vault has another anchor here already.
    Known,
    /// The vault's anchor was kept here, and is gone.
    Gone,
    /// The rows are not an anchor of this vault.
    NoAnchor,
    /// The call is invalid.
    Nonsense,
    /// A rule of the policy forbids it.
    Policy {
        /// its name
        rule: String,
        /// what it forbids
        what: String,
    },
    /// This host may not use the vault.
    NotGranted,
    /// Too much at once.
    TooMuch(&'static str),
    /// The vault is being reopened, or its anchor is being put.
    NotNow,
    /// The server's disk failed.
    Failed(ServerError),
    /// The same, and the change may have been made nevertheless.
    InDoubt(ServerError),
    /// A change may not be durable, so the server ends: see [`Lost`].
    Lost(Lost),
}

/// A change in memory may not be durable, so the server must end.
#[derive(Debug)]
pub struct Lost(pub ServerError);

impl From<Lost> for Refused {
    fn from(lost: Lost) -> Refused {
        Refused::Lost(lost)
    }
}

impl From<ServerError> for Refused {
    fn from(error: ServerError) -> Refused {
        Refused::Failed(error)
    }
}

impl From<AnchorError> for Refused {
    fn from(error: AnchorError) -> Refused {
        match &error {
            AnchorError::Io { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded) => {
                static SAID: Mutex<Option<Instant>> = Mutex::new(None);
                let said = &mut *SAID.lock();
                // Hosts repeat what was refused.
                if said.is_none_or(|said| said.elapsed() >= SAID_EVERY) {
                    tracing::error!(%error, "an anchor cannot grow: its file doubles, and 64 MiB stay free for the state");
                    *said = Some(Instant::now());
                }
                Refused::TooMuch("the server's disk has no room for the anchor to grow")
            }
            _ => Refused::Failed(error.into()),
        }
    }
}

/// A result whose error is a [`Refused`].
pub type Answer<T> = std::result::Result<T, Refused>;

/// The request that a policy refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// To begin a session.
    Session,
    /// To commit rows.
    Commit,
    /// To put an anchor.
    Anchor,
}

impl At {
    /// Its name in the audit log and the metrics.
    pub const fn name(self) -> &'static str {
        match self {
            At::Session => "session",
            At::Commit => "commit",
            At::Anchor => "anchor",
        }
    }
}
