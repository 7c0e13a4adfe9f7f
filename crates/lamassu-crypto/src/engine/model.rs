//! The pool under shuttle: thousands of schedules of its threads, including rare ones.

#[path = "pool.rs"]
#[allow(dead_code, clippy::duplicate_mod)] // compiled twice on purpose; the engine alone uses some of it
mod pool;
#[path = "modelled.rs"]
mod sync;

use pool::{Pool, Side};
use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use shuttle::{check_pct, check_random, thread};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

const SCHEDULES: usize = 2000;
/// Preemptions that a schedule of the second kind has at most.
const DEPTH: usize = 3;

/// Random schedules, then schedules with few preemptions, which find faults that need a few steps in a certain order.
fn in_many_orders(test: fn()) {
    check_random(test, SCHEDULES);
    check_pct(test, SCHEDULES, DEPTH);
}

/// A batch of `count` items. Each item must be done once, and no thread may be in the closure after `run` has returned.
fn batch(pool: &Pool, helpers: usize, count: usize) {
    let over = Arc::new(AtomicBool::new(false));
    let next = AtomicUsize::new(0);
    let done: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
    let (seen, inside) = (over.clone(), Arc::new(AtomicUsize::new(0)));
    pool.run(helpers, &|_| {
        assert!(!seen.load(SeqCst), "a worker begins after the end");
        inside.fetch_add(1, SeqCst);
        loop {
            let i = next.fetch_add(1, SeqCst);
            if i >= count {
                break;
            }
            done[i].fetch_add(1, SeqCst);
        }
        inside.fetch_sub(1, SeqCst);
        assert!(!seen.load(SeqCst), "a worker is still at it after the end");
    });
    over.store(true, SeqCst);
    assert_eq!(inside.load(SeqCst), 0);
    assert!(done.iter().all(|d| d.load(SeqCst) == 1), "an item was done twice, or not at all");
}

#[test]
fn every_item_is_done_once_and_no_worker_outstays() {
    in_many_orders(|| {
        let pool = Pool::new(2);
        batch(&pool, 2, 3);
        batch(&pool, 1, 2);
    });
}

#[test]
fn submitters_share_the_workers() {
    in_many_orders(|| {
        let pool = Arc::new(Pool::new(2));
        let other = pool.clone();
        let beside = thread::spawn(move || batch(&other, 2, 2));
        batch(&pool, 2, 2);
        beside.join().expect("the other's batch");
        drop(pool);
    });
}

#[test]
fn more_helpers_than_workers_are_no_harm() {
    in_many_orders(|| {
        batch(&Pool::new(1), 5, 2);
        batch(&Pool::new(0), 5, 2);
    });
}

#[test]
fn a_panic_in_a_worker_ends_nothing_but_its_batch() {
    in_many_orders(|| {
        let pool = Pool::new(1);
        let ran_there = AtomicBool::new(false);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(1, &|side| {
                if side == Side::Worker {
                    ran_there.store(true, SeqCst);
                    std::panic::resume_unwind(Box::new("planned"));
                }
            });
        }));
        assert_eq!(result.is_err(), ran_there.load(SeqCst));
        batch(&pool, 1, 2);
    });
}
