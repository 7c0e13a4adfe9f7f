//! The limits of a tenant: connections, concurrent requests, requests per second, bytes per second. A tenant that
//! exceeds them waits, or is told to retry, and does not affect others.

use parking_lot::{Condvar, Mutex};
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
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
    /// connections of clients
    pub connections_at_once: u32,
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
        Limits {
            connections_at_once: 256,
            requests_at_once: 64,
            requests_of_user_at_once: 48,
            requests_per_second: 1000,
            mib_per_second: 10_000,
        }
    }
}

impl Limits {
    pub(crate) fn check(&self) -> Result<(), String> {
        let all = [
            ("connections_at_once", self.connections_at_once, 1_000_000),
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

/// A limit that a request of a tenant exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exceeded {
    /// connections
    Connections,
    /// requests at once
    Requests,
    /// those of one user
    RequestsOfUser,
    /// requests per second
    Rate,
}

impl Exceeded {
    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Exceeded::Connections => "connections_at_once",
            Exceeded::Requests => "requests_at_once",
            Exceeded::RequestsOfUser => "requests_of_user_at_once",
            Exceeded::Rate => "requests_per_second",
        }
    }
}

/// A tenant.
pub struct Tenant {
    name: String,
    connections: Arc<Semaphore>,
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

/// A connection of a client. It belongs to the tenant of its latest request whose signature was good: a proxy may send
/// requests of several through one. Clones are the same connection.
#[derive(Clone, Default)]
pub struct Connection(Arc<Mutex<Belonging>>);

#[derive(Default)]
struct Belonging {
    of: Option<(Arc<Tenant>, OwnedSemaphorePermit)>,
    is_refused: bool,
}

impl Connection {
    /// Counts it among the connections of a tenant.
    ///
    /// # Errors
    /// [`Exceeded::Connections`]: it has too many. Then this one has to end, since it would not be counted.
    pub fn belongs_to(&self, tenant: &Arc<Tenant>) -> Result<(), Exceeded> {
        let belonging = &mut *self.0.lock();
        if belonging.of.as_ref().is_some_and(|(of, _)| Arc::ptr_eq(of, tenant)) {
            return Ok(());
        }
        let permit = tenant.connections.clone().try_acquire_owned();
        belonging.is_refused = permit.is_err();
        belonging.of = Some((tenant.clone(), permit.map_err(|_| Exceeded::Connections)?));
        Ok(())
    }

    /// Whether no request with a good signature has come on it.
    pub fn is_of_nobody(&self) -> bool {
        self.0.lock().of.is_none()
    }

    /// Whether its tenant has too many.
    pub fn is_refused(&self) -> bool {
        self.0.lock().is_refused
    }
}

/// One request of a user of a tenant, counted while this lives.
pub struct Turn {
    tenant: Arc<Tenant>,
    user: String,
    _permit: OwnedSemaphorePermit,
}

/// Keeps the turn of a request for its answer: the request counts until its client has taken all of that. Clones are
/// the same.
#[derive(Clone, Default)]
pub struct Held(Arc<OnceLock<Arc<Turn>>>);

impl Held {
    /// Keeps it. A request has one turn: only the first is kept.
    pub fn hold(&self, turn: &Arc<Turn>) {
        let _ = self.0.set(turn.clone());
    }

    /// The turn; `None`: the request was refused before it had one.
    pub fn turn(&self) -> Option<Arc<Turn>> {
        self.0.get().cloned()
    }
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
    /// Whose request it is.
    pub fn tenant(&self) -> &Arc<Tenant> {
        &self.tenant
    }

    /// A permit, if one is free.
    pub fn reading_now(&self) -> Option<Reading> {
        let readings = &mut *self.tenant.readings.lock();
        (*readings < READINGS_AT_ONCE).then(|| {
            *readings += 1;
            Reading(self.tenant.clone())
        })
    }

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
            connections: Arc::new(Semaphore::new(limits.connections_at_once as usize)),
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

    /// Begins a request of a user.
    ///
    /// # Errors
    /// The limit that it exceeds.
    pub fn begin(self: &Arc<Self>, user: &str) -> Result<Turn, Exceeded> {
        let permit = self.at_once.clone().try_acquire_owned().map_err(|_| Exceeded::Requests)?;
        {
            let of_users = &mut *self.of_users.lock();
            let count = of_users.entry(user.into()).or_default();
            if *count >= self.of_user_max {
                return Err(Exceeded::RequestsOfUser);
            }
            *count += 1;
        }
        let turn = Turn { tenant: self.clone(), user: user.into(), _permit: permit };
        if self.requests.take_if_there(1.0) { Ok(turn) } else { Err(Exceeded::Rate) }
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
        assert!(one.is_ok() && two.is_ok() && tenant.begin("b").err() == Some(Exceeded::Requests));
        drop(one);
        assert!(tenant.begin("a").is_ok());
        let slow = Bucket::new(1e-3);
        slow.now.lock().1 = 0.0;
        assert!(slow.take(0.5) > Duration::ZERO);
    }

    #[test]
    fn a_connection_counts_for_the_tenant_of_its_latest_request() {
        let tenant = || Arc::new(Tenant::new("t", Limits { connections_at_once: 2, ..Limits::default() }));
        let (one, other) = (tenant(), tenant());
        let connections: Vec<_> = (0..3).map(|_| Connection::default()).collect();
        let first = connections[0].clone();
        assert_eq!([&first, &connections[1]].map(|it| it.belongs_to(&one)), [Ok(()), Ok(())]);
        // However many requests it has.
        assert_eq!((first.belongs_to(&one), first.is_refused()), (Ok(()), false));
        assert_eq!(connections[2].belongs_to(&one), Err(Exceeded::Connections));
        assert!(connections[2].is_refused() && !first.is_refused());
        // Another tenant has its own limit, and a connection that leaves a tenant frees its place.
        assert_eq!(first.belongs_to(&other), Ok(()));
        assert_eq!((connections[2].belongs_to(&one), connections[2].is_refused()), (Ok(()), false));
        assert_eq!(connections[1].belongs_to(&other), Ok(()));
        assert_eq!(connections[2].belongs_to(&other), Err(Exceeded::Connections));
        drop((first, connections));
        assert_eq!((one.connections.available_permits(), other.connections.available_permits()), (2, 2));
    }

    #[test]
    fn one_user_leaves_room_for_others() {
        let limits = Limits { requests_at_once: 3, requests_of_user_at_once: 2, ..Limits::default() };
        let tenant = Arc::new(Tenant::new("t", limits));
        let turns = [tenant.begin("a"), tenant.begin("a")];
        assert!(turns.iter().all(Result::is_ok) && tenant.begin("a").err() == Some(Exceeded::RequestsOfUser));
        let other = tenant.begin("b");
        assert!(other.is_ok() && tenant.begin("c").is_err());
        drop(turns);
        assert!(tenant.begin("a").is_ok());
        drop(other);
        assert!(tenant.of_users.lock().is_empty());
    }
}
