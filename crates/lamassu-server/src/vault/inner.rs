//! What a vault has under its lock.

use super::{TICK, Told, VAULT};
use crate::arrivals::Arrivals;
use crate::bounds::{Attends, SessionLocks};
use crate::pauses::Pauses;
use crate::policy::current::{LimitsCache, PolicyNo};
use crate::recent::Recent;
use crate::refused::{Answer, Refused};
use crate::state::leases::Use;
use lamassu_anchor::VaultRow;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::Table;
use lamassu_format::header::VaultId;
use lamassu_lease::locks::LockAnswer;
use lamassu_lease::server::{Server, Step};
use lamassu_lease::{Call, Grant, GrantNo, Millis, Reply, SessionId};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tokio::sync::mpsc::Sender;
use tokio::sync::watch;

/// ms. Each tick that finds a vault free looks at its time. So one whose time was not looked at for longer than this
/// was at work. Shorter work counts as the time of those who wait for it.
const AT_WORK: u64 = 5 * TICK.as_millis() as u64;

/// Whether a vault object is used, or why not any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is used.
    Good,
    /// A commit has failed, so the durable state is unknown: the vault must be reopened.
    InDoubt,
    /// Its anchor was retired or replaced.
    GivenUp,
    /// It had no sessions, and was closed to save its files.
    Closed,
}

/// Who uses a vault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Users {
    /// Sessions, which may last.
    Sessions,
    /// Somebody, for a moment.
    Passing,
    /// Nobody, since then.
    NoneSince(Millis),
}

/// The state of the vault, under its lock.
pub struct Inner {
    pub(super) id: VaultId,
    pub(super) table: Arc<dyn Table>,
    pub(super) head: Head,
    pub(super) recent: Recent,
    pub(super) leases: Server,
    /// The hosts of sessions, and where their replies go.
    pub(super) sessions: HashMap<SessionId, Attending>,
    /// The time, and how many pauses its leases know of.
    pub(super) clock: Arc<Pauses>,
    pub(super) pauses: u64,
    /// When the time was last looked at.
    pub(super) looked: Millis,
    /// What its sessions have sent and waits.
    pub(super) arrivals: Arrivals,
    /// Whether hosts have changed since their rights were looked at.
    pub(super) rights: watch::Receiver<()>,
    /// Unless it is good, nothing of the vault changes any more: what is durable is that of another object, which was
    /// or is to be opened.
    pub(super) standing: watch::Sender<Standing>,
    /// Since when nobody has used it, as far as was looked.
    pub(super) unused_since: Option<Millis>,
    /// The properties that a vault keeps for good: its suite, its domain.
    pub(super) row: VaultRow,
    /// Files with profiles that the policy forbids, opened since the vault was last granted to a writer.
    pub(super) opened: HashSet<Vec<u8>>,
}

/// A session.
pub(super) struct Attending {
    pub(super) host: String,
    pub(super) used: Use,
    pub(super) heard: Millis,
    /// The number of its connections so far: messages of earlier ones are ignored.
    pub(super) connections: u64,
    pub(super) replies: Option<Sender<Told>>,
    /// Its host was revoked, or lost its grant.
    pub(super) is_out: bool,
    /// The policy that it knew when it began or was last granted the vault, with the limits of that and later policies.
    pub(super) knows: PolicyNo,
    pub(super) limits: LimitsCache,
    /// The vaults around the vault, for which these limits are.
    pub(super) lies_in: Vec<String>,
    /// Its host's place among the vaults in which it has sessions.
    pub(super) attends: Option<Attends>,
    pub(super) locks: SessionLocks,
}

impl Attending {
    /// A session without a connection.
    pub(super) fn new(
        (host, attends, locks): (String, Option<Attends>, SessionLocks),
        used: Use,
        heard: Millis,
        knows: PolicyNo,
    ) -> Attending {
        let (connections, replies, is_out) = (0, None, false);
        let (limits, lies_in) = Default::default();
        Attending { host, used, heard, connections, replies, is_out, knows, limits, lies_in, attends, locks }
    }
}

impl Inner {
    /// Whether the vault is used.
    pub(super) fn standing(&self) -> Standing {
        *self.standing.borrow()
    }

    /// The vault is used no more. The connections of its sessions end, and so does what is sent of its rows: each keeps
    /// the table open, so that it could not be opened again.
    pub(super) fn end(&mut self, standing: Standing) {
        self.standing.send_replace(standing);
        match standing {
            // What is durable of them goes with the anchor.
            Standing::GivenUp => self.sessions.clear(),
            Standing::Good | Standing::InDoubt | Standing::Closed => {
                for session in self.sessions.values_mut() {
                    // The object that is opened next counts what there is.
                    (session.replies, session.attends) = (None, None);
                    session.locks.set(0);
                }
            }
        }
    }

