//! What other threads do during a commit: reads, writes of whole blocks, and what `stat` shows; and that none of it is
//! lost, however the commit ends.

use crate::common;
use common::{Rng, Setup, create_in, epochs, fill, meanwhile, raw};
use lamassu_format::Domain;
use lamassu_store::backend::fault::{Call, Fault, FaultBackend};
use lamassu_store::backend::memory::MemoryBackend;
use lamassu_store::backend::{Backend, LocalBackend, SetTime, Time};
use lamassu_store::file::{Durability, File, Integrity};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// For what must not wait: passed only by what is broken.
const LONG: Duration = Duration::from_secs(60);
/// For what may have to wait.
const SHORT: Duration = Duration::from_millis(20);
/// Block size, where it does not matter.
const B: u64 = 4096;
/// Blocks of the file at first: of several pages, and enough for their commit to let others go on.
const BLOCKS: u64 = 400;

/// A file with durable content, and what it holds.
struct Subject {
    setup: Setup,
    store: FaultBackend,
    file: File,
    model: Vec<u8>,
    rng: Rng,
}

impl Subject {
    fn new(setup: Setup, len: u64) -> Subject {
        let store = FaultBackend::new(Arc::new(MemoryBackend::new()));
        let file = File::create(setup.context(), create_in(&store), "test").expect("creates");
        let mut subject = Subject { setup, store, file, model: Vec::new(), rng: Rng(7) };
        subject.write(0, len);
        subject.file.settle_now().expect("settles");
        subject
    }

    /// New content, and its place in the model.
    fn change(&mut self, offset: u64, len: u64) -> Vec<u8> {
        let data = fill(len as usize, &mut self.rng);
        self.model.resize(self.model.len().max((offset + len) as usize), 0);
        self.model[offset as usize..(offset + len) as usize].copy_from_slice(&data);
        data
    }

    fn write(&mut self, offset: u64, len: u64) {
        let data = self.change(offset, len);
        self.file.write_at(offset, &data).expect("writes");
    }

    /// Open, and then opened anew, it holds what it should.
    fn is_sound(&self) {
        assert_eq!(content(&self.file), self.model);
        self.file.settle_now().expect("settles");
        let again = File::open(self.setup.context(), raw(&self.store), "again").expect("opens");
        assert_eq!(content(&again), self.model);
        assert!(again.check(false, &mut |_| {}).expect("checks").damage.is_empty());
    }
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.size() as usize + 10];
    let n = file.read_at(0, &mut bytes).expect("reads");
    assert_eq!(n as u64, file.size());
    bytes.truncate(n);
    bytes
}

fn every_kind() -> Vec<Setup> {
    vec![
        Setup::default(),
        Setup { reserved: 2, ..Setup::default() },
        Setup { block_size: 16384, ..Setup::default() },
        Setup { domain: Domain::File, ..Setup::default() },
        Setup { suite: lamassu_format::Suite::Blake3, ..Setup::default() },
        Setup { durability: Durability::Relaxed, ..Setup::default() },
        // Where a read by the wrong page would go unnoticed.
        Setup { integrity: Integrity::Metadata, ..Setup::default() },
    ]
}

/// A writer that leaves commits to another thread writes nothing to the store itself, and goes on beside the commit of
/// that thread. If the thread never comes, the writer commits.
#[test]
fn commits_are_left_to_another_thread() {
    const PIECE: u64 = 1 << 20;
    let mut s = Subject::new(Setup::default(), 200 * PIECE);
    let changes = |s: &Subject| s.store.faults().changes();
    let before = changes(&s);
    let mut due = None;
    for n in 0..70 {
        let data = s.change(n * PIECE, PIECE);
        let wants_commit = s.file.write_behind(n * PIECE, &data).expect("writes");
        assert_eq!(wants_commit, s.file.wants_commit());
        due = due.or(wants_commit.then_some(n));
    }
    assert_eq!(changes(&s), before, "the writer wrote to the store itself");
    let due = due.expect("a commit is due");
    assert!((12..=64).contains(&due), "a commit was due after {due} MiB");
    let late: Vec<(u64, Vec<u8>)> =
        (0..40).map(|n| (199 - n) * PIECE).map(|offset| (offset, s.change(offset, PIECE))).collect();
    let file = &s.file;
    let flush = || file.flush().expect("flushes");
    let free = meanwhile(&s.store, 1, LONG, flush, || {
        for (offset, data) in &late {
            assert!(!file.write_behind(*offset, data).expect("writes"), "a commit is under way");
        }
    });
    assert!(free, "writes had to wait for the commit");
    assert!(s.file.wants_commit() && content(&s.file) == s.model);
    let before = changes(&s);
    for n in 0..129 {
        let data = s.change(n * PIECE, PIECE);
        s.file.write_behind(n * PIECE, &data).expect("writes");
    }
    assert!(changes(&s) > before, "memory has no bound");
    assert!(s.file.dirty_len() <= 132 * PIECE);
    s.is_sound();
}

