//! A session: one vault, used as a whole, once or by turns. `serve` handles the messages; this module is the API.
//!
//! | | |
//! |---|---|
//! | [`Attended`] | a session that has begun, and holds nothing yet; dropping it ends the session |
//! | [`Session`] | the vault as held by such a session, until it ends or the turn is over |

mod serve;

use self::serve::attend;
use super::locks::{Deadline, Done, HeldLocks, Tell};
use super::turns::Told;
use super::{Connection, Result, runtime};
use crate::limits::{Forbidden, Limits};
use crate::{clock, convert, proto};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{Doubt, Standing};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_format::Profile;
use lamassu_format::header::VaultId;
use lamassu_lease::client::{Client, Op};
use lamassu_lease::locks::{Asked, Outcome};
use lamassu_lease::{Call, GrantNo, Mode, Object, RequestNo, SessionId, Terms};
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// The vault as a whole.
const VAULT: Object = Object(0);
/// Time between two attempts to connect.
pub(super) const AGAIN_AFTER: Duration = Duration::from_millis(300);
/// How long to wait for another mount's session to end, after that mount is gone.
const LEAVING: Duration = Duration::from_secs(2);
/// How long ending a session may take.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(3);
/// The longest wait before the clock is read again.
const LOOK_AT_CLOCK: Duration = Duration::from_secs(1);
/// How often to ask whether the vault is still wanted.
const LOOK_IF_WANTED: Duration = Duration::from_millis(100);
/// How long a program waits for the answer when it unlocks or no longer wants a lock.
const ANSWERED_IN: Duration = Duration::from_secs(1);
/// Minimum time between two log lines about the same rule.
const SAID_EVERY: Duration = Duration::from_secs(60);
/// An operation number that no caller has.
const NOBODY: Op = Op(0);

/// The vault, as held by a session.
pub struct Session {
    shared: Arc<Shared>,
    /// The operation that holds the vault: each grant is a new one.
    op: Op,
    pub(super) grant: GrantNo,
    /// The session ends when this is dropped.
    _ends: Option<Attended>,
    /// the head of the vault's table when it was granted
    pub head: Head,
    /// An earlier session ended without releasing the vault.
    pub takes_over: bool,
}

/// A session. Dropping it ends the session.
pub(super) struct Attended(Arc<Shared>);

/// How a session will use the vault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Once(Mode),
    ByTurns,
}

struct Shared {
    connection: Connection,
    vault: VaultId,
    session: SessionId,
    terms: Terms,
    /// What the server's policy forbids.
    limits: RwLock<Limits>,
    /// When each rule was last logged.
    told_of: Mutex<HashMap<Arc<str>, Instant>>,
    /// The locks of this host's programs.
    locks: Arc<HeldLocks>,
    state: Mutex<State>,
    /// The state has changed.
    changed: Condvar,
    /// There is a call to send, or the session is to end.
    kick: Notify,
    /// Deadlines of requests for locks must be looked at earlier than was planned.
    alarm: Notify,
}

struct State {
    client: Client,
    outbox: VecDeque<Call>,
    /// The head of the vault's table at the last grant.
    head: Head,
    /// The operation that waits for the vault.
    asked: Option<Op>,
    /// The operation that holds it.
    given: Option<Given>,
    next_op: u64,
    is_lost: bool,
    is_leaving: bool,
    has_left: bool,
    has_caches: bool,
    /// The last doubt in which caches were dropped.
    dropped_in: Option<Doubt>,
    /// Requests for locks that have ended with the session.
    to_tell: Tell,
    /// When the deadlines of requests for locks are looked at next.
    looks_at: Option<Instant>,
}

/// A grant of the vault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Given {
    op: Op,
    /// An earlier session ended without releasing it.
    takes_over: bool,
}

