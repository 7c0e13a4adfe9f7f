//! What a tenant may do: so many requests at once and in a second, so many bytes in a second. One tenant that asks for
//! more waits, or is told to come back, and hinders no other.

use parking_lot::Mutex;
use serde::Deserialize;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Those of one tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// requests that are answered at once
    pub requests_at_once: u32,
    /// requests
    pub requests_per_second: u32,
    /// of objects, in and out
    pub mib_per_second: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { requests_at_once: 64, requests_per_second: 1000, mib_per_second: 10_000 }
    }
}

impl Limits {
    pub(crate) fn check(&self) -> Result<(), String> {
        let all = [
            ("requests_at_once", self.requests_at_once, 100_000),
            ("requests_per_second", self.requests_per_second, 1_000_000),
            ("mib_per_second", self.mib_per_second, 1_000_000),
        ];
        match all.iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
            Some((name, value, most)) => Err(format!("{name} must be 1 to {most}, not {value}")),
            None => Ok(()),
        }
    }
}

/// What flows in at a rate, and is taken out; at most a second's worth is there.
struct Bucket {
    per_second: f64,
    now: Mutex<(Instant, f64)>,
}

impl Bucket {
    fn new(per_second: f64) -> Bucket {
        Bucket { per_second, now: Mutex::new((Instant::now(), per_second)) }
    }

    /// Takes so much, which may be more than is there: how long that takes to flow in.
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
    requests: Bucket,
    bytes: Bucket,
}

/// One request of a tenant: as long as this lives it goes on.
pub struct Turn(#[allow(dead_code)] OwnedSemaphorePermit);

impl Tenant {
    /// A tenant, with its limits.
    pub fn new(name: &str, limits: Limits) -> Tenant {
        Tenant {
            name: name.into(),
            at_once: Arc::new(Semaphore::new(limits.requests_at_once as usize)),
            requests: Bucket::new(limits.requests_per_second.into()),
            bytes: Bucket::new(f64::from(limits.mib_per_second) * f64::from(1 << 20)),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Begins a request; `None`: there are too many.
    pub fn begin(&self) -> Option<Turn> {
        let turn = Turn(self.at_once.clone().try_acquire_owned().ok()?);
        self.requests.take_if_there(1.0).then_some(turn)
    }

    /// Waits until so many bytes may pass.
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
        let tenant = Tenant::new("t", Limits { requests_at_once: 2, ..Limits::default() });
        let (one, two) = (tenant.begin(), tenant.begin());
        assert!(one.is_some() && two.is_some() && tenant.begin().is_none());
        drop(one);
        assert!(tenant.begin().is_some());
        let slow = Tenant::new("t", Limits { requests_per_second: 1, ..Limits::default() });
        slow.requests.now.lock().1 = 0.0;
        assert!(slow.requests.take(0.5) > Duration::ZERO);
    }
}
