//! The calls of hosts. Who calls is looked up for each; what waits for the disk runs on a thread of its own.

use crate::accept::Peer;
use crate::authority::Authority;
use crate::state::{Host, State};
use crate::vaults::{Line, Refused, Vault, Vaults};
use data_encoding::HEXLOWER;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::Change;
use lamassu_lease::{Reply, SessionId};
use lamassu_rpc::convert::{self, Garbled};
use lamassu_rpc::proto::{self, anchors_server::Anchors, hosts_server::Hosts};
use lamassu_rpc::{MESSAGE_MAX, ROWS_MAX};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

/// Messages that a client may be behind with.
const BEHIND_MAX: usize = 8;

type Done<T> = Result<Response<T>, Status>;
type Outgoing<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What all calls use.
#[derive(Clone)]
pub struct Service {
    /// what is durable
    pub state: Arc<State>,
    /// the vaults
    pub vaults: Arc<Vaults>,
    /// who signs
    pub authority: Arc<Authority>,
    /// how long a host's certificate is good
    pub certificate_days: u64,
    /// The server must end: something could not be made durable.
    pub failed: mpsc::UnboundedSender<String>,
    /// True once the server is to end: sessions are let go of, and come back to the next one.
    pub stopping: watch::Receiver<bool>,
}

/// Now, in s since 1970.
pub fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl Service {
    /// The services, for tonic.
    pub fn hosts(&self) -> proto::hosts_server::HostsServer<Service> {
        proto::hosts_server::HostsServer::new(self.clone()).max_decoding_message_size(4096)
    }

    /// The services, for tonic.
    pub fn anchors(&self) -> proto::anchors_server::AnchorsServer<Service> {
        let anchors = proto::anchors_server::AnchorsServer::new(self.clone());
        anchors.max_decoding_message_size(MESSAGE_MAX).max_encoding_message_size(MESSAGE_MAX)
    }

    /// What does not belong to the runtime's threads.
    async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Status> {
        tokio::task::spawn_blocking(work).await.map_err(|_| Status::internal("a thread of the server has ended"))
    }

    /// The host that calls, if it is one, and the same that has joined.
    async fn host<T>(&self, request: &Request<T>) -> Result<(String, Host), Status> {
        let peer = request.extensions().get::<Peer>().ok_or_else(|| Status::unauthenticated("no certificate"))?;
        let Some(name) = peer.host.clone() else {
            return Err(Status::permission_denied("with a token a host can join, and nothing else"));
        };
        let (state, key) = (self.state.clone(), HEXLOWER.encode(&peer.key));
        let found = Service::blocking(move || state.host(&name).map(|host| (name, host))).await?;
        match found.map_err(|error| self.internal(&error))? {
            (name, Some(host)) if host.key == key && !host.is_revoked => Ok((name, host)),
            (name, _) => Err(Status::permission_denied(format!("host {name} was revoked, or has joined anew"))),
        }
    }

    /// The same, for a vault that it may use.
    async fn host_of<T>(&self, request: &Request<T>, vault: &[u8; 16]) -> Result<String, Status> {
        let (name, host) = self.host(request).await?;
        may_use(&host, vault)?;
        Ok(name)
    }

    fn internal(&self, error: &dyn std::fmt::Display) -> Status {
        tracing::error!(%error, "a call has failed");
        Status::internal("the server has failed: its log says why")
    }

    fn refused(&self, refused: Refused) -> Status {
        match refused {
            Refused::Unknown => Status::not_found("no anchor of this vault is kept here for this host"),
            Refused::InUse { by } => Status::failed_precondition(by),
            Refused::Ended => Status::aborted("the session has ended"),
            Refused::OtherHead => Status::out_of_range("the changes go on from another state"),
            Refused::Known => Status::already_exists("an anchor of this vault is kept here already"),
            Refused::NoAnchor => Status::invalid_argument("the rows are no anchor of this vault"),
            Refused::Failed(error) => {
                // What could not be made durable may be in memory: a server that starts anew knows what is.
                let _ = self.failed.send(error.to_string());
                self.internal(&error)
            }
        }
    }
}

/// Which vaults are kept here is not for everybody to know: one that a host may not use is unknown to it.
fn may_use(host: &Host, vault: &[u8; 16]) -> Result<(), Status> {
    match host.vaults.contains(&HEXLOWER.encode(vault)) {
        true => Ok(()),
        false => Err(Status::not_found("no anchor of this vault is kept here for this host")),
    }
}

fn garbled(error: Garbled) -> Status {
    Status::invalid_argument(error.to_string())
}

