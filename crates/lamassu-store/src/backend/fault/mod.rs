//! A wrapper around any backend that counts calls and makes chosen ones fail.
//!
//! Every call passes through [`Faults`]: it is counted, then each rule is asked in the order given; the first that
//! answers decides. A call that fails never reaches the store below, except a torn write, of which a beginning does.
//! Rules see the number of the call, so a schedule is a closure.
//!
//! A sync that fails here leaves the store below unsynced. Whether a later sync can cover the same data depends on that
//! store (with `CrashBackend::fail_syncs` it cannot, as in Linux).

mod wrap;

use super::{Backend, BackendDir, Stat, StatFs, errno};
use parking_lot::RwLock;
use std::any::Any;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use wrap::FaultDir;

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Kinds of calls, as counted.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Call { $($(#[$doc])* $name),* }

        impl Call {
            /// All kinds.
            pub const ALL: &[Call] = &[$(Call::$name),*];
        }
    };
}

calls! {
    /// `read_at`.
    Read,
    /// `write_at`.
    Write,
    /// `stat` of an open file.
    FileStat,
    /// `set_len`.
    SetLen,
    /// `sync_data`.
    SyncData,
    /// `sync_all`.
    SyncAll,
    /// `punch`.
    Punch,
    /// `allocate`.
    Allocate,
    /// `seek_data` and `seek_hole`.
    Seek,
    /// `set_times`, of anything.
    SetTimes,
    /// chmod, of anything.
    SetMode,
    /// chown, of anything.
    SetOwner,
    /// `get_xattr`, of anything.
    GetXattr,
    /// `set_xattr`, of anything.
    SetXattr,
    /// `list_xattr`, of anything.
    ListXattr,
    /// `remove_xattr`, of anything.
    RemoveXattr,
    /// `open_dir`.
    OpenDir,
    /// `open_file`.
    OpenFile,
    /// `create_file`.
    CreateFile,
    /// `make_dir`.
    MakeDir,
    /// `make_node`.
    MakeNode,
    /// `make_symlink`.
    MakeSymlink,
    /// `read_link`.
    ReadLink,
    /// `link`.
    Link,
    /// `rename`.
    Rename,
    /// `unlink`.
    Unlink,
    /// `remove_dir`.
    RemoveDir,
    /// `stat_entry`, and `stat` of a directory.
    DirStat,
    /// `read_dir`.
    ReadDir,
    /// `sync` of a directory.
    SyncDir,
    /// `sync` of the store.
    SyncStore,
    /// `stat_fs`.
    StatFs,
}

impl Call {
    /// Whether it changes the store.
    pub fn is_change(self) -> bool {
        use Call::*;
        match self {
            Write | SetLen | Punch | Allocate | SetTimes | SetMode | SetOwner | SetXattr | RemoveXattr | CreateFile
            | MakeDir | MakeNode | MakeSymlink | Link | Rename | Unlink | RemoveDir => true,
            Read | FileStat | SyncData | SyncAll | Seek | GetXattr | ListXattr | OpenDir | OpenFile | ReadLink
            | DirStat | ReadDir | SyncDir | SyncStore | StatFs => false,
        }
    }

    /// Whether it is a barrier.
    pub fn is_sync(self) -> bool {
        matches!(self, Call::SyncData | Call::SyncAll | Call::SyncDir | Call::SyncStore)
    }
}

/// What a rule is asked about.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// Kind.
    pub call: Call,
    /// Number among the calls of its kind, from 1.
    pub nth: u64,
    /// Number among all calls that change the store and all barriers, this one included.
    pub changes: u64,
    /// Bytes all writes were asked to write so far, this one included.
    pub bytes_written: u64,
    /// The entry, if the call names one.
    pub name: Option<&'a OsStr>,
    /// Offset in the file, if there is one; the new length for `set_len`.
    pub offset: u64,
    /// Bytes, if there are any.
    pub len: u64,
}

/// What a rule does to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It fails with this errno.
    Errno(i32),
    /// A write, rename or removal is done completely, and then fails with this errno. Other calls ignore this, and
    /// succeed.
    After(i32),
    /// A read returns at most so many bytes; a write writes so many, then fails with `EIO`. Other calls ignore this,
    /// and succeed.
    Short(usize),
}

