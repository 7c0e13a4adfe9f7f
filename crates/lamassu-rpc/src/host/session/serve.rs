//! The messages of a session: a task of the runtime sends heartbeats, reconnects after a broken connection, and ends
//! the session.

use super::{AGAIN_AFTER, Given, LEAVE_TIMEOUT, Shared, State, VAULT};
use crate::host::locks::Tell;
use crate::host::{Connection, Result};
use crate::limits::Limits;
use crate::protocol::SPOKEN;
use crate::{clock, convert, proto};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_lease::client::Do;
use lamassu_lease::{Call, Millis, Reply, Terms};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// Calls that may be queued for the network.
const OUTBOX: usize = 64;

/// One connection: the sender and the receiver.
pub(super) type Said = (mpsc::Sender<proto::Up>, Streaming<proto::Down>);

/// Opens a stream with a first message, and waits for the first reply.
pub(super) async fn attend(connection: &Connection, first: proto::Up) -> Result<(Said, proto::Begun, Option<Limits>)> {
    let (up, said) = mpsc::channel(OUTBOX);
    let _ = up.send(first).await;
    let stream = connection.sessions().attend(ReceiverStream::new(said)).await;
    let mut down = stream.map_err(|status| connection.failed(&status))?.into_inner();
    let first = down.message().await.map_err(|status| connection.failed(&status))?;
    let limits = first.as_ref().and_then(|down| down.policy.as_ref()).map(Limits::from_proto).transpose();
    let limits = limits.map_err(|error| connection.garbled(error.0))?;
    match first.and_then(|down| down.said) {
        Some(proto::down::Said::Begun(begun)) if !SPOKEN.have(begun.protocol) => {
            let detail = format!("it took version {}, and this host speaks the versions {SPOKEN}", begun.protocol);
            Err(connection.error(ServerFault::Version { detail }))
        }
        Some(proto::down::Said::Begun(begun)) => Ok(((up, down), begun, limits)),
        Some(proto::down::Said::Ended(_)) => Err(connection.error(ServerFault::Ended)),
        _ => Err(connection.garbled("a session did not begin")),
    }
}

/// Whether the server's answer to a report says that the session has ended. A refusal alone does not: while the session
/// lasts, the host may be granted the vault again. A term after it was last good the host gives it up: the server has
/// ended it, or will.
fn has_ended(fault: &ServerFault, terms: Terms, good_until: Millis, now: Millis) -> bool {
    match fault {
        ServerFault::Ended => true,
        ServerFault::Refused { .. } | ServerFault::UnknownVault => good_until + terms.term() <= now,
        _ => false,
    }
}

impl Shared {
    pub(super) fn of(&self) -> proto::Of {
        proto::Of { vault: self.vault.0.to_vec(), session: self.session.0 }
    }

    /// Carries out what the state machine asks for.
    pub(super) fn carry_out(&self, state: &mut State, dos: Vec<Do>) {
        let mut dos = VecDeque::from(dos);
        while let Some(next) = dos.pop_front() {
            match next {
                Do::Send(call) => state.outbox.push_back(call),
                Do::Go(ticket) => drop(state.given.get_or_insert(Given { op: ticket.op, takes_over: false })),
                Do::Fail(_) | Do::Lost => {
                    self.is_lost(state);
                    state.given = None;
                }
                // No operation uses the lease: the holder releases it by `Session::give_back`.
                Do::Flush { object, .. } => dos.extend(state.client.flushed(object, clock::now())),
                Do::TakeOver { by, .. } => state.given = by.map(|ticket| Given { op: ticket.op, takes_over: true }),
            }
        }
        // The caller that asked for it no longer waits.
        if state.given.is_none() && state.asked.is_none() && state.client.mode_of(VAULT).is_some() {
            let dos = state.client.give_back(super::NOBODY, VAULT, clock::now());
            state.outbox.extend(dos.into_iter().filter_map(|next| match next {
                Do::Send(call) => Some(call),
                _ => None,
            }));
        }
        self.changed.notify_all();
        self.kick.notify_one();
    }

