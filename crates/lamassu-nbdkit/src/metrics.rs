//! Counts of each export, in a file of Prometheus' text format, as the textfile collector of node_exporter reads it.
//! The file is replaced every few seconds, so it is whole whenever it is read, and removed at the end: what is read is
//! never of a server that has ended in good order.
//!
//! Names of exports are letters, digits, `.`, `_`, `-`, `@` and `/`: they need no escapes.

use crate::failure::Result;
use crate::files;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often the file is written.
const EVERY: Duration = Duration::from_secs(5);

/// What clients ask for.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Operation {
    Read,
    Write,
    Flush,
    Trim,
    Zero,
    Extents,
}

impl Operation {
    const ALL: [(Operation, &'static str); 6] = [
        (Operation::Read, "read"),
        (Operation::Write, "write"),
        (Operation::Flush, "flush"),
        (Operation::Trim, "trim"),
        (Operation::Zero, "zero"),
        (Operation::Extents, "extents"),
    ];
}

#[derive(Default)]
struct Counter {
    requests: AtomicU64,
    failed: AtomicU64,
    /// of requests that succeeded
    bytes: AtomicU64,
    micros: AtomicU64,
}

/// What is shown of a counter.
type Value = fn(&Counter) -> f64;

/// The counts of an export, of all its connections since the start.
#[derive(Default)]
pub struct Counts {
    operations: [Counter; Operation::ALL.len()],
    connections: AtomicU64,
}

impl Counts {
    /// Runs a request about `len` bytes, and counts it at its end.
    pub fn count<T>(&self, operation: Operation, len: u64, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let done = work();
        let counter = &self.operations[operation as usize];
        counter.requests.fetch_add(1, Relaxed);
        match &done {
            Ok(_) => counter.bytes.fetch_add(len, Relaxed),
            Err(_) => counter.failed.fetch_add(1, Relaxed),
        };
        counter.micros.fetch_add(u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX), Relaxed);
        done
    }
}

/// An open connection, which counts until it is dropped.
pub struct Connected(Arc<Counts>);

impl Connected {
    pub fn counts(&self) -> &Counts {
        &self.0
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Relaxed);
    }
}

/// The counts of all exports that a client has opened.
pub struct Metrics {
    exports: Mutex<BTreeMap<String, Arc<Counts>>>,
    /// Held while the file is written or removed: whether it is still to be written.
    is_writing: Mutex<bool>,
}

impl Metrics {
    pub const fn new() -> Metrics {
        Metrics { exports: Mutex::new(BTreeMap::new()), is_writing: Mutex::new(true) }
    }

    /// Counts a connection to an export that exists.
    pub fn connected(&self, export: &str) -> Connected {
        let counts = self.exports.lock().entry(export.to_owned()).or_default().clone();
        counts.connections.fetch_add(1, Relaxed);
        Connected(counts)
    }

    /// Starts the thread that writes them to a file.
    ///
    /// # Errors
    /// Those of the first writing.
    pub fn write_to(&'static self, file: PathBuf) -> Result<()> {
        self.write(&file)?;
        let write = move || {
            let mut is_told = false;
            loop {
                std::thread::sleep(EVERY);
                match self.write(&file) {
                    Ok(()) => is_told = false,
                    Err(error) if !is_told => {
                        tracing::warn!(%error, file = %file.display(), "the metrics cannot be written");
                        is_told = true;
                    }
                    Err(_) => {}
                }
            }
        };
        std::thread::Builder::new().name("lamassu-metrics".into()).spawn(write)?;
        Ok(())
    }

    /// Removes the file, which is not written any more.
    pub fn end(&self, file: &Path) {
        *self.is_writing.lock() = false;
        // It may not be there yet.
        let _ = std::fs::remove_file(file);
    }

    fn write(&self, file: &Path) -> io::Result<()> {
        let is_writing = self.is_writing.lock();
        if *is_writing { files::replace(file, self.text().as_bytes()) } else { Ok(()) }
    }

    fn text(&self) -> String {
        let exports = self.exports.lock().clone();
        let mut text = String::new();
        let mut family = |name: &str, kind: &str, help: &str, lines: &dyn Fn(&mut String)| {
            let _ = write!(text, "# HELP lamassu_volumes_{name} {help}\n# TYPE lamassu_volumes_{name} {kind}\n");
            lines(&mut text);
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        family("written_seconds", "gauge", "When this was written, in seconds since 1970.", &|text| {
            let _ = writeln!(text, "lamassu_volumes_written_seconds {now}");
        });
        family("connections", "gauge", "Connections that are open.", &|text| {
            for (export, counts) in &exports {
                let open = counts.connections.load(Relaxed);
                let _ = writeln!(text, "lamassu_volumes_connections{{export=\"{export}\"}} {open}");
            }
        });
        let of_operations: [(&str, &str, Value); 4] = [
            ("requests_total", "Requests of clients, with those that failed.", |c| c.requests.load(Relaxed) as f64),
            ("errors_total", "Requests that were answered with an error.", |c| c.failed.load(Relaxed) as f64),
            ("bytes_total", "Bytes that requests were about which did not fail.", |c| c.bytes.load(Relaxed) as f64),
            ("seconds_total", "Time that requests took, all together.", |c| c.micros.load(Relaxed) as f64 / 1e6),
        ];
        for (name, help, value) in of_operations {
            family(name, "counter", help, &|text| {
                for (export, counts) in &exports {
                    for (operation, shown) in Operation::ALL {
                        let value = value(&counts.operations[operation as usize]);
                        let labels = format!("export=\"{export}\",operation=\"{shown}\"");
                        let _ = writeln!(text, "lamassu_volumes_{name}{{{labels}}} {value}");
                    }
                }
            });
        }
        text
    }
}
