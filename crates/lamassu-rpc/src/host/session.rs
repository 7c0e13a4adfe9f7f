//! A session: one vault, used as a whole. A task of the runtime beats, comes back after a broken connection, and ends.

use super::{Connection, Result, runtime};
use crate::{clock, convert, proto};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::Standing;
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_lease::client::{Client, Do, Op, Ticket};
use lamassu_lease::{Call, Millis, Mode, Object, SessionId, Terms};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// The vault as a whole.
const VAULT: Object = Object(0);
/// Between two tries to connect.
const AGAIN_AFTER: Duration = Duration::from_millis(300);
/// How long whoever has the vault may take to end, once its mount is gone.
const LEAVING: Duration = Duration::from_secs(2);
/// For the last words of a session.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(3);
/// The longest wait for a moment of the clock.
const LOOK_AT_CLOCK: Duration = Duration::from_secs(1);
/// Calls that wait for the network.
const OUTBOX: usize = 64;

/// A session that has the vault. Dropped, it ends.
pub struct Session {
    shared: Arc<Shared>,
    /// the head of the vault's table when it began
    pub head: Head,
    /// An earlier session ended without saying so.
    pub takes_over: bool,
}

struct Shared {
    connection: Connection,
    vault: [u8; 16],
    session: SessionId,
    terms: Terms,
    state: Mutex<State>,
    /// The state has changed.
    changed: Condvar,
    /// There is something to send, or the session is to end.
    kick: Notify,
}

struct State {
    client: Client,
    outbox: VecDeque<Call>,
    ticket: Option<Ticket>,
    takes_over: bool,
    is_lost: bool,
    is_leaving: bool,
    has_left: bool,
    has_caches: bool,
    /// Until when it was good when caches were dropped last.
    dropped_at: Option<Millis>,
}

impl State {
    fn standing(&self) -> Standing {
        match () {
            () if self.is_leaving => Standing::GivenUp,
            () if self.is_lost => Standing::Ended,
            () if self.client.is_good(clock::now()) => Standing::Good,
            () => Standing::InDoubt,
        }
    }
}

type Said = (mpsc::Sender<proto::Up>, Streaming<proto::Down>);

impl Session {
    /// Begins a session that reads the vault, or has it alone. `replaces`: a session of this host whose process is
    /// gone.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError::Server`].
    pub fn begin(connection: &Connection, vault: [u8; 16], mode: Mode, replaces: Option<u64>) -> Result<Session> {
        let until = Instant::now() + LEAVING;
        loop {
            match Session::begin_now(connection, vault, mode, replaces) {
                Err(AnchorError::Server { fault: ServerFault::InUse { .. }, .. }) if Instant::now() < until => {
                    std::thread::sleep(AGAIN_AFTER);
                }
                done => return done,
            }
        }
    }

    fn begin_now(connection: &Connection, vault: [u8; 16], mode: Mode, replaces: Option<u64>) -> Result<Session> {
        let asked = clock::now();
        let begin = proto::Begin {
            vault: vault.to_vec(),
            mode: convert::from_mode(mode),
            replaces: replaces.unwrap_or_default(),
        };
        let begin = proto::Up { said: Some(proto::up::Said::Begin(begin)) };
        let begun = super::wait(async {
            let timeout = tokio::time::timeout(super::CALL_TIMEOUT, attend(connection, begin));
            timeout.await.unwrap_or_else(|_| {
                Err(connection.error(ServerFault::Unreachable { detail: "no answer in time".into() }))
            })
        })?;
        let (said, begun) = begun?;
        let head = convert::head(&begun.head).map_err(|error| connection.garbled(error.0))?;
        let terms = Terms::new(begun.term, begun.heartbeat, begun.min_hold);
        let terms = terms.map_err(|error| connection.garbled(&error.to_string()))?;
        let session = SessionId(begun.session);
        let mut client = Client::new(terms, session, asked);
        let beat = client.beat(clock::now());
        let dos: Vec<_> = [beat].into_iter().chain(client.begin(Op(0), VAULT, mode, clock::now())).collect();
        let state = State {
            client,
            outbox: VecDeque::new(),
            ticket: None,
            takes_over: false,
            is_lost: false,
            is_leaving: false,
            has_left: false,
            has_caches: false,
            dropped_at: None,
        };
        let shared = Arc::new(Shared {
            connection: connection.clone(),
            vault,
            session,
            terms,
            state: Mutex::new(state),
            changed: Condvar::new(),
            kick: Notify::new(),
        });
        shared.carry_out(&mut shared.state.lock(), dos);
        runtime()?.spawn(shared.clone().serve(said));
        let mut session = Session { shared, head, takes_over: false };
        session.takes_over = session.wait_for_lease()?;
        Ok(session)
    }

