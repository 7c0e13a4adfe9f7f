//! Files of an anchored vault that are replaced by a rename while somebody uses them.
use crate::common;

use common::anchored::*;
use common::*;
use lamassu_anchor::table::MemoryTable;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, MemoryBackend};
use lamassu_vault::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Counts down when its thread ends, however it ends.
struct Working<'a>(&'a AtomicU32);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

#[test]
fn a_file_that_is_replaced_while_it_is_written_stays_readable_for_who_has_it() {
    for seed in 0..40 {
        let (_, v) = Lab::new_with_blocks();
        let working = AtomicU32::new(2);
        std::thread::scope(|scope| {
            let (v, working) = (&v, &working);
            scope.spawn(move || {
                while working.load(Ordering::SeqCst) > 0 {
                    v.maintain().unwrap();
                }
            });
            for thread in 0..2 {
                scope.spawn(move || {
                    let _working = Working(working);
                    let mut dice = Dice(seed * 2 + thread);
                    for _ in 0..300 {
                        let name = format!("n{}", dice.below(2));
                        if dice.below(6) == 0 {
                            let other = format!("n{}", dice.below(2));
                            let _ = mv(v, &name, &other, RenameMode::Replace);
                            continue;
                        }
                        let made = v.create(ROOT, n(&name), 0o644, RW, me());
                        let (ino, handle) = match made {
                            Ok((entry, handle)) => (entry.attr.ino, handle),
                            Err(_) => {
                                let Ok(entry) = v.find(&name) else { continue };
                                match v.open_file(entry.attr.ino, RW) {
                                    Ok(handle) => (entry.attr.ino, handle),
                                    Err(VaultError::Stale) => continue,
                                    Err(e) => panic!("open: {e}"),
                                }
                            }
                        };
                        for _ in 0..1 + dice.below(3) {
                            match dice.below(8) {
                                0..5 => {
                                    let data = vec![dice.below(2) as u8; [1, 4096, 70000][dice.below(3) as usize]];
                                    v.write(handle, dice.below(250 * 4096), &data).unwrap();
                                }
                                5 => {
                                    let size = Some(dice.below(250 * 4096));
                                    v.setattr(ino, Some(handle), &SetAttr { size, ..SetAttr::default() }).unwrap();
                                }
                                _ => v.fsync(handle, false).unwrap(),
                            }
                        }
                        v.flush(handle).unwrap();
                        v.release(handle).unwrap();
                        v.forget(ino, 1);
                    }
                });
            }
        });
    }
}

/// The kernel found it before it was replaced, and opens it afterwards.
#[test]
fn what_was_not_committed_of_a_replaced_file_is_there_for_who_found_it() {
    let (_, v) = Lab::new_with_blocks();
    let long = |fill| vec![fill; 700_000];
    v.put("old", &long(1));
    v.sync_all().unwrap();
    v.put("old", &long(2));
    let found = v.find("old").unwrap().attr.ino;
    v.put("new", &long(3));
    mv(&v, "new", "old", RenameMode::Replace).unwrap();
    let mut seen = long(0);
    let handle = v.open_file(found, RO).unwrap();
    assert_eq!(v.read(handle, 0, &mut seen).unwrap(), seen.len());
    v.release(handle).unwrap();
    assert!(seen == long(2), "{:?}", &seen[..4]);
    v.maintain().unwrap();
    // With the last reference it goes, and nothing of it is kept.
    v.forget(found, u64::MAX);
    assert!(matches!(v.open_file(found, RO), Err(VaultError::Stale)));
    assert_eq!(v.get("old"), long(3));
    v.clean();
}

/// Their removal waits for the anchor: the store has them still.
#[test]
fn a_directory_that_was_removed_meanwhile_opens_and_lists_nothing() {
    let (lab, v) = Lab::new_with_blocks();
    v.sync_all().unwrap();
    removed_directories_open(&v);
    v.clean();
    assert_eq!(lab.checked(), [""; 0]);
}

/// A rename that the store does not carry out is taken back, with what recovery needs of the file that it would have
/// replaced: half of a tree record's pages have changed since its root, and their neighbours have not.
#[test]
fn a_file_that_was_not_replaced_after_all_is_recovered() {
    for (is_written_before, is_synced) in [(true, true), (false, true), (true, false), (false, false)] {
        let store = Arc::new(MemoryBackend::new());
        let fault = Arc::new(FaultBackend::new(store.clone()));
        let (lab, v) = Lab::over(Recipe::default(), fault.clone(), Arc::new(MemoryTable::default()));
        let long = |fill| vec![fill; 4_000_000];
        v.put("old", &long(1));
        v.put("new", &long(3));
        v.sync_all().unwrap();
        let handle = v.open_file(v.find("old").unwrap().attr.ino, RW).unwrap();
        let change = || {
            for block in (0..900).step_by(60) {
                v.write(handle, block * 4096, &[2; 4096]).unwrap();
            }
            v.flush(handle).unwrap();
        };
        if is_written_before {
            change();
        }
        fault.faults().rule(|call| (call.call == Call::Rename).then_some(Fault::Errno(libc::EIO)));
        mv(&v, "new", "old", RenameMode::Replace).unwrap_err();
        fault.faults().clear_rules();
        if !is_written_before {
            change();
        }
        if is_synced {
            v.fsync_dir(v.open_dir(ROOT).unwrap()).unwrap();
        }
        // As a kill does.
        std::mem::forget(v);
        let lab = Lab { backend: Arc::new(store.snapshot()), ..lab };
        let v = lab.open();
        let seen = v.get("old");
        assert_eq!(seen.len(), long(1).len());
        assert!(seen.chunks(4096).all(|block| [[1; 4096].as_slice(), &[2; 4096]].iter().any(|b| b.starts_with(block))));
        assert_eq!(v.get("new"), long(3));
        v.clean();
        assert_eq!(lab.checked(), [""; 0]);
    }
}
