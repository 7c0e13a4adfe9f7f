//! The operator's settings for a provider: `backend` and the table `[provider]` of the configuration.

use crate::front::read_certificates;
use crate::secrets::{Secret, in_line, read_private};
use crate::{GatewayError, Result};
use rustls::pki_types::CertificateDer;
use rusty_s3::{Bucket, Credentials, UrlStyle};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use ureq::Agent;
use ureq::tls::{Certificate, RootCerts, TlsConfig, TlsProvider};
use url::{Host, Url};

/// The scheme of `backend`.
const SCHEME: &str = "s3://";
/// How long a connection attempt may take.
const CONNECT: Duration = Duration::from_secs(10);

/// The table `[provider]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Provider {
    endpoint: Option<String>,
    region: String,
    path_style: bool,
    credentials: Option<PathBuf>,
    ca: Option<PathBuf>,
    plain_http: bool,
    retries: u32,
    timeout_seconds: u64,
}

impl Default for Provider {
    fn default() -> Provider {
        Provider {
            endpoint: None,
            region: "us-east-1".into(),
            path_style: true,
            credentials: None,
            ca: None,
            plain_http: false,
            retries: 5,
            timeout_seconds: 60,
        }
    }
}

/// The file of the gateway's credentials at the provider.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    access_key: String,
    secret_key: Secret,
    token: Option<Secret>,
}

/// What a client of the provider needs.
pub struct Settings {
    /// the bucket
    pub bucket: Bucket,
    /// prefix of all names, which ends with a slash unless it is empty
    pub prefix: String,
    /// credentials for signing
    pub credentials: Credentials,
    /// how often a request is repeated
    pub retries: u32,
    /// connections
    pub agent: Agent,
}

impl Provider {
    /// What is wrong with these options, as far as they can be checked without the files they name.
    pub fn check(&self, backend: &str) -> std::result::Result<(), String> {
        split(backend)?;
        self.url()?;
        if self.retries > 20 {
            return Err(format!("provider.retries must be 0 to 20, not {}", self.retries));
        }
        match (1..=3600).contains(&self.timeout_seconds) {
            true => Ok(()),
            false => Err(format!("provider.timeout_seconds must be 1 to 3600, not {}", self.timeout_seconds)),
        }
    }

    fn url(&self) -> std::result::Result<Url, String> {
        let amazon = || format!("https://s3.{}.amazonaws.com", self.region);
        let text = self.endpoint.clone().unwrap_or_else(amazon);
        let url = Url::parse(&text).map_err(|error| format!("provider.endpoint = {text:?}: {error}"))?;
        match url.scheme() {
            "https" => Ok(url),
            "http" if self.plain_http || is_loopback(&url) => Ok(url),
            "http" => Err(format!(
                "provider.endpoint = {text:?}: without TLS others on the way could change what is read and written, and \
                 see the requests; use https, or say plain_http = true"
            )),
            _ => Err(format!("provider.endpoint = {text:?}: it begins with https://")),
        }
    }

