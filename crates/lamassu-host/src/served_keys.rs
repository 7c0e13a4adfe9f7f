//! Keys that a Lamassu server keeps (`server://HOST/ID`): asked for as who this host is at that server.

use crate::Anchors;
use lamassu_anchor::{AnchorError, ServerFault as Fault};
use lamassu_crypto::Secret;
use lamassu_keys::providers::server::{Servers, ask_servers_by};
use lamassu_keys::{KeyState, ServerFault};
use lamassu_rpc::host::{Connection, KeyRefused};
use std::io;

/// From now on sources `server://…` are asked in this process, as the host that has joined the servers beside these
/// anchors. A connection is made for each key, and not before one is asked for.
pub fn ask_as(anchors: &Anchors) {
    ask_servers_by(Box::new(Joined(anchors.clone())));
}

struct Joined(Anchors);

impl Servers for Joined {
    fn key(&self, server: &str, name: &str) -> Result<Secret<32>, ServerFault> {
        self.connection(server)?.key(name).map_err(refused)
    }

    fn make(&self, server: &str, name: &str) -> Result<(), ServerFault> {
        self.connection(server)?.make_key(name).map_err(refused)
    }
}

impl Joined {
    fn connection(&self, server: &str) -> Result<Connection, ServerFault> {
        // Nowhere to keep who this host is: it has joined nothing.
        let all = self.0.servers().map_err(|_| ServerFault::NotJoined)?;
        Connection::new(&all, server).map_err(failed)
    }
}

fn refused(refused: KeyRefused) -> ServerFault {
    match refused {
        KeyRefused::Unknown => ServerFault::NoObject,
        KeyRefused::Exists => ServerFault::NameTaken,
        KeyRefused::Retired => ServerFault::KeyState(KeyState::Deactivated),
        KeyRefused::Deleted => ServerFault::KeyState(KeyState::Destroyed),
        KeyRefused::KeepsNone => ServerFault::KeepsNone,
        KeyRefused::Length { found } => ServerFault::KeyLength { found },
        KeyRefused::Server(error) => failed(error),
    }
}

fn failed(error: AnchorError) -> ServerFault {
    let AnchorError::Server { server: _, fault } = error else {
        return ServerFault::Failing { detail: error.to_string() };
    };
    match fault {
        Fault::Unreachable { detail } => ServerFault::Unreachable { source: io::Error::other(detail) },
        Fault::Untrusted { detail } => ServerFault::Untrusted { source: detail.into() },
        Fault::NotJoined => ServerFault::NotJoined,
        Fault::Refused { detail } => ServerFault::Refused { detail },
        Fault::Version { .. } => ServerFault::KeepsNone,
        Fault::Failed { detail } => ServerFault::Failing { detail },
        // Of vaults alone.
        Fault::UnknownVault
        | Fault::Policy { .. }
        | Fault::InUse { .. }
        | Fault::Ended
        | Fault::Older { .. }
        | Fault::Restored { .. } => ServerFault::Failing { detail: fault.to_string() },
    }
}
