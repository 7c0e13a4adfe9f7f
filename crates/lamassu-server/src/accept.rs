//! TLS connections and their limits. A connection reaches the services only after the handshake has identified a known
//! host or a token. It is closed when that host is revoked.

use crate::caller::Peer;
use crate::counts::{Counted, Counts};
use crate::crowd::Crowd;
use crate::files::HANDSHAKES_MAX;
use crate::metrics::Metrics;
use crate::state::{State, Who};
use lamassu_rpc::tls::{self, Keys};
use parking_lot::Mutex;
use rustls::ServerConfig;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{self, AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::Sleep;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::Stream;
use tokio_stream::wrappers::WatchStream;
use tonic::transport::server::Connected;

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection of an unknown or revoked host stays open: long enough to join, or to get the refusal.
const STAY_OF_OTHERS: Duration = Duration::from_secs(30);
/// Connections of one host at once.
const OF_ONE_HOST_MAX: usize = 16;
/// Minimum time between two log lines about refused connections.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// The keys that a state knows.
pub struct KnownKeys(pub Arc<State>);

impl std::fmt::Debug for KnownKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KnownKeys")
    }
}

impl Keys for KnownKeys {
    fn is_known(&self, spki: &[u8]) -> bool {
        self.0.who(spki).is_some()
    }
}

/// An encrypted connection of a host that has joined, or of a token.
pub struct Connection {
    stream: TlsStream<TcpStream>,
    peer: Peer,
    state: Arc<State>,
    /// Signals changes of hosts.
    changes: WatchStream<()>,
    /// How long it may stay, if it is not a host's.
    stay: Option<Pin<Box<Sleep>>>,
    /// Its share of the limits of [`Limits::connections`] and [`OF_ONE_HOST_MAX`].
    _permits: (OwnedSemaphorePermit, Counted<Arc<[u8]>>),
}

impl Connection {
    /// Whether it is to be closed.
    fn poll_is_over(&mut self, cx: &mut Context<'_>) -> bool {
        if let Some(stay) = &mut self.stay {
            return stay.as_mut().poll(cx).is_ready();
        }
        while let Poll::Ready(Some(())) = Pin::new(&mut self.changes).poll_next(cx) {
            if !is_host(self.state.who(&self.peer.key).as_ref()) {
                return true;
            }
        }
        false
    }
}

fn is_host(who: Option<&Who>) -> bool {
    matches!(who, Some(Who::Host { is_revoked: false, .. }))
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.poll_is_over(cx) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Limits on what may be open at once.
#[derive(Clone)]
pub struct Limits {
    /// connections of hosts
    pub connections: Arc<Semaphore>,
    /// handshakes of one address
    pub handshakes: usize,
}

/// The parts that accept connections.
#[derive(Clone)]
pub struct Door {
    /// the newest configuration of TLS
    tls: watch::Receiver<Arc<ServerConfig>>,
    /// the hosts and tokens that are known
    state: Arc<State>,
    limits: Limits,
    /// connections, by the key of the host
    of_hosts: Counts<Arc<[u8]>>,
    /// limits log lines about refused connections
    refused: Arc<Mutex<Quiet>>,
    metrics: Metrics,
}

impl Door {
    /// `tls`: the newest configuration.
    pub fn new(tls: watch::Receiver<Arc<ServerConfig>>, state: Arc<State>, limits: Limits, metrics: Metrics) -> Door {
        Door { tls, state, limits, of_hosts: Counts::default(), refused: Arc::default(), metrics }
    }

    /// Accepts until the receiver is gone. Each handshake runs in a task of its own, so that a slow one delays no
    /// other.
    pub async fn accept(self, listener: TcpListener, accepted: mpsc::Sender<io::Result<Connection>>) {
        let handshakes = Crowd::of(self.limits.handshakes, HANDSHAKES_MAX);
        loop {
            let (stream, address) = tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        // The error concerns one connection, or there are no descriptors left: neither ends the server.
                        tracing::warn!(%error, "a connection could not be accepted");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                },
                () = accepted.closed() => return,
            };
            let (door, accepted) = (self.clone(), accepted.clone());
            let (turn, given_up) = handshakes.begin(address.ip());
            tokio::spawn(async move {
                let shaken = door.shake(stream);
                let shaken = tokio::select! {
                    shaken = tokio::time::timeout(HANDSHAKE_TIMEOUT, shaken) => shaken.unwrap_or_else(|_| Err("it took too long".into())),
                    _ = given_up => Err("there were too many at once".into()),
                };
                drop(turn);
                match shaken.and_then(|stream| door.connection(stream, address)) {
                    Ok(connection) => drop(accepted.send(Ok(connection)).await),
                    Err(why) => {
                        door.metrics.refused();
                        door.refused.lock().say(address, &why);
                    }
                }
            });
        }
    }

    async fn shake(&self, stream: TcpStream) -> Result<TlsStream<TcpStream>, String> {
        let _ = stream.set_nodelay(true);
        let tls = TlsAcceptor::from(self.tls.borrow().clone());
        tls.accept(stream).await.map_err(|error| format!("its handshake failed: {error}"))
    }

    fn connection(&self, stream: TlsStream<TcpStream>, address: SocketAddr) -> Result<Connection, String> {
        let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let key: Arc<[u8]> = certificate.and_then(tls::public_key).ok_or("it has no certificate")?.into();
        // Subscribes before the lookup, so that no change after it is missed.
        let changes = WatchStream::from_changes(self.state.changes());
        let is_host = is_host(self.state.who(&key).as_ref());
        let stay = (!is_host).then(|| Box::pin(tokio::time::sleep(STAY_OF_OTHERS)));
        let of_host = self.of_hosts.one_more(&key, OF_ONE_HOST_MAX).ok_or("this host has too many")?;
        let permit = self.limits.connections.clone().try_acquire_owned().map_err(|_| "there are too many in all")?;
        let (state, peer) = (self.state.clone(), Peer { key, address });
        Ok(Connection { stream, peer, state, changes, stay, _permits: (permit, of_host) })
    }
}

/// Limits log lines that strangers can cause.
#[derive(Default)]
struct Quiet {
    said: Option<Instant>,
    unsaid: u64,
}

impl Quiet {
    fn say(&mut self, address: SocketAddr, why: &str) {
        if self.said.is_some_and(|said| said.elapsed() < SAID_EVERY) {
            self.unsaid += 1;
            return;
        }
        self.said = Some(Instant::now());
        tracing::info!(%address, why, unsaid = std::mem::take(&mut self.unsaid), "a connection was refused");
    }
}
