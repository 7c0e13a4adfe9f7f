//! From errors of the store to errors of the vault. The errno is kept wherever no variant says the same.

use crate::VaultError;
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_store::StoreError;
use std::io;

/// Turns an [`io::Error`] of operation `op` into a [`VaultError`].
pub(crate) fn io(op: &'static str) -> impl Fn(io::Error) -> VaultError {
    move |source| match source.raw_os_error() {
        Some(libc::ENOENT) => VaultError::NotFound,
        Some(libc::EEXIST) => VaultError::Exists,
        Some(libc::ENOTDIR) => VaultError::NotDirectory,
        Some(libc::EISDIR) => VaultError::IsDirectory,
        Some(libc::ENOTEMPTY) => VaultError::NotEmpty,
        Some(libc::ENAMETOOLONG) => VaultError::NameTooLong,
        Some(libc::EINVAL) => VaultError::Invalid,
        Some(libc::EROFS) => VaultError::ReadOnly,
        Some(libc::EOPNOTSUPP) => VaultError::Unsupported,
        Some(libc::ENODATA) => VaultError::NoAttribute,
        Some(libc::ESTALE) => VaultError::Stale,
        _ => VaultError::Io { op, source },
    }
}

/// An error with an errno of our own choosing.
pub(crate) fn errno(op: &'static str, code: i32) -> VaultError {
    io(op)(io::Error::from_raw_os_error(code))
}

/// The error of a call that needs a place of a move of which nobody knows whether it was made.
pub(crate) fn no_outcome() -> VaultError {
    errno("use a name while it is not known whether a rename was made", libc::EIO)
}

/// Whether the store said that it cannot do this at all, in any of the ways stores do.
pub(crate) fn is_unsupported(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::EPERM))
        || e.kind() == io::ErrorKind::Unsupported
}

/// Whether nothing is there by that name.
pub(crate) fn is_not_found(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::NotFound
}

impl VaultError {
    /// Whether it is this error of the system.
    pub(crate) fn is_errno(&self, errno: i32) -> bool {
        matches!(self, VaultError::Io { source, .. } if source.raw_os_error() == Some(errno))
    }

    /// Whether a rule of the policy of the anchor's server forbids it.
    pub fn is_of_policy(&self) -> bool {
        matches!(self, VaultError::Anchor(e) | VaultError::Store(StoreError::Anchor(e)) if e.is_of_policy())
    }

    /// Whether the session at the anchor's server has ended, or the server does not answer: nothing is known of the
    /// object that was asked about.
    pub fn is_of_session(&self) -> bool {
        let of_io = |error: &'_ io::Error| -> bool {
            error.get_ref().and_then(|inner| inner.downcast_ref::<AnchorError>()).is_some_and(is_of_session)
        };
        match self {
            VaultError::Anchor(error) | VaultError::Store(StoreError::Anchor(error)) => is_of_session(error),
            VaultError::Io { source, .. } | VaultError::Store(StoreError::Io { source, .. }) => of_io(source),
            _ => false,
        }
    }
}

fn is_of_session(error: &AnchorError) -> bool {
    matches!(error, AnchorError::Server { fault: ServerFault::Unreachable { .. } | ServerFault::Ended, .. })
}
