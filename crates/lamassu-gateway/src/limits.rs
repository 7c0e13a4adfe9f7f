//! The limits of a tenant: concurrent requests, requests per second, bytes per second. A tenant that exceeds them
//! waits, or is told to retry, and does not affect others.

use parking_lot::{Condvar, Mutex};
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Number of vault directories that a tenant may have wholly in memory at once.
pub const READINGS_AT_ONCE: usize = 2;
/// How often a waiting reading checks that its client still waits.
const ASKED_EVERY: Duration = Duration::from_millis(100);

/// The limits of one tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// concurrent requests
    pub requests_at_once: u32,
    /// concurrent requests of one user
    pub requests_of_user_at_once: u32,
    /// requests per second
    pub requests_per_second: u32,
    /// MiB per second of objects, in and out together
    pub mib_per_second: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { requests_at_once: 64, requests_of_user_at_once: 48, requests_per_second: 1000, mib_per_second: 10_000 }
    }
}

impl Limits {
    pub(crate) fn check(&self) -> Result<(), String> {
        let all = [
            ("requests_at_once", self.requests_at_once, 100_000),
            ("requests_of_user_at_once", self.requests_of_user_at_once, 100_000),
            ("requests_per_second", self.requests_per_second, 1_000_000),
            ("mib_per_second", self.mib_per_second, 1_000_000),
        ];
        match all.iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
            Some((name, value, most)) => Err(format!("{name} must be 1 to {most}, not {value}")),
            None => Ok(()),
        }
    }
}

/// A token bucket: filled at a constant rate, with at most one second's worth.
struct Bucket {
    per_second: f64,
    now: Mutex<(Instant, f64)>,
}

impl Bucket {
    fn new(per_second: f64) -> Bucket {
        Bucket { per_second, now: Mutex::new((Instant::now(), per_second)) }
    }

    /// Takes an amount, which may exceed the content. Returns how long it takes to refill that.
    fn take(&self, amount: f64) -> Duration {
        let (since, there) = &mut *self.now.lock();
        let elapsed = since.elapsed().as_secs_f64();
        *since = Instant::now();
        *there = (*there + elapsed * self.per_second).min(self.per_second) - amount;
        Duration::from_secs_f64((-*there / self.per_second).max(0.0))
    }

    fn take_if_there(&self, amount: f64) -> bool {
        let is_there = self.take(amount).is_zero();
        if !is_there {
            self.now.lock().1 += amount;
        }
        is_there
    }
}

/// A tenant.
pub struct Tenant {
    name: String,
    at_once: Arc<Semaphore>,
    /// Number of requests under way, by user.
    of_users: Mutex<HashMap<String, u32>>,
    of_user_max: u32,
    requests: Bucket,
    bytes: Bucket,
    /// number of [`Reading`]s, and a signal for the end of one
    readings: Mutex<usize>,
    read: Condvar,
}

/// One request of a tenant's user. It counts as under way until this is dropped.
pub struct Turn {
    tenant: Arc<Tenant>,
    user: String,
    _permit: OwnedSemaphorePermit,
}

/// A permit to hold a whole listing in memory, until this is dropped.
pub struct Reading(Arc<Tenant>);

impl Drop for Reading {
    fn drop(&mut self) {
        *self.0.readings.lock() -= 1;
        self.0.read.notify_one();
    }
}

impl Turn {
    /// Waits until the tenant has a permit; `None`: `is_wanted` has returned false.
    pub fn reading(&self, is_wanted: impl Fn() -> bool) -> Option<Reading> {
        let readings = &mut self.tenant.readings.lock();
        while **readings >= READINGS_AT_ONCE {
            if !is_wanted() {
                return None;
            }
            self.tenant.read.wait_for(readings, ASKED_EVERY);
        }
        **readings += 1;
        Some(Reading(self.tenant.clone()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let of_users = &mut *self.tenant.of_users.lock();
        if let Some(count) = of_users.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                of_users.remove(&self.user);
            }
        }
    }
}

impl Tenant {
    /// A tenant, with its limits.
    pub fn new(name: &str, limits: Limits) -> Tenant {
        Tenant {
            name: name.into(),
            at_once: Arc::new(Semaphore::new(limits.requests_at_once as usize)),
            of_users: Mutex::default(),
            of_user_max: limits.requests_of_user_at_once,
            requests: Bucket::new(limits.requests_per_second.into()),
            bytes: Bucket::new(f64::from(limits.mib_per_second) * f64::from(1 << 20)),
            readings: Mutex::new(0),
            read: Condvar::new(),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Begins a request of a user; `None`: the user or the tenant has too many.
    pub fn begin(self: &Arc<Self>, user: &str) -> Option<Turn> {
        let permit = self.at_once.clone().try_acquire_owned().ok()?;
        {
            let of_users = &mut *self.of_users.lock();
            let count = of_users.entry(user.into()).or_default();
            if *count >= self.of_user_max {
                return None;
            }
            *count += 1;
        }
        let turn = Turn { tenant: self.clone(), user: user.into(), _permit: permit };
        self.requests.take_if_there(1.0).then_some(turn)
    }

    /// Waits until that many bytes may pass.
    pub async fn pass(&self, bytes: usize) {
        let wait = self.bytes.take(bytes as f64);
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_taken_and_no_more() {
        let bucket = Bucket::new(1e-3);
        bucket.now.lock().1 = 2.0;
        // At most a second's worth.
        assert!(!bucket.take_if_there(2.0));
        let tenant = Arc::new(Tenant::new("t", Limits { requests_at_once: 2, ..Limits::default() }));
        let (one, two) = (tenant.begin("a"), tenant.begin("a"));
        assert!(one.is_some() && two.is_some() && tenant.begin("b").is_none());
        drop(one);
        assert!(tenant.begin("a").is_some());
        let slow = Tenant::new("t", Limits { requests_per_second: 1, ..Limits::default() });
        slow.requests.now.lock().1 = 0.0;
        assert!(slow.requests.take(0.5) > Duration::ZERO);
    }

    #[test]
    fn one_user_leaves_room_for_others() {
        let limits = Limits { requests_at_once: 3, requests_of_user_at_once: 2, ..Limits::default() };
        let tenant = Arc::new(Tenant::new("t", limits));
        let turns = [tenant.begin("a"), tenant.begin("a")];
        assert!(turns.iter().all(Option::is_some) && tenant.begin("a").is_none());
        let other = tenant.begin("b");
        assert!(other.is_some() && tenant.begin("c").is_none());
        drop(turns);
        assert!(tenant.begin("a").is_some());
        drop(other);
        assert!(tenant.of_users.lock().is_empty());
    }
}
