//! One clock for all vaults. It notices when the process was suspended: then messages that hosts sent meanwhile are
//! still unread, and no session may count as silent because of them.
//!
//! A timer that waits for nothing looks at the clock, and so does every reading of the time. So a slow vault or a slow
//! disk does not count as a pause: if it did, hosts that have stopped would count as heard of each time.

use lamassu_lease::Millis;
use lamassu_rpc::clock;
use parking_lot::Mutex;

/// ms. If the clock was not looked at for longer, the process was suspended.
const PAUSED: u64 = 2000;

/// The clock of all vaults, with its count of pauses.
pub struct Pauses(Mutex<Seen>);

#[derive(Clone, Copy)]
struct Seen {
    last: Millis,
    pauses: u64,
}

impl Default for Pauses {
    fn default() -> Pauses {
        Pauses(Mutex::new(Seen { last: clock::now(), pauses: 0 }))
    }
}

impl Pauses {
    /// The time, and how many pauses there were before it.
    pub fn look(&self) -> (Millis, u64) {
        let seen = &mut *self.0.lock();
        // Read under the lock: of two looks, the later one has the later time.
        seen.at(clock::now())
    }
}

impl Seen {
    fn at(&mut self, now: Millis) -> (Millis, u64) {
        if now.0.saturating_sub(self.last.0) > PAUSED {
            self.pauses += 1;
        }
        self.last = now;
        (now, self.pauses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_between_two_looks_is_one_pause() {
        let mut seen = Seen { last: Millis(1000), pauses: 0 };
        assert_eq!(seen.at(Millis(3000)), (Millis(3000), 0));
        assert_eq!(seen.at(Millis(5001)), (Millis(5001), 1));
        assert_eq!(seen.at(Millis(5200)), (Millis(5200), 1));
    }
}
