//! Requests of an administrator. A running server answers them through a socket in its directory, which only its owner
//! may open. Otherwise the state in the directory answers them. A request and its answer are one line of JSON each.

pub mod keys;
pub mod policy;

use self::keys::{KeyAnswer, KeyRequest};
use self::policy::{PolicyAnswer, PolicyRequest};
use crate::administered::Administered;
use crate::alerts::{Alert, Which, printable};
use crate::audit::{AuditEntry, ChainEnd, ChainedEntry, Excerpt};
use crate::backup::{self, Made};
use crate::check::{self, Found};
use crate::refused::{Lost, Refused};
use crate::state::{ALERTS_AT_ONCE, Pending, check_name};
use crate::{Result, ServerError, dir};
use data_encoding::HEXLOWER;
use lamassu_format::header::VaultId;
use lamassu_keys::unix_now;
use lamassu_rpc::identity::HostKey;
use lamassu_rpc::token::Token;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The socket's name in the server's directory.
pub const SOCKET: &str = "admin.sock";
/// Longest request. An answer is as long as it has to be: its sender is trusted.
pub const LINE_MAX: u64 = 16 << 20;
/// How long a server that starts or ends may hold the directory without answering.
const STARTING: Duration = Duration::from_secs(5);
const AGAIN_AFTER: Duration = Duration::from_millis(20);

/// A request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "request")]
pub enum Request {
    /// A token for a host.
    Enrol {
        /// the host's name
        host: String,
        /// vaults that it may use, hex
        vaults: BTreeSet<String>,
    },
    /// All hosts.
    Hosts,
    /// Revokes a host.
    Revoke {
        /// the host's name
        host: String,
    },
    /// Grants a host the use of a vault, or ends the grant.
    Grant {
        /// the host's name
        host: String,
        /// the vault, hex
        vault: String,
        /// true to grant, false to end the grant
        may: bool,
    },
    /// Retires the anchor of a vault that is not in use.
    Forget {
        /// the vault, hex
        vault: String,
    },
    /// The vaults in use, and their hosts.
    Status,
    /// Entries of the audit log.
    Audit {
        /// only entries after this number
        after: u64,
        /// at most this many, or as many as fit into an answer
        most: usize,
    },
    /// Alerts.
    Alerts {
        /// only alerts after this number
        after: u64,
    },
    /// Marks alerts as known to an administrator.
    Acknowledge {
        /// the alerts
        alerts: Which,
        /// the administrator's note
        note: String,
    },
    /// Closes alerts.
    Close {
        /// the alerts
        alerts: Which,
    },
    /// Keys that are kept for hosts.
    Keys {
        /// the request about keys
        asked: KeyRequest,
    },
    /// The policy.
    Policy {
        /// the request about the policy
        asked: PolicyRequest,
    },
    /// Checks that the server's data is consistent.
    Check,
    /// A backup: the answer is the stream that [`crate::backup`] describes.
    Backup,
}

/// Longest note on an alert.
const NOTE_MAX: usize = 200;
/// Entries of the audit log in one answer.
const ENTRIES_MAX: usize = 10_000;

/// An answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum Answer {
    /// A token, as the line that the host needs.
    Token {
        /// the line
        line: String,
        /// end of validity, seconds since 1970
        until: u64,
    },
    /// All hosts.
    Hosts {
        /// by name
        hosts: Vec<ShownHost>,
    },
    /// The request was carried out.
    Done,
    /// The vaults in use.
    Status {
        /// whether a server runs
        is_running: bool,
        /// the digest of its authority's certificate, hex
        authority: String,
        /// all vaults
        vaults: Vec<ShownVault>,
    },
    /// Entries of the audit log.
    Audit {
        /// in order
        excerpt: Excerpt,
    },
    /// Alerts.
    Alerts {
        /// in order; empty: there are no more
        alerts: Vec<Alert>,
    },
    /// How many alerts were changed.
    Changed {
        /// their number
        count: usize,
    },
    /// Keys that are kept for hosts.
    Keys {
        /// the answer about keys
        told: KeyAnswer,
    },
    /// The policy.
    Policy {
        /// the answer about the policy
        told: PolicyAnswer,
    },
    /// The result of a check.
    Checked {
        /// what is consistent
        good: Vec<String>,
        /// what is wrong
        bad: Vec<String>,
    },
    /// The request failed.
    Failed {
        /// the reason
        message: String,
        /// the exit code
        code: u8,
    },
}

/// A host, as it is shown.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShownHost {
    /// its name
    pub host: String,
    /// time of joining, seconds since 1970
    pub joined: u64,
    /// whether it was revoked
    pub is_revoked: bool,
    /// vaults that it may use, hex
    pub vaults: BTreeSet<String>,
}

