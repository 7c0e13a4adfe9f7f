//! A host's side: joining, a connection, a session, and the table of an anchor that a server keeps.
//!
//! | module | what it does |
//! |---|---|
//! | this one | joining; connections, and what their errors mean |
//! | `session` | leases: a thread of its own beats, resumes, and ends |
//! | `mirrored` | the table: read from this host's copy, committed at the server |
//! | `turns` | a vault that several hosts have by turns |
//! | `keys` | keys that a server keeps |

mod keys;
mod mirrored;
mod session;
mod turns;

pub use keys::KeyRefused;
pub use mirrored::{Mirrored, give_up, is_on_its_way, put};
pub use session::Session;
pub use turns::{Listener, Told, Turn, Turns};

use crate::identity::{HostKey, Identity};
use crate::limits::RULE_KEY;
use crate::proto::alerts_client::AlertsClient;
use crate::proto::anchors_client::AnchorsClient;
use crate::proto::hosts_client::HostsClient;
use crate::proto::sessions_client::SessionsClient;
use crate::tls::{self, TlsError};
use crate::token::Token;
use crate::{MESSAGE_MAX, proto};
use hyper_util::rt::TokioIo;
use lamassu_anchor::{AnchorError, ServerFault};
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
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

/// For the network to answer, and for a handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Where a server has several addresses: the next one is tried after this time (as RFC 8305 recommends).
const NEXT_AFTER: Duration = Duration::from_millis(250);
/// A connection that shows no life for so long is given up.
const DEAD_AFTER: Duration = Duration::from_secs(5);
/// For one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest name of a host.
const NAME_MAX: usize = 63;

type Result<T> = std::result::Result<T, AnchorError>;

/// The threads that drive connections. Started with the first one: a process that forks has none before.
fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<io::Result<Runtime>> = OnceLock::new();
    let build = || Builder::new_multi_thread().worker_threads(1).thread_name("lamassu-rpc").enable_all().build();
    RUNTIME.get_or_init(build).as_ref().map_err(|error| AnchorError::Server {
        server: "of this host".into(),
        fault: ServerFault::Failed { detail: error.to_string() },
    })
}

/// Waits for a future, from a thread that is not the runtime's.
fn wait<T>(future: impl Future<Output = T>) -> Result<T> {
    Ok(runtime()?.block_on(future))
}

/// What this host found out when it joined.
#[derive(Debug)]
pub struct Joined {
    /// the host's name, as the server has it
    pub host: String,
    /// the server's address
    pub server: String,
}

/// Joins a server with a token; what is found out is kept below `all`.
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
    let key = HostKey::new().map_err(failed)?;
    let request = proto::PublicKey { spki: key.public() };
    let joined = connection.call(HostsClient::new(connection.channel.clone()).join(request));
    let joined = joined.map_err(|error| match (error, authority.get()) {
        // The handshake was done, as far as this side sees it: then it is the token that the server does not take.
        (AnchorError::Server { fault: ServerFault::Unreachable { .. }, .. }, Some(_)) => {
            let detail = "the token was used, or has expired: `lamassu-server enrol` prints another".into();
            connection.error(ServerFault::Refused { detail })
        }
        (error, _) => error,
    });
    let host = joined?.host;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    if host.len() > NAME_MAX || !host.chars().all(is_plain) {
        return Err(connection.garbled("a name of a host"));
    }
    let shown: &Vec<CertificateDer<'static>> = authority.get().ok_or_else(|| connection.garbled("no certificate"))?;
    let authority = shown.iter().find(|shown| tls::digest(shown) == token.authority);
    let authority = authority.ok_or_else(|| connection.garbled("no authority"))?.clone();
    let dir = Identity::dir_of(all, server);
    Identity { key, authority }.keep(&dir).map_err(failed)?;
    Ok(Joined { host, server: server.clone() })
}

/// A connection to a server that this host has joined. Cheap to clone; it comes back by itself.
#[derive(Clone, Debug)]
pub struct Connection {
    server: Arc<str>,
    channel: Channel,
}

