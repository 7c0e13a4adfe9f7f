//! File contents.

use super::support::{errno, pattern, read_write};
use rustix::fs::{Advice, FallocateFlags, FlockOperation, SeekFrom};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

fn seek_data(file: &File, offset: u64) -> std::io::Result<u64> {
    Ok(rustix::fs::seek(file, SeekFrom::Data(offset))?)
}

fn seek_hole(file: &File, offset: u64) -> std::io::Result<u64> {
    Ok(rustix::fs::seek(file, SeekFrom::Hole(offset))?)
}

fn allocate(file: &File, mode: FallocateFlags, offset: u64, len: u64) -> std::io::Result<()> {
    Ok(rustix::fs::fallocate(file, mode, offset, len)?)
}

/// truncate(2), which opens nothing.
fn truncate(path: &Path, len: i64) {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: a text that ends with NUL, and lives until the call returns.
    assert_eq!(unsafe { libc::truncate(path.as_ptr(), len) }, 0, "{}", std::io::Error::last_os_error());
}

/// Makes the kernel read the file again.
fn evict(file: &File) {
    file.sync_all().unwrap();
    rustix::fs::fadvise(file, 0, None, Advice::DontNeed).unwrap();
}

/// With write-back the kernel sends the times of a file that was just removed: an error then would be the sync's, and
/// so fail a freeze.
pub fn syncs_after_files_were_replaced(dir: &Path) {
    let handle = File::open(dir).unwrap();
    for i in 0..60 {
        std::fs::write(dir.join("new"), pattern(50_000, i)).unwrap();
        std::fs::rename(dir.join("new"), dir.join(if i % 2 == 0 { "a" } else { "b" })).unwrap();
    }
    rustix::fs::syncfs(&handle).unwrap();
}

pub fn write_and_read_back(dir: &Path) {
    let path = dir.join("f");
    for len in [0usize, 1, 31, 4095, 4096, 4097, 131_072, 1_000_003] {
        let data = pattern(len, len as u64);
        std::fs::write(&path, &data).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), len as u64);
        assert!(std::fs::read(&path).unwrap() == data, "{len} bytes");
    }
    // Overwrites at odd places, against a model.
    let mut model = pattern(1_000_003, 1_000_003);
    let file = read_write(&path);
    for i in 0..60u64 {
        let (at, len) = ((i * 7_654_321) % 1_000_000, 1 + (i * 977) % 20_000);
        let piece = pattern(len as usize, i);
        file.write_all_at(&piece, at).unwrap();
        let end = (at + len) as usize;
        if model.len() < end {
            model.resize(end, 0);
        }
        model[at as usize..end].copy_from_slice(&piece);
    }
    evict(&file);
    assert!(std::fs::read(&path).unwrap() == model);
}

pub fn appends_interleave(dir: &Path) {
    let path = dir.join("log");
    let open = || OpenOptions::new().append(true).create(true).open(&path).unwrap();
    let (mut a, mut b) = (open(), open());
    for i in 0..300 {
        writeln!(a, "a{i:05}").unwrap();
        writeln!(b, "b{i:05}").unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.len(), 600 * 7);
    for (i, line) in text.lines().enumerate() {
        assert_eq!(line, format!("{}{:05}", if i % 2 == 0 { 'a' } else { 'b' }, i / 2));
    }
}

pub fn truncates_both_ways(dir: &Path) {
    let path = dir.join("t");
    let data = pattern(100_000, 3);
    std::fs::write(&path, &data).unwrap();
    let file = read_write(&path);
    file.set_len(50_001).unwrap();
    file.set_len(60_000).unwrap();
    let mut expect = data[..50_001].to_vec();
    expect.resize(60_000, 0);
    assert!(std::fs::read(&path).unwrap() == expect);
    rustix::fs::truncate_path(&path, 10);
    assert!(std::fs::read(&path).unwrap() == data[..10]);
    drop(OpenOptions::new().write(true).truncate(true).open(&path).unwrap());
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    file.set_len(5000).unwrap();
    assert!(std::fs::read(&path).unwrap() == vec![0; 5000]);
}

