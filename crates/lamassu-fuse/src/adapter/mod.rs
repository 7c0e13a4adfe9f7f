//! The adapter: kernel requests in, calls of a [`FileSystem`] out.
//!
//! `handlers` is the list of requests, one short method each. `file_io` reads, writes and clears set-uid bits when the
//! kernel asks for it; `uses` counts open files; `reply` has the common parts of answers; `convert` converts between
//! the kernel's types and the vault's; `acl` handles access control lists; `rights` checks permissions again where
//! hosts take turns; `locks` asks for locks that hold among hosts; `admin` answers ioctls and seeks; `counts` counts
//! requests; `cache` makes the kernel drop its caches of vaults that are unloaded; `gate` holds changes back during a
//! freeze; `syncs` has threads for syncs; `lifetime` starts the threads of a mount and ends them.

mod acl;
mod admin;
mod cache;
mod convert;
mod counts;
mod descriptors;
mod file_io;
mod gate;
mod handlers;
mod lifetime;
mod locks;
mod reply;
mod rights;
mod syncs;
mod uses;

pub(crate) use cache::KernelCache;
pub use counts::RequestCount;

use crate::control::Calls;
use crate::errno_of;
use crate::options::{CacheMode, MountOptions};
use crate::tuning::{DirtyLimits, Tuning};
use admin::Admin;
use counts::Counts;
use descriptors::Descriptors;
use fuser::{Errno, InitFlags, KernelConfig, Notifier};
use gate::Gate;
use lamassu_vault::turns::{Need, Use, run_in_both};
use lamassu_vault::{Entry, FileSystem, HandleId, Ino, ROOT, Result, VaultError};
use lifetime::Lifetime;
use locks::LockWaits;
use parking_lot::{Mutex, RwLock};
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use syncs::Syncs;
use uses::Uses;

/// How long the kernel may trust names and attributes. All changes pass through this mount, so a day is no risk.
const TTL: Duration = Duration::from_secs(24 * 3600);
/// The same for attributes of a file that is open for writing. The file takes space in the store only some time after
/// it was written. With write-back the kernel keeps size and times itself and asks again when the file is closed, so
/// only the space shown can be old.
const TTL_WRITE_BACK: Duration = Duration::from_secs(1);
/// Largest write request, bytes.
const MAX_WRITE: u32 = 1 << 20;
/// Requests the kernel may have under way in the background (read-ahead, write-back, asynchronous O_DIRECT).
const MAX_BACKGROUND: u16 = 64;
/// The part of the memory that the data of such requests may take where hosts take turns. They are many there: those
/// that wait for a turn hold no thread, and the write-back of another vault, which the end of that vault's turn waits
/// for, must not wait behind them.
const BACKGROUND_PART: u64 = 16;

/// Capabilities asked for in every cache mode, if the kernel has them. Not `FUSE_ATOMIC_O_TRUNC`: with it an open with
/// `O_RDONLY | O_TRUNC` empties a running program, and only then the kernel refuses the open (`ETXTBSY`).
const WANTED: InitFlags = InitFlags::FUSE_ASYNC_READ
    .union(InitFlags::FUSE_PARALLEL_DIROPS)
    .union(InitFlags::FUSE_ASYNC_DIO)
    .union(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP)
    .union(InitFlags::FUSE_HANDLE_KILLPRIV_V2)
    .union(InitFlags::FUSE_HAS_IOCTL_DIR)
    .union(InitFlags::FUSE_EXPLICIT_INVAL_DATA)
    .union(InitFlags::FUSE_DO_READDIRPLUS)
    .union(InitFlags::FUSE_READDIRPLUS_AUTO);

/// With these the kernel enforces access control lists. It does not apply the umask, since a default list may replace
/// it: the file system does.
const ACLS: InitFlags = InitFlags::FUSE_POSIX_ACL.union(InitFlags::FUSE_DONT_MASK);

