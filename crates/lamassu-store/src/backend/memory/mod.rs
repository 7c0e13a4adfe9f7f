//! A backing store in memory, for tests: a whole tree with the semantics of a local file system of Linux, as root
//! sees it (permission bits are kept, not obeyed). `allocate` reserves nothing; access times change only when set.
//!
//! Changes pass through one lock, in one order, and an observer sees each of them in that order. The recording backend
//! is built on this.

mod content;
mod handle;
mod tree;

pub use content::PAGE_BYTES;
pub(in crate::backend) use content::{Content, LEN_MAX, Page, Part, parts, written, zeroed};
pub use tree::{AttributeOp, NamespaceOp, NewNode, Numbers, ROOT_INO};
pub(in crate::backend) use tree::{Body, Node, Tree};

use super::{Backend, BackendDir, StatFs, Time};
use handle::{Handle, MemoryDir};
use parking_lot::RwLock;
use rustix::io::Errno;
use std::any::Any;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// What a barrier covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barrier {
    /// fdatasync of a file.
    Data(u64),
    /// fsync of a file.
    All(u64),
    /// fsync of a directory.
    Dir(u64),
    /// syncfs.
    Store,
}

/// Sees every change that succeeded, in order, under the lock of the tree.
pub(in crate::backend) trait Observer: Send + Sync {
    fn namespace(&self, op: NamespaceOp, now: Time);
    fn attribute(&self, ino: u64, op: AttributeOp, now: Time);
    fn write(&self, ino: u64, offset: u64, data: &[u8], now: Time);
    /// `present` are the numbers, ascending, of the pages that were no holes before.
    fn punch(&self, ino: u64, offset: u64, len: u64, present: Vec<u64>, now: Time);
    fn set_len(&self, ino: u64, len: u64, now: Time);
    /// A barrier; an error is what the caller of the sync gets.
    fn barrier(&self, barrier: Barrier) -> io::Result<()>;
}

enum Clock {
    System,
    /// Nanoseconds since 2000, one per operation.
    Counting(AtomicU64),
}

impl Clock {
    fn now(&self) -> Time {
        match self {
            Clock::System => {
                // A clock before 1970 is no reason for a test store to fail.
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                Time { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() }
            }
            Clock::Counting(ticks) => {
                let tick = ticks.fetch_add(1, Ordering::Relaxed);
                Time { seconds: 946_684_800 + (tick / 1_000_000_000) as i64, nanos: (tick % 1_000_000_000) as u32 }
            }
        }
    }
}

struct Live {
    tree: Tree,
    /// Handles per inode.
    open: HashMap<u64, u64>,
}

struct Shared {
    live: RwLock<Live>,
    clock: Clock,
    observer: Option<Arc<dyn Observer>>,
    /// The only lock: all names are the same lock.
    locked: Arc<AtomicBool>,
}

/// Holds the lock of a memory backend.
struct Locked(Arc<AtomicBool>);

impl Drop for Locked {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// A tree in memory.
pub struct MemoryBackend {
    shared: Arc<Shared>,
}

impl Default for MemoryBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryBackend {
    /// An empty store, with the time of this host.
    pub fn new() -> MemoryBackend {
        Self::from_tree(Tree::new(Clock::System.now()))
    }

    /// The same, with another policy for inode numbers.
    pub fn with_numbers(numbers: Numbers) -> MemoryBackend {
        let mut tree = Tree::new(Clock::System.now());
        tree.numbers = numbers;
        Self::from_tree(tree)
    }

    /// A copy of this very moment, as an atomic snapshot takes it; files without a name are not in it. Costs little:
    /// contents are shared.
    pub fn snapshot(&self) -> MemoryBackend {
        Self::from_tree(self.tree())
    }

    pub(in crate::backend) fn tree(&self) -> Tree {
        let mut tree = self.shared.live.read().tree.clone();
        tree.free_orphans();
        tree
    }

    pub(in crate::backend) fn from_tree(tree: Tree) -> MemoryBackend {
        Self::build(tree, Clock::System, None)
    }