/// truncate(2) by path, which reaches the daemon without a handle.
mod rustix {
    pub use ::rustix::*;
    pub mod fs {
        pub use ::rustix::fs::*;
        pub fn truncate_path(path: &std::path::Path, len: u64) {
            let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
            // SAFETY: a NUL-terminated string that outlives the call.
            assert_eq!(unsafe { libc::truncate(path.as_ptr(), len as i64) }, 0);
        }
    }
}

pub fn shared_maps(dir: &Path) {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
    let path = dir.join("m");
    let data = pattern(40_000, 9);
    std::fs::write(&path, &data).unwrap();
    let file = read_write(&path);
    let both = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping of a file this test alone uses and does not shrink; unmapped below, after the last use of
    // the slice.
    let map = unsafe { mmap(std::ptr::null_mut(), data.len(), both, MapFlags::SHARED, &file, 0) }.unwrap();
    // SAFETY: as above; `map` is valid for `data.len()` bytes.
    let slice = unsafe { std::slice::from_raw_parts_mut(map.cast::<u8>(), data.len()) };
    assert!(slice == data.as_slice());
    slice[5] = 1;
    slice[39_999] = 2;
    // SAFETY: the mapping exists.
    unsafe { msync(map, data.len(), MsyncFlags::SYNC) }.unwrap();
    let mut now = data.clone();
    (now[5], now[39_999]) = (1, 2);
    assert!(std::fs::read(&path).unwrap() == now);
    file.write_all_at(b"xyz", 20_000).unwrap();
    now[20_000..20_003].copy_from_slice(b"xyz");
    assert!(slice == now.as_slice(), "a write shows in the map");
    slice[7] = 3;
    now[7] = 3;
    // SAFETY: the slice is not used again.
    unsafe { munmap(map, data.len()) }.unwrap();
    drop(file);
    let file = File::open(&path).unwrap();
    evict(&file);
    assert!(std::fs::read(&path).unwrap() == now, "changes through the map alone");
}

#[repr(align(4096))]
struct Aligned([u8; 65_536]);

pub fn direct_io(dir: &Path) {
    let path = dir.join("d");
    let open = || {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).custom_flags(libc::O_DIRECT).open(&path).unwrap()
    };
    let mut block = Box::new(Aligned([0; 65_536]));
    let direct = open();
    for i in 0..8u64 {
        block.0.copy_from_slice(&pattern(65_536, i));
        direct.write_all_at(&block.0, i * 65_536).unwrap();
    }
    let all: Vec<u8> = (0..8).flat_map(|i| pattern(65_536, i)).collect();
    assert!(std::fs::read(&path).unwrap() == all, "cached read after direct writes");
    // A cached write is seen by a direct read, and a direct write by a cached one.
    let cached = read_write(&path);
    cached.write_all_at(&[7; 4096], 4096).unwrap();
    direct.read_exact_at(&mut block.0, 0).unwrap();
    assert!(block.0[4096..8192] == [7; 4096] && block.0[..4096] == all[..4096]);
    block.0.fill(9);
    direct.write_all_at(&block.0, 0).unwrap();
    let mut byte = [0; 1];
    cached.read_exact_at(&mut byte, 5000).unwrap();
    assert_eq!(byte, [9]);
    assert_eq!(direct.read_at(&mut block.0, 8 * 65_536).unwrap(), 0, "end of file");
    assert_eq!(direct.read_at(&mut block.0, 8 * 65_536 - 4096).unwrap(), 4096);
    // The file's end may lie in the page cache alone, behind what is read: that is a hole then, and not the end.
    cached.set_len(1).unwrap();
    cached.sync_all().unwrap();
    cached.write_all_at(&[3; 100], 2 * 65_536).unwrap();
    assert_eq!(direct.read_at(&mut block.0, 65_536).unwrap(), 65_536, "a hole before a cached end");
    assert!(block.0 == [0; 65_536]);
}

