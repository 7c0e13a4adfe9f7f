//! The gate before the services: a call is not read before its caller is allowed to make it, and no caller takes more
//! than its share. No refusal leaves it that may come of what another server has changed meanwhile.

use crate::caller::{CallPermit, Caller, Peer};
use crate::counts::Counts;
use crate::metrics::Metrics;
use crate::origin::Office;
use crate::state::{State, Who};
use http::{Request, Response};
use lamassu_rpc::protocol;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tonic::body::Body;
use tonic::{Code, Status};
use tower::{Layer, Service};

/// The only call that a token allows.
const JOIN: &str = "/lamassu.v1.Hosts/Join";
/// The call that takes as long as its rows take. It has limits of its own.
const PUT: &str = "/lamassu.v1.Anchors/Put";
/// Calls of one host at once, those included whose work goes on after their client has given up. A commit under way
/// takes at most twice [`lamassu_rpc::MESSAGE_MAX`] of memory.
const CALLS_MAX: usize = 8;
/// How long a call may take to be read and answered.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The version of the protocol that a call is in.
#[derive(Clone, Copy)]
pub struct Agreed(pub u32);

/// Makes a [`Guarded`] of a service.
#[derive(Clone)]
pub struct Guard {
    state: Arc<State>,
    office: Arc<Office>,
    calls: Counts<Arc<[u8]>>,
    metrics: Metrics,
}

impl Guard {
    /// A guard for the hosts of a state. `office`: the right to serve it.
    pub fn new(state: Arc<State>, office: Arc<Office>, metrics: Metrics) -> Guard {
        Guard { state, office, calls: Counts::default(), metrics }
    }

    /// Checks whether a peer may make a call, and in which version of the protocol. Returns the calling host, unless it
    /// has a token only, and its place among the calls under way.
    fn admit(&self, call: &Request<Body>) -> Result<(Option<Caller>, CallPermit, Agreed), Status> {
        let (peer, path) = (call.extensions().get::<Peer>(), call.uri().path());
        let peer = peer.ok_or_else(|| Status::unauthenticated("no certificate"))?;
        let caller = match self.state.who(&peer.key) {
            Some(Who::Token) if path == JOIN => None,
            Some(Who::Token) => {
                return Err(Status::permission_denied("a token only allows a host to join"));
            }
            Some(Who::Host { .. }) if path == JOIN => {
                return Err(Status::permission_denied("this host has joined already"));
            }
            Some(Who::Host { name, is_revoked: false }) => Some(Caller { name, key: peer.key.clone() }),
            Some(Who::Host { name, is_revoked: true }) => {
                return Err(Status::permission_denied(format!("host {name} was revoked")));
            }
            None => return Err(Status::permission_denied("this host was revoked, or its token was used")),
        };
        let place = self.calls.one_more(&peer.key, CALLS_MAX);
        let place = place.ok_or_else(|| Status::resource_exhausted("too many calls at once"))?;
        let spoken = call.headers().get(protocol::KEY).and_then(|spoken| spoken.to_str().ok()?.parse().ok());
        Ok((caller, Arc::new(place), Agreed(protocol::agreed(spoken)?)))
    }
}

/// An answer that may leave this server. What was done is durable, whoever serves now. A refusal may come of what only
/// this server has in memory: that a host or a session is unknown, or that a commit is based on another head. Hosts may
/// take it for final. So it counts only if this server had the right to serve after it was made.
async fn confirmed(answer: Response<Body>, office: &Office) -> Response<Body> {
    let is_done = Status::from_header_map(answer.headers()).is_none_or(|status| status.code() == Code::Ok);
    if is_done || office.confirm().await { answer } else { another_serves().into_http() }
}

/// Says nothing of what was asked: the host asks the next server.
pub(crate) fn another_serves() -> Status {
    Status::unavailable("another server has taken over")
}

impl<S> Layer<S> for Guard {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { guard: self.clone(), inner }
    }
}

/// A service behind a [`Guard`].
#[derive(Clone)]
pub struct Guarded<S> {
    guard: Guard,
    inner: S,
}

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let path = request.uri().path();
        let admitted = self.guard.admit(&request);
        let is_limited = path != PUT;
        self.guard.metrics.called(path, admitted.is_ok());
        let called = admitted.map(|(caller, place, version)| {
            if let Some(caller) = caller {
                request.extensions_mut().insert(caller);
            }
            request.extensions_mut().insert(version);
            // Work that continues after the answer is abandoned keeps the place, too.
            request.extensions_mut().insert(place.clone());
            (self.inner.call(request), place)
        });
        let office = self.guard.office.clone();
        let answer = async move {
            let (answer, _place) = match called {
                Ok((called, place)) => (called.await?, Some(place)),
                Err(status) => (status.into_http(), None),
            };
            Ok(confirmed(answer, &office).await)
        };
        Box::pin(async move {
            if !is_limited {
                return answer.await;
            }
            let in_time = tokio::time::timeout(CALL_TIMEOUT, answer).await;
            in_time.unwrap_or_else(|_| Ok(Status::deadline_exceeded("the call took too long").into_http()))
        })
    }
}
