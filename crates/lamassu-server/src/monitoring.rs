//! The endpoints for an operator's monitoring: `/metrics` in the text format of OpenMetrics, and `/health`. They return
//! counts only: no name of a host, no vault, no key.

use crate::crowd::Crowd;
use crate::metrics::Metrics;
use crate::policy::Policies;
use crate::state::State;
use crate::vaults::Vaults;
use http::{Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Connections that have not sent their request yet, and requests that are answered at once.
const ASKING_MAX: usize = 16;
/// Connections of one address that have not.
const OF_ADDRESS_MAX: usize = 8;
/// How long a request may take to arrive.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// How long one such connection may take in all.
const ASKING_TIMEOUT: Duration = Duration::from_secs(10);
const PLAIN: &str = "text/plain";
const TEXT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The values that monitoring reads.
pub struct Observed {
    /// the server's counters
    pub metrics: Metrics,
    /// the durable state, with hosts and alerts
    pub state: Arc<State>,
    /// the vaults kept here
    pub vaults: Arc<Vaults>,
    /// the policies in force
    pub policies: Arc<Policies>,
    /// the limit of connections, and a permit for each that is free
    pub connections: (usize, Arc<Semaphore>),
}

impl Observed {
    fn text(&self) -> Result<String, std::fmt::Error> {
        let mut all = Registry::with_prefix("lamassu_server");
        self.metrics.register(&mut all);
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

    fn metrics(&self) -> Response<Full<Bytes>> {
        match self.text() {
            Ok(text) => response(StatusCode::OK, TEXT, text),
            Err(_) => response(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, "no memory for it\n"),
        }
    }
}

fn response(status: StatusCode, kind: &'static str, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

/// The answer to a request. Reading the counts waits for locks of vaults, which are held while a commit is written.
async fn answer(observed: Arc<Observed>, turns: Arc<Semaphore>, path: &str) -> Response<Full<Bytes>> {
    match path {
        "/health" => response(StatusCode::OK, PLAIN, "ok\n"),
        "/metrics" => {
            let Ok(turn) = turns.try_acquire_owned() else {
                return response(StatusCode::SERVICE_UNAVAILABLE, PLAIN, "too many ask at once\n");
            };
            let asked = on_a_thread(Arc::new(turn), move || observed.metrics()).await;
            asked.unwrap_or_else(|| response(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, "a thread has ended\n"))
        }
        _ => response(StatusCode::NOT_FOUND, PLAIN, "there are /metrics and /health\n"),
    }
}

/// Runs the work of a connection on a thread. The connection's place is kept until the work is done, also if the
/// connection has ended: otherwise those who ask again and again would get any number of threads.
async fn on_a_thread<T: Send + 'static>(
    turn: Arc<OwnedSemaphorePermit>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let done = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        work()
    });
    done.await.ok()
}

/// Answers until the process ends. Of connections that ask nothing, the oldest one gives way: so they keep nobody from
/// asking.
pub async fn serve(listener: TcpListener, observed: Arc<Observed>) {
    let (crowd, turns) = (Crowd::of(OF_ADDRESS_MAX, ASKING_MAX), Arc::new(Semaphore::new(ASKING_MAX)));
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (unasked, gives_way) = crowd.begin(address.ip());
        let (observed, turns, unasked) = (observed.clone(), turns.clone(), Mutex::new(Some(unasked)));
        tokio::spawn(async move {
            let asked = service_fn(|request: Request<Incoming>| {
                // It has asked, and gives way to nobody any more.
                drop(unasked.lock().take());
                let (observed, turns) = (observed.clone(), turns.clone());
                async move { Ok::<_, Infallible>(answer(observed, turns, request.uri().path()).await) }
            });
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(REQUEST_TIMEOUT).keep_alive(false).max_buf_size(16 << 10);
            let served = tokio::time::timeout(ASKING_TIMEOUT, http.serve_connection(TokioIo::new(stream), asked));
            tokio::select! {
                _ = served => {}
                Ok(()) = gives_way => {}
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_connection_that_has_ended_keeps_its_place_until_its_work_is_done() {
        let turns = Arc::new(Semaphore::new(1));
        let turn = Arc::new(turns.clone().acquire_owned().await.expect("is open"));
        let (begins, begun) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let asked = tokio::spawn(on_a_thread(turn, move || {
            begins.send(()).expect("is awaited");
            let _ = released.recv();
        }));
        tokio::task::block_in_place(|| begun.recv()).expect("begins");
        // As when the time of the connection is over.
        asked.abort();
        assert!(asked.await.expect_err("was aborted").is_cancelled());
        assert_eq!(turns.available_permits(), 0, "a place for work that goes on");
        drop(release);
        drop(turns.acquire().await.expect("is open"));
    }
}