#[tonic::async_trait]
impl Hosts for Service {
    async fn join(&self, request: Request<proto::PublicKey>) -> Done<proto::Certificate> {
        let peer = request.extensions().get::<Peer>().cloned();
        let peer = peer.filter(|peer| peer.host.is_none());
        let token = peer.ok_or_else(|| Status::permission_denied("this host has joined already"))?.key;
        let (service, spki) = (self.clone(), request.into_inner().spki);
        Service::blocking(move || {
            // Before the token is used up.
            service.authority.host("any", &spki, 1).map_err(|error| Status::invalid_argument(error.to_string()))?;
            let used = service.state.use_token(&token, seconds(), &spki).map_err(|error| service.internal(&error))?;
            let (name, _) = used.ok_or_else(|| Status::permission_denied("the token was used, or its time is over"))?;
            tracing::info!(host = %name, "a host has joined");
            service.certificate(&name, &spki)
        })
        .await?
    }

    async fn renew(&self, request: Request<proto::PublicKey>) -> Done<proto::Certificate> {
        let (name, host) = self.host(&request).await?;
        let spki = request.into_inner().spki;
        if HEXLOWER.encode(&spki) != host.key {
            return Err(Status::permission_denied("another key needs another token"));
        }
        let service = self.clone();
        Service::blocking(move || service.certificate(&name, &spki)).await?
    }
}

impl Service {
    fn certificate(&self, name: &str, spki: &[u8]) -> Done<proto::Certificate> {
        let made = self.authority.host(name, spki, self.certificate_days);
        let (certificate, expires) = made.map_err(|error| self.internal(&error))?;
        Ok(Response::new(proto::Certificate { certificate: certificate.to_vec(), host: name.into(), expires }))
    }
}

#[tonic::async_trait]
impl Anchors for Service {
    type AttendStream = Outgoing<proto::Down>;
    type RowsStream = Outgoing<proto::SomeRows>;

