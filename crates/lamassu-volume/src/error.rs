//! Errors of operations on volumes.

use crate::{DIRECTORY, Name, SIZE_MAX};
use lamassu_host::FaultKind;
use lamassu_vault::VaultError;

/// An error of an operation on a volume.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The user's fault: no such volume.
    #[error("there is no volume {0}; `lamassu volume list DIR` lists those there are")]
    NotFound(Name),
    /// The user's fault: the name is taken.
    #[error("there is a volume {0} already")]
    Exists(Name),
    /// The user's fault: not a valid name of a volume.
    #[error(
        "{0:?} names no volume: letters, digits, `.`, `_` and `-`, at most 100, the first a letter or digit; \
         VOLUME@SNAPSHOT is a snapshot"
    )]
    BadName(String),
    /// The user's fault: no volume can have this size.
    #[error("a volume has 1 to {max} blocks of {block} bytes, and {size} bytes are no such number", max = SIZE_MAX / u64::from(*.block))]
    BadSize {
        /// requested size, bytes
        size: u64,
        /// sector size, bytes
        block: u32,
    },
    /// The user's fault: the volume would lose the data past its new end.
    #[error("{name} has {now} bytes, and {wanted} would cut off what lies behind; --shrink does that")]
    Shrinks {
        /// the volume's name
        name: Name,
        /// its size, bytes
        now: u64,
        /// requested size, bytes
        wanted: u64,
    },
    /// The user's fault: a snapshot cannot be written, and has no snapshots.
    #[error("{0} is a snapshot, which is never written; `lamassu volume clone` makes a volume of it")]
    IsSnapshot(Name),
    /// The user's fault: the volume has snapshots.
    #[error("{name} has {count} snapshots: destroy those first, or give --snapshots")]
    HasSnapshots {
        /// the volume's name
        name: Name,
        /// number of snapshots
        count: usize,
    },
    /// The fault of a program in a mount: a file in the directory of volumes is not a volume.
    #[error("{what:?} in {DIRECTORY} of the vault is no volume: {why}")]
    NotAVolume {
        /// name of the file
        what: String,
        /// the reason
        why: &'static str,
    },
    /// The fault of another user in a mount, who can change the directory of volumes.
    #[error(
        "{DIRECTORY} of the vault belongs to user {uid}, or others may write to it: they could exchange volumes. Mount \
         the vault, and give the directory to its owner with mode 0700"
    )]
    NotOurs {
        /// its owner
        uid: u32,
    },
    /// The caller's fault: the range exceeds the volume.
    #[error("the range lies behind the end of the volume")]
    Range,
    /// Ended by the user before it was done.
    #[error("{}", lamassu_host::Error::Interrupted)]
    Interrupted,
    /// The vault's error.
    #[error(transparent)]
    Vault(#[from] VaultError),
}

/// Result of a call.
pub type Result<T, E = VolumeError> = std::result::Result<T, E>;

impl From<&VolumeError> for FaultKind {
    fn from(error: &VolumeError) -> FaultKind {
        match error {
            VolumeError::NotFound(_) => FaultKind::NotFound,
            VolumeError::BadName(_) | VolumeError::BadSize { .. } | VolumeError::Range => FaultKind::Usage,
            VolumeError::Exists(_)
            | VolumeError::Shrinks { .. }
            | VolumeError::IsSnapshot(_)
            | VolumeError::HasSnapshots { .. }
            | VolumeError::NotOurs { .. } => FaultKind::Refused,
            VolumeError::NotAVolume { .. } => FaultKind::Other,
            VolumeError::Interrupted => FaultKind::Interrupted,
            VolumeError::Vault(error) => error.into(),
        }
    }
}

impl VolumeError {
    /// The errno of an error: [`lamassu_vault::errno_of`] for those of the vault.
    pub fn errno(&self) -> i32 {
        match self {
            VolumeError::NotFound(_) => libc::ENOENT,
            VolumeError::Exists(_) => libc::EEXIST,
            VolumeError::BadName(_) | VolumeError::BadSize { .. } | VolumeError::Range => libc::EINVAL,
            VolumeError::IsSnapshot(_) => libc::EROFS,
            VolumeError::Shrinks { .. } | VolumeError::HasSnapshots { .. } | VolumeError::NotOurs { .. } => libc::EPERM,
            VolumeError::NotAVolume { .. } => libc::EIO,
            VolumeError::Interrupted => libc::EINTR,
            VolumeError::Vault(error) => lamassu_vault::errno_of(error),
        }
    }
}
