//! TLS 1.3 with certificates on both sides.
//!
//! The server has a certificate of its own authority, for a fixed name that is independent of its address. Hosts are
//! identified by their keys: each shows a self-signed certificate, of which only the key counts. A joining host does
//! the same with the key of its token. Both sides are verified in the handshake, before any other byte is accepted.

use crate::TlsError;
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
use std::sync::Arc;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The name in every server's certificate.
pub const SERVER_NAME: &str = "server.lamassu";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The digest of a certificate. A token identifies an authority by it.
pub fn digest(certificate: &CertificateDer<'_>) -> [u8; 32] {
    sha256(certificate)
}

fn roots(authority: &CertificateDer<'static>) -> Result<Arc<RootCertStore>, RustlsError> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone())?;
    Ok(Arc::new(roots))
}

/// The name of the server's certificate, as a type of rustls.
pub fn server_name() -> ServerName<'static> {
    ServerName::try_from(SERVER_NAME).expect("a name of letters and a dot")
}

/// TLS for a host that has joined.
///
/// # Errors
/// [`TlsError`].
pub fn client(identity: &Identity) -> Result<ClientConfig, TlsError> {
    let verifier = WebPkiServerVerifier::builder_with_provider(roots(&identity.authority)?, provider()).build()?;
    client_with(verifier, &identity.key)
}

/// TLS for a host that has only a token. The server shows its authority's certificate, which the token identifies.
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

/// Verifies a server whose authority is known by its digest.
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

/// The public keys of hosts, and of tokens that have not been used.
pub trait Keys: Send + Sync + std::fmt::Debug {
    /// Whether this is one of them, a subject public key info.
    fn is_known(&self, spki: &[u8]) -> bool;
}

/// TLS for the server. `chain`: its certificate, then its authority's.
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
    // A resumed session would not be verified again.
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Accepts any client with a known key.
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
            // The signature of the handshake proves possession of the private key.
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

/// A subject with one common name.
pub fn named(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}
