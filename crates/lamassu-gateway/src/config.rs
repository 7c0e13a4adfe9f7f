//! The configuration of a gateway: one file.

use crate::front::Front;
use crate::limits::Limits;
use crate::objects::Modes;
use crate::remote::{Provider, Settings};
use crate::secrets::{Secret, in_line, read_config};
use crate::{GatewayError, Result};
use serde::Deserialize;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A configuration with every option, as `lamassu gateway config` prints it.
pub const COMMENTED: &str = r#"# Configuration of `lamassu gateway s3`. A line that is commented out shows the default.

# The vault's directory, and the source of its key (any source that `lamassu` accepts for --key).
vault = "/srv/store/vault"
key = "raw:file:/etc/lamassu/vault.key"

# The directory in the vault whose subdirectories (and datasets) are the buckets.
#buckets = "/"

# Objects at an S3 provider instead of files of the vault: each is one ciphertext object below this bucket and prefix.
# The vault then holds only the keys. See [provider] below.
#backend = "s3://BUCKET/PREFIX"

# A directory at which the same process also mounts the vault. Without this, there is no mount. `allow_other` lets other
# users than the gateway's use the mount.
#mountpoint = "/mnt/vault"
#allow_other = false

# Refuse all changes.
#read_only = false

# The file with users and their rights; it must belong to the gateway's user or root, mode 0600. A relative path starts
# in this file's directory. SIGHUP reloads this file and the certificate.
#credentials = "credentials.toml"

# The address that clients connect to.
#listen = "127.0.0.1:9000"

# The certificate (PEM, with its chain) and its key. Without them the gateway speaks plain HTTP, only for clients on
# this machine. `plain_http` allows that for other machines: all data are then unencrypted on the network.
#tls_certificate = "/etc/lamassu/gateway.crt"
#tls_key = "/etc/lamassu/gateway.key"
#plain_http = false

# Domains of this gateway, for buckets in host names (BUCKET.s3.example.org). Without this, buckets are only in paths.
#domains = ["s3.example.org"]
#region = "us-east-1"

# The address for monitoring: /metrics (OpenMetrics) and /health, by plain HTTP. They show counts, but no names of
# buckets or keys. Without this, there is none.
#metrics = "127.0.0.1:9434"

# Whether the access log contains keys of objects, which are names of files. Buckets and users are always in it.
#log_keys = false

# Permissions of new files and directories.
#file_mode = "0640"
#dir_mode = "0750"

# Concurrent connections, in all and of one address. How long a client may pause in the middle of a request or an
# answer. Its lowest rate: all its pauses together may take one such pause, and what its bytes take at this rate.
#connections_max = 1024
#connections_of_address_max = 256
#idle_seconds = 30
#client_kib_per_second_min = 1
# How long requests may continue after SIGTERM.
#stop_seconds = 20

# The largest object in one request, GiB. Larger objects must be uploaded in parts.
#object_gib_max = 5
# Memory for names of large directories between pages of listings, MiB.
#listing_mib_max = 256

# The provider of `backend`.
#[provider]
# Its URL. Without this, Amazon's URL of the region. http:// is only for this machine, unless `plain_http` is set.
#endpoint = "https://s3.example.org"
#region = "us-east-1"
# Whether the bucket is in paths; otherwise it is in the host name.
#path_style = true
# A file with the gateway's access_key and secret_key at the provider, and optionally token; mode 0600. Without this,
# AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN are used. SIGHUP reloads it.
#credentials = "provider.toml"
# Authorities that may have signed its certificate (PEM). Without this, those of the system.
#ca = "/etc/lamassu/provider-ca.pem"
#plain_http = false
# How often a request is repeated if there is no answer, or if the provider is too busy. How long the provider may pause
# in the middle of a request or an answer.
#retries = 5
#timeout_seconds = 60

# Limits of each tenant. A request takes up to 10 MiB of memory, an upload to a provider up to 55 MiB.
[limits]
# Connections of its clients, whose requests were signed.
#connections_at_once = 256
#requests_at_once = 64
# Concurrent requests of one user, so that one user cannot use all of the tenant's.
#requests_of_user_at_once = 48
#requests_per_second = 1000
#mib_per_second = 10000

# Other limits for one tenant.
#[tenants.finance]
#requests_per_second = 100
"#;

