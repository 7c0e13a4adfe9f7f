//! Mounting, waiting for the end, unmounting.
//!
//! The mount itself is made here rather than by `fuser`: its session, when it mounts for one user, refuses requests of
//! any other uid. That includes the kernel's own (uid 0), which write times back later, so the times would be lost. The
//! kernel checks the user itself.

mod point;
#[cfg(feature = "testing")]
mod served;
mod sys;
#[cfg(test)]
mod tests;

pub use point::Mountpoint;
#[cfg(feature = "testing")]
pub use served::{Served, serve};

use crate::adapter::{Adapter, KernelCache, RequestCount, Shared};
use crate::control::Calls;
use crate::options::{CacheMode, MountOptions};
use fuser::{BackgroundSession, Config, Session, SessionACL};
use lamassu_store::mount_table::MountLine;
use lamassu_vault::forest::Cache;
use lamassu_vault::{FileSystem, VaultError};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use sys::MountId;

/// Why mounting, unmounting or the mounted file system failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The user's: no directory to mount on.
    #[error("mount point {path}: {source}")]
    Mountpoint {
        /// The mount point.
        path: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// The user's: something is in the way.
    #[error("mount point {0} is not empty; use another one, or `-o nonempty` to hide what is there")]
    NotEmpty(PathBuf),
    /// The system's: no FUSE here.
    #[error("cannot open /dev/fuse: {0}; is the fuse module loaded, and is the device there?")]
    NoFuse(io::Error),
    /// The system's: mount(2) refused.
    #[error("mount on {path}: {source}")]
    Mount {
        /// The mount point.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The system's: not root, and the set-uid helper cannot be run.
    #[error("cannot run fusermount3: {0}; install the package `fuse3`, or mount as root")]
    NoHelper(io::Error),
    /// The helper refused; its own words.
    #[error("fusermount3 refused: {0}")]
    HelperRefused(#[source] sys::HelperMessage),
    /// The mount is in use.
    #[error("{0} is busy: close what is open there, or unmount lazily")]
    Busy(PathBuf),
    /// The user's: may not keep the processors awake.
    #[error("keep_awake=always needs /dev/cpu_dma_latency: {0}; mount as root, or leave it out")]
    KeepAwake(#[source] io::Error),
    /// The request loop ended with an error.
    #[error("serving requests: {0}")]
    Session(io::Error),
    /// The file system could not be closed properly.
    #[error("closing: {0}")]
    Close(#[source] VaultError),
}

/// A mounted file system. Dropping it unmounts (lazily, if need be) without waiting; see [`Mounted::wait`].
pub struct Mounted {
    session: Option<BackgroundSession>,
    unmounter: Unmounter,
    close_error: Box<dyn Fn() -> Option<VaultError> + Send + Sync>,
    cache: Box<dyn Fn() -> Arc<dyn Cache> + Send + Sync>,
    counted: Arc<dyn Fn() -> Vec<RequestCount> + Send + Sync>,
}

/// Unmounts; can be cloned and sent to another thread, such as one that waits for signals. It does not keep the file
/// system alive after the end of the mount.
#[derive(Clone)]
pub struct Unmounter {
    id: Arc<MountId>,
    thaw: Arc<dyn Fn() + Send + Sync>,
}

/// Mounts a file system on an existing directory. Returns when the mount is usable. The file system is closed at the
/// end of the mount, but not if this function fails.
pub fn mount<F: FileSystem>(fs: Arc<F>, mountpoint: &Path, options: &MountOptions) -> Result<Mounted, MountError> {
    let wrong = |source| MountError::Mountpoint { path: mountpoint.into(), source };
    mount_answering(fs, &Mountpoint::open(mountpoint).map_err(wrong)?, options, None)
}

/// The same on a directory that was opened before, with a function that answers [`crate::control::call`]. With `None`,
/// calls fail as on a mount of another kind.
///
/// # Errors
/// [`MountError::Mountpoint`], also if the directory has been moved since it was opened.
pub fn mount_answering<F: FileSystem>(
    fs: Arc<F>,
    mountpoint: &Mountpoint,
    options: &MountOptions,
    calls: Option<Calls>,
) -> Result<Mounted, MountError> {
    mountpoint.check(options.nonempty)?;
    sys::refuse_what_is_mounted_on(mountpoint)?;
    let owner = rustix::process::geteuid().as_raw();
    let shared = Shared::new(fs, options, owner, calls).map_err(MountError::KeepAwake)?;
    let device = sys::attach(mountpoint, options)?;
    let id = MountId::on(mountpoint);
    let started = start(&shared, device, options);
    let session = started.map_err(|source| {
        id.detach_quietly();
        MountError::Session(source)
    })?;
    if options.read_ahead_kib > 0 {
        id.raise_read_ahead(options.read_ahead_kib);
    }
    if options.cache == CacheMode::WriteBack
        && let Some(limits) = id.dirty_limits()
    {
        shared.set_dirty_limits(limits);
    }
    let thaw: Arc<dyn Fn() + Send + Sync> = {
        let weak = Arc::downgrade(&shared);
        Arc::new(move || {
            if let Some(shared) = weak.upgrade() {
                shared.thaw_for_unmount();
            }
        })
    };
    let weak = Arc::downgrade(&shared);
    let cache = Box::new(move || Arc::new(KernelCache(weak.clone())) as Arc<dyn Cache>);
    let weak = Arc::downgrade(&shared);
    let counted = Arc::new(move || weak.upgrade().map(|shared| shared.counted()).unwrap_or_default());
    let close_error = Box::new(move || shared.close_error());
    let unmounter = Unmounter { id: Arc::new(id), thaw };
    Ok(Mounted { session: Some(session), unmounter, close_error, cache, counted })
}

/// Unmounts a mount of the table, wherever it is now, and no other one, whatever its path leads to meanwhile. One that
/// is gone is no error.
///
/// # Errors
/// [`MountError::Busy`], also if another mount hides it; those of the kernel and of its helper.
pub fn unmount(mount: &MountLine, lazy: bool) -> Result<(), MountError> {
    MountId::of_line(mount).detach(lazy)
}

/// The root of a mount of the table, and of no other one. Its daemon is not asked.
///
/// # Errors
/// `NotFound` if it is gone, or hidden; those of the system.
pub fn root_of(mount: &MountLine) -> io::Result<OwnedFd> {
    MountId::of_line(mount).root()
}

fn start<F: FileSystem>(
    shared: &Arc<Shared<F>>,
    device: OwnedFd,
    options: &MountOptions,
) -> io::Result<BackgroundSession> {
    let mut config = Config::default();
    config.n_threads = Some(options.threads.clamp(1, 64));
    config.clone_fd = true;
    // Not `Owner`: see the module's head. The kernel keeps other users out unless `allow_other` is set.
    let acl = if options.allow_root && !options.allow_other { SessionACL::RootAndOwner } else { SessionACL::All };
    config.acl = acl;
    let session = Session::from_fd(Adapter(shared.clone()), device, acl, config)?;
    shared.set_notifier(session.notifier());
    shared.start()?;
    session.spawn()
}

impl Mounted {
    /// The mount point, as an absolute path without links.
    pub fn mountpoint(&self) -> &Path {
        self.unmounter.id.path()
    }

    /// What the kernel keeps of the file system, for [`lamassu_vault::Forest::set_cache`].
    pub fn cache(&self) -> Arc<dyn Cache> {
        (self.cache)()
    }

    /// A function that returns how often each request came, for as long as the mount lives.
    pub fn request_counts(&self) -> Arc<dyn Fn() -> Vec<RequestCount> + Send + Sync> {
        self.counted.clone()
    }

    /// A handle to unmount from elsewhere.
    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }

    /// Waits until the mount has ended, for whatever reason, and the file system is closed.
    pub fn wait(mut self) -> Result<(), MountError> {
        let ended = match self.session.take() {
            Some(session) => session.join(),
            None => Ok(()),
        };
        if let Some(error) = (self.close_error)() {
            return Err(MountError::Close(error));
        }
        of_unmounting(ended).map_err(MountError::Session)
    }
}

/// Treats the end of the connection as no error. The session knows `ENODEV`, but a thread that is taking a request at
/// that moment gets `ECONNABORTED` (mostly at the close of the last file of a mount that was unmounted lazily).
fn of_unmounting(ended: io::Result<()>) -> io::Result<()> {
    match ended {
        Err(error) if error.raw_os_error() == Some(libc::ECONNABORTED) => Ok(()),
        ended => ended,
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.session.is_some()
            && self.unmounter.unmount(false).is_err()
            && let Err(error) = self.unmounter.unmount(true)
        {
            tracing::warn!(%error, "unmount failed");
        }
    }
}

impl Unmounter {
    /// Unmounts; without `lazy`, a mount in use is an error, [`MountError::Busy`]. With it the mount point is free at
    /// once, and the mount ends when the last file is closed. A mount that is gone already is no error, nor is another
    /// mount in its place touched. Thaws first.
    pub fn unmount(&self, lazy: bool) -> Result<(), MountError> {
        if !self.id.is_mounted() {
            return Ok(());
        }
        (self.thaw)();
        self.id.detach(lazy)
    }
}