/// What cached reads bring in while a direct write is on its way must not outlive it.
pub fn direct_writes_beside_cached_readers(dir: &Path) {
    use std::sync::atomic::{AtomicBool, Ordering};
    const LEN: usize = 640 << 10;
    let path = dir.join("d");
    std::fs::write(&path, vec![0; LEN]).unwrap();
    let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    let cached = read_write(&path);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let file = read_write(&path);
                let mut buffer = vec![0; LEN];
                while !done.load(Ordering::Relaxed) {
                    file.read_exact_at(&mut buffer, 0).unwrap();
                }
            });
        }
        let mut buffer = vec![0; LEN];
        let stale = (1..200u8).find(|&round| {
            direct.write_all_at(&vec![round; LEN], 0).unwrap();
            cached.read_exact_at(&mut buffer, 0).unwrap();
            buffer.iter().any(|&byte| byte != round)
        });
        done.store(true, Ordering::Relaxed);
        assert_eq!(stale, None, "the write after which older contents were read");
    });
}

pub fn synchronous_writes(dir: &Path) {
    for (name, flags) in [("s", libc::O_SYNC), ("ds", libc::O_DSYNC), ("dd", libc::O_DSYNC | libc::O_DIRECT)] {
        let path = dir.join(name);
        let file = OpenOptions::new().write(true).create_new(true).custom_flags(flags).open(&path).unwrap();
        let block = Box::new(Aligned([5; 65_536]));
        file.write_all_at(&block.0, 0).unwrap();
        drop(file);
        assert!(std::fs::read(&path).unwrap() == [5; 65_536]);
    }
}

pub fn holes_are_found(dir: &Path) {
    const MIB: u64 = 1 << 20;
    let path = dir.join("h");
    let file = read_write(&path);
    file.write_all_at(&[1; 65_536], MIB).unwrap();
    file.set_len(4 * MIB).unwrap();
    drop(file);
    let file = File::open(&path).unwrap();
    assert_eq!(seek_hole(&file, 0).unwrap(), 0);
    assert_eq!(seek_data(&file, 0).unwrap(), MIB);
    assert_eq!(seek_hole(&file, MIB).unwrap(), MIB + 65_536);
    assert_eq!(errno(seek_data(&file, 2 * MIB)), libc::ENXIO);
    assert_eq!(errno(seek_data(&file, 4 * MIB)), libc::ENXIO);
    assert_eq!(errno(seek_hole(&file, 9 * MIB)), libc::ENXIO);
    assert!(file.metadata().unwrap().blocks() * 512 < MIB, "holes take no space");
    let mut data = vec![9; MIB as usize];
    file.read_exact_at(&mut data, 2 * MIB).unwrap();
    assert!(data == vec![0; MIB as usize]);
}

pub fn data_only_in_the_page_cache_is_found(dir: &Path) {
    let path = dir.join("c");
    let file = read_write(&path);
    file.set_len(1 << 20).unwrap();
    file.write_all_at(&[1; 4096], 65_536).unwrap();
    assert_eq!(seek_data(&file, 0).unwrap(), 65_536);
    file.write_all_at(&[2; 4096], 3 << 20).unwrap();
    assert_eq!(seek_data(&file, 1 << 20).unwrap(), 3 << 20, "beyond the size the daemon knew");
    assert_eq!(seek_hole(&file, 3 << 20).unwrap(), (3 << 20) + 4096);
}