/// A vault, as it is shown.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShownVault {
    /// its id, hex
    pub vault: String,
    /// the hosts that have sessions of it
    pub hosts: Vec<String>,
    /// For a vault restored from a backup: the hosts that may have newer rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<BTreeSet<String>>,
    /// For a dataset: the vault that it lies in, hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lies_in: Option<String>,
}

impl Administered {
    /// Answers a request.
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
                match self.state.revoke(&host) {
                    Err(ServerError::NoHost { .. }) if had_token => {}
                    done => done?,
                }
                if let Some(vaults) = &self.vaults {
                    vaults.rights_have_changed().map_err(|Lost(error)| error)?;
                }
                Ok(Answer::Done)
            }
            Request::Grant { host, vault, may } => {
                let id = checked(&vault)?;
                self.state.grant(&host, &id.to_string(), may)?;
                if let Some(vaults) = self.vaults.as_ref().filter(|_| !may) {
                    vaults.rights_have_changed().map_err(|Lost(error)| error)?;
                }
                Ok(Answer::Done)
            }
            Request::Forget { vault } => {
                let id = checked(&vault)?;
                let vaults = self.vaults.as_ref().ok_or(ServerError::NotRunning)?;
                let vault = id.to_string();
                vaults.forget(&id).map_err(|refused| match refused {
                    Refused::Failed(error) | Refused::Lost(Lost(error)) => error,
                    Refused::InUse { by } => ServerError::InUse { vault: vault.clone(), by },
                    _ => ServerError::NoVault { id: vault.clone() },
                })?;
                Ok(Answer::Done)
            }
            Request::Status => {
                // Those that no host has used since the server's start, too.
                let kept = self.vaults.iter().map(|_| self.state.kept()).collect::<Result<Vec<_>>>()?;
                let mut vaults: BTreeMap<_, _> = kept.into_iter().flatten().map(|id| (id, Vec::new())).collect();
                vaults.extend(self.vaults.iter().flat_map(|vaults| vaults.in_use()));
                let shown = |(id, hosts): (VaultId, _)| {
                    let waits_for = self.state.waits_for(&id);
                    let lies_in = self.state.around(&id).map(|around| around.to_string());
                    ShownVault { vault: id.to_string(), hosts, waits_for, lies_in }
                };
                Ok(Answer::Status {
                    is_running: self.vaults.is_some(),
                    authority: HEXLOWER.encode(&self.authority.digest()),
                    vaults: vaults.into_iter().map(shown).collect(),
                })
            }
            Request::Audit { after, most } => {
                Ok(Answer::Audit { excerpt: self.state.audit(after, most.min(ENTRIES_MAX))? })
            }
            Request::Alerts { after } => Ok(Answer::Alerts { alerts: self.state.alerts(after, ALERTS_AT_ONCE)? }),
            Request::Acknowledge { alerts, note } => {
                if note.len() > NOTE_MAX {
                    return Err(ServerError::Garbled { detail: format!("a note has at most {NOTE_MAX} bytes") });
                }
                Ok(Answer::Changed { count: self.state.acknowledge(&chosen(alerts)?, &printable(&note), unix_now())? })
            }
            Request::Close { alerts } => Ok(Answer::Changed { count: self.state.close(&chosen(alerts)?)? }),
            Request::Keys { asked } => keys::answer(self, asked).map(|told| Answer::Keys { told }),
            Request::Policy { asked } => policy::answer(self, asked).map(|told| Answer::Policy { told }),
            Request::Check => check::check(self).map(|Found { good, bad }| Answer::Checked { good, bad }),
            // A backup is not one line: the caller that handles requests sends its stream.
            Request::Backup => Err(ServerError::NotRunning),
        }
    }

    fn enrol(&self, host: String, vaults: BTreeSet<String>) -> Result<Answer> {
        check_name(&host)?;
        let vaults = vaults.iter().map(|vault| Ok(checked(vault)?.to_string())).collect::<Result<_>>()?;
        if self.state.host(&host).is_some_and(|known| !known.is_revoked) {
            return Err(ServerError::HostExists { name: host });
        }
        let token =
            Token::new(&self.config.reached_at(), self.authority.digest()).map_err(|_| ServerError::NoRandom)?;
        let until = unix_now() + self.config.token_hours * 3600;
        let key = HostKey::of(&token.key())?;
        self.state.put_token(&key.public(), &Pending { host, until, vaults }, unix_now())?;
        Ok(Answer::Token { line: token.line().to_string(), until })
    }
}

/// A vault's id as people write it, in the form that answers use.
///
/// # Errors
/// [`ServerError::Garbled`].
pub fn id_of(vault: &str) -> Result<String> {
    checked(vault).map(|id| id.to_string())
}

/// Alerts, as people name them.
fn chosen(alerts: Which) -> Result<Which> {
    match alerts {
        Which::All { vault } => Ok(Which::All { vault: vault.as_deref().map(id_of).transpose()? }),
        numbers => Ok(numbers),
    }
}

