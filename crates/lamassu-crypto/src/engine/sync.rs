//! The parts of the pool: threads, a mutex, a condition variable, a short spin. Its model (`model.rs`) replaces them.

pub(super) use parking_lot::{Condvar, Mutex};
pub(super) use std::thread;

use std::hint::spin_loop;
use std::time::{Duration, Instant};

/// Spins while `unchanged` holds, at most for `most`.
pub(super) fn linger(most: Duration, unchanged: impl Fn() -> bool) {
    let start = Instant::now();
    while unchanged() && start.elapsed() < most {
        spin_loop();
    }
}
