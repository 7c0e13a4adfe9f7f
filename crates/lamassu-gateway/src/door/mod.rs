//! Client connections: limits in all and for each address, TLS, HTTP/1.1 with timeouts. Slow clients, however many,
//! block no thread and no other client.

mod body;
mod guard;
mod pace;
mod patient;

use crate::credentials::User;
use crate::document::Document;
use crate::front::Front;
use crate::limits::{Connection, Held};
use crate::log::RequestLog;
use crate::metrics::Metrics;
use crate::s3::ADMITTED;
use body::{Incoming, Outgoing};
use http::{HeaderValue, Request, Response};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use pace::Patience;
use parking_lot::{Mutex, RwLock};
use patient::Patient;
use rustls::ServerConfig;
use s3s::service::S3Service;
use s3s::{S3Result, s3_error};
use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_rustls::TlsAcceptor;

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of all headers of a request together.
const HEADERS_MAX: usize = 64 << 10;

/// The TLS configuration in force; `None`: plain HTTP.
pub type Tls = Arc<RwLock<Option<Arc<ServerConfig>>>>;

/// Admits requests by the session token that they carry.
pub trait Admit: Send + Sync {
    /// The user of a session token. The token is not part of the signature protocol: the request's signature is
    /// verified afterwards.
    ///
    /// # Errors
    /// The error for the client.
    fn admit(&self, session_token: Option<&str>) -> S3Result<Arc<User>>;
}

/// Accepts connections and passes their requests to a service.
pub struct Door {
    service: S3Service,
    admit: Option<Arc<dyn Admit>>,
    tls: Tls,
    metrics: Metrics,
    patience: Patience,
    object_max: u64,
    with_keys: bool,
    region: String,
    connections: Arc<Semaphore>,
    connections_max: usize,
    of_address_max: usize,
    of_addresses: Mutex<HashMap<IpAddr, usize>>,
    requests: AtomicU64,
    /// Distinguishes this start of the gateway from others in numbers of requests.
    start: u32,
}

/// One open connection, counted in the limits.
struct Admitted {
    door: Arc<Door>,
    address: IpAddr,
    _permit: OwnedSemaphorePermit,
    _counted: crate::metrics::Connected,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let of_addresses = &mut *self.door.of_addresses.lock();
        if let Some(count) = of_addresses.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                of_addresses.remove(&self.address);
            }
        }
    }
}

impl Door {
    /// `service` gets the requests of admitted users.
    pub fn new(
        front: &Front,
        service: S3Service,
        admit: Option<Arc<dyn Admit>>,
        tls: Tls,
        metrics: Metrics,
    ) -> Arc<Door> {
        let since = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap_or_default();
        Arc::new(Door {
            service,
            admit,
            tls,
            metrics,
            patience: Patience::new(front.idle_seconds, front.client_kib_per_second_min),
            object_max: front.object_max(),
            with_keys: front.log_keys,
            region: front.region.clone(),
            connections: Arc::new(Semaphore::new(front.connections_max)),
            connections_max: front.connections_max,
            of_address_max: front.connections_of_address_max,
            of_addresses: Mutex::default(),
            requests: AtomicU64::new(0),
            start: since.as_secs() as u32,
        })
    }

