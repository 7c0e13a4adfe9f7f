//! How long a turn goes on although another host wants the vault.
//!
//! A hand-over takes as long as hundreds of requests, and much longer where the kernel has to drop names. So a host
//! whose programs were still at work when its last turn ended, and which has waited since then, gets a longer turn: two
//! hosts that work at once soon have long turns, with cached names from their beginning on. A host that makes a few
//! calls now and then has a short wait before it, and after it.

use super::{Keeping, Mode, Phase, State, TAKEN_IN, Turns};
use std::time::{Duration, Instant};

/// The least share of time. Shorter than the time after which the kernel may cache: dropping caches would cost more.
pub(super) const SHARE: Duration = Duration::from_millis(100);
/// The largest. Every call on another host may wait for it.
pub(super) const SHARE_MAX: Duration = Duration::from_millis(500);
/// With a share from here on, the kernel may cache at once: that saves more than dropping its caches costs.
const KEEPS_FROM: Duration = TAKEN_IN.saturating_mul(2);
/// A host that had no request for this long has no program at work.
pub(super) const IDLE: Duration = Duration::from_millis(2);
/// The same where the kernel has cached something: ending the turn costs more then.
pub(super) const IDLE_KEPT: Duration = Duration::from_millis(20);

/// This host's share of the vault's time.
pub(super) struct Share {
    pub(super) time: Duration,
    /// Whether another host wants the vault in this turn.
    is_sought: bool,
    /// Whether the last turn ended while programs were at work.
    is_used_up: bool,
    /// When the last turn ended.
    pub(super) ended: Instant,
}

impl Share {
    pub fn new() -> Share {
        Share { time: SHARE, is_sought: false, is_used_up: false, ended: Instant::now() }
    }

    /// A turn begins, for which a request has waited since then.
    fn begin(&mut self, waits_since: Option<Instant>, now: Instant) {
        self.is_sought = false;
        let waited = waits_since.map_or(Duration::ZERO, |since| now.duration_since(since.max(self.ended)));
        self.time = if std::mem::take(&mut self.is_used_up) { (2 * waited).clamp(SHARE, SHARE_MAX) } else { SHARE };
    }

    /// A turn has ended.
    pub fn end(&mut self) {
        self.ended = Instant::now();
    }

    /// Whether another host waits for the end of this turn.
    pub fn is_sought(&self) -> bool {
        self.is_sought
    }
}

impl State {
    /// A turn begins: gives it a share of time.
    pub fn begin_share(&mut self, mode: Mode) {
        let waits_since = self.waiting.iter().map(|waiting| waiting.since).min();
        self.share.begin(waits_since, self.begun);
        if mode == Mode::Change && self.share.time >= KEEPS_FROM {
            self.keeping = Keeping::Yes;
        }
    }

    /// How long the turn with this number certainly goes on although another host wants the vault; `None`: it ends.
    pub fn goes_on(&mut self, number: u64, now: Instant) -> Option<Duration> {
        if self.number != number || !matches!(self.phase, Phase::Here(_)) || self.is_last() {
            return None;
        }
        let left = self.share.time.saturating_sub(now.duration_since(self.begun));
        let idle = if self.keeping == Keeping::Yes { IDLE_KEPT } else { IDLE };
        let idle = match self.users {
            0 => idle.saturating_sub(now.duration_since(self.last_used)),
            _ => idle,
        };
        self.share.is_used_up = left.is_zero() && !idle.is_zero();
        Some(left.min(idle)).filter(|time| !time.is_zero())
    }
}

impl Turns {
    /// Another host wants the vault: waits while the turn with this number has a share of time left, and programs of
    /// this host use it.
    pub fn wait_while_used(&self, number: u64) {
        loop {
            let mut state = self.state.lock();
            let Some(time) = state.goes_on(number, Instant::now()) else { return };
            state.share.is_sought = true;
            drop(state);
            std::thread::sleep(time);
        }
    }
}
