//! The calls of hosts, except for sessions. The guard has checked their callers. Work that waits for the disk runs on
//! threads of its own, and never waits for a client.

mod keys;

use crate::alerts::Finding;
use crate::authority;
use crate::caller::{CallPermit, Caller, Peer};
use crate::counts::Counts;
use crate::files::PUTS_MAX;
use crate::keys::Master;
use crate::keys::evaluate::Evaluations;
use crate::metrics::Metrics;
use crate::origin::Office;
use crate::refused::{Lost, Refused};
use crate::state::{NotJoined, State};
use crate::threads::{Pace, Threads, Turns};
use crate::vault::{Rows, Standing};
use crate::vaults::Vaults;
use lamassu_anchor::Revision;
use lamassu_anchor::head::Head;
use lamassu_format::header::VaultId;
use lamassu_keys::unix_now;
use lamassu_lease::{GrantNo, SessionId};
use lamassu_rpc::convert::{self, Batch, Counted, Garbled};
use lamassu_rpc::limits::RULE_KEY;
use lamassu_rpc::proto::{self, alerts_server::Alerts, anchors_server::Anchors, hosts_server::Hosts};
use lamassu_rpc::{CHANGES_MAX, FINDINGS_MAX, MESSAGE_MAX, REPORT_MAX, SESSION_MESSAGE_MAX};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Request, Response, Status, Streaming};

/// Messages that may be queued for a client.
const BEHIND_MAX: usize = 8;
/// How long a client may take to send its next message, or to receive one.
pub(crate) const IDLE_MAX: Duration = Duration::from_secs(30);
/// Limits for one host: anchors that are being sent, and anchors that are being received.
const ROWS_AT_ONCE: usize = 4;
const PUTS_AT_ONCE: usize = 2;

pub(crate) type Done<T> = Result<Response<T>, Status>;
pub(crate) type Outgoing<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What all calls use.
#[derive(Clone)]
pub struct Service {
    /// the durable state
    pub state: Arc<State>,
    /// the vaults
    pub vaults: Arc<Vaults>,
    /// reports a change that could not be made durable: the server must end
    pub failed: mpsc::UnboundedSender<String>,
    /// true once the server is to end: sessions are released, and reconnect to the next server
    pub stopping: watch::Receiver<bool>,
    /// the right to serve
    pub office: Arc<Office>,
    /// anchors that are being sent, by the key of the host
    pub rows: Counts<Arc<[u8]>>,
    /// anchors that are being received, by the key of the host
    pub puts: Counts<Arc<[u8]>>,
    /// anchors that are being received
    pub all_puts: Counts<()>,
    /// the master key, if keys are kept
    pub master: Option<Arc<Master>>,
    /// what hosts have evaluated
    pub evaluations: Arc<Evaluations>,
    /// the server's counters
    pub metrics: Metrics,
    /// the threads of its calls
    pub threads: Threads,
}

impl Service {
    /// The service, for tonic. Each service has its limit on a message: a longer one is not read.
    pub fn hosts(&self) -> proto::hosts_server::HostsServer<Service> {
        proto::hosts_server::HostsServer::new(self.clone()).max_decoding_message_size(4096)
    }

    /// The service, for tonic.
    pub fn sessions(&self) -> proto::sessions_server::SessionsServer<Service> {
        proto::sessions_server::SessionsServer::new(self.clone()).max_decoding_message_size(SESSION_MESSAGE_MAX)
    }

    /// The service, for tonic.
    pub fn anchors(&self) -> proto::anchors_server::AnchorsServer<Service> {
        let anchors = proto::anchors_server::AnchorsServer::new(self.clone());
        anchors.max_decoding_message_size(MESSAGE_MAX).max_encoding_message_size(MESSAGE_MAX)
    }

    /// The service, for tonic.
    pub fn alerts(&self) -> proto::alerts_server::AlertsServer<Service> {
        proto::alerts_server::AlertsServer::new(self.clone()).max_decoding_message_size(REPORT_MAX)
    }