type Rule = Box<dyn Fn(&Context<'_>) -> Option<Fault> + Send + Sync>;

/// Counters and rules, shared by a backend and all it opened.
pub struct Faults {
    calls: Vec<AtomicU64>,
    bytes: Vec<AtomicU64>,
    changes: AtomicU64,
    rules: RwLock<Vec<Rule>>,
    room_to_replace: AtomicU64,
    hides_births: AtomicBool,
}

impl Faults {
    fn new() -> Faults {
        let zeros = || Call::ALL.iter().map(|_| AtomicU64::new(0)).collect();
        let (changes, rules, room_to_replace) = (AtomicU64::new(0), RwLock::new(Vec::new()), AtomicU64::new(u64::MAX));
        let hides_births = AtomicBool::new(false);
        Faults { calls: zeros(), bytes: zeros(), changes, rules, room_to_replace, hides_births }
    }

    /// From now on the store has no birth times.
    pub fn hide_births(&self) {
        self.hides_births.store(true, Ordering::Relaxed);
    }

    fn shown(&self, st: Stat) -> Stat {
        Stat { born: if self.hides_births.load(Ordering::Relaxed) { 0 } else { st.born }, ..st }
    }

    /// What `room_to_replace` answers at most.
    pub fn set_room_to_replace(&self, bytes: u64) {
        self.room_to_replace.store(bytes, Ordering::Relaxed);
    }

    /// How often a kind was called, failures included.
    pub fn calls(&self, call: Call) -> u64 {
        self.calls[call as usize].load(Ordering::Relaxed)
    }

    /// Bytes asked for by `Read`, `Write`, `Punch`, `Allocate`.
    pub fn bytes(&self, call: Call) -> u64 {
        self.bytes[call as usize].load(Ordering::Relaxed)
    }

    /// Barriers of all kinds.
    pub fn syncs(&self) -> u64 {
        Call::ALL.iter().filter(|c| c.is_sync()).map(|&c| self.calls(c)).sum()
    }

    /// Calls that change the store, and barriers.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Sets all counters to zero.
    pub fn reset_counters(&self) {
        self.calls.iter().chain(&self.bytes).chain([&self.changes]).for_each(|n| n.store(0, Ordering::Relaxed));
    }

    /// Removes all rules.
    pub fn clear_rules(&self) {
        self.rules.write().clear();
    }

    /// Adds a rule. It must not call the backend itself; it may wait for others that do.
    pub fn rule(&self, rule: impl Fn(&Context<'_>) -> Option<Fault> + Send + Sync + 'static) {
        self.rules.write().push(Box::new(rule));
    }

    /// The n-th call of a kind from now on (1 is the next) fails, once.
    pub fn fail_nth(&self, call: Call, n: u64, code: i32) {
        let nth = self.calls(call) + n;
        self.rule(move |c| (c.call == call && c.nth == nth).then_some(Fault::Errno(code)));
    }

    /// Every call of a kind fails.
    pub fn fail_always(&self, call: Call, code: i32) {
        self.rule(move |c| (c.call == call).then_some(Fault::Errno(code)));
    }

    /// The next barrier of any kind fails, once.
    pub fn fail_next_sync(&self, code: i32) {
        let left = AtomicU64::new(1);
        self.rule(move |c| {
            let hit = c.call.is_sync()
                && left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok();
            hit.then_some(Fault::Errno(code))
        });
    }

    /// `ENOSPC` for every write once `bytes` more have been asked for, and for new entries from then on.
    pub fn no_space_after(&self, bytes: u64) {
        let limit = self.bytes(Call::Write) + bytes;
        self.rule(move |c| {
            use Call::{Allocate, CreateFile, Link, MakeDir, MakeNode, MakeSymlink, SetXattr, Write};
            let takes_space =
                matches!(c.call, Write | Allocate | CreateFile | Link | MakeDir | MakeNode | MakeSymlink | SetXattr);
            (takes_space && c.bytes_written > limit).then_some(Fault::Errno(libc::ENOSPC))
        });
    }

    /// After `n` more changes and barriers, every further one fails with `EIO`: the store has gone away.
    pub fn die_after(&self, n: u64) {
        let limit = self.changes() + n;
        self.rule(move |c| {
            ((c.call.is_change() || c.call.is_sync()) && c.changes > limit).then_some(Fault::Errno(libc::EIO))
        });
    }

    /// Counts a call and asks the rules.
    fn enter(&self, call: Call, name: Option<&OsStr>, offset: u64, len: u64) -> Option<Fault> {
        let nth = self.calls[call as usize].fetch_add(1, Ordering::Relaxed) + 1;
        self.bytes[call as usize].fetch_add(len, Ordering::Relaxed);
        let counted = u64::from(call.is_change() || call.is_sync());
        let changes = self.changes.fetch_add(counted, Ordering::Relaxed) + counted;
        let context = Context { call, nth, changes, bytes_written: self.bytes(Call::Write), name, offset, len };
        self.rules.read().iter().find_map(|rule| rule(&context))
    }

    /// For calls that either succeed or fail.
    fn pass(&self, call: Call, name: Option<&OsStr>, offset: u64, len: u64) -> io::Result<()> {
        match self.enter(call, name, offset, len) {
            Some(Fault::Errno(code)) => Err(errno(code)),
            Some(Fault::Short(_) | Fault::After(_)) | None => Ok(()),
        }
    }
}

/// A backend whose calls are counted and may fail.
pub struct FaultBackend {
    inner: Arc<dyn Backend>,
    faults: Arc<Faults>,
}

impl FaultBackend {
    /// Wraps a backend; no rules yet.
    pub fn new(inner: Arc<dyn Backend>) -> FaultBackend {
        FaultBackend { inner, faults: Arc::new(Faults::new()) }
    }

    /// Counters and rules.
    pub fn faults(&self) -> &Arc<Faults> {
        &self.faults
    }
}

impl Backend for FaultBackend {
    fn root(&self) -> Arc<dyn BackendDir> {
        FaultDir::over(self.inner.root(), self.faults.clone())
    }

    fn stat_fs(&self) -> io::Result<StatFs> {
        self.faults.pass(Call::StatFs, None, 0, 0)?;
        self.inner.stat_fs()
    }

    fn sync(&self) -> io::Result<()> {
        self.faults.pass(Call::SyncStore, None, 0, 0)?;
        self.inner.sync()
    }

    fn try_lock(&self, name: &OsStr) -> io::Result<Box<dyn Any + Send + Sync>> {
        self.inner.try_lock(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryBackend;

    fn name(s: &str) -> &OsStr {
        OsStr::new(s)
    }

    fn code<T>(result: io::Result<T>) -> Option<i32> {
        result.err().and_then(|e| e.raw_os_error())
    }

    fn wrapped() -> (FaultBackend, Arc<Faults>) {
        let backend = FaultBackend::new(Arc::new(MemoryBackend::new()));
        let faults = backend.faults().clone();
        (backend, faults)
    }

    #[test]
    fn counts_calls_and_bytes() {
        let (backend, faults) = wrapped();
        let file = backend.root().create_file(name("f")).unwrap();
        file.write_at(0, &[1; 100]).unwrap();
        file.write_at(100, &[1; 28]).unwrap();
        file.read_at(0, &mut [0; 10]).unwrap();
        file.sync_data().unwrap();
        backend.sync().unwrap();
        assert_eq!((faults.calls(Call::Write), faults.bytes(Call::Write)), (2, 128));
        assert_eq!((faults.calls(Call::Read), faults.bytes(Call::Read)), (1, 10));
        assert_eq!((faults.syncs(), faults.changes(), faults.calls(Call::CreateFile)), (2, 5, 1));
        faults.reset_counters();
        assert!(Call::ALL.iter().all(|&c| faults.calls(c) == 0 && faults.bytes(c) == 0) && faults.changes() == 0);
    }

    #[test]
    fn fails_the_nth_call_once_and_leaves_the_store_alone() {
        let (backend, faults) = wrapped();
        let file = backend.root().create_file(name("f")).unwrap();
        file.write_at(0, b"a").unwrap();
        faults.fail_nth(Call::Write, 2, libc::EIO);
        file.write_at(1, b"b").unwrap();
        assert_eq!(code(file.write_at(2, b"c")), Some(libc::EIO));
        assert_eq!(file.stat().unwrap().len, 2);
        file.write_at(2, b"d").unwrap();
        faults.fail_next_sync(libc::ENOSPC);
        assert_eq!(code(backend.root().sync()), Some(libc::ENOSPC));
        file.sync_all().unwrap();
    }

    #[test]
    fn space_runs_out() {
        let (backend, faults) = wrapped();
        let file = backend.root().create_file(name("f")).unwrap();
        file.write_at(0, &[1; 50]).unwrap();
        faults.no_space_after(100);
        file.write_at(0, &[1; 100]).unwrap();
        assert_eq!(code(file.write_at(100, &[1])), Some(libc::ENOSPC));
        assert_eq!(code(backend.root().make_dir(name("d"), 0o700)), Some(libc::ENOSPC));
        backend.root().unlink(name("f")).unwrap();
        faults.clear_rules();
        file.write_at(100, &[1]).unwrap();
    }

    #[test]
    fn reads_end_early_and_writes_tear() {
        let (backend, faults) = wrapped();
        let file = backend.root().create_file(name("f")).unwrap();
        faults.rule(|c| matches!(c.call, Call::Write | Call::Read).then_some(Fault::Short(3)));
        assert_eq!(code(file.write_at(10, b"abcdef")), Some(libc::EIO));
        assert_eq!(file.stat().unwrap().len, 13);
        let mut buf = [9; 6];
        assert_eq!(file.read_at(10, &mut buf).unwrap(), 3);
        assert_eq!(&buf[..3], b"abc");
        assert_eq!(file.read_at(10, &mut buf[..2]).unwrap(), 2);
    }

    #[test]
    fn rules_see_names_and_a_dead_store_stays_dead() {
        let (backend, faults) = wrapped();
        faults.rule(|c| (c.name == Some(OsStr::new("bad"))).then_some(Fault::Errno(libc::EPERM)));
        assert_eq!(code(backend.root().make_dir(name("bad"), 0o700)), Some(libc::EPERM));
        faults.die_after(1);
        backend.root().make_dir(name("d"), 0o700).unwrap();
        for _ in 0..2 {
            assert_eq!(code(backend.root().make_dir(name("e"), 0o700)), Some(libc::EIO));
            assert_eq!(code(backend.sync()), Some(libc::EIO));
        }
        assert_eq!(backend.root().read_dir().unwrap().len(), 1);
    }
}