/// State that every request needs; also held by requests that wait for a thaw.
pub(crate) struct Shared<F> {
    fs: Arc<F>,
    cache: CacheMode,
    /// With turns: whether the kernel can be made to look names up again.
    may_keep: AtomicBool,
    /// The user who mounted.
    owner: u32,
    /// Other users who may call, see [`crate::control::Caller`].
    delegates: Vec<u32>,
    /// Names for which the kernel was told that they are not in the root.
    absent: Mutex<HashSet<OsString>>,
    /// Changes of names are durable before they are answered.
    syncs_names: bool,
    /// So are changes of contents.
    syncs_content: bool,
    /// The attributes of the root are asked for at each use, so that no caller passes unseen: see `allow_root`.
    is_root_asked: bool,
    /// Whether the kernel enforces access control lists.
    acls: AtomicBool,
    gate: Gate,
    /// Frozen although the gate is open: hosts take turns, and this one keeps its own.
    has_frozen_turns: AtomicBool,
    /// Serialises freeze and thaw.
    admin: Mutex<Admin>,
    /// The open directory that a freeze lasts as long as; `None` for one that lasts until a thaw. Set with `admin`
    /// held.
    freezer: Mutex<Option<HandleId>>,
    /// The open files and directories.
    uses: Mutex<HashMap<Ino, Uses>>,
    descriptors: Descriptors,
    /// Files that are known to have no capabilities, and the number of the turn.
    without_capability: Mutex<HashMap<Ino, u64>>,
    /// How often capabilities were set.
    capabilities_set: AtomicU64,
    /// Handles of files that were opened without the page cache because their vault asked for that. The vault's setting
    /// may change while they are open; the handle stays direct.
    uncached: RwLock<HashSet<u64>>,
    /// Handles whose changes of contents are durable before they are answered, as `O_SYNC` and `O_DSYNC` ask for.
    synchronous: RwLock<HashSet<u64>>,
    notifier: OnceLock<Notifier>,
    cache_writes: AtomicU64,
    cache_writes_in_flight: AtomicU64,
    tuning: Arc<Tuning>,
    counts: Counts,
    syncs: Arc<Syncs>,
    lifetime: Lifetime,
    closed: Mutex<Option<VaultError>>,
    /// Answers calls of other processes; `None`: they are refused.
    calls: Option<Calls>,
    /// Requests for locks that wait.
    lock_waits: LockWaits,
}

/// What a request is about, which decides the turns that it needs.
#[derive(Clone, Copy)]
enum About {
    /// the content of an inode, or of an open handle
    Content(u64),
    /// the attributes of an inode
    Shown(Ino),
    /// a change of its attributes, which may be recorded with both
    Both(Ino),
}

/// The `fuser` file system.
pub(crate) struct Adapter<F: FileSystem>(pub(crate) Arc<Shared<F>>);

impl<F: FileSystem> Shared<F> {
    /// Errors: processors cannot be kept awake although that is asked for, or there is no descriptor left.
    pub(crate) fn new(
        fs: Arc<F>,
        options: &MountOptions,
        owner: u32,
        calls: Option<Calls>,
    ) -> std::io::Result<Arc<Self>> {
        let tuning = Arc::new(Tuning::new(options.keep_awake, fs.upkeep())?);
        // Other hosts would not see dirty pages of the kernel.
        let cache = match options.cache {
            CacheMode::WriteBack if fs.hosts_take_turns() => CacheMode::Through,
            cache => cache,
        };
        Ok(Arc::new(Shared {
            fs,
            cache,
            may_keep: AtomicBool::new(false),
            owner,
            delegates: options.delegates.clone(),
            absent: Mutex::default(),
            syncs_names: options.sync || options.dirsync,
            syncs_content: options.sync,
            is_root_asked: options.allow_root && !options.allow_other,
            acls: AtomicBool::new(false),
            gate: Gate::default(),
            has_frozen_turns: AtomicBool::new(false),
            admin: Mutex::default(),
            freezer: Mutex::new(None),
            uses: Mutex::default(),
            descriptors: Descriptors::new(owner)?,
            without_capability: Mutex::default(),
            capabilities_set: AtomicU64::new(0),
            uncached: RwLock::default(),
            synchronous: RwLock::default(),
            notifier: OnceLock::new(),
            cache_writes: AtomicU64::new(0),
            cache_writes_in_flight: AtomicU64::new(0),
            tuning,
            counts: Counts::default(),
            syncs: Arc::default(),
            lifetime: Lifetime::default(),
            closed: Mutex::new(None),
            calls,
            lock_waits: LockWaits::default(),
        }))
    }

