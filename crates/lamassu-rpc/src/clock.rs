//! The clock that leases go by: it goes on while the machine sleeps, and nobody can set it.

use lamassu_lease::Millis;
use rustix::time::{ClockId, clock_gettime};

/// Now, since the machine has started.
pub fn now() -> Millis {
    let time = clock_gettime(ClockId::Boottime);
    Millis(time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000)
}
