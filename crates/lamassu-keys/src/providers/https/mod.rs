//! `https:`: a key from a web server, by one GET over TLS 1.2 or 1.3.
//!
//! Guarantees: the server's certificate is verified against the given CA, or the system's. Redirects are not followed
//! and no proxy is used, so the key comes from the named host or not at all. The answer is limited in size and time. No
//! cookie, key or option is sent.
//!
//! The answer passes through the TLS library's buffers, which are not wiped.

mod address;
mod transport;

use super::bytes::{KEY_MAX, read_key};
use super::{Location, tls};
use crate::fault::{Cause, ServerFault};
use crate::source::{Ask, Fetched, KeyProvider, SourceError};
use address::Address;
use lamassu_format::header::SlotKind;
use rustls::pki_types::CertificateDer;
use std::io;
use std::sync::Arc;
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig, TlsProvider};

pub(super) const LOCATION: Location = Location {
    name: "https",
    is_scheme: false,
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
        // A truncated answer is an error of the reader: a part of a key is never accepted.
        match read_key(&mut answer.body_mut().as_reader(), kind) {
            Ok(Some(bytes)) => Ok(Fetched::bytes(bytes)),
            Ok(None) => Err(failed(ServerFault::TooLong { max: KEY_MAX })),
            Err(e) => Err(failed(self.io_fault(e))),
        }
    }
}

/// Whether a status means that a key follows.
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
            .timeout_global(Some(self.address.options.timeout))
            .tls_config(self.tls()?)
            .build();
        Ok(transport::agent(config))
    }

    fn tls(&self) -> Result<TlsConfig, SourceError> {
        let options = &self.address.options;
        let certificates = |chain: &[CertificateDer<'_>]| -> Vec<_> {
            chain.iter().map(|der| Certificate::from_der(der).to_owned()).collect()
        };
        let roots = certificates(&options.roots()?);
        let mut client = None;
        if let Some(ours) = options.identity()? {
            let unusable = |e: ureq::Error| {
                let source = Box::new(e) as Cause;
                SourceError::Auxiliary { role: "client key", path: ours.key_path.clone(), source }
            };
            let key = PrivateKey::from_pem(&ours.pem).map_err(unusable)?;
            client = Some(ClientCert::new_with_certs(&certificates(&ours.chain), key));
        }
        Ok(TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .root_certs(RootCerts::Specific(Arc::new(roots)))
            .client_cert(client)
            .unversioned_rustls_crypto_provider(tls::provider())
            .build())
    }

    fn fault(&self, error: ureq::Error) -> ServerFault {
        match error {
            ureq::Error::Timeout(_) => ServerFault::Timeout { seconds: self.address.options.timeout.as_secs() },
            ureq::Error::HostNotFound => {
                let source = io::Error::new(io::ErrorKind::NotFound, "no such host");
                ServerFault::Unreachable { source }
            }
            ureq::Error::Io(e) => self.io_fault(e),
            ureq::Error::Rustls(e) => tls::fault(e),
            ureq::Error::ConnectionFailed => ServerFault::Unreachable { source: io::ErrorKind::NotConnected.into() },
            other => ServerFault::Protocol { source: Box::new(other) },
        }
    }

    /// The errors of lower layers are inside the reader's.
    fn io_fault(&self, error: io::Error) -> ServerFault {
        if let Some(inner) = error.get_ref()
            && (inner.is::<rustls::Error>() || inner.is::<ureq::Error>())
        {
            let inner = error.into_inner().expect("there is one: it was looked at");
            return match inner.downcast::<rustls::Error>() {
                Ok(e) => tls::fault(*e),
                Err(inner) => match inner.downcast::<ureq::Error>() {
                    Ok(e) => self.fault(*e),
                    Err(other) => ServerFault::Protocol { source: other },
                },
            };
        }
        match error.kind() {
            io::ErrorKind::TimedOut => ServerFault::Timeout { seconds: self.address.options.timeout.as_secs() },
            io::ErrorKind::InvalidData => ServerFault::Protocol { source: Box::new(error) },
            _ => ServerFault::Unreachable { source: error },
        }
    }
}
