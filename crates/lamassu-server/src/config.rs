//! The configuration: one file in the server's directory, in which everything has a default.

#[cfg(feature = "etcd")]
use crate::etcd::config::EtcdConfig;
use crate::{Result, ServerError, audit};
use lamassu_keys::{KeySource, SourceError};
use lamassu_lease::Terms;
use serde::Deserialize;
use std::io::ErrorKind;
use std::net::{Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// File name in the server's directory.
pub const FILE: &str = "server.toml";

/// What `init` writes.
pub const COMMENTED: &str = r#"# Configuration of lamassu-server. A line that is commented out shows the default.

# The address that hosts connect to.
#listen = "0.0.0.0:7433"

# The address that tokens contain, HOST:PORT. Without this, the name of this machine and the port above.
#address = "server.example:7433"

# A session without a heartbeat for this time ends, and other hosts can get its vault; 5 to 600 s. A shorter time than
# before takes effect at the first start without open sessions.
#term_seconds = 30
# The time between heartbeats of a session; at most a quarter of the term.
#heartbeat_seconds = 5

# How long an unused token of `enrol` is valid.
#token_hours = 24

# Concurrent connections of all hosts. Concurrent handshakes of one address: with more, the oldest one of that address
# is dropped.
#connections_max = 4096
#handshakes_max = 64

# How many entries of the audit log are kept, and how many MiB of them; the oldest are removed. A million take about
# 300 MB. With [etcd] the defaults are 100000 and 64: a replica that takes over reads all entries first.
#audit_entries = 1000000
#audit_mib = 512

# The address for monitoring: /metrics (OpenMetrics) and /health, by plain HTTP. They show counts, but no names. Without
# this, there is none.
#metrics = "127.0.0.1:9433"

# URL that alerts are posted to, in JSON, by https (or http on this machine). They are signed with the secret in
# webhook.secret in this directory, as www.standardwebhooks.com specifies. Without this, alerts are not posted;
# `lamassu-server alerts list` shows them.
#webhook = "https://alerts.example.org/lamassu"
# Authorities, in PEM, that may have signed its certificate, instead of the system's.
#webhook_ca = "/etc/ssl/certs/alerts.pem"

# The source of the master key, which wraps the keys that this server keeps for hosts (`lamassu key generate
# server://…`): any source that `lamassu` accepts for --key, except a server like this one. Without this, no keys are
# kept.
#master_key = "raw:file:/etc/lamassu/master.key"

# Limits of each host on evaluations of oblivious zone keys (`lamassu zone create --oblivious`): per second, and in one
# burst after a pause. Each block that a host has not written recently takes one evaluation; more are delayed. The
# limits bound how fast an attacker on a host can try guesses, and how fast a host can write new content: 5000 a second
# are 20 MB/s with blocks of 4 KiB, and 1000000 are 4 GB.
#evaluations_per_second = 5000
#evaluations_burst = 1000000

# An etcd cluster for state and anchors, instead of files in this directory, so that another server with a copy of this
# directory can take over. `lamassu-server to-etcd DIR` moves them there (docs/server.md).
#[etcd]
#endpoints = ["https://etcd1.example:2379", "https://etcd2.example:2379", "https://etcd3.example:2379"]
#prefix = "lamassu"
# Another server can lead after this one has been silent for this time; 2 to 60 s, and less than half of term_seconds.
#leader_seconds = 5
# Files; relative paths start in this directory. `ca`: authorities of the members (default: the system's). This server
# identifies itself with a certificate and its key, or with a user and a password.
#ca = "etcd-ca.pem"
#certificate = "etcd.pem"
#key = "etcd.key"
#user = "lamassu"
#password_file = "etcd.password"
"#;

/// The whole configuration.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// the address on which hosts connect
    pub listen: String,
    /// the address that tokens name
    pub address: Option<String>,
    term_seconds: u64,
    heartbeat_seconds: u64,
    /// validity of a token, hours
    pub token_hours: u64,
    /// connections at once
    pub connections_max: usize,
    /// handshakes at once of one address
    pub handshakes_max: usize,
    audit_entries: Option<u64>,
    audit_mib: Option<u64>,
    /// the address for monitoring
    pub metrics: Option<String>,
    /// URL that alerts are posted to
    pub webhook: Option<String>,
    /// authorities of that URL's certificate, PEM
    pub webhook_ca: Option<PathBuf>,
    /// the source of the master key
    pub master_key: Option<String>,
    /// evaluations of a host, per second
    pub evaluations_per_second: u64,
    /// evaluations of a host in one burst
    pub evaluations_burst: u64,
    /// etcd, if state and anchors are there and not in files
    #[cfg(feature = "etcd")]
    pub etcd: Option<EtcdConfig>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            listen: "0.0.0.0:7433".into(),
            address: None,
            term_seconds: 30,
            heartbeat_seconds: 5,
            token_hours: 24,
            connections_max: 4096,
            handshakes_max: 64,
            audit_entries: None,
            audit_mib: None,
            metrics: None,
            webhook: None,
            webhook_ca: None,
            master_key: None,
            evaluations_per_second: 5000,
            evaluations_burst: 1_000_000,
            #[cfg(feature = "etcd")]
            etcd: None,
        }
    }
}

