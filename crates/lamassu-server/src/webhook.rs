//! The webhook: alerts are posted to a URL, signed as [Standard Webhooks](https://www.standardwebhooks.com) say, and
//! repeated until the receiver accepts them. The queue is in the state, so it survives a restart, and it has at most as
//! many entries as there are alerts.

use crate::alerts::Alert;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::state::State;
use crate::{Result, ServerError, authority};
use data_encoding::{BASE64, HEXLOWER};
use lamassu_crypto::wrap::sha256;
use lamassu_keys::unix_now;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use ureq::tls::{Certificate, RootCerts, TlsConfig, TlsProvider};
use zeroize::Zeroizing;

/// The file of its secret, in the server's directory.
pub const SECRET: &str = "webhook.secret";
/// Prefix of a secret.
const PREFIX: &str = "whsec_";
/// Bytes of a secret (Standard Webhooks).
const SECRET_LEN: std::ops::RangeInclusive<usize> = 24..=64;
/// Alerts in one message: about 100 KB at most.
const ALERTS_AT_ONCE: usize = 50;
/// How long one message may take, from the first packet to the answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time before the next attempt; doubled each time.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
const AGAIN_AFTER_MOST: Duration = Duration::from_secs(300);

/// Makes a secret in a server's directory.
///
/// # Errors
/// [`ServerError::NoRandom`], [`ServerError::File`].
pub fn make_secret(dir: &Path) -> Result<()> {
    let mut secret = Zeroizing::new([0; 32]);
    SystemRandom::new().fill(&mut secret[..]).map_err(|_| ServerError::NoRandom)?;
    let line = Zeroizing::new(format!("{PREFIX}{}\n", BASE64.encode(&secret[..])));
    authority::write_new(&dir.join(SECRET), line.as_bytes())
}

/// The same if there is no secret: for a directory that was put together by hand.
///
/// # Errors
/// As [`make_secret`].
pub fn make_secret_unless_there(dir: &Path) -> Result<()> {
    if dir.join(SECRET).symlink_metadata().is_ok() { Ok(()) } else { make_secret(dir) }
}

/// Checks the files that the configured webhook needs.
///
/// # Errors
/// [`ServerError::Config`], [`ServerError::File`].
pub fn check(dir: &Path, config: &Config) -> Result<()> {
    if config.webhook.is_none() {
        return Ok(());
    }
    // A start makes a missing one.
    if dir.join(SECRET).symlink_metadata().is_ok() {
        read_secret(dir)?;
    }
    roots(config.webhook_ca.as_deref()).map(drop)
}

fn read_secret(dir: &Path) -> Result<hmac::Key> {
    let path = dir.join(SECRET);
    let text = Zeroizing::new(std::fs::read(&path).map_err(ServerError::file("read", &path))?);
    let text = std::str::from_utf8(&text).unwrap_or_default();
    let secret = text.trim().strip_prefix(PREFIX).and_then(|secret| BASE64.decode(secret.as_bytes()).ok());
    let secret = secret.map(Zeroizing::new).filter(|secret| SECRET_LEN.contains(&secret.len()));
    let detail = format!("it is not {PREFIX} and {SECRET_LEN:?} bytes in base64");
    let secret = secret.ok_or(ServerError::Config { path, detail })?;
    Ok(hmac::Key::new(hmac::HMAC_SHA256, &secret))
}

/// The document that is posted.
#[derive(Serialize)]
struct Message<'a> {
    r#type: &'static str,
    /// the digest of the server's authority, hex
    server: &'a str,
    alerts: &'a [Alert],
}

/// A message, ready to be sent.
struct Signed {
    id: String,
    timestamp: String,
    signature: String,
    body: Vec<u8>,
}

impl Signed {
    /// A repeated message has the same id.
    fn new(secret: &hmac::Key, message: &Message<'_>, now: u64) -> Signed {
        let body = serde_json::to_vec(message).unwrap_or_default();
        let id = format!("msg_{}", HEXLOWER.encode(&sha256(&body)[..16]));
        let timestamp = now.to_string();
        let signed = [id.as_bytes(), b".", timestamp.as_bytes(), b".", &body].concat();
        let signature = format!("v1,{}", BASE64.encode(hmac::sign(secret, &signed).as_ref()));
        Signed { id, timestamp, signature, body }
    }
}

/// Posts alerts, as long as the process lives.
pub struct Webhook {
    url: String,
    secret: hmac::Key,
    agent: ureq::Agent,
    server: String,
    state: Arc<State>,
    metrics: Metrics,
}

impl Webhook {
    /// The webhook of a configuration, if it has one. `server`: the digest of the authority.
    ///
    /// # Errors
    /// [`ServerError::Config`], [`ServerError::File`].
    pub fn of(
        dir: &Path,
        config: &Config,
        server: &[u8; 32],
        state: Arc<State>,
        metrics: Metrics,
    ) -> Result<Option<Webhook>> {
        let Some(url) = config.webhook.clone() else { return Ok(None) };
        let tls = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .root_certs(RootCerts::Specific(Arc::new(roots(config.webhook_ca.as_deref())?)))
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        let agent = ureq::Agent::config_builder()
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .proxy(None)
            .user_agent(concat!("lamassu-server/", env!("CARGO_PKG_VERSION")))
            .max_response_header_size(16 << 10)
            .timeout_global(Some(TIMEOUT))
            .tls_config(tls)
            .build()
            .into();
        let (secret, server) = (read_secret(dir)?, HEXLOWER.encode(server));
        Ok(Some(Webhook { url, secret, agent, server, state, metrics }))
    }