pub fn fallocate_modes(dir: &Path) {
    let path = dir.join("a");
    let data = pattern(262_144, 4);
    std::fs::write(&path, &data).unwrap();
    let file = read_write(&path);
    let keep = FallocateFlags::KEEP_SIZE;
    allocate(&file, FallocateFlags::PUNCH_HOLE | keep, 65_536, 65_536).unwrap();
    let mut now = data.clone();
    now[65_536..131_072].fill(0);
    assert!(std::fs::read(&path).unwrap() == now);
    assert_eq!(seek_hole(&file, 0).unwrap(), 65_536);
    allocate(&file, FallocateFlags::PUNCH_HOLE | keep, 140_001, 777).unwrap();
    now[140_001..140_778].fill(0);
    assert!(std::fs::read(&path).unwrap() == now, "a hole inside a block");
    for (mode, size) in [(keep, 262_144), (FallocateFlags::empty(), 400_000)] {
        match allocate(&file, mode, 262_144, 137_856) {
            Ok(()) => assert_eq!(file.metadata().unwrap().len(), size),
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EOPNOTSUPP)),
        }
    }
    file.set_len(400_000).unwrap();
    now.resize(400_000, 0);
    assert!(std::fs::read(&path).unwrap() == now);
    match allocate(&file, FallocateFlags::ZERO_RANGE | keep, 1000, 9000) {
        Ok(()) => now[1000..10_000].fill(0),
        Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EOPNOTSUPP)),
    }
    evict(&file);
    assert!(std::fs::read(&path).unwrap() == now);
    assert_eq!(errno(allocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096)), libc::EOPNOTSUPP);
}

pub fn offsets_past_4_gib(dir: &Path) {
    let path = dir.join("big");
    let file = read_write(&path);
    let at = (5 << 30) + 123;
    let data = pattern(10_000, 6);
    file.write_all_at(&data, at).unwrap();
    evict(&file);
    assert_eq!(file.metadata().unwrap().len(), at + 10_000);
    let mut back = vec![0; 10_000];
    file.read_exact_at(&mut back, at).unwrap();
    assert!(back == data);
    file.read_exact_at(&mut back, 1 << 32).unwrap();
    assert!(back == vec![0; 10_000]);
}

pub fn unlinked_files_live_on(dir: &Path) {
    let path = dir.join("u");
    let file = read_write(&path);
    file.write_all_at(b"before", 0).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.write_all_at(b"after!", 100_000).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    evict(&file);
    let mut back = [0; 6];
    file.read_exact_at(&mut back, 100_000).unwrap();
    assert_eq!(&back, b"after!");
    file.set_len(3).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 3);
    // The name is free, and what takes it is another file.
    std::fs::write(&path, b"new").unwrap();
    file.read_exact_at(&mut back[..3], 0).unwrap();
    assert_eq!(&back[..3], b"bef");
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
}

pub fn concurrent_writers(dir: &Path) {
    const BLOCK: usize = 5000;
    let path = dir.join("w");
    let file = read_write(&path);
    std::thread::scope(|scope| {
        for worker in 0..4u64 {
            let (file, path) = (&file, &path);
            scope.spawn(move || {
                let own = read_write(path);
                for i in (worker..200).step_by(4) {
                    let target = if i % 2 == 0 { file } else { &own };
                    target.write_all_at(&pattern(BLOCK, i), i * BLOCK as u64).unwrap();
                    if i % 32 == 0 {
                        own.sync_data().unwrap();
                    }
                }
            });
        }
    });
    evict(&file);
    let all: Vec<u8> = (0..200).flat_map(|i| pattern(BLOCK, i)).collect();
    assert!(std::fs::read(&path).unwrap() == all);
}

pub fn large_file_survives_eviction(dir: &Path) {
    let path = dir.join("l");
    let data = pattern(24 << 20, 11);
    let mut file = File::create(&path).unwrap();
    for piece in data.chunks(300_007) {
        file.write_all(piece).unwrap();
    }
    evict(&file);
    let mut back = Vec::new();
    File::open(&path).unwrap().read_to_end(&mut back).unwrap();
    assert!(back == data);
}

