//! What an operator's monitoring asks: `/metrics` in the text form of OpenMetrics, and `/health`. Counts alone: no name
//! of a host, no vault, no key.

use crate::policy::{At, Policies};
use crate::state::State;
use crate::vaults::Vaults;
use http::{Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use lamassu_lease::Reply;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Connections of monitoring at once.
const ASKING_MAX: usize = 16;
/// How long one such connection may take in all.
const ASKING_TIMEOUT: Duration = Duration::from_secs(10);
const TEXT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The kind of a call, and whether its caller may make it.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Call {
    call: &'static str,
    admitted: &'static str,
}

/// Whether a message was taken.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Post {
    taken: &'static str,
}

/// Whether a key was given.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Asked {
    given: &'static str,
}

/// What a policy has refused.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Forbidden {
    at: &'static str,
}

/// The server's counters. Cheap to clone; all clones share the counts.
#[derive(Clone)]
pub struct Metrics {
    calls: Family<Call, Counter>,
    commits: Counter,
    rows: Counter,
    commit_seconds: Histogram,
    refused: Counter,
    turns: Counter,
    recalls: Counter,
    held_on: Counter,
    findings: Counter,
    posts: Family<Post, Counter>,
    keys: Family<Asked, Counter>,
    policy_refusals: Family<Forbidden, Counter>,
    policy_reads: Family<Post, Counter>,
    evaluations: Counter,
    put_off: Counter,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            calls: Family::default(),
            commits: Counter::default(),
            rows: Counter::default(),
            // From a write to a cache to a failing disk: 0.2 ms to 6.5 s.
            commit_seconds: Histogram::new(exponential_buckets(0.0002, 2.0, 16)),
            refused: Counter::default(),
            turns: Counter::default(),
            recalls: Counter::default(),
            held_on: Counter::default(),
            findings: Counter::default(),
            posts: Family::default(),
            keys: Family::default(),
            policy_refusals: Family::default(),
            policy_reads: Family::default(),
            evaluations: Counter::default(),
            put_off: Counter::default(),
        }
    }
}

impl Metrics {
    /// Counts a call of this path.
    pub fn called(&self, path: &str, is_admitted: bool) {
        // Only names of the protocol, so that a client cannot create series.
        const CALLS: [&str; 12] = [
            "Join",
            "Attend",
            "Rows",
            "Commit",
            "Put",
            "Reconcile",
            "GiveUp",
            "Report",
            "MakeKey",
            "GiveKey",
            "OpenOblivious",
            "Evaluate",
        ];
        let name = path.rsplit('/').next().unwrap_or_default();
        let call = CALLS.iter().find(|call| **call == name).copied().unwrap_or("other");
        let admitted = if is_admitted { "yes" } else { "no" };
        self.calls.get_or_create(&Call { call, admitted }).inc();
    }

    /// Counts rows that became durable, and how long that took.
    pub fn committed(&self, rows: usize, took: Duration) {
        self.commits.inc();
        self.rows.inc_by(rows as u64);
        self.commit_seconds.observe(took.as_secs_f64());
    }

    /// Counts a reply to a session.
    pub fn told(&self, reply: &Reply) {
        match reply {
            Reply::Granted { .. } => drop(self.turns.inc()),
            Reply::Recall { .. } => drop(self.recalls.inc()),
            Reply::Alive { .. } | Reply::Ended => {}
        }
    }

    /// Counts sessions that ended because they did not release a recalled lease.
    pub fn held_on(&self, sessions: usize) {
        self.held_on.inc_by(sessions as u64);
    }

    /// Counts findings that a host has reported.
    pub fn found(&self, findings: u64) {
        self.findings.inc_by(findings);
    }

    /// Counts a message to the webhook, accepted or not.
    pub fn posted(&self, is_taken: bool) {
        self.posts.get_or_create(&Post { taken: if is_taken { "yes" } else { "no" } }).inc();
    }

    /// Counts a host's request for a key, granted or not.
    pub fn asked_for_key(&self, is_given: bool) {
        self.keys.get_or_create(&Asked { given: if is_given { "yes" } else { "no" } }).inc();
    }

    /// Counts a request that the policy forbids.
    pub fn policy_refused(&self, at: At) {
        self.policy_refusals.get_or_create(&Forbidden { at: at.name() }).inc();
    }

    /// Counts a reload of the policy, accepted or not.
    pub fn policy_read(&self, is_taken: bool) {
        self.policy_reads.get_or_create(&Post { taken: if is_taken { "yes" } else { "no" } }).inc();
    }

    /// Counts evaluated elements.
    pub fn evaluated(&self, elements: usize) {
        self.evaluations.inc_by(elements as u64);
    }

    /// Counts a batch that exceeded a host's limit of evaluations.
    pub fn put_off(&self) {
        self.put_off.inc();
    }

    /// Counts a connection that was refused before its peer was known.
    pub fn refused(&self) {
        self.refused.inc();
    }
}

