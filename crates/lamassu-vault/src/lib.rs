//! The Lamassu file system without a kernel: tree, names, inodes, extended attributes, check.
//!
//! Front-ends (FUSE, the command line, gateways) call a [`Vault`]; it never names any of them. It guarantees what a
//! local file system does, with the durability that `lamassu-store` gives each file; it never follows a symbolic link
//! and never leaves the directory the vault lies in.
//!
//! # Modules
//!
//! | module | what it does |
//! |---|---|
//! | `types`, `options`, `error`, `errno`, `file_system` | types and errors of the API; how a vault is opened; the trait that front-ends call |
//! | `tree`, `rename`, `symlink` | make, find, rename, remove entries; links |
//! | `path`, `reference` | paths; guards of references to entries and of open files, for callers other than the kernel |
//! | `listing`, `dir` | snapshots of directories; listings |
//! | `inode`, `target`, `ownership`, `wanted`, `attr` | the table of inodes; what an operation acts on; whose that is; what a new entry has; stat |
//! | `attr_value`, `xattr`, `acl` | extended attributes, as stored and as shown; access control lists |
//! | `handles`, `open` | open files and handles; operations on them |
//! | `nameless`, `settle`, `room` | files without a name; commit, settle, fsync; calls that a full store refused |
//! | `names`, `dirs`, `record` | stored names and companions; open directories; sealed records |
//! | `root`, `session` | the records of the root's permissions and of sessions |
//! | `stored` | steps on entries of the store that know nothing of a vault |
//! | `staging` | where entries are made, and deleted, out of reach of other users |
//! | `digests` | what an anchor compares |
//! | `anchored`, `anchor` | what the vault's anchor says, and what it is told (`docs/freshness.md`); the public part of it |
//! | `turns`, `left`, `locks` | turns of several hosts: waiting requests; numbers and handles from turn to turn; locks of programs (`docs/sharing.md`) |
//! | `gate`, `admission`, `upkeep` | how `freeze` and `close` wait for changes; work in the background |
//! | `event` | integrity events: counted, logged, delivered |
//! | `walk`, `regions`, `check`, `rekey`, `moved` | walks over the whole tree: sizes, datasets; verify and repair; re-keying; what is moved meanwhile |
//! | `scrub` | the whole store against the anchor, without keys |
//! | `detached` | files outside the vault's directory, each by itself: sealed and opened as a stream |
//! | `dataset`, `forest` | directories that are vaults of their own; several vaults as one file system |
//!
//! # Order of locks
//!
//! A thread takes them in this order, each at most once, and may leave out any:
//!
//! 1. `Forest::changing`, a member's `opening`, `Forest::opens`, then `Forest::table` or `crossings`
//! 2. `Vault::rekeying`, `Vault::left`
//! 3. `Vault::closing`: the gate is being closed, or is closed
//! 4. `Vault::gate`: a change holds a pass. Taken before every other lock of a change
//! 5. `Vault::open_locks`: opening an inode, by number
//! 6. `Vault::tree`: shared to find an entry by a name or number, exclusive to change where entries are found
//! 7. `Vault::names_locks`: changes within one directory
//! 8. `Vault::workshop`, or `Anchored::attrs_locks`: the attributes of one node
//! 9. `Vault::settling`: one pass of commits and barriers, never taken by a thread that holds `tree`; `Vault::barriers`
//! 10. the lock of a `lamassu_store::File`, and of the records in `root` and `session`
//! 11. what a walk over the tree was told (`moved`)
//! 12. `Vault::nodes`, then the cache in `dirs`
//!
//! All others (tables of files and handles, `unsynced`, `shut`, `overfull`, …) are held for one access, and no other
//! lock is taken under them, except that of `room`, which is taken under any.

