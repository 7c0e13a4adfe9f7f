//! Random operations on one encrypted file, against a vector of bytes; with reopening among them.

use crate::common;
use common::{Rng, Setup, create_in, fill, raw};
use lamassu_format::{Codec, Domain, Suite};
use lamassu_store::backend::fault::{Call, FaultBackend};
use lamassu_store::backend::memory::MemoryBackend;
use lamassu_store::file::File;
use std::sync::{Arc, Mutex};

fn open(setup: &Setup, store: &MemoryBackend) -> File {
    File::open(setup.context(), raw(store), "test").expect("opens")
}

fn verify(file: &File, model: &[u8], what: &str) {
    assert_eq!(file.size(), model.len() as u64, "{what}: size");
    let mut back = vec![0xaau8; model.len() + 10];
    let n = file.read_at(0, &mut back).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(n, model.len(), "{what}");
    let differs = back[..n].iter().zip(model).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{what}: first difference");
}

fn run(setup: &Setup, seed: u64, steps: usize, size_max: u64) {
    let mut rng = Rng(seed);
    let store = MemoryBackend::new();
    let mut file = File::create(setup.context(), create_in(&store), "test").expect("creates");
    let mut model: Vec<u8> = Vec::new();
    for step in 0..steps {
        let what = format!("seed {seed} step {step}");
        let offset = rng.below(size_max);
        let len = match rng.below(4) {
            0 => rng.below(size_max / 4),
            1 => 4096 * (1 + rng.below(20)),
            _ => rng.below(9000),
        };
        let aligned = rng.below(3) == 0;
        let offset = if aligned { offset / 4096 * 4096 } else { offset };
        match rng.below(14) {
            0..=3 => {
                let data = setup.content(len as usize, &mut rng);
                file.write_at(offset, &data).unwrap_or_else(|e| panic!("{what}: {e}"));
                if len > 0 {
                    model.resize(model.len().max((offset + len) as usize), 0);
                    model[offset as usize..(offset + len) as usize].copy_from_slice(&data);
                }
            }
            4..=5 => {
                let data = setup.content(len as usize % 5000, &mut rng);
                assert_eq!(file.append(&data).expect("appends"), model.len() as u64);
                model.extend_from_slice(&data);
            }
            6 => {
                let size = if rng.below(4) == 0 { 0 } else { offset };
                file.truncate(size).unwrap_or_else(|e| panic!("{what}: truncate: {e}"));
                model.resize(size as usize, 0);
            }
            7 => {
                file.punch(offset, len).unwrap_or_else(|e| panic!("{what}: punch: {e}"));
                let end = (offset + len).min(model.len() as u64).max(offset.min(model.len() as u64));
                model[offset.min(end) as usize..end as usize].fill(0);
            }
            8 => file.flush().unwrap_or_else(|e| panic!("{what}: flush: {e}")),
            9 => file.sync().unwrap_or_else(|e| panic!("{what}: sync: {e}")),
            10 => file.settle_now().unwrap_or_else(|e| panic!("{what}: settle: {e}")),
            11 => {
                file.flush().expect("flushes");
                drop(file);
                file = open(setup, &store);
            }
            12 => {
                file.settle_now().expect("settles");
                file.check(true, &mut |_| {}).expect("repairs");
                drop(file);
                file = open(setup, &store);
                let found = file.check(false, &mut |_| {}).expect("checks");
                assert_eq!((found.damage, found.excess, found.recovered), (vec![], 0, 0), "{what}");
                assert!(!file.needs_settle(), "{what}: settled");
            }
            _ => {
                let at = rng.below(size_max);
                let data = file.seek_data(at).expect("seeks");
                let hole = file.seek_hole(at).expect("seeks");
                if at >= model.len() as u64 {
                    assert_eq!((data, hole), (None, None), "{what}");
                } else {
                    let until = data.unwrap_or(model.len() as u64);
                    assert!(model[at as usize..until as usize].iter().all(|b| *b == 0), "{what}: skipped data");
                    assert!(hole.is_some_and(|h| h >= at && h <= model.len() as u64), "{what}");
                    // In parts, and no further than asked.
                    let (mut end, last) = (at, at + rng.below(size_max));
                    while let Some(part) = file.hole_at(end, last, rng.below(2 * size_max)).expect("seeks") {
                        if part.end == end {
                            break;
                        }
                        end = part.end;
                    }
                    assert_eq!(end, until.min(last), "{what}");
                }
            }
        }
        verify(&file, &model, &what);
    }
}

#[test]
fn small_files() {
    for seed in 0..150 {
        run(&Setup::default(), seed, 40, 12_000);
    }
}

#[test]
fn several_pages() {
    for seed in 1000..1040 {
        run(&Setup::default(), seed, 40, 900_000);
    }
}

