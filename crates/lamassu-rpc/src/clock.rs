//! The clock for leases (CLOCK_BOOTTIME): it runs while the machine sleeps, and cannot be set.

use lamassu_lease::Millis;
use rustix::time::{ClockId, clock_gettime};

/// Time since the machine started.
pub fn now() -> Millis {
    let time = clock_gettime(ClockId::Boottime);
    Millis(time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000)
}