pub fn copies_by_copy_file_range(dir: &Path) {
    let data = pattern(300_000, 2);
    std::fs::write(dir.join("from"), &data).unwrap();
    std::fs::copy(dir.join("from"), dir.join("to")).unwrap();
    assert!(std::fs::read(dir.join("to")).unwrap() == data);
}

pub fn locks_between_handles(dir: &Path) {
    let (a, b) = (read_write(&dir.join("k")), read_write(&dir.join("k")));
    rustix::fs::flock(&a, FlockOperation::LockExclusive).unwrap();
    assert!(rustix::fs::flock(&b, FlockOperation::NonBlockingLockExclusive).is_err());
    rustix::fs::flock(&a, FlockOperation::Unlock).unwrap();
    rustix::fs::flock(&b, FlockOperation::NonBlockingLockExclusive).unwrap();
}

pub fn reads_through_a_write_only_open_s_pages(dir: &Path) {
    let path = dir.join("p");
    let mut expect = pattern(20_000, 8);
    std::fs::write(&path, &expect).unwrap();
    evict(&File::open(&path).unwrap());
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    writer.write_all_at(b"part of a page", 5001).unwrap();
    drop(writer);
    expect[5001..5015].copy_from_slice(b"part of a page");
    assert!(std::fs::read(&path).unwrap() == expect);
}

/// Random reads, writes (cached, mapped, direct), truncations, holes and evictions of one file against the same in
/// memory.
pub fn random_operations_match_a_model(dir: &Path) {
    const MAX: u64 = 600_000;
    let path = dir.join("r");
    let (cached, direct) = (read_write(&path), open_direct(&path));
    let mut model: Vec<u8> = Vec::new();
    let mut dice = 0x1234_5678_9ABC_DEFFu64;
    for step in 0..400u64 {
        let mut roll = |below: u64| {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            dice % below
        };
        let kind = roll(12);
        let at = roll(MAX);
        let len = match roll(3) {
            0 => 1 + roll(100),
            1 => 1 + roll(10_000),
            _ => 1 + roll(150_000),
        }
        .min(MAX - at);
        let end = at + len;
        let piece = pattern(len as usize, step);
        match kind {
            0..=4 => {
                (if kind == 4 { &direct } else { &cached }).write_all_at(&piece, at).unwrap();
                model.resize(model.len().max(end as usize), 0);
                model[at as usize..end as usize].copy_from_slice(&piece);
            }
            5 if at < model.len() as u64 => {
                let end = (end as usize).min(model.len());
                write_mapped(&cached, at as usize, &piece[..end - at as usize], model.len());
                model[at as usize..end].copy_from_slice(&piece[..end - at as usize]);
            }
            6 => {
                cached.set_len(at).unwrap();
                model.resize(at as usize, 0);
            }
            7 => {
                allocate(&cached, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len).unwrap();
                let (from, to) = ((at as usize).min(model.len()), (end as usize).min(model.len()));
                model[from..to].fill(0);
            }
            8 => evict(&cached),
            9 => {
                let mut back = vec![1; len as usize];
                let n = direct.read_at(&mut back, at).unwrap();
                assert!(model.get(at as usize..).is_none_or(|rest| rest.starts_with(&back[..n])), "step {step}");
            }
            _ => {
                assert_eq!(cached.metadata().unwrap().len(), model.len() as u64, "step {step}");
                assert!(std::fs::read(&path).unwrap() == model, "step {step}");
            }
        }
    }
    drop((cached, direct));
    assert!(std::fs::read(&path).unwrap() == model);
}

