//! TLS 1.3 with certificates on both sides.
//!
//! The server has a certificate of its own authority, for a name that has nothing to do with its address. Hosts are
//! known by their keys: each shows a certificate that it signed itself, of which nothing but the key is looked at. So
//! does a host that joins, by the key of its token. Both are verified in the handshake: no byte of anybody else gets
//! further.

use crate::identity::{HostKey, Identity};
use lamassu_crypto::wrap::sha256;
use rcgen::{CertificateParams, DistinguishedName, DnType};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
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
    client_with(verifier, &identity.key)
}

/// How a host connects that has a token alone. The server shows its authority's certificate, which the token names.
///
/// # Errors
/// [`TlsError`].
pub fn joining(token_key: &HostKey, authority: [u8; 32]) -> Result<ClientConfig, TlsError> {
    client_with(Arc::new(Named { authority, provider: provider() }), token_key)
}

fn client_with(verifier: Arc<dyn ServerCertVerifier>, key: &HostKey) -> Result<ClientConfig, TlsError> {
    let certificate = CertificateParams::default().self_signed(&key.0)?;
    let versions = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13])?;
    let verified = versions.dangerous().with_custom_certificate_verifier(verifier);
    let mut config = verified.with_client_auth_cert(vec![certificate.der().clone()], key.private())?;
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

/// Knows the keys of hosts, and of tokens that have not been used.
pub trait Keys: Send + Sync + std::fmt::Debug {
    /// Whether this is one of their public keys, a subject public key info.
    fn is_known(&self, spki: &[u8]) -> bool;
}

/// How the server accepts. `chain`: its certificate, then its authority's.
///
/// # Errors
/// [`TlsError`].
pub fn server(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    keys: Arc<dyn Keys>,
) -> Result<ServerConfig, TlsError> {
    let versions = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13])?;
    let verified = versions.with_client_cert_verifier(Arc::new(Known { keys, provider: provider() }));
    let mut config = verified.with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    // A session that was resumed would not be verified again.
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Whoever has a key that is known.
#[derive(Debug)]
struct Known {
    keys: Arc<dyn Keys>,
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for Known {
    fn root_hint_subjects(&self) -> &[SubjectName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, RustlsError> {
        match public_key(end_entity) {
            // That it has the private key, the signature of the handshake says.
            Some(spki) if self.keys.is_known(&spki) => Ok(ClientCertVerified::assertion()),
            Some(_) => Err(CertificateError::ApplicationVerificationFailure.into()),
            None => Err(CertificateError::BadEncoding.into()),
        }
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

/// The public key of a certificate, as a subject public key info.
pub fn public_key(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some(parsed.public_key().raw.to_vec())
}

/// A subject of one common name.
pub fn named(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}
