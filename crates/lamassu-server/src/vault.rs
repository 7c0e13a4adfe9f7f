//! One vault: its table, its leases, and its sessions.
//!
//! A vault is used as a whole: its sessions hold a lease of [`VAULT`]. Sessions by turns share the vault with other
//! sessions by turns. Any other session starts only if no session conflicts, and keeps its lease until it ends. Changes
//! of leases are durable before any host learns of them. If that fails, the server ends ([`Lost`]), and restarts from
//! what is durable. A failed write of a table concerns its vault alone, which is then reopened.

mod inner;
mod rights;

use self::inner::{Attending, is_of_the_vault};
pub use self::inner::{Inner, Standing, Users};
use crate::ServerError;
use crate::arrivals::{Arrivals, Arrived};
use crate::audit::Why;
use crate::bounds::{Attends, Bounds};
use crate::caller::Caller;
use crate::counts::Counted;
use crate::metrics::Metrics;
use crate::numbers::{Given, Numbers};
use crate::pauses::Pauses;
use crate::policy::current::{LimitsCache, PolicyNo};
use crate::policy::{self, Judged, Policies, Subject};
use crate::refused::{Answer, At, Lost, Refused};
use crate::state::State;
use crate::state::leases::{Lasting, Use};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{Change, Table};
use lamassu_anchor::{Anchor, AnchorError, VaultRow};
use lamassu_format::header::VaultId;
use lamassu_lease::locks::LOCKS_MAX;
use lamassu_lease::server::{Server, Step};
use lamassu_lease::{Call, GrantNo, Millis, Mode, Object, Reply, SessionId, Terms};
use lamassu_rpc::clock::now;
use lamassu_rpc::proto;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{Sender, error::TrySendError};
use tokio::sync::watch;

/// How often silent sessions are looked for.
pub const TICK: Duration = Duration::from_millis(200);
/// The object number of the vault as a whole.
pub const VAULT: Object = Object(0);
/// Sessions of one host in one vault.
const SESSIONS_MAX: usize = 16;
/// Replies that may be queued for a session. Beyond that its connection is dropped. One message of another session may
/// answer all requests for locks that wait.
pub const REPLIES_MAX: usize = LOCKS_MAX + 64;

/// One vault.
pub struct Vault {
    id: VaultId,
    state: Arc<State>,
    metrics: Metrics,
    policies: Arc<Policies>,
    inner: Mutex<Inner>,
    given: Given,
    /// Those of `inner`, without its lock.
    standing: watch::Receiver<Standing>,
    arrivals: Arrivals,
    bounds: Bounds,
    /// Its place among those that are open. Last: the file is closed before.
    _room: Option<Counted<()>>,
}

/// What all vaults use.
#[derive(Clone)]
pub struct Common {
    /// the durable state
    pub state: Arc<State>,
    /// the server's counters
    pub metrics: Metrics,
    /// the policies in force
    pub policies: Arc<Policies>,
    /// the clock
    pub pauses: Arc<Pauses>,
    /// what hosts have in all vaults together
    pub bounds: Bounds,
    /// how many numbers of sessions were given
    pub numbers: Numbers,
    /// what sessions have sent and waits for a vault
    pub arrivals: Arrivals,
}

/// A reply to a session, and the head of the vault's table at that moment.
pub type Told = (Reply, Head);

/// One connection of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// its session
    pub session: SessionId,
    number: u64,
}

/// A session that has begun.
pub struct Begun {
    /// the session, and its connection
    pub line: Line,
    /// the head of the vault's table
    pub head: Head,
}

