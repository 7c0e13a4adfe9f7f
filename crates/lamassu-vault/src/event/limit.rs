//! Limits how many events go to the log, and recognises events that occurred before.
//!
//! A store can damage everything, and a user can read it all. So lines are limited by second and by object, and memory
//! by number. Lines that are not written are counted.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// Lines a second.
const LINES_MAX: u32 = 20;
/// Lines a minute about one object.
const OF_ONE_OBJECT_MAX: u32 = 5;
/// Objects that are distinguished; all others count as one.
const OBJECTS_MAX: usize = 1024;
/// For this time the same event is not a new one.
const KNOWN_FOR: Duration = Duration::from_secs(600);
/// Events that are remembered as known.
const KNOWN_MAX: usize = 1 << 16;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// Recent events, by hash.
pub(super) struct Known {
    events: HashSet<u64>,
    since: Instant,
}

impl Known {
    pub fn new(now: Instant) -> Known {
        Known { events: HashSet::new(), since: now }
    }

    /// Whether an event is new. If there is no room to remember it, it is new each time: it may be reported twice, but
    /// is never lost.
    pub fn is_new(&mut self, event: u64, now: Instant) -> bool {
        if now.duration_since(self.since) >= KNOWN_FOR || self.events.len() >= KNOWN_MAX {
            self.events.clear();
            self.since = now;
        }
        self.events.insert(event)
    }
}

/// The lines of the log.
pub(super) struct Limit {
    lines: u32,
    second: Instant,
    of_objects: HashMap<u64, u32>,
    minute: Instant,
    suppressed: u64,
}

impl Limit {
    pub fn new(now: Instant) -> Limit {
        Limit { lines: 0, second: now, of_objects: HashMap::new(), minute: now, suppressed: 0 }
    }

    /// Whether an event of an object, by its hash, is written.
    pub fn admits(&mut self, object: u64, now: Instant) -> bool {
        if now.duration_since(self.second) >= SECOND {
            (self.lines, self.second) = (0, now);
        }
        if now.duration_since(self.minute) >= MINUTE {
            self.of_objects.clear();
            self.minute = now;
        }
        let is_told_apart = self.of_objects.len() < OBJECTS_MAX || self.of_objects.contains_key(&object);
        let of_object = is_told_apart.then(|| self.of_objects.entry(object).or_default());
        let is_within = of_object.as_ref().is_none_or(|lines| **lines < OF_ONE_OBJECT_MAX);
        if self.lines >= LINES_MAX || !is_within {
            self.suppressed += 1;
            return false;
        }
        self.lines += 1;
        of_object.into_iter().for_each(|lines| *lines += 1);
        true
    }

    /// How many events were not written since the last call.
    pub fn take_suppressed(&mut self) -> u64 {
        std::mem::take(&mut self.suppressed)
    }

    pub fn suppressed(&self) -> u64 {
        self.suppressed
    }

    /// Whether there are any.
    pub fn has_suppressed(&self) -> bool {
        self.suppressed > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(limit: &mut Limit, objects: impl IntoIterator<Item = u64>, now: Instant) -> u32 {
        objects.into_iter().map(|object| u32::from(limit.admits(object, now))).sum()
    }

    #[test]
    fn lines_are_bound_by_the_second_and_the_rest_is_counted() {
        let start = Instant::now();
        let mut limit = Limit::new(start);
        assert_eq!(written(&mut limit, 0..1000, start), LINES_MAX);
        assert_eq!((limit.has_suppressed(), limit.take_suppressed()), (true, 980));
        assert_eq!((limit.has_suppressed(), limit.take_suppressed()), (false, 0));
        assert_eq!(written(&mut limit, 1000..2000, start + SECOND / 2), 0);
        assert_eq!(written(&mut limit, 2000..3000, start + SECOND), LINES_MAX);
        assert_eq!(limit.take_suppressed(), 1000 + 980);
    }

    #[test]
    fn one_object_does_not_take_the_lines_of_others() {
        let start = Instant::now();
        let mut limit = Limit::new(start);
        assert_eq!(written(&mut limit, [7; 100], start), OF_ONE_OBJECT_MAX);
        assert_eq!(written(&mut limit, [8], start), 1);
        assert_eq!(written(&mut limit, [7; 100], start + SECOND), 0);
        assert_eq!(written(&mut limit, [7; 100], start + MINUTE), OF_ONE_OBJECT_MAX);
        assert_eq!(limit.take_suppressed(), 95 + 100 + 95);
    }

    #[test]
    fn memory_is_bounded_and_what_is_forgotten_is_told_again() {
        let start = Instant::now();
        let (mut limit, mut known) = (Limit::new(start), Known::new(start));
        written(&mut limit, 0..100_000, start);
        assert!(limit.of_objects.len() <= OBJECTS_MAX);
        assert!(known.is_new(1, start) && !known.is_new(1, start) && known.is_new(2, start));
        assert!(known.is_new(1, start + KNOWN_FOR));
        assert!((10..1_000_000).all(|event| known.is_new(event, start + KNOWN_FOR)));
        assert!(known.events.len() <= KNOWN_MAX);
    }
}
