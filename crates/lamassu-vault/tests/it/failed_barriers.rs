//! Barriers that fail, of files that are open, closed, or opened again; and what an fsync covers.

use crate::common;

use common::*;
use lamassu_store::backend::fault::Call;
use lamassu_store::backend::{BackendDir, CrashBackend, CrashSim, FaultBackend, MemoryBackend, SetTime, StatFs, Time};
use lamassu_store::file::DamageKind;
use lamassu_store::{Backend, StoreError};
use lamassu_vault::*;
use std::any::Any;
use std::ffi::OsStr;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const BLOCK: usize = 4096;
/// Blocks of one page with eight reserved slots.
const PAGE_BLOCKS: usize = 116;

fn content(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|i| (i / BLOCK) as u8 ^ salt | 1).collect()
}

/// What is left if the machine stops now and everything is lost that may be.
fn least(crash: &CrashBackend) -> MemoryBackend {
    CrashSim::new(crash.log()).at(crash.position()).least_state()
}

/// The first page of a file as the store shows it.
fn first_page(store: &dyn Backend, name: &str) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    store.root().open_file(n(name), false).unwrap().read_at(0, &mut bytes).unwrap();
    bytes
}

/// A vault with plain names over a store that forgets what no barrier has covered.
fn over_crash(recipe: &Recipe) -> (Arc<CrashBackend>, Vault) {
    let crash = Arc::new(CrashBackend::new());
    let backend: Arc<dyn Backend> = crash.clone();
    let v = recipe.make(&backend);
    (crash, v)
}

/// A file that is in the store, was closed, and whose last page is not durable: the barrier that should cover it fails.
/// It may be opened again before or after that, and stay open.
#[test]
fn a_barrier_that_failed_for_a_closed_file_costs_nothing_that_was_synced() {
    for len in [5000, 20 * BLOCK, (PAGE_BLOCKS + 20) * BLOCK] {
        for reads in ["never", "before", "before, and stays open", "before, and syncs", "after"] {
            let recipe = Recipe::plain().anchored();
            let (crash, v) = over_crash(&recipe);
            let data = content(len, 0);
            let (_, handle) = v.new_file("f");
            v.write(handle, 0, &data).unwrap();
            v.fsync(handle, false).unwrap();
            v.release(handle).unwrap();
            let synced = first_page(&*crash, "f");
            for number in 0.. {
                if first_page(&*crash, "f") != synced {
                    break; // with so many closed files they are settled
                }
                assert!(number < 2000);
                v.put(&number.to_string(), &content(9000, 0));
            }
            assert_eq!(first_page(&least(&crash), "f"), synced, "its page is not durable");
            let open = reads.starts_with("before").then(|| v.open_file(v.ino("f"), RO).unwrap());
            if reads == "before" {
                v.release(open.unwrap()).unwrap();
            }
            crash.fail_syncs(u64::MAX, libc::EIO);
            match open.filter(|_| reads == "before, and syncs") {
                Some(open) => v.fsync(open, false).unwrap_err(),
                None => v.sync_all().unwrap_err(),
            };
            crash.fail_syncs(0, 0);
            if reads == "after" {
                assert!(v.get("f") == data);
            }
            let _ = v.sync_all(); // what was lost may be told once more
            v.sync_all().unwrap();
            std::mem::forget(v);
            let left: Arc<dyn Backend> = Arc::new(least(&crash));
            let v = recipe.open(&left).unwrap();
            assert!(v.get("f") == data, "{len} bytes, opened {reads}");
        }
    }
}

/// The same without an anchor. The page that is lost is one that ends a shrink: in a session that was closed it would
/// be taken for an older state.
#[test]
fn a_session_stays_open_whose_last_pages_may_be_lost() {
    let recipe = Recipe::plain();
    let (crash, v) = over_crash(&recipe);
    let data = content((PAGE_BLOCKS + 20) * BLOCK, 0);
    v.put("f", &data);
    (0..2).for_each(|_| v.sync_all().unwrap());
    let handle = v.open_file(v.ino("f"), RW).unwrap();
    let kept = 10 * BLOCK;
    v.setattr(v.ino("f"), Some(handle), &SetAttr { size: Some(kept as u64), ..SetAttr::default() }).unwrap();
    v.fsync(handle, false).unwrap();
    v.release(handle).unwrap();
    let synced = first_page(&*crash, "f");
    v.sync_all().unwrap();
    assert_ne!(first_page(&*crash, "f"), synced, "it has settled");
    assert_eq!(first_page(&least(&crash), "f"), synced, "its page is not durable");
    crash.fail_syncs(1, libc::EIO);
    v.sync_all().unwrap_err();
    v.close().unwrap();
    let left: Arc<dyn Backend> = Arc::new(least(&crash));
    let v = recipe.open(&left).unwrap();
    assert!(v.get("f") == data[..kept]);
}