impl Vault {
    /// Opens the vault of an anchor's table, with its durable sessions.
    ///
    /// # Errors
    /// [`Refused::Failed`], [`Refused::Lost`].
    pub fn open(
        id: VaultId,
        table: Arc<dyn Table>,
        terms: Terms,
        Common { state, metrics, policies, pauses, bounds, numbers, arrivals }: Common,
    ) -> Answer<Vault> {
        let head = Head::of(&*table)?.ok_or(ServerError::Anchor(AnchorError::Empty))?;
        let row = Anchor::open(table.clone(), &id)?.vault();
        // A right may have ended since its host has begun a session here.
        let mut rights = state.changes();
        rights.mark_changed();
        let (durable, lasting) = state.leases(&id)?;
        let given = numbers.of(&id);
        let (mut leases, step) = match given.count() {
            Some(count) => (Server::start_again(terms, durable, count, now()), Step::default()),
            None => Server::start(terms, durable, now()),
        };
        given.reports().into_iter().for_each(|(session, number)| leases.has_heard(session, number));
        // A session from before this server began may know no more than the first policy that counts here.
        let mut sessions: HashMap<_, Attending> = HashMap::new();
        for Lasting { session, host, used, .. } in lasting {
            let attends = attends(&sessions, &host).or_else(|| bounds.attends_already(&host));
            let locks = bounds.locks.of_session(&host);
            sessions.insert(session, Attending::new((host, attends, locks), used, now(), PolicyNo::default()));
        }
        let recent = bounds.recent.of_vault();
        let (clock, (looked, pauses), opened) = (pauses.clone(), pauses.look(), HashSet::new());
        let (ends, standing) = watch::channel(Standing::Good);
        let inner = Inner {
            id,
            table,
            head,
            recent,
            leases,
            sessions,
            clock,
            pauses,
            looked,
            arrivals: arrivals.clone(),
            rights,
            standing: ends,
            row,
            opened,
            unused_since: None,
        };
        let inner = Mutex::new(inner);
        let vault = Vault { id, state, metrics, policies, inner, given, standing, arrivals, bounds, _room: None };
        vault.carry_out(&mut vault.inner.lock(), step, None)?;
        Ok(vault)
    }

    /// Its id.
    pub fn id(&self) -> VaultId {
        self.id
    }

    /// The same, with its place among those that are open.
    pub fn taking(self, room: Counted<()>) -> Vault {
        Vault { _room: Some(room), ..self }
    }

    /// The head of its table.
    pub fn head(&self) -> Head {
        self.inner.lock().head
    }

    /// Signals when it is used no more.
    pub fn watched(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
    }

    /// A message of a session has arrived, and waits until this is dropped.
    pub fn arrived(&self, host: &str, session: SessionId) -> Arrived {
        self.arrivals.one(self.id, host, session)
    }

    /// Whether it is used, or must be opened again. Waits for nothing.
    pub fn standing(&self) -> Standing {
        *self.standing.borrow()
    }

    /// The hosts that have sessions.
    pub fn hosts(&self) -> Vec<String> {
        self.inner.lock().sessions.values().map(|one| one.host.clone()).collect()
    }

    /// Lets time pass, unless the vault is at work: its time advances with the next tick, and no other vault waits.
    ///
    /// # Errors
    /// [`Lost`].
    pub fn tick(&self) -> std::result::Result<(), Lost> {
        let Some(mut inner) = self.inner.try_lock() else { return Ok(()) };
        let inner = &mut *inner;
        if inner.standing() != Standing::Good {
            return Ok(());
        }
        self.look_at_rights(inner)?;
        let step = inner.tick();
        self.carry_out(inner, step, None)
    }

    /// Whether its leases have work that another tick would do. The object that takes its place does that of one which
    /// is used no more.
    pub fn has_work(&self) -> bool {
        let inner = self.inner.lock();
        inner.standing() == Standing::Good && inner.leases.has_work()
    }

    /// Who uses it now.
    pub fn users(&self) -> Users {
        let Some(mut inner) = self.inner.try_lock() else { return Users::Passing };
        let now = inner.now();
        match () {
            () if !inner.sessions.is_empty() => Users::Sessions,
            () if Arc::strong_count(&inner.table) > 1 => Users::Passing,
            () if inner.standing() != Standing::Good => Users::NoneSince(Millis(0)),
            () => Users::NoneSince(*inner.unused_since.get_or_insert(now)),
        }
    }

