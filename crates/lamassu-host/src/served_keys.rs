//! Keys that a Lamassu server keeps (`server://HOST/ID`): fetched, or used to evaluate, with this host's identity at
//! that server.

use crate::Anchors;
use lamassu_anchor::{AnchorError, ServerFault as Fault};
use lamassu_crypto::Secret;
use lamassu_crypto::oblivious::{Evaluate, EvaluationFault};
use lamassu_crypto::oprf::{Element, Evaluation};
use lamassu_keys::providers::server::{Servers, ask_servers_by};
use lamassu_keys::{KeyState, ServerFault};
use lamassu_rpc::host::{Connection, KeyRefused};
use std::io;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a host that has exceeded its limit waits in all before it gives up.
const LIMITED_MAX: Duration = Duration::from_secs(60);
/// The longest single wait: the server may ask for any time.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A failure within this time suggests a stale connection, so the call is repeated once.
const STALE_WITHIN: Duration = Duration::from_secs(1);
/// After a failure to reach a server, it is not asked again for twice as long as the failure took, within these bounds.
/// So writers fail at once, and a restarting server, which refuses connections quickly, is soon asked again.
const DOWN_FOR: RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(2);

/// From now on, sources `server://…` in this process use the identity that is stored beside these anchors. Each key has
/// a connection of its own, made at the first call.
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

    fn oblivious(&self, server: &str, name: &str) -> Result<[u8; 32], ServerFault> {
        self.connection(server)?.open_oblivious(name).map_err(refused)
    }

    fn evaluator(&self, server: &str, name: &str) -> Arc<dyn Evaluate> {
        let (joined, server, name) = (Joined(self.0.clone()), server.to_owned(), name.to_owned());
        Arc::new(Evaluator { joined, server, name, connection: Mutex::default(), down: Mutex::default() })
    }
}

impl Joined {
    fn connection(&self, server: &str) -> Result<Connection, ServerFault> {
        // There is no place for an identity, so this host has joined no server.
        let all = self.0.servers().map_err(|_| ServerFault::NotJoined)?;
        Connection::new(&all, server).map_err(failed)
    }
}

/// An evaluating key. A call waits at most a minute, not counting the network.
struct Evaluator {
    joined: Joined,
    server: String,
    name: String,
    connection: Mutex<Option<Connection>>,
    /// since when the server is unreachable, and why
    down: Mutex<Option<(Instant, EvaluationFault)>>,
}

impl Evaluator {
    fn connection(&self) -> Result<Connection, EvaluationFault> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = &*connection {
            return Ok(connection.clone());
        }
        let made = self.joined.connection(&self.server).map_err(fault_of)?;
        Ok(connection.insert(made).clone())
    }

    fn ask(&self, blinded: &[Element]) -> Result<Evaluation, EvaluationFault> {
        let connection = self.connection()?;
        let begun = Instant::now();
        let end = begun + LIMITED_MAX;
        let mut is_first = true;
        loop {
            let fault = match connection.evaluate(&self.name, blinded) {
                Ok(evaluation) => return Ok(evaluation),
                Err(KeyRefused::Limited { again }) => {
                    let pause = again.min(PAUSE_MAX);
                    if Instant::now() + pause > end {
                        return Err(EvaluationFault::Limited);
                    }
                    std::thread::sleep(pause);
                    continue;
                }
                Err(error) => fault_of(refused(error)),
            };
            // Only use shows that a connection is older than the server's restart.
            let may_be_stale = matches!(fault, EvaluationFault::Unreachable { .. }) && begun.elapsed() < STALE_WITHIN;
            if !(is_first && may_be_stale) {
                return Err(fault);
            }
            is_first = false;
        }
    }
}

impl Evaluate for Evaluator {
    fn place(&self) -> String {
        format!("server://{}/{}", self.server, self.name)
    }

    /// Resolves the server's name.
    fn prepare(&self) {
        if let Err(error) = self.connection() {
            tracing::warn!(key = self.place(), "new blocks cannot be written until this is mended: {error}");
        }
    }

    fn evaluate(&self, blinded: &[Element]) -> Result<Evaluation, EvaluationFault> {
        let down = || self.down.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((until, fault)) = &*down()
            && Instant::now() < *until
        {
            return Err(fault.clone());
        }
        let begun = Instant::now();
        let asked = self.ask(blinded);
        let was_down = match &asked {
            Err(fault @ EvaluationFault::Unreachable { .. }) => {
                let down_for = (2 * begun.elapsed()).clamp(*DOWN_FOR.start(), *DOWN_FOR.end());
                down().replace((Instant::now() + down_for, fault.clone()))
            }
            Ok(_) | Err(_) => down().take(),
        };
        match (&asked, was_down) {
            (Err(fault), None) => {
                tracing::error!(key = self.place(), "no oblivious keys, and new blocks are not written: {fault}");
            }
            (Ok(_), Some(_)) => tracing::info!(key = self.place(), "oblivious keys are there again"),
            (Ok(_), None) | (Err(_), Some(_)) => {}
        }
        asked
    }
}

fn fault_of(fault: ServerFault) -> EvaluationFault {
    match fault {
        ServerFault::Unreachable { source } => EvaluationFault::Unreachable { detail: source.to_string() },
        ServerFault::Untrusted { source } => EvaluationFault::Untrusted { detail: source.to_string() },
        ServerFault::NotJoined => EvaluationFault::NotJoined,
        ServerFault::Refused { detail } => EvaluationFault::Refused { detail },
        ServerFault::NoObject | ServerFault::NameTaken => EvaluationFault::Unknown,
        ServerFault::KeyState(KeyState::Destroyed) => EvaluationFault::Deleted,
        ServerFault::KeyState(_) => EvaluationFault::Retired,
        ServerFault::KeepsNone => EvaluationFault::KeepsNone,
        other => EvaluationFault::Failing { detail: other.to_string() },
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
        KeyRefused::Garbled | KeyRefused::Limited { .. } => ServerFault::Failing { detail: refused.to_string() },
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
        // Errors about vaults only.
        Fault::UnknownVault
        | Fault::Policy { .. }
        | Fault::InUse { .. }
        | Fault::Ended
        | Fault::Older { .. }
        | Fault::Restored { .. } => ServerFault::Failing { detail: fault.to_string() },
    }
}