fn open_direct(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

fn write_mapped(file: &File, at: usize, data: &[u8], size: usize) {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let both = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping of the whole file, which this test alone uses; unmapped before the file can shrink. `at +
    // data.len()` is not past `size`, its length.
    unsafe {
        let map = mmap(std::ptr::null_mut(), size, both, MapFlags::SHARED, file, 0).unwrap();
        std::ptr::copy_nonoverlapping(data.as_ptr(), map.cast::<u8>().add(at), data.len());
        munmap(map, size).unwrap();
    }
}

/// A map of a file that was opened for direct I/O goes through the page cache, as any map does.
pub fn maps_of_a_directly_opened_file(dir: &Path) {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let path = dir.join("f");
    let data = pattern(70_001, 5);
    let file = File::options().read(true).write(true).create(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    file.write_all_at(&data, 0).unwrap();
    // Some of it only in the page cache.
    let cached = read_write(&path);
    cached.write_all_at(&data[..9000], 60_000).unwrap();
    // SAFETY: a fresh map at an address of the kernel's choice; it is only read, within its length, while it is there.
    let found = unsafe {
        let map = mmap(std::ptr::null_mut(), data.len(), ProtFlags::READ, MapFlags::SHARED, &file, 0).unwrap();
        let found = std::slice::from_raw_parts(map.cast::<u8>(), data.len()).to_vec();
        munmap(map, data.len()).unwrap();
        found
    };
    assert!(
        found[..60_000] == data[..60_000] && found[60_000..69_000] == data[..9000] && found[69_000..] == data[69_000..]
    );
}

/// Random reads have whole windows put into the page cache; writers that come and go in between must never find their
/// bytes undone.
pub fn random_readers_never_see_old_bytes(dir: &Path) {
    use std::sync::atomic::{AtomicU64, Ordering};
    const BLOCKS: usize = 256;
    const FILES: usize = 30;
    const ROUNDS: u64 = 12;
    let block = |version: u64| version.to_ne_bytes().repeat(512);
    for n in 0..FILES {
        let path = dir.join(format!("f{n}"));
        std::fs::write(&path, vec![0; BLOCKS * 4096]).unwrap();
        let written: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
        let ended = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for reader in 0..2_u64 {
                let (path, written, ended) = (&path, &written, &ended);
                scope.spawn(move || {
                    let file = File::open(path).unwrap();
                    rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
                    let mut state = n as u64 * 2 + reader + 1;
                    let mut buffer = [0; 4096];
                    for i in 0.. {
                        if ended.load(Ordering::Acquire) != 0 {
                            break;
                        }
                        if i % 40 == 0 {
                            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
                        }
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let at = (state >> 33) as usize % BLOCKS;
                        let least = written[at].load(Ordering::Acquire);
                        // Shorter for a moment where the writer cuts and grows the file.
                        if file.read_at(&mut buffer, at as u64 * 4096).unwrap() == 4096 {
                            let seen = u64::from_ne_bytes(buffer[..8].try_into().unwrap());
                            // Less by now, if it was cut off while we read.
                            let least = least.min(written[at].load(Ordering::Acquire));
                            assert!(seen >= least, "block {at}: {seen} after {least} was written");
                        }
                    }
                });
            }
            for version in 1..=ROUNDS {
                let at = (version as usize * 97 + n) % BLOCKS;
                if version % 4 == 0 {
                    // By path: no handle tells of this change. What lies past the cut is written anew before anybody
                    // may rely on it.
                    let cut = BLOCKS / 2;
                    written[cut..].iter().for_each(|w| w.store(0, Ordering::Release));
                    truncate(&path, cut as i64 * 4096);
                    truncate(&path, BLOCKS as i64 * 4096);
                }
                read_write(&path).write_all_at(&block(version), at as u64 * 4096).unwrap();
                written[at].store(version, Ordering::Release);
                std::thread::sleep(std::time::Duration::from_millis(version % 5));
            }
            ended.store(1, Ordering::Release);
        });
        // What was cut off may not be back.
        let found = std::fs::read(&path).unwrap();
        for (at, version) in written.iter().enumerate() {
            let version = version.load(Ordering::Acquire);
            let seen = u64::from_ne_bytes(found[at * 4096..][..8].try_into().unwrap());
            assert_eq!(seen, version, "block {at}");
        }
    }
}
