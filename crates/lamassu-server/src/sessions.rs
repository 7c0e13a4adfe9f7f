//! Sessions: one stream each way for each session. The server reads a session's messages only while the session reads
//! the replies.

use crate::guard::{self, Agreed};
use crate::policy::current::PolicyNo;
use crate::refused::Refused;
use crate::service::{Done, IDLE_MAX, Outgoing, Service, caller, garbled, place};
use crate::state::leases::Use;
use crate::threads::{Threads, Turns, Way};
use crate::vault::{self, Begun, Line, REPLIES_MAX, Standing, Vault};
use lamassu_lease::{Call, Mode, Reply, SessionId};
use lamassu_rpc::convert::{self, Garbled};
use lamassu_rpc::proto::{self, sessions_server::Sessions};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// How long the first message of a stream may take.
const FIRST_TIMEOUT: Duration = Duration::from_secs(10);

/// Others come to the vault before what is left for the leases is done.
const SOON: Duration = Duration::from_millis(1);

type Told = mpsc::Sender<Result<proto::Down, Status>>;

#[tonic::async_trait]
impl Sessions for Service {
    type AttendStream = Outgoing<proto::Down>;

    async fn attend(&self, request: Request<Streaming<proto::Up>>) -> Done<Self::AttendStream> {
        let (caller, place) = (caller(&request)?, place(&request)?);
        let protocol = request.extensions().get::<Agreed>().ok_or_else(|| Status::internal("no version"))?.0;
        let mut said = request.into_inner();
        let first = tokio::time::timeout(FIRST_TIMEOUT, said.message()).await;
        let first =
            first.map_err(|_| Status::deadline_exceeded("the client sent nothing in time"))??.and_then(|up| up.said);
        let (replies, answers) = mpsc::channel(REPLIES_MAX);
        let service = self.clone();
        let host = caller.name.clone();
        let (begun, turns) = match first {
            Some(proto::up::Said::Begin(begin)) => {
                let id = convert::vault(&begin.vault).map_err(garbled)?;
                let used = match convert::to_mode(begin.mode).map_err(garbled)? {
                    Mode::Exclusive if begin.turns => Use::ByTurns,
                    Mode::Exclusive => Use::Writes,
                    Mode::Shared => Use::Reads,
                };
                let how = (used, SessionId(begin.replaces));
                let turns = self.turns(&caller, &id)?;
                let begun =
                    self.threads.begin((&turns, place), move || service.vaults.begin(&id, &caller, how, replies));
                (begun.await?, turns)
            }
            Some(proto::up::Said::Resume(resume)) => {
                let of = resume.of.clone().ok_or_else(|| garbled(Garbled("no session is named")))?;
                let id = convert::vault(&of.vault).map_err(garbled)?;
                let again = convert::to_call(proto::Up { said: Some(proto::up::Said::Resume(resume)) });
                let again = again.map_err(garbled)?;
                let (turns, of_vault) = (self.turns(&caller, &id)?, self.turns(&caller, &id)?);
                let arrived = self.vaults.arrivals().one(id, &caller.name, SessionId(of.session));
                let begun = self.threads.call_of((&turns, place), move || {
                    let _arrived = arrived;
                    let vault = service.vaults.vault_for(&caller, &id)?;
                    let begun = vault.resumes(&caller, SessionId(of.session), again, replies)?;
                    if let Some(after) = vault.wakes_after() {
                        service.wake((&vault, of_vault), Duration::from_millis(after));
                    }
                    Ok((vault, begun))
                });
                (begun.await?, turns)
            }
            _ => return Err(garbled(Garbled("a session begins with Begin or Resume"))),
        };
        let (vault, Begun { line, head }) = begun.map_err(|refused| self.refused(refused))?;
        let terms = self.vaults.terms();
        let begin = proto::Begun {
            session: line.session.0,
            term: terms.term().0,
            heartbeat: terms.heartbeat().0,
            min_hold: terms.min_hold().0,
            head: head.0.to_vec(),
            protocol,
        };
        let (told, stream) = mpsc::channel(1);
        let service = self.clone();
        tokio::spawn(async move {
            let (kept, standing) = (vault.clone(), vault.watched());
            let begin = proto::Down { said: Some(proto::down::Said::Begun(begin)), policy: None };
            let way = service.threads.way(&host, vault.id());
            let mut line = Speaking { vault, turns, line, host, way, knows: None };
            let served = async {
                service.confirm().await?;
                tell(&told, Ok(line.with_policy(&service.threads, begin).await?)).await?;
                service.serve(line, (said, answers), &told).await
            };
            serve_while_good((kept, standing), served, &told).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

/// Serves while the vault is used, then lets go of it, then tells the client why it has ended: that takes as long as
/// the client likes, and while the vault is held, it cannot be opened anew.
async fn serve_while_good<K: Send + 'static>(
    (kept, mut standing): (K, watch::Receiver<Standing>),
    served: impl Future<Output = Result<(), Status>>,
    told: &Told,
) {
    let is_over = async {
        let standing = standing.wait_for(|standing| *standing != Standing::Good).await;
        standing.map_or(Standing::Closed, |standing| *standing)
    };
    let served = tokio::select! {
        biased;
        served = served => served,
        standing = is_over => Err(over(standing)),
    };
    // If the vault is no longer in use, this closes its file, which waits for the disk.
    tokio::task::spawn_blocking(move || drop(kept));
    if let Err(status) = served {
        let _ = tell(told, Err(status)).await;
    }
}

/// A message of a connection that has begun. A report is not even looked at: while it waits it takes much memory.
fn to_call(up: proto::Up) -> Result<Call, Status> {
    match &up.said {
        Some(proto::up::Said::Resume(_)) => Err(garbled(Garbled("a report begins a connection"))),
        _ => convert::to_call(up).map_err(garbled),
    }
}

/// Why a connection ends whose session gets no more replies. A host takes `Aborted` for the end of the session, before
/// the session goes on: of a vault that is opened again, all sessions last.
fn over(standing: Standing) -> Status {
    match standing {
        Standing::Good | Standing::GivenUp => Status::aborted("the session has ended, or has another connection"),
        Standing::InDoubt | Standing::Closed => Status::unavailable("the vault is opened again"),
    }
}

/// Sends a message, if the client receives it in time.
async fn tell(told: &Told, down: Result<proto::Down, Status>) -> Result<(), Status> {
    let sent = tokio::time::timeout(IDLE_MAX, told.send(down)).await;
    if matches!(sent, Ok(Ok(()))) { Ok(()) } else { Err(Status::cancelled("the client does not read the replies")) }
}

/// One connection of a session.
struct Speaking {
    vault: Arc<Vault>,
    turns: Arc<Turns>,
    line: Line,
    host: String,
    way: Way,
    /// The policy that this connection was last told of.
    knows: Option<PolicyNo>,
}

impl Speaking {
    /// Runs work of the session in the vault's turn.
    async fn in_turn<T: Send + 'static>(
        &self,
        threads: &Threads,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Status> {
        let _arrived = self.vault.arrived(&self.host, self.line.session);
        threads.session((&self.way, &self.turns), work).await
    }

    /// Adds to a reply what the policy forbids, if that has changed.
    async fn with_policy(&mut self, threads: &Threads, down: proto::Down) -> Result<proto::Down, Status> {
        // This waits for the vault's lock, which is held while a commit is written. It happens rarely.
        let (vault, host, mut knows) = (self.vault.clone(), self.host.clone(), self.knows);
        if !vault.is_news(knows) {
            return Ok(down);
        }
        let told = self.in_turn(threads, move || {
            let policy = vault.tells(&host, &mut knows);
            (policy, knows)
        });
        let (policy, knows) = told.await?;
        self.knows = knows;
        Ok(proto::Down { policy, ..down })
    }
}

impl Service {
    /// A reply is valid only if no other server can have taken over before it.
    async fn confirm(&self) -> Result<(), Status> {
        match self.office.confirm().await {
            true => Ok(()),
            false => Err(guard::another_serves()),
        }
    }

    /// Makes a vault look at its leases before the next tick: hosts that pass it to each other would otherwise wait for
    /// each tick.
    fn wake(&self, (vault, turns): (&Arc<Vault>, Arc<Turns>), after: Duration) {
        // Not kept while it waits.
        let (service, vault) = (self.clone(), Arc::downgrade(vault));
        tokio::spawn(async move {
            let mut after = after;
            loop {
                tokio::time::sleep(after).await;
                let vault = vault.clone();
                let ticks = move || match vault.upgrade() {
                    Some(vault) => vault.tick().map(|()| vault.has_work()),
                    None => Ok(false),
                };
                match service.threads.upkeep(&turns, ticks).await {
                    Ok(Some(Ok(true))) => after = SOON,
                    Ok(Some(Err(lost))) => return drop(service.refused(Refused::Lost(lost))),
                    // Nothing is left, or somebody else does it.
                    _ => return,
                }
            }
        });
    }

    /// Serves until the connection breaks, or the session ends or leaves.
    async fn serve(
        &self,
        mut speaking: Speaking,
        (mut said, mut answers): (Streaming<proto::Up>, mpsc::Receiver<vault::Told>),
        told: &Told,
    ) -> Result<(), Status> {
        let mut stopping = self.stopping.clone();
        loop {
            let call = tokio::select! {
                    biased;
                    () = async { drop(stopping.wait_for(|is_so| *is_so).await) } => return Err(Status::unavailable("the server ends")),
                    answer = answers.recv() => {
                        // Another connection has replaced this one, or the session has ended.
                        let Some((answer, head)) = answer else { return Err(over(speaking.vault.standing())) };
                        self.confirm().await?;
                        let down = speaking.with_policy(&self.threads, convert::from_reply(&answer, head)).await?;
                        tell(told, Ok(down)).await?;
                        if answer == Reply::Ended {
                            return Ok(());
                        }
                        continue;
                    }
                    up = said.message() => match up? {
                        Some(up) => to_call(up)?,
                        None => return Ok(()),
                    },
            };
            let (is_last, called, line) = (call == Call::Leave, speaking.vault.clone(), speaking.line);
            let done = speaking.in_turn(&self.threads, move || called.call(line, call).map(|()| called.wakes_after()));
            let wakes_after = done.await?.map_err(|refused| self.refused(refused))?;
            if let Some(after) = wakes_after {
                self.wake((&speaking.vault, speaking.turns.clone()), Duration::from_millis(after));
            }
            if is_last {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::Counts;
    use crate::vault::tests::{begin, common, open, table};
    use tonic::Code;

    /// Passed only if it hangs.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// The server reads nothing more of the session meanwhile, so that it is not silent.
    #[tokio::test]
    async fn what_waits_for_the_vault_has_arrived_until_it_is_done() {
        let dir = tempfile::tempdir().expect("makes a directory");
        let (common, caller) = common(dir.path());
        let vault = Arc::new(open(table(), &common));
        let (line, _told) = begin(&vault, &caller);
        let (threads, host) = (Threads::default(), caller.name);
        let (turns, way) = (threads.turns(vault.id()), threads.way(&host, vault.id()));
        let (release, released) = std::sync::mpsc::channel::<()>();
        let place = Arc::new(Counts::default().one_more(&Arc::from(*b"host"), 1).expect("the first"));
        let (of, its) = (threads.clone(), turns.clone());
        let works = tokio::spawn(async move { of.call_of((&its, place), move || released.recv()).await });
        tokio::task::yield_now().await;
        let speaking = Speaking { vault: vault.clone(), turns, line, host, way, knows: None };
        let has_arrived = || common.arrivals.first(vault.id(), &speaking.host, line.session).is_some();
        let mut waits = std::pin::pin!(speaking.in_turn(&threads, || ()));
        let is_done = waits.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())).is_ready();
        assert!(!is_done && has_arrived());
        drop(release);
        waits.await.expect("is done");
        assert!(works.await.is_ok() && !has_arrived());
    }

    /// It would else be converted, and wait for the vault, only to be refused.
    #[test]
    fn a_report_on_a_connection_that_has_begun_is_refused_at_once() {
        let said = |said| to_call(proto::Up { said: Some(said) }).map_err(|status| status.code());
        let of = Some(proto::Of { vault: vec![1; 16], session: 3 });
        let report = proto::Resume { of, number: 1, ..Default::default() };
        assert_eq!(said(proto::up::Said::Resume(report)), Err(Code::InvalidArgument));
        assert_eq!(said(proto::up::Said::Heartbeat(proto::Heartbeat { beat: 4 })), Ok(Call::Heartbeat { beat: 4 }));
    }

    /// A host that is told before the session goes on that it has ended gives up its locks, and what it has not synced.
    #[tokio::test]
    async fn a_vault_that_is_opened_again_ends_no_session() {
        let codes = [
            (Standing::InDoubt, Code::Unavailable),
            (Standing::Closed, Code::Unavailable),
            (Standing::GivenUp, Code::Aborted),
        ];
        for (ends, code) in codes {
            let (told, mut hears) = mpsc::channel(1);
            let (_ends, standing) = watch::channel(ends);
            serve_while_good(((), standing), std::future::pending(), &told).await;
            let said = hears.recv().await;
            assert!(matches!(&said, Some(Err(status)) if status.code() == code), "{ends:?}: {said:?}");
        }
    }

    /// Its stream stays open for as long as it may take to read a message.
    #[tokio::test]
    async fn a_client_that_reads_nothing_does_not_keep_a_vault_that_has_failed() {
        let (told, _unread) = mpsc::channel(1);
        let (ends, standing) = watch::channel(Standing::Good);
        let kept = Arc::new(());
        let (held, is_held) = (kept.clone(), Arc::downgrade(&kept));
        let served = tokio::spawn(async move {
            let says = async {
                let _held = held;
                tell(&told, Ok(proto::Down::default())).await?;
                std::future::pending().await
            };
            serve_while_good((kept, standing), says, &told).await;
        });
        tokio::task::yield_now().await;
        assert!(is_held.upgrade().is_some());
        ends.send_replace(Standing::InDoubt);
        let is_let_go = async {
            while is_held.upgrade().is_some() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, is_let_go).await.expect("the vault is kept");
        assert!(!served.is_finished(), "the client, which does not read, was told before");
        served.abort();
    }
}
