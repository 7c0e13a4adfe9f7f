//! TLS 1.3 with certificates on both sides.
//!
//! The server has a certificate of its own authority, for a name that has nothing to do with its address. Hosts show a
//! certificate of that authority; one that joins shows a certificate which it signed itself, by the key of its token.
//! Both are verified in the handshake: no byte of anybody else gets further.

use crate::identity::{HostKey, Identity};
use lamassu_crypto::wrap::sha256;
use rcgen::{CertificateParams, DistinguishedName, DnType};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName as SubjectName, Error as RustlsError,
    RootCertStore, ServerConfig, SignatureScheme,
};
use std::path::PathBuf;
use std::sync::Arc;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The name that every server's certificate is for.
pub const SERVER_NAME: &str = "server.lamassu";

/// What this side's certificates and keys are not good for.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// It cannot be made, or does not parse.
    #[error("a certificate or its key: {0}")]
    Certificate(#[from] rcgen::Error),
    /// TLS does not take it.
    #[error("TLS: {0}")]
    Tls(#[from] RustlsError),
    /// TLS does not take who is to be trusted.
    #[error("TLS: {0}")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
    /// A file of it cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// which
        path: PathBuf,
        /// the system's error
        source: std::io::Error,
    },
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The digest of a certificate, by which a token names an authority.
pub fn digest(certificate: &CertificateDer<'_>) -> [u8; 32] {
    sha256(certificate)
}

fn roots(authority: &CertificateDer<'static>) -> Result<Arc<RootCertStore>, RustlsError> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone())?;
    Ok(Arc::new(roots))
}

/// The name of the server's certificate, as TLS has it.
pub fn server_name() -> ServerName<'static> {
    ServerName::try_from(SERVER_NAME).expect("a name of letters and a dot")
}

/// How a host that has joined connects.
///
/// # Errors
/// [`TlsError`].
pub fn client(identity: &Identity) -> Result<ClientConfig, TlsError> {
    let verifier = WebPkiServerVerifier::builder_with_provider(roots(&identity.authority)?, provider()).build()?;
    client_with(verifier, identity.certificate.clone(), identity.key.private())
}

/// How a host connects that has a token alone. The server shows its authority's certificate, which the token names.
///
/// # Errors
/// [`TlsError`].
pub fn joining(token_key: &HostKey, authority: [u8; 32]) -> Result<ClientConfig, TlsError> {
    let certificate = CertificateParams::default().self_signed(&token_key.0)?;
    client_with(Arc::new(Named { authority, provider: provider() }), certificate.der().clone(), token_key.private())
}

fn client_with(
    verifier: Arc<dyn ServerCertVerifier>,
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
) -> Result<ClientConfig, TlsError> {
    let versions = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13])?;
    let verified = versions.dangerous().with_custom_certificate_verifier(verifier);
    let mut config = verified.with_client_auth_cert(vec![certificate], key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

/// A server whose authority is known by its digest.
#[derive(Debug)]
struct Named {
    authority: [u8; 32],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Named {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, RustlsError> {
        let named = intermediates.iter().find(|shown| digest(shown) == self.authority);
        let authority = named.ok_or(CertificateError::UnknownIssuer)?.clone().into_owned();
        let verifier = WebPkiServerVerifier::builder_with_provider(roots(&authority)?, self.provider.clone()).build();
        let verifier = verifier.map_err(|error| RustlsError::General(error.to_string()))?;
        verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        Err(RustlsError::General("TLS 1.3 alone".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        let schemes = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, schemes)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Knows which tokens have not been used.
pub trait Tokens: Send + Sync + std::fmt::Debug {
    /// Whether this is the public key of one, a subject public key info.
    fn is_good(&self, spki: &[u8]) -> bool;
}

/// How the server accepts. `chain`: its certificate, then its authority's.
///
/// # Errors
/// [`TlsError`].
pub fn server(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    authority: &CertificateDer<'static>,
    tokens: Arc<dyn Tokens>,
) -> Result<ServerConfig, TlsError> {
    let hosts = WebPkiClientVerifier::builder_with_provider(roots(authority)?, provider()).build()?;
    let versions = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13])?;
    let verified = versions.with_client_cert_verifier(Arc::new(Known { hosts, tokens }));
    let mut config = verified.with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    // A session that was resumed would not be verified again.
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Hosts that have joined, and who has a token.
#[derive(Debug)]
struct Known {
    hosts: Arc<dyn ClientCertVerifier>,
    tokens: Arc<dyn Tokens>,
}

impl ClientCertVerifier for Known {
    fn root_hint_subjects(&self) -> &[SubjectName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, RustlsError> {
        match public_key(end_entity) {
            // That it has the private key, the signature of the handshake says.
            Some(spki) if self.tokens.is_good(&spki) => Ok(ClientCertVerified::assertion()),
            Some(_) => self.hosts.verify_client_cert(end_entity, intermediates, now),
            None => Err(CertificateError::BadEncoding.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        self.hosts.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        self.hosts.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.hosts.supported_verify_schemes()
    }
}

/// The public key of a certificate, as a subject public key info.
pub fn public_key(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some(parsed.public_key().raw.to_vec())
}

/// The name that a certificate is for, and until when it is good, in s since 1970.
pub fn subject(certificate: &CertificateDer<'_>) -> Option<(String, u64)> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let name = parsed.subject().iter_common_name().next()?.as_str().ok()?.to_owned();
    Some((name, u64::try_from(parsed.validity().not_after.timestamp()).ok()?))
}

/// A subject of one common name.
pub fn named(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}
