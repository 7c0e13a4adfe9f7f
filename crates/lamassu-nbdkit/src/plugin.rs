//! What each callback does, in safe code. `abi` calls these.

use crate::end;
use crate::failure::{Failure, Report, Result};
use crate::log;
use crate::opened::{Export, Opened};
use crate::settings::Settings;
use lamassu_volume::{Extent, Volume, Zeros};
use parking_lot::{Mutex, RwLock};
use std::sync::OnceLock;

/// Largest request that is answered, bytes: nbdkit's own bound.
pub const REQUEST_MAX: u32 = 64 << 20;

static SETTINGS: Mutex<Option<Settings>> = Mutex::new(None);
static OPENED: RwLock<Option<Opened>> = RwLock::new(None);
/// Where the failure of the start is told.
static REPORT: OnceLock<Mutex<Option<Report>>> = OnceLock::new();

/// A core dump or a tracer must not get at keys.
pub fn load() {
    if let Err(error) = lamassu_crypto::secret::harden_process() {
        crate::abi::say(&format!("core dumps could not be switched off: {error}"));
    }
}

/// One `KEY=VALUE` of the command line.
pub fn config(key: &str, value: &str) -> Result<()> {
    SETTINGS.lock().get_or_insert_default().take(key, value)
}

/// All were taken.
pub fn config_complete() -> Result<()> {
    SETTINGS.lock().get_or_insert_default().complete()
}

/// nbdkit serves in this process: opens the vaults, and tells who waits for it.
pub fn after_fork() -> Result<()> {
    log::start();
    let settings = SETTINGS.lock().take().unwrap_or_default();
    if let Some(to) = settings.report {
        let report = crate::abi::descriptor(to)?;
        let _ = REPORT.set(Mutex::new(Some(Report::new(report))));
    }
    let opened = Opened::open(settings).and_then(|opened| {
        *OPENED.write() = Some(opened);
        end::watch()
    });
    if let Some(report) = REPORT.get().and_then(|report| report.lock().take()) {
        report.tell(&opened);
        return opened.map_err(|_| Failure::Told);
    }
    opened
}

/// No client is left.
pub fn cleanup() {
    if let Some(opened) = OPENED.write().take()
        && let Err(error) = opened.close()
    {
        tracing::error!(%error, "a vault was not closed as it should be: what was not flushed may be lost");
    }
}

fn opened<T>(with: impl FnOnce(&Opened) -> Result<T>) -> Result<T> {
    OPENED.read().as_ref().map_or(Err(Failure::NoExport), with)
}

pub fn exports() -> Result<Vec<Export>> {
    opened(Opened::exports)
}

pub fn default_export() -> Result<Option<String>> {
    opened(Opened::default_export)
}

/// A client that has chosen an export.
pub struct Connection {
    volume: Volume,
}

impl Connection {
    pub fn open(read_only: bool, export: &str) -> Result<Connection> {
        let volume = opened(|opened| match export {
            "" => opened.volume(&opened.default_export()?.ok_or(Failure::NoExport)?, read_only),
            name => opened.volume(name, read_only),
        })?;
        Ok(Connection { volume })
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

    pub fn read(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        Ok(self.volume.read(offset, buf)?)
    }

    pub fn write(&self, data: &[u8], offset: u64, durable: bool) -> Result<()> {
        Ok(self.volume.write(offset, data, durable)?)
    }

    pub fn flush(&self) -> Result<()> {
        Ok(self.volume.flush()?)
    }

    pub fn trim(&self, offset: u64, len: u64, durable: bool) -> Result<()> {
        Ok(self.volume.trim(offset, len, durable)?)
    }

    pub fn zero(&self, offset: u64, len: u64, zeros: Zeros, durable: bool) -> Result<()> {
        Ok(self.volume.zero(offset, len, zeros, durable)?)
    }

    /// Tells `add` of the runs of a range, of the first alone where `one` says so.
    pub fn extents(
        &self,
        offset: u64,
        len: u64,
        one: bool,
        add: &mut dyn FnMut(u64, u64, Extent) -> std::io::Result<()>,
    ) -> Result<()> {
        self.volume.runs::<Failure>(offset, len, &mut |run| {
            add(run.offset, run.len, run.extent)?;
            Ok(!one)
        })
    }
}
