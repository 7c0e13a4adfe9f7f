//! The adapter: kernel requests in, calls of a [`FileSystem`] out.
//!
//! `handlers` is the list of requests, one short method each; `file_io` reads, writes and takes set-uid bits away where the kernel asks for it;
//! `reply` has what answers have in common; `cache` takes from the kernel what it caches of vaults that are unloaded; `acl` says what access control lists mean to the
//! kernel; `admin` answers ioctls and seeks; `gate` holds changes back during a freeze; `gather` lets random writes wait for their neighbours; `hot` fills the page cache where random reads gather; `awake` has wake-ups cost less while many requests come, `decoy` by keeping a processor busy; `upkeep` has the threads that
//! live as long as the mount.

mod acl;
mod admin;
mod awake;
mod cache;
mod convert;
mod decoy;
mod file_io;
mod gate;
mod gather;
mod handlers;
mod hot;
mod reply;
mod upkeep;

pub(crate) use cache::KernelCache;
pub(crate) use gather::DirtyLimits;

use crate::control::Calls;
use crate::errno::errno_of;
use crate::fs::FileSystem;
use crate::options::{CacheMode, MountOptions};
use awake::Awake;
use fuser::{Errno, InitFlags, KernelConfig, Notifier};
use gate::Gate;
use gather::Gather;
use hot::Hot;
use lamassu_vault::{Ino, VaultError};
use parking_lot::{Mutex, RwLock};
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use upkeep::Upkeep;

/// How long the kernel may trust names and attributes. All changes pass through this mount, so it may for as long as it likes.
const TTL: Duration = Duration::from_secs(24 * 3600);
/// The same for attributes of a file open for writing, which takes space in the store only some time after it was written. With write-back the
/// kernel keeps size and times itself and asks again when the file is closed, so that only the space shown can be old.
const TTL_WRITE_BACK: Duration = Duration::from_secs(1);
/// Largest write request, bytes.
const MAX_WRITE: u32 = 1 << 20;
/// Requests the kernel may have under way in the background (read-ahead, write-back).
const MAX_BACKGROUND: u16 = 64;

/// Capabilities wanted in every cache mode, where the kernel has them. Not `FUSE_ATOMIC_O_TRUNC`: with it the kernel has a running program emptied by
/// an open with `O_RDONLY | O_TRUNC`, and only then finds that it must refuse that (`ETXTBSY`).
const WANTED: InitFlags = InitFlags::FUSE_ASYNC_READ
    .union(InitFlags::FUSE_PARALLEL_DIROPS)
    .union(InitFlags::FUSE_DO_READDIRPLUS)
    .union(InitFlags::FUSE_READDIRPLUS_AUTO)
    .union(InitFlags::FUSE_ASYNC_DIO)
    .union(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP)
    .union(InitFlags::FUSE_HANDLE_KILLPRIV_V2)
    .union(InitFlags::FUSE_HAS_IOCTL_DIR)
    .union(InitFlags::FUSE_EXPLICIT_INVAL_DATA);

/// The kernel enforces access control lists, and leaves the mask of the caller to us, since a default list takes its place.
const ACLS: InitFlags = InitFlags::FUSE_POSIX_ACL.union(InitFlags::FUSE_DONT_MASK);

/// The open handles of an inode, and requests that change it or open it for writing.
#[derive(Default)]
struct Uses {
    handles: u32,
    /// Those for writing: only with one of these can the kernel hold data that the file system below has not seen.
    writers: u32,
    /// One of them, since the first was opened, could bring contents into the page cache.
    cached: bool,
}

/// What every request needs; also held by requests that wait for a thaw.
pub(crate) struct Shared<F> {
    fs: Arc<F>,
    cache: CacheMode,
    /// The user who mounted.
    owner: u32,
    /// Other users who may call, see [`crate::control::Caller`].
    delegates: Vec<u32>,
    /// Names that the kernel was told are not in the root.
    absent: Mutex<HashSet<OsString>>,
    /// Whether the kernel enforces access control lists.
    acls: AtomicBool,
    gate: Gate,
    /// Serialises freeze and thaw.
    admin: Mutex<()>,
    /// What is open.
    uses: Mutex<HashMap<Ino, Uses>>,
    /// Direct handles through which file capabilities were taken away already.
    without_capability: Mutex<HashSet<u64>>,
    /// Handles of files that were opened past the page cache because their vault wants it: that may change while they are open.
    uncached: RwLock<HashSet<u64>>,
    notifier: OnceLock<Notifier>,
    cache_writes: AtomicU64,
    cache_writes_in_flight: AtomicU64,
    gather: Gather,
    hot: Hot,
    awake: Awake,
    upkeep: Upkeep,
    closed: Mutex<Option<VaultError>>,
    /// Who answers calls, if anybody does.
    calls: Option<Calls>,
}