    /// After a restart of the server that takes until every other session is back, or has expired.
    fn wait_for_lease(&self) -> Result<bool> {
        let terms = &self.shared.terms;
        let until = Instant::now() + Duration::from_millis(terms.term().0 + terms.stop().0);
        let mut state = self.shared.state.lock();
        while state.ticket.is_none() && !state.is_lost {
            if self.shared.changed.wait_until(&mut state, until).timed_out() {
                let detail = "the vault was not granted in time".into();
                return Err(self.shared.connection.error(ServerFault::Unreachable { detail }));
            }
        }
        match state.is_lost {
            true => Err(self.shared.connection.error(ServerFault::Ended)),
            false => Ok(state.takes_over),
        }
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.shared.session.0
    }

    /// The connection that it uses.
    pub fn connection(&self) -> &Connection {
        &self.shared.connection
    }

    pub(super) fn of(&self) -> proto::Of {
        self.shared.of()
    }

    /// Whether what is held may be used now (rule R3 of `docs/sharing.md`). Never waits.
    pub fn standing(&self) -> Standing {
        self.shared.state.lock().standing()
    }

    /// Returns when it is not good any more, and now and then before.
    pub fn wait_while_good(&self) {
        let state = &mut self.shared.state.lock();
        if state.standing() == Standing::Good {
            // By a clock that does not stop while the machine sleeps, which a wait's does.
            let left = Duration::from_millis(state.client.good_until().0.saturating_sub(clock::now().0));
            self.shared.changed.wait_for(state, left.min(LOOK_AT_CLOCK));
        }
    }

    /// What it says is cached from now on.
    pub fn has_caches(&self) {
        self.shared.state.lock().has_caches = true;
    }

    /// What was cached by what it said is dropped: from now on who asks for it waits for it.
    pub fn caches_are_dropped(&self) {
        let mut state = self.shared.state.lock();
        state.dropped_at = Some(state.client.good_until());
    }

    /// Waits until it is good: until a term after it was last, however many wait one after the other. Before caches are
    /// dropped it does not wait: see [`lamassu_anchor::table::Table::caches_are_dropped`].
    ///
    /// # Errors
    /// [`ServerFault::Ended`], [`ServerFault::Unreachable`].
    pub fn wait_until_good(&self) -> Result<()> {
        let mut state = self.shared.state.lock();
        loop {
            match state.standing() {
                Standing::Good => return Ok(()),
                Standing::Ended | Standing::GivenUp => return Err(self.shared.connection.error(ServerFault::Ended)),
                Standing::InDoubt => {}
            }
            let good_until = state.client.good_until();
            let until = good_until.0 + self.shared.terms.term().0;
            let left = Duration::from_millis(until.saturating_sub(clock::now().0));
            let must_fail = state.has_caches && state.dropped_at != Some(good_until);
            if left.is_zero() || must_fail {
                let detail = "it was silent for too long".into();
                return Err(self.shared.connection.error(ServerFault::Unreachable { detail }));
            }
            self.shared.changed.wait_for(&mut state, left.min(LOOK_AT_CLOCK));
        }
    }

    /// How long what needs the server waits for it.
    pub fn patience(&self) -> Duration {
        Duration::from_millis(self.shared.terms.term().0)
    }
}