impl State {
    /// The session's state for the operation that holds, or held, the vault.
    fn standing(&self, op: Op) -> Standing {
        match () {
            () if self.is_leaving => Standing::GivenUp,
            () if self.is_lost => Standing::Ended,
            () if self.given.is_none_or(|given| given.op != op) => Standing::GivenUp,
            () if self.client.is_good(clock::now()) => Standing::Good,
            () => Standing::InDoubt,
        }
    }
}

impl Attended {
    /// Begins a session. `replaces`: a session of this host whose process is gone.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError::Server`].
    pub(super) fn begin(
        connection: &Connection,
        vault: VaultId,
        how: Use,
        replaces: Option<u64>,
        locks: &Arc<HeldLocks>,
    ) -> Result<Attended> {
        let until = Instant::now() + LEAVING;
        loop {
            match Attended::begin_now(connection, vault, how, replaces, locks.clone()) {
                Err(AnchorError::Server { fault: ServerFault::InUse { .. }, .. }) if Instant::now() < until => {
                    std::thread::sleep(AGAIN_AFTER);
                }
                done => return done,
            }
        }
    }

    fn begin_now(
        connection: &Connection,
        vault: VaultId,
        how: Use,
        replaces: Option<u64>,
        locks: Arc<HeldLocks>,
    ) -> Result<Attended> {
        let asked = clock::now();
        let mode = match how {
            Use::Once(mode) => mode,
            Use::ByTurns => Mode::Exclusive,
        };
        let begin = proto::Begin {
            vault: vault.0.to_vec(),
            mode: convert::from_mode(mode),
            replaces: replaces.unwrap_or_default(),
            turns: how == Use::ByTurns,
        };
        let begin = proto::Up { said: Some(proto::up::Said::Begin(begin)) };
        let begun = super::wait(async {
            let timeout = tokio::time::timeout(super::CALL_TIMEOUT, attend(connection, begin));
            timeout.await.unwrap_or_else(|_| {
                Err(connection.error(ServerFault::Unreachable { detail: "no answer in time".into() }))
            })
        })?;
        let (said, begun, limits) = begun?;
        let head = convert::head(&begun.head).map_err(|error| connection.garbled(error.0))?;
        let terms = Terms::new(begun.term, begun.heartbeat, begun.min_hold);
        let terms = terms.map_err(|error| connection.garbled(&error.to_string()))?;
        let session = SessionId(begun.session);
        let mut client = Client::new(terms, session, asked);
        let beat = client.beat(clock::now());
        let state = State {
            client,
            outbox: VecDeque::new(),
            head,
            asked: None,
            given: None,
            next_op: NOBODY.0 + 1,
            is_lost: false,
            is_leaving: false,
            has_left: false,
            has_caches: false,
            dropped_in: None,
            to_tell: Tell::default(),
            looks_at: None,
        };
        let shared = Arc::new(Shared {
            connection: connection.clone(),
            vault,
            session,
            terms,
            limits: RwLock::new(limits.unwrap_or_default()),
            told_of: Mutex::default(),
            locks,
            state: Mutex::new(state),
            changed: Condvar::new(),
            kick: Notify::new(),
            alarm: Notify::new(),
        });
        shared.carry_out(&mut shared.state.lock(), vec![beat]);
        runtime()?.spawn(shared.clone().serve(said));
        Ok(Attended(shared))
    }

    /// The session's number.
    pub(super) fn number(&self) -> u64 {
        self.0.session.0
    }

    /// How long calls that need the server wait for it.
    pub(super) fn patience(&self) -> Duration {
        Duration::from_millis(self.0.terms.term().0)
    }

    /// Waits until this session is granted the vault in this mode. An earlier holder in this session must have released
    /// it. Gives up after a term without an answer.
    ///
    /// # Errors
    /// [`ServerFault::Ended`]; [`ServerFault::Unreachable`] after a term of silence.
    pub(super) fn take(&self, mode: Mode) -> Result<Session> {
        self.take_while(mode, None)?.ok_or_else(|| self.0.connection.error(ServerFault::Ended))
    }

