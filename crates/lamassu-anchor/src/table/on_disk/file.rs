//! The file itself: opened once, by descriptor, and used only if it is a private regular file of this user.

use crate::AnchorError;
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Permissions of the file.
pub const FILE_MODE: u32 = 0o600;

/// Makes a new file.
pub(super) fn new(path: &Path) -> Result<File, AnchorError> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(FILE_MODE)).map_err(|errno| match errno {
        rustix::io::Errno::EXIST => AnchorError::Exists { path: path.to_owned() },
        errno => AnchorError::io("create", path)(errno.into()),
    })?;
    Ok(file.into())
}

/// Opens an existing file of any type. Does not block, and follows no link.
pub(super) fn existing(path: &Path, access: OFlags) -> Result<File, AnchorError> {
    let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
        rustix::io::Errno::NOENT => AnchorError::Missing { path: path.to_owned() },
        // A symbolic link, a directory, a fifo without a reader.
        rustix::io::Errno::LOOP | rustix::io::Errno::ISDIR | rustix::io::Errno::NXIO => not_private(path),
        errno => AnchorError::io("open", path)(errno.into()),
    })?;
    Ok(file.into())
}

/// Returns the file if it is a private regular file of this user.
pub(super) fn private(file: File, path: &Path) -> Result<File, AnchorError> {
    let st = file.metadata().map_err(AnchorError::io("stat", path))?;
    let is_ours = st.uid() == rustix::process::geteuid().as_raw();
    match st.is_file() && is_ours && st.mode() & 0o077 == 0 && st.nlink() == 1 {
        true => Ok(file),
        false => Err(not_private(path)),
    }
}

fn not_private(path: &Path) -> AnchorError {
    AnchorError::NotPrivate { path: path.to_owned() }
}

pub(super) fn sync_parent(path: &Path) -> Result<(), AnchorError> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.map_or_else(|| PathBuf::from("."), Path::to_owned);
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(AnchorError::io("sync the directory of", path))
}