impl Config {
    /// How much of the audit log is kept.
    pub fn audit_kept(&self) -> audit::Kept {
        #[cfg(feature = "etcd")]
        let default = if self.etcd.is_some() { audit::Kept::IN_ETCD } else { audit::Kept::default() };
        #[cfg(not(feature = "etcd"))]
        let default = audit::Kept::default();
        let bytes = self.audit_mib.map_or(default.bytes, |mib| mib << 20);
        audit::Kept { entries: self.audit_entries.unwrap_or(default.entries), bytes }
    }

    /// Reads the configuration of the server in `dir`.
    ///
    /// # Errors
    /// [`ServerError::Config`], [`ServerError::File`].
    pub fn read(dir: &Path) -> Result<Config> {
        let path = dir.join(FILE);
        let wrong = |detail: String| ServerError::Config { path: path.clone(), detail };
        let text = std::fs::read_to_string(&path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => wrong("there is no such file; an empty one has all defaults".into()),
            ErrorKind::InvalidData => wrong("it is no text (UTF-8)".into()),
            _ => ServerError::file("read", &path)(source),
        })?;
        let config: Config = toml::from_str(&text).map_err(|error| wrong(in_line(&text, &error)))?;
        let within = |name: &str, value: u64, least: u64, most: u64| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(wrong(format!("{name} must be {least} to {most}, not {value}"))),
        };
        within("term_seconds", config.term_seconds, 5, 600)?;
        within("heartbeat_seconds", config.heartbeat_seconds, 1, 150)?;
        config.terms().map_err(|error| wrong(error.to_string()))?;
        within("token_hours", config.token_hours, 1, 24 * 30)?;
        within("connections_max", config.connections_max as u64, 1, 1 << 20)?;
        within("handshakes_max", config.handshakes_max as u64, 1, 1 << 20)?;
        within("audit_entries", config.audit_entries.unwrap_or(1000), 1000, 1_000_000_000)?;
        within("audit_mib", config.audit_mib.unwrap_or(1), 1, 1 << 20)?;
        within("evaluations_per_second", config.evaluations_per_second, 1, 1_000_000_000)?;
        // A batch has up to this many elements.
        within("evaluations_burst", config.evaluations_burst, 1024, 1_000_000_000_000)?;
        let is_address = |name: &str, address: &str, such_as: &str| match address.parse::<SocketAddr>() {
            Ok(_) => Ok(()),
            Err(error) => Err(wrong(format!("{name} = {address:?}: {error}; give an address and a port, {such_as}"))),
        };
        is_address("listen", &config.listen, "0.0.0.0:7433")?;
        if let Some(address) = &config.metrics {
            is_address("metrics", address, "127.0.0.1:9433")?;
            if is_same_place(&config.listen, address) {
                return Err(wrong(format!("metrics = {address:?}: hosts connect there; give another port")));
            }
        }
        if let Some(url) = &config.webhook {
            // The address itself is not shown: it may hold a secret.
            check_url(url).map_err(|what| wrong(format!("webhook: {what}")))?;
        }
        #[cfg(feature = "etcd")]
        if let Some(etcd) = &config.etcd {
            etcd.check(config.term_seconds).map_err(|what| wrong(format!("[etcd] {what}")))?;
        }
        config.master_source().map_err(|error| wrong(format!("master_key: {error}")))?;
        if let Some(address) = config.address.as_ref().filter(|address| !is_host_and_port(address)) {
            return Err(wrong(format!(
                "address = {address:?} is no HOST:PORT; an address of IPv6 is written in brackets: [2001:db8::1]:7433"
            )));
        }
        Ok(config)
    }

    /// How long leases last.
    ///
    /// # Errors
    /// Terms outside the bounds on which the leases' guarantees rest.
    pub fn terms(&self) -> std::result::Result<Terms, lamassu_lease::TermsError> {
        let millis = |seconds: u64| seconds.saturating_mul(1000);
        Terms::new(millis(self.term_seconds), millis(self.heartbeat_seconds), Terms::DEFAULT.min_hold().0)
    }

    /// The source of the master key, if one is configured.
    ///
    /// # Errors
    /// [`SourceError`]: it is no source.
    pub fn master_source(&self) -> std::result::Result<Option<KeySource>, SourceError> {
        // The value is not shown: it may be a key typed in the wrong place.
        self.master_key.as_deref().map(str::parse).transpose()
    }

    /// The address that tokens name.
    pub fn reached_at(&self) -> String {
        self.address.clone().unwrap_or_else(|| {
            let port = self.listen.rsplit(':').next().unwrap_or("7433");
            let name = rustix::system::uname();
            format!("{}:{port}", name.nodename().to_string_lossy())
        })
    }
}

