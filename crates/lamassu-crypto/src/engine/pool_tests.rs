//! The pool with real threads.

use super::pool::Pool;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Waits until every worker is idle. A worker that has left its work takes a moment to become idle, and gets no offer
/// meanwhile.
fn rested(pool: &Pool) -> &Pool {
    while pool.state().0 != pool.workers() {
        std::thread::sleep(Duration::from_micros(100));
    }
    pool
}

#[test]
fn idle_workers_help() {
    let pool = Pool::new(3);
    for _ in 0..50 {
        // No thread passes the barrier alone: all four are in it at once.
        let barrier = Barrier::new(4);
        rested(&pool).run(3, &|_| {
            barrier.wait();
        });
    }
}

#[test]
fn a_submitter_does_not_wait_for_a_worker_that_has_not_begun() {
    let pool = Pool::new(1);
    let (inside, release) = (Barrier::new(3), Barrier::new(3));
    std::thread::scope(|s| {
        s.spawn(|| {
            pool.run(1, &|_| {
                inside.wait();
                release.wait();
            });
        });
        inside.wait();
        // The one worker is busy with the other batch.
        let calls = AtomicUsize::new(0);
        pool.run(1, &|_| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        release.wait();
    });
}

#[test]
fn offers_not_taken_up_are_withdrawn() {
    let pool = Pool::new(2);
    for _ in 0..2000 {
        pool.run(2, &|_| {});
    }
    assert_eq!(rested(&pool).state().1, 0);
}

#[test]
fn panics_reach_the_submitter_and_workers_live_on() {
    let pool = Pool::new(2);
    let here = std::thread::current().id();
    for _ in 0..20 {
        let barrier = Barrier::new(3);
        let run = AssertUnwindSafe(|| {
            rested(&pool).run(2, &|_| {
                barrier.wait();
                assert!(std::thread::current().id() == here, "planned, in a worker");
            })
        });
        assert!(catch_unwind(run).is_err());
    }
    let run = AssertUnwindSafe(|| pool.run(2, &|_| assert!(std::thread::current().id() != here, "planned, here")));
    assert!(catch_unwind(run).is_err());
    let barrier = Barrier::new(3);
    rested(&pool).run(2, &|_| {
        barrier.wait();
    });
}

#[test]
fn dropping_ends_the_threads() {
    let pool = Pool::new(3);
    let threads = pool.threads();
    pool.run(3, &|_| {});
    drop(pool);
    assert!(threads.upgrade().is_none(), "each thread held one reference");
}