    /// Closes it, if it has had no session for `unused` ms and nobody reads its table. It is not used after that. One
    /// that is used no more waits for nothing.
    pub fn close_if_unused(&self, unused: u64) -> bool {
        let Some(mut inner) = self.inner.try_lock() else { return false };
        if !inner.sessions.is_empty() || Arc::strong_count(&inner.table) > 1 {
            inner.unused_since = None;
            return false;
        }
        if inner.standing() != Standing::Good {
            return true;
        }
        let now = inner.now();
        let since = *inner.unused_since.get_or_insert(now);
        let is_closed = since + Millis(unused) <= now;
        if is_closed {
            inner.end(Standing::Closed);
        }
        is_closed
    }

    /// Its table, for reading.
    pub fn table_to_look_at(&self) -> Arc<dyn Table> {
        self.inner.lock().table.clone()
    }

    /// Lets its anchor be retired or replaced, if `may_be` allows it. The vault is not used after that.
    ///
    /// # Errors
    /// Those of `may_be` and `put_away`.
    pub fn give_up(
        &self,
        may_be: impl FnOnce(&Inner) -> Answer<()>,
        put_away: impl FnOnce() -> Answer<()>,
    ) -> Answer<()> {
        let inner = &mut *self.usable()?;
        may_be(inner)?;
        // It may have been put away nevertheless.
        put_away().inspect_err(|_| inner.end(Standing::InDoubt))?;
        inner.end(Standing::GivenUp);
        Ok(())
    }

    /// Makes the step's changes durable, then sends its replies. `ends`: the reason why a session ends, if it is not
    /// silence.
    fn carry_out(
        &self,
        inner: &mut Inner,
        step: Step,
        ends: Option<(SessionId, Why)>,
    ) -> std::result::Result<(), Lost> {
        let host_of = |session| match inner.sessions.get(&session) {
            Some(one) => (one.host.clone(), one.used),
            None => (String::new(), Use::Reads),
        };
        let why = |session| match ends {
            Some((ends, why)) if ends == session => why,
            _ if inner.sessions.get(&session).is_some_and(|one| one.is_out) => Why::Revoked,
            _ if step.held_on.contains(&session) => Why::HeldOn,
            _ if step.misreported.iter().any(|(one, _)| *one == session) => Why::Misreported,
            _ => Why::Silent,
        };
        let against = |session| {
            let (_, beside) = step.misreported.iter().find(|(one, _)| *one == session)?;
            inner.sessions.get(&(*beside)?).map(|one| one.host.clone())
        };
        if let Err(error) =
            self.state.change_leases(&self.id, &step.changes, host_of, |session| (why(session), against(session)))
        {
            // Its leases are ahead of what is durable, and it answers nothing while the server ends.
            inner.end(Standing::InDoubt);
            return Err(Lost(error));
        }
        self.given.set(inner.leases.given());
        self.metrics.held_on(step.held_on.len());
        for (session, reply) in step.replies {
            self.metrics.told(&reply);
            if let Reply::Lock { .. } = reply {
                inner.count_locks(session);
            }
            let Some(one) = inner.sessions.get_mut(&session) else { continue };
            if let Reply::Granted { grant, .. } = &reply {
                // The grant carries the policy, if the session was not told of it before.
                one.knows = self.policies.number();
                if grant.mode == Mode::Exclusive {
                    inner.opened.clear();
                }
            }
            // A client that does not read is disconnected. It gets the reply when it reconnects.
            if let Some(Err(TrySendError::Full(_))) =
                one.replies.as_ref().map(|replies| replies.try_send((reply, inner.head)))
            {
                one.replies = None;
                one.connections += 1;
            }
        }
        // No session ends without a change. This would cost each heartbeat a look at all sessions.
        if !step.changes.is_empty() {
            inner.sessions.retain(|session, _| inner.leases.is_alive(*session));
        }
        Ok(())
    }

