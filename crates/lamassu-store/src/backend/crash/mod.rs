//! A store that records every change, and from the record rebuilds what a crash can leave of it.
//!
//! [`CrashBackend`] is a store in memory whose [`CrashLog`] holds, in order, every change and every barrier.
//! [`CrashSim`] answers two questions:
//!
//! * **Kill, or atomic snapshot**, after any record: [`CrashSim::prefixes`]. All changes so far, none later.
//! * **Power cut** after any record: [`CrashSim::at`], then [`CrashPoint::random_state`]. What barriers covered is
//!   kept; the rest is as the model below allows.
//!
//! Everything is deterministic: the same workload gives the same log, the same log, index and seed the same state.
//!
//! # The model of a power cut
//!
//! *Pieces.* A write of a file is recorded in pieces: with granularity G (a power of two, 4096 unless set), every
//! aligned range of G bytes that one call covers entirely is one piece, even if the call covers several. If a call ends
//! within such a range, the covered beginning of the range is one piece. The rest is cut at 4096-byte borders. A punch
//! is cut in the same way, but without such beginnings, and only where there was no hole. A piece is applied wholly or
//! not at all. A prefix, too, ends between pieces.
//!
//! *Barriers.* `sync_data` and `sync_all` of a file cover all earlier pieces and lengths of that file.
//! `Backend::sync` covers everything. A sync of a directory covers no bytes of files. Covered changes are all
//! applied.
//!
//! *Bytes not covered.* Each 4096-byte page is independent of its neighbours (so writes are dropped and reordered): it
//! has the state after some number of the changes that touched it, from the covered ones only to all of them. Changes
//! of one page are never reordered, as a page cache holds one image of it. A piece of more than one page is in all of
//! its pages or in none.
//!
//! *Length.* The uncovered `set_len` calls of a file are applied up to some number of them, in order (one field of an
//! inode). An applied call holds for every page that it cut or zeroed. A call that was not applied leaves old bytes,
//! even next to pages written after it. The length is that of the last applied `set_len`, or else the covered one,
//! grown to the end of every later write that was applied.
//!
//! *Names.* Operations on names happen in one order; a crash loses a suffix of it, never more than is not durable. An
//! operation is durable, with all earlier ones, once one of its directories was synced after it (for a creation: the
//! parent), or after `Backend::sync`, or, for the creation of a file, after a sync of the file. A file whose creation
//! is lost loses its bytes; a file whose removal is lost has them.
//!
//! *Attributes* (mode, owner, times, extended attributes) of each inode are applied up to some number of them, in
//! order. `sync_all` of a file, a sync of the directory itself and `Backend::sync` cover them.
//!
//! *Failed barriers* ([`CrashBackend::fail_syncs`]) behave as in Linux: the error is reported once, and the pages
//! that were to be written are then taken for clean. A later barrier that succeeds does not cover them, until they
//! are written anew.

mod dirty;
mod recorder;
mod sim;
#[cfg(test)]
mod tests;

pub use sim::{CrashPoint, CrashSim};

use super::memory::{AttributeOp, Barrier, MemoryBackend, NamespaceOp, PAGE_BYTES, Tree};
use super::{Backend, BackendDir, StatFs, Time};
use recorder::Recorder;
use std::any::Any;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;

/// One thing that happened to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Names changed.
    Namespace(NamespaceOp),
    /// Attributes of an inode changed.
    Attribute(u64, AttributeOp),
    /// One piece of a write.
    Write {
        /// Inode.
        ino: u64,
        /// Bytes from the start of the file.
        offset: u64,
        /// The bytes written.
        data: Arc<[u8]>,
    },
    /// One piece of a punch.
    Punch {
        /// Inode.
        ino: u64,
        /// Bytes from the start of the file.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// A length was set.
    SetLen {
        /// Inode.
        ino: u64,
        /// Bytes.
        len: u64,
    },
    /// A barrier that succeeded.
    Barrier(Barrier),
    /// A barrier that failed.
    FailedBarrier(Barrier),
}

impl Op {
    /// Whether it changes what a reader sees; barriers do not.
    pub fn is_change(&self) -> bool {
        !matches!(self, Op::Barrier(_) | Op::FailedBarrier(_))
    }
}

/// An operation and when it happened, by the clock of the store.
#[derive(Clone, Debug)]
pub struct Record {
    /// The operation.
    pub op: Op,
    /// Its time.
    pub time: Time,
}

/// The records up to some moment, and the state at the beginning.
#[derive(Clone)]
pub struct CrashLog {
    base: Tree,
    granularity: u64,
    records: Arc<[Record]>,
}

impl CrashLog {
    /// All records, in order.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// The log with changed records, as if the store had been used in another way: for tests that prove that a
    /// simulation finds mistakes. Operations on names must stay in order.
    pub fn edited(&self, edit: impl FnOnce(&mut [Record])) -> CrashLog {
        let mut records = self.records.to_vec();
        edit(&mut records);
        CrashLog { records: records.into(), ..self.clone() }
    }
}

/// A store in memory that records.
pub struct CrashBackend {
    memory: MemoryBackend,
    recorder: Arc<Recorder>,
    base: Tree,
}

impl Default for CrashBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl CrashBackend {
    /// An empty store that writes 4096 bytes atomically.
    pub fn new() -> CrashBackend {
        Self::with_granularity(PAGE_BYTES)
    }

    /// An empty store that writes aligned blocks of `granularity` bytes atomically: a power of two, at least 4096.
    pub fn with_granularity(granularity: u64) -> CrashBackend {
        Self::over(&MemoryBackend::new(), granularity)
    }

    /// A store that begins as a copy of `base`, all of it durable. So a crash during recovery from a crash can be
    /// simulated.
    ///
    /// # Panics
    /// If `granularity` is no power of two, or below 4096.
    pub fn over(base: &MemoryBackend, granularity: u64) -> CrashBackend {
        assert!(granularity.is_power_of_two() && granularity >= PAGE_BYTES, "granularity {granularity}");
        let base = base.tree();
        let recorder = Arc::new(Recorder::new(granularity));
        CrashBackend { memory: MemoryBackend::observed(base.clone(), recorder.clone()), recorder, base }
    }

    /// The next `count` syncs of any kind fail with `errno`, and what they should have covered stays at risk (see the
    /// module).
    pub fn fail_syncs(&self, count: u64, errno: i32) {
        self.recorder.fail_syncs(count, errno);
    }

    /// Records so far.
    pub fn position(&self) -> usize {
        self.recorder.len()
    }

    /// The record up to now.
    pub fn log(&self) -> CrashLog {
        CrashLog { base: self.base.clone(), granularity: self.recorder.granularity, records: self.recorder.records() }
    }

    /// The store as it is, as an atomic snapshot sees it.
    pub fn snapshot(&self) -> MemoryBackend {
        self.memory.snapshot()
    }
}

impl Backend for CrashBackend {
    fn root(&self) -> Arc<dyn BackendDir> {
        self.memory.root()
    }

    fn stat_fs(&self) -> io::Result<StatFs> {
        self.memory.stat_fs()
    }

    fn sync(&self) -> io::Result<()> {
        self.memory.sync()
    }

    fn try_lock(&self, name: &OsStr) -> io::Result<Box<dyn Any + Send + Sync>> {
        self.memory.try_lock(name)
    }
}
