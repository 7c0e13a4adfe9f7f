//! The configuration of an access proxy: one file.

use crate::config::{
    client_kib_per_second_min, connections_max, connections_of_address_max, idle_seconds, listen, listing_mib_max,
    object_gib_max, region, stop_seconds,
};
use crate::front::Front;
use crate::limits::Limits;
use crate::secrets::{in_line, read_config};
use crate::{GatewayError, Result};
use data_encoding::HEXLOWER;
use serde::Deserialize;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// A configuration with every option, as `lamassu gateway config --provider` prints it.
pub const COMMENTED: &str = r#"# Configuration of `lamassu gateway provider`.
# A line that is commented out shows the default.

# The directory of the objects, with a subdirectory for each tenant's bucket. Only the proxy's user may have access.
store = "/srv/lamassu/store"
# The directory of the proxy's key, and of the numbers of accepted publications. Only the proxy's user may have access.
# It must be on persistent storage.
state = "/var/lib/lamassu-proxy"

# The address that clients connect to.
#listen = "127.0.0.1:9000"

# The certificate (PEM, with its chain) and its key. Without them the proxy speaks plain HTTP, only for clients on this
# machine. `plain_http` allows that for other machines: an observer can then replay their requests for 15 minutes.
#tls_certificate = "/etc/lamassu/proxy.crt"
#tls_key = "/etc/lamassu/proxy.key"
#plain_http = false

# Domains of this proxy, for buckets in host names (BUCKET.s3.example.org). Without this, buckets are only in paths.
#domains = ["s3.example.org"]
#region = "us-east-1"

# The address for monitoring: /metrics (OpenMetrics) and /health, by plain HTTP. Without this, there is none.
#metrics = "127.0.0.1:9434"

# Whether the access log contains the (sealed) keys of objects.
#log_keys = false

# Concurrent connections, in all and of one address. How long a client may pause in the middle of a request or an
# answer. Its lowest rate: all its pauses together may take one such pause, and what its bytes take at this rate. How
# long requests may continue after SIGTERM.
#connections_max = 1024
#connections_of_address_max = 256
#idle_seconds = 30
#client_kib_per_second_min = 1
#stop_seconds = 20

# The largest object in one request, GiB; memory for names of large directories between pages of listings, MiB.
#object_gib_max = 5
#listing_mib_max = 256

# The longest life of an accepted credential. The greatest age of a tenant's list of revocations: with an older list,
# all requests of the tenant are refused.
#credential_seconds_max = 43200
#status_seconds_max = 60

# A tenant: its bucket; its public key, as `lamassu policy show` prints it; the directory of its publications (`lamassu
# policy publish`), however files get there. Write access to that directory allows to make the proxy refuse the tenant's
# requests, and nothing else.
[[tenant]]
bucket = "acme"
key = "0000000000000000000000000000000000000000000000000000000000000000"
published = "/srv/lamassu/published/acme"
# Limits of the tenant, and of one user of it. A request takes up to 10 MiB of memory.
#limits = { connections_at_once = 256, requests_at_once = 64, requests_of_user_at_once = 48, requests_per_second = 1000, mib_per_second = 10000 }
"#;

/// The whole configuration.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProviderConfig {
    /// the directory of the buckets
    pub store: PathBuf,
    /// the directory of the proxy's key
    pub state: PathBuf,
    #[serde(default = "listen")]
    listen: String,
    tls_certificate: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    #[serde(default)]
    plain_http: bool,
    #[serde(default)]
    domains: Vec<String>,
    #[serde(default = "region")]
    region: String,
    metrics: Option<String>,
    #[serde(default)]
    log_keys: bool,
    #[serde(default = "connections_max")]
    connections_max: usize,
    #[serde(default = "connections_of_address_max")]
    connections_of_address_max: usize,
    #[serde(default = "idle_seconds")]
    idle_seconds: u64,
    #[serde(default = "client_kib_per_second_min")]
    client_kib_per_second_min: u64,
    #[serde(default = "stop_seconds")]
    stop_seconds: u64,
    #[serde(default = "object_gib_max")]
    object_gib_max: u64,
    #[serde(default = "listing_mib_max")]
    listing_mib_max: usize,
    /// longest life of a credential, seconds
    #[serde(default = "credential_seconds_max")]
    pub credential_seconds_max: u64,
    /// greatest age of a list of revocations, seconds
    #[serde(default = "status_seconds_max")]
    pub status_seconds_max: u64,
    #[serde(default)]
    tenant: Vec<TenantEntry>,
}

