//! The parts of the pool: threads, a mutex, a condition variable, a short spin. Its model (`model.rs`) replaces them.

pub(super) use parking_lot::{Condvar, Mutex};
pub(super) use std::thread;

use super::pool::LINGER;
use std::hint::spin_loop;
use std::time::Instant;

/// Spins while `unchanged` holds, at most for [`LINGER`].
pub(super) fn linger(unchanged: impl Fn() -> bool) {
    let start = Instant::now();
    while unchanged() && start.elapsed() < LINGER {
        spin_loop();
    }
}