mod acl;
mod admission;
pub mod anchor;
mod anchored;
mod attr;
mod attr_value;
pub mod check;
mod dataset;
pub mod detached;
mod digests;
mod dir;
mod dirs;
mod errno;
mod error;
pub mod event;
mod file_system;
pub mod forest;
mod gate;
mod handles;
mod inode;
mod left;
mod listing;
pub mod locks;
mod moved;
mod nameless;
mod names;
mod open;
mod options;
mod ownership;
mod path;
mod record;
mod reference;
mod regions;
mod rekey;
mod rename;
mod room;
mod root;
pub mod scrub;
mod session;
mod settle;
mod staging;
mod stored;
mod symlink;
mod target;
mod tree;
pub mod turns;
pub mod types;
mod upkeep;
pub mod walk;
mod wanted;
mod xattr;

pub use dataset::{Dataset, Sighted};
pub use errno::errno_of;
pub use file_system::FileSystem;
#[cfg(feature = "testing")]
pub use file_system::{Overheard, Panics};
pub use forest::Forest;
pub use lamassu_store::Hole;
pub use left::Left;
pub use options::{Freshness, Options};
pub use reference::{EntryRef, OpenEntry, each_name, read_full, write_all};
pub use regions::{Region, datasets_below, has_dataset, regions, stored_bytes};
pub use rekey::{KnownProfile, Rekey, RekeyProgress, Rekeyed, Walk};
pub use root::create_root_record;
pub use session::{
    accept_sessions, copy_sessions, has_interrupted_sessions, last_session, shown_ranges, verify_sessions,
};
pub use types::{
    Access, Attr, DirEntry, Durability, Entry, Fallocate, HandleId, Ino, Integrity, Kind, Owner, Permissions, ROOT,
    RenameMode, Result, SetAttr, SetTime, SetXattr, Sought, StatFs, Time, VaultError, Whence,
};
pub use upkeep::{Upkeep, keep_up};
pub use xattr::is_listed_for;

use crate::anchored::Anchored;
use crate::error::io;
use lamassu_anchor::{AnchorError, ObjectId, VaultRow};
use lamassu_crypto::compress::{is_of_other_version, version_of};
use lamassu_crypto::{Engine, KeyRing};
use lamassu_format::Profile;
use lamassu_format::header::{NameMode, VaultHeader};
use lamassu_format::name::LOCK;
use lamassu_store::backend::fenced;
use lamassu_store::file::{AnchoredFiles, Sessions};
use lamassu_store::{Backend, BackendFile, File, FileContext};
use parking_lot::{Mutex, RwLock};
use std::any::Any;
use std::ffi::OsStr;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Most directories held open, and most closed files held until they are settled; fewer if the process may have few
/// descriptors.
const DIRS_MAX: usize = 1024;
const IDLE_MAX: usize = 512;
const HELD_MIN: usize = 32;
/// Number of locks for directories, and for inodes that are being opened; each is shared by several.
const STRIPES: usize = 64;