/// What is wrong, and in which line. The line itself is not shown: it may be an address with a secret.
fn in_line(text: &str, error: &toml::de::Error) -> String {
    at_line(text, error.span(), error.message())
}

/// What is wrong at a place of a text, with the line and the key.
pub(crate) fn at_line(text: &str, span: Option<Range<usize>>, what: &str) -> String {
    let Some(before) = span.and_then(|span| text.get(..span.start)) else { return what.into() };
    let number = before.matches('\n').count();
    let key = text.lines().nth(number).and_then(|line| line.split_once('=')).map(|(key, _)| key.trim());
    format!("line {}{}: {}", number + 1, key.map_or(String::new(), |key| format!(", {key}")), what)
}

/// Whether a server cannot listen on both addresses: one of them is the other, or has it among its own.
fn is_same_place(one: &str, other: &str) -> bool {
    let has = |all: SocketAddr, one: SocketAddr| {
        all.ip() == one.ip() || (all.ip().is_unspecified() && (all.is_ipv6() || one.is_ipv4()))
    };
    match (one.parse::<SocketAddr>(), other.parse::<SocketAddr>()) {
        (Ok(one), Ok(other)) => one.port() == other.port() && one.port() != 0 && (has(one, other) || has(other, one)),
        _ => false,
    }
}

/// A name or an address, as hosts are to use it, and a port.
fn is_host_and_port(address: &str) -> bool {
    let Some((host, port)) = address.rsplit_once(':') else { return false };
    let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(host) => host.parse::<Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-')),
    };
    is_host && port.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Checks the URL of a webhook: https, or this machine. The error says what is wrong.