/// The whole configuration.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// the vault's directory
    pub vault: PathBuf,
    /// the source of its key
    #[serde(default)]
    key: Option<Secret>,
    /// the directory of the buckets
    #[serde(default = "slash")]
    pub buckets: String,
    /// the object store at a provider instead, `s3://BUCKET/PREFIX`
    #[serde(default)]
    pub backend: Option<String>,
    /// settings for that provider
    #[serde(default)]
    provider: Provider,
    /// mountpoint, if the vault is also mounted
    #[serde(default)]
    pub mountpoint: Option<PathBuf>,
    /// whether other users may use the mount
    #[serde(default)]
    pub allow_other: bool,
    /// whether it is read-only
    #[serde(default)]
    pub read_only: bool,
    #[serde(default = "credentials")]
    credentials: PathBuf,
    /// where clients connect
    #[serde(default = "listen")]
    pub listen: String,
    /// certificates, PEM
    #[serde(default)]
    pub tls_certificate: Option<PathBuf>,
    /// its key, PEM
    #[serde(default)]
    pub tls_key: Option<PathBuf>,
    #[serde(default)]
    plain_http: bool,
    /// domain names of the gateway
    #[serde(default)]
    pub domains: Vec<String>,
    /// the region that clients without one are told
    #[serde(default = "region")]
    pub region: String,
    /// the address for monitoring
    #[serde(default)]
    pub metrics: Option<String>,
    /// whether the access log has keys
    #[serde(default)]
    pub log_keys: bool,
    #[serde(default = "file_mode")]
    file_mode: String,
    #[serde(default = "dir_mode")]
    dir_mode: String,
    /// connections at once
    #[serde(default = "connections_max")]
    pub connections_max: usize,
    /// connections at once of one address
    #[serde(default = "connections_of_address_max")]
    pub connections_of_address_max: usize,
    /// how long a client may be idle
    #[serde(default = "idle_seconds")]
    pub idle_seconds: u64,
    #[serde(default = "client_kib_per_second_min")]
    client_kib_per_second_min: u64,
    /// how long requests may run after a signal
    #[serde(default = "stop_seconds")]
    pub stop_seconds: u64,
    #[serde(default = "object_gib_max")]
    object_gib_max: u64,
    #[serde(default = "listing_mib_max")]
    listing_mib_max: usize,
    /// default limits of a tenant
    #[serde(default)]
    pub limits: Limits,
    /// limits of named tenants
    #[serde(default)]
    pub tenants: HashMap<String, Limits>,
    /// the file
    #[serde(skip)]
    path: PathBuf,
}

fn slash() -> String {
    "/".into()
}
fn credentials() -> PathBuf {
    "credentials.toml".into()
}
pub(crate) fn listen() -> String {
    "127.0.0.1:9000".into()
}
pub(crate) fn region() -> String {
    "us-east-1".into()
}
fn file_mode() -> String {
    "0640".into()
}
fn dir_mode() -> String {
    "0750".into()
}
pub(crate) fn connections_max() -> usize {
    1024
}
pub(crate) fn connections_of_address_max() -> usize {
    256
}
pub(crate) fn idle_seconds() -> u64 {
    30
}
pub(crate) fn client_kib_per_second_min() -> u64 {
    1
}
pub(crate) fn stop_seconds() -> u64 {
    20
}
pub(crate) fn object_gib_max() -> u64 {
    5
}
pub(crate) fn listing_mib_max() -> usize {
    256
}

impl Config {
    /// Reads a configuration.
    ///
    /// # Errors
    /// [`GatewayError::Config`], [`GatewayError::File`].
    pub fn read(path: &Path) -> Result<Config> {
        let wrong = |detail: String| GatewayError::Config { path: path.into(), detail };
        let text = read_config(path, "`lamassu gateway config` prints one")?;
        let config: Config = toml::from_str(&text).map_err(|error| wrong(in_line(&text, &error)))?;
        let config = Config { path: path.into(), ..config };
        config.check().map_err(wrong)?;
        Ok(config)
    }

    fn check(&self) -> std::result::Result<(), String> {
        self.front().check()?;
        for (name, limits) in std::iter::once(("limits", &self.limits)).chain(self.named_limits()) {
            limits.check().map_err(|what| format!("{name}: {what}"))?;
        }
        self.check_backend()?;
        self.modes_of().map(drop)
    }

    fn check_backend(&self) -> std::result::Result<(), String> {
        let Some(backend) = &self.backend else { return Ok(()) };
        self.provider.check(backend)?;
        if self.mountpoint.is_some() || self.buckets != "/" {
            return Err("backend goes with neither mountpoint nor buckets: objects are not files of the vault".into());
        }
        Ok(())
    }

