//! When tree records are fetched (`beside`): by how long reads of the store take.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// If a read of the store takes this long, a thread for each record is worth it.
const SLOW: Duration = Duration::from_micros(150);
/// A measured read changes the average by 1/`WEIGHT` of its difference.
const WEIGHT: u64 = 4;

/// When tree records are fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fetching {
    /// At the same time as the page, if the store is slow.
    #[default]
    Beside,
    /// After the page. For measuring the gain of the other one.
    InSeries,
}

/// How long reads of the store take, in nanoseconds, the later ones counting more.
#[derive(Default)]
pub(super) struct ReadTime(AtomicU64);

impl ReadTime {
    pub fn note(&self, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX / WEIGHT);
        let before = self.0.load(Ordering::Relaxed);
        // A hint: with two readers at once, one measurement may be lost.
        self.0.store(before - before / WEIGHT + took / WEIGHT, Ordering::Relaxed);
    }

    pub fn is_slow(&self) -> bool {
        u128::from(self.0.load(Ordering::Relaxed)) >= SLOW.as_nanos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_slow_by_its_last_reads() {
        let time = ReadTime::default();
        assert!(!time.is_slow(), "nothing is known of it");
        time.note(SLOW * 2);
        assert!(!time.is_slow(), "one read is no measure");
        (0..8).for_each(|_| time.note(SLOW * 2));
        assert!(time.is_slow());
        (0..8).for_each(|_| time.note(SLOW / 100));
        assert!(!time.is_slow());
        time.note(Duration::MAX);
        assert!(time.is_slow());
    }
}
