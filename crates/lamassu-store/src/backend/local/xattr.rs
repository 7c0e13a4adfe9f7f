//! Extended attributes of an open file or directory, or of an entry that is held.
//!
//! Linux before 6.13 has no calls for `O_PATH` descriptors. The magic link `/proc/self/fd/N` leads to the held entry
//! itself.

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
    /// The magic link of a descriptor.
    Followed(String),
}

impl Target<'_> {
    /// The entry that a descriptor of any kind holds.
    pub(super) fn followed(fd: BorrowedFd<'_>) -> Target<'static> {
        Target::Followed(proc_path(fd))
    }

    pub(super) fn get(&self, attr: &OsStr) -> io::Result<Vec<u8>> {
        read_growing(|buf| match self {
            Target::Open(fd) => rustix::fs::fgetxattr(fd, attr, buf),
            Target::Followed(path) => rustix::fs::getxattr(path, attr, buf),
        })
    }

    pub(super) fn set(&self, attr: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        let flags = u32::try_from(flags).ok().and_then(XattrFlags::from_bits).ok_or(Errno::INVAL)?;
        match self {
            Target::Open(fd) => rustix::fs::fsetxattr(fd, attr, value, flags)?,
            Target::Followed(path) => rustix::fs::setxattr(path, attr, value, flags)?,
        }
        Ok(())
    }

    pub(super) fn list(&self) -> io::Result<Vec<OsString>> {
        let names = read_growing(|buf| match self {
            Target::Open(fd) => rustix::fs::flistxattr(fd, buf),
            Target::Followed(path) => rustix::fs::listxattr(path, buf),
        })?;
        Ok(names.split(|&b| b == 0).filter(|n| !n.is_empty()).map(|n| OsStr::from_bytes(n).to_owned()).collect())
    }

    pub(super) fn remove(&self, attr: &OsStr) -> io::Result<()> {
        match self {
            Target::Open(fd) => rustix::fs::fremovexattr(fd, attr)?,
            Target::Followed(path) => rustix::fs::removexattr(path, attr)?,
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
