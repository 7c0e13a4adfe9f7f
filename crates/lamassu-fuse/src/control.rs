//! Controlling a mounted file system from another process, by ioctl(2) on the mount's root directory. `CALL` can also
//! go to any other directory, and is then about that one.
//!
//! Those that freeze and thaw carry no argument; `STATUS` answers a [`Status`]; `CALL` carries bytes to the daemon of
//! the mount, and its answer back. Root and the user who mounted may use them; delegates that they named may use calls.
//!
//! Never: interprets a call ([`Calls`] are given by the program that mounts), keeps one after it was answered, uses a
//! path that may lead elsewhere by then ([`Root`], [`Asked`]).

mod asked;

pub use asked::Asked;

use lamassu_store::mount_table::mount_id;

use lamassu_vault::Ino;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

const MAGIC: u32 = 0xF5;
/// `_IO(0xF5, 0x4c)`: until a thaw.
pub const LAMASSU_IOC_FREEZE: u32 = MAGIC << 8 | 0x4c;
/// `_IO(0xF5, 0x4f)`: until the open directory that is asked is closed, also by the end of the process that opened it.
pub const LAMASSU_IOC_FREEZE_WHILE_OPEN: u32 = MAGIC << 8 | 0x4f;
/// `_IO(0xF5, 0x51)`: a freeze that lasts while the open directory that is asked is open lasts until a thaw from now
/// on. `EINVAL` if there is no such freeze.
pub const LAMASSU_IOC_FREEZE_LASTS: u32 = MAGIC << 8 | 0x51;
/// `_IO(0xF5, 0x4d)`: whoever froze.
pub const LAMASSU_IOC_THAW: u32 = MAGIC << 8 | 0x4d;
/// `_IO(0xF5, 0x52)`: a freeze that lasts while the open directory that is asked is open. `EINVAL` if there is no such
/// freeze: somebody has ended it, whether or not it was frozen again.
pub const LAMASSU_IOC_THAW_OWN: u32 = MAGIC << 8 | 0x52;
/// `_IO(0xF5, 0x53)`: as [`LAMASSU_IOC_THAW`], but `EBUSY` for a freeze that lasts while a directory is open: while it
/// is, nothing is unmounted.
pub const LAMASSU_IOC_THAW_TO_UNMOUNT: u32 = MAGIC << 8 | 0x53;
/// `_IOR(0xF5, 0x4e, u64[4])`
pub const LAMASSU_IOC_STATUS: u32 = 2 << 30 | (STATUS_BYTES as u32) << 16 | MAGIC << 8 | 0x4e;

/// `_IOWR(0xF5, 0x50, u8[16383])`: u32 length in native order, then that many bytes, then zeros; both ways.
pub const LAMASSU_IOC_CALL: u32 = 3 << 30 | (CALL_BYTES as u32) << 16 | MAGIC << 8 | 0x50;

const STATUS_BYTES: usize = 32;
/// The largest size that the size field of an ioctl number can hold.
pub(crate) const CALL_BYTES: usize = (1 << 14) - 1;
const LENGTH_BYTES: usize = 4;
/// The longest call and the longest answer, bytes.
pub const CALL_LEN_MAX: usize = CALL_BYTES - LENGTH_BYTES;
/// How long [`Root::freeze`] waits for the kernel's own queue to run dry before it freezes anyway.
const DRAIN_MAX: Duration = Duration::from_secs(30);

/// The operation that [`ControlError::Io`] names if there is no such directory, or it may not be opened.
const OPEN: &str = "open mount point";

/// The operation that [`ControlError::Io`] names if the page cache could not be written back.
pub const SYNCFS: &str = "syncfs";

/// The status of a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Changes wait for a thaw.
    pub frozen: bool,
    /// Changes waiting.
    pub waiting: u64,
    /// Writes received so far from the kernel's page cache.
    pub cache_writes: u64,
    /// How many of them are not answered yet.
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

