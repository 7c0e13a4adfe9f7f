//! Extended attributes of an entry or an open file, never through a symbolic link.
//!
//! Linux before 6.13 has no `*at` calls for them; `/proc/self/fd/N/name` names an entry of an open directory instead,
//! and the `l*` calls do not follow its last component.

use super::mode::proc_path;
use rustix::fd::BorrowedFd;
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;

/// Whose attributes.
pub(super) enum Target<'a> {
    /// An open file.
    Open(BorrowedFd<'a>),
    /// A path that is followed to its end: the magic link of an open directory.
    Followed(OsString),
    /// A path whose last component is not followed.
    Entry(OsString),
}

impl<'a> Target<'a> {
    /// An entry of a directory, or the directory itself.
    pub(super) fn in_dir(dir: BorrowedFd<'a>, name: Option<&OsStr>) -> Target<'a> {
        let mut path = OsString::from(proc_path(dir));
        match name {
            None => Target::Followed(path),
            Some(name) => {
                path.push("/");
                path.push(name);
                Target::Entry(path)
            }
        }
    }

    pub(super) fn get(&self, attr: &OsStr) -> io::Result<Vec<u8>> {
        read_growing(|buf| match self {
            Target::Open(fd) => rustix::fs::fgetxattr(fd, attr, buf),
            Target::Followed(path) => rustix::fs::getxattr(path, attr, buf),
            Target::Entry(path) => rustix::fs::lgetxattr(path, attr, buf),
        })
    }

    pub(super) fn set(&self, attr: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        let flags = u32::try_from(flags).ok().and_then(XattrFlags::from_bits).ok_or(Errno::INVAL)?;
        match self {
            Target::Open(fd) => rustix::fs::fsetxattr(fd, attr, value, flags)?,
            Target::Followed(path) => rustix::fs::setxattr(path, attr, value, flags)?,
            Target::Entry(path) => rustix::fs::lsetxattr(path, attr, value, flags)?,
        }
        Ok(())
    }

    pub(super) fn list(&self) -> io::Result<Vec<OsString>> {
        let names = read_growing(|buf| match self {
            Target::Open(fd) => rustix::fs::flistxattr(fd, buf),
            Target::Followed(path) => rustix::fs::listxattr(path, buf),
            Target::Entry(path) => rustix::fs::llistxattr(path, buf),
        })?;
        Ok(names.split(|&b| b == 0).filter(|n| !n.is_empty()).map(|n| OsStr::from_bytes(n).to_owned()).collect())
    }

    pub(super) fn remove(&self, attr: &OsStr) -> io::Result<()> {
        match self {
            Target::Open(fd) => rustix::fs::fremovexattr(fd, attr)?,
            Target::Followed(path) => rustix::fs::removexattr(path, attr)?,
            Target::Entry(path) => rustix::fs::lremovexattr(path, attr)?,
        }
        Ok(())
    }
}

/// Attributes and lists of them end at 64 KiB in Linux (XATTR_SIZE_MAX, XATTR_LIST_MAX); file systems may one day
/// allow more.
const ATTR_BYTES_MAX: usize = 16 << 20;

fn read_growing(mut read: impl FnMut(&mut [u8]) -> rustix::io::Result<usize>) -> io::Result<Vec<u8>> {
    let mut buf = vec![0; 1024];
    loop {
        match read(&mut buf) {
            Ok(len) => {
                buf.truncate(len);
                return Ok(buf);
            }
            Err(Errno::RANGE) if buf.len() < ATTR_BYTES_MAX => buf = vec![0; buf.len() * 8],
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}
