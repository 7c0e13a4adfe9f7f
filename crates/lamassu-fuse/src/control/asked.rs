//! The directory that calls are about. It is opened once and held open, and its mount is found in the mount table by
//! the open directory.
//!
//! Guarantees: it lies in a FUSE mount that root or the user of this process has mounted, and every call goes there,
//! even if its name leads elsewhere later. The owner of a directory on the way could exchange it for a link to a mount
//! of their own, which could answer anything and learn what it is sent.
//!
//! Never: asks the file system anything before that is known.

use super::{ControlError, OPEN, Root};
use lamassu_store::mount_table::{MountLine, mount_id, mounts};
use rustix::fs::{CWD, Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Whether a path may lead elsewhere than it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// It may: that does no harm.
    Followed,
    /// No link may be its last component, or lie anywhere in the mount. Links on the way to the mount are those of root
    /// or of the user.
    Refused,
}

/// An open directory in a FUSE mount, to which control calls go.
#[derive(Debug)]
pub struct Asked {
    /// by `O_PATH`
    dir: OwnedFd,
    path: PathBuf,
    mount: MountLine,
}

impl Asked {
    /// Opens a directory.
    ///
    /// # Errors
    /// [`ControlError::NotMounted`] if there is no FUSE mount, [`ControlError::Strangers`],
    /// [`ControlError::LeadsAway`], [`ControlError::Io`].
    pub fn open(path: &Path, links: Links) -> Result<Asked, ControlError> {
        // With a slash at the end the kernel would follow a link nevertheless.
        let given: PathBuf = path.components().collect();
        let dir = match (open(&given, links), links) {
            (Ok(dir), _) => dir,
            (Err(error), Links::Refused) => return Err(led_away(&given).unwrap_or(error)),
            (Err(error), Links::Followed) => return Err(error),
        };
        let (path, mount) = place_of(&dir)?;
        let mount = mount.filter(|m| m.fs_type.starts_with("fuse."));
        let mount = mount.ok_or_else(|| ControlError::NotMounted(given.clone()))?;
        if !mount.is_trusted() {
            return Err(ControlError::Strangers(given));
        }
        let asked = Asked { dir, path, mount };
        match links {
            Links::Refused if !asked.is_what(&given) => {
                Err(ControlError::LeadsAway { path: given, target: asked.path })
            }
            Links::Refused | Links::Followed => Ok(asked),
        }
    }

    /// Its path when it was opened, without links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory that its mount is on.
    pub fn mountpoint(&self) -> &Path {
        &self.mount.mountpoint
    }

    /// The number of its mount.
    pub fn mount(&self) -> u64 {
        self.mount.id
    }

    /// The type of its mount, `fuse.` first.
    pub fn fs_type(&self) -> &str {
        &self.mount.fs_type
    }

    /// The directory itself, opened for calls: its name may lead to another one by now.
    ///
    /// # Errors
    /// [`ControlError::Io`].
    pub fn root(&self) -> Result<Root, ControlError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&self.dir, c".", flags, Mode::empty());
        let dir = opened.map_err(|e| ControlError::Io { op: OPEN, source: e.into() })?;
        Ok(Root { dir: dir.into(), path: self.path.clone() })
    }

    /// Whether a path names this directory: from the mount's root on it has the same names, and its beginning leads to
    /// that root.
    fn is_what(&self, given: &Path) -> bool {
        let below = self.path.strip_prefix(&self.mount.mountpoint).unwrap_or(&self.path);
        let Ok(absolute) = std::path::absolute(given) else { return false };
        let Some(root) = absolute.ends_with(below).then(|| absolute.ancestors().nth(below.components().count())) else {
            return false;
        };
        let place = root.and_then(|root| place_of(&open(root, Links::Followed).ok()?).ok());
        place.is_some_and(|(path, mount)| {
            path == self.mount.mountpoint && mount.is_some_and(|mount| mount.id == self.mount.id)
        })
    }
}

fn open(path: &Path, links: Links) -> Result<OwnedFd, ControlError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let follow = if links == Links::Refused { OFlags::NOFOLLOW } else { OFlags::empty() };
    rustix::fs::openat(CWD, path, flags | follow, Mode::empty())
        .map_err(|e| ControlError::Io { op: OPEN, source: e.into() })
}

/// Where a link leads; `None` if there is none.
fn led_away(path: &Path) -> Option<ControlError> {
    let link = path.read_link().ok()?;
    Some(ControlError::LeadsAway { path: path.into(), target: path.canonicalize().unwrap_or(link) })
}

/// The path of the open directory, and the mount that it lies in, if this process sees that.
fn place_of(dir: &OwnedFd) -> Result<(PathBuf, Option<MountLine>), ControlError> {
    let number = dir.as_raw_fd();
    let read = || -> io::Result<(PathBuf, Option<MountLine>)> {
        let path = std::fs::read_link(format!("/proc/self/fd/{number}"))?;
        let id = mount_id(dir)?;
        Ok((path, mounts().into_iter().find(|mount| Some(mount.id) == id)))
    };
    read().map_err(|source| ControlError::Io { op: "look up a mount in /proc", source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_no_mount_of_fuse_is_not_asked() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(Asked::open(dir.path(), Links::Refused), Err(ControlError::NotMounted(_))));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        for given in [link.clone(), link.join("")] {
            let refused = Asked::open(&given, Links::Refused);
            assert!(matches!(refused, Err(ControlError::LeadsAway { .. })), "{refused:?}");
        }
    }
}
