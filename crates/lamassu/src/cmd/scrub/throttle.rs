//! Reads that are kept below a rate.

use crate::signals;
use std::time::{Duration, Instant};

/// How soon a signal is noticed.
const NAP: Duration = Duration::from_millis(200);

/// At no moment was more read than the rate allows in the time since the beginning.
pub struct Throttle {
    /// bytes a second; `None`: as fast as the store gives them
    limit: Option<u64>,
    begun: Instant,
    read: u64,
}

impl Throttle {
    pub fn new(limit: Option<u64>) -> Throttle {
        Throttle { limit, begun: Instant::now(), read: 0 }
    }

    /// Waits until these bytes may be read, or a signal comes.
    pub fn read(&mut self, bytes: u64) {
        self.read = self.read.saturating_add(bytes);
        while let Some(left) = self.left(self.begun.elapsed())
            && !signals::interrupted()
        {
            std::thread::sleep(left.min(NAP));
        }
    }

    /// How long is still to be waited, so long after the beginning; `None`: no more.
    fn left(&self, elapsed: Duration) -> Option<Duration> {
        let limit = self.limit?;
        // No product of bytes and nanoseconds leaves 128 bits.
        let nanos = u128::from(self.read) * 1_000_000_000 / u128::from(limit.max(1));
        let due = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        due.checked_sub(elapsed).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads by a clock of its own: what is read, and when.
    fn reads(limit: u64, sizes: &[u64]) -> Vec<(Duration, u64)> {
        let (mut throttle, mut now) = (Throttle::new(Some(limit)), Duration::ZERO);
        let read = |bytes: &u64| {
            throttle.read += bytes;
            now += throttle.left(now).unwrap_or_default();
            assert_eq!(throttle.left(now), None);
            // The store takes its time, too.
            now += Duration::from_millis(3);
            (now, *bytes)
        };
        sizes.iter().map(read).collect()
    }

    #[test]
    fn no_more_is_read_than_the_rate_allows_and_not_much_less() {
        for limit in [1, 4096, 500 << 10, 50 << 20, 1 << 40] {
            let sizes: Vec<u64> = (0..2000).map(|i| if i % 7 == 0 { 1 << 20 } else { 4096 }).collect();
            let (mut sum, mut last) = (0, Duration::ZERO);
            for (at, bytes) in reads(limit, &sizes) {
                sum += bytes;
                let allowed = limit as f64 * at.as_secs_f64();
                assert!(sum as f64 <= allowed * 1.000_001, "{sum} bytes after {at:?} at {limit} a second");
                last = at;
            }
            let own_time = 0.003 * sizes.len() as f64;
            assert!(last.as_secs_f64() <= sum as f64 / limit as f64 + own_time + 0.001, "{limit}: {last:?}");
        }
    }

    #[test]
    fn without_a_limit_nothing_is_waited_for_and_the_greatest_numbers_do_no_harm() {
        let mut throttle = Throttle::new(None);
        throttle.read(u64::MAX);
        assert_eq!(throttle.left(Duration::ZERO), None);
        let throttle = Throttle { read: u64::MAX, ..Throttle::new(Some(1)) };
        assert_eq!(throttle.left(Duration::ZERO), Some(Duration::from_nanos(u64::MAX)));
    }
}