    /// Begins a session that uses the vault in this way, unless other sessions conflict. `replaces`: a session of the
    /// same host whose process is gone.
    ///
    /// # Errors
    /// [`Refused::InUse`], [`Refused::Restored`], [`Refused::TooMuch`], [`Refused::Unknown`], [`Refused::Policy`],
    /// [`Refused::Lost`].
    pub fn begin(&self, caller: &Caller, used: Use, replaces: SessionId, replies: Sender<Told>) -> Answer<Begun> {
        let usable = self.usable_by(caller).map_err(|refused| match refused {
            Refused::Ended => Refused::Unknown,
            other => other,
        });
        let (host, inner) = (&*caller.name, &mut *usable?);
        let waits_for = self.state.reopen(&self.id).map_err(Lost)?;
        if !waits_for.is_empty() {
            return Err(Refused::Restored { waits_for: waits_for.into_iter().collect() });
        }
        if inner.sessions.get(&replaces).is_some_and(|one| one.host == host) {
            let now = inner.now();
            let step = inner.leases.end_session(replaces, now);
            self.carry_out(inner, step, Some((replaces, Why::Replaced)))?;
        }
        let step = inner.tick();
        self.carry_out(inner, step, None)?;
        let is_in_the_way = |one: &&Attending| one.used != used || used == Use::Writes;
        if let Some(one) = inner.sessions.values().find(is_in_the_way) {
            let by = match now().0.saturating_sub(one.heard.0) / 1000 {
                0..=9 => format!("host {}", one.host),
                seconds => format!("host {}, last heard from {seconds} s ago", one.host),
            };
            return Err(Refused::InUse { by });
        }
        if inner.sessions.values().filter(|one| one.host == host).count() >= SESSIONS_MAX {
            return Err(Refused::TooMuch("too many sessions of this host"));
        }
        let attends = attends(&inner.sessions, host).or_else(|| self.bounds.attends(host));
        let attends = attends.ok_or(Refused::TooMuch("this host has sessions in as many vaults as it may"))?;
        let subject = self.subject(host, &inner.row);
        let (knows, policy) = self.policies.now();
        // Reading is allowed whatever the policy says.
        if let Some(forbidden) = policy.forbids_vault(&subject).filter(|_| used != Use::Reads) {
            return Err(self.policies.refuse(&subject, At::Session, forbidden));
        }
        let now = inner.now();
        let (session, step) = inner.leases.join(now);
        let its = (host.to_owned(), Some(attends), self.bounds.locks.of_session(host));
        let attending = Attending { connections: 1, replies: Some(replies), ..Attending::new(its, used, now, knows) };
        inner.sessions.insert(session, attending);
        self.carry_out(inner, step, None)?;
        Ok(Begun { line: Line { session, number: 1 }, head: inner.head })
    }

    /// A session has a new connection, whose first message is this report of what it has. In one step: an answer that
    /// is given in between would go to the new connection, about something that the report does not name.
    ///
    /// # Errors
    /// [`Refused::Ended`]; [`Refused::NotNow`]: it is late, and a newer one was heard; [`Refused::Unknown`]; as
    /// [`Vault::call`].
    pub fn resumes(&self, caller: &Caller, session: SessionId, report: Call, replies: Sender<Told>) -> Answer<Begun> {
        let Call::Resume { number, .. } = report else { return Err(Refused::Nonsense) };
        if !is_of_the_vault(&report) {
            return Err(Refused::Nonsense);
        }
        let (host, inner) = (&*caller.name, &mut *self.usable_by(caller)?);
        let now = inner.now();
        let known = inner.sessions.get_mut(&session).filter(|one| one.host == host).ok_or(Refused::Ended)?;
        if inner.leases.is_late(session, number) {
            return Err(Refused::NotNow);
        }
        known.replies = Some(replies);
        known.connections += 1;
        known.heard = now;
        let begun = Begun { line: Line { session, number: known.connections }, head: inner.head };
        let (step, ends) = match &report {
            Call::Resume { locks, .. } if !known.locks.can_be(locks.len()) => {
                (inner.leases.end_session(session, now), Some((session, Why::Misreported)))
            }
            _ => (inner.leases.call(session, report, now), None),
        };
        self.given.hear(session, number, |session| inner.leases.is_alive(session));
        self.carry_out(inner, step, ends)?;
        inner.count_locks(session);
        Ok(begun)
    }

