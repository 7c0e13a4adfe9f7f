//! Re-keying one file: what is touched, what is not, and what the old keys are still needed for.
use crate::common;
use common::{Rng, Setup, create_in, epochs, fill, flip, raw};
use lamassu_format::Suite;
use lamassu_format::{BlockNo, PageNo};
use lamassu_store::Backend;
use lamassu_store::backend::memory::MemoryBackend;
use lamassu_store::backend::{SetTime, Time};
use lamassu_store::file::{File, FileContext, Rekey, RekeyStep};
use std::sync::Arc;

const SIZE: usize = 3_000_000;

/// A settled file of `len` bytes under epoch 1, and its content.
fn stored(ctx: &Arc<FileContext>, store: &dyn Backend, len: usize) -> Vec<u8> {
    let data = fill(len, &mut Rng(7));
    let file = File::create(ctx.clone(), create_in(store), "test").unwrap();
    file.write_at(0, &data).unwrap();
    file.settle_now().unwrap();
    data
}

fn context(setup: &Setup, numbers: std::ops::RangeInclusive<u8>) -> Arc<FileContext> {
    let ctx = setup.context();
    ctx.ring.replace(&epochs(numbers.clone(), 1), &epochs(numbers, 2));
    ctx
}

/// Every step, added up.
fn rekey(file: &File, work: Rekey) -> RekeyStep {
    let (mut all, mut from) = (RekeyStep::default(), Some(PageNo::ZERO));
    while let Some(page) = from {
        let step = file.rekey(work, page).unwrap();
        all.pages = step.pages;
        all.resealed += step.resealed;
        all.reencrypted += step.reencrypted;
        all.damaged += step.damaged;
        all.read += step.read;
        all.written += step.written;
        from = step.next;
    }
    all
}

fn is_whole(ctx: &Arc<FileContext>, store: &dyn Backend, data: &[u8]) -> bool {
    let file = File::open(ctx.clone(), raw(store), "test").unwrap();
    let mut back = vec![0; data.len()];
    let clean = file.check(false, &mut |_| {}).unwrap().damage.is_empty();
    clean && file.size() == data.len() as u64 && file.read_at(0, &mut back).is_ok() && back == data
}

#[test]
fn the_newest_keys_alone_open_what_was_rekeyed() {
    for (suite, block_size) in
        [(Suite::Aes, 4096), (Suite::Paper, 4096), (Suite::Blake3, 65536), (Suite::Chacha, 16384)]
    {
        for len in [0, 1, 5_000, SIZE] {
            let setup = Setup { suite, block_size, reserved: 8, ..Setup::default() };
            let store = MemoryBackend::new();
            let data = stored(&context(&setup, 1..=1), &store, len);
            let time = Time { seconds: 12_345, nanos: 6 };
            raw(&store).set_times(SetTime::Keep, SetTime::At(time)).unwrap();
            let both = context(&setup, 1..=2);
            let outer_alone = setup.context();
            outer_alone.ring.replace(&epochs(1..=2, 1), &epochs(2..=2, 2));
            let newest = context(&setup, 2..=2);

            let file = File::open(both.clone(), raw(&store), "test").unwrap();
            let done = rekey(&file, Rekey::Outer);
            assert_eq!((done.reencrypted, done.damaged), (0, 0));
            assert_eq!(done.resealed, done.pages, "{suite:?} {len}");
            assert!(is_whole(&outer_alone, &store, &data));
            assert!(!is_whole(&newest, &store, &data) || len < block_size as usize, "blocks still need the old K_in");
            let again = RekeyStep { read: 0, ..rekey(&file, Rekey::Outer) };
            assert_eq!(again, RekeyStep { pages: done.pages, ..RekeyStep::default() });

            let done = rekey(&file, Rekey::Full);
            assert_eq!(done.damaged, 0);
            drop(file);
            assert!(is_whole(&newest, &store, &data), "{suite:?} {len}");
            assert!(!is_whole(&context(&setup, 1..=1), &store, &data));
            assert_eq!(raw(&store).stat().unwrap().mtime, time);
            let file = File::open(both, raw(&store), "test").unwrap();
            let again = rekey(&file, Rekey::Full);
            assert_eq!((again.resealed, again.reencrypted), (0, 0));
        }
    }
}

#[test]
fn resealing_moves_under_two_percent() {
    let (setup, store) = (Setup { reserved: 8, ..Setup::default() }, MemoryBackend::new());
    for len in [1 << 20, 20 << 20] {
        let store = if len == 1 << 20 { &store } else { &MemoryBackend::new() };
        stored(&context(&setup, 1..=1), store, len);
        let file = File::open(context(&setup, 1..=2), raw(store), "test").unwrap();
        let done = rekey(&file, Rekey::Outer);
        let share = |bytes: u64| bytes as f64 / len as f64;
        let (read, written) = (share(done.read), share(done.written));
        println!("{len} bytes: {:.3} % read, {:.3} % written", read * 100.0, written * 100.0);
        assert!(read < 0.02 && written < 0.02, "{read} {written}");
    }
}

#[test]
fn equal_small_files_stay_equal() {
    let setup = Setup { reserved: 8, ..Setup::default() };
    let stores = [MemoryBackend::new(), MemoryBackend::new()];
    let bytes = stores.each_ref().map(|store| {
        stored(&context(&setup, 1..=1), store, 9_000);
        let file = File::open(context(&setup, 1..=2), raw(store), "test").unwrap();
        rekey(&file, Rekey::Full);
        file.settle_now().unwrap();
        drop(file);
        common::sector(store, 0)
    });
    assert_eq!(bytes[0], bytes[1]);
}

#[test]
fn what_is_buffered_or_written_meanwhile_stays() {
    let (setup, store) = (Setup { reserved: 2, ..Setup::default() }, MemoryBackend::new());
    let mut data = stored(&context(&setup, 1..=1), &store, SIZE);
    let file = File::open(context(&setup, 1..=2), raw(&store), "test").unwrap();
    file.write_at(10_000, &[9; 50_000]).unwrap();
    data[10_000..60_000].fill(9);
    let mut from = file.rekey(Rekey::Full, PageNo::ZERO).unwrap().next;
    file.write_at(5, b"between").unwrap();
    data[5..12].copy_from_slice(b"between");
    file.truncate(SIZE as u64 - 4_000).unwrap();
    data.truncate(SIZE - 4_000);
    while let Some(page) = from {
        from = file.rekey(Rekey::Full, page).unwrap().next;
    }
    file.settle_now().unwrap();
    drop(file);
    assert!(is_whole(&context(&setup, 2..=2), &store, &data));
}

#[test]
fn damage_stays_and_the_rest_is_rekeyed() {
    let (setup, store) = (Setup { reserved: 8, ..Setup::default() }, MemoryBackend::new());
    stored(&context(&setup, 1..=1), &store, SIZE);
    let geometry = setup.context().geometry;
    flip(&store, geometry.block_offset(BlockNo(3)).0 + 9);
    flip(&store, geometry.page_offset(PageNo(2)).0 + 99);
    let file = File::open(context(&setup, 1..=2), raw(&store), "test").unwrap();
    let done = rekey(&file, Rekey::Full);
    assert_eq!(done.damaged, 2);
    drop(file);
    let file = File::open(context(&setup, 2..=2), raw(&store), "test").unwrap();
    let found = file.check(false, &mut |_| {}).unwrap();
    assert_eq!(found.damage.len(), 2, "{:?}", found.damage);
}