/// The `fuser` file system.
pub(crate) struct Adapter<F: FileSystem>(pub(crate) Arc<Shared<F>>);

impl<F: FileSystem> Shared<F> {
    /// An error only where processors are to be kept awake at all costs and cannot be.
    pub(crate) fn new(
        fs: Arc<F>,
        options: &MountOptions,
        owner: u32,
        calls: Option<Calls>,
    ) -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Shared {
            fs,
            cache: options.cache,
            owner,
            delegates: options.delegates.clone(),
            absent: Mutex::default(),
            acls: AtomicBool::new(false),
            gate: Gate::default(),
            admin: Mutex::new(()),
            uses: Mutex::default(),
            without_capability: Mutex::default(),
            uncached: RwLock::default(),
            notifier: OnceLock::new(),
            cache_writes: AtomicU64::new(0),
            cache_writes_in_flight: AtomicU64::new(0),
            gather: Gather::default(),
            hot: Hot::default(),
            awake: Awake::new(options.keep_awake)?,
            upkeep: Upkeep::default(),
            closed: Mutex::new(None),
            calls,
        }))
    }

    /// Carries a request out now.
    fn answer<T>(&self, op: &'static str, body: impl FnOnce() -> T) -> Option<T> {
        self.awake.request();
        guarded(op, body)
    }

    /// The way to tell the kernel to drop what it caches.
    pub(crate) fn set_notifier(&self, notifier: Notifier) {
        // Set once, by `mount`; a second one would be of the same session.
        let _ = self.notifier.set(notifier);
    }

    /// Where the kernel is told how many dirty pages it may hold.
    pub(crate) fn set_dirty_limits(&self, limits: DirtyLimits) {
        self.gather.set_limits(limits);
    }

    /// What the last close of the file system failed with.
    pub(crate) fn close_error(&self) -> Option<VaultError> {
        self.closed.lock().take()
    }

    /// Carries a change out now, or after the thaw.
    fn change(self: &Arc<Self>, ino: Ino, op: &'static str, job: impl FnOnce(&Self) + Send + 'static) {
        if let Some(_pass) = self.gate.enter() {
            self.answer(op, || job(self));
            return;
        }
        let shared = self.clone();
        self.gate.defer(ino, Box::new(move || _ = guarded(op, || job(&shared))));
    }

    /// Carries out what changes nothing in a frozen file system, but must not overtake waiting changes of the same inode.
    fn in_order(self: &Arc<Self>, ino: Ino, op: &'static str, job: impl FnOnce(&Self) + Send + 'static) {
        if !self.gate.holds(ino) {
            self.answer(op, || job(self));
            return;
        }
        let shared = self.clone();
        self.gate.defer(ino, Box::new(move || _ = guarded(op, || job(&shared))));
    }

    /// How long the attributes of an inode hold.
    fn ttl(&self, ino: Ino) -> Duration {
        if !self.is_written(ino) {
            TTL
        } else if self.cache == CacheMode::WriteBack {
            TTL_WRITE_BACK
        } else {
            Duration::ZERO
        }
    }

    /// Whether the kernel may hold data of this file that has not come here yet.
    fn is_written(&self, ino: Ino) -> bool {
        self.uses.lock().get(&ino).is_some_and(|uses| uses.writers > 0)
    }

    /// Whether the kernel may hold contents of this file that came from here since it was opened.
    fn is_cached(&self, ino: Ino) -> bool {
        self.uses.lock().get(&ino).is_some_and(|uses| uses.cached)
    }

    fn add_use(&self, ino: Ino, writes: bool, cached: bool) {
        let mut all = self.uses.lock();
        let uses = all.entry(ino).or_default();
        uses.handles += 1;
        uses.writers += u32::from(writes);
        uses.cached |= cached;
    }

    /// A handle that is not for the page cache is used by it nevertheless: the file is mapped.
    fn note_cached(&self, ino: Ino) {
        if let Some(uses) = self.uses.lock().get_mut(&ino) {
            uses.cached = true;
        }
    }

    /// The last use takes from the page cache what came there although it must not stay: contents of a file that was mapped.
    fn drop_use(self: &Arc<Self>, ino: Ino, writes: bool) {
        let mut all = self.uses.lock();
        let Some(uses) = all.get_mut(&ino) else { return };
        // Of what the request says, not of what was opened: to be counted down to nothing at most.
        uses.handles = uses.handles.saturating_sub(1);
        uses.writers = uses.writers.saturating_sub(u32::from(writes));
        if uses.handles > 0 {
            return;
        }
        let cached = uses.cached;
        all.remove(&ino);
        drop(all);
        if cached && !self.may_stay(ino) {
            self.aside("release", move |shared| shared.push_out(ino, 0, 0));
        }
    }

    /// Whether contents of a file may stay in the page cache.
    fn may_stay(&self, ino: Ino) -> bool {
        self.cache != CacheMode::None && self.fs.may_cache(ino)
    }
}

