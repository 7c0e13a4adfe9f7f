//! Reports integrity events of a vault to the server that keeps its anchor.

use super::Anchors;
use crate::{Error, Result};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::header::VaultId;
use lamassu_rpc::host::Connection;
use lamassu_rpc::{FINDINGS_MAX, REPORT_MAX};
use lamassu_vault::VaultError;
use lamassu_vault::event::{Events, IntegrityEvent, IntegritySink, TARGET};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
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

/// The sink for one vault's events.
pub(super) struct Reporting {
    vault: VaultId,
    events: Events,
}

impl Anchors {
    /// From now on, the vault's events go to the server that keeps its anchor, if there is one.
    ///
    /// # Errors
    /// [`AnchorError::Server`] if this host has not joined it; [`Error::NoAnchorPlace`]; no thread.
    pub fn report_to_server(&self, vault: &VaultId, events: &Events) -> Result<()> {
        let Some(server) = self.server_of(vault)? else { return Ok(()) };
        let mut reporting = self.shared.reporting.lock().unwrap_or_else(PoisonError::into_inner);
        if reporting.iter().any(|known| known.vault == *vault && known.events.is_same_as(events)) {
            return Ok(());
        }
        let sink = Arc::new(ServerSink {
            connection: self.connection(&server)?,
            vault: *vault,
            id: vault.to_string(),
            is_ending: AtomicBool::new(false),
            failures: AtomicU64::new(0),
        });
        let failed = |source| Error::Vault(VaultError::Io { op: "start a thread", source });
        events.add_sink(sink).map_err(failed)?;
        reporting.push(Reporting { vault: *vault, events: events.clone() });
        Ok(())
    }

    /// Waits at the end of the process until pending reports are sent, if the servers answer soon.
    pub fn end_reports(&self) {
        for known in self.shared.reporting.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            known.events.end(LAST_REPORTS);
        }
    }
}

/// Reports events of its vault, and repeats until the server accepts them.
struct ServerSink {
    connection: Connection,
    vault: VaultId,
    /// in hex
    id: String,
    is_ending: AtomicBool,
    failures: AtomicU64,
}

impl ServerSink {
    fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    fn report(&self, events: Vec<String>, lost: u64) {
        let mut refused = 0;
        loop {
            let Err(error) = self.connection.report(&self.vault, events.clone(), lost) else { return };
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

impl IntegritySink for ServerSink {
    fn deliver(&self, events: &[IntegrityEvent], mut lost: u64) {
        // Datasets may have other servers, or none.
        let own = events.iter().filter(|event| event.vault.as_deref() == Some(&*self.id));
        let (mut batch, mut len) = (Vec::new(), 0);
        for text in own.filter_map(|event| serde_json::to_string(event).ok()) {
            if batch.len() >= FINDINGS_MAX || len + text.len() > TEXT_MAX {
                self.report(std::mem::take(&mut batch), std::mem::take(&mut lost));
                len = 0;
            }
            len += text.len();
            batch.push(text);
        }
        if !batch.is_empty() || lost > 0 {
            self.report(batch, lost);
        }
    }

    fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
    }

    fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}