/// A caller: root, the user who mounted, or one of the delegates named at the mount. Others are refused before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Process; 0 if the daemon cannot see it.
    pub pid: u32,
    /// Root or the user who mounted; a delegate may do what the server lets it do.
    pub is_owner: bool,
}

impl Caller {
    /// The groups of the caller: its own, and the supplementary ones if the daemon can see the process.
    pub fn groups(&self) -> Vec<u32> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        std::iter::once(self.gid).chain(groups_of(&status)).collect()
    }
}

/// The supplementary groups in the text of /proc/PID/status.
pub(crate) fn groups_of(status: &str) -> impl Iterator<Item = u32> {
    let line = status.lines().find_map(|l| l.strip_prefix("Groups:")).unwrap_or_default();
    line.split_whitespace().filter_map(|g| g.parse().ok())
}

/// Answers calls, given the caller, the inode number of the directory that was called, and the request; each on a
/// thread of its own, several at a time. An answer longer than [`CALL_LEN_MAX`] reaches the caller as `EMSGSIZE`; a
/// panic as `EIO`. It may wait, also for requests of the mount itself.
pub type Calls = Arc<dyn Fn(&Caller, Ino, &[u8]) -> Zeroizing<Vec<u8>> + Send + Sync>;

/// A call or answer as the ioctl carries it; `None` if it is too long. Wiped when dropped.
pub(crate) fn frame(bytes: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    if bytes.len() > CALL_LEN_MAX {
        return None;
    }
    let mut framed = Zeroizing::new(vec![0; CALL_BYTES]);
    framed[..LENGTH_BYTES].copy_from_slice(&(bytes.len() as u32).to_ne_bytes());
    framed[LENGTH_BYTES..][..bytes.len()].copy_from_slice(bytes);
    Some(framed)
}

/// The content of a frame; `None` if it is malformed.
pub(crate) fn framed(frame: &[u8]) -> Option<&[u8]> {
    let (len, rest) = frame.split_first_chunk::<LENGTH_BYTES>()?;
    rest.get(..u32::from_ne_bytes(*len) as usize)
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
    /// The user's: it is not frozen at such a moment.
    #[error("a dataset is being loaded, unloaded or destroyed; try again when that is done")]
    DatasetsChange,
    /// The user's, the network's or this host's: others may have changed the vault since it was frozen.
    #[error(
        "the freeze has ended too early: somebody thawed the vault, its mount ended, or this host was out of touch with the server; others may have changed the vault, so do not use a copy that was made meanwhile"
    )]
    FreezeLost,
    /// The user's: it is not frozen.
    #[error("not frozen")]
    NotFrozen,
    /// The user's: only root and the user who mounted may do this.
    #[error("only root and the user who mounted may do this")]
    NotPermitted,
    /// The user's, or the fault of the owner of a directory on the way: the path leads elsewhere than it says.
    #[error(
        "{path:?} leads to {target:?} by a symbolic link that another user may have made; give the path without it, if that is meant"
    )]
    LeadsAway {
        /// As given.
        path: std::path::PathBuf,
        /// What the link says.
        target: std::path::PathBuf,
    },
    /// Another user's mount: its answers may be false.
    #[error("{0:?} lies in a mount of another user: only the daemons of root's mounts and of your own are asked")]
    Strangers(std::path::PathBuf),
    /// The program's: a call or an answer that one ioctl cannot carry.
    #[error("a call or its answer is longer than {CALL_LEN_MAX} bytes")]
    TooLong,
    /// The system's.
    #[error("{op}: {source}")]
    Io {
        /// The operation that failed.
        op: &'static str,
        /// Its error.
        source: io::Error,
    },
}

/// The root of a mount, opened once: requests go there, even if its name leads elsewhere later. The daemon of another
/// user's mount may answer anything.
pub struct Root {
    dir: File,
    path: PathBuf,
}

