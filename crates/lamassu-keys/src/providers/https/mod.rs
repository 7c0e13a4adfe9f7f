//! `https:`: a key from a web server, by one GET over TLS 1.2 or 1.3.
//!
//! Guarantees: the server's certificate is verified against the CA named, or the system's; redirects are not followed and no proxy is used, so the key comes
//! from the host that was named or not at all; the answer is bounded in size and in time. Never: sends a cookie, a key or the options.
//!
//! The answer passes through the TLS library's buffers, which are not wiped.

mod address;

use super::Location;
use super::bytes::{KEY_MAX, read_key};
use crate::fault::{Cause, ServerFault};
use crate::source::{Ask, Fetched, KeyProvider, SourceError};
use address::Address;
use lamassu_format::header::SlotKind;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject};
use rustls::{AlertDescription, ClientConfig, RootCertStore};
use std::io;
use std::path::Path;
use std::sync::Arc;
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig, TlsProvider};
use zeroize::Zeroizing;

pub(super) const LOCATION: Location = Location {
    name: "https",
    usage: "https://HOST[:PORT]/PATH[#ca=FILE&cert=FILE&key=FILE&timeout=SECONDS]",
    kinds: &[SlotKind::Passphrase, SlotKind::Raw, SlotKind::Hex],
    interactive: false,
    provider: |argument| argument.and_then(Address::parse).map(|address| Arc::new(Https { address }) as _),
};

struct Https {
    address: Address,
}

impl KeyProvider for Https {
    fn fetch(&self, kind: SlotKind, _ask: &Ask<'_>) -> Result<Fetched, SourceError> {
        let failed = |fault| SourceError::Server { place: self.address.shown.clone(), fault };
        let agent = self.agent()?;
        let mut answer = agent.get(&self.address.url).call().map_err(|e| failed(self.fault(e)))?;
        accepted(answer.status().as_u16()).map_err(failed)?;
        // An answer cut short is an error of the reader: a key is never a part of one.
        match read_key(&mut answer.body_mut().as_reader(), kind) {
            Ok(Some(bytes)) => Ok(Fetched::bytes(bytes)),
            Ok(None) => Err(failed(ServerFault::TooLong { max: KEY_MAX })),
            Err(e) => Err(failed(self.io_fault(e))),
        }
    }
}

/// Whether a status is that of a key.
fn accepted(status: u16) -> Result<(), ServerFault> {
    match status {
        200 => Ok(()),
        300..=399 => Err(ServerFault::Redirect { status }),
        401 | 403 | 407 => Err(ServerFault::Denied { status }),
        404 | 410 => Err(ServerFault::Missing { status }),
        _ => Err(ServerFault::Status { status }),
    }
}

impl Https {
    fn agent(&self) -> Result<ureq::Agent, SourceError> {
        const HEADERS_MAX: usize = 16 << 10;
        let config = ureq::Agent::config_builder()
            .https_only(true)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(None)
            .user_agent(concat!("lamassu/", env!("CARGO_PKG_VERSION")))
            .max_response_header_size(HEADERS_MAX)
            .timeout_global(Some(self.address.timeout))
            .tls_config(self.tls()?)
            .build();
        Ok(config.into())
    }

    fn tls(&self) -> Result<TlsConfig, SourceError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let roots = match &self.address.ca {
            Some(path) => pinned(path)?,
            None => rustls_native_certs::load_native_certs().certs,
        };
        let mut client = None;
        if let Some((cert, key)) = &self.address.client {
            client = Some(identity(cert, key, &provider)?);
        }
        let roots: Vec<_> = roots.iter().map(|der| Certificate::from_der(der).to_owned()).collect();
        Ok(TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .root_certs(RootCerts::Specific(Arc::new(roots)))
            .client_cert(client)
            .unversioned_rustls_crypto_provider(provider)
            .build())
    }

    fn fault(&self, error: ureq::Error) -> ServerFault {
        match error {
            ureq::Error::Timeout(_) => ServerFault::Timeout { seconds: self.address.timeout.as_secs() },
            ureq::Error::HostNotFound => {
                let source = io::Error::new(io::ErrorKind::NotFound, "no such host");
                ServerFault::Unreachable { source }
            }
            ureq::Error::Io(e) => self.io_fault(e),
            ureq::Error::Rustls(e) => tls_fault(e),
            ureq::Error::ConnectionFailed => ServerFault::Unreachable { source: io::ErrorKind::NotConnected.into() },
            other => ServerFault::Protocol { source: Box::new(other) },
        }
    }

    /// A reader's errors carry those of the layers below inside.
    fn io_fault(&self, error: io::Error) -> ServerFault {
        if let Some(inner) = error.get_ref()
            && (inner.is::<rustls::Error>() || inner.is::<ureq::Error>())
        {
            let inner = error.into_inner().expect("there is one: it was looked at");
            return match inner.downcast::<rustls::Error>() {
                Ok(e) => tls_fault(*e),
                Err(inner) => match inner.downcast::<ureq::Error>() {
                    Ok(e) => self.fault(*e),
                    Err(other) => ServerFault::Protocol { source: other },
                },
            };
        }
        match error.kind() {
            io::ErrorKind::TimedOut => ServerFault::Timeout { seconds: self.address.timeout.as_secs() },
            io::ErrorKind::InvalidData => ServerFault::Protocol { source: Box::new(error) },
            _ => ServerFault::Unreachable { source: error },
        }
    }
}

fn tls_fault(error: rustls::Error) -> ServerFault {
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

fn auxiliary(role: &'static str, path: &Path) -> impl FnOnce(pem::Error) -> SourceError {
    let path = path.to_path_buf();
    move |source| SourceError::Auxiliary { role, path, source: Box::new(source) }
}

/// The certificates of a CA file; every one must be usable.
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

/// Our certificate and its key, which must belong together.
fn identity(
    cert_path: &Path,
    key_path: &Path,
    provider: &Arc<rustls::crypto::CryptoProvider>,
) -> Result<ClientCert, SourceError> {
    let chain = certificates("client certificate", cert_path)?;
    let unusable = |source: Cause| SourceError::Auxiliary { role: "client key", path: key_path.into(), source };
    let text = Zeroizing::new(std::fs::read(key_path).map_err(|e| unusable(e.into()))?);
    let key = PrivateKeyDer::from_pem_slice(&text).map_err(|e| unusable(e.into()))?;
    // The client library takes for granted what is tried here.
    ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .and_then(|b| b.with_root_certificates(RootCertStore::empty()).with_client_auth_cert(chain.clone(), key))
        .map_err(|e| unusable(e.into()))?;
    let chain: Vec<_> = chain.iter().map(|der| Certificate::from_der(der).to_owned()).collect();
    let key = PrivateKey::from_pem(&text).map_err(|e| unusable(e.into()))?;
    Ok(ClientCert::new_with_certs(&chain, key))
}
