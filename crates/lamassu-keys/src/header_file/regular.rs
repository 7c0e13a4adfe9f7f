//! Opens files of which only the name is known. The type is looked at first: opening a device can have effects, and
//! opening a fifo can block.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// How often a file is opened that is replaced meanwhile.
const TRIES_MAX: u32 = 8;

/// What a symbolic link at the path means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// The user's: it is followed.
    Followed,
    /// The store's: it is no regular file.
    Refused,
}

/// Opens the regular file at a path, which is there. `None`: something else is there, and was not opened.
///
/// # Errors
/// Those of the system.
pub fn find(path: &Path, links: Links, access: &OpenOptions) -> io::Result<Option<File>> {
    let mut flags = OFlags::PATH | OFlags::CLOEXEC;
    flags.set(OFlags::NOFOLLOW, links == Links::Refused);
    let mut tried = 0;
    loop {
        tried += 1;
        let held = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        if !held.metadata()?.is_file() {
            return Ok(None);
        }
        let again = format!("/proc/self/fd/{}", held.as_raw_fd());
        match access.clone().custom_flags(OFlags::NONBLOCK.bits() as i32).open(again) {
            // A store of several hosts: the name led to a file that another one has replaced.
            Err(e) if e.raw_os_error() == Some(Errno::STALE.raw_os_error()) && tried < TRIES_MAX => {}
            // Of /proc, not of the file.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(io::Error::other("/proc is not mounted")),
            opened => return opened.map(Some),
        }
    }
}

/// Opens it for reading, where something else is an error: `EINVAL`. Follows no link.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    find(path, Links::Refused, OpenOptions::new().read(true))?.ok_or_else(|| Errno::INVAL.into())
}

/// Whether a path still leads to a file that was opened there.
pub(crate) fn is_at(path: &Path, links: Links, file: &File) -> io::Result<bool> {
    let there = match links {
        Links::Followed => path.metadata(),
        Links::Refused => path.symlink_metadata(),
    };
    let file = file.metadata()?;
    match there {
        Ok(there) => Ok((there.dev(), there.ino()) == (file.dev(), file.ino())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header_file::{FileError, read_bytes};
    use crate::{Update, nobody};
    use lamassu_format::header::{HistoryHead, HistoryMark};
    use lamassu_format::name;
    use rustix::fs::inotify::{CreateFlags, Reader, WatchFlags, add_watch, init};
    use std::mem::MaybeUninit;

    #[test]
    fn a_link_is_followed_where_it_is_the_users() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("zone"), b"content").unwrap();
        for name in ["link", name::HEADER, name::HEADER_REPLACED] {
            std::os::unix::fs::symlink(path("zone"), path(name)).unwrap();
        }
        assert_eq!(read_bytes(&path("link")).unwrap(), b"content");
        for name in [name::HEADER, name::HEADER_REPLACED] {
            assert!(matches!(read_bytes(&path(name)), Err(FileError::NotAFile { .. })), "{name}");
        }
    }

    /// Whoever can write to the store makes a fifo where a file is expected, or a link to one.
    #[test]
    fn what_is_no_file_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let fifo = path("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, Mode::RUSR | Mode::WUSR).unwrap();
        let watch = init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
        add_watch(&watch, &fifo, WatchFlags::OPEN).unwrap();
        let is_opened = || {
            let mut buffer = [MaybeUninit::uninit(); 4096];
            Reader::new(&watch, &mut buffer).next().is_ok()
        };
        for name in [name::HEADER, name::HEADER_NEW, name::HEADER_REPLACED, name::HISTORY, "copy"] {
            std::fs::hard_link(&fifo, path(name)).unwrap();
        }
        for name in [name::HEADER, name::HEADER_REPLACED, "copy"] {
            assert!(matches!(read_bytes(&path(name)), Err(FileError::NotAFile { .. })), "{name}");
        }
        assert!(matches!(Update::begin(&path(name::HEADER), &nobody()), Err(FileError::Write { .. })));
        crate::header_file::erase::replaced(&path("copy")).unwrap();
        assert!(!path("copy").exists());
        let mark = HistoryMark { count: 1, head: HistoryHead([7; 32]) };
        assert!(!crate::history::reaches(dir.path(), mark).unwrap());
        assert!(!is_opened());
        // The watch sees what it is to see.
        drop(File::options().read(true).write(true).open(&fifo).unwrap());
        assert!(is_opened());
    }
}