#[test]
fn every_suite() {
    for suite in Suite::ALL {
        for seed in 0..10 {
            run(&Setup { suite, reserved: 8, ..Setup::default() }, 7000 + seed, 30, 600_000);
        }
    }
}

#[test]
fn every_domain() {
    for (suite, domain) in
        Suite::ALL.into_iter().flat_map(|s| Domain::ALL.map(|d| (s, d))).filter(|(s, d)| d.is_for(*s))
    {
        for seed in 0..6 {
            run(&Setup { suite, domain, reserved: 8, ..Setup::default() }, 11_000 + seed, 30, 600_000);
        }
    }
}

#[test]
fn one_transient_slot() {
    for seed in 0..30 {
        run(&Setup { reserved: 1, ..Setup::default() }, 5000 + seed, 30, 700_000);
    }
}

#[test]
fn large_blocks() {
    for (block_size, size_max) in [(8192, 500_000), (65536, 9_000_000), (1 << 20, 20_000_000)] {
        for seed in 0..6 {
            run(&Setup { block_size, convergent: seed % 2 == 0, ..Setup::default() }, 9000 + seed, 25, size_max);
        }
    }
}

#[test]
fn compressed_blocks() {
    for (block_size, size_max) in [(4096, 700_000), (8192, 500_000), (16384, 1_500_000), (65536, 5_000_000)] {
        for (seed, codec) in (0..8).zip([Codec::Lz4, Codec::Zstd(1)].into_iter().cycle()) {
            let suite = [Suite::Aes, Suite::Blake3, Suite::Chacha][seed as usize % 3];
            let domain = [Domain::Zone, Domain::File][seed as usize % 5 / 3];
            let setup = Setup { block_size, suite, domain, reserved: 8, codec: Some(codec), ..Setup::default() };
            run(&setup, 13_000 + seed, 30, size_max);
        }
    }
}

/// Blocks of a large write are sealed together and share memory, which lives until the last of them is gone.
#[test]
fn overlapping_large_writes_take_bounded_memory() {
    let store = MemoryBackend::new();
    let setup = Setup::default();
    let file = File::create(setup.context(), create_in(&store), "test").unwrap();
    let mut rng = Rng(3);
    let mut model = vec![0; 64 << 20];
    for round in 0..4 {
        // Each write leaves one block of the one before.
        for first in 0..240 {
            let offset = ((round * 16) << 20) + first * 4096;
            let data = fill((256 - first) * 4096, &mut rng);
            file.write_at(offset as u64, &data).unwrap();
            model[offset..][..data.len()].copy_from_slice(&data);
            assert!(file.dirty_len() < 80 << 20, "{}", file.dirty_len());
        }
        // What is still in the buffer is read from there, and can be changed in part.
        let at = ((round * 16) << 20) + 100 * 4096 + 7;
        file.write_at(at as u64, b"changed").unwrap();
        model[at..][..7].copy_from_slice(b"changed");
        let mut back = vec![0; 1 << 20];
        let n = file.read_at(((round * 16) << 20) as u64, &mut back).unwrap();
        assert!(n == back.len() && back == model[(round * 16) << 20..][..n]);
    }
    file.sync().unwrap();
    let size = file.size() as usize;
    let reopened = File::open(setup.context(), file.backing().clone(), "test").unwrap();
    let mut back = vec![0; size];
    assert_eq!(reopened.read_at(0, &mut back).unwrap(), size);
    assert!(back == model[..size]);
}

/// What lies between the old end of the backing file and a write past it, XFS allocates by itself, away from the data
/// that comes there.
#[test]
fn a_commit_that_grows_a_file_jumps_past_its_end_once() {
    let store = FaultBackend::new(Arc::new(MemoryBackend::new()));
    let file = File::create(Setup::default().context(), create_in(&store), "test").expect("creates");
    file.write_at(0, &[1; 5000]).expect("writes");
    file.settle_now().expect("settles");
    let state = Arc::new(Mutex::new((file.backing().stat().expect("stat").len, 0, 0)));
    let seen = Arc::clone(&state);
    store.faults().rule(move |c| {
        let (end, jumps, writes) = &mut *seen.lock().expect("not poisoned");
        if c.call == Call::Write {
            (*jumps, *writes) = (*jumps + usize::from(c.offset > *end), *writes + 1);
            *end = (*end).max(c.offset + c.len);
        }
        None
    });
    for n in 0..2 {
        file.write_at(5000 + n * (4 << 20), &fill(4 << 20, &mut Rng(n))).expect("writes");
        file.sync().expect("syncs");
        let (_, jumps, writes) = *state.lock().expect("not poisoned");
        assert_eq!(jumps as u64, n + 1, "in {writes} writes");
        assert!(writes > 32, "of many pages and runs between them: {writes}");
    }
}
