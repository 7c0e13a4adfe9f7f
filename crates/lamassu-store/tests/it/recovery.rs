//! Recovery where something stands in its way: a full store, a store that fails time and again, blocks that the store
//! does not show, zeros that an earlier process lost.

use crate::common;
use common::anchor::{AnchorSide, MemoryTrees, OBJECT};
use common::{Rng, Setup, create_in, fill, raw};
use lamassu_format::{Codec, PageNo};
use lamassu_store::StoreError;
use lamassu_store::backend::crash::{CrashBackend, CrashSim};
use lamassu_store::backend::fault::{Call, Fault, FaultBackend};
use lamassu_store::backend::memory::MemoryBackend;
use lamassu_store::backend::{Backend, LocalBackend};
use lamassu_store::file::{AnchoredFiles, File};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const BLOCK: usize = 4096;

/// Another process opens the file of an anchor.
fn open(setup: &Setup, files: &Arc<AnchoredFiles>, store: &dyn Backend) -> Result<File, StoreError> {
    let backing = raw(store);
    let len = backing.stat().unwrap().len;
    File::open_object(setup.context_with(Some(files.clone())), backing, len, "next", OBJECT)
}

/// The anchor as a process finds it that knows nothing of the earlier one.
fn next(side: &AnchorSide) -> AnchorSide {
    AnchorSide::again(Arc::new(|| 0), &side.table(), MemoryTrees::default())
}

fn read(file: &File) -> Vec<u8> {
    let mut back = vec![0; file.size() as usize];
    assert_eq!(file.read_at(0, &mut back).unwrap(), back.len());
    back
}

/// Compressed blocks take the space of their ciphertext. A crash leaves them pending, and the store is full: recovery
/// asks for no space, and takes none.
#[test]
fn recovery_of_compressed_blocks_takes_no_space() {
    const LEN: usize = 64 << 10;
    for (is_anchored, is_replaced) in [(false, false), (true, false), (false, true), (true, true)] {
        let dir = tempfile::tempdir().unwrap();
        let store = FaultBackend::new(Arc::new(LocalBackend::open(dir.path()).unwrap()));
        let setup = Setup { block_size: LEN as u32, reserved: 8, codec: Some(Codec::Lz4), ..Setup::default() };
        let setup = Setup { anchored: is_anchored, ..setup };
        let disk_use =
            || dir.path().read_dir().unwrap().map(|e| e.unwrap().metadata().unwrap().blocks() * 512).sum::<u64>();
        let side = AnchorSide::new(Arc::new(|| 0), 4, true);
        let backing = create_in(&store);
        let file = match is_anchored {
            true => File::create_object(setup.context_with(Some(side.files.clone())), backing, "test", OBJECT),
            false => File::create(setup.context(), backing, "test"),
        };
        let file = file.unwrap();
        if is_replaced {
            file.write_at(0, &fill(8 * LEN, &mut Rng(1))).unwrap();
            file.settle_now().unwrap();
        }
        let text = fill(8 * LEN, &mut Rng(2));
        let small = disk_use();
        file.write_at(0, &text).unwrap();
        file.flush().unwrap();
        drop(file); // killed
        store.sync().unwrap(); // what ext4 has not allocated yet does not count
        let left = disk_use();
        assert_eq!(left >= 8 * LEN as u64, is_replaced, "{left} bytes: replaced blocks have their places");
        if !is_replaced {
            store.faults().rule(|c| {
                let takes_space = c.call == Call::Allocate || (c.call == Call::Write && c.len >= LEN as u64);
                takes_space.then_some(Fault::Errno(libc::ENOSPC))
            });
        }
        let file = match is_anchored {
            true => open(&setup, &next(&side).files, &store),
            false => File::open(setup.context(), raw(&store), "next"),
        };
        let file = file.unwrap();
        assert!(read(&file) == text);
        file.settle_now().unwrap();
        assert!(read(&file) == text);
        let after = disk_use();
        match is_replaced {
            true => assert!(after <= small + 2 * LEN as u64, "{after} bytes: zeros stay, {small} before"),
            false => assert_eq!(after, left, "zeros were written"),
        }
    }
}

/// More processes than there are windows fail to recover a file, each after the anchor knows of it. The next one does.
#[test]
fn a_file_that_many_processes_could_not_recover_is_recovered() {
    for is_pending in [false, true] {
        let setup = Setup { anchored: true, ..Setup::default() };
        let memory = Arc::new(MemoryBackend::new());
        let store = FaultBackend::new(memory.clone());
        let mut side = AnchorSide::new(Arc::new(|| 0), 4, true);
        let ctx = setup.context_with(Some(side.files.clone()));
        let pages = [0, 1, 2].map(|page| ctx.geometry.page_offset(PageNo(page)).0);
        let file = File::create_object(ctx, create_in(&store), "test", OBJECT).unwrap();
        let mut content = fill(150 * BLOCK, &mut Rng(1));
        file.write_at(0, &content).unwrap();
        file.sync().unwrap();
        side.commit(side.files.anchor().mark());
        let new = fill(3 * BLOCK, &mut Rng(2));
        for at in [0, 100 * BLOCK] {
            file.write_at(at as u64, &new).unwrap();
            content[at..at + new.len()].copy_from_slice(&new);
        }
        file.flush().unwrap();
        if !is_pending {
            // Pages without pending bits, which no commit of the anchor covers.
            let mark = file.covered_mark();
            store.sync().unwrap();
            file.settle(mark).unwrap();
        }
        drop(file);
        for n in 0..2 * lamassu_anchor::WINDOWS_MAX {
            side = next(&side);
            // Some write a page before they fail.
            let left = AtomicUsize::new(usize::from(n % 5 == 4));
            store.faults().rule(move |c| {
                let is_page = c.call == Call::Write && pages.contains(&c.offset);
                let is_left = || left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok();
                (is_page && !is_left()).then_some(Fault::Errno(libc::EIO))
            });
            let failed = open(&setup, &side.files, &store).err();
            assert!(matches!(failed, Some(StoreError::Io { .. })), "process {n}, pending {is_pending}: {failed:?}");
            store.faults().clear_rules();
        }
        let row = side.files.anchor().row(OBJECT).unwrap();
        assert_eq!(row.file().unwrap().open.as_ref().unwrap().windows.len(), lamassu_anchor::WINDOWS_MAX);
        side = next(&side);
        let file = open(&setup, &side.files, &store).unwrap();
        assert!(read(&file) == content);
        drop(file);
        let file = open(&setup, &next(&side).files, &store).unwrap();
        assert!(read(&file) == content);
    }
}