    /// Accepts until told to stop. Requests under way then have `grace` to end.
    pub async fn serve(self: Arc<Self>, listener: TcpListener, mut stop: watch::Receiver<bool>, grace: Duration) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stopped(&mut stop) => break,
            };
            match accepted {
                Ok((stream, address)) => match self.place(address.ip()) {
                    Some(place) => drop(tokio::spawn(connection(place, stream, address, stop.clone()))),
                    None => self.metrics.refused(),
                },
                Err(error) => {
                    // The error concerns one connection, or there are no descriptors left: neither ends the gateway.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
        drop(listener);
        let all = u32::try_from(self.connections_max).unwrap_or(u32::MAX);
        if tokio::time::timeout(grace, self.connections.acquire_many(all)).await.is_err() {
            tracing::warn!("requests that went on for too long were ended");
        }
    }

    fn place(self: &Arc<Self>, address: IpAddr) -> Option<Admitted> {
        let (permit, address) = (self.connections.clone().try_acquire_owned().ok()?, network_of(address));
        let of_addresses = &mut *self.of_addresses.lock();
        let count = of_addresses.entry(address).or_default();
        if *count >= self.of_address_max {
            return None;
        }
        *count += 1;
        let _counted = self.metrics.connected();
        Some(Admitted { door: self.clone(), address, _permit: permit, _counted })
    }

    async fn answer(
        self: Arc<Self>,
        request: Request<hyper::body::Incoming>,
        address: IpAddr,
        (connection, since): (Connection, Instant),
    ) -> Response<Outgoing> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let id = format!("{:08X}{number:08X}", self.start);
        let entry = RequestLog::new(id, address, request.method().clone(), self.with_keys, self.metrics.clone());
        let (mut parts, body) = request.into_parts();
        let asks = parts.headers.contains_key(http::header::EXPECT);
        let (document, held) = (Document::default(), Held::default());
        let passed = guard::check(&parts, self.object_max).and_then(|()| self.admitted(&parts));
        let answered: Result<_, s3s::StdError> = match passed {
            Ok(_) if guard::has_no_region(&parts) => Ok(self.tell_region()),
            Ok(user) => {
                let hash = parts.headers.get("x-amz-content-sha256");
                let is_chunked = hash.is_some_and(|hash| hash.as_bytes().starts_with(b"STREAMING-"));
                let body = Incoming::new(body, entry.clone(), document.clone(), self.patience, is_chunked);
                parts.extensions.insert(entry.clone());
                parts.extensions.insert(document.clone());
                parts.extensions.insert(held.clone());
                parts.extensions.insert(connection.clone());
                let request = Request::from_parts(parts, s3s::Body::http_body_unsync(body));
                let call = document.answered(self.service.call(request));
                let answered = match user {
                    Some(user) => ADMITTED.scope(user, call).await,
                    None => call.await,
                };
                answered.map_err(Into::into)
            }
            Err(refused) => refused.to_http_response().map_err(Into::into),
        };
        let answered = answered.and_then(|response| Ok(of_body(&entry, &document, &response).unwrap_or(Ok(response))?));
        let mut response = answered.unwrap_or_else(|error| {
            tracing::error!(%error, "an answer could not be made");
            let mut response = Response::new(s3s::Body::empty());
            *response.status_mut() = http::StatusCode::INTERNAL_SERVER_ERROR;
            response
        });
        entry.is_answered(response.status());
        let is_busy = response.status() == http::StatusCode::SERVICE_UNAVAILABLE;
        let headers = response.headers_mut();
        headers.extend(HeaderValue::try_from(entry.id()).ok().map(|id| (REQUEST_ID, id)));
        // A client that asks waits for "100 Continue" and gets this answer instead. Botocore then takes its status for
        // that of the next answer on the connection.
        let was_not_told = asks && !entry.has_received();
        // It has `idle_seconds` for a good signature. Otherwise strangers could keep all connections with requests that
        // are refused.
        let is_strangers = connection.is_of_nobody() && since.elapsed() >= self.patience.idle;
        if was_not_told || connection.is_refused() || is_strangers {
            headers.insert(http::header::CONNECTION, HeaderValue::from_static("close"));
        }
        if is_busy {
            headers.insert(http::header::RETRY_AFTER, RETRY_AFTER);
        }
        headers.insert(http::header::SERVER, HeaderValue::from_static("Lamassu"));
        response.map(|body| Outgoing::new(body, entry, held))
    }
}

impl Door {
    fn admitted(&self, parts: &http::request::Parts) -> S3Result<Option<Arc<User>>> {
        let Some(admit) = &self.admit else { return Ok(None) };
        admit.admit(guard::session_token(parts)?.as_deref()).map(Some)
    }

    /// Adds the region for signing: an element that the library's errors lack.
    fn tell_region(&self) -> Response<s3s::Body> {
        let text = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>AuthorizationHeaderMalformed</Code>\
             <Message>the region is {0}</Message><Region>{0}</Region></Error>",
            self.region
        );
        let mut response = Response::new(s3s::Body::from(text));
        *response.status_mut() = http::StatusCode::BAD_REQUEST;
        response.headers_mut().insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/xml"));
        response
    }
}

/// Seconds after which a client may try again.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");
const REQUEST_ID: http::HeaderName = http::HeaderName::from_static("x-amz-request-id");

/// The answer to a request whose document was refused, or did not come whole. `s3s` would take the fault upon itself.
fn of_body(
    entry: &RequestLog,
    document: &Document,
    response: &Response<s3s::Body>,
) -> Option<S3Result<Response<s3s::Body>>> {
    if let Some(refused) = document.refused() {
        return Some(refused.to_http_response());
    }
    let by = entry.cut().filter(|_| response.status() == http::StatusCode::INTERNAL_SERVER_ERROR)?;
    let error = match by {
        std::io::ErrorKind::TimedOut => s3_error!(RequestTimeout, "nothing, or little, came for too long"),
        _ => s3_error!(IncompleteBody, "the body is not whole"),
    };
    Some(error.to_http_response())
}

async fn connection(place: Admitted, stream: TcpStream, address: SocketAddr, stop: watch::Receiver<bool>) {
    let _ = stream.set_nodelay(true);
    let tls = place.door.tls.read().clone();
    let Some(tls) = tls else { return speak(&place, stream, address, stop).await };
    let shaken = tokio::time::timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(tls).accept(stream)).await;
    match shaken {
        Ok(Ok(stream)) => speak(&place, stream, address, stop).await,
        Ok(Err(_)) | Err(_) => place.door.metrics.refused(),
    }
}

async fn speak(
    place: &Admitted,
    stream: impl AsyncRead + AsyncWrite + Unpin,
    address: SocketAddr,
    mut stop: watch::Receiver<bool>,
) {
    let door = &place.door;
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(door.patience.idle).max_buf_size(HEADERS_MAX);
    let (of_tenant, since) = (Connection::default(), Instant::now());
    let answer = service_fn(|request| {
        let (door, of_tenant) = (door.clone(), (of_tenant.clone(), since));
        async move { Ok::<_, Infallible>(door.answer(request, address.ip(), of_tenant).await) }
    });
    let connection = http.serve_connection(TokioIo::new(Patient::new(stream, door.patience)), answer);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopped(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, %address, "a connection ended early");
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // If the sender is gone, no one can ask for the stop any more.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// The unit by which addresses are counted: an IPv6 /64, since one subscriber has 2⁶⁴ addresses.
fn network_of(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) if address.to_ipv4_mapped().is_none() => {
            Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into()
        }
        address => address,
    }
}