fn credential_seconds_max() -> u64 {
    12 * 3600
}
fn status_seconds_max() -> u64 {
    60
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantEntry {
    bucket: String,
    key: String,
    published: PathBuf,
    #[serde(default)]
    limits: Limits,
}

/// A tenant of the proxy.
#[derive(Clone, Debug)]
pub struct TenantConfig {
    /// its bucket
    pub bucket: String,
    /// its public key (Ed25519)
    pub key: [u8; 32],
    /// the directory that it publishes to
    pub published: PathBuf,
    /// its limits
    pub limits: Limits,
}

impl TenantEntry {
    fn tenant(&self) -> std::result::Result<TenantConfig, String> {
        let TenantEntry { bucket, key, published, limits } = self.clone();
        let wrong = |what: String| format!("tenant {bucket:?}: {what}");
        if !lamassu_access::manager::is_bucket(&bucket) {
            return Err(wrong("a bucket's name has 3 to 63 small letters, digits and hyphens".into()));
        }
        limits.check().map_err(|what| wrong(format!("limits: {what}")))?;
        let key = HEXLOWER.decode(key.as_bytes()).ok().and_then(|key| key.try_into().ok());
        let key = key.ok_or_else(|| wrong("key is a public key: 64 hexadecimal digits".into()))?;
        Ok(TenantConfig { bucket, key, published, limits })
    }
}

impl ProviderConfig {
    /// Reads a configuration.
    ///
    /// # Errors
    /// [`GatewayError::Config`], [`GatewayError::File`].
    pub fn read(path: &Path) -> Result<ProviderConfig> {
        let wrong = |detail: String| GatewayError::Config { path: path.into(), detail };
        let text = read_config(path, "`lamassu gateway config --provider` prints one")?;
        let config: ProviderConfig = toml::from_str(&text).map_err(|error| wrong(in_line(&text, &error)))?;
        config.check().map_err(wrong)?;
        Ok(config)
    }

    fn check(&self) -> std::result::Result<(), String> {
        self.front().check()?;
        let most = lamassu_access::credential::SECONDS_MAX;
        if !(60..=most).contains(&self.credential_seconds_max) {
            return Err(format!("credential_seconds_max must be 60 to {most}, not {}", self.credential_seconds_max));
        }
        if !(5..=3600).contains(&self.status_seconds_max) {
            return Err(format!("status_seconds_max must be 5 to 3600, not {}", self.status_seconds_max));
        }
        if self.tenant.is_empty() {
            return Err("there is no [[tenant]]".into());
        }
        let mut buckets = HashSet::new();
        match self.tenants()?.iter().find(|tenant| !buckets.insert(tenant.bucket.clone())) {
            Some(tenant) => Err(format!("two tenants have the bucket {:?}", tenant.bucket)),
            None => Ok(()),
        }
    }

    /// The tenants.
    ///
    /// # Errors
    /// What is wrong with one.
    pub fn tenants(&self) -> std::result::Result<Vec<TenantConfig>, String> {
        self.tenant.iter().map(TenantEntry::tenant).collect()
    }

    /// Where and how clients connect.
    pub(super) fn front(&self) -> Front {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ProviderConfig> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("proxy.toml");
        std::fs::write(&path, text).expect("writes");
        ProviderConfig::read(&path)
    }

    #[test]
    fn the_commented_file_says_the_defaults() {
        let commented = read(COMMENTED).expect("good");
        let own = ["tls_", "domains", "metrics"];
        let all: String = COMMENTED
            .split_inclusive('\n')
            .map(|line| match line.strip_prefix('#') {
                Some(option) if !option.starts_with(' ') && !own.iter().any(|own| option.starts_with(own)) => option,
                _ => line,
            })
            .collect();
        assert_eq!(format!("{:?}", read(&all).expect("good")), format!("{commented:?}"));
    }

    #[test]
    fn nonsense_is_refused() {
        let key = "0".repeat(64);
        let tenant = |lines: &str| format!("store = \"/s\"\nstate = \"/t\"\n[[tenant]]\npublished = \"/p\"\n{lines}\n");
        let good = tenant(&format!("bucket = \"acme\"\nkey = \"{key}\""));
        assert!(read(&good).is_ok());
        for (text, said) in [
            ("store = \"/s\"\nstate = \"/t\"\n".to_owned(), "no [[tenant]]"),
            (format!("colour = 1\n{good}"), "unknown"),
            (format!("status_seconds_max = 0\n{good}"), "5 to 3600"),
            (format!("credential_seconds_max = 0\n{good}"), "60 to"),
            (format!("listen = \"0.0.0.0:1\"\n{good}"), "plain_http"),
            (tenant(&format!("bucket = \"A\"\nkey = \"{key}\"")), "3 to 63"),
            (tenant("bucket = \"acme\"\nkey = \"00\""), "64 hexadecimal"),
            (format!("{good}[[tenant]]\npublished = \"/q\"\nbucket = \"acme\"\nkey = \"{key}\"\n"), "two tenants"),
        ] {
            let error = read(&text).expect_err(said).to_string();
            assert!(error.contains(said), "{said}: {error}");
        }
    }
}