    /// The same, as long as it is wanted: `None` after that. What the server grants then is released at once.
    pub(super) fn take_while(&self, mode: Mode, is_wanted: Option<&dyn Fn() -> bool>) -> Result<Option<Session>> {
        let (shared, state) = (&self.0, &mut self.0.state.lock());
        let look_again = if is_wanted.is_some() { LOOK_IF_WANTED } else { LOOK_AT_CLOCK };
        while state.given.is_some() && !state.is_lost && !state.is_leaving {
            shared.changed.wait(state);
        }
        let op = Op(state.next_op);
        state.next_op += 1;
        (state.asked, state.has_caches, state.dropped_in) = (Some(op), false, None);
        let asked = clock::now();
        let dos = state.client.begin(op, VAULT, mode, asked);
        shared.carry_out(state, dos);
        let given = loop {
            if state.is_lost || state.is_leaving {
                break Err(ServerFault::Ended);
            }
            // First: it may be granted meanwhile.
            let is_wanted = is_wanted.is_none_or(|is_wanted| MutexGuard::unlocked(state, is_wanted));
            if let Some(given) = state.given.filter(|given| given.op == op) {
                break Ok(Some(given));
            }
            if !is_wanted {
                break Ok(None);
            }
            let heard = state.client.good_until().0.saturating_sub(shared.terms.stop().0);
            if asked.0.max(heard) + shared.terms.term().0 <= clock::now().0 {
                break Err(ServerFault::Unreachable { detail: "the vault was not granted in time".into() });
            }
            shared.changed.wait_for(state, look_again);
        };
        state.asked = None;
        if !matches!(given, Ok(Some(_))) {
            let dos = state.client.give_back(op, VAULT, clock::now());
            shared.carry_out(state, dos);
        }
        let given = given.map_err(|fault| shared.connection.error(fault))?;
        let grant = state.client.grant_of(VAULT).unwrap_or(GrantNo(0));
        let session = |Given { op, takes_over }| Session {
            shared: shared.clone(),
            op,
            grant,
            _ends: None,
            head: state.head,
            takes_over,
        };
        Ok(given.map(session))
    }

    /// Makes a request about locks. Returns its number, with which it can be cancelled; `None`: the caller was told.
    pub(super) fn ask(&self, asked: Asked, done: Done) -> Option<RequestNo> {
        let shared = &self.0;
        let mut state = shared.state.lock();
        if state.is_lost || state.is_leaving {
            drop(state);
            done(Outcome::Ended);
            return None;
        }
        let after = |time, outcome| Some(Deadline { at: Instant::now() + time, outcome });
        let deadline = match asked {
            Asked::Unlock { .. } => after(ANSWERED_IN, Outcome::Done),
            Asked::Lock { waits: true, .. } => None,
            Asked::Lock { .. } | Asked::Test { .. } => {
                after(Duration::from_millis(2 * shared.terms.term().0), Outcome::Unanswered)
            }
        };
        match shared.locks.ask(asked, deadline, done) {
            Ok((request, call)) => {
                shared.send_in_time(&mut state, call);
                Some(request)
            }
            Err(tell) => {
                drop(state);
                tell.all();
                None
            }
        }
    }

    /// The program no longer waits for a request.
    pub(super) fn cancel(&self, request: RequestNo) {
        let shared = &self.0;
        let state = &mut shared.state.lock();
        let deadline = Deadline { at: Instant::now() + ANSWERED_IN, outcome: Outcome::Cancelled };
        if let Some(call) = shared.locks.cancel(request, deadline) {
            shared.send_in_time(state, call);
        }
    }

    /// Ends the session. The server is told, if it answers soon. Nothing is read or written by the session afterwards.
    pub(super) fn leave(&self) {
        self.0.leave();
    }
}

