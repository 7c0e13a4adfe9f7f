//! Keys that evaluate for hosts: the limits, and what the audit log records.
//!
//! A host has an allowance, which grows with time up to a bound. A batch is answered if at least one element of the
//! allowance is left. It may make the allowance negative, which must recover before the next batch. So a host is slowed
//! down, and a large batch is still answered. Allowances are in memory only: a restarted server begins with full ones.

use crate::config::Config;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How often the audit log is written for a host and a key. A server that is killed loses at most the counts of this
/// time.
pub const NOTED_EVERY: Duration = Duration::from_secs(60);
/// How often the audit log notes that a host exceeds its limit.
const LIMIT_NOTED_EVERY: Duration = Duration::from_secs(3600);
/// Shortest wait that the server asks of a host.
const AGAIN_MIN: Duration = Duration::from_millis(10);

/// The hosts' allowances of evaluations, and the counts that the audit log still lacks.
#[derive(Debug)]
pub struct Evaluations {
    per_second: f64,
    burst: f64,
    hosts: Mutex<HashMap<String, Allowance>>,
    noted: Mutex<HashMap<(String, String), Noted>>,
}

#[derive(Debug)]
struct Allowance {
    left: f64,
    since: Instant,
}

#[derive(Debug, Default)]
struct Noted {
    /// when evaluations were last noted, and how many there were since
    evaluates: Option<Instant>,
    elements: u64,
    /// when the limit was last noted
    limited: Option<Instant>,
}

impl Evaluations {
    /// With the limits of a configuration.
    pub fn new(config: &Config) -> Evaluations {
        Evaluations {
            per_second: config.evaluations_per_second as f64,
            burst: config.evaluations_burst as f64,
            hosts: Mutex::default(),
            noted: Mutex::default(),
        }
    }

    /// Takes a batch off a host's allowance; `Err`: the time until it may ask again.
    pub fn take(&self, host: &str, elements: usize, now: Instant) -> Result<(), Duration> {
        let mut hosts = self.hosts.lock();
        let full = || Allowance { left: self.burst, since: now };
        let allowance = hosts.entry(host.to_owned()).or_insert_with(full);
        let grown = now.saturating_duration_since(allowance.since).as_secs_f64() * self.per_second;
        *allowance = Allowance { left: (allowance.left + grown).min(self.burst), since: now };
        if allowance.left < 1.0 {
            let lacks = Duration::from_secs_f64((1.0 - allowance.left) / self.per_second);
            return Err(lacks.max(AGAIN_MIN));
        }
        allowance.left -= elements as f64;
        Ok(())
    }

    /// Counts elements. `Some`: the audit log must record so many, these included, before the batch is answered.
    pub fn to_note(&self, host: &str, key: &str, elements: usize, now: Instant) -> Option<u64> {
        let mut noted = self.noted.lock();
        let noted = noted.entry((host.to_owned(), key.to_owned())).or_default();
        noted.elements += elements as u64;
        noted.take_if_due(now)
    }

    /// Counts elements again that could not be recorded.
    pub fn not_noted(&self, host: &str, key: &str, elements: u64) {
        let mut noted = self.noted.lock();
        let noted = noted.entry((host.to_owned(), key.to_owned())).or_default();
        noted.evaluates = None;
        noted.elements += elements;
    }

    /// The counts that are due for hosts without newer batches, by host and key. `all`: also those that are not due,
    /// since the server ends.
    pub fn left_to_note(&self, now: Instant, all: bool) -> Vec<(String, String, u64)> {
        let mut left = Vec::new();
        for ((host, key), noted) in &mut *self.noted.lock() {
            if all {
                noted.evaluates = None;
            }
            if noted.elements > 0 {
                left.extend(noted.take_if_due(now).map(|elements| (host.clone(), key.clone(), elements)));
            }
        }
        left
    }

    /// Whether the audit log must record that a host exceeds its limit.
    pub fn is_limit_to_note(&self, host: &str, key: &str, now: Instant) -> bool {
        let mut noted = self.noted.lock();
        let noted = noted.entry((host.to_owned(), key.to_owned())).or_default();
        let is_due = is_due(noted.limited, now, LIMIT_NOTED_EVERY);
        if is_due {
            noted.limited = Some(now);
        }
        is_due
    }
}

impl Noted {
    fn take_if_due(&mut self, now: Instant) -> Option<u64> {
        if !is_due(self.evaluates, now, NOTED_EVERY) {
            return None;
        }
        self.evaluates = Some(now);
        Some(std::mem::take(&mut self.elements))
    }
}

fn is_due(last: Option<Instant>, now: Instant, every: Duration) -> bool {
    last.is_none_or(|last| now.saturating_duration_since(last) >= every)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluations(per_second: u64, burst: u64) -> Evaluations {
        let mut config = Config::default();
        (config.evaluations_per_second, config.evaluations_burst) = (per_second, burst);
        Evaluations::new(&config)
    }

    #[test]
    fn a_host_has_its_burst_and_then_its_rate() {
        let (all, start) = (evaluations(100, 2000), Instant::now());
        assert_eq!((all.take("a", 1024, start), all.take("a", 1024, start)), (Ok(()), Ok(())));
        // 48 too many, and one to begin with.
        assert_eq!(all.take("a", 1, start), Err(Duration::from_millis(490)));
        assert_eq!(all.take("b", 1024, start), Ok(()));
        let later = start + Duration::from_millis(500);
        assert_eq!(all.take("a", 1, later), Ok(()));
        // It does not grow past the burst.
        let tomorrow = start + Duration::from_secs(86400);
        assert_eq!((all.take("a", 2000, tomorrow), all.take("a", 1, tomorrow).is_err()), (Ok(()), true));
    }

    #[test]
    fn the_log_tells_of_all_that_a_host_asks_for_and_not_of_each_batch() {
        let (all, start) = (evaluations(1, 1), Instant::now());
        assert_eq!(all.to_note("a", "k", 5, start), Some(5));
        assert_eq!((all.to_note("a", "k", 6, start), all.to_note("a", "k", 7, start)), (None, None));
        assert_eq!(all.to_note("a", "other", 1, start), Some(1));
        assert_eq!(all.to_note("a", "k", 1, start + NOTED_EVERY), Some(14));
        assert!(all.is_limit_to_note("a", "k", start) && !all.is_limit_to_note("a", "k", start));
        assert!(all.is_limit_to_note("a", "k", start + LIMIT_NOTED_EVERY));
        // The host asks for nothing any more.
        let later = start + 2 * NOTED_EVERY;
        assert_eq!(all.to_note("a", "k", 3, later - Duration::from_secs(1)), None);
        assert_eq!(all.left_to_note(later - Duration::from_secs(1), false), []);
        assert_eq!(all.left_to_note(later, false), [("a".into(), "k".into(), 3)]);
        assert_eq!(all.to_note("a", "k", 2, later), None);
        assert_eq!(all.left_to_note(later, true), [("a".into(), "k".into(), 2)]);
        assert_eq!(all.left_to_note(later, true), []);
        all.not_noted("a", "k", 2);
        assert_eq!(all.to_note("a", "k", 1, later), Some(3));
    }
}
