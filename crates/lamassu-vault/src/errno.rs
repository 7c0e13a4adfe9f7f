//! The one table from the vault's errors to errno values, for front-ends that answer with those.

use crate::VaultError;
use lamassu_store::StoreError;

/// The errno of an error. Exhaustive on purpose: a new kind of error must choose its errno here.
pub fn errno_of(error: &VaultError) -> i32 {
    match error {
        VaultError::NotFound => libc::ENOENT,
        VaultError::Exists => libc::EEXIST,
        VaultError::NotDirectory => libc::ENOTDIR,
        VaultError::IsDirectory => libc::EISDIR,
        VaultError::NotEmpty => libc::ENOTEMPTY,
        VaultError::NameTooLong => libc::ENAMETOOLONG,
        VaultError::InvalidName | VaultError::Invalid => libc::EINVAL,
        VaultError::ReadOnly => libc::EROFS,
        VaultError::BadHandle => libc::EBADF,
        VaultError::Stale => libc::ESTALE,
        VaultError::NoAttribute => libc::ENODATA,
        VaultError::NoData => libc::ENXIO,
        VaultError::Unsupported => libc::EOPNOTSUPP,
        VaultError::Locked | VaultError::DatasetRoot | VaultError::Frozen => libc::EBUSY,
        VaultError::FreezeLost => libc::EOWNERDEAD,
        VaultError::KeyNotLoaded => libc::ENOKEY,
        VaultError::OtherDataset => libc::EXDEV,
        VaultError::Damaged { what: _, stored: _ } | VaultError::Outdated { what: _, stored: _ } => libc::EIO,
        VaultError::Anchor(error) | VaultError::Store(StoreError::Anchor(error)) => match error.is_of_policy() {
            true => libc::EPERM,
            false => of_cause(error),
        },
        VaultError::Refused(_) => libc::EPERM,
        VaultError::Store(StoreError::Damaged(_)) => libc::EIO,
        VaultError::Store(StoreError::Io { op: _, offset: _, source }) => raw(source),
        VaultError::Store(StoreError::ReadOnly) => libc::EROFS,
        VaultError::Store(StoreError::NotApproved(_)) => libc::EPERM,
        VaultError::Store(StoreError::TooLarge) => libc::EFBIG,
        VaultError::Store(StoreError::NoRandom(_) | StoreError::NotEvaluated(_)) => libc::EIO,
        VaultError::Io { op: _, source } => raw(source),
        VaultError::NoRandom(_) => libc::EIO,
    }
}

/// The errno of the system's error in an error, if there is one: a full disk of the anchor is a full disk.
fn of_cause(error: &(dyn std::error::Error + 'static)) -> i32 {
    let mut causes = std::iter::successors(Some(error), |cause| cause.source());
    causes.find_map(|cause| cause.downcast_ref()).map_or(libc::EIO, raw)
}

/// The store's own errno, except for three. After `ENOSYS` the kernel would never ask again; `EINTR` and `EAGAIN` would
/// make the caller retry. An error without an errno has that of its cause.
fn raw(error: &std::io::Error) -> i32 {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => libc::EOPNOTSUPP,
        Some(libc::EINTR | libc::EAGAIN) => libc::EIO,
        Some(errno) => errno,
        None => error.get_ref().map_or(libc::EIO, |inner| of_cause(inner)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_format::{BlockNo, PageNo};
    use lamassu_store::file::{Damage, DamageKind};

    fn io(errno: i32) -> VaultError {
        VaultError::Io { op: "test", source: std::io::Error::from_raw_os_error(errno) }
    }

    #[test]
    fn the_store_s_errno_is_kept_unless_the_kernel_would_misread_it() {
        assert_eq!(errno_of(&io(libc::ENOSPC)), libc::ENOSPC);
        assert_eq!(errno_of(&io(libc::EDQUOT)), libc::EDQUOT);
        assert_eq!(errno_of(&io(libc::ENOSYS)), libc::EOPNOTSUPP);
        assert_eq!(errno_of(&io(libc::EINTR)), libc::EIO);
        let no_errno = VaultError::Io { op: "test", source: std::io::Error::other("x") };
        assert_eq!(errno_of(&no_errno), libc::EIO);
        let deep = std::io::Error::other(std::io::Error::other(io(libc::ENOSPC)));
        assert_eq!(errno_of(&VaultError::Io { op: "test", source: deep }), libc::ENOSPC);
    }

    #[test]
    fn damage_is_an_input_output_error() {
        let damage =
            Damage { kind: DamageKind::BlockHash, segment: 0, page: PageNo(0), pages: 1, block: Some(BlockNo(1)) };
        assert_eq!(errno_of(&VaultError::Store(StoreError::Damaged(damage))), libc::EIO);
        assert_eq!(errno_of(&VaultError::Damaged { what: "name", stored: String::new() }), libc::EIO);
    }

    #[test]
    fn refusals_have_the_errno_users_know() {
        assert_eq!(errno_of(&VaultError::ReadOnly), libc::EROFS);
        assert_eq!((errno_of(&VaultError::Locked), errno_of(&VaultError::Frozen)), (libc::EBUSY, libc::EBUSY));
        assert_eq!(errno_of(&VaultError::KeyNotLoaded), libc::ENOKEY);
        assert_eq!(
            (errno_of(&VaultError::OtherDataset), errno_of(&VaultError::DatasetRoot)),
            (libc::EXDEV, libc::EBUSY)
        );
        assert_eq!(errno_of(&VaultError::NoData), libc::ENXIO);
        assert_eq!(errno_of(&VaultError::NoAttribute), libc::ENODATA);
    }
}
