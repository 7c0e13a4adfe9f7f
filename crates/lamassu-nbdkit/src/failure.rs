//! Why a callback fails.

use lamassu_host::control::protocol::Failed;
use lamassu_host::{Error as HostError, FaultKind};
use lamassu_keys::{KeyError, SourceError};
use lamassu_vault::VaultError;
use lamassu_volume::VolumeError;
use std::io::Write;
use std::os::fd::OwnedFd;

/// The reason why a callback fails.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The operator's: an invalid parameter.
    #[error("{0}")]
    Setting(String),
    /// The operator's: nbdkit has gone to the background.
    #[error("start nbdkit with --foreground: what was loaded before it went to the background cannot be used there")]
    Forked,
    /// A client's: an export that does not exist. The name comes from the client, and is not repeated.
    #[error("there is no such export")]
    NoExport,
    /// A client's: zeros as data, faster than writing them. Clients ask this to find out whether it is possible.
    #[error("zeros that are to take space are written like other data")]
    NotFast,
    /// Of a vault or its keys.
    #[error("{}", .0.message())]
    Host(#[from] HostError),
    /// Of a volume.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The system's.
    #[error(transparent)]
    System(#[from] std::io::Error),
    /// The process that started nbdkit has the error, and reports it.
    #[error("the vaults could not be opened")]
    Told,
    /// The program's: a bug.
    #[error("internal error: a bug in Lamassu's plugin, please report it")]
    Panicked,
}

/// Result of a callback.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl From<VaultError> for Failure {
    fn from(error: VaultError) -> Failure {
        VolumeError::from(error).into()
    }
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Failure {
        HostError::from(KeyError::from(error)).into()
    }
}

impl Failure {
    /// The errno that nbdkit answers.
    pub fn errno(&self) -> i32 {
        match self {
            Failure::Setting(_) | Failure::Forked => libc::EINVAL,
            Failure::NoExport => libc::ENOENT,
            Failure::NotFast => libc::EOPNOTSUPP,
            Failure::Volume(error) => answered(error.errno()),
            Failure::Host(_) | Failure::System(_) | Failure::Told | Failure::Panicked => libc::EIO,
        }
    }

    fn kind(&self) -> FaultKind {
        match self {
            Failure::Setting(_) | Failure::Forked => FaultKind::Usage,
            Failure::NoExport => FaultKind::NotFound,
            Failure::NotFast => FaultKind::Other,
            Failure::Host(error) => error.into(),
            Failure::Volume(error) => error.into(),
            Failure::System(_) | Failure::Told => FaultKind::Other,
            Failure::Panicked => FaultKind::Internal,
        }
    }
}

/// The errno by which nbdkit tells its client the same. NBD has few numbers, and nbdkit tells EINVAL, an invalid
/// request, for all others.
fn answered(errno: i32) -> i32 {
    match errno {
        libc::EPERM | libc::EROFS | libc::ENOSPC | libc::EDQUOT | libc::EFBIG => errno,
        libc::ENOMEM | libc::EOPNOTSUPP | libc::EINVAL | libc::ENOENT => errno,
        _ => libc::EIO,
    }
}

/// The pipe on which the process that started nbdkit waits for the outcome: one line of JSON, `null` if vaults are
/// served.
pub struct Report(std::fs::File);

impl Report {
    pub fn new(to: OwnedFd) -> Report {
        Report(to.into())
    }

    /// Reports it.
    ///
    /// # Errors
    /// The process that waited has ended.
    pub fn tell<T>(mut self, how: &Result<T>) -> std::io::Result<()> {
        let failed = how.as_ref().err().map(|error| Failed { kind: error.kind(), message: error.to_string() });
        self.0.write_all(serde_json::to_string(&failed)?.as_bytes())
    }
}
