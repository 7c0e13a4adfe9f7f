//! Wakes the thread that maintains vaults, where there is work before its next round.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Instant;

#[derive(Debug, Default)]
struct Shared {
    is_wanted: Mutex<bool>,
    changed: Condvar,
}

/// The wish for upkeep. Clones are one: all vaults of a process share it with the thread that waits here. Without such
/// a thread a vault does by itself what must be done.
#[derive(Clone, Debug, Default)]
pub struct Upkeep(Arc<Shared>);

impl Upkeep {
    /// Ends the wait under way, or the next one.
    pub fn want(&self) {
        *self.0.is_wanted.lock() = true;
        self.0.changed.notify_one();
    }

    /// Waits until upkeep is wanted, or until then. Whether it is wanted; from then on it is not.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        let mut is_wanted = self.0.is_wanted.lock();
        self.0.changed.wait_while_until(&mut is_wanted, |is_wanted| !*is_wanted, deadline);
        std::mem::take(&mut *is_wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