    /// Handles a session's message from its newest connection. Its effect is durable when this returns. A report begins
    /// a connection: [`Vault::resumes`].
    ///
    /// # Errors
    /// [`Refused::Ended`]: there is a newer connection, or no session; [`Refused::NotNow`]; [`Refused::Failed`].
    pub fn call(&self, line: Line, call: Call) -> Answer<()> {
        if !is_of_the_vault(&call) || matches!(call, Call::Resume { .. }) {
            return Err(Refused::Nonsense);
        }
        let inner = &mut *self.usable()?;
        let now = inner.now();
        let known = inner.sessions.get_mut(&line.session).filter(|one| one.connections == line.number);
        let known = known.ok_or(Refused::Ended)?;
        known.heard = now;
        if known.used == Use::Reads && matches!(call, Call::Acquire { mode: Mode::Exclusive, .. }) {
            return Err(Refused::Nonsense);
        }
        let leaves = (call == Call::Leave).then_some((line.session, Why::Left));
        let step = match inner.leases.may_add_locks(line.session, &call) && !known.locks.has_room() {
            true => inner.too_many_locks(line.session, &call),
            false => inner.leases.call(line.session, call, now),
        };
        self.carry_out(inner, step, leaves)?;
        inner.count_locks(line.session);
        Ok(())
    }

    /// Commits changes based on `base`, for a session with this grant, an exclusive one. A repeated commit succeeds
    /// without effect.
    ///
    /// # Errors
    /// [`Refused::Unknown`], [`Refused::Ended`], [`Refused::OtherHead`], [`Refused::Policy`], [`Refused::NoAnchor`],
    /// [`Refused::TooMuch`], [`Refused::InDoubt`]; [`Refused::Failed`]: it was not tried.
    pub fn commit(
        &self,
        caller: &Caller,
        (session, grant): (SessionId, GrantNo),
        base: Head,
        changes: &[Change],
    ) -> Answer<Head> {
        let inner = &mut *self.usable_by(caller)?;
        let step = inner.tick();
        self.carry_out(inner, step, None)?;
        inner.may_change_by(session, &caller.name, grant)?;
        let after = base.after(changes);
        if inner.head == after {
            return Ok(after);
        }
        if inner.head != base {
            return Err(Refused::OtherHead);
        }
        let opens = self.judge(inner, session, changes)?;
        let noted: Vec<_> = changes.iter().cloned().chain([after.change()]).collect();
        if let Err(error) = inner.table.commit(&noted) {
            return Err(match Refused::from(error) {
                // Whatever the table says: it was not made here, and who opens it next may find it made. The host
                // repeats it, and the head shows which.
                Refused::Failed(error) => {
                    inner.end(Standing::InDoubt);
                    Refused::InDoubt(error)
                }
                // A table that has no room to grow is as it was.
                other => other,
            });
        }
        inner.head = after;
        // The next commit is judged by what this one counts.
        if let Some(row) = policy::vault_row(changes) {
            inner.row = row;
        }
        inner.opened.extend(opens);
        inner.recent.push(base, changes);
        Ok(after)
    }

