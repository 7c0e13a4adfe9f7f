//! What an administrator asks: of a server that runs, by a socket in its directory that nobody else may open; of one
//! that does not, by its state. One line of JSON each way.

use crate::authority::Authority;
use crate::config::Config;
use crate::service::seconds;
use crate::state::{Pending, State, check_name};
use crate::vaults::{Lost, Refused, Vaults};
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_rpc::identity::HostKey;
use lamassu_rpc::token::Token;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The socket's name in the server's directory.
pub const SOCKET: &str = "admin.sock";
/// Longest request or answer.
pub const LINE_MAX: u64 = 16 << 20;
/// How long a server that starts or ends may have the directory without answering.
const STARTING: Duration = Duration::from_secs(5);
const AGAIN_AFTER: Duration = Duration::from_millis(20);

/// What is asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "request")]
pub enum Request {
    /// A token for a host.
    Enrol {
        /// its name
        host: String,
        /// vaults that it may use, hex
        vaults: BTreeSet<String>,
    },
    /// All hosts.
    Hosts,
    /// A host may do nothing any more.
    Revoke {
        /// its name
        host: String,
    },
    /// A host may use a vault, or no longer.
    Grant {
        /// its name
        host: String,
        /// the vault, hex
        vault: String,
        /// whether it may
        may: bool,
    },
    /// The anchor of a vault that nobody uses is put away.
    Forget {
        /// the vault, hex
        vault: String,
    },
    /// Which vaults are in use, by whom.
    Status,
}

/// What is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum Answer {
    /// A token: the line for the host.
    Token {
        /// the line
        line: String,
        /// s since 1970
        until: u64,
    },
    /// All hosts.
    Hosts {
        /// by name
        hosts: Vec<ShownHost>,
    },
    /// It is done.
    Done,
    /// Which vaults are in use.
    Status {
        /// a server runs
        is_running: bool,
        /// the digest of its authority's certificate, hex
        authority: String,
        /// each
        vaults: Vec<ShownVault>,
    },
    /// It is not done.
    Failed {
        /// why
        message: String,
        /// with which exit code
        code: u8,
    },
}

/// A host, for people.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShownHost {
    /// its name
    pub host: String,
    /// s since 1970
    pub joined: u64,
    /// it may do nothing any more
    pub is_revoked: bool,
    /// vaults that it may use, hex
    pub vaults: BTreeSet<String>,
}

/// A vault, for people.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShownVault {
    /// its id, hex
    pub vault: String,
    /// the hosts that have sessions of it
    pub hosts: Vec<String>,
}

/// What answers.
#[derive(Clone)]
pub struct Administered {
    /// what is durable
    pub state: Arc<State>,
    /// who signs
    pub authority: Arc<Authority>,
    /// the configuration
    pub config: Config,
    /// those that are served
    pub vaults: Option<Arc<Vaults>>,
}

impl Administered {
    /// Of a server that does not run.
    ///
    /// # Errors
    /// [`ServerError::Running`]; those of the state and the authority.
    pub fn of(dir: &Path) -> Result<Administered> {
        crate::run::check_dir(dir)?;
        Ok(Administered {
            state: Arc::new(State::open(dir)?),
            authority: Arc::new(Authority::read(dir)?),
            config: Config::read(dir)?,
            vaults: None,
        })
    }