    /// Reads the files that the options name. `config` is the path of the configuration; relative paths start in its
    /// directory.
    ///
    /// # Errors
    /// [`GatewayError`].
    pub fn settings(&self, backend: &str, config: &Path) -> Result<Settings> {
        let wrong = |detail: String| GatewayError::Config { path: config.into(), detail };
        let (bucket, prefix) = split(backend).map_err(wrong)?;
        let url = self.url().map_err(wrong)?;
        let style = if self.path_style { UrlStyle::Path } else { UrlStyle::VirtualHost };
        let is_local = is_loopback(&url);
        let bucket = Bucket::new(url, style, bucket, self.region.clone())
            .map_err(|error| wrong(format!("backend = {backend:?}: {error}")))?;
        let mut agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent("lamassu")
            .max_idle_connections(64)
            .max_idle_connections_per_host(64)
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(Duration::from_secs(self.timeout_seconds)))
            .timeout_per_write(Some(Duration::from_secs(self.timeout_seconds)))
            .tls_config(self.tls(config)?);
        if is_local {
            agent = agent.proxy(None);
        }
        Ok(Settings {
            bucket,
            prefix,
            credentials: self.credentials(config)?,
            retries: self.retries,
            agent: Agent::new_with_config(agent.build()),
        })
    }

    fn tls(&self, config: &Path) -> Result<TlsConfig> {
        let roots: Vec<CertificateDer<'static>> = match &self.ca {
            Some(file) => read_certificates(&beside(config, file))?,
            None => rustls_native_certs::load_native_certs().certs,
        };
        let roots: Vec<_> = roots.iter().map(|der| Certificate::from_der(der).to_owned()).collect();
        Ok(TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .root_certs(RootCerts::from(roots))
            .build())
    }

    fn credentials(&self, config: &Path) -> Result<Credentials> {
        let Some(file) = &self.credentials else {
            let none = "there are no credentials for the provider: name a file, provider.credentials, or set \
                        AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
            return Credentials::from_env()
                .ok_or_else(|| GatewayError::Config { path: config.into(), detail: none.into() });
        };
        let path = beside(config, file);
        let text = read_private(&path)?;
        let wrong =
            |error: &toml::de::Error| GatewayError::Config { path: path.clone(), detail: in_line(&text, error) };
        let File { access_key, secret_key, token } = toml::from_str(&text).map_err(|error| wrong(&error))?;
        let secret = secret_key.0.as_str();
        Ok(match token {
            Some(token) => Credentials::new_with_token(access_key, secret, token.0.as_str()),
            None => Credentials::new(access_key, secret),
        })
    }
}

fn beside(config: &Path, file: &Path) -> PathBuf {
    config.parent().unwrap_or(Path::new("")).join(file)
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        Some(Host::Domain(name)) => name == "localhost",
        None => false,
    }
}

/// Bucket and prefix of `s3://BUCKET/PREFIX`.
fn split(backend: &str) -> std::result::Result<(String, String), String> {
    let wrong = || format!("backend = {backend:?}: it is s3://BUCKET or s3://BUCKET/PREFIX");
    let rest = backend.strip_prefix(SCHEME).ok_or_else(wrong)?.trim_end_matches('/');
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let is_safe = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    let is_part = |part: &str| !part.is_empty() && part != "." && part != ".." && is_safe(part);
    if !is_part(bucket) || !(prefix.is_empty() || prefix.split('/').all(is_part)) {
        return Err(wrong() + ", of letters, digits, hyphens, dots and underscores");
    }
    let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
    Ok((bucket.into(), prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_is_a_bucket_and_a_prefix() {
        let good = |backend: &str| split(backend).expect(backend);
        assert_eq!(good("s3://b"), ("b".into(), String::new()));
        assert_eq!(good("s3://b/"), ("b".into(), String::new()));
        assert_eq!(good("s3://b/p/q"), ("b".into(), "p/q/".into()));
        for backend in ["", "b", "s3://", "s3:///p", "s3://b//p", "s3://b/../p", "s3://b/ü", "http://b"] {
            assert!(split(backend).is_err(), "{backend}");
        }
    }

    #[test]
    fn an_endpoint_without_tls_is_for_this_machine_alone() {
        let url = |endpoint: &str, plain_http| {
            Provider { endpoint: Some(endpoint.into()), plain_http, ..Provider::default() }.url()
        };
        assert!(url("http://127.0.0.1:9000", false).is_ok() && url("http://[::1]:1", false).is_ok());
        assert!(url("http://s3.example.org", false).is_err() && url("http://s3.example.org", true).is_ok());
        assert!(url("ftp://x", true).is_err());
        assert_eq!(Provider::default().url().expect("Amazon's").as_str(), "https://s3.us-east-1.amazonaws.com/");
    }
}
