//! The host's side: joining, a connection, a session, and the table of an anchor that a server keeps.
//!
//! | module | what it does |
//! |---|---|
//! | this one | joining; connections, and the meaning of their errors |
//! | `session` | leases: a task sends heartbeats, reconnects, and ends the session |
//! | `mirrored` | a table that is read from this host's copy, and committed at the server |
//! | `locks` | locks of this host's programs |
//! | `turns` | a vault that several hosts use by turns |
//! | `keys` | keys that a server keeps |

mod keys;
mod locks;
mod mirrored;
mod session;
mod turns;

pub use keys::unanswered;
pub use locks::Done;
pub use mirrored::{Mirrored, give_up, is_on_its_way, put};
pub use session::Session;
pub use turns::{Listener, LockRequest, Told, Turn, Turns};

use crate::identity::{HostKey, Identity};
use crate::limits::RULE_KEY;
use crate::proto::alerts_client::AlertsClient;
use crate::proto::anchors_client::AnchorsClient;
use crate::proto::hosts_client::HostsClient;
use crate::proto::sessions_client::SessionsClient;
use crate::protocol::{self, Speaks};
use crate::token::Token;
use crate::{MESSAGE_MAX, TlsError, proto, tls};
use hyper_util::rt::TokioIo;
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::header::VaultId;
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use std::error::Error as StdError;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

/// How long connecting may take, and how long a handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// If a server has several addresses, the time before the next one is tried (as RFC 8305 recommends).
const NEXT_AFTER: Duration = Duration::from_millis(250);
/// A connection without any sign of life for this long is closed.
const DEAD_AFTER: Duration = Duration::from_secs(5);
/// How long one call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Why a server refuses a token.
const TOKEN_USED: &str = "the token was used, or has expired: `lamassu-server enrol` prints another. If this host used it \
                          and got no answer, `lamassu-server host revoke` its name first";
/// Longest name of a host.
const NAME_MAX: usize = 63;

type Result<T> = std::result::Result<T, AnchorError>;

/// The threads that drive connections. They start with the first connection, so that a process that forks before has
/// none.
fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<io::Result<Runtime>> = OnceLock::new();
    let build = || Builder::new_multi_thread().worker_threads(1).thread_name("lamassu-rpc").enable_all().build();
    RUNTIME.get_or_init(build).as_ref().map_err(|error| AnchorError::Server {
        server: "of this host".into(),
        fault: ServerFault::Failed { detail: error.to_string() },
    })
}

/// Waits for a future, from a thread outside of the runtime.
fn wait<T>(future: impl Future<Output = T>) -> Result<T> {
    Ok(runtime()?.block_on(future))
}

/// The result of joining.
#[derive(Debug)]
pub struct Joined {
    /// the host's name at the server
    pub host: String,
    /// the server's address
    pub server: String,
    /// whether this host had an identity there, which is replaced
    pub is_replaced: bool,
}

/// Joins a server with a token. The identity is stored below `all`, before the server is told of it: a token that was
/// used without that would be lost.
///
/// # Errors
/// [`AnchorError::Server`].
pub fn join(all: &Path, token: &Token) -> Result<Joined> {
    let server = &token.address;
    let failed = |error: TlsError| own(server, &error);
    let token_key = HostKey::of(&token.key()).map_err(failed)?;
    let config = tls::joining(&token_key, token.authority).map_err(failed)?;
    let authority = Arc::new(OnceLock::new());
    let connection = Connection::with(server, config, Some(authority.clone()))?;
    connection.shake_hands()?;
    let shown: &Vec<CertificateDer<'static>> = authority.get().ok_or_else(|| connection.garbled("no certificate"))?;
    let known = shown.iter().find(|shown| tls::digest(shown) == token.authority);
    let known = known.ok_or_else(|| connection.garbled("no authority"))?.clone();
    let identity = Identity { key: HostKey::new().map_err(failed)?, authority: known };
    let stored = identity.store(&Identity::dir_of(all, server)).map_err(failed)?;
    let request = proto::PublicKey { spki: identity.key.public() };
    let joined = connection.call(HostsClient::new(connection.channel.clone()).join(request));
    let joined = joined.map_err(|error| match error {
        // The handshake succeeded on this side, so the server did not accept the token.
        AnchorError::Server { fault: ServerFault::Unreachable { .. }, .. } => {
            connection.error(ServerFault::Refused { detail: TOKEN_USED.into() })
        }
        error => error,
    });
    let host = joined?.host;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    if host.len() > NAME_MAX || !host.chars().all(is_plain) {
        return Err(connection.garbled("a name of a host"));
    }
    let is_replaced = stored.put_in_place().map_err(failed)?;
    Ok(Joined { host, server: server.clone(), is_replaced })
}