/// An open vault. Methods take `&self` and may be called from many threads.
pub struct Vault {
    backend: Arc<dyn Backend>,
    /// For files opened for writing, and for those opened for reading alone.
    ctx: Arc<FileContext>,
    ctx_read: Arc<FileContext>,
    /// For files that report no events: the caller interprets what it finds.
    ctx_silent: Arc<FileContext>,
    options: Options,
    name_mode: NameMode,
    name_max: usize,
    /// Whether directories of the tree may be roots of vaults of their own.
    datasets: AtomicBool,
    shut: dataset::Shut,
    nodes: Mutex<inode::NodeTable>,
    dirs: dirs::Dirs,
    files: handles::OpenFiles,
    handles: handles::Handles,
    /// Handles of the vault before this one.
    left: left::LeftHandles,
    nameless: nameless::Nameless,
    idle_max: usize,
    gate: gate::Gate,
    /// Held shared to find entries, exclusively to change where entries are found (see `tree`).
    tree: RwLock<()>,
    names_locks: [RwLock<()>; STRIPES],
    open_locks: [Mutex<()>; STRIPES],
    settling: Mutex<()>,
    staging: OnceLock<staging::Staging>,
    workshop: Mutex<Option<staging::Workshop>>,
    /// Held while the gate is closed or being closed.
    closing: Mutex<()>,
    /// Since when everything has been settled; 0: it is not.
    quiet_since: AtomicU64,
    book: Arc<session::Book>,
    /// `None`: an unanchored vault.
    anchored: Option<anchored::Anchored>,
    root_permissions: Arc<root::RootPermissions>,
    /// One re-keying at a time.
    rekeying: Mutex<()>,
    /// What is moved while a walk over the tree is under way.
    moved: moved::Watching,
    unsynced: settle::Unsynced,
    /// Held while the store syncs, and while its failure is noted in files.
    barriers: settle::Barriers,
    /// Bytes written since the buffers were last added up.
    written: AtomicU64,
    /// Set while the buffers exceed their limit.
    overfull: Mutex<Option<settle::Overfull>>,
    room: room::Room,
    started: Instant,
    closed: AtomicBool,
    lock: Mutex<Option<Lock>>,
    parting: Mutex<Option<Parting>>,
}

/// A callback at the end.
type Parting = Box<dyn FnOnce() + Send>;

