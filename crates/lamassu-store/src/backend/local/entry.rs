//! An entry of a directory that is held by an `O_PATH` descriptor: neither opened, which could have effects of its own,
//! nor named.

use super::dir::local;
use super::mode::{self, proc_path};
use super::xattr::Target;
use super::{owner, stat_fd, stat_of, timestamps};
use crate::backend::{BackendDir, BackendEntry, BackendNode, Kind, SetTime, Stat, check_name};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, CWD};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io;

pub(super) struct LocalEntry {
    pub(super) fd: OwnedFd,
    /// The store may show two names of one file as two files.
    pub(super) is_remote: bool,
}

impl LocalEntry {
    /// The magic link of the descriptor leads to the held entry itself, even if that is a symbolic link.
    fn target(&self) -> Target<'_> {
        Target::followed(self.fd.as_fd())
    }
}

impl BackendNode for LocalEntry {
    fn stat(&self) -> io::Result<Stat> {
        stat_of(&mode::steady(|| stat_fd(self.fd.as_fd()))?)
    }

    fn set_times(&self, atime: SetTime, mtime: SetTime) -> io::Result<()> {
        Ok(rustix::fs::utimensat(&self.fd, "", &timestamps(atime, mtime)?, AtFlags::EMPTY_PATH)?)
    }

    fn set_mode(&self, mode: u32) -> io::Result<()> {
        // Whether a link's mode can be set depends on the file system.
        if self.stat()?.kind == Kind::Symlink {
            return Err(Errno::OPNOTSUPP.into());
        }
        mode::chmod_fd(self.fd.as_fd(), mode & 0o7777)
    }

    fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        let (uid, gid) = owner(uid, gid);
        Ok(rustix::fs::chownat(&self.fd, "", uid, gid, AtFlags::EMPTY_PATH)?)
    }

    fn get_xattr(&self, attr: &OsStr) -> io::Result<Vec<u8>> {
        self.target().get(attr)
    }

    fn set_xattr(&self, attr: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        self.target().set(attr, value, flags)
    }

    fn list_xattr(&self) -> io::Result<Vec<OsString>> {
        self.target().list()
    }

    fn remove_xattr(&self, attr: &OsStr) -> io::Result<()> {
        self.target().remove(attr)
    }
}

impl BackendEntry for LocalEntry {
    fn link(&self, to: &dyn BackendDir, to_name: &OsStr) -> io::Result<()> {
        let (to, to_name) = (local(to)?.fd(), check_name(to_name)?);
        // Through /proc: AT_EMPTY_PATH takes a capability.
        rustix::fs::linkat(CWD, proc_path(self.fd.as_fd()), to, to_name, AtFlags::SYMLINK_FOLLOW)?;
        // A store that gives two names of one file two numbers (sshfs) would have the file opened twice, and the two
        // would destroy each other's pages.
        if self.is_remote {
            let old = rustix::fs::fstat(&self.fd).map(|s| (s.st_dev, s.st_ino));
            let new = rustix::fs::statat(to, to_name, AtFlags::SYMLINK_NOFOLLOW).map(|s| (s.st_dev, s.st_ino));
            if old.is_err() || old != new {
                rustix::fs::unlinkat(to, to_name, AtFlags::empty())?;
                return Err(Errno::PERM.into());
            }
        }
        Ok(())
    }
}
