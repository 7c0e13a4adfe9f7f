//! One clock for all vaults. It notices when the process was suspended: then messages that hosts sent meanwhile are
//! still unread, and no session may count as silent because of them.
//!
//! A timer that waits for nothing looks at the clock, and so does every reading of the time. So a slow vault or a slow
//! disk does not count as a pause: if it did, hosts that have stopped would count as heard of each time.
//!
//! Two more count: the time before a server answers, in which no host can reach it ([`Pauses::begin`]), and
//! verifications that an administrator asks for, during which messages wait for a lock ([`Pauses::block`]). A pause
//! only prolongs sessions, and the time that holders have to release what others wait for. So no host loses a session
//! that it believes in (L1 in `docs/sharing.md`), or for what it could not do without the server.

use lamassu_lease::Millis;
use lamassu_rpc::clock;
use parking_lot::Mutex;
use std::sync::Arc;

/// ms. If the clock was not looked at for longer, the process was suspended. What blocks messages for less is not
/// counted: an administrator who verifies again and again would keep sessions of hosts that have stopped.
const PAUSED: u64 = 2000;

/// The clock of all vaults, with its count of pauses.
pub struct Pauses(Mutex<Seen>);

#[derive(Clone)]
struct Seen {
    last: Millis,
    pauses: u64,
    /// When work began that blocks messages, and goes on; by number.
    blocking: Vec<(u64, Millis)>,
    blocked: u64,
}

/// Work under way that blocks messages of hosts, until it is dropped.
pub struct Blocking {
    pauses: Arc<Pauses>,
    number: u64,
}

impl Default for Pauses {
    fn default() -> Pauses {
        Pauses(Mutex::new(Seen::new(clock::now())))
    }
}

impl Pauses {
    /// The time, and how many pauses there were before it.
    pub fn look(&self) -> (Millis, u64) {
        let seen = &mut *self.0.lock();
        // Read under the lock: of two looks, the later one has the later time.
        seen.at(clock::now())
    }

    /// Hosts can reach the server from now on: none of them was silent before.
    pub fn begin(&self) {
        self.0.lock().pauses += 1;
    }

    /// From now on messages of hosts may wait for work that has nothing to do with them. If that takes long, hosts
    /// count as heard of until it is done.
    pub fn block(self: &Arc<Pauses>) -> Blocking {
        let number = self.0.lock().block(clock::now());
        Blocking { pauses: self.clone(), number }
    }
}

impl Drop for Blocking {
    fn drop(&mut self) {
        self.pauses.0.lock().unblock(self.number, clock::now());
    }
}

impl Seen {
    fn new(now: Millis) -> Seen {
        Seen { last: now, pauses: 0, blocking: Vec::new(), blocked: 0 }
    }

    fn at(&mut self, now: Millis) -> (Millis, u64) {
        let is_long = |since: Millis| now.0.saturating_sub(since.0) > PAUSED;
        // Also while it goes on: who waits for its lock may look before it is noted to be done.
        if is_long(self.last) || self.blocking.iter().any(|(_, since)| is_long(*since)) {
            self.pauses += 1;
        }
        self.last = now;
        (now, self.pauses)
    }

    fn block(&mut self, now: Millis) -> u64 {
        self.blocked += 1;
        self.blocking.push((self.blocked, now));
        self.blocked
    }

    fn unblock(&mut self, number: u64, now: Millis) {
        self.at(now);
        self.blocking.retain(|(own, _)| *own != number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_between_two_looks_is_one_pause() {
        let mut seen = Seen::new(Millis(1000));
        assert_eq!(seen.at(Millis(3000)), (Millis(3000), 0));
        assert_eq!(seen.at(Millis(5001)), (Millis(5001), 1));
        assert_eq!(seen.at(Millis(5200)), (Millis(5200), 1));
    }

    #[test]
    fn what_blocks_messages_for_long_is_a_pause_until_it_is_done() {
        let mut seen = Seen::new(Millis(1000));
        let mut count = |ms: u64, blocks: Option<bool>, number: &mut u64| {
            let before = seen.pauses;
            match blocks {
                Some(true) => *number = seen.block(Millis(ms)),
                Some(false) => seen.unblock(*number, Millis(ms)),
                None => drop(seen.at(Millis(ms))),
            }
            seen.pauses - before
        };
        let (mut long, mut short) = (0, 0);
        assert_eq!(count(1100, Some(true), &mut long), 0);
        assert_eq!([2000, 3000].map(|ms| count(ms, None, &mut long)), [0; 2]);
        assert_eq!(count(3050, Some(true), &mut short), 0);
        assert_eq!([3200, 4000].map(|ms| count(ms, None, &mut long)), [1; 2], "a heartbeat may wait for it");
        assert_eq!(count(4100, Some(false), &mut long), 1);
        assert_eq!(count(4200, None, &mut long), 0);
        assert_eq!(count(4900, Some(false), &mut short), 0, "it was short");
        assert_eq!(count(5000, None, &mut long), 0);
    }
}
