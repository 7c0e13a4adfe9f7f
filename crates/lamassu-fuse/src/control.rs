//! Freezing and thawing a mounted file system from another process, by ioctl(2) on the mount's root directory.
//!
//! `FREEZE` and `THAW` carry no argument; `STATUS` answers a [`Status`]. They are for root and for the user who mounted.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

const MAGIC: u32 = 0xF5;
/// `_IO(0xF5, 0x4c)`
pub const LAMASSU_IOC_FREEZE: u32 = MAGIC << 8 | 0x4c;
/// `_IO(0xF5, 0x4d)`
pub const LAMASSU_IOC_THAW: u32 = MAGIC << 8 | 0x4d;
/// `_IOR(0xF5, 0x4e, u64[4])`
pub const LAMASSU_IOC_STATUS: u32 = 2 << 30 | (STATUS_BYTES as u32) << 16 | MAGIC << 8 | 0x4e;

const STATUS_BYTES: usize = 32;
/// How long [`freeze`] waits for the kernel's own queue to run dry before it freezes anyway.
const DRAIN_MAX: Duration = Duration::from_secs(30);

/// What a mount says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Changes wait for a thaw.
    pub frozen: bool,
    /// Changes waiting.
    pub waiting: u64,
    /// Writes received so far from the kernel's page cache.
    pub cache_writes: u64,
    /// Of these, not answered yet.
    pub cache_writes_in_flight: u64,
}

impl Status {
    /// As the ioctl carries it: four native-endian u64.
    pub(crate) fn to_bytes(self) -> [u8; STATUS_BYTES] {
        let mut bytes = [0; STATUS_BYTES];
        let words = [u64::from(self.frozen), self.waiting, self.cache_writes, self.cache_writes_in_flight];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    fn from_words(words: [u64; 4]) -> Status {
        Status { frozen: words[0] != 0, waiting: words[1], cache_writes: words[2], cache_writes_in_flight: words[3] }
    }
}

/// Why a mount could not be controlled.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The user's: not the mount point of a mounted vault.
    #[error("{0} is not the mount point of a mounted Lamassu vault")]
    NotMounted(std::path::PathBuf),
    /// The user's: someone froze it before.
    #[error("already frozen")]
    AlreadyFrozen,
    /// The user's: it is not frozen.
    #[error("not frozen")]
    NotFrozen,
    /// The user's: only root and the user who mounted may do this.
    #[error("only root and the user who mounted may freeze and thaw")]
    NotPermitted,
    /// The system's.
    #[error("{op}: {source}")]
    Io {
        /// What was tried.
        op: &'static str,
        /// Its error.
        source: io::Error,
    },
}

/// Makes everything written so far, also what only the kernel's page cache holds, arrive in the backing store, and holds further changes back
/// until [`thaw`]. Reads go on.
pub fn freeze(mountpoint: &Path) -> Result<(), ControlError> {
    let root = open(mountpoint)?;
    if status_of(&root, mountpoint)?.frozen {
        return Err(ControlError::AlreadyFrozen);
    }
    rustix::fs::syncfs(&root).map_err(|e| ControlError::Io { op: "syncfs", source: e.into() })?;
    drain(&root, mountpoint)?;
    call(&root, LAMASSU_IOC_FREEZE, mountpoint, "freeze")
}

/// Ends a freeze.
pub fn thaw(mountpoint: &Path) -> Result<(), ControlError> {
    call(&open(mountpoint)?, LAMASSU_IOC_THAW, mountpoint, "thaw")
}

/// Whether the mount is frozen, and what waits.
pub fn status(mountpoint: &Path) -> Result<Status, ControlError> {
    status_of(&open(mountpoint)?, mountpoint)
}

/// On FUSE, syncfs(2) starts write-back but does not wait for the daemon's answers. The kernel's queue is first in, first out and lets at most
/// `max_background` cache writes out at a time: when none arrived between two status requests and none is unanswered, none is queued.
fn drain(root: &File, mountpoint: &Path) -> Result<(), ControlError> {
    let deadline = Instant::now() + DRAIN_MAX;
    let mut before = status_of(root, mountpoint)?;
    while Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
        let now = status_of(root, mountpoint)?;
        if now.cache_writes == before.cache_writes && now.cache_writes_in_flight == 0 {
            return Ok(());
        }
        before = now;
    }
    Ok(())
}

fn open(mountpoint: &Path) -> Result<File, ControlError> {
    File::options()
        .read(true)
        .custom_flags(libc::O_DIRECTORY)
        .open(mountpoint)
        .map_err(|source| ControlError::Io { op: "open mount point", source })
}

fn status_of(root: &File, mountpoint: &Path) -> Result<Status, ControlError> {
    let mut words = [0u64; STATUS_BYTES / 8];
    // SAFETY: the descriptor is open; the request's size field says 32 bytes, and `words` has room for exactly those.
    let rc = unsafe { libc::ioctl(root.as_raw_fd(), LAMASSU_IOC_STATUS as libc::Ioctl, words.as_mut_ptr()) };
    if rc < 0 { Err(failed(mountpoint, "status")) } else { Ok(Status::from_words(words)) }
}

fn call(root: &File, request: u32, mountpoint: &Path, op: &'static str) -> Result<(), ControlError> {
    // SAFETY: the descriptor is open; the request carries no argument.
    let rc = unsafe { libc::ioctl(root.as_raw_fd(), request as libc::Ioctl, 0) };
    if rc < 0 { Err(failed(mountpoint, op)) } else { Ok(()) }
}

fn failed(mountpoint: &Path, op: &'static str) -> ControlError {
    let source = io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::ENOTTY | libc::ENOSYS | libc::EOPNOTSUPP) => ControlError::NotMounted(mountpoint.into()),
        Some(libc::EBUSY) => ControlError::AlreadyFrozen,
        Some(libc::EINVAL) => ControlError::NotFrozen,
        Some(libc::EPERM | libc::EACCES) => ControlError::NotPermitted,
        _ => ControlError::Io { op, source },
    }
}