    /// Carries a request out now.
    fn answer<T>(&self, op: &'static str, body: impl FnOnce() -> T) -> Option<T> {
        self.tuning.request();
        self.serve(op, body)
    }

    /// The same for one that waited.
    fn serve<T>(&self, op: &'static str, body: impl FnOnce() -> T) -> Option<T> {
        self.counts.count(op, || guarded(op, body))
    }

    /// How often each request came.
    pub(crate) fn counted(&self) -> Vec<RequestCount> {
        self.counts.counted()
    }

    /// Sets the notifier that makes the kernel drop its caches.
    pub(crate) fn set_notifier(&self, notifier: Notifier) {
        // Set once, by `mount`; a second one would be of the same session.
        let _ = self.notifier.set(notifier);
    }

    /// Sets the files that limit the kernel's dirty pages.
    pub(crate) fn set_dirty_limits(&self, limits: DirtyLimits) {
        self.tuning.set_dirty_limits(limits);
    }

    /// The error of the last close of the file system.
    pub(crate) fn close_error(&self) -> Option<VaultError> {
        self.closed.lock().take()
    }

    /// Carries a request out now or, if several hosts take turns, in this host's next turn.
    fn in_turn(self: &Arc<Self>, about: About, need: Need, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        if !self.fs.hosts_take_turns() {
            return job(self);
        }
        let shared = self.clone();
        self.hold_turns(about, need, move |held| {
            job(&shared);
            drop(held);
        });
    }

    /// Calls `job` with the turns that a request needs.
    fn hold_turns(&self, about: About, need: Need, job: impl FnOnce(Vec<Use>) + Send + 'static) {
        let turns = match about {
            About::Content(number) => self.fs.join_turns(number),
            About::Shown(ino) => self.fs.turns_that_show(ino),
            About::Both(ino) => match (self.fs.turns_that_show(ino), self.fs.join_turns(ino)) {
                (Some(outer), Some(inner)) if !Arc::ptr_eq(&outer, &inner) => {
                    return run_in_both(outer, inner, need, Box::new(move |held| job(held.into())));
                }
                (outer, inner) => inner.or(outer),
            },
        };
        match turns {
            Some(turns) => turns.run(need, move |turn| job(vec![turn])),
            None => job(Vec::new()),
        }
    }

    /// Whether two directories belong to one vault, as far as a turn is needed to know: without turns the file system
    /// tells.
    fn is_one(&self, dir: Ino, other: Ino) -> bool {
        match (self.fs.join_turns(dir), self.fs.join_turns(other)) {
            (Some(one), Some(other)) => Arc::ptr_eq(&one, &other),
            (one, other) => one.is_some() == other.is_some(),
        }
    }

    /// The same on a thread of its own, for a request that may wait long: there are few request threads, and other
    /// requests must not wait for it.
    fn in_turn_aside(self: &Arc<Self>, about: About, need: Need, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let shared = self.clone();
        self.hold_turns(about, need, move |held| {
            let syncs = shared.syncs.clone();
            syncs.run(Box::new(move || {
                job(&shared);
                drop(held);
            }));
        });
    }

    /// Carries out a request that changes nothing. `number`: the inode or handle that it is about.
    fn look(self: &Arc<Self>, number: u64, op: &'static str, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        self.in_turn(About::Content(number), Need::LOOK, move |shared| _ = shared.answer(op, || job(shared)));
    }

    /// The same for attributes, which a user asks for.
    fn look_shown(
        self: &Arc<Self>,
        (ino, uid): (Ino, u32),
        op: &'static str,
        job: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) {
        let need = self.to_look_at(ino, uid);
        self.in_turn(About::Shown(ino), need, move |shared| _ = shared.answer(op, || job(shared)));
    }

    /// The same to open a directory.
    fn look_into(
        self: &Arc<Self>,
        (ino, uid): (Ino, u32),
        op: &'static str,
        job: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) {
        let need = self.to_look_at(ino, uid);
        self.in_turn(About::Content(ino), need, move |shared| _ = shared.answer(op, || job(shared)));
    }