    /// Checks the changes of a session against the policy. Returns the files with forbidden profiles that they open.
    fn judge(&self, inner: &mut Inner, session: SessionId, changes: &[Change]) -> Answer<Vec<Vec<u8>>> {
        let Some(one) = inner.sessions.get_mut(&session) else { return Err(Refused::Ended) };
        let subject = self.subject(&one.host, &inner.row);
        if one.lies_in != subject.around {
            // Its place may change while it has sessions, if the anchor of a vault around it moves.
            (one.lies_in, one.limits) = (subject.around.clone(), LimitsCache::default());
        }
        let limits = self.policies.limits(&subject, one.knows, &mut one.limits);
        match policy::judge(&*inner.table, &inner.row, changes, &limits, &inner.opened)? {
            Judged::Good(opens) => Ok(opens),
            Judged::Forbidden(forbidden) => Err(self.policies.refuse(&subject, At::Commit, forbidden)),
            Judged::Nonsense => Err(Refused::NoAnchor),
        }
    }

    /// This vault, as a host uses it.
    fn subject(&self, host: &str, row: &VaultRow) -> Subject {
        Subject::of(host, row, self.state.with_those_around(&self.id))
    }

    /// Whether the policy has changed since the session was told of `told`.
    pub fn is_news(&self, told: Option<PolicyNo>) -> bool {
        told != Some(self.policies.number())
    }

    /// What the policy in force forbids a host here, if it has changed since `told`.
    pub fn tells(&self, host: &str, told: &mut Option<PolicyNo>) -> Option<proto::Policy> {
        if !self.is_news(*told) {
            return None;
        }
        let (number, policy) = self.policies.now();
        *told = Some(number);
        let subject = self.subject(host, &self.inner.lock().row);
        Some(policy.limits(&subject).to_proto())
    }

    /// Time in ms until a lease that another session waits for may be recalled, if that is before the next tick.
    pub fn wakes_after(&self) -> Option<u64> {
        let now = now();
        let wake = self.inner.lock().leases.wake_after(now)?;
        Some(wake.0 - now.0).filter(|after| *after < TICK.as_millis() as u64)
    }

    /// The rows, for a session that has a lease of the vault. `since`: the head of the session's copy.
    ///
    /// # Errors
    /// [`Refused::Unknown`], [`Refused::Ended`]; [`Refused::NotNow`]: the session has not reported its lease since the
    /// vault was opened.
    pub fn rows(&self, caller: &Caller, session: SessionId, since: Option<Head>) -> Answer<Rows> {
        let inner = self.usable_by(caller)?;
        inner.sessions.get(&session).filter(|one| one.host == caller.name).ok_or(Refused::Ended)?;
        match inner.leases.mode_of(session, VAULT) {
            Some(_) => Ok(Rows {
                head: inner.head,
                since: since.and_then(|since| inner.recent.since(since)),
                table: inner.table.clone(),
                standing: self.standing.clone(),
            }),
            // It may have a shared lease, which is not durable. Told that it has ended, a host gives up its locks.
            None if !inner.leases.is_back(session) => Err(Refused::NotNow),
            None => Err(Refused::Ended),
        }
    }
}

/// The place of a host among the vaults in which it has sessions, if it has some in this one.
fn attends(sessions: &HashMap<SessionId, Attending>, host: &str) -> Option<Attends> {
    sessions.values().find(|one| one.host == host)?.attends.clone()
}

/// The rows that a session is sent.
pub struct Rows {
    /// the head of the table
    pub head: Head,
    /// the commits since the head of the session's copy; `None`: it needs all rows
    pub since: Option<Vec<Arc<[u8]>>>,
    /// all rows
    pub table: Arc<dyn Table>,
    /// Unless it stays good, they are sent no further: who sends them keeps the table open.
    pub standing: watch::Receiver<Standing>,
}

#[cfg(test)]
pub(crate) mod tests;