    /// Runs blocking work of a call outside of the runtime's threads. It is short: a client cannot influence how long
    /// it takes.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        place: CallPermit,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Status> {
        self.threads.call(place, work).await
    }

    /// The order of those who use a vault that a host may use.
    pub(crate) fn turns(&self, caller: &Caller, id: &VaultId) -> Result<Arc<Turns>, Status> {
        match self.state.may_use(&caller.key, id) {
            true => Ok(self.threads.turns(*id)),
            false => Err(self.refused(Refused::Unknown)),
        }
    }

    pub(crate) fn internal(&self, error: &dyn std::fmt::Display) -> Status {
        tracing::error!(%error, "a call has failed");
        Status::internal("the server has failed: its log says why")
    }

    pub(crate) fn refused(&self, refused: Refused) -> Status {
        match refused {
            Refused::Unknown => Status::not_found("no anchor of this vault is kept here for this host"),
            Refused::InUse { by } => Status::failed_precondition(by),
            Refused::Restored { waits_for } => Status::data_loss(waits_for.join(", ")),
            Refused::Ended => Status::aborted("the session has ended"),
            Refused::OtherHead => Status::out_of_range("the changes are based on another state"),
            Refused::Known => Status::already_exists("another anchor of this vault is kept here already"),
            Refused::Gone => Status::permission_denied(
                "the server kept a newer anchor of this vault, perhaps, and has lost it: restore a backup, or take this \
                 one, which may be older (`lamassu-server forget` on the server)",
            ),
            Refused::NoAnchor => Status::invalid_argument("the rows are no anchor of this vault"),
            Refused::Nonsense => garbled(Garbled("this server grants leases of whole vaults only")),
            Refused::Policy { rule, what } => {
                let mut with = MetadataMap::new();
                // A rule's name is printable ASCII.
                let rule = rule.parse().unwrap_or_else(|_| MetadataValue::from_static("unnamed"));
                with.insert(RULE_KEY, rule);
                Status::with_metadata(Code::PermissionDenied, what, with)
            }
            Refused::NotGranted => {
                Status::permission_denied("this host may not use the vault: `lamassu-server host grant` lets it")
            }
            Refused::TooMuch(what) => Status::resource_exhausted(what),
            Refused::NotNow => Status::unavailable("the vault is busy"),
            Refused::Failed(error) => self.internal(&error),
            Refused::InDoubt(error) => {
                tracing::error!(%error, "a commit may have been made, or not");
                Status::unavailable("it is unknown whether the change was made: try again")
            }
            Refused::Lost(Lost(error)) => {
                let _ = self.failed.send(error.to_string());
                self.internal(&error)
            }
        }
    }
}

/// The calling host.
pub(crate) fn caller<T>(request: &Request<T>) -> Result<Caller, Status> {
    request.extensions().get::<Caller>().cloned().ok_or_else(|| Status::unauthenticated("unknown client"))
}

/// The call's place among those of its host.
pub(crate) fn place<T>(request: &Request<T>) -> Result<CallPermit, Status> {
    request.extensions().get::<CallPermit>().cloned().ok_or_else(|| Status::unauthenticated("unknown client"))
}

pub(crate) fn garbled(error: Garbled) -> Status {
    Status::invalid_argument(error.to_string())
}

#[tonic::async_trait]
impl Hosts for Service {
    async fn join(&self, request: Request<proto::PublicKey>) -> Done<proto::Joined> {
        let (peer, place) = (request.extensions().get::<Peer>().cloned(), place(&request)?);
        let token = peer.ok_or_else(|| Status::unauthenticated("no certificate"))?.key;
        let spki = request.into_inner().spki;
        if !authority::is_ed25519(&spki) {
            return Err(Status::invalid_argument("this is not an Ed25519 key"));
        }
        let service = self.clone();
        self.blocking(place, move || {
            let used = service.state.use_token(&token, unix_now(), &spki).map_err(|error| service.internal(&error))?;
            let host = used.map_err(|why| match why {
                NotJoined::NoToken => Status::permission_denied("the token was used, or has expired: `lamassu-server enrol` prints another, if necessary after `host revoke`"),
                NotJoined::KnownKey => Status::invalid_argument("this key is known already"),
            })?;
            Ok(Response::new(proto::Joined { host }))
        })
        .await?
    }
}