/// What is read when monitoring asks.
pub struct Observed {
    /// what is counted
    pub metrics: Metrics,
    /// the hosts
    pub state: Arc<State>,
    /// what is kept
    pub vaults: Arc<Vaults>,
    /// what hosts may do
    pub policies: Arc<Policies>,
    /// the limit of connections, and how many are left
    pub connections: (usize, Arc<Semaphore>),
}

impl Observed {
    fn text(&self) -> Result<String, std::fmt::Error> {
        let mut all = Registry::with_prefix("lamassu_server");
        let Metrics { calls, commits, rows, commit_seconds, refused, .. } = self.metrics.clone();
        let Metrics { turns, recalls, held_on, findings, posts, keys, .. } = self.metrics.clone();
        let Metrics { policy_refusals, policy_reads, evaluations, put_off, .. } = self.metrics.clone();
        all.register("calls", "Calls, by kind and by whether the caller may make them", calls);
        all.register("commits", "Commits that are durable", commits);
        all.register("rows", "Rows that these changed", rows);
        all.register_with_unit("commit", "How long commits took", Unit::Seconds, commit_seconds);
        all.register("turns", "Times that a session was given a vault", turns);
        all.register("recalls", "Times that a session was asked for a vault that it had", recalls);
        all.register("sessions_held_on", "Sessions that ended since they held on to a vault for a term", held_on);
        all.register("findings", "What hosts have reported not to be as it was written", findings);
        all.register("webhook_posts", "Messages to the webhook, by whether it has taken them", posts);
        all.register("keys_asked_for", "Times that a host asked for a key, by whether it was given", keys);
        all.register("policy_refusals", "Sessions, commits and anchors that the policy forbade", policy_refusals);
        all.register("policy_reads", "Times that the policy was read again, by whether it was taken", policy_reads);
        all.register("evaluations", "Elements that oblivious keys have evaluated for hosts", evaluations);
        all.register("evaluations_put_off", "Batches of hosts that had asked for as much as they may", put_off);
        all.register("connections_refused", "Connections that ended before their peer was known", refused);
        let mut gauge = |name: &str, help: &str, value: usize| {
            let gauge: Gauge = Gauge::default();
            gauge.set(value.try_into().unwrap_or(i64::MAX));
            all.register(name, help, gauge);
        };
        let hosts = self.state.hosts();
        let revoked = hosts.values().filter(|host| host.is_revoked).count();
        let vaults = self.vaults.in_use();
        let sessions = vaults.iter().map(|(_, hosts)| hosts.len()).sum();
        let (most, free) = &self.connections;
        gauge("hosts", "Hosts that have joined and are not revoked", hosts.len() - revoked);
        gauge("hosts_revoked", "Hosts that were revoked", revoked);
        gauge("vaults_open", "Vaults whose anchors are open", vaults.len());
        gauge("vaults_waiting", "Vaults that wait for hosts, behind a restore", self.state.restored().len());
        // If the state cannot be read, the server's log says so.
        let keys = self.state.keys().unwrap_or_default();
        gauge("keys", "Keys that are kept for hosts", keys.values().filter(|key| key.kept().is_some()).count());
        gauge("policy_rules", "Rules of the policy in force", self.policies.now().1.len());
        let alerts = self.state.alert_counts().unwrap_or_default();
        let count = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        gauge("alerts", "Alerts that are open", count(alerts.open));
        gauge("alerts_new", "Alerts that are not acknowledged", count(alerts.new));
        gauge("alerts_unposted", "Alerts that the webhook has not taken", count(alerts.unposted));
        gauge("sessions", "Sessions that have not ended", sessions);
        gauge("connections", "Connections of hosts", most.saturating_sub(free.available_permits()));
        gauge("connections_max", "Most connections of hosts", *most);
        let mut text = String::new();
        encode(&mut text, &all)?;
        Ok(text)
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let (status, kind, text) = match request.uri().path() {
            "/metrics" => match self.text() {
                Ok(text) => (StatusCode::OK, TEXT, text),
                Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, "text/plain", "no memory for it\n".into()),
            },
            "/health" => (StatusCode::OK, "text/plain", "ok\n".into()),
            _ => (StatusCode::NOT_FOUND, "text/plain", "there are /metrics and /health\n".into()),
        };
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
        response
    }
}

/// Answers until the process ends: a few connections at once, each for a limited time.
pub async fn serve(listener: TcpListener, observed: Arc<Observed>) {
    let turns = Arc::new(Semaphore::new(ASKING_MAX));
    loop {
        let Ok(turn) = turns.clone().acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let observed = observed.clone();
        tokio::spawn(async move {
            let _turn = turn;
            let answer = service_fn(|request| {
                let observed = observed.clone();
                // It waits for locks of vaults, which are held while a commit is written.
                async move {
                    let asked = tokio::task::spawn_blocking(move || observed.answer(&request)).await;
                    Ok::<_, Infallible>(asked.unwrap_or_else(|_| Response::new(Full::from("a thread has ended\n"))))
                }
            });
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(ASKING_TIMEOUT).keep_alive(false).max_buf_size(16 << 10);
            let served = http.serve_connection(TokioIo::new(stream), answer);
            let _ = tokio::time::timeout(ASKING_TIMEOUT, served).await;
        });
    }
}