#[test]
fn reads_writes_and_stat_do_not_wait_for_a_commit() {
    for setup in every_kind() {
        // From the first page that is written, and from a later one, or the barrier behind all of them.
        for nth in [1, 4] {
            let b = u64::from(setup.block_size);
            let mut s = Subject::new(Setup { ..setup }, BLOCKS * b);
            s.write(0, 300 * b);
            let before = s.model.clone();
            // Small, and large enough to be sealed before; over what is committed, elsewhere, and past the end.
            let late: Vec<(u64, Vec<u8>)> = [(7 * b, b), (200 * b, 32 * b), (390 * b, 30 * b), (420 * b, b)]
                .map(|(offset, len)| (offset, s.change(offset, len)))
                .into();
            let (file, after, time) = (&s.file, &s.model, Time { seconds: 1_000_000_000, nanos: 5 });
            let sync = || file.sync().expect("syncs");
            let free = meanwhile(&s.store, nth, LONG, sync, || {
                assert_eq!(file.size(), before.len() as u64);
                assert!(file.is_dirty() && file.mtime().is_some());
                assert!(content(file) == before);
                for (offset, data) in &late {
                    file.write_at(*offset, data).expect("writes");
                }
                assert!(content(file) == *after);
                file.set_times(SetTime::Keep, SetTime::At(time)).expect("sets times");
                assert_eq!(file.stat().expect("stats").mtime, time);
                assert!(file.is_dirty() && file.dirty_len() >= 300 * b);
            });
            assert!(free, "what goes on beside a commit had to wait for it (change {nth})");
            assert!(s.file.is_dirty(), "what came late is still to be committed");
            assert_eq!(s.file.mtime(), Some(time), "and its time to be set then");
            assert!(content(&s.file) == s.model);
            s.file.flush().expect("flushes");
            assert!(!s.file.is_dirty());
            assert_eq!(s.file.backing().stat().expect("stats").mtime, time, "the time set last rules");
            s.is_sound();
        }
    }
}

#[test]
fn settling_is_no_change_of_the_file() {
    let mut s = Subject::new(Setup::default(), BLOCKS * B);
    s.write(0, 300 * B);
    s.file.flush().expect("flushes");
    let written = s.file.stat().expect("stats").mtime;
    let (file, time) = (&s.file, Time { seconds: 1_000_000_001, nanos: 6 });
    let settle = || file.settle_now().expect("settles");
    assert!(meanwhile(&s.store, 3, LONG, settle, || {
        assert_eq!(file.stat().expect("stats").mtime, written, "what the store makes of it is not shown");
        file.set_times(SetTime::Keep, SetTime::At(time)).expect("sets times");
        assert_eq!(file.stat().expect("stats").mtime, time);
    }));
    assert_eq!(file.backing().stat().expect("stats").mtime, time);
    assert_eq!(file.mtime(), Some(time), "also for who asked the store while it said something else");
    s.is_sound();
}

/// A write may be encrypted long before it gets the file for itself: by then its key may be old, and a re-keying have
/// passed.
#[test]
fn what_was_sealed_under_an_older_key_is_sealed_again() {
    let setup = Setup::default();
    let ctx = setup.context();
    let store = FaultBackend::new(Arc::new(MemoryBackend::new()));
    let file = File::create(ctx.clone(), create_in(&store), "test").expect("creates");
    file.settle_now().expect("settles");
    let data = fill(32 * B as usize, &mut Rng(8));
    std::thread::scope(|s| {
        let allocate = || file.allocate(0, 1, true).expect("allocates");
        meanwhile(&store, 1, LONG, allocate, || {
            s.spawn(|| file.write_at(0, &data).expect("writes"));
            while file.dirty_len() < data.len() as u64 {
                std::thread::yield_now();
            }
            ctx.ring.replace(&epochs(1..=2, 1), &epochs(1..=2, 2));
        });
    });
    file.settle_now().expect("settles");
    let new = setup.context();
    new.ring.replace(&epochs(2..=2, 1), &epochs(2..=2, 2));
    let again = File::open(new, raw(&store), "again").expect("opens");
    assert_eq!(content(&again), data);
}

