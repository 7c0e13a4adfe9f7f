//! Counts and times of each kind of request, and its failures: relaxed atomics, read by a status command.
//!
//! The time is that of the handler on its thread, without waits in the kernel or during a freeze.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The requests that are counted, ascending.
const REQUESTS: [&str; 35] = [
    "access",
    "copy_file_range",
    "create",
    "fallocate",
    "flush",
    "forget",
    "fsync",
    "fsyncdir",
    "getattr",
    "getxattr",
    "ioctl",
    "link",
    "listxattr",
    "lookup",
    "lseek",
    "mkdir",
    "mknod",
    "open",
    "opendir",
    "read",
    "readdir",
    "readdirplus",
    "readlink",
    "release",
    "releasedir",
    "removexattr",
    "rename",
    "rmdir",
    "setattr",
    "setxattr",
    "statfs",
    "symlink",
    "sync",
    "unlink",
    "write",
];

thread_local! {
    /// Whether the request that this thread handles has failed.
    static FAILED: Cell<bool> = const { Cell::new(false) };
}

/// A kind of request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestCount {
    /// As the kernel calls it.
    pub name: &'static str,
    /// How many arrived.
    pub count: u64,
    /// How many were answered with an error. A lookup of an absent name, or of an absent attribute, does not count.
    pub failed: u64,
    /// Microseconds, all of them added up.
    pub total_us: u64,
}

#[derive(Default)]
struct Counter {
    count: AtomicU64,
    failed: AtomicU64,
    total_ns: AtomicU64,
}

/// The counters of a mount.
pub(super) struct Counts([Counter; REQUESTS.len()]);

impl Default for Counts {
    fn default() -> Self {
        Counts(std::array::from_fn(|_| Counter::default()))
    }
}

/// Notes that the request which this thread handles fails.
pub(super) fn note_failure() {
    FAILED.set(true);
}

impl Counts {
    /// Carries a request out, and counts it.
    pub fn count<T>(&self, request: &'static str, body: impl FnOnce() -> T) -> T {
        let Ok(at) = REQUESTS.binary_search(&request) else { return body() };
        FAILED.set(false);
        let begun = Instant::now();
        let done = body();
        let counter = &self.0[at];
        counter.total_ns.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        counter.failed.fetch_add(FAILED.take().into(), Ordering::Relaxed);
        counter.count.fetch_add(1, Ordering::Relaxed);
        done
    }

    /// The requests that have come.
    pub fn counted(&self) -> Vec<RequestCount> {
        let of = |(name, counter): (&'static str, &Counter)| RequestCount {
            name,
            count: counter.count.load(Ordering::Relaxed),
            failed: counter.failed.load(Ordering::Relaxed),
            total_us: counter.total_ns.load(Ordering::Relaxed) / 1000,
        };
        REQUESTS.into_iter().zip(&self.0).map(of).filter(|counted| counted.count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_their_failures_are_counted() {
        assert!(REQUESTS.is_sorted());
        let counts = Counts::default();
        counts.count("read", || ());
        counts.count("read", note_failure);
        counts.count("lookup", || ());
        counts.count("no request", note_failure);
        let of = |c: &RequestCount| (c.name, c.count, c.failed);
        assert_eq!(counts.counted().iter().map(of).collect::<Vec<_>>(), [("lookup", 1, 0), ("read", 2, 1)]);
    }
}
