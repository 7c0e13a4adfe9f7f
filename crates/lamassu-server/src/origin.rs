//! Where a server's state and anchors are, opened: files in its directory, or etcd; and the right to serve them.

use crate::Result;
use crate::anchor_store::{AnchorStore, Files};
use crate::authority::Authority;
use crate::config::Config;
use crate::state::State;
use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "etcd")]
use crate::etcd::lead::Lead;

/// What is kept.
pub struct Origin {
    /// all but anchors
    pub state: Arc<State>,
    /// anchors
    pub anchors: Arc<dyn AnchorStore>,
    /// the right to both
    pub office: Arc<Office>,
}

/// The right to serve, which ends where several servers take turns.
#[derive(Default)]
pub struct Office {
    /// `None`: no other can serve what is in this server's directory.
    #[cfg(feature = "etcd")]
    lead: Option<Arc<Lead>>,
    /// No other process has the directory.
    _lock: Option<std::fs::File>,
}

impl Office {
    /// That of a leader, which has its directory alone.
    #[cfg(feature = "etcd")]
    pub fn of(lead: Arc<Lead>, lock: std::fs::File) -> Office {
        Office { lead: Some(lead), _lock: Some(lock) }
    }

    /// Waits until it is known that this server had the right at a moment after this call. False: it has lost it.
    pub async fn confirm(&self) -> bool {
        #[cfg(feature = "etcd")]
        if let Some(lead) = &self.lead {
            return lead.confirm().await;
        }
        true
    }

    /// Lets another server have it, at once.
    pub fn give_up(&self) {
        #[cfg(feature = "etcd")]
        if let Some(lead) = &self.lead {
            lead.give_up();
        }
    }
}

impl Drop for Office {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// How long a server that has no right to serve waits for it.
pub enum Waits<'a> {
    /// Not at all: an administrator's command, which looks at what is kept, or changes it.
    Not,
    /// A server: until it has it, or this says that it is to end. `lost` is told, with the reason, when it has it no
    /// more.
    Until {
        /// whether to end
        is_over: &'a dyn Fn() -> bool,
        /// who is told
        lost: tokio::sync::mpsc::UnboundedSender<String>,
    },
}

impl Origin {
    /// Opens it. `None`: what waited is to end.
    ///
    /// # Errors
    /// [`ServerError::Running`], [`ServerError::Damaged`], [`ServerError::Elsewhere`], [`ServerError::Etcd`],
    /// [`ServerError::NothingInEtcd`]; those of the state.
    pub fn open(dir: &Path, config: &Config, authority: &Authority, waits: &Waits<'_>) -> Result<Option<Origin>> {
        #[cfg(feature = "etcd")]
        if let Some(etcd) = &config.etcd {
            return crate::etcd::origin::open(
                dir,
                (config, etcd),
                &data_encoding::HEXLOWER.encode(&authority.digest()),
                waits,
            );
        }
        let _ = authority;
        let (state, anchors) = match waits {
            Waits::Not => (State::open(dir)?, Files::to_look_at(dir)),
            Waits::Until { .. } => (State::open_when_free(dir)?, Files::open(dir)?),
        };
        state.keep_entries(config.audit_entries);
        Ok(Some(Origin { state: Arc::new(state), anchors: Arc::new(anchors), office: Arc::default() }))
    }
}
