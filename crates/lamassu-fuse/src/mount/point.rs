//! A directory to mount on, held open from when it is named. Between that and mount(2) a key may be typed, and whoever
//! owns a directory above could put a link in its place. So everything is asked of what is held, and mounted on it.

use super::MountError;
use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;
use std::fs::ReadDir;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// An existing directory, held open.
#[derive(Debug)]
pub struct Mountpoint {
    path: PathBuf,
    dir: OwnedFd,
}

impl Mountpoint {
    /// The directory at a path, which may lead through links now.
    ///
    /// # Errors
    /// Those of the system: there is none; or it is the root of a mount whose daemon has ended.
    pub fn open(path: &Path) -> io::Result<Mountpoint> {
        let dir = rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let point = Mountpoint { path: PathBuf::new(), dir };
        point.is_served()?;
        Ok(Mountpoint { path: point.place()?, ..point })
    }

    /// Its absolute path without links, when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The same, when it is no longer needed.
    pub fn into_path(self) -> PathBuf {
        self.path
    }

    /// Refuses a directory that has been moved or removed since, and one that is not empty where it must be.
    pub(super) fn check(&self, may_have_entries: bool) -> Result<(), MountError> {
        let wrong = |source| MountError::Mountpoint { path: self.path.clone(), source };
        if self.place().map_err(wrong)? != self.path {
            let text = "it has been moved or removed since the command began";
            return Err(wrong(io::Error::other(text)));
        }
        self.is_served().map_err(wrong)?;
        if !may_have_entries && self.entries().map_err(wrong)?.next().is_some() {
            return Err(MountError::NotEmpty(self.path.clone()));
        }
        Ok(())
    }

    /// Fails if it is the root of a mount whose daemon has ended. Opening asks nothing of a mount, and the kernel may
    /// know the attributes of its root. It asks for the state of a file system each time.
    fn is_served(&self) -> io::Result<()> {
        match rustix::fs::fstatfs(&self.dir) {
            Err(error @ (Errno::NOTCONN | Errno::CONNABORTED)) => Err(error.into()),
            Err(_) | Ok(_) => Ok(()),
        }
    }

    fn entries(&self) -> io::Result<ReadDir> {
        std::fs::read_dir(self.held())
    }

    pub(super) fn stat(&self) -> Result<Stat, Errno> {
        rustix::fs::fstat(&self.dir)
    }

    /// A path that leads to what is held, wherever it is, and to nothing that is mounted on it.
    pub(super) fn held(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.dir.as_raw_fd()).into()
    }

    /// The directory as an open file.
    pub(super) fn dir(&self) -> &OwnedFd {
        &self.dir
    }

    /// Where it is now.
    pub(super) fn place(&self) -> io::Result<PathBuf> {
        std::fs::read_link(self.held())
    }
}
