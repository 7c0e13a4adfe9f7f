//! The work of each callback, in safe code. `abi` calls these functions.

use crate::end;
use crate::failure::{Failure, Report, Result};
use crate::files::Pidfile;
use crate::log;
use crate::metrics::{Connected, Metrics, Operation};
use crate::opened::{Export, Opened, Prepared, prepare};
use crate::settings::Settings;
use lamassu_volume::{Extent, Volume, Zeros};
use parking_lot::{Mutex, RwLock};
use std::path::PathBuf;
use std::sync::OnceLock;

/// Largest accepted request, bytes: nbdkit's own limit.
pub const REQUEST_MAX: u32 = 64 << 20;

/// The exit code of a server that could not close a vault, which `lamassu volume export` knows; nbdkit's own failures
/// are 1.
const NOT_CLOSED: i32 = 5;

static SETTINGS: Mutex<Option<Settings>> = Mutex::new(None);
static PREPARED: Mutex<Vec<Prepared>> = Mutex::new(Vec::new());
/// The process that the keys were loaded in.
static READY_IN: OnceLock<u32> = OnceLock::new();
static SERVING: RwLock<Option<Serving>> = RwLock::new(None);
static METRICS: Metrics = Metrics::new();
/// Where they are written, if anywhere.
static METRICS_FILE: OnceLock<PathBuf> = OnceLock::new();
/// Where the process id is written, if anywhere.
static PIDFILE: OnceLock<PathBuf> = OnceLock::new();
/// Where the outcome of the start is reported.
static REPORT: OnceLock<Mutex<Option<Report>>> = OnceLock::new();

/// What is there while clients can connect.
struct Serving {
    pidfile: Option<Pidfile>,
    opened: Opened,
}

impl Serving {
    /// Opens the vaults, and then says that they are open.
    fn begin(prepared: Vec<Prepared>) -> Result<Serving> {
        let opened = Opened::open(prepared)?;
        let pidfile = PIDFILE.get().cloned().map(Pidfile::write).transpose()?;
        Ok(Serving { pidfile, opened })
    }

    /// The reverse: the next server of the vaults may write the same file.
    fn end(self) -> Result<()> {
        drop(self.pidfile);
        self.opened.close()
    }
}

/// Keeps keys out of core dumps and away from tracers.
pub fn load() {
    if let Err(error) = lamassu_crypto::secret::harden_process() {
        crate::abi::say(&format!("core dumps could not be switched off: {error}"));
    }
}

/// One `KEY=VALUE` of the command line.
pub fn config(key: &str, value: &str) -> Result<()> {
    SETTINGS.lock().get_or_insert_default().take(key, value)
}

/// All parameters were taken.
pub fn config_complete() -> Result<()> {
    SETTINGS.lock().get_or_insert_default().complete()
}

/// nbdkit is about to serve, and still has its standard input and the terminal: asks for the keys.
pub fn get_ready() -> Result<()> {
    let _ = READY_IN.set(std::process::id());
    log::start();
    let mut settings = SETTINGS.lock().take().unwrap_or_default();
    if let Some(file) = settings.metrics.take() {
        let _ = METRICS_FILE.set(file);
    }
    if let Some(file) = settings.pidfile.take() {
        let _ = PIDFILE.set(file);
    }
    if let Some(to) = settings.report {
        let report = crate::abi::descriptor(to)?;
        let _ = REPORT.set(Mutex::new(Some(Report::new(report))));
    }
    match prepare(settings) {
        Ok(prepared) => *PREPARED.lock() = prepared,
        failed => return told(failed.map(drop)),
    }
    Ok(())
}

/// nbdkit serves in this process: opens the vaults, and reports that to the process that waits for it. Refused in a
/// child of the process that has the keys: there their memory is not locked any more, and the threads are missing that
/// ask servers for keys.
pub fn after_fork() -> Result<()> {
    let prepared = std::mem::take(&mut *PREPARED.lock());
    if READY_IN.get() != Some(&std::process::id()) {
        return told(Err(Failure::Forked));
    }
    // First: if it fails, no vault is open.
    let counted = METRICS_FILE.get().map_or(Ok(()), |file| METRICS.write_to(file.clone()));
    told(counted.and_then(|()| Serving::begin(prepared)).and_then(|serving| {
        *SERVING.write() = Some(serving);
        end::watch(commit)
    }))
}

