//! The configuration of etcd: its members, and the credentials.

use crate::{Result, ServerError};
use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};
use serde::Deserialize;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use zeroize::Zeroizing;

/// The table `[etcd]` of the configuration.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct EtcdConfig {
    /// the members, as URLs
    pub endpoints: Vec<String>,
    /// prefix of all keys of this server, before a slash: one word, so that no server's keys are below another's
    #[serde(default = "default_prefix")]
    pub prefix: String,
    /// how long a silent leader still leads, seconds
    #[serde(default = "default_seconds")]
    pub leader_seconds: u64,
    /// authorities for the members' certificates, PEM
    ca: Option<PathBuf>,
    /// the server's own certificate, and its key, PEM
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    /// a user of etcd, and a file with its password
    user: Option<String>,
    password_file: Option<PathBuf>,
}

fn default_prefix() -> String {
    "lamassu".into()
}

fn default_seconds() -> u64 {
    5
}

impl EtcdConfig {
    /// The name in messages.
    pub fn name(&self) -> String {
        format!("etcd at {}", self.endpoints.join(", "))
    }

    /// Checks the values.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> std::result::Result<(), String> {
        let is_https = |url: &String| url.starts_with("https://");
        let is_here = |url: &str| {
            let url: Option<http::Uri> = url.parse().ok();
            let host = url.as_ref().and_then(|url| url.host()).unwrap_or_default();
            let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
            host == "localhost" || address.is_ok_and(|address| address.is_loopback())
        };
        if self.endpoints.is_empty() {
            return Err("endpoints: name the members, such as \"https://etcd1.example:2379\"".into());
        }
        if let Some(url) = self.endpoints.iter().find(|url| !is_https(url) && !is_here(url)) {
            // An attacker in between could change what hosts trust.
            return Err(format!(
                "endpoints: {url:?} must begin with https:// (http:// is for members on this machine)"
            ));
        }
        if self.endpoints.iter().any(|url| url.contains('@')) {
            return Err("endpoints: a user is given by `user` and `password_file`".into());
        }
        if self.certificate.is_some() != self.key.is_some() {
            return Err("certificate and key go together".into());
        }
        if self.user.is_some() != self.password_file.is_some() {
            return Err("user and password_file go together".into());
        }
        let is_good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if self.prefix.is_empty() || self.prefix.len() > 63 || !self.prefix.chars().all(is_good) {
            return Err("prefix must be 1 to 63 letters, digits, dots, hyphens and underscores".into());
        }
        if !(2..=60).contains(&self.leader_seconds) {
            return Err(format!("leader_seconds must be 2 to 60, not {}", self.leader_seconds));
        }
        Ok(())
    }

    /// Connection options. Relative paths start in the server's directory.
    ///
    /// # Errors
    /// [`ServerError::File`].
    pub fn options(&self, dir: &Path) -> Result<ConnectOptions> {
        let read = |name: &Path| -> Result<Zeroizing<Vec<u8>>> {
            let path = dir.join(name);
            fs::read(&path).map(Zeroizing::new).map_err(ServerError::file("read", &path))
        };
        let mut options = ConnectOptions::new()
            .with_connect_timeout(Duration::from_secs(2))
            .with_keep_alive(Duration::from_secs(2), Duration::from_secs(2))
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        if self.endpoints.iter().any(|url| url.starts_with("https://")) {
            let mut tls = TlsOptions::new();
            tls = match &self.ca {
                Some(ca) => tls.ca_certificate(Certificate::from_pem(&*read(ca)?)),
                None => tls.with_native_roots(),
            };
            if let (Some(certificate), Some(key)) = (&self.certificate, &self.key) {
                tls = tls.identity(Identity::from_pem(&*read(certificate)?, &*read(key)?));
            }
            options = options.with_tls(tls);
        }
        if let (Some(user), Some(file)) = (&self.user, &self.password_file) {
            let password = read(file)?;
            let password = String::from_utf8_lossy(&password).trim_end().to_owned();
            options = options.with_user(user.clone(), password);
        }
        Ok(options)
    }
}
