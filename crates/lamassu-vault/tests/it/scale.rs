//! Many entries, many threads, little to hold: nothing grows with the tree, and concurrent callers get along.

use crate::common;

use common::*;
use lamassu_store::Backend;
use lamassu_store::backend::CrashBackend;
use lamassu_vault::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Entries of the large directory. The whole claim is 100,000: `LAMASSU_TEST_ENTRIES=100000`.
fn entries() -> usize {
    std::env::var("LAMASSU_TEST_ENTRIES").ok().and_then(|v| v.parse().ok()).unwrap_or(10_000)
}

#[test]
fn a_large_directory_is_listed_whole_and_found_by_name() {
    let (_dir, backend) = local_fast();
    let recipe = Recipe::default();
    let v = recipe.make(&backend);
    let d = v.dir("d");
    let name =
        |i: usize| if i.is_multiple_of(100) { format!("{i}-{}", "long".repeat(60)) } else { format!("entry {i}") };
    for i in 0..entries() {
        match i % 10 {
            0 => drop_entry(v.symlink(d, n(&name(i)), b"x", me()).unwrap()),
            _ => {
                let (e, h) = v.create(d, n(&name(i)), 0o644, RW, me()).unwrap();
                v.write(h, 0, &i.to_le_bytes()).unwrap();
                v.release(h).unwrap();
                v.forget(e.attr.ino, 1);
            }
        }
    }
    v.close().unwrap();
    let v = recipe.open(&backend).unwrap();
    let mut listed = v.list("d");
    listed.sort();
    let mut expected: Vec<_> = (0..entries()).map(name).collect();
    expected.sort();
    assert!(listed == expected);
    for i in (1..entries()).step_by(777) {
        let path = format!("d/{}", name(i));
        match i % 10 {
            0 => assert_eq!(v.readlink(v.ino(&path)).unwrap(), b"x"),
            _ => assert_eq!(v.get(&path), i.to_le_bytes()),
        }
    }
}

fn drop_entry(_: Entry) {}

#[test]
fn closed_files_are_settled_many_at_a_time() {
    let crash = Arc::new(CrashBackend::new());
    let backend: Arc<dyn Backend> = crash.clone();
    let v = Recipe::default().make(&backend);
    for i in 0..2000 {
        v.put(&format!("{i}"), b"small");
    }
    v.close().unwrap();
    let taken = crash.log().records().iter().filter(|r| !r.op.is_change()).count();
    assert!(taken < 80, "{taken} barriers for 2000 small files");
    assert_eq!(Recipe::default().open(&backend).unwrap().clean().recovered, 0);
}

#[test]
fn many_threads_do_everything_at_once() {
    let (_dir, backend) = local_fast();
    let recipe = Recipe::default();
    let v = Arc::new(recipe.make(&backend));
    let common = v.dir("common");
    let done = Arc::new(AtomicBool::new(false));
    let keeper = {
        let (v, done) = (v.clone(), done.clone());
        std::thread::spawn(move || {
            while !done.load(Ordering::Relaxed) {
                v.maintain().unwrap();
                v.freeze().unwrap();
                v.thaw().unwrap();
                v.sync_all().unwrap();
                std::thread::yield_now();
            }
        })
    };
    let workers: Vec<_> = (0..4)
        .map(|t| {
            let v = v.clone();
            std::thread::spawn(move || {
                let own = v.mkdir(ROOT, n(&format!("own{t}")), 0o755, me()).unwrap().attr.ino;
                for i in 0..60 {
                    let (e, h) = v.create(own, n("f"), 0o644, RW, me()).unwrap();
                    v.write(h, 0, &vec![t as u8; 10_000 + i]).unwrap();
                    v.rename(own, n("f"), common, n(&format!("f{t}")), RenameMode::Replace).unwrap();
                    v.append(h, b"more").unwrap();
                    v.fsync(h, false).unwrap();
                    assert_eq!(v.getattr(e.attr.ino, None).unwrap().size, 10_004 + i as u64);
                    v.release(h).unwrap();
                    v.forget(e.attr.ino, 1);
                    // Others come and go in the same directory.
                    for other in 0..4 {
                        if let Ok(e) = v.lookup(common, n(&format!("f{other}"))) {
                            if let Ok(h) = v.open_file(e.attr.ino, RW) {
                                let mut buf = [0; 64];
                                let read = v.read(h, 5000, &mut buf).unwrap();
                                assert!(buf[..read].iter().all(|b| *b == other as u8), "{other}");
                                v.release(h).unwrap();
                            }
                            v.forget(e.attr.ino, 1);
                        }
                    }
                    v.mkdir(common, n(&format!("d{t}")), 0o755, me()).unwrap();
                    let _ = v.rename(common, n(&format!("d{t}")), common, n("d"), RenameMode::Replace);
                    let _ = v.rmdir(common, n(&format!("d{t}")));
                }
            })
        })
        .collect();
    for w in workers {
        w.join().unwrap();
    }
    done.store(true, Ordering::Relaxed);
    keeper.join().unwrap();
    assert_eq!(v.list("common"), ["d", "f0", "f1", "f2", "f3"]);
    for t in 0..4u8 {
        let mut expected = vec![t; 10_059];
        expected.extend(b"more");
        assert!(v.get(&format!("common/f{t}")) == expected, "{t}");
    }
    v.clean();
    v.close().unwrap();
    recipe.open(&backend).unwrap().clean();
}
