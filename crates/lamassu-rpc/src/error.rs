//! Errors of certificates and keys.

use rustls::Error as RustlsError;
use std::path::PathBuf;

/// Errors of certificates and keys on this side.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A certificate cannot be made, or does not parse.
    #[error("a certificate or its key: {0}")]
    Certificate(#[from] rcgen::Error),
    /// TLS does not accept it.
    #[error("TLS: {0}")]
    Tls(#[from] RustlsError),
    /// TLS does not accept the trusted authority.
    #[error("TLS: {0}")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// the file
        path: PathBuf,
        /// the system's error
        source: std::io::Error,
    },
}