    async fn attend(&self, request: Request<Streaming<proto::Up>>) -> Done<Self::AttendStream> {
        let (name, host) = self.host(&request).await?;
        let mut said = request.into_inner();
        let first = said.message().await?.and_then(|up| up.said);
        let (replies, mut answers) = mpsc::unbounded_channel::<Reply>();
        let (vault, begun, first) = match first {
            Some(proto::up::Said::Begin(begin)) => {
                let id = convert::vault(&begin.vault).map_err(garbled)?;
                let mode = convert::to_mode(begin.mode).map_err(garbled)?;
                may_use(&host, &id)?;
                let (service, name) = (self.clone(), name.clone());
                let begun = Service::blocking(move || {
                    let vault = service.vaults.vault(&id)?;
                    let begun = vault.begin(&name, mode, SessionId(begin.replaces), replies)?;
                    Ok((vault, begun))
                });
                let (vault, begun) = begun.await?.map_err(|refused| self.refused(refused))?;
                (vault, begun, None)
            }
            Some(proto::up::Said::Resume(resume)) => {
                let of = resume.of.clone().ok_or_else(|| garbled(Garbled("no session is named")))?;
                let id = convert::vault(&of.vault).map_err(garbled)?;
                may_use(&host, &id)?;
                let (service, name) = (self.clone(), name.clone());
                let begun = Service::blocking(move || {
                    let vault = service.vaults.vault(&id)?;
                    let begun = vault.resumes(&name, SessionId(of.session), replies)?;
                    Ok((vault, begun))
                });
                let (vault, begun) = begun.await?.map_err(|refused| self.refused(refused))?;
                let again = proto::Up { said: Some(proto::up::Said::Resume(resume)) };
                (vault, begun, Some(convert::to_call(again).map_err(garbled)?))
            }
            _ => return Err(garbled(Garbled("a session begins with Begin or Resume"))),
        };
        let terms = self.vaults.terms();
        let begin = proto::Begun {
            session: begun.line.session.0,
            term: terms.term().0,
            heartbeat: terms.heartbeat().0,
            min_hold: terms.min_hold().0,
            head: begun.head.0.to_vec(),
        };
        let (down, stream) = mpsc::channel(BEHIND_MAX);
        let _ = down.send(Ok(proto::Down { said: Some(proto::down::Said::Begun(begin)) })).await;
        // What the session is told.
        let told = down.clone();
        tokio::spawn(async move {
            while let Some(reply) = answers.recv().await {
                let is_end = reply == Reply::Ended;
                if told.send(Ok(convert::from_reply(&reply))).await.is_err() || is_end {
                    return;
                }
            }
        });
        let service = self.clone();
        tokio::spawn(async move {
            let ended = service.listen(vault, begun.line, first, said).await;
            if let Err(status) = ended {
                let _ = down.send(Err(status)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn rows(&self, request: Request<proto::Of>) -> Done<Self::RowsStream> {
        let of = request.get_ref();
        let (id, session) = (convert::vault(&of.vault).map_err(garbled)?, SessionId(of.session));
        let name = self.host_of(&request, &id).await?;
        let service = self.clone();
        let table = Service::blocking(move || service.vaults.vault(&id)?.table(&name, session)).await?;
        let (table, head) = table.map_err(|refused| self.refused(refused))?;
        let (some, stream) = mpsc::channel(BEHIND_MAX);
        tokio::task::spawn_blocking(move || {
            let mut batch = proto::SomeRows { head: head.0.to_vec(), rows: Vec::new() };
            let visited = table.visit_all(|space, key, value| {
                let change = Change { space, key: key.to_vec(), value: Some(value.to_vec()) };
                batch.rows.push(convert::from_change(&change));
                if batch.rows.len() < ROWS_MAX {
                    return Ok(());
                }
                let next = proto::SomeRows { head: head.0.to_vec(), rows: Vec::new() };
                some.blocking_send(Ok(std::mem::replace(&mut batch, next))).map_err(|_| Gone::Client)
            });
            match visited {
                Ok(()) => drop(some.blocking_send(Ok(batch))),
                Err(Gone::Client) => {}
                Err(Gone::Table(error)) => {
                    tracing::error!(%error, "an anchor cannot be read");
                    let _ = some.blocking_send(Err(Status::internal("the server has failed: its log says why")));
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn commit(&self, request: Request<proto::CommitRequest>) -> Done<proto::State> {
        let of = request.get_ref().of.clone().ok_or_else(|| garbled(Garbled("no session is named")))?;
        let id = convert::vault(&of.vault).map_err(garbled)?;
        let name = self.host_of(&request, &id).await?;
        let commit = request.into_inner();
        let base = convert::head(&commit.base).map_err(garbled)?;
        let changes = convert::to_changes(commit.changes).map_err(garbled)?;
        let service = self.clone();
        let head =
            Service::blocking(move || service.vaults.vault(&id)?.commit(&name, SessionId(of.session), base, &changes));
        let head: Head = head.await?.map_err(|refused| self.refused(refused))?;
        Ok(Response::new(proto::State { head: head.0.to_vec() }))
    }

    async fn put(&self, request: Request<Streaming<proto::PutRequest>>) -> Done<proto::State> {
        let (name, _) = self.host(&request).await?;
        let mut said = request.into_inner();
        let first = said.message().await?.ok_or_else(|| garbled(Garbled("nothing is said")))?;
        let id = convert::vault(&first.vault).map_err(garbled)?;
        // `None`: what came makes no sense, or the client has gone.
        let (some, mut rows) = mpsc::channel::<Option<Vec<Change>>>(BEHIND_MAX);
        let service = self.clone();
        let put = tokio::task::spawn_blocking(move || {
            service.vaults.put(&id, &mut std::iter::from_fn(|| rows.blocking_recv()))
        });
        let mut next = Some(first);
        while let Some(request) = next {
            let changes = convert::to_changes(request.rows).ok();
            let is_over = changes.is_none();
            if some.send(changes).await.is_err() || is_over {
                break;
            }
            next = match said.message().await {
                Ok(next) => next,
                Err(_) => {
                    let _ = some.send(None).await;
                    None
                }
            };
        }
        drop(some);
        let put = put.await.map_err(|_| Status::internal("a thread of the server has ended"))?;
        let head = put.map_err(|refused| self.refused(refused))?;
        let (service, vault) = (self.clone(), HEXLOWER.encode(&id));
        let granted = Service::blocking(move || service.state.grant(&name, &vault, true)).await?;
        granted.map_err(|error| self.internal(&error))?;
        Ok(Response::new(proto::State { head: head.0.to_vec() }))
    }

    async fn give_up(&self, request: Request<proto::Of>) -> Done<proto::Nothing> {
        let of = request.get_ref();
        let (id, session) = (convert::vault(&of.vault).map_err(garbled)?, SessionId(of.session));
        let name = self.host_of(&request, &id).await?;
        let service = self.clone();
        let given_up = Service::blocking(move || service.vaults.give_up(&id, session, &name)).await?;
        given_up.map_err(|refused| self.refused(refused))?;
        Ok(Response::new(proto::Nothing {}))
    }
}

impl Service {
    /// What a session says, until its connection breaks or it leaves.
    async fn listen(
        &self,
        vault: Arc<Vault>,
        line: Line,
        first: Option<lamassu_lease::Call>,
        said: Streaming<proto::Up>,
    ) -> Result<(), Status> {
        let first = tokio_stream::iter(first.map(Ok));
        let rest = said.map(|up| convert::to_call(up?).map_err(garbled));
        let mut calls = first.chain(rest);
        let mut stopping = self.stopping.clone();
        loop {
            let call = tokio::select! {
                call = calls.next() => call,
                _ = stopping.wait_for(|is_so| *is_so) => return Err(Status::unavailable("the server ends")),
            };
            let Some(call) = call.transpose()? else { return Ok(()) };
            let is_last = call == lamassu_lease::Call::Leave;
            let vault = vault.clone();
            let done = Service::blocking(move || vault.call(line, call)).await?;
            done.map_err(|refused| self.refused(refused))?;
            if is_last {
                return Ok(());
            }
        }
    }
}

/// Why rows are sent no further.
enum Gone {
    Client,
    Table(lamassu_anchor::AnchorError),
}

impl From<lamassu_anchor::AnchorError> for Gone {
    fn from(error: lamassu_anchor::AnchorError) -> Gone {
        Gone::Table(error)
    }
}