impl Session {
    /// Ends it: the server hears of it, if it answers soon. Nothing is read or written by it afterwards.
    pub fn leave(&self) {
        let mut state = self.shared.state.lock();
        state.is_leaving = true;
        self.shared.kick.notify_one();
        self.shared.changed.notify_all();
        let until = Instant::now() + LEAVE_TIMEOUT;
        while !state.has_left && !state.is_lost {
            if self.shared.changed.wait_until(&mut state, until).timed_out() {
                tracing::warn!(server = self.shared.connection.server(), "the session could not be ended in time");
                return;
            }
        }
        state.is_lost = true;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Opens a stream whose first words are these, and takes the first that comes.
async fn attend(connection: &Connection, first: proto::Up) -> Result<(Said, proto::Begun)> {
    let (up, said) = mpsc::channel(OUTBOX);
    let _ = up.send(first).await;
    let stream = connection.sessions().attend(ReceiverStream::new(said)).await;
    let mut down = stream.map_err(|status| connection.failed(&status))?.into_inner();
    let first = down.message().await.map_err(|status| connection.failed(&status))?;
    match first.and_then(|down| down.said) {
        Some(proto::down::Said::Begun(begun)) => Ok(((up, down), begun)),
        Some(proto::down::Said::Ended(_)) => Err(connection.error(ServerFault::Ended)),
        _ => Err(connection.garbled("a session did not begin")),
    }
}

impl Shared {
    fn of(&self) -> proto::Of {
        proto::Of { vault: self.vault.to_vec(), session: self.session.0 }
    }

    /// Does what the state machine asks for.
    fn carry_out(&self, state: &mut State, dos: Vec<Do>) {
        let mut dos = VecDeque::from(dos);
        while let Some(next) = dos.pop_front() {
            match next {
                Do::Send(call) => state.outbox.push_back(call),
                Do::Go(ticket) => state.ticket = Some(ticket),
                Do::Fail(_) | Do::Lost => state.is_lost = true,
                // The vault is used as a whole until the session ends.
                Do::Flush { object, .. } => dos.extend(state.client.flushed(object, clock::now())),
                // What was left is in the rows: whoever opens the vault puts it right.
                Do::TakeOver(object) => {
                    state.takes_over = true;
                    dos.extend(state.client.taken_over(object, clock::now()));
                }
            }
        }
        self.changed.notify_all();
    }

    /// Until the session has ended.
    async fn serve(self: Arc<Shared>, first: Said) {
        let mut said = Some(first);
        loop {
            if let Some((up, down)) = said.take() {
                self.talk(up, down).await;
            }
            {
                let mut state = self.state.lock();
                if state.is_lost || state.is_leaving {
                    state.has_left = true;
                    self.changed.notify_all();
                    return;
                }
                let dos = {
                    state.outbox.clear();
                    state.client.connected()
                };
                self.carry_out(&mut state, dos);
            }
            let first = self.state.lock().outbox.pop_front();
            let Some(first) = first else { return };
            match attend(&self.connection, convert::from_call(&first, self.of())).await {
                Ok((again, _)) => {
                    said = Some(again);
                    let mut state = self.state.lock();
                    let beat = state.client.beat(clock::now());
                    self.carry_out(&mut state, vec![beat]);
                }
                Err(AnchorError::Server { fault: ServerFault::Ended, .. }) => self.lost(),
                Err(error) => {
                    tracing::debug!(%error, "the session is without a connection");
                    tokio::select! {
                        () = tokio::time::sleep(AGAIN_AFTER) => {}
                        () = self.kick.notified() => {}
                    }
                }
            }
        }
    }

    fn lost(&self) {
        let mut state = self.state.lock();
        let dos = state.client.reply(lamassu_lease::Reply::Ended, clock::now());
        self.carry_out(&mut state, dos);
    }

    /// By one connection, until it breaks or the session ends.
    async fn talk(&self, up: mpsc::Sender<proto::Up>, mut down: Streaming<proto::Down>) {
        let mut beats = tokio::time::interval(Duration::from_millis(self.terms.heartbeat().0));
        beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        beats.reset();
        loop {
            loop {
                let Some(call) = self.state.lock().outbox.pop_front() else { break };
                if up.send(convert::from_call(&call, self.of())).await.is_err() {
                    return;
                }
            }
            if self.state.lock().is_leaving {
                let _ = up.send(convert::from_call(&Call::Leave, self.of())).await;
                drop(up);
                // The server closes the stream when it has noted that.
                let _ = tokio::time::timeout(LEAVE_TIMEOUT, async { while let Ok(Some(_)) = down.message().await {} })
                    .await;
                return;
            }
            tokio::select! {
                said = down.message() => {
                    let Ok(Some(reply)) = said.map(|said| said.map(convert::to_reply)) else { return };
                    let Ok(reply) = reply else { return };
                    let mut state = self.state.lock();
                    let dos = state.client.reply(reply, clock::now());
                    self.carry_out(&mut state, dos);
                    if state.is_lost {
                        return;
                    }
                }
                _ = beats.tick() => {
                    let mut state = self.state.lock();
                    let beat = state.client.beat(clock::now());
                    self.carry_out(&mut state, vec![beat]);
                }
                () = self.kick.notified() => {}
            }
        }
    }
}
