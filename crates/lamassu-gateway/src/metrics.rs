//! Metrics for an operator's monitoring: `/metrics` in the text format of OpenMetrics, and `/health`. Only counts: no
//! name of a user, a bucket or a key.

use crate::limits::Exceeded;
use http::{Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
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
use tokio::sync::{Semaphore, watch};

/// Connections of monitoring at once.
const ASKING_MAX: usize = 16;
/// How long one such connection may take in all.
const ASKING_TIMEOUT: Duration = Duration::from_secs(10);
/// The path of the check.
const HEALTH: &str = "/health";
const PLAIN: &str = "text/plain";
const TEXT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Answer {
    operation: String,
    status: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Limit {
    limit: &'static str,
}

/// The gateway's counters. Clones share the counts.
#[derive(Clone)]
pub struct Metrics {
    requests: Family<Answer, Counter>,
    seconds: Histogram,
    received: Counter,
    sent: Counter,
    refused: Counter,
    exceeded: Family<Limit, Counter>,
    connections: Gauge,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            requests: Family::default(),
            // From data in memory to a large object over a slow line: 1 ms to 16 s.
            seconds: Histogram::new(exponential_buckets(0.001, 2.0, 15)),
            received: Counter::default(),
            sent: Counter::default(),
            refused: Counter::default(),
            exceeded: Family::default(),
            connections: Gauge::default(),
        }
    }
}

impl Metrics {
    /// Counts a finished request. Only operations of the protocol are named, so that a client cannot create series.
    pub fn answered(&self, operation: &str, status: u16, (received, sent): (u64, u64), took: Duration) {
        self.requests.get_or_create(&Answer { operation: operation.into(), status }).inc();
        self.seconds.observe(took.as_secs_f64());
        self.received.inc_by(received);
        self.sent.inc_by(sent);
    }

    /// Counts a refused connection: there are too many, or its handshake failed.
    pub fn refused(&self) {
        self.refused.inc();
    }

    /// Counts a request that exceeds a limit of its tenant, by the limit.
    pub fn exceeded(&self, limit: Exceeded) {
        self.exceeded.get_or_create(&Limit { limit: limit.name() }).inc();
    }

    /// Counts a connection, until the result is dropped.
    pub fn connected(&self) -> Connected {
        self.connections.inc();
        Connected(self.connections.clone())
    }

    fn text(&self) -> Result<String, std::fmt::Error> {
        let mut all = Registry::with_prefix("lamassu_gateway");
        let Metrics { requests, seconds, received, sent, refused, exceeded, connections } = self.clone();
        all.register("requests", "Requests, by operation and by the status of their answer", requests);
        all.register_with_unit("request", "How long requests took", Unit::Seconds, seconds);
        all.register_with_unit("received", "Bodies of requests", Unit::Bytes, received);
        all.register_with_unit("sent", "Bodies of answers", Unit::Bytes, sent);
        all.register("connections_refused", "Connections that were too many, or whose handshake failed", refused);
        all.register("limited", "Requests that exceeded a limit of their tenant, by the limit", exceeded);
        all.register("connections", "Connections that are open", connections);
        let mut text = String::new();
        encode(&mut text, &all)?;
        Ok(text)
    }
}

/// An open connection.
pub struct Connected(Gauge);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Whether the vault answers.
pub type Health = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// The check that is under way. One at a time asks the store, whose answer may take long: its thread ends only then.
/// Whoever asks meanwhile gets its answer.
#[derive(Clone, Default)]
struct Checks(Arc<Mutex<Option<Tell>>>);

/// Of a check; `None`: it is not known yet.
type Outcome = Option<Result<(), String>>;

/// Tells the outcome of a check to all who wait for it.
type Tell = Arc<watch::Sender<Outcome>>;

impl Checks {
    /// Whether the vault answers; `None`: the check has panicked, or the process ends.
    async fn ask(&self, health: &Health) -> Option<Result<(), String>> {
        let (mut told, new) = self.join();
        if let Some(telling) = new {
            self.begin(telling, health.clone());
        }
        let found = told.wait_for(Option::is_some).await.ok()?;
        found.clone()
    }

    /// What the check that is under way is heard by; of a new one, which is to be begun, also what it tells by.
    fn join(&self) -> (watch::Receiver<Outcome>, Option<Tell>) {
        let mut under_way = self.0.lock();
        match &*under_way {
            Some(tell) => (tell.subscribe(), None),
            None => {
                let tell = under_way.insert(Tell::default());
                (tell.subscribe(), Some(tell.clone()))
            }
        }
    }

    /// Begins a check. The caller does not hold the lock: a runtime that is ending drops the check at once.
    fn begin(&self, telling: Tell, health: Health) {
        /// Ends the check, also if it panics: who asks from now on begins another.
        struct Ends(Checks);
        impl Drop for Ends {
            fn drop(&mut self) {
                *self.0.0.lock() = None;
            }
        }
        let ends = Ends(self.clone());
        drop(tokio::task::spawn_blocking(move || {
            // Dropped last: if the check has panicked, those who wait learn it by this.
            let telling = telling;
            let found = {
                let _ends = ends;
                health()
            };
            telling.send_replace(Some(found));
        }));
    }
}

