//! Bytes, lengths, holes and barriers.

use super::{Store, expect_errno, name};

const PAGE: u64 = 4096;

pub fn reads_what_was_written(store: &Store) {
    let file = store.root().create_file(name("f")).unwrap();
    let data: Vec<u8> = (0..100_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
    file.write_at(3, &data).unwrap();
    file.write_at(50_000, b"over").unwrap();
    file.write_at(0, b"").unwrap();
    assert_eq!(file.stat().unwrap().len, 100_003);
    let mut expected = vec![0; 100_003];
    expected[3..].copy_from_slice(&data);
    expected[50_000..50_004].copy_from_slice(b"over");
    let mut buf = vec![9; 100_003];
    assert_eq!(file.read_at(0, &mut buf).unwrap(), 100_003);
    assert!(buf == expected);
    let again = store.root().open_file(name("f"), false).unwrap();
    let mut part = [0; 10];
    assert_eq!(again.read_at(49_998, &mut part).unwrap(), 10);
    assert_eq!(part, expected[49_998..50_008]);
}

pub fn read_is_short_only_at_the_end(store: &Store) {
    let file = store.root().create_file(name("f")).unwrap();
    file.write_at(0, &[1; 10]).unwrap();
    let mut buf = [7; 100];
    assert_eq!(file.read_at(4, &mut buf).unwrap(), 6);
    assert_eq!(file.read_at(10, &mut buf).unwrap(), 0);
    assert_eq!(file.read_at(1 << 40, &mut buf).unwrap(), 0);
    assert_eq!(file.read_at(0, &mut []).unwrap(), 0);
}

pub fn length_grows_and_shrinks(store: &Store) {
    let file = store.root().create_file(name("f")).unwrap();
    file.write_at(0, &[1; 10_000]).unwrap();
    file.set_len(5000).unwrap();
    file.set_len(20_000).unwrap();
    assert_eq!(file.stat().unwrap().len, 20_000);
    let mut buf = vec![9; 20_000];
    assert_eq!(file.read_at(0, &mut buf).unwrap(), 20_000);
    assert!(buf[..5000].iter().all(|&b| b == 1));
    assert!(buf[5000..].iter().all(|&b| b == 0), "what was cut off came back");
    file.set_len(0).unwrap();
    assert_eq!(file.stat().unwrap().len, 0);
}

pub fn punch_frees_and_keeps_the_length(store: &Store) {
    let file = store.root().create_file(name("f")).unwrap();
    file.write_at(0, &vec![1; 16 * PAGE as usize]).unwrap();
    file.sync_all().unwrap();
    let before = file.stat().unwrap().blocks;
    file.punch(4 * PAGE, 8 * PAGE).unwrap();
    file.punch(PAGE + 100, 50).unwrap();
    file.punch(15 * PAGE, 10 * PAGE).unwrap();
    file.punch(7, 0).unwrap();
    file.sync_all().unwrap();
    let stat = file.stat().unwrap();
    assert_eq!(stat.len, 16 * PAGE);
    assert!(stat.blocks <= before - 9 * 8, "{} then {}", before, stat.blocks);
    let mut buf = vec![9; 16 * PAGE as usize];
    file.read_at(0, &mut buf).unwrap();
    for (i, &b) in buf.iter().enumerate() {
        let i = i as u64;
        let freed = (4 * PAGE..12 * PAGE).contains(&i) || (PAGE + 100..PAGE + 150).contains(&i) || i >= 15 * PAGE;
        assert_eq!(b, u8::from(!freed), "at {i}");
    }
}

pub fn holes_are_found(store: &Store) {
    let file = store.root().create_file(name("f")).unwrap();
    assert_eq!(file.seek_data(0).unwrap(), None);
    assert_eq!(file.seek_hole(0).unwrap(), None);
    // Far apart, so that a store with larger blocks shows the same.
    let far = 1 << 20;
    file.write_at(far, &[1; 5000]).unwrap();
    file.set_len(4 * far).unwrap();
    file.sync_all().unwrap();
    assert_eq!(file.seek_data(0).unwrap(), Some(far));
    assert_eq!(file.seek_data(far + 7).unwrap(), Some(far + 7));
    assert_eq!(file.seek_hole(0).unwrap(), Some(0));
    let hole = file.seek_hole(far).unwrap().unwrap();
    assert!((far + 5000..2 * far).contains(&hole), "{hole}");
    assert_eq!(file.seek_data(hole).unwrap(), None);
    assert_eq!(file.seek_hole(hole + 5).unwrap(), Some(hole + 5));
    assert_eq!(file.seek_hole(4 * far).unwrap(), None);
    assert_eq!(file.seek_data(4 * far).unwrap(), None);
    file.write_at(4 * far - 1, &[1]).unwrap();
    assert_eq!(file.seek_hole(4 * far - 1).unwrap(), Some(4 * far), "the end counts as a hole");
}

pub fn allocate_keeps_the_length(store: &Store) {
    let file = store.root().create_file(name("f")).unwrap();
    file.write_at(0, b"abc").unwrap();
    match file.allocate(0, 1 << 20) {
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => return,
        other => other.unwrap(),
    }
    assert_eq!(file.stat().unwrap().len, 3);
    let mut buf = [0; 10];
    assert_eq!(file.read_at(0, &mut buf).unwrap(), 3);
    assert_eq!(&buf[..3], b"abc");
}

pub fn read_only_handles_refuse_writes(store: &Store) {
    store.root().create_file(name("f")).unwrap().write_at(0, b"abc").unwrap();
    let file = store.root().open_file(name("f"), false).unwrap();
    expect_errno(file.write_at(0, b"x"), libc::EBADF);
    expect_errno(file.punch(0, 1), libc::EBADF);
    expect_errno(file.allocate(0, 1), libc::EBADF);
    expect_errno(file.set_len(1), libc::EINVAL);
    file.sync_data().unwrap();
    let mut buf = [0; 3];
    assert_eq!(file.read_at(0, &mut buf).unwrap(), 3);
    assert_eq!(&buf, b"abc");
}

pub fn refuses_impossible_offsets(store: &Store) {
    let file = store.root().create_file(name("f")).unwrap();
    let mut buf = [0; 4];
    expect_errno(file.read_at(u64::MAX, &mut buf), libc::EINVAL);
    assert!(file.write_at(u64::MAX - 1, b"abcd").is_err());
    assert!(file.write_at(i64::MAX as u64, b"abcd").is_err());
    expect_errno(file.set_len(u64::MAX), libc::EINVAL);
    assert!(file.punch(u64::MAX - 4096, 8192).is_err());
    assert_eq!(file.stat().unwrap().len, 0);
}

pub fn syncs(store: &Store) {
    let root = store.root();
    root.make_dir(name("d"), 0o700).unwrap();
    let dir = root.open_dir(name("d")).unwrap();
    let file = dir.create_file(name("f")).unwrap();
    file.write_at(0, b"x").unwrap();
    file.sync_data().unwrap();
    file.sync_all().unwrap();
    dir.sync().unwrap();
    root.sync().unwrap();
    store.backend.sync().unwrap();
}

pub fn unlinked_file_stays_usable(store: &Store) {
    let root = store.root();
    let file = root.create_file(name("f")).unwrap();
    file.write_at(0, b"before").unwrap();
    root.unlink(name("f")).unwrap();
    file.write_at(6, b" after").unwrap();
    let mut buf = [0; 12];
    assert_eq!(file.read_at(0, &mut buf).unwrap(), 12);
    assert_eq!(&buf, b"before after");
    let stat = file.stat().unwrap();
    assert_eq!((stat.nlink, stat.len), (0, 12));
    file.sync_all().unwrap();
    let other = root.create_file(name("f")).unwrap();
    assert_ne!(other.stat().unwrap().ino, stat.ino);
    assert_eq!(other.stat().unwrap().len, 0);
}

pub fn threads_write_side_by_side(store: &Store) {
    let file = store.root().create_file(name("f")).unwrap();
    std::thread::scope(|scope| {
        for t in 0..4u64 {
            let file = file.clone();
            scope.spawn(move || {
                for i in 0..50u64 {
                    let at = (i * 4 + t) * 1000;
                    file.write_at(at, &[t as u8 + 1; 1000]).unwrap();
                    let mut buf = [0; 1000];
                    assert_eq!(file.read_at(at, &mut buf).unwrap(), 1000);
                    assert!(buf.iter().all(|&b| b == t as u8 + 1));
                }
            });
        }
    });
    assert_eq!(file.stat().unwrap().len, 200_000);
}