/// The same, and what fails is the barrier: the kernel then takes the pages for written, and shows them. A power cut
/// after the one that succeeds leaves a state that existed.
#[test]
fn a_window_is_dropped_only_for_what_is_durable() {
    let setup = Setup { anchored: true, ..Setup::default() };
    let crash = Arc::new(CrashBackend::new());
    let store = FaultBackend::new(crash.clone());
    let mut side = AnchorSide::new(Arc::new(|| 0), 4, true);
    let ctx = setup.context_with(Some(side.files.clone()));
    let file = File::create_object(ctx, create_in(&store), "test", OBJECT).unwrap();
    let mut content = fill(20 * BLOCK, &mut Rng(1));
    file.write_at(0, &content).unwrap();
    file.sync().unwrap();
    side.commit(side.files.anchor().mark());
    let new = fill(3 * BLOCK, &mut Rng(2));
    file.write_at(0, &new).unwrap();
    content[..new.len()].copy_from_slice(&new);
    file.flush().unwrap();
    drop(file);
    // This much got to the disk by itself.
    store.sync().unwrap();
    for n in 0..lamassu_anchor::WINDOWS_MAX - 1 {
        side = next(&side);
        // The page is written, and then the barrier fails, and each one after it.
        crash.fail_syncs(100, libc::EIO);
        assert!(open(&setup, &side.files, &store).is_err(), "the barrier failed");
        crash.fail_syncs(0, libc::EIO);
        let row = side.files.anchor().row(OBJECT).unwrap();
        let windows = row.file().unwrap().open.as_ref().unwrap().windows.len();
        assert!(windows <= n + 2);
    }
    // Each barrier but the first one of the next process fails, too.
    for is_well in [false, true] {
        side = next(&side);
        let barriers = AtomicUsize::new(0);
        store.faults().rule(move |c| {
            let is_late = || barriers.fetch_add(1, Relaxed) > 0;
            (!is_well && c.call == Call::SyncData && is_late()).then_some(Fault::Errno(libc::EIO))
        });
        let opened = open(&setup, &side.files, &store);
        store.faults().clear_rules();
        assert_eq!(opened.is_ok(), is_well);
        let sim = CrashSim::new(crash.log());
        let point = sim.at(crash.position());
        for (n, state) in [point.least_state(), point.most_state(), point.random_state(1)].into_iter().enumerate() {
            let file = open(&setup, &next(&side).files, &state).unwrap();
            assert!(read(&file) == content, "state {n}, well {is_well}");
        }
    }
}

/// A block is punched in a store that cannot punch, and the kernel loses the zeros and shows them. The process that was
/// told has ended. The next one takes the block for a hole, and fills it: a power cut leaves no damage.
#[test]
fn zeros_that_an_earlier_process_lost_are_written_again() {
    let setup = Setup { convergent: false, ..Setup::default() };
    let crash = Arc::new(CrashBackend::new());
    let store = FaultBackend::new(crash.clone());
    store.faults().fail_always(Call::Punch, libc::EOPNOTSUPP);
    let old = fill(8 * BLOCK, &mut Rng(1));
    let file = File::create(setup.context(), create_in(&store), "first").unwrap();
    file.write_at(0, &old).unwrap();
    file.settle_now().unwrap();
    store.sync().unwrap();
    file.punch(2 * BLOCK as u64, BLOCK as u64).unwrap();
    file.flush().unwrap();
    crash.fail_syncs(1, libc::EIO);
    file.sync().expect_err("the barrier failed");
    drop(file); // killed

    let file = File::open(setup.context(), raw(&store), "second").unwrap();
    let found = read(&file);
    assert!(found[2 * BLOCK..3 * BLOCK].iter().all(|byte| *byte == 0));
    file.sync().unwrap();
    let new = fill(BLOCK, &mut Rng(2));
    file.write_at(2 * BLOCK as u64, &new).unwrap();
    file.flush().unwrap();
    let sim = CrashSim::new(crash.log());
    let point = sim.at(crash.position());
    let states = (0..200).map(|seed| point.random_state(seed)).chain([point.least_state(), point.most_state()]);
    for (n, state) in states.enumerate() {
        let file = File::open(setup.context(), raw(&state), "third").unwrap();
        let mut back = vec![0; BLOCK];
        file.read_at(2 * BLOCK as u64, &mut back).unwrap_or_else(|e| panic!("state {n}: {e}"));
        assert!(back == new || back.iter().all(|byte| *byte == 0), "state {n}");
    }
}
