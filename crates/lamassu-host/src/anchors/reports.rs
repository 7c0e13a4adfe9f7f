//! Reports integrity events of a vault to the server that keeps its anchor.

use super::Anchors;
use crate::{Error, Result};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::header::VaultId;
use lamassu_rpc::host::Connection;
use lamassu_rpc::{FINDINGS_MAX, REPORT_MAX};
use lamassu_vault::VaultError;
use lamassu_vault::event::{Events, IntegrityEvent, IntegritySink, TARGET};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// Bytes of events in one report: half of the limit, since a message has more than their text.
const TEXT_MAX: usize = REPORT_MAX / 2;
/// Time between two attempts.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Attempts if the server answers but refuses.
const TRIES: u32 = 3;
/// How often to look whether the process ends.
const LOOK: Duration = Duration::from_millis(50);
/// How long a process waits at its end for reports under way.
const LAST_REPORTS: Duration = Duration::from_secs(3);

/// The sink for the events of vaults whose anchors are at one server.
pub(super) struct Reporting {
    server: String,
    events: Events,
    sink: Arc<ServerSink>,
}

impl Anchors {
    /// From now on, the vault's events go to the server that keeps its anchor, if there is one.
    ///
    /// # Errors
    /// [`AnchorError::Server`] if this host has not joined it; [`Error::NoAnchorPlace`]; no thread.
    pub fn report_to_server(&self, vault: &VaultId, events: &Events) -> Result<()> {
        let Some(server) = self.server_of(vault)? else { return Ok(()) };
        let mut reporting = self.shared.reporting.lock().unwrap_or_else(PoisonError::into_inner);
        let known = reporting.iter().find(|known| known.server == server && known.events.is_same_as(events));
        if let Some(known) = known {
            known.sink.vaults.write().unwrap_or_else(PoisonError::into_inner).insert(vault.to_string(), *vault);
            return Ok(());
        }
        let sink = Arc::new(ServerSink {
            connection: self.connection(&server)?,
            first: *vault,
            vaults: RwLock::new(HashMap::from([(vault.to_string(), *vault)])),
            is_ending: AtomicBool::new(false),
            failures: AtomicU64::new(0),
        });
        let failed = |source| Error::Vault(VaultError::Io { op: "start a thread", source });
        events.add_sink(sink.clone()).map_err(failed)?;
        reporting.push(Reporting { server, events: events.clone(), sink });
        Ok(())
    }

    /// Waits at the end of the process until pending reports are sent, if the servers answer soon.
    pub fn end_reports(&self) {
        for known in self.shared.reporting.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            known.events.end(LAST_REPORTS);
        }
    }
}

/// Reports events of its vaults, and repeats until the server accepts them.
struct ServerSink {
    connection: Connection,
    /// the vault that counts events which were dropped
    first: VaultId,
    /// by id in hex
    vaults: RwLock<HashMap<String, VaultId>>,
    is_ending: AtomicBool,
    failures: AtomicU64,
}

impl ServerSink {
    fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    fn report(&self, vault: &VaultId, events: &[String], lost: u64) {
        let mut refused = 0;
        loop {
            let Err(error) = self.connection.report(vault, events.to_vec(), lost) else { return };
            // An unreachable server will come back.
            let is_away = matches!(&error, AnchorError::Server { fault: ServerFault::Unreachable { .. }, .. });
            refused += u32::from(!is_away);
            if refused >= TRIES || self.is_ending() {
                self.failures.fetch_add(1, Ordering::Relaxed);
                tracing::error!(target: TARGET, events = events.len(), %error, "the findings did not reach the server");
                return;
            }
            let mut waited = Duration::ZERO;
            while waited < AGAIN_AFTER && !self.is_ending() {
                std::thread::sleep(LOOK);
                waited += LOOK;
            }
        }
    }
}

/// As many findings at a time as the server accepts; at least one batch, which may be empty.
fn in_batches(texts: &[String]) -> Vec<&[String]> {
    let (mut batches, mut from, mut len) = (Vec::new(), 0, 0);
    for (at, text) in texts.iter().enumerate() {
        if at - from >= FINDINGS_MAX || len + text.len() > TEXT_MAX {
            batches.push(&texts[from..at]);
            (from, len) = (at, 0);
        }
        len += text.len();
    }
    batches.push(&texts[from..]);
    batches
}

impl IntegritySink for ServerSink {
    fn deliver(&self, events: &[IntegrityEvent], mut lost: u64) {
        // Other vaults may have other servers, or none.
        let known = self.vaults.read().unwrap_or_else(PoisonError::into_inner).clone();
        let mut of_vaults: HashMap<VaultId, Vec<String>> = HashMap::new();
        for event in events {
            if let Some(vault) = event.vault.as_ref().and_then(|id| known.get(id))
                && let Ok(text) = serde_json::to_string(event)
            {
                of_vaults.entry(*vault).or_default().push(text);
            }
        }
        if lost > 0 {
            of_vaults.entry(self.first).or_default();
        }
        for (vault, texts) in of_vaults {
            let mut lost = if vault == self.first { std::mem::take(&mut lost) } else { 0 };
            for batch in in_batches(&texts) {
                self.report(&vault, batch, std::mem::take(&mut lost));
            }
        }
    }

    fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
    }

    fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}