#[test]
fn everyone_who_waits_for_an_fsync_hears_of_a_barrier_that_failed() {
    let mut s = Subject::new(Setup::default(), BLOCKS * B);
    s.write(0, 300 * B);
    let (file, store) = (&s.file, &s.store);
    let sync = || {
        store.faults().fail_next_sync(libc::EIO);
        file.sync().expect_err("its barrier fails");
    };
    // It waits for the first, which is held up long enough for it to begin.
    let waited =
        !meanwhile(store, 1, Duration::from_secs(1), sync, || drop(file.sync().expect_err("the same barrier")));
    assert!(waited);
    file.sync().expect("both were told");
    s.is_sound();
}

/// Over several pages that are not there before it.
#[test]
fn a_file_grows_beside_a_commit_that_makes_it_grow() {
    for setup in every_kind() {
        let b = u64::from(setup.block_size);
        let mut s = Subject::new(setup, 100 * b);
        s.write(100 * b, 600 * b);
        let before = s.model.clone();
        let late = [(700 * b, 20 * b), (720 * b, 200 * b), (690 * b, 5 * b)].map(|(at, len)| (at, s.change(at, len)));
        let (file, after) = (&s.file, &s.model);
        let flush = || file.flush().expect("flushes");
        let free = meanwhile(&s.store, 1, LONG, flush, || {
            assert!(content(file) == before);
            late.iter().for_each(|(offset, data)| file.write_at(*offset, data).expect("writes"));
            assert!(content(file) == *after);
        });
        assert!(free, "appending had to wait, blocks of {b}");
        s.is_sound();
    }
}

#[test]
fn what_has_to_wait_waits_and_is_done() {
    // Within a block, over the last one that is not whole, past a gap.
    for (at, len) in [(5 * B + 9, 50), (399 * B + 7, B), (700 * B + 3, 2 * B)] {
        let mut s = Subject::new(Setup::default(), BLOCKS * B + 100);
        s.write(0, 300 * B);
        let data = s.change(at, len);
        let file = &s.file;
        meanwhile(&s.store, 2, SHORT, || file.sync().expect("syncs"), || file.write_at(at, &data).expect("writes"));
        s.is_sound();
    }
    let mut s = Subject::new(Setup::default(), BLOCKS * B + 100);
    let size = 3 * B + 5;
    s.write(0, 300 * B);
    let file = &s.file;
    meanwhile(&s.store, 2, SHORT, || file.sync().expect("syncs"), || file.truncate(size).expect("truncates"));
    s.model.truncate(size as usize);
    s.is_sound();
}