impl Vault {
    /// Makes the tree of a new vault below `backend`: the root's record and the staging directory. The header is the
    /// caller's to write, last: without it there is no vault.
    ///
    /// # Errors
    /// [`VaultError::Exists`] if a tree is there already, those of the store.
    pub fn make_tree(backend: &dyn Backend, header: &VaultHeader, ring: &KeyRing) -> Result<()> {
        let root = backend.root();
        if header.names() == NameMode::Encrypted {
            names::create_record(ring, &*root, Profile::DEFAULT)?;
        }
        session::create(&*root, ring, &header.id())?;
        match root.make_dir(OsStr::new(lamassu_format::name::STAGING), 0o700) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(io("create lamassu.staging")(e)),
            _ => {}
        }
        root.sync().map_err(io("sync the root"))
    }

    /// Opens the tree below `backend` with loaded keys. The root inode is [`ROOT`]. Not read-only: takes the writer's
    /// lock, clears the staging directory.
    ///
    /// # Errors
    /// [`VaultError::Locked`], [`VaultError::Refused`] for `metadata` integrity with a malleable suite or a snapshot
    /// not opened read-only, those of the store. If the record of the root does not open, the calls that need it fail,
    /// not this one, so that `check` can report it; [`Vault::verify_root`] checks it.
    pub fn open(backend: Arc<dyn Backend>, header: &VaultHeader, ring: KeyRing, options: Options) -> Result<Vault> {
        let engine = engine(&options);
        Self::open_with(backend, header, ring, options, engine, root::Top::FileSystem)
    }

    /// The same with cipher threads that other vaults use too.
    pub(crate) fn open_with(
        backend: Arc<dyn Backend>,
        header: &VaultHeader,
        ring: KeyRing,
        mut options: Options,
        engine: Arc<Engine>,
        top: root::Top,
    ) -> Result<Vault> {
        options.events = options.events.of_vault(&header.id()).while_good(options.anchor.as_ref());
        check_header(header, &options)?;
        let lock = if options.read_only { None } else { lock_to_write(&*backend, &options)? };
        let backend = match &options.anchor {
            Some(anchor) => fenced(backend, anchor),
            None => backend,
        };
        let root = backend.root();
        let book = Arc::new(session::Book::open(root.clone(), ring.clone(), header.id(), options.anchor.clone()));
        let sessions = Arc::new(Sessions::new(book.clone()));
        let root_permissions =
            root::RootPermissions::open(root.clone(), ring.clone(), top, options.anchor.clone(), &options.events);
        let root_permissions = Arc::new(root_permissions);
        let anchored = options.anchor.clone().map(|anchor| Anchored::new(anchor, root.clone(), options.read_only));
        let files = anchored.as_ref().map(|anchored| anchored.files.clone());
        let (ctx, ctx_read) = contexts(header, ring, &options, engine, sessions, files)?;
        let ctx_silent = Arc::new(FileContext { report: Arc::new(|_, _| true), ..(*ctx_read).clone() });
        let st = root.stat().map_err(io("stat the root"))?;
        let by_hosts = is_server_held(&options);
        let limit = descriptors() / 8;
        let dirs_max = NonZeroUsize::new(limit.clamp(HELD_MIN, DIRS_MAX)).unwrap_or(NonZeroUsize::MIN);
        let vault = Vault {
            backend,
            ctx,
            ctx_read,
            ctx_silent,
            options,
            name_mode: header.names(),
            name_max: header.name_max(),
            datasets: AtomicBool::new(header.has_datasets()),
            shut: dataset::Shut::default(),
            nodes: Mutex::new(inode::NodeTable::new(&st, by_hosts)),
            dirs: dirs::Dirs::new(dirs::Dir::new(ROOT, st.dev, ObjectId::ROOT, root), dirs_max),
            files: handles::OpenFiles::default(),
            handles: handles::Handles::default(),
            left: left::LeftHandles::default(),
            nameless: nameless::Nameless::default(),
            idle_max: limit.clamp(HELD_MIN, IDLE_MAX),
            gate: gate::Gate::default(),
            tree: RwLock::new(()),
            names_locks: std::array::from_fn(|_| RwLock::new(())),
            open_locks: std::array::from_fn(|_| Mutex::new(())),
            settling: Mutex::new(()),
            staging: OnceLock::new(),
            workshop: Mutex::new(None),
            closing: Mutex::new(()),
            quiet_since: AtomicU64::new(0),
            book,
            anchored,
            root_permissions,
            rekeying: Mutex::new(()),
            moved: moved::Watching::default(),
            unsynced: settle::Unsynced::default(),
            barriers: settle::Barriers::default(),
            written: AtomicU64::new(0),
            overfull: Mutex::new(None),
            room: room::Room::default(),
            started: Instant::now(),
            closed: AtomicBool::new(false),
            lock: Mutex::new(lock),
            parting: Mutex::new(None),
        };
        // An older anchor must not serve anything: the changes that it has as pending were completed long ago.
        vault.book.is_newest()?;
        if !vault.options.read_only {
            // Makes durable what an earlier process left in the page cache: `lamassu_store::file` relies on it.
            vault.backend.sync().map_err(io("sync the store"))?;
            vault.root_permissions.settle()?;
            vault.clear_staging()?;
            vault.recover_names()?;
            vault.tell_interrupted();
        }
        Ok(vault)
    }

    /// Opens the record of the root, without which no name in the tree opens, and that of sessions, without which
    /// nothing is written. For callers that are about to serve the vault.
    ///
    /// # Errors
    /// [`VaultError::Damaged`], which names the record.
    pub fn verify_root(&self) -> Result<()> {
        self.names(self.dirs.root())?;
        // A reader does not need the newest record: each object is judged by the anchor.
        if self.options.read_only { Ok(()) } else { self.verify_sessions() }
    }

    /// Checks the record of the root's permissions. An outdated one does not lock users out: until it is accepted, only
    /// the user of this process may use the root.
    ///
    /// # Errors
    /// [`VaultError::Outdated`] in an anchored vault.
    pub fn verify_root_permissions(&self) -> Result<()> {
        match self.root_permissions.is_stale() {
            true => Err(self.outdated_at("root permissions", lamassu_format::name::ROOT_RECORD.to_owned())),
            false => Ok(()),
        }
    }

    /// Sets a callback that [`Vault::close`] calls once, when everything is in the store and the writer's lock is still
    /// held.
    pub fn at_close(&self, parting: impl FnOnce() + Send + 'static) {
        *self.parting.lock() = Some(Box::new(parting));
    }

    /// Commits, settles and closes everything, releases the lock. Handles are invalid after it. A second call does
    /// nothing.
    ///
    /// # Errors
    /// The first thing that could not be committed; everything is closed nevertheless.
    pub fn close(&self) -> Result<()> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // No new change starts; changes under way end first.
        let closing = self.closing.lock();
        self.gate.open();
        self.gate.close();
        let done = match self.options.read_only {
            true => Ok(()),
            false => self.settle_twice(|vault| vault.settle_all().and_then(|()| vault.sync_store())),
        };
        if done.is_ok() {
            self.end_session_for_good();
        }
        if !self.options.read_only {
            self.close_workshop();
        }
        if self.anchored.as_ref().is_some_and(|anchored| anchored.take_unsettled().is_some()) {
            tracing::warn!("the store has not shown whether it made a rename: that is found out at the next opening");
        }
        self.handles.clear();
        self.nameless.clear();
        self.files.clear();
        self.dirs.clear();
        lamassu_store::file::wipe_spare();
        let parting = self.parting.lock().take();
        if let Some(parting) = parting {
            parting();
        }
        *self.lock.lock() = None;
        self.gate.open();
        drop(closing);
        done
    }

    pub(crate) fn engine(&self) -> Arc<Engine> {
        self.ctx.engine.clone()
    }

    /// Whether the keys of new blocks depend on a server.
    pub fn waits_for_keys(&self, _: Ino) -> bool {
        self.ctx.ring.inner().oblivious().is_some()
    }

    /// The loaded keys. They can gain epochs while the vault is open: [`KeyRing::add`].
    pub fn ring(&self) -> &KeyRing {
        &self.ctx.ring
    }

    /// The result of a read, if it is still valid when the call ends (R4 of `docs/sharing.md`): another host may have
    /// changed the vault meanwhile. An error that says whether an entry exists is a result, too.
    fn read_current<T>(&self, read: impl FnOnce() -> Result<T>) -> Result<T> {
        let done = read();
        self.verify_current()?;
        done
    }

    fn verify_current(&self) -> Result<()> {
        self.anchored.as_ref().map_or(Ok(()), |anchored| Ok(anchored.anchor.wait_until_good()?))
    }

    /// The options it was opened with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Whether other hosts may use the vault in turn: its anchor is at a server.
    pub(crate) fn is_shared_by_hosts(&self) -> bool {
        is_server_held(&self.options)
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.options.read_only
    }

    /// Milliseconds since the vault was opened, from 1.
    fn now(&self) -> handles::Millis {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }

    fn names_of(&self, dir: Ino) -> &RwLock<()> {
        &self.names_locks[(dir % STRIPES as u64) as usize]
    }

    fn opening(&self, ino: Ino) -> &Mutex<()> {
        &self.open_locks[(ino % STRIPES as u64) as usize]
    }
}