/// A connection to the first of these that takes one. Of several servers one serves; another may be stopped, or gone
/// without a word: so they are tried beside each other, one a little after the other.
async fn connect_any(addresses: &[SocketAddr], tls: &TlsConnector) -> io::Result<TlsStream<TcpStream>> {
    let mut tries = JoinSet::new();
    for (number, address) in (0..).zip(addresses.iter().copied()) {
        let tls = tls.clone();
        tries.spawn(async move {
            tokio::time::sleep(NEXT_AFTER * number).await;
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
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

impl Connection {
    /// To the server at `server`, `HOST:PORT`, as who this host is there.
    ///
    /// # Errors
    /// [`AnchorError::Server`].
    pub fn new(all: &Path, server: &str) -> Result<Connection> {
        let failed = |error: TlsError| own(server, &error);
        let identity = Identity::read(&Identity::dir_of(all, server)).map_err(failed)?;
        let not_joined = || AnchorError::Server { server: server.into(), fault: ServerFault::NotJoined };
        Connection::with(server, tls::client(&identity.ok_or_else(not_joined)?).map_err(failed)?, None)
    }

    /// `shown`: gets the certificates that the server shows.
    fn with(
        server: &str,
        config: ClientConfig,
        shown: Option<Arc<OnceLock<Vec<CertificateDer<'static>>>>>,
    ) -> Result<Connection> {
        let unreachable =
            |detail: String| AnchorError::Server { server: server.into(), fault: ServerFault::Unreachable { detail } };
        // Once: a process that is confined later finds no names any more.
        let addresses: Arc<[SocketAddr]> =
            server.to_socket_addrs().map_err(|error| unreachable(error.to_string()))?.collect();
        let tls = TlsConnector::from(Arc::new(config));
        let connect = tower::service_fn(move |_: Uri| {
            let (tls, addresses, shown) = (tls.clone(), addresses.clone(), shown.clone());
            async move {
                let connected = async {
                    let stream = connect_any(&addresses, &tls).await?;
                    let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
                    let certificates: Vec<_> = certificates.iter().map(|shown| shown.clone().into_owned()).collect();
                    shown.map(|shown| shown.set(certificates));
                    io::Result::Ok(TokioIo::new(stream))
                };
                let timeout = tokio::time::timeout(CONNECT_TIMEOUT, connected).await;
                timeout.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            }
        });
        let endpoint = Endpoint::from_static("http://server.lamassu")
            .http2_keep_alive_interval(DEAD_AFTER)
            .keep_alive_timeout(DEAD_AFTER)
            .keep_alive_while_idle(true);
        let _inside = runtime()?.enter();
        Ok(Connection { server: server.into(), channel: endpoint.connect_with_connector_lazy(connect) })
    }

    /// The server's address.
    pub fn server(&self) -> &str {
        &self.server
    }

    fn anchors(&self) -> AnchorsClient<Channel> {
        let client = AnchorsClient::new(self.channel.clone());
        client.max_decoding_message_size(MESSAGE_MAX).max_encoding_message_size(MESSAGE_MAX)
    }

    fn sessions(&self) -> SessionsClient<Channel> {
        SessionsClient::new(self.channel.clone())
    }

    /// Reports integrity events of a vault, each a JSON document (`docs/alerts.md`), and how many more there were that
    /// are forgotten. No more than [`crate::FINDINGS_MAX`], and [`crate::REPORT_MAX`] bytes.
    ///
    /// # Errors
    /// [`AnchorError::Server`]: the server may have it all the same.
    pub fn report(&self, vault: &[u8; 16], events: Vec<String>, lost: u64) -> Result<()> {
        let findings = proto::Findings { vault: vault.to_vec(), events, lost };
        self.call(AlertsClient::new(self.channel.clone()).report(findings)).map(drop)
    }

    /// One call, within its time.
    fn call<T>(&self, call: impl Future<Output = std::result::Result<tonic::Response<T>, Status>>) -> Result<T> {
        self.answer(call)?.map_err(|status| self.failed(&status))
    }

    /// The same, for who looks at the status.
    fn answer<T>(
        &self,
        call: impl Future<Output = std::result::Result<tonic::Response<T>, Status>>,
    ) -> Result<std::result::Result<T, Status>> {
        let done = wait(async { tokio::time::timeout(CALL_TIMEOUT, call).await })?;
        let done = done.unwrap_or_else(|_| Err(Status::unavailable("no answer in time")));
        Ok(done.map(tonic::Response::into_inner))
    }

    /// The next message of a stream, within its time.
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

    /// What a status means.
    fn failed(&self, status: &Status) -> AnchorError {
        self.error(fault(status))
    }
}

/// What this host itself got wrong.
fn own(server: &str, error: &TlsError) -> AnchorError {
    AnchorError::Server { server: server.into(), fault: ServerFault::Failed { detail: error.to_string() } }
}

fn fault(status: &Status) -> ServerFault {
    if let Some(error) = cause::<rustls::Error>(status) {
        let detail = error.to_string();
        return match error {
            // The server's word on this host's key.
            rustls::Error::AlertReceived(_) => ServerFault::Refused { detail },
            _ => ServerFault::Untrusted { detail },
        };
    }
    let detail = match cause::<io::Error>(status) {
        Some(error) => error.to_string(),
        None => status.message().to_owned(),
    };
    if let Some(rule) = status.metadata().get(RULE_KEY).and_then(|rule| rule.to_str().ok()) {
        return ServerFault::Policy { rule: rule.into(), what: detail };
    }
    match status.code() {
        // Not a word of the server: its connection broke, in whatever way.
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

/// The first of an error's causes that is of this type, also where the system's error carries it.
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
