//! Permission bits of entries, set without following links. Opening files and looking into directories whose owner has
//! removed the own permission.
//!
//! Lamassu keeps an application's mode on the backing file. A daemon that is not root then meets files of its own user
//! that it may not read or write, yet an application may hold them open (a file created with mode 0400, say). Such a
//! file is lent the missing bits for the time of one open(2), a directory for the time of one call that looks up a name
//! in it. This works on a descriptor (of a file an `O_PATH` one), so the bits go to the file that was checked, whatever
//! happens to its name meanwhile.

use super::{retry, stat_fd, stat_of};
use crate::backend::{Kind, Stat};
use parking_lot::{Mutex, RwLock};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags, Statx};
use rustix::io::Errno;
use std::ffi::CStr;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Locked exclusively while a mode is lent, and shared while a mode is set, so that restoring a lent mode never undoes
/// a chmod.
static LENDING: RwLock<()> = RwLock::new(());
/// Odd while a mode is lent. A reader that sees it change may have seen the lent bits.
static LENT: AtomicU64 = AtomicU64::new(0);

/// The bits that a directory is lent.
const OWNER_BITS: u32 = 0o700;
/// The pauses of opens that meet a lease, see [`open_held`].
static PATIENCE: Mutex<Patience> = Mutex::new(Patience { since: None, pauses: 0 });
const LEASE_PAUSE: Duration = Duration::from_millis(20);
/// How many pauses all opens of this process together may make, in which time.
const PAUSES_MAX: u32 = 10;
const PATIENCE_IN: Duration = Duration::from_secs(2);
/// So many pauses of an open do not count if the holder gives way.
const SOON: u32 = 2;

/// How long opens have waited for leases lately.
struct Patience {
    since: Option<Instant>,
    pauses: u32,
}

impl Patience {
    /// Whether an open may pause now.
    fn take(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now.duration_since(since) >= PATIENCE_IN) {
            *self = Patience { since: Some(now), pauses: 0 };
        }
        let may_pause = self.pauses < PAUSES_MAX;
        self.pauses += u32::from(may_pause);
        may_pause
    }

    /// An open has succeeded after so many pauses.
    fn give_back(&mut self, pauses: u32) {
        if pauses <= SOON {
            self.pauses = self.pauses.saturating_sub(pauses);
        }
    }
}