impl Drop for Attended {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Session {
    /// Begins a session that holds the vault until it ends, to read or exclusively. `replaces`: a session of this host
    /// whose process is gone.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError::Server`].
    pub fn begin(connection: &Connection, vault: VaultId, mode: Mode, replaces: Option<u64>) -> Result<Session> {
        let attended = Attended::begin(connection, vault, Use::Once(mode), replaces, &Arc::default())?;
        let session = attended.take(mode)?;
        // What an earlier session left is in the rows: opening the vault recovers it.
        session.taken_over();
        if mode == Mode::Shared {
            session.reduce();
        }
        Ok(Session { _ends: Some(attended), ..session })
    }

    /// The session's number.
    pub fn number(&self) -> u64 {
        self.shared.session.0
    }

    /// The session's connection.
    pub fn connection(&self) -> &Connection {
        &self.shared.connection
    }

    pub(super) fn of(&self) -> proto::Of {
        self.shared.of()
    }

    /// The mode in which the vault is held; `None`: it is no longer held.
    pub(super) fn mode(&self) -> Option<Mode> {
        let state = self.shared.state.lock();
        state.client.mode_of(VAULT).filter(|_| state.given.is_some_and(|given| given.op == self.op))
    }

    /// Reports that what an earlier session left has been recovered.
    pub(super) fn taken_over(&self) {
        let state = &mut self.shared.state.lock();
        if state.given.is_some_and(|given| given.op == self.op) {
            let dos = state.client.taken_over(VAULT, clock::now());
            self.shared.carry_out(state, dos);
        }
    }

    /// Tells the server that the vault is kept although others want it, or no longer.
    pub(super) fn keep(&self, kept: bool) {
        let state = &mut self.shared.state.lock();
        if state.given.is_some_and(|given| given.op == self.op) {
            let dos = state.client.keep(VAULT, kept);
            self.shared.carry_out(state, dos);
        }
    }

    /// Keeps the vault to read, if it was granted exclusively for a takeover. Nothing may have been changed under it.
    fn reduce(&self) {
        let state = &mut self.shared.state.lock();
        if state.given.is_some_and(|given| given.op == self.op) {
            let dos = state.client.reduce(VAULT);
            self.shared.carry_out(state, dos);
        }
    }

    /// Releases the vault. All changes must be committed, and nothing may be cached.
    pub(super) fn give_back(&self) {
        let state = &mut self.shared.state.lock();
        if state.given.is_some_and(|given| given.op == self.op) {
            state.given = None;
            let dos = state.client.give_back(self.op, VAULT, clock::now());
            self.shared.carry_out(state, dos);
        }
    }

    /// Waits until the holder is told something. `None` after `time`.
    pub(super) fn wait_to_be_told(&self, time: Duration) -> Option<Told> {
        let state = &mut self.shared.state.lock();
        let until = Instant::now() + time;
        loop {
            match state.standing(self.op) {
                Standing::Ended | Standing::GivenUp => return Some(Told::Ended),
                Standing::Good | Standing::InDoubt if state.client.is_recalled(VAULT) => return Some(Told::Recalled),
                Standing::Good | Standing::InDoubt => {}
            }
            if self.shared.changed.wait_until(state, until).timed_out() {
                return None;
            }
        }
    }

    /// Whether the vault may be used now (rule R3 of `docs/sharing.md`). Never waits.
    pub fn standing(&self) -> Standing {
        self.shared.state.lock().standing(self.op)
    }

    /// Returns when the session is no longer good, and now and then before that.
    pub fn wait_while_good(&self) {
        let state = &mut self.shared.state.lock();
        if state.standing(self.op) == Standing::Good {
            // CLOCK_BOOTTIME: a condition variable's clock stops while the machine sleeps.
            let left = Duration::from_millis(state.client.good_until().0.saturating_sub(clock::now().0));
            self.shared.changed.wait_for(state, left.min(LOOK_AT_CLOCK));
        }
    }

    /// From now on, what is read by this session may be cached.
    pub fn has_caches(&self) {
        self.shared.state.lock().has_caches = true;
    }

    /// Caches were dropped, and nothing is cached from now on.
    pub(super) fn has_no_caches(&self) {
        self.shared.state.lock().has_caches = false;
    }