/// Reports how the start went, if a process waits for that. After a failure nbdkit ends without a further callback.
fn told(how: Result<()>) -> Result<()> {
    let how = match REPORT.get().and_then(|report| report.lock().take()) {
        Some(report) => match report.tell(&how) {
            Ok(()) => how.map_err(|_| Failure::Told),
            // The waiting process ended before nbdkit could ask to be ended with it. So this process ends too: no
            // unknown server stays behind.
            Err(error) => Err(error.into()),
        },
        None => how,
    };
    how.or_else(|error| serving_ends().and(Err(error)))
}

/// Closes the vaults, if they are open.
fn serving_ends() -> Result<()> {
    // Held until they are closed: whoever commits meanwhile waits.
    let mut serving = SERVING.write();
    serving.take().map_or(Ok(()), Serving::end)
}

/// Writes everything to the store.
pub fn commit() {
    if let Err(error) = opened(Opened::commit) {
        tracing::error!(%error, "a vault cannot be committed");
    }
}

/// No client is left. If a vault cannot be closed, data of answered requests are lost. nbdkit has no way to end with a
/// failure, so this ends the process.
pub fn cleanup() {
    if let Some(file) = METRICS_FILE.get() {
        METRICS.end(file);
    }
    if let Err(error) = serving_ends() {
        tracing::error!(%error, "a vault was not closed as it should be: data that were not flushed may be lost");
        std::process::exit(NOT_CLOSED);
    }
}

fn opened<T>(with: impl FnOnce(&Opened) -> Result<T>) -> Result<T> {
    SERVING.read().as_ref().map_or(Err(Failure::NoExport), |serving| with(&serving.opened))
}

pub fn exports() -> Result<Vec<Export>> {
    opened(|opened| Ok(opened.exports(&mut |error| crate::abi::fails(&error.to_string()))))
}

pub fn default_export() -> Result<Option<String>> {
    opened(Opened::default_export)
}

/// A client that has chosen an export.
pub struct Connection {
    volume: Volume,
    connected: Connected,
}

impl Connection {
    pub fn open(read_only: bool, export: &str) -> Result<Connection> {
        opened(|opened| {
            let name = match export {
                "" => opened.default_export()?.ok_or(Failure::NoExport)?,
                name => name.to_owned(),
            };
            let volume = opened.volume(&name, read_only)?;
            // Not before it is known that there is such an export: clients cannot make others.
            Ok(Connection { volume, connected: METRICS.connected(&name) })
        })
    }

    pub fn size(&self) -> u64 {
        self.volume.size()
    }

    pub fn can_write(&self) -> bool {
        !self.volume.is_read_only()
    }

    /// Smallest, best and largest request, bytes.
    pub fn block_sizes(&self) -> (u32, u32, u32) {
        (self.volume.block_size().bytes(), self.volume.preferred(), REQUEST_MAX)
    }

    fn count<T>(&self, operation: Operation, len: u64, work: impl FnOnce(&Volume) -> Result<T>) -> Result<T> {
        self.connected.counts().count(operation, len, || work(&self.volume))
    }

    pub fn read(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.count(Operation::Read, buf.len() as u64, |volume| Ok(volume.read(offset, buf)?))
    }

    pub fn write(&self, data: &[u8], offset: u64, durable: bool) -> Result<()> {
        self.count(Operation::Write, data.len() as u64, |volume| Ok(volume.write(offset, data, durable)?))
    }

    pub fn flush(&self) -> Result<()> {
        self.count(Operation::Flush, 0, |volume| Ok(volume.flush()?))
    }

    pub fn trim(&self, offset: u64, len: u64, durable: bool) -> Result<()> {
        self.count(Operation::Trim, len, |volume| Ok(volume.trim(offset, len, durable)?))
    }

    pub fn zero(&self, offset: u64, len: u64, zeros: Zeros, durable: bool) -> Result<()> {
        self.count(Operation::Zero, len, |volume| Ok(volume.zero(offset, len, zeros, durable)?))
    }

    /// Calls `add` for the runs of a range; for the first alone if `one` is true.
    pub fn extents(
        &self,
        offset: u64,
        len: u64,
        one: bool,
        add: &mut dyn FnMut(u64, u64, Extent) -> std::io::Result<()>,
    ) -> Result<()> {
        self.count(Operation::Extents, len, |volume| {
            volume.runs::<Failure>(offset, len, &mut |run| {
                add(run.offset, run.len, run.extent)?;
                Ok(!one)
            })
        })
    }
}
