//! The configuration of etcd: its members, and the credentials.

use crate::{Result, ServerError};
use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
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

    /// Checks the values, for sessions that last for this term.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self, term_seconds: u64) -> std::result::Result<(), String> {
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
        // Hosts stop at nine tenths of a term without an answer. Before that they must find the next leader.
        if 2 * self.leader_seconds >= term_seconds {
            return Err(format!(
                "leader_seconds must be less than half of term_seconds ({term_seconds}), not {}",
                self.leader_seconds
            ));
        }
        Ok(())
    }

    /// Connection options. Relative paths start in the server's directory. A file that holds something else than it
    /// should is refused here: with it no member would ever answer, and a server would stand by for ever.
    ///
    /// # Errors
    /// [`ServerError::Config`], which names the file.
    pub fn options(&self, dir: &Path) -> Result<ConnectOptions> {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(Duration::from_secs(2))
            .with_keep_alive(Duration::from_secs(2), Duration::from_secs(2))
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        if self.endpoints.iter().any(|url| url.starts_with("https://")) {
            let mut tls = TlsOptions::new();
            tls = match &self.ca {
                Some(ca) => tls.ca_certificate(Certificate::from_pem(&*authorities(dir, ca)?)),
                None => tls.with_native_roots(),
            };
            if let (Some(certificate), Some(key)) = (&self.certificate, &self.key) {
                let (certificate, key) = identity(dir, (certificate, key))?;
                tls = tls.identity(Identity::from_pem(&*certificate, &*key));
            }
            options = options.with_tls(tls);
        }
        if let (Some(user), Some(file)) = (&self.user, &self.password_file) {
            let (path, password) = read(dir, "password_file", file)?;
            let password = String::from_utf8_lossy(&password).trim_end().to_owned();
            if password.is_empty() {
                return Err(wrong(path, "password_file", format!("it is empty; write the password of {user:?} there")));
            }
            options = options.with_user(user.clone(), password);
        }
        Ok(options)
    }
}

/// A file that the configuration names, and its content.
type Named = (PathBuf, Content);
type Content = Zeroizing<Vec<u8>>;

fn wrong(path: PathBuf, option: &'static str, what: String) -> ServerError {
    ServerError::Config { path, detail: format!("[etcd] {option}: {what}") }
}

fn read(dir: &Path, option: &'static str, name: &Path) -> Result<Named> {
    let path = dir.join(name);
    match fs::read(&path) {
        Ok(bytes) => Ok((path, Zeroizing::new(bytes))),
        Err(error) => Err(wrong(path, option, format!("{error}; put the file there, or change server.toml"))),
    }
}

/// The certificates in a file. Some there are, in PEM.
fn certificates((path, pem): &Named, option: &'static str) -> Result<Vec<CertificateDer<'static>>> {
    let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let wrong = |what: String| wrong(path.clone(), option, what);
    match read {
        Ok(read) if !read.is_empty() => Ok(read),
        Ok(_) => Err(wrong("it has no certificate in PEM".into())),
        Err(error) => Err(wrong(format!("it is no PEM: {error}"))),
    }
}

/// A file with authorities of which some can be used. The others are ignored, as they are in a system's list.
fn authorities(dir: &Path, ca: &Path) -> Result<Content> {
    let file = read(dir, "ca", ca)?;
    let (used, _) = RootCertStore::empty().add_parsable_certificates(certificates(&file, "ca")?);
    match used {
        0 => Err(wrong(file.0, "ca", "none of its certificates can be read".into())),
        _ => Ok(file.1),
    }
}

/// The files of a certificate and of its key.
fn identity(dir: &Path, (certificate, key): (&Path, &Path)) -> Result<(Content, Content)> {
    let (certificate, key) = (read(dir, "certificate", certificate)?, read(dir, "key", key)?);
    let chain = certificates(&certificate, "certificate")?;
    let wrong_key = |what: String| wrong(key.0.clone(), "key", what);
    let private =
        PrivateKeyDer::from_pem_slice(&key.1).map_err(|error| wrong_key(format!("no key in PEM: {error}")))?;
    let of = certificate.0.display();
    CertifiedKey::from_der(chain, private, &rustls::crypto::ring::default_provider())
        .map_err(|error| wrong_key(format!("it is not the key of {of}: {error}")))?;
    Ok((certificate.1, key.1))
}