#[tonic::async_trait]
impl Anchors for Service {
    type RowsStream = Outgoing<proto::SomeRows>;

    async fn rows(&self, request: Request<proto::RowsRequest>) -> Done<Self::RowsStream> {
        let (caller, place) = (caller(&request)?, place(&request)?);
        let of = request.get_ref();
        let (id, session) = (convert::vault(&of.vault).map_err(garbled)?, SessionId(of.session));
        let since = some_head(&of.since)?;
        let turn = self.rows.one_more(&caller.key, ROWS_AT_ONCE);
        let turn = turn.ok_or_else(|| Status::resource_exhausted("too many at once"))?;
        let (service, turns) = (self.clone(), self.turns(&caller, &id)?);
        let rows = self
            .threads
            .call_of((&turns, place), move || service.vaults.vault_for(&caller, &id)?.rows(&caller, session, since));
        let Rows { head, since, table, mut standing } = rows.await?.map_err(|refused| self.refused(refused))?;
        let (some, stream) = mpsc::channel(BEHIND_MAX);
        // A thread of its own: a client influences how long it takes, within bounds.
        let runtime = tokio::runtime::Handle::current();
        let sends = move || {
            let _turn = turn;
            let (mut batch, mut pace) = (Batch::default(), Pace::begin());
            let mut send = |rows: Vec<u8>, is_commit: bool, all: u64| {
                let is_in_pace = pace.moved(rows.len());
                let rows = Ok(proto::SomeRows { head: head.0.to_vec(), rows, is_commit, all });
                runtime
                    .block_on(hand_over(&some, rows, &mut standing))
                    .and_then(|()| if is_in_pace { Ok(()) } else { Err(Gone::Client) })
            };
            let sent = match since {
                Some(commits) => commits.iter().try_for_each(|changes| send(changes.to_vec(), true, 0)),
                None => {
                    let visited = table.visit_all(|space, key, value| match batch.push(space, key, value) {
                        Some(rows) => send(rows, false, 0),
                        None => Ok(()),
                    });
                    let all = batch.all();
                    visited.and_then(|()| send(batch.rest(), false, all))
                }
            };
            // Before its client is told: that may take as long as the client likes.
            drop(table);
            let why = match sent {
                Ok(()) | Err(Gone::Client) => return,
                Err(Gone::Vault) => Status::unavailable("the vault is opened again"),
                Err(Gone::Table(error)) => {
                    tracing::error!(%error, "an anchor cannot be read");
                    Status::internal("the server has failed: its log says why")
                }
            };
            let _ = runtime.block_on(async { tokio::time::timeout(IDLE_MAX, some.send(Err(why))).await });
        };
        let started = std::thread::Builder::new().name("rows".into()).spawn(sends);
        started.map_err(|error| self.internal(&error))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn commit(&self, request: Request<proto::CommitRequest>) -> Done<proto::State> {
        let (caller, place) = (caller(&request)?, place(&request)?);
        let commit = request.into_inner();
        let of = commit.of.ok_or_else(|| garbled(Garbled("no session is named")))?;
        let id = convert::vault(&of.vault).map_err(garbled)?;
        let base = convert::head(&commit.base).map_err(garbled)?;
        let (service, turns) = (self.clone(), self.turns(&caller, &id)?);
        let head = self.threads.call_of((&turns, place), move || {
            let changes = convert::to_changes(&commit.changes, CHANGES_MAX).map_err(garbled)?;
            let begun = Instant::now();
            let by = (SessionId(of.session), GrantNo(commit.grant));
            let done = service.vaults.commit(&id, (&caller, by), base, &changes);
            let head = done.map_err(|refused| service.refused(refused))?;
            service.metrics.committed(changes.len(), begun.elapsed());
            Ok::<_, Status>(head)
        });
        let head: Head = head.await??;
        Ok(Response::new(proto::State { head: head.0.to_vec() }))
    }

    async fn put(&self, request: Request<Streaming<proto::PutRequest>>) -> Done<proto::State> {
        let (caller, place) = (caller(&request)?, place(&request)?);
        let turn = self.puts.one_more(&caller.key, PUTS_AT_ONCE).zip(self.all_puts.one_more(&(), PUTS_MAX));
        let turn = turn.ok_or_else(|| Status::resource_exhausted("too many at once"))?;
        let (mut said, mut pace) = (request.into_inner(), Pace::begin());
        let mut next = async || {
            let message = tokio::time::timeout(IDLE_MAX, said.message()).await;
            let message = message.unwrap_or_else(|_| Err(too_slow()))?;
            let is_in_pace = pace.moved(message.as_ref().map_or(0, |request| request.rows.len()));
            if is_in_pace { Ok(message) } else { Err(too_slow()) }
        };
        let first = next().await?.ok_or_else(|| garbled(Garbled("the stream is empty")))?;
        let id = convert::vault(&first.vault).map_err(garbled)?;
        let known = some_head(&first.head)?;
        let around = match &first.around[..] {
            [] => None,
            around => Some(convert::vault(around).map_err(garbled)?),
        };
        let (to, rows) = mpsc::channel(1);
        let (done, head) = oneshot::channel();
        // One thread has the new anchor from its beginning to its end. So it is this thread that removes the rows, too,
        // if they do not become an anchor: that waits for the disk.
        let service = self.clone();
        let puts = move || {
            let _held = (turn, place);
            let _ = done.send(service.take_anchor(&caller, &id, (known, around), rows));
        };
        let started = std::thread::Builder::new().name("put".into()).spawn(puts);
        started.map_err(|error| self.internal(&error))?;
        let mut some = Some(first);
        while let Some(request) = some {
            // The thread has ended: its answer says why.
            if to.send(Put::Rows(request.rows, request.all)).await.is_err() {
                break;
            }
            some = next().await?;
        }
        let _ = to.send(Put::End).await;
        drop(to);
        let head = head.await.map_err(|_| Status::internal("a thread of the server has ended"))??;
        Ok(Response::new(proto::State { head: head.0.to_vec() }))
    }

    async fn reconcile(&self, request: Request<proto::Known>) -> Done<proto::Wanted> {
        let (caller, place) = (caller(&request)?, place(&request)?);
        let known = request.get_ref();
        let id = convert::vault(&known.vault).map_err(garbled)?;
        let head = some_head(&known.head)?;
        let (service, turns, revision) = (self.clone(), self.turns(&caller, &id)?, Revision(known.revision));
        let wanted =
            self.threads.call_of((&turns, place), move || service.vaults.wants_rows(&caller, &id, revision, head));
        let rows = wanted.await?.map_err(|refused| self.refused(refused))?;
        Ok(Response::new(proto::Wanted { rows }))
    }

    async fn give_up(&self, request: Request<proto::Of>) -> Done<proto::Nothing> {
        let (caller, place) = (caller(&request)?, place(&request)?);
        let of = request.get_ref();
        let (id, session) = (convert::vault(&of.vault).map_err(garbled)?, SessionId(of.session));
        let (service, turns) = (self.clone(), self.turns(&caller, &id)?);
        let given_up = self.threads.call_of((&turns, place), move || service.vaults.give_up(&id, session, &caller));
        given_up.await?.map_err(|refused| self.refused(refused))?;
        Ok(Response::new(proto::Nothing {}))
    }
}

#[tonic::async_trait]
impl Alerts for Service {
    async fn report(&self, request: Request<proto::Findings>) -> Done<proto::Nothing> {
        let (caller, place) = (caller(&request)?, place(&request)?);
        let report = request.into_inner();
        let id = convert::vault(&report.vault).map_err(garbled)?;
        let findings: Option<Vec<_>> = report.events.iter().map(|event| Finding::parse(event)).collect();
        let findings = findings.filter(|findings| findings.len() <= FINDINGS_MAX);
        let findings = findings.ok_or_else(|| garbled(Garbled("a report does not parse, or is too long")))?;
        // A host may send any number: this bound keeps the counter from overflowing.
        let lost = report.lost.min(u32::MAX.into());
        let service = self.clone();
        let taken = self.blocking(place, move || {
            // No session is needed: it may have ended because of what was found.
            if !service.state.may_use(&caller.key, &id) {
                return Err(service.refused(Refused::NotGranted));
            }
            service.vaults.check_room().map_err(|refused| service.refused(refused))?;
            service.metrics.found(findings.len() as u64 + lost);
            let taken = service.state.take_findings((&id, &caller.name), &findings, lost, unix_now());
            taken.map_err(|error| service.internal(&error))
        });
        taken.await??;
        Ok(Response::new(proto::Nothing {}))
    }
}

impl Service {
    /// Takes an anchor, whose rows arrive one message after the other. If its client goes before its end, it is
    /// undone.
    fn take_anchor(
        &self,
        caller: &Caller,
        id: &VaultId,
        (known, around): (Option<Head>, Option<VaultId>),
        mut rows: mpsc::Receiver<Put>,
    ) -> Result<Head, Status> {
        let mut put = self.vaults.begin_put(caller, id, known, around).map_err(|refused| self.refused(refused))?;
        let mut counted = Counted::default();
        loop {
            match rows.blocking_recv() {
                Some(Put::Rows(rows, all)) => {
                    let rows = convert::to_rows(&rows).map_err(garbled)?;
                    counted.take(rows.len(), all).map_err(garbled)?;
                    put.take(&rows).map_err(|refused| self.refused(refused))?;
                }
                Some(Put::End) => {
                    counted.finish().map_err(garbled)?;
                    return put.finish(caller).map_err(|refused| self.refused(refused));
                }
                None => return Err(Status::cancelled("the client has gone")),
            }
        }
    }
}

/// A message of a client that sends an anchor.
enum Put {
    /// Some rows, and in the last message the number of all.
    Rows(Vec<u8>, u64),
    End,
}

fn too_slow() -> Status {
    Status::deadline_exceeded("the client sent nothing in time, or too little")
}

/// A head that may be absent.
fn some_head(bytes: &[u8]) -> Result<Option<Head>, Status> {
    match bytes {
        [] => Ok(None),
        head => convert::head(head).map(Some).map_err(garbled),
    }
}

/// Sends some rows, unless the vault is used no more: while rows are sent, its table cannot be opened anew.
async fn hand_over<T>(
    to: &mpsc::Sender<T>,
    rows: T,
    standing: &mut watch::Receiver<Standing>,
) -> std::result::Result<(), Gone> {
    tokio::select! {
        biased;
        _ = standing.wait_for(|standing| *standing != Standing::Good) => Err(Gone::Vault),
        sent = tokio::time::timeout(IDLE_MAX, to.send(rows)) => match sent {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(Gone::Client),
        },
    }
}

/// The reason why no more rows are sent.
enum Gone {
    Client,
    Vault,
    Table(lamassu_anchor::AnchorError),
}

impl From<lamassu_anchor::AnchorError> for Gone {
    fn from(error: lamassu_anchor::AnchorError) -> Gone {
        Gone::Table(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_that_reads_slowly_does_not_keep_the_rows_of_a_vault_that_has_failed() {
        let (to, _slow) = mpsc::channel(1);
        let (vault, mut standing) = watch::channel(Standing::Good);
        assert!(hand_over(&to, 1, &mut standing).await.is_ok());
        // The client does not read the second one.
        let fails = async {
            tokio::task::yield_now().await;
            vault.send_replace(Standing::InDoubt);
        };
        let (sent, ()) = tokio::join!(hand_over(&to, 2, &mut standing), fails);
        assert!(matches!(sent, Err(Gone::Vault)));
    }
}