impl Drop for Vault {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(%error, "the vault was dropped and could not be committed");
        }
    }
}

/// Reads one file without its vault's tree: an orphan, a single file out of a backup. Its name and its directory are
/// not needed.
///
/// # Errors
/// [`VaultError::Refused`] as for [`Vault::open`], those of the store.
pub fn open_orphan(
    backing: Arc<dyn BackendFile>,
    header: &VaultHeader,
    ring: KeyRing,
    options: &Options,
    tag: &str,
) -> Result<File> {
    let sessions = Arc::new(Sessions::of_stray_file());
    let (ctx, ctx_read) = contexts(header, ring, options, engine(options), sessions, None)?;
    Ok(File::open(if options.read_only { ctx_read } else { ctx }, backing, tag)?)
}

/// Refuses to open a snapshot for writing, and a vault with other properties than its anchor has.
fn check_header(header: &VaultHeader, options: &Options) -> Result<()> {
    if header.is_snapshot() && !options.read_only {
        return Err(VaultError::Refused(
            "this vault is a snapshot, which is never written; `lamassu clone` makes a copy to work in",
        ));
    }
    if let Some(anchored) = &options.anchor {
        let VaultRow { suite, domain, .. } = anchored.vault();
        if (suite, domain) != (header.params().suite, header.params().domain) {
            return Err(AnchorError::OtherProperties { suite, domain }.into());
        }
    }
    Ok(())
}

