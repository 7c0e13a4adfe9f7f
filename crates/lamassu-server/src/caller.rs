//! The other end of a connection, and the host that calls.

use crate::counts::Counted;
use std::net::SocketAddr;
use std::sync::Arc;

/// The other end of a connection. Its handshake has proved that it has this key.
#[derive(Clone, Debug)]
pub struct Peer {
    /// its public key, a subject public key info
    pub key: Arc<[u8]>,
    /// its address
    pub address: SocketAddr,
}

/// The calling host. [`Guard`](crate::guard::Guard) adds it to each request that reaches the services.
#[derive(Clone, Debug)]
pub struct Caller {
    /// its name
    pub name: String,
    /// its public key
    pub key: Arc<[u8]>,
}

/// A place among the calls that a host may have under way. [`Guard`](crate::guard::Guard) adds it to each request; the
/// work that the call causes keeps it.
pub type CallPermit = Arc<Counted<Arc<[u8]>>>;