fn check_url(url: &str) -> std::result::Result<(), &'static str> {
    let uri: http::Uri = url.parse().map_err(|_| "it is not a URL")?;
    let authority = uri.authority().ok_or("it names no host")?;
    if authority.as_str().contains('@') {
        return Err("a user's name or password in it is not sent: the messages are signed");
    }
    let host = authority.host();
    // Nothing may stand between host and port, or after the port.
    let is_whole = match authority.as_str().strip_prefix(host) {
        Some("") => true,
        Some(port) => port.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok_and(|port| port > 0)),
        None => false,
    };
    if host.is_empty() || !is_whole {
        return Err("its host or port is invalid");
    }
    let is_here = matches!(host, "127.0.0.1" | "[::1]" | "localhost");
    match uri.scheme_str() {
        Some("https") => Ok(()),
        Some("http") if is_here => Ok(()),
        _ => Err("it must be https, or http on this machine"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::DeserializeOwned;
    use std::collections::BTreeSet;

    /// The names of all fields, as the refusal of another one lists them.
    fn fields<T: DeserializeOwned>() -> BTreeSet<String> {
        let refused = toml::from_str::<T>("no_such_field = 1").err().expect("it is unknown").message().to_owned();
        assert!(refused.starts_with("unknown field `no_such_field`, expected one of `"), "{refused}");
        refused.split('`').skip(3).step_by(2).map(str::to_owned).collect()
    }

    /// The names in lines that are commented out.
    fn names(text: &str) -> BTreeSet<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix('#').filter(|line| !line.starts_with(' ')));
        lines.filter_map(|line| line.split_once(" = ")).map(|(name, _)| name.to_owned()).collect()
    }

    #[test]
    fn the_commented_file_says_the_defaults() {
        let commented: Config = toml::from_str(COMMENTED).expect("parses");
        let (plain, etcd) = COMMENTED.split_once("#[etcd]\n").expect("the table is last");
        #[cfg(feature = "etcd")]
        {
            let shown: String =
                etcd.lines().filter(|line| !line.starts_with("# ")).map(|line| format!("{}\n", &line[1..])).collect();
            let shown: EtcdConfig = toml::from_str(&shown).expect("parses");
            assert!(
                shown.check(commented.term_seconds).is_ok() && (&*shown.prefix, shown.leader_seconds) == ("lamassu", 5)
            );
        }
        let _ = etcd;
        let all: String = plain
            .lines()
            .filter_map(|line| line.strip_prefix('#').filter(|line| line.contains(" = ") && !line.starts_with(' ')))
            .filter(|line| !["address", "metrics", "webhook", "master_key"].iter().any(|name| line.starts_with(name)))
            .map(|line| format!("{line}\n"))
            .collect();
        let said: Config = toml::from_str(&all).expect("parses");
        assert_eq!(said.audit_kept(), commented.audit_kept());
        let said = Config { audit_entries: None, audit_mib: None, ..said };
        assert_eq!(format!("{said:?}"), format!("{commented:?}"));
        let etcd_table = cfg!(feature = "etcd").then(|| "etcd".to_owned());
        assert_eq!(names(plain).into_iter().chain(etcd_table).collect::<BTreeSet<_>>(), fields::<Config>());
        #[cfg(feature = "etcd")]
        assert_eq!(names(etcd), fields::<EtcdConfig>());
        #[cfg(feature = "etcd")]
        {
            let in_etcd: Config = toml::from_str("[etcd]\nendpoints = [\"https://e:1\"]").expect("parses");
            let most = in_etcd.audit_kept();
            assert!(COMMENTED.contains(&format!("defaults are {} and {}:", most.entries, most.bytes >> 20)));
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_line() {
        let dir = tempfile::tempdir().expect("a directory");
        for (text, said) in [
            ("listen = 5", "listen"),
            ("colour = 1", "colour"),
            ("\nwebhok = \"https://h/secret\"", "line 2, webhok: unknown"),
            ("term_seconds = 1", "5 to 600"),
            ("term_seconds = 9223372036854775807", "5 to 600, not 9223372036854775807"),
            ("audit_entries = 1", "1000 to"),
            ("audit_mib = 0", "1 to"),
            ("evaluations_per_second = 0", "1 to"),
            ("evaluations_burst = 1023", "1024 to"),
            ("heartbeat_seconds = 20", "heartbeat"),
            ("listen = \"nowhere\"", "0.0.0.0:7433"),
            ("token_hours = 0", "token_hours"),
            ("metrics = \"localhost\"", "127.0.0.1:9433"),
            ("metrics = \"127.0.0.1:7433\"", "another port"),
            ("listen = \"127.0.0.1:9\"\nmetrics = \"[::]:9\"", "another port"),
            ("webhook = \"http://alerts.example.org/\"", "https"),
            ("webhook = \"https://me:pw@alerts.example.org/\"", "signed"),
            ("master_key = \"my secret\"", "not a key source"),
            ("address = \"\"", "HOST:PORT"),
            ("address = \"a/b:1\"", "HOST:PORT"),
            ("address = \"keeper\"", "HOST:PORT"),
            ("address = \"keeper:0\"", "HOST:PORT"),
            ("address = \"x:y:1\"", "HOST:PORT"),
            ("address = \"2001:db8::1:7433\"", "brackets"),
            #[cfg(feature = "etcd")]
            ("[etcd]\nendpoints = []", "name the members"),
            #[cfg(feature = "etcd")]
            ("[etcd]\nendpoints = [\"http://10.0.0.1:2379\"]", "https://"),
            #[cfg(feature = "etcd")]
            ("[etcd]\nendpoints = [\"http://127.0.0.1.evil.example:2379\"]", "https://"),
            #[cfg(feature = "etcd")]
            ("[etcd]\nendpoints = [\"https://e:1\"]\nuser = \"secret\"", "go together"),
            #[cfg(feature = "etcd")]
            ("[etcd]\nendpoints = [\"https://e:1\"]\nprefix = \"a/b\"", "letters"),
            #[cfg(feature = "etcd")]
            ("[etcd]\nendpoints = [\"https://e:1\"]\nleader_seconds = 1", "2 to 60"),
            #[cfg(feature = "etcd")]
            ("[etcd]\nendpoints = [\"https://e:1\"]\nleader_seconds = 15", "half of term_seconds (30)"),
            #[cfg(feature = "etcd")]
            ("term_seconds = 10\nheartbeat_seconds = 2\n[etcd]\nendpoints = [\"https://e:1\"]", "term_seconds (10)"),
        ] {
            std::fs::write(dir.path().join(FILE), text).expect("writes");
            let error = Config::read(dir.path()).expect_err(text);
            assert!(error.to_string().contains(said) && error.code() == 13, "{error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        std::fs::write(dir.path().join(FILE), [0xff]).expect("writes");
        assert_eq!(Config::read(dir.path()).expect_err("no text").code(), 13);
        std::fs::remove_file(dir.path().join(FILE)).expect("removes");
        let error = Config::read(dir.path()).expect_err("no file");
        assert!(error.to_string().contains("all defaults") && error.code() == 13, "{error}");
        for good in ["keeper:7433", "10.0.0.1:1", "[2001:db8::1]:7433"] {
            assert!(is_host_and_port(good), "{good}");
        }
    }

    #[test]
    fn a_port_is_used_once() {
        for (one, other, is_so) in [
            ("0.0.0.0:1", "127.0.0.1:1", true),
            ("127.0.0.1:1", "[::]:1", true),
            ("[::]:1", "[::1]:1", true),
            ("10.0.0.1:1", "10.0.0.1:1", true),
            ("10.0.0.1:1", "10.0.0.2:1", false),
            ("0.0.0.0:1", "[::1]:1", false),
            ("0.0.0.0:1", "0.0.0.0:2", false),
            ("127.0.0.1:0", "127.0.0.1:0", false),
        ] {
            assert_eq!((is_same_place(one, other), is_same_place(other, one)), (is_so, is_so), "{one} {other}");
        }
    }

    #[test]
    fn alerts_are_posted_by_https_or_on_this_machine() {
        for good in
            ["https://alerts.example.org/x?y=1", "http://127.0.0.1:8080/", "http://[::1]:1/a", "http://localhost"]
        {
            assert_eq!(check_url(good), Ok(()), "{good}");
        }
        for bad in [
            "http://alerts.example.org/",
            "ftp://x/",
            "x",
            "",
            "https://me:pw@x/",
            "http://127.0.0.1.evil.org/",
            "http://127.0.0.1:99999/",
            "http://localhost:0/",
            "http://127.0.0.1:8080evil/",
            "https://x:-1/",
            "https://:443/",
            "http://[::1].evil/",
        ] {
            assert!(check_url(bad).is_err(), "{bad}");
        }
    }
}