    /// What a request needs that opens a directory or shows attributes. The mount's root is shown beside the turns to
    /// those alone who may give up a freeze that waits: what it shows may be outdated, and the kernel lets others in
    /// by it.
    fn to_look_at(&self, ino: Ino, uid: u32) -> Need {
        if ino == ROOT && (uid == 0 || uid == self.owner) { Need::LOOK_AT_ROOT } else { Need::LOOK }
    }

    /// Carries a change out now, or in the next turn, or after the thaw.
    fn change(self: &Arc<Self>, ino: Ino, op: &'static str, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        self.in_turn(About::Content(ino), Need::CHANGE, move |shared| shared.change_in_turn(ino, op, job));
    }

    /// The same for a change of a file's size. Until it is answered, the kernel writes none of the file's changed
    /// pages, and the end of the turn waits for these.
    fn resize(self: &Arc<Self>, ino: Ino, op: &'static str, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        self.in_turn(About::Content(ino), Need::resize(ino), move |shared| shared.change_in_turn(ino, op, job));
    }

    /// Reads pages of a mapped file. `locked`: the bytes whose pages the kernel has locked for that.
    fn read_pages(self: &Arc<Self>, ino: Ino, locked: &Range<u64>, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let Some(turns) = self.fs.join_turns(ino) else { return job(self) };
        let (asked, shared) = (self.clone(), self.clone());
        turns.read_pages(
            ino,
            locked,
            move || asked.is_written(ino),
            move |turn| {
                job(&shared);
                drop(turn);
            },
        );
    }

    /// The same for a change of attributes.
    fn change_shown(self: &Arc<Self>, ino: Ino, op: &'static str, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        self.in_turn(About::Both(ino), Need::CHANGE, move |shared| shared.change_in_turn(ino, op, job));
    }

    /// The same for a change of names, which is durable before it is answered if that is asked for
    /// ([`Shared::synced`]).
    fn change_names(self: &Arc<Self>, ino: Ino, op: &'static str, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        self.change_durably(self.syncs_names, ino, op, job);
    }

    /// The same for a change of a file's content through an open handle, of requests that carry no flags of it
    /// ([`Shared::sync_content`]).
    fn change_content(
        self: &Arc<Self>,
        (ino, handle): (Ino, HandleId),
        op: &'static str,
        job: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) {
        self.change_durably(self.is_synchronous(handle), ino, op, job);
    }

    /// A change on a thread of its own, if it waits for disks.
    fn change_durably(
        self: &Arc<Self>,
        is_durable: bool,
        ino: Ino,
        op: &'static str,
        job: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) {
        match is_durable {
            true => {
                let job = move |shared: &Arc<Self>| shared.change_in_turn(ino, op, job);
                self.in_turn_aside(About::Content(ino), Need::CHANGE, job);
            }
            false => self.change(ino, op, job),
        }
    }

    /// Makes changed directories durable, with `sync` or `dirsync`: the kernel does it for no FUSE mount. `undo`: gives
    /// back what the caller will not be told of.
    fn synced<T>(&self, dirs: &[Ino], done: Result<T>, undo: impl FnOnce(T)) -> Result<T> {
        let made = done?;
        let sync = |dir: &Ino| {
            let handle = self.fs.open_dir(*dir)?;
            let done = self.fs.fsync_dir(handle);
            done.and(self.fs.release_dir(handle))
        };
        if self.syncs_names
            && let Err(error) = dirs.iter().try_for_each(sync)
        {
            undo(made);
            return Err(error);
        }
        Ok(made)
    }

    fn synced_entry(&self, dir: Ino, made: Result<Entry>) -> Result<Entry> {
        self.synced(&[dir], made, |entry| self.fs.forget(entry.attr.ino, 1))
    }