    /// The session has ended. Its locks are lost before anybody learns that.
    pub(super) fn is_lost(&self, state: &mut State) {
        if !std::mem::replace(&mut state.is_lost, true) {
            state.to_tell.add(self.locks.session_ended());
        }
    }

    /// Tells programs how their requests for locks have ended. The caller holds no lock.
    pub(super) fn tell(&self) {
        let tell = std::mem::take(&mut self.state.lock().to_tell);
        tell.all();
    }

    /// Serves until the session has ended.
    pub(super) async fn serve(self: Arc<Shared>, first: Said) {
        tokio::select! {
            () = self.exchange(first) => {}
            never = self.keep_deadlines() => match never {},
        }
    }

    /// Gives up requests for locks at their deadlines, whether there is a connection or not. One timer is for all of
    /// them: nearly all are answered long before. An ended session has none, and those of the next one are not its own.
    async fn keep_deadlines(&self) -> Infallible {
        loop {
            let (tell, next) = {
                let mut state = self.state.lock();
                let tell = if state.is_lost { Tell::default() } else { self.locks.give_up_overdue(Instant::now()) };
                state.looks_at = self.locks.nearest_deadline().filter(|_| !state.is_lost);
                (tell, state.looks_at)
            };
            if !tell.is_empty() {
                self.kick.notify_one();
                tell.all();
            }
            let at_next = async {
                match next {
                    Some(next) => tokio::time::sleep_until(next.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = at_next => {}
                () = self.alarm.notified() => {}
            }
        }
    }

    /// Exchanges messages until the session has ended.
    async fn exchange(&self, first: Said) {
        let (mut said, mut is_warned) = (Some(first), false);
        loop {
            if let Some((up, down)) = said.take() {
                self.talk(up, down).await;
            }
            self.tell();
            {
                let mut state = self.state.lock();
                if state.is_lost || state.is_leaving {
                    state.has_left = true;
                    self.changed.notify_all();
                    return;
                }
                state.outbox.clear();
                let (locks, again) = self.locks.resumed();
                let dos = state.client.connected(locks);
                self.carry_out(&mut state, dos);
                state.outbox.extend(again);
            }
            let first = self.state.lock().outbox.pop_front();
            let Some(first) = first else { return };
            match attend(&self.connection, convert::from_call(&first, self.of())).await {
                Ok((again, _, limits)) => {
                    said = Some(again);
                    self.limit(limits);
                    let mut state = self.state.lock();
                    let beat = state.client.beat(clock::now());
                    self.carry_out(&mut state, vec![beat]);
                }
                Err(AnchorError::Server { fault, .. }) if self.has_ended_by(&fault) => self.lost(),
                Err(error) => {
                    let is_of_other_version =
                        matches!(error, AnchorError::Server { fault: ServerFault::Version { .. }, .. });
                    if is_of_other_version && !std::mem::replace(&mut is_warned, true) {
                        tracing::warn!(%error, "the session cannot go on at this server, and ends with its term");
                    }
                    tracing::debug!(%error, "the session is without a connection");
                    self.wait_to_connect().await;
                }
            }
        }
    }

    fn has_ended_by(&self, fault: &ServerFault) -> bool {
        has_ended(fault, self.terms, self.state.lock().client.good_until(), clock::now())
    }

    /// Stores the limits of the server's policy, if the server has sent them.
    fn limit(&self, limits: Option<Limits>) {
        let Some(limits) = limits else { return };
        let now = &mut *self.limits.write();
        if *now != limits {
            let server = self.connection.server();
            tracing::info!(server, "what the server's policy forbids here has changed");
            *now = limits;
        }
    }

    async fn wait_to_connect(&self) {
        let leaves = async {
            while !self.state.lock().is_leaving {
                self.kick.notified().await;
            }
        };
        let _ = tokio::time::timeout(AGAIN_AFTER, leaves).await;
    }

    fn lost(&self) {
        let mut state = self.state.lock();
        let dos = state.client.reply(Reply::Ended, clock::now());
        self.carry_out(&mut state, dos);
    }

    /// Serves by one connection, until it breaks or the session ends.
    async fn talk(&self, up: mpsc::Sender<proto::Up>, mut down: Streaming<proto::Down>) {
        let mut beats = tokio::time::interval(Duration::from_millis(self.terms.heartbeat().0));
        beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        beats.reset();
        // A connection begins with a heartbeat. Until it is answered, or the next one is due, another report must wait:
        // with a server that is slow, there would else be nothing but reports, and the session would not last.
        let mut may_report = false;
        loop {
            loop {
                let call = {
                    let mut state = self.state.lock();
                    // A session that ends says so by this connection.
                    if may_report && self.locks.must_report() && !state.is_leaving {
                        return;
                    }
                    state.outbox.pop_front()
                };
                let Some(call) = call else { break };
                if up.send(convert::from_call(&call, self.of())).await.is_err() {
                    return;
                }
            }
            if self.state.lock().is_leaving {
                let _ = up.send(convert::from_call(&Call::Leave, self.of())).await;
                drop(up);
                // The server closes the stream when it has recorded the end.
                let _ = tokio::time::timeout(LEAVE_TIMEOUT, async { while let Ok(Some(_)) = down.message().await {} })
                    .await;
                return;
            }
            tokio::select! {
                said = down.message() => {
                    let Ok(Some(said)) = said else { return };
                    let Ok(limits) = said.policy.as_ref().map(Limits::from_proto).transpose() else { return };
                    // Before the grant, which may be used at once.
                    self.limit(limits);
                    let (Ok(head), Ok(reply)) = (convert::head_of_grant(&said), convert::to_reply(said)) else { return };
                    if let Reply::Lock { request, answer } = reply {
                        self.locks.answer(request, answer).all();
                        continue;
                    }
                    may_report |= matches!(reply, Reply::Alive { .. });
                    let mut state = self.state.lock();
                    state.head = head.unwrap_or(state.head);
                    let dos = state.client.reply(reply, clock::now());
                    self.carry_out(&mut state, dos);
                    if state.is_lost {
                        return;
                    }
                }
                _ = beats.tick() => {
                    may_report = true;
                    let mut state = self.state.lock();
                    let beat = state.client.beat(clock::now());
                    self.carry_out(&mut state, vec![beat]);
                }
                () = self.kick.notified() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Attended, Use};
    use super::*;
    use crate::host::{Wires, runtime};
    use crate::identity::HostKey;
    use crate::proto::sessions_server::{Sessions, SessionsServer};
    use crate::proto::{down, up};
    use crate::protocol::Speaks;
    use crate::tls;
    use lamassu_format::header::VaultId;
    use lamassu_lease::client::Op;
    use lamassu_lease::locks::{Asked, LockKey, LockKind, Range};
    use lamassu_lease::{Mode, Object};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio_rustls::TlsConnector;
    use tonic::service::interceptor::InterceptedService;
    use tonic::transport::server::TcpIncoming;
    use tonic::transport::{Endpoint, Server};
    use tonic::{Request, Response, Status};

    /// Programs would else wait for their locks for ever.
    #[test]
    fn a_session_whose_report_is_refused_ends_a_term_after_it_was_good() {
        let (terms, good_until) = (Terms::DEFAULT, Millis(1_000_000));
        let ended = |fault: &ServerFault, now| has_ended(fault, terms, good_until, now);
        let (soon, late) = (Millis(good_until.0 + terms.term().0 - 1), good_until + terms.term());
        assert!(ended(&ServerFault::Ended, Millis(0)));
        for fault in [ServerFault::Refused { detail: String::new() }, ServerFault::UnknownVault] {
            assert!(!ended(&fault, Millis(0)) && !ended(&fault, soon), "it may be granted again: {fault}");
            assert!(ended(&fault, late), "{fault}");
        }
        // The server may have been away, or is another one: when it is back, the session may last.
        let detail = String::new;
        for fault in [ServerFault::Unreachable { detail: detail() }, ServerFault::Version { detail: detail() }] {
            assert!(!ended(&fault, Millis(late.0 + 1)), "{fault}");
        }
    }

    /// A server that takes its time for reports, and answers no unlock.
    #[derive(Default)]
    struct Slow {
        /// Heartbeats, and requests for the vault, that came after a report.
        beats: Arc<AtomicUsize>,
        requests: Arc<AtomicUsize>,
    }

    #[tonic::async_trait]
    impl Sessions for Slow {
        type AttendStream = ReceiverStream<std::result::Result<proto::Down, Status>>;

        async fn attend(
            &self,
            request: Request<Streaming<proto::Up>>,
        ) -> std::result::Result<Response<Self::AttendStream>, Status> {
            let mut said = request.into_inner();
            let first = said.message().await?.and_then(|up| up.said);
            let is_report = matches!(first, Some(up::Said::Resume(_)));
            if is_report {
                tokio::time::sleep(Duration::from_millis(700)).await;
            }
            let (tell, told) = mpsc::channel(64);
            let down = |said| Ok(proto::Down { said: Some(said), policy: None });
            let begun = proto::Begun {
                session: 1,
                term: 30_000,
                heartbeat: 5_000,
                min_hold: 0,
                head: vec![0; 32],
                protocol: 1,
            };
            let _ = tell.send(down(down::Said::Begun(begun))).await;
            let (beats, requests) = (self.beats.clone(), self.requests.clone());
            tokio::spawn(async move {
                while let Ok(Some(up)) = said.message().await {
                    match up.said {
                        Some(up::Said::Heartbeat(beat)) => {
                            beats.fetch_add(usize::from(is_report), Ordering::SeqCst);
                            let _ = tell.send(down(down::Said::Alive(beat))).await;
                        }
                        Some(up::Said::Acquire(_)) => {
                            requests.fetch_add(usize::from(is_report), Ordering::SeqCst);
                        }
                        _ => {}
                    }
                }
            });
            Ok(Response::new(ReceiverStream::new(told)))
        }
    }

    /// A connection without TLS.
    fn plain(port: u16) -> Connection {
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).expect("an address");
        let key = HostKey::new().expect("a key");
        let tls = TlsConnector::from(Arc::new(tls::joining(&key, [0; 32]).expect("a configuration")));
        let _inside = runtime().expect("it runs").enter();
        let channel = InterceptedService::new(endpoint.connect_lazy(), Speaks);
        Connection { server: "slow".into(), channel, wires: Wires { addresses: Arc::new([]), tls, shown: None } }
    }

    /// Each unlock that is not answered in time is followed by a report. If another one is overdue whenever a report
    /// was taken, the session must last all the same, and get its turns.
    #[test]
    fn reports_that_take_long_leave_heartbeats_and_requests_their_place() {
        let slow = Slow::default();
        let (beats, requests) = (slow.beats.clone(), slow.requests.clone());
        let port = crate::host::wait(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let port = listener.local_addr().expect("an address").port();
            let serves = Server::builder().add_service(SessionsServer::new(slow));
            tokio::spawn(serves.serve_with_incoming(TcpIncoming::from(listener)));
            port
        });
        let connection = plain(port.expect("it runs"));
        let attended = Attended::begin(&connection, VaultId([7; 16]), Use::ByTurns, None, &Arc::default());
        let attended = attended.expect("a session begins");
        let shared = attended.0.clone();
        {
            let state = &mut *shared.state.lock();
            state.asked = Some(Op(9));
            let dos = state.client.begin(Op(9), VAULT, Mode::Shared, clock::now());
            shared.carry_out(state, dos);
        }
        let key = LockKey { file: Object(7), kind: LockKind::Range, owner: 1 };
        let until = Instant::now() + Duration::from_secs(60);
        let unlocks_until = |is_so: &dyn Fn() -> bool| {
            while !is_so() {
                assert!(Instant::now() < until, "nothing but reports is sent");
                attended.ask(Asked::Unlock { key, range: Range::ALL }, Box::new(|_| ()));
                std::thread::sleep(Duration::from_millis(200));
            }
        };
        let good_until = || shared.state.lock().client.good_until();
        unlocks_until(&|| beats.load(Ordering::SeqCst) > 0 && requests.load(Ordering::SeqCst) > 0);
        let before = good_until();
        // Their answers are heard.
        unlocks_until(&|| good_until() > before);
    }
}
