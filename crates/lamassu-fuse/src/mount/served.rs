//! A session without a kernel: requests come over a socket. For fuzzing.

use super::start;
use crate::adapter::Shared;
use crate::options::MountOptions;
use fuser::BackgroundSession;
use lamassu_vault::FileSystem;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A session that [`serve`] began.
pub struct Served(BackgroundSession);

/// Serves requests that come over `device`: a socket of kind SEQPACKET, one packet for each request or answer, where
/// `FUSE_INIT` waits already. One thread serves all, since further threads would ask /dev/fuse for channels of their
/// own. The file system is closed when the other end is.
pub fn serve<F: FileSystem>(fs: Arc<F>, device: OwnedFd, options: &MountOptions) -> io::Result<Served> {
    let options = MountOptions { threads: 1, ..options.clone() };
    let shared = Shared::new(fs, &options, rustix::process::geteuid().as_raw(), None)?;
    start(&shared, device, &options).map(Served)
}

impl Served {
    /// Whether the session has ended by itself. Its end of the socket stays open for answers that other threads still
    /// have to send.
    pub fn has_ended(&self) -> bool {
        self.0.guard.is_finished()
    }

    /// Waits for the end, once the other end of the socket is closed. Errors of the session are ignored.
    pub fn wait(self) {
        drop(self.0.join());
    }
}