/// A store that loses something, and tells only the first of two callers of `sync` that overlap. The other one goes on
/// meanwhile.
struct OneIsTold {
    crash: Arc<CrashBackend>,
    stage: Mutex<Stage>,
    first_is_in: Sender<()>,
    second_is_through: (Sender<()>, Mutex<Receiver<()>>),
    /// The operation of the second caller has ended.
    second_has_ended: Mutex<Receiver<()>>,
}

#[derive(Clone, Copy)]
enum Stage {
    Quiet,
    AwaitsFirst,
    AwaitsSecond,
}

/// More than the second caller takes to come. If it has to wait for the first, that goes on after this time.
const PATIENCE: Duration = Duration::from_millis(500);

impl OneIsTold {
    fn loses(&self) -> io::Result<()> {
        self.crash.fail_syncs(1, libc::EIO);
        self.crash.sync()
    }
}

impl Backend for OneIsTold {
    fn root(&self) -> Arc<dyn BackendDir> {
        self.crash.root()
    }
    fn stat_fs(&self) -> io::Result<StatFs> {
        self.crash.stat_fs()
    }
    fn sync(&self) -> io::Result<()> {
        let stage = {
            let mut stage = self.stage.lock().unwrap();
            let next = if let Stage::AwaitsFirst = *stage { Stage::AwaitsSecond } else { Stage::Quiet };
            std::mem::replace(&mut *stage, next)
        };
        match stage {
            Stage::Quiet => self.crash.sync(),
            Stage::AwaitsFirst => {
                self.first_is_in.send(()).unwrap();
                if self.second_is_through.1.lock().unwrap().recv_timeout(PATIENCE).is_err() {
                    *self.stage.lock().unwrap() = Stage::Quiet;
                    return self.loses();
                }
                self.second_has_ended.lock().unwrap().recv().unwrap();
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
            Stage::AwaitsSecond => {
                self.loses().unwrap_err();
                self.second_is_through.0.send(()).unwrap();
                Ok(())
            }
        }
    }
    fn try_lock(&self, name: &OsStr) -> io::Result<Box<dyn Any + Send + Sync>> {
        self.crash.try_lock(name)
    }
}

#[test]
fn a_barrier_beside_one_that_failed_settles_nothing() {
    let recipe = Recipe::plain().anchored();
    let crash = Arc::new(CrashBackend::new());
    let (first_is_in, is_in) = channel();
    let (through, is_through) = channel();
    let (end, ended) = channel();
    let store = Arc::new(OneIsTold {
        crash: crash.clone(),
        stage: Mutex::new(Stage::Quiet),
        first_is_in,
        second_is_through: (through, Mutex::new(is_through)),
        second_has_ended: Mutex::new(ended),
    });
    let backend: Arc<dyn Backend> = store.clone();
    let v = recipe.make(&backend);
    let (old, new) = (content(20 * BLOCK, 0), content(20 * BLOCK, 0x40));
    let (_, handle) = v.new_file("f");
    v.write(handle, 0, &old).unwrap();
    v.sync_all().unwrap();
    // Two names in two directories, which the anchor does not know: its fsync has a barrier of the whole store.
    let (other, other_handle) = v.new_file("g");
    v.link(other.attr.ino, v.dir("d"), n("h")).unwrap();
    v.write(handle, 0, &new).unwrap();
    *store.stage.lock().unwrap() = Stage::AwaitsFirst;
    std::thread::scope(|s| {
        let v = &v;
        s.spawn(move || v.fsync(other_handle, false).unwrap_err());
        is_in.recv().unwrap();
        let done = v.sync_all();
        end.send(()).unwrap();
        done
    })
    .expect_err("what it had written may be lost");
    v.sync_all().unwrap();
    std::mem::forget(v);
    let left: Arc<dyn Backend> = Arc::new(least(&crash));
    assert!(recipe.open(&left).unwrap().get("f") == new);
}

/// Also of a file that nobody may write, and that was opened for reading.
#[test]
fn an_fsync_covers_mode_times_and_attributes() {
    for mode in [0o640, 0o440] {
        let recipe = Recipe::plain();
        let (crash, v) = over_crash(&recipe);
        v.put("f", &content(9000, 0));
        (0..2).for_each(|_| v.sync_all().unwrap());
        let ino = v.ino("f");
        let at = |seconds| SetTime::At(Time { seconds, nanos: 7 });
        let set = SetAttr { mode: Some(mode), atime: Some(at(1000)), mtime: Some(at(2000)), ..SetAttr::default() };
        v.setattr(ino, None, &set).unwrap();
        v.set_xattr(ino, n("user.note"), b"kept", SetXattr::Any).unwrap();
        let handle = v.open_file(ino, RO).unwrap();
        v.fsync(handle, false).unwrap();
        std::mem::forget(v);
        let left: Arc<dyn Backend> = Arc::new(least(&crash));
        let v = recipe.open(&left).unwrap();
        let attr = v.find("f").unwrap().attr;
        assert_eq!((attr.mode, attr.atime.seconds, attr.mtime.seconds), (mode, 1000, 2000));
        assert_eq!(v.get_xattr(attr.ino, n("user.note")).unwrap(), b"kept");
    }
}

/// What is remembered of a closed file is not lost with an attempt to open it.
#[test]
fn a_file_that_could_not_be_opened_is_not_believed_to_be_empty() {
    let recipe = Recipe::plain().anchored();
    let memory = Arc::new(MemoryBackend::new());
    let fault = Arc::new(FaultBackend::new(memory.clone()));
    let backend: Arc<dyn Backend> = fault.clone();
    let v = recipe.make(&backend);
    v.put("f", b"small");
    let ino = v.ino("f");
    fault.faults().fail_nth(Call::Read, 1, libc::EIO);
    v.open_file(ino, RO).unwrap_err();
    fault.faults().clear_rules();
    let page = first_page(&*memory, "f");
    let stored = memory.root().open_file(n("f"), true).unwrap();
    stored.write_at(0, &[0; BLOCK]).unwrap();
    let handle = v.open_file(ino, RO).unwrap();
    let read = v.read(handle, 0, &mut [0; 10]);
    let is_stale = |error: &VaultError| match error {
        VaultError::Store(StoreError::Damaged(damage)) => damage.kind == DamageKind::Stale,
        _ => false,
    };
    assert!(read.as_ref().is_err_and(is_stale), "{read:?}");
    v.release(handle).unwrap();
    stored.write_at(0, &page).unwrap();
    assert_eq!(v.get("f"), b"small");
}

/// A small file that was made and closed, and whose first page the kernel has lost and still shows. Opening it chooses
/// that page, and the next fsync acknowledges it.
#[test]
fn the_first_page_of_a_new_file_is_written_again_when_it_is_chosen() {
    let recipe = Recipe::plain().anchored();
    let (crash, v) = over_crash(&recipe);
    v.put("f", b"small");
    crash.fail_syncs(1, libc::EIO);
    v.sync_all().unwrap_err();
    assert_eq!(v.get("f"), b"small");
    v.sync_all().unwrap();
    std::mem::forget(v);
    let left: Arc<dyn Backend> = Arc::new(least(&crash));
    assert_eq!(recipe.open(&left).unwrap().get("f"), b"small");
}

/// A barrier fails, and the process that is told of it ends. The next one reads from the kernel what the disk does not
/// have, and is told nothing. What it acknowledges is durable nevertheless, and what was acknowledged before it is not
/// lost.
#[test]
fn what_an_earlier_process_has_lost_is_written_again() {
    for is_anchored in [false, true] {
        for blocks in [20, PAGE_BLOCKS + 20] {
            let recipe = if is_anchored { Recipe::plain().anchored() } else { Recipe::plain() };
            let (crash, v) = over_crash(&recipe);
            let (old, new) = (content(blocks * BLOCK, 0), content(blocks * BLOCK, 0x40));
            v.put("f", &old);
            (0..2).for_each(|_| v.sync_all().unwrap());
            let handle = v.open_file(v.ino("f"), RW).unwrap();
            v.write(handle, 0, &new).unwrap();
            v.release(handle).unwrap();
            crash.fail_syncs(u64::MAX, libc::EIO);
            v.close().unwrap_err();
            crash.fail_syncs(0, 0);
            drop(v);
            let store: Arc<dyn Backend> = crash.clone();
            let v = recipe.open(&store).unwrap();
            assert!(v.get("f") == new, "the kernel shows it");
            v.sync_all().unwrap();
            std::mem::forget(v);
            let left: Arc<dyn Backend> = Arc::new(least(&crash));
            let v = recipe.open(&left).unwrap();
            assert!(v.get("f") == new, "{blocks} blocks, anchored: {is_anchored}");
            v.clean();
        }
    }
}
