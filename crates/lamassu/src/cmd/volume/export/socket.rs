//! The local socket of an export: one export at a time, also while one ends or its process was killed.
//!
//! A lock on a file next to the socket is held from before the first look at the socket until the file is removed.
//! nbdkit holds it, too, so it lasts as long as one of the two processes. Its holder may remove a socket on which no
//! process answers: nbdkit leaves its own behind.

use crate::fault::{Fault, Result};
use crate::signals;
use rustix::io::{FdFlags, fcntl_setfd};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long to wait for an export that is ending, and how often to look.
const ENDING: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);
/// How long a server may take to greet a client.
const GREETING: Duration = Duration::from_secs(1);

/// The right to serve on a socket.
pub struct Claim {
    socket: PathBuf,
    lock: PathBuf,
    file: File,
}

impl Claim {
    /// Takes it, and removes the socket of a server that was killed. Waits for a server that is ending, or only begins.
    ///
    /// # Errors
    /// [`Fault::SocketInUse`]; those of the file system; `Interrupted`.
    pub fn take(socket: &Path) -> Result<Claim> {
        let mut name = socket.file_name().unwrap_or_default().to_owned();
        name.push(".lock");
        let lock = socket.with_file_name(name);
        let deadline = Instant::now() + ENDING;
        loop {
            let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&lock)?;
            match file.try_lock() {
                // The export that held the lock before may have removed the file meanwhile.
                Ok(()) if is_at(&file, &lock)? => {
                    let claim = Claim { socket: socket.into(), lock, file };
                    claim.remove_dead();
                    return Ok(claim);
                }
                Ok(()) => continue,
                Err(TryLockError::Error(error)) => return Err(error.into()),
                Err(TryLockError::WouldBlock) => {}
            }
            if Instant::now() > deadline || greets(socket) {
                return Err(Fault::SocketInUse { socket: socket.into() }.into());
            }
            signals::check()?;
            std::thread::sleep(POLL);
        }
    }

    /// Whether processes that this one starts from now on hold it, too.
    pub fn share(&self, is_shared: bool) -> Result<()> {
        let flags = if is_shared { FdFlags::empty() } else { FdFlags::CLOEXEC };
        Ok(fcntl_setfd(&self.file, flags).map_err(io::Error::from)?)
    }

    /// Removes a socket on which no process listens any more.
    fn remove_dead(&self) {
        let is_socket = self.socket.symlink_metadata().is_ok_and(|st| st.file_type().is_socket());
        let refuses = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        if is_socket && UnixStream::connect(&self.socket).is_err_and(|error| refuses(&error)) {
            // If it cannot be removed, nbdkit cannot bind it, and reports that.
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.remove_dead();
        // While it is locked: no other process has a claim by this file, or gets one.
        let _ = std::fs::remove_file(&self.lock);
    }
}

/// Whether a server takes clients: NBD's greeting comes first, also before TLS. A server that is ending takes none, but
/// the kernel still connects them to its socket.
fn greets(socket: &Path) -> bool {
    let heard = |mut stream: UnixStream| {
        stream.set_read_timeout(Some(GREETING))?;
        stream.read(&mut [0])
    };
    UnixStream::connect(socket).and_then(heard).is_ok_and(|bytes| bytes > 0)
}

/// Whether a path still leads to an open file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match path.symlink_metadata() {
        Ok(there) => Ok((there.dev(), there.ino()) == (own.dev(), own.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
