//! The data behind an administrator's requests: a running server, or its directory alone.

use crate::anchor_store::AnchorStore;
use crate::authority::Authority;
use crate::config::Config;
use crate::keys::Master;
use crate::origin::{Office, Origin, Waits};
use crate::pauses::Blocking;
use crate::policy::Policies;
use crate::refused::{Lost, Refused};
use crate::state::State;
use crate::vaults::{self, Vaults};
use crate::{Result, ServerError, dir};
use lamassu_anchor::AnchorError;
use lamassu_anchor::table::Table;
use lamassu_format::header::VaultId;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The table of an anchor, or the reason that it cannot be read.
pub type Opened = std::result::Result<Arc<dyn Table>, AnchorError>;

/// The data that requests read and change.
#[derive(Clone)]
pub struct Administered {
    /// the server's directory
    pub dir: PathBuf,
    /// the durable state
    pub state: Arc<State>,
    /// the anchors
    pub anchors: Arc<dyn AnchorStore>,
    /// the right to use both
    pub office: Arc<Office>,
    /// the authority that signs
    pub authority: Arc<Authority>,
    /// the configuration
    pub config: Config,
    /// the vaults, of a running server
    pub vaults: Option<Arc<Vaults>>,
    /// the policies in force, of a running server
    pub policies: Option<Arc<Policies>>,
    /// the master key, of a running server that keeps keys
    pub master: Option<Arc<Master>>,
}

impl Administered {
    /// For a server that is not running.
    ///
    /// # Errors
    /// [`ServerError::Running`]; those of the state and the authority.
    pub fn of(dir: &Path) -> Result<Administered> {
        dir::check_dir(dir)?;
        let (config, authority) = (Config::read(dir)?, Arc::new(Authority::read(dir)?));
        let opened = Origin::open(dir, &config, &authority, &Waits::Not)?;
        let Origin { state, anchors, office, .. } = opened.ok_or(ServerError::NotRunning)?;
        let (vaults, policies, master) = (None, None, None);
        Ok(Administered { dir: dir.into(), state, anchors, office, authority, config, vaults, policies, master })
    }

    /// Calls `each` with the table of each anchor that is kept here, or the reason that it cannot be read. One after
    /// the other is open: there may be more than files that the process may open.
    ///
    /// # Errors
    /// [`ServerError::File`]; a [`ServerError::Database`] that ends a server; those of `each`.
    pub fn visit_tables(&self, mut each: impl FnMut(VaultId, Opened) -> Result<()>) -> Result<()> {
        self.anchors.all()?.into_iter().try_for_each(|id| self.visit_table(&id, || each(id, self.table(&id)?)))
    }

    /// Runs work that may open a vault, which is closed after that if it was not open before.
    ///
    /// # Errors
    /// Those of the work.
    pub fn visit_table(&self, id: &VaultId, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let closed = self.vaults.as_ref().filter(|vaults| !vaults.is_open(id));
        work()?;
        if let Some(vaults) = closed {
            vaults.close_unused(id);
        }
        Ok(())
    }

    /// The vaults whose anchors should be here and are missing.
    ///
    /// # Errors
    /// Those of the state and of the store of anchors.
    pub fn missing(&self) -> Result<Vec<VaultId>> {
        vaults::missing(&*self.anchors, &self.state)
    }

    /// To be kept while something is verified: messages of hosts may wait for that.
    pub fn blocks_hosts(&self) -> Option<Blocking> {
        Some(self.vaults.as_ref()?.pauses().block())
    }

    /// The table of one vault, or the reason that it cannot be read.
    ///
    /// # Errors
    /// As [`Administered::visit_tables`].
    pub fn table(&self, id: &VaultId) -> Result<Opened> {
        let Some(vaults) = &self.vaults else {
            return Ok(self.anchors.open(id));
        };
        let path = || self.anchors.name(id).into();
        match vaults.vault(id) {
            Ok(vault) => Ok(Ok(vault.table_to_look_at())),
            Err(Refused::Lost(Lost(ServerError::Anchor(error))) | Refused::Failed(ServerError::Anchor(error))) => {
                Ok(Err(error))
            }
            Err(Refused::Lost(Lost(error)) | Refused::Failed(error)) => Err(error),
            Err(Refused::Unknown) => Ok(Err(AnchorError::Missing { path: path() })),
            Err(_) => Ok(Err(AnchorError::Locked { path: path() })),
        }
    }
}
