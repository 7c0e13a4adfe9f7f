//! Keys that a Lamassu server keeps (`server://HOST/ID`): fetched, or used to evaluate, with this host's identity at
//! that server.

use crate::Anchors;
use lamassu_crypto::Secret;
use lamassu_crypto::oblivious::{Evaluate, KeyServerFault};
use lamassu_crypto::oprf::{Element, Evaluation};
use lamassu_keys::providers::server::{Servers, ask_servers_by};
use lamassu_rpc::host::{Connection, unanswered};
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
    fn key(&self, server: &str, name: &str) -> Result<Secret<32>, KeyServerFault> {
        self.connection(server)?.key(name)
    }

    fn make(&self, server: &str, name: &str) -> Result<(), KeyServerFault> {
        self.connection(server)?.make_key(name)
    }

    fn oblivious(&self, server: &str, name: &str) -> Result<[u8; 32], KeyServerFault> {
        self.connection(server)?.open_oblivious(name)
    }

    fn evaluator(&self, server: &str, name: &str) -> Arc<dyn Evaluate> {
        let (joined, server, name) = (Joined(self.0.clone()), server.to_owned(), name.to_owned());
        Arc::new(Evaluator { joined, server, name, connection: Mutex::default(), down: Mutex::default() })
    }
}

impl Joined {
    fn connection(&self, server: &str) -> Result<Connection, KeyServerFault> {
        // There is no place for an identity, so this host has joined no server.
        let all = self.0.servers().map_err(|_| KeyServerFault::NotJoined)?;
        Connection::new(&all, server).map_err(unanswered)
    }
}

/// An evaluating key. A call waits at most a minute, not counting the network.
struct Evaluator {
    joined: Joined,
    server: String,
    name: String,
    connection: Mutex<Option<Connection>>,
    /// since when the server is unreachable, and why
    down: Mutex<Option<(Instant, KeyServerFault)>>,
}

impl Evaluator {
    fn connection(&self) -> Result<Connection, KeyServerFault> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = &*connection {
            return Ok(connection.clone());
        }
        let made = self.joined.connection(&self.server)?;
        Ok(connection.insert(made).clone())
    }

    fn ask(&self, blinded: &[Element]) -> Result<Evaluation, KeyServerFault> {
        let connection = self.connection()?;
        let begun = Instant::now();
        let end = begun + LIMITED_MAX;
        let mut is_first = true;
        loop {
            let fault = match connection.evaluate(&self.name, blinded) {
                Ok(evaluation) => return Ok(evaluation),
                Err(KeyServerFault::Limited { again }) => {
                    let pause = again.min(PAUSE_MAX);
                    if Instant::now() + pause > end {
                        return Err(KeyServerFault::Limited { again });
                    }
                    std::thread::sleep(pause);
                    continue;
                }
                Err(fault) => fault,
            };
            // Only use shows that a connection is older than the server's restart.
            let may_be_stale = matches!(fault, KeyServerFault::Unreachable { .. }) && begun.elapsed() < STALE_WITHIN;
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

    fn evaluate(&self, blinded: &[Element]) -> Result<Evaluation, KeyServerFault> {
        let down = || self.down.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((until, fault)) = &*down()
            && Instant::now() < *until
        {
            return Err(fault.clone());
        }
        let begun = Instant::now();
        let asked = self.ask(blinded);
        let was_down = match &asked {
            Err(fault @ KeyServerFault::Unreachable { .. }) => {
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