impl Root {
    /// Opens it.
    ///
    /// # Errors
    /// [`ControlError::Io`].
    pub fn open(mountpoint: &Path) -> Result<Root, ControlError> {
        let opened = File::options().read(true).custom_flags(libc::O_DIRECTORY).open(mountpoint);
        let dir = opened.map_err(|source| ControlError::Io { op: OPEN, source })?;
        Ok(Root { dir, path: mountpoint.into() })
    }

    /// The number of the mount that it lies in.
    pub fn mount(&self) -> Option<u64> {
        mount_id(&self.dir).ok().flatten()
    }

    /// Makes everything written so far arrive in the backing store, including dirty pages of the kernel, and holds
    /// further changes back until [`Root::thaw`]. Reads go on. If this process is killed before this returns, nothing
    /// stays frozen.
    ///
    /// # Errors
    /// [`ControlError`]; [`ControlError::FreezeLost`] if somebody thawed it before this returns.
    pub fn freeze(&self) -> Result<(), ControlError> {
        // The kernel lets nobody out of a request that the daemon has: who is killed meanwhile ends after the answer.
        self.freeze_while_open()?;
        self.plain_call(LAMASSU_IOC_FREEZE_LASTS, "freeze").map_err(|error| match error {
            ControlError::NotFrozen => ControlError::FreezeLost,
            error => error,
        })
    }

    /// The same, until this is dropped. The freeze also ends if this process dies.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn freeze_while_open(&self) -> Result<(), ControlError> {
        if self.status()?.frozen {
            return Err(ControlError::AlreadyFrozen);
        }
        self.write_back()?;
        self.plain_call(LAMASSU_IOC_FREEZE_WHILE_OPEN, "freeze")
    }

    /// Ends a freeze, whoever asked for it.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn thaw(&self) -> Result<(), ControlError> {
        self.plain_call(LAMASSU_IOC_THAW, "thaw")
    }

    /// Ends the freeze of [`Root::freeze_while_open`], and no other one.
    ///
    /// # Errors
    /// [`ControlError`]: after any error it is not certain that nobody changed anything meanwhile.
    /// [`ControlError::NotFrozen`]: somebody has ended that freeze; it may be frozen again.
    pub fn thaw_own(&self) -> Result<(), ControlError> {
        self.plain_call(LAMASSU_IOC_THAW_OWN, "thaw")
    }

    /// Ends a freeze, unless it lasts as long as a directory is open: then the mount is in use.
    ///
    /// # Errors
    /// [`ControlError::AlreadyFrozen`] in that case; [`ControlError`].
    pub fn thaw_to_unmount(&self) -> Result<(), ControlError> {
        self.plain_call(LAMASSU_IOC_THAW_TO_UNMOUNT, "thaw")
    }

    /// Makes the kernel write its dirty pages back, as [`Root::freeze`] does first.
    ///
    /// # Errors
    /// [`ControlError::Io`] of `syncfs` if a write through the mount was refused, even before this call: the kernel
    /// reports that once, and keeps none of the data.
    pub fn write_back(&self) -> Result<(), ControlError> {
        let synced = rustix::fs::syncfs(&self.dir).map_err(|e| ControlError::Io { op: SYNCFS, source: e.into() });
        self.drain()?;
        synced
    }

    /// On FUSE, syncfs(2) starts write-back but does not wait for the daemon's answers. The kernel's queue is first in,
    /// first out and lets at most `max_background` cache writes out at a time: when none arrived between two status
    /// requests and none is unanswered, none is queued.
    fn drain(&self) -> Result<(), ControlError> {
        let deadline = Instant::now() + DRAIN_MAX;
        let mut before = self.status()?;
        while Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
            let now = self.status()?;
            if now.cache_writes == before.cache_writes && now.cache_writes_in_flight == 0 {
                return Ok(());
            }
            before = now;
        }
        Ok(())
    }

    /// Whether the mount is frozen, and what waits.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn status(&self) -> Result<Status, ControlError> {
        let mut words = [0u64; STATUS_BYTES / 8];
        // SAFETY: the descriptor is open; the request's size field says 32 bytes, and `words` has room for exactly
        // those.
        let rc = unsafe { libc::ioctl(self.dir.as_raw_fd(), LAMASSU_IOC_STATUS as libc::Ioctl, words.as_mut_ptr()) };
        if rc < 0 { Err(failed(&self.path, "status")) } else { Ok(Status::from_words(words)) }
    }

    /// Calls the program that serves it. Only for requests without secrets, and if the answer need not be trusted.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn call(&self, request: &[u8]) -> Result<Zeroizing<Vec<u8>>, ControlError> {
        called(&self.dir, &self.path, request)
    }

    fn plain_call(&self, request: u32, op: &'static str) -> Result<(), ControlError> {
        // SAFETY: the descriptor is open; the request carries no argument.
        let rc = unsafe { libc::ioctl(self.dir.as_raw_fd(), request as libc::Ioctl, 0) };
        if rc < 0 { Err(failed(&self.path, op)) } else { Ok(()) }
    }
}