    /// Answers.
    ///
    /// # Errors
    /// [`ServerError`].
    pub fn answer(&self, request: Request) -> Result<Answer> {
        match request {
            Request::Enrol { host, vaults } => self.enrol(host, vaults),
            Request::Hosts => {
                let shown = |(host, known): (&String, &crate::state::Host)| ShownHost {
                    host: host.clone(),
                    joined: known.joined,
                    is_revoked: known.is_revoked,
                    vaults: known.vaults.clone(),
                };
                Ok(Answer::Hosts { hosts: self.state.hosts().iter().map(shown).collect() })
            }
            Request::Revoke { host } => {
                let had_token = self.state.cancel_tokens(&host)?;
                match self.state.change_host(&host, |known| known.is_revoked = true) {
                    Err(ServerError::NoHost { .. }) if had_token => {}
                    done => done?,
                }
                if let Some(vaults) = &self.vaults {
                    vaults.end_sessions_of(&host, None).map_err(|Lost(error)| error)?;
                }
                tracing::info!(%host, "a host was revoked");
                Ok(Answer::Done)
            }
            Request::Grant { host, vault, may } => {
                let id = checked(&vault)?;
                self.state.grant(&host, &HEXLOWER.encode(&id), may)?;
                if let Some(vaults) = self.vaults.as_ref().filter(|_| !may) {
                    vaults.end_sessions_of(&host, Some(&id)).map_err(|Lost(error)| error)?;
                }
                tracing::info!(%host, %vault, may, "what a host may use was changed");
                Ok(Answer::Done)
            }
            Request::Forget { vault } => {
                let id = checked(&vault)?;
                let vaults = self.vaults.as_ref().ok_or(ServerError::NotRunning)?;
                let vault = HEXLOWER.encode(&id);
                vaults.forget(&id).map_err(|refused| match refused {
                    Refused::Failed(error) | Refused::Lost(Lost(error)) => error,
                    Refused::InUse { by } => ServerError::InUse { vault: vault.clone(), by },
                    _ => ServerError::NoVault { id: vault.clone() },
                })?;
                tracing::info!(%vault, "the anchor of a vault was put away");
                Ok(Answer::Done)
            }
            Request::Status => {
                let vaults = self.vaults.iter().flat_map(|vaults| vaults.in_use());
                let shown = |(id, hosts): ([u8; 16], _)| ShownVault { vault: HEXLOWER.encode(&id), hosts };
                Ok(Answer::Status {
                    is_running: self.vaults.is_some(),
                    authority: HEXLOWER.encode(&self.authority.digest()),
                    vaults: vaults.map(shown).collect(),
                })
            }
        }
    }

    fn enrol(&self, host: String, vaults: BTreeSet<String>) -> Result<Answer> {
        check_name(&host)?;
        let vaults = vaults.iter().map(|vault| Ok(HEXLOWER.encode(&checked(vault)?))).collect::<Result<_>>()?;
        if self.state.host(&host).is_some_and(|known| !known.is_revoked) {
            return Err(ServerError::HostExists { name: host });
        }
        let token =
            Token::new(&self.config.reached_at(), self.authority.digest()).map_err(|_| ServerError::NoRandom)?;
        let until = seconds() + self.config.token_hours * 3600;
        let key = HostKey::of(&token.key())?;
        self.state.put_token(&key.public(), &Pending { host, until, vaults }, seconds())?;
        Ok(Answer::Token { line: token.line().to_string(), until })
    }
}

/// A vault's id, as people write it.
fn checked(vault: &str) -> Result<[u8; 16]> {
    let plain = vault.replace('-', "").to_ascii_lowercase();
    let id = HEXLOWER.decode(plain.as_bytes()).ok().and_then(|id| id.try_into().ok());
    id.ok_or_else(|| ServerError::Garbled {
        detail: format!("{vault:?} is no id of a vault: `lamassu info DIR` shows it"),
    })
}

/// Asks the server of a directory, whether it runs or not.
///
/// # Errors
/// [`ServerError`].
pub fn ask(dir: &Path, request: Request) -> Result<Answer> {
    crate::run::check_dir(dir)?;
    let until = Instant::now() + STARTING;
    loop {
        if let Ok(stream) = UnixStream::connect(dir.join(SOCKET)) {
            return ask_running(stream, dir, &request);
        }
        match Administered::of(dir) {
            // It is starting, or ending.
            Err(ServerError::Running { .. }) if Instant::now() < until => std::thread::sleep(AGAIN_AFTER),
            administered => return administered?.answer(request),
        }
    }
}

fn ask_running(mut stream: UnixStream, dir: &Path, request: &Request) -> Result<Answer> {
    let path = dir.join(SOCKET);
    let failed = ServerError::file("ask by", &path);
    let mut line = serde_json::to_vec(&request).unwrap_or_default();
    line.push(b'\n');
    stream.write_all(&line).map_err(&failed)?;
    let mut answer = String::new();
    BufReader::new(stream.take(LINE_MAX)).read_line(&mut answer).map_err(&failed)?;
    let answer = serde_json::from_str(&answer).map_err(|error| ServerError::Garbled { detail: error.to_string() })?;
    match answer {
        Answer::Failed { message, code } => Err(ServerError::Told { message, code }),
        answer => Ok(answer),
    }
}