/// A lock that a vault holds while it is open.
type Lock = Box<dyn Any + Send + Sync>;

/// Whether the anchor is at a server, so that other hosts may use the vault, too.
fn is_server_held(options: &Options) -> bool {
    options.anchor.as_ref().is_some_and(|anchor| anchor.may_end())
}

/// The writer's lock. `None`: another host may hold it whose session has ended, where the anchor's server decides which
/// host writes.
fn lock_to_write(backend: &dyn Backend, options: &Options) -> Result<Option<Lock>> {
    match take_lock(backend) {
        Err(VaultError::Locked) if is_server_held(options) => Ok(None),
        lock => lock.map(Some),
    }
}

/// The writer's lock, on [`LOCK`] and on the staging directory: people delete the file when they are told that another
/// writer has the vault open.
fn take_lock(backend: &dyn Backend) -> Result<Lock> {
    backend.try_lock(OsStr::new(LOCK)).map_err(|e| match e.kind() {
        std::io::ErrorKind::WouldBlock => VaultError::Locked,
        // The store made it. It is not a path of a user.
        _ if matches!(
            e.raw_os_error(),
            Some(libc::EINVAL | libc::EISDIR | libc::ENOTDIR | libc::ELOOP | libc::ENOENT)
        ) =>
        {
            VaultError::Io {
                op: "lock the vault (lamassu.lock has to be a file, lamassu.staging a directory)",
                source: e,
            }
        }
        _ => io("lock the vault")(e),
    })
}

/// The cipher threads of a vault.
fn engine(options: &Options) -> Arc<Engine> {
    if let Some(device) = &options.device {
        return Arc::new(Engine::with_device(device.clone()));
    }
    let threads = match options.threads {
        0 => std::thread::available_parallelism().map_or(1, NonZeroUsize::get),
        n => n,
    };
    Arc::new(Engine::new(threads))
}

/// The context that all files share: as the vault was opened, and read-only.
fn contexts(
    header: &VaultHeader,
    ring: KeyRing,
    options: &Options,
    engine: Arc<Engine>,
    sessions: Arc<Sessions>,
    anchored: Option<Arc<AnchoredFiles>>,
) -> Result<(Arc<FileContext>, Arc<FileContext>)> {
    if options.integrity == Integrity::Metadata && header.suite().is_malleable() {
        return Err(VaultError::Refused(
            "metadata integrity is not offered for this suite: its cipher is malleable; use --integrity full",
        ));
    }
    if let Some(compression) = header.compression().filter(|c| is_of_other_version(*c) && !options.read_only) {
        let (vault, here) = (compression.version(), version_of(compression.codec()));
        tracing::warn!(
            codec = compression.codec().name(), %vault, %here,
            "the vault names another release of its codec than this program has: what is written now may not deduplicate \
             with equal older blocks"
        );
    }
    let context = |read_only| {
        Arc::new(FileContext {
            ring: ring.clone(),
            geometry: header.geometry(),
            engine: engine.clone(),
            integrity: options.integrity,
            durability: options.durability,
            domain: header.domain(),
            compression: header.compression(),
            convergent_small_files: header.convergent_small_files(),
            read_only,
            approved_only: options.approved_only,
            sessions: sessions.clone(),
            anchored: anchored.clone(),
            report: options.events.reporter(),
        })
    };
    Ok((context(options.read_only), context(true)))
}

/// How many descriptors this process may have.
fn descriptors() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
}