#[test]
fn what_gathers_beside_a_commit_is_bounded() {
    let mut s = Subject::new(Setup::default(), 24 << 20);
    s.write(0, 2 << 20);
    let late: Vec<(u64, Vec<u8>)> = (0..24).map(|n| (n << 20, s.change(n << 20, 1 << 20))).collect();
    let (file, store, written, beside_it) =
        (&s.file, &s.store, Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let sync = || {
        let (written, beside_it) = (written.clone(), beside_it.clone());
        // Up to the last barrier the commit is open. However slow this machine is, others get as far as they may.
        store.faults().rule(move |c| {
            let until = Instant::now() + LONG;
            while c.call.is_change() && written.load(Ordering::Relaxed) < 8 << 20 && Instant::now() < until {
                std::thread::sleep(SHORT);
            }
            beside_it.store(written.load(Ordering::Relaxed), Ordering::Relaxed);
            None
        });
        file.sync().expect("syncs");
    };
    let free = meanwhile(store, 1, Duration::from_secs(1), sync, || {
        for (offset, data) in &late {
            file.write_at(*offset, data).expect("writes");
            written.fetch_add(data.len() as u64, Ordering::Relaxed);
        }
    });
    let beside_it = beside_it.load(Ordering::Relaxed);
    assert!(!free && (8 << 20..=16 << 20).contains(&beside_it), "{beside_it} bytes of 24 MiB were written beside it");
    s.is_sound();
}

/// Reads of a large file, whose pages are not all in memory, and of its last block, of which a shrink has left more in
/// the store than there is.
#[test]
fn reads_beside_find_what_is_not_in_memory() {
    for integrity in [Integrity::Full, Integrity::Metadata] {
        let mut s = Subject::new(Setup { integrity, ..Setup::default() }, 2000 * B + 4000);
        s.file.truncate(2000 * B + 700).expect("shrinks");
        s.model.truncate(2000 * B as usize + 700);
        s.file.settle_now().expect("settles");
        s.file = File::open(s.setup.context(), raw(&s.store), "test").expect("opens");
        s.write(300 * B, 300 * B);
        s.file.truncate(2010 * B).expect("grows");
        s.model.resize(2010 * B as usize, 0);
        for nth in [1, 3, 6] {
            s.write(300 * B, 300 * B);
            let (file, model) = (&s.file, &s.model);
            let sync = || file.sync().expect("syncs");
            let free = meanwhile(&s.store, nth, LONG, sync, || {
                let mut back = vec![0; 1010 * B as usize];
                file.read_at(1000 * B, &mut back).expect("reads");
                assert!(back == model[1000 * B as usize..]);
            });
            assert!(free, "change {nth}");
        }
        s.is_sound();
    }
}

#[test]
fn a_commit_that_fails_loses_nothing_of_what_came_late() {
    for call in [Call::Write, Call::SyncData] {
        // Within the last page, and over several more.
        for late in [20, 300] {
            let mut s = Subject::new(Setup::default(), BLOCKS * B);
            s.write(0, 300 * B);
            let data = s.change(395 * B, late * B);
            let (file, store) = (&s.file, &s.store);
            let fails = Arc::new(AtomicBool::new(true));
            let sync = || {
                // Asked after the hook, so the write is there when the call fails.
                let fails = fails.clone();
                store.faults().rule(move |c| {
                    let hit = c.call == call && c.nth % 2 == 0 && fails.load(Ordering::Relaxed);
                    hit.then_some(Fault::Errno(if call == Call::Write { libc::ENOSPC } else { libc::EIO }))
                });
                let errors = (0..4).filter(|_| file.sync().is_err()).count();
                assert!(errors > 0, "{call:?} fails");
            };
            assert!(meanwhile(store, 2, LONG, sync, || file.write_at(395 * B, &data).expect("writes")));
            fails.store(false, Ordering::Relaxed);
            assert!(content(&s.file) == s.model);
            let _ = s.file.sync(); // may still tell of a barrier that failed
            s.file.sync().expect("the store takes it now");
            s.is_sound();
        }
    }
}

/// Each thread has blocks of its own, and knows what they hold. Barriers take long enough for others to go on beside
/// them.
#[test]
fn threads_that_write_read_and_sync_see_their_own_writes() {
    const THREADS: u64 = 4;
    let dir = tempfile::tempdir().expect("a directory");
    let store = FaultBackend::new(Arc::new(LocalBackend::open(dir.path()).expect("a store")));
    store.faults().rule(|c| {
        if c.call == Call::SyncData {
            std::thread::sleep(Duration::from_millis(2));
        }
        None
    });
    let setups = [
        Setup { integrity: Integrity::Metadata, ..Setup::default() },
        Setup { reserved: 2, domain: Domain::File, ..Setup::default() },
    ];
    for setup in setups {
        let file = File::create(setup.context(), create_in(&store), "test").expect("creates");
        let blocks = 1500;
        file.write_at(0, &vec![0; (blocks * B) as usize]).expect("writes");
        let work = |me: u64| {
            let mut rng = Rng(me);
            let mut mine: Vec<Vec<u8>> = (0..blocks / THREADS).map(|_| vec![0; B as usize]).collect();
            for n in 0..3000 {
                let at = rng.below(blocks / THREADS);
                let offset = (at * THREADS + me) * B;
                match rng.below(8) {
                    0..=3 => {
                        mine[at as usize] = fill(B as usize, &mut rng);
                        file.write_at(offset, &mine[at as usize]).expect("writes");
                    }
                    4 => {
                        let (from, data) = (rng.below(B - 99), fill(99, &mut rng));
                        mine[at as usize][from as usize..][..99].copy_from_slice(&data);
                        file.write_at(offset + from, &data).expect("writes");
                    }
                    5 if n % 40 == 0 => file.sync().expect("syncs"),
                    5 if n % 40 == 1 => file.flush().expect("flushes"),
                    5 if n % 40 == 2 => file.settle_now().expect("settles"),
                    _ => {
                        let mut back = vec![0; B as usize];
                        assert_eq!(file.read_at(offset, &mut back).expect("reads"), B as usize);
                        assert!(back == mine[at as usize], "thread {me}, step {n}, block {at}");
                    }
                }
            }
            mine
        };
        let ends: Vec<Vec<Vec<u8>>> = std::thread::scope(|s| {
            let workers: Vec<_> = (0..THREADS).map(|me| s.spawn(move || work(me))).collect();
            workers.into_iter().map(|w| w.join().expect("no panic")).collect()
        });
        let model: Vec<u8> =
            (0..blocks).flat_map(|n| ends[(n % THREADS) as usize][(n / THREADS) as usize].iter().copied()).collect();
        assert!(content(&file) == model);
        file.settle_now().expect("settles");
        drop(file);
        let again = File::open(setup.context(), raw(&store), "again").expect("opens");
        assert!(content(&again) == model);
        assert!(again.check(false, &mut |_| {}).expect("checks").damage.is_empty());
        store.root().unlink(common::name()).expect("removes");
    }
}
