//! Errors that keep a gateway from starting, or end it.

use lamassu_vault::VaultError;
use std::io;
use std::path::{Path, PathBuf};

/// The reason why a gateway cannot start or has to end.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The operator's fault: the configuration is invalid.
    #[error("{path}: {detail}")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where; no secret.
        detail: String,
    },
    /// The operator's fault: other users could read or write the secrets.
    #[error(
        "{0} has secrets: it must be a file of this user or root, mode 0600 (or 0400); `chmod 600` it, and change the \
         secrets if others had access"
    )]
    NotPrivate(PathBuf),
    /// The operator's fault: other users than the proxy's can use the directory.
    #[error("{0} must be a directory of this user, mode 0700: no other user may reach the objects without the proxy")]
    NotOwn(PathBuf),
    /// The operator's fault: another proxy works on the directory.
    #[error("another `lamassu gateway provider` uses {0}: end that one first, or give this one a directory of its own")]
    InUse(PathBuf),
    /// The operator's fault: certificate or key cannot be used.
    #[error("{path}: {detail}")]
    Tls {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// A file could not be read.
    #[error("cannot {op} {path}: {source}")]
    File {
        /// The operation.
        op: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The address is in use, or is not one of this machine.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// The system gave no threads or no signals.
    #[error("cannot {op}: {source}")]
    System {
        /// The operation.
        op: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The provider does not answer, or refuses the gateway.
    #[error("backend = {backend:?}: {detail}")]
    Provider {
        /// As configured.
        backend: String,
        /// The provider's message, or the reason why there was no answer.
        detail: String,
        /// Whether the same request may succeed later.
        may_pass: bool,
    },
    /// The vault cannot be used for objects at a provider.
    #[error("backend = {backend:?}: {source}")]
    Unfit {
        /// As configured.
        backend: String,
        /// Why not.
        source: VaultError,
    },
    /// The directory of the buckets cannot be used.
    #[error("buckets = {path:?}: {source}; it is a directory in the vault, / for all of it")]
    Buckets {
        /// The directory.
        path: String,
        /// The vault's error.
        source: VaultError,
    },
}

/// The result of a call.
pub type Result<T, E = GatewayError> = std::result::Result<T, E>;

impl GatewayError {
    pub(crate) fn file(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> GatewayError {
        move |source| GatewayError::File { op, path: path.into(), source }
    }
}
