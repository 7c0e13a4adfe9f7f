//! What the pool is made of: threads, a mutex, a condition variable, a short wait without sleeping. Its model (`model.rs`) takes other ones.

pub(super) use parking_lot::{Condvar, Mutex};
pub(super) use std::thread;

use super::pool::LINGER;
use std::hint::spin_loop;
use std::time::Instant;

/// Waits for as long as `unchanged` says so, at most [`LINGER`], without sleeping.
pub(super) fn linger(unchanged: impl Fn() -> bool) {
    let start = Instant::now();
    while unchanged() && start.elapsed() < LINGER {
        spin_loop();
    }
}
