//! TLS 1.2 and 1.3 to a key server: the options for trust and identity, and the meaning of TLS errors.
//!
//! Guarantees: a CA in the options is the only one that is trusted; a client certificate and its key are checked to
//! match before anything is sent.

use super::bytes::percent_decoded;
use crate::fault::{Cause, ServerFault};
use crate::source::SourceError;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject};
use rustls::{AlertDescription, ClientConfig, RootCertStore};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use zeroize::Zeroizing;

/// The default limit for a whole exchange with a server.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
const TIMEOUT_SECS_MAX: u64 = 600;

/// Options of an address, after its `#`: `ca=FILE&cert=FILE&key=FILE&timeout=SECONDS`. They are never sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Options {
    /// trust only this CA, not the system's
    pub ca: Option<PathBuf>,
    /// our certificate and its key
    pub client: Option<(PathBuf, PathBuf)>,
    /// limit for everything together, from resolving the name to the last byte
    pub timeout: Duration,
}

impl Options {
    /// Options joined by `&`; `%`, `&` and `#` in values are percent-encoded.
    pub(super) fn parse(text: &str) -> Option<Options> {
        let (mut ca, mut cert, mut key, mut timeout) = (None, None, None, TIMEOUT_DEFAULT);
        for option in text.split('&').filter(|o| !o.is_empty()) {
            let (name, value) = option.split_once('=')?;
            let value = percent_decoded(value).and_then(|v| String::from_utf8(v).ok()).filter(|v| !v.is_empty())?;
            match name {
                "ca" => ca = Some(PathBuf::from(value)),
                "cert" => cert = Some(PathBuf::from(value)),
                "key" => key = Some(PathBuf::from(value)),
                "timeout" => {
                    let secs = value.parse().ok().filter(|s| (1..=TIMEOUT_SECS_MAX).contains(s))?;
                    timeout = Duration::from_secs(secs);
                }
                _ => return None,
            }
        }
        let client = match (cert, key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            // One PEM file may contain both.
            (Some(both), None) => Some((both.clone(), both)),
            (None, None) => None,
            (None, Some(_)) => return None,
        };
        Some(Options { ca, client, timeout })
    }

    /// The certificates of the CAs that are trusted.
    pub(super) fn roots(&self) -> Result<Vec<CertificateDer<'static>>, SourceError> {
        match &self.ca {
            Some(path) => pinned(path),
            None => Ok(rustls_native_certs::load_native_certs().certs),
        }
    }

    /// The client's identity, if the options have one.
    pub(super) fn identity(&self) -> Result<Option<Identity>, SourceError> {
        self.client.as_ref().map(|(cert, key)| Identity::read(cert, key)).transpose()
    }

    /// A configuration of rustls with these options.
    #[cfg(feature = "kmip")]
    pub(super) fn config(&self) -> Result<ClientConfig, SourceError> {
        let mut roots = RootCertStore::empty();
        // Unusable certificates of the system are skipped; those of a CA file were checked.
        roots.add_parsable_certificates(self.roots()?);
        match self.identity()? {
            Some(Identity { chain, key, pem: _, key_path }) => {
                client(roots, Some((chain, key))).map_err(|e| unusable(&key_path, e.into()))
            }
            // Without an identity there is nothing that could be invalid.
            None => Ok(client(roots, None).expect("TLS 1.2 and 1.3 are compiled in")),
        }
    }
}

/// The only provider that is compiled in.
pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The client's certificate and its key, which match.
pub(super) struct Identity {
    /// the certificate, then its issuers
    pub chain: Vec<CertificateDer<'static>>,
    /// the key
    #[cfg_attr(not(feature = "kmip"), allow(dead_code))]
    pub key: PrivateKeyDer<'static>,
    /// the content of the key's file
    #[cfg_attr(not(feature = "https"), allow(dead_code))]
    pub pem: Zeroizing<Vec<u8>>,
    /// the path of the key's file
    pub key_path: PathBuf,
}

impl Identity {
    fn read(cert_path: &Path, key_path: &Path) -> Result<Identity, SourceError> {
        let chain = certificates("client certificate", cert_path)?;
        let pem = Zeroizing::new(std::fs::read(key_path).map_err(|e| unusable(key_path, e.into()))?);
        let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|e| unusable(key_path, e.into()))?;
        // Before anything is sent, and because some users of rustls rely on it.
        client(RootCertStore::empty(), Some((chain.clone(), key.clone_key())))
            .map_err(|e| unusable(key_path, e.into()))?;
        Ok(Identity { chain, key, pem, key_path: key_path.into() })
    }
}

fn client(
    roots: RootCertStore,
    identity: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Result<ClientConfig, rustls::Error> {
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
    let builder = builder.with_root_certificates(roots);
    match identity {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key),
        None => Ok(builder.with_no_client_auth()),
    }
}

fn unusable(key_path: &Path, source: Cause) -> SourceError {
    SourceError::Auxiliary { role: "client key", path: key_path.into(), source }
}

/// What a TLS error says about the server, or about this client.
pub(super) fn fault(error: rustls::Error) -> ServerFault {
    match error {
        rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented => {
            ServerFault::Untrusted { source: Box::new(error) }
        }
        rustls::Error::AlertReceived(
            AlertDescription::CertificateRequired
            | AlertDescription::NoCertificate
            | AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied,
        ) => ServerFault::Unwelcome { source: Box::new(error) },
        other => ServerFault::Protocol { source: Box::new(other) },
    }
}

/// Whether a write failed because the server has closed the connection. With TLS 1.3 a client's handshake is complete
/// before the server has checked its certificate: the server may refuse that, and close, while the first request is on
/// its way. The reason can still be read.
pub(super) fn turned_away(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted
    )
}

fn auxiliary(role: &'static str, path: &Path) -> impl FnOnce(pem::Error) -> SourceError {
    let path = path.to_path_buf();
    move |source| SourceError::Auxiliary { role, path, source: Box::new(source) }
}

/// The certificates of a CA file. Every one must be usable.
fn pinned(path: &Path) -> Result<Vec<CertificateDer<'static>>, SourceError> {
    let certs = certificates("CA file", path)?;
    let mut store = RootCertStore::empty();
    for cert in &certs {
        let source =
            |e: rustls::Error| SourceError::Auxiliary { role: "CA file", path: path.into(), source: Box::new(e) };
        store.add(cert.clone()).map_err(source)?;
    }
    Ok(certs)
}

fn certificates(role: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, SourceError> {
    let certs: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let certs = certs.map_err(auxiliary(role, path))?;
    if certs.is_empty() { Err(auxiliary(role, path)(pem::Error::NoItemsFound)) } else { Ok(certs) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options() {
        let none = Options::parse("").unwrap();
        assert_eq!((none.ca, none.client, none.timeout), (None, None, Duration::from_secs(10)));
        let full = Options::parse("ca=/etc/a%26b.pem&cert=c.pem&key=k.pem&timeout=3").unwrap();
        assert_eq!(full.ca, Some("/etc/a&b.pem".into()));
        assert_eq!(full.client, Some(("c.pem".into(), "k.pem".into())));
        assert_eq!(full.timeout, Duration::from_secs(3));
        assert_eq!(Options::parse("cert=both.pem").unwrap().client, Some(("both.pem".into(), "both.pem".into())));
    }

    #[test]
    fn what_is_no_option() {
        let bad =
            ["ca", "ca=", "key=k", "timeout=0", "timeout=601", "timeout=x", "ca=%2", "ca=%zz", "ca=%ff", "insecure=1"];
        for bad in bad {
            assert_eq!(Options::parse(bad), None, "{bad:?}");
        }
    }
}
