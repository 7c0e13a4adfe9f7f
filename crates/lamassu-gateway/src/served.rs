//! The two kinds of object stores (vault files, objects at a provider), and the calls that a running gateway makes to
//! both.

use crate::front::Front;
use crate::objects::{ObjectError, Objects, Swept};
use crate::remote::{Remote, RemoteError};
use crate::s3::{self, Users};
use crate::{Config, GatewayError, Result};
use lamassu_vault::detached::Detached;
use lamassu_vault::{Forest, VaultError};
use s3s::service::S3Service;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The object store of a gateway.
#[derive(Clone)]
pub(crate) enum Served {
    /// files of the vault
    Files(Arc<Objects>),
    /// ciphertext objects at a provider
    Remote(Arc<Remote>),
}

impl Served {
    pub fn open(config: &Config, forest: &Arc<Forest>) -> Result<Served> {
        let listings_max = config.front().listing_max();
        let (Some(backend), Some(settings)) = (&config.backend, config.settings()?) else {
            let objects = Objects::open(forest.clone(), &config.buckets, config.modes()?, listings_max);
            return Ok(Served::Files(Arc::new(objects.map_err(|error| of_buckets(&config.buckets, error))?)));
        };
        let unfit = |source| GatewayError::Unfit { backend: backend.clone(), source };
        let files = forest.at(lamassu_vault::ROOT).and_then(Detached::of).map_err(unfit)?;
        let remote = Remote::open(files, &settings, listings_max);
        let failed = |error: RemoteError| GatewayError::Provider {
            backend: backend.clone(),
            // A service manager starts it again, and finds the next credential.
            may_pass: error.may_pass() || matches!(error, RemoteError::Expired(_)),
            detail: error.to_string(),
        };
        Ok(Served::Remote(Arc::new(remote.map_err(failed)?)))
    }

    pub fn service(&self, front: &Front, current: s3::Current) -> S3Service {
        match self {
            Served::Files(objects) => s3::service(front, objects.clone(), Users::Known(current)),
            Served::Remote(remote) => s3::service(front, remote.clone(), Users::Known(current)),
        }
    }

    pub fn health(&self) -> std::result::Result<(), String> {
        match self {
            Served::Files(objects) => objects.check().map_err(|error| error.to_string()),
            Served::Remote(remote) => remote.check().map_err(|error| error.to_string()),
        }
    }

    /// Reads the credentials for the provider again, if there is one.
    ///
    /// # Errors
    /// [`GatewayError`]; then the previous ones stay in force.
    pub fn reload(&self, config: &Config) -> Result<()> {
        if let (Served::Remote(remote), Some(settings)) = (self, config.settings()?) {
            remote.take_credentials(settings);
        }
        Ok(())
    }

    fn sweep(&self, stopping: &AtomicBool) {
        let swept = match self {
            Served::Files(objects) => objects.sweep(stopping).map_err(|error| error.to_string()),
            Served::Remote(remote) => remote.sweep(stopping).map_err(|error| error.to_string()),
        };
        match swept {
            Ok(Swept { removed, left_out: 0 }) => {
                tracing::info!(removed, "what an earlier end had left of objects is removed");
            }
            Ok(Swept { removed, left_out }) => {
                tracing::warn!(
                    removed,
                    left_out,
                    "what an earlier end had left of objects is removed, but not where it was not searched"
                );
            }
            Err(error) => tracing::warn!(%error, "the buckets were not searched for what an earlier end has left"),
        }
    }
}

pub(crate) fn of_buckets(path: &str, error: ObjectError) -> GatewayError {
    let source = match error {
        ObjectError::Vault(source) | ObjectError::NoRoot(source) => source,
        _ => VaultError::Invalid,
    };
    GatewayError::Buckets { path: path.into(), source }
}

/// Starts a thread that removes leftovers of an earlier run, once `begin` returns true.
///
/// # Errors
/// [`GatewayError::System`].
pub(crate) fn sweeps(
    served: Served,
    stopping: &Arc<AtomicBool>,
    begin: impl FnOnce() -> bool + Send + 'static,
) -> Result<std::thread::JoinHandle<()>> {
    let stopping = stopping.clone();
    let sweep = move || {
        if begin() {
            served.sweep(&stopping);
        }
    };
    let thread = std::thread::Builder::new().name("lamassu-sweep".into()).spawn(sweep);
    thread.map_err(|source| GatewayError::System { op: "start a thread", source })
}