    /// Where and how clients connect.
    pub(crate) fn front(&self) -> Front {
        Front {
            listen: self.listen.clone(),
            tls: (self.tls_certificate.clone(), self.tls_key.clone()),
            plain_http: self.plain_http,
            domains: self.domains.clone(),
            region: self.region.clone(),
            metrics: self.metrics.clone(),
            log_keys: self.log_keys,
            connections_max: self.connections_max,
            connections_of_address_max: self.connections_of_address_max,
            idle_seconds: self.idle_seconds,
            client_kib_per_second_min: self.client_kib_per_second_min,
            stop_seconds: self.stop_seconds,
            object_gib_max: self.object_gib_max,
            listing_mib_max: self.listing_mib_max,
        }
    }

    fn named_limits(&self) -> impl Iterator<Item = (&str, &Limits)> {
        self.tenants.iter().map(|(name, limits)| (name.as_str(), limits))
    }

    fn modes_of(&self) -> std::result::Result<Modes, String> {
        let mode = |name: &str, text: &str| match u32::from_str_radix(text, 8) {
            Ok(mode) if mode <= 0o777 => Ok(mode),
            _ => Err(format!("{name} = {text:?}: permissions in octal, \"0640\"")),
        };
        Ok(Modes { file: mode("file_mode", &self.file_mode)?, dir: mode("dir_mode", &self.dir_mode)? })
    }

    /// Permissions of new files and directories.
    ///
    /// # Errors
    /// [`GatewayError::Config`].
    pub fn modes(&self) -> Result<Modes> {
        self.modes_of().map_err(|detail| GatewayError::Config { path: self.path.clone(), detail })
    }

    /// The source of the key, if one is named.
    pub fn key(&self) -> Option<&str> {
        self.key.as_ref().map(|key| key.0.as_str())
    }

    /// The provider of the objects, with what the files say that its lines name.
    ///
    /// # Errors
    /// [`GatewayError`].
    pub(crate) fn settings(&self) -> Result<Option<Settings>> {
        self.backend.as_ref().map(|backend| self.provider.settings(backend, &self.path)).transpose()
    }

    /// The file of credentials.
    pub fn credentials(&self) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(&self.credentials)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The limits of a tenant.
    pub fn limits_of(&self, tenant: &str) -> Limits {
        *self.tenants.get(tenant).unwrap_or(&self.limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("gateway.toml");
        std::fs::write(&path, text).expect("writes");
        Config::read(&path)
    }

    #[test]
    fn the_commented_file_says_the_defaults() {
        let commented = read(COMMENTED).expect("good");
        let own = ["mountpoint", "tls_", "domains", "metrics", "[tenants", "requests_per_second = 100\n"];
        let own = own.iter().chain(&["backend", "endpoint", "credentials = \"provider", "ca = "]);
        let all: String = COMMENTED
            .split_inclusive('\n')
            .map(|line| match line.strip_prefix('#') {
                Some(option) if !option.starts_with(' ') && !own.clone().any(|own| option.starts_with(own)) => option,
                _ => line,
            })
            .collect();
        let said = read(&all).expect("good");
        let shown = |config: Config| format!("{:?}", Config { path: PathBuf::new(), ..config });
        assert_eq!(shown(said), shown(commented));
    }

    #[test]
    fn nonsense_is_refused_and_secrets_are_not_told() {
        for (line, said) in [
            ("colour = 1", "line 2: unknown"),
            ("listen = \"nowhere\"", "127.0.0.1:9000"),
            ("listen = \"0.0.0.0:9000\"", "plain_http"),
            ("tls_key = \"/k\"", "go together"),
            ("file_mode = \"rw\"", "octal"),
            ("idle_seconds = 0", "1 to 3600"),
            ("domains = [\"a_b\"]", "domains"),
            ("region = \"\"", "region"),
            ("key = 5", "line 2"),
            ("backend = \"bucket\"", "s3://BUCKET"),
            ("backend = \"s3://b\"\nmountpoint = \"/m\"", "neither"),
            ("backend = \"s3://b\"\nprovider.endpoint = \"http://s3.example.org\"", "plain_http"),
            ("limits.requests_at_once = 0", "requests_at_once"),
            ("tenants.a.colour = 0", "unknown"),
        ] {
            let error = read(&format!("vault = \"/v\"\n{line}\n")).expect_err(line).to_string();
            assert!(error.contains(said), "{line}: {error}");
        }
        let config = read("vault = \"/v\"\nkey = \"raw:hex:secret\"\n").expect("good");
        assert!(!format!("{config:?}").contains("secret"));
        assert!(read("").expect_err("no vault").to_string().contains("vault"));
        assert!(read("vault = \"/v\"\nlisten = \"0.0.0.0:1\"\nplain_http = true\n").is_ok());
    }
}