async fn answer(path: &str, metrics: &Metrics, health: &Health, checks: &Checks) -> Response<Full<Bytes>> {
    let (status, kind, text) = match path {
        "/metrics" => match metrics.text() {
            Ok(text) => (StatusCode::OK, TEXT, text),
            Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, PLAIN, "no memory for it\n".into()),
        },
        HEALTH => match checks.ask(health).await {
            Some(Ok(())) => (StatusCode::OK, PLAIN, "ok\n".into()),
            Some(Err(error)) => (StatusCode::SERVICE_UNAVAILABLE, PLAIN, error + "\n"),
            None => (StatusCode::INTERNAL_SERVER_ERROR, PLAIN, "a thread has ended: a bug\n".into()),
        },
        _ => (StatusCode::NOT_FOUND, PLAIN, "there are /metrics and /health\n".into()),
    };
    told(status, kind, text)
}

fn told(status: StatusCode, kind: &'static str, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

/// Answers until the process ends: a few connections at once, each for a limited time.
pub async fn serve(listener: TcpListener, metrics: Metrics, health: Health) {
    let checks = Checks::default();
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
        let (metrics, health, checks) = (metrics.clone(), health.clone(), checks.clone());
        tokio::spawn(async move {
            let _turn = turn;
            let answer = service_fn(|request: Request<Incoming>| {
                let (metrics, health, checks) = (metrics.clone(), health.clone(), checks.clone());
                async move { Ok::<_, Infallible>(answer(request.uri().path(), &metrics, &health, &checks).await) }
            });
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(ASKING_TIMEOUT).keep_alive(false).max_buf_size(16 << 10);
            let served = http.serve_connection(TokioIo::new(stream), answer);
            let _ = tokio::time::timeout(ASKING_TIMEOUT, served).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::net::SocketAddr;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn asked(address: SocketAddr) -> String {
        let mut stream = tokio::net::TcpStream::connect(address).await.expect("connects");
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n").await.expect("writes");
        let mut said = String::new();
        stream.read_to_string(&mut said).await.expect("reads");
        said
    }

    /// A store that does not answer keeps one thread, however often it is asked about.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_check_at_a_time_asks_the_store() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (asking, seen) = (now.clone(), most.clone());
        let health: Health = Arc::new(move || {
            seen.fetch_max(asking.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            (0..1000).for_each(|_| std::thread::yield_now());
            asking.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        });
        let serving = tokio::spawn(serve(listener, Metrics::default(), health));
        let all: Vec<_> = (0..ASKING_MAX).map(|_| tokio::spawn(asked(address))).collect();
        for one in all {
            assert!(one.await.expect("no panic").starts_with("HTTP/1.1 200"));
        }
        assert_eq!(most.load(Ordering::SeqCst), 1);
        serving.abort();
    }

    /// However long the store takes, they do not wait one after the other.
    #[tokio::test]
    async fn who_asks_meanwhile_gets_the_same_answer() {
        let (stall, stalled) = std::sync::mpsc::channel::<()>();
        let (count, stalled) = (Arc::new(AtomicUsize::new(0)), Mutex::new(stalled));
        let counted = count.clone();
        let health: Health = Arc::new(move || {
            let _ = stalled.lock().recv();
            Err(format!("answer {}", counted.fetch_add(1, Ordering::SeqCst)))
        });
        let checks = Checks::default();
        let ask = || {
            let (checks, health) = (checks.clone(), health.clone());
            tokio::spawn(async move { checks.ask(&health).await })
        };
        let all: Vec<_> = (0..4).map(|_| ask()).collect();
        let wait_for_one = async {
            while checks.0.lock().as_ref().is_none_or(|tell| tell.receiver_count() < all.len()) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait_for_one).await.expect("all wait for one");
        drop(stall);
        for one in all {
            assert_eq!(one.await.expect("no panic"), Some(Err("answer 0".into())));
        }
        assert_eq!(ask().await.expect("no panic"), Some(Err("answer 1".into())), "a later one asks again");
    }

    /// Then no thread takes the check any more.
    #[test]
    fn who_asks_while_the_process_ends_gets_no_answer() {
        let runtime = tokio::runtime::Runtime::new().expect("threads");
        let handle = runtime.handle().clone();
        runtime.shutdown_background();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let _entered = handle.enter();
            let health: Health = Arc::new(|| Ok(()));
            let checks = Checks::default();
            let found = [(); 2].map(|()| checks.ask(&health).now_or_never());
            tell.send(found).expect("it is waited for");
        });
        assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok([Some(None), Some(None)]));
    }

    #[tokio::test]
    async fn a_check_that_panics_is_no_good_answer() {
        for (panics, status) in [(false, "200"), (true, "500")] {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = listener.local_addr().expect("an address");
            let health: Health = Arc::new(move || {
                assert!(!panics, "on purpose");
                Ok(())
            });
            let serving = tokio::spawn(serve(listener, Metrics::default(), health));
            let said = asked(address).await;
            assert!(said.starts_with(&format!("HTTP/1.1 {status}")), "{said}");
            serving.abort();
        }
    }
}