    fn change_in_turn(self: &Arc<Self>, ino: Ino, op: &'static str, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        if let Some(_pass) = self.gate.enter() {
            self.answer(op, || job(self));
            return;
        }
        let shared = self.clone();
        self.gate.defer(ino, Box::new(move || _ = shared.serve(op, || job(&shared))));
    }

    /// Carries out a request that may run while frozen, but must not overtake waiting changes of the same inode.
    fn in_order(self: &Arc<Self>, ino: Ino, op: &'static str, job: impl FnOnce(&Self) + Send + 'static) {
        if !self.gate.holds(ino) {
            self.answer(op, || job(self));
            return;
        }
        let shared = self.clone();
        self.gate.defer(ino, Box::new(move || _ = shared.serve(op, || job(&shared))));
    }

    /// The same for a sync, which waits for disks: it does not delay other requests.
    fn sync(self: &Arc<Self>, ino: Ino, op: &'static str, job: impl FnOnce(&Self) + Send + 'static) {
        let shared = self.clone();
        self.tuning.request();
        let sync = Box::new(move || _ = shared.serve(op, || job(&shared)));
        if self.gate.holds(ino) { self.gate.defer(ino, sync) } else { self.syncs.run(sync) }
    }
}

impl<F: FileSystem> Adapter<F> {
    /// Agrees with the kernel on capabilities and limits; called once, in the handshake.
    fn negotiate(&self, config: &mut KernelConfig) {
        let mut wanted = WANTED;
        let can_expire = config.capabilities().contains(InitFlags::FUSE_HAS_EXPIRE_ONLY);
        self.0.may_keep.store(can_expire, Ordering::Relaxed);
        match self.0.cache {
            _ if self.0.fs.hosts_take_turns() => {}
            CacheMode::WriteBack => wanted |= InitFlags::FUSE_WRITEBACK_CACHE | InitFlags::FUSE_CACHE_SYMLINKS,
            CacheMode::Through => wanted |= InitFlags::FUSE_CACHE_SYMLINKS,
            CacheMode::None => {}
        }
        if guarded("keeps_acls", || self.0.fs.keeps_acls()) == Some(true) && config.capabilities().contains(ACLS) {
            wanted |= ACLS;
            self.0.acls.store(true, Ordering::Relaxed);
        }
        if self.0.fs.hosts_take_turns() {
            wanted |= InitFlags::FUSE_POSIX_LOCKS | InitFlags::FUSE_FLOCK_LOCKS;
        }
        let refused = config.add_capabilities(wanted & config.capabilities()).is_err();
        debug_assert!(!refused, "only offered capabilities are asked for");
        // An invalid value gives an error with the nearest valid one. Then the kernel's default stays, which works too.
        let _ = config.set_max_write(MAX_WRITE);
        let background = if self.0.fs.hosts_take_turns() { background_by_turns() } else { MAX_BACKGROUND };
        let _ = config.set_max_background(background);
        let _ = config.set_congestion_threshold(background / 4 * 3);
        if let Err(most) = config.set_max_readahead(MAX_WRITE) {
            let _ = config.set_max_readahead(most);
        }
        tracing::debug!(abi = ?config.kernel_abi(), missing = ?(wanted & !config.capabilities()), "FUSE handshake");
    }
}

/// See [`BACKGROUND_PART`].
fn background_by_turns() -> u16 {
    let system = rustix::system::sysinfo();
    let memory = (system.totalram as u64).saturating_mul(system.mem_unit.into());
    let most = memory / BACKGROUND_PART / u64::from(MAX_WRITE);
    u16::try_from(most).unwrap_or(u16::MAX).max(MAX_BACKGROUND)
}

/// Runs a handler; a panic in it becomes a log line, and the dropped reply answers `EIO`.
fn guarded<T>(op: &'static str, body: impl FnOnce() -> T) -> Option<T> {
    // Unwind safety: a panic here leaves nothing half-changed that the handlers share (locks are held over plain map
    // updates). The file system below keeps its own invariants.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(value) => Some(value),
        Err(payload) => {
            let text = payload.downcast_ref::<&str>().copied().map(str::to_owned);
            let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
            counts::note_failure();
            tracing::error!(op, panic = text, "a bug: the request handler panicked; the request fails with EIO");
            None
        }
    }
}

/// The errno to reply with. Errors that concern an administrator are logged.
fn failed(op: &'static str, error: &VaultError) -> Errno {
    let errno = errno_of(error);
    if errno != libc::ENODATA {
        counts::note_failure();
    }
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