impl<F: FileSystem> Adapter<F> {
    /// Settles what the kernel may do; called once, in the handshake.
    fn negotiate(&self, config: &mut KernelConfig) {
        let mut wanted = WANTED;
        match self.0.cache {
            CacheMode::WriteBack => wanted |= InitFlags::FUSE_WRITEBACK_CACHE | InitFlags::FUSE_CACHE_SYMLINKS,
            CacheMode::Through => wanted |= InitFlags::FUSE_CACHE_SYMLINKS,
            CacheMode::None => {}
        }
        if guarded("keeps_acls", || self.0.fs.keeps_acls()) == Some(true) && config.capabilities().contains(ACLS) {
            wanted |= ACLS;
            self.0.acls.store(true, Ordering::Relaxed);
        }
        let refused = config.add_capabilities(wanted & config.capabilities()).is_err();
        debug_assert!(!refused, "only offered capabilities are asked for");
        // These answer with the nearest allowed value where ours is none; that is then the kernel's default, which works too.
        let _ = config.set_max_write(MAX_WRITE);
        let _ = config.set_max_background(MAX_BACKGROUND);
        if let Err(most) = config.set_max_readahead(MAX_WRITE) {
            let _ = config.set_max_readahead(most);
        }
        tracing::debug!(abi = ?config.kernel_abi(), missing = ?(wanted & !config.capabilities()), "FUSE handshake");
    }
}

/// Runs a handler; a panic in it becomes a log line, and the dropped reply answers `EIO`.
fn guarded<T>(op: &'static str, body: impl FnOnce() -> T) -> Option<T> {
    // Unwind safety: nothing the handlers share is left half-changed by a panic of ours (locks are held over plain map updates); the file
    // system below is told by no other way anyhow, and keeps its own invariants.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(value) => Some(value),
        Err(payload) => {
            let text = payload.downcast_ref::<&str>().copied().map(str::to_owned);
            let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
            tracing::error!(op, panic = text, "a bug: the request handler panicked; the request fails with EIO");
            None
        }
    }
}

/// The errno to reply with; what an administrator should see is logged.
fn failed(op: &'static str, error: &VaultError) -> Errno {
    let errno = errno_of(error);
    if errno == libc::EIO {
        tracing::error!(op, %error, "input/output error");
    } else {
        tracing::debug!(op, %error, errno);
    }
    Errno::from_i32(errno)
}

/// Counts a write from the page cache as in flight for as long as it lives.
struct CacheWrite<F>(Arc<Shared<F>>);

impl<F> CacheWrite<F> {
    fn new(shared: &Arc<Shared<F>>) -> Self {
        shared.cache_writes_in_flight.fetch_add(1, Ordering::SeqCst);
        shared.cache_writes.fetch_add(1, Ordering::SeqCst);
        CacheWrite(shared.clone())
    }
}

impl<F> Drop for CacheWrite<F> {
    fn drop(&mut self) {
        self.0.cache_writes_in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}