    /// The answer to a call about locks that would add to those of a host that has as many as it may. A request that no
    /// longer waits gets none: whether it is cancelled is said by the answer to itself. Nor does an unlock that only
    /// frees: whoever closes a file looks at no answer. Without one its host soon reports what it has left.
    pub(super) fn too_many_locks(&self, session: SessionId, call: &Call) -> Step {
        let refused = match call {
            Call::Lock { request, .. } | Call::TestLock { request, .. } => Some(*request),
            Call::Unlock { request, key, range } => self.leases.is_split_by(session, *key, *range).then_some(*request),
            _ => None,
        };
        let reply = refused.map(|request| (session, Reply::Lock { request, answer: LockAnswer::TooMany }));
        Step { replies: reply.into_iter().collect(), ..Step::default() }
    }

    /// Counts the locks of a session.
    pub(super) fn count_locks(&mut self, session: SessionId) {
        if let Some(one) = self.sessions.get_mut(&session) {
            one.locks.set(self.leases.locks_of(session));
        }
    }

    /// Advances the time of the leases.
    pub(super) fn tick(&mut self) -> Step {
        let now = self.now();
        self.leases.tick(now)
    }

    /// Every use of the leases takes the time from here, since a call may come before the tick that would notice a
    /// pause, and before messages that have waited longer.
    pub(super) fn now(&mut self) -> Millis {
        let (now, pauses) = self.clock.look();
        let looked = std::mem::replace(&mut self.looked, now);
        let worked_since = (now.0.saturating_sub(looked.0) > AT_WORK).then_some(looked);
        if pauses != self.pauses {
            // Messages that hosts sent during the pause are still unread, so all count as heard of now, as after a
            // restart.
            self.leases.was_away(now);
            self.pauses = pauses;
        }
        for session in self.leases.overdue(now).collect::<Vec<_>>() {
            let Some(one) = self.sessions.get(&session) else { continue };
            if let Some(arrived) = self.arrivals.first(self.id, &one.host, session) {
                // From the beginning of the work on nobody could release anything.
                let arrived = worked_since.map_or(arrived, |since| arrived.min(since));
                self.leases.has_arrived(session, arrived, now);
            }
        }
        if let Some(since) = worked_since {
            self.leases.was_at_work(since, now);
        }
        now
    }

    /// Checks that there is no session, except for `but`.
    ///
    /// # Errors
    /// [`Refused::InUse`].
    pub fn nobody_has_it(&self, but: Option<SessionId>) -> Answer<()> {
        match self.sessions.iter().find(|(session, _)| Some(**session) != but) {
            Some((_, one)) => Err(Refused::InUse { by: format!("host {}", one.host) }),
            None => Ok(()),
        }
    }

    /// Whether a session of a host may change the table. One that reads may not, although it gets an abandoned vault
    /// exclusively: a policy may forbid its host to write, and that is judged when a session begins.
    ///
    /// # Errors
    /// [`Refused::Ended`].
    pub fn may_change(&self, session: SessionId, host: &str) -> Answer<()> {
        let writes = self.sessions.get(&session).is_some_and(|one| one.host == host && one.used != Use::Reads);
        match writes && self.leases.may_change(session, VAULT) {
            true => Ok(()),
            false => Err(Refused::Ended),
        }
    }

    /// The same by this grant: what was sent in an earlier turn of the session may come late, and the rows of this one
    /// may be those that it began with.
    ///
    /// # Errors
    /// [`Refused::Ended`].
    pub(super) fn may_change_by(&self, session: SessionId, host: &str, grant: GrantNo) -> Answer<()> {
        self.may_change(session, host)?;
        self.leases.may_change_by(session, VAULT, grant).then_some(()).ok_or(Refused::Ended)
    }
}

/// Whether a call is about the vault as a whole: no other object has leases.
pub(super) fn is_of_the_vault(call: &Call) -> bool {
    match call {
        Call::Heartbeat { .. } | Call::Leave => true,
        // Locks are of files, and need no lease.
        Call::Lock { .. } | Call::Unlock { .. } | Call::TestLock { .. } | Call::CancelLock { .. } => true,
        Call::Resume { held, kept, taken_over, .. } => {
            let is_one = |grants: &[Grant]| grants.len() <= 1 && grants.iter().all(|grant| grant.object == VAULT);
            is_one(held) && is_one(taken_over) && kept.len() <= held.len()
        }
        Call::Acquire { object, .. } => *object == VAULT,
        Call::Release { grant, .. } | Call::Keep { grant, .. } | Call::TakenOver { grant } => grant.object == VAULT,
    }
}