pub(super) fn proc_path(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Runs a stat so that lent permission bits never show.
pub(super) fn steady(mut stat: impl FnMut() -> rustix::io::Result<Statx>) -> rustix::io::Result<Statx> {
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

/// Opens a regular file, and never another kind of entry: the entry is held with `O_PATH`, its stat has shown `kind`,
/// and then that inode is opened. A device or a fifo that is put in its place is not opened, since opening it could
/// have side effects.
///
/// A file of ours that refuses us with `EACCES` is lent the owner bits that the access takes.
///
/// # Errors
/// `EISDIR`, `ELOOP`, `EINVAL` for other kinds of entries, and those of the store.
pub(super) fn open_regular(held: BorrowedFd<'_>, kind: Kind, access: OFlags) -> io::Result<OwnedFd> {
    refuse_irregular(kind)?;
    let flags = access | OFlags::CLOEXEC | OFlags::NOCTTY;
    let opened = match open_held(held, flags) {
        // Only root can leave access times of other users' files unchanged.
        Err(Errno::PERM) if flags.contains(OFlags::NOATIME) => open_held(held, flags - OFlags::NOATIME),
        opened => opened,
    };
    match opened {
        Err(Errno::ACCESS) => open_lending(held, flags),
        opened => Ok(opened?),
    }
}

/// The same without lending, for a caller that lends the directory meanwhile.
pub(super) fn open_regular_as_it_is(held: BorrowedFd<'_>, access: OFlags) -> rustix::io::Result<OwnedFd> {
    refuse_irregular(stat_of(&stat_fd(held)?).map_err(|_| Errno::IO)?.kind)?;
    open_held(held, access | OFlags::CLOEXEC | OFlags::NOCTTY)
}

fn open_lending(held: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
    let needed = if flags.contains(OFlags::RDWR) { 0o600 } else { 0o400 };
    let _alone = LENDING.write();
    let stat = stat_of(&stat_fd(held)?)?;
    if stat.uid != rustix::process::geteuid().as_raw() {
        return Err(Errno::ACCESS.into());
    }
    if stat.mode & needed == needed {
        // The mode has changed: another thread's chmod came first.
        return Ok(open_held(held, flags)?);
    }
    Ok(lend(held, &stat, needed, || open_held(held, flags))?)
}

/// `EISDIR`, `ELOOP` and `EINVAL` for what is not a regular file.
fn refuse_irregular(kind: Kind) -> rustix::io::Result<()> {
    match kind {
        Kind::File => Ok(()),
        Kind::Dir => Err(Errno::ISDIR),
        Kind::Symlink => Err(Errno::LOOP),
        Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => Err(Errno::INVAL),
    }
}

/// Runs a call in a directory that was denied with `EACCES`, and lends the directory the missing owner bits for it.
/// `EACCES` again if the directory is another user's. The call takes none of the locks here: no [`steady`], no other
/// lending.
pub(super) fn lend_dir<T>(dir: BorrowedFd<'_>, call: impl FnOnce() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    let _alone = LENDING.write();
    let stat = stat_of(&stat_fd(dir)?).map_err(|_| Errno::IO)?;
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

/// The inode that is held, opened anew.
///
/// A lease on the file (`F_SETLEASE` of fcntl(2)), which its owner may take, holds an open up for 45 seconds. So the
/// open does not wait in the kernel; it recalls the lease, is tried again a few times, and fails with `EAGAIN`. Others
/// may wait for locks meanwhile. Therefore all opens share these pauses: whoever takes leases on many files holds up
/// nobody for much longer than with one. Holders that give way at once, such as a file server that exports the same
/// files, cost no other open its patience.
pub(super) fn open_held(held: BorrowedFd<'_>, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let mut pauses = 0;
    loop {
        match open_held_once(held, flags) {
            Err(Errno::AGAIN) if PATIENCE.lock().take(Instant::now()) => {
                std::thread::sleep(LEASE_PAUSE);
                pauses += 1;
            }
            opened => {
                if pauses > 0 && opened.is_ok() {
                    PATIENCE.lock().give_back(pauses);
                }
                return opened;
            }
        }
    }
}

fn open_held_once(held: BorrowedFd<'_>, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let opened = retry(|| rustix::fs::open(proc_path(held), flags | OFlags::NONBLOCK, Mode::empty()))?;
    // Some file systems go by it when they read and write.
    rustix::fs::fcntl_setfl(&opened, rustix::fs::fcntl_getfl(&opened)? - OFlags::NONBLOCK)?;
    Ok(opened)
}

/// fchmodat2(2), Linux 6.6, which rustix does not offer.
fn fchmodat2(dir: BorrowedFd<'_>, name: &CStr, mode: u32, flags: AtFlags) -> rustix::io::Result<()> {
    // SAFETY: the name is a NUL-terminated string and the descriptor is open, both for the duration of the call; the
    // kernel writes to neither.
    let rc = unsafe { libc::syscall(libc::SYS_fchmodat2, dir.as_raw_fd(), name.as_ptr(), mode, flags.bits()) };
    if rc == 0 { Ok(()) } else { Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_that_meet_leases_share_their_patience_unless_the_holder_gives_way_at_once() {
        let mut patience = Patience { since: None, pauses: 0 };
        let begin = Instant::now();
        let taken = |patience: &mut Patience, now| (0..300).filter(|_| patience.take(now)).count();
        for pauses in 1..=SOON {
            for _ in 0..100 {
                assert!((0..pauses).all(|_| patience.take(begin)));
                patience.give_back(pauses);
            }
        }
        assert!((0..=SOON).all(|_| patience.take(begin)));
        patience.give_back(SOON + 1);
        assert_eq!(taken(&mut patience, begin), (PAUSES_MAX - SOON - 1) as usize);
        assert_eq!(taken(&mut patience, begin + PATIENCE_IN / 2), 0);
        assert_eq!(taken(&mut patience, begin + PATIENCE_IN), PAUSES_MAX as usize);
    }
}
