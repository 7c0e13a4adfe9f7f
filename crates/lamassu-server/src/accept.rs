//! TLS, connections and their limits. A connection gets to the services only when its handshake has said who it is.

use crate::state::State;
use lamassu_rpc::tls::{self, Tokens};
use parking_lot::Mutex;
use rustls::ServerConfig;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{self, AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

/// For a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Who is at the other end.
#[derive(Clone, Debug)]
pub struct Peer {
    /// the name in its certificate, which is good with the key alone; `None`: it has a token
    pub host: Option<String>,
    /// its public key, a subject public key info
    pub key: Vec<u8>,
    /// from where
    pub address: SocketAddr,
}

/// Tokens as the state has them.
pub struct GoodTokens(pub Arc<State>);

impl std::fmt::Debug for GoodTokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GoodTokens")
    }
}

impl Tokens for GoodTokens {
    fn is_good(&self, spki: &[u8]) -> bool {
        self.0.token(spki, crate::service::seconds()).is_ok_and(|pending| pending.is_some())
    }
}

/// An encrypted connection of somebody who is known.
pub struct Connection {
    stream: TlsStream<TcpStream>,
    peer: Peer,
    /// One of those that may be open at once.
    _permit: OwnedSemaphorePermit,
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
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

/// How many may do what at once.
#[derive(Clone)]
pub struct Limits {
    /// connections
    pub connections: Arc<Semaphore>,
    /// handshakes of one address
    pub handshakes: usize,
}

/// Accepts until the receiver is gone. Each connection goes on when its handshake is done; one that is slow hinders no
/// other.
pub async fn accept(
    listener: TcpListener,
    tls: watch::Receiver<Arc<ServerConfig>>,
    tokens: Arc<dyn Tokens>,
    limits: Limits,
    accepted: mpsc::Sender<io::Result<Connection>>,
) {
    let shaking: Arc<Mutex<HashMap<IpAddr, usize>>> = Arc::default();
    loop {
        let (stream, address) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Of one connection, or of descriptors: neither ends the server.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
            () = accepted.closed() => return,
        };
        let Ok(permit) = limits.connections.clone().try_acquire_owned() else {
            tracing::warn!(%address, "refused: too many connections");
            continue;
        };
        let Some(turn) = Turn::of(&shaking, address.ip(), limits.handshakes) else {
            tracing::warn!(%address, "refused: too many handshakes of this address at once");
            continue;
        };
        let (tls, accepted) = (TlsAcceptor::from(tls.borrow().clone()), accepted.clone());
        let tokens = tokens.clone();
        tokio::spawn(async move {
            let _ = stream.set_nodelay(true);
            let shaken = tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await;
            drop(turn);
            match shaken {
                Ok(Ok(stream)) => {
                    if let Some(peer) = peer_of(&stream, address, &*tokens) {
                        let _ = accepted.send(Ok(Connection { stream, peer, _permit: permit })).await;
                    }
                }
                Ok(Err(error)) => tracing::info!(%address, %error, "a handshake has failed"),
                Err(_) => tracing::info!(%address, "a handshake took too long"),
            }
        });
    }
}

fn peer_of(stream: &TlsStream<TcpStream>, address: SocketAddr, tokens: &dyn Tokens) -> Option<Peer> {
    let certificate = stream.get_ref().1.peer_certificates()?.first()?;
    let key = tls::public_key(certificate)?;
    // A name counts with the key of that host alone, which each call looks up: what the holder of a token wrote into
    // its certificate names nobody.
    let host = tls::subject(certificate).map(|(name, _)| name).filter(|_| !tokens.is_good(&key));
    Some(Peer { host, key, address })
}

/// One handshake of an address.
struct Turn {
    of: Arc<Mutex<HashMap<IpAddr, usize>>>,
    address: IpAddr,
}

impl Turn {
    fn of(of: &Arc<Mutex<HashMap<IpAddr, usize>>>, address: IpAddr, most: usize) -> Option<Turn> {
        let mut turns = of.lock();
        let count = turns.entry(address).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(Turn { of: of.clone(), address })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut turns = self.of.lock();
        if let Some(count) = turns.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                turns.remove(&self.address);
            }
        }
    }
}