    /// See [`lamassu_anchor::table::Table::doubt`].
    pub fn doubt(&self) -> Option<Doubt> {
        let state = self.shared.state.lock();
        // Each answer to a heartbeat sets another end.
        (state.standing(self.op) == Standing::InDoubt).then(|| Doubt(state.client.good_until().0))
    }

    /// Caches were dropped during this doubt. As long as it lasts, callers wait until the session is good.
    pub fn caches_are_dropped(&self, doubt: Doubt) {
        self.shared.state.lock().dropped_in = Some(doubt);
    }

    /// Waits until the session is good again, at most a term from when it last was. The limit is shared by all waiters.
    /// If there are caches that have not been dropped, it fails instead of waiting: see
    /// [`lamassu_anchor::table::Table::caches_are_dropped`].
    ///
    /// # Errors
    /// [`ServerFault::Ended`], [`ServerFault::Unreachable`].
    pub fn wait_until_good(&self) -> Result<()> {
        let mut state = self.shared.state.lock();
        loop {
            match state.standing(self.op) {
                Standing::Good => return Ok(()),
                Standing::Ended | Standing::GivenUp => return Err(self.shared.connection.error(ServerFault::Ended)),
                Standing::InDoubt => {}
            }
            let good_until = state.client.good_until();
            let until = good_until.0 + self.shared.terms.term().0;
            let left = Duration::from_millis(until.saturating_sub(clock::now().0));
            let must_fail = state.has_caches && state.dropped_in != Some(Doubt(good_until.0));
            if left.is_zero() || must_fail {
                let detail = "it was silent for too long".into();
                return Err(self.shared.connection.error(ServerFault::Unreachable { detail }));
            }
            self.shared.changed.wait_for(&mut state, left.min(LOOK_AT_CLOCK));
        }
    }

    /// Whether the server's policy, as last reported, lets this host make and write files of a profile.
    ///
    /// # Errors
    /// [`ServerFault::Policy`].
    pub fn check_profile(&self, profile: Profile) -> Result<()> {
        let forbidden = self.shared.limits.read().forbids(profile).cloned();
        let Some(Forbidden { rule, what }) = forbidden else { return Ok(()) };
        let is_new = {
            let told_of = &mut *self.shared.told_of.lock();
            let is_new = told_of.get(&rule).is_none_or(|told| told.elapsed() >= SAID_EVERY);
            if is_new {
                told_of.insert(rule.clone(), Instant::now());
            }
            is_new
        };
        if is_new {
            tracing::warn!(server = self.shared.connection.server(), %rule, %what, "refused: the server's policy forbids it");
        }
        Err(self.shared.connection.error(ServerFault::Policy { rule: rule.to_string(), what: what.to_string() }))
    }

    /// How long calls that need the server wait for it.
    pub fn patience(&self) -> Duration {
        Duration::from_millis(self.shared.terms.term().0)
    }

    /// Ends the session. The server is told, if it answers soon. Nothing is read or written by the session afterwards.
    pub fn leave(&self) {
        self.shared.leave();
    }
}

impl Shared {
    fn leave(&self) {
        let mut state = self.state.lock();
        state.is_leaving = true;
        self.kick.notify_one();
        self.changed.notify_all();
        let until = Instant::now() + LEAVE_TIMEOUT;
        while !state.has_left && !state.is_lost {
            if self.changed.wait_until(&mut state, until).timed_out() {
                tracing::warn!(server = self.connection.server(), "the session could not be ended in time");
                break;
            }
        }
        self.is_lost(&mut state);
        drop(state);
        self.tell();
    }

    /// Sends a call whose answer may have a deadline.
    fn send_in_time(&self, state: &mut State, call: Call) {
        state.outbox.push_back(call);
        self.kick.notify_one();
        let nearest = self.locks.nearest_deadline();
        if let Some(nearest) = nearest.filter(|nearest| state.looks_at.is_none_or(|planned| *nearest < planned)) {
            state.looks_at = Some(nearest);
            self.alarm.notify_one();
        }
    }
}
