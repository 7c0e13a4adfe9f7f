//! `PlainFs`: a directory as it is, to compare with in benchmarks and to test the adapter under a real kernel.
//!
//! It has the same cost structure as a vault over a local directory, less the cryptography. It is no sandbox: every
//! user of the mount acts with the daemon's rights on the directory (the kernel checks modes and owners,
//! `default_permissions`). Each inode that the kernel remembers keeps one `O_PATH` descriptor, so the limit on open
//! files is raised as far as the system allows.

mod node;
mod ops;

use lamassu_vault::{HandleId, Ino, Result, VaultError};
use node::Nodes;
use parking_lot::{Mutex, RwLock};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A local directory as a file system.
pub struct PlainFs {
    nodes: Nodes,
    files: RwLock<HashMap<u64, Arc<OwnedFd>>>,
    dirs: Mutex<HashMap<u64, Arc<ops::Listing>>>,
    next_handle: AtomicU64,
}

impl PlainFs {
    /// Opens `dir`. Sets the process's umask to 0: the kernel has applied the caller's by the time a request arrives.
    pub fn open(dir: &Path) -> Result<PlainFs> {
        rustix::process::umask(Mode::empty());
        raise_descriptor_limit();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| io("open", e))?;
        Ok(PlainFs {
            nodes: Nodes::new(root)?,
            files: RwLock::default(),
            dirs: Mutex::default(),
            next_handle: AtomicU64::new(1),
        })
    }

    fn add_file(&self, fd: OwnedFd) -> HandleId {
        let id = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.files.write().insert(id, Arc::new(fd));
        HandleId(id)
    }

    fn file(&self, handle: HandleId) -> Result<Arc<OwnedFd>> {
        self.files.read().get(&handle.0).cloned().ok_or(VaultError::BadHandle)
    }

    fn add_dir(&self, ino: Ino) -> Result<HandleId> {
        let node = self.nodes.get(ino)?;
        let id = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.dirs.lock().insert(id, Arc::new(ops::Listing::new(ino, node)));
        Ok(HandleId(id))
    }
}

fn io(op: &'static str, error: rustix::io::Errno) -> VaultError {
    VaultError::Io { op, source: error.into() }
}

/// Up to `fs.nr_open` for root, up to the hard limit for other users.
fn raise_descriptor_limit() {
    let now = rustix::process::getrlimit(Resource::Nofile);
    let most = std::fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|s| s.trim().parse::<u64>().ok());
    if let Some(most) = most.filter(|most| now.maximum.is_some_and(|max| *most > max)) {
        let all = Rlimit { current: Some(most), maximum: Some(most) };
        if rustix::process::setrlimit(Resource::Nofile, all).is_ok() {
            return;
        }
    }
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: now.maximum, ..now }) {
        tracing::debug!(%error, "the limit on open files stays as it is");
    }
}