    /// A store that begins as `tree`, with a clock that counts operations, and whose every change `observer` sees.
    pub(in crate::backend) fn observed(tree: Tree, observer: Arc<dyn Observer>) -> MemoryBackend {
        Self::build(tree, Clock::Counting(AtomicU64::new(0)), Some(observer))
    }

    fn build(tree: Tree, clock: Clock, observer: Option<Arc<dyn Observer>>) -> MemoryBackend {
        let live = RwLock::new(Live { tree, open: HashMap::new() });
        MemoryBackend { shared: Arc::new(Shared { live, clock, observer, locked: Arc::default() }) }
    }
}

impl Backend for MemoryBackend {
    fn root(&self) -> Arc<dyn BackendDir> {
        Arc::new(MemoryDir(Handle::open(&self.shared, &mut self.shared.live.write(), ROOT_INO)))
    }

    fn stat_fs(&self) -> io::Result<StatFs> {
        const BLOCKS: u64 = 1 << 28;
        const FILES: u64 = 1 << 32;
        let live = self.shared.live.read();
        Ok(StatFs {
            block_size: PAGE_BYTES,
            blocks: BLOCKS,
            blocks_free: BLOCKS,
            blocks_available: BLOCKS,
            files: FILES,
            files_free: FILES - live.tree.next_ino(),
            name_max: 255,
            fs_type: 0,
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.shared.barrier(Barrier::Store)
    }

    fn try_lock(&self, _name: &OsStr) -> io::Result<Box<dyn Any + Send + Sync>> {
        let locked = &self.shared.locked;
        match locked.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(Box::new(Locked(locked.clone()))),
            Err(_) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

impl Shared {
    fn barrier(&self, barrier: Barrier) -> io::Result<()> {
        let Some(observer) = &self.observer else { return Ok(()) };
        // The lock orders the barrier among the changes.
        let _ordered = self.live.write();
        observer.barrier(barrier)
    }

    /// Applies and reports an operation on names, which `form` makes from the tree.
    fn namespace(&self, form: impl FnOnce(&Tree) -> io::Result<NamespaceOp>) -> io::Result<()> {
        self.apply_namespace(&mut self.live.write(), form)
    }

    fn apply_namespace(&self, live: &mut Live, form: impl FnOnce(&Tree) -> io::Result<NamespaceOp>) -> io::Result<()> {
        let op = form(&live.tree)?;
        let now = self.clock.now();
        let gone = live.tree.apply_namespace(&op, now)?;
        if let Some(ino) = gone.filter(|ino| !live.open.contains_key(ino)) {
            live.tree.free_orphan(ino);
        }
        if let Some(observer) = &self.observer {
            observer.namespace(op, now);
        }
        Ok(())
    }

    fn attribute(&self, ino: u64, form: impl FnOnce(&Node, Time) -> io::Result<AttributeOp>) -> io::Result<()> {
        let mut live = self.live.write();
        let now = self.clock.now();
        let op = form(live.tree.get(ino).ok_or(Errno::NOENT)?, now)?;
        live.tree.apply_attribute(ino, &op, now);
        if let Some(observer) = &self.observer {
            observer.attribute(ino, op, now);
        }
        Ok(())
    }

    /// Changes the bytes of an open file and reports it, with what the change answered.
    fn change<T>(
        &self,
        ino: u64,
        change: impl FnOnce(&mut Content) -> io::Result<T>,
        report: impl FnOnce(&dyn Observer, T, Time),
    ) -> io::Result<()> {
        let mut live = self.live.write();
        let node = live.tree.get_mut(ino).ok_or(Errno::BADF)?;
        let Body::File(content) = &mut node.body else { return Err(Errno::BADF.into()) };
        let answer = change(content)?;
        let now = self.clock.now();
        node.touch(now);
        if let Some(observer) = &self.observer {
            report(&**observer, answer, now);
        }
        Ok(())
    }

    /// Gives back a handle.
    fn closed(&self, ino: u64) {
        let mut live = self.live.write();
        if let Some(count) = live.open.get_mut(&ino) {
            *count -= 1;
            if *count == 0 {
                live.open.remove(&ino);
                live.tree.free_orphan(ino);
            }
        }
    }
}
