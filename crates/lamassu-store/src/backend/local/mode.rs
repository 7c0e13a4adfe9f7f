//! Permission bits of entries without following links, and opening files and looking into directories whose owner has
//! taken the permission from himself.
//!
//! Lamassu keeps an application's mode on the backing file. A daemon that is not root then meets files of its own
//! user that it may not read or write, yet an application may hold them open (a file created with mode 0400, say).
//! Such a file gets the missing bits for the moment of one open(2), and a directory for that of one call that goes into
//! it. All of it works on a descriptor (an `O_PATH` one of a file), so the bits go to the very file that was looked at,
//! whatever happens to its name meanwhile.

use super::{retry, stat_of};
use crate::backend::{Kind, Stat};
use parking_lot::RwLock;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{CStr, OsStr};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Written while a mode is lent; read by whoever sets a mode, so that giving a lent mode back never undoes a chmod.
static LENDING: RwLock<()> = RwLock::new(());
/// Odd while a mode is lent. A reader that sees it change may have seen the lent bits.
static LENT: AtomicU64 = AtomicU64::new(0);

/// What a directory is lent.
const OWNER_BITS: u32 = 0o700;

pub(super) fn proc_path(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Runs a stat so that lent permission bits never show.
pub(super) fn steady(
    mut stat: impl FnMut() -> rustix::io::Result<rustix::fs::Stat>,
) -> rustix::io::Result<rustix::fs::Stat> {
    let before = LENT.load(Ordering::Acquire);
    let found = stat()?;
    if before.is_multiple_of(2) && LENT.load(Ordering::Acquire) == before {
        return Ok(found);
    }
    let _wait = LENDING.read();
    stat()
}

/// chmod of what a descriptor (also an `O_PATH` one) refers to.
pub(super) fn chmod_fd(fd: BorrowedFd<'_>, mode: u32) -> io::Result<()> {
    let _no_lending = LENDING.read();
    Ok(chmod_fd_unlocked(fd, mode)?)
}

fn chmod_fd_unlocked(fd: BorrowedFd<'_>, mode: u32) -> rustix::io::Result<()> {
    match rustix::fs::fchmod(fd, Mode::from_raw_mode(mode)) {
        Err(Errno::BADF) => {}
        other => return other,
    }
    match fchmodat2(fd, c"", mode, AtFlags::EMPTY_PATH) {
        Err(Errno::NOSYS | Errno::PERM) => chmod_through_proc(fd, mode),
        other => other,
    }
}

fn chmod_through_proc(fd: BorrowedFd<'_>, mode: u32) -> rustix::io::Result<()> {
    rustix::fs::chmod(proc_path(fd), Mode::from_raw_mode(mode))
}

pub(super) fn open_path(dir: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(retry(|| rustix::fs::openat(dir, name, flags, Mode::empty()))?)
}

/// Opens a regular file of ours that refused us with `EACCES`, lending it the owner bits it lacks. `EACCES` again if
/// it is not ours.
pub(super) fn open_lending(dir: BorrowedFd<'_>, name: &OsStr, flags: OFlags, needed: u32) -> io::Result<OwnedFd> {
    let entry = open_path(dir, name)?;
    let _alone = LENDING.write();
    let stat = stat_of(&rustix::fs::fstat(&entry)?)?;
    if stat.kind != Kind::File || stat.uid != rustix::process::geteuid().as_raw() {
        return Err(Errno::ACCESS.into());
    }
    if stat.mode & needed == needed {
        // Another mode by now: someone's chmod came first.
        return Ok(open_same(entry.as_fd(), flags)?);
    }
    Ok(lend(entry.as_fd(), &stat, needed, || open_same(entry.as_fd(), flags))?)
}

/// Runs a call that goes into a directory of ours which refused us with `EACCES`, lending it the owner bits it lacks.
/// `EACCES` again if it is not ours. The call takes none of the locks here: no [`steady`], no other lending.
pub(super) fn lend_dir<T>(dir: BorrowedFd<'_>, call: impl FnOnce() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    let _alone = LENDING.write();
    let stat = stat_of(&rustix::fs::fstat(dir)?).map_err(|_| Errno::IO)?;
    if stat.uid != rustix::process::geteuid().as_raw() {
        return Err(Errno::ACCESS);
    }
    // Otherwise it has another mode by now.
    if stat.mode & OWNER_BITS == OWNER_BITS { call() } else { lend(dir, &stat, OWNER_BITS, call) }
}

/// The caller holds [`LENDING`].
fn lend<T>(
    fd: BorrowedFd<'_>,
    stat: &Stat,
    needed: u32,
    call: impl FnOnce() -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    LENT.fetch_add(1, Ordering::AcqRel);
    let done = chmod_fd_unlocked(fd, stat.mode | needed).and_then(|()| {
        let called = call();
        chmod_fd_unlocked(fd, stat.mode).and(called)
    });
    LENT.fetch_add(1, Ordering::AcqRel);
    done
}

fn open_same(entry: BorrowedFd<'_>, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    // NOFOLLOW would refuse the magic link itself; what it leads to is the inode held in `entry`.
    retry(|| rustix::fs::open(proc_path(entry), flags - OFlags::NOFOLLOW, Mode::empty()))
}

/// fchmodat2(2), Linux 6.6, which rustix does not offer.
fn fchmodat2(dir: BorrowedFd<'_>, name: &CStr, mode: u32, flags: AtFlags) -> rustix::io::Result<()> {
    // SAFETY: the name is a NUL-terminated string and the descriptor is open, both for the duration of the call; the
    // kernel writes to neither.
    let rc = unsafe { libc::syscall(libc::SYS_fchmodat2, dir.as_raw_fd(), name.as_ptr(), mode, flags.bits()) };
    if rc == 0 { Ok(()) } else { Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)) }
}
