//! What this process has just made in a directory whose owner may rename what is in it at any time. No call that makes
//! a directory, a link or a node returns it: it is opened afterwards, and nothing is done to what is not like it.

use lamassu_crypto::NoRandom;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{CStr, OsString};
use std::os::fd::BorrowedFd;

/// Whether what was found in, or as, this directory has the owner that this process gives to what it makes there.
/// Usually that is the user it runs as; NFS gives root's to the user `nobody`, and others know no owners.
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

/// Whether nothing is in a directory.
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

/// A name that nothing has. It is short: one made of the target's could be too long for the store.
pub fn temporary_name() -> Result<OsString, NoRandom> {
    let mut number = [0; 4];
    lamassu_crypto::random(&mut number)?;
    Ok(format!(".lamassu-cp-{:08x}", u32::from_le_bytes(number)).into())
}
