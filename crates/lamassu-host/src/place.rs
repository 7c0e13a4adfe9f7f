//! A directory of a vault, held open: a link that is put on the way later redirects nothing.

use crate::{Error, Result};
use rustix::fs::{Mode, OFlags};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A directory of a vault, held open. A store can put a link on the way to it at any time. So files in it are reached
/// through the descriptor, which no link redirects, and never by the directory's name.
pub struct Place {
    at: OwnedFd,
    dir: PathBuf,
}

impl AsFd for Place {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.at.as_fd()
    }
}

impl Place {
    /// The vault that a person named: links on the way to it are theirs, and followed.
    ///
    /// # Errors
    /// [`Error::Backing`].
    pub fn of(dir: &Path) -> Result<Place> {
        let opened = search(rustix::fs::CWD, dir.as_os_str(), OFlags::empty());
        Place::opened(opened, dir.into())
    }

    /// A directory in it, by its path in the store.
    ///
    /// # Errors
    /// [`Error::Backing`], as for a link on the way.
    pub fn below(&self, stored: &Path) -> Result<Place> {
        Place::opened(directory_below(self.at.as_fd(), stored), self.dir.join(stored))
    }

    /// The same directory, once more.
    ///
    /// # Errors
    /// [`Error::Backing`]: no descriptor is left.
    pub fn again(&self) -> Result<Place> {
        Place::opened(self.at.try_clone(), self.dir.clone())
    }

    fn opened(opened: io::Result<OwnedFd>, dir: PathBuf) -> Result<Place> {
        match opened {
            Ok(at) => Ok(Place { at, dir }),
            Err(source) => Err(Error::Backing { op: "open", path: dir, source }),
        }
    }

    /// The directory as a person knows it: to be shown, not to be opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The path of a file in it, through the descriptor: good for as long as this is kept.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// The same of the directory itself.
    pub fn path(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.at.as_raw_fd().to_string())
    }
}

/// Opens a directory below another one, name by name: the whole path may be longer than the system takes. Follows no
/// link.
fn directory_below(at: BorrowedFd<'_>, stored: &Path) -> io::Result<OwnedFd> {
    let mut at = search(at, OsStr::new("."), OFlags::NOFOLLOW)?;
    for component in stored {
        at = search(at.as_fd(), component, OFlags::NOFOLLOW)?;
    }
    Ok(at)
}

fn search(at: BorrowedFd<'_>, name: &OsStr, more: OFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | more;
    Ok(rustix::fs::openat(at, name, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_left_by_no_link() {
        let (store, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let inner = store.path().join("a/inner");
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::create_dir(outside.path().join("inner")).unwrap();
        let of = |stored: &str| Place::of(store.path()).and_then(|place| place.below(Path::new(stored)));
        let place = of("a/inner").unwrap();
        assert_eq!(place.dir(), inner);
        std::fs::rename(store.path().join("a"), store.path().join("moved")).unwrap();
        std::os::unix::fs::symlink(outside.path(), store.path().join("a")).unwrap();
        std::fs::write(place.file("f"), b"content").unwrap();
        assert_eq!(std::fs::read(store.path().join("moved/inner/f")).unwrap(), b"content");
        for stored in ["a", "a/inner"] {
            let refused = of(stored).map(drop).unwrap_err().to_string();
            assert!(refused.contains(&store.path().join(stored).display().to_string()), "{refused}");
        }
        assert_eq!(std::fs::read_dir(outside.path().join("inner")).unwrap().count(), 0);
    }
}