/// A connection to a server that this host has joined. Cheap to clone; it reconnects by itself.
#[derive(Clone, Debug)]
pub struct Connection {
    server: Arc<str>,
    channel: Wire,
    /// How it connects, so that there can be another one.
    wires: Wires,
}

/// Makes the wires to a server: its addresses, and this host's identity there.
#[derive(Clone)]
struct Wires {
    addresses: Arc<[SocketAddr]>,
    tls: TlsConnector,
    /// receives the certificates of the server
    shown: Option<Shown>,
}

impl std::fmt::Debug for Wires {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wires").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

type Shown = Arc<OnceLock<Vec<CertificateDer<'static>>>>;

/// Where calls go: each says which versions of the protocol this host speaks.
pub(crate) type Wire = InterceptedService<Channel, Speaks>;

/// Connects to the first of these addresses that answers. Of several servers only one serves; another may have stopped
/// or be unreachable. So attempts overlap, each starting a little after the one before.
async fn connect_any(addresses: &[SocketAddr], tls: &TlsConnector) -> io::Result<TlsStream<TcpStream>> {
    let mut tries = JoinSet::new();
    for (number, address) in (0..).zip(addresses.iter().copied()) {
        let tls = tls.clone();
        tries.spawn(async move {
            tokio::time::sleep(NEXT_AFTER * number).await;
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            // What has not arrived when this is closed is given up. It would come when another connection is in use.
            stream.set_zero_linger()?;
            tls.connect(tls::server_name(), stream).await
        });
    }
    let mut last = io::ErrorKind::AddrNotAvailable.into();
    while let Some(done) = tries.join_next().await {
        match done {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => {}
        }
    }
    Err(last)
}

impl Wires {
    /// Connects, and passes the certificates of the server to `shown`.
    async fn connect(self) -> io::Result<TlsStream<TcpStream>> {
        let connected = async {
            let stream = connect_any(&self.addresses, &self.tls).await?;
            let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let certificates: Vec<_> = certificates.iter().map(|shown| shown.clone().into_owned()).collect();
            self.shown.map(|shown| shown.set(certificates));
            Ok(stream)
        };
        let timeout = tokio::time::timeout(CONNECT_TIMEOUT, connected).await;
        timeout.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    fn channel(&self) -> Result<Wire> {
        let wires = self.clone();
        let connect = tower::service_fn(move |_: Uri| {
            let connected = wires.clone().connect();
            async move { connected.await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://server.lamassu")
            .http2_keep_alive_interval(DEAD_AFTER)
            .keep_alive_timeout(DEAD_AFTER)
            .keep_alive_while_idle(true);
        let _inside = runtime()?.enter();
        Ok(InterceptedService::new(endpoint.connect_with_connector_lazy(connect), Speaks))
    }
}

impl Connection {
    /// Connects to the server at `server`, `HOST:PORT`, with this host's identity there.
    ///
    /// # Errors
    /// [`AnchorError::Server`].
    pub fn new(all: &Path, server: &str) -> Result<Connection> {
        let failed = |error: TlsError| own(server, &error);
        let identity = Identity::read(&Identity::dir_of(all, server)).map_err(failed)?;
        let not_joined = || {
            let fault = ServerFault::NotJoined { joined: Identity::servers(all) };
            AnchorError::Server { server: server.into(), fault }
        };
        Connection::with(server, tls::client(&identity.ok_or_else(not_joined)?).map_err(failed)?, None)
    }

    /// `shown` receives the certificates of the server.
    fn with(server: &str, config: ClientConfig, shown: Option<Shown>) -> Result<Connection> {
        let unreachable =
            |detail: String| AnchorError::Server { server: server.into(), fault: ServerFault::Unreachable { detail } };
        // Resolved once: a process that is confined later cannot resolve names any more.
        let addresses: Arc<[SocketAddr]> =
            server.to_socket_addrs().map_err(|error| unreachable(error.to_string()))?.collect();
        let wires = Wires { addresses, tls: TlsConnector::from(Arc::new(config)), shown };
        Ok(Connection { server: server.into(), channel: wires.channel()?, wires })
    }

    /// Another connection to the same server. Nothing is read or resolved for it, so a confined process can make one.
    ///
    /// # Errors
    /// [`AnchorError::Server`].
    pub fn another(&self) -> Result<Connection> {
        Ok(Connection { channel: self.wires.channel()?, ..self.clone() })
    }

    /// The server's address.
    pub fn server(&self) -> &str {
        &self.server
    }

    fn anchors(&self) -> AnchorsClient<Wire> {
        let client = AnchorsClient::new(self.channel.clone());
        client.max_decoding_message_size(MESSAGE_MAX).max_encoding_message_size(MESSAGE_MAX)
    }

    fn sessions(&self) -> SessionsClient<Wire> {
        SessionsClient::new(self.channel.clone())
    }

    /// Reports integrity events of a vault, each a JSON document (`docs/alerts.md`), and the number of further events
    /// that were dropped. At most [`crate::FINDINGS_MAX`] events, and [`crate::REPORT_MAX`] bytes.
    ///
    /// # Errors
    /// [`AnchorError::Server`]: the server may have received it nevertheless.
    pub fn report(&self, vault: &VaultId, events: Vec<String>, lost: u64) -> Result<()> {
        let findings = proto::Findings { vault: vault.0.to_vec(), events, lost };
        self.call(AlertsClient::new(self.channel.clone()).report(findings)).map(drop)
    }

    /// Connects once and sends nothing, so that the certificates of the server are known.
    fn shake_hands(&self) -> Result<()> {
        let connected = wait(self.wires.clone().connect())?;
        connected.map(drop).map_err(|error| self.failed(&Status::from_error(Box::new(error))))
    }

    /// Makes one call, with a time limit.
    fn call<T>(&self, call: impl Future<Output = std::result::Result<tonic::Response<T>, Status>>) -> Result<T> {
        self.answer(call)?.map_err(|status| self.failed(&status))
    }

    /// The same, but returns the status.
    fn answer<T>(
        &self,
        call: impl Future<Output = std::result::Result<tonic::Response<T>, Status>>,
    ) -> Result<std::result::Result<T, Status>> {
        let done = wait(async { tokio::time::timeout(CALL_TIMEOUT, call).await })?;
        let done = done.unwrap_or_else(|_| Err(Status::unavailable("no answer in time")));
        Ok(done.map(tonic::Response::into_inner))
    }

    /// The next message of a stream, with a time limit.
    fn in_time<T>(&self, message: impl Future<Output = std::result::Result<T, Status>>) -> Result<T> {
        let done = wait(async { tokio::time::timeout(CALL_TIMEOUT, message).await })?;
        done.unwrap_or_else(|_| Err(Status::unavailable("no answer in time"))).map_err(|status| self.failed(&status))
    }

    fn error(&self, fault: ServerFault) -> AnchorError {
        AnchorError::Server { server: self.server.to_string(), fault }
    }

    fn garbled(&self, what: &str) -> AnchorError {
        self.error(ServerFault::Failed { detail: format!("a message of it makes no sense: {what}") })
    }

    /// The error that a status stands for.
    fn failed(&self, status: &Status) -> AnchorError {
        self.error(fault(status))
    }
}

/// An error in this host's own files.
fn own(server: &str, error: &TlsError) -> AnchorError {
    AnchorError::Server { server: server.into(), fault: ServerFault::Failed { detail: error.to_string() } }
}

fn fault(status: &Status) -> ServerFault {
    if let Some(error) = cause::<rustls::Error>(status) {
        let detail = error.to_string();
        return match error {
            // The server rejected this host's key.
            rustls::Error::AlertReceived(_) => ServerFault::Refused { detail },
            _ => ServerFault::Untrusted { detail },
        };
    }
    let detail = match cause::<io::Error>(status) {
        Some(error) => error.to_string(),
        None => status.message().to_owned(),
    };
    if protocol::of(status.metadata()).is_some() {
        return ServerFault::Version { detail };
    }
    if let Some(rule) = status.metadata().get(RULE_KEY).and_then(|rule| rule.to_str().ok()) {
        return ServerFault::Policy { rule: rule.into(), what: detail };
    }
    match status.code() {
        // The status was not sent by the server: the connection broke.
        Code::Internal if status.source().is_some() => ServerFault::Unreachable { detail },
        Code::NotFound => ServerFault::UnknownVault,
        Code::FailedPrecondition => ServerFault::InUse { by: detail },
        Code::Aborted => ServerFault::Ended,
        Code::DataLoss => ServerFault::Restored { waits_for: detail },
        Code::PermissionDenied | Code::Unauthenticated | Code::AlreadyExists => ServerFault::Refused { detail },
        Code::Unimplemented => ServerFault::Version { detail },
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown | Code::ResourceExhausted => {
            ServerFault::Unreachable { detail }
        }
        _ => ServerFault::Failed { detail },
    }
}

/// The first error of this type among a status's causes, also inside an [`io::Error`].
fn cause<T: StdError + 'static>(status: &Status) -> Option<&T> {
    let mut next = status.source();
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<T>() {
            return Some(found);
        }
        if let Some(carried) = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref)
            && let Some(found) = carried.downcast_ref::<T>()
        {
            return Some(found);
        }
        next = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A refusal for the version's sake is no other one with the same code.
    #[test]
    fn a_server_of_other_versions_is_named_as_such() {
        let mut status = Status::failed_precondition("the server speaks the versions 2-3");
        assert!(matches!(fault(&status), ServerFault::InUse { .. }));
        status.metadata_mut().insert(protocol::KEY, "2-3".parse().unwrap());
        let said = fault(&status);
        assert!(matches!(&said, ServerFault::Version { detail } if detail.ends_with("2-3")), "{said}");
    }
}
