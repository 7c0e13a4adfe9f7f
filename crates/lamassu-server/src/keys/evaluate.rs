//! Keys that evaluate for hosts: how much a host may ask for, and what is noted of it.
//!
//! A host has an allowance, which grows with time up to a bound. A batch is answered whole where anything is left of
//! it; what it takes too much has to grow back first. So a host is slowed down, and none is starved by the size of its
//! batches. Nothing of this is durable: a server that starts anew begins with full allowances.

use crate::config::Config;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How often the audit log tells of a host and a key.
const NOTED_EVERY: Duration = Duration::from_secs(3600);
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
    /// when it was told of evaluations, and how many there were since
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
        if !is_due(noted.evaluates, now) {
            return None;
        }
        noted.evaluates = Some(now);
        Some(std::mem::take(&mut noted.elements))
    }

    /// Whether the audit log has to tell that a host asks for too much.
    pub fn is_limit_to_note(&self, host: &str, key: &str, now: Instant) -> bool {
        let mut noted = self.noted.lock();
        let noted = noted.entry((host.to_owned(), key.to_owned())).or_default();
        let is_due = is_due(noted.limited, now);
        if is_due {
            noted.limited = Some(now);
        }
        is_due
    }
}

fn is_due(last: Option<Instant>, now: Instant) -> bool {
    last.is_none_or(|last| now.saturating_duration_since(last) >= NOTED_EVERY)
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
    fn the_log_tells_of_a_host_and_a_key_once_an_hour() {
        let (all, start) = (evaluations(1, 1), Instant::now());
        assert_eq!(all.to_note("a", "k", 5, start), Some(5));
        assert_eq!((all.to_note("a", "k", 6, start), all.to_note("a", "k", 7, start)), (None, None));
        assert_eq!(all.to_note("a", "other", 1, start), Some(1));
        assert_eq!(all.to_note("a", "k", 1, start + NOTED_EVERY), Some(14));
        assert!(all.is_limit_to_note("a", "k", start) && !all.is_limit_to_note("a", "k", start));
        assert!(all.is_limit_to_note("a", "k", start + NOTED_EVERY));
    }
}
