//! Opens a server's state and anchors, in files of its directory or in etcd, and acquires the right to serve them.

#[cfg(feature = "etcd")]
pub mod etcd;

use crate::Result;
use crate::anchor_store::{AnchorStore, Files};
use crate::authority::Authority;
use crate::config::Config;
use crate::reserve::Reserve;
use crate::state::State;
use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "etcd")]
use crate::etcd::lead::Lead;

/// The opened data.
pub struct Origin {
    /// the durable state, without anchors
    pub state: Arc<State>,
    /// anchors
    pub anchors: Arc<dyn AnchorStore>,
    /// the right to use both
    pub office: Arc<Office>,
    /// Disk space that is kept for the state; `None`: the state is not on this server's disk.
    pub reserve: Option<Reserve>,
}

/// The right to serve. With replicas it ends when another one takes over.
#[derive(Default)]
pub struct Office {
    /// `None`: the data is in this server's directory, so no other server can serve it.
    #[cfg(feature = "etcd")]
    lead: Option<Arc<Lead>>,
    /// Keeps other processes out of the directory.
    _lock: Option<std::fs::File>,
}

impl Office {
    /// A leader's, which holds the lock of its directory.
    #[cfg(feature = "etcd")]
    pub fn of(lead: Arc<Lead>, lock: std::fs::File) -> Office {
        Office { lead: Some(lead), _lock: Some(lock) }
    }

    /// Waits until it is certain that this server had the right at a moment after this call. False: it has lost it.
    pub async fn confirm(&self) -> bool {
        #[cfg(feature = "etcd")]
        if let Some(lead) = &self.lead {
            return lead.confirm().await;
        }
        true
    }

    /// Lets another server take over at once.
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

/// How long to wait for the right to serve.
pub enum Waits<'a> {
    /// Not at all: for an administrator's command, which reads or changes the data.
    Not,
    /// For a server: until it has the right, or `is_over` says that it is to end. `lost` gets the reason when it loses
    /// the right.
    Until {
        /// whether to end
        is_over: &'a dyn Fn() -> bool,
        /// gets the reason
        lost: tokio::sync::mpsc::UnboundedSender<String>,
    },
}

impl Origin {
    /// Checks that the data is where the configuration has it. Nothing is opened.
    ///
    /// # Errors
    /// [`ServerError::Damaged`], [`ServerError::NotMoved`], [`ServerError::File`].
    pub fn check_place(dir: &Path, config: &Config) -> Result<()> {
        #[cfg(feature = "etcd")]
        if let Some(etcd) = &config.etcd {
            return etcd::is_moved(dir, etcd);
        }
        let _ = config;
        State::file_in(dir)?;
        Files::check_place(dir)
    }

    /// Opens the data. `None`: the wait is over without the right.
    ///
    /// # Errors
    /// [`ServerError::Running`], [`ServerError::Damaged`], [`ServerError::Elsewhere`], [`ServerError::Etcd`],
    /// [`ServerError::NothingInEtcd`]; those of the state.
    pub fn open(dir: &Path, config: &Config, authority: &Authority, waits: &Waits<'_>) -> Result<Option<Origin>> {
        #[cfg(feature = "etcd")]
        if let Some(etcd) = &config.etcd {
            return etcd::open(dir, (config, etcd), &data_encoding::HEXLOWER.encode(&authority.digest()), waits);
        }
        let _ = authority;
        let (state, anchors) = match waits {
            Waits::Not => (State::open(dir)?, Files::to_look_at(dir)),
            Waits::Until { .. } => (State::open_when_free(dir)?, Files::open(dir)?),
        };
        state.keep_audit(config.audit_kept());
        Ok(Some(Origin {
            state: Arc::new(state),
            anchors: Arc::new(anchors),
            office: Arc::default(),
            reserve: Some(Reserve::of(dir)),
        }))
    }
}
