//! Client connections: the part of a configuration that every gateway shares.

use crate::secrets::{read_private, read_public};
use crate::{GatewayError, Result};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The options of [`crate::config::COMMENTED`] about client connections.
#[derive(Clone, Debug)]
pub struct Front {
    /// address and port
    pub listen: String,
    /// certificate and key, PEM
    pub tls: (Option<PathBuf>, Option<PathBuf>),
    /// whether other machines may connect without TLS
    pub plain_http: bool,
    /// domain names of the gateway
    pub domains: Vec<String>,
    /// the region that clients must sign for
    pub region: String,
    /// an address for monitoring
    pub metrics: Option<String>,
    /// whether the access log has keys
    pub log_keys: bool,
    /// connections at once
    pub connections_max: usize,
    /// connections at once of one address
    pub connections_of_address_max: usize,
    /// longest pause of a client, seconds
    pub idle_seconds: u64,
    /// lowest rate of a client, KiB/s
    pub client_kib_per_second_min: u64,
    /// how long requests may run after a signal, seconds
    pub stop_seconds: u64,
    /// largest object in one request, GiB
    pub object_gib_max: u64,
    /// memory for names of listings, MiB
    pub listing_mib_max: usize,
}

impl Front {
    /// Checks the options.
    ///
    /// # Errors
    /// The option, and what it must be.
    pub fn check(&self) -> std::result::Result<(), String> {
        let within = |name: &str, value: u64, least: u64, most: u64| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(format!("{name} must be {least} to {most}, not {value}")),
        };
        within("connections_max", self.connections_max as u64, 1, 1 << 20)?;
        within("connections_of_address_max", self.connections_of_address_max as u64, 1, 1 << 20)?;
        within("idle_seconds", self.idle_seconds, 1, 3600)?;
        within("client_kib_per_second_min", self.client_kib_per_second_min, 1, 1 << 20)?;
        within("stop_seconds", self.stop_seconds, 0, 3600)?;
        within("object_gib_max", self.object_gib_max, 1, 5120)?;
        within("listing_mib_max", self.listing_mib_max as u64, 1, 1 << 20)?;
        let address = |name: &str, text: &str| {
            let parsed = text.parse::<SocketAddr>();
            parsed.map_err(|error| format!("{name} = {text:?}: {error}; give an address and a port, 127.0.0.1:9000"))
        };
        let listen = address("listen", &self.listen)?;
        self.metrics.as_deref().map_or(Ok(()), |metrics| address("metrics", metrics).map(drop))?;
        match &self.tls {
            (Some(_), Some(_)) => {}
            (None, None) if listen.ip().is_loopback() || self.plain_http => {}
            (None, None) => {
                return Err(format!(
                    "listen = {:?} is for other machines: give tls_certificate and tls_key, or say plain_http = true",
                    self.listen
                ));
            }
            (Some(_), None) | (None, Some(_)) => return Err("tls_certificate and tls_key go together".into()),
        }
        if self.region.is_empty() || !self.region.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            return Err(format!("region = {:?}: letters, digits and hyphens alone", self.region));
        }
        match self.domains.iter().find(|name| !is_domain(name)) {
            Some(name) => Err(format!("domains: {name:?} is no name of a domain, in lower case")),
            None => Ok(()),
        }
    }

    /// Largest object in one request, bytes.
    pub fn object_max(&self) -> u64 {
        self.object_gib_max << 30
    }

    /// Memory for names, bytes.
    pub fn listing_max(&self) -> usize {
        self.listing_mib_max << 20
    }

    /// Reads certificate and key; `None`: plain HTTP.
    ///
    /// # Errors
    /// [`GatewayError::Tls`], [`GatewayError::NotPrivate`], [`GatewayError::File`].
    pub fn read_tls(&self) -> Result<Option<Arc<ServerConfig>>> {
        let (Some(certificate), Some(key)) = &self.tls else { return Ok(None) };
        let wrong = |path: &Path, detail: String| GatewayError::Tls { path: path.into(), detail };
        let chain = read_certificates(certificate)?;
        let private = read_private(key)?;
        let private = PrivateKeyDer::from_pem_slice(private.as_bytes());
        let private = private.map_err(|error| wrong(key, error.to_string()))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| wrong(certificate, error.to_string()))?.with_no_client_auth();
        let mut tls =
            builder.with_single_cert(chain, private).map_err(|error| wrong(certificate, error.to_string()))?;
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Some(Arc::new(tls)))
    }
}

/// Reads certificates, PEM.
///
/// # Errors
/// [`GatewayError::Tls`], [`GatewayError::Config`], [`GatewayError::File`].
pub fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_slice_iter(&read_public(path)?).collect::<std::result::Result<Vec<_>, _>>();
    read.map_err(|error| GatewayError::Tls { path: path.into(), detail: error.to_string() })
}

/// Whether this is a domain name in lower case.
fn is_domain(name: &str) -> bool {
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_are_names_in_lower_case() {
        assert!(is_domain("s3.example.org") && !is_domain("S3.example") && !is_domain("a..b") && !is_domain(""));
    }
}