    /// Starts its thread. The server does not wait for it at its end: the queue is durable.
    ///
    /// # Errors
    /// [`ServerError::File`].
    pub fn start(self, dir: &Path) -> Result<()> {
        let started = std::thread::Builder::new().name("webhook".into()).spawn(move || self.run());
        started.map(drop).map_err(ServerError::file("start a thread for", dir))
    }

    /// If a batch is rejected, its alerts are sent one by one. An alert that is always rejected does not block the
    /// others. All vaults have their turn, however many alerts one of them has.
    fn run(&self) {
        let (mut turn, mut passed_over, mut most, mut pause) = (None, BTreeSet::new(), ALERTS_AT_ONCE, AGAIN_AFTER);
        loop {
            let (alerts, posted) = match self.state.unposted(turn, &passed_over, most) {
                Ok((alerts, _)) if alerts.is_empty() && passed_over.is_empty() => {
                    self.state.alerted.wait();
                    continue;
                }
                Ok((alerts, _)) if alerts.is_empty() => {
                    passed_over.clear();
                    continue;
                }
                Ok((alerts, last)) => {
                    turn = last;
                    let posted = self.post(&alerts);
                    (alerts, posted)
                }
                Err(error) => (Vec::new(), Err(error.to_string())),
            };
            match posted {
                Ok(()) => {
                    if pause > AGAIN_AFTER {
                        tracing::info!("the webhook takes alerts again");
                    }
                    (most, pause) = (ALERTS_AT_ONCE, AGAIN_AFTER);
                }
                Err(error) => {
                    self.metrics.posted(false);
                    // The URL is not logged: it may hold a secret.
                    tracing::warn!(error, again_after_seconds = pause.as_secs(), "the webhook has not taken alerts");
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(AGAIN_AFTER_MOST);
                    if most == 1 {
                        passed_over.extend(alerts.iter().map(|alert| alert.number));
                    }
                    most = 1;
                }
            }
        }
    }

    fn post(&self, alerts: &[Alert]) -> std::result::Result<(), String> {
        let message = Message { r#type: "lamassu.alerts", server: &self.server, alerts };
        let Signed { id, timestamp, signature, body } = Signed::new(&self.secret, &message, unix_now());
        let answer = self.agent.post(&self.url).header("content-type", "application/json").header("webhook-id", &id);
        let answer = answer.header("webhook-timestamp", &timestamp).header("webhook-signature", &signature);
        let status = answer.send(&body[..]).map_err(|error| error.to_string())?.status();
        if !status.is_success() {
            return Err(format!("it answers {status}"));
        }
        self.metrics.posted(true);
        self.state.posted(alerts).map_err(|error| error.to_string())
    }
}

/// The authorities that may have issued the receiver's certificate.
fn roots(file: Option<&Path>) -> Result<Vec<Certificate<'static>>> {
    let of = |der: &CertificateDer<'_>| Certificate::from_der(der).to_owned();
    let Some(file) = file else {
        return Ok(rustls_native_certs::load_native_certs().certs.iter().map(of).collect());
    };
    let wrong = |detail: String| ServerError::Config { path: file.into(), detail };
    let pem = CertificateDer::pem_file_iter(file).map_err(|error| wrong(format!("webhook_ca: {error}")))?;
    let roots: std::result::Result<Vec<_>, _> = pem.map(|der| der.map(|der| of(&der))).collect();
    match roots {
        Ok(roots) if !roots.is_empty() => Ok(roots),
        Ok(_) => Err(wrong("webhook_ca: it has no certificate in PEM".into())),
        Err(error) => Err(wrong(format!("webhook_ca: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of <https://github.com/standard-webhooks/standard-webhooks>, and a secret that is none.
    #[test]
    fn a_message_is_signed_as_the_standard_says() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join(SECRET), "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n").expect("writes");
        let key = read_secret(dir.path()).expect("reads");
        let text = br#"msg_p5jXN8AQM9LWM0D4loKWxJek.1614265330.{"test": 2432232314}"#;
        let signature = BASE64.encode(hmac::sign(&key, text).as_ref());
        assert_eq!(signature, "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        for bad in ["", "whsec_", "whsec_AAAA", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_!!"] {
            std::fs::write(dir.path().join(SECRET), bad).expect("writes");
            assert_eq!(read_secret(dir.path()).expect_err(bad).code(), 13);
        }
        std::fs::remove_file(dir.path().join(SECRET)).expect("removes");
        make_secret(dir.path()).expect("makes");
        read_secret(dir.path()).expect("reads");
    }
}
