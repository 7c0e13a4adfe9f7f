//! A directory of a vault, held open, so that links which are put in the way later have no effect.

use crate::{Error, Result};
use rustix::fs::{Mode, OFlags};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A directory of a vault, held open. The store can put a link in its path at any time. So files in it are reached
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
    /// The vault that the user named. Links in that path are the user's, and followed.
    ///
    /// # Errors
    /// [`Error::Backing`].
    pub fn of(dir: &Path) -> Result<Place> {
        let opened = search(rustix::fs::CWD, dir.as_os_str(), OFlags::empty());
        Place::opened(opened, dir.into())
    }

    /// A directory that is open already. `dir`: for messages.
    ///
    /// # Errors
    /// [`Error::Backing`]: no descriptor is left.
    pub(crate) fn held(dir: BorrowedFd<'_>, shown: PathBuf) -> Result<Place> {
        Place::opened(dir.try_clone_to_owned(), shown)
    }

    /// A directory in it, by its path in the store.
    ///
    /// # Errors
    /// [`Error::Backing`], also for a link in the path.
    pub fn below(&self, stored: &Path) -> Result<Place> {
        Place::opened(directory_below(self.at.as_fd(), stored), self.dir.join(stored))
    }

    /// Another handle of the same directory.
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

    /// The directory's path for messages, not for opening.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where a directory below this one is now, for messages, and for processes that look there for themselves. `None`:
    /// it is not below, or was removed.
    pub(crate) fn shown(&self, below: &Place) -> Option<PathBuf> {
        let [own, below] = [self, below].map(|place| std::fs::read_link(place.path()).ok());
        let shown = self.dir.join(below?.strip_prefix(own?).ok()?);
        // The name of a directory that was removed says so.
        shown.is_dir().then_some(shown)
    }

    /// The path of a file in it, through the descriptor; valid as long as this is kept.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// The same for the directory itself.
    pub fn path(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.at.as_raw_fd().to_string())
    }
}

/// Opens a directory below another one, one name at a time: the whole path may be longer than the system accepts.
/// Follows no link.
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
