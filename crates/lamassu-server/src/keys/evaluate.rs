//! Keys that evaluate for hosts: how much a host may ask for, and what is noted of it.
//!
//! A host has an allowance, which grows with time up to a bound. A batch is answered whole where anything is left of
//! it; what it takes too much has to grow back first. So a host is slowed down, and none is starved by the size of its
//! batches. Nothing of this is durable: a server that starts anew begins with full allowances.

use crate::config::Config;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How often the audit log tells of a host and a key: what a server that is killed has not told is of so long.
pub const NOTED_EVERY: Duration = Duration::from_secs(60);
/// How often it tells that a host asks for too much.
const LIMIT_NOTED_EVERY: Duration = Duration::from_secs(3600);
/// A host that has to wait is told at least so long.
const AGAIN_MIN: Duration = Duration::from_millis(10);

/// See the module's head.
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
    /// when it was told of evaluations, and how many there were that it was not told of
    evaluates: Option<Instant>,
    elements: u64,
    /// when it was told of the limit
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

    /// Takes a batch off a host's allowance; `Err`: in how long it may ask again.
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

    /// Whether the audit log has to tell of what a host asks for, before it is answered: of how many elements since it
    /// last did, these included.
    pub fn to_note(&self, host: &str, key: &str, elements: usize, now: Instant) -> Option<u64> {
        let mut noted = self.noted.lock();
        let noted = noted.entry((host.to_owned(), key.to_owned())).or_default();
        noted.elements += elements as u64;
        noted.take_if_due(now)
    }

    /// The log could not be told of these.
    pub fn not_noted(&self, host: &str, key: &str, elements: u64) {
        let mut noted = self.noted.lock();
        let noted = noted.entry((host.to_owned(), key.to_owned())).or_default();
        noted.evaluates = None;
        noted.elements += elements;
    }

    /// What the log has to be told of hosts that have asked for nothing since, by host and key. `all`: also what would
    /// have time, since the server ends.
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

    /// Whether the audit log has to tell that a host asks for too much.
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
