//! Checks objects that this process has just made in a directory whose owner may rename its entries at any time. No
//! call that makes a directory, a link or a node returns it. So it is opened afterwards, and used only if it looks like
//! what was made.

use lamassu_crypto::NoRandom;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{CStr, OsString};
use std::os::fd::BorrowedFd;

/// Whether an object in this directory, or the directory itself, has the owner that this process's new files get there.
/// Usually that is the user of the process; NFS maps root to the user `nobody`, and some stores have no owners.
pub fn is_ours(dir: BorrowedFd<'_>, uid: u32) -> rustix::io::Result<bool> {
    if uid == rustix::process::geteuid().as_raw() {
        return Ok(true);
    }
    let name = temporary_name().map_err(|_| Errno::IO)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, &name, flags, Mode::RUSR | Mode::WUSR)?;
    let st = rustix::fs::fstat(&file);
    rustix::fs::unlinkat(dir, &name, AtFlags::empty())?;
    Ok(st?.st_uid == uid)
}

/// Whether a directory is empty.
pub fn is_empty(dir: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let listed = rustix::fs::openat(dir, ".", flags, Mode::empty())?;
    let is_dots = |name: &CStr| name == c"." || name == c"..";
    for entry in rustix::fs::Dir::read_from(listed)? {
        if !is_dots(entry?.file_name()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// An unused name. It is short: one derived from the target's could be too long for the store.
pub fn temporary_name() -> Result<OsString, NoRandom> {
    let mut number = [0; 4];
    lamassu_crypto::random(&mut number)?;
    Ok(format!(".lamassu-cp-{:08x}", u32::from_le_bytes(number)).into())
}