/// Calls the program that serves the mount in which a directory lies, and waits for its answer. The memory of both the
/// frame and the answer is wiped when dropped.
///
/// # Errors
/// [`ControlError`].
pub fn call(asked: &Asked, request: &[u8]) -> Result<Zeroizing<Vec<u8>>, ControlError> {
    asked.root()?.call(request)
}

fn called(dir: &File, path: &Path, request: &[u8]) -> Result<Zeroizing<Vec<u8>>, ControlError> {
    let mut frame = frame(request).ok_or(ControlError::TooLong)?;
    // SAFETY: the descriptor is open; the request's size field says CALL_BYTES, and `frame` is that long.
    let rc = unsafe { libc::ioctl(dir.as_raw_fd(), LAMASSU_IOC_CALL as libc::Ioctl, frame.as_mut_ptr()) };
    if rc < 0 {
        return Err(failed(path, "call"));
    }
    let answer = framed(&frame).ok_or_else(|| ControlError::NotMounted(path.into()))?;
    Ok(Zeroizing::new(answer.to_vec()))
}

fn failed(mountpoint: &Path, op: &'static str) -> ControlError {
    let source = io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::ENOTTY | libc::ENOSYS | libc::EOPNOTSUPP) => ControlError::NotMounted(mountpoint.into()),
        Some(libc::EOWNERDEAD) => ControlError::FreezeLost,
        Some(libc::EBUSY) => ControlError::AlreadyFrozen,
        Some(libc::EAGAIN) => ControlError::DatasetsChange,
        Some(libc::EINVAL) => ControlError::NotFrozen,
        Some(libc::EPERM | libc::EACCES) => ControlError::NotPermitted,
        Some(libc::EMSGSIZE) => ControlError::TooLong,
        _ => ControlError::Io { op, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_carry_what_they_were_given_and_nothing_else() {
        for len in [0, 1, CALL_LEN_MAX] {
            let bytes = vec![7; len];
            let frame = frame(&bytes).unwrap();
            assert_eq!(frame.len(), CALL_BYTES);
            assert_eq!(framed(&frame), Some(&bytes[..]));
            assert!(frame[LENGTH_BYTES + len..].iter().all(|b| *b == 0));
        }
        assert!(frame(&vec![7; CALL_LEN_MAX + 1]).is_none());
        assert_eq!((framed(&[1, 0, 0]), framed(&[1, 0, 0, 0]), framed(&[255; 4])), (None, None, None));
    }

    /// The size of an ioctl's argument is 14 bits: one more byte and the number would be another.
    #[test]
    fn the_number_says_its_size_and_both_directions() {
        assert_eq!(LAMASSU_IOC_CALL, 0xffff_f550);
    }
}
