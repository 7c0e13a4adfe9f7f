//! Wakes the thread that maintains vaults if there is work before its next round.

use crate::FileSystem;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Between two rounds of maintenance.
const ROUND: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
struct Shared {
    is_wanted: Mutex<bool>,
    changed: Condvar,
}

/// A signal that asks for upkeep. Clones share it: all vaults of a process, and the thread that waits for it. Without
/// such a thread a vault does necessary work itself.
#[derive(Clone, Debug, Default)]
pub struct Upkeep(Arc<Shared>);

impl Upkeep {
    /// Asks for upkeep: ends the current wait, or the next one.
    pub fn want(&self) {
        *self.0.is_wanted.lock() = true;
        self.0.changed.notify_one();
    }

    /// Waits until upkeep is asked for, or until `deadline`. Returns whether it was asked for, and clears that.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        let mut is_wanted = self.0.is_wanted.lock();
        self.0.changed.wait_while_until(&mut is_wanted, |is_wanted| !*is_wanted, deadline);
        std::mem::take(&mut *is_wanted)
    }
}

/// The rounds of maintenance for a front-end that serves a file system without a mount. Ends when `stopping` is set and
/// upkeep is asked for once more.
pub fn keep_up(fs: &dyn FileSystem, stopping: &AtomicBool) {
    let (upkeep, mut next) = (fs.upkeep(), Instant::now() + ROUND);
    while !stopping.load(Ordering::Relaxed) {
        let is_wanted = upkeep.wait_until(next);
        if is_wanted && let Err(error) = fs.work_off() {
            tracing::error!(%error, "work in the background failed; it is tried again");
        }
        if Instant::now() >= next {
            if let Err(error) = fs.maintain() {
                tracing::error!(%error, "a background commit failed; it is tried again");
            }
            next = Instant::now() + ROUND;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_ends_one_wait_whenever_it_was_made() {
        let upkeep = Upkeep::default();
        upkeep.want();
        upkeep.want();
        assert!(upkeep.wait_until(Instant::now() + Duration::from_secs(600)));
        assert!(!upkeep.wait_until(Instant::now()));
        std::thread::scope(|s| {
            s.spawn(|| upkeep.clone().want());
            assert!(upkeep.wait_until(Instant::now() + Duration::from_secs(600)));
        });
    }
}