/// Parses a vault's id.
fn checked(vault: &str) -> Result<VaultId> {
    let plain = vault.replace('-', "").to_ascii_lowercase();
    VaultId::of_hex(plain).ok_or_else(|| ServerError::Garbled {
        detail: format!("{vault:?} is no id of a vault: `lamassu info DIR` shows it"),
    })
}

/// Asks the server of a directory, whether it runs or not.
///
/// # Errors
/// [`ServerError`].
pub fn ask(dir: &Path, request: Request) -> Result<Answer> {
    match Asked::of(dir)? {
        Asked::Running(stream) => ask_running(stream, dir, &request),
        Asked::Directory(administered) => administered.answer(request),
    }
}

/// The side that answers a request.
enum Asked {
    Running(UnixStream),
    Directory(Box<Administered>),
}

impl Asked {
    fn of(dir: &Path) -> Result<Asked> {
        dir::check_dir(dir)?;
        let until = Instant::now() + STARTING;
        loop {
            if let Ok(stream) = UnixStream::connect(dir.join(SOCKET)) {
                return Ok(Asked::Running(stream));
            }
            match Administered::of(dir) {
                // The server is starting or ending.
                Err(ServerError::Running { .. }) if Instant::now() < until => std::thread::sleep(AGAIN_AFTER),
                administered => return Ok(Asked::Directory(Box::new(administered?))),
            }
        }
    }
}

/// Makes a backup of a server's directory, whether a server runs on it or not, as a new directory.
///
/// # Errors
/// [`ServerError`].
pub fn back_up(dir: &Path, to: &Path) -> Result<Made> {
    match Asked::of(dir)? {
        Asked::Running(mut stream) => {
            send(&mut stream, dir, &Request::Backup)?;
            backup::receive(&mut BufReader::new(stream), to)
        }
        Asked::Directory(administered) => {
            let (sends, receives) = UnixStream::pair().map_err(ServerError::file("make a socket for", dir))?;
            std::thread::scope(|scope| {
                let sent = scope.spawn(move || backup::send(&administered, &mut BufWriter::new(sends)));
                let received = backup::receive(&mut BufReader::new(receives), to);
                // The error of the sending side, if that failed.
                match sent.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
                    Err(error) if !matches!(error, ServerError::Backup { .. }) => Err(error),
                    _ => received,
                }
            })
        }
    }
}

/// Reads and verifies the audit log; `each` gets its entries. Returns the end of the chain.
///
/// # Errors
/// [`ServerError::Chain`]; those of `each`.
pub fn read_audit(dir: &Path, mut each: impl FnMut(&ChainedEntry, &AuditEntry) -> Result<()>) -> Result<ChainEnd> {
    let mut place = ChainEnd::default();
    loop {
        let Answer::Audit { excerpt } = ask(dir, Request::Audit { after: place.number, most: ENTRIES_MAX })? else {
            return Err(ServerError::Garbled { detail: "an answer that was not asked for".into() });
        };
        let (next, entries) = excerpt.verified(excerpt.begins.unwrap_or(place))?;
        excerpt.entries.iter().zip(&entries).try_for_each(|(kept, entry)| each(kept, entry))?;
        if entries.is_empty() {
            return Ok(next);
        }
        place = next;
    }
}

/// All alerts, in order.
///
/// # Errors
/// [`ServerError`]; those of `each`.
pub fn read_alerts(dir: &Path, mut each: impl FnMut(Alert) -> Result<()>) -> Result<()> {
    let mut after = 0;
    loop {
        let Answer::Alerts { alerts } = ask(dir, Request::Alerts { after })? else {
            return Err(ServerError::Garbled { detail: "an answer that was not asked for".into() });
        };
        let Some(last) = alerts.last() else { return Ok(()) };
        after = last.number;
        alerts.into_iter().try_for_each(&mut each)?;
    }
}

fn send(stream: &mut UnixStream, dir: &Path, request: &Request) -> Result<()> {
    let mut line = serde_json::to_vec(request).unwrap_or_default();
    line.push(b'\n');
    stream.write_all(&line).map_err(ServerError::file("ask by", &dir.join(SOCKET)))
}

fn ask_running(mut stream: UnixStream, dir: &Path, request: &Request) -> Result<Answer> {
    send(&mut stream, dir, request)?;
    let path = dir.join(SOCKET);
    let failed = ServerError::file("ask by", &path);
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).map_err(&failed)?;
    if !answer.ends_with('\n') {
        return Err(ServerError::Unanswered);
    }
    let answer = serde_json::from_str(&answer).map_err(|error| ServerError::Garbled { detail: error.to_string() })?;
    match answer {
        Answer::Failed { message, code } => Err(ServerError::Told { message, code }),
        answer => Ok(answer),
    }
}
